/* SPDX-License-Identifier: Apache-2.0 */
/* What saving and loading need of a cache: its rows in temporal order, and a new one to fill; for
 * caches on CUDA a context of the host. */
#include <inttypes.h>

#include "cache.h"

nyb_cache_rows nyb_cache_rows_at(const nyb_cache *cache, int part, int64_t sequence, int64_t head,
                                 int64_t token, int64_t most_tokens) {
  const nyb_cache_sequence state = nyb_cache_get_sequence(cache, sequence);
  const nyb_cache_place place =
      nyb_cache_place_of(cache, cache->storage.capacity_tokens, &state, sequence, token);
  const nyb_cache_storage *storage = nyb_cache_const_storage_of(cache, place.region);
  nyb_cache_rows rows = {
      .tokens = nyb_smaller(place.rows, most_tokens),
      .region = place.region,
      .part = &nyb_cache_parts_of(cache, place.region)[part],
  };
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    if (storage->array[part][array] == NULL) continue;
    rows.array[array] = storage->array[part][array] +
                        (place.block * cache->kv_heads + head) * storage->plane_bytes[part][array] +
                        place.slot * rows.part->row_bytes[array];
  }
  return rows;
}

static nyb_status check_state(const nyb_cache *cache, int64_t sequence,
                              const nyb_cache_sequence *state) {
  const nyb_cache_options *options = &cache->options;
  const bool rotating = cache->kind == NYB_CACHE_ROTATING;
  bool good = state->held >= 0 && state->held <= INT32_MAX && state->dropped >= 0 &&
              state->held <= cache->limit_tokens &&
              state->dropped <= cache->limit_tokens - state->held;
  if (state->dropped != 0) good &= rotating && nyb_cache_ring_may_hold(options, state->held);
  if (cache->kind == NYB_CACHE_MIXED) {
    good &= state->last_begin >= nyb_smaller(options->first_tokens, state->held) &&
            state->last_begin <= state->held &&
            state->held - state->last_begin <= options->last_tokens;
  } else {
    good &= state->last_begin == 0;
  }
  if (good) return NYB_OK;
  return nyb_fail(NYB_ERROR_LENGTH,
                  "sequence %" PRId64 " cannot hold %" PRId64 " tokens after %" PRId64
                  " that were dropped, the last ones unquantized from token %" PRId64 " on",
                  sequence, state->held, state->dropped, state->last_begin);
}

static nyb_status make_room(nyb_cache *cache, const nyb_cache_sequence *states) {
  int64_t needed = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    needed = nyb_larger(needed, nyb_cache_body_tokens(cache, &states[sequence]));
  }
  if (cache->kind == NYB_CACHE_CONTIGUOUS || cache->kind == NYB_CACHE_MIXED) {
    /* Some room more, so that the first append does not move everything. */
    needed = nyb_smaller(needed + needed / 8 + NYB_SMALLEST_CAPACITY_TOKENS, cache->limit_tokens);
  }
  if (cache->kind != NYB_CACHE_PAGED) {
    if (needed <= cache->storage.capacity_tokens) return NYB_OK;
    nyb_cache_storage storage;
    const nyb_status status = nyb_cache_make_larger(cache, needed, &storage);
    if (status == NYB_OK) nyb_cache_adopt_larger(cache, &storage);
    return status;
  }
  /* Pages are taken as by an append of the longest sequence, the others padded; offsets, which
   * pages have no use for, say by how much. */
  int32_t *const padding = cache->counts.offsets;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    padding[sequence] = (int32_t)(needed - states[sequence].held);
  }
  const nyb_append append = {.tokens = needed, .padding = padding};
  return nyb_cache_begin_pages(cache, &append);
}

nyb_status nyb_cache_make_like(nyb_context *context, const nyb_cache *cache, int64_t batch,
                               const nyb_cache_sequence *states, nyb_cache **made) {
  nyb_cache_options options = cache->options;
  options.batch = batch;
  options.initial_capacity_tokens = 0;
  nyb_cache *fresh;
  nyb_status status = nyb_cache_create(context, &options, &fresh);
  if (status != NYB_OK) return status;
  for (int64_t sequence = 0; sequence < batch && status == NYB_OK; sequence++) {
    status = check_state(fresh, sequence, &states[sequence]);
  }
  if (status == NYB_OK) status = make_room(fresh, states);
  if (status != NYB_OK) {
    nyb_cache_destroy(fresh);
    return status;
  }
  for (int64_t sequence = 0; sequence < batch; sequence++) {
    nyb_cache_sequence state = states[sequence];
    state.offset = 0;
    nyb_cache_set_sequence(fresh, sequence, &state);
  }
  *made = fresh;
  return NYB_OK;
}

nyb_status nyb_cache_make_host_context(const nyb_context *context, nyb_context **host) {
  const nyb_context_options options = {
      .struct_size = sizeof options, .threads = 1, .allocator = context->allocator};
  return nyb_context_create(&options, host);
}

void nyb_cache_exchange(nyb_cache *a, nyb_cache *b) {
  const nyb_cache was = *a;
  *a = *b;
  *b = was;
  /* What was counted stays with whom the caller knows. */
  b->reallocations = a->reallocations;
  b->copied_bytes = a->copied_bytes;
  a->reallocations = was.reallocations;
  a->copied_bytes = was.copied_bytes;
}
