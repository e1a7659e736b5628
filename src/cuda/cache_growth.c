/* SPDX-License-Identifier: Apache-2.0 */
/* More room in device memory: rows that follow each other are copied whole, since graphs may have
 * appended more than the host has counted; a ring's are put in their order by what the device
 * counts. */
#include <inttypes.h>
#include <stdio.h>

#include "cache.h"

/* cuMemcpy2D takes pitches below this on every device. */
#define MOST_PITCH_BYTES INT64_C(0x7fffffff)

/* ---- Copies by moves ------------------------------------------------------------------------ */

static void flush_copies(nyb_cuda_copies *copies) {
  nyb_device_copy *const call = &copies->call;
  const nyb_cuda_kernel *kernel;
  if (call->count == 0 || copies->status != NYB_OK) return;
  copies->status = nyb_cuda_cache_kernel(copies->scope, &nyb_cuda_program_cache_copy,
                                         NYB_CACHE_THREADS, &kernel);
  if (copies->status == NYB_OK) {
    const int64_t grid[3] = {nyb_smaller(call->count * call->kv_heads, INT32_MAX),
                             NYB_REGION_ARRAYS, 1};
    copies->status = nyb_cuda_launch(copies->scope, kernel, grid, call, copies->stream, true);
  }
  call->count = 0;
}

void nyb_cuda_copies_begin(nyb_cuda_copies *copies, nyb_cuda_scope *scope, const nyb_cache *cache,
                           nyb_cache_region region, const nyb_cache_storage *from,
                           const nyb_cache_storage *to, nyb_stream stream) {
  const nyb_cache_part *parts = nyb_cache_parts_of(cache, region);
  copies->scope = scope;
  copies->stream = stream;
  copies->status = NYB_OK;
  copies->bytes = 0;
  copies->call.kv_heads = cache->kv_heads;
  copies->call.count = copies->call.padding = 0;
  for (int i = 0; i < NYB_REGION_ARRAYS; i++) {
    const int part = i / NYB_CACHE_ARRAYS, array = i % NYB_CACHE_ARRAYS;
    copies->call.array[i] = (nyb_device_planes){
        .source = from->array[part][array],
        .target = to->array[part][array],
        .source_bytes = from->plane_bytes[part][array],
        .target_bytes = to->plane_bytes[part][array],
        .row_bytes = parts[part].row_bytes[array],
    };
  }
}

void nyb_cuda_copies_add(nyb_cuda_copies *copies, const nyb_copy_move *move) {
  nyb_device_copy *const call = &copies->call;
  if (move->rows == 0) return;
  for (int i = 0; i < NYB_REGION_ARRAYS; i++) {
    copies->bytes += move->rows * call->array[i].row_bytes * call->kv_heads;
  }
  call->moves[call->count] = *move;
  if (++call->count == NYB_COPY_MOVES) flush_copies(copies);
}

nyb_status nyb_cuda_copies_end(nyb_cuda_copies *copies) {
  flush_copies(copies);
  return copies->status;
}

/* ---- Rows that follow each other ------------------------------------------------------------ */

/* All rows that there is room for. *bytes counts them. */
static nyb_status copy_array(const nyb_cuda_scope *scope, const nyb_cache *cache,
                             const nyb_cache_storage *target, int part, int array, int64_t *bytes,
                             nyb_stream stream) {
  const nyb_cuda_driver *driver = scope->driver;
  const nyb_cache_storage *source = &cache->storage;
  const int64_t planes = cache->batch * cache->kv_heads;
  const int64_t width = source->capacity_tokens * cache->part[part].row_bytes[array];
  const int64_t from_pitch = source->plane_bytes[part][array];
  const int64_t to_pitch = target->plane_bytes[part][array];
  const nyb_cu_address from = nyb_cuda_address_of(source->array[part][array]);
  const nyb_cu_address to = nyb_cuda_address_of(target->array[part][array]);
  if (width == 0) return NYB_OK;
  *bytes += width * planes;
  if (planes > 1 && to_pitch <= MOST_PITCH_BYTES) {
    const nyb_cu_copy_2d copy = {
        .source_memory_type = NYB_CU_MEMORY_DEVICE,
        .source_device = from,
        .source_pitch_bytes = (size_t)from_pitch,
        .target_memory_type = NYB_CU_MEMORY_DEVICE,
        .target_device = to,
        .target_pitch_bytes = (size_t)to_pitch,
        .width_bytes = (size_t)width,
        .height = (size_t)planes,
    };
    return nyb_cuda_check(driver, driver->Memcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
  }
  nyb_status status = NYB_OK;
  for (int64_t plane = 0; plane < planes && status == NYB_OK; plane++) {
    status = nyb_cuda_check(
        driver,
        driver->MemcpyDtoDAsync(to + (nyb_cu_address)(plane * to_pitch),
                                from + (nyb_cu_address)(plane * from_pitch), (size_t)width, stream),
        "cuMemcpyDtoDAsync");
  }
  return status;
}

static nyb_status copy_rows(const nyb_cuda_scope *scope, const nyb_cache *cache,
                            nyb_cuda_growth *grown, nyb_stream stream) {
  nyb_status status = NYB_OK;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS && status == NYB_OK; array++) {
      status = copy_array(scope, cache, &grown->storage, part, array, &grown->copied_bytes, stream);
    }
  }
  return status;
}

/* ---- Rings ---------------------------------------------------------------------------------- */

static void add_ring(nyb_cuda_copies *copies, const nyb_cache *cache,
                     const nyb_cache_storage *target, int64_t sequence) {
  const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
  nyb_cache_sequence after = before;
  after.offset = 0;
  for (int64_t token = 0; token < before.held;) {
    const nyb_cache_place from =
        nyb_cache_place_of(cache, cache->storage.capacity_tokens, &before, sequence, token);
    const nyb_cache_place to =
        nyb_cache_place_of(cache, target->capacity_tokens, &after, sequence, token);
    const nyb_copy_move move = {
        .from_block = (int)from.block,
        .from_slot = (int)from.slot,
        .to_block = (int)to.block,
        .to_slot = (int)to.slot,
        .rows = (int)nyb_smaller(from.rows, to.rows),
    };
    nyb_cuda_copies_add(copies, &move);
    token += move.rows;
  }
}

static nyb_status copy_rings(nyb_cuda_scope *scope, nyb_cache *cache, nyb_cuda_growth *grown,
                             nyb_stream stream) {
  const nyb_status status = nyb_cuda_cache_settle_counts(scope, cache, stream);
  if (status != NYB_OK) return status;
  nyb_cuda_copies copies;
  nyb_cuda_copies_begin(&copies, scope, cache, NYB_BODY, &cache->storage, &grown->storage, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    add_ring(&copies, cache, &grown->storage, sequence);
  }
  grown->copied_bytes = copies.bytes;
  return nyb_cuda_copies_end(&copies);
}

/* Rings begin anew in the storage that they have got. */
static nyb_status turn_back(nyb_cuda_scope *scope, nyb_cache *cache, nyb_stream stream) {
  nyb_cuda_patches patches;
  nyb_cuda_patches_begin(&patches, scope, cache->cuda->numbers, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    cache->counts.offsets[sequence] = 0;
    nyb_cuda_patches_add(&patches, &cache->cuda->state.offsets[sequence], 0);
  }
  return nyb_cuda_patches_end(&patches);
}

/* ---- Growing -------------------------------------------------------------------------------- */

void nyb_cuda_growth_drop(const nyb_cuda_scope *scope, const nyb_cache *cache,
                          nyb_cuda_growth *grown, nyb_stream stream) {
  const int mode = nyb_cuda_relax(scope);
  scope->driver->StreamSynchronize(stream);
  nyb_cuda_cache_release(cache->context, scope, grown->storage.block);
  nyb_cuda_restore_mode(scope, mode);
}

nyb_status nyb_cuda_growth_begin(nyb_cuda_scope *scope, nyb_cache *cache, int64_t tokens,
                                 nyb_cuda_growth *grown, nyb_stream stream) {
  *grown = (nyb_cuda_growth){0};
  char what[160];
  snprintf(what, sizeof what,
           "the cache would have to grow from %" PRId64 " to %" PRId64
           " tokens; nyb_cache_reserve makes room before the capture",
           cache->storage.capacity_tokens, tokens);
  nyb_status status = nyb_cuda_cache_refuse_capture(scope, stream, what);
  if (status != NYB_OK) return status;
  const int mode = nyb_cuda_relax(scope);
  status =
      nyb_cuda_cache_make_storage(scope, cache, NYB_BODY, cache->batch, tokens, &grown->storage);
  nyb_cuda_restore_mode(scope, mode);
  if (status != NYB_OK || cache->storage.block == NULL) return status;
  status = cache->kind == NYB_CACHE_ROTATING ? copy_rings(scope, cache, grown, stream)
                                             : copy_rows(scope, cache, grown, stream);
  if (status != NYB_OK) nyb_cuda_growth_drop(scope, cache, grown, stream);
  return status;
}

nyb_status nyb_cuda_growth_adopt(nyb_cuda_scope *scope, nyb_cache *cache, nyb_cuda_growth *grown,
                                 nyb_stream stream) {
  const int mode = nyb_cuda_relax(scope);
  nyb_status status = NYB_OK;
  if (cache->storage.block != NULL) { /* the stream still reads it */
    status = nyb_cuda_cache_wait(scope, stream);
    if (status == NYB_OK && cache->kind == NYB_CACHE_ROTATING) {
      status = turn_back(scope, cache, stream);
    }
  }
  if (status == NYB_OK) {
    if (cache->storage.block != NULL) cache->reallocations++;
    cache->copied_bytes += grown->copied_bytes;
    nyb_cuda_cache_release(cache->context, scope, cache->storage.block);
    cache->storage = grown->storage;
  } else {
    nyb_cuda_cache_release(cache->context, scope, grown->storage.block);
  }
  nyb_cuda_restore_mode(scope, mode);
  return status;
}

nyb_status nyb_cuda_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  nyb_cuda_growth grown;
  status = nyb_cuda_growth_begin(&scope, cache, tokens, &grown, stream);
  if (status == NYB_OK) status = nyb_cuda_growth_adopt(&scope, cache, &grown, stream);
  nyb_cuda_leave(&scope);
  return status;
}
