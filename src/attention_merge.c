/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_attention_merge_run: results over parts of the tokens into the result over all of them.
 *
 * Weights and sums are f64, so that neither many parts nor weights close to each other cost the
 * result more than its one rounding at the end. exp and log are this file's own, of nothing but
 * sums and products: the processes of a cluster get the same bits on whatever processor and
 * C library each of them runs. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "context.h"
#include "cuda/operations.h"
#include "numeric.h"
#include "views.h"

enum { MAX_PARTS = 1 << 16, MAX_HEAD_DIM = 1 << 16 };

/* Input elements of a task: some 20 us of work, of which waking a thread is a small part. */
enum { TASK_ELEMENTS = 32 * 1024 };

/* ---- Checks --------------------------------------------------------------------------------- */

static nyb_status check_size(const char *field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return NYB_OK;
  return nyb_fail(NYB_ERROR_SHAPE, "merge.%s is %lld; it must be %lld to %lld", field,
                  (long long)value, (long long)least, (long long)most);
}

static nyb_status check_lse_dtype(const char *owner, nyb_dtype dtype) {
  if (dtype == NYB_F32) return NYB_OK;
  return nyb_fail(NYB_ERROR_DTYPE, "%s.dtype is %d; it must be NYB_F32", owner, (int)dtype);
}

static nyb_status check_fields(const nyb_attention_merge *m) {
  nyb_status status = nyb_check_struct("merge", m, m->struct_size, sizeof *m);
  if (status == NYB_OK) status = check_size("parts", m->parts, 1, MAX_PARTS);
  if (status == NYB_OK) status = check_size("batch", m->batch, 0, INT64_MAX);
  if (status == NYB_OK) status = check_size("query_heads", m->query_heads, 0, INT64_MAX);
  if (status == NYB_OK) status = check_size("query_len", m->query_len, 0, INT64_MAX);
  if (status == NYB_OK) status = check_size("value_dim", m->value_dim, 1, MAX_HEAD_DIM);
  if (status != NYB_OK) return status;
  if (m->outs == NULL || m->lses == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "merge.%s is NULL; it must point to %lld views",
                    m->outs == NULL ? "outs" : "lses", (long long)m->parts);
  }
  status = nyb_check_dtype("merge.out.dtype", m->out.dtype);
  if (status == NYB_OK && m->lse.data != NULL) status = check_lse_dtype("merge.lse", m->lse.dtype);
  return status;
}

static bool is_same_view(const nyb_attention_merge *m, const nyb_input *input,
                         const nyb_output *output) {
  const int64_t shape[3] = {m->batch, m->query_heads, m->query_len};
  if (output->data == NULL || input->data != output->data || input->dtype != output->dtype) {
    return false;
  }
  for (int axis = 0; axis < 3; axis++) {
    if (shape[axis] > 1 && input->stride[axis] != output->stride[axis]) return false;
  }
  return true;
}

static nyb_view rows_of(const nyb_attention_merge *m, const char *owner, const void *data,
                        nyb_dtype dtype, int64_t row_elements, const int64_t stride[3]) {
  const int64_t shape[3] = {m->batch, m->query_heads, m->query_len};
  return nyb_rows_view(owner, "data", data, nyb_dtype_bytes(dtype), row_elements, shape, stride);
}

typedef struct output_extents {
  nyb_extent out, lse; /* lse is empty where none is wanted */
} output_extents;

static nyb_status check_apart_from_outputs(const output_extents *outputs, const nyb_extent *input) {
  const nyb_status status = nyb_check_apart(&outputs->out, input);
  return status == NYB_OK ? nyb_check_apart(&outputs->lse, input) : status;
}

typedef struct part_names {
  char out[40], out_dtype[48], lse[40];
} part_names;

static nyb_status check_views_of_part(const nyb_attention_merge *m, int64_t part,
                                      const output_extents *outputs, const part_names *names) {
  const nyb_input *out = &m->outs[part], *lse = &m->lses[part];
  nyb_status status = nyb_check_dtype(names->out_dtype, out->dtype);
  if (status == NYB_OK) status = check_lse_dtype(names->lse, lse->dtype);
  if (status != NYB_OK) return status;
  const nyb_view out_view =
      rows_of(m, names->out, out->data, out->dtype, m->value_dim, out->stride);
  const nyb_view lse_view = rows_of(m, names->lse, lse->data, lse->dtype, 1, lse->stride);
  nyb_extent out_extent, lse_extent;
  status = nyb_extent_of(&out_view, &out_extent);
  if (status == NYB_OK) status = nyb_extent_of(&lse_view, &lse_extent);
  if (status != NYB_OK) return status;
  const bool over_out = part == 0 && is_same_view(m, out, &m->out);
  const bool over_lse = part == 0 && is_same_view(m, lse, &m->lse);
  if (!over_out) status = nyb_check_apart(&outputs->out, &out_extent);
  if (status == NYB_OK) status = nyb_check_apart(&outputs->lse, &out_extent);
  if (status == NYB_OK) status = nyb_check_apart(&outputs->out, &lse_extent);
  if (status == NYB_OK && !over_lse) status = nyb_check_apart(&outputs->lse, &lse_extent);
  return status;
}

/* The part's number is spelled only for a sentence. */
static nyb_status check_part(const nyb_attention_merge *m, int64_t part,
                             const output_extents *outputs) {
  part_names names = {"", "", ""};
  if (check_views_of_part(m, part, outputs, &names) == NYB_OK) return NYB_OK;
  snprintf(names.out, sizeof names.out, "merge.outs[%lld]", (long long)part);
  snprintf(names.out_dtype, sizeof names.out_dtype, "merge.outs[%lld].dtype", (long long)part);
  snprintf(names.lse, sizeof names.lse, "merge.lses[%lld]", (long long)part);
  return check_views_of_part(m, part, outputs, &names);
}

/* The arrays of views, which no output may overwrite. */
static nyb_status check_list(const nyb_attention_merge *m, const char *member, const void *list,
                             const output_extents *outputs) {
  const nyb_view view = {.owner = "merge",
                         .member = member,
                         .data = list,
                         .element_bytes = sizeof(int64_t),
                         .row_elements = m->parts * (int64_t)(sizeof(nyb_input) / sizeof(int64_t))};
  nyb_extent extent;
  const nyb_status status = nyb_extent_of(&view, &extent);
  return status == NYB_OK ? check_apart_from_outputs(outputs, &extent) : status;
}

static nyb_status check_memory(const nyb_attention_merge *m) {
  output_extents outputs = {.lse = {.owner = "merge.lse", .member = "data"}};
  const nyb_view out =
      rows_of(m, "merge.out", m->out.data, m->out.dtype, m->value_dim, m->out.stride);
  nyb_status status = nyb_extent_of_output(&out, &outputs.out);
  if (status == NYB_OK && m->lse.data != NULL) {
    const nyb_view lse = rows_of(m, "merge.lse", m->lse.data, m->lse.dtype, 1, m->lse.stride);
    status = nyb_extent_of_output(&lse, &outputs.lse);
  }
  if (status == NYB_OK) status = nyb_check_apart(&outputs.lse, &outputs.out);
  if (status == NYB_OK) status = check_list(m, "outs", m->outs, &outputs);
  if (status == NYB_OK) status = check_list(m, "lses", m->lses, &outputs);
  for (int64_t part = 0; part < m->parts && status == NYB_OK; part++) {
    status = check_part(m, part, &outputs);
  }
  return status;
}

/* ---- exp and log ---------------------------------------------------------------------------- */

static double f64_from_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* exp(x) for x <= 0, 0 below -700. x = n ln2 + r with |r| <= ln2/2, where 13 terms of the series
 * err by 2^-57. ln2 is split so that n times its upper part is exact; adding 1.5 * 2^52 rounds to
 * an integer, which then stands in the low bits of the sum. */
static double exp_of_negative(double x) {
  if (x < -700) return 0;
  const double shift = 0x1.8p52;
  const double shifted = x * 0x1.71547652b82fep+0 + shift;
  const double n = shifted - shift;
  const double r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
  double sum = 1;
  for (int term = 13; term > 0; term--) sum = 1 + sum * r / term;
  return sum * f64_from_bits((uint64_t)(1023 + (int64_t)n) << 52);
}

/* log(x) for 1 <= x <= MAX_PARTS: x = 2^n m with m in [sqrt(1/2), sqrt(2)], log m = 2 artanh f of
 * f = (m - 1)/(m + 1), where 11 terms err by 2^-58. */
static double log_from_one(double x) {
  int n;
  double m = frexp(x, &n);
  if (m < 0x1.6a09e667f3bcdp-1) {
    m *= 2;
    n--;
  }
  const double f = (m - 1) / (m + 1);
  double sum = 0;
  for (int power = 21; power > 0; power -= 2) sum = sum * (f * f) + 2.0 / power;
  return n * 0x1.62e42fefa39efp-1 + f * sum;
}

/* ---- One row -------------------------------------------------------------------------------- */

/* Columns that are summed at a time. */
enum { COLUMNS = 256 };

typedef struct row_place {
  int64_t batch, head, row;
} row_place;

static double lse_at(const nyb_attention_merge *m, int64_t part, row_place at) {
  const nyb_input *lse = &m->lses[part];
  const float *data = lse->data;
  return (double)data[nyb_row_offset(lse->stride, at.batch, at.head, at.row)];
}

/* The largest lse of the parts, which is -inf where all are empty; NaN where one is NaN or +inf. */
static double largest_lse(const nyb_attention_merge *m, row_place at) {
  double largest = -(double)INFINITY;
  for (int64_t part = 0; part < m->parts; part++) {
    const double lse = lse_at(m, part, at);
    if (!(lse < (double)INFINITY)) return (double)NAN;
    if (lse > largest) largest = lse;
  }
  return largest;
}

static void add_weighted(double *sums, double weight, const nyb_input *values, int64_t first,
                         int64_t count) {
  switch (values->dtype) {
    case NYB_F32: {
      const float *from = (const float *)values->data + first;
      for (int64_t i = 0; i < count; i++) sums[i] += weight * (double)from[i];
      break;
    }
    case NYB_F16: {
      const uint16_t *from = (const uint16_t *)values->data + first;
      for (int64_t i = 0; i < count; i++) sums[i] += weight * (double)nyb_f32_from_f16(from[i]);
      break;
    }
    case NYB_BF16: {
      const uint16_t *from = (const uint16_t *)values->data + first;
      for (int64_t i = 0; i < count; i++) sums[i] += weight * (double)nyb_f32_from_bf16(from[i]);
      break;
    }
  }
}

/* Sums of the columns from `first` on; returns the sum of the weights. -0 is what adding leaves
 * alone, to the bit. */
static double add_parts(const nyb_attention_merge *m, row_place at, double largest, int64_t first,
                        int64_t count, double *sums) {
  double weights = 0;
  for (int64_t i = 0; i < count; i++) sums[i] = -0.0;
  for (int64_t part = 0; part < m->parts; part++) {
    const double lse = lse_at(m, part, at);
    if (lse == -(double)INFINITY) continue;
    const nyb_input *out = &m->outs[part];
    const double weight = exp_of_negative(lse - largest);
    weights += weight;
    add_weighted(sums, weight, out, nyb_row_offset(out->stride, at.batch, at.head, at.row) + first,
                 count);
  }
  return weights;
}

/* One NaN for all: the processors do not agree on the sign of theirs. */
static float f32_of(double value) { return value == value ? (float)value : NAN; }

static void store_constant(const nyb_output *out, int64_t first, int64_t count, float value) {
  for (int64_t i = 0; i < count; i++) nyb_store_f32(out->data, out->dtype, first + i, value);
}

/* Everything that a block of columns is made of has been read before it is written, and lse is
 * written last: out may be outs[0], and lse lses[0]. */
static void merge_row(const nyb_attention_merge *m, row_place at) {
  const int64_t out_first = nyb_row_offset(m->out.stride, at.batch, at.head, at.row);
  const double largest = largest_lse(m, at);
  double lse = largest;
  if (!isfinite(largest)) {
    store_constant(&m->out, out_first, m->value_dim, isnan(largest) ? NAN : 0);
  }
  for (int64_t first = 0; first < m->value_dim && isfinite(largest); first += COLUMNS) {
    double sums[COLUMNS];
    const int64_t left = m->value_dim - first, count = left < COLUMNS ? left : COLUMNS;
    const double weights = add_parts(m, at, largest, first, count, sums);
    for (int64_t i = 0; i < count; i++) {
      nyb_store_f32(m->out.data, m->out.dtype, out_first + first + i, f32_of(sums[i] / weights));
    }
    if (weights > 1) lse = largest + log_from_one(weights);
  }
  if (m->lse.data == NULL) return;
  float *lses = m->lse.data;
  lses[nyb_row_offset(m->lse.stride, at.batch, at.head, at.row)] = f32_of(lse);
}

/* ---- All rows ------------------------------------------------------------------------------- */

typedef struct merge_work {
  const nyb_attention_merge *merge;
  int64_t rows, rows_per_task;
} merge_work;

static void run_task(void *data, int64_t task) {
  const merge_work *work = data;
  const nyb_attention_merge *m = work->merge;
  const int64_t first = task * work->rows_per_task, left = work->rows - first;
  const int64_t end = first + (left < work->rows_per_task ? left : work->rows_per_task);
  for (int64_t i = first; i < end; i++) {
    const row_place at = {.batch = i / m->query_len / m->query_heads,
                          .head = i / m->query_len % m->query_heads,
                          .row = i % m->query_len};
    merge_row(m, at);
  }
}

nyb_status nyb_attention_merge_run(nyb_context *context, const nyb_attention_merge *merge,
                                   nyb_stream stream) {
  if (context == NULL || merge == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; both context and merge must be set",
                    context == NULL ? "context" : "merge");
  }
  nyb_status status = nyb_check_stream(context, stream);
  if (status == NYB_OK) status = check_fields(merge);
  if (status != NYB_OK) return status;
  status = check_memory(merge);
  const bool is_empty = merge->batch == 0 || merge->query_heads == 0 || merge->query_len == 0;
  if (status != NYB_OK || is_empty) return status;

  if (nyb_on_cuda(context)) {
    status = nyb_cuda_attention_merge_run(context, merge, stream);
    if (status == NYB_OK) nyb_count(context, NYB_COUNTER_ATTENTION_MERGE);
    return status;
  }

  /* The products fit: out has so many rows, each of memory of its own. */
  const int64_t row_elements = merge->parts * merge->value_dim;
  merge_work work = {.merge = merge,
                     .rows = merge->batch * merge->query_heads * merge->query_len,
                     .rows_per_task = (TASK_ELEMENTS + row_elements - 1) / row_elements};
  const int64_t tasks = (work.rows + work.rows_per_task - 1) / work.rows_per_task;
  nyb_parallel(context, tasks, run_task, &work);
  nyb_count(context, NYB_COUNTER_ATTENTION_MERGE);
  return NYB_OK;
}
