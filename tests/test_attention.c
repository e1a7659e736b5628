/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through the public API: what it refuses and how, the choice of the path, views, memory
 * and the field cases that are no matter of one kernel. The numbers are the checks' business. */
#define _DEFAULT_SOURCE /* setenv, clock_gettime, MAP_NORESERVE */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

#include "attention_scene.h"

static nyb_context *make_context(int64_t threads) {
  nyb_context *context;
  const nyb_context_options options = {.struct_size = sizeof options, .threads = threads};
  assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  return context;
}

static nyb_format affine(int bits, int group_size) {
  return (nyb_format){
      .scheme = NYB_AFFINE, .bits = bits, .group_size = group_size, .dtype = NYB_BF16};
}

static nyb_format plain(nyb_dtype dtype) {
  return (nyb_format){.scheme = NYB_PLAIN, .dtype = dtype};
}

/* A small call that is right: batch 2, 4 query heads over 2 KV heads, 3 query rows. */
static attention_shape small_shape(void) {
  return (attention_shape){.name = "small",
                           .batch = 2,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .query_len = 3,
                           .key_dim = 64,
                           .value_dim = 96,
                           .capacity_tokens = 20,
                           .lengths = {20, 7},
                           .key_format = affine(4, 64),
                           .value_format = affine(8, 32),
                           .query_dtype = NYB_BF16,
                           .out_dtype = NYB_BF16,
                           .seed = 5};
}

static void make_scene(attention_scene *scene, const attention_shape *shape) {
  assert_true(scene_make(scene, shape));
}

static void run_scene(attention_scene *scene, nyb_context *context) {
  const nyb_status status = scene_run(scene, &check_nybble, context, NYB_PATH_FUSED);
  if (status != NYB_OK) fail_msg("%s: %s", nyb_status_name(status), nyb_last_error());
}

/* The scene's outputs are what the oracle expects of its stored rows as they now are. */
static void assert_right(attention_scene *scene, nyb_context *context) {
  scene_expected expected;
  char text[256];
  double worst;
  run_scene(scene, context);
  assert_true(scene_expect(scene, NYB_PATH_FUSED, ORACLE_CPU, &expected));
  const scene_fault fault = scene_compare(scene, &expected, &worst, text, sizeof text);
  scene_expected_free(&expected);
  if (fault != SCENE_GOOD && fault != SCENE_STRAY_WRITE) fail_msg("%s", text);
}

/* ---- Refusals ----------------------------------------------------------------------------- */

/* A right call that each case spoils in one way. */
typedef struct refusal {
  nyb_context *context;
  attention_scene scene;
  nyb_attention call;
  void *workspace;
  size_t workspace_bytes;
  int refused;
} refusal;

static void refusal_begin(refusal *r) {
  const attention_shape shape = small_shape();
  nyb_plan plan = NYB_PLAN_INIT;
  *r = (refusal){.context = make_context(2)};
  make_scene(&r->scene, &shape);
  r->call = r->scene.call;
  assert_int_equal(nyb_attention_plan(r->context, &r->call, &plan), NYB_OK);
  r->workspace_bytes = (plan.workspace_bytes + 63) / 64 * 64 + 64;
  r->workspace = aligned_alloc(64, r->workspace_bytes);
  assert_non_null(r->workspace);
  check_buffer_poison(&r->scene.out);
  check_buffer_seal(&r->scene.out);
  check_buffer_poison(&r->scene.lse);
  check_buffer_seal(&r->scene.lse);
  assert_int_equal(nyb_attention_run(r->context, &r->call, r->workspace, r->workspace_bytes, NULL),
                   NYB_OK);
  check_buffer_poison(&r->scene.out);
  check_buffer_poison(&r->scene.lse);
}

static void refusal_end(refusal *r) {
  nyb_counters counters = NYB_COUNTERS_INIT;
  assert_int_equal(nyb_counters_get(r->context, &counters), NYB_OK);
  assert_int_equal(counters.attention_fused, 1); /* the right call at the beginning */
  assert_int_equal(counters.attention_compat, 0);
  assert_true(r->refused > 0);
  free(r->workspace);
  scene_free(&r->scene);
  nyb_context_destroy(r->context);
}

static void expect_sentence(nyb_status status, nyb_status want, const char *words) {
  if (status != want) {
    fail_msg("got %s, want %s (%s)", nyb_status_name(status), nyb_status_name(want), words);
  }
  if (strstr(nyb_last_error(), words) == NULL) {
    fail_msg("\"%s\" does not say \"%s\"", nyb_last_error(), words);
  }
}

/* run refuses the call with that status, a sentence that has the words, and without a write. */
static void expect_run_refused(refusal *r, const nyb_attention *call, void *workspace,
                               size_t workspace_bytes, nyb_status want, const char *words) {
  expect_sentence(nyb_attention_run(r->context, call, workspace, workspace_bytes, NULL), want,
                  words);
  assert_int_equal(check_buffer_changed(&r->scene.out), CHECK_UNCHANGED);
  assert_int_equal(check_buffer_changed(&r->scene.lse), CHECK_UNCHANGED);
  r->refused++;
}

/* Both plan and run do. */
static void expect_refused(refusal *r, const nyb_attention *call, nyb_status want,
                           const char *words) {
  nyb_plan plan = NYB_PLAN_INIT;
  expect_sentence(nyb_attention_plan(r->context, call, &plan), want, words);
  expect_run_refused(r, call, r->workspace, r->workspace_bytes, want, words);
}

/* Spoils one field for the two statements. */
#define REFUSED(r, field, value, status, words)       \
  do {                                                \
    nyb_attention spoiled = (r)->call;                \
    spoiled.field = (value);                          \
    expect_refused((r), &spoiled, (status), (words)); \
  } while (0)

static void test_refuses_null_and_size(void **state) {
  (void)state;
  refusal r;
  nyb_plan plan = NYB_PLAN_INIT;
  refusal_begin(&r);
  assert_int_equal(nyb_attention_plan(NULL, &r.call, &plan), NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_plan(r.context, NULL, &plan), NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_plan(r.context, &r.call, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_run(NULL, &r.call, r.workspace, r.workspace_bytes, NULL),
                   NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_run(r.context, NULL, r.workspace, r.workspace_bytes, NULL),
                   NYB_ERROR_NULL);
  REFUSED(&r, struct_size, 0, NYB_ERROR_STRUCT_SIZE, "struct_size is 0");
  REFUSED(&r, struct_size, sizeof(nyb_attention) - 8, NYB_ERROR_STRUCT_SIZE, "struct_size");
  plan.struct_size = 3;
  expect_sentence(nyb_attention_plan(r.context, &r.call, &plan), NYB_ERROR_STRUCT_SIZE,
                  "plan.struct_size is 3");
  /* A caller of a later version: more bytes, known only if they are 0. */
  struct {
    nyb_attention call;
    int64_t later[2];
  } grown = {.call = r.call};
  grown.call.struct_size = sizeof grown;
  plan.struct_size = sizeof plan;
  assert_int_equal(nyb_attention_plan(r.context, &grown.call, &plan), NYB_OK);
  grown.later[1] = 1;
  expect_refused(&r, &grown.call, NYB_ERROR_STRUCT_SIZE, "struct_size");
  refusal_end(&r);
}

static void test_refuses_shapes(void **state) {
  (void)state;
  refusal r;
  refusal_begin(&r);
  REFUSED(&r, batch, 0, NYB_ERROR_SHAPE, "batch is 0");
  REFUSED(&r, batch, -1, NYB_ERROR_SHAPE, "batch is -1");
  REFUSED(&r, batch, INT64_MAX, NYB_ERROR_SHAPE, "batch is 9223372036854775807");
  REFUSED(&r, kv_heads, 0, NYB_ERROR_SHAPE, "kv_heads is 0"); /* field case 23 */
  REFUSED(&r, query_heads, 0, NYB_ERROR_SHAPE, "query_heads is 0");
  REFUSED(&r, query_heads, INT64_MIN, NYB_ERROR_SHAPE, "query_heads is -9223372036854775808");
  REFUSED(&r, query_len, 0, NYB_ERROR_SHAPE, "query_len is 0");
  REFUSED(&r, query_len, INT64_MAX, NYB_ERROR_SHAPE, "query_len is 9223372036854775807");
  REFUSED(&r, key_dim, 0, NYB_ERROR_SHAPE, "key_dim is 0");
  REFUSED(&r, value_dim, -64, NYB_ERROR_SHAPE, "value_dim is -64");
  REFUSED(&r, key_dim, INT64_MAX - 63, NYB_ERROR_SHAPE, "key_dim is");
  REFUSED(&r, capacity_tokens, -1, NYB_ERROR_SHAPE, "capacity_tokens is -1");
  REFUSED(&r, capacity_tokens, INT64_MAX, NYB_ERROR_SHAPE, "capacity_tokens is");
  REFUSED(&r, query_heads, 3, NYB_ERROR_HEADS, "query_heads is 3"); /* over 2: field case 23 */
  REFUSED(&r, query_heads, 33, NYB_ERROR_HEADS, "query_heads is 33");
  refusal_end(&r);
}

static void test_refuses_formats(void **state) {
  (void)state;
  static const int32_t no_widths[] = {-1, 0, 1, 7, 9, 16, 32};
  static const int32_t no_groups[] = {-64, 0, 1, 16, 48, 256};
  refusal r;
  refusal_begin(&r);
  REFUSED(&r, k.format.scheme, (nyb_scheme)0, NYB_ERROR_ENUM, "k.format.scheme is 0");
  REFUSED(&r, v.format.scheme, (nyb_scheme)3, NYB_ERROR_ENUM, "v.format.scheme is 3");
  REFUSED(&r, k.format.dtype, (nyb_dtype)0, NYB_ERROR_ENUM, "k.format.dtype is 0");
  REFUSED(&r, v.format.dtype, (nyb_dtype)9, NYB_ERROR_ENUM, "v.format.dtype is 9");
  for (size_t i = 0; i < sizeof no_widths / sizeof no_widths[0]; i++) {
    REFUSED(&r, k.format.bits, no_widths[i], NYB_ERROR_BITS, "k.format.bits is");
    REFUSED(&r, v.format.bits, no_widths[i], NYB_ERROR_BITS, "v.format.bits is");
  }
  for (size_t i = 0; i < sizeof no_groups / sizeof no_groups[0]; i++) {
    REFUSED(&r, k.format.group_size, no_groups[i], NYB_ERROR_GROUP_SIZE, "k.format.group_size is");
  }
  /* Field case 18: 96 over 64; 80 over anything. */
  REFUSED(&r, v.format.group_size, 64, NYB_ERROR_GROUP_SIZE, "value_dim, 96");
  for (int32_t group_size = 32; group_size <= 128; group_size *= 2) {
    nyb_attention odd = r.call;
    odd.key_dim = 80;
    odd.k.format.group_size = group_size;
    expect_refused(&r, &odd, NYB_ERROR_GROUP_SIZE, "key_dim, 80");
  }
  nyb_attention plain_with_bits = r.call;
  plain_with_bits.k.format = plain(NYB_BF16);
  plain_with_bits.k.format.bits = 16;
  expect_refused(&r, &plain_with_bits, NYB_ERROR_BITS, "k.format.bits is 16");
  refusal_end(&r);
}

static void test_refuses_choices(void **state) {
  (void)state;
  refusal r;
  refusal_begin(&r);
  REFUSED(&r, mask, (nyb_mask)3, NYB_ERROR_ENUM, "mask is 3");
  REFUSED(&r, path, (nyb_path)3, NYB_ERROR_ENUM, "path is 3");
  REFUSED(&r, rounding, (nyb_rounding)-1, NYB_ERROR_ENUM, "rounding is -1");
  REFUSED(&r, q.dtype, (nyb_dtype)0, NYB_ERROR_ENUM, "q.dtype is 0");
  REFUSED(&r, out.dtype, (nyb_dtype)4, NYB_ERROR_ENUM, "out.dtype is 4");
  REFUSED(&r, lse.dtype, NYB_BF16, NYB_ERROR_DTYPE, "lse.dtype is");
  REFUSED(&r, scale, 0, NYB_ERROR_VALUE, "scale is 0");
  REFUSED(&r, scale, NAN, NYB_ERROR_NON_FINITE, "attention.scale is NaN;");
  REFUSED(&r, scale, -NAN, NYB_ERROR_NON_FINITE, "attention.scale is NaN;");
  REFUSED(&r, scale, INFINITY, NYB_ERROR_NON_FINITE, "attention.scale is infinity;");
  REFUSED(&r, scale, -INFINITY, NYB_ERROR_NON_FINITE, "attention.scale is -infinity;");
  int on_the_cpu = 0;
  expect_sentence(
      nyb_attention_run(r.context, &r.call, r.workspace, r.workspace_bytes, &on_the_cpu),
      NYB_ERROR_VALUE, "stream");
  refusal_end(&r);
}

static void test_refuses_lengths(void **state) {
  (void)state;
  static const int32_t wrong[][2] = {{20, -1}, {21, 7}, {INT32_MIN, 0}, {0, INT32_MAX}};
  refusal r;
  refusal_begin(&r);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    nyb_attention call = r.call;
    char words[48];
    const int at = wrong[i][0] < 0 || wrong[i][0] > 20 ? 0 : 1;
    call.lengths = wrong[i];
    snprintf(words, sizeof words, "lengths[%d] is %d", at, (int)wrong[i][at]);
    expect_run_refused(&r, &call, r.workspace, r.workspace_bytes, NYB_ERROR_LENGTH, words);
  }
  nyb_attention none = r.call;
  none.lengths = NULL;
  expect_run_refused(&r, &none, r.workspace, r.workspace_bytes, NYB_ERROR_NULL, "lengths is NULL");
  refusal_end(&r);
}

/* run refuses; plan takes NULL, as at model load. */
#define NULL_REFUSED(r, field, words)                                                       \
  do {                                                                                      \
    nyb_attention spoiled = (r)->call;                                                      \
    nyb_plan plan = NYB_PLAN_INIT;                                                          \
    spoiled.field = NULL;                                                                   \
    assert_int_equal(nyb_attention_plan((r)->context, &spoiled, &plan), NYB_OK);            \
    expect_run_refused((r), &spoiled, (r)->workspace, (r)->workspace_bytes, NYB_ERROR_NULL, \
                       words);                                                              \
  } while (0)
#define SHIFTED(pointer, bytes) ((void *)((uintptr_t)(pointer) + (bytes)))

static void test_refuses_pointers(void **state) {
  (void)state;
  refusal r;
  refusal_begin(&r);
  NULL_REFUSED(&r, q.data, "q.data is NULL");
  NULL_REFUSED(&r, k.codes, "k.codes is NULL");
  NULL_REFUSED(&r, k.scales, "k.scales is NULL");
  NULL_REFUSED(&r, k.biases, "k.biases is NULL");
  NULL_REFUSED(&r, v.codes, "v.codes is NULL");
  NULL_REFUSED(&r, v.scales, "v.scales is NULL");
  NULL_REFUSED(&r, v.biases, "v.biases is NULL");
  NULL_REFUSED(&r, out.data, "out.data is NULL");
  REFUSED(&r, q.data, SHIFTED(r.call.q.data, 1), NYB_ERROR_ALIGNMENT, "q.data is");
  REFUSED(&r, k.codes, SHIFTED(r.call.k.codes, 2), NYB_ERROR_ALIGNMENT, "k.codes is");
  REFUSED(&r, v.scales, SHIFTED(r.call.v.scales, 1), NYB_ERROR_ALIGNMENT, "v.scales is");
  REFUSED(&r, v.biases, SHIFTED(r.call.v.biases, 1), NYB_ERROR_ALIGNMENT, "v.biases is");
  REFUSED(&r, out.data, SHIFTED(r.call.out.data, 1), NYB_ERROR_ALIGNMENT, "out.data is");
  REFUSED(&r, lse.data, SHIFTED(r.call.lse.data, 2), NYB_ERROR_ALIGNMENT, "lse.data is");
  REFUSED(&r, lengths, SHIFTED(r.call.lengths, 2), NYB_ERROR_ALIGNMENT, "lengths is");
  refusal_end(&r);
}

static void test_refuses_strides_and_overlap(void **state) {
  (void)state;
  refusal r;
  refusal_begin(&r);
  REFUSED(&r, out.stride[2], 0, NYB_ERROR_STRIDE, "out.data has stride 0");
  REFUSED(&r, out.stride[2], 95, NYB_ERROR_STRIDE, "out.data has stride 95");
  REFUSED(&r, out.stride[1], 96, NYB_ERROR_STRIDE, "out.data has stride 96");
  REFUSED(&r, lse.stride[0], 1, NYB_ERROR_STRIDE, "lse.data has stride 1");
  REFUSED(&r, q.stride[0], INT64_MAX, NYB_ERROR_STRIDE, "q.data");
  REFUSED(&r, k.codes_stride[2], INT64_MAX / 2, NYB_ERROR_STRIDE, "k.codes");
  REFUSED(&r, v.scales_stride[1], INT64_MIN, NYB_ERROR_STRIDE, "v.scales");
  REFUSED(&r, out.stride[0], INT64_MIN / 2, NYB_ERROR_STRIDE, "out.data");
  REFUSED(&r, q.data, r.call.out.data, NYB_ERROR_OVERLAP, "out.data");
  REFUSED(&r, out.data, (void *)(uintptr_t)r.call.v.codes, NYB_ERROR_OVERLAP, "out.data");
  REFUSED(&r, out.data, (void *)(uintptr_t)r.call.k.scales, NYB_ERROR_OVERLAP, "out.data");
  REFUSED(&r, lse.data, r.call.out.data, NYB_ERROR_OVERLAP, "lse.data");
  REFUSED(&r, lengths, (int32_t *)r.call.out.data, NYB_ERROR_OVERLAP, "out.data");
  refusal_end(&r);
}

static void test_refuses_workspace(void **state) {
  (void)state;
  refusal r;
  nyb_plan plan = NYB_PLAN_INIT;
  refusal_begin(&r);
  assert_int_equal(nyb_attention_plan(r.context, &r.call, &plan), NYB_OK);
  assert_int_equal(plan.workspace_bytes % NYB_WORKSPACE_ALIGNMENT, 0);
  assert_true(plan.workspace_bytes > 0);
  expect_run_refused(&r, &r.call, NULL, plan.workspace_bytes, NYB_ERROR_WORKSPACE,
                     "workspace is NULL");
  expect_run_refused(&r, &r.call, r.workspace, plan.workspace_bytes - 1, NYB_ERROR_WORKSPACE,
                     "workspace_bytes is");
  expect_run_refused(&r, &r.call, r.workspace, 0, NYB_ERROR_WORKSPACE, "workspace_bytes is 0");
  expect_run_refused(&r, &r.call, SHIFTED(r.workspace, 32), plan.workspace_bytes,
                     NYB_ERROR_WORKSPACE, "workspace is at");
  nyb_attention inside = r.call;
  inside.out.data = r.workspace;
  expect_run_refused(&r, &inside, r.workspace, r.workspace_bytes, NYB_ERROR_OVERLAP, "workspace");
  inside = r.call;
  inside.q.data = r.workspace;
  expect_run_refused(&r, &inside, r.workspace, r.workspace_bytes, NYB_ERROR_OVERLAP, "workspace");
  refusal_end(&r);
}

/* ---- Plan and path ------------------------------------------------------------------------ */

static nyb_plan plan_of(nyb_context *context, const nyb_attention *call) {
  nyb_plan plan = NYB_PLAN_INIT;
  assert_int_equal(nyb_attention_plan(context, call, &plan), NYB_OK);
  assert_true(strlen(plan.reason) > 0);
  return plan;
}

static void test_path(void **state) {
  (void)state;
  const attention_shape shape = small_shape();
  attention_scene scene;
  make_scene(&scene, &shape);
  nyb_attention call = scene.call;
  nyb_context *context = make_context(1);
  call.path = NYB_PATH_AUTO;
  nyb_plan plan = plan_of(context, &call);
  assert_int_equal(plan.path, NYB_PATH_FUSED);
  assert_non_null(strstr(plan.key_kernel, "attention_scores_affine4_"));
  assert_non_null(strstr(plan.value_kernel, "attention_values_affine8_"));
  call.path = NYB_PATH_COMPAT;
  plan = plan_of(context, &call);
  assert_int_equal(plan.path, NYB_PATH_COMPAT);
  assert_string_equal(plan.key_kernel, "");
  nyb_context_destroy(context);

  /* The environment decides for AUTO only, and is read when the context is made. */
  assert_int_equal(setenv("NYBBLE_PATH", "compat", 1), 0);
  context = make_context(1);
  assert_int_equal(unsetenv("NYBBLE_PATH"), 0);
  call.path = NYB_PATH_AUTO;
  assert_int_equal(plan_of(context, &call).path, NYB_PATH_COMPAT);
  call.path = NYB_PATH_FUSED;
  assert_int_equal(plan_of(context, &call).path, NYB_PATH_FUSED);
  nyb_context_destroy(context);
  scene_free(&scene);
}

static void test_counters(void **state) {
  (void)state;
  const attention_shape shape = small_shape();
  attention_scene scene;
  nyb_context *context = make_context(1);
  nyb_counters counters = NYB_COUNTERS_INIT;
  make_scene(&scene, &shape);
  for (int i = 0; i < 3; i++) run_scene(&scene, context);
  assert_int_equal(scene_run(&scene, &check_nybble, context, NYB_PATH_COMPAT), NYB_OK);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.attention_fused, 3);
  assert_int_equal(counters.attention_compat, 1);
  nyb_counters_clear(context);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.attention_fused, 0);
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* workspace_bytes does not depend on pointers, strides or lengths. */
static void test_workspace_of_shapes_alone(void **state) {
  (void)state;
  const attention_shape shape = small_shape();
  attention_scene scene;
  nyb_context *context = make_context(3);
  make_scene(&scene, &shape);
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    nyb_attention call = scene.call;
    call.path = (nyb_path)path;
    const size_t bytes = plan_of(context, &call).workspace_bytes;
    call.q.data = call.k.codes = call.k.scales = call.k.biases = NULL;
    call.v.codes = call.v.scales = call.v.biases = call.out.data = call.lse.data = NULL;
    call.lengths = NULL;
    call.k.codes_stride[2] = 1000;
    assert_int_equal(plan_of(context, &call).workspace_bytes, bytes);
  }
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* It never falls when batch, query_len or capacity_tokens rises: seen along each axis from many
 * points, far enough for every limit inside to be passed. */
static void test_workspace_never_falls(void **state) {
  (void)state;
  static const int64_t sizes[] = {1,       2,       3,       7,      16,     31,     32,
                                  33,      200,     1024,    1025,   5000,   20000,  70001,
                                  70002,   131072,  200000,  300000, 300001, 500000, 700000,
                                  1000000, 1500000, 3000000, 7000000};
  enum { SIZES = sizeof sizes / sizeof sizes[0] };
  nyb_context *contexts[] = {make_context(1), make_context(3), make_context(16)};
  nyb_attention call = {.struct_size = sizeof call,
                        .query_heads = 12,
                        .kv_heads = 2,
                        .key_dim = 64,
                        .value_dim = 96,
                        .q = {.dtype = NYB_BF16},
                        .k = {.format = affine(4, 64)},
                        .v = {.format = affine(4, 32)},
                        .out = {.dtype = NYB_BF16},
                        .scale = 1};
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    call.path = (nyb_path)path;
    for (int i = 0; i < 3 * 3 * SIZES; i++) {
      const int64_t fixed = sizes[i / 9];
      size_t before = 0;
      for (int j = 0; j < SIZES; j++) {
        call.batch = i % 3 == 0 ? sizes[j] : 2;
        call.query_len = i % 3 == 1 ? sizes[j] : fixed < 40 ? fixed : 5;
        call.capacity_tokens = i % 3 == 2 ? sizes[j] : fixed;
        const size_t now = plan_of(contexts[i / 3 % 3], &call).workspace_bytes;
        if (now < before) {
          fail_msg("batch %lld, query_len %lld, capacity %lld: %zu after %zu",
                   (long long)call.batch, (long long)call.query_len,
                   (long long)call.capacity_tokens, now, before);
        }
        before = now;
      }
    }
  }
  for (int i = 0; i < 3; i++) nyb_context_destroy(contexts[i]);
}

/* ---- Views -------------------------------------------------------------------------------- */

static void test_negative_and_zero_strides(void **state) {
  (void)state;
  attention_shape shape = small_shape();
  attention_scene scene;
  nyb_context *context = make_context(1);
  shape.out_dtype = NYB_F32;
  make_scene(&scene, &shape);
  run_scene(&scene, context);
  const size_t bytes = (size_t)scene_bits_bytes(&scene);
  uint8_t *forward = malloc(bytes), *backward = malloc(bytes);
  assert_non_null(forward);
  assert_non_null(backward);
  scene_bits(&scene, forward);

  /* Query rows and outputs from the last to the first: the same, turned around. */
  nyb_attention call = scene.call;
  call.q.data = (const uint16_t *)call.q.data + 2 * call.q.stride[2];
  call.q.stride[2] = -call.q.stride[2];
  call.out.data = (float *)call.out.data + 2 * call.out.stride[2];
  call.out.stride[2] = -call.out.stride[2];
  call.lse.data = (float *)call.lse.data + 2 * call.lse.stride[2];
  call.lse.stride[2] = -call.lse.stride[2];
  assert_int_equal(nyb_attention_run(context, &call, scene.workspace, scene.workspace_bytes, NULL),
                   NYB_OK);
  scene_bits(&scene, backward);
  assert_memory_equal(forward, backward, bytes);

  /* One KV head and one sequence for all, by strides of zero. */
  int32_t lengths[] = {5, 5};
  call = scene.call;
  call.lengths = lengths;
  call.k.codes_stride[0] = call.k.scales_stride[0] = call.k.biases_stride[0] = 0;
  call.v.codes_stride[0] = call.v.scales_stride[0] = call.v.biases_stride[0] = 0;
  call.q.stride[0] = 0;
  assert_int_equal(nyb_attention_run(context, &call, scene.workspace, scene.workspace_bytes, NULL),
                   NYB_OK);
  scene_bits(&scene, forward);
  const size_t half = 4 * 3 * 96 * sizeof(float);
  assert_memory_equal(forward, forward + half, half);
  free(forward);
  free(backward);
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* The stride of an axis of length 1 is never looked at, whatever it is. */
static void test_strides_of_single_tokens(void **state) {
  (void)state;
  attention_shape shape = small_shape();
  attention_scene scene;
  nyb_context *context = make_context(1);
  shape.query_len = shape.capacity_tokens = 1;
  for (int64_t b = 0; b < shape.batch; b++) shape.lengths[b] = 1;
  make_scene(&scene, &shape);
  run_scene(&scene, context);
  const size_t bytes = (size_t)scene_bits_bytes(&scene);
  uint8_t *plain = malloc(bytes), *wild = malloc(bytes);
  assert_true(plain != NULL && wild != NULL);
  scene_bits(&scene, plain);
  nyb_stored *const stored[] = {&scene.call.k, &scene.call.v};
  for (int i = 0; i < 2; i++) {
    stored[i]->codes_stride[2] = stored[i]->scales_stride[2] = INT64_MAX;
    stored[i]->biases_stride[2] = INT64_MIN;
  }
  scene.call.q.stride[2] = scene.call.out.stride[2] = scene.call.lse.stride[2] = INT64_MIN;
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    scene.call.path = path;
    nyb_plan plan = plan_of(context, &scene.call);
    void *workspace = aligned_alloc(64, plan.workspace_bytes);
    assert_int_equal(nyb_attention_run(context, &scene.call, workspace, plan.workspace_bytes, NULL),
                     NYB_OK);
    free(workspace);
    scene_bits(&scene, wild);
    if (path == NYB_PATH_FUSED) assert_memory_equal(plain, wild, bytes);
  }
  free(plain);
  free(wild);
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* Field case 17: strides of 2^30 elements, and index 4 wraps in 32 bits. */
static void test_batch_strides_beyond_32_bits(void **state) {
  (void)state;
  enum { BATCH = 5, DIM = 32, TOKENS = 2 };
  const int64_t stride = INT64_C(1) << 30;
  const size_t bytes = (size_t)(BATCH - 1) * (size_t)stride * 2 + 4096;
  uint16_t *k =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (k == MAP_FAILED) {
    print_message("skipped: no sparse mapping of 8 GiB\n");
    skip();
  }
  float q[BATCH * DIM], lse[BATCH], out[BATCH * DIM];
  int32_t lengths[BATCH];
  for (int64_t b = 0; b < BATCH; b++) {
    lengths[b] = 1;
    for (int64_t d = 0; d < DIM; d++) {
      oracle_store(k, NYB_BF16, b * stride + d, (double)(b + 1));
      q[b * DIM + d] = 0.25f;
    }
  }
  nyb_attention call = {
      .struct_size = sizeof call,
      .batch = BATCH,
      .query_heads = 1,
      .kv_heads = 1,
      .query_len = 1,
      .key_dim = DIM,
      .value_dim = DIM,
      .capacity_tokens = TOKENS,
      .lengths = lengths,
      .q = {.data = q, .dtype = NYB_F32, .stride = {DIM, DIM, DIM}},
      .k = {.format = plain(NYB_BF16), .codes = k, .codes_stride = {stride, DIM * TOKENS, DIM}},
      .out = {.data = out, .dtype = NYB_F32, .stride = {DIM, DIM, DIM}},
      .lse = {.data = lse, .dtype = NYB_F32, .stride = {1, 1, 1}},
      .scale = 1};
  call.v = call.k;
  nyb_context *context = make_context(2);
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    call.path = (nyb_path)path;
    const nyb_plan plan = plan_of(context, &call);
    void *workspace = aligned_alloc(64, plan.workspace_bytes);
    assert_int_equal(nyb_attention_run(context, &call, workspace, plan.workspace_bytes, NULL),
                     NYB_OK);
    for (int b = 0; b < BATCH; b++) {
      assert_float_equal(lse[b], 0.25f * DIM * (float)(b + 1), 1e-4f);
      assert_float_equal(out[b * DIM + DIM - 1], (float)(b + 1), 1e-6f);
    }
    free(workspace);
  }
  nyb_context_destroy(context);
  munmap(k, bytes);
}

/* ---- Masks and shapes --------------------------------------------------------------------- */

/* Field case 38: bottom-right. With equal scores a row's output is the mean of the tokens it sees,
 * and token n's value is n. */
static void test_causal_is_bottom_right(void **state) {
  (void)state;
  attention_shape shape = {.name = "bottom-right",
                           .batch = 1,
                           .query_heads = 1,
                           .kv_heads = 1,
                           .query_len = 4,
                           .key_dim = 32,
                           .value_dim = 32,
                           .capacity_tokens = 16,
                           .lengths = {16},
                           .key_format = affine(4, 32),
                           .value_format = plain(NYB_F32),
                           .query_dtype = NYB_F32,
                           .out_dtype = NYB_F32,
                           .mask = NYB_MASK_CAUSAL,
                           .queries = QUERIES_ZERO};
  attention_scene scene;
  nyb_context *context = make_context(1);
  make_scene(&scene, &shape);
  for (int n = 0; n < 16; n++) {
    for (int d = 0; d < 32; d++) ((float *)scene.v.codes.data)[n * 32 + d] = (float)n;
  }
  run_scene(&scene, context);
  for (int row = 0; row < 4; row++) {
    const int visible = 13 + row;
    assert_float_equal(((float *)scene.out.data)[row * 32], (float)(visible - 1) / 2, 1e-5f);
    assert_float_equal(((float *)scene.lse.data)[row], logf((float)visible), 1e-6f);
  }
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* Field case 36, and rows before the sequence. */
static void test_rows_that_see_nothing(void **state) {
  (void)state;
  attention_shape shape = small_shape();
  attention_scene scene;
  nyb_context *context = make_context(1);
  shape.lengths[0] = 0;
  shape.lengths[1] = 2; /* three causal rows: the first sees none */
  shape.mask = NYB_MASK_CAUSAL;
  make_scene(&scene, &shape);
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    assert_int_equal(scene_run(&scene, &check_nybble, context, (nyb_path)path), NYB_OK);
    for (int64_t i = 0; i < 2 * 4 * 3; i++) {
      const bool sees = i >= 4 * 3 && i % 3 > 0;
      assert_int_equal(isinf(((float *)scene.lse.data)[i]) != 0, !sees);
      for (int64_t d = 0; d < 96 && !sees; d++) {
        assert_int_equal(oracle_load_bits(scene.out.data, NYB_BF16, i * 96 + d), 0);
      }
    }
  }
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* Field case 24: MLA's shapes, and values that are all 3 come out as 3. */
static void test_values_of_three(void **state) {
  (void)state;
  static const int64_t dims[][2] = {{576, 512}, {192, 128}};
  nyb_context *context = make_context(2);
  for (int i = 0; i < 2; i++) {
    attention_shape shape = {.name = "values of 3",
                             .batch = 1,
                             .query_heads = 16,
                             .kv_heads = 1,
                             .query_len = 1,
                             .key_dim = dims[i][0],
                             .value_dim = dims[i][1],
                             .capacity_tokens = 300,
                             .lengths = {300},
                             .key_format = affine(4, 64),
                             .value_format = plain(NYB_BF16),
                             .query_dtype = NYB_BF16,
                             .out_dtype = NYB_BF16};
    attention_scene scene;
    make_scene(&scene, &shape);
    for (int64_t j = 0; j < 300 * dims[i][1]; j++) oracle_store(scene.v.codes.data, NYB_BF16, j, 3);
    run_scene(&scene, context);
    for (int64_t j = 0; j < 16 * dims[i][1]; j++) {
      assert_true(oracle_load(scene.out.data, NYB_BF16, j) == 3);
    }
    scene_free(&scene);
  }
  nyb_context_destroy(context);
}

/* ---- Scales and quantization error ---------------------------------------------------------- */

static void scale_all(const check_buffer *buffer, nyb_dtype dtype, double factor) {
  const int64_t count = (int64_t)buffer->data_bytes / 2;
  for (int64_t i = 0; i < count; i++) {
    oracle_store(buffer->data, dtype, i, factor * oracle_load(buffer->data, dtype, i));
  }
}

/* Field case 8: K's scales times 4 and V's times 1/4 change the output as the oracle says, for
 * every dtype of the query. */
static void test_scales_are_applied(void **state) {
  (void)state;
  nyb_context *context = make_context(1);
  for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    attention_shape shape = small_shape();
    attention_scene scene;
    shape.query_dtype = (nyb_dtype)dtype;
    make_scene(&scene, &shape);
    assert_right(&scene, context);
    scale_all(&scene.k.scales, NYB_BF16, 4);
    scale_all(&scene.v.scales, NYB_BF16, 0.25);
    assert_right(&scene, context);
    scale_all(&scene.k.biases, NYB_BF16, 4);
    scale_all(&scene.v.biases, NYB_BF16, 0.25);
    assert_right(&scene, context);
    scene_free(&scene);
  }
  nyb_context_destroy(context);
}

/* The error of attention over quantized rows against the same rows unquantized. The scenes' seeds
 * give the same elements in every format. */
static double quantization_error(nyb_context *context, int key_bits, int value_bits) {
  attention_shape shape = {.name = "outlier channel",
                           .batch = 1,
                           .query_heads = 8,
                           .kv_heads = 2,
                           .query_len = 1,
                           .key_dim = 128,
                           .value_dim = 128,
                           .capacity_tokens = 200,
                           .lengths = {200},
                           .key_format = plain(NYB_F32),
                           .value_format = plain(NYB_F32),
                           .query_dtype = NYB_F32,
                           .out_dtype = NYB_F32,
                           .keys = ROWS_OUTLIER,
                           .seed = 3};
  attention_scene unquantized, quantized;
  make_scene(&unquantized, &shape);
  shape.key_format = affine(key_bits, 64);
  shape.value_format = affine(value_bits, 64);
  make_scene(&quantized, &shape);
  run_scene(&unquantized, context);
  run_scene(&quantized, context);
  double sum = 0;
  for (int i = 0; i < 8 * 128; i++) {
    const double difference =
        (double)((float *)unquantized.out.data)[i] - (double)((float *)quantized.out.data)[i];
    sum += difference * difference;
  }
  scene_free(&unquantized);
  scene_free(&quantized);
  return sqrt(sum / (8 * 128));
}

/* Field case 3: an outlier channel in the keys costs more bits there than in the values. */
static void test_outlier_keys_want_the_bits(void **state) {
  (void)state;
  nyb_context *context = make_context(1);
  const double k8v4 = quantization_error(context, 8, 4);
  const double k4v8 = quantization_error(context, 4, 8);
  print_message("outlier channel: K8V4 off by %.4f, K4V8 by %.4f\n", k8v4, k4v8);
  assert_true(k8v4 < k4v8);
  nyb_context_destroy(context);
}

/* ---- Memory and sharing --------------------------------------------------------------------- */

typedef struct counting_allocator {
  int64_t calls;
} counting_allocator;

static void *count_and_allocate(void *user_data, size_t bytes, size_t alignment) {
  ((counting_allocator *)user_data)->calls++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void count_release(void *user_data, void *memory) {
  (void)user_data;
  free(memory);
}

static void test_run_does_not_allocate(void **state) {
  (void)state;
  counting_allocator counter = {0};
  const nyb_context_options options = {
      .struct_size = sizeof options,
      .threads = 2,
      .allocator = {
          .allocate = count_and_allocate, .release = count_release, .user_data = &counter}};
  nyb_context *context;
  attention_scene scene;
  const attention_shape shape = small_shape();
  assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  make_scene(&scene, &shape);
  const int64_t before = counter.calls;
  assert_true(before > 0);
  run_scene(&scene, context);
  assert_int_equal(scene_run(&scene, &check_nybble, context, NYB_PATH_COMPAT), NYB_OK);
  assert_int_equal(counter.calls, before);
  nyb_context_destroy(context);
  scene_free(&scene);
}

/* Field case 52: prefill over a long cache holds no scores and no float cache. [2048, 32768] scores
 * of 32 heads would be 8 GiB. */
static void test_prefill_workspace(void **state) {
  (void)state;
  static const int64_t rows[] = {1, 2048};
  nyb_context *context = make_context(2);
  for (int i = 0; i < 2; i++) {
    const nyb_attention call = {
        .struct_size = sizeof call,
        .batch = 1,
        .query_heads = 32,
        .kv_heads = 8,
        .query_len = rows[i],
        .key_dim = 128,
        .value_dim = 128,
        .capacity_tokens = 32768,
        .q = {.dtype = NYB_BF16, .stride = {0, 0, 128}},
        .k = {.format = affine(4, 64)},
        .v = {.format = affine(4, 64)},
        .out = {.dtype = NYB_BF16, .stride = {INT64_C(1) << 32, 262144, 128}},
        .scale = 1,
        .mask = NYB_MASK_CAUSAL};
    const nyb_plan plan = plan_of(context, &call);
    print_message("workspace for %lld rows over 32,768 tokens: %zu bytes\n", (long long)rows[i],
                  plan.workspace_bytes);
    assert_int_equal(plan.path, NYB_PATH_FUSED);
    assert_true(plan.workspace_bytes < (size_t)64 << 20);
  }
  nyb_context_destroy(context);
}

/* A line of /proc/self/status in KiB; -1 where there is none. */
static int64_t status_kib(const char *name) {
  char line[256];
  long long kib = -1;
  FILE *file = fopen("/proc/self/status", "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, name, strlen(name)) == 0) kib = strtoll(line + strlen(name) + 1, NULL, 10);
  }
  if (file != NULL) fclose(file);
  return kib;
}

/* Lets the peak begin anew at what is resident now. */
static bool reset_peak(void) {
  FILE *file = fopen("/proc/self/clear_refs", "w");
  if (file == NULL) return false;
  const bool written = fputs("5", file) >= 0;
  return fclose(file) == 0 && written;
}

/* The same, seen from outside: what the process grows by while such a call runs, its workspace
 * included. One head of scores would be 256 MiB. */
static void test_prefill_memory(void **state) {
  (void)state;
  const attention_shape shape = {.name = "prefill",
                                 .batch = 1,
                                 .query_heads = 1,
                                 .kv_heads = 1,
                                 .query_len = 2048,
                                 .key_dim = 32,
                                 .value_dim = 32,
                                 .capacity_tokens = 32768,
                                 .lengths = {32768},
                                 .key_format = affine(4, 32),
                                 .value_format = affine(4, 32),
                                 .query_dtype = NYB_BF16,
                                 .out_dtype = NYB_BF16,
                                 .mask = NYB_MASK_CAUSAL,
                                 .keys = ROWS_RAW,
                                 .values = ROWS_RAW};
  attention_scene scene;
  nyb_context *context = make_context(2);
  make_scene(&scene, &shape);
  const int64_t before = status_kib("VmRSS");
  if (!reset_peak() || before < 0) {
    print_message("skipped: /proc does not tell the peak here\n");
    scene_free(&scene);
    nyb_context_destroy(context);
    skip();
  }
  run_scene(&scene, context);
  const int64_t grown = status_kib("VmHWM") - before;
  print_message("2,048 rows over 32,768 tokens: the process grew by %lld KiB\n", (long long)grown);
  assert_true(grown < 64 << 10);
  scene_free(&scene);
  nyb_context_destroy(context);
}

static double run_seconds(attention_scene *scene, nyb_context *context) {
  struct timespec start, end;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
  const nyb_status status =
      nyb_attention_run(context, &scene->call, scene->workspace, scene->workspace_bytes, NULL);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  assert_int_equal(status, NYB_OK);
  return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

/* Field case 54: eight query heads share each unpacked tile, so that 64 heads over 8 cost far less
 * than eight times 8 over 8. The two take turns, so that a machine that slows down slows both, and
 * the least of each counts. A kernel that unpacks for each head takes 8 times as long; vectors take
 * about 3 times, scalar code about 5. */
static void test_heads_share_the_unpacking(void **state) {
  (void)state;
  attention_scene scenes[2];
  double least[2] = {1e9, 1e9};
  nyb_context *context = make_context(1);
  for (int i = 0; i < 2; i++) {
    attention_shape shape = {.name = "sharing",
                             .batch = 1,
                             .query_heads = i == 0 ? 8 : 64,
                             .kv_heads = 8,
                             .query_len = 1,
                             .key_dim = 128,
                             .value_dim = 128,
                             .capacity_tokens = 4096,
                             .lengths = {4096},
                             .key_format = affine(4, 64),
                             .value_format = affine(4, 64),
                             .query_dtype = NYB_BF16,
                             .out_dtype = NYB_BF16,
                             .keys = ROWS_RAW,
                             .values = ROWS_RAW};
    make_scene(&scenes[i], &shape);
    run_scene(&scenes[i], context);
  }
  for (int turn = 0; turn < 15; turn++) {
    for (int i = 0; i < 2; i++) {
      const double seconds = run_seconds(&scenes[i], context);
      least[i] = seconds < least[i] ? seconds : least[i];
    }
  }
  print_message("64 heads over 8 take %.2f times as long as 8 over 8 (%.2f ms)\n",
                least[1] / least[0], 1e3 * least[0]);
  assert_true(least[1] < 6 * least[0]);
  for (int i = 0; i < 2; i++) scene_free(&scenes[i]);
  nyb_context_destroy(context);
}

/* ---- Splitting the work ------------------------------------------------------------------- */

/* A parallel-for that counts its calls. */
typedef struct counted_threads {
  int64_t threads; /* first: check_parallel_for takes it */
  int64_t calls;
} counted_threads;

static void counted_parallel_for(void *user_data, int64_t task_count, nyb_task task,
                                 void *task_data) {
  counted_threads *counted = user_data;
  counted->calls++;
  check_parallel_for(&counted->threads, task_count, task, task_data);
}

static nyb_context *make_counted_context(counted_threads *counted) {
  nyb_context *context;
  const nyb_context_options options = {.struct_size = sizeof options,
                                       .threads = counted->threads,
                                       .parallel_for = counted_parallel_for,
                                       .parallel_for_data = counted};
  assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  return context;
}

/* Bits of the scene's outputs after a run on so many threads. */
static uint8_t *bits_on_threads(attention_scene *scene, int64_t threads) {
  counted_threads counted = {.threads = threads};
  nyb_context *context = make_counted_context(&counted);
  uint8_t *bits = malloc((size_t)scene_bits_bytes(scene));
  assert_non_null(bits);
  run_scene(scene, context);
  scene_bits(scene, bits);
  nyb_context_destroy(context);
  return bits;
}

/* One sequence is far longer than the others of its batch: it alone is cut into chunks. */
static void test_long_sequence_among_short_ones(void **state) {
  (void)state;
  static const int64_t threads[] = {2, 3, 8, 64};
  for (int kv_heads = 1; kv_heads <= 3; kv_heads += 2) {
    const attention_shape shape = {.name = "long among short",
                                   .batch = 8,
                                   .query_heads = 6,
                                   .kv_heads = kv_heads,
                                   .query_len = 3,
                                   .key_dim = 32,
                                   .value_dim = 64,
                                   .capacity_tokens = 20000,
                                   .lengths = {128, 1, 0, 20000, 2, 1500, 128, 4000},
                                   .key_format = affine(4, 32),
                                   .value_format = affine(8, 64),
                                   .query_dtype = NYB_F32,
                                   .out_dtype = NYB_F32,
                                   .mask = NYB_MASK_CAUSAL,
                                   .keys = ROWS_RAW,
                                   .seed = 11};
    attention_scene scene;
    make_scene(&scene, &shape);
    uint8_t *alone = bits_on_threads(&scene, 1);
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
      uint8_t *shared = bits_on_threads(&scene, threads[i]);
      assert_memory_equal(shared, alone, (size_t)scene_bits_bytes(&scene));
      free(shared);
    }
    free(alone);
    scene_free(&scene);
  }
}

/* Rows of 65,536 values, 8 of them for each KV head, take 2 MiB for each chunk: 17 + 30 chunks do
 * not fit the workspace, and the second sequence reaches over three waves. Values overlap (each
 * token's row begins 64 elements after the one before it), so that 30 chunks of them are small. */
static void test_partial_results_in_waves(void **state) {
  (void)state;
  enum { BATCH = 2, HEADS = 8, DIM = 32, VALUES = 65536, TOKENS = 30 * 1024 - 7, STEP = 64 };
  const int64_t key_elements = (int64_t)BATCH * TOKENS * DIM;
  const int64_t value_elements = (int64_t)TOKENS * STEP + VALUES;
  const int64_t out_bytes = (int64_t)BATCH * HEADS * VALUES * (int64_t)sizeof(float);
  uint16_t *k = malloc((size_t)key_elements * 2), *v = malloc((size_t)value_elements * 2);
  float *out[2] = {malloc((size_t)out_bytes), malloc((size_t)out_bytes)};
  assert_true(k != NULL && v != NULL && out[0] != NULL && out[1] != NULL);
  check_random random = {.state = 3};
  float q[BATCH * HEADS * DIM];
  for (int i = 0; i < BATCH * HEADS * DIM; i++) q[i] = (float)check_random_normal(&random);
  for (int64_t i = 0; i < key_elements; i++) {
    oracle_store(k, NYB_F16, i, check_random_normal(&random));
  }
  for (int64_t i = 0; i < value_elements; i++) {
    oracle_store(v, NYB_F16, i, check_random_normal(&random));
  }
  const int32_t lengths[BATCH] = {17 * 1024, TOKENS};
  for (int i = 0; i < 2; i++) {
    counted_threads counted = {.threads = 1 + i};
    nyb_context *context = make_counted_context(&counted);
    const nyb_attention call = {
        .struct_size = sizeof call,
        .batch = BATCH,
        .query_heads = HEADS,
        .kv_heads = 1,
        .query_len = 1,
        .key_dim = DIM,
        .value_dim = VALUES,
        .capacity_tokens = TOKENS,
        .lengths = lengths,
        .q = {.data = q, .dtype = NYB_F32, .stride = {HEADS * DIM, DIM, DIM}},
        .k = {.format = plain(NYB_F16), .codes = k, .codes_stride = {TOKENS * DIM, 0, DIM}},
        .v = {.format = plain(NYB_F16), .codes = v, .codes_stride = {0, 0, STEP}},
        .out = {.data = out[i], .dtype = NYB_F32, .stride = {HEADS * VALUES, VALUES, VALUES}},
        .scale = 0.25F};
    const nyb_plan plan = plan_of(context, &call);
    void *workspace = aligned_alloc(64, plan.workspace_bytes);
    assert_int_equal(nyb_attention_run(context, &call, workspace, plan.workspace_bytes, NULL),
                     NYB_OK);
    if (counted.threads > 1) assert_true(counted.calls >= 2 * 3); /* chunks and folds of 3 waves */
    free(workspace);
    nyb_context_destroy(context);
  }
  assert_memory_equal(out[1], out[0], (size_t)out_bytes);
  for (int i = 0; i < 2; i++) free(out[i]);
  free(k);
  free(v);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refuses_null_and_size),
      cmocka_unit_test(test_refuses_shapes),
      cmocka_unit_test(test_refuses_formats),
      cmocka_unit_test(test_refuses_choices),
      cmocka_unit_test(test_refuses_lengths),
      cmocka_unit_test(test_refuses_pointers),
      cmocka_unit_test(test_refuses_strides_and_overlap),
      cmocka_unit_test(test_refuses_workspace),
      cmocka_unit_test(test_path),
      cmocka_unit_test(test_counters),
      cmocka_unit_test(test_workspace_of_shapes_alone),
      cmocka_unit_test(test_workspace_never_falls),
      cmocka_unit_test(test_negative_and_zero_strides),
      cmocka_unit_test(test_strides_of_single_tokens),
      cmocka_unit_test(test_batch_strides_beyond_32_bits),
      cmocka_unit_test(test_causal_is_bottom_right),
      cmocka_unit_test(test_rows_that_see_nothing),
      cmocka_unit_test(test_values_of_three),
      cmocka_unit_test(test_scales_are_applied),
      cmocka_unit_test(test_outlier_keys_want_the_bits),
      cmocka_unit_test(test_run_does_not_allocate),
      cmocka_unit_test(test_prefill_workspace),
      cmocka_unit_test(test_long_sequence_among_short_ones),
  };
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  /* Of the release build alone: sanitizers and the emulator have memory and time of their own, and
   * the last takes 50 thousand million products, seconds here and many minutes there. */
  const struct CMUnitTest release_tests[] = {
      cmocka_unit_test(test_prefill_memory),
      cmocka_unit_test(test_heads_share_the_unpacking),
      cmocka_unit_test(test_partial_results_in_waves),
  };
  if (getenv("NYBBLE_TESTS_QUICK") == NULL) {
    failed += cmocka_run_group_tests(release_tests, NULL, NULL);
  }
  return failed;
}
