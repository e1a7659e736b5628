/* SPDX-License-Identifier: Apache-2.0 */
/* Packing of codes with AVX2, for the AVX2 and AVX-512 kernels.
 *
 * A byte holds one code at first. Neighbours are then joined three times: bytes to 16-bit pairs,
 * pairs to 32-bit fours, fours to 64-bit eights. Eight codes take `bits` whole bytes at every
 * width, so that a byte shuffle closes the gaps. Unpacking goes the same way back. */
#ifndef NYB_CODES_X86_H
#define NYB_CODES_X86_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define NYB_INLINE_CODES static inline __attribute__((always_inline))

/* Stores the low 2 * bits bytes of a lane, not one more. */
NYB_INLINE_CODES void nyb_store_lane(__m128i lane, int bits, uint8_t *bytes) {
  const uint64_t low = (uint64_t)_mm_cvtsi128_si64(lane);
  const uint64_t high = (uint64_t)_mm_extract_epi64(lane, 1);
  memcpy(bytes, &low, (size_t)(bits < 4 ? 2 * bits : 8));
  if (bits > 4) memcpy(bytes + 8, &high, (size_t)(2 * bits - 8));
}

/* Loads of 4 or 8 bytes and of 2 or 4 more: one of 6 bytes would go through the stack. */
NYB_INLINE_CODES __m128i nyb_load_lane(const uint8_t *bytes, int bits) {
  uint64_t eight = 0;
  uint32_t four = 0;
  uint16_t two = 0;
  memcpy(&four, bytes + (bits == 6 ? 8 : 0), 4);
  if (bits >= 4) memcpy(&eight, bytes, 8);
  if (bits == 3 || bits == 5) memcpy(&two, bytes + 2 * bits - 2, 2);
  if (bits < 4) return _mm_insert_epi16(_mm_cvtsi32_si128((int)four), two, 2);
  const __m128i lane = _mm_cvtsi64_si128((int64_t)eight);
  if (bits == 5) return _mm_insert_epi16(lane, two, 4);
  return bits == 6 ? _mm_insert_epi32(lane, (int)four, 2) : lane;
}

/* For _mm256_shuffle_epi8: the first `bits` bytes of each 64-bit element, side by side. */
NYB_INLINE_CODES __m256i nyb_close_gaps(int bits) {
  int8_t order[32];
  for (int i = 0; i < 16; i++) {
    order[i] = (int8_t)(i < bits ? i : i < 2 * bits ? i - bits + 8 : -128);
    order[i + 16] = order[i];
  }
  return _mm256_loadu_si256((const __m256i *)order);
}

NYB_INLINE_CODES __m256i nyb_open_gaps(int bits) {
  int8_t order[32];
  for (int i = 0; i < 16; i++) {
    order[i] = (int8_t)(i % 8 < bits ? i % 8 + i / 8 * bits : -128);
    order[i + 16] = order[i];
  }
  return _mm256_loadu_si256((const __m256i *)order);
}

NYB_INLINE_CODES void nyb_pack_32(__m256i codes, int bits, uint8_t *bytes) {
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
  nyb_store_lane(_mm256_castsi256_si128(closed), bits, bytes);
  nyb_store_lane(_mm256_extracti128_si256(closed, 1), bits, bytes + 2 * bits);
}

/* Each element of 2 * half bits: its low half stays, what is above moves up. */
#define NYB_SPREAD(width, value, keep, up, half) \
  _mm256_or_si256(_mm256_and_si256(value, keep), \
                  _mm256_slli_epi##width(_mm256_srli_epi##width(value, half), up))

NYB_INLINE_CODES __m256i nyb_unpack_32(const uint8_t *bytes, int bits) {
  if (bits == 8) return _mm256_loadu_si256((const __m256i *)bytes);
  const __m256i packed =
      _mm256_set_m128i(nyb_load_lane(bytes + 2 * bits, bits), nyb_load_lane(bytes, bits));
  const __m256i eights = _mm256_shuffle_epi8(packed, nyb_open_gaps(bits));
  const __m256i fours =
      NYB_SPREAD(64, eights, _mm256_set1_epi64x((INT64_C(1) << 4 * bits) - 1), 32, 4 * bits);
  const __m256i pairs = NYB_SPREAD(32, fours, _mm256_set1_epi32((1 << 2 * bits) - 1), 16, 2 * bits);
  return NYB_SPREAD(16, pairs, _mm256_set1_epi16((int16_t)((1 << bits) - 1)), 8, bits);
}

#endif
