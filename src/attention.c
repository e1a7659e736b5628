/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_attention_plan and nyb_attention_run: check, choose the path, hand over. */
#include "attention.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "attention_places.h"
#include "cuda/operations.h"
#include "format.h"
#include "numeric.h"
#include "views.h"

/* Sizes beyond these are taken for mistakes; they keep every product below in int64. */
enum { MAX_HEAD_DIM = 1 << 16, MAX_HEADS = 1 << 20, MAX_BATCH = 1 << 30 };

/* ---- Checks --------------------------------------------------------------------------------- */

nyb_status nyb_check_size(const char *field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return NYB_OK;
  return nyb_fail(NYB_ERROR_SHAPE, "attention.%s is %lld; it must be %lld to %lld", field,
                  (long long)value, (long long)least, (long long)most);
}

static nyb_status check_enum(const char *field, int value, int count) {
  if (value >= 0 && value < count) return NYB_OK;
  return nyb_fail(NYB_ERROR_ENUM, "attention.%s is %d; it must be 0 to %d", field, value,
                  count - 1);
}

static nyb_status check_sizes(const nyb_attention *a) {
  nyb_status status = nyb_check_size("batch", a->batch, 1, MAX_BATCH);
  if (status == NYB_OK) status = nyb_check_size("kv_heads", a->kv_heads, 1, MAX_HEADS);
  if (status == NYB_OK) status = nyb_check_size("query_heads", a->query_heads, 1, MAX_HEADS);
  if (status == NYB_OK) status = nyb_check_size("query_len", a->query_len, 1, INT32_MAX);
  if (status == NYB_OK) status = nyb_check_size("key_dim", a->key_dim, 1, MAX_HEAD_DIM);
  if (status == NYB_OK) status = nyb_check_size("value_dim", a->value_dim, 1, MAX_HEAD_DIM);
  if (status == NYB_OK)
    status = nyb_check_size("capacity_tokens", a->capacity_tokens, 0, INT32_MAX);
  if (status != NYB_OK) return status;
  if (a->query_heads % a->kv_heads != 0) {
    return nyb_fail(NYB_ERROR_HEADS,
                    "attention.query_heads is %lld and attention.kv_heads %lld; the first must be "
                    "a multiple of the second",
                    (long long)a->query_heads, (long long)a->kv_heads);
  }
  int64_t rows;
  if (__builtin_mul_overflow(a->batch * a->query_heads, a->query_len, &rows) ||
      rows > INT64_MAX / NYB_TILE_ROWS) {
    return nyb_fail(NYB_ERROR_SHAPE,
                    "attention.batch * query_heads * query_len is %lld * %lld * %lld; it must fit "
                    "64 bits",
                    (long long)a->batch, (long long)a->query_heads, (long long)a->query_len);
  }
  return NYB_OK;
}

static nyb_status check_choices(const nyb_attention *a) {
  nyb_status status = check_enum("mask", (int)a->mask, NYB_MASK_CAUSAL_TOP_LEFT + 1);
  if (status == NYB_OK) status = check_enum("path", (int)a->path, NYB_PATH_COMPAT + 1);
  if (status == NYB_OK) status = check_enum("rounding", (int)a->rounding, NYB_ROUNDING_MLX + 1);
  if (status == NYB_OK) status = nyb_check_dtype("attention.q.dtype", a->q.dtype);
  if (status == NYB_OK) status = nyb_check_dtype("attention.out.dtype", a->out.dtype);
  if (status != NYB_OK) return status;
  if (a->lse.data != NULL && a->lse.dtype != NYB_F32) {
    return nyb_fail(NYB_ERROR_DTYPE, "attention.lse.dtype is %d; it must be NYB_F32",
                    (int)a->lse.dtype);
  }
  if (!isfinite(a->scale)) {
    return nyb_fail(NYB_ERROR_NON_FINITE, "attention.scale is %s; it must be finite",
                    nyb_non_finite_name(a->scale));
  }
  if (a->scale == 0) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "attention.scale is 0; it must be set, usually to 1/sqrt(key_dim) = %g",
                    1 / sqrt((double)a->key_dim));
  }
  return NYB_OK;
}

static nyb_status check_window(const nyb_attention *a) {
  nyb_status status = nyb_check_size("window_tokens", a->window_tokens, 0, INT64_MAX);
  if (status == NYB_OK) {
    status = nyb_check_size("window_keep_tokens", a->window_keep_tokens, 0, INT64_MAX);
  }
  if (status != NYB_OK) return status;
  if (a->window_tokens == 0 && a->window_keep_tokens != 0) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "attention.window_keep_tokens is %lld and attention.window_tokens 0; without a "
                    "window it must be 0, as all tokens are kept",
                    (long long)a->window_keep_tokens);
  }
  return NYB_OK;
}

static nyb_status check_mask_array(const nyb_attention *a) {
  const nyb_mask_array *mask = &a->mask_array;
  if (mask->kind == 0 && mask->data == NULL) return NYB_OK;
  if (mask->kind != NYB_MASK_ARRAY_BOOL && mask->kind != NYB_MASK_ARRAY_ADD) {
    return nyb_fail(NYB_ERROR_ENUM,
                    "attention.mask_array.kind is %d; it must be NYB_MASK_ARRAY_BOOL or "
                    "NYB_MASK_ARRAY_ADD (0 where there is no mask)",
                    (int)mask->kind);
  }
  if (mask->kind == NYB_MASK_ARRAY_BOOL && mask->dtype != 0) {
    return nyb_fail(NYB_ERROR_DTYPE,
                    "attention.mask_array.dtype is %d; with NYB_MASK_ARRAY_BOOL it must be 0",
                    (int)mask->dtype);
  }
  if (mask->kind == NYB_MASK_ARRAY_ADD && mask->dtype != NYB_F32 && mask->dtype != a->q.dtype) {
    return nyb_fail(NYB_ERROR_DTYPE,
                    "attention.mask_array.dtype is %d; it must be NYB_F32 or that of q, %d",
                    (int)mask->dtype, (int)a->q.dtype);
  }
  return nyb_check_size("mask_array.tokens", mask->tokens, 0, INT32_MAX);
}

/* Slopes, sinks and additive masks are data: what is not finite in them makes its row so. */
static nyb_status check_softcap(const nyb_attention *a) {
  if (!isfinite(a->softcap)) {
    return nyb_fail(NYB_ERROR_NON_FINITE, "attention.softcap is %s; it must be finite",
                    nyb_non_finite_name(a->softcap));
  }
  /* Beyond, 1/softcap would be no number of full precision. */
  if (a->softcap != 0 && !(a->softcap >= 0x1p-126f && a->softcap <= 0x1p126f)) {
    return nyb_fail(NYB_ERROR_VALUE,
                    "attention.softcap is %g; it must be 2^-126 to 2^126, or 0 (none)",
                    (double)a->softcap);
  }
  if (a->reserved != 0) {
    return nyb_fail(NYB_ERROR_VALUE, "attention.reserved is %d; it must be 0", (int)a->reserved);
  }
  if (a->softcap == 0 || a->rounding != NYB_ROUNDING_MLX) return NYB_OK;
  const float rounded = nyb_round_to(a->q.dtype, a->softcap);
  if (rounded > 0 && isfinite(rounded)) return NYB_OK;
  return nyb_fail(NYB_ERROR_VALUE,
                  "attention.softcap is %g, which NYB_ROUNDING_MLX rounds to %g in q's dtype; it "
                  "must be finite and not 0 there",
                  (double)a->softcap, (double)rounded);
}

/* The mask has a column for each token, as lengths counts them. */
static nyb_status check_columns(const nyb_attention *a) {
  if (a->mask_array.kind == 0) return NYB_OK;
  for (int64_t b = 0; b < a->batch; b++) {
    if (a->lengths[b] <= a->mask_array.tokens) continue;
    return nyb_fail(NYB_ERROR_LENGTH,
                    "attention.mask_array.tokens is %lld; it must be at least the longest length, "
                    "and attention.lengths[%lld] is %d",
                    (long long)a->mask_array.tokens, (long long)b, (int)a->lengths[b]);
  }
  return NYB_OK;
}

/* ---- Checks: memory -------------------------------------------------------------------------- */

/* Everything that the call reads or writes, as views. */
/* q; lengths, starts, page table, ring offsets and last_begins; K and V of each part; the mask,
 * sinks and slopes. */
enum { MAX_INPUTS = 1 + 5 + 2 * NYB_STORED_MAX_VIEWS * NYB_PART_COUNT + 3 };
typedef struct call_views {
  nyb_view inputs[MAX_INPUTS];
  int input_count;
  nyb_view outputs[2];
  int output_count;
} call_views;

/* [rows] of `count` int32, `stride` apart. */
static void add_int32(call_views *v, const char *owner, const char *member, const int32_t *data,
                      int64_t rows, int64_t count, int64_t stride) {
  v->inputs[v->input_count++] = (nyb_view){.owner = owner,
                                           .member = member,
                                           .data = data,
                                           .element_bytes = sizeof *data,
                                           .row_elements = count,
                                           .rank = 1,
                                           .shape = {rows},
                                           .stride = {stride}};
}

static void add_sequence_numbers(call_views *v, const nyb_attention *a) {
  add_int32(v, "attention", "lengths", a->lengths, 1, a->batch, 0);
  if (a->starts != NULL) add_int32(v, "attention", "starts", a->starts, 1, a->batch, 0);
  if (nyb_is_paged(a)) {
    add_int32(v, "attention.pages", "table", a->pages.table, a->batch, nyb_pages_per_sequence(a),
              a->pages.table_stride);
  }
  if (a->ring.offsets != NULL || a->ring.keep_tokens != 0) {
    add_int32(v, "attention.ring", "offsets", a->ring.offsets, 1, a->batch, 0);
  }
  if (a->last.tokens > 0) {
    add_int32(v, "attention", "last_begins", a->last_begins, 1, a->batch, 0);
  }
}

/* K and V of one part. */
static void add_stored(call_views *v, const nyb_attention_call *call, nyb_part_id part) {
  static const char *const keys[] = {"attention.k", "attention.first.k", "attention.last.k"};
  static const char *const values[] = {"attention.v", "attention.first.v", "attention.last.v"};
  const nyb_attention *a = call->attention;
  const bool paged = nyb_is_paged(a);
  const int64_t shape[3] = {paged ? a->pages.page_count : a->batch, a->kv_heads,
                            paged ? a->pages.page_tokens : nyb_part_tokens(a, part)};
  v->input_count += nyb_stored_views(&call->keys[part], nyb_part_keys(a, part), keys[part], shape,
                                     v->inputs + v->input_count);
  v->input_count += nyb_stored_views(&call->values[part], nyb_part_values(a, part), values[part],
                                     shape, v->inputs + v->input_count);
}

static nyb_view view_of_heads(const char *member, const float *data, int64_t heads) {
  return (nyb_view){.owner = "attention",
                    .member = member,
                    .data = data,
                    .element_bytes = sizeof *data,
                    .row_elements = heads};
}

/* What is added to scores; where it is absent there is no view. */
static void add_bias_views(const nyb_attention *a, const int64_t query_rows[3], call_views *v) {
  const nyb_mask_array *mask = &a->mask_array;
  if (mask->kind != 0) {
    const size_t bytes = mask->kind == NYB_MASK_ARRAY_BOOL ? 1 : nyb_dtype_bytes(mask->dtype);
    v->inputs[v->input_count++] = nyb_rows_view("attention.mask_array", "data", mask->data, bytes,
                                                mask->tokens, query_rows, mask->stride);
  }
  if (a->sinks != NULL) {
    v->inputs[v->input_count++] = view_of_heads("sinks", a->sinks, a->query_heads);
  }
  if (a->alibi_slopes != NULL) {
    v->inputs[v->input_count++] = view_of_heads("alibi_slopes", a->alibi_slopes, a->query_heads);
  }
}

static call_views views_of(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  const int64_t query_rows[3] = {a->batch, a->query_heads, a->query_len};
  call_views v = {.input_count = 1, .output_count = 1};
  v.inputs[0] = nyb_rows_view("attention.q", "data", a->q.data, nyb_dtype_bytes(a->q.dtype),
                              a->key_dim, query_rows, a->q.stride);
  add_sequence_numbers(&v, a);
  for (int part = 0; part < NYB_PART_COUNT; part++) {
    if (nyb_has_part(a, (nyb_part_id)part)) add_stored(&v, call, (nyb_part_id)part);
  }
  add_bias_views(a, query_rows, &v);
  v.outputs[0] = nyb_rows_view("attention.out", "data", a->out.data, nyb_dtype_bytes(a->out.dtype),
                               a->value_dim, query_rows, a->out.stride);
  if (a->lse.data != NULL) {
    v.outputs[v.output_count++] = nyb_rows_view("attention.lse", "data", a->lse.data, sizeof(float),
                                                1, query_rows, a->lse.stride);
  }
  return v;
}

/* planning: pointers that are NULL may still be set later. */
static nyb_status check_views(const call_views *v, const nyb_extent *workspace, bool planning) {
  nyb_extent inputs[MAX_INPUTS], outputs[2];
  int input_count = 0, output_count = 0;
  for (int i = 0; i < v->input_count; i++) {
    if (planning && v->inputs[i].data == NULL) continue;
    const nyb_status status = nyb_extent_of(&v->inputs[i], &inputs[input_count++]);
    if (status != NYB_OK) return status;
  }
  for (int i = 0; i < v->output_count; i++) {
    if (planning && v->outputs[i].data == NULL) continue;
    const nyb_status status = nyb_extent_of_output(&v->outputs[i], &outputs[output_count++]);
    if (status != NYB_OK) return status;
  }
  for (int o = 0; o < output_count; o++) {
    for (int i = 0; i < input_count; i++) {
      const nyb_status status = nyb_check_apart(&outputs[o], &inputs[i]);
      if (status != NYB_OK) return status;
    }
  }
  if (output_count == 2) {
    const nyb_status status = nyb_check_apart(&outputs[1], &outputs[0]);
    if (status != NYB_OK) return status;
  }
  for (int i = 0; workspace != NULL && i < input_count + output_count; i++) {
    const nyb_status status =
        nyb_check_apart(workspace, i < input_count ? &inputs[i] : &outputs[i - input_count]);
    if (status != NYB_OK) return status;
  }
  return NYB_OK;
}

static nyb_status check_formats(nyb_attention_call *call) {
  static const char *const keys[] = {"attention.k.format", "attention.first.k.format",
                                     "attention.last.k.format"};
  static const char *const values[] = {"attention.v.format", "attention.first.v.format",
                                       "attention.last.v.format"};
  const nyb_attention *a = call->attention;
  for (int i = 0; i < NYB_PART_COUNT; i++) {
    const nyb_part_id part = (nyb_part_id)i;
    if (!nyb_has_part(a, part)) continue;
    nyb_status status = nyb_format_check(&nyb_part_keys(a, part)->format, keys[i], a->key_dim,
                                         "attention.key_dim", &call->keys[i]);
    if (status == NYB_OK) {
      status = nyb_format_check(&nyb_part_values(a, part)->format, values[i], a->value_dim,
                                "attention.value_dim", &call->values[i]);
    }
    if (status != NYB_OK) return status;
  }
  call->key_format = call->keys[NYB_PART_MIDDLE].id;
  call->value_format = call->values[NYB_PART_MIDDLE].id;
  return NYB_OK;
}

/* All checks that need no workspace; fills *call and *views. */
static nyb_status check(nyb_context *context, const nyb_attention *a, nyb_attention_call *call,
                        call_views *views) {
  if (context == NULL || a == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; it must be set",
                    context == NULL ? "context" : "attention");
  }
  nyb_status status = nyb_check_struct("attention", a, a->struct_size, sizeof *a);
  if (status == NYB_OK) status = check_sizes(a);
  if (status == NYB_OK) status = check_choices(a);
  if (status == NYB_OK) status = check_window(a);
  if (status == NYB_OK) status = check_mask_array(a);
  if (status == NYB_OK) status = check_softcap(a);
  if (status == NYB_OK) status = nyb_check_places(a);
  if (status != NYB_OK) return status;
  *call = (nyb_attention_call){
      .context = context, .attention = a, .heads_per_kv = a->query_heads / a->kv_heads};
  status = check_formats(call);
  if (status == NYB_OK) *views = views_of(call);
  return status;
}

/* ---- Choosing the path ---------------------------------------------------------------------- */

static nyb_path asked_path(const nyb_context *context, const nyb_attention *a,
                           const char **reason) {
  if (a->path != NYB_PATH_AUTO) {
    *reason = "attention.path asks for it";
    return a->path;
  }
  *reason = "NYBBLE_PATH asked for it when the context was made";
  return context->attention_path;
}

static void plan_on_cpu(const nyb_attention_call *call, nyb_path asked, const char *reason,
                        nyb_plan *plan) {
  if (asked == NYB_PATH_AUTO) {
    reason = "every format, head size and ratio is supported on the fused path of the CPU";
  }
  snprintf(plan->reason, sizeof plan->reason, "%s", reason);
  plan->key_kernel = plan->value_kernel = "";
  if (asked == NYB_PATH_COMPAT) {
    plan->path = NYB_PATH_COMPAT;
    plan->workspace_bytes = (size_t)nyb_attention_compat_workspace(call);
    return;
  }
  const nyb_dispatch *dispatch = &call->context->dispatch;
  plan->path = NYB_PATH_FUSED;
  plan->workspace_bytes = (size_t)nyb_attention_fused_workspace(call);
  plan->key_kernel =
      nyb_kernel_entries[dispatch->entry[NYB_OPERATION_ATTENTION_SCORES][call->key_format]].name;
  plan->value_kernel =
      nyb_kernel_entries[dispatch->entry[NYB_OPERATION_ATTENTION_VALUES][call->value_format]].name;
}

/* *plan is written only on success. */
static nyb_status make_plan(const nyb_attention_call *call, nyb_plan *plan) {
  const char *reason;
  const nyb_path asked = asked_path(call->context, call->attention, &reason);
  if (call->context->backend == NYB_BACKEND_CPU) {
    plan_on_cpu(call, asked, reason, plan);
    return NYB_OK;
  }
  nyb_plan made = *plan;
  const nyb_status status = nyb_cuda_attention_plan(call, asked, &made);
  if (status == NYB_OK) *plan = made;
  return status;
}

nyb_status nyb_attention_plan(nyb_context *context, const nyb_attention *attention,
                              nyb_plan *plan) {
  nyb_attention_call call;
  call_views views;
  if (plan == NULL) return nyb_fail(NYB_ERROR_NULL, "plan is NULL; it must point to an nyb_plan");
  nyb_status status = nyb_check_struct("plan", NULL, plan->struct_size, sizeof *plan);
  if (status == NYB_OK) status = check(context, attention, &call, &views);
  if (status == NYB_OK) status = check_views(&views, NULL, true);
  return status == NYB_OK ? make_plan(&call, plan) : status;
}

/* ---- Run ------------------------------------------------------------------------------------ */

static nyb_status check_workspace(void *workspace, size_t bytes, int64_t needed) {
  if (needed > 0 && workspace == NULL) {
    return nyb_fail(NYB_ERROR_WORKSPACE, "workspace is NULL; it must have %lld bytes",
                    (long long)needed);
  }
  if ((int64_t)bytes < needed) {
    return nyb_fail(NYB_ERROR_WORKSPACE, "workspace_bytes is %zu; it must be at least %lld", bytes,
                    (long long)needed);
  }
  if ((uintptr_t)workspace % NYB_WORKSPACE_ALIGNMENT != 0) {
    return nyb_fail(NYB_ERROR_WORKSPACE, "workspace is at %p; it must be a multiple of %d",
                    workspace, NYB_WORKSPACE_ALIGNMENT);
  }
  return NYB_OK;
}

nyb_status nyb_attention_run(nyb_context *context, const nyb_attention *attention, void *workspace,
                             size_t workspace_bytes, nyb_stream stream) {
  nyb_attention_call call;
  call_views views;
  nyb_status status = check(context, attention, &call, &views);
  if (status != NYB_OK) return status;
  const bool on_cuda = nyb_on_cuda(context);
  nyb_plan plan = NYB_PLAN_INIT;
  status = nyb_check_stream(context, stream);
  if (status == NYB_OK) status = make_plan(&call, &plan);
  if (status != NYB_OK) return status;
  const int64_t needed = (int64_t)plan.workspace_bytes;
  status = check_workspace(workspace, workspace_bytes, needed);
  if (status != NYB_OK) return status;
  const nyb_view workspace_view = {.owner = "workspace",
                                   .member = "",
                                   .data = workspace,
                                   .element_bytes = 1,
                                   .row_elements = needed};
  nyb_extent workspace_extent;
  status = nyb_extent_of(&workspace_view, &workspace_extent);
  if (status == NYB_OK) status = check_views(&views, &workspace_extent, false);
  if (status == NYB_OK && !on_cuda) status = nyb_check_place_values(attention);
  if (status == NYB_OK && !on_cuda) status = check_columns(attention);
  if (status != NYB_OK) return status;

  if (on_cuda) {
    status = nyb_cuda_attention_run(&call, &plan, workspace, stream);
    if (status != NYB_OK) return status;
  } else if (plan.path == NYB_PATH_COMPAT) {
    nyb_attention_compat_run(&call, workspace);
  } else {
    nyb_attention_fused_run(&call, workspace);
  }
  nyb_count(context, plan.path == NYB_PATH_COMPAT ? NYB_COUNTER_ATTENTION_COMPAT
                                                  : NYB_COUNTER_ATTENTION_FUSED);
  return NYB_OK;
}

/* ---- Rows in and out, for both paths -------------------------------------------------------- */

static void widen(const void *data, nyb_dtype dtype, int64_t count, float *to) {
  switch (dtype) {
    case NYB_F32: memcpy(to, data, (size_t)count * sizeof(float)); break;
    case NYB_F16:
      for (int64_t i = 0; i < count; i++) to[i] = nyb_f32_from_f16(((const uint16_t *)data)[i]);
      break;
    case NYB_BF16:
      for (int64_t i = 0; i < count; i++) to[i] = nyb_f32_from_bf16(((const uint16_t *)data)[i]);
      break;
  }
}

static void narrow(const float *from, int64_t count, void *data, nyb_dtype dtype) {
  switch (dtype) {
    case NYB_F32: memcpy(data, from, (size_t)count * sizeof(float)); break;
    case NYB_F16:
      for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = nyb_f16_from_f32(from[i]);
      break;
    case NYB_BF16:
      for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = nyb_bf16_from_f32(from[i]);
      break;
  }
}

void nyb_load_query(const nyb_attention *a, int64_t batch, int64_t head, int64_t row, float *q) {
  const nyb_dtype dtype = a->q.dtype;
  const int64_t offset = nyb_row_offset(a->q.stride, batch, head, row);
  widen((const char *)a->q.data + offset * (int64_t)nyb_dtype_bytes(dtype), dtype, a->key_dim, q);
  if (a->scale == 1) return;
  if (a->rounding == NYB_ROUNDING_EXACT) {
    for (int64_t d = 0; d < a->key_dim; d++) q[d] *= a->scale;
    return;
  }
  const float scale = nyb_round_to(dtype, a->scale);
  for (int64_t d = 0; d < a->key_dim; d++) q[d] = nyb_round_to(dtype, q[d] * scale);
}

void nyb_store_row(const nyb_attention *a, int64_t batch, int64_t head, int64_t row,
                   const float *values, float lse) {
  const nyb_dtype dtype = a->out.dtype;
  const int64_t offset = nyb_row_offset(a->out.stride, batch, head, row);
  char *out = (char *)a->out.data + offset * (int64_t)nyb_dtype_bytes(dtype);
  narrow(values, a->value_dim, out, dtype);
  if (a->lse.data == NULL) return;
  float *lses = a->lse.data;
  lses[nyb_row_offset(a->lse.stride, batch, head, row)] = lse;
}
