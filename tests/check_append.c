/* SPDX-License-Identifier: Apache-2.0 */
/* Appends to a cache in device memory: every bit as the quantizer's rule has it, positions taken
 * from the lengths on the device, by calls and by replays of a captured graph. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check_device.h"
#include "check_stage.h"
#include "oracle.h"

enum { BATCH = 3, HEADS = 2, KEY_DIM = 128, VALUE_DIM = 256, MOST_TOKENS = 400 };

typedef struct append_check {
  check_run *run;
  check_tally *tally;
  nyb_format format;
  nyb_dtype dtype; /* of the tokens */
  nyb_rule rule;
  nyb_cache *cache;
  /* All tokens that will be appended, [BATCH, HEADS, MOST_TOKENS, dim]: on the host and on the
   * device. Appends take them from `next` on; the graph takes always the same ones. */
  void *host[2], *device[2];
  int32_t *flag; /* on the device */
  char what[96];
  bool good;
} append_check;

static const int64_t dims[2] = {KEY_DIM, VALUE_DIM};

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

static int64_t part_bytes(const append_check *c, int part) {
  return BATCH * HEADS * MOST_TOKENS * dims[part] * bytes_of(c->dtype);
}

static bool fail(append_check *c, const char *action, const char *why) {
  if (c->good) check_fail(c->run, c->tally, "%s: %s: %s", c->what, action, why);
  c->good = false;
  return false;
}

static bool require(append_check *c, nyb_status status, const char *action) {
  return status == NYB_OK || fail(c, action, nyb_last_error());
}

/* ---- Tokens -------------------------------------------------------------------------------------
 */

static bool make_tokens(append_check *c, uint64_t seed) {
  check_random random = {.state = seed};
  for (int part = 0; part < 2; part++) {
    c->host[part] = malloc((size_t)part_bytes(c, part));
    c->device[part] = device_allocate(part_bytes(c, part));
    if (c->host[part] == NULL || c->device[part] == NULL) return fail(c, "memory", device_error());
    for (int64_t i = 0; i < part_bytes(c, part) / bytes_of(c->dtype); i++) {
      oracle_store(c->host[part], c->dtype, i, 2 * check_random_normal(&random) - 1);
    }
    if (!device_upload(c->device[part], c->host[part], part_bytes(c, part), NULL)) {
      return fail(c, "upload", device_error());
    }
  }
  c->flag = device_allocate(sizeof *c->flag);
  return (c->flag != NULL && device_fill(c->flag, 0, sizeof *c->flag, NULL) &&
          device_synchronize(NULL)) ||
         fail(c, "memory", device_error());
}

static nyb_append describe(const append_check *c, int64_t first, int64_t tokens) {
  nyb_append append = NYB_APPEND_INIT;
  nyb_input *inputs[2] = {&append.key, &append.value};
  append.tokens = tokens;
  append.non_finite = c->flag;
  for (int part = 0; part < 2; part++) {
    const int64_t dim = dims[part];
    *inputs[part] =
        (nyb_input){.data = (const char *)c->device[part] + first * dim * bytes_of(c->dtype),
                    .dtype = c->dtype,
                    .stride = {HEADS * MOST_TOKENS * dim, MOST_TOKENS * dim, dim}};
  }
  return append;
}

/* ---- What the cache must hold -------------------------------------------------------------------
 */

/* Which token stands at each place of each sequence. */
typedef struct journal {
  int32_t length[BATCH];
  int32_t token[BATCH][MOST_TOKENS];
} journal;

static void note(journal *j, int64_t first, int64_t tokens) {
  for (int b = 0; b < BATCH; b++) {
    for (int64_t t = 0; t < tokens; t++) {
      if (j->length[b] < MOST_TOKENS) j->token[b][j->length[b]] = (int32_t)(first + t);
      j->length[b]++;
    }
  }
}

/* What has been fetched of one side of the cache, where it stands there. */
typedef struct fetched {
  uint8_t *codes, *scales, *biases;
} fetched;

static bool row_differs(const append_check *c, const double *elements, int64_t dim,
                        const uint8_t *codes, const uint8_t *scales, const uint8_t *biases) {
  const nyb_format *f = &c->format;
  if (f->scheme == NYB_PLAIN) {
    for (int64_t i = 0; i < dim; i++) {
      const uint32_t want = oracle_encode(f->dtype, oracle_round(f->dtype, elements[i]));
      if (oracle_load_bits(codes, f->dtype, i) != want) return true;
    }
    return false;
  }
  for (int64_t first = 0; first < dim; first += f->group_size) {
    oracle_group group;
    const int64_t g = first / f->group_size;
    oracle_quantize_group(elements + first, f->group_size, f->bits, c->rule, f->dtype, &group);
    if (oracle_load_bits(scales, f->dtype, g) !=
            oracle_encode(f->dtype, oracle_round(f->dtype, group.scale)) ||
        oracle_load_bits(biases, f->dtype, g) !=
            oracle_encode(f->dtype, oracle_round(f->dtype, group.bias))) {
      return true;
    }
    for (int64_t i = 0; i < f->group_size; i++) {
      if (oracle_code(codes, f->bits, first + i) != group.codes[i]) return true;
    }
  }
  return false;
}

static int64_t offset(const int64_t stride[3], int64_t b, int64_t head, int64_t token) {
  return b * stride[0] + head * stride[1] + token * stride[2];
}

/* Rows of a head of a sequence, as many as have been appended, at their places: beyond them nobody
 * has written, and a sanitizer would say so. */
static bool fetch(append_check *c, const journal *j, const void *from, const int64_t stride[3],
                  int64_t row_bytes, int64_t unit, int64_t capacity, uint8_t **to) {
  const int64_t span = (BATCH - 1) * stride[0] + (HEADS - 1) * stride[1] + capacity * stride[2];
  *to = calloc((size_t)(span * unit) + 1, 1);
  if (*to == NULL) return fail(c, "memory", "none left");
  if (from == NULL) return true;
  for (int64_t i = 0; i < BATCH * HEADS; i++) {
    const int64_t at = offset(stride, i / HEADS, i % HEADS, 0) * unit;
    const int64_t tokens = j->length[i / HEADS];
    const int64_t bytes = tokens > 0 ? (tokens - 1) * stride[2] * unit + row_bytes : 0;
    if (!device_download(*to + at, (const uint8_t *)from + at, bytes, NULL)) {
      return fail(c, "download", device_error());
    }
  }
  return device_synchronize(NULL) || fail(c, "download", device_error());
}

/* Poison for the places that nobody has written yet: growing copies them along with the others, and
 * no row may depend on them. */
static bool poison_rest(append_check *c, const journal *j, const void *array,
                        const int64_t stride[3], int64_t unit, int64_t capacity) {
  for (int64_t i = 0; i < BATCH * HEADS && array != NULL; i++) {
    const int64_t tokens = j->length[i / HEADS];
    uint8_t *rest =
        (uint8_t *)(uintptr_t)array + offset(stride, i / HEADS, i % HEADS, tokens) * unit;
    if (!device_fill(rest, 0xff, (capacity - tokens) * stride[2] * unit, NULL)) {
      return fail(c, "poison", device_error());
    }
  }
  return device_synchronize(NULL) || fail(c, "poison", device_error());
}

static bool compare_rows(append_check *c, const journal *j, const nyb_stored *stored, int part,
                         const fetched *got) {
  const int64_t dim = dims[part],
                unit = c->format.scheme == NYB_PLAIN ? bytes_of(c->format.dtype) : 4;
  double elements[VALUE_DIM];
  for (int64_t i = 0; i < BATCH * HEADS; i++) {
    const int64_t b = i / HEADS, head = i % HEADS;
    for (int64_t place = 0; place < j->length[b]; place++) {
      const int64_t row = (b * HEADS + head) * MOST_TOKENS + j->token[b][place];
      for (int64_t d = 0; d < dim; d++) {
        elements[d] = oracle_load(c->host[part], c->dtype, row * dim + d);
      }
      const int64_t scale_bytes = bytes_of(c->format.dtype);
      if (row_differs(c, elements, dim,
                      got->codes + offset(stored->codes_stride, b, head, place) * unit,
                      got->scales + offset(stored->scales_stride, b, head, place) * scale_bytes,
                      got->biases + offset(stored->biases_stride, b, head, place) * scale_bytes)) {
        char where[96];
        snprintf(where, sizeof where, "%s of sequence %lld, head %lld, token %lld is another",
                 part == 0 ? "key" : "value", (long long)b, (long long)head, (long long)place);
        return fail(c, "the cache's bits", where);
      }
    }
  }
  return true;
}

static bool compare_part(append_check *c, const journal *j, const nyb_stored *stored, int part,
                         int64_t capacity) {
  const bool plain = c->format.scheme == NYB_PLAIN;
  const int64_t scale_bytes = bytes_of(c->format.dtype), dim = dims[part];
  const int64_t code_row = plain ? dim : dim * c->format.bits / 32;
  const int64_t groups = plain ? 0 : dim / c->format.group_size;
  fetched got = {0};
  const int64_t unit = plain ? scale_bytes : 4, group_bytes = groups * scale_bytes;
  const bool good =
      fetch(c, j, stored->codes, stored->codes_stride, code_row * unit, unit, capacity,
            &got.codes) &&
      fetch(c, j, stored->scales, stored->scales_stride, group_bytes, scale_bytes, capacity,
            &got.scales) &&
      fetch(c, j, stored->biases, stored->biases_stride, group_bytes, scale_bytes, capacity,
            &got.biases) &&
      compare_rows(c, j, stored, part, &got) &&
      poison_rest(c, j, stored->codes, stored->codes_stride, unit, capacity) &&
      poison_rest(c, j, stored->scales, stored->scales_stride, scale_bytes, capacity) &&
      poison_rest(c, j, stored->biases, stored->biases_stride, scale_bytes, capacity);
  free(got.codes);
  free(got.scales);
  free(got.biases);
  return good;
}

/* Lengths on the device, on the host after a refresh, and every row. */
static bool compare(append_check *c, const journal *j) {
  nyb_attention view = NYB_ATTENTION_INIT;
  int32_t lengths[BATCH];
  if (!require(c, nyb_cache_view(c->cache, &view), "view") ||
      !require(c, nyb_cache_refresh(c->cache, NULL), "refresh")) {
    return false;
  }
  if (!device_download(lengths, view.lengths, sizeof lengths, NULL) || !device_synchronize(NULL)) {
    return fail(c, "download", device_error());
  }
  for (int b = 0; b < BATCH; b++) {
    if (lengths[b] == j->length[b] && nyb_cache_length(c->cache, b) == j->length[b]) continue;
    char text[96];
    snprintf(text, sizeof text, "sequence %d: device %d, host %lld, want %d", b, (int)lengths[b],
             (long long)nyb_cache_length(c->cache, b), (int)j->length[b]);
    return fail(c, "lengths", text);
  }
  return compare_part(c, j, &view.k, 0, view.capacity_tokens) &&
         compare_part(c, j, &view.v, 1, view.capacity_tokens);
}

/* ---- The steps ----------------------------------------------------------------------------------
 */

static bool append_tokens(append_check *c, journal *j, int64_t first, int64_t tokens,
                          device_stream stream) {
  const nyb_append append = describe(c, first, tokens);
  if (!require(c, nyb_cache_append(c->cache, &append, stream), "append")) return false;
  note(j, first, tokens);
  return true;
}

static bool trim_one(append_check *c, journal *j, int64_t sequence, int32_t tokens) {
  int64_t trimmed = -1;
  if (!require(c, nyb_cache_trim(c->cache, sequence, tokens, &trimmed, NULL), "trim")) {
    return false;
  }
  j->length[sequence] -= tokens;
  return trimmed == tokens || fail(c, "trim", "*trimmed is not what was asked for");
}

/* A graph of one append, replayed: each replay goes one token further in every sequence, though the
 * sequences are of different lengths. */
static bool replay_appends(append_check *c, journal *j, int replays) {
  device_stream stream = check_stage_stream();
  const nyb_append append = describe(c, 7, 1);
  if (!device_synchronize(NULL) || !device_capture_begin(stream)) {
    return fail(c, "capture", device_error());
  }
  const nyb_status status = nyb_cache_append(c->cache, &append, stream);
  device_graph *graph = device_capture_end(stream);
  bool good = require(c, status, "append while capturing") &&
              (graph != NULL || fail(c, "capture", device_error()));
  for (int i = 0; i < replays && good; i++) {
    good = device_graph_launch(graph, stream) || fail(c, "replay", device_error());
    note(j, 7, 1);
  }
  good = good && (device_synchronize(stream) || fail(c, "replay", device_error()));
  device_graph_destroy(graph);
  return good;
}

static bool flag_is(append_check *c, int32_t want, const char *when) {
  int32_t got = -1;
  if (!device_download(&got, c->flag, sizeof got, NULL) || !device_synchronize(NULL)) {
    return fail(c, "download", device_error());
  }
  return got == want || fail(c, "non_finite", when);
}

static bool wait_for(append_check *c, device_stream stream) {
  return device_synchronize(stream) || fail(c, "wait", device_error());
}

static bool steps(append_check *c) {
  journal j = {0};
  /* The second stream does not wait for the default one on its own. */
  return append_tokens(c, &j, 0, 37, NULL) && wait_for(c, NULL) &&
         append_tokens(c, &j, 37, 1, check_stage_stream()) && wait_for(c, check_stage_stream()) &&
         compare(c, &j) && append_tokens(c, &j, 38, 100, NULL) && /* grows, and moves */
         compare(c, &j) && trim_one(c, &j, 1, 20) && trim_one(c, &j, 2, 3) &&
         append_tokens(c, &j, 138, 2, NULL) && compare(c, &j) &&
         require(c, nyb_cache_reserve(c->cache, 300, NULL), "reserve") && compare(c, &j) &&
         replay_appends(c, &j, 50) && compare(c, &j) &&
         flag_is(c, 0, "is set, though all tokens were finite and had room");
}

/* Beyond the capacity nothing is written, no length moves, and the flag says so. */
static bool overfill(append_check *c) {
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  if (!require(c, nyb_cache_get_usage(c->cache, &usage), "usage")) return false;
  journal j = {0};
  if (!require(c, nyb_cache_reset(c->cache, NULL), "reset")) return false;
  const int64_t room = usage.capacity_tokens;
  if (room > MOST_TOKENS) return fail(c, "capacity", "is beyond max_tokens");
  if (!append_tokens(c, &j, 0, room - 3, NULL)) return false;
  if (!replay_appends(c, &j, 6)) return false;
  for (int b = 0; b < BATCH; b++) {
    if (j.length[b] > room) j.length[b] = (int32_t)room;
  }
  return compare(c, &j) && flag_is(c, 1, "is not set, though the cache was full");
}

static void check_format(check_run *run, const nyb_format *format, nyb_dtype dtype, nyb_rule rule) {
  char name[16];
  check_format_name(format, name);
  append_check c = {.run = run,
                    .tally = check_find(run, "cache_append", name, NYB_ISA_CUDA),
                    .format = *format,
                    .dtype = dtype,
                    .rule = rule,
                    .good = true};
  if (c.tally == NULL) return;
  snprintf(c.what, sizeof c.what, "%s group %d of %s, tokens of %s, rule %s", name,
           (int)format->group_size, check_dtype_name(format->dtype), check_dtype_name(dtype),
           rule == NYB_RULE_MLX_CPU ? "MLX_CPU" : "MLX_GPU");
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = BATCH;
  options.kv_heads = HEADS;
  options.key_dim = KEY_DIM;
  options.value_dim = VALUE_DIM;
  options.key_format = options.value_format = *format;
  options.rule = rule;
  options.max_tokens = MOST_TOKENS;
  const int64_t before = check_calls(run, c.tally);
  if (make_tokens(&c, (uint64_t)format->bits + 100) &&
      require(&c, nyb_cache_create(run->contexts[NYB_ISA_CUDA], &options, &c.cache), "create") &&
      steps(&c) && overfill(&c)) {
    if (check_calls(run, c.tally) > before) {
      check_pass(c.tally);
    } else {
      fail(&c, "append", "another kernel ran instead");
    }
  }
  device_synchronize(NULL);
  nyb_cache_destroy(c.cache);
  for (int part = 0; part < 2; part++) {
    free(c.host[part]);
    device_free(c.device[part]);
  }
  device_free(c.flag);
}

void check_append(check_run *run) {
  static const int widths[] = {2, 3, 4, 5, 6, 8};
  for (int i = 0; i < 9; i++) {
    for (int variant = 0; variant < (run->options.quick ? 2 : 6); variant++) {
      const nyb_dtype stored = (nyb_dtype)(NYB_F32 + (i < 3 ? i : (i + variant) % 3));
      const nyb_format format = {.scheme = i < 3 ? NYB_PLAIN : NYB_AFFINE,
                                 .bits = i < 3 ? 0 : widths[i - 3],
                                 .group_size = i < 3 ? 0 : 32 << (i + variant / 2) % 3,
                                 .dtype = stored};
      char name[16];
      check_format_name(&format, name);
      if (!check_wants_format(run, name)) continue;
      /* Tokens of a narrower range than the rows', so that all of them can be stored. */
      check_format(run, &format, (nyb_dtype)(NYB_F32 + (i + variant + 2) % 3),
                   variant % 2 == 0 ? NYB_RULE_MLX_GPU : NYB_RULE_MLX_CPU);
    }
    check_step(run, "append", i + 1, 9);
  }
}
