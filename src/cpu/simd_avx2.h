/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary of attention_kernel.inc.h for AVX2 with FMA and F16C; what each function
 * does stands in simd_scalar.h. */
#ifndef NYB_SIMD_AVX2_H
#define NYB_SIMD_AVX2_H

#include <immintrin.h>
#include <stdbool.h>

#include "../numeric.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX avx2
enum { VECTOR_LANES = 8, DOT_ROWS = 4, DOT_VECTORS = 2, DOT_STEPS = 1, SUM_VECTORS = 2 };
enum { UNPACKED_STRIDE = 128 }; /* the largest group */

typedef __m256 vf;
typedef __m256i vi;

static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_take_sign(vf a, vf b) {
  return _mm256_or_ps(a, _mm256_and_ps(b, _mm256_set1_ps(-0.0f)));
}
static inline vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }

static inline float vf_reduce_add(vf a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  x = _mm_add_ss(x, _mm_movehdup_ps(x));
  return _mm_cvtss_f32(x);
}

static inline float vf_reduce_max(vf a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  x = _mm_max_ss(x, _mm_movehdup_ps(x));
  return _mm_cvtss_f32(x);
}

static inline vf vf_from_vi(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi vi_from_vf(vf a) { return _mm256_cvtps_epi32(a); }

static inline vf vf_round_bf16(vf a) {
  const vi rounded = nyb_round_bf16_avx2(a);
  const vf kept = _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(-65536)));
  return _mm256_blendv_ps(kept, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline vf vf_round_f16(vf a) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline vf vf_load_bf16(const uint16_t *p) {
  const vi wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline vf vf_low_bf16(vi a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
static inline vf vf_high_bf16(vi a) {
  return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(-65536)));
}
static inline vf vf_high_f16(vi a) {
  const vi halves = _mm256_srli_epi32(a, 16);
  const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0xd8);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
static inline vf vf_low_f16(vi a) { return vf_high_f16(_mm256_slli_epi32(a, 16)); }

static inline vi lanes_below(int64_t n) {
  const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)(n > 8 ? 8 : n)), lane);
}
static inline vf vf_keep_first(vf a, int64_t n) {
  return _mm256_and_ps(a, _mm256_castsi256_ps(lanes_below(n)));
}

static inline vf vf_power_of_low_bits(vf a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
static inline vf vf_zero_below(vf a, vf x, float limit) {
  return _mm256_and_ps(a, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ));
}
static inline vf vf_where_below(vf x, float limit, vf a, vf b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ));
}

static inline vi vi_zero(void) { return _mm256_setzero_si256(); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_load(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vi vi_load_bytes(const uint8_t *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
static inline void vi_store(int32_t *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_shift_right(vi a, int bits) { return _mm256_srli_epi32(a, bits); }
static inline vi vi_dot16(vi acc, vi a, vi b) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
  /* The sum stays in one register: GCC 12 else copies all sums in every step of the scores' loop,
   * a quarter of its instructions. */
  __asm__("" : "+x"(acc));
  return acc;
}

static inline vi vi_shift_right_halves(vi a, int bits) { return _mm256_srli_epi16(a, bits); }
static inline vi vi_join_halves(vi low, vi high) {
  return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
}

enum { WORD_LANES = 8, WORDS_STRIP = 2 };
typedef __m256i wi;
static inline wi wi_zero(void) { return _mm256_setzero_si256(); }
static inline wi wi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline wi wi_load(const char *p) {
  return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
static inline void wi_store(int32_t *p, wi x) { _mm256_storeu_si256((__m256i *)(void *)p, x); }
static inline wi wi_and(wi a, wi b) { return _mm256_and_si256(a, b); }
static inline wi wi_shift_right_halves(wi a, int bits) { return _mm256_srli_epi16(a, bits); }
static inline wi wi_interleave_low(wi a, wi b) { return _mm256_unpacklo_epi16(a, b); }
static inline wi wi_interleave_high(wi a, wi b) { return _mm256_unpackhi_epi16(a, b); }
static inline int interleaved_half(bool high, int lane) {
  return lane / 4 * 8 + high * 4 + lane % 4;
}
static inline wi wi_load_split(const char *p) { return _mm256_permute4x64_epi64(wi_load(p), 0xd8); }
static inline wi wi_dot16(wi acc, wi a, wi b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
static inline void wi_add_scaled(float *out, wi dots, float unit, float rest) {
  const __m256 scaled =
      _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), _mm256_set1_ps(unit), _mm256_set1_ps(rest));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), scaled));
}

static inline __m128i load_four_words(const char *p) {
  return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static inline void load_words_transposed(const char *p, int64_t stride_bytes, vi *words) {
  vi r[4], two[4]; /* tokens i and i + 4 in the halves of a vector: 4x4 in each remains */
  for (int i = 0; i < 4; i++) {
    const __m128i low = load_four_words(p + i * stride_bytes);
    const __m128i high = load_four_words(p + (i + 4) * stride_bytes);
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  for (int i = 0; i < 4; i += 2) {
    two[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    two[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    words[2 * i] = _mm256_unpacklo_epi64(two[i], two[i + 2]);
    words[2 * i + 1] = _mm256_unpackhi_epi64(two[i], two[i + 2]);
  }
}

/* Eight codes start at a byte boundary and fill `bits` bytes. Lanes 0-3 are cut from the 32-bit
 * window at the first byte, lanes 4-7 from a later one. Windows never reach past the 32 elements
 * that share whole words. */
static inline vi decode_codes_int(const char *row, int64_t element, int bits) {
  const char *bytes = row + element / 8 * bits;
  if (bits == 8) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)bytes));
  }
  const vi mask = _mm256_set1_epi32((1 << bits) - 1);
  int32_t low, high;
  if (bits == 4) {
    memcpy(&low, bytes, 4);
    const vi shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts), mask);
  }
  if (bits == 2) {
    const int64_t odd = element / 8 & 1; /* the window holds 16 elements */
    memcpy(&low, bytes - 2 * odd, 4);
    const vi shifts = _mm256_add_epi32(_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                                       _mm256_set1_epi32((int32_t)(16 * odd)));
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts), mask);
  }
  if (bits == 3) { /* 24 bits; the last of four reads one byte earlier */
    const int64_t last = (element / 8 & 3) == 3;
    memcpy(&low, bytes - last, 4);
    const vi shifts = _mm256_add_epi32(_mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21),
                                       _mm256_set1_epi32((int32_t)(8 * last)));
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts), mask);
  }
  /* 5 bits: 40 bits, second window at bit 8; 6 bits: 48 bits, second window at bit 16 */
  memcpy(&low, bytes, 4);
  memcpy(&high, bytes + bits - 4, 4);
  const vi windows = _mm256_inserti128_si256(_mm256_set1_epi32(low), _mm_set1_epi32(high), 1);
  const vi shifts = bits == 5 ? _mm256_setr_epi32(0, 5, 10, 15, 12, 17, 22, 27)
                              : _mm256_setr_epi32(0, 6, 12, 18, 8, 14, 20, 26);
  return _mm256_and_si256(_mm256_srlv_epi32(windows, shifts), mask);
}

static inline vf decode_codes(const char *row, int64_t element, int bits) {
  return _mm256_cvtepi32_ps(decode_codes_int(row, element, bits));
}

/* Thirty-two codes fill `bits` words, which are loaded so that each half of the vector holds
 * sixteen of them, the upper half from byte 2*bits on. There each code's two bytes are brought into
 * a lane of 16 bits, and a product moves the code to the lane's top, from where it is shifted down.
 * Eight codes fill whole bytes, so that the first eight and the last eight of a half lie alike. */
static inline void unpack_codes(const char *rows, int64_t stride_bytes, int64_t tokens,
                                int64_t count, int bits, uint8_t *codes) {
#define BYTES_OF(i) (char)((i)*bits / 8), (char)((i)*bits / 8 + 1)
#define FACTOR_OF(i) (int16_t)(1 << (16 - bits - (i)*bits % 8))
  const __m128i bytes = _mm_setr_epi8(BYTES_OF(0), BYTES_OF(1), BYTES_OF(2), BYTES_OF(3),
                                      BYTES_OF(4), BYTES_OF(5), BYTES_OF(6), BYTES_OF(7));
  const vi factors = _mm256_broadcastsi128_si256(
      _mm_setr_epi16(FACTOR_OF(0), FACTOR_OF(1), FACTOR_OF(2), FACTOR_OF(3), FACTOR_OF(4),
                     FACTOR_OF(5), FACTOR_OF(6), FACTOR_OF(7)));
#undef BYTES_OF
#undef FACTOR_OF
  /* Both halves are loaded in 8 or 16 bytes that lie within the words. */
  const int loaded = bits < 4 ? 8 : 16, upper = 4 * bits - loaded;
  const vi first =
      _mm256_inserti128_si256(_mm256_castsi128_si256(bytes),
                              _mm_add_epi8(bytes, _mm_set1_epi8((char)(2 * bits - upper))), 1);
  const vi second = _mm256_add_epi8(first, _mm256_set1_epi8((char)bits));
  for (int64_t t = 0; t < tokens; t++, rows += stride_bytes, codes += UNPACKED_STRIDE) {
    const char *words = rows;
    for (int64_t i = 0; i < count; i += 32, words += 4 * bits) {
      const __m128i *from = (const __m128i *)(const void *)words;
      const __m128i *upper_from = (const __m128i *)(const void *)(words + upper);
      const __m128i low = loaded == 8 ? _mm_loadl_epi64(from) : _mm_loadu_si128(from);
      const __m128i high = loaded == 8 ? _mm_loadl_epi64(upper_from) : _mm_loadu_si128(upper_from);
      const vi both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
      const vi a = _mm256_mullo_epi16(_mm256_shuffle_epi8(both, first), factors);
      const vi b = _mm256_mullo_epi16(_mm256_shuffle_epi8(both, second), factors);
      const vi packed =
          _mm256_packus_epi16(_mm256_srli_epi16(a, 16 - bits), _mm256_srli_epi16(b, 16 - bits));
      _mm256_storeu_si256((__m256i *)(void *)(codes + i), packed);
    }
  }
}
static inline int64_t unpacked_element(int64_t i) { return i; }

#endif
