/* SPDX-License-Identifier: Apache-2.0 */
/* The host code of the cache, quantize and GeGLU on CUDA, over the fake driver: what is launched
 * with which arguments, what every failing call leaves behind, and what is refused. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../src/cuda/device/cache_append.cuh"
#include "../src/cuda/device/geglu_arguments.h"
#include "fake_cuda/open.h"
#include "nybble.h"

enum { OUT_OF_MEMORY = NYB_CU_ERROR_OUT_OF_MEMORY, INVALID_VALUE = 1, LAUNCH_FAILED = 719 };
enum { BATCH = 3, HEADS = 2, DIM = 64 };

static fake_cuda_library fake;
static nyb_context *context;
static nyb_cu_context cuda_context;
static char *rows; /* device memory */
static nyb_cu_result (*create_context)(nyb_cu_context *, unsigned, nyb_cu_device);
static nyb_cu_result (*destroy_context)(nyb_cu_context);
static nyb_cu_result (*allocate)(nyb_cu_address *, size_t);
static nyb_cu_result (*release)(nyb_cu_address);

static char stream_memory;
static nyb_stream const stream = &stream_memory;

/* ---- What was launched ------------------------------------------------------------------------
 */

static struct {
  int64_t count;
  char kernel[32];
  nyb_cu_launch launch;
  nyb_device_append append;
  nyb_device_trim trim;
  nyb_device_quantize quantize;
  nyb_device_geglu geglu;
} launched;

/* Remembers the launch, and does to the lengths what the kernel would. */
static void take_launch(void *data, const char *kernel, const nyb_cu_launch *launch,
                        void *arguments) {
  (void)data;
  launched.count++;
  launched.launch = *launch;
  snprintf(launched.kernel, sizeof launched.kernel, "%s", kernel);
  if (strcmp(kernel, "append") == 0) {
    launched.append = *(const nyb_device_append *)arguments;
    for (int i = 0; i < BATCH; i++) {
      launched.append.lengths[i] += (int)launched.append.tokens.divisor;
    }
  } else if (strcmp(kernel, "trim") == 0) {
    launched.trim = *(const nyb_device_trim *)arguments;
    for (long long i = 0; i < launched.trim.count; i++) {
      nyb_trim_sequence(&launched.trim, launched.trim.first + i);
    }
  } else if (strcmp(kernel, "geglu") == 0) {
    launched.geglu = *(const nyb_device_geglu *)arguments;
  } else {
    launched.quantize = *(const nyb_device_quantize *)arguments;
  }
}

static void fail_call(const char *call, nyb_cu_result result, int64_t after) {
  fake.cuda->fail_result = result;
  fake.cuda->fail_after = after;
  fake.cuda->fail_call = call;
}

static void ok(nyb_status status) {
  if (status != NYB_OK) fail_msg("%s: %s", nyb_status_name(status), nyb_last_error());
}

static void refused(nyb_status status, nyb_status expected, const char *words) {
  if (status != expected || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("%s: %s; not %s with \"%s\"", nyb_status_name(status), nyb_last_error(),
             nyb_status_name(expected), words);
  }
}

/* ---- Caches ------------------------------------------------------------------------------------
 */

static nyb_cache_options sound_options(int64_t capacity) {
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = BATCH;
  options.kv_heads = HEADS;
  options.key_dim = options.value_dim = DIM;
  options.key_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_BF16};
  options.value_format = (nyb_format){NYB_PLAIN, 0, 0, NYB_F16};
  options.rule = NYB_RULE_MLX_GPU;
  options.initial_capacity_tokens = capacity;
  return options;
}

static nyb_cache *made_cache(int64_t capacity) {
  const nyb_cache_options options = sound_options(capacity);
  nyb_cache *cache = NULL;
  ok(nyb_cache_create(context, &options, &cache));
  return cache;
}

static nyb_append sound_append(int64_t tokens) {
  nyb_append append = NYB_APPEND_INIT;
  append.tokens = tokens;
  append.key = (nyb_input){rows, NYB_BF16, {HEADS * tokens * DIM, tokens * DIM, DIM}};
  append.value = append.key;
  return append;
}

static int64_t capacity_of(const nyb_cache *cache) {
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  ok(nyb_cache_get_usage(cache, &usage));
  return usage.capacity_tokens;
}

static void test_append_is_one_launch(void **state) {
  (void)state;
  nyb_cache *cache = made_cache(100);
  nyb_append append = sound_append(5);
  int32_t *const flag = (int32_t *)(void *)(rows + 4096);
  append.non_finite = flag;
  launched.count = 0;
  ok(nyb_cache_append(cache, &append, stream));
  assert_int_equal(launched.count, 1);
  assert_string_equal(launched.kernel, "append");
  assert_ptr_equal(launched.launch.stream, stream);
  nyb_attention view = NYB_ATTENTION_INIT;
  ok(nyb_cache_view(cache, &view));
  const nyb_device_append *call = &launched.append;
  assert_ptr_equal(call->lengths, view.lengths);
  assert_ptr_equal(call->non_finite, flag);
  assert_int_equal(call->capacity_tokens, 100);
  assert_int_equal(call->tokens.divisor, 5);
  assert_int_equal(call->rule, NYB_RULE_MLX_GPU);
  assert_ptr_equal(call->key.codes, view.k.codes);
  assert_ptr_equal(call->value.codes, view.v.codes);
  assert_int_equal(call->key.bits, 4);
  assert_int_equal(call->key.group_shift, 2);
  assert_int_equal(call->value.bits, 0);
  assert_int_equal(call->key.codes_stride[2], DIM / 2);
  assert_int_equal(call->key.codes_stride[1], view.k.codes_stride[1] * 4);
  assert_int_equal(call->value.codes_stride[2], DIM * 2);
  assert_true(call->key.wide_input && call->value.wide_codes);
  const int64_t key_lanes = 5 * HEADS * DIM / 8;
  assert_int_equal(call->key_lanes, (key_lanes + 31) / 32 * 32);
  assert_int_equal(call->value_lanes, key_lanes);
  assert_int_equal(launched.launch.grid[0], BATCH * call->blocks_per_sequence.divisor);
  for (int i = 0; i < BATCH; i++) {
    assert_int_equal(view.lengths[i], 5); /* the fake device's memory is ours */
    assert_int_equal(nyb_cache_length(cache, i), 5);
  }
  append.key.data = rows + 2; /* not a multiple of 16 bytes */
  ok(nyb_cache_append(cache, &append, stream));
  assert_false(launched.append.key.wide_input);
  assert_true(launched.append.value.wide_input);
  nyb_cache_destroy(cache);
}

static void test_growing(void **state) {
  (void)state;
  const int64_t live = fake.cuda->live_allocations;
  nyb_cache *cache = made_cache(0);
  nyb_append append = sound_append(1);
  for (int i = 0; i < 500; i++) ok(nyb_cache_append(cache, &append, stream));
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.capacity_tokens, 512);
  assert_int_equal(usage.reallocations, 3);
  const int64_t token_bytes = BATCH * HEADS * (DIM / 2 + DIM / 32 * 4 + DIM * 2);
  assert_int_equal(usage.copied_bytes, (64 + 128 + 256) * token_bytes);
  assert_int_equal(launched.append.capacity_tokens, 512);
  assert_int_equal(fake.cuda->live_allocations, live + 2);
  ok(nyb_cache_reserve(cache, 5000, stream));
  assert_int_equal(capacity_of(cache), 5000);
  assert_int_equal(fake.cuda->live_allocations, live + 2);
  nyb_cache_destroy(cache);
  assert_int_equal(fake.cuda->live_allocations, live);
}

/* What the device has appended by graphs is kept, though the host has not counted it. */
static void test_growing_beyond_the_hosts_count(void **state) {
  (void)state;
  nyb_cache *cache = made_cache(64);
  nyb_append append = sound_append(1);
  ok(nyb_cache_append(cache, &append, stream));
  nyb_attention view = NYB_ATTENTION_INIT;
  ok(nyb_cache_view(cache, &view));
  int32_t *const lengths = launched.append.lengths;
  for (int i = 0; i < BATCH; i++) lengths[i] = 60;
  char *const codes = (char *)(uintptr_t)view.k.codes; /* of sequence 2, head 1, token 59 */
  const int64_t at = (2 * view.k.codes_stride[0] + view.k.codes_stride[1]) * 4 + 59 * DIM / 2;
  memset(codes + at, 0x3c, DIM / 2);
  ok(nyb_cache_reserve(cache, 1000, stream));
  ok(nyb_cache_view(cache, &view));
  const char *moved = (const char *)view.k.codes +
                      (2 * view.k.codes_stride[0] + view.k.codes_stride[1]) * 4 + 59 * DIM / 2;
  for (int i = 0; i < DIM / 2; i++) assert_int_equal(moved[i], 0x3c);
  assert_int_equal(nyb_cache_length(cache, 0), 1);
  ok(nyb_cache_refresh(cache, stream));
  assert_int_equal(nyb_cache_length(cache, 0), 60);
  lengths[1] = -5; /* nothing of ours writes such lengths, but they are not believed */
  lengths[2] = 4000;
  ok(nyb_cache_refresh(cache, stream));
  assert_int_equal(nyb_cache_length(cache, 1), 0);
  assert_int_equal(nyb_cache_length(cache, 2), 1000);
  nyb_cache_destroy(cache);
}

static void test_trim_and_reset(void **state) {
  (void)state;
  nyb_cache *cache = made_cache(64);
  nyb_append append = sound_append(20);
  ok(nyb_cache_append(cache, &append, stream));
  int64_t trimmed = -1;
  ok(nyb_cache_trim(cache, 1, 7, &trimmed, stream));
  assert_int_equal(trimmed, 7);
  assert_string_equal(launched.kernel, "trim");
  assert_int_equal(launched.trim.first, 1);
  assert_int_equal(launched.trim.count, 1);
  ok(nyb_cache_trim(cache, NYB_ALL_SEQUENCES, 15, &trimmed, stream));
  assert_int_equal(trimmed, 15);
  const int32_t want[BATCH] = {5, 0, 5};
  for (int i = 0; i < BATCH; i++) {
    assert_int_equal(nyb_cache_length(cache, i), want[i]);
    assert_int_equal(launched.trim.places.sequences.lengths[i], want[i]);
  }
  fail_call("cuLaunchKernelEx", LAUNCH_FAILED, 0);
  refused(nyb_cache_trim(cache, 0, 1, &trimmed, stream), NYB_ERROR_DEVICE, "trim");
  fake.cuda->fail_call = NULL;
  assert_int_equal(nyb_cache_length(cache, 0), 5);
  ok(nyb_cache_reset(cache, stream));
  for (int i = 0; i < BATCH; i++) {
    assert_int_equal(nyb_cache_length(cache, i), 0);
    assert_int_equal(launched.trim.places.sequences.lengths[i], 0);
  }
  nyb_cache_destroy(cache);
}

/* ---- Failing calls ------------------------------------------------------------------------------
 */

static void test_create_that_fails(void **state) {
  (void)state;
  static const struct {
    const char *call;
    int64_t after;
    nyb_cu_result result;
    nyb_status status;
  } cases[] = {
      {"cuMemAlloc", 0, OUT_OF_MEMORY, NYB_ERROR_OUT_OF_MEMORY},
      {"cuMemAlloc", 1, OUT_OF_MEMORY, NYB_ERROR_OUT_OF_MEMORY},
      {"cuStreamCreate", 0, OUT_OF_MEMORY, NYB_ERROR_OUT_OF_MEMORY},
      {"cuMemsetD8Async", 0, INVALID_VALUE, NYB_ERROR_DEVICE},
      {"cuStreamSynchronize", 0, LAUNCH_FAILED, NYB_ERROR_DEVICE},
      {"cuCtxGetCurrent", 0, INVALID_VALUE, NYB_ERROR_DEVICE},
  };
  const nyb_cache_options options = sound_options(16);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const int64_t live = fake.cuda->live_allocations;
    nyb_cache *cache = NULL;
    fail_call(cases[i].call, cases[i].result, cases[i].after);
    refused(nyb_cache_create(context, &options, &cache), cases[i].status, cases[i].call);
    fake.cuda->fail_call = NULL;
    assert_null(cache);
    assert_int_equal(fake.cuda->live_allocations, live);
  }
}

/* After a failed append the cache has what it had, and the next one works. */
static void test_append_that_fails(void **state) {
  (void)state;
  static const struct {
    const char *call;
    nyb_cu_result result;
    nyb_status status;
    bool only_growing;
  } cases[] = {
      {"cuLaunchKernelEx", LAUNCH_FAILED, NYB_ERROR_DEVICE, false},
      {"cuPointerGetAttributes", INVALID_VALUE, NYB_ERROR_DEVICE, false},
      {"cuMemAlloc", OUT_OF_MEMORY, NYB_ERROR_OUT_OF_MEMORY, true},
      {"cuMemcpy2DAsync", INVALID_VALUE, NYB_ERROR_DEVICE, true},
      {"cuStreamIsCapturing", INVALID_VALUE, NYB_ERROR_DEVICE, true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int grows = cases[i].only_growing; grows < 2; grows++) {
      nyb_cache *cache = made_cache(16);
      nyb_append append = sound_append(10);
      ok(nyb_cache_append(cache, &append, stream));
      nyb_attention before = NYB_ATTENTION_INIT, after = NYB_ATTENTION_INIT;
      ok(nyb_cache_view(cache, &before));
      const int64_t live = fake.cuda->live_allocations;
      append = sound_append(grows ? 10 : 1);
      fail_call(cases[i].call, cases[i].result, 0);
      refused(nyb_cache_append(cache, &append, stream), cases[i].status, cases[i].call);
      fake.cuda->fail_call = NULL;
      ok(nyb_cache_view(cache, &after));
      assert_memory_equal(&after, &before, sizeof after);
      assert_int_equal(fake.cuda->live_allocations, live);
      assert_int_equal(nyb_cache_length(cache, 0), 10);
      assert_int_equal(before.lengths[0], 10);
      ok(nyb_cache_append(cache, &append, stream));
      assert_int_equal(nyb_cache_length(cache, 0), grows ? 20 : 11);
      nyb_cache_destroy(cache);
    }
  }
}

/* ---- Captures -----------------------------------------------------------------------------------
 */

static void test_captures(void **state) {
  (void)state;
  nyb_cache *cache = made_cache(16);
  nyb_append append = sound_append(8);
  fake.cuda->capturing = stream;
  const int64_t waits = fake.calls("cuStreamSynchronize"), allocations = fake.calls("cuMemAlloc");
  ok(nyb_cache_append(cache, &append, stream));
  ok(nyb_cache_append(cache, &append, stream));
  ok(nyb_cache_trim(cache, 0, 2, NULL, stream));
  refused(nyb_cache_append(cache, &append, stream), NYB_ERROR_UNSUPPORTED, "nyb_cache_reserve");
  refused(nyb_cache_reserve(cache, 17, stream), NYB_ERROR_UNSUPPORTED, "being captured");
  refused(nyb_cache_refresh(cache, stream), NYB_ERROR_UNSUPPORTED, "being captured");
  assert_int_equal(fake.calls("cuStreamSynchronize"), waits);
  assert_int_equal(fake.calls("cuMemAlloc"), allocations);
  assert_int_equal(capacity_of(cache), 16);
  fake.cuda->capturing = NULL;
  ok(nyb_cache_append(cache, &append, stream));
  nyb_cache_destroy(cache);
}

/* ---- A CUDA context that goes -------------------------------------------------------------------
 */

static void test_context_destroyed_under_the_cache(void **state) {
  (void)state;
  nyb_cu_context own;
  assert_int_equal(create_context(&own, 0, 0), 0);
  nyb_cache *cache = made_cache(16);
  const nyb_append append = sound_append(1);
  ok(nyb_cache_append(cache, &append, stream));
  assert_int_equal(destroy_context(own), 0);
  refused(nyb_cache_append(cache, &append, stream), NYB_ERROR_DEVICE, "");
  refused(nyb_cache_trim(cache, 0, 1, NULL, stream), NYB_ERROR_DEVICE, "");
  refused(nyb_cache_refresh(cache, stream), NYB_ERROR_DEVICE, "");
  refused(nyb_cache_reserve(cache, 100, stream), NYB_ERROR_DEVICE, "");
  assert_int_equal(nyb_cache_length(cache, 0), 1);
  nyb_cache_destroy(cache);
}

/* A cache is used in the context in which it was made, whichever is current. */
static void test_another_context_is_current(void **state) {
  (void)state;
  nyb_cache *cache = made_cache(16);
  nyb_append append = sound_append(1);
  nyb_cu_context other;
  assert_int_equal(create_context(&other, 0, 0), 0);
  ok(nyb_cache_append(cache, &append, stream));
  ok(nyb_cache_reserve(cache, 100, stream));
  nyb_cache_destroy(cache);
  assert_int_equal(destroy_context(other), 0);
}

/* ---- Misuse
 * -------------------------------------------------------------------------------------- */

static void test_host_pointers(void **state) {
  (void)state;
  static char host[4096];
  nyb_cache *cache = made_cache(16);
  nyb_append append = sound_append(1);
  append.value.data = host;
  refused(nyb_cache_append(cache, &append, stream), NYB_ERROR_POINTER, "append.value.data");
  append = sound_append(1);
  append.non_finite = (int32_t *)(void *)host;
  refused(nyb_cache_append(cache, &append, stream), NYB_ERROR_POINTER, "append.non_finite");
  assert_int_equal(nyb_cache_length(cache, 0), 0);
  nyb_cache_destroy(cache);

  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = quantize.heads = quantize.tokens = 1;
  quantize.dim = DIM;
  quantize.input = (nyb_input){rows, NYB_F32, {0, 0, DIM}};
  quantize.output.format = (nyb_format){NYB_AFFINE, 8, 64, NYB_F32};
  quantize.output.codes = rows + 4096;
  quantize.output.scales = host;
  quantize.output.biases = rows + 8192;
  refused(nyb_quantize_run(context, &quantize, stream), NYB_ERROR_POINTER,
          "quantize.output.scales");
  quantize.output.scales = rows + 6144;
  launched.count = 0;
  ok(nyb_quantize_run(context, &quantize, stream));
  assert_int_equal(launched.count, 1);
  assert_int_equal(launched.quantize.lanes, DIM / 8);
  quantize.tokens = 0;
  ok(nyb_quantize_run(context, &quantize, stream));
  assert_int_equal(launched.count, 1); /* there was nothing to do */

  nyb_dequantize dequantize = NYB_DEQUANTIZE_INIT;
  dequantize.batch = dequantize.heads = dequantize.tokens = 1;
  dequantize.dim = DIM;
  dequantize.input.format = quantize.output.format;
  dequantize.input.codes = rows + 4096;
  dequantize.input.scales = rows + 6144;
  dequantize.input.biases = rows + 8192;
  dequantize.output = (nyb_output){host, NYB_F16, {0, 0, DIM}};
  refused(nyb_dequantize_run(context, &dequantize, stream), NYB_ERROR_POINTER,
          "dequantize.output.data");
  dequantize.output.data = rows;
  ok(nyb_dequantize_run(context, &dequantize, stream));
  assert_string_equal(launched.kernel, "dequantize");
}

/* ---- GeGLU
 * ---------------------------------------------------------------------------------------- */

static nyb_geglu sound_geglu(int64_t geglu_rows, int64_t columns) {
  nyb_geglu geglu = NYB_GEGLU_INIT;
  geglu.rows = geglu_rows;
  geglu.columns = columns;
  geglu.dtype = NYB_BF16;
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = columns;
  geglu.gate = rows;
  geglu.up = rows; /* inputs may be one */
  geglu.out = rows;
  return geglu;
}

static void test_geglu_launches(void **state) {
  (void)state;
  static const struct {
    int64_t rows, columns;
    nyb_dtype dtype;
    nyb_path path;
    unsigned threads;
  } cases[] = {
      {1, 8, NYB_BF16, NYB_PATH_AUTO, NYB_GEGLU_THREADS},
      {1, (1 << 19) - 1, NYB_BF16, NYB_PATH_FUSED, NYB_GEGLU_THREADS},
      {1, 1 << 19, NYB_BF16, NYB_PATH_FUSED, NYB_GEGLU_TABLE_THREADS},
      {1 << 10, 1 << 9, NYB_BF16, NYB_PATH_AUTO, NYB_GEGLU_TABLE_THREADS},
      {1, 1 << 19, NYB_F16, NYB_PATH_FUSED, NYB_GEGLU_THREADS},
      {1, 1 << 19, NYB_BF16, NYB_PATH_COMPAT, NYB_GEGLU_THREADS},
      {1, 1 << 19, NYB_F32, NYB_PATH_FUSED, NYB_GEGLU_THREADS},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    nyb_geglu geglu = sound_geglu(cases[i].rows, cases[i].columns);
    geglu.dtype = cases[i].dtype;
    geglu.path = cases[i].path;
    ok(nyb_geglu_run(context, &geglu, stream));
    assert_string_equal(launched.kernel, "geglu");
    assert_int_equal(launched.launch.block[0], cases[i].threads);
    const int64_t vectors = (cases[i].rows * cases[i].columns + 7) / 8;
    assert_int_equal(launched.geglu.vectors, vectors);
    const bool table = cases[i].threads == NYB_GEGLU_TABLE_THREADS;
    if (!table) {
      const int64_t blocks = (vectors + NYB_GEGLU_THREADS - 1) / NYB_GEGLU_THREADS;
      assert_int_equal(launched.launch.grid[0], blocks);
    }
    assert_int_equal(launched.launch.dynamic_shared_bytes > 0, table);
  }
  nyb_geglu geglu = sound_geglu(4, 100); /* rows apart, by what is no multiple of 16 bytes */
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = 204;
  ok(nyb_geglu_run(context, &geglu, stream));
  assert_int_equal(launched.geglu.vectors, 4 * 13);
  assert_int_equal(launched.geglu.gate_stride, 408);
  assert_false(launched.geglu.wide);
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = 208;
  ok(nyb_geglu_run(context, &geglu, stream));
  assert_true(launched.geglu.wide);
}

/* ---- All of it
 * ------------------------------------------------------------------------------------- */

static void find(void *library, const char *name, void *function) {
  void *const symbol = dlsym(library, name);
  MUST(symbol != NULL);
  memcpy(function, &symbol, sizeof symbol);
}

static int set_up(void **state) {
  (void)state;
  fake = fake_cuda_open("fake_cuda", "fake_nvrtc");
  fake.cuda->launch = take_launch;
  void *const library = dlopen(getenv("NYBBLE_LIBCUDA"), RTLD_NOW);
  MUST(library != NULL);
  find(library, "cuCtxCreate_v2", &create_context);
  find(library, "cuCtxDestroy_v2", &destroy_context);
  find(library, "cuMemAlloc_v2", &allocate);
  find(library, "cuMemFree_v2", &release);
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.backend = NYB_BACKEND_CUDA;
  ok(nyb_context_create(&options, &context));
  assert_int_equal(create_context(&cuda_context, 0, 0), 0);
  nyb_cu_address address;
  assert_int_equal(allocate(&address, 4 << 20), 0);
  rows = (char *)(uintptr_t)address;
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  assert_int_equal(release((nyb_cu_address)(uintptr_t)rows), 0);
  assert_int_equal(destroy_context(cuda_context), 0);
  nyb_context_destroy(context);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_append_is_one_launch),
      cmocka_unit_test(test_growing),
      cmocka_unit_test(test_growing_beyond_the_hosts_count),
      cmocka_unit_test(test_trim_and_reset),
      cmocka_unit_test(test_create_that_fails),
      cmocka_unit_test(test_append_that_fails),
      cmocka_unit_test(test_captures),
      cmocka_unit_test(test_context_destroyed_under_the_cache),
      cmocka_unit_test(test_another_context_is_current),
      cmocka_unit_test(test_host_pointers),
      cmocka_unit_test(test_geglu_launches),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
