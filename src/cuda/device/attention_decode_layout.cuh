// SPDX-License-Identifier: Apache-2.0
// What a specialisation of attention_decode is made of: how warps share tokens and elements, where
// in shared memory everything lies, and how codes, scales and biases are read from there.
#pragma once

#include "attention_decode_instructions.cuh"
#include "attention_decode_leaves.cuh"

#if !defined(KEY_DIM) || !defined(VALUE_DIM) || !defined(KEY_BITS) || !defined(VALUE_BITS) || \
    !defined(KEY_GROUP) || !defined(VALUE_GROUP) || !defined(QUERY_TYPE) ||                   \
    !defined(KEY_SCALE_TYPE) || !defined(VALUE_SCALE_TYPE) || !defined(COLUMNS) ||            \
    !defined(ROWS) || !defined(ROUND_SCORES) || !defined(PACKED) || !defined(STAGES) ||       \
    !defined(FEATURES) || !defined(PLACED)
#error "a parameter of attention_decode is missing"
#endif

constexpr int WARPS = NYB_DECODE_WARPS(KEY_DIM, VALUE_DIM, FEATURES), TILES = NYB_DECODE_TILES;
constexpr int KEY_ROW = KEY_DIM * KEY_BITS / 8, VALUE_ROW = VALUE_DIM * VALUE_BITS / 8;
constexpr int KEY_GROUPS = KEY_DIM / KEY_GROUP, VALUE_GROUPS = VALUE_DIM / VALUE_GROUP;
constexpr int N_TILES = COLUMNS / 8;
// A step of the block is four of them.
constexpr int TILE = NYB_DECODE_TILE(KEY_DIM, VALUE_DIM, KEY_ROW, VALUE_ROW), HALVES = TILE / 16;
constexpr int STEP = TILES * TILE;
constexpr int LEAF = NYB_DECODE_LEAF_TOKENS(KEY_DIM, VALUE_DIM), LEAF_STEPS = LEAF / STEP;
constexpr int MIN_BLOCKS = NYB_DECODE_MIN_BLOCKS(KEY_DIM, VALUE_DIM, KEY_ROW, VALUE_ROW,
                                                 KEY_GROUPS + VALUE_GROUPS, COLUMNS, ROWS);
static_assert(LEAF % STEP == 0);
// A lane's rows of the products, lane/4 and lane/4 + 8 of each half, are neighbouring tokens.
constexpr int LANE_TOKENS = TILE / 8;
static_assert(STAGES >= 2 && STAGES <= NYB_DECODE_MAX_STAGES);

// Scores are the sum of PARTS parts of head_dim, and what is summed over a lane's tokens that of as
// many sets of them, however many query rows there are: a row's bits do not depend on its
// neighbours. Few query rows leave columns of the scores' products free. They take the other part
// of head_dim then: column j of USED belongs to the first part, j + USED to the next, and each lane
// scales its part alone. Of wide heads two warps score a part of a tile each. The lanes of a row's
// parts then add them up, each for KEPT of their LANE_TOKENS tokens.
constexpr int WARP_PARTS = WARPS / TILES;
constexpr int PARTS = WARP_PARTS > 1 ||
                              (KEY_DIM / 16 % 2 == 0 && (KEY_GROUPS == 1 || KEY_GROUPS % 2 == 0))
                          ? 2
                          : 1;
constexpr int SPLIT = WARP_PARTS == 1 && COLUMNS == 8 && ROWS <= 4 ? PARTS : 1;
constexpr int USED = COLUMNS / SPLIT, SHARES = SPLIT * WARP_PARTS;
constexpr int KEPT = LANE_TOKENS / SHARES;
constexpr int PART_GROUPS = KEY_GROUPS > PARTS ? (KEY_GROUPS + PARTS - 1) / PARTS : 1; // of a part
// From a part's first group to the next one's. Where there is an odd number of groups, warps' parts
// overlap, and the second leaves out its first group.
constexpr int NEXT_PART = WARP_PARTS == 1 ? PART_GROUPS : KEY_GROUPS - PART_GROUPS;
constexpr int SUM_GROUPS = WARP_PARTS == 1 ? PARTS * PART_GROUPS : KEY_GROUPS;
constexpr int GROUP_STEPS = KEY_DIM / 16 / SUM_GROUPS;
// What a lane has of them: parts, groups, sets of tokens.
constexpr int LANE_PARTS = PARTS / SHARES, SETS = PARTS / SHARES, SET_TOKENS = KEPT / SETS;
constexpr int LANE_GROUPS = SHARES == PARTS ? PART_GROUPS : KEY_GROUPS;
constexpr int LANE_SUMS = LANE_PARTS * PART_GROUPS;
constexpr bool HOLD_SUMS = LANE_SUMS * N_TILES <= 4;
__device__ __forceinline__ int lane_part() {
  if constexpr (WARP_PARTS > 1) return threadIdx.x / (TILES * 32);
  return SPLIT == 1 ? 0 : (threadIdx.x & 3) * SPLIT / 4;
}
__device__ __forceinline__ int tile_of_warp() {
  return WARP_PARTS == 1 ? threadIdx.x >> 5 : (threadIdx.x >> 5) % TILES;
}
// Adds or compares over the lanes that share columns: their tokens differ.
constexpr int NEXT_ROW = SPLIT == 1 ? 4 : 2;
constexpr int LEVELS = NYB_DECODE_LEVELS(KEY_DIM, VALUE_DIM, ROWS, FEATURES);
static_assert(LEVELS <= NYB_LEAF_MAX_LEVELS); // attention_merge knows no larger subtrees

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A tile's part of a stage of copies, in bytes: all of its tokens.
constexpr int KEY_SCALE_BYTES = round_up(TILE * KEY_GROUPS * bytes_of(KEY_SCALE_TYPE), 16);
constexpr int VALUE_SCALE_BYTES = round_up(TILE * VALUE_GROUPS * bytes_of(VALUE_SCALE_TYPE), 16);
constexpr int VALUES_AT = round_up(TILE * KEY_ROW, 16);
constexpr int KEY_SCALES_AT = VALUES_AT + round_up(TILE * VALUE_ROW, 16);
constexpr int KEY_BIASES_AT = KEY_SCALES_AT + KEY_SCALE_BYTES;
constexpr int OWN_BYTES = KEY_BIASES_AT + KEY_SCALE_BYTES;
constexpr int STAGE_BYTES = TILES * OWN_BYTES;
// V's scales and biases are needed before its codes, and as long: they come with the keys, and have
// a stage more. Of a tile: scales, then biases.
constexpr int OWN_VALUE_SCALE_BYTES = 2 * VALUE_SCALE_BYTES;
constexpr int SCALE_STAGES = STAGES + 1, SCALE_STAGE_BYTES = TILES * OWN_VALUE_SCALE_BYTES;
constexpr int VALUE_SCALES_AT = STAGES * STAGE_BYTES;
// Behind them: the query rows as the products' N side.
constexpr int QUERIES_AT = VALUE_SCALES_AT + SCALE_STAGES * SCALE_STAGE_BYTES;
constexpr int QUERY_BYTES = NYB_DECODE_QUERY_BYTES(KEY_DIM, COLUMNS);
// Two steps' weights times V's scales, f16: for each group and column a row of tokens. Rows of
// neighbouring columns start 4 banks apart.
constexpr int WEIGHT_ROWS = COLUMNS; // the first USED of them in use
constexpr int WEIGHT_ROW_BYTES = STEP * 2 + 16;
constexpr int QUERY_SUMS_AT = QUERIES_AT + QUERY_BYTES; // where they are too many to be held
constexpr int QUERY_SUMS_BYTES = NYB_DECODE_QUERY_SUMS_BYTES(KEY_DIM, KEY_GROUP, COLUMNS);
constexpr int VISIBLE_AT = QUERY_SUMS_AT + QUERY_SUMS_BYTES; // how many tokens each row sees
// Where registers are few, the rows' units are there too, behind.
constexpr bool HOLD_UNITS = WARP_PARTS == 1;
constexpr int UNITS_AT = VISIBLE_AT + COLUMNS * 4 * NYB_DECODE_SIGHT_WORDS(FEATURES);
constexpr int WEIGHTS_AT = UNITS_AT + (HOLD_UNITS ? 0 : COLUMNS * 4);
constexpr int WEIGHT_GROUP_BYTES = WEIGHT_ROWS * WEIGHT_ROW_BYTES;
constexpr int WEIGHT_STEP_BYTES = // one step's; there are two
    NYB_DECODE_STEP_WEIGHT_BYTES(VALUE_GROUPS, TILE, COLUMNS, WARPS);
// Where two warps share a tile, the weights as f32 behind: a row of columns for each token, in the
// order of a lane's: 2 * (lane % 4), the next, and those 8 on.
constexpr int FLOAT_WEIGHTS_AT = WEIGHTS_AT + VALUE_GROUPS * WEIGHT_GROUP_BYTES;
constexpr int FLOAT_ROW_BYTES = COLUMNS * 4;
// What warps tell each other: maxima and exponents where they are raised, sums at a leaf's end.
// Before there are weights: the query rows' maxima and sums.
constexpr int QUERY_SCRATCH_AT = WEIGHTS_AT;
constexpr int RAISED_AT =
    WEIGHTS_AT + NYB_DECODE_WEIGHT_BYTES(KEY_DIM, VALUE_GROUPS, TILE, COLUMNS, WARPS);
constexpr int RAISED_WORDS = COLUMNS + VALUE_GROUPS;
// Of a warp each; where two warps share a tile, of the block, in turn in two places.
constexpr int RAISED_BUFFERS = WARP_PARTS == 1 ? 1 : 2, RAISED_BYTES = RAISED_WORDS * 4;
constexpr int SUMS_AT = RAISED_AT + NYB_DECODE_RAISED_BYTES(VALUE_GROUPS, COLUMNS, WARPS);
constexpr int SUMS_WORDS = (VALUE_GROUPS + 1) * COLUMNS;
// Of wide heads, scores of a part for the warp that has the other: a lane's of one token.
constexpr int PARTS_AT = SUMS_AT + (WARP_PARTS > 1 ? 0 : WARPS * SUMS_WORDS * 4);
// And each warp's own copy of the powers of two that V's scales are multiplied with.
constexpr bool HOLD_EXPONENTS = WARP_PARTS == 1;
constexpr int GROWS_AT = PARTS_AT + NYB_DECODE_PARTS_BYTES(COLUMNS, WARPS);
constexpr int PARKED_AT = GROWS_AT + NYB_DECODE_GROWS_BYTES(VALUE_GROUPS, WARPS);
constexpr int EXCHANGE_AT = PARKED_AT + NYB_DECODE_PARKED_BYTES(WARPS);

// ---- Fields of packed rows ---------------------------------------------------------------------

// The token of the product's row `row` (0 to 15) of a half: a lane's are neighbours.
__device__ __forceinline__ int token_of_row(int half, int row) {
  return row % 8 * LANE_TOKENS + half * 2 + row / 8;
}

// Widths of 2, 4 and 8 bits whose 16-byte units lie within a group go through ldmatrix: the fields
// of each 16-bit half are the same number of bits apart in both halves. All others go by runs: the
// consecutive codes that a lane needs, shifted to the start of its registers.
template <int DIM, int BITS, int GROUP>
struct Layout {
  static constexpr int ROW = DIM * BITS / 8;
  static constexpr bool BY_UNITS =
      (BITS == 2 || BITS == 4 || BITS == 8) && ROW % 16 == 0 && GROUP * BITS % 128 == 0;
  static constexpr int UNITS = ROW / 16;
  static constexpr int UNIT_DIMS = 128 / BITS;
  // A tile lies in shared memory as in memory, in lines of 128 bytes: where the halves of a line
  // went to different ones, each would be asked for alone, and reading would take a fifth longer.
  // Within a line, the units' places are xored with a number such that the units that ldmatrix
  // reads at once, of eight tokens LANE_TOKENS apart, lie on different banks.
  static constexpr int ROW_UNITS = LANE_TOKENS * UNITS; // from such a token to the next
  static constexpr bool REGULAR = (UNITS & (UNITS - 1)) == 0;
  static __device__ __forceinline__ int turn(int row) {
    return ROW_UNITS >= 8 ? row : row * ROW_UNITS / 8;
  }
  // Unit `unit` of LANE_TOKENS tokens from token row * LANE_TOKENS on.
  static __device__ __forceinline__ int unit_offset(int row, int unit) {
    if constexpr (REGULAR) return row * ROW_UNITS * 16 + ((unit ^ turn(row)) << 4);
    const int index = row * ROW_UNITS + unit, line = index / 8;
    constexpr int MASK = ROW_UNITS % 8 == 0 ? 7 : ROW_UNITS % 4 == 0 ? 3 : 1;
    return (index ^ (line & MASK)) << 4;
  }
  // Where the 16-byte chunk of a packed tile goes.
  static __device__ __forceinline__ int chunk_offset(int chunk) {
    if constexpr (!BY_UNITS) return chunk * 16;
    return unit_offset(chunk / ROW_UNITS, chunk % ROW_UNITS);
  }
  // Of token `token`'s 4-byte word.
  static __device__ __forceinline__ int word_offset(int token, int word) {
    if constexpr (!BY_UNITS) return token * ROW + word * 4;
    return chunk_offset(token * UNITS + word / 4) + word % 4 * 4;
  }
};
// The units that a lane points ldmatrix to: those of row `row` from unit `first` on.
template <class LAYOUT>
struct Place {
  uint32 base;
  int row, first; // REGULAR: where the first is, from base on
  __device__ __forceinline__ void start(uint32 tile, int lane_row, int lane_first) {
    base = tile;
    row = lane_row;
    first = lane_first;
    if constexpr (LAYOUT::REGULAR) {
      base += row * LAYOUT::ROW_UNITS * 16;
      first = (lane_first ^ LAYOUT::turn(row)) << 4;
    }
  }
  // `more` units on, which has no bit in common with `first`.
  __device__ __forceinline__ uint32 at(int more) const {
    if constexpr (LAYOUT::REGULAR) return base + (first ^ (more & 7) << 4) + (more & ~7) * 16;
    return base + LAYOUT::unit_offset(row, first + more);
  }
};
using Keys = Layout<KEY_DIM, KEY_BITS, KEY_GROUP>;
using Values = Layout<VALUE_DIM, VALUE_BITS, VALUE_GROUP>;

// Where a field lies within its half word once it has been made a subnormal f16 number: within bits
// 0 to 9. Fields above are shifted down first.
__host__ __device__ constexpr int unit_shift(int bits) { return bits == 2 ? 10 : 8; }
__host__ __device__ constexpr int unit_position(int bits, int field) {
  return field * bits + bits <= 10 ? field * bits : field * bits - unit_shift(bits);
}
template <int BITS>
__device__ __forceinline__ uint32 unit_field(uint32 word, int field) {
  const uint32 mask = ((1u << BITS) - 1) * 0x10001u;
  const bool shifted = field * BITS + BITS > 10;
  return (shifted ? word >> unit_shift(BITS) : word) & mask << unit_position(BITS, field);
}

// Runs: two codes at bit positions `low` and `high` of registers become the halves of one.
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int run_shift(int bits, int low, int high) {
  return larger(0, larger(low % 8, high % 8) + bits - 10);
}
template <int BITS>
__device__ __forceinline__ uint32 run_window(const uint32 *run, int bit, int *byte) {
  const int word = bit / 32;
  *byte = bit / 8 % 4;
  if (*byte == 3 && bit % 8 + BITS > 8) { // it goes on in the next register
    *byte = 0;
    return __funnelshift_r(run[word], run[word + 1], 24);
  }
  return run[word];
}
template <int BITS>
__device__ __forceinline__ uint32 run_field(const uint32 *low_run, int low, const uint32 *high_run,
                                            int high) {
  int low_byte, high_byte;
  const uint32 low_word = run_window<BITS>(low_run, low, &low_byte);
  const uint32 high_word = run_window<BITS>(high_run, high, &high_byte);
  const int low_next = low_byte < 3 ? low_byte + 1 : 3,
            high_next = high_byte < 3 ? high_byte + 1 : 3;
  uint32 word = __byte_perm(
      low_word, high_word, low_byte | low_next << 4 | (high_byte + 4) << 8 | (high_next + 4) << 12);
  const int shift = run_shift(BITS, low, high);
  word >>= shift;
  const uint32 mask = (1u << BITS) - 1;
  return word & (mask << (low % 8 - shift) | mask << (high % 8 - shift + 16));
}
// `bits` consecutive bits from bit `at` of the row at `row`, to the start of the registers.
template <int RUN_BITS, bool ALIGNED>
__device__ __forceinline__ void load_run(uint32 *run, uint32 row, int at) {
  constexpr int WORDS = (RUN_BITS + 31) / 32;
  const uint32 address = row + (at >> 5) * 4;
  if constexpr (ALIGNED) {
    for (int i = 0; i < WORDS; i++) run[i] = load_word(address + 4 * i);
  } else {
    uint32 words[WORDS + 1];
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = load_word(address + 4 * i);
    // Nothing behind the run, which may be on its way.
    words[WORDS] = load_word(row + min((at >> 5) + WORDS, (at + RUN_BITS - 1) >> 5) * 4);
#pragma unroll
    for (int i = 0; i < WORDS; i++) run[i] = __funnelshift_r(words[i], words[i + 1], at & 31);
  }
}

// The codes of a group that one lane holds, on either side, and how they are ordered.
constexpr int KEY_LANE_DIMS = KEY_GROUP / 4;
constexpr int VALUE_SPAN = Values::BY_UNITS ? Values::UNIT_DIMS : VALUE_GROUP; // a row of lanes'
constexpr int VALUE_LANE_DIMS = VALUE_SPAN / 8;

// The output's elements come in pieces of so many tiles of the products' M side: a unit, or a part
// of a group. Warps share the pieces between them, and the step's tokens where those are too few.
constexpr int SPANS = VALUE_DIM / VALUE_SPAN, SPAN_SUMS = VALUE_SPAN / 16;
constexpr int SPAN_PARTS = Values::BY_UNITS     ? 1
                           : SPAN_SUMS % 4 == 0 ? 4
                           : SPAN_SUMS % 2 == 0 ? 2
                                                : 1;
constexpr int PIECES = SPANS * SPAN_PARTS, PIECE_SUMS = SPAN_SUMS / SPAN_PARTS;
constexpr int PIECE_LANE_DIMS = VALUE_LANE_DIMS / SPAN_PARTS;
constexpr int DIM_WARPS = NYB_DECODE_DIM_WARPS(VALUE_DIM, VALUE_BITS, VALUE_GROUP, WARPS);
constexpr int TOKEN_WARPS = WARPS / DIM_WARPS;
constexpr int WARP_PIECES = PIECES / DIM_WARPS;
constexpr int VALUE_HALVES = STEP / TOKEN_WARPS / 16; // that a warp sums
constexpr int SUMS = WARP_PIECES * PIECE_SUMS;        // tiles of the products' M side
static_assert(PIECE_LANE_DIMS == 2 * PIECE_SUMS);

// Step `step` of the products along head_dim: which of its elements a lane holds in slot 0 to 3,
// and at which power of two the code stands there.
constexpr int KEY_STEPS = KEY_DIM / 16;
__device__ __forceinline__ int key_lane_element(int step, int slot) {
  constexpr int RUN = Keys::BY_UNITS ? 32 / KEY_BITS : KEY_LANE_DIMS, STEPS = RUN / 4;
  const int pair = step % STEPS * 2 + slot / 2;
  return step / STEPS * RUN + pair + slot % 2 * (RUN / 2);
}
__device__ __forceinline__ int key_position(int step, int slot) {
  if constexpr (Keys::BY_UNITS) {
    constexpr int FIELDS = 16 / KEY_BITS, STEPS = FIELDS / 2;
    return unit_position(KEY_BITS, step % STEPS * 2 + slot / 2);
  } else {
    constexpr int STEPS = KEY_LANE_DIMS / 4, HALF = KEY_LANE_DIMS / 2;
    const int pair = step % STEPS * 2 + slot / 2;
    const int low = pair * KEY_BITS, high = (pair + HALF) * KEY_BITS;
    return (slot % 2 == 0 ? low : high) % 8 - run_shift(KEY_BITS, low, high);
  }
}
__device__ __forceinline__ int value_position(int lane_dim) {
  if constexpr (Values::BY_UNITS) return unit_position(VALUE_BITS, lane_dim);
  const int bit = lane_dim * VALUE_BITS;
  return bit % 8 - run_shift(VALUE_BITS, bit, bit);
}

// ---- Scales and biases of a lane's tokens -------------------------------------------------------

// The thread's number, where what follows from it is not worth a register meanwhile.
__device__ __forceinline__ uint32 thread_here() {
  uint32 thread = threadIdx.x;
  if constexpr (WARP_PARTS > 1) hold(thread);
  return thread;
}

template <int BYTES>
__device__ __forceinline__ void load_words(uint32 *to, uint32 address) {
  constexpr int WORDS = BYTES / 4;
#pragma unroll
  for (int i = 0; i < WORDS;) {
    if constexpr (WORDS % 4 == 0) {
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "r"(address + 4 * i));
      i += 4;
    } else if constexpr (WORDS % 2 == 0) {
      asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                   : "=r"(to[i]), "=r"(to[i + 1])
                   : "r"(address + 4 * i));
      i += 2;
    } else {
      to[i] = load_word(address + 4 * i);
      i++;
    }
  }
}

// TOKENS neighbouring tokens' first GROUPS of STRIDE groups.
template <int DTYPE, int TOKENS, int GROUPS, int STRIDE>
struct PerGroup {
  static constexpr int WORDS = (GROUPS * bytes_of(DTYPE) + 3) / 4; // of a token, or of all tokens
  static constexpr bool CONTIGUOUS = GROUPS == STRIDE && TOKENS * GROUPS * bytes_of(DTYPE) % 4 == 0;
  uint32 words[CONTIGUOUS ? TOKENS * GROUPS * bytes_of(DTYPE) / 4 : TOKENS * WORDS];
  __device__ __forceinline__ void load(uint32 from) {
    if constexpr (CONTIGUOUS) {
      load_words<TOKENS * GROUPS * bytes_of(DTYPE)>(words, from);
    } else {
#pragma unroll
      for (int token = 0; token < TOKENS; token++) {
        const uint32 row = from + token * STRIDE * bytes_of(DTYPE);
        if constexpr (GROUPS * bytes_of(DTYPE) % 4 == 0 && STRIDE * bytes_of(DTYPE) % 4 == 0) {
          load_words<GROUPS * bytes_of(DTYPE)>(words + token * WORDS, row);
        } else {
#pragma unroll
          for (int group = 0; group < GROUPS; group++) {
            const uint32 half_word = load_half_word(row + group * 2) << group % 2 * 16;
            uint32 &word = words[token * WORDS + group / 2];
            word = group % 2 == 0 ? half_word : word | half_word;
          }
        }
      }
    }
  }
  __device__ __forceinline__ float at(int token, int group) const {
    if constexpr (DTYPE == F32) return __uint_as_float(words[token * GROUPS + group]);
    const int index = CONTIGUOUS ? token * GROUPS + group : token * WORDS * 2 + group;
    return index % 2 == 0 ? low_of<DTYPE>(words[index / 2]) : high_of<DTYPE>(words[index / 2]);
  }
};
// A lane's part of the keys' for all its tokens, and the values' of the tokens that it keeps.
using KeyScales = PerGroup<KEY_SCALE_TYPE, LANE_TOKENS, LANE_GROUPS, KEY_GROUPS>;
using ValueScales = PerGroup<VALUE_SCALE_TYPE, KEPT, VALUE_GROUPS, VALUE_GROUPS>;
__device__ __forceinline__ uint32 key_scale_offset() {
  const int first = KEY_GROUPS == 1 ? 0 : lane_part() * NEXT_PART;
  return ((threadIdx.x >> 2 & 7) * LANE_TOKENS * KEY_GROUPS + first) * bytes_of(KEY_SCALE_TYPE);
}
// From the lane's row on: the first of its tokens that it keeps.
__device__ __forceinline__ int lane_token() {
  return (threadIdx.x >> 2 & 7) * LANE_TOKENS + lane_part() * KEPT;
}
__device__ __forceinline__ int lane_row_token() { return (threadIdx.x >> 2 & 7) * LANE_TOKENS; }
__device__ __forceinline__ uint32 value_scale_offset() {
  return lane_token() * VALUE_GROUPS * bytes_of(VALUE_SCALE_TYPE);
}
