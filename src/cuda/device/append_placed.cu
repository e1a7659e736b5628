// SPDX-License-Identifier: Apache-2.0
// append for every kind of cache, and for sequences of a left-padded batch: each sequence's numbers
// say where its rows go, and are moved along by the last block that has read them. What leaves the
// last part of a mixed cache has been brought to the body by retire.
#include "append_lane.cuh"
#include "cache_append.cuh"

NYB_FUNCTION void convert(uint32_t elements[NYB_LANE_ELEMENTS], int from, int to) {
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) elements[i] = nyb_convert(from, to, elements[i]);
}

// A lane of a part of plain rows.
NYB_FUNCTION bool store_plain(const nyb_device_placed &call, const row_lane &row,
                              const nyb_cache_place &place, lane at,
                              const uint32_t elements[NYB_LANE_ELEMENTS]) {
  const int which = row.is_key ? 0 : 1;
  const nyb_device_plain &plain = place.region == NYB_FIRST ? call.first[which] : call.last[which];
  at.codes = plain.rows + offset_of(plain.stride, place.block, row.head, place.slot) +
             row.index * (NYB_LANE_ELEMENTS * bytes_of(call.part_dtype));
  const nyb_device_rows &rows = row.is_key ? call.key : call.value;
  const bool wide = rows.dim * bytes_of(call.part_dtype) % 16 == 0;  // planes begin at 64 bytes
  return quantize_plain(at, true, call.part_dtype, call.part_dtype, wide, elements);
}

// False where it could not be stored.
NYB_FUNCTION bool place_lane(const nyb_device_placed &call, const nyb_append_plan &plan,
                             int64_t sequence, const row_lane &row) {
  const nyb_device_rows &rows = row.is_key ? call.key : call.value;
  const bool own = row.own && plan.fits && row.token >= plan.padding;
  nyb_cache_place place = nyb_kind_place(NYB_BODY, 0, 0, 0);
  if (own) place = nyb_appended_place(&call.places, &plan, sequence, row.token);
  lane at = lane_of(rows, place.block, row.head, place.slot, row.index);
  at.floats = floats_of(rows, sequence, row.head, row.token, row.index);
  if (!own) at.count = 0;
  uint32_t elements[NYB_LANE_ELEMENTS];
  load_elements(elements, at.floats, rows.input_dtype, rows.wide_input, at.count);
  int dtype = rows.input_dtype;
  bool stored = true;
  if (call.part_dtype != 0) {  // every row is rounded as if it had stood beside the body first
    convert(elements, dtype, call.part_dtype);
    dtype = call.part_dtype;
    if (own && place.region != NYB_BODY) stored = store_plain(call, row, place, at, elements);
  }
  const bool writes = own && place.region == NYB_BODY;
  return quantize_lane(rows, at, writes, call.rule, dtype, elements) && stored;
}

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    append_placed(const __grid_constant__ nyb_device_placed call) {
  int64_t block;
  const int64_t sequence = nyb_split(blockIdx.x, &call.blocks_per_sequence, &block);
  const int64_t step = call.blocks_per_sequence.divisor * NYB_QUANTIZE_THREADS;
  const int64_t warp = threadIdx.x / 32 * 32, thread = threadIdx.x % 32;
  const int64_t lanes = call.key_lanes + call.value_lanes;

  nyb_await_previous();
  const nyb_append_plan plan = nyb_append_plan_of(&call, sequence);
  bool stored = plan.fits;
  for (int64_t first = block * NYB_QUANTIZE_THREADS + warp; first < lanes; first += step) {
    stored &= place_lane(call, plan, sequence, find_row(call, first + thread));
  }
  if (!stored && call.non_finite != nullptr) *call.non_finite = 1;

  __syncthreads();  // every thread of the block has its numbers
  if (threadIdx.x != 0) return;
  if (is_last_block(call, sequence) && plan.fits) {
    nyb_set_sequence_at(&call.places, sequence, &plan.after);
  }
}
