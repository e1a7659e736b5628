/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench cache-file: loading a saved cache from the page cache, beside reading the same file
 * with read(2) into memory of its size, in turns. Memory is either held (caches with the room, a
 * buffer that has been written to) or fresh (made for each load, the caches too). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "progress.h"

enum { LAYERS, KV_HEADS, HEAD_DIM, TOKENS, FIELDS };
enum { CHUNK_TOKENS = 256, MIN_PAIRS = 5, MAX_PAIRS = 1000, MAX_LAYERS = 1024 };

static const nyb_bench_shape default_shapes[] = {
    {{32, 8, 128, 29184}}, /* 1 GiB at 4 bits */
};

typedef struct file_bench {
  nyb_bench_run *run;
  const nyb_bench_context *on;
  nyb_cache_options options;
  int64_t layer_count;
  nyb_cache *layers[MAX_LAYERS];
  char path[256];
  int descriptor;
  int64_t file_bytes;
  char *buffer; /* of the file's size */
} file_bench;

static int library_failed(void) { return nyb_command_failed("%s", nyb_last_error()); }

/* ---- The file ------------------------------------------------------------------------------ */

static int fill_cache(const file_bench *bench, nyb_cache *cache, int64_t tokens) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t heads = bench->options.kv_heads, dim = bench->options.key_dim;
  const int64_t elements = heads * CHUNK_TOKENS * dim;
  void *rows = nyb_command_allocate(elements * (int64_t)nyb_dtype_bytes(settings->dtype));
  int status = nyb_bench_random_as(bench->run->preparer, rows, settings->dtype, elements, 1);
  nyb_append append = NYB_APPEND_INIT;
  append.key = append.value =
      (nyb_input){rows, settings->dtype, {elements, CHUNK_TOKENS * dim, dim}};
  for (int64_t left = tokens; left > 0 && status == 0; left -= append.tokens) {
    append.tokens = left < CHUNK_TOKENS ? left : CHUNK_TOKENS;
    if (nyb_cache_append(cache, &append, NULL) != NYB_OK) status = library_failed();
  }
  free(rows);
  return status;
}

/* One layer, as often as there are layers. */
static int write_file(file_bench *bench, int64_t tokens) {
  nyb_cache *cache;
  if (nyb_cache_create(bench->on->context, &bench->options, &cache) != NYB_OK) {
    return library_failed();
  }
  int status = fill_cache(bench, cache, tokens);
  if (status == 0) {
    nyb_cache *layers[MAX_LAYERS];
    for (int64_t i = 0; i < bench->layer_count; i++) layers[i] = cache;
    if (nyb_cache_save(bench->on->context, bench->path, layers, bench->layer_count, NULL, 0,
                       NULL) != NYB_OK) {
      status = library_failed();
    }
  }
  nyb_cache_destroy(cache);
  if (status != 0) return status;
  bench->descriptor = open(bench->path, O_RDONLY | O_CLOEXEC);
  bench->file_bytes = bench->descriptor < 0 ? 0 : lseek(bench->descriptor, 0, SEEK_END);
  return bench->file_bytes > 0 ? 0 : nyb_command_failed("%s cannot be opened", bench->path);
}

/* ---- What is measured ---------------------------------------------------------------------- */

static int create_layers(file_bench *bench) {
  for (int64_t i = 0; i < bench->layer_count; i++) {
    if (nyb_cache_create(bench->on->context, &bench->options, &bench->layers[i]) != NYB_OK) {
      return library_failed();
    }
  }
  return 0;
}

static void destroy_layers(file_bench *bench) {
  for (int64_t i = 0; i < bench->layer_count; i++) {
    nyb_cache_destroy(bench->layers[i]);
    bench->layers[i] = NULL;
  }
}

/* The file is opened each time: a mapping is part of a load's cost. */
static int load_once(file_bench *bench, bool fresh) {
  int status = fresh ? create_layers(bench) : 0;
  nyb_safetensors *file = NULL;
  if (status == 0 && nyb_safetensors_open(bench->on->context, bench->path, &file) != NYB_OK) {
    status = library_failed();
  }
  if (status == 0 && nyb_cache_load(file, bench->layers, bench->layer_count, NULL) != NYB_OK) {
    status = library_failed();
  }
  nyb_safetensors_close(file);
  return status;
}

static int read_once(file_bench *bench, bool fresh) {
  if (fresh) bench->buffer = malloc((size_t)bench->file_bytes);
  if (bench->buffer == NULL) return nyb_command_failed("no memory to read the file into");
  for (int64_t done = 0; done < bench->file_bytes;) {
    const ssize_t count = pread(bench->descriptor, bench->buffer + done,
                                (size_t)(bench->file_bytes - done), (off_t)done);
    if (count <= 0) return nyb_command_failed("%s cannot be read", bench->path);
    done += count;
  }
  return 0;
}

static void release_fresh(file_bench *bench) {
  destroy_layers(bench);
  free(bench->buffer);
  bench->buffer = NULL;
}

/* Reads and loads in turns, so that what else the machine does meets both. */
static int measure(file_bench *bench, bool fresh, nyb_timing *read, nyb_timing *load) {
  const nyb_bench_settings *settings = bench->run->settings;
  double read_us[MAX_PAIRS], load_us[MAX_PAIRS];
  const int64_t most =
      settings->repeats > 0 && settings->repeats < MAX_PAIRS ? settings->repeats : MAX_PAIRS;
  const int64_t begin_ns = nyb_now_ns();
  int64_t count = -1; /* the first pair warms up */
  int status = 0;
  for (; count < most && status == 0; count++) {
    const double seconds = (double)(nyb_now_ns() - begin_ns) * 1e-9;
    if (settings->repeats == 0 && count >= MIN_PAIRS && seconds > settings->seconds) break;
    const int64_t start_ns = nyb_now_ns();
    status = read_once(bench, fresh);
    const int64_t middle_ns = nyb_now_ns();
    if (status == 0) status = load_once(bench, fresh);
    const int64_t end_ns = nyb_now_ns();
    if (fresh) release_fresh(bench);
    if (count < 0) continue;
    read_us[count] = (double)(middle_ns - start_ns) * 1e-3;
    load_us[count] = (double)(end_ns - middle_ns) * 1e-3;
  }
  if (status != 0) return status;
  nyb_bench_summarize(read_us, count, read);
  nyb_bench_summarize(load_us, count, load);
  return 0;
}

/* ---- Results ------------------------------------------------------------------------------- */

static double gb_per_s(const file_bench *bench, double us) {
  return (double)bench->file_bytes / us * 1e-3;
}

static void report(const file_bench *bench, const nyb_bench_shape *shape, nyb_width width,
                   bool fresh, const nyb_timing *read, const nyb_timing *load) {
  const char *memory = fresh ? "fresh" : "held";
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", "cache-file");
  nyb_json_add_integers(result, "shape", shape->field, FIELDS);
  cJSON_AddNumberToObject(result, "k_bits", width.key_bits);
  cJSON_AddNumberToObject(result, "v_bits", width.value_bits);
  cJSON_AddStringToObject(result, "memory", memory);
  cJSON_AddNumberToObject(result, "threads", (double)bench->on->threads);
  cJSON_AddNumberToObject(result, "bytes", (double)bench->file_bytes);
  cJSON_AddNumberToObject(result, "repeats", (double)load->repeats);
  nyb_json_add_number(result, "load_median_us", load->median_us);
  nyb_json_add_number(result, "load_min_us", load->min_us);
  nyb_json_add_number(result, "read_median_us", read->median_us);
  nyb_json_add_number(result, "read_min_us", read->min_us);
  cJSON_AddItemToArray(bench->run->results, result);

  nyb_table *table = bench->run->table;
  nyb_table_add(table, "%s", nyb_bench_name_shape(shape, FIELDS).text);
  nyb_table_add(table, "%s", nyb_name_width(width).text);
  nyb_table_add(table, "%s", memory);
  nyb_table_add(table, "%lld", (long long)bench->on->threads);
  nyb_table_add(table, "%.1f", (double)bench->file_bytes * 1e-6);
  nyb_table_add(table, "%.1f", load->median_us * 1e-3);
  nyb_table_add(table, "%.1f", load->min_us * 1e-3);
  nyb_table_add(table, "%lld", (long long)load->repeats);
  nyb_table_add(table, "%.2f", gb_per_s(bench, load->median_us));
  nyb_table_add(table, "%.2f", gb_per_s(bench, read->median_us));
  nyb_table_add(table, "%.0f %%", 100 * read->median_us / load->median_us);
}

/* ---- Running ------------------------------------------------------------------------------- */

static int run_memory(file_bench *bench, const nyb_bench_shape *shape, nyb_width width,
                      bool fresh) {
  nyb_timing read, load;
  int status = 0;
  if (!fresh) {
    bench->buffer = nyb_command_allocate(bench->file_bytes);
    status = create_layers(bench);
  }
  if (status == 0) status = measure(bench, fresh, &read, &load);
  release_fresh(bench);
  if (status == 0) report(bench, shape, width, fresh, &read, &load);
  return status;
}

static int run_width(nyb_bench_run *run, const nyb_bench_context *on, const nyb_bench_shape *shape,
                     nyb_width width) {
  const nyb_bench_settings *settings = run->settings;
  file_bench bench = {.run = run, .on = on, .layer_count = shape->field[LAYERS], .descriptor = -1};
  if (bench.layer_count > MAX_LAYERS) {
    return nyb_command_misused("%lld layers are more than %d", (long long)bench.layer_count,
                               MAX_LAYERS);
  }
  bench.options = (nyb_cache_options)NYB_CACHE_OPTIONS_INIT;
  bench.options.batch = 1;
  bench.options.kv_heads = shape->field[KV_HEADS];
  bench.options.key_dim = bench.options.value_dim = shape->field[HEAD_DIM];
  bench.options.key_format =
      nyb_width_format(width.key_bits, settings->group_size, settings->dtype);
  bench.options.value_format =
      nyb_width_format(width.value_bits, settings->group_size, settings->dtype);
  nyb_progress_show("cache-file %s, %s", nyb_bench_name_shape(shape, FIELDS).text,
                    nyb_name_width(width).text);
  const char *folder = getenv("TMPDIR");
  snprintf(bench.path, sizeof bench.path, "%s/nybble-bench-XXXXXX",
           folder == NULL || folder[0] == '\0' ? "/tmp" : folder);
  const int made = mkstemp(bench.path);
  if (made < 0) return nyb_command_failed("%s cannot be made", bench.path);
  close(made);
  int status = write_file(&bench, shape->field[TOKENS]);
  for (int fresh = 0; fresh < 2 && status == 0; fresh++) {
    status = run_memory(&bench, shape, width, fresh == 1);
  }
  if (bench.descriptor >= 0) close(bench.descriptor);
  unlink(bench.path);
  return status;
}

static int run_shapes(nyb_bench_run *run) {
  const nyb_bench_settings *settings = run->settings;
  int status = 0;
  for (int64_t s = 0; s < settings->shape_count; s++) {
    for (int64_t w = 0; w < settings->widths.count; w++) {
      for (int64_t c = 0; c < run->context_count && status == 0; c++) {
        status = run_width(run, &run->contexts[c], &settings->shapes[s], settings->widths.items[w]);
      }
    }
  }
  return status;
}

const nyb_bench_operation nyb_bench_cache_file = {
    .name = "cache-file",
    .columns =
        "<layers,Hkv,D,N|<cache|<memory|>threads|>MB|>median ms|>min|>repeats|>GB/s|"
        ">read(2) GB/s|>of read(2)",
    .shape_fields = FIELDS,
    .shape_words = "LAYERS,Hkv,D,N",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .on_cpu = true,
    .run = run_shapes,
};
