// SPDX-License-Identifier: Apache-2.0
// The subtrees of leaves that attention_decode left, added along the binary tree over their
// positions.
//
// Four elements of an output row take a lane for each GROUP neighbouring leaves, up to
// arguments.merge_groups lanes at once: lanes of a warp first, so that neighbours read neighbouring
// elements, then warps. More leaves come in rounds. Which leaves begin a subtree follows from the
// lengths, so that lanes ask for all that they need at once, as soon as attention_decode is done.
//
// Parameters (-D): VALUE_DIM, COLUMNS, FEATURED (as in attention_decode).
#define PLACED 0 // where tokens stand plays no part
#include "attention_decode_leaves.cuh"

#if !defined(VALUE_DIM) || !defined(COLUMNS)
#error "a parameter of attention_merge is missing"
#endif

constexpr int GROUP = NYB_MERGE_GROUP, ELEMENTS = NYB_MERGE_ELEMENTS;
constexpr int WARP_GROUPS = NYB_MERGE_WARP_GROUPS, MAX_WARPS = NYB_MERGE_MAX_WARPS;
constexpr int PARTS = VALUE_DIM / ELEMENTS, STATISTICS = NYB_DECODE_STATISTICS(COLUMNS);
constexpr int MAX_ROUND_LEVELS = 24;
static_assert(VALUE_DIM % ELEMENTS == 0 && ELEMENTS == 4);

// Of a subtree: elements of a row's output and its sum of weights, not divided yet.
struct Part {
  float out[ELEMENTS], sum;
};

__device__ __forceinline__ Part operator+(const Part &x, const Part &y) {
  Part total;
#pragma unroll
  for (int j = 0; j < ELEMENTS; j++) total.out[j] = x.out[j] + y.out[j];
  total.sum = x.sum + y.sum;
  return total;
}

// Plus that of the lane `distance` on, or before: both get the same.
__device__ __forceinline__ Part with_neighbour(const Part &own, int distance) {
  Part other;
#pragma unroll
  for (int j = 0; j < ELEMENTS; j++) other.out[j] = __shfl_xor_sync(~0u, own.out[j], distance);
  other.sum = __shfl_xor_sync(~0u, own.sum, distance);
  return own + other;
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

// How lanes share rows: `sharers` lanes of a warp and `warps` warps the same elements.
struct Place {
  int sharers, warps; // powers of two
  int items;          // of a warp: other elements
  int item, group;    // this lane's; group: among all that share its elements
  int warp;           // among those that share its elements
  __device__ __forceinline__ explicit Place(int groups)
      : sharers(min(groups, WARP_GROUPS)), warps(groups / sharers), items(32 / sharers) {
    const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
    warp = own_warp % warps;
    item = own_warp / warps * items + lane % items;
    group = warp * sharers + lane / items;
  }
};

// The row that a lane adds up, and where its pair's leaves stand among all.
struct Row {
  int batch, head, row, part;
  Sequence sequence;
  Leaves leaves; // none where there is no such row
  uint32 first_unit;
  bool exists;
};
__device__ __forceinline__ Row find_row(const Arguments &arguments, int item, uint32 *units) {
  const nyb_decode_arguments &a = decode_of(arguments);
  const int rows = a.heads_per_kv * a.query_len;
  const int64 first = static_cast<int64>(blockIdx.x) * (blockDim.x / a.merge_groups);
  const int64 index = first + item;
  const int64 pair = index / PARTS / rows;
  const int first_batch =
      a.batch == 1 ? 0 : min(static_cast<int>(first / PARTS / rows / a.kv_heads), a.batch);
  const LeafCounts counted = count_leaves(arguments, first_batch);
  Row row;
  row.exists = pair < static_cast<int64>(a.batch) * a.kv_heads;
  row.batch = row.exists ? static_cast<int>(pair / a.kv_heads) : 0;
  row.head = static_cast<int>(pair % a.kv_heads);
  row.row = static_cast<int>(index / PARTS % rows);
  row.part = static_cast<int>(index % PARTS);
  if (row.exists) {
    row.sequence = sequence_of(arguments, row.batch);
    row.leaves = Leaves(row.sequence, a.leaf_tokens);
  }
  uint32 before = counted.before;
  for (int batch = first_batch; batch < row.batch; batch++) before += leaves_of(arguments, batch);
  const uint32 pairs = a.kv_heads * a.row_tiles; // of a sequence
  *units = counted.all * pairs;
  row.first_unit =
      before * pairs + (row.head * a.row_tiles + row.row / COLUMNS) * row.leaves.count();
  return row;
}

// Bit i: a subtree begins at leaf first + i.
__device__ __forceinline__ uint32 begins_of(const nyb_decode_arguments &a, const Runs &runs,
                                            const Row &row, int64 first) {
  uint32 begins = 0;
  if (first >= row.leaves.end) return 0;
  const int last = min(static_cast<int>(first) + GROUP, row.leaves.end);
  int leaf = static_cast<int>(first) >> a.levels << a.levels, end = 0;
  while (leaf < last) {
    if (FEATURED && leaf >= row.leaves.keep && leaf < row.leaves.begin) {
      leaf = row.leaves.begin;
      continue;
    }
    if (leaf >= end) { // up to here, a block of threads has added neighbours
      const uint32 unit = row.first_unit + row.leaves.index_of(leaf);
      end = static_cast<int>(
          min(runs.end_at(unit) - unit + leaf, static_cast<uint32>(row.leaves.piece_end(leaf))));
    }
    if (leaf >= first) begins |= 1u << (leaf - static_cast<int>(first));
    leaf += 1 << subtree_level(leaf, end, a.levels);
  }
  return begins;
}

// The finished elements, and once lse. highest: the unit of `total` in log2.
__device__ __forceinline__ void store(const Arguments &arguments, const Row &row, float highest,
                                      Part total) {
  const nyb_decode_arguments &a = decode_of(arguments);
  const int64 query_head = static_cast<int64>(row.head) * a.heads_per_kv + row.row / a.query_len;
  const int64 query = row.row % a.query_len;
  char *out =
      a.out + row.batch * a.out_stride[0] + query_head * a.out_stride[1] + query * a.out_stride[2];
  // A row that sees tokens, but scores of -inf only, is 0/0.
#if FEATURED
  const nyb_attention_arguments &call = call_of(arguments);
  bool seen = !(total.sum == 0.0f), sink_alone = false;
  // What said that tokens were seen; a NaN stays one.
  if (highest == -infinity() && total.sum == total.sum) total.sum = 0.0f;
  const float sink = call.sinks != nullptr ? call.sinks[query_head] : -infinity();
  float own = sink * 1.44269504088896341f; // a token more, without a value
  constexpr float MOST = 3.40282347e38f; // of floats
  if (fabsf(sink) < infinity()) own = fminf(fmaxf(own, -MOST), MOST);
  const float both = highest > own ? highest : own; // or NaN, where the sink is
  if (call.sinks != nullptr && both != -infinity()) {
    const float keep = exp2f(highest - both);
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++) total.out[j] *= keep;
    total.sum = total.sum * keep + exp2f(own - both);
    highest = both;
    seen = seen || total.sum != 0.0f;
    sink_alone = keep == 0.0f && total.sum == 1.0f;
  }
#else
  const int length = row.sequence.length;
  const bool seen = (a.causal != 0 ? length - a.query_len + query + 1 : length) > 0;
  const bool sink_alone = false;
  const float sink = 0;
#endif
  uint32 words[ELEMENTS / 2];
#pragma unroll
  for (int j = 0; j < ELEMENTS; j += 2) {
    const float low = seen ? total.out[j] / total.sum : 0.0f;
    const float high = seen ? total.out[j + 1] / total.sum : 0.0f;
    words[j / 2] = a.out_type == F16 ? f16_from_f32(low) | f16_from_f32(high) << 16
                                     : bf16_from_f32(low) | bf16_from_f32(high) << 16;
  }
  uint16 *to = reinterpret_cast<uint16 *>(out) + row.part * ELEMENTS;
  if (reinterpret_cast<uint64>(to) % 8 == 0) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++) to[j] = static_cast<uint16>(words[j / 2] >> j % 2 * 16);
  }
  if (row.part == 0 && a.lse != nullptr) {
    float *lse = reinterpret_cast<float *>(a.lse + row.batch * a.lse_stride[0] +
                                           query_head * a.lse_stride[1] + query * a.lse_stride[2]);
    *lse = sink_alone ? sink
           : seen     ? (highest + log2f(total.sum)) * 0.693147180559945309f
                      : -infinity();
  }
}

// What the warps that share elements have summed, from left to right. For the whole block of
// threads; the first of those warps has the result.
__device__ __forceinline__ Part add_warps(const Place &place, const Part &own) {
  __shared__ Part of_warp[MAX_WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int index = lane % place.items, sharer = lane / place.items;
  __syncthreads(); // the round before has been read
  if (sharer == 0) of_warp[warp][index] = own;
  __syncthreads();
  const int each = (place.warps + place.sharers - 1) / place.sharers;
  Part total = {};
  if (place.warp == 0 && sharer * each < place.warps) {
    total = of_warp[warp + sharer * each][index];
    if (each == 2) total = total + of_warp[warp + sharer * each + 1][index];
  }
  for (int distance = place.items; distance < 32; distance *= 2)
    total = with_neighbour(total, distance);
  return total;
}
static_assert(MAX_WARPS <= 2 * WARP_GROUPS);

__device__ __forceinline__ float highest_of_warps(const Place &place, float own) {
  __shared__ float of_warp[MAX_WARPS][32];
  const int index = threadIdx.x % place.items, warp = threadIdx.x / 32;
  of_warp[warp][index] = own; // all that share it in a warp have the same
  __syncthreads();
  float highest = -infinity();
  for (int i = 0; i < place.warps; i++)
    highest = fmaxf(highest, of_warp[warp - place.warp + i][index]);
  return highest;
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32)
    attention_merge(const __grid_constant__ Arguments arguments) {
  const nyb_decode_arguments &a = decode_of(arguments);
  const int groups = a.merge_groups;
  const Place place(groups);
  uint32 units;
  const Row row = find_row(arguments, place.item, &units);
  const Runs runs(units, a.blocks);
  const int64 slot =
      ((static_cast<int64>(row.batch) * a.kv_heads + row.head) * a.row_tiles + row.row / COLUMNS) *
      a.capacity_leaves;
  const float *partials =
      a.partials + (slot * COLUMNS + row.row % COLUMNS) * VALUE_DIM + row.part * ELEMENTS;
  const float *statistics = a.statistics + slot * STATISTICS + row.row % COLUMNS;
  // All threads take as many rounds; one of a cache without room, too.
  const int rounds =
      max(static_cast<int>((a.capacity_leaves + groups * GROUP - 1) / (groups * GROUP)), 1);
  const auto first_of = [&](int round) {
    return (static_cast<int64>(round) * groups + place.group) * GROUP;
  };
  float4 values[GROUP];
  float maximum[GROUP], sum[GROUP];
  const auto load = [&](int round, uint32 begins) {
    const int64 first = first_of(round);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      maximum[i] = -infinity();
      sum[i] = 0;
      values[i] = make_float4(0, 0, 0, 0);
      if ((begins >> i & 1) != 0) {
        maximum[i] = statistics[(first + i) * STATISTICS];
        sum[i] = statistics[(first + i) * STATISTICS + COLUMNS];
        values[i] = *reinterpret_cast<const float4 *>(partials + (first + i) * COLUMNS * VALUE_DIM);
      }
    }
  };
  uint32 begins = begins_of(a, runs, row, first_of(rounds - 1));
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float highest = -infinity();
  for (int round = rounds - 1;; round--) { // ends with the first, whose values stay
    load(round, begins);
#pragma unroll
    for (int i = 0; i < GROUP; i++) highest = fmaxf(highest, maximum[i]);
    if (round == 0) break;
    begins = begins_of(a, runs, row, first_of(round - 1));
  }
  for (int distance = place.items; distance < 32; distance *= 2)
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
  if (place.warps > 1) highest = highest_of_warps(place, highest);

  // Subtrees of whole rounds wait here for their right neighbours.
  Part waiting[MAX_ROUND_LEVELS];
  Part total;
  for (int round = 0; round < rounds; round++) {
    if (round > 0) load(round, begins_of(a, runs, row, first_of(round)));
    Part parts[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const float factor = rescale_factor(maximum[i] - highest);
      parts[i] = {
          {values[i].x * factor, values[i].y * factor, values[i].z * factor, values[i].w * factor},
          sum[i] * factor};
    }
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2) {
#pragma unroll
      for (int i = 0; i < GROUP; i += 2 * step) parts[i] = parts[i] + parts[i + step];
    }
    total = parts[0];
    for (int distance = place.items; distance < 32; distance *= 2)
      total = with_neighbour(total, distance);
    if (place.warps > 1) total = add_warps(place, total);
    if (rounds > 1) {
      int level = 0;
      for (int done = round; (done & 1) != 0; done >>= 1) total = waiting[level++] + total;
      waiting[level] = total;
    }
  }
  if (place.group != 0 || !row.exists) return;
  if (rounds > 1) { // what is left, from the right
    const int lowest = __ffs(rounds) - 1;
    total = waiting[lowest];
    for (int level = lowest + 1; level < MAX_ROUND_LEVELS; level++) {
      if ((rounds >> level & 1) != 0) total = waiting[level] + total;
    }
  }
  store(arguments, row, highest, total);
}
