/* SPDX-License-Identifier: Apache-2.0 */
/* ---- Fetching ahead -------------------------------------------------------------------------
 *
 * While a kernel multiplies, it asks for the rows that the next kernel will read, a little in each
 * of its steps. All at once they would fill the buffers through which its own loads come, and the
 * processor's own prefetchers lose the way at each tile's end and at each page. */

/* One step's products over 64 tokens take long enough for two lines, those over fewer for one. */
enum { LINE_BYTES = 64, TOUCHED_LINES = DOT_VECTORS * VECTOR_LANES < NYB_TILE_TOKENS ? 1 : 2 };

/* A column of touches goes down the rows; then the next one, further in them or in the next pieces,
 * begins. */
typedef struct ahead_cursor {
  const nyb_ahead *ahead;
  const char *column;
  int64_t other_bytes; /* from a touch's first line to its second */
  int64_t step_bytes, touch_bytes;
  int64_t row, rows;
  int64_t columns; /* that are left, this one included */
  int64_t piece;
} ahead_cursor;

/* A touch's second line is the next one, or, of several pieces, the same of the next piece. */
ALWAYS_INLINE void begin_piece(ahead_cursor *cursor, int64_t piece) {
  const nyb_ahead *ahead = cursor->ahead;
  cursor->piece = piece;
  cursor->column = ahead->pieces[piece];
  cursor->other_bytes = TOUCHED_LINES > 1 && piece + 1 < ahead->piece_count
                            ? ahead->pieces[piece + 1] - cursor->column
                            : LINE_BYTES;
}

/* For a kernel that takes `steps` steps. Rows without gaps are one long row, which goes evenly over
 * the steps, as several pieces do; in others each line is touched once. idle: what is touched when
 * nothing is left. */
ALWAYS_INLINE ahead_cursor start_ahead(const nyb_ahead *ahead, int64_t steps, const void *idle) {
  ahead_cursor cursor = {.ahead = ahead, .column = idle, .touch_bytes = LINE_BYTES};
  if (ahead->rows == 0) return cursor;
  const int64_t bytes = ahead->rows * ahead->row_bytes;
  begin_piece(&cursor, 0);
  if (ahead->stride_bytes == ahead->row_bytes) {
    const int64_t at_once = ahead->piece_count > 1 ? TOUCHED_LINES : 1;
    cursor.columns = (ahead->piece_count + at_once - 1) / at_once;
    cursor.rows = steps / cursor.columns;
    if (cursor.rows == 0) cursor.rows = 1;
    cursor.step_bytes = (bytes + cursor.rows - 1) / cursor.rows;
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
  int64_t step_bytes, other_bytes;
} ahead_run;

/* The next `count` touches, which may reach a little past the last row. */
ALWAYS_INLINE ahead_run take_ahead(ahead_cursor *cursor, int64_t count) {
  if (cursor->columns == 0) return (ahead_run){.line = cursor->column};
  const ahead_run run = {.line = cursor->column + cursor->row * cursor->step_bytes,
                         .step_bytes = cursor->step_bytes,
                         .other_bytes = cursor->other_bytes};
  cursor->row += count;
  if (cursor->row >= cursor->rows) {
    cursor->row = 0;
    cursor->columns--;
    if (cursor->ahead->piece_count == 1) {
      cursor->column += cursor->touch_bytes;
    } else if (cursor->columns > 0) {
      begin_piece(cursor, cursor->piece + TOUCHED_LINES);
    }
  }
  return run;
}

ALWAYS_INLINE void touch(ahead_run *run) {
  __builtin_prefetch(run->line);
  if (TOUCHED_LINES > 1) __builtin_prefetch(run->line + run->other_bytes);
  run->line += run->step_bytes;
}
