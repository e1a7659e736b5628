// SPDX-License-Identifier: Apache-2.0
// Fixed-width types, dtypes and conversions for kernels that include nothing of the toolkit.
#pragma once

using int8 = signed char;
using uint8 = unsigned char;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// The values of nyb_dtype.
constexpr int F32 = 1, F16 = 2, BF16 = 3;

__host__ __device__ constexpr int bytes_of(int dtype) { return dtype == F32 ? 4 : 2; }

constexpr float LARGEST_FLOAT = 3.40282347e38f;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float f32_from_f16(uint32 bits) {
  float value;
  asm("{.reg .f16 h; .reg .u16 b; cvt.u16.u32 b, %1; mov.b16 h, b; cvt.f32.f16 %0, h;}"
      : "=f"(value)
      : "r"(bits));
  return value;
}

__device__ __forceinline__ float f32_from_bf16(uint32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ uint32 f16_from_f32(float value) {
  uint16 bits;
  asm("{.reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint32 bf16_from_f32(float value) {
  uint16 bits;
  asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b16 %0, h;}" : "=h"(bits) : "f"(value));
  return bits;
}

// The dtype's nearest value, as f32.
template <int DTYPE>
__device__ __forceinline__ float round_to(float value) {
  if constexpr (DTYPE == F16) return f32_from_f16(f16_from_f32(value));
  if constexpr (DTYPE == BF16) return f32_from_bf16(bf16_from_f32(value));
  return value;
}

template <int DTYPE>
__device__ __forceinline__ float load_float(const void *data, int64 index) {
  if constexpr (DTYPE == F32) return static_cast<const float *>(data)[index];
  const uint32 bits = static_cast<const uint16 *>(data)[index];
  return DTYPE == F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

template <int DTYPE>
__device__ __forceinline__ void store_float(void *data, int64 index, float value) {
  if constexpr (DTYPE == F32) {
    static_cast<float *>(data)[index] = value;
  } else {
    static_cast<uint16 *>(data)[index] =
        static_cast<uint16>(DTYPE == F16 ? f16_from_f32(value) : bf16_from_f32(value));
  }
}

// Two neighbours of a 16-bit dtype in one word.
template <int DTYPE>
__device__ __forceinline__ float low_of(uint32 word) {
  if constexpr (DTYPE == BF16) return __uint_as_float(word << 16);
  return f32_from_f16(word & 0xffffu);
}
template <int DTYPE>
__device__ __forceinline__ float high_of(uint32 word) {
  if constexpr (DTYPE == BF16) return __uint_as_float(word & 0xffff0000u);
  return f32_from_f16(word >> 16);
}

// 2^x, relative error under 2^-22; exact for integers.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x within an ulp; 0 of an infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Scores in log2 units, as long as numbers may be as large as a dtype's lowest: beyond 2^100, where
// only which of two is larger still counts, they grow like the natural ones, so that what is finite
// remains so.
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;
constexpr float FAR = 1.2676506e30f, FAR_SHIFT = FAR * 0.44269504088896341f; // 2^100
__device__ __forceinline__ float log2_units_of(float natural) {
  return fabsf(natural) > FAR ? natural + copysignf(FAR_SHIFT, natural)
                              : __fmul_rn(natural, LOG2_E);
}
__device__ __forceinline__ float natural_units_of(float score) {
  return fabsf(score) > FAR + FAR_SHIFT ? score - copysignf(FAR_SHIFT, score)
                                        : __fmul_rn(score, LN_2);
}

__device__ __forceinline__ uint32 pack_f16(float low, float high) {
  uint32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// 2^exponent for -126 <= exponent <= 127.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The exponent of a finite positive normal number.
__device__ __forceinline__ int exponent_of(float value) {
  return ((__float_as_int(value) >> 23) & 255) - 127;
}

// 2^difference, exactly, for whole differences of maxima up to 0; -inf and what is too small is 0,
// NaN (of two infinite maxima) is 1.
__device__ __forceinline__ float rescale_factor(float difference) {
  if (difference >= -126.0f) return power_of_two(__float2int_rn(difference));
  return difference < 0.0f ? 0.0f : 1.0f;
}
