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
// FEATURED (tokens are hidden by more than a causal mask, sequences have starts, scores are capped
// or sloped), PLACED (NYB_DECODE_IN_ORDER: tokens follow each other; _SHIFTED: from anywhere on, or
// in a ring; _PAGES: in pages, by runs of 16).
#include "attention_decode.cuh"

#if !defined(KEY_DIM) || !defined(VALUE_DIM) || !defined(KEY_BITS) || !defined(VALUE_BITS) || \
    !defined(KEY_GROUP) || !defined(VALUE_GROUP) || !defined(QUERY_TYPE) ||                   \
    !defined(KEY_SCALE_TYPE) || !defined(VALUE_SCALE_TYPE) || !defined(COLUMNS) ||            \
    !defined(ROWS) || !defined(ROUND_SCORES) || !defined(PACKED) || !defined(STAGES) ||       \
    !defined(FEATURED) || !defined(PLACED)
#error "a parameter of attention_decode is missing"
#endif

constexpr int WARPS = NYB_DECODE_WARPS(KEY_DIM, VALUE_DIM, FEATURED), TILES = NYB_DECODE_TILES;
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
constexpr int LEVELS = NYB_DECODE_LEVELS(KEY_DIM, VALUE_DIM, ROWS, FEATURED);

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
constexpr int UNITS_AT = VISIBLE_AT + COLUMNS * 4 * NYB_DECODE_SIGHT_WORDS(FEATURED);
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

// ---- Instructions ------------------------------------------------------------------------------

__device__ __forceinline__ void copy_async_16(uint32 to, const char *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_async_16(uint32 to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_async_4(uint32 to, const char *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void multiply_add(float *sums, const uint32 *a, const uint32 *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32 transpose_8x8(uint32 matrix) {
  uint32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ __forceinline__ void load_matrices_4(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_2(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed_4(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed_2(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address));
}
// COUNT 8x8 matrices, each to the 8 rows of 16 bytes that 8 lanes name, transposed.
template <int COUNT>
__device__ __forceinline__ void store_transposed(uint32 address, const uint32 *words) {
#if __CUDA_ARCH__ >= 900
  if constexpr (COUNT == 4) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
                 "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
                 "r"(words[0])
                 : "memory");
  }
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const uint32 row = __shfl_sync(~0u, address, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(transpose_8x8(words[i]))
                 : "memory");
  }
#endif
}
__device__ __forceinline__ void store_float_shared(uint32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ float load_float_shared(uint32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_floats_4(uint32 address, const float *values) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}
__device__ __forceinline__ void load_floats_4(float *values, uint32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address));
}
template <int COUNT>
__device__ __forceinline__ void store_words(uint32 address, const float *values) {
  if constexpr (COUNT == 4) {
    store_floats_4(address, values);
  } else {
    static_assert(COUNT == 2);
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(values[0]), "f"(values[1])
                 : "memory");
  }
}
// Keeps the compiler from working a value out again and again, instead of holding it.
__device__ __forceinline__ void hold(uint32 &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ uint32 load_word(uint32 address) {
  uint32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
__device__ __forceinline__ uint32 load_half_word(uint32 address) {
  uint16 half_word;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half_word) : "r"(address));
  return half_word;
}

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

// ---- Where a block of threads is in its run of leaves -------------------------------------------

struct Position : Sequence {
  int batch, pair; // pair: KV head and tile of query rows within the sequence
  int leaf;

  __device__ __forceinline__ Leaves leaves() const { return Leaves(*this, LEAF); }
};

struct Problem {
  const Arguments *all;
  const nyb_decode_arguments *arguments;

  __device__ __forceinline__ int pairs() const { // of a sequence
    return arguments->kv_heads * arguments->row_tiles;
  }

  __device__ __forceinline__ int head_of(const Position &at) const {
    return arguments->row_tiles == 1 ? at.pair : at.pair / arguments->row_tiles;
  }
  __device__ __forceinline__ int leaves_of(int batch) const {
    return Leaves(sequence_of(*all, batch), LEAF).count();
  }
  // All leaves of all pairs: the host takes another kernel where they are 2^31 or more.
  __device__ __forceinline__ uint32 units() const {
    if (arguments->batch == 1) return leaves_of(0) * pairs();
    uint32 leaves = 0;
    for (int batch = threadIdx.x & 31; batch < arguments->batch; batch += 32)
      leaves += leaves_of(batch);
    for (int distance = 16; distance > 0; distance /= 2)
      leaves += __shfl_xor_sync(~0u, leaves, distance);
    return leaves * pairs();
  }
  __device__ __forceinline__ void enter_sequence(Position &at, int batch) const {
    at.batch = batch;
    static_cast<Sequence &>(at) = sequence_of(*all, batch);
  }
  // A lane looks at a sequence.
  __device__ __forceinline__ Position find(uint32 unit) const {
    const int lane = threadIdx.x & 31;
    Position at;
    if (arguments->batch == 1) enter_sequence(at, 0);
    for (int first = 0; arguments->batch > 1; first += 32) {
      const uint32 own = first + lane < arguments->batch
                             ? static_cast<uint32>(leaves_of(first + lane)) * pairs()
                             : 0;
      uint32 end = own; // of the sequence's units
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32 before = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += before;
      }
      const uint32 beyond = __ballot_sync(~0u, unit < end);
      if (beyond == 0) {
        unit -= __shfl_sync(~0u, end, 31);
        continue;
      }
      const int index = __ffs(beyond) - 1;
      unit -= __shfl_sync(~0u, end - own, index);
      enter_sequence(at, first + index);
      break;
    }
    const uint32 leaves = at.leaves().count();
    at.pair = static_cast<int>(unit / leaves);
    at.leaf = at.leaves().leaf_at(static_cast<int>(unit % leaves));
    return at;
  }
  // To the next one, which exists.
  __device__ __forceinline__ void advance(Position &at) const {
    if (++at.leaf < at.leaves().end) {
      if constexpr (FEATURED) {
        if (at.leaf == at.leaves().keep) at.leaf = at.leaves().begin;
      }
      return;
    }
    at.leaf = at.leaves().leaf_at(0);
    if (++at.pair < pairs()) return;
    at.pair = 0;
    do enter_sequence(at, at.batch + 1);
    while (FEATURED ? at.leaves().count() == 0 : at.length == 0);
    at.leaf = at.leaves().leaf_at(0);
  }
};

// A leaf's steps from `first` up to `end` hold something that is seen.
__device__ __forceinline__ int first_step_of(const Position &at) {
#if FEATURED
  const Leaves leaves = at.leaves();
  const int hidden = at.begin_token - at.leaf * LEAF;
  if (at.leaf == leaves.begin && at.keep_tokens <= at.leaf * LEAF && hidden > 0)
    return hidden / STEP;
#endif
  return 0;
}
__device__ __forceinline__ int end_step_of(const Position &at) {
  int left = at.length - at.leaf * LEAF;
#if FEATURED
  if (at.leaf < at.leaves().keep) left = at.keep_tokens - at.leaf * LEAF;
#endif
  return left >= LEAF ? LEAF_STEPS : (left + STEP - 1) / STEP;
}

// ---- Copying tiles -----------------------------------------------------------------------------

// From a sequence's tokens to its rows: they begin anywhere, or go round in a ring behind those
// that are kept.
struct Shift {
  int keep_end, wrap, of_kept, of_ring,
      of_wrapped; // wrap: the first token in the ring's first slot
  __device__ __forceinline__ void start(const Arguments &arguments, const Position &at) {
    const nyb_attention_arguments &call = call_of(arguments);
    keep_end = wrap = 0x7fffffff;
    of_kept = of_ring = of_wrapped = 0;
#if FEATURED
    of_kept = at.start;
#endif
    if (call.places != NYB_PLACES_RING) return;
    const int capacity = static_cast<int>(call.capacity_tokens),
              slots = capacity - call.ring_keep_tokens;
    if (call.ring_offsets != nullptr) of_ring = max(min(call.ring_offsets[at.batch], slots - 1), 0);
    keep_end = call.ring_keep_tokens;
    wrap = capacity - of_ring;
    of_wrapped = of_ring - slots;
  }
  __device__ __forceinline__ int row_of(int token) const {
    return token + (token < keep_end ? of_kept : token < wrap ? of_ring : of_wrapped);
  }
};

// K's or V's bytes of a step's tokens, on their way to shared memory: by the block's last warp,
// which does nothing else. Where in a stage the first tile's are; another's are OWN bytes on. What
// is NONE stays away.
constexpr int NONE = -1;
template <class LAYOUT, int DTYPE, int GROUPS, int CODES_AT, int SCALES_AT, int BIASES_AT, int OWN>
struct Copies {
  static constexpr int ROW = LAYOUT::ROW, SCALE_ROW = GROUPS * bytes_of(DTYPE);
  static constexpr int CHUNKS = TILE * ROW / 16, LANE_CHUNKS = (CHUNKS + 31) / 32; // of a tile
  static constexpr int TILE_SCALE_CHUNKS = TILE * SCALE_ROW / 16;
  static constexpr int SCALE_CHUNKS = TILES * TILE_SCALE_CHUNKS;

  Problem problem;
  const nyb_decode_stored *stored;
  Position at;
  uint32 units_left; // this one included
  int step, steps, tokens_left;
  const char *codes, *scales, *biases; // of the step; PLACED: of the head's first row
  uint32 offset[LANE_CHUNKS];          // where the lane's chunks of a tile go
  Shift shift;                          // PLACED
  // Pages: of each run of the leaf a lane knows where it is, and the page of the next leaf's.
  const char *run_codes, *run_scales, *run_biases;
  int next_page;

  __device__ __forceinline__ void start(const Problem &all, const nyb_decode_stored &from,
                                        const Position &first, uint32 units) {
    problem = all;
    stored = &from;
    at = first;
    units_left = units;
    if constexpr (PACKED && CODES_AT != NONE) {
#pragma unroll
      for (int i = 0; i < LANE_CHUNKS; i++) {
        offset[i] = LAYOUT::chunk_offset((threadIdx.x & 31) + 32 * i) + CODES_AT;
        hold(offset[i]);
      }
    }
    enter_leaf(false);
  }

  // From the leaf before in the same pair, or from anywhere.
  __device__ __forceinline__ void enter_leaf(bool same_pair) {
    step = first_step_of(at);
    steps = end_step_of(at);
    const int token = at.leaf * LEAF + step * STEP;
    tokens_left = at.length - token;
    if (!FEATURED && !PLACED && same_pair) return; // the leaf before was whole
    const int64 batch = PLACED == NYB_DECODE_PAGES ? 0 : at.batch, head = problem.head_of(at);
    const auto address = [&](const char *base, const long long *stride) {
      return base + batch * stride[0] + head * stride[1] + (PLACED ? 0 : token) * stride[2];
    };
    codes = address(stored->codes, stored->codes_stride);
    scales = address(stored->scales, stored->scales_stride);
    biases = address(stored->biases, stored->biases_stride);
    if constexpr (PLACED == NYB_DECODE_SHIFTED) shift.start(*problem.all, at);
    if constexpr (PLACED == NYB_DECODE_PAGES) enter_pages(same_pair);
    if constexpr (PACKED && !PLACED) {
      const int lane = threadIdx.x & 31;
      codes += lane * 16;
      scales += lane * 16;
      biases += lane * 16;
    }
  }

  // `bytes` of 16, and zeros.
  static __device__ __forceinline__ void copy_half_words(uint32 to, const char *from, int bytes) {
#pragma unroll 1
    for (int at = 0; at < 16; at += 2) {
      const uint16 bits =
          at < bytes ? *reinterpret_cast<const uint16 *>(from + at) : static_cast<uint16>(0);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + at), "h"(bits) : "memory");
    }
  }
  template <bool FULL>
  __device__ __forceinline__ void copy_packed(uint32 stage) const {
    if constexpr (CODES_AT != NONE) copy_packed_codes<FULL>(stage, codes);
    if constexpr (SCALES_AT != NONE) copy_packed_scales<FULL>(stage);
  }
  template <bool FULL>
  __device__ __forceinline__ void copy_packed_codes(uint32 stage, const char *step_codes) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; i++) {
      const int chunk = lane + 32 * i;
      if (CHUNKS % 32 != 0 && chunk >= CHUNKS) break;
      const uint32 to = stage + offset[i];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const char *from = step_codes + tile * TILE * ROW + 512 * i;
        if constexpr (FULL) {
          copy_async_16(to + tile * OWN, from);
        } else {
          const int left = (tokens_left - tile * TILE) * ROW - chunk * 16;
          copy_async_16(to + tile * OWN, from, left < 0 ? 0 : left > 16 ? 16 : left);
        }
      }
    }
  }
  template <bool FULL>
  __device__ __forceinline__ void copy_packed_scales(uint32 stage) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < (SCALE_CHUNKS + 31) / 32; i++) {
      const int chunk = lane + 32 * i;
      if (SCALE_CHUNKS % 32 != 0 && chunk >= SCALE_CHUNKS) break;
      const uint32 to = stage + chunk / TILE_SCALE_CHUNKS * OWN + chunk % TILE_SCALE_CHUNKS * 16;
      if constexpr (FULL) {
        copy_async_16(to + SCALES_AT, scales + 512 * i);
        copy_async_16(to + BIASES_AT, biases + 512 * i);
      } else {
        int left = tokens_left * SCALE_ROW - chunk * 16;
        left = left < 0 ? 0 : left > 16 ? 16 : left;
        if (left % 4 == 0) {
          copy_async_16(to + SCALES_AT, scales + 512 * i, left);
          copy_async_16(to + BIASES_AT, biases + 512 * i, left);
        } else { // compute-sanitizer takes a copy that ends within a word for one of 16 bytes
          copy_half_words(to + SCALES_AT, scales + 512 * i, left);
          copy_half_words(to + BIASES_AT, biases + 512 * i, left);
        }
      }
    }
  }

  __device__ __forceinline__ void copy_strided(uint32 stage) const {
    if constexpr (CODES_AT != NONE) copy_strided_codes(stage);
    if constexpr (SCALES_AT != NONE) {
      copy_strided_scales(stage + SCALES_AT, scales, stored->scales_stride[2]);
      copy_strided_scales(stage + BIASES_AT, biases, stored->biases_stride[2]);
    }
  }
  __device__ __forceinline__ void copy_strided_codes(uint32 stage) const {
    constexpr int WORDS = ROW / 4;
    const int lane = threadIdx.x & 31;
#pragma unroll 4
    for (int index = lane; index < STEP * WORDS; index += 32) {
      const int token = index / WORDS, word = index % WORDS;
      const int target = LAYOUT::word_offset(token % TILE, word);
      const bool inside = token < tokens_left;
      copy_async_4(stage + token / TILE * OWN + CODES_AT + target,
                   codes + row_of(inside ? token : 0) * stored->codes_stride[2] + word * 4,
                   inside ? 4 : 0);
    }
  }
  __device__ __forceinline__ void copy_strided_scales(uint32 to, const char *from,
                                                      int64 stride) const {
    for (int index = threadIdx.x & 31; index < STEP * GROUPS; index += 32) {
      const int token = index / GROUPS, group = index % GROUPS;
      const bool inside = token < tokens_left;
      const char *row = from + row_of(inside ? token : 0) * stride;
      const uint32 target =
          to + token / TILE * OWN + (token % TILE * GROUPS + group) * bytes_of(DTYPE);
      if constexpr (DTYPE == F32) {
        const uint32 bits = inside ? reinterpret_cast<const uint32 *>(row)[group] : 0;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(bits) : "memory");
      } else {
        const uint16 bits =
            inside ? reinterpret_cast<const uint16 *>(row)[group] : static_cast<uint16>(0);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"(bits) : "memory");
      }
    }
  }

  // ---- PLACED
  // The row of the step's token `token`, from `codes` on.
  __device__ __forceinline__ int64 row_of(int token) const {
    if constexpr (PLACED != NYB_DECODE_SHIFTED) return token;
    return shift.row_of(at.leaf * LEAF + step * STEP + token);
  }
  // Rows from anywhere on: each is at a multiple of 16 bytes, and its scales at one of 4. Mostly a
  // step's follow each other.
  __device__ __forceinline__ void copy_shifted(uint32 stage) const {
    const int lane = threadIdx.x & 31, last = min(tokens_left, STEP) - 1;
    if constexpr (CODES_AT != NONE) {
      if (row_of(last) - row_of(0) == last) {
        const char *step_codes = codes + row_of(0) * ROW + lane * 16;
        if (tokens_left >= STEP) {
          copy_packed_codes<true>(stage, step_codes);
        } else {
          copy_packed_codes<false>(stage, step_codes);
        }
      } else {
#pragma unroll 1
        for (int index = lane; index < STEP * (ROW / 16); index += 32) {
          const int token = index / (ROW / 16), chunk = index % (ROW / 16);
          const bool inside = token < tokens_left;
          copy_async_16(stage + token / TILE * OWN + CODES_AT +
                            LAYOUT::chunk_offset(token % TILE * (ROW / 16) + chunk),
                        codes + row_of(inside ? token : 0) * ROW + chunk * 16, inside ? 16 : 0);
        }
      }
    }
    if constexpr (SCALES_AT != NONE) {
      if (row_of(last) - row_of(0) != last) {
        copy_shifted_scales<false, false>(stage);
      } else if (tokens_left >= STEP) {
        copy_shifted_scales<true, true>(stage);
      } else {
        copy_shifted_scales<true, false>(stage);
      }
    }
  }
  // A word at once.
  template <bool IN_LINE, bool FULL>
  __device__ __forceinline__ void copy_shifted_scales(uint32 stage) const {
    constexpr int WORDS = SCALE_ROW / 4, UNROLL = IN_LINE && FULL ? STEP * WORDS / 32 : 1;
    const int lane = threadIdx.x & 31;
    const int64 first = row_of(0) * SCALE_ROW;
#pragma unroll UNROLL
    for (int i = 0; i < STEP * WORDS / 32; i++) {
      const int index = lane + 32 * i, token = index / WORDS;
      const bool inside = FULL || token < tokens_left;
      const int64 from = !inside   ? first
                         : IN_LINE ? first + index * 4
                                   : row_of(token) * SCALE_ROW + index % WORDS * 4;
      const uint32 to = stage + index / (TILE * WORDS) * OWN + index % (TILE * WORDS) * 4;
      copy_async_4(to + SCALES_AT, scales + from, inside ? 4 : 0);
      copy_async_4(to + BIASES_AT, biases + from, inside ? 4 : 0);
    }
  }

  static constexpr int RUN = NYB_DECODE_PAGE_RUN, RUNS = STEP / RUN; // of tokens
  static_assert(LEAF <= 32 * RUN);
  // The page of the lane's run of a leaf, as the table has it.
  __device__ __forceinline__ int page_of(int leaf) const {
    const nyb_attention_arguments &call = call_of(*problem.all);
    const int token = leaf * LEAF + (threadIdx.x & 31) % (LEAF / RUN) * RUN;
    if (token >= at.length) return 0;
    return call.page_table[at.batch * call.page_table_stride + (token >> page_shift())];
  }
  __device__ __forceinline__ int page_shift() const { return problem.arguments->page_shift; }
  __device__ __forceinline__ void enter_pages(bool same_pair) {
    const int page = same_pair ? next_page : page_of(at.leaf);
    next_page = page_of(at.leaf + 1);
    const int64 block = max(min(page, call_of(*problem.all).page_count - 1), 0);
    const int token = at.leaf * LEAF + (threadIdx.x & 31) % (LEAF / RUN) * RUN;
    const int64 row = token & ((1 << page_shift()) - 1);
    run_codes = codes + block * stored->codes_stride[0] + row * ROW;
    run_scales = scales + block * stored->scales_stride[0] + row * SCALE_ROW;
    run_biases = biases + block * stored->biases_stride[0] + row * SCALE_ROW;
  }
  // Of the step's run `run`.
  __device__ __forceinline__ const char *of_run(const char *own, int run) const {
    return reinterpret_cast<const char *>(
        __shfl_sync(~0u, reinterpret_cast<uint64>(own), step * RUNS + run));
  }
  __device__ __forceinline__ void copy_pages(uint32 stage) const {
    const int lane = threadIdx.x & 31, held = min(tokens_left, STEP);
    if constexpr (CODES_AT != NONE && ROW % 32 == 0) { // 32 chunks at once are of the same run
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const int tile = run * RUN / TILE;
        const char *from = of_run(run_codes, run) + lane * 16;
        const int left = (held - run * RUN) * ROW - lane * 16;
#pragma unroll
        for (int i = 0; i < ROW / 32; i++) {
          const int rest = left - 512 * i;
          copy_async_16(stage + offset[run % (TILE / RUN) * (ROW / 32) + i] + tile * OWN,
                        from + 512 * i,
                        rest < 0    ? 0
                        : rest > 16 ? 16
                                    : rest);
        }
      }
    } else if constexpr (CODES_AT != NONE) {
#pragma unroll
      for (int i = 0; i < LANE_CHUNKS; i++) {
        const int chunk = min(lane + 32 * i, CHUNKS - 1);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const char *from = of_run(run_codes, tile * TILE / RUN + chunk / ROW) + chunk % ROW * 16;
          const int left = (held - tile * TILE) * ROW - chunk * 16;
          if (CHUNKS % 32 != 0 && lane + 32 * i >= CHUNKS) continue;
          copy_async_16(stage + offset[i] + tile * OWN, from, left < 0 ? 0 : left > 16 ? 16 : left);
        }
      }
    }
    if constexpr (SCALES_AT != NONE) {
#pragma unroll
      for (int i = 0; i < (SCALE_CHUNKS + 31) / 32; i++) {
        const int chunk = min(lane + 32 * i, SCALE_CHUNKS - 1);
        const uint32 to = stage + chunk / TILE_SCALE_CHUNKS * OWN + chunk % TILE_SCALE_CHUNKS * 16;
        const int within = chunk % SCALE_ROW * 16;
        const char *from_scales = of_run(run_scales, chunk / SCALE_ROW) + within;
        const char *from_biases = of_run(run_biases, chunk / SCALE_ROW) + within;
        if (SCALE_CHUNKS % 32 != 0 && lane + 32 * i >= SCALE_CHUNKS) continue;
        int left = held * SCALE_ROW - chunk * 16;
        left = left < 0 ? 0 : left > 16 ? 16 : left;
        if (left % 4 == 0) {
          copy_async_16(to + SCALES_AT, from_scales, left);
          copy_async_16(to + BIASES_AT, from_biases, left);
        } else {
          copy_half_words(to + SCALES_AT, from_scales, left);
          copy_half_words(to + BIASES_AT, from_biases, left);
        }
      }
    }
  }

  // Queues the next step's copies where there is one.
  __device__ __forceinline__ void queue(uint32 stage) {
    if (step == steps && units_left > 1) {
      units_left--;
      const int before = at.leaf;
      problem.advance(at);
      enter_leaf(FEATURED ? at.leaf == before + 1 && at.leaf != at.leaves().leaf_at(0)
                          : at.leaf != 0);
    }
    if (step < steps) {
      if constexpr (!PACKED) {
        copy_strided(stage);
      } else if constexpr (PLACED == NYB_DECODE_SHIFTED) {
        copy_shifted(stage);
      } else if constexpr (PLACED == NYB_DECODE_PAGES) {
        copy_pages(stage);
      } else if (tokens_left >= STEP) {
        copy_packed<true>(stage);
      } else {
        copy_packed<false>(stage);
      }
      step++;
      tokens_left -= STEP;
      if constexpr (PLACED) return;
      codes += PACKED ? STEP * ROW : STEP * stored->codes_stride[2];
      scales += PACKED ? STEP * SCALE_ROW : STEP * stored->scales_stride[2];
      biases += PACKED ? STEP * SCALE_ROW : STEP * stored->biases_stride[2];
    }
  }
};

// ---- Barriers ----------------------------------------------------------------------------------

// The first step's keys have arrived.
__device__ __forceinline__ void first_keys_arrived() { __syncthreads(); }
// A step's weights are there, and what comes after it has arrived. Whether any thread says so.
__device__ __forceinline__ bool weighed(bool yes) { return __syncthreads_or(yes) != 0; }
// The warps that multiply, among themselves.
__device__ __forceinline__ void synchronize_warps() {
  asm volatile("bar.sync 2, %0;" ::"n"(WARPS * 32) : "memory");
}

template <int COUNT>
__device__ __forceinline__ int next_of(int stage) {
  return stage + 1 < COUNT ? stage + 1 : 0;
}

// Each turn queues values and, a step further ahead, keys with V's scales: K of step 0; V of 0, K
// of 1; ... The first STAGES turns fill the stages (the warps may begin after FIRST_TURNS of them),
// then a turn waits for a step to be weighed: that step's keys have been read, and the values of
// the step before. It makes sure first that what the warps go on with has arrived: that step's
// values and the next step's keys.
constexpr int FIRST_TURNS = STAGES < 3 ? STAGES : 3;
__device__ __forceinline__ void copy_all(const nyb_decode_arguments &a, const Problem &problem,
                                         Position at, uint32 units, uint32 shared) {
  Copies<Keys, KEY_SCALE_TYPE, KEY_GROUPS, 0, KEY_SCALES_AT, KEY_BIASES_AT, OWN_BYTES> keys;
  Copies<Values, VALUE_SCALE_TYPE, VALUE_GROUPS, NONE, 0, VALUE_SCALE_BYTES, OWN_VALUE_SCALE_BYTES>
      value_scales;
  Copies<Values, VALUE_SCALE_TYPE, VALUE_GROUPS, VALUES_AT, NONE, NONE, OWN_BYTES> values;
  keys.start(problem, a.k, at, units);
  value_scales.start(problem, a.v, at, units);
  values.start(problem, a.v, at, units);
  int steps = end_step_of(at) - first_step_of(at), value_stage = STAGES - 1, key_stage = 0,
      scale_stage = 0;
  for (int turn = -STAGES;; turn += turn < 0) {
    if (turn >= 0) {
      if (steps == 0) {
        if (--units == 0) break;
        problem.advance(at);
        steps = end_step_of(at) - first_step_of(at);
      }
      steps--;
      wait_for_copies<2 * STAGES - 4>();
      weighed(false);
    }
    if (turn > -STAGES) {
      values.queue(shared + value_stage * STAGE_BYTES);
      end_copy_group();
    }
    keys.queue(shared + key_stage * STAGE_BYTES);
    value_scales.queue(shared + VALUE_SCALES_AT + scale_stage * SCALE_STAGE_BYTES);
    end_copy_group();
    value_stage = key_stage;
    key_stage = next_of<STAGES>(key_stage);
    scale_stage = next_of<SCALE_STAGES>(scale_stage);
    if (turn == FIRST_TURNS - STAGES - 1) {
      wait_for_copies<2 * FIRST_TURNS - 2>();
      first_keys_arrived();
    }
  }
  wait_for_copies<0>();
}

// ---- What a query row sees ----------------------------------------------------------------------

// Of FEATURED: whether scores are more than products, and what a row of the tile must know for it.
__device__ __forceinline__ bool changes_scores(const nyb_attention_arguments &call) {
  return call.softcap != 0.0f || call.slopes != nullptr;
}
constexpr int UNUSED_ROW = 0x7fffffff; // where such a one's sight ends
struct Sight {
  int end, begin, keep_end; // sees [begin, end), and before keep_end
  int position;
  float slope, unit; // natural units of the products' unit
  int64 mask_offset; // to its row of the mask's array

  // row: of the tile's KV head, or -1: one that is not in use, and sees all.
  __device__ __forceinline__ void find(const Arguments &arguments, const Position &at, int row,
                                       int first_head, float natural_unit) {
    const nyb_decode_arguments &a = decode_of(arguments);
    const nyb_attention_arguments &call = call_of(arguments);
    const nyb_sequence sequence = nyb_sequence_of(&call, at.batch);
    const int used = max(row, 0), head = first_head + used / a.query_len;
    const int query_row = used % a.query_len;
    const nyb_row_sight of_row = nyb_row_sight_of(&call, &sequence, query_row);
    end = row < 0 ? UNUSED_ROW : of_row.end;
    begin = row < 0 ? 0 : of_row.begin;
    keep_end = row < 0 ? 0x7fffffff : of_row.keep_end;
    position = static_cast<int>(nyb_position_of(&call, &sequence, query_row));
    slope = call.slopes != nullptr ? call.slopes[head] : 0.0f;
    unit = natural_unit;
    mask_offset =
        call.mask_kind != 0 ? nyb_mask_offset(&call, &sequence, at.batch, head, query_row) : 0;
  }
  static __device__ __forceinline__ uint32 word_of(uint32 shared, int word, int column) {
    return shared + VISIBLE_AT + (word * COLUMNS + column) * 4;
  }
  __device__ __forceinline__ void store(uint32 shared, int column) const {
    const uint32 words[8] = {
        static_cast<uint32>(end),         static_cast<uint32>(begin),
        static_cast<uint32>(keep_end),    static_cast<uint32>(position),
        __float_as_uint(slope),           __float_as_uint(unit),
        static_cast<uint32>(mask_offset), static_cast<uint32>(mask_offset >> 32)};
#pragma unroll
    for (int word = 0; word < 8; word++)
      store_float_shared(word_of(shared, word, column), __uint_as_float(words[word]));
  }
  __device__ __forceinline__ bool shows(int token) const {
    return token < end && (token < keep_end || token >= begin);
  }
};

// Which of its tokens a lane's columns see, token i and column j: all; those before a token; all
// but some, which have bit 2 * N_TILES * i + j.
using Hidden = uint32;
struct SeenWhole {
  __device__ __forceinline__ bool shows(int, int) const { return true; }
};
struct SeenUntil {
  const int *visible;
  int first;               // the lane's first token
  __device__ __forceinline__ SeenUntil(const int *ends, int token) : visible(ends), first(token) {}
  __device__ __forceinline__ bool shows(int i, int j) const { return first + i < visible[j]; }
};
struct SeenBut {
  Hidden hidden;
  __device__ __forceinline__ explicit SeenBut(Hidden bits) : hidden(bits) {}
  __device__ __forceinline__ bool shows(int i, int j) const {
    return (hidden >> (2 * N_TILES * i + j) & 1) == 0;
  }
};

// ---- The query rows of a pair -------------------------------------------------------------------

// The elements that a lane holds come in runs of so many neighbours.
constexpr int QUERY_RUN = Keys::BY_UNITS ? 32 / KEY_BITS : KEY_LANE_DIMS;

struct Queries {
  const nyb_attention_arguments *call; // FEATURED
  // Of columns 2 * (lane % 4) and the next.
  float sum[HOLD_SUMS ? LANE_SUMS : 1][2 * N_TILES]; // of a group of the lane's parts, in the
                                                      // products' unit
  float held_unit[HOLD_UNITS ? 2 * N_TILES : 1];      // products' unit times this: log2 units
                                                  // (ROUND_SCORES: natural ones)
  int visible_to_all; // [0, this), of FEATURED only what is behind begin_of_all or before
                       // keep_of_all
  int begin_of_all, keep_of_all;

  // The N side of two steps: words for step `step` (even) and the next, for each tile of columns.
  static __device__ __forceinline__ uint32 fragment_address(uint32 queries, int step, int n) {
    return queries + (((step / 2) * N_TILES + n) * 32 + (threadIdx.x & 31)) * 16;
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
    const int head = at.pair / a.row_tiles, first_row = at.pair % a.row_tiles * COLUMNS;
    const int rows = a.heads_per_kv * a.query_len;
    const float scale = ROUND_SCORES ? round_to<QUERY_TYPE>(a.scale) : a.scale;
    // Steps 2 * (warp + i * WARPS) and the next; slots 0 and 2, then 1 and 3.
    uint32 words[N_TILES][SHARE][2][2];
    const auto step_of = [&](int i, int t) { return 2 * (warp + i * WARPS) + t; };
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + (n * 8 + (lane >> 2)) % USED;
      const int query_head = head * a.heads_per_kv + row / a.query_len;
      const char *q = a.q + at.batch * a.q_stride[0] + query_head * a.q_stride[1] +
                      row % a.query_len * a.q_stride[2];
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
      float own_unit = unit_of(ROUND_SCORES ? 1.0f : fabsf(a.scale) * 1.44269504088896341f);
      int own_visible = at.length;
      if (a.causal != 0) own_visible = max(at.length - a.query_len + row % a.query_len + 1, 0);
      if (row >= rows) own_visible = 0x7fffffff;
#if FEATURED
      const float natural_unit = ROUND_SCORES ? own_unit : unit_of(fabsf(a.scale));
      Sight sight;
      sight.find(arguments, at, row < rows ? row : -1, head * a.heads_per_kv, natural_unit);
      own_visible = sight.end;
      if (c == 0 && warp == 0) sight.store(shared, n * 8 + (lane >> 2));
      if (changes_scores(call_of(arguments)) && !ROUND_SCORES) own_unit = 1;
      int last_begin = sight.begin, least_keep = sight.keep_end;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        last_begin = max(last_begin, __shfl_xor_sync(~0u, last_begin, distance));
        least_keep = min(least_keep, __shfl_xor_sync(~0u, least_keep, distance));
      }
      begin_of_all = n == 0 ? last_begin : max(begin_of_all, last_begin);
      keep_of_all = n == 0 ? least_keep : min(keep_of_all, least_keep);
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
      int least = own_visible;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        least = min(least, __shfl_xor_sync(~0u, least, distance));
      visible_to_all = min(visible_to_all, least);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int from = (2 * c + j) % USED * 4;
        if constexpr (HOLD_UNITS) held_unit[2 * n + j] = __shfl_sync(~0u, own_unit, from);
      }
    }
    synchronize_warps();
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
      const int column = j / 2 * 8 + 2 * (threadIdx.x & 3) % USED + j % 2;
      visible[j] = static_cast<int>(load_word(shared + VISIBLE_AT + column * 4));
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

// ---- One leaf -----------------------------------------------------------------------------------

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

// Sums are in units of 2^maximum, for each column: a bound on the scores so far, with room above so
// that it seldom has to be raised. Weights times V's scales are brought into the range of f16 by a
// power of two for each group, which follows the largest finite scale.
constexpr float HEADROOM = 2; // log2 units
constexpr int VALUE_HEADROOM = 1;
constexpr int NO_VALUES = -120; // below every exponent
constexpr float SEEN = 1.17549435e-38f; // 2^-126: lost in every sum that has a weight of note
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
  __device__ __forceinline__ void set_exponent(int group, int exponent, const Addresses &where) {
    if constexpr (HOLD_EXPONENTS) {
      value_exponent[group] = exponent;
    } else if ((threadIdx.x & 31) == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(where.grows + group * 4),
                   "r"(grow_bits(exponent))
                   : "memory");
    }
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
    if constexpr (!HOLD_EXPONENTS) __syncwarp();
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) set_exponent(g, NO_VALUES, where);
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
          multiply_keys(products, ((own + part) * PART_GROUPS + g) * GROUP_STEPS, GROUP_STEPS,
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
                                                       int count, uint32 stage, uint32 queries,
                                                       const Addresses &where) {
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
    uint32 words[HALVES][4], fragment[N_TILES][4];
#pragma unroll
    for (int step = first; step < first + count; step++) {
      if (step % 2 == 0 || step == first) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          load_words<16>(fragment[n], Queries::fragment_address(
                                          WARP_PARTS > 1 ? where.fragments : queries, step, n));
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
    q.load_units(unit, shared);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      highest[j] = scores[0][j / 2][j % 2];
#pragma unroll
      for (int i = 1; i < KEPT; i++) highest[j] = fmaxf(highest[j], scores[i][j / 2][j % 2]);
      if constexpr (!ROUND_SCORES) highest[j] *= unit[j];
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
        if (!FEATURED || (unseen >> i & 1) == 0) largest[g] = fmaxf(largest[g], scale);
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
  // The block's maxima, for two warps that share a tile: of columns, and of V's finite scales.
  static __device__ __forceinline__ void tell_highest(const float *highest,
                                                      const float *largest_scale, uint32 raised) {
    const int lane = threadIdx.x & 31, c = lane & 3;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      float top = highest[j];
#pragma unroll
      for (int distance = NEXT_ROW; distance < 32; distance *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
      if (lane < NEXT_ROW) raise_word(raised + (j / 2 * 8 + 2 * c + j % 2) * 4, to_ordered(top));
    }
    uint32 own = 0;
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      const float finite = largest_scale[g] == infinity() ? 0.0f : largest_scale[g];
      const uint32 largest = __reduce_max_sync(~0u, to_ordered(finite));
      own = lane == g ? largest : own;
    }
    if (lane < VALUE_GROUPS) raise_word(raised + (COLUMNS + lane) * 4, own);
  }

  // Moves maxima (whole log2 units) and the exponents of V's scales up to this step's. A barrier.
  // raised_buffer: RAISED_BUFFERS' turn.
  __device__ __forceinline__ void raise(const float (*scores)[N_TILES][2], const Queries &q,
                                        uint32 scales_at, uint32 unseen, uint32 shared,
                                        const Addresses &where, int &raised_buffer) {
    ValueScales scales;
    scales.load(scales_at + where.value_scales);
    float highest[2 * N_TILES], largest_scale[VALUE_GROUPS];
    highest_of(highest, scores, q, shared);
    largest_scales(largest_scale, scales, unseen);
    const uint32 thread = thread_here();
    const int lane = thread & 31, c = lane & 3, warp = thread >> 5;
    const uint32 raised =
        shared + RAISED_AT + (RAISED_BUFFERS > 1 ? raised_buffer * RAISED_BYTES : 0);
    if constexpr (RAISED_BUFFERS > 1) {
      tell_highest(highest, largest_scale, raised);
    } else {
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
        for (int distance = FEATURED ? 1 : NEXT_ROW; distance < 32; distance *= 2)
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
    float value_factor[VALUE_GROUPS];
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      const int highest = max(exponent_of(largest_of_block(COLUMNS + g)), -100);
      const int before = exponent(g, where);
      const int after = highest > before ? min(highest + VALUE_HEADROOM, 127) : before;
      if constexpr (!HOLD_EXPONENTS) __syncwarp();
      set_exponent(g, after, where);
      value_factor[g] = rescale_factor(static_cast<float>(before - after));
    }
    if constexpr (!HOLD_EXPONENTS) __syncwarp();
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      float top = largest_of_block(j / 2 * 8 + 2 * c % USED + j % 2);
      top = top <= maximum[j] ? maximum[j] : ceilf(top) + HEADROOM;
      const float factor = maximum[j] == top ? 1.0f : rescale_factor(maximum[j] - top);
      maximum[j] = top;
      if (first) continue;
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        sum[set][j] *= factor;
#pragma unroll
        for (int g = 0; g < BIAS_GROUPS; g++) bias[g][set][j] *= factor;
      }
#pragma unroll
      for (int piece = 0; piece < WARP_PIECES; piece++) {
        const float out_factor =
            factor * of_group(value_factor, group_of_piece(where.dim_warp, piece));
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
                                        int first, Hidden hidden, const Addresses &where) const {
    float unit[2 * N_TILES];
    if constexpr (!ROUND_SCORES) q.load_units(unit, shared);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const float base = maximum[j] == -infinity() ? 0.0f : maximum[j];
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float score = scores[i][j / 2][j % 2];
        weights[i][j / 2][j % 2] =
            exp2_fast(ROUND_SCORES ? score - base : fmaf(score, unit[j], -base));
      }
    }
    if constexpr (WARP_PARTS > 1)
      store_words<N_TILES * 2>(where.store_floats + weights_at, weights[0][0]);
    int visible[2 * N_TILES];
    if constexpr (MASKED && !FEATURED) Queries::load_visible(visible, shared);
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
      } else if constexpr (!FEATURED) {
        scale_weights(words, weights, scales, g, grow, SeenUntil(visible, first));
      } else if (hidden == 0) {
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
                                              uint32 shared, int first, Hidden hidden,
                                              const Addresses &where) {
    ValueScales biases;
    biases.load(scales_at + where.value_scales + VALUE_SCALE_BYTES);
    int visible[2 * N_TILES];
    if constexpr (MASKED && !FEATURED) Queries::load_visible(visible, shared);
    if constexpr (!MASKED) {
      add_weights_of(weights, biases, SeenWhole());
    } else if constexpr (!FEATURED) {
      add_weights_of(weights, biases, SeenUntil(visible, first));
    } else if (hidden == 0) {
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
        // That a token has been seen shows where its score is -inf, too.
        sum[i / SET_TOKENS][j] += FEATURED && seen ? weight + SEEN : weight;
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
      if (FEATURED && (unseen >> i & 1) != 0) continue;
      const float scale = fabsf(scales.at(i, group));
      largest = fmaxf(largest, scale == infinity() ? 0.0f : scale);
    }
    return largest;
  }

  // ---- FEATURED
  static __device__ __forceinline__ int column_of(int j) {
    return j / 2 * 8 + 2 * (threadIdx.x & 3) % USED + j % 2;
  }
  static __device__ __forceinline__ int sight_word(uint32 shared, int word, int j) {
    return static_cast<int>(load_word(Sight::word_of(shared, word, column_of(j))));
  }
  static __device__ __forceinline__ Sight sight_of(uint32 shared, int j) {
    Sight sight;
    sight.end = sight_word(shared, 0, j);
    sight.begin = sight_word(shared, 1, j);
    sight.keep_end = sight_word(shared, 2, j);
    return sight;
  }
  // Bytes of an array of bools; 1 where there is none.
  static __device__ __forceinline__ void load_mask(uint8 (*shown)[2 * N_TILES], const Queries &q,
                                                   uint32 shared, int first, bool masked) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) shown[i][j] = 1;
    }
    const nyb_attention_arguments &call = *q.call;
    if (!masked || call.mask_kind == 0) return;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const Sight sight = sight_of(shared, j);
      const int64 offset = static_cast<uint32>(sight_word(shared, 6, j)) |
                           static_cast<int64>(sight_word(shared, 7, j)) << 32;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        if (sight.end != UNUSED_ROW && first + i < sight.end)
          shown[i][j] = static_cast<uint8>(call.mask_array[offset + first + i]);
      }
    }
  }
  // Products to scores, where they are more.
  static __device__ __forceinline__ void change_scores(float (*scores)[N_TILES][2],
                                                       const Queries &q, uint32 shared, int first) {
    if (!ROUND_SCORES && !changes_scores(*q.call)) return;
    nyb_attention_arguments call; // what the functions below look at, as far as it is constant
    call.round_to = ROUND_SCORES ? QUERY_TYPE : F32;
    call.softcap = q.call->softcap;
    call.slopes = q.call->slopes;
    const float softcap_reciprocal = q.call->softcap_reciprocal;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const float unit = __int_as_float(sight_word(shared, 5, j));
      const float slope = __int_as_float(sight_word(shared, 4, j));
      const int position = sight_word(shared, 3, j);
      // The way back to the lane's first token, as a float, is exact: so are its neighbours'.
      const int past = static_cast<int>(static_cast<uint32>(position) - static_cast<uint32>(first));
      const bool exact = past >= KEPT && past < 1 << 24;
      const float distance = static_cast<float>(past);
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        float &score = scores[i][j / 2][j % 2];
        score *= unit;
        if constexpr (ROUND_SCORES) score = round_to<QUERY_TYPE>(score);
        if (call.softcap != 0.0f)
          score = nyb_capped_score(&call, __fmul_rn(score, softcap_reciprocal));
        if (call.slopes != nullptr) {
          score = exact ? nyb_score_at(&call, score, slope, distance - i)
                        : nyb_sloped_score(&call, score, slope, position, first + i);
        }
        score = __fmul_rn(score, 1.44269504088896341f);
      }
    }
  }
  // -inf where a row does not see a token.
  static __device__ __forceinline__ Hidden hide(float (*scores)[N_TILES][2], uint32 &unseen,
                                                const uint8 (*shown)[2 * N_TILES], uint32 shared,
                                                int first) {
    Hidden hidden = 0;
    unseen = (1u << KEPT) - 1;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const Sight sight = sight_of(shared, j);
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        if (sight.shows(first + i) && shown[i][j] != 0) {
          if (sight.end != UNUSED_ROW) unseen &= ~(1u << i);
          continue;
        }
        scores[i][j / 2][j % 2] = -infinity();
        hidden |= 1u << (2 * N_TILES * i + j);
      }
    }
    return hidden;
  }

  // A part of the scores of the lane's tokens.
  template <bool MASKED>
  __device__ __forceinline__ void score_parts(float (*parts)[N_TILES][2], const Queries &q,
                                              uint32 stage, uint32 shared, bool masked,
                                              const Addresses &where) const {
    KeyScales scales, biases;
    scales.load(stage + where.key_scales + KEY_SCALES_AT);
    biases.load(stage + where.key_scales + KEY_BIASES_AT);
    score(parts, q, scales, biases, stage, shared + QUERIES_AT, where);
    // A softcap would make a number of any infinite score.
    const bool may_hide = FEATURED ? masked || q.call->softcap != 0.0f : MASKED;
    if (may_hide || may_be_minus_infinity(parts)) poison(parts, scales, biases);
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
  template <bool MASKED>
  __device__ __forceinline__ void score_tile(float (*scores)[N_TILES][2], Hidden &hidden,
                                             uint32 &unseen,
                                             const Queries &q, uint32 stage, uint32 shared,
                                             int first, bool masked, const Addresses &where) const {
    uint8 shown[KEPT][2 * N_TILES];
    if constexpr (FEATURED) load_mask(shown, q, shared, first, masked);
    float parts[LANE_TOKENS][N_TILES][2];
    score_parts<MASKED>(parts, q, stage, shared, masked, where);
    add_parts(scores, parts);
    if constexpr (FEATURED) {
      change_scores(scores, q, shared, first);
      hidden = unseen = 0;
      if (masked) hidden = hide(scores, unseen, shown, shared, first);
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
    score_parts<MASKED>(parts, q, stage, shared, MASKED, where);
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
  bool masked;              // FEATURED: some row may not see all of it
  Hidden hidden;            // from which rows
  uint32 unseen;            // bit i: from all of the lane's
  float scores[KEPT][N_TILES][2], weights[KEPT][N_TILES][2]; // of the tokens that the lane keeps

  __device__ __forceinline__ int first_of_lane() const {
    return WARP_PARTS == 1 ? first : first + tile_of_warp() * TILE + lane_token();
  }
  template <bool MASKED>
  __device__ __forceinline__ void score(const Leaf &leaf, const Queries &q, uint32 shared,
                                        const Addresses &where) {
    leaf.score_tile<MASKED>(scores, hidden, unseen, q, stage, shared, first_of_lane(), masked, where);
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
                              hidden, where);
  }
  template <bool MASKED>
  __device__ __forceinline__ void add_to(Leaf &leaf, uint32 shared, const Addresses &where) const {
    if constexpr (WARP_PARTS > 1) {
      leaf.add_float_weights<MASKED>(scales_at, weights_at, shared, first, where);
    } else {
      leaf.add_weights<MASKED>(weights, scales_at, shared, first, hidden, where);
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

// ---- Subtrees of leaves -------------------------------------------------------------------------

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
      const float maximum = fmaxf(left.maximum[j], right.maximum[j]);
      const float left_factor = rescale_factor(left.maximum[j] - maximum);
      const float right_factor = rescale_factor(right.maximum[j] - maximum);
      right.sum[j] = left.sum[j] * left_factor + right.sum[j] * right_factor;
      right.maximum[j] = maximum;
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
#pragma unroll
        for (int k = j % 2; k < 4; k += 2) {
          right.out[i][j / 2][k] =
              left.out[i][j / 2][k] * left_factor + right.out[i][j / 2][k] * right_factor;
        }
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
                                                                STAGES, COLUMNS, ROWS, FEATURED));

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
// first: there is none before.
template <bool MASKED>
__device__ __forceinline__ void go_on(Leaf &leaf, Step &before, Step &step, const Queries &q,
                                      uint32 shared, const Addresses &where, bool first = false) {
  if (!first) before.add_to<MASKED>(leaf, shared, where);
  step.score<MASKED>(leaf, q, shared, where);
  const bool raises = first || step.raises(leaf, q, shared, where);
  if (!first) step.weigh<MASKED>(leaf, q, shared, where);
  if (weighed(raises)) {
    int only_buffer = 0;
    leaf.raise(step.scores, q, step.scales_at, step.unseen, shared, where, only_buffer);
    step.weigh<MASKED>(leaf, q, shared, where);
    synchronize_warps();
  }
}

// The same where two warps share a tile, up to the barrier: neither waits for the other's scores
// before it has summed the step before. Whether a maximum was too low; first: there is none yet.
template <bool MASKED>
__device__ __forceinline__ bool go_on_by_parts(Leaf &leaf, const Step &before, Step &step,
                                               const Queries &q, uint32 shared,
                                               const Addresses &where, bool first) {
  step.score_part<MASKED>(leaf, q, shared, where);
  if (!first) before.add_to<MASKED>(leaf, shared, where);
  step.add_other_part<MASKED>(q, shared, where);
  if (first) return true;
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
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int warp = threadIdx.x >> 5;
  const uint32 shared = static_cast<uint32>(__cvta_generic_to_shared(shared_memory));
  const Problem problem = {&arguments, &a};
  const uint32 units = problem.units();
  const Runs runs(units, gridDim.x);
  const uint32 begin = runs.begin_of(blockIdx.x), end = runs.begin_of(blockIdx.x + 1);
  if (begin == end) return;
  Position at = problem.find(begin);
  if (warp == WARPS) {
    copy_all(a, problem, at, end - begin, shared);
    return;
  }

  Addresses where;
  where.start(shared);
  Queries q;
#if FEATURED
  q.call = &call_of(arguments);
#endif
  Leaf leaf;
  Combiner combiner;
  combiner.shared = shared;
  combiner.valid = 0;
  int stage = 0, scale_stage = 0, buffer = 0, raised_buffer = 0;
  if constexpr (RAISED_BUFFERS > 1) Leaf::clear_raised(shared, raised_buffer);
  enum { SAME_PAIR, NEW_PAIR, FIRST_PAIR };
  int entry = FIRST_PAIR;
  for (uint32 unit = begin, units_end = end; unit < units_end; unit++) {
    if (entry != SAME_PAIR) q.load(arguments, at, shared);
    if (entry == FIRST_PAIR) first_keys_arrived();
    leaf.clear(where);
    const int first_step = first_step_of(at), steps = end_step_of(at);
    const int leaf_token = at.leaf * LEAF;
    if constexpr (WARP_PARTS > 1) park({at, unit, units_end, combiner.valid}, shared);
    Step step;
    const auto seen_whole = [&](int index) {
      const int end = leaf_token + (index + 1) * STEP;
      if constexpr (FEATURED) {
        if (q.call->mask_kind != 0 || (end - STEP < q.begin_of_all && end > q.keep_of_all))
          return false;
      }
      return end <= q.visible_to_all;
    };
    const auto enter = [&](int index) {
      step.stage = shared + stage * STAGE_BYTES;
      step.scales_at = shared + VALUE_SCALES_AT + scale_stage * SCALE_STAGE_BYTES;
      step.weights_at = buffer * WEIGHT_STEP_BYTES;
      step.first = leaf_token + index * STEP;
      if constexpr (WARP_PARTS == 1) step.first += warp * TILE + lane_token();
      if constexpr (FEATURED) step.masked = !seen_whole(index);
      stage = next_of<STAGES>(stage);
      scale_stage = next_of<SCALE_STAGES>(scale_stage);
      buffer ^= 1;
    };
    if constexpr (WARP_PARTS > 1) { // one code for all steps: instruction caches are small
      for (int index = 0; index < steps; index++) {
        const Step before = step;
        enter(index);
        const bool whole = seen_whole(index), first = index == 0;
        const bool raises = whole
                                ? go_on_by_parts<false>(leaf, before, step, q, shared, where, first)
                                : go_on_by_parts<true>(leaf, before, step, q, shared, where, first);
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
    } else if constexpr (FEATURED) { // one code for all steps, as above
      for (int index = first_step; index < steps; index++) {
        Step before = step;
        enter(index);
        go_on<true>(leaf, before, step, q, shared, where, index == first_step);
      }
    } else {
      enter(0);
      if (seen_whole(0)) {
        begin_leaf<false>(leaf, step, q, shared, where);
      } else {
        begin_leaf<true>(leaf, step, q, shared, where);
      }
      for (int index = 1; index < steps; index++) {
        Step before = step;
        enter(index);
        if (seen_whole(index)) {
          go_on<false>(leaf, before, step, q, shared, where);
        } else {
          go_on<true>(leaf, before, step, q, shared, where);
        }
      }
    }
    step.add_to<true>(leaf, shared, where);
    if constexpr (WARP_PARTS > 1) {
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
        FEATURED ? at.leaf + 1 == leaves.end || leaves.begin == leaves.end : last;
    entry = leaves_pair ? NEW_PAIR : SAME_PAIR;
    if (unit + 1 < units_end) problem.advance(at);
  }
}
