/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Fetching ahead -------------------------------------------------------------------------
 *
 * While a kernel multiplies, it asks for the rows that the next kernel will read, a little in each
 * of its steps. All at once they would fill the buffers through which its own loads come, and the
 * processor's own prefetchers lose the way at each tile's end and at each page. */

/* One step's products over 64 tokens take long enough for two lines, those over fewer for one. */
enum { LINE_BYTES = 64, TOUCHED_LINES = DOT_VECTORS * VECTOR_LANES < NYB_TILE_TOKENS ? 1 : 2 };

/* A column of touches goes down the rows; then the next one, further in them, begins. */
typedef struct ahead_cursor {
  const char *column;
  int64_t step_bytes, touch_bytes;
  int64_t row, rows;
  int64_t columns; /* that are left, this one included */
} ahead_cursor;

/* For a kernel that takes `steps` steps. Rows without gaps are one long row, which goes evenly over
 * the steps; in others each line is touched once. idle: what is touched when nothing is left. */
ALWAYS_INLINE ahead_cursor start_ahead(const nyb_ahead *ahead, int64_t steps, const void *idle) {
  ahead_cursor cursor = {.column = idle, .touch_bytes = LINE_BYTES};
  if (ahead->rows == 0) return cursor;
  const int64_t bytes = ahead->rows * ahead->row_bytes;
  cursor.column = ahead->first;
  if (ahead->stride_bytes == ahead->row_bytes) {
    cursor.touch_bytes = (bytes + steps - 1) / steps;
    cursor.step_bytes = cursor.touch_bytes;
    cursor.rows = steps;
    cursor.columns = 1;
  } else {
    if (bytes > steps * LINE_BYTES) cursor.touch_bytes = 2 * LINE_BYTES;
    cursor.step_bytes = ahead->stride_bytes;
    cursor.rows = ahead->rows;
    cursor.columns = (ahead->row_bytes + cursor.touch_bytes - 1) / cursor.touch_bytes;
  }
  return cursor;
}

typedef struct ahead_run {
  const char *line;
  int64_t step_bytes;
} ahead_run;

/* The next `count` touches, which may reach a little past the last row. */
ALWAYS_INLINE ahead_run take_ahead(ahead_cursor *cursor, int64_t count) {
  if (cursor->columns == 0) return (ahead_run){.line = cursor->column};
  const ahead_run run = {.line = cursor->column + cursor->row * cursor->step_bytes,
                         .step_bytes = cursor->step_bytes};
  cursor->row += count;
  if (cursor->row >= cursor->rows) {
    cursor->row = 0;
    cursor->column += cursor->touch_bytes;
    cursor->columns--;
  }
  return run;
}

ALWAYS_INLINE void touch(ahead_run *run) {
  __builtin_prefetch(run->line);
  if (TOUCHED_LINES > 1) __builtin_prefetch(run->line + LINE_BYTES);
  run->line += run->step_bytes;
}
