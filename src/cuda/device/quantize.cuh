/* SPDX-License-Identifier: Apache-2.0 */
/* Quantizing and dequantizing as docs/numerics.md, section 1, spells it, by threads of
 * NYB_LANE_ELEMENTS elements each. A group's threads find their own ranges, join them, and go on
 * with the group's parameters; the order in which ranges are joined changes no bit, since of zeros
 * of either sign nothing depends on the sign. */
#ifndef NYB_QUANTIZE_CUH
#define NYB_QUANTIZE_CUH

#include "portable.cuh"

/* ---- Quantize ------------------------------------------------------------------------------- */

typedef struct nyb_range {
  float least, most;
  int finite; /* all of it */
} nyb_range;

NYB_FUNCTION float nyb_least_of(float a, float b) { return a < b ? a : b; }
NYB_FUNCTION float nyb_most_of(float a, float b) { return a > b ? a : b; }

NYB_FUNCTION nyb_range nyb_range_of(const float values[NYB_LANE_ELEMENTS]) {
  nyb_range range = {values[0], values[0], 1};
  float zero_or_nan = 0.0f; /* 0 * x is NaN for what is not finite */
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    range.least = nyb_least_of(range.least, values[i]);
    range.most = nyb_most_of(range.most, values[i]);
    zero_or_nan = NYB_FUSED(values[i], 0.0f, zero_or_nan);
  }
  range.finite = zero_or_nan == 0.0f;
  return range;
}

NYB_FUNCTION nyb_range nyb_range_join(nyb_range a, nyb_range b) {
  nyb_range range;
  range.least = nyb_least_of(a.least, b.least);
  range.most = nyb_most_of(a.most, b.most);
  range.finite = a.finite & b.finite;
  return range;
}

typedef struct nyb_scaling {
  float scale; /* not yet rounded to the dtype: codes are computed with this one */
  float bias;
  int storable;
} nyb_scaling;

NYB_FUNCTION float nyb_round_quotient(int rule, float quotient) {
  return rule == NYB_DEVICE_RULE_MLX_CPU ? rintf(quotient) : roundf(quotient);
}

NYB_FUNCTION nyb_scaling nyb_scaling_of(nyb_range range, int rule, float highest_code,
                                        int scale_dtype) {
  const float least = range.least;
  const float most = rule == NYB_DEVICE_RULE_MLX_CPU ? range.most : nyb_most_of(range.most, 0.0f);
  const int least_is_edge = fabsf(least) > fabsf(most);
  float scale = NYB_DIVIDE(NYB_SUBTRACT(most, least), highest_code);
  if (scale < 1e-7f) scale = 1e-7f;
  if (!least_is_edge) scale = -scale;
  const float edge = least_is_edge ? least : most;
  const float edge_code = nyb_round_quotient(rule, NYB_DIVIDE(edge, scale));
  nyb_scaling scaling;
  scaling.scale = edge_code != 0.0f ? NYB_DIVIDE(edge, edge_code) : scale;
  scaling.bias = edge_code != 0.0f ? edge : 0.0f;
  scaling.storable =
      range.finite && nyb_fits(scale_dtype, scaling.scale) && nyb_fits(scale_dtype, scaling.bias);
  return scaling;
}

/* What all quotients of a group have in common. */
typedef struct nyb_group_divisor {
  float scale, reciprocal;
  float shrink; /* 1, or what brings a huge scale's reciprocal back to normal numbers */
} nyb_group_divisor;

NYB_FUNCTION nyb_group_divisor nyb_group_divisor_of(float scale) {
  nyb_group_divisor divisor;
  divisor.shrink = fabsf(scale) > 1.329227995784916e36f ? 5.421010862427522e-20f : 1.0f;
  divisor.scale = NYB_MULTIPLY(scale, divisor.shrink); /* 2^120 and 2^-64 */
  divisor.reciprocal = NYB_DIVIDE(1.0f, divisor.scale);
  return divisor;
}

/* The quotient that division gives, wherever it decides a code: as src/cpu/quantize_template.h. A
 * dividend that shrinking makes subnormal has code 0 either way. */
NYB_FUNCTION float nyb_quotient_of(float dividend, nyb_group_divisor divisor) {
  const float shrunk = NYB_MULTIPLY(dividend, divisor.shrink);
  const float quotient = NYB_MULTIPLY(shrunk, divisor.reciprocal);
  const float rest = NYB_FUSED(-quotient, divisor.scale, shrunk);
  return NYB_FUSED(rest, divisor.reciprocal, quotient);
}

/* A quotient's code. 0 / 0 (a constant group so large that edge / 1e-7 overflows) becomes 0. */
NYB_FUNCTION uint32_t nyb_code_of(float quotient, int rule, float highest_code) {
  const float positive = quotient > 0.0f ? quotient : 0.0f;
  const float clamped = nyb_least_of(positive, highest_code);
  /* 2^23 + x is 2^23 + x rounded, half to even, in the last bits of the sum. */
  const float sum = NYB_ADD(clamped, 8388608.0f);
  const uint32_t even = nyb_bits_of(sum) & 0xffu;
  if (rule == NYB_DEVICE_RULE_MLX_CPU) return even;
  const float rounded = NYB_SUBTRACT(sum, 8388608.0f);
  return NYB_SUBTRACT(clamped, rounded) == 0.5f ? even + 1 : even;
}

/* The codes of a thread's elements as the bit stream that its bytes hold. */
NYB_FUNCTION uint64_t nyb_codes_of(const float values[NYB_LANE_ELEMENTS], nyb_scaling scaling,
                                   int rule, int bits) {
  const float highest_code = (float)((1 << bits) - 1);
  const nyb_group_divisor divisor = nyb_group_divisor_of(scaling.scale);
  uint32_t half[2] = {0, 0}; /* four codes fit 32 bits */
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    const float quotient = nyb_quotient_of(NYB_SUBTRACT(values[i], scaling.bias), divisor);
    half[i / 4] |= nyb_code_of(quotient, rule, highest_code) << (i % 4 * bits);
  }
  return (uint64_t)half[1] << (4 * bits) | half[0];
}

/* ---- Dequantize ----------------------------------------------------------------------------- */

/* Faster where scale_dtype is a constant. */
NYB_FUNCTION void nyb_values_of_dtype(uint64_t stream, int bits, float scale, float bias,
                                      int scale_dtype, float values[NYB_LANE_ELEMENTS]) {
  const uint32_t mask = (1u << bits) - 1u;
  const uint32_t half[2] = {(uint32_t)stream, (uint32_t)(stream >> (4 * bits))};
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    const uint32_t code = half[i / 4] >> (i % 4 * bits) & mask;
    const float number = NYB_SUBTRACT(nyb_float_of(code | 0x4b000000u), 8388608.0f);
    const float product = nyb_round_number(scale_dtype, NYB_MULTIPLY(scale, number));
    values[i] = nyb_round_number(scale_dtype, NYB_ADD(product, bias));
  }
}

NYB_FUNCTION void nyb_values_of(uint64_t stream, int bits, float scale, float bias, int scale_dtype,
                                float values[NYB_LANE_ELEMENTS]) {
  if (scale_dtype == NYB_DEVICE_BF16) {
    nyb_values_of_dtype(stream, bits, scale, bias, NYB_DEVICE_BF16, values);
  } else if (scale_dtype == NYB_DEVICE_F16) {
    nyb_values_of_dtype(stream, bits, scale, bias, NYB_DEVICE_F16, values);
  } else {
    nyb_values_of_dtype(stream, bits, scale, bias, NYB_DEVICE_F32, values);
  }
}

/* ---- Plain rows ----------------------------------------------------------------------------- */

/* An element of `from` as bits, to the bits of one of `to`; a NaN keeps what fits of its payload.
 */
NYB_FUNCTION uint32_t nyb_convert(int from, int to, uint32_t bits) {
  if (from == to) return bits;
  const float value = from == NYB_DEVICE_F32   ? nyb_float_of(bits)
                      : from == NYB_DEVICE_F16 ? nyb_widen_f16(bits)
                                               : nyb_widen_bf16(bits);
  if (to == NYB_DEVICE_F32) return nyb_bits_of(value);
  return to == NYB_DEVICE_F16 ? nyb_narrow_f16(value) : nyb_narrow_bf16(value);
}

/* Whether an element of that dtype is finite, from its bits. */
NYB_FUNCTION int nyb_is_finite(int dtype, uint32_t bits) {
  const uint32_t infinity = dtype == NYB_DEVICE_F32   ? 0x7f800000u
                            : dtype == NYB_DEVICE_F16 ? 0x7c00u
                                                      : 0x7f80u;
  return (bits & (dtype == NYB_DEVICE_F32 ? 0x7fffffffu : 0x7fffu)) < infinity;
}

#endif
