/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Values as floats ---------------------------------------------------------------------- */

enum { MAX_SUM_ROWS = 4, MAX_SUM_VECTORS = 8 };

typedef struct value_scratch {
  float weights[NYB_TILE_ROWS * NYB_TILE_TOKENS]; /* p * scale of the token's group */
  float bias_sums[NYB_TILE_ROWS];                 /* sum of p * bias */
  float scales[NYB_TILE_TOKENS], biases[NYB_TILE_TOKENS];
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
  for (int64_t t = 0; t < strip->tokens; t++) {
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
    for (int64_t t = 0; t < strip.tokens; t++) {
      UNROLL
      for (int v = 0; v < SUM_VECTORS; v++, to += VECTOR_LANES) {
        vf_store(to, load_value(&strip, t, v, bits, dtype));
      }
    }
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

/* weights = p * scale, bias_sums = sum of p * bias, for one group. */
ALWAYS_INLINE void weigh_group(const nyb_value_tile *tile, value_scratch *scratch) {
  const int64_t tokens = tile->v.tokens;
  for (int64_t row = 0; row < tile->rows; row++) {
    const float *p = tile->weights + row * NYB_TILE_TOKENS;
    float *weights = scratch->weights + row * NYB_TILE_TOKENS;
    vf sum = vf_zero();
    for (int64_t t = 0; t < tokens; t += VECTOR_LANES) {
      const vf probability = vf_load(p + t);
      vf_store(weights + t, vf_mul(probability, vf_load(scratch->scales + t)));
      sum = vf_fma(probability, vf_load(scratch->biases + t), sum);
    }
    scratch->bias_sums[row] = vf_reduce_add(sum);
  }
}

static void gather_scales(const nyb_tile_tokens *v, int64_t group, float *scales, float *biases) {
  gather_group(v->scales, v->scales_stride_bytes, group, v->tokens, v->scale_dtype, scales);
  gather_group(v->biases, v->biases_stride_bytes, group, v->tokens, v->scale_dtype, biases);
  for (int64_t t = v->tokens; t < NYB_TILE_TOKENS; t++) {
    scales[t] = biases[t] = 0; /* p is 0 there, and 0 * garbage may not be */
  }
}

ALWAYS_INLINE void values_affine_precise(const nyb_value_tile *tile, int bits) {
  value_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  value_strip strip = {
      .rows = v->codes, .stride_bytes = v->codes_stride_bytes, .dim = v->dim, .tokens = v->tokens};
  for (int64_t group = 0; group < v->dim / v->group_size; group++) {
    gather_scales(v, group, scratch->scales, scratch->biases);
    weigh_group(tile, scratch);
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
 * A code vector comes from the words of two tokens: the low halves of their words side by side in a
 * lane, or the high halves, shifted and masked. Lane l of word vector k holds elements of word
 * k*WORD_LANES + l; `columns` undoes that order once, at the end. */

enum { PAIRS = NYB_TILE_TOKENS / 2, WORDS_STRIP = 2 };

typedef struct word_scratch {
  int32_t weights[NYB_TILE_ROWS * PAIRS]; /* two 16-bit weights each */
  float units[NYB_TILE_ROWS];             /* value of 1 in weights */
  float rest_sums[NYB_TILE_ROWS];         /* what is added beside the dots */
  float scales[NYB_TILE_TOKENS], biases[NYB_TILE_TOKENS];
  int32_t decoded[PAIRS * WORDS_STRIP * WORD_LANES];
  uint8_t bytes[NYB_TILE_TOKENS * MAX_GROUP]; /* codes of one group, where they do not fill words */
} word_scratch;
_Static_assert(sizeof(word_scratch) <= NYB_TILE_SCRATCH_BYTES, "values must fit the scratch");

/* Whether a group's words are used as stored; else its codes are unpacked to bytes first. */
ALWAYS_INLINE bool words_as_stored(int bits, int64_t group_size) {
  return (bits == 2 || bits == 4 || bits == 8) && group_size * bits / 32 % WORD_LANES == 0;
}

ALWAYS_INLINE void weigh_row(const float *p, const word_scratch *scratch, float middle,
                             int32_t *weights, float *unit_out, float *rest_out) {
  vf largest = vf_zero(), sum = vf_zero(), bias_sum = vf_zero();
  vf product[NYB_TILE_TOKENS / VECTOR_LANES];
  UNROLL
  for (int i = 0; i < NYB_TILE_TOKENS / VECTOR_LANES; i++) {
    const vf probability = vf_load(p + i * VECTOR_LANES);
    product[i] = vf_mul(probability, vf_load(scratch->scales + i * VECTOR_LANES));
    largest = vf_max(vf_abs(product[i]), largest);
    sum = vf_add(sum, product[i]);
    bias_sum = vf_fma(probability, vf_load(scratch->biases + i * VECTOR_LANES), bias_sum);
  }
  const float limit = vf_reduce_max(largest);
  /* Weights too small for 32767/limit to be finite count as 0: none is above 2^-110. */
  const float inverse = limit > 0x1p-110f ? 32767.0f / limit : 0;
  const float unit = limit / 32767.0f;
  vi code_sum = vi_zero();
  UNROLL
  for (int i = 0; i < PAIRS / VECTOR_LANES; i++) {
    const vi low = vi_from_vf(vf_mul(product[i], vf_set1(inverse)));
    const vi high = vi_from_vf(vf_mul(product[i + PAIRS / VECTOR_LANES], vf_set1(inverse)));
    code_sum = vi_add(code_sum, vi_add(low, high));
    vi_store(weights + i * VECTOR_LANES, vi_join_halves(low, high));
  }
  /* A scale or p that is not finite makes the sum so, and with it the row. */
  const float total = vf_reduce_add(sum);
  const float rounded = unit * vf_reduce_add(vf_from_vi(code_sum));
  *unit_out = unit;
  *rest_out = vf_reduce_add(bias_sum) + middle * (total - rounded);
}

/* Where a strip of WORDS_STRIP code vectors comes from. */
typedef struct word_strip {
  const char *words; /* the first token's word vector */
  int64_t stride_bytes;
  int64_t tokens;
} word_strip;

/* Which codes of a word a strip holds: fields first, first + 1, ... of `bits` bits of its low or
 * high half. All constants where it is used. */
#define WORD_FIELDS int bits, bool high_half, int first_field

ALWAYS_INLINE void load_strip(const word_strip *strip, int64_t pair, WORD_FIELDS, wi *codes) {
  const char *low = strip->words + pair * strip->stride_bytes;
  /* Without a partner the token is paired with itself; the partner's weight is 0. */
  const char *high = pair + PAIRS < strip->tokens ? low + PAIRS * strip->stride_bytes : low;
  const wi both = high_half ? wi_high_halves(wi_load(low), wi_load(high))
                            : wi_low_halves(wi_load(low), wi_load(high));
  UNROLL
  for (int v = 0; v < WORDS_STRIP; v++) {
    const int field = first_field + v;
    codes[v] = field == 0 ? both : wi_shift_right_halves(both, field * bits);
    if ((field + 1) * bits != 16) {
      codes[v] = wi_and(codes[v], wi_set1((int32_t)(((1u << bits) - 1) * 0x10001u)));
    }
  }
}

/* out[r] += unit[r] * dots over the tile's pairs + rest[r]. decoded: the strip's code vectors, or
 * NULL to cut them from the words. */
ALWAYS_INLINE void dot_words(int rows, const word_strip *strip, WORD_FIELDS, const int32_t *decoded,
                             const int32_t *weights, const float *units, const float *rests,
                             float *out, int64_t out_stride) {
  const int64_t pairs = strip->tokens < PAIRS ? strip->tokens : PAIRS;
  wi sums[MAX_SUM_ROWS][WORDS_STRIP];
  UNROLL
  for (int v = 0; v < WORDS_STRIP; v++) {
    UNROLL
    for (int r = 0; r < rows; r++) sums[r][v] = wi_zero();
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    wi codes[WORDS_STRIP];
    if (decoded != NULL) {
      UNROLL
      for (int v = 0; v < WORDS_STRIP; v++) {
        codes[v] = wi_load((const char *)(decoded + (pair * WORDS_STRIP + v) * WORD_LANES));
      }
    } else {
      load_strip(strip, pair, bits, high_half, first_field, codes);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
      const wi weight = wi_set1(weights[r * PAIRS + pair]);
      UNROLL
      for (int v = 0; v < WORDS_STRIP; v++) sums[r][v] = wi_dot16(sums[r][v], codes[v], weight);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < WORDS_STRIP; v++) {
      wi_add_scaled(out + r * out_stride + v * WORD_LANES, sums[r][v], units[r], rests[r]);
    }
  }
}

/* All rows of the block over one strip. With many rows it is decoded once into scratch. */
ALWAYS_INLINE void dot_strip(const nyb_value_tile *tile, const word_strip *strip, WORD_FIELDS,
                             word_scratch *scratch, float *out) {
  const int64_t out_stride = nyb_padded_dim(tile->v.dim);
  const bool decode = tile->rows > MAX_SUM_ROWS;
  if (decode) {
    const int64_t pairs = strip->tokens < PAIRS ? strip->tokens : PAIRS;
    wi codes[WORDS_STRIP];
    int32_t *to = scratch->decoded;
    for (int64_t pair = 0; pair < pairs; pair++) {
      load_strip(strip, pair, bits, high_half, first_field, codes);
      UNROLL
      for (int v = 0; v < WORDS_STRIP; v++, to += WORD_LANES) wi_store(to, codes[v]);
    }
  }
  int64_t row = 0;
#define NYB_DOT_ROWS(count)                                                                   \
  do {                                                                                        \
    const int32_t *w = scratch->weights + row * PAIRS;                                        \
    const float *u = scratch->units + row, *rest = scratch->rest_sums + row;                  \
    float *o = out + row * out_stride;                                                        \
    if (decode) {                                                                             \
      dot_words(count, strip, bits, high_half, first_field, scratch->decoded, w, u, rest, o,  \
                out_stride);                                                                  \
    } else {                                                                                  \
      dot_words(count, strip, bits, high_half, first_field, NULL, w, u, rest, o, out_stride); \
    }                                                                                         \
  } while (0)
  for (; row + MAX_SUM_ROWS <= tile->rows; row += MAX_SUM_ROWS) NYB_DOT_ROWS(MAX_SUM_ROWS);
  switch (tile->rows - row) {
    case 3: NYB_DOT_ROWS(3); break;
    case 2: NYB_DOT_ROWS(2); break;
    case 1: NYB_DOT_ROWS(1); break;
    default: break;
  }
#undef NYB_DOT_ROWS
}

/* One group whose codes of `bits` bits fill word vectors. */
ALWAYS_INLINE void dot_group(const nyb_value_tile *tile, const char *words, int64_t stride_bytes,
                             int bits, word_scratch *scratch, float *out) {
  const int64_t word_vectors = tile->v.group_size * bits / 32 / WORD_LANES;
  word_strip strip = {.stride_bytes = stride_bytes, .tokens = tile->v.tokens};
  for (int64_t k = 0; k < word_vectors; k++) {
    strip.words = words + k * WORD_LANES * 4;
    UNROLL
    for (int half = 0; half < 2; half++) {
      UNROLL
      for (int field = 0; field < 16 / bits; field += WORDS_STRIP) {
        dot_strip(tile, &strip, bits, half == 1, field, scratch, out);
        out += WORDS_STRIP * WORD_LANES;
      }
    }
  }
}

ALWAYS_INLINE void values_affine(const nyb_value_tile *tile, int bits) {
  if (tile->precise) {
    values_affine_precise(tile, bits);
    return;
  }
  word_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  const float middle = (float)((1 << bits) - 1) / 2;
  for (int64_t group = 0; group < v->dim / v->group_size; group++) {
    const int64_t first = group * v->group_size;
    gather_scales(v, group, scratch->scales, scratch->biases);
    for (int64_t row = 0; row < tile->rows; row++) {
      weigh_row(tile->weights + row * NYB_TILE_TOKENS, scratch, middle,
                scratch->weights + row * PAIRS, scratch->units + row, scratch->rest_sums + row);
    }
    if (words_as_stored(bits, v->group_size)) {
      /* The constant spares widths that straddle words from being compiled for them. */
      const int stored_bits = bits == 2 || bits == 4 ? bits : 8;
      dot_group(tile, v->codes + first * bits / 8, v->codes_stride_bytes, stored_bits, scratch,
                tile->out + first);
    } else {
      for (int64_t t = 0; t < v->tokens; t++) {
        unpack_codes(v->codes + t * v->codes_stride_bytes, first, v->group_size, bits,
                     scratch->bytes + t * MAX_GROUP);
      }
      dot_group(tile, (const char *)scratch->bytes, MAX_GROUP, 8, scratch, tile->out + first);
    }
  }
}

ALWAYS_INLINE void columns_affine(const nyb_value_columns *columns, int stored_bits) {
  if (columns->precise) {
    memcpy(columns->to, columns->from, (size_t)columns->dim * sizeof(float));
    return;
  }
  const int bits = words_as_stored(stored_bits, columns->group_size) ? stored_bits : 8;
  const int per_word = 32 / bits;
  const float *from = columns->from;
  for (int64_t word = 0; word < columns->dim / per_word; word += WORD_LANES) {
    for (int i = 0; i < per_word; i++) {
      for (int lane = 0; lane < WORD_LANES; lane++) {
        columns->to[(word + lane) * per_word + i] = *from++;
      }
    }
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
  value_strip strip = {
      .rows = v->codes, .stride_bytes = v->codes_stride_bytes, .dim = v->dim, .tokens = v->tokens};
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
