/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on CUDA: which kernel a call gets, and its run. What each kernel is able to do stands
 * in its own file, attention_<kernel>.c. */
#include "attention.h"

#include <float.h>
#include <stdio.h>

#include "../numeric.h"
#include "device/attention_general_sizes.h"

/* The fused path's kernels, the preferred ones first. The last takes whatever its dims allow. */
static const nyb_cuda_attention_kernel *const fused_kernels[] = {
    &nyb_cuda_attention_decode,
    &nyb_cuda_attention_prefill,
    &nyb_cuda_attention_general,
};
enum { FUSED_KERNELS = sizeof fused_kernels / sizeof fused_kernels[0] };

/* ---- Features ------------------------------------------------------------------------------- */

bool nyb_cuda_attention_is_placed(const nyb_attention *a) {
  return nyb_is_paged(a) || nyb_has_parts(a) || a->ring.offsets != NULL || a->ring.keep_tokens != 0;
}

bool nyb_cuda_attention_is_featured(const nyb_attention *a) {
  return a->mask == NYB_MASK_CAUSAL_TOP_LEFT || a->window_tokens != 0 || a->starts != NULL ||
         a->mask_array.kind != 0 || a->sinks != NULL || a->alibi_slopes != NULL || a->softcap != 0;
}

const char *nyb_cuda_attention_feature(const nyb_attention *a) {
  const struct {
    const char *field;
    bool is_set;
  } fields[] = {
      {"mask NYB_MASK_CAUSAL_TOP_LEFT", a->mask == NYB_MASK_CAUSAL_TOP_LEFT},
      {"window_tokens", a->window_tokens != 0},
      {"starts", a->starts != NULL},
      {"mask_array", a->mask_array.kind != 0},
      {"sinks", a->sinks != NULL},
      {"alibi_slopes", a->alibi_slopes != NULL},
      {"softcap", a->softcap != 0},
      {"pages", nyb_is_paged(a)},
      {"first", a->first.tokens > 0},
      {"last", a->last.tokens > 0},
      {"ring", nyb_cuda_attention_is_placed(a)},
  };
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    if (fields[i].is_set) return fields[i].field;
  }
  return NULL;
}

/* ---- Arguments ------------------------------------------------------------------------------ */

void nyb_cuda_byte_strides(const int64_t elements[3], int64_t element_bytes, long long bytes[3]) {
  for (int axis = 0; axis < 3; axis++) bytes[axis] = elements[axis] * element_bytes;
}

static int64_t code_bytes_of(const nyb_format *format) {
  return format->scheme == NYB_AFFINE ? 4 : (int64_t)nyb_dtype_bytes(format->dtype);
}

static nyb_attention_rows rows_of(const nyb_stored *stored) {
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  nyb_attention_rows rows = {.codes = stored->codes, .dtype = (int)stored->format.dtype};
  nyb_cuda_byte_strides(stored->codes_stride, code_bytes_of(&stored->format), rows.codes_stride);
  if (stored->format.scheme == NYB_PLAIN) return rows;
  rows.scales = stored->scales;
  rows.biases = stored->biases;
  nyb_cuda_byte_strides(stored->scales_stride, scale_bytes, rows.scales_stride);
  nyb_cuda_byte_strides(stored->biases_stride, scale_bytes, rows.biases_stride);
  rows.bits = stored->format.bits;
  rows.group_size = stored->format.group_size;
  return rows;
}

static float lowest_of(nyb_dtype dtype) {
  return dtype == NYB_F16 ? -65504 : dtype == NYB_BF16 ? -0x1.fep127f : -FLT_MAX;
}

int64_t nyb_cuda_attention_room(const nyb_attention *a) {
  int64_t room = nyb_room_tokens(a);
  if (a->mask_array.kind != 0 && a->mask_array.tokens < room) room = a->mask_array.tokens;
  return nyb_is_paged(a) && a->pages.page_count == 0 ? 0 : room;
}

static void set_sight(const nyb_attention *a, nyb_dtype round_to,
                      nyb_attention_arguments *arguments) {
  const nyb_mask_array *mask = &a->mask_array;
  const int64_t column_bytes = nyb_mask_column_bytes(mask);
  const bool adds_f32 = mask->kind == NYB_MASK_ARRAY_ADD && mask->dtype == NYB_F32;
  const int64_t most = INT32_MAX;
  arguments->mask = (int)a->mask;
  arguments->window_tokens = a->window_tokens < most ? a->window_tokens : most;
  arguments->window_keep_tokens = a->window_keep_tokens < most ? a->window_keep_tokens : most;
  arguments->starts = a->starts;
  arguments->sinks = a->sinks;
  arguments->slopes = a->alibi_slopes;
  arguments->softcap = nyb_round_to(round_to, a->softcap);
  arguments->softcap_reciprocal = a->softcap == 0 ? 0 : 1 / arguments->softcap;
  arguments->mask_kind = (int)mask->kind;
  arguments->mask_dtype = (int)mask->dtype;
  arguments->mask_array = mask->data;
  arguments->mask_column_bytes = column_bytes;
  if (mask->kind != 0) nyb_cuda_byte_strides(mask->stride, column_bytes, arguments->mask_stride);
  arguments->round_sums_to = (int)(adds_f32 ? NYB_F32 : round_to);
  arguments->hides_by_number = a->rounding == NYB_ROUNDING_MLX && mask->kind == NYB_MASK_ARRAY_BOOL;
  arguments->lowest_score = lowest_of(round_to);
}

static void set_places(const nyb_attention *a, nyb_attention_arguments *arguments) {
  if (!nyb_cuda_attention_is_placed(a)) return;
  arguments->places = nyb_has_parts(a)  ? NYB_PLACES_PARTS
                      : nyb_is_paged(a) ? NYB_PLACES_PAGES
                                        : NYB_PLACES_RING;
  arguments->page_table = a->pages.table;
  arguments->page_table_stride = a->pages.table_stride;
  arguments->page_tokens = (int)a->pages.page_tokens;
  arguments->page_count = (int)a->pages.page_count;
  arguments->ring_offsets = a->ring.offsets;
  arguments->ring_keep_tokens = (int)a->ring.keep_tokens;
  arguments->first_tokens = (int)a->first.tokens;
  arguments->last_tokens = (int)a->last.tokens;
  arguments->last_begins = a->last_begins;
  if (a->first.tokens > 0) {
    arguments->first_k = rows_of(&a->first.k);
    arguments->first_v = rows_of(&a->first.v);
  }
  if (a->last.tokens > 0) {
    arguments->last_k = rows_of(&a->last.k);
    arguments->last_v = rows_of(&a->last.v);
  }
}

nyb_attention_arguments nyb_cuda_attention_arguments(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  const nyb_dtype round_to = a->rounding == NYB_ROUNDING_MLX ? a->q.dtype : NYB_F32;
  nyb_attention_arguments arguments = {
      .k = rows_of(&a->k),
      .v = rows_of(&a->v),
      .q = a->q.data,
      .out = a->out.data,
      .lse = a->lse.data,
      .lengths = a->lengths,
      .capacity_tokens = a->capacity_tokens,
      .room_tokens = nyb_cuda_attention_room(a),
      .batch = a->batch,
      .kv_heads = a->kv_heads,
      .heads_per_kv = call->heads_per_kv,
      .query_len = a->query_len,
      .key_dim = a->key_dim,
      .value_dim = a->value_dim,
      .causal = a->mask == NYB_MASK_CAUSAL,
      .query_dtype = (int)a->q.dtype,
      .out_dtype = (int)a->out.dtype,
      .round_to = (int)round_to,
      .scale = nyb_round_to(round_to, a->scale),
  };
  nyb_cuda_byte_strides(a->q.stride, (int64_t)nyb_dtype_bytes(a->q.dtype), arguments.q_stride);
  nyb_cuda_byte_strides(a->out.stride, (int64_t)nyb_dtype_bytes(a->out.dtype),
                        arguments.out_stride);
  nyb_cuda_byte_strides(a->lse.stride, (int64_t)sizeof(float), arguments.lse_stride);
  set_sight(a, round_to, &arguments);
  set_places(a, &arguments);
  return arguments;
}

/* ---- Alignment ------------------------------------------------------------------------------ */

static bool array_aligned(const nyb_attention *a, const void *data, const int64_t stride[3],
                          int64_t element_bytes, int64_t bytes) {
  const bool paged = nyb_is_paged(a);
  const int64_t shape[3] = {paged ? a->pages.page_count : a->batch, a->kv_heads,
                            paged ? a->pages.page_tokens : a->capacity_tokens};
  bool aligned = (int64_t)((uintptr_t)data % (uintptr_t)bytes) == 0;
  for (int axis = 0; axis < 3; axis++) {
    aligned = aligned && (shape[axis] <= 1 || stride[axis] * element_bytes % bytes == 0);
  }
  return aligned;
}

bool nyb_cuda_codes_aligned(const nyb_attention *attention, const nyb_stored *stored,
                            int64_t bytes) {
  return array_aligned(attention, stored->codes, stored->codes_stride,
                       code_bytes_of(&stored->format), bytes);
}

bool nyb_cuda_stored_aligned(const nyb_attention *attention, const nyb_stored *stored,
                             int64_t bytes) {
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  return nyb_cuda_codes_aligned(attention, stored, bytes) &&
         (stored->format.scheme == NYB_PLAIN ||
          (array_aligned(attention, stored->scales, stored->scales_stride, scale_bytes, bytes) &&
           array_aligned(attention, stored->biases, stored->biases_stride, scale_bytes, bytes)));
}

/* ---- Choosing ------------------------------------------------------------------------------- */

static bool supports(const nyb_cuda_attention_kernel *kernel, const nyb_attention_call *call,
                     const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  const bool takes =
      nyb_cuda_attention_feature(a) == NULL || (kernel->takes != NULL && kernel->takes(a));
  return takes && kernel->supports(call, properties);
}

/* The fused kernel for a call, or NULL. */
static const nyb_cuda_attention_kernel *choose_fused(const nyb_attention_call *call,
                                                     const nyb_cuda_properties *properties) {
  for (int i = 0; i < FUSED_KERNELS; i++) {
    const nyb_cuda_attention_kernel *kernel = fused_kernels[i];
    if (supports(kernel, call, properties) &&
        (kernel->suits == NULL || kernel->suits(call, properties))) {
      return kernel;
    }
  }
  return NULL;
}

/* *reason is why this path. */
static nyb_status choose(const nyb_attention_call *call, nyb_path asked,
                         const nyb_cuda_properties *properties,
                         const nyb_cuda_attention_kernel **kernel, const char **reason) {
  const nyb_attention *a = call->attention;
  *kernel = asked == NYB_PATH_COMPAT ? NULL : choose_fused(call, properties);
  if (*kernel != NULL) {
    *reason = (*kernel)->reason;
    return NYB_OK;
  }
  if (asked == NYB_PATH_FUSED) {
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "attention.key_dim is %lld and attention.value_dim %lld; the fused path of "
                    "CUDA takes dims up to %d",
                    (long long)a->key_dim, (long long)a->value_dim, NYB_GENERAL_MAX_DIM);
  }
  *kernel = &nyb_cuda_attention_compat;
  *reason = asked == NYB_PATH_COMPAT ? nyb_cuda_attention_compat.reason
                                     : "the fused path of CUDA takes dims up to 1024 only";
  return NYB_OK;
}

/* Pointers and strides may send a call to another kernel than at its plan, but not to other
 * needs. */
static int64_t workspace_bytes_of(const nyb_attention_call *call,
                                  const nyb_cuda_attention_kernel *chosen,
                                  const nyb_cuda_properties *properties) {
  int64_t most = chosen->workspace_bytes(call, properties);
  for (int i = 0; chosen != &nyb_cuda_attention_compat && i < FUSED_KERNELS; i++) {
    if (!supports(fused_kernels[i], call, properties)) continue;
    const int64_t bytes = fused_kernels[i]->workspace_bytes(call, properties);
    most = bytes > most ? bytes : most;
  }
  return (most + NYB_WORKSPACE_ALIGNMENT - 1) / NYB_WORKSPACE_ALIGNMENT * NYB_WORKSPACE_ALIGNMENT;
}

/* Compiles and loads what is not there yet. Returns how many kernels there are, in *count. */
static nyb_status load(nyb_cuda_scope *scope, const nyb_attention_call *call,
                       const nyb_cuda_attention_kernel *chosen,
                       const nyb_cuda_kernel *kernels[NYB_CUDA_ATTENTION_MAX_PROGRAMS]) {
  nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS] = {0};
  const int count = chosen->programs(call, scope->properties, programs);
  nyb_status status = NYB_OK;
  for (int i = 0; i < count && status == NYB_OK; i++) {
    status = nyb_cuda_kernel_get(scope, &programs[i].spec, programs[i].threads,
                                 programs[i].dynamic_shared_bytes, &kernels[i]);
  }
  return status;
}

/* ---- Plan and run --------------------------------------------------------------------------- */

static const char *kernel_name(const nyb_context *context, nyb_operation operation,
                               nyb_format_id format) {
  return nyb_kernel_entries[context->dispatch.entry[operation][format]].name;
}

nyb_status nyb_cuda_attention_plan(const nyb_attention_call *call, nyb_path asked, nyb_plan *plan) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(call->context, &scope);
  if (status != NYB_OK) return status;
  const nyb_cuda_attention_kernel *kernel = NULL;
  const nyb_cuda_kernel *kernels[NYB_CUDA_ATTENTION_MAX_PROGRAMS];
  const char *reason = "";
  status = choose(call, asked, scope.properties, &kernel, &reason);
  if (status == NYB_OK) status = load(&scope, call, kernel, kernels);
  if (status == NYB_OK) {
    const bool compat = kernel == &nyb_cuda_attention_compat;
    plan->path = compat ? NYB_PATH_COMPAT : NYB_PATH_FUSED;
    plan->workspace_bytes = (size_t)workspace_bytes_of(call, kernel, scope.properties);
    plan->key_kernel =
        compat ? "" : kernel_name(call->context, kernel->operation, call->key_format);
    plan->value_kernel =
        compat ? "" : kernel_name(call->context, kernel->operation, call->value_format);
    const char *feature =
        kernel == &nyb_cuda_attention_general ? nyb_cuda_attention_feature(call->attention) : NULL;
    if (feature == NULL) {
      snprintf(plan->reason, sizeof plan->reason, "%s", reason);
    } else {
      snprintf(plan->reason, sizeof plan->reason,
               "attention.%s is set, and of CUDA's fused kernels the general one takes it with "
               "such rows, formats and strides",
               feature);
    }
  }
  nyb_cuda_leave(&scope);
  return status;
}

static nyb_status check_stored(const nyb_cuda_scope *scope, const char *owner,
                               const nyb_stored *stored) {
  nyb_status status = nyb_cuda_check_pointer(scope, owner, "codes", stored->codes);
  if (status != NYB_OK || stored->format.scheme == NYB_PLAIN) return status;
  status = nyb_cuda_check_pointer(scope, owner, "scales", stored->scales);
  if (status != NYB_OK) return status;
  return nyb_cuda_check_pointer(scope, owner, "biases", stored->biases);
}

static nyb_status check_parts(const nyb_cuda_scope *scope, const nyb_attention *a) {
  nyb_status status = check_stored(scope, "attention.k", &a->k);
  if (status == NYB_OK) status = check_stored(scope, "attention.v", &a->v);
  if (status == NYB_OK && a->first.tokens > 0) {
    status = check_stored(scope, "attention.first.k", &a->first.k);
    if (status == NYB_OK) status = check_stored(scope, "attention.first.v", &a->first.v);
  }
  if (status == NYB_OK && a->last.tokens > 0) {
    status = check_stored(scope, "attention.last.k", &a->last.k);
    if (status == NYB_OK) status = check_stored(scope, "attention.last.v", &a->last.v);
  }
  return status;
}

/* What is not set is NULL. */
static nyb_status check_pointers(const nyb_cuda_scope *scope, const nyb_attention *a,
                                 const void *workspace) {
  const struct {
    const char *owner, *member;
    const void *address;
  } pointers[] = {
      {"attention.q", "data", a->q.data},
      {"attention", "lengths", a->lengths},
      {"attention", "starts", a->starts},
      {"attention.mask_array", "data", a->mask_array.data},
      {"attention", "sinks", a->sinks},
      {"attention", "alibi_slopes", a->alibi_slopes},
      {"attention.pages", "table", a->pages.table},
      {"attention.ring", "offsets", a->ring.offsets},
      {"attention", "last_begins", a->last.tokens > 0 ? a->last_begins : NULL},
      {"attention.out", "data", a->out.data},
      {"attention.lse", "data", a->lse.data},
      {"workspace", "", workspace},
  };
  nyb_status status = check_parts(scope, a);
  for (size_t i = 0; i < sizeof pointers / sizeof pointers[0] && status == NYB_OK; i++) {
    status =
        nyb_cuda_check_pointer(scope, pointers[i].owner, pointers[i].member, pointers[i].address);
  }
  return status;
}

nyb_status nyb_cuda_attention_run(const nyb_attention_call *call, const nyb_plan *plan,
                                  void *workspace, nyb_stream stream) {
  nyb_cuda_scope scope;
  nyb_status status = nyb_cuda_enter(call->context, &scope);
  if (status != NYB_OK) return status;
  const nyb_cuda_attention_kernel *kernel = NULL;
  const nyb_cuda_kernel *kernels[NYB_CUDA_ATTENTION_MAX_PROGRAMS];
  const char *reason;
  status = check_pointers(&scope, call->attention, workspace);
  if (status == NYB_OK) status = choose(call, plan->path, scope.properties, &kernel, &reason);
  if (status == NYB_OK) status = load(&scope, call, kernel, kernels);
  if (status == NYB_OK) status = kernel->launch(&scope, call, kernels, workspace, stream);
  if (status == NYB_OK && kernel != &nyb_cuda_attention_compat) {
    nyb_count_kernel(call->context, kernel->operation, call->key_format);
    nyb_count_kernel(call->context, kernel->operation, call->value_format);
  }
  nyb_cuda_leave(&scope);
  return status;
}

/* ---- The shipped matrix --------------------------------------------------------------------- */

typedef struct matrix_shape {
  int64_t query_heads, kv_heads, query_len, key_dim, value_dim;
} matrix_shape;

/* The first shape comes in every format, and every shape in the first format; kernels that are not
 * tuned come in no other pair. */
static const matrix_shape matrix_shapes[] = {
    {32, 8, 1, 128, 128},    {32, 32, 1, 128, 128}, {28, 4, 1, 128, 128},  {64, 8, 4, 128, 128},
    {32, 8, 1, 64, 64},      {71, 1, 1, 64, 64},    {32, 8, 64, 64, 64},   {32, 8, 1, 80, 80},
    {32, 32, 1, 96, 96},     {32, 8, 1, 112, 112},  {16, 8, 1, 192, 192},  {16, 8, 1, 256, 256},
    {16, 1, 1, 512, 512},    {128, 1, 1, 576, 512}, {4, 1, 1, 1024, 1024}, {32, 8, 2048, 128, 128},
    {16, 8, 2048, 256, 256},
};

/* Of keys and of values. */
static const nyb_format matrix_formats[][2] = {
#define NYB_BOTH(...)              \
  {                                \
    {__VA_ARGS__}, { __VA_ARGS__ } \
  }
    NYB_BOTH(NYB_AFFINE, 4, 64, NYB_BF16),
    NYB_BOTH(NYB_AFFINE, 2, 32, NYB_BF16),
    NYB_BOTH(NYB_AFFINE, 3, 64, NYB_F16),
    NYB_BOTH(NYB_AFFINE, 4, 32, NYB_F16),
    NYB_BOTH(NYB_AFFINE, 4, 128, NYB_F32),
    NYB_BOTH(NYB_AFFINE, 5, 64, NYB_BF16),
    NYB_BOTH(NYB_AFFINE, 6, 128, NYB_BF16),
    NYB_BOTH(NYB_AFFINE, 8, 64, NYB_BF16),
    NYB_BOTH(NYB_AFFINE, 8, 32, NYB_F16),
    NYB_BOTH(NYB_PLAIN, 0, 0, NYB_F32),
    NYB_BOTH(NYB_PLAIN, 0, 0, NYB_F16),
    NYB_BOTH(NYB_PLAIN, 0, 0, NYB_BF16),
#undef NYB_BOTH
    {{NYB_AFFINE, 8, 64, NYB_BF16}, {NYB_AFFINE, 4, 64, NYB_BF16}}, /* as people mix them */
};

enum {
  MATRIX_SHAPES = sizeof matrix_shapes / sizeof matrix_shapes[0],
  MATRIX_FORMATS = sizeof matrix_formats / sizeof matrix_formats[0]
};

/* Where the shape has no row of the format, since no group divides it, plain rows stand in. */
static nyb_format matrix_format(int index, int side, int64_t dim) {
  const nyb_format format = matrix_formats[index][side];
  if (format.scheme == NYB_PLAIN || dim % format.group_size == 0) return format;
  if (index == 0 && dim % 32 == 0) return (nyb_format){NYB_AFFINE, format.bits, 32, format.dtype};
  return (nyb_format){.scheme = NYB_PLAIN, .dtype = NYB_BF16};
}

/* What the tuned kernels have been tuned for, where no register may be spilled: heads of 128 in
 * groups of 64 on Hopper. Other specialisations of them may spill a few. */
static bool is_tuned_for(const nyb_attention_call *call, const nyb_cuda_properties *properties) {
  const nyb_attention *a = call->attention;
  return properties->compute_capability == 90 && a->key_dim == 128 && a->value_dim == 128 &&
         a->k.format.group_size == 64 && a->v.format.group_size == 64 &&
         call->heads_per_kv * a->query_len <= 4;
}

/* What a call launches. Its pointers are NULL and its strides 0: aligned. */
static void visit_call(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                       nyb_path path, bool untuned_too, nyb_cuda_visit visit, void *data) {
  const nyb_cuda_attention_kernel *kernel = NULL;
  const char *reason;
  if (choose(call, path, properties, &kernel, &reason) != NYB_OK) return;
  if (!kernel->tuned && !untuned_too) return;
  nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS] = {0};
  const int count = kernel->programs(call, properties, programs);
  const bool tuned = kernel->tuned && is_tuned_for(call, properties);
  for (int i = 0; i < count; i++) visit(data, &programs[i].spec, tuned);
}

/* What a call may have beside a rectangle: every combination for the first format and some shapes,
 * one for each other format. Pointers are set, and looked at by nobody. */
static void visit_features(const nyb_attention_call *call, bool all,
                           const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                           void *data) {
  static const int32_t numbers[1];
  nyb_attention a = *call->attention;
  nyb_attention_call featured = *call;
  featured.attention = &a;
  for (int kind = 0; kind < (all ? 5 : 1); kind++) {
    a.window_tokens = kind == 0 || kind == 3 ? 1024 : 0;
    a.pages = (nyb_pages){.page_tokens = kind == 1 || kind == 3 ? 64 : 0, .page_count = 1};
    a.last.tokens = kind == 2 ? 128 : 0;
    a.last.k = a.k;
    a.last.v = a.v;
    a.ring = (nyb_ring){.offsets = kind == 4 ? numbers : NULL};
    visit_call(&featured, properties, NYB_PATH_FUSED, true, visit, data);
  }
}

/* What decode is compiled for, beside a window alone: each feature alone and some together. */
static void visit_decode_features(const nyb_attention_call *call,
                                  const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                                  void *data) {
  static const int32_t starts[1];
  static const float floats[1];
  enum { CAP = 1, SLOPES = 2, SINKS = 4, WINDOW = 8, STARTS = 16, BOOLS = 32, ADD = 64, F32 = 128 };
  enum { OF_HEADS = 256, MLX = 512 };
  static const int32_t kinds[] = {
      CAP,
      CAP | MLX,
      SLOPES,
      SINKS,
      BOOLS,
      BOOLS | OF_HEADS,
      ADD,
      ADD | MLX | CAP,
      ADD | F32,
      WINDOW | SINKS | CAP,
      STARTS | BOOLS,
      WINDOW | CAP | SLOPES | ADD | F32 | OF_HEADS | SINKS,
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    const int32_t kind = kinds[i];
    nyb_attention a = *call->attention;
    nyb_attention_call featured = *call;
    featured.attention = &a;
    a.softcap = (kind & CAP) != 0 ? 50 : 0;
    a.alibi_slopes = (kind & SLOPES) != 0 ? floats : NULL;
    a.sinks = (kind & SINKS) != 0 ? floats : NULL;
    a.window_tokens = (kind & WINDOW) != 0 ? 1024 : 0;
    a.starts = (kind & STARTS) != 0 ? starts : NULL;
    a.rounding = (kind & MLX) != 0 ? NYB_ROUNDING_MLX : NYB_ROUNDING_EXACT;
    if ((kind & (BOOLS | ADD)) != 0) {
      a.mask_array.kind = (kind & BOOLS) != 0 ? NYB_MASK_ARRAY_BOOL : NYB_MASK_ARRAY_ADD;
      a.mask_array.dtype = (kind & BOOLS) != 0 ? 0 : (kind & F32) != 0 ? NYB_F32 : a.q.dtype;
      a.mask_array.tokens = a.capacity_tokens;
      a.mask_array.stride[1] = (kind & OF_HEADS) != 0 ? a.capacity_tokens : 0;
    }
    visit_call(&featured, properties, NYB_PATH_FUSED, true, visit, data);
  }
}

static void visit_pair(int shape_index, int format_index, const nyb_cuda_properties *properties,
                       nyb_cuda_visit visit, void *data) {
  static const nyb_dtype dtypes[] = {NYB_BF16, NYB_F16, NYB_F32};
  const matrix_shape *shape = &matrix_shapes[shape_index];
  nyb_row_layout key, value;
  nyb_attention a = NYB_ATTENTION_INIT;
  a.batch = 1;
  a.query_heads = shape->query_heads;
  a.kv_heads = shape->kv_heads;
  a.query_len = shape->query_len;
  a.key_dim = shape->key_dim;
  a.value_dim = shape->value_dim;
  a.capacity_tokens = 32768;
  a.k.format = matrix_format(format_index, 0, a.key_dim);
  a.v.format = matrix_format(format_index, 1, a.value_dim);
  a.scale = 1;
  if (nyb_format_check(&a.k.format, "format", a.key_dim, "dim", &key) != NYB_OK ||
      nyb_format_check(&a.v.format, "format", a.value_dim, "dim", &value) != NYB_OK) {
    return;
  }
  const nyb_attention_call call = {.attention = &a,
                                   .key_format = key.id,
                                   .value_format = value.id,
                                   .heads_per_kv = a.query_heads / a.kv_heads};
  const bool untuned_too = shape_index == 0 || format_index == 0;
  const bool many = format_index == 0 && (shape_index < 4 || a.key_dim == 576);
  if (many || shape_index == 0) {
    a.q.dtype = a.out.dtype = NYB_F32; /* the general kernel */
    visit_features(&call, many, properties, visit, data);
    a.q.dtype = a.out.dtype = NYB_BF16; /* the decode kernel, as far as it goes */
    if (format_index % 3 == 0)
      visit_features(&call, shape_index == 0 && format_index == 0, properties, visit, data);
    if (shape_index == 0 && format_index == 0)
      visit_decode_features(&call, properties, visit, data);
  }
  /* Every combination for the format that most people use; the others with some that differ in
   * all; a shape and a format that are both not the first with one of two, in turn: all of it has
   * to compile within minutes. */
  for (int i = 0; i < 6; i++) {
    if (format_index != 0 && i != 0 && i != 3 && i != 4) continue;
    if (!untuned_too && i != ((shape_index + format_index) % 2 == 0 ? 0 : 3)) continue;
    a.q.dtype = a.out.dtype = dtypes[i / 2];
    a.rounding = i % 2 == 0 ? NYB_ROUNDING_EXACT : NYB_ROUNDING_MLX;
    a.k.codes_stride[2] = i % 2 == 0 ? 0 : 1024; /* and rows with gaps between them */
    visit_call(&call, properties, NYB_PATH_FUSED, untuned_too, visit, data);
    visit_call(&call, properties, NYB_PATH_COMPAT, untuned_too, visit, data);
  }
}

void nyb_cuda_attention_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                               void *data) {
  const nyb_cuda_spec combine = {.program = &nyb_cuda_program_attention_combine};
  visit(data, &combine, false);
  for (int s = 0; s < MATRIX_SHAPES; s++) {
    for (int f = 0; f < MATRIX_FORMATS; f++) visit_pair(s, f, properties, visit, data);
  }
}
