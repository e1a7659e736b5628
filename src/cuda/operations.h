/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA backend implements of each operation. The operation's own file (src/attention.c,
 * src/quantize.c, src/geglu.c, src/cache.c) has checked the descriptor as for the CPU (shapes,
 * formats, strides, alignment, overlaps), except for what lies in device memory: nobody has looked
 * through a pointer. Every function enters a CUDA context itself (nyb_cuda_enter), checks pointers
 * with nyb_cuda_check_pointer, and leaves outputs untouched where it fails. */
#ifndef NYB_CUDA_OPERATIONS_H
#define NYB_CUDA_OPERATIONS_H

#include "../attention.h"
#include "../cache.h"
#include "../format.h"
#include "device.h"

/* ---- Attention ------------------------------------------------------------------------------ */

/* Fills path, workspace_bytes (a multiple of NYB_WORKSPACE_ALIGNMENT), key_kernel, value_kernel and
 * reason. asked: attention.path, or what NYBBLE_PATH said in its place, or AUTO; an explicit FUSED
 * that is not supported fails with NYB_ERROR_UNSUPPORTED. Called before every run too: cheap, and
 * no work on the device. */
nyb_status nyb_cuda_attention_plan(const nyb_attention_call *call, nyb_path asked, nyb_plan *plan);

/* Runs what that plan says; the workspace has been checked against it. Counts its kernels
 * (nyb_count_kernel: ATTENTION_DECODE, _PREFILL or _GENERAL, once for each format of K and V; none
 * on the COMPAT path); the caller counts the path. */
nyb_status nyb_cuda_attention_run(const nyb_attention_call *call, const nyb_plan *plan,
                                  void *workspace, nyb_stream stream);

/* All but what lies behind the parts' pointers has been checked, and there is at least one row. The
 * caller counts. */
nyb_status nyb_cuda_attention_merge_run(nyb_context *context, const nyb_attention_merge *merge,
                                        nyb_stream stream);

/* ---- Quantize, dequantize, GeGLU ------------------------------------------------------------ */

/* There is at least one row. The caller counts call and kernel. */
nyb_status nyb_cuda_quantize_run(nyb_context *context, const nyb_quantize *quantize,
                                 const nyb_row_layout *layout, nyb_stream stream);
nyb_status nyb_cuda_dequantize_run(nyb_context *context, const nyb_dequantize *dequantize,
                                   const nyb_row_layout *layout, nyb_stream stream);

/* rows and columns are at least 1; rows that follow each other without a gap in all three are one
 * row already. path is FUSED or COMPAT. */
nyb_status nyb_cuda_geglu_run(nyb_context *context, const nyb_geglu *geglu, nyb_path path,
                              nyb_stream stream);

/* ---- KV cache ------------------------------------------------------------------------------- */

/* Memory for the cache's options, whose counts are all 0: storages, pages, and cache->cuda. */
nyb_status nyb_cuda_cache_create(nyb_cache *cache);
/* Gives all of it back, in a CUDA context that may be gone. */
void nyb_cuda_cache_destroy(nyb_cache *cache);

/* What nyb_cache_view() gives. */
nyb_cache_addresses nyb_cuda_cache_addresses(const nyb_cache *cache);

/* append->tokens is at least 1, and fits as the host counts; append->padding is the host's. Grows
 * by nyb_cache_grown_capacity(). On success the host's counts have been moved along too. */
nyb_status nyb_cuda_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream);
/* tokens is more than the capacity, and allowed. */
nyb_status nyb_cuda_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream);
nyb_status nyb_cuda_cache_reserve_pages(nyb_cache *cache, int64_t tokens, nyb_stream stream);
/* Sequences [first, end); tokens may exceed a length. The caller moves the host's counts. */
nyb_status nyb_cuda_cache_trim(nyb_cache *cache, int64_t first, int64_t end, int64_t tokens,
                               nyb_stream stream);
nyb_status nyb_cuda_cache_reorder(nyb_cache *cache, const int64_t *sources, int64_t count,
                                  nyb_stream stream);
nyb_status nyb_cuda_cache_refresh(nyb_cache *cache, nyb_stream stream);

/* A cache of the host context that holds what the cache on the device does, as far as rows go: to
 * be looked at, not changed. Waits for the stream. */
nyb_status nyb_cuda_cache_fetch(nyb_context *host, nyb_cache *cache, nyb_cache **fetched,
                                nyb_stream stream);
/* A cache on the device like `like`, that holds what `host` does, whose pages it takes: `host` is
 * to be destroyed. Waits for the stream. */
nyb_status nyb_cuda_cache_send(const nyb_cache *like, nyb_cache *host, nyb_cache **sent,
                               nyb_stream stream);

/* ---- The shipped matrix --------------------------------------------------------------------- */

/* Each operation names the specialisations that its host code chooses on a device with these
 * properties, over the shapes and formats that the backend ships tuned or general kernels for, by
 * running the same choice over a list of shapes. tuned: a spill of registers fails the tests. */
typedef void (*nyb_cuda_visit)(void *data, const nyb_cuda_spec *spec, bool tuned);

void nyb_cuda_attention_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                               void *data);
void nyb_cuda_quantize_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit,
                              void *data);
void nyb_cuda_geglu_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit, void *data);
void nyb_cuda_cache_matrix(const nyb_cuda_properties *properties, nyb_cuda_visit visit, void *data);

#endif
