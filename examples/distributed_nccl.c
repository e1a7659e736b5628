/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding with the tokens of one sequence spread over GPUs: `distributed_nccl [RANKS]`, a rank a
 * GPU; without a number all GPUs there are.
 *
 * The scheme, the numbers and the comparison are those of distributed_mpi.c, with device pointers
 * everywhere and NCCL's all-gather: docs/distributed.md. One thread drives all GPUs here, since
 * every call only queues its work on a stream; a process a GPU makes the same calls, and
 * ncclCommInitRank instead of ncclCommInitAll. */
#include <cuda_runtime.h>
#include <nccl.h>

#include "distributed.h"

static _Noreturn void give_up(void) { exit(1); }

static void expect_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  give_up();
}

static void expect_nccl(ncclResult_t result) {
  if (result == ncclSuccess) return;
  fprintf(stderr, "NCCL: %s\n", ncclGetErrorString(result));
  give_up();
}

enum { MOST_RANKS = 64 };

/* A rank and its GPU; pointers are device memory. */
typedef struct rank {
  int device;
  cudaStream_t stream;
  nyb_context *context;
  nyb_cache *piece;
  float *keys, *values, *queries; /* as make_rows() lays them out, of one append or step */
  part *own, *parts;
  uint16_t *out;
  void *workspace;
  size_t workspace_bytes;
} rank;

static void *device_allocate(size_t bytes) {
  void *memory = NULL;
  expect_cuda(cudaMalloc(&memory, bytes));
  return memory;
}

/* Pageable memory has been read when the call returns. */
static void upload_rows(const rank *r, float *to, int kind, int64_t heads, int64_t first,
                        int64_t count) {
  float *rows = make_rows(kind, heads, first, count);
  const size_t bytes = (size_t)(heads * count * HEAD_DIM) * sizeof *rows;
  expect_cuda(cudaMemcpyAsync(to, rows, bytes, cudaMemcpyHostToDevice, r->stream));
  free(rows);
}

static void append(const rank *r, nyb_cache *cache, int64_t first, int64_t count) {
  upload_rows(r, r->keys, KEYS, KV_HEADS, first, count);
  upload_rows(r, r->values, VALUES, KV_HEADS, first, count);
  const nyb_append call = append_of(r->keys, r->values, count);
  expect_ok(nyb_cache_append(cache, &call, r->stream));
}

static void attend(const rank *r, const nyb_cache *cache, int64_t first, bool causal,
                   nyb_output out, float *lse) {
  upload_rows(r, r->queries, QUERIES, QUERY_HEADS, first, ROWS);
  const nyb_attention call = attention_of(cache, r->queries, causal, out, lse);
  expect_ok(nyb_attention_run(r->context, &call, r->workspace, r->workspace_bytes, r->stream));
}

/* Room for all tokens at once: from here on no call allocates, and the workspace is planned for the
 * largest. */
static nyb_cache *make_roomy_cache(rank *r) {
  nyb_cache *cache = make_cache(r->context);
  expect_ok(nyb_cache_reserve(cache, first_token(STEPS), r->stream));
  for (int causal = 0; causal < 2; causal++) {
    const nyb_attention call =
        attention_of(cache, r->queries, causal != 0, rows_of(r->own->out, NYB_F32), r->own->lse);
    nyb_plan plan = NYB_PLAN_INIT;
    expect_ok(nyb_attention_plan(r->context, &call, &plan));
    if (plan.workspace_bytes <= r->workspace_bytes) continue;
    expect_cuda(cudaFree(r->workspace));
    r->workspace = device_allocate(plan.workspace_bytes);
    r->workspace_bytes = plan.workspace_bytes;
  }
  return cache;
}

static void open_rank(rank *r, int device, nyb_context *context, int ranks) {
  const size_t row_bytes = HEAD_DIM * sizeof(float);
  *r = (rank){.device = device, .context = context};
  expect_cuda(cudaSetDevice(device)); /* nybble works on the device that is current */
  expect_cuda(cudaStreamCreate(&r->stream));
  r->keys = device_allocate(KV_HEADS * PROMPT_TOKENS * row_bytes);
  r->values = device_allocate(KV_HEADS * PROMPT_TOKENS * row_bytes);
  r->queries = device_allocate(OUT_ROWS * row_bytes);
  r->own = device_allocate(sizeof *r->own);
  r->parts = device_allocate((size_t)ranks * sizeof *r->parts);
  r->out = device_allocate(OUT_ELEMENTS * sizeof *r->out);
  r->piece = make_roomy_cache(r);
}

static void close_rank(rank *r) {
  expect_cuda(cudaSetDevice(r->device));
  nyb_cache_destroy(r->piece);
  void *const memory[] = {r->keys, r->values, r->queries, r->own, r->parts, r->out, r->workspace};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) expect_cuda(cudaFree(memory[i]));
  expect_cuda(cudaStreamDestroy(r->stream));
}

/* All ranks' parts to all ranks. */
static void gather(const rank *r, const ncclComm_t *communicators, int ranks) {
  expect_nccl(ncclGroupStart());
  for (int i = 0; i < ranks; i++) {
    expect_nccl(ncclAllGather(r[i].own, r[i].parts, sizeof(part) / sizeof(float), ncclFloat32,
                              communicators[i], r[i].stream));
  }
  expect_nccl(ncclGroupEnd());
}

/* The rank's result, once it is there. */
static void download(const rank *r, uint16_t *out) {
  expect_cuda(
      cudaMemcpyAsync(out, r->out, OUT_ELEMENTS * sizeof *out, cudaMemcpyDeviceToHost, r->stream));
  expect_cuda(cudaStreamSynchronize(r->stream));
}

typedef struct comparison {
  double worst; /* bf16 steps between rank 0's results and one GPU's */
  bool same;    /* all ranks have the same bits */
} comparison;

static void run_step(rank *r, const ncclComm_t *communicators, int ranks, int step,
                     nyb_cache *whole, comparison *compared) {
  const int64_t first = first_token(step);
  for (int i = 0; i < ranks; i++) {
    const bool owns = is_owner(i, ranks, step);
    expect_cuda(cudaSetDevice(r[i].device));
    if (owns) append(&r[i], r[i].piece, first, ROWS);
    attend(&r[i], r[i].piece, first, owns, rows_of(r[i].own->out, NYB_F32), r[i].own->lse);
  }
  gather(r, communicators, ranks);
  for (int i = 0; i < ranks; i++) {
    expect_cuda(cudaSetDevice(r[i].device));
    merge(r[i].context, r[i].parts, ranks, r[i].out, r[i].stream);
  }

  uint16_t out[OUT_ELEMENTS], others[OUT_ELEMENTS], alone[OUT_ELEMENTS];
  download(&r[0], out);
  for (int i = 1; i < ranks; i++) {
    download(&r[i], others);
    compared->same = compared->same && memcmp(out, others, sizeof out) == 0;
  }
  expect_cuda(cudaSetDevice(r[0].device));
  append(&r[0], whole, first, ROWS);
  attend(&r[0], whole, first, true, rows_of(r[0].out, NYB_BF16), r[0].own->lse);
  download(&r[0], alone);
  compared->worst = fmax(compared->worst, worst_steps(out, alone));
}

int main(int argc, char **argv) {
  int devices = 0;
  expect_cuda(cudaGetDeviceCount(&devices));
  const int ranks = argc > 1 ? atoi(argv[1]) : devices;
  if (devices < 1 || ranks < 1 || ranks > MOST_RANKS) {
    fprintf(stderr, "usage: distributed_nccl [RANKS], 1 to %d; %d GPUs are here\n", MOST_RANKS,
            devices);
    return 2;
  }

  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.backend = NYB_BACKEND_CUDA;
  nyb_context *context;
  expect_ok(nyb_context_create(&options, &context)); /* one for all devices */
  rank r[MOST_RANKS];
  ncclComm_t communicators[MOST_RANKS];
  int ordinals[MOST_RANKS];
  for (int i = 0; i < ranks; i++) ordinals[i] = i % devices; /* NCCL refuses a GPU twice */
  expect_nccl(ncclCommInitAll(communicators, ranks, ordinals));
  for (int i = 0; i < ranks; i++) {
    const int64_t begin = piece_begin(i, ranks), end = piece_begin(i + 1, ranks);
    open_rank(&r[i], ordinals[i], context, ranks);
    append(&r[i], r[i].piece, begin, end - begin);
    printf("rank %d of %d, GPU %d: the prompt's tokens %lld to %lld\n", i, ranks, ordinals[i],
           (long long)begin, (long long)end);
  }
  expect_cuda(cudaSetDevice(r[0].device));
  nyb_cache *whole = make_roomy_cache(&r[0]);
  append(&r[0], whole, 0, PROMPT_TOKENS);

  comparison compared = {.worst = 0, .same = true};
  for (int step = 0; step < STEPS; step++) {
    run_step(r, communicators, ranks, step, whole, &compared);
  }
  const bool good = compared.same && compared.worst <= 1;
  printf("%s: worst element %.3g bf16 steps from one GPU's, the same bits on every rank: %s\n",
         good ? "good" : "FAILED", compared.worst, compared.same ? "yes" : "no");

  nyb_cache_destroy(whole);
  for (int i = 0; i < ranks; i++) close_rank(&r[i]);
  for (int i = 0; i < ranks; i++) expect_nccl(ncclCommDestroy(communicators[i]));
  nyb_context_destroy(context);
  return good ? 0 : 1;
}
