/* SPDX-License-Identifier: Apache-2.0 */
/* Quantize, dequantize, GeGLU and the KV cache on a GPU against the same calls on the CPU: every
 * byte of the memory around them too. Needs a GPU; exits with 77 where there is none. */
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../src/cuda/driver.h"
#include "../src/numeric.h"
#include "check.h"

/* ---- The GPU -------------------------------------------------------------------------------- */

static const nyb_cuda_driver *driver;
static nyb_context *cpu, *gpu;
static nyb_stream stream;
static check_random random_state = {7};

static void ok(nyb_status status) {
  if (status != NYB_OK) fail_msg("%s: %s", nyb_status_name(status), nyb_last_error());
}

static void driver_ok(nyb_cu_result result) {
  if (result != NYB_CU_SUCCESS) ok(nyb_cuda_check(driver, result, "a call of the test"));
}

static int64_t below(int64_t bound) { return check_random_below(&random_state, bound); }

static void *device_memory(int64_t bytes) {
  nyb_cu_address address;
  driver_ok(driver->MemAlloc(&address, (size_t)bytes));
  return (void *)(uintptr_t)address;
}

static void device_free(void *memory) {
  driver_ok(driver->MemFree((nyb_cu_address)(uintptr_t)memory));
}

static void upload(void *to, const void *from, int64_t bytes) {
  driver_ok(driver->MemcpyHtoDAsync((nyb_cu_address)(uintptr_t)to, from, (size_t)bytes, stream));
  driver_ok(driver->StreamSynchronize(stream));
}

static void download(void *to, const void *from, int64_t bytes) {
  driver_ok(driver->MemcpyDtoHAsync(to, (nyb_cu_address)(uintptr_t)from, (size_t)bytes, stream));
  driver_ok(driver->StreamSynchronize(stream));
}

/* ---- One memory on both sides ---------------------------------------------------------------- */

/* All that a call touches lies here, at the same places on the CPU and on the GPU; what nothing is
 * said of is noise, and must be the same noise afterwards. */
enum { ARENA_BYTES = 40 << 20 };
static char *arena, *fetched, *device_arena;
static int64_t arena_used;

static void empty_arena(void) {
  for (int64_t i = 0; i < arena_used + 4096 && i < ARENA_BYTES; i += 8) {
    const uint64_t noise = check_random_bits(&random_state);
    memcpy(arena + i, &noise, 8);
  }
  arena_used = 0;
}

/* Some of it, aligned to `alignment` or by chance to more. */
static int64_t place(int64_t bytes, int64_t alignment) {
  const int64_t shift = below(3) == 0 ? alignment * below(16) : 0;
  const int64_t at = (arena_used + 255) / 256 * 256 + shift;
  arena_used = at + bytes;
  if (arena_used + 256 > ARENA_BYTES) fail_msg("the arena is too small");
  return at;
}

static void send_arena(void) { upload(device_arena, arena, arena_used + 256); }

static void compare_arena(const char *what) {
  download(fetched, device_arena, arena_used + 256);
  if (memcmp(fetched, arena, (size_t)arena_used + 256) == 0) return;
  int64_t at = 0;
  while (fetched[at] == arena[at]) at++;
  fail_msg("%s: byte %lld of the arena is %#x, not %#x", what, (long long)at,
           (unsigned)(uint8_t)fetched[at], (unsigned)(uint8_t)arena[at]);
}

/* Strides of rows in a random order of axes, with gaps, some backwards. *first gets the place of
 * the first row, counted in elements, *elements how many there must be. */
static void random_strides(const int64_t shape[3], int64_t row, int64_t gap_unit, int64_t stride[3],
                           int64_t *first, int64_t *elements) {
  int axes[3] = {2, 1, 0};
  const bool plain = below(3) == 0;
  for (int i = 2; i > 0 && !plain; i--) {
    const int j = (int)below(i + 1), axis = axes[i];
    axes[i] = axes[j];
    axes[j] = axis;
  }
  int64_t step = row;
  *first = 0;
  for (int i = 0; i < 3; i++) {
    if (!plain) step += gap_unit * below(3);
    const bool backwards = !plain && below(4) == 0;
    stride[axes[i]] = backwards ? -step : step;
    if (backwards) *first += step * (shape[axes[i]] - 1);
    step *= shape[axes[i]];
  }
  *elements = step + gap_unit * 2;
}

/* ---- Elements -------------------------------------------------------------------------------- */

static float element(int kind, int64_t i) {
  const float normal = (float)check_random_normal(&random_state);
  const float uniform = (float)check_random_uniform(&random_state);
  switch (kind) {
    case 0: return normal;
    case 1: return -4 - uniform;
    case 2: return 3 + uniform;
    case 3: return i % 64 < 32 ? 0.0f : -0.0f;
    case 4: return i / 32 % 2 == 0 ? 9 : -9;
    case 5: return 1e-9f * (float)(i % 32);
    case 6: return -0.5f * floorf(uniform * 31);
    case 7: return 30000 * (2 * uniform - 1);
    case 8: return 0x1p-130f * normal;
    case 9: return i % 2 == 0 ? 7.0f : -7.0f;
    default: return i % 50 == 5 ? 300 : normal;
  }
}

static void fill(int64_t at, nyb_dtype dtype, int64_t count, int kind) {
  for (int64_t i = 0; i < count; i++) nyb_store_f32(arena + at, dtype, i, element(kind, i));
}

static nyb_format random_format(int64_t *dim) {
  static const int32_t widths[] = {2, 3, 4, 5, 6, 8};
  nyb_format format = {.scheme = NYB_AFFINE, .dtype = (nyb_dtype)(1 + below(3))};
  if (below(4) == 0) {
    format.scheme = NYB_PLAIN;
    *dim = 1 + below(200);
    return format;
  }
  format.bits = widths[below(6)];
  format.group_size = 32 << below(3);
  *dim = format.group_size * (1 + below(4));
  return format;
}

/* Places for rows of that format, poisoned; pointers are into `base`. */
typedef struct stored_place {
  nyb_format format;
  int64_t array[3]; /* codes, scales, biases of the first row */
  int64_t stride[3][3];
} stored_place;

static stored_place place_stored(const nyb_format *format, const int64_t shape[3], int64_t dim) {
  stored_place placed = {.format = *format};
  const bool affine = format->scheme == NYB_AFFINE;
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(format->dtype);
  for (int i = 0; i < (affine ? 3 : 1); i++) {
    const int64_t bytes = i == 0 && affine ? 4 : element_bytes;
    const int64_t row = i > 0 ? dim / format->group_size : affine ? dim * format->bits / 32 : dim;
    int64_t first, elements;
    random_strides(shape, row, below(2) == 0 ? 1 : 8, placed.stride[i], &first, &elements);
    placed.array[i] = place(elements * bytes, bytes) + first * bytes;
  }
  return placed;
}

static nyb_stored_output stored_in(char *base, const stored_place *placed) {
  const bool affine = placed->format.scheme == NYB_AFFINE;
  nyb_stored_output stored = {.format = placed->format, .codes = base + placed->array[0]};
  if (affine) stored.scales = base + placed->array[1];
  if (affine) stored.biases = base + placed->array[2];
  memcpy(stored.codes_stride, placed->stride[0], sizeof placed->stride[0]);
  memcpy(stored.scales_stride, placed->stride[1], sizeof placed->stride[1]);
  memcpy(stored.biases_stride, placed->stride[2], sizeof placed->stride[2]);
  return stored;
}

static nyb_stored as_input(const nyb_stored_output *output) {
  nyb_stored stored = {
      output->format, output->codes, output->scales, output->biases, {0}, {0}, {0}};
  memcpy(stored.codes_stride, output->codes_stride, sizeof stored.codes_stride);
  memcpy(stored.scales_stride, output->scales_stride, sizeof stored.scales_stride);
  memcpy(stored.biases_stride, output->biases_stride, sizeof stored.biases_stride);
  return stored;
}

/* ---- Quantize and dequantize ------------------------------------------------------------------
 */

static int32_t *device_flag;

static void clear_flag(void) { upload(device_flag, &(int32_t){0}, sizeof(int32_t)); }

static int32_t read_flag(void) {
  int32_t flag;
  download(&flag, device_flag, sizeof flag);
  return flag;
}

typedef struct quantize_case {
  nyb_quantize call; /* in arena */
  stored_place stored;
  int64_t input;
  int64_t input_elements;
} quantize_case;

static quantize_case random_quantize(void) {
  quantize_case made = {.call = NYB_QUANTIZE_INIT};
  nyb_quantize *const call = &made.call;
  empty_arena();
  const nyb_format format = random_format(&call->dim);
  const int64_t shape[3] = {1 + below(3), 1 + below(3), 1 + below(70)};
  call->batch = shape[0];
  call->heads = shape[1];
  call->tokens = shape[2];
  call->rule = (nyb_rule)below(2);
  call->input.dtype = (nyb_dtype)(1 + below(3));
  const int64_t bytes = (int64_t)nyb_dtype_bytes(call->input.dtype);
  int64_t first;
  random_strides(shape, call->dim, below(2) == 0 ? 1 : 8, call->input.stride, &first,
                 &made.input_elements);
  made.input = place(made.input_elements * bytes, bytes);
  call->input.data = arena + made.input + first * bytes;
  made.stored = place_stored(&format, shape, call->dim);
  call->output = stored_in(arena, &made.stored);
  return made;
}

static nyb_quantize on_device(const quantize_case *made) {
  nyb_quantize call = made->call;
  call.input.data = device_arena + ((const char *)made->call.input.data - arena);
  call.output = stored_in(device_arena, &made->stored);
  call.non_finite = device_flag;
  return call;
}

static void dequantize_both(const quantize_case *made) {
  nyb_dequantize call = NYB_DEQUANTIZE_INIT;
  call.batch = made->call.batch;
  call.heads = made->call.heads;
  call.tokens = made->call.tokens;
  call.dim = made->call.dim;
  call.output.dtype = (nyb_dtype)(1 + below(3));
  const int64_t bytes = (int64_t)nyb_dtype_bytes(call.output.dtype);
  const int64_t shape[3] = {call.batch, call.heads, call.tokens};
  int64_t first, elements;
  random_strides(shape, call.dim, below(2) == 0 ? 1 : 8, call.output.stride, &first, &elements);
  const int64_t at = place(elements * bytes, bytes) + first * bytes;
  send_arena();
  nyb_stored_output stored = stored_in(arena, &made->stored);
  call.input = as_input(&stored);
  call.output.data = arena + at;
  ok(nyb_dequantize_run(cpu, &call, NULL));
  stored = stored_in(device_arena, &made->stored);
  call.input = as_input(&stored);
  call.output.data = device_arena + at;
  ok(nyb_dequantize_run(gpu, &call, stream));
  compare_arena("dequantize");
}

static void test_quantize_and_dequantize(void **state) {
  (void)state;
  for (int run = 0; run < 600; run++) {
    quantize_case made = random_quantize();
    const nyb_quantize device_call = on_device(&made);
    fill(made.input, made.call.input.dtype, made.input_elements, run % 11);
    send_arena();
    clear_flag();
    const nyb_status status = nyb_quantize_run(cpu, &made.call, NULL);
    ok(nyb_quantize_run(gpu, &device_call, stream));
    assert_int_equal(read_flag(), status != NYB_OK);
    if (status != NYB_OK) continue; /* too large for f16 */
    compare_arena("quantize");
    dequantize_both(&made);
  }
}

/* A group of NaNs is stored as zeros, and told of; the others are as without it. */
static void test_non_finite_groups(void **state) {
  (void)state;
  for (int run = 0; run < 60; run++) {
    quantize_case made = random_quantize();
    if (made.stored.format.scheme == NYB_PLAIN) continue;
    const nyb_quantize device_call = on_device(&made);
    const nyb_dtype dtype = made.call.input.dtype, scale_dtype = made.stored.format.dtype;
    fill(made.input, dtype, made.input_elements, 0);
    const int64_t element_bytes = (int64_t)nyb_dtype_bytes(dtype);
    const int64_t first =
        ((const char *)made.call.input.data - (arena + made.input)) / element_bytes;
    const int64_t groups = made.call.dim / made.stored.format.group_size, group = below(groups);
    const int64_t at = first + group * made.stored.format.group_size;
    const float bad = run % 3 == 0 ? NAN : run % 3 == 1 ? INFINITY : -INFINITY;
    nyb_store_f32(arena + made.input, dtype, at + below(made.stored.format.group_size), bad);
    send_arena();
    for (int32_t i = 0; i < made.stored.format.group_size; i++) {
      nyb_store_f32(arena + made.input, dtype, at + i, 0);
    }
    ok(nyb_quantize_run(cpu, &made.call, NULL));
    nyb_store_f32(made.call.output.scales, scale_dtype, group, 0);
    nyb_store_f32(made.call.output.biases, scale_dtype, group, 0);
    clear_flag();
    ok(nyb_quantize_run(gpu, &device_call, stream));
    assert_int_equal(read_flag(), 1);
    /* The inputs differ on purpose. */
    download(arena + made.input, device_arena + made.input, made.input_elements * element_bytes);
    compare_arena("a group that is not finite");
  }
}

/* ---- GeGLU ----------------------------------------------------------------------------------- */

static void geglu_both(const nyb_geglu *given, int64_t gate, int64_t up, int64_t out) {
  nyb_geglu call = *given;
  send_arena();
  call.gate = arena + gate;
  call.up = arena + up;
  call.out = arena + out;
  call.path = NYB_PATH_FUSED; /* of which every bit is compat's too, but in f32 */
  ok(nyb_geglu_run(cpu, &call, NULL));
  call.gate = device_arena + gate;
  call.up = device_arena + up;
  call.out = device_arena + out;
  call.path = given->path;
  ok(nyb_geglu_run(gpu, &call, stream));
}

/* Every gate against ups of every size, in as many elements as the mode needs. */
static void all_gates(nyb_dtype dtype, nyb_path path, int64_t elements) {
  nyb_geglu call = NYB_GEGLU_INIT;
  call.rows = 1;
  call.columns = elements;
  call.dtype = dtype;
  call.path = path;
  empty_arena();
  const int64_t gate = place(elements * 2, 2), up = place(elements * 2, 2);
  const int64_t out = place(elements * 2, 2);
  for (int64_t i = 0; i < elements; i++) {
    const uint16_t bits[2] = {(uint16_t)i, (uint16_t)check_random_bits(&random_state)};
    memcpy(arena + gate + i * 2, &bits[0], 2);
    memcpy(arena + up + i * 2, &bits[1], 2);
    if (i < 65536) nyb_store_f32(arena + up, dtype, i, 1);
  }
  geglu_both(&call, gate, up, out);
  compare_arena(path == NYB_PATH_COMPAT ? "GeGLU, spelled out" : "GeGLU, fused");
}

static void test_geglu_of_every_gate(void **state) {
  (void)state;
  for (int dtype = NYB_F16; dtype <= NYB_BF16; dtype++) {
    all_gates((nyb_dtype)dtype, NYB_PATH_COMPAT, 5 * 65536);
    all_gates((nyb_dtype)dtype, NYB_PATH_FUSED, 5 * 65536);
    for (int run = 0; run < 3; run++) {
      all_gates((nyb_dtype)dtype, NYB_PATH_FUSED, (4 << 20) + 65536 + run); /* by the table */
    }
  }
}

static void random_geglu(int64_t most_elements, bool in_f32) {
  nyb_geglu call = NYB_GEGLU_INIT;
  call.dtype = in_f32 ? NYB_F32 : (nyb_dtype)(NYB_F16 + below(2));
  call.path = !in_f32 && below(3) == 0 ? NYB_PATH_COMPAT : NYB_PATH_FUSED;
  call.rows = 1 + below(9);
  call.columns = 1 + below(most_elements / call.rows);
  const int64_t bytes = (int64_t)nyb_dtype_bytes(call.dtype);
  const int64_t gap = below(2) == 0 ? 0 : below(3) == 0 ? 1 + below(7) : 8;
  const int64_t row = below(2) == 0 ? call.columns : (call.columns + 7) / 8 * 8;
  const bool halves = below(4) == 0; /* of one tensor */
  empty_arena();
  call.gate_stride = halves ? 2 * row : row + gap;
  call.up_stride = call.gate_stride;
  call.out_stride = row + below(2) * 8;
  const int64_t gate = place(call.rows * call.gate_stride * bytes, bytes);
  const int64_t up = halves ? gate + row * bytes : place(call.rows * call.up_stride * bytes, bytes);
  int64_t out = place(call.rows * call.out_stride * bytes, bytes);
  const int64_t where = below(4);
  if (where < 2) {
    out = where == 0 ? gate : up;
    call.out_stride = call.gate_stride;
  }
  for (int64_t i = 0; i < arena_used / bytes && in_f32; i++) {
    nyb_store_f32(arena, NYB_F32, i, (float)(3 * check_random_normal(&random_state)));
  }
  geglu_both(&call, gate, up, out);
  compare_arena("GeGLU of a view");
}

static void test_geglu_of_views(void **state) {
  (void)state;
  for (int run = 0; run < 200; run++) random_geglu(run % 20 == 1 ? 4 << 20 : 5000, run % 4 == 0);
}

/* In f32 the two tanh differ: docs/numerics.md allows 2^-21 |gate * up|. */
static void test_geglu_spelled_out_in_f32(void **state) {
  (void)state;
  enum { COUNT = 100003 };
  nyb_geglu call = NYB_GEGLU_INIT;
  call.rows = 1;
  call.columns = COUNT;
  call.dtype = NYB_F32;
  call.path = NYB_PATH_COMPAT;
  empty_arena();
  const int64_t gate = place(COUNT * 4, 4), up = place(COUNT * 4, 4), out = place(COUNT * 4, 4);
  for (int64_t i = 0; i < COUNT; i++) {
    nyb_store_f32(arena + gate, NYB_F32, i, (float)(4 * check_random_normal(&random_state)));
    nyb_store_f32(arena + up, NYB_F32, i, (float)check_random_normal(&random_state));
  }
  geglu_both(&call, gate, up, out);
  download(fetched, device_arena, arena_used + 256);
  for (int64_t i = 0; i < COUNT; i++) {
    const double x = (double)nyb_load_f32(arena + gate, NYB_F32, i);
    const double u = (double)nyb_load_f32(arena + up, NYB_F32, i);
    const double got = (double)nyb_load_f32(fetched + out, NYB_F32, i);
    const double want = 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * (x * x * x)))) * u;
    assert_true(fabs(got - want) <= 0x1p-21 * fabs(x * u) + 0x1p-140);
  }
}

/* ---- The cache --------------------------------------------------------------------------------
 */

typedef struct cache_pair {
  nyb_cache_options options;
  nyb_cache *on_cpu, *on_gpu;
} cache_pair;

static cache_pair make_pair(int64_t batch, int64_t heads, int64_t capacity, int64_t most) {
  cache_pair pair = {.options = NYB_CACHE_OPTIONS_INIT};
  nyb_cache_options *const options = &pair.options;
  options->batch = batch;
  options->kv_heads = heads;
  options->key_format = random_format(&options->key_dim);
  options->value_format = random_format(&options->value_dim);
  options->rule = (nyb_rule)below(2);
  options->initial_capacity_tokens = capacity;
  options->max_tokens = most;
  ok(nyb_cache_create(cpu, options, &pair.on_cpu));
  ok(nyb_cache_create(gpu, options, &pair.on_gpu));
  return pair;
}

static void destroy_pair(cache_pair *pair) {
  nyb_cache_destroy(pair->on_cpu);
  nyb_cache_destroy(pair->on_gpu);
}

static void compare_rows(const char *what, const void *on_cpu, const void *on_gpu, int64_t bytes) {
  if (on_cpu == NULL || bytes == 0) return;
  download(fetched, on_gpu, bytes);
  if (memcmp(fetched, on_cpu, (size_t)bytes) != 0) fail_msg("%s of a cache differ", what);
}

static void compare_stored(const cache_pair *pair, const nyb_stored *c, const nyb_stored *g,
                           int64_t dim) {
  const bool affine = c->format.scheme == NYB_AFFINE;
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(c->format.dtype);
  const int64_t code_bytes = affine ? 4 : element_bytes;
  const int64_t row_codes = affine ? dim * c->format.bits / 32 : dim;
  const int64_t row_groups = affine ? dim / c->format.group_size : 0;
  for (int64_t b = 0; b < pair->options.batch; b++) {
    const int64_t tokens = nyb_cache_length(pair->on_cpu, b);
    for (int64_t h = 0; h < pair->options.kv_heads; h++) {
      const int64_t cc = (b * c->codes_stride[0] + h * c->codes_stride[1]) * code_bytes;
      const int64_t gc = (b * g->codes_stride[0] + h * g->codes_stride[1]) * code_bytes;
      compare_rows("codes", (const char *)c->codes + cc, (const char *)g->codes + gc,
                   tokens * row_codes * code_bytes);
      if (!affine) continue;
      const int64_t cs = (b * c->scales_stride[0] + h * c->scales_stride[1]) * element_bytes;
      const int64_t gs = (b * g->scales_stride[0] + h * g->scales_stride[1]) * element_bytes;
      compare_rows("scales", (const char *)c->scales + cs, (const char *)g->scales + gs,
                   tokens * row_groups * element_bytes);
      compare_rows("biases", (const char *)c->biases + cs, (const char *)g->biases + gs,
                   tokens * row_groups * element_bytes);
    }
  }
}

static void compare_pair(const cache_pair *pair) {
  nyb_attention c = NYB_ATTENTION_INIT, g = NYB_ATTENTION_INIT;
  ok(nyb_cache_view(pair->on_cpu, &c));
  ok(nyb_cache_view(pair->on_gpu, &g));
  int32_t lengths[64];
  download(lengths, g.lengths, pair->options.batch * 4);
  for (int64_t b = 0; b < pair->options.batch; b++) {
    assert_int_equal(lengths[b], nyb_cache_length(pair->on_cpu, b));
    assert_int_equal(nyb_cache_length(pair->on_gpu, b), lengths[b]);
  }
  compare_stored(pair, &c.k, &g.k, c.key_dim);
  compare_stored(pair, &c.v, &g.v, c.value_dim);
}

/* The same rows for both. */
typedef struct append_case {
  nyb_append on_cpu, on_gpu;
  int64_t at[2], elements[2]; /* of key and value in the arena */
} append_case;

static void fill_append(const append_case *made, int kind) {
  fill(made->at[0], made->on_cpu.key.dtype, made->elements[0], kind);
  fill(made->at[1], made->on_cpu.value.dtype, made->elements[1], kind);
}

static append_case random_append(const cache_pair *pair, int64_t tokens) {
  append_case made = {.on_cpu = NYB_APPEND_INIT};
  nyb_append *const append = &made.on_cpu;
  empty_arena();
  append->tokens = tokens;
  const int64_t shape[3] = {pair->options.batch, pair->options.kv_heads, tokens};
  const int64_t dims[2] = {pair->options.key_dim, pair->options.value_dim};
  nyb_input *const inputs[2] = {&append->key, &append->value};
  for (int part = 0; part < 2; part++) {
    inputs[part]->dtype = (nyb_dtype)(1 + below(3));
    const int64_t bytes = (int64_t)nyb_dtype_bytes(inputs[part]->dtype);
    int64_t first;
    random_strides(shape, dims[part], 8, inputs[part]->stride, &first, &made.elements[part]);
    made.at[part] = place(made.elements[part] * bytes, bytes);
    inputs[part]->data = arena + made.at[part] + first * bytes;
  }
  fill_append(&made, (int)below(3));
  made.on_gpu = *append;
  made.on_gpu.key.data = device_arena + ((const char *)append->key.data - arena);
  made.on_gpu.value.data = device_arena + ((const char *)append->value.data - arena);
  made.on_gpu.non_finite = device_flag;
  return made;
}

static void append_both(const cache_pair *pair, int64_t tokens) {
  const append_case made = random_append(pair, tokens);
  send_arena();
  ok(nyb_cache_append(pair->on_cpu, &made.on_cpu, NULL));
  ok(nyb_cache_append(pair->on_gpu, &made.on_gpu, stream));
}

static void trim_both(const cache_pair *pair) {
  const int64_t sequence = below(pair->options.batch + 1) - 1, tokens = below(12);
  int64_t lost[2];
  ok(nyb_cache_trim(pair->on_cpu, sequence, tokens, &lost[0], NULL));
  ok(nyb_cache_trim(pair->on_gpu, sequence, tokens, &lost[1], stream));
  assert_int_equal(lost[0], lost[1]);
}

static void test_cache_as_on_the_cpu(void **state) {
  (void)state;
  for (int run = 0; run < 60; run++) {
    clear_flag();
    cache_pair pair = make_pair(1 + below(5), 1 + below(4), below(2) * 20, 0);
    for (int step = 0; step < 25; step++) {
      switch (below(8)) {
        case 0: trim_both(&pair); break;
        case 1:
          if (below(8) != 0) break;
          ok(nyb_cache_reset(pair.on_cpu, NULL));
          ok(nyb_cache_reset(pair.on_gpu, stream));
          break;
        case 2:
          if (below(4) == 0) ok(nyb_cache_reserve(pair.on_gpu, 100 + below(300), stream));
          break;
        case 3: append_both(&pair, below(90)); break;
        default: append_both(&pair, below(4));
      }
      if (step % 5 == 4) compare_pair(&pair);
    }
    if (run % 2 == 0) ok(nyb_cache_refresh(pair.on_gpu, stream));
    compare_pair(&pair);
    assert_int_equal(read_flag(), 0);
    nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
    ok(nyb_cache_get_usage(pair.on_gpu, &usage));
    assert_true(usage.reallocations <= 12);
    destroy_pair(&pair);
  }
}

/* ---- Graphs -----------------------------------------------------------------------------------
 */

typedef struct graph_functions {
  int (*begin)(nyb_stream stream, int mode);
  int (*end)(nyb_stream stream, void **graph);
  int (*instantiate)(void **executable, void *graph, unsigned long long flags);
  int (*launch)(void *executable, nyb_stream stream);
  int (*destroy)(void *graph);
  int (*destroy_executable)(void *executable);
} graph_functions;

static graph_functions graphs;

static void find(void *library, const char *name, void *function) {
  void *const symbol = dlsym(library, name);
  if (symbol == NULL) fail_msg("the driver has no %s", name);
  memcpy(function, &symbol, sizeof symbol);
}

static void load_graphs(void) {
  const char *name = getenv("NYBBLE_LIBCUDA");
  void *const library = dlopen(name != NULL ? name : "libcuda.so.1", RTLD_NOW);
  if (library == NULL) fail_msg("%s", dlerror());
  find(library, "cuStreamBeginCapture_v2", &graphs.begin);
  find(library, "cuStreamEndCapture", &graphs.end);
  find(library, "cuGraphInstantiateWithFlags", &graphs.instantiate);
  find(library, "cuGraphLaunch", &graphs.launch);
  find(library, "cuGraphDestroy", &graphs.destroy);
  find(library, "cuGraphExecDestroy", &graphs.destroy_executable);
}

static void *capture_append(nyb_cache *cache, const nyb_append *append) {
  void *graph, *executable;
  driver_ok(driver->StreamSynchronize(stream));
  driver_ok(graphs.begin(stream, 0));
  ok(nyb_cache_append(cache, append, stream));
  driver_ok(graphs.end(stream, &graph));
  driver_ok(graphs.instantiate(&executable, graph, 0));
  driver_ok(graphs.destroy(graph));
  return executable;
}

/* A graph of one append, captured at some length and replayed 300 times with other rows, then until
 * the cache is full. */
static void replay_append(int64_t tokens) {
  enum { STEPS = 300, BATCH = 5, SPARE = 20, TRIMMED = 7 };
  cache_pair pair = make_pair(BATCH, 1 + below(4), 0, (STEPS + SPARE) * tokens);
  ok(nyb_cache_reserve(pair.on_gpu, (STEPS + SPARE) * tokens, stream));
  append_both(&pair, SPARE / 2 * tokens);
  ok(nyb_cache_trim(pair.on_cpu, 1, TRIMMED, NULL, NULL));
  ok(nyb_cache_trim(pair.on_gpu, 1, TRIMMED, NULL, stream));
  const append_case made = random_append(&pair, tokens);
  void *const executable = capture_append(pair.on_gpu, &made.on_gpu);
  clear_flag();
  for (int step = 0; step < STEPS + SPARE / 2; step++) {
    fill_append(&made, 0);
    send_arena();
    ok(nyb_cache_append(pair.on_cpu, &made.on_cpu, NULL));
    driver_ok(graphs.launch(executable, stream));
    if (step % 100 != 7) continue;
    ok(nyb_cache_refresh(pair.on_gpu, stream));
    compare_pair(&pair);
  }
  assert_int_equal(read_flag(), 0);
  ok(nyb_cache_refresh(pair.on_gpu, stream));
  compare_pair(&pair);
  driver_ok(graphs.launch(executable, stream)); /* all are full, but for one if it is one token */
  assert_int_equal(read_flag(), 1);
  ok(nyb_cache_refresh(pair.on_gpu, stream));
  const int64_t full = (STEPS + SPARE) * tokens;
  assert_int_equal(nyb_cache_length(pair.on_gpu, 0), full);
  const int64_t added = tokens <= TRIMMED ? tokens : 0;
  assert_int_equal(nyb_cache_length(pair.on_gpu, 1), full - TRIMMED + added);
  driver_ok(graphs.destroy_executable(executable));
  destroy_pair(&pair);
}

static void test_captured_append(void **state) {
  (void)state;
  load_graphs();
  for (int run = 0; run < 4; run++) replay_append(1);
  replay_append(40); /* some blocks for each sequence */
}

static void test_growth_in_a_capture(void **state) {
  (void)state;
  load_graphs();
  cache_pair pair = make_pair(2, 2, 16, 0);
  append_both(&pair, 16);
  const append_case made = random_append(&pair, 1);
  void *graph;
  send_arena();
  driver_ok(graphs.begin(stream, 0));
  assert_int_equal(nyb_cache_append(pair.on_gpu, &made.on_gpu, stream), NYB_ERROR_UNSUPPORTED);
  assert_non_null(strstr(nyb_last_error(), "nyb_cache_reserve"));
  assert_int_equal(nyb_cache_reserve(pair.on_gpu, 400, stream), NYB_ERROR_UNSUPPORTED);
  assert_int_equal(nyb_cache_refresh(pair.on_gpu, stream), NYB_ERROR_UNSUPPORTED);
  driver_ok(graphs.end(stream, &graph));
  driver_ok(graphs.destroy(graph));
  compare_pair(&pair);
  ok(nyb_cache_append(pair.on_cpu, &made.on_cpu, NULL));
  ok(nyb_cache_append(pair.on_gpu, &made.on_gpu, stream));
  compare_pair(&pair);
  destroy_pair(&pair);
}

/* ---- Misuse -----------------------------------------------------------------------------------
 */

static void test_host_pointers(void **state) {
  (void)state;
  quantize_case made = random_quantize();
  assert_int_equal(nyb_quantize_run(gpu, &made.call, stream), NYB_ERROR_POINTER);
  assert_non_null(strstr(nyb_last_error(), "quantize.input.data"));
  nyb_geglu geglu = NYB_GEGLU_INIT;
  geglu.rows = geglu.columns = 8;
  geglu.dtype = NYB_BF16;
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = 8;
  geglu.gate = arena;
  geglu.up = arena + 256;
  geglu.out = arena + 512;
  assert_int_equal(nyb_geglu_run(gpu, &geglu, stream), NYB_ERROR_POINTER);
  assert_non_null(strstr(nyb_last_error(), "geglu.gate"));
  cache_pair pair = make_pair(1, 1, 8, 0);
  append_case append = random_append(&pair, 1);
  append.on_gpu.value.data = append.on_cpu.value.data;
  assert_int_equal(nyb_cache_append(pair.on_gpu, &append.on_gpu, stream), NYB_ERROR_POINTER);
  assert_non_null(strstr(nyb_last_error(), "append.value.data"));
  compare_pair(&pair);
  destroy_pair(&pair);
}

/* ---- Memory of the caller's --------------------------------------------------------------------
 */

typedef struct device_pool {
  int64_t live, allocations, fail_at;
} device_pool;

static void *pool_allocate(void *data, size_t bytes, size_t alignment) {
  device_pool *pool = data;
  assert_true(alignment <= 256);
  if (++pool->allocations == pool->fail_at) return NULL;
  pool->live++;
  return device_memory((int64_t)bytes);
}

static void pool_release(void *data, void *memory) {
  ((device_pool *)data)->live--;
  device_free(memory);
}

static void test_device_allocator(void **state) {
  (void)state;
  device_pool pool = {0};
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.backend = NYB_BACKEND_CUDA;
  options.device_allocator = (nyb_allocator){pool_allocate, pool_release, &pool};
  nyb_context *const usual = gpu;
  ok(nyb_context_create(&options, &gpu));
  cache_pair pair = make_pair(2, 2, 16, 0);
  append_both(&pair, 16);
  for (int64_t fail_at = 1; fail_at <= 2; fail_at++) { /* a cache that cannot be made */
    pool.fail_at = pool.allocations + fail_at;
    const int64_t live = pool.live;
    nyb_cache *none = NULL;
    assert_int_equal(nyb_cache_create(gpu, &pair.options, &none), NYB_ERROR_OUT_OF_MEMORY);
    assert_null(none);
    assert_int_equal(pool.live, live);
  }
  pool.fail_at = pool.allocations + 1; /* and one that cannot grow */
  const append_case made = random_append(&pair, 3);
  send_arena();
  assert_int_equal(nyb_cache_append(pair.on_gpu, &made.on_gpu, stream), NYB_ERROR_OUT_OF_MEMORY);
  compare_pair(&pair);
  ok(nyb_cache_append(pair.on_cpu, &made.on_cpu, NULL));
  ok(nyb_cache_append(pair.on_gpu, &made.on_gpu, stream));
  compare_pair(&pair);
  assert_int_equal(pool.live, 2);
  destroy_pair(&pair);
  assert_int_equal(pool.live, 0);
  nyb_context_destroy(gpu);
  gpu = usual;
}

/* ---- All of it ---------------------------------------------------------------------------------
 */

static int set_up(void **state) {
  (void)state;
  ok(nyb_context_create(NULL, &cpu));
  nyb_cu_context primary;
  driver_ok(driver->DevicePrimaryCtxRetain(&primary, 0));
  driver_ok(driver->CtxSetCurrent(primary));
  driver_ok(driver->StreamCreate(&stream, NYB_CU_STREAM_NON_BLOCKING));
  arena = malloc(ARENA_BYTES);
  fetched = malloc(ARENA_BYTES);
  device_arena = device_memory(ARENA_BYTES);
  device_flag = device_memory(sizeof *device_flag);
  arena_used = ARENA_BYTES - 4096;
  return arena == NULL || fetched == NULL;
}

static int tear_down(void **state) {
  (void)state;
  nyb_context_destroy(gpu);
  nyb_context_destroy(cpu);
  device_free(device_arena);
  device_free(device_flag);
  driver_ok(driver->StreamDestroy(stream));
  free(arena);
  free(fetched);
  return 0;
}

/* An argument names the tests to run, with * for any part of a name. */
int main(int count, char **arguments) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.backend = NYB_BACKEND_CUDA;
  if (nyb_cuda_driver_load(&driver) != NYB_OK || nyb_context_create(&options, &gpu) != NYB_OK) {
    printf("skipped: %s\n", nyb_last_error());
    return 77;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_quantize_and_dequantize),
      cmocka_unit_test(test_non_finite_groups),
      cmocka_unit_test(test_geglu_of_every_gate),
      cmocka_unit_test(test_geglu_of_views),
      cmocka_unit_test(test_geglu_spelled_out_in_f32),
      cmocka_unit_test(test_cache_as_on_the_cpu),
      cmocka_unit_test(test_captured_append),
      cmocka_unit_test(test_growth_in_a_capture),
      cmocka_unit_test(test_host_pointers),
      cmocka_unit_test(test_device_allocator),
  };
  if (count > 1) cmocka_set_test_filter(arguments[1]);
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
