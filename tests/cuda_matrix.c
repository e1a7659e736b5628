/* SPDX-License-Identifier: Apache-2.0 */
/* Compiles every specialisation of the CUDA backend's shipped matrix for the architectures that it
 * is shipped for, without a GPU, and reports registers and spills.
 *
 *     cuda_matrix [JOBS [PROGRAM]]    JOBS 0 lists them only
 *
 * What is compiled is what the host code chooses on such a device (nyb_cuda_*_matrix). It fails
 * where one does not compile, where the code of a tuned kernel spills registers, and where a
 * program is in no matrix. It needs NVRTC; without, it exits with 77 and says why. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/cuda/jit.h"
#include "../src/cuda/operations.h"
#include "../src/cuda/programs.h"

enum { MAX_SPECS = 8192, MAX_JOBS = 64, LOG_BYTES = 1 << 16 };

/* An A100, an H100 or H200, an RTX 5090. */
static const nyb_cuda_properties devices[] = {
    {.compute_capability = 80,
     .multiprocessors = 108,
     .shared_bytes_per_block = 163 << 10,
     .shared_bytes_per_multiprocessor = 164 << 10,
     .l2_bytes = INT64_C(40) << 20},
    {.compute_capability = 90,
     .multiprocessors = 132,
     .shared_bytes_per_block = 227 << 10,
     .shared_bytes_per_multiprocessor = 228 << 10,
     .l2_bytes = INT64_C(50) << 20},
    {.compute_capability = 120,
     .multiprocessors = 170,
     .shared_bytes_per_block = 99 << 10,
     .shared_bytes_per_multiprocessor = 100 << 10,
     .l2_bytes = INT64_C(96) << 20},
};
enum { DEVICES = sizeof devices / sizeof devices[0] };

/* ---- The matrix ----------------------------------------------------------------------------- */

typedef struct entry {
  nyb_cuda_spec spec;
  int32_t compute_capability;
  bool tuned;
} entry;

static entry entries[MAX_SPECS];
static int entry_count;

typedef struct visitor {
  int32_t compute_capability;
  const char *program; /* NULL: all */
} visitor;

static void visit(void *data, const nyb_cuda_spec *spec, bool tuned) {
  const visitor *v = data;
  if (v->program != NULL && strcmp(v->program, spec->program->name) != 0) return;
  for (int i = 0; i < entry_count; i++) {
    entry *e = &entries[i];
    if (e->compute_capability == v->compute_capability && e->spec.program == spec->program &&
        memcmp(e->spec.values, spec->values, sizeof spec->values) == 0) {
      e->tuned = e->tuned || tuned;
      return;
    }
  }
  if (entry_count == MAX_SPECS) {
    printf("more than %d specialisations\n", MAX_SPECS);
    exit(1);
  }
  entries[entry_count++] = (entry){*spec, v->compute_capability, tuned};
}

static void fill_matrix(const char *program) {
  for (int i = 0; i < DEVICES; i++) {
    visitor v = {devices[i].compute_capability, program};
    nyb_cuda_attention_matrix(&devices[i], visit, &v);
    nyb_cuda_quantize_matrix(&devices[i], visit, &v);
    nyb_cuda_geglu_matrix(&devices[i], visit, &v);
    nyb_cuda_cache_matrix(&devices[i], visit, &v);
  }
}

/* A program that no architecture's matrix has is one that nobody sees compile. */
static int count_absent(const char *program) {
  int absent = 0;
  for (int i = 0; nyb_cuda_programs[i] != NULL; i++) {
    const char *name = nyb_cuda_programs[i]->name;
    bool found = program != NULL && strcmp(program, name) != 0;
    for (int e = 0; e < entry_count; e++)
      found = found || entries[e].spec.program == nyb_cuda_programs[i];
    if (found) continue;
    printf("%s is in no matrix: failed\n", name);
    absent++;
  }
  return absent;
}

/* ---- One of them ---------------------------------------------------------------------------- */

typedef struct report {
  long registers, stack_bytes, spill_bytes, shared_bytes;
} report;

/* The number that ends where `at` points. */
static long number_before(const char *log, const char *at) {
  while (at > log && at[-1] >= '0' && at[-1] <= '9') at--;
  return strtol(at, NULL, 10);
}

/* Adds up the numbers before each `unit`; false where there is none. ptxas speaks of the kernel and
 * of each function that was not inlined. */
static bool sum_before(const char *log, const char *unit, long *sum) {
  bool found = false;
  *sum = 0;
  for (const char *at = strstr(log, unit); at != NULL; at = strstr(at + 1, unit)) {
    *sum += number_before(log, at);
    found = true;
  }
  return found;
}

static bool read_report(const char *log, report *r) {
  sum_before(log, " bytes smem", &r->shared_bytes); /* not said where there is none */
  return sum_before(log, " registers", &r->registers) &&
         sum_before(log, " bytes stack frame", &r->stack_bytes) &&
         sum_before(log, " bytes spill ", &r->spill_bytes);
}

/* Of the processor: the machine may be busy with other things. */
static double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void name_of(const entry *e, char *text, size_t bytes) {
  const nyb_cuda_program *program = e->spec.program;
  size_t used =
      (size_t)snprintf(text, bytes, "sm_%-3d %s", (int)e->compute_capability, program->name);
  for (int i = 0; program->parameters[i] != NULL && used < bytes; i++) {
    used += (size_t)snprintf(text + used, bytes - used, " %s=%d", program->parameters[i],
                             (int)e->spec.values[i]);
  }
}

/* Prints one line, or the compiler's words after it. */
static bool compile_entry(const nyb_context *context, const entry *e, double *slowest) {
  static char log[LOG_BYTES];
  char name[1024];
  nyb_cuda_binary binary;
  name_of(e, name, sizeof name);
  log[0] = '\0';
  const double start = seconds_now();
  const nyb_status status =
      nyb_cuda_compile(context, &e->spec, e->compute_capability, &binary, log, sizeof log);
  const double seconds = seconds_now() - start;
  if (seconds > *slowest) *slowest = seconds;
  if (status != NYB_OK) {
    printf("%s: failed: %s\n%s\n", name, nyb_last_error(), log);
    return false;
  }
  nyb_release(context, binary.cubin);
  report r;
  if (!read_report(log, &r)) {
    printf("%s: failed: no word of registers in the compiler's report:\n%s\n", name, log);
    return false;
  }
  const bool good = r.spill_bytes == 0 || !e->tuned;
  printf(
      "%s: %ld registers, %ld bytes shared, %ld stack, %ld spilled, %zu bytes of code, %.2f s%s\n",
      name, r.registers, r.shared_bytes, r.stack_bytes, r.spill_bytes, binary.bytes, seconds,
      good ? "" : ": failed: a tuned kernel spills");
  return good;
}

/* ---- All of them ---------------------------------------------------------------------------- */

typedef struct shared_counts {
  _Atomic int next, passed, failed;
  _Atomic int slowest_milliseconds;
} shared_counts;

/* In a process of its own: takes the next one until there is none. */
static void work(shared_counts *counts) {
  nyb_context *context;
  double slowest = 0;
  if (nyb_context_create(NULL, &context) != NYB_OK) _exit(1);
  for (int i = atomic_fetch_add(&counts->next, 1); i < entry_count;
       i = atomic_fetch_add(&counts->next, 1)) {
    atomic_fetch_add(
        compile_entry(context, &entries[i], &slowest) ? &counts->passed : &counts->failed, 1);
    fflush(stdout);
    int before = atomic_load(&counts->slowest_milliseconds);
    while (before < (int)(1000 * slowest) &&
           !atomic_compare_exchange_weak(&counts->slowest_milliseconds, &before,
                                         (int)(1000 * slowest))) {
    }
  }
  nyb_context_destroy(context);
  _exit(0);
}

int main(int argc, char **argv) {
  const int jobs = argc > 1 ? atoi(argv[1]) : 1;
  const char *program = argc > 2 ? argv[2] : NULL;
  const char *reason;
  if (jobs < 0 || jobs > MAX_JOBS) {
    printf("jobs must be 0 to %d\n", MAX_JOBS);
    return 2;
  }
  setvbuf(stdout, NULL, _IOFBF, LOG_BYTES); /* a report is written at once */
  if (!nyb_nvrtc_find(&reason)) {
    printf("skipped: CUDA %s\n", reason);
    return 77;
  }
  printf("NVRTC %d.%d, %s\n", (int)nyb_nvrtc_version() / 1000, (int)nyb_nvrtc_version() % 1000 / 10,
         nyb_nvrtc_library());
  fill_matrix(program);
  for (int i = 0; jobs == 0 && i < entry_count; i++) {
    char name[1024];
    name_of(&entries[i], name, sizeof name);
    printf("%s\n", name);
  }
  if (jobs == 0) return 0;
  int failed = count_absent(program);
  shared_counts *counts =
      mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (counts == MAP_FAILED) return 1;
  fflush(stdout);
  for (int i = 0; i < jobs; i++) {
    const pid_t child = fork();
    if (child < 0) failed++;
    if (child == 0) work(counts);
  }
  int status;
  while (wait(&status) > 0) failed += status != 0;
  const int done = atomic_load(&counts->passed) + atomic_load(&counts->failed);
  if (done != entry_count) {
    printf("%d specialisations were not compiled: failed\n", entry_count - done);
    failed += entry_count - done;
  }
  failed += atomic_load(&counts->failed);
  printf("the slowest took %.2f s of processor time\n",
         atomic_load(&counts->slowest_milliseconds) / 1e3);
  printf("%d passed, %d failed\n", atomic_load(&counts->passed), failed);
  return failed == 0 && entry_count > 0 ? 0 : 1;
}
