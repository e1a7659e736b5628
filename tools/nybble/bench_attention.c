/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench attention: one step of a decoder over caches of random keys and values. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_rows.h"
#include "placement.h"
#include "progress.h"

enum { BATCH, QUERY_HEADS, KV_HEADS, HEAD_DIM, TOKENS };

static const nyb_bench_shape default_shapes[] = {
    /* bench/shapes/attention-short.txt says the same. */
    {{1, 32, 8, 128, 2048}}, {{1, 32, 8, 128, 8192}}, {{1, 32, 8, 128, 32768}},
    {{1, 16, 8, 256, 8192}}, {{1, 16, 1, 512, 8192}}, {{1, 9, 3, 64, 2048}},
};

/* ---- The call ----------------------------------------------------------------------------- */

typedef struct attention_bench {
  nyb_bench_run *run;
  const nyb_bench_shape *shape;
  nyb_width width;
  nyb_bench_rows key, value;
  nyb_bench_copies copies;
  int64_t bytes;    /* that one call reads of K and V */
  int32_t *lengths; /* [batch] */
  void *query, *out;
  int64_t out_elements;
} attention_bench;

typedef struct attention_call {
  const attention_bench *bench;
  nyb_context *context;
  nyb_attention attention;
  nyb_plan plan;
  void *workspace;
  nyb_stream stream;
  bool cold;
} attention_call;

static void point_call(attention_call *call, int64_t index) {
  const attention_bench *bench = call->bench;
  const int64_t *field = bench->shape->field;
  char *copy = nyb_bench_copy(&bench->copies, call->cold, index);
  const nyb_stored_output k =
      nyb_bench_point_rows(&bench->key, copy, field[KV_HEADS], field[TOKENS]);
  const nyb_stored_output v =
      nyb_bench_point_rows(&bench->value, copy, field[KV_HEADS], field[TOKENS]);
  call->attention.k = nyb_bench_as_input(&k);
  call->attention.v = nyb_bench_as_input(&v);
}

static nyb_status run_call(void *data, int64_t index) {
  attention_call *call = data;
  point_call(call, index);
  return nyb_attention_run(call->context, &call->attention, call->workspace,
                           call->plan.workspace_bytes, call->stream);
}

static nyb_attention describe(const attention_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape->field;
  const int64_t dim = field[HEAD_DIM], heads = field[QUERY_HEADS], rows = settings->query_len;
  nyb_attention attention = NYB_ATTENTION_INIT;
  attention.batch = field[BATCH];
  attention.query_heads = heads;
  attention.kv_heads = field[KV_HEADS];
  attention.query_len = rows;
  attention.key_dim = dim;
  attention.value_dim = dim;
  attention.capacity_tokens = field[TOKENS];
  attention.lengths = bench->lengths;
  attention.q = (nyb_input){.data = bench->query,
                            .dtype = settings->dtype,
                            .stride = {heads * rows * dim, rows * dim, dim}};
  attention.out = (nyb_output){.data = bench->out,
                               .dtype = settings->dtype,
                               .stride = {heads * rows * dim, rows * dim, dim}};
  attention.scale = (float)(1 / sqrt((double)dim));
  attention.mask = rows > 1 ? NYB_MASK_CAUSAL : NYB_MASK_NONE;
  attention.path = settings->path;
  attention.rounding = settings->rounding;
  return attention;
}

static void report(const attention_bench *bench, const nyb_bench_context *on,
                   const attention_call *call, const nyb_timing *timing) {
  const nyb_bench_settings *settings = bench->run->settings;
  const nyb_width_name cache = nyb_name_width(bench->width);
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", "attention");
  nyb_json_add_integers(result, "shape", bench->shape->field, NYB_BENCH_SHAPE_FIELDS);
  cJSON_AddStringToObject(result, "cache", cache.text);
  if (bench->width.key_bits == bench->width.value_bits) {
    cJSON_AddNumberToObject(result, "bits", bench->width.key_bits);
  } else {
    cJSON_AddNullToObject(result, "bits");
  }
  cJSON_AddNumberToObject(result, "k_bits", bench->width.key_bits);
  cJSON_AddNumberToObject(result, "v_bits", bench->width.value_bits);
  cJSON_AddNumberToObject(result, "group_size", (double)settings->group_size);
  cJSON_AddNumberToObject(result, "query_len", (double)settings->query_len);
  if (settings->lengths.count > 0) {
    nyb_json_add_integers(result, "lengths", settings->lengths.items, settings->lengths.count);
  }
  cJSON_AddStringToObject(result, "mask", settings->query_len > 1 ? "causal" : "none");
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(settings->dtype));
  cJSON_AddStringToObject(result, "rounding", nyb_rounding_name(settings->rounding));
  cJSON_AddStringToObject(result, "path", nyb_path_name(call->plan.path));
  cJSON_AddStringToObject(result, "key_kernel", call->plan.key_kernel);
  cJSON_AddStringToObject(result, "value_kernel", call->plan.value_kernel);
  nyb_bench_add_timing(result, on, call->cold, timing, bench->bytes);
  cJSON_AddItemToArray(bench->run->results, result);

  nyb_table *table = bench->run->table;
  nyb_table_add(table, "%s", nyb_bench_name_shape(bench->shape, NYB_BENCH_SHAPE_FIELDS).text);
  nyb_table_add(table, "%s", cache.text);
  nyb_table_add(table, "%s", nyb_path_name(call->plan.path));
  nyb_table_add(table, "%s", nyb_isa_name(on->isa));
  nyb_table_add(table, "%lld", (long long)on->threads);
  nyb_table_add(table, "%s", call->cold ? "cold" : "warm");
  nyb_bench_add_timing_cells(table, timing, bench->bytes, on->read.median_gb_per_s);
}

static int measure(const attention_bench *bench, const nyb_bench_context *on, bool cold) {
  attention_call call = {.bench = bench,
                         .context = on->context,
                         .attention = describe(bench),
                         .plan = NYB_PLAN_INIT,
                         .stream = on->stream,
                         .cold = cold};
  point_call(&call, 0);
  if (nyb_attention_plan(on->context, &call.attention, &call.plan) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error());
  }
  const nyb_bench_run *run = bench->run;
  const nyb_backend backend = on->backend;
  call.workspace = nyb_command_allocate((int64_t)call.plan.workspace_bytes);
  int status = nyb_place(backend, &call.workspace, (int64_t)call.plan.workspace_bytes);
  if (status != 0) return status;
  nyb_progress_show("%s, %s, %s, %lld threads, %s",
                    nyb_bench_name_shape(bench->shape, NYB_BENCH_SHAPE_FIELDS).text,
                    nyb_name_width(bench->width).text, nyb_isa_name(on->isa),
                    (long long)on->threads, cold ? "cold" : "warm");
  nyb_timing timing;
  status = nyb_bench_measure(run->settings, on, &bench->copies, 0, run_call, &call, &timing);
  nyb_release_placed(run->settings->backend, call.workspace);
  if (status != 0) return status;
  const nyb_dtype dtype = run->settings->dtype;
  const int64_t out_bytes = bench->out_elements * (int64_t)nyb_dtype_bytes(dtype);
  void *out = nyb_command_allocate(out_bytes);
  status = nyb_fetch(backend, bench->out, out_bytes, out);
  const bool finite = status == 0 && nyb_bench_all_finite(out, dtype, bench->out_elements);
  free(out);
  if (status != 0) return status;
  if (!finite) {
    return nyb_command_failed("the attention gave numbers that are not finite");
  }
  report(bench, on, &call, &timing);
  return 0;
}

/* ---- Shapes and widths -------------------------------------------------------------------- */

static int size_caches(attention_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape->field;
  int status =
      nyb_bench_describe_rows(bench->width.key_bits, settings, field[HEAD_DIM], &bench->key);
  if (status == 0) {
    status =
        nyb_bench_describe_rows(bench->width.value_bits, settings, field[HEAD_DIM], &bench->value);
  }
  if (status != 0) return status;
  int64_t rows, end = 0, query_rows, elements;
  if (!nyb_multiply(field[BATCH], field[KV_HEADS], &rows) ||
      !nyb_multiply(rows, field[TOKENS], &rows) || !nyb_bench_place_rows(&bench->key, rows, &end) ||
      !nyb_bench_place_rows(&bench->value, rows, &end) ||
      !nyb_multiply(field[BATCH], field[QUERY_HEADS], &query_rows) ||
      !nyb_multiply(query_rows, settings->query_len, &query_rows) ||
      !nyb_multiply(query_rows, field[HEAD_DIM], &elements) || elements > INT64_MAX / 64) {
    return nyb_command_misused("the shape %s is too large",
                               nyb_bench_name_shape(bench->shape, NYB_BENCH_SHAPE_FIELDS).text);
  }
  bench->out_elements = elements;
  status = nyb_command_check_memory(elements * 12, "the queries of this shape");
  return status != 0 ? status : nyb_bench_allocate_copies(bench->run, end, &bench->copies);
}

static void choose_lengths(attention_bench *bench) {
  const nyb_integer_list *asked = &bench->run->settings->lengths;
  const int64_t *field = bench->shape->field;
  bench->lengths = nyb_command_allocate(field[BATCH] * (int64_t)sizeof *bench->lengths);
  for (int64_t b = 0; b < field[BATCH]; b++) {
    const int64_t last = b < asked->count ? b : asked->count - 1;
    bench->lengths[b] = (int32_t)(asked->count > 0 ? asked->items[last] : field[TOKENS]);
    for (int i = 0; i < NYB_BENCH_ARRAYS; i++) {
      bench->bytes += bench->lengths[b] * field[KV_HEADS] *
                      (bench->key.row_bytes[i] + bench->value.row_bytes[i]);
    }
  }
}

static int prepare(attention_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape->field;
  nyb_context *context = bench->run->preparer;
  int status = size_caches(bench);
  if (status != 0) return status;
  const int64_t heads = field[BATCH] * field[KV_HEADS];
  status = nyb_bench_fill_rows(context, &bench->key, field[HEAD_DIM], heads, field[TOKENS], 1,
                               &bench->copies);
  if (status == 0) {
    status = nyb_bench_fill_rows(context, &bench->value, field[HEAD_DIM], heads, field[TOKENS], 2,
                                 &bench->copies);
  }
  if (status != 0) return status;
  choose_lengths(bench);
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(settings->dtype);
  const int64_t out_bytes = bench->out_elements * element_bytes;
  const nyb_backend backend = settings->backend;
  bench->query = nyb_command_allocate(out_bytes);
  bench->out = nyb_command_allocate(out_bytes);
  status = nyb_bench_random_as(context, bench->query, settings->dtype, bench->out_elements, 3);
  if (status == 0) status = nyb_bench_place_copies(bench->run, &bench->copies);
  if (status == 0) status = nyb_place(backend, &bench->query, out_bytes);
  if (status == 0) status = nyb_place(backend, &bench->out, out_bytes);
  void *lengths = bench->lengths;
  if (status == 0) {
    status = nyb_place(backend, &lengths, field[BATCH] * (int64_t)sizeof(int32_t));
    bench->lengths = lengths;
  }
  return status;
}

static int run_width(nyb_bench_run *run, const nyb_bench_shape *shape, nyb_width width) {
  attention_bench bench = {.run = run, .shape = shape, .width = width};
  int status = prepare(&bench);
  for (int64_t i = 0; i < run->context_count && status == 0; i++) {
    status = measure(&bench, &run->contexts[i], true);
    if (status == 0) status = measure(&bench, &run->contexts[i], false);
  }
  nyb_release_placed(run->settings->backend, bench.copies.memory);
  nyb_release_placed(run->settings->backend, bench.lengths);
  nyb_release_placed(run->settings->backend, bench.query);
  nyb_release_placed(run->settings->backend, bench.out);
  return status;
}

static int run_shapes(nyb_bench_run *run) {
  const nyb_bench_settings *settings = run->settings;
  int status = 0;
  for (int64_t s = 0; s < settings->shape_count; s++) {
    for (int64_t w = 0; w < settings->widths.count && status == 0; w++) {
      status = run_width(run, &settings->shapes[s], settings->widths.items[w]);
    }
  }
  return status;
}

const nyb_bench_operation nyb_bench_attention = {
    .name = "attention",
    .columns =
        "<B,Hq,Hkv,D,N|<cache|<path|<isa|>threads|<data|>median us|>min|>p10|>p90|>repeats|"
        ">GB/s|>of read",
    .shape_fields = NYB_BENCH_SHAPE_FIELDS,
    .shape_words = "B,Hq,Hkv,D,N",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .needs_read = true,
    .on_cpu = true,
    .on_cuda = true,
    .run = run_shapes,
};
