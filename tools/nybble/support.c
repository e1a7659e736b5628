/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "support.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "progress.h"

static void print_error(const char *format, va_list arguments) {
  char text[4096];
  vsnprintf(text, sizeof text, format, arguments);
  nyb_make_printable(text);
  nyb_progress_clear();
  fprintf(stderr, "nybble: error: %s\n", text);
}

int nyb_command_failed(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print_error(format, arguments);
  va_end(arguments);
  return NYB_EXIT_FAILED;
}

int nyb_command_misused(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print_error(format, arguments);
  va_end(arguments);
  return NYB_EXIT_USAGE;
}

void nyb_make_printable(char *text) {
  for (unsigned char *c = (unsigned char *)text; *c != '\0'; c++) {
    const bool second_set = c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0; /* U+0080 to U+009F */
    if (second_set) *c++ = '?';
    if (second_set || *c < 0x20 || *c == 0x7f) *c = '?';
  }
}

void *nyb_command_allocate(int64_t bytes) {
  const int64_t alignment = NYB_WORKSPACE_ALIGNMENT;
  void *memory = NULL;
  if (bytes >= 0 && bytes < INT64_MAX / 2) {
    const size_t rounded = (size_t)((bytes + alignment) / alignment * alignment);
    memory = aligned_alloc((size_t)alignment, rounded);
    if (memory != NULL) memset(memory, 0, rounded);
  }
  if (memory == NULL) {
    exit(nyb_command_failed("out of memory: %lld bytes were not to be had", (long long)bytes));
  }
  return memory;
}

char *nyb_command_copy_text(const char *text) {
  const size_t bytes = strlen(text) + 1;
  return memcpy(nyb_command_allocate((int64_t)bytes), text, bytes);
}

int nyb_command_check_memory(int64_t bytes, const char *purpose) {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
  int64_t total_bytes;
  if (page_bytes <= 0 || pages <= 0 || !nyb_multiply(page_bytes, pages, &total_bytes)) return 0;
  /* The system and its other programs need some of it, too. */
  if (bytes <= total_bytes / 10 * 9) return 0;
  return nyb_command_failed("%s would take %.1f GB of memory; this machine has %.1f GB", purpose,
                            (double)bytes * 1e-9, (double)total_bytes * 1e-9);
}

int64_t nyb_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool nyb_multiply(int64_t a, int64_t b, int64_t *product) {
  if (b != 0 && a > INT64_MAX / b) return false;
  *product = a * b;
  return true;
}

int nyb_command_open(nyb_isa isa, int64_t threads, nyb_context **context) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.isa = isa;
  options.threads = threads;
  if (nyb_context_create(&options, context) != NYB_OK) {
    return nyb_command_failed("%s", nyb_last_error());
  }
  return 0;
}

const char *nyb_dtype_name(nyb_dtype dtype) {
  switch (dtype) {
    case NYB_F32: return "f32";
    case NYB_F16: return "f16";
    case NYB_BF16: return "bf16";
  }
  return "?";
}

const char *nyb_path_name(nyb_path path) {
  switch (path) {
    case NYB_PATH_AUTO: return "auto";
    case NYB_PATH_FUSED: return "fused";
    case NYB_PATH_COMPAT: return "compat";
  }
  return "?";
}

/* ---- JSON --------------------------------------------------------------------------------- */

void nyb_json_add_number(cJSON *object, const char *name, double value) {
  if (!isfinite(value)) {
    cJSON_AddNullToObject(object, name);
    return;
  }
  char digits[32];
  snprintf(digits, sizeof digits, "%.6g", value);
  cJSON_AddRawToObject(object, name, digits);
}

void nyb_json_add_integers(cJSON *object, const char *name, const int64_t *values, int64_t count) {
  cJSON *array = cJSON_AddArrayToObject(object, name);
  for (int64_t i = 0; i < count; i++) {
    cJSON_AddItemToArray(array, cJSON_CreateNumber((double)values[i]));
  }
}

const char *nyb_cpu_model(void) {
  static char model[128] = "unknown";
  FILE *file = fopen("/proc/cpuinfo", "r");
  if (file == NULL) return model;
  char line[256];
  while (fgets(line, sizeof line, file) != NULL) {
    const char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) == 0 && colon != NULL && colon[1] == ' ') {
      snprintf(model, sizeof model, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
      break;
    }
  }
  fclose(file);
  return model;
}

cJSON *nyb_json_machine(void) {
  cJSON *machine = cJSON_CreateObject();
  cJSON_AddStringToObject(machine, "cpu", nyb_cpu_model());
  cJSON_AddStringToObject(machine, "features", nyb_cpu_features());
  cJSON_AddNumberToObject(machine, "processors", (double)sysconf(_SC_NPROCESSORS_ONLN));
  return machine;
}

void nyb_json_print(cJSON *json) {
  nyb_progress_clear();
  char *text = cJSON_Print(json);
  cJSON_Delete(json);
  if (text == NULL) exit(nyb_command_failed("out of memory while writing JSON"));
  puts(text);
  cJSON_free(text);
}
