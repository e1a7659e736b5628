/* SPDX-License-Identifier: Apache-2.0 */
/* Appending to a cache in device memory. */
#include "cache.h"

#include <inttypes.h>
#include <stdio.h>

enum { WARP_THREADS = 32 };

/* ---- Parameters ----------------------------------------------------------------------------- */

/* Rows of floats, and the body in which they are stored. */
static nyb_device_rows rows_of(const nyb_cache *cache, const nyb_cache_storage *storage, int part,
                               const nyb_input *input, int64_t tokens) {
  const nyb_stored stored = nyb_cache_stored(cache, storage, part);
  const int64_t shape[3] = {cache->batch, cache->kv_heads, tokens};
  nyb_device_rows rows =
      nyb_cuda_rows_of(input, &stored, &cache->part[part].layout, shape, cache->part[part].dim);
  /* One token is stored behind others all the same, and one sequence in any of the pages. */
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    long long *const stride = array == NYB_CODES    ? rows.codes_stride
                              : array == NYB_SCALES ? rows.scales_stride
                                                    : rows.biases_stride;
    stride[0] = storage->plane_bytes[part][array] * cache->kv_heads;
    stride[1] = storage->plane_bytes[part][array];
    stride[2] = cache->part[part].row_bytes[array];
  }
  rows.wide_codes = rows.codes_stride[2] % 16 == 0; /* planes begin at multiples of 64 bytes */
  return rows;
}

/* How a sequence's lanes are shared out: the grid's blocks. */
static int64_t count_lanes(const nyb_cache *cache, const nyb_device_rows *key,
                           const nyb_device_rows *value, int64_t tokens, long long *key_lanes,
                           long long *value_lanes, nyb_divider *blocks_per_sequence) {
  const int64_t rows = tokens * cache->kv_heads;
  *key_lanes = nyb_quotient_up(rows * key->lanes.divisor, WARP_THREADS) * WARP_THREADS;
  *value_lanes = rows * value->lanes.divisor;
  const int64_t wanted = nyb_quotient_up(*key_lanes + *value_lanes, NYB_QUANTIZE_THREADS);
  const int64_t blocks = nyb_smaller(wanted, INT32_MAX / cache->batch);
  *blocks_per_sequence = nyb_divider_of(blocks);
  return cache->batch * blocks;
}

/* ---- Contiguous caches ---------------------------------------------------------------------- */

static nyb_status launch_plain(nyb_cuda_scope *scope, const nyb_cache *cache,
                               const nyb_cache_storage *storage, const nyb_append *append,
                               nyb_stream stream) {
  nyb_device_append call = {
      .key = rows_of(cache, storage, NYB_KEY, &append->key, append->tokens),
      .value = rows_of(cache, storage, NYB_VALUE, &append->value, append->tokens),
      .tokens = nyb_divider_of(append->tokens),
      .capacity_tokens = storage->capacity_tokens,
      .kv_heads = cache->kv_heads,
      .lengths = cache->cuda->state.lengths,
      .arrivals = cache->cuda->arrivals,
      .non_finite = append->non_finite,
      .rule = (int)cache->rule,
  };
  const int64_t grid[3] = {
      count_lanes(cache, &call.key, &call.value, append->tokens, &call.key_lanes, &call.value_lanes,
                  &call.blocks_per_sequence),
      1, 1};
  return nyb_cuda_launch(scope, cache->cuda->append, grid, &call, stream, true);
}

/* ---- Every kind ----------------------------------------------------------------------------- */

static nyb_device_plain plain_of(const nyb_cache *cache, nyb_cache_region region, int part) {
  const nyb_cache_storage *storage = nyb_cache_const_storage_of(cache, region);
  const int64_t plane = storage->plane_bytes[part][NYB_CODES];
  return (nyb_device_plain){
      .rows = storage->array[part][NYB_CODES],
      .stride = {plane * cache->kv_heads, plane, cache->plain[part].row_bytes[NYB_CODES]},
  };
}

static nyb_device_placed placed_call(const nyb_cache *cache, const nyb_cache_storage *storage,
                                     const nyb_append *append) {
  nyb_device_placed call = {
      .places = nyb_cuda_cache_places(cache),
      .append_tokens = append->tokens,
      .kv_heads = cache->kv_heads,
      .padding = append->padding == NULL ? NULL : cache->cuda->padding,
      .arrivals = cache->cuda->arrivals,
      .non_finite = append->non_finite,
      .rule = (int)cache->rule,
      .part_dtype = (int)cache->options.part_dtype,
  };
  call.places.body_tokens = storage->capacity_tokens;
  for (int part = 0; part < NYB_CACHE_PARTS && cache->kind == NYB_CACHE_MIXED; part++) {
    call.first[part] = plain_of(cache, NYB_FIRST, part);
    call.last[part] = plain_of(cache, NYB_LAST, part);
  }
  return call;
}

static nyb_status launch_rows(nyb_cuda_scope *scope, const nyb_cache *cache,
                              const nyb_cuda_program *program, nyb_device_placed *call,
                              int64_t tokens, nyb_stream stream) {
  const nyb_cuda_kernel *kernel;
  call->tokens = nyb_divider_of(tokens);
  const int64_t grid[3] = {count_lanes(cache, &call->key, &call->value, tokens, &call->key_lanes,
                                       &call->value_lanes, &call->blocks_per_sequence),
                           1, 1};
  const nyb_status status = nyb_cuda_cache_kernel(scope, program, NYB_QUANTIZE_THREADS, &kernel);
  if (status != NYB_OK) return status;
  return nyb_cuda_launch(scope, kernel, grid, call, stream, true);
}

/* The rows of the last part as input. */
static nyb_input last_input(const nyb_cache *cache, int part) {
  const nyb_stored stored = nyb_cache_stored_in(cache, NYB_LAST, part);
  return (nyb_input){
      .data = stored.codes,
      .dtype = cache->options.part_dtype,
      .stride = {stored.codes_stride[0], stored.codes_stride[1], stored.codes_stride[2]},
  };
}

static nyb_status launch_retire(nyb_cuda_scope *scope, const nyb_cache *cache,
                                const nyb_cache_storage *storage, const nyb_append *append,
                                nyb_stream stream) {
  const int64_t last = cache->options.last_tokens;
  if (last == 0) return NYB_OK;
  const nyb_input key = last_input(cache, NYB_KEY), value = last_input(cache, NYB_VALUE);
  nyb_device_placed call = placed_call(cache, storage, append);
  call.key = rows_of(cache, storage, NYB_KEY, &key, last);
  call.value = rows_of(cache, storage, NYB_VALUE, &value, last);
  return launch_rows(scope, cache, &nyb_cuda_program_retire, &call,
                     nyb_smaller(append->tokens, last), stream);
}

static nyb_status send_padding(nyb_cuda_scope *scope, const nyb_cache *cache,
                               const nyb_append *append, nyb_stream stream) {
  if (append->padding == NULL) return NYB_OK;
  nyb_cuda_patches patches;
  nyb_cuda_patches_begin(&patches, scope, cache->cuda->numbers, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    nyb_cuda_patches_add(&patches, &cache->cuda->padding[sequence], append->padding[sequence]);
  }
  return nyb_cuda_patches_end(&patches);
}

static nyb_status launch_append(nyb_cuda_scope *scope, const nyb_cache *cache,
                                const nyb_cache_storage *storage, const nyb_append *append,
                                nyb_stream stream) {
  if (cache->kind == NYB_CACHE_CONTIGUOUS && append->padding == NULL) {
    return launch_plain(scope, cache, storage, append, stream);
  }
  nyb_status status = send_padding(scope, cache, append, stream);
  if (status == NYB_OK && cache->kind == NYB_CACHE_MIXED) {
    status = launch_retire(scope, cache, storage, append, stream);
  }
  if (status != NYB_OK) return status;
  nyb_device_placed call = placed_call(cache, storage, append);
  call.key = rows_of(cache, storage, NYB_KEY, &append->key, append->tokens);
  call.value = rows_of(cache, storage, NYB_VALUE, &append->value, append->tokens);
  return launch_rows(scope, cache, &nyb_cuda_program_append_placed, &call, append->tokens, stream);
}

/* ---- The call ------------------------------------------------------------------------------- */

static nyb_status check_pointers(const nyb_cuda_scope *scope, const nyb_append *append) {
  nyb_status status = nyb_cuda_check_pointer(scope, "append.key", "data", append->key.data);
  if (status == NYB_OK) {
    status = nyb_cuda_check_pointer(scope, "append.value", "data", append->value.data);
  }
  if (status != NYB_OK) return status;
  return nyb_cuda_check_pointer(scope, "append", "non_finite", append->non_finite);
}

/* A captured append to a ring is replayed when the window is full. */
static nyb_status check_captured_ring(const nyb_cache *cache, const nyb_append *append) {
  const int64_t needed = cache->options.window_tokens - 1 + append->tokens;
  if (cache->kind != NYB_CACHE_ROTATING || needed <= cache->storage.capacity_tokens) return NYB_OK;
  return nyb_fail(NYB_ERROR_UNSUPPORTED,
                  "append.tokens is %" PRId64
                  " while the stream is being captured; replays would "
                  "need room for %" PRId64
                  " tokens where the window is full, and there is room for "
                  "%" PRId64
                  ": nyb_cache_reserve, or one such append with a full window, makes it "
                  "before the capture",
                  append->tokens, needed, cache->storage.capacity_tokens);
}

static nyb_status append_in(nyb_cuda_scope *scope, nyb_cache *cache, const nyb_append *append,
                            nyb_stream stream) {
  bool capturing;
  nyb_status status = check_pointers(scope, append);
  if (status == NYB_OK) status = nyb_cuda_cache_note_capture(scope, cache, stream, &capturing);
  /* Replays have moved on what there is room for. */
  if (status == NYB_OK && !capturing) status = nyb_cuda_cache_settle_counts(scope, cache, stream);
  if (status == NYB_OK && cache->kind == NYB_CACHE_PAGED) {
    status = nyb_cuda_cache_own_pages(scope, cache, append, 0, capturing, stream);
  }
  if (status != NYB_OK) return status;
  const int64_t needed =
      cache->kind == NYB_CACHE_PAGED ? 0 : nyb_cache_needed_tokens(cache, append);
  if (needed <= cache->storage.capacity_tokens) {
    status = capturing ? check_captured_ring(cache, append) : NYB_OK;
    if (status != NYB_OK) return status;
    return launch_append(scope, cache, &cache->storage, append, stream);
  }
  nyb_cuda_growth grown;
  status =
      nyb_cuda_growth_begin(scope, cache, nyb_cache_grown_capacity(cache, needed), &grown, stream);
  if (status != NYB_OK) return status;
  if (cache->kind == NYB_CACHE_ROTATING) { /* whose places are others in the larger one */
    status = nyb_cuda_growth_adopt(scope, cache, &grown, stream);
    if (status != NYB_OK) return status;
    return launch_append(scope, cache, &cache->storage, append, stream);
  }
  status = launch_append(scope, cache, &grown.storage, append, stream);
  if (status != NYB_OK) {
    nyb_cuda_growth_drop(scope, cache, &grown, stream);
    return status;
  }
  return nyb_cuda_growth_adopt(scope, cache, &grown, stream);
}

nyb_status nyb_cuda_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = append_in(&scope, cache, append, stream);
  if (status == NYB_OK) nyb_cache_advance(cache, append);
  nyb_cuda_leave(&scope);
  return status;
}
