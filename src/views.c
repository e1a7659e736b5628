/* SPDX-License-Identifier: Apache-2.0 */
#include "views.h"

#include "context.h"

nyb_view nyb_rows_view(const char *owner, const char *member, const void *data,
                       size_t element_bytes, int64_t row_elements, const int64_t shape[3],
                       const int64_t stride[3]) {
  return (nyb_view){
      .owner = owner,
      .member = member,
      .data = data,
      .element_bytes = element_bytes,
      .row_elements = row_elements,
      .rank = 3,
      .shape = {shape[0], shape[1], shape[2]},
      .stride = {stride[0], stride[1], stride[2]},
  };
}

static bool multiply(int64_t a, int64_t b, int64_t *product) {
  return !__builtin_mul_overflow(a, b, product);
}

static bool add(int64_t a, int64_t b, int64_t *sum) { return !__builtin_add_overflow(a, b, sum); }

static uint64_t magnitude(int64_t value) {
  return value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
}

static uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  while (b != 0) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static bool is_empty(const nyb_view *view) {
  for (int axis = 0; axis < view->rank; axis++) {
    if (view->shape[axis] == 0) return true;
  }
  return view->row_elements == 0;
}

static nyb_status fail_stride(const nyb_view *view, int axis) {
  return nyb_fail(NYB_ERROR_STRIDE,
                  "axis %d of %s.%s has %lld steps of stride %lld, which leave the address space; "
                  "offsets in bytes must fit int64",
                  axis, view->owner, view->member, (long long)view->shape[axis],
                  (long long)view->stride[axis]);
}

/* Byte offsets from data of the lowest byte and of one past the highest; the extent's sizes. */
static nyb_status measure(const nyb_view *view, int64_t *lowest, int64_t *highest,
                          nyb_extent *extent) {
  const int64_t element_bytes = (int64_t)view->element_bytes;
  uint64_t largest_reach = 0;
  *lowest = 0;
  if (!multiply(view->row_elements, element_bytes, highest)) {
    return nyb_fail(NYB_ERROR_SHAPE, "a row of %s.%s has %lld elements; its bytes must fit int64",
                    view->owner, view->member, (long long)view->row_elements);
  }
  extent->row_bytes = (uint64_t)*highest;
  for (int axis = 0; axis < view->rank; axis++) {
    if (view->shape[axis] == 1) continue;
    int64_t stride_bytes, reach;
    if (!multiply(view->stride[axis], element_bytes, &stride_bytes) ||
        !multiply(stride_bytes, view->shape[axis] - 1, &reach) ||
        !add(reach < 0 ? *lowest : *highest, reach, reach < 0 ? lowest : highest)) {
      return fail_stride(view, axis);
    }
    const uint64_t step = magnitude(stride_bytes);
    extent->pitch_bytes = greatest_common_divisor(extent->pitch_bytes, step);
    if (step > extent->period_bytes) {
      extent->period_bytes = step;
      largest_reach = magnitude(reach);
    }
  }
  extent->block_bytes = (uint64_t)*highest + magnitude(*lowest) - largest_reach;
  return NYB_OK;
}

nyb_status nyb_extent_of(const nyb_view *view, nyb_extent *extent) {
  *extent = (nyb_extent){.owner = view->owner, .member = view->member};
  if (is_empty(view)) return NYB_OK;
  if (view->data == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s.%s is NULL; it must point to the data", view->owner,
                    view->member);
  }
  const uintptr_t base = (uintptr_t)view->data;
  if (base % view->element_bytes != 0) {
    return nyb_fail(NYB_ERROR_ALIGNMENT, "%s.%s is %p; it must be a multiple of %zu bytes",
                    view->owner, view->member, view->data, view->element_bytes);
  }
  int64_t lowest, highest;
  const nyb_status status = measure(view, &lowest, &highest, extent);
  if (status != NYB_OK) return status;
  if (magnitude(lowest) > base || (uint64_t)highest > UINTPTR_MAX - base) {
    return nyb_fail(NYB_ERROR_STRIDE,
                    "%s.%s at %p reaches from %lld to %lld bytes, which leaves the address space",
                    view->owner, view->member, view->data, (long long)lowest, (long long)highest);
  }
  extent->begin = base - (uintptr_t)magnitude(lowest);
  extent->end = base + (uintptr_t)highest;
  return NYB_OK;
}

/* The axis longer than 1 with the smallest stride among those not done; -1 when all are. */
static int next_axis(const nyb_view *view, const bool *done) {
  int next = -1;
  for (int axis = 0; axis < view->rank; axis++) {
    if (done[axis] || view->shape[axis] == 1) continue;
    if (next < 0 || magnitude(view->stride[axis]) < magnitude(view->stride[next])) next = axis;
  }
  return next;
}

nyb_status nyb_extent_of_output(const nyb_view *view, nyb_extent *extent) {
  const nyb_status status = nyb_extent_of(view, extent);
  if (status != NYB_OK || is_empty(view)) return status;
  bool done[NYB_VIEW_MAX_RANK] = {false};
  /* Elements from the first to the last of what the axes seen so far cover: it fits int64, since
   * nyb_extent_of has summed the same in bytes. */
  uint64_t covered = (uint64_t)view->row_elements;
  for (int axis = next_axis(view, done); axis >= 0; axis = next_axis(view, done)) {
    const uint64_t stride = magnitude(view->stride[axis]);
    if (stride < covered) {
      return nyb_fail(NYB_ERROR_STRIDE,
                      "axis %d of %s.%s has stride %lld, so that the output runs into itself; its "
                      "magnitude must be at least %llu",
                      axis, view->owner, view->member, (long long)view->stride[axis],
                      (unsigned long long)covered);
    }
    covered += stride * (uint64_t)(view->shape[axis] - 1);
    done[axis] = true;
  }
  return NYB_OK;
}

/* Whether pieces that repeat every `period` bytes stay apart: only their places modulo the period
 * matter, and b's start lies `ahead` bytes after a's around a circle of that size. */
static bool stay_apart(uintptr_t a, uint64_t a_bytes, uintptr_t b, uint64_t b_bytes,
                       uint64_t period) {
  const uint64_t ahead = (b % period + (period - a % period)) % period;
  return a_bytes <= ahead && b_bytes <= period - ahead;
}

bool nyb_extents_overlap(const nyb_extent *a, const nyb_extent *b) {
  if (a->begin == a->end || b->begin == b->end) return false;
  if (a->end <= b->begin || b->end <= a->begin) return false;
  const uint64_t pitch = greatest_common_divisor(a->pitch_bytes, b->pitch_bytes);
  if (pitch == 0) return true; /* a row each, and they meet */
  if (stay_apart(a->begin, a->row_bytes, b->begin, b->row_bytes, pitch)) return false;
  const uint64_t period = a->period_bytes != 0 ? a->period_bytes : b->period_bytes;
  if (b->period_bytes != 0 && b->period_bytes != period) return true;
  return !stay_apart(a->begin, a->block_bytes, b->begin, b->block_bytes, period);
}

nyb_status nyb_check_apart(const nyb_extent *output, const nyb_extent *other) {
  if (!nyb_extents_overlap(output, other)) return NYB_OK;
  return nyb_fail(NYB_ERROR_OVERLAP,
                  "%s.%s reaches memory from %p to %p, which overlaps %s.%s from %p to %p; they "
                  "must be apart",
                  output->owner, output->member, (void *)output->begin, (void *)output->end,
                  other->owner, other->member, (void *)other->begin, (void *)other->end);
}

nyb_status nyb_check_dtype(const char *field, nyb_dtype value) {
  if (nyb_dtype_bytes(value) != 0) return NYB_OK;
  return nyb_fail(NYB_ERROR_ENUM, "%s is %d; it must be NYB_F32, NYB_F16 or NYB_BF16", field,
                  (int)value);
}
