/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache in device memory, as its files see it.
 *
 *   cache.c           memory, create and destroy, trim, refresh, views
 *   cache_growth.c    more room for rows that follow each other, and for rings
 *   cache_append.c    appending
 *   cache_pages.c     pages of a paged cache
 *   cache_reorder.c   sequences that move, double and go
 *   cache_contents.c  to the host and back, for files
 *
 * The device has the true numbers: an append takes each sequence's from there and moves them along,
 * in stream order, so that a captured graph appends further at every replay. The host counts calls,
 * by the same arithmetic, which is what it grows by and takes pages by; once a call was captured,
 * both may part, and nyb_cache_refresh() brings them together. What the host decides on (pages, new
 * places) reaches the device by cache_patch, in stream order as well. */
#ifndef NYB_CUDA_CACHE_H
#define NYB_CUDA_CACHE_H

#include "device/cache_append.cuh"
#include "operations.h"
#include "programs.h"
#include "rows.h"

typedef struct nyb_cuda_cache {
  nyb_cuda_home home;
  const nyb_cuda_kernel *append, *trim;

  /* On the device, one allocation, each [sequences], at least the batch. */
  void *numbers;
  int64_t sequences;
  nyb_device_sequences state;
  uint32_t *arrivals; /* what append counts its blocks with; 0 between them */
  int32_t *padding;
  int32_t *own_begins, *own_ends; /* as in nyb_device_places */
  nyb_reorder_move *moves;        /* [2 * sequences] */

  /* Paged. The host's twins say what has been sent to the device. */
  int32_t *table; /* [table_words], on the device: rows of pool.table_stride */
  int64_t table_words;
  int32_t *sent_table;          /* -1: nothing yet */
  bool all_unsent;              /* all tables and bounds are to be sent again */
  int32_t *own_begin, *own_end; /* what the host has decided on */
  int32_t *sent_begins, *sent_ends;
  int64_t reserved_pages; /* of each sequence's table, that a trim leaves there */

  bool captured; /* a call was: the host's counts may be behind until a refresh, and pages stay */
  void *host;    /* what holds the arrays of the host but sent_table */
  int32_t *staging;
} nyb_cuda_cache;

static inline nyb_cu_address nyb_cuda_address_of(const void *memory) {
  return (nyb_cu_address)(uintptr_t)memory;
}

/* ---- Memory (cache.c) ----------------------------------------------------------------------- */

/* Makes the CUDA context current in which the cache was made. */
nyb_status nyb_cuda_cache_enter(const nyb_cache *cache, nyb_cuda_scope *scope);

/* `what` names the call in a sentence. Within nyb_cuda_relax(). */
nyb_status nyb_cuda_cache_allocate(const nyb_cuda_scope *scope, int64_t bytes, const char *what,
                                   void **memory);
/* scope: NULL where the CUDA context is gone, and with it all that it allocated itself. */
void nyb_cuda_cache_release(const nyb_context *context, const nyb_cuda_scope *scope, void *memory);
nyb_status nyb_cuda_cache_make_storage(const nyb_cuda_scope *scope, const nyb_cache *cache,
                                       nyb_cache_region region, int64_t blocks,
                                       int64_t capacity_tokens, nyb_cache_storage *storage);
nyb_status nyb_cuda_cache_wait(const nyb_cuda_scope *scope, nyb_stream stream);

/* What allocates or waits declares that it knows of captures elsewhere: it touches no stream that
 * is being captured. Gives back the mode that was. */
int nyb_cuda_relax(const nyb_cuda_scope *scope);
void nyb_cuda_restore_mode(const nyb_cuda_scope *scope, int mode);

/* Whether the stream is being captured, which the cache keeps in mind. */
nyb_status nyb_cuda_cache_note_capture(const nyb_cuda_scope *scope, nyb_cache *cache,
                                       nyb_stream stream, bool *capturing);
/* NYB_ERROR_UNSUPPORTED where it is; what: "the cache would have to ...". */
nyb_status nyb_cuda_cache_refuse_capture(const nyb_cuda_scope *scope, nyb_stream stream,
                                         const char *what);

/* Numbers of `sequences` sequences in place of the cache's own, all 0 but for what the host's
 * counts say, which are sent; waits for the stream where there were any. */
nyb_status nyb_cuda_cache_make_numbers(nyb_cuda_scope *scope, nyb_cache *cache, int64_t sequences);
/* Sends what the host counts. */
nyb_status nyb_cuda_cache_send_numbers(nyb_cuda_scope *scope, const nyb_cache *cache,
                                       nyb_stream stream);
/* Takes the device's counts; the stream is not being captured. */
nyb_status nyb_cuda_cache_fetch_counts(const nyb_cuda_scope *scope, nyb_cache *cache,
                                       nyb_stream stream);
/* The same where the host's may be behind. */
nyb_status nyb_cuda_cache_settle_counts(const nyb_cuda_scope *scope, nyb_cache *cache,
                                        nyb_stream stream);

/* ---- Patches (cache.c) ---------------------------------------------------------------------- */

/* Numbers on their way to one array of the device. Errors are kept until the end. */
typedef struct nyb_cuda_patches {
  nyb_cuda_scope *scope;
  nyb_stream stream;
  nyb_status status;
  nyb_device_patch call;
} nyb_cuda_patches;

void nyb_cuda_patches_begin(nyb_cuda_patches *patches, nyb_cuda_scope *scope, void *words,
                            nyb_stream stream);
/* place: within `words`. */
void nyb_cuda_patches_add(nyb_cuda_patches *patches, const void *place, int32_t value);
nyb_status nyb_cuda_patches_end(nyb_cuda_patches *patches);

/* ---- Kernels' parameters (cache.c) ---------------------------------------------------------- */

nyb_device_places nyb_cuda_cache_places(const nyb_cache *cache);
nyb_status nyb_cuda_cache_kernel(nyb_cuda_scope *scope, const nyb_cuda_program *program,
                                 int32_t threads, const nyb_cuda_kernel **kernel);

/* ---- Copies (cache_growth.c) ---------------------------------------------------------------- */

/* Rows of one region on their way from one storage to another, or within one. Errors are kept. */
typedef struct nyb_cuda_copies {
  nyb_cuda_scope *scope;
  nyb_stream stream;
  nyb_status status;
  int64_t bytes;
  nyb_device_copy call;
} nyb_cuda_copies;

void nyb_cuda_copies_begin(nyb_cuda_copies *copies, nyb_cuda_scope *scope, const nyb_cache *cache,
                           nyb_cache_region region, const nyb_cache_storage *from,
                           const nyb_cache_storage *to, nyb_stream stream);
void nyb_cuda_copies_add(nyb_cuda_copies *copies, const nyb_copy_move *move);
nyb_status nyb_cuda_copies_end(nyb_cuda_copies *copies);

/* ---- Growing (cache_growth.c) --------------------------------------------------------------- */

/* A larger storage into which the tokens are on their way; the cache's own stays as it is. Undone
 * by drop or made the cache's by adopt, which both wait for the stream. */
typedef struct nyb_cuda_growth {
  nyb_cache_storage storage;
  int64_t copied_bytes;
} nyb_cuda_growth;

nyb_status nyb_cuda_growth_begin(nyb_cuda_scope *scope, nyb_cache *cache, int64_t tokens,
                                 nyb_cuda_growth *grown, nyb_stream stream);
void nyb_cuda_growth_drop(const nyb_cuda_scope *scope, const nyb_cache *cache,
                          nyb_cuda_growth *grown, nyb_stream stream);
nyb_status nyb_cuda_growth_adopt(nyb_cuda_scope *scope, nyb_cache *cache, nyb_cuda_growth *grown,
                                 nyb_stream stream);

/* ---- Pages (cache_pages.c) ------------------------------------------------------------------ */

/* Gives every sequence pages of its own from its end on: for what the append adds, or, where it is
 * NULL, for `tokens` tokens in all. What was done before a failure stays, and harms nobody. */
nyb_status nyb_cuda_cache_own_pages(nyb_cuda_scope *scope, nyb_cache *cache,
                                    const nyb_append *append, int64_t tokens, bool capturing,
                                    nyb_stream stream);
/* Gives back what a sequence will not need behind `kept` tokens. */
void nyb_cuda_cache_drop_pages(nyb_cache *cache, int64_t sequence, int64_t kept);
/* Finds the bounds of pages of their own, once sequences share others. */
void nyb_cuda_cache_find_bounds(nyb_cache *cache);
/* The same as nyb_cache_reserve does; not within a capture where anything is to be done. */
nyb_status nyb_cuda_cache_reserve_in(nyb_cuda_scope *scope, nyb_cache *cache, int64_t tokens,
                                     nyb_stream stream);
/* Sends the tables and bounds of sequences [first, end) where they are others than were sent. */
nyb_status nyb_cuda_cache_send_tables(nyb_cuda_scope *scope, nyb_cache *cache, int64_t first,
                                      int64_t end, nyb_stream stream);
nyb_status nyb_cuda_cache_make_table(nyb_cuda_scope *scope, nyb_cache *cache, int64_t words,
                                     nyb_stream stream);

#endif
