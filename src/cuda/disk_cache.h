/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled kernels on disk: one file each, shared by all processes of a user without a lock. */
#ifndef NYB_CUDA_DISK_CACHE_H
#define NYB_CUDA_DISK_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../context.h"

/* Two hashes side by side, so that chance does not make two keys one. */
typedef struct nyb_hash {
  uint64_t half[2];
} nyb_hash;

void nyb_hash_start(nyb_hash *hash);
void nyb_hash_bytes(nyb_hash *hash, const void *data, size_t bytes);
/* With its end, so that {"ab", "c"} and {"a", "bc"} differ. */
void nyb_hash_text(nyb_hash *hash, const char *text);

/* The file of that key, checked as a whole: *data is from the context's allocator. False where
 * there is none that is whole, or no memory. */
bool nyb_disk_cache_read(const nyb_context *context, const nyb_hash *key, void **data,
                         size_t *bytes);
/* Under a temporary name, then renamed; a disk that refuses is no error. */
void nyb_disk_cache_write(const nyb_hash *key, const void *data, size_t bytes);

#endif
