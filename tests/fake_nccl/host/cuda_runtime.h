/* SPDX-License-Identifier: Apache-2.0 */
/* As much of CUDA's runtime as examples/distributed_nccl.c uses, with host memory for that of the
 * devices and nybble's CPU backend for its CUDA one: the example's own logic runs without a GPU. */
#ifndef FAKE_CUDA_RUNTIME_H
#define FAKE_CUDA_RUNTIME_H

#include <nybble.h>
#include <stdlib.h>
#include <string.h>

#define NYB_BACKEND_CUDA NYB_BACKEND_CPU

typedef enum {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101
} cudaError_t;
enum { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
typedef void *cudaStream_t; /* NULL: the work is done when a call returns */

enum { FAKE_DEVICES = 2 };

static inline const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidDevice ? "invalid device ordinal" : "out of memory";
}

static inline cudaError_t cudaGetDeviceCount(int *count) {
  *count = FAKE_DEVICES;
  return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int device) {
  return device >= 0 && device < FAKE_DEVICES ? cudaSuccess : cudaErrorInvalidDevice;
}

static inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = NULL;
  return cudaSuccess;
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}

/* Aligned as CUDA's, and full of NaNs. */
static inline cudaError_t cudaMalloc(void **memory, size_t bytes) {
  const size_t alignment = 256, room = (bytes + alignment - 1) / alignment * alignment;
  *memory = aligned_alloc(alignment, room);
  if (*memory == NULL) return cudaErrorMemoryAllocation;
  memset(*memory, 0xff, room);
  return cudaSuccess;
}

static inline cudaError_t cudaFree(void *memory) {
  free(memory);
  return cudaSuccess;
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind,
                                          cudaStream_t stream) {
  (void)kind;
  (void)stream;
  memcpy(to, from, bytes);
  return cudaSuccess;
}

#endif
