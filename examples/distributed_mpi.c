/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding with the tokens of one sequence spread over processes: `mpirun -n 4 distributed_mpi`.
 *
 * Each rank keeps a 4-bit cache of its own piece. In each step the query rows of the newest tokens
 * attend over every piece, (out, lse) of all ranks go to all ranks in one gather, and each rank
 * merges them in rank order: all have the same bits. docs/distributed.md has the scheme.
 *
 * Rank 0 also keeps a cache of all tokens, and compares: the program fails where an element is more
 * than one bf16 step away from what a single process gives. */
#include <math.h>
#include <mpi.h>
#include <nybble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64 };
enum { PROMPT_TOKENS = 3001, STEPS = 6, ROWS = 3 }; /* tokens and query rows of each step */
enum { OUT_ROWS = QUERY_HEADS * ROWS, OUT_ELEMENTS = OUT_ROWS * HEAD_DIM };

static void expect_ok(nyb_status status) {
  if (status == NYB_OK) return;
  fprintf(stderr, "%s: %s\n", nyb_status_name(status), nyb_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *allocate(size_t count, size_t bytes) {
  void *memory = calloc(count + 1, bytes); /* also where there is nothing to hold */
  if (memory == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
  return memory;
}

/* ---- Stands for what a model computes ---------------------------------------------------------
 */

enum { KEYS, VALUES, QUERIES };

/* In [-1, 1), the same on every rank. */
static float element(int kind, int64_t token, int64_t head, int64_t d) {
  uint64_t z = (uint64_t)(((token * QUERY_HEADS + head) * HEAD_DIM + d) * 3 + kind);
  z = (z + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 32) * 0xd6e8feb86659fd93u;
  return (float)(z >> 40) / (float)(1 << 23) - 1.0f;
}

/* [heads, count, HEAD_DIM] of the tokens from `first` on; the caller frees them. */
static float *make_rows(int kind, int64_t heads, int64_t first, int64_t count) {
  float *rows = allocate((size_t)(heads * count * HEAD_DIM), sizeof *rows);
  for (int64_t i = 0; i < heads * count * HEAD_DIM; i++) {
    const int64_t row = i / HEAD_DIM;
    rows[i] = element(kind, first + row % count, row / count, i % HEAD_DIM);
  }
  return rows;
}

/* ---- A rank's cache ---------------------------------------------------------------------------
 */

static nyb_cache *make_cache(nyb_context *context) {
  const nyb_format format = {NYB_AFFINE, .bits = 4, .group_size = 64, .dtype = NYB_BF16};
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 1;
  options.kv_heads = KV_HEADS;
  options.key_dim = options.value_dim = HEAD_DIM;
  options.key_format = options.value_format = format;
  nyb_cache *cache;
  expect_ok(nyb_cache_create(context, &options, &cache));
  return cache;
}

static void append(nyb_cache *cache, int64_t first, int64_t count) {
  float *keys = make_rows(KEYS, KV_HEADS, first, count);
  float *values = make_rows(VALUES, KV_HEADS, first, count);
  const int64_t head_stride = count * HEAD_DIM;
  nyb_append call = NYB_APPEND_INIT;
  call.tokens = count;
  call.key = (nyb_input){keys, NYB_F32, {KV_HEADS * head_stride, head_stride, HEAD_DIM}};
  call.value = (nyb_input){values, NYB_F32, {KV_HEADS * head_stride, head_stride, HEAD_DIM}};
  expect_ok(nyb_cache_append(cache, &call, NULL));
  free(keys);
  free(values);
}

/* The query rows of the ROWS tokens from `first` on, over what the cache holds. causal: where it
 * holds these tokens, at its end; else all that it holds is older than they are. */
static void attend(nyb_context *context, const nyb_cache *cache, int64_t first, bool causal,
                   nyb_output out, float *lse) {
  float *queries = make_rows(QUERIES, QUERY_HEADS, first, ROWS);
  nyb_attention call = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &call));
  call.query_heads = QUERY_HEADS;
  call.query_len = ROWS;
  call.q = (nyb_input){queries, NYB_F32, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
  call.out = out;
  call.lse = (nyb_output){lse, NYB_F32, {OUT_ROWS, ROWS, 1}};
  call.scale = 1.0f; /* sharper than 1/sqrt(HEAD_DIM): weights that differ */
  call.mask = causal ? NYB_MASK_CAUSAL : NYB_MASK_NONE;
  nyb_plan plan = NYB_PLAN_INIT;
  expect_ok(nyb_attention_plan(context, &call, &plan));
  void *workspace = NULL;
  if (plan.workspace_bytes != 0) {
    workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes);
    if (workspace == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
  }
  expect_ok(nyb_attention_run(context, &call, workspace, plan.workspace_bytes, NULL));
  free(workspace);
  free(queries);
}

/* ---- One step over all ranks ------------------------------------------------------------------
 */

/* What a rank sends: it goes over the wire as it lies in memory. */
typedef struct part {
  float out[OUT_ELEMENTS];
  float lse[OUT_ROWS];
} part;

static nyb_output rows_of(void *data, nyb_dtype dtype) {
  return (nyb_output){data, dtype, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
}

static void merge(nyb_context *context, const part *parts, int ranks, uint16_t *out) {
  nyb_input *outs = allocate((size_t)ranks, sizeof *outs);
  nyb_input *lses = allocate((size_t)ranks, sizeof *lses);
  for (int rank = 0; rank < ranks; rank++) {
    outs[rank] = (nyb_input){parts[rank].out, NYB_F32, {OUT_ELEMENTS, ROWS * HEAD_DIM, HEAD_DIM}};
    lses[rank] = (nyb_input){parts[rank].lse, NYB_F32, {OUT_ROWS, ROWS, 1}};
  }
  nyb_attention_merge call = NYB_ATTENTION_MERGE_INIT;
  call.parts = ranks;
  call.batch = 1;
  call.query_heads = QUERY_HEADS;
  call.query_len = ROWS;
  call.value_dim = HEAD_DIM;
  call.outs = outs;
  call.lses = lses;
  call.out = rows_of(out, NYB_BF16);
  expect_ok(nyb_attention_merge_run(context, &call, NULL));
  free(outs);
  free(lses);
}

/* ---- Comparing --------------------------------------------------------------------------------
 */

static double from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return (double)value;
}

/* How many bf16 steps an element is away at most. A step is that of the element, or, nearer to zero
 * than 1/1024 of its row's largest, that of 1/1024 of it: attention's own error is relative to the
 * row, not to an element that happens to cancel out. NaN counts as infinitely far. */
static double worst_steps(const uint16_t *got, const uint16_t *want) {
  double worst = 0;
  for (int row = 0; row < OUT_ROWS; row++) {
    double largest = 0;
    for (int d = 0; d < HEAD_DIM; d++) {
      largest = fmax(largest, fabs(from_bf16(want[row * HEAD_DIM + d])));
    }
    for (int d = 0; d < HEAD_DIM; d++) {
      const double a = from_bf16(got[row * HEAD_DIM + d]), b = from_bf16(want[row * HEAD_DIM + d]);
      const double step = ldexp(1, ilogb(fmax(fmax(fabs(a), fabs(b)), largest / 1024)) - 7);
      const double steps = fabs(a - b) / step;
      if (!(steps <= worst)) worst = isnan(steps) ? INFINITY : steps;
    }
  }
  return worst;
}

/* Whether this rank's result has rank 0's bits. */
static bool is_same_everywhere(const uint16_t *out) {
  uint16_t first[OUT_ELEMENTS];
  memcpy(first, out, sizeof first);
  MPI_Bcast(first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
  int same = memcmp(first, out, sizeof first) == 0;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  return same != 0;
}

/* ---- The ranks --------------------------------------------------------------------------------
 */

/* Where the prompt's piece of a rank begins: pieces grow with the rank, and where there are three
 * ranks or more the second has none. */
static int64_t piece_begin(int rank, int ranks) {
  if (ranks > 2 && rank == 2) rank = 1;
  return PROMPT_TOKENS * (int64_t)rank * rank / ((int64_t)ranks * ranks);
}

int main(int argc, char **argv) {
  int rank, ranks;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 1;
  nyb_context *context;
  expect_ok(nyb_context_create(&options, &context));

  const int64_t begin = piece_begin(rank, ranks), end = piece_begin(rank + 1, ranks);
  nyb_cache *piece = make_cache(context), *whole = NULL;
  append(piece, begin, end - begin);
  if (rank == 0) append(whole = make_cache(context), 0, PROMPT_TOKENS);

  part *parts = allocate((size_t)ranks, sizeof *parts);
  part *own = allocate(1, sizeof *own);
  uint16_t out[OUT_ELEMENTS], alone[OUT_ELEMENTS];
  double worst = 0;
  bool same = true;
  for (int step = 0; step < STEPS; step++) {
    /* The newest tokens go to one rank, the ranks take turns from the last one down. */
    const int64_t first = PROMPT_TOKENS + (int64_t)step * ROWS;
    const bool is_owner = rank == ranks - 1 - step % ranks;
    if (is_owner) append(piece, first, ROWS);
    attend(context, piece, first, is_owner, rows_of(own->out, NYB_F32), own->lse);
    MPI_Allgather(own, sizeof *own, MPI_BYTE, parts, sizeof *parts, MPI_BYTE, MPI_COMM_WORLD);
    merge(context, parts, ranks, out);

    same = is_same_everywhere(out) && same;
    if (rank == 0) {
      append(whole, first, ROWS);
      attend(context, whole, first, true, rows_of(alone, NYB_BF16), own->lse);
      worst = fmax(worst, worst_steps(out, alone));
    }
  }
  bool good = same && worst <= 1;
  const long long length = nyb_cache_length(piece, 0);
  printf("rank %d of %d: the prompt's tokens %lld to %lld, %lld tokens in the end\n", rank, ranks,
         (long long)begin, (long long)end, length);
  fflush(stdout);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    printf(
        "%s: worst element %.3g bf16 steps from one process's, the same bits on every rank: %s\n",
        good ? "good" : "FAILED", worst, same ? "yes" : "no");
  }
  MPI_Bcast(&good, sizeof good, MPI_BYTE, 0, MPI_COMM_WORLD);
  free(parts);
  free(own);
  nyb_cache_destroy(piece);
  nyb_cache_destroy(whole);
  nyb_context_destroy(context);
  MPI_Finalize();
  return good ? 0 : 1;
}
