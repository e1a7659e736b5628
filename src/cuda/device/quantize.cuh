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
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    range.least = nyb_least_of(range.least, values[i]);
    range.most = nyb_most_of(range.most, values[i]);
    range.finite &= (nyb_bits_of(values[i]) & 0x7fffffffu) < 0x7f800000u;
  }
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

/* The codes of a thread's elements as the bit stream that its bytes hold. A quotient 0 / 0 (a
 * constant group so large that edge / 1e-7 overflows) becomes code 0. */
NYB_FUNCTION uint64_t nyb_codes_of(const float values[NYB_LANE_ELEMENTS], nyb_scaling scaling,
                                   int rule, int bits) {
  const float highest_code = (float)((1 << bits) - 1);
  uint64_t stream = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    const float quotient = NYB_DIVIDE(NYB_SUBTRACT(values[i], scaling.bias), scaling.scale);
    const float code = nyb_round_quotient(rule, quotient);
    const float clamped = code > 0.0f ? nyb_least_of(code, highest_code) : 0.0f;
    stream |= (uint64_t)(uint32_t)clamped << (i * bits);
  }
  return stream;
}

/* ---- Dequantize ----------------------------------------------------------------------------- */

NYB_FUNCTION float nyb_value_of(uint64_t stream, int i, int bits, float scale, float bias,
                                int scale_dtype) {
  const uint32_t code = (uint32_t)(stream >> (i * bits)) & ((1u << bits) - 1u);
  const float product = nyb_round_number(scale_dtype, NYB_MULTIPLY(scale, (float)code));
  return nyb_round_number(scale_dtype, NYB_ADD(product, bias));
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
