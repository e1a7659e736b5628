/* SPDX-License-Identifier: Apache-2.0 */
/* Saving caches: the file is written from where the rows lie, without a copy of them. Layers that
 * mlx-lm's classes can hold become those; the others a class of our own, which mlx-lm refuses. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cache_file.h"
#include "cuda/operations.h"
#include "io_safetensors.h"

enum { MAX_TENSORS = 32, MAX_NAMES = 16 }; /* of a layer, and of its metadata */

/* What a tensor of the file is made of: numbers, or the rows of a cache. */
typedef struct saved_tensor {
  nyb_file_name name;
  const void *numbers; /* NULL: rows */
  union {
    int64_t wide;
    int32_t narrow; /* as mlx-lm has it */
  } number;
  const nyb_cache *cache;
  nyb_cache_region region;
  int part, array;
} saved_tensor;

enum { NUMBERS_OF_SEQUENCE = NYB_CACHE_REGIONS + 1 }; /* ends, and what a window dropped */

typedef struct save_sizes {
  int64_t layers, sequences, metadata, key_bytes;
} save_sizes;

/* Where writing is in a tensor of rows. */
typedef struct row_cursor {
  int64_t sequence, head, token;
} row_cursor;

typedef struct saved_file {
  saved_tensor *items;
  nyb_safetensors_tensor *tensors; /* one for each item */
  int64_t count;
  nyb_safetensors_tensor *sorted; /* as they are written: sorted[i] is tensors[order[i]] */
  int32_t *order;
  nyb_metadata *metadata;
  nyb_file_name *names; /* its keys, where they are ours */
  int64_t metadata_count, name_count;
  char *keys;       /* the caller's keys, with our prefix */
  int64_t *numbers; /* of sequences, of the layers that need them, one behind the other */
  row_cursor at;
} saved_file;

/* ---- What a layer becomes ------------------------------------------------------------------- */

static bool alike(const nyb_cache *cache) {
  const nyb_cache_sequence first = nyb_cache_get_sequence(cache, 0);
  for (int64_t sequence = 1; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence other = nyb_cache_get_sequence(cache, sequence);
    if (other.held != first.held || other.dropped != first.dropped) return false;
  }
  return true;
}

/* The class of mlx-lm's that holds such a cache, or ours. mlx-lm has one offset for all sequences,
 * one format for K and V, and no quantized rotating cache; a rotating one that dropped tokens and
 * was trimmed below its window would grow there by a negative size. */
static const char *class_of(const nyb_cache *cache) {
  const nyb_format *key = &cache->part[NYB_KEY].format, *value = &cache->part[NYB_VALUE].format;
  const nyb_cache_sequence first = nyb_cache_get_sequence(cache, 0);
  const bool one_format = key->scheme == value->scheme && key->bits == value->bits &&
                          key->group_size == value->group_size && key->dtype == value->dtype;
  if (one_format && alike(cache)) {
    if (cache->kind == NYB_CACHE_CONTIGUOUS) {
      return key->scheme == NYB_PLAIN ? "KVCache" : "QuantizedKVCache";
    }
    if (cache->kind == NYB_CACHE_ROTATING && key->scheme == NYB_PLAIN &&
        (first.dropped == 0 || first.held >= cache->options.window_tokens)) {
      return "RotatingKVCache";
    }
  }
  return NYB_FILE_OWN_CLASS;
}

static const char *dtype_word(nyb_dtype dtype) {
  return dtype == NYB_F32 ? "F32" : dtype == NYB_F16 ? "F16" : "BF16";
}

static saved_tensor *add_item(saved_file *out, const nyb_file_name *name) {
  saved_tensor *item = &out->items[out->count];
  *item = (saved_tensor){.name = *name};
  out->tensors[out->count] = (nyb_safetensors_tensor){.name = item->name.text};
  out->count++;
  return item;
}

static void add_number(saved_file *out, const nyb_file_name *name, bool narrow, int64_t number) {
  saved_tensor *item = add_item(out, name);
  item->numbers = &item->number;
  if (narrow) {
    item->number.narrow = (int32_t)number;
  } else {
    item->number.wide = number;
  }
  nyb_safetensors_tensor *tensor = &out->tensors[out->count - 1];
  tensor->dtype = narrow ? "I32" : "I64";
  tensor->data_bytes = narrow ? 4 : 8;
}

/* mlx-lm finds by the metadata of number `scalar` that a tensor is a number. */
static void add_mlx_number(saved_file *out, int64_t *scalar, int64_t layer, int index,
                           int64_t number) {
  nyb_file_name name;
  snprintf(name.text, sizeof name.text, "%" PRId64 ".%d", layer, index);
  add_number(out, &name, true, number);
  const char *values[2] = {out->tensors[out->count - 1].name, "scalar"};
  for (int i = 0; i < 2; i++) {
    nyb_file_name *key = &out->names[out->name_count++];
    snprintf(key->text, sizeof key->text, "2.%" PRId64 ".%d", *scalar, i);
    out->metadata[out->metadata_count++] = (nyb_metadata){key->text, values[i]};
  }
  ++*scalar;
}

static void add_rows(saved_file *out, const nyb_cache *cache, nyb_cache_region region, int part,
                     int array, const nyb_file_name *name, const int64_t *axes,
                     int64_t axes_count) {
  const nyb_cache_part *from = &nyb_cache_parts_of(cache, region)[part];
  saved_tensor *item = add_item(out, name);
  item->cache = cache;
  item->region = region;
  item->part = part;
  item->array = array;
  const bool codes = array == NYB_CODES;
  nyb_safetensors_tensor *tensor = &out->tensors[out->count - 1];
  tensor->dtype = codes && from->layout.affine ? "U32" : dtype_word(from->format.dtype);
  tensor->rank = axes_count + 1;
  tensor->data_bytes = from->row_bytes[array];
  for (int64_t i = 0; i < axes_count; i++) {
    tensor->shape[i] = axes[i];
    tensor->data_bytes *= axes[i];
  }
  tensor->shape[axes_count] = codes ? from->layout.codes : from->layout.groups;
}

static void add_mlx_layer(saved_file *out, const nyb_cache *cache, int64_t layer, int64_t *scalar) {
  const bool affine = cache->part[NYB_KEY].layout.affine;
  const nyb_cache_sequence state = nyb_cache_get_sequence(cache, 0);
  const int64_t axes[3] = {cache->batch, cache->kv_heads, state.held};
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < (affine ? NYB_CACHE_ARRAYS : 1); array++) {
      nyb_file_name name;
      snprintf(name.text, sizeof name.text, affine ? "%" PRId64 ".%d.%d" : "%" PRId64 ".%d", layer,
               part, array);
      add_rows(out, cache, NYB_BODY, part, array, &name, axes, 3);
    }
  }
  const nyb_format *format = &cache->part[NYB_KEY].format;
  const int64_t quantized[] = {state.held, format->group_size, format->bits};
  const int64_t rotating[] = {state.dropped + state.held, cache->options.window_keep_tokens,
                              cache->options.window_tokens, state.held};
  const bool rotates = cache->kind == NYB_CACHE_ROTATING;
  const int count = rotates ? 4 : affine ? 3 : 1;
  for (int i = 0; i < count; i++) {
    add_mlx_number(out, scalar, layer, 2 + i, rotates ? rotating[i] : quantized[i]);
  }
}

static nyb_file_name own_name(int64_t layer, const char *field) {
  nyb_file_name name;
  snprintf(name.text, sizeof name.text, "%" PRId64 ".%s", layer, field);
  return name;
}

/* A number for each sequence; the caller fills them. */
static int64_t *add_sequence_numbers(saved_file *out, const nyb_cache *cache, int64_t layer,
                                     const char *field) {
  int64_t *numbers = out->numbers;
  out->numbers += cache->batch;
  const nyb_file_name name = own_name(layer, field);
  add_item(out, &name)->numbers = numbers;
  nyb_safetensors_tensor *tensor = &out->tensors[out->count - 1];
  tensor->dtype = "I64";
  tensor->rank = 1;
  tensor->shape[0] = cache->batch;
  tensor->data_bytes = cache->batch * (int64_t)sizeof *numbers;
  return numbers;
}

/* The rows of a region, and how many tokens of the sequences up to each are there. */
static void add_own_region(saved_file *out, const nyb_cache *cache, int64_t layer,
                           nyb_cache_region region, const char *ends_field,
                           const char *const fields[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS]) {
  int64_t *ends = add_sequence_numbers(out, cache, layer, ends_field);
  int64_t end = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(cache, sequence);
    const nyb_token_range range = nyb_file_region_range(&cache->options, region, &state);
    ends[sequence] = end += range.end - range.begin;
  }
  const int64_t rows = end * cache->kv_heads;
  const nyb_cache_part *parts = nyb_cache_parts_of(cache, region);
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      if (parts[part].row_bytes[array] == 0) continue;
      const nyb_file_name name = own_name(layer, fields[part][array]);
      add_rows(out, cache, region, part, array, &name, &rows, 1);
    }
  }
}

static void add_own_number(saved_file *out, int64_t layer, const char *field, int64_t number) {
  const nyb_file_name name = own_name(layer, field);
  add_number(out, &name, false, number);
}

/* What only its kind has: by these numbers a file says which it is. */
static void add_own_kind(saved_file *out, const nyb_cache *cache, int64_t layer) {
  static const char *const first[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS] = {{"first.key"},
                                                                       {"first.value"}};
  static const char *const last[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS] = {{"last.key"}, {"last.value"}};
  const nyb_cache_options *options = &cache->options;
  if (cache->kind == NYB_CACHE_ROTATING) {
    add_own_number(out, layer, "window_tokens", options->window_tokens);
    add_own_number(out, layer, "window_keep_tokens", options->window_keep_tokens);
    int64_t *dropped = add_sequence_numbers(out, cache, layer, "dropped");
    for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
      dropped[sequence] = nyb_cache_get_sequence(cache, sequence).dropped;
    }
  } else if (cache->kind == NYB_CACHE_PAGED) {
    add_own_number(out, layer, "page_tokens", options->page_tokens);
  } else if (cache->kind == NYB_CACHE_MIXED) {
    if (options->first_tokens > 0) {
      add_own_number(out, layer, "first_tokens", options->first_tokens);
      add_own_region(out, cache, layer, NYB_FIRST, "first.ends", first);
    }
    if (options->last_tokens > 0) {
      add_own_number(out, layer, "last_tokens", options->last_tokens);
      add_own_region(out, cache, layer, NYB_LAST, "last.ends", last);
    }
  }
}

static void add_own_layer(saved_file *out, const nyb_cache *cache, int64_t layer) {
  static const char *const body[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS] = {
      {"key.codes", "key.scales", "key.biases"}, {"value.codes", "value.scales", "value.biases"}};
  const nyb_format *key = &cache->part[NYB_KEY].format, *value = &cache->part[NYB_VALUE].format;
  const struct {
    const char *field;
    int64_t number;
  } numbers[] = {{"version", NYB_FILE_OWN_VERSION},      {"batch", cache->batch},
                 {"kv_heads", cache->kv_heads},          {"key.bits", key->bits},
                 {"key.group_size", key->group_size},    {"value.bits", value->bits},
                 {"value.group_size", value->group_size}};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    add_own_number(out, layer, numbers[i].field, numbers[i].number);
  }
  add_own_region(out, cache, layer, NYB_BODY, "ends", body);
  add_own_kind(out, cache, layer);
}

static void add_layers(saved_file *out, nyb_cache *const *layers, int64_t layer_count) {
  int64_t scalar = 1;
  out->metadata[out->metadata_count++] = (nyb_metadata){"2.0", ""}; /* mlx-lm's first scalar */
  for (int64_t layer = 0; layer < layer_count; layer++) {
    const nyb_cache *cache = layers[layer];
    const char *class_name = class_of(cache);
    nyb_file_name *key = &out->names[out->name_count++];
    snprintf(key->text, sizeof key->text, "1.%" PRId64, layer);
    out->metadata[out->metadata_count++] = (nyb_metadata){key->text, class_name};
    if (strcmp(class_name, NYB_FILE_OWN_CLASS) == 0) {
      add_own_layer(out, cache, layer);
    } else {
      add_mlx_layer(out, cache, layer, &scalar);
    }
  }
}

/* ---- The bytes of the tensors --------------------------------------------------------------- */

static int compare_widths(const void *items, int32_t left, int32_t right) {
  const nyb_safetensors_tensor *tensors = items;
  const char *words[2] = {tensors[left].dtype, tensors[right].dtype};
  const int64_t difference =
      nyb_safetensors_dtype_bytes(&words[1]) - nyb_safetensors_dtype_bytes(&words[0]);
  if (difference != 0) return difference < 0 ? -1 : 1;
  return left < right ? -1 : left > right;
}

/* Wider elements first, so that every tensor is aligned to its own. */
static void sort_tensors(saved_file *out) {
  nyb_sort_indices(out->order, out->count, compare_widths, out->tensors);
  for (int64_t i = 0; i < out->count; i++) out->sorted[i] = out->tensors[out->order[i]];
}

/* The rows of one sequence and head after the other; writing takes each piece whole. */
static int64_t next_rows(row_cursor *at, const saved_tensor *item, const char **piece) {
  const nyb_cache *cache = item->cache;
  for (;;) {
    const nyb_cache_sequence state = nyb_cache_get_sequence(cache, at->sequence);
    const nyb_token_range range = nyb_file_region_range(&cache->options, item->region, &state);
    if (range.begin + at->token < range.end) {
      const nyb_cache_rows rows =
          nyb_cache_rows_at(cache, item->part, at->sequence, at->head, range.begin + at->token,
                            range.end - range.begin - at->token);
      at->token += rows.tokens;
      *piece = rows.array[item->array];
      return rows.tokens * rows.part->row_bytes[item->array];
    }
    at->token = 0;
    if (++at->head < cache->kv_heads) continue;
    at->head = 0;
    at->sequence++;
  }
}

static int64_t next_piece(void *data, int64_t tensor, int64_t offset, const char **piece) {
  saved_file *out = data;
  const saved_tensor *item = &out->items[out->order[tensor]];
  if (offset == 0) out->at = (row_cursor){0};
  if (item->numbers == NULL) return next_rows(&out->at, item, piece);
  *piece = item->numbers;
  return out->sorted[tensor].data_bytes;
}

/* ---- Memory --------------------------------------------------------------------------------- */

/* Arrays in one block: measured (block NULL), then placed by the same code. */
typedef struct arena {
  char *block;
  size_t bytes;
} arena;

static void *take(arena *from, int64_t count, size_t item_bytes) {
  void *place = from->block == NULL ? NULL : from->block + from->bytes;
  from->bytes += ((size_t)count * item_bytes + 15) / 16 * 16;
  return place;
}

static void place_arrays(arena *from, saved_file *out, const save_sizes *sizes) {
  const int64_t tensors = sizes->layers * MAX_TENSORS;
  out->items = take(from, tensors, sizeof *out->items);
  out->tensors = take(from, tensors, sizeof *out->tensors);
  out->sorted = take(from, tensors, sizeof *out->sorted);
  out->order = take(from, tensors, sizeof *out->order);
  out->names = take(from, sizes->layers * MAX_NAMES, sizeof *out->names);
  out->metadata =
      take(from, 1 + sizes->layers * MAX_NAMES + sizes->metadata, sizeof *out->metadata);
  out->numbers = take(from, sizes->sequences * NUMBERS_OF_SEQUENCE, sizeof *out->numbers);
  out->keys = take(from, sizes->key_bytes, 1);
}

/* ---- Checks --------------------------------------------------------------------------------- */

static nyb_status check_layers(nyb_cache *const *layers, int64_t count, nyb_stream stream,
                               save_sizes *sizes) {
  if (layers == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "layers is NULL; it must point to layer_count caches");
  }
  if (count < 1 || count > NYB_FILE_MAX_LAYERS) {
    return nyb_fail(NYB_ERROR_VALUE, "layer_count is %" PRId64 "; it must be 1 to %d", count,
                    NYB_FILE_MAX_LAYERS);
  }
  for (int64_t i = 0; i < count; i++) {
    if (layers[i] == NULL) {
      return nyb_fail(NYB_ERROR_NULL, "layers[%" PRId64 "] is NULL; nyb_cache_create makes one", i);
    }
    const nyb_status status = nyb_check_stream(layers[i]->context, stream);
    if (status != NYB_OK) return status;
    sizes->sequences += layers[i]->batch;
  }
  sizes->layers = count;
  return NYB_OK;
}

static nyb_status check_filled(nyb_cache *const *layers, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (nyb_cache_longest(layers[i]) > 0) continue;
    return nyb_fail(NYB_ERROR_LENGTH,
                    "layers[%" PRId64 "] is empty; a saved cache holds at least one token", i);
  }
  return NYB_OK;
}

static nyb_status check_metadata(const nyb_metadata *metadata, int64_t count, save_sizes *sizes) {
  if (count < 0 || count > NYB_SAFETENSORS_MAX_HEADER_BYTES) {
    return nyb_fail(NYB_ERROR_VALUE, "metadata_count is %" PRId64 "; it must be 0 to %d", count,
                    NYB_SAFETENSORS_MAX_HEADER_BYTES);
  }
  if (metadata == NULL && count > 0) {
    return nyb_fail(NYB_ERROR_NULL, "metadata is NULL, but metadata_count is %" PRId64, count);
  }
  for (int64_t i = 0; i < count; i++) {
    const char *key = metadata[i].key;
    if (key == NULL) {
      return nyb_fail(NYB_ERROR_NULL, "metadata[%" PRId64 "].key is NULL; it must be a string", i);
    }
    if (key[0] == '\0') {
      return nyb_fail(NYB_ERROR_VALUE, "metadata[%" PRId64 "].key is \"\"; a key has a letter", i);
    }
    sizes->key_bytes += (int64_t)strlen(key) + 3;
  }
  sizes->metadata = count;
  return NYB_OK;
}

/* ---- The call ------------------------------------------------------------------------------- */

static void add_metadata(saved_file *out, const nyb_metadata *metadata, int64_t count) {
  char *key = out->keys;
  for (int64_t i = 0; i < count; i++) {
    const size_t bytes = strlen(metadata[i].key) + 1;
    memcpy(key, "0.", 2);
    memcpy(key + 2, metadata[i].key, bytes);
    out->metadata[out->metadata_count++] = (nyb_metadata){key, metadata[i].value};
    key += bytes + 2;
  }
}

/* Layers of the host, all of which hold something. */
static nyb_status save_here(nyb_context *context, const char *path, nyb_cache *const *layers,
                            const save_sizes *sizes, const nyb_metadata *metadata) {
  nyb_status status = check_filled(layers, sizes->layers);
  if (status != NYB_OK) return status;
  saved_file out = {0};
  arena memory = {0};
  place_arrays(&memory, &out, sizes);
  const size_t bytes = memory.bytes;
  memory = (arena){.block = nyb_allocate(context, bytes, NYB_SAFETENSORS_ALIGNMENT)};
  if (memory.block == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes to describe %" PRId64 " layers", bytes,
                    sizes->layers);
  }
  place_arrays(&memory, &out, sizes);
  add_metadata(&out, metadata, sizes->metadata);
  add_layers(&out, layers, sizes->layers);
  sort_tensors(&out);
  const nyb_pieces pieces = {.next = next_piece, .data = &out};
  status = nyb_safetensors_write_pieces(context, path, out.sorted, out.count, out.metadata,
                                        out.metadata_count, &pieces);
  nyb_release(context, memory.block);
  return status;
}

/* Layers some of which are in device memory, by copies of those: staged[i] is the layer, or its
 * copy. */
static nyb_status save_staged(nyb_context *context, nyb_context *host, const char *path,
                              nyb_cache *const *layers, nyb_cache **staged, const save_sizes *sizes,
                              const nyb_metadata *metadata, nyb_stream stream) {
  nyb_status status = NYB_OK;
  int64_t count = 0;
  for (; count < sizes->layers && status == NYB_OK; count++) {
    staged[count] = layers[count];
    if (!nyb_on_cuda(layers[count]->context)) continue;
    staged[count] = NULL;
    status = nyb_cuda_cache_fetch(host, layers[count], &staged[count], stream);
  }
  if (status == NYB_OK) status = save_here(context, path, staged, sizes, metadata);
  while (count-- > 0) {
    if (staged[count] != layers[count]) nyb_cache_destroy(staged[count]);
  }
  return status;
}

static nyb_status save_from_cuda(nyb_context *context, const char *path, nyb_cache *const *layers,
                                 const save_sizes *sizes, const nyb_metadata *metadata,
                                 nyb_stream stream) {
  nyb_context *host;
  nyb_status status = nyb_cache_make_host_context(context, &host);
  if (status != NYB_OK) return status;
  const size_t bytes = (size_t)sizes->layers * sizeof(nyb_cache *);
  nyb_cache **staged = nyb_allocate(context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (staged == NULL) {
    status = nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                      "the allocator had no %zu bytes for copies of %" PRId64 " layers", bytes,
                      sizes->layers);
  } else {
    status = save_staged(context, host, path, layers, staged, sizes, metadata, stream);
    nyb_release(context, staged);
  }
  nyb_context_destroy(host);
  return status;
}

nyb_status nyb_cache_save(nyb_context *context, const char *path, nyb_cache *const *layers,
                          int64_t layer_count, const nyb_metadata *metadata, int64_t metadata_count,
                          nyb_stream stream) {
  if (context == NULL || path == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; context and path must be set",
                    context == NULL ? "context" : "path");
  }
  save_sizes sizes = {0};
  nyb_status status = check_layers(layers, layer_count, stream, &sizes);
  if (status == NYB_OK) status = check_metadata(metadata, metadata_count, &sizes);
  if (status != NYB_OK) return status;
  for (int64_t i = 0; i < layer_count; i++) {
    if (!nyb_on_cuda(layers[i]->context)) continue;
    return save_from_cuda(context, path, layers, &sizes, metadata, stream);
  }
  return save_here(context, path, layers, &sizes, metadata);
}
