/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and dequantize as docs/numerics.md, sections 1.1 to 1.3, spells them. Every other ISA
 * gives the same bits as these. */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../numeric.h"
#include "quantize_group.h"

/* ---- Codes in a little-endian bit stream -------------------------------------------------- */

/* Eight codes fill `bits` bytes at every width, so that no pack of eight straddles another. */
static void pack_eight(const uint8_t codes[8], int bits, uint8_t *bytes) {
  uint64_t stream = 0;
  for (int i = 0; i < 8; i++) {
    stream |= (uint64_t)codes[i] << (i * bits);
  }
  for (int i = 0; i < bits; i++) {
    bytes[i] = (uint8_t)(stream >> (8 * i));
  }
}

static void unpack_eight(const uint8_t *bytes, int bits, uint8_t codes[8]) {
  uint64_t stream = 0;
  for (int i = 0; i < bits; i++) {
    stream |= (uint64_t)bytes[i] << (8 * i);
  }
  for (int i = 0; i < 8; i++) {
    codes[i] = (uint8_t)(stream >> (i * bits) & ((1u << bits) - 1));
  }
}

/* ---- Affine quantize ---------------------------------------------------------------------- */

/* In a constant group so large that edge / 1e-7 overflows, scale is 0 and the quotient 0 / 0: such
 * a NaN becomes code 0, which dequantizes to the bias and hence to the constant. */
static uint8_t code_of(nyb_rule rule, float value, nyb_group_parameters parameters,
                       float highest_code) {
  const float code = nyb_round_code(rule, (value - parameters.bias) / parameters.scale);
  if (!(code > 0.0f)) return 0;
  return (uint8_t)(code < highest_code ? code : highest_code);
}

static int64_t quantize_affine(const nyb_quantize_span *span, int bits) {
  const float highest_code = (float)((1 << bits) - 1);
  uint8_t *bytes = span->codes;
  for (int64_t group = 0; group < span->groups; group++) {
    const int64_t first = group * span->group_size;
    nyb_group_parameters parameters;
    if (!nyb_find_parameters(span, first, highest_code, &parameters)) return group;
    if (bytes == NULL) continue;
    for (int64_t i = first; i < first + span->group_size; i += 8) {
      uint8_t codes[8];
      for (int j = 0; j < 8; j++) {
        const float value = nyb_load_f32(span->input, span->input_dtype, i + j);
        codes[j] = code_of(span->rule, value, parameters, highest_code);
      }
      pack_eight(codes, bits, bytes);
      bytes += bits;
    }
    nyb_store_f32(span->scales, span->scale_dtype, group, parameters.scale);
    nyb_store_f32(span->biases, span->scale_dtype, group, parameters.bias);
  }
  return span->groups;
}

/* ---- Affine dequantize -------------------------------------------------------------------- */

static void dequantize_affine(const nyb_dequantize_span *span, int bits) {
  const uint8_t *bytes = span->codes;
  for (int64_t group = 0; group < span->groups; group++) {
    const float scale = nyb_load_f32(span->scales, span->scale_dtype, group);
    const float bias = nyb_load_f32(span->biases, span->scale_dtype, group);
    const int64_t first = group * span->group_size;
    for (int64_t i = first; i < first + span->group_size; i += 8, bytes += bits) {
      uint8_t codes[8];
      unpack_eight(bytes, bits, codes);
      for (int j = 0; j < 8; j++) {
        const float product = nyb_round_to(span->scale_dtype, scale * (float)codes[j]);
        const float value = nyb_round_to(span->scale_dtype, product + bias);
        nyb_store_f32(span->output, span->output_dtype, i + j, value);
      }
    }
  }
}

/* ---- Plain rows: conversion of elements --------------------------------------------------- */

static int64_t quantize_plain(const nyb_quantize_span *span, nyb_dtype dtype) {
  for (int64_t i = 0; i < span->groups; i++) {
    const float value = nyb_load_f32(span->input, span->input_dtype, i);
    if (!isfinite(nyb_round_to(dtype, value))) return i;
    if (span->codes != NULL) nyb_store_f32(span->codes, dtype, i, value);
  }
  return span->groups;
}

static void dequantize_plain(const nyb_dequantize_span *span, nyb_dtype dtype) {
  if (span->output_dtype == dtype) { /* a NaN keeps its bits too */
    memcpy(span->output, span->codes, (size_t)span->groups * nyb_dtype_bytes(dtype));
    return;
  }
  for (int64_t i = 0; i < span->groups; i++) {
    nyb_store_f32(span->output, span->output_dtype, i, nyb_load_f32(span->codes, dtype, i));
  }
}

/* ---- The kernels -------------------------------------------------------------------------- */

#define NYB_AFFINE_KERNELS(bits)                                               \
  int64_t nyb_quantize_affine##bits##_scalar(const nyb_quantize_span *span);   \
  int64_t nyb_quantize_affine##bits##_scalar(const nyb_quantize_span *span) {  \
    return quantize_affine(span, bits);                                        \
  }                                                                            \
  void nyb_dequantize_affine##bits##_scalar(const nyb_dequantize_span *span);  \
  void nyb_dequantize_affine##bits##_scalar(const nyb_dequantize_span *span) { \
    dequantize_affine(span, bits);                                             \
  }
#define NYB_PLAIN_KERNELS(name, dtype)                                         \
  int64_t nyb_quantize_plain_##name##_scalar(const nyb_quantize_span *span);   \
  int64_t nyb_quantize_plain_##name##_scalar(const nyb_quantize_span *span) {  \
    return quantize_plain(span, dtype);                                        \
  }                                                                            \
  void nyb_dequantize_plain_##name##_scalar(const nyb_dequantize_span *span);  \
  void nyb_dequantize_plain_##name##_scalar(const nyb_dequantize_span *span) { \
    dequantize_plain(span, dtype);                                             \
  }

NYB_AFFINE_KERNELS(2)
NYB_AFFINE_KERNELS(3)
NYB_AFFINE_KERNELS(4)
NYB_AFFINE_KERNELS(5)
NYB_AFFINE_KERNELS(6)
NYB_AFFINE_KERNELS(8)
NYB_PLAIN_KERNELS(f32, NYB_F32)
NYB_PLAIN_KERNELS(f16, NYB_F16)
NYB_PLAIN_KERNELS(bf16, NYB_BF16)
