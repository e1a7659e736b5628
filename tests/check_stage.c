/* SPDX-License-Identifier: Apache-2.0 */
#include "check_stage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The device's side of a call --------------------------------------------------------------
 */

/* Host memory and its twin: in the arena, at the same offset on both sides; SEPARATE: `own`. */
typedef struct piece {
  uint8_t *host;
  int64_t bytes;
  int64_t offset;
  uint8_t *own;
} piece;

enum { MAX_PIECES = 32 };

static struct {
  device_stream stream;
  stage_placement placement;
  uint8_t *arena;  /* device memory */
  uint8_t *mirror; /* host memory: the arena's content on its way */
  int64_t arena_bytes;
  piece pieces[MAX_PIECES];
  int piece_count;
  int64_t used_bytes;
  uint8_t *workspace;                 /* SEPARATE */
  uint8_t *host_guard, *device_guard; /* behind the workspace */
} stage;

static char error[512];

const char *check_error(void) { return error[0] != '\0' ? error : nyb_last_error(); }

static bool device_failed(void) {
  snprintf(error, sizeof error, "%s", device_error());
  return false;
}

device_stream check_stage_stream(void) { return stage.stream; }

bool check_stage_open(int ordinal) {
  stage.placement = STAGE_AS_ON_HOST;
  return (device_open(ordinal) && device_stream_create(&stage.stream)) || device_failed();
}

static void release_separate(void) {
  for (int i = 0; i < stage.piece_count; i++) device_free(stage.pieces[i].own);
  device_free(stage.workspace);
  stage.workspace = NULL;
  stage.piece_count = 0;
}

void check_stage_close(void) {
  release_separate();
  device_free(stage.arena);
  device_free_host(stage.mirror);
  device_stream_destroy(stage.stream);
  memset(&stage, 0, sizeof stage);
}

void check_stage_place(stage_placement placement) {
  if (stage.placement != STAGE_SEPARATE) stage.placement = placement;
}

static void begin(void) {
  release_separate();
  error[0] = '\0';
  stage.used_bytes = 0;
  stage.host_guard = stage.device_guard = NULL;
}

/* ---- Pieces -----------------------------------------------------------------------------------
 */

static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/* Registers the buffer around address; other memory is `bytes` long. */
static void add_piece(const void *address, int64_t bytes) {
  uint8_t *host = (uint8_t *)(uintptr_t)address;
  size_t buffer_bytes;
  int64_t before = 0; /* guard band before the data */
  if (address == NULL) return;
  for (int i = 0; i < stage.piece_count; i++) {
    const piece *p = &stage.pieces[i];
    if (host >= p->host && host < p->host + p->bytes) return;
  }
  const check_buffer *buffer = check_buffer_around(address);
  if (buffer != NULL) {
    const bool separate = stage.placement == STAGE_SEPARATE;
    host = separate ? buffer->data : buffer->memory;
    buffer_bytes = separate ? buffer->data_bytes : buffer->memory_bytes;
    bytes = (int64_t)buffer_bytes;
    if (!separate) before = (const uint8_t *)buffer->data - buffer->memory;
  }
  if (stage.piece_count == MAX_PIECES) abort(); /* a descriptor has fewer pointers */
  piece *p = &stage.pieces[stage.piece_count++];
  *p = (piece){.host = host, .bytes = bytes};
  const int64_t shift = stage.placement == STAGE_ALIGNED ? round_up(before) - before
                                                         : (int64_t)((uintptr_t)host % 256);
  p->offset = stage.used_bytes + shift;
  stage.used_bytes = round_up(p->offset + bytes);
}

static void add_stored(const nyb_stored *stored) {
  add_piece(stored->codes, 0);
  add_piece(stored->scales, 0);
  add_piece(stored->biases, 0);
}

static uint8_t *device_side(const piece *p) {
  return p->own != NULL ? p->own : stage.arena + p->offset;
}

static void *translate(const void *address) {
  const uint8_t *host = address;
  for (int i = 0; i < stage.piece_count; i++) {
    const piece *p = &stage.pieces[i];
    if (host != NULL && host >= p->host && host <= p->host + p->bytes) {
      return device_side(p) + (host - p->host);
    }
  }
  return NULL;
}

static nyb_stored translate_stored(nyb_stored stored) {
  stored.codes = translate(stored.codes);
  stored.scales = translate(stored.scales);
  stored.biases = translate(stored.biases);
  return stored;
}

/* ---- There and back -----------------------------------------------------------------------------
 */

static bool reserve(int64_t bytes) {
  if (bytes <= stage.arena_bytes) return true;
  device_free(stage.arena);
  device_free_host(stage.mirror);
  stage.arena_bytes = 0;
  const int64_t reserved = bytes + bytes / 2 + (16 << 20);
  stage.arena = device_allocate(reserved);
  stage.mirror = device_allocate_host(reserved);
  if (stage.arena == NULL || stage.mirror == NULL) return device_failed();
  stage.arena_bytes = reserved;
  return true;
}

static bool upload_separate(void) {
  for (int i = 0; i < stage.piece_count; i++) {
    piece *p = &stage.pieces[i];
    p->own = device_allocate(p->bytes);
    if (p->own == NULL || !device_upload(p->own, p->host, p->bytes, stage.stream)) {
      return device_failed();
    }
  }
  return true;
}

static bool upload(void) {
  if (stage.placement == STAGE_SEPARATE) return upload_separate();
  if (!reserve(stage.used_bytes)) return false;
  for (int i = 0; i < stage.piece_count; i++) {
    const piece *p = &stage.pieces[i];
    memcpy(stage.mirror + p->offset, p->host, (size_t)p->bytes);
  }
  return device_upload(stage.arena, stage.mirror, stage.used_bytes, stage.stream) ||
         device_failed();
}

static bool download_separate(void) {
  for (int i = 0; i < stage.piece_count; i++) {
    const piece *p = &stage.pieces[i];
    if (!device_download(p->host, p->own, p->bytes, stage.stream)) return device_failed();
  }
  return device_synchronize(stage.stream) || device_failed();
}

static bool download(void) {
  if (stage.placement == STAGE_SEPARATE) return download_separate();
  if (!device_download(stage.mirror, stage.arena, stage.used_bytes, stage.stream) ||
      !device_synchronize(stage.stream)) {
    return device_failed();
  }
  for (int i = 0; i < stage.piece_count; i++) {
    const piece *p = &stage.pieces[i];
    memcpy(p->host, stage.mirror + p->offset, (size_t)p->bytes);
  }
  if (stage.host_guard != NULL) {
    memcpy(stage.host_guard, stage.mirror + (stage.device_guard - stage.arena),
           CHECK_WORKSPACE_GUARD_BYTES);
  }
  return true;
}

/* The tests of these functions bring a context of the CPU and a driver whose memory is the host's.
 */
static device_stream stream_for(const nyb_context *context) {
  return nyb_context_backend(context) == NYB_BACKEND_CUDA ? stage.stream : NULL;
}

/* The call's own status comes first; a fault on the device shows when it is waited for. */
static nyb_status finish(nyb_status status) {
  if (!download() && status == NYB_OK) return NYB_ERROR_DEVICE;
  return status;
}

/* ---- Plans --------------------------------------------------------------------------------------
 */

/* No address of any process: whatever looks through it fails. */
static const void *pretended(const void *address, uintptr_t place) {
  const check_buffer *buffer = address != NULL ? check_buffer_around(address) : NULL;
  if (buffer == NULL || stage.placement == STAGE_AS_ON_HOST) return address;
  const uintptr_t within = (uintptr_t)address - (uintptr_t)buffer->data;
  return (const void *)((place << 48) + within);  // NOLINT(performance-no-int-to-ptr)
}

void check_stage_pretend(nyb_attention *call) {
  call->q.data = pretended(call->q.data, 1);
  call->k.codes = pretended(call->k.codes, 2);
  call->k.scales = pretended(call->k.scales, 3);
  call->k.biases = pretended(call->k.biases, 4);
  call->v.codes = pretended(call->v.codes, 5);
  call->v.scales = pretended(call->v.scales, 6);
  call->v.biases = pretended(call->v.biases, 7);
  call->out.data = (void *)(uintptr_t)pretended(call->out.data, 8);
  call->lse.data = (void *)(uintptr_t)pretended(call->lse.data, 9);
}

/* ---- Calls --------------------------------------------------------------------------------------
 */

static nyb_status quantize(nyb_context *context, const nyb_quantize *host, nyb_stream stream) {
  (void)stream;
  nyb_quantize call = *host;
  begin();
  add_piece(call.input.data, 0);
  add_piece(call.output.codes, 0);
  add_piece(call.output.scales, 0);
  add_piece(call.output.biases, 0);
  add_piece(call.non_finite, sizeof *call.non_finite);
  if (!upload()) return NYB_ERROR_DEVICE;
  call.input.data = translate(call.input.data);
  call.output.codes = translate(call.output.codes);
  call.output.scales = translate(call.output.scales);
  call.output.biases = translate(call.output.biases);
  call.non_finite = translate(call.non_finite);
  return finish(nyb_quantize_run(context, &call, stream_for(context)));
}

static nyb_status dequantize(nyb_context *context, const nyb_dequantize *host, nyb_stream stream) {
  (void)stream;
  nyb_dequantize call = *host;
  begin();
  add_stored(&call.input);
  add_piece(call.output.data, 0);
  if (!upload()) return NYB_ERROR_DEVICE;
  call.input = translate_stored(call.input);
  call.output.data = translate(call.output.data);
  return finish(nyb_dequantize_run(context, &call, stream_for(context)));
}

static nyb_status geglu(nyb_context *context, const nyb_geglu *host, nyb_stream stream) {
  (void)stream;
  nyb_geglu call = *host;
  begin();
  add_piece(call.gate, 0);
  add_piece(call.up, 0);
  add_piece(call.out, 0);
  if (!upload()) return NYB_ERROR_DEVICE;
  call.gate = translate(call.gate);
  call.up = translate(call.up);
  call.out = translate(call.out);
  return finish(nyb_geglu_run(context, &call, stream_for(context)));
}

/* The workspace gets its poison and its guard on the device: what the host's holds is not needed
 * there. */
static bool place_workspace(void *workspace, size_t bytes, staged_attention *staged) {
  staged->workspace_bytes = bytes;
  if (stage.placement == STAGE_SEPARATE) {
    stage.workspace = bytes > 0 ? device_allocate((int64_t)bytes) : NULL;
    staged->workspace = stage.workspace;
    return bytes == 0 || stage.workspace != NULL || device_failed();
  }
  const int64_t offset = stage.used_bytes;
  stage.used_bytes = round_up(offset + (int64_t)bytes + CHECK_WORKSPACE_GUARD_BYTES);
  if (!reserve(stage.used_bytes)) return false;
  memset(stage.mirror + offset, 0xff, bytes);
  memset(stage.mirror + offset + bytes, CHECK_WORKSPACE_GUARD, CHECK_WORKSPACE_GUARD_BYTES);
  staged->workspace = stage.arena + offset;
  if (workspace != NULL) {
    stage.host_guard = (uint8_t *)workspace + bytes;
    stage.device_guard = stage.arena + offset + bytes;
  }
  return true;
}

/* What a call has beside a rectangle. */
static void add_features(const nyb_attention *call) {
  const int64_t batch_bytes = call->batch * (int64_t)sizeof(int32_t);
  add_piece(call->starts, batch_bytes);
  add_piece(call->mask_array.data, 0);
  add_piece(call->sinks, 0);
  add_piece(call->alibi_slopes, 0);
  add_piece(call->pages.table, call->batch * call->pages.table_stride * (int64_t)sizeof(int32_t));
  add_piece(call->ring.offsets, batch_bytes);
  add_piece(call->last_begins, batch_bytes);
  add_stored(&call->first.k);
  add_stored(&call->first.v);
  add_stored(&call->last.k);
  add_stored(&call->last.v);
}

static void translate_features(nyb_attention *call) {
  call->starts = translate(call->starts);
  call->mask_array.data = translate(call->mask_array.data);
  call->sinks = translate(call->sinks);
  call->alibi_slopes = translate(call->alibi_slopes);
  call->pages.table = translate(call->pages.table);
  call->ring.offsets = translate(call->ring.offsets);
  call->last_begins = translate(call->last_begins);
  call->first.k = translate_stored(call->first.k);
  call->first.v = translate_stored(call->first.v);
  call->last.k = translate_stored(call->last.k);
  call->last.v = translate_stored(call->last.v);
}

bool check_stage_attention(const nyb_attention *host, void *workspace, size_t workspace_bytes,
                           staged_attention *staged) {
  begin();
  *staged = (staged_attention){.call = *host};
  nyb_attention *call = &staged->call;
  add_piece(call->q.data, 0);
  add_piece(call->lengths, call->batch * (int64_t)sizeof *call->lengths);
  add_stored(&call->k);
  add_stored(&call->v);
  add_piece(call->out.data, 0);
  add_piece(call->lse.data, 0);
  add_features(call);
  if (!place_workspace(workspace, workspace_bytes, staged) || !upload()) return false;
  call->q.data = translate(call->q.data);
  call->lengths = staged->lengths = translate(call->lengths);
  call->k = translate_stored(call->k);
  call->v = translate_stored(call->v);
  call->out.data = translate(call->out.data);
  call->lse.data = translate(call->lse.data);
  translate_features(call);
  return true;
}

bool check_stage_take_back(void) { return download(); }

static nyb_status attention(nyb_context *context, const nyb_attention *host, void *workspace,
                            size_t workspace_bytes, nyb_stream stream) {
  (void)stream;
  staged_attention staged;
  if (!check_stage_attention(host, workspace, workspace_bytes, &staged)) return NYB_ERROR_DEVICE;
  return finish(nyb_attention_run(context, &staged.call, staged.workspace, workspace_bytes,
                                  stream_for(context)));
}

/* The views stay on the host. */
static nyb_status merge(nyb_context *context, const nyb_attention_merge *host, nyb_stream stream) {
  enum { MOST_PARTS = 128 };
  nyb_input outs[MOST_PARTS], lses[MOST_PARTS];
  (void)stream;
  nyb_attention_merge call = *host;
  if (call.parts > MOST_PARTS) abort(); /* the checks have fewer */
  begin();
  for (int64_t part = 0; part < call.parts; part++) {
    add_piece(call.outs[part].data, 0);
    add_piece(call.lses[part].data, 0);
  }
  add_piece(call.out.data, 0);
  add_piece(call.lse.data, 0);
  if (!upload()) return NYB_ERROR_DEVICE;
  for (int64_t part = 0; part < call.parts; part++) {
    outs[part] = call.outs[part];
    lses[part] = call.lses[part];
    outs[part].data = translate(outs[part].data);
    lses[part].data = translate(lses[part].data);
  }
  call.outs = outs;
  call.lses = lses;
  call.out.data = translate(call.out.data);
  call.lse.data = translate(call.lse.data);
  return finish(nyb_attention_merge_run(context, &call, stream_for(context)));
}

const check_library check_staged = {.quantize = quantize,
                                    .dequantize = dequantize,
                                    .attention = attention,
                                    .geglu = geglu,
                                    .merge = merge};
