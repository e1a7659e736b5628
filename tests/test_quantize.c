/* SPDX-License-Identifier: Apache-2.0 */
/* Formats, views, and the quantize and dequantize calls: what they accept, what they refuse and
 * what they leave alone. That the numbers are right is checked against the oracle
 * (check_quantize.c) and against MLX (python/test_mlx_quantize.py). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../src/numeric.h"
#include "../src/views.h"
#include "check_spans.h"
#include "nybble.h"

/* ---- A matrix to quantize ----------------------------------------------------------------- */

enum { MOST_ROWS = 12, MOST_DIM = 1024, SLACK = 64 };

static float input[MOST_ROWS * MOST_DIM];
static uint32_t codes[MOST_ROWS * MOST_DIM + SLACK];
static float scales[MOST_ROWS * MOST_DIM / 32 + SLACK], biases[MOST_ROWS * MOST_DIM / 32 + SLACK];
static float output[MOST_ROWS * MOST_DIM];

static void poison(void) {
  memset(codes, 0xa5, sizeof codes);
  memset(scales, 0xff, sizeof scales);
  memset(biases, 0xff, sizeof biases);
  memset(output, 0xff, sizeof output);
}

static bool all_bytes_are(const void *data, size_t bytes, uint8_t value) {
  for (size_t i = 0; i < bytes; i++) {
    if (((const uint8_t *)data)[i] != value) return false;
  }
  return true;
}

static bool outputs_are_untouched(void) {
  return all_bytes_are(codes, sizeof codes, 0xa5) && all_bytes_are(scales, sizeof scales, 0xff) &&
         all_bytes_are(biases, sizeof biases, 0xff);
}

/* 2 x 3 x 2 rows of f32, one after the other on both sides. */
static nyb_quantize sound_quantize(int32_t bits, int32_t group_size, int64_t dim) {
  nyb_quantize call = NYB_QUANTIZE_INIT;
  call.batch = 2, call.heads = 3, call.tokens = 2, call.dim = dim;
  call.input = (nyb_input){input, NYB_F32, {6 * dim, 2 * dim, dim}};
  const int64_t words = dim * bits / 32, groups = dim / group_size;
  call.output = (nyb_stored_output){.format = {NYB_AFFINE, bits, group_size, NYB_F32},
                                    .codes = codes,
                                    .scales = scales,
                                    .biases = biases,
                                    .codes_stride = {6 * words, 2 * words, words},
                                    .scales_stride = {6 * groups, 2 * groups, groups},
                                    .biases_stride = {6 * groups, 2 * groups, groups}};
  return call;
}

static nyb_dequantize back_from(const nyb_quantize *call) {
  nyb_dequantize back = NYB_DEQUANTIZE_INIT;
  back.batch = call->batch, back.heads = call->heads, back.tokens = call->tokens;
  back.dim = call->dim;
  back.input.format = call->output.format;
  back.input.codes = call->output.codes;
  back.input.scales = call->output.scales;
  back.input.biases = call->output.biases;
  for (int axis = 0; axis < 3; axis++) {
    back.input.codes_stride[axis] = call->output.codes_stride[axis];
    back.input.scales_stride[axis] = call->output.scales_stride[axis];
    back.input.biases_stride[axis] = call->output.biases_stride[axis];
    back.output.stride[axis] = call->input.stride[axis];
  }
  back.output.data = output;
  back.output.dtype = NYB_F32;
  return back;
}

/* Whether a group came back as near as its own scale allows: half a step, and what lies beyond the
 * highest code (choosing the scale so that zero has a code can shorten it). The last term is f32's
 * rounding of scale * code + bias, whose parts are below 2 * range + |bias| each. */
static void assert_near(const float *got, const float *want, int32_t count, int32_t bits,
                        float scale) {
  float least = want[0], most = want[0];
  for (int i = 1; i < count; i++) {
    least = fminf(least, want[i]);
    most = fmaxf(most, want[i]);
  }
  const float step = fabsf(scale), range = most - least;
  const float beyond = fmaxf(0, range - (float)((1 << bits) - 1) * step);
  const float rounding = (3 * range + fmaxf(fabsf(least), fabsf(most))) * 0x1p-22f;
  for (int i = 0; i < count; i++) {
    assert_true(fabsf(got[i] - want[i]) <= step / 2 + beyond + rounding);
  }
}

static void fill_input(void) {
  for (int i = 0; i < MOST_ROWS * MOST_DIM; i++) {
    input[i] = sinf((float)i * 0.7f) * (1 + (float)(i % 5));
  }
}

static nyb_context *context_of(nyb_isa isa, int64_t threads) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  nyb_context *context = NULL;
  options.isa = isa;
  options.threads = threads;
  if (nyb_context_create(&options, &context) != NYB_OK) return NULL;
  return context;
}

static nyb_context *context; /* made by the group's setup */

static int set_up(void **state) {
  (void)state;
  fill_input();
  context = context_of(NYB_ISA_AUTO, 1);
  return context == NULL;
}

static int tear_down(void **state) {
  (void)state;
  nyb_context_destroy(context);
  return 0;
}

static const int32_t all_bits[] = {2, 3, 4, 5, 6, 8};
#define EACH_BITS(bits)                                           \
  for (size_t bits##_index = 0; bits##_index < 6; bits##_index++) \
    for (int32_t bits = all_bits[bits##_index], once = 1; once != 0; once = 0)
#define EACH_ISA(isa) for (int isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++)

/* ---- Kernels ------------------------------------------------------------------------------ */

static void test_kernels_agree_with_scalar(void **state) {
  (void)state;
  spans_report report;
  check_spans(&report);
  print_message("%lld kernels against scalar: %lld spans\n", (long long)report.kernels,
                (long long)report.passed);
  if (report.failed != 0)
    fail_msg("%lld fail; first %s", (long long)report.failed, report.first_failure);
  if (report.kernels == 0) print_message("skipped: no vector kernel runs here\n");
}

/* The vector kernels divide by a reciprocal and one step of correction. Where a quotient lies
 * against each half integer is all that a code depends on, and only dividends next to the product
 * of divisor and half integer can come out on the wrong side of it: those are tried for every 997th
 * significand of the divisor, or, with NYBBLE_EXHAUSTIVE set, for each of the 2^23 (minutes). What
 * powers of two do to a divisor they do to the quotient. */
static void test_corrected_reciprocal_divides(void **state) {
  (void)state;
  const uint32_t step = getenv("NYBBLE_EXHAUSTIVE") != NULL ? 1 : 997;
  for (uint32_t significand = 0; significand < 1u << 23; significand += step) {
    const float divisor = nyb_f32_from_bits(0x3f800000u | significand);
    const float reciprocal = 1.0f / divisor;
    for (int code = 0; code < 255; code++) {
      const float half = (float)code + 0.5f;
      const uint32_t middle = nyb_bits_from_f32(half * divisor);
      for (uint32_t bits = middle - 3; bits <= middle + 3; bits++) {
        const float dividend = nyb_f32_from_bits(bits);
        const float quotient = dividend * reciprocal;
        const float corrected = fmaf(fmaf(-quotient, divisor, dividend), reciprocal, quotient);
        const float exact = dividend / divisor;
        if ((corrected < half) != (exact < half) || (corrected > half) != (exact > half)) {
          fail_msg("%a / %a is %a, not %a", (double)dividend, (double)divisor, (double)exact,
                   (double)corrected);
        }
      }
    }
  }
}

/* ---- Field cases -------------------------------------------------------------------------- */

/* A1: zero, constant and nearly constant groups. */
static void test_flat_groups(void **state) {
  (void)state;
  static const float levels[] = {0.0f, -0.0f, 9.0f, -9.0f};
  EACH_ISA(isa) {
    nyb_context *c = context_of((nyb_isa)isa, 1);
    if (c == NULL) continue;
    EACH_BITS(bits) for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
      static float flat[12 * 64];
      for (int i = 0; i < 12 * 64; i++) {
        const int row = i / 64;
        const float ramp = ((float)(i % 64) / 31.5f - 1) * 1e-9f * (row % 2 != 0 ? 1.0f : -1.0f);
        flat[i] = row < 8 ? levels[row % 4] : ramp;
      }
      nyb_quantize call = sound_quantize(bits, 64, 64);
      call.input.data = flat;
      call.output.format.dtype = (nyb_dtype)dtype;
      poison();
      assert_int_equal(nyb_quantize_run(c, &call, NULL), NYB_OK);
      const nyb_dequantize back = back_from(&call);
      assert_int_equal(nyb_dequantize_run(c, &back, NULL), NYB_OK);
      for (int i = 0; i < 12 * 64; i++) {
        if (i / 64 < 8) assert_true(output[i] == flat[i]);
        assert_true(fabsf(output[i] - flat[i]) <= 1e-9f);
      }
    }
    nyb_context_destroy(c);
  }
}

/* A5: at 4 bits scale * code reaches 112,500, which f16 cannot hold although the sum with the bias
 * would fit. Scale and bias are finite and the stored group is within a step, as attention reads
 * it; dequantize rounds the product to f16 as MLX does, which may give infinities but no NaN. */
static void test_wide_f16_ramp(void **state) {
  (void)state;
  enum { DIM = 64 };
  static uint16_t ramp[12 * DIM], back_bits[12 * DIM];
  for (int i = 0; i < 12 * DIM; i++) {
    ramp[i] = nyb_f16_from_f32(((float)(i % DIM) / (DIM - 1) * 2 - 1) * 60000);
  }
  EACH_ISA(isa) {
    nyb_context *c = context_of((nyb_isa)isa, 1);
    if (c == NULL) continue;
    nyb_quantize call = sound_quantize(4, 64, DIM);
    call.input.data = ramp;
    call.input.dtype = NYB_F16;
    call.output.format.dtype = NYB_F16;
    assert_int_equal(nyb_quantize_run(c, &call, NULL), NYB_OK);
    for (int row = 0; row < 12; row++) {
      assert_true(isfinite(nyb_load_f32(scales, NYB_F16, row)));
      const float scale = nyb_load_f32(scales, NYB_F16, row);
      const float bias = nyb_load_f32(biases, NYB_F16, row);
      for (int i = 0; i < DIM; i++) {
        const uint32_t word = codes[row * DIM / 8 + i / 8];
        const float value = scale * (float)(word >> (i % 8 * 4) & 15) + bias;
        assert_true(fabsf(value - nyb_f32_from_f16(ramp[i])) <= 7500);
      }
    }
    nyb_dequantize back = back_from(&call);
    back.output.data = back_bits;
    back.output.dtype = NYB_F16;
    assert_int_equal(nyb_dequantize_run(c, &back, NULL), NYB_OK);
    for (int i = 0; i < DIM; i++) assert_false(isnan(nyb_f32_from_f16(back_bits[i])));
    nyb_context_destroy(c);
  }
}

/* B13: rows of 36 bytes, at addresses that are multiples of 4 and no more. */
static void test_rows_of_36_bytes(void **state) {
  (void)state;
  EACH_ISA(isa) {
    nyb_context *c = context_of((nyb_isa)isa, 1);
    if (c == NULL) continue;
    for (int shift = 0; shift < 4; shift++) {
      nyb_quantize call = sound_quantize(3, 32, 96);
      call.output.codes = codes + shift;
      call.output.scales = scales + shift;
      call.output.biases = biases + shift;
      call.input.data = input + shift;
      poison();
      assert_int_equal(nyb_quantize_run(c, &call, NULL), NYB_OK);
      nyb_dequantize back = back_from(&call);
      assert_int_equal(nyb_dequantize_run(c, &back, NULL), NYB_OK);
      assert_true(all_bytes_are(codes, (size_t)shift * 4, 0xa5));
      assert_true(
          all_bytes_are(codes + shift + 12 * 9, sizeof codes - (size_t)(shift + 108) * 4, 0xa5));
      assert_true(
          all_bytes_are(scales + shift + 36, sizeof scales - (size_t)(shift + 36) * 4, 0xff));
      for (int group = 0; group < 12 * 3; group++) {
        assert_near(output + group * 32, input + shift + group * 32, 32, 3, scales[shift + group]);
      }
    }
    nyb_context_destroy(c);
  }
}

/* ---- Strides and threads ------------------------------------------------------------------ */

/* Rows far apart, backwards and with heads and tokens exchanged, against rows side by side. */
static void test_any_strides(void **state) {
  (void)state;
  enum { DIM = 64, WORDS = DIM * 5 / 32 };
  nyb_quantize call = sound_quantize(5, 32, DIM);
  poison();
  assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
  static uint32_t want_codes[12 * WORDS];
  static float want_scales[12 * 2], want_biases[12 * 2];
  memcpy(want_codes, codes, sizeof want_codes);
  memcpy(want_scales, scales, sizeof want_scales);
  memcpy(want_biases, biases, sizeof want_biases);

  /* [batch, token, head], the last row first, 3 words between rows; scales and biases woven. */
  call.output.codes = codes + 11 * (WORDS + 3);
  const int64_t codes_stride[3] = {-6 * (WORDS + 3), -(WORDS + 3), -3 * (WORDS + 3)};
  const int64_t groups_stride[3] = {24, 4, 12};
  memcpy(call.output.codes_stride, codes_stride, sizeof codes_stride);
  memcpy(call.output.scales_stride, groups_stride, sizeof groups_stride);
  memcpy(call.output.biases_stride, groups_stride, sizeof groups_stride);
  call.output.biases = scales + 2;
  poison();
  assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
  for (int b = 0; b < 2; b++) {
    for (int h = 0; h < 3; h++) {
      for (int t = 0; t < 2; t++) {
        const int row = (b * 3 + h) * 2 + t;
        const int place = b * 6 + t * 3 + h;
        const uint32_t *stored = codes + (11 - place) * (WORDS + 3);
        assert_memory_equal(stored, want_codes + row * WORDS, WORDS * 4);
        assert_true(all_bytes_are(stored + WORDS, 12, 0xa5));
        assert_memory_equal(scales + place * 4, want_scales + row * 2, 8);
        assert_memory_equal(scales + place * 4 + 2, want_biases + row * 2, 8);
      }
    }
  }
  assert_true(all_bytes_are(biases, sizeof biases, 0xff));
  const nyb_dequantize back = back_from(&call);
  assert_int_equal(nyb_dequantize_run(context, &back, NULL), NYB_OK);
  for (int group = 0; group < 12 * 2; group++) {
    assert_near(output + group * 32, input + group * 32, 32, 5, want_scales[group]);
  }
}

static void backwards(void *data, int64_t task_count, nyb_task task, void *task_data) {
  ++*(int *)data;
  for (int64_t i = task_count - 1; i >= 0; i--) task(task_data, i);
}

/* Enough rows for many tasks; the first bad one is named whichever task meets one first. */
static void test_threads_change_nothing(void **state) {
  (void)state;
  enum { ROWS = 3000, DIM = 128, WORDS = DIM / 8 };
  float *values = malloc(ROWS * DIM * sizeof *values);
  uint32_t *one = malloc(ROWS * (WORDS + 4) * 4), *other = malloc(ROWS * (WORDS + 4) * 4);
  for (int i = 0; i < ROWS * DIM; i++) values[i] = sinf((float)i);
  int calls = 0;
  for (int run = 0; run < 4; run++) {
    nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
    nyb_context *c = NULL;
    options.threads = run == 0 ? 1 : run == 1 ? 2 : 7;
    if (run == 3) {
      options.parallel_for = backwards;
      options.parallel_for_data = &calls;
    }
    assert_int_equal(nyb_context_create(&options, &c), NYB_OK);
    uint32_t *made = run == 0 ? one : other;
    memset(made, run, ROWS * (WORDS + 4) * 4);
    nyb_quantize call = NYB_QUANTIZE_INIT;
    call.batch = 1, call.heads = 1, call.tokens = ROWS, call.dim = DIM;
    call.input = (nyb_input){values, NYB_F32, {0, 0, DIM}};
    call.output.format = (nyb_format){NYB_AFFINE, 4, 64, NYB_F32};
    call.output.codes = made;
    call.output.scales = made + ROWS * WORDS;
    call.output.biases = made + ROWS * (WORDS + 2);
    call.output.codes_stride[2] = WORDS;
    call.output.scales_stride[2] = call.output.biases_stride[2] = 2;
    assert_int_equal(nyb_quantize_run(c, &call, NULL), NYB_OK);
    assert_memory_equal(made, one, ROWS * (WORDS + 4) * 4);
    const float kept = values[2500 * DIM], kept_too = values[700 * DIM + 5];
    values[2500 * DIM] = INFINITY, values[700 * DIM + 5] = NAN;
    assert_int_equal(nyb_quantize_run(c, &call, NULL), NYB_ERROR_NON_FINITE);
    assert_non_null(strstr(nyb_last_error(), "token 700, element 5"));
    assert_memory_equal(made, one, ROWS * (WORDS + 4) * 4);
    values[2500 * DIM] = kept, values[700 * DIM + 5] = kept_too;
    nyb_context_destroy(c);
  }
  assert_true(calls >= 3); /* check, write, check of the refused call */
  free(values), free(one), free(other);
}

/* ---- Refusals ----------------------------------------------------------------------------- */

static void refused(const nyb_quantize *call, nyb_status status, const char *field,
                    const char *value) {
  poison();
  assert_int_equal(nyb_quantize_run(context, call, NULL), status);
  if (strstr(nyb_last_error(), field) == NULL || strstr(nyb_last_error(), value) == NULL) {
    fail_msg("\"%s\" does not name %s and %s", nyb_last_error(), field, value);
  }
  assert_true(outputs_are_untouched());
}

#define REFUSED(field_and_value, status, field, value) \
  do {                                                 \
    nyb_quantize call = sound_quantize(4, 32, 96);     \
    call.field_and_value;                              \
    refused(&call, status, field, value);              \
  } while (0)

static void test_quantize_refuses_fields(void **state) {
  (void)state;
  assert_int_equal(nyb_quantize_run(context, NULL, NULL), NYB_ERROR_NULL);
  nyb_quantize sound = sound_quantize(4, 32, 96);
  assert_int_equal(nyb_quantize_run(NULL, &sound, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_quantize_run(context, &sound, &sound), NYB_ERROR_VALUE);
  REFUSED(struct_size = 8, NYB_ERROR_STRUCT_SIZE, "quantize.struct_size", "8");
  REFUSED(rule = (nyb_rule)2, NYB_ERROR_ENUM, "quantize.rule", "2");
  REFUSED(reserved = 5, NYB_ERROR_VALUE, "quantize.reserved", "5");
  REFUSED(batch = -1, NYB_ERROR_SHAPE, "quantize.batch", "-1");
  REFUSED(heads = -2, NYB_ERROR_SHAPE, "quantize.heads", "-2");
  REFUSED(tokens = INT64_MIN, NYB_ERROR_SHAPE, "quantize.tokens", "-9223372036854775808");
  REFUSED(tokens = INT64_MAX, NYB_ERROR_SHAPE, "rows", "9223372036854775807");
  REFUSED(dim = 0, NYB_ERROR_SHAPE, "quantize.dim", "0");
  REFUSED(dim = INT64_MAX, NYB_ERROR_SHAPE, "quantize.dim", "9223372036854775807");
  REFUSED(dim = 80, NYB_ERROR_GROUP_SIZE, "quantize.output.format.group_size", "80");
  REFUSED(input.dtype = (nyb_dtype)0, NYB_ERROR_ENUM, "quantize.input.dtype", "0");
  REFUSED(output.format.scheme = (nyb_scheme)0, NYB_ERROR_ENUM, "format.scheme", "0");
  REFUSED(output.format.dtype = (nyb_dtype)7, NYB_ERROR_ENUM, "format.dtype", "7");
  for (int32_t bits = -1; bits < 34; bits++) {
    if (bits >= 2 && bits <= 8 && bits != 7) continue;
    REFUSED(output.format.bits = bits, NYB_ERROR_BITS, "quantize.output.format.bits", "");
  }
  REFUSED(output.format.group_size = 16, NYB_ERROR_GROUP_SIZE, "format.group_size", "16");
  REFUSED(output.format.group_size = 0, NYB_ERROR_GROUP_SIZE, "format.group_size", "0");
  REFUSED(output.format.group_size = 64, NYB_ERROR_GROUP_SIZE, "quantize.dim", "96");
}

static void test_quantize_refuses_memory(void **state) {
  (void)state;
  REFUSED(input.data = NULL, NYB_ERROR_NULL, "quantize.input.data", "NULL");
  REFUSED(output.codes = NULL, NYB_ERROR_NULL, "quantize.output.codes", "NULL");
  REFUSED(output.scales = NULL, NYB_ERROR_NULL, "quantize.output.scales", "NULL");
  REFUSED(output.biases = NULL, NYB_ERROR_NULL, "quantize.output.biases", "NULL");
  REFUSED(input.data = (char *)input + 2, NYB_ERROR_ALIGNMENT, "quantize.input.data", "4 bytes");
  REFUSED(output.codes = (char *)codes + 1, NYB_ERROR_ALIGNMENT, "output.codes", "4 bytes");
  REFUSED(output.scales = (char *)scales + 2, NYB_ERROR_ALIGNMENT, "output.scales", "4 bytes");
  REFUSED(output.codes_stride[2] = 11, NYB_ERROR_STRIDE, "quantize.output.codes", "11");
  REFUSED(output.codes_stride[2] = 0, NYB_ERROR_STRIDE, "quantize.output.codes", "0");
  REFUSED(output.codes_stride[1] = -12, NYB_ERROR_STRIDE, "quantize.output.codes", "36");
  REFUSED(output.biases_stride[0] = 17, NYB_ERROR_STRIDE, "quantize.output.biases", "17");
  REFUSED(input.stride[0] = INT64_MAX, NYB_ERROR_STRIDE, "input", "9223372036854775807");
  REFUSED(input.stride[0] = INT64_MIN, NYB_ERROR_STRIDE, "input", "-9223372036854775808");
  REFUSED(input.stride[0] = INT64_MIN / 8, NYB_ERROR_STRIDE, "input", "address space");
  REFUSED(output.codes_stride[0] = INT64_MIN / 4, NYB_ERROR_STRIDE, "codes", "address space");
  REFUSED(output.codes = input, NYB_ERROR_OVERLAP, "quantize.output.codes", "quantize.input");
  REFUSED(output.scales = codes + 143, NYB_ERROR_OVERLAP, "output.scales", "output.codes");
  REFUSED(output.biases = scales + 35, NYB_ERROR_OVERLAP, "output.biases", "output.scales");
}

/* The first of several elements that cannot be stored is named; nothing is written. */
static void test_quantize_refuses_values(void **state) {
  (void)state;
  const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
  static const char *const words[] = {"element 40, is NaN; every", "element 40, is NaN; every",
                                      "element 40, is infinity; every",
                                      "element 40, is -infinity; every"};
  for (int i = 0; i < 4; i++) {
    input[(1 * 6 + 1 * 2 + 1) * 96 + 40] = bad[i];
    input[11 * 96] = NAN;
    REFUSED(reserved = 0, NYB_ERROR_NON_FINITE, "batch 1, head 1, token 1, element 40", words[i]);
    fill_input();
  }
  input[96 + 33] = 3e38f, input[96 + 34] = -3e38f; /* the range overflows f32 */
  REFUSED(reserved = 0, NYB_ERROR_NON_FINITE, "batch 0, head 0, token 1, group 1", "3e+38");
  fill_input();
  input[64] = -2e6f, input[65] = 100; /* at 4 bits a scale of 133,333, a bias beyond f16 too */
  REFUSED(output.format.dtype = NYB_F16, NYB_ERROR_NON_FINITE, "token 0, group 2", "-2e+06");
  fill_input();
  for (int i = 64; i < 96; i++) input[i] = 70000; /* a bias beyond f16, though a tiny scale */
  REFUSED(output.format.dtype = NYB_F16, NYB_ERROR_NON_FINITE, "token 0, group 2", "70000");
  fill_input();
  input[7] = 65520; /* the least that rounds to an infinity */
  REFUSED(output.format = ((nyb_format){.scheme = NYB_PLAIN, .dtype = NYB_F16}), NYB_ERROR_STRIDE,
          "quantize.output.codes", "12"); /* the strides are those of words */
  nyb_quantize call = sound_quantize(4, 32, 96);
  call.output.format = (nyb_format){.scheme = NYB_PLAIN, .dtype = NYB_F16};
  memcpy(call.output.codes_stride, call.input.stride, sizeof call.input.stride);
  refused(&call, NYB_ERROR_NON_FINITE, "token 0, element 7", "65520");
  input[7] = nextafterf(65520, 0);
  assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
  assert_int_equal(((const uint16_t *)codes)[7], 0x7bff);
  fill_input();
}

static void test_dequantize_refuses(void **state) {
  (void)state;
  const nyb_quantize call = sound_quantize(4, 32, 96);
  const nyb_dequantize sound = back_from(&call);
  memset(output, 0xff, sizeof output);
#define BACK_REFUSED(field_and_value, status)                           \
  do {                                                                  \
    nyb_dequantize back = sound;                                        \
    back.field_and_value;                                               \
    assert_int_equal(nyb_dequantize_run(context, &back, NULL), status); \
    assert_non_null(strstr(nyb_last_error(), "dequantize"));            \
  } while (0)
  BACK_REFUSED(struct_size = 1, NYB_ERROR_STRUCT_SIZE);
  BACK_REFUSED(batch = -1, NYB_ERROR_SHAPE);
  BACK_REFUSED(dim = 100, NYB_ERROR_GROUP_SIZE);
  BACK_REFUSED(input.format.bits = 7, NYB_ERROR_BITS);
  BACK_REFUSED(input.codes = NULL, NYB_ERROR_NULL);
  BACK_REFUSED(input.scales = NULL, NYB_ERROR_NULL);
  BACK_REFUSED(input.biases = (const char *)biases + 1, NYB_ERROR_ALIGNMENT);
  BACK_REFUSED(output.data = NULL, NYB_ERROR_NULL);
  BACK_REFUSED(output.dtype = (nyb_dtype)9, NYB_ERROR_ENUM);
  BACK_REFUSED(output.stride[2] = 95, NYB_ERROR_STRIDE);
  BACK_REFUSED(output.stride[1] = 0, NYB_ERROR_STRIDE);
  BACK_REFUSED(output.data = codes, NYB_ERROR_OVERLAP);
  BACK_REFUSED(output.data = biases, NYB_ERROR_OVERLAP);
  BACK_REFUSED(input.codes_stride[0] = INT64_MAX, NYB_ERROR_STRIDE);
  assert_int_equal(nyb_dequantize_run(context, NULL, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_dequantize_run(NULL, &sound, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_dequantize_run(context, &sound, output), NYB_ERROR_VALUE);
  assert_true(all_bytes_are(output, sizeof output, 0xff));
  /* Inputs may share memory and be broadcast. */
  nyb_dequantize shared = sound;
  memset(codes, 0, sizeof codes);
  memset(scales, 0, sizeof scales);
  shared.input.biases = shared.input.scales;
  shared.input.codes_stride[0] = shared.input.codes_stride[1] = shared.input.codes_stride[2] = 0;
  assert_int_equal(nyb_dequantize_run(context, &shared, NULL), NYB_OK);
  for (int i = 0; i < 12 * 96; i++) assert_true(output[i] == 0);
}

/* No rows: nothing is read, so that NULL is allowed; the rest is still checked. */
static void test_no_rows(void **state) {
  (void)state;
  for (int axis = 0; axis < 3; axis++) {
    nyb_quantize call = sound_quantize(4, 32, 96);
    int64_t *const sizes[3] = {&call.batch, &call.heads, &call.tokens};
    *sizes[axis] = 0;
    call.input.data = NULL;
    call.output.codes = call.output.scales = call.output.biases = NULL;
    nyb_dequantize back = back_from(&call);
    back.output.data = NULL;
    assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
    assert_int_equal(nyb_dequantize_run(context, &back, NULL), NYB_OK);
    call.output.format.bits = 1;
    assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_ERROR_BITS);
  }
}

/* ---- Counting ----------------------------------------------------------------------------- */

static int64_t kernel_calls(const char *operation, const char *format) {
  int64_t calls = 0;
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    assert_int_equal(nyb_kernel_at(context, i, &kernel), NYB_OK);
    if (strcmp(kernel.operation, operation) != 0 || strcmp(kernel.format, format) != 0) continue;
    if (kernel.calls != 0) assert_int_equal(kernel.isa, nyb_context_isa(context));
    calls += kernel.calls;
  }
  return calls;
}

static void test_calls_are_counted(void **state) {
  (void)state;
  nyb_counters_clear(context);
  nyb_quantize call = sound_quantize(6, 32, 96);
  assert_int_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
  const nyb_dequantize back = back_from(&call);
  assert_int_equal(nyb_dequantize_run(context, &back, NULL), NYB_OK);
  assert_int_equal(nyb_dequantize_run(context, &back, NULL), NYB_OK);
  call.dim = 97;
  assert_int_not_equal(nyb_quantize_run(context, &call, NULL), NYB_OK);
  nyb_counters counters = NYB_COUNTERS_INIT;
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.quantize, 1);
  assert_int_equal(counters.dequantize, 2);
  assert_int_equal(kernel_calls("quantize", "affine6"), 1);
  assert_int_equal(kernel_calls("dequantize", "affine6"), 2);
  assert_int_equal(kernel_calls("quantize", "affine4"), 0);
}

static void test_row_bytes(void **state) {
  (void)state;
  const nyb_format plain = {.scheme = NYB_PLAIN, .dtype = NYB_BF16};
  assert_int_equal(nyb_format_row_bytes(&plain, 100), 200);
  EACH_BITS(bits) {
    const nyb_format affine = {NYB_AFFINE, bits, 32, NYB_F16};
    assert_int_equal(nyb_format_row_bytes(&affine, 96), 12 * bits + 3 * 4);
    assert_int_equal(nyb_format_row_bytes(&affine, 80), -1);
    assert_non_null(strstr(nyb_last_error(), "80"));
  }
  assert_int_equal(nyb_format_row_bytes(NULL, 64), -1);
  assert_int_equal(nyb_format_row_bytes(&plain, 0), -1);
  assert_int_equal(nyb_format_row_bytes(&plain, INT64_MAX), -1);
  const nyb_format mixed = {NYB_PLAIN, 4, 0, NYB_F16}, grouped = {NYB_PLAIN, 0, 32, NYB_F16};
  assert_int_equal(nyb_format_row_bytes(&mixed, 64), -1);
  assert_int_equal(nyb_format_row_bytes(&grouped, 64), -1);
}

/* ---- Views -------------------------------------------------------------------------------- */

enum { ARENA = 600 };
static uint16_t arena[ARENA];
static uint64_t random_state = 1;

static int64_t random_below(int64_t bound) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (int64_t)((random_state >> 33) % (uint64_t)bound);
}

static nyb_view random_view(void) {
  nyb_view view = {.owner = "a", .member = "b", .data = arena + ARENA / 2, .element_bytes = 2};
  view.rank = 1 + (int)random_below(3);
  view.row_elements = 1 + random_below(4);
  view.data = arena + ARENA / 2 + random_below(12);
  for (int axis = 0; axis < view.rank; axis++) {
    view.shape[axis] = random_below(20) == 0 ? 0 : 1 + random_below(4);
    view.stride[axis] = random_below(33) - 8;
  }
  return view;
}

/* How often each element of the arena is in the view. */
static void mark(const nyb_view *view, uint8_t marks[ARENA]) {
  int64_t count[3] = {1, 1, 1}, stride[3] = {0, 0, 0};
  for (int axis = 0; axis < view->rank; axis++) {
    count[axis] = view->shape[axis];
    stride[axis] = view->stride[axis];
  }
  memset(marks, 0, ARENA);
  for (int64_t i = 0; i < count[0]; i++) {
    for (int64_t j = 0; j < count[1]; j++) {
      for (int64_t k = 0; k < count[2]; k++) {
        for (int64_t e = 0; e < view->row_elements; e++) {
          const int64_t offset = i * stride[0] + j * stride[1] + k * stride[2] + e;
          marks[(const uint16_t *)view->data - arena + offset]++;
        }
      }
    }
  }
}

/* Against counting every element: no overlap is missed, and what is refused without one keeps
 * within what the header allows to refuse. */
static void test_overlap_against_counting(void **state) {
  (void)state;
  int64_t overlaps = 0, woven = 0;
  for (int trial = 0; trial < 200000; trial++) {
    uint8_t first_marks[ARENA], second_marks[ARENA];
    const nyb_view first = random_view();
    nyb_view second = random_view();
    if (trial % 2 != 0) { /* the same strides, as halves of rows have */
      second.rank = first.rank;
      memcpy(second.stride, first.stride, sizeof first.stride);
      memcpy(second.shape, first.shape, sizeof first.shape);
    }
    mark(&first, first_marks);
    mark(&second, second_marks);
    bool share = false, itself = false;
    for (int i = 0; i < ARENA; i++) {
      share = share || (first_marks[i] != 0 && second_marks[i] != 0);
      itself = itself || first_marks[i] > 1;
    }
    nyb_extent a, b, unused;
    assert_int_equal(nyb_extent_of(&first, &a), NYB_OK);
    assert_int_equal(nyb_extent_of(&second, &b), NYB_OK);
    const bool ranges_cross = a.begin < b.end && b.begin < a.end;
    assert_int_equal(nyb_extents_overlap(&a, &b), nyb_extents_overlap(&b, &a));
    if (share) assert_true(nyb_extents_overlap(&a, &b));
    if (!ranges_cross) assert_false(nyb_extents_overlap(&a, &b));
    overlaps += share;
    woven += ranges_cross && !nyb_extents_overlap(&a, &b);
    if (itself) assert_int_equal(nyb_extent_of_output(&first, &unused), NYB_ERROR_STRIDE);
  }
  assert_true(overlaps > 1000 && woven > 1000); /* or the trials try nothing */
}

static nyb_extent extent_of(int64_t offset, int64_t row, int64_t heads, int64_t head_stride,
                            int64_t tokens, int64_t token_stride) {
  const nyb_view view = {.owner = "x",
                         .member = "y",
                         .data = arena + offset,
                         .element_bytes = 2,
                         .row_elements = row,
                         .rank = 2,
                         .shape = {heads, tokens},
                         .stride = {head_stride, token_stride}};
  nyb_extent extent;
  assert_int_equal(nyb_extent_of_output(&view, &extent), NYB_OK);
  return extent;
}

static void test_woven_layouts_are_apart(void **state) {
  (void)state;
  /* Two halves of [tokens, 2 * dim], and the same a little too long. */
  const nyb_extent left = extent_of(0, 8, 1, 0, 10, 16), right = extent_of(8, 8, 1, 0, 10, 16);
  const nyb_extent wide = extent_of(0, 9, 1, 0, 10, 16);
  assert_false(nyb_extents_overlap(&left, &right));
  assert_true(nyb_extents_overlap(&wide, &right));
  /* A record for each head: 10 tokens of 4 codes, then 10 of 1 scale. */
  const nyb_extent packed = extent_of(0, 4, 5, 50, 10, 4), scale = extent_of(40, 1, 5, 50, 10, 1);
  assert_false(nyb_extents_overlap(&packed, &scale));
  const nyb_extent early = extent_of(39, 1, 5, 50, 10, 1);
  assert_true(nyb_extents_overlap(&packed, &early));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_kernels_agree_with_scalar),
      cmocka_unit_test(test_corrected_reciprocal_divides),
      cmocka_unit_test(test_flat_groups),
      cmocka_unit_test(test_wide_f16_ramp),
      cmocka_unit_test(test_rows_of_36_bytes),
      cmocka_unit_test(test_any_strides),
      cmocka_unit_test(test_threads_change_nothing),
      cmocka_unit_test(test_quantize_refuses_fields),
      cmocka_unit_test(test_quantize_refuses_memory),
      cmocka_unit_test(test_quantize_refuses_values),
      cmocka_unit_test(test_dequantize_refuses),
      cmocka_unit_test(test_no_rows),
      cmocka_unit_test(test_calls_are_counted),
      cmocka_unit_test(test_row_bytes),
      cmocka_unit_test(test_overlap_against_counting),
      cmocka_unit_test(test_woven_layouts_are_apart),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
