/* SPDX-License-Identifier: Apache-2.0 */
/* What is expected of sequences in three parts.
 *
 * The fused path takes the pieces into which chunks and parts cut a sequence one by one, each from
 * an empty state and with tiles counted from the piece's own begin; so the oracle gets each piece
 * as a sequence of its own, and what it says is merged in double precision. With w_i = exp(lse_i -
 * lse) for piece i, e_i for the bound of lse_i's error and err_i for that of out_i's, the kernel's
 * weights are w'_i = w_i exp(d_i) / sum w_j exp(d_j), |d_i| <= e_i, and
 *
 *   out' - out = sum w'_i (out'_i - out_i) + sum w_i (exp(d_i) - 1) (out_i - out) / sum w_j
 * exp(d_j)
 *
 *   |out' - out| <= exp(2 max e) sum w_i err_i
 *                   + sum w_i (exp(e_i) - 1) |out_i - out| / sum w_j exp(-e_j)
 *
 * The f32 folds themselves take two products, a sum and an exp each (good to 4 units, with an
 * argument whose two roundings are relative to what lies between the maxima): 12 units a fold. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_places.h"

enum { CHUNK_TOKENS = 1024, MAX_PIECES = 8 };

bool parts_make(parts_scene *parts, const attention_shape shapes[SCENE_PARTS]) {
  *parts = (parts_scene){0};
  for (int part = 0; part < SCENE_PARTS; part++) {
    if (!scene_make(&parts->scenes[part], &shapes[part])) return false;
  }
  return place_in_parts(parts->scenes, &parts->placed);
}

void parts_free(parts_scene *parts) {
  placed_free(&parts->placed);
  for (int part = 0; part < SCENE_PARTS; part++) scene_free(&parts->scenes[part]);
}

static int64_t sequence_length(const parts_scene *c, int64_t b) {
  return (int64_t)c->scenes[0].shape.lengths[b] + c->scenes[1].shape.lengths[b] +
         c->scenes[2].shape.lengths[b];
}

/* ---- What the oracle says ----------------------------------------------------------------- */

/* Tokens [begin, end) of the sequence, all of one part and of one chunk. */
typedef struct piece {
  int part;
  int64_t begin, end;
  oracle_rows keys, values;
} piece;

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

/* Of one KV head of a sequence; -1 where memory ran out. */
static int cut_into_pieces(const parts_scene *c, int64_t b, int64_t head, piece *pieces) {
  int count = 0;
  int64_t part_begin = 0;
  for (int part = 0; part < SCENE_PARTS; part++) {
    const attention_scene *scene = &c->scenes[part];
    const int64_t part_end = part_begin + scene->shape.lengths[b];
    for (int64_t begin = part_begin, end; begin < part_end; begin = end) {
      end = (begin / CHUNK_TOKENS + 1) * CHUNK_TOKENS;
      if (end > part_end) end = part_end;
      if (count == MAX_PIECES) return -1;
      piece *p = &pieces[count++];
      *p = (piece){.part = part, .begin = begin, .end = end};
      const nyb_stored k = from_token(&scene->call.k, begin - part_begin);
      const nyb_stored v = from_token(&scene->call.v, begin - part_begin);
      const attention_shape *s = &scene->shape;
      if (!oracle_rows_decode(&k, b, head, end - begin, s->key_dim, &p->keys) ||
          !oracle_rows_decode(&v, b, head, end - begin, s->value_dim, &p->values)) {
        return -1;
      }
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
static int64_t visible_tokens(const parts_scene *c, int64_t b, int64_t row) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t length = sequence_length(c, b);
  if (s->mask == NYB_MASK_NONE) return length;
  const int64_t visible = length - s->query_len + row + 1;
  return visible > 0 ? visible : 0;
}

/* False where memory ran out. */
static bool expect_row(const parts_scene *c, oracle_arithmetic arithmetic, const piece *pieces,
                       int count, int64_t visible, const double *query, oracle_result *merged) {
  const attention_shape *s = &c->scenes[0].shape;
  double *memory = malloc(sizeof(double) * (size_t)(2 * MAX_PIECES * s->value_dim));
  oracle_result results[MAX_PIECES];
  int used = 0;
  bool good = memory != NULL;
  for (; good && used < count && pieces[used].begin < visible; used++) {
    const piece *p = &pieces[used];
    const oracle_attention attention = {.keys = &p->keys,
                                        .values = &p->values,
                                        .arithmetic = arithmetic,
                                        .query_dtype = s->query_dtype,
                                        .out_dtype = s->out_dtype,
                                        .scale = c->placed.call.scale,
                                        .rounding = s->rounding,
                                        .path = NYB_PATH_FUSED};
    results[used].out = memory + 2 * used * s->value_dim;
    results[used].out_error = results[used].out + s->value_dim;
    const int64_t end = p->end < visible ? p->end : visible;
    good = oracle_attention_row(&attention, query, end - p->begin, NULL, &results[used]);
  }
  if (good) merge(results, used, s->value_dim, merged);
  free(memory);
  return good;
}

/* bits: as scene_bits() orders them. */
static bool row_right(const parts_scene *c, const uint8_t *bits, int64_t row,
                      const oracle_result *want, double *worst, char *text, size_t text_size) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t rows = s->batch * s->query_heads * s->query_len;
  const uint8_t *lses = bits + rows * s->value_dim * (s->out_dtype == NYB_F32 ? 4 : 2);
  float lse;
  memcpy(&lse, lses + row * (int64_t)sizeof lse, sizeof lse);
  if (!oracle_within(NYB_F32, (double)lse, want->lse, want->lse_error)) {
    snprintf(text, text_size, "row %lld: lse %.9g, want %.9g +- %.3g", (long long)row, (double)lse,
             want->lse, want->lse_error);
    return false;
  }
  for (int64_t d = 0; d < s->value_dim; d++) {
    const double got = oracle_load(bits, s->out_dtype, row * s->value_dim + d);
    const double share =
        scene_share_of_tolerance(s->out_dtype, got, want->out[d], want->out_error[d]);
    if (share > *worst) *worst = share;
    if (oracle_within(s->out_dtype, got, want->out[d], want->out_error[d])) continue;
    snprintf(text, text_size, "row %lld, element %lld: %.9g, want %.9g +- %.3g", (long long)row,
             (long long)d, got, want->out[d], want->out_error[d]);
    return false;
  }
  return true;
}

/* The rows of the query heads that share a KV head. memory: for a query, out and its errors. */
static bool kv_head_right(const parts_scene *c, oracle_arithmetic arithmetic, int64_t b,
                          int64_t kv_head, const uint8_t *bits, double *memory, double *worst,
                          char *text, size_t text_size) {
  const attention_shape *s = &c->scenes[0].shape;
  const int64_t heads_per_kv = s->query_heads / s->kv_heads;
  oracle_result want = {.out = memory + s->key_dim,
                        .out_error = memory + s->key_dim + s->value_dim};
  piece pieces[MAX_PIECES];
  const int count = cut_into_pieces(c, b, kv_head, pieces);
  bool right = count >= 0;
  for (int64_t i = 0; right && i < heads_per_kv * s->query_len; i++) {
    const int64_t head = kv_head * heads_per_kv + i / s->query_len, row = i % s->query_len;
    load_query(&c->scenes[0], b, head, row, memory);
    right = expect_row(c, arithmetic, pieces, count, visible_tokens(c, b, row), memory, &want) &&
            row_right(c, bits, (b * s->query_heads + head) * s->query_len + row, &want, worst, text,
                      text_size);
  }
  free_pieces(pieces, count);
  return right;
}

bool parts_right(const parts_scene *c, oracle_arithmetic arithmetic, const uint8_t *bits,
                 double *worst, char *text, size_t text_size) {
  const attention_shape *s = &c->scenes[0].shape;
  double *memory = malloc(sizeof(double) * (size_t)(s->key_dim + 2 * s->value_dim));
  bool right = memory != NULL;
  snprintf(text, text_size, "memory ran out");
  *worst = 0;
  for (int64_t i = 0; right && i < s->batch * s->kv_heads; i++) {
    right = kv_head_right(c, arithmetic, i / s->kv_heads, i % s->kv_heads, bits, memory, worst,
                          text, text_size);
  }
  free(memory);
  return right;
}

/* ---- One part instead of three ------------------------------------------------------------ */

/* scale * code + bias as f32 arithmetic has it, to a plain f32 row. */
void widen_stored_row(const nyb_stored *from, const int64_t at[3], const nyb_stored *to,
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

bool parts_make_whole(const parts_scene *c, const nyb_format *key, const nyb_format *value,
                      stored_row_copier copy, attention_scene *whole) {
  attention_shape shape = c->scenes[0].shape;
  shape.key_format = *key;
  shape.value_format = *value;
  for (int part = 1; part < SCENE_PARTS; part++) {
    shape.capacity_tokens += c->scenes[part].shape.capacity_tokens;
  }
  for (int64_t b = 0; b < shape.batch; b++) shape.lengths[b] = (int32_t)sequence_length(c, b);
  if (!scene_make(whole, &shape)) return false;
  memcpy(whole->q.memory, c->scenes[0].q.memory, whole->q.memory_bytes);
  check_buffer_seal(&whole->q);
  for (int64_t i = 0; i < shape.batch * shape.kv_heads; i++) {
    int64_t token = 0;
    for (int part = 0; part < SCENE_PARTS; part++) {
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
  return true;
}
