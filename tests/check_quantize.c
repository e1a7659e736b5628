/* SPDX-License-Identifier: Apache-2.0 */
/* Quantize and dequantize: every bit is fixed by docs/numerics.md, section 1, so that the tolerance
 * is nothing. The expected buffers are built whole, poison and guard bands included, and compared
 * whole: a stray write fails like a wrong bit.
 *
 * What cannot be stored is an error on the CPU, and nothing is written then; on the GPU that group
 * (of a plain format, element) is stored as zeros, and a flag is set. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "check_stage.h"
#include "oracle.h"

/* ---- Elements to quantize ----------------------------------------------------------------- */

typedef enum element_class {
  ELEMENTS_NORMAL,
  ELEMENTS_NEGATIVE, /* in [-5, -4]: the two rules differ */
  ELEMENTS_POSITIVE,
  ELEMENTS_ZERO,
  ELEMENTS_SIGNED_ZERO,
  ELEMENTS_CONSTANT, /* +9 and -9 by turns */
  ELEMENTS_RAMP,     /* 1e-9 wide: below the smallest scale */
  ELEMENTS_TINY,
  ELEMENTS_SUBNORMAL,
  ELEMENTS_LARGE, /* up to +-60,000: ranges that f16 holds only as scale and bias */
  ELEMENTS_HUGE,  /* near the end of f32: may be refused */
  ELEMENTS_TIES,  /* half steps: half to even against half away from zero */
  ELEMENTS_OUTLIER,
  ELEMENTS_MIRRORED, /* |least| == |most| */
  ELEMENTS_OFFSET,   /* 1,000 and a little */
  ELEMENTS_SINGLE,   /* one element that is not zero */
  ELEMENTS_COUNT
} element_class;

static const char *const element_names[ELEMENTS_COUNT] = {
    "normal",    "negative", "positive", "zero", "signed zero", "constant", "ramp 1e-9", "tiny",
    "subnormal", "large",    "huge",     "ties", "outlier",     "mirrored", "offset",    "single",
};

static double element(element_class class, const nyb_format *format, nyb_dtype dtype, int64_t row,
                      int64_t i, check_random *random) {
  const double normal = check_random_normal(random);
  const double uniform = check_random_uniform(random);
  const int bits = format->scheme == NYB_AFFINE ? format->bits : 4;
  const int64_t group_size = format->scheme == NYB_AFFINE ? format->group_size : 32;
  const int64_t group = i / group_size;
  switch (class) {
    case ELEMENTS_NORMAL: return normal;
    case ELEMENTS_NEGATIVE: return -4 - uniform;
    case ELEMENTS_POSITIVE: return 3 + uniform;
    case ELEMENTS_ZERO: return 0;
    case ELEMENTS_SIGNED_ZERO: return uniform < 0.5 ? 0.0 : -0.0;
    case ELEMENTS_CONSTANT: return (row + group) % 2 == 0 ? 9 : -9;
    case ELEMENTS_RAMP: return 1e-9 * ((double)(i % group_size) / (double)group_size - 0.5);
    case ELEMENTS_TINY: return 1e-5 * normal;
    case ELEMENTS_SUBNORMAL: return (dtype == NYB_F16 ? 0x1p-22 : 0x1p-130) * normal;
    case ELEMENTS_LARGE: return 60000 * (2 * uniform - 1);
    case ELEMENTS_HUGE: return 0x1p127 * (2 * uniform - 1) * (row % 2 == 0 ? 1 : 0.4);
    case ELEMENTS_TIES: { /* from -(2^bits - 1) to 0, so that the scale is 1 */
      const double most = (1 << bits) - 1;
      if (i % group_size == 0) return -most;
      if (i % group_size == 1) return 0;
      return -0.5 * (double)check_random_below(random, 2 * (1 << bits) - 1);
    }
    case ELEMENTS_OUTLIER: return i % group_size == 5 ? 300 : normal;
    case ELEMENTS_MIRRORED: return (i % 2 == 0 ? 1 : -1) * (i % group_size < 4 ? 2 : uniform);
    case ELEMENTS_OFFSET: return 1000 + normal;
    case ELEMENTS_SINGLE: return i % group_size == (7 * row) % group_size ? normal : 0;
    case ELEMENTS_COUNT: break;
  }
  return NAN;
}

/* ---- One case ----------------------------------------------------------------------------- */

/* Floats and stored rows of one shape. The floats lie in order [batch, heads, tokens], the stored
 * rows, if `swapped`, in order [batch, tokens, heads]; both with gaps between the rows. */
typedef struct layout {
  nyb_format format;
  nyb_dtype float_dtype; /* of the input of quantize, of the output of dequantize */
  int64_t batch, heads, tokens, dim;
  int64_t rows; /* batch * heads * tokens */
  bool swapped;
  int64_t float_stride, codes_stride, group_stride; /* from row to row */
  int64_t groups;                                   /* of a row; 0 for plain formats */
  check_buffer floats, codes, scales, biases;
} layout;

/* Where a row, counted in order [batch, heads, tokens], lies among the stored rows. */
static int64_t stored_row(const layout *l, int64_t row) {
  if (!l->swapped) return row;
  const int64_t token = row % l->tokens, head = row / l->tokens % l->heads;
  return (row / l->tokens / l->heads * l->tokens + token) * l->heads + head;
}

static void set_strides(const layout *l, bool swapped, int64_t row_stride, int64_t stride[3]) {
  stride[0] = l->heads * l->tokens * row_stride;
  stride[1] = swapped ? row_stride : l->tokens * row_stride;
  stride[2] = swapped ? l->heads * row_stride : row_stride;
}

static int64_t dtype_bytes(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

/* Bytes that codes_stride counts in: words, or plain elements. */
static int64_t code_unit_bytes(const nyb_format *format) {
  return format->scheme == NYB_PLAIN ? dtype_bytes(format->dtype) : 4;
}

static void free_layout(layout *l) {
  check_buffer_free(&l->floats);
  check_buffer_free(&l->codes);
  check_buffer_free(&l->scales);
  check_buffer_free(&l->biases);
}

static bool make_layout(layout *l, const nyb_format *format, nyb_dtype float_dtype,
                        const int64_t shape[3], int64_t dim, int64_t gap) {
  const bool plain = format->scheme == NYB_PLAIN;
  const int64_t rows = shape[0] * shape[1] * shape[2];
  *l = (layout){.format = *format,
                .float_dtype = float_dtype,
                .batch = shape[0],
                .heads = shape[1],
                .tokens = shape[2],
                .rows = rows,
                .swapped = gap % 2 != 0,
                .dim = dim,
                .float_stride = dim + gap,
                .codes_stride = (plain ? dim : dim * format->bits / 32) + gap,
                .groups = plain ? 0 : dim / format->group_size};
  l->group_stride = l->groups + gap;
  const int64_t group_bytes = plain ? 0 : rows * l->group_stride * dtype_bytes(format->dtype);
  if (check_buffer_make(&l->floats, rows * l->float_stride * dtype_bytes(float_dtype)) &&
      check_buffer_make(&l->codes, rows * l->codes_stride * code_unit_bytes(format)) &&
      check_buffer_make(&l->scales, group_bytes) && check_buffer_make(&l->biases, group_bytes)) {
    return true;
  }
  free_layout(l);
  return false;
}

static void seal_layout(layout *l) {
  check_buffer_seal(&l->floats);
  check_buffer_seal(&l->codes);
  check_buffer_seal(&l->scales);
  check_buffer_seal(&l->biases);
}

static void describe_layout(const layout *l, char *text, size_t size) {
  char name[16];
  check_format_name(&l->format, name);
  snprintf(text, size, "%s group %d of %s, %s floats, %lldx%lldx%lldx%lld", name,
           (int)l->format.group_size, check_dtype_name(l->format.dtype),
           check_dtype_name(l->float_dtype), (long long)l->batch, (long long)l->heads,
           (long long)l->tokens, (long long)l->dim);
}

/* The row's codes, scales and biases as they should be, zeros where a group cannot be stored; then
 * false. */
static bool expect_row(layout *l, nyb_rule rule, int64_t row) {
  const int64_t first = row * l->float_stride, stored = stored_row(l, row);
  bool storable = true;
  if (l->format.scheme == NYB_PLAIN) {
    for (int64_t i = 0; i < l->dim; i++) {
      double value = oracle_load(l->floats.data, l->float_dtype, first + i);
      if (!isfinite(oracle_round(l->format.dtype, value))) value = 0, storable = false;
      oracle_store(l->codes.data, l->format.dtype, stored * l->codes_stride + i, value);
    }
    return storable;
  }
  const int64_t group_size = l->format.group_size;
  for (int64_t g = 0; g < l->groups; g++) {
    double elements[ORACLE_MAX_GROUP_SIZE];
    oracle_group group;
    for (int64_t i = 0; i < group_size; i++) {
      elements[i] = oracle_load(l->floats.data, l->float_dtype, first + g * group_size + i);
    }
    if (!oracle_quantize_group(elements, group_size, l->format.bits, rule, l->format.dtype,
                               &group)) {
      group = (oracle_group){.scale = 0};
      storable = false;
    }
    oracle_store(l->scales.data, l->format.dtype, stored * l->group_stride + g, group.scale);
    oracle_store(l->biases.data, l->format.dtype, stored * l->group_stride + g, group.bias);
    for (int64_t i = 0; i < group_size; i++) {
      oracle_put_code((uint8_t *)l->codes.data + stored * l->codes_stride * 4, l->format.bits,
                      g * group_size + i, group.codes[i]);
    }
  }
  return storable;
}

/* Seals what quantize should leave behind: all rows, or, where one cannot be stored and the CPU is
 * asked, nothing. */
static bool expect_quantized(layout *l, nyb_rule rule, nyb_backend backend) {
  bool storable = true;
  for (int64_t row = 0; row < l->rows; row++) {
    storable &= expect_row(l, rule, row);
  }
  if (!storable && backend == NYB_BACKEND_CPU) {
    check_buffer_poison(&l->codes);
    check_buffer_poison(&l->scales);
    check_buffer_poison(&l->biases);
  }
  seal_layout(l);
  return storable;
}

/* ---- Running quantize --------------------------------------------------------------------- */

static bool compare_buffer(check_run *run, check_tally *tally, const check_buffer *buffer,
                           int64_t row_bytes, const char *field, const char *what) {
  const int64_t at = check_buffer_changed(buffer);
  if (at == CHECK_UNCHANGED) return true;
  const uint8_t *got = (const uint8_t *)buffer->data + at;
  const uint8_t *want = buffer->image + (got - buffer->memory);
  check_fail(run, tally, "%s: %s, row %lld byte %lld: got 0x%02x, want 0x%02x (bit for bit)%s",
             what, field, (long long)(row_bytes > 0 ? at / row_bytes : 0),
             (long long)(row_bytes > 0 ? at % row_bytes : at), *got, *want,
             at < 0 || at >= (int64_t)buffer->data_bytes ? ", outside the buffer" : "");
  return false;
}

static bool compare_layout(check_run *run, check_tally *tally, const layout *l, const char *what) {
  const int64_t group_bytes = l->group_stride * dtype_bytes(l->format.dtype);
  return compare_buffer(run, tally, &l->floats, l->float_stride * dtype_bytes(l->float_dtype),
                        "floats", what) &&
         compare_buffer(run, tally, &l->codes, l->codes_stride * code_unit_bytes(&l->format),
                        "codes", what) &&
         compare_buffer(run, tally, &l->scales, group_bytes, "scales", what) &&
         compare_buffer(run, tally, &l->biases, group_bytes, "biases", what);
}

static bool check_ran(check_run *run, check_tally *tally, int64_t before, const char *what) {
  if (check_calls(run, tally) > before) return true;
  check_fail(run, tally, "%s: another kernel ran instead (its calls stayed at %lld)", what,
             (long long)before);
  return false;
}

/* On the GPU every other call finds its data aligned, as wide copies want it. */
static void place_on_device(const check_run *run) {
  static bool aligned;
  aligned = !aligned;
  if (run->options.backend == NYB_BACKEND_CUDA) {
    check_stage_place(aligned ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  }
}

static bool check_flag(check_run *run, check_tally *tally, const check_buffer *flag, bool storable,
                       const char *what) {
  int32_t got;
  memcpy(&got, flag->data, sizeof got);
  if (got == (storable ? 0 : 1)) return true;
  check_fail(run, tally, "%s: non_finite is %d, want %d", what, (int)got, storable ? 0 : 1);
  return false;
}

static void run_quantize(check_run *run, check_tally *tally, layout *l, nyb_rule rule,
                         bool storable, const char *what) {
  const bool plain = l->format.scheme == NYB_PLAIN;
  check_buffer_poison(&l->codes);
  check_buffer_poison(&l->scales);
  check_buffer_poison(&l->biases);
  nyb_quantize call = {.struct_size = sizeof call,
                       .batch = l->batch,
                       .heads = l->heads,
                       .tokens = l->tokens,
                       .dim = l->dim,
                       .input = {.data = l->floats.data, .dtype = l->float_dtype},
                       .output = {.format = l->format,
                                  .codes = l->codes.data,
                                  .scales = plain ? NULL : l->scales.data,
                                  .biases = plain ? NULL : l->biases.data},
                       .rule = rule};
  set_strides(l, false, l->float_stride, call.input.stride);
  set_strides(l, l->swapped, l->codes_stride, call.output.codes_stride);
  set_strides(l, l->swapped, l->group_stride, call.output.scales_stride);
  set_strides(l, l->swapped, l->group_stride, call.output.biases_stride);
  const bool cuda = tally->kernel.isa == NYB_ISA_CUDA;
  const bool flagged = cuda && (!storable || l->rows % 2 == 0); /* else it is left out */
  check_buffer flag = {0};
  if (flagged) {
    if (!check_buffer_make(&flag, sizeof(int32_t))) return;
    memset(flag.data, 0, sizeof(int32_t));
    call.non_finite = flag.data;
  }
  place_on_device(run);
  const int64_t before = check_calls(run, tally);
  const nyb_status status =
      run->options.library->quantize(run->contexts[tally->kernel.isa], &call, NULL);
  const nyb_status want = storable || cuda ? NYB_OK : NYB_ERROR_NON_FINITE;
  if (status != want) {
    check_fail(run, tally, "%s: got %s, want %s%s%s", what, nyb_status_name(status),
               nyb_status_name(want), status != NYB_OK ? ": " : "",
               status != NYB_OK ? check_error() : "");
  } else if (compare_layout(run, tally, l, what) &&
             (!flagged || check_flag(run, tally, &flag, storable, what)) &&
             (want != NYB_OK || check_ran(run, tally, before, what))) {
    check_pass(tally);
  }
  check_buffer_free(&flag);
}

/* The case on every ISA; the oracle's work is done once. */
static void quantize_case(check_run *run, layout *l, nyb_rule rule, const char *class_name) {
  char name[16], shape[96], what[160];
  check_format_name(&l->format, name);
  describe_layout(l, shape, sizeof shape);
  snprintf(what, sizeof what, "%s, rule %s, %s", class_name,
           rule == NYB_RULE_MLX_CPU ? "MLX_CPU" : "MLX_GPU", shape);
  const bool storable = expect_quantized(l, rule, run->options.backend);
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
    check_tally *tally = check_find(run, "quantize", name, isa);
    if (tally != NULL) run_quantize(run, tally, l, rule, storable, what);
  }
}

static void quantize_class(check_run *run, const nyb_format *format, nyb_dtype input_dtype,
                           nyb_rule rule, element_class class, const int64_t shape[3], int64_t dim,
                           int64_t gap, check_random *random) {
  layout l;
  if (run->ended || !make_layout(&l, format, input_dtype, shape, dim, gap)) return;
  for (int64_t row = 0; row < l.rows; row++) {
    for (int64_t i = 0; i < dim; i++) {
      oracle_store(l.floats.data, input_dtype, row * l.float_stride + i,
                   element(class, format, input_dtype, row, i, random));
    }
  }
  quantize_case(run, &l, rule, element_names[class]);
  free_layout(&l);
}

/* One element that is not finite, at the ends of rows and groups and between them. */
static void quantize_non_finite(check_run *run, const nyb_format *format, nyb_dtype input_dtype,
                                check_random *random) {
  static const double intruders[] = {NAN, INFINITY, -INFINITY};
  static const int64_t shape[3] = {1, 3, 1};
  const int64_t dim = format->scheme == NYB_AFFINE ? 3 * format->group_size : 37;
  const int64_t total = 3 * dim;
  for (int64_t at = 0; at < total; at += at < dim && !run->options.quick ? 1 : 23) {
    layout l;
    if (!make_layout(&l, format, input_dtype, shape, dim, 1)) return;
    for (int64_t i = 0; i < total; i++) {
      oracle_store(l.floats.data, input_dtype, i / dim * l.float_stride + i % dim,
                   i == at ? intruders[at % 3] : check_random_normal(random));
    }
    quantize_case(run, &l, NYB_RULE_MLX_CPU, "one element not finite");
    free_layout(&l);
  }
}

/* ---- Dequantize --------------------------------------------------------------------------- */

typedef enum scale_class {
  SCALES_NORMAL,
  SCALES_NEGATIVE,
  SCALES_ZERO,
  SCALES_SUBNORMAL,
  SCALES_OVERFLOWING, /* T(scale * code) is infinite, as in mx.dequantize */
  SCALES_COUNT
} scale_class;

static const char *const scale_names[SCALES_COUNT] = {"normal", "negative", "zero", "subnormal",
                                                      "overflowing"};

static void fill_group(layout *l, scale_class class, int64_t at, check_random *random) {
  const nyb_dtype dtype = l->format.dtype;
  double scale = check_random_normal(random), bias = check_random_normal(random);
  switch (class) {
    case SCALES_NEGATIVE: scale = -fabs(scale); break;
    case SCALES_ZERO: scale = 0; break;
    case SCALES_SUBNORMAL:
      scale *= dtype == NYB_F16 ? 0x1p-20 : 0x1p-130;
      bias *= dtype == NYB_F16 ? 0x1p-20 : 0x1p-130;
      break;
    case SCALES_OVERFLOWING: /* one sign, so that no infinity meets its opposite */
      scale = dtype == NYB_F16 ? 32000 : 0x1p126;
      bias = fabs(bias);
      break;
    case SCALES_NORMAL:
    case SCALES_COUNT: break;
  }
  oracle_store(l->scales.data, dtype, at, scale);
  oracle_store(l->biases.data, dtype, at, bias);
}

static void fill_codes(layout *l, scale_class class, check_random *random) {
  const uint32_t largest = l->format.scheme == NYB_AFFINE ? (1u << l->format.bits) - 1 : 0;
  for (int64_t row = 0; row < l->rows; row++) {
    for (int64_t g = 0; g < l->groups; g++) {
      fill_group(l, class, row * l->group_stride + g, random);
    }
    for (int64_t i = 0; i < l->dim; i++) {
      if (l->format.scheme == NYB_PLAIN) {
        const double factor = class == SCALES_OVERFLOWING ? 60000
                              : class == SCALES_SUBNORMAL ? 0x1p-22
                              : class == SCALES_ZERO      ? 0
                                                          : 1;
        oracle_store(l->codes.data, l->format.dtype, row * l->codes_stride + i,
                     factor * check_random_normal(random));
        continue;
      }
      const uint32_t codes[] = {(uint32_t)check_random_bits(random), 0, largest, (uint32_t)(7 * i)};
      oracle_put_code((uint8_t *)l->codes.data + row * l->codes_stride * 4, l->format.bits, i,
                      codes[row % 4] & largest);
    }
  }
}

static void expect_dequantized(layout *l) {
  for (int64_t row = 0; row < l->rows; row++) {
    const int64_t stored = stored_row(l, row);
    const uint8_t *codes =
        (const uint8_t *)l->codes.data + stored * l->codes_stride * code_unit_bytes(&l->format);
    for (int64_t i = 0; i < l->dim; i++) {
      double value;
      if (l->format.scheme == NYB_PLAIN) {
        value = oracle_load(codes, l->format.dtype, i);
      } else {
        const int64_t group = stored * l->group_stride + i / l->format.group_size;
        value =
            oracle_dequantize(l->format.dtype, oracle_load(l->scales.data, l->format.dtype, group),
                              oracle_load(l->biases.data, l->format.dtype, group),
                              oracle_code(codes, l->format.bits, i));
      }
      oracle_store(l->floats.data, l->float_dtype, row * l->float_stride + i, value);
    }
  }
  seal_layout(l);
}

static void run_dequantize(check_run *run, check_tally *tally, layout *l, const char *what) {
  const bool plain = l->format.scheme == NYB_PLAIN;
  check_buffer_poison(&l->floats);
  nyb_dequantize call = {.struct_size = sizeof call,
                         .batch = l->batch,
                         .heads = l->heads,
                         .tokens = l->tokens,
                         .dim = l->dim,
                         .input = {.format = l->format,
                                   .codes = l->codes.data,
                                   .scales = plain ? NULL : l->scales.data,
                                   .biases = plain ? NULL : l->biases.data},
                         .output = {.data = l->floats.data, .dtype = l->float_dtype}};
  set_strides(l, false, l->float_stride, call.output.stride);
  set_strides(l, l->swapped, l->codes_stride, call.input.codes_stride);
  set_strides(l, l->swapped, l->group_stride, call.input.scales_stride);
  set_strides(l, l->swapped, l->group_stride, call.input.biases_stride);
  place_on_device(run);
  const int64_t before = check_calls(run, tally);
  const nyb_status status =
      run->options.library->dequantize(run->contexts[tally->kernel.isa], &call, NULL);
  if (status != NYB_OK) {
    check_fail(run, tally, "%s: got %s: %s", what, nyb_status_name(status), check_error());
    return;
  }
  if (compare_layout(run, tally, l, what) && check_ran(run, tally, before, what)) {
    check_pass(tally);
  }
}

static void dequantize_case(check_run *run, layout *l, const char *class_name) {
  char name[16], shape[96], what[160];
  check_format_name(&l->format, name);
  describe_layout(l, shape, sizeof shape);
  snprintf(what, sizeof what, "%s, %s", class_name, shape);
  expect_dequantized(l);
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
    check_tally *tally = check_find(run, "dequantize", name, isa);
    if (tally != NULL) run_dequantize(run, tally, l, what);
  }
}

static void dequantize_class(check_run *run, const nyb_format *format, nyb_dtype output_dtype,
                             scale_class class, const int64_t shape[3], int64_t dim, int64_t gap,
                             check_random *random) {
  layout l;
  if (!make_layout(&l, format, output_dtype, shape, dim, gap)) return;
  fill_codes(&l, class, random);
  dequantize_case(run, &l, scale_names[class]);
  free_layout(&l);
}

/* ---- Plain formats: every 16-bit value and every tie ---------------------------------------- */

enum { HALF_VALUES = 1 << 16, SWEEP_DIM = 1 << 12 };

/* All finite 16-bit values, as stored elements. */
static void dequantize_every_value(check_run *run, const nyb_format *format) {
  static const int64_t shape[3] = {1, 1, HALF_VALUES / SWEEP_DIM};
  for (int output = NYB_F32; output <= NYB_BF16; output++) {
    layout l;
    if (!make_layout(&l, format, (nyb_dtype)output, shape, SWEEP_DIM, 0)) return;
    for (int64_t i = 0; i < HALF_VALUES; i++) {
      const double value = oracle_decode(format->dtype, (uint32_t)i);
      oracle_store(l.codes.data, format->dtype, i, isfinite(value) ? value : 0);
    }
    dequantize_case(run, &l, "every value");
    free_layout(&l);
  }
}

/* From f32: the middle between each finite value and the next, and its neighbours on both sides. */
static void quantize_every_tie(check_run *run, const nyb_format *format) {
  static const int64_t shape[3] = {1, 1, 3 * HALF_VALUES / SWEEP_DIM};
  layout l;
  if (!make_layout(&l, format, NYB_F32, shape, SWEEP_DIM, 0)) return;
  for (int64_t i = 0; i < 3 * HALF_VALUES; i++) {
    const uint32_t bits = (uint32_t)(i / 3);
    const double value = oracle_decode(format->dtype, bits);
    const double next = oracle_decode(format->dtype, bits + 1);
    const double middle = isfinite(next) && isfinite(value) ? (value + next) / 2 : 1;
    const float nudges[] = {-INFINITY, (float)middle, INFINITY};
    oracle_store(l.floats.data, NYB_F32, i, nextafterf((float)middle, nudges[i % 3]));
  }
  quantize_case(run, &l, NYB_RULE_MLX_CPU, "every tie");
  free_layout(&l);
}

/* ---- All cases ---------------------------------------------------------------------------- */

static void check_variant(check_run *run, const nyb_format *format, nyb_dtype float_dtype,
                          check_random *random) {
  const bool affine = format->scheme == NYB_AFFINE;
  /* Odd numbers of groups, and of elements, leave tails in every vector width. */
  const int64_t unit = affine ? format->group_size : 1;
  const int64_t dims[] = {unit, 3 * unit, affine ? 5 * unit : 131};
  static const int64_t shape[3] = {2, 3, 2};
  const int step = run->options.sanitizer ? 5 : 1;
  for (int class = 0; class < ELEMENTS_COUNT; class += step) {
    for (int rule = NYB_RULE_MLX_CPU; rule <= NYB_RULE_MLX_GPU; rule++) {
      const int64_t dim = dims[class % 3];
      quantize_class(run, format, float_dtype, (nyb_rule)rule, (element_class) class, shape, dim,
                     class % 4, random);
    }
  }
  for (int class = 0; class < SCALES_COUNT; class += step) {
    dequantize_class(run, format, float_dtype, (scale_class) class, shape, dims[class % 3],
                     class % 4, random);
  }
}

static void check_large(check_run *run, const nyb_format *format, check_random *random) {
  const int64_t dim = format->scheme == NYB_AFFINE ? 2 * format->group_size : 100;
  static const int64_t long_shape[3] = {1, 1, 1025}, wide_shape[3] = {3, 5, 67};
  quantize_class(run, format, NYB_F32, NYB_RULE_MLX_CPU, ELEMENTS_NORMAL, long_shape, dim, 0,
                 random);
  quantize_class(run, format, NYB_BF16, NYB_RULE_MLX_GPU, ELEMENTS_OUTLIER, wide_shape, dim, 3,
                 random);
  dequantize_class(run, format, NYB_BF16, SCALES_NORMAL, long_shape, dim, 0, random);
  dequantize_class(run, format, NYB_F16, SCALES_NORMAL, wide_shape, dim, 3, random);
}

static void check_plain(check_run *run, nyb_dtype dtype, check_random *random) {
  const nyb_format format = {.scheme = NYB_PLAIN, .dtype = dtype};
  for (int floats = NYB_F32; floats <= NYB_BF16; floats++) {
    if (run->options.sanitizer && floats != NYB_BF16) continue;
    check_variant(run, &format, (nyb_dtype)floats, random);
  }
  if (run->options.sanitizer) return;
  if (dtype != NYB_F32) {
    dequantize_every_value(run, &format);
    quantize_every_tie(run, &format);
  }
  quantize_non_finite(run, &format, NYB_F32, random);
  check_large(run, &format, random);
}

/* Quick runs see each group size, stored dtype and float dtype once, but not every combination. */
static void check_affine(check_run *run, int bits, check_random *random) {
  for (int i = 0; i < 27; i++) {
    const int group = i % 3, stored = i / 3 % 3, floats = i / 9;
    if (run->options.sanitizer && i != bits * 3 % 27) continue;
    if (run->options.quick && (group + stored + floats) % 3 != bits % 3) continue;
    if (run->options.quick && floats != stored && group != 0) continue;
    const nyb_format format = {.scheme = NYB_AFFINE,
                               .bits = bits,
                               .group_size = 32 << group,
                               .dtype = (nyb_dtype)(NYB_F32 + stored)};
    check_variant(run, &format, (nyb_dtype)(NYB_F32 + floats), random);
  }
  const nyb_format format = {
      .scheme = NYB_AFFINE, .bits = bits, .group_size = 64, .dtype = NYB_BF16};
  if (run->options.sanitizer) return;
  quantize_non_finite(run, &format, NYB_BF16, random);
  check_large(run, &format, random);
}

void check_quantize(check_run *run) {
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  enum { PLAIN_FORMATS = 3, WIDTHS = sizeof widths / sizeof widths[0] };
  check_random random = {.state = 1};
  for (int i = 0; i < PLAIN_FORMATS + WIDTHS; i++) {
    const bool plain = i < PLAIN_FORMATS;
    const nyb_format format = {.scheme = plain ? NYB_PLAIN : NYB_AFFINE,
                               .bits = plain ? 0 : widths[i - PLAIN_FORMATS],
                               .dtype = (nyb_dtype)(NYB_F32 + i % 3)};
    char name[16];
    check_format_name(&format, name);
    check_step(run, "quantize", i, PLAIN_FORMATS + WIDTHS);
    if (!check_wants_format(run, name)) continue;
    if (plain) {
      check_plain(run, format.dtype, &random);
    } else {
      check_affine(run, format.bits, &random);
    }
  }
  check_step(run, "quantize", PLAIN_FORMATS + WIDTHS, PLAIN_FORMATS + WIDTHS);
}
