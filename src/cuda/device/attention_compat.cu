// SPDX-License-Identifier: Apache-2.0
// Attention spelled out (docs/numerics.md, section 2): scores stand in memory, and every sum has the
// CPU's order: one score, and one column of the output, is one thread's, and a row's softmax sum is
// one thread's too. Blocks take query rows one after the other. No parameters: one program serves
// every call.
#include "attention_places.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, RUN = NYB_LANE_ELEMENTS;

struct Row {
  int64_t batch, head, kv_head, query_row;
};

// A sequence, and what a row sees of it.
struct View {
  nyb_sequence sequence;
  nyb_row_sight sight;
  int position, last_begin;
  const char *mask_row; // or null
  float slope;
};

__device__ View view_of(const nyb_attention_arguments &a, const Row &row) {
  View view;
  view.sequence = nyb_sequence_of(&a, row.batch);
  view.sight = nyb_row_sight_of(&a, &view.sequence, row.query_row);
  view.position = static_cast<int>(nyb_position_of(&a, &view.sequence, row.query_row));
  view.last_begin = nyb_last_begin_of(&a, row.batch, view.sequence.tokens);
  view.mask_row = a.mask_kind == 0 ? nullptr
                                   : a.mask_array + nyb_mask_offset(&a, &view.sequence, row.batch,
                                                                    row.head, row.query_row);
  view.slope = a.slopes != nullptr ? a.slopes[row.head] : 0.0f;
  return view;
}

// The tokens that mask and window show are numbered through.
__device__ __forceinline__ int token_count(const View &view) {
  return view.sight.keep_end + view.sight.end - view.sight.begin;
}

__device__ __forceinline__ int token_at(const View &view, int index) {
  return index < view.sight.keep_end ? index : index - view.sight.keep_end + view.sight.begin;
}

// One stored row.
struct Source {
  const char *codes, *scales, *biases;
  int bits, dtype, group_size;
};

__device__ Source source_of(const nyb_attention_arguments &a, const Row &row, const View &view,
                            bool is_value, int token) {
  const nyb_token_place place = nyb_token_place_of(&a, row.batch, view.last_begin, token);
  const nyb_attention_rows &rows =
      place.part == NYB_DEVICE_PART_MIDDLE  ? (is_value ? a.v : a.k)
      : place.part == NYB_DEVICE_PART_FIRST ? (is_value ? a.first_v : a.first_k)
                                            : (is_value ? a.last_v : a.last_k);
  const int64_t block = place.block, slot = view.sequence.start + place.row;
  return {rows.codes + block * rows.codes_stride[0] + row.kv_head * rows.codes_stride[1] +
              slot * rows.codes_stride[2],
          rows.scales + block * rows.scales_stride[0] + row.kv_head * rows.scales_stride[1] +
              slot * rows.scales_stride[2],
          rows.biases + block * rows.biases_stride[0] + row.kv_head * rows.biases_stride[1] +
              slot * rows.biases_stride[2],
          rows.bits, rows.dtype, rows.group_size};
}

// scale * code + bias, a product and a sum.
__device__ __forceinline__ float element_of(const Source &source, const nyb_run &run, int i) {
  if (source.bits == 0) return nyb_plain_of(&run, source.dtype, i);
  const float code = nyb_code_number(&run, source.bits, i);
  return NYB_ADD(NYB_MULTIPLY(nyb_widen(source.dtype, run.scale), code),
                 nyb_widen(source.dtype, run.bias));
}

__device__ __forceinline__ nyb_run load_run(const Source &source, int64_t first, int64_t dim) {
  nyb_run run;
  if (source.bits == 0) {
    nyb_load_plain(&run, source.codes, source.dtype, first, dim - first);
    return run;
  }
  const int64_t group = first / source.group_size;
  nyb_load_codes(&run, source.codes, source.bits, first);
  run.scale = nyb_load_bits(source.scales, source.dtype, group);
  run.bias = nyb_load_bits(source.biases, source.dtype, group);
  return run;
}

__device__ __forceinline__ float single_element(const Source &source, int64_t d) {
  if (source.bits == 0) return nyb_load_element(source.codes, source.dtype, d);
  const int64_t bit = d * source.bits;
  const uint32_t *words = reinterpret_cast<const uint32_t *>(source.codes) + bit / 32;
  const int shift = static_cast<int>(bit % 32);
  uint32_t code = words[0] >> shift;
  if (shift + source.bits > 32) code |= words[1] << (32 - shift);
  code &= (1u << source.bits) - 1u;
  const int64_t group = d / source.group_size;
  return NYB_ADD(NYB_MULTIPLY(nyb_load_element(source.scales, source.dtype, group),
                              nyb_float_from_code(code)),
                 nyb_load_element(source.biases, source.dtype, group));
}

// ---- The steps ------------------------------------------------------------------------------------

__device__ float score_of(const nyb_attention_arguments &a, const Source &keys, const float *q) {
  float score = 0.0f;
  for (int64_t first = 0; first < a.key_dim; first += RUN) {
    const nyb_run run = load_run(keys, first, a.key_dim);
    const int here = static_cast<int>(a.key_dim - first < RUN ? a.key_dim - first : RUN);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      if (i < here) score = NYB_ADD(score, NYB_MULTIPLY(q[first + i], element_of(keys, run, i)));
    }
  }
  return nyb_round_number(a.round_to, score);
}

// Step 3.
__device__ float biased(const nyb_attention_arguments &a, const View &view, float score,
                        int token) {
  if (a.softcap != 0.0f) score = nyb_capped_score(&a, NYB_DIVIDE(score, a.softcap));
  if (a.slopes != nullptr) {
    score = nyb_sloped_score(&a, score, view.slope, view.position, token);
  }
  if (a.mask_kind == 0) return score;
  const nyb_mask_entry entry = nyb_mask_entry_at(&a, view.mask_row, token);
  if (!entry.shows) return a.lowest_score;
  return a.mask_kind == NYB_DEVICE_ARRAY_BOOL ? score : nyb_masked_score(&a, score, entry.added);
}

// Whether the mask's array lets the row see a token at all.
__device__ __forceinline__ bool sees(const nyb_attention_arguments &a, const View &view,
                                     int token) {
  return a.mask_kind == 0 || a.hides_by_number ||
         nyb_mask_entry_at(&a, view.mask_row, token).shows;
}

// The weight of a token that is hidden: it takes part in no sum.
constexpr float HIDDEN = -1.0f;

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

__device__ float sum_in_order(const float *weights, int count) {
  float sum = 0.0f;
#pragma unroll 16
  for (int i = 0; i < count; i++) sum = weights[i] < 0.0f ? sum : NYB_ADD(sum, weights[i]);
  return sum;
}

__device__ float output_of(const nyb_attention_arguments &a, const Row &row, const View &view,
                           const float *weights, int64_t d) {
  const int count = token_count(view);
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    if (weights[i] < 0.0f) continue;
    const Source value = source_of(a, row, view, true, token_at(view, i));
    sum = NYB_ADD(sum, NYB_MULTIPLY(weights[i], single_element(value, d)));
  }
  return sum;
}

__device__ void attend_row(const nyb_attention_arguments &a, const Row &row, float *slot,
                           float *shared) {
  const View view = view_of(a, row);
  const int count = token_count(view);
  const float minus_infinity = -nyb_float_of(0x7f800000u);
  float *q = slot, *scores = slot + a.key_dim;
  const char *query = a.q + row.batch * a.q_stride[0] + row.head * a.q_stride[1] +
                      row.query_row * a.q_stride[2];
  for (int64_t d = threadIdx.x; d < a.key_dim; d += THREADS) q[d] = nyb_query_element(&a, query, d);
  __syncthreads();

  float maximum = a.sinks != nullptr ? a.sinks[row.head] : minus_infinity, seen = 0.0f;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int token = token_at(view, i);
    if (!sees(a, view, token)) continue;
    seen = 1.0f;
    scores[i] = biased(a, view, score_of(a, source_of(a, row, view, false, token), q), token);
    maximum = fmaxf(maximum, scores[i]);
  }
  maximum = maximum_of_block(maximum, shared);
  const bool sees_any = maximum_of_block(seen, shared) != 0.0f;
  // Scores of -inf weigh 0 where there are no others, too; NaN stays NaN.
  const float reference = maximum == minus_infinity ? 0.0f : maximum;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    scores[i] =
        sees(a, view, token_at(view, i)) ? expf(NYB_SUBTRACT(scores[i], reference)) : HIDDEN;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = sum_in_order(scores, count);
    if (a.sinks != nullptr) sum = NYB_ADD(sum, expf(NYB_SUBTRACT(a.sinks[row.head], reference)));
    shared[0] = sum;
  }
  __syncthreads();
  const float sum = shared[0], reciprocal = NYB_DIVIDE(1.0f, sum);
  for (int i = threadIdx.x; i < count; i += THREADS) {
    if (scores[i] < 0.0f) continue;
    scores[i] = nyb_round_number(a.round_sums_to, NYB_MULTIPLY(scores[i], reciprocal));
  }
  __syncthreads();

  char *out = a.out + row.batch * a.out_stride[0] + row.head * a.out_stride[1] +
              row.query_row * a.out_stride[2];
  // A sink that is not finite makes the row so, even where it sees nothing.
  const bool blind = !sees_any && sum == 0.0f;
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS) {
    const float value = sees_any ? output_of(a, row, view, scores, d)
                        : blind  ? 0.0f
                                 : NYB_DIVIDE(0.0f, sum);
    nyb_store_element(out, a.out_dtype, d, value);
  }
  if (a.lse != nullptr && threadIdx.x == 0) {
    *reinterpret_cast<float *>(a.lse + row.batch * a.lse_stride[0] + row.head * a.lse_stride[1] +
                               row.query_row * a.lse_stride[2]) =
        blind ? minus_infinity : NYB_ADD(maximum, logf(sum));
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
