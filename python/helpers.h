/* SPDX-License-Identifier: Apache-2.0 */
/* What the Python package does in C so that a call costs little: descriptors are filled by one
 * call each, and a run brings its workspace along. */
#ifndef NYBBLE_PYTHON_HELPERS_H
#define NYBBLE_PYTHON_HELPERS_H

#include <math.h>
#include <nybble.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* No status of the library's: its last sentence is about something else. */
enum { NYBPY_NO_MEMORY = -1 };

/* DLPack's tensor, version 0 and 1: what a capsule points to, or has behind its own header. */
struct nybpy_dlpack {
  void *data;
  int32_t device_type, device_id;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

/* A thread's memory for run calls; it grows and is kept. */
struct nybpy_workspace {
  void *memory;
  size_t bytes;
};

/* A context must outlive its caches, and Python ends objects of one cycle in any order: whoever
 * comes last ends the context. */
struct nybpy_context {
  nyb_context *context;
  atomic_long references;
};

struct nybpy_cache {
  nyb_cache *cache;
  struct nybpy_context *owner;
};

static inline int nybpy_context_create(const nyb_context_options *options,
                                       struct nybpy_context **context) {
  struct nybpy_context *const made = malloc(sizeof *made);
  if (made == NULL) return NYBPY_NO_MEMORY;
  const nyb_status status = nyb_context_create(options, &made->context);
  atomic_init(&made->references, 1);
  if (status != NYB_OK) {
    free(made);
    return (int)status;
  }
  *context = made;
  return NYB_OK;
}

static inline void nybpy_context_release(struct nybpy_context *context) {
  if (atomic_fetch_sub(&context->references, 1) != 1) return;
  nyb_context_destroy(context->context);
  free(context);
}

static inline int nybpy_cache_create(struct nybpy_context *owner, const nyb_cache_options *options,
                                     struct nybpy_cache **cache) {
  struct nybpy_cache *const made = malloc(sizeof *made);
  if (made == NULL) return NYBPY_NO_MEMORY;
  const nyb_status status = nyb_cache_create(owner->context, options, &made->cache);
  if (status != NYB_OK) {
    free(made);
    return (int)status;
  }
  atomic_fetch_add(&owner->references, 1);
  made->owner = owner;
  *cache = made;
  return NYB_OK;
}

static inline void nybpy_cache_destroy(struct nybpy_cache *cache) {
  nyb_cache_destroy(cache->cache);
  nybpy_context_release(cache->owner);
  free(cache);
}

static inline void nybpy_set_view(void *view, uintptr_t data, int dtype, int64_t batch,
                                  int64_t head, int64_t row) {
  /* nyb_input and nyb_output differ by a const only. */
  nyb_input *const to = view;
  to->data = (const void *)data;
  to->dtype = (nyb_dtype)dtype;
  to->stride[0] = batch;
  to->stride[1] = head;
  to->stride[2] = row;
}

/* 1 / sqrt(dim) in double precision, then rounded. */
static inline float nybpy_usual_scale(int64_t dim) { return (float)(1.0 / sqrt((double)dim)); }

/* Plans and runs, with NYBPY_NO_MEMORY where memory for it is lacking. */
static inline int nybpy_attend(nyb_context *context, const nyb_attention *attention,
                               struct nybpy_workspace *workspace) {
  nyb_plan plan = NYB_PLAN_INIT;
  const nyb_status status = nyb_attention_plan(context, attention, &plan);
  if (status != NYB_OK) return status;
  if (plan.workspace_bytes > workspace->bytes) {
    /* What is there has no contents worth a copy. */
    void *const memory = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, plan.workspace_bytes);
    if (memory == NULL) return NYBPY_NO_MEMORY;
    free(workspace->memory);
    workspace->memory = memory;
    workspace->bytes = plan.workspace_bytes;
  }
  return nyb_attention_run(context, attention, workspace->memory, workspace->bytes, NULL);
}

/* cache may be NULL: then the descriptor says where the tokens are. */
static inline int nybpy_run(nyb_context *context, const nyb_cache *cache, nyb_attention *attention,
                            struct nybpy_workspace *workspace) {
  if (cache != NULL) {
    const nyb_status status = nyb_cache_view(cache, attention);
    if (status != NYB_OK) return status;
  }
  return nybpy_attend(context, attention, workspace);
}

static inline void nybpy_free(struct nybpy_workspace *workspace) {
  free(workspace->memory);
  workspace->memory = NULL;
  workspace->bytes = 0;
}

#endif
