/* SPDX-License-Identifier: Apache-2.0 */
/* What attention_general, its merge kernel and the tests agree on: how a call is cut, and how one
 * chunk's result is added to those before it. TILE and CHUNK_TOKENS are part of the result's bits
 * and depend on nothing. The host has the sizes from attention_general_sizes.h. */
#ifndef NYB_ATTENTION_GENERAL_CUH
#define NYB_ATTENTION_GENERAL_CUH

#include "attention_general_sizes.h"
#include "attention_sight.cuh"

/* folded = folded * keep + next * add, for values and sums alike. */
typedef struct nyb_fold {
  float maximum, keep, add;
} nyb_fold;

/* exp(from - to) for from <= to; also where both are the same infinity. */
NYB_FUNCTION float nyb_fold_weight(float from, float to) {
  return from == to ? 1.0f : expf(NYB_SUBTRACT(from, to));
}

NYB_FUNCTION nyb_fold nyb_fold_of(float folded_maximum, float next_maximum) {
  nyb_fold fold;
  fold.maximum = folded_maximum > next_maximum ? folded_maximum : next_maximum;
  fold.keep = nyb_fold_weight(folded_maximum, fold.maximum);
  fold.add = nyb_fold_weight(next_maximum, fold.maximum);
  return fold;
}

NYB_FUNCTION float nyb_fold_values(float folded, float keep, float next, float add) {
  return fmaf(folded, keep, NYB_MULTIPLY(next, add));
}

/* ---- Calls with features -------------------------------------------------------------------- */

/* Which chunks a unit reads, numbered: those of the kept tokens, then those of the window. */
typedef struct nyb_chunk_list {
  int kept, first_in_window, count;
} nyb_chunk_list;

NYB_FUNCTION int nyb_chunks_for(int tokens) {
  return tokens / NYB_GENERAL_CHUNK_TOKENS + (tokens % NYB_GENERAL_CHUNK_TOKENS != 0);
}

/* Of rows from `first` to `last`, of which none sees a token from last.keep_end up to first.begin or
 * from last.end on. */
NYB_FUNCTION nyb_chunk_list nyb_chunk_list_of(const nyb_row_sight *first,
                                              const nyb_row_sight *last) {
  const int begin = first->begin / NYB_GENERAL_CHUNK_TOKENS, all = nyb_chunks_for(last->end);
  nyb_chunk_list list;
  list.kept = nyb_chunks_for(last->keep_end);
  list.first_in_window = begin > list.kept ? begin : list.kept;
  list.count = list.kept + (all > list.first_in_window ? all - list.first_in_window : 0);
  return list;
}

NYB_FUNCTION int nyb_chunk_at(const nyb_chunk_list *list, int index) {
  return index < list->kept ? index : list->first_in_window + index - list->kept;
}

/* The sum of a chunk of which a row saw no token; of scores that are all -inf it is 0. */
#define NYB_UNSEEN_SUM (-1.0f)

NYB_FUNCTION int nyb_has_weight(float sum) { return !(sum <= 0.0f); } /* a NaN has, too */

/* The fold where a side may have no weight, for sums as for values: it leaves the other's bits, but
 * for a NaN (of a value that is not finite). What has no weight is +0 or NaN, and the factor -1
 * makes a -0 of it, beside which every number stays what it is, zeros of both signs too. */
NYB_FUNCTION nyb_fold nyb_fold_of_sides(float folded_maximum, int folded_weighs, float next_maximum,
                                        int next_weighs) {
  nyb_fold fold = nyb_fold_of(folded_maximum, next_maximum);
  if (!next_weighs) {
    fold.keep = 1.0f;
    fold.add = -1.0f;
  } else if (!folded_weighs) {
    fold.keep = -1.0f;
    fold.add = 1.0f;
  }
  return fold;
}

/* A row's end: its sink is a token more, without a value. */
typedef struct nyb_finish {
  float maximum, sum;
  float keep; /* values times this, over sum */
  int blind;  /* the row sees no token: it is zeros, and lse -inf */
} nyb_finish;

NYB_FUNCTION nyb_finish nyb_finish_of(float maximum, float sum, int seen, const float *sink) {
  nyb_finish finish;
  finish.maximum = maximum;
  finish.sum = seen ? sum : 0.0f;
  finish.keep = 1.0f;
  if (sink) {
    const float both = maximum > *sink ? maximum : *sink; /* or NaN, where the sink is */
    if (nyb_bits_of(both) != 0xff800000u) {
      finish.keep = expf(NYB_SUBTRACT(maximum, both));
      finish.sum = NYB_ADD(NYB_MULTIPLY(finish.sum, finish.keep), expf(NYB_SUBTRACT(*sink, both)));
      finish.maximum = both;
    }
  }
  finish.blind = !seen && finish.sum == 0.0f;
  return finish;
}

#endif
