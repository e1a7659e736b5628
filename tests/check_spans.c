/* SPDX-License-Identifier: Apache-2.0 */
#include "check_spans.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "../src/kernels.h"
#include "../src/numeric.h"

/* Above two batches of groups, and no multiple of any vector. */
enum { MOST_GROUPS = 69, MOST_ELEMENTS = MOST_GROUPS * 128, GUARD_BYTES = 64 };
static const int32_t group_counts[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 69};
enum { GROUP_COUNTS = sizeof group_counts / sizeof group_counts[0] };

/* Shifted by 4 bytes from 64: no more alignment than the contract asks for. */
typedef struct guarded {
  _Alignas(64) uint8_t bytes[4 + GUARD_BYTES + MOST_ELEMENTS * 4 + GUARD_BYTES];
} guarded;

static void *inside(guarded *memory) { return memory->bytes + GUARD_BYTES + 4; }

static void poison(guarded *memory) { memset(memory->bytes, 0xff, sizeof memory->bytes); }

/* ---- Elements ----------------------------------------------------------------------------- */

static uint64_t random_state;

static uint32_t random_bits(void) { /* the upper half of a linear congruential step */
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(random_state >> 32);
}

static float random_uniform(void) { return (float)random_bits() * 0x1p-32f; }

/* Bell-shaped enough. */
static float random_spread(void) {
  return (random_uniform() + random_uniform() + random_uniform() + random_uniform() - 2) * 2;
}

enum { ELEMENT_KINDS = 15 };

/* Element i of a group of its kind; all are finite in every dtype. */
static float element_of(uint32_t kind, int32_t i, float level) {
  switch (kind % ELEMENT_KINDS) {
    case 0: return random_spread();
    case 1: return -5 + random_uniform();
    case 2: return 0;
    case 3: return i % 2 != 0 ? 0.0f : -0.0f;
    case 4: return level;
    case 5: return (float)i * 1e-9f;
    case 6: return random_spread() * 0x1p-22f;
    case 7: return random_spread() * 0x1p-135f;
    case 8: return (random_uniform() - 0.5f) * 120000;
    case 9: return (float)(i % 16) / 2 * (level < 0 ? -1.0f : 1.0f);
    case 10: return i == 3 ? 300 * level : random_spread();
    case 11: return i % 2 != 0 ? 7.5f : -7.5f;
    case 12: return 1000 + random_spread();
    case 13: return random_spread() * 1e-7f;
    default: { /* at or just below half of the least scale: quotients next to 1/2, of either sign */
      const uint32_t below = level < 0 ? 1 : (uint32_t)i % 3;
      const float half = nyb_f32_from_bits(nyb_bits_from_f32(0.5e-7f) - below);
      return i % 2 != 0 ? half : -half;
    }
  }
}

static void fill_elements(void *data, nyb_dtype dtype, int64_t groups, int32_t group_size) {
  for (int64_t group = 0; group < groups; group++) {
    const uint32_t kind = random_bits();
    const float level = random_spread() * 9;
    for (int32_t i = 0; i < group_size; i++) {
      nyb_store_f32(data, dtype, group * group_size + i, element_of(kind, i, level));
    }
  }
}

/* Magnitudes that f16 cannot hold, in a dtype that can; the kernels must say so for f16. */
static void fill_huge(void *data, nyb_dtype dtype, int64_t elements) {
  for (int64_t i = 0; i < elements; i++) {
    const float value = random_spread() * (dtype == NYB_F16 ? 16000.0f : 0x1p+125f);
    nyb_store_f32(data, dtype, i, value);
  }
}

/* ---- Reporting ---------------------------------------------------------------------------- */

static void judge(spans_report *report, bool good, const char *kernel, const char *what,
                  nyb_dtype input, nyb_dtype scale, int32_t group_size, int64_t groups) {
  if (good) {
    report->passed++;
    return;
  }
  if (report->failed++ == 0) {
    snprintf(report->first_failure, sizeof report->first_failure,
             "%s: %s, %zu-byte floats (dtype %d), scales of dtype %d, %lld groups of %d", kernel,
             what, nyb_dtype_bytes(input), (int)input, (int)scale, (long long)groups,
             (int)group_size);
  }
}

/* ---- quantize ----------------------------------------------------------------------------- */

static struct {
  guarded input, codes, scales, biases, want_codes, want_scales, want_biases;
} quantized;

static bool is_affine(nyb_format_id format) { return format >= NYB_FORMAT_AFFINE2; }

static int bits_of(nyb_format_id format) {
  static const int bits[NYB_FORMAT_COUNT] = {32, 16, 16, 2, 3, 4, 5, 6, 8};
  return bits[format];
}

static bool same(const guarded *a, const guarded *b) {
  return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* Both kernels on the same span. Where they stop early only what lies before must agree, so that
 * the rest is forgotten. */
static void compare_quantize(spans_report *report, const nyb_kernel_entry *kernel,
                             const nyb_kernel_entry *scalar, nyb_quantize_span span,
                             const char *what) {
  poison(&quantized.codes), poison(&quantized.scales), poison(&quantized.biases);
  poison(&quantized.want_codes), poison(&quantized.want_scales), poison(&quantized.want_biases);
  const int64_t check_only = ((nyb_quantize_fn)kernel->function)(&span);
  span.codes = inside(&quantized.codes);
  span.scales = inside(&quantized.scales);
  span.biases = inside(&quantized.biases);
  const int64_t done = ((nyb_quantize_fn)kernel->function)(&span);
  span.codes = inside(&quantized.want_codes);
  span.scales = inside(&quantized.want_scales);
  span.biases = inside(&quantized.want_biases);
  const int64_t want = ((nyb_quantize_fn)scalar->function)(&span);
  if (want < span.groups) {
    const size_t codes_bytes =
        (size_t)(want * span.group_size) * (size_t)bits_of(kernel->format) / 8;
    const size_t groups_bytes = (size_t)want * nyb_dtype_bytes(span.scale_dtype);
    memset((char *)inside(&quantized.codes) + codes_bytes, 0xff, MOST_ELEMENTS * 4 - codes_bytes);
    memset((char *)inside(&quantized.want_codes) + codes_bytes, 0xff,
           MOST_ELEMENTS * 4 - codes_bytes);
    memset((char *)inside(&quantized.scales) + groups_bytes, 0xff, MOST_ELEMENTS - groups_bytes);
    memset((char *)inside(&quantized.biases) + groups_bytes, 0xff, MOST_ELEMENTS - groups_bytes);
  }
  const bool good = check_only == want && done == want &&
                    same(&quantized.codes, &quantized.want_codes) &&
                    same(&quantized.scales, &quantized.want_scales) &&
                    same(&quantized.biases, &quantized.want_biases);
  judge(report, good, kernel->name, what, span.input_dtype, span.scale_dtype, span.group_size,
        span.groups);
}

static void break_one(nyb_quantize_span *span, float with) {
  const int64_t at = random_bits() % (uint32_t)(span->groups * span->group_size);
  nyb_store_f32(inside(&quantized.input), span->input_dtype, at, with);
}

static void quantize_spans(spans_report *report, const nyb_kernel_entry *kernel,
                           const nyb_kernel_entry *scalar, nyb_quantize_span span) {
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  for (int count = 0; count < GROUP_COUNTS; count++) {
    span.groups = group_counts[count];
    if (!is_affine(kernel->format)) span.groups *= 17;
    fill_elements(inside(&quantized.input), span.input_dtype, span.groups, span.group_size);
    compare_quantize(report, kernel, scalar, span, "any");
    break_one(&span, bad[count % 3]);
    compare_quantize(report, kernel, scalar, span, "one is not finite");
    fill_huge(inside(&quantized.input), span.input_dtype, span.groups * span.group_size);
    compare_quantize(report, kernel, scalar, span, "huge");
  }
}

static void check_quantize_kernel(spans_report *report, const nyb_kernel_entry *kernel,
                                  const nyb_kernel_entry *scalar) {
  const bool affine = is_affine(kernel->format);
  for (int i = 0; i < (affine ? 54 : 3); i++) {
    const nyb_quantize_span span = {
        .input = inside(&quantized.input),
        .input_dtype = (nyb_dtype)(NYB_F32 + i % 3),
        .group_size = affine ? 32 << i / 18 : 1,
        .rule = i / 3 % 2 != 0 ? NYB_RULE_MLX_GPU : NYB_RULE_MLX_CPU,
        .scale_dtype = (nyb_dtype)(NYB_F32 + i / 6 % 3),
    };
    quantize_spans(report, kernel, scalar, span);
  }
}

/* ---- dequantize --------------------------------------------------------------------------- */

static struct { guarded codes, scales, biases, output, want_output; } restored;

/* Bits of every kind; `wild` scales hold infinities and NaNs too, and lead to NaNs. */
static void fill_scales(void *data, nyb_dtype dtype, int64_t count, bool wild) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = random_bits();
    float value = random_spread() / 8;
    if (random_bits() % 4 == 0) value = nyb_f32_from_bits(bits);
    if (!wild && !isfinite(nyb_round_to(dtype, value))) value = 1;
    nyb_store_f32(data, dtype, i, value);
  }
}

/* Equal bits, but that any NaN will do for a NaN: which of two it is an instruction set's choice.
 */
static bool same_values(nyb_dtype dtype, int64_t count) {
  const size_t bytes = nyb_dtype_bytes(dtype);
  for (int64_t i = 0; i < count; i++) {
    char *got = (char *)inside(&restored.output) + (size_t)i * bytes;
    const char *want = (const char *)inside(&restored.want_output) + (size_t)i * bytes;
    if (memcmp(got, want, bytes) == 0) continue;
    if (!isnan(nyb_load_f32(got, dtype, 0)) || !isnan(nyb_load_f32(want, dtype, 0))) return false;
    memcpy(got, want, bytes);
  }
  return same(&restored.output, &restored.want_output);
}

static void compare_dequantize(spans_report *report, const nyb_kernel_entry *kernel,
                               const nyb_kernel_entry *scalar, nyb_dequantize_span span,
                               const char *what) {
  poison(&restored.output), poison(&restored.want_output);
  span.output = inside(&restored.output);
  ((nyb_dequantize_fn)kernel->function)(&span);
  span.output = inside(&restored.want_output);
  ((nyb_dequantize_fn)scalar->function)(&span);
  judge(report, same_values(span.output_dtype, span.groups * span.group_size), kernel->name, what,
        span.output_dtype, span.scale_dtype, span.group_size, span.groups);
}

static void check_dequantize_kernel(spans_report *report, const nyb_kernel_entry *kernel,
                                    const nyb_kernel_entry *scalar) {
  const bool affine = is_affine(kernel->format);
  for (int i = 0; i < (affine ? 27 : 3); i++) {
    nyb_dequantize_span span = {
        .codes = inside(&restored.codes),
        .scales = inside(&restored.scales),
        .biases = inside(&restored.biases),
        .scale_dtype = (nyb_dtype)(NYB_F32 + i / 3 % 3),
        .group_size = affine ? 32 << i / 9 : 1,
        .output_dtype = (nyb_dtype)(NYB_F32 + i % 3),
    };
    for (int count = 0; count < GROUP_COUNTS; count++) {
      span.groups = affine ? group_counts[count] : group_counts[count] * 17;
      uint8_t *codes = inside(&restored.codes);
      for (int64_t byte = 0; byte < span.groups * span.group_size * 4; byte++) {
        codes[byte] = (uint8_t)random_bits();
      }
      for (int wild = 0; wild < 2; wild++) {
        fill_scales(inside(&restored.scales), span.scale_dtype, span.groups, wild != 0);
        fill_scales(inside(&restored.biases), span.scale_dtype, span.groups, wild != 0);
        compare_dequantize(report, kernel, scalar, span, wild != 0 ? "wild scales" : "any");
      }
    }
  }
}

/* ---- All of them -------------------------------------------------------------------------- */

static const nyb_kernel_entry *scalar_of(const nyb_kernel_entry *kernel) {
  for (int64_t i = 0; i < nyb_kernel_entry_count; i++) {
    const nyb_kernel_entry *entry = &nyb_kernel_entries[i];
    if (entry->isa == NYB_ISA_SCALAR && entry->operation == kernel->operation &&
        entry->format == kernel->format) {
      return entry;
    }
  }
  return NULL;
}

void check_spans(spans_report *report) {
  *report = (spans_report){0};
  random_state = 1;
  for (int64_t i = 0; i < nyb_kernel_entry_count; i++) {
    const nyb_kernel_entry *kernel = &nyb_kernel_entries[i];
    const bool is_quantize = kernel->operation == NYB_OPERATION_QUANTIZE;
    const char *reason;
    if (!is_quantize && kernel->operation != NYB_OPERATION_DEQUANTIZE) continue;
    if (kernel->isa == NYB_ISA_SCALAR || kernel->function == NULL) continue;
    if (!nyb_isa_runs_here(kernel->isa, &reason)) continue;
    report->kernels++;
    if (is_quantize) {
      check_quantize_kernel(report, kernel, scalar_of(kernel));
    } else {
      check_dequantize_kernel(report, kernel, scalar_of(kernel));
    }
  }
}
