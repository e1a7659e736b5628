/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of cache on CUDA without a GPU: the checks of `nybble verify --backend cuda` walk over
 * the fake driver, whose launches run what the kernels consist of, compiled for the host, with the
 * CPU's quantizer. So the host's code and the arithmetic are the real ones; the kernels' threads
 * are not. And what only a driver that can be told to fail or to capture can show. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../src/cuda/device/cache_append.cuh"
#include "../src/cuda/device/quantize.cuh"
#include "check.h"
#include "check_stage.h"
#include "fake_cuda/open.h"

static fake_cuda_library fake;
static nyb_context *cpu; /* whose quantizer stands in for the GPU's */

static void ok(nyb_status status) {
  if (status != NYB_OK) fail_msg("%s: %s", nyb_status_name(status), nyb_last_error());
}

static void refused(nyb_status status, nyb_status expected, const char *words) {
  if (status != expected || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("%s: %s; not %s with \"%s\"", nyb_status_name(status), nyb_last_error(),
             nyb_status_name(expected), words);
  }
}

/* ---- The kernels ------------------------------------------------------------------------------
 */

enum { MOST_DIM = 256 };

static long long along(const long long stride[3], int64_t block, int64_t head, int64_t slot) {
  return block * stride[0] + head * stride[1] + slot * stride[2];
}

/* A row of floats to where rows of the body stand. False where it could not be stored. */
static bool store_row(const nyb_device_rows *rows, const void *floats, int dtype, int rule,
                      const nyb_cache_place *place, int64_t head) {
  const bool affine = rows->bits > 0;
  nyb_quantize quantize = NYB_QUANTIZE_INIT;
  quantize.batch = quantize.heads = quantize.tokens = 1;
  quantize.dim = rows->dim;
  quantize.rule = (nyb_rule)rule;
  quantize.input = (nyb_input){.data = floats, .dtype = (nyb_dtype)dtype};
  quantize.output = (nyb_stored_output){
      .format = {.scheme = affine ? NYB_AFFINE : NYB_PLAIN,
                 .bits = rows->bits,
                 .group_size = affine ? NYB_LANE_ELEMENTS << rows->group_shift : 0,
                 .dtype = (nyb_dtype)rows->stored_dtype},
      .codes = rows->codes + along(rows->codes_stride, place->block, head, place->slot)};
  if (affine) {
    quantize.output.scales =
        rows->scales + along(rows->scales_stride, place->block, head, place->slot);
    quantize.output.biases =
        rows->biases + along(rows->biases_stride, place->block, head, place->slot);
  }
  return nyb_quantize_run(cpu, &quantize, NULL) == NYB_OK;
}

static void run_append(const nyb_device_append *call, int64_t batch) {
  for (int64_t sequence = 0; sequence < batch; sequence++) {
    const int64_t length = nyb_brought_to(call->lengths[sequence], 0, call->capacity_tokens);
    const int64_t tokens = call->tokens.divisor;
    bool stored = tokens <= call->capacity_tokens - length;
    for (int64_t i = 0; i < 2 * call->kv_heads * tokens && stored; i++) {
      const nyb_device_rows *rows = i % 2 == 0 ? &call->key : &call->value;
      const int64_t head = i / 2 / tokens, token = i / 2 % tokens;
      const nyb_cache_place place = {NYB_BODY, sequence, length + token, 1};
      stored = store_row(rows, rows->input + along(rows->input_stride, sequence, head, token),
                         rows->input_dtype, call->rule, &place, head);
    }
    if (stored) call->lengths[sequence] = (int)(length + tokens);
    if (!stored && call->non_finite != NULL) *call->non_finite = 1;
  }
}

static bool place_row(const nyb_device_placed *call, const nyb_append_plan *plan, int64_t sequence,
                      int part, int64_t head, int64_t token) {
  const nyb_device_rows *rows = part == 0 ? &call->key : &call->value;
  const nyb_cache_place place = nyb_appended_place(&call->places, plan, sequence, token);
  const char *floats = rows->input + along(rows->input_stride, sequence, head, token);
  if (call->part_dtype == 0) {
    return store_row(rows, floats, rows->input_dtype, call->rule, &place, head);
  }
  uint32_t wide[MOST_DIM];
  uint16_t narrow[MOST_DIM];
  const bool is_wide = call->part_dtype == NYB_DEVICE_F32;
  for (int64_t i = 0; i < rows->dim; i++) {
    uint32_t bits;
    assert_int_equal(rows->input_dtype, NYB_DEVICE_F32);
    memcpy(&bits, floats + i * 4, sizeof bits);
    wide[i] = nyb_convert(rows->input_dtype, call->part_dtype, bits);
    narrow[i] = (uint16_t)wide[i];
  }
  const void *rounded = is_wide ? (const void *)wide : narrow;
  if (place.region == NYB_BODY) {
    return store_row(rows, rounded, call->part_dtype, call->rule, &place, head);
  }
  const nyb_device_plain *plain =
      place.region == NYB_FIRST ? &call->first[part] : &call->last[part];
  memcpy(plain->rows + along(plain->stride, place.block, head, place.slot), rounded,
         (size_t)rows->dim * (is_wide ? 4 : 2));
  return true;
}

static void run_append_placed(const nyb_device_placed *call, int64_t batch) {
  for (int64_t sequence = 0; sequence < batch; sequence++) {
    const nyb_append_plan plan = nyb_append_plan_of(call, sequence);
    bool stored = plan.fits;
    for (int64_t i = 0; i < 2 * call->kv_heads && plan.fits; i++) {
      for (int64_t token = plan.padding; token < call->append_tokens; token++) {
        stored &= place_row(call, &plan, sequence, (int)(i % 2), i / 2, token);
      }
    }
    if (plan.fits) nyb_set_sequence_at(&call->places, sequence, &plan.after);
    if (!stored && call->non_finite != NULL) *call->non_finite = 1;
  }
}

static void run_retire(const nyb_device_placed *call, int64_t batch) {
  for (int64_t sequence = 0; sequence < batch; sequence++) {
    const nyb_append_plan plan = nyb_append_plan_of(call, sequence);
    const int64_t retired = nyb_retired_tokens(&plan);
    assert_true(retired <= call->tokens.divisor);
    for (int64_t i = 0; i < 2 * call->kv_heads * retired && retired > 0; i++) {
      const nyb_device_rows *rows = i % 2 == 0 ? &call->key : &call->value;
      const int64_t head = i / 2 / retired, token = plan.before.last_begin + i / 2 % retired;
      const nyb_cache_place from =
          nyb_mixed_place(&call->places.kind, &plan.before, sequence, token);
      const nyb_cache_place to = nyb_kind_place_of(&call->places.kind, call->places.body_tokens,
                                                   &plan.after, sequence, NULL, token);
      assert_int_equal(from.region, NYB_LAST);
      assert_int_equal(to.region, NYB_BODY);
      store_row(rows, rows->input + along(rows->input_stride, from.block, head, from.slot),
                rows->input_dtype, call->rule, &to, head);
    }
  }
}

static void run_trim(const nyb_device_trim *call, int64_t batch) {
  (void)batch;
  for (int64_t i = 0; i < call->count; i++) nyb_trim_sequence(call, call->first + i);
}

static void run_patch(const nyb_device_patch *call, int64_t batch) {
  (void)batch;
  for (int i = 0; i < call->count; i++) call->words[call->place[i]] = call->value[i];
}

static void run_copy(const nyb_device_copy *call, int64_t batch) {
  (void)batch;
  for (int array = 0; array < NYB_REGION_ARRAYS; array++) {
    for (int64_t i = 0; i < call->count * call->kv_heads; i++) {
      if (call->array[array].row_bytes == 0) continue;
      int64_t unit = 0;
      while (nyb_copy_unit(call, array, (int)(i / call->kv_heads), i % call->kv_heads, unit))
        unit++;
    }
  }
}

static void run_reorder(const nyb_device_reorder *call, int64_t batch) {
  (void)batch;
  for (int array = 0; array < NYB_REORDER_ARRAYS; array++) {
    for (int64_t head = 0; head < call->kv_heads && call->array[array].row_bytes > 0; head++) {
      int64_t unit = 0;
      while (nyb_reorder_unit(call, array, head, unit)) unit++;
    }
  }
}

/* ---- Launches, at once or into a graph --------------------------------------------------------
 */

typedef union arguments {
  nyb_device_append append;
  nyb_device_placed placed;
  nyb_device_trim trim;
  nyb_device_patch patch;
  nyb_device_copy copy;
  nyb_device_reorder reorder;
} arguments;

typedef struct launched {
  char kernel[32];
  int64_t blocks;
  arguments call;
} launched;

enum { MOST_RECORDED = 32 };
static launched recorded[MOST_RECORDED];
static int recorded_count;
static int64_t recorded_capture; /* of the captures so far */

static size_t arguments_bytes(const char *kernel) {
  static const struct {
    const char *kernel;
    size_t bytes;
  } all[] = {
      {"append", sizeof(nyb_device_append)},        {"append_placed", sizeof(nyb_device_placed)},
      {"retire", sizeof(nyb_device_placed)},        {"trim", sizeof(nyb_device_trim)},
      {"cache_patch", sizeof(nyb_device_patch)},    {"cache_copy", sizeof(nyb_device_copy)},
      {"cache_reorder", sizeof(nyb_device_reorder)}};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    if (strcmp(all[i].kernel, kernel) == 0) return all[i].bytes;
  }
  fail_msg("no such kernel of caches: %s", kernel);
  return 0;
}

static void run_launched(const launched *l) {
  const arguments *call = &l->call;
  if (strcmp(l->kernel, "append") == 0) {
    run_append(&call->append, l->blocks / call->append.blocks_per_sequence.divisor);
  } else if (strcmp(l->kernel, "append_placed") == 0) {
    run_append_placed(&call->placed, l->blocks / call->placed.blocks_per_sequence.divisor);
  } else if (strcmp(l->kernel, "retire") == 0) {
    run_retire(&call->placed, l->blocks / call->placed.blocks_per_sequence.divisor);
  } else if (strcmp(l->kernel, "trim") == 0) {
    run_trim(&call->trim, 0);
  } else if (strcmp(l->kernel, "cache_patch") == 0) {
    run_patch(&call->patch, 0);
  } else if (strcmp(l->kernel, "cache_copy") == 0) {
    run_copy(&call->copy, 0);
  } else {
    run_reorder(&call->reorder, 0);
  }
}

static void take_launch(void *data, const char *kernel, const nyb_cu_launch *launch, void *given) {
  (void)data;
  launched l = {.blocks = launch->grid[0]};
  snprintf(l.kernel, sizeof l.kernel, "%s", kernel);
  memcpy(&l.call, given, arguments_bytes(kernel));
  if (launch->stream == NULL || launch->stream != fake.cuda->capturing) {
    run_launched(&l);
    return;
  }
  const int64_t capture = fake.calls("cuStreamBeginCapture");
  if (capture != recorded_capture) recorded_count = 0;
  recorded_capture = capture;
  assert_true(recorded_count < MOST_RECORDED);
  recorded[recorded_count++] = l;
}

static void launch_graph(void *data) {
  (void)data;
  for (int i = 0; i < recorded_count; i++) run_launched(&recorded[i]);
}

/* ---- The walks of verify ----------------------------------------------------------------------
 */

static void test_walks(void **state) {
  (void)state;
  const check_options options = {
      .quick = true, .backend = NYB_BACKEND_CUDA, .operation = "append", .without_attention = true};
  check_run *run = check_all(&options);
  if (run == NULL) fail_msg("%s", check_error());
  for (int64_t i = 0; i < run->failures_kept; i++) print_error("%s\n", run->failures[i]);
  assert_int_equal(run->failed, 0);
  assert_true(run->passed >= 24);
  check_free(run);
}

/* ---- Caches of a few rows ---------------------------------------------------------------------
 */

enum { BATCH = 3, HEADS = 2, DIM = 64 };

typedef struct scene {
  nyb_context *context;
  nyb_cache *cache;
  float *rows; /* on the device, of up to 64 tokens */
  int32_t *flag;
  device_stream stream;
} scene;

static void *zeroed(int64_t bytes) {
  void *memory = device_allocate(bytes);
  assert_non_null(memory);
  assert_true(device_fill(memory, 0, bytes, NULL));
  return memory;
}

/* allocator: NULL for the driver's memory. */
static void start_with(scene *s, nyb_cache_options options, const nyb_allocator *allocator) {
  nyb_context_options context = NYB_CONTEXT_OPTIONS_INIT;
  context.backend = NYB_BACKEND_CUDA;
  if (allocator != NULL) context.device_allocator = *allocator;
  assert_true(check_stage_open(0));
  *s = (scene){.stream = check_stage_stream()};
  ok(nyb_context_create(&context, &s->context));
  options.struct_size = sizeof options;
  options.batch = BATCH;
  options.kv_heads = HEADS;
  options.key_dim = options.value_dim = DIM;
  options.key_format = options.value_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_F32};
  ok(nyb_cache_create(s->context, &options, &s->cache));
  s->rows = zeroed(8 * HEADS * 64 * DIM * (int64_t)sizeof(float));
  s->flag = zeroed(sizeof *s->flag);
}

static void start(scene *s, nyb_cache_options options) { start_with(s, options, NULL); }

static void finish(scene *s) {
  nyb_cache_destroy(s->cache);
  nyb_context_destroy(s->context);
  device_free(s->rows);
  device_free(s->flag);
  check_stage_close();
  device_close();
}

static nyb_append append_call(const scene *s, int64_t tokens) {
  nyb_append call = NYB_APPEND_INIT;
  call.tokens = tokens;
  call.key = (nyb_input){s->rows, NYB_F32, {HEADS * 64 * DIM, 64 * DIM, DIM}};
  call.value = call.key;
  return call;
}

static nyb_status append(scene *s, int64_t tokens) {
  nyb_append call = append_call(s, tokens);
  call.non_finite = s->flag;
  return nyb_cache_append(s->cache, &call, s->stream);
}

static nyb_cache_options of_kind(int kind) {
  static const nyb_cache_options options[] = {
      {.page_tokens = 0},
      {.window_tokens = 8, .window_keep_tokens = 2},
      {.first_tokens = 3, .last_tokens = 5, .part_dtype = NYB_BF16},
      {.page_tokens = 16}};
  return options[kind];
}

/* Within the memory that there is no call of a decoder waits or allocates. */
static void test_decoding_neither_waits_nor_allocates(void **state) {
  (void)state;
  for (int kind = 0; kind < 4; kind++) {
    static const int64_t beams[BATCH] = {1, 1, 0};
    scene s;
    start(&s, of_kind(kind));
    ok(append(&s, 12)); /* rings hold more than their window, once */
    ok(nyb_cache_reserve(s.cache, 100, s.stream));
    ok(append(&s, 1));
    ok(nyb_cache_reorder(s.cache, beams, BATCH, s.stream)); /* its kernel is compiled */
    const int64_t waits = fake.calls("cuStreamSynchronize"), memory = fake.calls("cuMemAlloc");
    for (int i = 0; i < 60; i++) {
      ok(append(&s, 1));
      if (i % 7 == 0) ok(nyb_cache_trim(s.cache, NYB_ALL_SEQUENCES, 1, NULL, s.stream));
      if (kind != 3) ok(nyb_cache_reorder(s.cache, beams, BATCH, s.stream));
    }
    assert_int_equal(fake.calls("cuStreamSynchronize"), waits);
    assert_int_equal(fake.calls("cuMemAlloc"), memory);
    finish(&s);
  }
}

static void test_pages_in_graphs(void **state) {
  (void)state;
  static const int64_t all_the_first[BATCH] = {0, 0, 0};
  scene s;
  start(&s, of_kind(3));
  ok(append(&s, 20));
  assert_true(device_capture_begin(s.stream));
  ok(append(&s, 1)); /* the page has room */
  refused(append(&s, 30), NYB_ERROR_UNSUPPORTED, "nyb_cache_reserve gives them");
  refused(nyb_cache_reserve(s.cache, 100, s.stream), NYB_ERROR_UNSUPPORTED, "being captured");
  refused(nyb_cache_reorder(s.cache, all_the_first, BATCH, s.stream), NYB_ERROR_UNSUPPORTED,
          "nyb_cache_reorder moves what there is");
  refused(nyb_cache_refresh(s.cache, s.stream), NYB_ERROR_UNSUPPORTED, "being captured");
  device_graph *graph = device_capture_end(s.stream);
  for (int i = 0; i < 20; i++) assert_true(device_graph_launch(graph, s.stream));
  ok(nyb_cache_refresh(s.cache, s.stream));
  for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), 32);
  assert_int_equal(*s.flag, 1); /* the 13th found no page */
  *s.flag = 0;
  ok(nyb_cache_reserve(s.cache, 48, s.stream));
  assert_true(device_graph_launch(graph, s.stream));
  ok(nyb_cache_refresh(s.cache, s.stream));
  assert_int_equal(nyb_cache_length(s.cache, 1), 33);
  assert_int_equal(*s.flag, 0);
  /* Pages that are shared now: nothing is written to them. */
  ok(nyb_cache_reorder(s.cache, all_the_first, BATCH, s.stream));
  assert_true(device_graph_launch(graph, s.stream));
  ok(nyb_cache_refresh(s.cache, s.stream));
  for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), 33);
  assert_int_equal(*s.flag, 1);
  *s.flag = 0;
  assert_true(device_capture_begin(s.stream));
  refused(append(&s, 1), NYB_ERROR_UNSUPPORTED, "pages of their own");
  device_graph_destroy(device_capture_end(s.stream));
  ok(nyb_cache_reserve(s.cache, 40, s.stream));
  assert_true(device_capture_begin(s.stream));
  ok(append(&s, 1));
  device_graph *next = device_capture_end(s.stream);
  assert_true(device_graph_launch(next, s.stream));
  ok(nyb_cache_refresh(s.cache, s.stream));
  for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), 34);
  assert_int_equal(*s.flag, 0);
  device_graph_destroy(graph);
  device_graph_destroy(next);
  finish(&s);
}

static void test_rings_in_graphs(void **state) {
  (void)state;
  scene s;
  start(&s, of_kind(1));
  ok(append(&s, 3));
  ok(nyb_cache_reserve(s.cache, 8, s.stream));
  assert_true(device_capture_begin(s.stream));
  refused(append(&s, 4), NYB_ERROR_UNSUPPORTED, "where the window is full");
  ok(append(&s, 1));
  device_graph *graph = device_capture_end(s.stream);
  for (int i = 0; i < 100; i++) assert_true(device_graph_launch(graph, s.stream));
  ok(nyb_cache_refresh(s.cache, s.stream));
  assert_int_equal(nyb_cache_length(s.cache, 2), 103);
  assert_int_equal(nyb_cache_held_tokens(s.cache, 2), 8);
  assert_int_equal(*s.flag, 0);
  device_graph_destroy(graph);
  finish(&s);
}

/* A replay does not go beyond max_tokens either. */
static void test_limits_in_graphs(void **state) {
  (void)state;
  scene s;
  nyb_cache_options options = of_kind(1);
  options.max_tokens = 20;
  start(&s, options);
  ok(append(&s, 12));
  ok(nyb_cache_reserve(s.cache, 8, s.stream));
  assert_true(device_capture_begin(s.stream));
  ok(append(&s, 1));
  device_graph *graph = device_capture_end(s.stream);
  for (int i = 0; i < 8; i++) assert_true(device_graph_launch(graph, s.stream));
  assert_int_equal(*s.flag, 0);
  assert_true(device_graph_launch(graph, s.stream));
  assert_int_equal(*s.flag, 1);
  ok(nyb_cache_refresh(s.cache, s.stream));
  assert_int_equal(nyb_cache_length(s.cache, 0), 20);
  device_graph_destroy(graph);
  finish(&s);
}

/* Once graphs append, a trim gives no page back that the host believes to be empty. */
static void test_trim_after_graphs(void **state) {
  (void)state;
  scene s;
  start(&s, of_kind(3));
  ok(append(&s, 20));
  assert_true(device_capture_begin(s.stream));
  ok(append(&s, 1));
  device_graph *graph = device_capture_end(s.stream);
  for (int i = 0; i < 10; i++) assert_true(device_graph_launch(graph, s.stream));
  ok(nyb_cache_trim(s.cache, NYB_ALL_SEQUENCES, 6, NULL, s.stream));
  assert_int_equal(nyb_cache_length(s.cache, 0), 15);
  ok(nyb_cache_refresh(s.cache, s.stream));
  for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), 24);
  assert_int_equal(*s.flag, 0);
  device_graph_destroy(graph);
  finish(&s);
}

/* Whichever call of the driver fails, a cache holds what it held, and can go on. */
static void test_calls_that_fail(void **state) {
  (void)state;
  static const int64_t doubled[5] = {0, 1, 1, 2, 0};
  for (int kind = 0; kind < 4; kind++) {
    int failures = 0;
    int64_t kept = fake.cuda->live_allocations; /* what cuMemFree itself has kept */
    for (int64_t after = 0; after < 40; after++) {
      scene s;
      start(&s, of_kind(kind));
      ok(append(&s, 11));
      for (int operation = 0; operation < 3; operation++) {
        fake.cuda->fail_result = 2; /* out of memory */
        fake.cuda->fail_after = after;
        fake.cuda->fail_call = "*";
        fake.cuda->failed_call = NULL;
        nyb_status status = NYB_OK;
        for (int attempt = 0; attempt < 2; attempt++) {
          if (attempt == 1 && status == NYB_OK) break;
          status = operation == 0   ? append(&s, 40)
                   : operation == 1 ? nyb_cache_reserve(s.cache, 200, s.stream)
                                    : nyb_cache_reorder(s.cache, doubled, 5, s.stream);
          fake.cuda->fail_call = NULL;
          const char *failed = attempt == 0 ? fake.cuda->failed_call : NULL;
          kept += failed != NULL && strcmp(failed, "cuMemFree") == 0;
          if (status == NYB_OK) continue;
          assert_int_equal(attempt, 0);
          failures++;
          const int64_t held = operation == 0 ? 11 : 51;
          for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), held);
        }
      }
      ok(append(&s, 1));
      for (int i = 0; i < 5; i++) assert_int_equal(nyb_cache_length(s.cache, i), 52);
      ok(nyb_cache_refresh(s.cache, s.stream));
      for (int i = 0; i < 5; i++) assert_int_equal(nyb_cache_length(s.cache, i), 52);
      assert_int_equal(*s.flag, 0);
      finish(&s);
      assert_int_equal(fake.cuda->live_allocations, kept);
    }
    assert_true(failures > 20);
  }
}

/* Memory of the caller's, whose release waits for nothing, as those of frameworks do not. */
typedef struct strict_memory {
  int64_t left; /* allocations until one fails */
  int64_t live;
  int64_t syncs, launches; /* when the last was given out */
} strict_memory;

static void *strict_allocate(void *data, size_t bytes, size_t alignment) {
  strict_memory *memory = data;
  (void)alignment; /* as the driver's is */
  if (memory->left-- == 0) return NULL;
  memory->live++;
  memory->syncs = fake.calls("cuStreamSynchronize");
  memory->launches = fake.cuda->launches;
  return device_allocate((int64_t)bytes);
}

/* What was launched since the last allocation may write to that memory until the stream is waited
 * for. */
static void strict_release(void *data, void *given) {
  strict_memory *memory = data;
  if (fake.cuda->launches > memory->launches) {
    assert_true(fake.calls("cuStreamSynchronize") > memory->syncs);
  }
  memory->live--;
  device_free(given);
}

/* More sequences than there is room for, of which the last regions' memory is missing: what has
 * been copied into is not released before the copies are done. */
static void test_reorder_without_memory_for_all_regions(void **state) {
  (void)state;
  static const int64_t doubled[5] = {0, 1, 1, 2, 0};
  int failures = 0;
  for (int64_t left = 0; left < 10; left++) {
    strict_memory memory = {.left = -1};
    const nyb_allocator allocator = {strict_allocate, strict_release, &memory};
    scene s;
    start_with(&s, of_kind(2), &allocator);
    ok(append(&s, 11));
    memory.left = left;
    const nyb_status status = nyb_cache_reorder(s.cache, doubled, 5, s.stream);
    memory.left = -1;
    if (status != NYB_OK) {
      refused(status, NYB_ERROR_OUT_OF_MEMORY, "options.device_allocator had no");
      failures++;
    }
    ok(append(&s, 1));
    for (int i = 0; i < BATCH; i++) assert_int_equal(nyb_cache_length(s.cache, i), 12);
    assert_true(device_synchronize(s.stream));
    finish(&s);
    assert_int_equal(memory.live, 0);
  }
  assert_in_range(failures, 3, 9); /* three regions at least; with all of it, none */
}

/* ---- Files --------------------------------------------------------------------------------------
 */

/* Two caches that do the same, of the CPU and of CUDA; every row is another. */
static void append_to_both(scene *s, nyb_cache *twin, int64_t tokens, check_random *random) {
  for (int64_t i = 0; i < 8 * HEADS * 64 * DIM; i++) {
    s->rows[i] = (float)(2 * check_random_uniform(random) - 1);
  }
  nyb_append call = append_call(s, tokens);
  ok(nyb_cache_append(twin, &call, NULL));
  call.non_finite = s->flag;
  ok(nyb_cache_append(s->cache, &call, s->stream));
}

static char *saved(nyb_cache *cache, nyb_stream stream, long *bytes) {
  char path[] = "/tmp/nybble_test_XXXXXX";
  const int file = mkstemp(path);
  assert_true(file >= 0);
  close(file);
  ok(nyb_cache_save(cpu, path, &cache, 1, NULL, 0, stream));
  FILE *reader = fopen(path, "rb");
  assert_non_null(reader);
  assert_int_equal(fseek(reader, 0, SEEK_END), 0);
  *bytes = ftell(reader);
  rewind(reader);
  char *content = malloc((size_t)*bytes);
  assert_int_equal(fread(content, 1, (size_t)*bytes, reader), *bytes);
  fclose(reader);
  unlink(path);
  return content;
}

static void expect_same_file(const scene *s, nyb_cache *twin) {
  long wanted_bytes, bytes;
  char *wanted = saved(twin, NULL, &wanted_bytes), *held = saved(s->cache, s->stream, &bytes);
  assert_int_equal(bytes, wanted_bytes);
  assert_memory_equal(held, wanted, (size_t)bytes);
  free(wanted);
  free(held);
}

/* Loads what `from` holds. */
static nyb_status load_from(nyb_cache *from, nyb_cache *into, nyb_stream stream) {
  char path[] = "/tmp/nybble_test_XXXXXX";
  const int descriptor = mkstemp(path);
  assert_true(descriptor >= 0);
  close(descriptor);
  ok(nyb_cache_save(cpu, path, &from, 1, NULL, 0, NULL));
  nyb_safetensors *file;
  ok(nyb_safetensors_open(cpu, path, &file));
  const nyb_status status = nyb_cache_load(file, &into, 1, stream);
  nyb_safetensors_close(file);
  unlink(path);
  return status;
}

static void exercise(scene *s, nyb_cache *twin, check_random *random) {
  static const int64_t sources[BATCH] = {2, 0, 0};
  append_to_both(s, twin, 21, random);
  for (int i = 0; i < 3; i++) {
    ok(nyb_cache_trim(twin, i, i, NULL, NULL));
    ok(nyb_cache_trim(s->cache, i, i, NULL, s->stream));
  }
  append_to_both(s, twin, 3, random);
  ok(nyb_cache_reorder(twin, sources, BATCH, NULL));
  ok(nyb_cache_reorder(s->cache, sources, BATCH, s->stream));
  append_to_both(s, twin, 1, random);
}

static nyb_cache *make_twin(int kind) {
  nyb_cache_options options = of_kind(kind);
  nyb_cache *twin = NULL;
  options.struct_size = sizeof options;
  options.batch = BATCH;
  options.kv_heads = HEADS;
  options.key_dim = options.value_dim = DIM;
  options.key_format = options.value_format = (nyb_format){NYB_AFFINE, 4, 32, NYB_F32};
  ok(nyb_cache_create(cpu, &options, &twin));
  return twin;
}

/* A ring that grows where the device has turned it, which the host has not counted. */
static void test_growing_after_graphs(void **state) {
  (void)state;
  check_random random = {.state = 78};
  scene s;
  start(&s, of_kind(1));
  nyb_cache *twin = make_twin(1);
  append_to_both(&s, twin, 3, &random);
  assert_true(device_capture_begin(s.stream));
  const nyb_append call = append_call(&s, 1);
  ok(append(&s, 1));
  device_graph *graph = device_capture_end(s.stream);
  for (int i = 0; i < 12; i++) {
    assert_true(device_graph_launch(graph, s.stream));
    ok(nyb_cache_append(twin, &call, NULL));
  }
  append_to_both(&s, twin, 5, &random);
  expect_same_file(&s, twin);
  assert_int_equal(*s.flag, 0);
  device_graph_destroy(graph);
  nyb_cache_destroy(twin);
  finish(&s);
}

/* A cache on CUDA is saved as the CPU's is, byte for byte, and goes on from what it loads. */
static void test_files(void **state) {
  (void)state;
  check_random random = {.state = 77};
  for (int kind = 0; kind < 4; kind++) {
    scene s;
    start(&s, of_kind(kind));
    nyb_cache *twin = make_twin(kind), *other = make_twin(kind);
    refused(nyb_cache_save(cpu, "/tmp/nybble_test_none", &s.cache, 1, NULL, 0, s.stream),
            NYB_ERROR_LENGTH, "layers[0] is empty");
    exercise(&s, twin, &random);
    expect_same_file(&s, twin);
    /* Another content, loaded, with every call of the driver failing once. */
    ok(load_from(twin, other, NULL));
    ok(nyb_cache_trim(other, 1, 1, NULL, NULL));
    int failures = 0;
    for (int64_t after = 0; after < 50; after++) {
      fake.cuda->fail_result = 2;
      fake.cuda->fail_after = after;
      fake.cuda->fail_call = "*";
      const nyb_status status = load_from(other, s.cache, s.stream);
      fake.cuda->fail_call = NULL;
      failures += status != NYB_OK;
      if (status == NYB_OK) ok(load_from(twin, s.cache, s.stream)); /* as it was */
      expect_same_file(&s, twin);
    }
    assert_true(failures > 10);
    ok(load_from(other, s.cache, s.stream));
    expect_same_file(&s, other);
    exercise(&s, other, &random);
    expect_same_file(&s, other);
    nyb_cache_destroy(twin);
    nyb_cache_destroy(other);
    finish(&s);
  }
}

static int set_up(void **state) {
  (void)state;
  fake = fake_cuda_open("fake_cuda", "fake_nvrtc");
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  fake.cuda->launch = take_launch;
  fake.cuda->graph_launch = launch_graph;
  return nyb_context_create(NULL, &cpu) == NYB_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  nyb_context_destroy(cpu);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_walks),
      cmocka_unit_test(test_decoding_neither_waits_nor_allocates),
      cmocka_unit_test(test_pages_in_graphs),
      cmocka_unit_test(test_rings_in_graphs),
      cmocka_unit_test(test_limits_in_graphs),
      cmocka_unit_test(test_trim_after_graphs),
      cmocka_unit_test(test_calls_that_fail),
      cmocka_unit_test(test_reorder_without_memory_for_all_regions),
      cmocka_unit_test(test_growing_after_graphs),
      cmocka_unit_test(test_files),
  };
  return cmocka_run_group_tests_name("cuda_cache_kinds", tests, set_up, tear_down);
}
