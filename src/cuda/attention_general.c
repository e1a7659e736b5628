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
  int64_t chunks;    /* that a unit reads of a sequence as long as the room; at least 1 */
  int64_t row_bytes; /* of a partial result */
} cut;

/* Tiles are cut where parts meet, so that some may be looked at in part alone. */
static bool is_featured(const nyb_attention *a) {
  return nyb_cuda_attention_is_featured(a) || nyb_has_parts(a);
}

static int shared_bytes(const nyb_attention *a, int rows) {
  return nyb_general_shared_bytes((int)a->key_dim, (int)a->value_dim, rows, is_featured(a),
                                  nyb_cuda_attention_is_placed(a));
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

static int64_t chunks_of(int64_t tokens) {
  return (tokens + NYB_GENERAL_CHUNK_TOKENS - 1) / NYB_GENERAL_CHUNK_TOKENS;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Chunks in which the tokens stand that a unit sees, at most. A window may begin and end amid one;
 * that of a unit begins where the first row's does and ends where the last row's does, or, where
 * nothing bounds from above, behind all rows that come after. Never falls when the call grows. */
static int64_t most_chunks(const nyb_attention_call *call) {
  enum { MOST_ROWS = 16 };
  const nyb_attention *a = call->attention;
  const int64_t room = nyb_room_tokens(a), all = chunks_of(room);
  const bool top_left = a->mask == NYB_MASK_CAUSAL_TOP_LEFT;
  const int64_t seen = top_left ? smaller(a->query_len, room) : room;
  if (a->window_tokens == 0 || a->window_tokens >= seen) return chunks_of(seen);
  const int64_t query_rows =
      a->mask == NYB_MASK_NONE ? a->query_len : (MOST_ROWS - 1) / call->heads_per_kv + 2;
  const int64_t in_window = smaller(a->window_tokens + query_rows, seen);
  return smaller(chunks_of(in_window) + chunks_of(smaller(a->window_keep_tokens, room)) + 1, all);
}

static cut cut_of(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const int64_t rows = call->heads_per_kv * a->query_len;
  cut c;
  c.rows = rows_per_unit(call, properties);
  c.units = a->batch * a->kv_heads * ((rows + c.rows - 1) / c.rows);
  c.all_rows = a->batch * a->kv_heads * rows;
  c.chunks = most_chunks(call);
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

/* Of a split call: a block for each chunk, but no more than fill the device so many times, which
 * then take chunk after chunk. */
static int64_t blocks_of_unit(const cut *c, const nyb_cuda_properties *properties,
                              const nyb_cuda_kernel *kernel) {
  enum { TIMES = 2 };
  const int64_t resident = (int64_t)properties->multiprocessors * kernel->blocks_per_multiprocessor;
  const int64_t blocks = (TIMES * resident + c->units - 1) / c->units;
  return blocks < c->chunks ? blocks : c->chunks;
}

static bool supports(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  (void)properties;
  const nyb_attention *a = call->attention;
  return a->key_dim <= NYB_GENERAL_MAX_DIM && a->value_dim <= NYB_GENERAL_MAX_DIM;
}

static bool takes(const nyb_attention *attention) {
  (void)attention;
  return true;
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
  values[NYB_CUDA_PARAMETER(attention_general, FEATURED)] = is_featured(a);
  values[NYB_CUDA_PARAMETER(attention_general, PLACED)] = nyb_has_parts(a)                  ? 2
                                                          : nyb_cuda_attention_is_placed(a) ? 1
                                                                                            : 0;
  if (!is_split(&c)) return 1;
  programs[1].spec.program = &nyb_cuda_program_attention_general_merge;
  programs[1].threads = MERGE_THREADS;
  programs[1].spec.values[NYB_CUDA_PARAMETER(attention_general_merge, FEATURED)] = is_featured(a);
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
  arguments.rows_per_unit = c.rows;
  if (!is_split(&c)) {
    const int64_t grid[3] = {whole_blocks(&c), 1, 1};
    return nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
  }
  arguments.statistics = arguments.memory + c.all_rows * c.chunks * a->value_dim;
  arguments.split = (int)blocks_of_unit(&c, scope->properties, kernels[0]);
  const int64_t grid[3] = {c.units * arguments.split, 1, 1};
  const nyb_status status = nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
  if (status != NYB_OK) return status;
  const int64_t merge_grid[3] = {c.all_rows, (a->value_dim + MERGE_THREADS - 1) / MERGE_THREADS, 1};
  return nyb_cuda_launch(scope, kernels[1], merge_grid, &arguments, stream, true);
}

const nyb_cuda_attention_kernel nyb_cuda_attention_general = {
    .operation = NYB_OPERATION_ATTENTION_GENERAL,
    .reason = "the general fused kernel takes every format, stride and alignment",
    .tuned = false,
    .takes = takes,
    .supports = supports,
    .suits = NULL,
    .workspace_bytes = workspace_bytes,
    .programs = programs,
    .launch = launch,
};
