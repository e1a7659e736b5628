// SPDX-License-Identifier: Apache-2.0
// Instructions that C++ has no name for: copies to shared memory, products, matrices in shared
// memory.
#pragma once

#include "numbers.cuh"

__device__ __forceinline__ void copy_async_16(uint32 to, const char *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_async_16(uint32 to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_async_4(uint32 to, const char *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_async_4(uint32 to, const char *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void multiply_add(float *sums, const uint32 *a, const uint32 *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32 transpose_8x8(uint32 matrix) {
  uint32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ __forceinline__ void load_matrices_4(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_2(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed_4(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed_2(uint32 *words, uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address));
}
// COUNT 8x8 matrices, each to the 8 rows of 16 bytes that 8 lanes name, transposed.
template <int COUNT>
__device__ __forceinline__ void store_transposed(uint32 address, const uint32 *words) {
#if __CUDA_ARCH__ >= 900
  if constexpr (COUNT == 4) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
                 "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
                 "r"(words[0])
                 : "memory");
  }
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const uint32 row = __shfl_sync(~0u, address, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(transpose_8x8(words[i]))
                 : "memory");
  }
#endif
}
__device__ __forceinline__ void store_float_shared(uint32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ float load_float_shared(uint32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_floats_4(uint32 address, const float *values) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}
__device__ __forceinline__ void load_floats_4(float *values, uint32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address));
}
template <int COUNT>
__device__ __forceinline__ void store_words(uint32 address, const float *values) {
  if constexpr (COUNT == 4) {
    store_floats_4(address, values);
  } else {
    static_assert(COUNT == 2);
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(values[0]), "f"(values[1])
                 : "memory");
  }
}
// Keeps the compiler from working a value out again and again, instead of holding it.
__device__ __forceinline__ void hold(uint32 &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ uint32 load_word(uint32 address) {
  uint32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
__device__ __forceinline__ uint32 load_half_word(uint32 address) {
  uint16 half_word;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half_word) : "r"(address));
  return half_word;
}
