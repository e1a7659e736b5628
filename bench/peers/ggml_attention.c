/* SPDX-License-Identifier: Apache-2.0 */

/* Times ggml's flash attention on the CPU for one query row per sequence, and checks its
 * result against a double precision attention over the same, dequantized keys and values.
 *
 * Also builds against ik_llama.cpp's fork of ggml (PEER_IS_IK). */

#define _DEFAULT_SOURCE
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ggml.h"
#ifdef PEER_IS_IK
/* Its fast kernel runs with a mask only, whose rows are padded. */
enum { NEEDS_MASK = 1, MASK_ROWS = GGML_KQ_MASK_PAD };
#else
#include "ggml-cpu.h"
enum { NEEDS_MASK = 0, MASK_ROWS = 1 };
#endif

enum {
  MAX_SHAPES = 32,
  MAX_TYPES = 3,
  MAX_THREADS = 256,
  MAX_REPEATS = 2000,
  MIN_REPEATS = 5,
  WARM_UP_RUNS = 2,
  NORMAL_POOL_SIZE = 1 << 20,
  MAX_BUFFER_SETS = 2048,
  BANDWIDTH_PASSES = 9,
};

static const size_t mebibyte = 1024 * 1024;
static const size_t bandwidth_bytes = 512 * 1024 * 1024;
static const size_t huge_page_bytes = 2 * 1024 * 1024;
static const size_t cache_line_bytes = 64;

typedef struct shape {
  int64_t batch, query_heads, kv_heads, head_dim, tokens;
} shape;

/* Where the rows of one cache lie: all tokens of a head side by side, or, as llama.cpp
 * stores them, all heads of a token. ggml sees [head_dim, tokens, kv_heads, batch] in both. */
typedef enum layout { LAYOUT_HEADS_FIRST, LAYOUT_TOKENS_FIRST } layout;

typedef struct options {
  shape shapes[MAX_SHAPES];
  int shape_count;
  enum ggml_type types[MAX_TYPES];
  int type_count;
  int threads;
  layout layout;
  double seconds_per_timing;
  size_t cold_bytes;
  bool zero_mask, huge_pages, check, bandwidth, json;
} options;

typedef struct timing {
  double median_us, min_us, p10_us, p90_us;
  int repeats;
} timing;

typedef struct bandwidth {
  double median_gb_per_s, best_gb_per_s;
} bandwidth;

/* One buffer set: K and V of their own, so that going round the sets reads cold memory. */
typedef struct buffer_set {
  void *k, *v;
  struct ggml_cgraph *graph;
  struct ggml_cplan plan;
} buffer_set;

typedef struct problem {
  shape shape;
  enum ggml_type type;
  layout layout;
  size_t row_bytes, cache_bytes;
  int set_count;
  buffer_set *sets;
  float *q, *out;
  void *mask, *work;
  struct ggml_context *context;
} problem;

static struct timespec program_start;

static _Noreturn void fail(const char *what) {
  fprintf(stderr, "ggml_attention: error: %s\n", what);
  exit(1);
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)(now.tv_sec - program_start.tv_sec) * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void *allocate(size_t size_bytes, bool huge_pages) {
  const size_t alignment_bytes = huge_pages ? huge_page_bytes : cache_line_bytes;
  const size_t rounded_bytes =
      (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  void *memory = aligned_alloc(alignment_bytes, rounded_bytes);
  if (memory == NULL) fail("out of memory; ask for fewer tokens or a smaller --cold-mib");
  if (huge_pages) madvise(memory, rounded_bytes, MADV_HUGEPAGE);
  memset(memory, 0, rounded_bytes);
  return memory;
}

/* ---- random input ---- */

static uint64_t random_state = UINT64_C(0x9e3779b97f4a7c15);

static uint64_t random_u64(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

static double random_unit(void) { return ((double)(random_u64() >> 11) + 0.5) * 0x1p-53; }

static void fill_normal(float *values, int64_t count) {
  const double two_pi = 6.283185307179586;
  for (int64_t i = 0; i < count; i += 2) {
    const double radius = sqrt(-2.0 * log(random_unit())), angle = two_pi * random_unit();
    values[i] = (float)(radius * cos(angle));
    if (i + 1 < count) values[i + 1] = (float)(radius * sin(angle));
  }
}

/* Each row is a random window of one large pool of normal numbers: as good as fresh ones
 * for timing and much quicker to make. ggml's own routine quantizes it. */
static void fill_cache(const problem *p, const float *normal_pool, void *cache) {
  const int64_t rows = p->shape.batch * p->shape.kv_heads * p->shape.tokens;
  const uint64_t windows = (uint64_t)(NORMAL_POOL_SIZE - p->shape.head_dim);
  for (int64_t row = 0; row < rows; row++) {
    const float *source = normal_pool + random_u64() % windows;
    ggml_quantize_chunk(p->type, source, (char *)cache + (size_t)row * p->row_bytes, 0, 1,
                        p->shape.head_dim, NULL);
  }
}

/* ---- the graph ---- */

static struct ggml_tensor *cache_tensor(const problem *p, void *data) {
  const shape *s = &p->shape;
  const bool heads_first = p->layout == LAYOUT_HEADS_FIRST;
  struct ggml_tensor *stored =
      ggml_new_tensor_4d(p->context, p->type, s->head_dim, heads_first ? s->tokens : s->kv_heads,
                         heads_first ? s->kv_heads : s->tokens, s->batch);
  stored->data = data;
  return heads_first ? stored : ggml_permute(p->context, stored, 0, 2, 1, 3);
}

static void build_graph(problem *p, buffer_set *set) {
  const shape *s = &p->shape;
  struct ggml_tensor *q =
      ggml_new_tensor_4d(p->context, GGML_TYPE_F32, s->head_dim, 1, s->query_heads, s->batch);
  q->data = p->q;
  struct ggml_tensor *mask = NULL;
  if (p->mask != NULL) {
    mask = ggml_new_tensor_4d(p->context, GGML_TYPE_F16, s->tokens, MASK_ROWS, 1, 1);
    mask->data = p->mask;
  }
  const float scale = (float)(1.0 / sqrt((double)s->head_dim));
  struct ggml_tensor *out = ggml_flash_attn_ext(p->context, q, cache_tensor(p, set->k),
                                                cache_tensor(p, set->v), mask, scale, 0.0f, 0.0f);
  out->data = p->out;
  set->graph = ggml_new_graph_custom(p->context, 16, false);
  ggml_build_forward_expand(set->graph, out);
}

static void plan_graph(buffer_set *set, int threads, void *threadpool) {
#ifdef PEER_IS_IK
  (void)threadpool;
  set->plan = ggml_graph_plan(set->graph, threads);
#else
  set->plan = ggml_graph_plan(set->graph, threads, threadpool);
#endif
}

static problem make_problem(const options *o, shape s, enum ggml_type type,
                            const float *normal_pool, void *threadpool) {
  problem p = {.shape = s, .type = type, .layout = o->layout};
  p.row_bytes = ggml_row_size(type, s.head_dim);
  p.cache_bytes = p.row_bytes * (size_t)(s.batch * s.kv_heads * s.tokens);
  const size_t wanted_sets = (o->cold_bytes + 2 * p.cache_bytes - 1) / (2 * p.cache_bytes);
  p.set_count = wanted_sets < 1                 ? 1
                : wanted_sets > MAX_BUFFER_SETS ? MAX_BUFFER_SETS
                                                : (int)wanted_sets;
  p.sets = calloc((size_t)p.set_count, sizeof *p.sets);
  const int64_t query_values = s.batch * s.query_heads * s.head_dim;
  p.q = allocate((size_t)query_values * sizeof(float), false);
  p.out = allocate((size_t)query_values * sizeof(float), false);
  fill_normal(p.q, query_values);
  if (o->zero_mask) {
    p.mask = allocate((size_t)s.tokens * MASK_ROWS * sizeof(ggml_fp16_t), false);
  }

  const size_t objects_per_set = 12;
  p.context = ggml_init((struct ggml_init_params){
      .mem_size = (size_t)p.set_count * (objects_per_set * ggml_tensor_overhead() +
                                         ggml_graph_overhead_custom(16, false)),
      .no_alloc = true,
  });
  if (p.sets == NULL || p.context == NULL) fail("out of memory");

  size_t work_bytes = 0;
  for (int i = 0; i < p.set_count; i++) {
    buffer_set *set = &p.sets[i];
    set->k = allocate(p.cache_bytes, o->huge_pages);
    set->v = allocate(p.cache_bytes, o->huge_pages);
    if (i == 0) {
      fill_cache(&p, normal_pool, set->k);
      fill_cache(&p, normal_pool, set->v);
    } else {
      memcpy(set->k, p.sets[0].k, p.cache_bytes);
      memcpy(set->v, p.sets[0].v, p.cache_bytes);
    }
    build_graph(&p, set);
    plan_graph(set, o->threads, threadpool);
    if (set->plan.work_size > work_bytes) work_bytes = set->plan.work_size;
  }
  p.work = allocate(work_bytes + 1, false);
  for (int i = 0; i < p.set_count; i++) p.sets[i].plan.work_data = p.work;
  return p;
}

static void free_problem(problem *p) {
  for (int i = 0; i < p->set_count; i++) {
    free(p->sets[i].k);
    free(p->sets[i].v);
  }
  free(p->sets);
  free(p->q);
  free(p->out);
  free(p->mask);
  free(p->work);
  ggml_free(p->context);
}

static double run_us(buffer_set *set) {
  const double start_us = now_us();
  const enum ggml_status status = ggml_graph_compute(set->graph, &set->plan);
  const double end_us = now_us();
  if (status != GGML_STATUS_SUCCESS) fail("ggml_graph_compute did not succeed");
  return end_us - start_us;
}

/* ---- timing ---- */

static int compare_doubles(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(const double *sorted, int count, double fraction) {
  const double position = fraction * (count - 1);
  const int below = (int)position, above = below + 1 < count ? below + 1 : below;
  return sorted[below] + (position - below) * (sorted[above] - sorted[below]);
}

static timing time_sets(problem *p, int set_count, double seconds) {
  static double samples_us[MAX_REPEATS];
  for (int i = 0; i < WARM_UP_RUNS; i++) run_us(&p->sets[set_count - 1 - i % set_count]);
  int repeats = 0;
  const double deadline_us = now_us() + seconds * 1e6;
  while (repeats < MAX_REPEATS && (repeats < MIN_REPEATS || now_us() < deadline_us)) {
    samples_us[repeats] = run_us(&p->sets[repeats % set_count]);
    repeats++;
  }
  qsort(samples_us, (size_t)repeats, sizeof *samples_us, compare_doubles);
  return (timing){
      .median_us = quantile(samples_us, repeats, 0.5),
      .min_us = samples_us[0],
      .p10_us = quantile(samples_us, repeats, 0.1),
      .p90_us = quantile(samples_us, repeats, 0.9),
      .repeats = repeats,
  };
}

/* ---- check ---- */

static ggml_to_float_t dequantizer(enum ggml_type type) {
#ifdef PEER_IS_IK
  return ggml_internal_get_type_traits(type).to_float;
#else
  return ggml_get_type_traits(type)->to_float;
#endif
}

static const void *cache_row(const problem *p, const void *cache, int64_t batch, int64_t head,
                             int64_t token) {
  const shape *s = &p->shape;
  const int64_t row = p->layout == LAYOUT_HEADS_FIRST
                          ? (batch * s->kv_heads + head) * s->tokens + token
                          : (batch * s->tokens + token) * s->kv_heads + head;
  return (const char *)cache + (size_t)row * p->row_bytes;
}

static double dot(const float *a, const float *b, int64_t count) {
  double lanes[8] = {0};
  for (int64_t i = 0; i < count; i += 8)
    for (int lane = 0; lane < 8; lane++) lanes[lane] += (double)a[i + lane] * b[i + lane];
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static void softmax(double *values, int64_t count) {
  double maximum = -INFINITY, sum = 0;
  for (int64_t i = 0; i < count; i++) maximum = fmax(maximum, values[i]);
  for (int64_t i = 0; i < count; i++) sum += values[i] = exp(values[i] - maximum);
  for (int64_t i = 0; i < count; i++) values[i] /= sum;
}

/* The attention of all query heads of one KV head, into expected[group][head_dim]. */
static void attend_in_double(const problem *p, int64_t batch, int64_t kv_head, double *weights,
                             double *expected) {
  const shape *s = &p->shape;
  const int64_t group = s->query_heads / s->kv_heads;
  const ggml_to_float_t dequantize = dequantizer(p->type);
  const float *q = p->q + (batch * s->query_heads + kv_head * group) * s->head_dim;
  const double scale = 1.0 / sqrt((double)s->head_dim);
  float row[1024];
  for (int64_t token = 0; token < s->tokens; token++) {
    dequantize(cache_row(p, p->sets[0].k, batch, kv_head, token), row, s->head_dim);
    for (int64_t head = 0; head < group; head++)
      weights[head * s->tokens + token] = scale * dot(q + head * s->head_dim, row, s->head_dim);
  }
  for (int64_t head = 0; head < group; head++) softmax(weights + head * s->tokens, s->tokens);
  memset(expected, 0, (size_t)(group * s->head_dim) * sizeof *expected);
  for (int64_t token = 0; token < s->tokens; token++) {
    dequantize(cache_row(p, p->sets[0].v, batch, kv_head, token), row, s->head_dim);
    for (int64_t head = 0; head < group; head++) {
      const double weight = weights[head * s->tokens + token];
      for (int64_t i = 0; i < s->head_dim; i++) expected[head * s->head_dim + i] += weight * row[i];
    }
  }
}

/* Euclidean norm of the difference over that of the expected output. */
static double relative_error(const problem *p) {
  const shape *s = &p->shape;
  const int64_t group = s->query_heads / s->kv_heads;
  double *weights = malloc((size_t)(group * s->tokens) * sizeof *weights);
  double *expected = malloc((size_t)(group * s->head_dim) * sizeof *expected);
  if (weights == NULL || expected == NULL) fail("out of memory");
  double difference_squared = 0, expected_squared = 0;
  for (int64_t batch = 0; batch < s->batch; batch++) {
    for (int64_t kv_head = 0; kv_head < s->kv_heads; kv_head++) {
      attend_in_double(p, batch, kv_head, weights, expected);
      const float *out = p->out + (batch * s->query_heads + kv_head * group) * s->head_dim;
      for (int64_t i = 0; i < group * s->head_dim; i++) {
        const double difference = (double)out[i] - expected[i];
        difference_squared += difference * difference;
        expected_squared += expected[i] * expected[i];
      }
    }
  }
  free(weights);
  free(expected);
  return sqrt(difference_squared / expected_squared);
}

/* Three times what the peer's own roundings are expected to cost on normal numbers; a wrong
 * layout or scale gives an error near one.
 * Quantized keys: the query is rounded to 8 bits in blocks of 32, whose largest magnitude is
 * some 2.1 deviations, so each score is off by 2.1 / 127 / sqrt(12) = 0.005, and the output,
 * a sum of independent values, by as much relative to its norm.
 * f16: the output is accumulated in f16. A random walk of n steps that is rounded at each
 * step by 2^-12.3 of its magnitude (the mean over a binade of a uniform rounding) ends with
 * a relative error of 2^-12.3 sqrt(n / 2). */
static double error_bound(const problem *p) {
  if (p->type == GGML_TYPE_F16) return 1e-3 + 3 * exp2(-12.3) * sqrt((double)p->shape.tokens / 2);
  return 3 * 0.005;
}

/* ---- read bandwidth ---- */

/* Each thread reads several streams at once: one alone leaves bandwidth unused. */
enum { READ_STREAMS = 8 };

typedef struct reader {
  pthread_t thread;
  pthread_barrier_t *barrier;
  const uint64_t *words;
  size_t words_per_stream;
  uint64_t sum;
  double start_us[BANDWIDTH_PASSES], end_us[BANDWIDTH_PASSES];
} reader;

static uint64_t sum_streams(const uint64_t *words, size_t words_per_stream) {
  uint64_t sums[READ_STREAMS] = {0};
  const size_t block_words = 64;
  for (size_t block = 0; block < words_per_stream; block += block_words)
    for (size_t stream = 0; stream < READ_STREAMS; stream++)
      for (size_t i = 0; i < block_words; i++)
        sums[stream] += words[stream * words_per_stream + block + i];
  uint64_t sum = 0;
  for (size_t stream = 0; stream < READ_STREAMS; stream++) sum += sums[stream];
  return sum;
}

/* Every thread notes its own times, so that one that is scheduled late does not shorten a pass. */
static void *read_passes(void *argument) {
  reader *r = argument;
  for (int pass = 0; pass < BANDWIDTH_PASSES; pass++) {
    pthread_barrier_wait(r->barrier);
    r->start_us[pass] = now_us();
    r->sum += sum_streams(r->words, r->words_per_stream);
    r->end_us[pass] = now_us();
  }
  return NULL;
}

static double pass_us(const reader *readers, int threads, int pass) {
  double start_us = INFINITY, end_us = 0;
  for (int i = 0; i < threads; i++) {
    start_us = fmin(start_us, readers[i].start_us[pass]);
    end_us = fmax(end_us, readers[i].end_us[pass]);
  }
  return end_us - start_us;
}

static bandwidth measure_read_bandwidth(int threads, bool huge_pages) {
  uint64_t *words = allocate(bandwidth_bytes, huge_pages);
  memset(words, 1, bandwidth_bytes);
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  static reader readers[MAX_THREADS];
  const size_t words_per_page = 4096 / sizeof *words;
  const size_t streams = (size_t)threads * READ_STREAMS;
  const size_t words_per_stream =
      bandwidth_bytes / sizeof *words / streams / words_per_page * words_per_page;
  for (int i = 0; i < threads; i++) {
    readers[i] = (reader){.barrier = &barrier,
                          .words = words + (size_t)i * READ_STREAMS * words_per_stream,
                          .words_per_stream = words_per_stream};
    if (pthread_create(&readers[i].thread, NULL, read_passes, &readers[i]) != 0)
      fail("pthread_create failed");
  }
  const uint64_t expected_sum =
      UINT64_C(0x0101010101010101) * words_per_stream * READ_STREAMS * BANDWIDTH_PASSES;
  for (int i = 0; i < threads; i++) {
    pthread_join(readers[i].thread, NULL);
    if (readers[i].sum != expected_sum) fail("the bandwidth test read wrong data");
  }
  pthread_barrier_destroy(&barrier);
  free(words);
  double sorted_us[BANDWIDTH_PASSES];
  for (int pass = 0; pass < BANDWIDTH_PASSES; pass++)
    sorted_us[pass] = pass_us(readers, threads, pass);
  qsort(sorted_us, BANDWIDTH_PASSES, sizeof *sorted_us, compare_doubles);
  const double read_bytes = (double)(words_per_stream * streams * sizeof *words);
  return (bandwidth){
      .median_gb_per_s = read_bytes / quantile(sorted_us, BANDWIDTH_PASSES, 0.5) * 1e-3,
      .best_gb_per_s = read_bytes / sorted_us[0] * 1e-3,
  };
}

/* ---- report ---- */

static const char *layout_name(layout l) {
  return l == LAYOUT_HEADS_FIRST ? "heads-first" : "tokens-first";
}

static void print_json_header(const options *o) {
  printf("{\n  \"peer\": \"%s\", \"package\": \"%s\", \"variant\": \"%s\",\n", PEER_NAME,
         PEER_PACKAGE, PEER_VARIANT);
  printf(
      "  \"compiled_with\": {\"avx2\": %d, \"fma\": %d, \"f16c\": %d, \"avx512\": %d, "
      "\"avx512_vnni\": %d},\n",
      ggml_cpu_has_avx2(), ggml_cpu_has_fma(), ggml_cpu_has_f16c(), ggml_cpu_has_avx512(),
      ggml_cpu_has_avx512_vnni());
  printf("  \"layout\": \"%s\", \"mask\": \"%s\", \"huge_pages\": %s, \"threads\": %d,\n",
         layout_name(o->layout), o->zero_mask ? "zero" : "none", o->huge_pages ? "true" : "false",
         o->threads);
}

static void print_bandwidth(const options *o, bandwidth b) {
  if (o->json)
    printf(
        "  \"read_bandwidth\": {\"threads\": %d, \"bytes\": %zu, \"median_gb_per_s\": %.2f, "
        "\"best_gb_per_s\": %.2f},\n",
        o->threads, bandwidth_bytes, b.median_gb_per_s, b.best_gb_per_s);
  else
    printf("reading %zu MiB with %d threads: %.1f GB/s (best %.1f)\n", bandwidth_bytes / mebibyte,
           o->threads, b.median_gb_per_s, b.best_gb_per_s);
}

static void print_table_header(const options *o) {
  printf("%s (%s, %s), %d threads, %s, mask %s, %s pages\n", PEER_NAME, PEER_PACKAGE, PEER_VARIANT,
         o->threads, layout_name(o->layout), o->zero_mask ? "zero" : "none",
         o->huge_pages ? "huge" : "default");
  printf("%-24s %-5s %-5s %12s %12s %12s %12s %8s %8s %10s\n", "B,Hq,Hkv,D,N", "type", "temp",
         "median us", "min us", "p10 us", "p90 us", "repeats", "GB/s", "error");
}

static void print_result(const options *o, const problem *p, const char *temperature, timing t,
                         int sets, double error, bool first) {
  const shape *s = &p->shape;
  const size_t kv_bytes = 2 * p->cache_bytes;
  const double gb_per_s = (double)kv_bytes / t.median_us * 1e-3;
  char shape_text[128], error_text[32];
  snprintf(shape_text, sizeof shape_text,
           "%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64, s->batch, s->query_heads,
           s->kv_heads, s->head_dim, s->tokens);
  if (!o->json) {
    snprintf(error_text, sizeof error_text, o->check ? "%.2e" : "unchecked", error);
    printf("%-24s %-5s %-5s %12.1f %12.1f %12.1f %12.1f %8d %8.2f %10s\n", shape_text,
           ggml_type_name(p->type), temperature, t.median_us, t.min_us, t.p10_us, t.p90_us,
           t.repeats, gb_per_s, error_text);
    fflush(stdout);
    return;
  }
  snprintf(error_text, sizeof error_text, o->check && isfinite(error) ? "%.3e" : "null", error);
  printf(
      "%s    {\"shape\": [%s], \"type\": \"%s\", \"temperature\": \"%s\", \"threads\": %d, "
      "\"median_us\": %.2f, "
      "\"min_us\": %.2f, \"p10_us\": %.2f, \"p90_us\": %.2f, \"repeats\": %d, \"kv_bytes\": %zu, "
      "\"buffer_sets\": %d, "
      "\"gb_per_s\": %.3f, \"relative_error\": %s, \"error_bound\": %.3e}",
      first ? "" : ",\n", shape_text, ggml_type_name(p->type), temperature, o->threads, t.median_us,
      t.min_us, t.p10_us, t.p90_us, t.repeats, kv_bytes, sets, gb_per_s, error_text,
      error_bound(p));
}

/* ---- command line ---- */

static void print_usage(FILE *stream) {
  fprintf(
      stream,
      "usage: ggml_attention [options]\n"
      "  --shape B,Hq,Hkv,D,N   batch, query heads, KV heads, head size, tokens (repeatable;\n"
      "                         default 1,32,8,128,8192)\n"
      "  --type f16|q8_0|q4_0   format of K and V (repeatable; default all three)\n"
      "  --threads N            default 2\n"
      "  --layout NAME          heads-first (default) or tokens-first, as llama.cpp stores its "
      "cache\n"
      "  --zero-mask            pass a mask of zeros, as llama.cpp does (default: no mask, which "
      "is faster)\n"
      "  --huge-pages           ask for transparent huge pages for K and V (ggml itself does not)\n"
      "  --seconds S            time budget of each timing (default 1; at least %d runs)\n"
      "  --cold-mib N           rotate over at least N MiB for cold timings, in at most %d\n"
      "                         sets of K and V, so that tiny shapes stay partly warm (default "
      "256)\n"
      "  --no-check             skip the comparison with double precision\n"
      "  --no-bandwidth         skip the read bandwidth\n"
      "  --json                 print JSON instead of a table\n",
      MIN_REPEATS, MAX_BUFFER_SETS);
}

static _Noreturn void usage_error(const char *problem_text, const char *value) {
  fprintf(stderr, "ggml_attention: error: %s \"%s\"\n", problem_text, value);
  print_usage(stderr);
  exit(2);
}

static double parse_number(const char *option, const char *text, double minimum, double maximum) {
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= minimum && value <= maximum)) {
    fprintf(stderr, "ggml_attention: error: %s must be from %g to %g\n", option, minimum, maximum);
    usage_error("got", text);
  }
  return value;
}

static shape parse_shape(const char *text) {
  int64_t fields[5];
  const char *cursor = text;
  for (int i = 0; i < 5; i++) {
    char *end;
    errno = 0;
    fields[i] = strtoll(cursor, &end, 10);
    if (end == cursor || errno != 0 || *end != (i < 4 ? ',' : '\0'))
      usage_error("a shape is B,Hq,Hkv,D,N, five integers, not", text);
    if (fields[i] < 1 || fields[i] > INT32_MAX)
      usage_error("each field of a shape must be from 1 to 2147483647:", text);
    cursor = end + 1;
  }
  const shape s = {fields[0], fields[1], fields[2], fields[3], fields[4]};
  if (s.query_heads % s.kv_heads != 0)
    usage_error("query heads must be a multiple of KV heads:", text);
  if (s.head_dim % 32 != 0 || s.head_dim > 1024)
    usage_error("the head size must be a multiple of 32, at most 1024:", text);
  return s;
}

static enum ggml_type parse_type(const char *text) {
  const enum ggml_type known[MAX_TYPES] = {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
  for (int i = 0; i < MAX_TYPES; i++)
    if (strcmp(text, ggml_type_name(known[i])) == 0) return known[i];
  usage_error("a type is f16, q8_0 or q4_0, not", text);
}

static layout parse_layout(const char *text) {
  if (strcmp(text, "heads-first") == 0) return LAYOUT_HEADS_FIRST;
  if (strcmp(text, "tokens-first") == 0) return LAYOUT_TOKENS_FIRST;
  usage_error("a layout is heads-first or tokens-first, not", text);
}

static void parse_valued_option(options *o, const char *name, const char *value) {
  if (strcmp(name, "--shape") == 0) {
    if (o->shape_count == MAX_SHAPES) usage_error("too many shapes:", value);
    o->shapes[o->shape_count++] = parse_shape(value);
  } else if (strcmp(name, "--type") == 0) {
    if (o->type_count == MAX_TYPES) usage_error("too many types:", value);
    o->types[o->type_count++] = parse_type(value);
  } else if (strcmp(name, "--threads") == 0) {
    o->threads = (int)parse_number(name, value, 1, MAX_THREADS);
  } else if (strcmp(name, "--layout") == 0) {
    o->layout = parse_layout(value);
  } else if (strcmp(name, "--seconds") == 0) {
    o->seconds_per_timing = parse_number(name, value, 0, 3600);
  } else if (strcmp(name, "--cold-mib") == 0) {
    o->cold_bytes = (size_t)parse_number(name, value, 0, 1 << 20) * mebibyte;
  } else {
    usage_error("unknown option", name);
  }
}

static options parse_options(int argc, char **argv) {
  options o = {.threads = 2,
               .zero_mask = NEEDS_MASK,
               .seconds_per_timing = 1,
               .cold_bytes = 256 * mebibyte,
               .check = true,
               .bandwidth = true};
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i];
    if (strcmp(name, "--help") == 0) {
      print_usage(stdout);
      exit(0);
    } else if (strcmp(name, "--json") == 0) {
      o.json = true;
    } else if (strcmp(name, "--zero-mask") == 0) {
      o.zero_mask = true;
    } else if (strcmp(name, "--huge-pages") == 0) {
      o.huge_pages = true;
    } else if (strcmp(name, "--no-check") == 0) {
      o.check = false;
    } else if (strcmp(name, "--no-bandwidth") == 0) {
      o.bandwidth = false;
    } else if (i + 1 < argc) {
      parse_valued_option(&o, name, argv[++i]);
    } else {
      usage_error("unknown option, or its value is missing:", name);
    }
  }
  if (o.shape_count == 0) o.shapes[o.shape_count++] = parse_shape("1,32,8,128,8192");
  if (o.type_count == 0) {
    o.types[o.type_count++] = GGML_TYPE_F16;
    o.types[o.type_count++] = GGML_TYPE_Q8_0;
    o.types[o.type_count++] = GGML_TYPE_Q4_0;
  }
  return o;
}

static void *make_threadpool(int threads) {
#ifdef PEER_IS_IK
  (void)threads;
  return NULL;
#else
  ggml_cpu_init();
  struct ggml_threadpool_params parameters = ggml_threadpool_params_default(threads);
  struct ggml_threadpool *pool = ggml_threadpool_new(&parameters);
  if (pool == NULL) fail("ggml_threadpool_new failed");
  return pool;
#endif
}

static void free_threadpool(void *threadpool) {
#ifdef PEER_IS_IK
  (void)threadpool;
#else
  ggml_threadpool_free(threadpool);
#endif
}

/* Returns whether the result is within its bound. */
static bool measure(const options *o, shape s, enum ggml_type type, const float *normal_pool,
                    void *threadpool, bool first) {
  problem p = make_problem(o, s, type, normal_pool, threadpool);
  const timing cold = time_sets(&p, p.set_count, o->seconds_per_timing);
  const timing warm = time_sets(&p, 1, o->seconds_per_timing);
  const double error = o->check ? relative_error(&p) : 0;
  const bool passed = !o->check || error <= error_bound(&p);
  print_result(o, &p, "cold", cold, p.set_count, error, first);
  print_result(o, &p, "warm", warm, 1, error, false);
  if (!passed)
    fprintf(stderr, "ggml_attention: %s: relative error %.3e exceeds the bound %.3e\n",
            ggml_type_name(type), error, error_bound(&p));
  free_problem(&p);
  return passed;
}

int main(int argc, char **argv) {
  clock_gettime(CLOCK_MONOTONIC, &program_start);
  const options o = parse_options(argc, argv);
  float *normal_pool = allocate(NORMAL_POOL_SIZE * sizeof *normal_pool, false);
  fill_normal(normal_pool, NORMAL_POOL_SIZE);

  if (o.json) print_json_header(&o);
  if (o.bandwidth) print_bandwidth(&o, measure_read_bandwidth(o.threads, o.huge_pages));
  if (o.json)
    printf("  \"results\": [\n");
  else
    print_table_header(&o);

  /* A first context makes ggml fill its conversion tables, which quantizing needs. */
  struct ggml_context *tables =
      ggml_init((struct ggml_init_params){.mem_size = 1024, .no_alloc = true});
  void *threadpool = make_threadpool(o.threads);
  bool passed = true;
  for (int i = 0; i < o.shape_count; i++)
    for (int j = 0; j < o.type_count; j++)
      passed &= measure(&o, o.shapes[i], o.types[j], normal_pool, threadpool, i == 0 && j == 0);
  free_threadpool(threadpool);
  ggml_free(tables);
  free(normal_pool);

  if (o.json) printf("\n  ],\n  \"passed\": %s\n}\n", passed ? "true" : "false");
  return passed ? 0 : 1;
}
