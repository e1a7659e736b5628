/* SPDX-License-Identifier: Apache-2.0 */
/* What attention_general, its merge kernel and the tests agree on: how a call is cut, and how one
 * chunk's result is added to those before it. TILE and CHUNK_TOKENS are part of the result's bits
 * and depend on nothing. The host has the sizes from attention_general_sizes.h. */
#ifndef NYB_ATTENTION_GENERAL_CUH
#define NYB_ATTENTION_GENERAL_CUH

#include "attention_general_sizes.h"
#include "portable.cuh"

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

#endif
