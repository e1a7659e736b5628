/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "support.h"

#define TRACE_FORMAT "nybble-trace"
#define TRACE_VERSION "1"

enum { PARTS = 3, QUERY = 0, KEY = 1, VALUE = 2, HEADS_AXIS = 0, TOKENS_AXIS = 1, DIM_AXIS = 2 };
static const char *const part_names[PARTS] = {"query", "key", "value"};

/* One layer while the file is read: the tensors found of it. */
typedef struct found_layer {
  int64_t index;
  bool present[PARTS];
  nyb_safetensors_tensor part[PARTS];
} found_layer;

/* ---- Metadata ----------------------------------------------------------------------------- */

static const char *metadata(const nyb_safetensors *file, const char *key) {
  for (int64_t i = 0; i < nyb_safetensors_metadata_count(file); i++) {
    nyb_metadata item;
    if (nyb_safetensors_metadata_at(file, i, &item) == NYB_OK && strcmp(item.key, key) == 0) {
      return item.value;
    }
  }
  return NULL;
}

static int check_kind(const nyb_safetensors *file, const char *path) {
  const char *format = metadata(file, "format"), *version = metadata(file, "version");
  if (format == NULL || strcmp(format, TRACE_FORMAT) != 0) {
    return nyb_command_failed(
        "%s is not a trace: its metadata's format is %s%s%s; it must be \"" TRACE_FORMAT "\"", path,
        format == NULL ? "missing" : "\"", format == NULL ? "" : format,
        format == NULL ? "" : "\"");
  }
  if (version == NULL || strcmp(version, TRACE_VERSION) != 0) {
    return nyb_command_failed(
        "%s: version is %s; this command reads traces of version " TRACE_VERSION, path,
        version == NULL ? "missing" : version);
  }
  static const char *const required[] = {"model", "prompt_tokens", "scale", "text", "recorded_by"};
  for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
    if (metadata(file, required[i]) == NULL) {
      return nyb_command_failed("%s: the metadata lacks %s", path, required[i]);
    }
  }
  return 0;
}

/* Digits without a sign, a leading zero or anything after them. */
static bool parse_count(const char *text, int64_t *count) {
  const size_t digits = strspn(text, "0123456789");
  if (digits == 0 || digits > 18 || (digits > 1 && text[0] == '0')) return false;
  *count = strtoll(text, NULL, 10);
  return text[digits] == '\0';
}

/* A decimal number that a float holds as one greater than 0. */
static bool parse_positive(const char *text, double *number) {
  char *end;
  *number = strtod(text, &end);
  return end != text && *end == '\0' && strspn(text, "0123456789.eE+-") == strlen(text) &&
         isfinite((float)*number) && (float)*number > 0;
}

static int read_numbers(const nyb_safetensors *file, nyb_trace *trace) {
  const char *prompt = metadata(file, "prompt_tokens"), *scale = metadata(file, "scale");
  if (!parse_count(prompt, &trace->prompt_tokens) || trace->prompt_tokens < 1 ||
      trace->prompt_tokens > trace->tokens) {
    return nyb_command_failed("%s: prompt_tokens is \"%s\"; it must be a number from 1 to %lld",
                              trace->path, prompt, (long long)trace->tokens);
  }
  if (!parse_positive(scale, &trace->scale)) {
    return nyb_command_failed("%s: scale is \"%s\"; it must be a number greater than 0",
                              trace->path, scale);
  }
  return 0;
}

/* What a layer asks for beyond plain causal attention. */
static int read_extras(const nyb_safetensors *file, const char *path, nyb_trace_layer *layer) {
  char key[64];
  snprintf(key, sizeof key, "layers.%lld.window", (long long)layer->index);
  const char *window = metadata(file, key);
  if (window != NULL && (!parse_count(window, &layer->window_tokens) || layer->window_tokens < 1)) {
    return nyb_command_failed("%s: %s is \"%s\"; it must be a number of tokens, 1 or more", path,
                              key, window);
  }
  snprintf(key, sizeof key, "layers.%lld.softcap", (long long)layer->index);
  const char *softcap = metadata(file, key);
  if (softcap != NULL && !parse_positive(softcap, &layer->softcap)) {
    return nyb_command_failed("%s: %s is \"%s\"; it must be a number greater than 0", path, key,
                              softcap);
  }
  return 0;
}

/* ---- Tensors ------------------------------------------------------------------------------ */

/* Takes "layers.7.key" apart; false for any other name. */
static bool parse_name(const char *name, int64_t *index, int *part) {
  static const char prefix[] = "layers.";
  if (strncmp(name, prefix, sizeof prefix - 1) != 0) return false;
  char number[24];
  const char *digits = name + sizeof prefix - 1;
  const size_t length = strcspn(digits, ".");
  if (length >= sizeof number || digits[length] != '.') return false;
  snprintf(number, sizeof number, "%.*s", (int)length, digits);
  if (!parse_count(number, index)) return false;
  for (*part = 0; *part < PARTS; (*part)++) {
    if (strcmp(digits + length + 1, part_names[*part]) == 0) return true;
  }
  return false;
}

/* Adds one tensor to the layers found so far. */
static int add_tensor(const char *path, const nyb_safetensors_tensor *tensor, found_layer *layers,
                      int64_t *count) {
  int64_t index;
  int part;
  if (!parse_name(tensor->name, &index, &part)) {
    if (strncmp(tensor->name, "layers.", 7) != 0) return 0;
    return nyb_command_failed("%s: %s is no tensor of a trace of version " TRACE_VERSION, path,
                              tensor->name);
  }
  int64_t place = 0;
  while (place < *count && layers[place].index != index) place++;
  if (place == *count) layers[(*count)++] = (found_layer){.index = index};
  layers[place].present[part] = true;
  layers[place].part[part] = *tensor;
  return 0;
}

static int by_index(const void *a, const void *b) {
  const int64_t left = ((const found_layer *)a)->index, right = ((const found_layer *)b)->index;
  return (left > right) - (left < right);
}

static int check_tensor(const char *path, const nyb_safetensors_tensor *tensor, nyb_dtype *dtype) {
  static const struct {
    const char *name;
    nyb_dtype dtype;
  } known[] = {{"BF16", NYB_BF16}, {"F16", NYB_F16}, {"F32", NYB_F32}};
  size_t i = 0;
  while (i < 3 && strcmp(tensor->dtype, known[i].name) != 0) i++;
  if (i == 3) {
    return nyb_command_failed("%s: %s is %s; it must be BF16, F16 or F32", path, tensor->name,
                              tensor->dtype);
  }
  if (*dtype != 0 && *dtype != known[i].dtype) {
    return nyb_command_failed("%s: %s is %s, other tensors are not; a trace has one dtype", path,
                              tensor->name, tensor->dtype);
  }
  *dtype = known[i].dtype;
  if (tensor->rank != 3 || tensor->data_bytes == 0) {
    return nyb_command_failed(
        "%s: %s has %lld axes and %lld bytes; it must be [heads, tokens, "
        "dim], none of them 0",
        path, tensor->name, (long long)tensor->rank, (long long)tensor->data_bytes);
  }
  return 0;
}

/* The three parts of a layer must be there and fit each other, and the other layers. */
static int check_layer(nyb_trace *trace, const found_layer *layer) {
  const char *path = trace->path;
  const long long index = layer->index;
  for (int part = 0; part < PARTS; part++) {
    if (!layer->present[part]) {
      return nyb_command_failed("%s: layers.%lld.%s is missing", path, index, part_names[part]);
    }
    const int status = check_tensor(path, &layer->part[part], &trace->dtype);
    if (status != 0) return status;
  }
  const int64_t *query = layer->part[QUERY].shape, *key = layer->part[KEY].shape,
                *value = layer->part[VALUE].shape;
  if (trace->tokens == 0) trace->tokens = query[TOKENS_AXIS];
  for (int part = 0; part < PARTS; part++) {
    const int64_t tokens = layer->part[part].shape[TOKENS_AXIS];
    if (tokens != trace->tokens) {
      return nyb_command_failed(
          "%s: layers.%lld.%s has %lld tokens, other tensors have %lld; they "
          "must agree",
          path, index, part_names[part], (long long)tokens, (long long)trace->tokens);
    }
  }
  if (trace->tokens > INT32_MAX) {
    return nyb_command_failed("%s has %lld tokens; at most %d are possible", path,
                              (long long)trace->tokens, INT32_MAX);
  }
  if (key[HEADS_AXIS] != value[HEADS_AXIS] || query[HEADS_AXIS] % key[HEADS_AXIS] != 0) {
    return nyb_command_failed(
        "%s: layer %lld has %lld query, %lld key and %lld value heads; key "
        "and value heads must agree and divide the query heads",
        path, index, (long long)query[HEADS_AXIS], (long long)key[HEADS_AXIS],
        (long long)value[HEADS_AXIS]);
  }
  if (query[DIM_AXIS] != key[DIM_AXIS]) {
    return nyb_command_failed(
        "%s: layer %lld has queries of %lld and keys of %lld; they must "
        "agree",
        path, index, (long long)query[DIM_AXIS], (long long)key[DIM_AXIS]);
  }
  return 0;
}

/* An aligned copy, checked for NaN and infinity. */
static int copy_tensor(const nyb_trace *trace, const nyb_safetensors_tensor *tensor, void **copy) {
  *copy = nyb_command_allocate(tensor->data_bytes);
  memcpy(*copy, tensor->data, (size_t)tensor->data_bytes);
  const int64_t count = tensor->data_bytes / (int64_t)nyb_dtype_bytes(trace->dtype);
  for (int64_t i = 0; i < count; i++) {
    if (!isfinite(nyb_element(*copy, trace->dtype, i))) {
      const int64_t dim = tensor->shape[DIM_AXIS], tokens = tensor->shape[TOKENS_AXIS];
      return nyb_command_failed("%s: %s[%lld, %lld, %lld] is not finite", trace->path, tensor->name,
                                (long long)(i / dim / tokens), (long long)(i / dim % tokens),
                                (long long)(i % dim));
    }
  }
  return 0;
}

static int copy_layer(nyb_trace *trace, const found_layer *found, nyb_trace_layer *layer) {
  layer->index = found->index;
  layer->query_heads = found->part[QUERY].shape[HEADS_AXIS];
  layer->kv_heads = found->part[KEY].shape[HEADS_AXIS];
  layer->key_dim = found->part[KEY].shape[DIM_AXIS];
  layer->value_dim = found->part[VALUE].shape[DIM_AXIS];
  int status = copy_tensor(trace, &found->part[QUERY], &layer->query);
  if (status == 0) status = copy_tensor(trace, &found->part[KEY], &layer->key);
  if (status == 0) status = copy_tensor(trace, &found->part[VALUE], &layer->value);
  return status;
}

/* ---- Reading ------------------------------------------------------------------------------ */

static int find_layers(const nyb_safetensors *file, const char *path, found_layer *found,
                       int64_t *count) {
  for (int64_t i = 0; i < nyb_safetensors_count(file); i++) {
    nyb_safetensors_tensor tensor;
    if (nyb_safetensors_at(file, i, &tensor) != NYB_OK) {
      return nyb_command_failed("%s", nyb_last_error());
    }
    const int status = add_tensor(path, &tensor, found, count);
    if (status != 0) return status;
  }
  if (*count == 0) return nyb_command_failed("%s has no layer", path);
  qsort(found, (size_t)*count, sizeof *found, by_index);
  return 0;
}

static int read_layers(const nyb_safetensors *file, nyb_trace *trace, found_layer *found) {
  int64_t count = 0;
  int status = find_layers(file, trace->path, found, &count);
  for (int64_t i = 0; i < count && status == 0; i++) {
    status = check_layer(trace, &found[i]);
  }
  if (status == 0) status = read_numbers(file, trace);
  if (status != 0) return status;
  trace->layers = nyb_command_allocate(count * (int64_t)sizeof *trace->layers);
  trace->layer_count = count;
  for (int64_t i = 0; i < count && status == 0; i++) {
    status = copy_layer(trace, &found[i], &trace->layers[i]);
    if (status == 0) status = read_extras(file, trace->path, &trace->layers[i]);
  }
  return status;
}

int nyb_trace_read(nyb_context *context, const char *path, nyb_trace *trace) {
  *trace = (nyb_trace){0};
  nyb_safetensors *file;
  if (nyb_safetensors_open(context, path, &file) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error());
  }
  trace->path = nyb_command_copy_text(path);
  int status = check_kind(file, path);
  if (status == 0) {
    const int64_t found_bytes = nyb_safetensors_count(file) * (int64_t)sizeof(found_layer);
    found_layer *found = nyb_command_allocate(found_bytes);
    status = read_layers(file, trace, found);
    free(found);
  }
  if (status == 0) {
    trace->model = nyb_command_copy_text(metadata(file, "model"));
    trace->text = nyb_command_copy_text(metadata(file, "text"));
  } else {
    nyb_trace_release(trace);
  }
  nyb_safetensors_close(file);
  return status;
}

void nyb_trace_release(nyb_trace *trace) {
  for (int64_t i = 0; i < trace->layer_count; i++) {
    free(trace->layers[i].query);
    free(trace->layers[i].key);
    free(trace->layers[i].value);
  }
  free(trace->layers);
  free(trace->path);
  free(trace->model);
  free(trace->text);
  *trace = (nyb_trace){0};
}

nyb_input nyb_trace_view(const nyb_trace *trace, const void *part, int64_t dim, int64_t first) {
  const int64_t offset_bytes = first * dim * (int64_t)nyb_dtype_bytes(trace->dtype);
  return (nyb_input){.data = (const char *)part + offset_bytes,
                     .dtype = trace->dtype,
                     .stride = {0, trace->tokens * dim, dim}};
}
