/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../context.h"
#include "availability.h"
#include "jit.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif
#include <pthread.h>

/* Written once, by load(). */
static nyb_cuda_driver driver;
static char unavailable[384]; /* why, or "" */
static pthread_once_t loaded = PTHREAD_ONCE_INIT;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(unavailable, sizeof unavailable, format, arguments);
  va_end(arguments);
}

/* ---- Errors in the driver's words ----------------------------------------------------------- */

static const char *error_name(nyb_cu_result result) {
  const char *name = NULL;
  if (driver.GetErrorName(result, &name) != NYB_CU_SUCCESS || name == NULL) return "unknown error";
  return name;
}

static const char *error_text(nyb_cu_result result) {
  const char *text = NULL;
  if (driver.GetErrorString(result, &text) != NYB_CU_SUCCESS || text == NULL) {
    return "the driver has no words for it";
  }
  return text;
}

nyb_status nyb_cuda_check(const nyb_cuda_driver *the_driver, nyb_cu_result result,
                          const char *call) {
  (void)the_driver; /* there is one */
  if (result == NYB_CU_SUCCESS) return NYB_OK;
  return nyb_fail(result == NYB_CU_ERROR_OUT_OF_MEMORY ? NYB_ERROR_OUT_OF_MEMORY : NYB_ERROR_DEVICE,
                  "%s failed with %d, %s: %s", call, result, error_name(result),
                  error_text(result));
}

/* ---- Loading -------------------------------------------------------------------------------- */

#if defined(__linux__)

static bool find_symbols(void *library, const char *file) {
  void *symbol;
#define NYB_CU(name, symbol_name, arguments)                                     \
  symbol = dlsym(library, symbol_name);                                          \
  if (symbol == NULL) {                                                          \
    say("needs CUDA 11.8 or later: the driver %s has no %s", file, symbol_name); \
    return false;                                                                \
  }                                                                              \
  memcpy(&driver.name, &symbol, sizeof symbol);
#define NYB_CU_OPTIONAL(name, symbol_name, arguments) \
  symbol = dlsym(library, symbol_name);               \
  memcpy(&driver.name, &symbol, sizeof symbol);
#include "driver_functions.inc"
#undef NYB_CU_OPTIONAL
#undef NYB_CU
  return true;
}

static bool says_no(nyb_cu_result result, const char *call) {
  if (result == NYB_CU_SUCCESS) return false;
  say("has no working driver: %s failed with %d, %s: %s", call, result, error_name(result),
      error_text(result));
  return true;
}

/* Whether one of them is new enough. */
static bool find_devices(void) {
  int count = 0, best = 0;
  if (says_no(driver.DeviceGetCount(&count), "cuDeviceGetCount")) return false;
  if (count == 0) {
    say("needs an NVIDIA GPU: the driver finds none");
    return false;
  }
  for (int ordinal = 0; ordinal < count; ordinal++) {
    nyb_cu_device device;
    int major = 0, minor = 0;
    if (says_no(driver.DeviceGet(&device, ordinal), "cuDeviceGet") ||
        says_no(driver.DeviceGetAttribute(&major, NYB_CU_DEVICE_COMPUTE_CAPABILITY_MAJOR, device),
                "cuDeviceGetAttribute") ||
        says_no(driver.DeviceGetAttribute(&minor, NYB_CU_DEVICE_COMPUTE_CAPABILITY_MINOR, device),
                "cuDeviceGetAttribute")) {
      return false;
    }
    if (10 * major + minor > best) best = 10 * major + minor;
  }
  if (best < NYB_CUDA_OLDEST_CAPABILITY) {
    say("needs an NVIDIA GPU of compute capability 8.0 or more; the best here has %d.%d", best / 10,
        best % 10);
    return false;
  }
  driver.device_count = count;
  return true;
}

static void load(void) {
  const char *asked = getenv("NYBBLE_LIBCUDA");
  const char *file = asked != NULL && asked[0] != '\0' ? asked : "libcuda.so.1";
  void *const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    say("needs an NVIDIA driver: %s", dlerror());
    return;
  }
  int version = 0;
  if (!find_symbols(library, file) || says_no(driver.Init(0), "cuInit") ||
      says_no(driver.DriverGetVersion(&version), "cuDriverGetVersion")) {
    return;
  }
  driver.version = version;
  if (version < NYB_CUDA_OLDEST_VERSION) {
    say("needs a driver of CUDA 11.8 or later; %s is of %d.%d", file, version / 1000,
        version % 1000 / 10);
    return;
  }
  find_devices();
}

#else

static void load(void) { say("is for Linux"); }

#endif

const nyb_cuda_driver *nyb_cuda_driver_find(const char **reason) {
  pthread_once(&loaded, load);
  *reason = unavailable;
  return unavailable[0] == '\0' ? &driver : NULL;
}

nyb_status nyb_cuda_driver_load(const nyb_cuda_driver **found) {
  const char *reason;
  *found = nyb_cuda_driver_find(&reason);
  return *found != NULL ? NYB_OK : nyb_fail(NYB_ERROR_UNSUPPORTED, "CUDA %s", reason);
}

bool nyb_cuda_runs_here(const char **reason) {
  return nyb_cuda_driver_find(reason) != NULL && nyb_nvrtc_find(reason);
}
