/* SPDX-License-Identifier: Apache-2.0 */
/* Scale and bias of one group, spelled out: the scalar kernels' own way, and how the vector kernels
 * find the first group that cannot be stored. */
#ifndef NYB_QUANTIZE_GROUP_H
#define NYB_QUANTIZE_GROUP_H

#include <math.h>

#include "../kernels.h"
#include "../numeric.h"

typedef struct nyb_group_parameters {
  float scale; /* not rounded to the dtype: the codes are computed with this one */
  float bias;
} nyb_group_parameters;

static inline float nyb_round_code(nyb_rule rule, float quotient) {
  return rule == NYB_RULE_MLX_CPU ? rintf(quotient) : roundf(quotient);
}

/* False where the group holds a NaN or an infinity, or its scale or bias overflows the dtype. */
static inline bool nyb_find_parameters(const nyb_quantize_span *span, int64_t first,
                                       float highest_code, nyb_group_parameters *parameters) {
  float minimum = INFINITY;
  float maximum = span->rule == NYB_RULE_MLX_CPU ? -INFINITY : 0.0f;
  for (int64_t i = first; i < first + span->group_size; i++) {
    const float value = nyb_load_f32(span->input, span->input_dtype, i);
    if (!isfinite(value)) return false;
    if (value < minimum) minimum = value;
    if (value > maximum) maximum = value;
  }
  const bool minimum_is_edge = fabsf(minimum) > fabsf(maximum);
  float scale = (maximum - minimum) / highest_code;
  if (scale < 1e-7f) scale = 1e-7f;
  if (!minimum_is_edge) scale = -scale;
  const float edge = minimum_is_edge ? minimum : maximum;
  const float edge_code = nyb_round_code(span->rule, edge / scale);
  parameters->scale = edge_code != 0.0f ? edge / edge_code : scale;
  parameters->bias = edge_code != 0.0f ? edge : 0.0f;
  return isfinite(nyb_round_to(span->scale_dtype, parameters->scale)) &&
         isfinite(nyb_round_to(span->scale_dtype, parameters->bias));
}

#endif
