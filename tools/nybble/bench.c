/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench: times of attention, geglu and quantize beside the bandwidth that the same machine
 * gives to plain code in the same run, the overhead of a call, and the cost
 * of masks, windows, pages and the like. */
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_device.h"
#include "commands.h"
#include "placement.h"
#include "progress.h"

enum {
  KEY_SHAPES = 256,
  KEY_QUERY_LEN,
  KEY_LENGTHS,
  KEY_DTYPE,
  KEY_ISA,
  KEY_PATH,
  KEY_ROUNDING,
  KEY_RULE,
  KEY_REPEATS,
  KEY_SECONDS,
  KEY_ELEMENTS,
  KEY_BACKEND,
  KEY_DEVICE
};

static const nyb_bench_operation *const operations[] = {
    &nyb_bench_attention,  &nyb_bench_geglu,    &nyb_bench_quantize, &nyb_bench_append,
    &nyb_bench_cache_file, &nyb_bench_overhead, &nyb_bench_features};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

/* An option that only some operations know. */
enum { LIMITED_OPERATIONS = 6 };
static const struct {
  int key;
  const char *name;
  const nyb_bench_operation *operations[LIMITED_OPERATIONS]; /* NULL behind them */
} limited_options[] = {
    {'s',
     "--shape",
     {&nyb_bench_attention, &nyb_bench_geglu, &nyb_bench_quantize, &nyb_bench_append,
      &nyb_bench_cache_file, &nyb_bench_features}},
    {KEY_SHAPES,
     "--shapes",
     {&nyb_bench_attention, &nyb_bench_geglu, &nyb_bench_quantize, &nyb_bench_append,
      &nyb_bench_cache_file, &nyb_bench_features}},
    {KEY_ELEMENTS, "--elements", {&nyb_bench_geglu}},
    {KEY_QUERY_LEN, "--query-len", {&nyb_bench_attention}},
    {KEY_LENGTHS, "--lengths", {&nyb_bench_attention}},
    {'b',
     "--bits",
     {&nyb_bench_attention, &nyb_bench_quantize, &nyb_bench_append, &nyb_bench_cache_file,
      &nyb_bench_overhead, &nyb_bench_features}},
    {'g',
     "--group-size",
     {&nyb_bench_attention, &nyb_bench_quantize, &nyb_bench_append, &nyb_bench_cache_file,
      &nyb_bench_overhead, &nyb_bench_features}},
    {KEY_PATH,
     "--path",
     {&nyb_bench_attention, &nyb_bench_geglu, &nyb_bench_overhead, &nyb_bench_features}},
    {KEY_ROUNDING, "--rounding", {&nyb_bench_attention, &nyb_bench_overhead, &nyb_bench_features}},
    {KEY_RULE, "--rule", {&nyb_bench_quantize, &nyb_bench_append}},
};
enum { LIMITED_OPTIONS = sizeof limited_options / sizeof limited_options[0] };

typedef struct arguments {
  nyb_bench_settings settings;
  const nyb_bench_operation *operation;
  bool given[LIMITED_OPTIONS];
  /* Shapes wait until the operation is known. */
  const char *shape_texts[NYB_BENCH_MAX_SHAPES];
  int shape_text_count;
  const char *shapes_file;
  int64_t elements;
} arguments;

/* ---- Shapes ------------------------------------------------------------------------------- */

/* "1,32,8,128,8192" with exactly `fields` numbers of 1 or more; false for anything else. */
static bool read_shape(const char *text, int fields, nyb_bench_shape *shape) {
  *shape = (nyb_bench_shape){{0}};
  for (int i = 0; i < fields; i++) {
    char *end;
    errno = 0;
    shape->field[i] = strtoll(text, &end, 10);
    const char expected = i == fields - 1 ? '\0' : ',';
    if (end == text || *end != expected || errno != 0 || shape->field[i] < 1) return false;
    text = end + 1;
  }
  return true;
}

static const char *what_is_wrong(const nyb_bench_operation *operation,
                                 const nyb_bench_shape *shape) {
  if (operation != &nyb_bench_attention && operation != &nyb_bench_features) return NULL;
  if (shape->field[4] > INT32_MAX) return "N is more than a sequence can have";
  if (shape->field[1] % shape->field[2] != 0) return "Hkv does not divide Hq";
  return NULL;
}

static void check_lengths(const nyb_bench_settings *settings, const struct argp_state *state) {
  for (int64_t s = 0; s < settings->shape_count; s++) {
    const int64_t batch = settings->shapes[s].field[0], most = settings->shapes[s].field[4];
    for (int64_t i = 0; i < settings->lengths.count; i++) {
      const int64_t length = settings->lengths.items[i];
      if (i >= batch)
        argp_error(state, "--lengths has more items than the batch %lld of a shape",
                   (long long)batch);
      if (length > most)
        argp_error(state, "--lengths has %lld; a shape's N is %lld", (long long)length,
                   (long long)most);
    }
  }
}

static void add_shape(arguments *given, const struct argp_state *state, const char *text) {
  nyb_bench_settings *settings = &given->settings;
  const nyb_bench_operation *operation = given->operation;
  if (settings->shape_count == NYB_BENCH_MAX_SHAPES) {
    argp_error(state, "there are more than %d shapes", NYB_BENCH_MAX_SHAPES);
  }
  nyb_bench_shape *shape = &settings->shapes[settings->shape_count++];
  if (!read_shape(text, operation->shape_fields, shape)) {
    argp_error(state, "\"%s\" is no shape; it must be %s, %d whole numbers from 1 up", text,
               operation->shape_words, operation->shape_fields);
  }
  const char *fault = what_is_wrong(operation, shape);
  if (fault != NULL) argp_error(state, "the shape %s: %s", text, fault);
}

/* A shape on each line; empty lines and what follows a '#' count for nothing. */
static void add_shapes_file(arguments *given, const struct argp_state *state) {
  FILE *file = fopen(given->shapes_file, "r");
  if (file == NULL) {
    argp_failure(state, NYB_EXIT_FAILED, errno, "%s", given->shapes_file);
    return;
  }
  char line[256];
  const int64_t before = given->settings.shape_count;
  while (fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "#\n")] = '\0';
    for (size_t n = strlen(line); n > 0 && strchr(" \t\r", line[n - 1]) != NULL; n--) {
      line[n - 1] = '\0';
    }
    if (line[0] != '\0') add_shape(given, state, line);
  }
  if (ferror(file)) argp_failure(state, NYB_EXIT_FAILED, errno, "%s", given->shapes_file);
  fclose(file);
  if (given->settings.shape_count == before) {
    argp_failure(state, NYB_EXIT_FAILED, 0, "%s: no shape stands in it", given->shapes_file);
  }
}

static void finish_shapes(arguments *given, const struct argp_state *state) {
  nyb_bench_settings *settings = &given->settings;
  for (int i = 0; i < given->shape_text_count; i++) add_shape(given, state, given->shape_texts[i]);
  if (given->shapes_file != NULL) add_shapes_file(given, state);
  if (given->elements > 0) {
    char text[32];
    snprintf(text, sizeof text, "1,%lld", (long long)given->elements);
    add_shape(given, state, text);
  }
  if (settings->shape_count == 0) {
    settings->shape_count = given->operation->default_shape_count;
    if (settings->shape_count > 0) {
      memcpy(settings->shapes, given->operation->default_shapes,
             (size_t)settings->shape_count * sizeof settings->shapes[0]);
    }
  }
}

/* ---- Options ------------------------------------------------------------------------------ */

static const nyb_bench_operation *parse_operation(const struct argp_state *state,
                                                  const char *text) {
  for (int i = 0; i < OPERATIONS; i++) {
    if (strcmp(text, operations[i]->name) == 0) return operations[i];
  }
  argp_error(state,
             "\"%s\" is no operation; it must be attention, geglu, quantize, append, cache-file, "
             "overhead or features",
             text);
  return NULL;
}

static void check_limited_options(const arguments *given, const struct argp_state *state) {
  for (int i = 0; i < LIMITED_OPTIONS; i++) {
    bool known = !given->given[i];
    for (int j = 0; j < LIMITED_OPERATIONS; j++) {
      known |= limited_options[i].operations[j] == given->operation;
    }
    if (!known) {
      argp_error(state, "%s does not go with %s", limited_options[i].name, given->operation->name);
    }
  }
}

static void finish_widths(arguments *given, const struct argp_state *state) {
  nyb_bench_settings *settings = &given->settings;
  if (settings->widths.count == 0) {
    if (given->operation == &nyb_bench_attention) {
      settings->widths = (nyb_width_list){.items = {{4, 4}, {8, 8}, {16, 16}}, .count = 3};
    } else if (given->operation == &nyb_bench_features) {
      settings->widths = (nyb_width_list){.items = {{4, 4}}, .count = 1};
    } else {
      settings->widths = (nyb_width_list){.items = {{4, 4}, {8, 8}}, .count = 2};
    }
  }
  for (int64_t i = 0; i < settings->widths.count; i++) {
    const nyb_width width = settings->widths.items[i];
    if (given->operation == &nyb_bench_quantize &&
        (width.key_bits == 16 || width.key_bits != width.value_bits)) {
      argp_error(state, "quantize takes one width of 2, 3, 4, 5, 6 or 8 bits");
    }
  }
}

static void check_backend(const arguments *given, const struct argp_state *state) {
  const nyb_bench_settings *settings = &given->settings;
  const bool cuda = settings->backend == NYB_BACKEND_CUDA;
  if (cuda ? !given->operation->on_cuda : !given->operation->on_cpu) {
    argp_error(state, "%s is not measured on the backend %s", given->operation->name,
               nyb_backend_name(settings->backend));
  }
  if (cuda && (settings->threads.count > 0 || settings->isas.count > 0)) {
    argp_error(state, "--threads and --isa do not go with --backend cuda");
  }
}

static void finish_arguments(arguments *given, const struct argp_state *state) {
  nyb_bench_settings *settings = &given->settings;
  if (given->operation == NULL) {
    argp_error(state,
               "an operation must be given: attention, geglu, quantize, append, cache-file, "
               "overhead or features");
    return;
  }
  check_limited_options(given, state);
  check_backend(given, state);
  finish_shapes(given, state);
  check_lengths(settings, state);
  finish_widths(given, state);
  if (settings->threads.count == 0) settings->threads.count = 1; /* one entry of 0: all */
  if (settings->isas.count == 0) settings->isas.count = 1;       /* one entry of AUTO */
  if (settings->threads.count * settings->isas.count > NYB_OPTION_LIST_MAX) {
    argp_error(state, "there are more than %d pairs of ISA and threads", NYB_OPTION_LIST_MAX);
  }
}

static error_t parse(int key, char *text, struct argp_state *state) {
  arguments *given = state->input;
  nyb_bench_settings *settings = &given->settings;
  for (int i = 0; i < LIMITED_OPTIONS; i++) {
    if (limited_options[i].key == key) given->given[i] = true;
  }
  switch (key) {
    case 's':
      if (given->shape_text_count == NYB_BENCH_MAX_SHAPES) {
        argp_error(state, "there are more than %d shapes", NYB_BENCH_MAX_SHAPES);
      }
      given->shape_texts[given->shape_text_count++] = text;
      return 0;
    case KEY_SHAPES: given->shapes_file = text; return 0;
    case KEY_ELEMENTS:
      given->elements = nyb_parse_integer(state, "--elements", text, 1, INT64_MAX);
      return 0;
    case 'b': nyb_parse_widths(state, "--bits", text, &settings->widths); return 0;
    case 'g': settings->group_size = nyb_parse_group_size(state, "--group-size", text); return 0;
    case KEY_QUERY_LEN:
      settings->query_len = nyb_parse_integer(state, "--query-len", text, 1, INT32_MAX);
      return 0;
    case KEY_LENGTHS:
      nyb_parse_integers(state, "--lengths", text, 0, INT32_MAX, &settings->lengths);
      return 0;
    case KEY_DTYPE: settings->dtype = nyb_parse_dtype(state, "--dtype", text); return 0;
    case 't': nyb_parse_integers(state, "--threads", text, 0, 4096, &settings->threads); return 0;
    case KEY_ISA: nyb_parse_isas(state, "--isa", text, &settings->isas); return 0;
    case KEY_BACKEND: settings->backend = nyb_parse_backend(state, "--backend", text); return 0;
    case KEY_DEVICE:
      settings->device = (int32_t)nyb_parse_integer(state, "--device", text, 0, INT32_MAX);
      return 0;
    case KEY_PATH: settings->path = nyb_parse_path(state, "--path", text); return 0;
    case KEY_ROUNDING: settings->rounding = nyb_parse_rounding(state, "--rounding", text); return 0;
    case KEY_RULE: settings->rule = nyb_parse_rule(state, "--rule", text); return 0;
    case KEY_REPEATS:
      settings->repeats = nyb_parse_integer(state, "--repeats", text, 1, 1000000);
      return 0;
    case KEY_SECONDS: settings->seconds = nyb_parse_positive(state, "--seconds", text); return 0;
    case 'j': settings->json = true; return 0;
    case ARGP_KEY_ARG:
      if (state->arg_num > 0)
        argp_error(state, "\"%s\" is too much: one operation at a time", text);
      given->operation = parse_operation(state, text);
      return 0;
    case ARGP_KEY_END: finish_arguments(given, state); return 0;
    default: return ARGP_ERR_UNKNOWN;
  }
}

/* ---- Contexts and their ceilings ---------------------------------------------------------- */

/* A ceiling depends on the number of threads alone: measured once for each. */
static int measure_ceilings(nyb_bench_run *run, const nyb_bench_operation *operation,
                            nyb_bench_context *on) {
  for (int64_t i = 0; i < run->context_count; i++) {
    if (run->contexts[i].threads == on->threads) {
      on->read = run->contexts[i].read;
      on->copy = run->contexts[i].copy;
      return 0;
    }
  }
  int status = 0;
  if (operation->needs_read) status = nyb_measure_read_bandwidth(on->threads, &on->read);
  if (operation->needs_copy && status == 0) {
    status = nyb_measure_copy_bandwidth(on->threads, &on->copy);
  }
  return status;
}

static int open_device(nyb_bench_run *run, const nyb_bench_operation *operation) {
  const nyb_bench_settings *settings = run->settings;
  const int opened = nyb_placement_open(settings->backend, settings->device);
  if (opened != 0) return opened;
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.backend = NYB_BACKEND_CUDA;
  options.device = settings->device;
  nyb_bench_context on = {.threads = 1, .isa = NYB_ISA_CUDA, .backend = NYB_BACKEND_CUDA};
  if (nyb_context_create(&options, &on.context) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error());
  }
  run->contexts[run->context_count++] = on;
  nyb_bench_context *kept = &run->contexts[0];
  if (!device_stream_create(&kept->stream)) return nyb_device_failed();
  if (!operation->needs_read && !operation->needs_copy) return 0;
  return nyb_bench_measure_device_ceilings(&kept->read, &kept->copy);
}

static int open_contexts(nyb_bench_run *run, const nyb_bench_operation *operation) {
  const nyb_bench_settings *settings = run->settings;
  if (settings->backend == NYB_BACKEND_CUDA) {
    const int status = nyb_command_open(NYB_ISA_AUTO, 0, &run->preparer);
    return status != 0 ? status : open_device(run, operation);
  }
  for (int64_t i = 0; i < settings->isas.count; i++) {
    for (int64_t t = 0; t < settings->threads.count; t++) {
      nyb_bench_context on = {0};
      int status = nyb_command_open((nyb_isa)settings->isas.items[i], settings->threads.items[t],
                                    &on.context);
      if (status != 0) return status;
      on.threads = nyb_context_threads(on.context);
      on.isa = nyb_context_isa(on.context);
      status = measure_ceilings(run, operation, &on);
      run->contexts[run->context_count++] = on;
      if (status != 0) return status;
    }
  }
  run->preparer = run->contexts[0].context;
  return 0;
}

static void close_contexts(const nyb_bench_run *run) {
  const bool cuda = run->settings->backend == NYB_BACKEND_CUDA;
  for (int64_t i = 0; i < run->context_count; i++) {
    if (cuda) device_stream_destroy(run->contexts[i].stream);
    nyb_context_destroy(run->contexts[i].context);
  }
  if (!cuda) return;
  nyb_context_destroy(run->preparer);
  nyb_placement_close(run->settings->backend);
}

/* ---- Printing ----------------------------------------------------------------------------- */

static void print_ceilings(const nyb_bench_run *run) {
  for (int64_t i = 0; i < run->context_count; i++) {
    const nyb_bench_context *on = &run->contexts[i];
    bool repeated = false;
    for (int64_t j = 0; j < i; j++) repeated |= run->contexts[j].threads == on->threads;
    if (repeated || on->read.median_gb_per_s <= 0) continue;
    if (on->backend == NYB_BACKEND_CUDA) {
      printf("%s: read %.1f GB/s", device_describe()->name, on->read.median_gb_per_s);
    } else {
      printf("%lld thread%s read %.1f GB/s", (long long)on->threads, on->threads == 1 ? "" : "s",
             on->read.median_gb_per_s);
    }
    if (on->copy.median_gb_per_s > 0) {
      printf(", copy %.1f GB/s (read and written)", on->copy.median_gb_per_s);
    }
    putchar('\n');
  }
}

static void add_ceiling(cJSON *json, const char *what, const nyb_bandwidth *bandwidth) {
  if (bandwidth->median_gb_per_s <= 0) return;
  char name[40];
  snprintf(name, sizeof name, "%s_gb_per_s", what);
  nyb_json_add_number(json, name, bandwidth->median_gb_per_s);
  snprintf(name, sizeof name, "%s_best_gb_per_s", what);
  nyb_json_add_number(json, name, bandwidth->best_gb_per_s);
}

static void print_json(nyb_bench_run *run, const nyb_bench_operation *operation) {
  const nyb_bench_context *most = &run->contexts[0];
  for (int64_t i = 1; i < run->context_count; i++) {
    if (run->contexts[i].threads > most->threads) most = &run->contexts[i];
  }
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "command", "bench");
  cJSON_AddStringToObject(json, "version", nyb_version());
  cJSON_AddStringToObject(json, "operation", operation->name);
  cJSON_AddStringToObject(json, "backend", nyb_backend_name(run->settings->backend));
  cJSON *machine = nyb_json_machine();
  if (run->settings->backend == NYB_BACKEND_CUDA) {
    cJSON_AddStringToObject(machine, "device", device_describe()->name);
  }
  cJSON_AddItemToObject(json, "machine", machine);
  add_ceiling(json, "read", &most->read); /* each result has that of its own threads */
  add_ceiling(json, "copy", &most->copy);
  cJSON_AddItemToObject(json, "results", run->results);
  run->results = NULL;
  nyb_json_print(json);
}

static void print_text(nyb_bench_run *run) {
  nyb_progress_clear();
  printf("%s\n", nyb_cpu_model());
  const bool cuda = run->settings->backend == NYB_BACKEND_CUDA;
  if (cuda && run->contexts[0].read.median_gb_per_s <= 0) printf("%s\n", device_describe()->name);
  print_ceilings(run);
  putchar('\n');
  nyb_table_print(run->table);
  run->table = NULL;
}

/* ---- The subcommand ----------------------------------------------------------------------- */

static int run_operation(const arguments *given) {
  nyb_bench_run run = {.settings = &given->settings,
                       .results = cJSON_CreateArray(),
                       .table = nyb_table_create(given->operation->columns)};
  int status = open_contexts(&run, given->operation);
  if (status == 0) status = given->operation->run(&run);
  if (status == 0) {
    if (given->settings.json) {
      print_json(&run, given->operation);
    } else {
      print_text(&run);
    }
  }
  close_contexts(&run);
  cJSON_Delete(run.results);
  nyb_table_destroy(run.table);
  return status;
}

int nyb_command_bench(int argc, char **argv) {
  static const struct argp_option options[] = {
      {.name = "shape",
       .key = 's',
       .arg = "SHAPE",
       .doc = "attention, features: B,Hq,Hkv,D,N; geglu: ROWS,COLUMNS; quantize: ROWS,DIM; append: "
              "B,Hkv,D; cache-file: LAYERS,Hkv,D,N; repeatable"},
      {.name = "shapes",
       .key = KEY_SHAPES,
       .arg = "FILE",
       .doc = "A file with a shape on each line, such as those in bench/shapes"},
      {.name = "elements", .key = KEY_ELEMENTS, .arg = "N", .doc = "geglu: one row of N"},
      {.name = "bits",
       .key = 'b',
       .arg = "BITS",
       .doc = "2, 3, 4, 5, 6, 8, or 16 for a cache that is not quantized; K:V for two widths; a "
              "list with commas; repeatable (attention: 4,8,16; quantize and overhead: 4,8; "
              "features: 4)"},
      {.name = "group-size", .key = 'g', .arg = "SIZE", .doc = "32, 64 or 128 (64)"},
      {.name = "query-len",
       .key = KEY_QUERY_LEN,
       .arg = "L",
       .doc = "attention: query rows of each sequence, causal from 2 on (1)"},
      {.name = "lengths",
       .key = KEY_LENGTHS,
       .arg = "N",
       .doc =
           "attention: tokens of each sequence of the batch, up to the shape's N; the last holds "
           "for the rest; a list with commas (N)"},
      {.name = "dtype",
       .key = KEY_DTYPE,
       .arg = "DTYPE",
       .doc = "bf16, f16 or f32, of inputs, outputs and scales (bf16)"},
      {.name = "threads",
       .key = 't',
       .arg = "N",
       .doc = "0 takes all processors; a list with commas; repeatable (0)"},
      {.name = "isa",
       .key = KEY_ISA,
       .arg = "ISA",
       .doc = "scalar, avx2, avx512, neon or auto; a list with commas; repeatable (auto)"},
      {.name = "backend", .key = KEY_BACKEND, .arg = "NAME", .doc = "cpu or cuda (cpu)"},
      {.name = "device", .key = KEY_DEVICE, .arg = "N", .doc = "cuda: the device (0)"},
      {.name = "path", .key = KEY_PATH, .arg = "PATH", .doc = "fused, compat or auto (auto)"},
      {.name = "rounding", .key = KEY_ROUNDING, .arg = "RULE", .doc = "exact or mlx (exact)"},
      {.name = "rule",
       .key = KEY_RULE,
       .arg = "RULE",
       .doc = "quantize, append: mlx_cpu or mlx_gpu (mlx_cpu)"},
      {.name = "repeats",
       .key = KEY_REPEATS,
       .arg = "N",
       .doc = "Calls of each measurement (as many as the seconds allow, at least 5)"},
      {.name = "seconds",
       .key = KEY_SECONDS,
       .arg = "S",
       .doc = "Time of each measurement, after a fifth of it to warm up (0.5)"},
      {.name = "json", .key = 'j', .doc = "Print JSON"},
      {0},
  };
  static const struct argp argp = {
      .options = options,
      .parser = parse,
      .args_doc = "attention|geglu|quantize|append|cache-file|overhead|features",
      .doc =
          "Measures single calls, cold (going round copies of the data in more memory than any "
          "cache holds) and warm (the same data again and again), beside the bandwidth that the "
          "same number of threads reaches in plain code in the same run. On the GPU: replays of a "
          "graph of many calls, beside what reading and copying reach there.\v"
          "GB/s counts, for attention, the bytes of K and V with their scales and biases, once; "
          "for geglu and quantize, all bytes read and written. features times a call with each "
          "feature "
          "in turn with the plain one, cold.",
  };
  arguments given = {
      .settings = {.group_size = 64, .query_len = 1, .dtype = NYB_BF16, .seconds = 0.5}};
  argp_parse(&argp, argc, argv, 0, NULL, &given);
  return run_operation(&given);
}
