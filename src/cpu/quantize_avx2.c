/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize with AVX2, FMA and F16C: the vocabulary of quantize_template.h. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#include "codes_x86.h"
#include "nybble.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX avx2

typedef __m256 nyb_vector;
typedef __m256 nyb_mask_of;
typedef __m256i nyb_codes;
enum { LANES = 8 };

static inline __m256 v_set(float value) { return _mm256_set1_ps(value); }
static inline __m256 v_add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
static inline __m256 v_sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
static inline __m256 v_mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
static inline __m256 v_div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
static inline __m256 v_min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
static inline __m256 v_max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
static inline __m256 v_abs(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline __m256 v_negate(__m256 a) { return _mm256_xor_ps(_mm256_set1_ps(-0.0f), a); }
static inline __m256 v_fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m256 v_fnma(__m256 a, __m256 b, __m256 c) { return _mm256_fnmadd_ps(a, b, c); }
static inline __m256 v_greater(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
static inline __m256 v_trunc(__m256 a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
static inline __m256 v_rint(__m256 a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline __m256 v_select(__m256 mask, __m256 yes, __m256 no) {
  return _mm256_blendv_ps(no, yes, mask);
}

static inline bool v_all_finite(__m256 a) {
  const __m256 zero_or_nan = _mm256_mul_ps(a, _mm256_setzero_ps());
  return _mm256_movemask_ps(_mm256_cmp_ps(zero_or_nan, zero_or_nan, _CMP_UNORD_Q)) == 0;
}

/* Halves the lanes of each vector three times, and the number of vectors with it. */
#define NYB_OF_EACH(v, operation)                                                             \
  __m256 pairs[4], fours[2];                                                                  \
  for (int i = 0; i < 4; i++) {                                                               \
    pairs[i] = operation(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),                          \
                         _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));                         \
  }                                                                                           \
  for (int i = 0; i < 2; i++) {                                                               \
    const __m256d a = _mm256_castps_pd(pairs[2 * i]), b = _mm256_castps_pd(pairs[2 * i + 1]); \
    fours[i] = operation(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),                          \
                         _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));                         \
  }                                                                                           \
  return operation(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),                          \
                   _mm256_permute2f128_ps(fours[0], fours[1], 0x31))

static inline __m256 v_min_of_each(const __m256 *v) { NYB_OF_EACH(v, _mm256_min_ps); }
static inline __m256 v_max_of_each(const __m256 *v) { NYB_OF_EACH(v, _mm256_max_ps); }

/* ---- f16 and bf16 ------------------------------------------------------------------------- */

static inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline __m256i round_bf16_any(__m256 value) {
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(nyb_round_bf16_avx2(value), quiet, _mm256_castps_si256(is_nan));
}

static inline __m256 v_load(const void *data, nyb_dtype dtype, int64_t index) {
  switch (dtype) {
    case NYB_F16:
      return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)data + index)));
    case NYB_BF16:
      return widen_bf16(_mm_loadu_si128((const __m128i *)((const uint16_t *)data + index)));
    case NYB_F32: break;
  }
  return _mm256_loadu_ps((const float *)data + index);
}

static inline __m128i upper_halves(__m256i value) {
  const __m256i upper = _mm256_srli_epi32(value, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

static inline void v_store(void *data, nyb_dtype dtype, int64_t index, __m256 value) {
  if (dtype == NYB_F32) {
    _mm256_storeu_ps((float *)data + index, value);
    return;
  }
  const __m128i halves = dtype == NYB_F16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)
                                          : upper_halves(nyb_round_bf16_avx2(value));
  _mm_storeu_si128((__m128i *)((uint16_t *)data + index), halves);
}

static inline void v_store_any(void *data, nyb_dtype dtype, int64_t index, __m256 value) {
  if (dtype != NYB_BF16) {
    v_store(data, dtype, index, value);
    return;
  }
  _mm_storeu_si128((__m128i *)((uint16_t *)data + index), upper_halves(round_bf16_any(value)));
}

static inline __m256 v_round_to(nyb_dtype dtype, __m256 value) {
  switch (dtype) {
    case NYB_F16: return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    case NYB_BF16:
      return _mm256_castsi256_ps(
          _mm256_and_si256(nyb_round_bf16_avx2(value), _mm256_set1_epi32((int)0xffff0000u)));
    case NYB_F32: break;
  }
  return value;
}

/* ---- Codes -------------------------------------------------------------------------------- */

static inline __m256i nearest(__m256 quotient, nyb_rule rule) {
  if (rule == NYB_RULE_MLX_CPU) return _mm256_cvtps_epi32(quotient);
  return _mm256_cvttps_epi32(_mm256_add_ps(quotient, _mm256_set1_ps(0x1.fffffep-2f)));
}

/* NaN converts to the most negative integer, and what is negative packs to 0. */
static inline __m256i v_codes_32(const __m256 *quotients, nyb_rule rule, int highest_code) {
  const __m256i low = _mm256_packs_epi32(nearest(quotients[0], rule), nearest(quotients[1], rule));
  const __m256i high = _mm256_packs_epi32(nearest(quotients[2], rule), nearest(quotients[3], rule));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
  return _mm256_min_epu8(codes, _mm256_set1_epi8((char)highest_code));
}

static inline __m256 v_widen(const uint8_t *codes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}

static inline void pack_32(__m256i codes, int bits, uint8_t *bytes) {
  nyb_pack_32(codes, bits, bytes);
}

static inline void unpack_32(const uint8_t *bytes, int bits, uint8_t *codes) {
  _mm256_storeu_si256((__m256i *)codes, nyb_unpack_32(bytes, bits));
}

#include "quantize_template.h"
