/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding with the tokens of one sequence spread over processes: `mpirun -n 4 distributed_mpi`.
 *
 * Each rank keeps a 4-bit cache of its own piece. In each step the query rows of the newest tokens
 * attend over every piece, (out, lse) of all ranks go to all ranks in one gather, and each rank
 * merges them in rank order: all have the same bits. docs/distributed.md has the scheme.
 *
 * Rank 0 also keeps a cache of all tokens, and compares: the program fails where an element is more
 * than one bf16 step away from what a single process gives. */
#include <mpi.h>

#include "distributed.h"

static _Noreturn void give_up(void) {
  MPI_Abort(MPI_COMM_WORLD, 1);
  abort();
}

static void append(nyb_cache *cache, int64_t first, int64_t count) {
  float *keys = make_rows(KEYS, KV_HEADS, first, count);
  float *values = make_rows(VALUES, KV_HEADS, first, count);
  const nyb_append call = append_of(keys, values, count);
  expect_ok(nyb_cache_append(cache, &call, NULL));
  free(keys);
  free(values);
}

static void attend(nyb_context *context, const nyb_cache *cache, int64_t first, bool causal,
                   nyb_output out, float *lse) {
  float *queries = make_rows(QUERIES, QUERY_HEADS, first, ROWS);
  const nyb_attention call = attention_of(cache, queries, causal, out, lse);
  nyb_plan plan = NYB_PLAN_INIT;
  expect_ok(nyb_attention_plan(context, &call, &plan));
  void *workspace = NULL;
  if (plan.workspace_bytes != 0) {
    workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes);
    if (workspace == NULL) give_up();
  }
  expect_ok(nyb_attention_run(context, &call, workspace, plan.workspace_bytes, NULL));
  free(workspace);
  free(queries);
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
    const int64_t first = first_token(step);
    const bool owns = is_owner(rank, ranks, step);
    if (owns) append(piece, first, ROWS);
    attend(context, piece, first, owns, rows_of(own->out, NYB_F32), own->lse);
    MPI_Allgather(own, sizeof *own, MPI_BYTE, parts, sizeof *parts, MPI_BYTE, MPI_COMM_WORLD);
    merge(context, parts, ranks, out, NULL);

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
