/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU as docs/numerics.md, section 4, spells it: all steps up to u = T(1 + tanh) depend on the
 * gate alone, g is T(x / 2 * u), the result T(g * up). */
#ifndef NYB_GEGLU_CUH
#define NYB_GEGLU_CUH

#include "portable.cuh"

/* The one NaN that GeGLU gives, whatever NaN went in. */
enum { NYB_DEVICE_NAN_F16 = 0x7e00, NYB_DEVICE_NAN_BF16 = 0x7fc0 };

/* The tanh of src/cpu/geglu_f32.h, to the bit: within 3 units in the last place of the true one,
 * and near enough to round as the true one does for every f16 and bf16 gate. A NaN may become 1:
 * what multiplies it is NaN then. */
NYB_FUNCTION float nyb_device_tanh(float z) {
  const uint32_t sign = nyb_bits_of(z) & 0x80000000u;
  const uint32_t magnitude = nyb_bits_of(z) & 0x7fffffffu, ten = 0x41200000u;
  const float doubled = NYB_MULTIPLY(2.0f, nyb_float_of(magnitude < ten ? magnitude : ten));
  const float round_to_integer = 12582912.0f; /* 1.5 * 2^23 */
  const float log2_e = 1.4426950216293335f, ln2_high = 0.693359375f;
  const float ln2_low = -2.1219444170128554e-4f;
  const float shifted = NYB_ADD(NYB_MULTIPLY(doubled, log2_e), round_to_integer);
  const float n = NYB_SUBTRACT(shifted, round_to_integer);
  const float power = nyb_float_of((nyb_bits_of(shifted) << 23) + 0x3f800000u); /* 2^n */
  const float high = NYB_SUBTRACT(doubled, NYB_MULTIPLY(n, ln2_high));
  const float r = NYB_SUBTRACT(high, NYB_MULTIPLY(n, ln2_low));
  float series = 1.0f / 5040; /* (exp(r) - 1 - r) / r^2 */
  series = NYB_ADD(NYB_MULTIPLY(series, r), 1.0f / 720);
  series = NYB_ADD(NYB_MULTIPLY(series, r), 1.0f / 120);
  series = NYB_ADD(NYB_MULTIPLY(series, r), 1.0f / 24);
  series = NYB_ADD(NYB_MULTIPLY(series, r), 1.0f / 6);
  series = NYB_ADD(NYB_MULTIPLY(series, r), 0.5f);
  const float part = NYB_ADD(r, NYB_MULTIPLY(NYB_MULTIPLY(r, r), series));
  const float e = NYB_ADD(NYB_MULTIPLY(power, part), NYB_SUBTRACT(power, 1.0f));
  return nyb_float_of(nyb_bits_of(NYB_DIVIDE(e, NYB_ADD(e, 2.0f))) | sign);
}

/* T(c * T(x + T(k * T(x^3)))), of which the tanh is taken. */
NYB_FUNCTION float nyb_gelu_inner(int dtype, float x) {
  const float k = nyb_round_number(dtype, 0.044715f), c = nyb_round_number(dtype, 0.7978845608f);
  float t = nyb_round_number(dtype, NYB_MULTIPLY(NYB_MULTIPLY(x, x), x));
  t = nyb_round_number(dtype, NYB_MULTIPLY(k, t));
  t = nyb_round_number(dtype, NYB_ADD(x, t));
  return nyb_round_number(dtype, NYB_MULTIPLY(c, t));
}

/* u, from the tanh. */
NYB_FUNCTION float nyb_gelu_factor(int dtype, float tanh_of_inner) {
  return nyb_round_number(dtype, NYB_ADD(1.0f, nyb_round_number(dtype, tanh_of_inner)));
}

/* g from x and u. */
NYB_FUNCTION float nyb_gelu_of(int dtype, float x, float factor) {
  const float half = nyb_round_number(dtype, NYB_MULTIPLY(0.5f, x));
  return nyb_round_number(dtype, NYB_MULTIPLY(half, factor));
}

/* ---- The table of u/2, by the bits of a 16-bit gate ----------------------------------------- */

/* Below half of T's step below 1 a gate's tanh is lost beside 1, so that u = 1; from 4 on the tanh
 * is 1 or -1, so that u is 2 or 0 (NaN and infinity too: what multiplies u then makes a NaN). The
 * magnitudes between, with one on either side for all that lies beyond, index the table, those of
 * positive gates first. */
enum {
  NYB_GELU_FIRST_F16 = 0x0bff, /* the last below 2^-12 */
  NYB_GELU_END_F16 = 0x4400,   /* 4 */
  NYB_GELU_FIRST_BF16 = 0x3aff,
  NYB_GELU_END_BF16 = 0x4080,
  NYB_GELU_ENTRIES_F16 = NYB_GELU_END_F16 - NYB_GELU_FIRST_F16 + 1, /* of a sign */
  NYB_GELU_ENTRIES_BF16 = NYB_GELU_END_BF16 - NYB_GELU_FIRST_BF16 + 1
};

/* Constant where dtype is. */
NYB_FUNCTION uint32_t nyb_gelu_first(int dtype) {
  return dtype == NYB_DEVICE_F16 ? NYB_GELU_FIRST_F16 : NYB_GELU_FIRST_BF16;
}
NYB_FUNCTION uint32_t nyb_gelu_entries(int dtype) {
  return dtype == NYB_DEVICE_F16 ? NYB_GELU_ENTRIES_F16 : NYB_GELU_ENTRIES_BF16;
}

/* Entry `index` of positive gates and that of negative ones; the steps are odd, up to 1 + tanh. */
NYB_FUNCTION void nyb_gelu_entry(int dtype, uint32_t index, uint16_t *positive,
                                 uint16_t *negative) {
  const float x = nyb_number_from(dtype, nyb_gelu_first(dtype) + index);
  const float t = nyb_device_tanh(nyb_gelu_inner(dtype, x));
  const float plus = nyb_gelu_factor(dtype, t), minus = nyb_gelu_factor(dtype, -t);
  *positive = (uint16_t)nyb_number_to(dtype, NYB_MULTIPLY(0.5f, plus));
  *negative = (uint16_t)nyb_number_to(dtype, NYB_MULTIPLY(0.5f, minus));
}

NYB_FUNCTION uint32_t nyb_gelu_index(int dtype, uint32_t gate) {
  const uint32_t first = nyb_gelu_first(dtype), last = nyb_gelu_entries(dtype) - 1;
  const uint32_t magnitude = gate & 0x7fffu;
  const uint32_t above = magnitude > first ? magnitude - first : 0;
  return (above < last ? above : last) + (gate >> 15) * nyb_gelu_entries(dtype);
}

/* g before it is rounded: x * (u/2) is (x/2) * u, since halving is exact; and where T(x/2) is not
 * exact, u is 1, so that rounding once does what rounding twice did. */
NYB_FUNCTION float nyb_gelu_by_entry(int dtype, uint32_t gate, uint16_t entry) {
  return NYB_MULTIPLY(nyb_number_from(dtype, gate), nyb_number_from(dtype, entry));
}

#endif
