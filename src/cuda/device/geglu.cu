// SPDX-License-Identifier: Apache-2.0
// GeGLU of rows. DTYPE: of all three; MODE: of nyb_device_geglu.
//
// The table mode keeps a card's memory busy, where the steps of the direct mode are too many: a
// block makes the table of u/2 (5.6 KB in bf16, 57 KB in f16) while its first vectors are on their
// way, and goes through its share of all vectors, the next ones always on their way.
#include "geglu.cuh"
#include "geglu_arguments.h"

#if !defined(DTYPE) || !defined(MODE)
#error "DTYPE and MODE must be defined"
#endif

constexpr bool IS_F32 = DTYPE == NYB_DEVICE_F32;
constexpr bool BY_TABLE = MODE == NYB_GEGLU_TABLE;
constexpr int THREADS = BY_TABLE ? NYB_GEGLU_TABLE_THREADS : NYB_GEGLU_THREADS;
constexpr int AHEAD = 1;               // vectors on their way; more than one did not pay
constexpr int WORDS = IS_F32 ? 8 : 4;  // of a vector
constexpr int VECTOR_BYTES = WORDS * 4;

struct vector {
  uint32_t words[WORDS];
};

// ---- Vectors in memory --------------------------------------------------------------------------

NYB_FUNCTION void load(vector &to, const char *from, bool whole, int count) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) to.words[i] = 0;
  if (whole) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 words = __ldcs(reinterpret_cast<const uint4 *>(from + i * 4));
      to.words[i] = words.x;
      to.words[i + 1] = words.y;
      to.words[i + 2] = words.z;
      to.words[i + 3] = words.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    if (i >= count) continue;
    if constexpr (IS_F32) {
      to.words[i] = reinterpret_cast<const uint32_t *>(from)[i];
    } else {
      const uint32_t half = reinterpret_cast<const uint16_t *>(from)[i];
      to.words[i / 2] |= half << (i % 2 * 16);
    }
  }
}

NYB_FUNCTION void store(const vector &from, char *to, bool whole, int count) {
  if (whole) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      __stcs(reinterpret_cast<uint4 *>(to + i * 4),
             make_uint4(from.words[i], from.words[i + 1], from.words[i + 2], from.words[i + 3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    if (i >= count) continue;
    if constexpr (IS_F32) {
      reinterpret_cast<uint32_t *>(to)[i] = from.words[i];
    } else {
      reinterpret_cast<uint16_t *>(to)[i] =
          static_cast<uint16_t>(from.words[i / 2] >> (i % 2 * 16));
    }
  }
}

struct place {
  int64_t gate, up, out;  // bytes from the first row's
  int count;              // elements; 0: none
  bool whole;
};

NYB_FUNCTION place place_of(const nyb_device_geglu &call, int64_t index) {
  place at = {};
  if (index >= call.vectors) return at;
  int64_t column = index, row = 0;
  if (call.row_vectors.divisor != call.vectors) {
    row = nyb_split(index, &call.row_vectors, &column);
  }
  at.gate = row * call.gate_stride + column * VECTOR_BYTES;
  at.up = row * call.up_stride + column * VECTOR_BYTES;
  at.out = row * call.out_stride + column * VECTOR_BYTES;
  const int64_t rest = call.columns - column * NYB_LANE_ELEMENTS;
  at.count = static_cast<int>(rest < NYB_LANE_ELEMENTS ? rest : NYB_LANE_ELEMENTS);
  at.whole = call.wide && at.count == NYB_LANE_ELEMENTS;
  return at;
}

// Eight elements of gate and of up.
struct work {
  vector gate, up;
};

NYB_FUNCTION void load(work &to, const nyb_device_geglu &call, int64_t index) {
  const place at = place_of(call, index);
  load(to.gate, call.gate + at.gate, at.whole, at.count);
  load(to.up, call.up + at.up, at.whole, at.count);
}

// ---- The steps ----------------------------------------------------------------------------------

// Two results of one 16-bit dtype; a NaN becomes the quiet positive one.
NYB_FUNCTION uint32_t pack(float low, float high) {
  constexpr uint32_t nan = DTYPE == NYB_DEVICE_F16 ? NYB_DEVICE_NAN_F16 : NYB_DEVICE_NAN_BF16;
#if __CUDA_ARCH__ >= 900  // a NaN converts to 0x7fff, the greatest of all as a signed integer
  uint32_t word;
  if constexpr (DTYPE == NYB_DEVICE_F16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  asm("min.s16x2 %0, %0, %1;" : "+r"(word) : "r"(nan | nan << 16));
  return word;
#else
  const uint32_t first = low == low ? nyb_number_to(DTYPE, low) : nan;
  const uint32_t second = high == high ? nyb_number_to(DTYPE, high) : nan;
  return first | second << 16;
#endif
}

// g of a gate by its bits, not yet rounded where `table` is used.
NYB_FUNCTION float gelu(uint32_t gate, const uint16_t *table) {
  if constexpr (BY_TABLE) return nyb_gelu_by_entry(DTYPE, gate, table[nyb_gelu_index(DTYPE, gate)]);
  const float x = IS_F32 ? nyb_float_of(gate) : nyb_number_from(DTYPE, gate);
  const float inner = nyb_gelu_inner(DTYPE, x);
  const float t = MODE == NYB_GEGLU_COMPAT ? tanhf(inner) : nyb_device_tanh(inner);
  return nyb_gelu_of(DTYPE, x, nyb_gelu_factor(DTYPE, t));
}

NYB_FUNCTION void compute(vector &gate, const vector &up, const uint16_t *table) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if constexpr (IS_F32) {
      const float y = NYB_MULTIPLY(gelu(gate.words[i], table), nyb_float_of(up.words[i]));
      gate.words[i] = y == y ? nyb_bits_of(y) : 0x7fc00000u;
    } else {
      const float low = nyb_round_number(DTYPE, gelu(gate.words[i] & 0xffffu, table));
      const float high = nyb_round_number(DTYPE, gelu(gate.words[i] >> 16, table));
      gate.words[i] = pack(NYB_MULTIPLY(low, nyb_number_from(DTYPE, up.words[i] & 0xffffu)),
                           NYB_MULTIPLY(high, nyb_number_from(DTYPE, up.words[i] >> 16)));
    }
  }
}

NYB_FUNCTION void make_table(uint16_t *table) {
  constexpr int entries = DTYPE == NYB_DEVICE_F16 ? NYB_GELU_ENTRIES_F16 : NYB_GELU_ENTRIES_BF16;
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    nyb_gelu_entry(DTYPE, i, &table[i], &table[entries + i]);
  }
  __syncthreads();
}

NYB_FUNCTION void finish(work &done, const nyb_device_geglu &call, int64_t index,
                         const uint16_t *table) {
  compute(done.gate, done.up, table);
  const place at = place_of(call, index);
  store(done.gate, call.out + at.out, at.whole, at.count);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    geglu(const __grid_constant__ nyb_device_geglu call) {
  extern __shared__ uint16_t table[];
  nyb_await_previous();
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  int64_t index = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  if constexpr (!BY_TABLE) {
    for (; index < call.vectors; index += step) {
      work current;
      load(current, call, index);
      finish(current, call, index, table);
    }
  } else {
    work next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(next[i], call, index + i * step);
    make_table(table);
    for (; index < call.vectors; index += step) {
      work current = next[0];
#pragma unroll
      for (int i = 1; i < AHEAD; i++) next[i - 1] = next[i];
      load(next[AHEAD - 1], call, index + AHEAD * step);
      finish(current, call, index, table);
    }
  }
}
