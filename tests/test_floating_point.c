/* SPDX-License-Identifier: Apache-2.0 */
/* A caller whose thread flushes denormals, takes them for zero or rounds some other way gets the
 * same bits from every run call, and finds its mode as it was. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attention_scene.h"

/* ---- Modes ------------------------------------------------------------------------------------
 */

typedef struct mode {
  const char *name;
  uint64_t bits;
} mode;

#if defined(__x86_64__)
#include <xmmintrin.h>

/* MXCSR: flush to zero is bit 15, denormals are zeros bit 6, rounding bits 13 and 14; the lowest
 * six say what has happened, which is no mode. */
enum { DEFAULT_MODE = 0x1f80 };
static const mode modes[] = {
    {"flush to zero", 0x9f80},    {"denormals are zeros", 0x1fc0}, {"both", 0x9fc0},
    {"rounding down", 0x3f80},    {"rounding up", 0x5f80},         {"rounding to zero", 0x7f80},
    {"both, rounding up", 0xdfc0}};
static void set_mode(uint64_t bits) { _mm_setcsr((unsigned)bits); }
static uint64_t get_mode(void) { return _mm_getcsr() & ~0x3fu; }

#elif defined(__aarch64__)

/* FPCR: flush to zero is bit 24, that of f16 bit 19, rounding bits 22 and 23. */
enum { DEFAULT_MODE = 0 };
static const mode modes[] = {
    {"flush to zero", 1u << 24},    {"f16 flush to zero", 1u << 19},
    {"rounding up", 1u << 22},      {"rounding down", 2u << 22},
    {"rounding to zero", 3u << 22}, {"flush to zero, rounding up", 1u << 24 | 1u << 22}};
static void set_mode(uint64_t bits) { __asm__ volatile("msr fpcr, %0" : : "r"(bits) : "memory"); }
static uint64_t get_mode(void) {
  uint64_t bits;
  __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}

#else
#define NO_MODES 1
enum { DEFAULT_MODE = 0 };
static const mode modes[1];
static void set_mode(uint64_t bits) { (void)bits; }
static uint64_t get_mode(void) { return DEFAULT_MODE; }
#endif

enum { MODES = sizeof modes / sizeof modes[0] };

/* NULL where the ISA does not run here. Threads of a pool take over the mode in which they are
 * started. */
static nyb_context *context_in(uint64_t bits, nyb_isa isa, int64_t threads) {
  nyb_context *context = NULL;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = isa, .threads = threads};
  set_mode(bits);
  const nyb_status status = nyb_context_create(&options, &context);
  const uint64_t after = get_mode();
  set_mode(DEFAULT_MODE);
  if (status == NYB_ERROR_UNSUPPORTED) return NULL;
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  assert_true(after == bits);
  return context;
}

/* ---- What is run ------------------------------------------------------------------------------
 */

/* A run call with all that it needs; its outputs lie in [out, out + out_bytes). */
typedef struct work {
  const char *name;
  nyb_status (*run)(struct work *work, nyb_context *context);
  attention_scene scene;
  nyb_path path;
  nyb_dtype dtype;
  const void *input;
  uint8_t *out, *expected;
  size_t out_bytes;
} work;

static nyb_status run_attention(work *w, nyb_context *context) {
  return nyb_attention_run(context, &w->scene.call, w->scene.workspace, w->scene.workspace_bytes,
                           NULL);
}

enum { ELEMENTS = 1 << 16, DIM = 64, TOKENS = ELEMENTS / DIM };

static nyb_status run_geglu(work *w, nyb_context *context) {
  const nyb_geglu geglu = {.struct_size = sizeof geglu,
                           .rows = 1,
                           .columns = ELEMENTS,
                           .dtype = w->dtype,
                           .path = w->path,
                           .gate = w->input,
                           .up = (const char *)w->input + 64,
                           .out = w->out};
  return nyb_geglu_run(context, &geglu, NULL);
}

static nyb_status run_quantize(work *w, nyb_context *context) {
  uint8_t *scales = w->out + ELEMENTS / 2;
  const nyb_quantize quantize = {
      .struct_size = sizeof quantize,
      .batch = 1,
      .heads = 1,
      .tokens = TOKENS,
      .dim = DIM,
      .input = {.data = w->input, .dtype = w->dtype, .stride = {ELEMENTS, ELEMENTS, DIM}},
      .output = {.format = {NYB_AFFINE, 4, 32, NYB_F32},
                 .codes = w->out,
                 .scales = scales,
                 .biases = scales + TOKENS * 2 * 4,
                 .codes_stride = {0, 0, DIM / 8},
                 .scales_stride = {0, 0, 2},
                 .biases_stride = {0, 0, 2}}};
  return nyb_quantize_run(context, &quantize, NULL);
}

/* What run_quantize() made of the input, back to floats. */
static nyb_status run_dequantize(work *w, nyb_context *context) {
  const uint8_t *scales = (const uint8_t *)w->input + ELEMENTS / 2;
  const nyb_dequantize dequantize = {
      .struct_size = sizeof dequantize,
      .batch = 1,
      .heads = 1,
      .tokens = TOKENS,
      .dim = DIM,
      .input = {.format = {NYB_AFFINE, 4, 32, NYB_F32},
                .codes = w->input,
                .scales = scales,
                .biases = scales + TOKENS * 2 * 4,
                .codes_stride = {0, 0, DIM / 8},
                .scales_stride = {0, 0, 2},
                .biases_stride = {0, 0, 2}},
      .output = {.data = w->out, .dtype = w->dtype, .stride = {ELEMENTS, ELEMENTS, DIM}}};
  return nyb_dequantize_run(context, &dequantize, NULL);
}

/* An append, and what it stored, as the work's output. */
static nyb_status run_append(work *w, nyb_context *context) {
  nyb_cache *cache = NULL;
  const nyb_format format = {NYB_AFFINE, 8, 64, NYB_F16};
  const nyb_cache_options options = {.struct_size = sizeof options,
                                     .batch = 1,
                                     .kv_heads = 1,
                                     .key_dim = DIM,
                                     .value_dim = DIM,
                                     .key_format = format,
                                     .value_format = format};
  const nyb_input rows = {.data = w->input, .dtype = w->dtype, .stride = {ELEMENTS, ELEMENTS, DIM}};
  const nyb_append append = {
      .struct_size = sizeof append, .tokens = TOKENS, .key = rows, .value = rows};
  nyb_attention view = NYB_ATTENTION_INIT;
  nyb_status status = nyb_cache_create(context, &options, &cache);
  if (status == NYB_OK) status = nyb_cache_append(cache, &append, NULL);
  if (status == NYB_OK) status = nyb_cache_view(cache, &view);
  if (status == NYB_OK) {
    memcpy(w->out, view.v.codes, ELEMENTS);
    memcpy(w->out + ELEMENTS, view.v.scales, TOKENS * 2);
  }
  nyb_cache_destroy(cache);
  return status;
}

/* The input as parts of rows of DIM, whose lses were made in the default mode. */
enum { PARTS = 32, ROWS = ELEMENTS / PARTS / DIM };
static float lses[PARTS * ROWS];

static nyb_status run_merge(work *w, nyb_context *context) {
  nyb_input outs[PARTS], lse_views[PARTS];
  for (int i = 0; i < PARTS; i++) {
    const int64_t first = i * ROWS * DIM * (int64_t)nyb_dtype_bytes(w->dtype);
    outs[i] = (nyb_input){(const char *)w->input + first, w->dtype, {ROWS * DIM, DIM, DIM}};
    lse_views[i] = (nyb_input){lses + i * ROWS, NYB_F32, {ROWS, 1, 1}};
  }
  const nyb_attention_merge merge = {.struct_size = sizeof merge,
                                     .parts = PARTS,
                                     .batch = 1,
                                     .query_heads = ROWS,
                                     .query_len = 1,
                                     .value_dim = DIM,
                                     .outs = outs,
                                     .lses = lse_views,
                                     .out = {w->out, NYB_F32, {ROWS * DIM, DIM, DIM}},
                                     .lse = {w->out + ROWS * DIM * 4, NYB_F32, {ROWS, 1, 1}}};
  return nyb_attention_merge_run(context, &merge, NULL);
}

/* ---- The same bits in every mode ----------------------------------------------------------------
 */

static void run_in_mode(work *w, nyb_context *context, const mode *m) {
  memset(w->out, 0xa5, w->out_bytes);
  set_mode(m->bits);
  const nyb_status status = w->run(w, context);
  const uint64_t after = get_mode();
  set_mode(DEFAULT_MODE);
  if (status != NYB_OK) fail_msg("%s: %s", w->name, nyb_last_error());
  if (after != m->bits) {
    fail_msg("%s, %s: mode 0x%llx became 0x%llx", w->name, m->name, (unsigned long long)m->bits,
             (unsigned long long)after);
  }
  if (memcmp(w->out, w->expected, w->out_bytes) != 0) {
    fail_msg("%s, %s, %s, %d threads: other bits", w->name, m->name,
             nyb_isa_name(nyb_context_isa(context)), (int)nyb_context_threads(context));
  }
}

static void expect_same_bits(work *w) {
  static const mode normal = {"default", DEFAULT_MODE};
  w->expected = malloc(w->out_bytes);
  assert_non_null(w->expected);
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_in(DEFAULT_MODE, isa, 1);
    if (context == NULL) continue;
    memset(w->out, 0xa5, w->out_bytes);
    assert_int_equal(w->run(w, context), NYB_OK);
    memcpy(w->expected, w->out, w->out_bytes);
    for (int m = 0; m < MODES; m++) run_in_mode(w, context, &modes[m]);
    nyb_context_destroy(context);
    /* A pool started in one mode, called in another. */
    context = context_in(modes[MODES - 1].bits, isa, 3);
    run_in_mode(w, context, &normal);
    run_in_mode(w, context, &modes[0]);
    nyb_context_destroy(context);
  }
  free(w->expected);
}

static void test_attention(void **state) {
  (void)state;
  static const nyb_format formats[] = {{NYB_AFFINE, 4, 64, NYB_BF16},
                                       {NYB_AFFINE, 5, 32, NYB_F16},
                                       {NYB_PLAIN, 0, 0, NYB_F32},
                                       {NYB_PLAIN, 0, 0, NYB_F16},
                                       {NYB_PLAIN, 0, 0, NYB_BF16}};
  for (int i = 0; i < 10; i++) {
    const bool tiny = i >= 5;
    const attention_shape shape = {.name = "any mode",
                                   .batch = 2,
                                   .query_heads = 4,
                                   .kv_heads = 2,
                                   .query_len = 1,
                                   .key_dim = DIM,
                                   .value_dim = DIM,
                                   .capacity_tokens = 1100,
                                   .lengths = {1100, 70},
                                   .key_format = formats[i % 5],
                                   .value_format = formats[i % 5],
                                   .query_dtype = (nyb_dtype)(NYB_F32 + i % 3),
                                   .out_dtype = tiny ? formats[i % 5].dtype : NYB_F32,
                                   .rounding = i % 2 == 0 ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX,
                                   .queries = tiny ? QUERIES_SUBNORMAL : QUERIES_NORMAL,
                                   .values = tiny ? ROWS_SUBNORMAL : ROWS_NORMAL,
                                   .seed = (uint64_t)i};
    nyb_context *context = context_in(DEFAULT_MODE, NYB_ISA_AUTO, 3);
    for (nyb_path path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
      work w = {.name = path == NYB_PATH_FUSED ? "attention, fused" : "attention, compat",
                .run = run_attention};
      assert_true(scene_make(&w.scene, &shape));
      /* Makes the workspace, of the most threads. */
      assert_int_equal(scene_run(&w.scene, &check_nybble, context, path), NYB_OK);
      w.out = w.scene.out.memory;
      w.out_bytes = w.scene.out.memory_bytes;
      expect_same_bits(&w);
      scene_free(&w.scene);
    }
    nyb_context_destroy(context);
  }
}

/* Every 16-bit number, or floats of every size. */
static void fill(void *input, nyb_dtype dtype, bool finite) {
  check_random random = {.state = 7};
  for (int64_t i = 0; i < ELEMENTS + 64; i++) {
    double value = oracle_decode(NYB_BF16, (uint32_t)(i * 0x9e3b & 0xffff)); /* odd: all of them */
    if (dtype == NYB_F16 && !finite) value = oracle_decode(NYB_F16, (uint32_t)i & 0xffff);
    if (dtype == NYB_F32) value *= 1 + check_random_uniform(&random);
    if (finite) { /* each group of another size, down to subnormal ones */
      value = check_random_normal(&random);
      for (int64_t halvings = i / 64 % 150; halvings > 0; halvings--) value /= 2;
    }
    oracle_store(input, dtype, i, value);
  }
}

static void test_geglu(void **state) {
  (void)state;
  uint8_t *input = malloc((ELEMENTS + 64) * 4), *out = malloc(ELEMENTS * 4);
  for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    fill(input, dtype, false);
    for (nyb_path path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
      work w = {.name = path == NYB_PATH_FUSED ? "geglu, fused" : "geglu, compat",
                .run = run_geglu,
                .path = path,
                .dtype = dtype,
                .input = input,
                .out = out,
                .out_bytes = ELEMENTS * nyb_dtype_bytes(dtype)};
      expect_same_bits(&w);
    }
  }
  free(input);
  free(out);
}

static void test_merge(void **state) {
  (void)state;
  uint8_t *input = malloc((ELEMENTS + 64) * 4), *out = malloc(ELEMENTS * 4);
  for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    fill(input, dtype, true);
    for (int i = 0; i < PARTS * ROWS; i++) {
      lses[i] = (float)oracle_load(input, dtype, i) + (i % 3 == 0 ? 0 : (float)(i % 30));
    }
    work w = {.name = "merge", .run = run_merge, .dtype = dtype, .input = input, .out = out};
    w.out_bytes = ROWS * (DIM + 1) * sizeof(float);
    expect_same_bits(&w);
  }
  free(input);
  free(out);
}

static void test_quantize_and_append(void **state) {
  (void)state;
  enum { QUANTIZED_BYTES = ELEMENTS / 2 + 2 * TOKENS * 2 * 4 };
  uint8_t *input = malloc((ELEMENTS + 64) * 4), *out = malloc(ELEMENTS * 4);
  uint8_t *quantized = malloc(QUANTIZED_BYTES);
  for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    fill(input, dtype, true);
    work w = {.name = "quantize", .run = run_quantize, .dtype = dtype, .input = input, .out = out};
    w.out_bytes = QUANTIZED_BYTES;
    expect_same_bits(&w);
    memcpy(quantized, out, QUANTIZED_BYTES);
    w.name = "append";
    w.run = run_append;
    w.out_bytes = ELEMENTS + TOKENS * 2;
    expect_same_bits(&w);
    w.name = "dequantize";
    w.run = run_dequantize;
    w.input = quantized;
    w.out_bytes = ELEMENTS * nyb_dtype_bytes(dtype);
    expect_same_bits(&w);
  }
  free(input);
  free(out);
  free(quantized);
}

int main(void) {
#if defined(NO_MODES)
  printf("skipped: this test knows no floating-point modes of this processor\n");
  return 77;
#endif
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_attention),
      cmocka_unit_test(test_geglu),
      cmocka_unit_test(test_quantize_and_append),
      cmocka_unit_test(test_merge),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
