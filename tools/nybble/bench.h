/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of nybble bench: bench.c reads the options and prints, bench_<operation>.c prepares the
 * data and the calls, bench_common.c measures them. */
#ifndef NYB_BENCH_H
#define NYB_BENCH_H

#include "bandwidth.h"
#include "nybble.h"
#include "options.h"
#include "support.h"
#include "table.h"

enum { NYB_BENCH_MAX_SHAPES = 64, NYB_BENCH_SHAPE_FIELDS = 5 };

typedef struct nyb_bench_shape {
  int64_t field[NYB_BENCH_SHAPE_FIELDS];
} nyb_bench_shape;

typedef struct nyb_bench_settings {
  nyb_bench_shape shapes[NYB_BENCH_MAX_SHAPES];
  int64_t shape_count;
  nyb_width_list widths;
  int64_t group_size, query_len;
  nyb_integer_list lengths; /* of a batch's sequences, the last for all that follow; none: N */
  nyb_dtype dtype;
  nyb_integer_list threads, isas;
  nyb_path path;
  nyb_rounding rounding;
  nyb_rule rule;
  nyb_backend backend;
  int32_t device;  /* CUDA */
  int64_t repeats; /* 0: as many as fit into seconds */
  double seconds;  /* of each measurement */
  bool json;
} nyb_bench_settings;

typedef struct nyb_timing {
  double median_us, min_us, p10_us, p90_us;
  int64_t repeats;
} nyb_timing;

/* One measured call; index counts up from 0 through warm-up and measurement (on the GPU: through a
 * graph). */
typedef nyb_status (*nyb_bench_call)(void *data, int64_t index);

/* The samples are sorted. */
void nyb_bench_summarize(double *samples_us, int64_t count, nyb_timing *timing);

/* ---- Contexts: one for each ISA and number of threads that was asked for ------------------- */

typedef struct nyb_bench_context {
  nyb_context *context;
  int64_t threads;
  nyb_isa isa;
  nyb_backend backend;
  nyb_stream stream;        /* CUDA */
  nyb_bandwidth read, copy; /* 0 where the operation is not held against it */
} nyb_bench_context;

typedef struct nyb_bench_run {
  const nyb_bench_settings *settings;
  nyb_bench_context contexts[NYB_OPTION_LIST_MAX];
  int64_t context_count;
  nyb_context *preparer; /* on the CPU: makes the data */
  cJSON *results;
  nyb_table *table;
} nyb_bench_run;

/* Times calls after a warm-up: on the CPU single ones, on the GPU graphs of many (one for each copy
 * at least), a call's share of each replay; most_replays (0: any number) of them. Returns 0, or 1
 * after a sentence on stderr. */
typedef struct nyb_bench_copies nyb_bench_copies;
int nyb_bench_measure(const nyb_bench_settings *settings, const nyb_bench_context *on,
                      const nyb_bench_copies *copies, int64_t most_replays, nyb_bench_call call,
                      void *data, nyb_timing *timing);

/* Two calls in turn, so that what the machine does meanwhile meets both alike: on the CPU single
 * ones, on the GPU replays of a graph of each, of round_calls (after so many a call comes back to
 * the same data) or more. *ratio is the median of the second's time by the first's before it.
 * Returns as above. */
typedef struct nyb_bench_turn {
  nyb_bench_call call;
  void *data;
  nyb_timing timing; /* out */
} nyb_bench_turn;
int nyb_bench_measure_in_turns(const nyb_bench_settings *settings, const nyb_bench_context *on,
                               int64_t round_calls, nyb_bench_turn turns[2], double *ratio);

/* Sums up count samples of each of two turns, which are sorted; ratios: room for count. */
void nyb_bench_summarize_turns(double *const samples_us[2], double *ratios, int64_t count,
                               nyb_bench_turn turns[2], double *ratio);

/* ---- Memory that is cold ------------------------------------------------------------------ */

/* Copies of one call's data, so many that going round them leaves no cache a chance. */
struct nyb_bench_copies {
  char *memory;
  int64_t copy_bytes, count;
};

/* Copies of at least `bytes` each, on the host; more than 256 MB and twice the last-level cache in
 * all; for the GPU one, which nyb_bench_place_copies() multiplies there. Returns 0, or 1 after a
 * sentence on stderr. */
int nyb_bench_allocate_copies(const nyb_bench_run *run, int64_t bytes, nyb_bench_copies *copies);
/* The last step of preparing copies: on the GPU more than 512 MB and four times the L2 in all. */
int nyb_bench_place_copies(const nyb_bench_run *run, nyb_bench_copies *copies);

/* The GPU's part of the above (bench_device.c). */
int nyb_bench_measure_device(const nyb_bench_settings *settings, const nyb_bench_context *on,
                             const nyb_bench_copies *copies, int64_t most_replays,
                             nyb_bench_call call, void *data, nyb_timing *timing);
int nyb_bench_measure_device_in_turns(const nyb_bench_settings *settings,
                                      const nyb_bench_context *on, int64_t round_calls,
                                      nyb_bench_turn turns[2], double *ratio);
int nyb_bench_measure_device_ceilings(nyb_bandwidth *read, nyb_bandwidth *copy);

/* The copy for the call `index`: always the first where warm, else another one each time, far from
 * the one before. */
char *nyb_bench_copy(const nyb_bench_copies *copies, bool cold, int64_t index);

/* ---- Data and results --------------------------------------------------------------------- */

/* count numbers of a normal distribution, the same ones for the same seed. */
void nyb_bench_random(float *data, int64_t count, uint64_t seed);
/* The same, rounded to dtype. */
int nyb_bench_random_as(nyb_context *context, void *data, nyb_dtype dtype, int64_t count,
                        uint64_t seed);

/* Whether `count` numbers are all finite: a benchmark of garbage is none. */
bool nyb_bench_all_finite(const void *data, nyb_dtype dtype, int64_t count);

/* "1,32,8,128,8192" */
typedef struct nyb_shape_name {
  char text[128];
} nyb_shape_name;
nyb_shape_name nyb_bench_name_shape(const nyb_bench_shape *shape, int fields);

/* Adds what every result has: times, bytes, share of the ceiling. */
void nyb_bench_add_timing(cJSON *result, const nyb_bench_context *context, bool cold,
                          const nyb_timing *timing, int64_t bytes);
void nyb_bench_add_timing_cells(nyb_table *table, const nyb_timing *timing, int64_t bytes,
                                double ceiling_gb_per_s);

/* ---- Operations --------------------------------------------------------------------------- */

typedef struct nyb_bench_operation {
  const char *name;
  const char *columns; /* of the table */
  int shape_fields;
  const char *shape_words;
  const nyb_bench_shape *default_shapes;
  int64_t default_shape_count;
  bool needs_read, needs_copy;
  bool on_cpu, on_cuda;
  int (*run)(nyb_bench_run *run);
} nyb_bench_operation;

extern const nyb_bench_operation nyb_bench_attention;
extern const nyb_bench_operation nyb_bench_geglu;
extern const nyb_bench_operation nyb_bench_quantize;
extern const nyb_bench_operation nyb_bench_overhead;
extern const nyb_bench_operation nyb_bench_append;
extern const nyb_bench_operation nyb_bench_cache_file;
extern const nyb_bench_operation nyb_bench_features;

#endif
