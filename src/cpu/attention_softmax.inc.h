/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Softmax -------------------------------------------------------------------------------- */

/* exp(x) for x <= 0 within 2 ulp; 0 below -87.3, where exp leaves the normal floats; NaN stays NaN.
 * x = n ln2 + r with |r| <= ln2/2, where the polynomial, fitted for the least largest relative
 * error, is off by 2e-9. ln2 is split so that n times its upper part is exact. Adding 1.5 * 2^23
 * rounds to an integer, which then stands in the low bits of the sum; 127 more make it the exponent
 * of 2^n. */
typedef struct exp_parts {
  vf power; /* 2^n */
  vf r;
  vf slope; /* (exp(r) - 1) / r */
} exp_parts;

/* Of `count` vectors, side by side: each step waits for the one before it. */
ALWAYS_INLINE void split_exp(const vf *x, int count, exp_parts *parts) {
  static const float terms[] = {0x1.1267d8p-7f, 0x1.555824p-5f, 0x1.555418p-3f, 0x1.fffffcp-2f,
                                1.0f};
  const vf shift = vf_set1(0x1.8p23f + 127);
  UNROLL
  for (int v = 0; v < count; v++) {
    const vf biased = vf_fma(x[v], vf_set1(0x1.715476p+0f), shift);
    const vf n = vf_sub(biased, shift);
    const vf r = vf_fma(n, vf_set1(-0x1.62e4p-1f), x[v]);
    parts[v].power = vf_power_of_low_bits(biased);
    parts[v].r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    parts[v].slope = vf_set1(0x1.6ae6ep-10f);
  }
  UNROLL
  for (int i = 0; i < 5; i++) {
    UNROLL
    for (int v = 0; v < count; v++) {
      parts[v].slope = vf_fma(parts[v].slope, parts[v].r, vf_set1(terms[i]));
    }
  }
}

ALWAYS_INLINE vf exp_of_negative(vf x) {
  exp_parts parts;
  split_exp(&x, 1, &parts);
  const vf p = vf_fma(parts.slope, parts.r, vf_set1(1.0f));
  return vf_zero_below(vf_mul(p, parts.power), x, -87.3f);
}

ALWAYS_INLINE vf round_score(vf score, nyb_dtype dtype) {
  if (dtype == NYB_BF16) return vf_round_bf16(score);
  if (dtype == NYB_F16) return vf_round_f16(score);
  return score;
}

/* Moves the row's maximum up to the tile's; what was summed so far shrinks along. */
ALWAYS_INLINE bool raise_maximum(const nyb_softmax_tile *tile, int64_t row, float tile_maximum) {
  const float before = tile->maximum[row];
  tile->rescale[row] = 1;
  if (!(tile_maximum > before)) return false;
  tile->maximum[row] = tile_maximum;
  if (before == -INFINITY) return false;
  float lanes[VECTOR_LANES];
  vf_store(lanes, exp_of_negative(vf_set1(before - tile_maximum)));
  tile->rescale[row] = lanes[0];
  tile->sum[row] *= lanes[0];
  return true;
}

/* What scores are measured from. While every score was -inf it is 0, so that they weigh 0 and not
 * the NaN of -inf - -inf; a NaN score still gives NaN. */
ALWAYS_INLINE vf reference_of(const nyb_softmax_tile *tile, int64_t row) {
  const float maximum = tile->maximum[row];
  return vf_set1(maximum == -INFINITY ? 0 : maximum);
}

/* A row that sees the whole tile: no lane is masked. */
ALWAYS_INLINE bool softmax_whole_row(const nyb_softmax_tile *tile, int64_t row,
                                     nyb_dtype round_to) {
  float *scores = tile->scores + row * NYB_TILE_TOKENS;
  vf largest = vf_set1(-INFINITY);
  UNROLL_BY(8) for (int t = 0; t < NYB_TILE_TOKENS; t += VECTOR_LANES) {
    const vf s = round_score(vf_load(scores + t), round_to);
    if (round_to != NYB_F32) vf_store(scores + t, s);
    largest = vf_max(s, largest);
  }
  const bool moved = raise_maximum(tile, row, vf_reduce_max(largest));
  const vf reference = reference_of(tile, row);
  vf sum = vf_zero();
  UNROLL_BY(4) for (int t = 0; t < NYB_TILE_TOKENS; t += VECTOR_LANES) {
    const vf p = exp_of_negative(vf_sub(vf_load(scores + t), reference));
    vf_store(scores + t, p);
    sum = vf_add(sum, p);
  }
  tile->sum[row] += vf_reduce_add(sum);
  return moved;
}

static bool softmax_part_row(const nyb_softmax_tile *tile, int64_t row, nyb_dtype round_to) {
  float *scores = tile->scores + row * NYB_TILE_TOKENS;
  const int64_t visible = tile->visible[row];
  vf largest = vf_set1(-INFINITY);
  for (int64_t t = 0; t < visible; t += VECTOR_LANES) {
    vf s = round_score(vf_load(scores + t), round_to);
    vf_store(scores + t, s);
    if (t + VECTOR_LANES > visible) {
      float lanes[VECTOR_LANES];
      vf_store(lanes, s);
      for (int64_t i = visible - t; i < VECTOR_LANES; i++) lanes[i] = -INFINITY;
      s = vf_load(lanes);
    }
    largest = vf_max(s, largest);
  }
  const bool moved = raise_maximum(tile, row, vf_reduce_max(largest));
  const vf reference = reference_of(tile, row);
  vf sum = vf_zero();
  int64_t t = 0;
  for (; t < visible; t += VECTOR_LANES) {
    const vf p = exp_of_negative(vf_sub(vf_load(scores + t), reference));
    const vf kept = vf_keep_first(p, visible - t);
    vf_store(scores + t, kept);
    sum = vf_add(sum, kept);
  }
  for (; t < NYB_TILE_TOKENS; t += VECTOR_LANES) vf_store(scores + t, vf_zero());
  tile->sum[row] += vf_reduce_add(sum);
  return moved;
}

ALWAYS_INLINE bool softmax_row(const nyb_softmax_tile *tile, int64_t row, nyb_dtype round_to) {
  return tile->visible[row] == NYB_TILE_TOKENS ? softmax_whole_row(tile, row, round_to)
                                               : softmax_part_row(tile, row, round_to);
}

bool KERNEL(attention_softmax_plain_f32)(const nyb_softmax_tile *tile);
bool KERNEL(attention_softmax_plain_f32)(const nyb_softmax_tile *tile) {
  bool moved = false;
  for (int64_t row = 0; row < tile->rows; row++) {
    switch (tile->round_to) {
      case NYB_F32: moved |= softmax_row(tile, row, NYB_F32); break;
      case NYB_F16: moved |= softmax_row(tile, row, NYB_F16); break;
      case NYB_BF16: moved |= softmax_row(tile, row, NYB_BF16); break;
    }
  }
  return moved;
}
