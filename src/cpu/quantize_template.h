/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize for one vector ISA. The includer defines NYB_ISA_SUFFIX and, as static
 * inline functions, the vocabulary used below:
 *
 *   nyb_vector, nyb_mask_of, LANES      a vector of LANES floats, the result of a comparison
 *   v_set v_add v_sub v_mul v_div v_min v_max v_abs v_negate v_trunc v_rint
 *   v_fma(a, b, c)                      a * b + c, rounded once
 *   v_fnma(a, b, c)                     c - a * b, rounded once
 *   v_greater, v_select(mask, yes, no), v_all_finite
 *   v_min_of_each(v), v_max_of_each(v)  lane i: over the lanes of v[i], for LANES vectors
 *   v_load(data, dtype, index)
 *   v_store(data, dtype, index, v), v_round_to(dtype, v)
 *                                       v without a NaN, or with one that is to stay some NaN where
 *                                       dtype is not BF16
 *   v_store_any(data, dtype, index, v)  the same bits as nyb_store_f32, NaN or not
 *   nyb_codes                           32 codes, a byte each
 *   v_codes_32(quotients, rule, highest_code)
 *                                       32 quotients, each above -0.5 or NaN, to the nearest of 0
 * to highest_code by the rule; NaN to 0 v_widen(bytes)                      LANES bytes to floats
 *   pack_32(codes, bits, bytes)         4 * bits bytes, not one more
 *   unpack_32(bytes, bits, codes)       and back, to 32 bytes
 *
 * Whatever must be a constant for speed is an argument of an inline function that a switch calls.
 */
#include <string.h>

#include "../kernels.h"
#include "../numeric.h"
#include "codes_lane.h"
#include "quantize_group.h"

enum { LARGEST_GROUP = 128 };

/* Calls function(NYB_F32, ...) and so on, so that dtype is a constant inside. */
#define NYB_BY_DTYPE(dtype, function, ...)                 \
  switch (dtype) {                                         \
    case NYB_F32: function(NYB_F32, __VA_ARGS__); break;   \
    case NYB_F16: function(NYB_F16, __VA_ARGS__); break;   \
    case NYB_BF16: function(NYB_BF16, __VA_ARGS__); break; \
  }

/* ---- Affine quantize ---------------------------------------------------------------------- */

enum { VECTORS_OF_32 = 32 / LANES };

/* Scales and biases of some groups are computed side by side, a group to a lane: enough groups that
 * the divisions of one vector fill the waits of another. */
enum { BATCH_GROUPS = 32, BATCH_VECTORS = BATCH_GROUPS / LANES };

typedef struct group_batch {
  int64_t first_group;
  int64_t count;
  int vectors; /* that hold count lanes */
  float scale[BATCH_GROUPS];
  float bias[BATCH_GROUPS];
  float reciprocal[BATCH_GROUPS]; /* of scale */
} group_batch;

/* Minimum and maximum of each group, still spread over LANES lanes; false where any value is a NaN
 * or an infinity. Each of the vectors of 32 elements keeps account of its own, so that none waits
 * for the one before. */
NYB_INLINE void find_ranges(nyb_dtype dtype, const nyb_quantize_span *span,
                            const group_batch *batch, nyb_vector *minimums, nyb_vector *maximums,
                            bool *finite) {
  nyb_vector zero_or_nan[VECTORS_OF_32]; /* 0 * x is NaN for what is not finite */
  for (int k = 0; k < VECTORS_OF_32; k++) zero_or_nan[k] = v_set(0.0f);
  for (int64_t i = 0; i < batch->count; i++) {
    const int64_t first = (batch->first_group + i) * span->group_size;
    nyb_vector minimum[VECTORS_OF_32], maximum[VECTORS_OF_32];
    for (int k = 0; k < VECTORS_OF_32; k++) {
      minimum[k] = maximum[k] = v_load(span->input, dtype, first + k * LANES);
      zero_or_nan[k] = v_fma(minimum[k], v_set(0.0f), zero_or_nan[k]);
    }
    for (int64_t j = 32; j < span->group_size; j += 32) {
      for (int k = 0; k < VECTORS_OF_32; k++) {
        const nyb_vector values = v_load(span->input, dtype, first + j + k * LANES);
        minimum[k] = v_min(minimum[k], values);
        maximum[k] = v_max(maximum[k], values);
        zero_or_nan[k] = v_fma(values, v_set(0.0f), zero_or_nan[k]);
      }
    }
    for (int half = VECTORS_OF_32 / 2; half >= 1; half /= 2) {
      for (int k = 0; k < half; k++) {
        minimum[k] = v_min(minimum[k], minimum[k + half]);
        maximum[k] = v_max(maximum[k], maximum[k + half]);
      }
    }
    minimums[i] = minimum[0];
    maximums[i] = maximum[0];
  }
  for (int k = 1; k < VECTORS_OF_32; k++) zero_or_nan[0] = v_add(zero_or_nan[0], zero_or_nan[k]);
  *finite = v_all_finite(zero_or_nan[0]);
}

/* Half away from zero: the number below one half keeps its nearest neighbour from being carried up,
 * and the sum of it and an exact half rounds to the next integer. */
NYB_INLINE nyb_vector round_half_away(nyb_vector value) {
  const nyb_vector nearly_half = v_set(0x1.fffffep-2f);
  const nyb_vector signed_half =
      v_select(v_greater(v_set(0.0f), value), v_negate(nearly_half), nearly_half);
  return v_trunc(v_add(value, signed_half));
}

/* The steps of nyb_find_parameters, for LANES groups; false where a scale or bias overflows. */
NYB_INLINE bool find_scales(const nyb_quantize_span *span, float highest_code, nyb_vector minimum,
                            nyb_vector maximum, group_batch *batch, int64_t first_lane) {
  const bool half_to_even = span->rule == NYB_RULE_MLX_CPU;
  const nyb_vector zero = v_set(0.0f);
  if (!half_to_even) maximum = v_max(maximum, zero);
  const nyb_mask_of minimum_is_edge = v_greater(v_abs(minimum), v_abs(maximum));
  nyb_vector scale = v_div(v_sub(maximum, minimum), v_set(highest_code));
  scale = v_max(scale, v_set(1e-7f));
  scale = v_select(minimum_is_edge, scale, v_negate(scale));
  const nyb_vector edge = v_select(minimum_is_edge, minimum, maximum);
  const nyb_vector quotient = v_div(edge, scale);
  const nyb_vector edge_code = half_to_even ? v_rint(quotient) : round_half_away(quotient);
  const nyb_mask_of edge_has_code = v_greater(v_abs(edge_code), zero);
  scale = v_select(edge_has_code, v_div(edge, edge_code), scale);
  const nyb_vector bias = v_select(edge_has_code, edge, zero);
  v_store(batch->scale, NYB_F32, first_lane, scale);
  v_store(batch->bias, NYB_F32, first_lane, bias);
  v_store(batch->reciprocal, NYB_F32, first_lane, v_div(v_set(1.0f), scale));
  return v_all_finite(v_round_to(span->scale_dtype, scale)) &&
         v_all_finite(v_round_to(span->scale_dtype, bias));
}

/* False where a group of the batch cannot be stored. Like all that does not depend on the width,
 * compiled once. */
static __attribute__((noinline)) bool find_batch(const nyb_quantize_span *span, float highest_code,
                                                 group_batch *batch) {
  nyb_vector minimums[BATCH_GROUPS], maximums[BATCH_GROUPS];
  for (int64_t i = batch->count; i < batch->vectors * LANES; i++) {
    minimums[i] = maximums[i] = v_set(0.0f); /* the lanes of no group stay finite */
  }
  bool finite = true;
  NYB_BY_DTYPE(span->input_dtype, find_ranges, span, batch, minimums, maximums, &finite)
  for (int i = 0; i < batch->vectors; i++) {
    const nyb_vector minimum = v_min_of_each(minimums + i * LANES);
    const nyb_vector maximum = v_max_of_each(maximums + i * LANES);
    finite &= find_scales(span, highest_code, minimum, maximum, batch, (int64_t)i * LANES);
  }
  return finite;
}

/* The quotient that division gives, from the reciprocal of a scale: one step of correction with
 * fused products makes it the same wherever it decides a code. docs/formats.md says why, and how
 * that was checked for every scale and every tie. */
NYB_INLINE nyb_vector divide(nyb_vector dividend, nyb_vector scale, nyb_vector reciprocal) {
  const nyb_vector quotient = v_mul(dividend, reciprocal);
  const nyb_vector rest = v_fnma(quotient, scale, dividend);
  return v_fma(rest, reciprocal, quotient);
}

/* The reciprocal of a scale beyond this is no normal number or close to none. */
#define HUGE_SCALE 0x1p+120f

NYB_INLINE void find_codes(nyb_dtype dtype, const nyb_quantize_span *span, const group_batch *batch,
                           int64_t index, int bits, uint8_t *bytes) {
  const int64_t first = (batch->first_group + index) * span->group_size;
  const nyb_vector scale = v_set(batch->scale[index]);
  const nyb_vector bias = v_set(batch->bias[index]);
  const nyb_vector reciprocal = v_set(batch->reciprocal[index]);
  const bool is_huge = fabsf(batch->scale[index]) > HUGE_SCALE;
  for (int64_t i = 0; i < span->group_size; i += 32) {
    nyb_vector quotients[VECTORS_OF_32];
    for (int j = 0; j < VECTORS_OF_32; j++) {
      const nyb_vector values = v_load(span->input, dtype, first + i + j * LANES);
      const nyb_vector dividend = v_sub(values, bias);
      quotients[j] = divide(dividend, scale, reciprocal);
      if (is_huge) quotients[j] = v_div(dividend, scale);
    }
    pack_32(v_codes_32(quotients, span->rule, (1 << bits) - 1), bits, bytes + i / 8 * bits);
  }
}

static __attribute__((noinline)) void store_scales(const nyb_quantize_span *span,
                                                   const group_batch *batch) {
  int64_t i = 0;
  for (; i + LANES <= batch->count; i += LANES) {
    const int64_t group = batch->first_group + i;
    v_store(span->scales, span->scale_dtype, group, v_load(batch->scale, NYB_F32, i));
    v_store(span->biases, span->scale_dtype, group, v_load(batch->bias, NYB_F32, i));
  }
  for (; i < batch->count; i++) {
    const int64_t group = batch->first_group + i;
    nyb_store_f32(span->scales, span->scale_dtype, group, batch->scale[i]);
    nyb_store_f32(span->biases, span->scale_dtype, group, batch->bias[i]);
  }
}

/* False where a group cannot be stored; nothing is written then. */
NYB_INLINE bool quantize_batch(const nyb_quantize_span *span, int bits, int64_t first_group,
                               int64_t count) {
  group_batch batch;
  batch.first_group = first_group;
  batch.count = count;
  batch.vectors = (int)((count + LANES - 1) / LANES);
  if (!find_batch(span, (float)((1 << bits) - 1), &batch)) return false;
  if (span->codes == NULL) return true;
  const int64_t group_bytes = span->group_size / 8 * bits;
  for (int64_t i = 0; i < count; i++) {
    uint8_t *bytes = (uint8_t *)span->codes + (first_group + i) * group_bytes;
    NYB_BY_DTYPE(span->input_dtype, find_codes, span, &batch, i, bits, bytes)
  }
  store_scales(span, &batch);
  return true;
}

/* One of `count` groups cannot be stored: stores those before it and returns its index. */
static __attribute__((noinline)) int64_t quantize_up_to_bad(const nyb_quantize_span *span,
                                                            nyb_quantize_fn kernel, int bits,
                                                            int64_t group) {
  const float highest_code = (float)((1 << bits) - 1);
  nyb_group_parameters unused;
  const int64_t first = group;
  while (nyb_find_parameters(span, group * span->group_size, highest_code, &unused)) group++;
  if (span->codes == NULL || group == first) return group;
  nyb_quantize_span good = *span;
  const size_t element_bytes = nyb_dtype_bytes(span->input_dtype);
  const size_t scale_bytes = nyb_dtype_bytes(span->scale_dtype);
  good.input = (const char *)span->input + (size_t)(first * span->group_size) * element_bytes;
  good.codes = (char *)span->codes + first * span->group_size / 8 * bits;
  good.scales = (char *)span->scales + (size_t)first * scale_bytes;
  good.biases = (char *)span->biases + (size_t)first * scale_bytes;
  good.groups = group - first;
  kernel(&good);
  return group;
}

NYB_INLINE int64_t quantize_affine(const nyb_quantize_span *span, int bits,
                                   nyb_quantize_fn kernel) {
  for (int64_t group = 0; group < span->groups; group += BATCH_GROUPS) {
    const int64_t rest = span->groups - group;
    if (!quantize_batch(span, bits, group, rest < BATCH_GROUPS ? rest : BATCH_GROUPS)) {
      return quantize_up_to_bad(span, kernel, bits, group);
    }
  }
  return span->groups;
}

/* ---- Affine dequantize -------------------------------------------------------------------- */

/* Only a scale or bias that is not finite can lead to a NaN. */
static __attribute__((noinline)) void restore_odd_group(const nyb_dequantize_span *span,
                                                        int64_t group, const uint8_t *codes) {
  const float scale = nyb_load_f32(span->scales, span->scale_dtype, group);
  const float bias = nyb_load_f32(span->biases, span->scale_dtype, group);
  for (int64_t i = 0; i < span->group_size; i++) {
    const float product = nyb_round_to(span->scale_dtype, scale * (float)codes[i]);
    const float value = nyb_round_to(span->scale_dtype, product + bias);
    nyb_store_f32(span->output, span->output_dtype, group * span->group_size + i, value);
  }
}

NYB_INLINE void restore_group(nyb_dtype dtype, nyb_dtype output_dtype,
                              const nyb_dequantize_span *span, int64_t group,
                              const uint8_t *codes) {
  const float group_scale = nyb_load_f32(span->scales, dtype, group);
  const float group_bias = nyb_load_f32(span->biases, dtype, group);
  if (!isfinite(group_scale) || !isfinite(group_bias)) {
    restore_odd_group(span, group, codes);
    return;
  }
  const nyb_vector scale = v_set(group_scale);
  const nyb_vector bias = v_set(group_bias);
  const int64_t first = group * span->group_size;
  for (int64_t i = 0; i < span->group_size; i += LANES) {
    const nyb_vector product = v_round_to(dtype, v_mul(scale, v_widen(codes + i)));
    nyb_vector value = v_add(product, bias);
    if (output_dtype != dtype) value = v_round_to(dtype, value);
    v_store(span->output, output_dtype, first + i, value);
  }
}

NYB_INLINE void restore_group_to(nyb_dtype output_dtype, const nyb_dequantize_span *span,
                                 int64_t group, const uint8_t *codes) {
  switch (span->scale_dtype) {
    case NYB_F32: restore_group(NYB_F32, output_dtype, span, group, codes); break;
    case NYB_F16: restore_group(NYB_F16, output_dtype, span, group, codes); break;
    case NYB_BF16: restore_group(NYB_BF16, output_dtype, span, group, codes); break;
  }
}

/* Once for all widths: what it costs to hand the codes over in memory is little. */
static __attribute__((noinline)) void restore(const nyb_dequantize_span *span, int64_t group,
                                              const uint8_t *codes){
    NYB_BY_DTYPE(span->output_dtype, restore_group_to, span, group, codes)}

NYB_INLINE void dequantize_affine(const nyb_dequantize_span *span, int bits) {
  const int64_t group_bytes = span->group_size / 8 * bits;
  for (int64_t group = 0; group < span->groups; group++) {
    const uint8_t *bytes = (const uint8_t *)span->codes + group * group_bytes;
    uint8_t codes[LARGEST_GROUP];
    for (int i = 0; i < span->group_size; i += 32) {
      unpack_32(bytes + i / 8 * bits, bits, codes + i);
    }
    restore(span, group, codes);
  }
}

/* ---- Plain rows: conversion of elements --------------------------------------------------- */

enum { PLAIN_BLOCK = 128 }; /* elements between looks at whether all were finite */

NYB_INLINE bool convert_block(nyb_dtype from, nyb_dtype to, const void *input, void *output,
                              int64_t first) {
  nyb_vector zero_or_nan = v_set(0.0f);
  for (int64_t i = first; i < first + PLAIN_BLOCK; i += LANES) {
    const nyb_vector values = v_load(input, from, i);
    zero_or_nan =
        v_fma(values, v_set(0.0f), v_fma(v_round_to(to, values), v_set(0.0f), zero_or_nan));
    if (output != NULL) v_store_any(output, to, i, values);
  }
  return v_all_finite(zero_or_nan);
}

/* Converts whole blocks up to the first that holds what `to` cannot; returns how many elements. */
NYB_INLINE void convert_blocks(nyb_dtype from, nyb_dtype to, const nyb_quantize_span *span,
                               int64_t *done) {
  while (span->groups - *done >= PLAIN_BLOCK &&
         convert_block(from, to, span->input, span->codes, *done)) {
    *done += PLAIN_BLOCK;
  }
}

NYB_INLINE int64_t quantize_plain(const nyb_quantize_span *span, nyb_dtype dtype,
                                  nyb_quantize_fn kernel) {
  (void)kernel;
  int64_t i = 0;
  NYB_BY_DTYPE(span->input_dtype, convert_blocks, dtype, span, &i)
  for (; i < span->groups; i++) {
    const float value = nyb_load_f32(span->input, span->input_dtype, i);
    if (!isfinite(nyb_round_to(dtype, value))) return i;
    if (span->codes != NULL) nyb_store_f32(span->codes, dtype, i, value);
  }
  return span->groups;
}

NYB_INLINE void convert_all(nyb_dtype to, nyb_dtype from, const nyb_dequantize_span *span) {
  int64_t i = 0;
  for (; i + LANES <= span->groups; i += LANES) {
    v_store_any(span->output, to, i, v_load(span->codes, from, i));
  }
  for (; i < span->groups; i++) {
    nyb_store_f32(span->output, to, i, nyb_load_f32(span->codes, from, i));
  }
}

NYB_INLINE void dequantize_plain(const nyb_dequantize_span *span, nyb_dtype dtype) {
  if (span->output_dtype == dtype) {
    memcpy(span->output, span->codes, (size_t)span->groups * nyb_dtype_bytes(dtype));
    return;
  }
  NYB_BY_DTYPE(span->output_dtype, convert_all, dtype, span)
}

/* ---- The kernels -------------------------------------------------------------------------- */

#define NYB_JOIN_(a, b) a##_##b
#define NYB_JOIN(a, b) NYB_JOIN_(a, b)
#define NYB_KERNELS_OF(format, quantize_function, dequantize_function, argument)               \
  int64_t NYB_JOIN(nyb_quantize_##format, NYB_ISA_SUFFIX)(const nyb_quantize_span *span);      \
  int64_t NYB_JOIN(nyb_quantize_##format, NYB_ISA_SUFFIX)(const nyb_quantize_span *span) {     \
    return quantize_function(span, argument, NYB_JOIN(nyb_quantize_##format, NYB_ISA_SUFFIX)); \
  }                                                                                            \
  void NYB_JOIN(nyb_dequantize_##format, NYB_ISA_SUFFIX)(const nyb_dequantize_span *span);     \
  void NYB_JOIN(nyb_dequantize_##format, NYB_ISA_SUFFIX)(const nyb_dequantize_span *span) {    \
    dequantize_function(span, argument);                                                       \
  }

NYB_KERNELS_OF(affine2, quantize_affine, dequantize_affine, 2)
NYB_KERNELS_OF(affine3, quantize_affine, dequantize_affine, 3)
NYB_KERNELS_OF(affine4, quantize_affine, dequantize_affine, 4)
NYB_KERNELS_OF(affine5, quantize_affine, dequantize_affine, 5)
NYB_KERNELS_OF(affine6, quantize_affine, dequantize_affine, 6)
NYB_KERNELS_OF(affine8, quantize_affine, dequantize_affine, 8)
NYB_KERNELS_OF(plain_f32, quantize_plain, dequantize_plain, NYB_F32)
NYB_KERNELS_OF(plain_f16, quantize_plain, dequantize_plain, NYB_F16)
NYB_KERNELS_OF(plain_bf16, quantize_plain, dequantize_plain, NYB_BF16)
