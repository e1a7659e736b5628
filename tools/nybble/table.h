/* SPDX-License-Identifier: Apache-2.0 */
/* A table of text for stdout, its columns as wide as their widest cell. */
#ifndef NYB_TABLE_H
#define NYB_TABLE_H

typedef struct nyb_table nyb_table;

/* `columns` names the columns, "<name" set to the left and ">name" to the right, with '|' between
 * them: "<kernel|>time us". */
nyb_table *nyb_table_create(const char *columns);
/* Appends the next cell of the current row; rows fill up one after the other. */
void nyb_table_add(nyb_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints it (nothing for a table without rows) and releases it. */
void nyb_table_print(nyb_table *table);
/* Releases it unprinted; NULL is allowed. */
void nyb_table_destroy(nyb_table *table);

#endif
