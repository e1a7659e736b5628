/* SPDX-License-Identifier: Apache-2.0 */
/* The checks alone, without cmocka and cJSON: for an emulated processor for which there are none.
 * usage: run_checks [ISA] */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "check_spans.h"

static void print_checks(const check_run *run) {
  for (int64_t i = 0; i < run->tally_count; i++) {
    const check_tally *tally = &run->tallies[i];
    if (tally->skipped != 0) printf("%s   skipped: %s\n", tally->kernel.name, tally->skip_reason);
  }
  for (int64_t i = 0; i < run->failures_kept; i++) {
    printf("FAILED %s\n", run->failures[i]);
  }
}

int main(int argc, char **argv) {
  check_options options = {.quick = true, .library = &check_nybble};
  for (nyb_isa isa = NYB_ISA_SCALAR; argc > 1 && isa <= NYB_ISA_NEON; isa++) {
    if (strcmp(argv[1], nyb_isa_name(isa)) == 0) options.isa = isa;
  }
  if (argc > 2 || (argc > 1 && options.isa == NYB_ISA_AUTO)) {
    fprintf(stderr, "usage: run_checks [scalar|avx2|avx512|neon]\n");
    return 2;
  }
  spans_report spans;
  check_spans(&spans);
  if (spans.failed != 0) printf("FAILED %s\n", spans.first_failure);

  check_run *run = check_all(&options);
  if (run == NULL) {
    fprintf(stderr, "run_checks: out of memory\n");
    return 1;
  }
  print_checks(run);
  const int64_t passed = run->passed + spans.passed, failed = run->failed + spans.failed;
  printf("%lld passed, %lld failed, %lld skipped\n", (long long)passed, (long long)failed,
         (long long)run->skipped);
  const bool good = failed == 0 && run->passed > 0 && spans.kernels > 0;
  check_free(run);
  return good ? 0 : 1;
}
