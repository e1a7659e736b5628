/* SPDX-License-Identifier: Apache-2.0 */
/* nybble info: what this library and this machine can do. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

#include "commands.h"
#include "support.h"
#include "table.h"

static const char *const levers[] = {"NYBBLE_ISA", "NYBBLE_THREADS", "NYBBLE_PATH", "NYBBLE_GEGLU"};
enum { LEVERS = sizeof levers / sizeof levers[0] };

static error_t parse(int key, char *text, struct argp_state *state) {
  switch (key) {
    case 'j': *(bool *)state->input = true; return 0;
    case ARGP_KEY_ARG:
      argp_error(state, "\"%s\" is too much: info takes no argument", text);
      return 0;
    default: return ARGP_ERR_UNKNOWN;
  }
}

static void print_kernels(void) {
  nyb_table *table = nyb_table_create("<kernel|<operation|<format|<isa|<runs here");
  int64_t running = 0;
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    if (nyb_kernel_at(NULL, i, &kernel) != NYB_OK) continue;
    nyb_table_add(table, "%s", kernel.name);
    nyb_table_add(table, "%s", kernel.operation);
    nyb_table_add(table, "%s", kernel.format);
    nyb_table_add(table, "%s", nyb_isa_name(kernel.isa));
    if (kernel.runs_here) {
      nyb_table_add(table, "yes");
    } else {
      nyb_table_add(table, "no: %s %s", nyb_isa_name(kernel.isa), kernel.reason);
    }
    running += kernel.runs_here;
  }
  nyb_table_print(table);
  printf("%lld kernels, %lld run here\n", (long long)nyb_kernel_count(), (long long)running);
}

static void print_text(const nyb_context *context) {
  printf("nybble     %s\n", nyb_version());
  printf("processor  %s\n", nyb_cpu_model());
  printf("features   %s\n", nyb_cpu_features());
  if (context != NULL) {
    printf("isa        %s\n", nyb_isa_name(nyb_context_isa(context)));
    printf("threads    %lld\n", (long long)nyb_context_threads(context));
  }
  for (int i = 0; i < LEVERS; i++) {
    const char *value = getenv(levers[i]);
    printf("%-14s %s\n", levers[i], value == NULL || value[0] == '\0' ? "(not set)" : value);
  }
  putchar('\n');
  print_kernels();
}

static void print_json(const nyb_context *context) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(json, "version", nyb_version());
  cJSON_AddItemToObject(json, "machine", nyb_json_machine());
  if (context != NULL) {
    cJSON_AddStringToObject(json, "isa", nyb_isa_name(nyb_context_isa(context)));
    cJSON_AddNumberToObject(json, "threads", (double)nyb_context_threads(context));
  }
  cJSON *environment = cJSON_AddObjectToObject(json, "environment");
  for (int i = 0; i < LEVERS; i++) {
    const char *value = getenv(levers[i]);
    if (value == NULL || value[0] == '\0') {
      cJSON_AddNullToObject(environment, levers[i]);
    } else {
      cJSON_AddStringToObject(environment, levers[i], value);
    }
  }
  cJSON *kernels = cJSON_AddArrayToObject(json, "kernels");
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    if (nyb_kernel_at(NULL, i, &kernel) != NYB_OK) continue;
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", kernel.name);
    cJSON_AddStringToObject(item, "operation", kernel.operation);
    cJSON_AddStringToObject(item, "format", kernel.format);
    cJSON_AddStringToObject(item, "isa", nyb_isa_name(kernel.isa));
    cJSON_AddBoolToObject(item, "runs_here", kernel.runs_here);
    cJSON_AddStringToObject(item, "reason", kernel.reason);
    cJSON_AddItemToArray(kernels, item);
  }
  nyb_json_print(json);
}

int nyb_command_info(int argc, char **argv) {
  static const struct argp_option options[] = {
      {.name = "json", .key = 'j', .doc = "Print JSON"},
      {0},
  };
  static const struct argp argp = {
      .options = options,
      .parser = parse,
      .doc =
          "Shows the version, the processor's features, the instruction set and the threads "
          "that a context takes, the environment's levers, and every kernel with whether it "
          "runs here.",
  };
  bool json = false;
  argp_parse(&argp, argc, argv, 0, NULL, &json);
  /* A lever that means nothing fails the context; the rest is worth showing all the same. */
  nyb_context *context = NULL;
  const int status = nyb_command_open(NYB_ISA_AUTO, 0, &context);
  if (json) {
    print_json(context);
  } else {
    print_text(context);
  }
  nyb_context_destroy(context);
  return status;
}
