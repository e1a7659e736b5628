/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine's memory gives to plain code: the ceilings that benchmarks are held against. */
#ifndef NYB_BANDWIDTH_H
#define NYB_BANDWIDTH_H

#include <stdint.h>

typedef struct nyb_bandwidth {
  double median_gb_per_s, best_gb_per_s;
} nyb_bandwidth;

/* `threads` threads read 512 MB of memory once, each its own part; several passes. */
int nyb_measure_read_bandwidth(int64_t threads, nyb_bandwidth *bandwidth);

/* The same with memcpy from one half of the memory to the other; bytes read and bytes written both
 * count. */
int nyb_measure_copy_bandwidth(int64_t threads, nyb_bandwidth *bandwidth);

#endif
