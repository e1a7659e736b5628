// SPDX-License-Identifier: Apache-2.0
// Tokens of K and V to the end of every sequence of a contiguous cache, and the lengths moved
// along. Some blocks serve each sequence; the last of them to have read its length moves it.
//
// One token is so little work that what counts is the way to the first load: everything that does
// not depend on the kernels before is done while they end.
#include "append_lane.cuh"

// A thread's place among the lanes of a sequence.
struct sequence_lane {
  lane at;
  bool is_key, own;
};

NYB_FUNCTION sequence_lane find_lane(const nyb_device_append &call, int64_t sequence,
                                     int64_t number) {
  const row_lane row = find_row(call, number);
  sequence_lane found;
  found.is_key = row.is_key;
  found.own = row.own;
  found.at =
      lane_of(found.is_key ? call.key : call.value, sequence, row.head, row.token, row.index);
  if (!found.own) found.at.count = 0;
  return found;
}

// False where it could not be stored.
NYB_FUNCTION bool append_lane(const nyb_device_append &call, const sequence_lane &found,
                              int64_t length, bool fits,
                              const uint32_t elements[NYB_LANE_ELEMENTS]) {
  const nyb_device_rows &rows = found.is_key ? call.key : call.value;
  lane at = found.at;
  at.codes += length * rows.codes_stride[2];
  at.scales += length * rows.scales_stride[2];
  at.biases += length * rows.biases_stride[2];
  return quantize_lane(rows, at, found.own && fits, call.rule, rows.input_dtype, elements);
}

NYB_FUNCTION void load(uint32_t elements[NYB_LANE_ELEMENTS], const nyb_device_append &call,
                       const sequence_lane &found) {
  const nyb_device_rows &rows = found.is_key ? call.key : call.value;
  load_elements(elements, found.at.floats, rows.input_dtype, rows.wide_input, found.at.count);
}

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    append(const __grid_constant__ nyb_device_append call) {
  int64_t block;
  const int64_t sequence = nyb_split(blockIdx.x, &call.blocks_per_sequence, &block);
  const int64_t step = call.blocks_per_sequence.divisor * NYB_QUANTIZE_THREADS;
  const int64_t warp = threadIdx.x / 32 * 32, thread = threadIdx.x % 32;
  const int64_t lanes = call.key_lanes + call.value_lanes;
  int64_t first = block * NYB_QUANTIZE_THREADS + warp;
  sequence_lane found = find_lane(call, sequence, first + thread);

  nyb_await_previous();
  int64_t length = call.lengths[sequence];
  length = length < 0 ? 0 : length > call.capacity_tokens ? call.capacity_tokens : length;
  const bool fits = call.tokens.divisor <= call.capacity_tokens - length;
  bool stored = fits;
  while (first < lanes) {
    uint32_t elements[NYB_LANE_ELEMENTS];
    load(elements, call, found);
    stored &= append_lane(call, found, length, fits, elements);
    first += step;
    if (first < lanes) found = find_lane(call, sequence, first + thread);
  }
  if (!stored && call.non_finite != nullptr) *call.non_finite = 1;

  __syncthreads();  // every thread of the block has its length
  if (threadIdx.x != 0) return;
  const bool last = is_last_block(call, sequence);
  if (last && fits) call.lengths[sequence] = static_cast<int>(length + call.tokens.divisor);
}
