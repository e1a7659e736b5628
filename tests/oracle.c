/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>
#include <string.h>

/* ---- Numbers ------------------------------------------------------------------------------ */

/* A binary floating-point format with gradual underflow: `precision` significant bits, normal from
 * 2^min_exponent on. The number of exponent bits follows from the width. */
typedef struct binary {
  int width, precision, min_exponent;
  double largest;
} binary;

static const binary binaries[] = {
    [NYB_F32] = {.width = 32, .precision = 24, .min_exponent = -126, .largest = 0x1.fffffep127},
    [NYB_F16] = {.width = 16, .precision = 11, .min_exponent = -14, .largest = 0x1.ffcp15},
    [NYB_BF16] = {.width = 16, .precision = 8, .min_exponent = -126, .largest = 0x1.fep127},
};

/* 2^exponent, exact, for a double's normal exponents. */
static double power_of_two(int exponent) {
  const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

double oracle_round(nyb_dtype dtype, double value) {
  if (value == 0 || !isfinite(value)) return value;
  const binary *target = &binaries[dtype];
  int exponent; /* |value| lies in [2^(exponent-1), 2^exponent) */
  frexp(value, &exponent);
  if (exponent - 1 < target->min_exponent) exponent = target->min_exponent + 1;
  const int last_place = exponent - target->precision;
  const double rounded = nearbyint(value * power_of_two(-last_place)) * power_of_two(last_place);
  return fabs(rounded) > target->largest ? copysign(INFINITY, value) : rounded;
}

double oracle_round_f32_then(nyb_dtype dtype, double value) {
  return oracle_round(dtype, oracle_round(NYB_F32, value));
}

uint32_t oracle_encode(nyb_dtype dtype, double value) {
  const binary *target = &binaries[dtype];
  const int fraction_bits = target->precision - 1;
  const int exponent_bits = target->width - target->precision;
  const uint32_t all_ones = (1u << exponent_bits) - 1;
  const uint32_t sign = signbit(value) ? 1u << (target->width - 1) : 0;
  if (isnan(value)) return all_ones << fraction_bits | 1u << (fraction_bits - 1);
  if (isinf(value)) return sign | all_ones << fraction_bits;
  int exponent;
  const double fraction = frexp(fabs(value), &exponent);
  if (value == 0 || exponent - 1 < target->min_exponent) {
    return sign | (uint32_t)ldexp(fabs(value), fraction_bits - target->min_exponent);
  }
  const uint32_t significand = (uint32_t)ldexp(fraction, target->precision);
  const uint32_t biased = (uint32_t)(exponent - target->min_exponent);
  return sign | biased << fraction_bits | (significand - (1u << fraction_bits));
}

double oracle_decode(nyb_dtype dtype, uint32_t bits) {
  const binary *source = &binaries[dtype];
  const int fraction_bits = source->precision - 1;
  const uint32_t all_ones = (1u << (source->width - source->precision)) - 1;
  const uint32_t fraction = bits & ((1u << fraction_bits) - 1);
  const uint32_t biased = bits >> fraction_bits & all_ones;
  double value;
  if (biased == all_ones) {
    value = fraction != 0 ? (double)NAN : (double)INFINITY;
  } else if (biased == 0) {
    value = fraction * power_of_two(source->min_exponent - fraction_bits);
  } else {
    value = ((1u << fraction_bits) + fraction) *
            power_of_two((int)biased - 1 + source->min_exponent - fraction_bits);
  }
  return bits >> (source->width - 1) & 1u ? -value : value;
}

uint32_t oracle_load_bits(const void *data, nyb_dtype dtype, int64_t index) {
  const int64_t bytes = binaries[dtype].width / 8;
  const uint8_t *element = (const uint8_t *)data + index * bytes;
  uint32_t bits = 0;
  for (int64_t i = 0; i < bytes; i++) {
    bits |= (uint32_t)element[i] << (8 * i);
  }
  return bits;
}

double oracle_load(const void *data, nyb_dtype dtype, int64_t index) {
  return oracle_decode(dtype, oracle_load_bits(data, dtype, index));
}

void oracle_store(void *data, nyb_dtype dtype, int64_t index, double value) {
  const int64_t bytes = binaries[dtype].width / 8;
  uint8_t *element = (uint8_t *)data + index * bytes;
  const uint32_t bits = oracle_encode(dtype, oracle_round(dtype, value));
  for (int64_t i = 0; i < bytes; i++) {
    element[i] = (uint8_t)(bits >> (8 * i));
  }
}

bool oracle_within(nyb_dtype dtype, double got, double want, double error) {
  return got >= oracle_round(dtype, want - error) && got <= oracle_round(dtype, want + error);
}

/* ---- Codes and groups --------------------------------------------------------------------- */

uint32_t oracle_code(const void *row, int bits, int64_t index) {
  const uint8_t *bytes = row;
  uint32_t code = 0;
  for (int i = 0; i < bits; i++) {
    const int64_t bit = index * bits + i;
    code |= (bytes[bit / 8] >> (bit % 8) & 1u) << i;
  }
  return code;
}

void oracle_put_code(void *row, int bits, int64_t index, uint32_t code) {
  uint8_t *bytes = row;
  for (int i = 0; i < bits; i++) {
    const int64_t bit = index * bits + i;
    const uint8_t mask = (uint8_t)(1u << (bit % 8));
    bytes[bit / 8] = (uint8_t)(code >> i & 1u ? bytes[bit / 8] | mask : bytes[bit / 8] & ~mask);
  }
}

/* One f32 operation on f32 operands. Doing it in double first changes nothing: 53 bits are more
 * than twice 24 plus two, so that the second rounding of + - * / is harmless. */
static double f32(double value) { return oracle_round(NYB_F32, value); }

static double round_code(nyb_rule rule, double value) {
  return rule == NYB_RULE_MLX_CPU ? nearbyint(value) : round(value);
}

bool oracle_quantize_group(const double *elements, int64_t count, int bits, nyb_rule rule,
                           nyb_dtype dtype, oracle_group *group) {
  const double largest_code = (1 << bits) - 1;
  double least = INFINITY;
  double most = rule == NYB_RULE_MLX_CPU ? -INFINITY : 0;
  for (int64_t i = 0; i < count; i++) {
    if (!isfinite(elements[i])) return false;
    least = elements[i] < least ? elements[i] : least;
    most = elements[i] > most ? elements[i] : most;
  }
  const bool from_least = fabs(least) > fabs(most);
  const double smallest_scale = oracle_round(NYB_F32, 1e-7);
  double scale = f32(f32(most - least) / largest_code);
  if (!isfinite(scale)) return false;
  if (scale < smallest_scale) scale = smallest_scale;
  if (!from_least) scale = -scale;
  const double edge = from_least ? least : most;
  const double edge_code = round_code(rule, f32(edge / scale));
  double bias = 0;
  if (edge_code != 0) {
    scale = f32(edge / edge_code);
    bias = edge;
  }
  for (int64_t i = 0; i < count; i++) {
    double code = round_code(rule, f32(f32(elements[i] - bias) / scale));
    if (code < 0) code = 0;
    if (code > largest_code) code = largest_code;
    group->codes[i] = (uint8_t)code;
  }
  group->scale = oracle_round(dtype, scale);
  group->bias = oracle_round(dtype, bias);
  return isfinite(group->scale) && isfinite(group->bias);
}

double oracle_dequantize(nyb_dtype dtype, double scale, double bias, uint32_t code) {
  const double product = oracle_round_f32_then(dtype, scale * code);
  return oracle_round_f32_then(dtype, product + bias);
}

/* ---- GeGLU -------------------------------------------------------------------------------- */

static const double cubic_factor = 0.044715;
static const double inner_factor = 0.7978845608028654; /* sqrt(2 / pi) */

/* Each step is an f32 operation, the cube two, whose result is rounded to the dtype. */
double oracle_geglu(nyb_dtype dtype, double gate, double up) {
#define STEP(value) oracle_round_f32_then(dtype, value)
  const double k = STEP(cubic_factor);
  const double c = STEP(inner_factor);
  const double cube = STEP(oracle_round(NYB_F32, gate * gate) * gate);
  const double scaled_cube = STEP(k * cube);
  const double sum = STEP(gate + scaled_cube);
  const double argument = STEP(c * sum);
  const double bounded = STEP(tanh(argument));
  const double above_zero = STEP(1 + bounded);
  const double half = STEP(0.5 * gate);
  const double gelu = STEP(half * above_zero);
  return STEP(gelu * up);
#undef STEP
}

double oracle_geglu_exact(double gate, double up) {
  const double argument = inner_factor * (gate + cubic_factor * gate * gate * gate);
  /* 1 + tanh z = 2 / (1 + exp(-2z)), which does not cancel for negative z */
  return gate / (1 + exp(-2 * argument)) * up;
}

/* The steps' errors, each in units u = 2^-24 of its own result:
 *   z: cube 2, k's and c's own rounding 1 each, two products and a sum 3; all terms have one sign,
 *      so that |dz| <= 7u|z|, and tanh'(z) = 1 - t^2 carries it to t;
 *   t: 3 ulp of tanh, at most 6u|t|; sum 1 + t: u(1 + t);
 *   then three products: 3u|y|. An underflow on the way adds 2^-126 |up| at most. */
double oracle_geglu_f32_error(double gate, double up) {
  const double u = ORACLE_F32_UNIT;
  const double z = inner_factor * (gate + cubic_factor * gate * gate * gate);
  const double t = tanh(z);
  const double slope = 1 / (cosh(z) * cosh(z)); /* 0 where cosh overflows, as it should be */
  const double relative_to_half = slope * 7 * u * fabs(z) + 6 * u * fabs(t) + u * (1 + t);
  const double through_sum = isfinite(z) ? relative_to_half : 8 * u;
  return (1 + 8 * u) * (through_sum * fabs(0.5 * gate * up) +
                        3 * u * fabs(oracle_geglu_exact(gate, up)) + 0x1p-126 * fabs(up)) +
         0x1p-149;
}
