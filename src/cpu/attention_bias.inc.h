/* SPDX-License-Identifier: Apache-2.0 */
/* ---- What is done to scores before the softmax ---------------------------------------------- */

/* -1/d for d in [1, 2] within 1.5 units of 2^-24; a division takes longer than all else here. The
 * parabola of least relative error, 1/99, which two Newton steps square twice. */
ALWAYS_INLINE vf negative_reciprocal(vf d) {
  vf r = vf_fma(d, vf_set1(-32.0f / 99), vf_set1(144.0f / 99));
  r = vf_fma(d, r, vf_set1(-210.0f / 99));
  r = vf_fma(r, vf_fma(d, r, vf_set1(1.0f)), r);
  return vf_fma(r, vf_fma(d, r, vf_set1(1.0f)), r);
}

/* tanh(x) within 6 units of 2^-24 of itself (tests/test_attention_masks.c); NaN stays NaN. With
 * e = exp(-2|x|) - 1 it is -e / (2 + e). exp(y) is 2^n (1 + r slope), so e is
 * 2^n r slope + (2^n - 1), of two terms of one sign, the second of them exact: nothing cancels, and
 * a small x keeps its relative precision. From 2^-24 of 1 on, at -17, e is -1. */
ALWAYS_INLINE vf tanh_of(vf x) {
  const vf y = vf_max(vf_set1(-40.0f), vf_mul(vf_abs(x), vf_set1(-2.0f))); /* NaN, where x is */
  const exp_parts exp = split_exp(y);
  const vf e = vf_fma(exp.power, vf_mul(exp.slope, exp.r), vf_sub(exp.power, vf_set1(1.0f)));
  const vf of_positive = vf_mul(e, negative_reciprocal(vf_add(vf_set1(2.0f), e)));
  return vf_where_below(x, 0, vf_sub(vf_zero(), of_positive), of_positive);
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
  const vf softcap = vf_set1(tile->softcap), slope = vf_set1(-r->slope);
  const vf inverse = vf_set1(1 / tile->softcap); /* or, where there is none, infinity, unused */
  for (int64_t t = 0; t < tile->tokens; t += VECTOR_LANES) {
    vf s = round_score(vf_load(scores + t), round_to);
    if (tile->softcap != 0) {
      const vf share = round_score(vf_mul(s, inverse), round_to);
      s = round_score(vf_mul(round_score(tanh_of(share), round_to), softcap), round_to);
    }
    if (tile->sloped) {
      const vf bias = round_score(vf_mul(slope, distances_from(r->distance, t)), round_to);
      s = round_score(vf_add(s, bias), round_to);
    }
    if (masked)
      s = mask_score(s, load_mask(r->mask, t, tile->tokens, mask_dtype), mask_dtype, round_to);
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
