/* SPDX-License-Identifier: Apache-2.0 */
/* Where each kind of cache keeps a token, and what appends and trims leave of a sequence. All of it
 * is arithmetic on one sequence's numbers: whoever reads, writes or moves rows asks here. */
#include "cache.h"

nyb_cache_sequence nyb_cache_get_sequence(const nyb_cache *cache, int64_t sequence) {
  const nyb_cache_counts *counts = &cache->counts;
  return (nyb_cache_sequence){
      .dropped = counts->dropped[sequence],
      .held = counts->lengths[sequence],
      .offset = counts->offsets[sequence],
      .last_begin = counts->last_begins[sequence],
  };
}

void nyb_cache_set_sequence(nyb_cache *cache, int64_t sequence, const nyb_cache_sequence *state) {
  const nyb_cache_counts *counts = &cache->counts;
  counts->dropped[sequence] = state->dropped;
  counts->lengths[sequence] = (int32_t)state->held;
  counts->offsets[sequence] = (int32_t)state->offset;
  counts->last_begins[sequence] = (int32_t)state->last_begin;
}

/* ---- Places --------------------------------------------------------------------------------- */

static nyb_cache_place ring_place(int64_t keep, int64_t body_tokens,
                                  const nyb_cache_sequence *state, int64_t sequence,
                                  int64_t token) {
  nyb_cache_place place = {NYB_BODY, sequence, token, keep - token};
  if (token < keep) return place;
  const int64_t slots = body_tokens - keep;
  const int64_t slot = (token - keep + state->offset) % slots;
  place.slot = keep + slot;
  place.rows = slots - slot;
  return place;
}

static nyb_cache_place mixed_place(const nyb_cache_options *options,
                                   const nyb_cache_sequence *state, int64_t sequence,
                                   int64_t token) {
  const int64_t first = options->first_tokens, last = options->last_tokens;
  if (token < first) return (nyb_cache_place){NYB_FIRST, sequence, token, first - token};
  if (token < state->last_begin) {
    return (nyb_cache_place){NYB_BODY, sequence, token - first, state->last_begin - token};
  }
  return (nyb_cache_place){NYB_LAST, sequence, token % last, last - token % last};
}

nyb_cache_place nyb_cache_place_of(const nyb_cache *cache, int64_t body_tokens,
                                   const nyb_cache_sequence *state, int64_t sequence,
                                   int64_t token) {
  const nyb_cache_options *options = &cache->options;
  nyb_cache_place place = {NYB_BODY, sequence, token, state->held - token};
  if (cache->kind == NYB_CACHE_ROTATING) {
    place = ring_place(options->window_keep_tokens, body_tokens, state, sequence, token);
  } else if (cache->kind == NYB_CACHE_MIXED) {
    place = mixed_place(options, state, sequence, token);
  } else if (cache->kind == NYB_CACHE_PAGED) {
    const int64_t page = token / options->page_tokens, row = token % options->page_tokens;
    place.block = cache->pool.table[sequence * cache->pool.table_stride + page];
    place.slot = row;
    place.rows = options->page_tokens - row;
  }
  place.rows = nyb_smaller(place.rows, state->held - token);
  return place;
}

int64_t nyb_cache_body_tokens(const nyb_cache *cache, const nyb_cache_sequence *state) {
  if (cache->kind != NYB_CACHE_MIXED) return state->held;
  return nyb_larger(0, state->last_begin - cache->options.first_tokens);
}

int64_t nyb_cache_slots(const nyb_cache *cache, nyb_cache_region region,
                        const nyb_cache_sequence *state) {
  const nyb_cache_options *options = &cache->options;
  if (region == NYB_FIRST) return nyb_smaller(state->held, options->first_tokens);
  if (region == NYB_LAST) {
    return state->last_begin < state->held ? nyb_smaller(state->held, options->last_tokens) : 0;
  }
  if (cache->kind != NYB_CACHE_ROTATING) return nyb_cache_body_tokens(cache, state);
  const bool in_ring = state->held > options->window_keep_tokens;
  return nyb_smaller(cache->storage.capacity_tokens, state->held + (in_ring ? state->offset : 0));
}

/* ---- Appends and trims ---------------------------------------------------------------------- */

/* Of what was there, the first new row sees window_tokens - 1 tokens; the others go. */
static void slide(const nyb_cache *cache, int64_t body_tokens, nyb_cache_sequence *state) {
  const int64_t lost = state->held - (cache->options.window_tokens - 1);
  if (lost <= 0) return;
  state->dropped += lost;
  state->held -= lost;
  state->offset = (state->offset + lost) % (body_tokens - cache->options.window_keep_tokens);
}

nyb_cache_sequence nyb_cache_after_append(const nyb_cache *cache, int64_t body_tokens,
                                          const nyb_cache_sequence *before, int64_t tokens) {
  nyb_cache_sequence after = *before;
  if (tokens == 0) return after;
  if (cache->kind == NYB_CACHE_ROTATING) slide(cache, body_tokens, &after);
  after.held += tokens;
  if (cache->kind == NYB_CACHE_MIXED) {
    const int64_t begin = nyb_larger(nyb_smaller(cache->options.first_tokens, after.held),
                                     after.held - cache->options.last_tokens);
    after.last_begin = nyb_larger(after.last_begin, begin); /* what is quantized stays so */
  }
  return after;
}

bool nyb_cache_after_trim(const nyb_cache *cache, const nyb_cache_sequence *before, int64_t tokens,
                          nyb_cache_sequence *after) {
  const nyb_cache_options *options = &cache->options;
  const int64_t seen = before->dropped + before->held;
  *after = *before;
  if (cache->kind == NYB_CACHE_ROTATING && seen - tokens <= options->window_keep_tokens) {
    /* All that is left are first tokens, which are there. */
    *after = (nyb_cache_sequence){.held = nyb_larger(0, seen - tokens)};
    return true;
  }
  after->held = nyb_larger(0, before->held - tokens);
  after->last_begin = nyb_smaller(before->last_begin, after->held);
  /* The next row sees the last window_tokens - 1 tokens: all of them must be there, unless nothing
   * has been dropped. */
  return tokens == 0 || before->dropped == 0 || before->held - tokens >= options->window_tokens - 1;
}
