// SPDX-License-Identifier: Apache-2.0
// Attention spelled out (docs/numerics.md, section 2): scores stand in memory, and every sum has the
// CPU's order: one score, and one column of the output, is one thread's, and a row's softmax sum is
// one thread's too. Blocks take query rows one after the other. No parameters: one program serves
// every call.
#include "attention_rows.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, RUN = NYB_LANE_ELEMENTS;

struct Row {
  int64_t batch, head, kv_head, query_row;
};

// The rows of one sequence and KV head.
struct Source {
  const char *codes, *scales, *biases;
  int64_t codes_stride, scales_stride, biases_stride;
  int bits, dtype, group_size;
};

__device__ Source source_of(const nyb_attention_rows &rows, const Row &row) {
  return {rows.codes + row.batch * rows.codes_stride[0] + row.kv_head * rows.codes_stride[1],
          rows.scales + row.batch * rows.scales_stride[0] + row.kv_head * rows.scales_stride[1],
          rows.biases + row.batch * rows.biases_stride[0] + row.kv_head * rows.biases_stride[1],
          rows.codes_stride[2],
          rows.scales_stride[2],
          rows.biases_stride[2],
          rows.bits,
          rows.dtype,
          rows.group_size};
}

// scale * code + bias, a product and a sum.
__device__ __forceinline__ float element_of(const Source &source, const nyb_run &run, int i) {
  if (source.bits == 0) return nyb_plain_of(&run, source.dtype, i);
  const float code = nyb_float_from_code(nyb_code_of(&run, source.bits, i));
  return NYB_ADD(NYB_MULTIPLY(nyb_widen(source.dtype, run.scale), code),
                 nyb_widen(source.dtype, run.bias));
}

__device__ __forceinline__ nyb_run load_run(const Source &source, int64_t token, int64_t first,
                                            int64_t dim) {
  nyb_run run;
  const char *codes = source.codes + token * source.codes_stride;
  if (source.bits == 0) {
    nyb_load_plain(&run, codes, source.dtype, first, dim - first);
    return run;
  }
  const int64_t group = first / source.group_size;
  nyb_load_codes(&run, codes, source.bits, first);
  run.scale = nyb_load_bits(source.scales + token * source.scales_stride, source.dtype, group);
  run.bias = nyb_load_bits(source.biases + token * source.biases_stride, source.dtype, group);
  return run;
}

__device__ __forceinline__ float single_element(const Source &source, int64_t token, int64_t d) {
  const char *codes = source.codes + token * source.codes_stride;
  if (source.bits == 0) return nyb_load_element(codes, source.dtype, d);
  const int64_t bit = d * source.bits;
  const uint32_t *words = reinterpret_cast<const uint32_t *>(codes) + bit / 32;
  const int shift = static_cast<int>(bit % 32);
  uint32_t code = words[0] >> shift;
  if (shift + source.bits > 32) code |= words[1] << (32 - shift);
  code &= (1u << source.bits) - 1u;
  const int64_t group = d / source.group_size;
  const char *scales = source.scales + token * source.scales_stride;
  const char *biases = source.biases + token * source.biases_stride;
  return NYB_ADD(NYB_MULTIPLY(nyb_load_element(scales, source.dtype, group),
                              nyb_float_from_code(code)),
                 nyb_load_element(biases, source.dtype, group));
}

// ---- The steps ------------------------------------------------------------------------------------

__device__ float score_of(const nyb_attention_arguments &a, const Source &keys, const float *q,
                          int64_t token) {
  float score = 0.0f;
  for (int64_t first = 0; first < a.key_dim; first += RUN) {
    const nyb_run run = load_run(keys, token, first, a.key_dim);
    const int here = static_cast<int>(a.key_dim - first < RUN ? a.key_dim - first : RUN);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      if (i < here) score = NYB_ADD(score, NYB_MULTIPLY(q[first + i], element_of(keys, run, i)));
    }
  }
  return nyb_round_number(a.round_to, score);
}

// A NaN is no maximum, but makes the sum NaN.
__device__ float maximum_of_block(float value, float *shared) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) value = fmaxf(value, shared[w]);
  return value;
}

__device__ float sum_in_order(const float *values, int64_t count) {
  float sum = 0.0f;
#pragma unroll 16
  for (int64_t i = 0; i < count; i++) sum = NYB_ADD(sum, values[i]);
  return sum;
}

__device__ float output_of(const Source &values, const float *weights, int64_t tokens, int64_t d) {
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t token = 0; token < tokens; token++)
    sum = NYB_ADD(sum, NYB_MULTIPLY(weights[token], single_element(values, token, d)));
  return sum;
}

__device__ void attend_row(const nyb_attention_arguments &a, const Row &row, float *slot,
                           float *shared) {
  const int64_t visible = nyb_visible_to(&a, nyb_length_of(&a, row.batch), row.query_row);
  const float minus_infinity = -nyb_float_of(0x7f800000u);
  float *q = slot, *scores = slot + a.key_dim;
  const char *query = a.q + row.batch * a.q_stride[0] + row.head * a.q_stride[1] +
                      row.query_row * a.q_stride[2];
  for (int64_t d = threadIdx.x; d < a.key_dim; d += THREADS) q[d] = nyb_query_element(&a, query, d);
  __syncthreads();

  const Source keys = source_of(a.k, row), values = source_of(a.v, row);
  float maximum = minus_infinity;
  for (int64_t token = threadIdx.x; token < visible; token += THREADS) {
    scores[token] = score_of(a, keys, q, token);
    maximum = fmaxf(maximum, scores[token]);
  }
  maximum = maximum_of_block(maximum, shared);
  // Scores of -inf weigh 0 where there are no others, too; NaN stays NaN.
  const float reference = maximum == minus_infinity ? 0.0f : maximum;
  for (int64_t token = threadIdx.x; token < visible; token += THREADS)
    scores[token] = expf(NYB_SUBTRACT(scores[token], reference));
  __syncthreads();
  if (threadIdx.x == 0) shared[0] = sum_in_order(scores, visible);
  __syncthreads();
  const float sum = shared[0], reciprocal = NYB_DIVIDE(1.0f, sum);
  for (int64_t token = threadIdx.x; token < visible; token += THREADS)
    scores[token] = nyb_round_number(a.round_to, NYB_MULTIPLY(scores[token], reciprocal));
  __syncthreads();

  char *out = a.out + row.batch * a.out_stride[0] + row.head * a.out_stride[1] +
              row.query_row * a.out_stride[2];
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS)
    nyb_store_element(out, a.out_dtype, d, output_of(values, scores, visible, d));
  if (a.lse != nullptr && threadIdx.x == 0) {
    *reinterpret_cast<float *>(a.lse + row.batch * a.lse_stride[0] + row.head * a.lse_stride[1] +
                               row.query_row * a.lse_stride[2]) =
        visible == 0 ? minus_infinity : NYB_ADD(maximum, logf(sum));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_compat(const __grid_constant__ nyb_attention_arguments a) {
  __shared__ float shared[WARPS];
  const int64_t heads = a.kv_heads * a.heads_per_kv, rows = a.batch * heads * a.query_len;
  float *slot = a.memory + static_cast<int64_t>(blockIdx.x) * a.slot_floats;
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x) {
    Row row;
    row.query_row = index % a.query_len;
    row.head = index / a.query_len % heads;
    row.batch = index / a.query_len / heads;
    row.kv_head = row.head / a.heads_per_kv;
    __syncthreads(); // the slot is free again
    attend_row(a, row, slot, shared);
  }
}
