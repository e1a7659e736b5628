/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_places.h"

/* ---- Rows --------------------------------------------------------------------------------- */

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

typedef struct row_sizes {
  int64_t codes, groups;           /* elements of a row */
  int64_t code_bytes, group_bytes; /* of an element; 0 for the groups of plain rows */
} row_sizes;

static row_sizes sizes_of(const nyb_format *format, int64_t dim) {
  if (format->scheme == NYB_PLAIN) {
    return (row_sizes){.codes = dim, .code_bytes = bytes_of(format->dtype)};
  }
  return (row_sizes){.codes = dim * format->bits / 32,
                     .groups = dim / format->group_size,
                     .code_bytes = 4,
                     .group_bytes = bytes_of(format->dtype)};
}

static int64_t offset_of(const int64_t stride[3], const int64_t at[3]) {
  return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2];
}

static void copy_elements(const void *from, const int64_t from_stride[3], const int64_t from_at[3],
                          const void *to, const int64_t to_stride[3], const int64_t to_at[3],
                          int64_t count, int64_t bytes) {
  memcpy((uint8_t *)(uintptr_t)to + offset_of(to_stride, to_at) * bytes,
         (const uint8_t *)from + offset_of(from_stride, from_at) * bytes, (size_t)(count * bytes));
}

void copy_stored_row(const nyb_stored *from, const int64_t from_at[3], const nyb_stored *to,
                     const int64_t to_at[3], int64_t dim) {
  const row_sizes sizes = sizes_of(&from->format, dim);
  copy_elements(from->codes, from->codes_stride, from_at, to->codes, to->codes_stride, to_at,
                sizes.codes, sizes.code_bytes);
  if (sizes.groups == 0) return;
  copy_elements(from->scales, from->scales_stride, from_at, to->scales, to->scales_stride, to_at,
                sizes.groups, sizes.group_bytes);
  copy_elements(from->biases, from->biases_stride, from_at, to->biases, to->biases_stride, to_at,
                sizes.groups, sizes.group_bytes);
}

/* Rows [batch, heads, rows] of which the views lie heads first or rows first, with gaps. */
static void set_strides(bool rows_first, int64_t heads, int64_t rows, int64_t row_stride,
                        int64_t stride[3]) {
  stride[0] = heads * rows * row_stride;
  stride[1] = rows_first ? row_stride : rows * row_stride;
  stride[2] = rows_first ? heads * row_stride : row_stride;
}

static bool make_rows(const nyb_format *format, int64_t dim, const int64_t shape[3],
                      bool rows_first, int64_t gap, stored_buffers *buffers, nyb_stored *stored) {
  const row_sizes sizes = sizes_of(format, dim);
  const int64_t rows = shape[0] * shape[1] * shape[2];
  const bool plain = sizes.groups == 0;
  const int64_t group_bytes = rows * (sizes.groups + gap) * sizes.group_bytes;
  if (!check_buffer_make(&buffers->codes, rows * (sizes.codes + gap) * sizes.code_bytes) ||
      !check_buffer_make(&buffers->scales, group_bytes) ||
      !check_buffer_make(&buffers->biases, group_bytes)) {
    return false;
  }
  *stored = (nyb_stored){.format = *format,
                         .codes = buffers->codes.data,
                         .scales = plain ? NULL : buffers->scales.data,
                         .biases = plain ? NULL : buffers->biases.data};
  set_strides(rows_first, shape[1], shape[2], sizes.codes + gap, stored->codes_stride);
  set_strides(rows_first, shape[1], shape[2], sizes.groups + gap, stored->scales_stride);
  set_strides(rows_first, shape[1], shape[2], sizes.groups + gap, stored->biases_stride);
  return true;
}

/* Room for K and V of [shape[0], heads, shape[1]] rows in the scene's formats. */
static bool make_part(const attention_scene *scene, int64_t entries, int64_t rows, int part,
                      placed_scene *placed, nyb_stored *k, nyb_stored *v) {
  const attention_shape *s = &scene->shape;
  const int64_t shape[3] = {entries, s->kv_heads, rows};
  return make_rows(&s->key_format, s->key_dim, shape, s->swapped && !s->packed,
                   s->packed ? 0 : s->gap, &placed->keys[part], k) &&
         make_rows(&s->value_format, s->value_dim, shape, !s->swapped && !s->packed,
                   s->packed ? 0 : 2 * s->gap, &placed->values[part], v);
}

static void copy_token(const attention_scene *scene, int64_t b, int64_t token, const nyb_stored *k,
                       const nyb_stored *v, int64_t entry, int64_t row) {
  for (int64_t head = 0; head < scene->shape.kv_heads; head++) {
    const int64_t from[3] = {b, head, token}, to[3] = {entry, head, row};
    copy_stored_row(&scene->call.k, from, k, to, scene->shape.key_dim);
    copy_stored_row(&scene->call.v, from, v, to, scene->shape.value_dim);
  }
}

/* ---- Numbers ------------------------------------------------------------------------------ */

static int32_t *make_numbers(check_buffer *buffer, int64_t count) {
  return check_buffer_make(buffer, count * (int64_t)sizeof(int32_t)) ? buffer->data : NULL;
}

void placed_free(placed_scene *placed) {
  for (int part = 0; part < 3; part++) {
    stored_buffers *both[] = {&placed->keys[part], &placed->values[part]};
    for (int i = 0; i < 2; i++) {
      check_buffer_free(&both[i]->codes);
      check_buffer_free(&both[i]->scales);
      check_buffer_free(&both[i]->biases);
    }
  }
  check_buffer_free(&placed->numbers);
  check_buffer_free(&placed->lengths);
  check_buffer_free(&placed->mask);
  *placed = (placed_scene){0};
}

/* ---- Layouts ------------------------------------------------------------------------------ */

/* The mask's array with as many columns before each sequence's own as there is padding. */
static bool move_mask(const attention_scene *scene, const int32_t *starts, placed_scene *placed) {
  const attention_shape *s = &scene->shape;
  const nyb_mask_array *from = &scene->call.mask_array;
  nyb_mask_array *to = &placed->call.mask_array;
  if (from->kind == 0) return true;
  const int64_t bytes = from->kind == NYB_MASK_ARRAY_BOOL ? 1 : bytes_of(from->dtype);
  to->tokens = placed->call.capacity_tokens;
  set_strides(false, s->query_heads, s->query_len, to->tokens, to->stride);
  if (!check_buffer_make(&placed->mask,
                         s->batch * s->query_heads * s->query_len * to->tokens * bytes)) {
    return false;
  }
  to->data = placed->mask.data;
  for (int64_t i = 0; i < s->batch * s->query_heads * s->query_len; i++) {
    const int64_t at[3] = {i / s->query_len / s->query_heads, i / s->query_len % s->query_heads,
                           i % s->query_len};
    const int64_t to_byte = (offset_of(to->stride, at) + starts[at[0]]) * bytes;
    memcpy((uint8_t *)placed->mask.data + to_byte,
           (const uint8_t *)from->data + offset_of(from->stride, at) * bytes,
           (size_t)(s->lengths[at[0]] * bytes));
  }
  return true;
}

bool place_behind_padding(const attention_scene *scene, check_random *random,
                          placed_scene *placed) {
  enum { MOST_PADDING = 150 };
  const attention_shape *s = &scene->shape;
  *placed = (placed_scene){.call = scene->call};
  nyb_attention *call = &placed->call;
  int32_t *starts = make_numbers(&placed->numbers, s->batch);
  int32_t *lengths = make_numbers(&placed->lengths, s->batch);
  call->capacity_tokens = s->capacity_tokens + MOST_PADDING;
  if (starts == NULL || lengths == NULL ||
      !make_part(scene, s->batch, call->capacity_tokens, 0, placed, &call->k, &call->v)) {
    return false;
  }
  for (int64_t b = 0; b < s->batch; b++) {
    starts[b] = (int32_t)check_random_below(random, MOST_PADDING + 1);
    lengths[b] = s->lengths[b] + starts[b];
    for (int64_t t = 0; t < s->lengths[b]; t++) {
      copy_token(scene, b, t, &call->k, &call->v, b, starts[b] + t);
    }
  }
  call->starts = starts;
  call->lengths = lengths;
  return move_mask(scene, starts, placed);
}

static void seal_stored(stored_buffers *buffers) {
  if (buffers->codes.memory == NULL) return;
  check_buffer_seal(&buffers->codes);
  check_buffer_seal(&buffers->scales);
  check_buffer_seal(&buffers->biases);
}

void scene_share_tokens(attention_scene *scene, int64_t tokens) {
  const attention_shape *s = &scene->shape;
  if (tokens > s->lengths[0]) tokens = s->lengths[0];
  for (int64_t b = 1; b < s->batch; b++) {
    for (int64_t t = 0; t < tokens && t < s->lengths[b]; t++) {
      copy_token(scene, 0, t, &scene->call.k, &scene->call.v, b, t);
    }
  }
  seal_stored(&scene->k);
  seal_stored(&scene->v);
}

/* A random order of 0 .. count - 1. */
static int32_t *shuffled(int64_t count, check_random *random) {
  int32_t *order = malloc((size_t)(count + 1) * sizeof *order);
  if (order == NULL) return NULL;
  for (int64_t i = 0; i < count; i++) {
    const int64_t j = check_random_below(random, i + 1);
    order[i] = order[j];
    order[j] = (int32_t)i;
  }
  return order;
}

static int64_t pages_of(int64_t tokens, int64_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

static void fill_pages(const attention_scene *scene, const int32_t *order, int64_t shared_pages,
                       const nyb_attention *call, int32_t *table) {
  const attention_shape *s = &scene->shape;
  const nyb_pages *pages = &call->pages;
  int64_t used = 0;
  for (int64_t b = 0; b < s->batch; b++) {
    int32_t *entries = table + b * pages->table_stride;
    const int64_t both = s->lengths[b] < s->lengths[0] ? s->lengths[b] : s->lengths[0];
    for (int64_t i = 0; i < pages_of(s->lengths[b], pages->page_tokens); i++) {
      const bool shared = b > 0 && i < shared_pages && (i + 1) * pages->page_tokens <= both;
      entries[i] = shared ? table[i] : order[used++];
    }
    for (int64_t t = 0; t < s->lengths[b]; t++) {
      copy_token(scene, b, t, &call->k, &call->v, entries[t / pages->page_tokens],
                 t % pages->page_tokens);
    }
  }
}

bool place_in_pages(const attention_scene *scene, int64_t page_tokens, int64_t shared_pages,
                    check_random *random, placed_scene *placed) {
  const attention_shape *s = &scene->shape;
  *placed = (placed_scene){.call = scene->call};
  nyb_attention *call = &placed->call;
  const int64_t per_sequence = pages_of(s->capacity_tokens, page_tokens);
  call->pages = (nyb_pages){.table_stride = per_sequence + check_random_below(random, 3),
                            .page_tokens = page_tokens,
                            .page_count = s->batch * per_sequence + 3};
  int32_t *table = make_numbers(&placed->numbers, s->batch * call->pages.table_stride);
  int32_t *order = shuffled(call->pages.page_count, random);
  const bool made =
      table != NULL && order != NULL &&
      make_part(scene, call->pages.page_count, page_tokens, 0, placed, &call->k, &call->v);
  if (made) {
    call->pages.table = table;
    fill_pages(scene, order, shared_pages, call, table);
  }
  free(order);
  return made;
}

bool place_in_ring(const attention_scene *scene, int64_t keep_tokens, check_random *random,
                   placed_scene *placed) {
  const attention_shape *s = &scene->shape;
  *placed = (placed_scene){.call = scene->call};
  nyb_attention *call = &placed->call;
  int32_t *offsets = make_numbers(&placed->numbers, s->batch);
  if (offsets == NULL ||
      !make_part(scene, s->batch, s->capacity_tokens, 0, placed, &call->k, &call->v)) {
    return false;
  }
  const int64_t slots = s->capacity_tokens - keep_tokens;
  for (int64_t b = 0; b < s->batch; b++) {
    offsets[b] = (int32_t)check_random_below(random, slots);
    for (int64_t t = 0; t < s->lengths[b]; t++) {
      const int64_t slot =
          t < keep_tokens ? t : keep_tokens + (t - keep_tokens + offsets[b]) % slots;
      copy_token(scene, b, t, &call->k, &call->v, b, slot);
    }
  }
  call->ring = (nyb_ring){.offsets = offsets, .keep_tokens = keep_tokens};
  return true;
}

bool place_in_parts(const attention_scene scenes[3], placed_scene *placed) {
  const int64_t batch = scenes[0].shape.batch;
  *placed = (placed_scene){.call = scenes[0].call};
  nyb_attention *call = &placed->call;
  int32_t *last_begins = make_numbers(&placed->numbers, batch);
  int32_t *lengths = make_numbers(&placed->lengths, batch);
  call->first.tokens = scenes[0].shape.capacity_tokens;
  call->capacity_tokens = scenes[1].shape.capacity_tokens;
  call->last.tokens = scenes[2].shape.capacity_tokens;
  nyb_stored *const k[] = {&call->first.k, &call->k, &call->last.k};
  nyb_stored *const v[] = {&call->first.v, &call->v, &call->last.v};
  bool made = last_begins != NULL && lengths != NULL;
  for (int part = 0; part < 3 && made; part++) {
    made = make_part(&scenes[part], batch, scenes[part].shape.capacity_tokens, part, placed,
                     k[part], v[part]);
  }
  for (int64_t b = 0; b < batch && made; b++) {
    const int32_t *const counts[] = {scenes[0].shape.lengths, scenes[1].shape.lengths,
                                     scenes[2].shape.lengths};
    last_begins[b] = counts[0][b] + counts[1][b];
    lengths[b] = last_begins[b] + counts[2][b];
    for (int part = 0; part < 3; part++) {
      for (int64_t t = 0; t < counts[part][b]; t++) {
        const int64_t row = part < 2 ? t : (last_begins[b] + t) % call->last.tokens;
        copy_token(&scenes[part], b, t, k[part], v[part], b, row);
      }
    }
  }
  call->last_begins = last_begins;
  call->lengths = lengths;
  return made;
}

/* ---- Running ------------------------------------------------------------------------------ */

static void seal(placed_scene *placed) {
  for (int part = 0; part < 3; part++) {
    seal_stored(&placed->keys[part]);
    seal_stored(&placed->values[part]);
  }
  if (placed->numbers.memory != NULL) check_buffer_seal(&placed->numbers);
  if (placed->lengths.memory != NULL) check_buffer_seal(&placed->lengths);
  if (placed->mask.memory != NULL) check_buffer_seal(&placed->mask);
}

static bool changed(const check_buffer *buffer) {
  return buffer->memory != NULL && check_buffer_changed(buffer) != CHECK_UNCHANGED;
}

static bool inputs_changed(const placed_scene *placed) {
  bool any = changed(&placed->numbers) || changed(&placed->lengths) || changed(&placed->mask);
  for (int part = 0; part < 3; part++) {
    const stored_buffers *both[] = {&placed->keys[part], &placed->values[part]};
    for (int i = 0; i < 2; i++) {
      any =
          any || changed(&both[i]->codes) || changed(&both[i]->scales) || changed(&both[i]->biases);
    }
  }
  return any;
}

nyb_status placed_run(attention_scene *scene, placed_scene *placed, const check_library *library,
                      nyb_context *context, nyb_path path, uint8_t *bits, char *text,
                      size_t text_size) {
  const nyb_attention own = scene->call;
  text[0] = '\0';
  seal(placed);
  scene->call = placed->call;
  const nyb_status status = scene_run(scene, library, context, path);
  if (status == NYB_OK) scene_bits(scene, bits);
  scene->call = own;
  if (status != NYB_OK) {
    snprintf(text, text_size, "%s: %s", nyb_status_name(status), nyb_last_error());
    return status;
  }
  if (scene_strays(scene, text, text_size)) return NYB_ERROR_VALUE;
  if (inputs_changed(placed)) {
    snprintf(text, text_size, "an input was written");
    return NYB_ERROR_VALUE;
  }
  return NYB_OK;
}
