/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens of attention stand: starts, pages and rings give the bits of the same tokens
 * laid out one after the other; parts give what the oracle says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_places.h"
#include "check_attention.h"
#include "check_stage.h"

/* ---- Random shapes ------------------------------------------------------------------------ */

int64_t check_pick(check_random *random, const int64_t *from, int64_t count) {
  return from[check_random_below(random, count)];
}

nyb_format places_random_format(check_random *random, int64_t dim) {
  nyb_format format;
  while (!choose_format((int)check_random_below(random, FORMATS), dim,
                        check_random_below(random, 9), &format)) {
  }
  return format;
}

attention_shape places_random_shape(const char *name, int64_t most_tokens, check_random *random) {
  const int64_t kv_heads = PICK(random, 1, 2);
  attention_shape shape = {
      .name = name,
      .batch = 1 + check_random_below(random, 3),
      .query_heads = kv_heads * PICK(random, 1, 3, 4),
      .kv_heads = kv_heads,
      .query_len = PICK(random, 1, 1, 1, 2, 5, 19),
      .key_dim = PICK(random, 32, 64, 96, 128),
      .value_dim = PICK(random, 32, 64, 96, 128),
      .query_dtype = (nyb_dtype)PICK(random, NYB_F32, NYB_F16, NYB_BF16),
      .out_dtype = (nyb_dtype)PICK(random, NYB_F32, NYB_F16, NYB_BF16),
      .mask = (nyb_mask)PICK(random, NYB_MASK_NONE, NYB_MASK_CAUSAL),
      .rounding = (nyb_rounding)PICK(random, NYB_ROUNDING_EXACT, NYB_ROUNDING_MLX),
      .swapped = check_random_below(random, 2) == 1,
      .gap = check_random_below(random, 2),
      .seed = check_random_bits(random),
  };
  shape.key_format = places_random_format(random, shape.key_dim);
  shape.value_format = places_random_format(random, shape.value_dim);
  for (int64_t b = 0; b < shape.batch; b++) {
    shape.lengths[b] = (int32_t)check_random_below(random, most_tokens + 1);
    if (shape.lengths[b] > shape.capacity_tokens) shape.capacity_tokens = shape.lengths[b];
  }
  shape.capacity_tokens += check_random_below(random, 80);
  if (shape.capacity_tokens < 2) shape.capacity_tokens = 2;
  return shape;
}

int64_t places_random_most_tokens(check_random *random) { return PICK(random, 70, 300, 300, 2600); }

void places_random_parts(check_random *random, attention_shape shapes[SCENE_PARTS]) {
  shapes[0] = places_random_shape("parts", 4, random);
  for (int part = 1; part < SCENE_PARTS; part++) {
    shapes[part] = shapes[0];
    shapes[part].seed = check_random_bits(random);
    shapes[part].key_format = places_random_format(random, shapes[0].key_dim);
    shapes[part].value_format = places_random_format(random, shapes[0].value_dim);
  }
  shapes[0].capacity_tokens = PICK(random, 0, 1, 4, 64, 100);
  shapes[1].capacity_tokens = PICK(random, 0, 5, 300, 300, 1500);
  shapes[2].capacity_tokens = PICK(random, 0, 1, 32, 50, 130);
  for (int64_t b = 0; b < shapes[0].batch; b++) {
    const int64_t room = shapes[0].capacity_tokens;
    const bool full = check_random_below(random, 4) != 0;
    shapes[0].lengths[b] = (int32_t)(full ? room : check_random_below(random, room + 1));
    for (int part = 1; part < SCENE_PARTS; part++) {
      const int64_t most = shapes[part].capacity_tokens;
      const bool empty = shapes[0].lengths[b] < room;
      shapes[part].lengths[b] = (int32_t)(empty ? 0 : check_random_below(random, most + 1));
    }
  }
}

void places_add_features(check_random *random, attention_shape *shape) {
  if (check_random_below(random, 3) == 0) {
    shape->window_tokens = PICK(random, 1, 20, 64, 200, 1100);
    shape->window_keep_tokens = PICK(random, 0, 0, 4, 70);
  }
  if (check_random_below(random, 3) == 0) {
    shape->mask_array = (scene_mask){
        .kind = (nyb_mask_array_kind)PICK(random, NYB_MASK_ARRAY_BOOL, NYB_MASK_ARRAY_ADD),
        .f32 = check_random_below(random, 2) == 1,
        .of_batch = check_random_below(random, 2) == 1,
        .of_head = check_random_below(random, 2) == 1,
        .of_row = check_random_below(random, 2) == 1,
        .class = (mask_class)PICK(random, MASK_HOLES, MASK_TILES, MASK_ROWS)};
  }
  shape->sinks = check_random_below(random, 4) == 0;
  shape->slopes = check_random_below(random, 4) == 0;
  if (check_random_below(random, 4) == 0) shape->softcap = 20;
}

/* ---- The checks --------------------------------------------------------------------------- */

enum { PAGES_KIND = 1, PLACED_KINDS = 3, PARTS_KIND = PLACED_KINDS };
static const char *const kinds[] = {"attention_starts", "attention_pages", "attention_ring",
                                    "attention_parts"};

static check_tally *tally_of(check_run *run, int kind, nyb_isa isa, nyb_path path) {
  char name[40];
  snprintf(name, sizeof name, "%s%s", kinds[kind], path == NYB_PATH_COMPAT ? "_compat" : "");
  return check_find(run, name, "", isa);
}

static void count(check_run *run, check_tally *tally, const attention_scene *scene, bool good,
                  const char *text) {
  char what[320];
  if (good) {
    check_pass(tally);
    return;
  }
  scene_describe(scene, what, sizeof what);
  check_fail(run, tally, "%s: %s", what, text);
}

static bool place(int kind, bool for_decode, attention_scene *scene, check_random *random,
                  placed_scene *placed) {
  const int64_t page_tokens =
      for_decode ? PICK(random, 16, 32, 64, 128) : PICK(random, 16, 24, 32, 64, 128, 192);
  const int64_t shared_pages = check_random_below(random, 4);
  switch (kind) {
    case 0: return place_behind_padding(scene, random, placed);
    case 1:
      scene_share_tokens(scene, shared_pages * page_tokens);
      return place_in_pages(scene, page_tokens, shared_pages, random, placed);
    default: return place_in_ring(scene, PICK(random, 0, 1), random, placed);
  }
}

/* Whether the second scene's call, or the first's placed one, leaves the bits of the first.
 * Returns so. */
static bool compare_bits(check_run *run, int kind, nyb_isa isa, nyb_path path,
                         attention_scene *want_of, attention_scene *scene, placed_scene *placed) {
  check_tally *tally = tally_of(run, kind, isa, path);
  const check_library *library = run->options.library;
  char text[256] = "memory ran out";
  if (tally == NULL) return false;
  const size_t bytes = (size_t)scene_bits_bytes(scene);
  uint8_t *want = malloc(bytes), *got = malloc(bytes);
  bool good = want != NULL && got != NULL;
  if (good && scene_run(want_of, library, run->contexts[isa], path) != NYB_OK) {
    snprintf(text, sizeof text, "laid out one after the other: %s", check_error());
    good = false;
  }
  if (good) {
    scene_bits(want_of, want);
    good = placed_run(scene, placed, library, run->contexts[isa], path, got, text, sizeof text) ==
           NYB_OK;
  }
  if (good && memcmp(want, got, bytes) != 0) {
    snprintf(text, sizeof text, "other bits than those of tokens laid out one after the other");
    good = false;
  }
  count(run, tally, scene, good, text);
  free(want);
  free(got);
  return good;
}

/* The format that is asked for, for K and V. */
static void use_asked_format(const check_run *run, check_random *random, attention_shape *shape) {
  char name[16];
  if (run->options.format == NULL) return;
  do {
    shape->key_format = places_random_format(random, shape->key_dim);
    check_format_name(&shape->key_format, name);
  } while (!check_wants_format(run, name));
  shape->value_dim = shape->key_dim;
  shape->value_format = shape->key_format;
}

static bool on_gpu(const check_run *run) { return run->options.backend == NYB_BACKEND_CUDA; }

/* Whether the same fused kernel takes the tokens laid out one after the other; *decodes: whether
 * it is decode. */
static bool takes_alike(check_run *run, const attention_scene *scene, const placed_scene *placed,
                        bool *decodes) {
  attention_scene as_placed = *scene;
  kernel_set sets[2];
  *decodes = false;
  as_placed.call = placed->call;
  if (!find_kernels(run, scene, NYB_ISA_CUDA, NYB_PATH_FUSED, &sets[0]) ||
      !find_kernels(run, &as_placed, NYB_ISA_CUDA, NYB_PATH_FUSED, &sets[1]) ||
      strcmp(sets[0].key_kernel, sets[1].key_kernel) != 0) {
    return false;
  }
  *decodes = is_decode(&sets[0]);
  return true;
}

/* What CUDA's decode kernel takes: few rows of 16 bits over affine rows; pages without gaps. */
static void settle_for_decode(int kind, check_random *random, attention_shape *shape) {
  shape->query_dtype = (nyb_dtype)PICK(random, NYB_F16, NYB_BF16);
  shape->out_dtype = (nyb_dtype)PICK(random, NYB_F16, NYB_BF16);
  shape->query_len = PICK(random, 1, 1, 2, 5);
  shape->packed = kind == PAGES_KIND;
  if (shape->packed) shape->gap = 0; /* of queries, too */
}

/* for_decode: with queries that CUDA's decode kernel takes, aligned as engines have them. */
static void check_placed(check_run *run, int kind, bool for_decode, check_random *random) {
  attention_shape shape =
      places_random_shape(kinds[kind], places_random_most_tokens(random), random);
  attention_scene scene;
  placed_scene placed = {0};
  if (run->ended) return;
  use_asked_format(run, random, &shape);
  places_add_features(random, &shape);
  if (on_gpu(run)) settle_for_gpu(&shape);
  if (for_decode) settle_for_decode(kind, random, &shape);
  check_stage_place(for_decode ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  bool made = scene_make(&scene, &shape) && place(kind, for_decode, &scene, random, &placed);
  bool decodes = false;
  if (made && on_gpu(run) && !takes_alike(run, &scene, &placed, &decodes)) {
    placed_free(&placed);
    scene_free(&scene);
    shape.query_dtype = NYB_F32; /* the general kernel takes all of them */
    made = scene_make(&scene, &shape) && place(kind, for_decode, &scene, random, &placed);
  }
  if (made) {
    const bool good =
        compare_bits(run, kind, NYB_ISA_CUDA, NYB_PATH_FUSED, &scene, &scene, &placed);
    char name[40];
    snprintf(name, sizeof name, "%s_decode", kinds[kind]);
    check_tally *tally = decodes ? check_find(run, name, "", NYB_ISA_CUDA) : NULL;
    if (tally != NULL) count(run, tally, &scene, good, "as above");
    compare_bits(run, kind, NYB_ISA_CUDA, NYB_PATH_COMPAT, &scene, &scene, &placed);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      compare_bits(run, kind, isa, NYB_PATH_FUSED, &scene, &scene, &placed);
    }
    compare_bits(run, kind, NYB_ISA_SCALAR, NYB_PATH_COMPAT, &scene, &scene, &placed);
  }
  placed_free(&placed);
  scene_free(&scene);
  check_stage_place(STAGE_AS_ON_HOST);
}

/* The middle part chooses the kernel, which takes the others in whatever format. A call without
 * room in either of them is a plain one, which tensor cores may take. */
static void settle_parts_for_gpu(attention_shape shapes[SCENE_PARTS]) {
  settle_for_gpu(&shapes[1]);
  if (shapes[0].capacity_tokens + shapes[2].capacity_tokens == 0) shapes[2].capacity_tokens = 1;
  for (int part = 0; part < SCENE_PARTS; part++) {
    shapes[part].key_dim = shapes[1].key_dim;
    shapes[part].value_dim = shapes[1].value_dim;
    nyb_format *const formats[] = {&shapes[part].key_format, &shapes[part].value_format};
    for (int i = 0; i < 2; i++) {
      if (formats[i]->group_size > shapes[1].key_dim) formats[i]->group_size = 32;
    }
  }
}

static void check_fused_parts(check_run *run, parts_scene *parts, nyb_isa isa) {
  check_tally *tally = tally_of(run, PARTS_KIND, isa, NYB_PATH_FUSED);
  char text[256] = "memory ran out";
  if (tally == NULL) return;
  attention_scene *scene = &parts->scenes[0];
  const oracle_arithmetic arithmetic = isa == NYB_ISA_CUDA ? ORACLE_CUDA_F32 : ORACLE_CPU;
  double worst = 0;
  uint8_t *bits = malloc((size_t)scene_bits_bytes(scene));
  const bool good = bits != NULL &&
                    placed_run(scene, &parts->placed, run->options.library, run->contexts[isa],
                               NYB_PATH_FUSED, bits, text, sizeof text) == NYB_OK &&
                    parts_right(parts, arithmetic, bits, &worst, text, sizeof text);
  if (scene->shape.rounding == NYB_ROUNDING_EXACT) check_note_error(tally, worst, 1);
  count(run, tally, scene, good, text);
  free(bits);
}

/* On the compat path the bits are those of one plain cache. */
static void check_parts(check_run *run, check_random *random) {
  const nyb_format floats = {.scheme = NYB_PLAIN, .dtype = NYB_F32};
  attention_shape shapes[SCENE_PARTS];
  attention_scene whole = {0};
  parts_scene parts;
  if (run->ended) return;
  places_random_parts(random, shapes);
  use_asked_format(run, random, &shapes[1]);
  for (int part = 0; part < SCENE_PARTS; part++) shapes[part].value_dim = shapes[1].value_dim;
  if (run->options.format != NULL) shapes[0].value_format = shapes[2].value_format = floats;
  if (on_gpu(run)) settle_parts_for_gpu(shapes);
  if (parts_make(&parts, shapes) &&
      parts_make_whole(&parts, &floats, &floats, widen_stored_row, &whole)) {
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
      check_fused_parts(run, &parts, isa);
    }
    compare_bits(run, PARTS_KIND, NYB_ISA_SCALAR, NYB_PATH_COMPAT, &whole, &parts.scenes[0],
                 &parts.placed);
    compare_bits(run, PARTS_KIND, NYB_ISA_CUDA, NYB_PATH_COMPAT, &whole, &parts.scenes[0],
                 &parts.placed);
  }
  scene_free(&whole);
  parts_free(&parts);
}

void check_attention_places(check_run *run) {
  const int cases = run->options.sanitizer ? 2 : run->options.quick ? 8 : 50;
  check_random random = {.state = 99};
  for (int i = 0; i < cases; i++) {
    check_step(run, "attention_places", i, cases);
    for (int kind = 0; kind < PLACED_KINDS; kind++) check_placed(run, kind, false, &random);
    check_parts(run, &random);
    for (int kind = 0; kind < PLACED_KINDS && on_gpu(run); kind++)
      check_placed(run, kind, true, &random);
  }
}
