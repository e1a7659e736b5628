/* SPDX-License-Identifier: Apache-2.0 */
/* The fused path: the packed rows are read once, tile by tile, and neither a score row nor a float
 * copy of the cache ever exists.
 *
 * A unit is one KV head of one sequence with a block of up to NYB_TILE_ROWS query rows (rows of all
 * query heads that share the KV head). Its tokens are cut into chunks of NYB_CHUNK_TOKENS. Each
 * chunk starts from an empty state, and chunks are folded in ascending order.
 *
 * A worker takes a whole unit and folds as it goes, or, where that one unit would keep it busy for
 * too large a share of the call, a single chunk, whose partial result waits in the workspace for
 * the fold. That is a matter of load balance alone: the operations on a row, and their order, are
 * the same. Where the workspace has no room for all partial results at once, they come in waves. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "attention.h"
#include "attention_places.h"
#include "format.h"
#include "numeric.h"

enum {
  SHARES_PER_THREAD = 4,                /* a unit of more work than a share of the call is split */
  MAX_PARTIAL_BYTES = 32 * 1024 * 1024, /* beyond it, waves are smaller than the call... */
  WAVE_CHUNKS_PER_THREAD = 4            /* ... but never than this */
};
/* Below this many stored elements the whole call takes less time than waking a thread. */
static const double min_elements_per_worker = 32 * 1024;

/* ---- Layout of the workspace ---------------------------------------------------------------- */

/* The running state of a block of rows: unnormalised values, maximum and sum of the scores. */
typedef struct row_state {
  float *values;  /* [NYB_TILE_ROWS][nyb_padded_dim(value_dim)] */
  float *maximum; /* [NYB_TILE_ROWS] */
  float *sum;     /* [NYB_TILE_ROWS] */
} row_state;

/* What a row sees of a tile: tokens [begin, end) of one span or, where a window begins behind kept
 * tokens, of two. A span without tokens is {0, 0}, and the first one is the empty one. */
typedef struct token_span {
  int32_t begin, end;
} token_span;
typedef struct row_spans {
  token_span kept, rest;
} row_spans;

/* What does not change from tile to tile. */
typedef struct row_facts {
  nyb_sight sight;
  int64_t position;
  const char *mask; /* the mask's row, or NULL */
  float slope;
} row_facts;

typedef struct worker_memory {
  float *q; /* [NYB_TILE_ROWS][nyb_padded_dim(key_dim)] */
  char *prepared;
  float *scores; /* [NYB_TILE_ROWS][NYB_TILE_TOKENS] */
  row_state chunk, folded;
  row_state piece; /* of a sequence in parts */
  float *row;      /* [nyb_padded_dim(value_dim)] */
  char *gathered;  /* a tile whose rows do not follow each other */
  float *rescale;
  int32_t *visible;
  row_spans *spans;        /* [NYB_TILE_ROWS] */
  row_facts *facts;        /* [NYB_TILE_ROWS] */
  nyb_bias_row *bias_rows; /* [NYB_TILE_ROWS] */
  void *scratch;
} worker_memory;

static int64_t row_state_bytes(const nyb_attention *a, int64_t rows) {
  return (rows * (nyb_padded_dim(a->value_dim) + 2) * (int64_t)sizeof(float) + 63) / 64 * 64;
}

static row_state row_state_at(char *memory, const nyb_attention *a, int64_t rows) {
  row_state state;
  state.values = (float *)(void *)memory;
  state.maximum = state.values + rows * nyb_padded_dim(a->value_dim);
  state.sum = state.maximum + rows;
  return state;
}

static int64_t floats_bytes(int64_t dim) { return nyb_padded_dim(dim) * (int64_t)sizeof(float); }

/* A tile of the longest of the call's stored rows: room for K's and V's in turn. */
static int64_t gathered_bytes(const nyb_attention_call *call) {
  int64_t longest = 0; /* the layouts of parts that there are not are zeros */
  for (int part = 0; part < NYB_PART_COUNT; part++) {
    const int64_t key = call->keys[part].row_bytes, value = call->values[part].row_bytes;
    if (key > longest) longest = key;
    if (value > longest) longest = value;
  }
  return NYB_TILE_TOKENS * longest;
}

enum {
  SCORE_BYTES = NYB_TILE_ROWS * NYB_TILE_TOKENS * 4,
  SMALL_BYTES = NYB_TILE_ROWS * 4,
  SPAN_BYTES = NYB_TILE_ROWS * (int)sizeof(row_spans),
  FACTS_BYTES = NYB_TILE_ROWS * (int)sizeof(row_facts),
  BIAS_BYTES = NYB_TILE_ROWS * (int)sizeof(nyb_bias_row)
};

static int64_t worker_bytes(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  const int64_t states = nyb_has_parts(a) ? 3 : 2;
  return NYB_TILE_ROWS * (floats_bytes(a->key_dim) + nyb_prepared_bytes(a->key_dim)) + SCORE_BYTES +
         states * row_state_bytes(a, NYB_TILE_ROWS) + floats_bytes(a->value_dim) +
         gathered_bytes(call) + 2 * SMALL_BYTES + SPAN_BYTES + FACTS_BYTES + BIAS_BYTES +
         NYB_TILE_SCRATCH_BYTES;
}

static char *take(char **memory, int64_t bytes) {
  char *taken = *memory;
  *memory += bytes;
  return taken;
}

static worker_memory worker_memory_at(char *memory, const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  worker_memory w = {0};
  w.q = (float *)(void *)take(&memory, NYB_TILE_ROWS * floats_bytes(a->key_dim));
  w.prepared = take(&memory, NYB_TILE_ROWS * nyb_prepared_bytes(a->key_dim));
  w.scores = (float *)(void *)take(&memory, SCORE_BYTES);
  const int64_t state_bytes = row_state_bytes(a, NYB_TILE_ROWS);
  w.chunk = row_state_at(take(&memory, state_bytes), a, NYB_TILE_ROWS);
  w.folded = row_state_at(take(&memory, state_bytes), a, NYB_TILE_ROWS);
  if (nyb_has_parts(a)) w.piece = row_state_at(take(&memory, state_bytes), a, NYB_TILE_ROWS);
  w.row = (float *)(void *)take(&memory, floats_bytes(a->value_dim));
  w.gathered = take(&memory, gathered_bytes(call));
  w.rescale = (float *)(void *)take(&memory, SMALL_BYTES);
  w.visible = (int32_t *)(void *)take(&memory, SMALL_BYTES);
  w.spans = (row_spans *)(void *)take(&memory, SPAN_BYTES);
  w.facts = (row_facts *)(void *)take(&memory, FACTS_BYTES);
  w.bias_rows = (nyb_bias_row *)(void *)take(&memory, BIAS_BYTES);
  w.scratch = memory;
  return w;
}

static int64_t chunks_of(int64_t tokens) {
  return (tokens + NYB_CHUNK_TOKENS - 1) / NYB_CHUNK_TOKENS;
}

static int64_t rows_per_kv_head(const nyb_attention_call *call) {
  return call->heads_per_kv * call->attention->query_len;
}

static int64_t rows_per_unit(const nyb_attention_call *call) {
  const int64_t rows = rows_per_kv_head(call);
  return rows < NYB_TILE_ROWS ? rows : NYB_TILE_ROWS;
}

static int64_t units_per_sequence(const nyb_attention_call *call) {
  return call->attention->kv_heads * ((rows_per_kv_head(call) + NYB_TILE_ROWS - 1) / NYB_TILE_ROWS);
}

/* Tokens that the rows of a unit see of a sequence of that length, at most, the kept ones aside:
 * those of a block's first row to its last, or to all that come after where nothing bounds from
 * above. Like all that the workspace depends on, it never falls when the call grows. */
static int64_t most_seen_in_window(const nyb_attention_call *call, int64_t length) {
  const nyb_attention *a = call->attention;
  const bool top_left = a->mask == NYB_MASK_CAUSAL_TOP_LEFT;
  const int64_t seen = top_left && a->query_len < length ? a->query_len : length;
  if (a->window_tokens == 0 || a->window_tokens >= seen) return seen;
  const int64_t rows =
      a->mask == NYB_MASK_NONE ? a->query_len : (rows_per_unit(call) - 1) / call->heads_per_kv + 2;
  return a->window_tokens + rows < seen ? a->window_tokens + rows : seen;
}

static int64_t most_seen(const nyb_attention_call *call, int64_t length) {
  const int64_t in_window = most_seen_in_window(call, length);
  const int64_t keep = call->attention->window_keep_tokens;
  return keep < length - in_window ? in_window + keep : length;
}

/* The chunks in which these stand: a window may begin and end amid one. */
static int64_t most_chunks(const nyb_attention_call *call, int64_t length) {
  const int64_t in_window = most_seen_in_window(call, length), all = chunks_of(length);
  const int64_t keep = call->attention->window_keep_tokens;
  const int64_t chunks = chunks_of(in_window) + chunks_of(keep < length ? keep : length) + 1;
  return chunks < all ? chunks : all;
}

/* Partial results of the chunks of a wave, and one more: what the wave before it left unfinished.
 * Fewer than one unit for each share is split, whatever the lengths. The limit holds in bytes, not
 * in whole partial results: a larger call must not need less. */
static int64_t partial_bytes(const nyb_attention_call *call) {
  const nyb_attention *a = call->attention;
  const int64_t threads = call->context->threads, shares = SHARES_PER_THREAD * threads;
  if (threads == 1 || most_seen(call, nyb_room_tokens(a)) <= NYB_CHUNK_TOKENS) return 0;
  const int64_t all_units = a->batch * units_per_sequence(call);
  const int64_t units = all_units < shares ? all_units : shares;
  const int64_t state_bytes = row_state_bytes(a, rows_per_unit(call));
  const int64_t wanted = (units * most_chunks(call, nyb_room_tokens(a)) + 1) * state_bytes;
  const int64_t least = (WAVE_CHUNKS_PER_THREAD * threads + 1) * state_bytes;
  const int64_t most = least > MAX_PARTIAL_BYTES ? least : MAX_PARTIAL_BYTES;
  return wanted < most ? wanted : most;
}

int64_t nyb_attention_fused_workspace(const nyb_attention_call *call) {
  return call->context->threads * worker_bytes(call) + partial_bytes(call);
}

/* ---- A run, and its units ------------------------------------------------------------------- */

/* One part of the sequences. */
typedef struct part_run {
  nyb_part_rows k, v;
  nyb_attention_queries_fn queries;
  nyb_attention_scores_fn scores;
  nyb_attention_values_fn values;
  nyb_attention_columns_fn columns;
} part_run;

typedef struct fused_run {
  const nyb_attention_call *call;
  nyb_attention_bias_fn bias; /* NULL: nothing is done to scores */
  nyb_attention_softmax_fn softmax;
  part_run parts[NYB_PART_COUNT]; /* zeros where the call has no such part */
  bool in_parts;
  bool precise;
  nyb_dtype round_scores_to;
  float softcap; /* rounded as scores are */
  int64_t units_per_sequence;
  int64_t blocks;          /* of rows, for each KV head */
  int64_t longest_unsplit; /* units that see more tokens are split into their chunks */
  char *workspace;
  char *partials;              /* the first: of the unit that the wave before this one began */
  int64_t whole_units;         /* that this wave takes: all (but the split ones) or none */
  int64_t first_chunk, chunks; /* that this wave takes, numbered through the split units */
  int64_t first_fold, folds;   /* the split units to which they belong, as numbered */
  _Atomic int64_t next_task;
} fused_run;

/* Rows are numbered query row first, head second, so that a block's rows see about as much. Blocks
 * are taken from the last one down: under a causal mask that is the longest first. */
typedef struct unit {
  int64_t batch, kv_head;
  int64_t first_row, rows;
  int64_t length;             /* of the sequence alone, from its start on */
  int64_t keep_end, begin;    /* no row sees a token from keep_end up to begin... */
  int64_t visible;            /* ... or from here on */
  int64_t all_begin, all_end; /* every row sees the tokens from all_begin up to all_end */
  const part_run *prepared;   /* for whose keys the worker's queries are prepared, or NULL */
  bool leave_out;             /* add the values of what the mask's array shows alone */
} unit;

static unit unit_at(const fused_run *run, int64_t index) {
  const nyb_attention *a = run->call->attention;
  const int64_t all_rows = rows_per_kv_head(run->call);
  unit u = {0};
  u.first_row = (run->blocks - 1 - index % run->blocks) * NYB_TILE_ROWS;
  index /= run->blocks;
  u.kv_head = index % a->kv_heads;
  u.batch = index / a->kv_heads;
  u.rows = all_rows - u.first_row < NYB_TILE_ROWS ? all_rows - u.first_row : NYB_TILE_ROWS;
  u.length = nyb_sequence_tokens(a, u.batch);
  const int64_t last_row = u.first_row + u.rows - 1, heads = run->call->heads_per_kv;
  const nyb_sight first = nyb_sight_of(a, u.batch, u.first_row / heads);
  const nyb_sight last = nyb_sight_of(a, u.batch, last_row / heads);
  u.keep_end = last.keep_end;
  u.begin = first.begin;
  u.visible = last.end;
  u.all_begin = last.begin;
  u.all_end = a->mask_array.kind == 0 ? first.end : 0;
  return u;
}

/* The chunks that a unit reads, numbered: those of the kept tokens, then those of the window. */
static int64_t first_window_chunk(const unit *u) {
  const int64_t kept = chunks_of(u->keep_end), first = u->begin / NYB_CHUNK_TOKENS;
  return first > kept ? first : kept;
}

static int64_t chunk_count(const unit *u) {
  const int64_t in_window = chunks_of(u->visible) - first_window_chunk(u);
  return chunks_of(u->keep_end) + (in_window > 0 ? in_window : 0);
}

static int64_t chunk_at(const unit *u, int64_t index) {
  const int64_t kept = chunks_of(u->keep_end);
  return index < kept ? index : first_window_chunk(u) + index - kept;
}

/* Where the first tile begins of which a row may see a token: `first`, or whole tiles later. */
static int64_t tile_from(const unit *u, int64_t first) {
  if (first < u->keep_end || first >= u->begin) return first;
  return first + (u->begin - first) / NYB_TILE_TOKENS * NYB_TILE_TOKENS;
}

static bool is_split(const fused_run *run, int64_t length) {
  return most_seen(run->call, length) > run->longest_unsplit;
}

static int64_t head_of(const fused_run *run, const unit *u, int64_t row) {
  return u->kv_head * run->call->heads_per_kv + (u->first_row + row) % run->call->heads_per_kv;
}

static int64_t query_row_of(const fused_run *run, const unit *u, int64_t row) {
  return (u->first_row + row) / run->call->heads_per_kv;
}

static row_facts facts_of(const nyb_attention *a, int64_t batch, int64_t head, int64_t row) {
  return (row_facts){
      .sight = nyb_sight_of(a, batch, row),
      .position = nyb_row_position(a, batch, row),
      .mask = a->mask_array.kind != 0 ? nyb_mask_row(a, batch, head, row) : NULL,
      .slope = a->alibi_slopes != NULL ? a->alibi_slopes[head] : 0,
  };
}

static void load_rows(const fused_run *run, const unit *u, const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const int64_t padded = nyb_padded_dim(a->key_dim);
  for (int64_t row = 0; row < u->rows; row++) {
    const int64_t head = head_of(run, u, row), query_row = query_row_of(run, u, row);
    float *q = memory->q + row * padded;
    nyb_load_query(a, u->batch, head, query_row, q);
    for (int64_t d = a->key_dim; d < padded; d++) q[d] = 0;
    memory->facts[row] = facts_of(a, u->batch, head, query_row);
  }
}

/* Leaves in memory->prepared what the part's keys are multiplied by. */
static void prepare_queries(const fused_run *run, unit *u, const part_run *part,
                            const worker_memory *memory) {
  const nyb_row_layout *key = &part->k.layout;
  const nyb_row_layout *prepared = u->prepared == NULL ? NULL : &u->prepared->k.layout;
  if (prepared == NULL || prepared->id != key->id || prepared->group_size != key->group_size) {
    const nyb_query_block block = {.q = memory->q,
                                   .rows = u->rows,
                                   .dim = part->k.dim,
                                   .group_size = part->k.stored->format.group_size,
                                   .precise = run->precise,
                                   .prepared = memory->prepared};
    part->queries(&block);
  }
  u->prepared = part;
}

/* ---- Tiles of tokens ------------------------------------------------------------------------ */

/* Up to NYB_TILE_TOKENS tokens of one part; 0 tokens: none. */
typedef struct token_tile {
  int64_t first, tokens;
  nyb_place place;      /* of the first */
  nyb_tile_tokens k, v; /* rows from there up to the first gap */
} token_tile;

static const part_run *part_at(const fused_run *run, const token_tile *tile) {
  return &run->parts[tile->place.part];
}

/* The tile of u's tokens that begins with `first`. Where its rows follow those of the tile before
 * it (NULL: none is known), it need not be looked up where they stand. */
static void find_tile(const fused_run *run, const unit *u, const token_tile *before, int64_t first,
                      int64_t end, token_tile *tile) {
  tile->first = first;
  tile->tokens = 0;
  if (first >= end) return;
  const int64_t steps = before == NULL ? 0 : first - before->first;
  if (before != NULL && steps < before->place.run) {
    tile->place = before->place;
    tile->place.row += steps;
    tile->place.run -= steps;
  } else {
    tile->place = nyb_place_of(run->call->attention, u->batch, first);
  }
  const nyb_place *place = &tile->place;
  if (place->part_end < end) end = place->part_end;
  tile->tokens = end - first < NYB_TILE_TOKENS ? end - first : NYB_TILE_TOKENS;
  const int64_t rows = place->run < tile->tokens ? place->run : tile->tokens;
  const part_run *part = part_at(run, tile);
  tile->k = nyb_tile_at(&part->k, u->kv_head, place, rows);
  tile->v = nyb_tile_at(&part->v, u->kv_head, place, rows);
}

static void shorten_tile(token_tile *tile, int64_t end) {
  if (tile->tokens <= end - tile->first) return;
  tile->tokens = end - tile->first;
  if (tile->k.tokens > tile->tokens) tile->k.tokens = tile->v.tokens = tile->tokens;
}

/* Its rows of K or of V where they stand, if they follow each other; else gathered, packed. */
static nyb_tile_tokens whole_tile(const fused_run *run, const unit *u, const nyb_part_rows *rows,
                                  const token_tile *tile, const nyb_tile_tokens *first,
                                  const worker_memory *memory) {
  if (first->tokens >= tile->tokens) return *first;
  return nyb_gather_tile(run->call->attention, u->batch, u->kv_head, rows, tile->first,
                         tile->tokens, memory->gathered);
}

enum { LINE_BYTES = 64 };

static void fetch_rows(const char *row, int64_t stride_bytes, int64_t rows, int64_t row_bytes) {
  if (stride_bytes == row_bytes) { /* one long row */
    row_bytes *= rows;
    rows = 1;
  }
  for (int64_t i = 0; i < rows; i++, row += stride_bytes) {
    for (int64_t byte = 0; byte < row_bytes; byte += LINE_BYTES) __builtin_prefetch(row + byte);
    __builtin_prefetch(row + row_bytes - 1);
  }
}

/* What a tile that will be gathered has behind its first gap: pieces such as a kernel fetches are
 * left to it, the codes of others asked for here. */
static void fetch_gathered(const fused_run *run, const unit *u, const nyb_part_rows *rows,
                           const token_tile *tile, const nyb_tile_tokens *first, nyb_ahead *ahead) {
  const nyb_row_layout *layout = &rows->layout;
  int64_t before = first->tokens;
  for (int64_t t = first->tokens, count; t < tile->tokens; t += count) {
    const nyb_place place = nyb_place_of(run->call->attention, u->batch, tile->first + t);
    count = place.run < tile->tokens - t ? place.run : tile->tokens - t;
    const nyb_tile_tokens piece = nyb_tile_at(rows, u->kv_head, &place, count);
    if (ahead->piece_count < NYB_AHEAD_PIECES && before == ahead->rows && count <= ahead->rows &&
        first->codes_stride_bytes == layout->codes_bytes) {
      ahead->pieces[ahead->piece_count++] = piece.codes;
    } else {
      fetch_rows(piece.codes, piece.codes_stride_bytes, count, layout->codes_bytes);
    }
    before = count;
    if (!layout->affine) continue;
    const int64_t group_bytes = layout->groups * (int64_t)layout->scale_bytes;
    fetch_rows(piece.scales, piece.scales_stride_bytes, count, group_bytes);
    fetch_rows(piece.biases, piece.biases_stride_bytes, count, group_bytes);
  }
}

/* Scales and biases are few lines, which are asked for here; codes are left to the kernel. */
static nyb_ahead ahead_of(const fused_run *run, const unit *u, const nyb_part_rows *rows,
                          const token_tile *tile, const nyb_tile_tokens *first) {
  nyb_ahead ahead = {.pieces = {first->codes},
                     .piece_count = 1,
                     .stride_bytes = first->codes_stride_bytes,
                     .rows = first->tokens,
                     .row_bytes = rows->layout.codes_bytes};
  if (first->tokens < tile->tokens) fetch_gathered(run, u, rows, tile, first, &ahead);
  if (!rows->layout.affine) return ahead;
  const int64_t stride = first->scales_stride_bytes;
  const int64_t step = stride > LINE_BYTES ? stride : LINE_BYTES;
  for (int64_t byte = 0; byte < first->tokens * stride; byte += step) {
    __builtin_prefetch(first->scales + byte);
    __builtin_prefetch(first->biases + byte);
  }
  return ahead;
}

/* ---- One chunk of one unit ------------------------------------------------------------------ */

static token_span span_within(int64_t begin, int64_t end, int64_t first, int64_t tokens) {
  begin = begin > first ? begin - first : 0;
  end = end < first + tokens ? end - first : tokens;
  if (begin >= end) return (token_span){0, 0};
  return (token_span){(int32_t)begin, (int32_t)end};
}

/* A row of which the mask hides the whole span reads nothing of it. */
static token_span span_masked(const nyb_mask_array *mask, const char *mask_row, int64_t first,
                              token_span span) {
  const bool hidden = nyb_mask_hides_all(mask, mask_row, first + span.begin, first + span.end);
  return hidden ? (token_span){0, 0} : span;
}

typedef enum tile_sight { SEEN_BY_NONE, SEEN_IN_PART, SEEN_WHOLE } tile_sight;

/* Which of the tile's tokens each row sees; memory->spans of those that are seen in part. */
static tile_sight find_spans(const fused_run *run, const unit *u, int64_t first, int64_t tokens,
                             const worker_memory *memory) {
  if (first >= u->all_begin && first + tokens <= u->all_end) {
    for (int64_t row = 0; row < u->rows; row++) memory->visible[row] = (int32_t)tokens;
    return SEEN_WHOLE;
  }
  const nyb_mask_array *mask = &run->call->attention->mask_array;
  bool any = false;
  for (int64_t row = 0; row < u->rows; row++) {
    const row_facts *facts = &memory->facts[row];
    row_spans spans = {.kept = span_within(0, facts->sight.keep_end, first, tokens),
                       .rest = span_within(facts->sight.begin, facts->sight.end, first, tokens)};
    if (mask->kind != 0) {
      spans.kept = span_masked(mask, facts->mask, first, spans.kept);
      spans.rest = span_masked(mask, facts->mask, first, spans.rest);
    }
    if (spans.rest.end == 0) {
      spans.rest = spans.kept;
      spans.kept = (token_span){0, 0};
    }
    memory->spans[row] = spans;
    memory->visible[row] = spans.rest.end;
    any |= spans.rest.end > 0;
  }
  return any ? SEEN_IN_PART : SEEN_BY_NONE;
}

static void bias_scores(const fused_run *run, const unit *u, int64_t first, int64_t tokens,
                        const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const nyb_mask_array *mask = &a->mask_array;
  const int64_t column_bytes = nyb_mask_column_bytes(mask);
  for (int64_t row = 0; row < u->rows; row++) {
    const row_facts *facts = &memory->facts[row];
    memory->bias_rows[row] =
        (nyb_bias_row){.mask = mask->kind == 0 ? NULL : facts->mask + first * column_bytes,
                       .slope = facts->slope,
                       .distance = (int32_t)(facts->position - first)};
  }
  const nyb_bias_tile tile = {.scores = memory->scores,
                              .rows = u->rows,
                              .tokens = tokens,
                              .round_to = run->round_scores_to,
                              .softcap = run->softcap,
                              .sloped = a->alibi_slopes != NULL,
                              .mask = mask->kind,
                              .mask_dtype = mask->dtype,
                              .of_rows = memory->bias_rows};
  run->bias(&tile);
}

/* Tokens that a row does not see weigh nothing, whatever their scores. */
static void hide_unseen(const unit *u, const worker_memory *memory) {
  for (int64_t row = 0; row < u->rows; row++) {
    const row_spans *spans = &memory->spans[row];
    float *scores = memory->scores + row * NYB_TILE_TOKENS;
    for (int32_t t = spans->kept.end; t < spans->rest.begin; t++) scores[t] = -INFINITY;
  }
}

/* Adds one span of rows that see the same of the tile of values. Their weights come to the front of
 * their rows, where the span's first token is the tile's, and what is behind them becomes 0. */
static void add_span(const fused_run *run, const part_run *part, nyb_tile_tokens v, token_span span,
                     int64_t row, int64_t rows, nyb_ahead ahead, const row_state *state,
                     const worker_memory *memory) {
  float *weights = memory->scores + row * NYB_TILE_TOKENS;
  const int64_t tokens = span.end - span.begin;
  for (int64_t r = 0; r < rows && span.begin > 0; r++) {
    float *of_row = weights + r * NYB_TILE_TOKENS;
    memmove(of_row, of_row + span.begin, (size_t)tokens * sizeof(float));
    memset(of_row + tokens, 0, (size_t)(NYB_TILE_TOKENS - tokens) * sizeof(float));
  }
  v.codes += span.begin * v.codes_stride_bytes;
  if (part->v.layout.affine) {
    v.scales += span.begin * v.scales_stride_bytes;
    v.biases += span.begin * v.biases_stride_bytes;
  }
  v.tokens = tokens;
  const nyb_value_tile tile = {.weights = weights,
                               .rows = rows,
                               .precise = run->precise,
                               .v = v,
                               .ahead = ahead,
                               .out = state->values + row * nyb_padded_dim(v.dim),
                               .scratch = memory->scratch};
  part->values(&tile);
}

/* Rows that see the same of the tile are summed together; what others see is not read for them,
 * whatever stands there. */
static void add_spans(const fused_run *run, const unit *u, const part_run *part, nyb_tile_tokens v,
                      nyb_ahead ahead, const row_state *state, const worker_memory *memory) {
  for (int64_t row = 0, next; row < u->rows; row = next) {
    const row_spans *spans = &memory->spans[row];
    for (next = row + 1; next < u->rows; next++) {
      if (memcmp(&memory->spans[next], spans, sizeof *spans) != 0) break;
    }
    if (spans->rest.end == 0) continue;
    if (spans->kept.end > 0) {
      add_span(run, part, v, spans->kept, row, next - row, ahead, state, memory);
      ahead.rows = 0;
    }
    add_span(run, part, v, spans->rest, row, next - row, ahead, state, memory);
    ahead.rows = 0;
  }
}

/* The tile of values as one row sees it: what the mask's array hides from it is zeros. */
static nyb_tile_tokens shown_values(const fused_run *run, const unit *u, const part_run *part,
                                    const token_tile *tile, int64_t row,
                                    const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const nyb_row_layout *layout = &part->v.layout;
  const nyb_tile_tokens v = nyb_gather_tile(a, u->batch, u->kv_head, &part->v, tile->first,
                                            tile->tokens, memory->gathered);
  char *codes = memory->gathered;
  char *scales = layout->affine ? codes + (v.scales - v.codes) : NULL;
  char *biases = layout->affine ? codes + (v.biases - v.codes) : NULL;
  for (int64_t t = 0; t < tile->tokens; t++) {
    if (!nyb_mask_hides(&a->mask_array, memory->facts[row].mask, tile->first + t)) continue;
    if (layout->affine) {
      memset(scales + t * v.scales_stride_bytes, 0, (size_t)v.scales_stride_bytes);
      memset(biases + t * v.biases_stride_bytes, 0, (size_t)v.biases_stride_bytes);
    } else {
      memset(codes + t * v.codes_stride_bytes, 0, (size_t)v.codes_stride_bytes);
    }
  }
  return v;
}

/* add_spans() row by row, each over the values that are shown to it. */
static void add_shown(const fused_run *run, const unit *u, const part_run *part,
                      const token_tile *tile, const row_state *state, const worker_memory *memory) {
  for (int64_t row = 0; row < u->rows; row++) {
    const row_spans *spans = &memory->spans[row];
    if (spans->rest.end == 0) continue;
    const nyb_tile_tokens v = shown_values(run, u, part, tile, row, memory);
    if (spans->kept.end > 0) {
      add_span(run, part, v, spans->kept, row, 1, (nyb_ahead){0}, state, memory);
    }
    add_span(run, part, v, spans->rest, row, 1, (nyb_ahead){0}, state, memory);
  }
}

static void scale_row(float *values, int64_t count, float factor) {
  for (int64_t d = 0; d < count; d++) values[d] *= factor;
}

static void clear_row(const row_state *state, int64_t row, int64_t padded_dim) {
  memset(state->values + row * padded_dim, 0, (size_t)padded_dim * sizeof(float));
  state->maximum[row] = -INFINITY;
  state->sum[row] = 0;
}

static void clear_state(const row_state *state, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; row++) clear_row(state, row, padded_dim);
}

/* Adds a tile to *state; `next` is the one that follows, of this part or of the next. */
static void attend_tile(const fused_run *run, const unit *u, const part_run *part,
                        const token_tile *tile, tile_sight sight, const token_tile *next,
                        const row_state *state, const worker_memory *memory) {
  const int64_t padded = nyb_padded_dim(part->v.dim);
  const nyb_score_tile scores = {.prepared = memory->prepared,
                                 .rows = u->rows,
                                 .precise = run->precise,
                                 .k = whole_tile(run, u, &part->k, tile, &tile->k, memory),
                                 .ahead = ahead_of(run, u, &part->v, tile, &tile->v),
                                 .scores = memory->scores,
                                 .scratch = memory->scratch};
  part->scores(&scores);
  if (run->bias != NULL) bias_scores(run, u, tile->first, tile->tokens, memory);
  if (sight == SEEN_IN_PART) hide_unseen(u, memory);
  const nyb_softmax_tile softmax = {.scores = memory->scores,
                                    .rows = u->rows,
                                    .visible = memory->visible,
                                    .round_to = run->bias == NULL ? run->round_scores_to : NYB_F32,
                                    .maximum = state->maximum,
                                    .sum = state->sum,
                                    .rescale = memory->rescale};
  if (run->softmax(&softmax)) {
    for (int64_t row = 0; row < u->rows; row++) {
      if (memory->rescale[row] != 1) {
        scale_row(state->values + row * padded, padded, memory->rescale[row]);
      }
    }
  }
  if (u->leave_out) {
    add_shown(run, u, part, tile, state, memory);
    return;
  }
  const nyb_tile_tokens v = whole_tile(run, u, &part->v, tile, &tile->v, memory);
  nyb_ahead ahead = {0};
  if (next->tokens > 0) ahead = ahead_of(run, u, &part_at(run, next)->k, next, &next->k);
  if (sight == SEEN_IN_PART) {
    add_spans(run, u, part, v, ahead, state, memory);
  } else {
    add_span(run, part, v, (token_span){0, (int32_t)tile->tokens}, 0, u->rows, ahead, state,
             memory);
  }
}

/* Leaves in *state, the columns in the order of the part's kernel, what the tokens from `begin` to
 * `end`, all of one part, come to. The rows up to next_end are fetched ahead. */
static void attend_tokens(const fused_run *run, unit *u, const part_run *part, int64_t begin,
                          int64_t end, int64_t next_end, const row_state *state,
                          const worker_memory *memory) {
  token_tile tiles[2];
  clear_state(state, u->rows, nyb_padded_dim(part->v.dim));
  prepare_queries(run, u, part, memory);
  find_tile(run, u, NULL, tile_from(u, begin), end, &tiles[0]);
  for (int at = 0; tiles[at].first < end; at = 1 - at) {
    token_tile *tile = &tiles[at], *next = &tiles[1 - at];
    shorten_tile(tile, end);
    find_tile(run, u, tile, tile_from(u, tile->first + tile->tokens), next_end, next);
    const tile_sight sight = find_spans(run, u, tile->first, tile->tokens, memory);
    if (sight != SEEN_BY_NONE) attend_tile(run, u, part, tile, sight, next, state, memory);
  }
}

/* ---- Folding chunks ------------------------------------------------------------------------- */

/* A row without weight has sums that are 0 or, of values that are not finite, NaN. */
static void keep_nan(float *into, const float *weightless, int64_t count) {
  for (int64_t d = 0; d < count; d++) {
    if (weightless[d] != 0) into[d] = weightless[d];
  }
}

/* folded = folded + next; a side without weight leaves the other bit-identical. */
static void fold_row(const row_state *folded, const row_state *next, int64_t row,
                     int64_t padded_dim) {
  float *into = folded->values + row * padded_dim;
  const float *from = next->values + row * padded_dim;
  if (next->sum[row] == 0) {
    keep_nan(into, from, padded_dim);
    return;
  }
  if (folded->sum[row] == 0) {
    for (int64_t d = 0; d < padded_dim; d++) into[d] = into[d] != 0 ? into[d] : from[d];
    folded->maximum[row] = next->maximum[row];
    folded->sum[row] = next->sum[row];
    return;
  }
  const float maximum = fmaxf(folded->maximum[row], next->maximum[row]);
  const float keep = expf(folded->maximum[row] - maximum);
  const float add = expf(next->maximum[row] - maximum);
  for (int64_t d = 0; d < padded_dim; d++) into[d] = into[d] * keep + from[d] * add;
  folded->sum[row] = folded->sum[row] * keep + next->sum[row] * add;
  folded->maximum[row] = maximum;
}

/* ---- Chunks --------------------------------------------------------------------------------- */

/* Brings a row's columns from the order of the part's kernel into that of the elements. */
static void order_columns(const fused_run *run, const part_run *part, const float *from,
                          float *to) {
  const nyb_value_columns columns = {.from = from,
                                     .to = to,
                                     .dim = part->v.dim,
                                     .group_size = part->v.stored->format.group_size,
                                     .precise = run->precise};
  part->columns(&columns);
}

/* The pieces of a chunk that stand in different parts come from empty states, too, and are folded
 * in the order of the elements: each kernel has columns of its own. */
static void attend_pieces(const fused_run *run, unit *u, int64_t begin, int64_t end,
                          int64_t next_end, const worker_memory *memory) {
  const int64_t dim = run->call->attention->value_dim, padded = nyb_padded_dim(dim);
  clear_state(&memory->chunk, u->rows, padded);
  for (int64_t first = begin, next; first < end; first = next) {
    const nyb_place place = nyb_place_of(run->call->attention, u->batch, first);
    const part_run *part = &run->parts[place.part];
    next = place.part_end < end ? place.part_end : end;
    attend_tokens(run, u, part, first, next, next_end, &memory->piece, memory);
    for (int64_t row = 0; row < u->rows; row++) {
      float *values = memory->piece.values + row * padded;
      order_columns(run, part, values, memory->row);
      memcpy(values, memory->row, (size_t)dim * sizeof(float));
      fold_row(&memory->chunk, &memory->piece, row, padded);
    }
  }
}

static void attend_chunk_once(const fused_run *run, unit *u, int64_t chunk,
                              const worker_memory *memory) {
  const int64_t begin = chunk * NYB_CHUNK_TOKENS;
  const int64_t end = begin + NYB_CHUNK_TOKENS < u->visible ? begin + NYB_CHUNK_TOKENS : u->visible;
  /* A whole unit's next chunk follows; of a split one, another worker may have taken it. */
  const int64_t next_end = is_split(run, u->length) ? end : u->visible;
  if (run->in_parts) {
    attend_pieces(run, u, begin, end, next_end, memory);
  } else {
    attend_tokens(run, u, &run->parts[NYB_PART_MIDDLE], begin, end, next_end, &memory->chunk,
                  memory);
  }
}

/* Whether a row whose scores are numbers has an element that is none. */
static bool has_nan_values(const row_state *state, int64_t rows, int64_t padded_dim) {
  for (int64_t row = 0; row < rows; row++) {
    const float *values = state->values + row * padded_dim;
    int64_t count = 0;
    for (int64_t d = 0; d < padded_dim; d++) count += values[d] != values[d];
    if (count > 0 && state->sum[row] == state->sum[row]) return true;
  }
  return false;
}

/* Leaves the chunk's result in memory->chunk. A value that is not finite shows through a weight of
 * 0, as it must where the token is seen and its score is -inf; where the mask's array hides the
 * token, it must not. That is rare, and found out afterwards. */
static void attend_chunk(const fused_run *run, unit *u, int64_t chunk,
                         const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  attend_chunk_once(run, u, chunk, memory);
  if (a->mask_array.kind == 0) return;
  if (!has_nan_values(&memory->chunk, u->rows, nyb_padded_dim(a->value_dim))) return;
  u->leave_out = true;
  attend_chunk_once(run, u, chunk, memory);
  u->leave_out = false;
}

/* A sink is a token more, without a value: it only adds to the sum. */
static void add_sink(const row_state *state, int64_t row, int64_t padded_dim, float sink) {
  const float before = state->maximum[row];
  const float maximum = before > sink ? before : sink; /* or NaN, where the sink is */
  if (maximum == -INFINITY) return;
  const float keep = expf(before - maximum);
  float *values = state->values + row * padded_dim;
  for (int64_t d = 0; d < padded_dim; d++) values[d] *= keep;
  state->sum[row] = state->sum[row] * keep + expf(sink - maximum);
  state->maximum[row] = maximum;
}

/* Whether a row sees a token, though it may weigh nothing. */
static bool sees_any(const fused_run *run, const unit *u, int64_t row) {
  const nyb_attention *a = run->call->attention;
  const int64_t query_row = query_row_of(run, u, row);
  const nyb_sight sight = nyb_sight_of(a, u->batch, query_row);
  if (a->mask_array.kind == 0) return sight.keep_end > 0 || sight.begin < sight.end;
  const char *mask_row = nyb_mask_row(a, u->batch, head_of(run, u, row), query_row);
  return !nyb_mask_hides_all(&a->mask_array, mask_row, 0, sight.keep_end) ||
         !nyb_mask_hides_all(&a->mask_array, mask_row, sight.begin, sight.end);
}

static void finish_row(const fused_run *run, const unit *u, const row_state *state, int64_t row,
                       const worker_memory *memory) {
  const nyb_attention *a = run->call->attention;
  const int64_t head = head_of(run, u, row), query_row = query_row_of(run, u, row);
  const int64_t padded = nyb_padded_dim(a->value_dim);
  const float *values = state->values + row * padded;
  float *out = memory->row;
  float lse = -INFINITY;
  /* A unit without chunks has no state yet. */
  const bool blind = chunk_count(u) == 0 || (state->sum[row] == 0 && !sees_any(run, u, row));
  if (blind) clear_row(state, row, padded);
  if (a->sinks != NULL) add_sink(state, row, padded, a->sinks[head]);
  if (blind && state->sum[row] == 0) {
    memset(out, 0, (size_t)a->value_dim * sizeof(float));
  } else { /* a row whose scores are all -inf becomes 0/0 */
    if (run->in_parts) {
      memcpy(out, values, (size_t)a->value_dim * sizeof(float));
    } else {
      order_columns(run, &run->parts[NYB_PART_MIDDLE], values, out);
    }
    for (int64_t d = 0; d < a->value_dim; d++) out[d] /= state->sum[row];
    lse = state->maximum[row] + logf(state->sum[row]);
  }
  nyb_store_row(a, u->batch, head, query_row, out, lse);
}

/* ---- Whole units, and split ones ------------------------------------------------------------ */

static void run_unit(const fused_run *run, int64_t index, const worker_memory *memory) {
  unit u = unit_at(run, index);
  const int64_t padded = nyb_padded_dim(run->call->attention->value_dim);
  if (is_split(run, u.length)) return;
  clear_state(&memory->folded, u.rows, padded);
  if (u.visible > 0) load_rows(run, &u, memory);
  for (int64_t chunk = 0; chunk < chunk_count(&u); chunk++) {
    attend_chunk(run, &u, chunk_at(&u, chunk), memory);
    for (int64_t row = 0; row < u.rows; row++) {
      fold_row(&memory->folded, &memory->chunk, row, padded);
    }
  }
  for (int64_t row = 0; row < u.rows; row++) finish_row(run, &u, &memory->folded, row, memory);
}

/* Split units are numbered through, and so are their chunks; all units of a sequence count as many
 * chunks. This walks over the batch: where the numbers of a sequence begin. */
typedef struct split_sequence {
  int64_t batch;
  int64_t first_unit, first_chunk;
  int64_t units, chunks_per_unit; /* 0 units where the sequence is not split */
} split_sequence;

static split_sequence next_sequence(const fused_run *run, const split_sequence *before) {
  split_sequence next = {.batch = before == NULL ? 0 : before->batch + 1};
  if (before != NULL) {
    next.first_unit = before->first_unit + before->units;
    next.first_chunk = before->first_chunk + before->units * before->chunks_per_unit;
  }
  const nyb_attention *a = run->call->attention;
  const int64_t length = next.batch < a->batch ? nyb_sequence_tokens(a, next.batch) : 0;
  if (is_split(run, length)) {
    next.units = run->units_per_sequence;
    next.chunks_per_unit = most_chunks(run->call, length);
  }
  return next;
}

typedef struct split_unit {
  unit unit;
  int64_t first_chunk, end; /* of those numbers */
} split_unit;

static split_unit split_unit_at(const fused_run *run, const split_sequence *s, int64_t index) {
  const int64_t first_chunk = s->first_chunk + (index - s->first_unit) * s->chunks_per_unit;
  return (split_unit){
      .unit = unit_at(run, s->batch * run->units_per_sequence + index - s->first_unit),
      .first_chunk = first_chunk,
      .end = first_chunk + s->chunks_per_unit};
}

/* The split unit to which a chunk belongs; *s goes on from where it stands. */
static int64_t unit_of_chunk(const fused_run *run, split_sequence *s, int64_t chunk) {
  while (chunk >= s->first_chunk + s->units * s->chunks_per_unit) *s = next_sequence(run, s);
  return s->first_unit + (chunk - s->first_chunk) / s->chunks_per_unit;
}

static row_state partial_at(const fused_run *run, int64_t slot) {
  const nyb_attention *a = run->call->attention;
  const int64_t rows = rows_per_unit(run->call);
  return row_state_at(run->partials + slot * row_state_bytes(a, rows), a, rows);
}

/* Where the partial result of a chunk of this wave waits; before the wave, what was folded of the
 * unit so far. */
static row_state partial_of(const fused_run *run, int64_t chunk) {
  return partial_at(run, chunk < run->first_chunk ? 0 : chunk - run->first_chunk + 1);
}

static void run_chunk(const fused_run *run, split_sequence *s, int64_t chunk,
                      worker_memory memory) {
  const int64_t index = unit_of_chunk(run, s, chunk);
  split_unit split = split_unit_at(run, s, index);
  const int64_t of_unit = chunk - split.first_chunk;
  if (of_unit >= chunk_count(&split.unit)) return;
  memory.chunk = partial_of(run, chunk);
  load_rows(run, &split.unit, &memory);
  attend_chunk(run, &split.unit, chunk_at(&split.unit, of_unit), &memory);
}

/* Folds what this wave adds to a row of a split unit, and stores the row where that was all. */
static void fold_split(const fused_run *run, split_sequence *s, int64_t index, int64_t row,
                       const worker_memory *memory) {
  const int64_t padded = nyb_padded_dim(run->call->attention->value_dim);
  while (index >= s->first_unit + s->units) *s = next_sequence(run, s);
  const split_unit split = split_unit_at(run, s, index);
  const unit *u = &split.unit;
  if (row >= u->rows) return;
  const row_state folded = partial_of(run, split.first_chunk);
  const int64_t visible_end = split.first_chunk + chunk_count(u);
  const int64_t wave_end = run->first_chunk + run->chunks;
  const int64_t end = visible_end < wave_end ? visible_end : wave_end;
  int64_t chunk = split.first_chunk + 1;
  if (chunk < run->first_chunk) chunk = run->first_chunk;
  for (; chunk < end; chunk++) {
    const row_state next = partial_of(run, chunk);
    fold_row(&folded, &next, row, padded);
  }
  if (split.end <= wave_end) finish_row(run, u, &folded, row, memory);
}

/* ---- Workers -------------------------------------------------------------------------------- */

static worker_memory memory_of(const fused_run *run, int64_t worker) {
  return worker_memory_at(run->workspace + worker * worker_bytes(run->call), run->call);
}

static int64_t next_of(fused_run *run) {
  return atomic_fetch_add_explicit(&run->next_task, 1, memory_order_relaxed);
}

static void work(void *data, int64_t worker) {
  fused_run *run = data;
  const worker_memory memory = memory_of(run, worker);
  split_sequence s = next_sequence(run, NULL);
  for (int64_t task; (task = next_of(run)) < run->whole_units + run->chunks;) {
    if (task < run->whole_units) {
      run_unit(run, task, &memory);
    } else {
      run_chunk(run, &s, run->first_chunk + task - run->whole_units, memory);
    }
  }
}

static void fold_work(void *data, int64_t worker) {
  fused_run *run = data;
  const worker_memory memory = memory_of(run, worker);
  const int64_t rows = rows_per_unit(run->call);
  split_sequence s = next_sequence(run, NULL);
  for (int64_t task; (task = next_of(run)) < run->folds * rows;) {
    fold_split(run, &s, run->first_fold + task / rows, task % rows, &memory);
  }
}

/* ---- The run -------------------------------------------------------------------------------- */

/* As many workers as there are tasks, and as the work is worth. */
static int64_t worker_count(const fused_run *run, int64_t tasks, double elements) {
  const int64_t threads = run->call->context->threads;
  const double worth = elements / min_elements_per_worker;
  const int64_t most = tasks < threads ? tasks : threads;
  return worth >= (double)most ? most : worth > 1 ? (int64_t)worth : 1;
}

/* The wave from run->first_chunk on, of `run->chunks` chunks; `workers` of them, and the fold. */
static void run_wave(fused_run *run, int64_t workers) {
  const nyb_attention *a = run->call->attention;
  nyb_context *context = run->call->context;
  atomic_store_explicit(&run->next_task, 0, memory_order_relaxed);
  nyb_parallel(context, workers, work, run);
  if (run->chunks == 0) return;

  split_sequence s = next_sequence(run, NULL);
  const int64_t rows = rows_per_unit(run->call), state_bytes = row_state_bytes(a, rows);
  const int64_t end = run->first_chunk + run->chunks;
  run->first_fold = unit_of_chunk(run, &s, run->first_chunk);
  const int64_t last = unit_of_chunk(run, &s, end - 1);
  run->folds = last - run->first_fold + 1;
  atomic_store_explicit(&run->next_task, 0, memory_order_relaxed);
  nyb_parallel(context,
               worker_count(run, run->folds * rows,
                            (double)(run->chunks * state_bytes) / (double)sizeof(float)),
               fold_work, run);
  const split_unit unfinished = split_unit_at(run, &s, last);
  if (unfinished.end > end && unfinished.first_chunk >= run->first_chunk) {
    memcpy(run->partials, partial_of(run, unfinished.first_chunk).values, (size_t)state_bytes);
  }
}

/* Longer sequences are split: their units are more than a share of the call's work each. */
static int64_t longest_unsplit(const nyb_attention_call *call, double all_tokens) {
  const int64_t shares = SHARES_PER_THREAD * call->context->threads;
  const double share = all_tokens * (double)units_per_sequence(call) / (double)shares;
  if (call->context->threads == 1 || share >= INT32_MAX) return INT32_MAX;
  return share > NYB_CHUNK_TOKENS ? (int64_t)share : NYB_CHUNK_TOKENS;
}

static void run_waves(fused_run *run) {
  const nyb_attention_call *call = run->call;
  const nyb_attention *a = call->attention;
  double all_tokens = 0;
  int64_t all_chunks = 0;
  for (int64_t b = 0; b < a->batch; b++) {
    all_tokens += (double)most_seen(call, nyb_sequence_tokens(a, b));
  }
  run->longest_unsplit = longest_unsplit(call, all_tokens);
  for (int64_t b = 0; b < a->batch; b++) {
    const int64_t tokens = nyb_sequence_tokens(a, b);
    if (!is_split(run, tokens)) continue;
    all_chunks += run->units_per_sequence * most_chunks(call, tokens);
  }
  run->whole_units = a->batch * run->units_per_sequence;
  const double elements =
      all_tokens * (double)run->units_per_sequence * (double)(a->key_dim + a->value_dim);
  const int64_t workers = worker_count(run, run->whole_units + all_chunks, elements);
  const int64_t room =
      all_chunks == 0 ? 1 : partial_bytes(call) / row_state_bytes(a, rows_per_unit(call)) - 1;
  const int64_t waves = all_chunks == 0 ? 1 : (all_chunks + room - 1) / room;
  for (int64_t wave = 0; wave < waves; wave++) {
    const int64_t end = all_chunks * (wave + 1) / waves;
    run->chunks = end - run->first_chunk;
    run_wave(run, workers);
    run->first_chunk = end;
    run->whole_units = 0;
  }
}

static part_run part_of(const nyb_attention_call *call, nyb_part_id part) {
  const nyb_attention *a = call->attention;
  const nyb_context *context = call->context;
  const nyb_format_id key = call->keys[part].id, value = call->values[part].id;
  return (part_run){
      .k = {nyb_part_keys(a, part), call->keys[part], a->key_dim},
      .v = {nyb_part_values(a, part), call->values[part], a->value_dim},
      .queries =
          (nyb_attention_queries_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_QUERIES, key),
      .scores =
          (nyb_attention_scores_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_SCORES, key),
      .values =
          (nyb_attention_values_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_VALUES, value),
      .columns =
          (nyb_attention_columns_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_COLUMNS, value),
  };
}

/* Each kernel counts once for the call, in however many parts it works. */
static void count_kernels(const fused_run *run) {
  nyb_context *context = run->call->context;
  bool keys[NYB_FORMAT_COUNT] = {false}, values[NYB_FORMAT_COUNT] = {false};
  for (int i = 0; i < NYB_PART_COUNT; i++) {
    const part_run *part = &run->parts[i];
    if (part->scores == NULL) continue;
    keys[part->k.layout.id] = values[part->v.layout.id] = true;
  }
  for (int id = 0; id < NYB_FORMAT_COUNT; id++) {
    if (keys[id]) {
      nyb_count_kernel(context, NYB_OPERATION_ATTENTION_QUERIES, (nyb_format_id)id);
      nyb_count_kernel(context, NYB_OPERATION_ATTENTION_SCORES, (nyb_format_id)id);
    }
    if (values[id]) {
      nyb_count_kernel(context, NYB_OPERATION_ATTENTION_VALUES, (nyb_format_id)id);
      nyb_count_kernel(context, NYB_OPERATION_ATTENTION_COLUMNS, (nyb_format_id)id);
    }
  }
  if (run->bias != NULL) {
    nyb_count_kernel(context, NYB_OPERATION_ATTENTION_BIAS, NYB_FORMAT_PLAIN_F32);
  }
  nyb_count_kernel(context, NYB_OPERATION_ATTENTION_SOFTMAX, NYB_FORMAT_PLAIN_F32);
}

void nyb_attention_fused_run(const nyb_attention_call *call, char *workspace) {
  nyb_context *context = call->context;
  const nyb_attention *a = call->attention;
  fused_run run = {
      .call = call,
      .softmax = (nyb_attention_softmax_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_SOFTMAX,
                                                          NYB_FORMAT_PLAIN_F32),
      .in_parts = nyb_has_parts(a),
      .precise = a->q.dtype == NYB_F32 || a->out.dtype == NYB_F32,
      .round_scores_to = a->rounding == NYB_ROUNDING_MLX ? a->q.dtype : NYB_F32,
      .units_per_sequence = units_per_sequence(call),
      .blocks = units_per_sequence(call) / a->kv_heads,
      .workspace = workspace,
      .partials = workspace + context->threads * worker_bytes(call),
  };
  for (int part = 0; part < NYB_PART_COUNT; part++) {
    if (nyb_has_part(a, (nyb_part_id)part)) run.parts[part] = part_of(call, (nyb_part_id)part);
  }
  if (a->softcap != 0 || a->alibi_slopes != NULL || a->mask_array.kind != 0) {
    run.bias = (nyb_attention_bias_fn)nyb_kernel_for(context, NYB_OPERATION_ATTENTION_BIAS,
                                                     NYB_FORMAT_PLAIN_F32);
    run.softcap = nyb_round_to(run.round_scores_to, a->softcap);
  }
  run_waves(&run);
  count_kernels(&run);
}
