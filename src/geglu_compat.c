/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU spelled out, as MLX runs it without a fused kernel: each step goes over the array and
 * rounds what it leaves there to the dtype. It is what the fused path is checked against, and
 * shares nothing with it but the roundings and the NaN; the tanh is the C library's. */
#include <math.h>

#include "cpu/geglu_tables.h"
#include "geglu.h"
#include "numeric.h"

enum { BLOCK = 512 }; /* elements: the arrays below stay in the first-level cache */

typedef struct block {
  nyb_dtype dtype;
  int64_t count;
} block;

/* One step: stores T(expression of i) for every i. */
#define STEP(array, expression)                              \
  for (int64_t i = 0; i < b.count; i++) {                    \
    (array)[i] = nyb_round_to(b.dtype, (float)(expression)); \
  }

static void gelu_steps(block b, const float *x, float *g) {
  const float k = nyb_round_to(b.dtype, 0.044715f);
  const float c = nyb_round_to(b.dtype, 0.7978845608f);
  float t[BLOCK];
  STEP(t, x[i] * x[i] * x[i])
  STEP(t, k * t[i])
  STEP(t, x[i] + t[i])
  STEP(t, c * t[i])
  STEP(t, tanhf(t[i]))
  STEP(t, 1.0f + t[i])
  STEP(g, 0.5f * x[i])
  STEP(g, g[i] * t[i])
}

static void store(block b, const float *y, void *out, int64_t offset) {
  for (int64_t i = 0; i < b.count; i++) {
    nyb_store_f32(out, b.dtype, offset + i, nyb_geglu_settle_f32(y[i]));
  }
}

void nyb_geglu_compat(nyb_dtype dtype, const void *gate, const void *up, void *out, int64_t count) {
  float x[BLOCK], g[BLOCK];
  for (int64_t done = 0; done < count; done += BLOCK) {
    const block b = {dtype, count - done < BLOCK ? count - done : BLOCK};
    STEP(x, nyb_load_f32(gate, dtype, done + i))
    gelu_steps(b, x, g);
    STEP(x, nyb_load_f32(up, dtype, done + i))
    STEP(g, g[i] * x[i])
    store(b, g, out, done);
  }
}
