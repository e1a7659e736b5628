/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors files: what is written reads back, and every way a file can be wrong is refused with
 * its own sentence. Built twice: over mmap, and over plain reading (NYB_NO_MMAP). */
#if defined(__linux__)
#define _GNU_SOURCE /* O_TMPFILE */
#else
#define _POSIX_C_SOURCE 200809L
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "nybble.h"

/* ---- A context that counts its memory, and a folder of its own ------------------------------ */

typedef struct memory_count {
  int64_t live_blocks;
  size_t allocated_bytes, largest_bytes;
} memory_count;

static memory_count memory;
static nyb_context *context;
static char folder[64];

static void *counting_allocate(void *user_data, size_t bytes, size_t alignment) {
  memory_count *count = user_data;
  count->live_blocks++;
  count->allocated_bytes += bytes;
  if (bytes > count->largest_bytes) count->largest_bytes = bytes;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void counting_release(void *user_data, void *block) {
  ((memory_count *)user_data)->live_blocks--;
  free(block);
}

static int set_up(void **state) {
  (void)state;
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 1;
  options.allocator = (nyb_allocator){counting_allocate, counting_release, &memory};
  if (nyb_context_create(&options, &context) != NYB_OK) return -1;
  strcpy(folder, "/tmp/nybble-safetensors-XXXXXX");
  return mkdtemp(folder) == NULL ? -1 : 0;
}

static int tear_down(void **state) {
  (void)state;
  DIR *listing = opendir(folder);
  for (struct dirent *entry; listing != NULL && (entry = readdir(listing)) != NULL;) {
    unlinkat(dirfd(listing), entry->d_name, 0);
  }
  if (listing != NULL) closedir(listing);
  rmdir(folder);
  nyb_context_destroy(context);
  return memory.live_blocks == 0 ? 0 : -1;
}

static const char *in_folder(const char *name) {
  static char path[4][512];
  static int next;
  next = (next + 1) % 4;
  snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
  return path[next];
}

/* A file of a header length, a header and data_bytes bytes 0, 1, 2, ... */
static const char *make_file(uint64_t header_length, const char *header, size_t header_bytes,
                             size_t data_bytes) {
  const char *path = in_folder("made.safetensors");
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  unsigned char length[8];
  for (int i = 0; i < 8; i++) length[i] = (unsigned char)(header_length >> 8 * i);
  assert_int_equal(fwrite(length, 1, 8, file), 8);
  assert_int_equal(fwrite(header, 1, header_bytes, file), header_bytes);
  for (size_t i = 0; i < data_bytes; i++) fputc((int)(i & 0xff), file);
  assert_int_equal(fclose(file), 0);
  return path;
}

static const char *make_text(const char *header, size_t data_bytes) {
  return make_file(strlen(header), header, strlen(header), data_bytes);
}

static nyb_safetensors *open_or_fail(const char *path) {
  nyb_safetensors *file = NULL;
  if (nyb_safetensors_open(context, path, &file) != NYB_OK) fail_msg("%s", nyb_last_error());
  return file;
}

/* Opening is refused with this status, a sentence that holds `words`, and no trace left behind. */
static void expect_refusal(const char *path, nyb_status wanted, const char *words) {
  const int64_t live_blocks = memory.live_blocks;
  nyb_safetensors *const untouched = (nyb_safetensors *)&memory;
  nyb_safetensors *file = untouched;
  const nyb_status status = nyb_safetensors_open(context, path, &file);
  if (status != wanted || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("%s: %s; wanted %s with \"%s\"", nyb_status_name(status), nyb_last_error(),
             nyb_status_name(wanted), words);
  }
  assert_ptr_equal(file, untouched);
  assert_int_equal(memory.live_blocks, live_blocks);
}

/* ---- Round trips ---------------------------------------------------------------------------- */

static const unsigned char bytes_to_write[64] = {1, 2, 3, 250, 0, 17, 99, 128, 255};

static const nyb_safetensors_tensor all_dtypes[] = {
    {"f64", "F64", 2, {1, 2}, bytes_to_write, 16},
    {"f32", "F32", 1, {3}, bytes_to_write + 1, 12},
    {"f16", "F16", 3, {1, 3, 1}, bytes_to_write, 6},
    {"bf16", "BF16", 1, {1}, bytes_to_write, 2},
    {"i64", "I64", 0, {0}, bytes_to_write, 8},
    {"u64", "U64", 1, {2}, bytes_to_write, 16},
    {"i32", "I32", 8, {1, 1, 1, 1, 1, 1, 1, 2}, bytes_to_write, 8},
    {"u32", "U32", 1, {1}, bytes_to_write, 4},
    {"i16", "I16", 1, {1}, bytes_to_write, 2},
    {"u16", "U16", 1, {1}, bytes_to_write, 2},
    {"i8", "I8", 1, {3}, bytes_to_write, 3},
    {"u8", "U8", 1, {5}, bytes_to_write, 5},
    {"bool", "BOOL", 1, {1}, bytes_to_write, 1},
    {"c64", "C64", 1, {1}, bytes_to_write, 8},
    {"e4m3", "F8_E4M3", 1, {1}, bytes_to_write, 1},
    {"e5m2", "F8_E5M2", 1, {1}, bytes_to_write, 1},
    {"e8m0", "F8_E8M0", 1, {1}, bytes_to_write, 1},
    {"empty", "F32", 3, {4, 0, INT64_MAX}, NULL, 0},
    {"", "U8", 1, {1}, bytes_to_write, 1},
    {"quote \" backslash \\ slash / newline \n bell \a del \x7f", "U8", 1, {1}, bytes_to_write, 1},
    {"caf\xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\xa6\x84", "U8", 1, {2}, bytes_to_write, 2},
};
enum { ALL_DTYPES = (int)(sizeof all_dtypes / sizeof all_dtypes[0]) };

static const nyb_metadata some_metadata[] = {{"format", "nybble"},
                                             {"", "the empty key"},
                                             {"empty value", ""},
                                             {"tab\t\"", "\x01\x1f\\u0041"}};

static void expect_same_tensor(const nyb_safetensors_tensor *read,
                               const nyb_safetensors_tensor *written) {
  assert_string_equal(read->name, written->name);
  assert_string_equal(read->dtype, written->dtype);
  assert_int_equal(read->rank, written->rank);
  for (int64_t i = 0; i < read->rank; i++) assert_int_equal(read->shape[i], written->shape[i]);
  assert_int_equal(read->data_bytes, written->data_bytes);
  if (read->data_bytes > 0) {
    assert_memory_equal(read->data, written->data, (size_t)written->data_bytes);
  }
}

static void test_what_is_written_reads_back(void **state) {
  (void)state;
  const char *path = in_folder("round-trip.safetensors");
  assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, ALL_DTYPES, some_metadata, 4),
                   NYB_OK);
  nyb_safetensors *file = open_or_fail(path);
  assert_int_equal(nyb_safetensors_count(file), ALL_DTYPES);
  nyb_safetensors_tensor tensor;
  for (int i = 0; i < ALL_DTYPES; i++) {
    assert_int_equal(nyb_safetensors_at(file, i, &tensor), NYB_OK);
    expect_same_tensor(&tensor, &all_dtypes[i]);
    memset(&tensor, 0, sizeof tensor);
    assert_int_equal(nyb_safetensors_find(file, all_dtypes[i].name, &tensor), NYB_OK);
    expect_same_tensor(&tensor, &all_dtypes[i]);
  }
  assert_int_equal(nyb_safetensors_at(file, 0, &tensor), NYB_OK);
  assert_int_equal((uintptr_t)tensor.data % 8, 0);
  assert_int_equal(nyb_safetensors_metadata_count(file), 4);
  for (int i = 0; i < 4; i++) {
    nyb_metadata item;
    assert_int_equal(nyb_safetensors_metadata_at(file, i, &item), NYB_OK);
    assert_string_equal(item.key, some_metadata[i].key);
    assert_string_equal(item.value, some_metadata[i].value);
  }
  /* Writing over a file that is being read from leaves the open one as it was. */
  assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, 1, NULL, 0), NYB_OK);
  assert_int_equal(nyb_safetensors_find(file, "u8", &tensor), NYB_OK);
  assert_memory_equal(tensor.data, bytes_to_write, 5);
  nyb_safetensors_close(file);
  file = open_or_fail(path);
  assert_int_equal(nyb_safetensors_count(file), 1);
  assert_int_equal(nyb_safetensors_metadata_count(file), 0);
  nyb_safetensors_close(file);
}

static void test_empty_file(void **state) {
  (void)state;
  const char *path = in_folder("empty.safetensors");
  assert_int_equal(nyb_safetensors_write(context, path, NULL, 0, NULL, 0), NYB_OK);
  struct stat info;
  assert_int_equal(stat(path, &info), 0);
  assert_int_equal(info.st_size, 16); /* "{}" and six spaces */
  nyb_safetensors *file = open_or_fail(path);
  assert_int_equal(nyb_safetensors_count(file), 0);
  nyb_safetensors_tensor tensor;
  assert_int_equal(nyb_safetensors_find(file, "x", &tensor), NYB_ERROR_NOT_FOUND);
  nyb_safetensors_close(file);
}

static void test_the_recorded_trace(void **state) {
  (void)state;
  nyb_safetensors *file = open_or_fail("examples/smollm2-135m.safetensors");
  assert_true(nyb_safetensors_count(file) >= 9);
  assert_true(nyb_safetensors_metadata_count(file) >= 1);
  for (int64_t i = 0; i < nyb_safetensors_count(file); i++) {
    nyb_safetensors_tensor tensor, found;
    assert_int_equal(nyb_safetensors_at(file, i, &tensor), NYB_OK);
    assert_int_equal(nyb_safetensors_find(file, tensor.name, &found), NYB_OK);
    expect_same_tensor(&found, &tensor);
    assert_string_equal(tensor.dtype, "BF16");
  }
  nyb_safetensors_close(file);
}

/* ---- Files that are as they should be, in other hands' spelling ----------------------------- */

static void test_spellings_that_json_allows(void **state) {
  (void)state;
  /* Any order of keys and of places, spaces, escapes, surrogate pairs. */
  const char *header =
      "{ \"b\" :\t{\"data_offsets\":[4 , 6],\"shape\":[2],\"dtype\":\"U8\"} ,\r\n"
      "\"__metadata__\":{\"k\\u00e9\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"},"
      "\"\\ud83e\\udd84\\u0041\":{\"d\\u0074ype\":\"F\\u00332\",\"shape\":[],"
      "\"data_offsets\":[0,4]}, \"none\":{\"dtype\":\"I64\",\"shape\":[0,7],"
      "\"data_offsets\":[6,6]}}  \n ";
  nyb_safetensors *file = open_or_fail(make_text(header, 6));
  assert_int_equal(nyb_safetensors_count(file), 3);
  nyb_safetensors_tensor tensor;
  assert_int_equal(nyb_safetensors_at(file, 0, &tensor), NYB_OK);
  expect_same_tensor(&tensor, &(nyb_safetensors_tensor){"b", "U8", 1, {2}, "\4\5", 2});
  assert_int_equal(nyb_safetensors_find(file,
                                        "\xf0\x9f\xa6\x84"
                                        "A",
                                        &tensor),
                   NYB_OK);
  assert_int_equal(tensor.rank, 0);
  assert_string_equal(tensor.dtype, "F32");
  assert_int_equal(nyb_safetensors_find(file, "none", &tensor), NYB_OK);
  assert_int_equal(tensor.data_bytes, 0);
  nyb_metadata item;
  assert_int_equal(nyb_safetensors_metadata_at(file, 0, &item), NYB_OK);
  assert_string_equal(item.key, "k\xc3\xa9");
  assert_string_equal(item.value, "\"\\/\b\f\n\r\t");
  nyb_safetensors_close(file);
}

/* ---- Files that are not what they should be ------------------------------------------------- */

#define X_U8 "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}"
#define FORMAT NYB_ERROR_FILE_FORMAT

static const struct refused_header {
  const char *header;
  size_t data_bytes;
  nyb_status status;
  const char *words;
} refused_headers[] = {
    /* JSON that is none */
    {"  {}", 0, FORMAT, "byte 0 must be the { that opens"},
    {"[]", 0, FORMAT, "byte 0 must be the {"},
    {"{", 0, NYB_ERROR_FILE_FORMAT, "which must be 2"},
    {"{ ", 0, FORMAT, "byte 2 must be the \" that opens a string; it is its end"},
    {"{}}", 0, FORMAT, "byte 2 must be a space, after the closing }"},
    {"{},", 0, FORMAT, "byte 2"},
    {"{,}", 0, FORMAT, "byte 1 must be the \""},
    {"{\"x\"}", 0, FORMAT, "must be : after a key"},
    {"{\"x\":}", 0, FORMAT, "tensor \"x\" (at header byte 5) must be an object"},
    {"{\"x\":1}", 0, FORMAT, "must be an object"},
    {"{\"x\":[]}", 0, FORMAT, "must be an object"},
    {"{\"x\":null}", 0, FORMAT, "must be an object"},
    {X_U8, 4, FORMAT, "must be , or }"},
    {X_U8 ",}", 4, FORMAT, "the \" that opens a string; it is }"},
    {X_U8 " \"y\":{}}", 4, FORMAT, "must be , or }; it is \""},
    {"{'x':{}}", 0, FORMAT, "byte 1 must be the \""},
    {"{x:{}}", 0, FORMAT, "byte 1 must be the \""},
    {"{\"x", 0, FORMAT, "the \" that closes a string"},
    {"{\"x\\", 0, FORMAT, "after a backslash; it is its end"},
    {"{\"\\x41\":{}}", 0, FORMAT, "after a backslash; it is x"},
    {"{\"\\u12g4\":{}}", 0, FORMAT, "four hexadecimal digits"},
    {"{\"\\u12", 0, FORMAT, "four hexadecimal digits"},
    {"{\"\\ud83e\":{}}", 0, FORMAT, "half a surrogate pair"},
    {"{\"\\udd84\":{}}", 0, FORMAT, "half a surrogate pair"},
    {"{\"\\ud83e\\u0041\":{}}", 0, FORMAT, "half a surrogate pair"},
    {"{\"\\ud83e\\ud83e\":{}}", 0, FORMAT, "half a surrogate pair"},
    {"{\"\\ud83e\\n\":{}}", 0, FORMAT, "half a surrogate pair"},
    {"{\"\\u0000\":{}}", 0, FORMAT, "holds U+0000"},
    {"{\"a\nb\":{}}", 0, FORMAT, "without control characters, inside a string; it is byte 0x0a"},
    {"{\"\xff\":{}}", 0, FORMAT, "well-formed UTF-8"},
    {"{\"\xc0\x80\":{}}", 0, FORMAT, "well-formed UTF-8"},
    {"{\"\xe0\x80\x80\":{}}", 0, FORMAT, "well-formed UTF-8"},
    {"{\"\xed\xa0\x80\":{}}", 0, FORMAT, "well-formed UTF-8"},
    {"{\"\xf4\x90\x80\x80\":{}}", 0, FORMAT, "well-formed UTF-8"},
    {"{\"\xe6\xbc", 0, FORMAT, "well-formed UTF-8"},
    {"\xef\xbb\xbf{}", 0, FORMAT, "byte 0 must be the {"},
    /* tensors */
    {"{\"x\":{}}", 0, FORMAT, "\"x\" has no dtype"},
    {"{\"x\":{\"dtype\":\"U8\"}}", 0, FORMAT, "\"x\" has no shape"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[]}}", 0, FORMAT, "\"x\" has no data_offsets"},
    {"{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0, FORMAT, "two keys \"dtype\""},
    {"{\"x\":{\"shape\":[],\"sha\\u0070e\":[]}}", 0, FORMAT, "two keys \"shape\""},
    {"{\"x\":{\"strides\":[1]}}", 0, FORMAT, "a key \"strides\"; there are dtype"},
    {"{\"x\":{\"dtype\":8}}", 0, FORMAT, "the \" that opens a string; it is 8"},
    {"{\"x\":{\"dtype\":null}}", 0, FORMAT, "the \" that opens a string; it is n"},
    {"{\"x\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1, FORMAT,
     "\"x\": dtype is \"F4\", which is none"},
    {"{\"x\":{\"dtype\":\"u8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, FORMAT,
     "dtype is \"u8\""},
    {"{\"x\":{\"shape\":4}}", 0, FORMAT, "shape (at header byte 14) must be an array"},
    {"{\"x\":{\"shape\":{}}}", 0, FORMAT, "must be an array"},
    {"{\"x\":{\"shape\":[1,1,1,1,1,1,1,1,1]}}", 0, FORMAT, "shape has more than 8 numbers"},
    {"{\"x\":{\"shape\":[1 1]}}", 0, FORMAT, "must be , or ]; it is 1"},
    {"{\"x\":{\"shape\":[1,]}}", 0, FORMAT, "the first digit of a size; it is ]"},
    {"{\"x\":{\"shape\":[[1]]}}", 0, FORMAT, "the first digit of a size; it is ["},
    {"{\"x\":{\"shape\":[\"1\"]}}", 0, FORMAT, "the first digit of a size; it is \""},
    {"{\"x\":{\"shape\":[true]}}", 0, FORMAT, "the first digit of a size; it is t"},
    {"{\"x\":{\"shape\":[-1]}}", 0, FORMAT, "shape holds -1; it must be a whole number"},
    {"{\"x\":{\"shape\":[-0]}}", 0, FORMAT, "shape holds -0;"},
    {"{\"x\":{\"shape\":[01]}}", 0, FORMAT, "shape holds 01;"},
    {"{\"x\":{\"shape\":[1.0]}}", 0, FORMAT, "shape holds 1.0;"},
    {"{\"x\":{\"shape\":[1e2]}}", 0, FORMAT, "shape holds 1e2;"},
    {"{\"x\":{\"shape\":[9223372036854775808]}}", 0, FORMAT, "shape holds 9223372036854775808;"},
    {"{\"x\":{\"shape\":[99999999999999999999999999999999999999999]}}", 0, FORMAT,
     "shape holds 999"},
    {"{\"x\":{\"data_offsets\":[0]}}", 0, FORMAT, "data_offsets holds 1 numbers"},
    {"{\"x\":{\"data_offsets\":[]}}", 0, FORMAT, "data_offsets holds 0 numbers"},
    {"{\"x\":{\"data_offsets\":[0,1,2]}}", 0, FORMAT, "data_offsets has more than 2"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", 4, FORMAT,
     "data_offsets begin at 4, after their end at 0"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,5]}}", 5, FORMAT,
     "data_offsets give 5 bytes, but its shape in U8 takes 4"},
    {"{\"x\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, FORMAT,
     "its shape in F64 takes 8"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     FORMAT, "the bytes of its shape leave int64"},
    {"{\"x\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
     FORMAT, "the bytes of its shape leave int64"},
    /* places */
    {X_U8 "}", 3, NYB_ERROR_FILE_TRUNCATED,
     "\"x\" ends at byte 4 of the data, of which the file holds 3"},
    {X_U8 "}", 0, NYB_ERROR_FILE_TRUNCATED, "holds 0"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[9223372036854775806,"
     "9223372036854775807]}}",
     4, NYB_ERROR_FILE_TRUNCATED, "ends at byte 9223372036854775807"},
    {X_U8 "}", 5, FORMAT, "the last 1 bytes of the file belong to no tensor"},
    {"{}", 1, FORMAT, "the last 1 bytes"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 5, FORMAT,
     "bytes 0 to 1 of the data, before tensor \"x\", belong to no tensor"},
    {X_U8 ",\"y\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]}}", 5, FORMAT,
     "\"y\" begins at byte 3 of the data, inside tensor \"x\", which ends at 4"},
    {X_U8 ",\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, FORMAT,
     "inside tensor"},
    {X_U8 ",\"y\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}", 4, FORMAT,
     "\"y\" begins at byte 2 of the data, inside tensor \"x\""},
    {X_U8 ",\"y\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[6,7]}}", 7, FORMAT,
     "bytes 4 to 6 of the data, before tensor \"y\""},
    {X_U8 ",\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[4,5]}}", 5, FORMAT,
     "tensor \"x\" is there twice"},
    {X_U8 ",\"\\u0078\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[4,5]}}", 5, FORMAT,
     "tensor \"x\" is there twice"},
    /* metadata */
    {"{\"__metadata__\":[]}", 0, FORMAT, "the { that opens __metadata__; it is ["},
    {"{\"__metadata__\":null}", 0, FORMAT, "the { that opens __metadata__"},
    {"{\"__metadata__\":{\"k\":1}}", 0, FORMAT, "metadata \"k\" must be a string"},
    {"{\"__metadata__\":{\"k\":{}}}", 0, FORMAT, "metadata \"k\" must be a string"},
    {"{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0, FORMAT, "metadata \"k\" is there twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, FORMAT, "two keys \"__metadata__\""},
    /* text that a terminal would obey is not repeated */
    {"{\"\\u001b[2J\\u009b\":{}}", 0, FORMAT, "tensor \"?[2J?\" has no dtype"},
};

static void test_refused_headers(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof refused_headers / sizeof refused_headers[0]; i++) {
    const struct refused_header *refused = &refused_headers[i];
    expect_refusal(make_text(refused->header, refused->data_bytes), refused->status,
                   refused->words);
  }
  /* A NUL byte is no space, no digit and no letter of an escape. */
  expect_refusal(make_file(3, "{\0}", 3, 0), FORMAT, "byte 0x00");
  expect_refusal(make_file(4, "{\"\\\0", 4, 0), FORMAT, "byte 0x00");
  expect_refusal(make_file(14, "{\"x\":{\"shape\":", 14, 0), FORMAT, "must be an array");
  expect_refusal(make_file(16, "{\"x\":{\"shape\":[\0", 16, 0), FORMAT, "byte 0x00");
}

static void test_header_lengths(void **state) {
  (void)state;
  expect_refusal(make_file(0, "{}", 2, 0), FORMAT, "a header of 0 bytes");
  expect_refusal(make_file(1, "{}", 2, 0), FORMAT, "a header of 1 bytes");
  expect_refusal(make_file(3, "{}", 2, 0), NYB_ERROR_FILE_TRUNCATED,
                 "the header is 3 bytes, of which the file holds 2");
  expect_refusal(make_file(100000000, "{}", 2, 0), NYB_ERROR_FILE_TRUNCATED, "100000000");
  expect_refusal(make_file(100000001, "{}", 2, 0), FORMAT, "no safetensors file");
  expect_refusal(make_file(UINT64_MAX, "{}", 2, 0), FORMAT, "18446744073709551615");
  expect_refusal(make_file((uint64_t)INT64_MAX - 7, "{}", 2, 0), FORMAT, "no safetensors file");
}

static void test_every_truncation(void **state) {
  (void)state;
  const char *path = in_folder("whole.safetensors");
  assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, ALL_DTYPES, some_metadata, 4),
                   NYB_OK);
  struct stat info;
  assert_int_equal(stat(path, &info), 0);
  for (off_t length = info.st_size - 1; length >= 0; length--) {
    assert_int_equal(truncate(path, length), 0);
    expect_refusal(path, NYB_ERROR_FILE_TRUNCATED, path);
  }
}

/* Each byte of the header in turn becomes something else. What still opens must be sound. */
static void test_every_changed_byte(void **state) {
  (void)state;
  const char *header = X_U8 ",\"y\":{\"dtype\":\"F16\",\"shape\":[1,2],\"data_offsets\":[4,8]}}";
  const char changes[] = {'0', '9', '"', '\\', '{', '}', '[', ']', ',', ' ', '\0', '\x80', '-'};
  char changed[256];
  int opened = 0;
  for (size_t at = 0; at < strlen(header); at++) {
    for (size_t i = 0; i < sizeof changes; i++) {
      strcpy(changed, header);
      changed[at] = changes[i];
      nyb_safetensors *file = NULL;
      const char *path = make_file(strlen(header), changed, strlen(header), 8);
      if (nyb_safetensors_open(context, path, &file) != NYB_OK) continue;
      int64_t bytes = 0;
      for (int64_t t = 0; t < nyb_safetensors_count(file); t++) {
        nyb_safetensors_tensor tensor;
        assert_int_equal(nyb_safetensors_at(file, t, &tensor), NYB_OK);
        assert_int_equal(*(const unsigned char *)tensor.data, t * 4);
        bytes += tensor.data_bytes;
      }
      assert_int_equal(bytes, 8);
      nyb_safetensors_close(file);
      opened++;
    }
  }
  assert_in_range(opened, 20, 100); /* other names, and the same byte again */
}

/* ---- Hostile sizes -------------------------------------------------------------------------- */

/* Of processor time, so that other programs on the machine do not count. */
static double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void expect_quick_refusal(const char *header, size_t header_bytes, const char *words) {
  const char *path = make_file(header_bytes, header, header_bytes, 0);
  memory.largest_bytes = 0;
  const double start = seconds_now();
  expect_refusal(path, FORMAT, words);
  assert_true(seconds_now() - start < 20); /* anything quadratic takes minutes */
#if !defined(NYB_NO_MMAP)
  assert_true(memory.largest_bytes <= header_bytes + 64);
#endif
}

static void test_hostile_headers_cost_little(void **state) {
  (void)state;
  const size_t bytes = 20 * 1000 * 1000;
  char *header = malloc(bytes);
  memset(header, '{', bytes);
  expect_quick_refusal(header, bytes, "byte 1 must be");
  memset(header, '[', bytes);
  memcpy(header, "{\"x\":{\"shape\":", 14);
  expect_quick_refusal(header, bytes, "the first digit of a size; it is [");
  memset(header, '9', bytes);
  memcpy(header, "{\"x\":{\"shape\":[", 15);
  expect_quick_refusal(header, bytes, "shape holds 99999999999999999999999999999999;");
  memset(header, 'n', bytes); /* a name of 20 MB, cut in the sentence */
  memcpy(header, "{\"", 2);
  memcpy(header + bytes - 5, "\":[]}", 5);
  expect_quick_refusal(header, bytes, "nnn...\" (at header byte");
  for (size_t i = 0; i + 1 < bytes; i += 2) memcpy(header + i, "1,", 2);
  memcpy(header, "{\"x\":{\"shape\":[ ", 16);
  expect_quick_refusal(header, bytes, "shape has more than 8 numbers");
  free(header);
}

/* 200,000 tensors in falling order of names and places: time n log n, memory linear. */
static void test_many_tensors(void **state) {
  (void)state;
  const int count = 200000;
  char *header = malloc((size_t)count * 80);
  size_t used = 0;
  for (int i = 0; i < count; i++) {
    used += (size_t)sprintf(header + used,
                            "%s\"t%06d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                            i == 0 ? "{" : ",", count - i, count - i - 1, count - i);
  }
  header[used++] = '}';
  const char *path = make_file(used, header, used, (size_t)count);
  free(header);
  memory.allocated_bytes = 0;
  const double start = seconds_now();
  nyb_safetensors *file = open_or_fail(path);
  assert_true(seconds_now() - start < 20); /* anything quadratic takes minutes */
  assert_true(memory.allocated_bytes < 8 * used);
  for (int i = 1; i <= count; i += 1) {
    char name[16];
    snprintf(name, sizeof name, "t%06d", i);
    nyb_safetensors_tensor tensor;
    assert_int_equal(nyb_safetensors_find(file, name, &tensor), NYB_OK);
    assert_int_equal(*(const unsigned char *)tensor.data, (i - 1) & 0xff);
  }
  nyb_safetensors_close(file);
}

/* ---- What the operating system refuses ------------------------------------------------------ */

static void test_paths_that_cannot_be_read(void **state) {
  (void)state;
  expect_refusal(in_folder("missing"), NYB_ERROR_IO, strerror(ENOENT));
  expect_refusal("", NYB_ERROR_IO, strerror(ENOENT));
  expect_refusal(folder, NYB_ERROR_IO, "is a directory; it must be a regular file");
  expect_refusal("/dev/zero", NYB_ERROR_IO, "is a device, pipe or socket");
  const char *pipe_path = in_folder("pipe");
  assert_int_equal(mkfifo(pipe_path, 0600), 0);
  expect_refusal(pipe_path, NYB_ERROR_IO, "is a device, pipe or socket"); /* and does not wait */
  const char *empty = in_folder("none");
  fclose(fopen(empty, "w"));
  expect_refusal(empty, NYB_ERROR_FILE_TRUNCATED, "has 0 bytes");
}

static int files_in_folder(void) {
  int count = 0;
  DIR *listing = opendir(folder);
  for (struct dirent *entry; (entry = readdir(listing)) != NULL;) count += entry->d_name[0] != '.';
  rewinddir(listing);
  for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    if (strncmp(entry->d_name, ".nybble-", 8) == 0) fail_msg("left behind: %s", entry->d_name);
  }
  closedir(listing);
  return count;
}

/* Writing is refused, and the file that stood there still holds one tensor "old". */
static void expect_write_refusal(const char *path, const nyb_safetensors_tensor *tensors,
                                 int64_t tensor_count, const nyb_metadata *metadata,
                                 int64_t metadata_count, nyb_status wanted, const char *words) {
  const nyb_safetensors_tensor old = {"old", "U8", 1, {4}, bytes_to_write, 4};
  const char *target = in_folder("target.safetensors");
  assert_int_equal(nyb_safetensors_write(context, target, &old, 1, NULL, 0), NYB_OK);
  const int files = files_in_folder();
  const int64_t live_blocks = memory.live_blocks;
  const nyb_status status = nyb_safetensors_write(context, path == NULL ? target : path, tensors,
                                                  tensor_count, metadata, metadata_count);
  if (status != wanted || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("%s: %s; wanted %s with \"%s\"", nyb_status_name(status), nyb_last_error(),
             nyb_status_name(wanted), words);
  }
  assert_int_equal(files_in_folder(), files);
  assert_int_equal(memory.live_blocks, live_blocks);
  nyb_safetensors *file = open_or_fail(target);
  nyb_safetensors_tensor tensor;
  assert_int_equal(nyb_safetensors_at(file, 0, &tensor), NYB_OK);
  expect_same_tensor(&tensor, &old);
  nyb_safetensors_close(file);
}

static void test_writes_that_the_system_refuses(void **state) {
  (void)state;
  expect_write_refusal(in_folder("no/such/folder"), all_dtypes, 1, NULL, 0, NYB_ERROR_IO,
                       strerror(ENOENT));
  expect_write_refusal("", all_dtypes, 1, NULL, 0, NYB_ERROR_IO, "");
  expect_write_refusal(folder, all_dtypes, 1, NULL, 0, NYB_ERROR_IO, "is a directory");
  expect_write_refusal("/dev/full", all_dtypes, 1, NULL, 0, NYB_ERROR_IO, "is a device");
  char long_name[400];
  memset(long_name, 'n', sizeof long_name - 1);
  long_name[sizeof long_name - 1] = '\0';
  expect_write_refusal(in_folder(long_name), all_dtypes, 1, NULL, 0, NYB_ERROR_IO,
                       strerror(ENAMETOOLONG));

  /* The disk fills up: in the header, in the first tensor, in the last. */
  unsigned char *large = calloc(1, 1 << 20);
  const nyb_safetensors_tensor tensors[] = {{"a", "U8", 1, {1 << 20}, large, 1 << 20},
                                            {"b", "U8", 1, {1 << 20}, large, 1 << 20}};
  struct rlimit limit;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const struct rlimit old_limit = limit;
  signal(SIGXFSZ, SIG_IGN);
  const rlim_t limits[] = {1 << 10, 1 << 19, (1 << 20) + 200000};
  for (int i = 0; i < 3; i++) {
    limit.rlim_cur = limits[i];
    char many_names[3000]; /* a header beyond the first limit */
    memset(many_names, 'k', sizeof many_names - 1);
    many_names[sizeof many_names - 1] = '\0';
    const nyb_metadata metadata = {many_names, ""};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_write_refusal(NULL, tensors, 2, &metadata, 1, NYB_ERROR_IO, strerror(EFBIG));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  }
  free(large);
}

static void test_a_link_is_replaced(void **state) {
  (void)state;
  const char *path = in_folder("link.safetensors"), *device = "/dev/null";
  assert_int_equal(symlink(device, path), 0);
  expect_write_refusal(path, all_dtypes, 1, NULL, 0, NYB_ERROR_IO, "is a device");
  assert_int_equal(unlink(path), 0);
  assert_int_equal(symlink("nowhere", path), 0);
  assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, 1, NULL, 0), NYB_OK);
  struct stat info;
  assert_int_equal(lstat(path, &info), 0);
  assert_true(S_ISREG(info.st_mode));
}

static void test_a_replaced_file_keeps_its_rights(void **state) {
  (void)state;
  const char *path = in_folder("rights.safetensors");
  const mode_t modes[] = {0600, 0640, 0444, 0755};
  struct stat info;
  assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, 1, NULL, 0), NYB_OK);
  assert_int_equal(stat(path, &info), 0);
  const mode_t mask = umask(0);
  umask(mask);
  assert_int_equal(info.st_mode & 0777, 0666 & ~mask);
  for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
    assert_int_equal(chmod(path, modes[i]), 0);
    assert_int_equal(nyb_safetensors_write(context, path, all_dtypes, 1, NULL, 0), NYB_OK);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, modes[i]);
  }
}

/* On Linux a file has no name until it is whole, where the file system can do that. */
#if defined(O_TMPFILE)
static void test_a_killed_write_leaves_nothing(void **state) {
  (void)state;
  const int probe = open(folder, O_TMPFILE | O_WRONLY, 0600);
  if (probe < 0) {
    print_message("skipped: this file system has no files without names\n");
    skip();
  }
  close(probe);
  const char *path = in_folder("killed.safetensors");
  const int files = files_in_folder();
  char *large = calloc(1, 1 << 20);
  const nyb_safetensors_tensor tensor = {"a", "U8", 1, {1 << 20}, large, 1 << 20};
  const pid_t child = fork();
  if (child == 0) { /* the system ends it amid the data */
    const struct rlimit no_core = {0, 0}, limit = {1 << 19, 1 << 19};
    signal(SIGXFSZ, SIG_DFL);
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &limit);
    nyb_safetensors_write(context, path, &tensor, 1, NULL, 0);
    _exit(0);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
  assert_int_equal(files_in_folder(), files);
  free(large);
}
#else
static void test_a_killed_write_leaves_nothing(void **state) {
  (void)state;
  skip();
}
#endif

static void test_long_paths_show_their_end(void **state) {
  (void)state;
  char name[500];
  for (size_t length = 150; length < 200; length++) { /* two bytes each: cut at either of them */
    memset(name, 'x', length);
    for (size_t i = 0; i + 2 <= length / 2; i += 2) memcpy(name + i, "\xc3\xa9", 2);
    strcpy(name + length, "/the-end.safetensors");
    nyb_safetensors *file = NULL;
    assert_int_equal(nyb_safetensors_open(context, name, &file), NYB_ERROR_IO);
    assert_non_null(strstr(nyb_last_error(), "/the-end.safetensors cannot be opened: "));
    const char *at = nyb_last_error();
    if (memcmp(at, "...", 3) == 0) at += 3;
    assert_true(((unsigned char)*at & 0xc0) != 0x80);
  }
}

/* ---- Misuse --------------------------------------------------------------------------------- */

static void test_writes_that_make_no_file(void **state) {
  (void)state;
  nyb_safetensors_tensor two[2];
  memset(two, 0, sizeof two);
  const nyb_safetensors_tensor good = {"x", "F32", 2, {2, 3}, bytes_to_write, 24};
#define REFUSED(change, status, words)                          \
  do {                                                          \
    two[0] = good;                                              \
    two[1] = good;                                              \
    two[1].name = "y";                                          \
    change;                                                     \
    expect_write_refusal(NULL, two, 2, NULL, 0, status, words); \
  } while (0)
  REFUSED(two[1].name = NULL, NYB_ERROR_NULL, "tensors[1].name is NULL");
  REFUSED(two[1].dtype = NULL, NYB_ERROR_NULL, "tensors[1].dtype is NULL");
  REFUSED(two[1].data = NULL, NYB_ERROR_NULL, "tensor \"y\": data is NULL");
  REFUSED(two[1].name = "x", NYB_ERROR_VALUE, "tensors holds \"x\" twice");
  REFUSED(two[1].name = "__metadata__", NYB_ERROR_VALUE, "keeps for metadata");
  REFUSED(two[1].name = "\xc3", NYB_ERROR_VALUE, "tensors[1].name is \"?\", which is not UTF-8");
  REFUSED(two[1].dtype = "float", NYB_ERROR_DTYPE, "dtype is \"float\"");
  REFUSED(two[1].rank = -1, NYB_ERROR_SHAPE, "rank is -1; it must be 0 to 8");
  REFUSED(two[1].rank = 9, NYB_ERROR_SHAPE, "rank is 9");
  REFUSED(two[1].shape[1] = -3, NYB_ERROR_SHAPE, "shape[1] is -3");
  REFUSED(two[1].shape[1] = 4, NYB_ERROR_SHAPE, "data_bytes is 24, but its shape in F32 takes 32");
  REFUSED(two[1].shape[1] = INT64_MAX, NYB_ERROR_SHAPE, "leave int64");
  REFUSED((two[0].rank = 1, two[0].shape[0] = INT64_MAX / 4, two[0].data_bytes = INT64_MAX / 4 * 4,
           two[1] = two[0], two[1].name = "y"),
          NYB_ERROR_SHAPE, "takes the file beyond 2^63-1 bytes");
#undef REFUSED
  expect_write_refusal(NULL, NULL, 1, NULL, 0, NYB_ERROR_NULL, "tensors is NULL");
  expect_write_refusal(NULL, NULL, -1, NULL, 0, NYB_ERROR_VALUE, "tensor_count is -1");
  expect_write_refusal(NULL, NULL, 0, NULL, 1, NYB_ERROR_NULL, "metadata is NULL");
  expect_write_refusal(NULL, NULL, 0, some_metadata, -1, NYB_ERROR_VALUE, "metadata_count is -1");
  expect_write_refusal(NULL, NULL, 0, some_metadata, INT64_MAX, NYB_ERROR_VALUE, "metadata_count");
  nyb_metadata pair[2] = {{"k", "v"}, {"k", "v"}};
  expect_write_refusal(NULL, NULL, 0, pair, 2, NYB_ERROR_VALUE, "metadata holds \"k\" twice");
  pair[1] = (nyb_metadata){NULL, "v"};
  expect_write_refusal(NULL, NULL, 0, pair, 2, NYB_ERROR_NULL, "metadata[1].key is NULL");
  pair[1] = (nyb_metadata){"l", NULL};
  expect_write_refusal(NULL, NULL, 0, pair, 2, NYB_ERROR_NULL, "metadata[1].value is NULL");
  pair[1] = (nyb_metadata){"l", "\xed\xa0\x80"};
  expect_write_refusal(NULL, NULL, 0, pair, 2, NYB_ERROR_VALUE, "metadata[1].value is \"???\"");
  char *huge = malloc(100000001); /* the header's limit */
  memset(huge, 'v', 100000000);
  huge[100000000] = '\0';
  pair[1] = (nyb_metadata){"l", huge};
  expect_write_refusal(NULL, NULL, 0, pair, 2, NYB_ERROR_VALUE, "the format allows 100000000");
  free(huge);
  assert_int_equal(nyb_safetensors_write(NULL, "x", NULL, 0, NULL, 0), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_write(context, NULL, NULL, 0, NULL, 0), NYB_ERROR_NULL);
}

static void test_misuse_of_readers(void **state) {
  (void)state;
  const char *path = make_text(X_U8 ",\"__metadata__\":{\"k\":\"v\"}}", 4);
  nyb_safetensors *file = (nyb_safetensors *)&memory;
  assert_int_equal(nyb_safetensors_open(NULL, path, &file), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_open(context, NULL, &file), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_open(context, path, NULL), NYB_ERROR_NULL);
  assert_ptr_equal(file, &memory);
  file = open_or_fail(path);
  nyb_safetensors_tensor tensor = {.rank = 77};
  nyb_metadata item = {"old", "old"};
  assert_int_equal(nyb_safetensors_at(NULL, 0, &tensor), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_at(file, 0, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_at(file, -1, &tensor), NYB_ERROR_VALUE);
  assert_int_equal(nyb_safetensors_at(file, 1, &tensor), NYB_ERROR_VALUE);
  assert_non_null(strstr(nyb_last_error(), "index is 1; the file has 1 tensors"));
  assert_int_equal(nyb_safetensors_find(NULL, "x", &tensor), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_find(file, NULL, &tensor), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_find(file, "x", NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_find(file, "X", &tensor), NYB_ERROR_NOT_FOUND);
  assert_non_null(strstr(nyb_last_error(), "no tensor \"X\""));
  assert_int_equal(tensor.rank, 77);
  assert_int_equal(nyb_safetensors_metadata_at(NULL, 0, &item), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_metadata_at(file, 0, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_safetensors_metadata_at(file, -1, &item), NYB_ERROR_VALUE);
  assert_int_equal(nyb_safetensors_metadata_at(file, 1, &item), NYB_ERROR_VALUE);
  assert_string_equal(item.key, "old");
  assert_int_equal(nyb_safetensors_count(NULL), 0);
  assert_int_equal(nyb_safetensors_metadata_count(NULL), 0);
  nyb_safetensors_close(NULL);
  nyb_safetensors_close(file);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_written_reads_back),
      cmocka_unit_test(test_empty_file),
      cmocka_unit_test(test_the_recorded_trace),
      cmocka_unit_test(test_spellings_that_json_allows),
      cmocka_unit_test(test_refused_headers),
      cmocka_unit_test(test_header_lengths),
      cmocka_unit_test(test_every_truncation),
      cmocka_unit_test(test_every_changed_byte),
      cmocka_unit_test(test_hostile_headers_cost_little),
      cmocka_unit_test(test_many_tensors),
      cmocka_unit_test(test_paths_that_cannot_be_read),
      cmocka_unit_test(test_writes_that_the_system_refuses),
      cmocka_unit_test(test_a_link_is_replaced),
      cmocka_unit_test(test_a_replaced_file_keeps_its_rights),
      cmocka_unit_test(test_a_killed_write_leaves_nothing),
      cmocka_unit_test(test_long_paths_show_their_end),
      cmocka_unit_test(test_writes_that_make_no_file),
      cmocka_unit_test(test_misuse_of_readers),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
