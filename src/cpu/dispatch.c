/* SPDX-License-Identifier: Apache-2.0 */
/* The one table of all kernels, expanded from the lists in *.inc. */
#include "../kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#define NYB_FUNCTION_X86(name) ((nyb_any_fn)(name))
#define NYB_DECLARE_X86(name) void name(void);
#else
#define NYB_FUNCTION_X86(name) NULL
#define NYB_DECLARE_X86(name)
#endif
#if defined(__aarch64__)
#define NYB_FUNCTION_ARM(name) ((nyb_any_fn)(name))
#define NYB_DECLARE_ARM(name) void name(void);
#else
#define NYB_FUNCTION_ARM(name) NULL
#define NYB_DECLARE_ARM(name)
#endif
#define NYB_FUNCTION_CUDA(name) NULL
#define NYB_DECLARE_CUDA(name)
#define NYB_FUNCTION_ANY(name) ((nyb_any_fn)(name))
#define NYB_DECLARE_ANY(name) void name(void);

/* The declared type is a placeholder: the entry's operation says what the function takes, and it is
 * cast back to that before it is called. */
#define NYB_KERNEL(operation, OPERATION, format, FORMAT, isa, ISA, FAMILY) \
  NYB_DECLARE_##FAMILY(nyb_##operation##_##format##_##isa)
#include "kernels.inc"
#undef NYB_KERNEL

const nyb_kernel_entry nyb_kernel_entries[] = {
#define NYB_KERNEL(operation, OPERATION, format, FORMAT, isa, ISA, FAMILY)                         \
  {#operation "_" #format "_" #isa, NYB_OPERATION_##OPERATION, NYB_FORMAT_##FORMAT, NYB_ISA_##ISA, \
   NYB_FUNCTION_##FAMILY(nyb_##operation##_##format##_##isa)},
#include "kernels.inc"
#undef NYB_KERNEL
};
const int64_t nyb_kernel_entry_count =
    (int64_t)(sizeof nyb_kernel_entries / sizeof nyb_kernel_entries[0]);

/* Whether a kernel may serve a context of an ISA: that one's own, and what the ISA includes. */
static bool serves(const nyb_kernel_entry *entry, nyb_isa context_isa) {
  if (context_isa == NYB_ISA_CUDA) return entry->isa == NYB_ISA_CUDA;
  if (entry->function == NULL) return false;
  return entry->isa == context_isa || entry->isa == NYB_ISA_SCALAR ||
         (context_isa == NYB_ISA_AVX512 && entry->isa == NYB_ISA_AVX2);
}

void nyb_dispatch_fill(nyb_dispatch *dispatch, nyb_isa isa) {
  for (int operation = 0; operation < NYB_OPERATION_COUNT; operation++) {
    for (int format = 0; format < NYB_FORMAT_COUNT; format++) {
      dispatch->entry[operation][format] = -1;
    }
  }
  for (int64_t i = 0; i < nyb_kernel_entry_count; i++) { /* listed scalar first */
    const nyb_kernel_entry *entry = &nyb_kernel_entries[i];
    if (serves(entry, isa)) {
      dispatch->entry[entry->operation][entry->format] = (int16_t)i;
    }
  }
}

const char *nyb_operation_name(nyb_operation operation) {
  static const char *const names[NYB_OPERATION_COUNT] = {
      [NYB_OPERATION_QUANTIZE] = "quantize",
      [NYB_OPERATION_DEQUANTIZE] = "dequantize",
      [NYB_OPERATION_ATTENTION_QUERIES] = "attention_queries",
      [NYB_OPERATION_ATTENTION_BIAS] = "attention_bias",
      [NYB_OPERATION_ATTENTION_SOFTMAX] = "attention_softmax",
      [NYB_OPERATION_ATTENTION_SCORES] = "attention_scores",
      [NYB_OPERATION_ATTENTION_VALUES] = "attention_values",
      [NYB_OPERATION_ATTENTION_COLUMNS] = "attention_columns",
      [NYB_OPERATION_GEGLU] = "geglu",
      [NYB_OPERATION_CACHE_APPEND] = "cache_append",
      [NYB_OPERATION_ATTENTION_DECODE] = "attention_decode",
      [NYB_OPERATION_ATTENTION_PREFILL] = "attention_prefill",
      [NYB_OPERATION_ATTENTION_GENERAL] = "attention_general",
  };
  return names[operation];
}

const char *nyb_format_id_name(nyb_format_id format) {
  static const char *const names[NYB_FORMAT_COUNT] = {
      [NYB_FORMAT_PLAIN_F32] = "plain_f32",   [NYB_FORMAT_PLAIN_F16] = "plain_f16",
      [NYB_FORMAT_PLAIN_BF16] = "plain_bf16", [NYB_FORMAT_AFFINE2] = "affine2",
      [NYB_FORMAT_AFFINE3] = "affine3",       [NYB_FORMAT_AFFINE4] = "affine4",
      [NYB_FORMAT_AFFINE5] = "affine5",       [NYB_FORMAT_AFFINE6] = "affine6",
      [NYB_FORMAT_AFFINE8] = "affine8",
  };
  return names[format];
}
