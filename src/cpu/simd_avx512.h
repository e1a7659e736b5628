/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary of attention_kernel.inc.h for AVX-512 F, BW, DQ, VL and VNNI; what each
 * function does stands in simd_scalar.h. */
#ifndef NYB_SIMD_AVX512_H
#define NYB_SIMD_AVX512_H

#include <immintrin.h>
#include <stdbool.h>

#include "../numeric.h"

#define NYB_ISA_SUFFIX avx512
enum { VECTOR_LANES = 16, DOT_ROWS = 4, DOT_VECTORS = 4, SUM_VECTORS = 2 };

typedef __m512 vf;
typedef __m512i vi;

static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline float vf_reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
static inline float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
static inline vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vi_from_vf(vf a) { return _mm512_cvtps_epi32(a); }

static inline vf vf_round_bf16(vf a) {
  const vi bits = _mm512_castps_si512(a);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const vi rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const vi kept = _mm512_and_si512(rounded, _mm512_set1_epi32(-65536));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_castsi512_ps(kept), nan, a);
}
static inline vf vf_round_f16(vf a) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf vf_load_bf16(const uint16_t *p) {
  const vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vf vf_load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

static inline vf vf_low_bf16(vi a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
static inline vf vf_high_bf16(vi a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(-65536)));
}
static inline vf vf_low_f16(vi a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
static inline vf vf_high_f16(vi a) { return vf_low_f16(_mm512_srli_epi32(a, 16)); }

static inline __mmask16 lanes_below(int64_t n) {
  if (n <= 0) return 0;
  return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1);
}
static inline vf vf_keep_first(vf a, int64_t n) { return _mm512_maskz_mov_ps(lanes_below(n), a); }

static inline vf vf_power_of_low_bits(vf a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
static inline vf vf_zero_below(vf a, vf x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), a);
}

static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline void vi_store(int32_t *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_shift_right(vi a, int bits) { return _mm512_srli_epi32(a, (unsigned)bits); }
static inline vi vi_dot16(vi acc, vi a, vi b) { return _mm512_dpwssd_epi32(acc, a, b); }

static inline vi vi_shift_right_halves(vi a, int bits) {
  return _mm512_srli_epi16(a, (unsigned)bits);
}
static inline vi vi_join_halves(vi low, vi high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16));
}

enum { WORD_LANES = 16, WORDS_STRIP = 4 };
typedef __m512i wi;
static inline wi wi_zero(void) { return _mm512_setzero_si512(); }
static inline wi wi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline wi wi_load(const char *p) { return _mm512_loadu_si512(p); }
static inline void wi_store(int32_t *p, wi x) { _mm512_storeu_si512(p, x); }
static inline wi wi_and(wi a, wi b) { return _mm512_and_si512(a, b); }
static inline wi wi_shift_right_halves(wi a, int bits) {
  return _mm512_srli_epi16(a, (unsigned)bits);
}
static inline wi wi_interleave_low(wi a, wi b) { return _mm512_unpacklo_epi16(a, b); }
static inline wi wi_interleave_high(wi a, wi b) { return _mm512_unpackhi_epi16(a, b); }
static inline int interleaved_half(bool high, int lane) {
  return lane / 4 * 8 + high * 4 + lane % 4;
}
static inline wi wi_load_split(const char *p) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), wi_load(p));
}
static inline wi wi_dot16(wi acc, wi a, wi b) { return _mm512_dpwssd_epi32(acc, a, b); }
static inline void wi_add_scaled(float *out, wi dots, float unit, float rest) {
  const __m512 scaled =
      _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_set1_ps(unit), _mm512_set1_ps(rest));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), scaled));
}

static inline void load_words_transposed(const char *const *rows, int64_t first_word, int64_t count,
                                         vi *words) {
  const __mmask16 mask = lanes_below(count);
  vi r[16], p[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; t++) {
    r[t] = _mm512_maskz_loadu_epi32(mask, rows[t] + first_word * 4);
  }
#pragma GCC unroll 16
  for (int t = 0; t < 16; t += 2) {
    p[t] = _mm512_unpacklo_epi32(r[t], r[t + 1]);
    p[t + 1] = _mm512_unpackhi_epi32(r[t], r[t + 1]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < 16; t += 4) {
    r[t] = _mm512_unpacklo_epi64(p[t], p[t + 2]);
    r[t + 1] = _mm512_unpackhi_epi64(p[t], p[t + 2]);
    r[t + 2] = _mm512_unpacklo_epi64(p[t + 1], p[t + 3]);
    r[t + 3] = _mm512_unpackhi_epi64(p[t + 1], p[t + 3]);
  }
  /* r[4i + j] now holds, in 128-bit lane l, word 4l + j of rows 4i .. 4i+3: a 4x4 transpose of
   * lanes over i remains. */
#pragma GCC unroll 16
  for (int j = 0; j < 4; j++) {
    const vi a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44);
    const vi b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xee);
    const vi c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
    const vi d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xee);
    words[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    words[4 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    words[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    words[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

/* Sixteen codes fill 2*bits bytes. Each lane is cut from one of four 32-bit windows, chosen so that
 * none reaches past the 32 elements that share whole words. */
static inline vi decode_codes_int(const char *row, int64_t element, int bits) {
  const char *bytes = row + element / 8 * bits;
  if (bits == 8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)bytes));
  }
  const vi mask = _mm512_set1_epi32((1 << bits) - 1);
  if (bits == 2) {
    int32_t word;
    memcpy(&word, bytes, 4);
    const vi shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word), shifts), mask);
  }
  if (bits == 4) {
    const vi lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const vi shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const vi pair = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(const void *)bytes));
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(lanes, pair), shifts), mask);
  }
  int32_t window[4];
  if (bits == 3) { /* 48 bits: windows at bits 0 and 16 */
    memcpy(&window[0], bytes, 4);
    memcpy(&window[1], bytes + 2, 4);
    const vi windows =
        _mm512_inserti64x4(_mm512_set1_epi32(window[0]), _mm256_set1_epi32(window[1]), 1);
    const vi shifts = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 8, 11, 14, 17, 20, 23, 26, 29);
    return _mm512_and_si512(_mm512_srlv_epi32(windows, shifts), mask);
  }
  /* 5 bits: windows at bits 0, 8, 40, 48; 6 bits: at bits 0, 16, 48, 64 */
  memcpy(&window[0], bytes, 4);
  memcpy(&window[1], bytes + bits - 4, 4);
  memcpy(&window[2], bytes + bits, 4);
  memcpy(&window[3], bytes + 2 * bits - 4, 4);
  const __m128i packed = _mm_setr_epi32(window[0], window[1], window[2], window[3]);
  const vi lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const vi windows = _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(packed));
  const vi shifts =
      bits == 5 ? _mm512_setr_epi32(0, 5, 10, 15, 12, 17, 22, 27, 0, 5, 10, 15, 12, 17, 22, 27)
                : _mm512_setr_epi32(0, 6, 12, 18, 8, 14, 20, 26, 0, 6, 12, 18, 8, 14, 20, 26);
  return _mm512_and_si512(_mm512_srlv_epi32(windows, shifts), mask);
}

static inline vf decode_codes(const char *row, int64_t element, int bits) {
  return _mm512_cvtepi32_ps(decode_codes_int(row, element, bits));
}

static inline void unpack_codes(const char *row, int64_t element, int64_t count, int bits,
                                uint8_t *codes) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m128i packed = _mm512_cvtepi32_epi8(decode_codes_int(row, element + i, bits));
    _mm_storeu_si128((__m128i *)(void *)(codes + i), packed);
  }
}
static inline int64_t unpacked_element(int64_t i, int bits, int64_t group_size) {
  (void)bits, (void)group_size;
  return i;
}

#endif
