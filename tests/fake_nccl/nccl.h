/* SPDX-License-Identifier: Apache-2.0 */
/* As much of NCCL as examples/distributed_nccl.c uses, by copies from one device's memory to
 * another's. It refuses what NCCL refuses or waits for without end, but takes one device for
 * several ranks, so that the example runs where there is one GPU. */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

typedef enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInvalidUsage = 5 } ncclResult_t;
typedef enum { ncclFloat32 = 7 } ncclDataType_t;

/* A rank's; all ranks' lie one after the other. */
typedef struct fake_communicator {
  int rank, ranks;
  bool is_queued;
  const void *from;
  void *to;
  size_t bytes;
  cudaStream_t stream;
} * ncclComm_t;

static bool fake_in_group;
static ncclComm_t fake_first; /* of the communicators whose calls are in the group */

static inline const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : "a CUDA call failed";
}

static inline ncclResult_t ncclCommInitAll(ncclComm_t *communicators, int ranks,
                                           const int *devices) {
  (void)devices;
  ncclComm_t all = calloc((size_t)ranks, sizeof *all);
  if (all == NULL) return ncclInvalidUsage;
  for (int rank = 0; rank < ranks; rank++) {
    all[rank].rank = rank;
    all[rank].ranks = ranks;
    communicators[rank] = &all[rank];
  }
  return ncclSuccess;
}

/* The last one frees them all. */
static inline ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  if (communicator->rank == communicator->ranks - 1) free(communicator - communicator->rank);
  return ncclSuccess;
}

static inline ncclResult_t ncclGroupStart(void) {
  if (fake_in_group) return ncclInvalidUsage;
  fake_in_group = true;
  fake_first = NULL;
  return ncclSuccess;
}

static inline ncclResult_t ncclAllGather(const void *from, void *to, size_t count,
                                         ncclDataType_t type, ncclComm_t communicator,
                                         cudaStream_t stream) {
  if (!fake_in_group || type != ncclFloat32 || communicator->is_queued) return ncclInvalidUsage;
  communicator->is_queued = true;
  communicator->from = from;
  communicator->to = to;
  communicator->bytes = count * sizeof(float);
  communicator->stream = stream;
  fake_first = communicator - communicator->rank;
  return ncclSuccess;
}

/* Every rank waits for all of them. */
static inline ncclResult_t ncclGroupEnd(void) {
  if (!fake_in_group || fake_first == NULL) return ncclInvalidUsage;
  fake_in_group = false;
  const int ranks = fake_first->ranks;
  for (int rank = 0; rank < ranks; rank++) {
    if (!fake_first[rank].is_queued || fake_first[rank].bytes != fake_first->bytes) {
      return ncclInvalidUsage;
    }
    fake_first[rank].is_queued = false;
    if (cudaStreamSynchronize(fake_first[rank].stream) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    for (int source = 0; source < ranks; source++) {
      if (cudaMemcpyAsync((char *)fake_first[rank].to + (size_t)source * fake_first->bytes,
                          fake_first[source].from, fake_first->bytes, cudaMemcpyDeviceToDevice,
                          fake_first[rank].stream) != cudaSuccess) {
        return ncclUnhandledCudaError;
      }
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    if (cudaStreamSynchronize(fake_first[rank].stream) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
  }
  return ncclSuccess;
}

#endif
