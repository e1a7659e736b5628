/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a safetensors file: they are refused with a sentence and without a trace, or they
 * are sound (each byte of the data in exactly one tensor) and survive being written and read again.
 */
#define _GNU_SOURCE /* memfd_create */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nybble.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes);

static nyb_context *context;
static int64_t live_blocks;
static int memory_file;
static char memory_path[64], copy_path[64], folder[64];

/* More than this for files of some kilobytes is out of proportion. */
#define NYB_FUZZ_MAX_ALLOCATION ((size_t)1 << 24)

static void require(bool condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "violated: %s; last error: %s\n", what, nyb_last_error());
  abort();
}

static void *counting_allocate(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  require(bytes <= NYB_FUZZ_MAX_ALLOCATION, "memory in proportion to the file");
  live_blocks++;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void counting_release(void *user_data, void *block) {
  (void)user_data;
  live_blocks--;
  free(block);
}

static void remove_folder(void) {
  unlink(copy_path);
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
  snprintf(copy_path, sizeof copy_path, "%s/copy", folder);
  atexit(remove_folder);
}

static void put(const void *bytes, size_t count, size_t offset) {
  require(pwrite(memory_file, bytes, count, (off_t)offset) == (ssize_t)count, "a write");
}

/* An even first byte: the rest is the file as it is. An odd one: the rest is a header whose length
 * is right, and the second and third bytes say how much data follows it, so that the fuzzer need
 * not guess eight bytes of arithmetic to get past the first check. */
static void make_file(const uint8_t *input, size_t input_bytes) {
  require(ftruncate(memory_file, 0) == 0, "an empty file");
  if (input_bytes == 0) return;
  if (input[0] % 2 == 0 || input_bytes < 3) {
    put(input + 1, input_bytes - 1, 0);
    return;
  }
  const size_t header_bytes = input_bytes - 3;
  const size_t data_bytes = (size_t)input[1] + (size_t)(input[2] & 15u) * 256;
  uint8_t length[8];
  for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)header_bytes >> 8 * i);
  put(length, 8, 0);
  put(input + 3, header_bytes, 8);
  uint8_t data[4096];
  for (size_t i = 0; i < data_bytes; i++) data[i] = (uint8_t)(i * 7 + i / 256);
  put(data, data_bytes, 8 + header_bytes);
}

static nyb_safetensors_tensor tensor_at(const nyb_safetensors *file, int64_t index) {
  nyb_safetensors_tensor tensor = {0};
  require(nyb_safetensors_at(file, index, &tensor) == NYB_OK, "a tensor of that index");
  return tensor;
}

static nyb_metadata metadata_at(const nyb_safetensors *file, int64_t index) {
  nyb_metadata item = {0};
  require(nyb_safetensors_metadata_at(file, index, &item) == NYB_OK, "metadata of that index");
  return item;
}

/* Together the tensors are the data of the file, byte by byte. */
static void check_tensors(const nyb_safetensors *file) {
  uint8_t length[8];
  require(pread(memory_file, length, 8, 0) == 8, "a header length");
  off_t begin = 8;
  for (int i = 0; i < 8; i++) begin += (off_t)length[i] << 8 * i;
  const off_t data_bytes = lseek(memory_file, 0, SEEK_END) - begin;
  uint8_t *data = malloc((size_t)data_bytes + 1);
  require(pread(memory_file, data, (size_t)data_bytes, begin) == data_bytes, "the data");
  const char *lowest = NULL;
  for (int64_t i = 0; i < nyb_safetensors_count(file); i++) {
    const char *at = tensor_at(file, i).data;
    if (lowest == NULL || at < lowest) lowest = at;
  }
  int64_t bytes = 0;
  for (int64_t i = 0; i < nyb_safetensors_count(file); i++) {
    const nyb_safetensors_tensor tensor = tensor_at(file, i);
    const int64_t offset = (const char *)tensor.data - lowest;
    require(offset + tensor.data_bytes <= data_bytes, "a tensor within the file");
    require(memcmp(tensor.data, data + offset, (size_t)tensor.data_bytes) == 0, "its bytes");
    bytes += tensor.data_bytes;
    nyb_safetensors_tensor found = {0};
    require(nyb_safetensors_find(file, tensor.name, &found) == NYB_OK, "found by its name");
    require(memcmp(&found, &tensor, sizeof found) == 0, "the same by name and by index");
    require(tensor.rank <= NYB_SAFETENSORS_MAX_RANK, "a rank that fits");
  }
  require(bytes == data_bytes, "each byte in one tensor");
  free(data);
}

static void check_copy(const nyb_safetensors *file) {
  const int64_t count = nyb_safetensors_count(file);
  const int64_t metadata_count = nyb_safetensors_metadata_count(file);
  nyb_safetensors_tensor *tensors = calloc((size_t)count + 1, sizeof *tensors);
  nyb_metadata *metadata = calloc((size_t)metadata_count + 1, sizeof *metadata);
  for (int64_t i = 0; i < count; i++) tensors[i] = tensor_at(file, i);
  for (int64_t i = 0; i < metadata_count; i++) metadata[i] = metadata_at(file, i);
  require(
      nyb_safetensors_write(context, copy_path, tensors, count, metadata, metadata_count) == NYB_OK,
      "what was read can be written");
  nyb_safetensors *copy = NULL;
  require(nyb_safetensors_open(context, copy_path, &copy) == NYB_OK, "and read again");
  require(nyb_safetensors_count(copy) == count, "as many tensors");
  require(nyb_safetensors_metadata_count(copy) == metadata_count, "as much metadata");
  for (int64_t i = 0; i < count; i++) {
    const nyb_safetensors_tensor tensor = tensor_at(copy, i);
    require(strcmp(tensor.name, tensors[i].name) == 0, "the same name");
    require(strcmp(tensor.dtype, tensors[i].dtype) == 0, "the same dtype");
    require(tensor.rank == tensors[i].rank && tensor.data_bytes == tensors[i].data_bytes &&
                memcmp(tensor.shape, tensors[i].shape, sizeof tensor.shape) == 0,
            "the same shape");
    require(memcmp(tensor.data, tensors[i].data, (size_t)tensor.data_bytes) == 0, "the same data");
  }
  for (int64_t i = 0; i < metadata_count; i++) {
    const nyb_metadata item = metadata_at(copy, i);
    require(strcmp(item.key, metadata[i].key) == 0, "the same key");
    require(strcmp(item.value, metadata[i].value) == 0, "the same value");
  }
  nyb_safetensors_close(copy);
  free(tensors);
  free(metadata);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes) {
  if (context == NULL) set_up();
  make_file(input, input_bytes);
  const int64_t blocks = live_blocks;
  nyb_safetensors *const untouched = (nyb_safetensors *)&context;
  nyb_safetensors *file = untouched;
  const nyb_status status = nyb_safetensors_open(context, memory_path, &file);
  if (status == NYB_OK) {
    check_tensors(file);
    check_copy(file);
    nyb_safetensors_close(file);
  } else {
    require(status == NYB_ERROR_FILE_FORMAT || status == NYB_ERROR_FILE_TRUNCATED, "its status");
    require(file == untouched, "an untouched result");
    require(strncmp(nyb_last_error(), memory_path, strlen(memory_path)) == 0, "a sentence");
    for (const char *at = nyb_last_error(); *at != '\0'; at++) {
      require((unsigned char)*at >= 0x20 && *at != 0x7f, "a sentence fit for a terminal");
    }
  }
  require(live_blocks == blocks, "no leak");
  return 0;
}
