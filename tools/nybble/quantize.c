/* SPDX-License-Identifier: Apache-2.0 */
/* nybble quantize: tensors of a safetensors file to MLX's packed triples. As MLX names a quantized
 * layer's tensors, "x.weight" becomes "x.weight" (U32 words), "x.scales" and "x.biases". */
#define _POSIX_C_SOURCE 200809L
#include <argp.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "support.h"
#include "table.h"

enum { MAX_PATTERNS = 256, KEY_RULE = 256, KEY_ALL };

typedef struct settings {
  const char *input_path, *output_path;
  const char *patterns[MAX_PATTERNS];
  int pattern_count;
  bool all, json;
  int32_t bits;
  int64_t group_size;
  nyb_rule rule;
} settings;

/* One tensor on its way from the input to the output. */
typedef struct plan {
  nyb_safetensors_tensor source;
  bool chosen;
  nyb_dtype dtype;
  int64_t rows, dim;
  char *scales_name, *biases_name;
  void *codes, *scales, *biases;
  int64_t output_bytes;
} plan;

static error_t parse(int key, char *text, struct argp_state *state) {
  settings *chosen = state->input;
  switch (key) {
    case 't':
      if (chosen->pattern_count == MAX_PATTERNS) {
        argp_error(state, "--tensor is given more than %d times; use a pattern", MAX_PATTERNS);
      }
      chosen->patterns[chosen->pattern_count++] = text;
      return 0;
    case KEY_ALL: chosen->all = true; return 0;
    case 'b': chosen->bits = nyb_parse_bits(state, "--bits", text, false); return 0;
    case 'g': chosen->group_size = nyb_parse_group_size(state, "--group-size", text); return 0;
    case KEY_RULE: chosen->rule = nyb_parse_rule(state, "--rule", text); return 0;
    case 'j': chosen->json = true; return 0;
    case ARGP_KEY_ARG:
      if (state->arg_num == 0) {
        chosen->input_path = text;
      } else if (state->arg_num == 1) {
        chosen->output_path = text;
      } else {
        argp_error(state, "\"%s\" is too much: one IN and one OUT are expected", text);
      }
      return 0;
    case ARGP_KEY_END:
      if (chosen->output_path == NULL) argp_error(state, "both IN and OUT must be given");
      if (chosen->all == (chosen->pattern_count > 0)) {
        argp_error(state, "say which tensors: either --tensor NAME, repeatable, or --all");
      }
      return 0;
    default: return ARGP_ERR_UNKNOWN;
  }
}

/* ---- Which tensors ------------------------------------------------------------------------ */

static bool known_dtype(const char *name, nyb_dtype *dtype) {
  static const struct {
    const char *name;
    nyb_dtype dtype;
  } known[] = {{"F32", NYB_F32}, {"F16", NYB_F16}, {"BF16", NYB_BF16}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(name, known[i].name) == 0) {
      *dtype = known[i].dtype;
      return true;
    }
  }
  return false;
}

/* Fills dtype, rows and dim; the result says in words why a tensor cannot be quantized, or is
 * NULL. */
static const char *why_not(const settings *chosen, plan *tensor) {
  const nyb_safetensors_tensor *source = &tensor->source;
  if (!known_dtype(source->dtype, &tensor->dtype)) return "its dtype is not F32, F16 or BF16";
  if (source->rank < 2) return "it has fewer than two axes";
  if (source->data_bytes == 0) return "it is empty";
  tensor->dim = source->shape[source->rank - 1];
  tensor->rows = source->data_bytes / (int64_t)nyb_dtype_bytes(tensor->dtype) / tensor->dim;
  if (tensor->dim % chosen->group_size != 0) return "the group size does not divide its last axis";
  return NULL;
}

static bool is_pattern(const char *text) { return strpbrk(text, "*?[") != NULL; }

/* One --tensor argument. A plain name must fit; a pattern takes what fits of what it matches. */
static int choose_by_pattern(const settings *chosen, const char *pattern, plan *tensors,
                             int64_t count) {
  int64_t matched = 0, taken = 0;
  const char *reason = NULL;
  for (int64_t i = 0; i < count; i++) {
    const char *name = tensors[i].source.name;
    /* A name is first of all itself, even where it holds a pattern's characters. */
    if (strcmp(pattern, name) != 0 && (!is_pattern(pattern) || fnmatch(pattern, name, 0) != 0)) {
      continue;
    }
    matched++;
    const char *refusal = why_not(chosen, &tensors[i]);
    if (refusal != NULL) {
      reason = refusal;
    } else {
      tensors[i].chosen = true;
      taken++;
    }
  }
  if (matched == 0) {
    return nyb_command_misused("%s has no tensor \"%s\"", chosen->input_path, pattern);
  }
  if (taken == 0) {
    return nyb_command_misused("\"%s\" cannot be quantized: %s", pattern, reason);
  }
  return 0;
}

static int choose(const settings *chosen, plan *tensors, int64_t count) {
  for (int p = 0; p < chosen->pattern_count; p++) {
    const int status = choose_by_pattern(chosen, chosen->patterns[p], tensors, count);
    if (status != 0) return status;
  }
  if (!chosen->all) return 0;
  int64_t taken = 0;
  for (int64_t i = 0; i < count; i++) {
    tensors[i].chosen = why_not(chosen, &tensors[i]) == NULL;
    taken += tensors[i].chosen;
  }
  if (taken > 0) return 0;
  return nyb_command_failed(
      "%s has no tensor that can be quantized: none is F32, F16 or BF16 with "
      "two axes or more and a last axis that %lld divides",
      chosen->input_path, (long long)chosen->group_size);
}

/* ---- Quantizing --------------------------------------------------------------------------- */

static char *companion_name(const char *name, const char *suffix) {
  static const char weight[] = ".weight";
  size_t stem = strlen(name);
  const size_t weight_length = sizeof weight - 1;
  if (stem > weight_length && strcmp(name + stem - weight_length, weight) == 0) {
    stem -= weight_length;
  }
  const size_t bytes = stem + strlen(suffix) + 1;
  char *companion = nyb_command_allocate((int64_t)bytes);
  snprintf(companion, bytes, "%.*s%s", (int)stem, name, suffix);
  return companion;
}

static int quantize_tensor(nyb_context *context, const settings *chosen, plan *tensor) {
  const int64_t words = tensor->dim * chosen->bits / 32;
  const int64_t groups = tensor->dim / chosen->group_size;
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(tensor->dtype);
  tensor->scales_name = companion_name(tensor->source.name, ".scales");
  tensor->biases_name = companion_name(tensor->source.name, ".biases");
  tensor->codes = nyb_command_allocate(tensor->rows * words * 4);
  tensor->scales = nyb_command_allocate(tensor->rows * groups * element_bytes);
  tensor->biases = nyb_command_allocate(tensor->rows * groups * element_bytes);
  tensor->output_bytes = tensor->rows * (words * 4 + 2 * groups * element_bytes);

  /* A file's header may have any length, and so its data any alignment. */
  void *aligned = NULL;
  if ((uintptr_t)tensor->source.data % (uintptr_t)element_bytes != 0) {
    aligned = nyb_command_allocate(tensor->source.data_bytes);
    memcpy(aligned, tensor->source.data, (size_t)tensor->source.data_bytes);
  }
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = 1;
  quantize.heads = 1;
  quantize.tokens = tensor->rows;
  quantize.dim = tensor->dim;
  quantize.rule = chosen->rule;
  quantize.input = (nyb_input){.data = aligned != NULL ? aligned : tensor->source.data,
                               .dtype = tensor->dtype,
                               .stride = {0, 0, tensor->dim}};
  quantize.output = (nyb_stored_output){
      .format = nyb_width_format(chosen->bits, chosen->group_size, tensor->dtype),
      .codes = tensor->codes,
      .scales = tensor->scales,
      .biases = tensor->biases,
      .codes_stride = {0, 0, words},
      .scales_stride = {0, 0, groups},
      .biases_stride = {0, 0, groups},
  };
  const nyb_status status = nyb_quantize_run(context, &quantize, NULL);
  free(aligned);
  if (status == NYB_OK) return 0;
  return nyb_command_failed("%s: %s", tensor->source.name, nyb_last_error());
}

static int quantize_all(nyb_context *context, const settings *chosen, plan *tensors,
                        int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (!tensors[i].chosen) continue;
    nyb_progress_show("quantizing %s", tensors[i].source.name);
    const int status = quantize_tensor(context, chosen, &tensors[i]);
    if (status != 0) return status;
  }
  return 0;
}

/* ---- Writing ------------------------------------------------------------------------------ */

static nyb_safetensors_tensor describe(const plan *tensor, const char *name, const char *dtype,
                                       int64_t last_axis, const void *data, int64_t element_bytes) {
  nyb_safetensors_tensor described = tensor->source;
  described.name = name;
  described.dtype = dtype;
  described.shape[described.rank - 1] = last_axis;
  described.data = data;
  described.data_bytes = tensor->rows * last_axis * element_bytes;
  return described;
}

static int write_output(nyb_context *context, const settings *chosen, const nyb_safetensors *file,
                        const plan *tensors, int64_t count) {
  nyb_safetensors_tensor *output = nyb_command_allocate(3 * count * (int64_t)sizeof *output);
  int64_t outputs = 0;
  for (int64_t i = 0; i < count; i++) {
    const plan *tensor = &tensors[i];
    const nyb_safetensors_tensor *source = &tensor->source;
    if (!tensor->chosen) {
      output[outputs++] = *source;
      continue;
    }
    const int64_t element_bytes = (int64_t)nyb_dtype_bytes(tensor->dtype);
    const int64_t groups = tensor->dim / chosen->group_size;
    output[outputs++] =
        describe(tensor, source->name, "U32", tensor->dim * chosen->bits / 32, tensor->codes, 4);
    output[outputs++] =
        describe(tensor, tensor->scales_name, source->dtype, groups, tensor->scales, element_bytes);
    output[outputs++] =
        describe(tensor, tensor->biases_name, source->dtype, groups, tensor->biases, element_bytes);
  }

  const int64_t metadata_count = nyb_safetensors_metadata_count(file);
  nyb_metadata *metadata = nyb_command_allocate(metadata_count * (int64_t)sizeof *metadata);
  nyb_status status = NYB_OK;
  for (int64_t i = 0; i < metadata_count && status == NYB_OK; i++) {
    status = nyb_safetensors_metadata_at(file, i, &metadata[i]);
  }
  nyb_progress_show("writing %s", chosen->output_path);
  if (status == NYB_OK) {
    status = nyb_safetensors_write(context, chosen->output_path, output, outputs, metadata,
                                   metadata_count);
  }
  free(output);
  free(metadata);
  return status == NYB_OK ? 0 : nyb_command_failed("%s", nyb_last_error());
}

/* ---- Reporting ---------------------------------------------------------------------------- */

typedef struct shape_text {
  char text[128];
} shape_text;

static shape_text show_shape(const nyb_safetensors_tensor *tensor) {
  shape_text shown = {""};
  size_t used = 0;
  for (int64_t i = 0; i < tensor->rank && used < sizeof shown.text; i++) {
    used += (size_t)snprintf(shown.text + used, sizeof shown.text - used, "%s%lld",
                             i == 0 ? "" : "x", (long long)tensor->shape[i]);
  }
  return shown;
}

static void report_text(const settings *chosen, const plan *tensors, int64_t count) {
  nyb_table *table = nyb_table_create("<tensor|<shape|<dtype|>bytes before|>after|>ratio");
  int64_t before = 0, after = 0, quantized = 0;
  for (int64_t i = 0; i < count; i++) {
    const plan *tensor = &tensors[i];
    before += tensor->source.data_bytes;
    after += tensor->chosen ? tensor->output_bytes : tensor->source.data_bytes;
    if (!tensor->chosen) continue;
    quantized++;
    nyb_table_add(table, "%s", tensor->source.name);
    nyb_table_add(table, "%s", show_shape(&tensor->source).text);
    nyb_table_add(table, "%s", tensor->source.dtype);
    nyb_table_add(table, "%lld", (long long)tensor->source.data_bytes);
    nyb_table_add(table, "%lld", (long long)tensor->output_bytes);
    nyb_table_add(table, "%.3f", (double)tensor->output_bytes / (double)tensor->source.data_bytes);
  }
  nyb_table_print(table);
  printf(
      "%lld tensors quantized to %d bits in groups of %lld by the rule %s, %lld copied: "
      "%lld -> %lld bytes in %s\n",
      (long long)quantized, (int)chosen->bits, (long long)chosen->group_size,
      nyb_rule_name(chosen->rule), (long long)(count - quantized), (long long)before,
      (long long)after, chosen->output_path);
}

static void report_json(const settings *chosen, const plan *tensors, int64_t count) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "input", chosen->input_path);
  cJSON_AddStringToObject(json, "output", chosen->output_path);
  cJSON_AddNumberToObject(json, "bits", chosen->bits);
  cJSON_AddNumberToObject(json, "group_size", (double)chosen->group_size);
  cJSON_AddStringToObject(json, "rule", nyb_rule_name(chosen->rule));
  cJSON *array = cJSON_AddArrayToObject(json, "tensors");
  for (int64_t i = 0; i < count; i++) {
    const plan *tensor = &tensors[i];
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", tensor->source.name);
    cJSON_AddStringToObject(item, "dtype", tensor->source.dtype);
    nyb_json_add_integers(item, "shape", tensor->source.shape, tensor->source.rank);
    cJSON_AddBoolToObject(item, "quantized", tensor->chosen);
    cJSON_AddNumberToObject(item, "bytes_before", (double)tensor->source.data_bytes);
    cJSON_AddNumberToObject(
        item, "bytes_after",
        (double)(tensor->chosen ? tensor->output_bytes : tensor->source.data_bytes));
    cJSON_AddItemToArray(array, item);
  }
  nyb_json_print(json);
}

/* ---- The subcommand ----------------------------------------------------------------------- */

static int convert(nyb_context *context, const settings *chosen, const nyb_safetensors *file,
                   plan *tensors, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (nyb_safetensors_at(file, i, &tensors[i].source) != NYB_OK) {
      return nyb_command_failed("%s", nyb_last_error());
    }
  }
  int status = choose(chosen, tensors, count);
  if (status == 0) status = quantize_all(context, chosen, tensors, count);
  if (status == 0) status = write_output(context, chosen, file, tensors, count);
  if (status != 0) return status;
  if (chosen->json) {
    report_json(chosen, tensors, count);
  } else {
    report_text(chosen, tensors, count);
  }
  return 0;
}

static int run(nyb_context *context, const settings *chosen) {
  nyb_safetensors *file;
  if (nyb_safetensors_open(context, chosen->input_path, &file) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error());
  }
  const int64_t count = nyb_safetensors_count(file);
  plan *tensors = nyb_command_allocate(count * (int64_t)sizeof *tensors);
  const int status = convert(context, chosen, file, tensors, count);
  for (int64_t i = 0; i < count; i++) {
    free(tensors[i].scales_name);
    free(tensors[i].biases_name);
    free(tensors[i].codes);
    free(tensors[i].scales);
    free(tensors[i].biases);
  }
  free(tensors);
  nyb_safetensors_close(file);
  return status;
}

int nyb_command_quantize(int argc, char **argv) {
  static const struct argp_option options[] = {
      {.name = "tensor",
       .key = 't',
       .arg = "NAME",
       .doc = "Quantize this tensor; a shell pattern (*, ?, [...]) takes what fits of what it "
              "matches; repeatable"},
      {.name = "all",
       .key = KEY_ALL,
       .doc = "Quantize every tensor of F32, F16 or BF16 with two axes or more whose last axis "
              "the group size divides"},
      {.name = "bits", .key = 'b', .arg = "BITS", .doc = "2, 3, 4, 5, 6 or 8 (4)"},
      {.name = "group-size", .key = 'g', .arg = "SIZE", .doc = "32, 64 or 128 (64)"},
      {.name = "rule",
       .key = KEY_RULE,
       .arg = "RULE",
       .doc = "Whose rounding: mlx_cpu or mlx_gpu (mlx_cpu)"},
      {.name = "json", .key = 'j', .doc = "Print JSON"},
      {0},
  };
  static const struct argp argp = {
      .options = options,
      .parser = parse,
      .args_doc = "IN OUT",
      .doc =
          "Quantizes tensors of the safetensors file IN into MLX's triple of packed codes, "
          "scales and biases, and writes the file OUT. Other tensors and the metadata are "
          "copied. \"x.weight\" becomes \"x.weight\", \"x.scales\" and \"x.biases\", as in a "
          "quantized MLX model; any other \"x\" becomes \"x\", \"x.scales\" and \"x.biases\".",
  };
  settings chosen = {.bits = 4, .group_size = 64, .rule = NYB_RULE_MLX_CPU};
  argp_parse(&argp, argc, argv, 0, NULL, &chosen);
  nyb_context *context;
  int status = nyb_command_open(NYB_ISA_AUTO, 0, &context);
  if (status != 0) return status;
  status = run(context, &chosen);
  nyb_context_destroy(context);
  return status;
}
