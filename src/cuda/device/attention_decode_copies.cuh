// SPDX-License-Identifier: Apache-2.0
// The copying warp: where a block of threads is in its run of leaves, and the rows of each step on
// their way to shared memory.
#pragma once

#include "attention_decode_layout.cuh"

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
  __device__ __forceinline__ void enter_sequence(Position &at, int batch) const {
    at.batch = batch;
    static_cast<Sequence &>(at) = sequence_of(*all, batch);
  }
  // All leaves of all pairs: the host takes another kernel where they are 2^31 or more. The only
  // sequence is entered, where there is but one.
  __device__ __forceinline__ uint32 units(Position &at) const {
    if (arguments->batch == 1) {
      enter_sequence(at, 0);
      return at.leaves().count() * pairs();
    }
    uint32 leaves = 0;
#pragma unroll 1
    for (int batch = threadIdx.x & 31; batch < arguments->batch; batch += 32)
      leaves += leaves_of(batch);
    for (int distance = 16; distance > 0; distance /= 2)
      leaves += __shfl_xor_sync(~0u, leaves, distance);
    return leaves * pairs();
  }
  // From where units() has left `at`. A lane looks at a sequence.
  __device__ __forceinline__ void find(Position &at, uint32 unit) const {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
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
  }
  // To the next one, which exists.
  __device__ __forceinline__ void advance(Position &at) const {
    if (++at.leaf < at.leaves().end) {
      if constexpr (SIGHT) {
        if (at.leaf == at.leaves().keep) at.leaf = at.leaves().begin;
      }
      return;
    }
    at.leaf = at.leaves().leaf_at(0);
    if (++at.pair < pairs()) return;
    at.pair = 0;
    do enter_sequence(at, at.batch + 1);
    while (SIGHT ? at.leaves().count() == 0 : at.length == 0);
    at.leaf = at.leaves().leaf_at(0);
  }
};

// A leaf's steps from `first` up to `end` hold something that is seen.
__device__ __forceinline__ int first_step_of(const Position &at) {
#if FEATURES & NYB_DECODE_SIGHT
  const Leaves leaves = at.leaves();
  const int hidden = at.begin_token - at.leaf * LEAF;
  if (at.leaf == leaves.begin && at.keep_tokens <= at.leaf * LEAF && hidden > 0)
    return hidden / STEP;
#endif
  return 0;
}
__device__ __forceinline__ int end_step_of(const Position &at) {
  int left = at.length - at.leaf * LEAF;
#if FEATURES & NYB_DECODE_SIGHT
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
    const nyb_decode_features &call = features_of(arguments);
    keep_end = wrap = 0x7fffffff;
    of_kept = of_ring = of_wrapped = 0;
#if FEATURES & NYB_DECODE_SIGHT
    of_kept = at.start;
#endif
    if (call.ring_tokens == 0) return;
    const int slots = call.ring_tokens - call.ring_keep_tokens;
    if (call.ring_offsets != nullptr) of_ring = max(min(call.ring_offsets[at.batch], slots - 1), 0);
    keep_end = call.ring_keep_tokens;
    wrap = call.ring_tokens - of_ring;
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
    if (!SIGHT && !PLACED && same_pair) return; // the leaf before was whole
    if (!PLACED || !same_pair) {
      const int64 batch = PLACED == NYB_DECODE_PAGES ? 0 : at.batch, head = problem.head_of(at);
      const auto address = [&](const char *base, const long long *stride) {
        return base + batch * stride[0] + head * stride[1] + (PLACED ? 0 : token) * stride[2];
      };
      codes = address(stored->codes, stored->codes_stride);
      scales = address(stored->scales, stored->scales_stride);
      biases = address(stored->biases, stored->biases_stride);
      if constexpr (PLACED == NYB_DECODE_SHIFTED) shift.start(*problem.all, at);
    }
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
    if constexpr (CODES_AT != NONE) {
      if (tokens_left >= STEP) {
        copy_strided_codes<true>(stage);
      } else {
        copy_strided_codes<false>(stage);
      }
    }
    if constexpr (SCALES_AT != NONE) {
      copy_strided_scales(stage + SCALES_AT, scales, stored->scales_stride[2]);
      copy_strided_scales(stage + BIASES_AT, biases, stored->biases_stride[2]);
    }
  }
  template <bool FULL>
  __device__ __forceinline__ void copy_strided_codes(uint32 stage) const {
    constexpr int WORDS = ROW / 4;
    const int lane = threadIdx.x & 31;
#pragma unroll 4
    for (int index = lane; index < STEP * WORDS; index += 32) {
      const int token = index / WORDS, word = index % WORDS;
      const uint32 to =
          stage + token / TILE * OWN + CODES_AT + LAYOUT::word_offset(token % TILE, word);
      const bool inside = FULL || token < tokens_left;
      const char *from = codes + row_of(inside ? token : 0) * stored->codes_stride[2] + word * 4;
      if constexpr (FULL) {
        copy_async_4(to, from);
      } else {
        copy_async_4(to, from, inside ? 4 : 0);
      }
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
    const nyb_decode_features &call = features_of(*problem.all);
    const int token = leaf * LEAF + (threadIdx.x & 31) % (LEAF / RUN) * RUN;
    if (token >= at.length) return 0;
    return call.page_table[at.batch * call.page_table_stride + (token >> page_shift())];
  }
  __device__ __forceinline__ int page_shift() const { return problem.arguments->page_shift; }
  __device__ __forceinline__ void enter_pages(bool same_pair) {
    const int page = same_pair ? next_page : page_of(at.leaf);
    next_page = page_of(at.leaf + 1);
    const int64 block = max(min(page, features_of(*problem.all).page_count - 1), 0);
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
      enter_leaf(SIGHT ? at.leaf == before + 1 && at.leaf != at.leaves().leaf_at(0)
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
  if constexpr (PLACED) { // a code of its own behind the keys' would take longer
    value_scales.start(problem, a.v, at, units);
    values.start(problem, a.v, at, units);
  }
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
    if (!PLACED && turn == -STAGES) { // once the first keys are on their way
      value_scales.start(problem, a.v, at, units);
      values.start(problem, a.v, at, units);
    }
    value_scales.queue(shared + VALUE_SCALES_AT + scale_stage * SCALE_STAGE_BYTES);
    end_copy_group();
    value_stage = key_stage;
    key_stage = next_of<STAGES>(key_stage);
    scale_stage = next_of<SCALE_STAGES>(scale_stage);
    if (turn == FIRST_TURNS - STAGES - 1) {
      wait_for_copies<2 * FIRST_TURNS - 2>();
      first_keys_arrived();
#if __CUDA_ARCH__ >= 900
      // The merge may come, and looks at lengths, as it does not before the kernel before has ended.
      // What it begins with is not in the way of what this one begins with any more.
      asm volatile("griddepcontrol.launch_dependents;");
#endif
    }
  }
  wait_for_copies<0>();
}
