/* SPDX-License-Identifier: Apache-2.0 */
/* The tuned kernel for many query rows over an affine cache, on Hopper
 * (device/attention_prefill.cu).
 */
#include "attention.h"
#include "device/attention_prefill_arguments.h"

enum { MAX_DIM = 256, MIN_ROWS = 17, THREADS = 384, MERGE_THREADS = 256 };
static const int64_t max_partial_bytes = (int64_t)256 << 20;

/* ---- How a call is cut -------------------------------------------------------------------------
 */

typedef struct cut {
  int64_t rows;      /* that share a KV head */
  int64_t row_tiles; /* of one KV head */
  int64_t tiles;     /* of the call */
  int64_t chunks;    /* of a sequence as long as the capacity */
  int64_t partial_bytes;
} cut;

static cut cut_of(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  cut c = {.rows = call->heads_per_kv * a->query_len};
  c.row_tiles = (c.rows + NYB_PREFILL_ROWS - 1) / NYB_PREFILL_ROWS;
  c.tiles = a->batch * a->kv_heads * c.row_tiles;
  c.chunks = (a->capacity_tokens + NYB_PREFILL_CHUNK_TOKENS - 1) / NYB_PREFILL_CHUNK_TOKENS;
  c.partial_bytes = NYB_PREFILL_PARTIAL_FLOATS(a->value_dim) * (int64_t)sizeof(float);
  return c;
}

/* Tiles up to which a block takes one chunk of one tile, and a second launch merges: with more,
 * whole tiles keep the card as busy. Both ways give the same bits. */
static int64_t most_split_tiles(const cut *c, const nyb_cuda_properties *properties) {
  const int64_t fit = c->chunks < 1 ? 0 : max_partial_bytes / c->partial_bytes / c->chunks;
  const int64_t few = (int64_t)properties->multiprocessors * 3 / 4;
  return few < fit ? few : fit;
}

static bool is_split(const cut *c, const nyb_cuda_properties *properties) {
  return c->chunks > 1 && c->tiles <= most_split_tiles(c, properties);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* A block takes a multiprocessor. */
static int64_t whole_blocks(const cut *c, const nyb_cuda_properties *properties) {
  return smaller(c->tiles, properties->multiprocessors);
}

/* ---- Which calls -------------------------------------------------------------------------------
 */

static bool is_16_bit(nyb_dtype dtype) { return dtype == NYB_F16 || dtype == NYB_BF16; }

static int64_t shared_bytes(const nyb_attention *a) {
  return NYB_PREFILL_SHARED_BYTES(a->key_dim, a->value_dim);
}

static bool supports(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  return properties->compute_capability == 90 && a->k.format.scheme == NYB_AFFINE &&
         a->v.format.scheme == NYB_AFFINE && a->key_dim <= MAX_DIM && a->value_dim <= MAX_DIM &&
         is_16_bit(a->q.dtype) && shared_bytes(a) <= properties->shared_bytes_per_block;
}

static bool fits_int32(int64_t value) { return value >= INT32_MIN && value <= INT32_MAX; }

/* The kernel counts rows and tokens in 32 bits, and steps from token to token in them. */
static bool strides_fit(const nyb_attention *a, const nyb_stored *stored) {
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  return a->capacity_tokens <= 1 || (fits_int32(stored->codes_stride[2] * 4) &&
                                     fits_int32(stored->scales_stride[2] * scale_bytes) &&
                                     fits_int32(stored->biases_stride[2] * scale_bytes));
}

static bool suits(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call);
  return c.rows >= MIN_ROWS && c.rows <= INT32_MAX - NYB_PREFILL_ROWS &&
         a->capacity_tokens <= INT32_MAX - NYB_PREFILL_CHUNK_TOKENS &&
         fits_int32(c.tiles * (is_split(&c, properties) ? c.chunks : 1)) && strides_fit(a, &a->k) &&
         strides_fit(a, &a->v);
}

static int64_t workspace_bytes(const nyb_attention_call *call,
                               const nyb_cuda_properties *properties) {
  const cut c = cut_of(call);
  if (c.rows < MIN_ROWS || c.chunks <= 1) return 0;
  /* Of the largest call of both kinds: more tokens may forbid what fewer allow. */
  const int64_t few = (int64_t)properties->multiprocessors * 3 / 4;
  const int64_t split =
      smaller(smaller(c.tiles, few) * c.chunks * c.partial_bytes, max_partial_bytes);
  const int64_t whole = whole_blocks(&c, properties) * c.partial_bytes;
  return whole > split ? whole : split;
}

/* ---- Programs and launch -----------------------------------------------------------------------
 */

static int32_t wide(const nyb_attention *a, const nyb_stored *stored) {
  return nyb_cuda_codes_aligned(a, stored, 16) ? 16 : 4;
}

/* Whether the tokens of a KV head follow each other without gaps, codes at multiples of 16 bytes.
 * A call without rows and strides is one for such. */
static bool is_packed(const nyb_attention *a, const nyb_stored *stored, int64_t dim) {
  const int64_t words = dim / 32 * stored->format.bits, groups = dim / stored->format.group_size;
  const bool without = stored->codes == NULL && stored->codes_stride[2] == 0;
  if (wide(a, stored) != 16) return false;
  return without || a->capacity_tokens <= 1 || /* a single token's strides may be anything */
         (stored->codes_stride[2] == words && stored->scales_stride[2] == groups &&
          stored->biases_stride[2] == groups);
}

static void set_parameters(const nyb_attention *a, bool merge, nyb_cuda_spec *spec) {
  spec->program = &nyb_cuda_program_attention_prefill;
#define NYB_SET(macro, value) \
  spec->values[NYB_CUDA_PARAMETER(attention_prefill, macro)] = (int32_t)(value)
  NYB_SET(KEY_BITS, a->k.format.bits);
  NYB_SET(KEY_GROUP, a->k.format.group_size);
  NYB_SET(KEY_FLOAT, a->k.format.dtype);
  NYB_SET(KEY_DIM, a->key_dim);
  NYB_SET(KEY_WIDE, wide(a, &a->k));
  NYB_SET(VALUE_BITS, a->v.format.bits);
  NYB_SET(VALUE_GROUP, a->v.format.group_size);
  NYB_SET(VALUE_FLOAT, a->v.format.dtype);
  NYB_SET(VALUE_DIM, a->value_dim);
  NYB_SET(VALUE_WIDE, wide(a, &a->v));
  NYB_SET(QUERY_FLOAT, a->q.dtype);
  NYB_SET(OUT_FLOAT, a->out.dtype);
  NYB_SET(ROUND_SCORES, a->rounding == NYB_ROUNDING_MLX);
  NYB_SET(MERGE, merge);
  NYB_SET(PACKED, is_packed(a, &a->k, a->key_dim) && is_packed(a, &a->v, a->value_dim));
  if (merge) {
    /* Codes are merged no more, and all of their widths but 8 bits have the same order of columns:
     * one program serves them. */
    NYB_SET(KEY_BITS, 4);
    NYB_SET(KEY_GROUP, 32);
    NYB_SET(KEY_FLOAT, NYB_BF16);
    NYB_SET(KEY_DIM, a->value_dim);
    NYB_SET(KEY_WIDE, 4);
    NYB_SET(VALUE_BITS, a->v.format.bits == 8 ? 8 : 4);
    NYB_SET(VALUE_GROUP, 32);
    NYB_SET(VALUE_FLOAT, NYB_BF16);
    NYB_SET(VALUE_WIDE, 4);
    NYB_SET(QUERY_FLOAT, NYB_BF16);
    NYB_SET(ROUND_SCORES, false);
    NYB_SET(PACKED, false);
  }
#undef NYB_SET
}

static int programs(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                    nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS]) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call);
  set_parameters(a, false, &programs[0].spec);
  programs[0].threads = THREADS;
  programs[0].dynamic_shared_bytes = (int32_t)shared_bytes(a);
  if (!is_split(&c, properties)) return 1;
  set_parameters(a, true, &programs[1].spec);
  programs[1].threads = MERGE_THREADS;
  return 2;
}

static nyb_prefill_stored stored_of(const nyb_attention_rows *rows) {
  nyb_prefill_stored stored = {
      .codes = rows->codes, .scales = rows->scales, .biases = rows->biases};
  for (int axis = 0; axis < 3; axis++) {
    stored.codes_stride[axis] = rows->codes_stride[axis];
    stored.scales_stride[axis] = rows->scales_stride[axis];
    stored.biases_stride[axis] = rows->biases_stride[axis];
  }
  return stored;
}

static nyb_prefill_arguments arguments_of(const nyb_attention_call *call, const cut *c,
                                          int64_t chunks, void *workspace) {
  const nyb_attention_arguments all = nyb_cuda_attention_arguments(call);
  nyb_prefill_arguments arguments = {
      .k = stored_of(&all.k),
      .v = stored_of(&all.v),
      .q = all.q,
      .out = all.out,
      .lse = all.lse,
      .lengths = all.lengths,
      .partials = c->chunks > 1 ? workspace : NULL,
      .capacity_tokens = all.capacity_tokens,
      .query_len = (int)all.query_len,
      .batch = (int)all.batch,
      .kv_heads = (int)all.kv_heads,
      .heads_per_kv = (int)all.heads_per_kv,
      .row_tiles = (int)c->row_tiles,
      .chunks = (int)chunks,
      .causal = all.causal,
      .scale = all.scale,
  };
  for (int axis = 0; axis < 3; axis++) {
    arguments.q_stride[axis] = all.q_stride[axis];
    arguments.out_stride[axis] = all.out_stride[axis];
    arguments.lse_stride[axis] = all.lse_stride[axis];
  }
  return arguments;
}

static nyb_status launch(nyb_cuda_scope *scope, const nyb_attention_call *call,
                         const nyb_cuda_kernel *const *kernels, void *workspace,
                         nyb_stream stream) {
  const cut c = cut_of(call);
  const bool split = is_split(&c, scope->properties);
  nyb_prefill_arguments arguments = arguments_of(call, &c, split ? c.chunks : 1, workspace);
  const int64_t blocks = split ? c.tiles * c.chunks : whole_blocks(&c, scope->properties);
  const int64_t grid[3] = {blocks, 1, 1};
  const nyb_status status = nyb_cuda_launch(scope, kernels[0], grid, &arguments, stream, false);
  if (status != NYB_OK || !split) return status;
  const int64_t merge_grid[3] = {c.tiles, 1, 1};
  return nyb_cuda_launch(scope, kernels[1], merge_grid, &arguments, stream, true);
}

const nyb_cuda_attention_kernel nyb_cuda_attention_prefill = {
    .operation = NYB_OPERATION_ATTENTION_PREFILL,
    .reason = "many query rows over an affine cache: tiles of it are unpacked for 128 rows at once",
    .tuned = true,
    .supports = supports,
    .suits = suits,
    .workspace_bytes = workspace_bytes,
    .programs = programs,
    .launch = launch,
};
