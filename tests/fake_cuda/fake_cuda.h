/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver and an NVRTC without a GPU, for the host code of the CUDA backend. Device memory is
 * the process's own, a launch calls the test, and every call can be made to fail.
 *
 * The shared objects fake_cuda and fake_nvrtc are loaded by the library as the real ones would be
 * (NYBBLE_LIBCUDA, NYBBLE_NVRTC); a test opens them too (open.h) and gets hold of what controls
 * them. Variants lack a symbol: fake_cuda_old has no
 * cuLaunchKernelEx, fake_cuda_11 no cuCtxGetId, fake_nvrtc_old no nvrtcGetCUBIN. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stdint.h>

#include "../../src/cuda/driver.h"

enum { FAKE_CUDA_MAX_DEVICES = 4 };

typedef struct fake_cuda_control {
  /* May be set before the library loads the driver. */
  int version, device_count;
  int compute_capability[FAKE_CUDA_MAX_DEVICES];
  bool reads_host_memory;
  bool reuses_contexts; /* cuCtxCreate gives the address of a destroyed context again */
  size_t memory_bytes;  /* that cuMemAlloc may give out in all; 0: 16 GiB */
  int blocks_per_multiprocessor;

  /* The call of that name ("cuMemAlloc", without _v2) fails with this result: from the
   * fail_after-th call on (0: the next), as long as fail_call is set. "*": every call counts, and
   * only that one fails. */
  const char *fail_call;
  nyb_cu_result fail_result;
  int64_t fail_after;

  /* What cuStreamIsCapturing says of this stream; set between cuStreamBeginCapture and
   * cuStreamEndCapture. */
  nyb_stream capturing;

  /* Called by each launch, in place of the kernel; may be NULL. */
  void (*launch)(void *data, const char *kernel, const nyb_cu_launch *launch, void *arguments);
  void *launch_data;
  /* Called by cuGraphLaunch; may be NULL. What a capture holds is the business of `launch`, which
   * sees its launches as all others. */
  void (*graph_launch)(void *launch_data);

  /* Out. Those of one call: fake_cuda_calls(). */
  const char *failed_call; /* the last that was made to fail */
  int64_t launches, modules_loaded, live_allocations, live_bytes;
} fake_cuda_control_struct;

typedef struct fake_nvrtc_control {
  int version;           /* 13000 */
  const char *fail_call; /* "nvrtcCompileProgram" */
  int fail_result;
  const char *log; /* of compilations, failing or not */
  int compile_milliseconds;
  int oldest_architecture, newest_architecture; /* all tens between are known */
  bool empty_cubin;

  /* Out. */
  int64_t compilations;
  char last_options[4096]; /* with a space after each */
  char last_source[4096];  /* its beginning */
} fake_nvrtc_control_struct;

/* tests/fake_cuda/open.h opens the shared objects and fills these. */
typedef struct fake_cuda_library {
  fake_cuda_control_struct *cuda;
  fake_nvrtc_control_struct *nvrtc;
  int64_t (*calls)(const char *call); /* how often "cuMemAlloc" was called */
} fake_cuda_library;

#endif
