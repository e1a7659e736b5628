/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench quantize: rows of floats to rows of codes, and back. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "placement.h"
#include "progress.h"

enum { ROWS, DIM, FIELDS };

static const nyb_bench_shape default_shapes[] = {
    /* bench/shapes/quantize.txt says the same. */
    {{8, 128}},
    {{65536, 128}},
    {{4096, 4096}},
};

typedef struct quantize_call {
  nyb_context *context;
  const nyb_bench_copies *copies; /* each: floats, codes, scales, biases */
  nyb_quantize quantize;
  nyb_dequantize dequantize;
  int64_t codes_offset, scales_offset, biases_offset;
  nyb_stream stream;
  bool cold, backwards;
} quantize_call;

static nyb_status run_call(void *data, int64_t index) {
  quantize_call *call = data;
  char *copy = nyb_bench_copy(call->copies, call->cold, index);
  char *codes = copy + call->codes_offset, *scales = copy + call->scales_offset,
       *biases = copy + call->biases_offset;
  if (call->backwards) {
    call->dequantize.output.data = copy;
    call->dequantize.input.codes = codes;
    call->dequantize.input.scales = scales;
    call->dequantize.input.biases = biases;
    return nyb_dequantize_run(call->context, &call->dequantize, call->stream);
  }
  call->quantize.input.data = copy;
  call->quantize.output.codes = codes;
  call->quantize.output.scales = scales;
  call->quantize.output.biases = biases;
  return nyb_quantize_run(call->context, &call->quantize, call->stream);
}

static void describe(quantize_call *call, const nyb_bench_settings *settings,
                     const nyb_bench_shape *shape, int32_t bits) {
  const int64_t rows = shape->field[ROWS], dim = shape->field[DIM];
  const int64_t words = dim * bits / 32, groups = dim / settings->group_size;
  const nyb_format format = nyb_width_format(bits, settings->group_size, settings->dtype);
  call->quantize = (nyb_quantize)NYB_QUANTIZE_INIT;
  call->quantize.batch = call->quantize.heads = 1;
  call->quantize.tokens = rows;
  call->quantize.dim = dim;
  call->quantize.rule = settings->rule;
  call->quantize.input = (nyb_input){.dtype = settings->dtype, .stride = {0, 0, dim}};
  call->quantize.output = (nyb_stored_output){.format = format,
                                              .codes_stride = {0, 0, words},
                                              .scales_stride = {0, 0, groups},
                                              .biases_stride = {0, 0, groups}};
  call->dequantize = (nyb_dequantize)NYB_DEQUANTIZE_INIT;
  call->dequantize.batch = call->dequantize.heads = 1;
  call->dequantize.tokens = rows;
  call->dequantize.dim = dim;
  call->dequantize.input = (nyb_stored){.format = format,
                                        .codes_stride = {0, 0, words},
                                        .scales_stride = {0, 0, groups},
                                        .biases_stride = {0, 0, groups}};
  call->dequantize.output = (nyb_output){.dtype = settings->dtype, .stride = {0, 0, dim}};
}

static void report(nyb_bench_run *run, const nyb_bench_shape *shape, int32_t bits,
                   const nyb_bench_context *on, const quantize_call *call, const nyb_timing *timing,
                   int64_t bytes) {
  const nyb_bench_settings *settings = run->settings;
  const char *operation = call->backwards ? "dequantize" : "quantize";
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", operation);
  nyb_json_add_integers(result, "shape", shape->field, FIELDS);
  cJSON_AddNumberToObject(result, "bits", bits);
  cJSON_AddNumberToObject(result, "group_size", (double)settings->group_size);
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(settings->dtype));
  if (!call->backwards) {
    cJSON_AddStringToObject(result, "rule", nyb_rule_name(settings->rule));
  }
  nyb_bench_add_timing(result, on, call->cold, timing, bytes);
  cJSON_AddItemToArray(run->results, result);

  nyb_table_add(run->table, "%s", operation);
  nyb_table_add(run->table, "%s", nyb_bench_name_shape(shape, FIELDS).text);
  nyb_table_add(run->table, "%d", (int)bits);
  nyb_table_add(run->table, "%s", nyb_dtype_name(settings->dtype));
  nyb_table_add(run->table, "%s", nyb_isa_name(on->isa));
  nyb_table_add(run->table, "%lld", (long long)on->threads);
  nyb_table_add(run->table, "%s", call->cold ? "cold" : "warm");
  nyb_bench_add_timing_cells(run->table, timing, bytes, on->copy.median_gb_per_s);
}

/* Cold before warm, and quantize before dequantize, whose input it makes. */
static int measure_all(nyb_bench_run *run, const nyb_bench_shape *shape, int32_t bits,
                       quantize_call *call, int64_t bytes) {
  int status = 0;
  for (int64_t i = 0; i < run->context_count; i++) {
    const nyb_bench_context *on = &run->contexts[i];
    call->context = on->context;
    call->stream = on->stream;
    for (int turn = 0; turn < 4 && status == 0; turn++) {
      call->backwards = turn >= 2;
      call->cold = turn % 2 == 0;
      nyb_progress_show("%s %s, %d bits, %s, %lld threads, %s",
                        call->backwards ? "dequantize" : "quantize",
                        nyb_bench_name_shape(shape, FIELDS).text, (int)bits, nyb_isa_name(on->isa),
                        (long long)on->threads, call->cold ? "cold" : "warm");
      nyb_timing timing;
      status = nyb_bench_measure(run->settings, on, call->copies, 0, run_call, call, &timing);
      if (status == 0) report(run, shape, bits, on, call, &timing, bytes);
    }
  }
  return status;
}

/* Every copy holds the floats and, as dequantize may reach a copy that quantize has not, the codes.
 */
static int fill(nyb_bench_run *run, const nyb_bench_copies *copies, quantize_call *call,
                int64_t elements) {
  nyb_progress_show("filling the memory");
  nyb_context *context = run->preparer;
  const int status =
      nyb_bench_random_as(context, copies->memory, run->settings->dtype, elements, 1);
  if (status != 0) return status;
  call->context = context;
  if (run_call(call, 0) != NYB_OK) return nyb_command_failed("%s", nyb_last_error());
  for (int64_t i = 1; i < copies->count; i++) {
    memcpy(copies->memory + i * copies->copy_bytes, copies->memory, (size_t)copies->copy_bytes);
  }
  return 0;
}

static int run_width(nyb_bench_run *run, const nyb_bench_shape *shape, int32_t bits) {
  const nyb_bench_settings *settings = run->settings;
  const int64_t rows = shape->field[ROWS], dim = shape->field[DIM];
  const nyb_format format = nyb_width_format(bits, settings->group_size, settings->dtype);
  const int64_t row_bytes = nyb_format_row_bytes(&format, dim);
  if (row_bytes < 0) return nyb_command_misused("%s", nyb_last_error());
  int64_t elements;
  if (!nyb_multiply(rows, dim, &elements) || elements > INT64_MAX / 64) {
    return nyb_command_misused("the shape %s is too large",
                               nyb_bench_name_shape(shape, FIELDS).text);
  }
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(settings->dtype);
  const int64_t float_bytes = elements * element_bytes;
  const int64_t code_bytes = elements * bits / 8;
  const int64_t scale_bytes = elements / settings->group_size * element_bytes;
  quantize_call call = {0};
  describe(&call, settings, shape, bits);
  call.codes_offset = (float_bytes + 63) / 64 * 64;
  call.scales_offset = call.codes_offset + (code_bytes + 63) / 64 * 64;
  call.biases_offset = call.scales_offset + (scale_bytes + 63) / 64 * 64;
  nyb_bench_copies copies;
  int status = nyb_bench_allocate_copies(run, call.biases_offset + scale_bytes, &copies);
  if (status != 0) return status;
  call.copies = &copies;
  status = fill(run, &copies, &call, elements);
  if (status == 0) status = nyb_bench_place_copies(run, &copies);
  if (status == 0) {
    status = measure_all(run, shape, bits, &call, float_bytes + rows * row_bytes);
  }
  nyb_release_placed(run->settings->backend, copies.memory);
  return status;
}

static int run_shapes(nyb_bench_run *run) {
  const nyb_bench_settings *settings = run->settings;
  int status = 0;
  for (int64_t s = 0; s < settings->shape_count; s++) {
    for (int64_t w = 0; w < settings->widths.count && status == 0; w++) {
      status = run_width(run, &settings->shapes[s], settings->widths.items[w].key_bits);
    }
  }
  return status;
}

const nyb_bench_operation nyb_bench_quantize = {
    .name = "quantize",
    .columns =
        "<operation|<rows,dim|>bits|<dtype|<isa|>threads|<data|>median us|>min|>p10|>p90|"
        ">repeats|>GB/s|>of copy",
    .shape_fields = FIELDS,
    .shape_words = "ROWS,DIM",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .needs_read = true,
    .needs_copy = true,
    .on_cpu = true,
    .on_cuda = true,
    .run = run_shapes,
};
