/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: one layer's keys and values, quantized as they come. Here are the checks of every
 * backend and the CPU's cache; what lies in device memory is src/cuda/cache.c's. */
#include "cache.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "cuda/operations.h"
#include "quantize.h"
#include "views.h"

#define NYB_SMALLEST_CAPACITY_TOKENS 64 /* of a cache that grows on its own */

/* An append is cut into tasks of about this many elements, and a small one is not cut at all:
 * waking another thread takes as long as quantizing some thousands of elements. */
#define NYB_APPEND_TASK_ELEMENTS ((int64_t)1 << 14)
/* Moving fewer bytes than this is not worth waking threads for. */
#define NYB_PARALLEL_COPY_BYTES ((int64_t)1 << 20)

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t plane_count(const nyb_cache *cache) { return cache->batch * cache->kv_heads; }

int64_t nyb_cache_longest(const nyb_cache *cache) {
  int64_t length = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    length = larger(length, cache->lengths[sequence]);
  }
  return length;
}

static bool on_cuda(const nyb_cache *cache) { return nyb_on_cuda(cache->context); }

static nyb_status check_cache(const nyb_cache *cache) {
  if (cache != NULL) return NYB_OK;
  return nyb_fail(NYB_ERROR_NULL, "cache is NULL; nyb_cache_create makes one");
}

static nyb_status check_call(const nyb_cache *cache, nyb_stream stream) {
  const nyb_status status = check_cache(cache);
  return status == NYB_OK ? nyb_check_stream(cache->context, stream) : status;
}

/* ---- Memory ------------------------------------------------------------------------------- */

static nyb_status fail_size(const nyb_cache *cache, int64_t capacity_tokens) {
  return nyb_fail(NYB_ERROR_SHAPE,
                  "%" PRId64 " tokens of batch %" PRId64 ", kv_heads %" PRId64 ", key_dim %" PRId64
                  " and value_dim %" PRId64 " take more bytes than int64 counts",
                  capacity_tokens, cache->batch, cache->kv_heads, cache->part[NYB_KEY].dim,
                  cache->part[NYB_VALUE].dim);
}

nyb_status nyb_cache_size_storage(const nyb_cache *cache, int64_t capacity_tokens,
                                  nyb_cache_storage *storage) {
  *storage = (nyb_cache_storage){.capacity_tokens = capacity_tokens};
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      int64_t bytes;
      if (__builtin_mul_overflow(cache->part[part].row_bytes[array], capacity_tokens, &bytes) ||
          bytes > INT64_MAX - NYB_PLANE_ALIGNMENT) {
        return fail_size(cache, capacity_tokens);
      }
      bytes = (bytes + NYB_PLANE_ALIGNMENT - 1) / NYB_PLANE_ALIGNMENT * NYB_PLANE_ALIGNMENT;
      storage->plane_bytes[part][array] = bytes;
      if (__builtin_mul_overflow(bytes, plane_count(cache), &bytes) ||
          __builtin_add_overflow(storage->bytes, bytes, &storage->bytes)) {
        return fail_size(cache, capacity_tokens);
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
      next += storage->plane_bytes[part][array] * plane_count(cache);
    }
  }
}

static nyb_status make_storage(const nyb_cache *cache, int64_t capacity_tokens,
                               nyb_cache_storage *storage) {
  const nyb_status status = nyb_cache_size_storage(cache, capacity_tokens, storage);
  if (status != NYB_OK || storage->bytes == 0) return status;
  if ((uint64_t)storage->bytes <= SIZE_MAX) {
    storage->block = nyb_allocate(cache->context, (size_t)storage->bytes, NYB_PLANE_ALIGNMENT);
  }
  if (storage->block == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %" PRId64 " bytes for %" PRId64
                    " tokens in each of %" PRId64 " sequences",
                    storage->bytes, capacity_tokens, cache->batch);
  }
  nyb_cache_place_arrays(cache, storage);
  return NYB_OK;
}

static void release_storage(const nyb_cache *cache, nyb_cache_storage *storage) {
  if (storage->block != NULL) nyb_release(cache->context, storage->block);
}

int64_t nyb_cache_used_bytes(const nyb_cache *cache) {
  int64_t tokens = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    tokens += cache->lengths[sequence];
  }
  return tokens * cache->kv_heads *
         (cache->part[NYB_KEY].layout.row_bytes + cache->part[NYB_VALUE].layout.row_bytes);
}

typedef struct copy_work {
  const nyb_cache *cache;
  const nyb_cache_storage *target;
} copy_work;

static void copy_plane(void *task_data, int64_t plane) {
  const copy_work *work = task_data;
  const nyb_cache *cache = work->cache;
  const nyb_cache_storage *source = &cache->storage, *target = work->target;
  const int64_t tokens = cache->lengths[plane / cache->kv_heads];
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      const int64_t bytes = tokens * cache->part[part].row_bytes[array];
      if (bytes == 0) continue;
      memcpy(target->array[part][array] + plane * target->plane_bytes[part][array],
             source->array[part][array] + plane * source->plane_bytes[part][array], (size_t)bytes);
    }
  }
}

/* A larger storage that holds the tokens of the cache's own, which stays as it is. */
static nyb_status make_larger(const nyb_cache *cache, int64_t capacity_tokens,
                              nyb_cache_storage *storage) {
  const nyb_status status = make_storage(cache, capacity_tokens, storage);
  if (status != NYB_OK) return status;
  copy_work work = {cache, storage};
  if (nyb_cache_used_bytes(cache) >= NYB_PARALLEL_COPY_BYTES) {
    nyb_parallel(cache->context, plane_count(cache), copy_plane, &work);
  } else {
    for (int64_t plane = 0; plane < plane_count(cache); plane++) copy_plane(&work, plane);
  }
  return NYB_OK;
}

static void adopt_storage(nyb_cache *cache, const nyb_cache_storage *storage) {
  if (cache->storage.block != NULL) {
    cache->reallocations++;
    cache->copied_bytes += nyb_cache_used_bytes(cache);
  }
  release_storage(cache, &cache->storage);
  cache->storage = *storage;
}

/* Twice what there is, so that a cache filled token by token copies each token less than twice. */
int64_t nyb_cache_grown_capacity(const nyb_cache *cache, int64_t needed_tokens) {
  const int64_t doubled = larger(2 * cache->storage.capacity_tokens, NYB_SMALLEST_CAPACITY_TOKENS);
  return larger(needed_tokens, smaller(doubled, cache->limit_tokens));
}

/* ---- Create and destroy ------------------------------------------------------------------- */

static nyb_status check_sizes(const nyb_cache_options *options) {
  const struct {
    const char *name;
    int64_t value, least, most;
  } sizes[] = {
      {"batch", options->batch, 1, INT32_MAX},
      {"kv_heads", options->kv_heads, 1, INT32_MAX},
      {"max_tokens", options->max_tokens, 0, INT32_MAX},
      {"initial_capacity_tokens", options->initial_capacity_tokens, 0,
       options->max_tokens > 0 ? options->max_tokens : INT32_MAX},
  };
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    if (sizes[i].value < sizes[i].least || sizes[i].value > sizes[i].most) {
      return nyb_fail(NYB_ERROR_SHAPE,
                      "options.%s is %" PRId64 "; it must be %" PRId64 " to %" PRId64,
                      sizes[i].name, sizes[i].value, sizes[i].least, sizes[i].most);
    }
  }
  return NYB_OK;
}

static nyb_status fill_part(nyb_cache_part *part, const nyb_format *format, const char *field,
                            int64_t dim, const char *dim_field) {
  const nyb_status status = nyb_format_check(format, field, dim, dim_field, &part->layout);
  if (status != NYB_OK) return status;
  part->format = *format;
  part->dim = dim;
  const nyb_row_layout *layout = &part->layout;
  part->row_bytes[NYB_CODES] = layout->codes_bytes;
  part->row_bytes[NYB_SCALES] = layout->groups * (int64_t)layout->scale_bytes;
  part->row_bytes[NYB_BIASES] = part->row_bytes[NYB_SCALES];
  return NYB_OK;
}

/* Kinds of caches that cannot be made yet are refused by name. */
static nyb_status check_kind(const nyb_cache_options *options) {
  const struct {
    const char *field;
    int64_t value;
  } fields[] = {{"window_tokens", options->window_tokens},
                {"window_keep_tokens", options->window_keep_tokens},
                {"first_tokens", options->first_tokens},
                {"last_tokens", options->last_tokens},
                {"part_dtype", options->part_dtype},
                {"reserved2", options->reserved2},
                {"page_tokens", options->page_tokens}};
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    if (fields[i].value == 0) continue;
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "options.%s is %" PRId64 "; this version has no such cache, and it must be 0",
                    fields[i].field, fields[i].value);
  }
  return NYB_OK;
}

/* Everything but the memory: *made can be copied into the cache. */
static nyb_status check_options(const nyb_cache_options *options, nyb_cache *made) {
  nyb_status status = nyb_check_struct("options", options, options->struct_size, sizeof *options);
  if (status == NYB_OK) status = check_sizes(options);
  if (status == NYB_OK) status = check_kind(options);
  if (status != NYB_OK) return status;
  status = fill_part(&made->part[NYB_KEY], &options->key_format, "options.key_format",
                     options->key_dim, "options.key_dim");
  if (status != NYB_OK) return status;
  status = fill_part(&made->part[NYB_VALUE], &options->value_format, "options.value_format",
                     options->value_dim, "options.value_dim");
  if (status != NYB_OK) return status;
  status = nyb_check_rule("options.rule", options->rule);
  if (status != NYB_OK) return status;
  if (options->reserved != 0) {
    return nyb_fail(NYB_ERROR_VALUE, "options.reserved is %d; it must be 0",
                    (int)options->reserved);
  }
  made->rule = options->rule;
  made->batch = options->batch;
  made->kv_heads = options->kv_heads;
  made->limit_tokens = options->max_tokens > 0 ? options->max_tokens : INT32_MAX;
  nyb_cache_storage unused; /* a single token that takes too many bytes is refused here already */
  return nyb_cache_size_storage(made, larger(1, options->initial_capacity_tokens), &unused);
}

nyb_status nyb_cache_create(nyb_context *context, const nyb_cache_options *options,
                            nyb_cache **cache) {
  if (context == NULL || options == NULL || cache == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; context, options and cache must be set",
                    context == NULL   ? "context"
                    : options == NULL ? "options"
                                      : "cache");
  }
  nyb_cache checked = {.context = context};
  nyb_status status = check_options(options, &checked);
  if (status != NYB_OK) return status;
  const size_t bytes = sizeof checked + (size_t)options->batch * sizeof(int32_t);
  nyb_cache *made = nyb_allocate(context, bytes, NYB_PLANE_ALIGNMENT);
  if (made == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a cache", bytes);
  }
  memset(made, 0, bytes);
  memcpy(made, &checked, sizeof checked);
  made->view_lengths = made->lengths;
  if (on_cuda(made)) {
    status = nyb_cache_size_storage(made, options->initial_capacity_tokens, &made->storage);
    if (status == NYB_OK) status = nyb_cuda_cache_create(made);
  } else {
    status = make_storage(made, options->initial_capacity_tokens, &made->storage);
  }
  if (status != NYB_OK) {
    nyb_release(context, made);
    return status;
  }
  *cache = made;
  return NYB_OK;
}

void nyb_cache_destroy(nyb_cache *cache) {
  if (cache == NULL) return;
  if (on_cuda(cache)) {
    nyb_cuda_cache_destroy(cache);
  } else {
    release_storage(cache, &cache->storage);
  }
  nyb_release(cache->context, cache);
}

/* ---- Append ------------------------------------------------------------------------------- */

static const char *const part_names[NYB_CACHE_PARTS] = {"append.key", "append.value"};

/* Rows are numbered through: those of K before those of V, then by sequence, head and token. */
typedef struct append_work {
  const nyb_cache *cache;
  const nyb_cache_storage *target;
  int64_t tokens;
  const nyb_input *input[NYB_CACHE_PARTS];
  nyb_quantize_fn kernel[NYB_CACHE_PARTS];
  int64_t rows, rows_per_task;
  _Atomic int64_t first_refused; /* or rows */
} append_work;

typedef struct row_place {
  int part;
  int64_t plane, sequence, head, token;
} row_place;

static row_place place_of(const append_work *work, int64_t row) {
  const int64_t planes = plane_count(work->cache), kv_heads = work->cache->kv_heads;
  const int64_t plane = row / work->tokens;
  row_place place = {.part = plane < planes ? NYB_KEY : NYB_VALUE, .token = row % work->tokens};
  place.plane = place.part == NYB_KEY ? plane : plane - planes;
  place.sequence = place.plane / kv_heads;
  place.head = place.plane % kv_heads;
  return place;
}

/* To the place `rows` rows further on, which are of this plane. */
static void step(const append_work *work, row_place *place, int64_t rows) {
  place->token += rows;
  if (place->token < work->tokens) return;
  place->token = 0;
  place->plane++;
  if (++place->head < work->cache->kv_heads) return;
  place->head = 0;
  if (++place->sequence < work->cache->batch) return;
  *place = (row_place){.part = NYB_VALUE};
}

static nyb_quantize_span span_at(const append_work *work, const row_place *at, int64_t rows) {
  const nyb_cache *cache = work->cache;
  const nyb_cache_part *part = &cache->part[at->part];
  const nyb_input *input = work->input[at->part];
  const int64_t element = nyb_row_offset(input->stride, at->sequence, at->head, at->token);
  char *array[NYB_CACHE_ARRAYS];
  for (int i = 0; i < NYB_CACHE_ARRAYS; i++) {
    array[i] = work->target->array[at->part][i];
    if (array[i] == NULL) continue;
    array[i] += at->plane * work->target->plane_bytes[at->part][i] +
                (cache->lengths[at->sequence] + at->token) * part->row_bytes[i];
  }
  return (nyb_quantize_span){
      .input = (const char *)input->data + element * (int64_t)nyb_dtype_bytes(input->dtype),
      .input_dtype = input->dtype,
      .groups = rows * part->layout.groups,
      .group_size = part->layout.group_size,
      .rule = cache->rule,
      .scale_dtype = part->format.dtype,
      .codes = array[NYB_CODES],
      .scales = array[NYB_SCALES],
      .biases = array[NYB_BIASES],
  };
}

static void append_rows(void *task_data, int64_t task) {
  append_work *work = task_data;
  const int64_t end = smaller(work->rows, (task + 1) * work->rows_per_task);
  int64_t row = task * work->rows_per_task;
  row_place place = place_of(work, row);
  while (row < end) {
    const nyb_cache_part *part = &work->cache->part[place.part];
    const bool adjacent = work->input[place.part]->stride[2] == part->dim;
    const int64_t rows = adjacent ? smaller(end - row, work->tokens - place.token) : 1;
    const nyb_quantize_span span = span_at(work, &place, rows);
    const int64_t done = work->kernel[place.part](&span);
    if (done != span.groups) {
      nyb_note_refused(&work->first_refused, row + done / part->layout.groups);
      return;
    }
    row += rows;
    step(work, &place, rows);
  }
}

static nyb_status refuse_row(const append_work *work, int64_t row) {
  const row_place at = place_of(work, row);
  const nyb_quantize_span span = span_at(work, &at, 1);
  return nyb_quantize_refuse(&span, work->kernel[at.part], part_names[at.part], at.sequence,
                             at.head, at.token);
}

/* Quantizes into target, beyond the lengths, where a failure leaves nothing that counts. */
static nyb_status fill(const nyb_cache *cache, const nyb_cache_storage *target,
                       const nyb_append *append) {
  const int64_t key_dim = cache->part[NYB_KEY].dim, value_dim = cache->part[NYB_VALUE].dim;
  append_work work = {
      .cache = cache,
      .target = target,
      .tokens = append->tokens,
      .input = {&append->key, &append->value},
      .rows = NYB_CACHE_PARTS * plane_count(cache) * append->tokens,
  };
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    work.kernel[part] = (nyb_quantize_fn)nyb_kernel_for(cache->context, NYB_OPERATION_QUANTIZE,
                                                        cache->part[part].layout.id);
  }
  atomic_init(&work.first_refused, work.rows);
  work.rows_per_task = larger(1, NYB_APPEND_TASK_ELEMENTS / larger(key_dim, value_dim));
  const int64_t tasks = (work.rows - 1) / work.rows_per_task + 1;
  if (tasks <= 2) {
    for (int64_t task = 0; task < tasks; task++) append_rows(&work, task);
  } else {
    nyb_parallel(cache->context, tasks, append_rows, &work);
  }
  const int64_t refused = atomic_load_explicit(&work.first_refused, memory_order_relaxed);
  return refused < work.rows ? refuse_row(&work, refused) : NYB_OK;
}

static nyb_status check_input(const nyb_cache *cache, int part, const nyb_input *input,
                              int64_t tokens) {
  nyb_status status =
      nyb_check_dtype(part == NYB_KEY ? "append.key.dtype" : "append.value.dtype", input->dtype);
  if (status != NYB_OK) return status;
  const int64_t shape[3] = {cache->batch, cache->kv_heads, tokens};
  const nyb_view view =
      nyb_rows_view(part_names[part], "data", input->data, nyb_dtype_bytes(input->dtype),
                    cache->part[part].dim, shape, input->stride);
  nyb_extent extent;
  status = nyb_extent_of(&view, &extent);
  if (status != NYB_OK || cache->storage.block == NULL) return status;
  /* Appending a cache's own rows would read what growing releases. */
  const uintptr_t block = (uintptr_t)cache->storage.block;
  const nyb_extent own = {
      .owner = "cache",
      .member = "memory",
      .begin = block,
      .end = block + (uintptr_t)cache->storage.bytes,
      .row_bytes = (uint64_t)cache->storage.bytes,
      .block_bytes = (uint64_t)cache->storage.bytes,
  };
  return nyb_check_apart(&own, &extent);
}

static nyb_status check_append(const nyb_cache *cache, const nyb_append *append) {
  nyb_status status = nyb_check_struct("append", append, append->struct_size, sizeof *append);
  if (status != NYB_OK) return status;
  if (append->tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "append.tokens is %" PRId64 "; it must not be negative",
                    append->tokens);
  }
  status = nyb_check_flag(cache->context, "append.non_finite", append->non_finite);
  if (status != NYB_OK) return status;
  if (append->padding != NULL) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "append.padding is set; this version does not skip padding, and it must be "
                    "NULL");
  }
  const int64_t length = nyb_cache_longest(cache);
  if (append->tokens > cache->limit_tokens - length) {
    return nyb_fail(NYB_ERROR_LENGTH,
                    "append.tokens is %" PRId64 "; the cache holds %" PRId64 " of at most %" PRId64
                    " tokens",
                    append->tokens, length, cache->limit_tokens);
  }
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    status =
        check_input(cache, part, part == NYB_KEY ? &append->key : &append->value, append->tokens);
  }
  return status;
}

/* In the calling thread's memory. */
static nyb_status append_here(nyb_cache *cache, const nyb_append *append) {
  nyb_cache_storage target = cache->storage;
  const int64_t needed_tokens = nyb_cache_longest(cache) + append->tokens;
  const bool grows = needed_tokens > target.capacity_tokens;
  nyb_status status = NYB_OK;
  if (grows) status = make_larger(cache, nyb_cache_grown_capacity(cache, needed_tokens), &target);
  if (status != NYB_OK) return status;
  status = fill(cache, &target, append);
  if (status != NYB_OK) {
    if (grows) release_storage(cache, &target);
    return status;
  }
  if (grows) adopt_storage(cache, &target);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    cache->lengths[sequence] += (int32_t)append->tokens;
  }
  return NYB_OK;
}

nyb_status nyb_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (append == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "append is NULL; it must point to an nyb_append");
  }
  status = check_append(cache, append);
  if (status != NYB_OK) return status;
  nyb_context *const context = cache->context;
  if (append->tokens > 0) {
    status =
        on_cuda(cache) ? nyb_cuda_cache_append(cache, append, stream) : append_here(cache, append);
    if (status != NYB_OK) return status;
    const nyb_operation operation =
        on_cuda(cache) ? NYB_OPERATION_CACHE_APPEND : NYB_OPERATION_QUANTIZE;
    const nyb_format_id key = cache->part[NYB_KEY].layout.id;
    const nyb_format_id value = cache->part[NYB_VALUE].layout.id;
    nyb_count_kernel(context, operation, key);
    if (value != key) nyb_count_kernel(context, operation, value);
  }
  nyb_count(context, NYB_COUNTER_CACHE_APPEND);
  return NYB_OK;
}

/* ---- Reserve, trim, reset ----------------------------------------------------------------- */

nyb_status nyb_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "tokens is %" PRId64 "; it must not be negative", tokens);
  }
  if (tokens > cache->limit_tokens) {
    return nyb_fail(NYB_ERROR_LENGTH,
                    "tokens is %" PRId64 "; the cache may hold %" PRId64 " at most", tokens,
                    cache->limit_tokens);
  }
  if (tokens <= cache->storage.capacity_tokens) return NYB_OK;
  if (on_cuda(cache)) return nyb_cuda_cache_reserve(cache, tokens, stream);
  nyb_cache_storage storage;
  status = make_larger(cache, tokens, &storage);
  if (status == NYB_OK) adopt_storage(cache, &storage);
  return status;
}

static nyb_status fail_sequence(const nyb_cache *cache, int64_t sequence, const char *or_all) {
  return nyb_fail(NYB_ERROR_VALUE, "sequence is %" PRId64 "; it must be 0 to %" PRId64 "%s",
                  sequence, cache->batch - 1, or_all);
}

nyb_status nyb_cache_trim(nyb_cache *cache, int64_t sequence, int64_t tokens, int64_t *trimmed,
                          nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (sequence != NYB_ALL_SEQUENCES && (sequence < 0 || sequence >= cache->batch)) {
    return fail_sequence(cache, sequence, ", or NYB_ALL_SEQUENCES");
  }
  if (tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "tokens is %" PRId64 "; it must not be negative", tokens);
  }
  const int64_t first = sequence == NYB_ALL_SEQUENCES ? 0 : sequence;
  const int64_t end = sequence == NYB_ALL_SEQUENCES ? cache->batch : sequence + 1;
  int64_t most = 0;
  if (on_cuda(cache)) {
    status = nyb_cuda_cache_trim(cache, first, end, tokens, &most, stream);
    if (status != NYB_OK) return status;
  } else {
    for (int64_t i = first; i < end; i++) {
      const int64_t lost = smaller(tokens, cache->lengths[i]);
      cache->lengths[i] -= (int32_t)lost;
      most = larger(most, lost);
    }
  }
  if (trimmed != NULL) *trimmed = most;
  return NYB_OK;
}

nyb_status nyb_cache_reset(nyb_cache *cache, nyb_stream stream) {
  return nyb_cache_trim(cache, NYB_ALL_SEQUENCES, INT64_MAX, NULL, stream);
}

nyb_status nyb_cache_refresh(nyb_cache *cache, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status == NYB_OK && on_cuda(cache)) status = nyb_cuda_cache_refresh(cache, stream);
  return status;
}

/* ---- Looking at a cache ------------------------------------------------------------------- */

int64_t nyb_cache_length(const nyb_cache *cache, int64_t sequence) {
  if (check_cache(cache) != NYB_OK) return -1;
  if (sequence < 0 || sequence >= cache->batch) {
    fail_sequence(cache, sequence, "");
    return -1;
  }
  return cache->lengths[sequence];
}

nyb_status nyb_cache_get_usage(const nyb_cache *cache, nyb_cache_usage *usage) {
  nyb_status status = check_cache(cache);
  if (status != NYB_OK) return status;
  if (usage == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "usage is NULL; it must point to an nyb_cache_usage");
  }
  status = nyb_check_struct("usage", NULL, usage->struct_size, sizeof *usage);
  if (status != NYB_OK) return status;
  usage->used_bytes = nyb_cache_used_bytes(cache);
  usage->allocated_bytes = cache->storage.bytes;
  usage->capacity_tokens = cache->storage.capacity_tokens;
  usage->reallocations = cache->reallocations;
  usage->copied_bytes = cache->copied_bytes;
  return NYB_OK;
}

nyb_stored nyb_cache_stored(const nyb_cache *cache, const nyb_cache_storage *storage, int part) {
  const nyb_row_layout *layout = &cache->part[part].layout;
  nyb_stored stored = {
      .format = cache->part[part].format,
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
    strides[array][2] = cache->part[part].row_bytes[array] / element_bytes;
  }
  return stored;
}

nyb_status nyb_cache_view(const nyb_cache *cache, nyb_attention *attention) {
  nyb_status status = check_cache(cache);
  if (status != NYB_OK) return status;
  if (attention == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "attention is NULL; it must point to an nyb_attention");
  }
  status = nyb_check_struct("attention", NULL, attention->struct_size, sizeof *attention);
  if (status != NYB_OK) return status;
  attention->batch = cache->batch;
  attention->kv_heads = cache->kv_heads;
  attention->key_dim = cache->part[NYB_KEY].dim;
  attention->value_dim = cache->part[NYB_VALUE].dim;
  attention->capacity_tokens = cache->storage.capacity_tokens;
  attention->lengths = cache->view_lengths;
  attention->k = nyb_cache_stored(cache, &cache->storage, NYB_KEY);
  attention->v = nyb_cache_stored(cache, &cache->storage, NYB_VALUE);
  attention->pages = (nyb_pages){0};
  attention->ring = (nyb_ring){0};
  attention->first = attention->last = (nyb_part){0};
  attention->last_begins = NULL;
  return NYB_OK;
}
