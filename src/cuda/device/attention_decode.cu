// SPDX-License-Identifier: Apache-2.0
// Attention of a few query rows over a long quantized cache.
//
// Tokens stand on the M side of the tensor cores' 16x8x16 product, the query rows that share a KV
// head on its N side. Codes stay integers: a field of a packed word, masked in place, is a
// subnormal f16 number, code * 2^(position - 24), exactly; queries carry the other power of two.
// Scales and biases come after the product, once for each token and group.
//
// The tokens of a sequence are cut into blocks of 4 leaves of LEAF_TOKENS tokens, a leaf a warp. A
// leaf is summed in order; leaves and blocks are added along a fixed binary tree over token
// positions. Maxima are whole numbers of log2 units, so that all rescaling is by powers of two and
// exact: where the tree is cut between blocks of threads changes no bit. Blocks are dealt out in
// equal contiguous runs over the whole grid, and each warp keeps its ring of copies full across
// them.
//
// Parameters of a specialisation (-D): KEY_DIM, VALUE_DIM, KEY_BITS, VALUE_BITS, KEY_GROUP,
// VALUE_GROUP, QUERY_TYPE (of q: F16 or BF16), KEY_SCALE_TYPE, VALUE_SCALE_TYPE (dtypes), COLUMNS
// (query rows at once, 8 or 16), ROWS (of them, those that may be in use), ROUND_SCORES (NYB_ROUNDING_MLX), PACKED (1: tokens of a head are
// contiguous and start at multiples of 16 bytes; 0: any strides).
#include "attention_decode.cuh"

#if !defined(KEY_DIM) || !defined(VALUE_DIM) || !defined(KEY_BITS) || !defined(VALUE_BITS) || \
    !defined(KEY_GROUP) || !defined(VALUE_GROUP) || !defined(QUERY_TYPE) ||                   \
    !defined(KEY_SCALE_TYPE) || !defined(VALUE_SCALE_TYPE) || !defined(COLUMNS) ||            \
    !defined(ROWS) || !defined(ROUND_SCORES) || !defined(PACKED)
#error "a parameter of attention_decode is missing"
#endif

constexpr int WARPS = 4, LEAF_TOKENS = 128, BLOCK_TOKENS = NYB_DECODE_BLOCK_TOKENS;
static_assert(WARPS * LEAF_TOKENS == BLOCK_TOKENS);
constexpr int KEY_ROW = KEY_DIM * KEY_BITS / 8, VALUE_ROW = VALUE_DIM * VALUE_BITS / 8;
constexpr int KEY_GROUPS = KEY_DIM / KEY_GROUP, VALUE_GROUPS = VALUE_DIM / VALUE_GROUP;
constexpr int N_TILES = COLUMNS / 8;
#ifndef TILE_TOKENS
#define TILE_TOKENS NYB_DECODE_TILE(KEY_ROW, VALUE_ROW)
#endif
#ifndef STAGES
#define STAGES NYB_DECODE_STAGES
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS \
  NYB_DECODE_MIN_BLOCKS(KEY_DIM, VALUE_DIM, KEY_GROUPS, VALUE_GROUPS, COLUMNS)
#endif
constexpr int TILE = TILE_TOKENS, HALVES = TILE / 16;
// A lane's rows of the products, lane/4 and lane/4 + 8 of each half, are neighbouring tokens.
constexpr int LANE_TOKENS = TILE / 8;

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A stage of a warp's ring, in bytes.
constexpr int KEY_SCALE_BYTES = round_up(TILE * KEY_GROUPS * bytes_of(KEY_SCALE_TYPE), 16);
constexpr int VALUE_SCALE_BYTES = round_up(TILE * VALUE_GROUPS * bytes_of(VALUE_SCALE_TYPE), 16);
constexpr int VALUES_AT = round_up(TILE * KEY_ROW, 16);
constexpr int KEY_SCALES_AT = VALUES_AT + round_up(TILE * VALUE_ROW, 16);
constexpr int KEY_BIASES_AT = KEY_SCALES_AT + KEY_SCALE_BYTES;
constexpr int VALUE_SCALES_AT = KEY_BIASES_AT + KEY_SCALE_BYTES;
constexpr int VALUE_BIASES_AT = VALUE_SCALES_AT + VALUE_SCALE_BYTES;
constexpr int STAGE_BYTES = VALUE_BIASES_AT + VALUE_SCALE_BYTES;
// Behind the rings: what the warps hand each other at the end of a block of tokens.
constexpr int EXCHANGE_ROW = VALUE_DIM + 4; // floats; the 4 keep rows on different banks
constexpr int STATISTICS_AT = round_up(WARPS * STAGES * STAGE_BYTES + 16, 16);
// The query rows as the products' N side, for each warp.
constexpr int QUERY_BYTES = NYB_DECODE_QUERY_BYTES(KEY_DIM, COLUMNS);
constexpr int QUERIES_AT = STATISTICS_AT + 2 * WARPS * COLUMNS * 4;
constexpr int EXCHANGE_AT = QUERIES_AT + WARPS * QUERY_BYTES;
// Then a row of each warp's, and of each subtree that waits.
constexpr int WAITING_AT = EXCHANGE_AT + WARPS * ROWS * EXCHANGE_ROW * 4;
static_assert(WAITING_AT + NYB_DECODE_LEVELS * ROWS * EXCHANGE_ROW * 4 ==
              NYB_DECODE_SHARED_BYTES(KEY_DIM, VALUE_DIM, KEY_BITS, VALUE_BITS, KEY_GROUP,
                                      VALUE_GROUP, bytes_of(KEY_SCALE_TYPE),
                                      bytes_of(VALUE_SCALE_TYPE), TILE, STAGES, COLUMNS, ROWS));

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
  // Tokens lie in the order of the products' rows: eight that are LANE_TOKENS apart, then the next.
  static __device__ __forceinline__ int slot(int token) {
    return BY_UNITS ? token % LANE_TOKENS * 8 + token / LANE_TOKENS : token;
  }
  // Of the product's row `row` (0 to 15) of a half.
  static __device__ __forceinline__ int slot_of_row(int half, int row) {
    return BY_UNITS ? half * 16 + row : row % 8 * LANE_TOKENS + half * 2 + row / 8;
  }
  // The unit index is xored with a function of the slot, so that eight slots' units lie on
  // different banks.
  static __device__ __forceinline__ int swizzle(int slot) {
    if constexpr (!BY_UNITS || UNITS % 2 != 0) return 0;
    if constexpr (UNITS % 8 == 0) return slot & 7;
    if constexpr (UNITS % 4 == 0) return slot >> 1 & 3;
    return slot >> 2 & 1;
  }
  // Where the 16-byte chunk of a packed tile goes.
  static __device__ __forceinline__ int chunk_offset(int chunk) {
    if constexpr (!BY_UNITS) return chunk * 16;
    const int at = slot(chunk / UNITS);
    return at * ROW + ((chunk % UNITS ^ swizzle(at)) << 4);
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
  const int low_next = low_byte < 3 ? low_byte + 1 : 3, high_next = high_byte < 3 ? high_byte + 1 : 3;
  uint32 word = __byte_perm(low_word, high_word,
                            low_byte | low_next << 4 | (high_byte + 4) << 8 | (high_next + 4) << 12);
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
    for (int i = 0; i <= WORDS; i++) words[i] = load_word(address + 4 * i);
#pragma unroll
    for (int i = 0; i < WORDS; i++) run[i] = __funnelshift_r(words[i], words[i + 1], at & 31);
  }
}

// The codes of a group that one lane holds, on either side, and how they are ordered.
constexpr int KEY_LANE_DIMS = KEY_GROUP / 4;
constexpr int VALUE_SPAN = Values::BY_UNITS ? Values::UNIT_DIMS : VALUE_GROUP; // a row of lanes'
constexpr int VALUE_LANE_DIMS = VALUE_SPAN / 8;

// Step `step` of the products along head_dim: which of its elements a lane holds in slot 0 to 3, and
// at which power of two the code stands there.
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

// ---- Scales and biases of a lane's tokens ---------------------------------------------------------

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

template <int DTYPE, int GROUPS>
struct PerGroup {
  static constexpr int BYTES = LANE_TOKENS * GROUPS * bytes_of(DTYPE);
  uint32 words[BYTES / 4];
  __device__ __forceinline__ void load(uint32 array) {
    load_words<BYTES>(words, array + (threadIdx.x >> 2 & 7) * BYTES);
  }
  // i: 0 or 1, for the row lane/4 or lane/4 + 8 of the half.
  __device__ __forceinline__ float at(int half, int i, int group) const {
    const int index = (half * 2 + i) * GROUPS + group;
    if constexpr (DTYPE == F32) return __uint_as_float(words[index]);
    return index % 2 == 0 ? low_of<DTYPE>(words[index / 2]) : high_of<DTYPE>(words[index / 2]);
  }
};
using KeyScales = PerGroup<KEY_SCALE_TYPE, KEY_GROUPS>;
using ValueScales = PerGroup<VALUE_SCALE_TYPE, VALUE_GROUPS>;

// ---- Where a block of threads is in its run of blocks of tokens -----------------------------------

struct Position {
  int batch, pair; // pair: KV head and tile of query rows within the sequence
  int block, blocks, length;
};

struct Problem {
  const nyb_decode_arguments *arguments;
  int pairs; // of a sequence

  __device__ __forceinline__ int length_of(int batch) const {
    const int length = arguments->lengths[batch];
    return length < 0                            ? 0
           : length > arguments->capacity_tokens ? static_cast<int>(arguments->capacity_tokens)
                                                 : length;
  }
  __device__ __forceinline__ static int blocks_of(int length) {
    return (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  }
  // All blocks of all pairs: the host takes another kernel where they are 2^31 or more.
  __device__ __forceinline__ uint32 units() const {
    uint32 blocks = 0;
    for (int batch = threadIdx.x & 31; batch < arguments->batch; batch += 32)
      blocks += blocks_of(length_of(batch));
    for (int distance = 16; distance > 0; distance /= 2)
      blocks += __shfl_xor_sync(~0u, blocks, distance);
    return blocks * pairs;
  }
  __device__ __forceinline__ void enter_sequence(Position &at, int batch) const {
    at.batch = batch;
    at.length = length_of(batch);
    at.blocks = blocks_of(at.length);
  }
  __device__ __forceinline__ Position find(uint32 unit) const {
    Position at;
    for (int batch = 0;; batch++) {
      enter_sequence(at, batch);
      const uint32 here = static_cast<uint32>(at.blocks) * pairs;
      if (unit < here) break;
      unit -= here;
    }
    at.pair = static_cast<int>(unit / static_cast<uint32>(at.blocks));
    at.block = static_cast<int>(unit % static_cast<uint32>(at.blocks));
    return at;
  }
  // To the next one, which exists.
  __device__ __forceinline__ void advance(Position &at) const {
    if (++at.block < at.blocks) return;
    at.block = 0;
    if (++at.pair < pairs) return;
    at.pair = 0;
    do enter_sequence(at, at.batch + 1);
    while (at.blocks == 0);
  }
};

__device__ __forceinline__ int tiles_of_leaf(const Position &at, int warp) {
  const int left = at.length - at.block * BLOCK_TOKENS - warp * LEAF_TOKENS;
  return left <= 0 ? 0 : left >= LEAF_TOKENS ? LEAF_TOKENS / TILE : (left + TILE - 1) / TILE;
}

// ---- Copying tiles -----------------------------------------------------------------------------

// One warp's copies, some tiles ahead of its arithmetic.
struct Producer {
  static constexpr int KEY_BYTES = KEY_GROUPS * bytes_of(KEY_SCALE_TYPE); // of a token's scales
  static constexpr int VALUE_BYTES = VALUE_GROUPS * bytes_of(VALUE_SCALE_TYPE);
  static constexpr int KEY_CHUNKS = (TILE * KEY_ROW / 16 + 31) / 32; // of a lane
  static constexpr int VALUE_CHUNKS = (TILE * VALUE_ROW / 16 + 31) / 32;
  // One 16-byte chunk of the four arrays of scales and biases for each lane.
  static constexpr bool SCALES_AT_ONCE = PACKED && 4 * TILE * KEY_BYTES == 512 && KEY_BYTES == VALUE_BYTES;

  Problem problem;
  Position at;
  uint32 units_left; // this one included
  int tile, tiles, tokens_left;
  int warp, lane;
  const char *keys, *values, *key_scales, *key_biases, *value_scales, *value_biases; // of the tile
  int key_offset[KEY_CHUNKS], value_offset[VALUE_CHUNKS];

  __device__ __forceinline__ void start(const Problem &all, const Position &first, uint32 units) {
    problem = all;
    at = first;
    units_left = units;
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) key_offset[i] = Keys::chunk_offset(lane + 32 * i);
#pragma unroll
    for (int i = 0; i < VALUE_CHUNKS; i++) value_offset[i] = Values::chunk_offset(lane + 32 * i);
    enter_leaf(false);
  }

  // From the leaf of the block before in the same pair, or from anywhere.
  __device__ __forceinline__ void enter_leaf(bool same_pair) {
    const nyb_decode_arguments &a = *problem.arguments;
    tile = 0;
    tiles = tiles_of_leaf(at, warp);
    const int token = at.block * BLOCK_TOKENS + warp * LEAF_TOKENS;
    tokens_left = at.length - token;
    if (PACKED && same_pair) { // the leaf before was whole
      step_tiles((BLOCK_TOKENS - LEAF_TOKENS) / TILE);
      return;
    }
    const int64 batch = at.batch, head = at.pair / a.row_tiles;
    const auto address = [&](const char *base, const long long *stride) {
      return base + batch * stride[0] + head * stride[1] + token * stride[2];
    };
    const int first = PACKED ? lane * 16 : 0;
    keys = address(a.k.codes, a.k.codes_stride) + first;
    values = address(a.v.codes, a.v.codes_stride) + first;
    if constexpr (SCALES_AT_ONCE) {
      const int array = lane >> 3;
      const nyb_decode_stored &stored = array < 2 ? a.k : a.v;
      const bool biases = array % 2 != 0;
      key_scales = address(biases ? stored.biases : stored.scales,
                           biases ? stored.biases_stride : stored.scales_stride) +
                   (lane & 7) * 16;
    } else {
      key_scales = address(a.k.scales, a.k.scales_stride);
      key_biases = address(a.k.biases, a.k.biases_stride);
      value_scales = address(a.v.scales, a.v.scales_stride);
      value_biases = address(a.v.biases, a.v.biases_stride);
    }
  }

  template <int ROW, int CHUNKS, bool FULL>
  __device__ __forceinline__ void copy_packed_codes(uint32 to, const char *from, const int *offset,
                                                    int tokens) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int chunk = lane + 32 * i;
      if (TILE * ROW / 16 % 32 != 0 && chunk >= TILE * ROW / 16) break;
      if constexpr (FULL) {
        copy_async_16(to + offset[i], from + 512 * i);
      } else {
        const int left = tokens * ROW - chunk * 16;
        copy_async_16(to + offset[i], from + 512 * i, left < 0 ? 0 : left > 16 ? 16 : left);
      }
    }
  }
  // Two arrays of packed scales or biases.
  template <int BYTES, bool FULL> // of a tile
  __device__ __forceinline__ void copy_packed_scales(uint32 to, const char *scales,
                                                     const char *biases, int bytes) const {
    constexpr int CHUNKS = BYTES / 16;
#pragma unroll
    for (int i = 0; i < (2 * CHUNKS + 31) / 32; i++) {
      const int index = lane + 32 * i;
      if ((2 * CHUNKS) % 32 != 0 && index >= 2 * CHUNKS) break;
      const int chunk = index % CHUNKS;
      const char *from = (index < CHUNKS ? scales : biases) + chunk * 16;
      if constexpr (FULL) {
        copy_async_16(to + index * 16, from);
      } else {
        const int left = bytes - chunk * 16;
        copy_async_16(to + index * 16, from, left < 0 ? 0 : left > 16 ? 16 : left);
      }
    }
  }
  template <bool FULL>
  __device__ __forceinline__ void copy_packed(uint32 stage, int tokens) {
    copy_packed_codes<KEY_ROW, KEY_CHUNKS, FULL>(stage, keys, key_offset, tokens);
    copy_packed_codes<VALUE_ROW, VALUE_CHUNKS, FULL>(stage + VALUES_AT, values, value_offset,
                                                     tokens);
    if constexpr (SCALES_AT_ONCE) {
      if constexpr (FULL) {
        copy_async_16(stage + KEY_SCALES_AT + lane * 16, key_scales);
      } else {
        const int left = tokens * KEY_BYTES - (lane & 7) * 16;
        copy_async_16(stage + KEY_SCALES_AT + lane * 16, key_scales,
                      left < 0 ? 0 : left > 16 ? 16 : left);
      }
    } else {
      copy_packed_scales<KEY_SCALE_BYTES, FULL>(stage + KEY_SCALES_AT, key_scales, key_biases,
                                                tokens * KEY_BYTES);
      copy_packed_scales<VALUE_SCALE_BYTES, FULL>(stage + VALUE_SCALES_AT, value_scales,
                                                  value_biases, tokens * VALUE_BYTES);
    }
  }

  template <class LAYOUT>
  __device__ __forceinline__ void copy_strided_codes(uint32 to, const char *from, int64 stride,
                                                     int tokens) const {
    constexpr int WORDS = LAYOUT::ROW / 4;
#pragma unroll 4
    for (int index = lane; index < TILE * WORDS; index += 32) {
      const int token = index / WORDS, word = index % WORDS;
      uint32 target = to + index * 4;
      if constexpr (LAYOUT::BY_UNITS) {
        const int slot = LAYOUT::slot(token);
        target = to + slot * LAYOUT::ROW + ((word / 4 ^ LAYOUT::swizzle(slot)) << 4) + word % 4 * 4;
      }
      const bool inside = token < tokens;
      copy_async_4(target, from + (inside ? token : 0) * stride + word * 4, inside ? 4 : 0);
    }
  }
  template <int DTYPE, int GROUPS>
  __device__ __forceinline__ void copy_strided_scales(uint32 to, const char *from, int64 stride,
                                                      int tokens) const {
    for (int index = lane; index < TILE * GROUPS; index += 32) {
      const int token = index / GROUPS, group = index % GROUPS;
      const char *row = from + token * stride;
      if constexpr (DTYPE == F32) {
        const uint32 bits = token < tokens ? reinterpret_cast<const uint32 *>(row)[group] : 0;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + index * 4), "r"(bits) : "memory");
      } else {
        const uint16 bits =
            token < tokens ? reinterpret_cast<const uint16 *>(row)[group] : static_cast<uint16>(0);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + index * 2), "h"(bits) : "memory");
      }
    }
  }
  __device__ __forceinline__ void copy_strided(uint32 stage, int tokens) {
    const nyb_decode_arguments &a = *problem.arguments;
    copy_strided_codes<Keys>(stage, keys, a.k.codes_stride[2], tokens);
    copy_strided_codes<Values>(stage + VALUES_AT, values, a.v.codes_stride[2], tokens);
    copy_strided_scales<KEY_SCALE_TYPE, KEY_GROUPS>(stage + KEY_SCALES_AT, key_scales,
                                                    a.k.scales_stride[2], tokens);
    copy_strided_scales<KEY_SCALE_TYPE, KEY_GROUPS>(stage + KEY_BIASES_AT, key_biases,
                                                    a.k.biases_stride[2], tokens);
    copy_strided_scales<VALUE_SCALE_TYPE, VALUE_GROUPS>(stage + VALUE_SCALES_AT, value_scales,
                                                        a.v.scales_stride[2], tokens);
    copy_strided_scales<VALUE_SCALE_TYPE, VALUE_GROUPS>(stage + VALUE_BIASES_AT, value_biases,
                                                        a.v.biases_stride[2], tokens);
  }
  __device__ __forceinline__ void step_tiles(int count) {
    const nyb_decode_arguments &a = *problem.arguments;
    const int tokens = count * TILE;
    keys += PACKED ? tokens * KEY_ROW : tokens * a.k.codes_stride[2];
    values += PACKED ? tokens * VALUE_ROW : tokens * a.v.codes_stride[2];
    key_scales += PACKED ? tokens * KEY_BYTES : tokens * a.k.scales_stride[2];
    if constexpr (SCALES_AT_ONCE) return;
    key_biases += PACKED ? tokens * KEY_BYTES : tokens * a.k.biases_stride[2];
    value_scales += PACKED ? tokens * VALUE_BYTES : tokens * a.v.scales_stride[2];
    value_biases += PACKED ? tokens * VALUE_BYTES : tokens * a.v.biases_stride[2];
  }

  // Queues the next tile's copies, or an empty group where there is none.
  __device__ __forceinline__ void queue(uint32 stage) {
    while (tile == tiles && units_left > 1) {
      units_left--;
      problem.advance(at);
      enter_leaf(at.block != 0);
    }
    if (tile < tiles) {
      if constexpr (PACKED) {
        if (tokens_left >= TILE) {
          copy_packed<true>(stage, TILE);
        } else {
          copy_packed<false>(stage, tokens_left);
        }
      } else {
        copy_strided(stage, tokens_left);
      }
      tile++;
      tokens_left -= TILE;
      step_tiles(1);
    }
    end_copy_group();
  }
};

// ---- The query rows of a pair ---------------------------------------------------------------------

// The elements that a lane holds come in runs of so many neighbours.
constexpr int QUERY_RUN = Keys::BY_UNITS ? 32 / KEY_BITS : KEY_LANE_DIMS;

struct Queries {
  float sum[KEY_GROUPS][2 * N_TILES];     // over a group, in the products' unit; columns 2*(lane%4)..
  float unit[2 * N_TILES];                // products' unit times this: log2 units (ROUND_SCORES:
                                          // natural ones)
  int visible[2 * N_TILES];
  int visible_to_all;

  // The N side of two steps: words for step `step` (even) and the next, for each tile of columns.
  static __device__ __forceinline__ uint32 fragment_address(uint32 queries, int step, int n) {
    return queries + (((step / 2) * N_TILES + n) * 32 + (threadIdx.x & 31)) * 16;
  }

  __device__ __forceinline__ void load(const nyb_decode_arguments &a, const Position &at,
                                       uint32 queries) {
    const int lane = threadIdx.x & 31, c = lane & 3;
    const int head = at.pair / a.row_tiles, first_row = at.pair % a.row_tiles * COLUMNS;
    const int rows = a.heads_per_kv * a.query_len;
    const float scale = ROUND_SCORES ? round_to<QUERY_TYPE>(a.scale) : a.scale;
    visible_to_all = at.length;
    // Two neighbours of a run in each word.
    uint32 words[N_TILES][KEY_DIM / 8];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + n * 8 + (lane >> 2);
      const int query_head = head * a.heads_per_kv + row / a.query_len;
      const char *q = a.q + at.batch * a.q_stride[0] + query_head * a.q_stride[1] +
                      row % a.query_len * a.q_stride[2];
constexpr int WORDS = PACKED && QUERY_RUN % 8 == 0 ? 4 : 1; // of a load
#pragma unroll
      for (int i = 0; i < KEY_DIM / 8; i += WORDS) {
        const int element = i * 2 / QUERY_RUN * QUERY_RUN * 4 + c * QUERY_RUN + i * 2 % QUERY_RUN;
        const char *from = q + element * 2;
        uint4 loaded = {0, 0, 0, 0};
        if (row < rows) {
          if constexpr (WORDS == 4) {
            loaded = *reinterpret_cast<const uint4 *>(from);
          } else if constexpr (PACKED) {
            loaded.x = *reinterpret_cast<const uint32 *>(from);
          } else {
            loaded.x = reinterpret_cast<const uint16 *>(from)[0] |
                       static_cast<uint32>(reinterpret_cast<const uint16 *>(from)[1]) << 16;
          }
        }
        words[n][i] = loaded.x;
        if constexpr (WORDS == 4) {
          words[n][i + 1] = loaded.y;
          words[n][i + 2] = loaded.z;
          words[n][i + 3] = loaded.w;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int row = first_row + n * 8 + (lane >> 2);
      const bool exists = row < rows;
      // Of the lane's elements, in ascending order.
      const auto element = [&](int index) {
        const uint32 word = words[n][index / 2];
        float value = index % 2 == 0 ? low_of<QUERY_TYPE>(word) : high_of<QUERY_TYPE>(word);
        if constexpr (ROUND_SCORES) {
          value = round_to<QUERY_TYPE>(value * scale);
        } else {
          value = a.scale < 0 ? -value : value;
        }
        return value;
      };
      // The row is brought to below 2^15, by a power of two, so that f16 holds it.
      float largest = 0, poison = 0; // 0, or NaN where an element is not finite
#pragma unroll
      for (int i = 0; i < KEY_DIM / 4; i++) {
        largest = fmaxf(largest, fabsf(element(i)));
        poison = fmaf(element(i), 0.0f, poison);
      }
      poison += __shfl_xor_sync(~0u, poison, 1);
      poison += __shfl_xor_sync(~0u, poison, 2);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = largest > 0 ? max(exponent_of(largest), -100) : 0;
      const float shrink = power_of_two(14 - exponent) + poison;
      float sums[KEY_GROUPS];
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; g++) sums[g] = 0;
#pragma unroll
      for (int step = 0; step < KEY_STEPS; step++) {
        float slots[4];
#pragma unroll
        for (int slot = 0; slot < 4; slot++) {
          const float value = element(key_lane_element(step, slot)) * shrink;
          sums[step * 16 / KEY_GROUP] += value;
          slots[slot] = value * power_of_two(-key_position(step, slot));
        }
        asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(
                         fragment_address(queries, step, n) + step % 2 * 8),
                     "r"(pack_f16(slots[0], slots[1])), "r"(pack_f16(slots[2], slots[3]))
                     : "memory");
      }
      const float own_unit = (ROUND_SCORES ? 1.0f : fabsf(a.scale) * 1.44269504088896341f) *
                             power_of_two(min(exponent + 10, 127));
      int own_visible = at.length;
      if (a.causal != 0) own_visible = max(at.length - a.query_len + row % a.query_len + 1, 0);
      if (!exists) own_visible = 0x7fffffff;
      int least = own_visible;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        least = min(least, __shfl_xor_sync(~0u, least, distance));
      visible_to_all = min(visible_to_all, least);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int from = (2 * c + j) * 4;
        unit[2 * n + j] = __shfl_sync(~0u, own_unit, from);
        visible[2 * n + j] = __shfl_sync(~0u, own_visible, from);
      }
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; g++) {
        float total = sums[g];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        total *= power_of_two(-24);
#pragma unroll
        for (int j = 0; j < 2; j++) sum[g][2 * n + j] = __shfl_sync(~0u, total, (2 * c + j) * 4);
      }
    }
  }
};

// ---- One leaf ------------------------------------------------------------------------------------

constexpr int SUMS = VALUE_DIM / 16; // tiles of the products' M side
constexpr int SPANS = VALUE_DIM / VALUE_SPAN, SPAN_SUMS = VALUE_SPAN / 16;

// Where in a stage this lane points ldmatrix to.
struct Addresses {
  uint32 keys, values;
  int key_swizzle, value_swizzle;
  __device__ __forceinline__ void start() {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
    keys = ((matrix & 1) * 8 + row) * KEY_ROW;
    key_swizzle = (Keys::swizzle(row) ^ matrix >> 1) << 4;
    values = VALUES_AT + ((matrix & 1) * 8 + row) * VALUE_ROW;
    value_swizzle = (Values::swizzle(row) ^ matrix >> 1) << 4;
  }
};

// Sums are in units of 2^maximum, for each column: a bound on the scores so far, with room above so
// that it seldom has to be raised. Weights times V's scales are brought into the range of f16 by a
// power of two for each group, which follows the largest finite scale.
constexpr float HEADROOM = 2; // log2 units
constexpr int VALUE_HEADROOM = 1;
constexpr int NO_VALUES = -120; // below every exponent
struct Leaf {
  float out[SUMS][N_TILES][4];           // times 2^(value_exponent + 10 - position)
  float bias[VALUE_GROUPS][2 * N_TILES]; // this lane's part of the sum of weight * bias
  float maximum[2 * N_TILES], sum[2 * N_TILES];
  int value_exponent[VALUE_GROUPS]; // of the largest scale of V so far, with room above

  __device__ __forceinline__ void clear() {
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
      sum[j] = 0;
#pragma unroll
      for (int g = 0; g < VALUE_GROUPS; g++) bias[g][j] = 0;
    }
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) value_exponent[g] = NO_VALUES;
  }

  // scores[h][n]: rows lane/4 and lane/4 + 8 of half h, columns 2*(lane%4) and the next.
  __device__ __forceinline__ void score(float (*scores)[N_TILES][4], const Queries &q,
                                        const KeyScales &scales, const KeyScales &biases,
                                        uint32 stage, uint32 queries,
                                        const Addresses &where) const {
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
    float products[HALVES][N_TILES][4];
    uint32 words[HALVES][4], fragment[N_TILES][4];
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
      const int group = step * 16 / KEY_GROUP;
      if (step % 2 == 0) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          load_words<16>(fragment[n], Queries::fragment_address(queries, step, n));
      }
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        uint32 a[4];
        if constexpr (Keys::BY_UNITS) {
          constexpr int STEPS = 8 / KEY_BITS; // of a unit
          const int unit = step / STEPS, within = step % STEPS;
          if (within == 0 && unit % 2 == 0) {
            const uint32 address =
                stage + where.keys + h * 16 * KEY_ROW + ((unit << 4) ^ where.key_swizzle);
            if (unit + 1 < Keys::UNITS) {
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
          const int bit = group * KEY_GROUP * KEY_BITS + c * RUN_BITS;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            load_run<RUN_BITS, RUN_BITS % 32 == 0>(
                run[i], stage + Keys::slot_of_row(h, r + 8 * i) * KEY_ROW, bit);
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int low = (within * 2 + i / 2) * KEY_BITS;
            a[i] = run_field<KEY_BITS>(run[i % 2], low, run[i % 2], low + HALF * KEY_BITS);
          }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          if (step * 16 % KEY_GROUP == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) products[h][n][j] = 0;
          }
          multiply_add(products[h][n], a, fragment[n] + step % 2 * 2);
          if ((step + 1) * 16 % KEY_GROUP != 0) continue;
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float bias_part =
                group == 0 ? biases.at(h, j / 2, 0) * q.sum[0][2 * n + j % 2]
                           : fmaf(biases.at(h, j / 2, group), q.sum[group][2 * n + j % 2],
                                  scores[h][n][j]);
            scores[h][n][j] = fmaf(scales.at(h, j / 2, group), products[h][n][j], bias_part);
          }
        }
      }
    }
  }

  // Moves maxima (whole log2 units) and the exponents of V's scales up, where this tile needs it.
  __device__ __forceinline__ void raise(const float *highest, const float *largest_scale) {
    bool higher = false;
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++)
      higher = higher || largest_scale[g] >= power_of_two(value_exponent[g] + 1);
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) higher = higher || highest[j] > maximum[j];
    if (!__any_sync(~0u, higher)) return;
    const bool first = value_exponent[0] == NO_VALUES; // nothing to rescale
    float value_factor[VALUE_GROUPS];
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      int exponent = max(exponent_of(largest_scale[g]), -100);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        exponent = max(exponent, __shfl_xor_sync(~0u, exponent, distance));
      const int before = value_exponent[g];
      if (exponent > before) value_exponent[g] = exponent + VALUE_HEADROOM;
      value_factor[g] = rescale_factor(static_cast<float>(before - value_exponent[g]));
    }
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      float top = highest[j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
      top = top <= maximum[j] ? maximum[j] : ceilf(top) + HEADROOM;
      const float factor = maximum[j] == top ? 1.0f : rescale_factor(maximum[j] - top);
      maximum[j] = top;
      if (first) continue;
      sum[j] *= factor;
#pragma unroll
      for (int g = 0; g < VALUE_GROUPS; g++) {
        bias[g][j] *= factor;
        const float out_factor = factor * value_factor[g];
#pragma unroll
        for (int i = g * VALUE_GROUP / 16; i < (g + 1) * VALUE_GROUP / 16; i++) {
          out[i][j / 2][j % 2] *= out_factor;
          out[i][j / 2][2 + j % 2] *= out_factor;
        }
      }
    }
  }

  // first_row_token: of the half's row lane/4.
  template <bool MASKED>
  __device__ __forceinline__ void add_values(const float (*weights)[4], const ValueScales &scales,
                                             const ValueScales &biases, uint32 stage, int half,
                                             int first_row_token, const int *visible,
                                             const Addresses &where) {
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
    uint32 p[N_TILES][2];
    uint32 words[4] = {0, 0, 0, 0};
    constexpr int RUN_BITS = VALUE_LANE_DIMS * VALUE_BITS, RUN_WORDS = (RUN_BITS + 31) / 32;
    uint32 run[4][RUN_WORDS];
#pragma unroll
    for (int span = 0; span < SPANS; span++) {
      const int group = span * VALUE_SPAN / VALUE_GROUP;
      if (span * VALUE_SPAN % VALUE_GROUP == 0) {
        const float grow = power_of_two(14 - value_exponent[group]);
        const float row_scales[2] = {scales.at(half, 0, group) * grow,
                                     scales.at(half, 1, group) * grow};
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          float scaled[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float scale = row_scales[j / 2];
            const float value_bias = biases.at(half, j / 2, group);
            float &column_bias = bias[group][2 * n + j % 2];
            if constexpr (MASKED) { // a scale that this row may not see may be NaN
              const bool seen = first_row_token + j / 2 < visible[2 * n + j % 2];
              scaled[j] = seen ? weights[n][j] * scale : 0.0f;
              column_bias = seen ? fmaf(weights[n][j], value_bias, column_bias) : column_bias;
            } else {
              scaled[j] = weights[n][j] * scale;
              column_bias = fmaf(weights[n][j], value_bias, column_bias);
            }
          }
          p[n][0] = transpose_8x8(pack_f16(scaled[0], scaled[1]));
          p[n][1] = transpose_8x8(pack_f16(scaled[2], scaled[3]));
        }
      }
      if constexpr (Values::BY_UNITS) {
        if (span % 2 == 0) {
          const uint32 address =
              stage + where.values + half * 16 * VALUE_ROW + ((span << 4) ^ where.value_swizzle);
          if (span + 1 < SPANS) {
            load_transposed_4(words, address);
          } else {
            load_transposed_2(words, address);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int slot = Values::slot_of_row(half, 2 * c + i % 2 + i / 2 * 8);
          load_run<RUN_BITS, RUN_BITS % 32 == 0>(run[i], stage + VALUES_AT + slot * VALUE_ROW,
                                                 span * VALUE_SPAN * VALUE_BITS + r * RUN_BITS);
        }
      }
#pragma unroll
      for (int i = 0; i < SPAN_SUMS; i++) {
        uint32 a[4];
        if constexpr (Values::BY_UNITS) {
          const uint32 *pair = words + span % 2 * 2;
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
        for (int n = 0; n < N_TILES; n++) multiply_add(out[span * SPAN_SUMS + i][n], a, p[n]);
      }
    }
  }

  // A score of -inf would weigh nothing, but is NaN where a key's scale or bias is not finite.
  static __device__ __forceinline__ bool may_be_minus_infinity(
      const float (*scores)[N_TILES][4]) {
    float lowest = scores[0][0][0];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) lowest = fminf(lowest, scores[h][n][j]);
      }
    }
    return lowest == -infinity();
  }
  static __device__ __forceinline__ void poison(float (*scores)[N_TILES][4],
                                                const KeyScales &scales, const KeyScales &biases) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float nothing = 0; // or NaN
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; g++)
          nothing = fmaf(scales.at(h, i, g), 0.0f, fmaf(biases.at(h, i, g), 0.0f, nothing));
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          scores[h][n][2 * i] += nothing;
          scores[h][n][2 * i + 1] += nothing;
        }
      }
    }
  }
  static __device__ __forceinline__ float largest_finite(const ValueScales &scales, int group) {
    float largest = 0;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float scale = fabsf(scales.at(h, i, group));
        largest = fmaxf(largest, scale == infinity() ? 0.0f : scale);
      }
    }
    return largest;
  }

  template <bool MASKED>
  __device__ __forceinline__ void add_tile(const Queries &q, uint32 stage, uint32 queries,
                                           int first_token, const Addresses &where) {
    const int lane_token = first_token + (threadIdx.x >> 2 & 7) * LANE_TOKENS;
    float scores[HALVES][N_TILES][4];
    float highest[2 * N_TILES];
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) highest[j] = -infinity();
    {
      KeyScales scales, biases;
      scales.load(stage + KEY_SCALES_AT);
      biases.load(stage + KEY_BIASES_AT);
      score(scores, q, scales, biases, stage, queries, where);
      if (MASKED || may_be_minus_infinity(scores)) poison(scores, scales, biases);
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float &score = scores[h][n][j];
            if constexpr (ROUND_SCORES) {
              score = round_to<QUERY_TYPE>(score * q.unit[2 * n + j % 2]) * 1.44269504088896341f;
            }
            if constexpr (MASKED) {
              if (lane_token + 2 * h + j / 2 >= q.visible[2 * n + j % 2]) score = -infinity();
            }
            highest[2 * n + j % 2] = fmaxf(highest[2 * n + j % 2], score);
          }
        }
      }
    }
    ValueScales scales, biases;
    scales.load(stage + VALUE_SCALES_AT);
    biases.load(stage + VALUE_BIASES_AT);
    float largest_scale[VALUE_GROUPS];
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
      largest_scale[g] = 0;
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
          largest_scale[g] = fmaxf(largest_scale[g], fabsf(scales.at(h, i, g)));
      }
      if (largest_scale[g] == infinity()) largest_scale[g] = largest_finite(scales, g);
    }
    if constexpr (!ROUND_SCORES) {
#pragma unroll
      for (int j = 0; j < 2 * N_TILES; j++) highest[j] *= q.unit[j];
    }
    raise(highest, largest_scale);
    float base[2 * N_TILES];
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) base[j] = maximum[j] == -infinity() ? 0.0f : maximum[j];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int column = 2 * n + j % 2;
          const float score = scores[h][n][j];
          scores[h][n][j] = exp2_fast(ROUND_SCORES ? score - base[column]
                                                   : fmaf(score, q.unit[column], -base[column]));
          sum[column] += scores[h][n][j];
        }
      }
      add_values<MASKED>(scores[h], scales, biases, stage, h, lane_token + 2 * h, q.visible, where);
    }
  }

  // Hands the leaf to the block, in units of 2^maximum.
  __device__ __forceinline__ void publish(uint32 exchange, uint32 statistics, int warp, int rows) {
    const int lane = threadIdx.x & 31, c = lane & 3, r = lane >> 2;
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum[j] += __shfl_xor_sync(~0u, sum[j], distance);
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++)
          bias[g][j] += __shfl_xor_sync(~0u, bias[g][j], distance);
      }
    }
#pragma unroll
    for (int j = 0; j < 2 * N_TILES; j++) {
      const int column = j / 2 * 8 + 2 * c + j % 2;
      if (column >= rows) continue;
      if (r == 0) {
        const uint32 at = statistics + (warp * COLUMNS + column) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(maximum[j]) : "memory");
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at + WARPS * COLUMNS * 4), "f"(sum[j])
                     : "memory");
      }
      const uint32 row = exchange + (warp * ROWS + column) * EXCHANGE_ROW * 4;
#pragma unroll
      for (int span = 0; span < SPANS; span++) {
        const float span_bias = bias[span * VALUE_SPAN / VALUE_GROUP][j];
        const float unit = power_of_two(max(value_exponent[span * VALUE_SPAN / VALUE_GROUP], -100));
#pragma unroll
        for (int i = 0; i < SPAN_SUMS; i += 2) {
          float values[4];
#pragma unroll
          for (int k = 0; k < 4; k++) {
            if (i + k / 2 >= SPAN_SUMS) break;
            const float part = out[span * SPAN_SUMS + i + k / 2][j / 2][k % 2 * 2 + j % 2];
            // In two steps: the product of both powers may leave the range of f32.
            values[k] = fmaf(part * power_of_two(10 - value_position(2 * i + k)), unit, span_bias);
          }
          const uint32 to = row + (span * VALUE_SPAN + r * VALUE_LANE_DIMS + 2 * i) * 4;
          if (i + 1 < SPAN_SUMS) {
            asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(values[0]),
                         "f"(values[1]), "f"(values[2]), "f"(values[3])
                         : "memory");
          } else {
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(values[0]),
                         "f"(values[1])
                         : "memory");
          }
        }
      }
    }
  }
};

// ---- A block of tokens from its leaves, and subtrees of blocks -------------------------------------

// The quads of output elements that a thread keeps, one after the other over all rows.
constexpr int QUADS = VALUE_DIM / 4;
constexpr int THREAD_QUADS = (ROWS * QUADS + WARPS * 32 - 1) / (WARPS * 32);

// A subtree's sums, for this thread's quads; each thread keeps its rows' statistics as well.
struct Subtree {
  float4 out[THREAD_QUADS];
  float maximum[THREAD_QUADS], sum[THREAD_QUADS];
};

__device__ __forceinline__ float4 times(float4 x, float factor) {
  return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}
__device__ __forceinline__ float4 add(float4 x, float4 y) {
  return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

struct Combiner {
  char *shared;
  int rows;     // of this tile of query rows
  uint32 valid; // bit i: a subtree of 2^i blocks waits for its right neighbour

  __device__ __forceinline__ bool mine(int i) const {
    return static_cast<int>(threadIdx.x) + i * WARPS * 32 < rows * QUADS;
  }
  __device__ __forceinline__ int row_of(int i) const {
    return (static_cast<int>(threadIdx.x) + i * WARPS * 32) / QUADS;
  }
  __device__ __forceinline__ int quad_of(int i) const {
    return (static_cast<int>(threadIdx.x) + i * WARPS * 32) % QUADS;
  }

  __device__ __forceinline__ void leaves(Subtree &block) const {
    const float *exchange = reinterpret_cast<const float *>(shared + EXCHANGE_AT);
    const float *maxima = reinterpret_cast<const float *>(shared + STATISTICS_AT);
    const float *sums = maxima + WARPS * COLUMNS;
#pragma unroll
    for (int i = 0; i < THREAD_QUADS; i++) {
      if (!mine(i)) continue;
      const int row = row_of(i);
      float maximum = maxima[row], factor[WARPS];
#pragma unroll
      for (int w = 1; w < WARPS; w++) maximum = fmaxf(maximum, maxima[w * COLUMNS + row]);
      float4 part[WARPS];
      float sum[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        factor[w] = rescale_factor(maxima[w * COLUMNS + row] - maximum);
        const float *values = exchange + (w * ROWS + row) * EXCHANGE_ROW + quad_of(i) * 4;
        part[w] = times(*reinterpret_cast<const float4 *>(values), factor[w]);
        sum[w] = sums[w * COLUMNS + row] * factor[w];
      }
      block.out[i] = add(add(part[0], part[1]), add(part[2], part[3]));
      block.sum[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      block.maximum[i] = maximum;
    }
  }

  __device__ __forceinline__ float *waiting(int level, int row) const {
    return reinterpret_cast<float *>(shared + WAITING_AT) + (level * ROWS + row) * EXCHANGE_ROW;
  }
  __device__ __forceinline__ void keep(const Subtree &tree, int level) {
    valid |= 1u << level;
#pragma unroll
    for (int i = 0; i < THREAD_QUADS; i++) {
      if (!mine(i)) continue;
      float *row = waiting(level, row_of(i));
      *reinterpret_cast<float4 *>(row + quad_of(i) * 4) = tree.out[i];
      // Each of a row's threads writes the same here, and reads its own writing.
      *reinterpret_cast<float2 *>(row + VALUE_DIM) = make_float2(tree.maximum[i], tree.sum[i]);
    }
  }
  __device__ __forceinline__ void take(Subtree &tree, int level) const {
#pragma unroll
    for (int i = 0; i < THREAD_QUADS; i++) {
      if (!mine(i)) continue;
      const float *row = waiting(level, row_of(i));
      tree.out[i] = *reinterpret_cast<const float4 *>(row + quad_of(i) * 4);
      tree.maximum[i] = row[VALUE_DIM];
      tree.sum[i] = row[VALUE_DIM + 1];
    }
  }
  // right becomes left + right.
  __device__ __forceinline__ void join(const Subtree &left, Subtree &right) const {
#pragma unroll
    for (int i = 0; i < THREAD_QUADS; i++) {
      if (!mine(i)) continue;
      const float maximum = fmaxf(left.maximum[i], right.maximum[i]);
      const float left_factor = rescale_factor(left.maximum[i] - maximum);
      const float right_factor = rescale_factor(right.maximum[i] - maximum);
      right.out[i] = add(times(left.out[i], left_factor), times(right.out[i], right_factor));
      right.sum[i] = left.sum[i] * left_factor + right.sum[i] * right_factor;
      right.maximum[i] = maximum;
    }
  }
  // To the workspace, as the subtree of 2^level blocks that begins with `block`.
  __device__ __forceinline__ void write(const Subtree &tree, const nyb_decode_arguments &a,
                                        int64 pair, int block, int level) const {
    const int64 slot = pair * a.capacity_blocks + block;
    float *partials = a.partials + slot * COLUMNS * VALUE_DIM;
    float *statistics = a.statistics + slot * NYB_DECODE_STATISTICS(COLUMNS);
#pragma unroll
    for (int i = 0; i < THREAD_QUADS; i++) {
      if (!mine(i)) continue;
      const int row = row_of(i);
      *reinterpret_cast<float4 *>(partials + row * VALUE_DIM + quad_of(i) * 4) = tree.out[i];
      if (quad_of(i) == 0) {
        statistics[row] = tree.maximum[i];
        statistics[COLUMNS + row] = tree.sum[i];
      }
    }
    // The other blocks of the subtree have nothing of their own.
    if (threadIdx.x < 1u << level) {
      reinterpret_cast<int *>(statistics)[2 * COLUMNS +
                                          threadIdx.x * NYB_DECODE_STATISTICS(COLUMNS)] =
          threadIdx.x == 0;
    }
  }

  // Takes the finished block `block` of a pair; last: this run ends with it, or the pair does.
  __device__ __forceinline__ void add_block(const nyb_decode_arguments &a, int64 pair, int block,
                                            bool last) {
    Subtree tree;
    leaves(tree);
    int level = 0;
    while (level < NYB_DECODE_LEVELS && (block >> level & 1) != 0 && (valid >> level & 1) != 0) {
      Subtree left;
      take(left, level);
      join(left, tree);
      valid &= ~(1u << level);
      level++;
    }
    const bool is_left = level < NYB_DECODE_LEVELS && (block >> level & 1) == 0;
    if (is_left && !last) {
      keep(tree, level);
      return;
    }
    write(tree, a, pair, block >> level << level, level);
    if (!last) return;
    while (valid != 0) { // each begins right before what has been written
      const int left_level = __ffs(valid) - 1;
      block = (block >> level << level) - 1;
      level = left_level;
      take(tree, level);
      write(tree, a, pair, block >> level << level, level);
      valid &= valid - 1;
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    attention_decode(const __grid_constant__ nyb_decode_arguments a) {
  extern __shared__ __align__(128) char shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int warp = threadIdx.x >> 5;
  const uint32 shared_address = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const Problem problem = {&a, a.kv_heads * a.row_tiles};
  const uint32 units = problem.units();
  const uint32 share = units / gridDim.x, longer = units % gridDim.x;
  const uint32 begin = share * blockIdx.x + min(longer, blockIdx.x);
  const uint32 end = begin + share + (blockIdx.x < longer ? 1 : 0);
  if (begin == end) return;

  Position at = problem.find(begin);
  Producer producer;
  producer.start(problem, at, end - begin);
  const uint32 ring = shared_address + warp * STAGES * STAGE_BYTES;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) producer.queue(ring + stage * STAGE_BYTES);

  const uint32 queries = shared_address + QUERIES_AT + warp * QUERY_BYTES;
  Addresses where;
  where.start();
  Queries q;
  Leaf leaf;
  Combiner combiner;
  combiner.shared = shared;
  combiner.valid = 0;
  int stage = 0;
  bool new_pair = true;
  for (uint32 unit = begin; unit < end; unit++) {
    if (new_pair) {
      __syncwarp();
      q.load(a, at, queries);
      __syncwarp();
    }
    leaf.clear();
    const int tiles = tiles_of_leaf(at, warp);
    int first_token = at.block * BLOCK_TOKENS + warp * LEAF_TOKENS;
    for (int tile = 0; tile < tiles; tile++, first_token += TILE) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      producer.queue(ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES);
      const uint32 here = ring + stage * STAGE_BYTES;
      if (first_token + TILE <= q.visible_to_all) {
        leaf.add_tile<false>(q, here, queries, first_token, where);
      } else {
        leaf.add_tile<true>(q, here, queries, first_token, where);
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    combiner.rows = min(a.heads_per_kv * a.query_len - at.pair % a.row_tiles * COLUMNS, COLUMNS);
    __syncthreads(); // the block before has been read
    leaf.publish(shared_address + EXCHANGE_AT, shared_address + STATISTICS_AT, warp, combiner.rows);
    __syncthreads();
    const bool last = unit + 1 == end || at.block + 1 == at.blocks;
    combiner.add_block(a, static_cast<int64>(at.batch) * problem.pairs + at.pair, at.block, last);
    if (unit + 1 < end) problem.advance(at);
    new_pair = last;
  }
  wait_for_copies<0>();
}
