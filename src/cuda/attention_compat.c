/* SPDX-License-Identifier: Apache-2.0 */
/* The compat path on CUDA: one program for every call, and a score row in memory for each block. */
#include "attention.h"

/* Blocks take rows one after the other: they fill a large card four times over. */
enum { THREADS = 256, MAX_BLOCKS = 512 };

static int64_t blocks_of(const nyb_attention *a) {
  const int64_t rows = a->batch * a->query_heads * a->query_len;
  return rows < MAX_BLOCKS ? rows : MAX_BLOCKS;
}

/* A query and its scores. */
static int64_t slot_floats(const nyb_attention *a) {
  return (a->key_dim + nyb_room_tokens(a) + 15) / 16 * 16;
}

static bool supports(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  (void)call;
  (void)properties;
  return true;
}

static int64_t workspace_bytes(const nyb_attention_call *call,
                               const nyb_cuda_properties *properties) {
  (void)properties;
  const nyb_attention *a = call->attention;
  return blocks_of(a) * slot_floats(a) * (int64_t)sizeof(float);
}

static int programs(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                    nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS]) {
  (void)call;
  (void)properties;
  programs[0].spec.program = &nyb_cuda_program_attention_compat;
  programs[0].threads = THREADS;
  return 1;
}

static nyb_status launch(nyb_cuda_scope *scope, const nyb_attention_call *call,
                         const nyb_cuda_kernel *const *kernels, void *workspace,
                         nyb_stream stream) {
  nyb_attention_arguments arguments = nyb_cuda_attention_arguments(call);
  arguments.memory = workspace;
  arguments.slot_floats = slot_floats(call->attention);
  const int64_t grid[3] = {blocks_of(call->attention), 1, 1};
  return nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
}

const nyb_cuda_attention_kernel nyb_cuda_attention_compat = {
    .reason = "attention.path or NYBBLE_PATH asks for it",
    .tuned = false,
    .supports = supports,
    .suits = NULL,
    .workspace_bytes = workspace_bytes,
    .programs = programs,
    .launch = launch,
};
