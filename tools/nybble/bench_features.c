/* SPDX-License-Identifier: Apache-2.0 */
/* nybble bench features: what masks, windows, pages and the like cost, each call in turn with the
 * plain one that reads as many bytes. Both go round copies of the data, so that all is cold.
 * Everything is prepared on the host and then taken to the backend. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_rows.h"
#include "placement.h"
#include "progress.h"

enum { BATCH, QUERY_HEADS, KV_HEADS, HEAD_DIM, TOKENS };

/* Every size of page and of the parts divides UNIT_TOKENS, of which N is a multiple. */
enum { UNIT_TOKENS = 128, FIRST_TOKENS = 128, LAST_TOKENS = 128, ROWS = 8 };
/* Of the case whose time must follow the window and not the sequence. */
enum { WINDOW_TOKENS = 1024, LONG_TOKENS = 131072, UNALIGNED_TOKENS = 500 };

static const nyb_bench_shape default_shapes[] = {{{1, 32, 8, 128, 8192}}};

typedef struct features_bench {
  nyb_bench_run *run;
  const nyb_bench_context *on;
  nyb_bench_shape shape;
  nyb_width width;
  nyb_bench_rows key, value;
  nyb_bench_copies copies;
  void *query, *out;     /* of ROWS query rows */
  void *numbers;         /* zeros of every dtype: a mask that adds nothing */
  void *ones;            /* bytes: a mask that hides nothing */
  void *per_head;        /* floats [query_heads] */
  int32_t *per_sequence; /* [batch]; of one case, on the host */
  int32_t *table;        /* the same */
  void *unpacked;        /* bf16 rows of the parts */
  int64_t placed_count;  /* of what release() lists, on the backend */
} features_bench;

/* Arrays of integers that a call may take, beside its lengths. */
enum { INTEGER_ARRAYS = 4 };

/* One of the two calls of a case. */
typedef struct side {
  const features_bench *bench;
  nyb_attention attention;
  nyb_plan plan;
  void *workspace;
  void *integers[INTEGER_ARRAYS]; /* on the backend */
  int32_t *lengths;               /* [windows][batch]; the first row where nothing slides */
  bool is_placed;                 /* lengths are on the backend, too */
  int64_t first_token;            /* of a copy, where k and v begin */
  int64_t page_tokens;
  bool in_parts, parts_are_unpacked;
  bool slides; /* the last token moves through the copy from call to call */
} side;

/* ---- Where a call finds its rows ------------------------------------------------------------ */

static nyb_stored rows_from(const nyb_bench_rows *rows, char *copy, int64_t heads, int64_t tokens,
                            int64_t first) {
  const nyb_stored_output all = nyb_bench_point_rows(rows, copy, heads, tokens);
  nyb_stored from = nyb_bench_as_input(&all);
  from.codes = (const char *)from.codes + first * rows->row_bytes[0];
  if (rows->format.scheme == NYB_PLAIN) return from;
  from.scales = (const char *)from.scales + first * rows->row_bytes[1];
  from.biases = (const char *)from.biases + first * rows->row_bytes[2];
  return from;
}

/* Rows of bf16 that stand by themselves, the same for K and V. */
static nyb_stored unpacked_rows(const side *s, int64_t tokens) {
  const int64_t *field = s->bench->shape.field;
  const int64_t dim = field[HEAD_DIM];
  return (nyb_stored){.format = {.scheme = NYB_PLAIN, .dtype = NYB_BF16},
                      .codes = s->bench->unpacked,
                      .codes_stride = {field[KV_HEADS] * tokens * dim, tokens * dim, dim}};
}

static nyb_part part_from(const side *s, char *copy, int64_t first, int64_t tokens) {
  const int64_t *field = s->bench->shape.field;
  if (s->parts_are_unpacked) {
    return (nyb_part){
        .tokens = tokens, .k = unpacked_rows(s, tokens), .v = unpacked_rows(s, tokens)};
  }
  return (nyb_part){.tokens = tokens,
                    .k = rows_from(&s->bench->key, copy, field[KV_HEADS], field[TOKENS], first),
                    .v = rows_from(&s->bench->value, copy, field[KV_HEADS], field[TOKENS], first)};
}

static int64_t windows_of(const features_bench *bench) {
  const int64_t windows = bench->shape.field[TOKENS] / WINDOW_TOKENS - 1;
  return windows < 1 ? 1 : windows;
}

static int64_t end_of_window(int64_t window) {
  return (window + 1) * WINDOW_TOKENS + UNALIGNED_TOKENS;
}

/* Goes round all windows of all copies before it comes back to one. They begin within a chunk and
 * within a tile, as most do. */
static char *slide(side *s, int64_t index) {
  const nyb_bench_copies *copies = &s->bench->copies;
  const int64_t windows = windows_of(s->bench), places = windows * copies->count;
  const int64_t place = index % places * (places % 10007 == 0 ? 1 : 10007) % places;
  const int64_t window = place % windows;
  const bool windowed = s->attention.window_tokens != 0;
  s->first_token = windowed ? 0 : end_of_window(window) - WINDOW_TOKENS;
  s->attention.lengths = s->lengths + window * s->bench->shape.field[BATCH];
  return copies->memory + place / windows * copies->copy_bytes;
}

static void point_side(side *s, int64_t index) {
  const features_bench *bench = s->bench;
  const int64_t *field = bench->shape.field;
  char *copy = s->slides ? slide(s, index) : nyb_bench_copy(&bench->copies, true, index);
  const int64_t tokens = s->page_tokens > 0 ? s->page_tokens : field[TOKENS];
  s->attention.k = rows_from(&bench->key, copy, field[KV_HEADS], tokens, s->first_token);
  s->attention.v = rows_from(&bench->value, copy, field[KV_HEADS], tokens, s->first_token);
  if (!s->in_parts) return;
  s->attention.first = part_from(s, copy, 0, FIRST_TOKENS);
  s->attention.last = part_from(s, copy, field[TOKENS] - LAST_TOKENS, LAST_TOKENS);
}

static nyb_status run_side(void *data, int64_t index) {
  side *s = data;
  point_side(s, index);
  return nyb_attention_run(s->bench->on->context, &s->attention, s->workspace,
                           s->plan.workspace_bytes, s->bench->on->stream);
}

/* ---- The cases ------------------------------------------------------------------------------ */

static void set_rows(side *s, int64_t rows) {
  const int64_t *field = s->bench->shape.field;
  const int64_t dim = field[HEAD_DIM];
  const int64_t stride[3] = {field[QUERY_HEADS] * rows * dim, rows * dim, dim};
  s->attention.query_len = rows;
  memcpy(s->attention.q.stride, stride, sizeof stride);
  memcpy(s->attention.out.stride, stride, sizeof stride);
}

/* An array over tokens that all rows share; heads: one for each head. */
static nyb_mask_array array_of(const side *s, const void *data, nyb_mask_array_kind kind,
                               nyb_dtype dtype, bool heads) {
  const int64_t tokens = s->bench->shape.field[TOKENS];
  return (nyb_mask_array){.data = data,
                          .kind = kind,
                          .dtype = dtype,
                          .stride = {0, heads ? tokens : 0, 0},
                          .tokens = tokens};
}

static void bool_mask(side *plain, side *with) {
  (void)plain;
  with->attention.mask_array =
      array_of(with, with->bench->ones, NYB_MASK_ARRAY_BOOL, (nyb_dtype)0, false);
}

static void bool_mask_of_heads(side *plain, side *with) {
  (void)plain;
  with->attention.mask_array =
      array_of(with, with->bench->ones, NYB_MASK_ARRAY_BOOL, (nyb_dtype)0, true);
}

static void added_mask(side *plain, side *with) {
  (void)plain;
  with->attention.mask_array =
      array_of(with, with->bench->numbers, NYB_MASK_ARRAY_ADD, NYB_F32, false);
}

static void added_mask_of_heads(side *plain, side *with) {
  (void)plain;
  with->attention.mask_array =
      array_of(with, with->bench->numbers, NYB_MASK_ARRAY_ADD, with->attention.q.dtype, true);
}

static void causal_rows(side *plain, side *with) {
  set_rows(plain, ROWS);
  set_rows(with, ROWS);
  with->attention.mask = NYB_MASK_CAUSAL;
}

static void whole_window(side *plain, side *with) {
  (void)plain;
  with->attention.window_tokens = with->bench->shape.field[TOKENS];
}

static void sinks(side *plain, side *with) {
  (void)plain;
  with->attention.sinks = with->bench->per_head;
}

static void softcap(side *plain, side *with) {
  (void)plain;
  with->attention.softcap = 50;
}

static void alibi(side *plain, side *with) {
  (void)plain;
  with->attention.alibi_slopes = with->bench->per_head;
}

static void window_sinks_softcap(side *plain, side *with) {
  whole_window(plain, with);
  sinks(plain, with);
  softcap(plain, with);
}

/* An eighth of each sequence is padding, which the plain call does not see. */
static void padded_starts(side *plain, side *with) {
  const int64_t *field = with->bench->shape.field;
  const int64_t padding = field[TOKENS] / 8;
  for (int64_t b = 0; b < field[BATCH]; b++) {
    with->bench->per_sequence[b] = (int32_t)padding;
    plain->lengths[b] = (int32_t)(field[TOKENS] - padding);
  }
  with->attention.starts = with->bench->per_sequence;
  plain->first_token = padding;
  plain->attention.capacity_tokens = field[TOKENS] - padding;
}

/* Pages of all sequences, scattered over the copy. */
static void set_pages(side *with, int64_t page_tokens) {
  const int64_t *field = with->bench->shape.field;
  const int64_t count = field[BATCH] * field[TOKENS] / page_tokens;
  const int64_t step = count % 7919 == 0 ? 1 : 7919; /* a prime: each page once */
  for (int64_t i = 0; i < count; i++) {
    with->bench->table[i] = (int32_t)(i * step % count);
  }
  with->page_tokens = page_tokens;
  with->attention.pages = (nyb_pages){.table = with->bench->table,
                                      .table_stride = field[TOKENS] / page_tokens,
                                      .page_tokens = page_tokens,
                                      .page_count = count};
}

static void pages_of_16(side *plain, side *with) {
  (void)plain;
  set_pages(with, 16);
}
static void pages_of_64(side *plain, side *with) {
  (void)plain;
  set_pages(with, 64);
}
static void pages_of_128(side *plain, side *with) {
  (void)plain;
  set_pages(with, 128);
}

static void ring(side *plain, side *with) {
  (void)plain;
  const int64_t *field = with->bench->shape.field;
  for (int64_t b = 0; b < field[BATCH]; b++) {
    with->bench->per_sequence[b] = (int32_t)(field[TOKENS] / 3);
  }
  with->attention.ring = (nyb_ring){.offsets = with->bench->per_sequence, .keep_tokens = 4};
}

static void parts(side *plain, side *with) {
  (void)plain;
  const int64_t *field = with->bench->shape.field;
  with->in_parts = true;
  with->first_token = FIRST_TOKENS;
  with->attention.capacity_tokens = field[TOKENS] - FIRST_TOKENS - LAST_TOKENS;
  for (int64_t b = 0; b < field[BATCH]; b++) {
    with->bench->per_sequence[b] = (int32_t)(field[TOKENS] - LAST_TOKENS);
  }
  with->attention.last_begins = with->bench->per_sequence;
}

static void unpacked_parts(side *plain, side *with) {
  parts(plain, with);
  with->parts_are_unpacked = true;
}

static void window_of_long(side *plain, side *with) {
  plain->slides = with->slides = true;
  plain->attention.capacity_tokens = WINDOW_TOKENS;
  with->attention.window_tokens = WINDOW_TOKENS;
  const int64_t batch = with->bench->shape.field[BATCH];
  for (int64_t i = 0; i < windows_of(with->bench) * batch; i++) {
    plain->lengths[i] = WINDOW_TOKENS;
    with->lengths[i] = (int32_t)end_of_window(i / batch);
  }
}

typedef struct feature_case {
  const char *name, *beside;
  double goal; /* of the ratio; 0: none */
  void (*prepare)(side *plain, side *with);
} feature_case;

static const feature_case cases[] = {
    {"mask array, bool", "no mask", 1.10, bool_mask},
    {"mask array, bool, one for each head", "no mask", 1.10, bool_mask_of_heads},
    {"mask array, added, f32", "no mask", 1.10, added_mask},
    {"mask array, added, q's dtype, one for each head", "no mask", 1.10, added_mask_of_heads},
    {"causal, 8 rows", "8 rows, no mask", 1.10, causal_rows},
    {"window of N", "no window", 1.10, whole_window},
    {"sinks", "no sinks", 1.10, sinks},
    {"softcap", "no softcap", 1.10, softcap},
    {"ALiBi slopes", "no slopes", 0, alibi},
    {"window of N, sinks and softcap", "none of them", 0, window_sinks_softcap},
    {"starts: an eighth is padding", "the rest alone", 0, padded_starts},
    {"pages of 16, scattered", "contiguous rows", 0, pages_of_16},
    {"pages of 64, scattered", "contiguous rows", 1.08, pages_of_64},
    {"pages of 128, scattered", "contiguous rows", 0, pages_of_128},
    {"ring, wrapped at a third", "contiguous rows", 0, ring},
    {"parts: 128 first, 128 last, as packed", "contiguous rows", 0, parts},
    {"parts: 128 first, 128 last, in bf16", "all packed", 0, unpacked_parts},
};
static const feature_case long_case = {"window of 1,024 over 131,072", "1,024 tokens alone", 1.30,
                                       window_of_long};

/* ---- Measuring ------------------------------------------------------------------------------ */

/* The kernel that takes a side's keys; NULL: none does. */
static const char *kernel_of(const nyb_bench_turn *turn) {
  return ((const side *)turn->data)->plan.key_kernel;
}

static void report(const features_bench *bench, const feature_case *c, const nyb_bench_turn *turns,
                   double ratio, const char *refusal) {
  const bool measured = refusal == NULL;
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "operation", "features");
  cJSON_AddStringToObject(result, "feature", c->name);
  cJSON_AddStringToObject(result, "beside", c->beside);
  nyb_json_add_integers(result, "shape", bench->shape.field, NYB_BENCH_SHAPE_FIELDS);
  cJSON_AddStringToObject(result, "cache", nyb_name_width(bench->width).text);
  cJSON_AddStringToObject(result, "dtype", nyb_dtype_name(bench->run->settings->dtype));
  cJSON_AddNumberToObject(result, "threads", (double)bench->on->threads);
  cJSON_AddStringToObject(result, "isa", nyb_isa_name(bench->on->isa));
  cJSON_AddStringToObject(result, "temperature", "cold");
  if (measured) {
    cJSON_AddStringToObject(result, "plain_key_kernel", kernel_of(&turns[0]));
    cJSON_AddStringToObject(result, "key_kernel", kernel_of(&turns[1]));
  }
  nyb_json_add_number(result, "goal", c->goal > 0 ? c->goal : (double)NAN);
  nyb_json_add_number(result, "plain_median_us",
                      measured ? turns[0].timing.median_us : (double)NAN);
  nyb_json_add_number(result, "median_us", measured ? turns[1].timing.median_us : (double)NAN);
  nyb_json_add_number(result, "ratio", measured ? ratio : (double)NAN);
  nyb_json_add_number(result, "plain_min_us", measured ? turns[0].timing.min_us : (double)NAN);
  nyb_json_add_number(result, "min_us", measured ? turns[1].timing.min_us : (double)NAN);
  nyb_json_add_number(result, "repeats", measured ? (double)turns[0].timing.repeats : 0);
  if (!measured) cJSON_AddStringToObject(result, "refused", refusal);
  cJSON_AddItemToArray(bench->run->results, result);

  /* Where the machine is busy the one or the other may be more than the call's own. */
  const double of_minima = measured ? turns[1].timing.min_us / turns[0].timing.min_us : 0;
  const bool missed = measured && c->goal > 0 && fmin(ratio, of_minima) > c->goal;

  nyb_table *table = bench->run->table;
  nyb_table_add(table, "%s", c->name);
  nyb_table_add(table, "%s", c->beside);
  nyb_table_add(table, "%s", nyb_name_width(bench->width).text);
  nyb_table_add(table, "%s", nyb_isa_name(bench->on->isa));
  nyb_table_add(table, "%lld", (long long)bench->on->threads);
  if (measured) {
    nyb_table_add(table, "%.1f", turns[0].timing.median_us);
    nyb_table_add(table, "%.1f", turns[1].timing.median_us);
    nyb_table_add(table, "%.3f", ratio);
    nyb_table_add(table, "%.3f", of_minima);
  } else {
    for (int i = 0; i < 4; i++) nyb_table_add(table, "-");
  }
  nyb_table_add(table, c->goal > 0 ? "%.2f" : "-", c->goal);
  nyb_table_add(table, "%s", !measured ? refusal : missed ? "missed" : "");
}

static int64_t lengths_bytes(const features_bench *bench) {
  return windows_of(bench) * bench->shape.field[BATCH] * (int64_t)sizeof(int32_t);
}

static side plain_side(const features_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape.field;
  side s = {.bench = bench, .plan = NYB_PLAN_INIT};
  s.lengths = nyb_command_allocate(lengths_bytes(bench));
  for (int64_t b = 0; b < field[BATCH]; b++) s.lengths[b] = (int32_t)field[TOKENS];
  s.attention = (nyb_attention)NYB_ATTENTION_INIT;
  s.attention.batch = field[BATCH];
  s.attention.query_heads = field[QUERY_HEADS];
  s.attention.kv_heads = field[KV_HEADS];
  s.attention.key_dim = s.attention.value_dim = field[HEAD_DIM];
  s.attention.capacity_tokens = field[TOKENS];
  s.attention.q = (nyb_input){.data = bench->query, .dtype = settings->dtype};
  s.attention.out = (nyb_output){.data = bench->out, .dtype = settings->dtype};
  s.attention.scale = (float)(1 / sqrt((double)field[HEAD_DIM]));
  s.attention.path = settings->path;
  s.attention.rounding = settings->rounding;
  set_rows(&s, 1);
  return s;
}

/* Takes the integers that a prepared side has on the host to the backend, where they stay until
 * the side is released. Returns 0, or 1 after a sentence on stderr. */
static int place_side(side *s) {
  const features_bench *bench = s->bench;
  const nyb_backend backend = bench->on->backend;
  nyb_attention *attention = &s->attention;
  const int64_t batch = bench->shape.field[BATCH];
  const struct {
    const int32_t **array;
    int64_t count;
  } arrays[INTEGER_ARRAYS] = {
      {&attention->starts, batch},
      {&attention->ring.offsets, batch},
      {&attention->last_begins, batch},
      {&attention->pages.table, batch * attention->pages.table_stride},
  };
  int status = 0;
  for (int i = 0; i < INTEGER_ARRAYS && status == 0; i++) {
    if (*arrays[i].array == NULL) continue;
    status = nyb_place_copy(backend, *arrays[i].array, arrays[i].count * (int64_t)sizeof(int32_t),
                            &s->integers[i]);
    *arrays[i].array = s->integers[i];
  }
  if (status != 0) return status;
  void *lengths = s->lengths;
  status = nyb_place(backend, &lengths, lengths_bytes(bench));
  s->attention.lengths = s->lengths = lengths;
  s->is_placed = true;
  return status;
}

static void release_side(const side *s) {
  const nyb_backend backend = s->bench->on->backend;
  for (int i = 0; i < INTEGER_ARRAYS; i++) nyb_release_placed(backend, s->integers[i]);
  nyb_release_placed(s->is_placed ? backend : NYB_BACKEND_CPU, s->lengths);
  nyb_release_placed(backend, s->workspace);
}

/* The library's status. */
static nyb_status plan_side(side *s) {
  point_side(s, 0);
  return nyb_attention_plan(s->bench->on->context, &s->attention, &s->plan);
}

static int place_workspace(side *s) {
  const int64_t bytes = (int64_t)s->plan.workspace_bytes;
  s->workspace = nyb_command_allocate(bytes);
  return nyb_place(s->bench->on->backend, &s->workspace, bytes);
}

/* That the call with the feature writes all of its rows, and finite numbers. */
static int check_out(const features_bench *bench, const feature_case *c, side *with) {
  const int64_t *field = bench->shape.field;
  const nyb_backend backend = bench->on->backend;
  const nyb_dtype dtype = bench->run->settings->dtype;
  const int64_t elements =
      field[BATCH] * field[QUERY_HEADS] * with->attention.query_len * field[HEAD_DIM];
  const int64_t bytes = elements * (int64_t)nyb_dtype_bytes(dtype);
  int status = nyb_fill_placed(backend, bench->out, 0xff, bytes); /* NaN in every dtype */
  if (status != 0) return status;
  if (run_side(with, 0) != NYB_OK) return nyb_command_failed("%s: %s", c->name, nyb_last_error());
  void *out = nyb_command_allocate(bytes);
  status = nyb_finish(backend, bench->on->stream);
  if (status == 0) status = nyb_fetch(backend, bench->out, bytes, out);
  const bool finite = status == 0 && nyb_bench_all_finite(out, dtype, elements);
  free(out);
  if (status != 0 || finite) return status;
  return nyb_command_failed("%s gave numbers that are not finite, or none", c->name);
}

static int measure_case(const features_bench *bench, const feature_case *c, side *plain,
                        side *with) {
  nyb_bench_turn turns[2] = {{.call = run_side, .data = plain}, {.call = run_side, .data = with}};
  double ratio = 0;
  int result = place_workspace(plain);
  if (result == 0) result = place_workspace(with);
  const int64_t round_calls = bench->copies.count * (with->slides ? windows_of(bench) : 1);
  if (result == 0) {
    result =
        nyb_bench_measure_in_turns(bench->run->settings, bench->on, round_calls, turns, &ratio);
  }
  if (result == 0) result = check_out(bench, c, with);
  if (result == 0) report(bench, c, turns, ratio, NULL);
  return result;
}

static int run_case(const features_bench *bench, const feature_case *c) {
  side plain = plain_side(bench), with = plain_side(bench);
  c->prepare(&plain, &with);
  nyb_progress_show("%s", c->name);
  int result = place_side(&plain);
  if (result == 0) result = place_side(&with);
  if (result == 0) {
    nyb_status status = plan_side(&plain);
    if (status == NYB_OK) status = plan_side(&with);
    if (status == NYB_ERROR_UNSUPPORTED) {
      report(bench, c, NULL, 0, nyb_last_error());
    } else if (status != NYB_OK) {
      result = nyb_command_failed("%s: %s", c->name, nyb_last_error());
    } else {
      result = measure_case(bench, c, &plain, &with);
    }
  }
  release_side(&plain);
  release_side(&with);
  return result;
}

/* ---- Data ----------------------------------------------------------------------------------- */

static int fill_caches(features_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape.field;
  nyb_context *context = bench->run->preparer;
  const int64_t heads = field[BATCH] * field[KV_HEADS], dim = field[HEAD_DIM];
  int64_t end = 0;
  int status = nyb_bench_describe_rows(bench->width.key_bits, settings, dim, &bench->key);
  if (status == 0) {
    status = nyb_bench_describe_rows(bench->width.value_bits, settings, dim, &bench->value);
  }
  if (status != 0) return status;
  if (!nyb_bench_place_rows(&bench->key, heads * field[TOKENS], &end) ||
      !nyb_bench_place_rows(&bench->value, heads * field[TOKENS], &end)) {
    return nyb_command_misused("the shape is too large");
  }
  status = nyb_bench_allocate_copies(bench->run, end, &bench->copies);
  if (status == 0) {
    status =
        nyb_bench_fill_rows(context, &bench->key, dim, heads, field[TOKENS], 1, &bench->copies);
  }
  if (status == 0) {
    status =
        nyb_bench_fill_rows(context, &bench->value, dim, heads, field[TOKENS], 2, &bench->copies);
  }
  return status;
}

static int prepare(features_bench *bench) {
  const nyb_bench_settings *settings = bench->run->settings;
  const int64_t *field = bench->shape.field;
  nyb_context *context = bench->run->preparer;
  int status = fill_caches(bench);
  if (status != 0) return status;
  const int64_t batch = field[BATCH], heads = field[QUERY_HEADS], tokens = field[TOKENS];
  const int64_t rows = batch * heads * ROWS * field[HEAD_DIM];
  const int64_t parts_elements =
      batch * field[KV_HEADS] * (FIRST_TOKENS + LAST_TOKENS) * field[HEAD_DIM];
  float *per_head = nyb_command_allocate(heads * 4);
  bench->query = nyb_command_allocate(rows * 4);
  bench->out = nyb_command_allocate(rows * 4);
  bench->numbers = nyb_command_allocate(heads * tokens * 4);
  bench->ones = nyb_command_allocate(heads * tokens);
  bench->per_head = per_head;
  bench->per_sequence = nyb_command_allocate(batch * 4);
  bench->table = nyb_command_allocate(batch * tokens / 16 * 4);
  bench->unpacked = nyb_command_allocate(parts_elements * 2);
  memset(bench->ones, 1, (size_t)(heads * tokens));
  for (int64_t h = 0; h < heads; h++) { /* ALiBi's slopes, which do as sinks, too */
    per_head[h] = (float)exp2(-8.0 * (double)(h + 1) / (double)heads);
  }
  status = nyb_bench_random_as(context, bench->query, settings->dtype, rows, 3);
  if (status == 0) {
    status = nyb_bench_random_as(context, bench->unpacked, NYB_BF16, parts_elements, 4);
  }
  if (status == 0) {
    status = nyb_bench_place_copies(bench->run, &bench->copies);
    bench->placed_count++;
  }
  const struct {
    void **memory;
    int64_t bytes;
  } arrays[] = {{&bench->query, rows * 4},
                {&bench->out, rows * 4},
                {&bench->numbers, heads * tokens * 4},
                {&bench->ones, heads * tokens},
                {&bench->per_head, heads * 4},
                {&bench->unpacked, parts_elements * 2}};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0] && status == 0; i++) {
    status = nyb_place(settings->backend, arrays[i].memory, arrays[i].bytes);
    bench->placed_count++;
  }
  return status;
}

static void release(const features_bench *bench) {
  void *const memory[] = {bench->copies.memory, bench->query,    bench->out,     bench->numbers,
                          bench->ones,          bench->per_head, bench->unpacked};
  for (int64_t i = 0; i < (int64_t)(sizeof memory / sizeof memory[0]); i++) {
    const bool is_placed = i < bench->placed_count;
    nyb_release_placed(is_placed ? bench->run->settings->backend : NYB_BACKEND_CPU, memory[i]);
  }
  free(bench->per_sequence);
  free(bench->table);
}

static int run_cases(nyb_bench_run *run, const nyb_bench_shape *shape, nyb_width width,
                     const feature_case *list, int64_t count) {
  features_bench bench = {.run = run, .shape = *shape, .width = width};
  int status = prepare(&bench);
  for (int64_t i = 0; i < run->context_count && status == 0; i++) {
    bench.on = &run->contexts[i];
    for (int64_t c = 0; c < count && status == 0; c++) status = run_case(&bench, &list[c]);
  }
  release(&bench);
  return status;
}

static int run_shapes(nyb_bench_run *run) {
  const nyb_bench_settings *settings = run->settings;
  int status = 0;
  for (int64_t s = 0; s < settings->shape_count && status == 0; s++) {
    nyb_bench_shape shape = settings->shapes[s];
    if (shape.field[TOKENS] % UNIT_TOKENS != 0 ||
        shape.field[TOKENS] < FIRST_TOKENS + 2 * LAST_TOKENS) {
      return nyb_command_misused("N is %lld; for the pages it must be a multiple of %d, from %d up",
                                 (long long)shape.field[TOKENS], UNIT_TOKENS,
                                 FIRST_TOKENS + 2 * LAST_TOKENS);
    }
    for (int64_t w = 0; w < settings->widths.count && status == 0; w++) {
      const nyb_width width = settings->widths.items[w];
      status = run_cases(run, &shape, width, cases, sizeof cases / sizeof cases[0]);
      nyb_bench_shape long_shape = shape;
      long_shape.field[TOKENS] = LONG_TOKENS;
      if (status == 0) status = run_cases(run, &long_shape, width, &long_case, 1);
    }
  }
  return status;
}

const nyb_bench_operation nyb_bench_features = {
    .name = "features",
    .columns =
        "<feature|<beside|<cache|<isa|>threads|>beside us|>with it us|>ratio|>of minima|>goal|<",
    .shape_fields = NYB_BENCH_SHAPE_FIELDS,
    .shape_words = "B,Hq,Hkv,D,N",
    .default_shapes = default_shapes,
    .default_shape_count = sizeof default_shapes / sizeof default_shapes[0],
    .on_cpu = true,
    .on_cuda = true,
    .run = run_shapes,
};
