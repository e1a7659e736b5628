/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernels attention_decode and attention_merge, for the host's compiler and
 * the device's. Strides are in bytes: batch, head, token (or row). */
#ifndef NYB_ATTENTION_DECODE_ARGUMENTS_H
#define NYB_ATTENTION_DECODE_ARGUMENTS_H

#include "attention_arguments.h"

/* FEATURES of attention_decode and attention_merge, a bit for each: what a call asks for beside a
 * causal mask. What it does not ask for is not compiled. */
#define NYB_DECODE_SIGHT 1  /* windows, starts, masks from the top left */
#define NYB_DECODE_CAPPED 2 /* a softcap */
#define NYB_DECODE_SLOPED 4
#define NYB_DECODE_BOOLS 8 /* a mask's array of bools; or one that is added, */
#define NYB_DECODE_ADDED 16
#define NYB_DECODE_ADDED_F32 32    /* in f32, not in the query's type */
#define NYB_DECODE_ONE_MASK_ROW 64 /* which all rows of a tile share */
#define NYB_DECODE_SINKS 128
/* Sinks are the merge's alone. It looks at the finished sums: what has been done to scores matters
 * only where rows may see no token, or tokens whose score is anything. */
#define NYB_DECODE_OWN_FEATURES(features) ((features) & ~NYB_DECODE_SINKS)
#define NYB_DECODE_MERGE_FEATURES(features) \
  ((features) & (NYB_DECODE_SIGHT | NYB_DECODE_BOOLS | NYB_DECODE_ADDED | NYB_DECODE_SINKS))

/* A step of tokens has so many tiles. A warp scores a tile, or two warps a part of head_dim each
 * where heads are so wide that few warps would fit a multiprocessor otherwise. */
#define NYB_DECODE_TILES 4
#define NYB_DECODE_WARP_PARTS(key_dim, value_dim, features) \
  ((key_dim) > 256 && (value_dim) == 512 && (features) == 0 ? 2 : 1)
/* Warps of a block of threads that multiply; one more copies. */
#define NYB_DECODE_WARPS(key_dim, value_dim, features) \
  (NYB_DECODE_TILES * NYB_DECODE_WARP_PARTS(key_dim, value_dim, features))
/* Tokens that are summed in order, before the tree: fewer of wide heads, which seldom come many at
 * once. */
#define NYB_DECODE_LEAF_TOKENS(key_dim, value_dim) ((key_dim) + (value_dim) > 512 ? 256 : 512)
/* Floats for each leaf: maxima (whole log2 units) and sums of all rows. */
#define NYB_DECODE_STATISTICS(columns) (2 * (columns))
/* Subtrees of up to 2^levels leaves are added before they go to the workspace: as many as shared
 * memory has room for. Those of heads whose tiles two warps share wait in the workspace itself. */
#define NYB_DECODE_USED_COLUMNS(rows) ((rows) <= 2 ? 2 : (rows) <= 4 ? 4 : (rows) <= 8 ? 8 : 16)
#define NYB_DECODE_LEVELS(key_dim, value_dim, rows, features)  \
  (NYB_DECODE_WARP_PARTS(key_dim, value_dim, features) > 1 ? 4 \
   : NYB_DECODE_USED_COLUMNS(rows) * (value_dim) <= 256    ? 3 \
   : NYB_DECODE_USED_COLUMNS(rows) * (value_dim) <= 2048   ? 2 \
   : NYB_DECODE_USED_COLUMNS(rows) * (value_dim) <= 4096   ? 1 \
                                                           : 0)

/* How the output's elements are shared between warps: see attention_decode_layout.cuh. */
#define NYB_DECODE_BY_UNITS(dim, bits, group)                                     \
  (((bits) == 2 || (bits) == 4 || (bits) == 8) && (dim) * (bits) / 8 % 16 == 0 && \
   (group) * (bits) % 128 == 0)
#define NYB_DECODE_PIECES(dim, bits, group)                     \
  (NYB_DECODE_BY_UNITS(dim, bits, group) ? (dim) * (bits) / 128 \
                                         : (dim) / (group) * ((group) / 16 % 4 == 0 ? 4 : 2))
#define NYB_DECODE_DIM_WARPS(dim, bits, group, warps)               \
  (NYB_DECODE_PIECES(dim, bits, group) % 8 == 0 && (warps) >= 8 ? 8 \
   : NYB_DECODE_PIECES(dim, bits, group) % 4 == 0               ? 4 \
   : NYB_DECODE_PIECES(dim, bits, group) % 2 == 0               ? 2 \
                                                                : 1)

/* Dynamic shared memory of the kernel, for tiles of `tile` tokens a warp in `stages` stages and
 * `rows` query rows at once (at most columns): copies, query rows, weights, what warps tell each
 * other, sums of warps that share elements, waiting subtrees. */
#define NYB_DECODE_UP_16(bytes) (((bytes) + 15) / 16 * 16)
#define NYB_DECODE_STAGE_BYTES(key_dim, value_dim, key_bits, value_bits, key_group, \
                               key_scale_bytes, tile)                               \
  (NYB_DECODE_TILES *                                                               \
   (NYB_DECODE_UP_16((tile) * (key_dim) * (key_bits) / 8) +                         \
    NYB_DECODE_UP_16((tile) * (value_dim) * (value_bits) / 8) +                     \
    2 * NYB_DECODE_UP_16((tile) * ((key_dim) / (key_group)) * (key_scale_bytes))))
#define NYB_DECODE_SCALE_STAGE_BYTES(value_dim, value_group, value_scale_bytes, tile) \
  (NYB_DECODE_TILES * 2 *                                                             \
   NYB_DECODE_UP_16((tile) * ((value_dim) / (value_group)) * (value_scale_bytes)))
/* Query rows, brought to f16: two words a lane for each 16 elements and 8 rows. */
#define NYB_DECODE_QUERY_BYTES(key_dim, columns) (((key_dim) / 16 + 1) / 2 * ((columns) / 8) * 512)
#define NYB_DECODE_QUERY_SUMS_BYTES(key_dim, key_group, columns) \
  (((key_dim) / (key_group) > 4 ? (key_dim) / (key_group) : 4) * (columns)*4)
/* Of a row: how many tokens it sees; or where it stands and what becomes of its scores. */
#define NYB_DECODE_SIGHT_WORDS(features)                                 \
  (((features) & (NYB_DECODE_SIGHT | NYB_DECODE_SLOPED)) != 0 ||         \
           (((features) & (NYB_DECODE_BOOLS | NYB_DECODE_ADDED)) != 0 && \
            ((features)&NYB_DECODE_ONE_MASK_ROW) == 0)                   \
       ? 8                                                               \
       : 1)
/* Two steps' weights, and before them what is known of the query rows. Where two warps share a
 * tile, weights in f32 too. */
#define NYB_DECODE_SCRATCH_BYTES(key_dim, columns, warps) \
  ((2 * (warps) + (key_dim) / 16) * (columns)*4)
#define NYB_DECODE_FLOAT_WEIGHT_BYTES(tile, columns, warps) \
  ((warps) > NYB_DECODE_TILES ? NYB_DECODE_TILES * (tile) * (columns)*4 : 0)
#define NYB_DECODE_STEP_WEIGHT_BYTES(value_groups, tile, columns, warps) \
  ((value_groups) * (columns) * (NYB_DECODE_TILES * (tile)*2 + 16) +     \
   NYB_DECODE_FLOAT_WEIGHT_BYTES(tile, columns, warps))
#define NYB_DECODE_WEIGHT_BYTES(key_dim, value_groups, tile, columns, warps)  \
  (2 * NYB_DECODE_STEP_WEIGHT_BYTES(value_groups, tile, columns, warps) >     \
           NYB_DECODE_SCRATCH_BYTES(key_dim, columns, warps)                  \
       ? 2 * NYB_DECODE_STEP_WEIGHT_BYTES(value_groups, tile, columns, warps) \
       : NYB_DECODE_SCRATCH_BYTES(key_dim, columns, warps))
#define NYB_DECODE_RAISED_BYTES(value_groups, columns, warps) \
  NYB_DECODE_UP_16(((warps) > NYB_DECODE_TILES ? 2 : (warps)) * ((columns) + (value_groups)) * 4)
#define NYB_DECODE_TOLD_BYTES(value_groups, columns, warps) \
  (NYB_DECODE_RAISED_BYTES(value_groups, columns, warps) +  \
   ((warps) > NYB_DECODE_TILES ? 0 : (warps) * ((value_groups) + 1) * (columns)*4))
/* Scores of a part of head_dim, for the warp that adds the other: a lane's of one token. */
#define NYB_DECODE_PARTS_BYTES(columns, warps) \
  ((warps) > NYB_DECODE_TILES ? (warps)*32 * ((columns) / 8) * 8 : 0)
/* Powers of two for each group of V, a warp's own. */
#define NYB_DECODE_GROWS_BYTES(value_groups, warps) \
  ((warps) > NYB_DECODE_TILES ? (warps)*NYB_DECODE_UP_16((value_groups)*4) : 0)
/* Where a warp is in its run of leaves, while it is within one. */
#define NYB_DECODE_PARKED_WARP_BYTES 64
#define NYB_DECODE_PARKED_BYTES(warps) \
  ((warps) > NYB_DECODE_TILES ? (warps)*NYB_DECODE_PARKED_WARP_BYTES : 0)
#define NYB_DECODE_TREE_BYTES(key_dim, value_dim, columns, rows, dim_warps, warps, features) \
  (((warps) / (dim_warps)-1) * (value_dim) * (columns)*4 +                                   \
   NYB_DECODE_LEVELS(key_dim, value_dim, rows, features) *                                   \
       ((warps) > NYB_DECODE_TILES                                                           \
            ? (warps)*4 * ((columns) / 8) * 16                                               \
            : (dim_warps)*8 *                                                                \
                  ((rows) <= 2   ? 1                                                         \
                   : (rows) <= 4 ? 2                                                         \
                                 : 4) *                                                      \
                  ((value_dim) / (dim_warps) / 16 + 1) * ((columns) / 8) * 16))
#define NYB_DECODE_SHARED_BYTES(key_dim, value_dim, key_bits, value_bits, key_group, value_group, \
                                key_scale_bytes, value_scale_bytes, tile, stages, columns, rows,  \
                                features)                                                         \
  ((stages)*NYB_DECODE_STAGE_BYTES(key_dim, value_dim, key_bits, value_bits, key_group,           \
                                   key_scale_bytes, tile) +                                       \
   ((stages) + 1) *                                                                               \
       NYB_DECODE_SCALE_STAGE_BYTES(value_dim, value_group, value_scale_bytes, tile) +            \
   NYB_DECODE_QUERY_BYTES(key_dim, columns) +                                                     \
   NYB_DECODE_QUERY_SUMS_BYTES(key_dim, key_group, columns) +                                     \
   (columns)*4 * (NYB_DECODE_SIGHT_WORDS(features) +                                              \
                  NYB_DECODE_WARP_PARTS(key_dim, value_dim, features) - 1) +                      \
   NYB_DECODE_WEIGHT_BYTES(key_dim, (value_dim) / (value_group), tile, columns,                   \
                           NYB_DECODE_WARPS(key_dim, value_dim, features)) +                      \
   NYB_DECODE_TOLD_BYTES((value_dim) / (value_group), columns,                                    \
                         NYB_DECODE_WARPS(key_dim, value_dim, features)) +                        \
   NYB_DECODE_PARTS_BYTES(columns, NYB_DECODE_WARPS(key_dim, value_dim, features)) +              \
   NYB_DECODE_GROWS_BYTES((value_dim) / (value_group),                                            \
                          NYB_DECODE_WARPS(key_dim, value_dim, features)) +                       \
   NYB_DECODE_PARKED_BYTES(NYB_DECODE_WARPS(key_dim, value_dim, features)) +                      \
   NYB_DECODE_TREE_BYTES(key_dim, value_dim, columns, rows,                                       \
                         NYB_DECODE_DIM_WARPS(value_dim, value_bits, value_group,                 \
                                              NYB_DECODE_WARPS(key_dim, value_dim, features)),    \
                         NYB_DECODE_WARPS(key_dim, value_dim, features), features))

/* Leaves that a lane of the merge adds at once, the elements of a row that it adds, and the lanes
 * of a warp that share a row's elements at most. */
#define NYB_MERGE_GROUP 8
#define NYB_MERGE_ELEMENTS 4
#define NYB_MERGE_WARP_GROUPS 4
#define NYB_MERGE_MAX_WARPS 8

/* What the kernel is built with, by the bytes of a token's codes, and how many blocks of threads a
 * multiprocessor shall hold. */
#define NYB_DECODE_TILE(key_dim, value_dim, key_row, value_row) \
  ((key_dim) + (value_dim) <= 256 && (key_row) + (value_row) <= 192 ? 32 : 16)
#define NYB_DECODE_MAX_STAGES 5
#define NYB_DECODE_MIN_BLOCKS(key_dim, value_dim, key_row, value_row, groups, columns, rows) \
  ((columns) > 8 || (key_dim) % 64 != 0 || (value_dim) % 64 != 0 ? 1                         \
   : (key_dim) <= 128 && (value_dim) <= 128                                                  \
       ? NYB_DECODE_MIN_BLOCKS_128(key_row, value_row, groups, rows)                         \
   : (key_dim) == 256 && (value_dim) == 256 && (groups) <= 8 && (rows) <= 4 ? 2              \
                                                                            : 1)
#define NYB_DECODE_MIN_BLOCKS_128(key_row, value_row, groups, rows) \
  ((key_row) + (value_row) > 160 || (groups) > 4 || (rows) > 4 ? 2 : 3)

typedef struct nyb_decode_stored {
  const char *codes, *scales, *biases;
  long long codes_stride[3], scales_stride[3], biases_stride[3];
} nyb_decode_stored;

/* What a kernel reads first stands first, and what it reads together: words come from memory in
 * lines of 64 bytes, the first of which begins 16 bytes before the parameter, and a chain of lines
 * that no kernel has read yet costs some 0.2 us each. */
typedef struct nyb_decode_arguments {
  const int *lengths;
  long long capacity_tokens;
  int batch, kv_heads;
  int heads_per_kv, query_len;
  int row_tiles; /* of COLUMNS query rows each */
  int causal;
  float scale;
  int blocks; /* of threads, that attention_decode is launched with */

  const char *q;
  long long q_stride[3];
  float *partials;           /* [pair][leaf][row][value_dim], unnormalised */
  float *statistics;         /* [pair][leaf][NYB_DECODE_STATISTICS] */
  long long capacity_leaves; /* of one pair, in the workspace */
  int page_shift;            /* a page is of 2^page_shift tokens */
  int padding;

  nyb_decode_stored k, v;

  /* attention_merge */
  char *out;
  long long out_stride[3];
  char *lse; /* or null */
  long long lse_stride[3];
  int out_type;     /* dtype: F16 or BF16 */
  int merge_groups; /* 1, 2, 4, ... WARP_GROUPS * MAX_WARPS */
  int leaf_tokens;
  int levels;          /* subtrees of up to 2^levels leaves are written */
  int merge_rounds;    /* each of merge_groups * NYB_MERGE_GROUP leaves */
  int merge_from_seen; /* the first is the one with the first leaf that is seen, not leaf 0 */
} nyb_decode_arguments;

/* Where tokens stand, PLACED of attention_decode: one behind the other; from a start on, which may
 * be anywhere, or in a ring; in runs of NYB_DECODE_PAGE_RUN, in pages. */
#define NYB_DECODE_IN_ORDER 0
#define NYB_DECODE_SHIFTED 1
#define NYB_DECODE_PAGES 2
#define NYB_DECODE_PAGE_RUN 16

/* What a row sees and what becomes of its scores (attention_sight.cuh), and where tokens stand
 * (attention_places.cuh): what attention_decode and attention_merge look at of it. */
typedef struct nyb_decode_features {
  int mask;
  int window_tokens, window_keep_tokens; /* window 0: none */
  float softcap, softcap_reciprocal;     /* rounded as scores are */
  int padding;
  const int *starts; /* or null */
  const float *slopes, *sinks;

  const char *mask_array;
  long long mask_stride[3];

  const int *page_table;
  long long page_table_stride;
  int page_count;
  int ring_keep_tokens, ring_tokens; /* ring_tokens: its slots, those kept too; 0: no ring */
  int ring_padding;
  const int *ring_offsets; /* or null */
} nyb_decode_features;

/* The parameter of kernels that have FEATURES or are PLACED. */
typedef struct nyb_decode_call_arguments {
  nyb_decode_arguments decode;
  nyb_decode_features features;
} nyb_decode_call_arguments;

#endif
