/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench geglu: out = gelu(gate) * up over contiguous rows. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "placement.h"
#include "progress.h"

enum { ROWS, COLUMNS, FIELDS };

static const nyb_bench_shape default_shapes[] = {
    /* bench/shapes/geglu.txt says the same. */
    {{1, 14336}},
    {{64, 14336}},
    {{2048, 14336}},
};

typedef struct geglu_call {
  nyb_context *context;
  const nyb_bench_copies *copies; /* each: gate, up, out */
  nyb_geglu geglu;
  int64_t part_bytes;
  nyb_stream stream;
  bool cold;
} geglu_call;

static nyb_status run_call(void *data, int64_t index) {
  geglu_call *call = data;
  char *copy = nyb_bench_copy(call->copies, call->cold, index);
  call->geglu.gate = copy;
  call->geglu.up = copy + call->part_bytes;
  call->geglu.out = copy + 2 * call->part_bytes;
  return nyb_geglu_run(call->context, &call->geglu, call->stream);
}

/* Which path ran, as the counters tell. */
static nyb_path path_taken(const nyb_context *context) {
  nyb_counters counters = NYB_COUNTERS_INIT;
  if (nyb_counters_get(context, &counters) != NYB_OK) return NYB_PATH_AUTO;
  return counters.geglu_compat > 0 ? NYB_PATH_COMPAT : NYB_PATH_FUSED;
}

static void report(nyb_bench_run *run, const nyb_bench_shape *shape, const nyb_bench_context *on,
                   const geglu_call *call, const nyb_timing *timing, int64_t bytes) {
  const char *path = nyb_path_name(path_taken(on->context));
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", "geglu");
  nyb_json_add_integers(result, "shape", shape->field, FIELDS);
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(run->settings->dtype));
  cJSON_AddStringToObject(result, "path", path);
  nyb_bench_add_timing(result, on, call->cold, timing, bytes);
  cJSON_AddItemToArray(run->results, result);

  nyb_table_add(run->table, "%s", nyb_bench_name_shape(shape, FIELDS).text);
  nyb_table_add(run->table, "%s", nyb_dtype_name(run->settings->dtype));
  nyb_table_add(run->table, "%s", path);
  nyb_table_add(run->table, "%s", nyb_isa_name(on->isa));
  nyb_table_add(run->table, "%lld", (long long)on->threads);
  nyb_table_add(run->table, "%s", call->cold ? "cold" : "warm");
  nyb_bench_add_timing_cells(run->table, timing, bytes, on->copy.median_gb_per_s);
}

static int measure(nyb_bench_run *run, const nyb_bench_shape *shape, const nyb_bench_context *on,
                   const nyb_bench_copies *copies, int64_t part_bytes, bool cold) {
  const nyb_bench_settings *settings = run->settings;
  geglu_call call = {.context = on->context,
                     .copies = copies,
                     .geglu = NYB_GEGLU_INIT,
                     .part_bytes = part_bytes,
                     .stream = on->stream,
                     .cold = cold};
  call.geglu.rows = shape->field[ROWS];
  call.geglu.columns = shape->field[COLUMNS];
  call.geglu.dtype = settings->dtype;
  call.geglu.path = settings->path;
  call.geglu.gate_stride = call.geglu.up_stride = call.geglu.out_stride = shape->field[COLUMNS];
  nyb_progress_show("geglu %s, %s, %lld threads, %s", nyb_bench_name_shape(shape, FIELDS).text,
                    nyb_isa_name(on->isa), (long long)on->threads, cold ? "cold" : "warm");
  nyb_counters_clear(on->context);
  nyb_timing timing;
  int status = nyb_bench_measure(settings, on, copies, 0, run_call, &call, &timing);
  if (status != 0) return status;
  const int64_t elements = shape->field[ROWS] * shape->field[COLUMNS];
  const int64_t out_bytes = elements * (int64_t)nyb_dtype_bytes(settings->dtype);
  void *out = nyb_command_allocate(out_bytes);
  status = nyb_fetch(settings->backend, call.geglu.out, out_bytes, out);
  const bool finite = status == 0 && nyb_bench_all_finite(out, settings->dtype, elements);
  free(out);
  if (status != 0) return status;
  if (!finite) {
    return nyb_command_failed("geglu gave numbers that are not finite");
  }
  report(run, shape, on, &call, &timing, 3 * elements * (int64_t)nyb_dtype_bytes(settings->dtype));
  return 0;
}

static int run_shape(nyb_bench_run *run, const nyb_bench_shape *shape) {
  const nyb_dtype dtype = run->settings->dtype;
  int64_t elements;
  if (!nyb_multiply(shape->field[ROWS], shape->field[COLUMNS], &elements) ||
      elements > INT64_MAX / 64) {
    return nyb_command_misused("the shape %s is too large",
                               nyb_bench_name_shape(shape, FIELDS).text);
  }
  const int64_t part_bytes = (elements * (int64_t)nyb_dtype_bytes(dtype) + 63) / 64 * 64;
  nyb_bench_copies copies;
  int status = nyb_bench_allocate_copies(run, 3 * part_bytes, &copies);
  if (status != 0) return status;
  nyb_progress_show("filling the memory");
  nyb_context *context = run->preparer;
  status = nyb_bench_random_as(context, copies.memory, dtype, elements, 1);
  if (status == 0) {
    status = nyb_bench_random_as(context, copies.memory + part_bytes, dtype, elements, 2);
  }
  for (int64_t i = 1; i < copies.count; i++) {
    memcpy(copies.memory + i * copies.copy_bytes, copies.memory, (size_t)copies.copy_bytes);
  }
  if (status == 0) status = nyb_bench_place_copies(run, &copies);
  for (int64_t i = 0; i < run->context_count && status == 0; i++) {
    status = measure(run, shape, &run->contexts[i], &copies, part_bytes, true);
    if (status == 0) status = measure(run, shape, &run->contexts[i], &copies, part_bytes, false);
  }
  nyb_release_placed(run->settings->backend, copies.memory);
  return status;
}

static int run_shapes(nyb_bench_run *run) {
  int status = 0;
  for (int64_t s = 0; s < run->settings->shape_count && status == 0; s++) {
    status = run_shape(run, &run->settings->shapes[s]);
  }
  return status;
}

const nyb_bench_operation nyb_bench_geglu = {
    .name = "geglu",
    .columns =
        "<rows,columns|<dtype|<path|<isa|>threads|<data|>median us|>min|>p10|>p90|>repeats|"
        ">GB/s|>of copy",
    .shape_fields = FIELDS,
    .shape_words = "ROWS,COLUMNS",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .needs_read = true,
    .needs_copy = true,
    .on_cpu = true,
    .on_cuda = true,
    .run = run_shapes,
};
