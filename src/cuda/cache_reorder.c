/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences of a cache in device memory that change places, double and go: the host says how, from
 * its counts, the rows move on the stream. Nothing is allocated and nobody waits as long as there
 * is memory for so many sequences, and no call has been captured. */
#include "cache.h"

#include <string.h>

/* ---- Rows in place -------------------------------------------------------------------------- */

static void add_planes(const nyb_cache *cache, int region, nyb_device_reorder *call) {
  const nyb_cache_storage *storage = nyb_cache_const_storage_of(cache, (nyb_cache_region)region);
  const nyb_cache_part *parts = nyb_cache_parts_of(cache, (nyb_cache_region)region);
  if (storage->block == NULL) return;
  for (int i = 0; i < NYB_REGION_ARRAYS; i++) {
    const int part = i / NYB_CACHE_ARRAYS, array = i % NYB_CACHE_ARRAYS;
    call->array[region * NYB_REGION_ARRAYS + i] = (nyb_device_planes){
        .source = storage->array[part][array],
        .target = storage->array[part][array],
        .source_bytes = storage->plane_bytes[part][array],
        .target_bytes = storage->plane_bytes[part][array],
        .row_bytes = parts[part].row_bytes[array],
    };
  }
}

static nyb_reorder_move device_move(const nyb_cache *cache, const nyb_cache_move *move) {
  const nyb_cache_sequence state = nyb_cache_get_sequence(cache, move->sequence);
  nyb_reorder_move made = {.to = (int)move->to, .from = (int)move->from};
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
    made.rows[region] = (int)nyb_cache_slots(cache, (nyb_cache_region)region, &state);
  }
  return made;
}

/* The list to the device; *units: the most that a thread's index reaches. */
static nyb_status send_moves(nyb_cuda_scope *scope, const nyb_cache *cache,
                             const nyb_cache_moves *list, const nyb_device_reorder *call,
                             int64_t *units, nyb_stream stream) {
  enum { WORDS = sizeof(nyb_reorder_move) / sizeof(int32_t) };
  nyb_cuda_patches patches;
  nyb_cuda_patches_begin(&patches, scope, cache->cuda->numbers, stream);
  *units = 0;
  for (int64_t i = 0; i < list->count; i++) {
    const nyb_reorder_move move = device_move(cache, &list->moves[i]);
    int32_t words[WORDS];
    memcpy(words, &move, sizeof move);
    for (int word = 0; word < WORDS; word++) {
      nyb_cuda_patches_add(&patches, (const int32_t *)(const void *)&cache->cuda->moves[i] + word,
                           words[word]);
    }
    for (int array = 0; array < NYB_REORDER_ARRAYS; array++) {
      const int64_t row_bytes = call->array[array].row_bytes;
      if (row_bytes == 0) continue;
      const int64_t bytes = move.rows[array / NYB_REGION_ARRAYS] * row_bytes;
      *units = nyb_larger(*units, bytes / nyb_unit_bytes(row_bytes));
    }
  }
  return nyb_cuda_patches_end(&patches);
}

static nyb_status move_in_place(nyb_cuda_scope *scope, nyb_cache *cache, const int64_t *sources,
                                int64_t count, nyb_stream stream) {
  enum { MOST_PIECES = 64 }; /* of a head's planes: some blocks for each multiprocessor */
  nyb_cache_moves list;
  const nyb_cuda_kernel *kernel;
  nyb_status status = nyb_cache_list_moves(cache, sources, count, &list);
  if (status != NYB_OK) return status;
  nyb_device_reorder call = {
      .moves = cache->cuda->moves, .kv_heads = cache->kv_heads, .count = list.count};
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) add_planes(cache, region, &call);
  int64_t units;
  status =
      nyb_cuda_cache_kernel(scope, &nyb_cuda_program_cache_reorder, NYB_CACHE_THREADS, &kernel);
  if (status == NYB_OK) status = send_moves(scope, cache, &list, &call, &units, stream);
  nyb_release(cache->context, list.memory);
  if (status != NYB_OK || units == 0) return status;
  const int64_t most = nyb_larger(1, nyb_smaller(MOST_PIECES, INT32_MAX / cache->kv_heads));
  const int64_t pieces = nyb_smaller(most, nyb_quotient_up(units, NYB_CACHE_THREADS));
  const int64_t grid[3] = {pieces * cache->kv_heads, NYB_REORDER_ARRAYS, 1};
  return nyb_cuda_launch(scope, kernel, grid, &call, stream, true);
}

/* ---- Rows to new memory --------------------------------------------------------------------- */

static nyb_status copy_region(nyb_cuda_scope *scope, nyb_cache *cache, nyb_cache_region region,
                              const nyb_cache_storage *target, const int64_t *sources,
                              int64_t count, nyb_stream stream) {
  const nyb_cache_storage *source = nyb_cache_const_storage_of(cache, region);
  if (source->block == NULL) return NYB_OK;
  nyb_cuda_copies copies;
  nyb_cuda_copies_begin(&copies, scope, cache, region, source, target, stream);
  for (int64_t i = 0; i < count; i++) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(cache, sources[i]);
    const nyb_copy_move move = {.from_block = (int)sources[i],
                                .to_block = (int)i,
                                .rows = (int)nyb_cache_slots(cache, region, &state)};
    nyb_cuda_copies_add(&copies, &move);
  }
  return nyb_cuda_copies_end(&copies);
}

static nyb_status fill_targets(nyb_cuda_scope *scope, nyb_cache *cache, const int64_t *sources,
                               int64_t count, nyb_cache_storage *targets, nyb_stream stream) {
  nyb_status status = NYB_OK;
  for (int region = 0; region < NYB_CACHE_REGIONS && status == NYB_OK; region++) {
    const nyb_cache_storage *source = nyb_cache_const_storage_of(cache, (nyb_cache_region)region);
    if (source->blocks == 0) continue;
    status = nyb_cuda_cache_make_storage(scope, cache, (nyb_cache_region)region, count,
                                         source->capacity_tokens, &targets[region]);
    if (status != NYB_OK) return status;
    status = copy_region(scope, cache, (nyb_cache_region)region, &targets[region], sources, count,
                         stream);
  }
  return status == NYB_OK ? nyb_cuda_cache_wait(scope, stream) : status;
}

static nyb_status move_to_new(nyb_cuda_scope *scope, nyb_cache *cache, const int64_t *sources,
                              int64_t count, nyb_stream stream) {
  nyb_cache_storage targets[NYB_CACHE_REGIONS] = {0};
  const int mode = nyb_cuda_relax(scope);
  const nyb_status status = fill_targets(scope, cache, sources, count, targets, stream);
  if (status == NYB_OK && cache->storage.block != NULL) cache->reallocations++;
  if (status != NYB_OK) scope->driver->StreamSynchronize(stream); /* it may write to the targets */
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
    nyb_cache_storage *own = nyb_cache_storage_of(cache, (nyb_cache_region)region);
    nyb_cuda_cache_release(cache->context, scope,
                           status == NYB_OK ? own->block : targets[region].block);
    if (status == NYB_OK) *own = targets[region];
  }
  nyb_cuda_restore_mode(scope, mode);
  return status;
}

/* ---- Numbers and pages ---------------------------------------------------------------------- */

/* Room for so many sequences, with which the cache is what it was. */
static nyb_status make_room(nyb_cuda_scope *scope, nyb_cache *cache, int64_t count,
                            nyb_stream stream) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t words = count * cache->pool.table_stride;
  nyb_status status = NYB_OK;
  if (cache->kind == NYB_CACHE_PAGED && words > cuda->table_words) {
    status = nyb_cuda_cache_make_table(scope, cache, words, stream);
    if (status != NYB_OK) return status;
    nyb_cuda_cache_find_bounds(cache); /* what comes next may fail, and the table is empty */
    status = nyb_cuda_cache_send_tables(scope, cache, 0, cache->batch, stream);
  }
  if (status == NYB_OK && count > cuda->sequences) {
    const int mode = nyb_cuda_relax(scope);
    status = nyb_cuda_cache_wait(scope, stream);
    if (status == NYB_OK) status = nyb_cuda_cache_make_numbers(scope, cache, count);
    nyb_cuda_restore_mode(scope, mode);
    if (status == NYB_OK) status = nyb_cuda_cache_send_numbers(scope, cache, stream);
  }
  if (status != NYB_OK || cache->kind != NYB_CACHE_PAGED || cuda->table == NULL) return status;
  nyb_cuda_cache_find_bounds(cache);
  return nyb_cuda_cache_send_tables(scope, cache, 0, cache->batch, stream);
}

static nyb_status move_rows(nyb_cuda_scope *scope, nyb_cache *cache, const int64_t *sources,
                            int64_t count, nyb_stream stream) {
  if (cache->kind == NYB_CACHE_PAGED) return nyb_cache_share_pages(cache, sources, count);
  if (count <= cache->storage.blocks) return move_in_place(scope, cache, sources, count, stream);
  return move_to_new(scope, cache, sources, count, stream);
}

static nyb_status reorder_in(nyb_cuda_scope *scope, nyb_cache *cache, const int64_t *sources,
                             int64_t count, nyb_stream stream) {
  nyb_status status = nyb_cuda_cache_refuse_capture(
      scope, stream,
      "nyb_cache_reorder moves what there is when it is called, which a graph does "
      "not know; it must come before or after the capture");
  if (status == NYB_OK) status = nyb_cuda_cache_settle_counts(scope, cache, stream);
  if (status == NYB_OK) status = make_room(scope, cache, count, stream);
  if (status != NYB_OK) return status;
  nyb_cache_counts counts;
  status = nyb_cache_reordered_counts(cache, sources, count, &counts);
  if (status != NYB_OK) return status;
  status = move_rows(scope, cache, sources, count, stream);
  if (status != NYB_OK) {
    nyb_release(cache->context, counts.memory);
    return status;
  }
  nyb_cache_adopt_counts(cache, &counts);
  cache->batch = cache->options.batch = count;
  status = nyb_cuda_cache_send_numbers(scope, cache, stream);
  if (status != NYB_OK || cache->kind != NYB_CACHE_PAGED) return status;
  for (int64_t i = 0; i < count; i++) {
    cache->counts.pages[i] = (int32_t)nyb_pages_for(cache, cache->lengths[i]);
  }
  cache->cuda->reserved_pages = 0;
  nyb_cuda_cache_find_bounds(cache);
  return nyb_cuda_cache_send_tables(scope, cache, 0, count, stream);
}

nyb_status nyb_cuda_cache_reorder(nyb_cache *cache, const int64_t *sources, int64_t count,
                                  nyb_stream stream) {
  nyb_status status = nyb_cache_check_sources(cache, sources, count);
  if (status != NYB_OK) return status;
  nyb_cuda_scope scope;
  status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = reorder_in(&scope, cache, sources, count, stream);
  nyb_cuda_leave(&scope);
  return status;
}
