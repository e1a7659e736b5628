// SPDX-License-Identifier: Apache-2.0
// Leaves added to the subtrees that attention_merge reads.
#pragma once

#include "attention_decode_leaf.cuh"

// A warp holds its elements of a subtree's sums as the products leave them: columns 2 * (lane % 4)
// and the next, the pieces' elements of row lane / 4.
struct Subtree {
  float out[SUMS][N_TILES][4];
  float maximum[2 * N_TILES], sum[2 * N_TILES];
};

struct Combiner {
  uint32 shared;
  int rows;     // of this tile of query rows
  uint32 valid; // bit i: a subtree of 2^i leaves waits for its right neighbour

  // Lanes of columns that no query row uses keep nothing.
  static constexpr int COLUMN_LANES = ROWS <= 2 ? 1 : ROWS <= 4 ? 2 : 4;
  static constexpr int KEEPERS = DIM_WARPS * 8 * COLUMN_LANES; // threads
  static constexpr int CHUNKS = SUMS * N_TILES + N_TILES;      // of 16 bytes, of a thread
  static constexpr int EXCHANGE_BYTES = (TOKEN_WARPS - 1) * DIM_WARPS * 32 * SUMS * N_TILES * 16;
  static constexpr int WAITING_AT = EXCHANGE_AT + EXCHANGE_BYTES;
  static constexpr int SHARED_BYTES =
      WAITING_AT + LEVELS * (WARP_PARTS > 1 ? WARPS * 4 * N_TILES : KEEPERS * CHUNKS) * 16;

  __device__ __forceinline__ static bool keeps() {
    return (threadIdx.x & 3) < COLUMN_LANES && (TOKEN_WARPS == 1 || threadIdx.x < DIM_WARPS * 32);
  }

  // The leaf as a subtree. A barrier.
  __device__ __forceinline__ void take_leaf(Subtree &tree, const Leaf &leaf,
                                            const Addresses &where) const {
    const int dim_warp = where.dim_warp;
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, warp = thread >> 5;
    const uint32 sums = shared + SUMS_AT;
    // Over the rows of lanes: where two warps share a tile, a warp has all tokens of its groups.
    const auto of_lanes = [&](const float *own, float *sum) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        sum[j] = own[j];
#pragma unroll
        for (int distance = NEXT_ROW; distance < 32; distance *= 2)
          sum[j] += __shfl_xor_sync(~0u, sum[j], distance);
      }
    };
    if constexpr (WARP_PARTS == 1) {
#pragma unroll
      for (int g = 0; g <= VALUE_GROUPS; g++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          float pair[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const auto of_set = [&](int set) {
              return g < VALUE_GROUPS ? leaf.bias[g][set][2 * n + j] : leaf.sum[set][2 * n + j];
            };
            pair[j] = SETS == 1 ? of_set(0) : of_set(0) + of_set(SETS - 1);
#pragma unroll
            for (int distance = NEXT_ROW; distance < 32; distance *= 2)
              pair[j] += __shfl_xor_sync(~0u, pair[j], distance);
          }
          if (lane < NEXT_ROW) {
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(
                             sums + (warp * SUMS_WORDS + g * COLUMNS + n * 8 + 2 * c) * 4),
                         "f"(pair[0]), "f"(pair[1])
                         : "memory");
          }
        }
      }
      if constexpr (TOKEN_WARPS > 1) {
        if (warp >= DIM_WARPS) {
#pragma unroll
          for (int i = 0; i < SUMS * N_TILES; i++) {
            store_floats_4(
                shared + EXCHANGE_AT + ((warp - DIM_WARPS) * SUMS * N_TILES + i) * 512 + lane * 16,
                leaf.out[i / N_TILES][i % N_TILES]);
          }
        }
      }
      synchronize_warps();
    }
    const auto total = [&](float *pair, int row, int n) {
      float parts[WARPS][2];
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(parts[w][0]), "=f"(parts[w][1])
                     : "r"(sums + (w * SUMS_WORDS + row * COLUMNS + n * 8 + 2 * c % USED) * 4));
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        pair[j] = (parts[0][j] + parts[1][j]) + (parts[2][j] + parts[3][j]);
    };
    if constexpr (WARP_PARTS > 1) {
      of_lanes(leaf.sum[0], tree.sum);
    } else {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) total(tree.sum + 2 * n, VALUE_GROUPS, n);
    }
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) tree.maximum[j] = leaf.maximum[j];
    float bias[2 * N_TILES], unit = 0;
#pragma unroll
    for (int piece = 0; piece < WARP_PIECES; piece++) {
      if (begins_group(piece)) {
        const int group = group_of_piece(dim_warp, piece);
        const int exponent = HOLD_EXPONENTS ? Leaf::of_group(leaf.value_exponent, group)
                                            : leaf.exponent(group, where);
        unit = power_of_two(max(exponent, -100));
        if constexpr (WARP_PARTS > 1) {
          of_lanes(leaf.bias[ONE_GROUP ? 0 : piece / GROUP_PIECES][0], bias);
        } else {
#pragma unroll
          for (int n = 0; n < N_TILES; n++) total(bias + 2 * n, group, n);
        }
      }
#pragma unroll
      for (int i = 0; i < PIECE_SUMS; i++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          float parts[4];
#pragma unroll
          for (int k = 0; k < 4; k++) parts[k] = leaf.out[piece * PIECE_SUMS + i][n][k];
          if constexpr (TOKEN_WARPS > 1) {
#pragma unroll
            for (int other = 0; other < TOKEN_WARPS - 1; other++) {
              if (warp >= DIM_WARPS) break;
              float more[4];
              load_floats_4(
                  more,
                  shared + EXCHANGE_AT +
                      (((other * DIM_WARPS + warp) * SUMS + piece * PIECE_SUMS + i) * N_TILES + n) *
                          512 +
                      lane * 16);
#pragma unroll
              for (int k = 0; k < 4; k++) parts[k] += more[k];
            }
          }
#pragma unroll
          for (int k = 0; k < 4; k++) {
            // In two steps: the product of both powers may leave the range of f32.
            tree.out[piece * PIECE_SUMS + i][n][k] =
                fmaf(parts[k] * power_of_two(10 - value_position(2 * i + k / 2)), unit,
                     bias[2 * n + k % 2]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ uint32 waiting(int level, int chunk) const {
    const int lane = threadIdx.x & 31;
    const int keeper = ((threadIdx.x >> 5) * 8 + (lane >> 2)) * COLUMN_LANES + (lane & 3);
    return shared + WAITING_AT + ((level * CHUNKS + chunk) * KEEPERS + keeper) * 16;
  }
  // A thread reads only what it wrote itself.
  __device__ __forceinline__ void keep(const Subtree &tree, int level, float *room) {
    valid |= 1u << level;
    if constexpr (WARP_PARTS > 1) {
      keep_in_workspace(tree, level, room);
      return;
    }
    if (!keeps()) return;
#pragma unroll
    for (int i = 0; i < SUMS * N_TILES; i++)
      store_floats_4(waiting(level, i), tree.out[i / N_TILES][i % N_TILES]);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const float statistics[4] = {tree.maximum[2 * n], tree.maximum[2 * n + 1], tree.sum[2 * n],
                                   tree.sum[2 * n + 1]};
      store_floats_4(waiting(level, SUMS * N_TILES + n), statistics);
    }
  }
  __device__ __forceinline__ void take(Subtree &tree, int level, const float *room) const {
    if constexpr (WARP_PARTS > 1) {
      take_from_workspace(tree, level, room);
      return;
    }
    if (!keeps()) return;
#pragma unroll
    for (int i = 0; i < SUMS * N_TILES; i++)
      load_floats_4(tree.out[i / N_TILES][i % N_TILES], waiting(level, i));
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float statistics[4];
      load_floats_4(statistics, waiting(level, SUMS * N_TILES + n));
      tree.maximum[2 * n] = statistics[0];
      tree.maximum[2 * n + 1] = statistics[1];
      tree.sum[2 * n] = statistics[2];
      tree.sum[2 * n + 1] = statistics[3];
    }
  }

  // Sums in the workspace, where the subtree's first leaf has its room; maxima and sums of weights,
  // which all rows of a warp's lanes have, in shared memory. keep_in_workspace and
  // take_from_workspace do not order the block's threads: write() follows behind a barrier.
  __device__ __forceinline__ uint32 waiting_statistics(int level, int n) const {
    const uint32 thread = thread_here();
    return shared + WAITING_AT +
           (((level * WARPS + (thread >> 5)) * N_TILES + n) * 4 + (thread & 3)) * 16;
  }
  __device__ __forceinline__ void keep_in_workspace(const Subtree &tree, int level,
                                                    float *room) const {
    const uint32 thread = thread_here();
    float4 *to = reinterpret_cast<float4 *>(room) + thread;
#pragma unroll
    for (int i = 0; i < SUMS * N_TILES; i++) {
      const float *sums = tree.out[i / N_TILES][i % N_TILES];
      to[i * WARPS * 32] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    if ((thread & 31) < 4) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        const float statistics[4] = {tree.maximum[2 * n], tree.maximum[2 * n + 1], tree.sum[2 * n],
                                     tree.sum[2 * n + 1]};
        store_floats_4(waiting_statistics(level, n), statistics);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void take_from_workspace(Subtree &tree, int level,
                                                      const float *room) const {
    const float4 *from = reinterpret_cast<const float4 *>(room) + thread_here();
#pragma unroll
    for (int i = 0; i < SUMS * N_TILES; i++) {
      const float4 sums = from[i * WARPS * 32];
      float *to = tree.out[i / N_TILES][i % N_TILES];
      to[0] = sums.x;
      to[1] = sums.y;
      to[2] = sums.z;
      to[3] = sums.w;
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float statistics[4];
      load_floats_4(statistics, waiting_statistics(level, n));
      tree.maximum[2 * n] = statistics[0];
      tree.maximum[2 * n + 1] = statistics[1];
      tree.sum[2 * n] = statistics[2];
      tree.sum[2 * n + 1] = statistics[3];
    }
    __syncwarp(); // before the room is used again
  }
  static __device__ __forceinline__ float *room_of(const nyb_decode_arguments &a, int64 pair,
                                                   int leaf) {
    return a.partials + (pair * a.capacity_leaves + leaf) * COLUMNS * VALUE_DIM;
  }
  // right becomes left + right.
  __device__ __forceinline__ void join(const Subtree &left, Subtree &right) const {
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const JoinFactors factors(left.maximum[j], right.maximum[j]);
      right.sum[j] = factors.join(left.sum[j], right.sum[j]);
      right.maximum[j] = factors.maximum;
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
#pragma unroll
        for (int k = j % 2; k < 4; k += 2)
          right.out[i][j / 2][k] = factors.join(left.out[i][j / 2][k], right.out[i][j / 2][k]);
      }
    }
  }
  // To the workspace, as the subtree that begins with `leaf`.
  __device__ __forceinline__ void write(const Subtree &tree, const nyb_decode_arguments &a,
                                        int64 pair, int leaf) const {
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, r = lane >> 2;
    const int warp = thread >> 5;
    const int64 slot = pair * a.capacity_leaves + leaf;
    float *partials = a.partials + slot * COLUMNS * VALUE_DIM;
    float *statistics = a.statistics + slot * NYB_DECODE_STATISTICS(COLUMNS);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const int column = j / 2 * 8 + 2 * c + j % 2;
      if (column >= rows || warp >= DIM_WARPS) continue;
      if (r == 0 && warp == 0) {
        statistics[column] = tree.maximum[j];
        statistics[COLUMNS + column] = tree.sum[j];
      }
#pragma unroll
      for (int piece = 0; piece < WARP_PIECES; piece++) {
        const int index = warp * WARP_PIECES + piece;
        float *to = partials + column * VALUE_DIM + index / SPAN_PARTS * VALUE_SPAN +
                    index % SPAN_PARTS * PIECE_LANE_DIMS + r * VALUE_LANE_DIMS;
        const float(*sums)[N_TILES][4] = tree.out + piece * PIECE_SUMS;
#pragma unroll
        for (int i = 0; i < PIECE_SUMS; i += 2) {
          if (i + 1 < PIECE_SUMS) {
            *reinterpret_cast<float4 *>(to + 2 * i) =
                make_float4(sums[i][j / 2][j % 2], sums[i][j / 2][2 + j % 2],
                            sums[i + 1][j / 2][j % 2], sums[i + 1][j / 2][2 + j % 2]);
          } else {
            *reinterpret_cast<float2 *>(to + 2 * i) =
                make_float2(sums[i][j / 2][j % 2], sums[i][j / 2][2 + j % 2]);
          }
        }
      }
    }
  }

  // Takes the finished leaf `leaf` of a pair; last: this run ends with it, or the pair does.
  __device__ __forceinline__ void add_leaf(Subtree &tree, const nyb_decode_arguments &a, int64 pair,
                                           int leaf, bool last) {
    int level = 0;
    while (level < LEVELS && (leaf >> level & 1) != 0 && (valid >> level & 1) != 0) {
      Subtree left = tree; // where nothing is kept
      take(left, level, room_of(a, pair, (leaf >> level << level) - (1 << level)));
      join(left, tree);
      valid &= ~(1u << level);
      level++;
    }
    const bool is_left = level < LEVELS && (leaf >> level & 1) == 0;
    if (is_left && !last) {
      keep(tree, level, room_of(a, pair, leaf >> level << level));
      return;
    }
    if constexpr (WARP_PARTS > 1) synchronize_warps(); // what waited there has been taken
    write(tree, a, pair, leaf >> level << level);
    if (!last) return;
    while (valid != 0) { // each begins right before what has been written
      const int left_level = __ffs(valid) - 1;
      leaf = (leaf >> level << level) - 1;
      level = left_level;
      take(tree, level, room_of(a, pair, leaf >> level << level));
      if constexpr (WARP_PARTS > 1) synchronize_warps();
      write(tree, a, pair, leaf >> level << level);
      valid &= valid - 1;
    }
  }
};
static_assert(Combiner::SHARED_BYTES == NYB_DECODE_SHARED_BYTES(KEY_DIM, VALUE_DIM, KEY_BITS,
                                                                VALUE_BITS, KEY_GROUP, VALUE_GROUP,
                                                                bytes_of(KEY_SCALE_TYPE),
                                                                bytes_of(VALUE_SCALE_TYPE), TILE,
                                                                STAGES, COLUMNS, ROWS, FEATURES));
