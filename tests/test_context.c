/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: options and environment that are right and wrong, the kernel table, counters, errors.
 */
#define _DEFAULT_SOURCE /* setenv, fork, alarm */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "nybble.h"

static const char *const levers[] = {"NYBBLE_ISA", "NYBBLE_THREADS", "NYBBLE_PATH", "NYBBLE_GEGLU"};
enum { LEVERS = sizeof levers / sizeof levers[0] };

static int clear_environment(void **state) {
  (void)state;
  for (int i = 0; i < LEVERS; i++) unsetenv(levers[i]);
  return 0;
}

static nyb_context *create(const nyb_context_options *options) {
  nyb_context *context = NULL;
  const nyb_status status = nyb_context_create(options, &context);
  if (status != NYB_OK) fail_msg("%s: %s", nyb_status_name(status), nyb_last_error());
  assert_non_null(context);
  return context;
}

/* Fails with that status and a sentence that has the words; *context stays as it was. */
static void expect_refused(const nyb_context_options *options, nyb_status want, const char *words) {
  nyb_context *const untouched = (nyb_context *)&clear_environment;
  nyb_context *context = untouched;
  const nyb_status status = nyb_context_create(options, &context);
  if (status != want) fail_msg("got %s, want %s", nyb_status_name(status), nyb_status_name(want));
  if (strstr(nyb_last_error(), words) == NULL) {
    fail_msg("\"%s\" does not say \"%s\"", nyb_last_error(), words);
  }
  assert_ptr_equal(context, untouched);
}

static bool isa_runs_here(nyb_isa isa) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    assert_int_equal(nyb_kernel_at(NULL, i, &kernel), NYB_OK);
    if (kernel.isa == isa && kernel.runs_here) return true;
  }
  return false;
}

/* ---- Options ------------------------------------------------------------------------------ */

static void test_defaults(void **state) {
  (void)state;
  const nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  nyb_context *by_null = create(NULL), *by_init = create(&options);
  assert_int_equal(nyb_context_isa(by_null), nyb_context_isa(by_init));
  assert_int_equal(nyb_context_threads(by_null), nyb_context_threads(by_init));
  assert_true(nyb_context_threads(by_null) >= 1);
  assert_true(isa_runs_here(nyb_context_isa(by_null)));
  nyb_context_destroy(by_null);
  nyb_context_destroy(by_init);
  nyb_context_destroy(NULL);
}

static void test_wrong_options(void **state) {
  (void)state;
  assert_int_equal(nyb_context_create(NULL, NULL), NYB_ERROR_NULL);
  assert_non_null(strstr(nyb_last_error(), "context is NULL"));
  nyb_context_options options = {.struct_size = 0};
  expect_refused(&options, NYB_ERROR_STRUCT_SIZE, "options.struct_size is 0");
  options.struct_size = sizeof options - 1;
  expect_refused(&options, NYB_ERROR_STRUCT_SIZE, "options.struct_size is");
  options = (nyb_context_options){.struct_size = sizeof options, .isa = (nyb_isa)5};
  expect_refused(&options, NYB_ERROR_ENUM, "options.isa is 5");
  options.isa = (nyb_isa)-1;
  expect_refused(&options, NYB_ERROR_ENUM, "options.isa is -1");
  options = (nyb_context_options){.struct_size = sizeof options, .threads = -1};
  expect_refused(&options, NYB_ERROR_VALUE, "options.threads is -1");
  options.threads = INT64_MAX;
  expect_refused(&options, NYB_ERROR_VALUE, "options.threads is 9223372036854775807");
}

/* A caller of a later version: more bytes, known only if they are 0. */
static void test_larger_struct(void **state) {
  (void)state;
  struct {
    nyb_context_options options;
    int64_t later[4];
  } grown = {.options = {.struct_size = sizeof grown, .threads = 1}};
  nyb_context_destroy(create(&grown.options));
  grown.later[3] = 1;
  expect_refused(&grown.options, NYB_ERROR_STRUCT_SIZE, "options.struct_size is");
  grown.later[3] = 0;
  grown.options.struct_size = (size_t)1 << 40; /* absurd: refused before it is looked through */
  expect_refused(&grown.options, NYB_ERROR_STRUCT_SIZE, "options.struct_size is");
}

typedef struct heap {
  int64_t live, calls, fail_at; /* fail_at: the call that returns NULL, or -1 */
} heap;

static void *heap_allocate(void *user_data, size_t bytes, size_t alignment) {
  heap *h = user_data;
  assert_true(bytes > 0);
  assert_true(alignment != 0 && (alignment & (alignment - 1)) == 0);
  if (h->calls++ == h->fail_at) return NULL;
  h->live++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void heap_release(void *user_data, void *memory) {
  assert_non_null(memory);
  ((heap *)user_data)->live--;
  free(memory);
}

static void test_allocator(void **state) {
  (void)state;
  heap h = {.fail_at = -1};
  nyb_context_options options = {
      .struct_size = sizeof options,
      .threads = 2,
      .allocator = {.allocate = heap_allocate, .release = heap_release, .user_data = &h}};
  nyb_context_destroy(create(&options));
  const int64_t needed = h.calls;
  assert_true(needed > 0);
  assert_int_equal(h.live, 0);
  for (int64_t i = 0; i < needed; i++) {
    h = (heap){.fail_at = i};
    expect_refused(&options, NYB_ERROR_OUT_OF_MEMORY, "allocator");
    assert_int_equal(h.live, 0);
  }
  options.allocator.release = NULL;
  expect_refused(&options, NYB_ERROR_NULL, "allocate and release");
  options.allocator = (nyb_allocator){.release = heap_release};
  expect_refused(&options, NYB_ERROR_NULL, "allocate and release");
}

static void count_tasks(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  *(int64_t *)user_data += task_count;
  for (int64_t i = task_count - 1; i >= 0; i--) task(task_data, i); /* any order will do */
}

/* Large enough for several tasks. */
static void quantize_something(nyb_context *context, uint32_t *codes) {
  enum { TOKENS = 4096, DIM = 128 };
  static float input[TOKENS * DIM], scales[TOKENS], biases[TOKENS];
  for (int i = 0; i < TOKENS * DIM; i++) input[i] = (float)(i * 7 % 101);
  nyb_quantize call = NYB_QUANTIZE_INIT;
  call.batch = call.heads = 1;
  call.tokens = TOKENS;
  call.dim = DIM;
  call.input = (nyb_input){.data = input, .dtype = NYB_F32, .stride = {0, 0, DIM}};
  call.output = (nyb_stored_output){
      .format = {.scheme = NYB_AFFINE, .bits = 4, .group_size = 128, .dtype = NYB_F32},
      .codes = codes,
      .scales = scales,
      .biases = biases,
      .codes_stride = {0, 0, DIM / 8},
      .scales_stride = {0, 0, 1},
      .biases_stride = {0, 0, 1}};
  assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
}

/* What a context says that it uses of so many threads, where the caller brings no parallel-for. */
static int64_t threads_of_pool(int64_t asked) {
#if defined(NYB_TEST_UNPOOLED)
  (void)asked;
  return 1;
#else
  return asked;
#endif
}

static void test_threads_of_its_own(void **state) {
  (void)state;
  enum { WORDS = 4096 * 16 };
  uint32_t *alone = calloc(WORDS, 4), *shared = calloc(WORDS, 4);
  for (int64_t threads = 1; threads <= 3; threads += 2) {
    const nyb_context_options options = {.struct_size = sizeof options, .threads = threads};
    nyb_context *context = create(&options);
    assert_int_equal(nyb_context_threads(context), threads_of_pool(threads));
    quantize_something(context, threads == 1 ? alone : shared);
    nyb_context_destroy(context);
  }
  assert_memory_equal(alone, shared, WORDS * 4);
  free(alone);
  free(shared);
}

/* A forked process has none of the pool's threads; its calls must not wait for them. */
static void test_forked_process(void **state) {
  (void)state;
  enum { WORDS = 4096 * 16 };
  uint32_t *parents = calloc(WORDS, 4), *childs = calloc(WORDS, 4);
  const nyb_context_options options = {.struct_size = sizeof options, .threads = 3};
  nyb_context *context = create(&options);
  quantize_something(context, parents);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    alarm(120);
    quantize_something(context, childs);
    const bool same = memcmp(childs, parents, WORDS * 4) == 0;
    nyb_context_destroy(context);
    _exit(same ? 0 : 1);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
  quantize_something(context, childs);
  assert_memory_equal(childs, parents, WORDS * 4);
  nyb_context_destroy(context);
  free(parents);
  free(childs);
}

static void test_no_context(void **state) {
  (void)state;
  assert_int_equal(nyb_context_isa(NULL), NYB_ISA_AUTO);
  assert_int_equal(nyb_context_backend(NULL), NYB_BACKEND_CPU);
  assert_int_equal(nyb_context_threads(NULL), 0);
}

static void test_parallel_for_of_the_caller(void **state) {
  (void)state;
  enum { WORDS = 4096 * 16 };
  int64_t tasks = 0;
  uint32_t *alone = calloc(WORDS, 4), *shared = calloc(WORDS, 4);
  nyb_context_options options = {.struct_size = sizeof options, .threads = 1};
  nyb_context *context = create(&options);
  quantize_something(context, alone);
  nyb_context_destroy(context);
  options.parallel_for = count_tasks;
  options.parallel_for_data = &tasks;
  context = create(&options);
  quantize_something(context, shared); /* 1: the calling thread only */
  nyb_context_destroy(context);
  assert_int_equal(tasks, 0);
  assert_memory_equal(alone, shared, WORDS * 4);
  memset(shared, 0, WORDS * 4);
  options.threads = 8;
  context = create(&options);
  assert_int_equal(nyb_context_threads(context), 8);
  quantize_something(context, shared);
  nyb_context_destroy(context);
  assert_true(tasks > 1);
  assert_memory_equal(alone, shared, WORDS * 4);
  free(alone);
  free(shared);
}

/* ---- ISA and environment ------------------------------------------------------------------ */

static void test_every_isa(void **state) {
  (void)state;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    const nyb_context_options options = {.struct_size = sizeof options, .isa = isa, .threads = 1};
    if (!isa_runs_here(isa)) {
      expect_refused(&options, NYB_ERROR_UNSUPPORTED, nyb_isa_name(isa));
      assert_non_null(strstr(nyb_last_error(), "options.isa"));
      setenv("NYBBLE_ISA", nyb_isa_name(isa), 1);
      expect_refused(NULL, NYB_ERROR_UNSUPPORTED, "NYBBLE_ISA");
      unsetenv("NYBBLE_ISA");
      continue;
    }
    nyb_context *context = create(&options);
    assert_int_equal(nyb_context_isa(context), isa);
    nyb_context_destroy(context);
    setenv("NYBBLE_ISA", nyb_isa_name(isa), 1);
    context = create(NULL);
    assert_int_equal(nyb_context_isa(context), isa);
    nyb_context_destroy(context);
    unsetenv("NYBBLE_ISA");
  }
  assert_true(isa_runs_here(NYB_ISA_SCALAR));
}

static void test_option_beats_environment(void **state) {
  (void)state;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = NYB_ISA_SCALAR, .threads = 3};
  setenv("NYBBLE_ISA", "no-such-isa", 1); /* not even looked at */
  setenv("NYBBLE_THREADS", "5", 1);
  nyb_context *context = create(&options);
  assert_int_equal(nyb_context_isa(context), NYB_ISA_SCALAR);
  assert_int_equal(nyb_context_threads(context), threads_of_pool(3));
  nyb_context_destroy(context);
}

static void test_bogus_environment(void **state) {
  (void)state;
  static const struct {
    const char *lever, *word;
  } bogus[] = {
      {"NYBBLE_ISA", "avx1024"},
      {"NYBBLE_ISA", "AVX2"},
      {"NYBBLE_ISA", "avx2 "},
      {"NYBBLE_ISA", "?"},
      {"NYBBLE_ISA", "2"},
      {"NYBBLE_PATH", "fast"},
      {"NYBBLE_PATH", "Fused"},
      {"NYBBLE_PATH", "1"},
      {"NYBBLE_GEGLU", "compat,"},
      {"NYBBLE_GEGLU", "exact"},
      {"NYBBLE_THREADS", "0"},
      {"NYBBLE_THREADS", "-2"},
      {"NYBBLE_THREADS", "two"},
      {"NYBBLE_THREADS", "2x"},
      {"NYBBLE_THREADS", "1e3"},
      {"NYBBLE_THREADS", " "},
      {"NYBBLE_THREADS", "99999"},
      {"NYBBLE_THREADS", "2.0"},
      {"NYBBLE_THREADS", "99999999999999999999"},
  };
  for (size_t i = 0; i < sizeof bogus / sizeof bogus[0]; i++) {
    char words[96];
    snprintf(words, sizeof words, "%s is \"%s\"", bogus[i].lever, bogus[i].word);
    setenv(bogus[i].lever, bogus[i].word, 1);
    expect_refused(NULL, NYB_ERROR_ENVIRONMENT, words);
    unsetenv(bogus[i].lever);
  }
  /* A long word neither overflows the sentence nor fills it. */
  char longest[4096];
  memset(longest, 'x', sizeof longest);
  longest[sizeof longest - 1] = '\0';
  setenv("NYBBLE_ISA", longest, 1);
  expect_refused(NULL, NYB_ERROR_ENVIRONMENT, "it must be scalar");
}

static void test_good_environment(void **state) {
  (void)state;
  for (int i = 0; i < LEVERS; i++) setenv(levers[i], "", 1); /* empty is unset */
  nyb_context_destroy(create(NULL));
  for (int i = 0; i < LEVERS; i++) setenv(levers[i], i == 1 ? "7" : "auto", 1);
  nyb_context *context = create(NULL);
  assert_int_equal(nyb_context_threads(context), threads_of_pool(7));
  nyb_context_destroy(context);
}

/* ---- Kernels and counters ----------------------------------------------------------------- */

static void test_kernel_table(void **state) {
  (void)state;
  const int64_t count = nyb_kernel_count();
  assert_true(count > 0);
  for (int64_t i = 0; i < count; i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    char name[96];
    assert_int_equal(nyb_kernel_at(NULL, i, &kernel), NYB_OK);
    snprintf(name, sizeof name, "%s_%s_%s", kernel.operation, kernel.format,
             nyb_isa_name(kernel.isa));
    assert_string_equal(kernel.name, name);
    assert_int_equal(kernel.runs_here, isa_runs_here(kernel.isa));
    assert_int_equal(kernel.reason[0] == '\0', kernel.runs_here);
    assert_int_equal(kernel.calls, 0);
    for (int64_t j = 0; j < i; j++) {
      nyb_kernel other = NYB_KERNEL_INIT;
      assert_int_equal(nyb_kernel_at(NULL, j, &other), NYB_OK);
      assert_string_not_equal(kernel.name, other.name);
    }
  }
  nyb_kernel kernel = NYB_KERNEL_INIT;
  assert_int_equal(nyb_kernel_at(NULL, -1, &kernel), NYB_ERROR_VALUE);
  assert_non_null(strstr(nyb_last_error(), "index is -1"));
  assert_int_equal(nyb_kernel_at(NULL, count, &kernel), NYB_ERROR_VALUE);
  assert_int_equal(nyb_kernel_at(NULL, 0, NULL), NYB_ERROR_NULL);
  kernel.struct_size = 8;
  assert_int_equal(nyb_kernel_at(NULL, 0, &kernel), NYB_ERROR_STRUCT_SIZE);
}

/* Every kernel of every operation has a scalar sibling: there is always one to fall back to. */
static void test_scalar_serves_everything(void **state) {
  (void)state;
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    bool found = false;
    assert_int_equal(nyb_kernel_at(NULL, i, &kernel), NYB_OK);
    if (kernel.isa == NYB_ISA_CUDA) continue; /* a backend of its own */
    for (int64_t j = 0; j < nyb_kernel_count(); j++) {
      nyb_kernel other = NYB_KERNEL_INIT;
      assert_int_equal(nyb_kernel_at(NULL, j, &other), NYB_OK);
      found =
          found || (other.isa == NYB_ISA_SCALAR && strcmp(other.operation, kernel.operation) == 0 &&
                    strcmp(other.format, kernel.format) == 0);
    }
    if (!found) fail_msg("%s has no scalar sibling", kernel.name);
  }
}

static int64_t calls_of(const nyb_context *context, const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    assert_int_equal(nyb_kernel_at(context, i, &kernel), NYB_OK);
    if (strcmp(kernel.name, name) == 0) return kernel.calls;
  }
  fail_msg("no kernel %s", name);
  return -1;
}

static void test_counters(void **state) {
  (void)state;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = NYB_ISA_SCALAR, .threads = 1};
  uint32_t *codes = calloc(4096 * 16, 4);
  nyb_context *context = create(&options), *other = create(&options);
  nyb_counters counters = NYB_COUNTERS_INIT;
  quantize_something(context, codes);
  quantize_something(context, codes);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.quantize, 2);
  assert_int_equal(counters.dequantize, 0);
  assert_int_equal(calls_of(context, "quantize_affine4_scalar"), 2);
  assert_int_equal(calls_of(context, "quantize_affine8_scalar"), 0);
  assert_int_equal(calls_of(other, "quantize_affine4_scalar"), 0);
  nyb_counters_clear(context);
  nyb_counters_clear(NULL);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.quantize, 0);
  assert_int_equal(calls_of(context, "quantize_affine4_scalar"), 0);
  assert_int_equal(nyb_counters_get(NULL, &counters), NYB_ERROR_NULL);
  assert_int_equal(nyb_counters_get(context, NULL), NYB_ERROR_NULL);
  counters.struct_size = 1;
  assert_int_equal(nyb_counters_get(context, &counters), NYB_ERROR_STRUCT_SIZE);
  nyb_context_destroy(context);
  nyb_context_destroy(other);
  free(codes);
}

/* ---- Names and errors --------------------------------------------------------------------- */

static void test_names(void **state) {
  (void)state;
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", NYB_VERSION_MAJOR, NYB_VERSION_MINOR,
           NYB_VERSION_PATCH);
  assert_string_equal(nyb_version(), version);
  assert_string_equal(nyb_status_name(NYB_OK), "NYB_OK");
  assert_string_equal(nyb_status_name(NYB_ERROR_HEADS), "NYB_ERROR_HEADS");
  for (int status = 0; status <= NYB_ERROR_POINTER; status++) {
    assert_string_not_equal(nyb_status_name((nyb_status)status), "NYB_ERROR_?");
  }
  assert_string_equal(nyb_status_name((nyb_status)1000), "NYB_ERROR_?");
  assert_string_equal(nyb_status_name((nyb_status)-1), "NYB_ERROR_?");
  assert_string_equal(nyb_isa_name(NYB_ISA_AVX512), "avx512");
  assert_string_equal(nyb_isa_name((nyb_isa)99), "?");
  assert_int_equal(nyb_dtype_bytes(NYB_F32), 4);
  assert_int_equal(nyb_dtype_bytes(NYB_F16), 2);
  assert_int_equal(nyb_dtype_bytes(NYB_BF16), 2);
  assert_int_equal(nyb_dtype_bytes((nyb_dtype)0), 0);
  assert_non_null(nyb_cpu_features());
}

static void *fail_in_a_thread(void *data) {
  assert_string_equal(nyb_last_error(), ""); /* before this thread's first failure */
  nyb_kernel kernel = NYB_KERNEL_INIT;
  nyb_kernel_at(NULL, -77, &kernel);
  snprintf(data, 128, "%s", nyb_last_error());
  return NULL;
}

/* The sentence is the thread's own, and outlives calls that succeed. */
static void test_last_error(void **state) {
  (void)state;
  nyb_kernel kernel = NYB_KERNEL_INIT;
  char there[128];
  pthread_t thread;
  nyb_kernel_at(NULL, -55, &kernel);
  assert_int_equal(pthread_create(&thread, NULL, fail_in_a_thread, there), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_non_null(strstr(there, "-77"));
  assert_int_equal(nyb_kernel_at(NULL, 0, &kernel), NYB_OK);
  assert_non_null(strstr(nyb_last_error(), "-55"));
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, clear_environment, clear_environment)

int main(void) {
  const struct CMUnitTest tests[] = {
      CASE(test_defaults),           CASE(test_wrong_options),
      CASE(test_larger_struct),      CASE(test_allocator),
      CASE(test_threads_of_its_own), CASE(test_forked_process),
      CASE(test_no_context),         CASE(test_parallel_for_of_the_caller),
      CASE(test_every_isa),          CASE(test_option_beats_environment),
      CASE(test_bogus_environment),  CASE(test_good_environment),
      CASE(test_kernel_table),       CASE(test_scalar_serves_everything),
      CASE(test_counters),           CASE(test_names),
      CASE(test_last_error),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
