// SPDX-License-Identifier: Apache-2.0
// Before an append to a mixed cache: the tokens that will leave the last part, into the body. The
// rows' input is the last part.
#include "append_lane.cuh"
#include "cache_append.cuh"

NYB_FUNCTION bool retire_lane(const nyb_device_placed &call, const nyb_append_plan &plan,
                              int64_t sequence, const row_lane &row) {
  const nyb_device_rows &rows = row.is_key ? call.key : call.value;
  const bool own = row.own && row.token < nyb_retired_tokens(&plan);
  const int64_t token = plan.before.last_begin + row.token, body = call.places.body_tokens;
  nyb_cache_place from = nyb_kind_place(NYB_LAST, 0, 0, 0), to = from;
  if (own) {
    from = nyb_mixed_place(&call.places.kind, &plan.before, sequence, token);
    to = nyb_kind_place_of(&call.places.kind, body, &plan.after, sequence, nullptr, token);
  }
  lane at = lane_of(rows, to.block, row.head, to.slot, row.index);
  at.floats = floats_of(rows, from.block, row.head, from.slot, row.index);
  if (!own) at.count = 0;
  uint32_t elements[NYB_LANE_ELEMENTS];
  load_elements(elements, at.floats, rows.input_dtype, rows.wide_input, at.count);
  return quantize_lane(rows, at, own, call.rule, rows.input_dtype, elements);
}

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    retire(const __grid_constant__ nyb_device_placed call) {
  int64_t block;
  const int64_t sequence = nyb_split(blockIdx.x, &call.blocks_per_sequence, &block);
  const int64_t step = call.blocks_per_sequence.divisor * NYB_QUANTIZE_THREADS;
  const int64_t warp = threadIdx.x / 32 * 32, thread = threadIdx.x % 32;
  const int64_t lanes = call.key_lanes + call.value_lanes;

  nyb_await_previous();
  const nyb_append_plan plan = nyb_append_plan_of(&call, sequence);
  bool stored = true;
  for (int64_t first = block * NYB_QUANTIZE_THREADS + warp; first < lanes; first += step) {
    stored &= retire_lane(call, plan, sequence, find_row(call, first + thread));
  }
  if (!stored && call.non_finite != nullptr) *call.non_finite = 1;
}
