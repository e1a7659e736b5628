// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows over a quantized cache, for Hopper's matrix unit.
//
// A block takes 128 query rows of one KV head: its query heads at neighbouring positions. One group
// of four warps unpacks codes to f16 tiles of keys and values in shared memory, two tiles ahead;
// two groups multiply, 64 rows each, and keep an online softmax in registers. Every element of the
// cache is unpacked once for 128 rows; nothing unpacked leaves the multiprocessor.
//
// Accuracy. Queries are scaled to [1, 2) by a power of two of the row, keys and values are
// rounded once to f16, and so are the weights, which are scaled to 2^14. Sums are f32. A group of 32
// elements that f16 cannot hold well (too large, too small, not finite) is left out of its tile and
// added by the slow path below in f32, so that neither a rounding nor an infinity of one token
// reaches a row that does not see it.
//
// The softmax starts anew every NYB_PREFILL_CHUNK_TOKENS tokens, and the chunks are merged in
// ascending order: by the block that walked them, or, where there are too few row tiles to fill the
// card, by a second launch (MERGE) over what blocks of one chunk each have left in the workspace.
// Both do the same operations, so that the bits are the same.
#include "attention_prefill_arguments.h"
#include "numbers.cuh"
#include "unpack.cuh"

#if !defined(KEY_BITS) || !defined(KEY_GROUP) || !defined(KEY_FLOAT) || !defined(KEY_DIM) || \
    !defined(KEY_WIDE)
#error "KEY_BITS, KEY_GROUP, KEY_FLOAT (dtype of scales), KEY_DIM, KEY_WIDE (bytes of alignment)"
#endif
#if !defined(VALUE_BITS) || !defined(VALUE_GROUP) || !defined(VALUE_FLOAT) || \
    !defined(VALUE_DIM) || !defined(VALUE_WIDE)
#error "VALUE_BITS, VALUE_GROUP, VALUE_FLOAT, VALUE_DIM, VALUE_WIDE, as for keys"
#endif
#if !defined(QUERY_FLOAT) || !defined(OUT_FLOAT) || !defined(ROUND_SCORES) || !defined(MERGE) || \
    !defined(PACKED)
#error "QUERY_FLOAT, OUT_FLOAT (dtypes of q and out), ROUND_SCORES (as MLX), MERGE (second launch)"
#error "PACKED (a KV head's tokens follow each other without gaps, codes at multiples of 16 bytes)"
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma.cuh"

namespace {

constexpr int ROWS = NYB_PREFILL_ROWS;
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_ROWS = 64;
constexpr int TOKENS = NYB_PREFILL_TOKENS(KEY_DIM, VALUE_DIM);
constexpr int CHUNK_TILES = NYB_PREFILL_CHUNK_TOKENS / TOKENS;
constexpr int PREFETCH_TILES = 3;
constexpr int UNIT = 32;  // elements that a thread unpacks at a time; they share a scale and a bias

// Registers of a thread that unpacks, and of one that multiplies: 504 for one and two of them.
constexpr int UNPACK_REGISTERS = VALUE_DIM > 192 ? 72 : 104;
constexpr int MULTIPLY_REGISTERS = VALUE_DIM > 192 ? 216 : 200;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float WEIGHT_SHIFT = 14.0f;  // weights are 2^14 at the maximum

// Where a row's units are wide enough apart, a thread takes two neighbours at a time, which may share
// a scale and a bias.
constexpr bool PAIRED = KEY_BITS <= 4 && VALUE_BITS <= 4 && KEY_DIM == VALUE_DIM &&
                        (KEY_DIM == 128 || KEY_DIM == 256);

// Lanes that stand side by side along a row of so many units: the most that leave no lane idle, but
// so many that 128 threads do not take more tokens than a tile has.
__host__ __device__ constexpr int lanes_across(int units) {
  const int least = GROUP_THREADS / TOKENS;
  const int most = PAIRED ? units / 2 : units % 4 == 0 ? 4 : units % 2 == 0 ? 2 : 1;
  return most > least ? most : least;
}

// One of keys and values: how its tiles are made. A round is a unit for each thread. Neighbouring
// lanes take units of one row, and of few rows, so that what a warp loads lies in few lines. Which
// lane takes which is chosen so that eight neighbours, whose 16-byte accesses go together, meet each
// bank once, both where they load from and where they store to: their rows' lowest bits (which the
// swizzle mixes in) differ as their units do. Where that is not enough, half of the lanes take two
// things (the units of a pair, the 16-byte halves of an 8-bit unit) in the other order.
template <int BITS_, int GROUP_, int FLOAT_, int DIM_, int WIDE_, int SHIFT_>
struct Side {
  static constexpr int BITS = BITS_, GROUP = GROUP_, FLOAT = FLOAT_, DIM = DIM_, WIDE = WIDE_;
  static constexpr int SHIFT = SHIFT_;  // elements are multiplied by 2^SHIFT
  static constexpr int UNITS = DIM / UNIT;
  static constexpr int PANELS = (DIM + 63) / 64;
  static constexpr int ACROSS = lanes_across(UNITS);
  static constexpr int TURNS = (UNITS + ACROSS - 1) / ACROSS;  // rounds that a row takes
  static constexpr int STEP_TOKENS = GROUP_THREADS / ACROSS;   // that all threads take together
  static constexpr int ROUNDS = TURNS * (TOKENS / STEP_TOKENS);
  static constexpr uint32 PANEL_BYTES = TOKENS * 128;
  static constexpr uint32 TILE_BYTES = PANELS * PANEL_BYTES;
  static constexpr bool HALVES = BITS == 8 && ACROSS == 4;
  static constexpr int ROW_BYTES = DIM * BITS / 8, GROUPS = DIM / GROUP;
  static constexpr int SCALE_ROW_BYTES = GROUPS * bytes_of(FLOAT);
  static_assert(ACROSS == 1 || ACROSS == 2 || ACROSS == 4, "lanes are dealt out below");

  // Of the thread: its row among those of a round, its place along the row, and whether it takes
  // things in the other order.
  static __device__ __forceinline__ int token_of(int thread) {
    const int lane = thread & 31;
    const int own = ACROSS == 1   ? lane
                    : ACROSS == 2 ? lane >> 1
                    : HALVES      ? lane >> 2
                                  : (lane >> 1 & 3) | (lane >> 2 & 4);
    return (thread >> 5) * (32 / ACROSS) + own;
  }
  static __device__ __forceinline__ int place_of(int thread) {
    const int lane = thread & 31;
    return ACROSS == 1   ? 0
           : ACROSS == 2 ? lane & 1
           : HALVES      ? lane & 3
                         : (lane & 1) | ((lane >> 3 ^ lane >> 2) & 1) << 1;
  }
  static __device__ __forceinline__ int turned(int thread) {
    const int token = token_of(thread), place = place_of(thread);
    if constexpr (HALVES) return (place >> 1 ^ token) & 1;
    if constexpr (!PAIRED) return 0;
    return (ACROSS == 2 ? place ^ token >> 1 : place ^ token) & 1;
  }
  // The unit that a thread takes in a round, along its row; the first one, and what comes to it.
  static __device__ __forceinline__ int unit_of(int thread, int round) {
    if constexpr (PAIRED) return place_of(thread) * 2 + (turned(thread) ^ (round & 1));
    return round % TURNS * ACROSS + place_of(thread);
  }
  static __device__ __forceinline__ bool has_unit(int thread, int round) {
    return UNITS % ACROSS == 0 || unit_of(thread, round) < UNITS;
  }
};
using Keys = Side<KEY_BITS, KEY_GROUP, KEY_FLOAT, KEY_DIM, KEY_WIDE, 3>;
using Values = Side<VALUE_BITS, VALUE_GROUP, VALUE_FLOAT, VALUE_DIM, VALUE_WIDE, 4>;
static_assert(!PAIRED || (Keys::TURNS == 2 && Values::TURNS == 2), "a pair is what a row takes");

// A step is what is loaded and unpacked together: so many rounds. BUFFERS steps are on their way at a
// time, each in its own registers, which is why a tile's steps are a multiple of them.
constexpr int STEP_ROUNDS = PAIRED ? 2 : 1;
constexpr int KEY_STEPS = Keys::ROUNDS / STEP_ROUNDS, VALUE_STEPS = Values::ROUNDS / STEP_ROUNDS;
constexpr int STEPS = KEY_STEPS + VALUE_STEPS;
constexpr bool FEW_BUFFERS = KEY_FLOAT == F32 || VALUE_FLOAT == F32 ||  // registers are short
                             (VALUE_DIM > 192 && (KEY_BITS > 4 || VALUE_BITS > 4));
constexpr int MOST_BUFFERS = FEW_BUFFERS || (PAIRED && VALUE_DIM > 192) ? 2 : 4;
constexpr int BUFFERS = STEPS % 4 == 0 && MOST_BUFFERS >= 4   ? 4
                        : STEPS % 3 == 0 && MOST_BUFFERS >= 3 ? 3
                        : STEPS % 2 == 0                      ? 2
                                                              : 1;

// What a multiplying group's accumulators are: 64 rows by these columns.
constexpr int SCORES = TOKENS / 2, OUTPUTS = VALUE_DIM / 2;

// ---- Shared memory ------------------------------------------------------------------------------

constexpr int STAGES = 2;
constexpr uint32 QUERY_PANEL_BYTES = ROWS * 128;
constexpr uint32 KEY_TILES = Keys::PANELS * QUERY_PANEL_BYTES;
constexpr uint32 VALUE_TILES = KEY_TILES + STAGES * Keys::TILE_BYTES;
constexpr uint32 BARRIERS = VALUE_TILES + STAGES * Values::TILE_BYTES;
enum { KEYS_FULL = 0, KEYS_EMPTY = STAGES, VALUES_FULL = 2 * STAGES, VALUES_EMPTY = 3 * STAGES };
// Which units are left to the slow path: [stage][round * 4 + warp], a bit for each lane; and, for a
// quick look, whether a warp left any: [stage][warp].
constexpr uint32 KEY_MASKS = BARRIERS + 4 * STAGES * 8;
constexpr uint32 VALUE_MASKS = KEY_MASKS + STAGES * Keys::ROUNDS * 16;
constexpr uint32 KEY_ANY = VALUE_MASKS + STAGES * Values::ROUNDS * 16;
constexpr uint32 VALUE_ANY = KEY_ANY + STAGES * 16;
constexpr uint32 WORK = VALUE_ANY + STAGES * 16;
constexpr uint32 KEY_HEAD = WORK + 32, VALUE_HEAD = KEY_HEAD + 32;  // where the KV head's rows start
constexpr uint32 FACTORS = VALUE_HEAD + 32;  // of each row: what its products are multiplied by
constexpr uint32 SHARED_BYTES = FACTORS + ROWS * 4;
static_assert(SHARED_BYTES <= NYB_PREFILL_SHARED_BYTES(KEY_DIM, VALUE_DIM), "as the host sees it");
static_assert(NYB_PREFILL_SHARED_BYTES(KEY_DIM, VALUE_DIM) <= 227 * 1024, "the tiles do not fit");

__device__ __forceinline__ void store_shared(uint32 address, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, const uint32 (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}
__device__ __forceinline__ uint32 load_shared(uint32 address) {
  uint32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void load_shared(uint32 address, uint32 (&value)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}

// ---- Where a block's work lies ------------------------------------------------------------------

struct Work {
  int32 batch, kv_head, row_tile, chunk;
  int32 length;
  int32 first_token, end_token;  // of this block: its chunk, or all that its rows see
  int32 item;                    // which of the launch's pieces of work this is
};

// Tokens that a query position sees.
__device__ __forceinline__ int32 visible_tokens(const nyb_prefill_arguments &arguments,
                                                int32 length, int32 position) {
  if (position >= arguments.query_len) return 0;
  if (!arguments.causal) return length;
  return max(length + (position + 1 - arguments.query_len), 0);
}

__device__ __forceinline__ Work find_work(const nyb_prefill_arguments &arguments, int32 item) {
  Work work;
  work.item = item;
  int32 index = item;
  // The last rows see most under a causal mask: they start first.
  work.row_tile = arguments.row_tiles - 1 - index % arguments.row_tiles;
  index /= arguments.row_tiles;
  const int32 chunks = MERGE ? 1 : arguments.chunks;
  work.chunk = index % chunks;
  index /= chunks;
  work.kv_head = index % arguments.kv_heads;
  work.batch = index / arguments.kv_heads;
  work.length = static_cast<int32>(
      min(int64(max(arguments.lengths[work.batch], 0)), int64(arguments.capacity_tokens)));
  const int32 last_row =
      min((work.row_tile + 1) * ROWS, arguments.query_len * arguments.heads_per_kv) - 1;
  work.first_token = 0;
  work.end_token = visible_tokens(arguments, work.length, last_row / arguments.heads_per_kv);
  if (!MERGE && arguments.chunks > 1) {
    work.first_token = work.chunk * NYB_PREFILL_CHUNK_TOKENS;
    work.end_token = min(work.end_token, work.first_token + NYB_PREFILL_CHUNK_TOKENS);
  }
  return work;
}

// The block's work lies in shared memory, and is read again where it is needed: registers are short.
__device__ __forceinline__ void store_work(uint32 shared, const Work &work) {
  const uint32 low[4] = {static_cast<uint32>(work.batch), static_cast<uint32>(work.kv_head),
                         static_cast<uint32>(work.row_tile), static_cast<uint32>(work.chunk)};
  const uint32 high[4] = {static_cast<uint32>(work.length), static_cast<uint32>(work.first_token),
                          static_cast<uint32>(work.end_token),
                          static_cast<uint32>(work.item)};
  store_shared(shared + WORK, low);
  store_shared(shared + WORK + 16, high);
}
__device__ __forceinline__ Work load_work(uint32 shared) {
  uint32 low[4], high[4];
  load_shared(shared + WORK, low);
  load_shared(shared + WORK + 16, high);
  return {static_cast<int32>(low[0]),  static_cast<int32>(low[1]),  static_cast<int32>(low[2]),
          static_cast<int32>(low[3]),  static_cast<int32>(high[0]), static_cast<int32>(high[1]),
          static_cast<int32>(high[2]), static_cast<int32>(high[3])};
}

// ---- Unpacking ----------------------------------------------------------------------------------

constexpr int MOST_BITS = KEY_BITS > VALUE_BITS ? KEY_BITS : VALUE_BITS;

// Rounds of a step that share a scale and a bias.
template <class SIDE>
constexpr int SHARING = SIDE::GROUP > UNIT ? STEP_ROUNDS : 1;

// What a thread has loaded of a step, and not yet unpacked.
struct Loaded {
  uint32 words[STEP_ROUNDS][MOST_BITS];
  uint32 scale[STEP_ROUNDS], bias[STEP_ROUNDS];
};

struct Rows {  // of one KV head, from some token on
  const char *codes, *scales, *biases;
  int32 codes_stride, scales_stride, biases_stride;  // the host has seen that they fit
};

// Where the rows of a KV head start goes to shared memory, like the work.
__device__ __forceinline__ void store_head(uint32 address, const nyb_prefill_stored &stored,
                                           const Work &work) {
  const char *codes =
      stored.codes + work.batch * stored.codes_stride[0] + work.kv_head * stored.codes_stride[1];
  const char *scales =
      stored.scales + work.batch * stored.scales_stride[0] + work.kv_head * stored.scales_stride[1];
  const char *biases =
      stored.biases + work.batch * stored.biases_stride[0] + work.kv_head * stored.biases_stride[1];
  asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(address), "l"(codes), "l"(scales)
               : "memory");
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address + 16), "l"(biases) : "memory");
}

template <class SIDE, bool KNOWN = PACKED != 0>
__device__ __forceinline__ Rows find_rows(const nyb_prefill_stored &stored, uint32 head,
                                          int32 token) {
  Rows rows;
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
               : "=l"(rows.codes), "=l"(rows.scales)
               : "r"(head)
               : "memory");
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(rows.biases) : "r"(head + 16) : "memory");
  rows.codes_stride = KNOWN ? SIDE::ROW_BYTES : static_cast<int32>(stored.codes_stride[2]);
  rows.scales_stride = KNOWN ? SIDE::SCALE_ROW_BYTES : static_cast<int32>(stored.scales_stride[2]);
  rows.biases_stride = KNOWN ? SIDE::SCALE_ROW_BYTES : static_cast<int32>(stored.biases_stride[2]);
  rows.codes += int64(token) * rows.codes_stride;
  rows.scales += int64(token) * rows.scales_stride;
  rows.biases += int64(token) * rows.biases_stride;
  return rows;
}

template <int BITS, int WIDE>
__device__ __forceinline__ void load_words(const char *address, uint32 *words) {
  if constexpr (WIDE >= 16 && BITS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BITS; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4 *>(address) + i / 4);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if constexpr (WIDE >= 8 && BITS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < BITS; i += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2 *>(address) + i / 2);
      words[i] = two.x, words[i + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < BITS; i++) words[i] = __ldg(reinterpret_cast<const uint32 *>(address) + i);
  }
}

template <int FLOAT>
__device__ __forceinline__ uint32 load_raw(const char *address) {
  if constexpr (FLOAT == F32) return __ldg(reinterpret_cast<const uint32 *>(address));
  return __ldg(reinterpret_cast<const uint16 *>(address));
}
template <int FLOAT>
__device__ __forceinline__ float float_of_raw(uint32 raw) {
  if constexpr (FLOAT == F32) return __uint_as_float(raw);
  return FLOAT == F16 ? f32_from_f16(raw) : f32_from_bf16(raw);
}

// Asks for memory, so that loading it finds it in the L2.
__device__ __forceinline__ void prefetch_line(const char *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same for a tile, or what there is of it: by single rows, each its own thread's, or all at once.
template <class SIDE>
__device__ __forceinline__ void prefetch_tile(const nyb_prefill_stored &stored, uint32 head,
                                              int32 first_token, int32 tokens, int thread) {
  if constexpr (PACKED) {
    constexpr int LINES = (TOKENS * SIDE::SCALE_ROW_BYTES + 127) / 128;
    const Rows rows = find_rows<SIDE>(stored, head, first_token);
    const int32 there = min(tokens, TOKENS);
    if (thread == 0)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows.codes),
                   "r"(there * SIDE::ROW_BYTES & ~15));
    if (thread < LINES && thread * 128 < there * SIDE::SCALE_ROW_BYTES) {
      prefetch_line(rows.scales + thread * 128);
      prefetch_line(rows.biases + thread * 128);
    }
  } else if (thread < min(tokens, TOKENS)) {
    const Rows rows = find_rows<SIDE>(stored, head, first_token + thread);
#pragma unroll
    for (int byte = 0; byte < SIDE::ROW_BYTES; byte += 128) prefetch_line(rows.codes + byte);
    prefetch_line(rows.scales);
    prefetch_line(rows.biases);
  }
}

// Whether f16 holds elements scale * code * 2^-BITS + bias well: below its maximum, and not all so
// small that its steps of 2^-24 would show. The largest of them is between a quarter of this sum
// and all of it. False where one of them is not finite.
__device__ __forceinline__ bool fits_f16(float scale, float bias) {
  const float most = fabsf(scale) + fabsf(bias);
  return most >= 0x1p-11f && most < 65504.0f;
}

// Elements scale * code + bias of a unit into its tile. `row` is the address of its row in its panel,
// with the row's swizzle in place.
template <class SIDE>
__device__ __forceinline__ void unpack_unit(const uint32 (&loaded)[MOST_BITS], float scale,
                                            float bias, uint32 row, int first_piece) {
  uint32 words[SIDE::BITS];
#pragma unroll
  for (int j = 0; j < SIDE::BITS; j++) words[j] = loaded[j];
  const uint32 both = pack_f16(scale, bias);
  const uint32 scales = __byte_perm(both, 0u, 0x1010), biases = __byte_perm(both, 0u, 0x3232);
#pragma unroll
  for (int eight = 0; eight < 4; eight++) {
    uint32 pairs[4];
    codes_of_eight<SIDE::BITS>(words, eight, pairs);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (SIDE::FLOAT == F32) {
        pairs[j] = pack_f16(fmaf(scale, low_of<F16>(pairs[j]), bias),
                            fmaf(scale, high_of<F16>(pairs[j]), bias));
      } else {
        pairs[j] = multiply_add_f16x2(pairs[j], scales, biases);
      }
    }
    store_shared(row ^ ((first_piece + eight) << 4), pairs);
  }
}

// One side of a thread that unpacks.
template <class SIDE>
struct Unpacker {
  // How far behind a thread's first unit its second one is (PAIRED), or its first half the other.
  static constexpr int TURN_BYTES = SIDE::HALVES ? 16 : SIDE::BITS * 4;

  // Of the thread's token in the round that is loaded next (PACKED: in the next tile's first round),
  // from its place on.
  const char *codes, *scales, *biases;
  int32 to_second;  // bytes from the first thing that it takes to the second
  uint32 row;  // of the thread's token in a tile's first round, from its place on, with its swizzle

  __device__ __forceinline__ Unpacker(const nyb_prefill_stored &stored, uint32 head,
                                      int32 first_token, int thread) {
    const int token = SIDE::token_of(thread), unit = SIDE::unit_of(thread, 0);
    const int turned = SIDE::turned(thread);
    const int group_bytes = unit * UNIT / SIDE::GROUP * bytes_of(SIDE::FLOAT);
    const Rows rows = find_rows<SIDE>(stored, head, first_token + token);
    codes = rows.codes + unit * (SIDE::BITS * 4) + (SIDE::HALVES ? turned * TURN_BYTES : 0);
    to_second = turned != 0 ? -TURN_BYTES : TURN_BYTES;
    scales = rows.scales + group_bytes;
    biases = rows.biases + group_bytes;
    asm volatile("" : "+l"(codes), "+l"(scales), "+l"(biases));
    const int piece = (unit & 1) * 4 ^ (SIDE::HALVES ? turned * 2 : 0);
    row = (unit >> 1) * SIDE::PANEL_BYTES + token * PANEL_ROW_BYTES + ((piece ^ (token & 7)) << 4);
  }

  __device__ __forceinline__ void move(const nyb_prefill_stored &stored, int tokens) {
    codes += PACKED ? SIDE::ROW_BYTES * tokens : stride(stored.codes_stride) * tokens;
    scales += PACKED ? SIDE::SCALE_ROW_BYTES * tokens : stride(stored.scales_stride) * tokens;
    biases += PACKED ? SIDE::SCALE_ROW_BYTES * tokens : stride(stored.biases_stride) * tokens;
  }
  static __device__ __forceinline__ int64 stride(const long long (&strides)[3]) {
    return static_cast<int32>(strides[2]);
  }

  // In order of the steps: the thread moves on. left: tokens from the thread's in the tile's first
  // round on. A token that is not there has scale and bias 0 and any codes: zeros.
  __device__ __forceinline__ void load(const nyb_prefill_stored &stored, int step, int32 left,
                                       int thread, Loaded &loaded) {
#pragma unroll
    for (int i = 0; i < STEP_ROUNDS; i++) {
      const int round = step * STEP_ROUNDS + i, turn = round % SIDE::TURNS;
      const int tokens = round / SIDE::TURNS * SIDE::STEP_TOKENS, moved = PACKED ? tokens : 0;
      const int units = PAIRED ? 0 : turn * SIDE::ACROSS;
      if (i % SHARING<SIDE> == 0) loaded.scale[i] = loaded.bias[i] = 0;
      if (left > tokens && SIDE::has_unit(thread, round)) {
        const int offset = moved * SIDE::ROW_BYTES + units * (SIDE::BITS * 4);
        if constexpr (SIDE::HALVES) {
          load_words<4, SIDE::WIDE>(codes + offset, loaded.words[i]);
          load_words<4, SIDE::WIDE>(codes + to_second + offset, loaded.words[i] + 4);
        } else {
          load_words<SIDE::BITS, SIDE::WIDE>((PAIRED && i == 1 ? codes + to_second : codes) + offset,
                                             loaded.words[i]);
        }
        if (i % SHARING<SIDE> == 0) {
          int group = moved * SIDE::SCALE_ROW_BYTES +
                      units * UNIT / SIDE::GROUP * bytes_of(SIDE::FLOAT);
          if (PAIRED && i == 1)  // a group is a unit
            group += SIDE::turned(thread) != 0 ? -bytes_of(SIDE::FLOAT) : bytes_of(SIDE::FLOAT);
          loaded.scale[i] = load_raw<SIDE::FLOAT>(scales + group);
          loaded.bias[i] = load_raw<SIDE::FLOAT>(biases + group);
        }
      }
      if (PACKED ? round == SIDE::ROUNDS - 1 : turn == SIDE::TURNS - 1)
        move(stored, PACKED ? TOKENS : SIDE::STEP_TOKENS);
    }
  }

  // Unpacks a step into its tile. Units that f16 does not hold become zeros, and are noted in
  // masks; returns a bit for each round of this warp that has any.
  __device__ __forceinline__ uint32 unpack(const Loaded &loaded, int step, uint32 tile,
                                           uint32 masks, int thread) const {
    float scale[STEP_ROUNDS], bias[STEP_ROUNDS];
    bool all_fit = true;
#pragma unroll
    for (int i = 0; i < STEP_ROUNDS; i++) {
      const int from = i - i % SHARING<SIDE>;
      scale[i] = float_of_raw<SIDE::FLOAT>(loaded.scale[from]) *
                 static_cast<float>(1 << (SIDE::BITS + SIDE::SHIFT));
      bias[i] = float_of_raw<SIDE::FLOAT>(loaded.bias[from]) * static_cast<float>(1 << SIDE::SHIFT);
      if (from == i) all_fit = all_fit && fits_f16(scale[i], bias[i]);
    }
    uint32 any = 0;
    if (!__all_sync(0xffffffffu, all_fit)) {
      // Seldom. A unit of zeros is held, though its scale may be minute; so is one that is not
      // there.
#pragma unroll
      for (int i = 0; i < STEP_ROUNDS; i++) {
        const int round = step * STEP_ROUNDS + i;
        uint32 ones = 0;
#pragma unroll
        for (int j = 0; j < SIDE::BITS; j++) ones |= loaded.words[i][j];
        const bool zero =
            bias[i] == 0.0f && (scale[i] == 0.0f || (ones == 0 && fabsf(scale[i]) < 1.0f));
        const bool leave = !zero && !fits_f16(scale[i], bias[i]);
        const uint32 left = __ballot_sync(0xffffffffu, leave);
        if ((threadIdx.x & 31) == 0)
          store_shared(masks + (round * 4 + (threadIdx.x >> 5 & 3)) * 4, left);
        if (left != 0) any |= 1u << round;
        if (leave) scale[i] = bias[i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < STEP_ROUNDS; i++) {
      const int round = step * STEP_ROUNDS + i;
      const int units = PAIRED ? 0 : round % SIDE::TURNS * SIDE::ACROSS;
      if (SIDE::has_unit(thread, round))
        unpack_unit<SIDE>(loaded.words[i], scale[i], bias[i],
                          tile + (units >> 1) * SIDE::PANEL_BYTES +
                              round / SIDE::TURNS * (SIDE::STEP_TOKENS * PANEL_ROW_BYTES) + row,
                          (PAIRED ? i : units & 1) * 4);
    }
    return any;
  }
};

__device__ __forceinline__ void unpack_tiles(const nyb_prefill_arguments &arguments, uint32 shared,
                                             int thread) {
  const Work work = load_work(shared);
  Unpacker<Keys> keys(arguments.k, shared + KEY_HEAD, work.first_token, thread);
  Unpacker<Values> values(arguments.v, shared + VALUE_HEAD, work.first_token, thread);
  int32 left = work.end_token - work.first_token;  // tokens from the tile that is unpacked on
  const int tiles = (max(left, 0) + TOKENS - 1) / TOKENS;
  const int key_token = Keys::token_of(thread), value_token = Values::token_of(thread);
  Loaded buffers[BUFFERS];
#pragma unroll
  for (int step = 0; step < BUFFERS; step++) {
#pragma unroll
    for (int i = 0; i < STEP_ROUNDS; i++) {
#pragma unroll
      for (int j = 0; j < MOST_BITS; j++) buffers[step].words[i][j] = 0;
    }
    if (step < KEY_STEPS)
      keys.load(arguments.k, step, left - key_token, thread, buffers[step]);
    else
      values.load(arguments.v, step - KEY_STEPS, left - value_token, thread, buffers[step]);
  }
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++, left -= TOKENS) {
    const int stage = tile & 1;
    const uint32 parity = ((tile >> 1) & 1) ^ 1;
    const uint32 barriers = shared + BARRIERS + 8 * stage;
    if (left > PREFETCH_TILES * TOKENS && (!PACKED || thread < 32)) {
      const int32 left_then = left - PREFETCH_TILES * TOKENS;
      int32 later = load_work(shared).end_token - left_then;
      asm volatile("" : "+r"(later));  // lest its product with each stride is kept in registers
      prefetch_tile<Keys>(arguments.k, shared + KEY_HEAD, later, left_then, thread);
      prefetch_tile<Values>(arguments.v, shared + VALUE_HEAD, later, left_then, thread);
    }
    uint32 any = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step == 0) barrier_wait(barriers + 8 * KEYS_EMPTY, parity);
      if (step == KEY_STEPS) barrier_wait(barriers + 8 * VALUES_EMPTY, parity);
      Loaded &loaded = buffers[step % BUFFERS];
      if (step < KEY_STEPS)
        any |= keys.unpack(loaded, step, shared + KEY_TILES + stage * Keys::TILE_BYTES,
                           shared + KEY_MASKS + stage * (Keys::ROUNDS * 16), thread);
      else
        any |= values.unpack(loaded, step - KEY_STEPS,
                             shared + VALUE_TILES + stage * Values::TILE_BYTES,
                             shared + VALUE_MASKS + stage * (Values::ROUNDS * 16), thread);
      const int next = (step + BUFFERS) % STEPS;
      const int32 left_then = left - (step + BUFFERS >= STEPS ? TOKENS : 0);
      if (next < KEY_STEPS)
        keys.load(arguments.k, next, left_then - key_token, thread, loaded);
      else
        values.load(arguments.v, next - KEY_STEPS, left_then - value_token, thread, loaded);
      if (step == KEY_STEPS - 1 || step == STEPS - 1) {
        if ((thread & 31) == 0)
          store_shared(shared + (step < KEY_STEPS ? KEY_ANY : VALUE_ANY) + 16 * stage +
                           (thread >> 5) * 4,
                       any);
        any = 0;
        barrier_arrive(barriers + 8 * (step < KEY_STEPS ? KEYS_FULL : VALUES_FULL));
      }
    }
  }
}

// ---- Query rows ---------------------------------------------------------------------------------

// One of the two rows that a thread of a multiplying group has a part in (a quarter of its columns).
struct Row {
  int32 position, head;
  int32 visible;  // tokens that it sees; 0 for a row that does not exist
  bool exists;
};

__device__ __forceinline__ Row find_row(const nyb_prefill_arguments &arguments, const Work &work,
                                        int row_in_tile) {
  const int32 index = work.row_tile * ROWS + row_in_tile;
  Row row;
  row.position = index / arguments.heads_per_kv;
  row.head = work.kv_head * arguments.heads_per_kv + index % arguments.heads_per_kv;
  row.exists = row.position < arguments.query_len;
  row.visible = visible_tokens(arguments, work.length, row.position);
  return row;
}

// The first of this thread's two rows in the tile; the other is 8 rows on.
__device__ __forceinline__ int my_row(int group) {
  return group * GROUP_ROWS + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
}

// Stores a query row as f16, its largest element in [1, 2); returns the exponent taken out of it.
// The scale's sign goes into the row, and with rounding MLX the scale too. One warp.
__device__ __forceinline__ int load_query_row(const nyb_prefill_arguments &arguments,
                                              const Work &work, int row_in_tile, uint32 queries) {
  constexpr int PER_LANE = KEY_DIM / 32;
  const Row row = find_row(arguments, work, row_in_tile);
  const int lane = threadIdx.x & 31;
  const char *source = arguments.q + int64(work.batch) * arguments.q_stride[0] +
                       row.head * arguments.q_stride[1] + row.position * arguments.q_stride[2];
  float element[PER_LANE];
  uint32 most = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    element[i] = row.exists ? load_float<QUERY_FLOAT>(source, i * 32 + lane) : 0.0f;
    if constexpr (ROUND_SCORES) {
      if (arguments.scale != 1.0f)
        element[i] = round_to<QUERY_FLOAT>(element[i] * round_to<QUERY_FLOAT>(arguments.scale));
    } else if (arguments.scale < 0.0f) {
      element[i] = -element[i];
    }
    most = max(most, __float_as_uint(element[i]) & 0x7fffffffu);
  }
  most = __reduce_max_sync(0xffffffffu, most);
  int exponent = most == 0 ? 0 : static_cast<int>(most >> 23) - 127;
  if (exponent < -126) exponent = -126;
  if (exponent > 126) exponent = 126;
  const float factor = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int d = i * 32 + lane;
    const int place = place_of_element<KEY_BITS>(d & 7);
    const uint32 address = queries + (d >> 6) * QUERY_PANEL_BYTES +
                           panel_offset(row_in_tile, (d & 63) >> 3) + place * 2;
    const uint16 bits = static_cast<uint16>(f16_from_f32(element[i] * factor));
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
  }
  return exponent;
}

// ---- The slow path: units that f16 does not hold ------------------------------------------------

// Elements 8 * eight .. 8 * eight + 7 of a unit, times 2^SHIFT, in the order of its tile.
template <class SIDE>
__device__ __forceinline__ void load_eight(const Rows &rows, int token, int block, int eight,
                                           float (&element)[8]) {
  const int group = block * UNIT / SIDE::GROUP;
  const float scale =
      float_of_raw<SIDE::FLOAT>(load_raw<SIDE::FLOAT>(rows.scales + int64(token) * rows.scales_stride +
                                                      group * bytes_of(SIDE::FLOAT)));
  const float bias =
      float_of_raw<SIDE::FLOAT>(load_raw<SIDE::FLOAT>(rows.biases + int64(token) * rows.biases_stride +
                                                      group * bytes_of(SIDE::FLOAT)));
  const uint32 *words =
      reinterpret_cast<const uint32 *>(rows.codes + int64(token) * rows.codes_stride) + block * SIDE::BITS;
#pragma unroll 1
  for (int place = 0; place < 8; place++) {
    const int bit = (8 * eight + element_at_place<SIDE::BITS>(place)) * SIDE::BITS;
    uint32 code = __ldg(words + (bit >> 5)) >> (bit & 31);
    if ((bit & 31) + SIDE::BITS > 32) code |= __ldg(words + (bit >> 5) + 1) << (32 - (bit & 31));
    code &= (1u << SIDE::BITS) - 1;
    const float value = fmaf(scale, static_cast<float>(code), bias) *
                        static_cast<float>(1 << SIDE::SHIFT);
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j == place) element[j] = value;
  }
}

// Calls body(token in tile, block) for every unit that was left out of a tile, in a fixed order.
// What is told of a stage is read by lane 0 alone, which is the one that gives the stage back:
// compute-sanitizer takes a barrier to order only what the arriving thread itself has read.
template <class SIDE, class BODY>
__device__ __forceinline__ void for_left_units(uint32 any, uint32 masks, BODY body) {
#pragma unroll 1
  for (int word = 0; word < SIDE::ROUNDS * 4; word++) {
    const int warp = word & 3, round = word >> 2;
    uint32 left = 0;
    if ((threadIdx.x & 31) == 0 && (load_shared(any + warp * 4) >> round & 1) != 0)
      left = load_shared(masks + word * 4);
    left = __shfl_sync(0xffffffffu, left, 0);
#pragma unroll 1
    while (left != 0) {
      const int thread = warp * 32 + __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      body(round / SIDE::TURNS * SIDE::STEP_TOKENS + SIDE::token_of(thread),
           SIDE::unit_of(thread, round));
    }
  }
}

__device__ __forceinline__ void add_left_keys(const Rows &keys, uint32 any, uint32 masks,
                                              uint32 queries, int row, float (&scores)[SCORES]) {
  const int lane = threadIdx.x & 31, quad = lane & 3;
  for_left_units<Keys>(any, masks, [&](int token, int block) {
    float key[8];
    load_eight<Keys>(keys, token, block, quad, key);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32 query[4];
      load_shared(queries + (block >> 1) * QUERY_PANEL_BYTES +
                      panel_offset(row + 8 * half, (block & 1) * 4 + quad),
                  query);
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        total = fmaf(low_of<F16>(query[j]), key[2 * j], total);
        total = fmaf(high_of<F16>(query[j]), key[2 * j + 1], total);
      }
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      sum[half] = total;
    }
    const bool mine = quad == (token & 7) >> 1;
#pragma unroll
    for (int j = 0; j < SCORES; j++) {
      if (mine && j >> 2 == token >> 3 && (j & 1) == (token & 1)) scores[j] += sum[(j >> 1) & 1];
    }
  });
}

__device__ __forceinline__ void add_left_values(const Rows &values, uint32 any, uint32 masks,
                                                const uint32 (&weights)[SCORES / 2],
                                                float (&output)[OUTPUTS]) {
  const int lane = threadIdx.x & 31, quad = lane & 3;
  for_left_units<Values>(any, masks, [&](int token, int block) {
    uint32 word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < SCORES / 2; j++)
      if (j >> 1 == token >> 3) word[j & 1] = weights[j];
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32 pair =
          __shfl_sync(0xffffffffu, word[half], (lane & ~3) | ((token & 7) >> 1));
      weight[half] = token & 1 ? high_of<F16>(pair) : low_of<F16>(pair);
    }
#pragma unroll 1
    for (int eight = 0; eight < 4; eight++) {
      float element[8], mine[2] = {0, 0};
      load_eight<Values>(values, token, block, eight, element);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j >> 1 == quad) mine[j & 1] = element[j];
#pragma unroll
      for (int j = 0; j < OUTPUTS; j++) {
        const float part = weight[(j >> 1) & 1];
        // A row that does not see the token must not meet its NaN.
        if (j >> 2 == block * 4 + eight && part != 0.0f)
          output[j] = fmaf(part, mine[j & 1], output[j]);
      }
    }
  });
}

// ---- Results ------------------------------------------------------------------------------------

// A row's softmax so far: its maximum in log2 units, and its sum of weights.
struct State {
  float maximum, sum;
};

// Takes a later chunk into an earlier result. An empty one changes nothing, not even bits.
__device__ __forceinline__ void merge_states(State &state, const State &later, float &keep,
                                             float &take) {
  const float maximum = fmaxf(state.maximum, later.maximum);
  const float base = maximum == -infinity() ? 0.0f : maximum;
  keep = exp2_fast(state.maximum - base);
  take = exp2_fast(later.maximum - base);
  state.sum = fmaf(state.sum, keep, later.sum * take);
  state.maximum = maximum;
}

// A partial result as the multiplying threads hold it: [1 + OUTPUTS / 4][256 threads] of four floats.
constexpr int64 PARTIAL_FLOATS = NYB_PREFILL_PARTIAL_FLOATS(VALUE_DIM);
static_assert(PARTIAL_FLOATS == (1 + OUTPUTS / 4) * 256 * 4, "all of it");

__device__ __forceinline__ float *partial_of(const nyb_prefill_arguments &arguments,
                                             const Work &work, int32 chunk) {
  if (arguments.chunks == 1) return arguments.partials + blockIdx.x * PARTIAL_FLOATS;
  const int64 tile = (int64(work.batch) * arguments.kv_heads + work.kv_head) * arguments.row_tiles +
                     work.row_tile;
  return arguments.partials + (tile * arguments.chunks + chunk) * PARTIAL_FLOATS;
}

__device__ __forceinline__ void store_partial(float *partial, int thread, const State (&state)[2],
                                              const float (&output)[OUTPUTS]) {
  float4 *fours = reinterpret_cast<float4 *>(partial) + thread;
  fours[0] = make_float4(state[0].maximum, state[1].maximum, state[0].sum, state[1].sum);
#pragma unroll
  for (int i = 0; i < OUTPUTS / 4; i++)
    fours[(i + 1) * 256] = make_float4(output[4 * i], output[4 * i + 1], output[4 * i + 2],
                                       output[4 * i + 3]);
}

__device__ __forceinline__ void load_partial(const float *partial, int thread, State (&state)[2],
                                             float (&output)[OUTPUTS]) {
  const float4 *fours = reinterpret_cast<const float4 *>(partial) + thread;
  const float4 head = fours[0];
  state[0] = {head.x, head.z};
  state[1] = {head.y, head.w};
#pragma unroll
  for (int i = 0; i < OUTPUTS / 4; i++) {
    const float4 four = fours[(i + 1) * 256];
    output[4 * i] = four.x, output[4 * i + 1] = four.y;
    output[4 * i + 2] = four.z, output[4 * i + 3] = four.w;
  }
}

// What lies in `partial` and what is in registers become one, in registers. FIRST: what lies in
// `partial` is of earlier tokens.
template <bool FIRST>
__device__ __forceinline__ void merge_partial(const float *partial, int thread, State (&state)[2],
                                              float (&output)[OUTPUTS]) {
  const float4 *fours = reinterpret_cast<const float4 *>(partial) + thread;
  const float4 head = fours[0];
  const State stored[2] = {{head.x, head.z}, {head.y, head.w}};
  float keep[2], take[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    State earlier = FIRST ? stored[half] : state[half];
    merge_states(earlier, FIRST ? state[half] : stored[half], keep[half], take[half]);
    state[half] = earlier;
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS / 4; i++) {
    const float4 four = fours[(i + 1) * 256];
    const float other[4] = {four.x, four.y, four.z, four.w};
    if (i % 8 == 7) __threadfence_block();  // a few at a time: registers are short
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float &mine = output[4 * i + j];
      mine = FIRST ? fmaf(other[j], keep[j >> 1], mine * take[j >> 1])
                   : fmaf(mine, keep[j >> 1], other[j] * take[j >> 1]);
    }
  }
}

__device__ __forceinline__ void store_rows(const nyb_prefill_arguments &arguments, const Work &work,
                                           int row_in_tile, const State (&state)[2],
                                           const float (&output)[OUTPUTS]) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Row row = find_row(arguments, work, row_in_tile + 8 * half);
    if (!row.exists) continue;
    const bool empty = state[half].sum == 0.0f;
    // No token, or none with a score above -inf, which is 0/0.
    const float nothing = row.visible > 0 ? __int_as_float(0x7fffffff) : 0.0f;
    const float weight = empty ? 0.0f : 1.0f / (1 << Values::SHIFT) / state[half].sum;
    char *out = arguments.out + work.batch * arguments.out_stride[0] +
                row.head * arguments.out_stride[1] + row.position * arguments.out_stride[2];
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      if (((j >> 1) & 1) != half) continue;
      const int column = 8 * (j >> 2) + element_at_place<VALUE_BITS>(2 * quad + (j & 1));
      store_float<OUT_FLOAT>(out, column, empty ? nothing : output[j] * weight);
    }
    if (arguments.lse != nullptr && quad == 0) {
      float *lse = reinterpret_cast<float *>(
          arguments.lse + work.batch * arguments.lse_stride[0] +
          row.head * arguments.lse_stride[1] + row.position * arguments.lse_stride[2]);
      // A score that the factor alone took beyond f32 has left no weight either.
      const float without = state[half].maximum == infinity() ? nothing : -infinity();
      *lse = empty ? without
                   : (state[half].maximum + (log2f(state[half].sum) - WEIGHT_SHIFT)) * LN_2;
    }
  }
}

#if !MERGE
// ---- Multiplying --------------------------------------------------------------------------------

__device__ __forceinline__ void start_scores(float (&scores)[SCORES], Operand queries,
                                             Operand tile) {
  products_begin();
#pragma unroll
  for (int d = 0; d < KEY_DIM; d += 16) {
    const uint32 inside = (d & 63) * 2;
    multiply_shared<TOKENS>(scores, descriptor(queries, (d >> 6) * QUERY_PANEL_BYTES + inside),
                            descriptor(tile, (d >> 6) * Keys::PANEL_BYTES + inside), d != 0);
  }
  products_commit();
}

__device__ __forceinline__ void start_output(float (&output)[OUTPUTS],
                                             const uint32 (&weights)[SCORES / 2], Operand tile) {
  products_begin();
#pragma unroll
  for (int token = 0; token < TOKENS; token += 16)
    multiply_registers<VALUE_DIM>(output, weights + token / 4,
                                  descriptor(tile, token * PANEL_ROW_BYTES));
  products_commit();
}

template <int FLOAT>
__device__ __forceinline__ uint32 pack_pair(float low, float high) {
  if constexpr (FLOAT == F16) return pack_f16(low, high);
  uint32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Scores to weights, in place, with the maximum and sum brought forward; keep gets what the earlier
// weights have to be multiplied by. The sum is this thread's own columns'.
__device__ __forceinline__ void soften(float (&scores)[SCORES], const float (&factor)[2],
                                       State (&state)[2], float (&keep)[2]) {
  // The factor is a power of two, so that bf16's rounding may come before it: only numbers of less
  // than 2^-126 would round otherwise, and they weigh the same either way.
  constexpr bool ROUND_FIRST = ROUND_SCORES && QUERY_FLOAT == BF16;
  if constexpr (ROUND_SCORES) {
#pragma unroll
    for (int j = 0; j < SCORES; j += 2) {
      const float multiplier = ROUND_FIRST ? 1.0f : factor[(j >> 1) & 1];
      const uint32 pair = pack_pair<QUERY_FLOAT>(scores[j] * multiplier, scores[j + 1] * multiplier);
      scores[j] = low_of<QUERY_FLOAT>(pair);
      scores[j + 1] = high_of<QUERY_FLOAT>(pair);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float multiplier = ROUND_FIRST    ? factor[half] * LOG2_E
                             : ROUND_SCORES ? LOG2_E
                                            : factor[half];
    float most[2] = {scores[2 * half], scores[2 * half + 1]};
#pragma unroll
    for (int j = 4; j < SCORES; j += 4) {
      most[0] = fmaxf(most[0], scores[j + 2 * half]);
      most[1] = fmaxf(most[1], scores[j + 2 * half + 1]);
    }
    float maximum = fmaxf(most[0], most[1]);
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
    maximum = fmaxf(state[half].maximum, maximum * multiplier);
    const float base = maximum == -infinity() ? 0.0f : maximum;
    keep[half] = exp2_fast(state[half].maximum - base);
    state[half].maximum = maximum;
    const float offset = WEIGHT_SHIFT - base;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < SCORES; j += 4) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float &score = scores[j + 2 * half + k];
        score = exp2_fast(fmaf(score, multiplier, offset));
        sum[k] += score;
      }
    }
    state[half].sum = fmaf(state[half].sum, keep[half], sum[0] + sum[1]);
  }
}

// Scores of tokens that their rows do not see become -inf.
__device__ __forceinline__ void hide_scores(const nyb_prefill_arguments &arguments,
                                            const Work &work, int tile, int row_in_tile,
                                            float (&scores)[SCORES]) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int columns = find_row(arguments, work, row_in_tile + 8 * half).visible -
                        (work.first_token + tile * TOKENS);
#pragma unroll
    for (int j = 0; j < SCORES; j++) {
      if (((j >> 1) & 1) != half) continue;
      if (8 * (j >> 2) + 2 * quad + (j & 1) >= columns) scores[j] = -infinity();
    }
  }
}

// Whether the warps that unpacked a tile have left any units out: a word of each says so.
__device__ __forceinline__ bool any_left(uint32 any) {
  uint32 warps[4] = {0, 0, 0, 0};
  if ((threadIdx.x & 31) == 0) load_shared(any, warps);
  return __any_sync(0xffffffffu, (warps[0] | warps[1] | warps[2] | warps[3]) != 0);
}

__device__ __forceinline__ void give_back(uint32 barrier) {
  __syncwarp();  // no lane still waits for products of the stage
  if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

__device__ __forceinline__ void sum_over_quad(State (&state)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    state[half].sum += __shfl_xor_sync(0xffffffffu, state[half].sum, 1);
    state[half].sum += __shfl_xor_sync(0xffffffffu, state[half].sum, 2);
  }
}

// What a multiplying thread has in registers.
struct Accumulators {
  float scores[SCORES], output[OUTPUTS];
  uint32 weights[SCORES / 2];
  State state[2];
};

// A tile's scores have been multiplied: softens them.
__device__ __forceinline__ void take_scores(const nyb_prefill_arguments &arguments, uint32 shared,
                                            int tile, int stage, int group, int unmasked_tiles,
                                            Accumulators &my, float (&keep)[2]) {
  hold(my.scores);
  const uint32 any = shared + KEY_ANY + 16 * stage;
  if (any_left(any)) {
    const Work work = load_work(shared);
    add_left_keys(find_rows<Keys, false>(arguments.k, shared + KEY_HEAD,
                                         work.first_token + tile * TOKENS), any,
                  shared + KEY_MASKS + stage * (Keys::ROUNDS * 16), shared, my_row(group),
                  my.scores);
  }
  give_back(shared + BARRIERS + 8 * (KEYS_EMPTY + stage));
  if (tile >= unmasked_tiles)
    hide_scores(arguments, load_work(shared), tile, my_row(group), my.scores);
  const uint32 factors = shared + FACTORS + my_row(group) * 4;
  const float factor[2] = {__uint_as_float(load_shared(factors)),
                           __uint_as_float(load_shared(factors + 32))};
  soften(my.scores, factor, my.state, keep);
}

// A tile's values have been multiplied into the output.
__device__ __forceinline__ void take_output(const nyb_prefill_arguments &arguments, uint32 shared,
                                            int tile, int stage, Accumulators &my) {
  hold(my.output);
  const uint32 any = shared + VALUE_ANY + 16 * stage;
  if (any_left(any)) {
    const Work work = load_work(shared);
    add_left_values(find_rows<Values, false>(arguments.v, shared + VALUE_HEAD,
                                             work.first_token + tile * TOKENS), any,
                    shared + VALUE_MASKS + stage * (Values::ROUNDS * 16), my.weights, my.output);
  }
  give_back(shared + BARRIERS + 8 * (VALUES_EMPTY + stage));
}

__device__ __forceinline__ void pack_weights(Accumulators &my) {
#pragma unroll
  for (int j = 0; j < SCORES / 2; j++)
    my.weights[j] = pack_f16(my.scores[2 * j], my.scores[2 * j + 1]);
}

__device__ __forceinline__ Operand key_tile(uint32 shared, int stage) {
  return operand_of_rows(shared + KEY_TILES + stage * Keys::TILE_BYTES);
}
__device__ __forceinline__ Operand value_tile(uint32 shared, int stage) {
  return operand_of_columns<Values::PANEL_BYTES>(shared + VALUE_TILES + stage * Values::TILE_BYTES);
}

// Attends over tiles first .. end - 1, a chunk, from nothing. The scores of a tile are multiplied
// together with the values of the tile before it, and softened while those still run.
__device__ __forceinline__ void attend_chunk(const nyb_prefill_arguments &arguments, uint32 shared,
                                             int group, int first, int end, int unmasked_tiles,
                                             Operand queries, Accumulators &my) {
  float keep[2];
#pragma unroll
  for (int half = 0; half < 2; half++) my.state[half] = {-infinity(), 0.0f};
#pragma unroll
  for (int j = 0; j < OUTPUTS; j++) my.output[j] = 0.0f;
  int stage = first & 1;
  barrier_wait(shared + BARRIERS + 8 * (KEYS_FULL + stage), (first >> 1) & 1);
  show_to_matrix_unit();
  start_scores(my.scores, queries, key_tile(shared, stage));
  products_wait<0>();
  take_scores(arguments, shared, first, stage, group, unmasked_tiles, my, keep);
  pack_weights(my);
#pragma unroll 1
  for (int tile = first + 1; tile < end; tile++) {
    const int before = stage;
    stage ^= 1;
    barrier_wait(shared + BARRIERS + 8 * (KEYS_FULL + stage), (tile >> 1) & 1);
    show_to_matrix_unit();
    start_scores(my.scores, queries, key_tile(shared, stage));
    barrier_wait(shared + BARRIERS + 8 * (VALUES_FULL + before), ((tile - 1) >> 1) & 1);
    show_to_matrix_unit();
    start_output(my.output, my.weights, value_tile(shared, before));
    products_wait<1>();
    take_scores(arguments, shared, tile, stage, group, unmasked_tiles, my, keep);
    products_wait<0>();
    take_output(arguments, shared, tile - 1, before, my);
    if (keep[0] != 1.0f || keep[1] != 1.0f) {
#pragma unroll
      for (int j = 0; j < OUTPUTS; j++) my.output[j] *= keep[(j >> 1) & 1];
    }
    pack_weights(my);
  }
  barrier_wait(shared + BARRIERS + 8 * (VALUES_FULL + stage), ((end - 1) >> 1) & 1);
  show_to_matrix_unit();
  start_output(my.output, my.weights, value_tile(shared, stage));
  products_wait<0>();
  take_output(arguments, shared, end - 1, stage, my);
  sum_over_quad(my.state);
}

// All threads of the block, whose last item has ended.
__device__ __forceinline__ void start_item(const nyb_prefill_arguments &arguments, uint32 shared,
                                           int32 item) {
  asm volatile("bar.sync 0, 384;" ::: "memory");
  if (threadIdx.x == 0) {
    const Work work = find_work(arguments, item);
    store_work(shared, work);
    store_head(shared + KEY_HEAD, arguments.k, work);
    store_head(shared + VALUE_HEAD, arguments.v, work);
#pragma unroll
    for (int i = 0; i < 4 * STAGES; i++) {
      const uint32 barrier = shared + BARRIERS + 8 * i;
      if (item != static_cast<int32>(blockIdx.x)) barrier_end(barrier);
      // Every thread that unpacks tells of a full tile, a warp that multiplies of an empty one.
      barrier_init(barrier, i < KEYS_EMPTY || (i >= VALUES_FULL && i < VALUES_EMPTY)
                                ? GROUP_THREADS
                                : 2 * GROUP_THREADS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("bar.sync 0, 384;" ::: "memory");
}

// Loads this group's query rows, and leaves for each what its sums of products are multiplied by to
// be scores (in log2 units, with rounding EXACT).
__device__ __forceinline__ void load_queries(const nyb_prefill_arguments &arguments, uint32 shared,
                                             int group) {
  const Work work = load_work(shared);
#pragma unroll 1
  for (int i = 0; i < 16; i++) {
    const int row = group * GROUP_ROWS + (threadIdx.x >> 5 & 3) * 16 + i;
    const int exponent = load_query_row(arguments, work, row, shared);
    // Never zero: it meets the -inf of hidden scores.
    const float factor = fmaxf(power_of_two(exponent) * (1.0f / (1 << Keys::SHIFT)) *
                                   (ROUND_SCORES ? 1.0f : fabsf(arguments.scale) * LOG2_E),
                               0x1p-126f);
    if ((threadIdx.x & 31) == 0) store_shared(shared + FACTORS + row * 4, __float_as_uint(factor));
  }
  show_to_matrix_unit();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

__device__ __forceinline__ void multiply_tiles(const nyb_prefill_arguments &arguments,
                                               uint32 shared, int group) {
  if (arguments.chunks > 1) {
    const Work work = load_work(shared);
    if (work.end_token <= work.first_token) return;  // a chunk past the sequence
  }
  Accumulators my;
  load_queries(arguments, shared, group);
  const Operand queries = operand_of_rows(shared + group * (GROUP_ROWS * PANEL_ROW_BYTES));
  int unmasked_tiles, tiles;
  {
    const Work work = load_work(shared);
    // Up to here every row of the tile sees every token.
    const int32 all_see =
        visible_tokens(arguments, work.length, work.row_tile * ROWS / arguments.heads_per_kv);
    unmasked_tiles = max(all_see - work.first_token, 0) / TOKENS;
    tiles = (max(work.end_token - work.first_token, 0) + TOKENS - 1) / TOKENS;
  }
  int tile = 0;
#pragma unroll 1
  do {
    const int end = min(tile + CHUNK_TILES, tiles);
    if (tile < end) {
      attend_chunk(arguments, shared, group, tile, end, unmasked_tiles, queries, my);
    } else {  // no row sees a token
#pragma unroll
      for (int half = 0; half < 2; half++) my.state[half] = {-infinity(), 0.0f};
#pragma unroll
      for (int j = 0; j < OUTPUTS; j++) my.output[j] = 0.0f;
    }
    const Work work = load_work(shared);
    if (tile > 0)
      merge_partial<true>(partial_of(arguments, work, work.chunk), threadIdx.x, my.state,
                          my.output);
    tile = end;
    if (tile < tiles || arguments.chunks > 1)
      store_partial(partial_of(arguments, work, work.chunk), threadIdx.x, my.state, my.output);
  } while (tile < tiles);
  if (arguments.chunks == 1)
    store_rows(arguments, load_work(shared), my_row(group), my.state, my.output);
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(MERGE ? 256 : 384, 1)
    attention_prefill(const __grid_constant__ nyb_prefill_arguments arguments) {
#if MERGE
  const Work work = find_work(arguments, static_cast<int32>(blockIdx.x));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  State state[2] = {{-infinity(), 0.0f}, {-infinity(), 0.0f}};
  float output[OUTPUTS];
#pragma unroll
  for (int j = 0; j < OUTPUTS; j++) output[j] = 0.0f;
  const int32 chunks = (work.end_token + NYB_PREFILL_CHUNK_TOKENS - 1) / NYB_PREFILL_CHUNK_TOKENS;
  if (chunks > 0) load_partial(partial_of(arguments, work, 0), threadIdx.x, state, output);
#pragma unroll 1
  for (int32 chunk = 1; chunk < chunks; chunk++)
    merge_partial<false>(partial_of(arguments, work, chunk), threadIdx.x, state, output);
  store_rows(arguments, work, my_row(threadIdx.x / GROUP_THREADS), state, output);
#else
  extern __shared__ __align__(1024) uint8 memory[];
  const uint32 shared = shared_address(memory);
  const int32 items =
      arguments.batch * arguments.kv_heads * arguments.row_tiles * arguments.chunks;
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(UNPACK_REGISTERS));
#pragma unroll 1
    for (int32 item = blockIdx.x; item < items; item = load_work(shared).item + gridDim.x) {
      start_item(arguments, shared, item);
      unpack_tiles(arguments, shared, threadIdx.x - 256);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
    // The same in all lanes, which lets the compiler keep what follows from it in uniform registers.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0);
#pragma unroll 1
    for (int32 item = blockIdx.x; item < items; item = load_work(shared).item + gridDim.x) {
      start_item(arguments, shared, item);
      multiply_tiles(arguments, shared, group);
    }
  }
#endif
}
#endif
