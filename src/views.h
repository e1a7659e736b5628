/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of strided views, shared by every operation: what memory a view reaches, whether it is
 * aligned, whether it runs into itself or into another view. */
#ifndef NYB_VIEWS_H
#define NYB_VIEWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

#define NYB_VIEW_MAX_RANK 4

/* Rows of row_elements contiguous elements; the axes lead to them, the outermost first. */
typedef struct nyb_view {
  const char *owner, *member; /* for sentences: "attention.k" and "codes" */
  const void *data;
  size_t element_bytes;
  int64_t row_elements;
  int rank;
  int64_t shape[NYB_VIEW_MAX_RANK];  /* not negative */
  int64_t stride[NYB_VIEW_MAX_RANK]; /* elements; ignored where shape is 1 */
} nyb_view;

/* Rows [batch, head, row] of a tensor. */
nyb_view nyb_rows_view(const char *owner, const char *member, const void *data,
                       size_t element_bytes, int64_t row_elements, const int64_t shape[3],
                       const int64_t stride[3]);

/* Elements from its data to one of its rows. */
static inline int64_t nyb_row_offset(const int64_t stride[3], int64_t batch, int64_t head,
                                     int64_t row) {
  return batch * stride[0] + head * stride[1] + row * stride[2];
}

/* The memory that a view reaches: [begin, end); an empty view has begin == end. Seen finely, it is
 * rows of row_bytes that start multiples of pitch_bytes apart; seen coarsely, blocks of block_bytes
 * that start period_bytes apart, its largest stride (both are 0 where it is all one). */
typedef struct nyb_extent {
  const char *owner, *member;
  uintptr_t begin, end;
  uint64_t row_bytes, pitch_bytes;
  uint64_t block_bytes, period_bytes;
} nyb_extent;

/* Fails where data is NULL or misaligned, or where an offset leaves int64 or the address space. A
 * view without elements is not looked through: its data may be NULL. */
nyb_status nyb_extent_of(const nyb_view *view, nyb_extent *extent);

/* The same for an output, which must not run into itself: NYB_ERROR_STRIDE where a stride of an
 * axis longer than 1 does not step over all that the axes of smaller strides cover. */
nyb_status nyb_extent_of_output(const nyb_view *view, nyb_extent *extent);

/* Whether two views may share a byte. Never false where they do; true also for views that weave
 * through each other in another way than at one pitch (the halves of each row) or with one largest
 * stride (codes and scales of a head in one record). */
bool nyb_extents_overlap(const nyb_extent *a, const nyb_extent *b);

/* NYB_ERROR_OVERLAP, naming both, where the output may share a byte with the other view. */
nyb_status nyb_check_apart(const nyb_extent *output, const nyb_extent *other);

/* NYB_ERROR_ENUM where value is no nyb_dtype. */
nyb_status nyb_check_dtype(const char *field, nyb_dtype value);

#endif
