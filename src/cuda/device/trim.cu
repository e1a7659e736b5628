// SPDX-License-Identifier: Apache-2.0
// Drops the last tokens of some of a cache's sequences, or as many as there are.
#include "portable.cuh"
#include "quantize_arguments.h"

extern "C" __global__ void __launch_bounds__(NYB_TRIM_THREADS)
    trim(const __grid_constant__ nyb_device_trim call) {
  nyb_await_previous();
  const int64_t i = blockIdx.x * static_cast<int64_t>(NYB_TRIM_THREADS) + threadIdx.x;
  if (i >= call.count) return;
  int *const length = call.lengths + call.first + i;
  *length = *length > call.tokens ? *length - call.tokens : 0;
}
