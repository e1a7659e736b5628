// SPDX-License-Identifier: Apache-2.0
// The subtrees of leaves that attention_decode left, added along the binary tree over their
// positions.
//
// Four elements of an output row take a lane for each GROUP neighbouring leaves, up to
// arguments.merge_groups lanes at once: lanes of a warp first, so that neighbours read neighbouring
// elements, then warps. More leaves come in rounds, those of a window alone in one or two. Which
// leaves begin a subtree follows from the lengths, so that lanes ask for all that they need at
// once, as soon as attention_decode is done.
//
// Parameters (-D): VALUE_DIM, COLUMNS, FEATURES (of attention_decode, those that matter here).
#define PLACED 0 // where tokens stand plays no part
#define LOOKS_EARLY
#include "attention_decode_leaves.cuh"

#if !defined(VALUE_DIM) || !defined(COLUMNS)
#error "a parameter of attention_merge is missing"
#endif

constexpr int GROUP = NYB_MERGE_GROUP, ELEMENTS = NYB_MERGE_ELEMENTS, GROUP_SHIFT = 3;
constexpr int WARP_GROUPS = NYB_MERGE_WARP_GROUPS, MAX_WARPS = NYB_MERGE_MAX_WARPS;
constexpr int PARTS = VALUE_DIM / ELEMENTS, STATISTICS = NYB_DECODE_STATISTICS(COLUMNS);
constexpr bool SUNK = (FEATURES & NYB_DECODE_SINKS) != 0;
constexpr int MAX_ROUND_LEVELS = 24;
static_assert(VALUE_DIM % ELEMENTS == 0 && ELEMENTS == 4 && GROUP == 1 << GROUP_SHIFT);

// Of a subtree: elements of a row's output and its sum of weights, not divided yet, in units of
// 2^maximum.
struct Part {
  float out[ELEMENTS], sum, maximum;
};
__device__ __forceinline__ Part no_part() { return {{0, 0, 0, 0}, 0, -infinity()}; }

// As attention_decode joins them: where the tree is cut between the two changes no bit.
__device__ __forceinline__ Part join(const Part &left, const Part &right) {
  const JoinFactors factors(left.maximum, right.maximum);
  Part total;
#pragma unroll
  for (int j = 0; j < ELEMENTS; j++) total.out[j] = factors.join(left.out[j], right.out[j]);
  total.sum = factors.join(left.sum, right.sum);
  total.maximum = factors.maximum;
  return total;
}

// With that of the lane `distance` on: right for the lanes that are the left of two.
__device__ __forceinline__ Part with_next(const Part &own, int distance) {
  Part other;
#pragma unroll
  for (int j = 0; j < ELEMENTS; j++) other.out[j] = __shfl_down_sync(~0u, own.out[j], distance);
  other.sum = __shfl_down_sync(~0u, own.sum, distance);
  other.maximum = __shfl_down_sync(~0u, own.maximum, distance);
  return join(own, other);
}

__device__ __forceinline__ uint32 leaves_of(const Arguments &arguments, int batch) {
  return Leaves(sequence_of(arguments, batch), decode_of(arguments).leaf_tokens).count();
}

// Leaves of the sequences before `batch`, and of all. For the whole block of threads.
struct LeafCounts {
  uint32 before, all;
};
__device__ __forceinline__ LeafCounts count_leaves(const Arguments &arguments, int batch) {
  const int sequences = decode_of(arguments).batch;
  if (sequences == 1) return {0, leaves_of(arguments, 0)};
  __shared__ LeafCounts of_warp[MAX_WARPS];
  LeafCounts own = {0, 0};
  for (int i = threadIdx.x; i < sequences; i += blockDim.x) {
    const uint32 leaves = leaves_of(arguments, i);
    own.all += leaves;
    if (i < batch) own.before += leaves;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    own.all += __shfl_xor_sync(~0u, own.all, distance);
    own.before += __shfl_xor_sync(~0u, own.before, distance);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  LeafCounts total = {0, 0};
  for (int i = 0; i < blockDim.x / 32; i++) {
    total.all += of_warp[i].all;
    total.before += of_warp[i].before;
  }
  return total;
}

// How lanes share rows: `sharers` lanes of a warp and `warps` warps the same elements. All are powers
// of two, and the shifts that divide by them.
struct Place {
  int sharers, warps, group_shift, sharer_shift, item_shift;
  int items;       // of a warp: other elements
  int item, group; // this lane's; group: among all that share its elements
  int index;       // of the item in its warp
  int sharer;      // among the warp's that share it
  int warp;        // among those that share its elements
  __device__ __forceinline__ explicit Place(int groups) : sharers(min(groups, WARP_GROUPS)) {
    group_shift = __ffs(groups) - 1;
    sharer_shift = __ffs(sharers) - 1;
    item_shift = 5 - sharer_shift;
    const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
    const int warp_shift = group_shift - sharer_shift;
    warps = 1 << warp_shift;
    items = 1 << item_shift;
    index = lane & (items - 1);
    sharer = lane >> item_shift;
    warp = own_warp & (warps - 1);
    item = (own_warp >> warp_shift << item_shift) + index;
    group = (warp << sharer_shift) + sharer;
  }
};

// The row that a lane adds up, and where its pair's leaves stand among all.
struct Row {
  int batch, head, row, part;
  int query_head, query;
  Sequence sequence;
  Leaves leaves; // none where there is no such row
  uint32 first_unit;
  bool exists;
};
__device__ __forceinline__ Row find_row(const Arguments &arguments, const Place &place,
                                        uint32 *units) {
  const nyb_decode_arguments &a = decode_of(arguments);
  const uint32 rows = a.heads_per_kv * a.query_len; // all below 2^31: the host sees to it
  const uint32 first = blockIdx.x * (blockDim.x >> place.group_shift);
  const uint32 index = first + place.item, pair = index / PARTS / rows;
  int first_batch = 0;
  if (a.batch > 1) first_batch = min(static_cast<int>(first / PARTS / rows / a.kv_heads), a.batch);
  const LeafCounts counted = count_leaves(arguments, first_batch);
  Row row;
  const uint32 batch = a.batch > 1 ? pair / a.kv_heads : pair >= a.kv_heads;
  row.exists = batch < a.batch;
  row.batch = row.exists ? static_cast<int>(batch) : 0;
  row.head = static_cast<int>(pair - batch * a.kv_heads);
  row.row = static_cast<int>(index / PARTS - pair * rows);
  row.part = static_cast<int>(index % PARTS);
  const uint32 head_of_kv = a.query_len > 1 ? static_cast<uint32>(row.row) / a.query_len : row.row;
  row.query_head = row.head * a.heads_per_kv + static_cast<int>(head_of_kv);
  row.query = row.row - static_cast<int>(head_of_kv) * a.query_len;
  if (row.exists) {
    row.sequence = sequence_of(arguments, row.batch);
    row.leaves = Leaves(row.sequence, a.leaf_tokens);
  }
  uint32 before = counted.before;
  for (int other = first_batch; other < row.batch; other++) before += leaves_of(arguments, other);
  const uint32 pairs = a.kv_heads * a.row_tiles; // of a sequence
  *units = counted.all * pairs;
  row.first_unit =
      before * pairs + (row.head * a.row_tiles + row.row / COLUMNS) * row.leaves.count();
  return row;
}

// Bit i: a subtree begins at leaf first + i, of GROUP.
__device__ __forceinline__ uint32 begins_of(const nyb_decode_arguments &a,
                                            const nyb_leaf_runs &runs, const Row &row,
                                            int64 first) {
  if (first >= row.leaves.end) return 0;
  const int leaf = static_cast<int>(first), window = leaf & -NYB_LEAF_WINDOW;
  const uint32 begun = nyb_subtrees_begun(&runs, row.first_unit, &row.leaves, a.levels, window);
  return begun >> (leaf - window) & ((1 << GROUP) - 1);
}
static_assert(NYB_LEAF_WINDOW % GROUP == 0);

// Of the row's head; -inf where there is none.
__device__ __forceinline__ float sink_of(const Arguments &arguments, const Row &row) {
#if FEATURES & NYB_DECODE_SINKS
  if (row.exists) return load_of_sequence(features_of(arguments).sinks + row.query_head);
#endif
  return -infinity();
}

// Where the row goes.
struct Target {
  char *out, *lse; // lse: or null
};
__device__ __forceinline__ Target target_of(const nyb_decode_arguments &a, const Row &row) {
  const int64 head = row.query_head, query = row.query;
  Target to = {a.out + row.batch * a.out_stride[0] + head * a.out_stride[1] +
                   query * a.out_stride[2],
               nullptr};
  if (row.part == 0 && a.lse != nullptr) {
    to.lse = a.lse + row.batch * a.lse_stride[0] + head * a.lse_stride[1] +
             query * a.lse_stride[2];
  }
  return to;
}

// The finished elements, and once lse.
__device__ __forceinline__ void store(const Arguments &arguments, const Row &row,
                                      const Target &target, float sink, Part total) {
  const nyb_decode_arguments &a = decode_of(arguments);
  float highest = total.maximum;
  // A row that sees tokens, but scores of -inf only, is 0/0.
  bool seen, sink_alone = false;
  if constexpr (HIDING) {
    seen = !(total.sum == 0.0f);
    // What said that tokens were seen; a NaN stays one.
    if (highest == -infinity() && total.sum == total.sum) total.sum = 0.0f;
  } else {
    const int length = row.sequence.length;
    seen = (a.causal != 0 ? length - a.query_len + row.query + 1 : length) > 0;
  }
  if constexpr (SUNK) {
    float own = ADDED ? log2_units_of(sink) : sink * LOG2_E; // a token more, without a value
    if (fabsf(sink) < infinity()) own = fminf(fmaxf(own, -LARGEST_FLOAT), LARGEST_FLOAT);
    const float both = highest > own ? highest : own; // or NaN, where the sink is
    if (both != -infinity()) {
      const float keep = exp2f(highest - both);
#pragma unroll
      for (int j = 0; j < ELEMENTS; j++) total.out[j] *= keep;
      total.sum = total.sum * keep + exp2f(own - both);
      highest = both;
      seen = seen || total.sum != 0.0f;
      sink_alone = keep == 0.0f && total.sum == 1.0f;
    }
  }
  uint32 words[ELEMENTS / 2];
#pragma unroll
  for (int j = 0; j < ELEMENTS; j += 2) {
    const float low = seen ? total.out[j] / total.sum : 0.0f;
    const float high = seen ? total.out[j + 1] / total.sum : 0.0f;
    words[j / 2] = a.out_type == F16 ? f16_from_f32(low) | f16_from_f32(high) << 16
                                     : bf16_from_f32(low) | bf16_from_f32(high) << 16;
  }
  uint16 *to = reinterpret_cast<uint16 *>(target.out) + row.part * ELEMENTS;
  if (reinterpret_cast<uint64>(to) % 8 == 0) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++) to[j] = static_cast<uint16>(words[j / 2] >> j % 2 * 16);
  }
  if (target.lse != nullptr) {
    const float score = highest + log2f(total.sum);
    *reinterpret_cast<float *>(target.lse) = sink_alone ? sink
                                             : !seen    ? -infinity()
                                             : ADDED    ? natural_units_of(score)
                                                        : score * LN_2;
  }
}

// What the warps that share elements have summed, from left to right. For the whole block of
// threads; the first of those warps has the result.
__device__ __forceinline__ Part join_warps(const Place &place, const Part &own) {
  __shared__ Part of_warp[MAX_WARPS][32];
  const int warp = threadIdx.x / 32, index = place.index, sharer = place.sharer;
  __syncthreads(); // the round before has been read
  if (sharer == 0) of_warp[warp][index] = own;
  __syncthreads();
  const int each = (place.warps + place.sharers - 1) >> place.sharer_shift;
  Part total = no_part();
  if (place.warp == 0 && sharer * each < place.warps) {
    total = of_warp[warp + sharer * each][index];
    if (each == 2) total = join(total, of_warp[warp + sharer * each + 1][index]);
  }
  for (int distance = place.items; distance < 32; distance *= 2)
    total = with_next(total, distance);
  return total;
}
static_assert(MAX_WARPS <= 2 * WARP_GROUPS);

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32, 2)
    attention_merge(const __grid_constant__ Arguments arguments) {
  const nyb_decode_arguments &a = decode_of(arguments);
  const int groups = a.merge_groups;
  const Place place(groups);
  uint32 units;
  const Row row = find_row(arguments, place, &units);
  const nyb_leaf_runs runs = nyb_leaf_runs_of(units, a.blocks);
  const int64 slot =
      ((static_cast<int64>(row.batch) * a.kv_heads + row.head) * a.row_tiles + row.row / COLUMNS) *
      a.capacity_leaves;
  const float *partials =
      a.partials + (slot * COLUMNS + row.row % COLUMNS) * VALUE_DIM + row.part * ELEMENTS;
  const float *statistics = a.statistics + slot * STATISTICS + row.row % COLUMNS;
  const int rounds = a.merge_rounds; // of all threads
  int64 first_leaf = place.group * GROUP;
#if FEATURES & NYB_DECODE_SIGHT
  const int round_shift = place.group_shift + GROUP_SHIFT;
  if (a.merge_from_seen != 0)
    first_leaf += static_cast<int64>(row.leaves.begin) >> round_shift << round_shift;
#endif
  const auto first_of = [&](int round) {
    return first_leaf + static_cast<int64>(round) * groups * GROUP;
  };
  uint32 begins = begins_of(a, runs, row, first_of(0));
  const float sink = sink_of(arguments, row);
  Target target = target_of(a, row); // now, while there is time
  asm volatile("" : "+l"(target.out), "+l"(target.lse));
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // Subtrees of whole rounds wait here for their right neighbours.
  Part waiting[MAX_ROUND_LEVELS];
  Part total;
  for (int round = 0; round < rounds; round++) {
    const int64 first = first_of(round);
    Part parts[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      parts[i] = no_part();
      if ((begins >> i & 1) != 0) {
        const float4 out =
            *reinterpret_cast<const float4 *>(partials + (first + i) * COLUMNS * VALUE_DIM);
        parts[i] = {{out.x, out.y, out.z, out.w},
                    statistics[(first + i) * STATISTICS + COLUMNS],
                    statistics[(first + i) * STATISTICS]};
      }
    }
    if (round + 1 < rounds) begins = begins_of(a, runs, row, first_of(round + 1));
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2) {
#pragma unroll
      for (int i = 0; i < GROUP; i += 2 * step) parts[i] = join(parts[i], parts[i + step]);
    }
    total = parts[0];
    for (int distance = place.items; distance < 32; distance *= 2)
      total = with_next(total, distance);
    if (place.warps > 1) total = join_warps(place, total);
    if (rounds > 1) {
      int level = 0;
      for (int done = round; (done & 1) != 0; done >>= 1) total = join(waiting[level++], total);
      waiting[level] = total;
    }
  }
  if (place.group != 0 || !row.exists) return;
  if (rounds > 1) { // what is left, from the right
    const int lowest = __ffs(rounds) - 1;
    total = waiting[lowest];
    for (int level = lowest + 1; level < MAX_ROUND_LEVELS; level++) {
      if ((rounds >> level & 1) != 0) total = join(waiting[level], total);
    }
  }
  store(arguments, row, target, sink, total);
}
