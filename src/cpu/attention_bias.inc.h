/* SPDX-License-Identifier: Apache-2.0 */
/* ---- What is done to scores before the softmax ---------------------------------------------- */

enum { CAP_VECTORS = 4 }; /* side by side, since each step waits for the one before it */

/* r = -1/d for d in [1, 2], within 1.5 units of 2^-24. Sixteen lanes' division takes longer than
 * all else here; there the parabola of least relative error, 1/99, which two Newton steps square.
 */
ALWAYS_INLINE void negative_reciprocals(const vf *d, vf *r) {
  UNROLL
  for (int v = 0; v < CAP_VECTORS; v++) {
    if (VECTOR_LANES < 16) {
      r[v] = vf_div(vf_set1(-1.0f), d[v]);
      continue;
    }
    r[v] = vf_fma(d[v], vf_set1(-32.0f / 99), vf_set1(144.0f / 99));
    r[v] = vf_fma(d[v], r[v], vf_set1(-210.0f / 99));
  }
  UNROLL
  for (int step = 0; step < 2 && VECTOR_LANES == 16; step++) {
    vf rest[CAP_VECTORS];
    UNROLL
    for (int v = 0; v < CAP_VECTORS; v++) rest[v] = vf_fma(d[v], r[v], vf_set1(1.0f));
    UNROLL
    for (int v = 0; v < CAP_VECTORS; v++) r[v] = vf_fma(r[v], rest[v], r[v]);
  }
}

/* tanh(share * x), share positive, within 6 units of 2^-24 of that of the product as a float
 * (tests/test_attention_masks.c); NaN stays NaN. With e = exp(-2|x|) - 1 it is -e / (2 + e).
 * exp(y) is 2^n (1 + r slope), so e is 2^n r slope + (2^n - 1), of two terms of one sign, the
 * second of them exact: nothing cancels, and a small x keeps its relative precision. From 2^-24 of
 * 1 on, at -17, e is -1. */
ALWAYS_INLINE void tanh_of(vf *x, vf share) {
  vf y[CAP_VECTORS], e[CAP_VECTORS], d[CAP_VECTORS];
  exp_parts exp[CAP_VECTORS];
  const vf twice = vf_mul(share, vf_set1(-2.0f));
  UNROLL
  for (int v = 0; v < CAP_VECTORS; v++) { /* NaN, where x is */
    y[v] = vf_max(vf_set1(-40.0f), vf_mul(vf_abs(x[v]), twice));
  }
  split_exp(y, CAP_VECTORS, exp);
  UNROLL
  for (int v = 0; v < CAP_VECTORS; v++) {
    const vf power_less_1 = vf_sub(exp[v].power, vf_set1(1.0f));
    e[v] = vf_fma(exp[v].power, vf_mul(exp[v].slope, exp[v].r), power_less_1);
    d[v] = vf_add(vf_set1(2.0f), e[v]);
  }
  negative_reciprocals(d, y);
  UNROLL
  for (int v = 0; v < CAP_VECTORS; v++) x[v] = vf_take_sign(vf_mul(e[v], y[v]), x[v]);
}

/* What stands behind the tile's tokens means nothing, before and after. */
ALWAYS_INLINE void cap_row(float *scores, float softcap, nyb_dtype round_to) {
  const vf inverse = vf_set1(1 / softcap), cap = vf_set1(softcap);
  for (int64_t t = 0; t < NYB_TILE_TOKENS; t += CAP_VECTORS * VECTOR_LANES) {
    vf x[CAP_VECTORS];
    UNROLL
    for (int v = 0; v < CAP_VECTORS; v++) {
      x[v] = round_score(vf_load(scores + t + v * VECTOR_LANES), round_to);
      if (round_to != NYB_F32) x[v] = round_score(vf_mul(x[v], inverse), round_to);
    }
    tanh_of(x, round_to == NYB_F32 ? inverse : vf_set1(1.0f));
    UNROLL
    for (int v = 0; v < CAP_VECTORS; v++) {
      const vf s = round_score(vf_mul(round_score(x[v], round_to), cap), round_to);
      vf_store(scores + t + v * VECTOR_LANES, s);
    }
  }
}

/* |position - token| as floats, for tokens from t on. */
ALWAYS_INLINE vf distances_from(int32_t distance, int64_t t) {
  static const int32_t lanes[] = {0,  -1, -2,  -3,  -4,  -5,  -6,  -7,
                                  -8, -9, -10, -11, -12, -13, -14, -15};
  _Static_assert(VECTOR_LANES <= sizeof lanes / sizeof lanes[0], "a number for each lane");
  const vi first = vi_set1((int32_t)(distance - t));
  return vf_abs(vf_from_vi(vi_add(first, vi_load(lanes))));
}

/* A vector of the mask that reaches past its row's last column: the missing ones are not read. */
static vf load_mask_tail(const void *mask, int64_t t, int64_t tokens, nyb_dtype dtype) {
  if (dtype != 0) return load_plain_tail(mask, t, tokens, dtype);
  float padded[VECTOR_LANES] = {0};
  for (int64_t i = 0; i < VECTOR_LANES && t + i < tokens; i++) {
    padded[i] = ((const uint8_t *)mask)[t + i];
  }
  return vf_load(padded);
}

/* dtype 0: bytes */
ALWAYS_INLINE vf load_mask(const void *mask, int64_t t, int64_t tokens, nyb_dtype dtype) {
  if (t + VECTOR_LANES > tokens) return load_mask_tail(mask, t, tokens, dtype);
  if (dtype == 0) return vf_from_vi(vi_load_bytes((const uint8_t *)mask + t));
  return load_plain(mask, t, dtype);
}

/* A sum with an f32 mask is an f32, whatever the scores were. */
ALWAYS_INLINE vf mask_score(vf score, vf mask, nyb_dtype mask_dtype, nyb_dtype round_to) {
  const vf hidden = vf_set1(-INFINITY);
  if (mask_dtype == 0) return vf_where_below(mask, 1, hidden, score);
  const vf sum = vf_add(score, mask);
  return vf_where_below(mask, -FLT_MAX, hidden,
                        mask_dtype == NYB_F32 ? sum : round_score(sum, round_to));
}

ALWAYS_INLINE void bias_row(const nyb_bias_tile *tile, int64_t row, nyb_dtype round_to, bool masked,
                            nyb_dtype mask_dtype) {
  const nyb_bias_row *r = &tile->of_rows[row];
  float *scores = tile->scores + row * NYB_TILE_TOKENS;
  const vf slope = vf_set1(-r->slope);
  if (tile->softcap != 0) cap_row(scores, tile->softcap, round_to);
  if (tile->softcap != 0 && !masked && !tile->sloped) return;
  for (int64_t t = 0; t < tile->tokens; t += VECTOR_LANES) {
    vf s = round_score(vf_load(scores + t), round_to);
    if (tile->sloped) {
      const vf bias = round_score(vf_mul(slope, distances_from(r->distance, t)), round_to);
      s = round_score(vf_add(s, bias), round_to);
    }
    if (masked) {
      const vf mask = load_mask(r->mask, t, tile->tokens, mask_dtype);
      s = mask_score(s, mask, mask_dtype, round_to);
    }
    vf_store(scores + t, s);
  }
}

ALWAYS_INLINE void bias_rows(const nyb_bias_tile *tile, nyb_dtype round_to) {
  for (int64_t row = 0; row < tile->rows; row++) {
    if (tile->mask == 0) {
      bias_row(tile, row, round_to, false, 0);
    } else if (tile->mask == NYB_MASK_ARRAY_BOOL) {
      bias_row(tile, row, round_to, true, 0);
    } else {
      switch (tile->mask_dtype) {
        case NYB_F32: bias_row(tile, row, round_to, true, NYB_F32); break;
        case NYB_F16: bias_row(tile, row, round_to, true, NYB_F16); break;
        case NYB_BF16: bias_row(tile, row, round_to, true, NYB_BF16); break;
      }
    }
  }
}

void KERNEL(attention_bias_plain_f32)(const nyb_bias_tile *tile);
void KERNEL(attention_bias_plain_f32)(const nyb_bias_tile *tile) {
  switch (tile->round_to) {
    case NYB_F32: bias_rows(tile, NYB_F32); break;
    case NYB_F16: bias_rows(tile, NYB_F16); break;
    case NYB_BF16: bias_rows(tile, NYB_BF16); break;
  }
}
