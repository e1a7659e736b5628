/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Values as floats ---------------------------------------------------------------------- */

enum { MAX_SUM_ROWS = 4, MAX_SUM_VECTORS = 8 };

typedef struct value_scratch {
  float weights[NYB_TILE_ROWS * NYB_TILE_TOKENS]; /* p * scale of the token's group */
  float bias_sums[NYB_TILE_ROWS];                 /* sum of p * bias */
  group_floats scales, biases;
  float decoded[NYB_TILE_TOKENS * SUM_VECTORS * VECTOR_LANES]; /* a strip of columns */
} value_scratch;
_Static_assert(sizeof(value_scratch) <= NYB_TILE_SCRATCH_BYTES, "values must fit the scratch");

/* A strip is `vectors` vectors of columns. Its source is the stored rows (bits 2..8, or 0 for plain
 * elements of `dtype`), or a strip decoded before (bits -1). */
typedef struct value_strip {
  const char *rows; /* of the first token; strip of floats: its first float */
  int64_t stride_bytes;
  int64_t element; /* first column */
  int64_t dim;
  int64_t tokens;
  ahead_cursor *ahead; /* NULL: nothing to fetch meanwhile */
} value_strip;

enum { SOURCE_PLAIN = 0, SOURCE_DECODED = -1 };

ALWAYS_INLINE vf load_value(const value_strip *strip, int64_t token, int vector, int bits,
                            nyb_dtype dtype) {
  const char *row = strip->rows + token * strip->stride_bytes;
  const int64_t element = strip->element + vector * VECTOR_LANES;
  if (bits == SOURCE_DECODED) {
    return vf_load((const float *)(const void *)row + vector * VECTOR_LANES);
  }
  if (bits == SOURCE_PLAIN) return load_plain(row, element, dtype);
  return decode_codes(row, element, bits);
}

/* out[r] += sum over tokens of weights[r][t] * value[t], then + bias_sums[r]. */
ALWAYS_INLINE void sum_block(int rows, int vectors, const value_strip *strip, int bits,
                             nyb_dtype dtype, const float *weights, const float *bias_sums,
                             float *out, int64_t out_stride) {
  vf sums[MAX_SUM_ROWS][MAX_SUM_VECTORS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < vectors; v++) sums[r][v] = vf_load(out + r * out_stride + v * VECTOR_LANES);
  }
  ahead_run ahead = {.line = (const char *)weights};
  if (strip->ahead != NULL) ahead = take_ahead(strip->ahead, strip->tokens);
  for (int64_t t = 0; t < strip->tokens; t++) {
    touch(&ahead);
    vf value[MAX_SUM_VECTORS];
    UNROLL
    for (int v = 0; v < vectors; v++) value[v] = load_value(strip, t, v, bits, dtype);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const vf weight = vf_set1(weights[r * NYB_TILE_TOKENS + t]);
      UNROLL
      for (int v = 0; v < vectors; v++) sums[r][v] = vf_fma(weight, value[v], sums[r][v]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    const vf bias = vf_set1(bias_sums[r]);
    UNROLL
    for (int v = 0; v < vectors; v++) {
      vf_store(out + r * out_stride + v * VECTOR_LANES, vf_add(sums[r][v], bias));
    }
  }
}

/* All rows of the block over one strip of SUM_VECTORS vectors. With many rows the strip is decoded
 * once into scratch. */
ALWAYS_INLINE void sum_strip(const nyb_value_tile *tile, value_strip strip, int bits,
                             nyb_dtype dtype, const float *weights, value_scratch *scratch) {
  const int64_t out_stride = nyb_padded_dim(tile->v.dim);
  float *out = tile->out + strip.element;
  const bool decode = tile->rows > MAX_SUM_ROWS;
  if (decode) {
    float *to = scratch->decoded;
    ahead_run ahead = take_ahead(strip.ahead, strip.tokens);
    for (int64_t t = 0; t < strip.tokens; t++) {
      touch(&ahead);
      UNROLL
      for (int v = 0; v < SUM_VECTORS; v++, to += VECTOR_LANES) {
        vf_store(to, load_value(&strip, t, v, bits, dtype));
      }
    }
    strip.ahead = NULL;
    strip.rows = (const char *)scratch->decoded;
    strip.stride_bytes = SUM_VECTORS * VECTOR_LANES * (int64_t)sizeof(float);
  }
  int64_t row = 0;
#define NYB_SUM_ROWS(count)                                                                \
  do {                                                                                     \
    const float *w = weights + row * NYB_TILE_TOKENS, *b = scratch->bias_sums + row;       \
    float *o = out + row * out_stride;                                                     \
    if (decode) {                                                                          \
      sum_block(count, SUM_VECTORS, &strip, SOURCE_DECODED, NYB_F32, w, b, o, out_stride); \
    } else {                                                                               \
      sum_block(count, SUM_VECTORS, &strip, bits, dtype, w, b, o, out_stride);             \
    }                                                                                      \
  } while (0)
  for (; row + MAX_SUM_ROWS <= tile->rows; row += MAX_SUM_ROWS) NYB_SUM_ROWS(MAX_SUM_ROWS);
  switch (tile->rows - row) {
    case 3: NYB_SUM_ROWS(3); break;
    case 2: NYB_SUM_ROWS(2); break;
    case 1: NYB_SUM_ROWS(1); break;
    default: break;
  }
#undef NYB_SUM_ROWS
}

/* For all strips of a tile, with a step for each token of each strip. */
ALWAYS_INLINE ahead_cursor start_ahead_of_strips(const nyb_value_tile *tile) {
  const int64_t strip_columns = SUM_VECTORS * VECTOR_LANES;
  const int64_t strips = (tile->v.dim + strip_columns - 1) / strip_columns;
  return start_ahead(&tile->ahead, strips * tile->v.tokens, tile->weights);
}

/* Returns how many groups were there to gather. */
static int64_t gather_span(const nyb_tile_tokens *v, int64_t group, group_floats scales,
                           group_floats biases) {
  const int64_t left = v->dim / v->group_size - group, span = left < MAX_SPAN ? left : MAX_SPAN;
  gather_groups(v->scales, v->scales_stride_bytes, group, span, v->tokens, v->scale_dtype, scales);
  gather_groups(v->biases, v->biases_stride_bytes, group, span, v->tokens, v->scale_dtype, biases);
  return span;
}

/* weights = p * scale, bias_sums = sum of p * bias, for one group. */
ALWAYS_INLINE void weigh_group(const nyb_value_tile *tile, const float *scales, const float *biases,
                               value_scratch *scratch) {
  const int64_t tokens = tile->v.tokens;
  for (int64_t row = 0; row < tile->rows; row++) {
    const float *p = tile->weights + row * NYB_TILE_TOKENS;
    float *weights = scratch->weights + row * NYB_TILE_TOKENS;
    vf sum = vf_zero();
    for (int64_t t = 0; t < tokens; t += VECTOR_LANES) {
      const vf probability = vf_load(p + t);
      vf_store(weights + t, vf_mul(probability, vf_load(scales + t)));
      sum = vf_fma(probability, vf_load(biases + t), sum);
    }
    scratch->bias_sums[row] = vf_reduce_add(sum);
  }
}

ALWAYS_INLINE void values_affine_precise(const nyb_value_tile *tile, int bits) {
  value_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  ahead_cursor ahead = start_ahead_of_strips(tile);
  value_strip strip = {.rows = v->codes,
                       .stride_bytes = v->codes_stride_bytes,
                       .dim = v->dim,
                       .tokens = v->tokens,
                       .ahead = &ahead};
  for (int64_t group = 0; group < v->dim / v->group_size; group++) {
    const int64_t in_span = group % MAX_SPAN;
    if (in_span == 0) gather_span(v, group, scratch->scales, scratch->biases);
    weigh_group(tile, scratch->scales[in_span], scratch->biases[in_span], scratch);
    const int64_t first = group * v->group_size;
    for (strip.element = first; strip.element < first + v->group_size;
         strip.element += SUM_VECTORS * VECTOR_LANES) {
      sum_strip(tile, strip, bits, NYB_F32, scratch->weights, scratch);
    }
  }
}

/* ---- Values as integers ---------------------------------------------------------------------
 *
 * out gets the sums of p*scale*code and of p*bias. Within one tile and group p*scale is rounded to
 * 16 bits (step: its largest magnitude / 32767), and tokens t and t + 32 form the pairs of integer
 * dots, whose sums are exact. What rounding took from the sum of p*scale is put back at the middle
 * code, so that only the codes' distance from the middle meets the rounding error.
 *
 * A code vector comes from the words of two tokens: their 16-bit halves interleaved, which takes
 * two vectors, low and high, and there shifted and masked. Where a group fills whole vectors of
 * words, both belong to it; where it fills half a vector, two groups are loaded at once so that low
 * holds the one and high the other. `columns` undoes the order of the elements once, at the end. */

enum { PAIRS = NYB_TILE_TOKENS / 2 };

/* The weights of one group. */
typedef struct group_weights {
  int32_t pairs[NYB_TILE_ROWS * PAIRS]; /* two 16-bit weights each */
  float units[NYB_TILE_ROWS];           /* value of 1 in pairs */
  float rests[NYB_TILE_ROWS];           /* what is added beside the dots */
} group_weights;

typedef struct word_scratch {
  group_weights weights[MAX_SPAN];
  group_floats scales, biases;
  int32_t decoded[PAIRS * WORDS_STRIP * WORD_LANES];
  uint8_t bytes[NYB_TILE_TOKENS * UNPACKED_STRIDE]; /* codes that do not fill words or vectors */
} word_scratch;
_Static_assert(sizeof(word_scratch) <= NYB_TILE_SCRATCH_BYTES, "values must fit the scratch");

/* How the codes of a group stand in vectors of words. */
typedef struct word_layout {
  int bits;   /* 4 or 8 */
  bool split; /* a vector holds two groups */
} word_layout;

ALWAYS_INLINE bool words_as_stored(int bits, int64_t group_size) {
  const int64_t words = group_size * bits / 32;
  return (bits == 4 || bits == 8) && (words % WORD_LANES == 0 || words * 2 == WORD_LANES);
}

/* Codes that cannot be used as stored are unpacked to bytes. */
ALWAYS_INLINE word_layout layout_of(int bits, int64_t group_size) {
  word_layout layout = {.bits = words_as_stored(bits, group_size) ? bits : 8};
  layout.split = group_size * layout.bits / 32 < WORD_LANES;
  return layout;
}

/* What the weights of a few rows are made from. */
enum { WEIGH_ROWS = 8 };
typedef struct row_products {
  float products[WEIGH_ROWS][NYB_TILE_TOKENS]; /* p * scale */
  float largest[WEIGH_ROWS], sums[WEIGH_ROWS], bias_sums[WEIGH_ROWS];
} row_products;

ALWAYS_INLINE void multiply_row(const float *p, const float *scales, const float *biases, int64_t r,
                                row_products *to) {
  enum { VECTORS = NYB_TILE_TOKENS / VECTOR_LANES, CHAINS = 2 };
  vf largest[CHAINS], sum[CHAINS], bias_sum[CHAINS];
  UNROLL
  for (int i = 0; i < VECTORS; i++) {
    const vf probability = vf_load(p + i * VECTOR_LANES);
    const vf bias = vf_load(biases + i * VECTOR_LANES);
    const int chain = i % CHAINS;
    const vf product = vf_mul(probability, vf_load(scales + i * VECTOR_LANES));
    vf_store(to->products[r] + i * VECTOR_LANES, product);
    const vf size = vf_abs(product);
    largest[chain] = i < CHAINS ? size : vf_max(size, largest[chain]);
    sum[chain] = i < CHAINS ? product : vf_add(sum[chain], product);
    bias_sum[chain] =
        i < CHAINS ? vf_mul(probability, bias) : vf_fma(probability, bias, bias_sum[chain]);
  }
  to->largest[r] = vf_reduce_max(vf_max(largest[0], largest[1]));
  to->sums[r] = vf_reduce_add(vf_add(sum[0], sum[1]));
  to->bias_sums[r] = vf_reduce_add(vf_add(bias_sum[0], bias_sum[1]));
}

/* Returns the sum of the codes. */
ALWAYS_INLINE float round_row(const float *products, float inverse, int32_t *pairs) {
  vi sum = vi_zero();
  UNROLL
  for (int i = 0; i < PAIRS / VECTOR_LANES; i++) {
    const float *low_products = products + i * VECTOR_LANES;
    const vi low = vi_from_vf(vf_mul(vf_load(low_products), vf_set1(inverse)));
    const vi high = vi_from_vf(vf_mul(vf_load(low_products + PAIRS), vf_set1(inverse)));
    sum = vi_add(sum, vi_add(low, high));
    vi_store(pairs + i * VECTOR_LANES, vi_join_halves(low, high));
  }
  return vf_reduce_add(vf_from_vi(sum));
}

/* In passes over a few rows: within one row each step waits for all of the step before. */
static void weigh_rows(const nyb_value_tile *tile, const float *scales, const float *biases,
                       float middle, group_weights *weights) {
  row_products made;
  for (int64_t first = 0; first < tile->rows; first += WEIGH_ROWS) {
    const int64_t rows = tile->rows - first < WEIGH_ROWS ? tile->rows - first : WEIGH_ROWS;
    float inverse[WEIGH_ROWS];
    for (int64_t r = 0; r < rows; r++) {
      multiply_row(tile->weights + (first + r) * NYB_TILE_TOKENS, scales, biases, r, &made);
    }
    for (int64_t r = 0; r < rows; r++) {
      /* Weights too small for 32767/largest to be finite count as 0: none is above 2^-110. */
      inverse[r] = made.largest[r] > 0x1p-110f ? 32767.0f / made.largest[r] : 0;
      weights->units[first + r] = made.largest[r] / 32767.0f;
    }
    for (int64_t r = 0; r < rows; r++) {
      const float sum =
          round_row(made.products[r], inverse[r], weights->pairs + (first + r) * PAIRS);
      /* A scale or p that is not finite makes its sum so, and with it the row. */
      const float lost = made.sums[r] - weights->units[first + r] * sum;
      weights->rests[first + r] = made.bias_sums[r] + middle * lost;
    }
  }
}

/* Where a vector of words comes from. */
typedef struct word_column {
  const char *words; /* of the first token */
  int64_t stride_bytes;
  int64_t tokens;
  ahead_cursor *ahead;
} word_column;

/* A strip is WORDS_STRIP code vectors of one word vector, or the fewer that a group has of it. They
 * are numbered low halves first, then high halves, by field within those. Constants, all of it. */
#define STRIP_ARGUMENTS int bits, bool split, int first, int count

/* partner_bytes: from the token to the one 32 later, or 0 for a token without: then it is paired
 * with itself, and the partner's weight is 0. */
ALWAYS_INLINE void cut_strip(const char *words, int64_t partner_bytes, STRIP_ARGUMENTS, wi *codes) {
  const int fields = 16 / bits;
  const wi a = split ? wi_load_split(words) : wi_load(words);
  const wi b = split ? wi_load_split(words + partner_bytes) : wi_load(words + partner_bytes);
  UNROLL
  for (int v = 0; v < count; v++) {
    const int field = (first + v) % fields;
    const wi both = (first + v) / fields == 0 ? wi_interleave_low(a, b) : wi_interleave_high(a, b);
    codes[v] = field == 0 ? both : wi_shift_right_halves(both, field * bits);
    if ((field + 1) * bits != 16) {
      codes[v] = wi_and(codes[v], wi_set1((int32_t)(((1u << bits) - 1) * 0x10001u)));
    }
  }
}

/* out[r] += unit[r] * dots over the tile's pairs + rest[r]. decoded: the strip's code vectors, or
 * NULL to cut them from the words. */
ALWAYS_INLINE void dot_words(int rows, const word_column *column, STRIP_ARGUMENTS,
                             const int32_t *decoded, const group_weights *group, int64_t first_row,
                             float *out, int64_t out_stride) {
  const int32_t *weights = group->pairs + first_row * PAIRS;
  wi sums[MAX_SUM_ROWS][WORDS_STRIP];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < count; v++) sums[r][v] = wi_zero();
  }
  const int64_t tokens = column->tokens, stride = column->stride_bytes;
  const int64_t with_partner = tokens > PAIRS ? tokens - PAIRS : 0;
  const char *words = column->words;
  int64_t partner_bytes = PAIRS * stride;
  ahead_run ahead = {.line = (const char *)weights};
  if (decoded == NULL) ahead = take_ahead(column->ahead, PAIRS);
  int64_t pair = 0, end = with_partner;
  for (int part = 0; part < 2; part++) {
    for (; pair < end; pair++) {
      wi codes[WORDS_STRIP];
      if (decoded != NULL) {
        UNROLL
        for (int v = 0; v < count; v++) {
          codes[v] = wi_load((const char *)(decoded + (pair * count + v) * WORD_LANES));
        }
      } else {
        cut_strip(words, partner_bytes, bits, split, first, count, codes);
        words += stride;
        touch(&ahead);
      }
      UNROLL
      for (int r = 0; r < rows; r++) {
        const wi weight = wi_set1(weights[r * PAIRS + pair]);
        UNROLL
        for (int v = 0; v < count; v++) sums[r][v] = wi_dot16(sums[r][v], codes[v], weight);
      }
    }
    end = tokens < PAIRS ? tokens : PAIRS;
    partner_bytes = 0;
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < count; v++) {
      wi_add_scaled(out + r * out_stride + v * WORD_LANES, sums[r][v], group->units[first_row + r],
                    group->rests[first_row + r]);
    }
  }
}

ALWAYS_INLINE void decode_strip(const word_column *column, STRIP_ARGUMENTS, int32_t *to) {
  const int64_t pairs = column->tokens < PAIRS ? column->tokens : PAIRS;
  const char *words = column->words;
  ahead_run ahead = take_ahead(column->ahead, PAIRS);
  for (int64_t pair = 0; pair < pairs; pair++, words += column->stride_bytes) {
    touch(&ahead);
    wi codes[WORDS_STRIP];
    const bool alone = pair + PAIRS >= column->tokens;
    cut_strip(words, alone ? 0 : PAIRS * column->stride_bytes, bits, split, first, count, codes);
    UNROLL
    for (int v = 0; v < count; v++, to += WORD_LANES) wi_store(to, codes[v]);
  }
}

#define FOR_BLOCKS_OF_ROWS(all_rows, DOT)                                            \
  do {                                                                               \
    int64_t row = 0;                                                                 \
    for (; row + MAX_SUM_ROWS <= (all_rows); row += MAX_SUM_ROWS) DOT(MAX_SUM_ROWS); \
    switch ((all_rows)-row) {                                                        \
      case 3: DOT(3); break;                                                         \
      case 2: DOT(2); break;                                                         \
      case 1: DOT(1); break;                                                         \
      default: break;                                                                \
    }                                                                                \
  } while (0)

/* Kept out of line, like dot_groups_*: one copy for all widths. */
static __attribute__((noinline)) void dot_decoded(int64_t rows, int64_t tokens, int count,
                                                  const int32_t *decoded,
                                                  const group_weights *group, float *out,
                                                  int64_t out_stride) {
  const word_column column = {.tokens = tokens};
#define DOT(n)                                                                             \
  dot_words(n, &column, 8, false, 0, vectors, decoded, group, row, out + row * out_stride, \
            out_stride)
  if (count == WORDS_STRIP) {
    enum { vectors = WORDS_STRIP };
    FOR_BLOCKS_OF_ROWS(rows, DOT);
  } else {
    enum { vectors = WORDS_STRIP / 2 };
    FOR_BLOCKS_OF_ROWS(rows, DOT);
  }
#undef DOT
}

/* All rows of the block over one strip. With many rows it is decoded once into scratch. */
ALWAYS_INLINE void dot_strip(const nyb_value_tile *tile, const word_column *column, STRIP_ARGUMENTS,
                             const group_weights *group, int32_t *decoded, float *out) {
  const int64_t out_stride = nyb_padded_dim(tile->v.dim);
  if (tile->rows > MAX_SUM_ROWS) {
    decode_strip(column, bits, split, first, count, decoded);
    dot_decoded(tile->rows, column->tokens, count, decoded, group, out, out_stride);
    return;
  }
#define DOT(n) dot_words(n, column, bits, split, first, count, NULL, group, row, out, out_stride)
  const int64_t row = 0;
  switch (tile->rows) {
    case 4: DOT(4); break;
    case 3: DOT(3); break;
    case 2: DOT(2); break;
    case 1: DOT(1); break;
    default: break;
  }
#undef DOT
}

/* One group that fills whole vectors of words. */
ALWAYS_INLINE void dot_group(const nyb_value_tile *tile, word_column column, int bits,
                             const group_weights *weights, int32_t *decoded, float *out) {
  const int64_t vectors = tile->v.group_size * bits / 32 / WORD_LANES;
  for (int64_t k = 0; k < vectors; k++, column.words += WORD_LANES * 4) {
    UNROLL
    for (int first = 0; first < 32 / bits; first += WORDS_STRIP, out += WORDS_STRIP * WORD_LANES) {
      dot_strip(tile, &column, bits, false, first, WORDS_STRIP, weights, decoded, out);
    }
  }
}

/* Two groups that share a vector of words; or the first of them alone. */
ALWAYS_INLINE void dot_split_groups(const nyb_value_tile *tile, word_column column, int bits,
                                    int64_t groups, const group_weights *weights, int32_t *decoded,
                                    float *out) {
  const int fields = 16 / bits;
  const int count = fields < WORDS_STRIP ? fields : WORDS_STRIP;
  UNROLL
  for (int first = 0; first < 2 * fields; first += count, out += count * WORD_LANES) {
    if (first / fields >= groups) break;
    dot_strip(tile, &column, bits, true, first, count, weights + first / fields, decoded, out);
  }
}

#define DEFINE_DOT_GROUPS(bits)                                            \
  static __attribute__((noinline)) void dot_groups_##bits(                 \
      const nyb_value_tile *tile, word_column column, int64_t groups,      \
      const group_weights *weights, int32_t *decoded, float *out) {        \
    if (layout_of(bits, tile->v.group_size).split) {                       \
      dot_split_groups(tile, column, bits, groups, weights, decoded, out); \
    } else {                                                               \
      dot_group(tile, column, bits, weights, decoded, out);                \
    }                                                                      \
  }
DEFINE_DOT_GROUPS(4)
DEFINE_DOT_GROUPS(8)

/* The words of `groups` groups from `group` on: as stored, or laid out in scratch. */
ALWAYS_INLINE word_column column_of(const nyb_tile_tokens *v, int bits, word_layout layout,
                                    int64_t group, int64_t groups, ahead_cursor *ahead,
                                    word_scratch *scratch) {
  const int64_t element = group * v->group_size, count = groups * v->group_size;
  word_column column = {.words = v->codes + element * bits / 8,
                        .stride_bytes = v->codes_stride_bytes,
                        .tokens = v->tokens,
                        .ahead = ahead};
  if (layout.bits == bits && (!layout.split || groups == MAX_SPAN)) return column;
  if (layout.bits != bits) {
    unpack_codes(column.words, column.stride_bytes, v->tokens, count, bits, scratch->bytes);
  } else { /* a group alone: a whole vector would reach past it */
    for (int64_t t = 0; t < v->tokens; t++) {
      memcpy(scratch->bytes + t * UNPACKED_STRIDE, column.words + t * column.stride_bytes,
             (size_t)(count * bits / 8));
    }
  }
  column.words = (const char *)scratch->bytes;
  column.stride_bytes = UNPACKED_STRIDE;
  return column;
}

ALWAYS_INLINE void values_affine(const nyb_value_tile *tile, int bits) {
  if (tile->precise) {
    values_affine_precise(tile, bits);
    return;
  }
  word_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  const word_layout layout = layout_of(bits, v->group_size);
  const float middle = (float)((1 << bits) - 1) / 2;
  const int64_t strips = (v->dim + WORDS_STRIP * WORD_LANES - 1) / (WORDS_STRIP * WORD_LANES);
  ahead_cursor ahead = start_ahead(&tile->ahead, strips * PAIRS, scratch);
  for (int64_t group = 0; group < v->dim / v->group_size; group += MAX_SPAN) {
    const int64_t span = gather_span(v, group, scratch->scales, scratch->biases);
    for (int64_t i = 0; i < span; i++) {
      weigh_rows(tile, scratch->scales[i], scratch->biases[i], middle, scratch->weights + i);
    }
    const int64_t step = layout.split ? span : 1;
    for (int64_t i = 0; i < span; i += step) {
      const word_column column = column_of(v, bits, layout, group + i, step, &ahead, scratch);
      float *out = tile->out + (group + i) * v->group_size;
      if (bits == 4 && layout.bits == 4) {
        dot_groups_4(tile, column, step, scratch->weights + i, scratch->decoded, out);
      } else {
        dot_groups_8(tile, column, step, scratch->weights + i, scratch->decoded, out);
      }
    }
  }
}

/* The element, counted from its group's first, whose sum stands in this lane of this vector of the
 * group. */
ALWAYS_INLINE int64_t element_of_lane(int64_t vector, int lane, int bits, word_layout layout) {
  const int fields = 16 / layout.bits;
  const int64_t field = vector % fields;
  const int64_t half = layout.split ? lane
                                    : vector / (2 * fields) * 2 * WORD_LANES +
                                          interleaved_half(vector / fields % 2 == 1, lane);
  const int64_t code = half * fields + field;
  return layout.bits == bits ? code : unpacked_element(code);
}

/* The layout is a constant, so that an element's place is one addition. */
ALWAYS_INLINE void reorder_groups(const nyb_value_columns *columns, int bits, word_layout layout) {
  for (int64_t group = 0; group < columns->dim; group += columns->group_size) {
    const float *from = columns->from + group;
    for (int64_t vector = 0; vector < columns->group_size / WORD_LANES; vector++) {
      UNROLL
      for (int lane = 0; lane < WORD_LANES; lane++) {
        columns->to[group + element_of_lane(vector, lane, bits, layout)] = *from++;
      }
    }
  }
}

ALWAYS_INLINE void columns_affine(const nyb_value_columns *columns, int bits) {
  if (columns->precise) {
    memcpy(columns->to, columns->from, (size_t)columns->dim * sizeof(float));
    return;
  }
  const word_layout layout = layout_of(bits, columns->group_size);
  if (bits == 4 && layout.bits == 4) {
    if (layout.split) {
      reorder_groups(columns, bits, (word_layout){.bits = 4, .split = true});
    } else {
      reorder_groups(columns, bits, (word_layout){.bits = 4, .split = false});
    }
  } else if (layout.split) {
    reorder_groups(columns, bits, (word_layout){.bits = 8, .split = true});
  } else {
    reorder_groups(columns, bits, (word_layout){.bits = 8, .split = false});
  }
}

static void columns_plain(const nyb_value_columns *columns) {
  memcpy(columns->to, columns->from, (size_t)columns->dim * sizeof(float));
}

/* ---- Values as they are --------------------------------------------------------------------- */

ALWAYS_INLINE void values_plain(const nyb_value_tile *tile, nyb_dtype dtype) {
  value_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  const int64_t strip_columns = SUM_VECTORS * VECTOR_LANES;
  ahead_cursor ahead = start_ahead_of_strips(tile);
  value_strip strip = {.rows = v->codes,
                       .stride_bytes = v->codes_stride_bytes,
                       .dim = v->dim,
                       .tokens = v->tokens,
                       .ahead = &ahead};
  for (int64_t row = 0; row < tile->rows; row++) scratch->bias_sums[row] = 0;
  for (; strip.element + strip_columns <= v->dim; strip.element += strip_columns) {
    sum_strip(tile, strip, SOURCE_PLAIN, dtype, tile->weights, scratch);
  }
  /* The columns that fill no strip, one vector at a time; out has room for whole vectors. */
  for (; strip.element < v->dim; strip.element += VECTOR_LANES) {
    float *to = scratch->decoded;
    for (int64_t t = 0; t < v->tokens; t++, to += VECTOR_LANES) {
      const char *row = v->codes + t * v->codes_stride_bytes;
      vf_store(to, strip.element + VECTOR_LANES <= v->dim
                       ? load_plain(row, strip.element, dtype)
                       : load_plain_tail(row, strip.element, v->dim, dtype));
    }
    const value_strip tail = {.rows = (const char *)scratch->decoded,
                              .stride_bytes = VECTOR_LANES * (int64_t)sizeof(float),
                              .tokens = v->tokens};
    for (int64_t row = 0; row < tile->rows; row++) {
      sum_block(1, 1, &tail, SOURCE_DECODED, NYB_F32, tile->weights + row * NYB_TILE_TOKENS,
                scratch->bias_sums + row, tile->out + row * nyb_padded_dim(v->dim) + strip.element,
                0);
    }
  }
}
