// SPDX-License-Identifier: Apache-2.0
// Adds the chunks of a query row that attention_general left, in ascending order, and finishes the
// row: a block of threads for each row and each THREADS of its columns.
#include "attention_general.cuh"
#include "attention_rows.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;

// The largest maximum up to and with this thread's, of the block's and `before`.
__device__ float running_maximum(float own, float before, float *shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float maximum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, maximum, distance);
    if (lane >= distance) maximum = fmaxf(maximum, other);
  }
  if (lane == 31) shared[warp] = maximum;
  __syncthreads();
  maximum = fmaxf(maximum, before);
#pragma unroll
  for (int w = 0; w < WARPS - 1; w++) {
    if (w < warp) maximum = fmaxf(maximum, shared[w]);
  }
  return maximum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_general_merge(const __grid_constant__ nyb_attention_arguments a) {
  __shared__ float maxima[THREADS], keep[THREADS], add[THREADS], sums[THREADS];
  __shared__ float scan[WARPS], folded_sum;
  const int64_t rows = a.heads_per_kv * a.query_len;
  const int64_t row = blockIdx.x, row_in_head = row % rows;
  const int64_t kv_head = row / rows % a.kv_heads, batch = row / rows / a.kv_heads;
  const int64_t query_row = row_in_head / a.heads_per_kv;
  const int64_t visible = nyb_visible_to(&a, nyb_length_of(&a, batch), query_row);
  const int64_t chunks = (visible + NYB_GENERAL_CHUNK_TOKENS - 1) / NYB_GENERAL_CHUNK_TOKENS;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * THREADS + threadIdx.x;
  const float *values = a.memory + row * a.chunks * a.value_dim + column;
  const float *statistics = a.statistics + row * a.chunks * 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  float folded = 0.0f, maximum = 0.0f;
  for (int64_t first = 0; first < chunks; first += THREADS) {
    const int here = static_cast<int>(chunks - first < THREADS ? chunks - first : THREADS);
    const int i = threadIdx.x;
    const float own = i < here ? statistics[(first + i) * 2] : -nyb_float_of(0x7f800000u);
    // The first chunk of all is taken as it is.
    maxima[i] = running_maximum(own, first == 0 ? own : maximum, scan);
    __syncthreads();
    const float before = i > 0 ? maxima[i - 1] : maximum;
    if (first + i == 0) {
      keep[i] = 0.0f;
      add[i] = 1.0f;
    } else {
      const nyb_fold fold = nyb_fold_of(before, own);
      keep[i] = fold.keep;
      add[i] = fold.add;
    }
    sums[i] = i < here ? statistics[(first + i) * 2 + 1] : 0.0f;
    maximum = maxima[here - 1];
    __syncthreads();
    if (i == 0) {
      float sum = first == 0 ? sums[0] : folded_sum;
      for (int c = first == 0 ? 1 : 0; c < here; c++)
        sum = nyb_fold_values(sum, keep[c], sums[c], add[c]);
      folded_sum = sum;
    }
    if (column < a.value_dim) {
      int c = 0;
      if (first == 0) folded = values[c++ * a.value_dim];
#pragma unroll 8
      for (; c < here; c++)
        folded = nyb_fold_values(folded, keep[c], values[(first + c) * a.value_dim], add[c]);
    }
    __syncthreads();
  }

  const int64_t head = kv_head * a.heads_per_kv + row_in_head % a.heads_per_kv;
  char *out = a.out + batch * a.out_stride[0] + head * a.out_stride[1] + query_row * a.out_stride[2];
  if (column < a.value_dim) {
    nyb_store_element(out, a.out_dtype, column,
                      visible == 0 ? 0.0f : NYB_DIVIDE(folded, folded_sum));
  }
  if (a.lse != nullptr && column == 0) {
    const float lse = visible == 0 ? -nyb_float_of(0x7f800000u) : NYB_ADD(maximum, logf(folded_sum));
    *reinterpret_cast<float *>(a.lse + batch * a.lse_stride[0] + head * a.lse_stride[1] +
                               query_row * a.lse_stride[2]) = lse;
  }
}
