/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernels attention_general, attention_general_merge and attention_compat, for
 * the host's compiler and the device's. Strides are in bytes: batch, head, token (or query row). */
#ifndef NYB_ATTENTION_ARGUMENTS_H
#define NYB_ATTENTION_ARGUMENTS_H

typedef struct nyb_attention_rows {
  const char *codes, *scales, *biases;
  long long codes_stride[3], scales_stride[3], biases_stride[3];
  int bits; /* 0: plain */
  int group_size;
  int dtype; /* of scales and biases; plain: of the elements */
  int padding;
} nyb_attention_rows;

typedef struct nyb_attention_arguments {
  nyb_attention_rows k, v;
  const char *q;
  char *out;
  char *lse;          /* or null */
  const int *lengths; /* clamped to [0, capacity_tokens] by whoever reads them */
  long long q_stride[3], out_stride[3], lse_stride[3];
  long long capacity_tokens;
  long long batch, kv_heads, heads_per_kv, query_len, key_dim, value_dim;
  int causal;
  int query_dtype, out_dtype;
  int round_to;      /* dtype that scaled queries and scores are rounded to; f32: not at all */
  float scale;       /* already rounded to it */
  int split;         /* attention_general: a block takes one chunk, and the merge kernel follows */
  float *memory;     /* values of partial results, or compat's slots of a score row and a query */
  float *statistics; /* attention_general: a maximum and a sum for each partial result */
  long long chunks;  /* partial results of a row, in the workspace */
  long long slot_floats; /* compat */
} nyb_attention_arguments;

#endif
