// SPDX-License-Identifier: Apache-2.0
// Stored rows back to floats, a lane of eight elements for each thread.
#include "quantize_lane.cuh"

NYB_FUNCTION void dequantize_affine(const nyb_device_rows &rows, const lane_place &place,
                                    uint32_t elements[NYB_LANE_ELEMENTS]) {
  const uint64_t stream = load_codes(
      rows.codes + offset_of(rows.codes_stride, place.batch, place.head, place.stored_token) +
          place.lane * rows.bits,
      rows.bits);
  const int dtype = rows.stored_dtype;
  const bool single = dtype == NYB_DEVICE_F32;
  const int64_t within = place.lane / rows.group_lanes * (single ? 4 : 2);
  const char *scales = rows.scales + within +
                       offset_of(rows.scales_stride, place.batch, place.head, place.stored_token);
  const char *biases = rows.biases + within +
                       offset_of(rows.biases_stride, place.batch, place.head, place.stored_token);
  const float scale = single ? *reinterpret_cast<const float *>(scales)
                             : nyb_number_from(dtype, *reinterpret_cast<const uint16_t *>(scales));
  const float bias = single ? *reinterpret_cast<const float *>(biases)
                            : nyb_number_from(dtype, *reinterpret_cast<const uint16_t *>(biases));
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    const float value = nyb_value_of(stream, i, rows.bits, scale, bias, dtype);
    elements[i] = nyb_convert(NYB_DEVICE_F32, rows.input_dtype, nyb_bits_of(value));
  }
}

NYB_FUNCTION void dequantize_plain(const nyb_device_rows &rows, const lane_place &place,
                                   uint32_t elements[NYB_LANE_ELEMENTS]) {
  const int element_bytes = rows.stored_dtype == NYB_DEVICE_F32 ? 4 : 2;
  load_elements(elements,
                rows.codes +
                    offset_of(rows.codes_stride, place.batch, place.head, place.stored_token) +
                    place.lane * (NYB_LANE_ELEMENTS * element_bytes),
                rows.stored_dtype, rows.wide_codes, elements_of_lane(rows, place.lane));
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
    lane_place place;
    int64_t row = nyb_split(i, call.rows.lanes, &place.lane);
    row = nyb_split(row, call.tokens, &place.input_token);
    place.stored_token = place.input_token;
    place.batch = nyb_split(row, call.heads, &place.head);
    uint32_t elements[NYB_LANE_ELEMENTS];
    if (call.rows.bits == 0) {
      dequantize_plain(call.rows, place, elements);
    } else {
      dequantize_affine(call.rows, place, elements);
    }
    store_elements(elements, const_cast<char *>(floats_of_lane(call.rows, place)),
                   call.rows.input_dtype, call.rows.wide_input,
                   elements_of_lane(call.rows, place.lane));
  }
}
