/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda, loaded at run time: nothing of CUDA is needed to build nybble. The types below are the
 * ABI of the driver API, written out as far as it is used here. */
#ifndef NYB_CUDA_DRIVER_H
#define NYB_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

typedef int nyb_cu_result; /* CUresult */
enum {
  NYB_CU_SUCCESS = 0,
  NYB_CU_ERROR_OUT_OF_MEMORY = 2,
  NYB_CU_ERROR_CONTEXT_IS_DESTROYED = 709,
};

typedef int nyb_cu_device; /* CUdevice: an ordinal */
typedef uint64_t nyb_cu_address;
typedef struct nyb_cu_context_opaque *nyb_cu_context;
typedef struct nyb_cu_module_opaque *nyb_cu_module;
typedef struct nyb_cu_function_opaque *nyb_cu_function;
typedef struct nyb_cu_event_opaque *nyb_cu_event;

typedef enum nyb_cu_device_attribute {
  NYB_CU_DEVICE_MULTIPROCESSOR_COUNT = 16,
  NYB_CU_DEVICE_L2_CACHE_BYTES = 38,
  NYB_CU_DEVICE_COMPUTE_CAPABILITY_MAJOR = 75,
  NYB_CU_DEVICE_COMPUTE_CAPABILITY_MINOR = 76,
  NYB_CU_DEVICE_SHARED_BYTES_PER_MULTIPROCESSOR = 81,
  NYB_CU_DEVICE_PAGEABLE_MEMORY_ACCESS = 88,
  NYB_CU_DEVICE_SHARED_BYTES_PER_BLOCK_OPTIN = 97
} nyb_cu_device_attribute;

typedef enum nyb_cu_function_attribute {
  NYB_CU_FUNCTION_SHARED_BYTES = 1,
  NYB_CU_FUNCTION_LOCAL_BYTES = 3,
  NYB_CU_FUNCTION_REGISTERS = 4,
  NYB_CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8,
  NYB_CU_FUNCTION_PREFERRED_SHARED_CARVEOUT = 9
} nyb_cu_function_attribute;

typedef enum nyb_cu_pointer_attribute {
  NYB_CU_POINTER_MEMORY_TYPE = 2, /* unsigned: nyb_cu_memory_type, 0 for memory it does not know */
  NYB_CU_POINTER_DEVICE_POINTER = 3, /* for kernels of the current context; 0: out of reach */
  NYB_CU_POINTER_DEVICE_ORDINAL = 9  /* int */
} nyb_cu_pointer_attribute;

enum { NYB_CU_MEMORY_HOST = 1, NYB_CU_MEMORY_DEVICE = 2 };
enum { NYB_CU_STREAM_NON_BLOCKING = 1 };
enum { NYB_CU_EVENT_DISABLE_TIMING = 2 };
enum { NYB_CU_CAPTURE_STATUS_NONE = 0 };
enum { NYB_CU_CAPTURE_MODE_RELAXED = 2 };

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct nyb_cu_launch_attribute {
  int32_t id;
  int32_t padding;
  union {
    char bytes[64];
    int32_t enabled;
  } value;
} nyb_cu_launch_attribute;
enum { NYB_CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef struct nyb_cu_launch {
  unsigned grid[3], block[3];
  unsigned dynamic_shared_bytes;
  nyb_stream stream;
  nyb_cu_launch_attribute *attributes;
  unsigned attribute_count;
} nyb_cu_launch;

/* CUDA_MEMCPY2D_v2; memory types as above. */
typedef struct nyb_cu_copy_2d {
  size_t source_x_bytes, source_y;
  int source_memory_type;
  const void *source_host;
  nyb_cu_address source_device;
  void *source_array;
  size_t source_pitch_bytes;
  size_t target_x_bytes, target_y;
  int target_memory_type;
  void *target_host;
  nyb_cu_address target_device;
  void *target_array;
  size_t target_pitch_bytes;
  size_t width_bytes, height;
} nyb_cu_copy_2d;

/* The entry points that are used, by their names without "cu" and version. */
typedef struct nyb_cuda_driver {
  int32_t version; /* as cuDriverGetVersion counts: 13000 is 13.0 */
  int32_t device_count;
#define NYB_CU(name, symbol, arguments) nyb_cu_result(*name) arguments;
#define NYB_CU_OPTIONAL NYB_CU
#include "driver_functions.inc"
#undef NYB_CU_OPTIONAL
#undef NYB_CU
} nyb_cuda_driver;

/* The oldest driver, and the oldest NVRTC: the first with cuLaunchKernelEx and sm_90. */
enum { NYB_CUDA_OLDEST_VERSION = 11080 };
enum { NYB_CUDA_OLDEST_CAPABILITY = 80 }; /* 8.0 */

/* Loads the driver once for the process (thread-safe). On failure NYB_ERROR_UNSUPPORTED and a
 * sentence: not found, a symbol missing, cuInit refused, too old, no device. NYBBLE_LIBCUDA names
 * another file, which is how the tests bring a fake one. */
nyb_status nyb_cuda_driver_load(const nyb_cuda_driver **driver);

/* The same without a word to nyb_last_error(): NULL on failure, with *reason (static) set. */
const nyb_cuda_driver *nyb_cuda_driver_find(const char **reason);

/* NYB_OK for success; else nyb_fail() with the call's name, the driver's name and description of
 * the error, as NYB_ERROR_OUT_OF_MEMORY (CUDA_ERROR_OUT_OF_MEMORY) or NYB_ERROR_DEVICE. */
nyb_status nyb_cuda_check(const nyb_cuda_driver *driver, nyb_cu_result result, const char *call);

#endif
