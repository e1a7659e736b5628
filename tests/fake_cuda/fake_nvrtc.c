/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../src/cuda/nvrtc.h"
#include "fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define DEFINE(name, arguments)           \
  EXPORT nyb_nvrtc_result name arguments; \
  EXPORT nyb_nvrtc_result name arguments

static fake_nvrtc_control_struct control = {
    .version = 13000, .oldest_architecture = 80, .newest_architecture = 120};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT fake_nvrtc_control_struct *fake_nvrtc_control(void);
EXPORT fake_nvrtc_control_struct *fake_nvrtc_control(void) { return &control; }

struct nyb_nvrtc_program_opaque {
  char cubin[256];
  char *log;
};

static nyb_nvrtc_result result_of(const char *call) {
  pthread_mutex_lock(&lock);
  const bool fails = control.fail_call != NULL && strcmp(control.fail_call, call) == 0;
  const int result = fails ? control.fail_result : NYB_NVRTC_SUCCESS;
  pthread_mutex_unlock(&lock);
  return result;
}

DEFINE(nvrtcVersion, (int *major, int *minor)) {
  *major = control.version / 1000;
  *minor = control.version % 1000 / 10;
  return result_of("nvrtcVersion");
}

EXPORT const char *nvrtcGetErrorString(nyb_nvrtc_result result);
EXPORT const char *nvrtcGetErrorString(nyb_nvrtc_result result) {
  return result == NYB_NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER";
}

DEFINE(nvrtcGetNumSupportedArchs, (int *count)) {
  *count = (control.newest_architecture - control.oldest_architecture) / 10 + 1;
  return result_of("nvrtcGetNumSupportedArchs");
}

DEFINE(nvrtcGetSupportedArchs, (int *architectures)) {
  for (int a = control.oldest_architecture; a <= control.newest_architecture; a += 10) {
    *architectures++ = a;
  }
  return result_of("nvrtcGetSupportedArchs");
}

DEFINE(nvrtcCreateProgram,
       (nyb_nvrtc_program * program, const char *source, const char *name, int header_count,
        const char *const *headers, const char *const *header_names)) {
  (void)header_count, (void)headers, (void)header_names;
  const nyb_nvrtc_result result = result_of("nvrtcCreateProgram");
  if (result != NYB_NVRTC_SUCCESS) return result;
  *program = calloc(1, sizeof **program);
  snprintf((*program)->cubin, sizeof(*program)->cubin, "fake cubin of %.*s\n",
           (int)strcspn(name, "."), name);
  pthread_mutex_lock(&lock);
  snprintf(control.last_source, sizeof control.last_source, "%s", source);
  pthread_mutex_unlock(&lock);
  return NYB_NVRTC_SUCCESS;
}

DEFINE(nvrtcDestroyProgram, (nyb_nvrtc_program * program)) {
  free((*program)->log);
  free(*program);
  *program = NULL;
  return NYB_NVRTC_SUCCESS;
}

DEFINE(nvrtcCompileProgram,
       (nyb_nvrtc_program program, int option_count, const char *const *options)) {
  pthread_mutex_lock(&lock);
  control.compilations++;
  size_t used = 0;
  for (int i = 0; i < option_count && used < sizeof control.last_options; i++) {
    used += (size_t)snprintf(control.last_options + used, sizeof control.last_options - used, "%s ",
                             options[i]);
  }
  program->log = control.log != NULL ? strdup(control.log) : NULL;
  const struct timespec pause = {.tv_nsec = control.compile_milliseconds * 1000000L};
  pthread_mutex_unlock(&lock);
  nanosleep(&pause, NULL);
  return result_of("nvrtcCompileProgram");
}

DEFINE(nvrtcGetCUBINSize, (nyb_nvrtc_program program, size_t *bytes)) {
  *bytes = control.empty_cubin ? 0 : strlen(program->cubin);
  return result_of("nvrtcGetCUBINSize");
}

#if !defined(FAKE_NVRTC_OLD)
DEFINE(nvrtcGetCUBIN, (nyb_nvrtc_program program, char *cubin)) {
  memcpy(cubin, program->cubin, strlen(program->cubin));
  return result_of("nvrtcGetCUBIN");
}
#endif

DEFINE(nvrtcGetProgramLogSize, (nyb_nvrtc_program program, size_t *bytes)) {
  *bytes = program->log != NULL ? strlen(program->log) + 1 : 1;
  return result_of("nvrtcGetProgramLogSize");
}

DEFINE(nvrtcGetProgramLog, (nyb_nvrtc_program program, char *log)) {
  strcpy(log, program->log != NULL ? program->log : "");
  return result_of("nvrtcGetProgramLog");
}
