/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU: check, choose the path, cut the work into tasks. */
#include "geglu.h"

#include "cuda/operations.h"
#include "kernels.h"
#include "views.h"

/* Elements of a task: some 10 us of work, of which waking a thread is a small part. */
#define TASK_ELEMENTS INT64_C(32768)

/* From this size of the output on, lines written are of no use to the caches before they are thrown
 * out again; storing past them saves the read that a store into a line not held begins with. */
#define STREAMING_BYTES (INT64_C(64) << 20)

/* ---- Checks ------------------------------------------------------------------------------- */

static nyb_status check_fields(const nyb_geglu *geglu) {
  const nyb_status size_status =
      nyb_check_struct("geglu", geglu, geglu->struct_size, sizeof *geglu);
  if (size_status != NYB_OK) return size_status;
  if (geglu->rows < 0 || geglu->columns < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "geglu.%s is %lld; it must be 0 or more",
                    geglu->rows < 0 ? "rows" : "columns",
                    (long long)(geglu->rows < 0 ? geglu->rows : geglu->columns));
  }
  if ((unsigned)geglu->path > NYB_PATH_COMPAT) {
    return nyb_fail(NYB_ERROR_ENUM, "geglu.path is %d; it must be one of nyb_path (0 to %d)",
                    (int)geglu->path, (int)NYB_PATH_COMPAT);
  }
  return nyb_check_dtype("geglu.dtype", geglu->dtype);
}

static nyb_view view_of(const nyb_geglu *geglu, const char *member, const void *data,
                        int64_t stride) {
  return (nyb_view){
      .owner = "geglu",
      .member = member,
      .data = data,
      .element_bytes = nyb_dtype_bytes(geglu->dtype),
      .row_elements = geglu->columns,
      .rank = 1,
      .shape = {geglu->rows},
      .stride = {stride},
  };
}

/* The same elements in the same order, so that each is read before it is written. */
static bool is_in_place(const nyb_geglu *geglu, const void *input, int64_t input_stride) {
  return geglu->out == input && (geglu->rows == 1 || geglu->out_stride == input_stride);
}

static nyb_status check_memory(const nyb_geglu *geglu) {
  const nyb_view gate = view_of(geglu, "gate", geglu->gate, geglu->gate_stride);
  const nyb_view up = view_of(geglu, "up", geglu->up, geglu->up_stride);
  const nyb_view out = view_of(geglu, "out", geglu->out, geglu->out_stride);
  nyb_extent gate_extent, up_extent, out_extent;
  nyb_status status = nyb_extent_of(&gate, &gate_extent);
  if (status == NYB_OK) status = nyb_extent_of(&up, &up_extent);
  if (status == NYB_OK) status = nyb_extent_of_output(&out, &out_extent);
  if (status == NYB_OK && !is_in_place(geglu, geglu->gate, geglu->gate_stride)) {
    status = nyb_check_apart(&out_extent, &gate_extent);
  }
  if (status == NYB_OK && !is_in_place(geglu, geglu->up, geglu->up_stride)) {
    status = nyb_check_apart(&out_extent, &up_extent);
  }
  return status;
}

/* ---- The work ----------------------------------------------------------------------------- */

typedef struct work {
  nyb_geglu geglu;
  nyb_geglu_fn kernel; /* NULL: the spelled-out reference */
  bool streaming;
  int64_t columns_per_task; /* a part of a row, or all of it and several rows */
  int64_t rows_per_task;
  int64_t tasks_per_row;
} work;

static void run_span(const work *w, int64_t row, int64_t column, int64_t count) {
  const nyb_geglu *geglu = &w->geglu;
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(geglu->dtype);
  const char *gate =
      (const char *)geglu->gate + (row * geglu->gate_stride + column) * element_bytes;
  const char *up = (const char *)geglu->up + (row * geglu->up_stride + column) * element_bytes;
  char *out = (char *)geglu->out + (row * geglu->out_stride + column) * element_bytes;
  if (w->kernel != NULL) {
    w->kernel(gate, up, out, count, w->streaming);
  } else {
    nyb_geglu_compat(geglu->dtype, gate, up, out, count);
  }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void run_task(void *data, int64_t index) {
  const work *w = data;
  const int64_t column = index % w->tasks_per_row * w->columns_per_task;
  const int64_t count = least(w->columns_per_task, w->geglu.columns - column);
  const int64_t first = index / w->tasks_per_row * w->rows_per_task;
  const int64_t end = first + least(w->rows_per_task, w->geglu.rows - first);
  for (int64_t row = first; row < end; row++) {
    run_span(w, row, column, count);
  }
}

/* Rows that follow each other without a gap in all three are one long row, so that short rows cost
 * no more than long ones. The product fits: the output has as many elements, each its own. */
static void join_rows(nyb_geglu *geglu) {
  const int64_t columns = geglu->columns;
  if (geglu->gate_stride == columns && geglu->up_stride == columns &&
      geglu->out_stride == columns) {
    geglu->columns *= geglu->rows;
    geglu->rows = 1;
  }
  if (geglu->rows == 1) { /* never looked at, and could be anything */
    geglu->gate_stride = geglu->up_stride = geglu->out_stride = 0;
  }
}

static int64_t quotient_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t cut_into_tasks(work *w) {
  const nyb_geglu *geglu = &w->geglu;
  w->columns_per_task = least(geglu->columns, TASK_ELEMENTS);
  w->rows_per_task = TASK_ELEMENTS / w->columns_per_task;
  w->tasks_per_row = quotient_up(geglu->columns, w->columns_per_task);
  return quotient_up(geglu->rows, w->rows_per_task) * w->tasks_per_row;
}

static nyb_path choose_path(const nyb_context *context, const nyb_geglu *geglu) {
  if (geglu->path != NYB_PATH_AUTO) return geglu->path;
  return context->geglu_path != NYB_PATH_AUTO ? context->geglu_path : NYB_PATH_FUSED;
}

static void run_here(nyb_context *context, work *w, nyb_path path, nyb_format_id format) {
  const nyb_geglu *geglu = &w->geglu;
  if (path == NYB_PATH_FUSED) {
    const bool in_place = geglu->out == geglu->gate || geglu->out == geglu->up;
    w->kernel = (nyb_geglu_fn)nyb_kernel_for(context, NYB_OPERATION_GEGLU, format);
    w->streaming = !in_place && geglu->rows * geglu->columns >= /* in place, the line is held */
                                    STREAMING_BYTES / (int64_t)nyb_dtype_bytes(geglu->dtype);
  }
  const int64_t task_count = cut_into_tasks(w);
  nyb_parallel(context, task_count, run_task, w);
}

nyb_status nyb_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_stream stream) {
  if (context == NULL || geglu == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; both context and geglu must be set",
                    context == NULL ? "context" : "geglu");
  }
  nyb_status status = nyb_check_stream(context, stream);
  if (status == NYB_OK) status = check_fields(geglu);
  if (status == NYB_OK) status = check_memory(geglu);
  if (status != NYB_OK || geglu->rows == 0 || geglu->columns == 0) return status;

  work w = {.geglu = *geglu};
  join_rows(&w.geglu);
  const nyb_path path = choose_path(context, geglu);
  const nyb_format_id format = nyb_plain_format(geglu->dtype);
  if (nyb_on_cuda(context)) {
    status = nyb_cuda_geglu_run(context, &w.geglu, path, stream);
    if (status != NYB_OK) return status;
  } else {
    run_here(context, &w, path, format);
  }
  if (path == NYB_PATH_FUSED) nyb_count_kernel(context, NYB_OPERATION_GEGLU, format);
  nyb_count(context, path == NYB_PATH_FUSED ? NYB_COUNTER_GEGLU_FUSED : NYB_COUNTER_GEGLU_COMPAT);
  return NYB_OK;
}
