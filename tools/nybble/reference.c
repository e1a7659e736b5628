/* SPDX-License-Identifier: Apache-2.0 */
#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "support.h"

/* ---- Number types ------------------------------------------------------------------------- */

static double from_f16(uint16_t half) {
  const int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  double magnitude;
  if (exponent == 0x1f) {
    magnitude = fraction == 0 ? (double)INFINITY : (double)NAN;
  } else if (exponent == 0) {
    magnitude = ldexp(fraction, -24);
  } else {
    magnitude = ldexp(fraction + 1024, exponent - 25);
  }
  return half & 0x8000 ? -magnitude : magnitude;
}

double nyb_element(const void *data, nyb_dtype dtype, int64_t index) {
  if (dtype == NYB_F16) return from_f16(((const uint16_t *)data)[index]);
  if (dtype == NYB_F32) return (double)((const float *)data)[index];
  const uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return (double)value;
}

double nyb_ulp(nyb_dtype dtype, double value) {
  const int fraction_bits = dtype == NYB_F32 ? 23 : dtype == NYB_F16 ? 10 : 7;
  const int smallest_exponent = dtype == NYB_F16 ? -14 : -126;
  int exponent;
  frexp(value, &exponent); /* |value| in [0.5, 1) * 2^exponent */
  exponent = value == 0 || exponent - 1 < smallest_exponent ? smallest_exponent : exponent - 1;
  return ldexp(1, exponent - fraction_bits);
}

/* ---- Attention ---------------------------------------------------------------------------- */

static double dot(const double *a, const double *b, int64_t count) {
  enum { LANES = 8 }; /* sums side by side, which the compiler can hold in vectors */
  double sum[LANES] = {0}, rest = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < count; i++) rest += a[i] * b[i];
  for (int lane = 0; lane < LANES; lane++) rest += sum[lane];
  return rest;
}

/* softmax(scale * q k^T) v of one query row over tokens [first, end), the scores capped where
 * softcap is not 0; weights is room for `end` numbers. */
static void attend_row(const double *query, const double *key, const double *value, int64_t first,
                       int64_t end, int64_t key_dim, int64_t value_dim, double scale,
                       double softcap, double *weights, double *out) {
  double maximum = -(double)INFINITY, sum = 0;
  for (int64_t t = first; t < end; t++) {
    weights[t] = scale * dot(query, key + t * key_dim, key_dim);
    if (softcap != 0) weights[t] = softcap * tanh(weights[t] / softcap);
    if (weights[t] > maximum) maximum = weights[t];
  }
  memset(out, 0, (size_t)value_dim * sizeof *out);
  for (int64_t t = first; t < end; t++) {
    const double weight = exp(weights[t] - maximum);
    sum += weight;
    for (int64_t d = 0; d < value_dim; d++) out[d] += weight * value[t * value_dim + d];
  }
  for (int64_t d = 0; d < value_dim; d++) out[d] /= sum;
}

static void widen(const void *data, nyb_dtype dtype, int64_t first, int64_t count, double *wide) {
  for (int64_t i = 0; i < count; i++) wide[i] = nyb_element(data, dtype, first + i);
}

void nyb_reference_attention(const nyb_trace *trace, const nyb_trace_layer *layer,
                             int64_t first_token, int64_t steps, double *out) {
  const int64_t key_dim = layer->key_dim, value_dim = layer->value_dim, tokens = trace->tokens;
  const int64_t seen = first_token + steps, number = sizeof(double);
  const int64_t group = layer->query_heads / layer->kv_heads;
  double *key = nyb_command_allocate(seen * key_dim * number);
  double *value = nyb_command_allocate(seen * value_dim * number);
  double *query = nyb_command_allocate(key_dim * number);
  double *weights = nyb_command_allocate(seen * number);
  /* What the library is given are floats; the reference must take the same numbers. */
  const double scale = (double)(float)trace->scale, softcap = (double)(float)layer->softcap;
  for (int64_t head = 0; head < layer->query_heads; head++) {
    nyb_progress_show("layer %lld in double precision: head %lld of %lld", (long long)layer->index,
                      (long long)head + 1, (long long)layer->query_heads);
    const int64_t kv_head = head / group;
    if (head % group == 0) {
      widen(layer->key, trace->dtype, kv_head * tokens * key_dim, seen * key_dim, key);
      widen(layer->value, trace->dtype, kv_head * tokens * value_dim, seen * value_dim, value);
    }
    for (int64_t step = 0; step < steps; step++) {
      const int64_t token = first_token + step;
      widen(layer->query, trace->dtype, (head * tokens + token) * key_dim, key_dim, query);
      const int64_t window = layer->window_tokens;
      const int64_t first = window > 0 && token >= window ? token + 1 - window : 0;
      attend_row(query, key, value, first, token + 1, key_dim, value_dim, scale, softcap, weights,
                 out + (step * layer->query_heads + head) * value_dim);
    }
  }
  free(key);
  free(value);
  free(query);
  free(weights);
}
