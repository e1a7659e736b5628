/* SPDX-License-Identifier: Apache-2.0 */
/* Which tokens a query row sees: by mask and window, and by the mask's array. */
#ifndef NYB_ATTENTION_SIGHT_H
#define NYB_ATTENTION_SIGHT_H

#include <math.h>

#include "attention_places.h"
#include "nybble.h"
#include "numeric.h"
#include "views.h"

/* Where a query row stands, as the sequence counts its tokens; it may be outside. */
static inline int64_t nyb_row_position(const nyb_attention *attention, int64_t batch, int64_t row) {
  if (attention->mask == NYB_MASK_CAUSAL_TOP_LEFT)
    return row - nyb_sequence_start(attention, batch);
  return nyb_sequence_tokens(attention, batch) - attention->query_len + row;
}

/* A query row sees no token from here on. */
static inline int64_t nyb_visible_tokens(const nyb_attention *attention, int64_t batch,
                                         int64_t row) {
  const int64_t tokens = nyb_sequence_tokens(attention, batch);
  if (attention->mask == NYB_MASK_NONE) return tokens;
  const int64_t visible = nyb_row_position(attention, batch, row) + 1;
  return visible < 0 ? 0 : visible < tokens ? visible : tokens;
}

/* What mask and window let a row see: [0, keep_end) and, not before it, [begin, end). */
typedef struct nyb_sight {
  int64_t keep_end, begin, end;
} nyb_sight;

static inline nyb_sight nyb_sight_of(const nyb_attention *attention, int64_t batch, int64_t row) {
  nyb_sight sight = {.end = nyb_visible_tokens(attention, batch, row)};
  if (attention->window_tokens == 0) return sight;
  const int64_t window =
      attention->window_tokens < INT32_MAX ? attention->window_tokens : INT32_MAX;
  const int64_t begin = nyb_row_position(attention, batch, row) - window + 1;
  const int64_t keep = attention->window_keep_tokens;
  sight.keep_end = keep < sight.end ? keep : sight.end;
  sight.begin = begin < sight.end ? begin : sight.end;
  if (sight.begin <= sight.keep_end) sight.begin = sight.keep_end = 0;
  return sight;
}

static inline int64_t nyb_mask_column_bytes(const nyb_mask_array *mask) {
  return mask->kind == NYB_MASK_ARRAY_ADD ? (int64_t)nyb_dtype_bytes(mask->dtype) : 1;
}

/* The mask array's row of a query row, at the column of the sequence's first token. */
static inline const char *nyb_mask_row(const nyb_attention *attention, int64_t batch, int64_t head,
                                       int64_t row) {
  const nyb_mask_array *mask = &attention->mask_array;
  const int64_t first = nyb_sequence_start(attention, batch);
  return (const char *)mask->data +
         (nyb_row_offset(mask->stride, batch, head, row) + first) * nyb_mask_column_bytes(mask);
}

/* Whether it hides a token from that row. */
static inline bool nyb_mask_hides(const nyb_mask_array *mask, const char *mask_row, int64_t token) {
  if (mask->kind == NYB_MASK_ARRAY_BOOL) return mask_row[token] == 0;
  return nyb_load_f32(mask_row, mask->dtype, token) == -INFINITY;
}

/* Whether it hides tokens [begin, end) from that row. */
static inline bool nyb_mask_hides_all(const nyb_mask_array *mask, const char *mask_row,
                                      int64_t begin, int64_t end) {
  for (; mask->kind == NYB_MASK_ARRAY_BOOL && begin + 8 <= end; begin += 8) {
    uint64_t eight;
    memcpy(&eight, mask_row + begin, sizeof eight);
    if (eight != 0) return false;
  }
  for (; begin < end; begin++) {
    if (!nyb_mask_hides(mask, mask_row, begin)) return false;
  }
  return true;
}

#endif
