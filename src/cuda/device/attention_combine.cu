// SPDX-License-Identifier: Apache-2.0
// nyb_attention_merge_run: results over parts of the tokens into the result over all, with the bits
// of the CPU. A block of threads takes whole rows, since out may be the first part's: a column is
// one thread's, which adds the parts in ascending order, and the row's lse is written last. No
// parameters: one program serves every call.
#include "attention_combine.cuh"
#include "attention_combine_arguments.h"

constexpr int THREADS = NYB_COMBINE_THREADS, WARPS = THREADS / 32;

struct Row {
  int64_t batch, head, row;
};

__device__ __forceinline__ int64_t offset_of(const long long *stride, const Row &at) {
  return at.batch * stride[0] + at.head * stride[1] + at.row * stride[2];
}

struct Part {
  const char *out, *lse; // of the row
  int dtype;
};

__device__ __forceinline__ Part part_at(const nyb_combine_arguments &a, int64_t part,
                                        const Row &at) {
  const int64_t listed = a.words_of_part == 0 ? 0 : part;
  const long long *words = a.words + listed * a.words_of_part;
  const bool own = a.words_of_part == NYB_COMBINE_WORDS_WITH_STRIDES;
  const int64_t step = part - listed;
  const long long *out_stride = own ? words + 2 : a.part_out_stride;
  const long long *lse_stride = own ? words + 5 : a.part_lse_stride;
  const int dtype = a.dtypes[listed];
  return {reinterpret_cast<const char *>(words[0]) + step * a.out_step +
              offset_of(out_stride, at) * (dtype == NYB_DEVICE_F32 ? 4 : 2),
          reinterpret_cast<const char *>(words[1]) + step * a.lse_step +
              offset_of(lse_stride, at) * 4,
          dtype};
}

__device__ __forceinline__ float load(const char *row, int dtype, int64_t index) {
  if (dtype == NYB_DEVICE_F32) return reinterpret_cast<const float *>(row)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t *>(row)[index];
  return dtype == NYB_DEVICE_F16 ? nyb_widen_f16(bits) : nyb_widen_bf16(bits);
}

// By integers: the device's own conversions have other NaNs.
__device__ __forceinline__ void store(char *row, int dtype, int64_t index, float value) {
  if (dtype == NYB_DEVICE_F32) {
    reinterpret_cast<float *>(row)[index] = value;
  } else {
    reinterpret_cast<uint16_t *>(row)[index] = static_cast<uint16_t>(
        dtype == NYB_DEVICE_F16 ? nyb_narrow_f16(value) : nyb_narrow_bf16(value));
  }
}

__device__ __forceinline__ float minus_infinity() { return -nyb_float_of(0x7f800000u); }

// The largest lse of the parts, which is -inf where all are empty; NaN where one is NaN or +inf.
__device__ float largest_lse(const nyb_combine_arguments &a, const Row &at, float *shared) {
  float largest = minus_infinity();
  bool lost = false;
  for (int64_t part = threadIdx.x; part < a.parts; part += THREADS) {
    const float lse = *reinterpret_cast<const float *>(part_at(a, part, at).lse);
    lost = lost || !(lse < nyb_float_of(0x7f800000u));
    if (lse > largest) largest = lse;
  }
  if (lost) largest = nyb_float_of(0x7f800000u); // stands for it: above all others
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, shared[w]);
  return largest == nyb_float_of(0x7f800000u) ? nyb_float_of(0x7fc00000u) : largest;
}

// Weights of THREADS parts from `first` on; an empty part's is below 0.
__device__ void weigh(const nyb_combine_arguments &a, const Row &at, float largest, int64_t first,
                      double *weights) {
  const int64_t part = first + threadIdx.x;
  __syncthreads(); // those before have been read
  if (part < a.parts) {
    const float lse = *reinterpret_cast<const float *>(part_at(a, part, at).lse);
    weights[threadIdx.x] =
        lse == minus_infinity()
            ? -1.0
            : nyb_exp_of_negative(
                  NYB_F64_SUBTRACT(static_cast<double>(lse), static_cast<double>(largest)));
  }
  __syncthreads();
}

// Adds up the thread's column, which may be beyond the last; returns the sum of the weights.
__device__ double add_parts(const nyb_combine_arguments &a, const Row &at, float largest,
                            int64_t column, double *weights, double *sum) {
  double all = 0;
  *sum = -0.0; // what adding leaves alone, to the bit
  for (int64_t first = 0; first < a.parts; first += THREADS) {
    weigh(a, at, largest, first, weights);
    const int here = static_cast<int>(a.parts - first < THREADS ? a.parts - first : THREADS);
    for (int i = 0; i < here; i++) {
      const double weight = weights[i];
      if (weight < 0) continue;
      all = NYB_F64_ADD(all, weight);
      if (column >= a.value_dim) continue;
      const Part part = part_at(a, first + i, at);
      const double value = static_cast<double>(load(part.out, part.dtype, column));
      *sum = NYB_F64_ADD(*sum, NYB_F64_MULTIPLY(weight, value));
    }
  }
  return all;
}

__device__ void merge_row(const nyb_combine_arguments &a, const Row &at, float *shared,
                          double *weights) {
  const float largest = largest_lse(a, at, shared);
  const bool finite = largest - largest == 0.0f;
  char *out = a.out + offset_of(a.out_stride, at);
  double lse = static_cast<double>(largest);
  for (int64_t first = 0; first < a.value_dim; first += THREADS) {
    const int64_t column = first + threadIdx.x;
    float value = largest == minus_infinity() ? 0.0f : nyb_float_of(0x7fc00000u);
    if (finite) {
      double sum;
      const double all = add_parts(a, at, largest, column, weights, &sum);
      value = nyb_f32_of_f64(NYB_F64_DIVIDE(sum, all));
      if (all > 1) lse = NYB_F64_ADD(static_cast<double>(largest), nyb_log_from_one(all));
    }
    if (column < a.value_dim) store(out, a.out_dtype, column, value);
  }
  __syncthreads(); // every lse of the row has been read
  if (a.lse != nullptr && threadIdx.x == 0) {
    *reinterpret_cast<float *>(a.lse + offset_of(a.lse_stride, at)) = nyb_f32_of_f64(lse);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine(const __grid_constant__ nyb_combine_arguments a) {
  __shared__ float shared[WARPS];
  __shared__ double weights[THREADS];
  const int64_t rows = a.batch * a.heads * a.rows;
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x) {
    const Row at = {index / a.rows / a.heads, index / a.rows % a.heads, index % a.rows};
    merge_row(a, at, shared, weights);
  }
}
