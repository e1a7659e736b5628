/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: what it stores is what nyb_quantize_run makes of the same rows, however they came,
 * and what fails leaves no trace. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "expect.h"
#include "nybble.h"

/* ---- A context whose memory is counted, poisoned, and can run out ---------------------------- */

typedef struct test_memory {
  int64_t live_blocks, allocations;
  int64_t fail_at; /* the allocation that fails, counted from 1; 0: none */
} test_memory;

static void *test_allocate(void *user_data, size_t bytes, size_t alignment) {
  test_memory *memory = user_data;
  if (++memory->allocations == memory->fail_at) return NULL;
  void *block = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (block == NULL) return NULL;
  memset(block, 0xff, bytes); /* NaN, and lengths of -1 */
  memory->live_blocks++;
  return block;
}

static void test_release(void *user_data, void *block) {
  ((test_memory *)user_data)->live_blocks--;
  free(block);
}

static test_memory memory;
static nyb_context *context;

static nyb_context *make_context(int64_t threads) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = threads;
  options.allocator = (nyb_allocator){test_allocate, test_release, &memory};
  nyb_context *made = NULL;
  if (nyb_context_create(&options, &made) != NYB_OK) fail_msg("%s", nyb_last_error());
  return made;
}

static int set_up(void **state) {
  (void)state;
  memory = (test_memory){0};
  context = make_context(1);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  nyb_context_destroy(context);
  return memory.live_blocks == 0 ? 0 : -1;
}

/* ---- Rows to append -------------------------------------------------------------------------- */

static uint32_t random_bits(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*seed >> 32);
}

/* Element i of finite values that every dtype holds: in f16 and bf16 of 1/8 to 8, in f32 of -1 to
 * 1. */
static void put_random(void *data, nyb_dtype dtype, int64_t i, uint64_t *seed) {
  const uint32_t bits = random_bits(seed);
  if (dtype == NYB_F32) {
    ((float *)data)[i] = (float)(int32_t)bits * 0x1p-31f;
  } else if (dtype == NYB_F16) {
    ((uint16_t *)data)[i] =
        (uint16_t)((bits & 0x8000u) | (12 + (bits >> 16) % 6) << 10 | (bits & 0x3ffu));
  } else {
    ((uint16_t *)data)[i] =
        (uint16_t)((bits & 0x8000u) | (124 + (bits >> 16) % 6) << 7 | (bits & 0x7fu));
  }
}

static void *random_elements(nyb_dtype dtype, int64_t count, uint64_t seed) {
  void *data = malloc((size_t)count * nyb_dtype_bytes(dtype));
  for (int64_t i = 0; i < count; i++) put_random(data, dtype, i, &seed);
  return data;
}

/* ---- What a cache should hold ---------------------------------------------------------------- */

static const nyb_format affine4 = {NYB_AFFINE, 4, 32, NYB_F32};
static const nyb_format affine8 = {NYB_AFFINE, 8, 64, NYB_BF16};
static const nyb_format plain_bf16 = {NYB_PLAIN, 0, 0, NYB_BF16};

static nyb_cache *make_cache(const nyb_cache_options *options) {
  nyb_cache *cache = NULL;
  if (nyb_cache_create(context, options, &cache) != NYB_OK) fail_msg("%s", nyb_last_error());
  return cache;
}

/* Contiguous [batch, heads, tokens, dim] rows of one dtype, seen from `token` on. */
static nyb_input rows_from(const void *data, nyb_dtype dtype, int64_t heads, int64_t tokens,
                           int64_t dim, int64_t token) {
  return (nyb_input){.data = (const char *)data + token * dim * (int64_t)nyb_dtype_bytes(dtype),
                     .dtype = dtype,
                     .stride = {heads * tokens * dim, tokens * dim, dim}};
}

/* An append of `tokens` of them, K and V alike. */
static nyb_append append_of(int64_t tokens, nyb_input key, nyb_input value) {
  nyb_append append = NYB_APPEND_INIT;
  append.tokens = tokens;
  append.key = key;
  append.value = value;
  return append;
}

typedef struct plain_rows { /* codes, scales and biases without any padding */
  char *data[3];
  int64_t row_bytes[3];
} plain_rows;

/* What nyb_quantize_run makes of rows: the whole of [batch, heads, tokens, dim] at once. */
static plain_rows quantized(const nyb_input *input, nyb_format format, nyb_rule rule, int64_t batch,
                            int64_t heads, int64_t tokens, int64_t dim) {
  const bool affine = format.scheme == NYB_AFFINE;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(format.dtype);
  plain_rows rows = {.row_bytes = {affine ? dim * format.bits / 8 : dim * scale_bytes,
                                   affine ? dim / format.group_size * scale_bytes : 0,
                                   affine ? dim / format.group_size * scale_bytes : 0}};
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = batch;
  quantize.heads = heads;
  quantize.tokens = tokens;
  quantize.dim = dim;
  quantize.input = *input;
  quantize.rule = rule;
  quantize.output.format = format;
  int64_t *const strides[3] = {quantize.output.codes_stride, quantize.output.scales_stride,
                               quantize.output.biases_stride};
  for (int i = 0; i < 3; i++) {
    const int64_t element_bytes = affine && i == 0 ? 4 : scale_bytes;
    rows.data[i] = malloc((size_t)(batch * heads * tokens * rows.row_bytes[i] + 8));
    strides[i][2] = rows.row_bytes[i] / element_bytes;
    strides[i][1] = strides[i][2] * tokens;
    strides[i][0] = strides[i][1] * heads;
  }
  quantize.output.codes = rows.data[0];
  quantize.output.scales = affine ? rows.data[1] : NULL;
  quantize.output.biases = affine ? rows.data[2] : NULL;
  expect_ok(nyb_quantize_run(context, &quantize, NULL));
  return rows;
}

static void free_rows(plain_rows *rows) {
  for (int i = 0; i < 3; i++) free(rows->data[i]);
}

static const char *stored_row(const nyb_stored *stored, int array, int64_t batch, int64_t head,
                              int64_t token) {
  const void *const data[3] = {stored->codes, stored->scales, stored->biases};
  const int64_t *const strides[3] = {stored->codes_stride, stored->scales_stride,
                                     stored->biases_stride};
  const int64_t element_bytes = stored->format.scheme == NYB_AFFINE && array == 0
                                    ? 4
                                    : (int64_t)nyb_dtype_bytes(stored->format.dtype);
  const int64_t *stride = strides[array];
  return (const char *)data[array] +
         (batch * stride[0] + head * stride[1] + token * stride[2]) * element_bytes;
}

/* The first `length` tokens of a sequence of a view are those from `token` on of `rows`, which has
 * `tokens` of them. */
static void expect_rows(const nyb_stored *stored, int64_t sequence, int64_t heads, int64_t first,
                        int64_t length, const plain_rows *rows, int64_t row_sequence,
                        int64_t tokens, int64_t token) {
  for (int array = 0; array < 3; array++) {
    const int64_t bytes = rows->row_bytes[array];
    for (int64_t head = 0; bytes > 0 && head < heads; head++) {
      for (int64_t i = 0; i < length; i++) {
        const char *wanted =
            rows->data[array] + ((row_sequence * heads + head) * tokens + token + i) * bytes;
        const char *held = stored_row(stored, array, sequence, head, first + i);
        if (memcmp(held, wanted, (size_t)bytes) != 0) {
          fail_msg("array %d, sequence %" PRId64 ", head %" PRId64 ", token %" PRId64 " differs",
                   array, sequence, head, first + i);
        }
      }
    }
  }
}

static nyb_attention view_of(const nyb_cache *cache) {
  nyb_attention attention = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &attention));
  return attention;
}

/* ---- Appending is quantizing ----------------------------------------------------------------- */

enum { BATCH = 2, HEADS = 3, KEY_DIM = 128, VALUE_DIM = 256, TOKENS = 300 };

/* The same rows by appends of many sizes, laid out in memory in one of four ways. */
static void append_in_pieces(nyb_format key_format, nyb_format value_format, nyb_dtype dtype,
                             nyb_rule rule, int layout) {
  static const int64_t pieces[] = {1, 1, 7, 64, 0, 128, 99};
  const int64_t dims[2] = {KEY_DIM, VALUE_DIM};
  const nyb_format formats[2] = {key_format, value_format};
  void *data[2];
  nyb_input input[2];
  plain_rows wanted[2];
  for (int i = 0; i < 2; i++) {
    const int64_t dim = dims[i];
    data[i] = random_elements(dtype, (int64_t)BATCH * HEADS * TOKENS * dim, 7 + (uint64_t)i);
    input[i] = rows_from(data[i], dtype, HEADS, TOKENS, dim, 0);
    if (layout == 1) { /* B-L-H-D */
      input[i].stride[1] = dim;
      input[i].stride[2] = HEADS * dim;
    } else if (layout == 2) { /* tokens backwards */
      input[i].data = (const char *)data[i] + (TOKENS - 1) * dim * (int64_t)nyb_dtype_bytes(dtype);
      input[i].stride[2] = -dim;
    } else if (layout == 3) { /* one head for all */
      input[i].stride[1] = 0;
    }
    wanted[i] = quantized(&input[i], formats[i], rule, BATCH, HEADS, TOKENS, dim);
  }
  nyb_cache_options options =
      options_of(BATCH, HEADS, key_format, KEY_DIM, value_format, VALUE_DIM);
  options.rule = rule;
  nyb_cache *cache = make_cache(&options);
  int64_t token = 0;
  for (size_t piece = 0; piece < sizeof pieces / sizeof pieces[0]; piece++) {
    nyb_append append = append_of(pieces[piece], input[0], input[1]);
    nyb_input *const parts[2] = {&append.key, &append.value};
    for (int i = 0; i < 2; i++) {
      parts[i]->data = (const char *)input[i].data +
                       token * input[i].stride[2] * (int64_t)nyb_dtype_bytes(dtype);
    }
    expect_ok(nyb_cache_append(cache, &append, NULL));
    token += pieces[piece];
    for (int64_t sequence = 0; sequence < BATCH; sequence++) {
      assert_int_equal(nyb_cache_length(cache, sequence), token);
    }
  }
  assert_int_equal(token, TOKENS);
  const nyb_attention view = view_of(cache);
  for (int64_t sequence = 0; sequence < BATCH; sequence++) {
    expect_rows(&view.k, sequence, HEADS, 0, TOKENS, &wanted[0], sequence, TOKENS, 0);
    expect_rows(&view.v, sequence, HEADS, 0, TOKENS, &wanted[1], sequence, TOKENS, 0);
  }
  nyb_cache_destroy(cache);
  for (int i = 0; i < 2; i++) {
    free(data[i]);
    free_rows(&wanted[i]);
  }
}

static void test_append_is_quantize(void **state) {
  (void)state;
  static const int32_t bits[] = {2, 3, 4, 5, 6, 8};
  static const int32_t groups[] = {32, 64, 128};
  int layout = 0;
  for (int b = 0; b < 6; b++) {
    for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
      for (int rule = 0; rule < 2; rule++, layout++) {
        const nyb_format key = {NYB_AFFINE, bits[b], groups[layout % 3], (nyb_dtype)dtype};
        const nyb_format value = {NYB_AFFINE, bits[5 - b], groups[(layout + 1) % 3], NYB_F16};
        append_in_pieces(key, value, (nyb_dtype)dtype, (nyb_rule)rule, layout % 4);
      }
    }
  }
  for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    for (int stored = NYB_F32; stored <= NYB_BF16; stored++, layout++) {
      const nyb_format plain = {NYB_PLAIN, 0, 0, (nyb_dtype)stored};
      append_in_pieces(plain, layout % 2 == 0 ? plain : affine4, (nyb_dtype)dtype, NYB_RULE_MLX_CPU,
                       layout % 4);
    }
  }
}

/* The view's strides and the bit stream, read by hand: 3 bits, so that codes straddle words. */
static void test_view_by_hand(void **state) {
  (void)state;
  enum { DIM = 64, LENGTH = 70, BITS = 3 };
  const nyb_format format = {NYB_AFFINE, BITS, 32, NYB_F32};
  float *data = random_elements(NYB_F32, 2 * 2 * LENGTH * DIM, 3);
  const nyb_input input = rows_from(data, NYB_F32, 2, LENGTH, DIM, 0);
  const nyb_cache_options options = options_of(2, 2, format, DIM, format, DIM);
  nyb_cache *cache = make_cache(&options);
  const nyb_append append = append_of(LENGTH, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  const nyb_attention view = view_of(cache);

  float *output = malloc(2 * 2 * LENGTH * DIM * sizeof(float));
  nyb_dequantize dequantize = NYB_DEQUANTIZE_INIT;
  dequantize.batch = 2;
  dequantize.heads = 2;
  dequantize.tokens = LENGTH;
  dequantize.dim = DIM;
  dequantize.input = view.v;
  dequantize.output = (nyb_output){output, NYB_F32, {2 * LENGTH * DIM, LENGTH * DIM, DIM}};
  expect_ok(nyb_dequantize_run(context, &dequantize, NULL));
  const uint32_t *codes = view.v.codes;
  const float *scales = view.v.scales, *biases = view.v.biases;
  double largest_error = 0;
  for (int64_t i = 0; i < 2 * 2 * LENGTH * DIM; i++) {
    const int64_t batch = i / DIM / LENGTH / 2, head = i / DIM / LENGTH % 2;
    const int64_t token = i / DIM % LENGTH, d = i % DIM;
    const uint32_t *row = codes + batch * view.v.codes_stride[0] + head * view.v.codes_stride[1] +
                          token * view.v.codes_stride[2];
    uint32_t code = 0;
    for (int64_t bit = d * BITS; bit < d * BITS + BITS; bit++) {
      code |= (row[bit / 32] >> (bit % 32) & 1u) << (bit - d * BITS);
    }
    const float scale = scales[batch * view.v.scales_stride[0] + head * view.v.scales_stride[1] +
                               token * view.v.scales_stride[2] + d / 32];
    const float bias = biases[batch * view.v.biases_stride[0] + head * view.v.biases_stride[1] +
                              token * view.v.biases_stride[2] + d / 32];
    const float product = scale * (float)code;
    const float value = product + bias;
    assert_memory_equal(&value, &output[i], sizeof value);
    /* Values reach from -1 to 1, so that a step is at most 2/7, and an error half of one; moving
     * the scale so that the edge is exact costs the other end at most another half. */
    largest_error = fmax(largest_error, fabs((double)value - (double)data[i]));
  }
  assert_true(largest_error <= 2.0 / 7);
  assert_true(largest_error > 0.05); /* and it was the quantized value that was compared */
  nyb_cache_destroy(cache);
  free(output);
  free(data);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void test_50000_single_appends(void **state) {
  (void)state;
  enum { N = 50000, DIM = 32 };
  float *data = random_elements(NYB_F32, (int64_t)N * DIM, 11);
  const nyb_input all = rows_from(data, NYB_F32, 1, N, DIM, 0);
  const nyb_cache_options options = options_of(1, 1, affine4, DIM, plain_bf16, DIM);
  nyb_cache *cache = make_cache(&options);
  const int64_t allocations_before = memory.allocations;
  for (int64_t token = 0; token < N; token++) {
    nyb_append append = append_of(1, all, all);
    append.key.data = append.value.data = data + token * DIM;
    expect_ok(nyb_cache_append(cache, &append, NULL));
  }
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  expect_ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.used_bytes, (int64_t)N * (DIM / 2 + 4 + 4 + 2 * DIM));
  assert_int_equal(memory.allocations - allocations_before, usage.reallocations + 1);
  assert_true(usage.reallocations <= 20);
  assert_true(usage.copied_bytes <= 2 * usage.used_bytes);
  assert_true(usage.copied_bytes > usage.used_bytes / 4); /* it is counted at all */
  assert_true(usage.allocated_bytes <= 2 * usage.used_bytes + 4 * 64);
  plain_rows keys = quantized(&all, affine4, NYB_RULE_MLX_CPU, 1, 1, N, DIM);
  plain_rows values = quantized(&all, plain_bf16, NYB_RULE_MLX_CPU, 1, 1, N, DIM);
  const nyb_attention view = view_of(cache);
  expect_rows(&view.k, 0, 1, 0, N, &keys, 0, N, 0);
  expect_rows(&view.v, 0, 1, 0, N, &values, 0, N, 0);
  free_rows(&keys);
  free_rows(&values);
  nyb_cache_destroy(cache);
  free(data);
}

static void test_usage_by_arithmetic(void **state) {
  (void)state;
  /* K: 96 dims at 3 bits, groups of 32, f16: 36 + 3*2 + 3*2 bytes; V: 40 f16. */
  const nyb_format key = {NYB_AFFINE, 3, 32, NYB_F16}, value = {NYB_PLAIN, 0, 0, NYB_F16};
  nyb_cache_options options = options_of(2, 5, key, 96, value, 40);
  options.initial_capacity_tokens = 10;
  nyb_cache *cache = make_cache(&options);
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  expect_ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.used_bytes, 0);
  assert_int_equal(usage.capacity_tokens, 10);
  /* Planes of 10 rows, padded to 64 bytes: 360 -> 384, twice 60 -> 64, 800 -> 832. */
  assert_int_equal(usage.allocated_bytes, 2 * 5 * (384 + 64 + 64 + 832));
  float *data = random_elements(NYB_F32, 2 * 5 * 7 * 96, 1);
  const nyb_append append =
      append_of(7, rows_from(data, NYB_F32, 5, 7, 96, 0), rows_from(data, NYB_F32, 5, 7, 40, 0));
  expect_ok(nyb_cache_append(cache, &append, NULL));
  expect_ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.used_bytes, 2 * 5 * 7 * (36 + 6 + 6 + 80));
  assert_int_equal(usage.reallocations, 0);
  expect_ok(nyb_cache_append(cache, &append, NULL)); /* 14 of 10: grows to the smallest size */
  expect_ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.used_bytes, 2 * 5 * 14 * 128);
  assert_int_equal(usage.reallocations, 1);
  assert_int_equal(usage.copied_bytes, 2 * 5 * 7 * 128);
  assert_int_equal(usage.capacity_tokens, 64);
  expect_ok(nyb_cache_trim(cache, 1, 4, NULL, NULL));
  expect_ok(nyb_cache_get_usage(cache, &usage));
  assert_int_equal(usage.used_bytes, 5 * (14 + 10) * 128);
  assert_int_equal(usage.capacity_tokens, 64);
  nyb_cache_destroy(cache);
  free(data);
}

static void test_reserve_and_initial_capacity(void **state) {
  (void)state;
  float *data = random_elements(NYB_F32, 32, 1);
  const nyb_input one = rows_from(data, NYB_F32, 1, 1, 32, 0);
  const nyb_append append = append_of(1, one, one);
  nyb_cache_options options = options_of(1, 1, affine4, 32, affine4, 32);
  options.initial_capacity_tokens = 100;
  nyb_cache *cache = make_cache(&options);
  const int64_t before = memory.allocations;
  for (int i = 0; i < 100; i++) expect_ok(nyb_cache_append(cache, &append, NULL));
  assert_int_equal(memory.allocations, before);
  const nyb_attention view = view_of(cache);
  expect_ok(nyb_cache_reserve(cache, 100, NULL)); /* already there */
  expect_ok(nyb_cache_reserve(cache, 0, NULL));
  assert_int_equal(memory.allocations, before);
  const nyb_attention same = view_of(cache);
  assert_ptr_equal(same.k.codes, view.k.codes);
  expect_ok(nyb_cache_reserve(cache, 333, NULL));
  assert_int_equal(memory.allocations, before + 1);
  assert_int_equal(view_of(cache).capacity_tokens, 333);
  assert_int_equal(nyb_cache_length(cache, 0), 100);
  plain_rows wanted = quantized(&one, affine4, NYB_RULE_MLX_CPU, 1, 1, 1, 32);
  const nyb_attention moved = view_of(cache);
  for (int i = 0; i < 100; i++) expect_rows(&moved.k, 0, 1, i, 1, &wanted, 0, 1, 0);
  for (int i = 0; i < 233; i++) expect_ok(nyb_cache_append(cache, &append, NULL));
  assert_int_equal(memory.allocations, before + 1);
  free_rows(&wanted);
  nyb_cache_destroy(cache);
  free(data);
}

static void test_planes_are_aligned(void **state) {
  (void)state;
  const nyb_format format = {NYB_AFFINE, 3, 32, NYB_BF16};
  nyb_cache_options options = options_of(3, 5, format, 96, plain_bf16, 33);
  options.initial_capacity_tokens = 7;
  nyb_cache *cache = make_cache(&options);
  const nyb_attention view = view_of(cache);
  for (int64_t batch = 0; batch < 3; batch++) {
    for (int64_t head = 0; head < 5; head++) {
      for (int array = 0; array < 3; array++) {
        assert_int_equal((uintptr_t)stored_row(&view.k, array, batch, head, 0) % 64, 0);
      }
      assert_int_equal((uintptr_t)stored_row(&view.v, 0, batch, head, 0) % 64, 0);
    }
  }
  assert_null(view.v.scales);
  assert_null(view.v.biases);
  nyb_cache_destroy(cache);
}

static void test_view_sets_its_own_fields(void **state) {
  (void)state;
  const nyb_cache_options options = options_of(2, 3, affine4, 96, affine8, 64);
  nyb_cache *cache = make_cache(&options);
  nyb_attention attention;
  memset(&attention, 0x5a, sizeof attention);
  attention.struct_size = sizeof attention;
  nyb_attention wanted = attention;
  expect_ok(nyb_cache_view(cache, &attention));
  assert_int_equal(attention.batch, 2);
  assert_int_equal(attention.kv_heads, 3);
  assert_int_equal(attention.key_dim, 96);
  assert_int_equal(attention.value_dim, 64);
  assert_int_equal(attention.capacity_tokens, 0);
  assert_int_equal(attention.lengths[0], 0);
  assert_int_equal(attention.lengths[1], 0);
  assert_null(attention.k.codes);
  assert_memory_equal(&attention.k.format, &affine4, sizeof affine4);
  assert_memory_equal(&attention.v.format, &affine8, sizeof affine8);
  wanted.batch = attention.batch;
  wanted.kv_heads = attention.kv_heads;
  wanted.key_dim = attention.key_dim;
  wanted.value_dim = attention.value_dim;
  wanted.capacity_tokens = attention.capacity_tokens;
  wanted.lengths = attention.lengths;
  wanted.k = attention.k;
  wanted.v = attention.v;
  wanted.last_begins = NULL;
  memset(&wanted.pages, 0, sizeof wanted.pages);
  memset(&wanted.ring, 0, sizeof wanted.ring);
  memset(&wanted.first, 0, sizeof wanted.first);
  memset(&wanted.last, 0, sizeof wanted.last);
  assert_memory_equal(&attention, &wanted, sizeof wanted);
  nyb_cache_destroy(cache);
}

/* ---- Trim and reset -------------------------------------------------------------------------- */

static void expect_same_caches(const nyb_cache *a, const nyb_cache *b) {
  const nyb_attention left = view_of(a), right = view_of(b);
  const int64_t key_bytes[3] = {left.key_dim / 2, left.key_dim / 32 * 4, left.key_dim / 32 * 4};
  const int64_t value_bytes[3] = {left.value_dim, left.value_dim / 64 * 2, left.value_dim / 64 * 2};
  for (int64_t sequence = 0; sequence < left.batch; sequence++) {
    assert_int_equal(left.lengths[sequence], right.lengths[sequence]);
    for (int64_t head = 0; head < left.kv_heads; head++) {
      for (int64_t token = 0; token < left.lengths[sequence]; token++) {
        for (int array = 0; array < 3; array++) {
          assert_memory_equal(stored_row(&left.k, array, sequence, head, token),
                              stored_row(&right.k, array, sequence, head, token),
                              (size_t)key_bytes[array]);
          assert_memory_equal(stored_row(&left.v, array, sequence, head, token),
                              stored_row(&right.v, array, sequence, head, token),
                              (size_t)value_bytes[array]);
        }
      }
    }
  }
}

/* Field case 43: append 5, trim 3, append 3 is never having drafted; the trimmed count comes back.
 */
static void test_trim_is_never_drafted(void **state) {
  (void)state;
  enum { DIM = 64, N = 8 };
  float *data = random_elements(NYB_F32, 2 * 2 * N * DIM, 5);
  float *draft = random_elements(NYB_F32, 2 * 2 * N * DIM, 6);
  const nyb_cache_options options = options_of(2, 2, affine4, DIM, affine8, DIM);
  nyb_cache *drafted = make_cache(&options), *plain = make_cache(&options);
  const nyb_input first = rows_from(data, NYB_F32, 2, N, DIM, 0);
  const nyb_input later = rows_from(data, NYB_F32, 2, N, DIM, 2);
  const nyb_input wrong = rows_from(draft, NYB_F32, 2, N, DIM, 2);
  const nyb_append append_first = append_of(2, first, first);
  const nyb_append append_later = append_of(3, later, later);
  const nyb_append append_wrong = append_of(3, wrong, wrong);
  expect_ok(nyb_cache_append(plain, &append_first, NULL));
  expect_ok(nyb_cache_append(plain, &append_later, NULL));
  expect_ok(nyb_cache_append(drafted, &append_first, NULL));
  expect_ok(nyb_cache_append(drafted, &append_wrong, NULL));
  int64_t trimmed = -1;
  expect_ok(nyb_cache_trim(drafted, NYB_ALL_SEQUENCES, 3, &trimmed, NULL));
  assert_int_equal(trimmed, 3);
  assert_int_equal(nyb_cache_length(drafted, 1), 2);
  expect_ok(nyb_cache_append(drafted, &append_later, NULL));
  expect_same_caches(drafted, plain);

  expect_ok(nyb_cache_trim(drafted, NYB_ALL_SEQUENCES, 0, &trimmed, NULL));
  assert_int_equal(trimmed, 0);
  expect_ok(nyb_cache_trim(drafted, NYB_ALL_SEQUENCES, INT64_MAX, &trimmed, NULL));
  assert_int_equal(trimmed, 5);
  assert_int_equal(nyb_cache_length(drafted, 0), 0);

  /* A reset cache is a new one, in the memory that it has. */
  expect_ok(nyb_cache_append(drafted, &append_wrong, NULL));
  const int64_t allocations = memory.allocations;
  expect_ok(nyb_cache_reset(drafted, NULL));
  assert_int_equal(nyb_cache_length(drafted, 0), 0);
  expect_ok(nyb_cache_append(drafted, &append_first, NULL));
  expect_ok(nyb_cache_append(drafted, &append_later, NULL));
  assert_int_equal(memory.allocations, allocations);
  expect_same_caches(drafted, plain);
  nyb_cache_destroy(drafted);
  nyb_cache_destroy(plain);
  free(data);
  free(draft);
}

/* Sequences of different lengths: an append goes to the end of each, as it would to a cache of that
 * sequence alone, and growing moves each one's tokens. */
static void test_sequences_of_their_own_length(void **state) {
  (void)state;
  enum { DIM = 64, N = 70 };
  float *data = random_elements(NYB_F32, 3 * 2 * N * DIM, 15);
  const nyb_input input = rows_from(data, NYB_F32, 2, N, DIM, 0);
  const nyb_input later = rows_from(data, NYB_F32, 2, N, DIM, 10);
  const nyb_cache_options options = options_of(3, 2, affine4, DIM, affine8, DIM);
  nyb_cache *cache = make_cache(&options);
  nyb_append append = append_of(10, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  int64_t trimmed;
  expect_ok(nyb_cache_trim(cache, 0, 3, &trimmed, NULL));
  assert_int_equal(trimmed, 3);
  expect_ok(nyb_cache_trim(cache, 2, 99, &trimmed, NULL));
  assert_int_equal(trimmed, 10);
  append = append_of(60, later, later); /* 70 in the longest: beyond the first capacity */
  expect_ok(nyb_cache_append(cache, &append, NULL));
  static const int64_t kept[] = {7, 10, 0};
  plain_rows keys = quantized(&input, affine4, NYB_RULE_MLX_CPU, 3, 2, N, DIM);
  plain_rows values = quantized(&input, affine8, NYB_RULE_MLX_CPU, 3, 2, N, DIM);
  const nyb_attention view = view_of(cache);
  for (int64_t sequence = 0; sequence < 3; sequence++) {
    assert_int_equal(nyb_cache_length(cache, sequence), kept[sequence] + 60);
    assert_int_equal(view.lengths[sequence], kept[sequence] + 60);
    expect_rows(&view.k, sequence, 2, 0, kept[sequence], &keys, sequence, N, 0);
    expect_rows(&view.v, sequence, 2, 0, kept[sequence], &values, sequence, N, 0);
    expect_rows(&view.k, sequence, 2, kept[sequence], 60, &keys, sequence, N, 10);
    expect_rows(&view.v, sequence, 2, kept[sequence], 60, &values, sequence, N, 10);
  }
  free_rows(&keys);
  free_rows(&values);
  nyb_cache_destroy(cache);
  free(data);
}

/* ---- Failed appends -------------------------------------------------------------------------- */

/* Everything that can be seen of a cache. */
typedef struct snapshot {
  nyb_attention view;
  nyb_cache_usage usage;
  int32_t lengths[8];
  void *bytes;
} snapshot;

static snapshot take_snapshot(const nyb_cache *cache) {
  snapshot taken = {.view = NYB_ATTENTION_INIT, .usage = NYB_CACHE_USAGE_INIT};
  expect_ok(nyb_cache_view(cache, &taken.view));
  expect_ok(nyb_cache_get_usage(cache, &taken.usage));
  assert_true(taken.view.batch <= 8);
  memcpy(taken.lengths, taken.view.lengths, (size_t)taken.view.batch * sizeof(int32_t));
  const size_t bytes = (size_t)taken.usage.allocated_bytes; /* k.codes is where the block begins */
  taken.bytes = malloc(bytes + 1);
  if (bytes > 0) memcpy(taken.bytes, taken.view.k.codes, bytes);
  return taken;
}

/* Zeroes what no reader may look at: the rows beyond the lengths, and the padding. */
static void forget_unused(void *block, const snapshot *taken) {
  const int64_t row_bytes[2][3] = {
      {taken->view.key_dim / 2, taken->view.key_dim / 8, taken->view.key_dim / 8},
      {taken->view.value_dim * 2, 0, 0}};
  const nyb_stored *const stored[2] = {&taken->view.k, &taken->view.v};
  if (taken->usage.allocated_bytes == 0) return;
  char *next = block;
  char *kept = calloc(1, (size_t)taken->usage.allocated_bytes + 1);
  for (int part = 0; part < 2; part++) {
    for (int array = 0; array < 3; array++) {
      for (int64_t plane = 0;
           row_bytes[part][array] > 0 && plane < taken->view.batch * taken->view.kv_heads;
           plane++) {
        const int64_t sequence = plane / taken->view.kv_heads, head = plane % taken->view.kv_heads;
        const int64_t offset =
            stored_row(stored[part], array, sequence, head, 0) - (const char *)taken->view.k.codes;
        memcpy(kept + offset, next + offset,
               (size_t)(taken->lengths[sequence] * row_bytes[part][array]));
      }
    }
  }
  memcpy(block, kept, (size_t)taken->usage.allocated_bytes);
  free(kept);
}

static void expect_unchanged(const nyb_cache *cache, snapshot *before) {
  snapshot after = take_snapshot(cache);
  assert_memory_equal(&after.view, &before->view, sizeof after.view);
  assert_memory_equal(&after.usage, &before->usage, sizeof after.usage);
  assert_memory_equal(after.lengths, before->lengths, sizeof after.lengths);
  forget_unused(after.bytes, &after);
  forget_unused(before->bytes, before);
  assert_memory_equal(after.bytes, before->bytes, (size_t)after.usage.allocated_bytes);
  free(after.bytes);
}

/* One value is changed, and the append of all of them fails with these words. */
static void expect_refused_value(nyb_cache *cache, nyb_append *append, int part, int64_t index,
                                 float value, const char *words) {
  nyb_input *input = part == 0 ? &append->key : &append->value;
  float *element = (float *)(uintptr_t)input->data + index;
  const float old = *element;
  snapshot before = take_snapshot(cache);
  *element = value;
  expect_error(nyb_cache_append(cache, append, NULL), NYB_ERROR_NON_FINITE, words);
  *element = old;
  expect_unchanged(cache, &before);
  free(before.bytes);
}

static void test_refused_values(void **state) {
  (void)state;
  enum { DIM = 64, N = 5, ROW = 2 * 2 * N * DIM };
  float *keys = random_elements(NYB_F32, ROW, 21), *values = random_elements(NYB_F32, ROW, 22);
  nyb_append append = append_of(N, rows_from(keys, NYB_F32, 2, N, DIM, 0),
                                rows_from(values, NYB_F32, 2, N, DIM, 0));
  nyb_format f16 = {NYB_PLAIN, 0, 0, NYB_F16};
  nyb_cache_options options = options_of(2, 2, affine4, DIM, f16, DIM);
  options.initial_capacity_tokens = 12;
  nyb_cache *cache = make_cache(&options);
  for (int round = 0; round < 3; round++) { /* empty; with room; where it would have to grow */
    expect_refused_value(cache, &append, 1, ROW - 1, NAN,
                         "append.value at batch 1, head 1, token 4, element 63, is ");
    expect_refused_value(cache, &append, 1, ROW - 1, -INFINITY, "element 63, is -inf");
    expect_refused_value(cache, &append, 1, ROW - 1, 65520.0f,
                         "append.value at batch 1, head 1, token 4, element 63, is 65520; it must "
                         "fit the dtype");
    expect_refused_value(cache, &append, 0, ROW - 1, INFINITY,
                         "append.key at batch 1, head 1, token 4, element 63, is infinity;");
    expect_refused_value(cache, &append, 0, 0, NAN, "append.key at batch 0, head 0, token 0");
    expect_refused_value(cache, &append, 0, (2 * N + 3) * DIM + 40, NAN,
                         "append.key at batch 1, head 0, token 3, element 40");
    keys[DIM] = 3e38f; /* finite, but the range of its group is not */
    expect_refused_value(cache, &append, 0, DIM + 1, -3e38f,
                         "append.key at batch 0, head 0, token 1, group 0, goes from -3e+38 to "
                         "3e+38");
    keys[DIM] = 0.5f;
    /* Of several the first is named: keys before values, then sequence, head and token. */
    values[0] = NAN;
    expect_refused_value(cache, &append, 0, ROW - 1, NAN, "append.key at batch 1");
    values[3 * DIM] = NAN;
    expect_refused_value(cache, &append, 1, ROW - 1, NAN,
                         "append.value at batch 0, head 0, token 0, element 0");
    values[0] = values[3 * DIM] = 0.5f;
    if (round < 2) expect_ok(nyb_cache_append(cache, &append, NULL));
  }
  expect_ok(nyb_cache_append(cache, &append, NULL)); /* and nothing was wrong with it otherwise */
  assert_int_equal(nyb_cache_length(cache, 1), 15);
  nyb_cache_destroy(cache);
  free(keys);
  free(values);
}

static void test_no_memory_to_grow(void **state) {
  (void)state;
  enum { DIM = 64, N = 65 };
  float *data = random_elements(NYB_F32, 2 * 2 * N * DIM, 31);
  const nyb_input input = rows_from(data, NYB_F32, 2, N, DIM, 0);
  const nyb_cache_options options = options_of(2, 2, affine4, DIM, plain_bf16, DIM);
  nyb_cache *cache = make_cache(&options);
  for (int64_t tokens = 60; tokens <= N; tokens += 5) {
    nyb_append append = append_of(tokens, input, input);
    snapshot before = take_snapshot(cache);
    memory.fail_at = memory.allocations + 1;
    expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_OUT_OF_MEMORY, "bytes for");
    expect_unchanged(cache, &before);
    memory.fail_at = memory.allocations + 1;
    expect_error(nyb_cache_reserve(cache, 1000, NULL), NYB_ERROR_OUT_OF_MEMORY,
                 "bytes for 1000 tokens in each of 2 sequences");
    expect_unchanged(cache, &before);
    free(before.bytes);
    expect_ok(nyb_cache_append(cache, &append, NULL));
  }
  assert_int_equal(nyb_cache_length(cache, 0), 125);
  nyb_cache_destroy(cache);
  free(data);
}

static void test_max_tokens(void **state) {
  (void)state;
  enum { DIM = 64, N = 100 };
  float *data = random_elements(NYB_F32, N * DIM, 41);
  const nyb_input input = rows_from(data, NYB_F32, 1, N, DIM, 0);
  nyb_cache_options options = options_of(1, 1, affine4, DIM, plain_bf16, DIM);
  options.max_tokens = N;
  nyb_cache *cache = make_cache(&options);
  nyb_append append = append_of(N - 1, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  append.tokens = 1;
  expect_ok(nyb_cache_append(cache, &append, NULL));
  assert_int_equal(view_of(cache).capacity_tokens, N); /* not twice 99 */
  snapshot before = take_snapshot(cache);
  expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_LENGTH,
               "append.tokens is 1; the cache holds 100 of at most 100 tokens");
  append.tokens = INT64_MAX;
  expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_LENGTH, "append.tokens is 9223");
  expect_error(nyb_cache_reserve(cache, N + 1, NULL), NYB_ERROR_LENGTH,
               "tokens is 101; the cache may hold 100 at most");
  append.tokens = 0;
  expect_ok(nyb_cache_append(cache, &append, NULL));
  expect_unchanged(cache, &before);
  free(before.bytes);
  nyb_cache_destroy(cache);

  options.max_tokens = 0; /* int32 lengths are the limit then */
  cache = make_cache(&options);
  append.tokens = INT32_MAX;
  append.tokens++;
  expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_LENGTH, "at most 2147483647");
  nyb_cache_destroy(cache);
  free(data);
}

/* ---- Misuse ---------------------------------------------------------------------------------- */

static void test_refused_options(void **state) {
  (void)state;
  nyb_cache_options options;
  nyb_cache *const untouched = (nyb_cache *)&memory;
  nyb_cache *cache = untouched;
  const int64_t allocations = memory.allocations;
#define REFUSED(change, status, words)                                        \
  do {                                                                        \
    options = options_of(2, 3, affine4, 96, affine8, 128);                    \
    change;                                                                   \
    expect_error(nyb_cache_create(context, &options, &cache), status, words); \
  } while (0)
  REFUSED(options.struct_size = 0, NYB_ERROR_STRUCT_SIZE, "options.struct_size is 0");
  REFUSED(options.batch = 0, NYB_ERROR_SHAPE, "options.batch is 0; it must be 1 to");
  REFUSED(options.batch = -1, NYB_ERROR_SHAPE, "options.batch is -1");
  REFUSED(options.batch = INT64_MAX, NYB_ERROR_SHAPE, "options.batch is 9223372036854775807");
  REFUSED(options.kv_heads = 0, NYB_ERROR_SHAPE, "options.kv_heads is 0");
  REFUSED(options.key_dim = 0, NYB_ERROR_SHAPE, "options.key_dim is 0");
  REFUSED(options.value_dim = -64, NYB_ERROR_SHAPE, "options.value_dim is -64");
  REFUSED(options.key_dim = INT64_MAX, NYB_ERROR_SHAPE, "options.key_dim is 9223372036854775807");
  REFUSED(options.key_dim = 80, NYB_ERROR_GROUP_SIZE, "options.key_format.group_size is 32, which");
  REFUSED(options.value_dim = 96, NYB_ERROR_GROUP_SIZE, "does not divide options.value_dim, 96");
  REFUSED(options.value_format.bits = 7, NYB_ERROR_BITS, "options.value_format.bits is 7");
  REFUSED(options.key_format.group_size = 16, NYB_ERROR_GROUP_SIZE, "group_size is 16");
  REFUSED(options.key_format.scheme = (nyb_scheme)0, NYB_ERROR_ENUM, "key_format.scheme is 0");
  REFUSED(options.key_format.dtype = (nyb_dtype)0, NYB_ERROR_ENUM, "key_format.dtype is 0");
  REFUSED(options.rule = (nyb_rule)2, NYB_ERROR_ENUM, "options.rule is 2");
  REFUSED(options.reserved = 1, NYB_ERROR_VALUE, "options.reserved is 1");
  REFUSED(options.max_tokens = -1, NYB_ERROR_SHAPE, "options.max_tokens is -1");
  REFUSED(options.max_tokens = (int64_t)INT32_MAX + 1, NYB_ERROR_SHAPE, "max_tokens is 2147483648");
  REFUSED(options.initial_capacity_tokens = -1, NYB_ERROR_SHAPE, "initial_capacity_tokens is -1");
  REFUSED((options.max_tokens = 10, options.initial_capacity_tokens = 11), NYB_ERROR_SHAPE,
          "options.initial_capacity_tokens is 11; it must be 0 to 10");
  REFUSED(options.initial_capacity_tokens = INT64_MAX, NYB_ERROR_SHAPE, "initial_capacity_tokens");
  REFUSED((options.batch = INT32_MAX, options.kv_heads = INT32_MAX), NYB_ERROR_SHAPE,
          "take more bytes than int64 counts");
  REFUSED((options.batch = INT32_MAX, options.initial_capacity_tokens = INT32_MAX), NYB_ERROR_SHAPE,
          "2147483647 tokens of batch 2147483647");
#undef REFUSED
  options = options_of(2, 3, affine4, 96, affine8, 128);
  expect_error(nyb_cache_create(NULL, &options, &cache), NYB_ERROR_NULL, "context is NULL");
  expect_error(nyb_cache_create(context, NULL, &cache), NYB_ERROR_NULL, "options is NULL");
  expect_error(nyb_cache_create(context, &options, NULL), NYB_ERROR_NULL, "cache is NULL");
  assert_int_equal(memory.allocations, allocations);
  for (int64_t nth = 1; nth <= 2; nth++) {
    options.initial_capacity_tokens = 100;
    memory.fail_at = memory.allocations + nth;
    expect_error(nyb_cache_create(context, &options, &cache), NYB_ERROR_OUT_OF_MEMORY, "bytes for");
  }
  assert_ptr_equal(cache, untouched);
  nyb_cache_destroy(NULL);
}

static void test_refused_calls(void **state) {
  (void)state;
  enum { DIM = 64, N = 4 };
  float *data = random_elements(NYB_F32, N * DIM + 1, 51);
  const nyb_input input = rows_from(data, NYB_F32, 1, N, DIM, 0);
  const nyb_cache_options options = options_of(1, 1, affine4, DIM, plain_bf16, DIM);
  nyb_cache *cache = make_cache(&options);
  nyb_append append = append_of(N, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  snapshot before = take_snapshot(cache);
#define REFUSED(change, status, words)                                   \
  do {                                                                   \
    append = append_of(N, input, input);                                 \
    change;                                                              \
    expect_error(nyb_cache_append(cache, &append, NULL), status, words); \
  } while (0)
  REFUSED(append.struct_size -= 1, NYB_ERROR_STRUCT_SIZE, "append.struct_size");
  REFUSED(append.tokens = -1, NYB_ERROR_SHAPE, "append.tokens is -1");
  REFUSED(append.key.data = NULL, NYB_ERROR_NULL, "append.key.data is NULL");
  REFUSED(append.value.data = NULL, NYB_ERROR_NULL, "append.value.data is NULL");
  REFUSED(append.key.dtype = (nyb_dtype)0, NYB_ERROR_ENUM, "append.key.dtype is 0");
  REFUSED(append.value.dtype = (nyb_dtype)4, NYB_ERROR_ENUM, "append.value.dtype is 4");
  REFUSED(append.key.data = (const char *)data + 2, NYB_ERROR_ALIGNMENT, "append.key.data is 0x");
  REFUSED(append.value.stride[2] = INT64_MAX / 2, NYB_ERROR_STRIDE, "append.value.data");
  REFUSED(append.value.stride[2] = INT64_MIN, NYB_ERROR_STRIDE, "append.value.data");
  REFUSED((append.value.data = before.view.v.codes, append.value.dtype = NYB_BF16),
          NYB_ERROR_OVERLAP, "overlaps append.value.data");
#undef REFUSED
  append = append_of(N, input, input);
  append.key.stride[0] = append.key.stride[1] = INT64_MIN; /* axes of length 1: never looked at */
  expect_error(nyb_cache_append(NULL, &append, NULL), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_append(cache, NULL, NULL), NYB_ERROR_NULL, "append is NULL");
  expect_error(nyb_cache_append(cache, &append, data), NYB_ERROR_VALUE, "stream is 0x");
  expect_error(nyb_cache_reserve(NULL, 1, NULL), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_reserve(cache, -1, NULL), NYB_ERROR_SHAPE, "tokens is -1");
  expect_error(nyb_cache_reserve(cache, INT64_MAX, NULL), NYB_ERROR_LENGTH, "tokens is 9223");
  expect_error(nyb_cache_reserve(cache, 1, data), NYB_ERROR_VALUE, "stream is 0x");
  int64_t trimmed = 77;
  expect_error(nyb_cache_trim(NULL, 0, 1, &trimmed, NULL), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_trim(cache, 1, 1, &trimmed, NULL), NYB_ERROR_VALUE, "sequence is 1");
  expect_error(nyb_cache_trim(cache, -2, 1, &trimmed, NULL), NYB_ERROR_VALUE, "sequence is -2");
  expect_error(nyb_cache_trim(cache, 0, -1, &trimmed, NULL), NYB_ERROR_SHAPE, "tokens is -1");
  expect_error(nyb_cache_trim(cache, 0, 1, &trimmed, data), NYB_ERROR_VALUE, "stream is 0x");
  assert_int_equal(trimmed, 77);
  expect_error(nyb_cache_reset(NULL, NULL), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_reset(cache, data), NYB_ERROR_VALUE, "stream is 0x");
  assert_int_equal(nyb_cache_length(NULL, 0), -1);
  assert_int_equal(nyb_cache_length(cache, 1), -1);
  assert_non_null(strstr(nyb_last_error(), "sequence is 1; it must be 0 to 0"));
  assert_int_equal(nyb_cache_length(cache, -1), -1);
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  expect_error(nyb_cache_get_usage(NULL, &usage), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_get_usage(cache, NULL), NYB_ERROR_NULL, "usage is NULL");
  usage.struct_size = 8;
  expect_error(nyb_cache_get_usage(cache, &usage), NYB_ERROR_STRUCT_SIZE, "usage.struct_size is 8");
  nyb_attention attention = {.struct_size = 8};
  expect_error(nyb_cache_view(cache, &attention), NYB_ERROR_STRUCT_SIZE, "attention.struct_size");
  expect_error(nyb_cache_view(NULL, &attention), NYB_ERROR_NULL, "cache is NULL");
  expect_error(nyb_cache_view(cache, NULL), NYB_ERROR_NULL, "attention is NULL");
  expect_unchanged(cache, &before);
  free(before.bytes);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  nyb_cache_destroy(cache);
  free(data);
}

/* ---- Large addresses ------------------------------------------------------------------------- */

static void *sparse(size_t bytes) {
  void *mapping =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapping == MAP_FAILED ? NULL : mapping;
}

/* Field case 17: with a batch stride of 2^30 elements, index 4 is beyond 2^32 bytes and elements.
 */
static void test_batch_strides_beyond_32_bits(void **state) {
  (void)state;
  enum { DIM = 32, SEQUENCES = 5 };
  const int64_t stride = (int64_t)1 << 30;
  const size_t bytes = (size_t)(stride * (SEQUENCES - 1) + DIM) * 2;
  uint16_t *data = sparse(bytes);
  if (data == NULL) fail_msg("no %zu bytes of addresses", bytes);
  uint64_t seed = 9;
  uint16_t *close_by = malloc(SEQUENCES * DIM * sizeof(uint16_t));
  for (int64_t i = 0; i < SEQUENCES * DIM; i++) put_random(close_by, NYB_BF16, i, &seed);
  for (int64_t s = 0; s < SEQUENCES; s++) {
    memcpy(data + s * stride, close_by + s * DIM, DIM * sizeof(uint16_t));
  }
  const nyb_cache_options options = options_of(SEQUENCES, 1, affine4, DIM, plain_bf16, DIM);
  nyb_cache *cache = make_cache(&options);
  nyb_input input = {data, NYB_BF16, {stride, 0, DIM}};
  const nyb_append append = append_of(1, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  input = (nyb_input){close_by, NYB_BF16, {DIM, 0, DIM}};
  plain_rows keys = quantized(&input, affine4, NYB_RULE_MLX_CPU, SEQUENCES, 1, 1, DIM);
  plain_rows values = quantized(&input, plain_bf16, NYB_RULE_MLX_CPU, SEQUENCES, 1, 1, DIM);
  const nyb_attention view = view_of(cache);
  for (int64_t s = 0; s < SEQUENCES; s++) {
    expect_rows(&view.k, s, 1, 0, 1, &keys, s, 1, 0);
    expect_rows(&view.v, s, 1, 0, 1, &values, s, 1, 0);
  }
  free_rows(&keys);
  free_rows(&values);
  free(close_by);
  nyb_cache_destroy(cache);
  munmap(data, bytes);
}

static size_t sparse_bytes;
static void *sparse_block; /* of so many bytes */

static void *sparse_allocate(void *user_data, size_t bytes, size_t alignment) {
  (void)alignment;
  if (bytes < (size_t)1 << 30) return test_allocate(user_data, bytes, alignment);
  sparse_bytes = bytes;
  sparse_block = sparse(bytes);
  return sparse_block;
}

static void sparse_release(void *user_data, void *block) {
  if (block != sparse_block) {
    test_release(user_data, block);
    return;
  }
  munmap(block, sparse_bytes);
  sparse_block = NULL;
}

/* The same inside the cache: planes of 2^30 elements, so that sequence 4 begins beyond 2^32. */
static void test_planes_beyond_32_bits(void **state) {
  (void)state;
  enum { DIM = 128, SEQUENCES = 5 };
  nyb_context_options context_options = NYB_CONTEXT_OPTIONS_INIT;
  context_options.threads = 1;
  context_options.allocator = (nyb_allocator){sparse_allocate, sparse_release, &memory};
  nyb_context *sparse_context = NULL;
  expect_ok(nyb_context_create(&context_options, &sparse_context));
  nyb_cache_options options = options_of(SEQUENCES, 1, plain_bf16, DIM, plain_bf16, DIM);
  options.initial_capacity_tokens = ((int64_t)1 << 30) / DIM;
  nyb_cache *cache = NULL;
  expect_ok(nyb_cache_create(sparse_context, &options, &cache));
  uint16_t *data = random_elements(NYB_BF16, SEQUENCES * DIM, 61);
  const nyb_input input = {data, NYB_BF16, {DIM, 0, DIM}};
  nyb_append append = append_of(1, input, input);
  expect_ok(nyb_cache_append(cache, &append, NULL));
  append.key.data = append.value.data = data + DIM; /* only sequences 0 to 3 of it are read */
  append.key.stride[0] = append.value.stride[0] = 0;
  expect_ok(nyb_cache_append(cache, &append, NULL));
  const nyb_attention view = view_of(cache);
  assert_int_equal(view.k.codes_stride[0], (int64_t)1 << 30);
  for (int64_t s = 0; s < SEQUENCES; s++) {
    assert_memory_equal(stored_row(&view.k, 0, s, 0, 0), data + s * DIM, DIM * 2);
    assert_memory_equal(stored_row(&view.v, 0, s, 0, 0), data + s * DIM, DIM * 2);
    assert_memory_equal(stored_row(&view.v, 0, s, 0, 1), data + DIM, DIM * 2);
  }
  nyb_cache_destroy(cache);
  nyb_context_destroy(sparse_context);
  free(data);
}

/* ---- Threads and counters -------------------------------------------------------------------- */

static void backwards(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  ++*(int64_t *)user_data;
  for (int64_t i = task_count - 1; i >= 0; i--) task(task_data, i);
}

typedef struct shared_tasks {
  nyb_task task;
  void *task_data;
  int64_t task_count;
  _Atomic int64_t next;
} shared_tasks;

static void *take_tasks(void *shared) {
  shared_tasks *tasks = shared;
  for (int64_t i = tasks->next++; i < tasks->task_count; i = tasks->next++) {
    tasks->task(tasks->task_data, i);
  }
  return NULL;
}

/* Threads whose synchronisation ThreadSanitizer sees; that of a ready-made pool it may not. */
static void with_threads(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  ++*(int64_t *)user_data;
  shared_tasks tasks = {task, task_data, task_count, 0};
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, take_tasks, &tasks), 0);
  }
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
}

static void test_any_number_of_threads(void **state) {
  (void)state;
  enum { DIM = 128, N = 333 };
  float *data = random_elements(NYB_F32, 2 * 2 * N * DIM, 71);
  const nyb_input input = rows_from(data, NYB_F32, 2, N, DIM, 0);
  nyb_append append = append_of(N, input, input);
  const nyb_cache_options options = options_of(2, 2, affine4, DIM, affine8, DIM);
  nyb_cache *alone = make_cache(&options);
  expect_ok(nyb_cache_append(alone, &append, NULL));
  expect_ok(nyb_cache_append(alone, &append, NULL));
  static const int64_t threads[] = {2, 3, 7, 16, 4, 4};
  static const nyb_parallel_for loops[] = {NULL, NULL, NULL, NULL, backwards, with_threads};
  int64_t calls[6] = {0};
  for (int i = 0; i < 6; i++) {
    nyb_context_options context_options = NYB_CONTEXT_OPTIONS_INIT;
    context_options.threads = threads[i];
    context_options.parallel_for = loops[i];
    context_options.parallel_for_data = &calls[i];
    nyb_context *many = NULL;
    expect_ok(nyb_context_create(&context_options, &many));
    nyb_cache *cache = NULL;
    expect_ok(nyb_cache_create(many, &options, &cache));
    expect_ok(nyb_cache_append(cache, &append, NULL));
    expect_ok(nyb_cache_append(cache, &append, NULL)); /* grows: planes are moved in parallel */
    expect_same_caches(cache, alone);
    float *const first = &data[(N + 7) * DIM + 3], *const second = &data[(3 * N + 8) * DIM];
    const float kept[2] = {*first, *second};
    *first = *second = NAN;
    for (int repeat = 0; repeat < 10; repeat++) { /* the first is named, whoever finds which */
      expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_NON_FINITE,
                   "append.key at batch 0, head 1, token 7, element 3");
    }
    *first = kept[0];
    *second = kept[1];
    nyb_cache_destroy(cache);
    nyb_context_destroy(many);
  }
  assert_true(calls[4] > 0);
  assert_int_equal(calls[5], calls[4]);
  nyb_cache_destroy(alone);
  free(data);
}

/* One context, a cache for each thread. */
static void *append_and_trim(void *failures) {
  enum { DIM = 64, N = 40 };
  float *data = random_elements(NYB_F32, N * DIM, 81);
  const nyb_input input = rows_from(data, NYB_F32, 1, N, DIM, 0);
  const nyb_append append = append_of(N, input, input);
  const nyb_cache_options options = options_of(1, 1, affine4, DIM, affine8, DIM);
  nyb_cache *cache = NULL;
  if (nyb_cache_create(context, &options, &cache) != NYB_OK) ++*(int *)failures;
  for (int i = 0; i < 50; i++) {
    if (nyb_cache_append(cache, &append, NULL) != NYB_OK) ++*(int *)failures;
    if (nyb_cache_trim(cache, 0, 3, NULL, NULL) != NYB_OK) ++*(int *)failures;
  }
  if (nyb_cache_length(cache, 0) != 50 * (N - 3)) ++*(int *)failures;
  nyb_cache_destroy(cache);
  free(data);
  return NULL;
}

static void test_caches_of_one_context_in_threads(void **state) {
  (void)state;
  nyb_context *const old = context;
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 2;
  expect_ok(nyb_context_create(&options, &context)); /* the C library's allocator */
  pthread_t threads[4];
  int failures[4] = {0};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, append_and_trim, &failures[i]), 0);
  }
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(failures[i], 0);
  }
  nyb_context_destroy(context);
  context = old;
}

static int64_t calls_of(const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    expect_ok(nyb_kernel_at(context, i, &kernel));
    if (strcmp(kernel.operation, "quantize") == 0 && strcmp(kernel.format, name) == 0 &&
        kernel.calls > 0) {
      return kernel.calls;
    }
  }
  return 0;
}

static void test_counters(void **state) {
  (void)state;
  float *data = random_elements(NYB_F32, 64, 91);
  const nyb_input input = rows_from(data, NYB_F32, 1, 1, 64, 0);
  nyb_append append = append_of(1, input, input);
  const nyb_cache_options options = options_of(1, 1, affine4, 64, affine8, 64);
  nyb_cache *cache = make_cache(&options);
  nyb_counters_clear(context);
  for (int i = 0; i < 3; i++) expect_ok(nyb_cache_append(cache, &append, NULL));
  data[0] = NAN;
  expect_error(nyb_cache_append(cache, &append, NULL), NYB_ERROR_NON_FINITE, "append.key");
  nyb_counters counters = NYB_COUNTERS_INIT;
  expect_ok(nyb_counters_get(context, &counters));
  assert_int_equal(counters.cache_append, 3);
  assert_int_equal(counters.quantize, 0);
  assert_int_equal(calls_of("affine4"), 3);
  assert_int_equal(calls_of("affine8"), 3);
  nyb_cache_destroy(cache);
  free(data);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TEST(test_append_is_quantize),
      TEST(test_view_by_hand),
      TEST(test_50000_single_appends),
      TEST(test_usage_by_arithmetic),
      TEST(test_reserve_and_initial_capacity),
      TEST(test_planes_are_aligned),
      TEST(test_view_sets_its_own_fields),
      TEST(test_trim_is_never_drafted),
      TEST(test_sequences_of_their_own_length),
      TEST(test_refused_values),
      TEST(test_no_memory_to_grow),
      TEST(test_max_tokens),
      TEST(test_refused_options),
      TEST(test_refused_calls),
      TEST(test_batch_strides_beyond_32_bits),
      TEST(test_planes_beyond_32_bits),
      TEST(test_any_number_of_threads),
      TEST(test_caches_of_one_context_in_threads),
      TEST(test_counters),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
