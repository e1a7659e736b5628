/* SPDX-License-Identifier: Apache-2.0 */
/* What the subcommands share: failing, memory, time, contexts, JSON. */
#ifndef NYB_SUPPORT_H
#define NYB_SUPPORT_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

#define NYB_EXIT_FAILED 1
#define NYB_EXIT_USAGE 2

/* Ends the progress line, prints "nybble: error: ..." to stderr and returns NYB_EXIT_FAILED. */
int nyb_command_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for what the arguments ask for in vain; returns NYB_EXIT_USAGE. */
int nyb_command_misused(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Makes control characters '?': a file's names must not drive the terminal. Done by what prints
 * errors, tables and progress; others who print a file's words call it first. */
void nyb_make_printable(char *text);

/* Memory aligned to NYB_WORKSPACE_ALIGNMENT, zeroed and so in place; ends the command when there is
 * none. Released with free(). */
void *nyb_command_allocate(int64_t bytes);

/* A copy of text that free() releases. */
char *nyb_command_copy_text(const char *text);

/* Whether the machine has so much memory; a sentence on stderr if not. */
int nyb_command_check_memory(int64_t bytes, const char *purpose);

/* A clock that only runs forward. */
int64_t nyb_now_ns(void);

/* Puts the product of two counts of 0 or more into *product; false where it exceeds int64. */
bool nyb_multiply(int64_t a, int64_t b, int64_t *product);

/* A context, or NYB_EXIT_FAILED with its sentence on stderr. */
int nyb_command_open(nyb_isa isa, int64_t threads, nyb_context **context);

/* "bf16", "f16", "f32". */
const char *nyb_dtype_name(nyb_dtype dtype);
const char *nyb_path_name(nyb_path path);

/* Adds a number rounded to six significant digits, or null for NaN and infinity. */
void nyb_json_add_number(cJSON *object, const char *name, double value);
void nyb_json_add_integers(cJSON *object, const char *name, const int64_t *values, int64_t count);

/* The processor, its features and how many of them this process may use. */
cJSON *nyb_json_machine(void);
const char *nyb_cpu_model(void);

/* Prints to stdout and deletes. */
void nyb_json_print(cJSON *json);

#endif
