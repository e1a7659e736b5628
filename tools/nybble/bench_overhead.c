/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench overhead: what a call costs when there is next to nothing to do. */
#include <math.h>
#include <stdlib.h>

#include "bench.h"
#include "progress.h"

/* One token, one KV head with one query head of 64: the smallest work that is still attention. */
enum { DIM = 64, CALLS_PER_SAMPLE = 256, CACHE_TOKENS = 1024 };

typedef struct state {
  nyb_context *context;
  nyb_cache *cache;
  nyb_append append;
  nyb_attention attention;
  nyb_plan plan;
  void *workspace;
  nyb_geglu geglu;
  char *memory; /* rows of DIM floats: query, key, value, out, gate, up, out */
} state;

static nyb_status run_attention(void *data, int64_t index) {
  (void)index;
  const state *s = data;
  nyb_status status = NYB_OK;
  for (int i = 0; i < CALLS_PER_SAMPLE && status == NYB_OK; i++) {
    status =
        nyb_attention_run(s->context, &s->attention, s->workspace, s->plan.workspace_bytes, NULL);
  }
  return status;
}

/* Room for CACHE_TOKENS was made before, and the cache is emptied within it: once in that many
 * calls, which a sample's median does not feel. */
static nyb_status run_append(void *data, int64_t index) {
  (void)index;
  const state *s = data;
  nyb_status status = NYB_OK;
  if (nyb_cache_length(s->cache, 0) > CACHE_TOKENS - CALLS_PER_SAMPLE) {
    status = nyb_cache_reset(s->cache, NULL);
  }
  for (int i = 0; i < CALLS_PER_SAMPLE && status == NYB_OK; i++) {
    status = nyb_cache_append(s->cache, &s->append, NULL);
  }
  return status;
}

static nyb_status run_geglu(void *data, int64_t index) {
  (void)index;
  const state *s = data;
  nyb_status status = NYB_OK;
  for (int i = 0; i < CALLS_PER_SAMPLE && status == NYB_OK; i++) {
    status = nyb_geglu_run(s->context, &s->geglu, NULL);
  }
  return status;
}

static int failed(void) { return nyb_command_failed("%s", nyb_last_error()); }

static void *row(const state *s, const nyb_bench_settings *settings, int64_t index) {
  return s->memory + index * DIM * (int64_t)nyb_dtype_bytes(settings->dtype);
}

static int set_up_cache(state *s, const nyb_bench_settings *settings, nyb_width width) {
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = options.kv_heads = 1;
  options.key_dim = options.value_dim = DIM;
  options.key_format = nyb_width_format(width.key_bits, settings->group_size, settings->dtype);
  options.value_format = nyb_width_format(width.value_bits, settings->group_size, settings->dtype);
  options.initial_capacity_tokens = CACHE_TOKENS;
  options.rule = settings->rule;
  if (nyb_cache_create(s->context, &options, &s->cache) != NYB_OK) return failed();
  const nyb_input input = {.dtype = settings->dtype, .stride = {DIM, DIM, DIM}};
  s->append = (nyb_append)NYB_APPEND_INIT;
  s->append.tokens = 1;
  s->append.key = s->append.value = input;
  s->append.key.data = row(s, settings, 1);
  s->append.value.data = row(s, settings, 2);
  return nyb_cache_append(s->cache, &s->append, NULL) == NYB_OK ? 0 : failed();
}

static int set_up(state *s, const nyb_bench_settings *settings, nyb_width width) {
  const int64_t rows = 7;
  s->memory = nyb_command_allocate(rows * DIM * (int64_t)nyb_dtype_bytes(settings->dtype));
  int status = nyb_bench_random_as(s->context, s->memory, settings->dtype, rows * DIM, 1);
  if (status == 0) status = set_up_cache(s, settings, width);
  if (status != 0) return status;
  s->attention = (nyb_attention)NYB_ATTENTION_INIT;
  if (nyb_cache_view(s->cache, &s->attention) != NYB_OK) return failed();
  s->attention.query_heads = 1;
  s->attention.query_len = 1;
  s->attention.q =
      (nyb_input){.data = row(s, settings, 0), .dtype = settings->dtype, .stride = {DIM, DIM, DIM}};
  s->attention.out = (nyb_output){
      .data = row(s, settings, 3), .dtype = settings->dtype, .stride = {DIM, DIM, DIM}};
  s->attention.scale = 0.125f;
  s->attention.path = settings->path;
  s->attention.rounding = settings->rounding;
  s->plan = (nyb_plan)NYB_PLAN_INIT;
  if (nyb_attention_plan(s->context, &s->attention, &s->plan) != NYB_OK) return failed();
  s->workspace = nyb_command_allocate((int64_t)s->plan.workspace_bytes);
  s->geglu = (nyb_geglu)NYB_GEGLU_INIT;
  s->geglu.rows = 1;
  s->geglu.columns = DIM;
  s->geglu.dtype = settings->dtype;
  s->geglu.gate = row(s, settings, 4);
  s->geglu.up = row(s, settings, 5);
  s->geglu.out = row(s, settings, 6);
  s->geglu.gate_stride = s->geglu.up_stride = s->geglu.out_stride = DIM;
  return 0;
}

static void report(nyb_bench_run *run, const nyb_bench_context *on, const char *operation,
                   const char *cache, const nyb_timing *timing) {
  const double to_ns = 1e3 / CALLS_PER_SAMPLE;
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", operation);
  cJSON_AddStringToObject(result, "cache", cache);
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(run->settings->dtype));
  cJSON_AddNumberToObject(result, "threads", (double)on->threads);
  cJSON_AddStringToObject(result, "isa", nyb_isa_name(on->isa));
  nyb_json_add_number(result, "median_us", timing->median_us / CALLS_PER_SAMPLE);
  nyb_json_add_number(result, "median_ns", timing->median_us * to_ns);
  nyb_json_add_number(result, "min_ns", timing->min_us * to_ns);
  nyb_json_add_number(result, "p10_ns", timing->p10_us * to_ns);
  nyb_json_add_number(result, "p90_ns", timing->p90_us * to_ns);
  cJSON_AddNumberToObject(result, "calls", (double)(timing->repeats * CALLS_PER_SAMPLE));
  cJSON_AddItemToArray(run->results, result);

  nyb_table_add(run->table, "%s", operation);
  nyb_table_add(run->table, "%s", cache);
  nyb_table_add(run->table, "%s", nyb_isa_name(on->isa));
  nyb_table_add(run->table, "%lld", (long long)on->threads);
  nyb_table_add(run->table, "%.0f", timing->median_us * to_ns);
  nyb_table_add(run->table, "%.0f", timing->min_us * to_ns);
  nyb_table_add(run->table, "%.0f", timing->p10_us * to_ns);
  nyb_table_add(run->table, "%.0f", timing->p90_us * to_ns);
  nyb_table_add(run->table, "%lld", (long long)(timing->repeats * CALLS_PER_SAMPLE));
}

static int measure(nyb_bench_run *run, const nyb_bench_context *on, nyb_width width) {
  static const struct {
    const char *name;
    nyb_bench_call call;
  } operations[] = {
      /* Attention first: it runs over the one token that append has not yet added to. */
      {"attention", run_attention},
      {"append", run_append},
      {"geglu", run_geglu},
  };
  state s = {.context = on->context};
  int status = set_up(&s, run->settings, width);
  for (size_t i = 0; i < sizeof operations / sizeof operations[0] && status == 0; i++) {
    nyb_progress_show("overhead of %s, %s", operations[i].name, nyb_name_width(width).text);
    nyb_timing timing;
    status = nyb_bench_measure(run->settings, on, NULL, 0, operations[i].call, &s, &timing);
    const bool no_cache = operations[i].call == run_geglu;
    if (status == 0) {
      report(run, on, operations[i].name, no_cache ? "" : nyb_name_width(width).text, &timing);
    }
  }
  nyb_cache_destroy(s.cache);
  free(s.workspace);
  free(s.memory);
  return status;
}

static int run_widths(nyb_bench_run *run) {
  int status = 0;
  for (int64_t i = 0; i < run->context_count; i++) {
    for (int64_t w = 0; w < run->settings->widths.count && status == 0; w++) {
      status = measure(run, &run->contexts[i], run->settings->widths.items[w]);
    }
  }
  return status;
}

const nyb_bench_operation nyb_bench_overhead = {
    .name = "overhead",
    .on_cpu = true,
    .columns = "<call|<cache|<isa|>threads|>median ns|>min|>p10|>p90|>calls",
    .run = run_widths,
};
