/* SPDX-License-Identifier: Apache-2.0 */
/* The checks that need no test framework, as a program that an emulator can run: emulate_neon.sh
 * builds it for another processor. */
#include <stdio.h>

#include "check.h"
#include "check_spans.h"
#include "nybble.h"

static bool spans_pass(void) {
  spans_report report;
  check_spans(&report);
  printf("%lld quantize and dequantize kernels against scalar: %lld passed, %lld failed\n",
         (long long)report.kernels, (long long)report.passed, (long long)report.failed);
  if (report.failed != 0) printf("first: %s\n", report.first_failure);
  return report.failed == 0 && report.kernels > 0;
}

/* The best ISA alone: the scalar kernels are the same everywhere, and emulation is slow. */
static nyb_isa best_isa(void) {
  nyb_context *context = NULL;
  if (nyb_context_create(NULL, &context) != NYB_OK) return NYB_ISA_AUTO;
  const nyb_isa isa = nyb_context_isa(context);
  nyb_context_destroy(context);
  return isa;
}

static bool oracle_agrees(void) {
  const check_options options = {.quick = true, .isa = best_isa(), .library = &check_nybble};
  check_run *run = check_all(&options);
  if (run == NULL) return false;
  for (int64_t i = 0; i < run->failures_kept; i++) printf("%s\n", run->failures[i]);
  printf("against the oracle: %lld passed, %lld failed, %lld skipped\n", (long long)run->passed,
         (long long)run->failed, (long long)run->skipped);
  const bool good = run->failed == 0 && run->passed > 0;
  check_free(run);
  return good;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  printf("%s\n", nyb_cpu_features());
  const bool spans = spans_pass();
  return spans && oracle_agrees() ? 0 : 1;
}
