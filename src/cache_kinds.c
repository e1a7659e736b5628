/* SPDX-License-Identifier: Apache-2.0 */
/* A cache's sequences, by the arithmetic that host and device share: whoever reads, writes or moves
 * rows asks here. */
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

nyb_cache_place nyb_cache_place_of(const nyb_cache *cache, int64_t body_tokens,
                                   const nyb_cache_sequence *state, int64_t sequence,
                                   int64_t token) {
  const nyb_cache_pool *pool = &cache->pool;
  const int32_t *pages = pool->table == NULL ? NULL : pool->table + sequence * pool->table_stride;
  return nyb_kind_place_of(&cache->numbers, body_tokens, state, sequence, pages, token);
}

int64_t nyb_cache_body_tokens(const nyb_cache *cache, const nyb_cache_sequence *state) {
  return nyb_kind_body_tokens(&cache->numbers, state);
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

nyb_cache_sequence nyb_cache_after_append(const nyb_cache *cache, int64_t body_tokens,
                                          const nyb_cache_sequence *before, int64_t tokens) {
  return nyb_kind_after_append(&cache->numbers, body_tokens, before, tokens);
}

bool nyb_cache_after_trim(const nyb_cache *cache, const nyb_cache_sequence *before, int64_t tokens,
                          nyb_cache_sequence *after) {
  return nyb_kind_after_trim(&cache->numbers, before, tokens, after) != 0;
}
