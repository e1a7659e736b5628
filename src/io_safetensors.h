/* SPDX-License-Identifier: Apache-2.0 */
/* What reading and writing safetensors files have in common. */
#ifndef NYB_IO_SAFETENSORS_H
#define NYB_IO_SAFETENSORS_H

#include "nybble.h"

#define NYB_SAFETENSORS_LENGTH_BYTES 8
#define NYB_SAFETENSORS_MAX_HEADER_BYTES 100000000 /* the format's own limit */
#define NYB_SAFETENSORS_METADATA "__metadata__"
#define NYB_SAFETENSORS_ALIGNMENT 64       /* of memory from the allocator */
#define NYB_MAX_IO_BYTES ((size_t)1 << 30) /* of one read or write; some systems refuse 2 GiB */

/* Bytes of the well-formed UTF-8 character at `at`, 0 where there is none. */
int nyb_utf8_length(const char *at, const char *end);
bool nyb_is_utf8(const char *text);

/* A file's own text made fit for a sentence on a terminal: cut to a length that leaves room for the
 * rest, control and malformed bytes replaced. */
typedef struct nyb_shown_text {
  char text[72];
} nyb_shown_text;
nyb_shown_text nyb_shown(const char *text);

/* A path for a sentence: of one too long for that its end, which says more than its beginning. */
typedef struct nyb_shown_path_text {
  char text[168];
} nyb_shown_path_text;
nyb_shown_path_text nyb_shown_path(const char *path);

/* NYB_ERROR_IO with the path, what could not be done, and errno's words. */
nyb_status nyb_fail_io(const char *path, const char *what);

/* Bytes of an element; 0 for a word that is no dtype. *word becomes static storage. */
int64_t nyb_safetensors_dtype_bytes(const char **word);

/* Bytes of a tensor; false where they leave int64. */
bool nyb_safetensors_tensor_bytes(int64_t rank, const int64_t *shape, int64_t element_bytes,
                                  int64_t *bytes);

typedef int (*nyb_compare_fn)(const void *items, int32_t left, int32_t right);

/* Fills order with 0 .. count-1, sorted. Heapsort: no memory, no recursion and no bad case that a
 * file could be made of; the C library's qsort promises none of the three. */
void nyb_sort_indices(int32_t *order, int64_t count, nyb_compare_fn compare, const void *items);

/* The index of an item that equals its neighbour in the sorted order, -1 where all differ. */
int64_t nyb_find_equal_neighbours(const int32_t *order, int64_t count, nyb_compare_fn compare,
                                  const void *items);

/* The metadata of that key; false, without a sentence, where there is none. */
bool nyb_safetensors_find_metadata(const nyb_safetensors *file, const char *key,
                                   nyb_metadata *metadata);
/* How many names of tensors, or keys of metadata, begin with `prefix`. */
int64_t nyb_safetensors_count_tensors(const nyb_safetensors *file, const char *prefix);
int64_t nyb_safetensors_count_metadata(const nyb_safetensors *file, const char *prefix);
/* The metadata whose keys begin with `prefix`, in the order of the keys: the one at `index`. */
nyb_metadata nyb_safetensors_metadata_behind(const nyb_safetensors *file, const char *prefix,
                                             int64_t index);

/* nyb_safetensors_write() of tensors that lie in pieces: their data is NULL, and `next` gives them,
 * tensor after tensor and from offset 0 on: it sets *piece to the bytes of `tensor` that begin at
 * `offset` and returns how many follow each other there, at least 1. */
typedef struct nyb_pieces {
  int64_t (*next)(void *data, int64_t tensor, int64_t offset, const char **piece);
  void *data;
} nyb_pieces;
nyb_status nyb_safetensors_write_pieces(nyb_context *context, const char *path,
                                        const nyb_safetensors_tensor *tensors, int64_t tensor_count,
                                        const nyb_metadata *metadata, int64_t metadata_count,
                                        const nyb_pieces *pieces);

int nyb_compare_tensor_names(const void *items, int32_t left, int32_t right);
int nyb_compare_metadata_keys(const void *items, int32_t left, int32_t right);

#endif
