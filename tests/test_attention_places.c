/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens of attention may stand: behind padding, in pages, in a ring, in three parts. The
 * first three promise the bits of the same tokens laid out one after the other, on every ISA, path
 * and rounding; parts are held against the oracle. */
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
  for (int i = 0; i < PLACES_CASES; i++) {
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
  for (int i = 0; i < 2 * PLACES_CASES; i++) {
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
  for (int i = 0; i < PLACES_CASES; i++) {
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
  return cmocka_run_group_tests(tests, places_open, places_close);
}
