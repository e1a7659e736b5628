/* SPDX-License-Identifier: Apache-2.0 */
/* Masks, windows, sinks, softcap and slopes where a case is worth more than a scene: what users of
 * other libraries met (numbers as in the list of field cases), bits that must not change, memory
 * that must not be read, and what is refused. Every ISA that runs here, and both paths. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "check.h"
#include "oracle.h"

/* ---- Contexts ------------------------------------------------------------------------------- */

enum { MAX_CONTEXTS = NYB_ISA_NEON };
static nyb_context *contexts[MAX_CONTEXTS];
static int context_count;

static nyb_context *make_context(nyb_isa isa, int64_t threads) {
  nyb_context *context = NULL;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = isa, .threads = threads};
  return nyb_context_create(&options, &context) == NYB_OK ? context : NULL;
}

static int make_contexts(void **state) {
  (void)state;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    contexts[context_count] = make_context(isa, 2);
    if (contexts[context_count] != NULL) context_count++;
  }
  return context_count > 0 ? 0 : -1;
}

static int free_contexts(void **state) {
  (void)state;
  while (context_count > 0) nyb_context_destroy(contexts[--context_count]);
  return 0;
}

/* ---- Calls over plain f32 rows ----------------------------------------------------------------
 */

/* One KV head for all query heads; k, v and q are contiguous. */
typedef struct plain_call {
  nyb_attention call;
  int32_t length;
  float *q, *k, *v, *out, *lse;
} plain_call;

static float *floats(int64_t count) {
  float *memory = calloc((size_t)count, sizeof *memory);
  assert_non_null(memory);
  return memory;
}

static void make_call(plain_call *c, int64_t heads, int64_t rows, int64_t dim, int32_t tokens) {
  *c = (plain_call){.length = tokens,
                    .q = floats(heads * rows * dim),
                    .k = floats(tokens * dim),
                    .v = floats(tokens * dim),
                    .out = floats(heads * rows * dim),
                    .lse = floats(heads * rows)};
  const nyb_format plain = {.scheme = NYB_PLAIN, .dtype = NYB_F32};
  const int64_t head = rows * dim;
  c->call = (nyb_attention){
      .struct_size = sizeof c->call,
      .batch = 1,
      .query_heads = heads,
      .kv_heads = 1,
      .query_len = rows,
      .key_dim = dim,
      .value_dim = dim,
      .capacity_tokens = tokens,
      .lengths = &c->length,
      .q = {c->q, NYB_F32, {heads * head, head, dim}},
      .k = {.format = plain, .codes = c->k, .codes_stride = {tokens * dim, tokens * dim, dim}},
      .v = {.format = plain, .codes = c->v, .codes_stride = {tokens * dim, tokens * dim, dim}},
      .out = {c->out, NYB_F32, {heads * head, head, dim}},
      .lse = {c->lse, NYB_F32, {heads * rows, rows, 1}},
      .scale = 1,
  };
}

static void free_call(plain_call *c) {
  free(c->q), free(c->k), free(c->v), free(c->out), free(c->lse);
}

static void fill_normal(float *to, int64_t count, uint64_t seed) {
  check_random random = {.state = seed};
  for (int64_t i = 0; i < count; i++) to[i] = (float)check_random_normal(&random);
}

static void fill_call(plain_call *c, uint64_t seed) {
  const nyb_attention *a = &c->call;
  fill_normal(c->q, a->query_heads * a->query_len * a->key_dim, seed);
  fill_normal(c->k, a->capacity_tokens * a->key_dim, seed + 1);
  fill_normal(c->v, a->capacity_tokens * a->value_dim, seed + 2);
}

static void run(nyb_context *context, const nyb_attention *call) {
  nyb_plan plan = NYB_PLAN_INIT;
  if (nyb_attention_plan(context, call, &plan) != NYB_OK) fail_msg("%s", nyb_last_error());
  void *workspace = aligned_alloc(64, plan.workspace_bytes + 64);
  assert_non_null(workspace);
  memset(workspace, 0xff, plan.workspace_bytes);
  const nyb_status status = nyb_attention_run(context, call, workspace, plan.workspace_bytes, NULL);
  free(workspace);
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
}

/* Runs it on an ISA and path, over poisoned outputs. */
static void run_call(plain_call *c, nyb_context *context, nyb_path path) {
  const int64_t rows = c->call.query_heads * c->call.query_len;
  memset(c->out, 0xff, (size_t)(rows * c->call.value_dim) * sizeof(float));
  memset(c->lse, 0xff, (size_t)rows * sizeof(float));
  c->call.path = path;
  run(context, &c->call);
}

#define FOR_ALL(context, path)                                            \
  for (int i_ = 0; i_ < context_count; i_++)                              \
    for (nyb_path path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) \
      for (nyb_context *context = contexts[i_]; context != NULL; context = NULL)

static void assert_near(double got, double want, double error) {
  if (!(fabs(got - want) <= error)) fail_msg("got %.9g, want %.9g +- %.3g", got, want, error);
}

/* ---- Field case 38: which corner is causal --------------------------------------------------- */

/* Queries of zeros score every token alike: lse is the logarithm of how many a row sees. */
static void test_corners(void **state) {
  (void)state;
  plain_call c;
  make_call(&c, 1, 4, 8, 16);
  FOR_ALL(context, path) {
    for (int row = 0; row < 4; row++) {
      c.call.mask = NYB_MASK_CAUSAL;
      run_call(&c, context, path);
      assert_near(c.lse[row], log(13 + row), 1e-6);
      c.call.mask = NYB_MASK_CAUSAL_TOP_LEFT;
      run_call(&c, context, path);
      assert_near(c.lse[row], log(1 + row), 1e-6);
    }
  }
  free_call(&c);
}

/* The window counts the row's own token; kept tokens come to it, and none twice. */
static void test_window_counts(void **state) {
  (void)state;
  static const struct {
    int64_t window, keep, seen;
  } windows[] = {{1, 0, 1},        {64, 0, 64},          {65, 0, 65},
                 {100, 3, 103},    {100, 100, 200},      {900, 99, 999},
                 {900, 101, 1000}, {INT64_MAX, 7, 1000}, {1, INT64_MAX, 1000}};
  plain_call c;
  make_call(&c, 2, 1, 8, 1000);
  FOR_ALL(context, path) {
    for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
      c.call.window_tokens = windows[i].window;
      c.call.window_keep_tokens = windows[i].keep;
      run_call(&c, context, path);
      assert_near(c.lse[1], log((double)windows[i].seen), 2e-6);
    }
  }
  free_call(&c);
}

/* ---- Field case 36: rows of which everything is masked ----------------------------------------
 */

static void expect_blind(const plain_call *c, int64_t row) {
  for (int64_t d = 0; d < c->call.value_dim; d++) {
    assert_true(c->out[row * c->call.value_dim + d] == 0);
  }
  assert_true(c->lse[row] == -INFINITY);
}

static void test_all_masked(void **state) {
  (void)state;
  enum { TOKENS = 1100 };
  static uint8_t no[TOKENS];
  static float minus_infinity[TOKENS], lowest[TOKENS];
  for (int i = 0; i < TOKENS; i++) minus_infinity[i] = -INFINITY, lowest[i] = -FLT_MAX;
  plain_call c;
  make_call(&c, 2, 3, 16, TOKENS);
  fill_call(&c, 1);
  c.k[5] = c.v[5] = NAN; /* hidden from all */
  FOR_ALL(context, path) {
    c.call.mask_array = (nyb_mask_array){.data = no, .kind = NYB_MASK_ARRAY_BOOL, .tokens = TOKENS};
    run_call(&c, context, path);
    for (int64_t row = 0; row < 6; row++) expect_blind(&c, row);
    c.call.mask_array = (nyb_mask_array){
        .data = minus_infinity, .kind = NYB_MASK_ARRAY_ADD, .dtype = NYB_F32, .tokens = TOKENS};
    run_call(&c, context, path);
    for (int64_t row = 0; row < 6; row++) expect_blind(&c, row);
  }
  c.k[5] = c.v[5] = 1;
  c.call.mask_array.data = lowest;
  FOR_ALL(context, path) {
    run_call(&c, context, path);
    for (int64_t i = 0; i < 6 * 16; i++) assert_true(isfinite(c.out[i]));
    for (int64_t row = 0; row < 6; row++) assert_true(isfinite(c.lse[row]));
  }
  free_call(&c);
}

/* mlx-lm hides by the lowest finite number: 1/N of each, on the path that spells it out. */
static void test_all_masked_by_mlx(void **state) {
  (void)state;
  static const uint8_t no[4];
  plain_call c;
  make_call(&c, 1, 1, 1, 4);
  fill_call(&c, 1);
  for (int i = 0; i < 4; i++) c.v[i] = (float)i;
  c.call.rounding = NYB_ROUNDING_MLX;
  c.call.mask_array = (nyb_mask_array){.data = no, .kind = NYB_MASK_ARRAY_BOOL, .tokens = 4};
  FOR_ALL(context, path) {
    run_call(&c, context, path);
    if (path == NYB_PATH_COMPAT) {
      assert_near(c.out[0], 1.5, 1e-6);
    } else {
      expect_blind(&c, 0);
    }
  }
  free_call(&c);
}

/* ---- Field case 29: sinks ----------------------------------------------------------------------
 */

/* Two keys of score 0 and values of 1 beside a sink of 0: 2/3, wherever the two stand: in one
 * chunk, in two, behind a chunk of which nothing is seen; the sink is not scaled. */
static void test_sink_enters_once(void **state) {
  (void)state;
  enum { TOKENS = 2100 };
  static const int32_t seen[][2] = {{0, 1}, {0, 2099}, {1023, 1024}, {1100, 1101}, {2098, 2099}};
  static uint8_t mask[TOKENS];
  float sink = 0;
  plain_call c;
  make_call(&c, 1, 1, 4, TOKENS);
  for (int i = 0; i < TOKENS * 4; i++) c.v[i] = 1;
  c.call.sinks = &sink;
  c.call.mask_array = (nyb_mask_array){.data = mask, .kind = NYB_MASK_ARRAY_BOOL, .tokens = TOKENS};
  FOR_ALL(context, path) {
    for (int i = 0; i < 5; i++) {
      memset(mask, 0, sizeof mask);
      mask[seen[i][0]] = mask[seen[i][1]] = 1;
      sink = 0;
      c.call.scale = 1;
      run_call(&c, context, path);
      assert_near(c.out[2], 2.0 / 3, 1e-6);
      assert_near(c.lse[0], log(3), 1e-6);
      sink = 1;
      c.call.scale = 0.5f;
      run_call(&c, context, path);
      assert_near(c.out[2], 2 / (2 + exp(1)), 1e-6);
    }
    memset(mask, 0, sizeof mask); /* the sink alone */
    run_call(&c, context, path);
    assert_true(c.out[2] == 0 && c.lse[0] == 1);
    sink = -INFINITY;
    run_call(&c, context, path);
    expect_blind(&c, 0);
  }
  free_call(&c);
}

/* What is not finite in sinks, slopes and masks makes NaN of the rows that meet it, and of no
 * other. */
static void test_not_finite(void **state) {
  (void)state;
  enum { TOKENS = 130 };
  static float mask[TOKENS];
  static const float bad[] = {NAN, INFINITY};
  float sinks[2] = {0, 0}, slopes[2] = {0, 0};
  plain_call c;
  make_call(&c, 2, 1, 8, TOKENS);
  fill_call(&c, 3);
  FOR_ALL(context, path) {
    for (int i = 0; i < 2; i++) {
      sinks[1] = bad[i];
      c.call.sinks = sinks;
      run_call(&c, context, path);
      assert_true(isfinite(c.lse[0]) && isnan(c.lse[1]) && isnan(c.out[8]));
      c.call.sinks = NULL;
      slopes[0] = bad[i]; /* times the own token's distance, 0 */
      c.call.alibi_slopes = slopes;
      run_call(&c, context, path);
      assert_true(isnan(c.lse[0]) && isnan(c.out[0]) && isfinite(c.lse[1]));
      c.call.alibi_slopes = NULL;
      mask[70] = bad[i];
      c.call.mask_array = (nyb_mask_array){
          .data = mask, .kind = NYB_MASK_ARRAY_ADD, .dtype = NYB_F32, .tokens = TOKENS};
      run_call(&c, context, path);
      assert_true(isnan(c.lse[0]) && isnan(c.lse[1]) && isnan(c.out[3]));
      c.call.mask_array = (nyb_mask_array){0};
    }
  }
  free_call(&c);
}

/* ---- tanh ------------------------------------------------------------------------------------ */

/* With softcap 1 and a single token, lse is the tanh of the score. All exponents from 2^-40 to 2^7,
 * both signs: within 6 u of it, u = 2^-24. */
static void test_tanh(void **state) {
  (void)state;
  enum { BATCH = 4096 };
  plain_call c;
  make_call(&c, 1, BATCH, 1, 1);
  c.k[0] = 1;
  c.call.softcap = 1;
  check_random random = {.state = 5};
  for (int round = 0; round < 8; round++) {
    for (int i = 0; i < BATCH; i++) {
      const double size = ldexp(1 + check_random_uniform(&random), i % 48 - 40);
      c.q[i] = (float)(i / 48 % 2 == 0 ? size : -size);
    }
    for (int i = 0; i < context_count; i++) {
      double worst = 0;
      run_call(&c, contexts[i], NYB_PATH_FUSED);
      for (int row = 0; row < BATCH; row++) {
        const double want = tanh((double)c.q[row]);
        const double error = fabs(c.lse[row] - want) / fabs(want);
        if (!(error <= worst)) worst = error;
      }
      if (round == 0) {
        print_message("%s: %.2f u\n", nyb_isa_name(nyb_context_isa(contexts[i])), worst * 0x1p24);
      }
      assert_true(worst <= 6 * 0x1p-24);
    }
  }
  free_call(&c);
}

/* ---- Bits ------------------------------------------------------------------------------------ */

/* Everything at once, in one place. */
typedef struct features {
  uint8_t *mask; /* [rows, tokens] */
  float sinks[4], slopes[4];
} features;

static void add_features(plain_call *c, features *f) {
  const nyb_attention *a = &c->call;
  check_random random = {.state = 11};
  f->mask = malloc((size_t)(a->query_len * a->capacity_tokens));
  assert_non_null(f->mask);
  for (int64_t i = 0; i < a->query_len * a->capacity_tokens; i++) {
    f->mask[i] = check_random_below(&random, 5) > 0;
  }
  for (int i = 0; i < 4; i++) f->sinks[i] = (float)i, f->slopes[i] = 0.02f * (float)i;
  c->call.mask_array = (nyb_mask_array){.data = f->mask,
                                        .kind = NYB_MASK_ARRAY_BOOL,
                                        .stride = {0, 0, a->capacity_tokens},
                                        .tokens = a->capacity_tokens};
  c->call.sinks = f->sinks;
  c->call.alibi_slopes = f->slopes;
  c->call.softcap = 10;
  c->call.window_tokens = 333;
  c->call.window_keep_tokens = 5;
  c->call.mask = NYB_MASK_CAUSAL;
}

/* Field cases 26, 31, 40: 300 rows and a window of 333 over 4,096 tokens, on 1 to 16 threads and
 * again: the same bits. */
static void test_same_bits_on_threads(void **state) {
  (void)state;
  enum { HEADS = 4, ROWS = 300, DIM = 16, TOKENS = 4096 };
  const size_t bytes = HEADS * ROWS * DIM * sizeof(float);
  plain_call c;
  features f;
  make_call(&c, HEADS, ROWS, DIM, TOKENS);
  fill_call(&c, 7);
  add_features(&c, &f);
  float *first = malloc(bytes);
  assert_non_null(first);
  for (int i = 0; i < context_count; i++) {
    for (int64_t threads = 1; threads <= 16; threads += threads < 4 ? 1 : 4) {
      nyb_context *context = make_context(nyb_context_isa(contexts[i]), threads);
      if (context == NULL) continue; /* a library without a pool */
      run_call(&c, context, NYB_PATH_FUSED);
      if (threads == 1) memcpy(first, c.out, bytes);
      assert_memory_equal(first, c.out, bytes);
      nyb_context_destroy(context);
    }
  }
  free(first);
  free(f.mask);
  free_call(&c);
}

/* Field case 57: 32 and 33 rows, on one thread and on more than there are processors or units. */
static void test_same_bits_on_many_threads(void **state) {
  (void)state;
  enum { HEADS = 4, MOST_ROWS = 33, DIM = 16 };
  static const int64_t threads[] = {1, 2, 3, 7, 16, 64};
  for (int32_t rows = 32; rows <= MOST_ROWS; rows++) {
    plain_call c;
    float first[HEADS * MOST_ROWS * DIM];
    const size_t bytes = (size_t)(HEADS * rows * DIM) * sizeof(float);
    make_call(&c, HEADS, rows, DIM, rows);
    fill_call(&c, 57);
    c.call.mask = NYB_MASK_CAUSAL;
    for (int i = 0; i < 6 * context_count; i++) {
      nyb_context *context = make_context(nyb_context_isa(contexts[i / 6]), threads[i % 6]);
      if (context == NULL) continue; /* a library without a pool */
      run_call(&c, context, NYB_PATH_FUSED);
      if (i % 6 == 0) memcpy(first, c.out, bytes);
      assert_memory_equal(first, c.out, bytes);
      nyb_context_destroy(context);
    }
    free_call(&c);
  }
}

/* Field case 32: each row of a block is the decode step at its position. */
static void test_same_bits_as_decode(void **state) {
  (void)state;
  enum { HEADS = 4, ROWS = 19, DIM = 16, TOKENS = 1200 };
  plain_call c;
  features f;
  make_call(&c, HEADS, ROWS, DIM, TOKENS);
  fill_call(&c, 9);
  add_features(&c, &f);
  for (int i = 0; i < context_count; i++) {
    float alone[DIM];
    run_call(&c, contexts[i], NYB_PATH_FUSED);
    for (int64_t r = 0; r < HEADS * ROWS; r++) {
      const int64_t head = r / ROWS, row = r % ROWS;
      const int32_t length = (int32_t)(TOKENS - ROWS + row + 1);
      nyb_attention step = c.call;
      step.query_heads = step.query_len = 1;
      step.lengths = &length;
      step.q.data = c.q + r * DIM;
      step.out.data = alone;
      step.lse.data = NULL;
      step.mask_array.data = f.mask + row * TOKENS;
      step.sinks = f.sinks + head;
      step.alibi_slopes = f.slopes + head;
      run(contexts[i], &step);
      assert_memory_equal(alone, c.out + r * DIM, sizeof alone);
    }
  }
  free(f.mask);
  free_call(&c);
}

/* A left-padded sequence is the one without padding: columns of the mask and positions from the
 * top left count the padding, windows, kept tokens and slopes do not. */
static void test_padding_counts(void **state) {
  (void)state;
  enum { HEADS = 4, ROWS = 40, DIM = 16, TOKENS = 90, PADDING = 7 };
  const int32_t start = PADDING, rest = TOKENS - PADDING;
  plain_call c;
  features f;
  make_call(&c, HEADS, ROWS, DIM, TOKENS);
  fill_call(&c, 13);
  add_features(&c, &f);
  c.call.window_tokens = 20;
  FOR_ALL(context, path) {
    for (int top_left = 0; top_left < 2; top_left++) {
      float *padded = floats(HEADS * ROWS * DIM);
      c.call.mask = top_left ? NYB_MASK_CAUSAL_TOP_LEFT : NYB_MASK_CAUSAL;
      c.call.starts = &start;
      run_call(&c, context, path);
      memcpy(padded, c.out, HEADS * ROWS * DIM * sizeof(float));
      nyb_attention unpadded = c.call;
      const int64_t rows = top_left ? ROWS - PADDING : ROWS, first = ROWS - rows;
      unpadded.starts = NULL;
      unpadded.lengths = &rest;
      unpadded.capacity_tokens = rest;
      unpadded.k.codes = c.k + PADDING * DIM;
      unpadded.v.codes = c.v + PADDING * DIM;
      unpadded.query_len = rows;
      unpadded.q.data = c.q + first * DIM;
      unpadded.out.data = c.out + first * DIM;
      unpadded.lse.data = NULL;
      unpadded.mask_array.data = f.mask + first * TOKENS + PADDING;
      run(context, &unpadded);
      assert_memory_equal(padded, c.out, HEADS * ROWS * DIM * sizeof(float));
      free(padded);
    }
  }
  c.call.starts = NULL;
  free(f.mask);
  free_call(&c);
}

/* ---- What is not read -------------------------------------------------------------------------
 */

/* Pages of K and V in which no tile is seen cannot be read. */
static void test_reads_only_the_window(void **state) {
  (void)state;
  enum { DIM = 64, TOKENS = 16384, WINDOW = 100, KEEP = 5, TILE = 64 };
  const size_t bytes = (size_t)TOKENS * DIM * sizeof(float);
  const int64_t page = sysconf(_SC_PAGESIZE), row = DIM * (int64_t)sizeof(float);
  char *both = mmap(NULL, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(both != MAP_FAILED);
  memset(both, 0, 2 * bytes);
  /* From the tile behind the kept tokens' to that of the window's first token. */
  const int64_t begin = (TILE * row + page - 1) / page * page;
  const int64_t end = (TOKENS - WINDOW) / TILE * TILE * row / page * page;
  assert_true(begin < end);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(mprotect(both + (size_t)i * bytes + begin, (size_t)(end - begin), PROT_NONE),
                     0);
  }
  plain_call c;
  make_call(&c, 2, 1, DIM, TOKENS);
  const void *k = c.call.k.codes, *v = c.call.v.codes;
  c.call.k.codes = both;
  c.call.v.codes = both + bytes;
  c.call.window_tokens = WINDOW;
  c.call.window_keep_tokens = KEEP;
  FOR_ALL(context, path) {
    run_call(&c, context, path);
    assert_near(c.lse[0], log(WINDOW + KEEP), 1e-6);
  }
  /* The same by a mask, on the fused path; the compat path reads what is seen alone, too. */
  static uint8_t mask[TOKENS];
  memset(mask, 1, KEEP);
  memset(mask + TOKENS - WINDOW, 1, WINDOW);
  c.call.window_tokens = c.call.window_keep_tokens = 0;
  c.call.mask_array = (nyb_mask_array){.data = mask, .kind = NYB_MASK_ARRAY_BOOL, .tokens = TOKENS};
  FOR_ALL(context, path) {
    run_call(&c, context, path);
    assert_near(c.lse[0], log(WINDOW + KEEP), 1e-6);
  }
  c.call.k.codes = k;
  c.call.v.codes = v;
  free_call(&c);
  munmap(both, 2 * bytes);
}

/* NaN in all that a window hides, of K and of V, in the window's own tile as well. */
static void test_hidden_nan(void **state) {
  (void)state;
  enum { HEADS = 3, DIM = 16, TOKENS = 300, WINDOW = 70, KEEP = 20 };
  plain_call c;
  make_call(&c, HEADS, 1, DIM, TOKENS);
  fill_call(&c, 17);
  c.call.window_tokens = WINDOW;
  c.call.window_keep_tokens = KEEP;
  FOR_ALL(context, path) {
    float want[HEADS * DIM];
    fill_call(&c, 17);
    run_call(&c, context, path);
    memcpy(want, c.out, sizeof want);
    for (int i = KEEP * DIM; i < (TOKENS - WINDOW) * DIM; i++) c.k[i] = c.v[i] = NAN;
    run_call(&c, context, path);
    assert_memory_equal(want, c.out, sizeof want);
  }
  free_call(&c);
}

/* What an array hides shows nowhere, though the row sees its neighbours: NaN and infinity among the
 * values of f32 rows, and among the scales and biases of packed ones. Each head hides others. */
enum { ARRAY_HEADS = 3, ARRAY_DIM = 64, ARRAY_TOKENS = 1100 };

static bool hidden_from_all(int token) { return token % 13 == 4; }

static void hide_some(uint8_t mask[ARRAY_HEADS][ARRAY_TOKENS]) {
  for (int head = 0; head < ARRAY_HEADS; head++) {
    for (int t = 0; t < ARRAY_TOKENS; t++) {
      mask[head][t] = (t % ARRAY_HEADS == head || t % 11 == 5) && !hidden_from_all(t);
    }
  }
}

static void test_values_hidden_by_an_array(void **state) {
  (void)state;
  static uint8_t mask[ARRAY_HEADS][ARRAY_TOKENS];
  static float added[ARRAY_HEADS][ARRAY_TOKENS];
  plain_call c;
  make_call(&c, ARRAY_HEADS, 1, ARRAY_DIM, ARRAY_TOKENS);
  hide_some(mask);
  for (int head = 0; head < ARRAY_HEADS; head++) {
    for (int t = 0; t < ARRAY_TOKENS; t++) added[head][t] = mask[head][t] ? 0 : -INFINITY;
  }
  for (int kind = 0; kind < 2; kind++) {
    c.call.mask_array =
        (nyb_mask_array){.data = kind == 0 ? (const void *)mask : added,
                         .dtype = kind == 0 ? 0 : NYB_F32,
                         .kind = kind == 0 ? NYB_MASK_ARRAY_BOOL : NYB_MASK_ARRAY_ADD,
                         .stride = {0, ARRAY_TOKENS, 0},
                         .tokens = ARRAY_TOKENS};
    FOR_ALL(context, path) {
      float want[ARRAY_HEADS * ARRAY_DIM];
      fill_call(&c, 23);
      run_call(&c, context, path);
      memcpy(want, c.out, sizeof want);
      for (int t = 0; t < ARRAY_TOKENS; t++) {
        for (int d = 0; d < ARRAY_DIM && hidden_from_all(t); d++) {
          c.v[t * ARRAY_DIM + d] = t % 2 == 0 ? NAN : INFINITY;
        }
      }
      run_call(&c, context, path);
      assert_memory_equal(want, c.out, sizeof want);
      /* Seen by the first head alone, it is that head's. */
      c.v[3 * ARRAY_DIM] = NAN;
      run_call(&c, context, path);
      assert_true(isnan(c.out[0]));
      want[0] = c.out[0];
      assert_memory_equal(want, c.out, sizeof want);
    }
  }
  free_call(&c);
}

static void test_packed_values_hidden_by_an_array(void **state) {
  (void)state;
  static uint8_t mask[ARRAY_HEADS][ARRAY_TOKENS];
  static float rows[ARRAY_TOKENS * ARRAY_DIM];
  plain_call c;
  make_call(&c, ARRAY_HEADS, 1, ARRAY_DIM, ARRAY_TOKENS);
  hide_some(mask);
  FOR_ALL(context, path) {
    nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
    options.batch = options.kv_heads = 1;
    options.key_dim = options.value_dim = ARRAY_DIM;
    options.key_format = options.value_format =
        (nyb_format){.scheme = NYB_AFFINE, .bits = 4, .group_size = 64, .dtype = NYB_BF16};
    nyb_cache *cache;
    assert_int_equal(nyb_cache_create(context, &options, &cache), NYB_OK);
    fill_call(&c, 29);
    for (int i = 0; i < ARRAY_TOKENS * ARRAY_DIM; i++) rows[i] = c.v[i];
    nyb_append append = NYB_APPEND_INIT;
    append.tokens = ARRAY_TOKENS;
    append.key = append.value = (nyb_input){
        .data = rows, .dtype = NYB_F32, .stride = {0, ARRAY_TOKENS * ARRAY_DIM, ARRAY_DIM}};
    assert_int_equal(nyb_cache_append(cache, &append, NULL), NYB_OK);
    plain_call packed = c;
    assert_int_equal(nyb_cache_view(cache, &packed.call), NYB_OK);
    packed.call.mask_array = (nyb_mask_array){.data = mask,
                                              .kind = NYB_MASK_ARRAY_BOOL,
                                              .stride = {0, ARRAY_TOKENS, 0},
                                              .tokens = ARRAY_TOKENS};
    float want[ARRAY_HEADS * ARRAY_DIM];
    run_call(&packed, context, path);
    memcpy(want, packed.out, sizeof want);
    uint16_t *scales = (uint16_t *)(uintptr_t)packed.call.v.scales;
    uint16_t *biases = (uint16_t *)(uintptr_t)packed.call.v.biases;
    for (int t = 0; t < ARRAY_TOKENS; t++) {
      if (hidden_from_all(t)) (t % 2 == 0 ? scales : biases)[t] = t % 3 == 0 ? 0x7fc0 : 0x7f80;
    }
    run_call(&packed, context, path);
    assert_memory_equal(want, packed.out, sizeof want);
    nyb_cache_destroy(cache);
  }
  free_call(&c);
}

/* ---- Workspace --------------------------------------------------------------------------------
 */

static size_t workspace_of(nyb_context *context, const nyb_attention *call) {
  nyb_plan plan = NYB_PLAN_INIT;
  assert_int_equal(nyb_attention_plan(context, call, &plan), NYB_OK);
  return plan.workspace_bytes;
}

/* It never falls when the call grows, and is no larger with a window. */
static void test_workspace(void **state) {
  (void)state;
  nyb_context *context = make_context(NYB_ISA_SCALAR, 4);
  if (context == NULL) skip();
  plain_call c;
  make_call(&c, 4, 1, 16, 64);
  c.call.mask = NYB_MASK_CAUSAL;
  c.call.q.data = c.call.k.codes = c.call.v.codes = NULL; /* as at model load */
  c.call.out.data = c.call.lse.data = NULL;
  for (int windowed = 0; windowed < 2; windowed++) {
    size_t before = 0;
    c.call.window_tokens = windowed ? 1000 : 0;
    for (int64_t rows = 1; rows <= 64; rows *= 4) {
      for (int64_t tokens = 64; tokens <= 1 << 20; tokens *= 4) {
        c.call.query_len = rows;
        c.call.capacity_tokens = tokens;
        const size_t bytes = workspace_of(context, &c.call);
        assert_true(tokens == 64 || bytes >= before);
        before = bytes;
        c.call.window_tokens = 0;
        assert_true(bytes <= workspace_of(context, &c.call));
        c.call.window_tokens = windowed ? 1000 : 0;
      }
    }
  }
  free_call(&c);
  nyb_context_destroy(context);
}

/* ---- Refusals ---------------------------------------------------------------------------------
 */

enum { ROOM = 1 << 20 }; /* more than such a small call's workspace */

static void expect_refused(const nyb_attention *call, nyb_status want, const char *words) {
  nyb_plan plan = NYB_PLAN_INIT;
  const nyb_status planned = nyb_attention_plan(contexts[0], call, &plan);
  if (planned != want || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("plan: got %s: \"%s\", want %s: \"%s\"", nyb_status_name(planned), nyb_last_error(),
             nyb_status_name(want), words);
  }
  void *workspace = aligned_alloc(64, ROOM);
  assert_non_null(workspace);
  const nyb_status ran = nyb_attention_run(contexts[0], call, workspace, ROOM, NULL);
  free(workspace);
  assert_int_equal(ran, want);
}

static void expect_run_refused(const nyb_attention *call, nyb_status want, const char *words) {
  nyb_plan plan = NYB_PLAN_INIT;
  assert_int_equal(nyb_attention_plan(contexts[0], call, &plan), NYB_OK);
  void *workspace = aligned_alloc(64, plan.workspace_bytes + 64);
  assert_non_null(workspace);
  const nyb_status status =
      nyb_attention_run(contexts[0], call, workspace, plan.workspace_bytes, NULL);
  free(workspace);
  if (status != want || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("run: got %s: \"%s\", want %s: \"%s\"", nyb_status_name(status), nyb_last_error(),
             nyb_status_name(want), words);
  }
}

#define REFUSED(field, value, status, words)     \
  do {                                           \
    nyb_attention spoiled = c.call;              \
    spoiled.field = value;                       \
    expect_refused(&spoiled, (status), (words)); \
  } while (0)

static void test_refusals(void **state) {
  (void)state;
  static uint8_t bools[64];
  static uint16_t halves[64];
  plain_call c;
  make_call(&c, 2, 1, 16, 20);
  REFUSED(window_tokens, -1, NYB_ERROR_SHAPE, "attention.window_tokens is -1");
  REFUSED(window_keep_tokens, -4, NYB_ERROR_SHAPE, "attention.window_keep_tokens is -4");
  REFUSED(window_keep_tokens, 4, NYB_ERROR_VALUE, "without a window it must be 0");
  REFUSED(softcap, -1, NYB_ERROR_VALUE, "attention.softcap is -1");
  REFUSED(softcap, 1e-40f, NYB_ERROR_VALUE, "it must be 2^-126 to 2^126");
  REFUSED(softcap, 2e38f, NYB_ERROR_VALUE, "attention.softcap is 2e+38");
  REFUSED(softcap, NAN, NYB_ERROR_NON_FINITE, "attention.softcap is NaN");
  REFUSED(softcap, INFINITY, NYB_ERROR_NON_FINITE, "attention.softcap is infinity");
  REFUSED(reserved, 3, NYB_ERROR_VALUE, "attention.reserved is 3");
  REFUSED(mask_array.data, bools, NYB_ERROR_ENUM, "attention.mask_array.kind is 0");
  REFUSED(mask_array.kind, (nyb_mask_array_kind)3, NYB_ERROR_ENUM, "mask_array.kind is 3");
  const nyb_mask_array yes = {.data = bools, .kind = NYB_MASK_ARRAY_BOOL, .tokens = 20};
  c.call.mask_array = yes;
  REFUSED(mask_array.dtype, NYB_F32, NYB_ERROR_DTYPE, "with NYB_MASK_ARRAY_BOOL it must be 0");
  REFUSED(mask_array.tokens, -1, NYB_ERROR_SHAPE, "attention.mask_array.tokens is -1");
  c.call.mask_array.tokens = 19;
  expect_run_refused(&c.call, NYB_ERROR_LENGTH, "attention.mask_array.tokens is 19");
  c.call.mask_array = yes;
  c.call.mask_array.data = NULL;
  expect_run_refused(&c.call, NYB_ERROR_NULL, "attention.mask_array.data is NULL");
  c.call.mask_array =
      (nyb_mask_array){.data = halves, .kind = NYB_MASK_ARRAY_ADD, .dtype = NYB_F16, .tokens = 20};
  expect_refused(&c.call, NYB_ERROR_DTYPE, "attention.mask_array.dtype is 2; it must be NYB_F32");
  c.call.mask_array.dtype = NYB_F32;
  REFUSED(mask_array.data, (char *)halves + 2, NYB_ERROR_ALIGNMENT, "mask_array.data");
  c.call.mask_array = (nyb_mask_array){0};
  /* T(softcap) of f16, with MLX. */
  c.call.q.dtype = NYB_F16;
  c.call.rounding = NYB_ROUNDING_MLX;
  REFUSED(softcap, 1e5f, NYB_ERROR_VALUE, "rounds to inf");
  REFUSED(softcap, 1e-9f, NYB_ERROR_VALUE, "rounds to 0");
  c.call.q.dtype = NYB_F32;
  /* Outputs over what is read. */
  REFUSED(sinks, c.out + 2, NYB_ERROR_OVERLAP, "attention.sinks");
  REFUSED(alibi_slopes, c.out, NYB_ERROR_OVERLAP, "attention.alibi_slopes");
  c.call.mask_array = yes;
  REFUSED(mask_array.data, c.lse, NYB_ERROR_OVERLAP, "attention.mask_array");
  free_call(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_corners),
      cmocka_unit_test(test_window_counts),
      cmocka_unit_test(test_all_masked),
      cmocka_unit_test(test_all_masked_by_mlx),
      cmocka_unit_test(test_sink_enters_once),
      cmocka_unit_test(test_not_finite),
      cmocka_unit_test(test_tanh),
      cmocka_unit_test(test_same_bits_on_threads),
      cmocka_unit_test(test_same_bits_on_many_threads),
      cmocka_unit_test(test_same_bits_as_decode),
      cmocka_unit_test(test_padding_counts),
      cmocka_unit_test(test_reads_only_the_window),
      cmocka_unit_test(test_hidden_nan),
      cmocka_unit_test(test_values_hidden_by_an_array),
      cmocka_unit_test(test_packed_values_hidden_by_an_array),
      cmocka_unit_test(test_workspace),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, make_contexts, free_contexts);
}
