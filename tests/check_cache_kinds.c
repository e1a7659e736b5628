/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of cache in device memory against the same cache of the CPU: both take the same random
 * walk of appends (padded ones, too), trims, reorders, reserves, resets and replayed graphs, and
 * after each step hold the same tokens, to the bit, and give the same attention. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check_device.h"
#include "check_stage.h"

enum {
  HEADS = 2,
  MOST_BATCH = 5,
  MOST_COUNT = 40, /* tokens of an append */
  LONGEST = 160,   /* sequences are cut when they are longer */
  MOST_DIM = 128,
  MOST_ROWS = 5, /* of a query */
  QUERY_HEADS = 4
};

typedef struct kinds_check {
  check_run *run;
  check_tally *tally;
  nyb_context *cpu, *cuda;
  nyb_cache_options options;
  nyb_cache *want, *got; /* of the CPU and the GPU */
  int64_t batch;
  check_random random;
  float *host[2], *device[2]; /* rows of an append, [batch, HEADS, count, dim] */
  float *query, *out, *lse;   /* on the device */
  int32_t *flag;              /* likewise */
  device_stream stream;
  const char *name, *action;
  int64_t step;
  bool good;
} kinds_check;

static int64_t below(kinds_check *c, int64_t bound) {
  return check_random_below(&c->random, bound);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static bool fail(kinds_check *c, const char *why) {
  if (c->good) {
    check_fail(c->run, c->tally, "%s, step %lld, %s: %s", c->name, (long long)c->step, c->action,
               why);
  }
  c->good = false;
  return false;
}

static bool require(kinds_check *c, nyb_status status) {
  return status == NYB_OK || fail(c, nyb_last_error());
}

static bool on_device(kinds_check *c, bool done) { return done || fail(c, device_error()); }

/* ---- Memory of the device's caches, where nothing is what it was -------------------------------
 */

static void *allocate_poisoned(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  (void)alignment; /* 256 bytes are more */
  void *memory = device_allocate((int64_t)bytes);
  if (memory != NULL) {
    device_fill(memory, 0xff, (int64_t)bytes, NULL); /* NaN, and lengths of -1 */
    device_synchronize(NULL);
  }
  return memory;
}

static void release_poisoned(void *user_data, void *memory) {
  (void)user_data;
  device_free(memory);
}

/* ---- Rows of a cache, wherever they are -------------------------------------------------------
 */

/* A view whose pointers are the host's: the arrays of a device's cache are copied. */
typedef struct held_rows {
  nyb_attention view;
  void *copies[32];
  int count;
} held_rows;

static void *fetch(kinds_check *c, held_rows *held, const void *from, int64_t bytes) {
  if (from == NULL || bytes <= 0 || !c->good) return NULL;
  void *copy = malloc((size_t)bytes);
  if (copy == NULL) {
    fail(c, "no memory for a copy");
    return NULL;
  }
  held->copies[held->count++] = copy;
  return on_device(c, device_download(copy, from, bytes, c->stream)) ? copy : NULL;
}

static int64_t elements_of(const int64_t stride[3], int64_t blocks, int64_t tokens) {
  return (blocks - 1) * stride[0] + (HEADS - 1) * stride[1] + tokens * stride[2];
}

static void fetch_stored(kinds_check *c, held_rows *held, nyb_stored *stored, int64_t blocks,
                         int64_t tokens) {
  const bool affine = stored->format.scheme == NYB_AFFINE;
  const int64_t unit = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  if (tokens == 0 || blocks == 0) return;
  stored->codes = fetch(c, held, stored->codes,
                        elements_of(stored->codes_stride, blocks, tokens) * (affine ? 4 : unit));
  if (!affine) return;
  stored->scales =
      fetch(c, held, stored->scales, elements_of(stored->scales_stride, blocks, tokens) * unit);
  stored->biases =
      fetch(c, held, stored->biases, elements_of(stored->biases_stride, blocks, tokens) * unit);
}

static void fetch_view(kinds_check *c, held_rows *held) {
  *held = (held_rows){.view = NYB_ATTENTION_INIT};
  if (!require(c, nyb_cache_view(c->got, &held->view))) return;
  nyb_attention *view = &held->view;
  const int64_t batch_bytes = c->batch * (int64_t)sizeof(int32_t);
  const bool paged = view->pages.page_tokens > 0;
  const int64_t blocks = paged ? view->pages.page_count : c->batch;
  const int64_t tokens = paged ? view->pages.page_tokens : view->capacity_tokens;
  fetch_stored(c, held, &view->k, blocks, tokens);
  fetch_stored(c, held, &view->v, blocks, tokens);
  fetch_stored(c, held, &view->first.k, c->batch, view->first.tokens);
  fetch_stored(c, held, &view->first.v, c->batch, view->first.tokens);
  fetch_stored(c, held, &view->last.k, c->batch, view->last.tokens);
  fetch_stored(c, held, &view->last.v, c->batch, view->last.tokens);
  view->lengths = fetch(c, held, view->lengths, batch_bytes);
  view->ring.offsets = fetch(c, held, view->ring.offsets, batch_bytes);
  view->last_begins = fetch(c, held, view->last_begins, batch_bytes);
  view->pages.table = fetch(c, held, view->pages.table, view->pages.table_stride * batch_bytes);
  on_device(c, device_synchronize(c->stream));
}

static void drop_rows(held_rows *held) {
  for (int i = 0; i < held->count; i++) free(held->copies[i]);
}

typedef struct row_place {
  const nyb_stored *rows;
  int64_t block, row;
} row_place;

/* NULL rows: the view leads nowhere. */
static row_place place_in(const nyb_attention *view, int part, int64_t sequence, int64_t t) {
  const nyb_stored *body = part == 0 ? &view->k : &view->v;
  row_place place = {body, sequence, t};
  if (view->pages.page_tokens > 0) {
    const nyb_pages *pages = &view->pages;
    if (t / pages->page_tokens >= pages->table_stride) return (row_place){0};
    place.block = pages->table[sequence * pages->table_stride + t / pages->page_tokens];
    place.row = t % pages->page_tokens;
    if (place.block < 0 || place.block >= pages->page_count) return (row_place){0};
  } else if (view->ring.offsets != NULL) {
    const int64_t keep = view->ring.keep_tokens, slots = view->capacity_tokens - keep;
    const int64_t offset = view->ring.offsets[sequence];
    if (offset < 0 || offset >= slots) return (row_place){0};
    if (t >= keep) place.row = keep + (t - keep + offset) % slots;
  } else if (t < view->first.tokens) {
    place.rows = part == 0 ? &view->first.k : &view->first.v;
  } else if (view->last.tokens > 0 && t >= view->last_begins[sequence]) {
    place.rows = part == 0 ? &view->last.k : &view->last.v;
    place.row = t % view->last.tokens;
  } else {
    place.row = t - view->first.tokens;
    if (place.row >= view->capacity_tokens) return (row_place){0};
  }
  return place;
}

/* Codes, then scales, then biases; how many bytes there are, 0 where the view leads nowhere. */
static int64_t read_row(const row_place *place, int64_t head, int64_t dim, char *bytes) {
  const nyb_stored *rows = place->rows;
  if (rows == NULL) return 0;
  const bool affine = rows->format.scheme == NYB_AFFINE;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(rows->format.dtype);
  const void *const data[3] = {rows->codes, rows->scales, rows->biases};
  const int64_t *const strides[3] = {rows->codes_stride, rows->scales_stride, rows->biases_stride};
  int64_t count = 0;
  for (int i = 0; i < (affine ? 3 : 1); i++) {
    const int64_t element = affine && i == 0 ? 4 : scale_bytes;
    const int64_t row_bytes = !affine  ? dim * scale_bytes
                              : i == 0 ? dim * rows->format.bits / 8
                                       : dim / rows->format.group_size * scale_bytes;
    const int64_t offset =
        place->block * strides[i][0] + head * strides[i][1] + place->row * strides[i][2];
    memcpy(bytes + count, (const char *)data[i] + offset * element, (size_t)row_bytes);
    count += row_bytes;
  }
  return count;
}

static bool compare_token(kinds_check *c, const nyb_attention *want, const nyb_attention *got,
                          int64_t sequence, int64_t token) {
  for (int part = 0; part < 2; part++) {
    const int64_t dim = part == 0 ? c->options.key_dim : c->options.value_dim;
    const row_place wanted = place_in(want, part, sequence, token);
    const row_place held = place_in(got, part, sequence, token);
    for (int64_t head = 0; head < HEADS; head++) {
      char a[MOST_DIM * 6], b[MOST_DIM * 6];
      const int64_t bytes = read_row(&wanted, head, dim, a);
      if (read_row(&held, head, dim, b) == bytes && memcmp(a, b, (size_t)bytes) == 0) continue;
      char where[160];
      snprintf(where, sizeof where, "%s of sequence %lld, head %lld, token %lld is another",
               part == 0 ? "key" : "value", (long long)sequence, (long long)head, (long long)token);
      return fail(c, where);
    }
  }
  return true;
}

static bool compare_counts(kinds_check *c, const nyb_attention *want, const nyb_attention *got,
                           int64_t sequence) {
  const long long numbers[][2] = {
      {nyb_cache_length(c->want, sequence), nyb_cache_length(c->got, sequence)},
      {nyb_cache_held_tokens(c->want, sequence), nyb_cache_held_tokens(c->got, sequence)},
      {want->lengths[sequence], got->lengths[sequence]},
      {want->last_begins == NULL ? 0 : want->last_begins[sequence],
       got->last_begins == NULL ? 0 : got->last_begins[sequence]},
  };
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    if (numbers[i][0] == numbers[i][1]) continue;
    char text[200];
    snprintf(text, sizeof text, "%s of sequence %lld is %lld, not %lld",
             i == 0   ? "length"
             : i == 1 ? "held_tokens"
             : i == 2 ? "length on the device"
                      : "last_begin",
             (long long)sequence, numbers[i][1], numbers[i][0]);
    return fail(c, text);
  }
  return true;
}

static bool compare(kinds_check *c) {
  nyb_attention want = NYB_ATTENTION_INIT;
  held_rows held = {0};
  if (!c->good || !require(c, nyb_cache_view(c->want, &want))) return false;
  fetch_view(c, &held);
  for (int64_t sequence = 0; sequence < c->batch && c->good; sequence++) {
    if (!compare_counts(c, &want, &held.view, sequence)) break;
    for (int64_t t = 0; t < want.lengths[sequence] && c->good; t++) {
      compare_token(c, &want, &held.view, sequence, t);
    }
  }
  drop_rows(&held);
  nyb_cache_usage wanted = NYB_CACHE_USAGE_INIT, used = NYB_CACHE_USAGE_INIT;
  if (!c->good || !require(c, nyb_cache_get_usage(c->want, &wanted)) ||
      !require(c, nyb_cache_get_usage(c->got, &used))) {
    return false;
  }
  if (c->options.page_tokens > 0 || used.used_bytes == wanted.used_bytes) return true;
  return fail(c, "used_bytes is another");
}

/* ---- Attention --------------------------------------------------------------------------------
 */

/* The kernels on the GPU hold the product of a weight and of V's scale in 11 bits, and |v| is at
 * most 1 (a step of a code more at the edge): 1.2 * 2^-11 < 6e-4. Scores and the path with
 * materialised scores are sums of 64 products of f32, which add less than 1e-4. A token too many or
 * too few among LONGEST weighs more than 5e-3 in lse. */
#define OUT_TOLERANCE 1e-3
#define LSE_TOLERANCE 1e-3

static void describe_call(const kinds_check *c, int64_t rows, nyb_path path, nyb_attention *call) {
  const int64_t dim = c->options.key_dim, value_dim = c->options.value_dim;
  call->query_heads = QUERY_HEADS;
  call->query_len = rows;
  call->scale = 0.25f;
  call->mask = NYB_MASK_CAUSAL;
  call->path = path;
  call->q = (nyb_input){.dtype = NYB_F32,
                        .stride = {QUERY_HEADS * MOST_ROWS * dim, MOST_ROWS * dim, dim}};
  call->out = (nyb_output){
      .dtype = NYB_F32,
      .stride = {QUERY_HEADS * MOST_ROWS * value_dim, MOST_ROWS * value_dim, value_dim}};
  call->lse = (nyb_output){.dtype = NYB_F32, .stride = {QUERY_HEADS * MOST_ROWS, MOST_ROWS, 1}};
}

enum {
  QUERY_FLOATS = MOST_BATCH * QUERY_HEADS * MOST_ROWS * MOST_DIM,
  LSE_FLOATS = MOST_BATCH * QUERY_HEADS * MOST_ROWS
};

typedef struct results {
  float query[QUERY_FLOATS], out[2][QUERY_FLOATS], lse[2][LSE_FLOATS];
} results;

static bool run_call(kinds_check *c, nyb_context *context, nyb_attention *call, bool cuda) {
  nyb_plan plan = NYB_PLAN_INIT;
  if (!require(c, nyb_attention_plan(context, call, &plan))) return false;
  const int64_t bytes = (int64_t)plan.workspace_bytes;
  void *workspace = NULL;
  if (bytes > 0) {
    workspace = cuda ? device_allocate(bytes)
                     : aligned_alloc(NYB_WORKSPACE_ALIGNMENT, (size_t)(bytes + 63) / 64 * 64);
    if (workspace == NULL) return fail(c, "no workspace");
  }
  bool good = require(
      c, nyb_attention_run(context, call, workspace, (size_t)bytes, cuda ? c->stream : NULL));
  if (cuda) {
    good = good && on_device(c, device_synchronize(c->stream));
    device_free(workspace);
  } else {
    free(workspace);
  }
  return good;
}

static bool attend_here(kinds_check *c, int64_t rows, results *r) {
  nyb_attention call = NYB_ATTENTION_INIT;
  if (!require(c, nyb_cache_view(c->want, &call))) return false;
  describe_call(c, rows, NYB_PATH_COMPAT, &call);
  call.q.data = r->query;
  call.out.data = r->out[0];
  call.lse.data = r->lse[0];
  return run_call(c, c->cpu, &call, false);
}

static bool attend_there(kinds_check *c, int64_t rows, nyb_path path, results *r) {
  nyb_attention call = NYB_ATTENTION_INIT;
  if (!require(c, nyb_cache_view(c->got, &call))) return false;
  describe_call(c, rows, path, &call);
  call.q.data = c->query;
  call.out.data = c->out;
  call.lse.data = c->lse;
  return on_device(c, device_upload(c->query, r->query, sizeof r->query, c->stream)) &&
         run_call(c, c->cuda, &call, true) &&
         on_device(c, device_download(r->out[1], c->out, sizeof r->out[1], c->stream)) &&
         on_device(c, device_download(r->lse[1], c->lse, sizeof r->lse[1], c->stream)) &&
         on_device(c, device_synchronize(c->stream));
}

static bool compare_results(kinds_check *c, int64_t rows, const results *r) {
  const int64_t dim = c->options.value_dim;
  for (int64_t i = 0; i < c->batch * QUERY_HEADS * rows; i++) {
    const int64_t row = i / rows * MOST_ROWS + i % rows;
    const double want = (double)r->lse[0][row], got = (double)r->lse[1][row];
    bool good = want == got || fabs(got - want) <= LSE_TOLERANCE;
    for (int64_t d = 0; d < dim; d++) {
      const double error = (double)r->out[1][row * dim + d] - (double)r->out[0][row * dim + d];
      good = good && fabs(error) <= OUT_TOLERANCE;
    }
    if (good) continue;
    char text[200];
    snprintf(text, sizeof text, "row %lld of %lld of attention is another: lse %g, not %g",
             (long long)i, (long long)rows, got, want);
    return fail(c, text);
  }
  return true;
}

static bool attend(kinds_check *c, int64_t rows) {
  static results r;
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  if (!require(c, nyb_cache_get_usage(c->got, &usage))) return false;
  if (usage.used_bytes == 0) return true;
  for (int64_t i = 0; i < QUERY_FLOATS; i++) {
    r.query[i] = (float)(2 * check_random_uniform(&c->random) - 1);
  }
  if (!attend_here(c, rows, &r)) return false;
  for (int path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
    c->action = path == NYB_PATH_FUSED ? "fused attention" : "compat attention";
    if (!attend_there(c, rows, (nyb_path)path, &r) || !compare_results(c, rows, &r)) return false;
  }
  return true;
}

/* ---- Steps ------------------------------------------------------------------------------------
 */

/* -1 to 1 with all of f32's digits, so that rounding to a part's dtype shows; padding is NaN. */
static bool make_rows(kinds_check *c, int64_t count, const int32_t *padding, nyb_append append[2]) {
  append[0] = append[1] = (nyb_append)NYB_APPEND_INIT;
  for (int part = 0; part < 2; part++) {
    const int64_t dim = part == 0 ? c->options.key_dim : c->options.value_dim;
    for (int64_t i = 0; i < c->batch * HEADS * count * dim; i++) {
      const int64_t row = i / dim, sequence = row / count / HEADS;
      const bool padded = padding != NULL && row % count < padding[sequence];
      c->host[part][i] = padded ? NAN : (float)(2 * check_random_uniform(&c->random) - 1);
    }
    const int64_t bytes = c->batch * HEADS * count * dim * (int64_t)sizeof(float);
    if (!on_device(c, device_upload(c->device[part], c->host[part], bytes, c->stream)) ||
        !on_device(c, device_synchronize(c->stream))) {
      return false;
    }
    for (int side = 0; side < 2; side++) {
      nyb_input *input = part == 0 ? &append[side].key : &append[side].value;
      *input = (nyb_input){.data = side == 0 ? c->host[part] : c->device[part],
                           .dtype = NYB_F32,
                           .stride = {HEADS * count * dim, count * dim, dim}};
      append[side].tokens = count;
      append[side].padding = padding;
    }
  }
  append[1].non_finite = c->flag;
  return true;
}

static bool walk_append(kinds_check *c) {
  static const int64_t sizes[] = {1, 1, 1, 1, 2, 3, 7, 16, MOST_COUNT, 0};
  const int64_t count = sizes[below(c, 10)];
  int32_t padding[MOST_BATCH];
  const bool padded = below(c, 3) == 0;
  for (int64_t i = 0; i < c->batch; i++) padding[i] = (int32_t)below(c, count + 1);
  nyb_append append[2];
  c->action = padded ? "padded append" : "append";
  if (!make_rows(c, count, padded ? padding : NULL, append) ||
      !require(c, nyb_cache_append(c->want, &append[0], NULL)) ||
      !require(c, nyb_cache_append(c->got, &append[1], c->stream)) || !compare(c)) {
    return false;
  }
  if (count == 0 || c->run->options.without_attention) return true;
  return attend(c, smaller(count, MOST_ROWS));
}

static bool trim(kinds_check *c, int64_t sequence, int64_t tokens) {
  int64_t trimmed[2] = {-7, -7};
  c->action = "trim";
  const nyb_status want = nyb_cache_trim(c->want, sequence, tokens, &trimmed[0], NULL);
  const nyb_status got = nyb_cache_trim(c->got, sequence, tokens, &trimmed[1], c->stream);
  if (want != got) return fail(c, got == NYB_OK ? "was not refused" : nyb_last_error());
  return trimmed[0] == trimmed[1] || fail(c, "*trimmed is another");
}

static bool walk_trim(kinds_check *c) {
  const int64_t sequence = below(c, 3) == 0 ? NYB_ALL_SEQUENCES : below(c, c->batch);
  return trim(c, sequence, below(c, 8) == 0 ? below(c, 200) : below(c, 9)) && compare(c);
}

static bool walk_reorder(kinds_check *c) {
  int64_t sources[MOST_BATCH];
  const int64_t count = 1 + below(c, MOST_BATCH);
  for (int64_t i = 0; i < count; i++) sources[i] = below(c, c->batch);
  c->action = "reorder";
  if (!require(c, nyb_cache_reorder(c->want, sources, count, NULL)) ||
      !require(c, nyb_cache_reorder(c->got, sources, count, c->stream))) {
    return false;
  }
  c->batch = count;
  return compare(c);
}

static int64_t longest(const kinds_check *c) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < c->batch; i++) tokens = larger(tokens, nyb_cache_length(c->want, i));
  return tokens;
}

static bool reserve(kinds_check *c, int64_t tokens) {
  c->action = "reserve";
  return require(c, nyb_cache_reserve(c->want, tokens, NULL)) &&
         require(c, nyb_cache_reserve(c->got, tokens, c->stream));
}

/* A graph of an append, replayed some times: each goes on where the one before has ended. */
static bool walk_replays(kinds_check *c) {
  const int64_t replays = below(c, 20);
  nyb_append append[2];
  if (!reserve(c, larger(c->options.window_tokens, longest(c) + replays)) ||
      !make_rows(c, 1, NULL, append)) {
    return false;
  }
  c->action = "replayed append";
  if (!on_device(c, device_capture_begin(c->stream))) return false;
  const nyb_status status = nyb_cache_append(c->got, &append[1], c->stream);
  device_graph *graph = device_capture_end(c->stream);
  bool good = require(c, status) && on_device(c, graph != NULL);
  for (int64_t i = 0; i < replays && good; i++) {
    good = on_device(c, device_graph_launch(graph, c->stream)) &&
           require(c, nyb_cache_append(c->want, &append[0], NULL));
  }
  const bool refreshes = below(c, 2) == 0; /* a reorder does it on its own */
  good = good && (!refreshes || require(c, nyb_cache_refresh(c->got, c->stream)));
  device_graph_destroy(graph);
  return good && (refreshes ? compare(c) : walk_reorder(c));
}

static bool walk_step(kinds_check *c, bool with_graphs) {
  const int64_t choice = below(c, with_graphs ? 20 : 18);
  bool good = choice < 9    ? walk_append(c)
              : choice < 14 ? walk_trim(c)
              : choice < 17 ? walk_reorder(c)
              : choice < 18 ? reserve(c, below(c, 120)) && compare(c)
                            : walk_replays(c);
  for (int64_t i = 0; i < c->batch && good; i++) {
    if (nyb_cache_length(c->want, i) > LONGEST) good = trim(c, i, INT64_MAX);
  }
  return good;
}

/* ---- Scenes -----------------------------------------------------------------------------------
 */

enum { SCENES = 12, KINDS = 4 };

/* The kinds, each with K and V of different formats and dims; the first ones are each of a kind. */
static nyb_cache_options scene_options(int index, const char **name) {
  static const struct {
    const char *name;
    int64_t window, keep, first, last;
    nyb_dtype part_dtype;
    int64_t page;
  } kinds[SCENES] = {
      {"contiguous", 0, 0, 0, 0, 0, 0},
      {"rotating 8", 8, 0, 0, 0, 0, 0},
      {"paged 16", 0, 0, 0, 0, 0, 16},
      {"mixed 3 + 5 bf16", 0, 0, 3, 5, NYB_BF16, 0},
      {"rotating 12, keep 4", 12, 4, 0, 0, 0, 0},
      {"paged 23", 0, 0, 0, 0, 0, 23},
      {"mixed 0 + 7 f32", 0, 0, 0, 7, NYB_F32, 0},
      {"rotating 90, keep 3", 90, 3, 0, 0, 0, 0},
      {"mixed 4 + 0 f16", 0, 0, 4, 0, NYB_F16, 0},
      {"rotating 1", 1, 0, 0, 0, 0, 0},
      {"mixed 1 + 80 f16", 0, 0, 1, 80, NYB_F16, 0},
      {"rotating 5, keep 4", 5, 4, 0, 0, 0, 0},
  };
  static const nyb_format affine4 = {NYB_AFFINE, 4, 32, NYB_F32};
  static const nyb_format affine3 = {NYB_AFFINE, 3, 32, NYB_F16};
  static const nyb_format affine8 = {NYB_AFFINE, 8, 64, NYB_BF16};
  static const nyb_format plain_f16 = {NYB_PLAIN, 0, 0, NYB_F16};
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  *name = kinds[index].name;
  options.batch = 3;
  options.kv_heads = HEADS;
  options.key_dim = 64;
  options.value_dim = index % 2 == 0 ? 128 : 32;
  options.key_format = index % 3 == 0 ? affine3 : affine4;
  options.value_format = index % 4 == 3 ? plain_f16 : index % 2 == 0 ? affine8 : affine4;
  options.rule = index % 3 == 0 ? NYB_RULE_MLX_CPU : NYB_RULE_MLX_GPU;
  options.window_tokens = kinds[index].window;
  options.window_keep_tokens = kinds[index].keep;
  options.first_tokens = kinds[index].first;
  options.last_tokens = kinds[index].last;
  options.part_dtype = kinds[index].part_dtype;
  options.page_tokens = kinds[index].page;
  options.initial_capacity_tokens = index % 3 == 1 ? 20 : 0;
  return options;
}

static bool make_scene(kinds_check *c) {
  c->action = "create";
  for (int part = 0; part < 2; part++) {
    const int64_t bytes = MOST_BATCH * HEADS * MOST_COUNT * MOST_DIM * (int64_t)sizeof(float);
    c->host[part] = malloc((size_t)bytes);
    c->device[part] = device_allocate(bytes);
    if (c->host[part] == NULL || c->device[part] == NULL) return fail(c, device_error());
  }
  c->query = device_allocate(QUERY_FLOATS * (int64_t)sizeof(float));
  c->out = device_allocate(QUERY_FLOATS * (int64_t)sizeof(float));
  c->lse = device_allocate(LSE_FLOATS * (int64_t)sizeof(float));
  c->flag = device_allocate(sizeof *c->flag);
  if (c->query == NULL || c->out == NULL || c->lse == NULL || c->flag == NULL) {
    return fail(c, device_error());
  }
  return on_device(c, device_fill(c->flag, 0, sizeof *c->flag, c->stream)) &&
         on_device(c, device_fill(c->out, 0, QUERY_FLOATS * (int64_t)sizeof(float), c->stream)) &&
         on_device(c, device_fill(c->lse, 0, LSE_FLOATS * (int64_t)sizeof(float), c->stream)) &&
         on_device(c, device_synchronize(c->stream)) &&
         require(c, nyb_cache_create(c->cpu, &c->options, &c->want)) &&
         require(c, nyb_cache_create(c->cuda, &c->options, &c->got));
}

static void end_scene(kinds_check *c) {
  device_synchronize(c->stream);
  nyb_cache_destroy(c->want);
  nyb_cache_destroy(c->got);
  for (int part = 0; part < 2; part++) {
    free(c->host[part]);
    device_free(c->device[part]);
  }
  device_free(c->query);
  device_free(c->out);
  device_free(c->lse);
  device_free(c->flag);
}

static bool all_finite(kinds_check *c) {
  int32_t flag = -1;
  c->action = "non_finite";
  return on_device(c, device_download(&flag, c->flag, sizeof flag, c->stream)) &&
         on_device(c, device_synchronize(c->stream)) &&
         (flag == 0 || fail(c, "is set, though all tokens were finite and had room"));
}

static void check_scene(check_run *run, nyb_context *cpu, nyb_context *cuda, int index,
                        bool with_graphs, int64_t steps) {
  kinds_check c = {.run = run,
                   .cpu = cpu,
                   .cuda = cuda,
                   .random = {.state = 500 + (uint64_t)index + (with_graphs ? 100 : 0)},
                   .stream = check_stage_stream(),
                   .good = true};
  c.options = scene_options(index, &c.name);
  c.batch = c.options.batch;
  char format[16];
  check_format_name(&c.options.key_format, format);
  c.tally = check_find(run, "cache_append", format, NYB_ISA_CUDA);
  if (c.tally == NULL) return;
  bool good = make_scene(&c);
  for (c.step = 0; c.step < steps && good; c.step++) good = walk_step(&c, with_graphs);
  if (good && all_finite(&c)) check_pass(c.tally);
  end_scene(&c);
}

/* Contexts of their own: one of the CPU, and one whose caches' memory is poisoned. */
void check_cache_kinds(check_run *run) {
  nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
  options.threads = 1;
  nyb_context *cpu = NULL, *cuda = NULL;
  nyb_status status = nyb_context_create(&options, &cpu);
  options.backend = NYB_BACKEND_CUDA;
  options.device = run->options.device;
  options.device_allocator = (nyb_allocator){allocate_poisoned, release_poisoned, NULL};
  if (status == NYB_OK) status = nyb_context_create(&options, &cuda);
  if (status != NYB_OK) check_fail_cuda(run, "cache_append", "contexts: %s", nyb_last_error());
  const int64_t steps = run->options.sanitizer ? 12 : run->options.quick ? 60 : 250;
  const int scenes = 2 * (run->options.sanitizer ? KINDS : SCENES);
  for (int i = 0; i < scenes && status == NYB_OK; i++) {
    check_scene(run, cpu, cuda, i / 2, i % 2 == 1, steps);
    check_step(run, "cache_append", i + 1, scenes);
  }
  nyb_context_destroy(cuda);
  nyb_context_destroy(cpu);
}
