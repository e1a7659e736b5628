/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_quantize_run and nyb_dequantize_run: check, cut into runs of rows, call the kernels. */
#include "quantize.h"

#include <math.h>
#include <stdio.h>

#include "cuda/operations.h"
#include "format.h"
#include "numeric.h"
#include "views.h"

/* About this many elements make a task: enough to hide the cost of handing it out, and few enough
 * that a call of a few rows is spread as well. */
#define NYB_TASK_ELEMENTS ((int64_t)1 << 16)

/* ---- What both directions share ----------------------------------------------------------- */

/* Rows of floats beside stored rows, [batch, heads, tokens] of each. */
typedef struct rows_call {
  int64_t shape[3];
  int64_t dim;
  int64_t rows; /* the product of shape */
  nyb_input floats;
  nyb_stored stored;
  nyb_row_layout layout;
  int64_t rows_per_run; /* that follow each other without a gap on both sides */
} rows_call;

typedef enum direction { QUANTIZE, DEQUANTIZE } direction;

static nyb_status check_shape(direction way, rows_call *call) {
  static const char *const axes[3] = {"batch", "heads", "tokens"};
  const char *name = way == QUANTIZE ? "quantize" : "dequantize";
  call->rows = 1;
  for (int axis = 0; axis < 3; axis++) {
    if (call->shape[axis] < 0) {
      return nyb_fail(NYB_ERROR_SHAPE, "%s.%s is %lld; it must not be negative", name, axes[axis],
                      (long long)call->shape[axis]);
    }
    if (__builtin_mul_overflow(call->rows, call->shape[axis], &call->rows)) {
      return nyb_fail(
          NYB_ERROR_SHAPE, "%s has %lld x %lld x %lld rows; their number must fit int64", name,
          (long long)call->shape[0], (long long)call->shape[1], (long long)call->shape[2]);
    }
  }
  return NYB_OK;
}

static nyb_status check_memory(direction way, const rows_call *call) {
  nyb_view views[1 + NYB_STORED_MAX_VIEWS];
  nyb_extent extents[1 + NYB_STORED_MAX_VIEWS];
  views[0] = nyb_rows_view(way == QUANTIZE ? "quantize.input" : "dequantize.output", "data",
                           call->floats.data, nyb_dtype_bytes(call->floats.dtype), call->dim,
                           call->shape, call->floats.stride);
  const int count = 1 + nyb_stored_views(&call->layout, &call->stored,
                                         way == QUANTIZE ? "quantize.output" : "dequantize.input",
                                         call->shape, &views[1]);
  for (int i = 0; i < count; i++) {
    const bool is_output = (i == 0) == (way == DEQUANTIZE);
    const nyb_status status = is_output ? nyb_extent_of_output(&views[i], &extents[i])
                                        : nyb_extent_of(&views[i], &extents[i]);
    if (status != NYB_OK) return status;
  }
  /* Of two views at least one is an output, but for the parts of what dequantize reads. */
  for (int i = 1; i < count; i++) {
    for (int j = 0; j < (way == QUANTIZE ? i : 1); j++) {
      const nyb_status status = way == QUANTIZE ? nyb_check_apart(&extents[i], &extents[j])
                                                : nyb_check_apart(&extents[j], &extents[i]);
      if (status != NYB_OK) return status;
    }
  }
  return NYB_OK;
}

/* How many rows follow each other without a gap on both sides, so that a kernel can take them as
 * one span. */
static int64_t adjacent_rows(const rows_call *call) {
  const nyb_row_layout *layout = &call->layout;
  if (call->rows == 0) return 1; /* such strides have not been checked for overflow */
  int64_t rows = 1;
  for (int axis = 2; axis >= 0; axis--) {
    const bool adjacent =
        call->floats.stride[axis] == rows * call->dim &&
        call->stored.codes_stride[axis] == rows * layout->codes &&
        (!layout->affine || (call->stored.scales_stride[axis] == rows * layout->groups &&
                             call->stored.biases_stride[axis] == rows * layout->groups));
    if (call->shape[axis] != 1 && !adjacent) break;
    rows *= call->shape[axis];
  }
  return rows;
}

static nyb_status check_call(direction way, rows_call *call) {
  nyb_status status = check_shape(way, call);
  if (status != NYB_OK) return status;
  status = nyb_check_dtype(way == QUANTIZE ? "quantize.input.dtype" : "dequantize.output.dtype",
                           call->floats.dtype);
  if (status != NYB_OK) return status;
  status = nyb_format_check(
      &call->stored.format, way == QUANTIZE ? "quantize.output.format" : "dequantize.input.format",
      call->dim, way == QUANTIZE ? "quantize.dim" : "dequantize.dim", &call->layout);
  if (status != NYB_OK) return status;
  status = check_memory(way, call);
  if (status != NYB_OK) return status;
  call->rows_per_run = adjacent_rows(call);
  return NYB_OK;
}

static nyb_status check_arguments(const nyb_context *context, const void *descriptor,
                                  const char *name, nyb_stream stream) {
  if (context == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "context is NULL; nyb_context_create makes one");
  }
  if (descriptor == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; it must point to an nyb_%s", name, name);
  }
  return nyb_check_stream(context, stream);
}

/* ---- Cutting into tasks and spans --------------------------------------------------------- */

static int64_t rows_per_task(const rows_call *call) {
  return call->dim >= NYB_TASK_ELEMENTS ? 1 : NYB_TASK_ELEMENTS / call->dim;
}

static int64_t task_count(const rows_call *call) {
  const int64_t per_task = rows_per_task(call);
  return call->rows / per_task + (call->rows % per_task != 0);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void indices_of_row(const rows_call *call, int64_t row, int64_t indices[3]) {
  indices[2] = row % call->shape[2];
  indices[1] = row / call->shape[2] % call->shape[1];
  indices[0] = row / call->shape[2] / call->shape[1];
}

static const char *float_row(const rows_call *call, const int64_t indices[3]) {
  const int64_t offset = nyb_row_offset(call->floats.stride, indices[0], indices[1], indices[2]);
  return (const char *)call->floats.data + offset * (int64_t)nyb_dtype_bytes(call->floats.dtype);
}

static nyb_stored_row stored_row(const rows_call *call, const int64_t indices[3]) {
  return nyb_stored_row_at(&call->stored, indices[0], indices[1], indices[2]);
}

/* Calls visit(work, row, rows) for each run of adjacent rows of a task, until it returns false. */
typedef bool (*visit_run)(void *work, int64_t row, int64_t rows);

static void visit_task(const rows_call *call, int64_t task, visit_run visit, void *work) {
  const int64_t per_task = rows_per_task(call);
  const int64_t end = smaller(task * per_task + per_task, call->rows);
  int64_t row = task * per_task;
  while (row < end) {
    const int64_t rows = smaller(end - row, call->rows_per_run - row % call->rows_per_run);
    if (!visit(work, row, rows)) return;
    row += rows;
  }
}

/* ---- quantize ----------------------------------------------------------------------------- */

typedef struct quantize_work {
  rows_call call;
  nyb_rule rule;
  nyb_quantize_fn kernel;
  bool write;
  _Atomic int64_t first_refused; /* or call.rows */
} quantize_work;

static nyb_quantize_span quantize_span(const quantize_work *work, int64_t row, int64_t rows) {
  const rows_call *call = &work->call;
  int64_t indices[3];
  indices_of_row(call, row, indices);
  nyb_quantize_span span = {
      .input = float_row(call, indices),
      .input_dtype = call->floats.dtype,
      .groups = rows * call->layout.groups,
      .group_size = call->layout.group_size,
      .rule = work->rule,
      .scale_dtype = call->stored.format.dtype,
  };
  if (!work->write) return span;
  const nyb_stored_row stored = stored_row(call, indices); /* an output, as the caller gave it */
  span.codes = (void *)(uintptr_t)stored.codes;
  span.scales = (void *)(uintptr_t)stored.scales;
  span.biases = (void *)(uintptr_t)stored.biases;
  return span;
}

static bool quantize_rows(void *visited, int64_t row, int64_t rows) {
  quantize_work *work = visited;
  const nyb_quantize_span span = quantize_span(work, row, rows);
  const int64_t done = work->kernel(&span);
  if (done == span.groups) return true;
  nyb_note_refused(&work->first_refused, row + done / work->call.layout.groups);
  return false;
}

static void quantize_task(void *task_data, int64_t index) {
  quantize_work *work = task_data;
  visit_task(&work->call, index, quantize_rows, work);
}

nyb_status nyb_quantize_refuse(const nyb_quantize_span *span, nyb_quantize_fn kernel,
                               const char *tensor, int64_t batch, int64_t head, int64_t token) {
  const int64_t group = kernel(span), first = group * span->group_size;
  char where[128];
  snprintf(where, sizeof where, "%s at batch %lld, head %lld, token %lld", tensor, (long long)batch,
           (long long)head, (long long)token);
  float minimum = INFINITY, maximum = -INFINITY;
  for (int64_t element = first; element < first + span->group_size; element++) {
    const float value = nyb_load_f32(span->input, span->input_dtype, element);
    if (!isfinite(value)) {
      return nyb_fail(NYB_ERROR_NON_FINITE, "%s, element %lld, is %s; every value must be finite",
                      where, (long long)element, nyb_non_finite_name(value));
    }
    minimum = fminf(minimum, value);
    maximum = fmaxf(maximum, value);
  }
  if (span->group_size == 1) {
    return nyb_fail(NYB_ERROR_NON_FINITE,
                    "%s, element %lld, is %g; it must fit the dtype of the stored elements", where,
                    (long long)first, (double)maximum);
  }
  return nyb_fail(NYB_ERROR_NON_FINITE,
                  "%s, group %lld, goes from %g to %g; this range must fit f32, and its scale and "
                  "bias the dtype in which they are stored",
                  where, (long long)group, (double)minimum, (double)maximum);
}

static nyb_status refuse_row(const quantize_work *work, int64_t row) {
  int64_t indices[3];
  indices_of_row(&work->call, row, indices);
  const nyb_quantize_span span = quantize_span(work, row, 1);
  return nyb_quantize_refuse(&span, work->kernel, "quantize.input", indices[0], indices[1],
                             indices[2]);
}

nyb_status nyb_check_rule(const char *field, nyb_rule rule) {
  if (rule == NYB_RULE_MLX_CPU || rule == NYB_RULE_MLX_GPU) return NYB_OK;
  return nyb_fail(NYB_ERROR_ENUM, "%s is %d; it must be NYB_RULE_MLX_CPU or NYB_RULE_MLX_GPU",
                  field, (int)rule);
}

nyb_status nyb_check_flag(const nyb_context *context, const char *field, const int32_t *flag) {
  if (flag == NULL || nyb_on_cuda(context)) return NYB_OK;
  return nyb_fail(NYB_ERROR_VALUE, "%s is %p; it must be NULL on the CPU", field, (void *)flag);
}

static nyb_status check_quantize(const nyb_context *context, const nyb_quantize *quantize,
                                 quantize_work *work) {
  nyb_status status =
      nyb_check_struct("quantize", quantize, quantize->struct_size, sizeof *quantize);
  if (status == NYB_OK) status = nyb_check_rule("quantize.rule", quantize->rule);
  if (status != NYB_OK) return status;
  if (quantize->reserved != 0) {
    return nyb_fail(NYB_ERROR_VALUE, "quantize.reserved is %d; it must be 0",
                    (int)quantize->reserved);
  }
  status = nyb_check_flag(context, "quantize.non_finite", quantize->non_finite);
  if (status != NYB_OK) return status;
  work->rule = quantize->rule;
  work->call = (rows_call){
      .shape = {quantize->batch, quantize->heads, quantize->tokens},
      .dim = quantize->dim,
      .floats = quantize->input,
      .stored = nyb_stored_from_output(&quantize->output),
  };
  return check_call(QUANTIZE, &work->call);
}

/* All is checked before anything is written. */
static nyb_status quantize_here(nyb_context *context, quantize_work *work) {
  const int64_t tasks = task_count(&work->call);
  work->kernel =
      (nyb_quantize_fn)nyb_kernel_for(context, NYB_OPERATION_QUANTIZE, work->call.layout.id);
  atomic_init(&work->first_refused, work->call.rows);
  nyb_parallel(context, tasks, quantize_task, work);
  const int64_t refused = atomic_load_explicit(&work->first_refused, memory_order_relaxed);
  if (refused < work->call.rows) return refuse_row(work, refused);
  work->write = true;
  nyb_parallel(context, tasks, quantize_task, work);
  return NYB_OK;
}

nyb_status nyb_quantize_run(nyb_context *context, const nyb_quantize *quantize, nyb_stream stream) {
  quantize_work work = {0};
  nyb_status status = check_arguments(context, quantize, "quantize", stream);
  if (status == NYB_OK) status = check_quantize(context, quantize, &work);
  if (status != NYB_OK) return status;
  if (!nyb_on_cuda(context)) {
    status = quantize_here(context, &work);
  } else if (work.call.rows > 0) {
    status = nyb_cuda_quantize_run(context, quantize, &work.call.layout, stream);
  }
  if (status != NYB_OK) return status;
  nyb_count_kernel(context, NYB_OPERATION_QUANTIZE, work.call.layout.id);
  nyb_count(context, NYB_COUNTER_QUANTIZE);
  return NYB_OK;
}

/* ---- dequantize --------------------------------------------------------------------------- */

typedef struct dequantize_work {
  rows_call call;
  nyb_dequantize_fn kernel;
} dequantize_work;

static bool dequantize_rows(void *visited, int64_t row, int64_t rows) {
  const dequantize_work *work = visited;
  const rows_call *call = &work->call;
  int64_t indices[3];
  indices_of_row(call, row, indices);
  const nyb_stored_row stored = stored_row(call, indices);
  const nyb_dequantize_span span = {
      .codes = stored.codes,
      .scales = stored.scales,
      .biases = stored.biases,
      .scale_dtype = call->stored.format.dtype,
      .groups = rows * call->layout.groups,
      .group_size = call->layout.group_size,
      .output = (void *)(uintptr_t)float_row(call, indices), /* as the caller gave it */
      .output_dtype = call->floats.dtype,
  };
  work->kernel(&span);
  return true;
}

static void dequantize_task(void *task_data, int64_t index) {
  dequantize_work *work = task_data;
  visit_task(&work->call, index, dequantize_rows, work);
}

static nyb_status check_dequantize(const nyb_dequantize *dequantize, dequantize_work *work) {
  const nyb_status status =
      nyb_check_struct("dequantize", dequantize, dequantize->struct_size, sizeof *dequantize);
  if (status != NYB_OK) return status;
  const nyb_output *output = &dequantize->output;
  work->call = (rows_call){
      .shape = {dequantize->batch, dequantize->heads, dequantize->tokens},
      .dim = dequantize->dim,
      .floats = {.data = output->data,
                 .dtype = output->dtype,
                 .stride = {output->stride[0], output->stride[1], output->stride[2]}},
      .stored = dequantize->input,
  };
  return check_call(DEQUANTIZE, &work->call);
}

nyb_status nyb_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize,
                              nyb_stream stream) {
  dequantize_work work = {0};
  nyb_status status = check_arguments(context, dequantize, "dequantize", stream);
  if (status == NYB_OK) status = check_dequantize(dequantize, &work);
  if (status != NYB_OK) return status;
  const nyb_format_id id = work.call.layout.id;
  if (!nyb_on_cuda(context)) {
    work.kernel = (nyb_dequantize_fn)nyb_kernel_for(context, NYB_OPERATION_DEQUANTIZE, id);
    nyb_parallel(context, task_count(&work.call), dequantize_task, &work);
  } else if (work.call.rows > 0) {
    status = nyb_cuda_dequantize_run(context, dequantize, &work.call.layout, stream);
    if (status != NYB_OK) return status;
  }
  nyb_count_kernel(context, NYB_OPERATION_DEQUANTIZE, id);
  nyb_count(context, NYB_COUNTER_DEQUANTIZE);
  return NYB_OK;
}
