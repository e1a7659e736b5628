/* SPDX-License-Identifier: Apache-2.0 */
/* The tables are made when a process makes its first context rather than kept in the source: 256
 * KiB of numbers that no reader can check, against a third of a millisecond. There is no branch and
 * no call in the loops that do the arithmetic, so that the compiler can vectorise them. */
#include "geglu_tables.h"

#include <pthread.h>

#include "../floating_point.h"
#include "geglu_f32.h"

nyb_gelu_table nyb_gelu_f16;
nyb_gelu_table nyb_gelu_bf16;

/* A 16-bit dtype: its normal numbers are the upper bits of an f32 less a difference of exponents.
 */
typedef struct half_kind {
  int dropped_bits;  /* of an f32's fraction */
  uint32_t rebias;   /* the least exponent less f32's, at its place in an f32 */
  uint32_t infinity; /* its bits */
  uint16_t nan;
} half_kind;

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

static inline float widen_normal(half_kind kind, uint32_t magnitude, uint32_t sign) {
  return nyb_f32_from_bits(((magnitude << kind.dropped_bits) + kind.rebias) | sign << 31);
}

/* The bits of a value that the dtype holds and that is normal or zero. */
static inline uint16_t narrow_normal(half_kind kind, float value) {
  const uint32_t bits = nyb_bits_from_f32(value);
  const uint32_t magnitude = larger(bits & 0x7fffffffu, kind.rebias) - kind.rebias;
  return (uint16_t)(magnitude >> kind.dropped_bits | (bits >> 31) << 15);
}

/* T(value), for values that do not overflow: adding a number whose last place is the one to be kept
 * rounds to it. It follows value's exponent, or that of the least normal number. */
static inline float round_to(half_kind kind, float value) {
  const uint32_t bits = nyb_bits_from_f32(value), sign = bits & 0x80000000u;
  const uint32_t exponent = larger(bits & 0x7f800000u, kind.rebias + (1u << 23));
  const uint32_t shifted = exponent + ((uint32_t)kind.dropped_bits << 23);
  const float rounder = nyb_f32_from_bits(shifted | 0x400000u);
  const float rounded = (nyb_f32_from_bits(bits ^ sign) + rounder) - rounder;
  return nyb_f32_from_bits(nyb_bits_from_f32(rounded) | sign);
}

enum { BLOCK = 128 }; /* gates, at least one binade of bf16 */

/* One step for the whole block: a loop as short as this is vectorised by every compiler. */
#define STEP(array, expression)              \
  for (int i = 0; i < BLOCK; i++) {          \
    (array)[i] = round_to(kind, expression); \
  }

/* g of docs/numerics.md, section 4. The f32 tanh is near enough to round as the true one does for
 * every gate; tests/test_geglu.c goes through all of them. */
static inline void gelu(half_kind kind, const float *x, float *g) {
  const float k = round_to(kind, 0.044715f), c = round_to(kind, 0.7978845608f);
  float t[BLOCK];
  STEP(t, x[i] * x[i] * x[i])
  STEP(t, k * t[i])
  STEP(t, x[i] + t[i])
  STEP(t, c * t[i])
  STEP(t, nyb_tanh_f32(t[i]))
  STEP(t, 1.0f + t[i])
  STEP(g, 0.5f * x[i])
  STEP(g, g[i] * t[i])
}

/* Gates of this sign with magnitudes from begin to end, as bits; a whole number of blocks. */
static inline void fill_middle(half_kind kind, uint32_t sign, uint32_t begin, uint32_t end,
                               uint16_t *of_magnitude) {
  float x[BLOCK], g[BLOCK];
  for (uint32_t m = begin; m < end; m += BLOCK) {
    for (uint32_t i = 0; i < BLOCK; i++) x[i] = widen_normal(kind, m + i, sign);
    gelu(kind, x, g);
    for (uint32_t i = 0; i < BLOCK; i++) of_magnitude[m + i] = narrow_normal(kind, g[i]);
  }
}

/* T(x / 2): the exponent less one, or half of the integer that a number below twice the least
 * normal one is, rounded to even. */
static inline uint32_t halve(uint32_t magnitude, uint32_t least_normal) {
  const uint32_t halved = (magnitude + (magnitude >> 1 & 1)) >> 1;
  return magnitude < 2 * least_normal ? halved : magnitude - least_normal;
}

/* Magnitudes below `small`, half of T's step below 1, have |t| < small, so that u = T(1 + t) = 1
 * and g = T(x / 2); those of 4 and more have t = 1 or -1, so that g is x or -0; -inf gives NaN. */
static inline void make_table(nyb_gelu_table *table, half_kind kind, float small) {
  const uint32_t least_normal = UINT32_C(1) << (23 - kind.dropped_bits);
  const uint32_t begin = narrow_normal(kind, small), end = narrow_normal(kind, 4.0f);
  uint16_t *positive = table->of_gate, *negative = table->of_gate + 0x8000;
  for (uint32_t m = 0; m < begin; m++) {
    positive[m] = (uint16_t)halve(m, least_normal);
    negative[m] = (uint16_t)(halve(m, least_normal) | 0x8000u);
  }
  fill_middle(kind, 0, begin, end, positive);
  fill_middle(kind, 1, begin, end, negative);
  for (uint32_t m = end; m < 0x8000; m++) {
    positive[m] = m <= kind.infinity ? (uint16_t)m : kind.nan;
    negative[m] = m < kind.infinity ? 0x8000u : kind.nan;
  }
}

/* Whatever the mode of the thread that happens to make the first context. */
static void make_tables(void) {
  const uint64_t callers = nyb_set_default_floating_point();
  make_table(&nyb_gelu_f16, (half_kind){13, 112u << 23, 0x7c00, NYB_GEGLU_NAN_F16}, 0x1p-12f);
  make_table(&nyb_gelu_bf16, (half_kind){16, 0, 0x7f80, NYB_GEGLU_NAN_BF16}, 0x1p-9f);
  nyb_restore_floating_point(callers);
}

void nyb_gelu_tables_make(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_tables);
}
