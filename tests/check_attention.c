/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: every kernel of every ISA, and the compat path, against the oracle, whose tolerances
 * are derived element by element in oracle_attention.c. A case runs one kernel for the queries, the
 * scores, the softmax, the values and their columns each: a wrong lse counts against the scores, a
 * wrong output beside a right lse against the values. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_attention.h"
#include "check_stage.h"

/* ---- Formats ------------------------------------------------------------------------------ */

bool choose_format(int i, int64_t dim, int64_t salt, nyb_format *format) {
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  if (i < PLAIN_FORMATS) {
    *format = (nyb_format){.scheme = NYB_PLAIN, .dtype = (nyb_dtype)(NYB_F32 + i)};
    return true;
  }
  *format = (nyb_format){.scheme = NYB_AFFINE,
                         .bits = widths[i - PLAIN_FORMATS],
                         .group_size = 32 << salt % 3,
                         .dtype = (nyb_dtype)(NYB_F32 + salt / 3 % 3)};
  while (format->group_size > 32 && dim % format->group_size != 0) {
    format->group_size /= 2;
  }
  return dim % format->group_size == 0;
}

/* ---- One case on every ISA ---------------------------------------------------------------- */

static bool find_cpu_kernels(check_run *run, const attention_shape *s, nyb_isa isa,
                             kernel_set *set) {
  char key[16], value[16];
  check_format_name(&s->key_format, key);
  check_format_name(&s->value_format, value);
  *set = (kernel_set){.tallies = {check_find(run, "attention_queries", key, isa),
                                  check_find(run, "attention_softmax", "plain_f32", isa),
                                  check_find(run, "attention_scores", key, isa),
                                  check_find(run, "attention_values", value, isa),
                                  check_find(run, "attention_columns", value, isa)},
                      .count = 5,
                      .scores = 2,
                      .values = 3};
  if (s->mask_array.kind != 0 || s->softcap != 0 || s->slopes) {
    set->tallies[5] = set->tallies[4];
    set->tallies[4] = set->tallies[3];
    set->tallies[3] = check_find(run, "attention_bias", "plain_f32", isa);
    set->scores = 3;
    set->values = 4;
    set->count = 6;
  }
  for (int i = 0; i < set->count; i++) {
    if (set->tallies[i] == NULL) return false;
  }
  return true;
}

/* What the plan names; the compat path as a whole. */
static bool find_cuda_kernels(check_run *run, const attention_scene *scene, nyb_path path,
                              kernel_set *set) {
  nyb_context *context = run->contexts[NYB_ISA_CUDA];
  nyb_attention call = scene->call;
  nyb_plan plan = NYB_PLAN_INIT;
  call.path = path;
  check_stage_pretend(&call);
  *set = (kernel_set){.arithmetic = ORACLE_CUDA_F32, .key_kernel = ""};
  if (context == NULL) return false;
  check_tally *found[2] = {NULL, NULL};
  if (path == NYB_PATH_COMPAT) {
    found[0] = check_find(run, "attention_compat", "", NYB_ISA_CUDA);
  } else {
    const nyb_status status = nyb_attention_plan(context, &call, &plan);
    if (status != NYB_OK) {
      char what[256];
      scene_describe(scene, what, sizeof what);
      check_fail_cuda(run, "attention_", "%s: no plan: %s", what, nyb_last_error());
      return false;
    }
    set->key_kernel = plan.key_kernel;
    found[0] = check_find_name(run, plan.key_kernel);
    found[1] = check_find_name(run, plan.value_kernel);
    if (strncmp(plan.key_kernel, "attention_general", 17) != 0) {
      set->arithmetic = strncmp(plan.key_kernel, "attention_prefill", 17) == 0
                            ? ORACLE_CUDA_TILES
                            : ORACLE_CUDA_WEIGHTS;
    }
  }
  for (int i = 0; i < 2; i++) {
    if (found[i] == NULL || (i == 1 && found[1] == found[0])) continue;
    if (i == 1) set->values = set->count;
    set->tallies[set->count++] = found[i];
  }
  return set->count > 0;
}

bool find_kernels(check_run *run, const attention_scene *scene, nyb_isa isa, nyb_path path,
                  kernel_set *set) {
  const bool found = isa == NYB_ISA_CUDA ? find_cuda_kernels(run, scene, path, set)
                                         : find_cpu_kernels(run, &scene->shape, isa, set);
  for (int i = 0; i < set->count && found; i++) {
    set->calls[i] = check_calls(run, set->tallies[i]);
  }
  return found;
}

bool is_decode(const kernel_set *set) {
  return set->key_kernel != NULL && strncmp(set->key_kernel, "attention_decode", 16) == 0;
}

static void count_feature(check_run *run, const char *feature, const char *end, nyb_isa isa,
                          bool good, const char *what, const char *text) {
  char name[40];
  snprintf(name, sizeof name, "%s%s", feature, end);
  check_tally *tally = check_find(run, name, "", isa);
  if (tally == NULL) return;
  if (good) {
    check_pass(tally);
  } else {
    check_fail(run, tally, "%s: %s", what, text);
  }
}

/* What a scene asks for beside a rectangle: tallies of its own, of one case each. */
static void count_features(check_run *run, const attention_shape *s, nyb_isa isa, nyb_path path,
                           bool decodes, bool good, const char *what, const char *text) {
  const struct {
    const char *name;
    bool is_set;
  } features[] = {
      {"attention_top_left", s->mask == NYB_MASK_CAUSAL_TOP_LEFT},
      {"attention_window", s->window_tokens != 0},
      {"attention_mask_bool", s->mask_array.kind == NYB_MASK_ARRAY_BOOL},
      {"attention_mask_add", s->mask_array.kind == NYB_MASK_ARRAY_ADD},
      {"attention_sinks", s->sinks},
      {"attention_softcap", s->softcap != 0},
      {"attention_alibi", s->slopes},
  };
  for (size_t i = 0; i < sizeof features / sizeof features[0]; i++) {
    if (!features[i].is_set) continue;
    count_feature(run, features[i].name, path == NYB_PATH_COMPAT ? "_compat" : "", isa, good, what,
                  text);
    if (decodes) count_feature(run, features[i].name, "_decode", isa, good, what, text);
  }
}

static void pass_kernels(check_run *run, const kernel_set *set, scene_fault fault,
                         const char *what) {
  for (int i = 0; i < set->count; i++) {
    if (check_calls(run, set->tallies[i]) == set->calls[i]) {
      check_fail(run, set->tallies[i], "%s: another kernel ran instead", what);
    } else if (fault == SCENE_GOOD || (fault == SCENE_BAD_OUT && i < set->values)) {
      check_pass(set->tallies[i]);
    }
  }
}

void run_path(check_run *run, attention_scene *scene, nyb_isa isa, nyb_path path, kernel_set *set,
              const scene_expected *expected, const char *what) {
  char text[256];
  double worst;
  const nyb_status status = scene_run(scene, run->options.library, run->contexts[isa], path);
  if (status != NYB_OK) {
    check_fail(run, set->tallies[set->scores], "%s: got %s: %s", what, nyb_status_name(status),
               check_error());
    return;
  }
  const scene_fault fault = scene_compare(scene, expected, &worst, text, sizeof text);
  check_tally *blamed = set->tallies[fault == SCENE_BAD_OUT ? set->values : set->scores];
  if (fault != SCENE_GOOD) check_fail(run, blamed, "%s: %s", what, text);
  count_features(run, &scene->shape, isa, path, is_decode(set), fault == SCENE_GOOD, what, text);
  pass_kernels(run, set, fault, what);
  for (int i = 0; i < set->count; i++) {
    /* a score that is rounded the other way takes all of its bound */
    if (scene->shape.rounding == NYB_ROUNDING_EXACT) check_note_error(set->tallies[i], worst, 1);
  }
}

static void run_compat(check_run *run, attention_scene *scene, const char *what) {
  check_tally *tally = check_find(run, "attention_compat", "", NYB_ISA_SCALAR);
  kernel_set set = {.tallies = {tally}, .count = 1};
  scene_expected expected;
  if (tally == NULL || !scene_expect(scene, NYB_PATH_COMPAT, ORACLE_CPU, &expected)) return;
  set.calls[0] = check_calls(run, tally);
  run_path(run, scene, NYB_ISA_SCALAR, NYB_PATH_COMPAT, &set, &expected, what);
  scene_expected_free(&expected);
}

/* Work of the spelled-out path, in products; it is slow, and long cases teach nothing new on it. */
static int64_t products_of(const attention_shape *s) {
  int64_t products = 0;
  for (int64_t b = 0; b < s->batch; b++) {
    products += s->lengths[b] * s->query_heads * s->query_len * (s->key_dim + s->value_dim);
  }
  return products;
}

static void run_on_gpu(check_run *run, attention_scene *scene, nyb_path path, const char *what) {
  kernel_set set;
  scene_expected expected;
  if (!find_kernels(run, scene, NYB_ISA_CUDA, path, &set) ||
      !scene_expect(scene, path, set.arithmetic, &expected)) {
    return;
  }
  run_path(run, scene, NYB_ISA_CUDA, path, &set, &expected, what);
  scene_expected_free(&expected);
}

static void check_scene_on_gpu(check_run *run, const attention_shape *shape) {
  attention_scene scene;
  char what[256];
  if (!scene_make(&scene, shape)) return;
  check_stage_place(STAGE_AS_ON_HOST);
  scene_describe(&scene, what, sizeof what);
  run_on_gpu(run, &scene, NYB_PATH_FUSED, what);
  if (products_of(shape) < 1000000) run_on_gpu(run, &scene, NYB_PATH_COMPAT, what);
  scene_free(&scene);
}

static void check_scene(check_run *run, const attention_shape *shape) {
  attention_scene scene;
  scene_expected expected;
  char what[256];
  if (run->ended) return;
  if (run->options.backend == NYB_BACKEND_CUDA) {
    check_scene_on_gpu(run, shape);
    return;
  }
  if (!scene_make(&scene, shape)) return;
  scene_describe(&scene, what, sizeof what);
  if (scene_expect(&scene, NYB_PATH_FUSED, ORACLE_CPU, &expected)) {
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      kernel_set set;
      if (!find_kernels(run, &scene, isa, NYB_PATH_FUSED, &set)) continue;
      run_path(run, &scene, isa, NYB_PATH_FUSED, &set, &expected, what);
    }
    scene_expected_free(&expected);
  }
  if (products_of(shape) < 1000000) run_compat(run, &scene, what);
  scene_free(&scene);
}

/* ---- Choosing the rest of a case ------------------------------------------------------------ */

/* A walk over the cases of one key format. */
typedef struct walk {
  check_run *run;
  int format;    /* of the keys or of the values, by turns */
  int64_t index; /* of the case */
} walk;

void settle_for_gpu(attention_shape *shape) {
  nyb_format *format = &shape->key_format;
  if (format->scheme == NYB_AFFINE) {
    format->group_size = 32;
    format->dtype = NYB_BF16;
  }
  shape->key_dim = shape->value_dim = 64;
  shape->value_format = *format;
}

/* What a case leaves open, formats, dtypes, rounding and layout, rotates from case to case; a quick
 * run takes a quarter of the cases, another quarter for each format. */
static void check_case(walk *w, attention_shape shape) {
  const int64_t index = w->index++;
  if (w->run->options.quick && (index + w->format) % 4 != 0) return;
  if (w->run->options.sanitizer && index % 16 != w->format) return;
  check_random random = {.state = (uint64_t)(index * FORMATS + w->format)};
  shape.seed = check_random_bits(&random);
  if (shape.capacity_tokens == 0) {
    for (int64_t b = 0; b < shape.batch; b++) {
      const int64_t room = shape.lengths[b] + check_random_below(&random, 3);
      if (room > shape.capacity_tokens) shape.capacity_tokens = room;
    }
  }
  const bool keys_first = check_random_below(&random, 2) == 0;
  const bool pure = index % 3 == 0 || w->run->options.format != NULL;
  const int other = pure ? w->format : (int)check_random_below(&random, FORMATS);
  const int64_t key_salt = check_random_below(&random, 9);
  const int64_t value_salt = check_random_below(&random, 9);
  const bool fits =
      choose_format(keys_first ? w->format : other, shape.key_dim, key_salt, &shape.key_format) &&
      choose_format(keys_first ? other : w->format, shape.value_dim, value_salt,
                    &shape.value_format);
  if (w->run->options.backend == NYB_BACKEND_CUDA) settle_for_gpu(&shape);
  if (shape.query_dtype == 0) {
    shape.query_dtype = (nyb_dtype)(NYB_F32 + check_random_below(&random, 3));
  }
  if (shape.out_dtype == 0) {
    shape.out_dtype = (nyb_dtype)(NYB_F32 + check_random_below(&random, 3));
  }
  shape.rounding = check_random_below(&random, 2) == 0 ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX;
  shape.swapped = check_random_below(&random, 2) == 0;
  shape.gap = check_random_below(&random, 3);
  shape.without_lse = check_random_below(&random, 8) == 0;
  if (shape.overflow.first < shape.overflow.end && shape.key_format.dtype == NYB_F16) {
    shape.query_dtype = NYB_F16; /* its scores overflow only there */
    shape.rounding = NYB_ROUNDING_MLX;
  }
  if (fits) check_scene(w->run, &shape);
}

/* ---- The cases ---------------------------------------------------------------------------- */

attention_shape decode_shape(const char *name, int64_t query_heads, int64_t kv_heads, int64_t dim,
                             int32_t length) {
  return (attention_shape){.name = name,
                           .batch = 1,
                           .query_heads = query_heads,
                           .kv_heads = kv_heads,
                           .query_len = 1,
                           .key_dim = dim,
                           .value_dim = dim,
                           .lengths = {length}};
}

/* Nothing, one, and one less and more than whole tiles and chunks. */
static void check_lengths(walk *w) {
  static const int32_t lengths[] = {0,    1,    2,    15,   16,   17,   31,   32,   33,  47,  63,
                                    64,   65,   127,  128,  129,  191,  192,  193,  255, 256, 257,
                                    1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    check_case(w, decode_shape("length", 2, 1, 64, lengths[i]));
    check_case(w, decode_shape("length", 3, 1, 32, lengths[i]));
  }
}

static void check_dims(walk *w) {
  static const int64_t dims[] = {32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 576};
  static const int64_t odd_dims[] = {1, 2, 3, 7, 15, 17, 33, 46, 80, 100, 127, 129};
  static const int64_t pairs[][2] = {{576, 512}, {192, 128}, {64, 96}, {128, 32},
                                     {96, 256},  {32, 160},  {512, 64}};
  for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
    check_case(w, decode_shape("head size", 2, 1, dims[i], 75));
    check_case(w, decode_shape("head size", 5, 1, dims[i], 130));
  }
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    attention_shape shape = decode_shape("K and V of different sizes", 4, 2, pairs[i][0], 100);
    shape.value_dim = pairs[i][1];
    check_case(w, shape);
    check_case(w, shape);
  }
  for (size_t i = 0; i < sizeof odd_dims / sizeof odd_dims[0]; i++) { /* plain formats only */
    check_case(w, decode_shape("odd head size", 2, 1, odd_dims[i], 70));
    check_case(w, decode_shape("odd head size", 2, 1, odd_dims[i], 70));
  }
}

static void check_ratios(walk *w) {
  static const int64_t heads[][2] = {{1, 1},  {3, 1},  {5, 1},  {6, 1},  {7, 1},  {8, 1},
                                     {16, 1}, {24, 1}, {32, 1}, {33, 1}, {71, 1}, {28, 4},
                                     {40, 8}, {24, 4}, {9, 3},  {5, 5}};
  for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
    check_case(w, decode_shape("heads", heads[i][0], heads[i][1], 64, 131));
    check_case(w, decode_shape("heads", heads[i][0], heads[i][1], 32, 66));
  }
}

static void check_query_lengths(walk *w) {
  static const int64_t query_lengths[] = {2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12,
                                          13, 14, 15, 16, 17, 31, 33, 64, 65, 130};
  for (size_t i = 0; i < sizeof query_lengths / sizeof query_lengths[0]; i++) {
    attention_shape shape = decode_shape("query rows", 4, 2, 64, 133);
    shape.query_len = query_lengths[i];
    shape.mask = NYB_MASK_CAUSAL;
    check_case(w, shape);
    shape.mask = NYB_MASK_NONE;
    check_case(w, shape);
    shape.mask = NYB_MASK_CAUSAL; /* the first rows see nothing */
    shape.lengths[0] = (int32_t)(query_lengths[i] / 2);
    check_case(w, shape);
  }
  attention_shape shape = decode_shape("prefill over a chunk's end", 2, 1, 32, 1100);
  shape.query_len = 100;
  shape.mask = NYB_MASK_CAUSAL;
  check_case(w, shape);
}

static void check_batches(walk *w) {
  attention_shape shape = decode_shape("batch of four lengths", 4, 2, 64, 0);
  const int32_t lengths[] = {0, 1, 65, 300};
  shape.batch = 4;
  memcpy(shape.lengths, lengths, sizeof lengths);
  check_case(w, shape);
  check_case(w, shape);
  shape.query_len = 5;
  shape.mask = NYB_MASK_CAUSAL;
  check_case(w, shape);
  shape.capacity_tokens = 512;
  check_case(w, shape);
  /* Field case 27: both sequences long enough to be split. */
  attention_shape two = decode_shape("batch of two long ones", 2, 1, 32, 2100);
  two.batch = 2;
  two.lengths[1] = 1024;
  check_case(w, two);
  /* Field case 34: each fill of the last tile. */
  attention_shape fills = decode_shape("every fill of the last tile", 1, 1, 32, 0);
  fills.batch = SCENE_MAX_BATCH;
  for (int32_t r = 0; r < SCENE_MAX_BATCH; r++) fills.lengths[r] = 256 + r;
  check_case(w, fills);
  check_case(w, fills);
}

/* Every kind of keys with the queries that bring it out, and every kind of values. */
static void check_data(walk *w) {
  static const struct {
    const char *name;
    row_class keys;
    query_class queries;
  } kinds[] = {
      {"zero keys", ROWS_ZERO, QUERIES_NORMAL},
      {"zero queries", ROWS_NORMAL, QUERIES_ZERO},
      {"equal scores", ROWS_EQUAL, QUERIES_NORMAL},
      {"one dominant score", ROWS_DOMINANT, QUERIES_ALIGNED},
      {"huge scores", ROWS_LARGE, QUERIES_LARGE},
      {"outlier channel", ROWS_OUTLIER, QUERIES_NORMAL},
      {"outlier in the query", ROWS_NORMAL, QUERIES_OUTLIER},
      {"minute queries, vast keys", ROWS_VAST, QUERIES_MINUTE},
      {"queries between steps", ROWS_NORMAL, QUERIES_HALF_STEPS},
      {"constant groups", ROWS_CONSTANT, QUERIES_NORMAL},
      {"keys far from zero", ROWS_OFFSET, QUERIES_TINY},
      {"ramp of +-60,000", ROWS_WIDE, QUERIES_TINY},
      {"subnormal keys", ROWS_SUBNORMAL, QUERIES_NORMAL},
      {"subnormal queries", ROWS_NORMAL, QUERIES_SUBNORMAL},
      {"raw codes, scales of both signs", ROWS_RAW, QUERIES_NORMAL},
      {"codes all 0", ROWS_ALL_ZERO_CODES, QUERIES_NORMAL},
      {"codes all largest", ROWS_ALL_MAX_CODES, QUERIES_NORMAL},
      {"codes 7i", ROWS_SEVENTHS, QUERIES_NORMAL},
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    for (int variant = 0; variant < 4; variant++) {
      attention_shape shape =
          decode_shape(kinds[i].name, 4, 2, variant % 2 == 0 ? 128 : 64, variant < 2 ? 130 : 1030);
      shape.keys = kinds[i].keys;
      shape.queries = kinds[i].queries;
      if (shape.queries == QUERIES_HALF_STEPS || shape.queries == QUERIES_MINUTE) {
        shape.query_dtype = variant < 2 ? NYB_F32 : NYB_BF16;
      }
      check_case(w, shape);
    }
  }
  for (int values = 0; values < ROWS_COUNT; values++) {
    attention_shape shape = decode_shape("kind of values", 4, 2, 64, 150);
    shape.values = (row_class)values;
    check_case(w, shape);
    check_case(w, shape);
  }
  /* Field case 26: the last token of an odd number carries the row. */
  attention_shape last = decode_shape("last of 1,000 dominant", 2, 1, 64, 1000);
  last.keys = ROWS_DOMINANT;
  last.queries = QUERIES_ALIGNED;
  check_case(w, last);
}

/* Field cases 7 and 12: one token, a one-hot query for each element: lse is the key's element and
 * out the value's row. */
static void check_one_hot(walk *w) {
  static const int64_t dims[] = {32, 64, 96, 128, 192, 256, 512};
  for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
    attention_shape shape = decode_shape("one-hot queries", 1, 1, dims[i], 1);
    shape.query_len = dims[i];
    shape.scale = 1;
    shape.keys = i % 2 == 0 ? ROWS_SEVENTHS : ROWS_RAW;
    shape.queries = QUERIES_IDENTITY;
    shape.values = ROWS_RAW;
    check_case(w, shape);
    check_case(w, shape);
  }
}

/* One element that is not finite, wherever attention reads one: in the first tile, the second, the
 * last, in another chunk. */
static void check_poison(walk *w) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  static const char *const names[] = {[POISON_QUERY] = "query not finite",
                                      [POISON_KEY] = "key or scale not finite",
                                      [POISON_KEY_BIAS] = "key or its bias not finite",
                                      [POISON_VALUE] = "value or scale not finite",
                                      [POISON_VALUE_BIAS] = "value or its bias not finite"};
  static const int32_t tokens[] = {0, 70, 129, 1060};
  for (poison_place place = POISON_QUERY; place <= POISON_VALUE_BIAS; place++) {
    for (int i = 0; i < 12; i++) {
      attention_shape shape = decode_shape(names[place], 4, 2, 64, i % 4 == 3 ? 1100 : 130);
      shape.batch = 2;
      shape.lengths[0] = 40;
      shape.lengths[1] = i % 4 == 3 ? 1100 : 130;
      shape.poison = (scene_poison){.place = place,
                                    .value = values[i / 4],
                                    .batch = 1,
                                    .head = 1,
                                    .row = place == POISON_QUERY ? 0 : tokens[i % 4],
                                    .element = 5 * i};
      check_case(w, shape);
    }
  }
}

/* Scores that are all -inf for a while: single ones, tiles, a chunk, the whole row; then +inf. */
static void check_overflow(walk *w) {
  static const struct {
    const char *name;
    int32_t length, first, end;
  } spans[] = {{"-inf in one token", 130, 3, 4},
               {"-inf at first", 130, 0, 1},
               {"-inf through tile 0", 130, 0, 64},
               {"-inf up to tile 1's middle", 200, 0, 100},
               {"-inf through tile 1", 200, 64, 128},
               {"-inf in the last tile", 130, 128, 130},
               {"-inf but at first", 130, 1, 130},
               {"-inf but at last", 130, 0, 129},
               {"-inf throughout", 130, 0, 130},
               {"-inf in the one token", 1, 0, 1},
               {"-inf through chunk 0", 1100, 0, 1024},
               {"-inf through chunk 1", 2100, 1024, 2048},
               {"-inf in the last chunk", 1100, 1024, 1100},
               {"-inf over two chunks", 2100, 0, 2048},
               {"-inf but in one tile of three chunks", 2100, 64, 2100},
               {"-inf throughout two chunks", 1100, 0, 1100}};
  for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++) {
    attention_shape shape = decode_shape(spans[i].name, 4, 2, 64, spans[i].length);
    shape.queries = QUERIES_ALONG;
    shape.overflow = (score_overflow){.first = spans[i].first, .end = spans[i].end};
    check_case(w, shape);
    check_case(w, shape);
    /* A weight of 0 does not make a plausible value of NaN. */
    shape.poison = (scene_poison){.place = i % 2 == 0 ? POISON_VALUE : POISON_VALUE_BIAS,
                                  .value = i % 4 < 2 ? (double)NAN : (double)INFINITY,
                                  .row = (spans[i].first + spans[i].end) / 2,
                                  .element = 33};
    check_case(w, shape);
  }
  attention_shape upwards = decode_shape("+inf in one token", 4, 2, 64, 130);
  upwards.queries = QUERIES_ALONG;
  upwards.overflow = (score_overflow){.first = 70, .end = 71, .upwards = true};
  check_case(w, upwards);
  upwards.name = "+inf in two chunks";
  upwards.lengths[0] = 1100;
  upwards.overflow = (score_overflow){.first = 1000, .end = 1030, .upwards = true};
  check_case(w, upwards);
}

/* ---- What decoders pass besides a rectangle ------------------------------------------------- */

static attention_shape prefill_shape(const char *name, nyb_mask mask, int64_t rows,
                                     int32_t length) {
  attention_shape shape = decode_shape(name, 4, 2, 64, length);
  shape.query_len = rows;
  shape.mask = mask;
  return shape;
}

static void check_top_left(walk *w) {
  static const int32_t sizes[][2] = {{4, 16}, {16, 4}, {33, 33}, {70, 130}, {130, 70}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    check_case(w, prefill_shape("causal from the top left", NYB_MASK_CAUSAL_TOP_LEFT, sizes[i][0],
                                sizes[i][1]));
  }
  attention_shape batch = prefill_shape("top left, a batch", NYB_MASK_CAUSAL_TOP_LEFT, 5, 130);
  batch.batch = 3;
  batch.lengths[1] = 0;
  batch.lengths[2] = 3;
  check_case(w, batch);
}

/* The same with few rows of 16 bits for CUDA's decode kernel, which the cases above reach by
 * chance; four, so that a quick run has one of them for each format. */
static void check_few_from_top_left(walk *w) {
  if (w->run->options.backend != NYB_BACKEND_CUDA) return;
  for (int i = 0; i < 4; i++) {
    attention_shape shape =
        prefill_shape("few rows, causal from the top left", NYB_MASK_CAUSAL_TOP_LEFT, 2 + i, 130);
    shape.query_dtype = shape.out_dtype = i % 2 == 0 ? NYB_BF16 : NYB_F16;
    check_case(w, shape);
  }
}

/* Windows that begin and end at tiles and chunks and amid them, and kept tokens before them: in
 * the window's tile, in one of their own, in chunks of their own. Field case 40 is the last. */
static void check_windows(walk *w) {
  static const struct {
    int32_t length, window, keep;
  } decodes[] = {{130, 1, 0},       {130, 2, 4},    {130, 65, 0},     {130, 66, 3},
                 {130, 67, 64},     {130, 100, 33}, {130, 130, 5},    {130, 1000, 0},
                 {200, 70, 129},    {200, 5, 130},  {60, 20, 10},     {1100, 76, 0},
                 {1100, 77, 1},     {2100, 52, 0},  {2100, 60, 1030}, {2100, 1077, 4},
                 {3000, 100, 1500}, {65, 1, 63},    {64, 64, 64},     {1, 1, 1}};
  for (size_t i = 0; i < sizeof decodes / sizeof decodes[0]; i++) {
    attention_shape shape = decode_shape("window", 4, 2, 64, decodes[i].length);
    shape.window_tokens = decodes[i].window;
    shape.window_keep_tokens = decodes[i].keep;
    check_case(w, shape);
  }
  static const struct {
    nyb_mask mask;
    int32_t rows, length, window, keep;
  } prefills[] = {{NYB_MASK_CAUSAL, 40, 130, 17, 0},
                  {NYB_MASK_CAUSAL, 70, 70, 5, 2},
                  {NYB_MASK_CAUSAL, 33, 20, 4, 1},
                  {NYB_MASK_NONE, 9, 130, 30, 0},
                  {NYB_MASK_NONE, 70, 40, 3, 3},
                  {NYB_MASK_CAUSAL_TOP_LEFT, 90, 70, 9, 2},
                  {NYB_MASK_CAUSAL_TOP_LEFT, 20, 200, 7, 0},
                  {NYB_MASK_CAUSAL, 50, 1100, 333, 5}};
  for (size_t i = 0; i < sizeof prefills / sizeof prefills[0]; i++) {
    attention_shape shape = prefill_shape("window over several rows", prefills[i].mask,
                                          prefills[i].rows, prefills[i].length);
    shape.window_tokens = prefills[i].window;
    shape.window_keep_tokens = prefills[i].keep;
    check_case(w, shape);
  }
}

/* Every class of masks, broadcast over each axis or not. */
static void check_masks(walk *w, nyb_mask_array_kind kind) {
  for (int class = 0; class < MASK_COUNT; class ++) {
    for (int variant = 0; variant < 6; variant++) {
      attention_shape shape =
          prefill_shape("mask", variant % 2 == 0 ? NYB_MASK_NONE : NYB_MASK_CAUSAL,
                        variant < 2   ? 1
                        : variant < 4 ? 9
                                      : 37,
                        variant == 0 ? 1100 : 131);
      shape.batch = 2;
      shape.lengths[1] = 70;
      if (class == MASK_CAUSAL) shape.mask = NYB_MASK_NONE;
      shape.mask_array = (scene_mask){.kind = kind,
                                      .f32 = variant % 3 == 0,
                                      .of_batch = variant % 2 == 1 || class == MASK_CAUSAL,
                                      .of_head = (variant + class) % 3 == 0,
                                      .of_row = variant >= 2,
                                      .class = (mask_class) class};
      if (class != MASK_LOWEST || kind == NYB_MASK_ARRAY_ADD) check_case(w, shape);
    }
  }
}

/* Nothing but a dtype's lowest number added, which times log2(e) is beyond all floats; alone, and
 * beside a sink. */
static void check_lowest(walk *w) {
  for (int i = 0; i < 8; i++) {
    attention_shape shape = decode_shape("the lowest number added", 4, 2, 64, 200);
    shape.query_len = i < 4 ? 1 : 5;
    shape.query_dtype = shape.out_dtype = NYB_BF16;
    shape.sinks = i % 4 == 3;
    shape.mask_array =
        (scene_mask){.kind = NYB_MASK_ARRAY_ADD, .f32 = i % 2 == 0, .class = MASK_LOWEST};
    check_case(w, shape);
  }
}

static void check_sinks(walk *w) {
  static const int32_t lengths[] = {0, 1, 2, 63, 64, 130, 200, 1024, 1100, 2100};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    attention_shape shape = decode_shape("sinks", 12, 2, 32, lengths[i]);
    shape.sinks = true;
    check_case(w, shape);
  }
  attention_shape rows = prefill_shape("sinks, rows that see nothing", NYB_MASK_CAUSAL, 9, 4);
  rows.query_heads = 12;
  rows.sinks = true;
  check_case(w, rows);
  rows.mask = NYB_MASK_NONE;
  rows.lengths[0] = 130;
  for (int i = 0; i < 4; i++) { /* field case 29: a tile of which nothing is seen, too */
    rows.mask_array = (scene_mask){.kind = i % 2 == 0 ? NYB_MASK_ARRAY_BOOL : NYB_MASK_ARRAY_ADD,
                                   .of_row = true,
                                   .of_head = true,
                                   .class = i < 2 ? MASK_ROWS : MASK_TILES};
    check_case(w, rows);
  }
}

static void check_softcaps(walk *w) {
  static const float softcaps[] = {0.5f, 5, 30, 50};
  for (int i = 0; i < 8; i++) {
    attention_shape shape = decode_shape("softcap", 4, 2, 64, i == 7 ? 1100 : 130);
    shape.softcap = softcaps[i % 4];
    shape.keys = i < 4 ? ROWS_NORMAL : i < 6 ? ROWS_LARGE : ROWS_DOMINANT;
    shape.queries = i < 4 ? QUERIES_NORMAL : i < 6 ? QUERIES_LARGE : QUERIES_ALIGNED;
    check_case(w, shape);
  }
  /* An infinite score is capped like any other. */
  attention_shape shape = decode_shape("softcap of an overflow", 4, 2, 64, 130);
  shape.queries = QUERIES_ALONG;
  shape.overflow = (score_overflow){.first = 3, .end = 70};
  shape.softcap = 20;
  check_case(w, shape);
  shape.overflow.upwards = true;
  check_case(w, shape);
}

/* Caps that no model has, as far as the header allows them: one cap dwarfs all scores, the other
 * caps them all; and scores of 0 alone. */
static void check_outer_softcaps(walk *w) {
  static const float softcaps[] = {0x1p-126f, 0x1p126f, 1e-36f, 1e3f, 1e6f, 0x1p-4f, 1e8f, 0.01f};
  for (int i = 0; i < 16; i++) {
    attention_shape shape = decode_shape("outer softcap", 4, 2, 64, 130);
    shape.softcap = softcaps[i % 8];
    shape.query_dtype = shape.out_dtype = NYB_BF16;
    if (i >= 12) shape.queries = QUERIES_ZERO;
    check_case(w, shape);
  }
}

/* Windows far from the sequence's start, for CUDA's merge, which looks only where they are: in one
 * of its rounds of 4,096 and 8,192 tokens and over the end of one; and an empty sequence. */
static void check_far_windows(walk *w) {
  static const struct {
    int32_t length, window, rows;
  } calls[] = {{9000, 300, 1},   {8400, 1000, 1}, {8192, 1024, 2},
               {12300, 1030, 5}, {9000, 4000, 1}, {16600, 5000, 1}};
  if (w->run->options.backend != NYB_BACKEND_CUDA) return;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    attention_shape shape =
        prefill_shape("far window", NYB_MASK_CAUSAL, calls[i].rows, calls[i].length);
    shape.window_tokens = calls[i].window;
    shape.query_dtype = shape.out_dtype = NYB_BF16;
    shape.capacity_tokens = 25000;
    if (i % 2 == 0) {
      shape.batch = 3;
      shape.lengths[1] = 0;
      shape.lengths[2] = 500;
    }
    check_case(w, shape);
  }
}

static void check_slopes(walk *w) {
  static const struct {
    nyb_mask mask;
    int32_t rows, length;
  } calls[] = {{NYB_MASK_NONE, 1, 130},   {NYB_MASK_CAUSAL, 1, 1100},
               {NYB_MASK_CAUSAL, 40, 75}, {NYB_MASK_NONE, 9, 130},
               {NYB_MASK_CAUSAL, 9, 5},   {NYB_MASK_CAUSAL_TOP_LEFT, 40, 75},
               {NYB_MASK_NONE, 20, 7},    {NYB_MASK_CAUSAL_TOP_LEFT, 5, 64}};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    attention_shape shape = prefill_shape("slopes", calls[i].mask, calls[i].rows, calls[i].length);
    shape.query_heads = 12;
    shape.slopes = true;
    check_case(w, shape);
  }
}

/* All of it at once, in chance mixtures. */
static void check_mixtures(walk *w) {
  check_random random = {.state = 77};
  for (int i = 0; i < 16; i++) {
    attention_shape shape =
        prefill_shape("mixture", (nyb_mask)check_random_below(&random, 3),
                      1 + check_random_below(&random, i % 2 == 0 ? 3 : 40),
                      (int32_t)check_random_below(&random, i % 4 == 0 ? 2500 : 200));
    shape.query_heads = 2 * (1 + check_random_below(&random, 4));
    if (check_random_below(&random, 2) != 0) {
      shape.window_tokens = 1 + check_random_below(&random, 150);
      shape.window_keep_tokens = check_random_below(&random, 80);
    }
    shape.mask_array = (scene_mask){.kind = (nyb_mask_array_kind)check_random_below(&random, 3),
                                    .f32 = check_random_below(&random, 2) != 0,
                                    .of_head = check_random_below(&random, 2) != 0,
                                    .of_row = check_random_below(&random, 2) != 0,
                                    .class = (mask_class)check_random_below(&random, MASK_ALL)};
    shape.sinks = check_random_below(&random, 2) != 0;
    shape.slopes = check_random_below(&random, 2) != 0;
    if (check_random_below(&random, 2) != 0) shape.softcap = 8;
    check_case(w, shape);
  }
}

/* What is not finite shows in rows that see it, whatever else the call has; and what no row sees
 * shows nowhere, a scale of V neither that would dwarf all that are seen. Queries are NaN: times an
 * infinite one, a key counts as NaN or infinite as its last bit is lost or not. */
static void check_poisoned_features(walk *w) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 40; i++) {
    attention_shape shape = decode_shape("not finite, with features", 4, 2, 64, 200);
    if (i % 4 == 0) shape.window_tokens = 64;
    if (i % 4 == 1) shape.sinks = true;
    if (i % 4 == 2) shape.softcap = 20;
    if (i % 4 == 3) shape.slopes = true;
    shape.poison = (scene_poison){.place = (poison_place)(POISON_QUERY + i / 4 % 5),
                                  .value = values[i / 4 % 5 == 0 ? 0 : i % 3],
                                  .head = 1,
                                  .row = i / 4 % 5 == 0 ? 0 : 140 + i,
                                  .element = i};
    check_case(w, shape);
  }
  for (int i = 0; i < 8; i++) {
    attention_shape shape = decode_shape("hidden and vast or not finite", 4, 2, 64, 200);
    shape.window_tokens = 64;
    shape.window_keep_tokens = i % 2 == 0 ? 0 : 5;
    shape.poison = (scene_poison){.place = i / 2 % 2 == 0 ? POISON_VALUE : POISON_KEY,
                                  .value = i < 4 ? 30000 : NAN,
                                  .head = 1,
                                  .row = i % 2 == 0 ? 130 : 8,
                                  .element = i};
    check_case(w, shape);
  }
}

/* CUDA's decode kernel at other sizes than those that settle_for_gpu() keeps to: tiles of 16 and 32
 * tokens, scales in f32, heads of which plain calls share a tile between two warps. */
static void check_wide_features(walk *w) {
  static const struct {
    int64_t dim, salt; /* of the format: groups of 64, f32, f16 and bf16 */
    attention_shape with;
  } cases[] = {
      {128,
       1,
       {.mask_array = {NYB_MASK_ARRAY_ADD, .f32 = true, .of_head = true, .class = MASK_HOLES},
        .query_dtype = NYB_BF16}},
      {256,
       4,
       {.mask_array = {NYB_MASK_ARRAY_ADD, .class = MASK_TILES},
        .window_tokens = 150,
        .sinks = true,
        .query_dtype = NYB_F16}},
      {512,
       7,
       {.mask_array = {NYB_MASK_ARRAY_BOOL, .class = MASK_HOLES},
        .softcap = 8,
        .sinks = true,
        .rounding = NYB_ROUNDING_MLX,
        .query_dtype = NYB_F16}},
  };
  if (w->run->options.backend != NYB_BACKEND_CUDA || w->format < PLAIN_FORMATS) return;
  for (int i = 0; i < 3 && !w->run->ended; i++) {
    attention_shape shape = decode_shape("wide, with features", 4, 2, cases[i].dim, 700);
    const attention_shape *with = &cases[i].with;
    shape.batch = 2;
    shape.lengths[1] = 131;
    shape.capacity_tokens = 700;
    shape.mask_array = with->mask_array;
    shape.window_tokens = with->window_tokens;
    shape.sinks = with->sinks;
    shape.softcap = with->softcap;
    shape.rounding = with->rounding;
    shape.query_dtype = shape.out_dtype = with->query_dtype;
    shape.seed = (uint64_t)(70 + i);
    if (choose_format(w->format, shape.key_dim, cases[i].salt, &shape.key_format)) {
      shape.value_format = shape.key_format;
      check_scene(w->run, &shape);
    }
  }
}

static void check_features(walk *w) {
  check_top_left(w);
  check_windows(w);
  check_masks(w, NYB_MASK_ARRAY_BOOL);
  check_masks(w, NYB_MASK_ARRAY_ADD);
  check_lowest(w);
  check_sinks(w);
  check_softcaps(w);
  check_slopes(w);
  check_mixtures(w);
  check_poisoned_features(w);
  check_wide_features(w);
  check_few_from_top_left(w);
}

void check_attention_features(check_run *run, int format) {
  walk w = {.run = run, .format = format};
  check_features(&w);
  check_outer_softcaps(&w);
  check_far_windows(&w);
}

/* Long contexts: many chunks. Field case 22 is the wide one. */
static void check_long(walk *w) {
  if (w->run->options.quick) {
    check_case(w, decode_shape("long", 4, 2, 64, 3000));
    return;
  }
  check_case(w, decode_shape("long", 4, 2, 64, 8192));
  check_case(w, decode_shape("long", 4, 1, 128, 5000));
  check_case(w, decode_shape("long", 1, 1, 32, 33001));
  check_case(w, decode_shape("long and wide", 8, 1, 256, 16384));
  check_case(w, decode_shape("long and wide", 8, 1, 256, 16384));
}

/* ---- Accuracy: the root mean square, where the bounds above are for the worst ---------------- */

static double relative_rms(const attention_scene *scene, const scene_expected *e) {
  const attention_shape *s = &scene->shape;
  double errors = 0, sizes = 0;
  for (int64_t i = 0; i < s->query_heads; i++) {
    for (int64_t d = 0; d < s->value_dim; d++) {
      const double got =
          oracle_load(scene->out.data, s->out_dtype, i * scene->call.out.stride[1] + d);
      const double want = e->out[i * s->value_dim + d];
      errors += (got - want) * (got - want);
      sizes += want * want;
    }
  }
  return sqrt(errors / sizes);
}

/* Normal data, D = 128, N = 1,000, without the roundings of MLX, against the exact result. The
 * errors of the weights are those of the scores, and carry over to the output as they are.
 *   Out f32: u for each of some 128 additions to sums of the size of 1 adds up to sqrt(128) u =
 * 7e-7 in the mean, and three times as much may stand. Out f16: its own rounding is uniform within
 * 2^-10 of a number's power of two, 2.1e-4 of the number in the mean. Integer dots: the error of a
 * query's element is uniform within a step of max|q| / 32767 = 3.5 / sqrt(128) / 32767, so step /
 * sqrt(12) = 2.7e-6; over 128 keys of size 1 that is 3.1e-5, that of the weights of the values is
 * less, and three times as much may stand: together sqrt(2.1^2 + 0.93^2) * 1e-4. */
static double rms_limit(nyb_dtype out_dtype) { return out_dtype == NYB_F32 ? 2.1e-6 : 2.3e-4; }

/* On the GPU the weights are f16 numbers: their relative errors are uniform within 2^-11 of a power
 * of two, 2.07e-4 in the mean (2^-11 / sqrt(3), times sqrt(0.54) for where numbers stand between
 * powers of two), and independent, so that the output's is 2.07e-4 of the root of the sum of
 * (p * scale * code)^2; three times as much may stand. */
static double f16_weights_rms(const attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  double squares = 0, sizes = 0;
  for (int64_t head = 0; head < s->kv_heads; head++) {
    oracle_rows rows;
    if (!oracle_rows_decode(&scene->call.v, 0, head, s->lengths[0], s->value_dim, &rows)) return 0;
    for (int64_t i = 0; i < s->lengths[0] * s->value_dim; i++) {
      squares += rows.scaled[i] * rows.scaled[i];
      sizes += rows.value[i] * rows.value[i];
    }
    oracle_rows_free(&rows);
  }
  return 3 * 2.07e-4 * sqrt(squares / sizes);
}

void check_scene_accuracy(check_run *run, attention_scene *scene, nyb_isa isa) {
  kernel_set set;
  scene_expected expected;
  char what[256];
  if (!find_kernels(run, scene, isa, NYB_PATH_FUSED, &set) ||
      !scene_expect(scene, NYB_PATH_FUSED, set.arithmetic, &expected)) {
    return;
  }
  const nyb_status status =
      scene_run(scene, run->options.library, run->contexts[isa], NYB_PATH_FUSED);
  const double error = status == NYB_OK ? relative_rms(scene, &expected) : (double)NAN;
  scene_expected_free(&expected);
  double limit = rms_limit(scene->shape.out_dtype);
  if (set.arithmetic == ORACLE_CUDA_WEIGHTS) limit = hypot(limit, f16_weights_rms(scene));
  /* Keys, weights and values are rounded once each, by 2.07e-4 in the mean as above. */
  if (set.arithmetic == ORACLE_CUDA_TILES) limit = hypot(limit, 3 * sqrt(3) * 2.07e-4);
  if (!(error <= limit)) {
    scene_describe(scene, what, sizeof what);
    check_fail(run, set.tallies[set.scores], "%s: relative RMS error %.3g, at most %.3g", what,
               error, limit);
    return;
  }
  for (int i = 0; i < set.count; i++) {
    check_pass(set.tallies[i]);
    if (error > set.tallies[i]->rms_error &&
        (scene->shape.out_dtype == NYB_F32 || isa == NYB_ISA_CUDA)) {
      set.tallies[i]->rms_error = error;
    }
  }
}

static void check_accuracy(check_run *run, int format) {
  for (int i = 0; i < 6; i++) {
    attention_shape shape = decode_shape("accuracy", 8, 2, 128, 1000);
    attention_scene scene;
    shape.capacity_tokens = 1000;
    shape.query_dtype = (nyb_dtype)(NYB_F32 + i % 3);
    shape.out_dtype = i < 3 ? NYB_F32 : NYB_F16;
    shape.seed = (uint64_t)(format * 6 + i);
    choose_format(format, 128, 4, &shape.key_format);
    choose_format(format, 128, 4, &shape.value_format);
    if (run->options.quick && i % 3 != format % 3) continue;
    if (run->ended || !scene_make(&scene, &shape)) return;
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      check_scene_accuracy(run, &scene, isa);
    }
    scene_free(&scene);
  }
}

/* ---- Invariants: bits that must not change -------------------------------------------------- */

/* Remembers the bits of a scene's first run and compares later ones with them. */
typedef struct invariant {
  check_run *run;
  attention_scene scene;
  nyb_isa isa;
  uint8_t *first, *again;
  kernel_set set;
  bool good;
} invariant;

static void break_invariant(invariant *v, const char *what) {
  char text[256];
  scene_describe(&v->scene, text, sizeof text);
  check_fail(v->run, v->set.tallies[v->set.scores], "%s: %s", what, text);
  v->good = false;
}

static bool run_scene(invariant *v, attention_scene *scene, nyb_context *context, uint8_t *bits) {
  if (scene_run(scene, v->run->options.library, context, NYB_PATH_FUSED) != NYB_OK) {
    break_invariant(v, check_error());
    return false;
  }
  scene_bits(scene, bits);
  return true;
}

static void expect_same(invariant *v, attention_scene *scene, nyb_context *context,
                        const char *what) {
  if (!run_scene(v, scene, context, v->again)) return;
  if (memcmp(v->first, v->again, (size_t)scene_bits_bytes(scene)) != 0) break_invariant(v, what);
}

static void same_over_threads(invariant *v) {
  static int64_t threads[] = {1, 2, 3, 7, 16, 64};
  if (v->isa == NYB_ISA_CUDA) return;
  for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
    nyb_context_options options = {
        .struct_size = sizeof options, .isa = v->isa, .threads = threads[i]};
    if (threads[i] != 3) { /* one count on the library's own pool */
      options.parallel_for = check_parallel_for;
      options.parallel_for_data = &threads[i];
    }
    nyb_context *context;
    char what[48];
    snprintf(what, sizeof what, "bits differ on %d threads", (int)threads[i]);
    if (nyb_context_create(&options, &context) != NYB_OK) {
      break_invariant(v, check_error());
      return;
    }
    expect_same(v, &v->scene, context, what);
    nyb_context_destroy(context);
  }
}

static void same_over_repeats(invariant *v) {
  const int repeats = v->run->options.quick ? 20 : 200;
  for (int i = 0; i < repeats && v->good; i++) {
    expect_same(v, &v->scene, v->run->contexts[v->isa], "bits differ from run to run");
  }
}

/* The same content with other strides, more room and other poison. */
static void same_over_layouts(invariant *v) {
  attention_shape shape = v->scene.shape;
  attention_scene other;
  shape.swapped = !shape.swapped;
  shape.gap = 3;
  shape.capacity_tokens += 77;
  if (!scene_make(&other, &shape)) return;
  expect_same(v, &other, v->run->contexts[v->isa], "bits differ with strides and capacity");
  scene_free(&other);
}

/* The bits of one row within what scene_bits() gives. */
static const uint8_t *row_bits(const attention_scene *scene, const uint8_t *bits, int64_t row,
                               int64_t *row_bytes) {
  *row_bytes = scene->shape.value_dim * (scene->shape.out_dtype == NYB_F32 ? 4 : 2);
  return bits + row * *row_bytes;
}

static const void *advance(const void *data, int64_t elements, nyb_dtype dtype) {
  return (const uint8_t *)data + elements * (dtype == NYB_F32 ? 4 : 2);
}

static void advance_stored(nyb_stored *stored, int64_t batch_index, int64_t head) {
  const nyb_dtype dtype = stored->format.dtype;
  const bool plain = stored->format.scheme == NYB_PLAIN;
  stored->codes =
      advance(stored->codes, batch_index * stored->codes_stride[0] + head * stored->codes_stride[1],
              plain ? dtype : NYB_F32);
  if (plain) return;
  stored->scales =
      advance(stored->scales,
              batch_index * stored->scales_stride[0] + head * stored->scales_stride[1], dtype);
  stored->biases =
      advance(stored->biases,
              batch_index * stored->biases_stride[0] + head * stored->biases_stride[1], dtype);
}

/* On the GPU fewer rows may be another kernel's, which may give other bits. */
static bool other_kernel(const invariant *v, const nyb_attention *part) {
  nyb_plan plan = NYB_PLAN_INIT;
  nyb_attention call = *part;
  if (v->isa != NYB_ISA_CUDA) return false;
  check_stage_pretend(&call);
  return nyb_attention_plan(v->run->contexts[v->isa], &call, &plan) == NYB_OK &&
         strcmp(plan.key_kernel, v->set.key_kernel) != 0;
}

/* Runs the scene's call with other fields over the same buffers. Outputs are written in place. */
static bool run_part(invariant *v, const nyb_attention *part) {
  attention_scene *scene = &v->scene;
  if (other_kernel(v, part)) return false;
  const nyb_status status = v->run->options.library->attention(
      v->run->contexts[v->isa], part, scene->workspace, scene->workspace_bytes, NULL);
  if (status != NYB_OK) break_invariant(v, check_error());
  return status == NYB_OK;
}

/* Whether one row of out, where `part` wrote it, has the bits that row `index` had at first. */
static void expect_row(invariant *v, const nyb_attention *part, int64_t index, const char *what) {
  int64_t bytes;
  const uint8_t *first = row_bits(&v->scene, v->first, index, &bytes);
  if (memcmp(first, part->out.data, (size_t)bytes) != 0) break_invariant(v, what);
}

/* Each query head on its own, without its batch and its neighbours. */
static void same_alone(invariant *v) {
  attention_scene *scene = &v->scene;
  const attention_shape *s = &scene->shape;
  for (int64_t i = 0; i < s->batch * s->query_heads && v->good; i++) {
    const int64_t b = i / s->query_heads, head = i % s->query_heads;
    nyb_attention alone = scene->call;
    alone.batch = alone.query_heads = alone.kv_heads = 1;
    alone.lengths = s->lengths + b;
    alone.q.data =
        advance(alone.q.data, b * alone.q.stride[0] + head * alone.q.stride[1], alone.q.dtype);
    alone.lse.data = NULL;
    advance_stored(&alone.k, b, head / (s->query_heads / s->kv_heads));
    advance_stored(&alone.v, b, head / (s->query_heads / s->kv_heads));
    if (run_part(v, &alone)) {
      expect_row(v, &alone, i * s->query_len, "bits of a head differ without its neighbours");
    }
  }
}

/* Causal row i is the decode step of the sequence that ends there. */
static void same_as_decode(invariant *v) {
  attention_scene *scene = &v->scene;
  const attention_shape *s = &scene->shape;
  for (int64_t row = 0; row < s->query_len && v->good; row++) {
    int32_t lengths[SCENE_MAX_BATCH];
    for (int64_t b = 0; b < s->batch; b++) lengths[b] = (int32_t)scene_visible(s, b, row);
    nyb_attention step = scene->call;
    step.query_len = 1;
    step.lengths = lengths;
    step.q.data = advance(step.q.data, row * step.q.stride[2], step.q.dtype);
    step.lse.data = NULL;
    if (run_part(v, &step)) {
      expect_row(v, &step, row, "bits of a causal row differ from its decode step");
    }
  }
}

/* The first of several rows, and a row beside one of NaN. */
static void same_beside_others(invariant *v) {
  attention_scene *scene = &v->scene;
  const attention_shape *s = &scene->shape;
  for (int64_t rows = 1; rows <= s->query_len && s->mask == NYB_MASK_NONE; rows++) {
    nyb_attention fewer = scene->call;
    fewer.query_len = rows;
    fewer.lse.data = NULL;
    if (run_part(v, &fewer)) {
      expect_row(v, &fewer, 0, "bits of row 0 depend on the number of rows");
    }
  }
  for (int64_t d = 0; d < s->key_dim; d++) { /* head 1 */
    oracle_store(scene->q.data, s->query_dtype, scene->call.q.stride[1] + d, NAN);
  }
  nyb_attention beside = scene->call;
  beside.lse.data = NULL;
  if (run_part(v, &beside)) expect_row(v, &beside, 0, "bits of row 0 depend on a row of NaN");
  memcpy(scene->q.memory, scene->q.image, scene->q.memory_bytes);
}

/* Row 0 of several causal rows does not see the last tokens, whatever stands there: NaN and
 * infinity, or numbers far larger than all others. */
static void same_beside_unseen(invariant *v, bool finite) {
  attention_scene *scene = &v->scene;
  const double scale = finite ? 30000 : NAN, bias = finite ? -30000 : INFINITY;
  const attention_shape *s = &scene->shape;
  const nyb_stored *stored[] = {&scene->call.k, &scene->call.v};
  if (s->mask != NYB_MASK_CAUSAL || s->query_len < 2) return;
  for (int i = 0; i < 2; i++) {
    const nyb_dtype dtype = stored[i]->format.dtype;
    const bool plain = stored[i]->format.scheme == NYB_PLAIN;
    const int64_t token = s->lengths[0] - 1;
    for (int64_t d = 0; plain && d < (i == 0 ? s->key_dim : s->value_dim); d++) {
      oracle_store((void *)(uintptr_t)stored[i]->codes, dtype,
                   token * stored[i]->codes_stride[2] + d, scale);
    }
    if (plain) continue;
    oracle_store((void *)(uintptr_t)stored[i]->scales, dtype, token * stored[i]->scales_stride[2],
                 scale);
    oracle_store((void *)(uintptr_t)stored[i]->biases, dtype, token * stored[i]->biases_stride[2],
                 bias);
  }
  nyb_attention call = scene->call;
  call.lse.data = NULL;
  if (run_part(v, &call)) expect_row(v, &call, 0, "row 0 depends on a token that it does not see");
}

void check_invariants(check_run *run, nyb_isa isa, const attention_shape *shape) {
  invariant v = {.run = run, .isa = isa, .good = true};
  if (run->ended || !scene_make(&v.scene, shape)) return;
  if (!find_kernels(run, &v.scene, isa, NYB_PATH_FUSED, &v.set)) {
    scene_free(&v.scene);
    return;
  }
  v.first = malloc((size_t)scene_bits_bytes(&v.scene));
  v.again = malloc((size_t)scene_bits_bytes(&v.scene));
  if (v.first != NULL && v.again != NULL && run_scene(&v, &v.scene, run->contexts[isa], v.first)) {
    same_over_threads(&v);
    same_over_repeats(&v);
    same_over_layouts(&v);
    same_alone(&v);
    if (shape->mask == NYB_MASK_CAUSAL) same_as_decode(&v);
    same_beside_others(&v);
    same_beside_unseen(&v, true);
    same_beside_unseen(&v, false);
    for (int i = 0; i < v.set.count && v.good; i++) check_pass(v.set.tallies[i]);
  }
  free(v.first);
  free(v.again);
  scene_free(&v.scene);
}

static void check_invariant_shapes(check_run *run, int format) {
  attention_shape shapes[] = {
      decode_shape("three lengths", 6, 2, 64, 33), decode_shape("row 0 of 16", 4, 2, 64, 32),
      decode_shape("causal", 4, 2, 64, 1030), decode_shape("ratio of 40", 40, 1, 32, 1100)};
  shapes[0].batch = 3;
  shapes[0].lengths[1] = 2500;
  shapes[0].lengths[2] = 700;
  shapes[1].query_len = 16;
  shapes[2].query_len = 17;
  shapes[2].mask = NYB_MASK_CAUSAL;
  for (int i = 0; i < 4; i++) {
    attention_shape *s = &shapes[i];
    if (run->options.quick && (i + format) % 4 != 0) continue;
    for (int64_t b = 0; b < s->batch; b++) {
      if (s->lengths[b] > s->capacity_tokens) s->capacity_tokens = s->lengths[b];
    }
    const bool fits = choose_format(format, s->key_dim, i, &s->key_format) &&
                      choose_format(run->options.format != NULL ? format : (format + i) % FORMATS,
                                    s->value_dim, i + 4, &s->value_format);
    s->query_dtype = (nyb_dtype)(NYB_F32 + (format + i) % 3);
    s->out_dtype = i == 3 ? NYB_BF16 : NYB_F32;
    s->rounding = i % 2 == 0 ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX;
    s->seed = (uint64_t)(format * 4 + i);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON && fits; isa++) {
      check_invariants(run, isa, s);
    }
  }
}

/* ---- All ---------------------------------------------------------------------------------- */

void check_attention(check_run *run) {
  if (run->options.backend == NYB_BACKEND_CUDA) {
    check_attention_cuda(run);
    return;
  }
  for (int format = 0; format < FORMATS; format++) {
    walk w = {.run = run, .format = format};
    nyb_format any;
    char name[16];
    choose_format(format, 128, 0, &any);
    check_format_name(&any, name);
    check_step(run, "attention", format, FORMATS);
    if (!check_wants_format(run, name)) continue;
    check_features(&w);
    if (run->options.features) {
      check_outer_softcaps(&w);
      continue;
    }
    check_lengths(&w);
    check_dims(&w);
    check_ratios(&w);
    check_query_lengths(&w);
    check_batches(&w);
    check_data(&w);
    check_one_hot(&w);
    check_poison(&w);
    check_overflow(&w);
    check_long(&w);
    check_outer_softcaps(&w);
    check_accuracy(run, format);
    check_invariant_shapes(run, format);
  }
  check_step(run, "attention", FORMATS, FORMATS);
}
