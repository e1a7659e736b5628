/* SPDX-License-Identifier: Apache-2.0 */
/* One layer of a decoder: a prompt goes into a 4-bit KV cache, then each new token is appended and
 * its queries attend over all that the cache holds. */
#include <math.h>
#include <nybble.h>
#include <stdio.h>
#include <stdlib.h>

enum { QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, PROMPT_TOKENS = 500, NEW_TOKENS = 12 };

static void expect_ok(nyb_status status) {
  if (status == NYB_OK) return;
  fprintf(stderr, "%s: %s\n", nyb_status_name(status), nyb_last_error());
  exit(1);
}

/* Stands for what a model computes. */
static void fill(float *values, int64_t count) {
  static uint32_t state = 1;
  for (int64_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)(state >> 8) / (float)(1u << 23) - 1.0f;
  }
}

static nyb_input heads_of(const float *data, int64_t tokens) {
  const int64_t head_stride = tokens * HEAD_DIM;
  return (nyb_input){data, NYB_F32, {KV_HEADS * head_stride, head_stride, HEAD_DIM}};
}

int main(void) {
  static float key[KV_HEADS * PROMPT_TOKENS * HEAD_DIM], value[KV_HEADS * PROMPT_TOKENS * HEAD_DIM];
  static float query[QUERY_HEADS * HEAD_DIM], out[QUERY_HEADS * HEAD_DIM];

  nyb_context *context;
  expect_ok(nyb_context_create(NULL, &context));

  const nyb_format format = {NYB_AFFINE, .bits = 4, .group_size = 64, .dtype = NYB_BF16};
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = 1;
  options.kv_heads = KV_HEADS;
  options.key_dim = options.value_dim = HEAD_DIM;
  options.key_format = options.value_format = format;
  nyb_cache *cache;
  expect_ok(nyb_cache_create(context, &options, &cache));
  /* Room for all tokens at once: from here on appending allocates nothing. */
  expect_ok(nyb_cache_reserve(cache, PROMPT_TOKENS + NEW_TOKENS, NULL));

  /* What stays the same from token to token; the workspace is planned once. */
  nyb_attention attention = NYB_ATTENTION_INIT;
  expect_ok(nyb_cache_view(cache, &attention));
  attention.query_heads = QUERY_HEADS;
  attention.query_len = 1;
  attention.q = (nyb_input){query, NYB_F32, {sizeof query / sizeof *query, HEAD_DIM, HEAD_DIM}};
  attention.out = (nyb_output){out, NYB_F32, {sizeof out / sizeof *out, HEAD_DIM, HEAD_DIM}};
  attention.scale = 1.0f / sqrtf(HEAD_DIM);
  nyb_plan plan = NYB_PLAN_INIT;
  expect_ok(nyb_attention_plan(context, &attention, &plan));
  void *workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes);
  if (workspace == NULL && plan.workspace_bytes != 0) return 1;

  nyb_append append = NYB_APPEND_INIT;
  double checksum = 0;
  for (int step = 0; step <= NEW_TOKENS; step++) {
    append.tokens = step == 0 ? PROMPT_TOKENS : 1;
    fill(key, KV_HEADS * append.tokens * HEAD_DIM);
    fill(value, KV_HEADS * append.tokens * HEAD_DIM);
    append.key = heads_of(key, append.tokens);
    append.value = heads_of(value, append.tokens);
    expect_ok(nyb_cache_append(cache, &append, NULL));
    if (step == 0) continue;

    fill(query, QUERY_HEADS * HEAD_DIM);
    expect_ok(nyb_cache_view(cache, &attention));
    expect_ok(nyb_attention_run(context, &attention, workspace, plan.workspace_bytes, NULL));
    for (int i = 0; i < QUERY_HEADS * HEAD_DIM; i++) checksum += (double)out[i] * (i + 1);
  }

  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  expect_ok(nyb_cache_get_usage(cache, &usage));
  printf("%lld tokens in %lld bytes, %s kernels, checksum %.6f\n",
         (long long)nyb_cache_length(cache, 0), (long long)usage.used_bytes,
         nyb_isa_name(nyb_context_isa(context)), checksum);
  free(workspace);
  nyb_cache_destroy(cache);
  nyb_context_destroy(context);
  return 0;
}
