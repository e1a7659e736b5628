// SPDX-License-Identifier: Apache-2.0
// Stored rows back to floats, a lane of eight elements for each thread.
#include "quantize_lane.cuh"

NYB_FUNCTION float load_float(const char *from, int dtype) {
  return dtype == NYB_DEVICE_F32
             ? *reinterpret_cast<const float *>(from)
             : nyb_number_from(dtype, *reinterpret_cast<const uint16_t *>(from));
}

NYB_FUNCTION void narrow(const float values[NYB_LANE_ELEMENTS], int dtype,
                         uint32_t elements[NYB_LANE_ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) elements[i] = narrowed(dtype, values[i]);
}

NYB_FUNCTION void dequantize_affine(const nyb_device_rows &rows, const lane &at,
                                    uint32_t elements[NYB_LANE_ELEMENTS]) {
  float values[NYB_LANE_ELEMENTS];
  nyb_values_of(load_codes(at.codes, rows.bits), rows.bits,
                load_float(at.scales, rows.stored_dtype), load_float(at.biases, rows.stored_dtype),
                rows.stored_dtype, values);
  if (rows.input_dtype == NYB_DEVICE_BF16) {  // once, not for every element
    narrow(values, NYB_DEVICE_BF16, elements);
  } else if (rows.input_dtype == NYB_DEVICE_F16) {
    narrow(values, NYB_DEVICE_F16, elements);
  } else {
    narrow(values, NYB_DEVICE_F32, elements);
  }
}

NYB_FUNCTION void dequantize_plain(const nyb_device_rows &rows, const lane &at,
                                   uint32_t elements[NYB_LANE_ELEMENTS]) {
  load_elements(elements, at.codes, rows.stored_dtype, rows.wide_codes, at.count);
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    elements[i] = nyb_convert(rows.stored_dtype, rows.input_dtype, elements[i]);
  }
}

extern "C" __global__ void __launch_bounds__(NYB_QUANTIZE_THREADS)
    dequantize(const __grid_constant__ nyb_device_quantize call) {
  nyb_await_previous();
  const int64_t step = static_cast<int64_t>(gridDim.x) * NYB_QUANTIZE_THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(NYB_QUANTIZE_THREADS) + threadIdx.x;
       i < call.lanes; i += step) {
    int64_t index, token, head;
    int64_t batch = nyb_split(i, &call.rows.lanes, &index);
    batch = nyb_split(batch, &call.tokens, &token);
    batch = nyb_split(batch, &call.heads, &head);
    const lane at = lane_of(call.rows, batch, head, token, index);
    uint32_t elements[NYB_LANE_ELEMENTS];
    if (call.rows.bits == 0) {
      dequantize_plain(call.rows, at, elements);
    } else {
      dequantize_affine(call.rows, at, elements);
    }
    store_elements(elements, const_cast<char *>(at.floats), call.rows.input_dtype,
                   call.rows.wide_input, at.count);
  }
}
