/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "replay.h"
#include "support.h"
#include "table.h"

/* What the mean step reads in the median step's time. */
static double median_gb_per_s(const nyb_replay_task *task, const nyb_replay_measure *measure) {
  return measure->total_gb / (double)task->steps / (measure->median_us * 1e-6);
}

/* ---- Text --------------------------------------------------------------------------------- */

static void print_only_plain(const nyb_replay_settings *settings) {
  if (!settings->without_groups) return;
  printf("note    neither 64 nor 32 divides the rows: only the 16-bit cache is replayed\n");
}

/* What some layers do beyond plain causal attention. */
static void print_extras(const nyb_trace *trace) {
  for (int64_t i = 0; i < trace->layer_count; i++) {
    const nyb_trace_layer *layer = &trace->layers[i];
    if (layer->window_tokens == 0 && layer->softcap == 0) continue;
    printf("        layer %lld:", (long long)layer->index);
    if (layer->window_tokens != 0) {
      printf(" a window of %lld tokens", (long long)layer->window_tokens);
    }
    if (layer->softcap != 0) {
      printf("%s softcap %g", layer->window_tokens != 0 ? "," : "", layer->softcap);
    }
    putchar('\n');
  }
}

static void print_heading(const nyb_context *context, const nyb_replay_settings *settings,
                          const nyb_replay_task *task, const nyb_replay_result *first) {
  const nyb_trace *trace = task->trace;
  const nyb_trace_layer *layer = &trace->layers[0];
  char *model = nyb_command_copy_text(trace->model);
  nyb_make_printable(model);
  printf("trace   %s: %s\n", trace->path, model);
  free(model);
  printf("        %lld layers (", (long long)trace->layer_count);
  for (int64_t i = 0; i < trace->layer_count; i++) {
    printf("%s%lld", i == 0 ? "" : ", ", (long long)trace->layers[i].index);
  }
  printf("), %lld query heads, %lld KV heads, head_dim %lld", (long long)layer->query_heads,
         (long long)layer->kv_heads, (long long)layer->key_dim);
  if (layer->value_dim != layer->key_dim) printf("/%lld", (long long)layer->value_dim);
  printf(", %s, scale %g\n", nyb_dtype_name(trace->dtype), trace->scale);
  print_extras(trace);
  print_only_plain(settings);
  printf(
      "replay  %lld prompt tokens, %lld steps; groups of %lld, %s path, %s rounding, %s out, %s, "
      "%lld thread%s\n\n",
      (long long)task->prompt_tokens, (long long)task->steps, (long long)settings->group_size,
      nyb_path_name(first->plan.path), nyb_rounding_name(settings->rounding),
      nyb_dtype_name(task->output_dtype), nyb_isa_name(nyb_context_isa(context)),
      (long long)nyb_context_threads(context), nyb_context_threads(context) == 1 ? "" : "s");
}

static void add_row(nyb_table *table, const nyb_replay_task *task, const char *name,
                    const char *layer, const nyb_replay_measure *measure) {
  const nyb_replay_agreement *agreement = &measure->agreement;
  nyb_table_add(table, "%s", name);
  nyb_table_add(table, "%s", layer);
  nyb_table_add(table, "%lld", (long long)measure->bytes_per_token);
  nyb_table_add(table, "%.1f%%",
                100.0 * (double)measure->bytes_per_token / (double)measure->bytes_per_token_16bit);
  nyb_table_add(table, "%.5f", measure->error.relative_l2);
  nyb_table_add(table, "%.5f", measure->error.max_abs);
  nyb_table_add(table, "%.5f", measure->error.min_cosine);
  if (agreement->known) {
    nyb_table_add(table, "%.2f%%",
                  100.0 * (double)agreement->bit_equal / (double)agreement->outputs);
    nyb_table_add(table, "%.2f ulp", agreement->max_row_ulps);
  } else {
    nyb_table_add(table, "-");
    nyb_table_add(table, "-");
  }
  nyb_table_add(table, "%.1f", measure->median_us);
  nyb_table_add(table, "%.0f", 1e6 / measure->median_us);
  nyb_table_add(table, "%.2f", median_gb_per_s(task, measure));
}

void nyb_replay_print_text(const nyb_context *context, const nyb_replay_settings *settings,
                           const nyb_replay_task *task, const nyb_replay_result *results,
                           int64_t count) {
  const int64_t layers = task->trace->layer_count;
  nyb_table *table = nyb_table_create(
      "<cache|<layer|>bytes/token|>of 16-bit|>rel. error|>max error|>min cosine|>equal|>apart|"
      ">us/token|>tokens/s|>GB/s");
  for (int64_t i = 0; i < count; i++) {
    const nyb_width_name name = nyb_name_width(results[i].width);
    for (int64_t layer = 0; settings->show_layers && layer < layers; layer++) {
      char index[24];
      snprintf(index, sizeof index, "%lld", (long long)task->trace->layers[layer].index);
      add_row(table, task, name.text, index, &results[i].layers[layer]);
    }
    add_row(table, task, name.text, "all", &results[i].all);
  }
  print_heading(context, settings, task, &results[0]);
  nyb_table_print(table);
  for (int64_t i = 0; i < count; i++) {
    if (results[i].all.agreement.known) continue;
    printf("%s: the other path does not run: %s\n", nyb_name_width(results[i].width).text,
           results[i].all.agreement.reason);
  }
}

/* ---- JSON --------------------------------------------------------------------------------- */

static void add_agreement(cJSON *object, const nyb_plan *plan,
                          const nyb_replay_agreement *agreement) {
  cJSON *json = cJSON_AddObjectToObject(object, "agreement");
  const bool is_fused = plan->path == NYB_PATH_FUSED;
  cJSON_AddStringToObject(json, "with", nyb_path_name(is_fused ? NYB_PATH_COMPAT : NYB_PATH_FUSED));
  if (!agreement->known) {
    cJSON_AddStringToObject(json, "unknown_because", agreement->reason);
    return;
  }
  cJSON_AddNumberToObject(json, "outputs", (double)agreement->outputs);
  cJSON_AddNumberToObject(json, "bit_equal", (double)agreement->bit_equal);
  nyb_json_add_number(json, "max_abs", agreement->max_abs);
  nyb_json_add_number(json, "max_row_ulps", agreement->max_row_ulps);
  nyb_json_add_number(json, "median_us", agreement->other_median_us);
}

static void add_measure(cJSON *object, const nyb_replay_task *task, const nyb_plan *plan,
                        const nyb_replay_measure *measure) {
  cJSON_AddNumberToObject(object, "bytes_per_token", (double)measure->bytes_per_token);
  cJSON_AddNumberToObject(object, "bytes_per_token_16bit", (double)measure->bytes_per_token_16bit);
  nyb_json_add_number(object, "share_of_16bit",
                      (double)measure->bytes_per_token / (double)measure->bytes_per_token_16bit);
  nyb_json_add_number(object, "relative_l2", measure->error.relative_l2);
  nyb_json_add_number(object, "max_abs_error", measure->error.max_abs);
  nyb_json_add_number(object, "one_minus_min_cosine", 1 - measure->error.min_cosine);
  add_agreement(object, plan, &measure->agreement);
  nyb_json_add_number(object, "median_us", measure->median_us);
  nyb_json_add_number(object, "total_us", measure->total_us);
  nyb_json_add_number(object, "append_median_us", measure->append_median_us);
  nyb_json_add_number(object, "tokens_per_s", 1e6 / measure->median_us);
  nyb_json_add_number(object, "tokens_per_s_in_all",
                      (double)task->steps / (measure->total_us * 1e-6));
  nyb_json_add_number(object, "gb_per_s", median_gb_per_s(task, measure));
  nyb_json_add_number(object, "gb_per_s_in_all", measure->total_gb / (measure->total_us * 1e-6));
}

static cJSON *describe_trace(const nyb_trace *trace) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "file", trace->path);
  cJSON_AddStringToObject(json, "model", trace->model);
  cJSON_AddStringToObject(json, "text", trace->text);
  cJSON_AddStringToObject(json, "dtype", nyb_dtype_name(trace->dtype));
  cJSON_AddNumberToObject(json, "tokens", (double)trace->tokens);
  nyb_json_add_number(json, "scale", trace->scale);
  cJSON *layers = cJSON_AddArrayToObject(json, "layers");
  for (int64_t i = 0; i < trace->layer_count; i++) {
    const nyb_trace_layer *layer = &trace->layers[i];
    cJSON *item = cJSON_CreateObject();
    cJSON_AddNumberToObject(item, "layer", (double)layer->index);
    cJSON_AddNumberToObject(item, "query_heads", (double)layer->query_heads);
    cJSON_AddNumberToObject(item, "kv_heads", (double)layer->kv_heads);
    cJSON_AddNumberToObject(item, "key_dim", (double)layer->key_dim);
    cJSON_AddNumberToObject(item, "value_dim", (double)layer->value_dim);
    if (layer->window_tokens != 0) {
      cJSON_AddNumberToObject(item, "window_tokens", (double)layer->window_tokens);
    }
    if (layer->softcap != 0) cJSON_AddNumberToObject(item, "softcap", layer->softcap);
    cJSON_AddItemToArray(layers, item);
  }
  return json;
}

static cJSON *describe_result(const nyb_replay_settings *settings, const nyb_replay_task *task,
                              const nyb_replay_result *result) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "cache", nyb_name_width(result->width).text);
  cJSON_AddNumberToObject(json, "k_bits", result->width.key_bits);
  cJSON_AddNumberToObject(json, "v_bits", result->width.value_bits);
  cJSON_AddNumberToObject(json, "group_size", (double)settings->group_size);
  cJSON_AddStringToObject(json, "path", nyb_path_name(result->plan.path));
  cJSON_AddStringToObject(json, "path_reason", result->plan.reason);
  add_measure(json, task, &result->plan, &result->all);
  cJSON *layers = cJSON_AddArrayToObject(json, "layers");
  for (int64_t i = 0; i < task->trace->layer_count; i++) {
    cJSON *item = cJSON_CreateObject();
    cJSON_AddNumberToObject(item, "layer", (double)task->trace->layers[i].index);
    add_measure(item, task, &result->plan, &result->layers[i]);
    cJSON_AddItemToArray(layers, item);
  }
  return json;
}

void nyb_replay_print_json(const nyb_context *context, const nyb_replay_settings *settings,
                           const nyb_replay_task *task, const nyb_replay_result *results,
                           int64_t count) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "command", "replay");
  cJSON_AddStringToObject(json, "version", nyb_version());
  cJSON_AddItemToObject(json, "machine", nyb_json_machine());
  cJSON_AddItemToObject(json, "trace", describe_trace(task->trace));
  cJSON_AddNumberToObject(json, "prompt_tokens", (double)task->prompt_tokens);
  cJSON_AddNumberToObject(json, "steps", (double)task->steps);
  cJSON_AddNumberToObject(json, "compared_steps", (double)task->compared_steps);
  cJSON_AddStringToObject(json, "rounding", nyb_rounding_name(settings->rounding));
  cJSON_AddStringToObject(json, "output_dtype", nyb_dtype_name(task->output_dtype));
  cJSON_AddStringToObject(json, "isa", nyb_isa_name(nyb_context_isa(context)));
  cJSON_AddNumberToObject(json, "threads", (double)nyb_context_threads(context));
  cJSON *array = cJSON_AddArrayToObject(json, "results");
  for (int64_t i = 0; i < count; i++) {
    cJSON_AddItemToArray(array, describe_result(settings, task, &results[i]));
  }
  nyb_json_print(json);
}
