/* SPDX-License-Identifier: Apache-2.0 */
/* nybble verify: every kernel that can run here against the oracle of tests/. */
#include <argp.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "check_device.h"
#include "commands.h"
#include "options.h"
#include "progress.h"
#include "support.h"

typedef struct arguments {
  check_options options;
  bool json;
} arguments;

/* ---- Options ------------------------------------------------------------------------------ */

enum {
  OPTION_QUICK = 256,
  OPTION_ISA,
  OPTION_BACKEND,
  OPTION_DEVICE,
  OPTION_SANITIZER,
  OPTION_OPERATION,
  OPTION_FEATURES,
  OPTION_FORMAT,
  OPTION_JSON
};

static const struct argp_option option_list[] = {
    {"quick", OPTION_QUICK, NULL, 0, "A subset that takes seconds", 0},
    {"isa", OPTION_ISA, "NAME", 0, "Only kernels of scalar, avx2, avx512 or neon", 0},
    {"backend", OPTION_BACKEND, "NAME", 0, "Kernels of this backend: cpu or cuda (cpu)", 0},
    {"device", OPTION_DEVICE, "N", 0, "cuda: the device (0)", 0},
    {"operation", OPTION_OPERATION, "NAME", 0,
     "Only quantize, geglu, attention, attention_merge or, on cuda, append", 0},
    {"features", OPTION_FEATURES, NULL, 0,
     "Only attention, and of it only masks, windows, pages and the like", 0},
    {"sanitizer", OPTION_SANITIZER, NULL, 0,
     "cuda: few cases, each buffer an allocation of its own, for compute-sanitizer", 0},
    {"format", OPTION_FORMAT, "NAME", 0, "Only one stored format, as the report names it: affine4",
     0},
    {"json", OPTION_JSON, NULL, 0, "Print the report as JSON", 0},
    {0},
};

static bool is_format(const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    if (nyb_kernel_at(NULL, i, &kernel) == NYB_OK && strcmp(kernel.format, name) == 0) return true;
  }
  return false;
}

static error_t parse_option(int key, char *value, struct argp_state *state) {
  static const char *const operations[] = {"quantize", "geglu", "attention", "attention_merge",
                                           "append"};
  arguments *args = state->input;
  switch (key) {
    case OPTION_QUICK: args->options.quick = true; break;
    case OPTION_JSON: args->json = true; break;
    case OPTION_ISA: args->options.isa = nyb_parse_isa(state, "--isa", value); break;
    case OPTION_BACKEND:
      args->options.backend = nyb_parse_backend(state, "--backend", value);
      break;
    case OPTION_DEVICE:
      args->options.device = (int32_t)nyb_parse_integer(state, "--device", value, 0, INT32_MAX);
      break;
    case OPTION_SANITIZER: args->options.sanitizer = args->options.quick = true; break;
    case OPTION_OPERATION:
      for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        if (strcmp(value, operations[i]) == 0) args->options.operation = operations[i];
      }
      if (args->options.operation == NULL) {
        argp_error(
            state,
            "--operation %s: it must be quantize, geglu, attention, attention_merge or append",
            value);
      }
      break;
    case OPTION_FEATURES:
      args->options.features = true;
      args->options.operation = "attention";
      break;
    case OPTION_FORMAT:
      if (!is_format(value)) argp_error(state, "--format %s: no kernel has it", value);
      args->options.format = value;
      break;
    case ARGP_KEY_ARG: argp_error(state, "%s: verify takes no argument", value); break;
    case ARGP_KEY_END:
      if (args->options.backend == NYB_BACKEND_CUDA && args->options.isa != NYB_ISA_AUTO) {
        argp_error(state, "--isa does not go with --backend cuda");
      }
      if (args->options.backend == NYB_BACKEND_CPU && args->options.sanitizer) {
        argp_error(state, "--sanitizer goes with --backend cuda");
      }
      break;
    default: return ARGP_ERR_UNKNOWN;
  }
  return 0;
}

/* ---- Progress and reports ----------------------------------------------------------------- */

static void show_progress(void *user_data, const char *operation, int64_t done, int64_t total) {
  (void)user_data;
  nyb_progress_show("%s: %lld of %lld", operation, (long long)done, (long long)total);
}

/* How many kernels were not asked for, and why, in a line; none where all were. */
static void print_left_out(const check_run *run) {
  static const char *const reasons[] = {"backend", "ISA", "operation", "format"};
  const char *words = "not asked for: ";
  for (size_t r = 0; r < sizeof reasons / sizeof reasons[0]; r++) {
    int64_t count = 0;
    for (int64_t i = 0; i < run->tally_count; i++) {
      const char *left_out = run->tallies[i].left_out;
      if (left_out != NULL && strcmp(left_out, reasons[r]) == 0) count++;
    }
    if (count == 0) continue;
    printf("%s%lld kernels of another %s", words, (long long)count, reasons[r]);
    words = ", ";
  }
  if (words[0] == ',') putchar('\n');
}

static void print_text(const check_run *run) {
  nyb_progress_clear();
  printf("%-36s %8s %8s %8s  %s\n", "kernel", "passed", "failed", "skipped", "error/tolerance");
  for (int64_t i = 0; i < run->tally_count; i++) {
    const check_tally *tally = &run->tallies[i];
    if (tally->left_out != NULL) continue;
    printf("%-36s %8lld %8lld %8lld  ", tally->kernel.name, (long long)tally->passed,
           (long long)tally->failed, (long long)tally->skipped);
    if (tally->skipped != 0) {
      printf("skipped: %s\n", tally->skip_reason);
    } else if (tally->rms_error > 0) {
      printf("%-16.2f relative RMS error %.1e\n", tally->worst, tally->rms_error);
    } else if (tally->worst > 0) {
      printf("%.2f\n", tally->worst);
    } else {
      printf("bit for bit\n");
    }
  }
  for (int64_t i = 0; i < run->failures_kept; i++) {
    printf("FAILED %s\n", run->failures[i]);
  }
  if (run->failed > run->failures_kept) {
    printf("... and %lld more\n", (long long)(run->failed - run->failures_kept));
  }
  print_left_out(run);
  printf("%lld passed, %lld failed, %lld skipped\n", (long long)run->passed, (long long)run->failed,
         (long long)run->skipped);
}

static void add_kernel(cJSON *kernels, const check_tally *tally) {
  cJSON *entry = cJSON_CreateObject();
  cJSON_AddStringToObject(entry, "name", tally->kernel.name);
  cJSON_AddStringToObject(entry, "operation", tally->kernel.operation);
  cJSON_AddStringToObject(entry, "format", tally->kernel.format);
  cJSON_AddStringToObject(entry, "isa", nyb_isa_name(tally->kernel.isa));
  cJSON_AddNumberToObject(entry, "passed", (double)tally->passed);
  cJSON_AddNumberToObject(entry, "failed", (double)tally->failed);
  cJSON_AddNumberToObject(entry, "skipped", (double)tally->skipped);
  if (tally->skipped != 0) cJSON_AddStringToObject(entry, "reason", tally->skip_reason);
  if (tally->left_out != NULL) cJSON_AddStringToObject(entry, "left_out", tally->left_out);
  nyb_json_add_number(entry, "worst_error_of_tolerance", tally->worst);
  nyb_json_add_number(entry, "relative_rms_error", tally->rms_error);
  cJSON_AddItemToArray(kernels, entry);
}

static void print_json(const check_run *run) {
  cJSON *report = cJSON_CreateObject();
  cJSON_AddStringToObject(report, "version", nyb_version());
  cJSON_AddStringToObject(report, "backend", nyb_backend_name(run->options.backend));
  if (run->options.backend == NYB_BACKEND_CUDA) {
    cJSON_AddStringToObject(report, "device", device_describe()->name);
  }
  cJSON_AddBoolToObject(report, "quick", run->options.quick);
  cJSON *kernels = cJSON_AddArrayToObject(report, "kernels");
  for (int64_t i = 0; i < run->tally_count; i++) {
    const check_tally *tally = &run->tallies[i];
    const bool other_backend = tally->left_out != NULL && strcmp(tally->left_out, "backend") == 0;
    if (!other_backend) add_kernel(kernels, tally);
  }
  cJSON *failures = cJSON_AddArrayToObject(report, "failures");
  for (int64_t i = 0; i < run->failures_kept; i++) {
    cJSON_AddItemToArray(failures, cJSON_CreateString(run->failures[i]));
  }
  cJSON_AddNumberToObject(report, "passed", (double)run->passed);
  cJSON_AddNumberToObject(report, "failed", (double)run->failed);
  cJSON_AddNumberToObject(report, "skipped", (double)run->skipped);
  nyb_json_print(report);
}

int nyb_command_verify(int argc, char **argv) {
  static const struct argp parser = {
      .options = option_list,
      .parser = parse_option,
      .doc =
          "Checks every kernel that can run here against a double-precision oracle, over "
          "adversarial inputs.\vA kernel that cannot run here is counted as skipped, with the "
          "reason; one that was not asked for is left out of the table and the counts. The exit "
          "code is 1 where a check failed or nothing could be checked.",
  };
  arguments args = {.options = {.progress = show_progress}};
  argp_parse(&parser, argc, argv, 0, NULL, &args);
  check_run *run = check_all(&args.options);
  if (run == NULL) {
    return nyb_command_failed("%s", check_error()[0] != '\0' ? check_error() : "out of memory");
  }
  if (args.json) {
    print_json(run);
  } else {
    print_text(run);
  }
  const bool good = run->failed == 0 && run->passed > 0;
  check_free(run);
  return good ? 0 : 1;
}
