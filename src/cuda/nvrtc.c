/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and loading NVRTC. */
#if defined(__linux__)
#define _GNU_SOURCE /* dlinfo */
#endif
#include "nvrtc.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../context.h"
#include "jit.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#endif

/* Written once, by load(). */
static nyb_nvrtc nvrtc;
static int32_t version;
static char library_file[1024];
static char unavailable[384]; /* why, or "" */
static pthread_once_t loaded = PTHREAD_ONCE_INIT;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(unavailable, sizeof unavailable, format, arguments);
  va_end(arguments);
}

#if defined(__linux__)

static bool find_symbols(void *library) {
#define NYB_FIND(result, name, arguments)                                    \
  {                                                                          \
    void *const symbol = dlsym(library, "nvrtc" #name);                      \
    if (symbol == NULL) {                                                    \
      say("needs NVRTC 11.8 or later: %s has no nvrtc" #name, library_file); \
      return false;                                                          \
    }                                                                        \
    memcpy(&nvrtc.name, &symbol, sizeof symbol);                             \
  }
  NYB_NVRTC_FUNCTIONS(NYB_FIND)
#undef NYB_FIND
  return true;
}

/* NVRTC looks for its other half by name alone, and of CUDA 13.0's pip package not beside itself:
 * it finds what is loaded already. Where there is none, its own error says so. */
static void open_builtins(int major, int minor) {
  const char *slash = strrchr(library_file, '/');
  if (slash == NULL) return;
  char file[sizeof library_file + 64];
  snprintf(file, sizeof file, "%.*s/libnvrtc-builtins.so.%d.%d", (int)(slash - library_file),
           library_file, major, minor);
  dlopen(file, RTLD_LAZY | RTLD_LOCAL);
}

/* Takes a library that has been opened, if it is one that will do. */
static bool adopt(void *library, const char *name, int newest_major) {
  const struct link_map *map = NULL;
  const bool named = dlinfo(library, RTLD_DI_LINKMAP, (void *)&map) == 0 && map->l_name[0] != '\0';
  snprintf(library_file, sizeof library_file, "%s", named ? map->l_name : name);
  int major = 0, minor = 0;
  if (!find_symbols(library)) return false;
  const nyb_nvrtc_result result = nvrtc.Version(&major, &minor);
  if (result != NYB_NVRTC_SUCCESS) {
    say("needs a working NVRTC: nvrtcVersion of %s failed with %d", library_file, result);
    return false;
  }
  version = 1000 * major + 10 * minor;
  if (version < NYB_CUDA_OLDEST_VERSION) {
    say("needs NVRTC 11.8 or later; %s is of %d.%d", library_file, major, minor);
    return false;
  }
  if (major > newest_major) {
    say("needs NVRTC of the driver's major version, %d, or an earlier one; %s is of %d.%d",
        newest_major, library_file, major, minor);
    return false;
  }
  open_builtins(major, minor);
  unavailable[0] = '\0';
  return true;
}

/* RTLD_LAZY: resolving all of NVRTC's symbols takes half a second. */
static bool try_file(const char *name, int flags, int newest_major) {
  void *const library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | flags);
  return library != NULL && adopt(library, name, newest_major);
}

/* The last in the alphabet first: it is mostly the latest. */
static bool try_pattern(const char *pattern, int newest_major) {
  glob_t found;
  if (glob(pattern, 0, NULL, &found) != 0) return false;
  bool done = false;
  for (size_t i = found.gl_pathc; i > 0 && !done; i--) {
    done = try_file(found.gl_pathv[i - 1], 0, newest_major);
  }
  globfree(&found);
  return done;
}

/* pip's packages put libcudart in nvidia/cuda_runtime/lib or nvidia/cu13/lib. */
static bool try_beside_runtime(const char *runtime_name, const char *nvrtc_name, int newest_major) {
  void *const runtime = dlopen(runtime_name, RTLD_LAZY | RTLD_NOLOAD);
  if (runtime == NULL) return false;
  const struct link_map *map = NULL;
  const char *slash = NULL;
  if (dlinfo(runtime, RTLD_DI_LINKMAP, (void *)&map) == 0) slash = strrchr(map->l_name, '/');
  bool done = false;
  if (slash != NULL) {
    const int directory = (int)(slash - map->l_name);
    char file[1024];
    snprintf(file, sizeof file, "%.*s/%s", directory, map->l_name, nvrtc_name);
    done = try_file(file, 0, newest_major);
    snprintf(file, sizeof file, "%.*s/../../cuda_nvrtc/lib/%s", directory, map->l_name, nvrtc_name);
    done = done || try_file(file, 0, newest_major);
  }
  dlclose(runtime);
  return done;
}

static bool search(int newest_major) {
  static const struct {
    int major;
    const char *nvrtc, *runtime;
  } releases[] = {
      {13, "libnvrtc.so.13", "libcudart.so.13"},
      {12, "libnvrtc.so.12", "libcudart.so.12"},
      {11, "libnvrtc.so.11.2", "libcudart.so.11.0"}, /* of all of 11.2 to 11.8 */
  };
  enum { RELEASES = sizeof releases / sizeof releases[0] };
  for (int i = 0; i < RELEASES; i++) {
    if (releases[i].major > newest_major) continue;
    if (try_file(releases[i].nvrtc, RTLD_NOLOAD, newest_major)) return true;
  }
  for (int i = 0; i < RELEASES; i++) {
    if (releases[i].major > newest_major) continue;
    if (try_beside_runtime(releases[i].runtime, releases[i].nvrtc, newest_major)) return true;
    if (try_file(releases[i].nvrtc, 0, newest_major)) return true;
    char pattern[64];
    snprintf(pattern, sizeof pattern, "/usr/local/cuda/lib64/%s", releases[i].nvrtc);
    if (try_file(pattern, 0, newest_major)) return true;
    snprintf(pattern, sizeof pattern, "/usr/local/cuda-*/lib64/%s", releases[i].nvrtc);
    if (try_pattern(pattern, newest_major)) return true;
  }
  return false;
}

static void load(void) {
  /* Without a driver (kernels are compiled on a machine that has no GPU) any will do. */
  const char *no_driver;
  const nyb_cuda_driver *driver = nyb_cuda_driver_find(&no_driver);
  const int newest_major = driver == NULL ? INT32_MAX : driver->version / 1000;
  const char *asked = getenv("NYBBLE_NVRTC");
  bool found;
  if (asked != NULL && asked[0] != '\0') {
    found = try_file(asked, 0, newest_major);
    if (!found && unavailable[0] == '\0') say("needs NVRTC (NYBBLE_NVRTC): %s", dlerror());
  } else {
    found = search(newest_major);
    if (!found && unavailable[0] == '\0') {
      say("needs NVRTC, the compiler library: no libnvrtc.so of CUDA 11.8 to 13 is loaded, beside "
          "a "
          "loaded libcudart, where the dynamic linker looks or in /usr/local/cuda; NYBBLE_NVRTC "
          "can "
          "name the file (pip's package nvidia-cuda-nvrtc has one)");
    }
  }
  if (!found) {
    version = 0;
    library_file[0] = '\0';
  }
}

#else

static void load(void) { say("is for Linux"); }

#endif

bool nyb_nvrtc_find(const char **reason) {
  pthread_once(&loaded, load);
  *reason = unavailable;
  return unavailable[0] == '\0';
}

nyb_status nyb_nvrtc_load(void) {
  const char *reason;
  return nyb_nvrtc_find(&reason) ? NYB_OK : nyb_fail(NYB_ERROR_UNSUPPORTED, "CUDA %s", reason);
}

const nyb_nvrtc *nyb_nvrtc_functions(void) {
  const char *reason;
  return nyb_nvrtc_find(&reason) ? &nvrtc : NULL;
}

int32_t nyb_nvrtc_version(void) {
  const char *reason;
  return nyb_nvrtc_find(&reason) ? version : 0;
}

const char *nyb_nvrtc_library(void) {
  const char *reason;
  return nyb_nvrtc_find(&reason) ? library_file : "";
}
