/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize with AArch64 Advanced SIMD: the vocabulary of quantize_template.h. */
#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>

#include "codes_lane.h"
#include "nybble.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX neon

typedef float32x4_t nyb_vector;
typedef uint32x4_t nyb_mask_of;
typedef uint8x16x2_t nyb_codes;
enum { LANES = 4 };

static inline float32x4_t v_set(float value) { return vdupq_n_f32(value); }
static inline float32x4_t v_add(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
static inline float32x4_t v_sub(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }
static inline float32x4_t v_mul(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
static inline float32x4_t v_div(float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }
static inline float32x4_t v_min(float32x4_t a, float32x4_t b) { return vminq_f32(a, b); }
static inline float32x4_t v_max(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
static inline float32x4_t v_abs(float32x4_t a) { return vabsq_f32(a); }
static inline float32x4_t v_negate(float32x4_t a) { return vnegq_f32(a); }
static inline float32x4_t v_trunc(float32x4_t a) { return vrndq_f32(a); }
static inline float32x4_t v_rint(float32x4_t a) { return vrndnq_f32(a); }
static inline uint32x4_t v_greater(float32x4_t a, float32x4_t b) { return vcgtq_f32(a, b); }
static inline float32x4_t v_fma(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vfmaq_f32(c, a, b);
}
static inline float32x4_t v_fnma(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vfmsq_f32(c, a, b);
}
static inline float32x4_t v_select(uint32x4_t mask, float32x4_t yes, float32x4_t no) {
  return vbslq_f32(mask, yes, no);
}

static inline bool v_all_finite(float32x4_t a) {
  const float32x4_t zero_or_nan = vmulq_n_f32(a, 0.0f);
  return vminvq_u32(vceqq_f32(zero_or_nan, zero_or_nan)) != 0;
}

static inline float32x4_t v_min_of_each(const float32x4_t *v) {
  return vpminq_f32(vpminq_f32(v[0], v[1]), vpminq_f32(v[2], v[3]));
}
static inline float32x4_t v_max_of_each(const float32x4_t *v) {
  return vpmaxq_f32(vpmaxq_f32(v[0], v[1]), vpmaxq_f32(v[2], v[3]));
}

/* ---- f16 and bf16 ------------------------------------------------------------------------- */

static inline uint32x4_t round_bf16_any(float32x4_t value) {
  const uint32x4_t quiet = vorrq_u32(vreinterpretq_u32_f32(value), vdupq_n_u32(0x400000));
  return vbslq_u32(vceqq_f32(value, value), nyb_round_bf16_neon(value), quiet);
}

static inline float32x4_t v_load(const void *data, nyb_dtype dtype, int64_t index) {
  const uint16_t *halves = (const uint16_t *)data + index;
  switch (dtype) {
    case NYB_F16: return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
    case NYB_BF16: return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(halves), 16));
    case NYB_F32: break;
  }
  return vld1q_f32((const float *)data + index);
}

static inline void v_store(void *data, nyb_dtype dtype, int64_t index, float32x4_t value) {
  uint16_t *halves = (uint16_t *)data + index;
  switch (dtype) {
    case NYB_F16: vst1_u16(halves, vreinterpret_u16_f16(vcvt_f16_f32(value))); return;
    case NYB_BF16: vst1_u16(halves, vshrn_n_u32(nyb_round_bf16_neon(value), 16)); return;
    case NYB_F32: break;
  }
  vst1q_f32((float *)data + index, value);
}

static inline void v_store_any(void *data, nyb_dtype dtype, int64_t index, float32x4_t value) {
  if (dtype != NYB_BF16) {
    v_store(data, dtype, index, value);
    return;
  }
  vst1_u16((uint16_t *)data + index, vshrn_n_u32(round_bf16_any(value), 16));
}

static inline float32x4_t v_round_to(nyb_dtype dtype, float32x4_t value) {
  switch (dtype) {
    case NYB_F16: return vcvt_f32_f16(vcvt_f16_f32(value));
    case NYB_BF16:
      return vreinterpretq_f32_u32(vandq_u32(nyb_round_bf16_neon(value), vdupq_n_u32(0xffff0000u)));
    case NYB_F32: break;
  }
  return value;
}

/* ---- Codes -------------------------------------------------------------------------------- */

/* A NaN converts to 0. */
static inline int16x4_t nearest(float32x4_t quotient, nyb_rule rule) {
  if (rule == NYB_RULE_MLX_CPU) return vqmovn_s32(vcvtnq_s32_f32(quotient));
  return vqmovn_s32(vcvtq_s32_f32(vaddq_f32(quotient, vdupq_n_f32(0x1.fffffep-2f))));
}

static inline uint8x16x2_t v_codes_32(const float32x4_t *quotients, nyb_rule rule,
                                      int highest_code) {
  uint8x8_t eights[4];
  for (int i = 0; i < 4; i++) {
    eights[i] = vqmovun_s16(
        vcombine_s16(nearest(quotients[2 * i], rule), nearest(quotients[2 * i + 1], rule)));
  }
  const uint8x16_t highest = vdupq_n_u8((uint8_t)highest_code);
  const uint8x16x2_t codes = {{vminq_u8(vcombine_u8(eights[0], eights[1]), highest),
                               vminq_u8(vcombine_u8(eights[2], eights[3]), highest)}};
  return codes;
}

static inline float32x4_t v_widen(const uint8_t *codes) {
  uint32_t four;
  memcpy(&four, codes, 4);
  const uint16x8_t wide = vmovl_u8(vcreate_u8(four));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

/* Joins neighbours three times, as codes_x86.h does. */
static inline void pack_16(uint8x16_t codes, int bits, uint8_t *bytes) {
  uint8_t close[16], open[16];
  nyb_gap_orders(bits, close, open);
  const uint16x8_t ones = vreinterpretq_u16_u8(codes);
  const uint16x8_t pairs = vorrq_u16(vandq_u16(ones, vdupq_n_u16(0xff)),
                                     vshlq_u16(vshrq_n_u16(ones, 8), vdupq_n_s16((int16_t)bits)));
  const uint32x4_t twos = vreinterpretq_u32_u16(pairs);
  const uint32x4_t fours = vorrq_u32(vandq_u32(twos, vdupq_n_u32(0xffff)),
                                     vshlq_u32(vshrq_n_u32(twos, 16), vdupq_n_s32(2 * bits)));
  const uint64x2_t wide = vreinterpretq_u64_u32(fours);
  const uint64x2_t eights = vorrq_u64(vandq_u64(wide, vdupq_n_u64(0xffffffff)),
                                      vshlq_u64(vshrq_n_u64(wide, 32), vdupq_n_s64(4 * bits)));
  const uint64x2_t closed =
      vreinterpretq_u64_u8(vqtbl1q_u8(vreinterpretq_u8_u64(eights), vld1q_u8(close)));
  nyb_store_lane(vgetq_lane_u64(closed, 0), vgetq_lane_u64(closed, 1), bits, bytes);
}

static inline void pack_32(uint8x16x2_t codes, int bits, uint8_t *bytes) {
  if (bits == 8) {
    vst1q_u8(bytes, codes.val[0]);
    vst1q_u8(bytes + 16, codes.val[1]);
    return;
  }
  pack_16(codes.val[0], bits, bytes);
  pack_16(codes.val[1], bits, bytes + 2 * bits);
}

static inline uint8x16_t unpack_16(const uint8_t *bytes, int bits) {
  uint8_t close[16], open[16];
  nyb_gap_orders(bits, close, open);
  const uint64x2_t packed = vcombine_u64(vcreate_u64(nyb_load_lane_low(bytes, bits)),
                                         vcreate_u64(nyb_load_lane_high(bytes, bits)));
  const uint64x2_t eights =
      vreinterpretq_u64_u8(vqtbl1q_u8(vreinterpretq_u8_u64(packed), vld1q_u8(open)));
  const uint64x2_t low_four = vdupq_n_u64((UINT64_C(1) << 4 * bits) - 1);
  const uint32x4_t fours = vreinterpretq_u32_u64(vorrq_u64(
      vandq_u64(eights, low_four), vshlq_n_u64(vshlq_u64(eights, vdupq_n_s64(-4 * bits)), 32)));
  const uint32x4_t low_two = vdupq_n_u32((1u << 2 * bits) - 1);
  const uint16x8_t pairs = vreinterpretq_u16_u32(vorrq_u32(
      vandq_u32(fours, low_two), vshlq_n_u32(vshlq_u32(fours, vdupq_n_s32(-2 * bits)), 16)));
  const uint16x8_t low_one = vdupq_n_u16((uint16_t)((1 << bits) - 1));
  return vreinterpretq_u8_u16(vorrq_u16(
      vandq_u16(pairs, low_one), vshlq_n_u16(vshlq_u16(pairs, vdupq_n_s16((int16_t)-bits)), 8)));
}

static inline void unpack_32(const uint8_t *bytes, int bits, uint8_t *codes) {
  if (bits == 8) {
    memcpy(codes, bytes, 32);
    return;
  }
  vst1q_u8(codes, unpack_16(bytes, bits));
  vst1q_u8(codes + 16, unpack_16(bytes + 2 * bits, bits));
}

#include "quantize_template.h"
