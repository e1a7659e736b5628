/* SPDX-License-Identifier: Apache-2.0 */
/* The command `nybble`: picks the subcommand. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "nybble.h"
#include "support.h"

typedef struct subcommand {
  const char *name;
  int (*run)(int argc, char **argv);
  const char *summary;
} subcommand;

static const subcommand subcommands[] = {
    {"info", nyb_command_info, "what this library and this machine can do"},
    {"verify", nyb_command_verify, "check every kernel that runs here against the oracle"},
    {"replay", nyb_command_replay, "attend over a recorded trace as a decoder would"},
    {"bench", nyb_command_bench, "measure attention, geglu, quantize and the call overhead"},
    {"quantize", nyb_command_quantize, "quantize tensors of a safetensors file"},
    {"cache", nyb_command_cache, "show or convert a saved cache, mlx-lm's too"},
};
enum { SUBCOMMANDS = sizeof subcommands / sizeof subcommands[0] };

static void print_subcommands(FILE *stream) {
  fputs("Subcommands:\n", stream);
  for (int i = 0; i < SUBCOMMANDS; i++) {
    fprintf(stream, "  %-10s %s\n", subcommands[i].name, subcommands[i].summary);
  }
}

static const subcommand *find_subcommand(const char *name) {
  for (int i = 0; i < SUBCOMMANDS; i++) {
    if (strcmp(subcommands[i].name, name) == 0) return &subcommands[i];
  }
  fprintf(stderr, "nybble: \"%s\" is no subcommand\n", name);
  print_subcommands(stderr);
  exit(NYB_EXIT_USAGE);
}

static void print_version(FILE *stream, struct argp_state *state) {
  (void)state;
  fprintf(stream, "nybble %s\n", nyb_version());
}

/* Stops at the first word that is no option: what follows belongs to the subcommand. */
static error_t parse(int key, char *text, struct argp_state *state) {
  switch (key) {
    case ARGP_KEY_ARG:
      (void)text;
      *(int *)state->input = state->next - 1;
      state->next = state->argc;
      return 0;
    case ARGP_KEY_NO_ARGS:
      fputs("nybble: a subcommand is missing\n", stderr);
      print_subcommands(stderr);
      exit(NYB_EXIT_USAGE);
    default: return ARGP_ERR_UNKNOWN;
  }
}

static char *add_subcommands(int key, const char *text, void *input) {
  (void)input;
  if (key != ARGP_KEY_HELP_POST_DOC) return (char *)text;
  enum { BYTES = 1024 };
  char *help = nyb_command_allocate(BYTES);
  size_t used = (size_t)snprintf(help, BYTES, "Subcommands:\n");
  for (int i = 0; i < SUBCOMMANDS; i++) {
    used += (size_t)snprintf(help + used, BYTES - used, "  %-10s %s\n", subcommands[i].name,
                             subcommands[i].summary);
  }
  snprintf(help + used, BYTES - used,
           "\n'nybble SUBCOMMAND --help' shows a subcommand's options. Exit status: 0, 1 for a "
           "failed check or operation, 2 for bad usage.");
  return help;
}

int main(int argc, char **argv) {
  argp_err_exit_status = NYB_EXIT_USAGE;
  argp_program_version_hook = print_version;
  static const struct argp argp = {
      .parser = parse,
      .args_doc = "SUBCOMMAND [ARGUMENT...]",
      .doc = "Attention straight over a quantized KV cache.\v",
      .help_filter = add_subcommands,
  };
  int index = 0;
  argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &index);
  const subcommand *chosen = find_subcommand(argv[index]);

  char name[64];
  snprintf(name, sizeof name, "nybble %s", chosen->name);
  argv[index] = name;
  int status = chosen->run(argc - index, argv + index);
  if (fflush(stdout) != 0 || ferror(stdout)) {
    status = nyb_command_failed("the output could not be written");
  }
  return status;
}
