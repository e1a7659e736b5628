/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle: docs/numerics.md in double precision, one value at a time. It shares the public types
 * with the library and no line of code: conversions, bit streams, quantizer, attention and GeGLU
 * are its own. */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "nybble.h"

/* ---- Numbers ------------------------------------------------------------------------------ */

/* Half the distance from 1 to the next f32: the largest relative error of one f32 operation. */
#define ORACLE_F32_UNIT 0x1p-24

/* T(value): the nearest number of that dtype, ties to even, overflow to infinity. */
double oracle_round(nyb_dtype dtype, double value);
/* What an f32 program gets that rounds to dtype afterwards: T(f32(value)). */
double oracle_round_f32_then(nyb_dtype dtype, double value);

uint32_t oracle_encode(nyb_dtype dtype,
                       double value); /* of a value of the dtype; one NaN for all */
double oracle_decode(nyb_dtype dtype, uint32_t bits);
double oracle_load(const void *data, nyb_dtype dtype, int64_t index);
void oracle_store(void *data, nyb_dtype dtype, int64_t index, double value); /* rounds */
uint32_t oracle_load_bits(const void *data, nyb_dtype dtype, int64_t index);

/* Whether `got` may be the dtype's rounding of a number within `error` of `want`. NaN never may,
 * unless error is infinite or NaN itself, which no caller produces. */
bool oracle_within(nyb_dtype dtype, double got, double want, double error);

/* ---- Codes and groups --------------------------------------------------------------------- */

/* Element `index` of a little-endian bit stream of `bits`-wide codes. */
uint32_t oracle_code(const void *row, int bits, int64_t index);
void oracle_put_code(void *row, int bits, int64_t index, uint32_t code);

#define ORACLE_MAX_GROUP_SIZE 128

typedef struct oracle_group {
  double scale, bias; /* as stored */
  uint8_t codes[ORACLE_MAX_GROUP_SIZE];
} oracle_group;

/* docs/numerics.md, section 1.1. False where the group cannot be stored: an element that is not
 * finite, a range that overflows f32, a scale or bias that overflows the dtype. */
bool oracle_quantize_group(const double *elements, int64_t count, int bits, nyb_rule rule,
                           nyb_dtype dtype, oracle_group *group);

/* Section 1.3: T(T(T(scale) * code) + bias). */
double oracle_dequantize(nyb_dtype dtype, double scale, double bias, uint32_t code);

/* ---- GeGLU -------------------------------------------------------------------------------- */

/* Section 4, each step rounded. Every bit of f16 and bf16 is fixed. */
double oracle_geglu(nyb_dtype dtype, double gate, double up);
/* The function itself, unrounded, and how far f32 arithmetic may be from it. */
double oracle_geglu_exact(double gate, double up);
double oracle_geglu_f32_error(double gate, double up);

/* ---- Attention ---------------------------------------------------------------------------- */

/* The rows of one KV head, decoded: value = scale * code + bias, not rounded. */
typedef struct oracle_rows {
  int64_t tokens, dim;
  int64_t group_size;  /* 0: plain */
  double *value;       /* [tokens, dim] */
  double *magnitude;   /* |scale| * code + |bias|: what f32's rounding errors are relative to */
  double *scaled;      /* |scale| * code, or |value| of plain rows */
  double *from_middle; /* affine: |code - middle|, middle being half of the largest code */
  double *scale;       /* affine: [tokens, dim / group_size] */
  double middle;
  double largest; /* of the finite magnitudes, and 1 at least */
  bool finite;    /* all of them */
} oracle_rows;

/* False where memory ran out. */
bool oracle_rows_decode(const nyb_stored *rows, int64_t batch_index, int64_t head, int64_t tokens,
                        int64_t dim, oracle_rows *decoded);
void oracle_rows_free(oracle_rows *decoded);

/* How a fused kernel calculates: what its errors are derived from (oracle_attention.c). */
typedef enum oracle_arithmetic {
  ORACLE_CPU,          /* integer dots over affine rows */
  ORACLE_CUDA_F32,     /* f32 throughout */
  ORACLE_CUDA_WEIGHTS, /* tensor cores: queries and weight * scale as f16, sums in f32 */
  ORACLE_CUDA_TILES    /* tensor cores: queries, keys, values and weights as f16, sums in f32 */
} oracle_arithmetic;

typedef struct oracle_attention {
  const oracle_rows *keys, *values;
  oracle_arithmetic arithmetic;
  nyb_dtype query_dtype, out_dtype;
  double scale; /* the descriptor's f32 */
  nyb_rounding rounding;
  nyb_path path; /* FUSED or COMPAT */
} oracle_attention;

typedef struct oracle_result {
  double *out;       /* [value_dim], before it is rounded to its dtype */
  double *out_error; /* [value_dim]: how far a correct kernel may be from it */
  double lse, lse_error;
} oracle_result;

/* What becomes of a row's scores before the softmax; all of it may be left 0. */
typedef struct oracle_bias {
  double softcap; /* the descriptor's f32 */
  bool sloped;
  double slope;
  int64_t position;    /* of the row: slopes count from there */
  const bool *hidden;  /* [visible]: by the window or an additive mask's -inf; NULL: none */
  const bool *masked;  /* [visible]: by a mask of bools; NULL: none */
  const double *added; /* [visible]: the additive mask; NULL: none */
  bool added_f32;      /* it is of f32 */
  bool has_sink;
  double sink;
} oracle_bias;

/* One query row over the first `visible` tokens. bias may be NULL. False where memory ran out. */
bool oracle_attention_row(const oracle_attention *attention, const double *query, int64_t visible,
                          const oracle_bias *bias, oracle_result *result);

/* One row of nyb_attention_merge_run: outs[i] are the dim elements of part i. weights: room for
 * `parts` numbers. */
void oracle_merge_row(const double *lses, const double *const *outs, int64_t parts, int64_t dim,
                      nyb_dtype out_dtype, double *weights, oracle_result *result);

#endif
