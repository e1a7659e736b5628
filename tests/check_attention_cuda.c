/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on the GPU. A kernel is compiled for what a specialisation fixes (widths, groups,
 * dtypes, head sizes, rounding, alignment), one to two seconds each, and takes the rest at run
 * time: so the cases come in families of one specialisation, each with many lengths, heads, masks
 * and kinds of data. What only a GPU can get wrong follows: captured graphs, lengths in device
 * memory, pointers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_attention.h"
#include "check_stage.h"

/* ---- Families ------------------------------------------------------------------------------- */

typedef struct family {
  const char *name;
  int64_t key_dim, value_dim;
  int32_t group; /* of both; 0: plain rows */
  nyb_dtype query_dtype, scale_dtype;
  nyb_rounding rounding;
  bool packed; /* no gaps, aligned: a kernel's wide copies */
  int64_t heads_per_kv, query_len;
  nyb_mask mask;
  nyb_path path;
  int32_t value_bits_off; /* how many widths the values' is from the keys', going round */
  bool always;            /* in quick runs for every width; else for one in three */
} family;

static const family affine_families[] = {
    {"128", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, true},
    {"128, MLX", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_MLX, true, 8, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"128, strided", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, false, 3, 2,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, false},
    {"128, 16 rows", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 4,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, false},
    {"128, f16, groups of 128", 128, 128, 128, NYB_F16, NYB_F16, NYB_ROUNDING_EXACT, true, 5, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"128, f32 scales, groups of 32", 128, 128, 32, NYB_BF16, NYB_F32, NYB_ROUNDING_EXACT, true, 7,
     1, NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"128, other values", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 2, false},
    {"128, 24 heads", 128, 128, 64, NYB_BF16, NYB_F16, NYB_ROUNDING_EXACT, true, 24, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"64, f16, MLX, strided", 64, 64, 32, NYB_F16, NYB_F16, NYB_ROUNDING_MLX, false, 3, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"64", 64, 64, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 3, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"96", 96, 96, 32, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"192", 192, 192, 64, NYB_F16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"256", 256, 256, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 2, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, true},
    {"256, MLX, groups of 128", 256, 256, 128, NYB_BF16, NYB_BF16, NYB_ROUNDING_MLX, true, 8, 2,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"512", 512, 512, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 16, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"576 and 512", 576, 512, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 16, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"192 and 128", 192, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, false, 2, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 3, false},
    {"f32 queries", 128, 128, 64, NYB_F32, NYB_F32, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, true},
    {"f32 queries, strided", 160, 32, 32, NYB_F32, NYB_BF16, NYB_ROUNDING_MLX, false, 71, 1,
     NYB_MASK_NONE, NYB_PATH_FUSED, 1, false},
    {"prefill", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 130, NYB_MASK_CAUSAL,
     NYB_PATH_FUSED, 0, true},
    {"prefill, f16, MLX", 128, 128, 64, NYB_F16, NYB_BF16, NYB_ROUNDING_MLX, false, 3, 65,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, false},
    {"prefill of 64", 64, 64, 64, NYB_BF16, NYB_F16, NYB_ROUNDING_EXACT, true, 1, 200,
     NYB_MASK_NONE, NYB_PATH_FUSED, 0, false},
    {"prefill of 256", 256, 256, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 2, 70,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, false},
    {"prefill, other values", 128, 128, 32, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 5, 33,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 4, false},
    {"prefill of 512", 512, 512, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 2, 40,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, false},
    {"compat", 128, 128, 64, NYB_BF16, NYB_BF16, NYB_ROUNDING_MLX, true, 2, 1, NYB_MASK_NONE,
     NYB_PATH_COMPAT, 0, true},
    {"compat, strided", 64, 96, 32, NYB_F16, NYB_F32, NYB_ROUNDING_EXACT, false, 3, 5,
     NYB_MASK_CAUSAL, NYB_PATH_COMPAT, 1, false},
};

static const family plain_families[] = {
    {"plain 128", 128, 128, 0, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, true},
    {"plain 80, MLX", 80, 80, 0, NYB_F16, NYB_F16, NYB_ROUNDING_MLX, false, 3, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 0, false},
    {"plain 112", 112, 112, 0, NYB_F32, NYB_F32, NYB_ROUNDING_EXACT, true, 5, 3, NYB_MASK_CAUSAL,
     NYB_PATH_FUSED, 0, false},
    {"plain odd", 33, 17, 0, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, false, 3, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 1, false},
    {"plain keys", 128, 64, 0, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 1, NYB_MASK_NONE,
     NYB_PATH_FUSED, 5, false},
    {"plain prefill", 128, 128, 0, NYB_BF16, NYB_BF16, NYB_ROUNDING_EXACT, true, 4, 130,
     NYB_MASK_CAUSAL, NYB_PATH_FUSED, 0, true},
    {"plain compat", 64, 64, 0, NYB_BF16, NYB_BF16, NYB_ROUNDING_MLX, false, 2, 2, NYB_MASK_CAUSAL,
     NYB_PATH_COMPAT, 0, true},
};
enum {
  AFFINE_FAMILIES = sizeof affine_families / sizeof affine_families[0],
  PLAIN_FAMILIES = sizeof plain_families / sizeof plain_families[0]
};

/* Formats 0 to 2 are plain, 3 to 8 the widths 2, 3, 4, 5, 6 and 8. */
static nyb_format family_format(const family *f, int format) {
  static const int32_t widths[] = {2, 3, 4, 5, 6, 8};
  if (format < PLAIN_FORMATS) {
    return (nyb_format){.scheme = NYB_PLAIN, .dtype = (nyb_dtype)(NYB_F32 + format)};
  }
  return (nyb_format){.scheme = NYB_AFFINE,
                      .bits = widths[format - PLAIN_FORMATS],
                      .group_size = f->group != 0 ? f->group : 32,
                      .dtype = f->scale_dtype};
}

/* The values' format: of the keys' kind as far round as the family says; 5 takes plain keys to
 * affine values. */
static int value_format_of(const family *f, int format) {
  if (f->value_bits_off == 5) return PLAIN_FORMATS + format * 2;
  if (format < PLAIN_FORMATS) return (format + f->value_bits_off) % PLAIN_FORMATS;
  return PLAIN_FORMATS + (format - PLAIN_FORMATS + f->value_bits_off) % (FORMATS - PLAIN_FORMATS);
}

static attention_shape family_shape(const family *f, const char *what, int format, int index) {
  static char name[64]; /* of the case in hand */
  snprintf(name, sizeof name, "%s: %s", f->name, what);
  return (attention_shape){.name = name,
                           .batch = 1,
                           .query_heads = 2 * f->heads_per_kv,
                           .kv_heads = 2,
                           .query_len = f->query_len,
                           .key_dim = f->key_dim,
                           .value_dim = f->value_dim,
                           .key_format = family_format(f, format),
                           .value_format = family_format(f, value_format_of(f, format)),
                           .query_dtype = f->query_dtype,
                           .out_dtype = f->query_dtype,
                           .mask = f->mask,
                           .rounding = f->rounding,
                           .swapped = !f->packed && index % 2 == 0,
                           .gap = f->packed ? 0 : 1 + index % 3,
                           .seed = (uint64_t)(format * 1000 + index)};
}

/* For comparing bits, and errors smaller than bf16 shows, where the tuned kernels take 16 bits. */
static nyb_dtype finest_out(const family *f) {
  return f->group != 0 && f->query_dtype != NYB_F32 ? NYB_F16 : NYB_F32;
}

/* ---- One case -------------------------------------------------------------------------------- */

static void run_case(check_run *run, const family *f, attention_shape *shape) {
  attention_scene scene;
  scene_expected expected;
  kernel_set set;
  char what[256];
  for (int64_t b = 0; b < shape->batch; b++) {
    const int64_t room = shape->lengths[b] + (f->packed || shape->lengths[b] == 0 ? 0 : 3);
    if (room > shape->capacity_tokens) shape->capacity_tokens = room;
  }
  if (!scene_make(&scene, shape)) return;
  check_stage_place(f->packed ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  scene_describe(&scene, what, sizeof what);
  if (find_kernels(run, &scene, NYB_ISA_CUDA, f->path, &set) &&
      scene_expect(&scene, f->path, set.arithmetic, &expected)) {
    run_path(run, &scene, NYB_ISA_CUDA, f->path, &set, &expected, what);
    scene_expected_free(&expected);
  }
  scene_free(&scene);
}

/* ---- A family's cases -------------------------------------------------------------------------
 */

/* Nothing, one, and one less and more than tiles, leaves and blocks; a sequence each. */
static void check_lengths(check_run *run, const family *f, int format) {
  static const int32_t lengths[] = {0,   1,   2,   7,   15,  16,  17,  31,  32,   33,   47,  63,
                                    64,  65,  95,  127, 128, 129, 191, 193, 255,  256,  257, 300,
                                    383, 385, 511, 512, 513, 640, 767, 769, 1023, 1024, 1025};
  enum { COUNT = sizeof lengths / sizeof lengths[0] };
  attention_shape shape = family_shape(f, "lengths", format, 1);
  const bool heavy = f->query_len > 16 || f->heads_per_kv > 16 || f->key_dim > 256;
  const int step = heavy || f->path == NYB_PATH_COMPAT ? 6 : run->options.quick ? 3 : 1;
  shape.batch = 0;
  for (int i = run->options.sanitizer ? COUNT - 4 : format % step; i < COUNT; i += step) {
    shape.lengths[shape.batch++] = lengths[i];
  }
  if (heavy) shape.kv_heads = 1, shape.query_heads = f->heads_per_kv;
  run_case(run, f, &shape);
}

/* A cache with room for nothing: memory of no bytes, and outputs are zeros all the same. */
static void check_no_capacity(check_run *run, const family *f, int format) {
  attention_shape shape = family_shape(f, "no capacity", format, 7);
  shape.batch = 2;
  run_case(run, f, &shape);
}

/* Every head size and ratio with another number of rows, and other outputs. */
static void check_rows(check_run *run, const family *f, int format) {
  static const int64_t rows[] = {2, 3, 5, 6, 7, 11, 16};
  attention_shape shape = family_shape(f, "rows", format, 2);
  shape.query_len = f->query_len > 1 ? f->query_len + 1 : rows[format % 7];
  shape.mask = NYB_MASK_CAUSAL;
  shape.out_dtype = finest_out(f);
  shape.batch = 3;
  shape.lengths[0] = (int32_t)shape.query_len / 2; /* the first rows see nothing */
  shape.lengths[1] = 75;
  shape.lengths[2] = 300;
  run_case(run, f, &shape);
}

static const struct {
  row_class keys, values;
  query_class queries;
} kinds[] = {
    {ROWS_ZERO, ROWS_ZERO, QUERIES_NORMAL},
    {ROWS_NORMAL, ROWS_EQUAL, QUERIES_ZERO},
    {ROWS_EQUAL, ROWS_NORMAL, QUERIES_NORMAL},
    {ROWS_DOMINANT, ROWS_RAW, QUERIES_ALIGNED},
    {ROWS_LARGE, ROWS_LARGE, QUERIES_LARGE},
    {ROWS_OUTLIER, ROWS_OUTLIER, QUERIES_NORMAL},
    {ROWS_NORMAL, ROWS_CONSTANT, QUERIES_OUTLIER},
    {ROWS_VAST, ROWS_NORMAL, QUERIES_MINUTE},
    {ROWS_NORMAL, ROWS_WIDE, QUERIES_HALF_STEPS},
    {ROWS_CONSTANT, ROWS_OFFSET, QUERIES_NORMAL},
    {ROWS_OFFSET, ROWS_SUBNORMAL, QUERIES_TINY},
    {ROWS_WIDE, ROWS_ALL_MAX_CODES, QUERIES_TINY},
    {ROWS_SUBNORMAL, ROWS_ALL_ZERO_CODES, QUERIES_NORMAL},
    {ROWS_NORMAL, ROWS_SEVENTHS, QUERIES_SUBNORMAL},
    {ROWS_RAW, ROWS_RAW, QUERIES_NORMAL},
    {ROWS_ALL_ZERO_CODES, ROWS_NORMAL, QUERIES_NORMAL},
    {ROWS_ALL_MAX_CODES, ROWS_VAST, QUERIES_NORMAL},
    {ROWS_SEVENTHS, ROWS_DOMINANT, QUERIES_NORMAL},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* A family that is always run meets every kind of data, the others take turns. */
static void check_kinds(check_run *run, const family *f, int format, int turn) {
  const int step = f->always && !run->options.quick ? 1 : 6;
  for (int i = turn % step; i < KINDS; i += step) {
    attention_shape shape = family_shape(f, "kind of data", format, 3 + i);
    if (f->query_len > 16) shape.query_len = 18 + i;
    shape.keys = kinds[i].keys;
    shape.values = kinds[i].values;
    shape.queries = kinds[i].queries;
    shape.batch = 2;
    shape.lengths[0] = 130 + i;
    shape.lengths[1] = f->query_len > 1 ? 300 : 700;
    run_case(run, f, &shape);
  }
}

/* One element that is not finite wherever attention reads one, and scores beyond all numbers: what
 * comes of it is never plausible, and other rows, heads and sequences do not feel it. */
static void check_not_finite(check_run *run, const family *f, int format) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  static const int32_t spans[][2] = {{3, 4}, {0, 64}, {0, 299}, {0, 300}, {130, 300}, {1, 300}};
  if (f->query_len > 16) return;
  for (int i = 0; i < 10; i++) {
    attention_shape shape = family_shape(f, "not finite", format, 40 + i);
    shape.batch = 2;
    shape.lengths[0] = 40;
    shape.lengths[1] = 300;
    shape.poison = (scene_poison){.place = (poison_place)(POISON_QUERY + i % 5),
                                  .value = values[(i + format) % 3],
                                  .batch = 1,
                                  .head = 1,
                                  .row = i % 5 == 0 ? 0
                                         : i < 5    ? 299
                                                    : 17,
                                  .element = 5 * i};
    run_case(run, f, &shape);
  }
  for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++) {
    attention_shape shape = family_shape(f, "overflow", format, 50 + (int)i);
    shape.lengths[0] = 300;
    shape.queries = QUERIES_ALONG;
    shape.overflow = (score_overflow){.first = spans[i][0], .end = spans[i][1]};
    if (shape.key_format.dtype == NYB_F16) continue; /* overflows only where scores are f16 */
    run_case(run, f, &shape);
  }
}

/* Field cases 7 and 12: one token, a one-hot query for each element: lse is the key's element and
 * out the value's row. */
static void check_one_hot(check_run *run, const family *f, int format) {
  attention_shape shape = family_shape(f, "one-hot queries", format, 30);
  shape.kv_heads = (f->key_dim + f->heads_per_kv - 1) / f->heads_per_kv;
  shape.query_heads = shape.kv_heads * f->heads_per_kv;
  shape.query_len = 1;
  shape.lengths[0] = 1;
  shape.scale = 1;
  shape.queries = QUERIES_IDENTITY;
  shape.keys = shape.values = ROWS_RAW;
  shape.out_dtype = finest_out(f);
  if (f->query_len == 1) run_case(run, f, &shape);
}

/* Many blocks, the last one dominant (field case 26), and ratios and batches that fill no tile. */
static void check_long(check_run *run, const family *f, int format) {
  attention_shape shape = family_shape(f, "long", format, 31);
  if (f->path == NYB_PATH_COMPAT) return;
  shape.batch = 2;
  shape.kv_heads = 1;
  shape.query_heads = f->heads_per_kv;
  shape.query_len = f->query_len > 16 ? 17 : f->query_len;
  shape.lengths[0] = 0;
  shape.lengths[1] = run->options.quick ? 5000 : 20001;
  if (f->always || format % 2 == 0) {
    shape.keys = ROWS_DOMINANT;
    shape.queries = QUERIES_ALIGNED;
  }
  run_case(run, f, &shape);
}

static void check_family_accuracy(check_run *run, const family *f, int format) {
  attention_shape shape = family_shape(f, "accuracy", format, 32);
  attention_scene scene;
  if (f->path == NYB_PATH_COMPAT || f->rounding != NYB_ROUNDING_EXACT || f->query_len > 1) return;
  shape.lengths[0] = 1000;
  shape.capacity_tokens = 1000;
  shape.out_dtype = finest_out(f);
  if (!scene_make(&scene, &shape)) return;
  check_stage_place(f->packed ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  check_scene_accuracy(run, &scene, NYB_ISA_CUDA);
  scene_free(&scene);
}

/* Alone, beside others, with other strides, causal rows against their decode steps, repeats. */
static void check_family_invariants(check_run *run, const family *f, int format) {
  if (f->path == NYB_PATH_COMPAT) return;
  attention_shape shapes[2] = {family_shape(f, "invariants", format, 33),
                               family_shape(f, "invariants", format, 34)};
  shapes[0].batch = 3;
  shapes[0].lengths[0] = 33;
  shapes[0].lengths[1] = 2500;
  shapes[0].lengths[2] = 700;
  shapes[0].out_dtype = finest_out(f);
  if (f->query_len == 1) shapes[0].query_len = 4;
  shapes[1].query_len = f->query_len > 16 ? 40 : 5;
  shapes[1].mask = NYB_MASK_CAUSAL;
  shapes[1].lengths[0] = 1030;
  if (f->query_len > 16) shapes[0].query_len = 33;
  for (int i = 0; i < 2; i++) {
    attention_shape *shape = &shapes[i];
    if (run->options.quick && i != format % 2) continue;
    shape->capacity_tokens = shape->lengths[shape->batch > 1 ? 1 : 0];
    check_stage_place(f->packed ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
    check_invariants(run, NYB_ISA_CUDA, shape);
  }
}

/* ---- Enough units for whole ones ----------------------------------------------------------------
 */

/* Rows in the middle, run alone: a block of threads takes a chunk of theirs, where many rows make
 * it take all chunks of a unit. Where no row's position matters the bits must not differ. */
static bool same_in_chunks(check_run *run, attention_scene *scene) {
  enum { FIRST = 1000, ROWS = 3 };
  const attention_shape *s = &scene->shape;
  const int64_t out_bytes = s->out_dtype == NYB_F32 ? 4 : 2;
  nyb_attention call = scene->call;
  uint8_t *want = malloc((size_t)scene_bits_bytes(scene));
  uint8_t *got = malloc((size_t)scene_bits_bytes(scene));
  bool good =
      want != NULL && got != NULL &&
      scene_run(scene, run->options.library, run->contexts[NYB_ISA_CUDA], NYB_PATH_FUSED) == NYB_OK;
  if (good) {
    scene_bits(scene, want);
    call.path = NYB_PATH_FUSED;
    call.query_len = ROWS;
    call.q.data =
        (const char *)call.q.data + FIRST * call.q.stride[2] * (s->query_dtype == NYB_F32 ? 4 : 2);
    call.out.data = (char *)call.out.data + FIRST * call.out.stride[2] * out_bytes;
    call.lse.data = (float *)call.lse.data + FIRST * call.lse.stride[2];
    check_buffer_poison(&scene->out);
    good = run->options.library->attention(run->contexts[NYB_ISA_CUDA], &call, scene->workspace,
                                           scene->workspace_bytes, NULL) == NYB_OK;
  }
  if (good) scene_bits(scene, got);
  const int64_t row_bytes = s->value_dim * out_bytes;
  for (int64_t head = 0; head < s->query_heads && good; head++) {
    const int64_t at = (head * s->query_len + FIRST) * row_bytes;
    good = memcmp(want + at, got + at, (size_t)(ROWS * row_bytes)) == 0;
  }
  free(want);
  free(got);
  return good;
}

/* More than a thousand units of sixteen rows over three chunks. */
static void check_whole_units(check_run *run, int format) {
  attention_shape shape = decode_shape("whole units", 4, 2, 64, 600);
  attention_scene scene;
  kernel_set set;
  if (run->options.sanitizer || !choose_format(format, 64, 0, &shape.key_format)) return;
  settle_for_gpu(&shape);
  shape.query_len = 4200;
  shape.query_dtype = NYB_BF16;
  shape.out_dtype = NYB_F32; /* or decode takes the few rows */
  shape.capacity_tokens = 600;
  shape.seed = (uint64_t)format;
  for (int i = 0; i < 2; i++) {
    const bool by_position = i == 0;
    char what[256];
    scene_expected expected;
    shape.mask = by_position ? NYB_MASK_CAUSAL_TOP_LEFT : NYB_MASK_NONE;
    shape.window_tokens = by_position ? 290 : 0;
    shape.window_keep_tokens = by_position ? 5 : 0;
    shape.mask_array = (scene_mask){
        .kind = by_position ? 0 : NYB_MASK_ARRAY_ADD, .of_head = true, .class = MASK_TILES};
    shape.sinks = shape.slopes = by_position;
    shape.softcap = by_position ? 0 : 20;
    if (!scene_make(&scene, &shape)) return;
    check_stage_place(STAGE_AS_ON_HOST);
    scene_describe(&scene, what, sizeof what);
    if (find_kernels(run, &scene, NYB_ISA_CUDA, NYB_PATH_FUSED, &set) &&
        scene_expect(&scene, NYB_PATH_FUSED, set.arithmetic, &expected)) {
      run_path(run, &scene, NYB_ISA_CUDA, NYB_PATH_FUSED, &set, &expected, what);
      scene_expected_free(&expected);
      if (!by_position && !same_in_chunks(run, &scene)) {
        check_fail(run, set.tallies[set.scores], "%s: other bits than rows run alone", what);
      }
    }
    scene_free(&scene);
  }
}

/* ---- Graphs: captured at length 1, replayed at every later one ---------------------------------
 */

typedef struct replay {
  check_run *run;
  attention_scene scene;
  kernel_set set;
  staged_attention staged;
  device_graph *graph;
  uint8_t *eager, *replayed;
} replay;

static bool replay_failed(replay *r, const char *what, const char *why) {
  char text[256];
  scene_describe(&r->scene, text, sizeof text);
  check_fail(r->run, r->set.tallies[r->set.scores], "%s: %s: %s", what, why, text);
  return false;
}

static bool set_lengths(replay *r, int32_t length) {
  attention_shape *s = &r->scene.shape;
  for (int64_t b = 0; b < s->batch; b++) {
    s->lengths[b] = length > b * 3 ? length - (int32_t)b * 3 : 0;
  }
  return device_upload(r->staged.lengths, s->lengths, s->batch * (int64_t)sizeof *s->lengths,
                       check_stage_stream()) ||
         replay_failed(r, "lengths", device_error());
}

static bool poison_outputs(replay *r) {
  const check_buffer *out = &r->scene.out, *lse = &r->scene.lse;
  return device_fill(r->staged.call.out.data, 0xff, (int64_t)out->data_bytes,
                     check_stage_stream()) &&
         device_fill(r->staged.call.lse.data, 0xff, (int64_t)lse->data_bytes, check_stage_stream());
}

static bool run_eagerly(replay *r) {
  const nyb_status status =
      nyb_attention_run(r->run->contexts[NYB_ISA_CUDA], &r->staged.call, r->staged.workspace,
                        r->staged.workspace_bytes, check_stage_stream());
  return status == NYB_OK || replay_failed(r, "run", nyb_last_error());
}

static bool capture(replay *r) {
  if (!run_eagerly(r)) return false; /* the kernels are loaded by now */
  if (!device_capture_begin(check_stage_stream())) {
    return replay_failed(r, "capture", device_error());
  }
  const bool good = run_eagerly(r);
  r->graph = device_capture_end(check_stage_stream());
  return good && (r->graph != NULL || replay_failed(r, "capture", device_error()));
}

static bool take_bits(replay *r, uint8_t *bits) {
  if (!check_stage_take_back()) return replay_failed(r, "run", check_error());
  scene_bits(&r->scene, bits);
  return true;
}

static bool replay_at(replay *r, int32_t length) {
  const size_t bytes = (size_t)scene_bits_bytes(&r->scene);
  if (!set_lengths(r, length) || !poison_outputs(r) || !run_eagerly(r) || !take_bits(r, r->eager) ||
      !poison_outputs(r)) {
    return false;
  }
  if (!device_graph_launch(r->graph, check_stage_stream())) {
    return replay_failed(r, "replay", device_error());
  }
  if (!take_bits(r, r->replayed)) return false;
  return memcmp(r->eager, r->replayed, bytes) == 0 ||
         replay_failed(r, "bits of a graph captured at length 1 differ from those of the call",
                       "replay");
}

/* The replay's own outputs, compared with the oracle. */
static bool judge_replay(replay *r) {
  scene_expected expected;
  char text[256];
  double worst;
  if (!scene_expect(&r->scene, NYB_PATH_FUSED, r->set.arithmetic, &expected)) return false;
  const scene_fault fault = scene_compare(&r->scene, &expected, &worst, text, sizeof text);
  scene_expected_free(&expected);
  return fault == SCENE_GOOD || replay_failed(r, "replay", text);
}

static void replay_lengths(replay *r) {
  static const int32_t lengths[] = {1, 7, 100, 128, 129, 512, 513, 1000, 1024, 2047, 3000};
  if (!set_lengths(r, 1) || !capture(r)) return;
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    if (!replay_at(r, lengths[i]) || !judge_replay(r)) return;
  }
  /* Out of range: as if they were the nearest length that is possible. */
  const int32_t capacity = (int32_t)r->scene.shape.capacity_tokens;
  if (!replay_at(r, capacity)) return;
  const size_t bytes = (size_t)scene_bits_bytes(&r->scene);
  uint8_t *full = malloc(bytes);
  if (full == NULL) return;
  memcpy(full, r->replayed, bytes);
  r->scene.shape.lengths[0] = INT32_MAX;
  bool good = device_upload(r->staged.lengths, r->scene.shape.lengths, 4, check_stage_stream()) &&
              device_graph_launch(r->graph, check_stage_stream()) && take_bits(r, r->replayed);
  if (good && memcmp(full, r->replayed, bytes) != 0) {
    good = replay_failed(r, "a length beyond the capacity", "is not clamped to it");
  }
  free(full);
  if (!good) return;
  r->scene.shape.lengths[0] = -5;
  if (!device_upload(r->staged.lengths, r->scene.shape.lengths, 4, check_stage_stream()) ||
      !device_graph_launch(r->graph, check_stage_stream()) || !take_bits(r, r->replayed)) {
    return;
  }
  r->scene.shape.lengths[0] = 0;
  if (!judge_replay(r)) return;
  for (int i = 0; i < r->set.count; i++) check_pass(r->set.tallies[i]);
}

static void check_graph(check_run *run, const family *f, int format) {
  replay r = {.run = run};
  attention_shape shape = family_shape(f, "graph", format, 35);
  if (f->path == NYB_PATH_COMPAT || run->options.sanitizer) return;
  shape.batch = 2;
  shape.query_len = f->query_len > 16 ? 20 : f->query_len;
  shape.capacity_tokens = 3001;
  shape.lengths[0] = shape.lengths[1] = 3001; /* the data; the device's lengths follow below */
  if (!scene_make(&r.scene, &shape)) return;
  check_stage_place(f->packed ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  r.eager = malloc((size_t)scene_bits_bytes(&r.scene));
  r.replayed = malloc((size_t)scene_bits_bytes(&r.scene));
  if (r.eager != NULL && r.replayed != NULL &&
      find_kernels(run, &r.scene, NYB_ISA_CUDA, NYB_PATH_FUSED, &r.set) &&
      scene_prepare(&r.scene, run->contexts[NYB_ISA_CUDA], NYB_PATH_FUSED) == NYB_OK) {
    if (check_stage_attention(&r.scene.call, r.scene.workspace, r.scene.workspace_bytes,
                              &r.staged)) {
      replay_lengths(&r);
    } else {
      replay_failed(&r, "memory", check_error());
    }
    device_graph_destroy(r.graph);
  }
  free(r.eager);
  free(r.replayed);
  scene_free(&r.scene);
}

/* ---- Pointers -----------------------------------------------------------------------------------
 */

/* Host memory in each place in turn: refused, and nothing runs. */
static void check_host_pointers(check_run *run, const family *f, int format) {
  attention_scene scene;
  staged_attention staged;
  kernel_set set;
  nyb_context *context = run->contexts[NYB_ISA_CUDA];
  attention_shape shape = family_shape(f, "pointers", format, 36);
  shape.lengths[0] = 40;
  shape.capacity_tokens = 40;
  if (!scene_make(&scene, &shape)) return;
  if (find_kernels(run, &scene, NYB_ISA_CUDA, NYB_PATH_FUSED, &set) &&
      scene_prepare(&scene, context, NYB_PATH_FUSED) == NYB_OK &&
      check_stage_attention(&scene.call, NULL, scene.workspace_bytes, &staged)) {
    for (int i = 0; i < 6; i++) {
      nyb_attention call = staged.call;
      if (i == 0) call.q.data = scene.q.data;
      if (i == 1) call.lengths = shape.lengths;
      if (i == 2) call.k.codes = scene.k.codes.data;
      if (i == 3) call.v.codes = scene.v.codes.data;
      if (i == 4) call.out.data = scene.out.data;
      if (i == 5) call.lse.data = scene.lse.data;
      const nyb_status status = nyb_attention_run(context, &call, staged.workspace,
                                                  staged.workspace_bytes, check_stage_stream());
      if (status == NYB_ERROR_POINTER) {
        check_pass(set.tallies[set.scores]);
      } else {
        check_fail(run, set.tallies[set.scores], "host pointer %d of 6: got %s, want %s", i,
                   nyb_status_name(status), nyb_status_name(NYB_ERROR_POINTER));
      }
    }
    device_synchronize(check_stage_stream());
  }
  scene_free(&scene);
}

/* ---- All ----------------------------------------------------------------------------------------
 */

static void check_family(check_run *run, const family *f, int format, int turn) {
  const bool tiny = run->options.sanitizer;
  check_lengths(run, f, format);
  check_no_capacity(run, f, format);
  check_rows(run, f, format);
  if (tiny) return;
  check_kinds(run, f, format, turn);
  check_one_hot(run, f, format);
  if (f->always) check_not_finite(run, f, format);
  check_long(run, f, format);
  check_family_accuracy(run, f, format);
  check_family_invariants(run, f, format);
  check_graph(run, f, format);
  if (f->always && f->path == NYB_PATH_FUSED) check_host_pointers(run, f, format);
}

/* Under a sanitizer a width takes one family in nine, all of them together every one. */
static bool wants_family(const check_run *run, const family *f, int format, int index) {
  if (run->options.sanitizer) return (index + format) % 9 == 0;
  return !run->options.quick || f->always || (index + format) % 3 == 0;
}

void check_attention_cuda(check_run *run) {
  for (int format = 0; format < FORMATS; format++) {
    const bool plain = format < PLAIN_FORMATS;
    const family *families = plain ? plain_families : affine_families;
    const int count = plain ? PLAIN_FAMILIES : AFFINE_FAMILIES;
    nyb_format any;
    char name[16];
    choose_format(format, 128, 0, &any);
    check_format_name(&any, name);
    if (!check_wants_format(run, name)) continue;
    check_attention_features(run, format);
    check_whole_units(run, format);
    for (int i = 0; i < count && !run->options.features; i++) {
      check_step(run, "attention", format * 100 + i, FORMATS * 100);
      if (wants_family(run, &families[i], format, i)) {
        check_family(run, &families[i], format, i + format);
      }
    }
  }
  check_step(run, "attention", FORMATS * 100, FORMATS * 100);
}
