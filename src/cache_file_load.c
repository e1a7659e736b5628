/* SPDX-License-Identifier: Apache-2.0 */
/* Loading a saved cache: everything is checked and every byte of memory is there before the first
 * cache changes. Rows go from the mapped file to their places, once. */
#if !defined(_WIN32)
#define _DEFAULT_SOURCE /* madvise */
#endif

#include <inttypes.h>
#include <string.h>
#include <unistd.h>
#if defined(_POSIX_MAPPED_FILES) && _POSIX_MAPPED_FILES > 0
#include <sys/mman.h>
#endif

#include "cache_file.h"
#include "cuda/operations.h"
#include "io_safetensors.h"

/* A task copies about this much of a sequence and head. */
#define TASK_BYTES ((int64_t)1 << 20)

typedef struct layer_load {
  nyb_file_layer from;
  nyb_cache *cache;
  nyb_cache *fresh; /* that takes the rows in its place; NULL where its own memory has the room */
} layer_load;

/* ---- Checks -------------------------------------------------------------------------------- */

static nyb_status check_layers(nyb_cache *const *layers, int64_t count, nyb_stream stream) {
  for (int64_t i = 0; i < count; i++) {
    if (layers[i] == NULL) {
      return nyb_fail(NYB_ERROR_NULL, "layers[%" PRId64 "] is NULL; nyb_cache_create makes one", i);
    }
    const nyb_status status = nyb_check_stream(layers[i]->context, stream);
    if (status != NYB_OK) return status;
    for (int64_t before = 0; before < i; before++) {
      if (layers[before] != layers[i]) continue;
      return nyb_fail(NYB_ERROR_OVERLAP,
                      "layers[%" PRId64 "] is the cache of layers[%" PRId64
                      "]; each layer needs "
                      "its own",
                      i, before);
    }
  }
  return NYB_OK;
}

static const char *scheme_name(nyb_scheme scheme) {
  return scheme == NYB_PLAIN ? "plain" : "affine";
}

static const char *dtype_name(nyb_dtype dtype) {
  return dtype == NYB_F32 ? "f32" : dtype == NYB_F16 ? "f16" : "bf16";
}

static nyb_status check_format(int64_t layer, int part, const nyb_format *file,
                               const nyb_format *cache) {
  const char *word = part == NYB_KEY ? "keys" : "values";
  if (file->scheme != cache->scheme) {
    return nyb_fail(NYB_ERROR_VALUE, "layer %" PRId64 ": the file's %s are %s, the cache's %s",
                    layer, word, scheme_name(file->scheme), scheme_name(cache->scheme));
  }
  if (file->bits != cache->bits) {
    return nyb_fail(NYB_ERROR_BITS, "layer %" PRId64 ": the file's %s have %d bits, the cache's %d",
                    layer, word, (int)file->bits, (int)cache->bits);
  }
  if (file->group_size != cache->group_size) {
    return nyb_fail(NYB_ERROR_GROUP_SIZE,
                    "layer %" PRId64 ": the file's %s have groups of %d, the cache's of %d", layer,
                    word, (int)file->group_size, (int)cache->group_size);
  }
  if (file->dtype != cache->dtype) {
    return nyb_fail(NYB_ERROR_DTYPE, "layer %" PRId64 ": the file's %s%s are %s, the cache's %s",
                    layer, file->scheme == NYB_AFFINE ? "scales of the " : "", word,
                    dtype_name(file->dtype), dtype_name(cache->dtype));
  }
  return NYB_OK;
}

static nyb_status check_same(int64_t layer, const nyb_cache_options *file, const nyb_cache *cache) {
  const nyb_cache_options *has = &cache->options;
  nyb_status status = check_format(layer, NYB_KEY, &file->key_format, &has->key_format);
  if (status == NYB_OK) {
    status = check_format(layer, NYB_VALUE, &file->value_format, &has->value_format);
  }
  if (status != NYB_OK) return status;
  const struct {
    const char *field;
    int64_t file, cache;
  } fields[] = {{"batch", file->batch, cache->batch},
                {"kv_heads", file->kv_heads, has->kv_heads},
                {"key_dim", file->key_dim, has->key_dim},
                {"value_dim", file->value_dim, has->value_dim},
                {"window_tokens", file->window_tokens, has->window_tokens},
                {"window_keep_tokens", file->window_keep_tokens, has->window_keep_tokens},
                {"first_tokens", file->first_tokens, has->first_tokens},
                {"last_tokens", file->last_tokens, has->last_tokens},
                {"page_tokens", file->page_tokens, has->page_tokens}};
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    if (fields[i].file == fields[i].cache) continue;
    return nyb_fail(i < 4 ? NYB_ERROR_SHAPE : NYB_ERROR_VALUE,
                    "layer %" PRId64 ": the file's %s is %" PRId64 ", the cache's %" PRId64, layer,
                    fields[i].field, fields[i].file, fields[i].cache);
  }
  if (file->part_dtype == has->part_dtype) return NYB_OK;
  return nyb_fail(NYB_ERROR_DTYPE, "layer %" PRId64 ": the file's part_dtype is %s, the cache's %s",
                  layer, dtype_name(file->part_dtype), dtype_name(has->part_dtype));
}

static nyb_status read_and_check(const nyb_safetensors *file, int64_t layer, layer_load *load) {
  nyb_status status = nyb_file_read_layer(file, layer, &load->from);
  if (status == NYB_OK) status = check_same(layer, &load->from.options, load->cache);
  for (int64_t i = 0; status == NYB_OK && i < load->cache->batch; i++) {
    const nyb_cache_sequence state = nyb_file_sequence_at(&load->from, i);
    const int64_t tokens = state.held + state.dropped;
    if (tokens <= load->cache->limit_tokens) continue;
    status = nyb_fail(NYB_ERROR_LENGTH,
                      "layer %" PRId64 ": the file holds %" PRId64
                      " tokens; the cache may hold %" PRId64 " at most",
                      layer, tokens, load->cache->limit_tokens);
  }
  return status;
}

/* ---- Memory -------------------------------------------------------------------------------- */

/* Only a contiguous cache of the host is filled where it is: of other kinds the rows may be shared,
 * or lie as what was there made them. */
static bool has_room(const layer_load *load) {
  const nyb_cache *cache = load->cache;
  if (cache->kind != NYB_CACHE_CONTIGUOUS || nyb_on_cuda(cache->context)) return false;
  for (int64_t i = 0; i < cache->batch; i++) {
    const nyb_cache_sequence state = nyb_file_sequence_at(&load->from, i);
    if (state.held > cache->storage.capacity_tokens) return false;
  }
  return true;
}

/* Of that context, which is one of the host. */
static nyb_status make_fresh(nyb_context *context, layer_load *load) {
  const nyb_cache *cache = load->cache;
  const size_t bytes = (size_t)cache->batch * sizeof(nyb_cache_sequence);
  nyb_cache_sequence *states = nyb_allocate(cache->context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (states == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes for what %" PRId64 " sequences hold", bytes,
                    cache->batch);
  }
  for (int64_t i = 0; i < cache->batch; i++) states[i] = nyb_file_sequence_at(&load->from, i);
  const nyb_status status = nyb_cache_make_like(context, cache, cache->batch, states, &load->fresh);
  nyb_release(cache->context, states);
  return status;
}

/* ---- Copying ------------------------------------------------------------------------------- */

#define POPULATE_BYTES ((int64_t)1 << 16) /* fewer take few page faults */

/* The system gives fresh memory page by page, as it is written to; asked for many at once it does
 * so in less time. A hint, which may come to nothing. */
static void populate(char *begin, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  const uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = ((uintptr_t)begin + page_bytes - 1) / page_bytes * page_bytes;
  const uintptr_t end = ((uintptr_t)begin + (uintptr_t)bytes) / page_bytes * page_bytes;
  if (end > first) madvise((void *)first, (size_t)(end - first), MADV_POPULATE_WRITE);
#else
  (void)begin;
  (void)bytes;
#endif
}

typedef struct copy_work {
  const nyb_file_layer *from;
  const nyb_cache *cache;
  bool fresh; /* memory that was not written to before */
  int64_t tokens_per_task, tasks_per_plane;
} copy_work;

static void copy_rows(const nyb_file_rows *from, const nyb_cache_rows *to, bool fresh) {
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    const int64_t bytes = from->tokens * to->part->row_bytes[array];
    if (bytes == 0) continue;
    if (fresh && bytes >= POPULATE_BYTES) populate(to->array[array], bytes);
    memcpy(to->array[array], from->array[array], (size_t)bytes);
  }
}

/* Some tokens of one sequence and head. */
static void copy_tokens(void *task_data, int64_t task) {
  const copy_work *work = task_data;
  const int64_t plane = task / work->tasks_per_plane;
  const int64_t sequence = plane / work->cache->kv_heads, head = plane % work->cache->kv_heads;
  const int64_t first = task % work->tasks_per_plane * work->tokens_per_task;
  const int64_t held = nyb_cache_get_sequence(work->cache, sequence).held;
  const int64_t end = nyb_smaller(held, first + work->tokens_per_task);
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int64_t token = first; token < end;) {
      const nyb_cache_rows to =
          nyb_cache_rows_at(work->cache, part, sequence, head, token, end - token);
      const nyb_file_rows from =
          nyb_file_rows_at(work->from, part, sequence, head, token, to.tokens);
      copy_rows(&from, &to, work->fresh);
      token += from.tokens;
    }
  }
}

static void copy_layer(const nyb_file_layer *from, const nyb_cache *cache, bool fresh) {
  const int64_t row_bytes =
      cache->part[NYB_KEY].layout.row_bytes + cache->part[NYB_VALUE].layout.row_bytes;
  const int64_t longest = nyb_cache_longest(cache), planes = cache->batch * cache->kv_heads;
  copy_work work = {.from = from, .cache = cache, .fresh = fresh};
  work.tokens_per_task = row_bytes < TASK_BYTES ? TASK_BYTES / row_bytes : 1;
  work.tasks_per_plane = (longest + work.tokens_per_task - 1) / work.tokens_per_task;
  const int64_t tasks = planes * work.tasks_per_plane;
  if (nyb_cache_used_bytes(cache) >= NYB_PARALLEL_COPY_BYTES) {
    nyb_parallel(cache->context, tasks, copy_tokens, &work);
  } else {
    for (int64_t task = 0; task < tasks; task++) copy_tokens(&work, task);
  }
}

/* As much room as the cache has had, but for pages, which are reserved anew. */
static nyb_status keep_room(const nyb_cache *cache, nyb_cache *fresh) {
  const int64_t capacity = cache->storage.capacity_tokens;
  if (cache->kind == NYB_CACHE_PAGED || capacity <= fresh->storage.capacity_tokens) return NYB_OK;
  nyb_cache_storage storage;
  const nyb_status status = nyb_cache_make_larger(fresh, capacity, &storage);
  if (status == NYB_OK) nyb_cache_adopt_larger(fresh, &storage);
  return status;
}

/* The layer's rows in a cache of the host, and those in one on the device that takes its place. */
static nyb_status make_on_device(nyb_context *host, layer_load *load, nyb_stream stream) {
  nyb_status status = make_fresh(host, load);
  if (status != NYB_OK) return status;
  nyb_cache *const staged = load->fresh;
  load->fresh = NULL;
  status = keep_room(load->cache, staged);
  if (status == NYB_OK) {
    copy_layer(&load->from, staged, true);
    status = nyb_cuda_cache_send(load->cache, staged, &load->fresh, stream);
  }
  nyb_cache_destroy(staged);
  return status;
}

/* What takes the cache's place, where its own memory does not do. */
static nyb_status prepare(layer_load *load, nyb_stream stream) {
  if (has_room(load)) return NYB_OK;
  if (!nyb_on_cuda(load->cache->context)) return make_fresh(load->cache->context, load);
  nyb_context *host;
  nyb_status status = nyb_cache_make_host_context(load->cache->context, &host);
  if (status != NYB_OK) return status;
  status = make_on_device(host, load, stream);
  nyb_context_destroy(host);
  return status;
}

/* Nothing here can fail. */
static void change_cache(layer_load *load) {
  nyb_cache *cache = load->cache;
  if (load->fresh != NULL) {
    if (!nyb_on_cuda(cache->context)) copy_layer(&load->from, load->fresh, true);
    if (cache->storage.block != NULL) cache->reallocations++;
    nyb_cache_exchange(cache, load->fresh);
    nyb_cache_destroy(load->fresh);
    return;
  }
  for (int64_t i = 0; i < cache->batch; i++) {
    const nyb_cache_sequence state = nyb_file_sequence_at(&load->from, i);
    nyb_cache_set_sequence(cache, i, &state);
  }
  copy_layer(&load->from, cache, false);
}

/* ---- The call ------------------------------------------------------------------------------ */

static nyb_status load_all(const nyb_safetensors *file, layer_load *loads, int64_t count,
                           nyb_stream stream) {
  nyb_status status = NYB_OK;
  for (int64_t i = 0; i < count && status == NYB_OK; i++) {
    status = read_and_check(file, i, &loads[i]);
  }
  for (int64_t i = 0; i < count && status == NYB_OK; i++) {
    status = prepare(&loads[i], stream);
  }
  for (int64_t i = 0; i < count; i++) {
    if (status == NYB_OK) {
      change_cache(&loads[i]);
    } else {
      nyb_cache_destroy(loads[i].fresh);
    }
  }
  return status;
}

nyb_status nyb_cache_load(const nyb_safetensors *file, nyb_cache *const *layers,
                          int64_t layer_count, nyb_stream stream) {
  if (layers == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "layers is NULL; it must point to layer_count caches");
  }
  int64_t count = 0;
  nyb_status status = nyb_cache_file_layers(file, &count);
  if (status != NYB_OK) return status;
  if (layer_count != count) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "layer_count is %" PRId64 "; the file holds %" PRId64 " layers", layer_count,
                    count);
  }
  status = check_layers(layers, count, stream);
  if (status != NYB_OK) return status;
  const size_t bytes = (size_t)count * sizeof(layer_load);
  nyb_context *const context = layers[0]->context;
  layer_load *loads = nyb_allocate(context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (loads == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes to load %" PRId64 " layers", bytes, count);
  }
  memset(loads, 0, bytes);
  for (int64_t i = 0; i < count; i++) loads[i].cache = layers[i];
  status = load_all(file, loads, count, stream);
  nyb_release(context, loads);
  return status;
}
