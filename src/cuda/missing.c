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
