/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of starts, pages, rings and parts share: contexts, random shapes, and that bits do
 * not depend on threads or on other sequences. */
#ifndef PLACES_CASES_H
#define PLACES_CASES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attention_places.h"
#include "check_attention.h"

/* Fewer under a sanitizer or an emulator. */
static inline int places_cases(void) { return getenv("NYBBLE_TESTS_QUICK") != NULL ? 8 : 32; }

static const int64_t thread_counts[] = {1, 2, 3, 7};
enum { THREAD_COUNTS = 4, ISAS = NYB_ISA_NEON + 1 };

/* Contexts of every ISA that runs here, on each number of threads, by a parallel-for that starts
 * them all. */
static nyb_context *places_contexts[ISAS][THREAD_COUNTS];

static inline int places_open(void **state) {
  (void)state;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    for (int i = 0; i < THREAD_COUNTS; i++) {
      const nyb_context_options options = {
          .struct_size = sizeof options,
          .isa = isa,
          .threads = thread_counts[i],
          .parallel_for = check_parallel_for,
          .parallel_for_data = (void *)(uintptr_t)&thread_counts[i]};
      const nyb_status status = nyb_context_create(&options, &places_contexts[isa][i]);
      if (status == NYB_ERROR_UNSUPPORTED) break;
      if (status != NYB_OK) return -1;
    }
  }
  return 0;
}

static inline int places_close(void **state) {
  (void)state;
  for (int i = 0; i < ISAS * THREAD_COUNTS; i++) {
    nyb_context_destroy(places_contexts[i / THREAD_COUNTS][i % THREAD_COUNTS]);
  }
  return 0;
}

/* ---- Bits --------------------------------------------------------------------------------- */

static inline void places_run(attention_scene *scene, placed_scene *placed, nyb_isa isa,
                              int threads, nyb_path path, uint8_t *bits) {
  char text[256], shape[320];
  scene_describe(scene, shape, sizeof shape);
  const nyb_status status = placed_run(scene, placed, &check_nybble, places_contexts[isa][threads],
                                       path, bits, text, sizeof text);
  if (status != NYB_OK) fail_msg("%s: %s", shape, text);
}

static inline nyb_stored stored_of_sequence(const nyb_stored *stored, int64_t b) {
  nyb_stored moved = *stored;
  const int64_t bytes = stored->format.dtype == NYB_F32 ? 4 : 2;
  const bool plain = stored->format.scheme == NYB_PLAIN;
  if (stored->codes == NULL) return moved;
  moved.codes = (const char *)stored->codes + b * stored->codes_stride[0] * (plain ? bytes : 4);
  if (plain) return moved;
  moved.scales = (const char *)stored->scales + b * stored->scales_stride[0] * bytes;
  moved.biases = (const char *)stored->biases + b * stored->biases_stride[0] * bytes;
  return moved;
}

/* The call of one sequence of the batch. */
static inline nyb_attention sequence_alone(const nyb_attention *call, int64_t b) {
  nyb_attention a = *call;
  const int64_t q_bytes = (int64_t)nyb_dtype_bytes(a.q.dtype);
  const int64_t out_bytes = (int64_t)nyb_dtype_bytes(a.out.dtype);
  a.batch = 1;
  a.lengths += b;
  a.q.data = (const char *)a.q.data + b * a.q.stride[0] * q_bytes;
  a.out.data = (char *)a.out.data + b * a.out.stride[0] * out_bytes;
  a.lse.data = (float *)a.lse.data + b * a.lse.stride[0];
  if (a.mask_array.kind != 0) {
    const bool bytes = a.mask_array.kind == NYB_MASK_ARRAY_BOOL;
    const int64_t size = bytes ? 1 : (int64_t)nyb_dtype_bytes(a.mask_array.dtype);
    a.mask_array.data = (const char *)a.mask_array.data + b * a.mask_array.stride[0] * size;
  }
  if (a.starts != NULL) a.starts += b;
  if (a.ring.offsets != NULL) a.ring.offsets += b;
  if (a.last_begins != NULL) a.last_begins += b;
  if (a.pages.table != NULL) {
    a.pages.table += b * a.pages.table_stride;
    return a;
  }
  nyb_stored *const rows[] = {&a.k, &a.v, &a.first.k, &a.first.v, &a.last.k, &a.last.v};
  for (int i = 0; i < 6; i++) *rows[i] = stored_of_sequence(rows[i], b);
  return a;
}

/* The bits of the sequences one by one. */
static inline void run_alone(attention_scene *scene, const placed_scene *placed, nyb_isa isa,
                             nyb_path path, uint8_t *bits) {
  const nyb_attention own = scene->call;
  nyb_context *context = places_contexts[isa][2];
  scene->call = placed->call;
  assert_int_equal(scene_prepare(scene, context, path), NYB_OK);
  for (int64_t b = 0; b < scene->shape.batch; b++) {
    const nyb_attention alone = sequence_alone(&scene->call, b);
    const nyb_status status =
        nyb_attention_run(context, &alone, scene->workspace, scene->workspace_bytes, NULL);
    if (status != NYB_OK) fail_msg("sequence %lld alone: %s", (long long)b, nyb_last_error());
  }
  scene_bits(scene, bits);
  scene->call = own;
}

static inline void assert_equal_bits(const attention_scene *scene, const uint8_t *got,
                                     const uint8_t *want, nyb_isa isa, nyb_path path,
                                     int64_t threads, const char *what) {
  char shape[320];
  const int64_t bytes = scene_bits_bytes(scene);
  if (memcmp(got, want, (size_t)bytes) == 0) return;
  scene_describe(scene, shape, sizeof shape);
  fail_msg("%s, %s, %s, path %d, %lld threads: other bits", what, shape, nyb_isa_name(isa),
           (int)path, (long long)threads);
}

/* The placed call leaves these bits on every number of threads, and each sequence alone. */
static inline void assert_bits_again(attention_scene *scene, placed_scene *placed, nyb_isa isa,
                                     nyb_path path, const uint8_t *want, const char *what) {
  uint8_t *got = malloc((size_t)scene_bits_bytes(scene));
  assert_non_null(got);
  for (int i = 0; i < (path == NYB_PATH_COMPAT ? 2 : THREAD_COUNTS); i++) {
    places_run(scene, placed, isa, i, path, got);
    assert_equal_bits(scene, got, want, isa, path, thread_counts[i], what);
  }
  run_alone(scene, placed, isa, path, got);
  assert_equal_bits(scene, got, want, isa, path, 0, what);
  free(got);
}

#endif
