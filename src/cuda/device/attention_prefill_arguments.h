/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernel attention_prefill, for the host's compiler and the device's. Strides
 * are in bytes: batch, head, token (or row). */
#ifndef NYB_ATTENTION_PREFILL_ARGUMENTS_H
#define NYB_ATTENTION_PREFILL_ARGUMENTS_H

/* Query rows of a block: those of one KV head, position by position, its query heads in turn. */
#define NYB_PREFILL_ROWS 128
/* Tokens whose softmax is taken on its own; longer sequences are merged from these, ascending. Part
 * of the result's bits. */
#define NYB_PREFILL_CHUNK_TOKENS 4096

/* Of a partial result, as the threads hold it: maxima (log2 units), sums, values. */
#define NYB_PREFILL_PARTIAL_FLOATS(value_dim) (((value_dim) + 8) * NYB_PREFILL_ROWS)

/* Dynamic shared memory. A tile's rows are padded to panels of 64 elements, 128 bytes. */
#define NYB_PREFILL_TOKENS(key_dim, value_dim) ((key_dim) <= 128 && (value_dim) <= 128 ? 128 : 64)
#define NYB_PREFILL_PANEL_ROW_BYTES(dim) (((dim) + 63) / 64 * 128)
#define NYB_PREFILL_SMALL_BYTES 1024
#define NYB_PREFILL_SHARED_BYTES(key_dim, value_dim)                                     \
  (NYB_PREFILL_PANEL_ROW_BYTES(key_dim) * NYB_PREFILL_ROWS +                             \
   2 * (NYB_PREFILL_PANEL_ROW_BYTES(key_dim) + NYB_PREFILL_PANEL_ROW_BYTES(value_dim)) * \
       NYB_PREFILL_TOKENS(key_dim, value_dim) +                                          \
   NYB_PREFILL_SMALL_BYTES)

typedef struct nyb_prefill_stored {
  const char *codes, *scales, *biases;
  long long codes_stride[3], scales_stride[3], biases_stride[3];
} nyb_prefill_stored;

typedef struct nyb_prefill_arguments {
  nyb_prefill_stored k, v;
  const char *q;
  char *out;
  char *lse; /* or null */
  const int *lengths;
  /* Unnormalised results of 128 rows each, NYB_PREFILL_PARTIAL_FLOATS: [row tile of every KV head]
   * [chunk] where chunks > 1, else [block of the grid], what it has walked so far. Null where the
   * capacity fits one chunk. */
  float *partials;
  long long q_stride[3], out_stride[3], lse_stride[3];
  long long capacity_tokens;
  int query_len, batch, kv_heads, heads_per_kv; /* query_len * heads_per_kv < 2^31 - 128 */
  int row_tiles;                                /* of one KV head of one sequence */
  int chunks; /* split: blocks of a row tile, one for each chunk of the capacity; else 1 */
  int causal;
  float scale;
  int padding;
} nyb_prefill_arguments;

#endif
