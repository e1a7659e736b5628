/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU. f16 and bf16: every bit is fixed by docs/numerics.md, section 4, for all 65,536 gates, so
 * that the tolerance is nothing. f32: within the bound derived at oracle_geglu_f32_error(). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check_stage.h"
#include "oracle.h"

enum { HALF_VALUES = 1 << 16 };

/* ---- Pairs of gate and up ------------------------------------------------------------------- */

typedef enum pair_class {
  PAIRS_ONE,      /* up is 1: the gelu itself */
  PAIRS_RANDOM,   /* up is random, finite */
  PAIRS_SPECIALS, /* up is zero, infinite, NaN, the largest and the smallest by turns */
  PAIRS_COUNT
} pair_class;

static const char *const pair_names[PAIRS_COUNT] = {"up 1", "random up", "special up"};

static double special(nyb_dtype dtype, int64_t i) {
  const double largest = dtype == NYB_F16 ? 65504 : 0x1.fep127;
  const double smallest = dtype == NYB_F16 ? 0x1p-24 : dtype == NYB_BF16 ? 0x1p-133 : 0x1p-149;
  const double specials[] = {0.0,      -0.0,     INFINITY,  -INFINITY, NAN,  largest,
                             -largest, smallest, -smallest, 1,         -1,   -13.25,
                             -100,     88,       -88,       3e-5,      -3e-5};
  return specials[i % (int64_t)(sizeof specials / sizeof specials[0])];
}

/* Every gate of 16 bits once; f32 gates, one per index, that cover the same range and more. */
static double gate_of(nyb_dtype dtype, int64_t i, check_random *random) {
  if (dtype != NYB_F32) return oracle_decode(dtype, (uint32_t)i);
  if (i < 64) return special(dtype, i);
  const double normal = check_random_normal(random);
  if (i % 4 == 0) return ldexp(normal, (int)check_random_below(random, 240) - 120);
  return (i % 4 == 1 ? 10 : 2) * normal;
}

static double up_of(pair_class class, nyb_dtype dtype, int64_t i, double gate,
                    check_random *random) {
  switch (class) {
    case PAIRS_RANDOM: return 3 * check_random_normal(random);
    case PAIRS_SPECIALS: /* in f32 an infinity times a tail that may be 0 is not fixed */
      return dtype == NYB_F32 && !(gate >= 0x1p-20) ? 2 : special(dtype, i / 3);
    case PAIRS_ONE:
    case PAIRS_COUNT: break;
  }
  return 1;
}

/* ---- One case ----------------------------------------------------------------------------- */

typedef struct geglu_case {
  const char *name;
  nyb_dtype dtype;
  int64_t rows, columns;
  check_buffer gate, up, out; /* out's is unused in place */
  int64_t gate_stride, up_stride, out_stride;
  int64_t up_offset; /* elements, where up lies in gate's buffer: the two halves of one tensor */
  bool halves, out_is_gate, out_is_up;
} geglu_case;

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

static void *gate_data(const geglu_case *c) { return c->gate.data; }

static void *up_data(const geglu_case *c) {
  if (!c->halves) return c->up.data;
  return (uint8_t *)c->gate.data + c->up_offset * bytes_of(c->dtype);
}

static void *out_data(const geglu_case *c) {
  if (c->out_is_gate) return gate_data(c);
  return c->out_is_up ? up_data(c) : c->out.data;
}

static void free_case(geglu_case *c) {
  check_buffer_free(&c->gate);
  check_buffer_free(&c->up);
  check_buffer_free(&c->out);
}

static bool make_buffers(geglu_case *c) {
  const int64_t bytes = bytes_of(c->dtype);
  if (check_buffer_make(&c->gate, c->rows * c->gate_stride * bytes) &&
      check_buffer_make(&c->up, c->halves ? 0 : c->rows * c->up_stride * bytes) &&
      check_buffer_make(&c->out, c->rows * c->out_stride * bytes)) {
    return true;
  }
  free_case(c);
  return false;
}

/* Fills the inputs, with the i-th element of class counted over rows and columns. */
static void fill_case(geglu_case *c, pair_class class, check_random *random) {
  for (int64_t row = 0; row < c->rows; row++) {
    for (int64_t column = 0; column < c->columns; column++) {
      const int64_t i = row * c->columns + column;
      const double gate = gate_of(c->dtype, i % HALF_VALUES, random);
      oracle_store(gate_data(c), c->dtype, row * c->gate_stride + column, gate);
      oracle_store(up_data(c), c->dtype, row * c->up_stride + column,
                   up_of(class, c->dtype, i, gate, random));
    }
  }
}

/* What each element should be: `bits`, or, in f32, anything between low and high. */
typedef struct expected {
  double want, error, low, high;
  uint32_t bits;
} expected;

static expected expect_element(nyb_dtype dtype, double gate, double up) {
  expected e = {.want = oracle_geglu(dtype, gate, up)};
  if (dtype == NYB_F32 && isfinite(gate) && isfinite(up)) {
    e.want = oracle_geglu_exact(gate, up);
    e.error = oracle_geglu_f32_error(gate, up);
  }
  e.bits = oracle_encode(dtype, oracle_round(dtype, e.want));
  e.low = oracle_round(dtype, e.want - e.error);
  e.high = oracle_round(dtype, e.want + e.error);
  return e;
}

static expected *expect_case(const geglu_case *c) {
  expected *list = malloc((size_t)(c->rows * c->columns + 1) * sizeof *list);
  for (int64_t i = 0; list != NULL && i < c->rows * c->columns; i++) {
    const int64_t row = i / c->columns, column = i % c->columns;
    list[i] =
        expect_element(c->dtype, oracle_load(gate_data(c), c->dtype, row * c->gate_stride + column),
                       oracle_load(up_data(c), c->dtype, row * c->up_stride + column));
  }
  return list;
}

/* ---- Running ------------------------------------------------------------------------------ */

static bool compare_element(check_run *run, check_tally *tally, const geglu_case *c, int64_t i,
                            const expected *e) {
  const int64_t at = i / c->columns * c->out_stride + i % c->columns;
  const uint32_t bits = oracle_load_bits(out_data(c), c->dtype, at);
  if (bits == e->bits) return true;
  const double got = oracle_decode(c->dtype, bits);
  if (e->error > 0) {
    check_note_error(tally, fabs(got - e->want), e->error);
    if (got >= e->low && got <= e->high) return true;
  }
  check_fail(run, tally, "%s, %s, row %lld column %lld: got %.9g, want %.9g, tolerance %.3g",
             c->name, check_dtype_name(c->dtype), (long long)(i / c->columns),
             (long long)(i % c->columns), got, e->want, e->error);
  return false;
}

static bool compare_rest(check_run *run, check_tally *tally, geglu_case *c) {
  check_buffer *written = c->out_is_gate || (c->out_is_up && c->halves) ? &c->gate
                          : c->out_is_up                                ? &c->up
                                                                        : &c->out;
  const int64_t first = (uint8_t *)out_data(c) - (uint8_t *)written->data;
  for (int64_t row = 0; row < c->rows; row++) {
    check_buffer_restore(written, first + row * c->out_stride * bytes_of(c->dtype),
                         c->columns * bytes_of(c->dtype));
  }
  const check_buffer *buffers[] = {&c->gate, &c->up, &c->out};
  static const char *const names[] = {"gate", "up", "out"};
  for (int i = 0; i < 3; i++) {
    const int64_t at = check_buffer_changed(buffers[i]);
    if (at == CHECK_UNCHANGED) continue;
    check_fail(run, tally, "%s, %s: byte %lld of %s's buffer was written and is no output", c->name,
               check_dtype_name(c->dtype), (long long)at, names[i]);
    return false;
  }
  return true;
}

/* list repeats every `period` elements. */
static void run_case(check_run *run, check_tally *tally, geglu_case *c, const expected *list,
                     int64_t period) {
  const bool compat = tally->index < 0;
  if (tally->kernel.isa == NYB_ISA_CUDA) { /* aligned, as wide copies want it, by turns */
    check_stage_place(c->columns % 2 == 0 ? STAGE_ALIGNED : STAGE_AS_ON_HOST);
  }
  nyb_geglu call = {.struct_size = sizeof call,
                    .rows = c->rows,
                    .columns = c->columns,
                    .dtype = c->dtype,
                    .path = compat ? NYB_PATH_COMPAT : NYB_PATH_FUSED,
                    .gate = gate_data(c),
                    .gate_stride = c->gate_stride,
                    .up = up_data(c),
                    .up_stride = c->up_stride,
                    .out = out_data(c),
                    .out_stride = c->out_stride};
  const int64_t before = check_calls(run, tally);
  const nyb_status status =
      run->options.library->geglu(run->contexts[tally->kernel.isa], &call, NULL);
  if (status != NYB_OK) {
    check_fail(run, tally, "%s, %s: got %s: %s", c->name, check_dtype_name(c->dtype),
               nyb_status_name(status), check_error());
    return;
  }
  for (int64_t i = 0; i < c->rows * c->columns; i++) {
    if (!compare_element(run, tally, c, i, &list[i % period])) return;
  }
  if (!compare_rest(run, tally, c)) return;
  if (c->rows * c->columns > 0 && check_calls(run, tally) == before) {
    check_fail(run, tally, "%s: another kernel ran instead", c->name);
    return;
  }
  check_pass(tally);
}

/* The case on every ISA and on the spelled-out path; in place, the inputs are renewed each time. */
static void check_case(check_run *run, geglu_case *c) {
  char format[16];
  snprintf(format, sizeof format, "plain_%s", check_dtype_name(c->dtype));
  check_buffer_seal(&c->gate);
  check_buffer_seal(&c->up);
  check_buffer_poison(&c->out);
  check_buffer_seal(&c->out);
  expected *list = expect_case(c);
  if (list == NULL) return;
  check_tally *tallies[NYB_ISA_CUDA + 2] = {
      check_find(run, "geglu_compat", "", NYB_ISA_SCALAR),
      check_find(run, "geglu_compat", "", NYB_ISA_CUDA),
  };
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
    tallies[isa + 1] = check_find(run, "geglu", format, isa);
  }
  for (int i = 0; i < NYB_ISA_CUDA + 2; i++) {
    check_tally *tally = tallies[i];
    if (tally == NULL) continue;
    memcpy(c->gate.memory, c->gate.image, c->gate.memory_bytes);
    memcpy(c->up.memory, c->up.image, c->up.memory_bytes);
    memcpy(c->out.memory, c->out.image, c->out.memory_bytes);
    run_case(run, tally, c, list, c->rows * c->columns);
  }
  free(list);
}

static void check_class(check_run *run, geglu_case *c, pair_class class, check_random *random) {
  if (!make_buffers(c)) return;
  fill_case(c, class, random);
  check_case(run, c);
  free_case(c);
}

/* ---- The cases ------------------------------------------------------------------------------ */

/* All gates of 16 bits against each kind of up; as many f32 gates. */
static void check_sweep(check_run *run, nyb_dtype dtype, check_random *random) {
  for (int class = 0; class < PAIRS_COUNT; class ++) {
    if (run->options.quick && class == PAIRS_ONE) continue;
    geglu_case c = {.name = pair_names[class],
                    .dtype = dtype,
                    .rows = 16,
                    .columns = HALF_VALUES / 16,
                    .gate_stride = HALF_VALUES / 16,
                    .up_stride = HALF_VALUES / 16,
                    .out_stride = HALF_VALUES / 16};
    check_class(run, &c, (pair_class) class, random);
  }
}

/* Every length up to two of the widest vectors and then some, with gaps, halves and in place. */
static void check_shapes(check_run *run, nyb_dtype dtype, check_random *random) {
  const int64_t step = run->options.sanitizer ? 33 : 1;
  for (int64_t columns = 0; columns <= 133; columns += columns < 70 ? step : 9 * step) {
    geglu_case apart = {.name = "rows with gaps",
                        .dtype = dtype,
                        .rows = 3,
                        .columns = columns,
                        .gate_stride = columns + 2,
                        .up_stride = columns + 5,
                        .out_stride = columns + 1};
    check_class(run, &apart, PAIRS_RANDOM, random);
    geglu_case halves = {.name = "two halves of one tensor",
                         .dtype = dtype,
                         .rows = 3,
                         .columns = columns,
                         .gate_stride = 2 * columns + 2,
                         .up_stride = 2 * columns + 2,
                         .out_stride = columns + 1,
                         .up_offset = columns,
                         .halves = true};
    check_class(run, &halves, PAIRS_RANDOM, random);
    halves.name = "over the first half";
    halves.out_is_gate = true;
    halves.out_stride = halves.gate_stride;
    check_class(run, &halves, PAIRS_RANDOM, random);
    apart.name = "over up";
    apart.out_is_up = true;
    apart.out_stride = apart.up_stride;
    check_class(run, &apart, PAIRS_RANDOM, random);
  }
}

/* Field cases 59, 60 and 62: values that other libraries got wrong, each with up 1. */
static void check_known_values(check_run *run, nyb_dtype dtype) {
  static const double gates[] = {-2.70, -13.25, -100, 100,  65504, -65504, 1e5,
                                 0.1,   0.5,    1,    2.25, 5,     -0.0,   0.0};
  enum { COUNT = sizeof gates / sizeof gates[0] };
  geglu_case c = {.name = "known values",
                  .dtype = dtype,
                  .rows = 1,
                  .columns = COUNT,
                  .gate_stride = COUNT,
                  .up_stride = COUNT,
                  .out_stride = COUNT};
  if (!make_buffers(&c)) return;
  for (int64_t i = 0; i < COUNT; i++) {
    oracle_store(c.gate.data, dtype, i, gates[i]);
    oracle_store(c.up.data, dtype, i, 1);
  }
  check_case(run, &c);
  free_case(&c);
}

/* Outputs beyond the size from which a kernel may store past the caches. Gate and up repeat every
 * HALF_VALUES elements, so that the oracle's work is done once. */
static void check_large(check_run *run, nyb_dtype dtype, check_random *random) {
  const int64_t columns = 4099, stride = 4100;
  const int64_t rows = (int64_t)(65 << 20) / (columns * bytes_of(dtype));
  geglu_case pattern = {.name = "large, one period of it",
                        .dtype = dtype,
                        .rows = 1,
                        .columns = HALF_VALUES,
                        .gate_stride = HALF_VALUES,
                        .up_stride = HALF_VALUES,
                        .out_stride = HALF_VALUES};
  geglu_case c = {.name = "large",
                  .dtype = dtype,
                  .rows = rows,
                  .columns = columns,
                  .gate_stride = stride,
                  .up_stride = stride,
                  .out_stride = stride};
  if (!make_buffers(&pattern)) return;
  fill_case(&pattern, PAIRS_RANDOM, random);
  expected *period = expect_case(&pattern);
  if (period != NULL && make_buffers(&c)) {
    for (int64_t i = 0; i < rows * columns; i++) {
      const int64_t from = i % HALF_VALUES * bytes_of(dtype);
      const int64_t to = (i / columns * stride + i % columns) * bytes_of(dtype);
      memcpy((uint8_t *)c.gate.data + to, (uint8_t *)pattern.gate.data + from,
             (size_t)bytes_of(dtype));
      memcpy((uint8_t *)c.up.data + to, (uint8_t *)pattern.up.data + from, (size_t)bytes_of(dtype));
    }
    check_buffer_seal(&c.gate);
    check_buffer_seal(&c.up);
    check_buffer_seal(&c.out);
    char format[16];
    snprintf(format, sizeof format, "plain_%s", check_dtype_name(dtype));
    for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
      check_tally *tally = check_find(run, "geglu", format, isa);
      if (tally != NULL) run_case(run, tally, &c, period, HALF_VALUES);
    }
    free_case(&c);
  }
  free(period);
  free_case(&pattern);
}

void check_geglu(check_run *run) {
  check_random random = {.state = 2};
  for (int i = 0; i < 3; i++) {
    const nyb_dtype dtype = (nyb_dtype)(NYB_F32 + i);
    char format[16];
    snprintf(format, sizeof format, "plain_%s", check_dtype_name(dtype));
    check_step(run, "geglu", i, 3);
    if (!check_wants_format(run, format)) continue;
    if (!run->options.sanitizer) check_sweep(run, dtype, &random);
    check_shapes(run, dtype, &random);
    check_known_values(run, dtype);
    if (!run->options.quick) check_large(run, dtype, &random);
  }
  check_step(run, "geglu", 3, 3);
}
