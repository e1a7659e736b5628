/* SPDX-License-Identifier: Apache-2.0 */
/* Which query row sees what, and reading stored rows, for the attention kernels that take any shape
 * and format: runs of NYB_LANE_ELEMENTS elements, in two steps so that the loads of several runs
 * can be under way together. Where bits, dtype and alignment are constants nothing is decided at
 * run time. */
#ifndef NYB_ATTENTION_ROWS_CUH
#define NYB_ATTENTION_ROWS_CUH

#include "attention_arguments.h"
#include "portable.cuh"

/* ---- Query rows ----------------------------------------------------------------------------- */

NYB_FUNCTION int64_t nyb_length_of(const nyb_attention_arguments *a, int64_t batch) {
  const int64_t length = a->lengths[batch];
  return length < 0 ? 0 : length < a->room_tokens ? length : a->room_tokens;
}

/* The first tokens of a sequence that a query row sees. */
NYB_FUNCTION int64_t nyb_visible_to(const nyb_attention_arguments *a, int64_t length,
                                    int64_t query_row) {
  if (!a->causal) return length;
  const int64_t visible = length - a->query_len + query_row + 1;
  return visible > 0 ? visible : 0;
}

NYB_FUNCTION float nyb_load_element(const char *row, int dtype, int64_t index) {
  if (dtype == NYB_DEVICE_F32) return ((const float *)(const void *)row)[index];
  return nyb_number_from(dtype, ((const uint16_t *)(const void *)row)[index]);
}

NYB_FUNCTION void nyb_store_element(char *row, int dtype, int64_t index, float value) {
  if (dtype == NYB_DEVICE_F32) {
    ((float *)(void *)row)[index] = value;
  } else {
    ((uint16_t *)(void *)row)[index] = (uint16_t)nyb_number_to(dtype, value);
  }
}

/* Element d of a query row, scaled and rounded as the call asks for. */
NYB_FUNCTION float nyb_query_element(const nyb_attention_arguments *a, const char *row, int64_t d) {
  const float q = nyb_load_element(row, a->query_dtype, d);
  return nyb_round_number(a->round_to, NYB_MULTIPLY(q, a->scale));
}

/* ---- Runs of stored elements ---------------------------------------------------------------- */

/* As it lies in memory: the words that hold a run's codes, brought to bit 0, with its group's scale
 * and bias; or the elements of a plain row, two to a word where they are 16 bits wide. */
typedef struct nyb_run {
  uint32_t words[NYB_LANE_ELEMENTS];
  uint32_t scale, bias;
} nyb_run;

NYB_FUNCTION uint32_t nyb_load_bits(const char *row, int dtype, int64_t index) {
  if (dtype == NYB_DEVICE_F32) return ((const uint32_t *)(const void *)row)[index];
  return ((const uint16_t *)(const void *)row)[index];
}

NYB_FUNCTION float nyb_widen(int dtype, uint32_t bits) {
  return dtype == NYB_DEVICE_F32 ? nyb_float_of(bits) : nyb_number_from(dtype, bits);
}

/* The run begins at bit `shift` of the first word. A second word is read only where codes of the
 * run lie in it, so never past the row. */
NYB_FUNCTION void nyb_load_codes_at(nyb_run *run, const char *codes, int bits, int shift) {
  const uint32_t *words = (const uint32_t *)(const void *)codes;
  uint64_t stream = words[0];
  if (shift + NYB_LANE_ELEMENTS * bits > 32) stream |= (uint64_t)words[1] << 32;
  stream >>= shift;
  run->words[0] = (uint32_t)stream;
  run->words[1] = (uint32_t)(stream >> 32);
}

/* Bytes from a row's codes to the word in which those of element `first` begin, and the bit there. */
NYB_FUNCTION int64_t nyb_code_offset(int bits, int64_t first) { return first * bits / 32 * 4; }
NYB_FUNCTION int nyb_code_shift(int bits, int64_t first) { return (int)(first * bits % 32); }

NYB_FUNCTION void nyb_load_codes(nyb_run *run, const char *codes, int bits, int64_t first) {
  nyb_load_codes_at(run, codes + nyb_code_offset(bits, first), bits, nyb_code_shift(bits, first));
}

/* Elements [first, first + count) of a plain row; beyond count the run is 0. */
NYB_FUNCTION void nyb_load_plain(nyb_run *run, const char *row, int dtype, int64_t first,
                                 int64_t count) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
    const uint32_t bits = i < count ? nyb_load_bits(row, dtype, first + i) : 0;
    if (dtype == NYB_DEVICE_F32) {
      run->words[i] = bits;
    } else if (i % 2 == 0) {
      run->words[i / 2] = bits;
    } else {
      run->words[i / 2] |= bits << 16;
    }
  }
}

typedef struct nyb_words4 {
  uint32_t w[4];
}
#if defined(__CUDACC__)
__attribute__((aligned(16)))
#endif
nyb_words4;

/* The same for a whole run in memory that is aligned to 16 bytes. */
NYB_FUNCTION void nyb_load_plain_aligned(nyb_run *run, const char *row, int dtype, int64_t first) {
  const int64_t bytes = dtype == NYB_DEVICE_F32 ? 4 : 2;
  const nyb_words4 *from = (const nyb_words4 *)(const void *)(row + first * bytes);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < (dtype == NYB_DEVICE_F32 ? 2 : 1); i++) {
    const nyb_words4 four = from[i];
    for (int j = 0; j < 4; j++) run->words[4 * i + j] = four.w[j];
  }
}

NYB_FUNCTION uint32_t nyb_code_in(const nyb_run *run, int bits, int i) {
  const int bit = i * bits;
  const uint32_t mask = (1u << bits) - 1u;
  if (bit >= 32) return (run->words[1] >> (bit - 32)) & mask;
  uint32_t word = run->words[0] >> bit;
  if (bit + bits > 32) word |= run->words[1] << (32 - bit);
  return word & mask;
}

/* A small integer as a float, without the slow conversion: as the last bits of 2^23. */
#define NYB_CODE_EXPONENT 0x4b000000u
NYB_FUNCTION float nyb_float_from_code(uint32_t code) {
  return NYB_SUBTRACT(nyb_float_of(NYB_CODE_EXPONENT | code), 8388608.0f);
}

NYB_FUNCTION float nyb_code_number(const nyb_run *run, int bits, int i) {
#if defined(__CUDACC__)
  uint32_t number;
  if (bits == 8) {
    number = __byte_perm(run->words[i / 4], NYB_CODE_EXPONENT, 0x7540u | (i % 4));
  } else {
    const int bit = i * bits;
    uint32_t word = bit >= 32 ? run->words[1] >> (bit - 32) : run->words[0] >> bit;
    if (bit < 32 && bit + bits > 32) word |= run->words[1] << (32 - bit);
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" /* (a & b) | c, which is not found where both are constants */
        : "=r"(number)
        : "r"(word), "r"((1u << bits) - 1u), "r"(NYB_CODE_EXPONENT));
  }
  return NYB_SUBTRACT(nyb_float_of(number), 8388608.0f);
#else
  return nyb_float_from_code(nyb_code_in(run, bits, i));
#endif
}

NYB_FUNCTION float nyb_plain_of(const nyb_run *run, int dtype, int i) {
  if (dtype == NYB_DEVICE_F32) return nyb_float_of(run->words[i]);
  return nyb_number_from(dtype, (run->words[i / 2] >> (i % 2 * 16)) & 0xffffu);
}

#endif
