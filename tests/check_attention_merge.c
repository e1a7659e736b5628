/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_attention_merge_run against the oracle, which sums in double as it does: all but the last
 * rounding is fixed within the few units that oracle_merge_row() derives. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "oracle.h"

/* ---- One case ------------------------------------------------------------------------------- */

typedef enum lse_class {
  LSES_NEAR,    /* 8 and a little: pieces of one sequence */
  LSES_EQUAL,   /* all weights 1 */
  LSES_LAST,    /* the last part towers over the others, which weigh nothing or next to it */
  LSES_SPREAD,  /* differences on both sides of where exp underflows */
  LSES_HUGE,    /* +-3e38 */
  LSES_EMPTIES, /* many parts are empty, the first and the last among them where there are three */
  LSES_ONE,     /* all but one are empty */
  LSES_NONE,    /* all are empty */
  LSES_NAN,
  LSES_INFINITE,
  LSES_COUNT
} lse_class;

typedef enum out_class {
  OUTS_NORMAL,
  OUTS_LARGE, /* near the largest of the dtype: sums must not overflow */
  OUTS_SMALL, /* subnormal numbers and zeros of both signs */
  OUTS_NAN,   /* NaN here and there, and in all of the empty parts */
  OUTS_COUNT
} out_class;

static const char *const lse_names[LSES_COUNT] = {"near",    "equal", "last", "spread", "huge",
                                                  "empties", "one",   "none", "NaN",    "infinite"};
static const char *const out_names[OUTS_COUNT] = {"normal", "large", "small", "with NaN"};

typedef struct merge_case {
  lse_class lse_class;
  out_class out_class;
  int64_t parts, batch, heads, rows, dim;
  nyb_dtype dtypes[2]; /* of the parts, by turns */
  nyb_dtype out_dtype;
  bool swapped; /* [batch, rows, heads, dim] in memory instead of [batch, heads, rows, dim] */
  int64_t gap;
  bool in_place; /* out is outs[0], lse lses[0] */
  bool without_lse;
} merge_case;

typedef struct merge_scene {
  merge_case c;
  check_buffer outs, lses, out, lse; /* all parts in one buffer each, as a gather leaves them */
  nyb_input *out_views, *lse_views;
  nyb_attention_merge call;
} merge_scene;

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

static void describe(const merge_case *c, char *text, size_t size) {
  snprintf(
      text, size, "lse %s, out %s (%lld parts, %lld x %lld x %lld x %lld, %s and %s to %s%s%s)",
      lse_names[c->lse_class], out_names[c->out_class], (long long)c->parts, (long long)c->batch,
      (long long)c->heads, (long long)c->rows, (long long)c->dim, check_dtype_name(c->dtypes[0]),
      check_dtype_name(c->dtypes[1]), check_dtype_name(c->out_dtype), c->swapped ? ", swapped" : "",
      c->in_place ? ", in place" : "");
}

/* ---- Making it ------------------------------------------------------------------------------ */

static int64_t row_count(const merge_case *c) { return c->batch * c->heads * c->rows; }

static void set_strides(const merge_case *c, int64_t row_elements, int64_t stride[3]) {
  stride[0] = c->heads * c->rows * row_elements;
  stride[1] = c->swapped ? row_elements : c->rows * row_elements;
  stride[2] = c->swapped ? c->heads * row_elements : row_elements;
}

static int64_t offset_of(const merge_case *c, const int64_t stride[3], int64_t i) {
  return i / c->rows / c->heads * stride[0] + i / c->rows % c->heads * stride[1] +
         i % c->rows * stride[2];
}

static double lse_of(const merge_case *c, int64_t part, check_random *random) {
  const double normal = check_random_normal(random);
  const double empty = -(double)INFINITY;
  const int64_t chosen = c->parts / 2;
  switch (c->lse_class) {
    case LSES_NEAR: return 8 + normal;
    case LSES_EQUAL: return -3.25;
    case LSES_LAST: return part == c->parts - 1 ? 90 : normal;
    case LSES_SPREAD: return 400 * normal;
    case LSES_HUGE: return (double)(float)(part % 2 == 0 ? 3e38 : -3e38);
    case LSES_EMPTIES: return part % 3 == 1 || (c->parts == 3 && part == 0) ? normal : empty;
    case LSES_ONE: return part == chosen ? 700 * normal : empty;
    case LSES_NONE: return empty;
    case LSES_NAN: return part == chosen ? (double)NAN : normal;
    case LSES_INFINITE: return part == chosen ? (double)INFINITY : normal;
    case LSES_COUNT: break;
  }
  return (double)NAN;
}

static double out_of(const merge_case *c, nyb_dtype dtype, double lse, check_random *random) {
  const double normal = check_random_normal(random);
  const int64_t turn = check_random_below(random, 64);
  const bool half = dtype == NYB_F16;
  switch (c->out_class) {
    case OUTS_NORMAL: break;
    case OUTS_LARGE: return (half ? 65000 : 3.3e38) * (turn % 2 == 0 ? 1 : -1);
    case OUTS_SMALL:
      return turn < 8 ? (turn % 2 == 0 ? 0.0 : -0.0) : (half ? 1e-7 : 1e-42) * normal;
    case OUTS_NAN: return turn == 0 || isinf(lse) ? (double)NAN : normal;
    case OUTS_COUNT: break;
  }
  return normal;
}

static void fill_part(merge_scene *scene, int64_t part, check_random *random) {
  const merge_case *c = &scene->c;
  const nyb_input *out = &scene->out_views[part], *lse = &scene->lse_views[part];
  for (int64_t i = 0; i < row_count(c); i++) {
    const double value = lse_of(c, part, random);
    oracle_store((void *)(uintptr_t)lse->data, NYB_F32, offset_of(c, lse->stride, i), value);
    for (int64_t d = 0; d < c->dim; d++) {
      oracle_store((void *)(uintptr_t)out->data, out->dtype, offset_of(c, out->stride, i) + d,
                   out_of(c, out->dtype, value, random));
    }
  }
}

static void free_scene(merge_scene *scene) {
  check_buffer_free(&scene->outs);
  check_buffer_free(&scene->lses);
  check_buffer_free(&scene->out);
  check_buffer_free(&scene->lse);
  free(scene->out_views);
  free(scene->lse_views);
}

static void make_views(merge_scene *scene) {
  const merge_case *c = &scene->c;
  const int64_t out_row = c->dim + c->gap, lse_row = 1 + c->gap, rows = row_count(c);
  for (int64_t part = 0; part < c->parts; part++) {
    nyb_input *out = &scene->out_views[part], *lse = &scene->lse_views[part];
    *out = (nyb_input){.data = (uint8_t *)scene->outs.data + part * rows * out_row * 4,
                       .dtype = c->dtypes[part % 2]};
    *lse = (nyb_input){.data = (float *)scene->lses.data + part * rows * lse_row, .dtype = NYB_F32};
    set_strides(c, out_row, out->stride);
    set_strides(c, lse_row, lse->stride);
  }
  nyb_attention_merge *call = &scene->call;
  *call = (nyb_attention_merge){.struct_size = sizeof *call,
                                .parts = c->parts,
                                .batch = c->batch,
                                .query_heads = c->heads,
                                .query_len = c->rows,
                                .value_dim = c->dim,
                                .outs = scene->out_views,
                                .lses = scene->lse_views};
  call->out = (nyb_output){.data = c->in_place ? scene->outs.data : scene->out.data,
                           .dtype = c->in_place ? c->dtypes[0] : c->out_dtype};
  call->lse =
      (nyb_output){.data = c->in_place ? scene->lses.data : scene->lse.data, .dtype = NYB_F32};
  set_strides(c, out_row, call->out.stride);
  set_strides(c, lse_row, call->lse.stride);
  if (c->without_lse) call->lse.data = NULL;
}

static bool make_scene(merge_scene *scene, const merge_case *c, check_random *random) {
  *scene = (merge_scene){.c = *c};
  const int64_t out_bytes = row_count(c) * (c->dim + c->gap) * 4;
  const int64_t lse_bytes = row_count(c) * (1 + c->gap) * 4;
  scene->out_views = calloc((size_t)c->parts, sizeof *scene->out_views);
  scene->lse_views = calloc((size_t)c->parts, sizeof *scene->lse_views);
  if (scene->out_views == NULL || scene->lse_views == NULL ||
      !check_buffer_make(&scene->outs, c->parts * out_bytes) ||
      !check_buffer_make(&scene->lses, c->parts * lse_bytes) ||
      !check_buffer_make(&scene->out, out_bytes) || !check_buffer_make(&scene->lse, lse_bytes)) {
    free_scene(scene);
    return false;
  }
  make_views(scene);
  for (int64_t part = 0; part < c->parts; part++) fill_part(scene, part, random);
  check_buffer_seal(&scene->outs);
  check_buffer_seal(&scene->lses);
  check_buffer_seal(&scene->out);
  check_buffer_seal(&scene->lse);
  return true;
}

/* ---- What it should be ---------------------------------------------------------------------- */

typedef struct merge_expected {
  double *out, *out_error; /* [rows, dim] */
  double *lse, *lse_error; /* [rows] */
} merge_expected;

static void free_expected(merge_expected *e) {
  free(e->out);
  free(e->out_error);
  free(e->lse);
  free(e->lse_error);
}

static void expect_row(const merge_scene *scene, int64_t i, double *lses, double *weights,
                       double *elements, const double **outs, const merge_expected *e) {
  const merge_case *c = &scene->c;
  for (int64_t part = 0; part < c->parts; part++) {
    const nyb_input *out = &scene->out_views[part], *lse = &scene->lse_views[part];
    lses[part] = oracle_load(lse->data, NYB_F32, offset_of(c, lse->stride, i));
    outs[part] = elements + part * c->dim;
    for (int64_t d = 0; d < c->dim; d++) {
      elements[part * c->dim + d] =
          oracle_load(out->data, out->dtype, offset_of(c, out->stride, i) + d);
    }
  }
  oracle_result result = {.out = e->out + i * c->dim, .out_error = e->out_error + i * c->dim};
  oracle_merge_row(lses, outs, c->parts, c->dim, scene->call.out.dtype, weights, &result);
  e->lse[i] = result.lse;
  e->lse_error[i] = result.lse_error;
}

static bool expect(const merge_scene *scene, merge_expected *e) {
  const merge_case *c = &scene->c;
  const size_t rows = (size_t)row_count(c), dim = (size_t)c->dim, parts = (size_t)c->parts;
  *e = (merge_expected){.out = calloc(rows * dim, sizeof(double)),
                        .out_error = calloc(rows * dim, sizeof(double)),
                        .lse = calloc(rows, sizeof(double)),
                        .lse_error = calloc(rows, sizeof(double))};
  double *lses = calloc(2 * parts, sizeof(double));
  double *elements = calloc(parts * dim, sizeof(double));
  const double **outs = calloc(parts, sizeof *outs);
  const bool good = e->out != NULL && e->out_error != NULL && e->lse != NULL &&
                    e->lse_error != NULL && lses != NULL && elements != NULL && outs != NULL;
  for (int64_t i = 0; i < row_count(c) && good; i++) {
    expect_row(scene, i, lses, lses + parts, elements, outs, e);
  }
  free(lses);
  free(elements);
  free(outs);
  if (!good) free_expected(e);
  return good;
}

/* ---- Running and comparing ------------------------------------------------------------------ */

/* A NaN has one bit pattern, the positive quiet one. Notes the error, of which the output's own
 * rounding is half a unit in the last place. */
static bool is_expected(check_tally *tally, nyb_dtype dtype, uint32_t bits, double want,
                        double error) {
  static const double half_unit[] = {[NYB_F32] = 0x1p-24, [NYB_F16] = 0x1p-11, [NYB_BF16] = 0x1p-8};
  static const double least[] = {[NYB_F32] = 0x1p-150, [NYB_F16] = 0x1p-25, [NYB_BF16] = 0x1p-134};
  if (isnan(want)) return bits == oracle_encode(dtype, (double)NAN);
  const double got = oracle_decode(dtype, bits);
  if (isfinite(want) && isfinite(got)) {
    const double own = fmax(half_unit[dtype] * fabs(want), least[dtype]);
    check_note_error(tally, fabs(got - want), own + error);
  }
  return oracle_within(dtype, got, want, error);
}

static bool compare_row(check_run *run, check_tally *tally, const merge_scene *scene, int64_t i,
                        const merge_expected *e) {
  const merge_case *c = &scene->c;
  const nyb_output *out = &scene->call.out, *lse = &scene->call.lse;
  char text[200];
  describe(c, text, sizeof text);
  if (lse->data != NULL) {
    const uint32_t bits = oracle_load_bits(lse->data, NYB_F32, offset_of(c, lse->stride, i));
    const double got = oracle_decode(NYB_F32, bits);
    if (!is_expected(tally, NYB_F32, bits, e->lse[i], e->lse_error[i])) {
      check_fail(run, tally, "lse of row %lld: got %.9g, want %.9g +- %.3g: %s", (long long)i, got,
                 e->lse[i], e->lse_error[i], text);
      return false;
    }
  }
  for (int64_t d = 0; d < c->dim; d++) {
    const uint32_t bits = oracle_load_bits(out->data, out->dtype, offset_of(c, out->stride, i) + d);
    const double want = e->out[i * c->dim + d], error = e->out_error[i * c->dim + d];
    const double got = oracle_decode(out->dtype, bits);
    if (is_expected(tally, out->dtype, bits, want, error)) continue;
    check_fail(run, tally, "out of row %lld element %lld: got %.9g, want %.9g +- %.3g: %s",
               (long long)i, (long long)d, got, want, error, text);
    return false;
  }
  return true;
}

/* All but the outputs' own elements must be as it was. */
static bool compare_rest(check_run *run, check_tally *tally, merge_scene *scene) {
  const merge_case *c = &scene->c;
  const nyb_output *out = &scene->call.out, *lse = &scene->call.lse;
  for (int64_t i = 0; i < row_count(c); i++) {
    check_buffer_restore(c->in_place ? &scene->outs : &scene->out,
                         offset_of(c, out->stride, i) * bytes_of(out->dtype),
                         c->dim * bytes_of(out->dtype));
    if (lse->data == NULL) continue;
    check_buffer_restore(c->in_place ? &scene->lses : &scene->lse, offset_of(c, lse->stride, i) * 4,
                         4);
  }
  const check_buffer *const buffers[] = {&scene->outs, &scene->lses, &scene->out, &scene->lse};
  static const char *const names[] = {"outs", "lses", "out", "lse"};
  for (int i = 0; i < 4; i++) {
    const int64_t at = check_buffer_changed(buffers[i]);
    if (at == CHECK_UNCHANGED) continue;
    char text[200];
    describe(c, text, sizeof text);
    check_fail(run, tally, "byte %lld of %s's buffer was written and is no output: %s",
               (long long)at, names[i], text);
    return false;
  }
  return true;
}

static void run_scene(check_run *run, check_tally *tally, merge_scene *scene,
                      const merge_expected *e) {
  char text[200];
  describe(&scene->c, text, sizeof text);
  const int64_t before = check_calls(run, tally);
  const nyb_status status =
      run->options.library->merge(run->contexts[tally->kernel.isa], &scene->call, NULL);
  if (status != NYB_OK) {
    check_fail(run, tally, "got %s: %s: %s", nyb_status_name(status), check_error(), text);
    return;
  }
  for (int64_t i = 0; i < row_count(&scene->c); i++) {
    if (!compare_row(run, tally, scene, i, e)) return;
  }
  if (!compare_rest(run, tally, scene)) return;
  if (check_calls(run, tally) == before) {
    check_fail(run, tally, "the call was not counted: %s", text);
    return;
  }
  check_pass(tally);
}

static void check_case(check_run *run, check_tally *tally, const merge_case *c,
                       check_random *random) {
  merge_scene scene;
  merge_expected expected;
  if (run->ended || !make_scene(&scene, c, random)) return;
  if (expect(&scene, &expected)) {
    run_scene(run, tally, &scene, &expected);
    free_expected(&expected);
  }
  free_scene(&scene);
}

/* ---- The cases ------------------------------------------------------------------------------ */

/* What does not multiply with the classes takes turns, with periods that have no common factor. */
static merge_case case_at(int64_t turn) {
  static const int64_t parts[] = {1, 2, 3, 4, 7, 16, 31, 33, 48, 100};
  static const int64_t dims[] = {1, 2, 3, 7, 16, 33, 64, 128, 255, 256, 257, 513, 600};
  enum { PARTS = sizeof parts / sizeof parts[0], DIMS = sizeof dims / sizeof dims[0] };
  merge_case c = {.lse_class = (lse_class)(turn % LSES_COUNT),
                  .out_class = (out_class)(turn / LSES_COUNT % OUTS_COUNT)};
  const int64_t round = turn / LSES_COUNT;
  c.parts = parts[(round + turn) % PARTS];
  c.dim = dims[round % DIMS];
  c.batch = 1 + round % 2;
  c.heads = 1 + round % 3;
  c.rows = 1 + round % 5;
  c.dtypes[0] = (nyb_dtype)(NYB_F32 + round % 3);
  c.dtypes[1] = (nyb_dtype)(NYB_F32 + round / 2 % 3);
  c.out_dtype = (nyb_dtype)(NYB_F32 + round / 4 % 3);
  c.swapped = round % 7 > 3;
  c.gap = round % 4 == 1 ? 3 : 0;
  c.in_place = round % 11 > 7;
  c.without_lse = round % 11 == 3;
  return c;
}

void check_attention_merge(check_run *run) {
  const bool on_gpu = run->options.backend == NYB_BACKEND_CUDA;
  check_tally *tally =
      check_find(run, "attention_merge", "", on_gpu ? NYB_ISA_CUDA : NYB_ISA_SCALAR);
  if (tally == NULL) return;
  if (run->options.library->merge == NULL) {
    tally->skipped = 1;
    tally->skip_reason = "the library that is checked has no merge";
    return;
  }
  check_random random = {.state = 5};
  const int rounds = run->options.sanitizer ? 1 : run->options.quick ? 3 : 30;
  const int64_t turns = LSES_COUNT * OUTS_COUNT * rounds;
  for (int64_t turn = 0; turn < turns; turn++) {
    if (turn % 100 == 0) check_step(run, "attention_merge", turn, turns);
    const merge_case c = case_at(turn);
    check_case(run, tally, &c, &random);
  }
  /* Enough for several tasks. */
  merge_case large = {.parts = 5, .batch = 3, .heads = 8, .rows = 9, .dim = 512};
  large.dtypes[0] = large.dtypes[1] = large.out_dtype = NYB_F32;
  check_case(run, tally, &large, &random);
  check_step(run, "attention_merge", turns, turns);
}
