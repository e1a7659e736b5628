// SPDX-License-Identifier: Apache-2.0
// Drops the last tokens of some of a cache's sequences, or as many as there are.
#include "cache_append.cuh"

extern "C" __global__ void __launch_bounds__(NYB_CACHE_THREADS)
    trim(const __grid_constant__ nyb_device_trim call) {
  nyb_await_previous();
  const int64_t i = blockIdx.x * static_cast<int64_t>(NYB_CACHE_THREADS) + threadIdx.x;
  if (i < call.count) nyb_trim_sequence(&call, call.first + i);
}
