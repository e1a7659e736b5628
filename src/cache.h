/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache as its own files and the CUDA backend see it.
 *
 *   cache.c          the public calls, their checks, create and destroy
 *   cache_kinds.c    where each kind of cache keeps a token, and what appends and trims leave
 *   cache_storage.c  memory for rows, and growing
 *   cache_append.c   quantizing what comes
 *   cache_pages.c    the pool of a paged cache
 *   cache_reorder.c  sequences that move, double and go
 *   cache_contents.c what saving and loading need
 *
 * What lies in device memory is src/cuda/cache*.c's, which use of this what does not touch rows. */
#ifndef NYB_CACHE_H
#define NYB_CACHE_H

#include "context.h"
#include "cuda/device/cache_kinds.cuh"
#include "format.h"

#define NYB_PLANE_ALIGNMENT 64
#define NYB_SMALLEST_CAPACITY_TOKENS 64 /* of a cache that grows on its own */
/* Moving fewer bytes than this is not worth waking threads for. */
#define NYB_PARALLEL_COPY_BYTES ((int64_t)1 << 20)

enum { NYB_KEY, NYB_VALUE, NYB_CACHE_PARTS };
enum { NYB_CODES, NYB_SCALES, NYB_BIASES, NYB_CACHE_ARRAYS };

typedef struct nyb_cache_part {
  nyb_format format;
  int64_t dim;
  nyb_row_layout layout;
  int64_t row_bytes[NYB_CACHE_ARRAYS]; /* 0 where the format has no such array */
} nyb_cache_part;

/* Six arrays (codes, scales and biases of K and of V) lie in one block. Each array is cut into
 * planes, one for each block of rows and head, in which rows follow each other; a block is a
 * sequence or, of a paged cache, a page. A plane has room for capacity_tokens rows and starts at a
 * multiple of NYB_PLANE_ALIGNMENT bytes. What is no token of a sequence has no meaning, and may
 * never have been written. */
typedef struct nyb_cache_storage {
  void *block; /* NULL while there is no capacity */
  int64_t bytes, capacity_tokens;
  int64_t blocks; /* at least the batch; or pages */
  char *array[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS];
  int64_t plane_bytes[NYB_CACHE_PARTS][NYB_CACHE_ARRAYS];
} nyb_cache_storage;

/* What there is of all sequences, in arrays as views want them: [batch]. */
typedef struct nyb_cache_counts {
  void *memory;
  int64_t *dropped;
  int32_t *lengths, *offsets, *last_begins;
  int32_t *shared; /* paged, within an append: the page that a sequence gave up; -1: none */
  int32_t *pages;  /* paged, on CUDA: of the sequence's table, which may be more than it fills */
} nyb_cache_counts;

/* A paged cache's pages, beside their rows in the storage. */
typedef struct nyb_cache_pool {
  void *memory;
  int32_t *references; /* [pages]: sequences that hold it */
  int32_t *unused;     /* [unused_count]: pages without references, the next one last */
  int64_t unused_count;
  int32_t *table; /* [batch, table_stride] */
  int64_t table_stride;
} nyb_cache_pool;

struct nyb_cuda_cache; /* src/cuda/cache.h */

/* What views lead to beside rows. */
typedef struct nyb_cache_addresses {
  const int32_t *lengths, *offsets, *last_begins, *table;
} nyb_cache_addresses;

struct nyb_cache {
  nyb_context *context;
  nyb_cache_options options; /* as they were given */
  nyb_cache_kind kind;
  nyb_kind_numbers numbers; /* of the kind */
  int64_t batch, kv_heads;
  nyb_cache_part part[NYB_CACHE_PARTS];
  nyb_cache_part plain[NYB_CACHE_PARTS]; /* mixed: of the rows beside the body */
  nyb_rule rule;
  int64_t limit_tokens;      /* max_tokens, or what can be counted */
  nyb_cache_storage storage; /* the body; CUDA: in device memory */
  nyb_cache_storage first, last;
  nyb_cache_pool pool;
  int64_t reallocations, copied_bytes;
  struct nyb_cuda_cache *cuda; /* NULL on the CPU */
  nyb_cache_counts counts;
  int32_t *lengths; /* counts.lengths: [batch], as the host counts */
};

/* ---- Kinds (cache_kinds.c, over cuda/device/cache_kinds.cuh) -------------------------------- */

nyb_cache_sequence nyb_cache_get_sequence(const nyb_cache *cache, int64_t sequence);
void nyb_cache_set_sequence(nyb_cache *cache, int64_t sequence, const nyb_cache_sequence *state);

/* Where token `token`, less than state->held, stands, and how many of the tokens from there on
 * stand behind it. body_tokens is the capacity of the body. */
nyb_cache_place nyb_cache_place_of(const nyb_cache *cache, int64_t body_tokens,
                                   const nyb_cache_sequence *state, int64_t sequence,
                                   int64_t token);
/* Leading slots of a sequence's block among which all of its rows in the region are. */
int64_t nyb_cache_slots(const nyb_cache *cache, nyb_cache_region region,
                        const nyb_cache_sequence *state);

/* What an append of so many tokens leaves. */
nyb_cache_sequence nyb_cache_after_append(const nyb_cache *cache, int64_t body_tokens,
                                          const nyb_cache_sequence *before, int64_t tokens);
/* What a trim leaves; false where tokens would be needed that were dropped. */
bool nyb_cache_after_trim(const nyb_cache *cache, const nyb_cache_sequence *before, int64_t tokens,
                          nyb_cache_sequence *after);
/* The capacity of the body that a sequence needs. */
int64_t nyb_cache_body_tokens(const nyb_cache *cache, const nyb_cache_sequence *state);

/* ---- Memory (cache_storage.c) --------------------------------------------------------------- */

/* Sizes of `blocks` blocks, no memory yet; NYB_ERROR_SHAPE where they leave int64. */
nyb_status nyb_cache_size_storage(const nyb_cache *cache, nyb_cache_region region, int64_t blocks,
                                  int64_t capacity_tokens, nyb_cache_storage *storage);
/* The capacity of the body in which so many tokens of each sequence have room, if they come one by
 * one. */
int64_t nyb_cache_body_capacity(const nyb_cache *cache, int64_t tokens);
/* Sets storage->array from storage->block. */
void nyb_cache_place_arrays(const nyb_cache *cache, nyb_cache_storage *storage);
/* Memory of the context's allocator for `blocks` blocks of `capacity_tokens` tokens. */
nyb_status nyb_cache_make_storage(const nyb_cache *cache, nyb_cache_region region, int64_t blocks,
                                  int64_t capacity_tokens, nyb_cache_storage *storage);
void nyb_cache_release_storage(const nyb_cache *cache, nyb_cache_storage *storage);
/* The capacity that a cache grows to on its own. */
int64_t nyb_cache_grown_capacity(const nyb_cache *cache, int64_t needed_tokens);
/* A larger body that holds the tokens of the cache's own, which stays as it is; a ring in it begins
 * at offset 0. */
nyb_status nyb_cache_make_larger(const nyb_cache *cache, int64_t capacity_tokens,
                                 nyb_cache_storage *storage);
/* Takes it in place of the cache's own. */
void nyb_cache_adopt_larger(nyb_cache *cache, const nyb_cache_storage *storage);

nyb_status nyb_cache_make_counts(const nyb_cache *cache, int64_t batch, nyb_cache_counts *counts);
/* Takes them in place of the cache's own, which are released. */
void nyb_cache_adopt_counts(nyb_cache *cache, const nyb_cache_counts *counts);

/* Tokens of the longest sequence, as lengths count them. */
int64_t nyb_cache_longest(const nyb_cache *cache);
/* Bytes of the tokens that are there. */
int64_t nyb_cache_used_bytes(const nyb_cache *cache);

nyb_cache_storage *nyb_cache_storage_of(nyb_cache *cache, nyb_cache_region region);
const nyb_cache_storage *nyb_cache_const_storage_of(const nyb_cache *cache,
                                                    nyb_cache_region region);
/* The formats of a region's rows, K's and V's. */
const nyb_cache_part *nyb_cache_parts_of(const nyb_cache *cache, nyb_cache_region region);
/* Keys or values as rows, [blocks, kv_heads, capacity_tokens]; storage is of the body, or of one
 * that will be. */
nyb_stored nyb_cache_stored(const nyb_cache *cache, const nyb_cache_storage *storage, int part);
nyb_stored nyb_cache_stored_in(const nyb_cache *cache, nyb_cache_region region, int part);

/* ---- Append (cache_append.c) ---------------------------------------------------------------- */

/* The append has been checked and has at least one token. On the CPU. */
nyb_status nyb_cache_append_here(nyb_cache *cache, const nyb_append *append);
/* The capacity of the body that the append needs, as the host counts. */
int64_t nyb_cache_needed_tokens(const nyb_cache *cache, const nyb_append *append);
/* Moves the sequences' numbers along, as the host counts them. */
void nyb_cache_advance(nyb_cache *cache, const nyb_append *append);
/* Tokens that a sequence gets. */
static inline int64_t nyb_appended_tokens(const nyb_append *append, int64_t sequence) {
  return append->tokens - (append->padding == NULL ? 0 : append->padding[sequence]);
}

/* ---- Pages (cache_pages.c) ------------------------------------------------------------------ */

static inline int64_t nyb_pages_for(const nyb_cache *cache, int64_t tokens) {
  const int64_t page_tokens = cache->options.page_tokens;
  return tokens / page_tokens + (tokens % page_tokens != 0);
}

/* Pages and a table with room for `tokens` tokens of each sequence. */
nyb_status nyb_cache_reserve_pages(nyb_cache *cache, int64_t tokens);
/* Gives every sequence the pages that the append writes to, none of them shared. Undone, where the
 * append fails, by dropping them. */
nyb_status nyb_cache_begin_pages(nyb_cache *cache, const nyb_append *append);
void nyb_cache_undo_pages(nyb_cache *cache, const nyb_append *append);
/* Gives back the pages of a sequence behind so many tokens, of `held`. */
void nyb_cache_drop_pages(nyb_cache *cache, int64_t sequence, int64_t held, int64_t kept);
/* Pages of a sequence's table. */
int64_t nyb_cache_pages_of(const nyb_cache *cache, int64_t sequence);
/* Pages of a pool that grows on its own by at least so many. */
int64_t nyb_cache_grown_pages(const nyb_cache *cache, int64_t missing);
/* The stride of a table that has room for so many pages of each sequence. */
int64_t nyb_cache_grown_stride(const nyb_cache *cache, int64_t pages);
/* References and unused pages of a larger pool, the new pages being unused. */
nyb_status nyb_cache_make_lists(const nyb_cache *cache, int64_t pages, nyb_cache_pool *pool);
int32_t nyb_cache_take_page(nyb_cache *cache);
void nyb_cache_give_page(nyb_cache *cache, int32_t page);
/* Memory for a table of `batch` sequences. */
nyb_status nyb_cache_make_table(const nyb_cache *cache, int64_t batch, int64_t stride,
                                int32_t **table);
void nyb_cache_release_pool(nyb_cache *cache);

/* ---- Reorder (cache_reorder.c) -------------------------------------------------------------- */

nyb_status nyb_cache_reorder_here(nyb_cache *cache, const int64_t *sources, int64_t count);
nyb_status nyb_cache_check_sources(const nyb_cache *cache, const int64_t *sources, int64_t count);
/* The numbers of the sequences that there will be. */
nyb_status nyb_cache_reordered_counts(const nyb_cache *cache, const int64_t *sources, int64_t count,
                                      nyb_cache_counts *counts);
/* A table of them in place of the old one. */
nyb_status nyb_cache_share_pages(nyb_cache *cache, const int64_t *sources, int64_t count);

/* A copy from block to block, or by way of the buffer. */
typedef struct nyb_cache_move {
  int64_t to, from;
  int64_t sequence; /* whose rows they are, as the cache counts sequences before */
} nyb_cache_move;
enum { NYB_MOVE_BUFFER = -1 };

typedef struct nyb_cache_moves {
  void *memory;          /* of the context's allocator */
  nyb_cache_move *moves; /* in the order in which they are to be made */
  int64_t count;
} nyb_cache_moves;

/* At most twice as many moves as sequences. */
nyb_status nyb_cache_list_moves(const nyb_cache *cache, const int64_t *sources, int64_t count,
                                nyb_cache_moves *list);

/* ---- What saving and loading need (cache_contents.c) ---------------------------------------- */

/* Held tokens that stand one after another, in temporal order: of K or V of one sequence and head,
 * from token `token` on, at most `most_tokens` and at least one. The arrays are where the rows are,
 * row_bytes of them apart; a caller that made the cache may write there. */
typedef struct nyb_cache_rows {
  int64_t tokens;
  nyb_cache_region region;
  const nyb_cache_part *part; /* the format of these rows */
  char *array[NYB_CACHE_ARRAYS];
} nyb_cache_rows;

nyb_cache_rows nyb_cache_rows_at(const nyb_cache *cache, int part, int64_t sequence, int64_t head,
                                 int64_t token, int64_t most_tokens);

/* A cache of that context, which is one of the CPU, with the options of `cache` and `batch`
 * sequences that hold what `states` says (offset is not looked at), whose rows are still to be
 * written. NYB_ERROR_LENGTH for a state that the kind does not have. */
nyb_status nyb_cache_make_like(nyb_context *context, const nyb_cache *cache, int64_t batch,
                               const nyb_cache_sequence *states, nyb_cache **made);
/* A context of the CPU with the same allocator, for what a cache on CUDA holds. */
nyb_status nyb_cache_make_host_context(const nyb_context *context, nyb_context **host);
/* Whether a ring that tokens have left can hold so many: those that the next row sees, or, of files
 * of others, its first ones and some more. */
static inline bool nyb_cache_ring_may_hold(const nyb_cache_options *options, int64_t held) {
  return held > options->window_keep_tokens || held >= options->window_tokens - 1;
}
/* Both hold what the other held. Made by nyb_cache_make_like(), one from the other. */
void nyb_cache_exchange(nyb_cache *a, nyb_cache *b);

#endif
