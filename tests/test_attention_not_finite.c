/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over data that is not finite. What such rows become is the checks' business, against
 * the oracle; here is how far an element that is not finite may reach, to the bit, on every ISA,
 * path, format and number of threads, and that scores of -inf are as good as tokens that are not
 * there. */
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

/* NULL, and said so, where the ISA does not run here. */
static nyb_context *context_for(nyb_isa isa, int64_t threads) {
  nyb_context *context = NULL;
  static int64_t most_threads = 3;
  const nyb_context_options options = {.struct_size = sizeof options,
                                       .isa = isa,
                                       .threads = threads,
                                       .parallel_for = check_parallel_for,
                                       .parallel_for_data = &most_threads};
  const nyb_status status = nyb_context_create(&options, &context);
  if (status == NYB_ERROR_UNSUPPORTED) {
    print_message("skipped %s: %s\n", nyb_isa_name(isa), nyb_last_error());
    return NULL;
  }
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  return context;
}

static nyb_format affine(int bits, nyb_dtype dtype) {
  return (nyb_format){.scheme = NYB_AFFINE, .bits = bits, .group_size = 32, .dtype = dtype};
}

static nyb_format plain(nyb_dtype dtype) {
  return (nyb_format){.scheme = NYB_PLAIN, .dtype = dtype};
}

static const nyb_format *formats(int *count) {
  static nyb_format all[9];
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  for (int i = 0; i < 3; i++) all[i] = plain((nyb_dtype)(NYB_F32 + i));
  for (int i = 0; i < 6; i++) all[3 + i] = affine(widths[i], (nyb_dtype)(NYB_F32 + i % 3));
  *count = 9;
  return all;
}

static int64_t row_bytes(const attention_shape *s) {
  return s->value_dim * (s->out_dtype == NYB_F32 ? 4 : 2);
}

/* The bits of a run; the caller frees them. */
static uint8_t *run(attention_scene *scene, nyb_context *context, nyb_path path) {
  uint8_t *bits = malloc((size_t)scene_bits_bytes(scene));
  assert_non_null(bits);
  const nyb_status status = scene_run(scene, &check_nybble, context, path);
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  scene_bits(scene, bits);
  return bits;
}

/* ---- How far one element reaches ------------------------------------------------------------- */

/* Two sequences, four heads over two, three causal rows; the second sequence has two chunks. */
static attention_shape causal_shape(const nyb_format *format, int turn) {
  return (attention_shape){.name = "one element not finite",
                           .batch = 2,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .query_len = 3,
                           .key_dim = 64,
                           .value_dim = 64,
                           .capacity_tokens = 1040,
                           .lengths = {40, 1030},
                           .key_format = *format,
                           .value_format = *format,
                           .query_dtype = (nyb_dtype)(NYB_F32 + turn % 3),
                           .out_dtype = turn % 2 == 0 ? NYB_BF16 : NYB_F32,
                           .rounding = turn % 4 < 2 ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX,
                           .mask = NYB_MASK_CAUSAL,
                           .seed = 11};
}

/* Whether a query row reads the poisoned element. */
static bool reads(const attention_shape *s, int64_t b, int64_t head, int64_t row) {
  const scene_poison *p = &s->poison;
  if (b != p->batch) return false;
  if (p->place == POISON_QUERY) return head == p->head && row == p->row;
  return head / (s->query_heads / s->kv_heads) == p->head && p->row < scene_visible(s, b, row);
}

/* Whether element d of such a row's output does. */
static bool reaches(const attention_shape *s, int64_t d) {
  const scene_poison *p = &s->poison;
  if (p->place != POISON_VALUE && p->place != POISON_VALUE_BIAS) return true;
  if (s->value_format.scheme == NYB_PLAIN) return d == p->element;
  return d / s->value_format.group_size == p->element / s->value_format.group_size;
}

static void expect_same_bits(const attention_scene *scene, const uint8_t *clean,
                             const uint8_t *dirty, int64_t offset, int64_t bytes, int64_t index) {
  char text[256];
  if (memcmp(clean + offset, dirty + offset, (size_t)bytes) == 0) return;
  scene_describe(scene, text, sizeof text);
  fail_msg("%s: bits of row %lld changed, which does not read the poison", text, (long long)index);
}

/* A NaN in q or K takes the row; in V, or an infinity there, the elements that it is a part of. An
 * infinity in q or K may be a score of -inf: the oracle knows that, not this. */
static void expect_poisoned_row(const attention_scene *scene, const uint8_t *clean,
                                const uint8_t *dirty, int64_t index) {
  const attention_shape *s = &scene->shape;
  const bool of_values = s->poison.place >= POISON_VALUE;
  const int64_t rows = s->batch * s->query_heads * s->query_len;
  const int64_t at = index * row_bytes(s), lse_at = rows * row_bytes(s) + index * 4;
  const int64_t element_bytes = row_bytes(s) / s->value_dim;
  if (!of_values && !isnan(s->poison.value)) return;
  if (of_values) {
    expect_same_bits(scene, clean, dirty, lse_at, 4, index);
  } else {
    assert_true(isnan(oracle_load(dirty + lse_at, NYB_F32, 0)));
  }
  for (int64_t d = 0; d < s->value_dim; d++) {
    if (!reaches(s, d)) {
      expect_same_bits(scene, clean, dirty, at + d * element_bytes, element_bytes, index);
      continue;
    }
    const double got = oracle_load(dirty + at, s->out_dtype, d);
    assert_true(isnan(s->poison.value) ? isnan(got) : !isfinite(got));
  }
}

static void compare(const attention_scene *scene, const uint8_t *clean, const uint8_t *dirty) {
  const attention_shape *s = &scene->shape;
  const int64_t rows = s->batch * s->query_heads * s->query_len;
  int64_t readers = 0;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = i % s->query_len, head = i / s->query_len % s->query_heads;
    if (reads(s, i / s->query_len / s->query_heads, head, row)) {
      expect_poisoned_row(scene, clean, dirty, i);
      readers++;
      continue;
    }
    expect_same_bits(scene, clean, dirty, i * row_bytes(s), row_bytes(s), i);
    expect_same_bits(scene, clean, dirty, rows * row_bytes(s) + i * 4, 4, i);
  }
  assert_true(readers > 0 && readers < rows);
}

/* A context and path whose runs must be alike, and the bits of the clean one. */
typedef struct runner {
  nyb_context *context;
  nyb_path path;
  uint8_t *clean;
} runner;

/* Each ISA that runs here, on one thread and on three; the compat path once: it has no ISA. */
enum { MAX_RUNNERS = 2 * NYB_ISA_NEON + 1 };
static int make_runners(runner *runners) {
  int count = 0;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    for (int64_t threads = 1; threads <= 3; threads += 2) {
      nyb_context *context = context_for(isa, threads);
      if (context == NULL) break;
      runners[count++] = (runner){.context = context, .path = NYB_PATH_FUSED};
    }
  }
  runners[count++] = (runner){.context = context_for(NYB_ISA_SCALAR, 3), .path = NYB_PATH_COMPAT};
  return count;
}

static void free_runners(runner *runners, int count) {
  for (int i = 0; i < count; i++) nyb_context_destroy(runners[i].context);
}

/* One element of one format poisoned in each place and way. */
static void poison_format(runner *runners, int runner_count, const nyb_format *format, int turn) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  const attention_shape shape = causal_shape(format, turn);
  attention_scene scene;
  assert_true(scene_make(&scene, &shape));
  for (int r = 0; r < runner_count; r++) {
    runners[r].clean = run(&scene, runners[r].context, runners[r].path);
  }
  for (int i = 0; i < 15; i++) {
    const poison_place place = (poison_place)(POISON_QUERY + i % 5);
    const scene_poison poison = {.place = place,
                                 .value = values[i / 5],
                                 .batch = 1,
                                 .head = 1,
                                 .row = place == POISON_QUERY ? 1
                                        : i % 2 == 0          ? 1028 /* row 0 does not see it */
                                                              : 500,
                                 .element = 7 * i % 64};
    scene_add_poison(&scene, &poison);
    for (int r = 0; r < runner_count; r++) {
      uint8_t *dirty = run(&scene, runners[r].context, runners[r].path);
      compare(&scene, runners[r].clean, dirty);
      free(dirty);
    }
    scene_restore_inputs(&scene);
  }
  for (int r = 0; r < runner_count; r++) free(runners[r].clean);
  scene_free(&scene);
}

static void test_poison_stays_where_it_is_read(void **state) {
  (void)state;
  int count;
  const nyb_format *all = formats(&count);
  runner runners[MAX_RUNNERS];
  const int runner_count = make_runners(runners);
  for (int i = 0; i < count; i++) poison_format(runners, runner_count, &all[i], i);
  free_runners(runners, runner_count);
}

/* ---- Scores of -inf are no tokens ------------------------------------------------------------ */

/* The scene's call over what follows its first tokens. */
static nyb_attention without_first(const attention_scene *scene, int32_t tokens, int32_t *length) {
  nyb_attention tail = scene->call;
  nyb_stored *const stored[] = {&tail.k, &tail.v};
  for (int i = 0; i < 2; i++) {
    nyb_stored *s = stored[i];
    const bool plain_rows = s->format.scheme == NYB_PLAIN;
    const int64_t bytes = s->format.dtype == NYB_F32 ? 4 : 2;
    s->codes = (const char *)s->codes + tokens * s->codes_stride[2] * (plain_rows ? bytes : 4);
    if (plain_rows) continue;
    s->scales = (const char *)s->scales + tokens * s->scales_stride[2] * bytes;
    s->biases = (const char *)s->biases + tokens * s->biases_stride[2] * bytes;
  }
  *length = scene->shape.lengths[0] - tokens;
  tail.lengths = length;
  tail.capacity_tokens -= tokens;
  return tail;
}

/* Leading whole tiles of a chunk, or whole chunks, whose scores are -inf. */
static void expect_like_without(const runner *r, attention_scene *scene, int32_t tokens) {
  int32_t tail_length;
  uint8_t *whole = run(scene, r->context, NYB_PATH_FUSED);
  uint8_t *tail = malloc((size_t)scene_bits_bytes(scene));
  assert_non_null(tail);
  const nyb_attention call = without_first(scene, tokens, &tail_length);
  check_buffer_poison(&scene->out);
  check_buffer_poison(&scene->lse);
  assert_int_equal(
      nyb_attention_run(r->context, &call, scene->workspace, scene->workspace_bytes, NULL), NYB_OK);
  scene_bits(scene, tail);
  assert_memory_equal(whole, tail, (size_t)scene_bits_bytes(scene));
  free(whole);
  free(tail);
}

static attention_shape shape_of_minus_infinity(const nyb_format *format, int32_t tokens,
                                               int32_t length) {
  return (attention_shape){.name = "-inf first",
                           .batch = 1,
                           .query_heads = 6,
                           .kv_heads = 2,
                           .query_len = 1,
                           .key_dim = 64,
                           .value_dim = 96,
                           .capacity_tokens = length,
                           .lengths = {length},
                           .key_format = *format,
                           .value_format = *format,
                           .query_dtype = NYB_F16,
                           .out_dtype = length % 200 == 0 ? NYB_F16 : NYB_F32,
                           .rounding = NYB_ROUNDING_MLX,
                           .queries = QUERIES_ALONG,
                           .overflow = {.first = 0, .end = tokens},
                           .seed = 12};
}

static void test_minus_infinity_is_no_token(void **state) {
  (void)state;
  static const int32_t cases[][2] = {{64, 200}, {128, 129}, {1024, 1100}, {2048, 2100}};
  int count;
  const nyb_format *all = formats(&count);
  runner runners[MAX_RUNNERS];
  const int runner_count = make_runners(runners);
  for (int i = 0; i < 4 * count; i++) {
    const int32_t tokens = cases[i % 4][0];
    const attention_shape shape = shape_of_minus_infinity(&all[i / 4], tokens, cases[i % 4][1]);
    attention_scene scene;
    assert_true(scene_make(&scene, &shape));
    for (int r = 0; r < runner_count - 1; r++) expect_like_without(&runners[r], &scene, tokens);
    scene_free(&scene);
  }
  free_runners(runners, runner_count);
}

/* ---- Rows of -inf alone ---------------------------------------------------------------------- */

/* softmax of nothing but -inf is 0/0, on both paths, and its log-sum-exp -inf; a row that sees no
 * token is another matter and 0. */
static void test_only_minus_infinity(void **state) {
  (void)state;
  static const int32_t lengths[] = {1, 64, 100, 1024, 1100};
  nyb_context *context = context_for(NYB_ISA_AUTO, 2);
  for (int i = 0; i < 5; i++) {
    const attention_shape shape = {.name = "-inf alone",
                                   .batch = 2,
                                   .query_heads = 2,
                                   .kv_heads = 1,
                                   .query_len = 1,
                                   .key_dim = 64,
                                   .value_dim = 64,
                                   .capacity_tokens = lengths[i],
                                   .lengths = {0, lengths[i]},
                                   .key_format = affine(4, NYB_F16),
                                   .value_format = affine(4, NYB_F16),
                                   .query_dtype = NYB_F16,
                                   .out_dtype = NYB_F16,
                                   .rounding = NYB_ROUNDING_MLX,
                                   .queries = QUERIES_ALONG,
                                   .overflow = {.first = 0, .end = lengths[i]},
                                   .seed = 13};
    attention_scene scene;
    assert_true(scene_make(&scene, &shape));
    for (nyb_path path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
      uint8_t *bits = run(&scene, context, path);
      for (int64_t row = 0; row < 4; row++) {
        assert_true(oracle_load(bits + 4 * row_bytes(&shape), NYB_F32, row) == -INFINITY);
        for (int64_t d = 0; d < 64; d++) {
          const double got = oracle_load(bits, NYB_F16, row * 64 + d);
          assert_true(row < 2 ? got == 0 : isnan(got));
        }
      }
      free(bits);
    }
    scene_free(&scene);
  }
  nyb_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_poison_stays_where_it_is_read),
      cmocka_unit_test(test_minus_infinity_is_no_token),
      cmocka_unit_test(test_only_minus_infinity),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
