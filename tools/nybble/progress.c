/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "support.h"

static bool line_shown;
static int64_t shown_at_ns;

static void start_line(void) { fputs("\r\033[K", stderr); }

void nyb_progress_show(const char *format, ...) {
  if (!isatty(STDERR_FILENO)) return;
  const int64_t now_ns = nyb_now_ns();
  if (line_shown && now_ns - shown_at_ns < 100000000) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  nyb_make_printable(text);
  start_line();
  fputs(text, stderr);
  fflush(stderr);
  line_shown = true;
  shown_at_ns = now_ns;
}

void nyb_progress_clear(void) {
  if (!line_shown) return;
  start_line();
  fflush(stderr);
  line_shown = false;
}
