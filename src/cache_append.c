/* SPDX-License-Identifier: Apache-2.0 */
/* Appending on the CPU: rows are quantized to where their tokens will stand once the append has
 * succeeded, in up to three passes over rows. Whatever can be refused is found before anything is
 * written over. */
#include <stdatomic.h>

#include "cache.h"
#include "quantize.h"

/* A pass is cut into tasks of about this many elements, and a small one is not cut at all: waking
 * another thread takes as long as quantizing some thousands of elements. */
#define NYB_APPEND_TASK_ELEMENTS ((int64_t)1 << 14)

static const char *const part_names[NYB_CACHE_PARTS] = {"append.key", "append.value"};

typedef enum append_pass {
  CHECK,  /* new rows: whether they can be stored, now and when they leave the last part */
  RETIRE, /* rows that leave the last part: into the body */
  WRITE   /* new rows: where they belong */
} append_pass;

/* Rows are numbered through: those of K before those of V, then by sequence, head and token. */
typedef struct append_work {
  const nyb_cache *cache;
  const nyb_cache_storage *body; /* the cache's own, or a larger one */
  const nyb_append *append;
  append_pass pass;
  int64_t tokens; /* rows of each plane, some of which may be skipped */
  const nyb_input *input[NYB_CACHE_PARTS];
  nyb_quantize_fn body_kernel[NYB_CACHE_PARTS], plain_kernel;
  int64_t rows, rows_per_task;
  _Atomic int64_t first_refused; /* or rows */
} append_work;

/* A row, and what the append makes of its sequence, seen as it is in work->body. */
typedef struct row_place {
  int part;
  int64_t plane, sequence, head, token;
  nyb_cache_sequence before, after;
} row_place;

static nyb_cache_sequence sequence_before(const append_work *work, int64_t sequence) {
  nyb_cache_sequence state = nyb_cache_get_sequence(work->cache, sequence);
  if (work->body != &work->cache->storage) state.offset = 0;
  return state;
}

static nyb_cache_sequence sequence_after(const append_work *work, const nyb_cache_sequence *before,
                                         int64_t sequence) {
  return nyb_cache_after_append(work->cache, work->body->capacity_tokens, before,
                                nyb_appended_tokens(work->append, sequence));
}

static void enter_sequence(const append_work *work, row_place *place) {
  place->before = sequence_before(work, place->sequence);
  place->after = sequence_after(work, &place->before, place->sequence);
}

static row_place place_of(const append_work *work, int64_t row) {
  const int64_t kv_heads = work->cache->kv_heads, planes = work->cache->batch * kv_heads;
  const int64_t plane = row / work->tokens;
  row_place place = {.part = plane < planes ? NYB_KEY : NYB_VALUE, .token = row % work->tokens};
  place.plane = place.part == NYB_KEY ? plane : plane - planes;
  place.sequence = place.plane / kv_heads;
  place.head = place.plane % kv_heads;
  enter_sequence(work, &place);
  return place;
}

/* To the place `rows` rows further on, which are of this plane. */
static void step(const append_work *work, row_place *place, int64_t rows) {
  place->token += rows;
  if (place->token < work->tokens) return;
  place->token = 0;
  place->plane++;
  if (++place->head < work->cache->kv_heads) return;
  place->head = 0;
  if (++place->sequence == work->cache->batch) *place = (row_place){.part = NYB_VALUE};
  enter_sequence(work, place);
}

/* ---- What happens to a run of rows ---------------------------------------------------------- */

typedef struct row_run {
  int64_t rows;
  bool skipped; /* padding, or no row at all */
  bool rounded; /* to the dtype beside the body first, as if the row had been kept there */
  const nyb_cache_part *part; /* the format to bring the rows to */
  nyb_quantize_fn kernel;
  nyb_quantize_span span;
  /* From the rows of a head to those of the next one. */
  int64_t input_stride_bytes; /* 0 where there is no other head */
  const int64_t *plane_bytes; /* [NYB_CACHE_ARRAYS] of the target; NULL: nothing is written */
} row_run;

static void set_span(const append_work *work, row_run *run, const nyb_cache_part *part,
                     const void *input, nyb_dtype dtype) {
  run->part = part;
  run->span = (nyb_quantize_span){
      .input = input,
      .input_dtype = dtype,
      .groups = run->rows * part->layout.groups,
      .group_size = part->layout.group_size,
      .rule = work->cache->rule,
      .scale_dtype = part->format.dtype,
  };
}

static char *row_address(const nyb_cache *cache, const nyb_cache_storage *storage,
                         const nyb_cache_part *part, const row_place *at, int array,
                         const nyb_cache_place *place) {
  if (storage->array[at->part][array] == NULL) return NULL;
  return storage->array[at->part][array] +
         (place->block * cache->kv_heads + at->head) * storage->plane_bytes[at->part][array] +
         place->slot * part->row_bytes[array];
}

static void set_target(const append_work *work, row_run *run, const row_place *at,
                       const nyb_cache_place *place) {
  const nyb_cache *cache = work->cache;
  const nyb_cache_part *part = &nyb_cache_parts_of(cache, place->region)[at->part];
  const nyb_cache_storage *storage =
      place->region == NYB_BODY ? work->body : nyb_cache_const_storage_of(cache, place->region);
  run->plane_bytes = storage->plane_bytes[at->part];
  run->span.codes = row_address(cache, storage, part, at, NYB_CODES, place);
  run->span.scales = row_address(cache, storage, part, at, NYB_SCALES, place);
  run->span.biases = row_address(cache, storage, part, at, NYB_BIASES, place);
}

static row_run skip(int64_t rows) { return (row_run){.rows = rows, .skipped = true}; }

/* From `at` on, at most `most` rows of what is appended. */
static row_run new_rows(const append_work *work, const row_place *at, int64_t most) {
  const nyb_cache *cache = work->cache;
  const int64_t added = nyb_appended_tokens(work->append, at->sequence);
  const int64_t padding = work->tokens - added;
  if (at->token < padding) return skip(nyb_smaller(most, padding - at->token));
  const nyb_cache_place place =
      nyb_cache_place_of(cache, work->body->capacity_tokens, &at->after, at->sequence,
                         at->after.held - added + at->token - padding);
  const nyb_input *input = work->input[at->part];
  const nyb_dtype part_dtype = cache->options.part_dtype;
  const bool adjacent = input->stride[2] == cache->part[at->part].dim;
  row_run run = {.rows = adjacent ? nyb_smaller(most, place.rows) : 1};
  const bool checks = work->pass == CHECK;
  const bool plain = place.region == NYB_FIRST || (place.region == NYB_LAST && !checks);
  run.rounded = cache->kind == NYB_CACHE_MIXED && !plain && input->dtype != part_dtype;
  run.kernel = plain ? work->plain_kernel : work->body_kernel[at->part];
  const int64_t element = nyb_row_offset(input->stride, at->sequence, at->head, at->token);
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(input->dtype);
  if (cache->kv_heads > 1) run.input_stride_bytes = input->stride[1] * element_bytes;
  set_span(work, &run, &(plain ? cache->plain : cache->part)[at->part],
           (const char *)input->data + element * element_bytes, input->dtype);
  if (!checks) set_target(work, &run, at, &place);
  return run;
}

/* The same of what leaves the last part, counted from the sequence's first such row. */
static row_run retired_rows(const append_work *work, const row_place *at, int64_t most) {
  const nyb_cache *cache = work->cache;
  const int64_t token = at->before.last_begin + at->token;
  const int64_t end = nyb_smaller(at->before.held, at->after.last_begin);
  if (token >= end) return skip(most);
  const nyb_cache_place from =
      nyb_cache_place_of(cache, work->body->capacity_tokens, &at->before, at->sequence, token);
  const nyb_cache_place to =
      nyb_cache_place_of(cache, work->body->capacity_tokens, &at->after, at->sequence, token);
  row_run run = {.rows = nyb_smaller(nyb_smaller(most, end - token), from.rows),
                 .kernel = work->body_kernel[at->part],
                 .input_stride_bytes = cache->last.plane_bytes[at->part][NYB_CODES]};
  set_span(work, &run, &cache->part[at->part],
           row_address(cache, &cache->last, &cache->plain[at->part], at, NYB_CODES, &from),
           cache->options.part_dtype);
  set_target(work, &run, at, &to);
  return run;
}

static row_run run_at(const append_work *work, const row_place *at, int64_t most) {
  return work->pass == RETIRE ? retired_rows(work, at, most) : new_rows(work, at, most);
}

/* Some of a run's groups, rounded into a buffer first. */
static int64_t quantize_piece(const append_work *work, const row_run *run, int64_t group,
                              int64_t groups, char *buffer) {
  const nyb_quantize_span *span = &run->span;
  const int64_t group_bytes = (int64_t)run->part->layout.bits * span->group_size / 8;
  const int64_t scale_bytes = (int64_t)run->part->layout.scale_bytes;
  const int64_t element_bytes = (int64_t)nyb_dtype_bytes(span->input_dtype);
  nyb_quantize_span rounded = *span;
  rounded.input = (const char *)span->input + group * span->group_size * element_bytes;
  rounded.groups = groups * span->group_size;
  rounded.group_size = 1;
  rounded.codes = buffer;
  const int64_t elements = work->plain_kernel(&rounded);
  if (elements != rounded.groups) return elements / span->group_size;
  nyb_quantize_span piece = *span;
  piece.input = buffer;
  piece.input_dtype = work->cache->options.part_dtype;
  piece.groups = groups;
  if (span->codes != NULL) piece.codes = (char *)span->codes + group * group_bytes;
  if (span->scales != NULL) piece.scales = (char *)span->scales + group * scale_bytes;
  if (span->biases != NULL) piece.biases = (char *)span->biases + group * scale_bytes;
  return run->kernel(&piece);
}

static int64_t quantize_rounded(const append_work *work, const row_run *run) {
  enum { BUFFER_BYTES = 4096 };
  _Alignas(64) char buffer[BUFFER_BYTES];
  const int64_t most = BUFFER_BYTES / (int64_t)sizeof(float) / run->span.group_size;
  for (int64_t group = 0; group < run->span.groups;) {
    const int64_t groups = nyb_smaller(most, run->span.groups - group);
    const int64_t done = quantize_piece(work, run, group, groups, buffer);
    group += done;
    if (done != groups) return group;
  }
  return run->span.groups;
}

/* Groups done. */
static inline int64_t quantize_run(const append_work *work, const row_run *run) {
  return run->rounded ? quantize_rounded(work, run) : run->kernel(&run->span);
}

/* The same rows of the sequence's next head, which lie alike. */
static void move_to_next_head(row_run *run) {
  nyb_quantize_span *span = &run->span;
  span->input = (const char *)span->input + run->input_stride_bytes;
  if (run->plane_bytes == NULL) return;
  span->codes = (char *)span->codes + run->plane_bytes[NYB_CODES];
  if (span->scales == NULL) return;
  span->scales = (char *)span->scales + run->plane_bytes[NYB_SCALES];
  span->biases = (char *)span->biases + run->plane_bytes[NYB_BIASES];
}

static void append_rows(void *task_data, int64_t task) {
  append_work *work = task_data;
  const int64_t end = nyb_smaller(work->rows, (task + 1) * work->rows_per_task);
  int64_t row = task * work->rows_per_task;
  row_place place = place_of(work, row);
  while (row < end) {
    row_run run = run_at(work, &place, nyb_smaller(end - row, work->tokens - place.token));
    for (;;) {
      const int64_t done = run.skipped ? 0 : quantize_run(work, &run);
      if (!run.skipped && done != run.span.groups) {
        nyb_note_refused(&work->first_refused, row + done / run.part->layout.groups);
        return;
      }
      row += run.rows;
      /* Only whole heads are known to lie alike. */
      if (run.rows < work->tokens || end - row < work->tokens) break;
      if (place.head + 1 == work->cache->kv_heads) break;
      place.plane++;
      place.head++;
      move_to_next_head(&run);
    }
    step(work, &place, run.rows);
  }
}

static nyb_status refuse_row(const append_work *work, int64_t row) {
  const row_place at = place_of(work, row);
  row_run run = run_at(work, &at, 1);
  const char *name = part_names[at.part];
  if (!run.rounded) {
    return nyb_quantize_refuse(&run.span, run.kernel, name, at.sequence, at.head, at.token);
  }
  nyb_quantize_span plain = run.span;
  plain.groups *= plain.group_size;
  plain.group_size = 1;
  plain.codes = NULL;
  if (work->plain_kernel(&plain) != plain.groups) {
    return nyb_quantize_refuse(&plain, work->plain_kernel, name, at.sequence, at.head, at.token);
  }
  run.span.codes = run.span.scales = run.span.biases = NULL;
  return nyb_fail(NYB_ERROR_NON_FINITE,
                  "%s at batch %lld, head %lld, token %lld, group %lld: rounded to "
                  "options.part_dtype its scale or bias does not fit the dtype in which they are "
                  "stored",
                  name, (long long)at.sequence, (long long)at.head, (long long)at.token,
                  (long long)quantize_run(work, &run));
}

/* ---- Passes --------------------------------------------------------------------------------- */

/* `tokens` rows of each plane. */
static nyb_status run_pass(append_work *work, append_pass pass, int64_t tokens) {
  const nyb_cache *cache = work->cache;
  if (tokens == 0) return NYB_OK;
  work->pass = pass;
  work->tokens = tokens;
  work->rows = NYB_CACHE_PARTS * cache->batch * cache->kv_heads * tokens;
  atomic_store_explicit(&work->first_refused, work->rows, memory_order_relaxed);
  const int64_t tasks = (work->rows - 1) / work->rows_per_task + 1;
  if (tasks <= 2) {
    for (int64_t task = 0; task < tasks; task++) append_rows(work, task);
  } else {
    nyb_parallel(cache->context, tasks, append_rows, work);
  }
  const int64_t refused = atomic_load_explicit(&work->first_refused, memory_order_relaxed);
  return refused < work->rows ? refuse_row(work, refused) : NYB_OK;
}

/* Rows of a plane that leave the last part, where most do. */
static int64_t most_retired(const append_work *work) {
  int64_t most = 0;
  for (int64_t sequence = 0; sequence < work->cache->batch; sequence++) {
    const nyb_cache_sequence before = sequence_before(work, sequence);
    const nyb_cache_sequence after = sequence_after(work, &before, sequence);
    most = nyb_larger(most, nyb_smaller(before.held, after.last_begin) - before.last_begin);
  }
  return most;
}

/* Whether new rows stand where tokens are that are held now, all of which a failure has to leave.
 */
static bool writes_over(const append_work *work) {
  const nyb_cache *cache = work->cache;
  if (cache->kind != NYB_CACHE_ROTATING || work->body != &cache->storage) return false;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int64_t added = nyb_appended_tokens(work->append, sequence);
    if (added > cache->storage.capacity_tokens - cache->lengths[sequence]) return true;
  }
  return false;
}

static nyb_status fill(const nyb_cache *cache, const nyb_cache_storage *body,
                       const nyb_append *append) {
  append_work work = {
      .cache = cache,
      .body = body,
      .append = append,
      .input = {&append->key, &append->value},
      .plain_kernel = (nyb_quantize_fn)nyb_kernel_for(cache->context, NYB_OPERATION_QUANTIZE,
                                                      nyb_plain_format(cache->options.part_dtype)),
  };
  for (int part = 0; part < NYB_CACHE_PARTS; part++) {
    work.body_kernel[part] = (nyb_quantize_fn)nyb_kernel_for(cache->context, NYB_OPERATION_QUANTIZE,
                                                             cache->part[part].layout.id);
  }
  atomic_init(&work.first_refused, 0);
  const int64_t dim = nyb_larger(cache->part[NYB_KEY].dim, cache->part[NYB_VALUE].dim);
  work.rows_per_task = nyb_larger(1, NYB_APPEND_TASK_ELEMENTS / dim);
  const bool mixed = cache->kind == NYB_CACHE_MIXED;
  nyb_status status = NYB_OK;
  if (mixed || writes_over(&work)) status = run_pass(&work, CHECK, append->tokens);
  if (status == NYB_OK && mixed) status = run_pass(&work, RETIRE, most_retired(&work));
  if (status == NYB_OK) status = run_pass(&work, WRITE, append->tokens);
  return status;
}

int64_t nyb_cache_needed_tokens(const nyb_cache *cache, const nyb_append *append) {
  int64_t needed = 0;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
    const nyb_cache_sequence after = nyb_cache_after_append(
        cache, cache->storage.capacity_tokens, &before, nyb_appended_tokens(append, sequence));
    needed = nyb_larger(needed, nyb_cache_body_tokens(cache, &after));
  }
  return needed;
}

void nyb_cache_advance(nyb_cache *cache, const nyb_append *append) {
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
    const nyb_cache_sequence after = nyb_cache_after_append(
        cache, cache->storage.capacity_tokens, &before, nyb_appended_tokens(append, sequence));
    nyb_cache_set_sequence(cache, sequence, &after);
  }
}

static nyb_status append_to_pages(nyb_cache *cache, const nyb_append *append) {
  nyb_status status = nyb_cache_begin_pages(cache, append);
  if (status != NYB_OK) return status;
  status = fill(cache, &cache->storage, append);
  if (status != NYB_OK) {
    nyb_cache_undo_pages(cache, append);
    return status;
  }
  nyb_cache_advance(cache, append);
  return NYB_OK;
}

nyb_status nyb_cache_append_here(nyb_cache *cache, const nyb_append *append) {
  if (cache->kind == NYB_CACHE_PAGED) return append_to_pages(cache, append);
  const int64_t needed = nyb_cache_needed_tokens(cache, append);
  nyb_cache_storage larger;
  const bool grows = needed > cache->storage.capacity_tokens;
  nyb_status status = NYB_OK;
  if (grows) {
    status = nyb_cache_make_larger(cache, nyb_cache_grown_capacity(cache, needed), &larger);
    if (status != NYB_OK) return status;
  }
  status = fill(cache, grows ? &larger : &cache->storage, append);
  if (status != NYB_OK) {
    if (grows) nyb_cache_release_storage(cache, &larger);
    return status;
  }
  if (grows) nyb_cache_adopt_larger(cache, &larger);
  nyb_cache_advance(cache, append);
  return NYB_OK;
}
