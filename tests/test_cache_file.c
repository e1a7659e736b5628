/* SPDX-License-Identifier: Apache-2.0 */
/* Saved caches: what is saved loads with the same bits, and what does not fit is refused with a
 * sentence of its own and leaves every cache as it was. mlx-lm itself judges the files in
 * tests/python/test_mlx_lm_cache_file.py. */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "expect.h"
#include "nybble.h"

/* ---- A context whose memory is counted, poisoned, and can run out ---------------------------- */

typedef struct test_memory {
  int64_t live_blocks, allocations;
  int64_t fail_at; /* the allocation that fails, counted from 1; 0: none */
} test_memory;

static test_memory memory;
static nyb_context *context;
static char folder[64];

static void *test_allocate(void *user_data, size_t bytes, size_t alignment) {
  test_memory *count = user_data;
  if (++count->allocations == count->fail_at) return NULL;
  void *block = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (block == NULL) return NULL;
  memset(block, 0xff, bytes);
  count->live_blocks++;
  return block;
}

static void test_release(void *user_data, void *block) {
  ((test_memory *)user_data)->live_blocks--;
  free(block);
}

static int set_up(void **state) {
  (void)state;
  memory = (test_memory){0};
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 2;
  options.allocator = (nyb_allocator){test_allocate, test_release, &memory};
  if (nyb_context_create(&options, &context) != NYB_OK) return -1;
  strcpy(folder, "/tmp/nybble-cache-file-XXXXXX");
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
  static char path[4][128];
  static int next;
  next = (next + 1) % 4;
  snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
  return path[next];
}

/* ---- Caches ---------------------------------------------------------------------------------- */

static const nyb_format affine4 = {NYB_AFFINE, 4, 64, NYB_BF16};
static const nyb_format affine8 = {NYB_AFFINE, 8, 64, NYB_BF16};
static const nyb_format affine3 = {NYB_AFFINE, 3, 32, NYB_F16};
static const nyb_format plain_bf16 = {NYB_PLAIN, 0, 0, NYB_BF16};
static const nyb_format plain_f32 = {NYB_PLAIN, 0, 0, NYB_F32};

static nyb_cache *make_cache(const nyb_cache_options *options) {
  nyb_cache *cache = NULL;
  expect_ok(nyb_cache_create(context, options, &cache));
  return cache;
}

static float *random_floats(int64_t count, uint64_t seed) {
  float *data = malloc((size_t)count * sizeof *data);
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    data[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
  }
  return data;
}

/* Appends rows of numbers that follow from the seed. */
static void append(nyb_cache *cache, const nyb_cache_options *options, int64_t tokens,
                   uint64_t seed) {
  const int64_t planes = options->batch * options->kv_heads;
  float *key = random_floats(planes * tokens * options->key_dim, seed);
  float *value = random_floats(planes * tokens * options->value_dim, seed + 1);
  nyb_append call = NYB_APPEND_INIT;
  call.tokens = tokens;
  call.key = (nyb_input){
      key,
      NYB_F32,
      {options->kv_heads * tokens * options->key_dim, tokens * options->key_dim, options->key_dim}};
  call.value = (nyb_input){value,
                           NYB_F32,
                           {options->kv_heads * tokens * options->value_dim,
                            tokens * options->value_dim, options->value_dim}};
  expect_ok(nyb_cache_append(cache, &call, NULL));
  free(key);
  free(value);
}

static nyb_cache *filled(const nyb_cache_options *options, int64_t tokens, uint64_t seed) {
  nyb_cache *cache = make_cache(options);
  append(cache, options, tokens, seed);
  return cache;
}

/* Everything that a cache holds, in one block: its lengths, then each row's bytes. */
typedef struct contents {
  unsigned char *bytes;
  size_t count, room;
} contents;

static void add(contents *to, const void *bytes, size_t count) {
  if (to->count + count >= to->room) {
    to->room = 2 * (to->count + count) + 1;
    to->bytes = realloc(to->bytes, to->room);
    assert_non_null(to->bytes);
  }
  memcpy(to->bytes + to->count, bytes, count);
  to->count += count;
}

static void add_rows(contents *to, const nyb_stored *rows, int64_t dim, int64_t b, int64_t h,
                     int64_t t) {
  const bool affine = rows->format.scheme == NYB_AFFINE;
  const size_t element = affine ? 4 : nyb_dtype_bytes(rows->format.dtype);
  const int64_t code =
      b * rows->codes_stride[0] + h * rows->codes_stride[1] + t * rows->codes_stride[2];
  add(to, (const char *)rows->codes + code * (int64_t)element,
      affine ? (size_t)(dim * rows->format.bits / 8) : (size_t)dim * element);
  if (!affine) return;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
  const size_t row_bytes = (size_t)(dim / rows->format.group_size * scale_bytes);
  add(to,
      (const char *)rows->scales +
          scale_bytes * (b * rows->scales_stride[0] + h * rows->scales_stride[1] +
                         t * rows->scales_stride[2]),
      row_bytes);
  add(to,
      (const char *)rows->biases +
          scale_bytes * (b * rows->biases_stride[0] + h * rows->biases_stride[1] +
                         t * rows->biases_stride[2]),
      row_bytes);
}

/* Where a view has token t of sequence b. */
typedef struct place {
  const nyb_stored *k, *v;
  int64_t block, slot;
} place;

static place place_of(const nyb_attention *view, int64_t b, int64_t t) {
  if (view->pages.table != NULL) {
    const int64_t page = t / view->pages.page_tokens;
    return (place){&view->k, &view->v, view->pages.table[b * view->pages.table_stride + page],
                   t % view->pages.page_tokens};
  }
  const int64_t keep = view->ring.keep_tokens;
  if (view->ring.offsets != NULL && t >= keep) {
    const int64_t slots = view->capacity_tokens - keep;
    return (place){&view->k, &view->v, b, keep + (t - keep + view->ring.offsets[b]) % slots};
  }
  if (t < view->first.tokens) return (place){&view->first.k, &view->first.v, b, t};
  if (view->last.tokens > 0 && t >= view->last_begins[b]) {
    return (place){&view->last.k, &view->last.v, b, t % view->last.tokens};
  }
  return (place){&view->k, &view->v, b, t - view->first.tokens};
}

static contents contents_of(const nyb_cache *cache) {
  nyb_attention view = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &view));
  contents all = {0};
  add(&all, view.lengths, (size_t)view.batch * sizeof *view.lengths);
  if (view.last_begins != NULL) {
    add(&all, view.last_begins, (size_t)view.batch * sizeof *view.last_begins);
  }
  for (int64_t b = 0; b < view.batch; b++) {
    const int64_t length = nyb_cache_length(cache, b);
    add(&all, &length, sizeof length);
    for (int64_t h = 0; h < view.kv_heads; h++) {
      for (int64_t t = 0; t < view.lengths[b]; t++) {
        const place at = place_of(&view, b, t);
        add_rows(&all, at.k, view.key_dim, at.block, h, at.slot);
        add_rows(&all, at.v, view.value_dim, at.block, h, at.slot);
      }
    }
  }
  return all;
}

static void expect_contents(const nyb_cache *cache, const contents *wanted) {
  contents got = contents_of(cache);
  assert_int_equal(got.count, wanted->count);
  assert_memory_equal(got.bytes, wanted->bytes, wanted->count);
  free(got.bytes);
}

static void expect_same(const nyb_cache *got, const nyb_cache *wanted) {
  contents all = contents_of(wanted);
  expect_contents(got, &all);
  free(all.bytes);
}

static nyb_safetensors *open_file(const char *path) {
  nyb_safetensors *file = NULL;
  expect_ok(nyb_safetensors_open(context, path, &file));
  return file;
}

static void save_one(const char *path, nyb_cache *cache) {
  expect_ok(nyb_cache_save(context, path, &cache, 1, NULL, 0, NULL));
}

/* A cache of the options that the file gives, loaded from its only layer. */
static nyb_cache *load_one(const char *path) {
  nyb_safetensors *file = open_file(path);
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  expect_ok(nyb_cache_file_options(file, 0, &options));
  nyb_cache *cache = make_cache(&options);
  expect_ok(nyb_cache_load(file, &cache, 1, NULL));
  nyb_safetensors_close(file);
  return cache;
}

/* The file says how long the sequences are. */
static void expect_lengths(const char *path, const nyb_cache *cache) {
  nyb_safetensors *file = open_file(path);
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  expect_ok(nyb_cache_file_options(file, 0, &options));
  int64_t *lengths = malloc((size_t)options.batch * sizeof *lengths);
  expect_ok(nyb_cache_file_lengths(file, 0, lengths));
  for (int64_t i = 0; i < options.batch; i++) {
    assert_int_equal(lengths[i], nyb_cache_length(cache, i));
  }
  free(lengths);
  expect_error(nyb_cache_file_lengths(file, 0, NULL), NYB_ERROR_NULL, "lengths is NULL");
  expect_error(nyb_cache_file_options(file, 0, NULL), NYB_ERROR_NULL, "options is NULL");
  expect_error(nyb_cache_file_layers(file, NULL), NYB_ERROR_NULL, "layer_count is NULL");
  nyb_safetensors_close(file);
}

/* ---- Round trips ------------------------------------------------------------------------------
 */

static void test_what_is_saved_loads(void **state) {
  (void)state;
  const struct {
    nyb_cache_options options;
    int64_t tokens;
    int64_t trimmed_of_first; /* so that the sequences differ */
  } cases[] = {
      {options_of(1, 1, affine4, 64, affine4, 64), 1, 0},
      {options_of(2, 3, affine4, 128, affine4, 64), 300, 0},
      {options_of(2, 3, affine8, 64, affine4, 192), 7, 0},
      {options_of(3, 2, affine4, 64, affine4, 64), 9, 4},
      {options_of(2, 1, affine4, 64, affine8, 64), 5, 5},
      {options_of(2, 2, affine3, 96, affine3, 32), 11, 0},
      {options_of(2, 2, plain_bf16, 3, plain_bf16, 5), 7, 0},
      {options_of(3, 1, plain_f32, 1, plain_bf16, 3), 7, 2},
      {options_of(1, 4, plain_bf16, 128, affine4, 256), 2000, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    nyb_cache *cache = filled(&cases[i].options, cases[i].tokens, i);
    expect_ok(nyb_cache_trim(cache, 0, cases[i].trimmed_of_first, NULL, NULL));
    save_one(in_folder("saved"), cache);
    nyb_cache *loaded = load_one(in_folder("saved"));
    expect_same(loaded, cache);
    expect_lengths(in_folder("saved"), cache);
    /* Both go on alike. */
    append(cache, &cases[i].options, 2, 77);
    append(loaded, &cases[i].options, 2, 77);
    expect_same(loaded, cache);
    nyb_cache_destroy(loaded);
    nyb_cache_destroy(cache);
  }
}

static nyb_cache_options rotating_of(nyb_format format, int64_t window, int64_t keep) {
  nyb_cache_options options = options_of(2, 2, format, 64, format, 64);
  options.window_tokens = window;
  options.window_keep_tokens = keep;
  return options;
}

static nyb_cache_options mixed_of(int64_t first, int64_t last, nyb_dtype dtype) {
  nyb_cache_options options = options_of(3, 2, affine4, 64, affine8, 128);
  options.first_tokens = first;
  options.last_tokens = last;
  options.part_dtype = dtype;
  return options;
}

static nyb_cache_options paged_of(nyb_format format, int64_t page_tokens) {
  nyb_cache_options options = options_of(3, 2, format, 64, format, 64);
  options.page_tokens = page_tokens;
  return options;
}

static void test_every_kind_loads(void **state) {
  (void)state;
  const struct {
    nyb_cache_options options;
    int64_t appends[6];
    int64_t trimmed_of_last;
    const char *class_name;
  } cases[] = {
      {rotating_of(plain_bf16, 8, 0), {5}, 0, "RotatingKVCache"},
      {rotating_of(plain_bf16, 8, 0), {5, 3, 1, 1}, 0, "RotatingKVCache"},
      {rotating_of(plain_f32, 8, 2), {1, 5, 1, 20}, 0, "RotatingKVCache"},
      {rotating_of(plain_f32, 8, 2), {20, 1, 1, 1}, 0, "RotatingKVCache"},
      {rotating_of(plain_f32, 8, 3), {2}, 0, "RotatingKVCache"},
      {rotating_of(plain_f32, 8, 0), {9, 9}, 8, "NybbleCache"}, /* lengths differ */
      {rotating_of(affine4, 8, 2), {20, 1, 1, 1}, 0, "NybbleCache"},
      {rotating_of(affine4, 100, 4), {90, 1}, 3, "NybbleCache"},
      {rotating_of(affine3, 33, 0), {90, 1, 1}, 0, "NybbleCache"},
      {mixed_of(4, 16, NYB_BF16), {3}, 0, "NybbleCache"},
      {mixed_of(4, 16, NYB_F16), {3, 2, 60, 1}, 0, "NybbleCache"},
      {mixed_of(4, 16, NYB_F16), {60, 1}, 5, "NybbleCache"},
      {mixed_of(4, 16, NYB_F16), {60, 1}, 59, "NybbleCache"},
      {mixed_of(4, 0, NYB_F32), {60, 1}, 0, "NybbleCache"},
      {mixed_of(0, 7, NYB_F32), {60, 1}, 30, "NybbleCache"},
      {paged_of(affine4, 16), {1}, 0, "NybbleCache"},
      {paged_of(affine4, 16), {30, 5, 1}, 7, "NybbleCache"},
      {paged_of(plain_bf16, 64), {200}, 150, "NybbleCache"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const nyb_cache_options *options = &cases[i].options;
    nyb_cache *cache = make_cache(options);
    for (int n = 0; n < 6 && cases[i].appends[n] > 0; n++) {
      append(cache, options, cases[i].appends[n], (uint64_t)n + 10 * i);
    }
    const int64_t trimmed = cases[i].trimmed_of_last;
    expect_ok(nyb_cache_trim(cache, options->batch - 1, trimmed, NULL, NULL));
    save_one(in_folder("saved"), cache);
    nyb_safetensors *file = open_file(in_folder("saved"));
    nyb_metadata item = {"", ""};
    for (int64_t n = 0; strcmp(item.key, "1.0") != 0; n++) {
      expect_ok(nyb_safetensors_metadata_at(file, n, &item));
    }
    if (strcmp(item.value, cases[i].class_name) != 0) fail_msg("case %zu: %s", i, item.value);
    nyb_safetensors_close(file);
    nyb_cache *loaded = load_one(in_folder("saved"));
    expect_same(loaded, cache);
    expect_lengths(in_folder("saved"), cache);
    const int64_t more[3] = {1, 3, 40};
    for (int n = 0; n < 3; n++) {
      append(cache, options, more[n], 77);
      append(loaded, options, more[n], 77);
      expect_same(loaded, cache);
    }
    nyb_cache_destroy(loaded);
    nyb_cache_destroy(cache);
  }
}

/* Sequences that share pages are saved whole, each of them. */
static void test_shared_pages(void **state) {
  (void)state;
  const nyb_cache_options options = paged_of(affine4, 16);
  nyb_cache *cache = filled(&options, 40, 1);
  expect_ok(nyb_cache_reorder(cache, (const int64_t[]){1, 1, 0, 1}, 4, NULL));
  save_one(in_folder("saved"), cache);
  nyb_cache *loaded = load_one(in_folder("saved"));
  expect_same(loaded, cache);
  nyb_cache_options four = options;
  four.batch = 4;
  append(cache, &four, 3, 7);
  append(loaded, &four, 3, 7);
  expect_same(loaded, cache);
  nyb_cache_destroy(loaded);
  nyb_cache_destroy(cache);
}

/* A kind is replaced by the file's rows, and refuses a file of another. */
static void test_kinds_are_not_mixed_up(void **state) {
  (void)state;
  const struct {
    nyb_cache_options options;
    nyb_status status;
    const char *words;
  } cases[] = {
      {rotating_of(affine4, 8, 2), NYB_OK, ""},
      {rotating_of(affine4, 9, 2), NYB_ERROR_VALUE, "the file's window_tokens is 8, the cache's 9"},
      {rotating_of(affine4, 8, 3), NYB_ERROR_VALUE,
       "the file's window_keep_tokens is 2, the cache's 3"},
      {options_of(2, 2, affine4, 64, affine4, 64), NYB_ERROR_VALUE,
       "the file's window_tokens is 8, the cache's 0"},
      {mixed_of(4, 4, NYB_F16), NYB_OK, ""},
      {mixed_of(5, 4, NYB_F16), NYB_ERROR_VALUE, "the file's first_tokens is 4, the cache's 5"},
      {mixed_of(4, 0, NYB_F16), NYB_ERROR_VALUE, "the file's last_tokens is 4, the cache's 0"},
      {mixed_of(4, 4, NYB_BF16), NYB_ERROR_DTYPE, "the file's part_dtype is f16, the cache's bf16"},
      {paged_of(affine4, 16), NYB_OK, ""},
      {paged_of(affine4, 32), NYB_ERROR_VALUE, "the file's page_tokens is 16, the cache's 32"},
      {options_of(3, 2, affine4, 64, affine4, 64), NYB_ERROR_VALUE,
       "the file's page_tokens is 16, the cache's 0"},
  };
  nyb_cache *saved = NULL;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    if (cases[i].status == NYB_OK) { /* the file that the ones behind it do not fit */
      nyb_cache_destroy(saved);
      saved = filled(&cases[i].options, 50, 1);
      save_one(in_folder("saved"), saved);
    }
    nyb_cache *cache = filled(&cases[i].options, 20, 2);
    contents before = contents_of(cache);
    nyb_safetensors *file = open_file(in_folder("saved"));
    const nyb_status status = nyb_cache_load(file, &cache, 1, NULL);
    if (cases[i].status == NYB_OK) {
      expect_ok(status);
      expect_same(cache, saved);
    } else {
      expect_failure(status, cases[i].status, cases[i].words, "nyb_cache_load");
      expect_contents(cache, &before);
    }
    free(before.bytes);
    nyb_safetensors_close(file);
    nyb_cache_destroy(cache);
  }
  nyb_cache_destroy(saved);
}

/* A cache whose own memory has the room keeps it, and what it held is replaced. */
static void test_loading_over_what_was_there(void **state) {
  (void)state;
  const nyb_cache_options options = options_of(2, 2, affine4, 64, affine4, 64);
  nyb_cache *saved = filled(&options, 10, 1), *cache = filled(&options, 50, 2);
  save_one(in_folder("saved"), saved);
  nyb_cache_usage before = NYB_CACHE_USAGE_INIT, after = NYB_CACHE_USAGE_INIT;
  expect_ok(nyb_cache_get_usage(cache, &before));
  nyb_safetensors *file = open_file(in_folder("saved"));
  const int64_t allocations = memory.allocations;
  expect_ok(nyb_cache_load(file, &cache, 1, NULL));
  assert_int_equal(memory.allocations, allocations + 1); /* of the call's own */
  expect_ok(nyb_cache_get_usage(cache, &after));
  assert_int_equal(after.allocated_bytes, before.allocated_bytes);
  assert_int_equal(after.reallocations, before.reallocations);
  expect_same(cache, saved);
  nyb_safetensors_close(file);
  /* And one without the room gets more. */
  append(saved, &options, 300, 3);
  save_one(in_folder("saved"), saved);
  file = open_file(in_folder("saved"));
  expect_ok(nyb_cache_load(file, &cache, 1, NULL));
  expect_same(cache, saved);
  expect_ok(nyb_cache_get_usage(cache, &after));
  assert_int_equal(after.reallocations, before.reallocations + 1);
  assert_true(after.capacity_tokens > 310);
  nyb_safetensors_close(file);
  nyb_cache_destroy(cache);
  nyb_cache_destroy(saved);
}

static void test_many_layers_and_metadata(void **state) {
  (void)state;
  enum { LAYERS = 23 };
  nyb_cache *layers[LAYERS], *loaded[LAYERS];
  for (int i = 0; i < LAYERS; i++) {
    const nyb_format key = i % 3 == 0 ? affine4 : i % 3 == 1 ? affine8 : plain_bf16;
    const nyb_cache_options options = options_of(1 + i % 2, 2, key, 64, i % 5 ? key : affine4, 128);
    layers[i] = filled(&options, 3 + i, (uint64_t)i);
  }
  const nyb_metadata metadata[] = {
      {"model", "a \"model\""}, {"a.b", "dots"}, {"caf\xc3\xa9", ""}, {"0", "digits"}};
  expect_ok(nyb_cache_save(context, in_folder("saved"), layers, LAYERS, metadata, 4, NULL));
  nyb_safetensors *file = open_file(in_folder("saved"));
  int64_t count = 0;
  expect_ok(nyb_cache_file_layers(file, &count));
  assert_int_equal(count, LAYERS);
  for (int i = 0; i < LAYERS; i++) {
    nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
    expect_ok(nyb_cache_file_options(file, i, &options));
    loaded[i] = make_cache(&options);
  }
  expect_ok(nyb_cache_load(file, loaded, LAYERS, NULL));
  for (int i = 0; i < LAYERS; i++) {
    expect_same(loaded[i], layers[i]);
    nyb_cache_destroy(loaded[i]);
    nyb_cache_destroy(layers[i]);
  }
  assert_int_equal(nyb_cache_file_metadata_count(file), 4);
  static const int by_key[4] = {3, 1, 2, 0};
  for (int i = 0; i < 4; i++) {
    nyb_metadata item;
    expect_ok(nyb_cache_file_metadata_at(file, i, &item));
    assert_string_equal(item.key, metadata[by_key[i]].key);
    assert_string_equal(item.value, metadata[by_key[i]].value);
  }
  nyb_metadata item;
  expect_error(nyb_cache_file_metadata_at(file, 4, &item), NYB_ERROR_VALUE, "index is 4");
  expect_error(nyb_cache_file_options(file, LAYERS, &(nyb_cache_options)NYB_CACHE_OPTIONS_INIT),
               NYB_ERROR_VALUE, "layer is 23; the file has 23");
  nyb_safetensors_close(file);
}

/* ---- The field's cases ------------------------------------------------------------------------
 */

static void attend(nyb_cache *cache, const nyb_cache_options *options, float *out) {
  nyb_attention attention = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &attention));
  float *query = random_floats(options->kv_heads * options->key_dim, 99);
  attention.query_heads = options->kv_heads;
  attention.query_len = 1;
  attention.scale = 0.125f;
  attention.mask = NYB_MASK_CAUSAL;
  attention.q = (nyb_input){query, NYB_F32, {0, options->key_dim, options->key_dim}};
  attention.out = (nyb_output){out, NYB_F32, {0, options->value_dim, options->value_dim}};
  nyb_plan plan = NYB_PLAN_INIT;
  expect_ok(nyb_attention_plan(context, &attention, &plan));
  void *workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes + 64);
  expect_ok(nyb_attention_run(context, &attention, workspace, plan.workspace_bytes, NULL));
  free(workspace);
  free(query);
}

/* Field case 44: a restored cache went on from offset 0. */
static void test_restored_at_284(void **state) {
  (void)state;
  const nyb_cache_options options = options_of(1, 2, affine4, 64, affine4, 64);
  nyb_cache *cache = filled(&options, 284, 1);
  save_one(in_folder("saved"), cache);
  nyb_cache *loaded = load_one(in_folder("saved"));
  assert_int_equal(nyb_cache_length(loaded, 0), 284);
  append(cache, &options, 1, 2);
  append(loaded, &options, 1, 2);
  assert_int_equal(nyb_cache_length(loaded, 0), 285);
  float wanted[128], got[128];
  memset(got, 0xff, sizeof got);
  attend(cache, &options, wanted);
  attend(loaded, &options, got);
  assert_memory_equal(got, wanted, sizeof got);
  nyb_cache_destroy(loaded);
  nyb_cache_destroy(cache);
}

/* Field case 45: all the room was saved, and its empty rows were attended to. */
static void test_three_tokens_of_256(void **state) {
  (void)state;
  const nyb_cache_options options = options_of(1, 2, affine4, 64, affine4, 64);
  nyb_cache *cache = make_cache(&options);
  expect_ok(nyb_cache_reserve(cache, 256, NULL));
  append(cache, &options, 3, 1);
  save_one(in_folder("saved"), cache);
  struct stat info;
  assert_int_equal(stat(in_folder("saved"), &info), 0);
  /* 3 tokens of 2 heads, K and V: 12 rows of 36 bytes, behind a header below 2 KiB. */
  assert_true(info.st_size < 12 * 36 + 2048);
  nyb_cache *loaded = load_one(in_folder("saved"));
  assert_int_equal(nyb_cache_length(loaded, 0), 3);
  expect_same(loaded, cache);
  nyb_cache_destroy(loaded);
  nyb_cache_destroy(cache);
}

/* Field case 46: a file of another scheme was read as this one's. */
static void test_files_that_do_not_fit_the_caches(void **state) {
  (void)state;
  const nyb_cache_options good = options_of(2, 2, affine4, 128, affine4, 64);
  nyb_cache_options first = good; /* a layer before it, which fits and must not change either */
  nyb_cache *saved[2] = {filled(&first, 5, 1), filled(&good, 5, 2)};
  expect_ok(nyb_cache_save(context, in_folder("saved"), saved, 2, NULL, 0, NULL));
  nyb_format other_group = affine4, other_dtype = affine4, plain = plain_bf16;
  other_group.group_size = 32;
  other_dtype.dtype = NYB_F16;
  nyb_cache_options limited = good;
  limited.max_tokens = 4;
  const struct {
    nyb_cache_options options;
    nyb_status status;
    const char *words;
  } cases[] = {
      {options_of(2, 2, affine8, 128, affine4, 64), NYB_ERROR_BITS,
       "layer 1: the file's keys have 4 bits, the cache's 8"},
      {options_of(2, 2, affine4, 128, affine8, 64), NYB_ERROR_BITS,
       "layer 1: the file's values have 4 bits, the cache's 8"},
      {options_of(2, 2, other_group, 128, affine4, 64), NYB_ERROR_GROUP_SIZE,
       "layer 1: the file's keys have groups of 64, the cache's of 32"},
      {options_of(2, 2, affine4, 128, other_dtype, 64), NYB_ERROR_DTYPE,
       "layer 1: the file's scales of the values are bf16, the cache's f16"},
      {options_of(2, 2, plain, 128, affine4, 64), NYB_ERROR_VALUE,
       "layer 1: the file's keys are affine, the cache's plain"},
      {options_of(3, 2, affine4, 128, affine4, 64), NYB_ERROR_SHAPE,
       "layer 1: the file's batch is 2, the cache's 3"},
      {options_of(2, 4, affine4, 128, affine4, 64), NYB_ERROR_SHAPE,
       "layer 1: the file's kv_heads is 2, the cache's 4"},
      {options_of(2, 2, affine4, 64, affine4, 64), NYB_ERROR_SHAPE,
       "layer 1: the file's key_dim is 128, the cache's 64"},
      {options_of(2, 2, affine4, 128, affine4, 128), NYB_ERROR_SHAPE,
       "layer 1: the file's value_dim is 64, the cache's 128"},
      {limited, NYB_ERROR_LENGTH, "layer 1: the file holds 5 tokens; the cache may hold 4 at most"},
  };
  nyb_safetensors *file = open_file(in_folder("saved"));
  nyb_cache *fits = filled(&first, 3, 8);
  contents fits_before = contents_of(fits);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    nyb_cache *cache = filled(&cases[i].options, 2, 9);
    contents before = contents_of(cache);
    nyb_cache *layers[2] = {fits, cache};
    expect_error(nyb_cache_load(file, layers, 2, NULL), cases[i].status, cases[i].words);
    expect_contents(cache, &before);
    expect_contents(fits, &fits_before);
    free(before.bytes);
    nyb_cache_destroy(cache);
  }
  nyb_cache *layers[3] = {fits, fits, NULL};
  expect_error(nyb_cache_load(file, layers, 1, NULL), NYB_ERROR_VALUE,
               "layer_count is 1; the file holds 2 layers");
  expect_error(nyb_cache_load(file, layers, 3, NULL), NYB_ERROR_VALUE,
               "layer_count is 3; the file holds 2 layers");
  expect_error(nyb_cache_load(file, layers, 2, NULL), NYB_ERROR_OVERLAP,
               "layers[1] is the cache of layers[0]");
  layers[1] = NULL;
  expect_error(nyb_cache_load(file, layers, 2, NULL), NYB_ERROR_NULL, "layers[1] is NULL");
  expect_error(nyb_cache_load(file, NULL, 2, NULL), NYB_ERROR_NULL, "layers is NULL");
  expect_error(nyb_cache_load(NULL, saved, 2, NULL), NYB_ERROR_NULL, "file is NULL");
  expect_error(nyb_cache_load(file, saved, 2, &memory), NYB_ERROR_VALUE, "stream is");
  expect_contents(fits, &fits_before);
  free(fits_before.bytes);
  nyb_cache_destroy(fits);
  nyb_safetensors_close(file);
  for (int i = 0; i < 2; i++) nyb_cache_destroy(saved[i]);
}

static char *read_all(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  char *all = malloc(1 << 20);
  *bytes = fread(all, 1, 1 << 20, file);
  assert_true(*bytes < 1 << 20);
  fclose(file);
  return all;
}

static void write_all(const char *path, const char *bytes, size_t count) {
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, count, file), count);
  assert_int_equal(fclose(file), 0);
}

static void test_a_file_cut_at_any_byte(void **state) {
  (void)state;
  const nyb_cache_options same = options_of(1, 1, affine4, 64, affine4, 64);
  nyb_cache_options own = same;
  own.value_format = affine8;
  nyb_cache *saved[2] = {filled(&same, 2, 1), filled(&own, 3, 2)};
  expect_ok(nyb_cache_save(context, in_folder("saved"), saved, 2, NULL, 0, NULL));
  size_t bytes = 0;
  char *all = read_all(in_folder("saved"), &bytes);
  nyb_cache *layers[2] = {filled(&same, 4, 3), filled(&own, 4, 4)};
  contents before[2] = {contents_of(layers[0]), contents_of(layers[1])};
  for (size_t cut = 0; cut < bytes; cut++) {
    write_all(in_folder("cut"), all, cut);
    nyb_safetensors *file = NULL;
    const nyb_status status = nyb_safetensors_open(context, in_folder("cut"), &file);
    if (status == NYB_OK) fail_msg("a file cut at byte %zu of %zu was opened", cut, bytes);
    assert_true(status == NYB_ERROR_FILE_TRUNCATED);
    assert_true(strstr(nyb_last_error(), "cut") != NULL);
    assert_null(file);
  }
  for (int i = 0; i < 2; i++) {
    expect_contents(layers[i], &before[i]);
    free(before[i].bytes);
  }
  nyb_safetensors *file = open_file(in_folder("saved")); /* the whole one is sound */
  expect_ok(nyb_cache_load(file, layers, 2, NULL));
  nyb_safetensors_close(file);
  for (int i = 0; i < 2; i++) {
    expect_same(layers[i], saved[i]);
    nyb_cache_destroy(layers[i]);
    nyb_cache_destroy(saved[i]);
  }
  free(all);
}

/* ---- Memory that runs out ---------------------------------------------------------------------
 */

static void test_every_allocation_may_fail(void **state) {
  (void)state;
  enum { LAYERS = 3 };
  const nyb_cache_options options = options_of(1, 2, affine4, 64, affine8, 64);
  nyb_cache *saved[LAYERS], *layers[LAYERS];
  contents before[LAYERS];
  for (int i = 0; i < LAYERS; i++) {
    saved[i] = filled(&options, 100, (uint64_t)i);
    layers[i] = filled(&options, 2, 7);
    before[i] = contents_of(layers[i]);
  }
  int failures = 0;
  for (int64_t fail_at = 1;; fail_at++, failures++) {
    memory.fail_at = memory.allocations + fail_at;
    const int64_t blocks = memory.live_blocks;
    const nyb_status status =
        nyb_cache_save(context, in_folder("saved"), saved, LAYERS, NULL, 0, NULL);
    memory.fail_at = 0;
    assert_int_equal(memory.live_blocks, blocks);
    if (status == NYB_OK) break;
    expect_failure(status, NYB_ERROR_OUT_OF_MEMORY, "the allocator had no", "save");
    assert_int_equal(access(in_folder("saved"), F_OK), -1);
  }
  assert_true(failures >= 3);
  nyb_safetensors *file = open_file(in_folder("saved"));
  failures = 0;
  for (int64_t fail_at = 1;; fail_at++, failures++) {
    memory.fail_at = memory.allocations + fail_at;
    const int64_t blocks = memory.live_blocks;
    const nyb_status status = nyb_cache_load(file, layers, LAYERS, NULL);
    memory.fail_at = 0;
    assert_int_equal(memory.live_blocks, blocks);
    if (status == NYB_OK) break;
    expect_failure(status, NYB_ERROR_OUT_OF_MEMORY, "the allocator had no", "load");
    for (int i = 0; i < LAYERS; i++) expect_contents(layers[i], &before[i]);
  }
  assert_int_equal(failures, 1 + 4 * LAYERS); /* the call's own; each layer's states and cache */
  nyb_safetensors_close(file);
  for (int i = 0; i < LAYERS; i++) {
    expect_same(layers[i], saved[i]);
    free(before[i].bytes);
    nyb_cache_destroy(layers[i]);
    nyb_cache_destroy(saved[i]);
  }
}

/* ---- Files that are none of ours --------------------------------------------------------------
 */

/* A saved file, taken apart; the tests change one thing and write it again. */
typedef struct parts {
  nyb_safetensors *file;
  nyb_safetensors_tensor tensors[64];
  nyb_metadata metadata[64];
  int64_t tensor_count, metadata_count;
} parts;

static parts take_apart(const char *path) {
  parts all = {.file = open_file(path)};
  all.tensor_count = nyb_safetensors_count(all.file);
  all.metadata_count = nyb_safetensors_metadata_count(all.file);
  assert_true(all.tensor_count <= 64 && all.metadata_count <= 64);
  for (int64_t i = 0; i < all.tensor_count; i++) {
    expect_ok(nyb_safetensors_at(all.file, i, &all.tensors[i]));
  }
  for (int64_t i = 0; i < all.metadata_count; i++) {
    expect_ok(nyb_safetensors_metadata_at(all.file, i, &all.metadata[i]));
  }
  return all;
}

static nyb_safetensors_tensor *tensor_of(parts *all, const char *name) {
  for (int64_t i = 0; i < all->tensor_count; i++) {
    if (strcmp(all->tensors[i].name, name) == 0) return &all->tensors[i];
  }
  fail_msg("no tensor %s", name);
  return NULL;
}

static void set_metadata(parts *all, const char *key, const char *value) {
  for (int64_t i = 0; i < all->metadata_count; i++) {
    if (strcmp(all->metadata[i].key, key) == 0) all->metadata[i].value = value;
  }
}

static void rename_metadata(parts *all, const char *key, const char *to) {
  for (int64_t i = 0; i < all->metadata_count; i++) {
    if (strcmp(all->metadata[i].key, key) == 0) all->metadata[i].key = to;
  }
}

static const int32_t narrow_numbers[] = {0, 1, 2, 3, 4, 5, 6, -1};
static const int64_t wide_numbers[] = {0, 1, 2, 3, 4, 5, 6, -1, 33, INT64_MAX};
static const int64_t some_ends[][2] = {{3, 2}, {-1, 3}, {0, 0}, {0, 1}, {4, 8}, {0, INT64_MAX}};

/* What each change makes of a good file, and the sentence it is refused with. */
typedef struct change {
  const char *words;
  void (*make)(parts *all);
} change;

#define CHANGE(name, body) \
  static void name(parts *all) { body; }

CHANGE(no_metadata, all->metadata_count = 0)
CHANGE(foreign_class, set_metadata(all, "1.0", "MambaCache"))
CHANGE(class_gap, rename_metadata(all, "1.1", "1.2"))
CHANGE(class_word, rename_metadata(all, "1.1", "1.one"))
CHANGE(class_zero, rename_metadata(all, "1.1", "1.01"))
CHANGE(swapped, (set_metadata(all, "1.0", "KVCache")))
CHANGE(no_keys, tensor_of(all, "0.0.0")->name = "0.9.9")
CHANGE(no_biases, tensor_of(all, "0.1.2")->name = "0.1.3")
CHANGE(no_offset, tensor_of(all, "0.2")->name = "0.6")
CHANGE(foreign_tensor, tensor_of(all, "0.1.2")->name = "x")
CHANGE(foreign_layer, tensor_of(all, "0.1.2")->name = "2.1.2")
CHANGE(float_offset, tensor_of(all, "0.2")->dtype = "F32")
CHANGE(large_offset, tensor_of(all, "0.2")->data = &narrow_numbers[4])
CHANGE(negative_offset, tensor_of(all, "0.2")->data = &narrow_numbers[7])
CHANGE(other_bits, tensor_of(all, "0.4")->data = &narrow_numbers[5])
CHANGE(no_bits, tensor_of(all, "0.4")->data = &narrow_numbers[0])
CHANGE(other_group, tensor_of(all, "0.3")->data = &narrow_numbers[2])
CHANGE(negative_group, tensor_of(all, "0.3")->data = &narrow_numbers[7])
CHANGE(float_codes, tensor_of(all, "0.0.0")->dtype = "F32")
CHANGE(integer_scales, tensor_of(all, "0.0.1")->dtype = "I16")
CHANGE(other_biases, tensor_of(all, "0.0.2")->dtype = "F16")
CHANGE(flat, tensor_of(all, "0.0.1")->rank = 3;
       memcpy(tensor_of(all, "0.0.1")->shape, ((int64_t[]){1, 2, 6}), 24))
CHANGE(other_heads, memcpy(tensor_of(all, "0.1.1")->shape, ((int64_t[]){2, 1, 3, 2}), 32))
CHANGE(wide_row, memcpy(tensor_of(all, "0.1.0")->shape, ((int64_t[]){1, 2, 1, 48}), 32))
CHANGE(own_version, tensor_of(all, "1.version")->data = &wide_numbers[2])
CHANGE(own_batch, tensor_of(all, "1.batch")->data = &wide_numbers[3])
CHANGE(own_no_batch, tensor_of(all, "1.batch")->data = &wide_numbers[0])
CHANGE(own_heads, tensor_of(all, "1.kv_heads")->data = &wide_numbers[2])
CHANGE(own_bits, tensor_of(all, "1.key.bits")->data = &wide_numbers[8])
CHANGE(own_plain, tensor_of(all, "1.key.bits")->data = &wide_numbers[0])
CHANGE(own_group, tensor_of(all, "1.key.group_size")->data = &wide_numbers[9])
CHANGE(own_backwards, tensor_of(all, "1.ends")->data = some_ends[0])
CHANGE(own_negative, tensor_of(all, "1.ends")->data = some_ends[1])
CHANGE(own_empty, tensor_of(all, "1.ends")->data = some_ends[2])
CHANGE(own_few, tensor_of(all, "1.ends")->data = some_ends[3])
CHANGE(own_many, tensor_of(all, "1.ends")->data = some_ends[4])
CHANGE(own_endless, tensor_of(all, "1.ends")->data = some_ends[5])

static const change changes[] = {
    {"is no saved cache: it has no metadata \"2.0\"", no_metadata},
    {"layer 0 is a MambaCache; nybble loads", foreign_class},
    {"names 2 layers, but none is number 1 (metadata \"1.1\")", class_gap},
    {"names 2 layers, but none is number 1", class_word},
    {"names 2 layers, but none is number 1", class_zero},
    {"layer 0: the file has no tensor \"0.0\" (keys)", swapped},
    {"layer 0: the file has no tensor \"0.0.0\" (codes of the keys)", no_keys},
    {"layer 0: the file has no tensor \"0.1.2\" (biases of the values)", no_biases},
    {"layer 0: its offset, the tensor \"0.2\", must be there", no_offset},
    {"of which its 2 layers have", foreign_tensor},
    {"of which its 2 layers have", foreign_layer},
    {"layer 0: its offset, the tensor \"0.2\", must be there", float_offset},
    {"layer 0: its offset is 4, but its tensors hold 3 tokens", large_offset},
    {"layer 0: its offset is -1, but its tensors hold 3 tokens", negative_offset},
    {"words of codes and 2 scales, which do not fit 5 bits in groups of 64", other_bits},
    {"which do not fit 0 bits in groups of 64", no_bits},
    {"which do not fit 4 bits in groups of 2", other_group},
    {"which do not fit 4 bits in groups of -1", negative_group},
    {"layer 0: the tensor \"0.0.0\" is F32; codes must be U32", float_codes},
    {"layer 0: the tensor \"0.0.1\" is I16; it must be F32, F16 or BF16", integer_scales},
    {"biases of the keys are F16 of 2 a row, scales are BF16 of 2; they must be alike",
     other_biases},
    {"has the shape [1, 2, 6]; it must have 4 axes", flat},
    {"has the shape [2, 1, 3, 2]; it must begin with [1, 2, 3]", other_heads},
    {"has the shape [1, 2, 1, 48]; it must begin with [1, 2, 3]", wide_row},
    {"layer 1: version is 2; it must be 1 to 1", own_version},
    {"layer 1: the tensor \"1.ends\" must be there, 3 numbers (I64)", own_batch},
    {"layer 1: batch is 0; it must be 1 to", own_no_batch},
    {"it must begin with [10]", own_heads},
    {"layer 1: key.bits is 33; it must be 0 to 32", own_bits},
    {"layer 1: the tensor \"1.key.codes\" is U32; it must be F32, F16 or BF16", own_plain},
    {"layer 1: key.group_size is 9223372036854775807; it must be 0 to", own_group},
    {"layer 1: ends: sequence 1 ends at 2 tokens after one that ends at 3", own_backwards},
    {"layer 1: ends: sequence 0 ends at -1 tokens after one that ends at 0", own_negative},
    {"it must begin with [0]", own_empty},
    {"it must begin with [1]", own_few},
    {"it must begin with [8]", own_many},
    {"layer 1: ends: sequence 1 ends at 9223372036854775807 tokens", own_endless},
};

/* Refused by every call that reads of it, and no cache changes. */
static void test_files_that_are_none(void **state) {
  (void)state;
  const nyb_cache_options options[2] = {options_of(1, 2, affine4, 128, affine4, 128),
                                        options_of(2, 1, affine8, 64, affine4, 64)};
  nyb_cache *layers[2] = {filled(&options[0], 3, 1), filled(&options[1], 3, 2)};
  expect_ok(nyb_cache_trim(layers[1], 0, 1, NULL, NULL));
  expect_ok(nyb_cache_save(context, in_folder("good"), layers, 2, NULL, 0, NULL));
  contents before[2] = {contents_of(layers[0]), contents_of(layers[1])};
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    parts all = take_apart(in_folder("good"));
    changes[i].make(&all);
    expect_ok(nyb_safetensors_write(context, in_folder("changed"), all.tensors, all.tensor_count,
                                    all.metadata, all.metadata_count));
    nyb_safetensors_close(all.file);
    nyb_safetensors *file = open_file(in_folder("changed"));
    expect_failure(nyb_cache_load(file, layers, 2, NULL), NYB_ERROR_FILE_FORMAT, changes[i].words,
                   "nyb_cache_load");
    nyb_safetensors_close(file);
    for (int layer = 0; layer < 2; layer++) expect_contents(layers[layer], &before[layer]);
  }
  for (int i = 0; i < 2; i++) {
    free(before[i].bytes);
    nyb_cache_destroy(layers[i]);
  }
}

/* ---- What cannot be saved ---------------------------------------------------------------------
 */

static void test_what_cannot_be_saved(void **state) {
  (void)state;
  const nyb_cache_options options = options_of(1, 2, affine4, 64, affine4, 64);
  nyb_cache *layers[3] = {filled(&options, 3, 1), make_cache(&options), NULL};
  const char *path = in_folder("saved");
  expect_error(nyb_cache_save(NULL, path, layers, 1, NULL, 0, NULL), NYB_ERROR_NULL, "context is");
  expect_error(nyb_cache_save(context, NULL, layers, 1, NULL, 0, NULL), NYB_ERROR_NULL, "path is");
  expect_error(nyb_cache_save(context, path, NULL, 1, NULL, 0, NULL), NYB_ERROR_NULL, "layers is");
  expect_error(nyb_cache_save(context, path, layers, 0, NULL, 0, NULL), NYB_ERROR_VALUE,
               "layer_count is 0; it must be 1 to 65536");
  expect_error(nyb_cache_save(context, path, layers, 2, NULL, 0, NULL), NYB_ERROR_LENGTH,
               "layers[1] is empty");
  append(layers[1], &options, 1, 1);
  expect_error(nyb_cache_save(context, path, layers, 3, NULL, 0, NULL), NYB_ERROR_NULL,
               "layers[2] is NULL");
  expect_error(nyb_cache_save(context, path, layers, 1, NULL, 1, NULL), NYB_ERROR_NULL,
               "metadata is NULL, but metadata_count is 1");
  expect_error(nyb_cache_save(context, path, layers, 1, NULL, -1, NULL), NYB_ERROR_VALUE,
               "metadata_count is -1");
  const nyb_metadata wrong[][2] = {
      {{NULL, ""}}, {{"", ""}}, {{"a", NULL}}, {{"a", "\xff"}}, {{"a", ""}, {"a", "b"}}};
  const struct {
    nyb_status status;
    const char *words;
  } sentences[] = {{NYB_ERROR_NULL, "metadata[0].key is NULL"},
                   {NYB_ERROR_VALUE, "metadata[0].key is \"\""},
                   {NYB_ERROR_NULL, "metadata[0].value is NULL"},
                   {NYB_ERROR_VALUE, "metadata[0].value is"},
                   {NYB_ERROR_VALUE, "twice"}};
  for (int i = 0; i < 5; i++) {
    expect_error(nyb_cache_save(context, path, layers, 1, wrong[i], i == 4 ? 2 : 1, NULL),
                 sentences[i].status, sentences[i].words);
  }
  expect_error(nyb_cache_save(context, path, layers, 1, NULL, 0, &memory), NYB_ERROR_VALUE,
               "stream is");
  expect_error(nyb_cache_save(context, folder, layers, 1, NULL, 0, NULL), NYB_ERROR_IO,
               "is a directory");
  expect_error(nyb_cache_save(context, "/nowhere/at/all", layers, 1, NULL, 0, NULL), NYB_ERROR_IO,
               "/nowhere/at/all");
  DIR *listing = opendir(folder); /* no file, whole or half, is left */
  for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    assert_true(entry->d_name[0] == '.' && strlen(entry->d_name) < 3);
  }
  closedir(listing);
  for (int i = 0; i < 2; i++) nyb_cache_destroy(layers[i]);
}

/* A window of one token behind those that stay: once that one is taken back, they are all. */
static void test_ring_of_its_first_tokens(void **state) {
  (void)state;
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 2;
  options.kv_heads = 1;
  options.key_dim = options.value_dim = 32;
  options.key_format = options.value_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_F32};
  options.window_tokens = 5;
  options.window_keep_tokens = 4;
  nyb_cache *cache = filled(&options, 10, 1);
  append(cache, &options, 1, 2);
  expect_ok(nyb_cache_trim(cache, NYB_ALL_SEQUENCES, 1, NULL, NULL));
  assert_int_equal(nyb_cache_length(cache, 0), 10);
  assert_int_equal(nyb_cache_held_tokens(cache, 0), 4);
  save_one(in_folder("saved"), cache);
  nyb_cache *loaded = load_one(in_folder("saved"));
  expect_same(loaded, cache);
  append(cache, &options, 3, 3);
  append(loaded, &options, 3, 3);
  expect_same(loaded, cache);
  nyb_cache_destroy(cache);
  nyb_cache_destroy(loaded);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_what_is_saved_loads, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_every_kind_loads, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_shared_pages, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_kinds_are_not_mixed_up, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_loading_over_what_was_there, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_many_layers_and_metadata, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_restored_at_284, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_three_tokens_of_256, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_files_that_do_not_fit_the_caches, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_a_file_cut_at_any_byte, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_every_allocation_may_fail, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_files_that_are_none, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_what_cannot_be_saved, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_ring_of_its_first_tokens, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
