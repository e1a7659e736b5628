// SPDX-License-Identifier: Apache-2.0
// Attention of a few query rows over a long quantized cache.
//
// Tokens stand on the M side of the tensor cores' 16x8x16 product, the query rows that share a KV
// head on its N side. Codes stay integers: a field of a packed word, masked in place, is a
// subnormal f16 number, code * 2^(position - 24), exactly; queries carry the other power of two.
// Scales and biases come after the product, once for each token and group.
//
// A block's last warp copies. The other four share steps of 4 * TILE tokens: each scores a quarter
// of the tokens and leaves their weights, times V's scales, in shared memory; then, while the next
// step is scored, each sums a part of the output's elements over all of the step's tokens, so that
// few sums are held in registers and none is added between warps. Of wide heads they are eight: two
// score a half of head_dim each. A leaf of tokens is summed in order; leaves are added along a
// fixed binary tree over token positions. Maxima are whole numbers of log2 units, so that all
// rescaling is by powers of two and exact: where the tree is cut between blocks of threads changes
// no bit. Leaves are dealt out in equal contiguous runs over the whole grid, and copies are kept
// ahead across them.
//
// Parameters of a specialisation (-D): KEY_DIM, VALUE_DIM, KEY_BITS, VALUE_BITS, KEY_GROUP,
// VALUE_GROUP, QUERY_TYPE (of q: F16 or BF16), KEY_SCALE_TYPE, VALUE_SCALE_TYPE (dtypes), COLUMNS
// (query rows at once, 8 or 16), ROWS (of them, those that may be in use), ROUND_SCORES
// (NYB_ROUNDING_MLX), PACKED (1: tokens of a head are contiguous and start at multiples of 16
// bytes; 0: any strides), STAGES (steps of tokens that are in shared memory or on their way),
// FEATURES (bits, NYB_DECODE_SIGHT, ...: what hides tokens beside a causal mask, and what is done
// to scores), PLACED (NYB_DECODE_IN_ORDER: tokens follow each other; _SHIFTED: from anywhere on, or
// in a ring; _PAGES: in pages, by runs of 16).
#include "attention_decode_subtrees.cuh"

// The leaf's first step.
template <bool MASKED>
__device__ __forceinline__ void begin_leaf(Leaf &leaf, Step &step, const Queries &q, uint32 shared,
                                           const Addresses &where) {
  step.score<MASKED>(leaf, q, shared, where);
  int only_buffer = 0;
  leaf.raise(step.scores, q, step.scales_at, step.unseen, shared, where, only_buffer);
  step.weigh<MASKED>(leaf, q, shared, where);
  weighed(false);
}
// A step is scored and weighed while the one before is summed: neither waits for the other. Where a
// maximum turns out to have been too low, the weights are worked out once more.
template <bool MASKED>
__device__ __forceinline__ void go_on(Leaf &leaf, Step &before, Step &step, const Queries &q,
                                      uint32 shared, const Addresses &where) {
  before.add_to<MASKED>(leaf, shared, where);
  step.score<MASKED>(leaf, q, shared, where);
  const bool raises = step.raises(leaf, q, shared, where);
  // With slopes, scores mostly rise from step to step.
  const bool in_vain = SLOPED && __any_sync(~0u, raises);
  if (!in_vain) step.weigh<MASKED>(leaf, q, shared, where);
  if (weighed(raises)) {
    int only_buffer = 0;
    leaf.raise(step.scores, q, step.scales_at, step.unseen, shared, where, only_buffer);
    step.weigh<MASKED>(leaf, q, shared, where);
    synchronize_warps();
  }
}

// The same where two warps share a tile, up to the barrier: neither waits for the other's scores
// before it has summed the step before. In a leaf's first turn there is none, in the one behind its
// last step there is nothing else but, where the same pair's next leaf follows, its first step's
// scores, which are as far as they get then.
struct Turn {
  bool first, last, scores;
};
// Whether a maximum was too low.
template <bool MASKED>
__device__ __forceinline__ bool go_on_by_parts(Leaf &leaf, const Step &before, Step &step,
                                               const Queries &q, uint32 shared,
                                               const Addresses &where, Turn turn) {
  if (turn.scores) step.score_part<MASKED>(leaf, q, shared, where);
  if (!turn.first) before.add_to<MASKED>(leaf, shared, where);
  if (turn.last) return false;
  step.add_other_part<MASKED>(q, shared, where);
  if (turn.first) return true;
  const bool raises = step.raises(leaf, q, shared, where);
  return step.weigh<MASKED>(leaf, q, shared, where) || raises;
}

// What a warp does not look at between a leaf's first step and its last. Where registers are few,
// it waits in shared memory.
struct Parked {
  Position at;
  uint32 unit, end, valid;
};
static_assert(sizeof(Parked) <= NYB_DECODE_PARKED_WARP_BYTES);
__device__ __forceinline__ uint32 parked_address(uint32 shared) {
  return shared + PARKED_AT + (threadIdx.x >> 5) * NYB_DECODE_PARKED_WARP_BYTES;
}
__device__ __forceinline__ void park(const Parked &parked, uint32 shared) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) {
    const uint32 *words = reinterpret_cast<const uint32 *>(&parked);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Parked)) / 4; i++) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(parked_address(shared) + i * 4), "r"(words[i])
                   : "memory");
    }
  }
  __syncwarp();
}
__device__ __forceinline__ Parked unpark(uint32 shared) {
  Parked parked;
  load_words<sizeof(Parked)>(reinterpret_cast<uint32 *>(&parked), parked_address(shared));
  return parked;
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, MIN_BLOCKS)
    attention_decode(const __grid_constant__ Arguments arguments) {
  const nyb_decode_arguments &a = decode_of(arguments);
  extern __shared__ __align__(128) char shared_memory[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int warp = threadIdx.x >> 5;
  const uint32 shared = static_cast<uint32>(__cvta_generic_to_shared(shared_memory));
  const Problem problem = {&arguments, &a};
  Position at;
  const uint32 units = problem.units(at);
  const nyb_leaf_runs runs = nyb_leaf_runs_of(units, gridDim.x);
  const uint32 begin = nyb_run_begin(&runs, blockIdx.x);
  const uint32 end = nyb_run_begin(&runs, blockIdx.x + 1);
  if (begin == end) return;
  problem.find(at, begin);
  if (warp == WARPS) {
    copy_all(a, problem, at, end - begin, shared);
    return;
  }

  Addresses where;
  where.start(shared);
  Queries q;
#if FEATURES
  q.call = &features_of(arguments);
#endif
  Leaf leaf;
  Combiner combiner;
  combiner.shared = shared;
  combiner.valid = 0;
  int stage = 0, scale_stage = 0, buffer = 0, raised_buffer = 0;
  if constexpr (RAISED_BUFFERS > 1) Leaf::clear_raised(shared, raised_buffer);
  enum { SAME_PAIR, NEW_PAIR, FIRST_PAIR };
  int entry = FIRST_PAIR;
  // Where two warps share a tile: the next leaf's first step, whose scores are under way.
  Step next_step;
  bool goes_on = false;
  for (uint32 unit = begin, units_end = end; unit < units_end; unit++) {
    if (entry != SAME_PAIR) {
      q.load(arguments, at, shared);
      if constexpr (HELD_PAIRS > 0) q.hold_fragments(where.fragments);
    }
    if (!(BOOLS || ADDED) && entry == FIRST_PAIR) first_keys_arrived();
    leaf.clear(where);
    const int first_step = first_step_of(at), steps = end_step_of(at);
    const int leaf_token = at.leaf * LEAF;
    Step step;
    const auto seen_whole = [&](int index) {
      const int end = leaf_token + (index + 1) * STEP;
      if constexpr (SIGHT) {
        if (end - STEP < q.begin_of_all && end > q.keep_of_all) return false;
      }
      return end <= q.visible_to_all;
    };
    const auto enter = [&](int index) {
      step.stage = shared + stage * STAGE_BYTES;
      step.scales_at = shared + VALUE_SCALES_AT + scale_stage * SCALE_STAGE_BYTES;
      step.weights_at = buffer * WEIGHT_STEP_BYTES;
      step.first = leaf_token + index * STEP;
      if constexpr (WARP_PARTS == 1) step.first += warp * TILE + lane_token();
      if constexpr (FEATURES) step.by_place = !seen_whole(index);
      stage = next_of<STAGES>(stage);
      scale_stage = next_of<SCALE_STAGES>(scale_stage);
      buffer ^= 1;
    };
    if constexpr (WARP_PARTS > 1) { // one code for all steps: instruction caches are small
      const bool begun = goes_on;
      if (begun) step = next_step;
      goes_on = unit + 1 < units_end && at.leaf + 1 < at.leaves().end;
      park({at, unit, units_end, combiner.valid}, shared);
      for (int index = 0;; index++) {
        const Step before = step;
        const bool first = index == 0, last = index == steps;
        const bool scores = first ? !begun : !last || goes_on;
        const bool whole = seen_whole(last && !goes_on ? index - 1 : index);
        if (scores) enter(index);
        const Turn turn = {first, last, scores};
        const bool raises = whole
                                ? go_on_by_parts<false>(leaf, before, step, q, shared, where, turn)
                                : go_on_by_parts<true>(leaf, before, step, q, shared, where, turn);
        if (last) break;
        if (weighed(raises)) {
          leaf.raise(step.scores, q, step.scales_at, step.unseen, shared, where, raised_buffer);
          if (whole) {
            step.weigh<false>(leaf, q, shared, where);
          } else {
            step.weigh<true>(leaf, q, shared, where);
          }
          synchronize_warps();
        }
      }
    } else {
      // What a mask's array hides is not known before the step: one code for all steps then.
      constexpr bool BY_ARRAY = BOOLS || ADDED;
      const auto enter_step = [&](int index) {
        enter(index);
        // On their way before they are needed.
        if constexpr (BY_ARRAY) step.mask.load(q, shared, step.first, step.by_place);
        return !BY_ARRAY && seen_whole(index);
      };
      bool whole = enter_step(first_step);
      if (BY_ARRAY && entry == FIRST_PAIR) first_keys_arrived();
      if (whole) {
        begin_leaf<false>(leaf, step, q, shared, where);
      } else {
        begin_leaf<true>(leaf, step, q, shared, where);
      }
      for (int index = first_step + 1; index < steps; index++) {
        Step before = step;
        const bool before_whole = !SIGHT || whole; // elsewhere, because this one is
        whole = enter_step(index);
        if (whole && before_whole) {
          go_on<false>(leaf, before, step, q, shared, where);
        } else {
          go_on<true>(leaf, before, step, q, shared, where);
        }
      }
    }
    if constexpr (WARP_PARTS == 1) {
      step.add_to<true>(leaf, shared, where);
    } else {
      next_step = step;
      const Parked parked = unpark(shared);
      at = parked.at;
      unit = parked.unit;
      units_end = parked.end;
      combiner.valid = parked.valid;
    }
    combiner.rows = min(a.heads_per_kv * a.query_len - at.pair % a.row_tiles * COLUMNS, COLUMNS);
    Subtree tree;
    combiner.take_leaf(tree, leaf, where);
    const Leaves leaves = at.leaves();
    const bool last = unit + 1 == units_end || at.leaf + 1 == leaves.piece_end(at.leaf);
    combiner.add_leaf(tree, a, static_cast<int64>(at.batch) * problem.pairs() + at.pair, at.leaf,
                      last);
    const bool leaves_pair =
        SIGHT ? at.leaf + 1 == leaves.end || leaves.begin == leaves.end : last;
    entry = leaves_pair ? NEW_PAIR : SAME_PAIR;
    if (unit + 1 < units_end) problem.advance(at);
  }
}
