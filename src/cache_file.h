/* SPDX-License-Identifier: Apache-2.0 */
/* Saved caches: what a layer's tensors and numbers are called, and what is read of them. The file
 * itself is docs/formats.md's, "Saved caches". */
#ifndef NYB_CACHE_FILE_H
#define NYB_CACHE_FILE_H

#include "cache.h"

#define NYB_FILE_MAX_LAYERS 65536
#define NYB_FILE_OWN_CLASS "NybbleCache"
#define NYB_FILE_OWN_VERSION 1

/* "12.value.biases", "2.1234.0" and the like. */
typedef struct nyb_file_name {
  char text[48];
} nyb_file_name;

/* Rows of a layer that stand in one place of the file: those of a region of the cache. Without ends
 * they are [batch, kv_heads, plane_rows, ...]; else they follow each other by sequence, head and
 * token, and ends, int64 [batch] of any alignment, says how many tokens the sequences up to each
 * have. */
typedef struct nyb_file_region {
  const char *array[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS]; /* in the file, of any alignment */
  int64_t row_bytes[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS];
  int64_t plane_rows;
  const char *ends;
} nyb_file_region;

/* A layer of a file, checked: its rows are all there. */
typedef struct nyb_file_layer {
  nyb_cache_options options; /* of a cache that can hold it */
  nyb_file_region region[NYB_CACHE_REGIONS];
  const char *dropped; /* rotating, of our own class: int64 [batch] of any alignment */
  /* mlx-lm's classes: what each sequence holds, and where a ring's oldest row is, behind the
   * keep_tokens first ones: row keep_tokens + (token - keep_tokens + turn) % (rows in the ring). */
  int64_t tokens, dropped_tokens, turn;
} nyb_file_layer;

/* What the file holds of a sequence, as a cache counts it. */
nyb_cache_sequence nyb_file_sequence_at(const nyb_file_layer *layer, int64_t sequence);

/* Rows that follow each other in the file, as nyb_cache_rows_at() gives those of a cache. */
typedef struct nyb_file_rows {
  int64_t tokens;
  const char *array[NYB_CACHE_ARRAYS];
} nyb_file_rows;
nyb_file_rows nyb_file_rows_at(const nyb_file_layer *layer, int part, int64_t sequence,
                               int64_t head, int64_t token, int64_t most_tokens);

/* The first token of a sequence that stands in a region, and the first behind those. */
typedef struct nyb_token_range {
  int64_t begin, end;
} nyb_token_range;
nyb_token_range nyb_file_region_range(const nyb_cache_options *options, nyb_cache_region region,
                                      const nyb_cache_sequence *state);

/* Reads and checks all that the file says of a layer. */
nyb_status nyb_file_read_layer(const nyb_safetensors *file, int64_t layer, nyb_file_layer *read);

#endif
