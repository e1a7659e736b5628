/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_attention_merge_run on CUDA: the parts' views to one kernel's parameter. */
#include "attention.h"

#include <stdio.h>

#include "device/attention_combine_arguments.h"

/* Blocks take rows one after the other: they fill a large card many times over. */
enum { MAX_BLOCKS = 16384 };

static int64_t bytes_of(nyb_dtype dtype) { return (int64_t)nyb_dtype_bytes(dtype); }

/* Strides of axes of length 1 lead nowhere, and may be anything. */
static bool same_strides(const nyb_attention_merge *m, const nyb_input *a, const nyb_input *b) {
  const int64_t shape[3] = {m->batch, m->query_heads, m->query_len};
  for (int axis = 0; axis < 3; axis++) {
    if (shape[axis] > 1 && a->stride[axis] != b->stride[axis]) return false;
  }
  return true;
}

static bool share_strides(const nyb_attention_merge *m) {
  for (int64_t part = 1; part < m->parts; part++) {
    if (!same_strides(m, &m->outs[part], &m->outs[0]) ||
        !same_strides(m, &m->lses[part], &m->lses[0])) {
      return false;
    }
  }
  return true;
}

static int64_t step_of(const nyb_input *views) {
  return (int64_t)((uintptr_t)views[1].data - (uintptr_t)views[0].data);
}

static bool evenly_spaced(const nyb_attention_merge *m) {
  if (m->parts < 2) return true;
  const uintptr_t out = (uintptr_t)m->outs[0].data, lse = (uintptr_t)m->lses[0].data;
  for (int64_t part = 1; part < m->parts; part++) {
    if (m->outs[part].dtype != m->outs[0].dtype ||
        (uintptr_t)m->outs[part].data != out + (uintptr_t)(part * step_of(m->outs)) ||
        (uintptr_t)m->lses[part].data != lse + (uintptr_t)(part * step_of(m->lses))) {
      return false;
    }
  }
  return true;
}

static void copy_strides(const int64_t from[3], long long to[3]) {
  for (int axis = 0; axis < 3; axis++) to[axis] = from[axis];
}

static void list_part(const nyb_attention_merge *m, int64_t part, nyb_combine_arguments *a) {
  const nyb_input *out = &m->outs[part], *lse = &m->lses[part];
  long long *words = a->words + part * a->words_of_part;
  words[0] = (long long)(uintptr_t)out->data;
  words[1] = (long long)(uintptr_t)lse->data;
  a->dtypes[part] = (unsigned char)out->dtype;
  if (a->words_of_part < NYB_COMBINE_WORDS_WITH_STRIDES) return;
  copy_strides(out->stride, words + 2);
  copy_strides(lse->stride, words + 5);
}

/* Few parts are listed with their strides, more without, and any number where one leads to the
 * next. */
static nyb_status list_parts(const nyb_attention_merge *m, nyb_combine_arguments *a) {
  const bool shared = share_strides(m);
  a->words_of_part = shared ? NYB_COMBINE_WORDS_OF_POINTERS : NYB_COMBINE_WORDS_WITH_STRIDES;
  copy_strides(m->outs[0].stride, a->part_out_stride);
  copy_strides(m->lses[0].stride, a->part_lse_stride);
  int64_t listed = m->parts;
  if (listed > NYB_COMBINE_WORDS / a->words_of_part) {
    if (!shared || !evenly_spaced(m)) {
      return nyb_fail(NYB_ERROR_UNSUPPORTED,
                      "merge.parts is %lld; on CUDA it must be at most %d, or %d where all parts "
                      "have the same strides, or the parts must lie evenly spaced in one dtype",
                      (long long)m->parts, NYB_COMBINE_WORDS / NYB_COMBINE_WORDS_WITH_STRIDES,
                      NYB_COMBINE_MOST_PARTS);
    }
    a->out_step = step_of(m->outs);
    a->lse_step = step_of(m->lses);
    listed = 1;
  }
  for (int64_t part = 0; part < listed; part++) list_part(m, part, a);
  if (listed < m->parts) a->words_of_part = 0;
  return NYB_OK;
}

static nyb_status check_pointers(const nyb_cuda_scope *scope, const nyb_attention_merge *m) {
  nyb_status status = nyb_cuda_check_pointer(scope, "merge.out", "data", m->out.data);
  if (status == NYB_OK) status = nyb_cuda_check_pointer(scope, "merge.lse", "data", m->lse.data);
  for (int64_t part = 0; part < m->parts && status == NYB_OK; part++) {
    char owner[40];
    snprintf(owner, sizeof owner, "merge.outs[%lld]", (long long)part);
    status = nyb_cuda_check_pointer(scope, owner, "data", m->outs[part].data);
    if (status != NYB_OK) return status;
    snprintf(owner, sizeof owner, "merge.lses[%lld]", (long long)part);
    status = nyb_cuda_check_pointer(scope, owner, "data", m->lses[part].data);
  }
  return status;
}

static nyb_status launch(nyb_cuda_scope *scope, const nyb_attention_merge *m,
                         nyb_combine_arguments *arguments, nyb_stream stream) {
  const nyb_cuda_spec spec = {.program = &nyb_cuda_program_attention_combine};
  const int64_t rows = m->batch * m->query_heads * m->query_len;
  const int64_t grid[3] = {rows < MAX_BLOCKS ? rows : MAX_BLOCKS, 1, 1};
  const nyb_cuda_kernel *kernel;
  const nyb_status status = nyb_cuda_kernel_get(scope, &spec, NYB_COMBINE_THREADS, 0, &kernel);
  if (status != NYB_OK) return status;
  return nyb_cuda_launch(scope, kernel, grid, arguments, stream, false);
}

nyb_status nyb_cuda_attention_merge_run(nyb_context *context, const nyb_attention_merge *m,
                                        nyb_stream stream) {
  nyb_combine_arguments arguments = {
      .parts = m->parts,
      .batch = m->batch,
      .heads = m->query_heads,
      .rows = m->query_len,
      .value_dim = m->value_dim,
      .out = m->out.data,
      .lse = m->lse.data,
      .out_dtype = (int)m->out.dtype,
  };
  nyb_cuda_byte_strides(m->out.stride, bytes_of(m->out.dtype), arguments.out_stride);
  nyb_cuda_byte_strides(m->lse.stride, (int64_t)sizeof(float), arguments.lse_stride);
  nyb_status status = list_parts(m, &arguments);
  if (status != NYB_OK) return status;
  nyb_cuda_scope scope;
  status = nyb_cuda_enter(context, &scope);
  if (status != NYB_OK) return status;
  status = check_pointers(&scope, m);
  if (status == NYB_OK) status = launch(&scope, m, &arguments, stream);
  nyb_cuda_leave(&scope);
  return status;
}
