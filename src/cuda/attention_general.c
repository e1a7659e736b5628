/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernel for every format, shape, stride and alignment (device/attention_general.cu). */
#include "attention.h"
#include "device/attention_general_sizes.h"

/* Whole units are taken where there are enough of them to fill a large card, or where the partial
 * results of chunks would take too much memory. Both ways give the same bits. */
enum { MAX_SPLIT_UNITS = 1024, MAX_WHOLE_BLOCKS = 2048, MERGE_THREADS = 128 };
static const int64_t max_partial_bytes = (int64_t)256 << 20;

typedef struct cut {
  int rows;          /* query rows of a unit */
  int64_t units;     /* of the call */
  int64_t all_rows;  /* query rows of the call */
  int64_t chunks;    /* of a sequence as long as the capacity; at least 1 */
  int64_t row_bytes; /* of a partial result */
} cut;

static int shared_bytes(const nyb_attention *a, int rows) {
  return nyb_general_shared_bytes((int)a->key_dim, (int)a->value_dim, rows);
}

/* As many as share an unpacked tile to advantage and fit the device's shared memory; twice over
 * where they are many. */
static int rows_per_unit(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const int64_t rows = call->heads_per_kv * a->query_len;
  const int block_bytes = properties->shared_bytes_per_block;
  if (rows == 1) return 1;
  if (rows > 8 && shared_bytes(a, 16) <= block_bytes &&
      shared_bytes(a, 16) <= properties->shared_bytes_per_multiprocessor / 2 - 1024) {
    return 16;
  }
  return rows > 4 && shared_bytes(a, 8) <= block_bytes ? 8 : 4;
}

static cut cut_of(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const int64_t rows = call->heads_per_kv * a->query_len;
  cut c;
  c.rows = rows_per_unit(call, properties);
  c.units = a->batch * a->kv_heads * ((rows + c.rows - 1) / c.rows);
  c.all_rows = a->batch * a->kv_heads * rows;
  c.chunks = (a->capacity_tokens + NYB_GENERAL_CHUNK_TOKENS - 1) / NYB_GENERAL_CHUNK_TOKENS;
  if (c.chunks < 1) c.chunks = 1;
  c.row_bytes = (a->value_dim + 2) * (int64_t)sizeof(float);
  return c;
}

/* Of all partial results, as far as they are allowed at all. */
static int64_t partial_bytes(const cut *c) {
  const int64_t per_chunk = max_partial_bytes / c->row_bytes / c->chunks;
  return c->all_rows > per_chunk ? max_partial_bytes : c->all_rows * c->chunks * c->row_bytes;
}

static bool is_split(const cut *c) {
  return c->chunks > 1 && c->units < MAX_SPLIT_UNITS &&
         c->all_rows <= max_partial_bytes / c->row_bytes / c->chunks;
}

static int64_t whole_blocks(const cut *c) {
  return c->units < MAX_WHOLE_BLOCKS ? c->units : MAX_WHOLE_BLOCKS;
}

static bool supports(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  (void)properties;
  const nyb_attention *a = call->attention;
  return a->key_dim <= NYB_GENERAL_MAX_DIM && a->value_dim <= NYB_GENERAL_MAX_DIM;
}

static int64_t workspace_bytes(const nyb_attention_call *call,
                               const nyb_cuda_properties *properties) {
  const cut c = cut_of(call, properties);
  const int64_t whole = whole_blocks(&c) * c.rows * c.row_bytes;
  const int64_t split = c.chunks > 1 ? partial_bytes(&c) : 0;
  return whole > split ? whole : split;
}

static int programs(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                    nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS]) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call, properties);
  programs[0].spec.program = &nyb_cuda_program_attention_general;
  programs[0].threads = NYB_GENERAL_THREADS;
  programs[0].dynamic_shared_bytes = shared_bytes(a, c.rows);
  int32_t *values = programs[0].spec.values;
  values[NYB_CUDA_PARAMETER(attention_general, KEY_BITS)] = a->k.format.bits;
  values[NYB_CUDA_PARAMETER(attention_general, KEY_DTYPE)] = (int32_t)a->k.format.dtype;
  values[NYB_CUDA_PARAMETER(attention_general, KEY_ALIGNED)] =
      a->k.format.scheme == NYB_PLAIN && nyb_cuda_codes_aligned(a, &a->k, 16);
  values[NYB_CUDA_PARAMETER(attention_general, KEY_DIM)] = (int32_t)a->key_dim;
  values[NYB_CUDA_PARAMETER(attention_general, VALUE_BITS)] = a->v.format.bits;
  values[NYB_CUDA_PARAMETER(attention_general, VALUE_DTYPE)] = (int32_t)a->v.format.dtype;
  values[NYB_CUDA_PARAMETER(attention_general, VALUE_ALIGNED)] =
      a->v.format.scheme == NYB_PLAIN && nyb_cuda_codes_aligned(a, &a->v, 16);
  values[NYB_CUDA_PARAMETER(attention_general, VALUE_DIM)] = (int32_t)a->value_dim;
  values[NYB_CUDA_PARAMETER(attention_general, ROWS)] = c.rows;
  if (!is_split(&c)) return 1;
  programs[1].spec.program = &nyb_cuda_program_attention_general_merge;
  programs[1].threads = MERGE_THREADS;
  return 2;
}

static nyb_status launch(nyb_cuda_scope *scope, const nyb_attention_call *call,
                         const nyb_cuda_kernel *const *kernels, void *workspace,
                         nyb_stream stream) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call, scope->properties);
  nyb_attention_arguments arguments = nyb_cuda_attention_arguments(call);
  arguments.memory = workspace;
  arguments.chunks = c.chunks;
  arguments.split = is_split(&c);
  if (!is_split(&c)) {
    const int64_t grid[3] = {whole_blocks(&c), 1, 1};
    return nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
  }
  arguments.statistics = arguments.memory + c.all_rows * c.chunks * a->value_dim;
  const int64_t grid[3] = {c.units * c.chunks, 1, 1};
  const nyb_status status = nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
  if (status != NYB_OK) return status;
  const int64_t merge_grid[3] = {c.all_rows, (a->value_dim + MERGE_THREADS - 1) / MERGE_THREADS, 1};
  return nyb_cuda_launch(scope, kernels[1], merge_grid, &arguments, stream, true);
}

const nyb_cuda_attention_kernel nyb_cuda_attention_general = {
    .operation = NYB_OPERATION_ATTENTION_GENERAL,
    .reason = "the general fused kernel takes every format, stride and alignment",
    .tuned = false,
    .supports = supports,
    .suits = NULL,
    .workspace_bytes = workspace_bytes,
    .programs = programs,
    .launch = launch,
};
