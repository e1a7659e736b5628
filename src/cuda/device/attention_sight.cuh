/* SPDX-License-Identifier: Apache-2.0 */
/* Which tokens a query row sees, and what becomes of their scores: src/attention_sight.h and
 * section 2, step 3, of docs/numerics.md for the device. Numbers that lie in device memory are
 * brought into range, since nobody has checked them. */
#ifndef NYB_ATTENTION_SIGHT_CUH
#define NYB_ATTENTION_SIGHT_CUH

#include "attention_rows.cuh"

NYB_FUNCTION int64_t nyb_clamped(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

/* ---- Sequences and rows --------------------------------------------------------------------- */

/* A sequence from its start on; what follows counts tokens from there. */
typedef struct nyb_sequence {
  int64_t start, tokens;
} nyb_sequence;

NYB_FUNCTION nyb_sequence nyb_sequence_of(const nyb_attention_arguments *a, int64_t batch) {
  const int64_t length = nyb_length_of(a, batch);
  nyb_sequence sequence;
  sequence.start = a->starts ? nyb_clamped(a->starts[batch], 0, length) : 0;
  sequence.tokens = length - sequence.start;
  return sequence;
}

/* Where a query row stands; it may be outside the sequence. */
NYB_FUNCTION int64_t nyb_position_of(const nyb_attention_arguments *a, const nyb_sequence *sequence,
                                     int64_t query_row) {
  if (a->mask == NYB_DEVICE_MASK_TOP_LEFT) return query_row - sequence->start;
  return sequence->tokens - a->query_len + query_row;
}

/* What mask and window let a row see: [0, keep_end) and, not before it, [begin, end). All are 0 or
 * more and less than 2^31. */
typedef struct nyb_row_sight {
  int keep_end, begin, end;
} nyb_row_sight;

NYB_FUNCTION nyb_row_sight nyb_row_sight_of(const nyb_attention_arguments *a,
                                            const nyb_sequence *sequence, int64_t query_row) {
  const int64_t position = nyb_position_of(a, sequence, query_row);
  int64_t end = sequence->tokens, keep_end = 0, begin = 0;
  if (a->mask != NYB_DEVICE_MASK_NONE) end = nyb_clamped(position + 1, 0, end);
  if (a->window_tokens != 0) {
    keep_end = a->window_keep_tokens < end ? a->window_keep_tokens : end;
    begin = position - a->window_tokens + 1;
    begin = begin < end ? begin : end;
    if (begin <= keep_end) begin = keep_end = 0;
  }
  nyb_row_sight sight;
  sight.keep_end = (int)keep_end;
  sight.begin = (int)begin;
  sight.end = (int)end;
  return sight;
}

NYB_FUNCTION int nyb_sight_shows(const nyb_row_sight *sight, int token) {
  return token < sight->end && (token < sight->keep_end || token >= sight->begin);
}

/* ---- The mask's array ----------------------------------------------------------------------- */

/* Bytes to the mask's row of a query row, at the column of the sequence's first token. */
NYB_FUNCTION int64_t nyb_mask_offset(const nyb_attention_arguments *a, const nyb_sequence *sequence,
                                     int64_t batch, int64_t head, int64_t query_row) {
  return batch * a->mask_stride[0] + head * a->mask_stride[1] + query_row * a->mask_stride[2] +
         sequence->start * a->mask_column_bytes;
}

/* What it says of a token. */
typedef struct nyb_mask_entry {
  int shows;
  float added;
} nyb_mask_entry;

/* bits: the array's element, widened by zeros. */
NYB_FUNCTION nyb_mask_entry nyb_mask_entry_of(const nyb_attention_arguments *a, uint32_t bits) {
  nyb_mask_entry entry;
  if (a->mask_kind == NYB_DEVICE_ARRAY_BOOL) {
    entry.added = 0.0f;
    entry.shows = bits != 0;
    return entry;
  }
  entry.added = nyb_widen(a->mask_dtype, bits);
  entry.shows = nyb_bits_of(entry.added) != 0xff800000u;
  return entry;
}

NYB_FUNCTION nyb_mask_entry nyb_mask_entry_at(const nyb_attention_arguments *a, const char *row,
                                              int64_t token) {
  return nyb_mask_entry_of(a, a->mask_kind == NYB_DEVICE_ARRAY_BOOL
                                  ? (uint32_t)(unsigned char)row[token]
                                  : nyb_load_bits(row, a->mask_dtype, token));
}

/* ---- Scores --------------------------------------------------------------------------------- */

/* share is the score over the softcap. */
NYB_FUNCTION float nyb_capped_score(const nyb_attention_arguments *a, float share) {
  const float t = tanhf(nyb_round_number(a->round_to, share));
  return nyb_round_number(a->round_to, NYB_MULTIPLY(nyb_round_number(a->round_to, t), a->softcap));
}

NYB_FUNCTION float nyb_score_at(const nyb_attention_arguments *a, float score, float slope,
                                float distance) {
  const float bias = nyb_round_number(a->round_to, NYB_MULTIPLY(-slope, distance));
  return nyb_round_number(a->round_to, NYB_ADD(score, bias));
}

/* Differences of positions and tokens fit 32 bits, of which only the sign needs a 33rd. */
NYB_FUNCTION float nyb_sloped_score(const nyb_attention_arguments *a, float score, float slope,
                                    int position, int token) {
  const uint32_t past = (uint32_t)position - (uint32_t)token;
  return nyb_score_at(a, score, slope, (float)(position < token ? 0u - past : past));
}

NYB_FUNCTION float nyb_masked_score(const nyb_attention_arguments *a, float score, float added) {
  return nyb_round_number(a->round_sums_to, NYB_ADD(score, added));
}

#endif
