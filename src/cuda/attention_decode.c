/* SPDX-License-Identifier: Apache-2.0 */
/* The tuned kernel for few query rows over a long affine cache (device/attention_decode.cu). */
#include "../attention_places.h"
#include "attention.h"
#include "device/attention_decode_arguments.h"

/* The sums of more groups would not fit the registers; a step behind the last token is counted. */
enum { MAX_DIM = 576, MAX_GROUPS = 20, MAX_ROWS = 128, MAX_TOKENS = INT32_MAX - 1024 };

/* ---- What a call asks for ---------------------------------------------------------------------
 */

/* Whether all query rows of a KV head have the same row of the mask's array. */
static bool has_one_mask_row(const nyb_attention *a) {
  return (a->query_heads == a->kv_heads || a->mask_array.stride[1] == 0) &&
         (a->query_len == 1 || a->mask_array.stride[2] == 0);
}

/* NYB_DECODE_SIGHT, ... */
static int32_t features_of(const nyb_attention *a) {
  const bool sight =
      a->mask == NYB_MASK_CAUSAL_TOP_LEFT || a->window_tokens != 0 || a->starts != NULL;
  const bool bools = a->mask_array.kind == NYB_MASK_ARRAY_BOOL;
  const bool added = a->mask_array.kind == NYB_MASK_ARRAY_ADD;
  return (sight ? NYB_DECODE_SIGHT : 0) | (a->softcap != 0 ? NYB_DECODE_CAPPED : 0) |
         (a->alibi_slopes != NULL ? NYB_DECODE_SLOPED : 0) | (bools ? NYB_DECODE_BOOLS : 0) |
         (added ? NYB_DECODE_ADDED : 0) |
         (added && a->mask_array.dtype == NYB_F32 ? NYB_DECODE_ADDED_F32 : 0) |
         ((bools || added) && has_one_mask_row(a) ? NYB_DECODE_ONE_MASK_ROW : 0) |
         (a->sinks != NULL ? NYB_DECODE_SINKS : 0);
}

/* Of attention_decode itself. */
static int32_t own_features(const nyb_attention *a) {
  return NYB_DECODE_OWN_FEATURES(features_of(a));
}

/* ---- How a call is cut ------------------------------------------------------------------------
 */

typedef struct cut {
  int64_t rows;      /* that share a KV head */
  int32_t columns;   /* of them at once */
  int32_t row_room;  /* columns that may be in use */
  int64_t row_tiles; /* of `columns` rows */
  int64_t pairs;     /* sequences x KV heads x row tiles */
  int64_t leaves;    /* of a sequence as long as the capacity */
  int64_t merged;    /* leaves of a sequence that the merge looks at, from the first that is seen on
                        where they are fewer than `leaves` */
} cut;

/* Of a token, K and V. */
static int64_t groups_of(const nyb_attention *a) {
  return a->key_dim / a->k.format.group_size + a->value_dim / a->v.format.group_size;
}

static int32_t tile_tokens(const nyb_attention *a) {
  return NYB_DECODE_TILE(a->key_dim, a->value_dim, a->key_dim * a->k.format.bits / 8,
                         a->value_dim * a->v.format.bits / 8);
}

/* features: own_features(), or others than the call's. */
static int64_t shared_bytes(const nyb_attention *a, int32_t features, int32_t columns,
                            int32_t row_room, int32_t stages) {
  return NYB_DECODE_SHARED_BYTES(a->key_dim, a->value_dim, a->k.format.bits, a->v.format.bits,
                                 a->k.format.group_size, a->v.format.group_size,
                                 (int64_t)nyb_dtype_bytes(a->k.format.dtype),
                                 (int64_t)nyb_dtype_bytes(a->v.format.dtype), tile_tokens(a),
                                 stages, columns, row_room, features);
}

static int64_t leaves_of_capacity(const nyb_attention *a) {
  const int64_t leaf = NYB_DECODE_LEAF_TOKENS(a->key_dim, a->value_dim);
  return (nyb_room_tokens(a) + leaf - 1) / leaf;
}

/* Of them, those that a sequence's rows may see something of: all its rows together see the
 * window's tokens, one more for each row but one, and those that are kept. */
static int64_t most_seen_leaves(const nyb_attention *a) {
  const int64_t leaf = NYB_DECODE_LEAF_TOKENS(a->key_dim, a->value_dim);
  const int64_t all = leaves_of_capacity(a);
  if (a->window_tokens == 0 || a->window_tokens >= all * leaf) return all;
  const int64_t tokens = a->window_tokens + a->query_len - 1;
  const int64_t kept = a->window_keep_tokens < all * leaf ? a->window_keep_tokens : all * leaf;
  const int64_t seen = (tokens + leaf - 2) / leaf + 1 + (kept + leaf - 1) / leaf;
  return seen < all ? seen : all;
}

static bool has_two_warps_a_tile(const nyb_attention *a) {
  return NYB_DECODE_WARP_PARTS(a->key_dim, a->value_dim, own_features(a)) > 1;
}

/* Where a warp has a tile: sixteen rows and the sums of many groups or elements would not fit the
 * registers. */
static bool holds_sixteen(const nyb_attention *a) {
  const bool narrow = a->k.format.group_size == 32 || a->v.format.group_size == 32;
  return groups_of(a) <= (narrow ? 6 : 8) && a->key_dim <= 256 && a->value_dim <= 256;
}

/* Whether the rows are taken sixteen at once: their bits are those that eight at once get. */
static bool takes_sixteen(const nyb_attention *a, int64_t rows,
                          const nyb_cuda_properties *properties) {
  /* Where two warps share a tile, each has few elements of sixteen rows; but as long as there are
   * multiprocessors for all, two blocks of threads are done sooner with eight rows each. */
  if (has_two_warps_a_tile(a)) {
    const int64_t eights = (rows + 7) / 8;
    const double blocks =
        (double)a->batch * (double)a->kv_heads * (double)eights * (double)leaves_of_capacity(a);
    return blocks > properties->multiprocessors &&
           shared_bytes(a, own_features(a), 16, 16, 2) <= properties->shared_bytes_per_block;
  }
  return holds_sixteen(a);
}

static cut cut_of_rows(const nyb_attention *a, int64_t rows,
                       const nyb_cuda_properties *properties) {
  const bool few = rows <= 8 || !takes_sixteen(a, rows, properties);
  cut c = {.rows = rows, .columns = few ? 8 : 16, .row_room = 1};
  while (c.row_room < c.columns && c.row_room < rows) c.row_room *= 2;
  c.row_tiles = (rows + c.columns - 1) / c.columns;
  c.pairs = a->batch * a->kv_heads * c.row_tiles;
  c.leaves = leaves_of_capacity(a);
  c.merged = a->window_keep_tokens == 0 ? most_seen_leaves(a) : c.leaves;
  return c;
}

static cut cut_of(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  return cut_of_rows(call->attention, call->heads_per_kv * call->attention->query_len, properties);
}

/* The workspace: statistics first, as the larger part may be large. */
static int64_t statistics_floats(const cut *c) {
  return (c->pairs * c->leaves * NYB_DECODE_STATISTICS(c->columns) + 15) / 16 * 16;
}

static int64_t partial_floats(const cut *c, int64_t value_dim) {
  return c->pairs * c->leaves * c->columns * value_dim;
}

/* ---- Which calls ------------------------------------------------------------------------------
 */

static bool is_16_bit(nyb_dtype dtype) { return dtype == NYB_F16 || dtype == NYB_BF16; }

/* Where tokens stand: NYB_DECODE_IN_ORDER, ... */
static int32_t placed(const nyb_attention *a) {
  if (nyb_is_paged(a)) return NYB_DECODE_PAGES;
  const bool shifted = a->starts != NULL || nyb_cuda_attention_is_placed(a);
  return shifted ? NYB_DECODE_SHIFTED : NYB_DECODE_IN_ORDER;
}

/* Of pages as all who page have them: 16, 32, 64, ... tokens; of others -1. */
static int32_t page_shift(const nyb_attention *a) {
  int32_t shift = 4;
  while (shift < 30 && INT64_C(1) << shift < a->pages.page_tokens) shift++;
  return INT64_C(1) << shift == a->pages.page_tokens ? shift : -1;
}

/* Scores under a cap are worked out to within so many units of the cap, not of the score
 * (docs/numerics.md): enough where the cap is one of those that models have. */
static bool caps_well(const nyb_attention *a) {
  const float least = 0x1p-4f, most = 0x1p10f;
  return a->softcap == 0 || a->rounding == NYB_ROUNDING_MLX ||
         (a->softcap >= least && a->softcap <= most);
}

static bool takes(const nyb_attention *a) {
  return !nyb_has_parts(a) && (!nyb_is_paged(a) || page_shift(a) >= 0) && caps_well(a);
}

/* Leaves of all pairs that rows may see something of, at most, of a call that suits(). */
static int64_t most_units(const nyb_attention *a, const cut *c) {
  return c->pairs * most_seen_leaves(a);
}

/* Blocks of threads that a multiprocessor shall hold: few, where there is little to do. */
static int64_t resident_blocks(const nyb_attention *a, const cut *c,
                               const nyb_cuda_properties *properties) {
  int64_t blocks = NYB_DECODE_MIN_BLOCKS(
      a->key_dim, a->value_dim, a->key_dim * a->k.format.bits / 8,
      a->value_dim * a->v.format.bits / 8, groups_of(a), c->columns, c->row_room);
  const int64_t units = most_units(a, c);
  while (blocks > 1 && (blocks - 1) * properties->multiprocessors >= units) blocks--;
  return blocks;
}

enum { RESERVED_BYTES = 1024 }; /* of shared memory, by the driver, of each block */

/* As many as fit beside each other in those blocks. */
static int32_t stages(const nyb_attention *a, const cut *c, const nyb_cuda_properties *properties) {
  const int64_t blocks = resident_blocks(a, c, properties);
  const int64_t budget = properties->shared_bytes_per_multiprocessor / blocks - RESERVED_BYTES;
  int32_t most = NYB_DECODE_MAX_STAGES;
  while (most > 2 && shared_bytes(a, own_features(a), c->columns, c->row_room, most) > budget)
    most--;
  return most;
}

/* Where all blocks are there at once, none more on a multiprocessor than meant: while the merge of
 * the call before still ends, one has more room than the next. */
static int64_t block_shared_bytes(const nyb_attention *a, const cut *c,
                                  const nyb_cuda_properties *properties) {
  const int64_t blocks = resident_blocks(a, c, properties);
  const int64_t bytes =
      shared_bytes(a, own_features(a), c->columns, c->row_room, stages(a, c, properties));
  if (most_units(a, c) > blocks * properties->multiprocessors) return bytes;
  int64_t least = properties->shared_bytes_per_multiprocessor / (blocks + 1) - RESERVED_BYTES + 16;
  if (least > properties->shared_bytes_per_block) least = properties->shared_bytes_per_block;
  return bytes > least ? bytes : least;
}

static bool supports(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  if (a->k.format.scheme != NYB_AFFINE || a->v.format.scheme != NYB_AFFINE ||
      a->key_dim > MAX_DIM || a->value_dim > MAX_DIM || groups_of(a) > MAX_GROUPS ||
      !is_16_bit(a->q.dtype) || !is_16_bit(a->out.dtype) || call->heads_per_kv > MAX_ROWS) {
    return false;
  }
  /* Strides may not matter here: a mask's may make it one row for all, which takes less. */
  const int32_t features = own_features(a) & ~NYB_DECODE_ONE_MASK_ROW;
  /* Fewer rows may take more: more subtrees wait in shared memory. Sixteen at once are taken only
   * where they fit, or always. */
  for (int32_t rows = 1; rows <= 16; rows *= 2) {
    const bool sixteen = rows > 8;
    if (sixteen && (has_two_warps_a_tile(a) || !holds_sixteen(a))) break;
    if (shared_bytes(a, features, sixteen ? 16 : 8, rows, 2) > properties->shared_bytes_per_block)
      return false;
  }
  return true;
}

static bool is_packed_array(const nyb_attention *a, const void *data, const int64_t stride[3],
                            int64_t element_bytes, int64_t row_elements) {
  const bool paged = nyb_is_paged(a);
  if (data == NULL) return true; /* planning */
  if ((uintptr_t)data % 16 != 0) return false;
  if ((paged || a->capacity_tokens > 1) && stride[2] != row_elements) return false;
  return ((!paged && a->batch == 1) || stride[0] * element_bytes % 16 == 0) &&
         (a->kv_heads == 1 || stride[1] * element_bytes % 16 == 0);
}

static bool is_packed_rows(const nyb_attention *a, const nyb_stored *stored, int64_t dim) {
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  const int64_t groups = dim / stored->format.group_size;
  /* Rows that begin anywhere are copied by themselves. */
  if (placed(a) == NYB_DECODE_SHIFTED &&
      (dim * stored->format.bits / 8 % 16 != 0 || groups * scale_bytes % 4 != 0)) {
    return false;
  }
  return is_packed_array(a, stored->codes, stored->codes_stride, 4,
                         dim / 32 * stored->format.bits) &&
         is_packed_array(a, stored->scales, stored->scales_stride, scale_bytes, groups) &&
         is_packed_array(a, stored->biases, stored->biases_stride, scale_bytes, groups);
}

/* Whether the tokens of a head, or of a page, follow each other without gaps, from multiples of 16
 * bytes on. */
static bool is_packed(const nyb_attention *a) {
  return is_packed_rows(a, &a->k, a->key_dim) && is_packed_rows(a, &a->v, a->value_dim);
}

static bool is_aligned_query(const nyb_attention *a) {
  return (uintptr_t)a->q.data % 16 == 0 && (a->batch == 1 || a->q.stride[0] % 8 == 0) &&
         (a->query_heads == 1 || a->q.stride[1] % 8 == 0) &&
         (a->query_len == 1 || a->q.stride[2] % 8 == 0);
}

static bool suits(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call, properties);
  return c.rows <= MAX_ROWS && nyb_room_tokens(a) <= MAX_TOKENS &&
         (c.leaves == 0 || c.pairs < INT32_MAX / c.leaves) &&
         a->batch * a->kv_heads < INT32_MAX / (c.rows * a->value_dim / NYB_MERGE_ELEMENTS) &&
         (!nyb_is_paged(a) || (is_packed(a) && is_aligned_query(a)));
}

static int64_t workspace_bytes(const nyb_attention_call *call,
                               const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const int64_t rows = call->heads_per_kv * a->query_len;
  cut c = cut_of_rows(a, rows < MAX_ROWS ? rows : MAX_ROWS, properties);
  const int64_t most_pairs = c.leaves == 0 ? c.pairs : INT32_MAX / c.leaves;
  if (c.pairs > most_pairs) c.pairs = most_pairs;
  return (statistics_floats(&c) + partial_floats(&c, a->value_dim)) * (int64_t)sizeof(float);
}

/* ---- Programs and launch ----------------------------------------------------------------------
 */

/* Lanes of the merge that share the elements of a row. */
static int32_t merge_groups(const cut *c) {
  const int32_t most = NYB_MERGE_WARP_GROUPS * NYB_MERGE_MAX_WARPS;
  int32_t groups = 1;
  while (groups < most && groups * NYB_MERGE_GROUP < c->merged) groups *= 2;
  return groups;
}

/* Each of merge_groups() * NYB_MERGE_GROUP leaves, from a multiple of them on: a window's are in
 * one or two. */
static int64_t merge_rounds(const cut *c) {
  const int64_t round_leaves = (int64_t)merge_groups(c) * NYB_MERGE_GROUP;
  const int64_t rounds = (c->leaves + round_leaves - 1) / round_leaves;
  if (c->merged <= round_leaves && rounds > 2 && c->merged < c->leaves) return 2;
  return rounds > 1 ? rounds : 1;
}

static int32_t merge_threads(const cut *c) {
  const int32_t warps = merge_groups(c) / NYB_MERGE_WARP_GROUPS;
  return (warps > 2 ? warps : 2) * 32;
}

static int programs(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                    nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS]) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call, properties);
  programs[0].spec.program = &nyb_cuda_program_attention_decode;
  programs[0].threads = (NYB_DECODE_WARPS(a->key_dim, a->value_dim, own_features(a)) + 1) * 32;
  const int32_t own_stages = stages(a, &c, properties);
  programs[0].dynamic_shared_bytes = (int32_t)block_shared_bytes(a, &c, properties);
  int32_t *values = programs[0].spec.values;
#define NYB_SET(macro, value) values[NYB_CUDA_PARAMETER(attention_decode, macro)] = (int32_t)(value)
  NYB_SET(KEY_DIM, a->key_dim);
  NYB_SET(VALUE_DIM, a->value_dim);
  NYB_SET(KEY_BITS, a->k.format.bits);
  NYB_SET(VALUE_BITS, a->v.format.bits);
  NYB_SET(KEY_GROUP, a->k.format.group_size);
  NYB_SET(VALUE_GROUP, a->v.format.group_size);
  NYB_SET(QUERY_TYPE, a->q.dtype);
  NYB_SET(KEY_SCALE_TYPE, a->k.format.dtype);
  NYB_SET(VALUE_SCALE_TYPE, a->v.format.dtype);
  NYB_SET(COLUMNS, c.columns);
  NYB_SET(ROWS, c.row_room);
  NYB_SET(ROUND_SCORES, a->rounding == NYB_ROUNDING_MLX);
  NYB_SET(PACKED, is_packed(a) && is_aligned_query(a));
  NYB_SET(STAGES, own_stages);
  NYB_SET(FEATURES, own_features(a));
  NYB_SET(PLACED, placed(a));
#undef NYB_SET
  programs[1].spec.program = &nyb_cuda_program_attention_merge;
  programs[1].threads = merge_threads(&c);
  programs[1].spec.values[NYB_CUDA_PARAMETER(attention_merge, VALUE_DIM)] = (int32_t)a->value_dim;
  programs[1].spec.values[NYB_CUDA_PARAMETER(attention_merge, COLUMNS)] = c.columns;
  programs[1].spec.values[NYB_CUDA_PARAMETER(attention_merge, FEATURES)] =
      NYB_DECODE_MERGE_FEATURES(features_of(a));
  return 2;
}

static nyb_decode_stored arguments_of_stored(const nyb_stored *stored) {
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  nyb_decode_stored arguments = {
      .codes = stored->codes, .scales = stored->scales, .biases = stored->biases};
  nyb_cuda_byte_strides(stored->codes_stride, 4, arguments.codes_stride);
  nyb_cuda_byte_strides(stored->scales_stride, scale_bytes, arguments.scales_stride);
  nyb_cuda_byte_strides(stored->biases_stride, scale_bytes, arguments.biases_stride);
  return arguments;
}

static nyb_decode_arguments arguments_of(const nyb_attention_call *call, const cut *c,
                                         void *workspace) {
  const nyb_attention *a = call->attention;
  nyb_decode_arguments arguments = {
      .k = arguments_of_stored(&a->k),
      .v = arguments_of_stored(&a->v),
      .q = a->q.data,
      .out = a->out.data,
      .lse = a->lse.data,
      .lengths = a->lengths,
      .statistics = workspace,
      .capacity_tokens = nyb_cuda_attention_room(a),
      .capacity_leaves = c->leaves,
      .batch = (int)a->batch,
      .kv_heads = (int)a->kv_heads,
      .heads_per_kv = (int)call->heads_per_kv,
      .query_len = (int)a->query_len,
      .row_tiles = (int)c->row_tiles,
      .causal = a->mask == NYB_MASK_CAUSAL,
      .scale = a->scale,
      .out_type = (int)a->out.dtype,
      .merge_groups = merge_groups(c),
      .leaf_tokens = NYB_DECODE_LEAF_TOKENS(a->key_dim, a->value_dim),
      .levels = NYB_DECODE_LEVELS(a->key_dim, a->value_dim, c->row_room, own_features(a)),
      .page_shift = nyb_is_paged(a) ? page_shift(a) : 0,
      .merge_rounds = (int)merge_rounds(c),
  };
  arguments.merge_from_seen =
      arguments.merge_rounds * arguments.merge_groups * NYB_MERGE_GROUP < c->leaves;
  arguments.partials = arguments.statistics + statistics_floats(c);
  nyb_cuda_byte_strides(a->q.stride, 2, arguments.q_stride);
  nyb_cuda_byte_strides(a->out.stride, 2, arguments.out_stride);
  nyb_cuda_byte_strides(a->lse.stride, (int64_t)sizeof(float), arguments.lse_stride);
  return arguments;
}

static nyb_decode_features feature_arguments_of(const nyb_attention_call *call) {
  const nyb_attention_arguments all = nyb_cuda_attention_arguments(call);
  nyb_decode_features arguments = {
      .mask = all.mask,
      .window_tokens = (int)all.window_tokens,
      .window_keep_tokens = (int)all.window_keep_tokens,
      .softcap = all.softcap,
      .softcap_reciprocal = all.softcap_reciprocal,
      .starts = all.starts,
      .slopes = all.slopes,
      .sinks = all.sinks,
      .mask_array = all.mask_array,
      .mask_stride = {all.mask_stride[0], all.mask_stride[1], all.mask_stride[2]},
      .page_table = all.page_table,
      .page_table_stride = all.page_table_stride,
      .page_count = all.page_count,
  };
  if (all.places == NYB_PLACES_RING) {
    arguments.ring_keep_tokens = all.ring_keep_tokens;
    arguments.ring_tokens = (int)all.capacity_tokens;
    arguments.ring_offsets = all.ring_offsets;
  }
  return arguments;
}

/* As many blocks of threads as fit at once deal with all there is; where each has a multiprocessor
 * of its own, all with as much. */
static int64_t decode_blocks(int64_t units, int64_t multiprocessors, int64_t blocks_of_each) {
  const int64_t resident = multiprocessors * blocks_of_each;
  if (units <= resident) return units > 0 ? units : 1;
  if (blocks_of_each > 1) return resident;
  const int64_t share = (units + resident - 1) / resident;
  return (units + share - 1) / share;
}

static nyb_status launch(nyb_cuda_scope *scope, const nyb_attention_call *call,
                         const nyb_cuda_kernel *const *kernels, void *workspace,
                         nyb_stream stream) {
  const nyb_attention *a = call->attention;
  const cut c = cut_of(call, scope->properties);
  nyb_decode_call_arguments all = {.decode = arguments_of(call, &c, workspace)};
  if (nyb_cuda_attention_feature(a) != NULL) all.features = feature_arguments_of(call);
  nyb_decode_arguments *arguments = &all.decode;
  arguments->blocks = (int)decode_blocks(most_units(a, &c), scope->properties->multiprocessors,
                                         kernels[0]->blocks_per_multiprocessor);
  const int64_t grid[3] = {arguments->blocks, 1, 1};
  /* A block of threads that starts before the kernel before has ended gets what room is left:
   * harmless where each has a multiprocessor to itself. */
  const bool alone = arguments->blocks <= scope->properties->multiprocessors;
  const nyb_status status = nyb_cuda_launch(scope, kernels[0], grid, &all, stream, alone);
  if (status != NYB_OK) return status;
  const int64_t items = merge_threads(&c) / arguments->merge_groups;
  const int64_t parts = a->batch * a->kv_heads * c.rows * (a->value_dim / NYB_MERGE_ELEMENTS);
  const int64_t merge_grid[3] = {(parts + items - 1) / items, 1, 1};
  return nyb_cuda_launch(scope, kernels[1], merge_grid, &all, stream, true);
}

const nyb_cuda_attention_kernel nyb_cuda_attention_decode = {
    .operation = NYB_OPERATION_ATTENTION_DECODE,
    .reason = "few query rows over an affine cache: codes go through the tensor cores as they are",
    .tuned = true,
    .takes = takes,
    .supports = supports,
    .suits = suits,
    .workspace_bytes = workspace_bytes,
    .programs = programs,
    .launch = launch,
};
