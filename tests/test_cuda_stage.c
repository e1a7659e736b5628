/* SPDX-License-Identifier: Apache-2.0 */
/* How the checks run calls on a GPU (check_stage.h), without one: the fake driver's memory is the
 * host's, so that the CPU's kernels can stand in for the GPU's. What they get must be what the
 * checks gave, and what they write must come back, stray bytes too. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "check_stage.h"
#include "fake_cuda/open.h"

static const stage_placement placements[] = {STAGE_AS_ON_HOST, STAGE_ALIGNED, STAGE_SEPARATE};

static check_run *run_checks(const check_library *library, const char *operation) {
  const check_options options = {
      .quick = true,
      .isa = NYB_ISA_SCALAR,
      .library = library,
      .operation = operation,
      .format = strcmp(operation, "geglu") == 0 ? "plain_bf16" : "affine4"};
  return check_all(&options);
}

static void test_calls(void **state) {
  static const char *const operations[] = {"quantize", "attention", "geglu"};
  (void)state;
  for (int i = 0; i < 9; i++) {
    check_stage_place(placements[i / 3]);
    check_run *run = run_checks(&check_staged, operations[i % 3]);
    assert_non_null(run);
    for (int64_t f = 0; f < run->failures_kept; f++) print_error("%s\n", run->failures[f]);
    assert_int_equal(run->failed, 0);
    assert_true(run->passed > 0);
    check_free(run);
  }
}

/* ---- A call that writes where it may not -------------------------------------------------------
 */

static nyb_status stray_geglu(nyb_context *context, const nyb_geglu *call, nyb_stream stream) {
  const nyb_status status = check_staged.geglu(context, call, stream);
  check_buffer *buffer = (check_buffer *)(uintptr_t)check_buffer_around(call->out);
  if (status == NYB_OK) buffer->memory[3] ^= 1; /* in the guard band */
  return status;
}

static void test_stray_write(void **state) {
  (void)state;
  check_library library = check_staged;
  library.geglu = stray_geglu;
  check_run *run = run_checks(&library, "geglu");
  assert_non_null(run);
  assert_true(run->failed > 0);
  check_free(run);
}

/* ---- Alignment on the device --------------------------------------------------------------------
 */

static uintptr_t seen_gate, seen_out;

static void place(stage_placement placement) {
  check_buffer gate, up, out;
  check_stage_place(placement);
  assert_true(check_buffer_make(&gate, 64) && check_buffer_make(&up, 64) &&
              check_buffer_make(&out, 64));
  nyb_attention call = NYB_ATTENTION_INIT;
  call.q.data = gate.data;
  call.out.data = (char *)out.data + 20;
  check_stage_pretend(&call);
  seen_gate = (uintptr_t)call.q.data;
  seen_out = (uintptr_t)call.out.data;
  if (placement == STAGE_AS_ON_HOST) assert_ptr_equal(call.q.data, gate.data);
  check_buffer_free(&gate);
  check_buffer_free(&up);
  check_buffer_free(&out);
}

static void test_alignment(void **state) {
  (void)state;
  place(STAGE_AS_ON_HOST);
  place(STAGE_ALIGNED);
  assert_int_equal(seen_gate % 256, 0);
  assert_int_equal(seen_out % 256, 20);
}

static int open_stage(void **state) {
  (void)state;
  setenv("NYBBLE_LIBCUDA", FAKE_CUDA_DIR "/libfake_cuda.so", 1);
  return check_stage_open(0) ? 0 : 1;
}

static int close_stage(void **state) {
  (void)state;
  check_stage_close();
  device_close();
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_alignment), cmocka_unit_test(test_stray_write),
      cmocka_unit_test(test_calls), /* last: SEPARATE stays */
  };
  return cmocka_run_group_tests(tests, open_stage, close_stage);
}
