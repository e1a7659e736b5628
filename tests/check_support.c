/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check_stage.h"

const check_library check_nybble = {
    .quantize = nyb_quantize_run,
    .dequantize = nyb_dequantize_run,
    .attention = nyb_attention_run,
    .geglu = nyb_geglu_run,
    .merge = nyb_attention_merge_run,
};

/* ---- Tallies ------------------------------------------------------------------------------ */

/* What is no kernel, but is checked and counted beside them: the spelled-out paths, the merge, and
 * what callers of attention may ask for, on each ISA and on the compat path. */
typedef struct path_tally {
  const char *name, *operation;
  nyb_isa isa;
} path_tally;
#define FEATURE_TALLIES(feature)                                                              \
  {feature "_compat", feature "_compat", NYB_ISA_SCALAR},                                     \
      {feature "_scalar", feature, NYB_ISA_SCALAR}, {feature "_avx2", feature, NYB_ISA_AVX2}, \
      {feature "_avx512", feature, NYB_ISA_AVX512}, {feature "_neon", feature, NYB_ISA_NEON}, \
      {feature "_cuda", feature, NYB_ISA_CUDA}, {                                             \
    feature "_compat_cuda", feature "_compat", NYB_ISA_CUDA                                   \
  }
/* And of them the cases that CUDA's decode kernel took, so that a run shows that it has. */
#define DECODE_TALLY(feature) \
  { feature "_decode_cuda", feature "_decode", NYB_ISA_CUDA }
static const path_tally paths[] = {
    {"attention_compat", "attention_compat", NYB_ISA_SCALAR},
    {"geglu_compat", "geglu_compat", NYB_ISA_SCALAR},
    {"attention_compat_cuda", "attention_compat", NYB_ISA_CUDA},
    {"geglu_compat_cuda", "geglu_compat", NYB_ISA_CUDA},
    {"attention_merge", "attention_merge", NYB_ISA_SCALAR},
    {"attention_merge_cuda", "attention_merge", NYB_ISA_CUDA},
    FEATURE_TALLIES("attention_top_left"),
    FEATURE_TALLIES("attention_window"),
    FEATURE_TALLIES("attention_mask_bool"),
    FEATURE_TALLIES("attention_mask_add"),
    FEATURE_TALLIES("attention_sinks"),
    FEATURE_TALLIES("attention_softcap"),
    FEATURE_TALLIES("attention_alibi"),
    FEATURE_TALLIES("attention_starts"),
    FEATURE_TALLIES("attention_pages"),
    FEATURE_TALLIES("attention_ring"),
    FEATURE_TALLIES("attention_parts"),
    DECODE_TALLY("attention_top_left"),
    DECODE_TALLY("attention_window"),
    DECODE_TALLY("attention_mask_bool"),
    DECODE_TALLY("attention_mask_add"),
    DECODE_TALLY("attention_sinks"),
    DECODE_TALLY("attention_softcap"),
    DECODE_TALLY("attention_alibi"),
    DECODE_TALLY("attention_starts"),
    DECODE_TALLY("attention_pages"),
    DECODE_TALLY("attention_ring"),
};
enum { PATH_COUNT = sizeof paths / sizeof paths[0] };

static bool operation_asked(const check_run *run, const char *operation) {
  const char *asked = run->options.operation;
  if (asked == NULL || strncmp(operation, asked, strlen(asked)) == 0) return true;
  return (strcmp(asked, "quantize") == 0 && strcmp(operation, "dequantize") == 0) ||
         (strcmp(asked, "append") == 0 && strcmp(operation, "cache_append") == 0);
}

static bool matches_format(const check_run *run, const char *format) {
  return run->options.format == NULL || strcmp(run->options.format, format) == 0;
}

bool check_wants_format(const check_run *run, const char *format) {
  return !run->ended && matches_format(run, format);
}

static bool counts_decode(const nyb_kernel *kernel) {
  const size_t length = strlen(kernel->name), end = strlen("_decode_cuda");
  return length > end && strcmp(kernel->name + length - end, "_decode_cuda") == 0;
}

/* The softmax and attention's path serve every format, GeGLU's path the plain ones, and decode on
 * CUDA the others. */
static bool format_asked(const check_run *run, const nyb_kernel *kernel) {
  if (matches_format(run, kernel->format)) return true;
  if (strcmp(kernel->operation, "geglu_compat") == 0) {
    return strncmp(run->options.format, "plain", strlen("plain")) == 0;
  }
  if (counts_decode(kernel)) return strncmp(run->options.format, "affine", strlen("affine")) == 0;
  return kernel->format[0] == '\0' || strcmp(kernel->operation, "attention_softmax") == 0 ||
         strcmp(kernel->operation, "attention_bias") == 0;
}

static void skip(check_tally *tally, const char *reason) {
  tally->skipped = 1;
  tally->skip_reason = reason;
}

/* A kernel that takes nothing but rectangles does not. */
static bool takes_features(const nyb_kernel *kernel) {
  return strcmp(kernel->operation, "attention_prefill") != 0;
}

static const char *why_left_out(const check_run *run, const nyb_kernel *kernel) {
  const check_options *asked = &run->options;
  const bool cuda = kernel->isa == NYB_ISA_CUDA;
  if (cuda != (asked->backend == NYB_BACKEND_CUDA)) return "backend";
  if (asked->isa != NYB_ISA_AUTO && asked->isa != kernel->isa) return "ISA";
  if (!operation_asked(run, kernel->operation)) return "operation";
  if (asked->features && !takes_features(kernel)) return "operation";
  return format_asked(run, kernel) ? NULL : "format";
}

/* A feature runs where the kernels of its ISA do. */
static nyb_kernel path_kernel(int64_t index) {
  const path_tally *path = &paths[index];
  nyb_kernel like = NYB_KERNEL_INIT;
  like.runs_here = true;
  like.reason = "";
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    if (nyb_kernel_at(NULL, i, &kernel) == NYB_OK && kernel.isa == path->isa) like = kernel;
  }
  if (path->isa == NYB_ISA_CUDA) { /* the device has been opened by now */
    like.runs_here = true;
    like.reason = "";
  }
  like.name = path->name;
  like.operation = path->operation;
  like.format = "";
  like.isa = path->isa;
  return like;
}

static bool make_tallies(check_run *run) {
  const int64_t kernels = nyb_kernel_count();
  run->tallies = calloc((size_t)(kernels + PATH_COUNT), sizeof *run->tallies);
  if (run->tallies == NULL) return false;
  run->tally_count = kernels + PATH_COUNT;
  for (int64_t i = 0; i < run->tally_count; i++) {
    check_tally *tally = &run->tallies[i];
    tally->index = i < kernels ? i : -1;
    if (i >= kernels) {
      tally->kernel = path_kernel(i - kernels);
    } else {
      tally->kernel.struct_size = sizeof tally->kernel;
      if (nyb_kernel_at(NULL, i, &tally->kernel) != NYB_OK) return false;
    }
    tally->left_out = why_left_out(run, &tally->kernel);
    if (tally->left_out == NULL && !tally->kernel.runs_here) {
      skip(tally, tally->kernel.reason[0] != '\0' ? tally->kernel.reason : "not in this build");
    }
  }
  return true;
}

static bool is_checked(const check_tally *tally) {
  return tally->left_out == NULL && tally->skipped == 0;
}

check_tally *check_find(check_run *run, const char *operation, const char *format, nyb_isa isa) {
  if (run->ended) return NULL;
  for (int64_t i = 0; i < run->tally_count; i++) {
    check_tally *tally = &run->tallies[i];
    if (tally->kernel.isa == isa && strcmp(tally->kernel.operation, operation) == 0 &&
        strcmp(tally->kernel.format, format) == 0) {
      return is_checked(tally) && run->contexts[isa] != NULL ? tally : NULL;
    }
  }
  return NULL;
}

check_tally *check_find_name(check_run *run, const char *name) {
  if (run->ended) return NULL;
  for (int64_t i = 0; i < run->tally_count; i++) {
    check_tally *tally = &run->tallies[i];
    if (strcmp(tally->kernel.name, name) == 0) {
      return is_checked(tally) && run->contexts[tally->kernel.isa] != NULL ? tally : NULL;
    }
  }
  return NULL;
}

void check_pass(check_tally *tally) { tally->passed++; }

/* How many kept failures say the same up to their case's details, which stand in parentheses. */
static int64_t kept_of_kind(const check_run *run, const char *text) {
  const size_t length = strcspn(text, "(");
  int64_t count = 0;
  for (int64_t i = 0; i < run->failures_kept; i++) {
    count += strncmp(run->failures[i], text, length) == 0;
  }
  return count;
}

static void note_failure(check_run *run, check_tally *tally, const char *format,
                         va_list arguments) {
  tally->failed++;
  if (run->failures_kept == CHECK_KEPT_FAILURES) return;
  char *text = run->failures[run->failures_kept];
  const int used = snprintf(text, CHECK_FAILURE_CHARACTERS, "%s: ", tally->kernel.name);
  vsnprintf(text + used, CHECK_FAILURE_CHARACTERS - (size_t)used, format, arguments);
  if (kept_of_kind(run, text) < CHECK_KEPT_OF_A_KIND) run->failures_kept++;
  const char *until = run->options.until;
  run->ended = run->ended || (until != NULL && strstr(text, until) != NULL);
}

void check_fail(check_run *run, check_tally *tally, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note_failure(run, tally, format, arguments);
  va_end(arguments);
}

void check_fail_cuda(check_run *run, const char *operation, const char *format, ...) {
  check_tally *tally = NULL;
  for (int64_t i = run->tally_count - 1; i >= 0; i--) {
    check_tally *other = &run->tallies[i];
    const bool begins = strncmp(other->kernel.operation, operation, strlen(operation)) == 0;
    if (other->kernel.isa == NYB_ISA_CUDA && is_checked(other) && begins) tally = other;
  }
  if (tally == NULL) return; /* then nothing was asked for */
  va_list arguments;
  va_start(arguments, format);
  note_failure(run, tally, format, arguments);
  va_end(arguments);
}

void check_step(check_run *run, const char *operation, int64_t done, int64_t total) {
  if (run->options.progress != NULL) {
    run->options.progress(run->options.progress_data, operation, done, total);
  }
}

void check_note_error(check_tally *tally, double error, double tolerance) {
  if (tolerance > 0 && error / tolerance > tally->worst) {
    tally->worst = error / tolerance;
  }
}

/* What counts for a path is the library's counter of it. */
static int64_t path_calls(const check_run *run, const check_tally *tally) {
  nyb_counters counters = NYB_COUNTERS_INIT;
  nyb_counters_get(run->contexts[tally->kernel.isa], &counters);
  if (strcmp(tally->kernel.operation, "attention_merge") == 0) return counters.attention_merge;
  return strcmp(tally->kernel.operation, "geglu_compat") == 0 ? counters.geglu_compat
                                                              : counters.attention_compat;
}

int64_t check_calls(const check_run *run, const check_tally *tally) {
  nyb_kernel kernel = NYB_KERNEL_INIT;
  if (tally->index < 0) return path_calls(run, tally);
  nyb_kernel_at(run->contexts[tally->kernel.isa], tally->index, &kernel);
  return kernel.calls;
}

/* ---- The run ------------------------------------------------------------------------------ */

/* A parallel-for of its own threads: the library's pool spins while it waits, which costs much
 * where the machine is busy. */
typedef struct share {
  nyb_task task;
  void *task_data;
  _Atomic int64_t next;
  int64_t count;
} share;

static void *take_tasks(void *data) {
  share *s = data;
  for (int64_t i; (i = atomic_fetch_add(&s->next, 1)) < s->count;) {
    s->task(s->task_data, i);
  }
  return NULL;
}

void check_parallel_for(void *user_data, int64_t task_count, nyb_task task, void *task_data) {
  enum { MOST_THREADS = 64 };
  const int64_t asked = *(const int64_t *)user_data;
  share s = {.task = task, .task_data = task_data, .count = task_count};
  pthread_t threads[MOST_THREADS];
  int started = 0;
  while (started < MOST_THREADS && started + 1 < asked && started + 1 < task_count &&
         pthread_create(&threads[started], NULL, take_tasks, &s) == 0) {
    started++;
  }
  take_tasks(&s);
  while (started > 0) pthread_join(threads[--started], NULL);
}

static void make_contexts(check_run *run) {
  static int64_t threads = 2;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
    check_tally *first = NULL;
    for (int64_t i = 0; i < run->tally_count && first == NULL; i++) {
      check_tally *tally = &run->tallies[i];
      if (tally->kernel.isa == isa && is_checked(tally)) first = tally;
    }
    if (first == NULL) continue;
    const nyb_context_options options = {.struct_size = sizeof options,
                                         .isa = isa == NYB_ISA_CUDA ? NYB_ISA_AUTO : isa,
                                         .backend = run->options.backend,
                                         .device = run->options.device,
                                         .threads = threads,
                                         .parallel_for = check_parallel_for,
                                         .parallel_for_data = &threads};
    if (nyb_context_create(&options, &run->contexts[isa]) != NYB_OK) {
      check_fail(run, first, "no context for it: %s", nyb_last_error());
    }
  }
}

/* A kernel that no case ran has not been checked, whatever the reason. */
static void add_up(check_run *run) {
  for (int64_t i = 0; i < run->tally_count; i++) {
    check_tally *tally = &run->tallies[i];
    const bool unreached = is_checked(tally) && tally->passed + tally->failed == 0;
    if (unreached && run->options.sanitizer) {
      skip(tally, "the small set for a sanitizer does without it");
    } else if (unreached) {
      check_fail(run, tally, "no check reached this kernel");
    }
    run->passed += tally->passed;
    run->failed += tally->failed;
    run->skipped += tally->skipped;
  }
}

/* The library's context uses the primary context that is current from here on. */
static bool open_device(check_run *run) {
  const bool cuda = run->options.backend == NYB_BACKEND_CUDA;
  if (run->options.library == NULL) run->options.library = cuda ? &check_staged : &check_nybble;
  if (!cuda) return true;
  if (!check_stage_open(run->options.device)) return false;
  check_stage_place(run->options.sanitizer ? STAGE_SEPARATE : STAGE_AS_ON_HOST);
  return true;
}

check_run *check_all(const check_options *options) {
  check_run *run = calloc(1, sizeof *run);
  if (run == NULL) return NULL;
  run->options = *options;
  if (!open_device(run)) {
    check_free(run);
    return NULL;
  }
  if (!make_tallies(run)) {
    check_free(run);
    return NULL;
  }
  make_contexts(run);
  if (operation_asked(run, "quantize")) check_quantize(run);
  if (operation_asked(run, "geglu")) check_geglu(run);
  if (operation_asked(run, "attention")) check_attention(run);
  if (operation_asked(run, "attention")) check_attention_places(run);
  if (operation_asked(run, "attention_merge")) check_attention_merge(run);
  if (operation_asked(run, "cache_append") && run->options.backend == NYB_BACKEND_CUDA) {
    check_append(run);
    check_cache_kinds(run);
  }
  add_up(run);
  return run;
}

void check_free(check_run *run) {
  if (run == NULL) return;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_CUDA; isa++) {
    nyb_context_destroy(run->contexts[isa]);
  }
  if (run->options.backend == NYB_BACKEND_CUDA) {
    check_stage_close();
    device_close();
  }
  free(run->tallies);
  free(run);
}

/* ---- Names -------------------------------------------------------------------------------- */

const char *check_dtype_name(nyb_dtype dtype) {
  static const char *const names[] = {[NYB_F32] = "f32", [NYB_F16] = "f16", [NYB_BF16] = "bf16"};
  return names[dtype];
}

void check_format_name(const nyb_format *format, char name[16]) {
  if (format->scheme == NYB_PLAIN) {
    snprintf(name, 16, "plain_%s", check_dtype_name(format->dtype));
  } else {
    snprintf(name, 16, "affine%d", (int)format->bits);
  }
}

/* ---- Buffers ------------------------------------------------------------------------------ */

enum { GUARD_BYTES = 256, SHIFT_BYTES = 4 };

/* 0xff in every byte is NaN as f32, f16 and bf16 alike, and the largest code of every width. */
enum { POISON = 0xff };

/* Which buffers live: a call's are few, and a check makes one call's at a time. */
enum { MAX_BUFFERS = 256 };
static check_buffer live_buffers[MAX_BUFFERS]; /* copies; memory NULL: free */

const check_buffer *check_buffer_around(const void *address) {
  const uint8_t *at = address;
  for (int i = 0; i < MAX_BUFFERS; i++) {
    const check_buffer *buffer = &live_buffers[i];
    if (buffer->memory != NULL && at >= buffer->memory &&
        at < buffer->memory + buffer->memory_bytes) {
      return buffer;
    }
  }
  return NULL;
}

/* Takes the first free place: for memory NULL; gives back the place that memory has. */
static check_buffer *live_place(const uint8_t *memory) {
  for (int i = 0; i < MAX_BUFFERS; i++) {
    if (live_buffers[i].memory == memory) return &live_buffers[i];
  }
  return NULL;
}

bool check_buffer_make(check_buffer *buffer, int64_t data_bytes) {
  const size_t bytes = 2 * GUARD_BYTES + SHIFT_BYTES + (size_t)data_bytes;
  *buffer = (check_buffer){.memory = malloc(bytes),
                           .image = malloc(bytes),
                           .memory_bytes = bytes,
                           .data_bytes = (size_t)data_bytes};
  if (buffer->memory == NULL || buffer->image == NULL) {
    check_buffer_free(buffer);
    return false;
  }
  check_buffer_poison(buffer);
  /* malloc aligns to 16 at least, so that data is aligned to 4 and to no more. */
  buffer->data = buffer->memory + GUARD_BYTES + SHIFT_BYTES;
  check_buffer *place = live_place(NULL);
  if (place == NULL) {
    check_buffer_free(buffer);
    return false;
  }
  *place = *buffer;
  return true;
}

void check_buffer_free(check_buffer *buffer) {
  check_buffer *place = buffer->memory != NULL ? live_place(buffer->memory) : NULL;
  if (place != NULL) *place = (check_buffer){0};
  free(buffer->memory);
  free(buffer->image);
  *buffer = (check_buffer){0};
}

void check_buffer_poison(check_buffer *buffer) {
  memset(buffer->memory, POISON, buffer->memory_bytes);
}

void check_buffer_seal(check_buffer *buffer) {
  memcpy(buffer->image, buffer->memory, buffer->memory_bytes);
}

void check_buffer_restore(check_buffer *buffer, int64_t offset_bytes, int64_t bytes) {
  const size_t start = (size_t)((const uint8_t *)buffer->data - buffer->memory);
  memcpy((uint8_t *)buffer->data + offset_bytes, buffer->image + start + offset_bytes,
         (size_t)bytes);
}

int64_t check_buffer_changed(const check_buffer *buffer) {
  if (memcmp(buffer->memory, buffer->image, buffer->memory_bytes) == 0) return CHECK_UNCHANGED;
  size_t i = 0;
  while (buffer->memory[i] == buffer->image[i]) i++;
  return (int64_t)i - ((const uint8_t *)buffer->data - buffer->memory);
}

/* ---- Random numbers ----------------------------------------------------------------------- */

/* A Weyl sequence through a mixing function (splitmix64's constants). */
uint64_t check_random_bits(check_random *random) {
  random->state += 0x9e3779b97f4a7c15u;
  uint64_t mixed = random->state;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

double check_random_uniform(check_random *random) {
  return (double)(check_random_bits(random) >> 11) * 0x1p-53;
}

/* The sum of four uniform numbers, brought to mean 0 and variance 1: within +-3.5. */
double check_random_normal(check_random *random) {
  const uint64_t bits = check_random_bits(random);
  const uint64_t sum =
      (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return ((double)sum / 65535 - 2) * 1.7320508075688772;
}

int64_t check_random_below(check_random *random, int64_t bound) {
  return (int64_t)(check_random_bits(random) % (uint64_t)bound);
}
