/* SPDX-License-Identifier: Apache-2.0 */
#ifndef NYB_STATISTICS_H
#define NYB_STATISTICS_H

#include <stdint.h>

/* Sorts samples[0 .. count-1] upwards, in place. */
void nyb_sort_samples(double *samples, int64_t count);

/* The `share` quantile (0.5: the median) of sorted samples, between two where it falls there. */
double nyb_quantile(const double *sorted, int64_t count, double share);

#endif
