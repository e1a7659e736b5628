/* SPDX-License-Identifier: Apache-2.0 */
/* Random keys or values for benchmarks of attention, as they are stored. */
#ifndef NYB_BENCH_ROWS_H
#define NYB_BENCH_ROWS_H

#include "bench.h"

/* The three arrays of stored rows: codes, scales, biases; bytes of a row of each, 0 for none. */
enum { NYB_BENCH_ARRAYS = 3 };

typedef struct nyb_bench_rows {
  nyb_format format;
  int64_t row_bytes[NYB_BENCH_ARRAYS];
  int64_t offset_bytes[NYB_BENCH_ARRAYS]; /* in a copy */
} nyb_bench_rows;

/* Of the settings' group size and dtype. Returns 0, or 1 after a sentence on stderr. */
int nyb_bench_describe_rows(int32_t bits, const nyb_bench_settings *settings, int64_t dim,
                            nyb_bench_rows *rows);

/* Places the arrays behind *end, and moves it; false where that overflows. */
bool nyb_bench_place_rows(nyb_bench_rows *rows, int64_t row_count, int64_t *end);

/* Rows in a copy; strides in elements (words for codes) of [batch, heads, tokens, ...] without
 * gaps. */
nyb_stored_output nyb_bench_point_rows(const nyb_bench_rows *rows, char *copy, int64_t heads,
                                       int64_t tokens);
nyb_stored nyb_bench_as_input(const nyb_stored_output *rows);

/* Quantizes a template of random rows and fills every copy with it, each head and each copy from
 * another row on. Returns 0, or 1 after a sentence on stderr. */
int nyb_bench_fill_rows(nyb_context *context, const nyb_bench_rows *rows, int64_t dim,
                        int64_t heads, int64_t tokens, uint64_t seed,
                        const nyb_bench_copies *copies);

#endif
