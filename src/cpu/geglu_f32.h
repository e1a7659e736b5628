/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU in f32. Each ISA's file includes this and its compiler vectorises it: there is no branch,
 * no call and no fused multiply-add in it, so that every ISA gives the same bits. */
#ifndef NYB_GEGLU_F32_H
#define NYB_GEGLU_F32_H

#include <stdint.h>
#include <string.h>

#include "geglu_tables.h"

/* Within 3 units in the last place of the true tanh, everywhere (measured: 2.5); exactly 1 from 9.1
 * on. tanh(z) = e / (e + 2) with e = exp(2|z|) - 1, and exp(2|z|) = 2^n * exp(r), |r| <= ln(2)/2.
 */
static inline float nyb_tanh_f32(float z) {
  /* Beyond 10 the result is 1, and a NaN may become 1 here too: what multiplies it is NaN then. The
   * smaller of two magnitudes is that of the smaller bits; comparing floats would be a branch. */
  const uint32_t magnitude = nyb_bits_from_f32(z) & 0x7fffffffu, ten = 0x41200000u;
  const float doubled = 2.0f * nyb_f32_from_bits(magnitude < ten ? magnitude : ten);
  const float round_to_integer = 0x1.8p+23f; /* added and subtracted; its low bits hold n between */
  const float shifted = doubled * 0x1.715476p+0f + round_to_integer;
  const float n = shifted - round_to_integer;
  const float power = nyb_f32_from_bits((nyb_bits_from_f32(shifted) << 23) + 0x3f800000u); /* 2^n */
  /* ln(2) in two parts, the first so short that n times it is exact. */
  const float r = (doubled - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;
  float series = 1.0f / 5040; /* (exp(r) - 1 - r) / r^2 by Taylor; the next term is below 2^-26 r */
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  const float part = r + r * r * series;
  const float e = power * part + (power - 1.0f);
  return __builtin_copysignf(e / (e + 2.0f), z);
}

static inline float nyb_gelu_f32(float x) {
  const float inner = x + 0.044715f * (x * x * x);
  return (0.5f * x) * (1.0f + nyb_tanh_f32(0.7978845608f * inner));
}

/* out may be gate or up: a block is complete before it is stored. */
static inline void nyb_geglu_f32_loop(const float *gate, const float *up, float *out,
                                      int64_t count) {
  enum { BLOCK = 64 };
  float y[BLOCK];
  for (int64_t done = 0; done < count; done += BLOCK) {
    const int64_t here = count - done < BLOCK ? count - done : BLOCK;
    for (int64_t i = 0; i < here; i++) {
      y[i] = nyb_geglu_settle_f32(nyb_gelu_f32(gate[done + i]) * up[done + i]);
    }
    memcpy(out + done, y, (size_t)here * sizeof *y);
  }
}

#endif
