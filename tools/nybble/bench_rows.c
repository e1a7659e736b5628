/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_rows.h"

#include <stdlib.h>
#include <string.h>

#include "progress.h"

/* Distinct rows that a cache is filled with, again and again. */
enum { TEMPLATE_ROWS = 4096 };

int nyb_bench_describe_rows(int32_t bits, const nyb_bench_settings *settings, int64_t dim,
                            nyb_bench_rows *rows) {
  rows->format = nyb_width_format(bits, settings->group_size, settings->dtype);
  const int64_t all_bytes = nyb_format_row_bytes(&rows->format, dim);
  if (all_bytes < 0) return nyb_command_misused("%s", nyb_last_error());
  memset(rows->row_bytes, 0, sizeof rows->row_bytes);
  if (rows->format.scheme == NYB_PLAIN) {
    rows->row_bytes[0] = all_bytes;
  } else {
    const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
    rows->row_bytes[1] = rows->row_bytes[2] = dim / settings->group_size * scale_bytes;
    rows->row_bytes[0] = all_bytes - 2 * rows->row_bytes[1];
  }
  return 0;
}

bool nyb_bench_place_rows(nyb_bench_rows *rows, int64_t row_count, int64_t *end) {
  for (int i = 0; i < NYB_BENCH_ARRAYS; i++) {
    int64_t bytes;
    if (!nyb_multiply(rows->row_bytes[i], row_count, &bytes)) return false;
    if (bytes > INT64_MAX / 4 || *end > INT64_MAX / 4) return false;
    rows->offset_bytes[i] = *end;
    *end += (bytes + 63) / 64 * 64;
  }
  return true;
}

nyb_stored_output nyb_bench_point_rows(const nyb_bench_rows *rows, char *copy, int64_t heads,
                                       int64_t tokens) {
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
  const bool plain = rows->format.scheme == NYB_PLAIN;
  const int64_t code_row = rows->row_bytes[0] / (plain ? element_bytes : 4);
  const int64_t scale_row = rows->row_bytes[1] / element_bytes;
  return (nyb_stored_output){
      .format = rows->format,
      .codes = copy + rows->offset_bytes[0],
      .scales = plain ? NULL : copy + rows->offset_bytes[1],
      .biases = plain ? NULL : copy + rows->offset_bytes[2],
      .codes_stride = {heads * tokens * code_row, tokens * code_row, code_row},
      .scales_stride = {heads * tokens * scale_row, tokens * scale_row, scale_row},
      .biases_stride = {heads * tokens * scale_row, tokens * scale_row, scale_row},
  };
}

nyb_stored nyb_bench_as_input(const nyb_stored_output *rows) {
  nyb_stored input = {
      .format = rows->format, .codes = rows->codes, .scales = rows->scales, .biases = rows->biases};
  memcpy(input.codes_stride, rows->codes_stride, sizeof input.codes_stride);
  memcpy(input.scales_stride, rows->scales_stride, sizeof input.scales_stride);
  memcpy(input.biases_stride, rows->biases_stride, sizeof input.biases_stride);
  return input;
}

/* Writes `count` rows over and over from a template, from its row `first` on. */
static void tile(char *to, const char *template, int64_t row_bytes, int64_t template_rows,
                 int64_t first, int64_t count) {
  while (count > 0 && row_bytes > 0) {
    const int64_t at_once = count < template_rows - first ? count : template_rows - first;
    memcpy(to, template + first * row_bytes, (size_t)(at_once * row_bytes));
    to += at_once * row_bytes;
    count -= at_once;
    first = 0;
  }
}

int nyb_bench_fill_rows(nyb_context *context, const nyb_bench_rows *rows, int64_t dim,
                        int64_t heads, int64_t tokens, uint64_t seed,
                        const nyb_bench_copies *copies) {
  const int64_t template_rows = tokens < TEMPLATE_ROWS ? tokens : TEMPLATE_ROWS;
  nyb_bench_rows packed = *rows;
  int64_t template_bytes = 0;
  if (!nyb_bench_place_rows(&packed, template_rows, &template_bytes)) {
    return nyb_command_misused("the shape is too large");
  }
  float *wide = nyb_command_allocate(template_rows * dim * (int64_t)sizeof *wide);
  char *template = nyb_command_allocate(template_bytes);
  nyb_bench_random(wide, template_rows * dim, seed);
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = 1;
  quantize.heads = 1;
  quantize.tokens = template_rows;
  quantize.dim = dim;
  quantize.input = (nyb_input){.data = wide, .dtype = NYB_F32, .stride = {0, 0, dim}};
  quantize.output = nyb_bench_point_rows(&packed, template, 1, template_rows);
  const nyb_status status = nyb_quantize_run(context, &quantize, NULL);
  for (int64_t copy = 0; copy < copies->count && status == NYB_OK; copy++) {
    nyb_progress_show("filling the caches: %.0f%%", 100.0 * (double)copy / (double)copies->count);
    for (int64_t head = 0; head < heads; head++) {
      const int64_t first = (copy * 31 + head * 977) % template_rows;
      for (int i = 0; i < NYB_BENCH_ARRAYS; i++) {
        tile(copies->memory + copy * copies->copy_bytes + rows->offset_bytes[i] +
                 head * tokens * rows->row_bytes[i],
             template + packed.offset_bytes[i], rows->row_bytes[i], template_rows, first, tokens);
      }
    }
  }
  free(wide);
  free(template);
  return status == NYB_OK ? 0 : nyb_command_failed("%s", nyb_last_error());
}
