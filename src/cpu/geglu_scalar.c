/* SPDX-License-Identifier: Apache-2.0 */
#include "../kernels.h"
#include "geglu_f32.h"
#include "geglu_tables.h"

NYB_GEGLU_KERNEL(plain_f32, scalar) {
  (void)streaming;
  nyb_geglu_f32_loop(gate, up, out, count);
}

NYB_GEGLU_KERNEL(plain_f16, scalar) {
  (void)streaming;
  const uint16_t *gates = gate, *ups = up;
  uint16_t *outs = out;
  for (int64_t i = 0; i < count; i++) {
    outs[i] = nyb_geglu_product_f16(nyb_gelu_f16.of_gate[gates[i]], ups[i]);
  }
}

NYB_GEGLU_KERNEL(plain_bf16, scalar) {
  (void)streaming;
  const uint16_t *gates = gate, *ups = up;
  uint16_t *outs = out;
  for (int64_t i = 0; i < count; i++) {
    outs[i] = nyb_geglu_product_bf16(nyb_gelu_bf16.of_gate[gates[i]], ups[i]);
  }
}
