// SPDX-License-Identifier: Apache-2.0
// Floats to stored rows: a lane of eight elements for each thread, the lanes numbered by batch
// entry, head, token and place in the row.
#include "quantize_lane.cuh"

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    quantize(const __grid_constant__ nyb_device_quantize call) {
  nyb_await_previous();
  const int64_t step = static_cast<int64_t>(gridDim.x) * NYB_QUANTIZE_THREADS;
  const int64_t warp = threadIdx.x / 32 * 32, thread = threadIdx.x % 32;
  // Whole warps stay or go, so that all of one meet in the shuffles.
  for (int64_t first = blockIdx.x * static_cast<int64_t>(NYB_QUANTIZE_THREADS) + warp;
       first < call.lanes; first += step) {
    const bool own = first + thread < call.lanes;
    int64_t index, token, head;
    int64_t batch = nyb_split(own ? first + thread : 0, &call.rows.lanes, &index);
    batch = nyb_split(batch, &call.tokens, &token);
    batch = nyb_split(batch, &call.heads, &head);
    lane at = lane_of(call.rows, batch, head, token, index);
    if (!own) at.count = 0;
    uint32_t elements[NYB_LANE_ELEMENTS];
    load_elements(elements, at.floats, call.rows.input_dtype, call.rows.wide_input, at.count);
    const bool stored =
        quantize_lane(call.rows, at, own, call.rule, call.rows.input_dtype, elements);
    if (!stored && call.non_finite != nullptr) *call.non_finite = 1;
  }
}
