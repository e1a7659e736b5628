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
#include <string.h>

#include <cmocka.h>

#include "attention_places.h"
#include "check_attention.h"

static const int64_t thread_counts[] = {1, 2, 3, 7};
enum { THREAD_COUNTS = 4, ISAS = NYB_ISA_NEON + 1 };

/* Contexts of every ISA that runs here, on each number of threads, by a parallel-for that starts
 * them all. */
static nyb_context *contexts[ISAS][THREAD_COUNTS];

static int make_contexts(void **state) {
  (void)state;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    for (int i = 0; i < THREAD_COUNTS; i++) {
      const nyb_context_options options = {
          .struct_size = sizeof options,
          .isa = isa,
          .threads = thread_counts[i],
          .parallel_for = check_parallel_for,
          .parallel_for_data = (void *)(uintptr_t)&thread_counts[i]};
      const nyb_status status = nyb_context_create(&options, &contexts[isa][i]);
      if (status == NYB_ERROR_UNSUPPORTED) break;
      if (status != NYB_OK) return -1;
    }
  }
  return 0;
}

static int end_contexts(void **state) {
  (void)state;
  for (int i = 0; i < ISAS * THREAD_COUNTS; i++) {
    nyb_context_destroy(contexts[i / THREAD_COUNTS][i % THREAD_COUNTS]);
  }
  return 0;
}

/* ---- Random shapes ------------------------------------------------------------------------ */

static int64_t pick(check_random *random, const int64_t *from, int64_t count) {
  return from[check_random_below(random, count)];
}
#define PICK(random, ...)                        \
  pick((random), (const int64_t[]){__VA_ARGS__}, \
       (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static nyb_format random_format(check_random *random, int64_t dim) {
  nyb_format format;
  while (!choose_format((int)check_random_below(random, FORMATS), dim,
                        check_random_below(random, 9), &format)) {
  }
  return format;
}

/* Up to three sequences of up to `most_tokens` tokens, none among them. */
static attention_shape random_shape(const char *name, int64_t most_tokens, check_random *random) {
  const int64_t kv_heads = PICK(random, 1, 2);
  attention_shape shape = {
      .name = name,
      .batch = 1 + check_random_below(random, 3),
      .query_heads = kv_heads * PICK(random, 1, 3, 4),
      .kv_heads = kv_heads,
      .query_len = PICK(random, 1, 1, 1, 2, 5, 19),
      .key_dim = PICK(random, 32, 64, 96, 128),
      .value_dim = PICK(random, 32, 64, 96, 128),
      .query_dtype = (nyb_dtype)PICK(random, NYB_F32, NYB_F16, NYB_BF16),
      .out_dtype = (nyb_dtype)PICK(random, NYB_F32, NYB_F16, NYB_BF16),
      .mask = (nyb_mask)PICK(random, NYB_MASK_NONE, NYB_MASK_CAUSAL),
      .rounding = (nyb_rounding)PICK(random, NYB_ROUNDING_EXACT, NYB_ROUNDING_MLX),
      .swapped = check_random_below(random, 2) == 1,
      .gap = check_random_below(random, 2),
      .seed = check_random_bits(random),
  };
  shape.key_format = random_format(random, shape.key_dim);
  shape.value_format = random_format(random, shape.value_dim);
  for (int64_t b = 0; b < shape.batch; b++) {
    shape.lengths[b] = (int32_t)check_random_below(random, most_tokens + 1);
    if (shape.lengths[b] > shape.capacity_tokens) shape.capacity_tokens = shape.lengths[b];
  }
  shape.capacity_tokens += check_random_below(random, 80);
  if (shape.capacity_tokens < 2) shape.capacity_tokens = 2;
  return shape;
}

/* Lengths of a few tiles mostly, of a few chunks now and then. */
static int64_t random_most_tokens(check_random *random) { return PICK(random, 70, 300, 300, 2600); }

/* ---- The same bits ------------------------------------------------------------------------ */

/* The scene's bits where its own call, contiguous, leaves them, and where the placed one does. */
static void assert_same_bits(attention_scene *scene, placed_scene *placed, nyb_isa isa,
                             nyb_path path, const char *what) {
  char text[256], shape[320];
  const size_t bytes = (size_t)scene_bits_bytes(scene);
  uint8_t *want = malloc(bytes), *got = malloc(bytes);
  assert_non_null(want);
  assert_non_null(got);
  scene_describe(scene, shape, sizeof shape);
  assert_int_equal(scene_run(scene, &check_nybble, contexts[isa][0], path), NYB_OK);
  scene_bits(scene, want);
  for (int i = 0; i < THREAD_COUNTS; i++) {
    if (path == NYB_PATH_COMPAT && i > 1) break;
    const nyb_status status =
        placed_run(scene, placed, contexts[isa][i], path, got, text, sizeof text);
    if (status != NYB_OK) fail_msg("%s, %s: %s", what, shape, text);
    for (size_t at = 0; at < bytes; at++) {
      if (got[at] == want[at]) continue;
      fail_msg("%s, %s, %s, path %d, %lld threads: byte %zu of %zu differs", what, shape,
               nyb_isa_name(isa), (int)path, (long long)thread_counts[i], at, bytes);
    }
  }
  free(want);
  free(got);
}

static void assert_same_on_all(attention_scene *scene, placed_scene *placed, const char *what) {
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    if (contexts[isa][0] != NULL) assert_same_bits(scene, placed, isa, NYB_PATH_FUSED, what);
  }
  assert_same_bits(scene, placed, NYB_ISA_SCALAR, NYB_PATH_COMPAT, what);
}

enum { CASES = 60 };

static void test_starts(void **state) {
  (void)state;
  check_random random = {.state = 1};
  for (int i = 0; i < CASES; i++) {
    const attention_shape shape = random_shape("starts", random_most_tokens(&random), &random);
    attention_scene scene;
    placed_scene placed;
    assert_true(scene_make(&scene, &shape));
    assert_true(place_behind_padding(&scene, &random, &placed));
    assert_same_on_all(&scene, &placed, "starts");
    placed_free(&placed);
    scene_free(&scene);
  }
}

static void test_pages(void **state) {
  (void)state;
  check_random random = {.state = 2};
  for (int i = 0; i < 2 * CASES; i++) {
    const attention_shape shape = random_shape("pages", random_most_tokens(&random), &random);
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
  for (int i = 0; i < CASES; i++) {
    const attention_shape shape = random_shape("ring", random_most_tokens(&random), &random);
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_starts),
      cmocka_unit_test(test_pages),
      cmocka_unit_test(test_ring),
  };
  return cmocka_run_group_tests(tests, make_contexts, end_contexts);
}
