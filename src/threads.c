/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sched.h>
#endif
#include <unistd.h>

#include "threads.h"

int64_t nyb_processor_count(void) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    return CPU_COUNT(&allowed);
  }
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? online : 1;
}

static void run_in_turn(int64_t task_count, nyb_task task, void *task_data) {
  for (int64_t i = 0; i < task_count; i++) task(task_data, i);
}

#if defined(NYB_HAVE_PTHREADPOOL)
#include <pthread.h>
#include <pthreadpool.h>
#include <stdatomic.h>

static void *wait_for_the_others(void *barrier) {
  pthread_mutex_lock(barrier);
  pthread_mutex_unlock(barrier);
  return NULL;
}

/* pthreadpool waits for ever for a thread that could not be started. So that many are started here
 * first, all alive at once, and ended again. */
static bool can_start(int64_t count) {
  pthread_t started[NYB_MAX_THREADS];
  pthread_mutex_t gate;
  if (count > NYB_MAX_THREADS || pthread_mutex_init(&gate, NULL) != 0) return false;
  pthread_mutex_lock(&gate);
  int64_t running = 0;
  while (running < count &&
         pthread_create(&started[running], NULL, wait_for_the_others, &gate) == 0) {
    running++;
  }
  pthread_mutex_unlock(&gate);
  for (int64_t i = 0; i < running; i++) pthread_join(started[i], NULL);
  pthread_mutex_destroy(&gate);
  return running == count;
}

/* Forks that lie between this process and the one that made the first pool. */
static _Atomic int64_t forks;

static void count_fork(void) { atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

static bool is_alive(const nyb_pool *pool) {
  return pool->threads != NULL && pool->forks == atomic_load_explicit(&forks, memory_order_relaxed);
}

bool nyb_has_pool(void) { return true; }

bool nyb_pool_create(nyb_pool *pool, int64_t threads) {
  static pthread_once_t watched = PTHREAD_ONCE_INIT;
  pthread_once(&watched, watch_forks);
  pool->forks = atomic_load_explicit(&forks, memory_order_relaxed);
  pool->threads = can_start(threads - 1) ? pthreadpool_create((size_t)threads) : NULL;
  return pool->threads != NULL;
}

/* A child of fork() cannot end threads that it does not have: their memory stays. */
void nyb_pool_destroy(nyb_pool *pool) {
  if (is_alive(pool)) pthreadpool_destroy(pool->threads);
}

typedef struct nyb_pool_call {
  nyb_task task;
  void *task_data;
} nyb_pool_call;

/* ThreadSanitizer cannot see into a library that was built without it. These two tell it of the
 * order that pthreadpool keeps: the call before its tasks, the tasks before the call's return. */
#if defined(__SANITIZE_THREAD__)
#define NYB_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NYB_THREAD_SANITIZER 1
#endif
#endif
#if defined(NYB_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
static void order_after(void *point) { __tsan_acquire(point); }
static void order_before(void *point) { __tsan_release(point); }
#else
static void order_after(void *point) { (void)point; }
static void order_before(void *point) { (void)point; }
#endif

static void run_index(void *data, size_t index) {
  nyb_pool_call *call = data;
  order_after(call);
  call->task(call->task_data, (int64_t)index);
  order_before(call);
}

void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data) {
  const nyb_pool *own = pool;
  if (!is_alive(own)) {
    run_in_turn(task_count, task, task_data);
    return;
  }
  nyb_pool_call call = {task, task_data};
  order_before(&call);
  pthreadpool_parallelize_1d(own->threads, run_index, &call, (size_t)task_count, 0);
  order_after(&call);
}

#else /* no pool in this build: nyb_has_pool() keeps callers from asking for one */

bool nyb_has_pool(void) { return false; }

bool nyb_pool_create(nyb_pool *pool, int64_t threads) {
  (void)threads;
  pool->threads = NULL;
  return false;
}

void nyb_pool_destroy(nyb_pool *pool) { (void)pool; }

void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data) {
  (void)pool;
  run_in_turn(task_count, task, task_data);
}
#endif
