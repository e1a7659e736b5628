/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Queries -------------------------------------------------------------------------------- */

/* The prepared form of an affine row. */
typedef struct prepared_row {
  int32_t *pairs;     /* [dim/2], in the order in which codes come out of a word */
  int32_t *low_pairs; /* [dim/2], the second term, if there are two */
  float *step;        /* [groups]: value of 1 in pairs; in low_pairs it is step/LOW_STEPS */
  float *sum;         /* [groups]: sum of the row as prepared */
  int32_t *start;     /* [groups]: the dot of pairs with the middle code, negated */
  int32_t *low_start; /* [groups]: that of low_pairs */
} prepared_row;

/* The remainder after the first term may exceed half a step by the little by which f32 misses the
 * nearest code, 0.004 of a step: 0.504 * 65000 still fits 16 bits. */
#define LOW_STEPS 65000.0f

ALWAYS_INLINE prepared_row prepared_row_at(const void *prepared, int64_t row, int64_t dim,
                                           int64_t groups) {
  char *base = (char *)(uintptr_t)prepared + row * nyb_prepared_bytes(dim);
  prepared_row r;
  r.pairs = (int32_t *)(void *)base;
  r.low_pairs = r.pairs + dim / 2;
  r.step = (float *)(void *)(r.low_pairs + dim / 2);
  r.sum = r.step + groups;
  r.start = (int32_t *)(void *)(r.sum + groups);
  r.low_start = r.start + groups;
  return r;
}

/* Codes are used as stored where they do not straddle words and a group fills four words; else they
 * are unpacked to bytes. */
ALWAYS_INLINE int key_bits(int stored_bits, int64_t group_size) {
  const bool straddles = stored_bits == 3 || stored_bits == 5 || stored_bits == 6;
  return straddles || group_size * stored_bits < 4 * 32 ? 8 : stored_bits;
}

/* Writes terms of 16 bits where codes of `bits` bits will meet them: word by word, the pair k of a
 * word holds its elements k and k + half. */
ALWAYS_INLINE void write_pairs(const int32_t *codes, int64_t count, int stored_bits,
                               int32_t *pairs) {
  const int bits = key_bits(stored_bits, count);
  const int half = 16 / bits;
  for (int64_t first = 0; first < count; first += 2 * half) {
    for (int64_t k = first; k < first + half; k++) {
      const int64_t low = bits == stored_bits ? k : unpacked_element(k);
      const int64_t high = bits == stored_bits ? k + half : unpacked_element(k + half);
      *pairs++ = (int32_t)(((uint32_t)codes[low] & 0xffffu) | (uint32_t)codes[high] << 16);
    }
  }
}

/* Rounds one group of a row to 16 bits and, if asked, its remainder to 16 more. A NaN or infinity
 * makes step and sum NaN or infinite, so that the score is not a number that looks right. */
ALWAYS_INLINE void prepare_group(const float *q, int64_t count, int bits, bool precise,
                                 const prepared_row *to, int64_t group) {
  int32_t *pairs = to->pairs + group * count / 2, *low_pairs = to->low_pairs + group * count / 2;
  int32_t codes[MAX_GROUP];
  vf largest = vf_zero(), poison = vf_zero();
  for (int64_t i = 0; i < count; i += VECTOR_LANES) {
    const vf x = vf_load(q + i);
    largest = vf_max(vf_abs(x), largest);
    poison = vf_fma(x, vf_zero(), poison);
  }
  float limit = vf_reduce_max(largest);
  /* Far below normal floats 32767/limit would overflow. */
  const float up = limit < 0x1p-90f ? 0x1p100f : 1.0f;
  limit *= up;
  const float inverse = limit > 0 ? 32767.0f / limit : 0;
  const float unit = limit / 32767.0f; /* of a code, in q*up */
  vi total = vi_zero();
  for (int64_t i = 0; i < count; i += VECTOR_LANES) {
    const vi code = vi_from_vf(vf_mul(vf_mul(vf_load(q + i), vf_set1(up)), vf_set1(inverse)));
    vi_store(codes + i, code);
    total = vi_add(total, code);
  }
  int32_t lanes[VECTOR_LANES];
  vi_store(lanes, total);
  uint32_t code_sum = 0; /* wraps where q is not a number; the poison below tells then */
  for (int i = 0; i < VECTOR_LANES; i++) code_sum += (uint32_t)lanes[i];
  write_pairs(codes, count, bits, pairs);
  to->start[group] = (int32_t)(0u - (code_sum << (bits - 1)));

  float exact_sum = unit * (float)(int32_t)code_sum;
  if (precise) {
    const vf low_inverse = vf_set1(limit > 0 ? LOW_STEPS / unit : 0);
    total = vi_zero();
    for (int64_t i = 0; i < count; i += VECTOR_LANES) {
      const vf taken = vf_from_vi(vi_load(codes + i));
      const vf rest = vf_fma(taken, vf_set1(-unit), vf_mul(vf_load(q + i), vf_set1(up)));
      const vi code = vi_from_vf(vf_mul(rest, low_inverse));
      vi_store(codes + i, code);
      total = vi_add(total, code);
    }
    vi_store(lanes, total);
    code_sum = 0;
    for (int i = 0; i < VECTOR_LANES; i++) code_sum += (uint32_t)lanes[i];
    write_pairs(codes, count, bits, low_pairs);
    to->low_start[group] = (int32_t)(0u - (code_sum << (bits - 1)));
    exact_sum += unit / LOW_STEPS * (float)(int32_t)code_sum;
  }
  const float poisoned = vf_reduce_add(poison);
  to->step[group] = unit / up + poisoned;
  to->sum[group] = exact_sum / up + poisoned;
}

ALWAYS_INLINE void queries_affine(const nyb_query_block *block, int bits) {
  const int64_t groups = block->dim / block->group_size;
  for (int64_t row = 0; row < block->rows; row++) {
    const float *q = block->q + row * nyb_padded_dim(block->dim);
    const prepared_row r = prepared_row_at(block->prepared, row, block->dim, groups);
    for (int64_t g = 0; g < groups; g++) {
      prepare_group(q + g * block->group_size, block->group_size, bits, block->precise, &r, g);
    }
  }
}

static void queries_plain(const nyb_query_block *block) {
  const int64_t padded = nyb_padded_dim(block->dim);
  for (int64_t row = 0; row < block->rows; row++) {
    memcpy((char *)block->prepared + row * nyb_prepared_bytes(block->dim), block->q + row * padded,
           (size_t)padded * sizeof(float));
  }
}

/* ---- Scores over affine keys ---------------------------------------------------------------- */

/* Field i of `bits` bits of each 16-bit half. */
ALWAYS_INLINE vi field_of_halves(vi words, int i, int bits) {
  const vi shifted = i == 0 ? words : vi_shift_right_halves(words, i * bits);
  if ((i + 1) * bits == 16) return shifted;
  return vi_and(shifted, vi_set1((int32_t)(((1u << bits) - 1) * 0x10001u)));
}

/* Codes of one group, a vector's worth of tokens from `first` on, each at a multiple of
 * UNPACKED_STRIDE: unpacked to bytes, or as they are. Past the end it is the last token again. */
ALWAYS_INLINE void copy_codes(const nyb_tile_tokens *k, int64_t group, int64_t first,
                              int stored_bits, bool unpack, uint8_t *bytes) {
  const int64_t count = k->group_size, group_bytes = count * stored_bits / 8;
  const char *rows = k->codes + first * k->codes_stride_bytes + group * group_bytes;
  const int64_t left = k->tokens - first, tokens = left < VECTOR_LANES ? left : VECTOR_LANES;
  if (unpack) {
    unpack_codes(rows, k->codes_stride_bytes, tokens, count, stored_bits, bytes);
  } else {
    for (int64_t t = 0; t < tokens; t++) {
      memcpy(bytes + t * UNPACKED_STRIDE, rows + t * k->codes_stride_bytes, (size_t)group_bytes);
    }
  }
  const uint8_t *last = bytes + (tokens - 1) * UNPACKED_STRIDE;
  for (int64_t t = tokens; t < VECTOR_LANES; t++) {
    memcpy(bytes + t * UNPACKED_STRIDE, last, UNPACKED_STRIDE);
  }
}

/* One group of the tile's codes as pairs of 16-bit integers: [vector of tokens][pair][lane]. */
ALWAYS_INLINE void transpose_group(const nyb_tile_tokens *k, int64_t group, int stored_bits,
                                   int64_t padded_tokens, int32_t *pairs, uint8_t *bytes) {
  const int64_t count = k->group_size;
  const int bits = key_bits(stored_bits, count);
  const int fields = 16 / bits;
  for (int64_t t = 0; t < padded_tokens; t += VECTOR_LANES) {
    const char *words = k->codes + t * k->codes_stride_bytes + group * count * stored_bits / 8;
    int64_t stride = k->codes_stride_bytes;
    if (bits != stored_bits || t + VECTOR_LANES > k->tokens) {
      copy_codes(k, group, t, stored_bits, bits != stored_bits, bytes);
      words = (const char *)bytes;
      stride = UNPACKED_STRIDE;
    }
    int32_t *to = pairs + t / VECTOR_LANES * PAIRS_STRIDE;
    for (const char *end = words + count * bits / 8; words < end; words += 16) {
      vi lanes[4];
      load_words_transposed(words, stride, lanes);
      UNROLL
      for (int j = 0; j < 4; j++) {
        UNROLL
        for (int i = 0; i < fields; i++, to += VECTOR_LANES) {
          vi_store(to, field_of_halves(lanes[j], i, bits));
        }
      }
    }
  }
}

/* Prepared rows from one on, at the pairs and at the numbers of one group. */
typedef struct group_of_queries {
  const char *pairs, *low_pairs;
  const char *step, *sum, *start, *low_start;
  int64_t stride_bytes;
} group_of_queries;

ALWAYS_INLINE group_of_queries queries_of_group(const nyb_score_tile *tile, int64_t group) {
  const int64_t dim = tile->k.dim, groups = dim / tile->k.group_size;
  const prepared_row r = prepared_row_at(tile->prepared, 0, dim, groups);
  return (group_of_queries){
      .pairs = (const char *)(r.pairs + group * tile->k.group_size / 2),
      .low_pairs = (const char *)(r.low_pairs + group * tile->k.group_size / 2),
      .step = (const char *)(r.step + group),
      .sum = (const char *)(r.sum + group),
      .start = (const char *)(r.start + group),
      .low_start = (const char *)(r.low_start + group),
      .stride_bytes = nyb_prepared_bytes(dim),
  };
}

ALWAYS_INLINE float float_at(const char *bytes) { return *(const float *)(const void *)bytes; }
ALWAYS_INLINE int32_t int_at(const char *bytes) { return *(const int32_t *)(const void *)bytes; }

typedef struct group_of_keys {
  const int32_t *pairs;
  int64_t pair_count;
  const float *scales, *middles; /* [token]; middle: the value of the middle code */
  ahead_cursor *ahead;
} group_of_keys;

/* sums[r][v] = start[r] + q_r . k over one group, for a few rows and vectors of tokens. */
ALWAYS_INLINE void dot_block(int rows, int vectors, const char *q, const char *start,
                             int64_t stride_bytes, const group_of_keys *keys, int64_t token,
                             vi sums[DOT_ROWS][DOT_VECTORS]) {
  const int32_t *pairs = keys->pairs + token / VECTOR_LANES * PAIRS_STRIDE;
  const int32_t *const end = pairs + keys->pair_count * VECTOR_LANES;
  ahead_run ahead = take_ahead(keys->ahead, keys->pair_count);
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < vectors; v++) sums[r][v] = vi_set1(int_at(start + r * stride_bytes));
  }
  do {
    UNROLL
    for (int step = 0; step < DOT_STEPS; step++) {
      vi k[DOT_VECTORS];
      UNROLL
      for (int v = 0; v < vectors; v++) k[v] = vi_load(pairs + v * PAIRS_STRIDE);
      touch(&ahead);
      UNROLL
      for (int r = 0; r < rows; r++) {
        const vi both = vi_set1(int_at(q + r * stride_bytes));
        UNROLL
        for (int v = 0; v < vectors; v++) sums[r][v] = vi_dot16(sums[r][v], k[v], both);
      }
      pairs += VECTOR_LANES;
      q += sizeof(int32_t);
    }
  } while (pairs < end);
}

/* score += scale * (step * dot of q and code - middle code) + middle * sum(q). The distance from
 * the middle code is taken among the integers, where it is exact: with bias * sum(q), two large
 * terms would cancel. */
ALWAYS_INLINE void score_block(const group_of_queries *queries, const group_of_keys *keys, int rows,
                               int vectors, bool precise, int64_t first_row, int64_t token,
                               float *scores) {
  const int64_t stride_bytes = queries->stride_bytes, row_bytes = first_row * stride_bytes;
  const char *step = queries->step + row_bytes, *sum = queries->sum + row_bytes;
  vi sums[DOT_ROWS][DOT_VECTORS], low_sums[DOT_ROWS][DOT_VECTORS];
  dot_block(rows, vectors, queries->pairs + row_bytes, queries->start + row_bytes, stride_bytes,
            keys, token, sums);
  if (precise) {
    dot_block(rows, vectors, queries->low_pairs + row_bytes, queries->low_start + row_bytes,
              stride_bytes, keys, token, low_sums);
  }
  scores += first_row * NYB_TILE_TOKENS + token;
  UNROLL
  for (int r = 0; r < rows; r++) {
    const float of_code = float_at(step + r * stride_bytes);
    const vf q_sum = vf_set1(float_at(sum + r * stride_bytes));
    UNROLL
    for (int v = 0; v < vectors; v++) {
      const int64_t t = v * VECTOR_LANES;
      vf dot = vf_mul(vf_from_vi(sums[r][v]), vf_set1(of_code));
      if (precise) dot = vf_fma(vf_from_vi(low_sums[r][v]), vf_set1(of_code / LOW_STEPS), dot);
      float *score = scores + r * NYB_TILE_TOKENS + t;
      const vf scaled = vf_fma(vf_load(keys->scales + token + t), dot, vf_load(score));
      vf_store(score, vf_fma(vf_load(keys->middles + token + t), q_sum, scaled));
    }
  }
}

ALWAYS_INLINE void score_rows(const group_of_queries *queries, const group_of_keys *keys, int rows,
                              bool precise, int64_t first_row, int64_t padded_tokens,
                              float *scores) {
  int64_t t = 0;
  for (; t + DOT_VECTORS * VECTOR_LANES <= padded_tokens; t += DOT_VECTORS * VECTOR_LANES) {
    score_block(queries, keys, rows, DOT_VECTORS, precise, first_row, t, scores);
  }
  for (; t < padded_tokens; t += VECTOR_LANES) {
    score_block(queries, keys, rows, 1, precise, first_row, t, scores);
  }
}

typedef struct score_scratch {
  int32_t pairs[NYB_TILE_TOKENS / VECTOR_LANES * PAIRS_STRIDE];
  uint8_t bytes[VECTOR_LANES * UNPACKED_STRIDE];
  group_floats scales, middles;
} score_scratch;
_Static_assert(sizeof(score_scratch) <= NYB_TILE_SCRATCH_BYTES, "scores must fit the scratch");

/* The value of a code: scale * code + bias. Takes biases to the values of the middle code. What is
 * infinite becomes NaN, and with it the score: times the distances and sums of both signs it might
 * become the -inf that weighs nothing. */
ALWAYS_INLINE void add_middles(const float *scales, int bits, float *biases) {
  const vf middle_code = vf_set1((float)(1 << (bits - 1)));
  for (int64_t t = 0; t < NYB_TILE_TOKENS; t += VECTOR_LANES) {
    const vf scale = vf_load(scales + t), bias = vf_load(biases + t);
    const vf middle = vf_fma(scale, middle_code, bias);
    vf_store(biases + t, vf_fma(vf_add(scale, bias), vf_zero(), middle));
  }
}

/* Kept out of line: it does not depend on the width of codes, so all widths share one copy. */
#define DEFINE_SCORE_GROUP(name, precise)                                               \
  static __attribute__((noinline)) void name(const group_of_queries *queries,           \
                                             const group_of_keys *keys, int64_t rows,   \
                                             int64_t padded_tokens, float *scores) {    \
    int64_t row = 0;                                                                    \
    for (; row + DOT_ROWS <= rows; row += DOT_ROWS) {                                   \
      score_rows(queries, keys, DOT_ROWS, precise, row, padded_tokens, scores);         \
    }                                                                                   \
    switch (rows - row) {                                                               \
      case 3: score_rows(queries, keys, 3, precise, row, padded_tokens, scores); break; \
      case 2: score_rows(queries, keys, 2, precise, row, padded_tokens, scores); break; \
      case 1: score_rows(queries, keys, 1, precise, row, padded_tokens, scores); break; \
      default: break;                                                                   \
    }                                                                                   \
  }
DEFINE_SCORE_GROUP(score_group, false)
DEFINE_SCORE_GROUP(score_group_precise, true)

/* How often dot_block goes through its loop. */
ALWAYS_INLINE int64_t score_steps(const nyb_score_tile *tile, int64_t padded_tokens) {
  const int64_t blocks_of_rows = (tile->rows + DOT_ROWS - 1) / DOT_ROWS;
  const int64_t block_tokens = DOT_VECTORS * VECTOR_LANES;
  const int64_t blocks = blocks_of_rows * ((padded_tokens + block_tokens - 1) / block_tokens);
  return tile->k.dim / 2 * (tile->precise ? 2 : 1) * blocks;
}

ALWAYS_INLINE void scores_affine(const nyb_score_tile *tile, int bits) {
  score_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *k = &tile->k;
  const int64_t padded_tokens = (k->tokens + VECTOR_LANES - 1) / VECTOR_LANES * VECTOR_LANES;
  ahead_cursor ahead = start_ahead(&tile->ahead, score_steps(tile, padded_tokens), scratch);
  group_of_keys keys = {.pairs = scratch->pairs, .pair_count = k->group_size / 2, .ahead = &ahead};
  for (int64_t i = 0; i < tile->rows * NYB_TILE_TOKENS; i += VECTOR_LANES) {
    vf_store(tile->scores + i, vf_zero());
  }
  const int64_t groups = k->dim / k->group_size;
  for (int64_t group = 0; group < groups; group++) {
    transpose_group(k, group, bits, padded_tokens, scratch->pairs, scratch->bytes);
    const int64_t in_span = group % MAX_SPAN;
    if (in_span == 0) {
      const int64_t left = groups - group, span = left < MAX_SPAN ? left : MAX_SPAN;
      gather_groups(k->scales, k->scales_stride_bytes, group, span, k->tokens, k->scale_dtype,
                    scratch->scales);
      gather_groups(k->biases, k->biases_stride_bytes, group, span, k->tokens, k->scale_dtype,
                    scratch->middles);
      for (int64_t i = 0; i < span; i++) {
        add_middles(scratch->scales[i], bits, scratch->middles[i]);
      }
    }
    keys.scales = scratch->scales[in_span];
    keys.middles = scratch->middles[in_span];
    const group_of_queries queries = queries_of_group(tile, group);
    if (tile->precise) {
      score_group_precise(&queries, &keys, tile->rows, padded_tokens, tile->scores);
    } else {
      score_group(&queries, &keys, tile->rows, padded_tokens, tile->scores);
    }
  }
}

/* ---- Scores over plain keys ----------------------------------------------------------------- */

/* Elements in the lanes: each key vector is loaded once for up to four rows. */
ALWAYS_INLINE void score_plain_rows(const nyb_score_tile *tile, int rows, int64_t first_row,
                                    ahead_cursor *cursor, nyb_dtype dtype) {
  const nyb_tile_tokens *k = &tile->k;
  const float *q[DOT_ROWS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    q[r] = (const float *)(const void *)((const char *)tile->prepared +
                                         (first_row + r) * nyb_prepared_bytes(k->dim));
  }
  const int64_t whole = k->dim / VECTOR_LANES * VECTOR_LANES;
  for (int64_t t = 0; t < k->tokens; t++) {
    ahead_run ahead = take_ahead(cursor, k->dim / (2 * VECTOR_LANES));
    const char *key = k->codes + t * k->codes_stride_bytes;
    vf even[DOT_ROWS], odd[DOT_ROWS]; /* two chains a row hide the FMA's latency */
    UNROLL
    for (int r = 0; r < rows; r++) even[r] = odd[r] = vf_zero();
    int64_t d = 0;
    for (; d + 2 * VECTOR_LANES <= whole; d += 2 * VECTOR_LANES) {
      touch(&ahead);
      const vf first = load_plain(key, d, dtype), second = load_plain(key, d + VECTOR_LANES, dtype);
      UNROLL
      for (int r = 0; r < rows; r++) {
        even[r] = vf_fma(first, vf_load(q[r] + d), even[r]);
        odd[r] = vf_fma(second, vf_load(q[r] + d + VECTOR_LANES), odd[r]);
      }
    }
    for (; d < k->dim; d += VECTOR_LANES) {
      const vf last =
          d < whole ? load_plain(key, d, dtype) : load_plain_tail(key, d, k->dim, dtype);
      UNROLL
      for (int r = 0; r < rows; r++) even[r] = vf_fma(last, vf_load(q[r] + d), even[r]);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
      tile->scores[(first_row + r) * NYB_TILE_TOKENS + t] = vf_reduce_add(vf_add(even[r], odd[r]));
    }
  }
}

ALWAYS_INLINE void scores_plain(const nyb_score_tile *tile, nyb_dtype dtype) {
  /* A step takes two vectors of a token; a row may be shorter than that. */
  const int64_t steps = (tile->k.dim + 2 * VECTOR_LANES - 1) / (2 * VECTOR_LANES) * tile->k.tokens;
  ahead_cursor ahead = start_ahead(&tile->ahead, steps, tile->prepared);
  int64_t row = 0;
  for (; row + 4 <= tile->rows; row += 4) score_plain_rows(tile, 4, row, &ahead, dtype);
  switch (tile->rows - row) {
    case 3: score_plain_rows(tile, 3, row, &ahead, dtype); break;
    case 2: score_plain_rows(tile, 2, row, &ahead, dtype); break;
    case 1: score_plain_rows(tile, 1, row, &ahead, dtype); break;
    default: break;
  }
}
