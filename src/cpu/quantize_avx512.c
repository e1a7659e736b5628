/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize with AVX-512: the vocabulary of quantize_template.h. Packing is that of
 * AVX2, since a group of 32 codes is one 256-bit vector. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#include "codes_x86.h"
#include "nybble.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX avx512

typedef __m512 nyb_vector;
typedef __mmask16 nyb_mask_of;
typedef __m256i nyb_codes;
enum { LANES = 16 };

static inline __m512 v_set(float value) { return _mm512_set1_ps(value); }
static inline __m512 v_add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
static inline __m512 v_sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
static inline __m512 v_mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
static inline __m512 v_div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
static inline __m512 v_min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
static inline __m512 v_max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
static inline __m512 v_abs(__m512 a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
static inline __m512 v_negate(__m512 a) { return _mm512_xor_ps(_mm512_set1_ps(-0.0f), a); }
static inline __m512 v_fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m512 v_fnma(__m512 a, __m512 b, __m512 c) { return _mm512_fnmadd_ps(a, b, c); }
static inline __mmask16 v_greater(__m512 a, __m512 b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
static inline __m512 v_trunc(__m512 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
static inline __m512 v_rint(__m512 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline __m512 v_select(__mmask16 mask, __m512 yes, __m512 no) {
  return _mm512_mask_blend_ps(mask, no, yes);
}

static inline bool v_all_finite(__m512 a) {
  const __m512 zero_or_nan = _mm512_mul_ps(a, _mm512_setzero_ps());
  return _mm512_cmp_ps_mask(zero_or_nan, zero_or_nan, _CMP_UNORD_Q) == 0;
}

/* Halves the lanes of each vector four times, and the number of vectors with it. */
#define NYB_OF_EACH(v, operation)                                                             \
  __m512 pairs[8], fours[4], eights[2];                                                       \
  for (int i = 0; i < 8; i++) {                                                               \
    pairs[i] = operation(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),                          \
                         _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));                         \
  }                                                                                           \
  for (int i = 0; i < 4; i++) {                                                               \
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]); \
    fours[i] = operation(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),                          \
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));                         \
  }                                                                                           \
  for (int i = 0; i < 2; i++) {                                                               \
    eights[i] = operation(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),         \
                          _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));        \
  }                                                                                           \
  return operation(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),                          \
                   _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd))

static inline __m512 v_min_of_each(const __m512 *v) { NYB_OF_EACH(v, _mm512_min_ps); }
static inline __m512 v_max_of_each(const __m512 *v) { NYB_OF_EACH(v, _mm512_max_ps); }

/* ---- f16 and bf16 ------------------------------------------------------------------------- */

static inline __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline __m512i round_bf16_any(__m512 value) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(nyb_round_bf16_avx512(value), is_nan, _mm512_castps_si512(value),
                              _mm512_set1_epi32(0x400000));
}

static inline __m512 v_load(const void *data, nyb_dtype dtype, int64_t index) {
  const uint16_t *halves = (const uint16_t *)data + index;
  switch (dtype) {
    case NYB_F16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
    case NYB_BF16: return widen_bf16(_mm256_loadu_si256((const __m256i *)halves));
    case NYB_F32: break;
  }
  return _mm512_loadu_ps((const float *)data + index);
}

static inline __m256i upper_halves(__m512i value) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16));
}

static inline void v_store(void *data, nyb_dtype dtype, int64_t index, __m512 value) {
  if (dtype == NYB_F32) {
    _mm512_storeu_ps((float *)data + index, value);
    return;
  }
  const __m256i halves = dtype == NYB_F16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)
                                          : upper_halves(nyb_round_bf16_avx512(value));
  _mm256_storeu_si256((__m256i *)((uint16_t *)data + index), halves);
}

static inline void v_store_any(void *data, nyb_dtype dtype, int64_t index, __m512 value) {
  if (dtype != NYB_BF16) {
    v_store(data, dtype, index, value);
    return;
  }
  _mm256_storeu_si256((__m256i *)((uint16_t *)data + index), upper_halves(round_bf16_any(value)));
}

static inline __m512 v_round_to(nyb_dtype dtype, __m512 value) {
  switch (dtype) {
    case NYB_F16: return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    case NYB_BF16:
      return _mm512_castsi512_ps(
          _mm512_and_si512(nyb_round_bf16_avx512(value), _mm512_set1_epi32((int)0xffff0000u)));
    case NYB_F32: break;
  }
  return value;
}

/* ---- Codes -------------------------------------------------------------------------------- */

static inline __m512i nearest(__m512 quotient, nyb_rule rule) {
  if (rule == NYB_RULE_MLX_CPU) return _mm512_cvtps_epi32(quotient);
  return _mm512_cvttps_epi32(_mm512_add_ps(quotient, _mm512_set1_ps(0x1.fffffep-2f)));
}

/* NaN converts to the most negative integer, and what is negative packs to 0. */
static inline __m256i v_codes_32(const __m512 *quotients, nyb_rule rule, int highest_code) {
  const __m512i words =
      _mm512_packs_epi32(nearest(quotients[0], rule), nearest(quotients[1], rule));
  const __m512i bytes = _mm512_packus_epi16(words, words);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256i codes = _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, bytes));
  return _mm256_min_epu8(codes, _mm256_set1_epi8((char)highest_code));
}

static inline __m512 v_widen(const uint8_t *codes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}

static inline void pack_32(__m256i codes, int bits, uint8_t *bytes) {
  nyb_pack_32(codes, bits, bytes);
}

static inline void unpack_32(const uint8_t *bytes, int bits, uint8_t *codes) {
  _mm256_storeu_si256((__m256i *)codes, nyb_unpack_32(bytes, bits));
}

#include "quantize_template.h"
