/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU on CUDA: which of the kernel's modes, and over how many blocks. */
#include "device/geglu.cuh"
#include "device/geglu_arguments.h"
#include "operations.h"
#include "programs.h"
#include "rows.h"

enum { WIDE_BYTES = 16 };

/* From this many elements on, making the table in every block costs less than going through the
 * steps for every element. */
static int64_t least_for_table(nyb_dtype dtype) {
  return dtype == NYB_F16 ? INT64_C(1) << 22 : INT64_C(1) << 19;
}

static int mode_of(const nyb_geglu *geglu, nyb_path path) {
  if (path == NYB_PATH_COMPAT) return NYB_GEGLU_COMPAT;
  const bool table = geglu->dtype != NYB_F32 &&
                     geglu->rows >= nyb_quotient_up(least_for_table(geglu->dtype), geglu->columns);
  return table ? NYB_GEGLU_TABLE : NYB_GEGLU_DIRECT;
}

static nyb_cuda_spec spec_of(nyb_dtype dtype, int mode) {
  nyb_cuda_spec spec = {.program = &nyb_cuda_program_geglu};
  spec.values[NYB_CUDA_PARAMETER(geglu, DTYPE)] = (int32_t)dtype;
  spec.values[NYB_CUDA_PARAMETER(geglu, MODE)] = mode;
  return spec;
}

static int32_t threads_of(int mode) {
  return mode == NYB_GEGLU_TABLE ? NYB_GEGLU_TABLE_THREADS : NYB_GEGLU_THREADS;
}

static int32_t shared_bytes_of(nyb_dtype dtype, int mode) {
  if (mode != NYB_GEGLU_TABLE) return 0;
  return (int32_t)(2 * nyb_gelu_entries((int)dtype) * sizeof(uint16_t));
}

static bool is_wide(const void *data, int64_t stride_bytes) {
  return (uintptr_t)data % WIDE_BYTES == 0 && stride_bytes % WIDE_BYTES == 0;
}

static nyb_device_geglu call_of(const nyb_geglu *geglu) {
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(geglu->dtype);
  const int64_t row_vectors = nyb_quotient_up(geglu->columns, NYB_LANE_ELEMENTS);
  nyb_device_geglu call = {
      .gate = geglu->gate,
      .up = geglu->up,
      .out = geglu->out,
      .columns = geglu->columns,
      .row_vectors = nyb_divider_of(row_vectors),
      .vectors = geglu->rows * row_vectors,
  };
  if (geglu->rows > 1) {
    call.gate_stride = geglu->gate_stride * element_bytes;
    call.up_stride = geglu->up_stride * element_bytes;
    call.out_stride = geglu->out_stride * element_bytes;
  }
  call.wide = is_wide(call.gate, call.gate_stride) && is_wide(call.up, call.up_stride) &&
              is_wide(call.out, call.out_stride);
  return call;
}

/* As many blocks as there is work for, or, with tables to make, as run at once. */
static int64_t blocks_for(const nyb_cuda_scope *scope, const nyb_cuda_kernel *kernel,
                          const nyb_device_geglu *call, int mode) {
  const int64_t blocks = nyb_quotient_up(call->vectors, kernel->threads);
  int64_t most = INT32_MAX;
  if (mode == NYB_GEGLU_TABLE) {
    most = (int64_t)scope->properties->multiprocessors * kernel->blocks_per_multiprocessor;
  }
  return blocks < most ? blocks : most;
}

static nyb_status run(nyb_cuda_scope *scope, const nyb_geglu *geglu, nyb_path path,
                      nyb_stream stream) {
  nyb_status status = nyb_cuda_check_pointer(scope, "geglu", "gate", geglu->gate);
  if (status == NYB_OK) status = nyb_cuda_check_pointer(scope, "geglu", "up", geglu->up);
  if (status == NYB_OK) status = nyb_cuda_check_pointer(scope, "geglu", "out", geglu->out);
  if (status != NYB_OK) return status;
  const int mode = mode_of(geglu, path);
  const nyb_cuda_spec spec = spec_of(geglu->dtype, mode);
  const nyb_cuda_kernel *kernel;
  status = nyb_cuda_kernel_get(scope, &spec, threads_of(mode), shared_bytes_of(geglu->dtype, mode),
                               &kernel);
  if (status != NYB_OK) return status;
  nyb_device_geglu call = call_of(geglu);
  const int64_t grid[3] = {blocks_for(scope, kernel, &call, mode), 1, 1};
  return nyb_cuda_launch(scope, kernel, grid, &call, stream, true);
}

nyb_status nyb_cuda_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_path path,
                              nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(context, &scope);
  if (status != NYB_OK) return status;
  status = run(&scope, geglu, path, stream);
  nyb_cuda_leave(&scope);
  return status;
}

void nyb_cuda_geglu_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  (void)properties; /* the same on every device */
  for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
    const int last = dtype == NYB_F32 ? NYB_GEGLU_DIRECT : NYB_GEGLU_TABLE;
    for (int mode = NYB_GEGLU_COMPAT; mode <= last; mode++) {
      const nyb_cuda_spec spec = spec_of((nyb_dtype)dtype, mode);
      visit(data, &spec, true);
    }
  }
}
