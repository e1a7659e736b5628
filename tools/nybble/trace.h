/* SPDX-License-Identifier: Apache-2.0 */
/* A recorded trace (docs/trace-format.md) in memory. */
#ifndef NYB_TRACE_H
#define NYB_TRACE_H

#include "nybble.h"

typedef struct nyb_trace_layer {
  int64_t index; /* in the model that was recorded */
  int64_t query_heads, kv_heads, key_dim, value_dim;
  int64_t window_tokens;     /* 0: none */
  double softcap;            /* 0: none */
  void *query, *key, *value; /* [heads, tokens, dim] each, in the trace's dtype */
} nyb_trace_layer;

typedef struct nyb_trace {
  char *path, *model, *text;
  nyb_dtype dtype;
  int64_t tokens, prompt_tokens;
  double scale;
  int64_t layer_count;
  nyb_trace_layer *layers; /* by ascending index */
} nyb_trace;

/* Reads and checks a trace. Returns 0, or 1 after a sentence on stderr; then *trace is empty. */
int nyb_trace_read(nyb_context *context, const char *path, nyb_trace *trace);
void nyb_trace_release(nyb_trace *trace);

/* A view of tokens [first, first + ...) of one part of a layer, heads first. */
nyb_input nyb_trace_view(const nyb_trace *trace, const void *part, int64_t dim, int64_t first);

#endif
