/* SPDX-License-Identifier: Apache-2.0 */
/* Attention in double precision, over tensors as they were before any quantization: what replay
 * measures its errors against. It shares nothing with the library. */
#ifndef NYB_REFERENCE_H
#define NYB_REFERENCE_H

#include "nybble.h"
#include "trace.h"

/* Element `index` of floats in memory. */
double nyb_element(const void *data, nyb_dtype dtype, int64_t index);

/* The distance from a finite number to the next larger one of the dtype, at |value|. */
double nyb_ulp(nyb_dtype dtype, double value);

/* out[step][query head][value_dim]: causal attention of the layer's queries of tokens [first_token,
 * first_token + steps), each over all tokens up to its own. */
void nyb_reference_attention(const nyb_trace *trace, const nyb_trace_layer *layer,
                             int64_t first_token, int64_t steps, double *out);

#endif
