/* SPDX-License-Identifier: Apache-2.0 */
/* The quick checks of every kernel that runs here; `nybble verify` runs the full ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "check.h"

static void run_checks(const char *operation) {
  const check_options options = {.quick = true, .operation = operation};
  check_run *run = check_all(&options);
  assert_non_null(run);
  for (int64_t i = 0; i < run->failures_kept; i++) {
    print_error("%s\n", run->failures[i]);
  }
  for (int64_t i = 0; i < run->tally_count; i++) { /* skips are loud */
    const check_tally *tally = &run->tallies[i];
    if (tally->skipped != 0 && !tally->kernel.runs_here) {
      print_message("skipped %s: %s\n", tally->kernel.name, tally->skip_reason);
    }
  }
  print_message("%s: %lld passed, %lld failed, %lld skipped\n", operation, (long long)run->passed,
                (long long)run->failed, (long long)run->skipped);
  assert_int_equal(run->failed, 0);
  assert_true(run->passed > 0);
  check_free(run);
}

static void test_quantize(void **state) {
  (void)state;
  run_checks("quantize");
}

static void test_geglu(void **state) {
  (void)state;
  run_checks("geglu");
}

static void test_attention(void **state) {
  (void)state;
  run_checks("attention");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_quantize),
      cmocka_unit_test(test_geglu),
      cmocka_unit_test(test_attention),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
