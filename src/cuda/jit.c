/* SPDX-License-Identifier: Apache-2.0 */
#include "jit.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "disk_cache.h"
#include "nvrtc.h"

enum { MAX_OPTIONS = NYB_CUDA_MAX_PARAMETERS + 4, OPTION_BYTES = 96, MAX_ARCHITECTURES = 128 };

typedef struct options {
  char text[MAX_OPTIONS][OPTION_BYTES];
  const char *list[MAX_OPTIONS];
  int count;
} options;

static void add_option(options *o, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_option(options *o, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(o->text[o->count], OPTION_BYTES, format, arguments);
  va_end(arguments);
  o->list[o->count] = o->text[o->count];
  o->count++;
}

/* The one that the compiler knows among those whose code runs on the device: of its major version,
 * and not above. 0: none. */
static int architecture_for(const nyb_nvrtc *nvrtc, int compute_capability) {
  int count = 0, known[MAX_ARCHITECTURES], best = 0;
  if (nvrtc->GetNumSupportedArchs(&count) != NYB_NVRTC_SUCCESS || count < 1 ||
      count > MAX_ARCHITECTURES || nvrtc->GetSupportedArchs(known) != NYB_NVRTC_SUCCESS) {
    return compute_capability; /* it will say itself what it does not know */
  }
  for (int i = 0; i < count; i++) {
    if (known[i] <= compute_capability && known[i] / 10 == compute_capability / 10 &&
        known[i] > best) {
      best = known[i];
    }
  }
  return best;
}

static nyb_status make_options(const nyb_nvrtc *nvrtc, const nyb_cuda_spec *spec,
                               int compute_capability, options *o) {
  const nyb_cuda_program *program = spec->program;
  const int architecture = architecture_for(nvrtc, compute_capability);
  if (architecture == 0) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "CUDA needs an NVRTC that knows compute capability %d.%d; %s is of %d.%d and "
                    "does not",
                    compute_capability / 10, compute_capability % 10, nyb_nvrtc_library(),
                    nyb_nvrtc_version() / 1000, nyb_nvrtc_version() % 1000 / 10);
  }
  o->count = 0;
  add_option(o, "--gpu-architecture=sm_%d%s", architecture,
             program->architecture_specific && architecture == 90 ? "a" : "");
  add_option(o, "--std=c++17");
  for (int i = 0; program->parameters[i] != NULL; i++) {
    add_option(o, "--define-macro=%s=%d", program->parameters[i], (int)spec->values[i]);
  }
  return NYB_OK;
}

static nyb_hash key_of(const nyb_cuda_program *program, const options *o) {
  nyb_hash key;
  nyb_hash_start(&key);
  const int32_t version = nyb_nvrtc_version();
  nyb_hash_bytes(&key, &version, sizeof version);
  nyb_hash_text(&key, program->name);
  for (int i = 0; i < o->count; i++) nyb_hash_text(&key, o->list[i]);
  for (const char *const *piece = program->source; *piece != NULL; piece++) {
    nyb_hash_bytes(&key, *piece, strlen(*piece));
  }
  return key;
}

/* ---- Compiling ------------------------------------------------------------------------------ */

static nyb_status fail_memory(size_t bytes) {
  return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a CUDA kernel",
                  bytes);
}

static nyb_status check_nvrtc(const nyb_nvrtc *nvrtc, nyb_nvrtc_result result, const char *call,
                              const char *name) {
  if (result == NYB_NVRTC_SUCCESS) return NYB_OK;
  return nyb_fail(
      result == NYB_NVRTC_ERROR_OUT_OF_MEMORY ? NYB_ERROR_OUT_OF_MEMORY : NYB_ERROR_COMPILE,
      "%s of the CUDA kernel %s failed with %d: %s", call, name, result,
      nvrtc->GetErrorString(result));
}

/* The log, from the context's allocator; NULL where there is none. */
static char *log_of(const nyb_context *context, const nyb_nvrtc *nvrtc, nyb_nvrtc_program program) {
  size_t bytes = 0;
  if (nvrtc->GetProgramLogSize(program, &bytes) != NYB_NVRTC_SUCCESS || bytes <= 1) return NULL;
  char *const log = nyb_allocate(context, bytes, 64);
  if (log == NULL) return NULL;
  if (nvrtc->GetProgramLog(program, log) != NYB_NVRTC_SUCCESS) {
    nyb_release(context, log);
    return NULL;
  }
  log[bytes - 1] = '\0';
  return log;
}

/* The line that says what is wrong, among warnings and quoted source. */
static nyb_status fail_compilation(const char *name, const char *log) {
  const char *line = log != NULL ? strstr(log, "error") : NULL;
  if (line == NULL) line = log != NULL ? log : "the compiler left no word";
  while (line != log && log != NULL && line[-1] != '\n') line--;
  return nyb_fail(NYB_ERROR_COMPILE, "the CUDA kernel %s could not be compiled by %s: %.*s", name,
                  nyb_nvrtc_library(), (int)strcspn(line, "\n"), line);
}

static nyb_status take_cubin(const nyb_context *context, const nyb_nvrtc *nvrtc,
                             nyb_nvrtc_program program, const char *name, nyb_cuda_binary *binary) {
  size_t bytes = 0;
  nyb_status status =
      check_nvrtc(nvrtc, nvrtc->GetCUBINSize(program, &bytes), "nvrtcGetCUBINSize", name);
  if (status != NYB_OK) return status;
  if (bytes == 0) {
    return nyb_fail(NYB_ERROR_COMPILE, "%s made no machine code for the CUDA kernel %s",
                    nyb_nvrtc_library(), name);
  }
  char *const cubin = nyb_allocate(context, bytes, 64);
  if (cubin == NULL) return fail_memory(bytes);
  status = check_nvrtc(nvrtc, nvrtc->GetCUBIN(program, cubin), "nvrtcGetCUBIN", name);
  if (status != NYB_OK) {
    nyb_release(context, cubin);
    return status;
  }
  *binary = (nyb_cuda_binary){.cubin = cubin, .bytes = bytes};
  return NYB_OK;
}

static nyb_status compile_text(const nyb_context *context, const nyb_nvrtc *nvrtc, const char *name,
                               const char *source, const options *o, nyb_cuda_binary *binary,
                               char *log, size_t log_bytes) {
  char file[OPTION_BYTES];
  snprintf(file, sizeof file, "%s.cu", name);
  nyb_nvrtc_program program = NULL;
  nyb_status status =
      check_nvrtc(nvrtc, nvrtc->CreateProgram(&program, source, file, 0, NULL, NULL),
                  "nvrtcCreateProgram", name);
  if (status != NYB_OK) return status;
  const nyb_nvrtc_result result = nvrtc->CompileProgram(program, o->count, o->list);
  char *const words = log_of(context, nvrtc, program);
  if (log != NULL && log_bytes > 0) snprintf(log, log_bytes, "%s", words != NULL ? words : "");
  if (result == NYB_NVRTC_SUCCESS) {
    status = take_cubin(context, nvrtc, program, name, binary);
  } else if (result == NYB_NVRTC_ERROR_COMPILATION) {
    status = fail_compilation(name, words);
  } else {
    status = check_nvrtc(nvrtc, result, "nvrtcCompileProgram", name);
  }
  nyb_release(context, words);
  nvrtc->DestroyProgram(&program);
  return status;
}

/* The pieces of the source as one text. */
static char *joined_source(const nyb_context *context, const nyb_cuda_program *program,
                           size_t *bytes) {
  *bytes = 1;
  for (const char *const *piece = program->source; *piece != NULL; piece++) {
    *bytes += strlen(*piece);
  }
  char *const text = nyb_allocate(context, *bytes, 64);
  if (text == NULL) return NULL;
  char *end = text;
  for (const char *const *piece = program->source; *piece != NULL; piece++) {
    const size_t length = strlen(*piece);
    memcpy(end, *piece, length);
    end += length;
  }
  *end = '\0';
  return text;
}

nyb_status nyb_cuda_compile(const nyb_context *context, const nyb_cuda_spec *spec,
                            int32_t compute_capability, nyb_cuda_binary *binary, char *log,
                            size_t log_bytes) {
  const nyb_cuda_program *program = spec->program;
  nyb_status status = nyb_nvrtc_load();
  if (status != NYB_OK) return status;
  const nyb_nvrtc *nvrtc = nyb_nvrtc_functions();
  options o;
  status = make_options(nvrtc, spec, compute_capability, &o);
  if (status != NYB_OK) return status;
  const nyb_hash key = key_of(program, &o);
  if (log == NULL) {
    *binary = (nyb_cuda_binary){.from_disk = true};
    if (nyb_disk_cache_read(context, &key, &binary->cubin, &binary->bytes)) return NYB_OK;
  } else {
    add_option(&o, "--ptxas-options=-v");
  }
  size_t source_bytes;
  char *const source = joined_source(context, program, &source_bytes);
  if (source == NULL) return fail_memory(source_bytes);
  status = compile_text(context, nvrtc, program->name, source, &o, binary, log, log_bytes);
  nyb_release(context, source);
  if (status == NYB_OK && log == NULL) nyb_disk_cache_write(&key, binary->cubin, binary->bytes);
  return status;
}
