/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring on the GPU: graphs of many calls, replayed between events; memory that is cold; and
 * what reading and copying give, from which the shares are taken. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "check_device.h"
#include "placement.h"
#include "progress.h"
#include "statistics.h"

static int library_failed(void) { return nyb_command_failed("%s", nyb_last_error()); }

/* ---- Memory -----------------------------------------------------------------------------------
 */

/* More than three times the L2, and a good part of a gigabyte. */
static int64_t cold_bytes(void) {
  const int64_t least = 512 * 1024 * 1024, l2_bytes = device_describe()->l2_bytes;
  return 4 * l2_bytes > least ? 4 * l2_bytes : least;
}

int nyb_bench_place_copies(const nyb_bench_run *run, nyb_bench_copies *copies) {
  if (run->settings->backend == NYB_BACKEND_CPU) return 0;
  enum { MOST_COPIES = 4096 };
  int64_t count = (cold_bytes() + copies->copy_bytes - 1) / copies->copy_bytes;
  if (count < 2) count = 2;
  if (count > MOST_COPIES) count = MOST_COPIES;
  char *device = device_allocate(count * copies->copy_bytes);
  bool good = device != NULL && device_upload(device, copies->memory, copies->copy_bytes, NULL);
  for (int64_t i = 1; i < count && good; i++) {
    good = device_copy(device + i * copies->copy_bytes, device, copies->copy_bytes, NULL);
  }
  good = good && device_synchronize(NULL);
  free(copies->memory);
  copies->memory = device;
  copies->count = count;
  return good ? 0 : nyb_device_failed();
}

/* ---- Graphs of calls ----------------------------------------------------------------------------
 */

/* Whole rounds of calls, so that every copy has its turn and none is short of company; fewer, but
 * two calls, where they take long. */
static int64_t calls_of_graph(int64_t round_calls, double call_us) {
  enum { LEAST = 32, MOST_US = 40000 };
  const int64_t calls = (LEAST + round_calls - 1) / round_calls * round_calls;
  const int64_t most = (int64_t)(MOST_US / call_us);
  return calls <= most ? calls : most < 2 ? 2 : most;
}

/* The first calls compile, load and allocate: they run outside of the graph. Then one is timed. */
static int run_eagerly(const nyb_bench_context *on, nyb_bench_call call, void *data,
                       device_event *const events[2], double *time_us) {
  if (call(data, 0) != NYB_OK) return library_failed();
  if (!device_event_record(events[0], on->stream)) return nyb_device_failed();
  if (call(data, 1) != NYB_OK) return library_failed();
  return device_event_record(events[1], on->stream) &&
                 device_elapsed_us(events[0], events[1], time_us)
             ? 0
             : nyb_device_failed();
}

static device_graph *capture(const nyb_bench_context *on, nyb_bench_call call, void *data,
                             int64_t calls, int *status) {
  if (!device_synchronize(on->stream) || !device_capture_begin(on->stream)) {
    *status = nyb_device_failed();
    return NULL;
  }
  for (int64_t i = 0; i < calls && *status == 0; i++) {
    if (call(data, i) != NYB_OK) *status = library_failed();
  }
  device_graph *graph = device_capture_end(on->stream);
  if (graph == NULL && *status == 0) *status = nyb_device_failed();
  return graph;
}

static bool replay(const nyb_bench_context *on, device_graph *graph, device_event *const events[2],
                   double *time_us) {
  return device_event_record(events[0], on->stream) && device_graph_launch(graph, on->stream) &&
         device_event_record(events[1], on->stream) &&
         device_elapsed_us(events[0], events[1], time_us);
}

typedef struct graph_of_calls {
  device_graph *graph;
  int64_t calls;
} graph_of_calls;

static int prepare_graph(const nyb_bench_context *on, int64_t round_calls, nyb_bench_call call,
                         void *data, device_event *const events[2], graph_of_calls *graph) {
  double call_us = 0;
  int status = run_eagerly(on, call, data, events, &call_us);
  if (status != 0) return status;
  graph->calls = calls_of_graph(round_calls, call_us);
  graph->graph = capture(on, call, data, graph->calls, &status);
  return status;
}

enum { WARM_UP_REPLAYS = 3, LEAST_REPLAYS = 5, MOST_REPLAYS = 10000 };

/* Replays graph_count graphs in turn; samples_us[g] takes a call's share of each replay, *count how
 * many there are of each. */
static bool replay_in_turn(const nyb_bench_settings *settings, const nyb_bench_context *on,
                           const graph_of_calls *graphs, int graph_count,
                           device_event *const events[2], int64_t most, double *const *samples_us,
                           int64_t *count) {
  bool good = true;
  double ignored_us;
  for (int i = 0; i < WARM_UP_REPLAYS * graph_count && good; i++) {
    good = replay(on, graphs[i % graph_count].graph, events, &ignored_us);
  }
  const int64_t begin_ns = nyb_now_ns(), limit_ns = (int64_t)(settings->seconds * 1e9);
  for (*count = 0; good && *count < most; ++*count) {
    const bool over = nyb_now_ns() - begin_ns > limit_ns;
    if (settings->repeats == 0 && *count >= LEAST_REPLAYS && over) break;
    for (int g = 0; g < graph_count && good; g++) {
      double *sample_us = &samples_us[g][*count];
      good = replay(on, graphs[g].graph, events, sample_us);
      *sample_us /= (double)graphs[g].calls;
    }
  }
  return good;
}

/* Of all that are asked for, what there is room for. */
static int64_t most_samples(const nyb_bench_settings *settings) {
  const int64_t repeats = settings->repeats;
  return repeats > 0 && repeats < MOST_REPLAYS ? repeats : MOST_REPLAYS;
}

static int measure_graph(const nyb_bench_settings *settings, const nyb_bench_context *on,
                         const graph_of_calls *graph, device_event *const events[2],
                         int64_t most_replays, nyb_timing *timing) {
  double *samples_us = nyb_command_allocate(MOST_REPLAYS * (int64_t)sizeof *samples_us);
  int64_t most = most_samples(settings), count = 0;
  if (most_replays > 0 && most > most_replays - WARM_UP_REPLAYS) {
    most = most_replays - WARM_UP_REPLAYS;
  }
  const bool good = replay_in_turn(settings, on, graph, 1, events, most, &samples_us, &count);
  if (good) nyb_bench_summarize(samples_us, count, timing);
  free(samples_us);
  return good ? 0 : nyb_device_failed();
}

static int measure_graphs_in_turn(const nyb_bench_settings *settings, const nyb_bench_context *on,
                                  const graph_of_calls graphs[2], device_event *const events[2],
                                  nyb_bench_turn turns[2], double *ratio) {
  double *samples_us = nyb_command_allocate(3 * MOST_REPLAYS * (int64_t)sizeof *samples_us);
  double *const of_turn[2] = {samples_us, samples_us + MOST_REPLAYS};
  double *ratios = samples_us + 2 * MOST_REPLAYS;
  int64_t count = 0;
  const bool good =
      replay_in_turn(settings, on, graphs, 2, events, most_samples(settings), of_turn, &count);
  if (good) nyb_bench_summarize_turns(of_turn, ratios, count, turns, ratio);
  free(samples_us);
  return good ? 0 : nyb_device_failed();
}

int nyb_bench_measure_device(const nyb_bench_settings *settings, const nyb_bench_context *on,
                             const nyb_bench_copies *copies, int64_t most_replays,
                             nyb_bench_call call, void *data, nyb_timing *timing) {
  device_event *const events[2] = {device_event_create(), device_event_create()};
  graph_of_calls graph = {0};
  const int64_t round_calls = copies == NULL ? 1 : copies->count;
  int status = events[0] != NULL && events[1] != NULL
                   ? prepare_graph(on, round_calls, call, data, events, &graph)
                   : nyb_device_failed();
  if (status == 0) status = measure_graph(settings, on, &graph, events, most_replays, timing);
  device_graph_destroy(graph.graph);
  device_event_destroy(events[0]);
  device_event_destroy(events[1]);
  return status;
}

int nyb_bench_measure_device_in_turns(const nyb_bench_settings *settings,
                                      const nyb_bench_context *on, int64_t round_calls,
                                      nyb_bench_turn turns[2], double *ratio) {
  device_event *const events[2] = {device_event_create(), device_event_create()};
  graph_of_calls graphs[2] = {{0}};
  int status = events[0] != NULL && events[1] != NULL ? 0 : nyb_device_failed();
  for (int i = 0; i < 2 && status == 0; i++) {
    status = prepare_graph(on, round_calls, turns[i].call, turns[i].data, events, &graphs[i]);
  }
  if (status == 0) status = measure_graphs_in_turn(settings, on, graphs, events, turns, ratio);
  for (int i = 0; i < 2; i++) {
    device_graph_destroy(graphs[i].graph);
    device_event_destroy(events[i]);
  }
  return status;
}

/* ---- Ceilings -----------------------------------------------------------------------------------
 */

/* Each thread adds up eight 16-byte loads a turn, `step` bytes apart, in a block that starts
 * `stride` bytes behind the one before, and stores the sum only where it is a number that it never
 * is: so no load can be left out. */
static const char read_ptx[] =
    ".version 7.4\n"
    ".target sm_80\n"
    ".address_size 64\n"
    ".visible .entry read_memory(.param .u64 data, .param .u64 turns, .param .u64 sink,\n"
    "                            .param .u64 step_bytes, .param .u64 stride_bytes) {\n"
    "  .reg .pred more, odd;\n"
    "  .reg .b32 index, sum, a<8>, b<8>, c<8>, d<8>;\n"
    "  .reg .b64 at, left, step, block, offset, to;\n"
    "  ld.param.u64 at, [data];\n"
    "  ld.param.u64 left, [turns];\n"
    "  ld.param.u64 step, [step_bytes];\n"
    "  ld.param.u64 offset, [stride_bytes];\n"
    "  mov.u32 index, %ctaid.x;\n"
    "  cvt.u64.u32 block, index;\n"
    "  mad.lo.u64 at, block, offset, at;\n"
    "  mov.u32 index, %tid.x;\n"
    "  mul.wide.u32 offset, index, 16;\n"
    "  add.u64 at, at, offset;\n"
    "  mov.u32 sum, 0;\n"
    "turn:\n"
#define LOAD(i)                                                        \
  "  ld.global.nc.L1::no_allocate.v4.u32 {a" i ", b" i ", c" i ", d" i \
  "}, [at];\n"                                                         \
  "  add.u64 at, at, step;\n"
    LOAD("0") LOAD("1") LOAD("2") LOAD("3") LOAD("4") LOAD("5") LOAD("6") LOAD("7")
#undef LOAD
#define ADD(i)                                                       \
  "  add.u32 a" i ", a" i ", b" i ";\n  add.u32 c" i ", c" i ", d" i \
  ";\n"                                                              \
  "  add.u32 a" i ", a" i ", c" i ";\n  add.u32 sum, sum, a" i ";\n"
        ADD("0") ADD("1") ADD("2") ADD("3") ADD("4") ADD("5") ADD("6") ADD("7")
#undef ADD
            "  sub.u64 left, left, 1;\n"
            "  setp.ne.u64 more, left, 0;\n"
            "  @more bra turn;\n"
            "  setp.eq.u32 odd, sum, 0x13579bdf;\n"
            "  ld.param.u64 to, [sink];\n"
            "  @odd st.global.u32 [to], sum;\n"
            "  ret;\n"
            "}\n";

enum { READ_THREADS = 512, READ_BYTES_A_TURN = READ_THREADS * 16 * 8, PASSES = 9 };

/* Half of what is free at most, 4 GB at most. */
static int64_t ceiling_bytes(void) {
  const int64_t most = INT64_C(4) << 30, free_bytes = device_free_bytes();
  return free_bytes < 0 || free_bytes / 2 > most ? most : free_bytes / 2;
}

typedef struct ceiling {
  char *memory;
  int64_t bytes;
  device_program *program;
  device_event *events[2];
} ceiling;

/* in_runs: each block reads one run of memory, else all of them together move through it. */
static bool read_once(const ceiling *c, int64_t blocks, int64_t turns, bool in_runs,
                      double *time_us) {
  void *data = c->memory, *sink = c->memory;
  int64_t step = READ_THREADS * 16, stride = turns * READ_BYTES_A_TURN;
  if (!in_runs) {
    stride = step;
    step *= blocks;
  }
  void *arguments[] = {&data, &turns, &sink, &step, &stride};
  return device_event_record(c->events[0], NULL) &&
         device_program_launch(c->program, blocks, READ_THREADS, arguments, NULL) &&
         device_event_record(c->events[1], NULL) &&
         device_elapsed_us(c->events[0], c->events[1], time_us);
}

static bool copy_once(const ceiling *c, double *time_us) {
  return device_event_record(c->events[0], NULL) &&
         device_copy(c->memory + c->bytes / 2, c->memory, c->bytes / 2, NULL) &&
         device_event_record(c->events[1], NULL) &&
         device_elapsed_us(c->events[0], c->events[1], time_us);
}

static void note_rates(double *samples_us, int64_t bytes, nyb_bandwidth *bandwidth) {
  nyb_sort_samples(samples_us, PASSES);
  const double median = (double)bytes * 1e-3 / nyb_quantile(samples_us, PASSES, 0.5);
  const double best = (double)bytes * 1e-3 / samples_us[0];
  if (median > bandwidth->median_gb_per_s) bandwidth->median_gb_per_s = median;
  if (best > bandwidth->best_gb_per_s) bandwidth->best_gb_per_s = best;
}

/* Of several sizes of the grid and both orders the one with the best median. */
static bool measure_reading(const ceiling *c, nyb_bandwidth *read) {
  static const int blocks_per_multiprocessor[] = {2, 4, 8, 16, 32};
  for (int i = 0; i < 10; i++) {
    const int64_t blocks =
        (int64_t)blocks_per_multiprocessor[i / 2] * device_describe()->multiprocessors;
    const bool in_runs = i % 2 != 0;
    const int64_t turns = c->bytes / (blocks * READ_BYTES_A_TURN);
    double samples_us[PASSES], ignored_us;
    bool good = turns > 0 && read_once(c, blocks, turns, in_runs, &ignored_us);
    for (int pass = 0; pass < PASSES && good; pass++) {
      good = read_once(c, blocks, turns, in_runs, &samples_us[pass]);
    }
    if (!good) return false;
    note_rates(samples_us, turns * blocks * READ_BYTES_A_TURN, read);
  }
  return true;
}

static bool measure_copying(const ceiling *c, nyb_bandwidth *copy) {
  double samples_us[PASSES], ignored_us;
  bool good = copy_once(c, &ignored_us);
  for (int pass = 0; pass < PASSES && good; pass++) good = copy_once(c, &samples_us[pass]);
  if (good) note_rates(samples_us, c->bytes, copy);
  return good;
}

int nyb_bench_measure_device_ceilings(nyb_bandwidth *read, nyb_bandwidth *copy) {
  nyb_progress_show("measuring the bandwidth of %s", device_describe()->name);
  ceiling c = {.bytes = ceiling_bytes() / 4096 * 4096,
               .program = device_program_load(read_ptx, "read_memory"),
               .events = {device_event_create(), device_event_create()}};
  c.memory = device_allocate(c.bytes);
  const bool good = c.memory != NULL && c.program != NULL && c.events[0] != NULL &&
                    c.events[1] != NULL && device_fill(c.memory, 0x35, c.bytes, NULL) &&
                    measure_reading(&c, read) && measure_copying(&c, copy);
  device_free(c.memory);
  device_event_destroy(c.events[0]);
  device_event_destroy(c.events[1]);
  return good ? 0 : nyb_device_failed();
}
