/* SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>

#include "../kernels.h"
#include "geglu_f32.h"
#include "geglu_tables.h"
#include "round_bf16.h"

enum {
  LANES = 16,            /* 16-bit elements of a vector */
  LINE = 2 * LANES,      /* of a cache line */
  PREFETCH_BYTES = 2048, /* ahead: gathers fill the reorder buffer before loads come that far */
};

static inline __m256i high_halves(void) { return _mm256_set1_epi32((int)0xffff0000u); }

/* Both halves of each 32-bit lane as indices: elements 0, 2, 4, ... and 1, 3, 5, ... */
static inline __m256i even_elements(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
}
static inline __m256i odd_elements(__m256i v) { return _mm256_srli_epi32(v, 16); }

/* Table entries in the upper halves of 32-bit lanes, and a neighbour below them. The address is a
 * number of bytes away from an int only in name: gathers need no alignment. */
static inline __m256i gather_upper(const nyb_gelu_table *table, __m256i index) {
  return _mm256_i32gather_epi32((const void *)&table->before, index, 2);
}
static inline __m256i gather_lower(const nyb_gelu_table *table, __m256i index) {
  return _mm256_i32gather_epi32((const void *)table->of_gate, index, 2);
}

static inline __m256i geglu_bf16(__m256i gate, __m256i up) {
  const __m256i g_even =
      _mm256_and_si256(gather_upper(&nyb_gelu_bf16, even_elements(gate)), high_halves());
  const __m256i g_odd =
      _mm256_and_si256(gather_upper(&nyb_gelu_bf16, odd_elements(gate)), high_halves());
  const __m256 up_even = _mm256_castsi256_ps(_mm256_slli_epi32(up, 16));
  const __m256 up_odd = _mm256_castsi256_ps(_mm256_and_si256(up, high_halves()));
  const __m256i even = nyb_round_bf16_avx2(_mm256_mul_ps(_mm256_castsi256_ps(g_even), up_even));
  const __m256i odd = nyb_round_bf16_avx2(_mm256_mul_ps(_mm256_castsi256_ps(g_odd), up_odd));
  return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}

static inline __m128i product_f16(__m128i g, __m128i up) {
  const __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(g), _mm256_cvtph_ps(up));
  return _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline __m256i geglu_f16(__m256i gate, __m256i up) {
  const __m256i even = gather_lower(&nyb_gelu_f16, even_elements(gate));
  const __m256i odd = gather_upper(&nyb_gelu_f16, odd_elements(gate));
  const __m256i g = _mm256_blend_epi16(even, odd, 0xaa);
  const __m128i low = product_f16(_mm256_castsi256_si128(g), _mm256_castsi256_si128(up));
  const __m128i high = product_f16(_mm256_extracti128_si256(g, 1), _mm256_extracti128_si256(up, 1));
  return _mm256_set_m128i(high, low);
}

static inline __m256i geglu(nyb_dtype dtype, __m256i gate, __m256i up) {
  return dtype == NYB_F16 ? geglu_f16(gate, up) : geglu_bf16(gate, up);
}

static inline __m256i load(const uint16_t *data) { return _mm256_loadu_si256((const void *)data); }
static inline void store(uint16_t *data, __m256i v) { _mm256_storeu_si256((void *)data, v); }

/* NaNs come out of geglu() as they are. Settling each where it arises takes a tenth of the time:
 * the loops only keep the largest magnitudes, and in the rare case the result is gone over once
 * more. */
static inline __m256i larger_magnitude(__m256i largest, __m256i y) {
  return _mm256_max_epi16(largest, _mm256_and_si256(y, _mm256_set1_epi16(0x7fff)));
}

/* Elements from begin to end, and last those that are less than a vector: through memory of our
 * own. Returns the largest magnitudes, lane by lane, of these results and of `largest`. */
__attribute__((always_inline)) static inline __m256i some(const uint16_t *gate, const uint16_t *up,
                                                          uint16_t *out, int64_t begin, int64_t end,
                                                          __m256i largest, nyb_dtype dtype) {
  for (; begin + LANES <= end; begin += LANES) {
    const __m256i y = geglu(dtype, load(gate + begin), load(up + begin));
    largest = larger_magnitude(largest, y);
    store(out + begin, y);
  }
  if (begin == end) return largest;
  uint16_t own_gate[LANES] = {0}, own_up[LANES] = {0}, own_out[LANES];
  const size_t bytes = (size_t)(end - begin) * sizeof *out;
  memcpy(own_gate, gate + begin, bytes);
  memcpy(own_up, up + begin, bytes);
  const __m256i y = geglu(dtype, load(own_gate), load(own_up));
  store(own_out, y);
  memcpy(out + begin, own_out, bytes);
  return larger_magnitude(largest, y);
}

static void settle_nans(uint16_t *out, int64_t count, __m256i largest, nyb_dtype dtype) {
  const uint16_t infinity = dtype == NYB_F16 ? 0x7c00 : 0x7f80;
  const uint16_t nan = dtype == NYB_F16 ? NYB_GEGLU_NAN_F16 : NYB_GEGLU_NAN_BF16;
  const __m256i is_nan = _mm256_cmpgt_epi16(largest, _mm256_set1_epi16((short)infinity));
  if (_mm256_movemask_epi8(is_nan) == 0) return;
  for (int64_t i = 0; i < count; i++) {
    if ((out[i] & 0x7fff) > infinity) out[i] = nan;
  }
}

/* Inlined with each dtype and each constant streaming. */
__attribute__((always_inline)) static inline void loop(const uint16_t *gate, const uint16_t *up,
                                                       uint16_t *out, int64_t count, bool streaming,
                                                       nyb_dtype dtype) {
  __m256i largest = _mm256_setzero_si256();
  int64_t done = 0;
  if (streaming) { /* stores past the caches want whole lines */
    const int64_t to_line = (int64_t)((0 - (uintptr_t)out) % 64 / sizeof *out);
    done = to_line < count ? to_line : count;
    largest = some(gate, up, out, 0, done, largest, dtype);
  }
  for (; done + LINE <= count; done += LINE) {
    _mm_prefetch((const char *)(gate + done) + PREFETCH_BYTES, _MM_HINT_T0);
    _mm_prefetch((const char *)(up + done) + PREFETCH_BYTES, _MM_HINT_T0);
    const __m256i low = geglu(dtype, load(gate + done), load(up + done));
    const __m256i high = geglu(dtype, load(gate + done + LANES), load(up + done + LANES));
    largest = larger_magnitude(larger_magnitude(largest, low), high);
    if (streaming) {
      _mm256_stream_si256((void *)(out + done), low);
      _mm256_stream_si256((void *)(out + done + LANES), high);
    } else {
      store(out + done, low);
      store(out + done + LANES, high);
    }
  }
  largest = some(gate, up, out, done, count, largest, dtype);
  settle_nans(out, count, largest, dtype);
  if (streaming) _mm_sfence();
}

__attribute__((always_inline)) static inline void run(const void *gate, const void *up, void *out,
                                                      int64_t count, bool streaming,
                                                      nyb_dtype dtype) {
  if (streaming) {
    loop(gate, up, out, count, true, dtype);
  } else {
    loop(gate, up, out, count, false, dtype);
  }
}

NYB_GEGLU_KERNEL(plain_f32, avx2) {
  (void)streaming;
  nyb_geglu_f32_loop(gate, up, out, count);
}

NYB_GEGLU_KERNEL(plain_f16, avx2) { run(gate, up, out, count, streaming, NYB_F16); }

NYB_GEGLU_KERNEL(plain_bf16, avx2) { run(gate, up, out, count, streaming, NYB_BF16); }
