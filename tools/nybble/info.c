/* SPDX-License-Identifier: Apache-2.0 */
/* nybble info: what this library and this machine can do. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

#include "commands.h"
#include "support.h"
#include "table.h"

static const char *const levers[] = {"NYBBLE_ISA",      "NYBBLE_THREADS", "NYBBLE_PATH",
                                     "NYBBLE_GEGLU",    "NYBBLE_LIBCUDA", "NYBBLE_NVRTC",
                                     "NYBBLE_CACHE_DIR"};
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
    } else if (kernel.isa == NYB_ISA_CUDA) {
      nyb_table_add(table, "no: see cuda above");
    } else {
      nyb_table_add(table, "no: %s %s", nyb_isa_name(kernel.isa), kernel.reason);
    }
    running += kernel.runs_here;
  }
  nyb_table_print(table);
  printf("%lld kernels, %lld run here\n", (long long)nyb_kernel_count(), (long long)running);
}

/* As CUDA counts: 13020 is 13.2. */
static void version_text(int32_t version, char text[16]) {
  snprintf(text, 16, "%d.%d", (int)version / 1000, (int)version % 1000 / 10);
}

static void print_cuda(void) {
  nyb_cuda_info info = NYB_CUDA_INFO_INIT;
  char version[16];
  if (nyb_cuda_get_info(0, &info) != NYB_OK) return;
  printf("cuda       %s%s\n", info.available ? "available" : "not available: ", info.reason);
  if (info.driver_version != 0) {
    version_text(info.driver_version, version);
    printf("driver     of CUDA %s\n", version);
  }
  for (int32_t device = 0; device < info.device_count; device++) {
    nyb_cuda_info of_device = NYB_CUDA_INFO_INIT;
    if (nyb_cuda_get_info(device, &of_device) != NYB_OK) continue;
    printf("device %-3d %s: compute capability %d.%d, %d multiprocessors, %.1f GiB\n", (int)device,
           of_device.device_name, (int)of_device.compute_capability / 10,
           (int)of_device.compute_capability % 10, (int)of_device.multiprocessors,
           (double)of_device.memory_bytes / (1 << 30));
  }
  if (info.nvrtc_version != 0) {
    version_text(info.nvrtc_version, version);
    printf("nvrtc      %s, %s\n", version, info.nvrtc_library);
  }
  if (info.cache_directory[0] == '\0') {
    printf("cache      off\n");
  } else {
    printf("cache      %s: %lld compiled kernels, %.1f MB\n", info.cache_directory,
           (long long)info.cached_kernels, (double)info.cached_bytes / 1e6);
  }
}

static void add_cuda(cJSON *json) {
  nyb_cuda_info info = NYB_CUDA_INFO_INIT;
  if (nyb_cuda_get_info(0, &info) != NYB_OK) return;
  cJSON *cuda = cJSON_AddObjectToObject(json, "cuda");
  cJSON_AddBoolToObject(cuda, "available", info.available);
  cJSON_AddStringToObject(cuda, "reason", info.reason);
  cJSON_AddNumberToObject(cuda, "driver_version", info.driver_version);
  cJSON_AddNumberToObject(cuda, "nvrtc_version", info.nvrtc_version);
  cJSON_AddStringToObject(cuda, "nvrtc_library", info.nvrtc_library);
  cJSON_AddStringToObject(cuda, "cache_directory", info.cache_directory);
  cJSON_AddNumberToObject(cuda, "cached_kernels", (double)info.cached_kernels);
  cJSON_AddNumberToObject(cuda, "cached_bytes", (double)info.cached_bytes);
  cJSON *devices = cJSON_AddArrayToObject(cuda, "devices");
  for (int32_t device = 0; device < info.device_count; device++) {
    nyb_cuda_info of_device = NYB_CUDA_INFO_INIT;
    if (nyb_cuda_get_info(device, &of_device) != NYB_OK) continue;
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", of_device.device_name);
    cJSON_AddNumberToObject(item, "compute_capability", of_device.compute_capability);
    cJSON_AddNumberToObject(item, "multiprocessors", of_device.multiprocessors);
    cJSON_AddNumberToObject(item, "memory_bytes", (double)of_device.memory_bytes);
    cJSON_AddItemToArray(devices, item);
  }
}

static void print_text(const nyb_context *context) {
  printf("nybble     %s\n", nyb_version());
  printf("processor  %s\n", nyb_cpu_model());
  printf("features   %s\n", nyb_cpu_features());
  if (context != NULL) {
    printf("isa        %s\n", nyb_isa_name(nyb_context_isa(context)));
    printf("threads    %lld\n", (long long)nyb_context_threads(context));
  }
  print_cuda();
  for (int i = 0; i < LEVERS; i++) {
    const char *value = getenv(levers[i]);
    printf("%-16s %s\n", levers[i], value == NULL || value[0] == '\0' ? "(not set)" : value);
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
  add_cuda(json);
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
          "that a context takes, CUDA's driver, devices, compiler and cache of compiled kernels, "
          "the environment's levers, and every kernel with whether it runs here.",
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
