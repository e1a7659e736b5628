/* SPDX-License-Identifier: Apache-2.0 */
/* The pages of a cache in device memory. The host takes and gives them and has the table, by the
 * means of src/cache_pages.c; the device has a twin of the table, and for each sequence the tokens
 * whose pages are its own: an append that a graph replays writes nowhere else.
 *
 * A sequence may have more pages than it fills: those that were reserved for it, and, once calls
 * were captured, those that a trim has left. */
#include "cache.h"

#include <inttypes.h>
#include <string.h>

/* ---- Twins ---------------------------------------------------------------------------------- */

/* From page `page` on. */
static void send_table(nyb_cuda_patches *patches, nyb_cache *cache, int64_t sequence,
                       int64_t page) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t first = sequence * cache->pool.table_stride;
  for (int64_t i = first + page; i < first + cache->counts.pages[sequence]; i++) {
    if (cuda->sent_table[i] == cache->pool.table[i]) continue;
    cuda->sent_table[i] = cache->pool.table[i];
    nyb_cuda_patches_add(patches, &cuda->table[i], cache->pool.table[i]);
  }
}

static void send_bounds(nyb_cuda_patches *patches, nyb_cuda_cache *cuda, int64_t sequence) {
  if (cuda->sent_begins[sequence] != cuda->own_begin[sequence]) {
    cuda->sent_begins[sequence] = cuda->own_begin[sequence];
    nyb_cuda_patches_add(patches, &cuda->own_begins[sequence], cuda->own_begin[sequence]);
  }
  if (cuda->sent_ends[sequence] != cuda->own_end[sequence]) {
    cuda->sent_ends[sequence] = cuda->own_end[sequence];
    nyb_cuda_patches_add(patches, &cuda->own_ends[sequence], cuda->own_end[sequence]);
  }
}

/* Nothing is known of what the device has. */
static void forget_sent(nyb_cuda_cache *cuda) {
  for (int64_t i = 0; i < cuda->table_words; i++) cuda->sent_table[i] = -1;
  for (int64_t i = 0; i < cuda->sequences; i++) cuda->sent_begins[i] = cuda->sent_ends[i] = -1;
  cuda->all_unsent = true;
}

static nyb_status end_sending(nyb_cuda_cache *cuda, nyb_cuda_patches *tables,
                              nyb_cuda_patches *bounds) {
  nyb_status status = nyb_cuda_patches_end(tables);
  if (status == NYB_OK) status = nyb_cuda_patches_end(bounds);
  if (status != NYB_OK) forget_sent(cuda);
  return status;
}

nyb_status nyb_cuda_cache_send_tables(nyb_cuda_scope *scope, nyb_cache *cache, int64_t first,
                                      int64_t end, nyb_stream stream) {
  nyb_cuda_patches tables, bounds;
  nyb_cuda_patches_begin(&tables, scope, cache->cuda->table, stream);
  nyb_cuda_patches_begin(&bounds, scope, cache->cuda->numbers, stream);
  for (int64_t sequence = first; sequence < end; sequence++) {
    send_table(&tables, cache, sequence, 0);
    send_bounds(&bounds, cache->cuda, sequence);
  }
  const nyb_status status = end_sending(cache->cuda, &tables, &bounds);
  if (status == NYB_OK && end - first == cache->batch) cache->cuda->all_unsent = false;
  return status;
}

/* ---- Memory --------------------------------------------------------------------------------- */

/* Twins with room for so many entries, of which none has been sent, in place of the old ones. */
nyb_status nyb_cuda_cache_make_table(nyb_cuda_scope *scope, nyb_cache *cache, int64_t words,
                                     nyb_stream stream) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const nyb_cuda_driver *driver = scope->driver;
  const size_t bytes = (size_t)words * sizeof(int32_t);
  if (words > INT32_MAX) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "a cache on CUDA would have a table of %" PRId64 " pages; it has %d at most",
                    words, INT32_MAX);
  }
  int32_t *sent = nyb_allocate(cache->context, bytes, NYB_PLANE_ALIGNMENT);
  if (sent == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a table of pages",
                    bytes);
  }
  void *table;
  const int mode = nyb_cuda_relax(scope);
  nyb_status status = nyb_cuda_cache_allocate(scope, (int64_t)bytes,
                                              "cuMemAlloc of a cache's table of pages", &table);
  if (status == NYB_OK) {
    status =
        nyb_cuda_check(driver, driver->MemsetD8Async(nyb_cuda_address_of(table), 0, bytes, stream),
                       "cuMemsetD8Async");
    if (status == NYB_OK && cuda->table != NULL) status = nyb_cuda_cache_wait(scope, stream);
    nyb_cuda_cache_release(cache->context, scope, status == NYB_OK ? (void *)cuda->table : table);
  }
  nyb_cuda_restore_mode(scope, mode);
  if (status != NYB_OK) {
    nyb_release(cache->context, sent);
    return status;
  }
  if (cuda->sent_table != NULL) nyb_release(cache->context, cuda->sent_table);
  cuda->sent_table = sent;
  cuda->table = table;
  cuda->table_words = words;
  forget_sent(cuda);
  return NYB_OK;
}

/* Room in the table for so many pages of each sequence. */
static nyb_status widen_table(nyb_cuda_scope *scope, nyb_cache *cache, int64_t pages,
                              nyb_stream stream) {
  nyb_cache_pool *const pool = &cache->pool;
  if (pages <= pool->table_stride) return NYB_OK;
  const int64_t stride = nyb_cache_grown_stride(cache, pages);
  int32_t *table;
  nyb_status status = nyb_cache_make_table(cache, cache->batch, stride, &table);
  if (status != NYB_OK) return status;
  status = nyb_cuda_cache_make_table(scope, cache, cache->batch * stride, stream);
  if (status != NYB_OK) {
    nyb_release(cache->context, table);
    return status;
  }
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    if (cache->counts.pages[sequence] == 0) continue;
    memcpy(table + sequence * stride, pool->table + sequence * pool->table_stride,
           (size_t)cache->counts.pages[sequence] * sizeof *table);
  }
  if (pool->table != NULL) nyb_release(cache->context, pool->table);
  pool->table = table;
  pool->table_stride = stride;
  return NYB_OK;
}

static nyb_status copy_pages(const nyb_cuda_scope *scope, const nyb_cache *cache,
                             const nyb_cache_storage *target, int64_t *copied, nyb_stream stream) {
  const nyb_cache_storage *source = &cache->storage;
  const nyb_cuda_driver *driver = scope->driver;
  nyb_status status = NYB_OK;
  for (int i = 0; i < NYB_CACHE_PARTS * NYB_CACHE_ARRAYS && status == NYB_OK; i++) {
    const int part = i / NYB_CACHE_ARRAYS, array = i % NYB_CACHE_ARRAYS;
    const int64_t bytes = source->plane_bytes[part][array] * source->blocks * cache->kv_heads;
    if (bytes == 0) continue;
    *copied += bytes;
    status = nyb_cuda_check(driver,
                            driver->MemcpyDtoDAsync(nyb_cuda_address_of(target->array[part][array]),
                                                    nyb_cuda_address_of(source->array[part][array]),
                                                    (size_t)bytes, stream),
                            "cuMemcpyDtoDAsync");
  }
  return status;
}

/* Within nyb_cuda_relax(). */
static nyb_status move_pool(const nyb_cuda_scope *scope, nyb_cache *cache,
                            const nyb_cache_storage *storage, const nyb_cache_pool *pool,
                            nyb_stream stream) {
  if (cache->storage.block == NULL) return NYB_OK;
  int64_t copied = 0;
  nyb_status status = copy_pages(scope, cache, storage, &copied, stream);
  if (status == NYB_OK) status = nyb_cuda_cache_wait(scope, stream);
  if (status != NYB_OK) return status;
  cache->reallocations++;
  cache->copied_bytes += copied;
  nyb_cuda_cache_release(cache->context, scope, cache->storage.block);
  if (cache->pool.memory != pool->memory) nyb_release(cache->context, cache->pool.memory);
  return NYB_OK;
}

static nyb_status grow_pool(const nyb_cuda_scope *scope, nyb_cache *cache, int64_t pages,
                            nyb_stream stream) {
  if (pages > INT32_MAX) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "the pool would need %" PRId64 " pages; it can have %d at most", pages,
                    INT32_MAX);
  }
  nyb_cache_pool grown = cache->pool;
  nyb_status status = nyb_cache_make_lists(cache, pages, &grown);
  if (status != NYB_OK) return status;
  const int mode = nyb_cuda_relax(scope);
  nyb_cache_storage storage;
  status = nyb_cuda_cache_make_storage(scope, cache, NYB_BODY, pages, cache->options.page_tokens,
                                       &storage);
  if (status == NYB_OK) {
    status = move_pool(scope, cache, &storage, &grown, stream);
    if (status != NYB_OK) nyb_cuda_cache_release(cache->context, scope, storage.block);
  }
  nyb_cuda_restore_mode(scope, mode);
  if (status != NYB_OK) {
    nyb_release(cache->context, grown.memory);
    return status;
  }
  cache->storage = storage;
  cache->pool = grown;
  return NYB_OK;
}

/* ---- Pages of a sequence's own -------------------------------------------------------------- */

/* The table's entries that a sequence is to have for itself: from the page in which its next token
 * stands. */
typedef struct page_range {
  int64_t begin, end;
} page_range;

static page_range wanted_pages(const nyb_cache *cache, const nyb_append *append, int64_t tokens,
                               int64_t sequence) {
  const int64_t held = cache->lengths[sequence];
  const int64_t added = append == NULL ? tokens - held : nyb_appended_tokens(append, sequence);
  if (added <= 0) return (page_range){0};
  const int64_t end = nyb_pages_for(cache, held + added);
  return (page_range){held / cache->options.page_tokens,
                      nyb_larger(end, cache->counts.pages[sequence])};
}

static bool is_own(const nyb_cache *cache, int64_t sequence, int64_t page) {
  const nyb_cache_pool *pool = &cache->pool;
  return page < cache->counts.pages[sequence] &&
         pool->references[pool->table[sequence * pool->table_stride + page]] == 1;
}

/* Pages to take, or some more: of those that share one, the last may keep it. */
static int64_t pages_to_take(const nyb_cache *cache, const nyb_append *append, int64_t tokens,
                             int64_t *longest) {
  int64_t missing = 0;
  *longest = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const page_range range = wanted_pages(cache, append, tokens, sequence);
    *longest = nyb_larger(*longest, range.end);
    for (int64_t page = range.begin; page < range.end; page++) {
      missing += !is_own(cache, sequence, page);
    }
  }
  return missing;
}

static void own_page(nyb_cache *cache, int64_t sequence, int64_t page, nyb_cuda_copies *copies) {
  nyb_cache_pool *const pool = &cache->pool;
  int32_t *const entry = pool->table + sequence * pool->table_stride + page;
  if (is_own(cache, sequence, page)) return;
  const bool shared = page < cache->counts.pages[sequence];
  const int32_t old = shared ? *entry : -1;
  *entry = nyb_cache_take_page(cache);
  if (!shared) {
    cache->counts.pages[sequence] = (int32_t)(page + 1);
    return;
  }
  const int64_t page_tokens = cache->options.page_tokens;
  const int64_t held = cache->lengths[sequence] - page * page_tokens;
  const nyb_copy_move move = {.from_block = old,
                              .to_block = *entry,
                              .rows = (int)nyb_larger(0, nyb_smaller(held, page_tokens))};
  nyb_cuda_copies_add(copies, &move);
  nyb_cache_give_page(cache, old);
}

static void own_range(nyb_cache *cache, int64_t sequence, const page_range *range,
                      nyb_cuda_copies *copies) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t page_tokens = cache->options.page_tokens;
  if (range->end == 0) return;
  for (int64_t page = range->begin; page < range->end; page++) {
    own_page(cache, sequence, page, copies);
  }
  const int64_t begin = range->begin * page_tokens;
  const int64_t end = nyb_smaller(cache->counts.pages[sequence] * page_tokens, INT32_MAX);
  cuda->own_begin[sequence] = (int32_t)nyb_smaller(begin, cuda->own_begin[sequence]);
  cuda->own_end[sequence] = (int32_t)end;
}

/* Memory for so many pages more and the table's entries. */
static nyb_status make_room(nyb_cuda_scope *scope, nyb_cache *cache, const nyb_append *append,
                            int64_t missing, int64_t longest, nyb_stream stream) {
  /* The pool first: a wider table begins empty and is sent by what follows. */
  const int64_t lacking = missing - cache->pool.unused_count;
  if (lacking > 0) {
    const int64_t pages =
        append == NULL ? cache->storage.blocks + lacking : nyb_cache_grown_pages(cache, lacking);
    const nyb_status status = grow_pool(scope, cache, pages, stream);
    if (status != NYB_OK) return status;
  }
  return widen_table(scope, cache, longest, stream);
}

static nyb_status refuse_pages(nyb_stream stream) {
  return nyb_fail(
      NYB_ERROR_UNSUPPORTED,
      "stream %p is being captured and sequences would have to take pages of their own; "
      "nyb_cache_reserve gives them before the capture",
      stream);
}

static bool bounds_sent(const nyb_cache *cache) {
  const nyb_cuda_cache *cuda = cache->cuda;
  const size_t bytes = (size_t)cache->batch * sizeof(int32_t);
  return !cuda->all_unsent && memcmp(cuda->own_begin, cuda->sent_begins, bytes) == 0 &&
         memcmp(cuda->own_end, cuda->sent_ends, bytes) == 0;
}

static nyb_status send_changes(nyb_cuda_scope *scope, nyb_cache *cache, const nyb_append *append,
                               int64_t tokens, nyb_stream stream) {
  nyb_cuda_cache *const cuda = cache->cuda;
  if (cuda->all_unsent) {
    return nyb_cuda_cache_send_tables(scope, cache, 0, cache->batch, stream);
  }
  nyb_cuda_patches tables, bounds;
  nyb_cuda_patches_begin(&tables, scope, cuda->table, stream);
  nyb_cuda_patches_begin(&bounds, scope, cuda->numbers, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const page_range range = wanted_pages(cache, append, tokens, sequence);
    if (range.end > 0) send_table(&tables, cache, sequence, range.begin);
    send_bounds(&bounds, cuda, sequence);
  }
  return end_sending(cuda, &tables, &bounds);
}

nyb_status nyb_cuda_cache_own_pages(nyb_cuda_scope *scope, nyb_cache *cache,
                                    const nyb_append *append, int64_t tokens, bool capturing,
                                    nyb_stream stream) {
  int64_t longest;
  const int64_t missing = pages_to_take(cache, append, tokens, &longest);
  if (missing > 0 && capturing) return refuse_pages(stream);
  nyb_status status =
      missing > 0 ? make_room(scope, cache, append, missing, longest, stream) : NYB_OK;
  if (status != NYB_OK) return status;
  nyb_cuda_copies copies;
  nyb_cuda_copies_begin(&copies, scope, cache, NYB_BODY, &cache->storage, &cache->storage, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const page_range range = wanted_pages(cache, append, tokens, sequence);
    own_range(cache, sequence, &range, &copies);
  }
  status = nyb_cuda_copies_end(&copies);
  if (status != NYB_OK || (missing == 0 && bounds_sent(cache))) return status;
  return capturing ? refuse_pages(stream) : send_changes(scope, cache, append, tokens, stream);
}

/* Down from the last page, those that no other sequence has. */
void nyb_cuda_cache_find_bounds(nyb_cache *cache) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t page_tokens = cache->options.page_tokens;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    int64_t page = cache->counts.pages[sequence];
    cuda->own_end[sequence] = (int32_t)nyb_smaller(page * page_tokens, INT32_MAX);
    while (page > 0 && is_own(cache, sequence, page - 1)) page--;
    cuda->own_begin[sequence] = (int32_t)nyb_smaller(page * page_tokens, INT32_MAX);
  }
}

void nyb_cuda_cache_drop_pages(nyb_cache *cache, int64_t sequence, int64_t kept) {
  nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t page_tokens = cache->options.page_tokens;
  const int64_t left = nyb_larger(nyb_pages_for(cache, kept),
                                  nyb_smaller(cuda->reserved_pages, cache->counts.pages[sequence]));
  if (left >= cache->counts.pages[sequence]) return;
  nyb_cache_drop_pages(cache, sequence, cache->counts.pages[sequence] * page_tokens,
                       left * page_tokens);
  cache->counts.pages[sequence] = (int32_t)left;
  cuda->own_end[sequence] = (int32_t)nyb_smaller(left * page_tokens, INT32_MAX);
  cuda->own_begin[sequence] =
      (int32_t)nyb_smaller(cuda->own_begin[sequence], cuda->own_end[sequence]);
}

nyb_status nyb_cuda_cache_reserve_in(nyb_cuda_scope *scope, nyb_cache *cache, int64_t tokens,
                                     nyb_stream stream) {
  bool capturing;
  nyb_status status = nyb_cuda_capturing(scope, stream, &capturing);
  if (status == NYB_OK && !capturing) status = nyb_cuda_cache_settle_counts(scope, cache, stream);
  if (status != NYB_OK) return status;
  status = nyb_cuda_cache_own_pages(scope, cache, NULL, tokens, capturing, stream);
  if (status != NYB_OK) return status;
  cache->cuda->reserved_pages =
      nyb_larger(cache->cuda->reserved_pages, nyb_pages_for(cache, tokens));
  return NYB_OK;
}

nyb_status nyb_cuda_cache_reserve_pages(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = nyb_cuda_cache_reserve_in(&scope, cache, tokens, stream);
  nyb_cuda_leave(&scope);
  return status;
}
