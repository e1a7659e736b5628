/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA backend does not do yet. A function that is written goes from here. */
#include "operations.h"

static nyb_status missing(const char *operation) {
  return nyb_fail(NYB_ERROR_UNSUPPORTED, "the CUDA backend has no %s yet", operation);
}

nyb_status nyb_cuda_attention_plan(const nyb_attention_call *call, nyb_path asked, nyb_plan *plan) {
  (void)call, (void)asked, (void)plan;
  return missing("attention");
}

nyb_status nyb_cuda_attention_run(const nyb_attention_call *call, const nyb_plan *plan,
                                  void *workspace, nyb_stream stream) {
  (void)call, (void)plan, (void)workspace, (void)stream;
  return missing("attention");
}

void nyb_cuda_attention_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                               void *data) {
  (void)properties, (void)visit, (void)data;
}

nyb_status nyb_cuda_quantize_run(nyb_context *context, const nyb_quantize *quantize,
                                 const nyb_row_layout *layout, nyb_stream stream) {
  (void)context, (void)quantize, (void)layout, (void)stream;
  return missing("quantize");
}

nyb_status nyb_cuda_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize,
                                   const nyb_row_layout *layout, nyb_stream stream) {
  (void)context, (void)dequantize, (void)layout, (void)stream;
  return missing("dequantize");
}

void nyb_cuda_quantize_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                              void *data) {
  (void)properties, (void)visit, (void)data;
}

nyb_status nyb_cuda_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_path path,
                              nyb_stream stream) {
  (void)context, (void)geglu, (void)path, (void)stream;
  return missing("GeGLU");
}

void nyb_cuda_geglu_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  (void)properties, (void)visit, (void)data;
}

nyb_status nyb_cuda_cache_create(nyb_cache *cache) {
  (void)cache;
  return missing("KV cache");
}

void nyb_cuda_cache_destroy(nyb_cache *cache) { (void)cache; }

nyb_status nyb_cuda_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream) {
  (void)cache, (void)append, (void)stream;
  return missing("KV cache");
}

nyb_status nyb_cuda_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  (void)cache, (void)tokens, (void)stream;
  return missing("KV cache");
}

nyb_status nyb_cuda_cache_trim(nyb_cache *cache, int64_t first, int64_t end, int64_t tokens,
                               int64_t *most, nyb_stream stream) {
  (void)cache, (void)first, (void)end, (void)tokens, (void)most, (void)stream;
  return missing("KV cache");
}

nyb_status nyb_cuda_cache_refresh(nyb_cache *cache, nyb_stream stream) {
  (void)cache, (void)stream;
  return missing("KV cache");
}

void nyb_cuda_cache_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  (void)properties, (void)visit, (void)data;
}
