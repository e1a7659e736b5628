/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_quantize_run and nyb_dequantize_run on CUDA: a lane of eight elements for each thread. */
#include "operations.h"
#include "programs.h"
#include "rows.h"

enum { WIDE_BYTES = 16 }; /* of the widest access */

/* In bytes; 0 where an axis is too short for its stride to matter. */
static void strides_in_bytes(const int64_t stride[3], size_t element_bytes, const int64_t shape[3],
                             long long bytes[3]) {
  for (int axis = 0; axis < 3; axis++) {
    bytes[axis] = shape[axis] > 1 ? stride[axis] * (int64_t)element_bytes : 0;
  }
}

/* Whether every row begins at a multiple of WIDE_BYTES, and with it every lane. */
static bool is_wide(const void *data, const long long stride_bytes[3]) {
  return (uintptr_t)data % WIDE_BYTES == 0 && stride_bytes[0] % WIDE_BYTES == 0 &&
         stride_bytes[1] % WIDE_BYTES == 0 && stride_bytes[2] % WIDE_BYTES == 0;
}

/* log2 of a group's lanes. */
static int group_shift_of(const nyb_row_layout *layout) {
  int shift = 0;
  while (layout->affine && NYB_LANE_ELEMENTS << shift < layout->group_size) shift++;
  return shift;
}

nyb_device_rows nyb_cuda_rows_of(const nyb_input *floats, const nyb_stored *stored,
                                 const nyb_row_layout *layout, const int64_t shape[3],
                                 int64_t dim) {
  /* The device writes only to what is its output; here nobody does. */
  nyb_device_rows rows = {
      .input = floats->data,
      .codes = (char *)(uintptr_t)stored->codes,
      .scales = (char *)(uintptr_t)stored->scales,
      .biases = (char *)(uintptr_t)stored->biases,
      .dim = dim,
      .lanes = nyb_divider_of(nyb_quotient_up(dim, NYB_LANE_ELEMENTS)),
      .input_dtype = (int)floats->dtype,
      .stored_dtype = (int)stored->format.dtype,
      .bits = layout->affine ? (int)layout->bits : 0,
      .group_shift = group_shift_of(layout),
  };
  strides_in_bytes(floats->stride, nyb_dtype_bytes(floats->dtype), shape, rows.input_stride);
  strides_in_bytes(stored->codes_stride, layout->code_bytes, shape, rows.codes_stride);
  strides_in_bytes(stored->scales_stride, layout->scale_bytes, shape, rows.scales_stride);
  strides_in_bytes(stored->biases_stride, layout->scale_bytes, shape, rows.biases_stride);
  rows.wide_input = is_wide(rows.input, rows.input_stride);
  rows.wide_codes = is_wide(rows.codes, rows.codes_stride);
  return rows;
}

static nyb_status launch(const nyb_cuda_program *program, nyb_cuda_scope *scope,
                         nyb_device_quantize *call, nyb_stream stream) {
  const nyb_cuda_spec spec = {.program = program};
  const nyb_cuda_kernel *kernel;
  const nyb_status status = nyb_cuda_kernel_get(scope, &spec, NYB_QUANTIZE_THREADS, 0, &kernel);
  if (status != NYB_OK) return status;
  const int64_t blocks = nyb_quotient_up(call->lanes, NYB_QUANTIZE_THREADS);
  const int64_t grid[3] = {blocks < INT32_MAX ? blocks : INT32_MAX, 1, 1};
  return nyb_cuda_launch(scope, kernel, grid, call, stream, true);
}

static nyb_status check_stored(const nyb_cuda_scope *scope, const char *owner,
                               const nyb_stored *stored) {
  nyb_status status = nyb_cuda_check_pointer(scope, owner, "codes", stored->codes);
  if (status != NYB_OK || stored->format.scheme != NYB_AFFINE) return status;
  status = nyb_cuda_check_pointer(scope, owner, "scales", stored->scales);
  if (status != NYB_OK) return status;
  return nyb_cuda_check_pointer(scope, owner, "biases", stored->biases);
}

static nyb_device_quantize call_of(const nyb_device_rows *rows, const int64_t shape[3]) {
  return (nyb_device_quantize){
      .rows = *rows,
      .heads = nyb_divider_of(shape[1]),
      .tokens = nyb_divider_of(shape[2]),
      .lanes = shape[0] * shape[1] * shape[2] * rows->lanes.divisor,
  };
}

nyb_status nyb_cuda_quantize_run(nyb_context *context, const nyb_quantize *quantize,
                                 const nyb_row_layout *layout, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(context, &scope);
  if (status != NYB_OK) return status;
  const nyb_stored stored = nyb_stored_from_output(&quantize->output);
  status = nyb_cuda_check_pointer(&scope, "quantize.input", "data", quantize->input.data);
  if (status == NYB_OK) status = check_stored(&scope, "quantize.output", &stored);
  if (status == NYB_OK) {
    status = nyb_cuda_check_pointer(&scope, "quantize", "non_finite", quantize->non_finite);
  }
  if (status == NYB_OK) {
    const int64_t shape[3] = {quantize->batch, quantize->heads, quantize->tokens};
    const nyb_device_rows rows =
        nyb_cuda_rows_of(&quantize->input, &stored, layout, shape, quantize->dim);
    nyb_device_quantize call = call_of(&rows, shape);
    call.non_finite = quantize->non_finite;
    call.rule = (int)quantize->rule;
    status = launch(&nyb_cuda_program_quantize, &scope, &call, stream);
  }
  nyb_cuda_leave(&scope);
  return status;
}

nyb_status nyb_cuda_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize,
                                   const nyb_row_layout *layout, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(context, &scope);
  if (status != NYB_OK) return status;
  const nyb_output *output = &dequantize->output;
  status = nyb_cuda_check_pointer(&scope, "dequantize.output", "data", output->data);
  if (status == NYB_OK) status = check_stored(&scope, "dequantize.input", &dequantize->input);
  if (status == NYB_OK) {
    const int64_t shape[3] = {dequantize->batch, dequantize->heads, dequantize->tokens};
    const nyb_input floats = {
        .data = output->data,
        .dtype = output->dtype,
        .stride = {output->stride[0], output->stride[1], output->stride[2]},
    };
    const nyb_device_rows rows =
        nyb_cuda_rows_of(&floats, &dequantize->input, layout, shape, dequantize->dim);
    nyb_device_quantize call = call_of(&rows, shape);
    status = launch(&nyb_cuda_program_dequantize, &scope, &call, stream);
  }
  nyb_cuda_leave(&scope);
  return status;
}

void nyb_cuda_quantize_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                              void *data) {
  (void)properties; /* every format and dtype, on every device */
  const nyb_cuda_spec quantize = {.program = &nyb_cuda_program_quantize};
  const nyb_cuda_spec dequantize = {.program = &nyb_cuda_program_dequantize};
  visit(data, &quantize, true);
  visit(data, &dequantize, true);
}
