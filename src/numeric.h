/* SPDX-License-Identifier: Apache-2.0 */
/* f16 and bf16 to and from f32, one value at a time, nearest-even, overflow to infinity: the
 * rounding T of docs/numerics.md. Vector kernels must give the same bits. */
#ifndef NYB_NUMERIC_H
#define NYB_NUMERIC_H

#include <stdint.h>
#include <string.h>

#include "nybble.h"

static inline uint32_t nyb_bits_from_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float nyb_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float nyb_f32_from_bf16(uint16_t bits) {
  return nyb_f32_from_bits((uint32_t)bits << 16);
}

static inline uint16_t nyb_bf16_from_f32(float value) {
  const uint32_t bits = nyb_bits_from_f32(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u; /* NaN stays NaN; a select, so that loops vectorise */
  return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
}

static inline float nyb_f32_from_f16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) { /* infinity or NaN, made quiet as the hardware does */
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
    return nyb_f32_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
  }
  if (magnitude < 0x400u) { /* zero or subnormal: exact as an integer times 2^-24 */
    const float value = (float)magnitude * 0x1p-24f;
    return nyb_f32_from_bits(sign | nyb_bits_from_f32(value));
  }
  return nyb_f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

static inline uint16_t nyb_f16_from_f32(float value) {
  const uint32_t bits = nyb_bits_from_f32(value);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) { /* 65520 and more round to infinity */
    return (uint16_t)(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 puts the f16 subnormal's last bit
                                    at the f32's, so the hardware rounds it */
    const float shifted = nyb_f32_from_bits(magnitude) + 0.5f;
    return (uint16_t)(sign | (nyb_bits_from_f32(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | ((rounded - (112u << 23)) >> 13));
}

/* T(value): rounds to dtype and widens again. */
static inline float nyb_round_to(nyb_dtype dtype, float value) {
  switch (dtype) {
    case NYB_F16: return nyb_f32_from_f16(nyb_f16_from_f32(value));
    case NYB_BF16: return nyb_f32_from_bf16(nyb_bf16_from_f32(value));
    case NYB_F32: break;
  }
  return value;
}

static inline float nyb_load_f32(const void *data, nyb_dtype dtype, int64_t index) {
  switch (dtype) {
    case NYB_F16: return nyb_f32_from_f16(((const uint16_t *)data)[index]);
    case NYB_BF16: return nyb_f32_from_bf16(((const uint16_t *)data)[index]);
    case NYB_F32: break;
  }
  return ((const float *)data)[index];
}

static inline void nyb_store_f32(void *data, nyb_dtype dtype, int64_t index, float value) {
  switch (dtype) {
    case NYB_F16: ((uint16_t *)data)[index] = nyb_f16_from_f32(value); return;
    case NYB_BF16: ((uint16_t *)data)[index] = nyb_bf16_from_f32(value); return;
    case NYB_F32: break;
  }
  ((float *)data)[index] = value;
}

/* A number that is not finite, for a sentence. printf may call a NaN "-nan". */
static inline const char *nyb_non_finite_name(float value) {
  return value > 0 ? "infinity" : value < 0 ? "-infinity" : "NaN";
}

#endif
