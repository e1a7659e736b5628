/* SPDX-License-Identifier: Apache-2.0 */
/* Which block of threads attends to which leaves of tokens, and which subtrees of leaves it leaves
 * in the workspace (attention_decode). Leaves of a pair (sequence, KV head and tile of query rows)
 * are counted from the sequence's start; units are those of all pairs that hold something that is
 * seen, one pair behind the other. */
#ifndef NYB_ATTENTION_LEAVES_CUH
#define NYB_ATTENTION_LEAVES_CUH

#include "portable.cuh"

/* The leaves of a pair that are seen: [0, keep) and [begin, end), keep < begin or both 0. */
typedef struct nyb_seen_leaves {
  int32_t keep, begin, end;
} nyb_seen_leaves;

/* ---- Runs ----------------------------------------------------------------------------------- */

/* All units (the host takes another kernel where they are 2^31 or more), dealt out to blocks of
 * threads in runs of neighbours, each as long as the next or longer by one. */
typedef struct nyb_leaf_runs {
  uint32_t share, longer;
} nyb_leaf_runs;

NYB_FUNCTION nyb_leaf_runs nyb_leaf_runs_of(uint32_t units, uint32_t blocks) {
  const nyb_leaf_runs runs = {units / blocks, units % blocks};
  return runs;
}

NYB_FUNCTION uint32_t nyb_run_begin(const nyb_leaf_runs *runs, uint32_t block) {
  return runs->share * block + (runs->longer < block ? runs->longer : block);
}

/* Behind the run that `unit` lies in. */
NYB_FUNCTION uint32_t nyb_run_end(const nyb_leaf_runs *runs, uint32_t unit) {
  const uint32_t long_units = runs->longer * (runs->share + 1);
  if (unit < long_units) return (unit / (runs->share + 1) + 1) * (runs->share + 1);
  return long_units + ((unit - long_units) / runs->share + 1) * runs->share;
}

/* Behind the run that begins with `unit`. */
NYB_FUNCTION uint32_t nyb_next_run_end(const nyb_leaf_runs *runs, uint32_t unit) {
  return unit + runs->share + (unit < runs->longer * (runs->share + 1) ? 1 : 0);
}

/* ---- Subtrees ------------------------------------------------------------------------------- */

/* A subtree has up to 2^MAX_LEVELS leaves, so it lies within a window of so many that begins at a
 * multiple of it. */
enum { NYB_LEAF_MAX_LEVELS = 4, NYB_LEAF_WINDOW = 1 << NYB_LEAF_MAX_LEVELS };

/* Bits [first, end), of 0 to 31. */
NYB_FUNCTION uint32_t nyb_leaf_bits(int32_t first, int32_t end) {
  return end <= first ? 0 : ((1u << end) - 1) & ~((1u << first) - 1);
}

/* Bit i: a run begins with leaf window + i; of [first, end), whose first leaf is unit `unit`. The
 * run that holds the first leaf began there or before: nothing is said of it. */
NYB_FUNCTION uint32_t nyb_runs_begun(const nyb_leaf_runs *runs, int32_t window, int32_t first,
                                     int32_t end, uint32_t unit) {
  uint32_t begun = 0;
  if (first >= end) return 0;
  for (uint32_t begin = nyb_run_end(runs, unit); begin - unit < (uint32_t)(end - first);
       begin = nyb_next_run_end(runs, begin)) {
    begun |= 1u << ((uint32_t)(first - window) + begin - unit);
  }
  return begun;
}

/* A run's part of a piece of seen leaves is written as subtrees from left to right, each the
 * largest that begins there. Bit i: one begins with leaf window + i. A leaf begins one unless a
 * larger block of the binary tree holds it, lies within one run and is seen whole. first_unit: the
 * pair's. */
NYB_FUNCTION uint32_t nyb_subtrees_begun(const nyb_leaf_runs *runs, uint32_t first_unit,
                                         const nyb_seen_leaves *leaves, int32_t levels,
                                         int32_t window) {
  const int32_t behind = window + NYB_LEAF_WINDOW;
  const int32_t begin = leaves->begin > window ? leaves->begin : window;
  const int32_t end = leaves->end < behind ? leaves->end : behind;
  const int32_t keep = leaves->keep < behind ? leaves->keep : behind;
  uint32_t seen = nyb_leaf_bits(begin - window, end - window), whole;
  uint32_t cuts = nyb_runs_begun(runs, window, begin, end,
                                 first_unit + (uint32_t)(begin - leaves->begin + leaves->keep));
  if (window < keep) {
    seen |= nyb_leaf_bits(0, keep - window);
    cuts |= nyb_runs_begun(runs, window, window, keep, first_unit + (uint32_t)window);
  }
  uint32_t begun = whole = seen; /* whole: such blocks of 2^level leaves, by their first */
  for (int32_t level = 0; level < NYB_LEAF_MAX_LEVELS; level++) {
    const int32_t half = 1 << level;
    if (level >= levels) break;
    whole &= whole >> half & ~(cuts >> half) &
             (level == 0 ? 0x5555u : level == 1 ? 0x1111u : level == 2 ? 0x0101u : 0x0001u);
    begun &= ~(whole << half);
  }
  return begun;
}

#endif
