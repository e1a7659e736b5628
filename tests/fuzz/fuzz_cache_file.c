/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a saved cache: they are refused with a sentence, and no cache changes, or they load,
 * and what is saved of that loads again to the same.
 *
 * An even first byte: the rest is the file as it is. An odd one: two bytes, little-endian, say how
 * many bytes at the end are data; what stands between is the header, whose length is made to fit.
 */
#define _GNU_SOURCE /* memfd_create */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nybble.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes);

enum { MOST_LAYERS = 8 };

static nyb_context *context;
static int64_t live_blocks;
static int memory_file;
static char memory_path[64], saved_path[64], again_path[64], folder[64];

/* A file of some kilobytes may ask for windows and pages of any size: those are not to be had. */
#define NYB_FUZZ_MAX_ALLOCATION ((size_t)1 << 22)

static void require(bool condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "violated: %s; last error: %s\n", what, nyb_last_error());
  abort();
}

static void *counting_allocate(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  if (bytes > NYB_FUZZ_MAX_ALLOCATION) return NULL;
  live_blocks++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void counting_release(void *user_data, void *block) {
  (void)user_data;
  live_blocks--;
  free(block);
}

static void remove_folder(void) {
  unlink(saved_path);
  unlink(again_path);
  rmdir(folder);
}

static void set_up(void) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 1;
  options.allocator = (nyb_allocator){counting_allocate, counting_release, NULL};
  require(nyb_context_create(&options, &context) == NYB_OK, "a context");
  memory_file = memfd_create("fuzz", 0);
  snprintf(memory_path, sizeof memory_path, "/proc/self/fd/%d", memory_file);
  strcpy(folder,
         access("/dev/shm", W_OK) == 0 ? "/dev/shm/nybble-fuzz-XXXXXX" : "/tmp/nybble-fuzz-XXXXXX");
  require(memory_file >= 0 && mkdtemp(folder) != NULL, "a folder");
  snprintf(saved_path, sizeof saved_path, "%s/saved", folder);
  snprintf(again_path, sizeof again_path, "%s/again", folder);
  atexit(remove_folder);
}

static void put(const void *bytes, size_t count, size_t offset) {
  require(pwrite(memory_file, bytes, count, (off_t)offset) == (ssize_t)count, "a write");
}

static void make_file(const uint8_t *input, size_t input_bytes) {
  require(ftruncate(memory_file, 0) == 0, "an empty file");
  if (input_bytes == 0) return;
  if (input[0] % 2 == 0 || input_bytes < 3) {
    put(input + 1, input_bytes - 1, 0);
    return;
  }
  size_t data_bytes = (size_t)input[1] + (size_t)input[2] * 256;
  if (data_bytes > input_bytes - 3) data_bytes = input_bytes - 3;
  const size_t header_bytes = input_bytes - 3 - data_bytes;
  uint8_t length[8];
  for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)header_bytes >> 8 * i);
  put(length, 8, 0);
  put(input + 3, input_bytes - 3, 8);
}

/* Caches as the file's options say; false where one is not to be had. */
static bool create_layers(const nyb_safetensors *file, int64_t count, nyb_cache **layers) {
  for (int64_t i = 0; i < count; i++) {
    nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
    nyb_status status = nyb_cache_file_options(file, i, &options);
    if (status != NYB_OK) {
      require(status == NYB_ERROR_FILE_FORMAT, "the status of options");
      return false;
    }
    status = nyb_cache_create(context, &options, &layers[i]);
    require(status == NYB_OK || status == NYB_ERROR_OUT_OF_MEMORY || status == NYB_ERROR_SHAPE,
            "options of which a cache can be made");
    if (status != NYB_OK) return false;
  }
  return true;
}

static bool same_bytes(const char *left, const char *right) {
  FILE *const a = fopen(left, "rb"), *const b = fopen(right, "rb");
  require(a != NULL && b != NULL, "two files");
  int x, y;
  do {
    x = getc(a);
    y = getc(b);
  } while (x == y && x != EOF);
  fclose(a);
  fclose(b);
  return x == y;
}

/* What was saved of these loads into others, of which the same is saved. */
static void check_saved(int64_t count, nyb_cache *const *layers) {
  const nyb_status status = nyb_cache_save(context, saved_path, layers, count, NULL, 0, NULL);
  if (status == NYB_ERROR_LENGTH) return; /* mlx-lm's may have been trimmed to nothing */
  require(status == NYB_OK, "what was loaded can be saved");
  nyb_cache *others[MOST_LAYERS] = {NULL};
  nyb_safetensors *file = NULL;
  require(nyb_safetensors_open(context, saved_path, &file) == NYB_OK, "and opened");
  if (create_layers(file, count, others)) {
    require(nyb_cache_load(file, others, count, NULL) == NYB_OK, "and loaded");
    require(nyb_cache_save(context, again_path, others, count, NULL, 0, NULL) == NYB_OK,
            "and saved again");
    require(same_bytes(saved_path, again_path), "to the same bytes");
  }
  nyb_safetensors_close(file);
  for (int i = 0; i < MOST_LAYERS; i++) nyb_cache_destroy(others[i]);
}

static void check_file(const nyb_safetensors *file) {
  int64_t count = -1;
  const nyb_status listed = nyb_cache_file_layers(file, &count);
  if (listed != NYB_OK) {
    require(listed == NYB_ERROR_FILE_FORMAT && count == -1, "the status of layers");
    return;
  }
  if (count > MOST_LAYERS) return;
  nyb_cache *layers[MOST_LAYERS] = {NULL};
  if (create_layers(file, count, layers)) {
    const nyb_status status = nyb_cache_load(file, layers, count, NULL);
    require(status == NYB_OK || status == NYB_ERROR_OUT_OF_MEMORY || status == NYB_ERROR_SHAPE,
            "options of which the file can be loaded");
    if (status == NYB_OK) {
      check_saved(count, layers);
    } else {
      for (int64_t i = 0; i < count; i++) {
        require(nyb_cache_length(layers[i], 0) == 0, "a cache as it was");
      }
    }
  }
  for (int i = 0; i < MOST_LAYERS; i++) nyb_cache_destroy(layers[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes) {
  if (context == NULL) set_up();
  make_file(input, input_bytes);
  const int64_t blocks = live_blocks;
  nyb_safetensors *file = NULL;
  if (nyb_safetensors_open(context, memory_path, &file) == NYB_OK) {
    check_file(file);
    nyb_safetensors_close(file);
  }
  require(live_blocks == blocks, "no leak");
  return 0;
}
