// SPDX-License-Identifier: Apache-2.0
// Codes of the affine formats to pairs of f16, exactly: code * 2^-bits, which is below 1.
#pragma once

#include "numbers.cuh"

// The 32 bits of a little-endian bit stream from bit `bit` on, of which `wanted` are needed.
template <int WORDS>
__device__ __forceinline__ uint32 stream_bits(const uint32 (&words)[WORDS], int bit, int wanted) {
  const int word = bit >> 5, shift = bit & 31;
  if (shift == 0) return words[word];
  if (shift + wanted <= 32) return words[word] >> shift;
  return __funnelshift_r(words[word], words[word + 1], shift);
}

__device__ __forceinline__ uint32 multiply_add_f16x2(uint32 a, uint32 b, uint32 c) {
  uint32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32 and_or(uint32 a, uint32 b, uint32 c) {
  uint32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two f16 of 2^exponent.
__device__ __forceinline__ constexpr uint32 power_pair_f16(int exponent) {
  return static_cast<uint32>((exponent + 15) << 10) * 0x00010001u;
}

// Of the two codes that stand at bit `at` of each half of `halves`: code * 2^-BITS. The code is put
// under the exponent of 1,024 in place, and then both the 1,024 and the place are taken back by one
// exact multiply-add. A place that would reach past the mantissa is shifted down first.
template <int BITS>
__device__ __forceinline__ uint32 code_pair(uint32 halves, int at) {
  const bool down = at + BITS > 10;
  const int place = down ? 0 : at;
  const uint32 shifted = down ? halves >> at : halves;
  const uint32 mask = static_cast<uint32>((1 << BITS) - 1) << place;
  const uint32 magic = and_or(shifted, mask * 0x00010001u, 0x64006400u);
  return multiply_add_f16x2(magic, power_pair_f16(-place - BITS),
                            power_pair_f16(10 - place - BITS) | 0x80008000u);
}

// Where element `element` of eight neighbours lies among what codes_of_eight gives.
template <int BITS>
__device__ __forceinline__ constexpr int place_of_element(int element) {
  return BITS == 8 ? element : element < 4 ? 2 * element : 2 * (element - 4) + 1;
}
template <int BITS>
__device__ __forceinline__ constexpr int element_at_place(int place) {
  return BITS == 8 ? place : (place >> 1) + 4 * (place & 1);
}

// Elements 8 * eight .. 8 * eight + 7 of the 32 in `words`: elements i and i + 4 share a word, but
// 8-bit codes come in order.
template <int BITS>
__device__ __forceinline__ void codes_of_eight(const uint32 (&words)[BITS], int eight,
                                               uint32 (&pairs)[4]) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 magic =
          __byte_perm(words[2 * eight + (i >> 1)], 0x64646464u, i & 1 ? 0x4342 : 0x4140);
      pairs[i] =
          multiply_add_f16x2(magic, power_pair_f16(-8), power_pair_f16(2) | 0x80008000u);
    }
  } else if constexpr (BITS == 2) {
    const uint32 halves =
        __byte_perm(words[eight >> 1], 0u, eight & 1 ? 0x4342 : 0x4140);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = code_pair<BITS>(halves, 2 * i);
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 halves = i < 2 ? words[eight] : words[eight] >> 8;
      pairs[i] = code_pair<BITS>(halves, 4 * (i & 1));
    }
  } else {
    const int bit = 8 * eight * BITS;
    if constexpr (BITS == 3) {
      const uint32 halves =
          __byte_perm(stream_bits(words, bit, 12), stream_bits(words, bit + 12, 12), 0x5410);
#pragma unroll
      for (int i = 0; i < 4; i++) pairs[i] = code_pair<BITS>(halves, 3 * i);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32 halves =
            __byte_perm(stream_bits(words, bit + i * BITS, 2 * BITS),
                        stream_bits(words, bit + (i + 4) * BITS, 2 * BITS), 0x5410);
        pairs[i] = code_pair<BITS>(halves, 0);
        pairs[i + 1] = code_pair<BITS>(halves, BITS);
      }
    }
  }
}
