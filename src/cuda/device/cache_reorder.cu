// SPDX-License-Identifier: Apache-2.0
// Sequences that change places, where they are: a thread does all moves of its units of all blocks,
// so that no thread waits for another. blockIdx.y: the array; x: pieces of the heads' planes.
#include "cache_append.cuh"

extern "C" __global__ void __launch_bounds__(NYB_CACHE_THREADS)
    cache_reorder(const __grid_constant__ nyb_device_reorder call) {
  nyb_await_previous();
  const int array = static_cast<int>(blockIdx.y);
  if (call.array[array].row_bytes == 0) return;
  const int64_t pieces = gridDim.x / call.kv_heads;  // the host's grid has whole numbers of them
  const int64_t head = blockIdx.x / pieces, piece = blockIdx.x - head * pieces;
  int64_t unit = piece * NYB_CACHE_THREADS + threadIdx.x;
  while (nyb_reorder_unit(&call, array, head, unit)) unit += pieces * NYB_CACHE_THREADS;
}
