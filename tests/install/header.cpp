// SPDX-License-Identifier: Apache-2.0
// The header as C++ callers include it: compiled with every warning as an error.
#include <nybble.h>

int main() {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 1;
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  nyb_dequantize dequantize = NYB_DEQUANTIZE_INIT;
  nyb_attention attention = NYB_ATTENTION_INIT;
  nyb_plan plan = NYB_PLAN_INIT;
  nyb_attention_merge merge = NYB_ATTENTION_MERGE_INIT;
  nyb_geglu geglu = NYB_GEGLU_INIT;
  nyb_cache_options cache_options = NYB_CACHE_OPTIONS_INIT;
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  nyb_append append = NYB_APPEND_INIT;
  nyb_kernel kernel = NYB_KERNEL_INIT;
  nyb_counters counters = NYB_COUNTERS_INIT;
  nyb_cuda_info cuda_info = NYB_CUDA_INFO_INIT;
  const bool sized =
      options.struct_size == sizeof options && quantize.struct_size == sizeof quantize &&
      dequantize.struct_size == sizeof dequantize && attention.struct_size == sizeof attention &&
      plan.struct_size == sizeof plan && merge.struct_size == sizeof merge &&
      geglu.struct_size == sizeof geglu && cache_options.struct_size == sizeof cache_options &&
      usage.struct_size == sizeof usage && append.struct_size == sizeof append &&
      kernel.struct_size == sizeof kernel && counters.struct_size == sizeof counters &&
      cuda_info.struct_size == sizeof cuda_info;
  const bool zeroed = attention.mask_array.data == nullptr && attention.lengths == nullptr &&
                      cache_options.batch == 0 && plan.reason[0] == '\0';
  nyb_context *context = nullptr;
  if (nyb_context_create(&options, &context) != NYB_OK) return 2;
  nyb_context_destroy(context);
  return sized && zeroed ? 0 : 1;
}
