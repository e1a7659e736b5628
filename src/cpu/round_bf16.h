/* SPDX-License-Identifier: Apache-2.0 */
/* Rounding floats to bf16, nearest-even, for each vector ISA. */
#ifndef NYB_ROUND_BF16_H
#define NYB_ROUND_BF16_H

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* The upper half of each element becomes its bf16. A NaN stays one if its payload's lower half is
 * 0, as that of a NaN from a bf16; others may turn into anything. */
#if defined(__AVX2__)
static inline __m256i nyb_round_bf16_avx2(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
#endif
#if defined(__AVX512F__)
static inline __m512i nyb_round_bf16_avx512(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
#endif
#if defined(__aarch64__)
static inline uint32x4_t nyb_round_bf16_neon(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
#endif

#endif
