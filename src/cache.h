/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache as src/cache.c and the CUDA backend see it. */
#ifndef NYB_CACHE_H
#define NYB_CACHE_H

#include "context.h"
#include "format.h"

#define NYB_PLANE_ALIGNMENT 64

enum { NYB_KEY, NYB_VALUE, NYB_CACHE_PARTS };
enum { NYB_CODES, NYB_SCALES, NYB_BIASES, NYB_CACHE_ARRAYS };

typedef struct nyb_cache_part {
  nyb_format format;
  int64_t dim;
  nyb_row_layout layout;
  int64_t row_bytes[NYB_CACHE_ARRAYS]; /* 0 where the format has no such array */
} nyb_cache_part;

/* Six arrays (codes, scales and biases of K and of V) lie in one block. Each array is cut into
 * planes, one for each batch entry and head, in which the rows of its tokens follow each other; a
 * plane has room for capacity_tokens rows and starts at a multiple of NYB_PLANE_ALIGNMENT bytes.
 * What lies beyond a sequence's length has no meaning, and may never have been written. */
typedef struct nyb_cache_storage {
  void *block; /* NULL while there is no capacity */
  int64_t bytes, capacity_tokens;
  char *array[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS];
  int64_t plane_bytes[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS];
} nyb_cache_storage;

struct nyb_cuda_cache; /* src/cuda/cache.c */

struct nyb_cache {
  nyb_context *context;
  int64_t batch, kv_heads;
  nyb_cache_part part[NYB_CACHE_PARTS];
  nyb_rule rule;
  int64_t limit_tokens;      /* max_tokens, or what an int32_t can count */
  nyb_cache_storage storage; /* CUDA: in device memory */
  int64_t reallocations, copied_bytes;
  struct nyb_cuda_cache *cuda; /* NULL on the CPU */
  const int32_t
      *view_lengths; /* what nyb_cache_view() gives: lengths, or their twin on the device */
  int32_t lengths[]; /* [batch], as the host counts */
};

/* Sizes of a storage, no memory yet; NYB_ERROR_SHAPE where they leave int64. */
nyb_status nyb_cache_size_storage(const nyb_cache *cache, int64_t capacity_tokens,
                                  nyb_cache_storage *storage);
/* Sets storage->array from storage->block. */
void nyb_cache_place_arrays(const nyb_cache *cache, nyb_cache_storage *storage);
/* The capacity that a cache grows to on its own. */
int64_t nyb_cache_grown_capacity(const nyb_cache *cache, int64_t needed_tokens);
/* Tokens of the longest sequence. */
int64_t nyb_cache_longest(const nyb_cache *cache);
/* Bytes of the tokens that are there. */
int64_t nyb_cache_used_bytes(const nyb_cache *cache);
/* A storage's keys or values as rows, [batch, kv_heads, capacity_tokens]. */
nyb_stored nyb_cache_stored(const nyb_cache *cache, const nyb_cache_storage *storage, int part);

#endif
