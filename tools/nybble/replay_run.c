/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_device.h"
#include "placement.h"
#include "progress.h"
#include "reference.h"
#include "replay.h"
#include "statistics.h"
#include "support.h"

/* One layer while a configuration runs. */
typedef struct layer_run {
  const nyb_trace_layer *layer;
  void *query, *key, *value; /* the layer's, where the backend wants them */
  nyb_cache *cache;
  nyb_plan plan, other_plan;
  bool other_supported;
  char other_reason[192];
  void *workspace, *other_workspace;
  char *outputs;      /* [step][query head][value_dim], placed as well */
  void *scratch;      /* one step's outputs */
  char *host_outputs; /* the outputs of all steps, once they are there */
  void *host_scratch;
  double *attend_us, *append_us; /* [step] */
  double *other_us;              /* [compared step] */
} layer_run;

typedef struct run_state {
  nyb_context *context;
  const nyb_replay_settings *settings;
  const nyb_replay_task *task;
  nyb_width width;
  layer_run *layers;
  device_event *events[2]; /* CUDA: around what is timed */
} run_state;

static int library_failed(const run_state *state, const layer_run *run, const char *action) {
  return nyb_command_failed("%s, layer %lld: %s: %s", nyb_name_width(state->width).text,
                            (long long)run->layer->index, action, nyb_last_error());
}

/* ---- Setting up --------------------------------------------------------------------------- */

static int64_t step_bytes(const run_state *state, const layer_run *run) {
  return run->layer->query_heads * run->layer->value_dim *
         (int64_t)nyb_dtype_bytes(state->task->output_dtype);
}

/* The attention of one step, the tokens' place excepted. */
static nyb_attention describe(const run_state *state, const layer_run *run, int64_t step,
                              void *out) {
  const nyb_replay_task *task = state->task;
  const nyb_trace_layer *layer = run->layer;
  nyb_attention attention = NYB_ATTENTION_INIT;
  nyb_cache_view(run->cache, &attention);
  attention.query_heads = layer->query_heads;
  attention.query_len = 1;
  attention.q = nyb_trace_view(task->trace, run->query, layer->key_dim, task->prompt_tokens + step);
  attention.out = (nyb_output){
      .data = out, .dtype = task->output_dtype, .stride = {0, layer->value_dim, layer->value_dim}};
  attention.scale = (float)task->trace->scale;
  attention.window_tokens = layer->window_tokens;
  attention.softcap = (float)layer->softcap;
  attention.path = state->settings->path;
  attention.rounding = state->settings->rounding;
  return attention;
}

static int append(const run_state *state, const layer_run *run, int64_t first, int64_t tokens) {
  const nyb_trace_layer *layer = run->layer;
  nyb_append request = NYB_APPEND_INIT;
  request.tokens = tokens;
  request.key = nyb_trace_view(state->task->trace, run->key, layer->key_dim, first);
  request.value = nyb_trace_view(state->task->trace, run->value, layer->value_dim, first);
  if (nyb_cache_append(run->cache, &request, NULL) == NYB_OK) return 0;
  return library_failed(state, run, "append");
}

static int create_cache(const run_state *state, layer_run *run) {
  const nyb_replay_task *task = state->task;
  const nyb_trace_layer *layer = run->layer;
  /* Scales of an f32 trace are bf16, as those of the model that it comes from would be. */
  const nyb_dtype dtype = task->trace->dtype == NYB_F32 ? NYB_BF16 : task->trace->dtype;
  const int64_t group_size = state->settings->group_size;
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 1;
  options.kv_heads = layer->kv_heads;
  options.key_dim = layer->key_dim;
  options.value_dim = layer->value_dim;
  options.key_format = nyb_width_format(state->width.key_bits, group_size, dtype);
  options.value_format = nyb_width_format(state->width.value_bits, group_size, dtype);
  options.rule = state->settings->backend == NYB_BACKEND_CUDA ? NYB_RULE_MLX_GPU : NYB_RULE_MLX_CPU;
  if (nyb_cache_create(state->context, &options, &run->cache) != NYB_OK) {
    return library_failed(state, run, "cache");
  }
  const int64_t tokens = task->prompt_tokens + task->steps;
  if (nyb_cache_reserve(run->cache, tokens, NULL) != NYB_OK) {
    return library_failed(state, run, "cache");
  }
  return append(state, run, 0, task->prompt_tokens);
}

static int place_workspace(const run_state *state, const nyb_plan *plan, void **workspace) {
  *workspace = nyb_command_allocate((int64_t)plan->workspace_bytes);
  return nyb_place(state->settings->backend, workspace, (int64_t)plan->workspace_bytes);
}

/* Plans both paths: the one that is measured, and the other one to compare with. */
static int plan_paths(const run_state *state, layer_run *run) {
  nyb_attention attention = describe(state, run, 0, run->outputs);
  run->plan = (nyb_plan)NYB_PLAN_INIT;
  if (nyb_attention_plan(state->context, &attention, &run->plan) != NYB_OK) {
    return library_failed(state, run, "attention");
  }
  int status = place_workspace(state, &run->plan, &run->workspace);
  if (status != 0) return status;
  attention.path = run->plan.path == NYB_PATH_FUSED ? NYB_PATH_COMPAT : NYB_PATH_FUSED;
  run->other_plan = (nyb_plan)NYB_PLAN_INIT;
  run->other_supported = nyb_attention_plan(state->context, &attention, &run->other_plan) == NYB_OK;
  if (run->other_supported) {
    status = place_workspace(state, &run->other_plan, &run->other_workspace);
  } else {
    snprintf(run->other_reason, sizeof run->other_reason, "%s", nyb_last_error());
  }
  return status;
}

static int place_layer(const run_state *state, layer_run *run) {
  const nyb_backend backend = state->settings->backend;
  const nyb_trace_layer *layer = run->layer;
  const int64_t row_bytes =
      state->task->trace->tokens * (int64_t)nyb_dtype_bytes(state->task->trace->dtype);
  const int64_t bytes = step_bytes(state, run), all_bytes = state->task->steps * bytes;
  void *outputs = NULL;
  int status = nyb_place_copy(backend, layer->query,
                              layer->query_heads * layer->key_dim * row_bytes, &run->query);
  if (status == 0) {
    status = nyb_place_copy(backend, layer->key, layer->kv_heads * layer->key_dim * row_bytes,
                            &run->key);
  }
  if (status == 0) {
    status = nyb_place_copy(backend, layer->value, layer->kv_heads * layer->value_dim * row_bytes,
                            &run->value);
  }
  if (status == 0) status = nyb_place_copy(backend, run->host_outputs, all_bytes, &outputs);
  if (status == 0) status = nyb_place_copy(backend, run->host_scratch, bytes, &run->scratch);
  run->outputs = outputs;
  return status;
}

static int set_up_layer(const run_state *state, layer_run *run) {
  const int64_t steps = state->task->steps, times_bytes = steps * (int64_t)sizeof(double);
  run->host_outputs = nyb_command_allocate(steps * step_bytes(state, run));
  run->host_scratch = nyb_command_allocate(step_bytes(state, run));
  run->attend_us = nyb_command_allocate(times_bytes);
  run->append_us = nyb_command_allocate(times_bytes);
  run->other_us = nyb_command_allocate(state->task->compared_steps * (int64_t)sizeof(double));
  int status = place_layer(state, run);
  if (status == 0) status = create_cache(state, run);
  return status != 0 ? status : plan_paths(state, run);
}

static void release_layer(nyb_backend backend, layer_run *run) {
  void *const placed[] = {run->query,           run->key,     run->value,  run->workspace,
                          run->other_workspace, run->outputs, run->scratch};
  nyb_cache_destroy(run->cache);
  for (size_t i = 0; i < sizeof placed / sizeof placed[0]; i++) {
    nyb_release_placed(backend, placed[i]);
  }
  free(run->host_outputs);
  free(run->host_scratch);
  free(run->attend_us);
  free(run->append_us);
  free(run->other_us);
}

/* ---- Decoding ----------------------------------------------------------------------------- */

/* The time of what is called between the two: on the GPU that of the work itself. */
static int start_clock(const run_state *state, int64_t *start_ns) {
  *start_ns = nyb_now_ns();
  if (state->settings->backend == NYB_BACKEND_CPU) return 0;
  return device_event_record(state->events[0], NULL) ? 0 : nyb_device_failed();
}

static int stop_clock(const run_state *state, int64_t start_ns, double *time_us) {
  *time_us = (double)(nyb_now_ns() - start_ns) * 1e-3;
  if (state->settings->backend == NYB_BACKEND_CPU) return 0;
  return device_event_record(state->events[1], NULL) &&
                 device_elapsed_us(state->events[0], state->events[1], time_us)
             ? 0
             : nyb_device_failed();
}

static int attend(const run_state *state, const layer_run *run, const nyb_attention *attention,
                  double *time_us) {
  const bool is_other = attention->path == run->other_plan.path && run->other_supported;
  void *workspace = is_other ? run->other_workspace : run->workspace;
  const size_t workspace_bytes =
      is_other ? run->other_plan.workspace_bytes : run->plan.workspace_bytes;
  int64_t start_ns;
  const int status = start_clock(state, &start_ns);
  if (status != 0) return status;
  if (nyb_attention_run(state->context, attention, workspace, workspace_bytes, NULL) != NYB_OK) {
    return library_failed(state, run, "attention");
  }
  return stop_clock(state, start_ns, time_us);
}

/* Wakes the threads and brings code and caches in, as the steps before would have. */
static int warm_up(const run_state *state, const layer_run *run) {
  const nyb_attention attention = describe(state, run, 0, run->scratch);
  double time_us;
  int status = 0;
  for (int i = 0; i < 3 && status == 0; i++) status = attend(state, run, &attention, &time_us);
  return status;
}

static int decode_step(const run_state *state, layer_run *run, int64_t step) {
  char *out = run->outputs + step * step_bytes(state, run);
  int64_t start_ns;
  int status = start_clock(state, &start_ns);
  if (status == 0) status = append(state, run, state->task->prompt_tokens + step, 1);
  if (status == 0) status = stop_clock(state, start_ns, &run->append_us[step]);
  if (status != 0) return status;
  const nyb_attention attention = describe(state, run, step, out);
  return attend(state, run, &attention, &run->attend_us[step]);
}

/* ---- Comparing ---------------------------------------------------------------------------- */

/* Runs the attention of a step again, with the whole trace in the cache but the length of that
 * step; the outputs come to host_scratch. */
static int attend_again(const run_state *state, const layer_run *run, int64_t step, nyb_path path,
                        double *time_us) {
  const nyb_backend backend = state->settings->backend;
  const int32_t length = (int32_t)(state->task->prompt_tokens + step + 1);
  nyb_attention attention = describe(state, run, step, run->scratch);
  void *lengths = NULL;
  int status = nyb_place_copy(backend, &length, sizeof length, &lengths);
  attention.lengths = lengths;
  attention.path = path;
  if (status == 0) status = attend(state, run, &attention, time_us);
  if (status == 0) {
    status = nyb_fetch(backend, run->scratch, step_bytes(state, run), run->host_scratch);
  }
  nyb_release_placed(backend, lengths);
  return status;
}

/* Not a bit may change. */
static int check_repeat(const run_state *state, const layer_run *run, int64_t step) {
  double time_us;
  const int status = attend_again(state, run, step, state->settings->path, &time_us);
  if (status != 0) return status;
  const char *first = run->host_outputs + step * step_bytes(state, run);
  if (memcmp(first, run->host_scratch, (size_t)step_bytes(state, run)) == 0) return 0;
  return nyb_command_failed(
      "%s, layer %lld, step %lld: the same attention gave other bits the "
      "second time",
      nyb_name_width(state->width).text, (long long)run->layer->index, (long long)step);
}

/* One row of outputs, by both paths. */
static void compare_row(const void *ours, const void *theirs, nyb_dtype dtype, int64_t first,
                        int64_t count, nyb_replay_agreement *agreement) {
  double largest = 0, max_abs = 0;
  for (int64_t i = first; i < first + count; i++) {
    const double a = nyb_element(ours, dtype, i), b = nyb_element(theirs, dtype, i);
    largest = fmax(largest, fmax(fabs(a), fabs(b)));
    max_abs = fmax(max_abs, fabs(a - b));
    agreement->bit_equal += a == b && signbit(a) == signbit(b);
  }
  agreement->outputs += count;
  agreement->max_abs = fmax(agreement->max_abs, max_abs);
  agreement->max_row_ulps = fmax(agreement->max_row_ulps, max_abs / nyb_ulp(dtype, largest));
}

static int compare_paths(const run_state *state, const layer_run *run, int64_t step,
                         nyb_replay_agreement *agreement, double *time_us) {
  const int status = attend_again(state, run, step, run->other_plan.path, time_us);
  if (status != 0) return status;
  const char *ours = run->host_outputs + step * step_bytes(state, run);
  const int64_t dim = run->layer->value_dim;
  for (int64_t head = 0; head < run->layer->query_heads; head++) {
    compare_row(ours, run->host_scratch, state->task->output_dtype, head * dim, dim, agreement);
  }
  return 0;
}

/* Sums over outputs and reference, from which the errors follow. */
typedef struct error_sums {
  double error_squares, reference_squares, max_abs, min_cosine;
} error_sums;

static int measure_error(const run_state *state, const layer_run *run, const double *reference,
                         error_sums *sums) {
  const int64_t dim = run->layer->value_dim;
  const int64_t rows = state->task->steps * run->layer->query_heads;
  for (int64_t row = 0; row < rows; row++) {
    double dot = 0, out_squares = 0, reference_squares = 0;
    for (int64_t d = row * dim; d < (row + 1) * dim; d++) {
      const double out = nyb_element(run->host_outputs, state->task->output_dtype, d);
      if (!isfinite(out)) {
        return nyb_command_failed(
            "%s, layer %lld, step %lld, query head %lld: the output is not finite",
            nyb_name_width(state->width).text, (long long)run->layer->index,
            (long long)(row / run->layer->query_heads), (long long)(row % run->layer->query_heads));
      }
      const double error = out - reference[d];
      sums->error_squares += error * error;
      sums->max_abs = fmax(sums->max_abs, fabs(error));
      dot += out * reference[d];
      out_squares += out * out;
      reference_squares += reference[d] * reference[d];
    }
    sums->reference_squares += reference_squares;
    const double norms = sqrt(out_squares * reference_squares);
    if (norms > 0) sums->min_cosine = fmin(sums->min_cosine, dot / norms);
  }
  return 0;
}

static nyb_replay_error error_from(const error_sums *sums) {
  return (nyb_replay_error){
      .relative_l2 = sums->reference_squares > 0
                         ? sqrt(sums->error_squares / sums->reference_squares)
                         : sqrt(sums->error_squares),
      .max_abs = sums->max_abs,
      .min_cosine = sums->min_cosine,
  };
}

/* ---- Summing up --------------------------------------------------------------------------- */

/* The median over steps of the sum over `layers` layers from run on. */
static double median_of_sums(const layer_run *run, int64_t layers, int64_t steps,
                             size_t times_offset) {
  double *sums = nyb_command_allocate(steps * (int64_t)sizeof *sums);
  for (int64_t i = 0; i < layers; i++) {
    const double *times = *(double *const *)((const char *)&run[i] + times_offset);
    for (int64_t step = 0; step < steps; step++) sums[step] += times[step];
  }
  nyb_sort_samples(sums, steps);
  const double median = nyb_quantile(sums, steps, 0.5);
  free(sums);
  return median;
}

static void measure_times(const run_state *state, const layer_run *run, int64_t layers,
                          nyb_replay_measure *measure) {
  const int64_t steps = state->task->steps;
  measure->median_us = median_of_sums(run, layers, steps, offsetof(layer_run, attend_us));
  measure->append_median_us = median_of_sums(run, layers, steps, offsetof(layer_run, append_us));
  measure->agreement.other_median_us =
      median_of_sums(run, layers, state->task->compared_steps, offsetof(layer_run, other_us));
  for (int64_t i = 0; i < layers; i++) {
    for (int64_t step = 0; step < steps; step++) measure->total_us += run[i].attend_us[step];
  }
}

static int measure_bytes(const run_state *state, const layer_run *run,
                         nyb_replay_measure *measure) {
  const nyb_trace_layer *layer = run->layer;
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  if (nyb_cache_get_usage(run->cache, &usage) != NYB_OK) {
    return library_failed(state, run, "usage");
  }
  const int64_t steps = state->task->steps, prompt = state->task->prompt_tokens;
  measure->bytes_per_token = usage.used_bytes / (prompt + steps);
  measure->bytes_per_token_16bit = layer->kv_heads * (layer->key_dim + layer->value_dim) * 2;
  int64_t tokens_read = 0;
  for (int64_t step = 0; step < steps; step++) {
    const int64_t seen = prompt + step + 1, window = layer->window_tokens;
    tokens_read += window > 0 && window < seen ? window : seen;
  }
  measure->total_gb = (double)tokens_read * (double)measure->bytes_per_token * 1e-9;
  return 0;
}

static void add_agreement(const nyb_replay_agreement *layer, nyb_replay_agreement *all) {
  if (!layer->known) {
    *all = *layer;
    return;
  }
  all->outputs += layer->outputs;
  all->bit_equal += layer->bit_equal;
  all->max_abs = fmax(all->max_abs, layer->max_abs);
  all->max_row_ulps = fmax(all->max_row_ulps, layer->max_row_ulps);
}

static void add_sums(const error_sums *layer, error_sums *all) {
  all->error_squares += layer->error_squares;
  all->reference_squares += layer->reference_squares;
  all->max_abs = fmax(all->max_abs, layer->max_abs);
  all->min_cosine = fmin(all->min_cosine, layer->min_cosine);
}

static int sum_up(const run_state *state, nyb_replay_result *result) {
  const int64_t layers = state->task->trace->layer_count;
  error_sums all_sums = {.min_cosine = 1};
  result->all.agreement.known = true;
  for (int64_t i = 0; i < layers; i++) {
    const layer_run *run = &state->layers[i];
    nyb_replay_measure *measure = &result->layers[i];
    error_sums sums = {.min_cosine = 1};
    int status = measure_error(state, run, state->task->reference[i], &sums);
    if (status == 0) status = measure_bytes(state, run, measure);
    if (status != 0) return status;
    measure->error = error_from(&sums);
    measure_times(state, run, 1, measure);
    add_sums(&sums, &all_sums);
    if (result->all.agreement.known) add_agreement(&measure->agreement, &result->all.agreement);
    result->all.bytes_per_token += measure->bytes_per_token;
    result->all.bytes_per_token_16bit += measure->bytes_per_token_16bit;
    result->all.total_gb += measure->total_gb;
  }
  result->all.error = error_from(&all_sums);
  measure_times(state, state->layers, layers, &result->all);
  return 0;
}

/* ---- One configuration -------------------------------------------------------------------- */

static int decode(const run_state *state) {
  const int64_t layers = state->task->trace->layer_count, steps = state->task->steps;
  int status = 0;
  for (int64_t i = 0; i < layers && status == 0; i++) status = warm_up(state, &state->layers[i]);
  for (int64_t step = 0; step < steps && status == 0; step++) {
    nyb_progress_show("%s: step %lld of %lld", nyb_name_width(state->width).text,
                      (long long)step + 1, (long long)steps);
    for (int64_t i = 0; i < layers && status == 0; i++) {
      status = decode_step(state, &state->layers[i], step);
    }
  }
  return status;
}

/* Both paths at one step, long after it. */
static int compare_step(const run_state *state, const layer_run *run, int64_t step,
                        nyb_replay_agreement *agreement, double *time_us) {
  const int status = check_repeat(state, run, step);
  if (status != 0 || !run->other_supported) return status;
  return compare_paths(state, run, step, agreement, time_us);
}

/* The compared steps lie evenly spread, the last one among them. */
static int compare(const run_state *state, nyb_replay_result *result) {
  const nyb_replay_task *task = state->task;
  int status = 0;
  for (int64_t i = 0; i < task->trace->layer_count && status == 0; i++) {
    const layer_run *run = &state->layers[i];
    nyb_replay_agreement *agreement = &result->layers[i].agreement;
    agreement->known = run->other_supported;
    memcpy(agreement->reason, run->other_reason, sizeof agreement->reason);
    for (int64_t c = 0; c < task->compared_steps && status == 0; c++) {
      nyb_progress_show("%s: comparing the paths, layer %lld, %lld of %lld",
                        nyb_name_width(state->width).text, (long long)run->layer->index,
                        (long long)c + 1, (long long)task->compared_steps);
      const int64_t step = (c + 1) * task->steps / task->compared_steps - 1;
      status = compare_step(state, run, step, agreement, &run->other_us[c]);
    }
  }
  return status;
}

static int fetch_outputs(const run_state *state) {
  int status = 0;
  for (int64_t i = 0; i < state->task->trace->layer_count && status == 0; i++) {
    const layer_run *run = &state->layers[i];
    status = nyb_fetch(state->settings->backend, run->outputs,
                       state->task->steps * step_bytes(state, run), run->host_outputs);
  }
  return status;
}

static int make_events(run_state *state) {
  if (state->settings->backend == NYB_BACKEND_CPU) return 0;
  for (int i = 0; i < 2; i++) state->events[i] = device_event_create();
  return state->events[0] != NULL && state->events[1] != NULL ? 0 : nyb_device_failed();
}

static void release_events(const run_state *state) {
  for (int i = 0; i < 2; i++) device_event_destroy(state->events[i]);
}

int nyb_replay_run(nyb_context *context, const nyb_replay_settings *settings,
                   const nyb_replay_task *task, nyb_width width, nyb_replay_result *result) {
  const int64_t layers = task->trace->layer_count;
  run_state state = {
      context,     settings, task, width, nyb_command_allocate(layers * (int64_t)sizeof(layer_run)),
      {NULL, NULL}};
  *result = (nyb_replay_result){.width = width};
  result->layers = nyb_command_allocate(layers * (int64_t)sizeof *result->layers);
  int status = make_events(&state);
  for (int64_t i = 0; i < layers && status == 0; i++) {
    state.layers[i].layer = &task->trace->layers[i];
    status = set_up_layer(&state, &state.layers[i]);
  }
  if (status == 0) status = decode(&state);
  if (status == 0) status = fetch_outputs(&state);
  if (status == 0) status = compare(&state, result);
  if (status == 0) {
    result->plan = state.layers[0].plan;
    status = sum_up(&state, result);
  }
  for (int64_t i = 0; i < layers; i++) release_layer(settings->backend, &state.layers[i]);
  release_events(&state);
  free(state.layers);
  return status;
}
