// SPDX-License-Identifier: Apache-2.0
// The subtrees of blocks of tokens that attention_decode left, added along the binary tree over their
// positions.
//
// Four elements of an output row take a thread for each GROUP neighbouring blocks, up to
// arguments.merge_groups of them at once; more blocks come in rounds.
//
// Parameters (-D): VALUE_DIM, COLUMNS (of the workspace, as in attention_decode).
#include "attention_decode.cuh"

#if !defined(VALUE_DIM) || !defined(COLUMNS)
#error "a parameter of attention_merge is missing"
#endif

constexpr int THREADS = NYB_MERGE_THREADS, GROUP = 1 << NYB_DECODE_LEVELS;
constexpr int QUADS = VALUE_DIM / 4, STATISTICS = NYB_DECODE_STATISTICS(COLUMNS);
constexpr int MAX_ROUND_LEVELS = 24;

using Part = SubtreePart;

__device__ __forceinline__ Part operator+(const Part &x, const Part &y) {
  return {make_float4(x.out.x + y.out.x, x.out.y + y.out.y, x.out.z + y.out.z, x.out.w + y.out.w),
          x.sum + y.sum};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const __grid_constant__ nyb_decode_arguments a) {
  __shared__ Part shared_parts[THREADS];
  __shared__ float shared_maxima[THREADS];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int groups = a.merge_groups, items = THREADS / groups; // powers of two
  const int item = threadIdx.x % items, group = threadIdx.x / items;
  const int rows = a.heads_per_kv * a.query_len;
  const int64 index = static_cast<int64>(blockIdx.x) * items + item;
  const int quad = static_cast<int>(index % QUADS);
  const int row = static_cast<int>(index / QUADS % rows);
  const int64 pair = index / QUADS / rows;
  const bool exists = pair < static_cast<int64>(a.batch) * a.kv_heads;
  const int64 batch = exists ? pair / a.kv_heads : 0, head = exists ? pair % a.kv_heads : 0;
  const int64 slot = ((batch * a.kv_heads + head) * a.row_tiles + row / COLUMNS) * a.capacity_blocks;
  const float *partials = a.partials + (slot * COLUMNS + row % COLUMNS) * VALUE_DIM + quad * 4;
  const float *maxima = a.statistics + slot * STATISTICS + row % COLUMNS;
  const float *begins = a.statistics + slot * STATISTICS + 2 * COLUMNS;
  // All threads take as many rounds.
  const int rounds =
      static_cast<int>((a.capacity_blocks + groups * GROUP - 1) / (groups * GROUP));
  float4 values[GROUP];
  float maximum[GROUP], sum[GROUP];
  const int length = min(max(a.lengths[batch], 0), static_cast<int>(a.capacity_tokens));
  const int blocks = exists ? (length + NYB_DECODE_BLOCK_TOKENS - 1) / NYB_DECODE_BLOCK_TOKENS : 0;
  const auto load = [&](int round) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int64 block = (static_cast<int64>(round) * groups + group) * GROUP + i;
      maximum[i] = -infinity();
      sum[i] = 0;
      values[i] = make_float4(0, 0, 0, 0);
      if (block >= blocks || __float_as_int(begins[block * STATISTICS]) == 0) continue;
      maximum[i] = maxima[block * STATISTICS];
      sum[i] = maxima[block * STATISTICS + COLUMNS];
      values[i] = *reinterpret_cast<const float4 *>(partials + block * COLUMNS * VALUE_DIM);
    }
  };
  float highest = -infinity();
  for (int round = rounds - 1; round >= 0; round--) { // ends with the first, whose values stay
    load(round);
#pragma unroll
    for (int i = 0; i < GROUP; i++) highest = fmaxf(highest, maximum[i]);
  }
  shared_maxima[threadIdx.x] = highest;
  __syncthreads();
  for (int other = 0; other < groups; other++)
    highest = fmaxf(highest, shared_maxima[other * items + item]);

  // Subtrees of whole rounds wait here for their right neighbours.
  Part waiting[MAX_ROUND_LEVELS];
  Part total;
  for (int round = 0; round < rounds; round++) {
    if (round > 0) load(round);
    Part parts[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const float factor = rescale_factor(maximum[i] - highest);
      parts[i] = {make_float4(values[i].x * factor, values[i].y * factor, values[i].z * factor,
                              values[i].w * factor),
                  sum[i] * factor};
    }
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2) {
#pragma unroll
      for (int i = 0; i < GROUP; i += 2 * step) parts[i] = parts[i] + parts[i + step];
    }
    total = parts[0];
    for (int step = 1; step < groups; step *= 2) {
      __syncthreads();
      if (group % (2 * step) == step) shared_parts[threadIdx.x] = total;
      __syncthreads();
      if (group % (2 * step) == 0) total = total + shared_parts[threadIdx.x + step * items];
    }
    if (rounds > 1 && group == 0) {
      int level = 0;
      for (int done = round; (done & 1) != 0; done >>= 1) total = waiting[level++] + total;
      waiting[level] = total;
    }
  }
  if (group != 0 || !exists) return;
  if (rounds > 1) { // what is left, from the right
    const int lowest = __ffs(rounds) - 1;
    total = waiting[lowest];
    for (int level = lowest + 1; level < MAX_ROUND_LEVELS; level++) {
      if ((rounds >> level & 1) != 0) total = waiting[level] + total;
    }
  }
  store_row(a, static_cast<int>(batch), static_cast<int>(head), row, quad, highest, total);
}
