// SPDX-License-Identifier: Apache-2.0
// One thread's eight elements of a row: from floats to where they are stored.
#pragma once

#include "quantize.cuh"
#include "quantize_arguments.h"

// The elements' bits; zeros beyond `count`.
NYB_FUNCTION void load_elements(uint32_t elements[NYB_LANE_ELEMENTS], const char *from, int dtype,
                                bool wide, int count) {
  if (wide && count == NYB_LANE_ELEMENTS) {
    const uint4 *vectors = reinterpret_cast<const uint4 *>(from);
    const uint4 low = vectors[0];
    if (dtype == NYB_DEVICE_F32) {
      const uint4 high = vectors[1];
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; i++) elements[i] = words[i];
    } else {
      const uint32_t words[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
      for (int i = 0; i < 8; i++) elements[i] = words[i / 2] >> (i % 2 * 16) & 0xffffu;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    elements[i] = 0;
    if (i >= count) continue;
    elements[i] = dtype == NYB_DEVICE_F32 ? reinterpret_cast<const uint32_t *>(from)[i]
                                          : reinterpret_cast<const uint16_t *>(from)[i];
  }
}

NYB_FUNCTION void store_element(char *to, int dtype, int index, uint32_t bits) {
  if (dtype == NYB_DEVICE_F32) {
    reinterpret_cast<uint32_t *>(to)[index] = bits;
  } else {
    reinterpret_cast<uint16_t *>(to)[index] = static_cast<uint16_t>(bits);
  }
}

NYB_FUNCTION void store_elements(const uint32_t elements[NYB_LANE_ELEMENTS], char *to, int dtype,
                                 bool wide, int count) {
  if (wide && count == NYB_LANE_ELEMENTS) {
    uint4 *vectors = reinterpret_cast<uint4 *>(to);
    if (dtype == NYB_DEVICE_F32) {
      vectors[0] = make_uint4(elements[0], elements[1], elements[2], elements[3]);
      vectors[1] = make_uint4(elements[4], elements[5], elements[6], elements[7]);
    } else {
      vectors[0] = make_uint4(elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                              elements[4] | elements[5] << 16, elements[6] | elements[7] << 16);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    if (i < count) store_element(to, dtype, i, elements[i]);
  }
}

// `bits` bytes. Rows of codes begin at multiples of 4 bytes, and so does each lane at 4 and 8 bits.
NYB_FUNCTION void store_codes(char *to, uint64_t stream, int bits) {
  if (bits % 4 == 0) {
    uint32_t *words = reinterpret_cast<uint32_t *>(to);
    words[0] = static_cast<uint32_t>(stream);
    if (bits == 8) words[1] = static_cast<uint32_t>(stream >> 32);
  } else if (bits % 2 == 0) {
    uint16_t *halves = reinterpret_cast<uint16_t *>(to);
    for (int i = 0; i < bits / 2; i++) halves[i] = static_cast<uint16_t>(stream >> (16 * i));
  } else {
    uint8_t *bytes = reinterpret_cast<uint8_t *>(to);
    for (int i = 0; i < bits; i++) bytes[i] = static_cast<uint8_t>(stream >> (8 * i));
  }
}

NYB_FUNCTION uint64_t load_codes(const char *from, int bits) {
  uint64_t stream = 0;
  if (bits % 4 == 0) {
    const uint32_t *words = reinterpret_cast<const uint32_t *>(from);
    stream = words[0];
    if (bits == 8) stream |= static_cast<uint64_t>(words[1]) << 32;
  } else if (bits % 2 == 0) {
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(from);
    for (int i = 0; i < bits / 2; i++) stream |= static_cast<uint64_t>(halves[i]) << (16 * i);
  } else {
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(from);
    for (int i = 0; i < bits; i++) stream |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  }
  return stream;
}

// Eight elements of a row, or the rest of a plain one, and where they are stored.
struct lane {
  const char *floats;
  char *codes, *scales, *biases;
  int count;   // elements; 0 for a thread without a lane of its own, which goes with its warp
  bool leads;  // the first of its group, which stores scale and bias
};

NYB_FUNCTION int64_t offset_of(const long long stride[3], int64_t batch, int64_t head,
                               int64_t token) {
  return batch * stride[0] + head * stride[1] + token * stride[2];
}

NYB_FUNCTION int bytes_of(int dtype) { return dtype == NYB_DEVICE_F32 ? 4 : 2; }

NYB_FUNCTION const char *floats_of(const nyb_device_rows &rows, int64_t batch, int64_t head,
                                   int64_t token, int64_t index) {
  return rows.input + offset_of(rows.input_stride, batch, head, token) +
         index * (NYB_LANE_ELEMENTS * bytes_of(rows.input_dtype));
}

// Lane `index` of a row.
NYB_FUNCTION lane lane_of(const nyb_device_rows &rows, int64_t batch, int64_t head, int64_t token,
                          int64_t index) {
  const bool plain = rows.bits == 0;
  const int stored_bytes = bytes_of(rows.stored_dtype);
  const int64_t group = index >> rows.group_shift, rest = rows.dim - index * NYB_LANE_ELEMENTS;
  lane at;
  at.floats = floats_of(rows, batch, head, token, index);
  at.codes = rows.codes + offset_of(rows.codes_stride, batch, head, token) +
             index * (plain ? NYB_LANE_ELEMENTS * stored_bytes : rows.bits);
  at.scales =
      rows.scales + offset_of(rows.scales_stride, batch, head, token) + group * stored_bytes;
  at.biases =
      rows.biases + offset_of(rows.biases_stride, batch, head, token) + group * stored_bytes;
  at.count = static_cast<int>(rest < NYB_LANE_ELEMENTS ? rest : NYB_LANE_ELEMENTS);
  at.leads = (index & ((1 << rows.group_shift) - 1)) == 0;
  return at;
}

// The range of the group, from those of its lanes, which are neighbours in the warp. All of the
// warp comes here.
NYB_FUNCTION nyb_range join_group(nyb_range range, int group_shift) {
  const unsigned others = __ballot_sync(0xffffffffu, !range.finite);
  for (int i = 0; i < group_shift; i++) {
    nyb_range other;
    other.least = __shfl_xor_sync(0xffffffffu, range.least, 1 << i);
    other.most = __shfl_xor_sync(0xffffffffu, range.most, 1 << i);
    other.finite = 1;
    range = nyb_range_join(range, other);
  }
  const unsigned lanes = 1u << group_shift, first = threadIdx.x % 32 & ~(lanes - 1);
  range.finite = (others >> first & ((1u << lanes) - 1)) == 0;
  return range;
}

NYB_FUNCTION void widen(const uint32_t elements[NYB_LANE_ELEMENTS], int dtype,
                        float values[NYB_LANE_ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    values[i] =
        dtype == NYB_DEVICE_F32 ? nyb_float_of(elements[i]) : nyb_number_from(dtype, elements[i]);
  }
}

NYB_FUNCTION uint32_t narrowed(int dtype, float value) {
  return dtype == NYB_DEVICE_F32 ? nyb_bits_of(value) : nyb_number_to(dtype, value);
}

// False where it could not be stored and zeros stand there instead.
NYB_FUNCTION bool quantize_affine(const nyb_device_rows &rows, const lane &at, bool writes,
                                  int rule, int input_dtype,
                                  const uint32_t elements[NYB_LANE_ELEMENTS]) {
  float values[NYB_LANE_ELEMENTS];
  if (input_dtype == NYB_DEVICE_BF16) {  // once, not for every element
    widen(elements, NYB_DEVICE_BF16, values);
  } else if (input_dtype == NYB_DEVICE_F16) {
    widen(elements, NYB_DEVICE_F16, values);
  } else {
    widen(elements, NYB_DEVICE_F32, values);
  }
  const nyb_range range = join_group(nyb_range_of(values), rows.group_shift);
  const float highest_code = static_cast<float>((1 << rows.bits) - 1);
  nyb_scaling scaling = nyb_scaling_of(range, rule, highest_code, rows.stored_dtype);
  if (!writes) return true;
  uint64_t stream = nyb_codes_of(values, scaling, rule, rows.bits);
  if (!scaling.storable) {
    stream = 0;
    scaling.scale = scaling.bias = 0.0f;
  }
  store_codes(at.codes, stream, rows.bits);
  if (at.leads) {
    store_element(at.scales, rows.stored_dtype, 0, narrowed(rows.stored_dtype, scaling.scale));
    store_element(at.biases, rows.stored_dtype, 0, narrowed(rows.stored_dtype, scaling.bias));
  }
  return scaling.storable;
}

NYB_FUNCTION bool quantize_plain(const lane &at, bool writes, int input_dtype, int stored_dtype,
                                 bool wide, const uint32_t elements[NYB_LANE_ELEMENTS]) {
  if (!writes) return true;
  bool storable = true;
  uint32_t converted[NYB_LANE_ELEMENTS];
#pragma unroll
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    converted[i] = nyb_convert(input_dtype, stored_dtype, elements[i]);
    if (nyb_is_finite(stored_dtype, converted[i])) continue;
    converted[i] = 0;
    storable = false;
  }
  store_elements(converted, at.codes, stored_dtype, wide, at.count);
  return storable;
}

// Elements of input_dtype. All of the warp comes here, with rows that are the same for all of it.
NYB_FUNCTION bool quantize_lane(const nyb_device_rows &rows, const lane &at, bool writes, int rule,
                                int input_dtype, const uint32_t elements[NYB_LANE_ELEMENTS]) {
  return rows.bits == 0
             ? quantize_plain(at, writes, input_dtype, rows.stored_dtype, rows.wide_codes, elements)
             : quantize_affine(rows, at, writes, rule, input_dtype, elements);
}
