/* SPDX-License-Identifier: Apache-2.0 */
/* What attention.c hands to the two paths once a descriptor has been checked. */
#ifndef NYB_ATTENTION_H
#define NYB_ATTENTION_H

#include "attention_places.h"
#include "attention_sight.h"
#include "context.h"
#include "format.h"
#include "kernels.h"
#include "nybble.h"

/* Chunks of tokens are attended on their own and merged in ascending order. The size is part of the
 * result's bits: it depends on nothing. */
enum { NYB_CHUNK_TOKENS = 1024 };

typedef struct nyb_attention_call {
  nyb_context *context;
  const nyb_attention *attention;
  nyb_format_id key_format, value_format;                      /* of k and v */
  nyb_row_layout keys[NYB_PART_COUNT], values[NYB_PART_COUNT]; /* of the parts that there are */
  int64_t heads_per_kv; /* query heads that share a KV head */
} nyb_attention_call;

/* One query row times the scale, rounded as the call asks for, to floats. */
void nyb_load_query(const nyb_attention *attention, int64_t batch, int64_t head, int64_t row,
                    float *q);
/* A finished row, and its lse where one is wanted. */
void nyb_store_row(const nyb_attention *attention, int64_t batch, int64_t head, int64_t row,
                   const float *values, float lse);

/* NYB_ERROR_SHAPE where attention.field is not least .. most. */
nyb_status nyb_check_size(const char *field, int64_t value, int64_t least, int64_t most);
/* The sizes of starts, pages, ring and parts, and that no two are set. */
nyb_status nyb_check_places(const nyb_attention *attention);
/* lengths, and the numbers that say for each sequence where its tokens stand. */
nyb_status nyb_check_place_values(const nyb_attention *attention);

/* Workspace in bytes, a multiple of 64. */
int64_t nyb_attention_fused_workspace(const nyb_attention_call *call);
int64_t nyb_attention_compat_workspace(const nyb_attention_call *call);

void nyb_attention_fused_run(const nyb_attention_call *call, char *workspace);
void nyb_attention_compat_run(const nyb_attention_call *call, char *workspace);

#endif
