/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of the checks: a library that lies in one small way must be caught. Each liar calls
 * the real library and then spoils what it left behind, or asks it for something else. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "oracle.h"

static check_run *run_until(const check_library *library, const char *operation, const char *format,
                            const char *words) {
  const check_options options = {.quick = true,
                                 .isa = NYB_ISA_SCALAR,
                                 .operation = operation,
                                 .format = format,
                                 .library = library,
                                 .until = words};
  check_run *run = check_all(&options);
  assert_non_null(run);
  return run;
}

static check_run *run_with(const check_library *library, const char *operation,
                           const char *format) {
  return run_until(library, operation, format, NULL);
}

/* Some check fails, and what it says contains `words`. The run goes on no longer than that: this
 * program asks for dozens of them. */
static void assert_caught(const check_library *library, const char *operation, const char *format,
                          const char *words) {
  check_run *run = run_until(library, operation, format, words);
  bool said = false;
  for (int64_t i = 0; i < run->failures_kept; i++) {
    said = said || strstr(run->failures[i], words) != NULL;
  }
  if (!said) {
    print_error("no failure with the words \"%s\" among %lld; the first: %s\n", words,
                (long long)run->failed, run->failures_kept > 0 ? run->failures[0] : "none");
  }
  const int64_t failed = run->failed;
  check_free(run);
  assert_true(failed > 0);
  assert_true(said);
}

static void assert_honest(const char *operation, const char *format) {
  check_run *run = run_with(&check_nybble, operation, format);
  if (run->failures_kept > 0) print_error("%s\n", run->failures[0]);
  const int64_t passed = run->passed, failed = run->failed;
  check_free(run);
  assert_true(passed > 0);
  assert_int_equal(failed, 0);
}

/* A context of the liar's own, so that the calls of the check's context stay as they are. */
static nyb_context *other_context(void) {
  static nyb_context *context;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = NYB_ISA_SCALAR, .threads = 2};
  if (context == NULL) assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  return context;
}

/* ---- Quantize ----------------------------------------------------------------------------- */

static nyb_status flip_code(nyb_context *context, const nyb_quantize *q, nyb_stream stream) {
  const nyb_status status = nyb_quantize_run(context, q, stream);
  if (status == NYB_OK) ((uint8_t *)q->output.codes)[0] ^= 1;
  return status;
}

static nyb_status flip_scale(nyb_context *context, const nyb_quantize *q, nyb_stream stream) {
  const nyb_status status = nyb_quantize_run(context, q, stream);
  if (status == NYB_OK) ((uint8_t *)q->output.scales)[0] ^= 1;
  return status;
}

static nyb_status write_after_codes(nyb_context *context, const nyb_quantize *q,
                                    nyb_stream stream) {
  const nyb_status status = nyb_quantize_run(context, q, stream);
  const int64_t rows = q->batch * q->heads * q->tokens, words = q->dim * q->output.format.bits / 32;
  /* A gap after each row or, without one, the guard band. */
  if (status == NYB_OK && q->output.codes_stride[2] % words == 0) {
    ((uint8_t *)q->output.codes)[rows * words * 4] = 0;
  }
  return status;
}

static nyb_status write_input(nyb_context *context, const nyb_quantize *q, nyb_stream stream) {
  const nyb_status status = nyb_quantize_run(context, q, stream);
  ((uint8_t *)(uintptr_t)q->input.data)[0] ^= 0x10;
  return status;
}

static nyb_status other_rule(nyb_context *context, const nyb_quantize *q, nyb_stream stream) {
  nyb_quantize other = *q;
  other.rule = q->rule == NYB_RULE_MLX_CPU ? NYB_RULE_MLX_GPU : NYB_RULE_MLX_CPU;
  return nyb_quantize_run(context, &other, stream);
}

static nyb_status leave_last_token(nyb_context *context, const nyb_quantize *q, nyb_stream stream) {
  nyb_quantize shorter = *q;
  shorter.tokens--;
  return nyb_quantize_run(context, &shorter, stream);
}

static nyb_status swallow_non_finite(nyb_context *context, const nyb_quantize *q,
                                     nyb_stream stream) {
  const nyb_status status = nyb_quantize_run(context, q, stream);
  return status == NYB_ERROR_NON_FINITE ? NYB_OK : status;
}

static nyb_status quantize_elsewhere(nyb_context *context, const nyb_quantize *q,
                                     nyb_stream stream) {
  (void)context;
  return nyb_quantize_run(other_context(), q, stream);
}

static nyb_status dequantize_flipped(nyb_context *context, const nyb_dequantize *d,
                                     nyb_stream stream) {
  const nyb_status status = nyb_dequantize_run(context, d, stream);
  if (status == NYB_OK) ((uint8_t *)d->output.data)[0] ^= 1;
  return status;
}

static nyb_status dequantize_nothing(nyb_context *context, const nyb_dequantize *d,
                                     nyb_stream stream) {
  (void)context, (void)d, (void)stream;
  return NYB_OK;
}

static void test_quantize_liars(void **state) {
  (void)state;
  static const struct {
    nyb_status (*quantize)(nyb_context *context, const nyb_quantize *q, nyb_stream stream);
    const char *words;
  } liars[] = {
      {flip_code, "codes, row 0 byte 0"},
      {flip_scale, "scales, row 0 byte 0"},
      {write_after_codes, "outside the buffer"},
      {write_input, "floats, row 0"},
      {other_rule, "codes"},
      {leave_last_token, "want"},
      {swallow_non_finite, "want NYB_ERROR_NON_FINITE"},
      {quantize_elsewhere, "another kernel ran"},
  };
  assert_honest("quantize", "affine4");
  for (size_t i = 0; i < sizeof liars / sizeof liars[0]; i++) {
    check_library library = check_nybble;
    library.quantize = liars[i].quantize;
    assert_caught(&library, "quantize", "affine4", liars[i].words);
  }
  check_library library = check_nybble;
  library.dequantize = dequantize_flipped;
  assert_caught(&library, "quantize", "affine4", "floats, row 0 byte 0");
  library.dequantize = dequantize_nothing;
  assert_caught(&library, "quantize", "affine4", "got 0xff");
}

/* ---- GeGLU -------------------------------------------------------------------------------- */

static nyb_status geglu_last_bit(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  const nyb_status status = nyb_geglu_run(context, g, stream);
  if (status == NYB_OK && g->rows * g->columns > 0) ((uint8_t *)g->out)[0] ^= 1;
  return status;
}

static nyb_status geglu_nan(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  const nyb_status status = nyb_geglu_run(context, g, stream);
  if (g->rows * g->columns > 0) oracle_store(g->out, g->dtype, g->columns - 1, NAN);
  return status;
}

static nyb_status geglu_past_the_end(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  const nyb_status status = nyb_geglu_run(context, g, stream);
  oracle_store(g->out, g->dtype, -1, 0);
  return status;
}

/* The gelu of erf instead of tanh: off by less than 5e-4. */
static nyb_status geglu_of_erf(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  const nyb_status status = nyb_geglu_run(context, g, stream);
  for (int64_t i = 0; i < g->columns && g->rows == 1; i++) {
    const double gate = oracle_load(g->gate, g->dtype, i), up = oracle_load(g->up, g->dtype, i);
    oracle_store(g->out, g->dtype, i, 0.5 * gate * erfc(-gate * sqrt(0.5)) * up);
  }
  return status;
}

static nyb_status geglu_elsewhere(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  (void)context;
  return nyb_geglu_run(other_context(), g, stream);
}

static nyb_status geglu_other_path(nyb_context *context, const nyb_geglu *g, nyb_stream stream) {
  nyb_geglu other = *g;
  other.path = g->path == NYB_PATH_COMPAT ? NYB_PATH_FUSED : NYB_PATH_COMPAT;
  return nyb_geglu_run(context, &other, stream);
}

static void test_geglu_liars(void **state) {
  (void)state;
  static const struct {
    nyb_status (*geglu)(nyb_context *context, const nyb_geglu *g, nyb_stream stream);
    const char *words;
  } liars[] = {
      {geglu_last_bit, "row 0 column 0: got"}, {geglu_nan, "got nan"},
      {geglu_past_the_end, "is no output"},    {geglu_of_erf, "known values"},
      {geglu_elsewhere, "another kernel ran"}, {geglu_other_path, "another kernel ran"},
  };
  assert_honest("geglu", "plain_bf16");
  assert_honest("geglu", "plain_f32");
  for (size_t i = 0; i < sizeof liars / sizeof liars[0]; i++) {
    check_library library = check_nybble;
    library.geglu = liars[i].geglu;
    assert_caught(&library, "geglu", "plain_bf16", liars[i].words);
  }
  check_library library = check_nybble;
  library.geglu = geglu_nan;
  assert_caught(&library, "geglu", "plain_f32", "got nan");
  library.geglu = geglu_of_erf;
  assert_caught(&library, "geglu", "plain_f32", "known values");
}

/* ---- Attention ---------------------------------------------------------------------------- */

#define LIAR_ARGUMENTS                                                                   \
  nyb_context *context, const nyb_attention *a, void *workspace, size_t workspace_bytes, \
      nyb_stream stream
#define TRUTH(attention) nyb_attention_run(context, attention, workspace, workspace_bytes, stream)

/* Runs with one bit of a stored byte other than it is. */
static nyb_status with_flipped_byte(LIAR_ARGUMENTS, const void *data, int bit) {
  uint8_t *byte = (uint8_t *)(uintptr_t)data;
  *byte ^= (uint8_t)(1 << bit);
  const nyb_status status = TRUTH(a);
  *byte ^= (uint8_t)(1 << bit);
  return status;
}

static nyb_status flip_key_code(LIAR_ARGUMENTS) {
  return with_flipped_byte(context, a, workspace, workspace_bytes, stream, a->k.codes, 0);
}

static nyb_status flip_value_code(LIAR_ARGUMENTS) {
  return with_flipped_byte(context, a, workspace, workspace_bytes, stream, a->v.codes, 0);
}

/* The upper byte of a bf16 scale or of half of an f32 one. */
static nyb_status wrong_value_scale(LIAR_ARGUMENTS) {
  if (a->v.scales == NULL) return TRUTH(a); /* a plain cache, to compare with */
  return with_flipped_byte(context, a, workspace, workspace_bytes, stream,
                           (const uint8_t *)a->v.scales + 1, 0);
}

static nyb_status forget_key_scale(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.k.scales = a->k.biases;
  return TRUTH(&other);
}

static nyb_status wrong_scale(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.scale *= 1.001f;
  return TRUTH(&other);
}

static nyb_status other_rounding(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.rounding = a->rounding == NYB_ROUNDING_MLX ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX;
  return TRUTH(&other);
}

static nyb_status ignore_mask(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.mask = NYB_MASK_NONE;
  return TRUTH(&other);
}

/* ---- Attention: what decoders pass ---- */

static nyb_status causal_from_the_other_corner(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  if (a->mask == NYB_MASK_CAUSAL_TOP_LEFT) other.mask = NYB_MASK_CAUSAL;
  return TRUTH(&other);
}

static nyb_status wider_window(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  if (a->window_tokens != 0) other.window_tokens++;
  return TRUTH(&other);
}

static nyb_status forget_kept(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.window_keep_tokens = 0;
  return TRUTH(&other);
}

/* Columns shifted by one: the first is another token's. */
static nyb_status shift_mask(LIAR_ARGUMENTS, nyb_mask_array_kind kind, int64_t bytes) {
  nyb_attention other = *a;
  if (a->mask_array.kind == kind) {
    other.mask_array.data = (const char *)a->mask_array.data + bytes;
  }
  return TRUTH(&other);
}

static nyb_status shift_bools(LIAR_ARGUMENTS) {
  return shift_mask(context, a, workspace, workspace_bytes, stream, NYB_MASK_ARRAY_BOOL, 1);
}

static nyb_status shift_added(LIAR_ARGUMENTS) {
  return shift_mask(context, a, workspace, workspace_bytes, stream, NYB_MASK_ARRAY_ADD,
                    (int64_t)nyb_dtype_bytes(a->mask_array.dtype));
}

static nyb_status one_mask_for_all_rows(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.mask_array.stride[2] = 0;
  return TRUTH(&other);
}

static nyb_status forget_sinks(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.sinks = NULL;
  return TRUTH(&other);
}

static nyb_status wrong_softcap(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.softcap *= 1.01f;
  return TRUTH(&other);
}

static nyb_status forget_slopes(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.alibi_slopes = NULL;
  return TRUTH(&other);
}

static nyb_status with_length(LIAR_ARGUMENTS, int32_t more) {
  int32_t lengths[64];
  nyb_attention other = *a;
  for (int64_t b = 0; b < a->batch; b++) {
    lengths[b] = a->lengths[b] + more;
    if (lengths[b] < 0 || lengths[b] > a->capacity_tokens) lengths[b] = a->lengths[b];
  }
  other.lengths = lengths;
  return TRUTH(&other);
}

static nyb_status drop_last_token(LIAR_ARGUMENTS) {
  return with_length(context, a, workspace, workspace_bytes, stream, -1);
}

static nyb_status read_past_length(LIAR_ARGUMENTS) {
  return with_length(context, a, workspace, workspace_bytes, stream, 1);
}

static nyb_status spoil(LIAR_ARGUMENTS, int64_t element, double value) {
  const nyb_status status = TRUTH(a);
  oracle_store(a->out.data, a->out.dtype, element, value);
  return status;
}

static nyb_status nan_in_out(LIAR_ARGUMENTS) {
  return spoil(context, a, workspace, workspace_bytes, stream, a->value_dim - 1, NAN);
}

static nyb_status zero_in_out(LIAR_ARGUMENTS) {
  return spoil(context, a, workspace, workspace_bytes, stream, a->value_dim - 1, 0);
}

static nyb_status write_before_out(LIAR_ARGUMENTS) {
  return spoil(context, a, workspace, workspace_bytes, stream, -1, 0);
}

static nyb_status write_past_workspace(LIAR_ARGUMENTS) {
  const nyb_status status = TRUTH(a);
  ((uint8_t *)workspace)[workspace_bytes] = 0;
  return status;
}

static nyb_status wrong_lse(LIAR_ARGUMENTS) {
  const nyb_status status = TRUTH(a);
  if (a->lse.data != NULL) *(float *)a->lse.data += 0.01f;
  return status;
}

static nyb_status no_lse(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.lse.data = NULL;
  return TRUTH(&other);
}

static nyb_status first_head_for_all(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.k.codes_stride[1] = other.k.scales_stride[1] = other.k.biases_stride[1] = 0;
  return TRUTH(&other);
}

/* Only what is not finite in the data makes NaN. */
static nyb_status with_each_nan(LIAR_ARGUMENTS, double instead) {
  const nyb_status status = TRUTH(a);
  for (int64_t i = 0; i < a->batch * a->query_heads * a->query_len; i++) {
    const int64_t row = i % a->query_len, head = i / a->query_len % a->query_heads;
    const int64_t at = i / a->query_len / a->query_heads * a->out.stride[0] +
                       head * a->out.stride[1] + row * a->out.stride[2];
    for (int64_t d = 0; d < a->value_dim; d++) {
      if (isnan(oracle_load(a->out.data, a->out.dtype, at + d))) {
        oracle_store(a->out.data, a->out.dtype, at + d, instead);
      }
    }
  }
  return status;
}

static nyb_status zero_for_nan(LIAR_ARGUMENTS) {
  return with_each_nan(context, a, workspace, workspace_bytes, stream, 0);
}

static nyb_status infinity_for_nan(LIAR_ARGUMENTS) {
  return with_each_nan(context, a, workspace, workspace_bytes, stream, INFINITY);
}

static nyb_status attend_elsewhere(LIAR_ARGUMENTS) {
  (void)context;
  return nyb_attention_run(other_context(), a, workspace, workspace_bytes, stream);
}

static void flip_last_bit(const nyb_attention *a) { ((uint8_t *)a->out.data)[0] ^= 1; }

static nyb_status differ_on_seven_threads(LIAR_ARGUMENTS) {
  const nyb_status status = TRUTH(a);
  if (nyb_context_threads(context) == 7 && a->out.dtype == NYB_F32) flip_last_bit(a);
  return status;
}

static nyb_status differ_now_and_then(LIAR_ARGUMENTS) {
  static int64_t calls;
  const nyb_status status = TRUTH(a);
  if (++calls % 17 == 0 && a->out.dtype == NYB_F32) flip_last_bit(a);
  return status;
}

static nyb_status differ_alone(LIAR_ARGUMENTS) {
  const nyb_status status = TRUTH(a);
  if (a->query_heads == 1 && a->out.dtype == NYB_F32) flip_last_bit(a);
  return status;
}

static nyb_status differ_with_rows(LIAR_ARGUMENTS) {
  const nyb_status status = TRUTH(a);
  if (a->query_len >= 9 && a->query_len < 16 && a->out.dtype == NYB_F32) flip_last_bit(a);
  return status;
}

static void test_attention_liars(void **state) {
  (void)state;
  static const struct {
    nyb_status (*attention)(LIAR_ARGUMENTS);
    const char *words;
  } liars[] = {
      {flip_key_code, "lse of batch 0 head 0"},
      {flip_value_code, "out of batch 0 head 0"},
      {wrong_value_scale, "out of batch 0 head 0"},
      {forget_key_scale, "lse of"},
      {wrong_scale, "lse of"},
      {other_rounding, "MLX"},
      {ignore_mask, "causal"},
      {drop_last_token, "lse of"},
      {causal_from_the_other_corner, "attention_top_left_scalar: "},
      {wider_window, "attention_window_scalar: window (B 1"},
      {forget_kept, "window and kept"},
      {shift_bools, "attention_mask_bool_scalar: "},
      {shift_added, "attention_mask_add_scalar: "},
      {one_mask_for_all_rows, "attention_mask_add_scalar: "},
      {forget_sinks, "attention_sinks_scalar: "},
      {wrong_softcap, "attention_softcap_scalar: "},
      {forget_slopes, "attention_alibi_scalar: "},
      {read_past_length, "nan, want"},
      {nan_in_out, "nan, want"},
      {zero_in_out, "got 0, want"},
      {write_before_out, "byte"},
      {write_past_workspace, "workspace byte"},
      {wrong_lse, "lse of"},
      {no_lse, "nan, want"},
      {first_head_for_all, "head 2"},
      {zero_for_nan, "not finite"},
      {zero_for_nan, "-inf throughout"},
      {infinity_for_nan, "got inf, want"},
      {attend_elsewhere, "another kernel ran"},
  };
  assert_honest("attention", "affine4");
  for (size_t i = 0; i < sizeof liars / sizeof liars[0]; i++) {
    check_library library = check_nybble;
    library.attention = liars[i].attention;
    assert_caught(&library, "attention", "affine4", liars[i].words);
  }
}

static void test_attention_liars_of_bits(void **state) {
  (void)state;
  check_library library = check_nybble;
  library.attention = differ_on_seven_threads;
  assert_caught(&library, "attention", "plain_bf16", "bits differ on 7 threads");
  library.attention = differ_now_and_then;
  assert_caught(&library, "attention", "plain_bf16", "bits differ");
  library.attention = differ_alone;
  assert_caught(&library, "attention", "plain_bf16", "without its neighbours");
  library.attention = differ_with_rows;
  assert_caught(&library, "attention", "affine2", "depend on the number of rows");
}

static nyb_status attend_padding(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.starts = NULL;
  return TRUTH(&other);
}

static nyb_status unroll_ring(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  other.ring = (nyb_ring){0};
  return TRUTH(&other);
}

/* The rows of a page in reverse order. */
static nyb_status reverse_pages(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  if (a->pages.table != NULL) {
    const int64_t bytes = a->v.format.scheme == NYB_PLAIN && a->v.format.dtype != NYB_F32 ? 2 : 4;
    other.v.codes =
        (const char *)a->v.codes + (a->pages.page_tokens - 1) * a->v.codes_stride[2] * bytes;
    other.v.codes_stride[2] = -a->v.codes_stride[2];
  }
  return TRUTH(&other);
}

static nyb_status take_scales_for_biases(LIAR_ARGUMENTS) {
  nyb_attention other = *a;
  if (a->first.tokens > 0 || a->last.tokens > 0) other.v.biases = a->v.scales;
  return TRUTH(&other);
}

static void test_liars_about_places(void **state) {
  (void)state;
  check_library library = check_nybble;
  library.attention = attend_padding;
  assert_caught(&library, "attention", "affine4", "attention_starts_scalar");
  library.attention = unroll_ring;
  assert_caught(&library, "attention", "affine4", "attention_ring_scalar");
  library.attention = reverse_pages;
  assert_caught(&library, "attention", "plain_bf16", "attention_pages_scalar");
  library.attention = take_scales_for_biases;
  assert_caught(&library, "attention", "affine4", "attention_parts_scalar");
}

/* ---- Merging ------------------------------------------------------------------------------ */

static nyb_status drop_last_part(nyb_context *context, const nyb_attention_merge *m,
                                 nyb_stream stream) {
  nyb_attention_merge other = *m;
  other.parts = m->parts > 1 ? m->parts - 1 : 1;
  return nyb_attention_merge_run(context, &other, stream);
}

static nyb_status merge_last_bit(nyb_context *context, const nyb_attention_merge *m,
                                 nyb_stream stream) {
  const nyb_status status = nyb_attention_merge_run(context, m, stream);
  ((uint8_t *)m->out.data)[0] ^= 1;
  return status;
}

static nyb_status merge_past_the_end(nyb_context *context, const nyb_attention_merge *m,
                                     nyb_stream stream) {
  const nyb_status status = nyb_attention_merge_run(context, m, stream);
  oracle_store(m->out.data, m->out.dtype, -1, 0);
  return status;
}

static nyb_status merge_without_lse(nyb_context *context, const nyb_attention_merge *m,
                                    nyb_stream stream) {
  nyb_attention_merge other = *m;
  other.lse.data = NULL;
  return nyb_attention_merge_run(context, &other, stream);
}

static nyb_status lse_off_by_little(nyb_context *context, const nyb_attention_merge *m,
                                    nyb_stream stream) {
  const nyb_status status = nyb_attention_merge_run(context, m, stream);
  if (m->lse.data != NULL) *(float *)m->lse.data *= 1 + 0x1p-22f;
  return status;
}

static nyb_status merge_elsewhere(nyb_context *context, const nyb_attention_merge *m,
                                  nyb_stream stream) {
  (void)context;
  return nyb_attention_merge_run(other_context(), m, stream);
}

static void test_merge_liars(void **state) {
  (void)state;
  static const struct {
    nyb_status (*merge)(nyb_context *context, const nyb_attention_merge *m, nyb_stream stream);
    const char *words;
  } liars[] = {
      {drop_last_part, "lse of row 0"},     {merge_last_bit, "out of row 0 element 0"},
      {merge_past_the_end, "is no output"}, {merge_without_lse, "nan, want"},
      {lse_off_by_little, "lse of row 0"},  {merge_elsewhere, "was not counted"},
  };
  assert_honest("attention_merge", NULL);
  for (size_t i = 0; i < sizeof liars / sizeof liars[0]; i++) {
    check_library library = check_nybble;
    library.merge = liars[i].merge;
    assert_caught(&library, "attention_merge", NULL, liars[i].words);
  }
}

/* ---- The comparison itself ---------------------------------------------------------------- */

static void test_comparison(void **state) {
  (void)state;
  assert_true(oracle_within(NYB_F32, 1, 1, 0));
  assert_false(oracle_within(NYB_F32, NAN, 1, 1e30));
  assert_false(oracle_within(NYB_F32, NAN, INFINITY, 0));
  assert_false(oracle_within(NYB_F32, 1 + 0x1p-23, 1, 0));
  assert_false(oracle_within(NYB_F32, INFINITY, 1, 1));
  assert_true(oracle_within(NYB_F32, -INFINITY, -INFINITY, 0));
  assert_false(oracle_within(NYB_F32, 0, -INFINITY, 0));
  /* 1.001 lies nearer to 1 than to bf16's next number, 1.0078125 */
  assert_true(oracle_within(NYB_BF16, 1, 1.001, 0));
  assert_false(oracle_within(NYB_BF16, 1.0078125, 1.001, 0));
  assert_true(oracle_within(NYB_BF16, 1.0078125, 1.001, 0.004));
}

/* A kernel that no check reaches is a failure, not a pass. */
static nyb_status refuse(LIAR_ARGUMENTS) {
  (void)context, (void)a, (void)workspace, (void)workspace_bytes, (void)stream;
  return NYB_ERROR_UNSUPPORTED;
}

static void test_refusal_is_failure(void **state) {
  (void)state;
  check_library library = check_nybble;
  library.attention = refuse;
  assert_caught(&library, "attention", "affine8", "got NYB_ERROR_UNSUPPORTED");
  check_run *run = run_with(&library, "attention", "affine8");
  const check_tally *values = check_find(run, "attention_values", "affine8", NYB_ISA_SCALAR);
  assert_non_null(values);
  assert_int_equal(values->passed, 0);
  assert_int_equal(values->failed, 1);
  check_free(run);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_comparison),
      cmocka_unit_test(test_quantize_liars),
      cmocka_unit_test(test_geglu_liars),
      cmocka_unit_test(test_attention_liars),
      cmocka_unit_test(test_attention_liars_of_bits),
      cmocka_unit_test(test_liars_about_places),
      cmocka_unit_test(test_merge_liars),
      cmocka_unit_test(test_refusal_is_failure),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  nyb_context_destroy(other_context());
  return failed;
}
