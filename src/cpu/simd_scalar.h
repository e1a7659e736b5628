/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary of attention_kernel.inc.h for a vector of one lane: plain C. */
#ifndef NYB_SIMD_SCALAR_H
#define NYB_SIMD_SCALAR_H

#include <math.h>
#include <stdbool.h>

#include "../numeric.h"

#define NYB_ISA_SUFFIX scalar
enum { VECTOR_LANES = 1, DOT_ROWS = 4, DOT_VECTORS = 2, DOT_STEPS = 2, SUM_VECTORS = 2 };
enum { UNPACKED_STRIDE = 128 }; /* the largest group */

typedef float vf;
typedef int32_t vi;

static inline vf vf_zero(void) { return 0; }
static inline vf vf_set1(float x) { return x; }
static inline vf vf_load(const float *p) { return *p; }
static inline void vf_store(float *p, vf x) { *p = x; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
/* Not fused here: the baseline has no such instruction, and libm's is a call. */
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
/* The larger one; b where either is NaN. */
static inline vf vf_max(vf a, vf b) { return a > b ? a : b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_abs(vf a) { return fabsf(a); }
/* a, which is not negative, with the sign of b */
static inline vf vf_take_sign(vf a, vf b) {
  return nyb_f32_from_bits(nyb_bits_from_f32(a) | (nyb_bits_from_f32(b) & 0x80000000u));
}
static inline float vf_reduce_add(vf a) { return a; }
static inline float vf_reduce_max(vf a) { return a; }
static inline vf vf_from_vi(vi a) { return (float)a; }
static inline vi vi_from_vf(vf a) { return (vi)lrintf(a); }
static inline vf vf_round_bf16(vf a) { return nyb_round_to(NYB_BF16, a); }
static inline vf vf_round_f16(vf a) { return nyb_round_to(NYB_F16, a); }
static inline vf vf_load_bf16(const uint16_t *p) { return nyb_f32_from_bf16(*p); }
static inline vf vf_load_f16(const uint16_t *p) { return nyb_f32_from_f16(*p); }
/* The float of 16 bits in each lane's low or high half. */
static inline vf vf_low_bf16(vi a) { return nyb_f32_from_bits((uint32_t)a << 16); }
static inline vf vf_high_bf16(vi a) { return nyb_f32_from_bits((uint32_t)a & 0xffff0000u); }
static inline vf vf_low_f16(vi a) { return nyb_f32_from_f16((uint16_t)(a & 0xffff)); }
static inline vf vf_high_f16(vi a) { return nyb_f32_from_f16((uint16_t)((uint32_t)a >> 16)); }
/* a where lane index < n, else 0. */
static inline vf vf_keep_first(vf a, int64_t n) { return n > 0 ? a : 0; }
/* The float whose exponent field is the low 8 bits of a, and whose other bits are 0. */
static inline vf vf_power_of_low_bits(vf a) {
  return nyb_f32_from_bits(nyb_bits_from_f32(a) << 23);
}
/* a where x >= limit or x is NaN, else 0 */
static inline vf vf_zero_below(vf a, vf x, float limit) { return x < limit ? 0 : a; }
/* a where x < limit, else b: where x is NaN, too */
static inline vf vf_where_below(vf x, float limit, vf a, vf b) { return x < limit ? a : b; }

static inline vi vi_zero(void) { return 0; }
static inline vi vi_set1(int32_t x) { return x; }
static inline vi vi_load(const int32_t *p) { return *p; }
static inline vi vi_load_bytes(const uint8_t *p) { return *p; } /* a byte for each lane */
static inline void vi_store(int32_t *p, vi x) { *p = x; }
static inline vi vi_add(vi a, vi b) { return a + b; }
static inline vi vi_and(vi a, vi b) { return a & b; }
static inline vi vi_shift_right(vi a, int bits) { return (vi)((uint32_t)a >> bits); }
/* acc + a.lo16 * b.lo16 + a.hi16 * b.hi16 in each lane, as signed 16-bit numbers */
static inline vi vi_dot16(vi acc, vi a, vi b) {
  return acc + (int16_t)(a & 0xffff) * (int16_t)(b & 0xffff) +
         (int16_t)((uint32_t)a >> 16) * (int16_t)((uint32_t)b >> 16);
}

/* Each 16-bit half shifted on its own. */
static inline vi vi_shift_right_halves(vi a, int bits) {
  return (vi)(((uint32_t)a >> bits) & ((0xffffu >> bits) * 0x10001u));
}
/* low's low half and high's low half in each lane */
static inline vi vi_join_halves(vi low, vi high) {
  return (vi)(((uint32_t)low & 0xffffu) | ((uint32_t)high << 16));
}

/* Vectors of packed words, where a lane is a word of a row. */
enum { WORD_LANES = 1, WORDS_STRIP = 2 };
typedef int32_t wi;
static inline wi wi_zero(void) { return 0; }
static inline wi wi_set1(int32_t x) { return x; }
static inline wi wi_load(const char *p) {
  wi x;
  memcpy(&x, p, 4);
  return x;
}
static inline void wi_store(int32_t *p, wi x) { *p = x; }
static inline wi wi_and(wi a, wi b) { return a & b; }
static inline wi wi_shift_right_halves(wi a, int bits) { return vi_shift_right_halves(a, bits); }
/* The 16-bit halves of a and b side by side, a's below: those of one half of the vectors, and those
 * of the other. interleaved_half tells which half of a word vector stands in a lane. */
static inline wi wi_interleave_low(wi a, wi b) { return vi_join_halves(a, b); }
static inline wi wi_interleave_high(wi a, wi b) {
  return (wi)((uint32_t)a >> 16 | ((uint32_t)b & 0xffff0000u));
}
static inline int interleaved_half(bool high, int lane) { return 2 * lane + high; }
/* Loads so that interleaving low gives the first half of the words in order, high the second. */
static inline wi wi_load_split(const char *p) { return wi_load(p); } /* never for single words */
static inline wi wi_dot16(wi acc, wi a, wi b) { return vi_dot16(acc, a, b); }
/* out += unit * dots + rest */
static inline void wi_add_scaled(float *out, wi dots, float unit, float rest) {
  *out += (float)dots * unit + rest;
}

/* words[j] = lane t: word j of the row at p + t * stride_bytes, for j < 4 */
static inline void load_words_transposed(const char *p, int64_t stride_bytes, vi *words) {
  (void)stride_bytes;
  memcpy(words, p, 16);
}

/* The codes of elements element .. element+VECTOR_LANES-1 of a row; element is a multiple of
 * VECTOR_LANES. */
static inline vf decode_codes(const char *row, int64_t element, int bits) {
  const unsigned char *bytes = (const unsigned char *)row;
  const int64_t bit = element * bits;
  uint32_t window = bytes[bit / 8];
  if (bit % 8 + bits > 8) window |= (uint32_t)bytes[bit / 8 + 1] << 8;
  return (float)((window >> (bit % 8)) & ((1u << bits) - 1));
}
/* The codes of whole groups as bytes, `count` of each token at a multiple of UNPACKED_STRIDE. Byte
 * i of a group is element unpacked_element(i); beyond `count`, up to UNPACKED_STRIDE, bytes may be
 * overwritten. */
static inline void unpack_codes(const char *rows, int64_t stride_bytes, int64_t tokens,
                                int64_t count, int bits, uint8_t *codes) {
  for (int64_t t = 0; t < tokens; t++, rows += stride_bytes, codes += UNPACKED_STRIDE) {
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)decode_codes(rows, i, bits);
  }
}
static inline int64_t unpacked_element(int64_t i) { return i; }

#endif
