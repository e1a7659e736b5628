/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences in three parts, each with formats of its own: the first tokens, k and v, the last ones
 * in a ring. The fused path is held against the oracle (check_parts_scene.c). The compat path takes
 * tokens one after the other, whatever their parts, so there is a sharper check: the same bits as
 * for one plain f32 cache of the elements scale * code + bias. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "places_cases.h"

enum { CHUNK_TOKENS = 1024 };

static void test_fused_against_the_oracle(void **state) {
  (void)state;
  check_random random = {.state = 11};
  for (int i = 0; i < places_cases(); i++) {
    attention_shape shapes[SCENE_PARTS];
    parts_scene c;
    places_random_parts(&random, shapes);
    assert_true(parts_make(&c, shapes));
    const size_t bytes = (size_t)scene_bits_bytes(&c.scenes[0]);
    uint8_t *bits = malloc(bytes);
    char text[256];
    double worst;
    assert_non_null(bits);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      if (places_contexts[isa][0] == NULL) continue;
      places_run(&c.scenes[0], &c.placed, isa, 0, NYB_PATH_FUSED, bits);
      if (!parts_right(&c, ORACLE_CPU, bits, &worst, text, sizeof text))
        fail_msg("%s: %s", nyb_isa_name(isa), text);
      assert_bits_again(&c.scenes[0], &c.placed, isa, NYB_PATH_FUSED, bits, "parts");
    }
    free(bits);
    parts_free(&c);
  }
}

/* ---- One part instead of three ------------------------------------------------------------ */

/* Its columns are the whole sequence's. */
static void use_mask_of_whole(parts_scene *c, const attention_scene *whole) {
  c->placed.call.mask_array = whole->call.mask_array;
}

static void assert_same_as_whole(parts_scene *c, attention_scene *whole, nyb_isa isa,
                                 nyb_path path) {
  char shape[320];
  const size_t bytes = (size_t)scene_bits_bytes(whole);
  uint8_t *want = malloc(bytes), *got = malloc(bytes);
  assert_non_null(want);
  assert_non_null(got);
  assert_int_equal(scene_run(whole, &check_nybble, places_contexts[isa][0], path), NYB_OK);
  scene_bits(whole, want);
  places_run(&c->scenes[0], &c->placed, isa, 0, path, got);
  scene_describe(whole, shape, sizeof shape);
  if (memcmp(want, got, bytes) != 0) fail_msg("%s: other bits in parts", shape);
  free(want);
  free(got);
}

static void test_compat_equals_plain_floats(void **state) {
  (void)state;
  const nyb_format floats = {.scheme = NYB_PLAIN, .dtype = NYB_F32};
  check_random random = {.state = 12};
  for (int i = 0; i < places_cases(); i++) {
    attention_shape shapes[SCENE_PARTS];
    parts_scene c;
    attention_scene whole;
    places_random_parts(&random, shapes);
    places_add_features(&random, &shapes[0]);
    assert_true(parts_make(&c, shapes));
    assert_true(parts_make_whole(&c, &floats, &floats, widen_stored_row, &whole));
    use_mask_of_whole(&c, &whole);
    assert_same_as_whole(&c, &whole, NYB_ISA_SCALAR, NYB_PATH_COMPAT);
    scene_free(&whole);
    parts_free(&c);
  }
}

/* Parts that end where chunks do, in one format, are one sequence to the last bit. */
static void test_whole_chunks_are_one_sequence(void **state) {
  (void)state;
  check_random random = {.state = 13};
  for (int i = 0; i < places_cases() / 2; i++) {
    attention_shape shapes[SCENE_PARTS];
    parts_scene c;
    attention_scene whole;
    places_random_parts(&random, shapes);
    places_add_features(&random, &shapes[0]);
    for (int part = 0; part < SCENE_PARTS; part++) {
      shapes[part].key_format = shapes[0].key_format;
      shapes[part].value_format = shapes[0].value_format;
      shapes[part].capacity_tokens = part == 2 ? 200 : CHUNK_TOKENS;
      for (int64_t b = 0; b < shapes[0].batch; b++) {
        shapes[part].lengths[b] =
            part == 2 ? (int32_t)check_random_below(&random, 201) : CHUNK_TOKENS;
      }
    }
    assert_true(parts_make(&c, shapes));
    assert_true(parts_make_whole(&c, &shapes[0].key_format, &shapes[0].value_format,
                                 copy_stored_row, &whole));
    use_mask_of_whole(&c, &whole);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      if (places_contexts[isa][0] == NULL) continue;
      assert_same_as_whole(&c, &whole, isa, NYB_PATH_FUSED);
    }
    scene_free(&whole);
    parts_free(&c);
  }
}

/* ---- Kernels ------------------------------------------------------------------------------ */

/* Calls of the kernels whose names begin so, on the scalar contexts. */
static int64_t calls_of(const nyb_context *context, const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    assert_int_equal(nyb_kernel_at(context, i, &kernel), NYB_OK);
    if (strcmp(kernel.name, name) == 0) return kernel.calls;
  }
  fail_msg("no kernel %s", name);
  return -1;
}

static void test_each_kernel_counts(void **state) {
  (void)state;
  static const struct {
    const char *name;
    int64_t calls;
  } kernels[] = {
      {"attention_queries_plain_bf16_scalar", 1}, {"attention_scores_plain_bf16_scalar", 1},
      {"attention_queries_affine4_scalar", 1},    {"attention_scores_affine4_scalar", 1},
      {"attention_scores_affine8_scalar", 0},     {"attention_values_affine8_scalar", 1},
      {"attention_columns_affine8_scalar", 1},    {"attention_values_plain_f16_scalar", 1},
      {"attention_columns_plain_f16_scalar", 1},  {"attention_values_affine4_scalar", 0},
      {"attention_softmax_plain_f32_scalar", 1},
  };
  const nyb_format bf16 = {.scheme = NYB_PLAIN, .dtype = NYB_BF16};
  const nyb_format f16 = {.scheme = NYB_PLAIN, .dtype = NYB_F16};
  const nyb_format four = {.scheme = NYB_AFFINE, .bits = 4, .group_size = 32, .dtype = NYB_BF16};
  const nyb_format eight = {.scheme = NYB_AFFINE, .bits = 8, .group_size = 64, .dtype = NYB_F32};
  const nyb_format keys[] = {bf16, four, bf16}, values[] = {f16, eight, f16};
  attention_shape shapes[SCENE_PARTS];
  parts_scene c;
  for (int part = 0; part < SCENE_PARTS; part++) {
    shapes[part] = decode_shape("kernels", 4, 2, 64, 40);
    shapes[part].capacity_tokens = 40;
    shapes[part].query_dtype = shapes[part].out_dtype = NYB_BF16;
    shapes[part].key_format = keys[part];
    shapes[part].value_format = values[part];
  }
  assert_true(parts_make(&c, shapes));
  nyb_context *context = places_contexts[NYB_ISA_SCALAR][1];
  uint8_t *bits = malloc((size_t)scene_bits_bytes(&c.scenes[0]));
  assert_non_null(bits);
  nyb_counters_clear(context);
  places_run(&c.scenes[0], &c.placed, NYB_ISA_SCALAR, 1, NYB_PATH_FUSED, bits);
  for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
    if (calls_of(context, kernels[i].name) != kernels[i].calls) fail_msg("%s", kernels[i].name);
  }
  free(bits);
  parts_free(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fused_against_the_oracle),
      cmocka_unit_test(test_compat_equals_plain_floats),
      cmocka_unit_test(test_whole_chunks_are_one_sequence),
      cmocka_unit_test(test_each_kernel_counts),
  };
  return cmocka_run_group_tests(tests, places_open, places_close);
}
