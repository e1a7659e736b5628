/* SPDX-License-Identifier: Apache-2.0 */
/* What lets a function be compiled for the device and, for the tests, for the host: C and C++ at
 * once, no toolkit header, and arithmetic whose roundings no compiler may fuse. */
#ifndef NYB_PORTABLE_CUH
#define NYB_PORTABLE_CUH

#if defined(__CUDACC__)

#define NYB_FUNCTION __device__ __forceinline__

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#define NYB_ADD(a, b) __fadd_rn(a, b)
#define NYB_SUBTRACT(a, b) __fsub_rn(a, b)
#define NYB_MULTIPLY(a, b) __fmul_rn(a, b)
#define NYB_DIVIDE(a, b) __fdiv_rn(a, b)
#define NYB_FUSED(a, b, c) __fmaf_rn(a, b, c) /* a * b + c, rounded once */

/* A kernel's first words, where it is launched with `overlap`: the one after it may come, and wait
 * as this one does for what was before it. */
NYB_FUNCTION void nyb_await_previous(void) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

NYB_FUNCTION uint32_t nyb_bits_of(float value) { return __float_as_uint(value); }
NYB_FUNCTION float nyb_float_of(uint32_t bits) { return __uint_as_float(bits); }

#else /* the host, with -ffp-contract=off */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define NYB_FUNCTION static inline

#define NYB_ADD(a, b) ((a) + (b))
#define NYB_SUBTRACT(a, b) ((a) - (b))
#define NYB_MULTIPLY(a, b) ((a) * (b))
#define NYB_DIVIDE(a, b) ((a) / (b))
#define NYB_FUSED(a, b, c) fmaf(a, b, c)

NYB_FUNCTION uint32_t nyb_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

NYB_FUNCTION float nyb_float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

#endif

/* The values of nyb_dtype and nyb_rule. */
enum { NYB_DEVICE_F32 = 1, NYB_DEVICE_F16 = 2, NYB_DEVICE_BF16 = 3 };
enum { NYB_DEVICE_RULE_MLX_CPU = 0, NYB_DEVICE_RULE_MLX_GPU = 1 };

/* ---- Division by what the host knows ------------------------------------------------------------
 */

/* Of numbers that are not negative; those below 2^31 by a product. With 2^shift >= divisor and the
 * multiplier just above 2^(31 + shift) / divisor, at most divisor / divisor too much, the product
 * is below the next whole quotient. */
typedef struct nyb_divider {
  int64_t divisor;
  uint32_t multiplier; /* 0: always divide */
  int32_t shift;
} nyb_divider;

/* For the host; divisor is at least 1. */
NYB_FUNCTION nyb_divider nyb_divider_of(int64_t divisor) {
  nyb_divider divider = {divisor, 0, 0};
  if (divisor >= (int64_t)1 << 31) return divider;
  while ((int64_t)1 << divider.shift < divisor) divider.shift++;
  divider.multiplier = (uint32_t)(((uint64_t)1 << (31 + divider.shift)) / (uint64_t)divisor + 1);
  return divider;
}

/* The quotient; *rest gets what is left. */
NYB_FUNCTION int64_t nyb_split(int64_t index, const nyb_divider *divider, int64_t *rest) {
  if ((uint64_t)index >> 31 == 0 && divider->multiplier != 0) {
    const uint64_t product = (uint64_t)(uint32_t)index * divider->multiplier;
    const uint32_t quotient = (uint32_t)(product >> (31 + divider->shift));
    *rest = (int64_t)((uint32_t)index - quotient * (uint32_t)divider->divisor);
    return (int64_t)quotient;
  }
  const int64_t quotient = index / divider->divisor;
  *rest = index - quotient * divider->divisor;
  return quotient;
}

/* Elements that one thread handles: at every width of codes they fill whole bytes. */
enum { NYB_LANE_ELEMENTS = 8 };

/* ---- f16 and bf16, to the bit as src/numeric.h, a NaN's payload included -------------------- */

NYB_FUNCTION float nyb_widen_bf16(uint32_t bits) { return nyb_float_of(bits << 16); }

NYB_FUNCTION uint32_t nyb_narrow_bf16(float value) {
  const uint32_t bits = nyb_bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits | 0x400000u) >> 16;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

NYB_FUNCTION float nyb_widen_f16(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
    return nyb_float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
  }
  if (magnitude < 0x400u) { /* an integer times 2^-24 */
    return nyb_float_of(sign | nyb_bits_of(NYB_MULTIPLY((float)magnitude, 5.9604644775390625e-8f)));
  }
  return nyb_float_of(sign | ((magnitude << 13) + (112u << 23)));
}

NYB_FUNCTION uint32_t nyb_narrow_f16(float value) {
  const uint32_t bits = nyb_bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and more */
  if (magnitude < 0x38800000u) { /* beside 0.5 the sum's last place is that of f16's subnormals */
    return sign | (nyb_bits_of(NYB_ADD(nyb_float_of(magnitude), 0.5f)) - 0x3f000000u);
  }
  return sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13);
}

/* ---- The same by the device's own instructions, for values that are no NaN ------------------- */

#if defined(__CUDACC__)

NYB_FUNCTION float nyb_number_from_f16(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
  return value;
}

NYB_FUNCTION uint32_t nyb_number_to_f16(float value) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

NYB_FUNCTION uint32_t nyb_number_to_bf16(float value) {
  uint16_t half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

#else

NYB_FUNCTION float nyb_number_from_f16(uint32_t half) { return nyb_widen_f16(half); }
NYB_FUNCTION uint32_t nyb_number_to_f16(float value) { return nyb_narrow_f16(value); }
NYB_FUNCTION uint32_t nyb_number_to_bf16(float value) { return nyb_narrow_bf16(value); }

#endif

/* A 16-bit dtype's bits, widened. */
NYB_FUNCTION float nyb_number_from(int dtype, uint32_t half) {
  return dtype == NYB_DEVICE_F16 ? nyb_number_from_f16(half) : nyb_widen_bf16(half);
}

NYB_FUNCTION uint32_t nyb_number_to(int dtype, float value) {
  return dtype == NYB_DEVICE_F16 ? nyb_number_to_f16(value) : nyb_number_to_bf16(value);
}

/* T(value). */
NYB_FUNCTION float nyb_round_number(int dtype, float value) {
  if (dtype == NYB_DEVICE_F32) return value;
  return nyb_number_from(dtype, nyb_number_to(dtype, value));
}

/* Whether T(value) is finite. */
NYB_FUNCTION int nyb_fits(int dtype, float value) {
  const uint32_t beyond = dtype == NYB_DEVICE_F16    ? 0x477ff000u
                          : dtype == NYB_DEVICE_BF16 ? 0x7f7f8000u
                                                     : 0x7f800000u;
  return (nyb_bits_of(value) & 0x7fffffffu) < beyond;
}

#endif
