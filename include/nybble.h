/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nybble: attention straight over a quantized KV cache, and the fused GeGLU that stands beside it.
 *
 * Reading order: status and errors, context, formats, quantize and dequantize, attention, GeGLU,
 * KV cache, safetensors files, saved caches, introspection.
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
 *   Structs   that start with `struct_size` can grow; start from the matching _INIT macro. Fields
 *             added later come at the end, and 0 in them means what the library did before. A
 *             caller's struct may be smaller than the library's, down to that of the first version;
 *             it may be larger if the bytes that the library does not know are 0. Of a result
 *             struct at most struct_size bytes are written. The other structs never change.
 *   Overlap   two views overlap when an element of one shares a byte with an element of the other.
 *             Interleaved views (two halves of each row, say) do not, and are accepted where they
 *             repeat with the same largest stride; else views whose address ranges cross are
 *             refused.
 *   Errors    every call that can fail returns nyb_status. On failure outputs, caches and files are
 *             as they were, and nyb_last_error() gives a sentence that names the field, its value
 *             and what would be right. The library never prints and never ends the process. Treat
 *             a status number that you do not know as a failure.
 *   Threads   a context may be used by several threads at once. No call may write an output,
 *             workspace or cache that another reads or writes at that time (an append may free
 *             what a view points to).
 *   Streams   the last argument of run calls is a stream of the context's backend; on the CPU it
 *             must be NULL, and the call has finished when it returns. On CUDA it is a CUstream
 *             (NULL: the default one), the call returns once the work is queued there, and every
 *             data pointer of a descriptor, lengths, other numbers and workspace too, is device
 *             memory, unless its field says otherwise.
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
#elif defined(_WIN32) && defined(NYB_BUILDING)
#define NYB_API __declspec(dllexport)
#elif defined(_WIN32)
#define NYB_API __declspec(dllimport)
#else
#define NYB_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
template <typename type>
inline type nyb_init() {
  type zeros = type();
  zeros.struct_size = sizeof(type);
  return zeros;
}
#define NYB_INIT(type) nyb_init<type>()
extern "C" {
#else
#define NYB_INIT(type) \
  { .struct_size = sizeof(type) }
#endif

/* The version of the library at run time, "major.minor.patch". Static storage. */
NYB_API const char *nyb_version(void);

/* ---- Status and errors -------------------------------------------------------------------- */

typedef enum nyb_status {
  NYB_OK = 0,
  NYB_ERROR_NULL = 1,           /* a pointer that must be set is NULL */
  NYB_ERROR_STRUCT_SIZE = 2,    /* struct_size is none that this library knows */
  NYB_ERROR_ENUM = 3,           /* an enum field holds no value of its type */
  NYB_ERROR_SHAPE = 4,          /* a size is negative, zero where it may not be, or too large */
  NYB_ERROR_HEADS = 5,          /* query_heads is not a multiple of kv_heads */
  NYB_ERROR_BITS = 6,           /* no such width */
  NYB_ERROR_GROUP_SIZE = 7,     /* no such group size, or it does not divide the row */
  NYB_ERROR_DTYPE = 8,          /* a dtype that this field cannot have */
  NYB_ERROR_STRIDE = 9,         /* rows of an output run into each other, or out of int64 */
  NYB_ERROR_ALIGNMENT = 10,     /* a pointer is not aligned to its element */
  NYB_ERROR_LENGTH = 11,        /* a sequence length is negative or beyond the capacity */
  NYB_ERROR_OVERLAP = 12,       /* an output overlaps an input, a workspace or another output */
  NYB_ERROR_NON_FINITE = 13,    /* NaN or infinity handed to quantize, append or as attention.scale;
                                   a group that its storage dtype cannot hold */
  NYB_ERROR_WORKSPACE = 14,     /* the workspace is missing, too small or misaligned */
  NYB_ERROR_OUT_OF_MEMORY = 15, /* the allocator returned NULL */
  NYB_ERROR_UNSUPPORTED = 16,   /* well-formed, but not on this machine or this path */
  NYB_ERROR_ENVIRONMENT = 17,   /* NYBBLE_* holds a value that means nothing */
  NYB_ERROR_VALUE = 18,         /* a number outside its documented range */
  NYB_ERROR_IO = 19,            /* the operating system refused; the sentence has its words */
  NYB_ERROR_FILE_TRUNCATED = 20, /* a file ends before its header says that it does */
  NYB_ERROR_FILE_FORMAT = 21,    /* a file is not what it should be */
  NYB_ERROR_NOT_FOUND = 22,      /* no tensor or metadata key of that name */
  NYB_ERROR_DEVICE = 23,  /* the GPU's driver refused; the sentence has the call and its words */
  NYB_ERROR_COMPILE = 24, /* a GPU kernel could not be compiled; the sentence has the first error */
  NYB_ERROR_POINTER = 25  /* host memory where device memory is needed, or the reverse */
} nyb_status;

/* "NYB_ERROR_HEADS" for NYB_ERROR_HEADS; "NYB_ERROR_?" for a number that is no status. Static. */
NYB_API const char *nyb_status_name(nyb_status status);

/* The sentence of this thread's last failed call, "" before the first. It is valid until the next
 * failing call of the same thread; a call that succeeds leaves it alone. */
NYB_API const char *nyb_last_error(void);

/* ---- Types shared by all operations ------------------------------------------------------- */

typedef enum nyb_dtype {
  NYB_F32 = 1, /* 0 is no dtype: a forgotten field is refused, not misread */
  NYB_F16 = 2, /* IEEE 754 binary16 */
  NYB_BF16 = 3 /* the upper half of an f32 */
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
 * read when the context is created) and otherwise means FUSED where it is supported. An explicit
 * FUSED that is not supported fails with NYB_ERROR_UNSUPPORTED; it never falls back. */
typedef enum nyb_path {
  NYB_PATH_AUTO = 0,
  NYB_PATH_FUSED = 1, /* reads the packed bytes once for each block of rows; never holds a
                             score row or a float cache */
  NYB_PATH_COMPAT = 2 /* the spelled-out steps of docs/numerics.md, one after the other */
} nyb_path;

/* Where a context computes. */
typedef enum nyb_backend {
  NYB_BACKEND_CPU = 0,
  NYB_BACKEND_CUDA = 1 /* NVIDIA GPUs of compute capability 8.0 and up */
} nyb_backend;

/* "cpu", "cuda"; "?" for a number that is no backend. Static storage. */
NYB_API const char *nyb_backend_name(nyb_backend backend);

/* A stream of the backend that the context belongs to: a CUstream, or NULL. */
typedef void *nyb_stream;

/* ---- Context ------------------------------------------------------------------------------ */

typedef struct nyb_context nyb_context;

typedef enum nyb_isa {
  NYB_ISA_AUTO = 0, /* NYBBLE_ISA if it is set, else the best that runs here */
  NYB_ISA_SCALAR = 1,
  NYB_ISA_AVX2 = 2,   /* with FMA and F16C */
  NYB_ISA_AVX512 = 3, /* F, BW, DQ, VL, and VNNI */
  NYB_ISA_NEON = 4,   /* AArch64 Advanced SIMD */
  NYB_ISA_CUDA = 5    /* of the CUDA backend's kernels and contexts; no option asks for it */
} nyb_isa;

/* "scalar", "avx2", "avx512", "neon", "cuda", "auto"; "?" for a number that is no ISA. Static
 * storage. */
NYB_API const char *nyb_isa_name(nyb_isa isa);

/* Runs task(task_data, 0 .. task_count-1), each index once, in any order, on any threads, and
 * returns when all have returned. Running them one after the other is allowed. */
typedef void (*nyb_task)(void *task_data, int64_t task_index);
typedef void (*nyb_parallel_for)(void *user_data, int64_t task_count, nyb_task task,
                                 void *task_data);

/* Both functions may be called from several threads at once. */
typedef struct nyb_allocator {
  /* Memory of at least `bytes` bytes aligned to `alignment` (a power of two), or NULL. */
  void *(*allocate)(void *user_data, size_t bytes, size_t alignment);
  void (*release)(void *user_data, void *memory); /* memory is never NULL */
  void *user_data;
} nyb_allocator;

typedef struct nyb_context_options {
  size_t struct_size;
  nyb_isa isa;
  /* How many threads the work is cut for. 0: as many as this process has processors, or
   * NYBBLE_THREADS; 1: the calling thread only. The result does not depend on it by a single bit.
   */
  int64_t threads;
  /* The caller's own parallel-for; NULL takes a built-in pool of `threads` threads, which serves
   * one call at a time (a second thread's call waits its turn); a library built without pthreadpool
   * has none, and takes 1 for `threads` then. In a child of fork() its threads are gone, and calls
   * take the calling thread alone: make a new context there. Tasks never call back into nybble, and
   * there may be more of them than threads.
   * Contexts are cheap: one per worker, with threads = 1, suits an engine that is parallel itself.
   */
  nyb_parallel_for parallel_for;
  void *parallel_for_data;
  nyb_allocator allocator; /* both functions NULL: the C library's */
  nyb_backend backend;
  /* CUDA: calls work on the CUDA context that is current in the calling thread, whichever device it
   * belongs to; where none is, on this device's primary context. */
  int32_t device;
  /* CUDA: memory of caches, which any stream may use at once (an allocator that gives out what a
   * stream's queued work still writes to waits for that first); both NULL: cuMemAlloc. */
  nyb_allocator device_allocator;
} nyb_context_options;

#define NYB_CONTEXT_OPTIONS_INIT NYB_INIT(nyb_context_options)

/* Makes a context. options may be NULL (all defaults). Fails with NYB_ERROR_ENVIRONMENT where a
 * NYBBLE_* variable that it consults (isa and threads win over theirs) holds a word that it does
 * not know, and with NYB_ERROR_UNSUPPORTED where the ISA or backend asked for does not run here:
 * CUDA needs an NVIDIA driver and NVRTC, which are looked for when the first such context is made.
 * *context is written only on success. */
NYB_API nyb_status nyb_context_create(const nyb_context_options *options, nyb_context **context);

/* Ends a context; every cache made and file opened with it must be
 * gone before. NULL is allowed. */
NYB_API void nyb_context_destroy(nyb_context *context);

/* Of NULL: AUTO, CPU and 0. */
NYB_API nyb_isa nyb_context_isa(const nyb_context *context); /* NYB_ISA_CUDA on CUDA */
NYB_API nyb_backend nyb_context_backend(const nyb_context *context);
NYB_API int64_t nyb_context_threads(const nyb_context *context); /* that it does use */

/* ---- Formats of stored rows --------------------------------------------------------------- */

typedef enum nyb_scheme {
  NYB_PLAIN = 1, /* the elements themselves, in `dtype`; 0 is no scheme */
  NYB_AFFINE = 2 /* MLX's affine quantization: value = scale * code + bias for each group */
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
 *   affine: codes are uint32_t words, dim*bits/32 a row, a little-endian bit stream in which
 * element i takes bits [i*bits, (i+1)*bits); codes_stride counts words. scales and biases are
 *           format.dtype, dim/group_size a row, with strides of their own. */
typedef struct nyb_stored {
  nyb_format format;
  const void *codes;
  const void *scales;
  const void *biases;
  int64_t codes_stride[3]; /* batch, head, token */
  int64_t scales_stride[3];
  int64_t biases_stride[3];
} nyb_stored;

/* The same, to be written. */
typedef struct nyb_stored_output {
  nyb_format format;
  void *codes;
  void *scales;
  void *biases;
  int64_t codes_stride[3];
  int64_t scales_stride[3];
  int64_t biases_stride[3];
} nyb_stored_output;

/* ---- Quantize and dequantize -------------------------------------------------------------- */

/* MLX's quantizer differs between its CPU and its GPU backends (docs/numerics.md, section 1). */
typedef enum nyb_rule {
  NYB_RULE_MLX_CPU = 0, /* true maximum, half to even, codes clamped on both sides */
  NYB_RULE_MLX_GPU = 1  /* maximum starts at 0, half away from zero, codes clamped from above */
} nyb_rule;

/* Floats [batch, heads, tokens, dim] to stored rows of the same shape; a plain matrix is batch 1,
 * heads 1. Source: docs/numerics.md, section 1.1. With input.dtype == output.format.dtype and
 * NYB_RULE_MLX_CPU the result is bit-identical to mx.quantize. Any size but dim may be 0. The
 * outputs may not overlap the input or each other. */
typedef struct nyb_quantize {
  size_t struct_size;
  int64_t batch, heads, tokens, dim;
  nyb_input input;
  nyb_stored_output output; /* affine, or plain (which converts) */
  nyb_rule rule;
  int32_t reserved; /* 0 */
  /* CUDA: optional device memory that is set to 1 where a group could not be stored (a NaN or
   * infinity, or an overflow); that group is stored as zeros. Never set back to 0. Else NULL. */
  int32_t *non_finite;
} nyb_quantize;

#define NYB_QUANTIZE_INIT NYB_INIT(nyb_quantize)

/* NYB_ERROR_NON_FINITE names the batch entry, head, token and element of the first NaN or infinity,
 * or the group whose range overflows f32 or whose scale, bias or (plain) element overflows
 * output.format.dtype; nothing is written then. */
NYB_API nyb_status nyb_quantize_run(nyb_context *context, const nyb_quantize *quantize,
                                    nyb_stream stream);

/* Stored rows back to floats: T(T(T(scale) * code) + bias), T rounding to the dtype of the scales,
 * as mx.dequantize; then converted to output.dtype. */
typedef struct nyb_dequantize {
  size_t struct_size;
  int64_t batch, heads, tokens, dim;
  nyb_stored input;
  nyb_output output;
} nyb_dequantize;

#define NYB_DEQUANTIZE_INIT NYB_INIT(nyb_dequantize)

NYB_API nyb_status nyb_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize,
                                      nyb_stream stream);

/* ---- Attention ---------------------------------------------------------------------------- */

typedef enum nyb_mask {
  NYB_MASK_NONE = 0,           /* every query row sees the whole sequence */
  NYB_MASK_CAUSAL = 1,         /* bottom-right: query row i of query_len stands at position
                                  length - query_len + i and sees the tokens up to there; rows
                                  before the sequence see none. MLX, FlashAttention, decoders */
  NYB_MASK_CAUSAL_TOP_LEFT = 2 /* row i stands at position i. PyTorch's is_causal */
} nyb_mask;

typedef enum nyb_mask_array_kind {
  NYB_MASK_ARRAY_BOOL = 1, /* a byte each: the row sees the token where it is not 0 */
  NYB_MASK_ARRAY_ADD = 2   /* added to the score; -inf: the row does not see the token */
} nyb_mask_array_kind;

/* A mask as an array, [batch, query_heads, query_len, tokens]; strides of 0 broadcast. It has a
 * column for each token as lengths counts them, those before starts included. A token hidden by it
 * weighs 0, and only there "0 times NaN" can still show: hide unwritten memory by lengths, starts
 * or window, which are never read past. */
typedef struct nyb_mask_array {
  const void *data;
  nyb_mask_array_kind kind; /* 0: none */
  nyb_dtype dtype;          /* ADD: NYB_F32 or q's; BOOL: 0 */
  int64_t stride[3];
  int64_t tokens; /* columns, at least the longest length */
} nyb_mask_array;

/* Rows of K and V that stand in pages of a pool, which sequences may share. k and v are then
 * [page_count, kv_heads, page_tokens, dim]: their stride[0] leads from page to page. */
typedef struct nyb_pages {
  const int32_t *table; /* NULL: not paged. [batch, table_stride]: token t of sequence b stands in
                           page table[b * table_stride + t / page_tokens], row t % page_tokens.
                           Entries beyond a sequence's length are not looked at; others must be
                           0 to page_count - 1 */
  int64_t table_stride; /* at least capacity_tokens / page_tokens, rounded up */
  int64_t page_tokens;  /* 16 or more; multiples of 64 are read in place, others by tiles copied;
                           0: not paged */
  int64_t page_count;   /* bounds the table's entries */
} nyb_pages;

/* Rows of K and V that stand in a ring: a window over the last tokens, behind `keep_tokens` first
 * ones that stay. The sequence counts the tokens that are held: token t stands in slot t for
 * t < keep_tokens, else in slot
 *   keep_tokens + (t - keep_tokens + offsets[b]) % (capacity_tokens - keep_tokens).
 * Chunks, positions, columns of mask_array and ALiBi count held tokens too, so that the last bits
 * of a result may differ from those of a window over the whole sequence. */
typedef struct nyb_ring {
  const int32_t *offsets; /* NULL: no ring. [batch]: 0 to capacity_tokens - keep_tokens - 1 */
  int64_t keep_tokens;    /* less than capacity_tokens */
} nyb_ring;

/* Rows of K and V beside k and v, in formats of their own: [batch, kv_heads, tokens, dim]. */
typedef struct nyb_part {
  int64_t tokens; /* 0: no such part */
  nyb_stored k, v;
} nyb_part;

/* Where values are rounded on the way (docs/numerics.md, sections 2, 3 and 8); T is q's dtype,
 * whatever the dtypes of scales and out. What the CPU's integer dots add to EXACT is bounded there.
 */
typedef enum nyb_rounding {
  NYB_ROUNDING_EXACT = 0, /* only the output is rounded: compare with f64, PyTorch, FlashInfer */
  NYB_ROUNDING_MLX = 1    /* T(q * T(scale)) and T(score) too, as models served by MLX expect */
} nyb_rounding;

/* out = softmax(scale * q k^T + mask) v, for each batch entry and query head; query head h attends
 * over KV head h / (query_heads / kv_heads).
 *
 * Deterministic: tokens are cut into chunks of a fixed size, counted from the sequence's first (and
 * where its parts meet), and merged in ascending order. A row's bits depend on its own query and on
 * the tokens it sees: not on the batch, the other rows, strides or threads. They may differ between
 * ISAs, backends, paths and versions, and on CUDA between the kernels that a plan names: which one
 * follows from the number of query rows that share a KV head, and from alignment.
 *
 * score = cap(scale * q k) - slope * |position - token| + mask_array, where cap(s) = s, or
 * softcap * tanh(s / softcap). docs/numerics.md has the rounding of each step.
 *
 * A row that sees no token gives zeros, and lse = -inf, or its head's sink. Nothing beyond a
 * sequence's length is read into the result. */
typedef struct nyb_attention {
  size_t struct_size;
  int64_t batch;           /* 1 to 2^30 */
  int64_t query_heads;     /* a multiple of kv_heads, up to 2^20 */
  int64_t kv_heads;        /* 1 to 2^20 */
  int64_t query_len;       /* query rows per sequence, 1 to 2^31 - 1 */
  int64_t key_dim;         /* length of a row of q and k, 1 to 65,536 */
  int64_t value_dim;       /* length of a row of v and out, 1 to 65,536 */
  int64_t capacity_tokens; /* tokens that k and v have room for, 0 to 2^31 - 1; bounds lengths */
  const int32_t *lengths;  /* [batch]: one past each sequence's last token, the query rows' own
                              included (append first, then attend) */
  nyb_input q;             /* [batch, query_heads, query_len, key_dim] */
  nyb_stored k;            /* [batch, kv_heads, capacity_tokens, key_dim] */
  nyb_stored v;            /* [batch, kv_heads, capacity_tokens, value_dim] */
  nyb_output out;          /* [batch, query_heads, query_len, value_dim]; overlaps nothing */
  nyb_output lse;          /* optional (data NULL): [batch, query_heads, query_len] as f32, the
                              natural log of the sum of exp(score), for merging; stride[2] is from
                              query row to query row */
  float scale;             /* usually 1/sqrt(key_dim); 0 is refused as forgotten */
  nyb_mask mask;
  nyb_path path;
  nyb_rounding rounding;

  /* What follows may all be left 0. A row sees a token that every one of mask, window and
   * mask_array lets it see. Of pages, ring, starts and the two parts a call has at most one.
   *
   * CUDA: starts, mask_array.data, sinks, alibi_slopes, pages.table, ring.offsets, last_begins and
   * the parts' rows are device memory, as lengths and k are, and NYB_ERROR_POINTER where they are
   * not. Where the CPU refuses one of these numbers, it counts there as the nearest possible one;
   * so does a length beyond mask_array.tokens. */

  /* Rows see the last window_tokens tokens up to their own, theirs included, and the first
   * window_keep_tokens ones whatever the window. A row's position is mask's; under NYB_MASK_NONE,
   * which hides no later tokens, it is bottom-right. Chunks that no row sees are not read. 0: none;
   * keep needs a window */
  int64_t window_tokens, window_keep_tokens;
  /* [batch], or NULL: where each sequence begins, 0 to its length (left padding). The tokens before
   * are no part of it: the result has the bits of the sequence alone. Chunks and
   * window_keep_tokens count from there; mask_array's columns, lengths and the positions of
   * NYB_MASK_CAUSAL_TOP_LEFT from slot 0. */
  const int32_t *starts;
  nyb_mask_array mask_array;
  /* Optional, [query_heads]: a logit for each head that enters the denominator once, unscaled; -inf
   * is none. lse has it too: of results to be merged, give it to one. */
  const float *sinks;
  /* Optional, [query_heads]; the position is the window's. */
  const float *alibi_slopes;
  float softcap;    /* 2^-126 to 2^126; 0: none */
  int32_t reserved; /* 0 */
  nyb_pages pages;
  nyb_ring ring;
  /* A sequence in three parts: its first `first.tokens` tokens in `first`, then k and v (token t
   * in slot t - first.tokens), then, from token last_begins[b] on, `last`: token t in slot t %
   * last.tokens. lengths counts all three, at most first.tokens + capacity_tokens + last.tokens. */
  nyb_part first, last;
  const int32_t *last_begins; /* [batch]; needed where last.tokens > 0: first.tokens (or the length,
                                 where that is less) to the length, and no more than last.tokens
                                 before it */
} nyb_attention;              /* q, out, scales of k and of v may all differ in dtype */

#define NYB_ATTENTION_INIT NYB_INIT(nyb_attention)

typedef struct nyb_plan {
  size_t struct_size;
  nyb_path path; /* FUSED or COMPAT: the one that run will take */
  int32_t reserved;
  size_t workspace_bytes; /* for run; a multiple of NYB_WORKSPACE_ALIGNMENT */
  const char *key_kernel; /* names as nyb_kernel_at() gives them, "" on the COMPAT path; the two
                             may be one kernel */
  const char *value_kernel;
  char reason[192]; /* why this path, in a sentence */
} nyb_plan;

#define NYB_PLAN_INIT NYB_INIT(nyb_plan)
#define NYB_WORKSPACE_ALIGNMENT 64

/* Checks a descriptor, chooses the path and says how much workspace run needs: the support query.
 * Looks at shapes, formats, strides and the values of pointers, never through one; data pointers
 * and lengths may still be NULL here, as at model load. workspace_bytes does not depend on
 * pointers, strides or lengths (but whether an optional one is set: NULL or not must be as at the
 * run), and never falls when batch, query_len or capacity_tokens rises:
 * plan the largest call once and reuse its workspace. capacity_tokens is the room, not the length:
 * with a cache that grows, reserve first or plan again after growth. COMPAT needs room for scores.
 */
NYB_API nyb_status nyb_attention_plan(nyb_context *context, const nyb_attention *attention,
                                      nyb_plan *plan);

/* Runs it. workspace may be NULL where the plan asked for 0 bytes; its contents need not be kept
 * between calls. */
NYB_API nyb_status nyb_attention_run(nyb_context *context, const nyb_attention *attention,
                                     void *workspace, size_t workspace_bytes, nyb_stream stream);

/* Merges results over disjoint sets of tokens into the result over all of them:
 *   m = max lse_i,  w_i = exp(lse_i - m),  out = sum w_i out_i / sum w_i,  lse = m + log(sum w_i),
 * summed part after part, ascending, in f64, and rounded once. For decoding with the tokens spread
 * over processes or devices (docs/distributed.md). Ask the parts for f32 outputs: rounded ones cost
 * their rounding.
 *
 * A part of lse -inf is empty: its out is not looked at, and it changes no bit; a sole part that is
 * not empty is the result, bit for bit, where the dtypes agree; where all are empty the result is
 * zeros and -inf. An lse that is NaN or +inf makes the row NaN, lse too; a NaN in the out of a part
 * that is not empty shows, however little it weighs. A NaN result is the positive quiet one. The
 * bits depend on the parts alone: not on backend, ISA, machine, threads, strides or other rows.
 *
 * CUDA: the views' data is device memory. Up to 52 parts may lie anywhere, up to 208 where all have
 * the same strides, and any number where they have one dtype, too, and lie evenly spaced; else
 * NYB_ERROR_UNSUPPORTED. */
typedef struct nyb_attention_merge {
  size_t struct_size;
  int64_t parts;                         /* 1 to 65,536 */
  int64_t batch, query_heads, query_len; /* where one is 0 nothing is done */
  int64_t value_dim;                     /* 1 to 65,536 */
  const nyb_input *outs; /* [parts], host memory: each [batch, query_heads, query_len, value_dim] */
  const nyb_input *lses; /* [parts]: each [batch, query_heads, query_len], f32; stride[2] is from
                            query row to query row */
  nyb_output out;        /* may be exactly outs[0], and lse exactly lses[0]; no other overlap */
  nyb_output lse;        /* optional (data NULL) */
} nyb_attention_merge;

#define NYB_ATTENTION_MERGE_INIT NYB_INIT(nyb_attention_merge)

NYB_API nyb_status nyb_attention_merge_run(nyb_context *context, const nyb_attention_merge *merge,
                                           nyb_stream stream);

/* ---- GeGLU -------------------------------------------------------------------------------- */

/* out = gelu_tanh(gate) * up over [rows, columns], every step rounded to the dtype, in the order of
 * docs/numerics.md, section 4. gate, up and out have one dtype. For f16 and bf16 every bit is
 * fixed, on both paths, on every backend; f32 stays within 2^-21 |gate * up| of those steps. A NaN
 * result (a NaN goes in, gate is -inf, or 0 meets infinity) is the positive quiet one. Row strides
 * may differ (two halves of one tensor). out may be exactly gate or exactly up (same pointer and
 * stride); any other overlap is refused. rows or columns may be 0: nothing is done. */
typedef struct nyb_geglu {
  size_t struct_size;
  int64_t rows, columns;
  nyb_dtype dtype;
  nyb_path path;
  const void *gate;
  int64_t gate_stride;
  const void *up;
  int64_t up_stride;
  void *out;
  int64_t out_stride;
} nyb_geglu;

#define NYB_GEGLU_INIT NYB_INIT(nyb_geglu)

NYB_API nyb_status nyb_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_stream stream);

/* ---- KV cache ----------------------------------------------------------------------------- */

/* One layer's keys and values, quantized as they are appended. Memory doubles when it is full, so
 * that a cache filled token by token moves each token less than twice; while it moves, the old
 * memory and the new are both held. */
typedef struct nyb_cache nyb_cache;

typedef struct nyb_cache_options {
  size_t struct_size;
  int64_t batch, kv_heads, key_dim, value_dim;
  nyb_format key_format, value_format;
  nyb_rule rule;
  int32_t reserved;                /* 0 */
  int64_t initial_capacity_tokens; /* 0: grown at the first append */
  int64_t max_tokens;              /* an append beyond it fails; 0: no limit but int32 lengths */

  /* Each of the three kinds below stands alone. */

  /* A rotating cache: the first window_keep_tokens tokens stay, and of the others those in a window
   * over the last window_tokens - window_keep_tokens (more than 0), which is what the view sets
   * attention.window_tokens to. An append of S tokens leaves the rows that its S query rows see, at
   * most window_tokens + S - 1. What was dropped is gone: a trim that would need it is refused, and
   * drops nothing. */
  int64_t window_tokens, window_keep_tokens;
  /* The first first_tokens tokens and the last last_tokens ones stay unquantized, in part_dtype;
   * the oldest of the last ones is quantized when a new one comes. */
  int64_t first_tokens, last_tokens;
  nyb_dtype part_dtype; /* 0 where there are none */
  int32_t reserved2;    /* 0 */
  /* Pages of so many tokens, from one pool; nyb_cache_reorder shares them between sequences, and an
   * append to a shared one copies it first. 0: rows of a sequence stand one after the other. */
  int64_t page_tokens;
} nyb_cache_options;

#define NYB_CACHE_OPTIONS_INIT NYB_INIT(nyb_cache_options)

typedef struct nyb_cache_usage {
  size_t struct_size;
  int64_t used_bytes;      /* tokens held, codes + scales + biases, over all sequences; those of
                              shared pages once */
  int64_t allocated_bytes; /* what the allocator gave for them */
  int64_t capacity_tokens; /* of each sequence; of the pool, in pages that they share */
  int64_t reallocations;   /* since creation */
  int64_t copied_bytes;    /* moved by growing, since creation */
} nyb_cache_usage;

#define NYB_CACHE_USAGE_INIT NYB_INIT(nyb_cache_usage)

/* The context must outlive the cache. *cache is written only on success. */
NYB_API nyb_status nyb_cache_create(nyb_context *context, const nyb_cache_options *options,
                                    nyb_cache **cache);
NYB_API void nyb_cache_destroy(nyb_cache *cache); /* NULL is allowed */

typedef struct nyb_append {
  size_t struct_size;
  int64_t tokens;      /* for every sequence; 0 is allowed */
  nyb_input key;       /* [batch, kv_heads, tokens, key_dim], any float dtype */
  nyb_input value;     /* [batch, kv_heads, tokens, value_dim] */
  int32_t *non_finite; /* CUDA: as in nyb_quantize; it is also set where a sequence was full */
  /* Optional, [batch]: so many of each sequence's `tokens` rows, the first ones, are padding and
   * are not stored (a left-padded batch), 0 to tokens. On CUDA too this is memory of the host,
   * which is read before the call returns. */
  const int32_t *padding;
} nyb_append;

#define NYB_APPEND_INIT NYB_INIT(nyb_append)

/* Appends tokens to every sequence: one pass, no copy. On failure the cache holds what it held. */
NYB_API nyb_status nyb_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream);

/* Makes room for `tokens` tokens in each sequence, so that appends up to there do not allocate. A
 * rotating cache makes room for its window at most, and grows for an append of more than one token;
 * a paged one still takes pages for copies of shared ones, but on CUDA, where every sequence gets
 * pages of its own. */
NYB_API nyb_status nyb_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream);

#define NYB_ALL_SEQUENCES (-1)

/* Drops the last `tokens` tokens of a sequence, or of all of them, or as many as there are;
 * *trimmed (may be NULL) gets the most that a sequence lost. Memory is kept. After sequences were
 * trimmed to different lengths an append goes to the end of each. */
NYB_API nyb_status nyb_cache_trim(nyb_cache *cache, int64_t sequence, int64_t tokens,
                                  int64_t *trimmed, nyb_stream stream);

/* Sequence i becomes what sequence sources[i] was, for i < count: beam search (reorder, duplicate),
 * continuous batching (drop, duplicate). The batch is `count` afterwards, 1 to 2^30; rows move
 * within the memory there is while that has room for so many sequences. On failure the cache holds
 * what it held. */
NYB_API nyb_status nyb_cache_reorder(nyb_cache *cache, const int64_t *sources, int64_t count,
                                     nyb_stream stream);

/* Empties the cache; memory is kept. */
NYB_API nyb_status nyb_cache_reset(nyb_cache *cache, nyb_stream stream);

/* CUDA: an append takes its positions from the numbers in device memory and moves them along, so
 * that a captured graph appends one token further at each replay; the host counts only the calls.
 * This waits for the stream and takes the host's counts from the device. On the CPU: nothing. */
NYB_API nyb_status nyb_cache_refresh(nyb_cache *cache, nyb_stream stream);

/* Tokens of a sequence, as the host counts them, those that a window has passed over too: the
 * position of the next one. -1, with nyb_last_error(), for a sequence that does not exist. */
NYB_API int64_t nyb_cache_length(const nyb_cache *cache, int64_t sequence);

/* Tokens of a sequence that the cache still holds, which is what a view's lengths say. */
NYB_API int64_t nyb_cache_held_tokens(const nyb_cache *cache, int64_t sequence);

NYB_API nyb_status nyb_cache_get_usage(const nyb_cache *cache, nyb_cache_usage *usage);

/* Sets every field of *attention that says where the tokens are (batch, kv_heads, key_dim,
 * value_dim, capacity_tokens, lengths, k, v, pages, ring, first, last, last_begins; of a rotating
 * cache also window_tokens and window_keep_tokens) and leaves the others alone. The pointers hold
 * until the next append that grows, reserve, reorder, load or destroy; what they point to follows
 * the cache. It costs next to nothing: call it before every run. */
NYB_API nyb_status nyb_cache_view(const nyb_cache *cache, nyb_attention *attention);

/* ---- safetensors files -------------------------------------------------------------------- */

/* A file open for reading, memory-mapped. The whole header is checked at opening: sizes, bounds,
 * overlaps, holes, dtypes, duplicate names, metadata types. Tensors and metadata are numbered in
 * the order of the header. One file may be read by several threads. Nobody may shorten a file while
 * it is open here (nyb_safetensors_write never does: it replaces). */
typedef struct nyb_safetensors nyb_safetensors;

#define NYB_SAFETENSORS_MAX_RANK 8

typedef struct nyb_safetensors_tensor {
  const char *name;  /* UTF-8; lives as long as the file is open, as all pointers here */
  const char *dtype; /* the file's own word: "F32", "BF16", "U32", ... */
  int64_t rank;
  int64_t shape[NYB_SAFETENSORS_MAX_RANK];
  const void *data; /* in the mapping; may be unaligned */
  int64_t data_bytes;
} nyb_safetensors_tensor;

NYB_API nyb_status nyb_safetensors_open(nyb_context *context, const char *path,
                                        nyb_safetensors **file);
NYB_API void nyb_safetensors_close(nyb_safetensors *file); /* NULL is allowed */

NYB_API int64_t nyb_safetensors_count(const nyb_safetensors *file); /* 0 for NULL */
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
 * stood at `path` as it was. A link is replaced, not followed; what is no regular file is refused.
 * Tensors are written in the given order, without padding; the first is aligned to 8 bytes. */
NYB_API nyb_status nyb_safetensors_write(nyb_context *context, const char *path,
                                         const nyb_safetensors_tensor *tensors,
                                         int64_t tensor_count, const nyb_metadata *metadata,
                                         int64_t metadata_count);

/* ---- Saved caches --------------------------------------------------------------------------- */

/* The caches of all layers in one file: mlx-lm's prompt cache where its classes can hold a layer,
 * else the same container with tensors of our own, which mlx-lm refuses (docs/formats.md). The file
 * takes the tokens that are held, not the capacity. Written as nyb_safetensors_write writes, from
 * where the rows lie; caches on CUDA are copied to the host first, all of them, and the stream is
 * waited for. Empty caches are refused. metadata is the caller's own. */
NYB_API nyb_status nyb_cache_save(nyb_context *context, const char *path, nyb_cache *const *layers,
                                  int64_t layer_count, const nyb_metadata *metadata,
                                  int64_t metadata_count, nyb_stream stream);

/* What a file holds: the number of layers, and the options with which a cache for layer `layer` is
 * created (rule is NYB_RULE_MLX_CPU, capacities and limits are 0: set them as you like). Files of
 * mlx-lm are read whichever version wrote them. */
NYB_API nyb_status nyb_cache_file_layers(const nyb_safetensors *file, int64_t *layer_count);
NYB_API nyb_status nyb_cache_file_options(const nyb_safetensors *file, int64_t layer,
                                          nyb_cache_options *options);

/* Tokens of the layer's sequences, as nyb_cache_length() gives them once they are loaded: [batch].
 */
NYB_API nyb_status nyb_cache_file_lengths(const nyb_safetensors *file, int64_t layer,
                                          int64_t *lengths);

/* The metadata that was given when the file was saved, in the order of its keys. The count is 0 for
 * a file that is no saved cache. */
NYB_API int64_t nyb_cache_file_metadata_count(const nyb_safetensors *file);
NYB_API nyb_status nyb_cache_file_metadata_at(const nyb_safetensors *file, int64_t index,
                                              nyb_metadata *metadata);

/* Replaces what `layers` hold by the file's. They were created as nyb_cache_file_options says;
 * whatever differs (bits, group size, dtype, heads, dims, batch, kind, count of layers) is refused
 * by a sentence that names both. A cache without enough room gets new memory, with some room more;
 * reserve before to set it. On CUDA it always gets new memory, no smaller than what it had, by way
 * of the host's, and the stream is waited for. On failure every cache holds what it held. */
NYB_API nyb_status nyb_cache_load(const nyb_safetensors *file, nyb_cache *const *layers,
                                  int64_t layer_count, nyb_stream stream);

/* ---- Introspection ------------------------------------------------------------------------ */

/* Every kernel of the library, listed once, whether or not it runs here. */
typedef struct nyb_kernel {
  size_t struct_size;
  const char *name;      /* "attention_scores_affine4_avx2" */
  const char *operation; /* "attention_scores" */
  const char *format;    /* "affine4", "plain_bf16"; for GeGLU too */
  nyb_isa isa;
  bool runs_here;
  const char *reason; /* why it does not run here, or "" */
  int64_t calls;      /* by the run calls of the context, since the counters were cleared */
} nyb_kernel;

#define NYB_KERNEL_INIT NYB_INIT(nyb_kernel)

NYB_API int64_t nyb_kernel_count(void);

/* context may be NULL: then calls is 0. */
NYB_API nyb_status nyb_kernel_at(const nyb_context *context, int64_t index, nyb_kernel *kernel);

typedef struct nyb_counters {
  size_t struct_size;
  int64_t attention_fused;
  int64_t attention_compat;
  int64_t geglu_fused;
  int64_t geglu_compat;
  int64_t quantize;
  int64_t dequantize;
  int64_t cache_append;
  int64_t attention_merge;
} nyb_counters;

#define NYB_COUNTERS_INIT NYB_INIT(nyb_counters)

/* Calls that succeeded, since the context was made or the counters were cleared. */
NYB_API nyb_status nyb_counters_get(const nyb_context *context, nyb_counters *counters);
NYB_API void nyb_counters_clear(nyb_context *context);

/* What the CUDA backend finds on this machine; the strings are static or this thread's, valid until
 * its next call. Never fails for want of a GPU: then available is false and reason says why. */
typedef struct nyb_cuda_info {
  size_t struct_size;
  bool available;
  const char *reason; /* "" when available */
  int32_t device_count;
  int32_t driver_version;      /* as CUDA counts: 13000 is 13.0; 0: no driver */
  int32_t nvrtc_version;       /* likewise; 0: none was found */
  const char *nvrtc_library;   /* the file that was loaded, or "" */
  const char *cache_directory; /* of compiled kernels; "" when it is off (NYBBLE_CACHE_DIR="off") */
  int64_t cached_kernels, cached_bytes;
  const char *device_name;    /* of the device asked for */
  int32_t compute_capability; /* 90 is 9.0 */
  int32_t multiprocessors;
  int64_t memory_bytes;
} nyb_cuda_info;

#define NYB_CUDA_INFO_INIT NYB_INIT(nyb_cuda_info)

NYB_API nyb_status nyb_cuda_get_info(int32_t device, nyb_cuda_info *info);

/* The CPU features found here, of those that the library looks for, space-separated. Valid in the
 * calling thread for its lifetime. */
NYB_API const char *nyb_cpu_features(void);

#ifdef __cplusplus
}
#endif

#endif /* NYBBLE_H */
