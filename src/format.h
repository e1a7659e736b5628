/* SPDX-License-Identifier: Apache-2.0 */
/* Formats of stored rows: which exist, and how large their rows are. */
#ifndef NYB_FORMAT_H
#define NYB_FORMAT_H

#include "kernels.h"
#include "views.h"

/* The format of plain rows of that dtype. */
nyb_format_id nyb_plain_format(nyb_dtype dtype);

/* What one row of a checked format takes. */
typedef struct nyb_row_layout {
  nyb_format_id id;
  bool affine;
  int32_t bits;        /* of a code; plain: of an element */
  int32_t group_size;  /* plain: 1, and a group is an element */
  int64_t groups;      /* per row */
  int64_t codes;       /* per row, in units of code_bytes: words, or elements of a plain row */
  size_t code_bytes;   /* 4, or the element's size */
  size_t scale_bytes;  /* 0 for plain rows */
  int64_t codes_bytes; /* codes * code_bytes */
  int64_t row_bytes;   /* codes, scales and biases */
} nyb_row_layout;

/* Whether `format` exists and fits rows of `dim` elements; `field` is its name in sentences
 * ("attention.k.format"), as `dim_field` is dim's. layout may be NULL. */
nyb_status nyb_format_check(const nyb_format *format, const char *field, int64_t dim,
                            const char *dim_field, nyb_row_layout *layout);

/* The codes, scales and biases of stored rows of that layout, in this order, as views of
 * [shape[0], shape[1], shape[2]] rows; `owner` is their name in sentences ("attention.k"). Returns
 * how many there are: 3, or 1 for plain rows. */
enum { NYB_STORED_MAX_VIEWS = 3 };
int nyb_stored_views(const nyb_row_layout *layout, const nyb_stored *stored, const char *owner,
                     const int64_t shape[3], nyb_view views[NYB_STORED_MAX_VIEWS]);

/* Where one of those rows begins; scales and biases are NULL for plain rows. */
typedef struct nyb_stored_row {
  const char *codes, *scales, *biases;
} nyb_stored_row;
nyb_stored_row nyb_stored_row_at(const nyb_stored *stored, int64_t batch, int64_t head,
                                 int64_t token);

/* What is stored is read through const; the library writes only to what the caller gave as an
 * output. */
nyb_stored nyb_stored_from_output(const nyb_stored_output *output);

#endif
