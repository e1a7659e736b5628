/* SPDX-License-Identifier: Apache-2.0 */
/* Faults that users of other libraries met in attention over quantized rows, each as a test of its
 * own, on every ISA that runs here and on both paths. The numbers are those of the list of field
 * cases that the other tests name, too. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attention_scene.h"

/* ---- Every context and path --------------------------------------------------------------------
 */

enum { MAX_CONTEXTS = NYB_ISA_NEON };
static nyb_context *contexts[MAX_CONTEXTS]; /* of each ISA that runs here, with threads */
static int context_count;

static int make_contexts(void **state) {
  (void)state;
  static int64_t threads = 4;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    const nyb_context_options options = {.struct_size = sizeof options,
                                         .isa = isa,
                                         .threads = threads,
                                         .parallel_for = check_parallel_for,
                                         .parallel_for_data = &threads};
    if (nyb_context_create(&options, &contexts[context_count]) == NYB_OK) {
      context_count++;
    } else {
      print_message("skipped %s: %s\n", nyb_isa_name(isa), nyb_last_error());
    }
  }
  return context_count > 0 ? 0 : -1;
}

static int free_contexts(void **state) {
  (void)state;
  while (context_count > 0) nyb_context_destroy(contexts[--context_count]);
  return 0;
}

/* The scene's call as the oracle wants it, and what the test itself wants of its outputs. */
typedef void (*expectation)(const attention_scene *scene);

static void expect_right(attention_scene *scene, nyb_context *context, nyb_path path,
                         const scene_expected *expected, expectation more) {
  char what[256], text[256];
  double worst;
  scene_describe(scene, what, sizeof what);
  const nyb_status status = scene_run(scene, &check_nybble, context, path);
  if (status != NYB_OK) fail_msg("%s: %s", what, nyb_last_error());
  if (more != NULL) more(scene);
  if (scene_compare(scene, expected, &worst, text, sizeof text) != SCENE_GOOD) {
    fail_msg("%s, %s: %s", what, nyb_isa_name(nyb_context_isa(context)), text);
  }
}

/* On the fused path of every ISA; on the compat path, which has none, once. */
static void expect_right_everywhere(const attention_shape *shape, expectation more) {
  attention_scene scene;
  scene_expected expected;
  assert_true(scene_make(&scene, shape));
  assert_true(scene_expect(&scene, NYB_PATH_FUSED, ORACLE_CPU, &expected));
  for (int i = 0; i < context_count; i++) {
    expect_right(&scene, contexts[i], NYB_PATH_FUSED, &expected, more);
  }
  scene_expected_free(&expected);
  if (shape->capacity_tokens < 10000) {
    assert_true(scene_expect(&scene, NYB_PATH_COMPAT, ORACLE_CPU, &expected));
    expect_right(&scene, contexts[0], NYB_PATH_COMPAT, &expected, more);
    scene_expected_free(&expected);
  }
  scene_free(&scene);
}

static nyb_format affine(int bits, int group_size, nyb_dtype dtype) {
  return (nyb_format){.scheme = NYB_AFFINE, .bits = bits, .group_size = group_size, .dtype = dtype};
}

static attention_shape decode(const char *name, int64_t query_heads, int64_t dim,
                              const nyb_format *format, int32_t length) {
  return (attention_shape){.name = name,
                           .batch = 1,
                           .query_heads = query_heads,
                           .kv_heads = 1,
                           .query_len = 1,
                           .key_dim = dim,
                           .value_dim = dim,
                           .capacity_tokens = length,
                           .lengths = {length},
                           .key_format = *format,
                           .value_format = *format,
                           .query_dtype = NYB_F16,
                           .out_dtype = NYB_F16,
                           .seed = 21};
}

/* ---- A5: code times scale beyond f16 ------------------------------------------------------------
 */

static void expect_finite(const attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  for (int64_t i = 0; i < s->query_heads * s->value_dim; i++) {
    assert_true(isfinite(oracle_load(scene->out.data, s->out_dtype, i)));
  }
  for (int64_t i = 0; i < s->query_heads; i++) {
    assert_true(isfinite(oracle_load(scene->lse.data, NYB_F32, i)));
  }
}

/* A ramp of +-60,000 in f16 at 4 bits has the scale -7,500 and the bias 60,000: its last code's
 * product is 112,500, which f16 does not hold. Attention multiplies in f32. */
static void test_scale_is_not_folded_in_f16(void **state) {
  (void)state;
  for (int group_size = 32; group_size <= 128; group_size *= 2) {
    for (int i = 0; i < 4; i++) {
      const nyb_format format = affine(4, group_size, NYB_F16);
      attention_shape shape = decode("A5: ramp of +-60,000", 3, 128, &format, i < 2 ? 90 : 1);
      shape.keys = shape.values = ROWS_WIDE;
      shape.queries = QUERIES_TINY;
      shape.out_dtype = i % 2 == 0 ? NYB_F16 : NYB_F32;
      shape.rounding = i % 2 == 0 ? NYB_ROUNDING_MLX : NYB_ROUNDING_EXACT;
      attention_scene scene;
      assert_true(scene_make(&scene, &shape));
      assert_true(fabs(oracle_load(scene.v.scales.data, NYB_F16, 0) * 15) == 112500);
      scene_free(&scene);
      expect_right_everywhere(&shape, expect_finite);
    }
  }
}

/* With one token the output is its value: one step from the element at most. */
static void expect_within_a_step(const attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  const int64_t group_size = s->value_format.group_size;
  for (int64_t d = 0; d < s->value_dim; d++) {
    const double step = 2.0 * (double)(d % group_size) / (double)(group_size - 1);
    const double element = oracle_round(NYB_F16, 60000 * (step - 1));
    const double got = oracle_load(scene->out.data, s->out_dtype, d);
    assert_true(fabs(got - element) <= 7500 + 0.01);
  }
}

static void test_wide_values_are_within_a_step(void **state) {
  (void)state;
  const nyb_format format = affine(4, 64, NYB_F16);
  attention_shape shape = decode("A5: one token", 1, 128, &format, 1);
  shape.keys = shape.values = ROWS_WIDE;
  shape.queries = QUERIES_TINY;
  shape.out_dtype = NYB_F32;
  expect_right_everywhere(&shape, expect_within_a_step);
}

/* ---- A7: every width reads its own codes
 * ----------------------------------------------------------- */

/* A one-hot query for each element over one token of codes 7i, scale 1 and bias 0: rounded to the
 * query's 16 bits each score is a code, and so is each value. */
static void expect_codes(const attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  const int64_t key_codes = 1 << s->key_format.bits, value_codes = 1 << s->value_format.bits;
  for (int64_t row = 0; row < s->query_len; row++) {
    assert_true(oracle_load(scene->lse.data, NYB_F32, row) == (double)(7 * row % key_codes));
    for (int64_t d = 0; d < s->value_dim; d++) {
      const double got = oracle_load(scene->out.data, s->out_dtype, row * s->value_dim + d);
      assert_true(got == (double)(7 * d % value_codes));
    }
  }
}

static void test_every_width_reads_its_codes(void **state) {
  (void)state;
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  for (int i = 0; i < 6 * 9; i++) {
    const int group_size = 32 << i / 6 % 3;
    const nyb_format format = affine(widths[i % 6], group_size, (nyb_dtype)(NYB_F32 + i / 18));
    for (int64_t dim = group_size; dim <= 2 * group_size; dim += group_size) {
      attention_shape shape = decode("A7: codes 7i", 1, dim, &format, 1);
      shape.query_len = dim;
      shape.scale = 1;
      shape.rounding = NYB_ROUNDING_MLX;
      shape.query_dtype = i % 2 == 0 ? NYB_F16 : NYB_BF16;
      shape.out_dtype = i % 2 == 0 ? NYB_BF16 : NYB_F16;
      shape.queries = QUERIES_IDENTITY;
      shape.keys = shape.values = ROWS_SEVENTHS;
      expect_right_everywhere(&shape, expect_codes);
    }
  }
}

/* ---- B11: narrow and odd value widths over a split context
 * ----------------------------------------- */

/* Outputs are NaN before each run, so that a column that is left out is seen. */
static void test_every_column_is_written(void **state) {
  (void)state;
  static const int64_t dims[] = {32, 96, 160, 192};
  static const int32_t lengths[] = {1024, 1100};
  static const int widths[] = {3, 4, 8};
  for (int i = 0; i < 4 * 2 * 3; i++) {
    const nyb_format format = affine(widths[i / 8], 32, NYB_BF16);
    attention_shape shape = decode("B11: columns", 4, 64, &format, lengths[i / 4 % 2]);
    shape.value_dim = dims[i % 4];
    shape.kv_heads = 2;
    shape.query_dtype = i % 2 == 0 ? NYB_BF16 : NYB_F32;
    shape.keys = shape.values = ROWS_RAW;
    expect_right_everywhere(&shape, NULL);
  }
}

/* ---- B15: the merge of chunks writes where the strides say
 * ------------------------------------------ */

/* [B,H,L,D] and [B,L,H,D], without and with gaps between the rows; three chunks, on threads, whose
 * results are merged. The comparison looks for writes beside the rows and in the guard bands. */
static void test_merge_keeps_to_the_strides(void **state) {
  (void)state;
  for (int i = 0; i < 8; i++) {
    const nyb_format format = affine(i < 4 ? 4 : 8, 32, NYB_F16);
    attention_shape shape = decode("B15: layouts", 6, 64, &format, 2200);
    shape.batch = 2;
    shape.lengths[1] = 2049;
    shape.kv_heads = 2;
    shape.query_len = 3;
    shape.value_dim = 96;
    shape.mask = NYB_MASK_CAUSAL;
    shape.swapped = i % 2 == 1;
    shape.gap = i / 2 % 2 * 3;
    shape.keys = shape.values = ROWS_RAW;
    expect_right_everywhere(&shape, NULL);
  }
}

/* ---- C22: wide heads, many to a KV head, long
 * ----------------------------------------------------- */

static void test_wide_heads_over_a_long_context(void **state) {
  (void)state;
  const nyb_format format = affine(8, 64, NYB_BF16);
  attention_shape shape = decode("C22: wide and long", 8, 256, &format, 16384);
  shape.query_dtype = shape.out_dtype = NYB_BF16;
  shape.keys = shape.values = ROWS_RAW;
  expect_right_everywhere(&shape, NULL);
  shape.query_dtype = shape.out_dtype = NYB_F32;
  expect_right_everywhere(&shape, NULL);
}

/* ---- D33: no call is dropped at the borders of tiles and chunks
 * ----------------------------------- */

/* One token before each border, at it and behind it; outputs are NaN before each run. */
static void test_every_border_is_computed(void **state) {
  (void)state;
  static const int widths[] = {2, 3, 4, 5, 6, 8, 0};
  static const int64_t dims[] = {32, 64, 128, 256, 512};
  static const int32_t lengths[] = {63, 64, 65, 1023, 1024, 1025};
  static const nyb_dtype dtypes[] = {NYB_F32, NYB_F16, NYB_BF16};
  for (int i = 0; i < 7 * 6; i++) { /* each width and border, the others in turn */
    const nyb_dtype dtype = dtypes[i % 3];
    const nyb_format plain = {.scheme = NYB_PLAIN, .dtype = dtype};
    const int bits = widths[i / 6];
    const nyb_format format = bits == 0 ? plain : affine(bits, 32, dtype);
    attention_shape shape =
        decode("D33: borders", 2, dims[(i + i / 6) % 5], &format, lengths[i % 6]);
    shape.query_dtype = shape.out_dtype = dtypes[i / 6 % 3];
    shape.keys = shape.values = bits == 0 ? ROWS_NORMAL : ROWS_RAW;
    expect_right_everywhere(&shape, NULL);
  }
}

/* ---- H58: every ISA reads the same rows
 * ------------------------------------------------------------- */

/* Every width, rows of 36 bytes among them (96 codes of 3 bits), by each ISA that runs here. */
static void test_every_isa_reads_the_same_rows(void **state) {
  (void)state;
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  static const int64_t dims[] = {32, 96, 160};
  for (int i = 0; i < 6 * 3; i++) {
    const nyb_format format = affine(widths[i / 3], 32, NYB_F16);
    attention_shape shape = decode("H58: rows of each width", 4, dims[i % 3], &format, 333);
    shape.keys = shape.values = ROWS_RAW;
    shape.out_dtype = NYB_F32;
    expect_right_everywhere(&shape, NULL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_scale_is_not_folded_in_f16),
      cmocka_unit_test(test_wide_values_are_within_a_step),
      cmocka_unit_test(test_every_width_reads_its_codes),
      cmocka_unit_test(test_every_column_is_written),
      cmocka_unit_test(test_merge_keeps_to_the_strides),
      cmocka_unit_test(test_wide_heads_over_a_long_context),
      cmocka_unit_test(test_every_border_is_computed),
      cmocka_unit_test(test_every_isa_reads_the_same_rows),
  };
  return cmocka_run_group_tests(tests, make_contexts, free_contexts);
}
