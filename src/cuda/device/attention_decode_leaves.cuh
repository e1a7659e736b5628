// SPDX-License-Identifier: Apache-2.0
// What attention_decode and attention_merge share: their parameter, and which leaves of a sequence
// hold what is seen.
#pragma once

#include "attention_decode_arguments.h"
#include "attention_leaves.cuh"
#include "attention_sight.cuh"
#include "numbers.cuh"

#if !defined(FEATURES) || !defined(PLACED)
#error "FEATURES or PLACED is missing"
#endif
constexpr bool SIGHT = (FEATURES & NYB_DECODE_SIGHT) != 0;
constexpr bool CAPPED = (FEATURES & NYB_DECODE_CAPPED) != 0;
constexpr bool SLOPED = (FEATURES & NYB_DECODE_SLOPED) != 0;
constexpr bool BOOLS = (FEATURES & NYB_DECODE_BOOLS) != 0;
constexpr bool ADDED = (FEATURES & NYB_DECODE_ADDED) != 0;
// Rows may see no token at all though there are some, and tokens that others do not see.
constexpr bool HIDING = SIGHT || BOOLS || ADDED;

// Kernels of plain calls take less.
#if FEATURES || PLACED
using Arguments = nyb_decode_call_arguments;
__device__ __forceinline__ const nyb_decode_arguments &decode_of(const Arguments &a) {
  return a.decode;
}
__device__ __forceinline__ const nyb_decode_features &features_of(const Arguments &a) {
  return a.features;
}
#else
using Arguments = nyb_decode_arguments;
__device__ __forceinline__ const nyb_decode_arguments &decode_of(const Arguments &a) { return a; }
__device__ nyb_decode_features features_of(const Arguments &a); // nowhere
#endif

// A length, a start or a sink. attention_merge looks at them while the kernels before still end: not
// in the L1, which may hold what they were.
template <class T>
__device__ __forceinline__ T load_of_sequence(const T *from) {
#ifdef LOOKS_EARLY
  static_assert(sizeof(T) == 4);
  uint32 word;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return *reinterpret_cast<const T *>(&word);
#else
  return *from;
#endif
}

// A sequence from its start on, up to the last token that a query row sees.
struct Sequence {
  int length;
#if FEATURES & NYB_DECODE_SIGHT
  int start;
  // All its query rows together see [0, keep_tokens) and [begin_token, length).
  int keep_tokens, begin_token;
#endif
};

__device__ __forceinline__ Sequence sequence_of(const Arguments &arguments, int batch) {
  Sequence sequence;
  const nyb_decode_arguments &a = decode_of(arguments);
#if FEATURES & NYB_DECODE_SIGHT
  // nyb_row_sight_of() of the first row and of the last one, in 32 bits: it is worked out in many
  // places, and positions of so few rows fit.
  const nyb_decode_features &call = features_of(arguments);
  const int held = load_of_sequence(a.lengths + batch);
  const int length = max(min(held, static_cast<int>(a.capacity_tokens)), 0);
  sequence.start = 0;
  if (call.starts != nullptr)
    sequence.start = max(min(load_of_sequence(call.starts + batch), length), 0);
  const int tokens = length - sequence.start, rows = a.query_len;
  const int first = call.mask == NYB_DEVICE_MASK_TOP_LEFT ? -sequence.start : tokens - rows;
  const bool all = call.mask == NYB_DEVICE_MASK_NONE;
  const int first_end = all ? tokens : max(min(first + 1, tokens), 0);
  sequence.length = all ? tokens : max(min(first + rows, tokens), 0);
  const int window = call.window_tokens, keep = call.window_keep_tokens;
  sequence.begin_token = 0;
  if (window != 0 && first >= window) sequence.begin_token = min(first - window + 1, first_end);
  if (sequence.begin_token <= min(keep, first_end)) sequence.begin_token = 0;
  sequence.keep_tokens = sequence.begin_token == 0 ? 0 : min(keep, sequence.length);
#else
  const int64 length = load_of_sequence(a.lengths + batch);
  sequence.length = static_cast<int>(length < 0                   ? 0
                                     : length > a.capacity_tokens ? a.capacity_tokens
                                                                  : length);
#endif
  return sequence;
}

// The leaves of a sequence that hold what its query rows see: [0, keep) and [begin, end). Leaves
// are counted from the sequence's start whatever is seen of it, so that a row's tree is always the
// same.
struct Leaves : nyb_seen_leaves {
  __device__ __forceinline__ Leaves() { keep = begin = end = 0; } // none
  __device__ __forceinline__ Leaves(const Sequence &sequence, int leaf_tokens) {
    keep = begin = 0;
    end = (sequence.length + leaf_tokens - 1) / leaf_tokens;
#if FEATURES & NYB_DECODE_SIGHT
    keep = (sequence.keep_tokens + leaf_tokens - 1) / leaf_tokens;
    begin = sequence.begin_token < sequence.length ? sequence.begin_token / leaf_tokens : end;
    if (keep >= begin) keep = begin = 0;
#endif
  }
  __device__ __forceinline__ int count() const { return end - begin + keep; }
  __device__ __forceinline__ int leaf_at(int index) const {
    return index < keep ? index : begin + index - keep;
  }
  // Behind leaf's neighbours, of those that are seen.
  __device__ __forceinline__ int piece_end(int leaf) const { return leaf < keep ? keep : end; }
};

// What two neighbouring subtrees' sums, in units of 2^maximum, are multiplied by before they are
// added. One of the factors is 1.
struct JoinFactors {
  float maximum, left, right;
  __device__ __forceinline__ JoinFactors(float left_maximum, float right_maximum)
      : maximum(fmaxf(left_maximum, right_maximum)),
        left(rescale_factor(left_maximum - maximum)),
        right(rescale_factor(right_maximum - maximum)) {}
  __device__ __forceinline__ float join(float left_sum, float right_sum) const {
    return fmaf(left_sum, left, __fmul_rn(right_sum, right));
  }
};
