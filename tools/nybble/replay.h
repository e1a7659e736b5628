/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of nybble replay: replay.c reads the options, replay_run.c runs one configuration of
 * the cache, replay_report.c prints. */
#ifndef NYB_REPLAY_H
#define NYB_REPLAY_H

#include "nybble.h"
#include "options.h"
#include "trace.h"

typedef struct nyb_replay_settings {
  const char *file;
  nyb_width_list widths; /* none: the comparison of all */
  int64_t group_size;    /* 0: the trace decides */
  nyb_path path;
  nyb_rounding rounding;
  nyb_backend backend;
  int32_t device; /* CUDA */
  int64_t threads;
  int64_t prompt_tokens;  /* -1: the trace's own */
  int64_t steps;          /* 0: all that the trace has behind the prompt */
  int64_t compared_steps; /* at most */
  nyb_dtype output_dtype; /* 0: the trace's own */
  bool show_layers, json;
  bool without_groups; /* no group size divides the rows: only the 16-bit cache is compared */
} nyb_replay_settings;

/* What is replayed: a trace, cut into a prompt and steps, with the right answer for each step. */
typedef struct nyb_replay_task {
  const nyb_trace *trace;
  int64_t prompt_tokens, steps;
  int64_t compared_steps; /* in which both paths run */
  nyb_dtype output_dtype;
  double **reference; /* [layer]: [step][query head][value_dim] */
} nyb_replay_task;

/* How far outputs are from the reference. */
typedef struct nyb_replay_error {
  double relative_l2; /* |out - reference| / |reference|, over all outputs together */
  double max_abs;
  double min_cosine; /* of a step's and head's row with the reference's */
} nyb_replay_error;

/* How far the other path's outputs are from those of the path that was measured. */
typedef struct nyb_replay_agreement {
  bool known;
  char reason[192]; /* why not known */
  int64_t outputs, bit_equal;
  double max_abs;
  double max_row_ulps; /* the largest difference, in units in the last place of its row's largest */
  double other_median_us;
} nyb_replay_agreement;

/* Of one layer, or of all together. */
typedef struct nyb_replay_measure {
  int64_t bytes_per_token, bytes_per_token_16bit;
  nyb_replay_error error;
  nyb_replay_agreement agreement;
  double median_us, total_us; /* attention of one step, and of all steps */
  double append_median_us;
  double total_gb; /* cache bytes read by the attention of all steps */
} nyb_replay_measure;

typedef struct nyb_replay_result {
  nyb_width width;
  nyb_plan plan; /* of the first layer */
  nyb_replay_measure all;
  nyb_replay_measure *layers; /* [layer_count] */
} nyb_replay_result;

/* Runs one configuration. Returns 0, or 1 after a sentence on stderr. */
int nyb_replay_run(nyb_context *context, const nyb_replay_settings *settings,
                   const nyb_replay_task *task, nyb_width width, nyb_replay_result *result);

void nyb_replay_print_text(const nyb_context *context, const nyb_replay_settings *settings,
                           const nyb_replay_task *task, const nyb_replay_result *results,
                           int64_t count);
void nyb_replay_print_json(const nyb_context *context, const nyb_replay_settings *settings,
                           const nyb_replay_task *task, const nyb_replay_result *results,
                           int64_t count);

#endif
