/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a cache: storages of rows, the sequences' numbers, and growing. */
#include <inttypes.h>
#include <string.h>

#include "cache.h"

static int64_t plane_count(const nyb_cache *cache, const nyb_cache_storage *storage) {
  return storage->blocks * cache->kv_heads;
}

const nyb_cache_part *nyb_cache_parts_of(const nyb_cache *cache, nyb_cache_region region) {
  return region == NYB_BODY ? cache->part : cache->plain;
}

const nyb_cache_storage *nyb_cache_const_storage_of(const nyb_cache *cache,
                                                    nyb_cache_region region) {
  return region == NYB_BODY ? &cache->storage : region == NYB_FIRST ? &cache->first : &cache->last;
}

nyb_cache_storage *nyb_cache_storage_of(nyb_cache *cache, nyb_cache_region region) {
  return region == NYB_BODY ? &cache->storage : region == NYB_FIRST ? &cache->first : &cache->last;
}

/* ---- Storages ------------------------------------------------------------------------------- */

static nyb_status fail_size(const nyb_cache *cache, const nyb_cache_storage *storage) {
  return nyb_fail(NYB_ERROR_SHAPE,
                  "%" PRId64 " tokens of %s %" PRId64 ", kv_heads %" PRId64 ", key_dim %" PRId64
                  " and value_dim %" PRId64 " take more bytes than int64 counts",
                  storage->capacity_tokens, cache->kind == NYB_CACHE_PAGED ? "pages" : "batch",
                  storage->blocks, cache->kv_heads, cache->part[NYB_KEY].dim,
                  cache->part[NYB_VALUE].dim);
}

nyb_status nyb_cache_size_storage(const nyb_cache *cache, nyb_cache_region region, int64_t blocks,
                                  int64_t capacity_tokens, nyb_cache_storage *storage) {
  const nyb_cache_part *parts = nyb_cache_parts_of(cache, region);
  *storage = (nyb_cache_storage){.capacity_tokens = capacity_tokens, .blocks = blocks};
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      int64_t bytes;
      if (__builtin_mul_overflow(parts[part].row_bytes[array], capacity_tokens, &bytes) ||
          bytes > INT64_MAX - NYB_PLANE_ALIGNMENT) {
        return fail_size(cache, storage);
      }
      bytes = (bytes + NYB_PLANE_ALIGNMENT - 1) / NYB_PLANE_ALIGNMENT * NYB_PLANE_ALIGNMENT;
      storage->plane_bytes[part][array] = bytes;
      if (__builtin_mul_overflow(bytes, plane_count(cache, storage), &bytes) ||
          __builtin_add_overflow(storage->bytes, bytes, &storage->bytes)) {
        return fail_size(cache, storage);
      }
    }
  }
  return NYB_OK;
}

void nyb_cache_place_arrays(const nyb_cache *cache, nyb_cache_storage *storage) {
  char *next = storage->block;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      if (storage->plane_bytes[part][array] == 0) continue;
      storage->array[part][array] = next;
      next += storage->plane_bytes[part][array] * plane_count(cache, storage);
    }
  }
}

nyb_status nyb_cache_make_storage(const nyb_cache *cache, nyb_cache_region region, int64_t blocks,
                                  int64_t capacity_tokens, nyb_cache_storage *storage) {
  const nyb_status status = nyb_cache_size_storage(cache, region, blocks, capacity_tokens, storage);
  if (status != NYB_OK || storage->bytes == 0) return status;
  if ((uint64_t)storage->bytes <= SIZE_MAX) {
    storage->block = nyb_allocate(cache->context, (size_t)storage->bytes, NYB_PLANE_ALIGNMENT);
  }
  if (storage->block == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %" PRId64 " bytes for %" PRId64
                    " tokens in each of %" PRId64 " %s",
                    storage->bytes, capacity_tokens, blocks,
                    cache->kind == NYB_CACHE_PAGED ? "pages" : "sequences");
  }
  nyb_cache_place_arrays(cache, storage);
  return NYB_OK;
}

void nyb_cache_release_storage(const nyb_cache *cache, nyb_cache_storage *storage) {
  if (storage->block != NULL) nyb_release(cache->context, storage->block);
  *storage = (nyb_cache_storage){0};
}

static nyb_stored stored_rows(const nyb_cache *cache, const nyb_cache_part *format,
                              const nyb_cache_storage *storage, int part) {
  const nyb_row_layout *layout = &format->layout;
  nyb_stored stored = {
      .format = format->format,
      .codes = storage->array[part][NYB_CODES],
      .scales = storage->array[part][NYB_SCALES],
      .biases = storage->array[part][NYB_BIASES],
  };
  int64_t *const strides[NYB_CACHE_ARRAYS] = {stored.codes_stride, stored.scales_stride,
                                              stored.biases_stride};
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    const int64_t element_bytes =
        (int64_t)(array == NYB_CODES ? layout->code_bytes : layout->scale_bytes);
    if (element_bytes == 0) continue;
    const int64_t plane = storage->plane_bytes[part][array] / element_bytes;
    strides[array][0] = plane * cache->kv_heads;
    strides[array][1] = plane;
    strides[array][2] = format->row_bytes[array] / element_bytes;
  }
  return stored;
}

nyb_stored nyb_cache_stored(const nyb_cache *cache, const nyb_cache_storage *storage, int part) {
  return stored_rows(cache, &cache->part[part], storage, part);
}

nyb_stored nyb_cache_stored_in(const nyb_cache *cache, nyb_cache_region region, int part) {
  return stored_rows(cache, &nyb_cache_parts_of(cache, region)[part],
                     nyb_cache_const_storage_of(cache, region), part);
}

/* ---- Sequences' numbers --------------------------------------------------------------------- */

nyb_status nyb_cache_make_counts(const nyb_cache *cache, int64_t batch, nyb_cache_counts *counts) {
  const int64_t bytes = batch * (int64_t)(sizeof *counts->dropped + 5 * sizeof *counts->lengths);
  *counts = (nyb_cache_counts){0};
  if ((uint64_t)bytes <= SIZE_MAX) {
    counts->memory = nyb_allocate(cache->context, (size_t)bytes, NYB_PLANE_ALIGNMENT);
  }
  if (counts->memory == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %" PRId64 " bytes for the lengths of %" PRId64
                    " sequences",
                    bytes, batch);
  }
  memset(counts->memory, 0, (size_t)bytes);
  counts->dropped = counts->memory;
  counts->lengths = (int32_t *)(counts->dropped + batch);
  counts->offsets = counts->lengths + batch;
  counts->last_begins = counts->offsets + batch;
  counts->shared = counts->last_begins + batch;
  counts->pages = counts->shared + batch;
  return NYB_OK;
}

void nyb_cache_adopt_counts(nyb_cache *cache, const nyb_cache_counts *counts) {
  if (cache->counts.memory != NULL) nyb_release(cache->context, cache->counts.memory);
  cache->counts = *counts;
  cache->lengths = counts->lengths;
}

int64_t nyb_cache_longest(const nyb_cache *cache) {
  int64_t length = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    length = nyb_larger(length, cache->lengths[sequence]);
  }
  return length;
}

static int64_t row_bytes(const nyb_cache *cache, nyb_cache_region region) {
  const nyb_cache_part *parts = nyb_cache_parts_of(cache, region);
  return cache->kv_heads * (parts[NYB_KEY].layout.row_bytes + parts[NYB_VALUE].layout.row_bytes);
}

/* Whether a sequence before this one holds that page, and then at least so many rows of it. A page
 * stands at the same place in every table that has it. */
static int64_t rows_counted(const nyb_cache *cache, int64_t sequence, int64_t page_index) {
  const nyb_cache_pool *pool = &cache->pool;
  const int64_t page_tokens = cache->options.page_tokens;
  const int32_t page = pool->table[sequence * pool->table_stride + page_index];
  int64_t rows = 0;
  for (int64_t other = 0; pool->references[page] > 1 && other < sequence; other++) {
    const int64_t held = cache->lengths[other] - page_index * page_tokens;
    if (held > 0 && pool->table[other * pool->table_stride + page_index] == page) {
      rows = nyb_larger(rows, nyb_smaller(held, page_tokens));
    }
  }
  return rows;
}

/* Rows in pages, those of a shared page once. */
static int64_t paged_rows(const nyb_cache *cache) {
  const int64_t page_tokens = cache->options.page_tokens;
  int64_t rows = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int64_t pages = nyb_pages_for(cache, cache->lengths[sequence]);
    for (int64_t page = 0; page < pages; page++) {
      const int64_t held = nyb_smaller(cache->lengths[sequence] - page * page_tokens, page_tokens);
      rows += nyb_larger(0, held - rows_counted(cache, sequence, page));
    }
  }
  return rows;
}

static int64_t body_bytes(const nyb_cache *cache) {
  int64_t rows = 0;
  if (cache->kind == NYB_CACHE_PAGED) {
    rows = paged_rows(cache);
  } else {
    for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
      const nyb_cache_sequence state = nyb_cache_get_sequence(cache, sequence);
      rows += nyb_cache_body_tokens(cache, &state);
    }
  }
  return rows * row_bytes(cache, NYB_BODY);
}

int64_t nyb_cache_used_bytes(const nyb_cache *cache) {
  int64_t bytes = body_bytes(cache);
  if (cache->kind != NYB_CACHE_MIXED) return bytes;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(cache, sequence);
    bytes += (state.held - nyb_cache_body_tokens(cache, &state)) * row_bytes(cache, NYB_FIRST);
  }
  return bytes;
}

/* ---- Growing -------------------------------------------------------------------------------- */

typedef struct copy_work {
  const nyb_cache *cache;
  const nyb_cache_storage *target;
} copy_work;

static void copy_run(const nyb_cache *cache, const nyb_cache_storage *target, int64_t head,
                     const nyb_cache_place *from, const nyb_cache_place *to, int64_t rows) {
  const nyb_cache_storage *source = &cache->storage;
  const int64_t from_plane = from->block * cache->kv_heads + head;
  const int64_t to_plane = to->block * cache->kv_heads + head;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      const int64_t bytes = cache->part[part].row_bytes[array];
      if (bytes == 0) continue;
      memcpy(target->array[part][array] + to_plane * target->plane_bytes[part][array] +
                 to->slot * bytes,
             source->array[part][array] + from_plane * source->plane_bytes[part][array] +
                 from->slot * bytes,
             (size_t)(rows * bytes));
    }
  }
}

/* The rows of a sequence and head that stand in the body. */
static void copy_plane(void *task_data, int64_t plane) {
  const copy_work *work = task_data;
  const nyb_cache *cache = work->cache;
  const int64_t sequence = plane / cache->kv_heads, head = plane % cache->kv_heads;
  const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
  nyb_cache_sequence after = before;
  after.offset = 0;
  for (int64_t token = 0; token < before.held;) {
    const nyb_cache_place from =
        nyb_cache_place_of(cache, cache->storage.capacity_tokens, &before, sequence, token);
    const nyb_cache_place to =
        nyb_cache_place_of(cache, work->target->capacity_tokens, &after, sequence, token);
    const int64_t rows = nyb_smaller(from.rows, to.rows);
    if (from.region == NYB_BODY) copy_run(cache, work->target, head, &from, &to, rows);
    token += rows;
  }
}

nyb_status nyb_cache_make_larger(const nyb_cache *cache, int64_t capacity_tokens,
                                 nyb_cache_storage *storage) {
  const nyb_status status =
      nyb_cache_make_storage(cache, NYB_BODY, cache->batch, capacity_tokens, storage);
  if (status != NYB_OK) return status;
  copy_work work = {cache, storage};
  const int64_t planes = cache->batch * cache->kv_heads;
  if (body_bytes(cache) >= NYB_PARALLEL_COPY_BYTES) {
    nyb_parallel(cache->context, planes, copy_plane, &work);
  } else {
    for (int64_t plane = 0; plane < planes; plane++) copy_plane(&work, plane);
  }
  return NYB_OK;
}

void nyb_cache_adopt_larger(nyb_cache *cache, const nyb_cache_storage *storage) {
  if (cache->storage.block != NULL) {
    cache->reallocations++;
    cache->copied_bytes += body_bytes(cache);
  }
  nyb_cache_release_storage(cache, &cache->storage);
  cache->storage = *storage;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    cache->counts.offsets[sequence] = 0;
  }
}

/* Twice what there is, so that a cache filled token by token copies each token less than twice; a
 * ring to no more than its window on its own. */
int64_t nyb_cache_grown_capacity(const nyb_cache *cache, int64_t needed_tokens) {
  const int64_t most = cache->kind == NYB_CACHE_ROTATING
                           ? nyb_smaller(cache->options.window_tokens, cache->limit_tokens)
                           : cache->limit_tokens;
  const int64_t doubled =
      nyb_larger(2 * cache->storage.capacity_tokens, NYB_SMALLEST_CAPACITY_TOKENS);
  return nyb_larger(needed_tokens, nyb_smaller(doubled, most));
}
