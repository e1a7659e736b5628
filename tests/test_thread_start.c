/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that cannot be started: this program stands between the library and pthread_create
 * (linked with --wrap) and lets it fail where it likes. A context is then refused with a sentence,
 * in time and without a loss, and all others work on. */
#define _DEFAULT_SOURCE /* alarm, setenv */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "nybble.h"

#if defined(NYB_TEST_WRAPS_PTHREAD_CREATE)

/* The call that fails, counted from 1, with all after it; 0: none. */
static int64_t fail_from;
static _Atomic int64_t starts;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument) {
  const int64_t call = ++starts;
  if (fail_from != 0 && call >= fail_from) return EAGAIN;
  return __real_pthread_create(thread, attributes, start, argument);
}

static void let_starts_fail_from(int64_t call) {
  starts = 0;
  fail_from = call;
}

typedef struct heap {
  int64_t live;
} heap;

static void *heap_allocate(void *user_data, size_t bytes, size_t alignment) {
  ((heap *)user_data)->live++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void heap_release(void *user_data, void *memory) {
  ((heap *)user_data)->live--;
  free(memory);
}

/* A call that takes several threads where the context has them. */
static void expect_works(nyb_context *context) {
  enum { ROWS = 64, COLUMNS = 4096 };
  static float gate[COLUMNS], out[ROWS * COLUMNS];
  for (int i = 0; i < COLUMNS; i++) gate[i] = 1;
  memset(out, 0xff, sizeof out);
  const nyb_geglu geglu = {.struct_size = sizeof geglu,
                           .rows = ROWS,
                           .columns = COLUMNS,
                           .dtype = NYB_F32,
                           .gate = gate,
                           .up = gate,
                           .out = out,
                           .out_stride = COLUMNS};
  assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_OK);
  for (int i = 0; i < ROWS * COLUMNS; i++) assert_float_equal(out[i], 0.841192f, 1e-5f);
}

static nyb_context *create(const nyb_context_options *options) {
  nyb_context *context = NULL;
  const nyb_status status = nyb_context_create(options, &context);
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  return context;
}

static void expect_refused(const nyb_context_options *options, const char *words) {
  nyb_context *const untouched = (nyb_context *)&fail_from;
  nyb_context *context = untouched;
  assert_int_equal(nyb_context_create(options, &context), NYB_ERROR_OUT_OF_MEMORY);
  if (strstr(nyb_last_error(), words) == NULL) {
    fail_msg("\"%s\" does not say \"%s\"", nyb_last_error(), words);
  }
  assert_ptr_equal(context, untouched);
}

static bool has_pool(void) {
  const nyb_context_options options = {.struct_size = sizeof options, .threads = 2};
  nyb_context *context = create(&options);
  const int64_t threads = nyb_context_threads(context); /* 1 where there is no pool */
  nyb_context_destroy(context);
  return threads > 1;
}

static void test_no_thread_starts(void **state) {
  (void)state;
  static const int64_t counts[] = {2, 3, 7, 64};
  for (int i = 0; i < 4; i++) {
    const int64_t threads = counts[i];
    heap h = {0};
    const nyb_context_options options = {
        .struct_size = sizeof options,
        .threads = threads,
        .allocator = {.allocate = heap_allocate, .release = heap_release, .user_data = &h}};
    char words[64];
    snprintf(words, sizeof words, "no pool of %d threads", (int)threads);
    /* The first, one in the middle, the last. */
    const int64_t failing[] = {1, threads / 2, threads - 1};
    for (int k = 0; k < 3; k++) {
      let_starts_fail_from(failing[k]);
      expect_refused(&options, words);
      assert_true(starts == failing[k]); /* it does not go on after that */
      assert_int_equal(h.live, 0);
    }
    let_starts_fail_from(0); /* there is room again */
    nyb_context *context = create(&options);
    expect_works(context);
    nyb_context_destroy(context);
    assert_int_equal(h.live, 0);
  }
}

/* Threads that nobody asked for by the option fail no other way. */
static void test_threads_of_the_environment(void **state) {
  (void)state;
  setenv("NYBBLE_THREADS", "5", 1);
  let_starts_fail_from(1);
  expect_refused(NULL, "no pool of 5 threads");
  unsetenv("NYBBLE_THREADS");
}

/* Contexts that need no thread are made; those that have theirs go on. */
static void calling_thread_only(void *user_data, int64_t task_count, nyb_task task,
                                void *task_data) {
  ++*(int64_t *)user_data;
  for (int64_t i = 0; i < task_count; i++) task(task_data, i);
}

static void test_others_work_on(void **state) {
  (void)state;
  int64_t calls = 0;
  const nyb_context_options pooled = {.struct_size = sizeof pooled, .threads = 4};
  const nyb_context_options alone = {.struct_size = sizeof alone, .threads = 1};
  const nyb_context_options own = {.struct_size = sizeof own,
                                   .threads = 4,
                                   .parallel_for = calling_thread_only,
                                   .parallel_for_data = &calls};
  let_starts_fail_from(0);
  nyb_context *before = create(&pooled);
  let_starts_fail_from(1);
  expect_refused(&pooled, "no pool of 4 threads");
  expect_works(before);
  const nyb_context_options *const options[] = {&alone, &own};
  for (int i = 0; i < 2; i++) {
    nyb_context *context = create(options[i]);
    expect_works(context);
    nyb_context_destroy(context);
  }
  assert_true(calls > 0);
  assert_int_equal(starts, 1); /* of the refused one */
  nyb_context_destroy(before);
}

int main(void) {
  unsetenv("NYBBLE_THREADS");
  if (!has_pool()) {
    printf("skipped: a build without a pool of threads\n");
    return 77;
  }
  alarm(120); /* a start that hangs ends here */
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_thread_starts),
      cmocka_unit_test(test_threads_of_the_environment),
      cmocka_unit_test(test_others_work_on),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

#else
int main(void) {
  printf("skipped: this linker cannot stand before pthread_create\n");
  return 77;
}
#endif
