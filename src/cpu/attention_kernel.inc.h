/* SPDX-License-Identifier: Apache-2.0 */
/* The attention kernels of one ISA. The including file brings the vector vocabulary first
 * (simd_<isa>.h), so that the algorithm is written once and reads the same everywhere.
 *
 * Scores over affine keys are integer dots: tokens stand in the lanes. The packed words of as many
 * tokens as there are lanes are transposed, cut into pairs of 16-bit codes and kept in L1 for one
 * group of elements; each query row then walks them with its own 16-bit integers, two products a
 * lane and step. The sums are exact; scale and bias of each token and group come in afterwards.
 * Values are float FMAs: elements stand in the lanes, a few vectors of accumulators per row live in
 * registers while the tile's tokens pass by.
 *
 * Every row gets the same operations in the same order however many rows stand beside it. */

#include <math.h>

#include "../kernels.h"

#define NYB_JOIN_(a, b) nyb_##a##_##b
#define NYB_JOIN(a, b) NYB_JOIN_(a, b)
#define KERNEL(name) NYB_JOIN(name, NYB_ISA_SUFFIX)
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
  PAIR_STRIDE = NYB_TILE_TOKENS, /* one pair of elements, all tokens of the tile */
  MAX_GROUP = 128,
};

/* ---- Loading floats ------------------------------------------------------------------------- */

ALWAYS_INLINE vf load_plain(const char *row, int64_t element, nyb_dtype dtype) {
  if (dtype == NYB_BF16) return vf_load_bf16((const uint16_t *)(const void *)row + element);
  if (dtype == NYB_F16) return vf_load_f16((const uint16_t *)(const void *)row + element);
  return vf_load((const float *)(const void *)row + element);
}

/* A vector that reaches past the row's last element: the missing ones are 0 and are not read. */
static vf load_plain_tail(const char *row, int64_t element, int64_t dim, nyb_dtype dtype) {
  float padded[VECTOR_LANES] = {0};
  for (int64_t i = 0; i < VECTOR_LANES && element + i < dim; i++) {
    padded[i] = nyb_load_f32(row, dtype, element + i);
  }
  return vf_load(padded);
}

/* Scales or biases of one group, for all tokens of the tile, as floats. */
static void gather_group(const char *first, int64_t stride_bytes, int64_t group, int64_t tokens,
                         nyb_dtype dtype, float *gathered) {
  const char *p = first + group * (dtype == NYB_F32 ? 4 : 2);
  switch (dtype) {
    case NYB_BF16:
      for (int64_t t = 0; t < tokens; t++, p += stride_bytes) {
        gathered[t] = nyb_f32_from_bf16(*(const uint16_t *)(const void *)p);
      }
      break;
    case NYB_F16: {
      uint16_t halves[NYB_TILE_TOKENS] = {0};
      for (int64_t t = 0; t < tokens; t++, p += stride_bytes) {
        halves[t] = *(const uint16_t *)(const void *)p;
      }
      for (int64_t t = 0; t < tokens; t += VECTOR_LANES) {
        vf_store(gathered + t, vf_load_f16(halves + t));
      }
      break;
    }
    case NYB_F32:
      for (int64_t t = 0; t < tokens; t++, p += stride_bytes) {
        gathered[t] = *(const float *)(const void *)p;
      }
      break;
  }
}

/* ---- Queries -------------------------------------------------------------------------------- */

/* The prepared form of an affine row. */
typedef struct prepared_row {
  int32_t *pairs;     /* [dim/2], in the order in which codes come out of a word */
  int32_t *low_pairs; /* [dim/2], the second term, if there are two */
  float *step;        /* [groups]: value of 1 in pairs; in low_pairs it is step/LOW_STEPS */
  float *sum;         /* [groups]: sum of the row as prepared */
} prepared_row;

#define LOW_STEPS 65534.0f

ALWAYS_INLINE prepared_row prepared_row_at(const void *prepared, int64_t row, int64_t dim,
                                           int64_t groups) {
  char *base = (char *)(uintptr_t)prepared + row * nyb_prepared_bytes(dim);
  prepared_row r;
  r.pairs = (int32_t *)(void *)base;
  r.low_pairs = r.pairs + dim / 2;
  r.step = (float *)(void *)(r.low_pairs + dim / 2);
  r.sum = r.step + groups;
  return r;
}

/* Writes two terms of 16 bits where codes of `bits` bits will meet them: word by word, the pair k
 * of a word holds its elements k and k + half. Widths that straddle words are unpacked to bytes
 * first and then behave like 8 bits. */
ALWAYS_INLINE void write_pairs(const int32_t *codes, int64_t count, int bits, int32_t *pairs) {
  const int per_word = bits == 2 || bits == 4 ? 32 / bits : 4;
  const int half = per_word / 2;
  for (int64_t word = 0; word < count; word += per_word) {
    for (int k = 0; k < half; k++) {
      const uint32_t low = (uint32_t)codes[word + k] & 0xffffu;
      const uint32_t high = (uint32_t)codes[word + k + half] << 16;
      *pairs++ = (int32_t)(low | high);
    }
  }
}

/* Rounds one group of a row to 16 bits and, if asked, its remainder to 16 more. A NaN or infinity
 * makes step and sum NaN or infinite, so that the score is not a number that looks right. */
ALWAYS_INLINE void prepare_group(const float *q, int64_t count, int bits, bool two_terms,
                                 int32_t *pairs, int32_t *low_pairs, float *step, float *sum) {
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
  int32_t code_sum = 0;
  for (int i = 0; i < VECTOR_LANES; i++) code_sum += lanes[i];
  write_pairs(codes, count, bits, pairs);

  float exact_sum = unit * (float)code_sum;
  if (two_terms) {
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
    for (int i = 0; i < VECTOR_LANES; i++) code_sum += lanes[i];
    write_pairs(codes, count, bits, low_pairs);
    exact_sum += unit / LOW_STEPS * (float)code_sum;
  }
  const float poisoned = vf_reduce_add(poison);
  *step = unit / up + poisoned;
  *sum = exact_sum / up + poisoned;
}

ALWAYS_INLINE void queries_affine(const nyb_query_block *block, int bits) {
  const int64_t groups = block->dim / block->group_size;
  for (int64_t row = 0; row < block->rows; row++) {
    const float *q = block->q + row * nyb_padded_dim(block->dim);
    const prepared_row r = prepared_row_at(block->prepared, row, block->dim, groups);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = g * block->group_size;
      prepare_group(q + first, block->group_size, bits, block->two_terms, r.pairs + first / 2,
                    r.low_pairs + first / 2, r.step + g, r.sum + g);
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

/* One group of the tile's codes as pairs of 16-bit integers, [pair][token]. */
ALWAYS_INLINE void transpose_group(const nyb_tile_tokens *k, int64_t group, int bits,
                                   int64_t padded_tokens, int32_t *pairs, uint8_t *bytes) {
  const int64_t count = k->group_size;
  const bool straddles = bits == 3 || bits == 5 || bits == 6;
  const int word_bits = straddles ? 8 : bits;
  const int per_word = 32 / word_bits;
  const int64_t words = count / per_word;
  const int64_t first_word = straddles ? 0 : group * words;
  const vi mask = vi_set1((int32_t)(((1u << word_bits) - 1) * 0x10001u));
  for (int64_t t = 0; t < padded_tokens; t += VECTOR_LANES) {
    const char *rows[VECTOR_LANES];
    for (int i = 0; i < VECTOR_LANES; i++) { /* past the end: the last token again */
      const int64_t token = t + i < k->tokens ? t + i : k->tokens - 1;
      rows[i] = k->codes + token * k->codes_stride_bytes;
      if (straddles) {
        unpack_codes(rows[i], group * count, count, bits, bytes + i * MAX_GROUP);
        rows[i] = (const char *)(bytes + i * MAX_GROUP);
      }
    }
    for (int64_t word = 0; word < words; word += VECTOR_LANES) {
      const int64_t here = words - word < VECTOR_LANES ? words - word : VECTOR_LANES;
      vi lanes[VECTOR_LANES];
      load_words_transposed(rows, first_word + word, here, lanes);
      int32_t *to = pairs + word * (per_word / 2) * PAIR_STRIDE + t;
      for (int64_t j = 0; j < here; j++) {
        UNROLL
        for (int i = 0; i < per_word / 2; i++, to += PAIR_STRIDE) {
          vi_store(to, vi_and(vi_shift_right(lanes[j], i * word_bits), mask));
        }
      }
    }
  }
}

/* Dots of up to DOT_ROWS rows with DOT_VECTORS vectors of tokens over one group. */
ALWAYS_INLINE void dot_block(int rows, int vectors, const int32_t *const *q, const int32_t *pairs,
                             int64_t pair_count, vi sums[DOT_ROWS][DOT_VECTORS]) {
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < vectors; v++) sums[r][v] = vi_zero();
  }
  for (int64_t pair = 0; pair < pair_count; pair++) {
    vi k[DOT_VECTORS];
    UNROLL
    for (int v = 0; v < vectors; v++) k[v] = vi_load(pairs + pair * PAIR_STRIDE + v * VECTOR_LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const vi both = vi_set1(q[r][pair]);
      UNROLL
      for (int v = 0; v < vectors; v++) sums[r][v] = vi_dot16(sums[r][v], k[v], both);
    }
  }
}

typedef struct group_of_keys {
  const int32_t *pairs;
  int64_t pair_count, group, groups;
  const float *scales, *biases; /* [token] */
} group_of_keys;

/* score += scale * (step * dot) + bias * sum(q) */
ALWAYS_INLINE void score_block(const nyb_score_tile *tile, const group_of_keys *keys, int rows,
                               int vectors, int64_t first_row, int64_t token) {
  prepared_row q[DOT_ROWS];
  const int32_t *terms[DOT_ROWS];
  vi sums[DOT_ROWS][DOT_VECTORS];
  vf dots[DOT_ROWS][DOT_VECTORS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    q[r] = prepared_row_at(tile->prepared, first_row + r, tile->k.dim, keys->groups);
    terms[r] = q[r].pairs + keys->group * keys->pair_count;
  }
  dot_block(rows, vectors, terms, keys->pairs + token, keys->pair_count, sums);
  UNROLL
  for (int r = 0; r < rows; r++) {
    const vf step = vf_set1(q[r].step[keys->group]);
    UNROLL
    for (int v = 0; v < vectors; v++) dots[r][v] = vf_mul(vf_from_vi(sums[r][v]), step);
  }
  if (tile->two_terms) {
    UNROLL
    for (int r = 0; r < rows; r++) terms[r] = q[r].low_pairs + keys->group * keys->pair_count;
    dot_block(rows, vectors, terms, keys->pairs + token, keys->pair_count, sums);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const vf step = vf_set1(q[r].step[keys->group] / LOW_STEPS);
      UNROLL
      for (int v = 0; v < vectors; v++) {
        dots[r][v] = vf_fma(vf_from_vi(sums[r][v]), step, dots[r][v]);
      }
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    const vf sum = vf_set1(q[r].sum[keys->group]);
    UNROLL
    for (int v = 0; v < vectors; v++) {
      const int64_t t = token + v * VECTOR_LANES;
      float *score = tile->scores + (first_row + r) * NYB_TILE_TOKENS + t;
      const vf before = keys->group == 0 ? vf_zero() : vf_load(score);
      const vf scaled = vf_fma(vf_load(keys->scales + t), dots[r][v], before);
      vf_store(score, vf_fma(vf_load(keys->biases + t), sum, scaled));
    }
  }
}

ALWAYS_INLINE void score_rows(const nyb_score_tile *tile, const group_of_keys *keys, int rows,
                              int64_t first_row, int64_t padded_tokens) {
  int64_t t = 0;
  for (; t + DOT_VECTORS * VECTOR_LANES <= padded_tokens; t += DOT_VECTORS * VECTOR_LANES) {
    score_block(tile, keys, rows, DOT_VECTORS, first_row, t);
  }
  for (; t < padded_tokens; t += VECTOR_LANES) {
    score_block(tile, keys, rows, 1, first_row, t);
  }
}

typedef struct score_scratch {
  int32_t pairs[MAX_GROUP / 2 * PAIR_STRIDE];
  uint8_t bytes[VECTOR_LANES * MAX_GROUP];
  float scales[NYB_TILE_TOKENS], biases[NYB_TILE_TOKENS];
} score_scratch;
_Static_assert(sizeof(score_scratch) <= NYB_TILE_SCRATCH_BYTES, "scores must fit the scratch");

ALWAYS_INLINE void scores_affine(const nyb_score_tile *tile, int bits) {
  score_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *k = &tile->k;
  const int64_t padded_tokens = (k->tokens + VECTOR_LANES - 1) / VECTOR_LANES * VECTOR_LANES;
  group_of_keys keys = {.pairs = scratch->pairs,
                        .pair_count = k->group_size / 2,
                        .groups = k->dim / k->group_size,
                        .scales = scratch->scales,
                        .biases = scratch->biases};
  for (int64_t t = k->tokens; t < padded_tokens; t++) {
    scratch->scales[t] = scratch->biases[t] = 0;
  }
  for (keys.group = 0; keys.group < keys.groups; keys.group++) {
    transpose_group(k, keys.group, bits, padded_tokens, scratch->pairs, scratch->bytes);
    gather_group(k->scales, k->scales_stride_bytes, keys.group, k->tokens, k->scale_dtype,
                 scratch->scales);
    gather_group(k->biases, k->biases_stride_bytes, keys.group, k->tokens, k->scale_dtype,
                 scratch->biases);
    int64_t row = 0;
    for (; row + DOT_ROWS <= tile->rows; row += DOT_ROWS) {
      score_rows(tile, &keys, DOT_ROWS, row, padded_tokens);
    }
    switch (tile->rows - row) {
      case 3: score_rows(tile, &keys, 3, row, padded_tokens); break;
      case 2: score_rows(tile, &keys, 2, row, padded_tokens); break;
      case 1: score_rows(tile, &keys, 1, row, padded_tokens); break;
      default: break;
    }
  }
}

/* ---- Scores over plain keys ----------------------------------------------------------------- */

/* Elements in the lanes: each key vector is loaded once for up to four rows. */
ALWAYS_INLINE void score_plain_rows(const nyb_score_tile *tile, int rows, int64_t first_row,
                                    nyb_dtype dtype) {
  const nyb_tile_tokens *k = &tile->k;
  const float *q[DOT_ROWS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    q[r] = (const float *)(const void *)((const char *)tile->prepared +
                                         (first_row + r) * nyb_prepared_bytes(k->dim));
  }
  const int64_t whole = k->dim / VECTOR_LANES * VECTOR_LANES;
  for (int64_t t = 0; t < k->tokens; t++) {
    const char *key = k->codes + t * k->codes_stride_bytes;
    vf even[DOT_ROWS], odd[DOT_ROWS]; /* two chains a row hide the FMA's latency */
    UNROLL
    for (int r = 0; r < rows; r++) even[r] = odd[r] = vf_zero();
    int64_t d = 0;
    for (; d + 2 * VECTOR_LANES <= whole; d += 2 * VECTOR_LANES) {
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
  int64_t row = 0;
  for (; row + 4 <= tile->rows; row += 4) score_plain_rows(tile, 4, row, dtype);
  switch (tile->rows - row) {
    case 3: score_plain_rows(tile, 3, row, dtype); break;
    case 2: score_plain_rows(tile, 2, row, dtype); break;
    case 1: score_plain_rows(tile, 1, row, dtype); break;
    default: break;
  }
}

/* ---- Softmax -------------------------------------------------------------------------------- */

/* exp(x) for x <= 0 within about 2 ulp; 0 below -87.3, where exp leaves the normal floats; NaN
 * stays NaN. x = n ln2 + r with |r| <= ln2/2, and the Taylor polynomial of degree 7 leaves a
 * relative error below 4e-9 there. ln2 is split so that n times its upper part is exact. */
ALWAYS_INLINE vf exp_of_negative(vf x) {
  const vf n = vf_round(vf_mul(x, vf_set1(0x1.715476p+0f)));
  vf r = vf_fma(n, vf_set1(-0x1.62e4p-1f), x);
  r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
  vf p = vf_set1(1.0f / 5040);
  p = vf_fma(p, r, vf_set1(1.0f / 720));
  p = vf_fma(p, r, vf_set1(1.0f / 120));
  p = vf_fma(p, r, vf_set1(1.0f / 24));
  p = vf_fma(p, r, vf_set1(1.0f / 6));
  p = vf_fma(p, r, vf_set1(0.5f));
  p = vf_fma(p, r, vf_set1(1.0f));
  p = vf_fma(p, r, vf_set1(1.0f));
  const vf floor = vf_set1(-126.0f); /* keeps the power a normal number; such lanes become 0 */
  return vf_zero_below(vf_scale_by_power(p, vf_max(n, floor)), x, -87.3f);
}

ALWAYS_INLINE vf round_score(vf score, nyb_dtype dtype) {
  if (dtype == NYB_BF16) return vf_round_bf16(score);
  if (dtype == NYB_F16) return vf_round_f16(score);
  return score;
}

ALWAYS_INLINE bool softmax_row(const nyb_softmax_tile *tile, int64_t row, nyb_dtype round_to) {
  float *scores = tile->scores + row * NYB_TILE_TOKENS;
  const int64_t visible = tile->visible[row];
  tile->rescale[row] = 1;
  vf largest = vf_set1(-INFINITY);
  for (int64_t t = 0; t < NYB_TILE_TOKENS && t < visible; t += VECTOR_LANES) {
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
  bool moved = false;
  const float tile_maximum = vf_reduce_max(largest);
  if (tile_maximum > tile->maximum[row]) {
    const float before = tile->maximum[row];
    tile->maximum[row] = tile_maximum;
    if (before != -INFINITY) {
      float lanes[VECTOR_LANES];
      vf_store(lanes, exp_of_negative(vf_set1(before - tile_maximum)));
      tile->rescale[row] = lanes[0];
      tile->sum[row] *= lanes[0];
      moved = true;
    }
  }
  const vf maximum = vf_set1(tile->maximum[row]);
  vf sum = vf_zero();
  int64_t t = 0;
  for (; t < visible; t += VECTOR_LANES) {
    const vf p = exp_of_negative(vf_sub(vf_load(scores + t), maximum));
    const vf kept = vf_keep_first(p, visible - t);
    vf_store(scores + t, kept);
    sum = vf_add(sum, kept);
  }
  for (; t < NYB_TILE_TOKENS; t += VECTOR_LANES) vf_store(scores + t, vf_zero());
  tile->sum[row] += vf_reduce_add(sum);
  return moved;
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

/* ---- Values --------------------------------------------------------------------------------- */

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

ALWAYS_INLINE void values_affine(const nyb_value_tile *tile, int bits) {
  value_scratch *scratch = tile->scratch;
  const nyb_tile_tokens *v = &tile->v;
  value_strip strip = {
      .rows = v->codes, .stride_bytes = v->codes_stride_bytes, .dim = v->dim, .tokens = v->tokens};
  for (int64_t t = v->tokens; t < NYB_TILE_TOKENS; t++) {
    scratch->scales[t] = scratch->biases[t] = 0; /* p is 0 there, and 0 * garbage may not be */
  }
  for (int64_t group = 0; group < v->dim / v->group_size; group++) {
    gather_group(v->scales, v->scales_stride_bytes, group, v->tokens, v->scale_dtype,
                 scratch->scales);
    gather_group(v->biases, v->biases_stride_bytes, group, v->tokens, v->scale_dtype,
                 scratch->biases);
    weigh_group(tile, scratch);
    const int64_t first = group * v->group_size;
    for (strip.element = first; strip.element < first + v->group_size;
         strip.element += SUM_VECTORS * VECTOR_LANES) {
      sum_strip(tile, strip, bits, NYB_F32, scratch->weights, scratch);
    }
  }
}

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

/* ---- The kernels by name -------------------------------------------------------------------- */

#define AFFINE_KERNELS(bits)                                                  \
  void KERNEL(attention_queries_affine##bits)(const nyb_query_block *block);  \
  void KERNEL(attention_queries_affine##bits)(const nyb_query_block *block) { \
    queries_affine(block, bits);                                              \
  }                                                                           \
  void KERNEL(attention_scores_affine##bits)(const nyb_score_tile *tile);     \
  void KERNEL(attention_scores_affine##bits)(const nyb_score_tile *tile) {    \
    scores_affine(tile, bits);                                                \
  }                                                                           \
  void KERNEL(attention_values_affine##bits)(const nyb_value_tile *tile);     \
  void KERNEL(attention_values_affine##bits)(const nyb_value_tile *tile) {    \
    values_affine(tile, bits);                                                \
  }

AFFINE_KERNELS(2)
AFFINE_KERNELS(3)
AFFINE_KERNELS(4)
AFFINE_KERNELS(5)
AFFINE_KERNELS(6)
AFFINE_KERNELS(8)

#define PLAIN_KERNELS(name, dtype)                                            \
  void KERNEL(attention_queries_plain_##name)(const nyb_query_block *block);  \
  void KERNEL(attention_queries_plain_##name)(const nyb_query_block *block) { \
    queries_plain(block);                                                     \
  }                                                                           \
  void KERNEL(attention_scores_plain_##name)(const nyb_score_tile *tile);     \
  void KERNEL(attention_scores_plain_##name)(const nyb_score_tile *tile) {    \
    scores_plain(tile, dtype);                                                \
  }                                                                           \
  void KERNEL(attention_values_plain_##name)(const nyb_value_tile *tile);     \
  void KERNEL(attention_values_plain_##name)(const nyb_value_tile *tile) {    \
    values_plain(tile, dtype);                                                \
  }

PLAIN_KERNELS(f32, NYB_F32)
PLAIN_KERNELS(f16, NYB_F16)
PLAIN_KERNELS(bf16, NYB_BF16)
