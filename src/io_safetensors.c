/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors files: eight bytes of header length (little-endian), a JSON header, then the bytes of
 * the tensors without gaps. A file is hostile until its whole header has been checked.
 *
 * The header's JSON is read by a small reader of its own that knows only what the format allows: it
 * does not recurse, looks at every byte once, and keeps nothing but the tensors and the metadata,
 * so that time and memory are linear in the header whatever it holds. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif

#include "io_safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "context.h"

/* NYB_NO_MMAP builds the fallback, which reads the file into the context's memory, for its tests.
 */
#if defined(_POSIX_MAPPED_FILES) && _POSIX_MAPPED_FILES > 0 && !defined(NYB_NO_MMAP)
#define NYB_HAVE_MMAP
#include <sys/mman.h>
#endif

struct nyb_safetensors {
  nyb_context *context;
  char *contents; /* the whole file */
  int64_t file_bytes;
  bool mapped;  /* else contents come from the context's allocator */
  char *header; /* a private copy, in which strings are decoded in place and stay */
  nyb_safetensors_tensor *tensors;
  int64_t tensor_count, tensor_capacity;
  int32_t *by_name; /* indices of tensors in the order of their names; by_key is its second part */
  nyb_metadata *metadata;
  int64_t metadata_count, metadata_capacity;
  int32_t *by_key; /* indices of metadata in the order of their keys */
};

/* By place in the file; an empty tensor before the one that starts at the same byte. */
static int compare_tensor_places(const void *items, int32_t left, int32_t right) {
  const nyb_safetensors_tensor *a = (const nyb_safetensors_tensor *)items + left;
  const nyb_safetensors_tensor *b = (const nyb_safetensors_tensor *)items + right;
  if (a->data != b->data) return (const char *)a->data < (const char *)b->data ? -1 : 1;
  return a->data_bytes < b->data_bytes ? -1 : a->data_bytes > b->data_bytes;
}

/* ---- Reading the header's JSON ------------------------------------------------------------ */

typedef struct header_reader {
  nyb_safetensors *file;
  const char *path;
  const char *data; /* where offset 0 of data_offsets is */
  int64_t data_bytes;
  char *begin, *at, *end;
} header_reader;

static void skip_space(header_reader *reader) {
  while (reader->at < reader->end && strchr(" \t\n\r", *reader->at) != NULL &&
         *reader->at != '\0') {
    reader->at++;
  }
}

static nyb_status fail_syntax(const header_reader *reader, const char *wanted) {
  char found[24] = "its end";
  if (reader->at < reader->end) {
    const unsigned char byte = (unsigned char)*reader->at;
    snprintf(found, sizeof found, byte > 0x20 && byte < 0x7f ? "%c" : "byte 0x%02x", byte);
  }
  return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: header byte %" PRId64 " must be %s; it is %s",
                  nyb_shown_path(reader->path).text, (int64_t)(reader->at - reader->begin), wanted,
                  found);
}

/* Consumes `wanted` if it stands next. */
static bool take(header_reader *reader, char wanted) {
  skip_space(reader);
  if (reader->at == reader->end || *reader->at != wanted) return false;
  reader->at++;
  return true;
}

/* The four digits of a \u escape, -1 where they are none. */
static int32_t read_hex4(header_reader *reader) {
  if (reader->end - reader->at < 4) return -1;
  int32_t value = 0;
  for (int i = 0; i < 4; i++) {
    const char digit = reader->at[i];
    int32_t nibble;
    if (digit >= '0' && digit <= '9') {
      nibble = digit - '0';
    } else if (digit >= 'a' && digit <= 'f') {
      nibble = digit - 'a' + 10;
    } else if (digit >= 'A' && digit <= 'F') {
      nibble = digit - 'A' + 10;
    } else {
      return -1;
    }
    value = value * 16 + nibble;
  }
  reader->at += 4;
  return value;
}

static char *put_utf8(char *out, uint32_t code) {
  if (code < 0x80) {
    *out++ = (char)code;
  } else if (code < 0x800) {
    *out++ = (char)(0xc0 | code >> 6);
    *out++ = (char)(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    *out++ = (char)(0xe0 | code >> 12);
    *out++ = (char)(0x80 | (code >> 6 & 0x3f));
    *out++ = (char)(0x80 | (code & 0x3f));
  } else {
    *out++ = (char)(0xf0 | code >> 18);
    *out++ = (char)(0x80 | (code >> 12 & 0x3f));
    *out++ = (char)(0x80 | (code >> 6 & 0x3f));
    *out++ = (char)(0x80 | (code & 0x3f));
  }
  return out;
}

/* What follows the backslash of an escape, decoded to *out. A decoded character never takes more
 * bytes than its escape, so that *out stays behind reader->at. */
static nyb_status read_escape(header_reader *reader, char **out) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *letter =
      reader->at < reader->end && *reader->at != '\0' ? strchr(letters, *reader->at) : NULL;
  if (letter != NULL) {
    reader->at++;
    *(*out)++ = meanings[letter - letters];
    return NYB_OK;
  }
  if (reader->at == reader->end || *reader->at != 'u') {
    return fail_syntax(reader, "one of \"\\/bfnrtu, after a backslash");
  }
  reader->at++;
  const char *const digits = reader->at;
  int32_t code = read_hex4(reader);
  if (code < 0) return fail_syntax(reader, "the first of the four hexadecimal digits of \\u");
  if (code >= 0xd800 && code <= 0xdbff && reader->end - reader->at >= 2 && reader->at[0] == '\\' &&
      reader->at[1] == 'u') {
    reader->at += 2;
    const int32_t low = read_hex4(reader);
    code = low >= 0xdc00 && low <= 0xdfff ? 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)
                                          : 0xd800;
  }
  if (code >= 0xd800 && code <= 0xdfff) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: the \\u escape at header byte %" PRId64 " is half a surrogate pair",
                    nyb_shown_path(reader->path).text, (int64_t)(digits - reader->begin) - 2);
  }
  if (code == 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: the string at header byte %" PRId64
                    " holds U+0000, which names and metadata may not",
                    nyb_shown_path(reader->path).text, (int64_t)(digits - reader->begin) - 2);
  }
  *out = put_utf8(*out, (uint32_t)code);
  return NYB_OK;
}

/* A string, decoded where it stands; *text stays valid as long as the header. */
static nyb_status read_string(header_reader *reader, const char **text) {
  if (!take(reader, '"')) return fail_syntax(reader, "the \" that opens a string");
  char *out = reader->at;
  *text = out;
  while (reader->at < reader->end) {
    const char next = *reader->at;
    if (next == '"') {
      reader->at++;
      *out = '\0';
      return NYB_OK;
    }
    if (next == '\\') {
      reader->at++;
      const nyb_status status = read_escape(reader, &out);
      if (status != NYB_OK) return status;
      continue;
    }
    const int length = nyb_utf8_length(reader->at, reader->end);
    if (length == 0 || (unsigned char)next < 0x20) {
      return fail_syntax(reader, "well-formed UTF-8 without control characters, inside a string");
    }
    memmove(out, reader->at, (size_t)length);
    out += length;
    reader->at += length;
  }
  return fail_syntax(reader, "the \" that closes a string");
}

/* A size or offset: digits alone, as no other spelling of a number is exact. */
static nyb_status read_size(header_reader *reader, const char *name, const char *field,
                            int64_t *size) {
  skip_space(reader);
  const char *const start = reader->at;
  const char *end = start;
  while (end < reader->end && *end != '\0' && strchr("+-.0123456789Ee", *end) != NULL) end++;
  int64_t value = 0;
  bool whole = end > start && !(start[0] == '0' && end - start > 1);
  for (const char *digit = start; whole && digit < end; digit++) {
    whole = *digit >= '0' && *digit <= '9' && value <= (INT64_MAX - (*digit - '0')) / 10;
    if (whole) value = value * 10 + (*digit - '0');
  }
  if (!whole) {
    if (end == start) return fail_syntax(reader, "the first digit of a size");
    const int shown_bytes = end - start < 32 ? (int)(end - start) : 32;
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": %s holds %.*s; it must be a whole number from 0 to "
                    "2^63-1, in digits alone",
                    nyb_shown_path(reader->path).text, nyb_shown(name).text, field, shown_bytes,
                    start);
  }
  reader->at += end - start;
  *size = value;
  return NYB_OK;
}

/* Steps to the next item of an object or array whose opening bracket has been taken; *more is false
 * after the closing one. */
static nyb_status next_item(header_reader *reader, char closing, bool *first, bool *more) {
  *more = true;
  if (take(reader, closing)) {
    *more = false;
  } else if (!*first && !take(reader, ',')) {
    return fail_syntax(reader, closing == '}' ? ", or }" : ", or ]");
  }
  *first = false;
  return NYB_OK;
}

static nyb_status next_member(header_reader *reader, bool *first, bool *more, const char **key) {
  nyb_status status = next_item(reader, '}', first, more);
  if (status != NYB_OK || !*more) return status;
  status = read_string(reader, key);
  if (status == NYB_OK && !take(reader, ':')) status = fail_syntax(reader, ": after a key");
  return status;
}

/* Array of sizes: exactly *count or at most *count of them; *count becomes how many. */
static nyb_status read_sizes(header_reader *reader, const char *name, const char *field,
                             int64_t limit, int64_t *sizes, int64_t *count) {
  if (!take(reader, '[')) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": %s (at header byte %" PRId64 ") must be an array",
                    nyb_shown_path(reader->path).text, nyb_shown(name).text, field,
                    (int64_t)(reader->at - reader->begin));
  }
  bool first = true, more;
  *count = 0;
  for (;;) {
    nyb_status status = next_item(reader, ']', &first, &more);
    if (status != NYB_OK || !more) return status;
    if (*count == limit) {
      return nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "%s: tensor \"%s\": %s has more than %" PRId64 " numbers",
                      nyb_shown_path(reader->path).text, nyb_shown(name).text, field, limit);
    }
    status = read_size(reader, name, field, &sizes[*count]);
    if (status != NYB_OK) return status;
    ++*count;
  }
}

/* ---- Tensors and metadata ----------------------------------------------------------------- */

/* Room for one item more in a growing array. */
static nyb_status make_room(const header_reader *reader, void **items, int64_t count,
                            int64_t *capacity, size_t item_bytes) {
  if (count < *capacity) return NYB_OK;
  if (count >=
      INT32_MAX /
          2) { /* out of reach below NYB_SAFETENSORS_MAX_HEADER_BYTES; indices are int32_t */
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: the header lists more than %" PRId64 " items",
                    nyb_shown_path(reader->path).text, count);
  }
  const int64_t larger = *capacity == 0 ? 32 : *capacity * 2;
  const size_t bytes = (size_t)larger * item_bytes;
  void *made = nyb_allocate(reader->file->context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (made == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "%s: the allocator had no %zu bytes for its header",
                    nyb_shown_path(reader->path).text, bytes);
  }
  if (*items != NULL) {
    memcpy(made, *items, (size_t)count * item_bytes);
    nyb_release(reader->file->context, *items);
  }
  *items = made;
  *capacity = larger;
  return NYB_OK;
}

static nyb_status check_tensor(const header_reader *reader, nyb_safetensors_tensor *tensor,
                               const int64_t offsets[2]) {
  const nyb_shown_text name = nyb_shown(tensor->name);
  const char *word = tensor->dtype;
  const int64_t element_bytes = nyb_safetensors_dtype_bytes(&tensor->dtype);
  if (element_bytes == 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": dtype is \"%s\", which is none that nybble knows",
                    nyb_shown_path(reader->path).text, name.text, nyb_shown(word).text);
  }
  if (offsets[0] > offsets[1]) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": data_offsets begin at %" PRId64
                    ", after their end at %" PRId64,
                    nyb_shown_path(reader->path).text, name.text, offsets[0], offsets[1]);
  }
  tensor->data_bytes = offsets[1] - offsets[0];
  int64_t bytes;
  if (!nyb_safetensors_tensor_bytes(tensor->rank, tensor->shape, element_bytes, &bytes)) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: tensor \"%s\": the bytes of its shape leave int64",
                    nyb_shown_path(reader->path).text, name.text);
  }
  if (bytes != tensor->data_bytes) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": data_offsets give %" PRId64
                    " bytes, but its shape in %s takes %" PRId64,
                    nyb_shown_path(reader->path).text, name.text, tensor->data_bytes, tensor->dtype,
                    bytes);
  }
  if (offsets[1] > reader->data_bytes) {
    return nyb_fail(NYB_ERROR_FILE_TRUNCATED,
                    "%s: tensor \"%s\" ends at byte %" PRId64
                    " of the data, of which the file holds %" PRId64,
                    nyb_shown_path(reader->path).text, name.text, offsets[1], reader->data_bytes);
  }
  tensor->data = reader->data + offsets[0];
  return NYB_OK;
}

/* The value of one of a tensor's three keys. */
static nyb_status read_field(header_reader *reader, nyb_safetensors_tensor *tensor, const char *key,
                             int64_t offsets[2], unsigned *seen) {
  static const char *const fields[] = {"dtype", "shape", "data_offsets"};
  unsigned field = 0;
  while (field < 3 && strcmp(key, fields[field]) != 0) field++;
  if (field == 3) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\" has a key \"%s\"; there are dtype, shape and data_offsets",
                    nyb_shown_path(reader->path).text, nyb_shown(tensor->name).text,
                    nyb_shown(key).text);
  }
  if ((*seen & 1u << field) != 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: tensor \"%s\" has two keys \"%s\"",
                    nyb_shown_path(reader->path).text, nyb_shown(tensor->name).text, key);
  }
  *seen |= 1u << field;
  if (field == 0) return read_string(reader, &tensor->dtype);
  if (field == 1) {
    return read_sizes(reader, tensor->name, key, NYB_SAFETENSORS_MAX_RANK, tensor->shape,
                      &tensor->rank);
  }
  int64_t count;
  const nyb_status status = read_sizes(reader, tensor->name, key, 2, offsets, &count);
  if (status == NYB_OK && count != 2) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\": data_offsets holds %" PRId64 " numbers; it must be 2",
                    nyb_shown_path(reader->path).text, nyb_shown(tensor->name).text, count);
  }
  return status;
}

static nyb_status read_tensor(header_reader *reader, const char *name) {
  nyb_safetensors *file = reader->file;
  nyb_safetensors_tensor tensor = {.name = name};
  if (!take(reader, '{')) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: tensor \"%s\" (at header byte %" PRId64 ") must be an object",
                    nyb_shown_path(reader->path).text, nyb_shown(name).text,
                    (int64_t)(reader->at - reader->begin));
  }
  int64_t offsets[2] = {0, 0};
  unsigned seen = 0;
  for (bool first = true, more = true; more;) {
    const char *key;
    nyb_status status = next_member(reader, &first, &more, &key);
    if (status == NYB_OK && more) status = read_field(reader, &tensor, key, offsets, &seen);
    if (status != NYB_OK) return status;
  }
  if (seen != 7) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: tensor \"%s\" has no %s",
                    nyb_shown_path(reader->path).text, nyb_shown(name).text,
                    !(seen & 1)   ? "dtype"
                    : !(seen & 2) ? "shape"
                                  : "data_offsets");
  }
  nyb_status status = check_tensor(reader, &tensor, offsets);
  if (status != NYB_OK) return status;
  void *items = file->tensors;
  status = make_room(reader, &items, file->tensor_count, &file->tensor_capacity, sizeof tensor);
  file->tensors = items;
  if (status == NYB_OK) file->tensors[file->tensor_count++] = tensor;
  return status;
}

static nyb_status read_metadata(header_reader *reader, bool *seen) {
  nyb_safetensors *file = reader->file;
  if (*seen) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: the header has two keys \"%s\"",
                    nyb_shown_path(reader->path).text, NYB_SAFETENSORS_METADATA);
  }
  *seen = true;
  if (!take(reader, '{')) return fail_syntax(reader, "the { that opens __metadata__");
  for (bool first = true;;) {
    bool more;
    nyb_metadata item;
    nyb_status status = next_member(reader, &first, &more, &item.key);
    if (status != NYB_OK || !more) return status;
    skip_space(reader);
    if (reader->at == reader->end || *reader->at != '"') {
      return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: metadata \"%s\" must be a string",
                      nyb_shown_path(reader->path).text, nyb_shown(item.key).text);
    }
    status = read_string(reader, &item.value);
    if (status != NYB_OK) return status;
    void *items = file->metadata;
    status = make_room(reader, &items, file->metadata_count, &file->metadata_capacity, sizeof item);
    file->metadata = items;
    if (status != NYB_OK) return status;
    file->metadata[file->metadata_count++] = item;
  }
}

static nyb_status read_header(header_reader *reader) {
  if (*reader->at != '{') return fail_syntax(reader, "the { that opens the header");
  reader->at++;
  bool metadata_seen = false;
  for (bool first = true, more = true; more;) {
    const char *key;
    nyb_status status = next_member(reader, &first, &more, &key);
    if (status == NYB_OK && more) {
      status = strcmp(key, NYB_SAFETENSORS_METADATA) == 0 ? read_metadata(reader, &metadata_seen)
                                                          : read_tensor(reader, key);
    }
    if (status != NYB_OK) return status;
  }
  skip_space(reader);
  return reader->at == reader->end ? NYB_OK : fail_syntax(reader, "a space, after the closing }");
}

/* The tensors must cover the data: each byte belongs to exactly one. */
static nyb_status check_places(const header_reader *reader, const int32_t *by_place) {
  const nyb_safetensors *file = reader->file;
  int64_t covered = 0;
  for (int64_t i = 0; i < file->tensor_count; i++) {
    const nyb_safetensors_tensor *tensor = &file->tensors[by_place[i]];
    const int64_t begin = (const char *)tensor->data - reader->data;
    if (begin < covered) {
      const nyb_safetensors_tensor *before = &file->tensors[by_place[i - 1]];
      return nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "%s: tensor \"%s\" begins at byte %" PRId64
                      " of the data, inside tensor \"%s\", which ends at %" PRId64,
                      nyb_shown_path(reader->path).text, nyb_shown(tensor->name).text, begin,
                      nyb_shown(before->name).text, covered);
    }
    if (begin > covered) {
      return nyb_fail(NYB_ERROR_FILE_FORMAT,
                      "%s: bytes %" PRId64 " to %" PRId64
                      " of the data, before tensor \"%s\", belong to no tensor",
                      nyb_shown_path(reader->path).text, covered, begin,
                      nyb_shown(tensor->name).text);
    }
    covered += tensor->data_bytes;
  }
  if (covered < reader->data_bytes) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s: the last %" PRId64 " bytes of the file belong to no tensor",
                    nyb_shown_path(reader->path).text, reader->data_bytes - covered);
  }
  return NYB_OK;
}

/* Duplicate keys, then duplicate names, then places; leaves both indices sorted. */
static nyb_status check_as_a_whole(const header_reader *reader) {
  nyb_safetensors *file = reader->file;
  const size_t bytes = (size_t)(file->tensor_count + file->metadata_count + 1) * sizeof(int32_t);
  file->by_name = nyb_allocate(file->context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (file->by_name == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "%s: the allocator had no %zu bytes for its index",
                    nyb_shown_path(reader->path).text, bytes);
  }
  file->by_key = file->by_name + file->tensor_count;
  nyb_sort_indices(file->by_key, file->metadata_count, nyb_compare_metadata_keys, file->metadata);
  int64_t twice = nyb_find_equal_neighbours(file->by_key, file->metadata_count,
                                            nyb_compare_metadata_keys, file->metadata);
  if (twice >= 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: metadata \"%s\" is there twice",
                    nyb_shown_path(reader->path).text, nyb_shown(file->metadata[twice].key).text);
  }
  nyb_sort_indices(file->by_name, file->tensor_count, nyb_compare_tensor_names, file->tensors);
  twice = nyb_find_equal_neighbours(file->by_name, file->tensor_count, nyb_compare_tensor_names,
                                    file->tensors);
  if (twice >= 0) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT, "%s: tensor \"%s\" is there twice",
                    nyb_shown_path(reader->path).text, nyb_shown(file->tensors[twice].name).text);
  }
  nyb_sort_indices(file->by_name, file->tensor_count, compare_tensor_places, file->tensors);
  const nyb_status status = check_places(reader, file->by_name);
  nyb_sort_indices(file->by_name, file->tensor_count, nyb_compare_tensor_names, file->tensors);
  return status;
}

/* ---- Opening a file ----------------------------------------------------------------------- */

static nyb_status read_contents(nyb_safetensors *file, const char *path, int descriptor) {
  file->contents = nyb_allocate(file->context, (size_t)file->file_bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (file->contents == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "%s: the allocator had no %" PRId64 " bytes to read the file into",
                    nyb_shown_path(path).text, file->file_bytes);
  }
  for (size_t done = 0; done < (size_t)file->file_bytes;) {
    const size_t left = (size_t)file->file_bytes - done;
    const ssize_t count =
        read(descriptor, file->contents + done, left < NYB_MAX_IO_BYTES ? left : NYB_MAX_IO_BYTES);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return nyb_fail_io(path, "cannot be read");
    if (count == 0) {
      return nyb_fail(NYB_ERROR_FILE_TRUNCATED,
                      "%s ended at byte %zu of %" PRId64 " while it was read",
                      nyb_shown_path(path).text, done, file->file_bytes);
    }
    done += (size_t)count;
  }
  return NYB_OK;
}

static nyb_status map_contents(nyb_safetensors *file, const char *path, int descriptor) {
#if defined(NYB_HAVE_MMAP)
  void *mapping = mmap(NULL, (size_t)file->file_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (mapping != MAP_FAILED) {
    file->contents = mapping;
    file->mapped = true;
    return NYB_OK;
  }
#endif
  return read_contents(file, path, descriptor); /* a file system may have no mappings either */
}

static nyb_status check_kind(nyb_safetensors *file, const char *path, int descriptor) {
  struct stat info;
  if (fstat(descriptor, &info) != 0) return nyb_fail_io(path, "cannot be looked at");
  if (!S_ISREG(info.st_mode)) {
    return nyb_fail(NYB_ERROR_IO, "%s is %s; it must be a regular file", nyb_shown_path(path).text,
                    S_ISDIR(info.st_mode) ? "a directory" : "a device, pipe or socket");
  }
  file->file_bytes = (int64_t)info.st_size;
  if (file->file_bytes < NYB_SAFETENSORS_LENGTH_BYTES) {
    return nyb_fail(NYB_ERROR_FILE_TRUNCATED,
                    "%s has %" PRId64
                    " bytes; a safetensors file begins with 8 for the length "
                    "of its header",
                    nyb_shown_path(path).text, file->file_bytes);
  }
  return NYB_OK;
}

static nyb_status load(nyb_safetensors *file, const char *path) {
  /* O_NONBLOCK keeps a pipe without a writer from blocking; it means nothing to a regular file. */
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return nyb_fail_io(path, "cannot be opened");
  nyb_status status = check_kind(file, path, descriptor);
  if (status == NYB_OK) status = map_contents(file, path, descriptor);
  close(descriptor);
  return status;
}

static nyb_status parse(nyb_safetensors *file, const char *path) {
  uint64_t header_bytes = 0;
  for (int i = NYB_SAFETENSORS_LENGTH_BYTES - 1; i >= 0; i--) {
    header_bytes = header_bytes << 8 | (unsigned char)file->contents[i];
  }
  if (header_bytes > NYB_SAFETENSORS_MAX_HEADER_BYTES || header_bytes < 2) {
    return nyb_fail(NYB_ERROR_FILE_FORMAT,
                    "%s is no safetensors file: its first 8 bytes give a header of %" PRIu64
                    " bytes, which must be 2 to %d",
                    nyb_shown_path(path).text, header_bytes, NYB_SAFETENSORS_MAX_HEADER_BYTES);
  }
  const int64_t after_length = file->file_bytes - NYB_SAFETENSORS_LENGTH_BYTES;
  if ((int64_t)header_bytes > after_length) {
    return nyb_fail(NYB_ERROR_FILE_TRUNCATED,
                    "%s: the header is %" PRIu64 " bytes, of which the file holds %" PRId64,
                    nyb_shown_path(path).text, header_bytes, after_length);
  }
  file->header = nyb_allocate(file->context, header_bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (file->header == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "%s: the allocator had no %" PRIu64 " bytes for its header",
                    nyb_shown_path(path).text, header_bytes);
  }
  memcpy(file->header, file->contents + NYB_SAFETENSORS_LENGTH_BYTES, header_bytes);
  header_reader reader = {
      .file = file,
      .path = path,
      .data = file->contents + NYB_SAFETENSORS_LENGTH_BYTES + header_bytes,
      .data_bytes = after_length - (int64_t)header_bytes,
      .begin = file->header,
      .at = file->header,
      .end = file->header + header_bytes,
  };
  const nyb_status status = read_header(&reader);
  return status == NYB_OK ? check_as_a_whole(&reader) : status;
}

nyb_status nyb_safetensors_open(nyb_context *context, const char *path, nyb_safetensors **file) {
  if (context == NULL || path == NULL || file == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; context, path and file must be set",
                    context == NULL ? "context"
                    : path == NULL  ? "path"
                                    : "file");
  }
  nyb_safetensors *made = nyb_allocate(context, sizeof *made, NYB_SAFETENSORS_ALIGNMENT);
  if (made == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a file",
                    sizeof *made);
  }
  *made = (nyb_safetensors){.context = context};
  nyb_status status = load(made, path);
  if (status == NYB_OK) status = parse(made, path);
  if (status != NYB_OK) {
    nyb_safetensors_close(made);
    return status;
  }
  *file = made;
  return NYB_OK;
}

void nyb_safetensors_close(nyb_safetensors *file) {
  if (file == NULL) return;
  nyb_context *const context = file->context;
#if defined(NYB_HAVE_MMAP)
  if (file->mapped) munmap(file->contents, (size_t)file->file_bytes);
#endif
  void *const owned[] = {file->mapped ? NULL : file->contents,
                         file->header,
                         file->tensors,
                         file->by_name,
                         file->metadata,
                         file};
  for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) {
    if (owned[i] != NULL) nyb_release(context, owned[i]);
  }
}

/* ---- Looking into a file ------------------------------------------------------------------ */

int64_t nyb_safetensors_count(const nyb_safetensors *file) {
  return file == NULL ? 0 : file->tensor_count;
}

int64_t nyb_safetensors_metadata_count(const nyb_safetensors *file) {
  return file == NULL ? 0 : file->metadata_count;
}

nyb_status nyb_safetensors_at(const nyb_safetensors *file, int64_t index,
                              nyb_safetensors_tensor *tensor) {
  if (file == NULL || tensor == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; file and tensor must be set",
                    file == NULL ? "file" : "tensor");
  }
  if (index < 0 || index >= file->tensor_count) {
    return nyb_fail(NYB_ERROR_VALUE, "index is %" PRId64 "; the file has %" PRId64 " tensors",
                    index, file->tensor_count);
  }
  *tensor = file->tensors[index];
  return NYB_OK;
}

/* The two sorted indices are searched by the same code. */
typedef enum index_kind { TENSORS, METADATA } index_kind;

static const char *name_at(const nyb_safetensors *file, index_kind kind, int64_t place) {
  return kind == TENSORS ? file->tensors[file->by_name[place]].name
                         : file->metadata[file->by_key[place]].key;
}

/* The first place whose name is not before `name`; with prefix_bytes, the first whose first bytes
 * are behind those of `name`. */
static int64_t lower_bound(const nyb_safetensors *file, index_kind kind, const char *name,
                           size_t prefix_bytes) {
  int64_t low = 0, high = kind == TENSORS ? file->tensor_count : file->metadata_count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const char *candidate = name_at(file, kind, middle);
    const bool before = prefix_bytes > 0 ? strncmp(candidate, name, prefix_bytes) <= 0
                                         : strcmp(candidate, name) < 0;
    if (before) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

static int64_t count_behind(const nyb_safetensors *file, index_kind kind, const char *prefix) {
  return lower_bound(file, kind, prefix, strlen(prefix)) - lower_bound(file, kind, prefix, 0);
}

int64_t nyb_safetensors_count_tensors(const nyb_safetensors *file, const char *prefix) {
  return count_behind(file, TENSORS, prefix);
}

int64_t nyb_safetensors_count_metadata(const nyb_safetensors *file, const char *prefix) {
  return count_behind(file, METADATA, prefix);
}

nyb_metadata nyb_safetensors_metadata_behind(const nyb_safetensors *file, const char *prefix,
                                             int64_t index) {
  return file->metadata[file->by_key[lower_bound(file, METADATA, prefix, 0) + index]];
}

bool nyb_safetensors_find_metadata(const nyb_safetensors *file, const char *key,
                                   nyb_metadata *metadata) {
  const int64_t at = lower_bound(file, METADATA, key, 0);
  if (at == file->metadata_count || strcmp(name_at(file, METADATA, at), key) != 0) return false;
  *metadata = file->metadata[file->by_key[at]];
  return true;
}

nyb_status nyb_safetensors_find(const nyb_safetensors *file, const char *name,
                                nyb_safetensors_tensor *tensor) {
  if (file == NULL || name == NULL || tensor == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; file, name and tensor must be set",
                    file == NULL   ? "file"
                    : name == NULL ? "name"
                                   : "tensor");
  }
  const int64_t at = lower_bound(file, TENSORS, name, 0);
  if (at < file->tensor_count && strcmp(name_at(file, TENSORS, at), name) == 0) {
    *tensor = file->tensors[file->by_name[at]];
    return NYB_OK;
  }
  return nyb_fail(NYB_ERROR_NOT_FOUND, "the file has no tensor \"%s\" among its %" PRId64,
                  nyb_shown(name).text, file->tensor_count);
}

nyb_status nyb_safetensors_metadata_at(const nyb_safetensors *file, int64_t index,
                                       nyb_metadata *metadata) {
  if (file == NULL || metadata == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; file and metadata must be set",
                    file == NULL ? "file" : "metadata");
  }
  if (index < 0 || index >= file->metadata_count) {
    return nyb_fail(NYB_ERROR_VALUE, "index is %" PRId64 "; the file has %" PRId64 " metadata keys",
                    index, file->metadata_count);
  }
  *metadata = file->metadata[index];
  return NYB_OK;
}
