/* SPDX-License-Identifier: Apache-2.0 */
/* What callers of the quantize kernels share. */
#ifndef NYB_QUANTIZE_H
#define NYB_QUANTIZE_H

#include <stdatomic.h>

#include "context.h"

nyb_status nyb_check_rule(const char *field, nyb_rule rule);
/* Fails for a flag on the CPU, which says at once what is not finite. */
nyb_status nyb_check_flag(const nyb_context *context, const char *field, const int32_t *flag);

/* Of the rows that kernels refuse on several threads, *first becomes the first. */
static inline void nyb_note_refused(_Atomic int64_t *first, int64_t row) {
  int64_t known = atomic_load_explicit(first, memory_order_relaxed);
  while (row < known && !atomic_compare_exchange_weak_explicit(
                            first, &known, row, memory_order_relaxed, memory_order_relaxed)) {
  }
}

/* Raises NYB_ERROR_NON_FINITE with the reason why the kernel refuses `span`, a row: the element
 * that is a NaN or an infinity, or what overflows. tensor, batch, head and token name the row. */
nyb_status nyb_quantize_refuse(const nyb_quantize_span *span, nyb_quantize_fn kernel,
                               const char *tensor, int64_t batch, int64_t head, int64_t token);

#endif
