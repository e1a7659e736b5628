/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens of a sequence stand: the one place that knows starts, pages, rings and parts.
 * Tokens are counted from the sequence's own first one, as chunks are. */
#ifndef NYB_ATTENTION_PLACES_H
#define NYB_ATTENTION_PLACES_H

#include "format.h"
#include "kernels.h"
#include "nybble.h"

/* The parts of a sequence; all calls have the middle one, k and v. */
typedef enum nyb_part_id {
  NYB_PART_MIDDLE,
  NYB_PART_FIRST,
  NYB_PART_LAST,
  NYB_PART_COUNT
} nyb_part_id;

/* The tokens that a part has room for. */
int64_t nyb_part_tokens(const nyb_attention *attention, nyb_part_id part);
const nyb_stored *nyb_part_keys(const nyb_attention *attention, nyb_part_id part);
const nyb_stored *nyb_part_values(const nyb_attention *attention, nyb_part_id part);

static inline bool nyb_has_parts(const nyb_attention *attention) {
  return attention->first.tokens > 0 || attention->last.tokens > 0;
}

static inline bool nyb_has_part(const nyb_attention *attention, nyb_part_id part) {
  return part == NYB_PART_MIDDLE || nyb_part_tokens(attention, part) > 0;
}

static inline bool nyb_is_paged(const nyb_attention *attention) {
  return attention->pages.page_tokens != 0;
}

static inline int64_t nyb_pages_per_sequence(const nyb_attention *attention) {
  const int64_t page_tokens = attention->pages.page_tokens;
  return (attention->capacity_tokens + page_tokens - 1) / page_tokens;
}

/* Tokens that there is room for in each sequence, all parts together. */
static inline int64_t nyb_room_tokens(const nyb_attention *attention) {
  return attention->first.tokens + attention->capacity_tokens + attention->last.tokens;
}

/* Where a sequence begins, as `lengths` counts tokens, and how many tokens it has from there on. */
static inline int64_t nyb_sequence_start(const nyb_attention *attention, int64_t batch) {
  return attention->starts == NULL ? 0 : attention->starts[batch];
}

static inline int64_t nyb_sequence_tokens(const nyb_attention *attention, int64_t batch) {
  return attention->lengths[batch] - nyb_sequence_start(attention, batch);
}

typedef struct nyb_place {
  nyb_part_id part;
  int64_t part_end; /* the token with which the next part begins; INT64_MAX where none follows */
  int64_t batch;    /* in the part's views: the sequence, or the page */
  int64_t row;
  int64_t run; /* tokens from this one on that stand in rows that follow each other, or more */
} nyb_place;

nyb_place nyb_place_of(const nyb_attention *attention, int64_t batch, int64_t token);

/* Rows of K or of V in one part, with what their checked format takes. */
typedef struct nyb_part_rows {
  const nyb_stored *stored;
  nyb_row_layout layout;
  int64_t dim;
} nyb_part_rows;

/* `tokens` rows that follow each other, from a place on. */
nyb_tile_tokens nyb_tile_at(const nyb_part_rows *rows, int64_t kv_head, const nyb_place *place,
                            int64_t tokens);

/* Tokens of one part wherever they stand: their rows are copied, packed as they are, to `memory`,
 * which has room for NYB_TILE_TOKENS. */
nyb_tile_tokens nyb_gather_tile(const nyb_attention *attention, int64_t batch, int64_t kv_head,
                                const nyb_part_rows *rows, int64_t first, int64_t tokens,
                                char *memory);

#endif
