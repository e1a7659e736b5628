/* SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>

#include "../kernels.h"
#include "geglu_f32.h"
#include "geglu_tables.h"
#include "round_bf16.h"

enum {
  LANES = 32,            /* 16-bit elements of a vector, which is a cache line */
  PREFETCH_BYTES = 2048, /* ahead: gathers fill the reorder buffer before loads come that far */
};

static inline __m512i high_halves(void) { return _mm512_set1_epi32((int)0xffff0000u); }

/* Both halves of each 32-bit lane as indices: elements 0, 2, 4, ... and 1, 3, 5, ... */
static inline __m512i even_elements(__m512i v) {
  return _mm512_and_si512(v, _mm512_set1_epi32(0xffff));
}
static inline __m512i odd_elements(__m512i v) { return _mm512_srli_epi32(v, 16); }

/* Table entries in the upper halves of 32-bit lanes, and a neighbour below them. */
static inline __m512i gather_upper(const nyb_gelu_table *table, __m512i index) {
  return _mm512_i32gather_epi32(index, &table->before, 2);
}
static inline __m512i gather_lower(const nyb_gelu_table *table, __m512i index) {
  return _mm512_i32gather_epi32(index, table->of_gate, 2);
}

static inline __m512i settle_nan(__m512i y, int infinity, int nan) {
  const __m512i magnitude = _mm512_and_si512(y, _mm512_set1_epi16(0x7fff));
  const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16((short)infinity));
  return _mm512_mask_blend_epi16(is_nan, y, _mm512_set1_epi16((short)nan));
}

static inline __m512i geglu_bf16(__m512i gate, __m512i up) {
  const __m512i g_even =
      _mm512_and_si512(gather_upper(&nyb_gelu_bf16, even_elements(gate)), high_halves());
  const __m512i g_odd =
      _mm512_and_si512(gather_upper(&nyb_gelu_bf16, odd_elements(gate)), high_halves());
  const __m512 up_even = _mm512_castsi512_ps(_mm512_slli_epi32(up, 16));
  const __m512 up_odd = _mm512_castsi512_ps(_mm512_and_si512(up, high_halves()));
  const __m512i even = nyb_round_bf16_avx512(_mm512_mul_ps(_mm512_castsi512_ps(g_even), up_even));
  const __m512i odd = nyb_round_bf16_avx512(_mm512_mul_ps(_mm512_castsi512_ps(g_odd), up_odd));
  const __m512i y = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
  return settle_nan(y, 0x7f80, NYB_GEGLU_NAN_BF16);
}

static inline __m256i product_f16(__m256i g, __m256i up) {
  const __m512 y = _mm512_mul_ps(_mm512_cvtph_ps(g), _mm512_cvtph_ps(up));
  return _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline __m512i geglu_f16(__m512i gate, __m512i up) {
  const __m512i even = gather_lower(&nyb_gelu_f16, even_elements(gate));
  const __m512i odd = gather_upper(&nyb_gelu_f16, odd_elements(gate));
  const __m512i g = _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd);
  const __m256i low = product_f16(_mm512_castsi512_si256(g), _mm512_castsi512_si256(up));
  const __m256i high =
      product_f16(_mm512_extracti64x4_epi64(g, 1), _mm512_extracti64x4_epi64(up, 1));
  return settle_nan(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), 0x7c00,
                    NYB_GEGLU_NAN_F16);
}

typedef __m512i (*vector_fn)(__m512i gate, __m512i up);

static inline void masked(const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t count,
                          vector_fn vector) {
  if (count == 0) return;
  const __mmask32 mask = (__mmask32)((UINT64_C(1) << count) - 1);
  const __m512i y =
      vector(_mm512_maskz_loadu_epi16(mask, gate), _mm512_maskz_loadu_epi16(mask, up));
  _mm512_mask_storeu_epi16(out, mask, y);
}

/* Inlined with each vector function and each constant streaming. */
__attribute__((always_inline)) static inline void loop(const uint16_t *gate, const uint16_t *up,
                                                       uint16_t *out, int64_t count, bool streaming,
                                                       vector_fn vector) {
  int64_t done = 0;
  if (streaming) { /* stores past the caches want whole lines */
    const int64_t head = (int64_t)((0 - (uintptr_t)out) % 64 / sizeof *out);
    done = head < count ? head : count;
    masked(gate, up, out, done, vector);
  }
  for (; done + LANES <= count; done += LANES) {
    _mm_prefetch((const char *)(gate + done) + PREFETCH_BYTES, _MM_HINT_T0);
    _mm_prefetch((const char *)(up + done) + PREFETCH_BYTES, _MM_HINT_T0);
    const __m512i y = vector(_mm512_loadu_si512(gate + done), _mm512_loadu_si512(up + done));
    if (streaming) {
      _mm512_stream_si512((void *)(out + done), y);
    } else {
      _mm512_storeu_si512(out + done, y);
    }
  }
  masked(gate + done, up + done, out + done, count - done, vector);
  if (streaming) _mm_sfence();
}

NYB_GEGLU_KERNEL(plain_f32, avx512) {
  (void)streaming;
  nyb_geglu_f32_loop(gate, up, out, count);
}

NYB_GEGLU_KERNEL(plain_f16, avx512) {
  if (streaming) {
    loop(gate, up, out, count, true, geglu_f16);
  } else {
    loop(gate, up, out, count, false, geglu_f16);
  }
}

NYB_GEGLU_KERNEL(plain_bf16, avx512) {
  if (streaming) {
    loop(gate, up, out, count, true, geglu_bf16);
  } else {
    loop(gate, up, out, count, false, geglu_bf16);
  }
}
