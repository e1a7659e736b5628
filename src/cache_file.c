/* SPDX-License-Identifier: Apache-2.0 */
/* Saved caches: what a file says of its layers. Files of mlx-lm come in two layouts: since 0.32
 * numbers are tensors without axes and the user's metadata comes first, before that numbers were
 * metadata of the layer, which came first. */
#include "cache_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io_safetensors.h"

#define MAX_FIELDS 6 /* of a layer's state */

/* The file as it is read, one layer at a time. */
typedef struct file_reader {
  const nyb_safetensors *file;
  bool current; /* mlx-lm's layout since 0.32 */
  int64_t layer;
  const char *class_name;
  int64_t tensors; /* of the layer, so far */
} file_reader;

static const char *const part_words[NYB_CACHE_PARTS] = {"keys", "values"};

/* ---- The file as a whole ------------------------------------------------------------------- */

static nyb_status begin(const nyb_safetensors *file, file_reader *reader) {
  *reader = (file_reader){.file = file};
  if (file == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "file is NULL; nyb_safetensors_open opens one");
  }
  nyb_metadata first;
  if (!nyb_safetensors_find_metadata(file, "2.0", &first)) {
    return nyb_fail(
        NYB_ERROR_FILE_FORMAT,
        "the file is no saved cache: it has no metadata \"2.0\", which every cache that "
        "mlx-lm or nybble saved has");
  }
  reader->current = first.value[0] == '\0';
  return NYB_OK;
}

static const char *classes_prefix(const file_reader *reader) {
  return reader->current ? "1." : "2.";
}

static nyb_file_name class_key(const file_reader *reader, int64_t layer) {
  nyb_file_name name;
  snprintf(name.text, sizeof name.text, "%s%" PRId64, classes_prefix(reader), layer);
  return name;
}

static nyb_file_name layer_prefix(int64_t layer) {
  nyb_file_name name;
  snprintf(name.text, sizeof name.text, "%" PRId64 ".", layer);
  return name;
}

static nyb_status count_layers(const file_reader *reader, int64_t *count) {
  const nyb_safetensors *file = reader->file;
  *count = nyb_safetensors_count_metadata(file, classes_prefix(reader));
  if (*count < 1 || *count > NYB_FILE_MAX_LAYERS) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "the file names the classes of %" PRId64 " layers; it must be 1 to %d", *count,
                    NYB_FILE_MAX_LAYERS);
  }
  int64_t tensors = 0;
  for (int64_t layer = 0; layer < *count; layer++) {
    nyb_metadata class_name;
    const nyb_file_name key = class_key(reader, layer);
    if (!nyb_safetensors_find_metadata(file, key.text, &class_name)) {
      return nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "the file names %" PRId64 " layers, but none is number %" PRId64
                      " (metadata \"%s\"): they must be numbered from 0 without gaps",
                      *count, layer, key.text);
    }
    tensors += nyb_safetensors_count_tensors(file, layer_prefix(layer).text);
  }
  if (tensors != nyb_safetensors_count(file)) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "the file has %" PRId64 " tensors, of which its %" PRId64
                    " layers have %" PRId64 "; the others belong to no layer",
                    nyb_safetensors_count(file), *count, tensors);
  }
  return NYB_OK;
}

nyb_status nyb_cache_file_layers(const nyb_safetensors *file, int64_t *layer_count) {
  if (layer_count == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "layer_count is NULL; it must point to an int64_t");
  }
  file_reader reader;
  int64_t count = 0;
  nyb_status status = begin(file, &reader);
  if (status == NYB_OK) status = count_layers(&reader, &count);
  if (status == NYB_OK) *layer_count = count;
  return status;
}

/* ---- Numbers ------------------------------------------------------------------------------- */

/* A whole number in digits, perhaps with a sign. */
static bool parse_number(const char *text, int64_t *number) {
  const bool negative = *text == '-';
  const char *digit = text + (negative ? 1 : 0);
  int64_t value = 0;
  if (*digit == '\0') return false;
  for (; *digit != '\0'; digit++) {
    if (*digit < '0' || *digit > '9' || value > (INT64_MAX - 9) / 10) return false;
    value = value * 10 + (*digit - '0');
  }
  *number = negative ? -value : value;
  return true;
}

/* The number in a tensor without axes; false where there is none. */
static bool find_scalar(file_reader *reader, const char *name, int64_t *number) {
  nyb_safetensors_tensor tensor;
  if (nyb_safetensors_find(reader->file, name, &tensor) != NYB_OK || tensor.rank != 0) return false;
  if (strcmp(tensor.dtype, "I64") == 0) {
    memcpy(number, tensor.data, sizeof *number);
  } else if (strcmp(tensor.dtype, "I32") == 0) {
    int32_t narrow;
    memcpy(&narrow, tensor.data, sizeof narrow);
    *number = narrow;
  } else {
    return false;
  }
  reader->tensors++;
  return true;
}

/* A number of mlx-lm's state: in today's files the tensor "layer.index", in older ones the metadata
 * "0.layer.from_end" counted from the last one, as the oldest have one more in front. */
static nyb_status read_number(file_reader *reader, int index, int64_t from_end, const char *what,
                              int64_t *number) {
  nyb_file_name name;
  bool found;
  if (reader->current) {
    snprintf(name.text, sizeof name.text, "%" PRId64 ".%d", reader->layer, index);
    found = find_scalar(reader, name.text, number);
  } else {
    snprintf(name.text, sizeof name.text, "0.%" PRId64 ".", reader->layer);
    const int64_t count = nyb_safetensors_count_metadata(reader->file, name.text);
    snprintf(name.text, sizeof name.text, "0.%" PRId64 ".%" PRId64, reader->layer,
             count - 1 - from_end);
    nyb_metadata item;
    found = nyb_safetensors_find_metadata(reader->file, name.text, &item) &&
            parse_number(item.value, number);
  }
  if (found) return NYB_OK;
  return nyb_fail(NYB_ERROR_FILE_FORMAT, "layer %" PRId64 ": its %s, %s \"%s\", %s", reader->layer,
                  what, reader->current ? "the tensor" : "the metadata", name.text,
                  reader->current ? "must be there, a whole number (I32 or I64) without axes"
                                  : "must be there, a whole number in digits");
}

/* ---- Tensors of rows ----------------------------------------------------------------------- */

typedef struct shape_text {
  char text[200];
} shape_text;

static shape_text show_shape(int64_t rank, const int64_t *shape) {
  shape_text shown = {"["};
  size_t used = 1;
  for (int64_t i = 0; i < rank; i++) {
    used += (size_t)snprintf(shown.text + used, sizeof shown.text - used, "%s%" PRId64,
                             i == 0 ? "" : ", ", shape[i]);
  }
  snprintf(shown.text + used, sizeof shown.text - used, "]");
  return shown;
}

/* The axes before the last, which all tensors of a layer share; the first one sets them. */
typedef struct leading_axes {
  int64_t rank;
  int64_t shape[3];
  bool known;
} leading_axes;

static nyb_status find_rows(file_reader *reader, const char *name, const char *what,
                            leading_axes *leading, nyb_safetensors_tensor *tensor) {
  if (nyb_safetensors_find(reader->file, name, tensor) != NYB_OK) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "layer %" PRId64 ": the file has no tensor \"%s\" (%s)",
                    reader->layer, name, what);
  }
  reader->tensors++;
  const shape_text shown = show_shape(tensor->rank, tensor->shape);
  if (tensor->rank != leading->rank + 1 || tensor->shape[tensor->rank - 1] < 1) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64
                    ": the tensor \"%s\" (%s) has the shape %s; it must have "
                    "%" PRId64 " axes, the last not empty",
                    reader->layer, name, what, shown.text, leading->rank + 1);
  }
  if (!leading->known) memcpy(leading->shape, tensor->shape, sizeof leading->shape);
  leading->known = true;
  for (int64_t i = 0; i < leading->rank; i++) {
    if (tensor->shape[i] == leading->shape[i]) continue;
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64
                    ": the tensor \"%s\" (%s) has the shape %s; it must begin "
                    "with %s",
                    reader->layer, name, what, shown.text,
                    show_shape(leading->rank, leading->shape).text);
  }
  return NYB_OK;
}

static nyb_status read_dtype(const file_reader *reader, const nyb_safetensors_tensor *tensor,
                             nyb_dtype *dtype) {
  static const struct {
    const char *word;
    nyb_dtype dtype;
  } words[] = {{"F32", NYB_F32}, {"F16", NYB_F16}, {"BF16", NYB_BF16}};
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    if (strcmp(tensor->dtype, words[i].word) != 0) continue;
    *dtype = words[i].dtype;
    return NYB_OK;
  }
  return nyb_fail(NYB_ERROR_FILE_FORMAT,
                  "layer %" PRId64 ": the tensor \"%s\" is %s; it must be F32, F16 or BF16",
                  reader->layer, tensor->name, tensor->dtype);
}

/* What is read for K and for V. */
typedef struct part_names {
  nyb_file_name array[NYB_CACHE_ARRAYS];
} part_names;

static nyb_status check_format(const file_reader *reader, int part, const nyb_format *format,
                               int64_t dim) {
  /* Values within int32_t are judged by the library's own check, whose sentence has no layer. */
  if (nyb_format_check(format, "format", dim, "dim", NULL) == NYB_OK) return NYB_OK;
  return nyb_fail(NYB_ERROR_FILE_FORMAT,
                  "layer %" PRId64 ": %s of %" PRId64
                  " elements at %d bits in groups of %d are no "
                  "format that nybble has",
                  reader->layer, part_words[part], dim, (int)format->bits, (int)format->group_size);
}

/* What a region's rows of K or of V are. */
typedef struct row_format {
  nyb_format format;
  int64_t dim;
} row_format;

static nyb_status read_plain(file_reader *reader, int part, const part_names *names,
                             leading_axes *leading, nyb_file_region *region, row_format *found) {
  nyb_safetensors_tensor tensor;
  nyb_status status =
      find_rows(reader, names->array[NYB_CODES].text, part_words[part], leading, &tensor);
  if (status != NYB_OK) return status;
  *found = (row_format){.format.scheme = NYB_PLAIN, .dim = tensor.shape[tensor.rank - 1]};
  status = read_dtype(reader, &tensor, &found->format.dtype);
  if (status != NYB_OK) return status;
  region->array[part][NYB_CODES] = tensor.data;
  region->row_bytes[part][NYB_CODES] = found->dim * (int64_t)nyb_dtype_bytes(found->format.dtype);
  return check_format(reader, part, &found->format, found->dim);
}

static nyb_status read_affine(file_reader *reader, int part, const part_names *names, int64_t bits,
                              int64_t group_size, leading_axes *leading, nyb_file_region *region,
                              row_format *found) {
  static const char *const array_words[NYB_CACHE_ARRAYS] = {"codes", "scales", "biases"};
  nyb_safetensors_tensor tensor[NYB_CACHE_ARRAYS];
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    char what[32];
    snprintf(what, sizeof what, "%s of the %s", array_words[array], part_words[part]);
    const nyb_status status =
        find_rows(reader, names->array[array].text, what, leading, &tensor[array]);
    if (status != NYB_OK) return status;
  }
  if (strcmp(tensor[NYB_CODES].dtype, "U32") != 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": the tensor \"%s\" is %s; codes must be U32", reader->layer,
                    tensor[NYB_CODES].name, tensor[NYB_CODES].dtype);
  }
  nyb_format format = {.scheme = NYB_AFFINE};
  const nyb_status status = read_dtype(reader, &tensor[NYB_SCALES], &format.dtype);
  if (status != NYB_OK) return status;
  const int64_t words = tensor[NYB_CODES].shape[leading->rank];
  const int64_t groups = tensor[NYB_SCALES].shape[leading->rank];
  if (tensor[NYB_BIASES].shape[leading->rank] != groups ||
      strcmp(tensor[NYB_BIASES].dtype, tensor[NYB_SCALES].dtype) != 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": biases of the %s are %s of %" PRId64
                    " a row, scales are %s of %" PRId64 "; they must be alike",
                    reader->layer, part_words[part], tensor[NYB_BIASES].dtype,
                    tensor[NYB_BIASES].shape[leading->rank], tensor[NYB_SCALES].dtype, groups);
  }
  int64_t dim, code_bits, word_bits;
  if (bits < 1 || bits > 32 || group_size < 1 || group_size > INT32_MAX ||
      __builtin_mul_overflow(groups, group_size, &dim) ||
      __builtin_mul_overflow(dim, bits, &code_bits) ||
      __builtin_mul_overflow(words, 32, &word_bits) || code_bits != word_bits) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": a row of the %s has %" PRId64 " words of codes and %" PRId64
                    " scales, which do not fit %" PRId64 " bits in groups of %" PRId64,
                    reader->layer, part_words[part], words, groups, bits, group_size);
  }
  format.bits = (int32_t)bits;
  format.group_size = (int32_t)group_size;
  *found = (row_format){format, dim};
  const int64_t scales_bytes = groups * (int64_t)nyb_dtype_bytes(format.dtype);
  const int64_t row_bytes[NYB_CACHE_ARRAYS] = {words * 4, scales_bytes, scales_bytes};
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    region->array[part][array] = tensor[array].data;
    region->row_bytes[part][array] = row_bytes[array];
  }
  return check_format(reader, part, &format, dim);
}

static void set_format(nyb_file_layer *read, int part, const row_format *found) {
  *(part == NYB_KEY ? &read->options.key_format : &read->options.value_format) = found->format;
  *(part == NYB_KEY ? &read->options.key_dim : &read->options.value_dim) = found->dim;
}

/* ---- mlx-lm's classes ----------------------------------------------------------------------- */

/* What follows from tensors [batch, kv_heads, rows, ...]. */
static nyb_status take_planes(const file_reader *reader, const leading_axes *leading,
                              nyb_file_layer *read) {
  if (leading->shape[2] == 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "layer %" PRId64 ": its tensors hold no tokens",
                    reader->layer);
  }
  read->options.batch = leading->shape[0];
  read->options.kv_heads = leading->shape[1];
  read->region[NYB_BODY].plane_rows = leading->shape[2];
  return NYB_OK;
}

/* The first `offset` rows count. Today's files hold the rows that memory had room for, older ones
 * those that count. */
static nyb_status take_offset(const file_reader *reader, int64_t offset, nyb_file_layer *read) {
  const int64_t rows = read->region[NYB_BODY].plane_rows;
  read->tokens = offset;
  if (offset >= 0 && (offset == rows || (offset < rows && reader->current))) return NYB_OK;
  return nyb_fail(NYB_ERROR_FILE_FORMAT,
                  "layer %" PRId64 ": its offset is %" PRId64 ", but its tensors hold %" PRId64
                  " tokens",
                  reader->layer, offset, rows);
}

static nyb_status read_quantized(file_reader *reader, nyb_file_layer *read) {
  int64_t offset = 0, group_size = 0, bits = 0;
  nyb_status status = read_number(reader, 2, 2, "offset", &offset);
  if (status == NYB_OK) status = read_number(reader, 3, 1, "group size", &group_size);
  if (status == NYB_OK) status = read_number(reader, 4, 0, "bits", &bits);
  leading_axes leading = {.rank = 3};
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    part_names names;
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      snprintf(names.array[array].text, sizeof names.array[array].text, "%" PRId64 ".%d.%d",
               reader->layer, part, array);
    }
    row_format found = {.dim = 0};
    status = read_affine(reader, part, &names, bits, group_size, &leading, &read->region[NYB_BODY],
                         &found);
    set_format(read, part, &found);
  }
  if (status == NYB_OK) status = take_planes(reader, &leading, read);
  return status == NYB_OK ? take_offset(reader, offset, read) : status;
}

static nyb_status read_plain_parts(file_reader *reader, nyb_file_layer *read) {
  leading_axes leading = {.rank = 3};
  nyb_status status = NYB_OK;
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    part_names names;
    snprintf(names.array[NYB_CODES].text, sizeof names.array[NYB_CODES].text, "%" PRId64 ".%d",
             reader->layer, part);
    row_format found = {.dim = 0};
    status = read_plain(reader, part, &names, &leading, &read->region[NYB_BODY], &found);
    set_format(read, part, &found);
  }
  return status == NYB_OK ? take_planes(reader, &leading, read) : status;
}

static nyb_status read_kv(file_reader *reader, nyb_file_layer *read) {
  nyb_status status = read_plain_parts(reader, read);
  int64_t offset = read->region[NYB_BODY].plane_rows; /* older files do not say it */
  if (status == NYB_OK && reader->current) status = read_number(reader, 2, 0, "offset", &offset);
  return status == NYB_OK ? take_offset(reader, offset, read) : status;
}

/* A rotating cache's rows begin at the oldest one (its index is their end: what was dropped is
 * offset - index), or it is full and has begun anew behind the first ones. */
static nyb_status take_ring(const file_reader *reader, int64_t offset, int64_t index,
                            nyb_file_layer *read) {
  const int64_t rows = read->region[NYB_BODY].plane_rows;
  const int64_t keep = read->options.window_keep_tokens, most = read->options.window_tokens;
  if (index >= 0 && index == offset && index <= rows) {
    read->tokens = offset;
  } else if (index == rows && offset > rows && offset <= INT32_MAX && rows > keep) {
    read->tokens = rows;
    read->dropped_tokens = offset - rows;
  } else if (rows == most && index > keep && index < rows && offset >= rows &&
             offset <= INT32_MAX) {
    read->tokens = rows;
    read->dropped_tokens = offset - rows;
    read->turn = index - keep;
  } else {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": a rotating cache of at most %" PRId64 " tokens, %" PRId64
                    " of them kept, has %" PRId64 " rows, the offset %" PRId64
                    " and the index %" PRId64 ", which contradict each other",
                    reader->layer, most, keep, rows, offset, index);
  }
  return NYB_OK;
}

static nyb_status read_rotating(file_reader *reader, nyb_file_layer *read) {
  nyb_cache_options *options = &read->options;
  int64_t offset = 0, index = 0, from_end = 3;
  if (!reader->current) { /* the oldest have another number between max_size and offset */
    nyb_file_name prefix;
    snprintf(prefix.text, sizeof prefix.text, "0.%" PRId64 ".", reader->layer);
    from_end = nyb_safetensors_count_metadata(reader->file, prefix.text) - 1;
  }
  nyb_status status = read_plain_parts(reader, read);
  if (status == NYB_OK) status = read_number(reader, 2, 1, "offset", &offset);
  if (status == NYB_OK) {
    status = read_number(reader, 3, from_end, "keep", &options->window_keep_tokens);
  }
  if (status == NYB_OK) {
    status = read_number(reader, 4, from_end - 1, "max_size", &options->window_tokens);
  }
  if (status == NYB_OK) status = read_number(reader, 5, 0, "index", &index);
  if (status != NYB_OK) return status;
  if (options->window_tokens < 1 || options->window_tokens > INT32_MAX ||
      options->window_keep_tokens < 0 || options->window_keep_tokens >= options->window_tokens) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": a rotating cache of at most %" PRId64
                    " tokens cannot keep "
                    "its %" PRId64 " first ones",
                    reader->layer, options->window_tokens, options->window_keep_tokens);
  }
  return take_ring(reader, offset, index, read);
}

/* ---- Our own class -------------------------------------------------------------------------- */

static nyb_file_name own_name(const file_reader *reader, const char *field) {
  nyb_file_name name;
  snprintf(name.text, sizeof name.text, "%" PRId64 ".%s", reader->layer, field);
  return name;
}

static nyb_status read_own_number(file_reader *reader, const char *field, int64_t least,
                                  int64_t most, int64_t *number) {
  const nyb_file_name name = own_name(reader, field);
  if (!find_scalar(reader, name.text, number)) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64
                    ": the tensor \"%s\" must be there, a whole number (I64) "
                    "without axes",
                    reader->layer, name.text);
  }
  if (*number >= least && *number <= most) return NYB_OK;
  return nyb_fail(NYB_ERROR_FILE_FORMAT,
                  "layer %" PRId64 ": %s is %" PRId64 "; it must be %" PRId64 " to %" PRId64,
                  reader->layer, field, *number, least, most);
}

static int64_t number_at(const char *numbers, int64_t index) {
  int64_t number;
  memcpy(&number, numbers + index * (int64_t)sizeof number, sizeof number);
  return number;
}

/* int64 [batch]. */
static nyb_status read_own_numbers(file_reader *reader, const char *field, int64_t batch,
                                   const char **numbers) {
  const nyb_file_name name = own_name(reader, field);
  nyb_safetensors_tensor tensor;
  if (nyb_safetensors_find(reader->file, name.text, &tensor) != NYB_OK ||
      strcmp(tensor.dtype, "I64") != 0 || tensor.rank != 1 || tensor.shape[0] != batch) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": the tensor \"%s\" must be there, %" PRId64 " numbers (I64)",
                    reader->layer, name.text, batch);
  }
  reader->tensors++;
  *numbers = tensor.data;
  return NYB_OK;
}

/* How many tokens the sequences have in a region, and with them how many rows. */
static nyb_status read_ends(file_reader *reader, const char *field, const nyb_file_layer *read,
                            nyb_file_region *region, int64_t *rows) {
  const int64_t batch = read->options.batch, kv_heads = read->options.kv_heads;
  nyb_status status = read_own_numbers(reader, field, batch, &region->ends);
  int64_t begin = 0;
  for (int64_t sequence = 0; sequence < batch && status == NYB_OK; sequence++) {
    const int64_t end = number_at(region->ends, sequence);
    if (end < begin || end - begin > INT32_MAX) {
      status = nyb_fail(NYB_ERROR_FILE_FORMAT,
                        "layer %" PRId64 ": %s: sequence %" PRId64 " ends at %" PRId64
                        " tokens after one that ends at %" PRId64,
                        reader->layer, field, sequence, end, begin);
    }
    begin = end;
  }
  if (status == NYB_OK && __builtin_mul_overflow(begin, kv_heads, rows)) {
    status = nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "layer %" PRId64 ": %s: %" PRId64 " tokens of %" PRId64
                      " KV heads are more than 2^63-1 rows",
                      reader->layer, field, begin, kv_heads);
  }
  return status;
}

static const char *const own_parts[NYB_CACHE_PARTS] = {"key", "value"};

static nyb_status read_own_body(file_reader *reader, nyb_file_layer *read) {
  static const char *const arrays[NYB_CACHE_ARRAYS] = {"codes", "scales", "biases"};
  nyb_file_region *body = &read->region[NYB_BODY];
  leading_axes leading = {.rank = 1, .known = true};
  nyb_status status = read_ends(reader, "ends", read, body, &leading.shape[0]);
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    char field[32];
    int64_t bits = 0, group_size = 0;
    snprintf(field, sizeof field, "%s.bits", own_parts[part]);
    status = read_own_number(reader, field, 0, 32, &bits);
    snprintf(field, sizeof field, "%s.group_size", own_parts[part]);
    if (status == NYB_OK) status = read_own_number(reader, field, 0, INT32_MAX, &group_size);
    if (status != NYB_OK) return status;
    part_names names;
    for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
      snprintf(field, sizeof field, "%s.%s", own_parts[part], arrays[array]);
      names.array[array] = own_name(reader, field);
    }
    row_format found = {.dim = 0};
    status = bits == 0
                 ? read_plain(reader, part, &names, &leading, body, &found)
                 : read_affine(reader, part, &names, bits, group_size, &leading, body, &found);
    set_format(read, part, &found);
  }
  return status;
}

/* The unquantized rows beside the body, which are all of one dtype. */
static nyb_status read_own_region(file_reader *reader, const char *word, nyb_file_region *region,
                                  nyb_file_layer *read) {
  char field[32];
  leading_axes leading = {.rank = 1, .known = true};
  snprintf(field, sizeof field, "%s.ends", word);
  nyb_status status = read_ends(reader, field, read, region, &leading.shape[0]);
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    part_names names;
    snprintf(field, sizeof field, "%s.%s", word, own_parts[part]);
    names.array[NYB_CODES] = own_name(reader, field);
    row_format found = {.dim = 0};
    status = read_plain(reader, part, &names, &leading, region, &found);
    const int64_t dim = part == NYB_KEY ? read->options.key_dim : read->options.value_dim;
    if (status == NYB_OK && read->options.part_dtype == 0) {
      read->options.part_dtype = found.format.dtype;
    }
    if (status != NYB_OK || (found.dim == dim && found.format.dtype == read->options.part_dtype)) {
      continue;
    }
    status = nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "layer %" PRId64 ": the tensor \"%s\" has %" PRId64
                      " elements a row; it must have %" PRId64
                      ", and the dtype of the other unquantized rows",
                      reader->layer, names.array[NYB_CODES].text, found.dim, dim);
  }
  return status;
}

static int64_t tokens_in(const nyb_file_region *region, int64_t sequence) {
  if (region->ends == NULL) return 0;
  return number_at(region->ends, sequence) -
         (sequence == 0 ? 0 : number_at(region->ends, sequence - 1));
}

/* What a kind cannot hold, of any sequence. */
static nyb_status check_own_sequences(const file_reader *reader, const nyb_file_layer *read) {
  const nyb_cache_options *options = &read->options;
  int64_t all = 0;
  for (int64_t i = 0; i < options->batch; i++) {
    const nyb_cache_sequence state = nyb_file_sequence_at(read, i);
    const int64_t first = tokens_in(&read->region[NYB_FIRST], i);
    const int64_t last = tokens_in(&read->region[NYB_LAST], i);
    bool good = state.dropped >= 0 && state.dropped <= INT32_MAX - state.held;
    if (state.dropped > 0) good &= nyb_cache_ring_may_hold(options, state.held);
    good &= first == nyb_smaller(state.held, options->first_tokens) && last <= options->last_tokens;
    if (!good) {
      return nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "layer %" PRId64 ": sequence %" PRId64 " cannot hold %" PRId64
                      " tokens after %" PRId64 " that were dropped, the first %" PRId64
                      " and the last %" PRId64 " unquantized",
                      reader->layer, i, state.held, state.dropped, first, last);
    }
    all += state.held;
  }
  if (all > 0) return NYB_OK;
  return nyb_fail(NYB_ERROR_FILE_FORMAT, "layer %" PRId64 ": its sequences hold no tokens",
                  reader->layer);
}

static bool has(const file_reader *reader, const char *field) {
  nyb_safetensors_tensor unused;
  return nyb_safetensors_find(reader->file, own_name(reader, field).text, &unused) == NYB_OK;
}

/* The kind, by the numbers that only it has. */
static nyb_status read_own_kind(file_reader *reader, nyb_file_layer *read) {
  nyb_cache_options *options = &read->options;
  nyb_status status = NYB_OK;
  if (has(reader, "window_tokens")) {
    status = read_own_number(reader, "window_tokens", 1, INT32_MAX, &options->window_tokens);
    if (status == NYB_OK) {
      status = read_own_number(reader, "window_keep_tokens", 0, options->window_tokens - 1,
                               &options->window_keep_tokens);
    }
    if (status == NYB_OK) {
      status = read_own_numbers(reader, "dropped", options->batch, &read->dropped);
    }
  } else if (has(reader, "page_tokens")) {
    status = read_own_number(reader, "page_tokens", 1, INT32_MAX, &options->page_tokens);
  } else {
    if (has(reader, "first_tokens")) {
      status = read_own_number(reader, "first_tokens", 1, INT32_MAX, &options->first_tokens);
      if (status == NYB_OK) {
        status = read_own_region(reader, "first", &read->region[NYB_FIRST], read);
      }
    }
    if (status == NYB_OK && has(reader, "last_tokens")) {
      status = read_own_number(reader, "last_tokens", 1, INT32_MAX, &options->last_tokens);
      if (status == NYB_OK) {
        status = read_own_region(reader, "last", &read->region[NYB_LAST], read);
      }
    }
  }
  return status;
}

static nyb_status read_own(file_reader *reader, nyb_file_layer *read) {
  nyb_cache_options *options = &read->options;
  int64_t version = 0;
  nyb_status status = read_own_number(reader, "version", 1, NYB_FILE_OWN_VERSION, &version);
  if (status == NYB_OK) status = read_own_number(reader, "batch", 1, INT32_MAX, &options->batch);
  if (status == NYB_OK) {
    status = read_own_number(reader, "kv_heads", 1, INT32_MAX, &options->kv_heads);
  }
  if (status == NYB_OK) status = read_own_body(reader, read);
  if (status == NYB_OK) status = read_own_kind(reader, read);
  return status == NYB_OK ? check_own_sequences(reader, read) : status;
}

/* ---- Where rows are ------------------------------------------------------------------------- */

nyb_cache_sequence nyb_file_sequence_at(const nyb_file_layer *layer, int64_t sequence) {
  if (layer->region[NYB_BODY].ends == NULL) {
    return (nyb_cache_sequence){.held = layer->tokens, .dropped = layer->dropped_tokens};
  }
  const int64_t before_last = tokens_in(&layer->region[NYB_FIRST], sequence) +
                              tokens_in(&layer->region[NYB_BODY], sequence);
  const bool mixed = layer->options.first_tokens > 0 || layer->options.last_tokens > 0;
  return (nyb_cache_sequence){
      .held = before_last + tokens_in(&layer->region[NYB_LAST], sequence),
      .dropped = layer->dropped == NULL ? 0 : number_at(layer->dropped, sequence),
      .last_begin = mixed ? before_last : 0,
  };
}

nyb_token_range nyb_file_region_range(const nyb_cache_options *options, nyb_cache_region region,
                                      const nyb_cache_sequence *state) {
  const int64_t first = nyb_smaller(options->first_tokens, state->held);
  const bool mixed = options->first_tokens > 0 || options->last_tokens > 0;
  const int64_t last = mixed ? state->last_begin : state->held;
  if (region == NYB_FIRST) return (nyb_token_range){0, first};
  if (region == NYB_LAST) return (nyb_token_range){last, state->held};
  return (nyb_token_range){first, last};
}

nyb_file_rows nyb_file_rows_at(const nyb_file_layer *layer, int part, int64_t sequence,
                               int64_t head, int64_t token, int64_t most_tokens) {
  const int64_t kv_heads = layer->options.kv_heads;
  const nyb_cache_sequence state = nyb_file_sequence_at(layer, sequence);
  nyb_cache_region region = NYB_BODY;
  nyb_token_range range = nyb_file_region_range(&layer->options, region, &state);
  if (token < range.begin) region = NYB_FIRST;
  if (token >= range.end) region = NYB_LAST;
  range = nyb_file_region_range(&layer->options, region, &state);
  const nyb_file_region *from = &layer->region[region];
  int64_t row = token - range.begin, rows = range.end - token;
  if (layer->turn > 0) { /* in the ring, whose rows are all held */
    const int64_t keep = layer->options.window_keep_tokens, slots = from->plane_rows - keep;
    if (token < keep) {
      rows = keep - token;
    } else {
      row = keep + (token - keep + layer->turn) % slots;
      rows = nyb_smaller(rows, from->plane_rows - row);
    }
  }
  if (from->ends == NULL) {
    row += (sequence * kv_heads + head) * from->plane_rows;
  } else {
    const int64_t begin = sequence == 0 ? 0 : number_at(from->ends, sequence - 1);
    row += begin * kv_heads + head * (range.end - range.begin);
  }
  nyb_file_rows found = {.tokens = nyb_smaller(rows, most_tokens)};
  for (int array = 0; array < NYB_CACHE_ARRAYS; array++) {
    if (from->array[part][array] == NULL) continue;
    found.array[array] = from->array[part][array] + row * from->row_bytes[part][array];
  }
  return found;
}

/* ---- Any class ------------------------------------------------------------------------------ */

static nyb_status check_sizes(const file_reader *reader, const nyb_file_layer *read) {
  const struct {
    const char *what;
    int64_t value, least;
  } sizes[] = {{"sequences", read->options.batch, 1},
               {"KV heads", read->options.kv_heads, 1},
               {"tokens", read->tokens, 0}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    if (sizes[i].value >= sizes[i].least && sizes[i].value <= INT32_MAX) continue;
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": it has %" PRId64 " %s; it must be %" PRId64 " to %d",
                    reader->layer, sizes[i].value, sizes[i].what, sizes[i].least, INT32_MAX);
  }
  return NYB_OK;
}

static nyb_status read_class(file_reader *reader, nyb_file_layer *read) {
  static const struct {
    const char *name;
    nyb_status (*read)(file_reader *reader, nyb_file_layer *read);
  } classes[] = {{"QuantizedKVCache", read_quantized},
                 {"KVCache", read_kv},
                 {"RotatingKVCache", read_rotating},
                 {NYB_FILE_OWN_CLASS, read_own}};
  for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
    if (strcmp(reader->class_name, classes[i].name) == 0) return classes[i].read(reader, read);
  }
  return nyb_fail(NYB_ERROR_FILE_FORMAT,
                  "layer %" PRId64
                  " is a %s; nybble loads QuantizedKVCache, KVCache, RotatingKVCache and %s",
                  reader->layer, nyb_shown(reader->class_name).text, NYB_FILE_OWN_CLASS);
}

nyb_status nyb_file_read_layer(const nyb_safetensors *file, int64_t layer, nyb_file_layer *read) {
  file_reader reader;
  nyb_status status = begin(file, &reader);
  if (status != NYB_OK) return status;
  nyb_metadata class_name;
  if (layer < 0 ||
      !nyb_safetensors_find_metadata(file, class_key(&reader, layer).text, &class_name)) {
    return nyb_fail(NYB_ERROR_VALUE, "layer is %" PRId64 "; the file has %" PRId64, layer,
                    nyb_safetensors_count_metadata(file, classes_prefix(&reader)));
  }
  reader.layer = layer;
  reader.class_name = class_name.value;
  *read = (nyb_file_layer){.options = NYB_CACHE_OPTIONS_INIT};
  read->options.rule = NYB_RULE_MLX_CPU;
  status = read_class(&reader, read);
  if (status == NYB_OK) status = check_sizes(&reader, read);
  if (status != NYB_OK) return status;
  const int64_t tensors = nyb_safetensors_count_tensors(file, layer_prefix(layer).text);
  if (tensors != reader.tensors) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "layer %" PRId64 ": the file has %" PRId64
                    " tensors of it; a %s of this kind "
                    "has %" PRId64,
                    layer, tensors, reader.class_name, reader.tensors);
  }
  return NYB_OK;
}

nyb_status nyb_cache_file_options(const nyb_safetensors *file, int64_t layer,
                                  nyb_cache_options *options) {
  if (options == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "options is NULL; it must point to an nyb_cache_options");
  }
  nyb_status status = nyb_check_struct("options", NULL, options->struct_size, sizeof *options);
  if (status != NYB_OK) return status;
  nyb_file_layer read;
  status = nyb_file_read_layer(file, layer, &read);
  if (status != NYB_OK) return status;
  read.options.struct_size = options->struct_size;
  *options = read.options;
  return NYB_OK;
}

nyb_status nyb_cache_file_lengths(const nyb_safetensors *file, int64_t layer, int64_t *lengths) {
  if (lengths == NULL) {
    return nyb_fail(NYB_ERROR_NULL,
                    "lengths is NULL; it must point to an int64_t for each sequence");
  }
  nyb_file_layer read;
  const nyb_status status = nyb_file_read_layer(file, layer, &read);
  for (int64_t i = 0; status == NYB_OK && i < read.options.batch; i++) {
    const nyb_cache_sequence state = nyb_file_sequence_at(&read, i);
    lengths[i] = state.dropped + state.held;
  }
  return status;
}

/* ---- Metadata of the caller's own ----------------------------------------------------------- */

static const char *metadata_prefix(const file_reader *reader) {
  return reader->current ? "0." : "1.";
}

int64_t nyb_cache_file_metadata_count(const nyb_safetensors *file) {
  file_reader reader;
  if (begin(file, &reader) != NYB_OK) return 0;
  return nyb_safetensors_count_metadata(file, metadata_prefix(&reader));
}

nyb_status nyb_cache_file_metadata_at(const nyb_safetensors *file, int64_t index,
                                      nyb_metadata *metadata) {
  file_reader reader;
  const nyb_status status = begin(file, &reader);
  if (status != NYB_OK) return status;
  if (metadata == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "metadata is NULL; it must point to an nyb_metadata");
  }
  const char *prefix = metadata_prefix(&reader);
  const int64_t count = nyb_safetensors_count_metadata(file, prefix);
  if (index < 0 || index >= count) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "index is %" PRId64 "; the file has %" PRId64 " metadata keys of its user's",
                    index, count);
  }
  *metadata = nyb_safetensors_metadata_behind(file, prefix, index);
  metadata->key += strlen(prefix);
  return NYB_OK;
}
