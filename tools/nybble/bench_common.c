/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "reference.h"
#include "statistics.h"

/* ---- Measuring ---------------------------------------------------------------------------- */

enum { MIN_REPEATS = 5, MAX_REPEATS = 100000, MIN_WARM_UP_CALLS = 2 };

static int failed(void) { return nyb_command_failed("%s", nyb_last_error()); }

static int warm_up(double seconds, nyb_bench_call call, void *data, int64_t *index) {
  const int64_t start_ns = nyb_now_ns();
  const int64_t limit_ns = (int64_t)(seconds * 1e9);
  for (int64_t calls = 0; calls < MIN_WARM_UP_CALLS || nyb_now_ns() - start_ns < limit_ns;
       calls++) {
    if (call(data, (*index)++) != NYB_OK) return failed();
  }
  return 0;
}

void nyb_bench_summarize(double *samples_us, int64_t count, nyb_timing *timing) {
  nyb_sort_samples(samples_us, count);
  *timing = (nyb_timing){.median_us = nyb_quantile(samples_us, count, 0.5),
                         .min_us = samples_us[0],
                         .p10_us = nyb_quantile(samples_us, count, 0.1),
                         .p90_us = nyb_quantile(samples_us, count, 0.9),
                         .repeats = count};
}

int nyb_bench_measure(const nyb_bench_settings *settings, const nyb_bench_context *on,
                      const nyb_bench_copies *copies, int64_t most_replays, nyb_bench_call call,
                      void *data, nyb_timing *timing) {
  if (on->backend == NYB_BACKEND_CUDA) {
    return nyb_bench_measure_device(settings, on, copies, most_replays, call, data, timing);
  }
  const int64_t most = settings->repeats > 0 ? settings->repeats : MAX_REPEATS;
  double *samples = nyb_command_allocate(most * (int64_t)sizeof *samples);
  int64_t index = 0, count = 0;
  int status = warm_up(settings->seconds / 5, call, data, &index);
  const int64_t begin_ns = nyb_now_ns();
  const int64_t limit_ns = (int64_t)(settings->seconds * 1e9);
  while (status == 0 && count < most) {
    const int64_t start_ns = nyb_now_ns();
    if (settings->repeats == 0 && count >= MIN_REPEATS && start_ns - begin_ns > limit_ns) break;
    if (call(data, index++) != NYB_OK) status = failed();
    samples[count++] = (double)(nyb_now_ns() - start_ns) * 1e-3;
  }
  if (status == 0) nyb_bench_summarize(samples, count, timing);
  free(samples);
  return status;
}

static int time_turn(const nyb_bench_turn *turn, int64_t index, double *sample_us) {
  const int64_t start_ns = nyb_now_ns();
  if (turn->call(turn->data, index) != NYB_OK) return failed();
  *sample_us = (double)(nyb_now_ns() - start_ns) * 1e-3;
  return 0;
}

void nyb_bench_summarize_turns(double *const samples_us[2], double *ratios, int64_t count,
                               nyb_bench_turn turns[2], double *ratio) {
  for (int64_t i = 0; i < count; i++) ratios[i] = samples_us[1][i] / samples_us[0][i];
  nyb_sort_samples(ratios, count);
  *ratio = nyb_quantile(ratios, count, 0.5);
  for (int i = 0; i < 2; i++) nyb_bench_summarize(samples_us[i], count, &turns[i].timing);
}

int nyb_bench_measure_in_turns(const nyb_bench_settings *settings, const nyb_bench_context *on,
                               int64_t round_calls, nyb_bench_turn turns[2], double *ratio) {
  if (on->backend == NYB_BACKEND_CUDA) {
    return nyb_bench_measure_device_in_turns(settings, on, round_calls, turns, ratio);
  }
  const int64_t most = settings->repeats > 0 ? settings->repeats : MAX_REPEATS;
  double *samples = nyb_command_allocate(3 * most * (int64_t)sizeof *samples);
  double *const of_turn[2] = {samples, samples + most};
  int64_t index = 0, count = 0;
  int status = 0;
  for (int i = 0; i < 2 && status == 0; i++) {
    status = warm_up(settings->seconds / 10, turns[i].call, turns[i].data, &index);
  }
  const int64_t begin_ns = nyb_now_ns();
  const int64_t limit_ns = (int64_t)(settings->seconds * 1e9);
  while (status == 0 && count < most) {
    if (settings->repeats == 0 && count >= MIN_REPEATS && nyb_now_ns() - begin_ns > limit_ns) break;
    status = time_turn(&turns[0], index++, &of_turn[0][count]);
    if (status == 0) status = time_turn(&turns[1], index++, &of_turn[1][count]);
    count++;
  }
  if (status == 0) nyb_bench_summarize_turns(of_turn, samples + 2 * most, count, turns, ratio);
  free(samples);
  return status;
}

/* ---- Copies ------------------------------------------------------------------------------- */

static int64_t cold_bytes(void) {
  int64_t least = 256 * 1024 * 1024;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const int64_t cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache_bytes > 0 && 2 * cache_bytes > least) least = 2 * cache_bytes;
#endif
  return least;
}

int nyb_bench_allocate_copies(const nyb_bench_run *run, int64_t bytes, nyb_bench_copies *copies) {
  const int64_t page_bytes = 4096;
  const int64_t least = run->settings->backend == NYB_BACKEND_CPU ? cold_bytes() : 1;
  if (bytes > INT64_MAX - page_bytes) return nyb_command_misused("the shape is too large");
  const int64_t copy_bytes = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  const int64_t count = (least + copy_bytes - 1) / copy_bytes;
  int64_t all_bytes;
  if (!nyb_multiply(copy_bytes, count, &all_bytes)) {
    return nyb_command_misused("the shape is too large");
  }
  const int status = nyb_command_check_memory(all_bytes, "this shape");
  if (status != 0) return status;
  *copies = (nyb_bench_copies){nyb_command_allocate(all_bytes), copy_bytes, count};
  return 0;
}

char *nyb_bench_copy(const nyb_bench_copies *copies, bool cold, int64_t index) {
  if (!cold) return copies->memory;
  /* A stride that is prime, and so visits all, unless the count is a multiple of it. */
  const int64_t stride = copies->count % 10007 == 0 ? 1 : 10007;
  return copies->memory + index % copies->count * stride % copies->count * copies->copy_bytes;
}

/* ---- Data --------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
  /* splitmix64 */
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

void nyb_bench_random(float *data, int64_t count, uint64_t seed) {
  uint64_t state = seed;
  for (int64_t i = 0; i < count; i += 2) { /* Box and Muller: two numbers at a time */
    const uint64_t bits = next_random(&state);
    const float uniform = ((float)(bits >> 40) + 1) * 0x1p-24f; /* (0, 1] */
    const float angle = (float)(bits & 0xffffffu) * (6.2831853f * 0x1p-24f);
    const float radius = sqrtf(-2 * logf(uniform));
    data[i] = radius * cosf(angle);
    if (i + 1 < count) data[i + 1] = radius * sinf(angle);
  }
}

int nyb_bench_random_as(nyb_context *context, void *data, nyb_dtype dtype, int64_t count,
                        uint64_t seed) {
  /* More than this much is repeated. */
  enum { DISTINCT = 1 << 24 };
  const int64_t all = count;
  if (count > DISTINCT) count = DISTINCT;
  float *wide = nyb_command_allocate(count * (int64_t)sizeof *wide);
  nyb_bench_random(wide, count, seed);
  nyb_quantize convert = NYB_QUANTIZE_INIT;
  convert.batch = 1;
  convert.heads = 1;
  convert.tokens = 1;
  convert.dim = count;
  convert.input = (nyb_input){.data = wide, .dtype = NYB_F32, .stride = {0, 0, count}};
  convert.output = (nyb_stored_output){.format = {.scheme = NYB_PLAIN, .dtype = dtype},
                                       .codes = data,
                                       .codes_stride = {0, 0, count}};
  const nyb_status status = nyb_quantize_run(context, &convert, NULL);
  free(wide);
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(dtype);
  for (int64_t done = count; done < all && status == NYB_OK; done += count) {
    const int64_t more = all - done < count ? all - done : count;
    memcpy((char *)data + done * element_bytes, data, (size_t)(more * element_bytes));
  }
  return status == NYB_OK ? 0 : failed();
}

bool nyb_bench_all_finite(const void *data, nyb_dtype dtype, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (!isfinite(nyb_element(data, dtype, i))) return false;
  }
  return true;
}

/* ---- Results ------------------------------------------------------------------------------ */

nyb_shape_name nyb_bench_name_shape(const nyb_bench_shape *shape, int fields) {
  nyb_shape_name name = {""};
  size_t used = 0;
  for (int i = 0; i < fields; i++) {
    used += (size_t)snprintf(name.text + used, sizeof name.text - used, "%s%lld", i == 0 ? "" : ",",
                             (long long)shape->field[i]);
  }
  return name;
}

static double gb_per_s(int64_t bytes, double time_us) { return (double)bytes * 1e-3 / time_us; }

void nyb_bench_add_timing(cJSON *result, const nyb_bench_context *context, bool cold,
                          const nyb_timing *timing, int64_t bytes) {
  cJSON_AddStringToObject(result, "temperature", cold ? "cold" : "warm");
  cJSON_AddNumberToObject(result, "threads", (double)context->threads);
  cJSON_AddStringToObject(result, "isa", nyb_isa_name(context->isa));
  nyb_json_add_number(result, "median_us", timing->median_us);
  nyb_json_add_number(result, "min_us", timing->min_us);
  nyb_json_add_number(result, "p10_us", timing->p10_us);
  nyb_json_add_number(result, "p90_us", timing->p90_us);
  cJSON_AddNumberToObject(result, "repeats", (double)timing->repeats);
  cJSON_AddNumberToObject(result, "bytes", (double)bytes);
  const double rate = gb_per_s(bytes, timing->median_us);
  nyb_json_add_number(result, "gb_per_s", rate);
  if (context->read.median_gb_per_s > 0) {
    nyb_json_add_number(result, "read_gb_per_s", context->read.median_gb_per_s);
    nyb_json_add_number(result, "share_of_read", rate / context->read.median_gb_per_s);
  }
  if (context->copy.median_gb_per_s > 0) {
    nyb_json_add_number(result, "copy_gb_per_s", context->copy.median_gb_per_s);
    nyb_json_add_number(result, "share_of_copy", rate / context->copy.median_gb_per_s);
  }
}

void nyb_bench_add_timing_cells(nyb_table *table, const nyb_timing *timing, int64_t bytes,
                                double ceiling_gb_per_s) {
  const double rate = gb_per_s(bytes, timing->median_us);
  nyb_table_add(table, "%.1f", timing->median_us);
  nyb_table_add(table, "%.1f", timing->min_us);
  nyb_table_add(table, "%.1f", timing->p10_us);
  nyb_table_add(table, "%.1f", timing->p90_us);
  nyb_table_add(table, "%lld", (long long)timing->repeats);
  nyb_table_add(table, "%.2f", rate);
  nyb_table_add(table, "%.0f%%", 100 * rate / ceiling_gb_per_s);
}
