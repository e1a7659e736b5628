// SPDX-License-Identifier: Apache-2.0
// Tokens of K and V to the end of every sequence of a cache, and the lengths moved along. Some
// blocks serve each sequence; the last of them to have read its length moves it.
#include "quantize_lane.cuh"

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    append(const __grid_constant__ nyb_device_append call) {
  nyb_await_previous();
  int64_t block;
  const int64_t sequence = nyb_split(blockIdx.x, call.blocks_per_sequence, &block);
  const int64_t capacity = call.capacity_tokens;
  int64_t length = call.lengths[sequence];
  length = length < 0 ? 0 : length > capacity ? capacity : length;
  const bool fits = call.tokens <= capacity - length;

  const int64_t step = static_cast<int64_t>(call.blocks_per_sequence) * NYB_QUANTIZE_THREADS;
  const int64_t warp = threadIdx.x / 32 * 32, thread = threadIdx.x % 32;
  const int64_t lanes = call.key_lanes + call.value_lanes;
  bool stored = fits;
  for (int64_t first = block * NYB_QUANTIZE_THREADS + warp; first < lanes; first += step) {
    const bool is_key = first < call.key_lanes;
    const nyb_device_rows &rows = is_key ? call.key : call.value;
    // The key's lanes are padded to whole warps: what they do not need lies beyond its last head.
    const int64_t lane = first + thread - (is_key ? 0 : call.key_lanes);
    const int64_t own = call.tokens * rows.lanes * call.kv_heads;
    lane_place place;
    place.batch = sequence;
    place.reads = lane < own;
    place.writes = place.reads && fits;
    const int64_t row = nyb_split(place.reads ? lane : 0, rows.lanes, &place.lane);
    place.head = nyb_split(row, call.tokens, &place.input_token);
    place.stored_token = length + place.input_token;
    uint32_t elements[NYB_LANE_ELEMENTS];
    load_elements(elements, floats_of_lane(rows, place), rows.input_dtype, rows.wide_input,
                  place.reads ? elements_of_lane(rows, place.lane) : 0);
    stored &= quantize_lane(rows, place, call.rule, elements);
  }
  if (!stored && call.non_finite != nullptr) *call.non_finite = 1;

  __syncthreads();  // every thread of the block has its length
  if (threadIdx.x != 0) return;
  bool last = true;
  if (call.blocks_per_sequence > 1) {
    __threadfence();
    const unsigned others = static_cast<unsigned>(call.blocks_per_sequence) - 1;
    last = atomicAdd(&call.arrivals[sequence], 1u) == others;
    if (last) call.arrivals[sequence] = 0;
  }
  if (last && fits) call.lengths[sequence] = static_cast<int>(length + call.tokens);
}
