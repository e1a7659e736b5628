/* SPDX-License-Identifier: Apache-2.0 */
/* What only a real driver can show of the CUDA backend's host code: contexts that are destroyed
 * under a cache, memory that runs out, pointers of the wrong side, a first and a later start. Needs
 * a GPU; exits with 77 where there is none. A driver that is not the fake one is not made to fail:
 * each step provokes the real thing. Needs nothing but the library, so that it can be built by hand
 * where cmocka is missing. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../src/cuda/device.h"

static const nyb_cuda_driver *driver;
static nyb_context *context;
static int passed, failed;

static void check(bool good, const char *what) {
  if (good) {
    passed++;
  } else {
    failed++;
    printf("failed: %s; last error: %s\n", what, nyb_last_error());
  }
}

/* The call must fail with that status; its sentence is shown, for a reader to judge. */
static void check_failure(nyb_status got, nyb_status expected, const char *what) {
  printf("%s: %s: %s\n", what, nyb_status_name(got), got == NYB_OK ? "" : nyb_last_error());
  check(got == expected, what);
}

static double milliseconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

/* ---- A cache with tokens --------------------------------------------------------------------- */

enum { BATCH = 2, HEADS = 2, TOKENS = 8, DIM = 128 };

static nyb_cache *make_cache(void) {
  const nyb_format format = {NYB_AFFINE, 4, 64, NYB_BF16};
  const nyb_cache_options options = {
      .struct_size = sizeof options,
      .batch = BATCH,
      .kv_heads = HEADS,
      .key_dim = DIM,
      .value_dim = DIM,
      .key_format = format,
      .value_format = format,
      .initial_capacity_tokens = TOKENS,
  };
  nyb_cache *cache = NULL;
  check(nyb_cache_create(context, &options, &cache) == NYB_OK, "a cache is made");
  return cache;
}

/* `rows` is device memory of any content that is finite: zeros. */
static nyb_append append_of(const void *rows) {
  const nyb_input input = {
      .data = rows, .dtype = NYB_BF16, .stride = {HEADS * TOKENS * DIM, TOKENS * DIM, DIM}};
  return (nyb_append){
      .struct_size = sizeof(nyb_append), .tokens = TOKENS, .key = input, .value = input};
}

static void *zeros(void) {
  const size_t bytes = (size_t)BATCH * HEADS * TOKENS * DIM * 2;
  nyb_cu_address address = 0;
  check(driver->MemAlloc(&address, bytes) == 0 &&
            driver->MemsetD8Async(address, 0, bytes, NULL) == 0 &&
            driver->StreamSynchronize(NULL) == 0,
        "device memory is there");
  return (void *)(uintptr_t)address;
}

/* Grows, comes back from the device, goes. A CUDA context must be current. */
static void use_cache(const char *where) {
  void *rows = zeros();
  nyb_cache *cache = make_cache();
  if (cache == NULL) return;
  const nyb_append append = append_of(rows);
  check(nyb_cache_append(cache, &append, NULL) == NYB_OK, where);
  check(nyb_cache_append(cache, &append, NULL) == NYB_OK, where);
  check(nyb_cache_trim(cache, 1, 3, NULL, NULL) == NYB_OK, where);
  check(nyb_cache_refresh(cache, NULL) == NYB_OK, where);
  check(nyb_cache_length(cache, 0) == 2 * TOKENS && nyb_cache_length(cache, 1) == 2 * TOKENS - 3,
        where);
  nyb_cache_destroy(cache);
  check(driver->MemFree((uintptr_t)rows) == 0, where);
}

/* ---- Steps ---------------------------------------------------------------------------------- */

static nyb_cu_context own_context(void) {
  nyb_cu_context made = NULL;
  check(driver->CtxCreate(&made, 0, 0) == 0 && made != NULL, "a CUDA context is made");
  return made;
}

static void destroy_under_a_cache(void) {
  const nyb_cu_context own = own_context();
  void *rows = zeros();
  nyb_cache *cache = make_cache();
  const nyb_append append = append_of(rows);
  check(nyb_cache_append(cache, &append, NULL) == NYB_OK, "append before");
  check(driver->CtxDestroy(own) == 0, "the CUDA context is destroyed");
  check_failure(nyb_cache_append(cache, &append, NULL), NYB_ERROR_DEVICE, "append after");
  check_failure(nyb_cache_reserve(cache, 1000, NULL), NYB_ERROR_DEVICE, "reserve after");
  check_failure(nyb_cache_trim(cache, 0, 1, NULL, NULL), NYB_ERROR_DEVICE, "trim after");
  check_failure(nyb_cache_refresh(cache, NULL), NYB_ERROR_DEVICE, "refresh after");
  const nyb_cu_context next = own_context();
  printf("the next CUDA context is at %s address\n", next == own ? "the same" : "another");
  check_failure(nyb_cache_append(cache, &append, NULL), NYB_ERROR_DEVICE, "append in the next one");
  use_cache("a cache in the next CUDA context");
  nyb_cache_destroy(cache);
  use_cache("and again, once the old cache is gone");
  check(driver->CtxDestroy(next) == 0, "the next one is destroyed too");
}

static void run_out_of_memory(void) {
  const nyb_cu_context own = own_context();
  nyb_cache *cache = make_cache();
  check_failure(nyb_cache_reserve(cache, INT32_MAX, NULL), NYB_ERROR_OUT_OF_MEMORY,
                "reserve more than there is");
  nyb_cache_destroy(cache);
  use_cache("a cache after that");
  check(driver->CtxDestroy(own) == 0, "the CUDA context is destroyed");
}

static void use_wrong_pointers(void) {
  const nyb_cu_context own = own_context();
  nyb_cuda_scope scope;
  static int host[4];
  check(nyb_cuda_enter(context, &scope) == NYB_OK, "the CUDA context is entered");
  const nyb_status expected = scope.properties->reads_host_memory ? NYB_OK : NYB_ERROR_POINTER;
  check_failure(
      nyb_cuda_check_pointer(&scope, "attention.q", "data", host), expected,
      scope.properties->reads_host_memory ? "host memory, which this device reads" : "host memory");
  void *pinned = NULL;
  check(driver->MemAllocHost(&pinned, 64) == 0, "pinned memory is there");
  check(nyb_cuda_check_pointer(&scope, "attention.q", "data", pinned) == NYB_OK, "pinned memory");
  check(driver->MemFreeHost(pinned) == 0, "pinned memory goes");
  void *rows = zeros();
  const double start = milliseconds_now();
  for (int i = 0; i < 1000; i++) nyb_cuda_check_pointer(&scope, "attention.q", "data", rows);
  printf("checking a pointer takes %.0f ns\n", 1e3 * (milliseconds_now() - start));
  nyb_cuda_leave(&scope);
  check(driver->CtxDestroy(own) == 0, "the CUDA context is destroyed");
}

/* Without a current CUDA context: the primary one, which is left again. */
static void use_primary_context(void) {
  nyb_cuda_scope scope;
  nyb_cu_context current = NULL;
  check(driver->CtxGetCurrent(&current) == 0 && current == NULL, "no CUDA context is current");
  check(nyb_cuda_enter(context, &scope) == NYB_OK, "the primary context is entered");
  void *rows = zeros();
  nyb_cuda_leave(&scope);
  const nyb_append append = append_of(rows);
  nyb_cache *cache = make_cache();
  double start = milliseconds_now();
  check(nyb_cache_append(cache, &append, NULL) == NYB_OK, "append in the primary context");
  printf("a first append takes %.3f ms\n", milliseconds_now() - start);
  check(nyb_cache_refresh(cache, NULL) == NYB_OK && nyb_cache_length(cache, 1) == TOKENS,
        "refresh in the primary context");
  nyb_cache_destroy(cache);
  check(driver->CtxGetCurrent(&current) == 0 && current == NULL, "none is current afterwards");
}

int main(void) {
  const nyb_context_options options = {.struct_size = sizeof options, .backend = NYB_BACKEND_CUDA};
  double start = milliseconds_now();
  const nyb_status status = nyb_context_create(&options, &context);
  if (status == NYB_ERROR_UNSUPPORTED) {
    printf("skipped: %s\n", nyb_last_error());
    return 77;
  }
  check(status == NYB_OK, "a context is made");
  if (status != NYB_OK || nyb_cuda_driver_load(&driver) != NYB_OK) return 1;
  printf("driver and NVRTC are there after %.1f ms\n", milliseconds_now() - start);
  use_primary_context();
  if (driver->CtxCreate == NULL || driver->CtxDestroy == NULL) {
    printf("this driver has no cuCtxCreate_v2: contexts of its own are not shown\n");
  } else {
    for (int round = 0; round < 2; round++) { /* the second finds its kernels on the disk */
      start = milliseconds_now();
      const nyb_cu_context own = own_context();
      printf("a CUDA context takes %.1f ms, ", milliseconds_now() - start);
      start = milliseconds_now();
      nyb_cache_destroy(make_cache());
      printf("a first cache in it %.1f ms\n", milliseconds_now() - start);
      check(driver->CtxDestroy(own) == 0, "the CUDA context is destroyed");
    }
    use_wrong_pointers();
    run_out_of_memory();
    destroy_under_a_cache();
    use_primary_context();
  }
  nyb_context_destroy(context);
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
