/* SPDX-License-Identifier: Apache-2.0 */
/* Attention for one query row, and how far a correct kernel may be from it.
 *
 * Write u = 2^-24 for f32's unit and mag for |scale| * code + |bias|. A kernel's score differs from
 * the exact one by at most
 *
 *   delta = sum_d step_d * |k_d| + sum_d |q_d| * depth * u * mag_d
 *
 * step is the error of representing the query: the fused path over affine keys holds each group of
 * a query row as int16, in steps of max|q_group| / 32767, and, where q or out is f32, as two such
 * terms, the second in steps 1/65000 of the first's. The dots of these integers with the codes are
 * exact. depth counts the f32 operations on the longest way of a product into the score.
 * With rounding MLX the score is then rounded to T: where score - delta and score + delta round
 * alike, nothing is left of delta, otherwise the score may be any of the neighbours.
 *
 * exp turns a score's absolute error into a relative one of its weight, so that each weight lies in
 * w * exp(-delta) .. w * exp(delta). For weighted means that is exactly
 *
 *   |out' - out| <= sum p (exp(delta) - 1) |v - out| / sum p exp(-delta)
 *
 * (the deviations v - out have weighted sum 0), and never more than the largest |v - out|. To that
 * come the rounding errors of the sums themselves, relative to sum p * mag.
 *
 * Affine values whose output has 16 bits are integer dots, too: within a tile of tokens and a group
 * of elements p * scale is held as int16, in steps of its largest / 32767; what that takes from the
 * sum of p * scale is put back at the middle code. So each token adds at most half a step times its
 * code's distance from the middle.
 *
 * On the GPU codes meet the tensor cores as the integers that they are, and sums are f32. A tensor
 * core adds 16 products and the sum so far with less care than f32 additions one after the other
 * would, but loses no more than one unit of the largest for each product, which is what depth
 * counts. What comes to that:
 *   - Queries: a row is brought into f16's range by a power of two, which is exact for bf16 and f16
 *     but for elements that end among f16's subnormals: with the row's largest at 2^14 or more and
 *     an element divided by up to 2^8, these lose 2^-25 * 2^8 / 2^14 = 2^-31 of the largest.
 *   - Codes: they meet the tensor core as subnormal f16 numbers, code * 2^(place - 24), queries
 * with the other power of two. The core lines all products of a step of 16 and the sum so far up at
 *     the largest exponent, cuts off toward zero what lies 25 bits below it, and counts a
 *     subnormal's exponent as 2^-14 (seen on an H200: beside 2^-24 * 2^14 a product 2^16 times
 *     smaller counts as 0, beside 1 * 1 one 2^26 times smaller). So of
 *     |q_d| * code what lies below 2^-15 of the largest |q| of its group, itself taken down to a
 *     power of two, may be lost, and as much of the sum so far with each step. Losses of products
 *     of both signs take from each other.
 *   - Weights: p * scale is rounded to f16, a relative 2^-11 of each token's p * |scale| * code;
 *     or, among the subnormals, 2^-25 where the largest weight is held as 2^-3 or more and the
 *     largest scale as 2^13 or more: 2^-35 of the largest product of the two for each unit of a
 *     code. For the same reason weights are lost from 2^-123 of the largest on.
 *   - Scores times log2(e), and 2^x of that: u * |score| each for score and product.
 *
 * Softcap, slopes and masks are monotone in the score, and so are roundings: its bounds, score -
 * delta and score + delta, are led through them with each step rounded as a kernel rounds it, to
 * f32 and to T, while the score itself is rounded to T alone. tanh may err by 6u. A token that is
 * hidden weighs 0 for certain and its value is not looked at. A sink is one token more, of value 0,
 * whose weight errs as exp does.
 */
#include <math.h>
#include <stdlib.h>

#include "oracle.h"

/* The fused path's tiles and chunks, by the number of tokens alone. */
enum { TILE_TOKENS = 64, CHUNK_TOKENS = 1024 };

/* ---- Decoding ----------------------------------------------------------------------------- */

void oracle_rows_free(oracle_rows *decoded) {
  free(decoded->value);
  free(decoded->magnitude);
  free(decoded->scaled);
  free(decoded->from_middle);
  free(decoded->scale);
  *decoded = (oracle_rows){0};
}

static void decode_plain_row(const nyb_stored *rows, int64_t first, int64_t token,
                             oracle_rows *decoded) {
  for (int64_t d = 0; d < decoded->dim; d++) {
    const double value = oracle_load(rows->codes, rows->format.dtype, first + d);
    decoded->value[token * decoded->dim + d] = value;
    decoded->magnitude[token * decoded->dim + d] = fabs(value);
    decoded->scaled[token * decoded->dim + d] = fabs(value);
  }
}

static void decode_affine_row(const nyb_stored *rows, const int64_t first[3], int64_t token,
                              oracle_rows *decoded) {
  const uint8_t *codes = (const uint8_t *)rows->codes + first[0] * 4;
  const int64_t groups = decoded->dim / decoded->group_size;
  double scale = 0, bias = 0;
  for (int64_t d = 0; d < decoded->dim; d++) {
    const int64_t group = d / decoded->group_size, at = token * decoded->dim + d;
    if (d % decoded->group_size == 0) {
      scale = oracle_load(rows->scales, rows->format.dtype, first[1] + group);
      bias = oracle_load(rows->biases, rows->format.dtype, first[2] + group);
      decoded->scale[token * groups + group] = scale;
    }
    const double code = oracle_code(codes, rows->format.bits, d);
    decoded->value[at] = scale * code + bias;
    decoded->scaled[at] = fabs(scale * code);
    decoded->magnitude[at] = fabs(scale * code) + fabs(bias);
    decoded->from_middle[at] = fabs(code - decoded->middle);
  }
}

static int64_t offset(const int64_t stride[3], int64_t batch_index, int64_t head, int64_t token) {
  return batch_index * stride[0] + head * stride[1] + token * stride[2];
}

bool oracle_rows_decode(const nyb_stored *rows, int64_t batch_index, int64_t head, int64_t tokens,
                        int64_t dim, oracle_rows *decoded) {
  const bool plain = rows->format.scheme == NYB_PLAIN;
  const size_t count = (size_t)(tokens * dim) + 1; /* never an empty allocation */
  *decoded = (oracle_rows){
      .tokens = tokens,
      .dim = dim,
      .group_size = plain ? 0 : rows->format.group_size,
      .middle = plain ? 0 : 0.5 * ((1 << rows->format.bits) - 1),
      .largest = 1,
      .finite = true,
      .value = malloc(count * sizeof(double)),
      .magnitude = malloc(count * sizeof(double)),
      .scaled = malloc(count * sizeof(double)),
      .from_middle = malloc((plain ? 1 : count) * sizeof(double)),
      .scale = malloc((plain ? 1 : count) * sizeof(double)),
  };
  if (decoded->value == NULL || decoded->magnitude == NULL || decoded->scaled == NULL ||
      decoded->from_middle == NULL || decoded->scale == NULL) {
    oracle_rows_free(decoded);
    return false;
  }
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t first[3] = {offset(rows->codes_stride, batch_index, head, token),
                              offset(rows->scales_stride, batch_index, head, token),
                              offset(rows->biases_stride, batch_index, head, token)};
    if (plain) {
      decode_plain_row(rows, first[0], token, decoded);
    } else {
      decode_affine_row(rows, first, token, decoded);
    }
  }
  for (int64_t i = 0; i < tokens * dim; i++) {
    const double magnitude = decoded->magnitude[i];
    if (!isfinite(magnitude)) {
      decoded->finite = false;
    } else if (magnitude > decoded->largest) {
      decoded->largest = magnitude;
    }
  }
  return true;
}

/* ---- Scores ------------------------------------------------------------------------------- */

/* One row's way through the softmax. */
typedef struct row_state {
  int64_t visible;
  double *query;       /* [key_dim] after the scale */
  double *step_error;  /* [key_dim] what |k_d| = 1 contributes to delta, or what is cut off */
  double *sum_error;   /* [key_dim] what mag_d = 1 contributes to delta */
  double *score;       /* [visible], rounded where the contract says so */
  double *delta;       /* [visible] how far a kernel's score may be off; later that of log p */
  double *probability; /* [visible] */
  double most, sum;    /* the largest score; the sum of exp(score - most) */
  const oracle_bias *bias;
  double sink_probability, sink_delta;
} row_state;

static double dot(const double *a, const double *b, int64_t count) {
  double sums[4] = {0, 0, 0, 0}; /* independent, for speed */
  for (int64_t i = 0; i < count; i++) {
    sums[i & 3] += a[i] * b[i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static bool rounds_scores(const oracle_attention *a) { return a->rounding == NYB_ROUNDING_MLX; }

static bool has_integer_dots(const oracle_attention *a) {
  return a->arithmetic == ORACLE_CPU && a->path == NYB_PATH_FUSED && a->keys->group_size != 0;
}

static bool has_f16_weights(const oracle_attention *a) {
  return a->arithmetic == ORACLE_CUDA_WEIGHTS && a->path == NYB_PATH_FUSED;
}

static bool has_f16_tiles(const oracle_attention *a) {
  return a->arithmetic == ORACLE_CUDA_TILES && a->path == NYB_PATH_FUSED;
}

/* A number in f16, with u = 2^-11: keys are held times 2^3 and values times 2^4, each after a scale
 * and a bias, so that f16's smallest half step, 2^-25, counts three times. */
static double f16_error(double number) { return fabs(number) * 0x1.01p-11 + 0x1.8p-27; }

/* f32 operations of a score, one after the other at worst: integer dots become floats and take the
 * step, the scale and the bias, two sums for each group (four roundings where there is no FMA);
 * other scores are dim sums, and on the GPU the four for each group. Ten more hold and scale the
 * query and unpack the key. */
static double score_depth(const oracle_attention *a) {
  const int64_t of_groups = a->keys->group_size != 0 ? 4 * (a->keys->dim / a->keys->group_size) : 0;
  if (has_integer_dots(a)) return (double)of_groups + 10;
  const int64_t on_gpu = a->arithmetic != ORACLE_CPU ? of_groups : 0;
  return (double)(a->keys->dim + on_gpu) + 10;
}

/* Whether the fused path keeps what a 16-bit output would not show. */
static bool is_precise(const oracle_attention *a) {
  return a->query_dtype == NYB_F32 || a->out_dtype == NYB_F32;
}

/* Half a step, and the little by which f32 misses the nearest integer, where the largest of the
 * numbers is 1. Below 2^-110 they may count as zero: their steps are subnormal. */
static double half_step(double largest) { return largest < 0x1p-110 ? 1 : (0.5 + 0x1p-8) / 32767; }

static void find_step_errors(const oracle_attention *a, row_state *row) {
  const int64_t group_size = a->keys->group_size;
  for (int64_t first = 0; first < a->keys->dim; first += group_size) {
    double largest = 0;
    for (int64_t d = first; d < first + group_size; d++) {
      largest = fmax(largest, fabs(row->query[d]));
    }
    for (int64_t d = first; d < first + group_size; d++) {
      row->step_error[d] = largest * half_step(largest);
      if (is_precise(a) && largest >= 0x1p-110) row->step_error[d] /= 65000;
    }
  }
}

/* In f16, relative to the codes' part of a key, which its magnitude exceeds. */
static void find_f16_errors(const oracle_attention *a, row_state *row) {
  double largest = 0x1p-100;
  for (int64_t d = 0; d < a->keys->dim; d++) largest = fmax(largest, fabs(row->query[d]));
  /* Brought below 2^15, or to [1, 2). */
  const double step = largest * (has_f16_tiles(a) ? 0x1p-25 : 0x1p-31);
  for (int64_t d = 0; d < a->keys->dim; d++) row->sum_error[d] += step;
}

/* What a tensor core may cut off of |q_d| * code, and of sums of it. */
static void find_cuts(const oracle_attention *a, row_state *row) {
  const int64_t group_size = a->keys->group_size;
  for (int64_t first = 0; first < a->keys->dim; first += group_size) {
    double largest = 0;
    int exponent; /* largest lies in [2^(exponent - 1), 2^exponent) */
    for (int64_t d = first; d < first + group_size; d++) {
      largest = fmax(largest, fabs(row->query[d]));
    }
    frexp(largest, &exponent);
    const double cut = largest > 0 && isfinite(largest) ? ldexp(1, exponent - 1 - 15) : 0;
    for (int64_t d = first; d < first + group_size; d++) row->step_error[d] = cut;
  }
}

/* q' = T(q * T(scale)), or q * scale; and the errors of holding it. */
static void scale_query(const oracle_attention *a, const double *query, row_state *row) {
  const double depth = score_depth(a);
  const double scale = rounds_scores(a) ? oracle_round(a->query_dtype, a->scale) : a->scale;
  for (int64_t d = 0; d < a->keys->dim; d++) {
    const double product = query[d] * scale;
    row->query[d] = rounds_scores(a) ? oracle_round_f32_then(a->query_dtype, product) : product;
    row->step_error[d] = 0;
    row->sum_error[d] = fabs(row->query[d]) * depth * ORACLE_F32_UNIT;
  }
  if (has_integer_dots(a)) find_step_errors(a, row);
  if (has_f16_weights(a) || has_f16_tiles(a)) find_f16_errors(a, row);
  if (has_f16_weights(a)) find_cuts(a, row);
}

/* sum of a_d * |b_d| */
static double dot_absolute(const double *a, const double *b, int64_t count) {
  double sums[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < count; i++) {
    sums[i & 3] += a[i] * fabs(b[i]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* T(score), or the score itself, infinite where f32 cannot hold it. */
static double narrow_score(const oracle_attention *a, double score) {
  const double rounded = oracle_round(rounds_scores(a) ? a->query_dtype : NYB_F32, score);
  return rounds_scores(a) || isinf(rounded) ? rounded : score;
}

/* A score within delta of the exact one becomes one of T. Where it may be infinite or not, delta is
 * infinite. */
static void round_score(const oracle_attention *a, double *score, double *delta) {
  const double exact = *score;
  *score = narrow_score(a, exact);
  if (!isfinite(exact)) { /* an infinity stays what it is; a NaN's delta means nothing */
    *delta = 0;
    return;
  }
  const double low = narrow_score(a, exact - *delta), high = narrow_score(a, exact + *delta);
  if (low == high && (rounds_scores(a) || isinf(low))) {
    *delta = 0;
  } else if (rounds_scores(a) || isinf(low) || isinf(high)) {
    *delta = fmax(high - *score, *score - low);
  }
}

/* With integer dots a score is NaN as soon as an element of the query, a scale or a bias is not
 * finite; else NaN and infinity take their way through the sum. */
static double exact_score(const oracle_attention *a, const row_state *row, const double *key) {
  const int64_t dim = a->keys->dim;
  const double score = dot(row->query, key, dim);
  if (!has_integer_dots(a) || isfinite(score)) return score;
  return isfinite(dot_absolute(row->query, key, dim)) ? score : (double)NAN;
}

static double key_tile_error(const double *query, const double *key, int64_t dim) {
  double error = 0;
  for (int64_t d = 0; d < dim; d++) error += fabs(query[d]) * f16_error(key[d]);
  return error;
}

/* Of token n's score, by the tensor cores' cuts. */
static double cut_error(const oracle_attention *a, const row_state *row, int64_t n) {
  const oracle_rows *keys = a->keys;
  const int64_t groups = keys->dim / keys->group_size;
  const int64_t additions = keys->group_size / 16 - 1;
  double error = 0;
  for (int64_t g = 0; g < groups; g++) {
    const double cut = row->step_error[g * keys->group_size] * fabs(keys->scale[n * groups + g]);
    double lost[2] = {0, 0}; /* of positive products and of negative ones */
    if (!(cut > 0)) continue;
    for (int64_t d = g * keys->group_size; d < (g + 1) * keys->group_size; d++) {
      const double product = fabs(row->query[d]) * keys->scaled[n * keys->dim + d];
      lost[row->query[d] < 0] += product - cut * floor(product / cut);
    }
    error += fmax(lost[0], lost[1]) + cut * (double)additions;
  }
  return error;
}

/* Where a score may lie, and the score itself. */
typedef struct score_bounds {
  double low, score, high;
} score_bounds;

/* Rounds them after an f32 operation. */
static void settle(const oracle_attention *a, bool keep_f32, score_bounds *s) {
  const nyb_dtype dtype = rounds_scores(a) && !keep_f32 ? a->query_dtype : NYB_F32;
  const double rounded = oracle_round(dtype, s->score);
  s->low = oracle_round_f32_then(dtype, s->low);
  s->high = oracle_round_f32_then(dtype, s->high);
  if (dtype != NYB_F32 || isinf(rounded)) s->score = rounded;
}

static void cap_score(const oracle_attention *a, double softcap, score_bounds *s) {
  const double c = rounds_scores(a) ? oracle_round(a->query_dtype, softcap) : softcap;
  *s = (score_bounds){s->low / c, s->score / c, s->high / c};
  s->low -= 2 * ORACLE_F32_UNIT * fabs(s->low); /* times 1/c */
  s->high += 2 * ORACLE_F32_UNIT * fabs(s->high);
  settle(a, false, s);
  *s = (score_bounds){tanh(s->low), tanh(s->score), tanh(s->high)};
  s->low -= 6 * ORACLE_F32_UNIT * fabs(s->low);
  s->high += 6 * ORACLE_F32_UNIT * fabs(s->high);
  /* Of caps from 1/16 to 1,024 it is 1 - 2/(1 + exp(2a)), by fast instructions. */
  if (has_f16_weights(a) && !rounds_scores(a) && softcap >= 0.0625 && softcap <= 1024) {
    s->low -= 13 * ORACLE_F32_UNIT;
    s->high += 13 * ORACLE_F32_UNIT;
  }
  settle(a, false, s);
  *s = (score_bounds){s->low * c, s->score * c, s->high * c};
  settle(a, false, s);
}

static void add_to_score(const oracle_attention *a, bool keep_f32, score_bounds added,
                         score_bounds *s) {
  *s = (score_bounds){s->low + added.low, s->score + added.score, s->high + added.high};
  settle(a, keep_f32, s);
}

static bool is_hidden(const oracle_bias *bias, int64_t n) {
  return bias != NULL && bias->hidden != NULL && bias->hidden[n];
}

/* The lowest finite number of q's dtype, by which MLX hides. */
static double lowest_of(nyb_dtype dtype) {
  return dtype == NYB_F16 ? -65504 : dtype == NYB_BF16 ? -0x1.fep127 : -0x1.fffffep127;
}

static void bias_score(const oracle_attention *a, const oracle_bias *bias, int64_t n, double *score,
                       double *delta) {
  if (is_hidden(bias, n) || (bias->masked != NULL && bias->masked[n])) {
    *score = is_hidden(bias, n) ? -INFINITY : lowest_of(a->query_dtype);
    *delta = 0;
    return;
  }
  if (bias->softcap == 0 && !bias->sloped && bias->added == NULL) return;
  score_bounds s = {*score - *delta, *score, *score + *delta};
  if (bias->softcap != 0) cap_score(a, bias->softcap, &s);
  if (bias->sloped) {
    const double distance = fabs((double)(bias->position - n));
    const double in_f32 = -bias->slope * oracle_round(NYB_F32, distance);
    score_bounds slope = {in_f32, -bias->slope * distance, in_f32};
    settle(a, false, &slope);
    add_to_score(a, false, slope, &s);
  }
  if (bias->added != NULL) {
    const double added = bias->added[n];
    add_to_score(a, bias->added_f32, (score_bounds){added, added, added}, &s);
  }
  *score = s.score;
  *delta = s.low == s.score && s.high == s.score ? 0 : fmax(s.high - s.score, s.score - s.low);
  if (isnan(*delta)) *delta = isnan(s.score) ? 0 : INFINITY;
}

static void score_tokens(const oracle_attention *a, row_state *row) {
  const int64_t dim = a->keys->dim;
  row->most = -INFINITY;
  for (int64_t n = 0; n < row->visible; n++) {
    const double *key = a->keys->value + n * dim, *magnitude = a->keys->magnitude + n * dim;
    row->score[n] = exact_score(a, row, key);
    row->delta[n] = dot(row->sum_error, magnitude, dim) + 0x1p-126;
    if (has_integer_dots(a)) row->delta[n] += dot_absolute(row->step_error, key, dim);
    if (has_f16_tiles(a)) row->delta[n] += key_tile_error(row->query, key, dim);
    if (has_f16_weights(a)) row->delta[n] += cut_error(a, row, n);
    round_score(a, &row->score[n], &row->delta[n]);
    if (row->bias != NULL) bias_score(a, row->bias, n, &row->score[n], &row->delta[n]);
    row->most = fmax(row->most, row->score[n]); /* a NaN is no maximum */
  }
}

/* ---- Softmax ------------------------------------------------------------------------------ */

static double chunk_count(int64_t visible) { return ceil((double)visible / CHUNK_TOKENS); }

/* How many additions a sum over the tokens takes on its longest way. */
static double sum_depth(const oracle_attention *a, int64_t visible) {
  if (a->path == NYB_PATH_COMPAT || visible <= CHUNK_TOKENS) return (double)visible;
  return CHUNK_TOKENS + chunk_count(visible);
}

/* Adds to delta what the f32 softmax itself loses. exp is good to 2 ulp, 4u; its argument,
 * score - maximum, times log2(e) where exp2 serves, to 4u of its size. On the fused path a weight
 * is rescaled each time the maximum moves, once per tile and once per chunk at most: an exp and a
 * product each, while the arguments add up to most - score in all.
 *   A score of -inf weighs 0, for certain; a row of nothing else has no weights: 0/0. */
static void soften(const oracle_attention *a, row_state *row) {
  double rescales = 0;
  if (a->path == NYB_PATH_FUSED) {
    const int64_t in_chunk = row->visible < CHUNK_TOKENS ? row->visible : CHUNK_TOKENS;
    rescales = ceil((double)in_chunk / TILE_TOKENS) + chunk_count(row->visible);
  }
  row->sum = row->sink_probability = row->sink_delta = 0;
  const bool has_sink = row->bias != NULL && row->bias->has_sink && row->bias->sink != -INFINITY;
  if (has_sink) {
    row->most = fmax(row->most, row->bias->sink);
    rescales++;
    const double below = row->most - row->bias->sink;
    row->sum = row->sink_probability = exp(-below);
    row->sink_delta = ORACLE_F32_UNIT * (4 * below + 5 * (rescales + 2));
  }
  for (int64_t n = 0; n < row->visible; n++) {
    if (row->score[n] == -INFINITY) {
      row->probability[n] = row->delta[n] = 0;
      continue;
    }
    const double below = row->most - row->score[n];
    row->probability[n] = exp(-below);
    row->sum += row->probability[n];
    row->delta[n] += ORACLE_F32_UNIT * (4 * below + 5 * (rescales + 2));
    if (a->arithmetic != ORACLE_CPU) row->delta[n] += ORACLE_F32_UNIT * 2 * fabs(row->score[n]);
  }
  for (int64_t n = 0; n < row->visible; n++) {
    row->probability[n] /= row->sum;
  }
  row->sink_probability /= row->sum;
}

/* sum p (exp(delta) - 1) and 1 - sum p exp(-delta): how far the sum of the weights may be off. */
static void weight_errors(const row_state *row, double *above, double *below) {
  *above = row->sink_probability * expm1(row->sink_delta);
  *below = -row->sink_probability * expm1(-row->sink_delta);
  for (int64_t n = 0; n < row->visible; n++) {
    *above += row->probability[n] * expm1(row->delta[n]);
    *below -= row->probability[n] * expm1(-row->delta[n]);
  }
}

static void take_lse(const oracle_attention *a, const row_state *row, oracle_result *result) {
  double above, below;
  weight_errors(row, &above, &below);
  result->lse = row->most + log(row->sum);
  if (result->lse == -INFINITY) {
    result->lse_error = 0;
    return;
  }
  result->lse_error = fmax(log1p(above), -log1p(-below)) +
                      ORACLE_F32_UNIT * (sum_depth(a, row->visible) + 4 + 4 * fabs(log(row->sum)) +
                                         2 * fabs(row->most) + 2 * fabs(result->lse));
}

/* ---- Values ------------------------------------------------------------------------------- */

/* out, and sum p * mag in out_error. */
static void weigh_values(const oracle_attention *a, const row_state *row, oracle_result *result) {
  const int64_t dim = a->values->dim;
  for (int64_t d = 0; d < dim; d++) {
    result->out[d] = result->out_error[d] = 0;
  }
  for (int64_t n = 0; n < row->visible; n++) {
    const double p = row->probability[n];
    if (is_hidden(row->bias, n)) continue;
    if (p == 0 && a->values->finite) continue; /* 0 times infinity is NaN */
    const double *value = a->values->value + n * dim;
    const double *magnitude = a->values->magnitude + n * dim;
    for (int64_t d = 0; d < dim; d++) {
      result->out[d] += p * value[d];
      result->out_error[d] += p * magnitude[d];
    }
  }
}

/* exp gives 0 below 2^-126, and sums lose what is below that: this much of the largest value. */
static double underflow(const oracle_attention *a, int64_t visible) {
  return (double)visible * (a->arithmetic >= ORACLE_CUDA_WEIGHTS ? 0x1p-122 : 0x1p-125) *
         a->values->largest;
}

/* The largest |v - out| of a column: a mean with other weights is not farther away. */
static double largest_deviation(const oracle_attention *a, const row_state *row, int64_t d,
                                double out) {
  double largest = row->sink_probability > 0 ? fabs(out) : 0;
  for (int64_t n = 0; n < row->visible; n++) {
    if (is_hidden(row->bias, n)) continue;
    largest = fmax(largest, fabs(a->values->value[n * a->values->dim + d] - out));
  }
  return largest;
}

/* Adds the error of weight * scale as f16. */
static void add_f16_weight_errors(const oracle_attention *a, const row_state *row, double *error) {
  const int64_t dim = a->values->dim;
  double largest = 0;
  for (int64_t n = 0; n < row->visible; n++) largest = fmax(largest, row->probability[n]);
  const double subnormal = 0x1p-35 * largest * a->values->largest;
  for (int64_t n = 0; n < row->visible; n++) {
    if (is_hidden(row->bias, n)) continue;
    for (int64_t d = 0; d < dim; d++) {
      error[d] += row->probability[n] * a->values->scaled[n * dim + d] * 0x1.01p-11 + subnormal;
    }
  }
}

/* Adds the errors of the weights and of the values as f16. */
static void add_f16_tile_errors(const oracle_attention *a, const row_state *row, double *error) {
  const int64_t dim = a->values->dim;
  double largest = 0;
  for (int64_t n = 0; n < row->visible; n++) largest = fmax(largest, row->probability[n]);
  const double subnormal = 0x1p-38 * largest * a->values->largest; /* weights reach 2^14 */
  for (int64_t n = 0; n < row->visible; n++) {
    if (is_hidden(row->bias, n)) continue;
    const double p = row->probability[n];
    for (int64_t d = 0; d < dim; d++) {
      const double value = a->values->value[n * dim + d];
      error[d] += p * (fabs(value) * 0x1.01p-11 + f16_error(value)) + subnormal;
    }
  }
}

static bool has_integer_weights(const oracle_attention *a) {
  return a->arithmetic == ORACLE_CPU && a->values->group_size != 0 && !is_precise(a);
}

/* Adds the error of the integer weights of tokens [first, end), one tile, for one group. */
static void add_weight_steps(const oracle_attention *a, const row_state *row, int64_t first,
                             int64_t end, int64_t group, double *error) {
  const oracle_rows *values = a->values;
  const int64_t groups = values->dim / values->group_size;
  double largest = 0, sum = 0;
  for (int64_t n = first; n < end; n++) {
    if (is_hidden(row->bias, n)) continue;
    const double weight = row->probability[n] * fabs(values->scale[n * groups + group]);
    if (weight > largest) largest = weight;
    sum += weight;
  }
  /* The dots' own f32 operations, and those of the sum that is put back at the middle. */
  const double of_middle = sum * values->middle * (TILE_TOKENS + 8) * ORACLE_F32_UNIT;
  for (int64_t d = group * values->group_size; d < (group + 1) * values->group_size; d++) {
    double distances = 0;
    for (int64_t n = first; n < end; n++) {
      distances += values->from_middle[n * values->dim + d];
    }
    error[d] += largest * half_step(largest) * distances + of_middle;
  }
}

static void add_weight_errors(const oracle_attention *a, const row_state *row, double *error) {
  for (int64_t first = 0; first < row->visible; first += TILE_TOKENS) {
    const int64_t end = first + TILE_TOKENS < row->visible ? first + TILE_TOKENS : row->visible;
    for (int64_t group = 0; group < a->values->dim / a->values->group_size; group++) {
      add_weight_steps(a, row, first, end, group, error);
    }
  }
}

/* Fused: sums of weights and of weighted values, divided at the end. Both sums' rounding errors
 * are relative to sum p * mag; eight more operations unpack, scale, merge and divide. */
static void value_errors_fused(const oracle_attention *a, const row_state *row, double *deviation,
                               oracle_result *result) {
  const int64_t dim = a->values->dim;
  const double depth = 2 * (sum_depth(a, row->visible) + 8);
  const double lost = underflow(a, row->visible);
  double above, below;
  weight_errors(row, &above, &below);
  for (int64_t d = 0; d < dim; d++) {
    deviation[d] = row->sink_probability * expm1(row->sink_delta) * fabs(result->out[d]);
  }
  for (int64_t n = 0; n < row->visible; n++) {
    const double weight_error = row->probability[n] * expm1(row->delta[n]);
    if (weight_error == 0) continue;
    const double *value = a->values->value + n * dim;
    for (int64_t d = 0; d < dim; d++) {
      deviation[d] += weight_error * fabs(value[d] - result->out[d]);
    }
  }
  for (int64_t d = 0; d < dim; d++) {
    double from_weights = deviation[d] / (1 - below);
    if (!(above < 0.25)) {
      /* NaN, or below 0 where `below` is 1 and a rounding: no bound. */
      from_weights = fmin(from_weights >= 0 ? from_weights : INFINITY,
                          largest_deviation(a, row, d, result->out[d]));
    }
    result->out_error[d] = from_weights + depth * ORACLE_F32_UNIT * result->out_error[d] + lost;
  }
  if (has_integer_weights(a)) add_weight_errors(a, row, result->out_error);
  if (has_f16_weights(a)) add_f16_weight_errors(a, row, result->out_error);
  if (has_f16_tiles(a)) add_f16_tile_errors(a, row, result->out_error);
}

/* Compat: p = T(exp * (1 / sum)), then a sum of products. Each p is a number of its own here: it
 * lies between the roundings of its lower and its upper bound. */
static void values_compat(const oracle_attention *a, row_state *row, oracle_result *result) {
  const int64_t dim = a->values->dim;
  const bool in_f32 = row->bias != NULL && row->bias->added_f32;
  const nyb_dtype dtype = rounds_scores(a) && !in_f32 ? a->query_dtype : NYB_F32;
  double above, below;
  weight_errors(row, &above, &below);
  const double of_sum =
      fmax(log1p(above), -log1p(-below)) + ORACLE_F32_UNIT * ((double)row->visible + 4);
  for (int64_t n = 0; n < row->visible; n++) {
    const double low = row->probability[n] * exp(-row->delta[n] - of_sum) - 0x1p-149;
    const double high = fmin(row->probability[n] * exp(row->delta[n] + of_sum), 1) + 0x1p-149;
    const double p = oracle_round(dtype, row->probability[n]);
    row->delta[n] = fmax(oracle_round(dtype, high) - p, p - oracle_round(dtype, low));
    row->probability[n] = p;
  }
  const double lost = underflow(a, row->visible);
  weigh_values(a, row, result);
  for (int64_t d = 0; d < dim; d++) {
    result->out_error[d] *= ORACLE_F32_UNIT * ((double)row->visible + 4);
    result->out_error[d] += lost;
  }
  for (int64_t n = 0; n < row->visible; n++) {
    if (is_hidden(row->bias, n)) continue;
    for (int64_t d = 0; d < dim && row->delta[n] > 0; d++) {
      result->out_error[d] += row->delta[n] * fabs(a->values->value[n * dim + d]);
    }
  }
}

/* ---- The row ------------------------------------------------------------------------------ */

static void empty_row(const oracle_attention *a, const oracle_bias *bias, oracle_result *result) {
  const double sink = bias != NULL && bias->has_sink ? bias->sink : -INFINITY;
  const bool lost = isnan(sink) || sink == INFINITY;
  for (int64_t d = 0; d < a->values->dim; d++) {
    result->out[d] = lost ? (double)NAN : 0;
    result->out_error[d] = 0;
  }
  result->lse = lost ? (double)NAN : sink;
  result->lse_error = 0;
}

static bool sees_any(const oracle_bias *bias, int64_t visible) {
  for (int64_t n = 0; n < visible; n++) {
    if (!is_hidden(bias, n)) return true;
  }
  return false;
}

/* Only MLX's compat path hides by a number; all else hides what a mask of bools does for good. */
static bool hides_by_number(const oracle_attention *a) {
  return a->path == NYB_PATH_COMPAT && rounds_scores(a);
}

bool oracle_attention_row(const oracle_attention *a, const double *query, int64_t visible,
                          const oracle_bias *bias, oracle_result *result) {
  oracle_bias with_masked;
  bool *hidden = NULL;
  if (bias != NULL && bias->masked != NULL && !hides_by_number(a)) {
    hidden = malloc((size_t)visible + 1);
    if (hidden == NULL) return false;
    for (int64_t n = 0; n < visible; n++) hidden[n] = is_hidden(bias, n) || bias->masked[n];
    with_masked = *bias;
    with_masked.hidden = hidden;
    with_masked.masked = NULL;
    bias = &with_masked;
  }
  if (!sees_any(bias, visible)) {
    empty_row(a, bias, result);
    free(hidden);
    return true;
  }
  const int64_t key_dim = a->keys->dim, value_dim = a->values->dim;
  double *memory = malloc((size_t)(3 * key_dim + 3 * visible + value_dim) * sizeof(double));
  if (memory == NULL) {
    free(hidden);
    return false;
  }
  row_state row = {.visible = visible,
                   .bias = bias,
                   .query = memory,
                   .step_error = memory + key_dim,
                   .sum_error = memory + 2 * key_dim,
                   .score = memory + 3 * key_dim,
                   .delta = memory + 3 * key_dim + visible,
                   .probability = memory + 3 * key_dim + 2 * visible};
  scale_query(a, query, &row);
  score_tokens(a, &row);
  soften(a, &row);
  take_lse(a, &row, result);
  if (a->path == NYB_PATH_COMPAT) {
    values_compat(a, &row, result);
  } else {
    weigh_values(a, &row, result);
    value_errors_fused(a, &row, memory + 3 * key_dim + 3 * visible, result);
  }
  free(memory);
  free(hidden);
  return true;
}
