/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens of attention may stand: behind padding, in pages, in a ring, in three parts. The
 * first three promise the bits of the same tokens laid out one after the other, on every ISA, path
 * and rounding; parts are held against the oracle. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "places_cases.h"

/* ---- The same bits ------------------------------------------------------------------------ */

static void assert_same_bits(attention_scene *scene, placed_scene *placed, nyb_isa isa,
                             nyb_path path, const char *what) {
  uint8_t *want = malloc((size_t)scene_bits_bytes(scene));
  assert_non_null(want);
  assert_int_equal(scene_run(scene, &check_nybble, places_contexts[isa][0], path), NYB_OK);
  scene_bits(scene, want);
  assert_bits_again(scene, placed, isa, path, want, what);
  free(want);
}

static void assert_same_on_all(attention_scene *scene, placed_scene *placed, const char *what) {
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    if (places_contexts[isa][0] != NULL) assert_same_bits(scene, placed, isa, NYB_PATH_FUSED, what);
  }
  assert_same_bits(scene, placed, NYB_ISA_SCALAR, NYB_PATH_COMPAT, what);
}

static void test_starts(void **state) {
  (void)state;
  check_random random = {.state = 1};
  for (int i = 0; i < places_cases(); i++) {
    attention_shape shape =
        places_random_shape("starts", places_random_most_tokens(&random), &random);
    if (i % 2 == 0) places_add_features(&random, &shape);
    attention_scene scene;
    placed_scene placed;
    assert_true(scene_make(&scene, &shape));
    assert_true(place_behind_padding(&scene, &random, &placed));
    assert_same_on_all(&scene, &placed, "starts");
    placed_free(&placed);
    scene_free(&scene);
  }
}

/* In bits as scene_bits() orders them: rows of `padded` from `start` on are those of `alone`, and
 * the others are zeros, and -inf. */
static void assert_rows_behind(attention_scene *alone, attention_scene *padded,
                               placed_scene *placed, int64_t start) {
  const attention_shape *s = &alone->shape;
  const int64_t rows = s->query_len, padded_rows = rows + start, heads = s->query_heads;
  const int64_t row_bytes = s->value_dim * (int64_t)nyb_dtype_bytes(s->out_dtype);
  uint8_t *want = malloc((size_t)scene_bits_bytes(alone));
  uint8_t *got = malloc((size_t)scene_bits_bytes(padded));
  uint8_t *zeros = calloc(1, (size_t)row_bytes);
  assert_true(want != NULL && got != NULL && zeros != NULL);
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    nyb_context *context = places_contexts[NYB_ISA_SCALAR][0];
    assert_int_equal(scene_run(alone, &check_nybble, context, (nyb_path)path), NYB_OK);
    scene_bits(alone, want);
    places_run(padded, placed, NYB_ISA_SCALAR, 1, (nyb_path)path, got);
    for (int64_t i = 0; i < heads * padded_rows; i++) {
      const int64_t row = i % padded_rows - start, at = i / padded_rows * rows + row;
      const float none = -INFINITY;
      assert_memory_equal(got + i * row_bytes, row < 0 ? zeros : want + at * row_bytes, row_bytes);
      assert_memory_equal(
          got + heads * padded_rows * row_bytes + i * 4,
          row < 0 ? (const uint8_t *)&none : want + heads * rows * row_bytes + at * 4, 4);
    }
  }
  free(want);
  free(got);
  free(zeros);
}

/* Positions from the top left count the padding, too: row i + start of a padded call is row i of
 * the sequence alone, and the rows before it see nothing. */
static void test_starts_from_the_top_left(void **state) {
  (void)state;
  check_random random = {.state = 5};
  for (int i = 0; i < places_cases() / 4; i++) {
    attention_shape shape =
        places_random_shape("top left", places_random_most_tokens(&random), &random);
    shape.batch = 1;
    shape.mask = NYB_MASK_CAUSAL_TOP_LEFT;
    shape.query_len = 5;
    attention_scene scene, padded_scene;
    placed_scene placed;
    assert_true(scene_make(&scene, &shape));
    assert_true(place_behind_padding(&scene, &random, &placed));
    const int64_t start = placed.call.starts[0];
    shape.query_len += start;
    assert_true(scene_make(&padded_scene, &shape)); /* for its queries and outputs */
    const int64_t q_bytes = shape.key_dim * (int64_t)nyb_dtype_bytes(shape.query_dtype);
    for (int64_t row = 0; row < shape.query_heads * 5; row++) {
      const nyb_input *to = &padded_scene.call.q, *from = &scene.call.q;
      const int64_t bytes = (int64_t)nyb_dtype_bytes(shape.query_dtype);
      const int64_t head = row / 5, at = row % 5;
      memcpy((char *)(uintptr_t)to->data +
                 (head * to->stride[1] + (at + start) * to->stride[2]) * bytes,
             (const char *)from->data + (head * from->stride[1] + at * from->stride[2]) * bytes,
             (size_t)q_bytes);
    }
    check_buffer_seal(&padded_scene.q);
    placed.call.q = padded_scene.call.q;
    placed.call.out = padded_scene.call.out;
    placed.call.lse = padded_scene.call.lse;
    placed.call.query_len = shape.query_len;
    assert_rows_behind(&scene, &padded_scene, &placed, start);
    placed_free(&placed);
    scene_free(&padded_scene);
    scene_free(&scene);
  }
}

static void test_pages(void **state) {
  (void)state;
  check_random random = {.state = 2};
  for (int i = 0; i < 2 * places_cases(); i++) {
    attention_shape shape =
        places_random_shape("pages", places_random_most_tokens(&random), &random);
    if (i % 2 == 0) places_add_features(&random, &shape);
    const int64_t page_tokens = PICK(&random, 16, 17, 24, 32, 64, 100, 128, 192);
    const int64_t shared_pages = check_random_below(&random, 5);
    char what[64];
    attention_scene scene;
    placed_scene placed;
    snprintf(what, sizeof what, "pages of %lld", (long long)page_tokens);
    assert_true(scene_make(&scene, &shape));
    scene_share_tokens(&scene, shared_pages * page_tokens);
    assert_true(place_in_pages(&scene, page_tokens, shared_pages, &random, &placed));
    assert_same_on_all(&scene, &placed, what);
    placed_free(&placed);
    scene_free(&scene);
  }
}

static void test_ring(void **state) {
  (void)state;
  check_random random = {.state = 3};
  for (int i = 0; i < places_cases(); i++) {
    attention_shape shape =
        places_random_shape("ring", places_random_most_tokens(&random), &random);
    if (i % 2 == 0) places_add_features(&random, &shape);
    const int64_t most_kept = shape.capacity_tokens - 1;
    const int64_t keep_tokens = PICK(&random, 0, 0, 4, most_kept);
    attention_scene scene;
    placed_scene placed;
    assert_true(scene_make(&scene, &shape));
    assert_true(
        place_in_ring(&scene, keep_tokens > most_kept ? most_kept : keep_tokens, &random, &placed));
    assert_same_on_all(&scene, &placed, "ring");
    placed_free(&placed);
    scene_free(&scene);
  }
}

/* ---- Refusals ----------------------------------------------------------------------------- */

/* A right call over three sequences, which each case spoils in one way. */
typedef struct refusal {
  attention_scene scene;
  placed_scene placed;
  nyb_context *context;
  int32_t numbers[64]; /* a copy of starts, table, offsets or last_begins, to be spoiled */
} refusal;

static attention_shape refusal_shape(void) {
  attention_shape shape = decode_shape("refusals", 4, 2, 64, 70);
  shape.batch = 3;
  shape.capacity_tokens = 100;
  shape.lengths[1] = 33;
  shape.lengths[2] = 100;
  shape.key_format =
      (nyb_format){.scheme = NYB_AFFINE, .bits = 4, .group_size = 64, .dtype = NYB_BF16};
  shape.value_format = (nyb_format){.scheme = NYB_PLAIN, .dtype = NYB_F16};
  shape.query_dtype = shape.out_dtype = NYB_BF16;
  return shape;
}

static void refusal_end(refusal *r) {
  placed_free(&r->placed);
  scene_free(&r->scene);
}

/* The right call runs; its numbers are copied to where they can be spoiled. */
static void refusal_begin(refusal *r, const int32_t *numbers, int64_t count) {
  r->context = places_contexts[NYB_ISA_SCALAR][1];
  assert_true((size_t)count <= sizeof r->numbers / sizeof r->numbers[0]);
  memcpy(r->numbers, numbers, (size_t)count * sizeof *numbers);
  const nyb_attention own = r->scene.call;
  r->scene.call = r->placed.call;
  const nyb_status status = scene_run(&r->scene, &check_nybble, r->context, NYB_PATH_FUSED);
  r->scene.call = own;
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  check_buffer_poison(&r->scene.out);
  check_buffer_poison(&r->scene.lse);
}

static void expect_sentence(nyb_status got, nyb_status want, const char *words) {
  if (got != want) fail_msg("%s, want %s: %s", nyb_status_name(got), nyb_status_name(want), words);
  if (strstr(nyb_last_error(), words) == NULL) {
    fail_msg("\"%s\" does not say \"%s\"", nyb_last_error(), words);
  }
}

static nyb_status run_again(refusal *r, const nyb_attention *call) {
  return nyb_attention_run(r->context, call, r->scene.workspace, r->scene.workspace_bytes, NULL);
}

/* By run alone: what stands behind a pointer, or a pointer that may be set later. */
static void expect_run_refused(refusal *r, const nyb_attention *call, nyb_status want,
                               const char *words) {
  nyb_plan plan = NYB_PLAN_INIT;
  if (nyb_attention_plan(r->context, call, &plan) != NYB_OK) fail_msg("plan, too: %s", words);
  expect_sentence(run_again(r, call), want, words);
  assert_int_equal(check_buffer_changed(&r->scene.out), CHECK_UNCHANGED);
  assert_int_equal(check_buffer_changed(&r->scene.lse), CHECK_UNCHANGED);
}

static void expect_refused(refusal *r, const nyb_attention *call, nyb_status want,
                           const char *words) {
  nyb_plan plan = NYB_PLAN_INIT;
  expect_sentence(nyb_attention_plan(r->context, call, &plan), want, words);
  expect_sentence(run_again(r, call), want, words);
  assert_int_equal(check_buffer_changed(&r->scene.out), CHECK_UNCHANGED);
}

#define SPOILED(r, function, field, value, status, words) \
  do {                                                    \
    nyb_attention spoiled = (r)->placed.call;             \
    spoiled.field = (value);                              \
    function((r), &spoiled, (status), (words));           \
  } while (0)
#define REFUSED(r, ...) SPOILED(r, expect_refused, __VA_ARGS__)
#define RUN_REFUSED(r, ...) SPOILED(r, expect_run_refused, __VA_ARGS__)
#define SHIFTED(pointer, bytes) ((void *)((uintptr_t)(pointer) + (bytes)))

/* The field takes the spoiled copy of the numbers. */
#define NUMBER_REFUSED(r, field, index, value, words)                \
  do {                                                               \
    const int32_t right = (r)->numbers[index];                       \
    (r)->numbers[index] = (int32_t)(value);                          \
    RUN_REFUSED((r), field, (r)->numbers, NYB_ERROR_VALUE, (words)); \
    (r)->numbers[index] = right;                                     \
  } while (0)

/* The outputs must overlap no number and no row. */
#define OVERLAP_REFUSED(r, address) \
  REFUSED((r), out.data, (void *)(uintptr_t)(address), NYB_ERROR_OVERLAP, "out.data")

static void test_refused_starts(void **state) {
  (void)state;
  const attention_shape shape = refusal_shape();
  check_random random = {.state = 21};
  refusal r;
  assert_true(scene_make(&r.scene, &shape));
  assert_true(place_behind_padding(&r.scene, &random, &r.placed));
  const nyb_attention *call = &r.placed.call;
  refusal_begin(&r, call->starts, 3);
  NUMBER_REFUSED(&r, starts, 0, -1, "starts[0] is -1; it must be 0 to");
  NUMBER_REFUSED(&r, starts, 2, call->lengths[2] + 1, "starts[2] is");
  NUMBER_REFUSED(&r, starts, 1, INT32_MIN, "starts[1] is -2147483648");
  REFUSED(&r, starts, SHIFTED(call->starts, 2), NYB_ERROR_ALIGNMENT, "starts is");
  OVERLAP_REFUSED(&r, call->starts);
  refusal_end(&r);
}

static void test_refused_pages(void **state) {
  (void)state;
  const attention_shape shape = refusal_shape();
  check_random random = {.state = 22};
  refusal r;
  assert_true(scene_make(&r.scene, &shape));
  assert_true(place_in_pages(&r.scene, 32, 0, &random, &r.placed));
  const nyb_attention *call = &r.placed.call;
  const nyb_pages *pages = &call->pages;
  const int64_t stride = pages->table_stride;
  refusal_begin(&r, pages->table, 3 * stride);
  REFUSED(&r, pages.page_tokens, 0, NYB_ERROR_SHAPE, "pages.page_tokens is 0; it must be 16");
  REFUSED(&r, pages.page_tokens, 15, NYB_ERROR_SHAPE, "pages.page_tokens is 15");
  REFUSED(&r, pages.page_tokens, -32, NYB_ERROR_SHAPE, "pages.page_tokens is -32");
  REFUSED(&r, pages.page_tokens, INT64_MAX, NYB_ERROR_SHAPE, "pages.page_tokens is");
  REFUSED(&r, pages.page_count, -1, NYB_ERROR_SHAPE, "pages.page_count is -1");
  REFUSED(&r, pages.page_count, (int64_t)1 << 31, NYB_ERROR_SHAPE, "pages.page_count is");
  REFUSED(&r, pages.table_stride, 3, NYB_ERROR_SHAPE, "pages.table_stride is 3; it must be 4");
  REFUSED(&r, pages.table_stride, -4, NYB_ERROR_SHAPE, "pages.table_stride is -4");
  REFUSED(&r, pages.table_stride, INT64_MAX, NYB_ERROR_STRIDE, "pages.table");
  RUN_REFUSED(&r, pages.table, NULL, NYB_ERROR_NULL, "pages.table is NULL");
  REFUSED(&r, pages.table, SHIFTED(pages->table, 1), NYB_ERROR_ALIGNMENT, "pages.table is");
  NUMBER_REFUSED(&r, pages.table, 0, -1, "pages.table has -1 for page 0 of sequence 0");
  NUMBER_REFUSED(&r, pages.table, 2, pages->page_count,
                 "for page 2 of sequence 0; it must be 0 to");
  NUMBER_REFUSED(&r, pages.table, 2 * stride + 3, INT32_MAX, "for page 3 of sequence 2");
  REFUSED(&r, k.codes_stride[0], INT64_MAX / 2, NYB_ERROR_STRIDE, "k.codes");
  OVERLAP_REFUSED(&r, pages->table + 2 * stride + 3);
  OVERLAP_REFUSED(&r, (const uint32_t *)call->k.codes + 6 * call->k.codes_stride[0]);
  /* What lies beyond a sequence's length is not looked at. */
  nyb_attention other = *call;
  other.pages.table = r.numbers;
  r.numbers[3] = INT32_MAX;
  r.numbers[stride + 2] = -1;
  assert_int_equal(run_again(&r, &other), NYB_OK);
  refusal_end(&r);
}

static void test_refused_ring(void **state) {
  (void)state;
  const attention_shape shape = refusal_shape();
  check_random random = {.state = 23};
  refusal r;
  assert_true(scene_make(&r.scene, &shape));
  assert_true(place_in_ring(&r.scene, 4, &random, &r.placed));
  const nyb_attention *call = &r.placed.call;
  refusal_begin(&r, call->ring.offsets, 3);
  REFUSED(&r, ring.keep_tokens, -1, NYB_ERROR_SHAPE, "ring.keep_tokens is -1");
  REFUSED(&r, ring.keep_tokens, 100, NYB_ERROR_SHAPE, "less than capacity_tokens, 100");
  REFUSED(&r, ring.keep_tokens, INT64_MAX, NYB_ERROR_SHAPE, "ring.keep_tokens is");
  RUN_REFUSED(&r, ring.offsets, NULL, NYB_ERROR_NULL, "ring.offsets is NULL");
  REFUSED(&r, ring.offsets, SHIFTED(call->ring.offsets, 3), NYB_ERROR_ALIGNMENT, "ring.offsets is");
  NUMBER_REFUSED(&r, ring.offsets, 1, -1, "ring.offsets[1] is -1; it must be 0 to 95");
  NUMBER_REFUSED(&r, ring.offsets, 2, 96, "ring.offsets[2] is 96");
  OVERLAP_REFUSED(&r, call->ring.offsets + 1);
  refusal_end(&r);
}

/* First 8 tokens, 70, 33 or 100 in the middle, 20 of 30 at the end. */
static void begin_parts(refusal *r, attention_scene scenes[3]) {
  for (int part = 0; part < 3; part++) {
    attention_shape shape = refusal_shape();
    shape.seed = (uint64_t)part;
    if (part == 0) shape.capacity_tokens = 8;
    if (part == 2) shape.capacity_tokens = 30;
    for (int64_t b = 0; b < 3 && part != 1; b++) shape.lengths[b] = part == 0 ? 8 : 20;
    assert_true(scene_make(&scenes[part], &shape));
  }
  assert_true(place_in_parts(scenes, &r->placed));
  r->scene = scenes[0];
  refusal_begin(r, r->placed.call.last_begins, 3);
}

static void test_refused_parts(void **state) {
  (void)state;
  attention_scene scenes[3];
  refusal r;
  begin_parts(&r, scenes);
  const nyb_attention *call = &r.placed.call;
  REFUSED(&r, first.tokens, -1, NYB_ERROR_SHAPE, "first.tokens is -1");
  REFUSED(&r, last.tokens, INT64_MIN, NYB_ERROR_SHAPE, "last.tokens is");
  REFUSED(&r, first.tokens, INT32_MAX, NYB_ERROR_SHAPE, "first.tokens + capacity_tokens + last");
  REFUSED(&r, first.k.format.bits, 7, NYB_ERROR_BITS, "attention.first.k.format.bits is 7");
  REFUSED(&r, first.v.format.scheme, (nyb_scheme)0, NYB_ERROR_ENUM, "first.v.format.scheme is 0");
  REFUSED(&r, last.k.format.group_size, 48, NYB_ERROR_GROUP_SIZE, "last.k.format.group_size is 48");
  REFUSED(&r, last.v.format.dtype, (nyb_dtype)0, NYB_ERROR_ENUM, "last.v.format.dtype is 0");
  RUN_REFUSED(&r, first.k.codes, NULL, NYB_ERROR_NULL, "first.k.codes is NULL");
  RUN_REFUSED(&r, last.k.scales, NULL, NYB_ERROR_NULL, "last.k.scales is NULL");
  RUN_REFUSED(&r, last.v.codes, NULL, NYB_ERROR_NULL, "last.v.codes is NULL");
  RUN_REFUSED(&r, last_begins, NULL, NYB_ERROR_NULL, "last_begins is NULL");
  REFUSED(&r, first.v.codes, SHIFTED(call->first.v.codes, 1), NYB_ERROR_ALIGNMENT, "first.v.codes");
  REFUSED(&r, last.k.biases, SHIFTED(call->last.k.biases, 1), NYB_ERROR_ALIGNMENT, "last.k.biases");
  REFUSED(&r, last_begins, SHIFTED(call->last_begins, 2), NYB_ERROR_ALIGNMENT, "last_begins is");
  REFUSED(&r, last.v.codes_stride[2], INT64_MAX / 2, NYB_ERROR_STRIDE, "last.v.codes");
  OVERLAP_REFUSED(&r, call->last_begins);
  OVERLAP_REFUSED(&r, call->first.k.scales);
  OVERLAP_REFUSED(&r, call->first.v.codes);
  OVERLAP_REFUSED(&r, call->last.k.codes);
  OVERLAP_REFUSED(&r, (const uint16_t *)call->last.v.codes + 2 * call->last.v.codes_stride[0]);
  /* Lengths are 98, 61, 128; the last part holds 30, the middle 100. */
  NUMBER_REFUSED(&r, last_begins, 0, 99, "last_begins[0] is 99; it must be 68 to 98");
  NUMBER_REFUSED(&r, last_begins, 0, 67, "last_begins[0] is 67");
  NUMBER_REFUSED(&r, last_begins, 1, 30, "last_begins[1] is 30; it must be 31 to 61");
  NUMBER_REFUSED(&r, last_begins, 2, 109, "last_begins[2] is 109; it must be 98 to 108");
  const int32_t too_long[] = {98, 61, 139}, negative[] = {98, -1, 128}, short_ones[] = {98, 61, 7};
  RUN_REFUSED(
      &r, lengths, too_long, NYB_ERROR_LENGTH,
      "lengths[2] is 139; it must be 0 to first.tokens + capacity_tokens + last.tokens, 138");
  RUN_REFUSED(&r, lengths, negative, NYB_ERROR_LENGTH, "lengths[1] is -1");
  RUN_REFUSED(&r, lengths, short_ones, NYB_ERROR_VALUE, "last_begins[2] is 108; it must be 7 to 7");
  placed_free(&r.placed);
  scenes[0] = r.scene;
  for (int part = 0; part < 3; part++) scene_free(&scenes[part]);
}

/* Of starts, pages, ring and parts a call has at most one. */
static void test_refused_together(void **state) {
  (void)state;
  static const char *const names[] = {"starts", "pages", "ring", "first or last"};
  const attention_shape shape = refusal_shape();
  check_random random = {.state = 24};
  int32_t zeros[16] = {0};
  refusal r;
  assert_true(scene_make(&r.scene, &shape));
  assert_true(place_in_ring(&r.scene, 4, &random, &r.placed));
  refusal_begin(&r, r.placed.call.ring.offsets, 3);
  for (int i = 0; i < 4; i++) {
    for (int j = i + 1; j < 4; j++) {
      nyb_attention call = r.scene.call;
      char words[64];
      if (i == 0) call.starts = zeros;
      if (i == 1 || j == 1) call.pages = (nyb_pages){zeros, 4, 32, 8};
      if (i == 2 || j == 2) call.ring.offsets = zeros;
      if (j == 3) call.first = (nyb_part){.tokens = 4, .k = call.k, .v = call.v};
      snprintf(words, sizeof words, "attention.%s is set and attention.%s, too", names[i],
               names[j]);
      expect_refused(&r, &call, NYB_ERROR_UNSUPPORTED, words);
    }
  }
  refusal_end(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_starts),
      cmocka_unit_test(test_starts_from_the_top_left),
      cmocka_unit_test(test_pages),
      cmocka_unit_test(test_ring),
      cmocka_unit_test(test_refused_starts),
      cmocka_unit_test(test_refused_pages),
      cmocka_unit_test(test_refused_ring),
      cmocka_unit_test(test_refused_parts),
      cmocka_unit_test(test_refused_together),
  };
  return cmocka_run_group_tests(tests, places_open, places_close);
}
