/* SPDX-License-Identifier: Apache-2.0 */
/* One CUDA context's state: what its device can do, and the kernels that were loaded into it. */
#ifndef NYB_CUDA_DEVICE_H
#define NYB_CUDA_DEVICE_H

#include <stdbool.h>

#include "../context.h"
#include "driver.h"

typedef struct nyb_cuda_device nyb_cuda_device; /* lives as long as the process */

typedef struct nyb_cuda_properties {
  nyb_cu_device ordinal;
  int32_t compute_capability; /* 90 is 9.0 */
  int32_t multiprocessors;
  int32_t shared_bytes_per_block; /* with opting in */
  int32_t shared_bytes_per_multiprocessor;
  int64_t l2_bytes;
  bool reads_host_memory; /* any of it, by its plain address (HMM, Grace) */
} nyb_cuda_properties;

/* A call's stay in a CUDA context. */
typedef struct nyb_cuda_scope {
  nyb_context *context;
  const nyb_cuda_driver *driver;
  nyb_cuda_device *device;
  const nyb_cuda_properties *properties;
  bool pushed; /* the primary context was made current for this call */
} nyb_cuda_scope;

/* Finds the state of the current CUDA context, or makes the primary context of the device that the
 * options named current until nyb_cuda_leave(). Takes a lock only at a CUDA context's first call.
 * On failure there is nothing to leave. */
nyb_status nyb_cuda_enter(nyb_context *context, nyb_cuda_scope *scope);
void nyb_cuda_leave(nyb_cuda_scope *scope);

/* The CUDA context of the scope, and makes that one current again later (a cache's memory belongs
 * to the context in which it was made). A context that was destroyed since gives NYB_ERROR_DEVICE.
 */
typedef struct nyb_cuda_home {
  nyb_cu_context context;
  unsigned long long id; /* 0: the driver has no ids */
} nyb_cuda_home;
nyb_cuda_home nyb_cuda_home_of(const nyb_cuda_scope *scope);
nyb_status nyb_cuda_enter_home(nyb_context *context, const nyb_cuda_home *home,
                               nyb_cuda_scope *scope);

/* NYB_ERROR_POINTER where the driver knows that `address` is no memory that this device can reach:
 * plain host memory (unless the device reads that too), or another device's without peer access.
 * NULL is allowed and passes. */
nyb_status nyb_cuda_check_pointer(const nyb_cuda_scope *scope, const char *owner,
                                  const char *member, const void *address);

/* ---- Kernels -------------------------------------------------------------------------------- */

/* A source in src/cuda/device/, embedded as text with all that it includes (NAME.cu becomes
 * nyb_cuda_source_NAME). Its macros, given by -D, are the parameters of a specialisation. */
enum { NYB_CUDA_MAX_PARAMETERS = 24 };

typedef struct nyb_cuda_program {
  const char *name;          /* "attention_decode": the source's name and the kernel's own */
  const char *const *source; /* the embedded text, in pieces of a C compiler's limit, NULL last */
  const char *const *parameters; /* macro names, NULL last */
  bool architecture_specific;    /* compile for sm_90a rather than sm_90, where the device is one */
} nyb_cuda_program;

/* Which specialisation: values[] in the order of program->parameters. Zero the rest. */
typedef struct nyb_cuda_spec {
  const nyb_cuda_program *program;
  int32_t values[NYB_CUDA_MAX_PARAMETERS];
} nyb_cuda_spec;

typedef struct nyb_cuda_kernel {
  const char *name;
  nyb_cu_function function;
  int32_t registers, local_bytes, static_shared_bytes;
  int32_t threads, dynamic_shared_bytes; /* as given to nyb_cuda_kernel_get */
  int32_t blocks_per_multiprocessor;     /* that fit at once */
} nyb_cuda_kernel;

/* The kernel of that specialisation in the scope's CUDA context: from its table (no lock, no
 * allocation), else from the disk cache, else compiled (src/cuda/jit.h) and loaded; other threads
 * that want the same one wait for it. `threads` a block and its dynamic shared memory are part of
 * the key beside the spec. The kernel lives as long as the CUDA context. What did not work is tried
 * again at the next call. */
nyb_status nyb_cuda_kernel_get(nyb_cuda_scope *scope, const nyb_cuda_spec *spec, int32_t threads,
                               int32_t dynamic_shared_bytes, const nyb_cuda_kernel **kernel);

/* Queues it. arguments is the kernel's one parameter, a struct passed by value. overlap: it may
 * start while the kernel before it on the stream still ends (programmatic dependent launch; the
 * kernel waits by griddepcontrol.wait); ignored before compute capability 9.0. */
nyb_status nyb_cuda_launch(nyb_cuda_scope *scope, const nyb_cuda_kernel *kernel,
                           const int64_t grid[3], void *arguments, nyb_stream stream, bool overlap);

/* Whether the stream is being captured into a graph (then nothing may be allocated or waited for).
 */
nyb_status nyb_cuda_capturing(const nyb_cuda_scope *scope, nyb_stream stream, bool *capturing);

#endif
