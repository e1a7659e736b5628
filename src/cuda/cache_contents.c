/* SPDX-License-Identifier: Apache-2.0 */
/* Caches between the host's memory and the device's, for saving and loading: the storages of both
 * are laid out alike, so that each goes over whole. */
#include "cache.h"

#include <string.h>

/* ---- To the host ---------------------------------------------------------------------------- */

static nyb_status fetch_region(const nyb_cuda_scope *scope, const nyb_cache *from, nyb_cache *to,
                               nyb_cache_region region, nyb_stream stream) {
  const nyb_cache_storage *source = nyb_cache_const_storage_of(from, region);
  nyb_cache_storage *target = nyb_cache_storage_of(to, region);
  if (source->blocks == 0) return NYB_OK;
  nyb_cache_release_storage(to, target);
  nyb_status status =
      nyb_cache_make_storage(to, region, source->blocks, source->capacity_tokens, target);
  if (status != NYB_OK || source->bytes == 0) return status;
  return nyb_cuda_check(
      scope->driver,
      scope->driver->MemcpyDtoHAsync(target->block, nyb_cuda_address_of(source->block),
                                     (size_t)source->bytes, stream),
      "cuMemcpyDtoHAsync");
}

static nyb_status copy_table(const nyb_cache *from, nyb_cache *to) {
  const int64_t stride = from->pool.table_stride;
  if (from->pool.table == NULL) return NYB_OK;
  const nyb_status status = nyb_cache_make_table(to, from->batch, stride, &to->pool.table);
  if (status != NYB_OK) return status;
  memcpy(to->pool.table, from->pool.table,
         (size_t)(from->batch * stride) * sizeof *from->pool.table);
  to->pool.table_stride = stride;
  return NYB_OK;
}

/* The stream is waited for whatever happens: the copy's memory may go. */
static nyb_status fetch_into(const nyb_cuda_scope *scope, const nyb_cache *from, nyb_cache *to,
                             nyb_stream stream) {
  nyb_status status = copy_table(from, to);
  for (int region = 0; region < NYB_CACHE_REGIONS && status == NYB_OK; region++) {
    status = fetch_region(scope, from, to, (nyb_cache_region)region, stream);
  }
  const nyb_status waited = nyb_cuda_cache_wait(scope, stream);
  if (status == NYB_OK) status = waited;
  for (int64_t sequence = 0; sequence < from->batch && status == NYB_OK; sequence++) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(from, sequence);
    nyb_cache_set_sequence(to, sequence, &state);
  }
  return status;
}

nyb_status nyb_cuda_cache_fetch(nyb_context *host, nyb_cache *cache, nyb_cache **fetched,
                                nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(cache, &scope);
  if (status != NYB_OK) return status;
  nyb_cache_options options = cache->options;
  options.initial_capacity_tokens = 0;
  nyb_cache *made = NULL;
  status = nyb_cuda_cache_refuse_capture(
      &scope, stream, "a cache is saved from what it holds now; it must be before or after");
  if (status == NYB_OK) status = nyb_cuda_cache_fetch_counts(&scope, cache, stream);
  if (status == NYB_OK) status = nyb_cache_create(host, &options, &made);
  if (status == NYB_OK) status = fetch_into(&scope, cache, made, stream);
  nyb_cuda_leave(&scope);
  if (status == NYB_OK) {
    *fetched = made;
  } else {
    nyb_cache_destroy(made);
  }
  return status;
}

/* ---- To the device -------------------------------------------------------------------------- */

static nyb_status send_region(const nyb_cuda_scope *scope, const nyb_cache *from, nyb_cache *to,
                              nyb_cache_region region, nyb_stream stream) {
  const nyb_cache_storage *source = nyb_cache_const_storage_of(from, region);
  nyb_cache_storage *target = nyb_cache_storage_of(to, region);
  if (source->blocks == 0) return NYB_OK;
  nyb_cuda_cache_release(to->context, scope, target->block);
  *target = (nyb_cache_storage){0};
  nyb_status status = nyb_cuda_cache_make_storage(scope, to, region, source->blocks,
                                                  source->capacity_tokens, target);
  if (status != NYB_OK || source->bytes == 0) return status;
  return nyb_cuda_check(
      scope->driver,
      scope->driver->MemcpyHtoDAsync(nyb_cuda_address_of(target->block), source->block,
                                     (size_t)source->bytes, stream),
      "cuMemcpyHtoDAsync");
}

static nyb_status send_pages(nyb_cuda_scope *scope, nyb_cache *from, nyb_cache *to,
                             nyb_stream stream) {
  if (from->pool.table == NULL) return NYB_OK;
  to->pool = from->pool; /* of the same allocator */
  from->pool = (nyb_cache_pool){0};
  for (int64_t sequence = 0; sequence < to->batch; sequence++) {
    to->counts.pages[sequence] = (int32_t)nyb_pages_for(to, to->lengths[sequence]);
  }
  const nyb_status status =
      nyb_cuda_cache_make_table(scope, to, to->batch * to->pool.table_stride, stream);
  if (status != NYB_OK) return status;
  nyb_cuda_cache_find_bounds(to);
  return nyb_cuda_cache_send_tables(scope, to, 0, to->batch, stream);
}

static nyb_status send_into(nyb_cuda_scope *scope, nyb_cache *from, nyb_cache *to,
                            nyb_stream stream) {
  const int mode = nyb_cuda_relax(scope);
  nyb_status status = NYB_OK;
  for (int64_t sequence = 0; sequence < from->batch; sequence++) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(from, sequence);
    nyb_cache_set_sequence(to, sequence, &state);
  }
  for (int region = 0; region < NYB_CACHE_REGIONS && status == NYB_OK; region++) {
    status = send_region(scope, from, to, (nyb_cache_region)region, stream);
  }
  if (status == NYB_OK) status = nyb_cuda_cache_send_numbers(scope, to, stream);
  if (status == NYB_OK) status = send_pages(scope, from, to, stream);
  const nyb_status waited = nyb_cuda_cache_wait(scope, stream);
  nyb_cuda_restore_mode(scope, mode);
  return status == NYB_OK ? waited : status;
}

nyb_status nyb_cuda_cache_send(const nyb_cache *like, nyb_cache *host, nyb_cache **sent,
                               nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_cache_enter(like, &scope);
  if (status != NYB_OK) return status;
  nyb_cache_options options = like->options;
  options.initial_capacity_tokens = 0;
  nyb_cache *made = NULL;
  status = nyb_cuda_cache_refuse_capture(
      &scope, stream, "loading waits for it; a cache is loaded before or after the capture");
  if (status == NYB_OK) status = nyb_cache_create(like->context, &options, &made);
  if (status == NYB_OK) status = send_into(&scope, host, made, stream);
  nyb_cuda_leave(&scope);
  if (status == NYB_OK) {
    *sent = made;
  } else {
    nyb_cache_destroy(made);
  }
  return status;
}
