/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences in three parts, each with formats of its own: the first tokens, k and v, the last ones
 * in a ring.
 *
 * The fused path is held against the oracle. It takes the pieces into which chunks and parts cut a
 * sequence one by one, each from an empty state and with tiles counted from the piece's own begin;
 * so the oracle gets each piece as a sequence of its own, and what it says is merged in double
 * precision. With w_i = exp(lse_i - lse) for piece i, e_i for the bound of lse_i's error and err_i
 * for that of out_i's, the kernel's weights are w'_i = w_i exp(d_i) / sum w_j exp(d_j), |d_i| <=
 * e_i, and
 *
 *   out' - out = sum w'_i (out'_i - out_i) + sum w_i (exp(d_i) - 1) (out_i - out) / sum w_j
 * exp(d_j) |out' - out| <= exp(2 max e) sum w_i err_i
 *                   + sum w_i (exp(e_i) - 1) |out_i - out| / sum w_j exp(-e_j)
 *
 * The f32 folds themselves take two products, a sum and an exp each (good to 4 units, with an
 * argument whose two roundings are relative to what lies between the maxima): 12 units a fold.
 *
 * The compat path takes tokens one after the other, whatever their parts, so there is a sharper
 * check: the same bits as for one plain f32 cache of the elements scale * code + bias. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "places_cases.h"

enum { CHUNK_TOKENS = 1024, PARTS = 3 };

/* ---- Scenes of parts ---------------------------------------------------------------------- */

typedef struct parts_case {
  attention_scene scenes[PARTS];
  placed_scene placed;
} parts_case;

static int64_t sequence_length(const parts_case *c, int64_t b) {
  return (int64_t)c->scenes[0].shape.lengths[b] + c->scenes[1].shape.lengths[b] +
         c->scenes[2].shape.lengths[b];
}

/* The second and third scene have the first one's dims and other formats, lengths and data. */
static void make_case(parts_case *c, const attention_shape shapes[PARTS]) {
  for (int part = 0; part < PARTS; part++) {
    assert_true(scene_make(&c->scenes[part], &shapes[part]));
  }
  assert_true(place_in_parts(c->scenes, &c->placed));
}

static void free_case(parts_case *c) {
  placed_free(&c->placed);
  for (int part = 0; part < PARTS; part++) scene_free(&c->scenes[part]);
}

/* Parts of any length, empty ones among them; nothing stands behind a first part that is not full.
 */
static void random_shapes(check_random *random, attention_shape shapes[PARTS]) {
  shapes[0] = random_shape("parts", 4, random);
  for (int part = 1; part < PARTS; part++) {
    shapes[part] = shapes[0];
    shapes[part].seed = check_random_bits(random);
    shapes[part].key_format = random_format(random, shapes[0].key_dim);
    shapes[part].value_format = random_format(random, shapes[0].value_dim);
  }
  shapes[0].capacity_tokens = PICK(random, 0, 1, 4, 64, 100);
  shapes[1].capacity_tokens = PICK(random, 0, 5, 300, 300, 1500);
  shapes[2].capacity_tokens = PICK(random, 0, 1, 32, 50, 130);
  for (int64_t b = 0; b < shapes[0].batch; b++) {
    const int64_t room = shapes[0].capacity_tokens;
    const bool full = check_random_below(random, 4) != 0;
    shapes[0].lengths[b] = (int32_t)(full ? room : check_random_below(random, room + 1));
    for (int part = 1; part < PARTS; part++) {
      const int64_t most = shapes[part].capacity_tokens;
      const bool empty = shapes[0].lengths[b] < room;
      shapes[part].lengths[b] = (int32_t)(empty ? 0 : check_random_below(random, most + 1));
    }
  }
}

/* ---- What the oracle says ----------------------------------------------------------------- */

/* Tokens [begin, end) of the sequence, all of one part and of one chunk. */
typedef struct piece {
  int part;
  int64_t begin, end;
  oracle_rows keys, values;
} piece;

enum { MAX_PIECES = 8 };

static nyb_stored from_token(const nyb_stored *stored, int64_t token) {
  nyb_stored moved = *stored;
  const bool plain = stored->format.scheme == NYB_PLAIN;
  const int64_t bytes = stored->format.dtype == NYB_F32 ? 4 : 2;
  moved.codes = (const char *)stored->codes + token * stored->codes_stride[2] * (plain ? bytes : 4);
  if (plain) return moved;
  moved.scales = (const char *)stored->scales + token * stored->scales_stride[2] * bytes;
  moved.biases = (const char *)stored->biases + token * stored->biases_stride[2] * bytes;
  return moved;
}

/* Of one KV head of a sequence. */
static int cut_into_pieces(const parts_case *c, int64_t b, int64_t head, piece *pieces) {
  int count = 0;
  int64_t part_begin = 0;
  for (int part = 0; part < PARTS; part++) {
    const attention_scene *scene = &c->scenes[part];
    const int64_t part_end = part_begin + scene->shape.lengths[b];
    for (int64_t begin = part_begin, end; begin < part_end; begin = end) {
      end = (begin / CHUNK_TOKENS + 1) * CHUNK_TOKENS;
      if (end > part_end) end = part_end;
      assert_true(count < MAX_PIECES);
      piece *p = &pieces[count++];
      *p = (piece){.part = part, .begin = begin, .end = end};
      const nyb_stored k = from_token(&scene->call.k, begin - part_begin);
      const nyb_stored v = from_token(&scene->call.v, begin - part_begin);
      const attention_shape *s = &scene->shape;
      assert_true(oracle_rows_decode(&k, b, head, end - begin, s->key_dim, &p->keys));
      assert_true(oracle_rows_decode(&v, b, head, end - begin, s->value_dim, &p->values));
    }
    part_begin = part_end;
  }
  return count;
}

static void free_pieces(piece *pieces, int count) {
  for (int i = 0; i < count; i++) {
    oracle_rows_free(&pieces[i].keys);
    oracle_rows_free(&pieces[i].values);
  }
}

/* Merges the pieces' results into the last place of `results`, as the head of this file says. */
static void merge(oracle_result *results, int count, int64_t dim, oracle_result *merged) {
  double most = -INFINITY, sum = 0, most_error = 0, least_weights = 0;
  for (int i = 0; i < count; i++) {
    most = fmax(most, results[i].lse);
    most_error = fmax(most_error, results[i].lse_error);
  }
  for (int i = 0; i < count; i++) sum += exp(results[i].lse - most);
  merged->lse = count > 0 && most > -INFINITY ? most + log(sum) : -INFINITY;
  const double folds = 12 * ORACLE_F32_UNIT * count;
  merged->lse_error =
      merged->lse == -INFINITY ? 0 : most_error + folds + 8 * ORACLE_F32_UNIT * fabs(merged->lse);
  for (int64_t d = 0; d < dim; d++) merged->out[d] = merged->out_error[d] = 0;
  if (merged->lse == -INFINITY) return;
  for (int i = 0; i < count; i++) {
    const double w = exp(results[i].lse - merged->lse);
    least_weights += w * exp(-results[i].lse_error);
    for (int64_t d = 0; d < dim; d++) merged->out[d] += w * results[i].out[d];
  }
  for (int i = 0; i < count; i++) {
    const double w = exp(results[i].lse - merged->lse), e = results[i].lse_error;
    /* What lies between two maxima is at most what lies between two lse and log(1024). */
    const double fold = folds + 4 * ORACLE_F32_UNIT * (fabs(merged->lse - results[i].lse) + 7);
    for (int64_t d = 0; d < dim; d++) {
      const double out = results[i].out[d], error = results[i].out_error[d];
      merged->out_error[d] += exp(2 * most_error) * w * (error + fold * (fabs(out) + error)) +
                              w * expm1(e) * fabs(out - merged->out[d]) / least_weights + 0x1p-120;
    }
  }
}

static void load_query(const attention_scene *scene, int64_t b, int64_t head, int64_t row,
                       double *query) {
  const nyb_input *q = &scene->call.q;
  const int64_t at = b * q->stride[0] + head * q->stride[1] + row * q->stride[2];
  for (int64_t d = 0; d < scene->shape.key_dim; d++)
    query[d] = oracle_load(q->data, q->dtype, at + d);
}

/* Tokens of the whole sequence that a query row sees. */
static int64_t visible_tokens(const parts_case *c, int64_t b, int64_t row) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t length = sequence_length(c, b);
  if (s->mask == NYB_MASK_NONE) return length;
  const int64_t visible = length - s->query_len + row + 1;
  return visible > 0 ? visible : 0;
}

static void expect_row(const parts_case *c, const piece *pieces, int count, int64_t visible,
                       const double *query, oracle_result *merged) {
  const attention_shape *s = &c->scenes[0].shape;
  double *memory = malloc(sizeof(double) * (size_t)(2 * MAX_PIECES * s->value_dim));
  oracle_result results[MAX_PIECES];
  int used = 0;
  assert_non_null(memory);
  for (; used < count && pieces[used].begin < visible; used++) {
    const piece *p = &pieces[used];
    const oracle_attention attention = {.keys = &p->keys,
                                        .values = &p->values,
                                        .query_dtype = s->query_dtype,
                                        .out_dtype = s->out_dtype,
                                        .scale = c->placed.call.scale,
                                        .rounding = s->rounding,
                                        .path = NYB_PATH_FUSED};
    results[used].out = memory + 2 * used * s->value_dim;
    results[used].out_error = results[used].out + s->value_dim;
    const int64_t end = p->end < visible ? p->end : visible;
    assert_true(oracle_attention_row(&attention, query, end - p->begin, NULL, &results[used]));
  }
  merge(results, used, s->value_dim, merged);
  free(memory);
}

/* bits: as scene_bits() orders them. */
static void compare_row(const parts_case *c, const uint8_t *bits, int64_t row,
                        const oracle_result *want) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t rows = s->batch * s->query_heads * s->query_len;
  const float *lses =
      (const float *)(const void *)(bits + rows * s->value_dim * (s->out_dtype == NYB_F32 ? 4 : 2));
  float lse;
  memcpy(&lse, lses + row, sizeof lse);
  if (!oracle_within(NYB_F32, (double)lse, want->lse, want->lse_error)) {
    fail_msg("row %lld: lse %.9g, want %.9g +- %.3g", (long long)row, (double)lse, want->lse,
             want->lse_error);
  }
  for (int64_t d = 0; d < s->value_dim; d++) {
    const double got = oracle_load(bits, s->out_dtype, row * s->value_dim + d);
    if (!oracle_within(s->out_dtype, got, want->out[d], want->out_error[d])) {
      fail_msg("row %lld, element %lld: %.9g, want %.9g +- %.3g", (long long)row, (long long)d, got,
               want->out[d], want->out_error[d]);
    }
  }
}

static void assert_right(const parts_case *c, const uint8_t *bits) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t heads_per_kv = s->query_heads / s->kv_heads;
  double *memory = malloc(sizeof(double) * (size_t)(s->key_dim + 2 * s->value_dim));
  assert_non_null(memory);
  oracle_result want = {.out = memory + s->key_dim,
                        .out_error = memory + s->key_dim + s->value_dim};
  for (int64_t i = 0; i < s->batch * s->kv_heads; i++) {
    const int64_t b = i / s->kv_heads, kv_head = i % s->kv_heads;
    piece pieces[MAX_PIECES];
    const int count = cut_into_pieces(c, b, kv_head, pieces);
    for (int64_t j = 0; j < heads_per_kv * s->query_len; j++) {
      const int64_t head = kv_head * heads_per_kv + j / s->query_len, row = j % s->query_len;
      load_query(&c->scenes[0], b, head, row, memory);
      expect_row(c, pieces, count, visible_tokens(c, b, row), memory, &want);
      compare_row(c, bits, (b * s->query_heads + head) * s->query_len + row, &want);
    }
    free_pieces(pieces, count);
  }
  free(memory);
}

static void test_fused_against_the_oracle(void **state) {
  (void)state;
  check_random random = {.state = 11};
  for (int i = 0; i < PLACES_CASES; i++) {
    attention_shape shapes[PARTS];
    parts_case c;
    random_shapes(&random, shapes);
    make_case(&c, shapes);
    const size_t bytes = (size_t)scene_bits_bytes(&c.scenes[0]);
    uint8_t *bits = malloc(bytes);
    assert_non_null(bits);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      if (places_contexts[isa][0] == NULL) continue;
      places_run(&c.scenes[0], &c.placed, isa, 0, NYB_PATH_FUSED, bits);
      assert_right(&c, bits);
      assert_bits_again(&c.scenes[0], &c.placed, isa, NYB_PATH_FUSED, bits, "parts");
    }
    free(bits);
    free_case(&c);
  }
}

/* ---- One part instead of three ------------------------------------------------------------ */

/* scale * code + bias as f32 arithmetic has it, to a plain f32 row. */
static void widen_row(const nyb_stored *from, const int64_t at[3], const nyb_stored *to,
                      const int64_t to_at[3], int64_t dim) {
  const nyb_format *f = &from->format;
  float *out = (float *)(uintptr_t)to->codes;
  out += to_at[0] * to->codes_stride[0] + to_at[1] * to->codes_stride[1] +
         to_at[2] * to->codes_stride[2];
  const int64_t code_at =
      at[0] * from->codes_stride[0] + at[1] * from->codes_stride[1] + at[2] * from->codes_stride[2];
  if (f->scheme == NYB_PLAIN) {
    for (int64_t d = 0; d < dim; d++)
      out[d] = (float)oracle_load(from->codes, f->dtype, code_at + d);
    return;
  }
  const int64_t scale_at = at[0] * from->scales_stride[0] + at[1] * from->scales_stride[1] +
                           at[2] * from->scales_stride[2];
  const int64_t bias_at = at[0] * from->biases_stride[0] + at[1] * from->biases_stride[1] +
                          at[2] * from->biases_stride[2];
  for (int64_t d = 0; d < dim; d++) {
    const int64_t group = d / f->group_size;
    const float scale = (float)oracle_load(from->scales, f->dtype, scale_at + group);
    const float bias = (float)oracle_load(from->biases, f->dtype, bias_at + group);
    const float code = (float)oracle_code((const uint32_t *)from->codes + code_at, f->bits, d);
    const float product = scale * code;
    out[d] = product + bias;
  }
}

typedef void (*row_copier)(const nyb_stored *from, const int64_t from_at[3], const nyb_stored *to,
                           const int64_t to_at[3], int64_t dim);

/* The same sequences in one cache of the given formats, with the queries of the first scene. */
static void make_whole(const parts_case *c, const nyb_format *key, const nyb_format *value,
                       row_copier copy, attention_scene *whole) {
  attention_shape shape = c->scenes[0].shape;
  shape.key_format = *key;
  shape.value_format = *value;
  for (int part = 1; part < PARTS; part++) {
    shape.capacity_tokens += c->scenes[part].shape.capacity_tokens;
  }
  for (int64_t b = 0; b < shape.batch; b++) shape.lengths[b] = (int32_t)sequence_length(c, b);
  assert_true(scene_make(whole, &shape));
  memcpy(whole->q.memory, c->scenes[0].q.memory, whole->q.memory_bytes);
  check_buffer_seal(&whole->q);
  for (int64_t i = 0; i < shape.batch * shape.kv_heads; i++) {
    int64_t token = 0;
    for (int part = 0; part < PARTS; part++) {
      const attention_scene *scene = &c->scenes[part];
      for (int64_t t = 0; t < scene->shape.lengths[i / shape.kv_heads]; t++, token++) {
        const int64_t from[3] = {i / shape.kv_heads, i % shape.kv_heads, t};
        const int64_t to[3] = {from[0], from[1], token};
        copy(&scene->call.k, from, &whole->call.k, to, shape.key_dim);
        copy(&scene->call.v, from, &whole->call.v, to, shape.value_dim);
      }
    }
  }
  stored_buffers *both[] = {&whole->k, &whole->v};
  for (int i = 0; i < 2; i++) {
    check_buffer_seal(&both[i]->codes);
    check_buffer_seal(&both[i]->scales);
    check_buffer_seal(&both[i]->biases);
  }
}

static void assert_same_as_whole(parts_case *c, attention_scene *whole, nyb_isa isa,
                                 nyb_path path) {
  char shape[320];
  const size_t bytes = (size_t)scene_bits_bytes(whole);
  uint8_t *want = malloc(bytes), *got = malloc(bytes);
  assert_non_null(want);
  assert_non_null(got);
  assert_int_equal(scene_run(whole, &check_nybble, places_contexts[isa][0], path), NYB_OK);
  scene_bits(whole, want);
  places_run(&c->scenes[0], &c->placed, isa, 0, path, got);
  scene_describe(whole, shape, sizeof shape);
  if (memcmp(want, got, bytes) != 0) fail_msg("%s: other bits in parts", shape);
  free(want);
  free(got);
}

static void test_compat_equals_plain_floats(void **state) {
  (void)state;
  const nyb_format floats = {.scheme = NYB_PLAIN, .dtype = NYB_F32};
  check_random random = {.state = 12};
  for (int i = 0; i < PLACES_CASES; i++) {
    attention_shape shapes[PARTS];
    parts_case c;
    attention_scene whole;
    random_shapes(&random, shapes);
    make_case(&c, shapes);
    make_whole(&c, &floats, &floats, widen_row, &whole);
    assert_same_as_whole(&c, &whole, NYB_ISA_SCALAR, NYB_PATH_COMPAT);
    scene_free(&whole);
    free_case(&c);
  }
}

/* Parts that end where chunks do, in one format, are one sequence to the last bit. */
static void test_whole_chunks_are_one_sequence(void **state) {
  (void)state;
  check_random random = {.state = 13};
  for (int i = 0; i < PLACES_CASES / 2; i++) {
    attention_shape shapes[PARTS];
    parts_case c;
    attention_scene whole;
    random_shapes(&random, shapes);
    for (int part = 0; part < PARTS; part++) {
      shapes[part].key_format = shapes[0].key_format;
      shapes[part].value_format = shapes[0].value_format;
      shapes[part].capacity_tokens = part == 2 ? 200 : CHUNK_TOKENS;
      for (int64_t b = 0; b < shapes[0].batch; b++) {
        shapes[part].lengths[b] =
            part == 2 ? (int32_t)check_random_below(&random, 201) : CHUNK_TOKENS;
      }
    }
    make_case(&c, shapes);
    make_whole(&c, &shapes[0].key_format, &shapes[0].value_format, copy_stored_row, &whole);
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
      if (places_contexts[isa][0] == NULL) continue;
      assert_same_as_whole(&c, &whole, isa, NYB_PATH_FUSED);
    }
    scene_free(&whole);
    free_case(&c);
  }
}

/* ---- Kernels ------------------------------------------------------------------------------ */

/* Calls of the kernels whose names begin so, on the scalar contexts. */
static int64_t calls_of(const nyb_context *context, const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    assert_int_equal(nyb_kernel_at(context, i, &kernel), NYB_OK);
    if (strcmp(kernel.name, name) == 0) return kernel.calls;
  }
  fail_msg("no kernel %s", name);
  return -1;
}

static void test_each_kernel_counts(void **state) {
  (void)state;
  static const struct {
    const char *name;
    int64_t calls;
  } kernels[] = {
      {"attention_queries_plain_bf16_scalar", 1}, {"attention_scores_plain_bf16_scalar", 1},
      {"attention_queries_affine4_scalar", 1},    {"attention_scores_affine4_scalar", 1},
      {"attention_scores_affine8_scalar", 0},     {"attention_values_affine8_scalar", 1},
      {"attention_columns_affine8_scalar", 1},    {"attention_values_plain_f16_scalar", 1},
      {"attention_columns_plain_f16_scalar", 1},  {"attention_values_affine4_scalar", 0},
      {"attention_softmax_plain_f32_scalar", 1},
  };
  const nyb_format bf16 = {.scheme = NYB_PLAIN, .dtype = NYB_BF16};
  const nyb_format f16 = {.scheme = NYB_PLAIN, .dtype = NYB_F16};
  const nyb_format four = {.scheme = NYB_AFFINE, .bits = 4, .group_size = 32, .dtype = NYB_BF16};
  const nyb_format eight = {.scheme = NYB_AFFINE, .bits = 8, .group_size = 64, .dtype = NYB_F32};
  const nyb_format keys[] = {bf16, four, bf16}, values[] = {f16, eight, f16};
  attention_shape shapes[PARTS];
  parts_case c;
  for (int part = 0; part < PARTS; part++) {
    shapes[part] = decode_shape("kernels", 4, 2, 64, 40);
    shapes[part].capacity_tokens = 40;
    shapes[part].query_dtype = shapes[part].out_dtype = NYB_BF16;
    shapes[part].key_format = keys[part];
    shapes[part].value_format = values[part];
  }
  make_case(&c, shapes);
  nyb_context *context = places_contexts[NYB_ISA_SCALAR][1];
  uint8_t *bits = malloc((size_t)scene_bits_bytes(&c.scenes[0]));
  assert_non_null(bits);
  nyb_counters_clear(context);
  places_run(&c.scenes[0], &c.placed, NYB_ISA_SCALAR, 1, NYB_PATH_FUSED, bits);
  for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
    if (calls_of(context, kernels[i].name) != kernels[i].calls) fail_msg("%s", kernels[i].name);
  }
  free(bits);
  free_case(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fused_against_the_oracle),
      cmocka_unit_test(test_compat_equals_plain_floats),
      cmocka_unit_test(test_whole_chunks_are_one_sequence),
      cmocka_unit_test(test_each_kernel_counts),
  };
  return cmocka_run_group_tests(tests, places_open, places_close);
}
