/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernels attention_decode and attention_merge, for the host's compiler and
 * the device's. Strides are in bytes: batch, head, token (or row). */
#ifndef NYB_ATTENTION_DECODE_ARGUMENTS_H
#define NYB_ATTENTION_DECODE_ARGUMENTS_H

#define NYB_DECODE_BLOCK_TOKENS 512
/* Subtrees of up to 2^levels blocks are added before they go to the workspace. */
#define NYB_DECODE_LEVELS 3
/* Floats for each block: maxima (whole log2 units) and sums of all rows, then, as an int, whether
 * the block begins a subtree that was written. */
#define NYB_DECODE_STATISTICS(columns) (2 * (columns) + 4)

/* Bytes of the rings of a block of threads, for tiles of `tile` tokens in `stages` stages. */
#define NYB_DECODE_UP_16(bytes) (((bytes) + 15) / 16 * 16)
#define NYB_DECODE_RING_BYTES(key_dim, value_dim, key_bits, value_bits, key_group, value_group,  \
                              key_scale_bytes, value_scale_bytes, tile, stages)                  \
  NYB_DECODE_UP_16(                                                                              \
      4 * (stages) *                                                                             \
          (NYB_DECODE_UP_16((tile) * (key_dim) * (key_bits) / 8) +                               \
           NYB_DECODE_UP_16((tile) * (value_dim) * (value_bits) / 8) +                           \
           2 * NYB_DECODE_UP_16((tile) * ((key_dim) / (key_group)) * (key_scale_bytes)) +        \
           2 * NYB_DECODE_UP_16((tile) * ((value_dim) / (value_group)) * (value_scale_bytes))) + \
      16)
/* Query rows, brought to f16: two words a lane for each 16 elements and 8 rows. */
#define NYB_DECODE_QUERY_BYTES(key_dim, columns) (((key_dim) / 16 + 1) / 2 * ((columns) / 8) * 512)
/* Dynamic shared memory of the kernel, for `rows` query rows at once (at most columns). */
#define NYB_DECODE_SHARED_BYTES(key_dim, value_dim, key_bits, value_bits, key_group, value_group, \
                                key_scale_bytes, value_scale_bytes, tile, stages, columns, rows)  \
  (NYB_DECODE_RING_BYTES(key_dim, value_dim, key_bits, value_bits, key_group, value_group,        \
                         key_scale_bytes, value_scale_bytes, tile, stages) +                      \
   2 * 4 * (columns)*4 + 4 * NYB_DECODE_QUERY_BYTES(key_dim, columns) +                           \
   (4 + NYB_DECODE_LEVELS) * (rows) * ((value_dim) + 4) * 4)

#define NYB_MERGE_THREADS 256

/* What the kernel is built with, by the bytes of a token's codes, and how many blocks of threads a
 * multiprocessor shall hold. */
#define NYB_DECODE_TILE(key_row, value_row) ((key_row) + (value_row) <= 256 ? 32 : 16)
#define NYB_DECODE_STAGES 2
#define NYB_DECODE_MIN_BLOCKS(key_dim, value_dim, key_groups, value_groups, columns)     \
  ((key_dim) <= 128 && (value_dim) <= 128 && (key_groups) <= 2 && (value_groups) <= 2 && \
           (columns) == 8                                                                \
       ? 3                                                                               \
       : 2)

typedef struct nyb_decode_stored {
  const char *codes, *scales, *biases;
  long long codes_stride[3], scales_stride[3], biases_stride[3];
} nyb_decode_stored;

typedef struct nyb_decode_arguments {
  nyb_decode_stored k, v;
  const char *q;
  char *out;
  char *lse; /* or null */
  const int *lengths;
  float *partials;   /* [pair][block][row][value_dim], unnormalised */
  float *statistics; /* [pair][block][NYB_DECODE_STATISTICS] */
  long long q_stride[3], out_stride[3], lse_stride[3];
  long long capacity_tokens;
  long long capacity_blocks; /* of one pair, in the workspace */
  int batch, kv_heads;
  int heads_per_kv, query_len;
  int row_tiles; /* of COLUMNS query rows each */
  int causal;
  float scale;
  int out_type;     /* dtype: F16 or BF16 */
  int merge_groups; /* attention_merge: 1, 2, 4, ... 32 */
} nyb_decode_arguments;

#endif
