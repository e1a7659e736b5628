// SPDX-License-Identifier: Apache-2.0
// How the kernels append, append_placed and retire share a sequence's lanes out: the key's, padded
// to whole warps, then the value's.
#pragma once

#include "quantize_lane.cuh"

struct row_lane {
  int64_t head, token, index;
  bool is_key;
  bool own;  // or one of the padding's
};

template <typename append_call>
NYB_FUNCTION row_lane find_row(const append_call &call, int64_t number) {
  row_lane found;
  found.is_key = number < call.key_lanes;
  const nyb_device_rows &rows = found.is_key ? call.key : call.value;
  if (!found.is_key) number -= call.key_lanes;
  found.own = number < call.tokens.divisor * rows.lanes.divisor * call.kv_heads;
  const int64_t row = nyb_split(found.own ? number : 0, &rows.lanes, &found.index);
  found.head = nyb_split(row, &call.tokens, &found.token);
  return found;
}

// Of the blocks of a sequence, each of which comes here once by one thread: true for the last one,
// which may change what the others have read.
template <typename append_call>
NYB_FUNCTION bool is_last_block(const append_call &call, int64_t sequence) {
  const int64_t blocks = call.blocks_per_sequence.divisor;
  if (blocks == 1) return true;
  __threadfence();
  const bool last = atomicAdd(&call.arrivals[sequence], 1u) == static_cast<unsigned>(blocks - 1);
  if (last) call.arrivals[sequence] = 0;
  return last;
}
