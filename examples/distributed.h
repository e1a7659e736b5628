/* SPDX-License-Identifier: Apache-2.0 */
/* What the examples of attention over several ranks share: a model's stand-in, how tokens are cut,
 * the calls, and how results are compared. Pointers are of the backend that the context has. */
#ifndef DISTRIBUTED_H
#define DISTRIBUTED_H

#include <math.h>
#include <nybble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64 };
enum { PROMPT_TOKENS = 3001, STEPS = 6, ROWS = 3 }; /* tokens and query rows of each step */
enum { OUT_ROWS = QUERY_HEADS * ROWS, OUT_ELEMENTS = OUT_ROWS * HEAD_DIM };

/* Ends all ranks; each example has its own way. */
static _Noreturn void give_up(void);

static void expect_ok(nyb_status status) {
  if (status == NYB_OK) return;
  fprintf(stderr, "%s: %s\n", nyb_status_name(status), nyb_last_error());
  give_up();
}

static void *allocate(size_t count, size_t bytes) {
  void *memory = calloc(count + 1, bytes); /* also where there is nothing to hold */
  if (memory == NULL) give_up();
  return memory;
}

/* ---- Stands for what a model computes ---------------------------------------------------------
 */

enum { KEYS, VALUES, QUERIES };

/* In [-1, 1), the same on every rank. */
static float element(int kind, int64_t token, int64_t head, int64_t d) {
  uint64_t z = (uint64_t)(((token * QUERY_HEADS + head) * HEAD_DIM + d) * 3 + kind);
  z = (z + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 32) * 0xd6e8feb86659fd93u;
  return (float)(z >> 40) / (float)(1 << 23) - 1.0f;
}

/* [heads, count, HEAD_DIM] of the tokens from `first` on; the caller frees them. */
static float *make_rows(int kind, int64_t heads, int64_t first, int64_t count) {
  float *rows = allocate((size_t)(heads * count * HEAD_DIM), sizeof *rows);
  for (int64_t i = 0; i < heads * count * HEAD_DIM; i++) {
    const int64_t row = i / HEAD_DIM;
    rows[i] = element(kind, first + row % count, row / count, i % HEAD_DIM);
  }
  return rows;
}

/* Where the prompt's piece of a rank begins: pieces grow with the rank, and where there are three
 * ranks or more the second has none. */
static int64_t piece_begin(int rank, int ranks) {
  if (ranks > 2 && rank == 2) rank = 1;
  return PROMPT_TOKENS * (int64_t)rank * rank / ((int64_t)ranks * ranks);
}

/* The newest tokens of a step go to one rank; the ranks take turns from the last one down. */
static bool is_owner(int rank, int ranks, int step) { return rank == ranks - 1 - step % ranks; }

static int64_t first_token(int step) { return PROMPT_TOKENS + (int64_t)step * ROWS; }

/* ---- The calls --------------------------------------------------------------------------------
 */

static nyb_cache *make_cache(nyb_context *context) {
  const nyb_format format = {NYB_AFFINE, .bits = 4, .group_size = 64, .dtype = NYB_BF16};
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 1;
  options.kv_heads = KV_HEADS;
  options.key_dim = options.value_dim = HEAD_DIM;
  options.key_format = options.value_format = format;
  nyb_cache *cache;
  expect_ok(nyb_cache_create(context, &options, &cache));
  return cache;
}

/* keys, values: as make_rows() lays them out. */
static nyb_append append_of(const float *keys, const float *values, int64_t count) {
  const int64_t head_stride = count * HEAD_DIM;
  nyb_append call = NYB_APPEND_INIT;
  call.tokens = count;
  call.key = (nyb_input){keys, NYB_F32, {KV_HEADS * head_stride, head_stride, HEAD_DIM}};
  call.value = (nyb_input){values, NYB_F32, {KV_HEADS * head_stride, head_stride, HEAD_DIM}};
  return call;
}

/* What a rank sends: it goes over the wire as it lies in memory. */
typedef struct part {
  float out[OUT_ELEMENTS];
  float lse[OUT_ROWS];
} part;

static nyb_output rows_of(void *data, nyb_dtype dtype) {
  return (nyb_output){data, dtype, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
}

/* A step's query rows over what the cache holds. causal: where it holds the step's tokens, at its
 * end; else all that it holds is older than they are. */
static nyb_attention attention_of(const nyb_cache *cache, const float *queries, bool causal,
                                  nyb_output out, float *lse) {
  nyb_attention call = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &call));
  call.query_heads = QUERY_HEADS;
  call.query_len = ROWS;
  call.q = (nyb_input){queries, NYB_F32, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
  call.out = out;
  call.lse = (nyb_output){lse, NYB_F32, {OUT_ROWS, ROWS, 1}};
  call.scale = 1.0f; /* sharper than 1/sqrt(HEAD_DIM): weights that differ */
  call.mask = causal ? NYB_MASK_CAUSAL : NYB_MASK_NONE;
  return call;
}

/* All ranks' parts, in rank order, into bf16 rows. */
static void merge(nyb_context *context, const part *parts, int ranks, uint16_t *out,
                  nyb_stream stream) {
  nyb_input *outs = allocate((size_t)ranks, sizeof *outs);
  nyb_input *lses = allocate((size_t)ranks, sizeof *lses);
  for (int rank = 0; rank < ranks; rank++) {
    outs[rank] = (nyb_input){parts[rank].out, NYB_F32, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
    lses[rank] = (nyb_input){parts[rank].lse, NYB_F32, {OUT_ROWS, ROWS, 1}};
  }
  nyb_attention_merge call = NYB_ATTENTION_MERGE_INIT;
  call.parts = ranks;
  call.batch = 1;
  call.query_heads = QUERY_HEADS;
  call.query_len = ROWS;
  call.value_dim = HEAD_DIM;
  call.outs = outs;
  call.lses = lses;
  call.out = rows_of(out, NYB_BF16);
  expect_ok(nyb_attention_merge_run(context, &call, stream));
  free(outs);
  free(lses);
}

/* ---- Comparing --------------------------------------------------------------------------------
 */

static double from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return (double)value;
}

/* How many bf16 steps an element is away at most. A step is that of the element, or, nearer to zero
 * than 1/1024 of its row's largest, that of 1/1024 of it: attention's own error is relative to the
 * row, not to an element that happens to cancel out. NaN counts as infinitely far. */
static double worst_steps(const uint16_t *got, const uint16_t *want) {
  double worst = 0;
  for (int row = 0; row < OUT_ROWS; row++) {
    double largest = 0;
    for (int d = 0; d < HEAD_DIM; d++) {
      largest = fmax(largest, fabs(from_bf16(want[row * HEAD_DIM + d])));
    }
    for (int d = 0; d < HEAD_DIM; d++) {
      const double a = from_bf16(got[row * HEAD_DIM + d]), b = from_bf16(want[row * HEAD_DIM + d]);
      const double step = ldexp(1, ilogb(fmax(fmax(fabs(a), fabs(b)), largest / 1024)) - 7);
      const double steps = fabs(a - b) / step;
      if (!(steps <= worst)) worst = isnan(steps) ? INFINITY : steps;
    }
  }
  return worst;
}

#endif
