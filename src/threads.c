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

#if defined(NYB_HAVE_PTHREADPOOL)
#include <pthreadpool.h>

void *nyb_pool_create(int64_t threads) { return pthreadpool_create((size_t)threads); }

void nyb_pool_destroy(void *pool) {
  if (pool != NULL) pthreadpool_destroy(pool);
}

typedef struct nyb_pool_call {
  nyb_task task;
  void *task_data;
} nyb_pool_call;

static void run_index(void *data, size_t index) {
  const nyb_pool_call *call = data;
  call->task(call->task_data, (int64_t)index);
}

void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data) {
  nyb_pool_call call = {task, task_data};
  pthreadpool_parallelize_1d(pool, run_index, &call, (size_t)task_count, 0);
}

#else /* no pool in this build: the calling thread does all of it */

static char no_pool;

void *nyb_pool_create(int64_t threads) {
  (void)threads;
  return &no_pool;
}

void nyb_pool_destroy(void *pool) { (void)pool; }

void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data) {
  (void)pool;
  for (int64_t i = 0; i < task_count; i++) {
    task(task_data, i);
  }
}
#endif
