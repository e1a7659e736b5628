/* SPDX-License-Identifier: Apache-2.0 */
/* The pool of a paged cache. A page belongs to the sequences whose table has it; only an append
 * writes rows, and only to pages that one sequence holds. */
#include <inttypes.h>
#include <string.h>

#include "cache.h"

enum { SMALLEST_TABLE_PAGES = 16 };

/* ---- The table ------------------------------------------------------------------------------ */

nyb_status nyb_cache_make_table(const nyb_cache *cache, int64_t batch, int64_t stride,
                                int32_t **table) {
  int64_t bytes;
  const bool counted = !__builtin_mul_overflow(batch, stride, &bytes) &&
                       !__builtin_mul_overflow(bytes, (int64_t)sizeof **table, &bytes) &&
                       (uint64_t)bytes <= SIZE_MAX;
  *table = counted ? nyb_allocate(cache->context, (size_t)bytes, NYB_PLANE_ALIGNMENT) : NULL;
  if (*table != NULL) return NYB_OK;
  return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                  "the allocator had no 4 * %" PRId64 " * %" PRId64 " bytes for a table of %" PRId64
                  " pages in each of %" PRId64 " sequences",
                  batch, stride, stride, batch);
}

int64_t nyb_cache_grown_stride(const nyb_cache *cache, int64_t pages) {
  const int64_t limit = nyb_pages_for(cache, cache->limit_tokens);
  const int64_t doubled = nyb_larger(2 * cache->pool.table_stride, SMALLEST_TABLE_PAGES);
  return nyb_larger(pages, nyb_smaller(doubled, limit));
}

/* Room in the table for so many pages of each sequence. */
static nyb_status widen_table(nyb_cache *cache, int64_t pages) {
  nyb_cache_pool *pool = &cache->pool;
  if (pages <= pool->table_stride) return NYB_OK;
  const int64_t stride = nyb_cache_grown_stride(cache, pages);
  int32_t *table;
  const nyb_status status = nyb_cache_make_table(cache, cache->batch, stride, &table);
  if (status != NYB_OK) return status;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int64_t held = nyb_pages_for(cache, cache->lengths[sequence]);
    if (held == 0) continue;
    memcpy(table + sequence * stride, pool->table + sequence * pool->table_stride,
           (size_t)held * sizeof *table);
  }
  if (pool->table != NULL) nyb_release(cache->context, pool->table);
  pool->table = table;
  pool->table_stride = stride;
  return NYB_OK;
}

/* ---- The pool ------------------------------------------------------------------------------- */

void nyb_cache_release_pool(nyb_cache *cache) {
  nyb_cache_pool *pool = &cache->pool;
  if (pool->memory != NULL) nyb_release(cache->context, pool->memory);
  if (pool->table != NULL) nyb_release(cache->context, pool->table);
  *pool = (nyb_cache_pool){0};
}

static int64_t copy_pages(const nyb_cache *cache, const nyb_cache_storage *target) {
  const nyb_cache_storage *source = &cache->storage;
  int64_t copied = 0;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      const int64_t bytes = source->plane_bytes[part][array] * source->blocks * cache->kv_heads;
      if (bytes == 0) continue;
      memcpy(target->array[part][array], source->array[part][array], (size_t)bytes);
      copied += bytes;
    }
  }
  return copied;
}

nyb_status nyb_cache_make_lists(const nyb_cache *cache, int64_t pages, nyb_cache_pool *pool) {
  const nyb_cache_pool *old = &cache->pool;
  const int64_t had = cache->storage.blocks;
  const size_t bytes = (size_t)pages * 2 * sizeof(int32_t);
  pool->memory = nyb_allocate(cache->context, bytes, NYB_PLANE_ALIGNMENT);
  if (pool->memory == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for %" PRId64 " pages",
                    bytes, pages);
  }
  pool->references = pool->memory;
  pool->unused = pool->references + pages;
  pool->unused_count = 0;
  for (int64_t page = pages - 1; page >= had; page--) {
    pool->references[page] = 0;
    pool->unused[pool->unused_count++] = (int32_t)page;
  }
  if (had > 0) {
    memcpy(pool->references, old->references, (size_t)had * sizeof(int32_t));
    memcpy(pool->unused + pool->unused_count, old->unused,
           (size_t)old->unused_count * sizeof(int32_t));
  }
  pool->unused_count += old->unused_count;
  return NYB_OK;
}

static nyb_status grow_pool(nyb_cache *cache, int64_t pages) {
  if (pages > INT32_MAX) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "the pool would need %" PRId64 " pages; it can have %d at most", pages,
                    INT32_MAX);
  }
  nyb_cache_storage storage;
  nyb_status status =
      nyb_cache_make_storage(cache, NYB_BODY, pages, cache->options.page_tokens, &storage);
  if (status != NYB_OK) return status;
  nyb_cache_pool grown = cache->pool;
  status = nyb_cache_make_lists(cache, pages, &grown);
  if (status != NYB_OK) {
    nyb_cache_release_storage(cache, &storage);
    return status;
  }
  if (cache->storage.block != NULL) {
    cache->reallocations++;
    cache->copied_bytes += copy_pages(cache, &storage);
    nyb_release(cache->context, cache->pool.memory);
  }
  nyb_cache_release_storage(cache, &cache->storage);
  cache->storage = storage;
  cache->pool = grown;
  return NYB_OK;
}

int32_t nyb_cache_take_page(nyb_cache *cache) {
  nyb_cache_pool *pool = &cache->pool;
  const int32_t page = pool->unused[--pool->unused_count];
  pool->references[page] = 1;
  return page;
}

void nyb_cache_give_page(nyb_cache *cache, int32_t page) {
  nyb_cache_pool *pool = &cache->pool;
  if (--pool->references[page] == 0) pool->unused[pool->unused_count++] = page;
}

int64_t nyb_cache_pages_of(const nyb_cache *cache, int64_t sequence) {
  if (cache->cuda != NULL) return cache->counts.pages[sequence];
  return nyb_pages_for(cache, cache->lengths[sequence]);
}

void nyb_cache_drop_pages(nyb_cache *cache, int64_t sequence, int64_t held, int64_t kept) {
  const int32_t *pages = cache->pool.table + sequence * cache->pool.table_stride;
  const int64_t first = nyb_pages_for(cache, kept);
  for (int64_t page = nyb_pages_for(cache, held) - 1; page >= first; page--) {
    nyb_cache_give_page(cache, pages[page]);
  }
}

nyb_status nyb_cache_reserve_pages(nyb_cache *cache, int64_t tokens) {
  const int64_t pages = nyb_pages_for(cache, tokens);
  nyb_status status = widen_table(cache, pages);
  if (status != NYB_OK) return status;
  int64_t missing = -cache->pool.unused_count;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    missing += nyb_larger(0, pages - nyb_pages_for(cache, cache->lengths[sequence]));
  }
  return missing > 0 ? grow_pool(cache, cache->storage.blocks + missing) : NYB_OK;
}

/* ---- Within an append ----------------------------------------------------------------------- */

/* Whether the append would write to a page that others hold. */
static bool writes_shared(const nyb_cache *cache, int64_t sequence) {
  const nyb_cache_pool *pool = &cache->pool;
  const int64_t held = cache->lengths[sequence], page_tokens = cache->options.page_tokens;
  if (held % page_tokens == 0) return false;
  return pool->references[pool->table[sequence * pool->table_stride + held / page_tokens]] > 1;
}

/* Pages that sequences from this one on will take, or some more. */
static int64_t pages_to_take(const nyb_cache *cache, const nyb_append *append, int64_t sequence) {
  int64_t pages = 0;
  for (; sequence < cache->batch; sequence++) {
    const int64_t added = nyb_appended_tokens(append, sequence), held = cache->lengths[sequence];
    if (added == 0) continue;
    pages += nyb_pages_for(cache, held + added) - nyb_pages_for(cache, held);
    pages += writes_shared(cache, sequence);
  }
  return pages;
}

/* The rows of a page, in place of which the sequence gets a copy of its own. */
static void copy_rows(const nyb_cache *cache, int32_t from, int32_t to, int64_t rows) {
  const nyb_cache_storage *storage = &cache->storage;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      const int64_t plane = storage->plane_bytes[part][array];
      const int64_t bytes = rows * cache->part[part].row_bytes[array];
      for (int64_t head = 0; bytes > 0 && head < cache->kv_heads; head++) {
        char *const first = storage->array[part][array];
        memcpy(first + (to * cache->kv_heads + head) * plane,
               first + (from * cache->kv_heads + head) * plane, (size_t)bytes);
      }
    }
  }
}

static void begin_sequence(nyb_cache *cache, const nyb_append *append, int64_t sequence) {
  const int64_t page_tokens = cache->options.page_tokens, held = cache->lengths[sequence];
  const int64_t added = nyb_appended_tokens(append, sequence);
  int32_t *const pages = cache->pool.table + sequence * cache->pool.table_stride;
  cache->counts.shared[sequence] = -1;
  if (added == 0) return;
  if (writes_shared(cache, sequence)) {
    const int64_t last = held / page_tokens;
    const int32_t shared = pages[last];
    pages[last] = nyb_cache_take_page(cache);
    copy_rows(cache, shared, pages[last], held % page_tokens);
    cache->pool.references[shared]--;
    cache->counts.shared[sequence] = shared;
  }
  const int64_t end = nyb_pages_for(cache, held + added);
  for (int64_t page = nyb_pages_for(cache, held); page < end; page++) {
    pages[page] = nyb_cache_take_page(cache);
  }
}

/* Twice as many pages, but no more than sequences of their own can fill. */
int64_t nyb_cache_grown_pages(const nyb_cache *cache, int64_t missing) {
  const int64_t pages = cache->storage.blocks;
  const int64_t least = cache->batch * nyb_pages_for(cache, NYB_SMALLEST_CAPACITY_TOKENS);
  const int64_t most = cache->batch * nyb_pages_for(cache, cache->limit_tokens);
  const int64_t doubled = nyb_smaller(nyb_larger(2 * pages, least), nyb_smaller(most, INT32_MAX));
  return nyb_larger(pages + missing, doubled);
}

nyb_status nyb_cache_begin_pages(nyb_cache *cache, const nyb_append *append) {
  int64_t longest = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    longest = nyb_larger(longest, cache->lengths[sequence] + nyb_appended_tokens(append, sequence));
  }
  nyb_status status = widen_table(cache, nyb_pages_for(cache, longest));
  if (status != NYB_OK) return status;
  const int64_t missing = pages_to_take(cache, append, 0) - cache->pool.unused_count;
  if (missing > 0) status = grow_pool(cache, nyb_cache_grown_pages(cache, missing));
  if (status != NYB_OK) return status;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    begin_sequence(cache, append, sequence);
  }
  return NYB_OK;
}

void nyb_cache_undo_pages(nyb_cache *cache, const nyb_append *append) {
  for (int64_t sequence = cache->batch - 1; sequence >= 0; sequence--) {
    const int64_t held = cache->lengths[sequence];
    const int64_t added = nyb_appended_tokens(append, sequence);
    nyb_cache_drop_pages(cache, sequence, held + added, held);
    const int32_t shared = cache->counts.shared[sequence];
    if (shared < 0) continue;
    int32_t *const last =
        cache->pool.table + sequence * cache->pool.table_stride + held / cache->options.page_tokens;
    nyb_cache_give_page(cache, *last);
    *last = shared;
    cache->pool.references[shared]++;
  }
}
