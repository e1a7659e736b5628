/* SPDX-License-Identifier: Apache-2.0 */
#include "statistics.h"

#include <stdlib.h>

static int by_value(const void *a, const void *b) {
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

void nyb_sort_samples(double *samples, int64_t count) {
  qsort(samples, (size_t)count, sizeof *samples, by_value);
}

double nyb_quantile(const double *sorted, int64_t count, double share) {
  const double position = share * (double)(count - 1);
  const int64_t below = (int64_t)position;
  const int64_t above = below + 1 < count ? below + 1 : below;
  const double part = position - (double)below;
  return sorted[below] * (1 - part) + sorted[above] * part;
}
