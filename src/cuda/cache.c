/* SPDX-License-Identifier: Apache-2.0 */
/* A cache in device memory: what it consists of, and what is done to its numbers alone. */
#include "cache.h"

#include <inttypes.h>
#include <string.h>

#define DEVICE_ALIGNMENT 256

nyb_status nyb_cuda_cache_enter(const nyb_cache *cache, nyb_cuda_scope *scope) {
  return nyb_cuda_enter_home(cache->context, &cache->cuda->home, scope);
}

/* ---- Memory --------------------------------------------------------------------------------- */

nyb_status nyb_cuda_cache_allocate(const nyb_cuda_scope *scope, int64_t bytes, const char *what,
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

void nyb_cuda_cache_release(const nyb_context *context, const nyb_cuda_scope *scope, void *memory) {
  if (memory == NULL) return;
  const nyb_allocator *own = &context->device_allocator;
  if (own->release != NULL) {
    own->release(own->user_data, memory);
  } else if (scope != NULL) {
    scope->driver->MemFree(nyb_cuda_address_of(memory));
  }
}

nyb_status nyb_cuda_cache_make_storage(const nyb_cuda_scope *scope, const nyb_cache *cache,
                                       nyb_cache_region region, int64_t blocks,
                                       int64_t capacity_tokens, nyb_cache_storage *storage) {
  nyb_status status = nyb_cache_size_storage(cache, region, blocks, capacity_tokens, storage);
  if (status != NYB_OK || storage->bytes == 0) return status;
  status = nyb_cuda_cache_allocate(scope, storage->bytes, "cuMemAlloc of a cache's tokens",
                                   &storage->block);
  if (status == NYB_OK) nyb_cache_place_arrays(cache, storage);
  return status;
}

nyb_status nyb_cuda_cache_wait(const nyb_cuda_scope *scope, nyb_stream stream) {
  return nyb_cuda_check(scope->driver, scope->driver->StreamSynchronize(stream),
                        "cuStreamSynchronize");
}

int nyb_cuda_relax(const nyb_cuda_scope *scope) {
  int mode = NYB_CU_CAPTURE_MODE_RELAXED;
  scope->driver->ThreadExchangeStreamCaptureMode(&mode);
  return mode;
}

void nyb_cuda_restore_mode(const nyb_cuda_scope *scope, int mode) {
  scope->driver->ThreadExchangeStreamCaptureMode(&mode);
}

nyb_status nyb_cuda_cache_note_capture(const nyb_cuda_scope *scope, nyb_cache *cache,
                                       nyb_stream stream, bool *capturing) {
  const nyb_status status = nyb_cuda_capturing(scope, stream, capturing);
  if (status == NYB_OK && *capturing) cache->cuda->captured = true;
  return status;
}

nyb_status nyb_cuda_cache_refuse_capture(const nyb_cuda_scope *scope, nyb_stream stream,
                                         const char *what) {
  bool capturing;
  const nyb_status status = nyb_cuda_capturing(scope, stream, &capturing);
  if (status != NYB_OK || !capturing) return status;
  return nyb_fail(NYB_ERROR_UNSUPPORTED, "stream %p is being captured and %s", stream, what);
}

/* ---- Kernels' parameters -------------------------------------------------------------------- */

nyb_status nyb_cuda_cache_kernel(nyb_cuda_scope *scope, const nyb_cuda_program *program,
                                 int32_t threads, const nyb_cuda_kernel **kernel) {
  const nyb_cuda_spec spec = {.program = program};
  return nyb_cuda_kernel_get(scope, &spec, threads, 0, kernel);
}

nyb_device_places nyb_cuda_cache_places(const nyb_cache *cache) {
  const nyb_cuda_cache *cuda = cache->cuda;
  return (nyb_device_places){
      .kind = cache->numbers,
      .sequences = cuda->state,
      .body_tokens = cache->storage.capacity_tokens,
      .limit_tokens = cache->limit_tokens,
      .page_table = cuda->table,
      .page_table_stride = cache->pool.table_stride,
      .own_begins = cuda->own_begins,
      .own_ends = cuda->own_ends,
  };
}

/* ---- Patches -------------------------------------------------------------------------------- */

static void flush_patches(nyb_cuda_patches *patches) {
  nyb_device_patch *const call = &patches->call;
  const nyb_cuda_kernel *kernel;
  if (call->count == 0 || patches->status != NYB_OK) return;
  patches->status = nyb_cuda_cache_kernel(patches->scope, &nyb_cuda_program_cache_patch,
                                          NYB_CACHE_THREADS, &kernel);
  if (patches->status == NYB_OK) {
    const int64_t grid[3] = {1, 1, 1};
    patches->status = nyb_cuda_launch(patches->scope, kernel, grid, call, patches->stream, true);
  }
  call->count = 0;
}

void nyb_cuda_patches_begin(nyb_cuda_patches *patches, nyb_cuda_scope *scope, void *words,
                            nyb_stream stream) {
  patches->scope = scope;
  patches->stream = stream;
  patches->status = NYB_OK;
  patches->call.words = words;
  patches->call.count = patches->call.padding = 0;
}

void nyb_cuda_patches_add(nyb_cuda_patches *patches, const void *place, int32_t value) {
  nyb_device_patch *const call = &patches->call;
  call->place[call->count] = (unsigned)((const int32_t *)place - call->words);
  call->value[call->count] = value;
  if (++call->count == NYB_PATCH_WORDS) flush_patches(patches);
}

nyb_status nyb_cuda_patches_end(nyb_cuda_patches *patches) {
  flush_patches(patches);
  return patches->status;
}

/* A sequence's numbers, as the host counts. */
static void patch_sequence(nyb_cuda_patches *patches, const nyb_cache *cache, int64_t sequence) {
  const nyb_device_sequences *state = &cache->cuda->state;
  const nyb_cache_counts *counts = &cache->counts;
  int32_t dropped[2]; /* as the device reads it: both count bytes alike */
  memcpy(dropped, &counts->dropped[sequence], sizeof dropped);
  nyb_cuda_patches_add(patches, (const int32_t *)&state->dropped[sequence], dropped[0]);
  nyb_cuda_patches_add(patches, (const int32_t *)&state->dropped[sequence] + 1, dropped[1]);
  nyb_cuda_patches_add(patches, &state->lengths[sequence], counts->lengths[sequence]);
  nyb_cuda_patches_add(patches, &state->offsets[sequence], counts->offsets[sequence]);
  nyb_cuda_patches_add(patches, &state->last_begins[sequence], counts->last_begins[sequence]);
}

/* ---- The sequences' numbers ----------------------------------------------------------------- */

/* Words of a sequence: those of nyb_device_sequences come first, and staging has as many. */
enum {
  STATE_WORDS = 5,
  MOVE_WORDS = 2 * sizeof(nyb_reorder_move) / sizeof(int32_t),
  SEQUENCE_WORDS = STATE_WORDS + 4 + MOVE_WORDS,
  HOST_WORDS = STATE_WORDS + 4
};

static void place_numbers(nyb_cuda_cache *cuda, void *numbers, int32_t *host, int64_t sequences) {
  cuda->numbers = numbers;
  cuda->sequences = sequences;
  cuda->state.dropped = numbers;
  cuda->state.lengths = (int32_t *)numbers + 2 * sequences;
  cuda->state.offsets = cuda->state.lengths + sequences;
  cuda->state.last_begins = cuda->state.offsets + sequences;
  cuda->arrivals = (uint32_t *)numbers + STATE_WORDS * sequences;
  cuda->padding = (int32_t *)cuda->arrivals + sequences;
  cuda->own_begins = cuda->padding + sequences;
  cuda->own_ends = cuda->own_begins + sequences;
  cuda->moves = (nyb_reorder_move *)(void *)(cuda->own_ends + sequences);
  cuda->host = cuda->staging = host;
  cuda->own_begin = host + STATE_WORDS * sequences;
  cuda->own_end = cuda->own_begin + sequences;
  cuda->sent_begins = cuda->own_end + sequences;
  cuda->sent_ends = cuda->sent_begins + sequences;
}

/* A stream of its own: the default one waits for others, and they for it. */
static nyb_status make_stream(const nyb_cuda_scope *scope, nyb_stream *stream) {
  return nyb_cuda_check(scope->driver,
                        scope->driver->StreamCreate(stream, NYB_CU_STREAM_NON_BLOCKING),
                        "cuStreamCreate");
}

static nyb_status zero(const nyb_cuda_scope *scope, void *memory, int64_t bytes) {
  const nyb_cuda_driver *driver = scope->driver;
  nyb_stream stream;
  nyb_status status = make_stream(scope, &stream);
  if (status != NYB_OK) return status;
  status = nyb_cuda_check(
      driver, driver->MemsetD8Async(nyb_cuda_address_of(memory), 0, (size_t)bytes, stream),
      "cuMemsetD8Async");
  if (status == NYB_OK) status = nyb_cuda_cache_wait(scope, stream);
  driver->StreamDestroy(stream);
  return status;
}

static nyb_status allocate_numbers(const nyb_cuda_scope *scope, int64_t sequences, void **numbers,
                                   int32_t **host) {
  if (sequences > INT32_MAX / SEQUENCE_WORDS) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "a cache on CUDA would have numbers of %" PRId64
                    " sequences; it has %d at most",
                    sequences, (int)(INT32_MAX / SEQUENCE_WORDS));
  }
  const size_t host_bytes = (size_t)sequences * HOST_WORDS * sizeof(int32_t);
  *host = nyb_allocate(scope->context, host_bytes, NYB_PLANE_ALIGNMENT);
  if (*host == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes for the numbers of %" PRId64 " sequences",
                    host_bytes, sequences);
  }
  memset(*host, 0, host_bytes);
  const int64_t bytes = sequences * SEQUENCE_WORDS * (int64_t)sizeof(int32_t);
  nyb_status status =
      nyb_cuda_cache_allocate(scope, bytes, "cuMemAlloc of a cache's lengths", numbers);
  if (status == NYB_OK) {
    status = zero(scope, *numbers, bytes);
    if (status != NYB_OK) nyb_cuda_cache_release(scope->context, scope, *numbers);
  }
  if (status != NYB_OK) nyb_release(scope->context, *host);
  return status;
}

nyb_status nyb_cuda_cache_make_numbers(nyb_cuda_scope *scope, nyb_cache *cache, int64_t sequences) {
  void *numbers = NULL;
  int32_t *host = NULL;
  const nyb_status status = allocate_numbers(scope, sequences, &numbers, &host);
  if (status != NYB_OK) return status;
  nyb_cuda_cache_release(cache->context, scope, cache->cuda->numbers);
  if (cache->cuda->host != NULL) nyb_release(cache->context, cache->cuda->host);
  place_numbers(cache->cuda, numbers, host, sequences);
  return NYB_OK;
}

nyb_status nyb_cuda_cache_send_numbers(nyb_cuda_scope *scope, const nyb_cache *cache,
                                       nyb_stream stream) {
  nyb_cuda_patches patches;
  nyb_cuda_patches_begin(&patches, scope, cache->cuda->numbers, stream);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    patch_sequence(&patches, cache, sequence);
  }
  return nyb_cuda_patches_end(&patches);
}

static nyb_cache_sequence fetched_sequence(const nyb_cache *cache, int64_t sequence) {
  const nyb_cuda_cache *cuda = cache->cuda;
  const int32_t *words = cuda->staging + 2 * cuda->sequences + sequence;
  nyb_cache_sequence state = {
      .held = words[0],
      .offset = words[cuda->sequences],
      .last_begin = words[2 * cuda->sequences],
  };
  memcpy(&state.dropped, cuda->staging + 2 * sequence, sizeof state.dropped);
  int64_t room =
      cache->storage.capacity_tokens + cache->numbers.first_tokens + cache->numbers.last_tokens;
  if (cache->kind == NYB_CACHE_PAGED) room = cuda->own_end[sequence];
  return nyb_kind_in_range(&cache->numbers, cache->storage.capacity_tokens, room, state);
}

nyb_status nyb_cuda_cache_fetch_counts(const nyb_cuda_scope *scope, nyb_cache *cache,
                                       nyb_stream stream) {
  const nyb_cuda_driver *driver = scope->driver;
  nyb_cuda_cache *const cuda = cache->cuda;
  const size_t bytes = (size_t)cuda->sequences * STATE_WORDS * sizeof(int32_t);
  nyb_status status = nyb_cuda_check(
      driver,
      driver->MemcpyDtoHAsync(cuda->staging, nyb_cuda_address_of(cuda->numbers), bytes, stream),
      "cuMemcpyDtoHAsync");
  if (status == NYB_OK) status = nyb_cuda_cache_wait(scope, stream);
  if (status != NYB_OK) return status;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence state = fetched_sequence(cache, sequence);
    nyb_cache_set_sequence(cache, sequence, &state);
  }
  return NYB_OK;
}

nyb_status nyb_cuda_cache_settle_counts(const nyb_cuda_scope *scope, nyb_cache *cache,
                                        nyb_stream stream) {
  return cache->cuda->captured ? nyb_cuda_cache_fetch_counts(scope, cache, stream) : NYB_OK;
}

/* ---- Create and destroy --------------------------------------------------------------------- */

/* Those that appends and trims need, so that none of them compiles anything. */
static nyb_status get_kernels(nyb_cuda_scope *scope, const nyb_cache *cache) {
  const bool plain = cache->kind == NYB_CACHE_CONTIGUOUS;
  const nyb_cuda_kernel *unused;
  nyb_status status = nyb_cuda_cache_kernel(
      scope, plain ? &nyb_cuda_program_append : &nyb_cuda_program_append_placed,
      NYB_QUANTIZE_THREADS, &cache->cuda->append);
  if (status == NYB_OK) {
    status =
        nyb_cuda_cache_kernel(scope, &nyb_cuda_program_trim, NYB_CACHE_THREADS, &cache->cuda->trim);
  }
  if (status == NYB_OK && cache->kind == NYB_CACHE_MIXED) {
    status = nyb_cuda_cache_kernel(scope, &nyb_cuda_program_retire, NYB_QUANTIZE_THREADS, &unused);
  }
  if (status != NYB_OK || cache->kind != NYB_CACHE_PAGED) return status;
  status = nyb_cuda_cache_kernel(scope, &nyb_cuda_program_cache_patch, NYB_CACHE_THREADS, &unused);
  if (status != NYB_OK) return status;
  return nyb_cuda_cache_kernel(scope, &nyb_cuda_program_cache_copy, NYB_CACHE_THREADS, &unused);
}

static nyb_status make_storages(const nyb_cuda_scope *scope, nyb_cache *cache) {
  const nyb_cache_options *options = &cache->options;
  if (cache->kind == NYB_CACHE_PAGED) return NYB_OK;
  const int64_t body = nyb_cache_body_capacity(cache, options->initial_capacity_tokens);
  nyb_status status =
      nyb_cuda_cache_make_storage(scope, cache, NYB_BODY, cache->batch, body, &cache->storage);
  if (status != NYB_OK || cache->kind != NYB_CACHE_MIXED) return status;
  status = nyb_cuda_cache_make_storage(scope, cache, NYB_FIRST, cache->batch, options->first_tokens,
                                       &cache->first);
  if (status != NYB_OK) return status;
  return nyb_cuda_cache_make_storage(scope, cache, NYB_LAST, cache->batch, options->last_tokens,
                                     &cache->last);
}

/* scope: NULL where the CUDA context is gone. */
static void release_all(nyb_cache *cache, const nyb_cuda_scope *scope) {
  nyb_cuda_cache *const cuda = cache->cuda;
  void *const memory[] = {cache->storage.block, cache->first.block, cache->last.block,
                          cuda->numbers, cuda->table};
  for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) {
    nyb_cuda_cache_release(cache->context, scope, memory[i]);
  }
  if (cuda->host != NULL) nyb_release(cache->context, cuda->host);
  if (cuda->sent_table != NULL) nyb_release(cache->context, cuda->sent_table);
  nyb_cache_release_pool(cache);
  nyb_release(cache->context, cuda);
  cache->cuda = NULL;
}

/* Those of the initial capacity. */
static nyb_status take_first_pages(nyb_cuda_scope *scope, nyb_cache *cache) {
  const int64_t tokens = cache->options.initial_capacity_tokens;
  nyb_stream stream;
  if (cache->kind != NYB_CACHE_PAGED || tokens == 0) return NYB_OK;
  nyb_status status = make_stream(scope, &stream);
  if (status != NYB_OK) return status;
  status = nyb_cuda_cache_reserve_in(scope, cache, tokens, stream);
  if (status == NYB_OK) status = nyb_cuda_cache_wait(scope, stream);
  scope->driver->StreamDestroy(stream);
  return status;
}

static nyb_status create_in(nyb_cuda_scope *scope, nyb_cache *cache) {
  nyb_status status = get_kernels(scope, cache);
  if (status != NYB_OK) return status;
  const int mode = nyb_cuda_relax(scope);
  status = make_storages(scope, cache);
  if (status == NYB_OK) status = nyb_cuda_cache_make_numbers(scope, cache, cache->batch);
  nyb_cuda_restore_mode(scope, mode);
  return status;
}

nyb_status nyb_cuda_cache_create(nyb_cache *cache) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(cache->context, &scope);
  if (status != NYB_OK) return status;
  cache->cuda = nyb_allocate(cache->context, sizeof *cache->cuda, 64);
  if (cache->cuda == NULL) {
    status = nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a cache",
                      sizeof *cache->cuda);
  } else {
    memset(cache->cuda, 0, sizeof *cache->cuda);
    cache->cuda->home = nyb_cuda_home_of(&scope);
    status = create_in(&scope, cache);
    if (status == NYB_OK) status = take_first_pages(&scope, cache);
    if (status != NYB_OK) release_all(cache, &scope);
  }
  nyb_cuda_leave(&scope);
  return status;
}

void nyb_cuda_cache_destroy(nyb_cache *cache) {
  if (cache->cuda == NULL) return;
  nyb_cuda_scope scope;
  const bool alive = nyb_cuda_cache_enter(cache, &scope) == NYB_OK;
  const int mode = alive ? nyb_cuda_relax(&scope) : 0;
  release_all(cache, alive ? &scope : NULL);
  if (!alive) return;
  nyb_cuda_restore_mode(&scope, mode);
  nyb_cuda_leave(&scope);
}

/* ---- Trim, refresh, views ------------------------------------------------------------------- */

static nyb_status drop_pages(nyb_cuda_scope *scope, nyb_cache *cache, int64_t first, int64_t end,
                             int64_t tokens, nyb_stream stream) {
  for (int64_t sequence = first; sequence < end; sequence++) {
    nyb_cuda_cache_drop_pages(cache, sequence, nyb_larger(0, cache->lengths[sequence] - tokens));
  }
  return nyb_cuda_cache_send_tables(scope, cache, first, end, stream);
}

static nyb_status trim_in(nyb_cuda_scope *scope, nyb_cache *cache, int64_t first, int64_t end,
                          int64_t tokens, nyb_stream stream) {
  bool capturing;
  nyb_status status = nyb_cuda_cache_note_capture(scope, cache, stream, &capturing);
  if (status != NYB_OK) return status;
  nyb_device_trim call = {
      .places = nyb_cuda_cache_places(cache),
      .first = first,
      .count = end - first,
      .tokens = tokens,
  };
  const int64_t grid[3] = {nyb_quotient_up(end - first, NYB_CACHE_THREADS), 1, 1};
  status = nyb_cuda_launch(scope, cache->cuda->trim, grid, &call, stream, true);
  /* Where graphs append, nobody knows here which pages are filled. */
  if (status != NYB_OK || cache->kind != NYB_CACHE_PAGED || cache->cuda->captured) return status;
  return drop_pages(scope, cache, first, end, tokens, stream);
}

nyb_status nyb_cuda_cache_trim(nyb_cache *cache, int64_t first, int64_t end, int64_t tokens,
                               nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = trim_in(&scope, cache, first, end, tokens, stream);
  nyb_cuda_leave(&scope);
  return status;
}

nyb_status nyb_cuda_cache_refresh(nyb_cache *cache, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  status = nyb_cuda_cache_refuse_capture(
      &scope, stream,
      "nyb_cache_refresh waits for it, which must come before or after the capture");
  if (status == NYB_OK) status = nyb_cuda_cache_fetch_counts(&scope, cache, stream);
  nyb_cuda_leave(&scope);
  return status;
}

nyb_cache_addresses nyb_cuda_cache_addresses(const nyb_cache *cache) {
  const nyb_cuda_cache *cuda = cache->cuda;
  return (nyb_cache_addresses){
      .lengths = cuda->state.lengths,
      .offsets = cuda->state.offsets,
      .last_begins = cuda->state.last_begins,
      .table = cuda->table,
  };
}

void nyb_cuda_cache_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  (void)properties; /* every format, dtype and kind, on every device */
  const nyb_cuda_program *const programs[] = {
      &nyb_cuda_program_append,       &nyb_cuda_program_append_placed, &nyb_cuda_program_retire,
      &nyb_cuda_program_trim,         &nyb_cuda_program_cache_patch,   &nyb_cuda_program_cache_copy,
      &nyb_cuda_program_cache_reorder};
  for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++) {
    const nyb_cuda_spec spec = {.program = programs[i]};
    visit(data, &spec, true);
  }
}
