// SPDX-License-Identifier: Apache-2.0
// Numbers that the host has decided on, to their places: without a copy from memory that would have
// to stay as it is until then.
#include "cache_arguments.h"

extern "C" __global__ void __launch_bounds__(NYB_CACHE_THREADS)
    cache_patch(const __grid_constant__ nyb_device_patch call) {
  nyb_await_previous();
  for (int i = threadIdx.x; i < call.count; i += NYB_CACHE_THREADS) {
    call.words[call.place[i]] = call.value[i];
  }
}
