/* SPDX-License-Identifier: Apache-2.0 */
/* The fused path: the packed rows are read once, tile by tile, and neither a score row nor a float
 * copy of the cache ever exists.
 *
 * A unit is one KV head of one sequence with a block of up to NYB_TILE_ROWS query rows (rows of all
 * query heads that share the KV head). Its tokens are cut into chunks of NYB_CHUNK_TOKENS. Each
 * chunk starts from an empty state, and chunks are folded in ascending order. Whether a worker
 * takes whole units and folds as it goes, or chunks whose partial results wait in the workspace for
 * the fold, is a matter of load balance alone: the operations on a row, and their order, are the
 * same. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "attention.h"

enum {
  SPLIT_UNITS_PER_THREAD = 4,          /* with more units than that, whole units balance well */
  MAX_PARTIAL_BYTES = 32 * 1024 * 1024 /* beyond it, whole units are taken */
};
/* Below this many stored elements the whole call takes less time than waking a thread. */
static const int64_t min_elements_per_worker = 32 * 1024;

/* ---- Layout of the workspace ---------------------------------------------------------------- */

/* The running state of a block of rows: unnormalised values, maximum and sum of the scores. */
typedef struct row_state {
  float *values;  /* [NYB_TILE_ROWS][nyb_padded_dim(value_dim)] */
  float *maximum; /* [NYB_TILE_ROWS] */
  float *sum;     /* [NYB_TILE_ROWS] */
} row_state;

typedef struct worker_memory {
  float *q; /* [NYB_TILE_ROWS][nyb_padded_dim(key_dim)] */
  char *prepared;
  float *scores; /* [NYB_TILE_ROWS][NYB_TILE_TOKENS] */
  row_state chunk, folded;
  float *rescale;
  int32_t *visible;
  void *scratch;
} worker_memory;

static int64_t row_state_bytes(const nyb_attention *a, int64_t rows) {
  return (rows * (nyb_padded_dim(a->value_dim) + 2) * (int64_t)sizeof(float) + 63) / 64 * 64;
}

static row_state row_state_at(char *memory, const nyb_attention *a, int64_t rows) {
  row_state state;
  state.values = (float *)(void *)memory;
  state.maximum = state.values + rows * nyb_padded_dim(a->value_dim);
  state.sum = state.maximum + rows;
  return state;
}

/* The queries' memory also takes a finished row. */
static int64_t q_bytes(const nyb_attention *a) {
  const int64_t queries = NYB_TILE_ROWS * nyb_padded_dim(a->key_dim);
  const int64_t row = nyb_padded_dim(a->value_dim);
  return (queries > row ? queries : row) * (int64_t)sizeof(float);
}

enum { SCORE_BYTES = NYB_TILE_ROWS * NYB_TILE_TOKENS * 4, SMALL_BYTES = NYB_TILE_ROWS * 4 };

static int64_t worker_bytes(const nyb_attention *a) {
  return q_bytes(a) + NYB_TILE_ROWS * nyb_prepared_bytes(a->key_dim) + SCORE_BYTES +
         2 * row_state_bytes(a, NYB_TILE_ROWS) + 2 * SMALL_BYTES + NYB_TILE_SCRATCH_BYTES;
}

static char *take(char **memory, int64_t bytes) {
  char *taken = *memory;
  *memory += bytes;
  return taken;
}

static worker_memory worker_memory_at(char *memory, const nyb_attention *a) {
  worker_memory w;
  w.q = (float *)(void *)take(&memory, q_bytes(a));
  w.prepared = take(&memory, NYB_TILE_ROWS * nyb_prepared_bytes(a->key_dim));
  w.scores = (float *)(void *)take(&memory, SCORE_BYTES);
  const int64_t state_bytes = row_state_bytes(a, NYB_TILE_ROWS);
  w.chunk = row_state_at(take(&memory, state_bytes), a, NYB_TILE_ROWS);
  w.folded = row_state_at(take(&memory, state_bytes), a, NYB_TILE_ROWS);
  w.rescale = (float *)(void *)take(&memory, SMALL_BYTES);
  w.visible = (int32_t *)(void *)take(&memory, SMALL_BYTES);
  w.scratch = memory;
  return w;
}

static int64_t chunks_of(int64_t tokens) {
  return (tokens + NYB_CHUNK_TOKENS - 1) / NYB_CHUNK_TOKENS;
}

static int64_t rows_per_kv_head(const nyb_attention_call *call) {
  return call->heads_per_kv * call->attention->query_len;
}

static int64_t rows_per_unit(const nyb_attention_call *call) {
  const int64_t rows = rows_per_kv_head(call);
  return rows < NYB_TILE_ROWS ? rows : NYB_TILE_ROWS;
}

/* How many units may have their chunks' partial results in the workspace at once. */
static int64_t unit_partial_bytes(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  return chunks_of(a->capacity_tokens) * row_state_bytes(a, rows_per_unit(call));
}

static bool may_split(const nyb_attention_call *call) {
  return call->context->threads > 1 && call->attention->capacity_tokens > NYB_CHUNK_TOKENS;
}

static int64_t split_units(const nyb_attention_call *call) {
  if (!may_split(call)) return 0;
  const int64_t fitting = MAX_PARTIAL_BYTES / unit_partial_bytes(call);
  const int64_t wanted = SPLIT_UNITS_PER_THREAD * call->context->threads;
  return fitting < wanted ? fitting : wanted;
}

/* Partials take the limit even where less than a whole unit of it is left over: a larger call must
 * not need less. */
int64_t nyb_attention_fused_workspace(const nyb_attention_call *call) {
  const int64_t workers_bytes = call->context->threads * worker_bytes(call->attention);
  if (!may_split(call)) return workers_bytes;
  const int64_t wanted = SPLIT_UNITS_PER_THREAD * call->context->threads;
  const int64_t unit_bytes = unit_partial_bytes(call);
  return workers_bytes +
         (unit_bytes > MAX_PARTIAL_BYTES / wanted ? MAX_PARTIAL_BYTES : wanted * unit_bytes);
}

/* ---- One chunk of one unit ------------------------------------------------------------------ */

typedef struct fused_run {
  const nyb_attention_call *call;
  nyb_attention_queries_fn queries;
  nyb_attention_scores_fn scores;
  nyb_attention_softmax_fn softmax;
  nyb_attention_values_fn values;
  nyb_attention_columns_fn columns;
  bool precise;
  nyb_dtype round_scores_to;
  int64_t blocks; /* of rows, for each KV head */
  int64_t units;
  int64_t chunks; /* of the longest sequence */
  int64_t workers;
  bool split; /* tasks are chunks, not units */
  char *workspace;
  char *partials;
  _Atomic int64_t next_task;
} fused_run;

/* Rows are numbered query row first, head second, so that a block's rows see about as much. */
typedef struct unit {
  int64_t batch, kv_head;
  int64_t first_row, rows;
  int64_t length;
  int64_t visible; /* tokens that the last row sees: no row sees more */
} unit;

static unit unit_at(const fused_run *run, int64_t index) {
  const nyb_attention *a = run->call->attention;
  const int64_t all_rows = rows_per_kv_head(run->call);
  unit u;
  u.first_row = index % run->blocks * NYB_TILE_ROWS;
  index /= run->blocks;
  u.kv_head = index % a->kv_heads;
  u.batch = index / a->kv_heads;
  u.rows = all_rows - u.first_row < NYB_TILE_ROWS ? all_rows - u.first_row : NYB_TILE_ROWS;
  u.length = a->lengths[u.batch];
  u.visible = nyb_visible_tokens(a, u.length, (u.first_row + u.rows - 1) / run->call->heads_per_kv);
  return u;
}

static int64_t head_of(const fused_run *run, const unit *u, int64_t row) {
  return u->kv_head * run->call->heads_per_kv + (u->first_row + row) % run->call->heads_per_kv;
}

static int64_t query_row_of(const fused_run *run, const unit *u, int64_t row) {
  return (u->first_row + row) / run->call->heads_per_kv;
}

static void prepare_queries(const fused_run *run, const unit *u, const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const int64_t padded = nyb_padded_dim(a->key_dim);
  for (int64_t row = 0; row < u->rows; row++) {
    float *q = memory->q + row * padded;
    nyb_load_query(a, u->batch, head_of(run, u, row), query_row_of(run, u, row), q);
    for (int64_t d = a->key_dim; d < padded; d++) q[d] = 0;
  }
  const nyb_query_block block = {.q = memory->q,
                                 .rows = u->rows,
                                 .dim = a->key_dim,
                                 .group_size = a->k.format.group_size,
                                 .precise = run->precise,
                                 .prepared = memory->prepared};
  run->queries(&block);
}

static nyb_tile_tokens tile_of(const nyb_stored *stored, int64_t dim, const unit *u, int64_t first,
                               int64_t tokens) {
  const int64_t code_bytes =
      stored->format.scheme == NYB_AFFINE ? 4 : (int64_t)nyb_dtype_bytes(stored->format.dtype);
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
#define NYB_FIRST(array, bytes)                                                     \
  ((const char *)stored->array +                                                    \
   (u->batch * stored->array##_stride[0] + u->kv_head * stored->array##_stride[1] + \
    first * stored->array##_stride[2]) *                                            \
       (bytes))
  nyb_tile_tokens tile = {.codes = NYB_FIRST(codes, code_bytes),
                          .codes_stride_bytes = stored->codes_stride[2] * code_bytes,
                          .dim = dim,
                          .group_size = stored->format.group_size,
                          .scale_dtype = stored->format.dtype,
                          .tokens = tokens};
  if (stored->format.scheme == NYB_AFFINE) {
    tile.scales = NYB_FIRST(scales, scale_bytes);
    tile.biases = NYB_FIRST(biases, scale_bytes);
    tile.scales_stride_bytes = stored->scales_stride[2] * scale_bytes;
    tile.biases_stride_bytes = stored->biases_stride[2] * scale_bytes;
  }
#undef NYB_FIRST
  return tile;
}

/* Rows that see the same number of the tile's tokens are summed together; the others' later tokens
 * are not read for them, whatever stands there. */
static void add_values(const fused_run *run, const unit *u, int64_t first,
                       const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  for (int64_t row = 0, next; row < u->rows; row = next) {
    const int32_t visible = memory->visible[row];
    for (next = row + 1; next < u->rows && memory->visible[next] == visible;) next++;
    if (visible == 0) continue;
    const nyb_value_tile tile = {.weights = memory->scores + row * NYB_TILE_TOKENS,
                                 .rows = next - row,
                                 .precise = run->precise,
                                 .v = tile_of(&a->v, a->value_dim, u, first, visible),
                                 .out = memory->chunk.values + row * nyb_padded_dim(a->value_dim),
                                 .scratch = memory->scratch};
    run->values(&tile);
  }
}

static void scale_row(float *values, int64_t count, float factor) {
  for (int64_t d = 0; d < count; d++) values[d] *= factor;
}

static void clear_state(const row_state *state, int64_t rows, int64_t padded_dim) {
  memset(state->values, 0, (size_t)(rows * padded_dim) * sizeof(float));
  for (int64_t row = 0; row < rows; row++) {
    state->maximum[row] = -INFINITY;
    state->sum[row] = 0;
  }
}

/* Leaves the chunk's result in memory->chunk. */
static void attend_chunk(const fused_run *run, const unit *u, int64_t chunk,
                         const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const int64_t padded = nyb_padded_dim(a->value_dim);
  const int64_t begin = chunk * NYB_CHUNK_TOKENS;
  const int64_t end = begin + NYB_CHUNK_TOKENS < u->visible ? begin + NYB_CHUNK_TOKENS : u->visible;
  clear_state(&memory->chunk, u->rows, padded);
  for (int64_t first = begin; first < end; first += NYB_TILE_TOKENS) {
    const int64_t tokens = end - first < NYB_TILE_TOKENS ? end - first : NYB_TILE_TOKENS;
    const nyb_score_tile scores = {.prepared = memory->prepared,
                                   .rows = u->rows,
                                   .precise = run->precise,
                                   .k = tile_of(&a->k, a->key_dim, u, first, tokens),
                                   .scores = memory->scores,
                                   .scratch = memory->scratch};
    run->scores(&scores);
    for (int64_t row = 0; row < u->rows; row++) {
      const int64_t left = nyb_visible_tokens(a, u->length, query_row_of(run, u, row)) - first;
      memory->visible[row] = (int32_t)(left < 0 ? 0 : left < tokens ? left : tokens);
    }
    const nyb_softmax_tile softmax = {.scores = memory->scores,
                                      .rows = u->rows,
                                      .visible = memory->visible,
                                      .round_to = run->round_scores_to,
                                      .maximum = memory->chunk.maximum,
                                      .sum = memory->chunk.sum,
                                      .rescale = memory->rescale};
    if (run->softmax(&softmax)) {
      for (int64_t row = 0; row < u->rows; row++) {
        if (memory->rescale[row] != 1) {
          scale_row(memory->chunk.values + row * padded, padded, memory->rescale[row]);
        }
      }
    }
    add_values(run, u, first, memory);
  }
}

/* ---- Folding chunks ------------------------------------------------------------------------- */

/* folded = folded + next, for each row; a side without weight leaves the other bit-identical. */
static void fold(const row_state *folded, const row_state *next, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; row++) {
    float *into = folded->values + row * padded_dim;
    const float *from = next->values + row * padded_dim;
    if (next->sum[row] == 0) continue;
    if (folded->sum[row] == 0) {
      memcpy(into, from, (size_t)padded_dim * sizeof(float));
      folded->maximum[row] = next->maximum[row];
      folded->sum[row] = next->sum[row];
      continue;
    }
    const float maximum = fmaxf(folded->maximum[row], next->maximum[row]);
    const float keep = expf(folded->maximum[row] - maximum);
    const float add = expf(next->maximum[row] - maximum);
    for (int64_t d = 0; d < padded_dim; d++) into[d] = into[d] * keep + from[d] * add;
    folded->sum[row] = folded->sum[row] * keep + next->sum[row] * add;
    folded->maximum[row] = maximum;
  }
}

static void finish(const fused_run *run, const unit *u, const row_state *state,
                   const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  nyb_value_columns columns = {.to = memory->q,
                               .dim = a->value_dim,
                               .group_size = a->v.format.group_size,
                               .precise = run->precise};
  for (int64_t row = 0; row < u->rows; row++) {
    columns.from = state->values + row * nyb_padded_dim(a->value_dim);
    run->columns(&columns);
    const float sum = state->sum[row];
    float lse = -INFINITY;
    const int64_t visible = nyb_visible_tokens(a, u->length, query_row_of(run, u, row));
    if (visible == 0) {
      memset(columns.to, 0, (size_t)a->value_dim * sizeof(float));
    } else { /* a row whose scores are all -inf becomes 0/0 */
      for (int64_t d = 0; d < a->value_dim; d++) columns.to[d] /= sum;
      lse = state->maximum[row] + logf(sum);
    }
    nyb_store_row(a, u->batch, head_of(run, u, row), query_row_of(run, u, row), columns.to, lse);
  }
}

/* ---- Tasks ---------------------------------------------------------------------------------- */

static row_state partial_at(const fused_run *run, int64_t unit_index, int64_t chunk) {
  const nyb_attention *a = run->call->attention;
  const int64_t rows = rows_per_unit(run->call);
  return row_state_at(run->partials + (unit_index * run->chunks + chunk) * row_state_bytes(a, rows),
                      a, rows);
}

static void run_unit(const fused_run *run, int64_t index, const worker_memory *memory) {
  const unit u = unit_at(run, index);
  const int64_t padded = nyb_padded_dim(run->call->attention->value_dim);
  clear_state(&memory->folded, u.rows, padded);
  if (u.visible > 0) prepare_queries(run, &u, memory);
  for (int64_t chunk = 0; chunk < chunks_of(u.visible); chunk++) {
    attend_chunk(run, &u, chunk, memory);
    fold(&memory->folded, &memory->chunk, u.rows, padded);
  }
  finish(run, &u, &memory->folded, memory);
}

static void run_chunk(const fused_run *run, int64_t task, worker_memory memory) {
  const int64_t index = task / run->chunks, chunk = task % run->chunks;
  const unit u = unit_at(run, index);
  if (chunk >= chunks_of(u.visible)) return;
  memory.chunk = partial_at(run, index, chunk);
  prepare_queries(run, &u, &memory);
  attend_chunk(run, &u, chunk, &memory);
}

static void fold_unit(const fused_run *run, int64_t index, const worker_memory *memory) {
  const unit u = unit_at(run, index);
  const int64_t padded = nyb_padded_dim(run->call->attention->value_dim);
  const row_state first = partial_at(run, index, 0);
  if (u.visible == 0) clear_state(&first, u.rows, padded);
  for (int64_t chunk = 1; chunk < chunks_of(u.visible); chunk++) {
    const row_state next = partial_at(run, index, chunk);
    fold(&first, &next, u.rows, padded);
  }
  finish(run, &u, &first, memory);
}

static int64_t next_of(fused_run *run) {
  return atomic_fetch_add_explicit(&run->next_task, 1, memory_order_relaxed);
}

static void work(void *data, int64_t worker) {
  fused_run *run = data;
  const nyb_attention *a = run->call->attention;
  const worker_memory memory = worker_memory_at(run->workspace + worker * worker_bytes(a), a);
  if (run->split) {
    const int64_t tasks = run->units * run->chunks;
    for (int64_t task; (task = next_of(run)) < tasks;) run_chunk(run, task, memory);
  } else {
    for (int64_t task; (task = next_of(run)) < run->units;) run_unit(run, task, &memory);
  }
}

static void fold_work(void *data, int64_t worker) {
  fused_run *run = data;
  const nyb_attention *a = run->call->attention;
  const worker_memory memory = worker_memory_at(run->workspace + worker * worker_bytes(a), a);
  for (int64_t task; (task = next_of(run)) < run->units;) fold_unit(run, task, &memory);
}

void nyb_attention_fused_run(const nyb_attention_call *call, char *workspace) {
  nyb_context *context = call->context;
  const nyb_attention *a = call->attention;
  int64_t longest = 0, all_tokens = 0;
  for (int64_t b = 0; b < a->batch; b++) {
    longest = a->lengths[b] > longest ? a->lengths[b] : longest;
    all_tokens += a->lengths[b];
  }
  fused_run run = {
      .columns = (nyb_attention_columns_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_COLUMNS,
                                                          call->value_format),
      .call = call,
      .queries = (nyb_attention_queries_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_QUERIES,
                                                          call->key_format),
      .scores = (nyb_attention_scores_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_SCORES,
                                                        call->key_format),
      .softmax = (nyb_attention_softmax_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_SOFTMAX,
                                                          NYB_FORMAT_PLAIN_F32),
      .values = (nyb_attention_values_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_VALUES,
                                                        call->value_format),
      .precise = a->q.dtype == NYB_F32 || a->out.dtype == NYB_F32,
      .round_scores_to = a->rounding == NYB_ROUNDING_MLX ? a->q.dtype : NYB_F32,
      .blocks = (rows_per_kv_head(call) + NYB_TILE_ROWS - 1) / NYB_TILE_ROWS,
      .chunks = chunks_of(longest),
      .workspace = workspace,
      .partials = workspace + context->threads * worker_bytes(a),
  };
  run.units = a->batch * a->kv_heads * run.blocks;
  run.split = run.chunks > 1 && run.units < SPLIT_UNITS_PER_THREAD * context->threads &&
              run.units <= split_units(call);
  const int64_t tasks = run.split ? run.units * run.chunks : run.units;
  const int64_t worth =
      all_tokens * a->kv_heads * run.blocks * (a->key_dim + a->value_dim) / min_elements_per_worker;
  run.workers = context->threads < tasks ? context->threads : tasks;
  if (worth < run.workers) run.workers = worth > 1 ? worth : 1;
  nyb_parallel(context, run.workers, work, &run);
  if (run.split) {
    atomic_store_explicit(&run.next_task, 0, memory_order_relaxed);
    const int64_t partial_elements =
        run.units * run.chunks * row_state_bytes(a, rows_per_unit(call)) / (int64_t)sizeof(float);
    const int64_t folders = partial_elements / min_elements_per_worker;
    nyb_parallel(context,
                 folders < 1             ? 1
                 : folders < run.workers ? folders
                                         : run.workers,
                 fold_work, &run);
  }
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_QUERIES, call->key_format);
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_SCORES, call->key_format);
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_SOFTMAX, NYB_FORMAT_PLAIN_F32);
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_VALUES, call->value_format);
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_COLUMNS, call->value_format);
}
