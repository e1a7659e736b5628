/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache in device memory.
 *
 * The device has the true lengths: an append takes its positions from them and moves them along, in
 * stream order, so that a captured graph appends further at every replay. The host counts calls,
 * which is what it grows by; where both have parted, nyb_cache_refresh() brings them together. */
#include <inttypes.h>
#include <string.h>

#include "operations.h"
#include "programs.h"
#include "rows.h"

/* cuMemcpy2D takes pitches below this on every device. */
#define MOST_PITCH_BYTES INT64_C(0x7fffffff)
#define DEVICE_ALIGNMENT 256
enum { WARP_THREADS = 32 };

struct nyb_cuda_cache {
  nyb_cuda_home home;
  const nyb_cuda_kernel *append, *trim;
  int32_t *lengths;   /* [batch], on the device */
  uint32_t *arrivals; /* [batch], likewise: what append counts its blocks with; 0 between them */
  int32_t staging[];  /* [batch] */
};

static nyb_cu_address address_of(const void *memory) { return (nyb_cu_address)(uintptr_t)memory; }

static nyb_status enter(const nyb_cache *cache, nyb_cuda_scope *scope) {
  return nyb_cuda_enter_home(cache->context, &cache->cuda->home, scope);
}

/* ---- Memory --------------------------------------------------------------------------------- */

static nyb_status allocate(const nyb_cuda_scope *scope, int64_t bytes, const char *what,
                           void **memory) {
  const nyb_allocator *own = &scope->context->device_allocator;
  if (own->allocate != NULL) {
    *memory = own->allocate(own->user_data, (size_t)bytes, DEVICE_ALIGNMENT);
    if (*memory != NULL) return NYB_OK;
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "options.device_allocator had no %" PRId64 " bytes for %s", bytes, what);
  }
  nyb_cu_address address = 0;
  const nyb_status status =
      nyb_cuda_check(scope->driver, scope->driver->MemAlloc(&address, (size_t)bytes), what);
  *memory = (void *)(uintptr_t)address;
  return status;
}

/* scope: NULL where the CUDA context is gone, and with it all that it allocated itself. */
static void release(const nyb_context *context, const nyb_cuda_scope *scope, void *memory) {
  if (memory == NULL) return;
  const nyb_allocator *own = &context->device_allocator;
  if (own->release != NULL) {
    own->release(own->user_data, memory);
  } else if (scope != NULL) {
    scope->driver->MemFree(address_of(memory));
  }
}

static nyb_status make_storage(const nyb_cuda_scope *scope, const nyb_cache *cache,
                               int64_t capacity_tokens, nyb_cache_storage *storage) {
  nyb_status status = nyb_cache_size_storage(cache, capacity_tokens, storage);
  if (status != NYB_OK || storage->bytes == 0) return status;
  status = allocate(scope, storage->bytes, "cuMemAlloc of a cache's tokens", &storage->block);
  if (status == NYB_OK) nyb_cache_place_arrays(cache, storage);
  return status;
}

/* What allocates or waits declares that it knows of captures elsewhere: it touches no stream that
 * is being captured. Gives back the mode that was. */
static int relax(const nyb_cuda_scope *scope) {
  int mode = NYB_CU_CAPTURE_MODE_RELAXED;
  scope->driver->ThreadExchangeStreamCaptureMode(&mode);
  return mode;
}

static void restore_mode(const nyb_cuda_scope *scope, int mode) {
  scope->driver->ThreadExchangeStreamCaptureMode(&mode);
}

/* ---- Create and destroy --------------------------------------------------------------------- */

static nyb_status get_kernels(nyb_cuda_scope *scope, struct nyb_cuda_cache *cuda) {
  const nyb_cuda_spec append = {.program = &nyb_cuda_program_append};
  const nyb_cuda_spec trim = {.program = &nyb_cuda_program_trim};
  const nyb_status status =
      nyb_cuda_kernel_get(scope, &append, NYB_QUANTIZE_THREADS, 0, &cuda->append);
  if (status != NYB_OK) return status;
  return nyb_cuda_kernel_get(scope, &trim, NYB_TRIM_THREADS, 0, &cuda->trim);
}

/* Zeroes them on a stream of its own: the default one waits for others, and they for it. */
static nyb_status zero_state(const nyb_cuda_scope *scope, void *state, int64_t bytes) {
  const nyb_cuda_driver *driver = scope->driver;
  nyb_stream stream;
  nyb_status status = nyb_cuda_check(
      driver, driver->StreamCreate(&stream, NYB_CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (status != NYB_OK) return status;
  status =
      nyb_cuda_check(driver, driver->MemsetD8Async(address_of(state), 0, (size_t)bytes, stream),
                     "cuMemsetD8Async");
  if (status == NYB_OK) {
    status = nyb_cuda_check(driver, driver->StreamSynchronize(stream), "cuStreamSynchronize");
  }
  driver->StreamDestroy(stream);
  return status;
}

static nyb_status make_state(const nyb_cuda_scope *scope, nyb_cache *cache) {
  struct nyb_cuda_cache *const cuda = cache->cuda;
  const int64_t bytes = 2 * cache->batch * (int64_t)sizeof(int32_t);
  void *state;
  nyb_status status = allocate(scope, bytes, "cuMemAlloc of a cache's lengths", &state);
  if (status != NYB_OK) return status;
  status = zero_state(scope, state, bytes);
  if (status != NYB_OK) {
    release(cache->context, scope, state);
    return status;
  }
  cuda->lengths = state;
  cuda->arrivals = (uint32_t *)state + cache->batch;
  return NYB_OK;
}

static nyb_status create_in(nyb_cuda_scope *scope, nyb_cache *cache) {
  nyb_status status = get_kernels(scope, cache->cuda);
  if (status != NYB_OK) return status;
  const int mode = relax(scope);
  nyb_cache_storage storage;
  status = make_storage(scope, cache, cache->storage.capacity_tokens, &storage);
  if (status == NYB_OK) {
    status = make_state(scope, cache);
    if (status != NYB_OK) release(cache->context, scope, storage.block);
  }
  restore_mode(scope, mode);
  if (status == NYB_OK) cache->storage = storage;
  return status;
}

nyb_status nyb_cuda_cache_create(nyb_cache *cache) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(cache->context, &scope);
  if (status != NYB_OK) return status;
  const size_t bytes = sizeof *cache->cuda + (size_t)cache->batch * sizeof(int32_t);
  cache->cuda = nyb_allocate(cache->context, bytes, 64);
  if (cache->cuda == NULL) {
    status = nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a cache", bytes);
  } else {
    memset(cache->cuda, 0, bytes);
    cache->cuda->home = nyb_cuda_home_of(&scope);
    status = create_in(&scope, cache);
    if (status == NYB_OK) {
      cache->view_lengths = cache->cuda->lengths;
    } else {
      nyb_release(cache->context, cache->cuda);
      cache->cuda = NULL;
    }
  }
  nyb_cuda_leave(&scope);
  return status;
}

void nyb_cuda_cache_destroy(nyb_cache *cache) {
  struct nyb_cuda_cache *const cuda = cache->cuda;
  if (cuda == NULL) return;
  nyb_cuda_scope scope;
  const bool alive = enter(cache, &scope) == NYB_OK;
  const int mode = alive ? relax(&scope) : 0;
  release(cache->context, alive ? &scope : NULL, cache->storage.block);
  release(cache->context, alive ? &scope : NULL, cuda->lengths);
  if (alive) {
    restore_mode(&scope, mode);
    nyb_cuda_leave(&scope);
  }
  nyb_release(cache->context, cuda);
  cache->cuda = NULL;
}

/* ---- Growing -------------------------------------------------------------------------------- */

/* All rows that there is room for, and not only those that the host has counted: graphs may have
 * appended more. *bytes counts them. */
static nyb_status copy_array(const nyb_cuda_scope *scope, const nyb_cache *cache,
                             const nyb_cache_storage *target, int part, int array, int64_t *bytes,
                             nyb_stream stream) {
  const nyb_cuda_driver *driver = scope->driver;
  const nyb_cache_storage *source = &cache->storage;
  const int64_t planes = cache->batch * cache->kv_heads;
  const int64_t width = source->capacity_tokens * cache->part[part].row_bytes[array];
  const int64_t from_pitch = source->plane_bytes[part][array];
  const int64_t to_pitch = target->plane_bytes[part][array];
  const nyb_cu_address from = address_of(source->array[part][array]);
  const nyb_cu_address to = address_of(target->array[part][array]);
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

static nyb_status copy_tokens(const nyb_cuda_scope *scope, const nyb_cache *cache,
                              const nyb_cache_storage *target, int64_t *bytes, nyb_stream stream) {
  nyb_status status = NYB_OK;
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS && status == NYB_OK; array++) {
      status = copy_array(scope, cache, target, part, array, bytes, stream);
    }
  }
  return status;
}

static nyb_status refuse_capture(const nyb_cuda_scope *scope, const nyb_cache *cache,
                                 int64_t tokens, nyb_stream stream) {
  bool capturing;
  const nyb_status status = nyb_cuda_capturing(scope, stream, &capturing);
  if (status != NYB_OK || !capturing) return status;
  return nyb_fail(NYB_ERROR_UNSUPPORTED,
                  "stream %p is being captured and the cache would have to grow from %" PRId64
                  " to %" PRId64 " tokens; nyb_cache_reserve makes room before the capture",
                  stream, cache->storage.capacity_tokens, tokens);
}

/* A larger storage into which the tokens are on their way; the cache's own stays as it is. Undone
 * by drop_growth() or made the cache's by adopt_growth(), which both wait for the stream. */
typedef struct growth {
  nyb_cache_storage storage;
  int64_t copied_bytes;
} growth;

static void drop_growth(const nyb_cuda_scope *scope, const nyb_cache *cache, growth *grown,
                        nyb_stream stream) {
  const int mode = relax(scope);
  scope->driver->StreamSynchronize(stream);
  release(cache->context, scope, grown->storage.block);
  restore_mode(scope, mode);
}

static nyb_status begin_growth(const nyb_cuda_scope *scope, const nyb_cache *cache, int64_t tokens,
                               growth *grown, nyb_stream stream) {
  *grown = (growth){0};
  nyb_status status = refuse_capture(scope, cache, tokens, stream);
  if (status != NYB_OK) return status;
  const int mode = relax(scope);
  status = make_storage(scope, cache, tokens, &grown->storage);
  restore_mode(scope, mode);
  if (status != NYB_OK || cache->storage.block == NULL) return status;
  status = copy_tokens(scope, cache, &grown->storage, &grown->copied_bytes, stream);
  if (status != NYB_OK) drop_growth(scope, cache, grown, stream);
  return status;
}

static nyb_status adopt_growth(const nyb_cuda_scope *scope, nyb_cache *cache, growth *grown,
                               nyb_stream stream) {
  const int mode = relax(scope);
  nyb_status status = NYB_OK;
  if (cache->storage.block != NULL) { /* the stream still reads it */
    status = nyb_cuda_check(scope->driver, scope->driver->StreamSynchronize(stream),
                            "cuStreamSynchronize");
  }
  if (status == NYB_OK) {
    if (cache->storage.block != NULL) cache->reallocations++;
    cache->copied_bytes += grown->copied_bytes;
    release(cache->context, scope, cache->storage.block);
    cache->storage = grown->storage;
  } else {
    release(cache->context, scope, grown->storage.block);
  }
  restore_mode(scope, mode);
  return status;
}

nyb_status nyb_cuda_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = enter(cache, &scope);
  if (status != NYB_OK) return status;
  growth grown;
  status = begin_growth(&scope, cache, tokens, &grown, stream);
  if (status == NYB_OK) status = adopt_growth(&scope, cache, &grown, stream);
  nyb_cuda_leave(&scope);
  return status;
}

/* ---- Append --------------------------------------------------------------------------------- */

static nyb_device_rows rows_of(const nyb_cache *cache, const nyb_cache_storage *storage, int part,
                               const nyb_append *append) {
  const nyb_stored stored = nyb_cache_stored(cache, storage, part);
  const nyb_input *input = part == NYB_KEY ? &append->key : &append->value;
  const int64_t shape[3] = {cache->batch, cache->kv_heads, append->tokens};
  nyb_device_rows rows =
      nyb_cuda_rows_of(input, &stored, &cache->part[part].layout, shape, cache->part[part].dim);
  /* One token is stored behind others all the same. */
  rows.codes_stride[2] = cache->part[part].row_bytes[NYB_CODES];
  rows.scales_stride[2] = cache->part[part].row_bytes[NYB_SCALES];
  rows.biases_stride[2] = cache->part[part].row_bytes[NYB_BIASES];
  rows.wide_codes &= rows.codes_stride[2] % 16 == 0;
  return rows;
}

static nyb_status launch_append(nyb_cuda_scope *scope, const nyb_cache *cache,
                                const nyb_cache_storage *storage, const nyb_append *append,
                                nyb_stream stream) {
  nyb_device_append call = {
      .key = rows_of(cache, storage, NYB_KEY, append),
      .value = rows_of(cache, storage, NYB_VALUE, append),
      .tokens = nyb_divider_of(append->tokens),
      .capacity_tokens = storage->capacity_tokens,
      .kv_heads = cache->kv_heads,
      .lengths = cache->cuda->lengths,
      .arrivals = cache->cuda->arrivals,
      .non_finite = append->non_finite,
      .rule = (int)cache->rule,
  };
  const int64_t rows = append->tokens * cache->kv_heads;
  call.key_lanes = nyb_quotient_up(rows * call.key.lanes.divisor, WARP_THREADS) * WARP_THREADS;
  call.value_lanes = rows * call.value.lanes.divisor;
  const int64_t wanted = nyb_quotient_up(call.key_lanes + call.value_lanes, NYB_QUANTIZE_THREADS);
  const int64_t most = INT32_MAX / cache->batch;
  const int64_t blocks = wanted < most ? wanted : most;
  call.blocks_per_sequence = nyb_divider_of(blocks);
  const int64_t grid[3] = {cache->batch * blocks, 1, 1};
  return nyb_cuda_launch(scope, cache->cuda->append, grid, &call, stream, true);
}

static nyb_status append_in(nyb_cuda_scope *scope, nyb_cache *cache, const nyb_append *append,
                            nyb_stream stream) {
  nyb_status status = nyb_cuda_check_pointer(scope, "append.key", "data", append->key.data);
  if (status == NYB_OK) {
    status = nyb_cuda_check_pointer(scope, "append.value", "data", append->value.data);
  }
  if (status == NYB_OK) {
    status = nyb_cuda_check_pointer(scope, "append", "non_finite", append->non_finite);
  }
  if (status != NYB_OK) return status;
  const int64_t needed_tokens = nyb_cache_longest(cache) + append->tokens;
  if (needed_tokens <= cache->storage.capacity_tokens) {
    return launch_append(scope, cache, &cache->storage, append, stream);
  }
  growth grown;
  status =
      begin_growth(scope, cache, nyb_cache_grown_capacity(cache, needed_tokens), &grown, stream);
  if (status != NYB_OK) return status;
  status = launch_append(scope, cache, &grown.storage, append, stream);
  if (status != NYB_OK) {
    drop_growth(scope, cache, &grown, stream);
    return status;
  }
  return adopt_growth(scope, cache, &grown, stream);
}

nyb_status nyb_cuda_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = append_in(&scope, cache, append, stream);
  if (status == NYB_OK) {
    for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
      cache->lengths[sequence] += (int32_t)append->tokens;
    }
  }
  nyb_cuda_leave(&scope);
  return status;
}

/* ---- Trim and refresh ----------------------------------------------------------------------- */

nyb_status nyb_cuda_cache_trim(nyb_cache *cache, int64_t first, int64_t end, int64_t tokens,
                               int64_t *most, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = enter(cache, &scope);
  if (status != NYB_OK) return status;
  nyb_device_trim call = {
      .lengths = cache->cuda->lengths,
      .first = first,
      .count = end - first,
      .tokens = tokens < INT32_MAX ? (int)tokens : INT32_MAX,
  };
  const int64_t grid[3] = {nyb_quotient_up(end - first, NYB_TRIM_THREADS), 1, 1};
  status = nyb_cuda_launch(&scope, cache->cuda->trim, grid, &call, stream, true);
  nyb_cuda_leave(&scope);
  if (status != NYB_OK) return status;
  *most = 0;
  for (int64_t sequence = first; sequence < end; sequence++) {
    int32_t *const length = &cache->lengths[sequence];
    const int32_t lost = *length < call.tokens ? *length : call.tokens;
    *length -= lost;
    if (lost > *most) *most = lost;
  }
  return NYB_OK;
}

static nyb_status fetch_lengths(const nyb_cuda_scope *scope, nyb_cache *cache, nyb_stream stream) {
  const nyb_cuda_driver *driver = scope->driver;
  struct nyb_cuda_cache *const cuda = cache->cuda;
  bool capturing;
  nyb_status status = nyb_cuda_capturing(scope, stream, &capturing);
  if (status != NYB_OK) return status;
  if (capturing) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "stream %p is being captured; nyb_cache_refresh waits for it, which must come "
                    "before or after the capture",
                    stream);
  }
  status = nyb_cuda_check(driver,
                          driver->MemcpyDtoHAsync(cuda->staging, address_of(cuda->lengths),
                                                  (size_t)cache->batch * sizeof(int32_t), stream),
                          "cuMemcpyDtoHAsync");
  if (status != NYB_OK) return status;
  return nyb_cuda_check(driver, driver->StreamSynchronize(stream), "cuStreamSynchronize");
}

nyb_status nyb_cuda_cache_refresh(nyb_cache *cache, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = fetch_lengths(&scope, cache, stream);
  nyb_cuda_leave(&scope);
  if (status != NYB_OK) return status;
  const int64_t capacity = cache->storage.capacity_tokens;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int32_t length = cache->cuda->staging[sequence];
    cache->lengths[sequence] = length < 0 ? 0 : length > capacity ? (int32_t)capacity : length;
  }
  return NYB_OK;
}

void nyb_cuda_cache_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  (void)properties; /* every format and dtype, on every device */
  const nyb_cuda_spec append = {.program = &nyb_cuda_program_append};
  const nyb_cuda_spec trim = {.program = &nyb_cuda_program_trim};
  visit(data, &append, true);
  visit(data, &trim, true);
}
