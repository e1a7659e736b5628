// SPDX-License-Identifier: Apache-2.0
// One leaf of tokens: scores, weights and the sums of values.
#pragma once

#include "attention_decode_queries.cuh"

// The groups that a warp's pieces lie in.
constexpr int GROUP_PIECES = PIECES / VALUE_GROUPS;
__device__ __forceinline__ int group_of_piece(int dim_warp, int piece) {
  return (dim_warp * WARP_PIECES + piece) / GROUP_PIECES;
}
__device__ __forceinline__ constexpr bool begins_group(int piece) {
  return piece == 0 || (GROUP_PIECES % WARP_PIECES != 0 &&
                        (WARP_PIECES % GROUP_PIECES != 0 || piece % GROUP_PIECES == 0));
}
constexpr bool ONE_GROUP = GROUP_PIECES % WARP_PIECES == 0;
// Where two warps share a tile, a warp sums the biases of its own elements' groups over all tokens;
// elsewhere, those of all groups over its own tokens.
constexpr int BIAS_GROUPS = WARP_PARTS == 1 ? VALUE_GROUPS
                            : ONE_GROUP     ? 1
                                            : WARP_PIECES / GROUP_PIECES;
static_assert(WARP_PARTS == 1 ||
              (TOKEN_WARPS == 1 && (ONE_GROUP || WARP_PIECES % GROUP_PIECES == 0)));

// Units of a group of keys, and those of head_dim that a warp reads.
constexpr int GROUP_UNITS = KEY_GROUP * KEY_BITS / 128;
constexpr int WARP_UNITS = WARP_PARTS == 1 ? Keys::UNITS : PART_GROUPS * GROUP_UNITS;

// Where in a stage this lane points ldmatrix to, and where its weights go and come from.
struct Addresses {
  Place<Keys> keys; // from a stage on
  Place<Values> values;
  uint32 store_weights, load_weights, key_scales, value_scales;
  uint32 fragments,
      parts;     // of two warps that share a tile: their part's queries, its scores' place
  uint32 grows; // where exponents are not held
  uint32 store_floats, load_floats, value_biases;
  int dim_warp;
  __device__ __forceinline__ void start(uint32 shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, matrix = lane >> 3, row = lane & 7;
    const int own_tile = tile_of_warp();
    dim_warp = warp % DIM_WARPS;
    // Two halves of the product's rows, of a unit and the next.
    int first_unit = (matrix & 1) * Keys::UNITS + (matrix >> 1);
    if constexpr (WARP_PARTS > 1) first_unit += lane_part() * NEXT_PART * GROUP_UNITS;
    keys.start(own_tile * OWN_BYTES, row, first_unit);
    const int first_half = warp / DIM_WARPS * VALUE_HALVES;
    const int tile = matrix / 2 / HALVES; // the second half may be the next warp's
    values.start((first_half / HALVES + tile) * OWN_BYTES + VALUES_AT, row,
                 (matrix - tile * 2) * Values::UNITS + dim_warp * WARP_PIECES);
    const uint32 weights = shared + WEIGHTS_AT + row % USED * WEIGHT_ROW_BYTES;
    // A row of 8 tokens each: a lane's token i comes from all 8 rows of lanes.
    if constexpr (WARP_PARTS > 1) { // all tiles of columns at once
      const int index = lane_part() * KEPT + matrix % KEPT;
      store_weights = weights + matrix / KEPT % N_TILES * 8 * WEIGHT_ROW_BYTES +
                      (own_tile * TILE + index * 8) * 2;
    } else {
      store_weights = weights + (warp * TILE + (row / USED * KEPT + matrix) * 8) * 2;
    }
    load_weights = weights + (first_half * 16 + matrix * 8) * 2 +
                   (ONE_GROUP ? group_of_piece(dim_warp, 0) * WEIGHT_GROUP_BYTES : 0);
    key_scales = own_tile * OWN_BYTES + key_scale_offset();
    value_scales = own_tile * OWN_VALUE_SCALE_BYTES + value_scale_offset();
    if constexpr (WARP_PARTS > 1) {
      fragments = shared + QUERIES_AT + lane_part() * NEXT_PART * GROUP_STEPS / 2 * N_TILES * 512;
      parts = shared + PARTS_AT + threadIdx.x * N_TILES * 8;
      grows = shared + GROWS_AT + warp * round_up(VALUE_GROUPS * 4, 16);
      const int lane_row = lane >> 2;
      load_floats =
          shared + FLOAT_WEIGHTS_AT + lane_row * FLOAT_ROW_BYTES + (lane & 3) * N_TILES * 8;
      store_floats = load_floats + (own_tile * LANE_TOKENS + lane_part()) * 8 * FLOAT_ROW_BYTES;
      value_biases = VALUE_SCALE_BYTES +
                     (lane_row * LANE_TOKENS * VALUE_GROUPS + group_of_piece(dim_warp, 0)) *
                         bytes_of(VALUE_SCALE_TYPE);
    }
    if constexpr (WARP_PARTS > 1 && BIAS_GROUPS == 1 && !ROUND_SCORES) { // registers are left
      hold(store_weights);
      hold(load_weights);
      hold(key_scales);
      hold(value_scales);
    }
    if constexpr (WARP_PARTS == 1 && N_TILES == 1 && SUMS <= 16) {
      hold(keys.base);
      hold(values.base);
      hold(store_weights);
      hold(load_weights);
      hold(key_scales);
      hold(value_scales);
    }
  }
};

// BOOLS, ADDED: elements of the mask's array for the lane's tokens and columns, as they lie in
// memory: neighbours in a word where they are narrow.
struct MaskWords {
  uint32 words[MASK_ROWS][KEPT];

  __device__ __forceinline__ const uint32 *of_column(int j) const {
    return words[ONE_MASK_ROW ? 0 : j];
  }
  __device__ __forceinline__ uint32 bool_of(int i, int j) const {
    return of_column(j)[0] >> 8 * i & 255;
  }
  // Whether any of them is 0.
  __device__ __forceinline__ bool any_false() const {
    constexpr uint32 ONES = KEPT == 1 ? 1 : KEPT == 2 ? 0x0101 : 0x01010101;
    uint32 zeros = 0; // its bytes' highest bits, where one is 0
#pragma unroll
    for (int j = 0; j < MASK_ROWS; j++) zeros |= (words[j][0] - ONES) & ~words[j][0];
    return (zeros & ONES << 7) != 0;
  }
  __device__ __forceinline__ float added_of(int i, int j) const {
    if constexpr (MASK_BYTES == 4) return __uint_as_float(of_column(j)[i]);
    const uint32 two = of_column(j)[i / 2];
    return i % 2 == 0 ? low_of<QUERY_TYPE>(two) : high_of<QUERY_TYPE>(two);
  }

  // Of tokens from `first` on. by_place: some may be past a row's end; those are shown, or get 0
  // added. Rows that are not in use read the tile's first one.
  __device__ __forceinline__ void load(const Queries &q, uint32 shared, int first, bool by_place) {
    constexpr int ALL = KEPT * MASK_BYTES, WORDS = (ALL + 3) / 4;
    constexpr uint32 NOTHING = BOOLS ? 0x01010101u : 0;
    const int64 begin = static_cast<int64>(first) * MASK_BYTES;
    const auto row_of = [&](int j) { return q.mask_rows[j] + begin; };
    if (!by_place && (q.mask_bits & (ALL - 1)) == 0) {
#pragma unroll
      for (int j = 0; j < MASK_ROWS; j++) load_neighbours<ALL>(words[j], row_of(j));
      return;
    }
#pragma unroll
    for (int j = 0; j < MASK_ROWS; j++) {
      int end = 0; // behind the last one that any of the columns needs
#pragma unroll
      for (int column = j; column < 2 * N_TILES; column += MASK_ROWS) {
        Sight row;
        row.load_span(shared, column_of(column));
        end = max(end, row.end == UNUSED_ROW ? 0 : row.end);
      }
      const char *from = row_of(j);
#pragma unroll
      for (int word = 0; word < WORDS; word++) words[j][word] = NOTHING;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        if (first + i < end) insert<MASK_BYTES>(words[j], i, from + i * MASK_BYTES);
      }
    }
  }
  template <int BYTES>
  static __device__ __forceinline__ void load_neighbours(uint32 *to, const char *from) {
    if constexpr (BYTES == 1) to[0] = *reinterpret_cast<const uint8 *>(from);
    if constexpr (BYTES == 2) to[0] = *reinterpret_cast<const uint16 *>(from);
    if constexpr (BYTES == 4) to[0] = *reinterpret_cast<const uint32 *>(from);
    if constexpr (BYTES == 8) {
      const uint2 two = *reinterpret_cast<const uint2 *>(from);
      to[0] = two.x;
      to[1] = two.y;
    }
    if constexpr (BYTES == 16) {
      const uint4 four = *reinterpret_cast<const uint4 *>(from);
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    }
  }
  template <int BYTES>
  static __device__ __forceinline__ void insert(uint32 *to, int i, const char *from) {
    const int shift = i * BYTES % 4 * 8;
    uint32 element;
    if constexpr (BYTES == 1) element = *reinterpret_cast<const uint8 *>(from);
    if constexpr (BYTES == 2) element = *reinterpret_cast<const uint16 *>(from);
    if constexpr (BYTES == 4) element = *reinterpret_cast<const uint32 *>(from);
    const uint32 bits = BYTES == 4 ? ~0u : (1u << (BYTES & 3) * 8) - 1;
    to[i * BYTES / 4] = (to[i * BYTES / 4] & ~(bits << shift)) | element << shift;
  }
};

// Sums are in units of 2^maximum, for each column: a bound on the scores so far, with room above so
// that it seldom has to be raised. Weights times V's scales are brought into the range of f16 by a
// power of two for each group, which follows the largest finite scale.
constexpr bool IN_LOG2 = ROUND_SCORES || CHANGED; // scores; else they come to it with their weights
constexpr float HEADROOM = 2; // log2 units
constexpr int VALUE_HEADROOM = 1;
constexpr int NO_VALUES = -120; // below every exponent
constexpr float SEEN = 1.17549435e-38f; // 2^-126: lost in every sum that has a weight of note
// FEATURES: whether something else is done where no token is hidden. Of few columns the tests cost
// less than a jump.
constexpr bool BRANCHES = N_TILES > 1;
struct Leaf {
  float out[SUMS][N_TILES][4];           // times 2^(value_exponent + 10 - position)
  float bias[BIAS_GROUPS][SETS][2 * N_TILES]; // this lane's part of the sum of weight * bias
  float maximum[2 * N_TILES];            // the block's
  float sum[SETS][2 * N_TILES];          // this lane's part
  // Of the largest scale of V so far, with room above; the block's. Where registers are few, in
  // shared memory, at `grows` of the warp: the bits of 2^(14 - exponent), which weigh() multiplies
  // scales with.
  int value_exponent[HOLD_EXPONENTS ? VALUE_GROUPS : 1];

  static __device__ __forceinline__ uint32 grow_bits(int exponent) {
    return static_cast<uint32>(14 + 127 - exponent) << 23;
  }
  __device__ __forceinline__ int exponent(int group, const Addresses &where) const {
    if constexpr (HOLD_EXPONENTS) return value_exponent[group];
    return 14 + 127 - static_cast<int>(load_word(where.grows + group * 4) >> 23);
  }
  // Where exponents are not held: of group `lane`.
  static __device__ __forceinline__ void store_exponent(int lane, int exponent,
                                                        const Addresses &where) {
    __syncwarp();
    if (lane < VALUE_GROUPS)
      store_float_shared(where.grows + lane * 4, __uint_as_float(grow_bits(exponent)));
    __syncwarp();
  }

  __device__ __forceinline__ void clear(const Addresses &where) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) out[i][n][j] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      maximum[j] = -infinity();
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        sum[set][j] = 0;
#pragma unroll
        for (int g = 0; g < BIAS_GROUPS; g++) bias[g][set][j] = 0;
      }
    }
    if constexpr (HOLD_EXPONENTS) {
#pragma unroll
      for (int g = 0; g < VALUE_GROUPS; g++) value_exponent[g] = NO_VALUES;
    } else {
      store_exponent(thread_here() & 31, NO_VALUES, where);
    }
  }

  // scores[i][n]: of the lane's token i, columns 2 * (lane % 4) and the next: its part of head_dim.
  __device__ __forceinline__ void score(float (*scores)[N_TILES][2], const Queries &q,
                                        const KeyScales &scales, const KeyScales &biases,
                                        uint32 stage, uint32 queries,
                                        const Addresses &where) const {
#pragma unroll
    for (int own = 0; own < LANE_PARTS; own++) { // parts that the lane sums one after the other
      float part_scores[LANE_TOKENS][N_TILES][2];
#pragma unroll
      for (int g = 0; g < PART_GROUPS; g++) {
        const int group = KEY_GROUPS == 1 ? 0 : own * PART_GROUPS + g;
        float products[HALVES][N_TILES][4];
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
          for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) products[h][n][j] = 0;
          }
        }
#pragma unroll
        for (int part = 0; part < SPLIT; part++) { // parts that columns share
          multiply_keys(products, ((own + part) * PART_GROUPS + g) * GROUP_STEPS, GROUP_STEPS, q,
                        stage, queries, where);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
          for (int n = 0; n < N_TILES; n++) {
            float query_sums[2];
            q.sums_of(query_sums, own * PART_GROUPS + g, n, queries);
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const int token = 2 * h + j / 2;
              float &score = part_scores[token][n][j % 2];
              const float bias_part = g == 0
                                          ? biases.at(token, group) * query_sums[j % 2]
                                          : fmaf(biases.at(token, group), query_sums[j % 2], score);
              score = fmaf(scales.at(token, group), products[h][n][j], bias_part);
              if (NEXT_PART < PART_GROUPS && g == 0 && lane_part() != 0) score = 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float &score = scores[i][n][j];
            score = own == 0 ? part_scores[i][n][j] : score + part_scores[i][n][j];
          }
        }
      }
    }
  }
  // Adds steps `first` to `first` + STEPS of head_dim.
  static __device__ __forceinline__ void multiply_keys(float (*products)[N_TILES][4], int first,
                                                       int count, const Queries &q, uint32 stage,
                                                       uint32 queries, const Addresses &where) {
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
    uint32 words[HALVES][4], fragment[N_TILES][4];
#pragma unroll
    for (int step = first; step < first + count; step++) {
      if (step % 2 == 0 || step == first) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          if (n == 0 && step / 2 < HELD_PAIRS) {
#pragma unroll
            for (int i = 0; i < 4; i++) fragment[n][i] = q.fragment_of(step, i);
          } else {
            load_words<16>(fragment[n], Queries::fragment_address(
                                            WARP_PARTS > 1 ? where.fragments : queries, step, n));
          }
        }
      }
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        uint32 a[4];
        if constexpr (Keys::BY_UNITS) {
          constexpr int STEPS = 8 / KEY_BITS; // of a unit
          const int unit = step / STEPS, within = step % STEPS;
          if ((within == 0 && unit % 2 == 0) || step == first) {
            const uint32 address = stage + where.keys.at(h * 2 * Keys::UNITS + unit / 2 * 2);
            if (unit / 2 * 2 + 1 < WARP_UNITS) {
              load_matrices_4(words[h], address);
            } else {
              load_matrices_2(words[h], address);
            }
          }
          const uint32 *pair = words[h] + unit % 2 * 2;
          a[0] = unit_field<KEY_BITS>(pair[0], 2 * within);
          a[1] = unit_field<KEY_BITS>(pair[1], 2 * within);
          a[2] = unit_field<KEY_BITS>(pair[0], 2 * within + 1);
          a[3] = unit_field<KEY_BITS>(pair[1], 2 * within + 1);
        } else {
          constexpr int STEPS = KEY_LANE_DIMS / 4, HALF = KEY_LANE_DIMS / 2;
          constexpr int RUN_BITS = KEY_LANE_DIMS * KEY_BITS;
          constexpr int RUN_WORDS = (RUN_BITS + 31) / 32;
          uint32 run[2][RUN_WORDS];
          const int within = step % STEPS;
          const int bit = step * 16 / KEY_GROUP * KEY_GROUP * KEY_BITS + c * RUN_BITS;
          uint32 own = stage + tile_of_warp() * OWN_BYTES;
          if constexpr (WARP_PARTS > 1) own += lane_part() * NEXT_PART * KEY_GROUP * KEY_BITS / 8;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            load_run<RUN_BITS, RUN_BITS % 32 == 0>(run[i],
                                                   own + token_of_row(h, r + 8 * i) * KEY_ROW, bit);
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int low = (within * 2 + i / 2) * KEY_BITS;
            a[i] = run_field<KEY_BITS>(run[i % 2], low, run[i % 2], low + HALF * KEY_BITS);
          }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          multiply_add(products[h][n], a, fragment[n] + step % 2 * 2);
      }
    }
  }
  // The sums over all parts of head_dim, of the tokens that the lane keeps.
  static __device__ __forceinline__ void add_parts(float (*kept)[N_TILES][2],
                                                   const float (*scores)[N_TILES][2]) {
    if constexpr (SHARES == 1) {
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          kept[i][n][0] = scores[i][n][0];
          kept[i][n][1] = scores[i][n][1];
        }
      }
      return;
    }
    // A lane and its partner exchange the tokens that the other keeps.
    const bool upper = (threadIdx.x & 2) != 0;
#pragma unroll
    for (int i = 0; i < KEPT && SPLIT == 2; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float own = upper ? scores[KEPT + i][0][j] : scores[i][0][j];
        const float other = upper ? scores[i][0][j] : scores[KEPT + i][0][j];
        kept[i][0][j] = own + __shfl_xor_sync(~0u, other, 2);
      }
    }
  }

  // The highest of the lane's scores, for each column, in log2 units.
  static __device__ __forceinline__ void highest_of(float *highest,
                                                    const float (*scores)[N_TILES][2],
                                                    const Queries &q, uint32 shared) {
    float unit[2 * N_TILES];
    if constexpr (!IN_LOG2) q.load_units(unit, shared);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      highest[j] = scores[0][j / 2][j % 2];
#pragma unroll
      for (int i = 1; i < KEPT; i++) highest[j] = fmaxf(highest[j], scores[i][j / 2][j % 2]);
      if constexpr (!IN_LOG2) highest[j] *= unit[j];
    }
  }
  // unseen: bit i, that none of the lane's rows sees token i.
  static __device__ __forceinline__ void largest_scales(float *largest, const ValueScales &scales,
                                                        uint32 unseen) {
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      largest[g] = 0;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float scale = fabsf(scales.at(i, g));
        if (!HIDING || (unseen >> i & 1) == 0) largest[g] = fmaxf(largest[g], scale);
      }
    }
  }
  __device__ __forceinline__ bool is_higher(const float (*scores)[N_TILES][2], const Queries &q,
                                            const ValueScales &scales, uint32 unseen,
                                            uint32 shared) const {
    float highest[2 * N_TILES], largest[VALUE_GROUPS];
    highest_of(highest, scores, q, shared);
    bool higher = false;
    if constexpr (HOLD_EXPONENTS) {
      largest_scales(largest, scales, unseen);
#pragma unroll
      for (int g = 0; g < VALUE_GROUPS; g++)
        higher = higher || largest[g] >= power_of_two(value_exponent[g] + 1);
    }
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) higher = higher || highest[j] > maximum[j];
    return higher;
  }

  // Floats as integers in the same order; 0 is below all.
  static __device__ __forceinline__ uint32 to_ordered(float value) {
    const int bits = __float_as_int(value);
    return static_cast<uint32>(bits < 0 ? ~bits : bits | static_cast<int>(0x80000000));
  }
  static __device__ __forceinline__ float from_ordered(uint32 word) {
    const int bits = static_cast<int>(word);
    return __int_as_float(bits < 0 ? bits & 0x7fffffff : ~bits);
  }
  static __device__ __forceinline__ void raise_word(uint32 address, uint32 word) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  }
  static __device__ __forceinline__ void clear_raised(uint32 shared, int buffer) {
    if (threadIdx.x < RAISED_WORDS) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + RAISED_AT + buffer * RAISED_BYTES +
                                                   threadIdx.x * 4),
                   "r"(0)
                   : "memory");
    }
  }
  // The block's maxima, for two warps that share a tile: of columns; of V's finite scales, where a
  // warp looks at all tokens of its groups.
  static __device__ __forceinline__ void tell_highest(const float *highest, uint32 scales_at,
                                                      uint32 raised) {
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, warp = thread >> 5;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      float top = highest[j];
#pragma unroll
      for (int distance = NEXT_ROW; distance < 32; distance *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
      if (lane < NEXT_ROW) raise_word(raised + (j / 2 * 8 + 2 * c + j % 2) * 4, to_ordered(top));
    }
#pragma unroll
    for (int first = 0; first < VALUE_GROUPS; first += WARPS) {
      const int group = first + warp;
      if (VALUE_GROUPS % WARPS != 0 && group >= VALUE_GROUPS) break;
      float largest = 0;
#pragma unroll
      for (int i = 0; i < STEP; i += 32) {
        const int token = i + lane;
        PerGroup<VALUE_SCALE_TYPE, 1, 1, VALUE_GROUPS> scales;
        scales.load(scales_at + token / TILE * OWN_VALUE_SCALE_BYTES +
                    (token % TILE * VALUE_GROUPS + group) * bytes_of(VALUE_SCALE_TYPE));
        const float scale = fabsf(scales.at(0, 0));
        largest = fmaxf(largest, scale == infinity() ? 0.0f : scale);
      }
      const uint32 word = __reduce_max_sync(~0u, to_ordered(largest));
      if (lane == 0)
        store_float_shared(raised + (COLUMNS + group) * 4, __uint_as_float(word));
    }
  }

  // Moves maxima (whole log2 units) and the exponents of V's scales up to this step's. A barrier.
  // raised_buffer: RAISED_BUFFERS' turn.
  __device__ __forceinline__ void raise(const float (*scores)[N_TILES][2], const Queries &q,
                                        uint32 scales_at, uint32 unseen, uint32 shared,
                                        const Addresses &where, int &raised_buffer) {
    float highest[2 * N_TILES];
    highest_of(highest, scores, q, shared);
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, warp = thread >> 5;
    const uint32 raised =
        shared + RAISED_AT + (RAISED_BUFFERS > 1 ? raised_buffer * RAISED_BYTES : 0);
    if constexpr (RAISED_BUFFERS > 1) {
      tell_highest(highest, scales_at, raised);
    } else {
      ValueScales scales;
      scales.load(scales_at + where.value_scales);
      float largest_scale[VALUE_GROUPS];
      largest_scales(largest_scale, scales, unseen);
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        float top = highest[j];
#pragma unroll
        for (int distance = NEXT_ROW; distance < 32; distance *= 2)
          top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        if (lane < NEXT_ROW) {
          store_float_shared(raised + (warp * RAISED_WORDS + j / 2 * 8 + 2 * c + j % 2) * 4, top);
        }
      }
#pragma unroll
      for (int g = 0; g < VALUE_GROUPS; g++) {
        float largest =
            largest_scale[g] == infinity() ? largest_finite(scales, g, unseen) : largest_scale[g];
        // Lanes beside each other have other rows, which may see other tokens.
#pragma unroll
        for (int distance = HIDING ? 1 : NEXT_ROW; distance < 32; distance *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane == 0)
          store_float_shared(raised + (warp * RAISED_WORDS + COLUMNS + g) * 4, largest);
      }
    }
    synchronize_warps();
    const bool first = exponent(0, where) == NO_VALUES; // nothing to rescale
    if constexpr (RAISED_BUFFERS > 1) {                  // the other was read before the barrier
      raised_buffer ^= 1;
      clear_raised(shared, raised_buffer);
    }
    const auto largest_of_block = [&](int word) {
      if constexpr (RAISED_BUFFERS > 1) return from_ordered(load_word(raised + word * 4));
      float largest = load_float_shared(raised + word * 4);
#pragma unroll
      for (int w = 1; w < WARPS; w++)
        largest = fmaxf(largest, load_float_shared(raised + (w * RAISED_WORDS + word) * 4));
      return largest;
    };
    // Where exponents are not held, a lane takes a group.
    constexpr int LANE_EXPONENTS = HOLD_EXPONENTS ? VALUE_GROUPS : 1;
    float value_factor[LANE_EXPONENTS];
#pragma unroll
    for (int g = 0; g < LANE_EXPONENTS; g++) {
      const int group = HOLD_EXPONENTS ? g : min(lane, VALUE_GROUPS - 1);
      const int highest = max(exponent_of(largest_of_block(COLUMNS + group)), -100);
      const int before = exponent(group, where);
      const int after = highest > before ? min(highest + VALUE_HEADROOM, 127) : before;
      value_factor[g] = rescale_factor(static_cast<float>(before - after));
      if constexpr (HOLD_EXPONENTS) {
        value_exponent[g] = after;
      } else {
        store_exponent(lane, after, where);
      }
    }
    const auto factor_of_piece = [&](int piece) {
      const int group = group_of_piece(where.dim_warp, piece);
      if constexpr (HOLD_EXPONENTS) return of_group(value_factor, group);
      return __shfl_sync(~0u, value_factor[0], group);
    };
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      float top = largest_of_block(j / 2 * 8 + 2 * c % USED + j % 2);
      top = top <= maximum[j] ? maximum[j] : ceilf(top) + HEADROOM;
      const float before = maximum[j];
      maximum[j] = top;
      if (first) continue;
      const float factor = before == top ? 1.0f : rescale_factor(before - top);
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        sum[set][j] *= factor;
#pragma unroll
        for (int g = 0; g < BIAS_GROUPS; g++) bias[g][set][j] *= factor;
      }
#pragma unroll
      for (int piece = 0; piece < WARP_PIECES; piece++) {
        const float out_factor = factor * factor_of_piece(piece);
#pragma unroll
        for (int i = piece * PIECE_SUMS; i < (piece + 1) * PIECE_SUMS; i++) {
          out[i][j / 2][j % 2] *= out_factor;
          out[i][j / 2][2 + j % 2] *= out_factor;
        }
      }
    }
  }
  // An element by an index that only the running kernel knows.
  template <class T>
  static __device__ __forceinline__ T of_group(const T *values, int group) {
    T value = values[0];
#pragma unroll
    for (int g = 1; g < VALUE_GROUPS; g++) value = group == g ? values[g] : value;
    return value;
  }

  // Weights times V's scales of a group. A scale that a row may not see may be NaN.
  template <class SEEN_BY>
  static __device__ __forceinline__ void scale_weights(uint32 (*words)[KEPT],
                                                       const float (*weights)[N_TILES][2],
                                                       const ValueScales &scales, int g, float grow,
                                                       const SEEN_BY &seen_by) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const float scale = scales.at(i, g) * grow;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        float scaled[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          scaled[j] = weights[i][n][j] * scale;
          if (!seen_by.shows(i, 2 * n + j)) scaled[j] = 0.0f;
        }
        words[n][i] = pack_f16(scaled[0], scaled[1]);
      }
    }
  }
  // The weights of the lane's tokens; those times V's scales go to the block. first: the first
  // token. Whether a scale was too large (only where exponents are not held: is_higher looks
  // otherwise).
  template <bool MASKED>
  __device__ __forceinline__ bool weigh(float (*weights)[N_TILES][2],
                                        const float (*scores)[N_TILES][2], const Queries &q,
                                        uint32 scales_at, uint32 shared, uint32 weights_at,
                                        int first, Hidden hidden, bool hides,
                                        const Addresses &where) const {
    float unit[2 * N_TILES];
    if constexpr (!IN_LOG2) q.load_units(unit, shared);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const float base = maximum[j] == -infinity() ? 0.0f : maximum[j];
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float score = scores[i][j / 2][j % 2];
        weights[i][j / 2][j % 2] =
            exp2_fast(IN_LOG2 ? score - base : fmaf(score, unit[j], -base));
      }
    }
    if constexpr (WARP_PARTS > 1)
      store_words<N_TILES * 2>(where.store_floats + weights_at, weights[0][0]);
    int visible[2 * N_TILES];
    if constexpr (MASKED && !FEATURES) Queries::load_visible(visible, shared);
    ValueScales scales;
    scales.load(scales_at + where.value_scales);
    uint32 grows[VALUE_GROUPS];
    if constexpr (!HOLD_EXPONENTS) load_words<VALUE_GROUPS * 4>(grows, where.grows);
    float largest = 0;
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      const float grow =
          HOLD_EXPONENTS ? power_of_two(14 - value_exponent[g]) : __uint_as_float(grows[g]);
      uint32 words[N_TILES][KEPT];
      if constexpr (!HOLD_EXPONENTS) {
#pragma unroll
        for (int i = 0; i < KEPT; i++) largest = fmaxf(largest, fabsf(scales.at(i, g) * grow));
      }
      if constexpr (!MASKED) {
        scale_weights(words, weights, scales, g, grow, SeenWhole());
      } else if constexpr (!FEATURES) {
        scale_weights(words, weights, scales, g, grow, SeenUntil(visible, first));
      } else if (BRANCHES && !hides) {
        scale_weights(words, weights, scales, g, grow, SeenWhole());
      } else {
        scale_weights(words, weights, scales, g, grow, SeenBut(hidden));
      }
      const uint32 to = where.store_weights + weights_at + g * WEIGHT_GROUP_BYTES;
      if constexpr (WARP_PARTS > 1) {
        store_transposed<N_TILES * KEPT>(to, words[0]);
      } else {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          store_transposed<KEPT>(to + n * 8 * WEIGHT_ROW_BYTES, words[n]);
      }
    }
    return largest >= power_of_two(15);
  }

  // Adds the lane's weights, and their products with V's biases.
  template <bool MASKED>
  __device__ __forceinline__ void add_weights(const float (*weights)[N_TILES][2], uint32 scales_at,
                                              uint32 shared, int first, Hidden hidden, bool hides,
                                              const Addresses &where) {
    ValueScales biases;
    biases.load(scales_at + where.value_scales + VALUE_SCALE_BYTES);
    int visible[2 * N_TILES];
    if constexpr (MASKED && !FEATURES) Queries::load_visible(visible, shared);
    if constexpr (!MASKED) {
      add_weights_of(weights, biases, SeenWhole());
    } else if constexpr (!FEATURES) {
      add_weights_of(weights, biases, SeenUntil(visible, first));
    } else if (BRANCHES && !hides) {
      add_weights_of(weights, biases, SeenWhole());
    } else {
      add_weights_of(weights, biases, SeenBut(hidden));
    }
  }
  template <class SEEN_BY>
  __device__ __forceinline__ void add_weights_of(const float (*weights)[N_TILES][2],
                                                 const ValueScales &biases,
                                                 const SEEN_BY &seen_by) {
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float weight = weights[i][j / 2][j % 2];
        const bool seen = seen_by.shows(i, j);
        // That a token has been seen shows where its score is -inf, too: once for a set.
        bool marked = HIDING && i % SET_TOKENS == 0;
        if constexpr (HIDING && !SEEN_BY::ALL) marked = marked && seen_by.shows_some_from(i, j);
        sum[i / SET_TOKENS][j] += marked ? weight + SEEN : weight;
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++) {
          float &column_bias = bias[g][i / SET_TOKENS][j];
          column_bias = seen ? fmaf(weight, biases.at(i, g), column_bias) : column_bias;
        }
      }
    }
  }

  // The same of all the step's tokens, from `first` on: the weights, and their products with the
  // biases of the warp's groups.
  template <bool MASKED>
  __device__ __forceinline__ void add_float_weights(uint32 scales_at, uint32 weights_at,
                                                    uint32 shared, int first,
                                                    const Addresses &where) {
    int visible[2 * N_TILES];
    if constexpr (MASKED) Queries::load_visible(visible, shared);
#pragma unroll
    for (int i = 0; i < STEP / 8; i++) { // a token of each row of lanes
      uint32 words[2 * N_TILES];
      load_words<N_TILES * 8>(words, where.load_floats + weights_at + i * 8 * FLOAT_ROW_BYTES);
      PerGroup<VALUE_SCALE_TYPE, 1, BIAS_GROUPS, VALUE_GROUPS> biases;
      biases.load(scales_at + where.value_biases + i / LANE_TOKENS * OWN_VALUE_SCALE_BYTES +
                  i % LANE_TOKENS * VALUE_GROUPS * bytes_of(VALUE_SCALE_TYPE));
      const int token = first + i / LANE_TOKENS * TILE + lane_row_token() + i % LANE_TOKENS;
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        const float weight = __uint_as_float(words[j]);
        sum[0][j] += weight;
        const bool seen = !MASKED || token < visible[j];
#pragma unroll
        for (int g = 0; g < BIAS_GROUPS; g++)
          bias[g][0][j] = seen ? fmaf(weight, biases.at(0, g), bias[g][0][j]) : bias[g][0][j];
      }
    }
  }

  // Adds the step's values to this warp's part of the output.
  __device__ __forceinline__ void add_values(uint32 stage, uint32 weights_at,
                                             const Addresses &where) {
    constexpr int BATCH = VALUE_HALVES % 2 == 0 ? 2 : 1; // halves at once
#pragma unroll
    for (int first = 0; first < VALUE_HALVES; first += BATCH) {
      uint32 weights[N_TILES][4];
#pragma unroll
      for (int piece = 0; piece < WARP_PIECES; piece++) {
        if (begins_group(piece)) {
          const uint32 from =
              where.load_weights + weights_at + first * 32 +
              (ONE_GROUP ? 0 : group_of_piece(where.dim_warp, piece) * WEIGHT_GROUP_BYTES);
#pragma unroll
          for (int n = 0; n < N_TILES; n++) {
            const uint32 row = from + n * 8 * WEIGHT_ROW_BYTES;
            if constexpr (BATCH == 2) {
              load_matrices_4(weights[n], row);
            } else {
              load_matrices_2(weights[n], row);
            }
          }
        }
        uint32 words[4];
        if constexpr (Values::BY_UNITS) {
          static_assert(BATCH == 2 || HALVES == 1);
          const uint32 address = stage + where.values.at(piece) + first / HALVES * OWN_BYTES;
          if constexpr (BATCH == 2) {
            load_transposed_4(words, address);
          } else {
            load_transposed_2(words, address);
          }
        }
#pragma unroll
        for (int h = 0; h < BATCH; h++) {
          constexpr int RUN_BITS = PIECE_LANE_DIMS * VALUE_BITS, RUN_WORDS = (RUN_BITS + 31) / 32;
          uint32 run[4][RUN_WORDS];
          if constexpr (!Values::BY_UNITS) load_runs(run, stage, first + h, piece, where);
#pragma unroll
          for (int i = 0; i < PIECE_SUMS; i++) {
            uint32 a[4];
            if constexpr (Values::BY_UNITS) {
              const uint32 *pair = words + h * 2;
              a[0] = unit_field<VALUE_BITS>(pair[0], 2 * i);
              a[1] = unit_field<VALUE_BITS>(pair[0], 2 * i + 1);
              a[2] = unit_field<VALUE_BITS>(pair[1], 2 * i);
              a[3] = unit_field<VALUE_BITS>(pair[1], 2 * i + 1);
            } else {
#pragma unroll
              for (int j = 0; j < 4; j++) {
                const int bit = (2 * i + j % 2) * VALUE_BITS;
                a[j] = run_field<VALUE_BITS>(run[j / 2 * 2], bit, run[j / 2 * 2 + 1], bit);
              }
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
              multiply_add(out[piece * PIECE_SUMS + i][n], a, weights[n] + 2 * h);
          }
        }
      }
    }
  }
  template <int RUN_WORDS>
  static __device__ __forceinline__ void load_runs(uint32 (*run)[RUN_WORDS], uint32 stage, int half,
                                                   int piece, const Addresses &where) {
    constexpr int RUN_BITS = PIECE_LANE_DIMS * VALUE_BITS;
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
    const int index = where.dim_warp * WARP_PIECES + piece;
    const int bit = (index / SPAN_PARTS * VALUE_SPAN + index % SPAN_PARTS * PIECE_LANE_DIMS +
                     r * VALUE_LANE_DIMS) *
                    VALUE_BITS;
    const int at = (threadIdx.x >> 5) / DIM_WARPS * VALUE_HALVES + half;
    const uint32 tile = stage + VALUES_AT + at / HALVES * OWN_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = token_of_row(at % HALVES, 2 * c + i % 2 + i / 2 * 8);
      load_run<RUN_BITS, RUN_BITS % 32 == 0>(run[i], tile + token * VALUE_ROW, bit);
    }
  }

  // A score of -inf would weigh nothing, but is NaN where a key's scale or bias is not finite.
  static __device__ __forceinline__ bool may_be_minus_infinity(const float (*scores)[N_TILES][2]) {
    float lowest = scores[0][0][0];
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
        lowest = fminf(lowest, fminf(scores[i][n][0], scores[i][n][1]));
    }
    return lowest == -infinity();
  }
  static __device__ __forceinline__ bool may_be_infinite(const float (*scores)[N_TILES][2]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
        largest = fmaxf(largest, fmaxf(fabsf(scores[i][n][0]), fabsf(scores[i][n][1])));
    }
    return largest == infinity();
  }
  static __device__ __forceinline__ void poison(float (*scores)[N_TILES][2],
                                                const KeyScales &scales, const KeyScales &biases) {
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
      float nothing = 0; // or NaN
#pragma unroll
      for (int g = 0; g < LANE_GROUPS; g++)
        nothing = fmaf(scales.at(i, g), 0.0f, fmaf(biases.at(i, g), 0.0f, nothing));
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        scores[i][n][0] += nothing;
        scores[i][n][1] += nothing;
      }
    }
  }
  static __device__ __forceinline__ float largest_finite(const ValueScales &scales, int group,
                                                         uint32 unseen) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      if (HIDING && (unseen >> i & 1) != 0) continue;
      const float scale = fabsf(scales.at(i, group));
      largest = fmaxf(largest, scale == infinity() ? 0.0f : scale);
    }
    return largest;
  }

  // ---- FEATURES
  // Products to scores, where they are more.
  static __device__ __forceinline__ void change_scores(float (*scores)[N_TILES][2], Hidden &hidden,
                                                       const MaskWords &mask, const Queries &q,
                                                       uint32 shared, int first) {
    if constexpr (!ROUND_SCORES && !CHANGED) return;
    nyb_attention_arguments call; // what the functions below look at, as far as it is constant
    call.round_to = ROUND_SCORES ? QUERY_TYPE : F32;
    if constexpr (CAPPED) call.softcap = q.call->softcap;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        float &score = scores[i][j / 2][j % 2];
        score *= q.held_unit[j];
        if constexpr (ROUND_SCORES) {
          score = round_to<QUERY_TYPE>(score);
          if constexpr (CAPPED)
            score = nyb_capped_score(&call, __fmul_rn(score, q.call->softcap_reciprocal));
        }
      }
    }
    if constexpr (CAPPED && !ROUND_SCORES) {
      const float cap = ONLY_CAPPED ? __fmul_rn(call.softcap, LOG2_E) : call.softcap;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
#pragma unroll
        for (int j = 0; j < 2 * N_TILES; j++)
          scores[i][j / 2][j % 2] = capped(scores[i][j / 2][j % 2], cap);
      }
      if constexpr (ONLY_CAPPED) return;
    }
    if constexpr (SLOPED) add_slopes(scores, call, shared, first);
    if constexpr (ADDED) {
      add_mask(scores, hidden, mask);
      return;
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++)
        scores[i][j / 2][j % 2] = __fmul_rn(scores[i][j / 2][j % 2], LOG2_E);
    }
  }
  // cap * tanh(a), of 2 * a * log2(e).
  static __device__ __forceinline__ float capped(float share, float cap) {
    return fmaf(reciprocal_fast(1.0f + exp2_fast(share)), -2.0f * cap, cap);
  }
  static __device__ __forceinline__ void add_slopes(float (*scores)[N_TILES][2],
                                                    const nyb_attention_arguments &call,
                                                    uint32 shared, int first) {
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      Sight row;
      row.load_span(shared, column_of(j));
      row.load_slope(shared, column_of(j));
      // The way back to the lane's first token, as a float, is exact: so are its neighbours'.
      const int past =
          static_cast<int>(static_cast<uint32>(row.position) - static_cast<uint32>(first));
      const bool exact = past >= KEPT && past < 1 << 24;
      const float distance = static_cast<float>(past);
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        float &score = scores[i][j / 2][j % 2];
        score = exact ? nyb_score_at(&call, score, row.slope, distance - i)
                      : nyb_sloped_score(&call, score, row.slope, row.position, first + i);
      }
    }
  }
  static __device__ __forceinline__ void hide_one(float (*scores)[N_TILES][2], Hidden &hidden,
                                                  int i, int j) {
    scores[i][j / 2][j % 2] = -infinity();
    hidden |= 1u << (2 * N_TILES * i + j);
  }
  // To log2 units, with what the array adds.
  static __device__ __forceinline__ void add_mask(float (*scores)[N_TILES][2], Hidden &hidden,
                                                  const MaskWords &mask) {
    constexpr bool ROUNDS = ROUND_SCORES && MASK_BYTES == 2; // sums with f32 stay f32
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        float &score = scores[i][j / 2][j % 2];
        const float added = mask.added_of(i, j);
        score = __fadd_rn(score, added);
        if constexpr (ROUNDS) score = round_to<QUERY_TYPE>(score);
        score = log2_units_of(score);
        if (added == -infinity()) hide_one(scores, hidden, i, j);
      }
    }
  }
  // -inf where a row does not see a token.
  static __device__ __forceinline__ void hide_by_array(float (*scores)[N_TILES][2], Hidden &hidden,
                                                       const MaskWords &mask) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        if (mask.bool_of(i, j) == 0) hide_one(scores, hidden, i, j);
      }
    }
  }
  static __device__ __forceinline__ void hide_by_place(float (*scores)[N_TILES][2], Hidden &hidden,
                                                       uint32 shared, int first) {
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      Sight row;
      row.load_span(shared, column_of(j));
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        if (!row.shows(first + i)) hide_one(scores, hidden, i, j);
      }
    }
  }
  // Bit i: none of the lane's rows sees token i.
  static __device__ __forceinline__ uint32 unseen_of(Hidden hidden, const Queries &q) {
    constexpr uint32 ALL = (1u << 2 * N_TILES) - 1;
    uint32 unseen = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const uint32 blind = hidden >> (2 * N_TILES * i) | q.unused;
      if ((blind & ALL) == ALL) unseen |= 1u << i;
    }
    return unseen;
  }

  // A part of the scores of the lane's tokens.
  template <bool MASKED>
  __device__ __forceinline__ void score_parts(float (*parts)[N_TILES][2], const Queries &q,
                                              uint32 stage, uint32 shared,
                                              const Addresses &where) const {
    KeyScales scales, biases;
    scales.load(stage + where.key_scales + KEY_SCALES_AT);
    biases.load(stage + where.key_scales + KEY_BIASES_AT);
    score(parts, q, scales, biases, stage, shared + QUERIES_AT, where);
    // A softcap would make a number of any infinite score.
    const bool poisons = FEATURES ? may_be_infinite(parts) : MASKED || may_be_minus_infinity(parts);
    if (poisons) poison(parts, scales, biases);
  }
  // The scores of the tokens that the lane keeps, from the sums of their parts.
  template <bool MASKED>
  static __device__ __forceinline__ void finish_scores(float (*scores)[N_TILES][2],
                                                       const Queries &q, uint32 shared, int first) {
    int visible[2 * N_TILES];
    if constexpr (MASKED) Queries::load_visible(visible, shared);
    float unit[2 * N_TILES];
    if constexpr (ROUND_SCORES) q.load_units(unit, shared);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) {
        float &score = scores[i][j / 2][j % 2];
        if constexpr (ROUND_SCORES) {
          score = __fmul_rn(round_to<QUERY_TYPE>(score * unit[j]), 1.44269504088896341f);
        }
        if constexpr (MASKED) {
          if (first + i >= visible[j]) score = -infinity();
        }
      }
    }
  }
  // by_place: FEATURES, that some row may not see all of the step by its place; hides: whether a
  // token is hidden from any of the warp's rows.
  template <bool MASKED>
  __device__ __forceinline__ void score_tile(float (*scores)[N_TILES][2], Hidden &hidden,
                                             bool &hides, uint32 &unseen, const MaskWords &mask,
                                             const Queries &q, uint32 stage, uint32 shared,
                                             int first, bool by_place,
                                             const Addresses &where) const {
    float parts[LANE_TOKENS][N_TILES][2];
    score_parts<MASKED>(parts, q, stage, shared, where);
    add_parts(scores, parts);
    if constexpr (FEATURES) {
      hidden = unseen = 0;
      change_scores(scores, hidden, mask, q, shared, first);
      const bool some_by_place = MASKED && by_place;
      hides = some_by_place;
      if constexpr (BOOLS || ADDED) {
        const bool may_hide = some_by_place || hidden != 0 || (BOOLS && mask.any_false());
        hides = __any_sync(~0u, may_hide) != 0;
      }
      if (hides) {
        if constexpr (BOOLS) hide_by_array(scores, hidden, mask);
        if (some_by_place) hide_by_place(scores, hidden, shared, first);
        if constexpr (HIDING) unseen = unseen_of(hidden, q);
      }
      return;
    }
    finish_scores<MASKED>(scores, q, shared, first);
  }
  // Two warps that share a tile: the token that the other keeps goes to it, that of the lane stays.
  template <bool MASKED>
  __device__ __forceinline__ void score_part(float (*scores)[N_TILES][2], const Queries &q,
                                             uint32 stage, uint32 shared,
                                             const Addresses &where) const {
    static_assert(WARP_PARTS == 1 || (LANE_TOKENS == 2 && KEPT == 1));
    float parts[LANE_TOKENS][N_TILES][2];
    score_parts<MASKED>(parts, q, stage, shared, where);
    const bool second = lane_part() != 0;
    float others[N_TILES][2];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        scores[0][n][j] = second ? parts[1][n][j] : parts[0][n][j];
        others[n][j] = second ? parts[0][n][j] : parts[1][n][j];
      }
    }
    store_words<N_TILES * 2>(where.parts, others[0]);
  }
  template <bool MASKED>
  static __device__ __forceinline__ void add_other_part(float (*scores)[N_TILES][2],
                                                        const Queries &q, uint32 shared, int first,
                                                        const Addresses &where) {
    asm volatile("bar.sync %0, 64;" ::"r"(3 + tile_of_warp()) : "memory");
    constexpr int BYTES = TILES * 32 * N_TILES * 8;
    uint32 words[N_TILES * 2];
    load_words<N_TILES * 8>(words, lane_part() != 0 ? where.parts - BYTES : where.parts + BYTES);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) scores[0][n][j] += __uint_as_float(words[n * 2 + j]);
    }
    finish_scores<MASKED>(scores, q, shared, first);
  }
};

// A step of tokens, between its scores and its values.
struct Step {
  uint32 stage, scales_at; // where its copies are
  uint32 weights_at;       // 0 or WEIGHT_STEP_BYTES
  int first;                // the lane's first token; the step's where two warps share a tile
  bool by_place;            // FEATURES: some row may not see all of it where it stands
  Hidden hidden;            // from which rows
  bool hides;               // from any of the warp's
  uint32 unseen;            // bit i: from all of the lane's
  MaskWords mask;           // BOOLS, ADDED
  float scores[KEPT][N_TILES][2], weights[KEPT][N_TILES][2]; // of the tokens that the lane keeps

  __device__ __forceinline__ int first_of_lane() const {
    return WARP_PARTS == 1 ? first : first + tile_of_warp() * TILE + lane_token();
  }
  template <bool MASKED>
  __device__ __forceinline__ void score(const Leaf &leaf, const Queries &q, uint32 shared,
                                        const Addresses &where) {
    leaf.score_tile<MASKED>(scores, hidden, hides, unseen, mask, q, stage, shared, first_of_lane(),
                            by_place, where);
  }
  // The same in two, of two warps that share a tile.
  template <bool MASKED>
  __device__ __forceinline__ void score_part(const Leaf &leaf, const Queries &q, uint32 shared,
                                             const Addresses &where) {
    leaf.score_part<MASKED>(scores, q, stage, shared, where);
  }
  template <bool MASKED>
  __device__ __forceinline__ void add_other_part(const Queries &q, uint32 shared,
                                                 const Addresses &where) {
    Leaf::add_other_part<MASKED>(scores, q, shared, first_of_lane(), where);
  }
  template <bool MASKED>
  __device__ __forceinline__ bool weigh(const Leaf &leaf, const Queries &q, uint32 shared,
                                        const Addresses &where) {
    return leaf.weigh<MASKED>(weights, scores, q, scales_at, shared, weights_at, first_of_lane(),
                              hidden, hides, where);
  }
  template <bool MASKED>
  __device__ __forceinline__ void add_to(Leaf &leaf, uint32 shared, const Addresses &where) const {
    if constexpr (WARP_PARTS > 1) {
      leaf.add_float_weights<MASKED>(scales_at, weights_at, shared, first, where);
    } else {
      leaf.add_weights<MASKED>(weights, scales_at, shared, first, hidden, hides, where);
    }
    leaf.add_values(stage, weights_at, where);
  }
  __device__ __forceinline__ bool raises(const Leaf &leaf, const Queries &q, uint32 shared,
                                         const Addresses &where) const {
    ValueScales scales;
    if constexpr (HOLD_EXPONENTS) scales.load(scales_at + where.value_scales);
    return leaf.is_higher(scores, q, scales, unseen, shared);
  }
};
