/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary of attention_kernel.inc.h for AArch64 Advanced SIMD; what each function
 * does stands in simd_scalar.h. */
#ifndef NYB_SIMD_NEON_H
#define NYB_SIMD_NEON_H

#include <arm_neon.h>
#include <stdbool.h>

#include "../numeric.h"
#include "round_bf16.h"

#define NYB_ISA_SUFFIX neon
enum { VECTOR_LANES = 4, DOT_ROWS = 4, DOT_VECTORS = 4, DOT_STEPS = 2, SUM_VECTORS = 4 };
enum { UNPACKED_STRIDE = 128 }; /* the largest group */

typedef float32x4_t vf;
typedef int32x4_t vi;

static inline vf vf_zero(void) { return vdupq_n_f32(0); }
static inline vf vf_set1(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float *p) { return vld1q_f32(p); }
static inline void vf_store(float *p, vf x) { vst1q_f32(p, x); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf vf_take_sign(vf a, vf b) { return vbslq_f32(vdupq_n_u32(0x80000000u), b, a); }
static inline vf vf_abs(vf a) { return vabsq_f32(a); }
static inline float vf_reduce_add(vf a) { return vaddvq_f32(a); }
static inline float vf_reduce_max(vf a) { return vmaxvq_f32(a); }
static inline vf vf_from_vi(vi a) { return vcvtq_f32_s32(a); }
static inline vi vi_from_vf(vf a) { return vcvtnq_s32_f32(a); }

static inline vf vf_round_bf16(vf a) {
  const uint32x4_t rounded = nyb_round_bf16_neon(a);
  const vf kept = vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff0000u)));
  return vbslq_f32(vceqq_f32(a, a), kept, a);
}
static inline vf vf_round_f16(vf a) { return vcvt_f32_f16(vcvt_f16_f32(a)); }
static inline vf vf_load_bf16(const uint16_t *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline vf vf_load_f16(const uint16_t *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline vf vf_low_bf16(vi a) { return vreinterpretq_f32_s32(vshlq_n_s32(a, 16)); }
static inline vf vf_high_bf16(vi a) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(a), vdupq_n_u32(0xffff0000u)));
}
static inline vf vf_low_f16(vi a) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(a))); }
static inline vf vf_high_f16(vi a) {
  return vcvt_f32_f16(vreinterpret_f16_s16(vshrn_n_s32(a, 16)));
}
static inline vf vf_keep_first(vf a, int64_t n) {
  static const int32_t lane[4] = {0, 1, 2, 3};
  const uint32x4_t keep = vcltq_s32(vld1q_s32(lane), vdupq_n_s32((int32_t)(n > 4 ? 4 : n)));
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), keep));
}
static inline vf vf_power_of_low_bits(vf a) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23));
}
static inline vf vf_zero_below(vf a, vf x, float limit) {
  const uint32x4_t below = vcltq_f32(x, vdupq_n_f32(limit));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), below));
}
static inline vf vf_where_below(vf x, float limit, vf a, vf b) {
  return vbslq_f32(vcltq_f32(x, vdupq_n_f32(limit)), a, b);
}

static inline vi vi_zero(void) { return vdupq_n_s32(0); }
static inline vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
static inline vi vi_load(const int32_t *p) { return vld1q_s32(p); }
static inline vi vi_load_bytes(const uint8_t *p) {
  uint64_t four = 0;
  memcpy(&four, p, 4);
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
static inline void vi_store(int32_t *p, vi x) { vst1q_s32(p, x); }
static inline vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
static inline vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
static inline vi vi_shift_right(vi a, int bits) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-bits)));
}
static inline vi vi_dot16(vi acc, vi a, vi b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(x, y)));
}

static inline vi vi_shift_right_halves(vi a, int bits) {
  return vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), vdupq_n_s16((int16_t)-bits)));
}
static inline vi vi_join_halves(vi low, vi high) { return vsliq_n_s32(low, high, 16); }

enum { WORD_LANES = 4, WORDS_STRIP = 2 };
typedef int32x4_t wi;
static inline wi wi_zero(void) { return vdupq_n_s32(0); }
static inline wi wi_set1(int32_t x) { return vdupq_n_s32(x); }
static inline wi wi_load(const char *p) { return vld1q_s32((const int32_t *)(const void *)p); }
static inline void wi_store(int32_t *p, wi x) { vst1q_s32(p, x); }
static inline wi wi_and(wi a, wi b) { return vandq_s32(a, b); }
static inline wi wi_shift_right_halves(wi a, int bits) { return vi_shift_right_halves(a, bits); }
static inline wi wi_interleave_low(wi a, wi b) {
  return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
static inline wi wi_interleave_high(wi a, wi b) {
  return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
static inline int interleaved_half(bool high, int lane) { return high * 4 + lane; }
static inline wi wi_load_split(const char *p) { return wi_load(p); } /* two words in order */
static inline wi wi_dot16(wi acc, wi a, wi b) { return vi_dot16(acc, a, b); }
static inline void wi_add_scaled(float *out, wi dots, float unit, float rest) {
  const float32x4_t scaled = vfmaq_n_f32(vdupq_n_f32(rest), vcvtq_f32_s32(dots), unit);
  vst1q_f32(out, vaddq_f32(vld1q_f32(out), scaled));
}

static inline void load_words_transposed(const char *p, int64_t stride_bytes, vi *words) {
  int32x4_t row[4];
  for (int t = 0; t < 4; t++) row[t] = wi_load(p + t * stride_bytes);
  const int32x4x2_t low = vtrnq_s32(row[0], row[1]), high = vtrnq_s32(row[2], row[3]);
  for (int j = 0; j < 2; j++) {
    words[j] = vcombine_s32(vget_low_s32(low.val[j]), vget_low_s32(high.val[j]));
    words[j + 2] = vcombine_s32(vget_high_s32(low.val[j]), vget_high_s32(high.val[j]));
  }
}

/* Four codes fit one 32-bit window. It starts at the byte of the first code, or earlier where it
 * would otherwise reach past the 32 elements that share whole words. */
static inline vi decode_codes_int(const char *row, int64_t element, int bits) {
  static const int32_t lane[4] = {0, 1, 2, 3};
  const int64_t first_bit = element * bits;
  const int64_t words_end = (element / 32 + 1) * 32 * bits / 8;
  int64_t byte = first_bit / 8;
  if (byte > words_end - 4) byte = words_end - 4;
  uint32_t window;
  memcpy(&window, row + byte, 4);
  const int32x4_t right =
      vmlaq_n_s32(vdupq_n_s32((int32_t)(first_bit - byte * 8)), vld1q_s32(lane), bits);
  const uint32x4_t shifted = vshlq_u32(vdupq_n_u32(window), vnegq_s32(right));
  return vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32((1u << bits) - 1)));
}

static inline vf decode_codes(const char *row, int64_t element, int bits) {
  return vcvtq_f32_s32(decode_codes_int(row, element, bits));
}

static inline void unpack_codes(const char *rows, int64_t stride_bytes, int64_t tokens,
                                int64_t count, int bits, uint8_t *codes) {
  for (int64_t t = 0; t < tokens; t++, rows += stride_bytes, codes += UNPACKED_STRIDE) {
    for (int64_t i = 0; i < count; i += 8) {
      const uint16x4_t a = vmovn_u32(vreinterpretq_u32_s32(decode_codes_int(rows, i, bits)));
      const uint16x4_t b = vmovn_u32(vreinterpretq_u32_s32(decode_codes_int(rows, i + 4, bits)));
      vst1_u8(codes + i, vmovn_u16(vcombine_u16(a, b)));
    }
  }
}
static inline int64_t unpacked_element(int64_t i) { return i; }

#endif
