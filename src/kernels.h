/* SPDX-License-Identifier: Apache-2.0 */
/* What a kernel is: the operations, their argument structs, and the table that names each
 * kernel once. Kernels know no descriptor, no context and no threads: they get pointers and counts
 * that have been checked. The CUDA backend's (src/cuda) stand in the table for their names and
 * counters alone. How to add one: docs/kernels.md. */
#ifndef NYB_KERNELS_H
#define NYB_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

/* Index of a format in dispatch tables; its name is the one in kernel names. */
typedef enum nyb_format_id {
  NYB_FORMAT_PLAIN_F32,
  NYB_FORMAT_PLAIN_F16,
  NYB_FORMAT_PLAIN_BF16,
  NYB_FORMAT_AFFINE2,
  NYB_FORMAT_AFFINE3,
  NYB_FORMAT_AFFINE4,
  NYB_FORMAT_AFFINE5,
  NYB_FORMAT_AFFINE6,
  NYB_FORMAT_AFFINE8,
  NYB_FORMAT_COUNT
} nyb_format_id;

typedef enum nyb_operation {
  NYB_OPERATION_QUANTIZE,
  NYB_OPERATION_DEQUANTIZE,
  NYB_OPERATION_ATTENTION_QUERIES,
  NYB_OPERATION_ATTENTION_SCORES,
  NYB_OPERATION_ATTENTION_BIAS,    /* format: PLAIN_F32 */
  NYB_OPERATION_ATTENTION_SOFTMAX, /* likewise */
  NYB_OPERATION_ATTENTION_VALUES,
  NYB_OPERATION_ATTENTION_COLUMNS,
  NYB_OPERATION_GEGLU, /* formats: the PLAIN ones */
  /* CUDA's own: K and V each count the kernel of their format. */
  NYB_OPERATION_CACHE_APPEND,
  NYB_OPERATION_ATTENTION_DECODE,
  NYB_OPERATION_ATTENTION_PREFILL,
  NYB_OPERATION_ATTENTION_GENERAL,
  NYB_OPERATION_COUNT
} nyb_operation;

/* ---- quantize: a run of whole groups, contiguous on both sides ---------------------------- */

typedef struct nyb_quantize_span {
  const void *input; /* groups * group_size elements */
  nyb_dtype input_dtype;
  int64_t groups;
  int32_t group_size; /* plain formats: 1, and a group is an element */
  nyb_rule rule;
  nyb_dtype scale_dtype; /* affine only */
  void *codes;           /* NULL: check only, write nothing */
  void *scales;
  void *biases;
} nyb_quantize_span;

/* Returns how many groups were done: `groups`, or the index of the first group that cannot be
 * stored (a NaN or infinity, or a scale or bias that overflows). Nothing from that group on need be
 * untouched: callers that promise so check first. */
typedef int64_t (*nyb_quantize_fn)(const nyb_quantize_span *span);

/* ---- dequantize: the same, backwards ------------------------------------------------------ */

typedef struct nyb_dequantize_span {
  const void *codes, *scales, *biases;
  nyb_dtype scale_dtype;
  int64_t groups;
  int32_t group_size;
  void *output;
  nyb_dtype output_dtype;
} nyb_dequantize_span;

typedef void (*nyb_dequantize_fn)(const nyb_dequantize_span *span);

/* ---- attention: one tile of tokens against one block of query rows -------------------------- */

/* A tile is NYB_TILE_TOKENS tokens or the rest of a sequence, a block NYB_TILE_ROWS query rows or
 * fewer that share a KV head. What a row gets does not depend on the other rows of its block. */
enum { NYB_TILE_TOKENS = 64, NYB_TILE_ROWS = 32 };

/* Rows of floats are padded to a whole number of the widest vectors. */
static inline int64_t nyb_padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

/* Stored rows of a tile, the first token's, with byte strides from token to token. */
typedef struct nyb_tile_tokens {
  const char *codes, *scales, *biases;
  int64_t codes_stride_bytes, scales_stride_bytes, biases_stride_bytes;
  int64_t dim;
  int32_t group_size;
  nyb_dtype scale_dtype;
  int64_t tokens; /* 1 .. NYB_TILE_TOKENS */
} nyb_tile_tokens;

/* Rows of codes that the caller will need next, for a kernel to fetch into the caches meanwhile. It
 * never reads them. Several pieces (pages) are as long as each other, the last one perhaps shorter,
 * and without gaps in them. */
enum { NYB_AHEAD_PIECES = 4 };
typedef struct nyb_ahead {
  const char *pieces[NYB_AHEAD_PIECES]; /* the first row of each */
  int64_t piece_count;
  int64_t stride_bytes, row_bytes;
  int64_t rows; /* of a piece; 0: none */
} nyb_ahead;

/* Brings query rows into the order and number type in which `scores` of the same format and ISA
 * wants them. */
typedef struct nyb_query_block {
  const float *q; /* [rows][nyb_padded_dim(dim)], scaled and rounded, zero in the padding */
  int64_t rows, dim;
  int32_t group_size;
  bool precise;   /* affine: keep 30 bits of q instead of 15 */
  void *prepared; /* nyb_prepared_bytes(dim) for each row */
} nyb_query_block;

typedef void (*nyb_attention_queries_fn)(const nyb_query_block *block);

/* Affine, per row: dim/2 pairs of int16 for each term, then four numbers for each group. */
static inline int64_t nyb_prepared_bytes(int64_t dim) {
  return (nyb_padded_dim(dim) * 4 + 4 * 4 * (dim / 32 + 1) + 63) / 64 * 64;
}

/* scores[r][t] = q_r . k_t, with room for NYB_TILE_TOKENS in each row; what stands in a row beyond
 * k.tokens afterwards means nothing. */
typedef struct nyb_score_tile {
  const void *prepared;
  int64_t rows;
  bool precise; /* as prepared */
  nyb_tile_tokens k;
  nyb_ahead ahead;
  float *scores;
  void *scratch; /* NYB_TILE_SCRATCH_BYTES */
} nyb_score_tile;

typedef void (*nyb_attention_scores_fn)(const nyb_score_tile *tile);

/* Scores become those of docs/numerics.md, section 2, step 3: softcap, slope and mask, in this
 * order; a token that the mask hides gets -inf. Called only where the call has one of them. */
typedef struct nyb_bias_row {
  const void *mask; /* the column of the tile's first token */
  float slope;
  int32_t distance; /* from the tile's first token to the row's position */
} nyb_bias_row;

typedef struct nyb_bias_tile {
  float *scores; /* [rows][NYB_TILE_TOKENS] */
  int64_t rows, tokens;
  nyb_dtype round_to;          /* scores are rounded to this first, and after each step */
  float softcap;               /* 0: none */
  bool sloped;                 /* rows have slopes */
  nyb_mask_array_kind mask;    /* 0: rows have none */
  nyb_dtype mask_dtype;        /* ADD: of its columns; F32: the sum is not rounded */
  const nyb_bias_row *of_rows; /* [rows] */
} nyb_bias_tile;

typedef void (*nyb_attention_bias_fn)(const nyb_bias_tile *tile);

/* One step of the online softmax: takes the scores to exp(score - maximum), exactly 0 from
 * visible[r] on, and moves maximum and sum along. */
typedef struct nyb_softmax_tile {
  float *scores; /* [rows][NYB_TILE_TOKENS] */
  int64_t rows;
  const int32_t *visible; /* [rows]: tokens of this tile that the row sees */
  nyb_dtype round_to;     /* scores are rounded to this first; F32: not at all */
  float *maximum;         /* [rows], -inf at first */
  float *sum;             /* [rows], 0 at first */
  float *rescale;         /* [rows], out: what the row's accumulators must be multiplied by */
} nyb_softmax_tile;

/* Returns whether any rescale is other than 1. */
typedef bool (*nyb_attention_softmax_fn)(const nyb_softmax_tile *tile);

/* out[r] += sum over t of weights[r][t] * v_t. The columns of out stand in the kernel's own order:
 * `columns` brings a finished row into the order of the elements. */
typedef struct nyb_value_tile {
  const float *weights; /* [rows][NYB_TILE_TOKENS] */
  int64_t rows;
  bool precise; /* affine: multiply by weights as floats; else by weights of 16 bits, a scale each
                   row, tile and group */
  nyb_tile_tokens v;
  nyb_ahead ahead;
  float *out; /* [rows][nyb_padded_dim(v.dim)] */
  void *scratch;
} nyb_value_tile;

typedef void (*nyb_attention_values_fn)(const nyb_value_tile *tile);

typedef struct nyb_value_columns {
  const float *from; /* [nyb_padded_dim(dim)], as `values` of the same format left it */
  float *to;         /* [nyb_padded_dim(dim)], not from */
  int64_t dim;
  int32_t group_size;
  bool precise;
} nyb_value_columns;

typedef void (*nyb_attention_columns_fn)(const nyb_value_columns *columns);

enum { NYB_TILE_SCRATCH_BYTES = 48 * 1024 };

/* ---- geglu: contiguous elements of one dtype ---------------------------------------------- */

/* out may be gate or up. streaming: the result is too large for the caches, and an ISA that can
 * stores past them. Contexts fill the tables that these kernels look up (cpu/geglu_tables.h). */
typedef void (*nyb_geglu_fn)(const void *gate, const void *up, void *out, int64_t count,
                             bool streaming);

#define NYB_GEGLU_KERNEL(format, isa)                                                         \
  void nyb_geglu_##format##_##isa(const void *gate, const void *up, void *out, int64_t count, \
                                  bool streaming);                                            \
  void nyb_geglu_##format##_##isa(const void *gate, const void *up, void *out, int64_t count, \
                                  bool streaming)

/* ---- The table ---------------------------------------------------------------------------- */

typedef void (*nyb_any_fn)(void);

typedef struct nyb_kernel_entry {
  const char *name;
  nyb_operation operation;
  nyb_format_id format;
  nyb_isa isa;
  nyb_any_fn function; /* NULL where this build's processor family is another, and for CUDA */
} nyb_kernel_entry;

/* All kernels of all ISAs, scalar first. */
extern const nyb_kernel_entry nyb_kernel_entries[];
extern const int64_t nyb_kernel_entry_count;

/* One ISA's choice: the index into nyb_kernel_entries for each operation and format, filled scalar
 * first and overwritten upwards; -1 where no kernel exists. */
typedef struct nyb_dispatch {
  int16_t entry[NYB_OPERATION_COUNT][NYB_FORMAT_COUNT];
} nyb_dispatch;

void nyb_dispatch_fill(nyb_dispatch *dispatch, nyb_isa isa);

const char *nyb_operation_name(nyb_operation operation);
const char *nyb_format_id_name(nyb_format_id format);

/* Whether kernels of this ISA run on this machine; *reason (static) says why not, or is "". */
bool nyb_isa_runs_here(nyb_isa isa, const char **reason);
nyb_isa nyb_isa_best(void);

#endif
