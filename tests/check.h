/* SPDX-License-Identifier: Apache-2.0 */
/* The checks: every kernel of the library's own table, through the public API, against the oracle.
 * `nybble verify` and the tests run them.
 *
 * A case that fails is described (kernel, case, index, got, want, tolerance) and counted against
 * the kernel that it ran; a kernel that cannot run here counts as one skip, with the reason; one
 * that was not asked for is left out; a kernel that no case reached is a failure. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

/* ---- A run of the checks ------------------------------------------------------------------ */

/* What the checks call. The tests of the checks themselves put liars here. */
typedef struct check_library {
  nyb_status (*quantize)(nyb_context *context, const nyb_quantize *quantize, nyb_stream stream);
  nyb_status (*dequantize)(nyb_context *context, const nyb_dequantize *dequantize,
                           nyb_stream stream);
  nyb_status (*attention)(nyb_context *context, const nyb_attention *attention, void *workspace,
                          size_t workspace_bytes, nyb_stream stream);
  nyb_status (*geglu)(nyb_context *context, const nyb_geglu *geglu, nyb_stream stream);
  nyb_status (*merge)(nyb_context *context, const nyb_attention_merge *merge, nyb_stream stream);
} check_library;

extern const check_library check_nybble;

/* One line of the report: a kernel, or a path that is none (index -1). */
typedef struct check_tally {
  nyb_kernel kernel;
  int64_t index; /* in the library's table */
  int64_t passed, failed, skipped;
  const char *skip_reason;
  const char *left_out; /* what was asked for instead: another "backend", "operation", "format" or
                           "ISA"; NULL where it was asked for. It is in no count. */
  double worst;         /* the largest error met, as a share of its tolerance */
  double rms_error;     /* attention: relative, on normal data, without roundings */
} check_tally;

enum { CHECK_KEPT_FAILURES = 120, CHECK_KEPT_OF_A_KIND = 3, CHECK_FAILURE_CHARACTERS = 400 };

typedef void (*check_progress)(void *user_data, const char *operation, int64_t done, int64_t total);

typedef struct check_options {
  bool quick;
  bool sanitizer; /* CUDA: few cases, each buffer an allocation of its own */
  nyb_backend backend;
  int32_t device;         /* CUDA */
  nyb_isa isa;            /* AUTO: every one that runs here */
  const char *operation;  /* NULL: every one; else "quantize", "attention" (with its merge),
                             "attention_merge", "geglu" or "append" */
  bool without_attention; /* over caches: where a fake GPU has none */
  bool features;          /* of attention, only what a call may ask for beside a rectangle */
  const char *format;     /* NULL: every one, and mixed; else the kernel table's name of one */
  const check_library *library;
  const char *until;       /* the run may end with the first failure that holds these words; NULL:
                              it goes on to the end */
  check_progress progress; /* may be NULL */
  void *progress_data;
} check_options;

typedef struct check_run {
  check_options options;
  nyb_context *contexts[NYB_ISA_CUDA + 1]; /* by ISA; NULL where it does not run or is not asked */
  check_tally *tallies;
  int64_t tally_count;
  int64_t passed, failed, skipped;                              /* in all, once the run is over */
  char failures[CHECK_KEPT_FAILURES][CHECK_FAILURE_CHARACTERS]; /* the first of each kind */
  int64_t failures_kept;
  bool ended; /* what options.until asks for was met: no further kernel is found */
} check_run;

/* Runs them all, on the CPU or, by check_staged (check_stage.h), on a GPU. NULL where memory ran
 * out or the device cannot be used, with a sentence in check_error(); otherwise a report that
 * check_free() ends. */
check_run *check_all(const check_options *options);
void check_free(check_run *run);

void check_quantize(check_run *run);
void check_attention(check_run *run);
void check_attention_places(check_run *run);
void check_attention_merge(check_run *run);
void check_geglu(check_run *run);
void check_append(check_run *run);      /* CUDA */
void check_cache_kinds(check_run *run); /* CUDA */

/* What nyb_last_error() says, or, where the GPU failed outside the library, the driver's words. */
const char *check_error(void);

/* ---- For the checks ----------------------------------------------------------------------- */

/* The tally of a kernel to be checked; NULL where no such kernel exists, runs here or is asked for.
 * For a path that is no kernel the format is "". */
check_tally *check_find(check_run *run, const char *operation, const char *format, nyb_isa isa);

/* Whether cases of that format, by the kernel table's name, are asked for. */
bool check_wants_format(const check_run *run, const char *format);

/* The tally of the kernel of that name, under the same conditions. */
check_tally *check_find_name(check_run *run, const char *name);

void check_pass(check_tally *tally);
void check_fail(check_run *run, check_tally *tally, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
/* The same where no kernel is known: against the first of the GPU's that is asked for and whose
 * operation begins so. */
void check_fail_cuda(check_run *run, const char *operation, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
void check_step(check_run *run, const char *operation, int64_t done, int64_t total);
void check_note_error(check_tally *tally, double error, double tolerance);

/* Whether the kernel has been called since `before`, which check_calls() gave. */
int64_t check_calls(const check_run *run, const check_tally *tally);

/* A parallel-for for contexts: starts and ends threads at each call, as many in all, the caller
 * included, as the int64_t that user_data points to says. */
void check_parallel_for(void *user_data, int64_t task_count, nyb_task task, void *task_data);

/* "affine4", "plain_bf16": as the kernel table spells it. */
void check_format_name(const nyb_format *format, char name[16]);
const char *check_dtype_name(nyb_dtype dtype);

/* ---- Buffers between guard bands ----------------------------------------------------------- */

/* Memory with a guard band on either side, filled with a pattern that is NaN in every dtype, and
 * shifted off every alignment but 4 bytes. */
typedef struct check_buffer {
  uint8_t *memory; /* all of it */
  uint8_t *image;  /* what memory held when check_buffer_seal() was called */
  size_t memory_bytes;
  void *data;
  size_t data_bytes;
} check_buffer;

bool check_buffer_make(check_buffer *buffer, int64_t data_bytes);
void check_buffer_free(check_buffer *buffer);
/* Remembers what it holds now. */
void check_buffer_seal(check_buffer *buffer);
/* Fills all of it with the pattern again; what was sealed stays. */
void check_buffer_poison(check_buffer *buffer);
/* Brings [offset, offset + bytes) of data back to what it was when sealed: what may change. */
void check_buffer_restore(check_buffer *buffer, int64_t offset_bytes, int64_t bytes);
/* The live buffer whose memory the address points into, or NULL. */
const check_buffer *check_buffer_around(const void *address);
/* Where it differs from what was sealed, counted from data (so negative before it); INT64_MAX where
 * nothing does. */
int64_t check_buffer_changed(const check_buffer *buffer);
#define CHECK_UNCHANGED INT64_MAX

/* Behind each workspace that check_library.attention gets lie so many bytes of this value. */
enum { CHECK_WORKSPACE_GUARD_BYTES = 256, CHECK_WORKSPACE_GUARD = 0xa5 };

/* ---- Random numbers: the same on every machine -------------------------------------------- */

typedef struct check_random {
  uint64_t state;
} check_random;

uint64_t check_random_bits(check_random *random);
double check_random_uniform(check_random *random); /* [0, 1) */
double check_random_normal(check_random *random);
int64_t check_random_below(check_random *random, int64_t bound);

#endif
