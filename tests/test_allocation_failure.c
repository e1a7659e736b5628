/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations fail one by one, the first, the second, ..., until a scenario runs through. Each
 * failure is NYB_ERROR_OUT_OF_MEMORY with a sentence, nothing leaks, and what was there stays. */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "nybble.h"

typedef struct scarce_memory {
  int64_t live_blocks, allocations;
  int64_t fail_at; /* counted from 1 */
} scarce_memory;

static void *scarce_allocate(void *user_data, size_t bytes, size_t alignment) {
  scarce_memory *memory = user_data;
  if (++memory->allocations == memory->fail_at) return NULL;
  memory->live_blocks++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void scarce_release(void *user_data, void *block) {
  ((scarce_memory *)user_data)->live_blocks--;
  free(block);
}

/* What a scenario leaves where it stopped. */
typedef struct outcome {
  nyb_status status;
  int steps; /* that succeeded */
} outcome;

typedef outcome (*scenario)(nyb_context *context);

#define STEP(result, call)                             \
  do {                                                 \
    if ((result).status == NYB_OK) {                   \
      (result).status = (call);                        \
      if ((result).status == NYB_OK) (result).steps++; \
    }                                                  \
  } while (0)

/* Runs it with every allocation failing in turn; returns how many failed before none did. */
static int64_t fail_one_by_one(scenario run, int64_t threads) {
  for (int64_t nth = 1;; nth++) {
    scarce_memory memory = {.fail_at = nth};
    nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    options.allocator = (nyb_allocator){scarce_allocate, scarce_release, &memory};
    nyb_context *const untouched = (nyb_context *)&memory;
    nyb_context *context = untouched;
    outcome result = {.status = nyb_context_create(&options, &context)};
    if (result.status == NYB_OK) {
      result = run(context);
      nyb_context_destroy(context);
    } else {
      assert_ptr_equal(context, untouched);
    }
    assert_int_equal(memory.live_blocks, 0);
    if (memory.allocations < nth) { /* none failed */
      if (result.status != NYB_OK) fail_msg("%s", nyb_last_error());
      return nth - 1;
    }
    assert_int_equal(result.status, NYB_ERROR_OUT_OF_MEMORY);
    assert_non_null(strstr(nyb_last_error(), "the allocator had no "));
    assert_non_null(strstr(nyb_last_error(), " bytes "));
    assert_true(nth < 1000);
  }
}

/* ---- Context and cache ----------------------------------------------------------------------- */

static outcome nothing(nyb_context *context) {
  (void)context;
  return (outcome){NYB_OK, 0};
}

static void test_context(void **state) {
  (void)state;
  assert_int_equal(fail_one_by_one(nothing, 1), 1);
  assert_int_equal(fail_one_by_one(nothing, 3), 1);
}

/* Three appends, each of which grows, and a reserve. */
static outcome fill_a_cache(nyb_context *context) {
  enum { DIM = 64, N = 65 };
  static float data[2 * N * DIM];
  for (int i = 0; i < 2 * N * DIM; i++) data[i] = (float)(i % 97 - 48);
  const nyb_input input = {data, NYB_F32, {N * DIM, 0, DIM}};
  nyb_append append = NYB_APPEND_INIT;
  append.tokens = N;
  append.key = append.value = input;
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 2;
  options.kv_heads = 1;
  options.key_dim = options.value_dim = DIM;
  options.key_format = (nyb_format){NYB_AFFINE, 4, 64, NYB_F16};
  options.value_format = (nyb_format){NYB_PLAIN, 0, 0, NYB_F32};
  options.initial_capacity_tokens = 10;
  nyb_cache *const untouched = (nyb_cache *)&options;
  nyb_cache *cache = untouched;
  outcome result = {NYB_OK, 0};
  STEP(result, nyb_cache_create(context, &options, &cache));
  if (result.status != NYB_OK) {
    assert_ptr_equal(cache, untouched);
    return result;
  }
  for (int i = 0; i < 3; i++) STEP(result, nyb_cache_append(cache, &append, NULL));
  STEP(result, nyb_cache_reserve(cache, 10000, NULL));
  const int appends = result.steps - 1 < 3 ? result.steps - 1 : 3;
  nyb_attention view = NYB_ATTENTION_INIT;
  assert_int_equal(nyb_cache_view(cache, &view), NYB_OK);
  for (int64_t sequence = 0; sequence < 2; sequence++) {
    assert_int_equal(nyb_cache_length(cache, sequence), appends * N);
    for (int64_t i = 0; i < appends * N * DIM; i++) {
      const float *values = view.v.codes;
      assert_true(values[sequence * view.v.codes_stride[0] + i] ==
                  data[sequence * N * DIM + i % (N * DIM)]);
    }
  }
  /* There is memory again: it goes on where it was. */
  if (result.status != NYB_OK) {
    assert_int_equal(nyb_cache_append(cache, &append, NULL), NYB_OK);
    assert_int_equal(nyb_cache_length(cache, 1), (appends + 1) * N);
  }
  nyb_cache_destroy(cache);
  return result;
}

static void test_cache(void **state) {
  (void)state;
  /* The context, the cache, its lengths, its first block, two or three growths, the reserve. */
  const int64_t failures = fail_one_by_one(fill_a_cache, 1);
  assert_in_range(failures, 7, 8);
  assert_int_equal(fail_one_by_one(fill_a_cache, 2), failures);
}

/* ---- Files ----------------------------------------------------------------------------------- */

static char path[64];

static outcome write_and_read(nyb_context *context) {
  static const unsigned char bytes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  enum { COUNT = 40 }; /* beyond the first size of the reader's arrays */
  char names[COUNT][16];
  nyb_safetensors_tensor tensors[COUNT];
  nyb_metadata metadata[COUNT];
  for (int i = 0; i < COUNT; i++) {
    snprintf(names[i], sizeof names[i], "t%d", i);
    tensors[i] = (nyb_safetensors_tensor){names[i], "U16", 1, {4}, bytes, 8};
    metadata[i] = (nyb_metadata){names[i], "value"};
  }
  outcome result = {NYB_OK, 0};
  STEP(result, nyb_safetensors_write(context, path, tensors, COUNT, metadata, COUNT));
  if (result.status != NYB_OK) {
    assert_int_not_equal(access(path, F_OK), 0);
    return result;
  }
  nyb_safetensors *const untouched = (nyb_safetensors *)names;
  nyb_safetensors *file = untouched;
  STEP(result, nyb_safetensors_open(context, path, &file));
  unlink(path);
  if (result.status != NYB_OK) {
    assert_ptr_equal(file, untouched);
    return result;
  }
  assert_int_equal(nyb_safetensors_count(file), COUNT);
  assert_int_equal(nyb_safetensors_metadata_count(file), COUNT);
  nyb_safetensors_close(file);
  return result;
}

static void test_files(void **state) {
  (void)state;
  char folder[] = "/tmp/nybble-scarce-XXXXXX";
  assert_non_null(mkdtemp(folder));
  snprintf(path, sizeof path, "%s/file", folder);
  /* The context; two orders of names, a header, a name; a file, its header, two arrays of which
   * each grows once, an index. */
  assert_int_equal(fail_one_by_one(write_and_read, 1), 1 + 4 + 7);
  assert_int_equal(rmdir(folder), 0); /* and nothing lies there */
}

/* ---- Run calls ------------------------------------------------------------------------------- */

/* No run call allocates: with an allocator that has nothing more to give they succeed. */
static void test_run_calls_do_not_allocate(void **state) {
  (void)state;
  enum { DIM = 64, N = 300, HEADS = 4, KV_HEADS = 2 };
  scarce_memory memory = {0};
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 2;
  options.allocator = (nyb_allocator){scarce_allocate, scarce_release, &memory};
  nyb_context *context = NULL;
  assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  nyb_cache_options cache_options = NYB_CACHE_OPTIONS_INIT;
  cache_options.batch = 1;
  cache_options.kv_heads = KV_HEADS;
  cache_options.key_dim = cache_options.value_dim = DIM;
  cache_options.key_format = cache_options.value_format = (nyb_format){NYB_AFFINE, 4, 64, NYB_F16};
  cache_options.initial_capacity_tokens = N;
  nyb_cache *cache = NULL;
  assert_int_equal(nyb_cache_create(context, &cache_options, &cache), NYB_OK);
  const int64_t before = memory.allocations;

  float *data = malloc(KV_HEADS * N * DIM * sizeof(float));
  for (int i = 0; i < KV_HEADS * N * DIM; i++) data[i] = (float)(i * 7 % 101 - 50) / 50;
  nyb_append append = NYB_APPEND_INIT;
  append.tokens = N;
  append.key = append.value = (nyb_input){data, NYB_F32, {0, N * DIM, DIM}};
  assert_int_equal(nyb_cache_append(cache, &append, NULL), NYB_OK);

  float out[HEADS * DIM];
  nyb_attention attention = NYB_ATTENTION_INIT;
  assert_int_equal(nyb_cache_view(cache, &attention), NYB_OK);
  attention.query_heads = HEADS;
  attention.query_len = 1;
  attention.q = (nyb_input){data, NYB_F32, {0, DIM, DIM}};
  attention.out = (nyb_output){out, NYB_F32, {HEADS * DIM, DIM, DIM}};
  attention.scale = 0.125f;
  for (int path_number = NYB_PATH_FUSED; path_number <= NYB_PATH_COMPAT; path_number++) {
    attention.path = (nyb_path)path_number;
    nyb_plan plan = NYB_PLAN_INIT;
    if (nyb_attention_plan(context, &attention, &plan) != NYB_OK) fail_msg("%s", nyb_last_error());
    void *workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, (plan.workspace_bytes + 63) / 64 * 64);
    assert_int_equal(nyb_attention_run(context, &attention, workspace, plan.workspace_bytes, NULL),
                     NYB_OK);
    free(workspace);
  }
  nyb_geglu geglu = NYB_GEGLU_INIT;
  geglu.rows = 1;
  geglu.columns = DIM;
  geglu.dtype = NYB_F32;
  geglu.gate = data;
  geglu.up = data + DIM;
  geglu.out = out;
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = DIM;
  assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_OK);
  assert_int_equal(memory.allocations, before);
  free(data);
  nyb_cache_destroy(cache);
  nyb_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_context),
      cmocka_unit_test(test_cache),
      cmocka_unit_test(test_files),
      cmocka_unit_test(test_run_calls_do_not_allocate),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
