/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/geglu_tables.h"
#include "cuda/driver.h"
#include "cuda/jit.h"
#include "floating_point.h"
#include "threads.h"

#define NYB_STRINGIFY_(x) #x
#define NYB_STRINGIFY(x) NYB_STRINGIFY_(x)

const char *nyb_version(void) {
  return NYB_STRINGIFY(NYB_VERSION_MAJOR) "." NYB_STRINGIFY(NYB_VERSION_MINOR) "." NYB_STRINGIFY(
      NYB_VERSION_PATCH);
}

/* ---- Errors ------------------------------------------------------------------------------- */

static _Thread_local char last_error[512];

const char *nyb_last_error(void) { return last_error; }

nyb_status nyb_fail(nyb_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

nyb_status nyb_check_struct(const char *name, const void *input, size_t given, size_t known) {
  bool unknown_is_zero = given <= known + 4096;
  for (size_t i = known; input != NULL && unknown_is_zero && i < given; i++) {
    unknown_is_zero = ((const char *)input)[i] == 0;
  }
  if (given >= known && unknown_is_zero) return NYB_OK;
  if (given < known) {
    return nyb_fail(NYB_ERROR_STRUCT_SIZE, "%s.struct_size is %zu; it must be at least %zu", name,
                    given, known);
  }
  return nyb_fail(
      NYB_ERROR_STRUCT_SIZE,
      "%s.struct_size is %zu; beyond the %zu bytes that version %s knows it may have at "
      "most 4096, all 0",
      name, given, known, nyb_version());
}

nyb_status nyb_check_stream(const nyb_context *context, nyb_stream stream) {
  if (stream == NULL || nyb_on_cuda(context)) return NYB_OK;
  return nyb_fail(NYB_ERROR_VALUE, "stream is %p; it must be NULL on the CPU", stream);
}

const char *nyb_status_name(nyb_status status) {
  switch (status) {
#define NYB_NAME(status) \
  case status: return #status;
    NYB_NAME(NYB_OK)
    NYB_NAME(NYB_ERROR_NULL)
    NYB_NAME(NYB_ERROR_STRUCT_SIZE)
    NYB_NAME(NYB_ERROR_ENUM)
    NYB_NAME(NYB_ERROR_SHAPE)
    NYB_NAME(NYB_ERROR_HEADS)
    NYB_NAME(NYB_ERROR_BITS)
    NYB_NAME(NYB_ERROR_GROUP_SIZE)
    NYB_NAME(NYB_ERROR_DTYPE)
    NYB_NAME(NYB_ERROR_STRIDE)
    NYB_NAME(NYB_ERROR_ALIGNMENT)
    NYB_NAME(NYB_ERROR_LENGTH)
    NYB_NAME(NYB_ERROR_OVERLAP)
    NYB_NAME(NYB_ERROR_NON_FINITE)
    NYB_NAME(NYB_ERROR_WORKSPACE)
    NYB_NAME(NYB_ERROR_OUT_OF_MEMORY)
    NYB_NAME(NYB_ERROR_UNSUPPORTED)
    NYB_NAME(NYB_ERROR_ENVIRONMENT)
    NYB_NAME(NYB_ERROR_VALUE)
    NYB_NAME(NYB_ERROR_IO)
    NYB_NAME(NYB_ERROR_FILE_TRUNCATED)
    NYB_NAME(NYB_ERROR_FILE_FORMAT)
    NYB_NAME(NYB_ERROR_NOT_FOUND)
    NYB_NAME(NYB_ERROR_DEVICE)
    NYB_NAME(NYB_ERROR_COMPILE)
    NYB_NAME(NYB_ERROR_POINTER)
#undef NYB_NAME
  }
  return "NYB_ERROR_?";
}

/* ---- Small tables of the public enums ----------------------------------------------------- */

size_t nyb_dtype_bytes(nyb_dtype dtype) {
  switch (dtype) {
    case NYB_F32: return 4;
    case NYB_F16:
    case NYB_BF16: return 2;
  }
  return 0;
}

const char *nyb_isa_name(nyb_isa isa) {
  switch (isa) {
    case NYB_ISA_AUTO: return "auto";
    case NYB_ISA_SCALAR: return "scalar";
    case NYB_ISA_AVX2: return "avx2";
    case NYB_ISA_AVX512: return "avx512";
    case NYB_ISA_NEON: return "neon";
    case NYB_ISA_CUDA: return "cuda";
  }
  return "?";
}

const char *nyb_backend_name(nyb_backend backend) {
  switch (backend) {
    case NYB_BACKEND_CPU: return "cpu";
    case NYB_BACKEND_CUDA: return "cuda";
  }
  return "?";
}

/* ---- The environment ---------------------------------------------------------------------- */

/* An empty variable counts as unset. */
static const char *environment(const char *name) {
  const char *value = getenv(name);
  return value != NULL && value[0] != '\0' ? value : NULL;
}

static nyb_status path_from_environment(const char *name, nyb_path *path) {
  const char *value = environment(name);
  *path = NYB_PATH_AUTO;
  if (value == NULL || strcmp(value, "auto") == 0) return NYB_OK;
  if (strcmp(value, "fused") == 0) {
    *path = NYB_PATH_FUSED;
  } else if (strcmp(value, "compat") == 0) {
    *path = NYB_PATH_COMPAT;
  } else {
    return nyb_fail(NYB_ERROR_ENVIRONMENT, "%s is \"%.64s\"; it must be fused, compat or auto",
                    name, value);
  }
  return NYB_OK;
}

static nyb_status choose_isa(nyb_isa asked, nyb_isa *isa) {
  const char *origin = "options.isa";
  *isa = asked;
  if (asked == NYB_ISA_AUTO) {
    const char *value = environment("NYBBLE_ISA");
    if (value != NULL) {
      nyb_isa named = NYB_ISA_AUTO;
      while (named <= NYB_ISA_NEON && strcmp(value, nyb_isa_name(named)) != 0) named++;
      if (named > NYB_ISA_NEON) {
        return nyb_fail(NYB_ERROR_ENVIRONMENT,
                        "NYBBLE_ISA is \"%.64s\"; it must be scalar, avx2, avx512, neon or auto",
                        value);
      }
      *isa = named;
      origin = "NYBBLE_ISA";
    }
    if (*isa == NYB_ISA_AUTO) {
      *isa = nyb_isa_best();
    }
  } else if ((unsigned)asked > NYB_ISA_NEON) {
    return nyb_fail(NYB_ERROR_ENUM, "options.isa is %d; it must be one of nyb_isa (0 to %d)",
                    (int)asked, (int)NYB_ISA_NEON);
  }
  const char *reason;
  if (!nyb_isa_runs_here(*isa, &reason)) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED, "%s is %s, which %s", origin, nyb_isa_name(*isa),
                    reason);
  }
  return NYB_OK;
}

static nyb_status choose_cuda(const nyb_context_options *options, nyb_isa *isa) {
  if (options->isa != NYB_ISA_AUTO) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "options.isa is %d, %s; with options.backend NYB_BACKEND_CUDA it must be "
                    "NYB_ISA_AUTO",
                    (int)options->isa, nyb_isa_name(options->isa));
  }
  const nyb_cuda_driver *driver;
  nyb_status status = nyb_cuda_driver_load(&driver);
  if (status == NYB_OK) status = nyb_nvrtc_load();
  if (status != NYB_OK) return status;
  if (options->device < 0 || options->device >= driver->device_count) {
    return nyb_fail(NYB_ERROR_VALUE, "options.device is %d; there are CUDA devices 0 to %d",
                    (int)options->device, (int)driver->device_count - 1);
  }
  *isa = NYB_ISA_CUDA;
  return NYB_OK;
}

static nyb_status choose_threads(int64_t asked, int64_t *threads) {
  if (asked < 0 || asked > NYB_MAX_THREADS) {
    return nyb_fail(NYB_ERROR_VALUE, "options.threads is %lld; it must be 0 (all) to %d",
                    (long long)asked, NYB_MAX_THREADS);
  }
  *threads = asked;
  if (asked != 0) return NYB_OK;
  const char *value = environment("NYBBLE_THREADS");
  if (value == NULL) {
    *threads = nyb_processor_count();
    return NYB_OK;
  }
  char *end;
  const long parsed = strtol(value, &end, 10);
  if (*end != '\0' || parsed < 1 || parsed > NYB_MAX_THREADS) {
    return nyb_fail(NYB_ERROR_ENVIRONMENT, "NYBBLE_THREADS is \"%.64s\"; it must be 1 to %d", value,
                    NYB_MAX_THREADS);
  }
  *threads = parsed;
  return NYB_OK;
}

/* ---- Memory ------------------------------------------------------------------------------- */

static void *allocate_aligned(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  if (bytes > SIZE_MAX - alignment) return NULL;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void release_aligned(void *user_data, void *memory) {
  (void)user_data;
  free(memory);
}

void *nyb_allocate(const nyb_context *context, size_t bytes, size_t alignment) {
  const nyb_allocator *allocator = &context->allocator;
  return allocator->allocate(allocator->user_data, bytes, alignment);
}

void nyb_release(const nyb_context *context, void *memory) {
  if (memory != NULL) {
    context->allocator.release(context->allocator.user_data, memory);
  }
}

/* ---- Create and destroy ------------------------------------------------------------------- */

nyb_status nyb_context_create(const nyb_context_options *options, nyb_context **context) {
  static const nyb_context_options defaults = NYB_CONTEXT_OPTIONS_INIT;
  if (context == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "context is NULL; it must point to where the context goes");
  }
  if (options == NULL) options = &defaults;
  const nyb_status size_status =
      nyb_check_struct("options", options, options->struct_size, sizeof *options);
  if (size_status != NYB_OK) return size_status;
  const bool on_cuda = options->backend == NYB_BACKEND_CUDA;
  if (!on_cuda && options->backend != NYB_BACKEND_CPU) {
    return nyb_fail(NYB_ERROR_ENUM,
                    "options.backend is %d; it must be NYB_BACKEND_CPU or NYB_BACKEND_CUDA",
                    (int)options->backend);
  }
  nyb_allocator allocator = options->allocator;
  if ((allocator.allocate == NULL) != (allocator.release == NULL)) {
    return nyb_fail(NYB_ERROR_NULL,
                    "options.allocator has only one of allocate and release; set both or neither");
  }
  const nyb_allocator *device_allocator = &options->device_allocator;
  if ((device_allocator->allocate == NULL) != (device_allocator->release == NULL)) {
    return nyb_fail(NYB_ERROR_NULL,
                    "options.device_allocator has only one of allocate and release; set both or "
                    "neither");
  }
  if (allocator.allocate == NULL) {
    allocator = (nyb_allocator){.allocate = allocate_aligned, .release = release_aligned};
  }

  nyb_isa isa;
  int64_t threads = 1;
  nyb_path attention_path, geglu_path;
  nyb_status status = on_cuda ? choose_cuda(options, &isa) : choose_isa(options->isa, &isa);
  if (status == NYB_OK) status = choose_threads(options->threads, &threads);
  const bool has_threads = options->parallel_for != NULL || nyb_has_pool();
  if (on_cuda || !has_threads) threads = 1; /* on CUDA the host only queues work */
  if (status == NYB_OK) status = path_from_environment("NYBBLE_PATH", &attention_path);
  if (status == NYB_OK) status = path_from_environment("NYBBLE_GEGLU", &geglu_path);
  if (status != NYB_OK) return status;

  /* One block: the struct, then the per-kernel counters. */
  const size_t calls_offset = (sizeof(nyb_context) + 63) / 64 * 64;
  const size_t bytes = calls_offset + (size_t)nyb_kernel_entry_count * sizeof(_Atomic int64_t);
  nyb_context *made = allocator.allocate(allocator.user_data, bytes, 64);
  if (made == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a context", bytes);
  }
  memset(made, 0, bytes);
  made->allocator = allocator;
  made->backend = options->backend;
  made->device = options->device;
  made->device_allocator = options->device_allocator;
  made->isa = isa;
  made->threads = threads;
  made->attention_path = attention_path;
  made->geglu_path = geglu_path;
  made->kernel_calls = (void *)((char *)made + calls_offset);
  nyb_dispatch_fill(&made->dispatch, isa);
  nyb_gelu_tables_make();
  made->parallel_for = options->parallel_for;
  made->parallel_for_data = options->parallel_for_data;
  if (made->parallel_for == NULL && threads > 1) {
    if (!nyb_pool_create(&made->pool, threads)) {
      allocator.release(allocator.user_data, made);
      return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "no pool of %lld threads could be started",
                      (long long)threads);
    }
    made->parallel_for = nyb_pool_parallel_for;
    made->parallel_for_data = &made->pool;
  }
  *context = made;
  return NYB_OK;
}

void nyb_context_destroy(nyb_context *context) {
  if (context == NULL) return;
  nyb_pool_destroy(&context->pool);
  const nyb_allocator allocator = context->allocator;
  allocator.release(allocator.user_data, context);
}

nyb_isa nyb_context_isa(const nyb_context *context) {
  return context == NULL ? NYB_ISA_AUTO : context->isa;
}
nyb_backend nyb_context_backend(const nyb_context *context) {
  return context == NULL ? NYB_BACKEND_CPU : context->backend;
}
int64_t nyb_context_threads(const nyb_context *context) {
  return context == NULL ? 0 : context->threads;
}

typedef struct guarded_task {
  nyb_task task;
  void *task_data;
} guarded_task;

/* The caller's thread may flush denormals or round otherwise, the pool's threads may not: the
 * result must not depend on who runs a task. */
static void run_guarded(void *data, int64_t index) {
  const guarded_task *guarded = data;
  const uint64_t callers = nyb_set_default_floating_point();
  guarded->task(guarded->task_data, index);
  nyb_restore_floating_point(callers);
}

void nyb_parallel(const nyb_context *context, int64_t task_count, nyb_task task, void *task_data) {
  guarded_task guarded = {task, task_data};
  if (task_count > 1 && context->threads > 1 && context->parallel_for != NULL) {
    context->parallel_for(context->parallel_for_data, task_count, run_guarded, &guarded);
    return;
  }
  for (int64_t i = 0; i < task_count; i++) run_guarded(&guarded, i);
}

/* ---- Kernels and counters ----------------------------------------------------------------- */

nyb_any_fn nyb_kernel_for(const nyb_context *context, nyb_operation operation,
                          nyb_format_id format) {
  return nyb_kernel_entries[context->dispatch.entry[operation][format]].function;
}

void nyb_count_kernel(nyb_context *context, nyb_operation operation, nyb_format_id format) {
  const int16_t index = context->dispatch.entry[operation][format];
  atomic_fetch_add_explicit(&context->kernel_calls[index], 1, memory_order_relaxed);
}

void nyb_count(nyb_context *context, nyb_counter counter) {
  atomic_fetch_add_explicit(&context->counters[counter], 1, memory_order_relaxed);
}

int64_t nyb_kernel_count(void) { return nyb_kernel_entry_count; }

nyb_status nyb_kernel_at(const nyb_context *context, int64_t index, nyb_kernel *kernel) {
  if (kernel == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "kernel is NULL; it must point to an nyb_kernel");
  }
  const nyb_status status = nyb_check_struct("kernel", NULL, kernel->struct_size, sizeof *kernel);
  if (status != NYB_OK) return status;
  if (index < 0 || index >= nyb_kernel_entry_count) {
    return nyb_fail(NYB_ERROR_VALUE, "index is %lld; there are kernels 0 to %lld", (long long)index,
                    (long long)nyb_kernel_entry_count - 1);
  }
  const nyb_kernel_entry *entry = &nyb_kernel_entries[index];
  kernel->name = entry->name;
  kernel->operation = nyb_operation_name(entry->operation);
  kernel->format = nyb_format_id_name(entry->format);
  kernel->isa = entry->isa;
  kernel->runs_here = nyb_isa_runs_here(entry->isa, &kernel->reason) &&
                      (entry->isa == NYB_ISA_CUDA || entry->function != NULL);
  kernel->calls = context == NULL
                      ? 0
                      : atomic_load_explicit(&context->kernel_calls[index], memory_order_relaxed);
  return NYB_OK;
}

nyb_status nyb_counters_get(const nyb_context *context, nyb_counters *counters) {
  if (context == NULL || counters == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; both context and counters must be set",
                    context == NULL ? "context" : "counters");
  }
  const nyb_status status =
      nyb_check_struct("counters", NULL, counters->struct_size, sizeof *counters);
  if (status != NYB_OK) return status;
#define NYB_READ(counter) atomic_load_explicit(&context->counters[counter], memory_order_relaxed)
  counters->attention_fused = NYB_READ(NYB_COUNTER_ATTENTION_FUSED);
  counters->attention_compat = NYB_READ(NYB_COUNTER_ATTENTION_COMPAT);
  counters->geglu_fused = NYB_READ(NYB_COUNTER_GEGLU_FUSED);
  counters->geglu_compat = NYB_READ(NYB_COUNTER_GEGLU_COMPAT);
  counters->quantize = NYB_READ(NYB_COUNTER_QUANTIZE);
  counters->dequantize = NYB_READ(NYB_COUNTER_DEQUANTIZE);
  counters->cache_append = NYB_READ(NYB_COUNTER_CACHE_APPEND);
  counters->attention_merge = NYB_READ(NYB_COUNTER_ATTENTION_MERGE);
#undef NYB_READ
  return NYB_OK;
}

void nyb_counters_clear(nyb_context *context) {
  if (context == NULL) return;
  for (int i = 0; i < NYB_COUNTER_COUNT; i++) {
    atomic_store_explicit(&context->counters[i], 0, memory_order_relaxed);
  }
  for (int64_t i = 0; i < nyb_kernel_entry_count; i++) {
    atomic_store_explicit(&context->kernel_calls[i], 0, memory_order_relaxed);
  }
}
