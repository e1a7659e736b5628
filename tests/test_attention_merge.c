/* SPDX-License-Identifier: Apache-2.0 */
/* Merging results over parts of the tokens: splits of real attention, what is kept to the bit,
 * threads and ISAs, misuse. That every element is right is the check's business
 * (check_attention_merge.c), which runs here too. */
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

/* NULL where the ISA does not run here. */
static nyb_context *context_for(nyb_isa isa, int64_t threads) {
  static int64_t most_threads = 8;
  nyb_context *context = NULL;
  const nyb_context_options options = {.struct_size = sizeof options,
                                       .isa = isa,
                                       .threads = threads,
                                       .parallel_for = check_parallel_for,
                                       .parallel_for_data = &most_threads};
  const nyb_status status = nyb_context_create(&options, &context);
  if (status == NYB_ERROR_UNSUPPORTED) return NULL;
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  return context;
}

static void merge(nyb_context *context, const nyb_attention_merge *call) {
  if (nyb_attention_merge_run(context, call, NULL) != NYB_OK) fail_msg("%s", nyb_last_error());
}

static void test_checks(void **state) {
  (void)state;
  const check_options options = {.quick = true, .operation = "attention_merge"};
  check_run *run = check_all(&options);
  assert_non_null(run);
  for (int64_t i = 0; i < run->failures_kept; i++) print_error("%s\n", run->failures[i]);
  assert_int_equal(run->failed, 0);
  assert_true(run->passed > 100);
  check_free(run);
}

/* ---- Parts without gaps --------------------------------------------------------------------- */

/* Results [parts][rows][dim] and [parts][rows], as a gather leaves them, and their merge. */
typedef struct gathered {
  int64_t parts, rows, dim;
  nyb_dtype dtype;
  void *outs;
  float *lses;
  nyb_input *out_views, *lse_views;
  nyb_attention_merge call; /* writes to out and lse */
  void *out;
  float *lse;
} gathered;

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

static gathered gather(int64_t parts, int64_t rows, int64_t dim, nyb_dtype dtype) {
  gathered g = {.parts = parts, .rows = rows, .dim = dim, .dtype = dtype};
  const int64_t out_bytes = rows * dim * bytes_of(dtype);
  g.outs = malloc((size_t)(parts * out_bytes));
  g.lses = malloc((size_t)(parts * rows) * sizeof(float));
  g.out_views = malloc((size_t)parts * sizeof *g.out_views);
  g.lse_views = malloc((size_t)parts * sizeof *g.lse_views);
  g.out = malloc((size_t)out_bytes);
  g.lse = malloc((size_t)rows * sizeof(float));
  assert_true(g.outs != NULL && g.lses != NULL && g.out_views != NULL && g.lse_views != NULL);
  assert_true(g.out != NULL && g.lse != NULL);
  memset(g.out, 0xff, (size_t)out_bytes);
  memset(g.lse, 0xff, (size_t)rows * sizeof(float));
  for (int64_t i = 0; i < parts; i++) {
    g.out_views[i] =
        (nyb_input){(uint8_t *)g.outs + i * out_bytes, dtype, {rows * dim, dim, rows * dim}};
    g.lse_views[i] = (nyb_input){g.lses + i * rows, NYB_F32, {rows, 1, rows}};
  }
  g.call = (nyb_attention_merge){.struct_size = sizeof g.call,
                                 .parts = parts,
                                 .batch = 1,
                                 .query_heads = rows,
                                 .query_len = 1,
                                 .value_dim = dim,
                                 .outs = g.out_views,
                                 .lses = g.lse_views,
                                 .out = {g.out, dtype, {rows * dim, dim, rows * dim}},
                                 .lse = {g.lse, NYB_F32, {rows, 1, rows}}};
  return g;
}

static void discard(gathered *g) {
  free(g->outs);
  free(g->lses);
  free(g->out_views);
  free(g->lse_views);
  free(g->out);
  free(g->lse);
}

static void *out_of(const gathered *g, int64_t part) {
  return (uint8_t *)g->outs + part * g->rows * g->dim * bytes_of(g->dtype);
}

static float *lse_of(const gathered *g, int64_t part) { return g->lses + part * g->rows; }

static void fill(const gathered *g, uint64_t seed) {
  check_random random = {.state = seed};
  for (int64_t i = 0; i < g->parts * g->rows * g->dim; i++) {
    oracle_store(g->outs, g->dtype, i, check_random_normal(&random));
  }
  for (int64_t i = 0; i < g->parts * g->rows; i++) {
    g->lses[i] = (float)(8 + check_random_normal(&random));
  }
}

/* ---- Splits of attention -------------------------------------------------------------------- */

/* Token `first` and all after it. */
static nyb_stored from_token(const nyb_stored *rows, int64_t first) {
  nyb_stored rest = *rows;
  const int64_t dtype_bytes = bytes_of(rows->format.dtype);
  const int64_t code_bytes = rows->format.scheme == NYB_PLAIN ? dtype_bytes : 4;
  rest.codes = (const uint8_t *)rows->codes + first * rows->codes_stride[2] * code_bytes;
  if (rows->format.scheme == NYB_PLAIN) return rest;
  rest.scales = (const uint8_t *)rows->scales + first * rows->scales_stride[2] * dtype_bytes;
  rest.biases = (const uint8_t *)rows->biases + first * rows->biases_stride[2] * dtype_bytes;
  return rest;
}

/* One sequence's tokens in `parts` pieces, as equal as can be; the query rows are those of its last
 * tokens, and only the last piece has to hide any. */
static void attend_in_parts(const attention_scene *scene, nyb_context *context, const gathered *g) {
  const int64_t length = scene->shape.lengths[0];
  for (int64_t part = 0; part < g->parts; part++) {
    const int64_t begin = length * part / g->parts, end = length * (part + 1) / g->parts;
    const int32_t lengths[1] = {(int32_t)(end - begin)};
    nyb_attention call = scene->call;
    call.path = NYB_PATH_FUSED;
    call.k = from_token(&scene->call.k, begin);
    call.v = from_token(&scene->call.v, begin);
    call.lengths = lengths;
    call.capacity_tokens = end - begin;
    if (part + 1 < g->parts) call.mask = NYB_MASK_NONE;
    call.out.data = out_of(g, part);
    call.lse.data = lse_of(g, part);
    const nyb_status status =
        nyb_attention_run(context, &call, scene->workspace, scene->workspace_bytes, NULL);
    if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  }
}

/* The root of the mean square error of [rows, dim] numbers, and of the lse; NaN where one is. */
static double out_error(const void *out, const scene_expected *e, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    const double error = oracle_load(out, NYB_F32, i) - e->out[i];
    sum += error * error;
  }
  return sqrt(sum / (double)count);
}

static double lse_error(const float *lse, const scene_expected *e, int64_t rows) {
  double worst = 0;
  for (int64_t i = 0; i < rows; i++) {
    const double error = fabs((double)lse[i] - e->lse[i]);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

typedef struct split_case {
  const char *name;
  nyb_format format;
  int64_t query_len;
  int32_t length;
  row_class keys;
  query_class queries;
} split_case;

static void check_splits(nyb_context *context, const split_case *c, const int64_t *splits,
                         int64_t split_count) {
  enum { HEADS = 2, DIM = 64 };
  const attention_shape shape = {.name = c->name,
                                 .batch = 1,
                                 .query_heads = HEADS,
                                 .kv_heads = 1,
                                 .query_len = c->query_len,
                                 .key_dim = DIM,
                                 .value_dim = DIM,
                                 .capacity_tokens = c->length,
                                 .lengths = {c->length},
                                 .key_format = c->format,
                                 .value_format = c->format,
                                 .query_dtype = NYB_BF16,
                                 .out_dtype = NYB_F32,
                                 .mask = c->query_len > 1 ? NYB_MASK_CAUSAL : NYB_MASK_NONE,
                                 .queries = c->queries,
                                 .keys = c->keys,
                                 .values = ROWS_NORMAL,
                                 .seed = 26};
  const int64_t rows = HEADS * c->query_len;
  attention_scene scene;
  scene_expected expected;
  assert_true(scene_make(&scene, &shape));
  assert_true(scene_expect(&scene, NYB_PATH_FUSED, ORACLE_CPU, &expected));
  if (scene_run(&scene, &check_nybble, context, NYB_PATH_FUSED) != NYB_OK) {
    fail_msg("%s", nyb_last_error());
  }
  const double alone = out_error(scene.out.data, &expected, rows * DIM);
  for (int64_t i = 0; i < split_count; i++) {
    gathered g = gather(splits[i], rows, DIM, NYB_F32);
    attend_in_parts(&scene, context, &g);
    merge(context, &g.call);
    /* The parts err as the one call does, each by itself, and the sum over them no more than that
     * (1.2 times was the most seen). Then there are their lses, f32 numbers of about 9, whose
     * rounding is 2^-21 of a weight: of what a part's out is away from the merged one, which is
     * out's own size times the root of the parts. */
    const double size = 1 / sqrt((double)c->length);
    const double tolerance = 1.5 * alone + 0x1p-21 * size * sqrt((double)splits[i]);
    const double error = out_error(g.out, &expected, rows * DIM);
    if (!(error <= tolerance)) {
      fail_msg("%s in %d parts: error %g, in one call %g, tolerance %g", c->name, (int)splits[i],
               error, alone, tolerance);
    }
    const double of_lse = lse_error(g.lse, &expected, rows);
    if (!(of_lse <= 1e-5)) fail_msg("%s in %d parts: lse %g", c->name, (int)splits[i], of_lse);
    discard(&g);
  }
  scene_expected_free(&expected);
  scene_free(&scene);
}

/* Field case 26: each number of splits has the same error, and a token that outweighs all others
 * counts wherever it stands. */
static void test_splits_have_one_error(void **state) {
  (void)state;
  static const int64_t splits[] = {1, 2, 3, 7, 31, 33, 48, 100};
  static const int64_t sixteen[] = {1, 16, 1000};
  const nyb_format affine4 = {NYB_AFFINE, 4, 64, NYB_BF16}, plain = {NYB_PLAIN, 0, 0, NYB_F16};
  const split_case cases[] = {
      {"4 bits", affine4, 1, 8192, ROWS_NORMAL, QUERIES_NORMAL},
      {"f16", plain, 1, 8192, ROWS_NORMAL, QUERIES_NORMAL},
      {"4 bits, causal rows", affine4, 5, 8192, ROWS_NORMAL, QUERIES_NORMAL},
  };
  const split_case dominant = {"dominant", affine4, 1, 1000, ROWS_DOMINANT, QUERIES_ALIGNED};
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 2);
    if (context == NULL) continue;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
      check_splits(context, &cases[i], splits, sizeof splits / sizeof splits[0]);
    }
    check_splits(context, &dominant, sixteen, sizeof sixteen / sizeof sixteen[0]);
    nyb_context_destroy(context);
  }
}

/* Field case 29: a sink enters the denominator once, in whichever part it stands, an empty one too.
 * Two keys of score 0 with value 1 and a sink of 0 give 2/3. A sink alone is a part whose out is 0
 * and whose lse is the logit. */
static void test_a_sink_counts_once(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  for (int64_t parts = 2; parts <= 8; parts++) {
    for (int64_t place = 0; place < parts; place++) {
      gathered g = gather(parts, 1, 3, NYB_F32);
      int tokens = 0;
      for (int64_t part = 0; part < parts; part++) {
        const bool has_token = part != place && tokens < 2;
        tokens += has_token;
        *lse_of(&g, part) = part == place || has_token ? 0 : -INFINITY;
        for (int i = 0; i < 3; i++) ((float *)out_of(&g, part))[i] = has_token ? 1 : 0;
      }
      if (tokens == 1) *lse_of(&g, place == 0) = logf(2);
      merge(context, &g.call);
      for (int i = 0; i < 3; i++) {
        assert_true(fabs((double)((float *)g.out)[i] - 2.0 / 3) <= 0x1p-24);
      }
      assert_true(fabs((double)*g.lse - log(3)) <= 0x1p-23);
      discard(&g);
    }
  }
  nyb_context_destroy(context);
}

/* ---- What each part passes (docs/distributed.md) ----------------------------------------------
 */

enum { PLACES_HEADS = 2, PLACES_DIM = 64, PLACES_TOKENS = 3000, PLACES_ROWS = 3, WINDOW = 700 };

static void make_places_scene(attention_scene *scene, int64_t query_len) {
  const nyb_format format = {NYB_AFFINE, 4, 64, NYB_BF16};
  const attention_shape shape = {.name = "parts of a window",
                                 .batch = 1,
                                 .query_heads = PLACES_HEADS,
                                 .kv_heads = 1,
                                 .query_len = query_len,
                                 .key_dim = PLACES_DIM,
                                 .value_dim = PLACES_DIM,
                                 .capacity_tokens = PLACES_TOKENS,
                                 .lengths = {PLACES_TOKENS},
                                 .key_format = format,
                                 .value_format = format,
                                 .query_dtype = NYB_BF16,
                                 .out_dtype = NYB_F32,
                                 .mask = query_len > 1 ? NYB_MASK_CAUSAL : NYB_MASK_NONE,
                                 .seed = 40};
  assert_true(scene_make(scene, &shape));
}

static void attend(nyb_context *context, nyb_attention *call) {
  call->path = NYB_PATH_FUSED;
  nyb_plan plan = NYB_PLAN_INIT;
  if (nyb_attention_plan(context, call, &plan) != NYB_OK) fail_msg("%s", nyb_last_error());
  void *workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes + 64);
  assert_non_null(workspace);
  if (nyb_attention_run(context, call, workspace, plan.workspace_bytes, NULL) != NYB_OK) {
    fail_msg("%s", nyb_last_error());
  }
  free(workspace);
}

/* Both sides err by some 1e-6 of the row, and the parts' lses by 2^-21 of it; a token too many or
 * too few of 700 would be a thousand times as much. */
static void assert_same_result(const gathered *g, const float *out, const float *lse) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < g->rows * g->dim; i++) {
    const double got = (double)((float *)g->out)[i], want = (double)out[i];
    difference += (got - want) * (got - want);
    size += want * want;
  }
  assert_true(size > 0);
  if (!(sqrt(difference / size) <= 1e-5)) {
    fail_msg("%d parts differ from one call by %g", (int)g->parts, sqrt(difference / size));
  }
  for (int64_t i = 0; i < g->rows; i++) assert_true(fabs((double)(g->lse[i] - lse[i])) <= 1e-5);
}

/* One row and contiguous pieces: the window ends where the last piece ends, and begins somewhere in
 * the others. The sinks are one part's, the softcap is all parts'. */
static void test_parts_of_a_window(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 2);
  const float sinks[PLACES_HEADS] = {0.5f, 2.0f};
  attention_scene scene;
  make_places_scene(&scene, 1);
  nyb_attention whole = scene.call;
  whole.window_tokens = WINDOW;
  whole.sinks = sinks;
  whole.softcap = 3;
  attend(context, &whole);
  for (int64_t parts = 1; parts <= 7; parts++) {
    gathered g = gather(parts, PLACES_HEADS, PLACES_DIM, NYB_F32);
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = PLACES_TOKENS * part / parts, end = PLACES_TOKENS * (part + 1) / parts;
      const int32_t lengths[1] = {(int32_t)(end - begin)};
      const int64_t before = PLACES_TOKENS - WINDOW - begin; /* tokens before the window */
      const int32_t starts[1] = {(int32_t)(before < 0             ? 0
                                           : before > end - begin ? end - begin
                                                                  : before)};
      nyb_attention call = whole;
      call.k = from_token(&scene.call.k, begin);
      call.v = from_token(&scene.call.v, begin);
      call.lengths = lengths;
      call.capacity_tokens = end - begin;
      if (part + 1 < parts) {
        call.window_tokens = 0;
        call.starts = starts;
      }
      if (part != parts / 2) call.sinks = NULL;
      call.out.data = out_of(&g, part);
      call.lse.data = lse_of(&g, part);
      attend(context, &call);
    }
    merge(context, &g.call);
    assert_same_result(&g, scene.out.data, scene.lse.data);
    discard(&g);
  }
  scene_free(&scene);
  nyb_context_destroy(context);
}

/* Several causal rows with a window, over parts that take turns in blocks of 100 tokens: each part
 * passes the columns of its own tokens. */
static void test_parts_with_masks_of_their_own(void **state) {
  (void)state;
  enum { BLOCK = 100 };
  static uint8_t visible[PLACES_ROWS][PLACES_TOKENS];
  nyb_context *context = context_for(NYB_ISA_AUTO, 2);
  attention_scene scene;
  make_places_scene(&scene, PLACES_ROWS);
  nyb_attention whole = scene.call;
  whole.window_tokens = WINDOW;
  attend(context, &whole);
  for (int64_t parts = 2; parts <= 5; parts++) {
    const int64_t room = (PLACES_TOKENS / BLOCK + parts - 1) / parts * BLOCK;
    /* A part's rows in its own order: pages of one block each do it without a copy. */
    gathered g = gather(parts, PLACES_HEADS * PLACES_ROWS, PLACES_DIM, NYB_F32);
    for (int64_t part = 0; part < parts; part++) {
      int32_t table[PLACES_TOKENS / BLOCK], lengths[1] = {0};
      for (int64_t block = part; block < PLACES_TOKENS / BLOCK; block += parts) {
        table[lengths[0] / BLOCK] = (int32_t)block;
        for (int64_t t = block * BLOCK; t < (block + 1) * BLOCK; t++, lengths[0]++) {
          for (int64_t row = 0; row < PLACES_ROWS; row++) {
            const int64_t position = PLACES_TOKENS - PLACES_ROWS + row;
            visible[row][lengths[0]] = t <= position && t > position - WINDOW;
          }
        }
      }
      nyb_attention call = scene.call;
      call.mask = NYB_MASK_NONE;
      call.mask_array = (nyb_mask_array){.data = visible,
                                         .kind = NYB_MASK_ARRAY_BOOL,
                                         .stride = {0, 0, PLACES_TOKENS},
                                         .tokens = PLACES_TOKENS};
      call.lengths = lengths;
      call.capacity_tokens = room;
      call.pages = (nyb_pages){.table = table,
                               .table_stride = PLACES_TOKENS / BLOCK,
                               .page_tokens = BLOCK,
                               .page_count = PLACES_TOKENS / BLOCK};
      call.k.codes_stride[0] = BLOCK * call.k.codes_stride[2];
      call.k.scales_stride[0] = BLOCK * call.k.scales_stride[2];
      call.k.biases_stride[0] = BLOCK * call.k.biases_stride[2];
      call.v.codes_stride[0] = BLOCK * call.v.codes_stride[2];
      call.v.scales_stride[0] = BLOCK * call.v.scales_stride[2];
      call.v.biases_stride[0] = BLOCK * call.v.biases_stride[2];
      call.out.data = out_of(&g, part);
      call.lse.data = lse_of(&g, part);
      attend(context, &call);
    }
    merge(context, &g.call);
    assert_same_result(&g, scene.out.data, scene.lse.data);
    discard(&g);
  }
  scene_free(&scene);
  nyb_context_destroy(context);
}

/* Field case 29 with attention itself: the sink, unscaled, enters once for any number of splits,
 * also from a part that has no token. */
static void test_a_sink_of_attention_counts_once(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  static const struct {
    float sink, scale;
    double want;
  } cases[] = {{0, 1, 2.0 / 3}, {1, 0.5f, 2 / (2 + 2.718281828459045)}};
  static const float query[4] = {0, 0, 0, 0};
  static const float keys[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8}, values[2] = {1, 1};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int64_t parts = 1; parts <= 8; parts++) {
      for (int64_t place = 0; place < parts; place++) {
        gathered g = gather(parts, 1, 1, NYB_F32);
        for (int64_t part = 0; part < parts; part++) {
          /* Two tokens for all parts, from the last one down: the first has none from three on. */
          const int64_t begin = parts > 1 && part + 1 == parts ? 1 : 0;
          const int32_t tokens = parts == 1 ? 2 : part + 2 >= parts ? 1 : 0, lengths[1] = {tokens};
          nyb_attention call = NYB_ATTENTION_INIT;
          call.batch = call.query_heads = call.kv_heads = call.query_len = call.value_dim = 1;
          call.key_dim = 4;
          call.capacity_tokens = tokens;
          call.lengths = lengths;
          call.q = (nyb_input){query, NYB_F32, {4, 4, 4}};
          call.k = (nyb_stored){.format = {.scheme = NYB_PLAIN, .dtype = NYB_F32},
                                .codes = keys + 4 * begin,
                                .codes_stride = {8, 8, 4}};
          call.v = (nyb_stored){.format = {.scheme = NYB_PLAIN, .dtype = NYB_F32},
                                .codes = values + begin,
                                .codes_stride = {2, 2, 1}};
          call.out = (nyb_output){out_of(&g, part), NYB_F32, {1, 1, 1}};
          call.lse = (nyb_output){lse_of(&g, part), NYB_F32, {1, 1, 1}};
          call.scale = cases[i].scale;
          call.sinks = part == place ? &cases[i].sink : NULL;
          attend(context, &call);
        }
        merge(context, &g.call);
        const double got = (double)*(float *)g.out;
        if (!(fabs(got - cases[i].want) <= 1e-6)) {
          fail_msg("%d parts, the sink in part %d: got %g, want %g", (int)parts, (int)place, got,
                   cases[i].want);
        }
        discard(&g);
      }
    }
  }
  nyb_context_destroy(context);
}

/* ---- To the bit ------------------------------------------------------------------------------ */

/* Numbers that arithmetic easily changes: zeros of both signs, subnormal and largest ones. */
static void fill_with_edges(const gathered *g, int64_t part) {
  static const double edges[] = {0.0, -0.0, 0x1p-149, -0x1p-149, 0x1p-24, 65504, -65504, 1, -1.5};
  enum { EDGES = sizeof edges / sizeof edges[0] };
  for (int64_t i = 0; i < g->rows * g->dim; i++) {
    const double value = g->dtype == NYB_F32 && i % 11 == 3 ? 0x1.fffffep127 : edges[i % EDGES];
    oracle_store(out_of(g, part), g->dtype, i, value);
  }
}

static void make_empty(const gathered *g, int64_t part) {
  memset(out_of(g, part), 0xff, (size_t)(g->rows * g->dim * bytes_of(g->dtype))); /* NaN */
  for (int64_t i = 0; i < g->rows; i++) lse_of(g, part)[i] = -INFINITY;
}

static void test_empty_parts_change_no_bit(void **state) {
  (void)state;
  enum { PARTS = 5, ROWS = 3, DIM = 40 };
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    /* One part that is not empty, in every place. */
    for (int64_t place = 0; place < PARTS; place++) {
      gathered g = gather(PARTS, ROWS, DIM, dtype);
      for (int64_t part = 0; part < PARTS; part++) make_empty(&g, part);
      fill_with_edges(&g, place);
      const float lses[ROWS] = {-0.0f, 1e-40f, -3.4e38f};
      memcpy(lse_of(&g, place), lses, sizeof lses);
      merge(context, &g.call);
      assert_memory_equal(g.out, out_of(&g, place), ROWS * DIM * (size_t)bytes_of(dtype));
      assert_memory_equal(g.lse, lses, sizeof lses);
      discard(&g);
    }
    /* Two and three empty ones first, between and last leave the merge of the others alone. */
    gathered plain = gather(2, ROWS, DIM, dtype);
    fill(&plain, 7);
    merge(context, &plain.call);
    for (int64_t a = 0; a < PARTS; a++) {
      for (int64_t b = a + 1; b < PARTS; b++) {
        gathered g = gather(PARTS, ROWS, DIM, dtype);
        for (int64_t part = 0; part < PARTS; part++) make_empty(&g, part);
        for (int64_t i = 0; i < 2; i++) {
          const int64_t place = i == 0 ? a : b;
          memcpy(out_of(&g, place), out_of(&plain, i), ROWS * DIM * (size_t)bytes_of(dtype));
          memcpy(lse_of(&g, place), lse_of(&plain, i), ROWS * sizeof(float));
        }
        merge(context, &g.call);
        assert_memory_equal(g.out, plain.out, ROWS * DIM * (size_t)bytes_of(dtype));
        assert_memory_equal(g.lse, plain.lse, ROWS * sizeof(float));
        discard(&g);
      }
    }
    discard(&plain);
  }
  nyb_context_destroy(context);
}

/* The attention of a row that sees nothing is such a part. */
static void test_all_empty_is_empty(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  gathered g = gather(3, 2, 8, NYB_BF16);
  for (int64_t part = 0; part < 3; part++) make_empty(&g, part);
  merge(context, &g.call);
  for (int i = 0; i < 16; i++) assert_int_equal(((uint16_t *)g.out)[i], 0);
  for (int i = 0; i < 2; i++) assert_true(isinf(g.lse[i]) && g.lse[i] < 0);
  discard(&g);
  nyb_context_destroy(context);
}

/* Several tasks; the bits are the same on any number of threads, and on every ISA. */
static void test_bits_depend_on_nothing_else(void **state) {
  (void)state;
  enum { PARTS = 9, ROWS = 96, DIM = 300 };
  static const int64_t threads[] = {1, 2, 3, 7, 16, 64};
  for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    gathered g = gather(PARTS, ROWS, DIM, dtype);
    const size_t out_bytes = ROWS * DIM * (size_t)bytes_of(dtype);
    void *first = malloc(out_bytes);
    float first_lse[ROWS];
    assert_non_null(first);
    fill(&g, 57);
    bool is_first = true;
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        nyb_context *context = context_for(isa, threads[i]);
        if (context == NULL) break;
        memset(g.out, 0xff, out_bytes);
        memset(g.lse, 0xff, sizeof first_lse);
        merge(context, &g.call);
        if (is_first) {
          memcpy(first, g.out, out_bytes);
          memcpy(first_lse, g.lse, sizeof first_lse);
          is_first = false;
        }
        assert_memory_equal(g.out, first, out_bytes);
        assert_memory_equal(g.lse, first_lse, sizeof first_lse);
        nyb_context_destroy(context);
      }
    }
    /* A row alone, too. */
    nyb_context *context = context_for(NYB_ISA_AUTO, 1);
    const int64_t row = 41;
    for (int64_t part = 0; part < PARTS; part++) {
      g.out_views[part].data =
          (const uint8_t *)g.out_views[part].data + row * DIM * bytes_of(dtype);
      g.lse_views[part].data = (const float *)g.lse_views[part].data + row;
    }
    g.call.query_heads = 1;
    merge(context, &g.call);
    const size_t row_bytes = DIM * (size_t)bytes_of(dtype);
    assert_memory_equal(g.out, (const uint8_t *)first + (size_t)row * row_bytes, row_bytes);
    assert_memory_equal(g.lse, &first_lse[row], sizeof(float));
    nyb_context_destroy(context);
    free(first);
    discard(&g);
  }
}

/* Known numbers, so that every machine has these bits and no other: a cluster's processes agree. */
static void test_known_bits(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  gathered g = gather(4, 1, 2, NYB_F32);
  const float lses[4] = {8.25f, 9.0f, -2.5f, 8.9f};
  for (int64_t part = 0; part < 4; part++) {
    *lse_of(&g, part) = lses[part];
    ((float *)out_of(&g, part))[0] = 0.1f * (float)(part + 1);
    ((float *)out_of(&g, part))[1] = part % 2 == 0 ? 3.0f : -7.0f;
  }
  merge(context, &g.call);
  const uint32_t want[3] = {0x3e8333f2, 0xc0a069a9, 0x411ddad8};
  uint32_t got[3];
  memcpy(got, g.out, 2 * sizeof(float));
  memcpy(got + 2, g.lse, sizeof(float));
  assert_memory_equal(got, want, sizeof want);
  discard(&g);
  nyb_context_destroy(context);
}

static void test_most_parts(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  gathered g = gather(65536, 1, 1, NYB_F32);
  for (int64_t part = 0; part < g.parts; part++) {
    *lse_of(&g, part) = 2;
    *(float *)out_of(&g, part) = 3;
  }
  merge(context, &g.call);
  assert_true(*(float *)g.out == 3);
  assert_true(fabs((double)*g.lse - (2 + log(65536))) <= 0x1p-20);
  discard(&g);
  nyb_context_destroy(context);
}

static void test_calls_are_counted(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  gathered g = gather(2, 1, 4, NYB_F32);
  fill(&g, 1);
  nyb_counters counters = NYB_COUNTERS_INIT;
  merge(context, &g.call);
  merge(context, &g.call);
  g.call.parts = 0;
  assert_int_equal(nyb_attention_merge_run(context, &g.call, NULL), NYB_ERROR_SHAPE);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.attention_merge, 2);
  nyb_counters_clear(context);
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  assert_int_equal(counters.attention_merge, 0);
  discard(&g);
  nyb_context_destroy(context);
}

/* ---- Misuse --------------------------------------------------------------------------------- */

/* 3 parts of 2 heads x 2 rows x 4, one batch entry. */
typedef void (*mistake)(gathered *g);

static void parts_0(gathered *g) { g->call.parts = 0; }
static void too_many_parts(gathered *g) { g->call.parts = 65537; }
static void negative_batch(gathered *g) { g->call.batch = -1; }
static void negative_heads(gathered *g) { g->call.query_heads = -1; }
static void negative_rows(gathered *g) { g->call.query_len = -5; }
static void no_value_dim(gathered *g) { g->call.value_dim = 0; }
static void long_value_dim(gathered *g) { g->call.value_dim = 65537; }
static void small_struct(gathered *g) { g->call.struct_size = 8; }
static void no_outs(gathered *g) { g->call.outs = NULL; }
static void no_lses(gathered *g) { g->call.lses = NULL; }
static void no_out(gathered *g) { g->call.out.data = NULL; }
static void no_data(gathered *g) { g->out_views[2].data = NULL; }
static void no_lse_data(gathered *g) { g->lse_views[1].data = NULL; }
static void no_dtype(gathered *g) { g->out_views[1].dtype = (nyb_dtype)0; }
static void no_out_dtype(gathered *g) { g->call.out.dtype = (nyb_dtype)7; }
static void half_lse(gathered *g) { g->lse_views[2].dtype = NYB_F16; }
static void half_lse_out(gathered *g) { g->call.lse.dtype = NYB_BF16; }
static void odd_address(gathered *g) {
  g->out_views[0].data = (const uint8_t *)g->out_views[0].data + 1;
}
static void stride_0(gathered *g) { g->call.out.stride[1] = 0; }
static void lse_stride_0(gathered *g) { g->call.lse.stride[1] = 0; }
static void vast_stride(gathered *g) { g->out_views[1].stride[1] = INT64_MAX / 2; }
static void over_another_part(gathered *g) { g->call.out.data = out_of(g, 1); }
static void over_the_first_shifted(gathered *g) { g->call.out.data = (float *)out_of(g, 0) + 1; }
static void over_the_first_otherwise(gathered *g) { /* heads and rows of out exchanged */
  g->call.out.data = out_of(g, 0);
  g->call.out.stride[1] = 4;
  g->call.out.stride[2] = 8;
}
static void over_the_first_as_bf16(gathered *g) {
  g->call.out.data = out_of(g, 0);
  g->call.out.dtype = NYB_BF16;
}
static void lse_over_the_second(gathered *g) { g->call.lse.data = lse_of(g, 1); }
static void lse_over_out(gathered *g) { g->call.lse.data = g->out; }
static void lse_over_an_out(gathered *g) { g->call.lse.data = out_of(g, 2); }
static void out_over_an_lse(gathered *g) { g->call.out.data = lse_of(g, 0); }
static void over_the_views(gathered *g) { g->call.out.data = g->out_views; }
static void lse_over_the_views(gathered *g) { g->call.lse.data = g->lse_views; }

static gathered four_rows(void) {
  gathered g = gather(3, 4, 4, NYB_F32);
  fill(&g, 3);
  g.call.query_heads = g.call.query_len = 2;
  for (int64_t part = 0; part < 3; part++) {
    const int64_t out[3] = {16, 8, 4}, lse[3] = {4, 2, 1};
    memcpy(g.out_views[part].stride, out, sizeof out);
    memcpy(g.lse_views[part].stride, lse, sizeof lse);
    memcpy(g.call.out.stride, out, sizeof out);
    memcpy(g.call.lse.stride, lse, sizeof lse);
  }
  return g;
}

static void test_mistakes_are_refused(void **state) {
  (void)state;
  static const struct {
    mistake make;
    nyb_status status;
    const char *words;
  } cases[] = {
      {parts_0, NYB_ERROR_SHAPE, "merge.parts is 0; it must be 1 to 65536"},
      {too_many_parts, NYB_ERROR_SHAPE, "merge.parts is 65537"},
      {negative_batch, NYB_ERROR_SHAPE, "merge.batch is -1"},
      {negative_heads, NYB_ERROR_SHAPE, "merge.query_heads is -1"},
      {negative_rows, NYB_ERROR_SHAPE, "merge.query_len is -5"},
      {no_value_dim, NYB_ERROR_SHAPE, "merge.value_dim is 0; it must be 1 to 65536"},
      {long_value_dim, NYB_ERROR_SHAPE, "merge.value_dim is 65537"},
      {small_struct, NYB_ERROR_STRUCT_SIZE, "merge.struct_size is 8"},
      {no_outs, NYB_ERROR_NULL, "merge.outs is NULL"},
      {no_lses, NYB_ERROR_NULL, "merge.lses is NULL"},
      {no_out, NYB_ERROR_NULL, "merge.out.data is NULL"},
      {no_data, NYB_ERROR_NULL, "merge.outs[2].data is NULL"},
      {no_lse_data, NYB_ERROR_NULL, "merge.lses[1].data is NULL"},
      {no_dtype, NYB_ERROR_ENUM, "merge.outs[1].dtype is 0"},
      {no_out_dtype, NYB_ERROR_ENUM, "merge.out.dtype is 7"},
      {half_lse, NYB_ERROR_DTYPE, "merge.lses[2].dtype is 2; it must be NYB_F32"},
      {half_lse_out, NYB_ERROR_DTYPE, "merge.lse.dtype is 3; it must be NYB_F32"},
      {odd_address, NYB_ERROR_ALIGNMENT, "merge.outs[0].data"},
      {stride_0, NYB_ERROR_STRIDE, "axis 1 of merge.out.data has stride 0"},
      {lse_stride_0, NYB_ERROR_STRIDE, "axis 1 of merge.lse.data has stride 0"},
      {vast_stride, NYB_ERROR_STRIDE, "axis 1 of merge.outs[1].data"},
      {over_another_part, NYB_ERROR_OVERLAP, "merge.outs[1].data"},
      {over_the_first_shifted, NYB_ERROR_OVERLAP, "merge.outs[0].data"},
      {over_the_first_otherwise, NYB_ERROR_OVERLAP, "merge.outs[0].data"},
      {over_the_first_as_bf16, NYB_ERROR_OVERLAP, "merge.outs[0].data"},
      {lse_over_the_second, NYB_ERROR_OVERLAP, "merge.lses[1].data"},
      {lse_over_out, NYB_ERROR_OVERLAP, "merge.lse.data"},
      {lse_over_an_out, NYB_ERROR_OVERLAP, "merge.outs[2].data"},
      {out_over_an_lse, NYB_ERROR_OVERLAP, "merge.lses[0].data"},
      {over_the_views, NYB_ERROR_OVERLAP, "overlaps merge.outs from"},
      {lse_over_the_views, NYB_ERROR_OVERLAP, "overlaps merge.lses from"},
  };
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    gathered g = four_rows(), before = four_rows();
    cases[i].make(&g);
    const nyb_status status = nyb_attention_merge_run(context, &g.call, NULL);
    if (status != cases[i].status || strstr(nyb_last_error(), cases[i].words) == NULL) {
      fail_msg("want %s: \"%s\", got %s: %s", nyb_status_name(cases[i].status), cases[i].words,
               nyb_status_name(status), nyb_last_error());
    }
    assert_memory_equal(g.outs, before.outs, 3 * 16 * sizeof(float));
    assert_memory_equal(g.lses, before.lses, 3 * 4 * sizeof(float));
    assert_memory_equal(g.out, before.out, 16 * sizeof(float));
    assert_memory_equal(g.lse, before.lse, 4 * sizeof(float));
    discard(&g);
    discard(&before);
  }
  gathered g = four_rows();
  assert_int_equal(nyb_attention_merge_run(NULL, &g.call, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_merge_run(context, NULL, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_attention_merge_run(context, &g.call, &g), NYB_ERROR_VALUE);
  discard(&g);
  nyb_context_destroy(context);
}

/* Nothing to do is no mistake, and needs no data. */
static void test_no_rows(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  for (int axis = 0; axis < 3; axis++) {
    gathered g = four_rows();
    g.call.out.data = g.call.lse.data = NULL;
    g.out_views[1].data = NULL;
    *(axis == 0 ? &g.call.batch : axis == 1 ? &g.call.query_heads : &g.call.query_len) = 0;
    merge(context, &g.call);
    discard(&g);
  }
  nyb_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_checks),
      cmocka_unit_test(test_splits_have_one_error),
      cmocka_unit_test(test_a_sink_counts_once),
      cmocka_unit_test(test_a_sink_of_attention_counts_once),
      cmocka_unit_test(test_parts_of_a_window),
      cmocka_unit_test(test_parts_with_masks_of_their_own),
      cmocka_unit_test(test_empty_parts_change_no_bit),
      cmocka_unit_test(test_all_empty_is_empty),
      cmocka_unit_test(test_bits_depend_on_nothing_else),
      cmocka_unit_test(test_known_bits),
      cmocka_unit_test(test_most_parts),
      cmocka_unit_test(test_calls_are_counted),
      cmocka_unit_test(test_mistakes_are_refused),
      cmocka_unit_test(test_no_rows),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
