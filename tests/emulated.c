/* SPDX-License-Identifier: Apache-2.0 */
/* The checks that need no test framework, as a program that an emulator can run: cmake/emulate.sh
 * builds it for another processor. */
#include <stdio.h>

#include "check_spans.h"
#include "nybble.h"

int main(void) {
  spans_report report;
  check_spans(&report);
  printf("%s: %lld kernels against scalar: %lld passed, %lld failed\n", nyb_cpu_features(),
         (long long)report.kernels, (long long)report.passed, (long long)report.failed);
  if (report.failed != 0) printf("first: %s\n", report.first_failure);
  return report.failed == 0 && report.kernels > 0 ? 0 : 1;
}
