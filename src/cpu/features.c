/* SPDX-License-Identifier: Apache-2.0 */
/* Which instruction sets run here. Compiled for the baseline, so that asking never faults. */
#include <string.h>

#include "../cuda/availability.h"
#include "../kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Clang's __builtin_cpu_supports learned this name late. Says nothing about the operating system:
 * ask for AVX2 too. */
static bool has_f16c(void) {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

/* __builtin_cpu_supports looks at CPUID and at what the operating system saves (XGETBV). */
static bool has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
static bool has_avx2(void) { return false; }
static bool has_avx512(void) { return false; }
#endif

static bool has_neon(void) {
#if defined(__aarch64__)
  return true; /* part of the AArch64 baseline */
#else
  return false;
#endif
}

bool nyb_isa_runs_here(nyb_isa isa, const char **reason) {
  *reason = "";
  switch (isa) {
    case NYB_ISA_CUDA: return nyb_cuda_runs_here(reason);
    case NYB_ISA_AUTO:
    case NYB_ISA_SCALAR: return true;
    case NYB_ISA_AVX2:
      if (has_avx2()) return true;
      *reason = "needs a processor with AVX2, FMA and F16C";
      return false;
    case NYB_ISA_AVX512:
      if (has_avx512()) return true;
      *reason = "needs a processor with AVX-512 F, BW, DQ, VL and VNNI";
      return false;
    case NYB_ISA_NEON:
      if (has_neon()) return true;
      *reason = "needs an AArch64 processor";
      return false;
  }
  *reason = "no such ISA";
  return false;
}

nyb_isa nyb_isa_best(void) {
  if (has_avx512()) return NYB_ISA_AVX512;
  if (has_avx2()) return NYB_ISA_AVX2;
  if (has_neon()) return NYB_ISA_NEON;
  return NYB_ISA_SCALAR;
}

const char *nyb_cpu_features(void) {
#if defined(__x86_64__)
  static _Thread_local char text[128]; /* a thread's own, so that building it needs no lock */
  char built[sizeof text] = "";
  if (__builtin_cpu_supports("avx2")) strcat(built, "avx2 ");
  if (__builtin_cpu_supports("fma")) strcat(built, "fma ");
  if (__builtin_cpu_supports("avx2") && has_f16c()) strcat(built, "f16c ");
  if (__builtin_cpu_supports("avx512f")) strcat(built, "avx512f ");
  if (__builtin_cpu_supports("avx512bw")) strcat(built, "avx512bw ");
  if (__builtin_cpu_supports("avx512dq")) strcat(built, "avx512dq ");
  if (__builtin_cpu_supports("avx512vl")) strcat(built, "avx512vl ");
  if (__builtin_cpu_supports("avx512vnni")) strcat(built, "avx512vnni ");
  if (__builtin_cpu_supports("avx512bf16")) strcat(built, "avx512bf16 ");
  const size_t length = strlen(built);
  if (length > 0) built[length - 1] = '\0';
  memcpy(text, built, sizeof text);
  return text;
#elif defined(__aarch64__)
  return "neon";
#else
  return "";
#endif
}
