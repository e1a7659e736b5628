// SPDX-License-Identifier: Apache-2.0
// Rows of a cache to other places: pages that a sequence gets for itself, rings that grow.
// blockIdx.y: the array; x: move and head.
#include "cache_append.cuh"

extern "C" __global__ void __launch_bounds__(NYB_CACHE_THREADS)
    cache_copy(const __grid_constant__ nyb_device_copy call) {
  nyb_await_previous();
  const int array = static_cast<int>(blockIdx.y);
  if (call.array[array].row_bytes == 0) return;
  for (int64_t i = blockIdx.x; i < call.count * call.kv_heads; i += gridDim.x) {
    const int move = static_cast<int>(i / call.kv_heads);
    const int64_t head = i - move * call.kv_heads;
    int64_t unit = threadIdx.x;
    while (nyb_copy_unit(&call, array, move, head, unit)) unit += NYB_CACHE_THREADS;
  }
}
