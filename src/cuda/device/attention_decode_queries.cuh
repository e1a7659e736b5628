// SPDX-License-Identifier: Apache-2.0
// Query rows: what each sees of the tokens, and their elements as the products take them.
#pragma once

#include "attention_decode_copies.cuh"

// The lane's column j.
__device__ __forceinline__ int column_of(int j) {
  return j / 2 * 8 + 2 * (threadIdx.x & 3) % USED + j % 2;
}

// ---- What a query row sees ----------------------------------------------------------------------

// Whether scores are more than products: those come to natural units first, or to what capped()
// takes. Where scores are not rounded, a softcap comes with all scales in one factor, and is mostly
// all that is done.
constexpr bool CHANGED = CAPPED || SLOPED || ADDED;
constexpr bool ONLY_CAPPED = CAPPED && !SLOPED && !ADDED;
constexpr bool ONE_MASK_ROW = (FEATURES & NYB_DECODE_ONE_MASK_ROW) != 0;
constexpr int MASK_ROWS = ONE_MASK_ROW ? 1 : 2 * N_TILES;
// Of an element of the mask's array.
constexpr int MASK_BYTES = !ADDED ? 1 : (FEATURES & NYB_DECODE_ADDED_F32) != 0 ? 4 : 2;

constexpr int UNUSED_ROW = 0x7fffffff; // where such a one's sight ends
// Whether a row of the tile has to be known with more than where its sight ends.
constexpr int SIGHT_WORDS = NYB_DECODE_SIGHT_WORDS(FEATURES);
constexpr bool WIDE_SIGHT = SIGHT_WORDS > 1;
struct Sight {
  int end, begin, keep_end; // sees [begin, end), and before keep_end
  int position;
  float slope;
  int64 mask_offset; // to its row of the mask's array

  // nyb_row_sight_of() and nyb_position_of(). row: of the tile's KV head, or -1: one that is not in
  // use, and sees all.
  __device__ __forceinline__ void find(const Arguments &arguments, const Position &at, int row,
                                       int first_head) {
    const nyb_decode_arguments &a = decode_of(arguments);
    const nyb_decode_features &call = features_of(arguments);
    const int used = max(row, 0), head = a.query_len == 1 ? used : used / a.query_len;
    const int query_row = used - head * a.query_len;
    bool all = a.causal == 0;
    position = at.length - a.query_len + query_row;
#if FEATURES & NYB_DECODE_SIGHT
    all = call.mask == NYB_DEVICE_MASK_NONE;
    if (call.mask == NYB_DEVICE_MASK_TOP_LEFT) position = query_row - at.start;
#endif
    end = all ? at.length : max(min(position + 1, at.length), 0);
    begin = keep_end = 0;
#if FEATURES & NYB_DECODE_SIGHT
    const int window = call.window_tokens;
    if (window != 0 && position >= window) begin = min(position - window + 1, end);
    keep_end = min(call.window_keep_tokens, end);
    if (begin <= keep_end) begin = keep_end = 0;
#endif
    if (row < 0) {
      end = keep_end = UNUSED_ROW;
      begin = 0;
    }
    if constexpr (SLOPED) slope = call.slopes[first_head + head];
    mask_offset = 0;
    if constexpr (BOOLS || ADDED) {
      mask_offset = at.batch * call.mask_stride[0] + (first_head + head) * call.mask_stride[1] +
                    query_row * call.mask_stride[2];
#if FEATURES & NYB_DECODE_SIGHT
      mask_offset += static_cast<int64>(at.start) * MASK_BYTES;
#endif
    }
  }
  // Of a column: four words of where it sees, and four of what becomes of its scores.
  static __device__ __forceinline__ uint32 words_of(uint32 shared, int column) {
    return shared + VISIBLE_AT + column * 4 * SIGHT_WORDS;
  }
  __device__ __forceinline__ void store(uint32 shared, int column) const {
    if constexpr (!WIDE_SIGHT) {
      store_float_shared(words_of(shared, column), __int_as_float(end));
      return;
    }
    const float words[8] = {__int_as_float(end),
                            __int_as_float(begin),
                            __int_as_float(keep_end),
                            __int_as_float(position),
                            SLOPED ? slope : 0.0f,
                            0.0f,
                            __uint_as_float(static_cast<uint32>(mask_offset)),
                            __uint_as_float(static_cast<uint32>(mask_offset >> 32))};
    store_floats_4(words_of(shared, column), words);
    if constexpr (SLOPED || BOOLS || ADDED)
      store_floats_4(words_of(shared, column) + 16, words + 4);
  }
  __device__ __forceinline__ void load_span(uint32 shared, int column) {
    if constexpr (!WIDE_SIGHT) {
      end = static_cast<int>(load_word(words_of(shared, column)));
      begin = keep_end = 0;
      return;
    }
    uint32 words[4];
    load_words<16>(words, words_of(shared, column));
    end = static_cast<int>(words[0]);
    begin = static_cast<int>(words[1]);
    keep_end = static_cast<int>(words[2]);
    position = static_cast<int>(words[3]);
  }
  __device__ __forceinline__ void load_slope(uint32 shared, int column) {
    slope = load_float_shared(words_of(shared, column) + 16);
  }
  static __device__ __forceinline__ int64 mask_offset_of(uint32 shared, int column) {
    uint32 words[2];
    load_words<8>(words, words_of(shared, column) + 24);
    return static_cast<int64>(static_cast<uint64>(words[1]) << 32 | words[0]);
  }
  __device__ __forceinline__ bool shows(int token) const {
    if constexpr (!SIGHT) return token < end;
    return token < end && (token < keep_end || token >= begin);
  }
};

// Which of its tokens a lane's columns see, token i and column j: all; those before a token; all
// but some, which have bit 2 * N_TILES * i + j.
using Hidden = uint32;
struct SeenWhole {
  static constexpr bool ALL = true;
  __device__ __forceinline__ bool shows(int, int) const { return true; }
};
struct SeenUntil {
  static constexpr bool ALL = false;
  const int *visible;
  int first;               // the lane's first token
  __device__ __forceinline__ SeenUntil(const int *ends, int token) : visible(ends), first(token) {}
  __device__ __forceinline__ bool shows(int i, int j) const { return first + i < visible[j]; }
};
struct SeenBut {
  static constexpr bool ALL = false;
  Hidden hidden;
  __device__ __forceinline__ explicit SeenBut(Hidden bits) : hidden(bits) {}
  __device__ __forceinline__ bool shows(int i, int j) const {
    return (hidden >> (2 * N_TILES * i + j) & 1) == 0;
  }
  // Of the SET_TOKENS tokens from i on.
  __device__ __forceinline__ bool shows_some_from(int i, int j) const {
    Hidden set = 0;
#pragma unroll
    for (int k = 0; k < SET_TOKENS; k++) set |= 1u << (2 * N_TILES * (i + k) + j);
    return (hidden & set) != set;
  }
};

// ---- The query rows of a pair -------------------------------------------------------------------

// The elements that a lane holds come in runs of so many neighbours.
constexpr int QUERY_RUN = Keys::BY_UNITS ? 32 / KEY_BITS : KEY_LANE_DIMS;

// Where two warps share a tile, registers are left for the N side of some pairs of a part's steps,
// of the first tile of columns: reading it is a good part of all that is read of shared memory.
constexpr int PART_PAIRS = PART_GROUPS * GROUP_STEPS / 2;
constexpr int HELD_PAIRS = WARP_PARTS == 1                            ? 0
                           : N_TILES == 1                             ? PART_PAIRS
                           : KEY_DIM > 512 || ROUND_SCORES || !PACKED ? 2
                           : KEY_BITS == 8                            ? 3
                                                                      : 4;

struct Queries {
  const nyb_decode_features *call; // FEATURES
  // Of columns 2 * (lane % 4) and the next.
  float sum[HOLD_SUMS ? LANE_SUMS : 1][2 * N_TILES]; // of a group of the lane's parts, in the
                                                      // products' unit
  float held_unit[HOLD_UNITS ? 2 * N_TILES : 1];      // products' unit times this: log2 units
                                                  // (ROUND_SCORES, CHANGED: natural ones)
  uint32 fragments[HELD_PAIRS > 0 ? HELD_PAIRS : 1][4];
  int visible_to_all; // [0, this), of SIGHT only what is behind begin_of_all or before
                       // keep_of_all
  int begin_of_all, keep_of_all;
  uint32 unused; // HIDING: bit j, that no query row is in the lane's column j
  const char *mask_rows[MASK_ROWS]; // of the lane's columns
  uint32 mask_bits; // of addresses of the mask's rows, those that any has

  // The N side of two steps: words for step `step` (even) and the next, for each tile of columns.
  static __device__ __forceinline__ uint32 fragment_address(uint32 queries, int step, int n) {
    return queries + (((step / 2) * N_TILES + n) * 32 + (threadIdx.x & 31)) * 16;
  }

  __device__ __forceinline__ void hold_fragments(uint32 part_queries) {
#pragma unroll
    for (int pair = 0; pair < HELD_PAIRS; pair++)
      load_words<16>(fragments[pair], fragment_address(part_queries, 2 * pair, 0));
  }
  __device__ __forceinline__ uint32 fragment_of(int step, int word) const {
    return fragments[HELD_PAIRS > 0 ? step / 2 : 0][word];
  }

  // The block's warps bring a share of the steps each to f16. Ends with a barrier.
  __device__ __forceinline__ void load(const Arguments &arguments, const Position &at,
                                       uint32 shared) {
    const nyb_decode_arguments &a = decode_of(arguments);
    constexpr int SHARE = (KEY_STEPS + 2 * WARPS - 1) / (2 * WARPS); // pairs of steps of a warp
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, warp = thread >> 5;
    const uint32 queries = shared + QUERIES_AT;
    const uint32 maxima = shared + QUERY_SCRATCH_AT, poisons = maxima + WARPS * COLUMNS * 4;
    const uint32 step_sums = poisons + WARPS * COLUMNS * 4;
    // Divisions only where there is something to divide: they take long when nothing else is to do.
    const int head = Problem{&arguments, &a}.head_of(at);
    const int first_row = (at.pair - head * a.row_tiles) * COLUMNS;
    const auto head_of_row = [&](int row) { return a.query_len == 1 ? row : row / a.query_len; };
    const int rows = a.heads_per_kv * a.query_len;
    const float scale = ROUND_SCORES ? round_to<QUERY_TYPE>(a.scale) : a.scale;
    // Steps 2 * (warp + i * WARPS) and the next; slots 0 and 2, then 1 and 3.
    uint32 words[N_TILES][SHARE][2][2];
    const auto step_of = [&](int i, int t) { return 2 * (warp + i * WARPS) + t; };
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + (n * 8 + (lane >> 2)) % USED;
      const int row_head = head_of_row(row), query_head = head * a.heads_per_kv + row_head;
      const char *q = a.q + at.batch * a.q_stride[0] + query_head * a.q_stride[1] +
                      (row - row_head * a.query_len) * a.q_stride[2];
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
          for (int slot = 0; slot < 2; slot++) {
            const int index = key_lane_element(step_of(i, t), slot);
            const char *from =
                q + (index / QUERY_RUN * QUERY_RUN * 4 + c * QUERY_RUN + index % QUERY_RUN) * 2;
            uint32 &word = words[n][i][t][slot];
            word = 0;
            if (row >= rows || step_of(i, t) >= KEY_STEPS) continue;
            if constexpr (PACKED) {
              word = *reinterpret_cast<const uint32 *>(from);
            } else {
              word = reinterpret_cast<const uint16 *>(from)[0] |
                     static_cast<uint32>(reinterpret_cast<const uint16 *>(from)[1]) << 16;
            }
          }
        }
      }
    }
#if FEATURES
    Sight sights[N_TILES]; // looked for while the elements come
    unused = mask_bits = 0;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + (n * 8 + (lane >> 2)) % USED;
      sights[n].find(arguments, at, row < rows ? row : -1, head * a.heads_per_kv);
#pragma unroll
      for (int j = 0; j < 2 && HIDING; j++)
        unused |= first_row + n * 8 + 2 * c % USED + j < rows ? 0u : 1u << (2 * n + j);
      if constexpr (BOOLS || ADDED) {
        mask_rows[0] = call->mask_array + sights[n].mask_offset;
        const uint32 own_bits = static_cast<uint32>(reinterpret_cast<uint64>(mask_rows[0]) & 15);
        mask_bits |= ONE_MASK_ROW ? own_bits : __reduce_or_sync(~0u, own_bits);
      }
    }
#endif
    const auto element = [&](int n, int i, int t, int slot) {
      const uint32 word = words[n][i][t][slot % 2];
      const float value = slot < 2 ? low_of<QUERY_TYPE>(word) : high_of<QUERY_TYPE>(word);
      if constexpr (ROUND_SCORES) return round_to<QUERY_TYPE>(value * scale);
      return a.scale < 0 ? -value : value;
    };
    // A row is brought to below 2^15, by a power of two, so that f16 holds it.
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float largest = 0, poison = 0; // 0, or NaN where an element is not finite
#pragma unroll
      for (int i = 0; i < SHARE * 8; i++) {
        const float value = element(n, i / 8, i / 4 % 2, i % 4);
        largest = fmaxf(largest, fabsf(value));
        poison = fmaf(value, 0.0f, poison);
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        poison += __shfl_xor_sync(~0u, poison, distance);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      const int at_row = (warp * COLUMNS + n * 8 + (lane >> 2)) * 4;
      if (c == 0) {
        store_float_shared(maxima + at_row, largest);
        store_float_shared(poisons + at_row, poison);
      }
    }
    synchronize_warps();
    visible_to_all = at.length;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + (n * 8 + (lane >> 2)) % USED;
      float largest = 0, poison = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const int at_row = (w * COLUMNS + n * 8 + (lane >> 2)) * 4;
        largest = fmaxf(largest, load_float_shared(maxima + at_row));
        poison += load_float_shared(poisons + at_row);
      }
      const int exponent = largest > 0 ? max(exponent_of(largest), -100) : 0;
      const float shrink = power_of_two(14 - exponent) + poison;
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const int step = step_of(i, t);
          if (KEY_STEPS % (2 * WARPS) != 0 && step >= KEY_STEPS) break;
          float slots[4], sum_of_step = 0;
#pragma unroll
          for (int slot = 0; slot < 4; slot++) {
            const float value = element(n, i, t, slot) * shrink;
            sum_of_step += value;
            slots[slot] = value * power_of_two(-key_position(step, slot));
          }
          const bool mine = SPLIT == 1 || (lane >> 2) / USED == step / (KEY_STEPS / SPLIT);
          asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(fragment_address(queries, step, n) +
                                                               step % 2 * 8),
                       "r"(mine ? pack_f16(slots[0], slots[1]) : 0),
                       "r"(mine ? pack_f16(slots[2], slots[3]) : 0)
                       : "memory");
          sum_of_step += __shfl_xor_sync(~0u, sum_of_step, 1);
          sum_of_step += __shfl_xor_sync(~0u, sum_of_step, 2);
          if (c == 0) {
            store_float_shared(step_sums + (step * COLUMNS + n * 8 + (lane >> 2)) * 4,
                               sum_of_step * power_of_two(-24));
          }
        }
      }
      // Not 0: hidden scores are -inf times it.
      const auto unit_of = [&](float factor) {
        return fmaxf(factor * power_of_two(min(exponent + 10, 127)) *
                         power_of_two(max(exponent + 10 - 127, 0)),
                     power_of_two(-126));
      };
      constexpr bool TO_LOG2 = !ROUND_SCORES && !CHANGED;
      float own_unit = unit_of(ROUND_SCORES ? 1.0f
                               : TO_LOG2    ? fabsf(a.scale) * 1.44269504088896341f
                                            : fabsf(a.scale));
      int own_visible = at.length;
      if (a.causal != 0) {
        const int query_row = row - head_of_row(row) * a.query_len;
        own_visible = max(at.length - a.query_len + query_row + 1, 0);
      }
      if (row >= rows) own_visible = 0x7fffffff;
#if FEATURES
      const Sight &sight = sights[n];
      if constexpr (CAPPED && !ROUND_SCORES)
        own_unit = fminf(own_unit * (2 * LOG2_E * call->softcap_reciprocal), LARGEST_FLOAT);
      own_visible = sight.end;
      if (c == 0 && warp == 0) sight.store(shared, n * 8 + (lane >> 2));
      if constexpr (SIGHT) {
        const int last_begin = __reduce_max_sync(~0u, sight.begin);
        const int least_keep = __reduce_min_sync(~0u, sight.keep_end);
        begin_of_all = n == 0 ? last_begin : max(begin_of_all, last_begin);
        keep_of_all = n == 0 ? least_keep : min(keep_of_all, least_keep);
      }
#else
      if (c == 0 && warp == 0) {
        asm volatile(
            "st.shared.b32 [%0], %1;" ::"r"(shared + VISIBLE_AT + (n * 8 + (lane >> 2)) * 4),
            "r"(own_visible)
            : "memory");
        if constexpr (!HOLD_UNITS)
          store_float_shared(shared + UNITS_AT + (n * 8 + (lane >> 2)) * 4, own_unit);
      }
#endif
      visible_to_all = min(visible_to_all, __reduce_min_sync(~0u, own_visible));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int from = (2 * c + j) % USED * 4;
        if constexpr (HOLD_UNITS) held_unit[2 * n + j] = __shfl_sync(~0u, own_unit, from);
      }
    }
    synchronize_warps();
    if constexpr ((BOOLS || ADDED) && !ONE_MASK_ROW) {
#pragma unroll
      for (int j = 0; j < MASK_ROWS; j++)
        mask_rows[j] = call->mask_array + Sight::mask_offset_of(shared, column_of(j));
    }
    const auto total = [&](int group, int column) {
      float all = 0;
#pragma unroll
      for (int step = 0; step < GROUP_STEPS; step++)
        all += load_float_shared(step_sums + ((group * GROUP_STEPS + step) * COLUMNS + column) * 4);
      return all;
    };
    if constexpr (HOLD_SUMS) {
#pragma unroll
      for (int g = 0; g < LANE_SUMS; g++) {
#pragma unroll
        for (int j = 0; j < 2 * N_TILES; j++)
          sum[g][j] = total(lane_part() * NEXT_PART + g, j / 2 * 8 + 2 * c % USED + j % 2);
      }
    } else {
      for (int i = thread; i < SUM_GROUPS * COLUMNS; i += WARPS * 32)
        store_float_shared(shared + QUERY_SUMS_AT + i * 4, total(i / COLUMNS, i % COLUMNS));
      synchronize_warps();
    }
  }
  // Of columns 2 * (lane % 4), the next, and those 8 on.
  static __device__ __forceinline__ void load_visible(int *visible, uint32 shared) {
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      visible[j] = static_cast<int>(load_word(shared + VISIBLE_AT + column_of(j) * 4));
    }
  }
  __device__ __forceinline__ void load_units(float *unit, uint32 shared) const {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      if constexpr (HOLD_UNITS) {
        unit[2 * n] = held_unit[2 * n];
        unit[2 * n + 1] = held_unit[2 * n + 1];
      } else {
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(unit[2 * n]), "=f"(unit[2 * n + 1])
                     : "r"(shared + UNITS_AT + (n * 8 + 2 * (threadIdx.x & 3)) * 4));
      }
    }
  }
  // Of columns 2 * (lane % 4) + 8 * n and the next.
  __device__ __forceinline__ void sums_of(float *pair, int g, int n, uint32 queries) const {
    if constexpr (HOLD_SUMS) {
      pair[0] = sum[g][2 * n];
      pair[1] = sum[g][2 * n + 1];
    } else {
      const int column = n * 8 + 2 * (threadIdx.x & 3) % USED;
      asm volatile(
          "ld.shared.v2.f32 {%0,%1}, [%2];"
          : "=f"(pair[0]), "=f"(pair[1])
          : "r"(queries + QUERY_BYTES + ((lane_part() * NEXT_PART + g) * COLUMNS + column) * 4));
    }
  }
};
