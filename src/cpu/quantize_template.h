/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize for one vector ISA. The includer defines NYB_ISA_SUFFIX and, as static
 * inline functions, the vocabulary used below:
 *
 *   nyb_vector, nyb_mask_of, LANES      a vector of LANES floats, the result of a comparison
 *   v_set v_add v_sub v_mul v_div v_min v_max v_abs v_negate v_trunc v_rint
 *   v_fma(a, b, c)                      a * b + c, rounded once
 *   v_fnma(a, b, c)                     c - a * b, rounded once
 *   v_greater, v_select(mask, yes, no), v_all_finite
 *   v_min_across, v_max_across          of the lanes
 *   v_load(data, dtype, index), v_store(data, dtype, index, v), v_round_to(dtype, v)
 *   v_codes_32(quotients, rule, bytes)  32 quotients, each above -0.5 or NaN, to the nearest of 0
 * to 255 by the rule; NaN to 0 v_widen(bytes)                      LANES bytes to floats
 *   pack_32(codes, bits, bytes), unpack_32(bytes, bits, codes)
 *                                       32 codes to 4 * bits bytes and back; touch no other byte
 *
 * Whatever must be a constant for speed is an argument of an inline function that a switch calls.
 */
#include <string.h>

#include "../kernels.h"
#include "../numeric.h"
#include "quantize_group.h"

#define NYB_INLINE static inline __attribute__((always_inline))

enum { LARGEST_GROUP = 128 };

/* Calls function(NYB_F32, ...) and so on, so that dtype is a constant inside. */
#define NYB_BY_DTYPE(dtype, function, ...)                 \
  switch (dtype) {                                         \
    case NYB_F32: function(NYB_F32, __VA_ARGS__); break;   \
    case NYB_F16: function(NYB_F16, __VA_ARGS__); break;   \
    case NYB_BF16: function(NYB_BF16, __VA_ARGS__); break; \
  }

/* ---- Affine quantize: LANES groups at a time ---------------------------------------------- */

/* Scales and biases of up to LANES groups, computed side by side. */
typedef struct group_batch {
  int64_t first_group;
  int64_t count;
  float minimum[LANES], maximum[LANES];
  float scale[LANES], bias[LANES];
  float reciprocal[LANES]; /* of scale */
} group_batch;

/* Minimum and maximum of each group; false where any value is a NaN or an infinity. */
NYB_INLINE void find_ranges(nyb_dtype dtype, const nyb_quantize_span *span, group_batch *batch,
                            bool *finite) {
  nyb_vector zero_or_nan = v_set(0.0f); /* 0 * x is NaN for what is not finite */
  for (int64_t i = 0; i < batch->count; i++) {
    const int64_t first = (batch->first_group + i) * span->group_size;
    nyb_vector minimum = v_load(span->input, dtype, first);
    nyb_vector maximum = minimum;
    zero_or_nan = v_fma(minimum, v_set(0.0f), zero_or_nan);
    for (int64_t j = LANES; j < span->group_size; j += LANES) {
      const nyb_vector values = v_load(span->input, dtype, first + j);
      minimum = v_min(minimum, values);
      maximum = v_max(maximum, values);
      zero_or_nan = v_fma(values, v_set(0.0f), zero_or_nan);
    }
    batch->minimum[i] = v_min_across(minimum);
    batch->maximum[i] = v_max_across(maximum);
  }
  *finite = v_all_finite(zero_or_nan);
}

/* Half away from zero: the number below one half keeps its nearest neighbour from being carried up,
 * and the sum of it and an exact half rounds to the next integer. */
NYB_INLINE nyb_vector round_half_away(nyb_vector value) {
  const nyb_vector nearly_half = v_set(0x1.fffffep-2f);
  const nyb_vector signed_half =
      v_select(v_greater(v_set(0.0f), value), v_negate(nearly_half), nearly_half);
  return v_trunc(v_add(value, signed_half));
}

/* The steps of nyb_find_parameters, on all groups of the batch; false where a scale or bias
 * overflows. */
NYB_INLINE bool find_scales(const nyb_quantize_span *span, float highest_code, group_batch *batch) {
  const bool half_to_even = span->rule == NYB_RULE_MLX_CPU;
  const nyb_vector zero = v_set(0.0f);
  const nyb_vector minimum = v_load(batch->minimum, NYB_F32, 0);
  nyb_vector maximum = v_load(batch->maximum, NYB_F32, 0);
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
  v_store(batch->scale, NYB_F32, 0, scale);
  v_store(batch->bias, NYB_F32, 0, bias);
  v_store(batch->reciprocal, NYB_F32, 0, v_div(v_set(1.0f), scale));
  return v_all_finite(v_round_to(span->scale_dtype, scale)) &&
         v_all_finite(v_round_to(span->scale_dtype, bias));
}

/* The quotient that division gives, from the reciprocal of a scale: one step of correction with
 * fused products makes it the same wherever it decides a code. docs/formats.md says why, and how
 * that was checked for every scale and every tie. */
NYB_INLINE nyb_vector divide(nyb_vector dividend, nyb_vector scale, nyb_vector reciprocal) {
  const nyb_vector quotient = v_mul(dividend, reciprocal);
  const nyb_vector rest = v_fnma(quotient, scale, dividend);
  return v_fma(rest, reciprocal, quotient);
}

NYB_INLINE void find_codes(nyb_dtype dtype, const nyb_quantize_span *span, const group_batch *batch,
                           int64_t index, uint8_t *codes) {
  const int64_t first = (batch->first_group + index) * span->group_size;
  const nyb_vector scale = v_set(batch->scale[index]);
  const nyb_vector bias = v_set(batch->bias[index]);
  const nyb_vector reciprocal = v_set(batch->reciprocal[index]);
  /* The reciprocal of a larger scale would not be a normal number. */
  const bool is_huge = fabsf(batch->scale[index]) > 0x1p+120f;
  for (int64_t i = 0; i < span->group_size; i += 32) {
    nyb_vector quotients[32 / LANES];
    for (int j = 0; j < 32 / LANES; j++) {
      const nyb_vector values = v_load(span->input, dtype, first + i + j * LANES);
      const nyb_vector dividend = v_sub(values, bias);
      quotients[j] = is_huge ? v_div(dividend, scale) : divide(dividend, scale, reciprocal);
    }
    v_codes_32(quotients, span->rule, codes + i);
  }
}

/* Clamps from above and packs the codes of a group. */
NYB_INLINE void store_codes(uint8_t *codes, int32_t group_size, int bits, uint8_t *bytes) {
  const uint8_t highest_code = (uint8_t)((1 << bits) - 1);
  for (int i = 0; bits < 8 && i < group_size; i++) {
    codes[i] = codes[i] < highest_code ? codes[i] : highest_code;
  }
  for (int i = 0; i < group_size; i += 32) {
    pack_32(codes + i, bits, bytes + i / 8 * bits);
  }
}

NYB_INLINE void store_scales(const nyb_quantize_span *span, const group_batch *batch) {
  if (batch->count == LANES) {
    const int64_t first = batch->first_group;
    v_store(span->scales, span->scale_dtype, first, v_load(batch->scale, NYB_F32, 0));
    v_store(span->biases, span->scale_dtype, first, v_load(batch->bias, NYB_F32, 0));
    return;
  }
  for (int64_t i = 0; i < batch->count; i++) {
    const int64_t group = batch->first_group + i;
    nyb_store_f32(span->scales, span->scale_dtype, group, batch->scale[i]);
    nyb_store_f32(span->biases, span->scale_dtype, group, batch->bias[i]);
  }
}

/* False where a group cannot be stored; nothing is written then. */
NYB_INLINE bool quantize_batch(const nyb_quantize_span *span, int bits, int64_t first_group,
                               int64_t count) {
  group_batch batch = {.first_group = first_group, .count = count};
  bool finite = true;
  NYB_BY_DTYPE(span->input_dtype, find_ranges, span, &batch, &finite)
  if (!finite || !find_scales(span, (float)((1 << bits) - 1), &batch)) return false;
  if (span->codes == NULL) return true;
  const int64_t group_bytes = span->group_size / 8 * bits;
  for (int64_t i = 0; i < count; i++) {
    uint8_t codes[LARGEST_GROUP];
    NYB_BY_DTYPE(span->input_dtype, find_codes, span, &batch, i, codes)
    store_codes(codes, span->group_size, bits,
                (uint8_t *)span->codes + (first_group + i) * group_bytes);
  }
  store_scales(span, &batch);
  return true;
}

NYB_INLINE int64_t quantize_affine(const nyb_quantize_span *span, int bits) {
  for (int64_t group = 0; group < span->groups; group += LANES) {
    int64_t count = span->groups - group < LANES ? span->groups - group : LANES;
    if (quantize_batch(span, bits, group, count)) continue;
    /* One of these groups cannot be stored; those before it still are. */
    const float highest_code = (float)((1 << bits) - 1);
    nyb_group_parameters unused;
    int64_t good = 0;
    while (nyb_find_parameters(span, (group + good) * span->group_size, highest_code, &unused)) {
      good++;
    }
    quantize_batch(span, bits, group, good);
    return group + good;
  }
  return span->groups;
}

/* ---- Affine dequantize -------------------------------------------------------------------- */

NYB_INLINE void restore_group(nyb_dtype dtype, nyb_dtype output_dtype,
                              const nyb_dequantize_span *span, int64_t group,
                              const uint8_t *codes) {
  const nyb_vector scale = v_set(nyb_load_f32(span->scales, dtype, group));
  const nyb_vector bias = v_set(nyb_load_f32(span->biases, dtype, group));
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
    zero_or_nan = v_fma(v_round_to(to, values), v_set(0.0f), zero_or_nan);
    if (output != NULL) v_store(output, to, i, values);
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

NYB_INLINE int64_t quantize_plain(const nyb_quantize_span *span, nyb_dtype dtype) {
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
    v_store(span->output, to, i, v_load(span->codes, from, i));
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
#define NYB_KERNELS_OF(format, quantize_function, dequantize_function, argument)            \
  int64_t NYB_JOIN(nyb_quantize_##format, NYB_ISA_SUFFIX)(const nyb_quantize_span *span);   \
  int64_t NYB_JOIN(nyb_quantize_##format, NYB_ISA_SUFFIX)(const nyb_quantize_span *span) {  \
    return quantize_function(span, argument);                                               \
  }                                                                                         \
  void NYB_JOIN(nyb_dequantize_##format, NYB_ISA_SUFFIX)(const nyb_dequantize_span *span);  \
  void NYB_JOIN(nyb_dequantize_##format, NYB_ISA_SUFFIX)(const nyb_dequantize_span *span) { \
    dequantize_function(span, argument);                                                    \
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
