/* SPDX-License-Identifier: Apache-2.0 */
/* Every quantize and dequantize kernel that runs here against the scalar one, called directly: any
 * number of groups, any alignment, groups that cannot be stored, and not a byte beyond. */
#ifndef CHECK_SPANS_H
#define CHECK_SPANS_H

#include <stdint.h>

typedef struct spans_report {
  int64_t kernels; /* compared with the scalar one */
  int64_t passed, failed;
  char first_failure[256];
} spans_report;

/* Needs no test framework, so that it runs under an emulator as well. */
void check_spans(spans_report *report);

#endif
