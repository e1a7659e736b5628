/* SPDX-License-Identifier: Apache-2.0 */
/* Where each kind of cache keeps a token, and what appends and trims leave of a sequence: the one
 * text for the host (src/cache_kinds.c) and the device. All of it is arithmetic on one sequence's
 * numbers. */
#ifndef NYB_CACHE_KINDS_CUH
#define NYB_CACHE_KINDS_CUH

#include "portable.cuh"

typedef enum nyb_cache_kind {
  NYB_CACHE_CONTIGUOUS, /* rows of a sequence one after the other */
  NYB_CACHE_ROTATING,   /* window_tokens: first tokens that stay, then a ring */
  NYB_CACHE_MIXED,      /* first_tokens, last_tokens: three regions */
  NYB_CACHE_PAGED       /* page_tokens: pages of a pool */
} nyb_cache_kind;

/* What a kind's options say; those of the other kinds are 0. */
typedef struct nyb_kind_numbers {
  int kind; /* an nyb_cache_kind */
  int padding;
  long long window_tokens, keep_tokens;
  long long first_tokens, last_tokens;
  long long page_tokens;
} nyb_kind_numbers;

/* What there is of a sequence. The tokens held are numbered from 0, without those dropped. */
typedef struct nyb_cache_sequence {
  int64_t dropped;    /* rotating: tokens that left the window */
  int64_t held;       /* tokens that are there */
  int64_t offset;     /* rotating: as in nyb_ring */
  int64_t last_begin; /* mixed: as in nyb_attention.last_begins */
} nyb_cache_sequence;

/* Where rows stand: the quantized body, which grows, and of a mixed cache the parts of plain rows
 * beside it, which do not. */
typedef enum nyb_cache_region { NYB_BODY, NYB_FIRST, NYB_LAST, NYB_CACHE_REGIONS } nyb_cache_region;

/* Rows that stand one after another: in this block of this region, from this slot on. */
typedef struct nyb_cache_place {
  nyb_cache_region region;
  int64_t block, slot, rows;
} nyb_cache_place;

NYB_FUNCTION int64_t nyb_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
NYB_FUNCTION int64_t nyb_larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Of numbers below 2^32, which tokens and slots are: a division of 64 bits takes the device long.
 */
NYB_FUNCTION int64_t nyb_short_quotient(int64_t a, int64_t b) {
  return (int64_t)((uint32_t)a / (uint32_t)b);
}
NYB_FUNCTION int64_t nyb_short_rest(int64_t a, int64_t b) {
  return (int64_t)((uint32_t)a % (uint32_t)b);
}

/* ---- Places --------------------------------------------------------------------------------- */

NYB_FUNCTION nyb_cache_place nyb_kind_place(nyb_cache_region region, int64_t block, int64_t slot,
                                            int64_t rows) {
  nyb_cache_place place;
  place.region = region;
  place.block = block;
  place.slot = slot;
  place.rows = rows;
  return place;
}

NYB_FUNCTION nyb_cache_place nyb_ring_place(const nyb_kind_numbers *kind, int64_t body_tokens,
                                            const nyb_cache_sequence *state, int64_t sequence,
                                            int64_t token) {
  const int64_t keep = kind->keep_tokens, slots = body_tokens - keep;
  if (token < keep) return nyb_kind_place(NYB_BODY, sequence, token, keep - token);
  const int64_t slot = nyb_short_rest(token - keep + state->offset, slots);
  return nyb_kind_place(NYB_BODY, sequence, keep + slot, slots - slot);
}

NYB_FUNCTION nyb_cache_place nyb_mixed_place(const nyb_kind_numbers *kind,
                                             const nyb_cache_sequence *state, int64_t sequence,
                                             int64_t token) {
  const int64_t first = kind->first_tokens, last = kind->last_tokens;
  if (token < first) return nyb_kind_place(NYB_FIRST, sequence, token, first - token);
  if (token < state->last_begin) {
    return nyb_kind_place(NYB_BODY, sequence, token - first, state->last_begin - token);
  }
  const int64_t slot = nyb_short_rest(token, last);
  return nyb_kind_place(NYB_LAST, sequence, slot, last - slot);
}

/* Where token `token`, less than state->held, stands, and how many of the tokens from there on
 * stand behind it. body_tokens is the capacity of the body; pages the sequence's row of the table,
 * where there is one. */
NYB_FUNCTION nyb_cache_place nyb_kind_place_of(const nyb_kind_numbers *kind, int64_t body_tokens,
                                               const nyb_cache_sequence *state, int64_t sequence,
                                               const int32_t *pages, int64_t token) {
  nyb_cache_place place;
  if (kind->kind == NYB_CACHE_ROTATING) {
    place = nyb_ring_place(kind, body_tokens, state, sequence, token);
  } else if (kind->kind == NYB_CACHE_MIXED) {
    place = nyb_mixed_place(kind, state, sequence, token);
  } else if (kind->kind == NYB_CACHE_PAGED) {
    const int64_t page = nyb_short_quotient(token, kind->page_tokens);
    const int64_t row = token - page * kind->page_tokens;
    place = nyb_kind_place(NYB_BODY, pages[page], row, kind->page_tokens - row);
  } else {
    place = nyb_kind_place(NYB_BODY, sequence, token, state->held - token);
  }
  place.rows = nyb_smaller(place.rows, state->held - token);
  return place;
}

/* The capacity of the body that a sequence needs. */
NYB_FUNCTION int64_t nyb_kind_body_tokens(const nyb_kind_numbers *kind,
                                          const nyb_cache_sequence *state) {
  if (kind->kind != NYB_CACHE_MIXED) return state->held;
  return nyb_larger(0, state->last_begin - kind->first_tokens);
}

/* ---- Appends and trims ---------------------------------------------------------------------- */

/* Of what was there, the first new row sees window_tokens - 1 tokens; the others go. */
NYB_FUNCTION void nyb_kind_slide(const nyb_kind_numbers *kind, int64_t body_tokens,
                                 nyb_cache_sequence *state) {
  const int64_t lost = state->held - (kind->window_tokens - 1);
  if (lost <= 0) return;
  state->dropped += lost;
  state->held -= lost;
  state->offset = nyb_short_rest(state->offset + lost, body_tokens - kind->keep_tokens);
}

/* What an append of so many tokens leaves. */
NYB_FUNCTION nyb_cache_sequence nyb_kind_after_append(const nyb_kind_numbers *kind,
                                                      int64_t body_tokens,
                                                      const nyb_cache_sequence *before,
                                                      int64_t tokens) {
  nyb_cache_sequence after = *before;
  if (tokens == 0) return after;
  if (kind->kind == NYB_CACHE_ROTATING) nyb_kind_slide(kind, body_tokens, &after);
  after.held += tokens;
  if (kind->kind == NYB_CACHE_MIXED) {
    const int64_t begin =
        nyb_larger(nyb_smaller(kind->first_tokens, after.held), after.held - kind->last_tokens);
    after.last_begin = nyb_larger(after.last_begin, begin); /* what is quantized stays so */
  }
  return after;
}

/* What a trim leaves; 0 where tokens would be needed that were dropped. */
NYB_FUNCTION int nyb_kind_after_trim(const nyb_kind_numbers *kind, const nyb_cache_sequence *before,
                                     int64_t tokens, nyb_cache_sequence *after) {
  const int64_t seen = before->dropped + before->held;
  *after = *before;
  if (kind->kind == NYB_CACHE_ROTATING && seen - tokens <= kind->keep_tokens) {
    /* All that is left are first tokens, which are there. */
    after->dropped = after->offset = after->last_begin = 0;
    after->held = nyb_larger(0, seen - tokens);
    return 1;
  }
  after->held = nyb_larger(0, before->held - tokens);
  after->last_begin = nyb_smaller(before->last_begin, after->held);
  /* The next row sees the last window_tokens - 1 tokens: all of them must be there, unless nothing
   * has been dropped. */
  return tokens == 0 || before->dropped == 0 || before->held - tokens >= kind->window_tokens - 1;
}

#endif
