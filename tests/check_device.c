/* SPDX-License-Identifier: Apache-2.0 */
#include "check_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The part of the driver's ABI that is used, by its names in the library without "cu". */
#define DRIVER_FUNCTIONS(F)                                                                \
  F(Init, "Init", (unsigned))                                                              \
  F(DeviceGet, "DeviceGet", (int32_t *, int))                                              \
  F(DeviceGetName, "DeviceGetName", (char *, int, int32_t))                                \
  F(DeviceGetAttribute, "DeviceGetAttribute", (int32_t *, int, int32_t))                   \
  F(DeviceTotalMem, "DeviceTotalMem_v2", (size_t *, int32_t))                              \
  F(DevicePrimaryCtxRetain, "DevicePrimaryCtxRetain", (void **, int32_t))                  \
  F(DevicePrimaryCtxRelease, "DevicePrimaryCtxRelease_v2", (int32_t))                      \
  F(CtxSetCurrent, "CtxSetCurrent", (void *))                                              \
  F(GetErrorName, "GetErrorName", (int32_t, const char **))                                \
  F(GetErrorString, "GetErrorString", (int32_t, const char **))                            \
  F(MemAlloc, "MemAlloc_v2", (uint64_t *, size_t))                                         \
  F(MemFree, "MemFree_v2", (uint64_t))                                                     \
  F(MemAllocHost, "MemAllocHost_v2", (void **, size_t))                                    \
  F(MemFreeHost, "MemFreeHost", (void *))                                                  \
  F(MemGetInfo, "MemGetInfo_v2", (size_t *, size_t *))                                     \
  F(MemcpyHtoDAsync, "MemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *))       \
  F(MemcpyDtoHAsync, "MemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *))             \
  F(MemcpyDtoDAsync, "MemcpyDtoDAsync_v2", (uint64_t, uint64_t, size_t, void *))           \
  F(MemsetD8Async, "MemsetD8Async", (uint64_t, unsigned char, size_t, void *))             \
  F(StreamCreate, "StreamCreate", (void **, unsigned))                                     \
  F(StreamDestroy, "StreamDestroy_v2", (void *))                                           \
  F(StreamSynchronize, "StreamSynchronize", (void *))                                      \
  F(StreamBeginCapture, "StreamBeginCapture_v2", (void *, int))                            \
  F(StreamEndCapture, "StreamEndCapture", (void *, void **))                               \
  F(GraphInstantiate, "GraphInstantiateWithFlags", (void **, void *, unsigned long long))  \
  F(GraphLaunch, "GraphLaunch", (void *, void *))                                          \
  F(GraphExecDestroy, "GraphExecDestroy", (void *))                                        \
  F(GraphDestroy, "GraphDestroy", (void *))                                                \
  F(EventCreate, "EventCreate", (void **, unsigned))                                       \
  F(EventDestroy, "EventDestroy_v2", (void *))                                             \
  F(EventRecord, "EventRecord", (void *, void *))                                          \
  F(EventSynchronize, "EventSynchronize", (void *))                                        \
  F(EventElapsedTime, "EventElapsedTime", (float *, void *, void *))                       \
  F(ModuleLoadData, "ModuleLoadData", (void **, const void *))                             \
  F(ModuleGetFunction, "ModuleGetFunction", (void **, void *, const char *))               \
  F(LaunchKernel, "LaunchKernel",                                                          \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, \
     void **, void **))

static struct {
  bool open;
  int32_t ordinal;
  void *context;
  device_properties properties;
  char error[512];
#define DECLARE(name, symbol, arguments) int32_t(*name) arguments;
  DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
} driver;

const char *device_error(void) { return driver.error; }
const device_properties *device_describe(void) { return &driver.properties; }

static bool failed(const char *what, const char *words) {
  snprintf(driver.error, sizeof driver.error, "%s: %s", what, words);
  return false;
}

static bool check(int32_t result, const char *call) {
  if (result == 0) return true;
  const char *name = "?", *text = "?";
  driver.GetErrorName(result, &name);
  driver.GetErrorString(result, &text);
  snprintf(driver.error, sizeof driver.error, "%s: %s (%s)", call, name, text);
  return false;
}
#define TRY(name, ...) check(driver.name(__VA_ARGS__), "cu" #name)

static uint64_t address_of(const void *memory) { return (uint64_t)(uintptr_t)memory; }

/* ---- Loading -------------------------------------------------------------------------------- */

static bool find_functions(void *library) {
  static const struct {
    const char *symbol;
    size_t offset;
  } functions[] = {
#define ENTRY(name, symbol, arguments) \
  {"cu" symbol, (size_t)((const char *)&driver.name - (const char *)&driver)},
      DRIVER_FUNCTIONS(ENTRY)
#undef ENTRY
  };
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    void *function = dlsym(library, functions[i].symbol);
    if (function == NULL) return failed("libcuda has no", functions[i].symbol);
    memcpy((char *)&driver + functions[i].offset, &function, sizeof function);
  }
  return true;
}

static bool load(void) {
  const char *name = getenv("NYBBLE_LIBCUDA");
  void *library = dlopen(name != NULL && name[0] != '\0' ? name : "libcuda.so.1", RTLD_NOW);
  if (library == NULL) return failed("libcuda could not be loaded", dlerror());
  return find_functions(library) && TRY(Init, 0);
}

static bool describe(void) {
  enum { MULTIPROCESSORS = 16, L2_BYTES = 38, MAJOR = 75, MINOR = 76 };
  device_properties *p = &driver.properties;
  int32_t major, minor, l2_bytes;
  size_t memory_bytes;
  if (!TRY(DeviceGetName, p->name, (int)sizeof p->name, driver.ordinal) ||
      !TRY(DeviceGetAttribute, &major, MAJOR, driver.ordinal) ||
      !TRY(DeviceGetAttribute, &minor, MINOR, driver.ordinal) ||
      !TRY(DeviceGetAttribute, &p->multiprocessors, MULTIPROCESSORS, driver.ordinal) ||
      !TRY(DeviceGetAttribute, &l2_bytes, L2_BYTES, driver.ordinal) ||
      !TRY(DeviceTotalMem, &memory_bytes, driver.ordinal)) {
    return false;
  }
  p->compute_capability = major * 10 + minor;
  p->l2_bytes = l2_bytes;
  p->memory_bytes = (int64_t)memory_bytes;
  return true;
}

bool device_open(int ordinal) {
  if (driver.open) return true;
  if (!load() || !TRY(DeviceGet, &driver.ordinal, ordinal) || !describe() ||
      !TRY(DevicePrimaryCtxRetain, &driver.context, driver.ordinal)) {
    return false;
  }
  driver.open = true;
  return TRY(CtxSetCurrent, driver.context);
}

void device_close(void) {
  if (!driver.open) return;
  driver.CtxSetCurrent(NULL);
  driver.DevicePrimaryCtxRelease(driver.ordinal);
  driver.open = false;
}

/* ---- Memory --------------------------------------------------------------------------------- */

void *device_allocate(int64_t bytes) {
  uint64_t address;
  if (!TRY(MemAlloc, &address, bytes > 0 ? (size_t)bytes : 1)) return NULL;
  return (void *)(uintptr_t)address;
}

void device_free(void *memory) {
  if (memory != NULL) TRY(MemFree, address_of(memory));
}

void *device_allocate_host(int64_t bytes) {
  void *memory;
  return TRY(MemAllocHost, &memory, bytes > 0 ? (size_t)bytes : 1) ? memory : NULL;
}

void device_free_host(void *memory) {
  if (memory != NULL) TRY(MemFreeHost, memory);
}

int64_t device_free_bytes(void) {
  size_t free_bytes, all_bytes;
  return TRY(MemGetInfo, &free_bytes, &all_bytes) ? (int64_t)free_bytes : -1;
}

bool device_upload(void *to, const void *from, int64_t bytes, device_stream stream) {
  return bytes == 0 || TRY(MemcpyHtoDAsync, address_of(to), from, (size_t)bytes, stream);
}

bool device_download(void *to, const void *from, int64_t bytes, device_stream stream) {
  return bytes == 0 || TRY(MemcpyDtoHAsync, to, address_of(from), (size_t)bytes, stream);
}

bool device_copy(void *to, const void *from, int64_t bytes, device_stream stream) {
  return bytes == 0 ||
         TRY(MemcpyDtoDAsync, address_of(to), address_of(from), (size_t)bytes, stream);
}

bool device_fill(void *to, uint8_t value, int64_t bytes, device_stream stream) {
  return bytes == 0 || TRY(MemsetD8Async, address_of(to), value, (size_t)bytes, stream);
}

/* ---- Streams, events, graphs ---------------------------------------------------------------- */

bool device_stream_create(device_stream *stream) {
  enum { NON_BLOCKING = 1 };
  return TRY(StreamCreate, stream, NON_BLOCKING);
}

void device_stream_destroy(device_stream stream) {
  if (stream != NULL) TRY(StreamDestroy, stream);
}

bool device_synchronize(device_stream stream) { return TRY(StreamSynchronize, stream); }

/* The handles are the driver's own. */
device_event *device_event_create(void) {
  void *event;
  return TRY(EventCreate, &event, 0) ? event : NULL;
}

void device_event_destroy(device_event *event) {
  if (event != NULL) TRY(EventDestroy, event);
}

bool device_event_record(device_event *event, device_stream stream) {
  return TRY(EventRecord, event, stream);
}

bool device_elapsed_us(device_event *start, device_event *end, double *time_us) {
  float time_ms;
  if (!TRY(EventSynchronize, end) || !TRY(EventElapsedTime, &time_ms, start, end)) return false;
  *time_us = (double)time_ms * 1e3;
  return true;
}

bool device_capture_begin(device_stream stream) {
  enum { THREAD_LOCAL = 1 };
  return TRY(StreamBeginCapture, stream, THREAD_LOCAL);
}

device_graph *device_capture_end(device_stream stream) {
  void *graph = NULL, *executable = NULL;
  if (!TRY(StreamEndCapture, stream, &graph)) return NULL;
  const bool good = TRY(GraphInstantiate, &executable, graph, 0);
  TRY(GraphDestroy, graph);
  return good ? executable : NULL;
}

bool device_graph_launch(device_graph *graph, device_stream stream) {
  return TRY(GraphLaunch, graph, stream);
}

void device_graph_destroy(device_graph *graph) {
  if (graph != NULL) TRY(GraphExecDestroy, graph);
}

/* ---- Programs ------------------------------------------------------------------------------- */

device_program *device_program_load(const char *ptx, const char *name) {
  void *module, *function;
  if (!TRY(ModuleLoadData, &module, ptx)) return NULL;
  return TRY(ModuleGetFunction, &function, module, name) ? function : NULL;
}

bool device_program_launch(device_program *program, int64_t blocks, int threads, void **arguments,
                           device_stream stream) {
  return TRY(LaunchKernel, program, (unsigned)blocks, 1, 1, (unsigned)threads, 1, 1, 0, stream,
             arguments, NULL);
}
