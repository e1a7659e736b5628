/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences that change places, double and go. Pages are shared. Rows are moved where they are as
 * long as there are blocks enough: first those whose target nobody needs any more, then the cycles
 * that are left, each through a small buffer. All memory is taken before the first row moves. */
#include <inttypes.h>
#include <string.h>

#include "cache.h"

nyb_status nyb_cache_check_sources(const nyb_cache *cache, const int64_t *sources, int64_t count) {
  if (sources == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "sources is NULL; it must point to count sequences");
  }
  if (count < 1 || count > (INT64_C(1) << 30)) {
    return nyb_fail(NYB_ERROR_SHAPE, "count is %" PRId64 "; it must be 1 to %d", count, 1 << 30);
  }
  for (int64_t i = 0; i < count; i++) {
    if (sources[i] >= 0 && sources[i] < cache->batch) continue;
    return nyb_fail(NYB_ERROR_VALUE,
                    "sources[%" PRId64 "] is %" PRId64 "; it must be 0 to %" PRId64, i, sources[i],
                    cache->batch - 1);
  }
  return NYB_OK;
}

nyb_status nyb_cache_reordered_counts(const nyb_cache *cache, const int64_t *sources, int64_t count,
                                      nyb_cache_counts *counts) {
  const nyb_status status = nyb_cache_make_counts(cache, count, counts);
  if (status != NYB_OK) return status;
  const nyb_cache_counts *old = &cache->counts;
  for (int64_t i = 0; i < count; i++) {
    counts->dropped[i] = old->dropped[sources[i]];
    counts->lengths[i] = old->lengths[sources[i]];
    counts->offsets[i] = old->offsets[sources[i]];
    counts->last_begins[i] = old->last_begins[sources[i]];
  }
  return NYB_OK;
}

/* ---- Moves in place ------------------------------------------------------------------------- */

enum { MOVE_BUFFER_BYTES = 4096 };

typedef struct move_graph {
  const int64_t *sources;
  int64_t count;
  int32_t *readers; /* [blocks]: moves still to be made that read it */
  int32_t *free;    /* [count]: blocks that nobody reads any more and that wait for their rows */
  bool *pending;    /* [count] */
} move_graph;

static void add_move(nyb_cache_moves *list, int64_t to, int64_t from, int64_t sequence) {
  list->moves[list->count++] = (nyb_cache_move){to, from, sequence};
}

static void list_chains(const move_graph *graph, nyb_cache_moves *list) {
  int64_t waiting = 0;
  for (int64_t i = 0; i < graph->count; i++) {
    if (graph->pending[i] && graph->readers[i] == 0) graph->free[waiting++] = (int32_t)i;
  }
  while (waiting > 0) {
    const int64_t to = graph->free[--waiting], from = graph->sources[to];
    add_move(list, to, from, from);
    graph->pending[to] = false;
    if (--graph->readers[from] == 0 && from < graph->count && graph->pending[from]) {
      graph->free[waiting++] = (int32_t)from;
    }
  }
}

static void list_cycles(const move_graph *graph, nyb_cache_moves *list) {
  for (int64_t first = 0; first < graph->count; first++) {
    if (!graph->pending[first]) continue;
    add_move(list, NYB_MOVE_BUFFER, first, first);
    int64_t to = first;
    for (; graph->sources[to] != first; to = graph->sources[to]) {
      add_move(list, to, graph->sources[to], graph->sources[to]);
      graph->pending[to] = false;
    }
    add_move(list, to, NYB_MOVE_BUFFER, first);
    graph->pending[to] = false;
  }
}

nyb_status nyb_cache_list_moves(const nyb_cache *cache, const int64_t *sources, int64_t count,
                                nyb_cache_moves *list) {
  const int64_t blocks = cache->storage.blocks;
  const int64_t bytes = 2 * count * (int64_t)sizeof(nyb_cache_move) +
                        blocks * (int64_t)sizeof(int32_t) +
                        count * (int64_t)(sizeof(int32_t) + sizeof(bool));
  *list = (nyb_cache_moves){0};
  if ((uint64_t)bytes <= SIZE_MAX) {
    list->memory = nyb_allocate(cache->context, (size_t)bytes, NYB_PLANE_ALIGNMENT);
  }
  if (list->memory == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %" PRId64 " bytes for moves of %" PRId64 " sequences",
                    bytes, count);
  }
  memset(list->memory, 0, (size_t)bytes);
  list->moves = list->memory;
  move_graph graph = {.sources = sources, .count = count};
  graph.readers = (int32_t *)(list->moves + 2 * count);
  graph.free = graph.readers + blocks;
  graph.pending = (bool *)(graph.free + count);
  for (int64_t i = 0; i < count; i++) {
    graph.pending[i] = sources[i] != i;
    if (graph.pending[i]) graph.readers[sources[i]]++;
  }
  list_chains(&graph, list);
  list_cycles(&graph, list);
  return NYB_OK;
}

/* ---- Copies --------------------------------------------------------------------------------- */

typedef struct move_work {
  const nyb_cache *cache;
  const nyb_cache_moves *list;
  nyb_cache_storage target[NYB_CACHE_REGIONS];
} move_work;

static const nyb_cache_storage *source_of(const move_work *work, int region) {
  return nyb_cache_const_storage_of(work->cache, (nyb_cache_region)region);
}

static int64_t bytes_to_move(const move_work *work, int region, int64_t row_bytes,
                             int64_t sequence) {
  const nyb_cache_sequence state = nyb_cache_get_sequence(work->cache, sequence);
  return nyb_cache_slots(work->cache, (nyb_cache_region)region, &state) * row_bytes;
}

typedef struct move_array {
  const nyb_cache_storage *source, *target;
  int region, part, array;
  int64_t head, row_bytes;
} move_array;

static char *plane_of(const move_work *work, const nyb_cache_storage *storage, const move_array *at,
                      int64_t block) {
  return storage->array[at->part][at->array] +
         (block * work->cache->kv_heads + at->head) * storage->plane_bytes[at->part][at->array];
}

/* All moves of one array and head: a piece of the planes at a time where a buffer is needed. */
static void move_planes(const move_work *work, const move_array *at) {
  char buffer[MOVE_BUFFER_BYTES];
  const bool in_place = at->source->block == at->target->block;
  const int64_t piece = in_place ? MOVE_BUFFER_BYTES : INT64_MAX;
  int64_t longest = 0;
  for (int64_t i = 0; i < work->list->count; i++) {
    longest = nyb_larger(
        longest, bytes_to_move(work, at->region, at->row_bytes, work->list->moves[i].sequence));
  }
  for (int64_t offset = 0; offset < longest; offset = in_place ? offset + piece : longest) {
    for (int64_t i = 0; i < work->list->count; i++) {
      const nyb_cache_move *step = &work->list->moves[i];
      const int64_t bytes = nyb_smaller(
          piece, bytes_to_move(work, at->region, at->row_bytes, step->sequence) - offset);
      if (bytes <= 0) continue;
      char *const to =
          step->to == NYB_MOVE_BUFFER ? buffer : plane_of(work, at->target, at, step->to) + offset;
      const char *const from = step->from == NYB_MOVE_BUFFER
                                   ? buffer
                                   : plane_of(work, at->source, at, step->from) + offset;
      memcpy(to, from, (size_t)bytes);
    }
  }
}

static void move_head(void *task_data, int64_t head) {
  const move_work *work = task_data;
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
    const nyb_cache_storage *source = source_of(work, region);
    const nyb_cache_part *parts = nyb_cache_parts_of(work->cache, (nyb_cache_region)region);
    if (source->block == NULL) continue;
    for (int part = 0; part < NYB_CACHE_PARTS; part++) {
      for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
        if (source->plane_bytes[part][array] == 0) continue;
        const move_array at = {source, &work->target[region],       region, part, array,
                               head,   parts[part].row_bytes[array]};
        move_planes(work, &at);
      }
    }
  }
}

static void make_moves(move_work *work) {
  const nyb_cache *cache = work->cache;
  if (work->list->count == 0) return;
  if (nyb_cache_used_bytes(cache) >= NYB_PARALLEL_COPY_BYTES) {
    nyb_parallel(cache->context, cache->kv_heads, move_head, work);
  } else {
    for (int64_t head = 0; head < cache->kv_heads; head++) move_head(work, head);
  }
}

static nyb_status move_in_place(nyb_cache *cache, const int64_t *sources, int64_t count) {
  nyb_cache_moves list;
  const nyb_status status = nyb_cache_list_moves(cache, sources, count, &list);
  if (status != NYB_OK) return status;
  move_work work = {.cache = cache, .list = &list};
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
    work.target[region] = *source_of(&work, region);
  }
  make_moves(&work);
  nyb_release(cache->context, list.memory);
  return NYB_OK;
}

static void release_targets(move_work *work) {
  for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
    nyb_cache_release_storage(work->cache, &work->target[region]);
  }
}

static nyb_status make_targets(move_work *work, int64_t count) {
  nyb_status status = NYB_OK;
  for (int region = 0; region < NYB_CACHE_REGIONS && status == NYB_OK; region++) {
    const nyb_cache_storage *source = source_of(work, region);
    if (source->blocks == 0) continue;
    status = nyb_cache_make_storage(work->cache, (nyb_cache_region)region, count,
                                    source->capacity_tokens, &work->target[region]);
  }
  if (status != NYB_OK) release_targets(work);
  return status;
}

static nyb_status move_to_new(nyb_cache *cache, const int64_t *sources, int64_t count) {
  nyb_cache_moves list = {.count = count};
  list.memory =
      nyb_allocate(cache->context, (size_t)count * sizeof(nyb_cache_move), NYB_PLANE_ALIGNMENT);
  if (list.memory == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes for moves of %" PRId64 " sequences",
                    (size_t)count * sizeof(nyb_cache_move), count);
  }
  list.moves = list.memory;
  for (int64_t i = 0; i < count; i++) list.moves[i] = (nyb_cache_move){i, sources[i], sources[i]};
  move_work work = {.cache = cache, .list = &list};
  const nyb_status status = make_targets(&work, count);
  if (status == NYB_OK) {
    make_moves(&work);
    if (cache->storage.block != NULL) cache->reallocations++;
    for (int region = 0; region < NYB_CACHE_REGIONS; region++) {
      nyb_cache_storage *own = nyb_cache_storage_of(cache, (nyb_cache_region)region);
      nyb_cache_release_storage(cache, own);
      *own = work.target[region];
    }
  }
  nyb_release(cache->context, list.memory);
  return status;
}

/* ---- Pages ---------------------------------------------------------------------------------- */

nyb_status nyb_cache_share_pages(nyb_cache *cache, const int64_t *sources, int64_t count) {
  nyb_cache_pool *pool = &cache->pool;
  int32_t *table;
  const nyb_status status = nyb_cache_make_table(cache, count, pool->table_stride, &table);
  if (status != NYB_OK) return status;
  for (int64_t i = 0; i < count; i++) {
    const int64_t pages = nyb_pages_for(cache, cache->lengths[sources[i]]);
    for (int64_t page = 0; page < pages; page++) {
      const int32_t held = pool->table[sources[i] * pool->table_stride + page];
      table[i * pool->table_stride + page] = held;
      pool->references[held]++;
    }
  }
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int64_t pages = nyb_cache_pages_of(cache, sequence);
    nyb_cache_drop_pages(cache, sequence, pages * cache->options.page_tokens, 0);
  }
  nyb_release(cache->context, pool->table);
  pool->table = table;
  return NYB_OK;
}

nyb_status nyb_cache_reorder_here(nyb_cache *cache, const int64_t *sources, int64_t count) {
  nyb_status status = nyb_cache_check_sources(cache, sources, count);
  if (status != NYB_OK) return status;
  nyb_cache_counts counts;
  status = nyb_cache_reordered_counts(cache, sources, count, &counts);
  if (status != NYB_OK) return status;
  if (cache->kind == NYB_CACHE_PAGED) {
    status = nyb_cache_share_pages(cache, sources, count);
  } else if (count <= cache->storage.blocks) {
    status = move_in_place(cache, sources, count);
  } else {
    status = move_to_new(cache, sources, count);
  }
  if (status != NYB_OK) {
    nyb_release(cache->context, counts.memory);
    return status;
  }
  nyb_cache_adopt_counts(cache, &counts);
  cache->batch = cache->options.batch = count;
  return NYB_OK;
}
