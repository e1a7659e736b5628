/* SPDX-License-Identifier: Apache-2.0 */
/* GeGLU: the contract to the bit, on every ISA that runs here and on both paths; views, misuse,
 * levers, counters, threads, offsets beyond 32 bits. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "../src/cpu/geglu_f32.h"
#include "../src/kernels.h"
#include "check.h"
#include "oracle.h"

static double f32(double value) { return oracle_round(NYB_F32, value); }

static double gelu(nyb_dtype dtype, double x) { return oracle_geglu(dtype, x, 1); }

/* Of a number that the dtype holds, or a NaN. */
static uint16_t encode(nyb_dtype dtype, double value) {
  return (uint16_t)oracle_encode(dtype, value);
}

/* ---- Contexts and calls -------------------------------------------------------------------- */

static const nyb_dtype dtypes[] = {NYB_F32, NYB_F16, NYB_BF16};
static const nyb_path paths[] = {NYB_PATH_FUSED, NYB_PATH_COMPAT};

#define foreach(type, item, array) \
  for (type *item = (array); item < (array) + sizeof(array) / sizeof *(array); item++)

/* NULL where the ISA does not run here; main() has said so. */
static nyb_context *context_for(nyb_isa isa, int64_t threads) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.isa = isa;
  options.threads = threads;
  nyb_context *context = NULL;
  const nyb_status status = nyb_context_create(&options, &context);
  assert_true(status == NYB_OK || status == NYB_ERROR_UNSUPPORTED);
  return context;
}

static nyb_geglu one_row(nyb_dtype dtype, const void *gate, const void *up, void *out,
                         int64_t count) {
  nyb_geglu geglu = NYB_GEGLU_INIT;
  geglu.rows = 1;
  geglu.columns = count;
  geglu.dtype = dtype;
  geglu.gate = gate;
  geglu.up = up;
  geglu.out = out;
  return geglu;
}

static void run(nyb_context *context, const nyb_geglu *geglu) {
  if (nyb_geglu_run(context, geglu, NULL) != NYB_OK) fail_msg("%s", nyb_last_error());
}

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(random_state >> 33);
}

/* A gate or up of ordinary size; some of every kind among them. */
static void fill_random(nyb_dtype dtype, void *data, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const double value = ((double)random_bits() - 0x1p30) * 0x1p-27;
    if (dtype == NYB_F32) {
      ((float *)data)[i] = (float)value;
    } else {
      ((uint16_t *)data)[i] = random_bits() % 4 == 0 ? (uint16_t)random_bits()
                                                     : encode(dtype, oracle_round(dtype, value));
    }
  }
}

/* ---- The contract -------------------------------------------------------------------------- */

enum { GATES = 65536 };

static uint16_t ups_of(nyb_dtype dtype, int index) {
  static const double values[] = {1, -1, 0.0, -0.0, 0.3, -1.7, 1e-3, 60000, 1e-7, INFINITY, NAN};
  enum { COUNT = sizeof values / sizeof *values };
  if (index < COUNT) return encode(dtype, oracle_round(dtype, values[index]));
  return 0;
}

static void check_every_gate(nyb_dtype dtype, const uint16_t *up) {
  static uint16_t gate[GATES], expected[GATES], out[GATES];
  for (int i = 0; i < GATES; i++) {
    gate[i] = (uint16_t)i;
    expected[i] = encode(
        dtype, oracle_geglu(dtype, oracle_decode(dtype, gate[i]), oracle_decode(dtype, up[i])));
  }
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 1);
    if (context == NULL) continue;
    foreach (const nyb_path, path, paths) {
      nyb_geglu geglu = one_row(dtype, gate, up, out, GATES);
      geglu.path = *path;
      memset(out, 0xff, sizeof out);
      run(context, &geglu);
      for (int i = 0; i < GATES; i++) {
        if (out[i] == expected[i]) continue;
        fail_msg("dtype %d isa %s path %d: gate %04x up %04x gives %04x, the contract %04x",
                 (int)dtype, nyb_isa_name(isa), (int)*path, i, up[i], out[i], expected[i]);
      }
    }
    nyb_context_destroy(context);
  }
}

static void every_gate_gives_the_bits_of_the_contract(void **state) {
  (void)state;
  static uint16_t up[GATES];
  foreach (const nyb_dtype, dtype, dtypes) {
    if (*dtype == NYB_F32) continue;
    for (int index = 0; index < 11; index++) {
      for (int i = 0; i < GATES; i++) up[i] = ups_of(*dtype, index);
      check_every_gate(*dtype, up);
    }
    for (int round = 0; round < 3; round++) { /* ups of all kinds */
      for (int i = 0; i < GATES; i++) up[i] = (uint16_t)random_bits();
      check_every_gate(*dtype, up);
    }
  }
}

/* What numerics.md says of the contract itself, and field cases 59 and 60. */
static void the_contract_has_the_properties_documented(void **state) {
  (void)state;
  foreach (const nyb_dtype, dtype, dtypes) {
    if (*dtype == NYB_F32) continue;
    for (int i = 0; i < GATES; i++) {
      const double x = oracle_decode(*dtype, (uint16_t)i);
      const double g = gelu(*dtype, x);
      assert_int_equal(isnan(g), isnan(x) || x == -INFINITY);
      if (isfinite(x)) assert_true(isfinite(g));
      if (x <= -13.25 && isfinite(x)) assert_true(g == 0 && signbit(g));
      if (x >= 13.25) assert_true(g == x);
      if (isnan(x)) continue;
      assert_true(oracle_round(*dtype, f32(pow(x, 3))) ==
                  oracle_round(*dtype, f32(f32(x * x) * x)));
      const double z = x; /* every value is some z */
      assert_true(oracle_round(*dtype, (double)tanhf((float)z)) == oracle_round(*dtype, tanh(z)));
    }
  }
  assert_int_equal(encode(NYB_BF16, gelu(NYB_BF16, -3)), 0xbbc0); /* -0.00586 */
}

/* ---- f32 ----------------------------------------------------------------------------------- */

/* Both paths take the same steps up to z. Their tanhs, each within 3 units in the last place (2^-24
 * at most), and the one that is rounded from double, are 6 * 2^-24 apart at most; 1 + t adds half a
 * unit, 2^-24, on either side; the halved product with x makes that 4 * 2^-24 |x|; and the two
 * products after it add half a unit each on either side, 4 * 2^-24 relative. In all 2^-21 |x up|.
 */
static double f32_bound(double gate, double up) { return 0x1p-21 * fabs(gate * up) + 0x1p-149; }

/* The 3 units in the last place of the derivation above; a unit is that of the true value. */
static void the_f32_tanh_is_within_3_units(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 0x7f800000; bits += 397) {
    float z;
    memcpy(&z, &bits, sizeof z);
    const double expected = tanh((double)z);
    int exponent = z == 0 ? -126 : ilogb(expected);
    if (exponent < -126) exponent = -126;
    const double unit = ldexp(1, exponent - 23);
    assert_true(fabs((double)nyb_tanh_f32(z) - expected) <= 3 * unit);
    assert_true(nyb_tanh_f32(-z) == -nyb_tanh_f32(z));
    if (z >= 9.1f) assert_true(nyb_tanh_f32(z) == 1.0f);
  }
}

static void f32_stays_within_its_bound(void **state) {
  (void)state;
  enum { COUNT = 1 << 18 };
  float *gate = malloc(COUNT * sizeof *gate), *up = malloc(COUNT * sizeof *up);
  float *out = malloc(COUNT * sizeof *out), *first = malloc(COUNT * sizeof *first);
  fill_random(NYB_F32, gate, COUNT);
  fill_random(NYB_F32, up, COUNT);
  for (int i = 0; i < COUNT / 2; i++) { /* every magnitude, infinities and NaNs left to another */
    uint32_t bits = random_bits() << 1 | (random_bits() & 1);
    if ((bits & 0x7f800000) == 0x7f800000) bits &= 0xff7fffff;
    memcpy(&gate[i], &bits, sizeof bits);
    up[i] = (float)(1 + i % 7) / 4;
  }
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 1);
    if (context == NULL) continue;
    foreach (const nyb_path, path, paths) {
      nyb_geglu geglu = one_row(NYB_F32, gate, up, out, COUNT);
      geglu.path = *path;
      memset(out, 0xff, COUNT * sizeof *out);
      run(context, &geglu);
      for (int i = 0; i < COUNT; i++) {
        const double expected = oracle_geglu(NYB_F32, gate[i], up[i]);
        const double error = fabs(out[i] - expected);
        if (error <= f32_bound(gate[i], up[i]) || (double)out[i] == expected) continue;
        fail_msg("isa %s path %d: gate %a up %a gives %a, the contract %a", nyb_isa_name(isa),
                 (int)*path, (double)gate[i], (double)up[i], (double)out[i], expected);
      }
      if (*path == NYB_PATH_FUSED) { /* no fused multiply-add anywhere: the same bits everywhere */
        if (isa == NYB_ISA_SCALAR) memcpy(first, out, COUNT * sizeof *out);
        assert_memory_equal(out, first, COUNT * sizeof *out);
      }
    }
    nyb_context_destroy(context);
  }
  free(gate);
  free(up);
  free(out);
  free(first);
}

static float f32_of(nyb_context *context, nyb_path path, float gate) {
  const float up = 1;
  float out = NAN;
  nyb_geglu geglu = one_row(NYB_F32, &gate, &up, &out, 1);
  geglu.path = path;
  run(context, &geglu);
  return out;
}

/* Field cases 59 (the tanh form, not the exact one), 60 (no overflow) and 62 (no f16 table). */
static void f32_field_cases(void **state) {
  (void)state;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 1);
    if (context == NULL) continue;
    foreach (const nyb_path, path, paths) {
      for (double x = 0.1; x <= 5; x += 0.0007) {
        const double expected = oracle_geglu_exact((double)(float)x, 1);
        const double error = fabs((double)f32_of(context, *path, (float)x) - expected);
        assert_true(error <= 1e-6 * expected);
      }
      const double tail = (double)(-2.70f), y_tail = (double)f32_of(context, *path, -2.70f);
      assert_true(fabs(y_tail - oracle_geglu_exact(tail, 1)) <= f32_bound(tail, 1));
      assert_true(fabs(y_tail - 0.5 * tail * erfc(-tail / sqrt(2))) >= 4.6e-4);
      assert_true(f32_of(context, *path, 1e5f) == 1e5f);
      assert_true(f32_of(context, *path, 65504.0f) == 65504.0f);
      assert_true(f32_of(context, *path, 3e38f) == 3e38f);
      assert_true(f32_of(context, *path, INFINITY) == INFINITY);
      static const float negative[] = {-13.25f, -100.0f, -65504.0f, -3e38f};
      foreach (const float, x, negative) {
        const float y = f32_of(context, *path, *x);
        assert_true(y == 0 && signbit(y));
      }
      static const float none[] = {-INFINITY, NAN, -NAN};
      foreach (const float, x, none) {
        const float y = f32_of(context, *path, *x);
        static const uint32_t nan = 0x7fc00000;
        assert_memory_equal(&y, &nan, sizeof y);
      }
    }
    nyb_context_destroy(context);
  }
}

/* ---- Lengths, alignments, guards ------------------------------------------------------------ */

/* Two pages that may be used and one behind them that faults. */
typedef struct guarded {
  unsigned char *memory, *end;
  size_t page_bytes;
} guarded;

static guarded guarded_make(void) {
  guarded made = {.page_bytes = (size_t)sysconf(_SC_PAGESIZE)};
  made.memory =
      mmap(NULL, 3 * made.page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(made.memory != MAP_FAILED);
  made.end = made.memory + 2 * made.page_bytes;
  assert_int_equal(mprotect(made.end, made.page_bytes, PROT_NONE), 0);
  return made;
}

static void guarded_free(guarded *g) { munmap(g->memory, 3 * g->page_bytes); }

static void assert_poison(const unsigned char *begin, const unsigned char *end) {
  for (; begin < end; begin++) assert_int_equal(*begin, 0xa5);
}

typedef struct span_buffers {
  guarded gate, up, out;
} span_buffers;

/* One kernel, with elements ending `slack` elements before memory that faults, against the
 * reference path of a scalar context. */
static void check_span(span_buffers *buffers, nyb_context *reference,
                       const nyb_kernel_entry *kernel, nyb_dtype dtype, int64_t count,
                       const int *slack, bool streaming) {
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(dtype);
  unsigned char *gate = buffers->gate.end - (count + slack[0]) * element_bytes;
  unsigned char *up = buffers->up.end - (count + slack[1]) * element_bytes;
  unsigned char *out = buffers->out.end - (count + slack[2]) * element_bytes;
  unsigned char expected[512];
  fill_random(dtype, gate, count);
  fill_random(dtype, up, count);
  nyb_geglu geglu = one_row(dtype, gate, up, expected, count);
  geglu.path = dtype == NYB_F32 ? NYB_PATH_FUSED : NYB_PATH_COMPAT;
  run(reference, &geglu);
  memset(buffers->out.memory, 0xa5, 2 * buffers->out.page_bytes);
  ((nyb_geglu_fn)kernel->function)(gate, up, out, count, streaming);
  assert_memory_equal(out, expected, (size_t)(count * element_bytes));
  assert_poison(buffers->out.memory, out);
  assert_poison(out + count * element_bytes, buffers->out.end);
}

static void every_kernel_takes_every_length_and_alignment(void **state) {
  (void)state;
  span_buffers buffers = {guarded_make(), guarded_make(), guarded_make()};
  nyb_context *reference = context_for(NYB_ISA_SCALAR, 1);
  for (int64_t k = 0; k < nyb_kernel_entry_count; k++) {
    const nyb_kernel_entry *kernel = &nyb_kernel_entries[k];
    const char *reason;
    if (kernel->operation != NYB_OPERATION_GEGLU || kernel->function == NULL) continue;
    if (!nyb_isa_runs_here(kernel->isa, &reason)) continue;
    const nyb_dtype dtype = kernel->format == NYB_FORMAT_PLAIN_F16    ? NYB_F16
                            : kernel->format == NYB_FORMAT_PLAIN_BF16 ? NYB_BF16
                                                                      : NYB_F32;
    for (int64_t count = 0; count <= 100; count++) {
      for (int turn = 0; turn < 16; turn++) {
        const int slack[3] = {turn % 4 ? (int)(random_bits() % 40) : 0,
                              turn % 3 ? (int)(random_bits() % 40) : 0,
                              turn % 5 ? (int)(random_bits() % 40) : 0};
        check_span(&buffers, reference, kernel, dtype, count, slack, turn % 2);
      }
    }
  }
  nyb_context_destroy(reference);
  guarded_free(&buffers.gate);
  guarded_free(&buffers.up);
  guarded_free(&buffers.out);
}

/* ---- Views ---------------------------------------------------------------------------------- */

enum { VIEW_ELEMENTS = 1 << 15 };

/* Runs a view on every ISA, path, and several thread counts, and checks each element of it against
 * the same call made element by element, and that nothing else changed. The pointers and out are
 * offsets into one arena. */
typedef struct view_case {
  const char *name;
  int64_t rows, columns;
  int64_t gate, gate_stride, up, up_stride, out, out_stride; /* elements */
} view_case;

static void expect_view(nyb_context *scalar, nyb_dtype dtype, const view_case *view,
                        unsigned char *arena) {
  const int64_t bytes = (int64_t)nyb_dtype_bytes(dtype);
  unsigned char *before = malloc((size_t)(VIEW_ELEMENTS * bytes));
  memcpy(before, arena, (size_t)(VIEW_ELEMENTS * bytes));
  for (int64_t row = 0; row < view->rows; row++) {
    for (int64_t column = 0; column < view->columns; column++) {
      const nyb_geglu geglu =
          one_row(dtype, before + (view->gate + row * view->gate_stride + column) * bytes,
                  before + (view->up + row * view->up_stride + column) * bytes,
                  arena + (view->out + row * view->out_stride + column) * bytes, 1);
      run(scalar, &geglu);
    }
  }
  free(before);
}

static nyb_geglu descriptor_of(nyb_dtype dtype, const view_case *view, unsigned char *arena) {
  const int64_t bytes = (int64_t)nyb_dtype_bytes(dtype);
  nyb_geglu geglu = NYB_GEGLU_INIT;
  geglu.rows = view->rows;
  geglu.columns = view->columns;
  geglu.dtype = dtype;
  geglu.gate = arena + view->gate * bytes;
  geglu.gate_stride = view->gate_stride;
  geglu.up = arena + view->up * bytes;
  geglu.up_stride = view->up_stride;
  geglu.out = arena + view->out * bytes;
  geglu.out_stride = view->out_stride;
  return geglu;
}

static void check_view(nyb_dtype dtype, const view_case *view) {
  const size_t arena_bytes = VIEW_ELEMENTS * nyb_dtype_bytes(dtype);
  unsigned char *initial = malloc(arena_bytes), *expected = malloc(arena_bytes);
  unsigned char *arena = malloc(arena_bytes);
  fill_random(dtype, initial, VIEW_ELEMENTS);
  memcpy(expected, initial, arena_bytes);
  nyb_context *scalar = context_for(NYB_ISA_SCALAR, 1);
  expect_view(scalar, dtype, view, expected);
  nyb_context_destroy(scalar);
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    for (int64_t threads = 1; threads <= 3; threads += 2) {
      nyb_context *context = context_for(isa, threads);
      if (context == NULL) continue;
      foreach (const nyb_path, path, paths) {
        if (dtype == NYB_F32 && *path == NYB_PATH_COMPAT) continue; /* other bits, own test */
        nyb_geglu geglu = descriptor_of(dtype, view, arena);
        geglu.path = *path;
        memcpy(arena, initial, arena_bytes);
        run(context, &geglu);
        if (memcmp(arena, expected, arena_bytes) != 0) {
          fail_msg("%s: dtype %d isa %s path %d threads %d differs from element by element",
                   view->name, (int)dtype, nyb_isa_name(isa), (int)*path, (int)threads);
        }
      }
      nyb_context_destroy(context);
    }
  }
  free(initial);
  free(expected);
  free(arena);
}

static void views_are_taken_as_they_are(void **state) {
  (void)state;
  static const view_case views[] = {
      {"apart", 3, 100, 0, 100, 1000, 100, 2000, 100},
      {"a gap in gate only", 9, 20, 0, 25, 1000, 20, 2000, 20},
      {"a gap in up only", 9, 20, 0, 20, 1000, 25, 2000, 20},
      {"a gap in out only", 9, 20, 0, 20, 1000, 20, 2000, 25},
      {"one row, wild strides", 1, 100, 0, INT64_MAX, 1000, INT64_MIN, 2000, 0},
      {"halves of [T, 2d] (field case 66)", 17, 37, 0, 74, 37, 74, 4000, 37},
      {"halves of [T, 2d], swapped", 17, 37, 37, 74, 0, 74, 4000, 40},
      {"out on the gate's half", 17, 37, 0, 74, 37, 74, 0, 74},
      {"out on the up's half", 17, 37, 0, 74, 37, 74, 37, 74},
      {"out beside gate, up elsewhere", 17, 37, 0, 74, 4000, 37, 37, 74},
      {"out in the middle third", 11, 33, 0, 99, 66, 99, 33, 99},
      {"in place on gate", 5, 300, 0, 300, 8000, 300, 0, 300},
      {"in place on up", 5, 300, 0, 300, 8000, 301, 8000, 301},
      {"gate, up and out one", 5, 300, 7, 300, 7, 300, 7, 300},
      {"in place, one row, other strides", 1, 300, 7, 1, 7, 2, 7, 300},
      {"gate and up overlap freely", 9, 50, 0, 3, 5, 1, 8000, 50},
      {"broadcast gate", 40, 61, 100, 0, 1000, 61, 8000, 61},
      {"broadcast both", 40, 61, 100, 0, 150, 0, 8000, 64},
      {"backwards", 20, 30, 600, -30, 1500, -31, 3000, -32},
      {"in place, backwards", 20, 30, 600, -30, 1500, 31, 600, -30},
      {"columns of one", 500, 1, 0, 3, 1, 3, 2, 3},
      {"short rows without gaps", 700, 3, 0, 3, 4000, 3, 8000, 3},
      {"nothing between rows but one element", 64, 16, 0, 17, 2000, 17, 4000, 17},
  };
  foreach (const view_case, view, views) {
    foreach (const nyb_dtype, dtype, dtypes) check_view(*dtype, view);
  }
}

static void nothing_is_a_size(void **state) {
  (void)state;
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  uint16_t element = 0x1234;
  nyb_geglu geglu = one_row(NYB_BF16, &element, &element, &element, 0);
  assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_OK);
  geglu.columns = INT64_MAX;
  geglu.rows = 0;
  assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_OK);
  geglu.gate = geglu.up = geglu.out = NULL;
  assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_OK);
  assert_int_equal(element, 0x1234);
  nyb_context_destroy(context);
}

/* ---- Many elements, threads ------------------------------------------------------------------ */

/* Runs the tasks last to first: any order is allowed. */
static void backwards(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  *(int64_t *)user_data = task_count;
  for (int64_t i = task_count - 1; i >= 0; i--) task(task_data, i);
}

/* Threads of our own, whose every step a thread sanitizer sees. */
static void with_four_threads(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  int64_t threads = 4;
  *(int64_t *)user_data = task_count;
  check_parallel_for(&threads, task_count, task, task_data);
}

static void threads_change_no_bit(void **state) {
  (void)state;
  enum { ROWS = 7, COLUMNS = 40007, PITCH = 40100, COUNT = ROWS * PITCH };
  const size_t bytes = COUNT * sizeof(uint16_t);
  uint16_t *gate = malloc(bytes), *up = malloc(bytes), *out = malloc(bytes);
  uint16_t *expected = malloc(bytes);
  fill_random(NYB_BF16, gate, COUNT);
  fill_random(NYB_BF16, up, COUNT);
  static const int64_t pitches[] = {COLUMNS, PITCH};
  foreach (const int64_t, pitch, pitches) {
    nyb_geglu geglu = one_row(NYB_BF16, gate, up, expected, COLUMNS);
    geglu.rows = ROWS;
    geglu.gate_stride = geglu.up_stride = geglu.out_stride = *pitch;
    memset(expected, 0xa5, bytes);
    nyb_context *context = context_for(NYB_ISA_AUTO, 1);
    run(context, &geglu);
    nyb_context_destroy(context);
    geglu.out = out;
    static const int64_t counts[] = {1, 2, 3, 7, 16};
    foreach (const int64_t, threads, counts) {
      context = context_for(NYB_ISA_AUTO, *threads);
      foreach (const nyb_path, path, paths) {
        geglu.path = *path;
        memset(out, 0xa5, bytes);
        run(context, &geglu);
        assert_memory_equal(out, expected, bytes);
      }
      nyb_context_destroy(context);
    }
    static const nyb_parallel_for own[] = {backwards, with_four_threads};
    foreach (const nyb_parallel_for, parallel_for, own) {
      int64_t task_count = 0;
      nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
      options.threads = 4;
      options.parallel_for = *parallel_for;
      options.parallel_for_data = &task_count;
      assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
      memset(out, 0xa5, bytes);
      run(context, &geglu);
      assert_memory_equal(out, expected, bytes);
      assert_true(task_count > 1);
      nyb_context_destroy(context);
    }
  }
  free(gate);
  free(up);
  free(out);
  free(expected);
}

/* A caller that rounds upwards gets the same bits. That the first context was made so is main()'s.
 */
static void the_callers_rounding_changes_no_bit(void **state) {
  (void)state;
  static uint16_t gate[GATES], up[GATES], expected[GATES], out[GATES];
  for (int i = 0; i < GATES; i++) gate[i] = (uint16_t)i;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 1);
    if (context == NULL) continue;
    fill_random(NYB_BF16, up, GATES);
    foreach (const nyb_path, path, paths) {
      nyb_geglu geglu = one_row(NYB_BF16, gate, up, expected, GATES);
      geglu.path = *path;
      run(context, &geglu);
      geglu.out = out;
      assert_int_equal(fesetround(FE_UPWARD), 0);
      const nyb_status status = nyb_geglu_run(context, &geglu, NULL);
      const int rounding = fegetround();
      fesetround(FE_TONEAREST);
      assert_int_equal(status, NYB_OK);
      assert_int_equal(rounding, FE_UPWARD);
      assert_memory_equal(out, expected, sizeof out);
    }
    nyb_context_destroy(context);
  }
}

/* Large enough that the result is stored past the caches. */
static void large_outputs_have_the_same_bits(void **state) {
  (void)state;
  enum { ROWS = 2050, COLUMNS = 16411 };
  uint16_t *gate = malloc(COLUMNS * sizeof *gate), *up = malloc(COLUMNS * sizeof *up);
  uint16_t *expected = malloc(COLUMNS * sizeof *expected);
  uint16_t *out = malloc(((size_t)ROWS * COLUMNS + 1) * sizeof *out);
  fill_random(NYB_BF16, gate, COLUMNS);
  fill_random(NYB_BF16, up, COLUMNS);
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    nyb_context *context = context_for(isa, 2);
    if (context == NULL) continue;
    nyb_geglu geglu = one_row(NYB_BF16, gate, up, expected, COLUMNS);
    run(context, &geglu);
    geglu.rows = ROWS;
    geglu.gate_stride = geglu.up_stride = 0;
    geglu.out = out + 1;
    geglu.out_stride = COLUMNS;
    memset(out, 0xa5, ((size_t)ROWS * COLUMNS + 1) * sizeof *out);
    run(context, &geglu);
    for (int64_t row = 0; row < ROWS; row++) {
      assert_memory_equal(out + 1 + row * COLUMNS, expected, COLUMNS * sizeof *out);
    }
    nyb_context_destroy(context);
  }
  free(gate);
  free(up);
  free(expected);
  free(out);
}

/* ---- Offsets beyond 32 bits (field case 65) ---------------------------------------------------
 */

static uint16_t *sparse(int64_t elements) {
  void *memory = mmap(NULL, (size_t)elements * sizeof(uint16_t), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

/* Only the first and the last tasks: the others would touch all of the memory. */
static void ends_only(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  (void)user_data;
  assert_true(task_count > 4);
  task(task_data, 0);
  task(task_data, task_count - 2);
  task(task_data, task_count - 1);
}

/* The shape of the report, 149,911 rows of 14,336, in memory of which only the ends exist. */
static void elements_beyond_2_to_31_are_reached(void **state) {
  (void)state;
  const int64_t rows = 149911, columns = 14336, count = rows * columns;
  uint16_t *gate = sparse(count), *up = sparse(count), *out = sparse(count);
  if (gate == NULL || up == NULL || out == NULL) skip();
  enum { END = 100 };
  fill_random(NYB_BF16, gate, END);
  fill_random(NYB_BF16, gate + count - END, END);
  fill_random(NYB_BF16, up, END);
  fill_random(NYB_BF16, up + count - END, END);
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.parallel_for = ends_only;
  options.threads = 2;
  nyb_context *context;
  assert_int_equal(nyb_context_create(&options, &context), NYB_OK);
  nyb_geglu geglu = one_row(NYB_BF16, gate, up, out, columns);
  geglu.rows = rows;
  geglu.gate_stride = geglu.up_stride = geglu.out_stride = columns;
  foreach (const nyb_path, path, paths) {
    geglu.path = *path;
    memset(out, 0xa5, END * sizeof *out);
    memset(out + count - END, 0xa5, END * sizeof *out);
    run(context, &geglu);
    for (int64_t i = 0; i < count; i = i == END - 1 ? count - END : i + 1) {
      const double y =
          oracle_geglu(NYB_BF16, oracle_decode(NYB_BF16, gate[i]), oracle_decode(NYB_BF16, up[i]));
      assert_int_equal(out[i], encode(NYB_BF16, y));
    }
  }
  nyb_context_destroy(context);
  munmap(gate, (size_t)count * sizeof *gate);
  munmap(up, (size_t)count * sizeof *up);
  munmap(out, (size_t)count * sizeof *out);
}

/* Row strides so large that two rows are further apart than 2^31 elements, forwards and back. */
static void row_offsets_beyond_2_to_31_are_reached(void **state) {
  (void)state;
  enum { ROWS = 4, COLUMNS = 70 };
  const int64_t pitch = (INT64_C(1) << 31) + 19, elements = (ROWS - 1) * pitch + COLUMNS;
  uint16_t *gate = sparse(elements), *up = sparse(elements), *out = sparse(elements);
  if (gate == NULL || up == NULL || out == NULL) skip();
  for (int64_t row = 0; row < ROWS; row++) {
    fill_random(NYB_BF16, gate + row * pitch, COLUMNS);
    fill_random(NYB_BF16, up + row * pitch, COLUMNS);
  }
  nyb_context *context = context_for(NYB_ISA_AUTO, 2);
  nyb_geglu geglu = one_row(NYB_BF16, gate, up + (ROWS - 1) * pitch, out, COLUMNS);
  geglu.rows = ROWS;
  geglu.gate_stride = geglu.out_stride = pitch;
  geglu.up_stride = -pitch;
  run(context, &geglu);
  for (int64_t row = 0; row < ROWS; row++) {
    for (int64_t i = 0; i < COLUMNS; i++) {
      const double x = oracle_decode(NYB_BF16, gate[row * pitch + i]);
      const double y =
          oracle_geglu(NYB_BF16, x, oracle_decode(NYB_BF16, up[(ROWS - 1 - row) * pitch + i]));
      assert_int_equal(out[row * pitch + i], encode(NYB_BF16, y));
    }
  }
  nyb_context_destroy(context);
  munmap(gate, (size_t)elements * sizeof *gate);
  munmap(up, (size_t)elements * sizeof *up);
  munmap(out, (size_t)elements * sizeof *out);
}

/* ---- Levers and counters ----------------------------------------------------------------------
 */

static nyb_counters counters_of(const nyb_context *context) {
  nyb_counters counters = {.struct_size = sizeof counters};
  assert_int_equal(nyb_counters_get(context, &counters), NYB_OK);
  return counters;
}

static int64_t kernel_calls(const nyb_context *context, const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = {.struct_size = sizeof kernel};
    assert_int_equal(nyb_kernel_at(context, i, &kernel), NYB_OK);
    if (strcmp(kernel.name, name) == 0) return kernel.calls;
  }
  fail_msg("no kernel %s", name);
  return -1;
}

static void levers_and_counters(void **state) {
  (void)state;
  static const struct {
    const char *lever; /* NULL: unset */
    nyb_path path;
    bool fused;
  } cases[] = {
      {NULL, NYB_PATH_AUTO, true},      {NULL, NYB_PATH_COMPAT, false},
      {"compat", NYB_PATH_AUTO, false}, {"compat", NYB_PATH_FUSED, true},
      {"fused", NYB_PATH_AUTO, true},   {"fused", NYB_PATH_COMPAT, false},
      {"auto", NYB_PATH_AUTO, true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (cases[i].lever == NULL) {
      unsetenv("NYBBLE_GEGLU");
    } else {
      setenv("NYBBLE_GEGLU", cases[i].lever, 1);
    }
    nyb_context *context = context_for(NYB_ISA_SCALAR, 1);
    uint16_t gate[3] = {0x3f80, 0x4000, 0}, up[3] = {0x3f80, 0x3f80, 0x3f80}, out[3];
    nyb_geglu geglu = one_row(NYB_BF16, gate, up, out, 3);
    geglu.path = cases[i].path;
    run(context, &geglu);
    run(context, &geglu);
    const nyb_counters counters = counters_of(context);
    assert_int_equal(counters.geglu_fused, cases[i].fused ? 2 : 0);
    assert_int_equal(counters.geglu_compat, cases[i].fused ? 0 : 2);
    assert_int_equal(kernel_calls(context, "geglu_plain_bf16_scalar"), cases[i].fused ? 2 : 0);
    geglu.columns = -1; /* a refused call counts nowhere */
    assert_int_equal(nyb_geglu_run(context, &geglu, NULL), NYB_ERROR_SHAPE);
    assert_int_equal(counters_of(context).geglu_fused, counters.geglu_fused);
    nyb_context_destroy(context);
  }
  setenv("NYBBLE_GEGLU", "quick", 1);
  nyb_context *context = NULL;
  assert_int_equal(nyb_context_create(NULL, &context), NYB_ERROR_ENVIRONMENT);
  assert_non_null(strstr(nyb_last_error(), "quick"));
  unsetenv("NYBBLE_GEGLU");
}

/* ---- Misuse ------------------------------------------------------------------------------------
 */

typedef struct misuse {
  nyb_status status;
  const char *word; /* in the sentence */
  nyb_geglu geglu;
} misuse;

static void check_misuse(nyb_context *context, const misuse *m, const uint16_t *memory,
                         size_t bytes) {
  unsigned char before[16384];
  assert_true(bytes <= sizeof before);
  memcpy(before, memory, bytes);
  const nyb_status status = nyb_geglu_run(context, &m->geglu, NULL);
  if (status != m->status || strstr(nyb_last_error(), m->word) == NULL) {
    fail_msg("expected %s about %s, got %s: %s", nyb_status_name(m->status), m->word,
             nyb_status_name(status), nyb_last_error());
  }
  assert_memory_equal(memory, before, bytes);
}

static void misuse_is_refused_and_changes_nothing(void **state) {
  (void)state;
  static uint16_t m[4096];
  const nyb_geglu good = {.struct_size = sizeof good,
                          .rows = 4,
                          .columns = 100,
                          .dtype = NYB_BF16,
                          .gate = m,
                          .gate_stride = 200,
                          .up = m + 100,
                          .up_stride = 200,
                          .out = m + 1000,
                          .out_stride = 100};
  fill_random(NYB_BF16, m, 4096);
  misuse cases[40];
  int count = 0;
#define CASE(status_, word_, field, value)                                      \
  cases[count] = (misuse){.status = (status_), .word = (word_), .geglu = good}; \
  cases[count++].geglu.field = (value)
  CASE(NYB_ERROR_STRUCT_SIZE, "struct_size", struct_size, 0);
  CASE(NYB_ERROR_STRUCT_SIZE, "struct_size", struct_size, sizeof good - 1);
  CASE(NYB_ERROR_SHAPE, "rows is -1", rows, -1);
  CASE(NYB_ERROR_SHAPE, "columns is -7", columns, -7);
  CASE(NYB_ERROR_ENUM, "dtype is 9", dtype, (nyb_dtype)9);
  CASE(NYB_ERROR_ENUM, "dtype is 0", dtype, (nyb_dtype)0);
  CASE(NYB_ERROR_ENUM, "path is 3", path, (nyb_path)3);
  CASE(NYB_ERROR_ENUM, "path is -1", path, (nyb_path)-1);
  CASE(NYB_ERROR_NULL, "gate", gate, NULL);
  CASE(NYB_ERROR_NULL, "up", up, NULL);
  CASE(NYB_ERROR_NULL, "out", out, NULL);
  CASE(NYB_ERROR_ALIGNMENT, "gate", gate, (char *)m + 1);
  CASE(NYB_ERROR_ALIGNMENT, "up", up, (char *)m + 1);
  CASE(NYB_ERROR_ALIGNMENT, "out", out, (char *)m + 2001);
  CASE(NYB_ERROR_STRIDE, "out", out_stride, 99);
  CASE(NYB_ERROR_STRIDE, "out", out_stride, -99);
  CASE(NYB_ERROR_STRIDE, "out", out_stride, 0);
  CASE(NYB_ERROR_STRIDE, "gate", gate_stride, INT64_MAX);
  CASE(NYB_ERROR_STRIDE, "up", up_stride, INT64_MIN);
  CASE(NYB_ERROR_STRIDE, "out", out_stride, INT64_MAX / 4);
  CASE(NYB_ERROR_OVERLAP, "gate", out, m + 1);
  CASE(NYB_ERROR_OVERLAP, "gate", out, m + 50);
  CASE(NYB_ERROR_OVERLAP, "up", up, m + 1001);
  CASE(NYB_ERROR_OVERLAP, "gate", gate, m + 1399);
  CASE(NYB_ERROR_OVERLAP, "gate", gate, m + 999);
  CASE(NYB_ERROR_OVERLAP, "gate", out, m); /* the same place with another stride */
#undef CASE
  nyb_context *context = context_for(NYB_ISA_AUTO, 1);
  for (int i = 0; i < count; i++) check_misuse(context, &cases[i], m, sizeof m);
  misuse halves = {NYB_ERROR_OVERLAP, "up", good}; /* one element too wide for its half */
  halves.geglu.out = m;
  halves.geglu.out_stride = 200;
  halves.geglu.columns = 101;
  check_misuse(context, &halves, m, sizeof m);
  misuse reversed = {NYB_ERROR_OVERLAP, "gate", good}; /* the same rows the other way round */
  reversed.geglu.out = m + 600;
  reversed.geglu.out_stride = -200;
  check_misuse(context, &reversed, m, sizeof m);
  assert_int_equal(nyb_geglu_run(NULL, &good, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_geglu_run(context, NULL, NULL), NYB_ERROR_NULL);
  assert_int_equal(nyb_geglu_run(context, &good, m), NYB_ERROR_VALUE);
  assert_int_equal(nyb_geglu_run(context, &good, NULL), NYB_OK);
  nyb_context_destroy(context);
}

int main(void) {
  unsetenv("NYBBLE_GEGLU");
  unsetenv("NYBBLE_ISA");
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    const char *reason;
    if (nyb_isa_runs_here(isa, &reason)) {
      printf("%s: checked\n", nyb_isa_name(isa));
    } else {
      printf("%s: SKIPPED, %s\n", nyb_isa_name(isa), reason);
    }
  }
  fesetround(FE_UPWARD); /* the tables are made here, and checked by all that follows */
  nyb_context *first = NULL;
  const nyb_status status = nyb_context_create(NULL, &first);
  fesetround(FE_TONEAREST);
  if (status != NYB_OK) return EXIT_FAILURE;
  nyb_context_destroy(first);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_gate_gives_the_bits_of_the_contract),
      cmocka_unit_test(the_contract_has_the_properties_documented),
      cmocka_unit_test(the_f32_tanh_is_within_3_units),
      cmocka_unit_test(f32_stays_within_its_bound),
      cmocka_unit_test(f32_field_cases),
      cmocka_unit_test(every_kernel_takes_every_length_and_alignment),
      cmocka_unit_test(views_are_taken_as_they_are),
      cmocka_unit_test(nothing_is_a_size),
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(the_callers_rounding_changes_no_bit),
      cmocka_unit_test(large_outputs_have_the_same_bits),
      cmocka_unit_test(elements_beyond_2_to_31_are_reached),
      cmocka_unit_test(row_offsets_beyond_2_to_31_are_reached),
      cmocka_unit_test(levers_and_counters),
      cmocka_unit_test(misuse_is_refused_and_changes_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
