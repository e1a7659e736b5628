/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Declared before they are defined, as the compiler asks of exported functions. */
#define DEFINE(name, arguments)        \
  EXPORT nyb_cu_result name arguments; \
  EXPORT nyb_cu_result name arguments

static fake_cuda_control_struct control = {
    .version = 13000,
    .device_count = 1,
    .compute_capability = {90, 80, 75, 120},
    .blocks_per_multiprocessor = 2,
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT fake_cuda_control_struct *fake_cuda_control(void);
EXPORT fake_cuda_control_struct *fake_cuda_control(void) { return &control; }

/* ---- Counting and failing ------------------------------------------------------------------- */

enum {
  ERROR_INVALID_VALUE = 1,
  ERROR_NO_DEVICE = 100,
  ERROR_INVALID_DEVICE = 101,
  ERROR_INVALID_IMAGE = 200,
  ERROR_INVALID_CONTEXT = 201,
  ERROR_NOT_FOUND = 500,
  ERROR_LAUNCH_FAILED = 719
};

#define DEVICE_BYTES ((size_t)1 << 34)

enum { MAX_CALLS = 64 };
static struct {
  const char *name;
  int64_t count;
} calls[MAX_CALLS];

/* Under the lock. */
static int64_t *count_of(const char *name) {
  int i = 0;
  while (i < MAX_CALLS - 1 && calls[i].name != NULL && strcmp(calls[i].name, name) != 0) i++;
  if (calls[i].name == NULL) calls[i].name = name;
  return &calls[i].count;
}

EXPORT int64_t fake_cuda_calls(const char *name);
EXPORT int64_t fake_cuda_calls(const char *name) {
  pthread_mutex_lock(&lock);
  int64_t count = 0;
  for (int i = 0; i < MAX_CALLS && calls[i].name != NULL; i++) {
    if (strcmp(calls[i].name, name) == 0) count = calls[i].count;
  }
  pthread_mutex_unlock(&lock);
  return count;
}

/* Every entry point begins with ENTER: it holds the lock from there to LEAVE. */
static nyb_cu_result enter(const char *name) {
  pthread_mutex_lock(&lock);
  *count_of(name) += 1;
  if (control.fail_call == NULL) return NYB_CU_SUCCESS;
  const bool any = strcmp(control.fail_call, "*") == 0;
  if (!any && strcmp(control.fail_call, name) != 0) return NYB_CU_SUCCESS;
  if (control.fail_after-- > 0) return NYB_CU_SUCCESS;
  if (any) control.fail_call = NULL;
  control.failed_call = name;
  return control.fail_result;
}

#define ENTER(name) nyb_cu_result result = enter(name)
#define LEAVE()                \
  pthread_mutex_unlock(&lock); \
  return result
#define IF_GOOD if (result == NYB_CU_SUCCESS)

/* ---- The driver and its devices ------------------------------------------------------------- */

DEFINE(cuInit, (unsigned flags)) {
  ENTER("cuInit");
  IF_GOOD result = flags == 0 ? NYB_CU_SUCCESS : ERROR_INVALID_VALUE;
  LEAVE();
}

DEFINE(cuDriverGetVersion, (int *version)) {
  ENTER("cuDriverGetVersion");
  IF_GOOD *version = control.version;
  LEAVE();
}

static const struct {
  nyb_cu_result result;
  const char *name, *text;
} errors[] = {
    {NYB_CU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {NYB_CU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NYB_CU_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

static nyb_cu_result words(nyb_cu_result error, const char **name, const char **text) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
    if (errors[i].result != error) continue;
    *name = errors[i].name;
    *text = errors[i].text;
    return NYB_CU_SUCCESS;
  }
  *name = *text = NULL;
  return ERROR_INVALID_VALUE;
}

DEFINE(cuGetErrorName, (nyb_cu_result error, const char **name)) {
  const char *text;
  return words(error, name, &text);
}

DEFINE(cuGetErrorString, (nyb_cu_result error, const char **text)) {
  const char *name;
  return words(error, &name, text);
}

DEFINE(cuDeviceGetCount, (int *count)) {
  ENTER("cuDeviceGetCount");
  IF_GOOD *count = control.device_count;
  LEAVE();
}

static bool is_device(int ordinal) { return ordinal >= 0 && ordinal < control.device_count; }

DEFINE(cuDeviceGet, (nyb_cu_device * device, int ordinal)) {
  ENTER("cuDeviceGet");
  IF_GOOD result = is_device(ordinal) ? NYB_CU_SUCCESS : ERROR_INVALID_DEVICE;
  IF_GOOD *device = ordinal;
  LEAVE();
}

DEFINE(cuDeviceGetName, (char *name, int bytes, nyb_cu_device device)) {
  ENTER("cuDeviceGetName");
  IF_GOOD result = is_device(device) ? NYB_CU_SUCCESS : ERROR_INVALID_DEVICE;
  IF_GOOD strncpy(name, "Fake GPU", (size_t)bytes);
  LEAVE();
}

DEFINE(cuDeviceTotalMem_v2, (size_t * bytes, nyb_cu_device device)) {
  ENTER("cuDeviceTotalMem");
  IF_GOOD result = is_device(device) ? NYB_CU_SUCCESS : ERROR_INVALID_DEVICE;
  IF_GOOD *bytes = DEVICE_BYTES;
  LEAVE();
}

static int attribute_value(nyb_cu_device_attribute attribute, nyb_cu_device device) {
  switch (attribute) {
    case NYB_CU_DEVICE_MULTIPROCESSOR_COUNT: return 132;
    case NYB_CU_DEVICE_L2_CACHE_BYTES: return 50 << 20;
    case NYB_CU_DEVICE_COMPUTE_CAPABILITY_MAJOR: return control.compute_capability[device] / 10;
    case NYB_CU_DEVICE_COMPUTE_CAPABILITY_MINOR: return control.compute_capability[device] % 10;
    case NYB_CU_DEVICE_SHARED_BYTES_PER_MULTIPROCESSOR: return 228 << 10;
    case NYB_CU_DEVICE_PAGEABLE_MEMORY_ACCESS: return control.reads_host_memory;
    case NYB_CU_DEVICE_SHARED_BYTES_PER_BLOCK_OPTIN: return 227 << 10;
  }
  return -1;
}

DEFINE(cuDeviceGetAttribute,
       (int *value, nyb_cu_device_attribute attribute, nyb_cu_device device)) {
  ENTER("cuDeviceGetAttribute");
  IF_GOOD result = is_device(device) ? NYB_CU_SUCCESS : ERROR_INVALID_DEVICE;
  IF_GOOD *value = attribute_value(attribute, device);
  LEAVE();
}

/* ---- Contexts ------------------------------------------------------------------------------- */

/* None is ever freed: a pointer to a destroyed context is still good to look at. */
struct nyb_cu_context_opaque {
  unsigned long long id;
  nyb_cu_device device;
  bool alive;
  int retained; /* primary contexts */
};
enum { MAX_CONTEXTS = 256, MAX_STACK = 16 };
static struct nyb_cu_context_opaque contexts[MAX_CONTEXTS];
static struct nyb_cu_context_opaque primaries[FAKE_CUDA_MAX_DEVICES];
static int context_count;
static unsigned long long last_id;
static _Thread_local nyb_cu_context stack[MAX_STACK];
static _Thread_local int depth;

static nyb_cu_context current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

/* What a call that needs a current context says of it. */
static nyb_cu_result current_state(void) {
  if (current() == NULL) return ERROR_INVALID_CONTEXT;
  return current()->alive ? NYB_CU_SUCCESS : NYB_CU_ERROR_CONTEXT_IS_DESTROYED;
}

static void bring_up(nyb_cu_context context, nyb_cu_device device) {
  context->id = ++last_id;
  context->device = device;
  context->alive = true;
}

DEFINE(cuCtxCreate_v2, (nyb_cu_context * context, unsigned flags, nyb_cu_device device)) {
  (void)flags;
  ENTER("cuCtxCreate");
  IF_GOOD {
    int slot = context_count;
    for (int i = 0; control.reuses_contexts && i < context_count; i++) {
      if (!contexts[i].alive) slot = i;
    }
    if (slot == context_count) context_count++;
    bring_up(&contexts[slot], device);
    *context = stack[depth++] = &contexts[slot];
  }
  LEAVE();
}

DEFINE(cuCtxDestroy_v2, (nyb_cu_context context)) {
  ENTER("cuCtxDestroy");
  IF_GOOD {
    if (current() == context) depth--;
    context->alive = false;
  }
  LEAVE();
}

DEFINE(cuDevicePrimaryCtxRetain, (nyb_cu_context * context, nyb_cu_device device)) {
  ENTER("cuDevicePrimaryCtxRetain");
  IF_GOOD {
    if (!primaries[device].alive) bring_up(&primaries[device], device);
    primaries[device].retained++;
    *context = &primaries[device];
  }
  LEAVE();
}

DEFINE(cuDevicePrimaryCtxRelease_v2, (nyb_cu_device device)) {
  ENTER("cuDevicePrimaryCtxRelease");
  IF_GOOD {
    primaries[device].retained--;
    primaries[device].alive = primaries[device].retained > 0;
  }
  LEAVE();
}

DEFINE(cuCtxGetCurrent, (nyb_cu_context * context)) {
  ENTER("cuCtxGetCurrent");
  IF_GOOD *context = current();
  LEAVE();
}

DEFINE(cuCtxSetCurrent, (nyb_cu_context context)) {
  ENTER("cuCtxSetCurrent");
  IF_GOOD {
    if (context == NULL) {
      depth = 0;
    } else {
      if (depth == 0) depth = 1;
      stack[depth - 1] = context;
    }
  }
  LEAVE();
}

DEFINE(cuCtxPushCurrent_v2, (nyb_cu_context context)) {
  ENTER("cuCtxPushCurrent");
  IF_GOOD result = context->alive ? NYB_CU_SUCCESS : NYB_CU_ERROR_CONTEXT_IS_DESTROYED;
  IF_GOOD result = depth < MAX_STACK ? NYB_CU_SUCCESS : ERROR_INVALID_VALUE;
  IF_GOOD stack[depth++] = context;
  LEAVE();
}

DEFINE(cuCtxPopCurrent_v2, (nyb_cu_context * context)) {
  ENTER("cuCtxPopCurrent");
  IF_GOOD result = depth > 0 ? NYB_CU_SUCCESS : ERROR_INVALID_CONTEXT;
  IF_GOOD *context = stack[--depth];
  LEAVE();
}

DEFINE(cuCtxGetDevice, (nyb_cu_device * device)) {
  ENTER("cuCtxGetDevice");
  IF_GOOD result = current_state();
  IF_GOOD *device = current()->device;
  LEAVE();
}

DEFINE(cuCtxSynchronize, (void)) {
  ENTER("cuCtxSynchronize");
  IF_GOOD result = current_state();
  LEAVE();
}

#if !defined(FAKE_CUDA_11)
DEFINE(cuCtxGetId, (nyb_cu_context context, unsigned long long *id)) {
  ENTER("cuCtxGetId");
  IF_GOOD result = context->alive ? NYB_CU_SUCCESS : NYB_CU_ERROR_CONTEXT_IS_DESTROYED;
  IF_GOOD *id = context->id;
  LEAVE();
}
#endif

/* ---- Modules and launches ------------------------------------------------------------------- */

struct nyb_cu_module_opaque {
  struct nyb_cu_module_opaque *next;
  char name[64]; /* of the one kernel in it */
  nyb_cu_context context;
  bool alive;
};
static struct nyb_cu_module_opaque *modules; /* reachable, so that no leak is seen */

/* What the fake NVRTC makes: this word, the kernel's name, a line's end. */
#define IMAGE_MAGIC "fake cubin of "

DEFINE(cuModuleLoadDataEx,
       (nyb_cu_module * module, const void *image, unsigned options, int *names, void **values)) {
  (void)options, (void)names, (void)values;
  ENTER("cuModuleLoadDataEx");
  IF_GOOD result = current_state();
  IF_GOOD {
    const size_t magic = strlen(IMAGE_MAGIC);
    if (memcmp(image, IMAGE_MAGIC, magic) != 0) {
      result = ERROR_INVALID_IMAGE;
    } else {
      nyb_cu_module made = calloc(1, sizeof *made);
      const char *name = (const char *)image + magic;
      memcpy(made->name, name, strcspn(name, "\n"));
      made->context = current();
      made->alive = true;
      made->next = modules;
      *module = modules = made;
      control.modules_loaded++;
    }
  }
  LEAVE();
}

DEFINE(cuModuleUnload, (nyb_cu_module module)) {
  ENTER("cuModuleUnload");
  IF_GOOD {
    module->alive = false;
    control.modules_loaded--;
  }
  LEAVE();
}

DEFINE(cuModuleGetFunction, (nyb_cu_function * function, nyb_cu_module module, const char *name)) {
  ENTER("cuModuleGetFunction");
  IF_GOOD result = strcmp(module->name, name) == 0 ? NYB_CU_SUCCESS : ERROR_NOT_FOUND;
  IF_GOOD *function = (nyb_cu_function)(void *)module; /* a function is its module */
  LEAVE();
}

DEFINE(cuFuncGetAttribute,
       (int *value, nyb_cu_function_attribute attribute, nyb_cu_function function)) {
  (void)function;
  ENTER("cuFuncGetAttribute");
  IF_GOOD *value = attribute == NYB_CU_FUNCTION_REGISTERS ? 128 : 0;
  LEAVE();
}

DEFINE(cuFuncSetAttribute,
       (nyb_cu_function function, nyb_cu_function_attribute attribute, int value)) {
  (void)function, (void)attribute;
  ENTER("cuFuncSetAttribute");
  IF_GOOD result = value <= 227 << 10 ? NYB_CU_SUCCESS : ERROR_INVALID_VALUE;
  LEAVE();
}

DEFINE(cuOccupancyMaxActiveBlocksPerMultiprocessor,
       (int *blocks, nyb_cu_function function, int threads, size_t dynamic_shared_bytes)) {
  (void)function, (void)threads, (void)dynamic_shared_bytes;
  ENTER("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  IF_GOOD *blocks = control.blocks_per_multiprocessor;
  LEAVE();
}

#if !defined(FAKE_CUDA_OLD)
DEFINE(cuLaunchKernelEx,
       (const nyb_cu_launch *launch, nyb_cu_function function, void **parameters, void **extra)) {
  (void)extra;
  ENTER("cuLaunchKernelEx");
  IF_GOOD result = current_state();
  nyb_cu_module module = (nyb_cu_module)(void *)function;
  IF_GOOD result = module->context == current() ? NYB_CU_SUCCESS : ERROR_INVALID_CONTEXT;
  void (*launched)(void *, const char *, const nyb_cu_launch *, void *) = control.launch;
  void *const data = control.launch_data;
  IF_GOOD control.launches++;
  pthread_mutex_unlock(&lock);
  if (result == NYB_CU_SUCCESS && launched != NULL) {
    launched(data, module->name, launch, parameters[0]);
  }
  return result;
}
#endif

/* ---- Memory --------------------------------------------------------------------------------- */

typedef struct allocation {
  struct allocation *next;
  char *memory;
  size_t bytes;
  nyb_cu_context context; /* NULL: pinned host memory */
} allocation;
static allocation *allocations;

static allocation *allocation_of(nyb_cu_address address) {
  allocation *a = allocations;
  while (a != NULL &&
         (address < (uintptr_t)a->memory || address >= (uintptr_t)a->memory + a->bytes)) {
    a = a->next;
  }
  return a;
}

static nyb_cu_result allocate(void **memory, size_t bytes, nyb_cu_context context) {
  if (bytes == 0) return ERROR_INVALID_VALUE;
  const size_t limit = control.memory_bytes != 0 ? control.memory_bytes : DEVICE_BYTES;
  if (bytes > limit || (size_t)control.live_bytes > limit - bytes) {
    return NYB_CU_ERROR_OUT_OF_MEMORY;
  }
  allocation *a = malloc(sizeof *a);
  *a = (allocation){allocations, aligned_alloc(256, (bytes + 255) / 256 * 256), bytes, context};
  memset(a->memory, 0xA5, bytes);
  allocations = a;
  control.live_allocations++;
  control.live_bytes += (int64_t)bytes;
  *memory = a->memory;
  return NYB_CU_SUCCESS;
}

static nyb_cu_result release(const void *memory) {
  allocation **link = &allocations;
  while (*link != NULL && (*link)->memory != memory) link = &(*link)->next;
  allocation *a = *link;
  if (a == NULL) return ERROR_INVALID_VALUE;
  *link = a->next;
  control.live_allocations--;
  control.live_bytes -= (int64_t)a->bytes;
  free(a->memory);
  free(a);
  return NYB_CU_SUCCESS;
}

DEFINE(cuMemAlloc_v2, (nyb_cu_address * address, size_t bytes)) {
  ENTER("cuMemAlloc");
  void *memory = NULL;
  IF_GOOD result = current_state();
  IF_GOOD result = allocate(&memory, bytes, current());
  IF_GOOD *address = (uintptr_t)memory;
  LEAVE();
}

DEFINE(cuMemFree_v2, (nyb_cu_address address)) {
  ENTER("cuMemFree");
  IF_GOOD result = current_state();
  IF_GOOD result = release((const void *)(uintptr_t)address);
  LEAVE();
}

DEFINE(cuMemAllocHost_v2, (void **memory, size_t bytes)) {
  ENTER("cuMemAllocHost");
  IF_GOOD result = current_state();
  IF_GOOD result = allocate(memory, bytes, NULL);
  LEAVE();
}

DEFINE(cuMemFreeHost, (void *memory)) {
  ENTER("cuMemFreeHost");
  IF_GOOD result = current_state();
  IF_GOOD result = release(memory);
  LEAVE();
}

DEFINE(cuMemGetInfo_v2, (size_t * free_bytes, size_t *total)) {
  ENTER("cuMemGetInfo");
  IF_GOOD result = current_state();
  IF_GOOD {
    *total = control.memory_bytes != 0 ? control.memory_bytes : DEVICE_BYTES;
    *free_bytes = *total - (size_t)control.live_bytes;
  }
  LEAVE();
}

DEFINE(cuPointerGetAttributes, (unsigned count, nyb_cu_pointer_attribute *attributes, void **values,
                                nyb_cu_address address)) {
  ENTER("cuPointerGetAttributes");
  IF_GOOD result = current_state();
  IF_GOOD {
    const allocation *a = allocation_of(address);
    const bool on_device = a != NULL && a->context != NULL;
    const bool reachable = a != NULL && (!on_device || a->context->device == current()->device);
    for (unsigned i = 0; i < count; i++) {
      switch (attributes[i]) {
        case NYB_CU_POINTER_MEMORY_TYPE:
          *(unsigned *)values[i] = a == NULL   ? 0
                                   : on_device ? NYB_CU_MEMORY_DEVICE
                                               : NYB_CU_MEMORY_HOST;
          break;
        case NYB_CU_POINTER_DEVICE_POINTER:
          *(nyb_cu_address *)values[i] = reachable ? address : 0;
          break;
        case NYB_CU_POINTER_DEVICE_ORDINAL:
          *(int *)values[i] = on_device ? a->context->device : -2;
          break;
      }
    }
  }
  LEAVE();
}

static nyb_cu_result copy(void *to, const void *from, size_t bytes) {
  const nyb_cu_result state = current_state();
  if (state == NYB_CU_SUCCESS) memmove(to, from, bytes);
  return state;
}

static void *pointer(nyb_cu_address address) { return (void *)(uintptr_t)address; }

#define DEFINE_COPY(symbol, name, arguments, to, from) \
  DEFINE(symbol, arguments) {                          \
    ENTER(name);                                       \
    IF_GOOD result = copy(to, from, bytes);            \
    LEAVE();                                           \
  }
#define DEFINE_COPY_ASYNC(symbol, name, arguments, to, from) \
  DEFINE(symbol, arguments) {                                \
    (void)stream;                                            \
    ENTER(name);                                             \
    IF_GOOD result = copy(to, from, bytes);                  \
    LEAVE();                                                 \
  }
DEFINE_COPY(cuMemcpyHtoD_v2, "cuMemcpyHtoD", (nyb_cu_address to, const void *from, size_t bytes),
            pointer(to), from)
DEFINE_COPY(cuMemcpyDtoH_v2, "cuMemcpyDtoH", (void *to, nyb_cu_address from, size_t bytes), to,
            pointer(from))
DEFINE_COPY_ASYNC(cuMemcpyAsync, "cuMemcpyAsync",
                  (nyb_cu_address to, nyb_cu_address from, size_t bytes, nyb_stream stream),
                  pointer(to), pointer(from))
DEFINE_COPY_ASYNC(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync",
                  (nyb_cu_address to, const void *from, size_t bytes, nyb_stream stream),
                  pointer(to), from)
DEFINE_COPY_ASYNC(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync",
                  (void *to, nyb_cu_address from, size_t bytes, nyb_stream stream), to,
                  pointer(from))
DEFINE_COPY_ASYNC(cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync",
                  (nyb_cu_address to, nyb_cu_address from, size_t bytes, nyb_stream stream),
                  pointer(to), pointer(from))

DEFINE(cuMemcpy2DAsync_v2, (const nyb_cu_copy_2d *c, nyb_stream stream)) {
  (void)stream;
  ENTER("cuMemcpy2DAsync");
  const char *from =
      c->source_memory_type == NYB_CU_MEMORY_HOST ? c->source_host : pointer(c->source_device);
  char *to =
      c->target_memory_type == NYB_CU_MEMORY_HOST ? c->target_host : pointer(c->target_device);
  for (size_t row = 0; row < c->height && result == NYB_CU_SUCCESS; row++) {
    result = copy(to + (c->target_y + row) * c->target_pitch_bytes + c->target_x_bytes,
                  from + (c->source_y + row) * c->source_pitch_bytes + c->source_x_bytes,
                  c->width_bytes);
  }
  LEAVE();
}

DEFINE(cuMemsetD8Async, (nyb_cu_address to, unsigned char value, size_t bytes, nyb_stream stream)) {
  (void)stream;
  ENTER("cuMemsetD8Async");
  IF_GOOD result = current_state();
  /* Kernels write nothing here: for programs that poison what a kernel is to write. */
  const bool fills = getenv("FAKE_CUDA_WITHOUT_FILLS") == NULL;
  if (fills && result == NYB_CU_SUCCESS) memset(pointer(to), value, bytes);
  LEAVE();
}

DEFINE(cuMemsetD32Async, (nyb_cu_address to, unsigned value, size_t words_, nyb_stream stream)) {
  (void)stream;
  ENTER("cuMemsetD32Async");
  IF_GOOD result = current_state();
  for (size_t i = 0; i < words_ && result == NYB_CU_SUCCESS; i++) {
    memcpy((char *)pointer(to) + 4 * i, &value, 4);
  }
  LEAVE();
}

/* ---- Streams and events: everything has happened when a call returns --------------------------
 */

static char handles[64];
static int next_handle;

DEFINE(cuStreamCreate, (nyb_stream * stream, unsigned flags)) {
  (void)flags;
  ENTER("cuStreamCreate");
  IF_GOOD result = current_state();
  IF_GOOD *stream = &handles[next_handle++ % 64];
  LEAVE();
}

DEFINE(cuEventCreate, (nyb_cu_event * event, unsigned flags)) {
  (void)flags;
  ENTER("cuEventCreate");
  IF_GOOD result = current_state();
  IF_GOOD *event = (nyb_cu_event)(void *)&handles[next_handle++ % 64];
  LEAVE();
}

#define DEFINE_STATE_ONLY(symbol, name, arguments, unused) \
  DEFINE(symbol, arguments) {                              \
    unused;                                                \
    ENTER(name);                                           \
    IF_GOOD result = current_state();                      \
    LEAVE();                                               \
  }
DEFINE_STATE_ONLY(cuStreamDestroy_v2, "cuStreamDestroy", (nyb_stream stream), (void)stream)
DEFINE_STATE_ONLY(cuStreamSynchronize, "cuStreamSynchronize", (nyb_stream stream), (void)stream)
DEFINE_STATE_ONLY(cuStreamWaitEvent, "cuStreamWaitEvent",
                  (nyb_stream stream, nyb_cu_event event, unsigned flags),
                  ((void)stream, (void)event, (void)flags))
DEFINE_STATE_ONLY(cuEventDestroy_v2, "cuEventDestroy", (nyb_cu_event event), (void)event)
DEFINE_STATE_ONLY(cuEventRecord, "cuEventRecord", (nyb_cu_event event, nyb_stream stream),
                  ((void)event, (void)stream))
DEFINE_STATE_ONLY(cuEventSynchronize, "cuEventSynchronize", (nyb_cu_event event), (void)event)

DEFINE(cuEventElapsedTime, (float *milliseconds, nyb_cu_event start, nyb_cu_event end)) {
  (void)start, (void)end;
  ENTER("cuEventElapsedTime");
  IF_GOOD result = current_state();
  IF_GOOD *milliseconds = 1;
  LEAVE();
}

DEFINE(cuStreamIsCapturing, (nyb_stream stream, int *status)) {
  ENTER("cuStreamIsCapturing");
  IF_GOOD result = current_state();
  IF_GOOD *status = stream != NULL && stream == control.capturing;
  LEAVE();
}

static _Thread_local int capture_mode;
DEFINE(cuThreadExchangeStreamCaptureMode, (int *mode)) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  IF_GOOD {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
  }
  LEAVE();
}

/* ---- What only the checks use (tests/check_device.h): accepted, and little done ----------------
 */

static char graph_handle;

DEFINE(cuStreamBeginCapture_v2, (nyb_stream stream, int mode)) {
  (void)mode;
  ENTER("cuStreamBeginCapture");
  IF_GOOD control.capturing = stream;
  LEAVE();
}

DEFINE(cuStreamEndCapture, (nyb_stream stream, void **graph)) {
  (void)stream;
  control.capturing = NULL;
  *graph = &graph_handle;
  return 0;
}

DEFINE(cuGraphInstantiateWithFlags, (void **executable, void *graph, unsigned long long flags)) {
  (void)flags;
  *executable = graph;
  return 0;
}

DEFINE(cuGraphLaunch, (void *executable, nyb_stream stream)) {
  (void)executable;
  (void)stream;
  if (control.graph_launch != NULL) control.graph_launch(control.launch_data);
  return 0;
}

DEFINE(cuGraphExecDestroy, (void *executable)) {
  (void)executable;
  return 0;
}

DEFINE(cuGraphDestroy, (void *graph)) {
  (void)graph;
  return 0;
}

DEFINE(cuModuleLoadData, (nyb_cu_module * module, const void *image)) {
  (void)module;
  (void)image;
  return 1; /* PTX needs a driver */
}

DEFINE(cuLaunchKernel, (nyb_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        nyb_stream stream, void **parameters, void **extra)) {
  (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y;
  (void)block_z, (void)shared_bytes, (void)stream, (void)parameters, (void)extra;
  return 1;
}
