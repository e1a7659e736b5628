/* SPDX-License-Identifier: Apache-2.0 */
/* The compat path: the steps of docs/numerics.md, section 2, one after the other, with f32 sums,
 * one per row in ascending order. It materialises a score row and takes one element at a time. It
 * is what the fused path is held against, and is never deleted. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "attention.h"
#include "attention_places.h"
#include "format.h"
#include "numeric.h"

typedef struct compat_run {
  const nyb_attention_call *call;
  char *workspace;
  int64_t rows; /* batch * query_heads * query_len */
  _Atomic int64_t next_row;
} compat_run;

static int64_t score_row_bytes(const nyb_attention *a) {
  return (nyb_room_tokens(a) * (int64_t)sizeof(float) + 63) / 64 * 64;
}

static int64_t row_bytes(int64_t dim) { return (dim * (int64_t)sizeof(float) + 63) / 64 * 64; }

static int64_t worker_bytes(const nyb_attention *a) {
  return score_row_bytes(a) + row_bytes(a->key_dim) + row_bytes(a->value_dim);
}

int64_t nyb_attention_compat_workspace(const nyb_attention_call *call) {
  return call->context->threads * worker_bytes(call->attention);
}

/* Element d of a stored row as the products of section 2 see it: scale * code + bias. */
static float element_at(const nyb_format *format, const nyb_stored_row *row, int64_t d) {
  if (format->scheme == NYB_PLAIN) return nyb_load_f32(row->codes, format->dtype, d);
  const uint8_t *codes = (const uint8_t *)row->codes;
  const int64_t bit = d * format->bits;
  uint32_t window = codes[bit / 8];
  if (bit % 8 + format->bits > 8) window |= (uint32_t)codes[bit / 8 + 1] << 8;
  const uint32_t code = (window >> (bit % 8)) & ((1u << format->bits) - 1);
  const int64_t group = d / format->group_size;
  return nyb_load_f32(row->scales, format->dtype, group) * (float)code +
         nyb_load_f32(row->biases, format->dtype, group);
}

/* The row of a token, in whichever part it stands, and its format. */
static nyb_stored_row row_at(const nyb_attention *a, bool is_value, int64_t batch, int64_t kv_head,
                             int64_t token, const nyb_format **format) {
  const nyb_place place = nyb_place_of(a, batch, token);
  const nyb_stored *stored =
      is_value ? nyb_part_values(a, place.part) : nyb_part_keys(a, place.part);
  *format = &stored->format;
  return nyb_stored_row_at(stored, place.batch, kv_head, place.row);
}

/* Where scores go once they are dots: q's dtype with NYB_ROUNDING_MLX. */
static nyb_dtype score_dtype(const nyb_attention *a) {
  return a->rounding == NYB_ROUNDING_MLX ? a->q.dtype : NYB_F32;
}

/* A sum with an f32 mask is an f32, and so are the probabilities. */
static nyb_dtype probability_dtype(const nyb_attention *a) {
  const nyb_mask_array *mask = &a->mask_array;
  return mask->kind == NYB_MASK_ARRAY_ADD && mask->dtype == NYB_F32 ? NYB_F32 : score_dtype(a);
}

/* MLX hides by the lowest finite number, so that a row of which all is hidden weighs all alike. */
static bool hides_by_number(const nyb_attention *a) {
  return a->rounding == NYB_ROUNDING_MLX && a->mask_array.kind == NYB_MASK_ARRAY_BOOL;
}

static float lowest_of(nyb_dtype dtype) {
  return dtype == NYB_F16 ? -65504 : dtype == NYB_BF16 ? -0x1.fep127f : -FLT_MAX;
}

/* Step 3 of section 2. `past` is how far the row stands behind the token, mask_row its mask. */
static float bias_score(const nyb_attention *a, float score, int64_t past, float slope,
                        const char *mask_row, int64_t token) {
  const nyb_dtype dtype = score_dtype(a);
  float s = nyb_round_to(dtype, score);
  if (a->softcap != 0) {
    const float softcap = nyb_round_to(dtype, a->softcap);
    const float share = nyb_round_to(dtype, s / softcap);
    s = nyb_round_to(dtype, nyb_round_to(dtype, tanhf(share)) * softcap);
  }
  if (a->alibi_slopes != NULL) {
    const float distance = (float)(past < 0 ? -past : past);
    s = nyb_round_to(dtype, s + nyb_round_to(dtype, -slope * distance));
  }
  if (mask_row == NULL) return s;
  if (nyb_mask_hides(&a->mask_array, mask_row, token)) {
    return hides_by_number(a) ? lowest_of(dtype) : -INFINITY;
  }
  if (a->mask_array.kind == NYB_MASK_ARRAY_BOOL) return s;
  return nyb_round_to(probability_dtype(a), s + nyb_load_f32(mask_row, a->mask_array.dtype, token));
}

/* The tokens that a row sees, one after the other: the first from `token` on, or sight->end. */
static int64_t next_seen(const nyb_attention *a, const nyb_sight *sight, const char *mask_row,
                         int64_t token) {
  for (; token < sight->end; token++) {
    if (token >= sight->keep_end && token < sight->begin) token = sight->begin;
    if (token >= sight->end || mask_row == NULL || hides_by_number(a)) break;
    if (!nyb_mask_hides(&a->mask_array, mask_row, token)) break;
  }
  return token < sight->end ? token : sight->end;
}

static void attend_row(const compat_run *run, int64_t index, char *memory) {
  const nyb_attention *a = run->call->attention;
  float *scores = (float *)(void *)memory;
  float *q = (float *)(void *)(memory + score_row_bytes(a));
  float *out = (float *)(void *)(memory + score_row_bytes(a) + row_bytes(a->key_dim));
  const int64_t row = index % a->query_len;
  const int64_t head = index / a->query_len % a->query_heads;
  const int64_t batch = index / a->query_len / a->query_heads;
  const int64_t kv_head = head / run->call->heads_per_kv;
  const int64_t position = nyb_row_position(a, batch, row);
  const float slope = a->alibi_slopes != NULL ? a->alibi_slopes[head] : 0;
  const char *mask_row = a->mask_array.kind != 0 ? nyb_mask_row(a, batch, head, row) : NULL;
  const nyb_sight sight = nyb_sight_of(a, batch, row);
  const int64_t first = next_seen(a, &sight, mask_row, 0), end = sight.end;

  nyb_load_query(a, batch, head, row, q);
  float maximum = a->sinks != NULL ? a->sinks[head] : -INFINITY;
  for (int64_t n = first; n < end; n = next_seen(a, &sight, mask_row, n + 1)) {
    const nyb_format *format;
    const nyb_stored_row key = row_at(a, false, batch, kv_head, n, &format);
    float score = 0;
    for (int64_t d = 0; d < a->key_dim; d++) score += q[d] * element_at(format, &key, d);
    scores[n] = bias_score(a, score, position - n, slope, mask_row, n);
    if (scores[n] > maximum) maximum = scores[n]; /* a NaN is no maximum, but makes the sum NaN */
  }
  /* Scores of -inf weigh 0 where there are no others, too; NaN stays NaN. */
  const float reference = maximum == -INFINITY ? 0 : maximum;
  float sum = 0;
  for (int64_t n = first; n < end; n = next_seen(a, &sight, mask_row, n + 1)) {
    scores[n] = expf(scores[n] - reference);
    sum += scores[n];
  }
  if (a->sinks != NULL) sum += expf(a->sinks[head] - reference);
  const float reciprocal = 1 / sum;
  for (int64_t d = 0; d < a->value_dim; d++) out[d] = 0;
  for (int64_t n = first; n < end; n = next_seen(a, &sight, mask_row, n + 1)) {
    const float p = nyb_round_to(probability_dtype(a), scores[n] * reciprocal);
    const nyb_format *format;
    const nyb_stored_row value = row_at(a, true, batch, kv_head, n, &format);
    for (int64_t d = 0; d < a->value_dim; d++) out[d] += p * element_at(format, &value, d);
  }
  /* A sink that is not finite makes the row so, even where it sees nothing. */
  const bool blind = first == end && sum == 0;
  for (int64_t d = 0; d < a->value_dim && first == end && !blind; d++) out[d] = 0 / sum;
  nyb_store_row(a, batch, head, row, out, blind ? -INFINITY : maximum + logf(sum));
}

static void work(void *data, int64_t worker) {
  compat_run *run = data;
  char *memory = run->workspace + worker * worker_bytes(run->call->attention);
  for (;;) {
    const int64_t row = atomic_fetch_add_explicit(&run->next_row, 1, memory_order_relaxed);
    if (row >= run->rows) return;
    attend_row(run, row, memory);
  }
}

void nyb_attention_compat_run(const nyb_attention_call *call, char *workspace) {
  const nyb_attention *a = call->attention;
  compat_run run = {
      .call = call, .workspace = workspace, .rows = a->batch * a->query_heads * a->query_len};
  const int64_t threads = call->context->threads;
  nyb_parallel(call->context, threads < run.rows ? threads : run.rows, work, &run);
}
