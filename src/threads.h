/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in pool behind nyb_context_options.threads: pthreadpool, where the build found it. */
#ifndef NYB_THREADS_H
#define NYB_THREADS_H

#include <stdbool.h>

#include "nybble.h"

#define NYB_MAX_THREADS 1024

int64_t nyb_processor_count(void); /* that this process may run on */

typedef struct nyb_pool {
  void *threads; /* NULL: none */
  int64_t forks; /* how often this process had been forked when they were started */
} nyb_pool;

bool nyb_has_pool(void); /* in this build */

/* False where it cannot be started. */
bool nyb_pool_create(nyb_pool *pool, int64_t threads);
void nyb_pool_destroy(nyb_pool *pool); /* one that was never created, too */

/* An nyb_parallel_for; pool is an nyb_pool. A child of fork() has none of its parent's threads:
 * there the calling thread does it all. */
void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data);

#endif
