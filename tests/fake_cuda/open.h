/* SPDX-License-Identifier: Apache-2.0 */
/* For tests/test_cuda*.c: opens the fake driver and the fake NVRTC, and points the library to them.
 * The library looks for a driver once in a process: a test that wants another runs in a child. */
#ifndef FAKE_CUDA_OPEN_H
#define FAKE_CUDA_OPEN_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake_cuda.h"

/* In a child there is no cmocka to report to. */
#define MUST(condition)                                                                        \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: failed: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, \
              nyb_last_error());                                                               \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

/* After a call that has failed with `status`, and a sentence that has these words in it. */
#define MUST_FAIL(call, expected, words)                                                          \
  do {                                                                                            \
    const nyb_status got_ = (call);                                                               \
    if (got_ != (expected) || strstr(nyb_last_error(), words) == NULL) {                          \
      fprintf(stderr, "%s:%d: %s gave %s: %s\n  not %s with \"%s\"\n", __FILE__, __LINE__, #call, \
              nyb_status_name(got_), nyb_last_error(), nyb_status_name(expected), words);         \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)

static inline void *fake_symbol(const char *library, const char *variable, const char *symbol) {
  char file[512];
  snprintf(file, sizeof file, "%s/lib%s.so", FAKE_CUDA_DIR, library);
  setenv(variable, file, 1);
  void *const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  void *const found = handle != NULL ? dlsym(handle, symbol) : NULL;
  if (found == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return found;
}

/* cuda: "fake_cuda" or a variant; nvrtc: "fake_nvrtc" or a variant. */
static inline fake_cuda_library fake_cuda_open(const char *cuda, const char *nvrtc) {
  fake_cuda_library fake;
  fake_cuda_control_struct *(*cuda_control)(void);
  fake_nvrtc_control_struct *(*nvrtc_control)(void);
  void *symbol = fake_symbol(cuda, "NYBBLE_LIBCUDA", "fake_cuda_control");
  memcpy(&cuda_control, &symbol, sizeof symbol);
  symbol = fake_symbol(cuda, "NYBBLE_LIBCUDA", "fake_cuda_calls");
  memcpy(&fake.calls, &symbol, sizeof symbol);
  symbol = fake_symbol(nvrtc, "NYBBLE_NVRTC", "fake_nvrtc_control");
  memcpy(&nvrtc_control, &symbol, sizeof symbol);
  fake.cuda = cuda_control();
  fake.nvrtc = nvrtc_control();
  return fake;
}

/* Runs it in a child of this process; true where the child ended with exit code 0. */
static inline bool in_child(void (*scenario)(void)) {
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    scenario();
    exit(0);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

#endif
