/* SPDX-License-Identifier: Apache-2.0 */
/* Packing of codes with AVX2, for the AVX2 and AVX-512 kernels.
 *
 * A byte holds one code at first. Neighbours are then joined three times: bytes to 16-bit pairs,
 * pairs to 32-bit fours, fours to 64-bit eights. Eight codes take `bits` whole bytes at every
 * width, so that a byte shuffle closes the gaps. Unpacking goes the same way back. */
#ifndef NYB_CODES_X86_H
#define NYB_CODES_X86_H

#include <immintrin.h>

#include "codes_lane.h"

NYB_INLINE __m256i nyb_close_gaps(int bits) {
  uint8_t close[16], open[16];
  nyb_gap_orders(bits, close, open);
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)close));
}

NYB_INLINE __m256i nyb_open_gaps(int bits) {
  uint8_t close[16], open[16];
  nyb_gap_orders(bits, close, open);
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)open));
}

NYB_INLINE void nyb_store_sixteen(__m128i lane, int bits, uint8_t *bytes) {
  nyb_store_lane((uint64_t)_mm_cvtsi128_si64(lane), (uint64_t)_mm_extract_epi64(lane, 1), bits,
                 bytes);
}

NYB_INLINE __m128i nyb_load_sixteen(const uint8_t *bytes, int bits) {
  const __m128i low = _mm_cvtsi64_si128((int64_t)nyb_load_lane_low(bytes, bits));
  if (bits <= 4) return low;
  return _mm_insert_epi64(low, (int64_t)nyb_load_lane_high(bytes, bits), 1);
}

NYB_INLINE void nyb_pack_32(__m256i codes, int bits, uint8_t *bytes) {
  if (bits == 8) {
    _mm256_storeu_si256((__m256i *)bytes, codes);
    return;
  }
  const __m256i pairs =
      _mm256_maddubs_epi16(codes, _mm256_set1_epi16((int16_t)(1 << (8 + bits) | 1)));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << (16 + 2 * bits) | 1));
  const __m256i low_half = _mm256_set1_epi64x(0xffffffff);
  const __m256i eights =
      _mm256_or_si256(_mm256_and_si256(low_half, fours),
                      _mm256_srli_epi64(_mm256_andnot_si256(low_half, fours), 32 - 4 * bits));
  const __m256i closed = _mm256_shuffle_epi8(eights, nyb_close_gaps(bits));
  nyb_store_sixteen(_mm256_castsi256_si128(closed), bits, bytes);
  nyb_store_sixteen(_mm256_extracti128_si256(closed, 1), bits, bytes + 2 * bits);
}

/* Each element of 2 * half bits: its low half stays, what is above moves up. */
#define NYB_SPREAD(width, value, keep, up, half) \
  _mm256_or_si256(_mm256_and_si256(value, keep), \
                  _mm256_slli_epi##width(_mm256_srli_epi##width(value, half), up))

NYB_INLINE __m256i nyb_unpack_32(const uint8_t *bytes, int bits) {
  if (bits == 8) return _mm256_loadu_si256((const __m256i *)bytes);
  const __m256i packed =
      _mm256_set_m128i(nyb_load_sixteen(bytes + 2 * bits, bits), nyb_load_sixteen(bytes, bits));
  const __m256i eights = _mm256_shuffle_epi8(packed, nyb_open_gaps(bits));
  const __m256i fours =
      NYB_SPREAD(64, eights, _mm256_set1_epi64x((INT64_C(1) << 4 * bits) - 1), 32, 4 * bits);
  const __m256i pairs = NYB_SPREAD(32, fours, _mm256_set1_epi32((1 << 2 * bits) - 1), 16, 2 * bits);
  return NYB_SPREAD(16, pairs, _mm256_set1_epi16((int16_t)((1 << bits) - 1)), 8, bits);
}

#endif
