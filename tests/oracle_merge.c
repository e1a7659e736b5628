/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "oracle.h"

/* The weights of a row's parts; returns their largest lse, as docs/numerics.md, section 5, has it:
 * -inf where all are empty, NaN where one is NaN or +inf. */
static double weigh(const double *lses, int64_t parts, double *weights, double *sum) {
  double largest = -(double)INFINITY;
  *sum = 0;
  for (int64_t i = 0; i < parts; i++) {
    if (isnan(lses[i]) || lses[i] == (double)INFINITY) return (double)NAN;
    if (lses[i] > largest) largest = lses[i];
  }
  for (int64_t i = 0; i < parts; i++) {
    weights[i] = isinf(lses[i]) ? 0 : exp(lses[i] - largest);
    *sum += weights[i];
  }
  return largest;
}

/* Both sides sum in double: a weight errs by a few units (16 are allowed), each product and sum by
 * half of one, so that `parts + 16` units of 2^-53 of the sum of magnitudes bound each side. What
 * is stored in 16 bits was an f32 first. */
void oracle_merge_row(const double *lses, const double *const *outs, int64_t parts, int64_t dim,
                      nyb_dtype out_dtype, double *weights, oracle_result *result) {
  const double units = 2 * (double)(parts + 16) * 0x1p-53;
  double sum;
  const double largest = weigh(lses, parts, weights, &sum);
  result->lse = isfinite(largest) ? largest + log(sum) : largest;
  result->lse_error = isfinite(largest) ? units * (1 + fabs(result->lse)) : 0;
  for (int64_t d = 0; d < dim; d++) {
    double total = 0, magnitude = 0;
    for (int64_t i = 0; i < parts; i++) {
      if (isinf(lses[i])) continue;
      total += weights[i] * outs[i][d];
      magnitude += weights[i] * fabs(outs[i][d]);
    }
    result->out[d] = isnan(largest) ? (double)NAN : isinf(largest) ? 0 : total / sum;
    result->out_error[d] = isfinite(largest) ? units * magnitude / sum : 0;
    if (out_dtype != NYB_F32) {
      result->out_error[d] += ORACLE_F32_UNIT * fabs(result->out[d]) + 0x1p-150;
    }
  }
}
