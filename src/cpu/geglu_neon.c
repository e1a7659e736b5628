/* SPDX-License-Identifier: Apache-2.0 */
#include <arm_neon.h>

#include "../kernels.h"
#include "geglu_f32.h"
#include "geglu_tables.h"
#include "round_bf16.h"

enum { LANES = 8 };

static inline uint16x8_t settle_nan(uint16x8_t y, uint16_t infinity, uint16_t nan) {
  const uint16x8_t magnitude = vandq_u16(y, vdupq_n_u16(0x7fff));
  return vbslq_u16(vcgtq_u16(magnitude, vdupq_n_u16(infinity)), vdupq_n_u16(nan), y);
}

static inline float32x4_t widen_bf16(uint16x4_t v) {
  return vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

/* Nearest even. A NaN stays one: its payload, handed on from a bf16, ends in zeros. */
static inline uint16x4_t narrow_bf16(float32x4_t value) {
  return vshrn_n_u32(nyb_round_bf16_neon(value), 16);
}

static inline uint16x8_t product_bf16(uint16x8_t g, uint16x8_t up) {
  const float32x4_t low = vmulq_f32(widen_bf16(vget_low_u16(g)), widen_bf16(vget_low_u16(up)));
  const float32x4_t high = vmulq_f32(widen_bf16(vget_high_u16(g)), widen_bf16(vget_high_u16(up)));
  return settle_nan(vcombine_u16(narrow_bf16(low), narrow_bf16(high)), 0x7f80, NYB_GEGLU_NAN_BF16);
}

static inline float32x4_t widen_f16(uint16x4_t v) { return vcvt_f32_f16(vreinterpret_f16_u16(v)); }

static inline uint16x8_t product_f16(uint16x8_t g, uint16x8_t up) {
  const float32x4_t low = vmulq_f32(widen_f16(vget_low_u16(g)), widen_f16(vget_low_u16(up)));
  const float32x4_t high = vmulq_f32(widen_f16(vget_high_u16(g)), widen_f16(vget_high_u16(up)));
  const uint16x8_t y = vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(low)),
                                    vreinterpret_u16_f16(vcvt_f16_f32(high)));
  return settle_nan(y, 0x7c00, NYB_GEGLU_NAN_F16);
}

/* NEON has no gather: the look-ups go one by one into a vector's worth of memory. */
static inline uint16x8_t look_up(const nyb_gelu_table *table, const uint16_t *gate) {
  uint16_t g[LANES];
  for (int i = 0; i < LANES; i++) g[i] = table->of_gate[gate[i]];
  return vld1q_u16(g);
}

NYB_GEGLU_KERNEL(plain_f32, neon) {
  (void)streaming;
  nyb_geglu_f32_loop(gate, up, out, count);
}

NYB_GEGLU_KERNEL(plain_f16, neon) {
  (void)streaming;
  const uint16_t *gates = gate, *ups = up;
  uint16_t *outs = out;
  int64_t done = 0;
  for (; done + LANES <= count; done += LANES) {
    vst1q_u16(outs + done,
              product_f16(look_up(&nyb_gelu_f16, gates + done), vld1q_u16(ups + done)));
  }
  for (; done < count; done++) {
    outs[done] = nyb_geglu_product_f16(nyb_gelu_f16.of_gate[gates[done]], ups[done]);
  }
}

NYB_GEGLU_KERNEL(plain_bf16, neon) {
  (void)streaming;
  const uint16_t *gates = gate, *ups = up;
  uint16_t *outs = out;
  int64_t done = 0;
  for (; done + LANES <= count; done += LANES) {
    vst1q_u16(outs + done,
              product_bf16(look_up(&nyb_gelu_bf16, gates + done), vld1q_u16(ups + done)));
  }
  for (; done < count; done++) {
    outs[done] = nyb_geglu_product_bf16(nyb_gelu_bf16.of_gate[gates[done]], ups[done]);
  }
}
