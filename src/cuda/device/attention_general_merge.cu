// SPDX-License-Identifier: Apache-2.0
// Adds the chunks of a query row that attention_general left, in ascending order, and finishes the
// row: a block of threads for each row and each THREADS of its columns.
//
// Parameter (-D): FEATURED, as attention_general was compiled.
#include "attention_general.cuh"
#include "attention_rows.cuh"

#if !defined(FEATURED)
#error "a parameter of attention_general_merge is missing"
#endif

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

// The chunks of the row's unit, as attention_general takes them.
__device__ int64_t chunks_of_unit(const nyb_attention_arguments &a, int64_t batch,
                                  int64_t row_in_head) {
  const int64_t rows = a.heads_per_kv * a.query_len;
  const int64_t first_row = row_in_head / a.rows_per_unit * a.rows_per_unit;
  const int64_t end_row =
      first_row + a.rows_per_unit < rows ? first_row + a.rows_per_unit : rows;
  const nyb_sequence sequence = nyb_sequence_of(&a, batch);
  const nyb_row_sight first = nyb_row_sight_of(&a, &sequence, first_row / a.heads_per_kv);
  const nyb_row_sight last = nyb_row_sight_of(&a, &sequence, (end_row - 1) / a.heads_per_kv);
  return nyb_chunk_list_of(&first, &last).count;
}

// What a row saw of a chunk, so that the largest of several says what it saw of all.
enum { SAW_NOTHING = 0, SAW_WITHOUT_WEIGHT = 1, SAW_WEIGHT = 2 };

__device__ __forceinline__ float saw(float sum) {
  return nyb_has_weight(sum) ? SAW_WEIGHT : sum < 0.0f ? SAW_NOTHING : SAW_WITHOUT_WEIGHT;
}

// How a chunk is added to those before it: nyb_fold and the chunk's sum.
struct Fold {
  float keep, add, sum, padding;
} __attribute__((aligned(16)));

// What a thread takes of so many chunks at once, so that all loads are under way together.
struct Column {
  float of[THREADS];
};

constexpr int BURST = 16;

__device__ __forceinline__ void load_column(Column &column, const float *values, int64_t pitch,
                                            int chunks) {
#pragma unroll
  for (int begin = 0; begin < THREADS; begin += BURST) {
    if (begin >= chunks) break;
#pragma unroll
    for (int i = begin; i < begin + BURST; i++) {
      column.of[i] = i < chunks ? values[i * pitch] : 0.0f;
    }
  }
}

// The column's value and the row's sum, which each thread adds for itself, chunk after chunk.
__device__ __forceinline__ void fold_column(const Column &column, const Fold *folds, int chunks,
                                            float &value, float &sum) {
#pragma unroll
  for (int begin = 0; begin < THREADS; begin += BURST) {
    if (begin >= chunks) break;
#pragma unroll
    for (int i = begin; i < begin + BURST; i++) {
      const Fold fold = folds[i];
      if (i >= chunks) break;
      value = nyb_fold_values(value, fold.keep, column.of[i], fold.add);
      sum = nyb_fold_values(sum, fold.keep, fold.sum, fold.add);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_general_merge(const __grid_constant__ nyb_attention_arguments a) {
  __shared__ float maxima[THREADS], scan[WARPS];
  __shared__ float seen[THREADS], seen_scan[WARPS]; // FEATURED
  __shared__ Fold folds[THREADS];
  const int64_t rows = a.heads_per_kv * a.query_len;
  const int64_t row = blockIdx.x, row_in_head = row % rows;
  const int64_t kv_head = row / rows % a.kv_heads, batch = row / rows / a.kv_heads;
  const int64_t query_row = row_in_head / a.heads_per_kv;
  const int64_t visible = nyb_visible_to(&a, nyb_length_of(&a, batch), query_row);
  const int64_t chunks = FEATURED ? chunks_of_unit(a, batch, row_in_head)
                                  : (visible + NYB_GENERAL_CHUNK_TOKENS - 1) /
                                        NYB_GENERAL_CHUNK_TOKENS;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * THREADS + threadIdx.x;
  const float *values = a.memory + row * a.chunks * a.value_dim +
                        (column < a.value_dim ? column : a.value_dim - 1);
  const float *statistics = a.statistics + row * a.chunks * 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  // The first chunk of all stays as it is, beside +0 times -1 (as in nyb_fold_of_sides).
  float folded = 0.0f, folded_sum = 0.0f, maximum = FEATURED ? -nyb_float_of(0x7f800000u) : 0.0f;
  float saw_until_now = SAW_NOTHING;
#pragma unroll 1
  for (int64_t first = 0; first < chunks; first += THREADS) {
    const int here = static_cast<int>(chunks - first < THREADS ? chunks - first : THREADS);
    const int i = threadIdx.x;
    const float own = i < here ? statistics[(first + i) * 2] : -nyb_float_of(0x7f800000u);
    const float own_sum = i < here ? statistics[(first + i) * 2 + 1] : 0.0f;
    Column next;
    load_column(next, values + first * a.value_dim, a.value_dim, here);
    maxima[i] = running_maximum(own, first == 0 ? own : maximum, scan);
    if constexpr (FEATURED) {
      seen[i] = running_maximum(i < here ? saw(own_sum) : SAW_NOTHING, saw_until_now, seen_scan);
    }
    __syncthreads();
    const float before = i > 0 ? maxima[i - 1] : maximum;
    nyb_fold fold;
    if (FEATURED) {
      const float saw_before = i > 0 ? seen[i - 1] : saw_until_now;
      fold = nyb_fold_of_sides(before, saw_before == SAW_WEIGHT, own, nyb_has_weight(own_sum));
    } else {
      fold = nyb_fold_of(before, own);
    }
    if (first + i == 0) fold = {own, -1.0f, 1.0f};
    folds[i] = {fold.keep, fold.add, FEATURED && own_sum < 0.0f ? 0.0f : own_sum, 0.0f};
    maximum = maxima[here - 1];
    if constexpr (FEATURED) saw_until_now = seen[here - 1];
    __syncthreads();
    fold_column(next, folds, here, folded, folded_sum);
  }

  const int64_t head = kv_head * a.heads_per_kv + row_in_head % a.heads_per_kv;
  nyb_finish finish = {maximum, folded_sum, 1.0f, visible == 0};
  if constexpr (FEATURED) {
    finish = nyb_finish_of(maximum, finish.sum, saw_until_now != SAW_NOTHING,
                           a.sinks != nullptr ? a.sinks + head : nullptr);
    folded = NYB_MULTIPLY(folded, finish.keep);
  }
  char *out = a.out + batch * a.out_stride[0] + head * a.out_stride[1] + query_row * a.out_stride[2];
  if (column < a.value_dim) {
    nyb_store_element(out, a.out_dtype, column,
                      finish.blind ? 0.0f : NYB_DIVIDE(folded, finish.sum));
  }
  if (a.lse != nullptr && column == 0) {
    const float lse =
        finish.blind ? -nyb_float_of(0x7f800000u) : NYB_ADD(finish.maximum, logf(finish.sum));
    *reinterpret_cast<float *>(a.lse + batch * a.lse_stride[0] + head * a.lse_stride[1] +
                               query_row * a.lse_stride[2]) = lse;
  }
}
