/* SPDX-License-Identifier: Apache-2.0 */
/* The thread's floating-point mode: rounding to nearest, denormals kept, no traps. */
#ifndef NYB_FLOATING_POINT_H
#define NYB_FLOATING_POINT_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

/* Sets the default mode and returns the one before. */
static inline uint64_t nyb_set_default_floating_point(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80);
  return before;
}
static inline void nyb_restore_floating_point(uint64_t mode) { _mm_setcsr((unsigned)mode); }

#elif defined(__aarch64__)

static inline uint64_t nyb_set_default_floating_point(void) {
  uint64_t before;
  const uint64_t plain = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(plain) : "memory");
  return before;
}
static inline void nyb_restore_floating_point(uint64_t mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

#else
static inline uint64_t nyb_set_default_floating_point(void) { return 0; }
static inline void nyb_restore_floating_point(uint64_t mode) { (void)mode; }
#endif

#endif
