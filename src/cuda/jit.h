/* SPDX-License-Identifier: Apache-2.0 */
/* From a specialisation to machine code: NVRTC, loaded at run time, and the disk cache. */
#ifndef NYB_CUDA_JIT_H
#define NYB_CUDA_JIT_H

#include "device.h"

typedef struct nyb_cuda_binary {
  void *cubin; /* from the context's allocator */
  size_t bytes;
  bool from_disk;
} nyb_cuda_binary;

/* Looks for NVRTC once for the process: NYBBLE_NVRTC (a file), then one that the process has loaded
 * already, then the usual names and places, those of the pip packages beside a loaded libcudart
 * included. One of a later major version than the driver's is passed over: that driver could not
 * load its code. False: *reason (static) says what is missing; nyb_last_error() is left alone. */
bool nyb_nvrtc_find(const char **reason);
nyb_status nyb_nvrtc_load(void);     /* the same, with NYB_ERROR_UNSUPPORTED and a sentence */
int32_t nyb_nvrtc_version(void);     /* 13000 is 13.0; 0: none */
const char *nyb_nvrtc_library(void); /* the file; "": none */

/* The cubin of a specialisation for a compute capability. Disk cache: NYBBLE_CACHE_DIR, else
 * $XDG_CACHE_HOME/nybble, else ~/.cache/nybble; "off" turns it off. A file's name is the hash of
 * everything that decides its content (source text, options, NVRTC version, architecture); it is
 * written under a temporary name, then renamed, and checked (length and hash inside) when read: one
 * that is not whole is made again. A disk that refuses costs time, never the call.
 *
 * log (may be NULL) gets the compiler's words, cut to log_bytes: ptxas's report of registers and
 * spills where it succeeds. With a log it is always compiled: the disk cache is neither read nor
 * written. */
nyb_status nyb_cuda_compile(const nyb_context *context, const nyb_cuda_spec *spec,
                            int32_t compute_capability, nyb_cuda_binary *binary, char *log,
                            size_t log_bytes);

/* The directory in use, "" when off; this thread's until its next call. And what lies in it. */
const char *nyb_cuda_cache_directory(void);
void nyb_cuda_cache_usage(int64_t *kernels, int64_t *bytes);

#endif
