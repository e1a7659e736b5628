/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in pool behind nyb_context_options.threads: pthreadpool, where the build found it. */
#ifndef NYB_THREADS_H
#define NYB_THREADS_H

#include <stdbool.h>

#include "nybble.h"

#define NYB_MAX_THREADS 1024

int64_t nyb_processor_count(void); /* that this process may run on */

bool nyb_has_pool(void);                /* in this build */
void *nyb_pool_create(int64_t threads); /* NULL where it cannot be started */
void nyb_pool_destroy(void *pool);      /* NULL is allowed */
void nyb_pool_parallel_for(void *pool, int64_t task_count, nyb_task task, void *task_data);

#endif
