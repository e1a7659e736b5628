/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench append: one token of every sequence to a cache on the GPU. (On the CPU: bench
 * overhead.) */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "placement.h"
#include "progress.h"

enum { BATCH, KV_HEADS, HEAD_DIM, FIELDS };

/* Caches that take turns, so that none is in the L2 when its turn comes; and how far each is filled
 * at most, which bounds the measurement. */
enum { CACHES = 16, CAPACITY_TOKENS = 1024 };

static const nyb_bench_shape default_shapes[] = {
    /* bench/shapes/append.txt says the same. */
    {{1, 8, 128}},
    {{64, 8, 128}},
};

typedef struct append_bench {
  nyb_bench_run *run;
  const nyb_bench_context *on;
  nyb_cache *caches[CACHES];
  nyb_append append;
  nyb_bench_copies copies; /* each: key, value */
  int64_t part_bytes;
} append_bench;

static nyb_status run_call(void *data, int64_t index) {
  append_bench *bench = data;
  char *copy = nyb_bench_copy(&bench->copies, true, index);
  bench->append.key.data = copy;
  bench->append.value.data = copy + bench->part_bytes;
  return nyb_cache_append(bench->caches[index % CACHES], &bench->append, bench->on->stream);
}

static int library_failed(void) { return nyb_command_failed("%s", nyb_last_error()); }

static int create_caches(append_bench *bench, const int64_t *field, nyb_width width) {
  const nyb_bench_settings *settings = bench->run->settings;
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = field[BATCH];
  options.kv_heads = field[KV_HEADS];
  options.key_dim = options.value_dim = field[HEAD_DIM];
  options.key_format = nyb_width_format(width.key_bits, settings->group_size, settings->dtype);
  options.value_format = nyb_width_format(width.value_bits, settings->group_size, settings->dtype);
  options.rule = settings->rule;
  options.max_tokens = CAPACITY_TOKENS;
  for (int i = 0; i < CACHES; i++) {
    if (nyb_cache_create(bench->on->context, &options, &bench->caches[i]) != NYB_OK ||
        nyb_cache_reserve(bench->caches[i], CAPACITY_TOKENS, bench->on->stream) != NYB_OK) {
      return library_failed();
    }
  }
  return 0;
}

static int prepare_tokens(append_bench *bench, const int64_t *field) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t dim = field[HEAD_DIM], elements = field[BATCH] * field[KV_HEADS] * dim;
  const nyb_input input = {.dtype = settings->dtype, .stride = {field[KV_HEADS] * dim, dim, dim}};
  bench->append = (nyb_append)NYB_APPEND_INIT;
  bench->append.tokens = 1;
  bench->append.key = bench->append.value = input;
  bench->part_bytes = elements * (int64_t)nyb_dtype_bytes(settings->dtype);
  int status = nyb_bench_allocate_copies(bench->run, 2 * bench->part_bytes, &bench->copies);
  if (status != 0) return status;
  status = nyb_bench_random_as(bench->run->preparer, bench->copies.memory, settings->dtype,
                               2 * elements, 1);
  if (status == 0) status = nyb_bench_place_copies(bench->run, &bench->copies);
  /* As many of the tokens as there are caches. */
  if (bench->copies.count > CACHES) bench->copies.count = CACHES;
  return status;
}

static int64_t stored_bytes(const append_bench *bench, const int64_t *field, nyb_width width) {
  const nyb_bench_settings *settings = bench->run->settings;
  const nyb_format key = nyb_width_format(width.key_bits, settings->group_size, settings->dtype);
  const nyb_format value =
      nyb_width_format(width.value_bits, settings->group_size, settings->dtype);
  return field[BATCH] * field[KV_HEADS] *
         (nyb_format_row_bytes(&key, field[HEAD_DIM]) +
          nyb_format_row_bytes(&value, field[HEAD_DIM]));
}

static void report(const append_bench *bench, const nyb_bench_shape *shape, nyb_width width,
                   const nyb_timing *timing, int64_t bytes) {
  const nyb_bench_settings *settings = bench->run->settings;
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", "append");
  nyb_json_add_integers(result, "shape", shape->field, FIELDS);
  cJSON_AddStringToObject(result, "cache", nyb_name_width(width).text);
  cJSON_AddNumberToObject(result, "k_bits", width.key_bits);
  cJSON_AddNumberToObject(result, "v_bits", width.value_bits);
  cJSON_AddNumberToObject(result, "group_size", (double)settings->group_size);
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(settings->dtype));
  cJSON_AddStringToObject(result, "rule", nyb_rule_name(settings->rule));
  nyb_bench_add_timing(result, bench->on, true, timing, bytes);
  cJSON_AddItemToArray(bench->run->results, result);

  nyb_table *table = bench->run->table;
  nyb_table_add(table, "%s", nyb_bench_name_shape(shape, FIELDS).text);
  nyb_table_add(table, "%s", nyb_name_width(width).text);
  nyb_table_add(table, "%s", nyb_dtype_name(settings->dtype));
  nyb_bench_add_timing_cells(table, timing, bytes, bench->on->copy.median_gb_per_s);
}

static int run_width(nyb_bench_run *run, const nyb_bench_shape *shape, nyb_width width) {
  append_bench bench = {.run = run, .on = &run->contexts[0]};
  nyb_progress_show("append %s, %s", nyb_bench_name_shape(shape, FIELDS).text,
                    nyb_name_width(width).text);
  int status = create_caches(&bench, shape->field, width);
  if (status == 0) status = prepare_tokens(&bench, shape->field);
  nyb_timing timing;
  /* A replay appends two tokens to each cache, and one more was appended before; the captured calls
   * themselves count on the host alone. */
  enum { TOKENS_A_REPLAY = 2 };
  if (status == 0) {
    status = nyb_bench_measure(run->settings, bench.on, &bench.copies,
                               (CAPACITY_TOKENS - 8) / TOKENS_A_REPLAY, run_call, &bench, &timing);
  }
  if (status == 0) {
    const int64_t bytes = 2 * bench.part_bytes + stored_bytes(&bench, shape->field, width);
    report(&bench, shape, width, &timing, bytes);
  }
  for (int i = 0; i < CACHES; i++) nyb_cache_destroy(bench.caches[i]);
  nyb_release_placed(run->settings->backend, bench.copies.memory);
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

const nyb_bench_operation nyb_bench_append = {
    .name = "append",
    .columns = "<B,Hkv,D|<cache|<dtype|>median us|>min|>p10|>p90|>repeats|>GB/s|>of copy",
    .shape_fields = FIELDS,
    .shape_words = "B,Hkv,D",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .needs_copy = true,
    .on_cuda = true,
    .run = run_shapes,
};
