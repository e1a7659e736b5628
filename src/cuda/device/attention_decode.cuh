// SPDX-License-Identifier: Apache-2.0
// What attention_decode and attention_merge share: which block of threads attends to which leaves,
// and which subtrees of leaves it leaves in the workspace.
#pragma once

#include "attention_decode_arguments.h"
#include "numbers.cuh"

__device__ __forceinline__ int length_of(const nyb_decode_arguments &a, int batch) {
  const int64 length = a.lengths[batch];
  return static_cast<int>(length < 0 ? 0 : length > a.capacity_tokens ? a.capacity_tokens : length);
}

// All leaves of all pairs (the host takes another kernel where they are 2^31 or more), dealt out in
// runs of neighbours, each as long as the next or longer by one.
struct Runs {
  uint32 share, longer;
  __device__ __forceinline__ Runs(uint32 units, uint32 blocks)
      : share(units / blocks), longer(units % blocks) {}
  __device__ __forceinline__ uint32 begin_of(uint32 block) const {
    return share * block + min(longer, block);
  }
  // Behind the run that `unit` lies in.
  __device__ __forceinline__ uint32 end_at(uint32 unit) const {
    const uint32 long_units = longer * (share + 1);
    if (unit < long_units) return (unit / (share + 1) + 1) * (share + 1);
    return long_units + ((unit - long_units) / share + 1) * share;
  }
};

// A pair's part of a run, from leaf `leaf` up to `end`, is written as subtrees from left to right,
// each the largest that begins there. The first has 2^level leaves.
__device__ __forceinline__ int subtree_level(int leaf, int end, int levels) {
  int level = 0;
  while (level < levels && (leaf >> level & 1) == 0 && leaf + (2 << level) <= end) level++;
  return level;
}
