/* SPDX-License-Identifier: Apache-2.0 */
/* nybble replay: attends over a recorded trace as a decoder would. Each step appends one token's
 * recorded key and value to the quantized caches and attends with its recorded query, so that
 * errors do not feed back into the next step (teacher forcing). */
#include "replay.h"

#include <argp.h>
#include <stdlib.h>

#include "commands.h"
#include "placement.h"
#include "reference.h"
#include "support.h"

enum {
  KEY_K_BITS = 256,
  KEY_V_BITS,
  KEY_PATH,
  KEY_ROUNDING,
  KEY_PROMPT,
  KEY_STEPS,
  KEY_COMPARED,
  KEY_LAYERS,
  KEY_OUTPUT_DTYPE,
  KEY_BACKEND,
  KEY_DEVICE
};

typedef struct arguments {
  nyb_replay_settings settings;
  int32_t key_bits, value_bits;
} arguments;

static void finish_arguments(arguments *given, struct argp_state *state) {
  if (given->settings.file == NULL) argp_error(state, "a trace FILE must be given");
  if (given->key_bits == 0 && given->value_bits == 0) return;
  if (given->key_bits == 0 || given->value_bits == 0) {
    argp_error(state, "--k-bits and --v-bits go together");
  }
  if (given->settings.widths.count > 0) {
    argp_error(state, "give either --bits or --k-bits and --v-bits");
  }
  given->settings.widths.items[0] = (nyb_width){given->key_bits, given->value_bits};
  given->settings.widths.count = 1;
}

static error_t parse(int key, char *text, struct argp_state *state) {
  arguments *given = state->input;
  nyb_replay_settings *settings = &given->settings;
  switch (key) {
    case 'b': nyb_parse_widths(state, "--bits", text, &settings->widths); return 0;
    case KEY_K_BITS: given->key_bits = nyb_parse_bits(state, "--k-bits", text, true); return 0;
    case KEY_V_BITS: given->value_bits = nyb_parse_bits(state, "--v-bits", text, true); return 0;
    case 'g': settings->group_size = nyb_parse_group_size(state, "--group-size", text); return 0;
    case KEY_PATH: settings->path = nyb_parse_path(state, "--path", text); return 0;
    case KEY_ROUNDING: settings->rounding = nyb_parse_rounding(state, "--rounding", text); return 0;
    case 't': settings->threads = nyb_parse_integer(state, "--threads", text, 0, 4096); return 0;
    case KEY_PROMPT:
      settings->prompt_tokens = nyb_parse_integer(state, "--prompt-tokens", text, 0, INT32_MAX);
      return 0;
    case KEY_STEPS:
      settings->steps = nyb_parse_integer(state, "--steps", text, 1, INT32_MAX);
      return 0;
    case KEY_COMPARED:
      settings->compared_steps = nyb_parse_integer(state, "--compared-steps", text, 1, INT32_MAX);
      return 0;
    case KEY_OUTPUT_DTYPE:
      settings->output_dtype = nyb_parse_dtype(state, "--output-dtype", text);
      return 0;
    case KEY_BACKEND: settings->backend = nyb_parse_backend(state, "--backend", text); return 0;
    case KEY_DEVICE:
      settings->device = (int32_t)nyb_parse_integer(state, "--device", text, 0, INT32_MAX);
      return 0;
    case KEY_LAYERS: settings->show_layers = true; return 0;
    case 'j': settings->json = true; return 0;
    case ARGP_KEY_ARG:
      if (state->arg_num > 0) argp_error(state, "\"%s\" is too much: one FILE is expected", text);
      settings->file = text;
      return 0;
    case ARGP_KEY_END: finish_arguments(given, state); return 0;
    default: return ARGP_ERR_UNKNOWN;
  }
}

/* ---- The task ----------------------------------------------------------------------------- */

static int cut_task(const nyb_replay_settings *settings, const nyb_trace *trace,
                    nyb_replay_task *task) {
  *task = (nyb_replay_task){
      .trace = trace,
      .prompt_tokens =
          settings->prompt_tokens >= 0 ? settings->prompt_tokens : trace->prompt_tokens,
      .output_dtype = settings->output_dtype != 0 ? settings->output_dtype : trace->dtype,
  };
  const int64_t left = trace->tokens - task->prompt_tokens;
  if (left < 1) {
    return nyb_command_misused(
        "the prompt is %lld tokens and the trace %lld; --prompt-tokens must "
        "leave at least one step",
        (long long)task->prompt_tokens, (long long)trace->tokens);
  }
  if (settings->steps > left) {
    return nyb_command_misused("--steps is %lld; the trace has %lld tokens behind the prompt",
                               (long long)settings->steps, (long long)left);
  }
  task->steps = settings->steps != 0 ? settings->steps : left;
  task->compared_steps =
      settings->compared_steps < task->steps ? settings->compared_steps : task->steps;
  return 0;
}

static void compute_reference(nyb_replay_task *task) {
  const nyb_trace *trace = task->trace;
  task->reference = nyb_command_allocate(trace->layer_count * (int64_t)sizeof *task->reference);
  for (int64_t i = 0; i < trace->layer_count; i++) {
    const nyb_trace_layer *layer = &trace->layers[i];
    const int64_t outputs = task->steps * layer->query_heads * layer->value_dim;
    task->reference[i] = nyb_command_allocate(outputs * (int64_t)sizeof(double));
    nyb_reference_attention(trace, layer, task->prompt_tokens, task->steps, task->reference[i]);
  }
}

static void release_reference(nyb_replay_task *task) {
  for (int64_t i = 0; i < task->trace->layer_count; i++) free(task->reference[i]);
  free(task->reference);
}

static int replay(nyb_context *context, const nyb_replay_settings *settings,
                  const nyb_trace *trace) {
  nyb_replay_task task;
  int status = cut_task(settings, trace, &task);
  if (status != 0) return status;
  compute_reference(&task);

  const int64_t count = settings->widths.count;
  nyb_replay_result *results = nyb_command_allocate(count * (int64_t)sizeof *results);
  for (int64_t i = 0; i < count && status == 0; i++) {
    status = nyb_replay_run(context, settings, &task, settings->widths.items[i], &results[i]);
  }
  if (status == 0) {
    (settings->json ? nyb_replay_print_json : nyb_replay_print_text)(context, settings, &task,
                                                                     results, count);
  }
  for (int64_t i = 0; i < count; i++) free(results[i].layers);
  free(results);
  release_reference(&task);
  return status;
}

static bool divides_rows(const nyb_trace *trace, int64_t group_size) {
  for (int64_t i = 0; i < trace->layer_count; i++) {
    const nyb_trace_layer *layer = &trace->layers[i];
    if (layer->key_dim % group_size != 0 || layer->value_dim % group_size != 0) return false;
  }
  return true;
}

/* compares_all: no widths were asked for. Then rows that no group divides leave the 16-bit cache;
 * asked widths are refused by the library's sentence. */
static void choose_group_size(nyb_replay_settings *settings, const nyb_trace *trace,
                              bool compares_all) {
  if (settings->group_size != 0) return;
  settings->group_size = !divides_rows(trace, 64) && divides_rows(trace, 32) ? 32 : 64;
  if (!compares_all || divides_rows(trace, settings->group_size)) return;
  settings->widths = (nyb_width_list){.items = {{16, 16}}, .count = 1};
  settings->without_groups = true;
}

static int open_context(const nyb_replay_settings *settings, nyb_context **context) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = settings->threads;
  options.backend = settings->backend;
  options.device = settings->device;
  if (nyb_context_create(&options, context) == NYB_OK) return 0;
  return nyb_command_failed("%s", nyb_last_error());
}

int nyb_command_replay(int argc, char **argv) {
  static const struct argp_option options[] = {
      {.name = "bits",
       .key = 'b',
       .arg = "BITS",
       .doc = "2, 3, 4, 5, 6, 8, or 16 for a cache that is not quantized; K:V for two widths; a "
              "list with commas. Without it: 16, 8, 8:4, 4 and 2"},
      {.name = "k-bits", .key = KEY_K_BITS, .arg = "BITS", .doc = "Bits of the keys"},
      {.name = "v-bits", .key = KEY_V_BITS, .arg = "BITS", .doc = "Bits of the values"},
      {.name = "group-size",
       .key = 'g',
       .arg = "SIZE",
       .doc = "32, 64 or 128 (64, or 32 where only that divides the rows)"},
      {.name = "path", .key = KEY_PATH, .arg = "PATH", .doc = "fused, compat or auto (auto)"},
      {.name = "rounding", .key = KEY_ROUNDING, .arg = "RULE", .doc = "exact or mlx (exact)"},
      {.name = "output-dtype",
       .key = KEY_OUTPUT_DTYPE,
       .arg = "DTYPE",
       .doc = "bf16, f16 or f32 outputs (the trace's own dtype)"},
      {.name = "backend", .key = KEY_BACKEND, .arg = "NAME", .doc = "cpu or cuda (cpu)"},
      {.name = "device", .key = KEY_DEVICE, .arg = "N", .doc = "cuda: the device (0)"},
      {.name = "threads", .key = 't', .arg = "N", .doc = "0 takes all processors (0)"},
      {.name = "prompt-tokens",
       .key = KEY_PROMPT,
       .arg = "N",
       .doc = "Tokens in the caches before the first step (the trace's own number)"},
      {.name = "steps", .key = KEY_STEPS, .arg = "N", .doc = "Tokens to decode (all that follow)"},
      {.name = "compared-steps",
       .key = KEY_COMPARED,
       .arg = "N",
       .doc = "Steps in which both paths run and are compared, evenly spread (32)"},
      {.name = "layers", .key = KEY_LAYERS, .doc = "Show each layer of a comparison, too"},
      {.name = "json", .key = 'j', .doc = "Print JSON"},
      {0},
  };
  static const struct argp argp = {
      .options = options,
      .parser = parse,
      .args_doc = "FILE",
      .doc =
          "Replays a recorded trace as a decoder would: fills one quantized cache for each "
          "layer with the prompt's keys and values, then appends a token and attends, step by "
          "step. Shows the cache's size, the error against attention in double precision over "
          "the tensors as they were recorded, how the two paths agree, and the speed.\v"
          "Errors are pooled over all layers, steps, heads and elements: 'rel. error' is the "
          "norm of the difference over the norm of the reference, 'min cosine' the least of any "
          "step and head. 'equal' is the share of outputs that are the same bits on the fused "
          "and on the compat path, 'apart' the largest difference between the two in units in "
          "the last place of its row's largest output, over some of the steps. Times are those of "
          "attention alone, medians over the steps.",
  };
  arguments given = {
      .settings = {.prompt_tokens = -1, .compared_steps = 32, .rounding = NYB_ROUNDING_EXACT}};
  argp_parse(&argp, argc, argv, 0, NULL, &given);
  nyb_replay_settings *settings = &given.settings;
  const bool compares_all = settings->widths.count == 0;
  if (compares_all) {
    settings->widths =
        (nyb_width_list){.items = {{16, 16}, {8, 8}, {8, 4}, {4, 4}, {2, 2}}, .count = 5};
  } else if (settings->widths.count == 1) {
    settings->show_layers = true;
  }

  nyb_context *context;
  int status = nyb_placement_open(settings->backend, settings->device);
  if (status == 0) status = open_context(settings, &context);
  if (status != 0) return status;
  nyb_trace trace;
  status = nyb_trace_read(context, settings->file, &trace);
  if (status == 0) {
    choose_group_size(settings, &trace, compares_all);
    status = replay(context, settings, &trace);
    nyb_trace_release(&trace);
  }
  nyb_context_destroy(context);
  nyb_placement_close(settings->backend);
  return status;
}
