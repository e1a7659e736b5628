/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA contexts and their kernels.
 *
 * States and kernels are never freed: a state is a few hundred bytes for each CUDA context that the
 * process ever used, and other threads may be reading it without a lock. They come from the C
 * library's allocator, since they outlive every nyb_context. */
#include "device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jit.h"

/* ---- States --------------------------------------------------------------------------------- */

enum { KERNEL_BUCKETS = 128 };

typedef enum kernel_state { ABSENT, COMING, READY } kernel_state;

typedef struct kernel_entry {
  struct kernel_entry *next; /* in its bucket; entries are only ever added, in front */
  nyb_cuda_spec spec;
  int32_t threads, dynamic_shared_bytes;
  _Atomic int state; /* kernel_state; under the device's lock but for reading READY */
  nyb_cuda_kernel kernel;
} kernel_entry;

struct nyb_cuda_device {
  nyb_cuda_device *next; /* states are only ever added, in front */
  nyb_cuda_home home;
  nyb_cuda_properties properties;
  pthread_mutex_t lock;
  pthread_cond_t kernel_came;
  kernel_entry *_Atomic buckets[KERNEL_BUCKETS];
};

static nyb_cuda_device *_Atomic devices;
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER; /* for adding */

/* A context that was destroyed and made again may have its old address, but has another id. */
static nyb_status identify(const nyb_cuda_driver *driver, nyb_cu_context context,
                           nyb_cuda_home *home) {
  *home = (nyb_cuda_home){.context = context};
  if (driver->CtxGetId == NULL) return NYB_OK; /* before CUDA 12 */
  return nyb_cuda_check(driver, driver->CtxGetId(context, &home->id), "cuCtxGetId");
}

static nyb_cuda_device *find_device(const nyb_cuda_home *home) {
  nyb_cuda_device *device = atomic_load_explicit(&devices, memory_order_acquire);
  while (device != NULL && (device->home.context != home->context || device->home.id != home->id)) {
    device = device->next;
  }
  return device;
}

static nyb_status read_properties(const nyb_cuda_driver *driver, nyb_cuda_properties *p) {
  nyb_status status = nyb_cuda_check(driver, driver->CtxGetDevice(&p->ordinal), "cuCtxGetDevice");
  int major = 0, minor = 0, l2_bytes = 0, pageable = 0;
  const struct {
    nyb_cu_device_attribute attribute;
    int *value;
  } wanted[] = {
      {NYB_CU_DEVICE_COMPUTE_CAPABILITY_MAJOR, &major},
      {NYB_CU_DEVICE_COMPUTE_CAPABILITY_MINOR, &minor},
      {NYB_CU_DEVICE_MULTIPROCESSOR_COUNT, &p->multiprocessors},
      {NYB_CU_DEVICE_SHARED_BYTES_PER_BLOCK_OPTIN, &p->shared_bytes_per_block},
      {NYB_CU_DEVICE_SHARED_BYTES_PER_MULTIPROCESSOR, &p->shared_bytes_per_multiprocessor},
      {NYB_CU_DEVICE_L2_CACHE_BYTES, &l2_bytes},
      {NYB_CU_DEVICE_PAGEABLE_MEMORY_ACCESS, &pageable},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == NYB_OK; i++) {
    status = nyb_cuda_check(
        driver, driver->DeviceGetAttribute(wanted[i].value, wanted[i].attribute, p->ordinal),
        "cuDeviceGetAttribute");
  }
  if (status != NYB_OK) return status;
  p->compute_capability = 10 * major + minor;
  p->l2_bytes = l2_bytes;
  p->reads_host_memory = pageable != 0;
  if (p->compute_capability >= NYB_CUDA_OLDEST_CAPABILITY) return NYB_OK;
  return nyb_fail(NYB_ERROR_UNSUPPORTED,
                  "CUDA device %d has compute capability %d.%d; it must be 8.0 or more",
                  (int)p->ordinal, major, minor);
}

/* home is current. */
static nyb_status add_device(const nyb_cuda_driver *driver, const nyb_cuda_home *home,
                             nyb_cuda_device **found) {
  nyb_cuda_properties properties = {0};
  nyb_status status = read_properties(driver, &properties);
  if (status != NYB_OK) return status;
  pthread_mutex_lock(&devices_lock);
  nyb_cuda_device *device = find_device(home);
  if (device == NULL) {
    device = calloc(1, sizeof *device);
    if (device == NULL) {
      status = nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "no %zu bytes for the state of a CUDA context",
                        sizeof *device);
    } else {
      device->home = *home;
      device->properties = properties;
      pthread_mutex_init(&device->lock, NULL);
      pthread_cond_init(&device->kernel_came, NULL);
      device->next = atomic_load_explicit(&devices, memory_order_relaxed);
      atomic_store_explicit(&devices, device, memory_order_release);
    }
  }
  pthread_mutex_unlock(&devices_lock);
  *found = device;
  return status;
}

/* ---- Entering and leaving ------------------------------------------------------------------- */

/* Primary contexts are retained once and kept: each entry is written once. */
enum { MAX_DEVICES = 256 };
static nyb_cu_context _Atomic primaries[MAX_DEVICES];

static nyb_status primary_context(const nyb_cuda_driver *driver, int32_t ordinal,
                                  nyb_cu_context *primary) {
  *primary = ordinal < MAX_DEVICES ? atomic_load_explicit(&primaries[ordinal], memory_order_acquire)
                                   : NULL;
  if (*primary != NULL) return NYB_OK;
  nyb_cu_device device;
  nyb_status status = nyb_cuda_check(driver, driver->DeviceGet(&device, ordinal), "cuDeviceGet");
  if (status != NYB_OK) return status;
  status = nyb_cuda_check(driver, driver->DevicePrimaryCtxRetain(primary, device),
                          "cuDevicePrimaryCtxRetain");
  if (status != NYB_OK || ordinal >= MAX_DEVICES) return status;
  nyb_cu_context none = NULL;
  if (!atomic_compare_exchange_strong(&primaries[ordinal], &none, *primary)) {
    driver->DevicePrimaryCtxRelease(device); /* another thread was first */
  }
  return NYB_OK;
}

/* Makes a context current; scope->driver is set. */
static nyb_status push(nyb_cuda_scope *scope, nyb_cu_context context) {
  const nyb_status status =
      nyb_cuda_check(scope->driver, scope->driver->CtxPushCurrent(context), "cuCtxPushCurrent");
  scope->pushed = status == NYB_OK;
  return status;
}

static nyb_status find_state(nyb_cuda_scope *scope, const nyb_cuda_home *home) {
  nyb_status status = NYB_OK;
  scope->device = find_device(home);
  if (scope->device == NULL) status = add_device(scope->driver, home, &scope->device);
  if (status == NYB_OK) scope->properties = &scope->device->properties;
  return status;
}

nyb_status nyb_cuda_enter(nyb_context *context, nyb_cuda_scope *scope) {
  *scope = (nyb_cuda_scope){.context = context};
  nyb_status status = nyb_cuda_driver_load(&scope->driver);
  if (status != NYB_OK) return status;
  nyb_cu_context current = NULL;
  status = nyb_cuda_check(scope->driver, scope->driver->CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (status == NYB_OK && current == NULL) {
    status = primary_context(scope->driver, context->device, &current);
    if (status == NYB_OK) status = push(scope, current);
  }
  nyb_cuda_home home;
  if (status == NYB_OK) status = identify(scope->driver, current, &home);
  if (status == NYB_OK) status = find_state(scope, &home);
  if (status != NYB_OK) nyb_cuda_leave(scope);
  return status;
}

nyb_cuda_home nyb_cuda_home_of(const nyb_cuda_scope *scope) { return scope->device->home; }

nyb_status nyb_cuda_enter_home(nyb_context *context, const nyb_cuda_home *home,
                               nyb_cuda_scope *scope) {
  *scope = (nyb_cuda_scope){.context = context};
  nyb_status status = nyb_cuda_driver_load(&scope->driver);
  if (status != NYB_OK) return status;
  nyb_cu_context current = NULL;
  status = nyb_cuda_check(scope->driver, scope->driver->CtxGetCurrent(&current), "cuCtxGetCurrent");
  nyb_cuda_home now;
  if (status == NYB_OK) status = identify(scope->driver, home->context, &now);
  if (status == NYB_OK && now.id != home->id) {
    status =
        nyb_fail(NYB_ERROR_DEVICE,
                 "the CUDA context in which this was made has been destroyed: id %llu, now %llu "
                 "at the same address",
                 home->id, now.id);
  }
  if (status == NYB_OK && current != home->context) status = push(scope, home->context);
  if (status == NYB_OK) status = find_state(scope, home);
  if (status != NYB_OK) nyb_cuda_leave(scope);
  return status;
}

void nyb_cuda_leave(nyb_cuda_scope *scope) {
  nyb_cu_context popped;
  if (scope->pushed) scope->driver->CtxPopCurrent(&popped);
  scope->pushed = false;
}

/* ---- Pointers and streams ------------------------------------------------------------------- */

static nyb_status refuse_pointer(const char *owner, const char *member, const void *address,
                                 const char *what) {
  return nyb_fail(NYB_ERROR_POINTER, "%s%s%s is %p, %s", owner, member[0] != '\0' ? "." : "",
                  member, address, what);
}

nyb_status nyb_cuda_check_pointer(const nyb_cuda_scope *scope, const char *owner,
                                  const char *member, const void *address) {
  if (address == NULL) return NYB_OK;
  nyb_cu_pointer_attribute attributes[] = {
      NYB_CU_POINTER_MEMORY_TYPE, NYB_CU_POINTER_DEVICE_POINTER, NYB_CU_POINTER_DEVICE_ORDINAL};
  unsigned type = 0;
  nyb_cu_address reachable = 0;
  int ordinal = scope->properties->ordinal;
  void *values[] = {&type, &reachable, &ordinal};
  const nyb_cu_result result =
      scope->driver->PointerGetAttributes(sizeof attributes / sizeof attributes[0], attributes,
                                          values, (nyb_cu_address)(uintptr_t)address);
  const nyb_status status = nyb_cuda_check(scope->driver, result, "cuPointerGetAttributes");
  if (status != NYB_OK) return status;
  if (type == 0 && !scope->properties->reads_host_memory) {
    return refuse_pointer(owner, member, address,
                          "which the driver does not know; it must be device memory");
  }
  if (type == NYB_CU_MEMORY_HOST && reachable == 0) {
    return refuse_pointer(owner, member, address,
                          "host memory that the device cannot reach; it must be device memory");
  }
  if (type == NYB_CU_MEMORY_DEVICE && reachable == 0 && ordinal != scope->properties->ordinal) {
    return refuse_pointer(owner, member, address,
                          "memory of another device without peer access; it must be memory of the "
                          "device of the current CUDA context");
  }
  return NYB_OK;
}

nyb_status nyb_cuda_capturing(const nyb_cuda_scope *scope, nyb_stream stream, bool *capturing) {
  int capture = NYB_CU_CAPTURE_STATUS_NONE;
  const nyb_status status = nyb_cuda_check(
      scope->driver, scope->driver->StreamIsCapturing(stream, &capture), "cuStreamIsCapturing");
  *capturing = capture != NYB_CU_CAPTURE_STATUS_NONE;
  return status;
}

/* ---- Kernels -------------------------------------------------------------------------------- */

static int bucket_of(const nyb_cuda_spec *spec) {
  uint64_t hash = (uintptr_t)spec->program;
  for (int i = 0; i < NYB_CUDA_MAX_PARAMETERS; i++) {
    hash = (hash ^ (uint32_t)spec->values[i]) * UINT64_C(0x9e3779b97f4a7c15);
  }
  return (int)((hash >> 32) % KERNEL_BUCKETS);
}

static kernel_entry *find_kernel(const nyb_cuda_device *device, const nyb_cuda_spec *spec,
                                 int32_t threads, int32_t dynamic_shared_bytes) {
  kernel_entry *entry =
      atomic_load_explicit(&device->buckets[bucket_of(spec)], memory_order_acquire);
  while (entry != NULL && (entry->spec.program != spec->program || entry->threads != threads ||
                           entry->dynamic_shared_bytes != dynamic_shared_bytes ||
                           memcmp(entry->spec.values, spec->values, sizeof spec->values) != 0)) {
    entry = entry->next;
  }
  return entry;
}

/* Under the device's lock. NULL without memory. */
static kernel_entry *add_kernel(nyb_cuda_device *device, const nyb_cuda_spec *spec, int32_t threads,
                                int32_t dynamic_shared_bytes) {
  kernel_entry *const entry = calloc(1, sizeof *entry);
  if (entry == NULL) return NULL;
  kernel_entry *_Atomic *const bucket = &device->buckets[bucket_of(spec)];
  entry->spec = *spec;
  entry->threads = threads;
  entry->dynamic_shared_bytes = dynamic_shared_bytes;
  entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
  atomic_init(&entry->state, ABSENT);
  atomic_store_explicit(bucket, entry, memory_order_release);
  return entry;
}

static nyb_status check_call(const nyb_cuda_scope *scope, const char *kernel, nyb_cu_result result,
                             const char *call) {
  if (result == NYB_CU_SUCCESS) return NYB_OK; /* before the words are put together */
  char words[128];
  snprintf(words, sizeof words, "%s of the CUDA kernel %s", call, kernel);
  return nyb_cuda_check(scope->driver, result, words);
}

/* What the driver says of the function, and leave to use that much shared memory. */
static nyb_status prepare_function(const nyb_cuda_scope *scope, nyb_cuda_kernel *k) {
  const nyb_cuda_driver *driver = scope->driver;
  const struct {
    nyb_cu_function_attribute attribute;
    int32_t *value;
  } wanted[] = {
      {NYB_CU_FUNCTION_REGISTERS, &k->registers},
      {NYB_CU_FUNCTION_LOCAL_BYTES, &k->local_bytes},
      {NYB_CU_FUNCTION_SHARED_BYTES, &k->static_shared_bytes},
  };
  nyb_status status = NYB_OK;
  for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == NYB_OK; i++) {
    status = check_call(scope, k->name,
                        driver->FuncGetAttribute(wanted[i].value, wanted[i].attribute, k->function),
                        "cuFuncGetAttribute");
  }
  if (status == NYB_OK && k->dynamic_shared_bytes > 0) {
    status =
        check_call(scope, k->name,
                   driver->FuncSetAttribute(k->function, NYB_CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES,
                                            k->dynamic_shared_bytes),
                   "cuFuncSetAttribute");
  }
  if (status != NYB_OK) return status;
  status = check_call(
      scope, k->name,
      driver->OccupancyMaxActiveBlocksPerMultiprocessor(
          &k->blocks_per_multiprocessor, k->function, k->threads, (size_t)k->dynamic_shared_bytes),
      "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (status == NYB_OK && k->blocks_per_multiprocessor < 1) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "the CUDA kernel %s (%d threads, %d registers, %d + %d bytes of shared memory) "
                    "does not fit a multiprocessor of this device",
                    k->name, (int)k->threads, (int)k->registers, (int)k->static_shared_bytes,
                    (int)k->dynamic_shared_bytes);
  }
  return status;
}

static nyb_status load_module(const nyb_cuda_scope *scope, const void *cubin,
                              nyb_cuda_kernel *kernel) {
  const nyb_cuda_driver *driver = scope->driver;
  nyb_cu_module module = NULL;
  nyb_status status =
      check_call(scope, kernel->name, driver->ModuleLoadDataEx(&module, cubin, 0, NULL, NULL),
                 "cuModuleLoadDataEx");
  if (status != NYB_OK) return status;
  status = check_call(scope, kernel->name,
                      driver->ModuleGetFunction(&kernel->function, module, kernel->name),
                      "cuModuleGetFunction");
  if (status == NYB_OK) status = prepare_function(scope, kernel);
  if (status != NYB_OK) driver->ModuleUnload(module);
  return status;
}

/* Loading may allocate and wait, which must not break a capture that is going on somewhere: this
 * thread declares that it knows. */
static nyb_status load_relaxed(const nyb_cuda_scope *scope, const void *cubin,
                               nyb_cuda_kernel *kernel) {
  int mode = NYB_CU_CAPTURE_MODE_RELAXED;
  nyb_status status =
      nyb_cuda_check(scope->driver, scope->driver->ThreadExchangeStreamCaptureMode(&mode),
                     "cuThreadExchangeStreamCaptureMode");
  if (status != NYB_OK) return status;
  status = load_module(scope, cubin, kernel);
  scope->driver->ThreadExchangeStreamCaptureMode(&mode);
  return status;
}

static nyb_status make_kernel(const nyb_cuda_scope *scope, const kernel_entry *entry,
                              nyb_cuda_kernel *made) {
  *made = (nyb_cuda_kernel){
      .name = entry->spec.program->name,
      .threads = entry->threads,
      .dynamic_shared_bytes = entry->dynamic_shared_bytes,
  };
  nyb_cuda_binary binary;
  nyb_status status = nyb_cuda_compile(scope->context, &entry->spec,
                                       scope->properties->compute_capability, &binary, NULL, 0);
  if (status != NYB_OK) return status;
  status = load_relaxed(scope, binary.cubin, made);
  nyb_release(scope->context, binary.cubin);
  return status;
}

/* Makes the kernel, unless another thread is at it: then waits for what comes of that. The lock is
 * held only to hand the work out, not while it is done. */
static nyb_status come_by_kernel(nyb_cuda_scope *scope, const nyb_cuda_spec *spec, int32_t threads,
                                 int32_t dynamic_shared_bytes, const nyb_cuda_kernel **kernel) {
  nyb_cuda_device *const device = scope->device;
  pthread_mutex_lock(&device->lock);
  kernel_entry *entry = find_kernel(device, spec, threads, dynamic_shared_bytes);
  if (entry == NULL) entry = add_kernel(device, spec, threads, dynamic_shared_bytes);
  if (entry == NULL) {
    pthread_mutex_unlock(&device->lock);
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "no %zu bytes for the entry of a CUDA kernel",
                    sizeof *entry);
  }
  while (atomic_load_explicit(&entry->state, memory_order_relaxed) == COMING) {
    pthread_cond_wait(&device->kernel_came, &device->lock);
  }
  nyb_status status = NYB_OK;
  if (atomic_load_explicit(&entry->state, memory_order_relaxed) == ABSENT) {
    atomic_store_explicit(&entry->state, COMING, memory_order_relaxed);
    pthread_mutex_unlock(&device->lock);
    nyb_cuda_kernel made;
    status = make_kernel(scope, entry, &made);
    pthread_mutex_lock(&device->lock);
    if (status == NYB_OK) entry->kernel = made;
    atomic_store_explicit(&entry->state, status == NYB_OK ? READY : ABSENT, memory_order_release);
    pthread_cond_broadcast(&device->kernel_came);
  }
  pthread_mutex_unlock(&device->lock);
  if (status == NYB_OK) *kernel = &entry->kernel;
  return status;
}

nyb_status nyb_cuda_kernel_get(nyb_cuda_scope *scope, const nyb_cuda_spec *spec, int32_t threads,
                               int32_t dynamic_shared_bytes, const nyb_cuda_kernel **kernel) {
  const kernel_entry *entry = find_kernel(scope->device, spec, threads, dynamic_shared_bytes);
  if (entry != NULL && atomic_load_explicit(&entry->state, memory_order_acquire) == READY) {
    *kernel = &entry->kernel;
    return NYB_OK;
  }
  return come_by_kernel(scope, spec, threads, dynamic_shared_bytes, kernel);
}

/* ---- Launching ------------------------------------------------------------------------------ */

nyb_status nyb_cuda_launch(nyb_cuda_scope *scope, const nyb_cuda_kernel *kernel,
                           const int64_t grid[3], void *arguments, nyb_stream stream,
                           bool overlap) {
  static const int64_t largest[3] = {INT32_MAX, 65535, 65535};
  for (int axis = 0; axis < 3; axis++) {
    if (grid[axis] >= 1 && grid[axis] <= largest[axis]) continue;
    return nyb_fail(NYB_ERROR_SHAPE,
                    "the CUDA kernel %s would need %lld x %lld x %lld blocks; a grid has at most "
                    "2147483647 x 65535 x 65535",
                    kernel->name, (long long)grid[0], (long long)grid[1], (long long)grid[2]);
  }
  nyb_cu_launch_attribute attribute = {.id = NYB_CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
                                       .value.enabled = 1};
  const bool overlaps = overlap && scope->properties->compute_capability >= 90;
  const nyb_cu_launch launch = {
      .grid = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]},
      .block = {(unsigned)kernel->threads, 1, 1},
      .dynamic_shared_bytes = (unsigned)kernel->dynamic_shared_bytes,
      .stream = stream,
      .attributes = overlaps ? &attribute : NULL,
      .attribute_count = overlaps ? 1 : 0,
  };
  void *parameters[] = {arguments};
  return check_call(scope, kernel->name,
                    scope->driver->LaunchKernelEx(&launch, kernel->function, parameters, NULL),
                    "cuLaunchKernelEx");
}
