/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda, loaded at run time: nothing of CUDA is needed to build nybble. The types below are the
 * ABI of the driver API, written out as far as it is used here. */
#ifndef NYB_CUDA_DRIVER_H
#define NYB_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

typedef int32_t nyb_cu_result; /* CUresult; 0 is success */
typedef int32_t nyb_cu_device; /* CUdevice */
typedef uint64_t nyb_cu_address;
typedef struct nyb_cu_context_opaque *nyb_cu_context;
typedef struct nyb_cu_module_opaque *nyb_cu_module;
typedef struct nyb_cu_function_opaque *nyb_cu_function;

/* The entry points that are used, by their names in the library without "cu". */
typedef struct nyb_cuda_driver {
  int32_t version; /* cuDriverGetVersion */
#define NYB_CU(result, name, arguments) result(*name) arguments;
#include "driver_functions.inc"
#undef NYB_CU
} nyb_cuda_driver;

/* Loads the driver once for the process (thread-safe). On failure NYB_ERROR_UNSUPPORTED and a
 * sentence: not found, a symbol missing, cuInit refused, no device. NYBBLE_LIBCUDA names another
 * file, which is how the tests bring a fake one. */
nyb_status nyb_cuda_driver_load(const nyb_cuda_driver **driver);

/* NYB_OK for success; else nyb_fail() with the call's name, the driver's name and description of
 * the error, as NYB_ERROR_OUT_OF_MEMORY (CUDA_ERROR_OUT_OF_MEMORY) or NYB_ERROR_DEVICE. */
nyb_status nyb_cuda_check(const nyb_cuda_driver *driver, nyb_cu_result result, const char *call);

#endif
