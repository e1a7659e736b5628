/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nybble: attention straight over a quantized KV cache, and the fused GeGLU that stands beside it.
 *
 * Reading order: status and errors, context, formats, quantize and dequantize, attention, GeGLU,
 * KV cache, safetensors files, introspection.
 *
 * Conventions, which hold for every declaration unless it says otherwise:
 *
 *   Sizes     are int64_t and count elements; a name that counts bytes ends in _bytes, one that
 *             counts tokens in _tokens.
 *   Strides   count elements of the tensor's dtype (uint32_t words for packed codes), as NumPy's
 *             and MLX's do after division by the item size. The last axis is always contiguous.
 *             A stride may be negative; the stride of an axis of length 1 is never looked at. An
 *             input's stride may be zero (broadcast), an output's must not.
 *   Alignment every pointer is aligned to its element (4 bytes for packed codes), no more.
 *   Structs   that start with `struct_size` want it set to sizeof(the struct), or use the matching
 *             _INIT macro. Fields added later come at the end, and 0 in them means what the
 *             library did before they were added.
 *   Errors    every call that can fail returns nyb_status. On failure outputs, caches and files are
 *             as they were, and nyb_last_error() gives a sentence that names the field, its value
 *             and what would be right. The library never prints and never ends the process.
 *   Threads   a context may be used by several threads at once. Two calls must not write the same
 *             output, workspace or cache at once.
 *   Run calls (nyb_*_run, nyb_cache_append while it need not grow) do not allocate.
 */
#ifndef NYBBLE_H
#define NYBBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NYB_VERSION_MAJOR 0
#define NYB_VERSION_MINOR 1
#define NYB_VERSION_PATCH 0

#if defined(NYB_STATIC)
#define NYB_API
#elif defined(_WIN32)
#define NYB_API __declspec(dllimport)
#else
#define NYB_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library at run time, "major.minor.patch". Static storage. */
NYB_API const char *nyb_version(void);

/* ---- Status and errors -------------------------------------------------------------------- */

typedef enum nyb_status {
  NYB_OK = 0,
  NYB_ERROR_NULL = 1,            /* a pointer that must be set is NULL */
  NYB_ERROR_STRUCT_SIZE = 2,     /* struct_size is none that this library knows */
  NYB_ERROR_ENUM = 3,            /* an enum field holds no value of its type */
  NYB_ERROR_SHAPE = 4,           /* a size is negative, zero where it may not be, or too large */
  NYB_ERROR_HEADS = 5,           /* query_heads is not a multiple of kv_heads */
  NYB_ERROR_BITS = 6,            /* no such width */
  NYB_ERROR_GROUP_SIZE = 7,      /* no such group size, or it does not divide the row */
  NYB_ERROR_DTYPE = 8,           /* a dtype that this field cannot have */
  NYB_ERROR_STRIDE = 9,          /* rows of an output run into each other, or out of int64 */
  NYB_ERROR_ALIGNMENT = 10,      /* a pointer is not aligned to its element */
  NYB_ERROR_LENGTH = 11,         /* a sequence length is negative or beyond the capacity */
  NYB_ERROR_OVERLAP = 12,        /* an output overlaps an input, a workspace or another output */
  NYB_ERROR_NON_FINITE = 13,     /* NaN or infinity handed to quantize, append or as a scale */
  NYB_ERROR_WORKSPACE = 14,      /* the workspace is missing, too small or misaligned */
  NYB_ERROR_OUT_OF_MEMORY = 15,  /* the allocator returned NULL */
  NYB_ERROR_UNSUPPORTED = 16,    /* well-formed, but not on this machine or this path */
  NYB_ERROR_ENVIRONMENT = 17,    /* NYBBLE_* holds a value that means nothing */
  NYB_ERROR_VALUE = 18,          /* a number outside its documented range */
  NYB_ERROR_IO = 19,             /* the operating system refused; the sentence has its words */
  NYB_ERROR_FILE_TRUNCATED = 20, /* a file ends before its header says that it does */
  NYB_ERROR_FILE_FORMAT = 21,    /* a file is not what it should be */
  NYB_ERROR_NOT_FOUND = 22       /* no tensor or metadata key of that name */
} nyb_status;

/* "NYB_ERROR_HEADS" for NYB_ERROR_HEADS; "NYB_ERROR_?" for a number that is no status. Static. */
NYB_API const char *nyb_status_name(nyb_status status);

/* The sentence of this thread's last failed call, "" before the first. It is valid until the next
 * failing call of the same thread; a call that succeeds leaves it alone. */
NYB_API const char *nyb_last_error(void);

/* ---- Types shared by all operations ------------------------------------------------------- */

typedef enum nyb_dtype {
  NYB_F32 = 0,
  NYB_F16 = 1, /* IEEE 754 binary16 */
  NYB_BF16 = 2 /* the upper half of an f32 */
} nyb_dtype;

/* Bytes of one element; 0 for a number that is no dtype. */
NYB_API size_t nyb_dtype_bytes(nyb_dtype dtype);

/* A view of rows: [batch, head, row, element], the last axis contiguous. stride[] counts elements
 * from one batch entry, head and row to the next. [B,H,L,D] has {H*L*D, L*D, D}; [B,L,H,D] seen as
 * [B,H,L,D] has {L*H*D, D, H*D}. */
typedef struct nyb_input {
  const void *data;
  nyb_dtype dtype;
  int64_t stride[3];
} nyb_input;

typedef struct nyb_output {
  void *data;
  nyb_dtype dtype;
  int64_t stride[3];
} nyb_output;

/* Which of the two routes to the same result a call takes. An explicit value wins; AUTO follows the
 * environment (NYBBLE_PATH for attention, NYBBLE_GEGLU for GeGLU: "fused", "compat" or "auto",
 * read when the context is created) and otherwise means FUSED where it is supported. */
typedef enum nyb_path {
  NYB_PATH_AUTO = 0,
  NYB_PATH_FUSED = 1, /* reads the packed bytes once; never holds a score row or a float cache */
  NYB_PATH_COMPAT = 2 /* the spelled-out steps of docs/numerics.md, one after the other */
} nyb_path;

/* A stream of the backend that the context belongs to; NULL on the CPU. */
typedef void *nyb_stream;

/* ---- Context ------------------------------------------------------------------------------ */

typedef struct nyb_context nyb_context;

typedef enum nyb_isa {
  NYB_ISA_AUTO = 0, /* NYBBLE_ISA if it is set, else the best that runs here */
  NYB_ISA_SCALAR = 1,
  NYB_ISA_AVX2 = 2,   /* with FMA and F16C */
  NYB_ISA_AVX512 = 3, /* F, BW, DQ, VL, and VNNI */
  NYB_ISA_NEON = 4    /* AArch64 Advanced SIMD */
} nyb_isa;

/* "scalar", "avx2", "avx512", "neon", "auto"; "?" for a number that is no ISA. Static storage. */
NYB_API const char *nyb_isa_name(nyb_isa isa);

/* Runs task(task_data, 0 .. task_count-1), each index once, in any order, on any threads, and
 * returns when all have returned. Running them one after the other is allowed. */
typedef void (*nyb_task)(void *task_data, int64_t task_index);
typedef void (*nyb_parallel_for)(void *user_data, int64_t task_count, nyb_task task,
                                 void *task_data);

typedef struct nyb_allocator {
  /* Memory of at least `bytes` bytes aligned to `alignment` (a power of two), or NULL. */
  void *(*allocate)(void *user_data, size_t bytes, size_t alignment);
  void (*release)(void *user_data, void *memory); /* memory is never NULL */
  void *user_data;
} nyb_allocator;

typedef struct nyb_context_options {
  size_t struct_size;
  nyb_isa isa;
  /* How many tasks may run at once. 0: as many as this process has processors, or NYBBLE_THREADS;
   * 1: the calling thread only. The result does not depend on it by a single bit. */
  int64_t threads;
  /* The caller's own parallel-for; NULL takes a built-in pool of `threads` threads, which serves one
   * call at a time (a second thread's call waits its turn). */
  nyb_parallel_for parallel_for;
  void *parallel_for_data;
  nyb_allocator allocator; /* both functions NULL: the C library's */
} nyb_context_options;

#define NYB_CONTEXT_OPTIONS_INIT {.struct_size = sizeof(nyb_context_options)}

/* Makes a context. options may be NULL (all defaults). Fails with NYB_ERROR_ENVIRONMENT where a
 * NYBBLE_* variable holds a word that it does not know, and with NYB_ERROR_UNSUPPORTED where the
 * ISA asked for does not run here. *context is written only on success. */
NYB_API nyb_status nyb_context_create(const nyb_context_options *options, nyb_context **context);

/* Ends a context; every cache made with it must be destroyed before. NULL is allowed. */
NYB_API void nyb_context_destroy(nyb_context *context);

NYB_API nyb_isa nyb_context_isa(const nyb_context *context);
NYB_API int64_t nyb_context_threads(const nyb_context *context);

/* ---- Formats of stored rows --------------------------------------------------------------- */

typedef enum nyb_scheme {
  NYB_PLAIN = 0, /* the elements themselves, in `dtype` */
  NYB_AFFINE = 1 /* MLX's affine quantization: value = scale * code + bias for each group */
} nyb_scheme;

/* How rows of K or V are stored. docs/formats.md shows each layout byte by byte. */
typedef struct nyb_format {
  nyb_scheme scheme;
  int32_t bits;       /* affine: 2, 3, 4, 5, 6 or 8; plain: 0 */
  int32_t group_size; /* affine: 32, 64 or 128 elements share a scale and a bias; plain: 0 */
  nyb_dtype dtype;    /* affine: of scales and biases; plain: of the elements */
} nyb_format;

/* Bytes that one row of `dim` elements takes, scales and biases included; -1, with
 * nyb_last_error(), for a format that does not exist or does not fit the row. */
NYB_API int64_t nyb_format_row_bytes(const nyb_format *format, int64_t dim);

/* Stored rows: one of K or V, [batch, kv_heads, tokens, dim].
 *   plain:  codes are the elements, codes_stride counts elements; scales and biases are NULL.
 *   affine: codes are uint32_t words, dim*bits/32 a row, a little-endian bit stream in which element
 *           i takes bits [i*bits, (i+1)*bits); codes_stride counts words. scales and biases are
 *           format.dtype, dim/group_size a row, with strides of their own. */
typedef struct nyb_rows {
  nyb_format format;
  const void *codes;
  const void *scales;
  const void *biases;
  int64_t codes_stride[3]; /* batch, head, token */
  int64_t scales_stride[3];
  int64_t biases_stride[3];
} nyb_rows;

/* ---- Quantize and dequantize -------------------------------------------------------------- */

/* MLX's quantizer differs between its CPU and its GPU backends (docs/numerics.md, section 1). */
typedef enum nyb_rule {
  NYB_RULE_MLX_CPU = 0, /* true maximum, half to even, codes clamped on both sides */
  NYB_RULE_MLX_GPU = 1  /* maximum starts at 0, half away from zero, codes clamped from above */
} nyb_rule;

/* Rows of floats [rows, dim] to rows of codes. Source: docs/numerics.md, section 1.1. With
 * input_dtype == format.dtype and NYB_RULE_MLX_CPU the result is bit-identical to mx.quantize.
 * Strides go from row to row: input elements, uint32_t words, scales, biases.
 * The outputs may not overlap the input or each other. */
typedef struct nyb_quantize {
  size_t struct_size;
  nyb_format format; /* affine, or plain (which converts) */
  nyb_rule rule;
  int64_t rows, dim;
  const void *input;
  nyb_dtype input_dtype;
  int64_t input_stride;
  void *codes;
  int64_t codes_stride;
  void *scales;
  int64_t scales_stride;
  void *biases;
  int64_t biases_stride;
} nyb_quantize;

#define NYB_QUANTIZE_INIT {.struct_size = sizeof(nyb_quantize)}

/* NYB_ERROR_NON_FINITE names the row and column of the first NaN or infinity, or the row and group
 * whose maximum minus minimum overflows f32 or whose scale overflows format.dtype; nothing is
 * written then. */
NYB_API nyb_status nyb_quantize_run(nyb_context *context, const nyb_quantize *quantize);

/* Rows of codes back to floats: T(T(T(scale) * code) + bias), T rounding to format.dtype, as
 * mx.dequantize; then converted to output_dtype. */
typedef struct nyb_dequantize {
  size_t struct_size;
  nyb_format format;
  int64_t rows, dim;
  const void *codes;
  int64_t codes_stride;
  const void *scales;
  int64_t scales_stride;
  const void *biases;
  int64_t biases_stride;
  void *output;
  nyb_dtype output_dtype;
  int64_t output_stride;
} nyb_dequantize;

#define NYB_DEQUANTIZE_INIT {.struct_size = sizeof(nyb_dequantize)}

NYB_API nyb_status nyb_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize);

/* ---- Attention ---------------------------------------------------------------------------- */

typedef enum nyb_mask {
  NYB_MASK_NONE = 0,  /* every query row sees the whole sequence */
  NYB_MASK_CAUSAL = 1 /* bottom-right: query row i of query_len sees tokens
                         [0, length - query_len + i]; rows before the sequence see none */
} nyb_mask;

/* Where values are rounded on the way (docs/numerics.md, sections 2, 3 and 8); T is q's dtype. */
typedef enum nyb_rounding {
  NYB_ROUNDING_EXACT = 0, /* only the output is rounded: compare with f64, PyTorch, FlashInfer */
  NYB_ROUNDING_MLX = 1    /* T(q * T(scale)) and T(score) too, as models served by MLX expect */
} nyb_rounding;

/* out = softmax(scale * q k^T + mask) v, for each batch entry and query head; query head h attends
 * over KV head h / (query_heads / kv_heads).
 *
 * Deterministic: the split of the tokens depends on their number alone, so that a row has the same
 * bits alone, in any batch, beside any other rows and on any number of threads.
 *
 * A row that sees no token gives zeros and lse = -inf. Nothing beyond a sequence's length is read
 * into the result. */
typedef struct nyb_attention {
  size_t struct_size;
  int64_t batch;           /* >= 1 */
  int64_t query_heads;     /* a multiple of kv_heads */
  int64_t kv_heads;        /* >= 1 */
  int64_t query_len;       /* query rows per sequence, >= 1 */
  int64_t key_dim;         /* length of a row of q and k */
  int64_t value_dim;       /* length of a row of v and out */
  int64_t capacity_tokens; /* tokens that k and v have room for; bounds lengths */
  const int32_t *lengths;  /* [batch]: tokens of each sequence, the query rows' own included */
  nyb_input q;             /* [batch, query_heads, query_len, key_dim] */
  nyb_rows k;              /* [batch, kv_heads, capacity_tokens, key_dim] */
  nyb_rows v;              /* [batch, kv_heads, capacity_tokens, value_dim] */
  nyb_output out;          /* [batch, query_heads, query_len, value_dim]; overlaps nothing */
  nyb_output lse;          /* optional (data NULL): [batch, query_heads, query_len] as f32, the
                              natural log of the sum of exp(score), for merging; stride[2] is from
                              query row to query row */
  float scale;             /* usually 1/sqrt(key_dim); 0 is refused as forgotten */
  nyb_mask mask;
  nyb_path path;
  nyb_rounding rounding;
} nyb_attention;

#define NYB_ATTENTION_INIT {.struct_size = sizeof(nyb_attention)}

typedef struct nyb_attention_plan {
  size_t struct_size;
  nyb_path path;          /* FUSED or COMPAT: the one that run will take */
  size_t workspace_bytes; /* for run; aligned to NYB_WORKSPACE_ALIGNMENT */
  const char *reason;     /* why this path, in a sentence; static storage */
  const char *key_kernel; /* names as nyb_kernel_at() gives them; "" on the COMPAT path */
  const char *value_kernel;
} nyb_attention_plan;

#define NYB_ATTENTION_PLAN_INIT {.struct_size = sizeof(nyb_attention_plan)}
#define NYB_WORKSPACE_ALIGNMENT 64

/* Checks a descriptor, chooses the path and says how much workspace run needs: the support query.
 * Looks at shapes, formats, strides, pointers (not through them, lengths excepted). The workspace
 * fits every later call whose fields differ only in pointers and in lengths, up to capacity_tokens;
 * plan once, run at every step. */
NYB_API nyb_status nyb_attention_plan_query(nyb_context *context, const nyb_attention *attention,
                                            nyb_attention_plan *plan);

/* Runs it. workspace may be NULL where the plan asked for 0 bytes; its contents need not be kept
 * between calls. */
NYB_API nyb_status nyb_attention_run(nyb_context *context, const nyb_attention *attention,
                                     void *workspace, size_t workspace_bytes, nyb_stream stream);

/* ---- GeGLU -------------------------------------------------------------------------------- */

/* out = gelu_tanh(gate) * up over [rows, columns], every step rounded to the dtype, in the order of
 * docs/numerics.md, section 4. gate, up and out have one dtype. For f16 and bf16 every bit is fixed,
 * on both paths, on every backend; f32 stays within the bound stated there. Row strides may
 * differ (two halves of one tensor). out may be exactly gate or exactly up (same pointer and
 * stride); any other overlap is refused. */
typedef struct nyb_geglu {
  size_t struct_size;
  int64_t rows, columns;
  nyb_dtype dtype;
  const void *gate;
  int64_t gate_stride;
  const void *up;
  int64_t up_stride;
  void *out;
  int64_t out_stride;
  nyb_path path;
} nyb_geglu;

#define NYB_GEGLU_INIT {.struct_size = sizeof(nyb_geglu)}

NYB_API nyb_status nyb_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_stream stream);

/* ---- KV cache ----------------------------------------------------------------------------- */

/* One layer's keys and values, quantized as they are appended. Memory grows geometrically. */
typedef struct nyb_cache nyb_cache;

typedef struct nyb_cache_options {
  size_t struct_size;
  int64_t batch, kv_heads, key_dim, value_dim;
  nyb_format key_format, value_format;
  nyb_rule rule;
  int64_t initial_capacity_tokens; /* 0: grown at the first append */
  int64_t max_tokens;              /* an append beyond it fails; 0: no limit but int32 lengths */
} nyb_cache_options;

#define NYB_CACHE_OPTIONS_INIT {.struct_size = sizeof(nyb_cache_options)}

typedef struct nyb_cache_usage {
  size_t struct_size;
  int64_t used_bytes;      /* tokens held, codes + scales + biases, over all sequences */
  int64_t allocated_bytes; /* what the allocator gave for them */
  int64_t capacity_tokens; /* of each sequence */
  int64_t reallocations;   /* since creation */
  int64_t copied_bytes;    /* moved by growing, since creation */
} nyb_cache_usage;

#define NYB_CACHE_USAGE_INIT {.struct_size = sizeof(nyb_cache_usage)}

/* The context must outlive the cache. *cache is written only on success. */
NYB_API nyb_status nyb_cache_create(nyb_context *context, const nyb_cache_options *options,
                                    nyb_cache **cache);
NYB_API void nyb_cache_destroy(nyb_cache *cache); /* NULL is allowed */

/* Appends `tokens` rows to every sequence: key [batch, kv_heads, tokens, key_dim] and value
 * [batch, kv_heads, tokens, value_dim], any float dtype; one pass, no copy. On failure the cache
 * holds what it held. 0 tokens is allowed. */
NYB_API nyb_status nyb_cache_append(nyb_cache *cache, int64_t tokens, const nyb_input *key,
                                    const nyb_input *value);

/* Makes room for `tokens` tokens in all, so that appends up to there do not allocate. */
NYB_API nyb_status nyb_cache_reserve(nyb_cache *cache, int64_t tokens);

/* Drops the last `tokens` tokens of every sequence, or all that it has; *trimmed (may be NULL) gets
 * the most that a sequence lost. Memory is kept. */
NYB_API nyb_status nyb_cache_trim(nyb_cache *cache, int64_t tokens, int64_t *trimmed);

/* Empties the cache; memory is kept. */
NYB_API nyb_status nyb_cache_reset(nyb_cache *cache);

/* Tokens of a sequence; -1, with nyb_last_error(), for one that does not exist. */
NYB_API int64_t nyb_cache_length(const nyb_cache *cache, int64_t sequence);

NYB_API nyb_status nyb_cache_usage_query(const nyb_cache *cache, nyb_cache_usage *usage);

/* Fills batch, kv_heads, key_dim, value_dim, capacity_tokens, lengths, k and v of *attention and
 * leaves the other fields alone. The pointers hold until the next append that grows, reserve or
 * destroy; lengths follows the cache. */
NYB_API nyb_status nyb_cache_view(const nyb_cache *cache, nyb_attention *attention);

/* ---- safetensors files -------------------------------------------------------------------- */

/* A file open for reading, memory-mapped. The whole header is checked at opening: sizes, bounds,
 * overlaps, dtypes, duplicate names, metadata types. One file may be read by several threads. */
typedef struct nyb_safetensors nyb_safetensors;

#define NYB_SAFETENSORS_MAX_RANK 8

typedef struct nyb_safetensors_tensor {
  const char *name;  /* UTF-8; lives as long as the file is open, as all pointers here */
  const char *dtype; /* the file's own word: "F32", "BF16", "U32", ... */
  int64_t rank;
  int64_t shape[NYB_SAFETENSORS_MAX_RANK];
  const void *data; /* in the mapping; may be unaligned */
  int64_t bytes;
} nyb_safetensors_tensor;

NYB_API nyb_status nyb_safetensors_open(nyb_context *context, const char *path,
                                        nyb_safetensors **file);
NYB_API void nyb_safetensors_close(nyb_safetensors *file); /* NULL is allowed */

NYB_API int64_t nyb_safetensors_count(const nyb_safetensors *file);
NYB_API nyb_status nyb_safetensors_at(const nyb_safetensors *file, int64_t index,
                                      nyb_safetensors_tensor *tensor);
NYB_API nyb_status nyb_safetensors_find(const nyb_safetensors *file, const char *name,
                                        nyb_safetensors_tensor *tensor);

typedef struct nyb_metadata {
  const char *key, *value; /* UTF-8 */
} nyb_metadata;

NYB_API int64_t nyb_safetensors_metadata_count(const nyb_safetensors *file);
NYB_API nyb_status nyb_safetensors_metadata_at(const nyb_safetensors *file, int64_t index,
                                               nyb_metadata *metadata);

/* Writes a file: to a temporary name beside it, synced, then renamed; a failure leaves whatever
 * stood at `path` as it was. Tensors are written in the given order, without padding. */
NYB_API nyb_status nyb_safetensors_write(nyb_context *context, const char *path,
                                         const nyb_safetensors_tensor *tensors,
                                         int64_t tensor_count, const nyb_metadata *metadata,
                                         int64_t metadata_count);

/* ---- Introspection ------------------------------------------------------------------------ */

/* Every kernel of the library, listed once, whether or not it runs here. */
typedef struct nyb_kernel {
  const char *name;      /* "attention_scores_affine4_avx2" */
  const char *operation; /* "attention_scores" */
  const char *format;    /* "affine4", "plain_bf16"; for GeGLU the dtype */
  nyb_isa isa;
  bool runs_here;
  const char *reason; /* why it does not run here, or "" */
} nyb_kernel;

NYB_API int64_t nyb_kernel_count(void);
NYB_API nyb_status nyb_kernel_at(int64_t index, nyb_kernel *kernel);

/* How often the run calls of this context used that kernel. */
NYB_API int64_t nyb_kernel_calls(const nyb_context *context, int64_t index);

typedef struct nyb_counters {
  size_t struct_size;
  int64_t attention_fused;
  int64_t attention_compat;
  int64_t geglu_fused;
  int64_t geglu_compat;
  int64_t quantize;
  int64_t dequantize;
  int64_t cache_append;
} nyb_counters;

#define NYB_COUNTERS_INIT {.struct_size = sizeof(nyb_counters)}

/* Calls that succeeded, since the context was made or the counters were cleared. */
NYB_API nyb_status nyb_counters_query(const nyb_context *context, nyb_counters *counters);
NYB_API void nyb_counters_clear(nyb_context *context);

/* The CPU features found here, of those that the library looks for, space-separated. Valid in the
 * calling thread for its lifetime. */
NYB_API const char *nyb_cpu_features(void);

#ifdef __cplusplus
}
#endif

#endif /* NYBBLE_H */
