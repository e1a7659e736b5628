/* SPDX-License-Identifier: Apache-2.0 */
/* nybble cache: what a saved cache holds, and the same cache at other widths. */
#define _POSIX_C_SOURCE 200809L
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "support.h"
#include "table.h"

enum { PLAIN_BITS = 16, UNCHANGED = 0, MAX_RANGES = 256, CHUNK_TOKENS = 256 };
enum { KEY_KEY_BITS = 256, KEY_VALUE_BITS, KEY_LAYERS };

/* What is asked of some layers. */
typedef struct layer_range {
  int64_t first, last;
  nyb_width width;
} layer_range;

typedef struct settings {
  const char *action, *input_path, *output_path;
  nyb_width width; /* UNCHANGED where nothing is asked */
  int64_t group_size;
  layer_range ranges[MAX_RANGES];
  int range_count;
  bool json, converts;
} settings;

/* ---- Options ------------------------------------------------------------------------------- */

static int32_t parse_bits(const struct argp_state *state, const char *option, const char *text) {
  if (strcmp(text, "plain") == 0) return PLAIN_BITS;
  return nyb_parse_bits(state, option, text, false);
}

/* "3:4", "0-7:8", "8-15:8:4". */
static void parse_layers(settings *chosen, const struct argp_state *state, const char *text) {
  if (chosen->range_count == MAX_RANGES) {
    argp_error(state, "--layers is given more than %d times", MAX_RANGES);
  }
  char copy[64];
  const size_t length = strlen(text);
  if (length >= sizeof copy) argp_error(state, "--layers \"%s\" is too long", text);
  memcpy(copy, text, length + 1);
  char *bits = strchr(copy, ':');
  if (bits == NULL) {
    argp_error(state, "--layers is \"%s\"; it must be A:BITS, A-B:BITS or A-B:K_BITS:V_BITS", text);
    return;
  }
  *bits++ = '\0';
  char *value_bits = strchr(bits, ':');
  if (value_bits != NULL) *value_bits++ = '\0';
  char *last = strchr(copy, '-');
  if (last != NULL) *last++ = '\0';
  layer_range *range = &chosen->ranges[chosen->range_count++];
  range->first = nyb_parse_integer(state, "--layers", copy, 0, INT32_MAX);
  range->last = last == NULL ? range->first
                             : nyb_parse_integer(state, "--layers", last, range->first, INT32_MAX);
  range->width.key_bits = parse_bits(state, "--layers", bits);
  range->width.value_bits =
      value_bits == NULL ? range->width.key_bits : parse_bits(state, "--layers", value_bits);
}

static void check_arguments(const settings *chosen, const struct argp_state *state) {
  const bool converts = chosen->action != NULL && strcmp(chosen->action, "convert") == 0;
  if (chosen->action == NULL || (!converts && strcmp(chosen->action, "info") != 0)) {
    argp_error(state, "\"%s\" is no action; there are info FILE and convert IN OUT",
               chosen->action == NULL ? "" : chosen->action);
  }
  if (chosen->input_path == NULL) argp_error(state, "%s must be given", converts ? "IN" : "FILE");
  if (converts != (chosen->output_path != NULL)) {
    argp_error(state, converts ? "OUT must be given" : "info takes one FILE");
  }
  if (!converts && chosen->converts) {
    argp_error(state, "info takes --json alone; the widths are convert's");
  }
  if (converts && !chosen->converts) {
    argp_error(state, "say what to convert to: --bits, --k-bits, --v-bits, --group-size, --layers");
  }
}

static error_t parse(int key, char *text, struct argp_state *state) {
  settings *chosen = state->input;
  const bool width = key == 'b' || key == KEY_KEY_BITS || key == KEY_VALUE_BITS;
  chosen->converts |= width || key == 'g' || key == KEY_LAYERS;
  switch (key) {
    case 'b':
      chosen->width.key_bits = chosen->width.value_bits = parse_bits(state, "--bits", text);
      return 0;
    case KEY_KEY_BITS: chosen->width.key_bits = parse_bits(state, "--k-bits", text); return 0;
    case KEY_VALUE_BITS: chosen->width.value_bits = parse_bits(state, "--v-bits", text); return 0;
    case 'g': chosen->group_size = nyb_parse_group_size(state, "--group-size", text); return 0;
    case KEY_LAYERS: parse_layers(chosen, state, text); return 0;
    case 'j': chosen->json = true; return 0;
    case ARGP_KEY_ARG:
      if (state->arg_num > 2) argp_error(state, "\"%s\" is too much", text);
      *(state->arg_num == 0   ? &chosen->action
        : state->arg_num == 1 ? &chosen->input_path
                              : &chosen->output_path) = text;
      return 0;
    case ARGP_KEY_END: check_arguments(chosen, state); return 0;
    default: return ARGP_ERR_UNKNOWN;
  }
}

/* ---- What a file holds --------------------------------------------------------------------- */

typedef struct layer_facts {
  nyb_cache_options options;
  int64_t shortest, longest; /* tokens of its sequences */
  int64_t bytes;             /* of its tensors in the file */
} layer_facts;

/* A file of caches, and what each layer is. */
typedef struct saved {
  nyb_safetensors *file;
  int64_t layers;
  layer_facts *facts;
} saved;

static int failed(const char *path) { return nyb_command_failed("%s: %s", path, nyb_last_error()); }

static int read_lengths(const char *path, const saved *from, int64_t layer) {
  layer_facts *facts = &from->facts[layer];
  int64_t *lengths = nyb_command_allocate(facts->options.batch * (int64_t)sizeof *lengths);
  const nyb_status status = nyb_cache_file_lengths(from->file, layer, lengths);
  facts->shortest = facts->longest = lengths[0];
  for (int64_t i = 1; i < facts->options.batch; i++) {
    if (lengths[i] < facts->shortest) facts->shortest = lengths[i];
    if (lengths[i] > facts->longest) facts->longest = lengths[i];
  }
  free(lengths);
  return status == NYB_OK ? 0 : failed(path);
}

/* Tensors are named "layer.…". */
static int add_bytes(const char *path, const saved *from) {
  for (int64_t i = 0; i < nyb_safetensors_count(from->file); i++) {
    nyb_safetensors_tensor tensor;
    if (nyb_safetensors_at(from->file, i, &tensor) != NYB_OK) return failed(path);
    const int64_t layer = strtoll(tensor.name, NULL, 10);
    if (layer >= 0 && layer < from->layers) from->facts[layer].bytes += tensor.data_bytes;
  }
  return 0;
}

static int read_facts(const char *path, saved *from) {
  if (nyb_cache_file_layers(from->file, &from->layers) != NYB_OK) return failed(path);
  from->facts = nyb_command_allocate(from->layers * (int64_t)sizeof *from->facts);
  int status = 0;
  for (int64_t i = 0; i < from->layers && status == 0; i++) {
    nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
    if (nyb_cache_file_options(from->file, i, &options) != NYB_OK) return failed(path);
    from->facts[i].options = options;
    status = read_lengths(path, from, i);
  }
  return status == 0 ? add_bytes(path, from) : status;
}

static int open_saved(nyb_context *context, const char *path, saved *from) {
  *from = (saved){0};
  if (nyb_safetensors_open(context, path, &from->file) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error()); /* it has the path */
  }
  return read_facts(path, from);
}

static void close_saved(saved *from) {
  free(from->facts);
  nyb_safetensors_close(from->file);
}

static int64_t total_bytes(const saved *from) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < from->layers; i++) bytes += from->facts[i].bytes;
  return bytes;
}

/* ---- Showing it ---------------------------------------------------------------------------- */

static const char *kind_name(const nyb_cache_options *options) {
  if (options->window_tokens > 0) return "rotating";
  if (options->first_tokens > 0 || options->last_tokens > 0) return "mixed";
  return options->page_tokens > 0 ? "paged" : "contiguous";
}

typedef struct cell {
  char text[48];
} cell;

static cell show_format(const nyb_format *format) {
  cell shown;
  if (format->scheme == NYB_PLAIN) {
    snprintf(shown.text, sizeof shown.text, "%s", nyb_dtype_name(format->dtype));
  } else {
    snprintf(shown.text, sizeof shown.text, "%d bits, groups of %d, %s", (int)format->bits,
             (int)format->group_size, nyb_dtype_name(format->dtype));
  }
  return shown;
}

/* What the kind has beside the rest: "window 4096, keep 4". */
static cell show_kind(const nyb_cache_options *options) {
  cell shown;
  const char *name = kind_name(options);
  snprintf(shown.text, sizeof shown.text, "%s", name);
  if (options->window_tokens > 0) {
    snprintf(shown.text, sizeof shown.text, "%s %lld, keeps %lld", name,
             (long long)options->window_tokens, (long long)options->window_keep_tokens);
  } else if (options->page_tokens > 0) {
    snprintf(shown.text, sizeof shown.text, "%s by %lld", name, (long long)options->page_tokens);
  } else if (options->part_dtype != 0) {
    snprintf(shown.text, sizeof shown.text, "%s %lld + %lld %s", name,
             (long long)options->first_tokens, (long long)options->last_tokens,
             nyb_dtype_name(options->part_dtype));
  }
  return shown;
}

static bool same_facts(const layer_facts *a, const layer_facts *b) {
  return strcmp(show_kind(&a->options).text, show_kind(&b->options).text) == 0 &&
         strcmp(show_format(&a->options.key_format).text,
                show_format(&b->options.key_format).text) == 0 &&
         strcmp(show_format(&a->options.value_format).text,
                show_format(&b->options.value_format).text) == 0 &&
         a->options.batch == b->options.batch && a->options.kv_heads == b->options.kv_heads &&
         a->options.key_dim == b->options.key_dim && a->options.value_dim == b->options.value_dim &&
         a->shortest == b->shortest && a->longest == b->longest && a->bytes == b->bytes;
}

static void add_layer_cells(nyb_table *table, int64_t first, int64_t last,
                            const layer_facts *facts) {
  const nyb_cache_options *options = &facts->options;
  nyb_table_add(table, first == last ? "%lld" : "%lld-%lld", (long long)first, (long long)last);
  nyb_table_add(table, "%s", show_kind(options).text);
  nyb_table_add(table, "%s", show_format(&options->key_format).text);
  nyb_table_add(table, "%s", show_format(&options->value_format).text);
  nyb_table_add(table, "%lld", (long long)options->batch);
  nyb_table_add(table, "%lld", (long long)options->kv_heads);
  nyb_table_add(table, options->key_dim == options->value_dim ? "%lld" : "%lld/%lld",
                (long long)options->key_dim, (long long)options->value_dim);
  nyb_table_add(table, facts->shortest == facts->longest ? "%lld" : "%lld-%lld",
                (long long)facts->shortest, (long long)facts->longest);
  nyb_table_add(table, "%lld", (long long)facts->bytes);
}

/* A file's own text, which may be long. */
static void print_text(const char *text) {
  enum { MOST_BYTES = 160 };
  char shown[MOST_BYTES + 1];
  size_t bytes = strlen(text);
  const bool cut = bytes > MOST_BYTES;
  if (cut) bytes = MOST_BYTES;
  while (cut && bytes > 0 && ((unsigned char)text[bytes] & 0xc0) == 0x80) bytes--; /* of UTF-8 */
  snprintf(shown, sizeof shown, "%.*s", (int)bytes, text);
  nyb_make_printable(shown);
  printf("%s%s", shown, cut ? "..." : "");
}

static void report_text(const char *path, const saved *from) {
  nyb_table *table =
      nyb_table_create("<layers|<kind|<keys|<values|>sequences|>KV heads|>dim|>tokens|>bytes each");
  for (int64_t first = 0, last; first < from->layers; first = last + 1) {
    for (last = first; last + 1 < from->layers; last++) {
      if (!same_facts(&from->facts[first], &from->facts[last + 1])) break;
    }
    add_layer_cells(table, first, last, &from->facts[first]);
  }
  nyb_table_print(table);
  const int64_t count = nyb_cache_file_metadata_count(from->file);
  for (int64_t i = 0; i < count; i++) {
    nyb_metadata item;
    if (nyb_cache_file_metadata_at(from->file, i, &item) != NYB_OK) break;
    print_text(item.key);
    fputs(": ", stdout);
    print_text(item.value);
    putchar('\n');
  }
  printf("%lld layers, %lld bytes in %s\n", (long long)from->layers, (long long)total_bytes(from),
         path);
}

static void add_format_json(cJSON *layer, const char *name, const nyb_format *format, int64_t dim) {
  cJSON *json = cJSON_AddObjectToObject(layer, name);
  cJSON_AddStringToObject(json, "scheme", format->scheme == NYB_PLAIN ? "plain" : "affine");
  if (format->scheme == NYB_AFFINE) {
    cJSON_AddNumberToObject(json, "bits", format->bits);
    cJSON_AddNumberToObject(json, "group_size", format->group_size);
  }
  cJSON_AddStringToObject(json, "dtype", nyb_dtype_name(format->dtype));
  cJSON_AddNumberToObject(json, "dim", (double)dim);
}

static cJSON *layer_json(int64_t index, const layer_facts *facts) {
  const nyb_cache_options *options = &facts->options;
  cJSON *layer = cJSON_CreateObject();
  cJSON_AddNumberToObject(layer, "layer", (double)index);
  cJSON_AddStringToObject(layer, "kind", kind_name(options));
  add_format_json(layer, "keys", &options->key_format, options->key_dim);
  add_format_json(layer, "values", &options->value_format, options->value_dim);
  const struct {
    const char *name;
    int64_t value;
    bool always;
  } numbers[] = {{"batch", options->batch, true},
                 {"kv_heads", options->kv_heads, true},
                 {"shortest_tokens", facts->shortest, true},
                 {"longest_tokens", facts->longest, true},
                 {"bytes", facts->bytes, true},
                 {"window_tokens", options->window_tokens, false},
                 {"window_keep_tokens", options->window_keep_tokens, false},
                 {"first_tokens", options->first_tokens, false},
                 {"last_tokens", options->last_tokens, false},
                 {"page_tokens", options->page_tokens, false}};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    if (!numbers[i].always && numbers[i].value == 0) continue;
    cJSON_AddNumberToObject(layer, numbers[i].name, (double)numbers[i].value);
  }
  if (options->part_dtype != 0) {
    cJSON_AddStringToObject(layer, "part_dtype", nyb_dtype_name(options->part_dtype));
  }
  return layer;
}

static cJSON *saved_json(const char *path, const saved *from) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "file", path);
  cJSON_AddNumberToObject(json, "bytes", (double)total_bytes(from));
  cJSON *metadata = cJSON_AddObjectToObject(json, "metadata");
  for (int64_t i = 0; i < nyb_cache_file_metadata_count(from->file); i++) {
    nyb_metadata item;
    if (nyb_cache_file_metadata_at(from->file, i, &item) != NYB_OK) break;
    cJSON_AddStringToObject(metadata, item.key, item.value);
  }
  cJSON *layers = cJSON_AddArrayToObject(json, "layers");
  for (int64_t i = 0; i < from->layers; i++) {
    cJSON_AddItemToArray(layers, layer_json(i, &from->facts[i]));
  }
  return json;
}

static int show(nyb_context *context, const settings *chosen, const char *path) {
  saved from;
  const int status = open_saved(context, path, &from);
  if (status == 0 && chosen->json) nyb_json_print(saved_json(path, &from));
  if (status == 0 && !chosen->json) report_text(path, &from);
  close_saved(&from);
  return status;
}

/* ---- Converting a layer -------------------------------------------------------------------- */

/* From one cache into another, a chunk of tokens of all sequences at a time, as f32: that holds
 * every value of every dtype. */
typedef struct transfer {
  nyb_context *context;
  nyb_cache *source, *target;
  const nyb_cache_options *options; /* of the source */
  nyb_attention view;
  float *key, *value; /* [batch, kv_heads, CHUNK_TOKENS, dim] */
  int32_t *padding;
  int64_t *first, *count; /* of each sequence: its next token, and how many are to go */
} transfer;

/* Tokens from `token` on that stand one behind the other. */
typedef struct run {
  const nyb_stored *k, *v;
  int64_t block, slot, tokens;
} run;

static run run_at(const transfer *work, int64_t sequence, int64_t token, int64_t most) {
  const nyb_attention *view = &work->view;
  run found = {&view->k, &view->v, sequence, token - view->first.tokens, most};
  int64_t rows = most;
  if (view->pages.table != NULL) {
    const int64_t page_tokens = view->pages.page_tokens;
    found.block = view->pages.table[sequence * view->pages.table_stride + token / page_tokens];
    found.slot = token % page_tokens;
    rows = page_tokens - found.slot;
  } else if (view->ring.offsets != NULL && token >= view->ring.keep_tokens) {
    const int64_t keep = view->ring.keep_tokens, slots = view->capacity_tokens - keep;
    found.slot = keep + (token - keep + view->ring.offsets[sequence]) % slots;
    rows = view->capacity_tokens - found.slot;
  } else if (view->ring.offsets != NULL) {
    rows = view->ring.keep_tokens - token;
  } else if (token < view->first.tokens) {
    found = (run){&view->first.k, &view->first.v, sequence, token, most};
    rows = view->first.tokens - token;
  } else if (view->last.tokens > 0 && token >= view->last_begins[sequence]) {
    const int64_t slot = token % view->last.tokens;
    found = (run){&view->last.k, &view->last.v, sequence, slot, most};
    rows = view->last.tokens - slot;
  } else if (view->last.tokens > 0) {
    rows = view->last_begins[sequence] - token;
  }
  if (rows < found.tokens) found.tokens = rows;
  return found;
}

static int64_t element_bytes(const nyb_stored *rows) {
  return rows->format.scheme == NYB_AFFINE ? 4 : (int64_t)nyb_dtype_bytes(rows->format.dtype);
}

static nyb_status read_rows(const transfer *work, const nyb_stored *rows, const run *at,
                            int64_t dim, float *out) {
  nyb_dequantize call = NYB_DEQUANTIZE_INIT;
  call.batch = 1;
  call.heads = work->options->kv_heads;
  call.tokens = at->tokens;
  call.dim = dim;
  call.input = *rows;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
  const int64_t code = at->block * rows->codes_stride[0] + at->slot * rows->codes_stride[2];
  call.input.codes = (const char *)rows->codes + code * element_bytes(rows);
  if (rows->format.scheme == NYB_AFFINE) {
    const int64_t scale = at->block * rows->scales_stride[0] + at->slot * rows->scales_stride[2];
    const int64_t bias = at->block * rows->biases_stride[0] + at->slot * rows->biases_stride[2];
    call.input.scales = (const char *)rows->scales + scale * scale_bytes;
    call.input.biases = (const char *)rows->biases + bias * scale_bytes;
  }
  call.output = (nyb_output){out, NYB_F32, {0, CHUNK_TOKENS * dim, dim}};
  return nyb_dequantize_run(work->context, &call, NULL);
}

/* Tokens of one sequence into the end of its part of the buffers. */
static nyb_status read_sequence(const transfer *work, int64_t sequence, int64_t token,
                                int64_t tokens, int64_t column) {
  const int64_t key_dim = work->options->key_dim, value_dim = work->options->value_dim;
  const int64_t plane = sequence * work->options->kv_heads * CHUNK_TOKENS;
  nyb_status status = NYB_OK;
  for (int64_t done = 0; done < tokens && status == NYB_OK;) {
    const run at = run_at(work, sequence, token + done, tokens - done);
    const int64_t row = plane + column + done;
    status = read_rows(work, at.k, &at, key_dim, work->key + row * key_dim);
    if (status == NYB_OK) {
      status = read_rows(work, at.v, &at, value_dim, work->value + row * value_dim);
    }
    done += at.tokens;
  }
  return status;
}

/* Appends the tokens that first and count say, so many at a time; or as many of zeros. Sequences
 * with fewer of them are padded. */
static nyb_status move_tokens(const transfer *work, int64_t chunk, bool zeros) {
  const nyb_cache_options *options = work->options;
  int64_t longest = 0;
  for (int64_t i = 0; i < options->batch; i++) {
    if (work->count[i] > longest) longest = work->count[i];
  }
  const int64_t plane_rows = options->batch * options->kv_heads * CHUNK_TOKENS;
  if (zeros) {
    memset(work->key, 0, (size_t)(plane_rows * options->key_dim) * sizeof(float));
    memset(work->value, 0, (size_t)(plane_rows * options->value_dim) * sizeof(float));
  }
  nyb_status status = NYB_OK;
  for (int64_t left = longest; left > 0 && status == NYB_OK;) {
    const int64_t tokens = left < chunk ? left : chunk;
    for (int64_t i = 0; i < options->batch && status == NYB_OK; i++) {
      const int64_t ahead = left - work->count[i]; /* columns before this sequence's next token */
      const int64_t padding = ahead < 0 ? 0 : ahead < tokens ? ahead : tokens;
      work->padding[i] = (int32_t)padding;
      if (!zeros) {
        status = read_sequence(work, i, work->first[i], tokens - padding, padding);
      }
      work->first[i] += tokens - padding;
      work->count[i] -= tokens - padding;
    }
    nyb_append append = NYB_APPEND_INIT;
    append.tokens = tokens;
    const int64_t key_plane = CHUNK_TOKENS * options->key_dim;
    const int64_t value_plane = CHUNK_TOKENS * options->value_dim;
    append.key = (nyb_input){
        work->key, NYB_F32, {options->kv_heads * key_plane, key_plane, options->key_dim}};
    append.value = (nyb_input){
        work->value, NYB_F32, {options->kv_heads * value_plane, value_plane, options->value_dim}};
    append.padding = work->padding;
    if (status == NYB_OK) status = nyb_cache_append(work->target, &append, NULL);
    left -= tokens;
  }
  return status;
}

/* Of a rotating cache the first tokens come first, then as many zeros as were dropped, so that
 * positions stay what they were, then the window, token by token. */
static nyb_status move_rotating(const transfer *work) {
  const int64_t batch = work->options->batch, keep = work->options->window_keep_tokens;
  nyb_status status = NYB_OK;
  for (int step = 0; step < 3 && status == NYB_OK; step++) {
    for (int64_t i = 0; i < batch; i++) {
      const int64_t held = nyb_cache_held_tokens(work->source, i);
      const int64_t kept = held < keep ? held : keep;
      work->first[i] = step == 0 ? 0 : kept;
      work->count[i] = step == 0   ? kept
                       : step == 1 ? nyb_cache_length(work->source, i) - held
                                   : held - kept;
    }
    status = move_tokens(work, step == 1 ? CHUNK_TOKENS : 1, step == 1);
  }
  return status;
}

static nyb_status move_layer(transfer *work) {
  const nyb_cache_options *options = work->options;
  const int64_t rows = options->batch * options->kv_heads * CHUNK_TOKENS;
  work->key = nyb_command_allocate(rows * options->key_dim * (int64_t)sizeof(float));
  work->value = nyb_command_allocate(rows * options->value_dim * (int64_t)sizeof(float));
  work->padding = nyb_command_allocate(options->batch * (int64_t)sizeof *work->padding);
  work->first = nyb_command_allocate(options->batch * (int64_t)sizeof *work->first);
  work->count = nyb_command_allocate(options->batch * (int64_t)sizeof *work->count);
  work->view = (nyb_attention)NYB_ATTENTION_INIT;
  nyb_status status = nyb_cache_view(work->source, &work->view);
  if (status == NYB_OK && options->window_tokens > 0) {
    status = move_rotating(work);
  } else if (status == NYB_OK) {
    for (int64_t i = 0; i < options->batch; i++) {
      work->first[i] = 0;
      work->count[i] = nyb_cache_length(work->source, i);
    }
    status = move_tokens(work, CHUNK_TOKENS, false);
  }
  free(work->key);
  free(work->value);
  free(work->padding);
  free(work->first);
  free(work->count);
  return status;
}

/* ---- Converting a file --------------------------------------------------------------------- */

static nyb_format converted(const settings *chosen, const nyb_format *from, int32_t bits) {
  if (bits == PLAIN_BITS) return (nyb_format){.scheme = NYB_PLAIN, .dtype = from->dtype};
  nyb_format to = *from;
  if (bits != UNCHANGED) to = nyb_width_format(bits, 64, from->dtype);
  if (bits != UNCHANGED && from->scheme == NYB_AFFINE) to.group_size = from->group_size;
  if (to.scheme == NYB_AFFINE && chosen->group_size != 0) {
    to.group_size = (int32_t)chosen->group_size;
  }
  return to;
}

/* The last range that names a layer counts. */
static nyb_width width_of(const settings *chosen, int64_t layer) {
  nyb_width width = chosen->width;
  for (int i = 0; i < chosen->range_count; i++) {
    const layer_range *range = &chosen->ranges[i];
    if (layer >= range->first && layer <= range->last) width = range->width;
  }
  return width;
}

static bool same_format(const nyb_format *a, const nyb_format *b) {
  return a->scheme == b->scheme && a->bits == b->bits && a->group_size == b->group_size &&
         a->dtype == b->dtype;
}

/* Puts the converted cache in place of *layer; one whose formats stay is left alone. */
static int convert_layer(nyb_context *context, const settings *chosen, int64_t index,
                         const nyb_cache_options *options, nyb_cache **layer) {
  const nyb_width width = width_of(chosen, index);
  nyb_cache_options wanted = *options;
  wanted.key_format = converted(chosen, &options->key_format, width.key_bits);
  wanted.value_format = converted(chosen, &options->value_format, width.value_bits);
  if (same_format(&wanted.key_format, &options->key_format) &&
      same_format(&wanted.value_format, &options->value_format)) {
    return 0;
  }
  transfer work = {.context = context, .source = *layer, .options = options};
  nyb_status status = nyb_cache_create(context, &wanted, &work.target);
  if (status == NYB_OK) status = move_layer(&work);
  if (status != NYB_OK) {
    nyb_cache_destroy(work.target);
    return nyb_command_failed("layer %lld: %s", (long long)index, nyb_last_error());
  }
  nyb_cache_destroy(*layer);
  *layer = work.target;
  return 0;
}

static int save(nyb_context *context, const settings *chosen, const saved *from,
                nyb_cache *const *layers) {
  const int64_t count = nyb_cache_file_metadata_count(from->file);
  nyb_metadata *metadata = nyb_command_allocate(count * (int64_t)sizeof *metadata);
  nyb_status status = NYB_OK;
  for (int64_t i = 0; i < count && status == NYB_OK; i++) {
    status = nyb_cache_file_metadata_at(from->file, i, &metadata[i]);
  }
  nyb_progress_show("writing %s", chosen->output_path);
  if (status == NYB_OK) {
    status =
        nyb_cache_save(context, chosen->output_path, layers, from->layers, metadata, count, NULL);
  }
  free(metadata);
  return status == NYB_OK ? 0 : nyb_command_failed("%s", nyb_last_error());
}

static int convert_layers(nyb_context *context, const settings *chosen, const saved *from,
                          nyb_cache **layers) {
  int status = 0;
  for (int64_t i = 0; i < from->layers && status == 0; i++) {
    if (nyb_cache_create(context, &from->facts[i].options, &layers[i]) != NYB_OK) {
      status = failed(chosen->input_path);
    }
  }
  nyb_progress_show("loading %s", chosen->input_path);
  if (status == 0 && nyb_cache_load(from->file, layers, from->layers, NULL) != NYB_OK) {
    status = failed(chosen->input_path);
  }
  for (int64_t i = 0; i < from->layers && status == 0; i++) {
    nyb_progress_show("converting layer %lld of %lld", (long long)i + 1, (long long)from->layers);
    status = convert_layer(context, chosen, i, &from->facts[i].options, &layers[i]);
  }
  return status == 0 ? save(context, chosen, from, layers) : status;
}

static int check_ranges(const settings *chosen, const saved *from) {
  for (int i = 0; i < chosen->range_count; i++) {
    if (chosen->ranges[i].last < from->layers) continue;
    return nyb_command_misused("--layers names layer %lld; %s has %lld",
                               (long long)chosen->ranges[i].last, chosen->input_path,
                               (long long)from->layers);
  }
  return 0;
}

static int convert(nyb_context *context, const settings *chosen) {
  saved from;
  int status = open_saved(context, chosen->input_path, &from);
  if (status == 0) status = check_ranges(chosen, &from);
  if (status == 0) {
    nyb_cache **layers = nyb_command_allocate(from.layers * (int64_t)sizeof(void *));
    status = convert_layers(context, chosen, &from, layers);
    for (int64_t i = 0; i < from.layers; i++) nyb_cache_destroy(layers[i]);
    free(layers);
  }
  close_saved(&from);
  nyb_progress_clear();
  return status == 0 ? show(context, chosen, chosen->output_path) : status;
}

/* ---- The subcommand ------------------------------------------------------------------------ */

int nyb_command_cache(int argc, char **argv) {
  static const struct argp_option options[] = {
      {.name = "bits",
       .key = 'b',
       .arg = "BITS",
       .doc = "convert: 2, 3, 4, 5, 6, 8, or plain for unquantized rows, of K and V"},
      {.name = "k-bits", .key = KEY_KEY_BITS, .arg = "BITS", .doc = "convert: the same of K"},
      {.name = "v-bits", .key = KEY_VALUE_BITS, .arg = "BITS", .doc = "convert: the same of V"},
      {.name = "group-size",
       .key = 'g',
       .arg = "SIZE",
       .doc = "convert: 32, 64 or 128 (the layer's own; 64 where it has none)"},
      {.name = "layers",
       .key = KEY_LAYERS,
       .arg = "A-B:BITS",
       .doc = "convert: these layers to widths of their own (0-3:8, 7:plain, 8-15:8:4 for K and "
              "V); repeatable, the last that names a layer counts"},
      {.name = "json", .key = 'j', .doc = "Print JSON"},
      {0},
  };
  static const struct argp argp = {
      .options = options,
      .parser = parse,
      .args_doc = "info FILE\nconvert IN OUT",
      .doc =
          "Saved caches, nybble's and mlx-lm's prompt caches. info shows what FILE holds; convert "
          "quantizes the cache IN, or changes its widths, layer by layer, and writes OUT, which "
          "it shows. Scales and plain rows keep the layer's dtype; a layer whose widths stay is "
          "copied bit by bit.",
  };
  settings chosen = {0};
  argp_parse(&argp, argc, argv, 0, NULL, &chosen);
  nyb_context *context;
  int status = nyb_command_open(NYB_ISA_AUTO, 0, &context);
  if (status != 0) return status;
  status = chosen.output_path == NULL ? show(context, &chosen, chosen.input_path)
                                      : convert(context, &chosen);
  nyb_context_destroy(context);
  return status;
}
