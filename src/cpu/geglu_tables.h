/* SPDX-License-Identifier: Apache-2.0 */
/* Every intermediate of GeGLU up to g, the rounded gelu of the gate, depends on the gate alone, and
 * a 16-bit gate has 65,536 values: the fused kernels look g up. */
#ifndef NYB_GEGLU_TABLES_H
#define NYB_GEGLU_TABLES_H

#include <stdint.h>

#include "../numeric.h"

/* g by the bits of the gate. Gathers read 32 bits, so that an entry at either end needs a
 * neighbour: an entry is the lower half of the word at of_gate and the upper half of the word at
 * before. */
typedef struct nyb_gelu_table {
  uint16_t before;
  uint16_t of_gate[65536];
  uint16_t after;
} nyb_gelu_table;

/* Filled by nyb_gelu_tables_make() and only read from then on. */
extern nyb_gelu_table nyb_gelu_f16;
extern nyb_gelu_table nyb_gelu_bf16;

/* Fills both tables, once in a process; nyb_context_create does it, so that run calls need not ask
 * whether they are there. */
void nyb_gelu_tables_make(void);

/* The one NaN that GeGLU gives, whatever NaN went in: the payload that an operation hands on
 * differs between processors. */
#define NYB_GEGLU_NAN_F32 0x7fc00000u
#define NYB_GEGLU_NAN_F16 0x7e00u
#define NYB_GEGLU_NAN_BF16 0x7fc0u

static inline float nyb_geglu_settle_f32(float value) {
  const uint32_t bits = nyb_bits_from_f32(value);
  const uint32_t is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return nyb_f32_from_bits(is_nan ? NYB_GEGLU_NAN_F32 : bits);
}

/* y = T(g * up), one element. */
static inline uint16_t nyb_geglu_product_f16(uint16_t g, uint16_t up) {
  const float y = nyb_f32_from_f16(g) * nyb_f32_from_f16(up);
  return y == y ? nyb_f16_from_f32(y) : NYB_GEGLU_NAN_F16;
}

static inline uint16_t nyb_geglu_product_bf16(uint16_t g, uint16_t up) {
  const float y = nyb_f32_from_bf16(g) * nyb_f32_from_bf16(up);
  return y == y ? nyb_bf16_from_f32(y) : NYB_GEGLU_NAN_BF16;
}

#endif
