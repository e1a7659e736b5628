/* SPDX-License-Identifier: Apache-2.0 */
/* exp and log of nyb_attention_merge_run, to the bit as src/attention_merge.c has them: sums and
 * products in f64, none of them fused. */
#ifndef NYB_ATTENTION_COMBINE_CUH
#define NYB_ATTENTION_COMBINE_CUH

#include "portable.cuh"

#if defined(__CUDACC__)

#define NYB_F64_ADD(a, b) __dadd_rn(a, b)
#define NYB_F64_SUBTRACT(a, b) __dsub_rn(a, b)
#define NYB_F64_MULTIPLY(a, b) __dmul_rn(a, b)
#define NYB_F64_DIVIDE(a, b) __ddiv_rn(a, b)

NYB_FUNCTION double nyb_f64_of(uint64_t bits) { return __longlong_as_double((long long)bits); }
NYB_FUNCTION uint64_t nyb_f64_bits(double value) { return (uint64_t)__double_as_longlong(value); }

#else

#define NYB_F64_ADD(a, b) ((a) + (b))
#define NYB_F64_SUBTRACT(a, b) ((a) - (b))
#define NYB_F64_MULTIPLY(a, b) ((a) * (b))
#define NYB_F64_DIVIDE(a, b) ((a) / (b))

NYB_FUNCTION double nyb_f64_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

NYB_FUNCTION uint64_t nyb_f64_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#endif

/* exp(x) for x <= 0, 0 below -700. */
NYB_FUNCTION double nyb_exp_of_negative(double x) {
  if (x < -700) return 0;
  const double shift = 0x1.8p52;
  const double shifted = NYB_F64_ADD(NYB_F64_MULTIPLY(x, 0x1.71547652b82fep+0), shift);
  const double n = NYB_F64_SUBTRACT(shifted, shift);
  const double upper = NYB_F64_SUBTRACT(x, NYB_F64_MULTIPLY(n, 0x1.62e42fefa38p-1));
  const double r = NYB_F64_SUBTRACT(upper, NYB_F64_MULTIPLY(n, 0x1.ef35793c7673p-45));
  double sum = 1;
  for (int term = 13; term > 0; term--) {
    sum = NYB_F64_ADD(1.0, NYB_F64_DIVIDE(NYB_F64_MULTIPLY(sum, r), (double)term));
  }
  return NYB_F64_MULTIPLY(sum, nyb_f64_of((uint64_t)(1023 + (int64_t)n) << 52));
}

/* log(x) for x from 1 on, as far as there may be parts. */
NYB_FUNCTION double nyb_log_from_one(double x) {
  const uint64_t bits = nyb_f64_bits(x), fraction = ((uint64_t)1 << 52) - 1;
  int n = (int)(bits >> 52) - 1022;
  double m = nyb_f64_of((bits & fraction) | (uint64_t)1022 << 52); /* 1/2 or more, below 1 */
  if (m < 0x1.6a09e667f3bcdp-1) {
    m = NYB_F64_MULTIPLY(m, 2.0);
    n--;
  }
  const double f = NYB_F64_DIVIDE(NYB_F64_SUBTRACT(m, 1.0), NYB_F64_ADD(m, 1.0));
  const double square = NYB_F64_MULTIPLY(f, f);
  double sum = 0;
  for (int power = 21; power > 0; power -= 2) {
    sum = NYB_F64_ADD(NYB_F64_MULTIPLY(sum, square), NYB_F64_DIVIDE(2.0, (double)power));
  }
  return NYB_F64_ADD(NYB_F64_MULTIPLY((double)n, 0x1.62e42fefa39efp-1), NYB_F64_MULTIPLY(f, sum));
}

/* One NaN for all. */
NYB_FUNCTION float nyb_f32_of_f64(double value) {
  return value == value ? (float)value : nyb_float_of(0x7fc00000u);
}

#endif
