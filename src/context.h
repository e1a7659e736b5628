/* SPDX-License-Identifier: Apache-2.0 */
/* The context as the library sees it, and how errors are raised. */
#ifndef NYB_CONTEXT_H
#define NYB_CONTEXT_H

#include <stdatomic.h>

#include "kernels.h"
#include "nybble.h"
#include "threads.h"

typedef enum nyb_counter {
  NYB_COUNTER_ATTENTION_FUSED,
  NYB_COUNTER_ATTENTION_COMPAT,
  NYB_COUNTER_GEGLU_FUSED,
  NYB_COUNTER_GEGLU_COMPAT,
  NYB_COUNTER_QUANTIZE,
  NYB_COUNTER_DEQUANTIZE,
  NYB_COUNTER_CACHE_APPEND,
  NYB_COUNTER_ATTENTION_MERGE,
  NYB_COUNTER_COUNT
} nyb_counter;

struct nyb_context {
  nyb_allocator allocator;
  nyb_backend backend;
  nyb_isa isa;
  int64_t threads;
  nyb_parallel_for parallel_for;
  void *parallel_for_data;
  nyb_pool pool;           /* the built-in one behind parallel_for, where there is one */
  nyb_path attention_path; /* what AUTO means: NYBBLE_PATH or AUTO */
  nyb_path geglu_path;
  int32_t device;                 /* CUDA: where no CUDA context is current */
  nyb_allocator device_allocator; /* CUDA: both NULL for the driver's */
  nyb_dispatch dispatch;
  _Atomic int64_t counters[NYB_COUNTER_COUNT];
  _Atomic int64_t *kernel_calls; /* [nyb_kernel_entry_count] */
};

/* Stores the sentence for nyb_last_error() and returns status: `return nyb_fail(...)`. */
nyb_status nyb_fail(nyb_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* Whether a caller's struct can be read or written: `given` is its struct_size, `known` the size of
 * the first version (which is still the current one). input is the struct, or NULL for a result. */
nyb_status nyb_check_struct(const char *name, const void *input, size_t given, size_t known);

static inline bool nyb_on_cuda(const nyb_context *context) {
  return context->backend == NYB_BACKEND_CUDA;
}

/* Fails for a stream on the CPU. */
nyb_status nyb_check_stream(const nyb_context *context, nyb_stream stream);

/* The kernel for an operation and format on the context's ISA; never NULL. */
nyb_any_fn nyb_kernel_for(const nyb_context *context, nyb_operation operation,
                          nyb_format_id format);
/* Adds one to the calls of that kernel; once per run call, not per tile. */
void nyb_count_kernel(nyb_context *context, nyb_operation operation, nyb_format_id format);
void nyb_count(nyb_context *context, nyb_counter counter);

/* Memory from the context's allocator, NULL when it has none. */
void *nyb_allocate(const nyb_context *context, size_t bytes, size_t alignment);
void nyb_release(const nyb_context *context, void *memory);

/* Runs task(task_data, i) for every i in [0, task_count): with the context's parallel-for, or here
 * when there is one task or one thread. */
void nyb_parallel(const nyb_context *context, int64_t task_count, nyb_task task, void *task_data);

#endif
