/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "support.h"

enum { MAX_COLUMNS = 16, MAX_CELL_BYTES = 256 };

struct nyb_table {
  int columns;
  bool to_the_right[MAX_COLUMNS];
  int width[MAX_COLUMNS];
  int64_t cells, room; /* the header's cells included */
  char **cell;
};

/* Characters, not bytes: a UTF-8 character has one byte that is no continuation. */
static int text_width(const char *text) {
  int width = 0;
  for (; *text != '\0'; text++) {
    if (((unsigned char)*text & 0xc0u) != 0x80u) width++;
  }
  return width;
}

static void append(nyb_table *table, char *text) {
  if (table->cells == table->room) {
    const int64_t room = 2 * table->room + MAX_COLUMNS;
    char **cell = nyb_command_allocate(room * (int64_t)sizeof *cell);
    if (table->cells > 0) memcpy(cell, table->cell, (size_t)table->cells * sizeof *cell);
    free(table->cell);
    table->cell = cell;
    table->room = room;
  }
  const int column = (int)(table->cells % table->columns);
  const int width = text_width(text);
  if (width > table->width[column]) table->width[column] = width;
  table->cell[table->cells++] = text;
}

nyb_table *nyb_table_create(const char *columns) {
  nyb_table *table = nyb_command_allocate(sizeof *table);
  table->columns = 1;
  for (const char *c = columns; *c != '\0'; c++) table->columns += *c == '|';
  for (int i = 0; i < table->columns; i++) {
    table->to_the_right[i] = columns[0] == '>';
    const size_t bytes = strcspn(columns, "|");
    char *name = nyb_command_allocate((int64_t)bytes);
    memcpy(name, columns + 1, bytes - 1);
    append(table, name);
    columns += bytes + 1;
  }
  return table;
}

void nyb_table_add(nyb_table *table, const char *format, ...) {
  char text[MAX_CELL_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  nyb_make_printable(text);
  append(table, nyb_command_copy_text(text));
}

static void print_cell(const nyb_table *table, int64_t index) {
  const int column = (int)(index % table->columns);
  const bool is_last = column == table->columns - 1;
  const int padding = table->width[column] - text_width(table->cell[index]);
  if (table->to_the_right[column]) {
    printf("%*s%s", padding, "", table->cell[index]);
  } else {
    printf("%s%*s", table->cell[index], is_last ? 0 : padding, "");
  }
  fputs(is_last ? "\n" : "  ", stdout);
}

void nyb_table_print(nyb_table *table) {
  nyb_progress_clear();
  if (table->cells > table->columns) {
    for (int64_t i = 0; i < table->cells; i++) print_cell(table, i);
  }
  nyb_table_destroy(table);
}

void nyb_table_destroy(nyb_table *table) {
  if (table == NULL) return;
  for (int64_t i = 0; i < table->cells; i++) free(table->cell[i]);
  free(table->cell);
  free(table);
}
