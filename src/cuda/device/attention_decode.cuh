// SPDX-License-Identifier: Apache-2.0
// What attention_decode and attention_merge share.
#pragma once

#include "attention_decode_arguments.h"
#include "numbers.cuh"

// Four elements of a row's output and its sum of weights, for a subtree of blocks, not divided yet.
struct SubtreePart {
  float4 out;
  float sum;
};

// The finished row `row` of a KV head (query head by query head, query row by query row): elements
// 4 * quad on, and once lse. highest: the unit of `total` in log2.
__device__ __forceinline__ void store_row(const nyb_decode_arguments &a, int batch, int head, int row,
                                          int quad, float highest, const SubtreePart &total) {
  const int64 query_head = static_cast<int64>(head) * a.heads_per_kv + row / a.query_len;
  const int64 query = row % a.query_len;
  char *out = a.out + batch * a.out_stride[0] + query_head * a.out_stride[1] + query * a.out_stride[2];
  // A row that sees tokens, but scores of -inf only, is 0/0.
  const int64 length = min(static_cast<int64>(a.lengths[batch]), static_cast<int64>(a.capacity_tokens));
  const bool seen = (a.causal != 0 ? length - a.query_len + query + 1 : length) > 0;
  const float values[4] = {total.out.x, total.out.y, total.out.z, total.out.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float value = seen ? values[j] / total.sum : 0.0f;
    if (a.out_type == F16) {
      store_float<F16>(out, quad * 4 + j, value);
    } else {
      store_float<BF16>(out, quad * 4 + j, value);
    }
  }
  if (quad == 0 && a.lse != nullptr) {
    float *lse = reinterpret_cast<float *>(a.lse + batch * a.lse_stride[0] +
                                           query_head * a.lse_stride[1] + query * a.lse_stride[2]);
    *lse = seen ? (highest + log2f(total.sum)) * 0.693147180559945309f : -infinity();
  }
}
