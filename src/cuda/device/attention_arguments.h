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

/* Where a sequence's tokens stand: nyb_attention_arguments.places. */
enum {
  NYB_PLACES_ROWS = 0, /* in rows that follow each other */
  NYB_PLACES_PAGES = 1,
  NYB_PLACES_RING = 2,
  NYB_PLACES_PARTS = 3
};

/* The values of nyb_mask and nyb_mask_array_kind. */
enum { NYB_DEVICE_MASK_NONE = 0, NYB_DEVICE_MASK_TOP_LEFT = 2 };
enum { NYB_DEVICE_ARRAY_BOOL = 1, NYB_DEVICE_ARRAY_ADD = 2 };

typedef struct nyb_attention_arguments {
  nyb_attention_rows k, v;
  const char *q;
  char *out;
  char *lse;          /* or null */
  const int *lengths; /* clamped to [0, room_tokens] by whoever reads them */
  long long q_stride[3], out_stride[3], lse_stride[3];
  long long capacity_tokens;
  long long room_tokens; /* of all parts together, and no more than the mask has columns */
  long long batch, kv_heads, heads_per_kv, query_len, key_dim, value_dim;
  int causal;
  int query_dtype, out_dtype;
  int round_to; /* dtype that scaled queries and scores are rounded to; f32: not at all */
  float scale;  /* already rounded to it */
  int split; /* attention_general: blocks that share a unit's chunks, before the merge kernel; 0: a
                block takes whole units */
  float *memory;     /* values of partial results, or compat's slots of a score row and a query */
  float *statistics; /* attention_general: a maximum and a sum for each partial result */
  long long chunks;  /* partial results of a row, in the workspace */
  long long slot_floats; /* compat */

  /* What a row sees (attention_sight.cuh). */
  int mask;
  int mask_kind;     /* of the array; 0: none */
  int mask_dtype;    /* ADD: of the array's columns */
  int round_sums_to; /* where scores go once a mask has been added, and probabilities */
  const char *mask_array;
  long long mask_stride[3];
  long long mask_column_bytes;
  long long window_tokens, window_keep_tokens; /* less than 2^31; window 0: none */
  const int *starts;                           /* or null */
  const float *sinks, *slopes;                 /* or null */
  float softcap;                               /* rounded as scores are; 0: none */
  float softcap_reciprocal;
  float lowest_score;      /* compat: of a token that a mask of bools hides by a number */
  int hides_by_number;     /* compat */
  long long rows_per_unit; /* attention_general */

  /* Where its tokens stand (attention_places.cuh). */
  int places;
  int ring_keep_tokens;
  const int *page_table;
  long long page_table_stride;
  int page_tokens, page_count;
  const int *ring_offsets;
  int first_tokens, last_tokens;
  const int *last_begins;
  nyb_attention_rows first_k, first_v, last_k, last_v;
} nyb_attention_arguments;

#endif
