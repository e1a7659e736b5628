/* SPDX-License-Identifier: Apache-2.0 */
/* What callers of the quantize kernels share. */
#ifndef NYB_QUANTIZE_H
#define NYB_QUANTIZE_H

#include "kernels.h"

/* Raises NYB_ERROR_NON_FINITE with the reason why a kernel stopped at `group` of `span`, which
 * begins a row: the element that is a NaN or an infinity, or what overflows. `where` names the row,
 * as in "quantize.input at batch 0, head 1, token 7". */
nyb_status nyb_quantize_refuse(const nyb_quantize_span *span, int64_t group, const char *where);

#endif
