/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary of attention_kernel.inc.h for AVX-512 F, BW, DQ, VL and VNNI; what each
 * function does stands in simd_scalar.h. */
#ifndef NYB_SIMD_AVX512_H
#define NYB_SIMD_AVX512_H

#include <immintrin.h>
#include <stdbool.h>

#include "../numeric.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX avx512
enum { VECTOR_LANES = 16, DOT_ROWS = 4, DOT_VECTORS = 4, DOT_STEPS = 2, SUM_VECTORS = 2 };
enum { UNPACKED_STRIDE = 128 }; /* the largest group */

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
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_take_sign(vf a, vf b) {
  return _mm512_or_ps(a, _mm512_and_ps(b, _mm512_set1_ps(-0.0f)));
}
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline float vf_reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
static inline float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
static inline vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vi_from_vf(vf a) { return _mm512_cvtps_epi32(a); }

static inline vf vf_round_bf16(vf a) {
  const vi rounded = nyb_round_bf16_avx512(a);
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
static inline vf vf_where_below(vf x, float limit, vf a, vf b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), a);
}

static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_load_bytes(const uint8_t *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
static inline void vi_store(int32_t *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_shift_right(vi a, int bits) { return _mm512_srli_epi32(a, (unsigned)bits); }
static inline vi vi_dot16(vi acc, vi a, vi b) {
  acc = _mm512_dpwssd_epi32(acc, a, b);
  __asm__("" : "+v"(acc)); /* in one register: see simd_avx2.h */
  return acc;
}

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

static inline __m128i load_four_words(const char *p) {
  return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static inline void load_words_transposed(const char *p, int64_t stride_bytes, vi *words) {
  vi r[4], two[4]; /* tokens i, i + 4, ... in the quarters of a vector: 4x4 in each remains */
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_castsi128_si512(load_four_words(p + i * stride_bytes));
    r[i] = _mm512_inserti32x4(r[i], load_four_words(p + (i + 4) * stride_bytes), 1);
    r[i] = _mm512_inserti32x4(r[i], load_four_words(p + (i + 8) * stride_bytes), 2);
    r[i] = _mm512_inserti32x4(r[i], load_four_words(p + (i + 12) * stride_bytes), 3);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    two[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    two[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    words[2 * i] = _mm512_unpacklo_epi64(two[i], two[i + 2]);
    words[2 * i + 1] = _mm512_unpackhi_epi64(two[i], two[i + 2]);
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

/* Sixty-four codes fill 2*bits words, of which each quarter of the vector gets those with sixteen
 * of them. There the two bytes that hold two neighbours are brought into a lane of 16 bits; one
 * product moves the first of them to the lane's upper byte, another the second to its lower byte.
 * In the bytes, neighbours have thus changed places. */
static inline void unpack_codes(const char *rows, int64_t stride_bytes, int64_t tokens,
                                int64_t count, int bits, uint8_t *codes) {
#define BYTES_OF(i) (char)((i)*bits / 4), (char)((i)*bits / 4 + 1)
#define FIRST_BIT(i) ((i)*2 * bits % 8)
#define TO_UPPER(i) (int16_t)(1 << (8 - FIRST_BIT(i)))         /* low half of the product */
#define TO_LOWER(i) (int16_t)(1 << (16 - bits - FIRST_BIT(i))) /* high half of the product */
  const int w1 = bits / 2, w2 = bits, w3 = 3 * bits / 2;       /* the quarters' first words */
  const vi words = _mm512_setr_epi32(0, 1, 2, 3, w1, w1 + 1, w1 + 2, w1 + 3, w2, w2 + 1, w2 + 2,
                                     w2 + 3, w3, w3 + 1, w3 + 2, w3 + 3);
  /* Odd quarters of odd widths start amid a word. */
  const vi start = _mm512_maskz_set1_epi8(0xffff0000ffff0000u, (char)(2 * bits % 4));
  const vi bytes = _mm512_add_epi8(start, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                              BYTES_OF(0), BYTES_OF(1), BYTES_OF(2), BYTES_OF(3),
                                              BYTES_OF(4), BYTES_OF(5), BYTES_OF(6), BYTES_OF(7))));
  const vi to_upper =
      _mm512_broadcast_i32x4(_mm_setr_epi16(TO_UPPER(0), TO_UPPER(1), TO_UPPER(2), TO_UPPER(3),
                                            TO_UPPER(4), TO_UPPER(5), TO_UPPER(6), TO_UPPER(7)));
  const vi to_lower =
      _mm512_broadcast_i32x4(_mm_setr_epi16(TO_LOWER(0), TO_LOWER(1), TO_LOWER(2), TO_LOWER(3),
                                            TO_LOWER(4), TO_LOWER(5), TO_LOWER(6), TO_LOWER(7)));
#undef BYTES_OF
#undef FIRST_BIT
#undef TO_UPPER
#undef TO_LOWER
  const vi upper = _mm512_set1_epi16((int16_t)0xff00);
  const vi mask = _mm512_set1_epi8((char)((1 << bits) - 1));
  /* 32 codes fill `bits` words; what is made of the others, which are not read, means nothing. */
  const __mmask16 loaded = (__mmask16)((1u << (count < 64 ? bits : 2 * bits)) - 1);
  for (int64_t t = 0; t < tokens; t++, rows += stride_bytes, codes += UNPACKED_STRIDE) {
    const char *from = rows;
    for (int64_t i = 0; i < count; i += 64, from += 8 * bits) {
      const vi stored = _mm512_permutexvar_epi32(words, _mm512_maskz_loadu_epi32(loaded, from));
      const vi pairs = _mm512_shuffle_epi8(stored, bytes);
      const vi first = _mm512_mullo_epi16(pairs, to_upper);
      const vi second = _mm512_mulhi_epu16(pairs, to_lower);
      const vi both = _mm512_ternarylogic_epi32(upper, first, second, 0xca); /* upper ? : */
      _mm512_storeu_si512(codes + i, _mm512_and_si512(both, mask));
    }
  }
}
static inline int64_t unpacked_element(int64_t i) { return i ^ 1; }

#endif
