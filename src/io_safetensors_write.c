/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__linux__)
#define _GNU_SOURCE /* O_TMPFILE */
#elif !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "context.h"
#include "io_safetensors.h"

#define DATA_ALIGNMENT 8

/* ---- Checking what is to be written ------------------------------------------------------- */

static nyb_status check_text(const char *text, const char *array, int64_t index,
                             const char *field) {
  if (text == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s[%" PRId64 "].%s is NULL; it must be a string", array, index,
                    field);
  }
  if (!nyb_is_utf8(text)) {
    return nyb_fail(NYB_ERROR_VALUE, "%s[%" PRId64 "].%s is \"%s\", which is not UTF-8", array,
                    index, field, nyb_shown(text).text);
  }
  return NYB_OK;
}

static nyb_status check_written_shape(const nyb_safetensors_tensor *tensor) {
  const nyb_shown_text name = nyb_shown(tensor->name);
  if (tensor->rank < 0 || tensor->rank > NYB_SAFETENSORS_MAX_RANK) {
    return nyb_fail(NYB_ERROR_SHAPE, "tensor \"%s\": rank is %" PRId64 "; it must be 0 to %d",
                    name.text, tensor->rank, NYB_SAFETENSORS_MAX_RANK);
  }
  for (int64_t i = 0; i < tensor->rank; i++) {
    if (tensor->shape[i] < 0) {
      return nyb_fail(NYB_ERROR_SHAPE,
                      "tensor \"%s\": shape[%" PRId64 "] is %" PRId64 "; it must not be negative",
                      name.text, i, tensor->shape[i]);
    }
  }
  const char *word = tensor->dtype;
  const int64_t element_bytes = nyb_safetensors_dtype_bytes(&word);
  if (element_bytes == 0) {
    return nyb_fail(NYB_ERROR_DTYPE,
                    "tensor \"%s\": dtype is \"%s\"; it must be a word of the format, such as F32, "
                    "BF16 or U32",
                    name.text, nyb_shown(tensor->dtype).text);
  }
  int64_t bytes;
  if (!nyb_safetensors_tensor_bytes(tensor->rank, tensor->shape, element_bytes, &bytes)) {
    return nyb_fail(NYB_ERROR_SHAPE, "tensor \"%s\": the bytes of its shape leave int64",
                    name.text);
  }
  if (bytes != tensor->data_bytes) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "tensor \"%s\": data_bytes is %" PRId64 ", but its shape in %s takes %" PRId64,
                    name.text, tensor->data_bytes, word, bytes);
  }
  return NYB_OK;
}

typedef struct written_file {
  const char *path;
  const nyb_safetensors_tensor *tensors;
  int64_t tensor_count;
  const nyb_metadata *metadata;
  int64_t metadata_count;
  const nyb_pieces *pieces; /* NULL: the tensors have their data */
} written_file;

static nyb_status check_written_tensor(const written_file *file, int64_t index) {
  const nyb_safetensors_tensor *tensor = &file->tensors[index];
  nyb_status status = check_text(tensor->name, "tensors", index, "name");
  if (status == NYB_OK) status = check_text(tensor->dtype, "tensors", index, "dtype");
  if (status != NYB_OK) return status;
  if (strcmp(tensor->name, NYB_SAFETENSORS_METADATA) == 0) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "tensors[%" PRId64 "].name is \"%s\", which the format keeps for metadata",
                    index, NYB_SAFETENSORS_METADATA);
  }
  status = check_written_shape(tensor);
  if (status == NYB_OK && tensor->data == NULL && tensor->data_bytes > 0 && file->pieces == NULL) {
    return nyb_fail(NYB_ERROR_NULL,
                    "tensor \"%s\": data is NULL; it must point to %" PRId64 " bytes",
                    nyb_shown(tensor->name).text, tensor->data_bytes);
  }
  return status;
}

/* ---- The header to be written ------------------------------------------------------------- */

/* Text is measured (out NULL) and then written by the same code. */
typedef struct text_sink {
  char *out;
  int64_t bytes;
} text_sink;

static void put_bytes(text_sink *sink, const char *bytes, size_t count) {
  if (sink->out != NULL) memcpy(sink->out + sink->bytes, bytes, count);
  sink->bytes += (int64_t)count;
}

static void put(text_sink *sink, const char *text) { put_bytes(sink, text, strlen(text)); }

static void put_string(text_sink *sink, const char *text) {
  put(sink, "\"");
  for (; *text != '\0'; text++) {
    if (*text == '"' || *text == '\\') {
      const char escape[2] = {'\\', *text};
      put_bytes(sink, escape, 2);
    } else if ((unsigned char)*text < 0x20) {
      char escape[8];
      snprintf(escape, sizeof escape, "\\u%04x", (unsigned)(unsigned char)*text);
      put(sink, escape);
    } else {
      put_bytes(sink, text, 1);
    }
  }
  put(sink, "\"");
}

static void put_sizes(text_sink *sink, const int64_t *sizes, int64_t count) {
  put(sink, "[");
  for (int64_t i = 0; i < count; i++) {
    char number[24];
    snprintf(number, sizeof number, "%s%" PRId64, i == 0 ? "" : ",", sizes[i]);
    put(sink, number);
  }
  put(sink, "]");
}

static void put_header(text_sink *sink, const written_file *file) {
  put(sink, "{");
  if (file->metadata_count > 0) {
    put_string(sink, NYB_SAFETENSORS_METADATA);
    for (int64_t i = 0; i < file->metadata_count; i++) {
      put(sink, i == 0 ? ":{" : ",");
      put_string(sink, file->metadata[i].key);
      put(sink, ":");
      put_string(sink, file->metadata[i].value);
    }
    put(sink, "}");
  }
  int64_t offsets[2] = {0, 0};
  for (int64_t i = 0; i < file->tensor_count; i++) {
    const nyb_safetensors_tensor *tensor = &file->tensors[i];
    offsets[1] = offsets[0] + tensor->data_bytes;
    put(sink, i == 0 && file->metadata_count == 0 ? "" : ",");
    put_string(sink, tensor->name);
    put(sink, ":{\"dtype\":");
    put_string(sink, tensor->dtype);
    put(sink, ",\"shape\":");
    put_sizes(sink, tensor->shape, tensor->rank);
    put(sink, ",\"data_offsets\":");
    put_sizes(sink, offsets, 2);
    put(sink, "}");
    offsets[0] = offsets[1];
  }
  put(sink, "}");
  while (sink->bytes % DATA_ALIGNMENT != 0) put(sink, " ");
}

static nyb_status check_unique(nyb_context *context, int64_t count, nyb_compare_fn compare,
                               const void *items, int64_t *twice) {
  const size_t bytes = (size_t)(count + 1) * sizeof(int32_t);
  int32_t *order = nyb_allocate(context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (order == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY,
                    "the allocator had no %zu bytes to compare %" PRId64 " names", bytes, count);
  }
  nyb_sort_indices(order, count, compare, items);
  *twice = nyb_find_equal_neighbours(order, count, compare, items);
  nyb_release(context, order);
  return NYB_OK;
}

static nyb_status check_written_names(nyb_context *context, const written_file *file) {
  int64_t twice = -1;
  nyb_status status =
      check_unique(context, file->tensor_count, nyb_compare_tensor_names, file->tensors, &twice);
  if (status == NYB_OK && twice >= 0) {
    return nyb_fail(NYB_ERROR_VALUE, "tensors holds \"%s\" twice; names must differ",
                    nyb_shown(file->tensors[twice].name).text);
  }
  if (status == NYB_OK) {
    status = check_unique(context, file->metadata_count, nyb_compare_metadata_keys, file->metadata,
                          &twice);
  }
  if (status == NYB_OK && twice >= 0) {
    return nyb_fail(NYB_ERROR_VALUE, "metadata holds \"%s\" twice; keys must differ",
                    nyb_shown(file->metadata[twice].key).text);
  }
  return status;
}

static nyb_status check_written(nyb_context *context, const written_file *file) {
  const struct {
    const char *name;
    const void *items;
    int64_t count;
  } arrays[] = {{"tensor", file->tensors, file->tensor_count},
                {"metadata", file->metadata, file->metadata_count}};
  for (int i = 0; i < 2; i++) {
    if (arrays[i].count < 0 || arrays[i].count > NYB_SAFETENSORS_MAX_HEADER_BYTES) {
      return nyb_fail(NYB_ERROR_VALUE, "%s_count is %" PRId64 "; it must be 0 to %d",
                      arrays[i].name, arrays[i].count, NYB_SAFETENSORS_MAX_HEADER_BYTES);
    }
    if (arrays[i].items == NULL && arrays[i].count > 0) {
      return nyb_fail(NYB_ERROR_NULL, "%s is NULL, but %s_count is %" PRId64,
                      i == 0 ? "tensors" : "metadata", arrays[i].name, arrays[i].count);
    }
  }
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < file->tensor_count; i++) {
    const nyb_status status = check_written_tensor(file, i);
    if (status != NYB_OK) return status;
    if (file->tensors[i].data_bytes >
        INT64_MAX - NYB_SAFETENSORS_MAX_HEADER_BYTES - NYB_SAFETENSORS_LENGTH_BYTES - total_bytes) {
      return nyb_fail(NYB_ERROR_SHAPE, "tensor \"%s\" takes the file beyond 2^63-1 bytes",
                      nyb_shown(file->tensors[i].name).text);
    }
    total_bytes += file->tensors[i].data_bytes;
  }
  for (int64_t i = 0; i < file->metadata_count; i++) {
    nyb_status status = check_text(file->metadata[i].key, "metadata", i, "key");
    if (status == NYB_OK) status = check_text(file->metadata[i].value, "metadata", i, "value");
    if (status != NYB_OK) return status;
  }
  return check_written_names(context, file);
}

/* The length and the header, in memory of the context. */
static nyb_status make_header(nyb_context *context, const written_file *file, char **header,
                              int64_t *bytes) {
  text_sink sink = {0};
  put_header(&sink, file);
  if (sink.bytes > NYB_SAFETENSORS_MAX_HEADER_BYTES) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "the header of %" PRId64 " tensors and %" PRId64 " metadata keys takes %" PRId64
                    " bytes; the format allows %d",
                    file->tensor_count, file->metadata_count, sink.bytes,
                    NYB_SAFETENSORS_MAX_HEADER_BYTES);
  }
  *bytes = NYB_SAFETENSORS_LENGTH_BYTES + sink.bytes;
  *header = nyb_allocate(context, (size_t)*bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (*header == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %" PRId64 " bytes for a header",
                    *bytes);
  }
  for (int i = 0; i < NYB_SAFETENSORS_LENGTH_BYTES; i++)
    (*header)[i] = (char)((uint64_t)sink.bytes >> 8 * i);
  sink = (text_sink){.out = *header + NYB_SAFETENSORS_LENGTH_BYTES};
  put_header(&sink, file);
  return NYB_OK;
}

/* ---- Writing ------------------------------------------------------------------------------ */

static bool write_all(int descriptor, const char *bytes, int64_t count) {
  while (count > 0) {
    const size_t part = count < (int64_t)NYB_MAX_IO_BYTES ? (size_t)count : NYB_MAX_IO_BYTES;
    const ssize_t written = write(descriptor, bytes, part);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes += written;
    count -= written;
  }
  return true;
}

/* Small pieces are gathered, so that each call of the system writes many. */
#define GATHER_BYTES ((int64_t)1 << 18)

typedef struct gathering {
  int descriptor;
  char *buffer; /* [GATHER_BYTES] */
  int64_t filled;
} gathering;

static bool write_gathered(gathering *out) {
  const int64_t bytes = out->filled;
  out->filled = 0;
  return write_all(out->descriptor, out->buffer, bytes);
}

static bool write_pieces(gathering *out, const written_file *file, int64_t tensor) {
  const int64_t end = file->tensors[tensor].data_bytes;
  for (int64_t offset = 0, bytes; offset < end; offset += bytes) {
    const char *piece;
    bytes = file->pieces->next(file->pieces->data, tensor, offset, &piece);
    if (bytes > GATHER_BYTES - out->filled && !write_gathered(out)) return false;
    if (bytes > GATHER_BYTES / 4) {
      if (!write_gathered(out) || !write_all(out->descriptor, piece, bytes)) return false;
    } else {
      memcpy(out->buffer + out->filled, piece, (size_t)bytes);
      out->filled += bytes;
    }
  }
  return true;
}

/* A file being written, beside the one that it will become. */
typedef struct new_file {
  const char *path;
  size_t folder_bytes;         /* of path that name its folder */
  char *temporary;             /* [folder_bytes + NAME_ROOM] */
  const struct stat *replaced; /* NULL: there is none */
  int descriptor;
  bool named; /* it has the name in `temporary` */
} new_file;
enum { NAME_ROOM = 64 };

/* Tries names for it until one is free; they do not depend on the target's, which may already be as
 * long as a name can be. */
static bool try_names(new_file *file, bool (*take_name)(new_file *file)) {
  static _Atomic unsigned counter;
  memcpy(file->temporary, file->path, file->folder_bytes);
  for (int attempt = 0; attempt < 100; attempt++) { /* others may write beside us */
    snprintf(file->temporary + file->folder_bytes, NAME_ROOM, ".nybble-%ld-%u.tmp", (long)getpid(),
             atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed));
    file->named = take_name(file);
    if (file->named || errno != EEXIST) break;
  }
  return file->named;
}

/* Nobody else may look into what replaces a file before it has that file's rights. */
static mode_t first_mode(const new_file *file) { return file->replaced == NULL ? 0666 : 0600; }

static bool open_named(new_file *file) {
  file->descriptor =
      open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, first_mode(file));
  return file->descriptor >= 0;
}

#if defined(O_TMPFILE)
typedef struct link_text {
  char text[64];
} link_text;

static link_text link_of(const new_file *file) {
  link_text link;
  snprintf(link.text, sizeof link.text, "/proc/self/fd/%d", file->descriptor);
  return link;
}

/* Without a name until all of it is written: a process that is killed meanwhile leaves nothing.
 * False where the system or the file system has no such files. */
static bool open_unnamed(new_file *file) {
  char *const folder = file->temporary;
  memcpy(folder, file->path, file->folder_bytes);
  folder[file->folder_bytes] = '\0';
  file->descriptor = open(file->folder_bytes == 0 ? "." : folder, O_TMPFILE | O_WRONLY | O_CLOEXEC,
                          first_mode(file));
  if (file->descriptor < 0) return false;
  if (access(link_of(file).text, F_OK) == 0) return true;
  close(file->descriptor);
  return false;
}

static bool link_name(new_file *file) {
  return linkat(AT_FDCWD, link_of(file).text, AT_FDCWD, file->temporary, AT_SYMLINK_FOLLOW) == 0;
}
#else
static bool open_unnamed(new_file *file) {
  (void)file;
  return false;
}
static bool link_name(new_file *file) {
  (void)file;
  return false;
}
#endif

/* Those of the file that it replaces. Where the group cannot be kept, another gets no rights. */
static bool set_rights(const new_file *file) {
  if (file->replaced == NULL) return true;
  mode_t mode = file->replaced->st_mode & 0777;
  if (fchown(file->descriptor, (uid_t)-1, file->replaced->st_gid) != 0) mode &= ~(mode_t)070;
  return fchmod(file->descriptor, mode) == 0;
}

/* Everything, down to the device. */
static nyb_status write_all_of(const new_file *file, const written_file *what, const char *header,
                               int64_t header_bytes, char *buffer) {
  gathering out = {.descriptor = file->descriptor, .buffer = buffer};
  bool written = write_all(file->descriptor, header, header_bytes);
  for (int64_t i = 0; written && i < what->tensor_count; i++) {
    written = what->pieces != NULL
                  ? write_pieces(&out, what, i)
                  : write_all(file->descriptor, what->tensors[i].data, what->tensors[i].data_bytes);
  }
  written = written && write_gathered(&out) && fsync(file->descriptor) == 0;
  return written ? NYB_OK : nyb_fail_io(file->path, "cannot be written");
}

static nyb_status write_and_rename(new_file *file, const written_file *what, const char *header,
                                   int64_t header_bytes, char *buffer) {
  nyb_status status = write_all_of(file, what, header, header_bytes, buffer);
  if (status == NYB_OK && !set_rights(file)) {
    status = nyb_fail_io(file->path, "cannot be given the rights of the file that it replaces");
  }
  if (status == NYB_OK && !file->named && !try_names(file, link_name)) {
    status = nyb_fail_io(file->path, "cannot be given a temporary name beside it");
  }
  if (close(file->descriptor) != 0 && status == NYB_OK) {
    status = nyb_fail_io(file->path, "cannot be closed");
  }
  if (status == NYB_OK && rename(file->temporary, file->path) != 0) {
    status = nyb_fail_io(file->path, "cannot be replaced by the file written beside it");
  }
  if (status != NYB_OK && file->named) unlink(file->temporary);
  return status;
}

static nyb_status write_beside_and_rename(nyb_context *context, const written_file *what,
                                          const struct stat *replaced, const char *header,
                                          int64_t header_bytes) {
  const char *const slash = strrchr(what->path, '/');
  new_file file = {.path = what->path,
                   .folder_bytes = slash == NULL ? 0 : (size_t)(slash - what->path) + 1,
                   .replaced = replaced};
  const size_t name_bytes = file.folder_bytes + NAME_ROOM;
  const size_t bytes = name_bytes + (what->pieces != NULL ? (size_t)GATHER_BYTES : 0);
  file.temporary = nyb_allocate(context, bytes, NYB_SAFETENSORS_ALIGNMENT);
  if (file.temporary == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes to write a file",
                    bytes);
  }
  nyb_status status;
  if (open_unnamed(&file) || try_names(&file, open_named)) {
    status = write_and_rename(&file, what, header, header_bytes, file.temporary + name_bytes);
  } else {
    status = nyb_fail_io(file.path, "cannot be given a temporary file beside it");
  }
  nyb_release(context, file.temporary);
  return status;
}

static nyb_status write_file(nyb_context *context, const written_file *file) {
  nyb_status status = check_written(context, file);
  if (status != NYB_OK) return status;
  struct stat info; /* renaming onto /dev/null would replace the device */
  const bool replaces = stat(file->path, &info) == 0;
  if (replaces && !S_ISREG(info.st_mode)) {
    return nyb_fail(NYB_ERROR_IO, "%s is %s; only a regular file can be replaced",
                    nyb_shown_path(file->path).text,
                    S_ISDIR(info.st_mode) ? "a directory" : "a device, pipe or socket");
  }
  char *header = NULL;
  int64_t header_bytes = 0;
  status = make_header(context, file, &header, &header_bytes);
  if (status != NYB_OK) return status;
  status = write_beside_and_rename(context, file, replaces ? &info : NULL, header, header_bytes);
  nyb_release(context, header);
  return status;
}

nyb_status nyb_safetensors_write_pieces(nyb_context *context, const char *path,
                                        const nyb_safetensors_tensor *tensors, int64_t tensor_count,
                                        const nyb_metadata *metadata, int64_t metadata_count,
                                        const nyb_pieces *pieces) {
  const written_file file = {path, tensors, tensor_count, metadata, metadata_count, pieces};
  return write_file(context, &file);
}

nyb_status nyb_safetensors_write(nyb_context *context, const char *path,
                                 const nyb_safetensors_tensor *tensors, int64_t tensor_count,
                                 const nyb_metadata *metadata, int64_t metadata_count) {
  if (context == NULL || path == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; context and path must be set",
                    context == NULL ? "context" : "path");
  }
  const written_file file = {path, tensors, tensor_count, metadata, metadata_count, NULL};
  return write_file(context, &file);
}
