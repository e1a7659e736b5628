/* SPDX-License-Identifier: Apache-2.0 */
/* One line on stderr that says what is being done, for a person at a terminal; nothing for a pipe.
 */
#ifndef NYB_PROGRESS_H
#define NYB_PROGRESS_H

/* Replaces the line, at most ten times a second. */
void nyb_progress_show(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Takes the line away; to be called before anything else is printed. */
void nyb_progress_clear(void);

#endif
