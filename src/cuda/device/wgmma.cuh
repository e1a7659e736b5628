// SPDX-License-Identifier: Apache-2.0
// Hopper's matrix unit: products of a warpgroup, f16 by f16 into f32, and what they need of memory.
// Included only where the target has it (sm_90a).
#pragma once

#include "numbers.cuh"

// ---- Barriers in shared memory ------------------------------------------------------------------

__device__ __forceinline__ uint32 shared_address(const void *pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_end(uint32 barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Returns once the phase of that parity has ended.
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// What this thread has stored to shared memory, and what others stored before it waited for their
// barrier, becomes visible to the products that it starts. It also waits for the thread's own loads,
// so that a thread with many on their way had better leave it to those that multiply.
__device__ __forceinline__ void show_to_matrix_unit() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Operands in shared memory ------------------------------------------------------------------
// A panel holds rows of 64 f16 (128 bytes); the 16-byte pieces of row r lie in the order i ^ (r % 8).
// Panels start at multiples of 1,024 bytes.

constexpr uint32 PANEL_ROW_BYTES = 128;

__device__ __forceinline__ uint32 panel_offset(int row, int piece) {
  return row * PANEL_ROW_BYTES + ((piece ^ (row & 7)) << 4);
}

// An operand's descriptor: its lower half has the address, and a step along it is added there.
struct Operand {
  uint32 low, high;
};

__device__ __forceinline__ uint64 descriptor(Operand operand, uint32 step_bytes) {
  uint64 both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(operand.low + (step_bytes >> 4)), "r"(operand.high));
  return both;
}

// Rows are rows (or columns) of the product, summed along the 64.
__device__ __forceinline__ Operand operand_of_rows(uint32 address) {
  return {(1u << 16) | (address >> 4), (1u << 30) | (1024 >> 4)};
}

// Rows are what is summed over, the 64 are columns of the product; further columns lie a panel on.
template <uint32 PANEL_BYTES>
__device__ __forceinline__ Operand operand_of_columns(uint32 address) {
  return {((PANEL_BYTES >> 4) << 16) | (address >> 4), (1u << 30) | (1024 >> 4)};
}

// ---- Products -----------------------------------------------------------------------------------

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of the committed groups still run.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler must not move reads or writes of running accumulators across this.
template <int COUNT>
__device__ __forceinline__ void hold(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// clang-format off
#define NYB_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NYB_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define NYB_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define NYB_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define NYB_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define NYB_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define NYB_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define NYB_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NYB_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define NYB_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define NYB_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define NYB_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define NYB_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define NYB_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define NYB_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define NYB_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define NYB_HELD(i) "+f"(d[8*(i)+0]), "+f"(d[8*(i)+1]), "+f"(d[8*(i)+2]), "+f"(d[8*(i)+3]), "+f"(d[8*(i)+4]), "+f"(d[8*(i)+5]), "+f"(d[8*(i)+6]), "+f"(d[8*(i)+7])
#define NYB_NAMES_OF_16 NYB_NAMES_0 ", " NYB_NAMES_1
#define NYB_HELD_16 NYB_HELD(0), NYB_HELD(1)
#define NYB_NAMES_OF_32 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3
#define NYB_HELD_32 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3)
#define NYB_NAMES_OF_48 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5
#define NYB_HELD_48 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5)
#define NYB_NAMES_OF_64 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5 ", " NYB_NAMES_6 ", " NYB_NAMES_7
#define NYB_HELD_64 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5), NYB_HELD(6), NYB_HELD(7)
#define NYB_NAMES_OF_80 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5 ", " NYB_NAMES_6 ", " NYB_NAMES_7 ", " NYB_NAMES_8 ", " NYB_NAMES_9
#define NYB_HELD_80 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5), NYB_HELD(6), NYB_HELD(7), NYB_HELD(8), NYB_HELD(9)
#define NYB_NAMES_OF_96 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5 ", " NYB_NAMES_6 ", " NYB_NAMES_7 ", " NYB_NAMES_8 ", " NYB_NAMES_9 ", " NYB_NAMES_10 ", " NYB_NAMES_11
#define NYB_HELD_96 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5), NYB_HELD(6), NYB_HELD(7), NYB_HELD(8), NYB_HELD(9), NYB_HELD(10), NYB_HELD(11)
#define NYB_NAMES_OF_112 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5 ", " NYB_NAMES_6 ", " NYB_NAMES_7 ", " NYB_NAMES_8 ", " NYB_NAMES_9 ", " NYB_NAMES_10 ", " NYB_NAMES_11 ", " NYB_NAMES_12 ", " NYB_NAMES_13
#define NYB_HELD_112 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5), NYB_HELD(6), NYB_HELD(7), NYB_HELD(8), NYB_HELD(9), NYB_HELD(10), NYB_HELD(11), NYB_HELD(12), NYB_HELD(13)
#define NYB_NAMES_OF_128 NYB_NAMES_0 ", " NYB_NAMES_1 ", " NYB_NAMES_2 ", " NYB_NAMES_3 ", " NYB_NAMES_4 ", " NYB_NAMES_5 ", " NYB_NAMES_6 ", " NYB_NAMES_7 ", " NYB_NAMES_8 ", " NYB_NAMES_9 ", " NYB_NAMES_10 ", " NYB_NAMES_11 ", " NYB_NAMES_12 ", " NYB_NAMES_13 ", " NYB_NAMES_14 ", " NYB_NAMES_15
#define NYB_HELD_128 NYB_HELD(0), NYB_HELD(1), NYB_HELD(2), NYB_HELD(3), NYB_HELD(4), NYB_HELD(5), NYB_HELD(6), NYB_HELD(7), NYB_HELD(8), NYB_HELD(9), NYB_HELD(10), NYB_HELD(11), NYB_HELD(12), NYB_HELD(13), NYB_HELD(14), NYB_HELD(15)

// d (64 by COLUMNS) = a b^T + (accumulate ? d : 0), one step of 16; both in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void multiply_shared(float (&d)[COLUMNS / 2], uint64 a, uint64 b, int accumulate);

#define NYB_MULTIPLY_SHARED(columns, count, a_at, b_at, p_at) \
  template <> \
  __device__ __forceinline__ void multiply_shared<columns>(float (&d)[count], uint64 a, uint64 b, \
                                                           int accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" p_at ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" NYB_NAMES_OF_##count "}, %" \
        a_at ", %" b_at ", p, 1, 1, 0, 0;\n}\n" \
        : NYB_HELD_##count \
        : "l"(a), "l"(b), "r"(accumulate)); \
  }

// d (64 by COLUMNS) += a b, one step of 16: a in registers, b's rows summed over.
template <int COLUMNS>
__device__ __forceinline__ void multiply_registers(float (&d)[COLUMNS / 2], const uint32 *a, uint64 b);

#define NYB_MULTIPLY_REGISTERS(columns, count, a0, a1, a2, a3, b_at) \
  template <> \
  __device__ __forceinline__ void multiply_registers<columns>(float (&d)[count], const uint32 *a, \
                                                              uint64 b) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" NYB_NAMES_OF_##count "}, {%" \
        a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_at ", p, 1, 1, 1;\n}\n" \
        : NYB_HELD_##count \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }

NYB_MULTIPLY_SHARED(64, 32, "32", "33", "34")
NYB_MULTIPLY_SHARED(128, 64, "64", "65", "66")
NYB_MULTIPLY_REGISTERS(32, 16, "16", "17", "18", "19", "20")
NYB_MULTIPLY_REGISTERS(64, 32, "32", "33", "34", "35", "36")
NYB_MULTIPLY_REGISTERS(96, 48, "48", "49", "50", "51", "52")
NYB_MULTIPLY_REGISTERS(128, 64, "64", "65", "66", "67", "68")
NYB_MULTIPLY_REGISTERS(160, 80, "80", "81", "82", "83", "84")
NYB_MULTIPLY_REGISTERS(192, 96, "96", "97", "98", "99", "100")
NYB_MULTIPLY_REGISTERS(224, 112, "112", "113", "114", "115", "116")
NYB_MULTIPLY_REGISTERS(256, 128, "128", "129", "130", "131", "132")
// clang-format on
