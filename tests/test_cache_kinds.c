/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of cache against a model that knows only which tokens a sequence has: whatever was
 * appended, trimmed, reordered or refused, the view leads to the bits of quantizing each token
 * alone, and lengths, usage and memory are right. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../src/cache.h"
#include "check.h"
#include "expect.h"
#include "nybble.h"
#include "oracle.h"

/* ---- A context whose memory is counted, poisoned, and can run out ---------------------------- */

typedef struct test_memory {
  _Atomic int64_t live_blocks, live_bytes, most_bytes, allocations;
  int64_t fail_at; /* the allocation that fails, counted from 1; 0: none */
} test_memory;

static test_memory memory;
static nyb_context *context;

enum { HEADER_BYTES = 64 };

static void *test_allocate(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  if (++memory.allocations == memory.fail_at) return NULL;
  assert_true(alignment <= HEADER_BYTES);
  const size_t whole = (bytes + 2 * HEADER_BYTES - 1) / HEADER_BYTES * HEADER_BYTES;
  char *block = aligned_alloc(HEADER_BYTES, whole);
  if (block == NULL) return NULL;
  memset(block, 0xff, whole); /* NaN, and lengths of -1 */
  memcpy(block, &bytes, sizeof bytes);
  memory.live_blocks++;
  memory.live_bytes += (int64_t)bytes;
  if (memory.live_bytes > memory.most_bytes) memory.most_bytes = memory.live_bytes;
  return block + HEADER_BYTES;
}

static void test_release(void *user_data, void *block) {
  (void)user_data;
  char *const whole = (char *)block - HEADER_BYTES;
  size_t bytes;
  memcpy(&bytes, whole, sizeof bytes);
  memset(block, 0xfe, bytes); /* what is read afterwards is wrong */
  memory.live_blocks--;
  memory.live_bytes -= (int64_t)bytes;
  free(whole);
}

static void make_context(int64_t threads) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = threads;
  static int64_t count;
  count = threads;
  options.parallel_for = check_parallel_for;
  options.parallel_for_data = &count;
  options.allocator = (nyb_allocator){test_allocate, test_release, NULL};
  if (nyb_context_create(&options, &context) != NYB_OK) fail_msg("%s", nyb_last_error());
}

static int set_up(void **state) {
  (void)state;
  memset(&memory, 0, sizeof memory);
  make_context(1);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  nyb_context_destroy(context);
  return memory.live_blocks == 0 ? 0 : -1;
}

/* ---- Tokens -----------------------------------------------------------------------------------
 */

/* A token is a number, which says what its rows are. */
enum { HEADS = 2, MOST_DIM = 128, KEY = 0, VALUE = 1, PADDING = -1 };

static uint32_t mixed_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (uint32_t)((x ^ (x >> 31)) >> 32);
}

/* -1 to 1 with all of f32's digits, so that rounding to a part's dtype shows; padding is NaN. */
static void put_row(float *row, int64_t dim, int64_t token, int part, int64_t head) {
  for (int64_t i = 0; i < dim; i++) {
    const uint64_t seed = ((uint64_t)token * 2 + (uint64_t)part) * HEADS + (uint64_t)head;
    const uint32_t bits = mixed_bits(seed * MOST_DIM + (uint64_t)i + 0x9e3779b97f4a7c15u);
    row[i] = token == PADDING ? NAN : (float)(int32_t)bits * 0x1p-31f;
  }
}

/* ---- The model --------------------------------------------------------------------------------
 */

enum { MOST_BATCH = 6, MOST_TOKENS = 4096 };

typedef struct model_sequence {
  int64_t count; /* tokens in all */
  int64_t from;  /* rotating: tokens from here on are there, and the first window_keep_tokens */
  int64_t last_begin;
  int32_t tokens[MOST_TOKENS];
} model_sequence;

typedef struct scene {
  const char *name;
  nyb_cache_options options;
  nyb_cache *cache;
  nyb_cache_kind kind;
  int64_t batch;
  model_sequence *sequences; /* [MOST_BATCH] */
  int32_t next_token;
  check_random random;
} scene;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t below(scene *s, int64_t bound) { return check_random_below(&s->random, bound); }

static void model_append(const scene *s, model_sequence *sequence, const int32_t *tokens,
                         int64_t count) {
  const nyb_cache_options *options = &s->options;
  if (count == 0) return;
  const int64_t first_row = sequence->count;
  memcpy(sequence->tokens + sequence->count, tokens, (size_t)count * sizeof *tokens);
  sequence->count += count;
  const int64_t window = options->window_tokens - options->window_keep_tokens;
  if (window > 0) {
    const int64_t sees = larger(options->window_keep_tokens, first_row - window + 1);
    sequence->from = larger(sequence->from, sees);
  }
  sequence->last_begin =
      larger(sequence->last_begin, larger(smaller(options->first_tokens, sequence->count),
                                          sequence->count - options->last_tokens));
}

/* Whether a sequence can lose that many tokens: the next row must find all that it sees. */
static bool model_can_trim(const scene *s, const model_sequence *sequence, int64_t tokens) {
  const int64_t keep = s->options.window_keep_tokens;
  const int64_t window = s->options.window_tokens - keep;
  const int64_t left = larger(0, sequence->count - tokens);
  if (window == 0 || tokens == 0 || sequence->from <= keep || left <= keep) return true;
  return larger(keep, left - window + 1) >= sequence->from;
}

static void model_trim(const scene *s, model_sequence *sequence, int64_t tokens) {
  sequence->count = larger(0, sequence->count - tokens);
  sequence->last_begin = smaller(sequence->last_begin, sequence->count);
  if (sequence->count <= s->options.window_keep_tokens) sequence->from = 0;
}

static bool model_holds(const scene *s, const model_sequence *sequence, int64_t i) {
  return i < s->options.window_keep_tokens || i >= sequence->from;
}

/* ---- What the view leads to -------------------------------------------------------------------
 */

typedef struct row_place {
  const nyb_stored *rows;
  int64_t block, row;
} row_place;

static row_place place_in(const nyb_attention *view, int part, int64_t sequence, int64_t t) {
  const nyb_stored *body = part == KEY ? &view->k : &view->v;
  row_place place = {body, sequence, t};
  if (view->pages.table != NULL) {
    const nyb_pages *pages = &view->pages;
    assert_true(t / pages->page_tokens < pages->table_stride);
    place.block = pages->table[sequence * pages->table_stride + t / pages->page_tokens];
    place.row = t % pages->page_tokens;
    assert_true(place.block >= 0 && place.block < pages->page_count);
  } else if (view->ring.offsets != NULL) {
    const int64_t keep = view->ring.keep_tokens, slots = view->capacity_tokens - keep;
    const int64_t offset = view->ring.offsets[sequence];
    assert_true(slots == 0 || (offset >= 0 && offset < slots));
    if (t >= keep) place.row = keep + (t - keep + offset) % slots;
    assert_true(view->lengths[sequence] <= view->capacity_tokens);
  } else if (t < view->first.tokens) {
    place.rows = part == KEY ? &view->first.k : &view->first.v;
  } else if (view->last.tokens > 0 && t >= view->last_begins[sequence]) {
    place.rows = part == KEY ? &view->last.k : &view->last.v;
    place.row = t % view->last.tokens;
  } else {
    place.row = t - view->first.tokens;
    assert_true(place.row < view->capacity_tokens);
  }
  return place;
}

/* The bits of a row: codes, then scales, then biases. Returns how many bytes there are. */
static int64_t read_row(const row_place *place, int64_t head, int64_t dim, char *bytes) {
  const nyb_stored *rows = place->rows;
  const bool affine = rows->format.scheme == NYB_AFFINE;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
  const void *const data[3] = {rows->codes, rows->scales, rows->biases};
  const int64_t *const strides[3] = {rows->codes_stride, rows->scales_stride, rows->biases_stride};
  int64_t count = 0;
  for (int i = 0; i < (affine ? 3 : 1); i++) {
    const int64_t element = affine && i == 0 ? 4 : scale_bytes;
    const int64_t row_bytes = !affine  ? dim * scale_bytes
                              : i == 0 ? dim * rows->format.bits / 8
                                       : dim / rows->format.group_size * scale_bytes;
    const int64_t offset =
        place->block * strides[i][0] + head * strides[i][1] + place->row * strides[i][2];
    memcpy(bytes + count, (const char *)data[i] + offset * element, (size_t)row_bytes);
    count += row_bytes;
  }
  return count;
}

/* Those of quantizing a token's row alone, rounded to `rounded_to` first where that is a dtype. */
static int64_t wanted_row(const scene *s, nyb_format format, nyb_dtype rounded_to, int64_t dim,
                          int64_t token, int part, int64_t head, char *bytes) {
  float row[MOST_DIM];
  _Alignas(4) char rounded[MOST_DIM * 4], codes[MOST_DIM * 4], scales[64], biases[64];
  put_row(row, dim, token, part, head);
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = quantize.heads = quantize.tokens = 1;
  quantize.dim = dim;
  quantize.rule = s->options.rule;
  quantize.input = (nyb_input){.data = row, .dtype = NYB_F32};
  quantize.output = (nyb_stored_output){.format = {NYB_PLAIN, 0, 0, rounded_to}, .codes = rounded};
  if (rounded_to != 0) {
    expect_ok(nyb_quantize_run(context, &quantize, NULL));
    quantize.input = (nyb_input){.data = rounded, .dtype = rounded_to};
  }
  const bool affine = format.scheme == NYB_AFFINE;
  quantize.output = (nyb_stored_output){.format = format,
                                        .codes = codes,
                                        .scales = affine ? scales : NULL,
                                        .biases = affine ? biases : NULL};
  expect_ok(nyb_quantize_run(context, &quantize, NULL));
  const nyb_stored stored = {.format = format,
                             .codes = codes,
                             .scales = quantize.output.scales,
                             .biases = quantize.output.biases};
  const row_place place = {&stored, 0, 0};
  return read_row(&place, 0, dim, bytes);
}

static void expect_token(const scene *s, const nyb_attention *view, int64_t sequence, int64_t t,
                         int64_t i) {
  const model_sequence *model = &s->sequences[sequence];
  const bool mixed = s->kind == NYB_CACHE_MIXED;
  const bool plain = mixed && (i < s->options.first_tokens || i >= model->last_begin);
  const nyb_format part_format = {NYB_PLAIN, 0, 0, s->options.part_dtype};
  for (int part = KEY; part <= VALUE; part++) {
    const int64_t dim = part == KEY ? s->options.key_dim : s->options.value_dim;
    const nyb_format body = part == KEY ? s->options.key_format : s->options.value_format;
    const row_place place = place_in(view, part, sequence, t);
    assert_int_equal(place.rows->format.scheme, plain ? NYB_PLAIN : body.scheme);
    for (int64_t head = 0; head < HEADS; head++) {
      char held[MOST_DIM * 4], wanted[MOST_DIM * 4];
      const int64_t bytes = read_row(&place, head, dim, held);
      assert_int_equal(bytes, wanted_row(s, plain ? part_format : body, s->options.part_dtype, dim,
                                         model->tokens[i], part, head, wanted));
      if (memcmp(held, wanted, (size_t)bytes) != 0) {
        fail_msg("%s: part %d, sequence %" PRId64 ", head %" PRId64 ", held token %" PRId64
                 " is not token %" PRId64 " of %" PRId64,
                 s->name, part, sequence, head, t, i, model->count);
      }
    }
  }
}

static int64_t row_bytes(nyb_format format, int64_t dim) {
  return nyb_format_row_bytes(&format, dim);
}

/* Bytes of the tokens that a sequence holds. */
static int64_t model_bytes(const scene *s, int64_t sequence) {
  const nyb_cache_options *o = &s->options;
  const model_sequence *model = &s->sequences[sequence];
  const nyb_format plain = {NYB_PLAIN, 0, 0, o->part_dtype};
  int64_t bytes = 0;
  for (int64_t i = 0; i < model->count; i++) {
    if (!model_holds(s, model, i)) continue;
    const bool in_part =
        s->kind == NYB_CACHE_MIXED && (i < o->first_tokens || i >= model->last_begin);
    bytes += HEADS * (row_bytes(in_part ? plain : o->key_format, o->key_dim) +
                      row_bytes(in_part ? plain : o->value_format, o->value_dim));
  }
  return bytes;
}

static nyb_attention view_of(const nyb_cache *cache) {
  nyb_attention view = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &view));
  return view;
}

static nyb_cache_usage usage_of(const nyb_cache *cache) {
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  expect_ok(nyb_cache_get_usage(cache, &usage));
  return usage;
}

/* Every page is either unused or held by as many sequences as it counts. */
static void expect_pages_counted(const nyb_cache *cache) {
  const nyb_cache_pool *pool = &cache->pool;
  const int64_t pages = cache->storage.blocks, page_tokens = cache->options.page_tokens;
  int32_t *holders = calloc((size_t)pages + 1, sizeof *holders);
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    for (int64_t page = 0; page * page_tokens < cache->lengths[sequence]; page++) {
      holders[pool->table[sequence * pool->table_stride + page]]++;
    }
  }
  int64_t unused = 0;
  for (int64_t page = 0; page < pages; page++) {
    assert_int_equal(holders[page], pool->references[page]);
    unused += holders[page] == 0;
  }
  assert_int_equal(unused, pool->unused_count);
  for (int64_t i = 0; i < unused; i++) assert_int_equal(holders[pool->unused[i]]++, 0);
  free(holders);
}

/* The cache holds what the model does, every bit of it. */
static void expect_model(const scene *s) {
  const nyb_attention view = view_of(s->cache);
  assert_int_equal(view.batch, s->batch);
  int64_t bytes = 0;
  for (int64_t sequence = 0; sequence < s->batch; sequence++) {
    const model_sequence *model = &s->sequences[sequence];
    int64_t held = 0;
    for (int64_t i = 0; i < model->count; i++) {
      if (model_holds(s, model, i)) expect_token(s, &view, sequence, held++, i);
    }
    assert_int_equal(nyb_cache_length(s->cache, sequence), model->count);
    assert_int_equal(nyb_cache_held_tokens(s->cache, sequence), held);
    assert_int_equal(view.lengths[sequence], held);
    if (view.last_begins != NULL) {
      assert_int_equal(view.last_begins[sequence], model->last_begin);
    }
    bytes += model_bytes(s, sequence);
  }
  const nyb_cache_usage usage = usage_of(s->cache);
  if (s->kind == NYB_CACHE_PAGED) {
    assert_true(usage.used_bytes <= bytes);
    expect_pages_counted(s->cache);
  } else {
    assert_int_equal(usage.used_bytes, bytes);
  }
  assert_true(usage.used_bytes <= usage.allocated_bytes);
}

/* ---- Appends ----------------------------------------------------------------------------------
 */

typedef struct appended_rows {
  float *data[2];
  nyb_append append;
  int32_t padding[MOST_BATCH];
  int32_t *tokens; /* [batch, count]: what they are, PADDING first */
  int64_t count;
} appended_rows;

/* [batch, heads, count, dim], or with heads and tokens exchanged. */
static void make_rows(scene *s, int64_t count, bool padded, appended_rows *made) {
  *made = (appended_rows){.append = NYB_APPEND_INIT, .count = count};
  made->tokens = malloc((size_t)(s->batch * count + 1) * sizeof *made->tokens);
  for (int64_t sequence = 0; sequence < s->batch; sequence++) {
    const int64_t padding = padded ? below(s, count + 1) : 0;
    made->padding[sequence] = (int32_t)padding;
    for (int64_t i = 0; i < count; i++) {
      made->tokens[sequence * count + i] = i < padding ? PADDING : s->next_token++;
    }
  }
  nyb_input *const inputs[2] = {&made->append.key, &made->append.value};
  for (int part = KEY; part <= VALUE; part++) {
    const int64_t dim = part == KEY ? s->options.key_dim : s->options.value_dim;
    const bool exchanged = below(s, 3) == 0;
    nyb_input *input = inputs[part];
    *input = (nyb_input){.dtype = NYB_F32, .stride = {HEADS * count * dim, count * dim, dim}};
    if (exchanged) {
      input->stride[1] = dim;
      input->stride[2] = HEADS * dim;
    }
    made->data[part] = malloc((size_t)(s->batch * HEADS * count * dim + 1) * sizeof(float));
    input->data = made->data[part];
    for (int64_t row = 0; row < s->batch * HEADS * count; row++) {
      const int64_t sequence = row / HEADS / count, head = row / count % HEADS, i = row % count;
      put_row(made->data[part] + sequence * input->stride[0] + head * input->stride[1] +
                  i * input->stride[2],
              dim, made->tokens[sequence * count + i], part, head);
    }
  }
  made->append.tokens = count;
  if (padded) made->append.padding = made->padding;
}

static void free_rows(appended_rows *made) {
  free(made->data[0]);
  free(made->data[1]);
  free(made->tokens);
}

static void append_to_model(scene *s, const appended_rows *made) {
  for (int64_t sequence = 0; sequence < s->batch; sequence++) {
    const int64_t padding = made->padding[sequence];
    model_append(s, &s->sequences[sequence], made->tokens + sequence * made->count + padding,
                 made->count - padding);
  }
}

/* Makes one of the rows that count something that cannot be stored. */
static bool spoil(scene *s, appended_rows *made, float **spoiled, float *was) {
  const int64_t sequence = below(s, s->batch), i = below(s, made->count);
  if (i < made->padding[sequence]) return false;
  const int part = (int)below(s, 2);
  const nyb_input *input = part == KEY ? &made->append.key : &made->append.value;
  const int64_t dim = part == KEY ? s->options.key_dim : s->options.value_dim;
  *spoiled = made->data[part] + sequence * input->stride[0] + below(s, HEADS) * input->stride[1] +
             i * input->stride[2] + below(s, dim);
  *was = **spoiled;
  **spoiled = below(s, 2) == 0 ? NAN : -INFINITY;
  return true;
}

static void append(scene *s, int64_t count, bool padded) {
  appended_rows made;
  make_rows(s, count, padded, &made);
  expect_ok(nyb_cache_append(s->cache, &made.append, NULL));
  append_to_model(s, &made);
  free_rows(&made);
}

/* ---- Scenes -----------------------------------------------------------------------------------
 */

static const nyb_format affine4 = {NYB_AFFINE, 4, 32, NYB_F32};
static const nyb_format affine3 = {NYB_AFFINE, 3, 32, NYB_F16};
static const nyb_format affine8 = {NYB_AFFINE, 8, 64, NYB_BF16};
static const nyb_format plain_f16 = {NYB_PLAIN, 0, 0, NYB_F16};

enum { SCENES = 12 };

/* The kinds, each with K and V of different formats and dims. */
static nyb_cache_options scene_options(int index, const char **name) {
  static const struct {
    const char *name;
    int64_t window, keep, first, last;
    nyb_dtype part_dtype;
    int64_t page;
  } kinds[SCENES] = {
      {"contiguous", 0, 0, 0, 0, 0, 0},
      {"rotating 8", 8, 0, 0, 0, 0, 0},
      {"rotating 1", 1, 0, 0, 0, 0, 0},
      {"rotating 12, keep 4", 12, 4, 0, 0, 0, 0},
      {"rotating 5, keep 4", 5, 4, 0, 0, 0, 0},
      {"rotating 90, keep 3", 90, 3, 0, 0, 0, 0},
      {"mixed 3 + 5 bf16", 0, 0, 3, 5, NYB_BF16, 0},
      {"mixed 0 + 7 f32", 0, 0, 0, 7, NYB_F32, 0},
      {"mixed 4 + 0 f16", 0, 0, 4, 0, NYB_F16, 0},
      {"mixed 1 + 80 f16", 0, 0, 1, 80, NYB_F16, 0},
      {"paged 16", 0, 0, 0, 0, 0, 16},
      {"paged 23", 0, 0, 0, 0, 0, 23},
  };
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  *name = kinds[index].name;
  options.batch = 3;
  options.kv_heads = HEADS;
  options.key_dim = 64;
  options.value_dim = index % 2 == 0 ? 128 : 32;
  options.key_format = index % 3 == 0 ? affine3 : affine4;
  options.value_format = index % 4 == 3 ? plain_f16 : index % 2 == 0 ? affine8 : affine4;
  options.rule = index % 2 == 0 ? NYB_RULE_MLX_CPU : NYB_RULE_MLX_GPU;
  options.window_tokens = kinds[index].window;
  options.window_keep_tokens = kinds[index].keep;
  options.first_tokens = kinds[index].first;
  options.last_tokens = kinds[index].last;
  options.part_dtype = kinds[index].part_dtype;
  options.page_tokens = kinds[index].page;
  return options;
}

static void start(scene *s, const char *name, const nyb_cache_options *options, uint64_t seed) {
  *s = (scene){.name = name, .options = *options, .batch = options->batch};
  s->sequences = calloc(MOST_BATCH, sizeof *s->sequences);
  s->random.state = seed;
  s->next_token = 1;
  expect_ok(nyb_cache_create(context, options, &s->cache));
  s->kind = options->window_tokens > 0                              ? NYB_CACHE_ROTATING
            : options->page_tokens > 0                              ? NYB_CACHE_PAGED
            : options->first_tokens > 0 || options->last_tokens > 0 ? NYB_CACHE_MIXED
                                                                    : NYB_CACHE_CONTIGUOUS;
  assert_int_equal(s->cache->kind, s->kind);
}

static void finish(scene *s) {
  nyb_cache_destroy(s->cache);
  free(s->sequences);
}

/* ---- A random walk ----------------------------------------------------------------------------
 */

static void walk_append(scene *s) {
  static const int64_t sizes[] = {1, 1, 1, 1, 2, 3, 7, 16, 40, 0};
  appended_rows made;
  make_rows(s, sizes[below(s, 10)], below(s, 3) == 0, &made);
  float *spoiled, was;
  if (made.count > 0 && below(s, 4) == 0 && spoil(s, &made, &spoiled, &was)) {
    expect_error(nyb_cache_append(s->cache, &made.append, NULL), NYB_ERROR_NON_FINITE,
                 "every value must be finite");
    expect_model(s);
    *spoiled = was;
  }
  memory.fail_at = below(s, 2) == 0 ? memory.allocations + 1 + below(s, 3) : 0;
  nyb_status status = nyb_cache_append(s->cache, &made.append, NULL);
  memory.fail_at = 0;
  if (status == NYB_ERROR_OUT_OF_MEMORY) {
    expect_model(s);
    status = nyb_cache_append(s->cache, &made.append, NULL);
  }
  expect_ok(status);
  append_to_model(s, &made);
  free_rows(&made);
}

static void walk_trim(scene *s) {
  const bool all = below(s, 3) == 0;
  const int64_t sequence = all ? NYB_ALL_SEQUENCES : below(s, s->batch);
  const int64_t tokens = below(s, 8) == 0 ? below(s, 200) : below(s, 9);
  bool can = true;
  int64_t most = 0;
  for (int64_t i = 0; i < s->batch; i++) {
    if (!all && i != sequence) continue;
    can &= model_can_trim(s, &s->sequences[i], tokens);
    most = larger(most, smaller(tokens, s->sequences[i].count));
  }
  int64_t trimmed = -7;
  if (!can) {
    expect_error(nyb_cache_trim(s->cache, sequence, tokens, &trimmed, NULL), NYB_ERROR_LENGTH,
                 "at most be dropped");
    assert_int_equal(trimmed, -7);
    return;
  }
  expect_ok(nyb_cache_trim(s->cache, sequence, tokens, &trimmed, NULL));
  assert_int_equal(trimmed, most);
  for (int64_t i = 0; i < s->batch; i++) {
    if (all || i == sequence) model_trim(s, &s->sequences[i], tokens);
  }
}

static void reorder_model(scene *s, const int64_t *sources, int64_t count) {
  model_sequence *was = malloc(MOST_BATCH * sizeof *was);
  memcpy(was, s->sequences, MOST_BATCH * sizeof *was);
  for (int64_t i = 0; i < count; i++) s->sequences[i] = was[sources[i]];
  free(was);
  s->batch = count;
}

static void walk_reorder(scene *s) {
  int64_t sources[MOST_BATCH];
  const int64_t count = 1 + below(s, MOST_BATCH);
  for (int64_t i = 0; i < count; i++) sources[i] = below(s, s->batch);
  const bool permutes = below(s, 2) == 0 && count == s->batch;
  for (int64_t i = 0; permutes && i < count; i++) sources[i] = i;
  for (int64_t i = count - 1; permutes && i > 0; i--) {
    const int64_t other = below(s, i + 1), was = sources[i];
    sources[i] = sources[other];
    sources[other] = was;
  }
  memory.fail_at = below(s, 2) == 0 ? memory.allocations + 1 + below(s, 5) : 0;
  nyb_status status = nyb_cache_reorder(s->cache, sources, count, NULL);
  memory.fail_at = 0;
  if (status == NYB_ERROR_OUT_OF_MEMORY) {
    expect_model(s);
    status = nyb_cache_reorder(s->cache, sources, count, NULL);
  }
  expect_ok(status);
  reorder_model(s, sources, count);
}

static void walk_step(scene *s) {
  const int64_t dice = below(s, 100);
  if (dice < 60) {
    walk_append(s);
  } else if (dice < 80) {
    walk_trim(s);
  } else if (dice < 97) {
    walk_reorder(s);
  } else if (dice < 98) {
    expect_ok(nyb_cache_reserve(s->cache, below(s, 300), NULL));
  } else {
    expect_ok(nyb_cache_reset(s->cache, NULL));
    for (int64_t i = 0; i < s->batch; i++) model_trim(s, &s->sequences[i], MOST_TOKENS);
  }
}

/* Steps until a sequence would be too long for the model. */
static void walk(int index, int64_t steps, int64_t initial_capacity) {
  const char *name;
  nyb_cache_options options = scene_options(index, &name);
  options.initial_capacity_tokens = initial_capacity;
  scene s;
  start(&s, name, &options, 1000 + (uint64_t)index);
  for (int64_t step = 0; step < steps; step++) {
    walk_step(&s);
    expect_model(&s);
    for (int64_t i = 0; i < s.batch; i++) {
      if (s.sequences[i].count < 160) continue;
      expect_ok(nyb_cache_trim(s.cache, i, MOST_TOKENS, NULL, NULL));
      model_trim(&s, &s.sequences[i], MOST_TOKENS);
    }
  }
  finish(&s);
}

static void test_random_walks(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) walk(index, 250, index % 3 == 1 ? 20 : 0);
}

/* The same bits with appends and moves cut into tasks. */
static void test_random_walks_in_threads(void **state) {
  (void)state;
  nyb_context_destroy(context);
  make_context(3);
  for (int index = 0; index < SCENES; index++) walk(index, 60, 0);
}

/* ---- Field cases ------------------------------------------------------------------------------
 */

/* Case 43: append 5, trim 3, append 3 is as if those had never been drafted; what was trimmed is
 * said. */
static void test_drafts_leave_no_trace(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    const nyb_cache_options options = scene_options(index, &name);
    scene s;
    start(&s, name, &options, 5);
    append(&s, 20, false);
    for (int round = 0; round < 40; round++) {
      append(&s, 5, false);
      int64_t trimmed = 0;
      expect_ok(nyb_cache_trim(s.cache, NYB_ALL_SEQUENCES, 3, &trimmed, NULL));
      assert_int_equal(trimmed, 3);
      for (int64_t i = 0; i < s.batch; i++) model_trim(&s, &s.sequences[i], 3);
      append(&s, 3, false);
      expect_model(&s);
    }
    finish(&s);
  }
}

/* Case 48: reorder and crop reach the quantized tokens as well as the plain ones. */
static void test_reorder_reaches_all_parts(void **state) {
  (void)state;
  static const int64_t sources[] = {2, 2, 0, 1};
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    nyb_cache_options options = scene_options(index, &name);
    options.batch = 4;
    scene s;
    start(&s, name, &options, 48);
    append(&s, 31, false);
    append(&s, 9, true);
    append(&s, 1, false);
    expect_ok(nyb_cache_reorder(s.cache, sources, 4, NULL));
    reorder_model(&s, sources, 4);
    expect_model(&s);
    append(&s, 2, false); /* the twins part */
    expect_model(&s);
    if (s.kind != NYB_CACHE_ROTATING) { /* behind the last part, then behind the first */
      expect_ok(nyb_cache_trim(s.cache, 1, 12, NULL, NULL));
      model_trim(&s, &s.sequences[1], 12);
      expect_model(&s);
      append(&s, 3, false);
      expect_model(&s);
      expect_ok(nyb_cache_trim(s.cache, 0, s.sequences[0].count - 2, NULL, NULL));
      model_trim(&s, &s.sequences[0], s.sequences[0].count - 2);
      expect_model(&s);
    }
    append(&s, 11, false);
    expect_model(&s);
    finish(&s);
  }
}

/* ---- Memory -----------------------------------------------------------------------------------
 */

static void test_50000_single_appends(void **state) {
  (void)state;
  enum { N = 50000 };
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    nyb_cache_options options = scene_options(index, &name);
    options.batch = 1;
    scene s;
    start(&s, name, &options, 50);
    appended_rows made;
    make_rows(&s, 1, false, &made);
    const int64_t allocations_before = memory.allocations;
    for (int64_t i = 0; i < N; i++) expect_ok(nyb_cache_append(s.cache, &made.append, NULL));
    const nyb_cache_usage usage = usage_of(s.cache);
    const int64_t grown = memory.allocations - allocations_before;
    assert_int_equal(nyb_cache_length(s.cache, 0), N);
    if (usage.reallocations > 20 || grown > 40) {
      fail_msg("%s: %" PRId64 " reallocations, %" PRId64 " allocations", name, usage.reallocations,
               grown);
    }
    assert_true(usage.copied_bytes <= 2 * usage.used_bytes);
    if (options.window_tokens > 0) {
      assert_int_equal(usage.capacity_tokens, options.window_tokens);
      assert_int_equal(nyb_cache_held_tokens(s.cache, 0), options.window_tokens);
    } else {
      assert_true(usage.allocated_bytes <= 2 * usage.used_bytes + 64 * 64);
    }
    /* From here on there is room: nothing is allocated, with padding, trims and drafts. */
    expect_ok(nyb_cache_trim(s.cache, 0, options.window_tokens > 0 ? 1 : 1000, NULL, NULL));
    const int64_t allocations = memory.allocations;
    const int64_t more = options.window_tokens > 0 ? 1000 : 900;
    for (int64_t i = 0; i < more; i++) expect_ok(nyb_cache_append(s.cache, &made.append, NULL));
    assert_int_equal(memory.allocations, allocations);
    free_rows(&made);
    finish(&s);
  }
}

/* Creates, fills, doubles, reserves, with the nth allocation failing. False where none was left to
 * fail. */
static bool fail_allocation(int index, int64_t nth) {
  const char *name;
  nyb_cache_options options = scene_options(index, &name);
  options.initial_capacity_tokens = 10;
  const int64_t blocks_before = memory.live_blocks, last = memory.allocations + nth;
  nyb_cache *cache = NULL;
  memory.fail_at = last;
  nyb_status status = nyb_cache_create(context, &options, &cache);
  if (status == NYB_OK) {
    static const int64_t sources[] = {0, 2, 2, 1, 0};
    scene s = {.name = name, .options = options, .cache = cache, .batch = options.batch};
    s.kind = cache->kind;
    s.sequences = calloc(MOST_BATCH, sizeof *s.sequences);
    s.next_token = 1;
    for (int step = 0; step < 5 && status == NYB_OK; step++) {
      appended_rows made;
      make_rows(&s, step % 2 == 0 ? 35 : 1, false, &made);
      if (step == 1) status = nyb_cache_reorder(cache, sources, 5, NULL);
      if (step == 1 && status == NYB_OK) reorder_model(&s, sources, 5);
      if (step == 3) status = nyb_cache_reserve(cache, 600, NULL);
      if (step % 2 == 0) status = nyb_cache_append(cache, &made.append, NULL);
      if (step % 2 == 0 && status == NYB_OK) append_to_model(&s, &made);
      free_rows(&made);
    }
    memory.fail_at = 0;
    expect_model(&s);
    append(&s, 50, true); /* it goes on where it was */
    expect_model(&s);
    finish(&s);
  } else {
    assert_null(cache);
  }
  memory.fail_at = 0;
  assert_int_equal(memory.live_blocks, blocks_before);
  if (status == NYB_OK) return false;
  expect_error(status, NYB_ERROR_OUT_OF_MEMORY, "the allocator had no ");
  return true;
}

static void test_allocations_fail_one_by_one(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    int64_t failures = 0;
    while (fail_allocation(index, failures + 1)) failures++;
    assert_in_range(failures, 6, 30);
  }
}

/* A rotating cache holds no more than its query rows see, and has no more room. Field case 51: what
 * passes the window moves no position and no bit of what stays. */
static void test_rotating_room(void **state) {
  (void)state;
  nyb_cache_options options;
  const char *name;
  options = scene_options(3, &name); /* 12, keep 4 */
  scene s;
  start(&s, name, &options, 3);
  append(&s, 100, false);
  expect_model(&s);
  assert_int_equal(usage_of(s.cache).capacity_tokens, 100);
  append(&s, 30, false);
  expect_model(&s);
  assert_int_equal(nyb_cache_held_tokens(s.cache, 1), 12 + 30 - 1);
  append(&s, 1, false);
  expect_model(&s);
  assert_int_equal(nyb_cache_held_tokens(s.cache, 1), 12);
  assert_int_equal(nyb_cache_length(s.cache, 1), 131);
  assert_int_equal(usage_of(s.cache).capacity_tokens, 100);
  append(&s, 95, false); /* more than there is room for beside the window: laid out anew */
  expect_model(&s);
  assert_int_equal(usage_of(s.cache).capacity_tokens, 12 + 95 - 1);
  append(&s, 95, false);
  expect_model(&s);
  assert_int_equal(usage_of(s.cache).capacity_tokens, 12 + 95 - 1);
  finish(&s);
}

/* Reordering within the batch takes no second storage, whatever the sources. */
static void test_reorder_in_place(void **state) {
  (void)state;
  static const int64_t orders[][4] = {{1, 2, 3, 0}, {3, 2, 1, 0}, {0, 0, 0, 0},
                                      {2, 2, 0, 1}, {1, 0, 1, 0}, {0, 1, 2, 2}};
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    nyb_cache_options options = scene_options(index, &name);
    options.batch = 4;
    options.initial_capacity_tokens = 200;
    scene s;
    start(&s, name, &options, 9);
    append(&s, 150, true);
    const nyb_cache_usage before = usage_of(s.cache);
    for (size_t order = 0; order < sizeof orders / sizeof orders[0]; order++) {
      memory.most_bytes = memory.live_bytes;
      const int64_t live = memory.live_bytes;
      expect_ok(nyb_cache_reorder(s.cache, orders[order], 4, NULL));
      reorder_model(&s, orders[order], 4);
      assert_true(memory.most_bytes - live < 2048);
      expect_model(&s);
      append(&s, 1, false);
    }
    expect_ok(nyb_cache_reorder(s.cache, orders[0], 2, NULL)); /* and back to more */
    reorder_model(&s, orders[0], 2);
    expect_model(&s);
    expect_ok(nyb_cache_reorder(s.cache, orders[4], 4, NULL));
    reorder_model(&s, orders[4], 4);
    expect_model(&s);
    if (s.kind != NYB_CACHE_PAGED) { /* whose appends after sharing take pages */
      assert_int_equal(usage_of(s.cache).allocated_bytes, before.allocated_bytes);
      assert_int_equal(usage_of(s.cache).reallocations, before.reallocations);
    }
    finish(&s);
  }
}

/* Sequences share the pages of a prompt; an append copies the last one, and no more. */
static void test_pages_are_shared(void **state) {
  (void)state;
  static const int64_t sources[] = {0, 0, 0, 0, 0};
  const char *name;
  nyb_cache_options options = scene_options(10, &name); /* 16 */
  options.batch = 1;
  options.initial_capacity_tokens = 16 * 20;
  scene s;
  start(&s, name, &options, 6);
  append(&s, 16 * 12 + 5, false); /* 13 pages of 20 */
  const nyb_cache_usage alone = usage_of(s.cache);
  expect_ok(nyb_cache_reorder(s.cache, sources, 5, NULL));
  reorder_model(&s, sources, 5);
  expect_model(&s);
  assert_int_equal(usage_of(s.cache).used_bytes, alone.used_bytes);
  append(&s, 1, false); /* four copies of five rows, and the one that was there */
  expect_model(&s);
  const int64_t row = alone.used_bytes / (16 * 12 + 5);
  assert_int_equal(usage_of(s.cache).used_bytes, alone.used_bytes + (4 * 5 + 5) * row);
  const nyb_attention view = view_of(s.cache);
  int distinct = 0;
  for (int64_t i = 1; i < 5; i++) {
    const int32_t *pages = view.pages.table + i * view.pages.table_stride;
    assert_memory_equal(pages, view.pages.table, 12 * sizeof *pages);
    distinct += pages[12] != view.pages.table[12];
  }
  assert_int_equal(distinct, 4);
  /* What goes is there for others again: 12 + 4 pages are free once all but one are trimmed. */
  for (int64_t i = 1; i < 5; i++) {
    expect_ok(nyb_cache_trim(s.cache, i, MOST_TOKENS, NULL, NULL));
    model_trim(&s, &s.sequences[i], MOST_TOKENS);
  }
  expect_ok(nyb_cache_reset(s.cache, NULL));
  for (int64_t i = 0; i < 5; i++) model_trim(&s, &s.sequences[i], MOST_TOKENS);
  assert_int_equal(usage_of(s.cache).used_bytes, 0);
  append(&s, 16 * 4, false); /* 5 * 4 pages, all that there are */
  expect_model(&s);
  assert_int_equal(usage_of(s.cache).allocated_bytes, alone.allocated_bytes);
  assert_int_equal(usage_of(s.cache).reallocations, alone.reallocations);
  finish(&s);
}

/* ---- What is refused --------------------------------------------------------------------------
 */

static void test_refused_options(void **state) {
  (void)state;
  nyb_cache_options good = NYB_CACHE_OPTIONS_INIT;
  good.batch = 1;
  good.kv_heads = 1;
  good.key_dim = good.value_dim = 64;
  good.key_format = good.value_format = affine4;
  nyb_cache *const untouched = (nyb_cache *)&good;
  nyb_cache *cache = untouched;
#define EXPECT(status, words, ...)                                            \
  do {                                                                        \
    nyb_cache_options options = good;                                         \
    __VA_ARGS__;                                                              \
    expect_error(nyb_cache_create(context, &options, &cache), status, words); \
    assert_ptr_equal(cache, untouched);                                       \
  } while (0)
  EXPECT(NYB_ERROR_SHAPE, "options.window_tokens is -1", options.window_tokens = -1);
  EXPECT(NYB_ERROR_SHAPE, "options.window_keep_tokens is 8; it must be 0 to 7",
         options.window_tokens = options.window_keep_tokens = 8);
  EXPECT(NYB_ERROR_SHAPE, "options.window_keep_tokens is 1; it must be 0 to 0",
         options.window_keep_tokens = 1);
  EXPECT(NYB_ERROR_SHAPE, "options.first_tokens is -3", options.first_tokens = -3);
  EXPECT(NYB_ERROR_SHAPE, "options.last_tokens is 9223", options.last_tokens = INT64_MAX);
  EXPECT(NYB_ERROR_SHAPE, "options.page_tokens is 15; it must be 16 to", options.page_tokens = 15);
  EXPECT(NYB_ERROR_ENUM, "options.part_dtype is 0", options.first_tokens = 1);
  EXPECT(NYB_ERROR_ENUM, "options.part_dtype is 4", options.last_tokens = 1,
         options.part_dtype = (nyb_dtype)4);
  EXPECT(NYB_ERROR_VALUE, "options.part_dtype is 1; it must be 0 where",
         options.part_dtype = NYB_F32);
  EXPECT(NYB_ERROR_VALUE, "options.reserved2 is 1", options.reserved2 = 1);
  EXPECT(NYB_ERROR_UNSUPPORTED, "options.window_tokens and options.last_tokens are both set",
         options.window_tokens = 9, options.last_tokens = 1, options.part_dtype = NYB_F16);
  EXPECT(NYB_ERROR_UNSUPPORTED, "options.first_tokens and options.page_tokens are both set",
         options.page_tokens = 16, options.first_tokens = 1, options.part_dtype = NYB_F16);
  EXPECT(NYB_ERROR_UNSUPPORTED, "options.page_tokens and options.window_tokens are both set",
         options.page_tokens = 16, options.window_tokens = 9);
#undef EXPECT
}

static void test_refused_calls(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    const nyb_cache_options options = scene_options(index, &name);
    scene s;
    start(&s, name, &options, 77);
    append(&s, 33, false);
    int64_t sources[] = {0, 3, 1};
    expect_error(nyb_cache_reorder(NULL, sources, 3, NULL), NYB_ERROR_NULL, "cache is NULL");
    expect_error(nyb_cache_reorder(s.cache, NULL, 3, NULL), NYB_ERROR_NULL, "sources is NULL");
    expect_error(nyb_cache_reorder(s.cache, sources, 3, &s), NYB_ERROR_VALUE, "stream is 0x");
    expect_error(nyb_cache_reorder(s.cache, sources, 0, NULL), NYB_ERROR_SHAPE, "count is 0");
    expect_error(nyb_cache_reorder(s.cache, sources, INT64_C(1) << 31, NULL), NYB_ERROR_SHAPE,
                 "it must be 1 to 1073741824");
    expect_error(nyb_cache_reorder(s.cache, sources, 3, NULL), NYB_ERROR_VALUE,
                 "sources[1] is 3; it must be 0 to 2");
    sources[1] = -1;
    expect_error(nyb_cache_reorder(s.cache, sources, 3, NULL), NYB_ERROR_VALUE, "sources[1] is -1");
    appended_rows made;
    make_rows(&s, 4, true, &made);
    made.padding[1] = 5;
    expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_LENGTH,
                 "append.padding[1] is 5; it must be 0 to 4");
    made.padding[1] = -1;
    expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_LENGTH,
                 "append.padding[1] is -1");
    made.append.padding = NULL;
    made.append.key.data = view_of(s.cache).k.codes;
    expect_error(nyb_cache_append(s.cache, &made.append, NULL),
                 made.append.key.data == NULL ? NYB_ERROR_NULL : NYB_ERROR_OVERLAP, "append.key");
    free_rows(&made);
    expect_model(&s);
    finish(&s);
  }
}

/* The limit counts each sequence's own tokens, those that a window has passed over too. */
static void test_max_tokens_of_each_sequence(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    nyb_cache_options options = scene_options(index, &name);
    options.batch = 2;
    options.max_tokens = 100;
    scene s;
    start(&s, name, &options, 8);
    append(&s, 90, false);
    append(&s, 1, false);
    appended_rows made;
    make_rows(&s, 10, false, &made);
    expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_LENGTH,
                 "the cache holds 91 of at most 100 tokens");
    made.padding[0] = 1;
    made.padding[1] = 10;
    made.append.padding = made.padding;
    for (int part = 0; part < 2; part++) { /* all of sequence 1 is padding: no matter what */
      const int64_t rows_each = HEADS * 10 * (part == KEY ? options.key_dim : options.value_dim);
      memset(made.data[part] + rows_each, 0xff, (size_t)rows_each * sizeof(float));
    }
    expect_ok(nyb_cache_append(s.cache, &made.append, NULL));
    append_to_model(&s, &made);
    free_rows(&made);
    expect_model(&s);
    finish(&s);
  }
}

/* A row that its part could hold and the quantized body could not is refused when it comes, and not
 * when it leaves. */
static void test_rows_that_cannot_be_quantized_later(void **state) {
  (void)state;
  const char *name;
  nyb_cache_options options = scene_options(7, &name); /* 0 + 7 f32 */
  options.key_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_F16};
  scene s;
  start(&s, name, &options, 70);
  append(&s, 9, false);
  appended_rows made;
  make_rows(&s, 2, false, &made);
  made.data[KEY][5] = 1e30f; /* its group's scale overflows f16 */
  expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_NON_FINITE,
               "append.key at batch 0, head 0, token 0, group 0");
  expect_model(&s);
  free_rows(&made);
  finish(&s);
  /* Rounded to bf16 first: just within f32's range, and infinite afterwards. */
  options.part_dtype = NYB_BF16;
  options.key_format = affine4;
  start(&s, name, &options, 71);
  append(&s, 9, false);
  make_rows(&s, 2, false, &made);
  made.data[KEY][5] = 0x1.fffffep127f;
  expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_NON_FINITE,
               "element 5, is 3.40282e+38; it must fit");
  made.data[KEY][5] = 1e38f; /* fits, and its scale does not fit f16 */
  free_rows(&made);
  finish(&s);
  options.key_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_F16};
  start(&s, name, &options, 72);
  make_rows(&s, 2, false, &made);
  made.data[KEY][40] = 1e30f;
  expect_error(nyb_cache_append(s.cache, &made.append, NULL), NYB_ERROR_NON_FINITE,
               "group 1: rounded to options.part_dtype");
  expect_model(&s);
  free_rows(&made);
  finish(&s);
}

/* ---- Attention over every kind -----------------------------------------------------------------
 */

enum { QUERY_HEADS = 2 * HEADS, MOST_ROWS = 40 };

/* A call over a cache's view: the last `rows` tokens of each sequence ask. */
typedef struct attention_case {
  nyb_attention call;
  int64_t rows;
  float *q, *out, *lse;
  char *workspace;
} attention_case;

static float query_element(int64_t token, int64_t head, int64_t d) {
  const uint64_t seed = (uint64_t)token * QUERY_HEADS + (uint64_t)head;
  return (float)(int32_t)mixed_bits(seed * MOST_DIM + (uint64_t)d + 99) * 0x1p-31f;
}

/* Row i of a sequence is that of its token `length - rows + i`; rows before its first are NaN. */
static void put_queries(const scene *s, attention_case *c) {
  const int64_t dim = s->options.key_dim;
  for (int64_t row = 0; row < s->batch * QUERY_HEADS * c->rows; row++) {
    const int64_t sequence = row / QUERY_HEADS / c->rows, head = row / c->rows % QUERY_HEADS;
    const model_sequence *model = &s->sequences[sequence];
    const int64_t position = model->count - c->rows + row % c->rows;
    for (int64_t d = 0; d < dim; d++) {
      c->q[row * dim + d] = position < 0 ? 0 : 2 * query_element(model->tokens[position], head, d);
    }
  }
}

static void attend(const scene *s, int64_t rows, nyb_path path, attention_case *c) {
  const int64_t all = s->batch * QUERY_HEADS * rows, dim = s->options.key_dim;
  const int64_t value_dim = s->options.value_dim;
  *c = (attention_case){.call = view_of(s->cache), .rows = rows};
  c->q = malloc((size_t)(all * dim) * sizeof(float));
  c->out = malloc((size_t)(all * value_dim) * sizeof(float));
  c->lse = malloc((size_t)all * sizeof(float));
  put_queries(s, c);
  nyb_attention *a = &c->call;
  a->query_heads = QUERY_HEADS;
  a->query_len = rows;
  a->q = (nyb_input){c->q, NYB_F32, {QUERY_HEADS * rows * dim, rows * dim, dim}};
  a->out =
      (nyb_output){c->out, NYB_F32, {QUERY_HEADS * rows * value_dim, rows * value_dim, value_dim}};
  a->lse = (nyb_output){c->lse, NYB_F32, {QUERY_HEADS * rows, rows, 1}};
  a->scale = 0.25f;
  a->mask = NYB_MASK_CAUSAL;
  a->path = path;
  nyb_plan plan = NYB_PLAN_INIT;
  expect_ok(nyb_attention_plan(context, a, &plan));
  c->workspace = malloc(plan.workspace_bytes + NYB_WORKSPACE_ALIGNMENT);
  char *const aligned =
      c->workspace + NYB_WORKSPACE_ALIGNMENT - (uintptr_t)c->workspace % NYB_WORKSPACE_ALIGNMENT;
  expect_ok(nyb_attention_run(context, a, aligned, plan.workspace_bytes, NULL));
}

static void free_case(attention_case *c) {
  free(c->q);
  free(c->out);
  free(c->lse);
  free(c->workspace);
}

/* Token i of a sequence as the model says that it is stored, decoded. */
static void decode_token(const scene *s, const model_sequence *model, int64_t i, int part,
                         int64_t head, double *values) {
  const int64_t dim = part == KEY ? s->options.key_dim : s->options.value_dim;
  const bool plain =
      s->kind == NYB_CACHE_MIXED && (i < s->options.first_tokens || i >= model->last_begin);
  const nyb_format format = plain         ? (nyb_format){NYB_PLAIN, 0, 0, s->options.part_dtype}
                            : part == KEY ? s->options.key_format
                                          : s->options.value_format;
  _Alignas(4) char bytes[MOST_DIM * 4];
  wanted_row(s, format, s->options.part_dtype, dim, model->tokens[i], part, head, bytes);
  const int64_t codes = format.scheme == NYB_PLAIN ? 0 : dim * format.bits / 8;
  for (int64_t d = 0; d < dim; d++) {
    if (format.scheme == NYB_PLAIN) {
      values[d] = oracle_load(bytes, format.dtype, d);
      continue;
    }
    const int64_t group = d / format.group_size, groups = dim / format.group_size;
    const double scale = oracle_load(bytes + codes, format.dtype, group);
    const double bias = oracle_load(bytes + codes, format.dtype, groups + group);
    values[d] = scale * oracle_code(bytes, format.bits, d) + bias;
  }
}

/* Whether the row at `position` sees token i of the whole sequence. */
static bool model_sees(const scene *s, int64_t position, int64_t i) {
  const int64_t keep = s->options.window_keep_tokens;
  const int64_t window = s->options.window_tokens - keep;
  return i <= position && (window == 0 || i < keep || i > position - window);
}

/* out and lse of one row in double precision, over the whole sequence under the same window. */
static void reference_row(const scene *s, const model_sequence *model, int64_t head,
                          int64_t position, const float *q, double *out, double *lse) {
  const int64_t key_dim = s->options.key_dim, value_dim = s->options.value_dim;
  double sum = 0;
  for (int64_t d = 0; d < value_dim; d++) out[d] = 0;
  for (int64_t i = 0; i < model->count; i++) {
    double key[MOST_DIM], value[MOST_DIM], score = 0;
    if (!model_sees(s, position, i)) continue;
    decode_token(s, model, i, KEY, head / 2, key);
    decode_token(s, model, i, VALUE, head / 2, value);
    for (int64_t d = 0; d < key_dim; d++) score += 0.25 * (double)q[d] * key[d];
    const double weight = exp(score); /* |score| is at most 0.25 * 64 * 2: nothing overflows */
    sum += weight;
    for (int64_t d = 0; d < value_dim; d++) out[d] += weight * value[d];
  }
  for (int64_t d = 0; d < value_dim; d++) out[d] = sum > 0 ? out[d] / sum : 0;
  *lse = log(sum);
}

/* The kernels keep 15 bits of a query's largest element and of a weight. |q| is at most 2 and |k| 1
 * (a step of a code more at the edge), so that a score is off by at most 0.25 * 64 * 2^-15 * 2
 * * 1.2 < 1.2e-3 if all roundings add up; what is weighed by it, of at most 1.2, by twice that, and
 * by 2^-15 for the weights. A token too many or too few among a hundred weighs ten times as much.
 */
#define SCORE_TOLERANCE 1.2e-3
#define OUT_TOLERANCE (2.4 * SCORE_TOLERANCE + 1e-4)

static void expect_reference(const scene *s, const attention_case *c) {
  const int64_t value_dim = s->options.value_dim, key_dim = s->options.key_dim;
  for (int64_t row = 0; row < s->batch * QUERY_HEADS * c->rows; row++) {
    const int64_t sequence = row / QUERY_HEADS / c->rows, head = row / c->rows % QUERY_HEADS;
    const model_sequence *model = &s->sequences[sequence];
    const int64_t position = model->count - c->rows + row % c->rows;
    if (position < 0) continue;
    double out[MOST_DIM], lse;
    reference_row(s, model, head, position, c->q + row * key_dim, out, &lse);
    if (!(fabs((double)c->lse[row] - lse) <= SCORE_TOLERANCE)) {
      fail_msg("%s: sequence %" PRId64 ", head %" PRId64 ", row %" PRId64 " of %" PRId64
               ": lse %g, not %g",
               s->name, sequence, head, row % c->rows, c->rows, (double)c->lse[row], lse);
    }
    for (int64_t d = 0; d < value_dim; d++) {
      if (fabs((double)c->out[row * value_dim + d] - out[d]) <= OUT_TOLERANCE) continue;
      fail_msg("%s: sequence %" PRId64 ", head %" PRId64 ", row %" PRId64 " of %" PRId64
               ", element %" PRId64 ": %g, not %g",
               s->name, sequence, head, row % c->rows, c->rows, d,
               (double)c->out[row * value_dim + d], out[d]);
    }
  }
}

static void attend_to_reference(const scene *s, int64_t rows) {
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    attention_case c;
    attend(s, rows, (nyb_path)path, &c);
    expect_reference(s, &c);
    free_case(&c);
  }
}

/* The rows just appended, prompts, drafts and single tokens, see what they would see of the whole
 * sequence under the same window. */
static void test_attention_sees_what_it_should(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    const nyb_cache_options options = scene_options(index, &name);
    scene s;
    start(&s, name, &options, 60);
    static const int64_t sizes[] = {21, 1, 5, 1, 40, 1, 1, 3};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
      append(&s, sizes[i], false);
      attend_to_reference(&s, sizes[i]);
      if (i == 2) { /* two drafts refused, and two sequences exchanged */
        static const int64_t sources[] = {1, 0, 1};
        expect_ok(nyb_cache_trim(s.cache, NYB_ALL_SEQUENCES, 2, NULL, NULL));
        for (int64_t sequence = 0; sequence < 3; sequence++) {
          model_trim(&s, &s.sequences[sequence], 2);
        }
        expect_ok(nyb_cache_reorder(s.cache, sources, 3, NULL));
        reorder_model(&s, sources, 3);
      }
    }
    finish(&s);
  }
}

/* Case 49: a row of a left-padded batch has the bits of its sequence alone. */
static void test_padded_batch_is_each_alone(void **state) {
  (void)state;
  static const int32_t paddings[2][3] = {{0, 3, 17}, {2, 0, 5}};
  static const int64_t sizes[2] = {20, 6};
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    nyb_cache_options options = scene_options(index, &name);
    scene s, alone[3];
    start(&s, name, &options, 61);
    options.batch = 1;
    for (int i = 0; i < 3; i++) start(&alone[i], name, &options, 62);
    for (int piece = 0; piece < 2; piece++) {
      const int64_t count = sizes[piece];
      appended_rows made;
      make_rows(&s, count, true, &made);
      for (int64_t i = 0; i < 3 * count; i++) {
        made.tokens[i] = (int32_t)(1000 * piece + i); /* where there is no padding now */
      }
      for (int part = KEY; part <= VALUE; part++) {
        const nyb_input *input = part == KEY ? &made.append.key : &made.append.value;
        const int64_t dim = part == KEY ? options.key_dim : options.value_dim;
        for (int64_t i = 0; i < 3 * HEADS * count; i++) {
          const int64_t sequence = i / HEADS / count, head = i / count % HEADS, t = i % count;
          const bool padded = t < paddings[piece][sequence];
          put_row(made.data[part] + sequence * input->stride[0] + head * input->stride[1] +
                      t * input->stride[2],
                  dim, padded ? PADDING : made.tokens[sequence * count + t], part, head);
        }
      }
      memcpy(made.padding, paddings[piece], sizeof paddings[piece]);
      expect_ok(nyb_cache_append(s.cache, &made.append, NULL));
      append_to_model(&s, &made);
      attention_case together;
      attend(&s, count, NYB_PATH_FUSED, &together);
      for (int64_t i = 0; i < 3; i++) {
        const int64_t padding = paddings[piece][i], stored = count - padding;
        nyb_append single = made.append;
        single.tokens = stored;
        single.padding = NULL;
        single.key.data =
            made.data[KEY] + i * single.key.stride[0] + padding * single.key.stride[2];
        single.value.data =
            made.data[VALUE] + i * single.value.stride[0] + padding * single.value.stride[2];
        expect_ok(nyb_cache_append(alone[i].cache, &single, NULL));
        model_append(&alone[i], &alone[i].sequences[0], made.tokens + i * count + padding, stored);
        attention_case own;
        attend(&alone[i], stored, NYB_PATH_FUSED, &own);
        const int64_t dim = options.value_dim;
        for (int64_t head = 0; head < QUERY_HEADS; head++) {
          const int64_t row = (i * QUERY_HEADS + head) * count + padding;
          assert_memory_equal(own.out + head * stored * dim, together.out + row * dim,
                              (size_t)(stored * dim) * sizeof(float));
          assert_memory_equal(own.lse + head * stored, together.lse + row,
                              (size_t)stored * sizeof(float));
        }
        free_case(&own);
      }
      free_case(&together);
      free_rows(&made);
    }
    expect_model(&s);
    finish(&s);
    for (int i = 0; i < 3; i++) finish(&alone[i]);
  }
}

/* ---- What saving and loading use --------------------------------------------------------------
 */

/* The rows of a sequence in temporal order, copied into a new cache of that state, make the same
 * cache; exchanged, it is the old one that goes. */
static void copy_through(scene *s) {
  nyb_cache_sequence states[MOST_BATCH];
  for (int64_t i = 0; i < s->batch; i++) states[i] = nyb_cache_get_sequence(s->cache, i);
  nyb_cache *fresh = NULL;
  expect_ok(nyb_cache_make_like(context, s->cache, s->batch, states, &fresh));
  for (int64_t plane = 0; plane < 2 * s->batch * HEADS; plane++) {
    const int part = (int)(plane % 2);
    const int64_t sequence = plane / 2 / HEADS, head = plane / 2 % HEADS;
    for (int64_t token = 0; token < states[sequence].held;) {
      const int64_t left = states[sequence].held - token;
      const nyb_cache_rows to = nyb_cache_rows_at(fresh, part, sequence, head, token, left);
      const nyb_cache_rows from =
          nyb_cache_rows_at(s->cache, part, sequence, head, token, to.tokens);
      assert_true(from.tokens >= 1 && from.tokens <= to.tokens && from.region == to.region);
      for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
        const int64_t bytes = from.tokens * from.part->row_bytes[array];
        if (bytes > 0) memcpy(to.array[array], from.array[array], (size_t)bytes);
      }
      token += from.tokens;
    }
  }
  const nyb_cache_usage before = usage_of(s->cache);
  nyb_cache_exchange(s->cache, fresh);
  nyb_cache_destroy(fresh);
  assert_int_equal(usage_of(s->cache).reallocations, before.reallocations);
  assert_int_equal(usage_of(s->cache).copied_bytes, before.copied_bytes);
}

static void test_contents_through_another_cache(void **state) {
  (void)state;
  for (int index = 0; index < SCENES; index++) {
    const char *name;
    const nyb_cache_options options = scene_options(index, &name);
    scene s;
    start(&s, name, &options, 31);
    for (int round = 0; round < 4; round++) {
      for (int step = 0; step < 25; step++) walk_step(&s);
      expect_model(&s);
      copy_through(&s);
      expect_model(&s);
    }
    nyb_cache *none = NULL;
    const nyb_cache_sequence bad[] = {{.held = -1},
                                      {.held = 5, .dropped = -1},
                                      {.held = 0, .dropped = 5},
                                      {.held = 3, .last_begin = 4}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
      if (i == 2 && options.window_tokens == 1) continue; /* whose next row sees itself alone */
      expect_error(nyb_cache_make_like(context, s.cache, 1, &bad[i], &none), NYB_ERROR_LENGTH,
                   "sequence 0 cannot hold");
    }
    finish(&s);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_random_walks, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_random_walks_in_threads, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_drafts_leave_no_trace, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_reorder_reaches_all_parts, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_50000_single_appends, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_allocations_fail_one_by_one, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_rotating_room, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_reorder_in_place, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_pages_are_shared, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_refused_options, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_refused_calls, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_max_tokens_of_each_sequence, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_rows_that_cannot_be_quantized_later, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_attention_sees_what_it_should, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_padded_batch_is_each_alone, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_contents_through_another_cache, set_up, tear_down),
  };
  return cmocka_run_group_tests_name("cache_kinds", tests, NULL, NULL);
}
