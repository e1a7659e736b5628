/* SPDX-License-Identifier: Apache-2.0 */
#include "attention_places.h"

#include <string.h>

int64_t nyb_part_tokens(const nyb_attention *a, nyb_part_id part) {
  switch (part) {
    case NYB_PART_FIRST: return a->first.tokens;
    case NYB_PART_LAST: return a->last.tokens;
    case NYB_PART_MIDDLE:
    case NYB_PART_COUNT: break;
  }
  return a->capacity_tokens;
}

const nyb_stored *nyb_part_keys(const nyb_attention *a, nyb_part_id part) {
  return part == NYB_PART_FIRST ? &a->first.k : part == NYB_PART_LAST ? &a->last.k : &a->k;
}

const nyb_stored *nyb_part_values(const nyb_attention *a, nyb_part_id part) {
  return part == NYB_PART_FIRST ? &a->first.v : part == NYB_PART_LAST ? &a->last.v : &a->v;
}

static nyb_place place_in_parts(const nyb_attention *a, int64_t batch, int64_t token) {
  nyb_place place = {.part_end = INT64_MAX, .batch = batch};
  const int64_t last_begin = a->last.tokens > 0 ? a->last_begins[batch] : INT64_MAX;
  if (token >= last_begin) {
    place.part = NYB_PART_LAST;
    place.row = token % a->last.tokens;
    place.run = a->last.tokens - place.row;
    return place;
  }
  const bool is_first = token < a->first.tokens;
  place.part = is_first ? NYB_PART_FIRST : NYB_PART_MIDDLE;
  place.part_end = is_first && a->first.tokens < last_begin ? a->first.tokens : last_begin;
  place.row = is_first ? token : token - a->first.tokens;
  place.run = place.part_end - token;
  return place;
}

static nyb_place place_in_page(const nyb_attention *a, int64_t batch, int64_t token) {
  const int64_t page_tokens = a->pages.page_tokens;
  const int64_t page = token / page_tokens, row = token - page * page_tokens;
  return (nyb_place){.part_end = INT64_MAX,
                     .batch = a->pages.table[batch * a->pages.table_stride + page],
                     .row = row,
                     .run = page_tokens - row};
}

static nyb_place place_in_ring(const nyb_attention *a, int64_t batch, int64_t token) {
  nyb_place place = {.part_end = INT64_MAX, .batch = batch, .row = token};
  const int64_t keep = a->ring.keep_tokens;
  int64_t end = keep;
  if (token >= keep) {
    place.row = keep + (token - keep + a->ring.offsets[batch]) % (a->capacity_tokens - keep);
    end = a->capacity_tokens;
  }
  place.run = end - place.row;
  return place;
}

nyb_place nyb_place_of(const nyb_attention *a, int64_t batch, int64_t token) {
  if (nyb_has_parts(a)) return place_in_parts(a, batch, token);
  if (nyb_is_paged(a)) return place_in_page(a, batch, token);
  if (a->ring.offsets != NULL) return place_in_ring(a, batch, token);
  const int64_t row = nyb_sequence_start(a, batch) + token;
  return (nyb_place){
      .part_end = INT64_MAX, .batch = batch, .row = row, .run = a->capacity_tokens - row};
}

/* ---- Tiles ---------------------------------------------------------------------------------- */

nyb_tile_tokens nyb_tile_at(const nyb_part_rows *rows, int64_t kv_head, const nyb_place *place,
                            int64_t tokens) {
  const nyb_stored *stored = rows->stored;
  const nyb_stored_row row = nyb_stored_row_at(stored, place->batch, kv_head, place->row);
  /* The stride of a single token leads nowhere, and may be anything. */
  const int64_t code_bytes = tokens > 1 ? (int64_t)rows->layout.code_bytes : 0;
  const int64_t scale_bytes = tokens > 1 ? (int64_t)rows->layout.scale_bytes : 0;
  return (nyb_tile_tokens){
      .codes = row.codes,
      .scales = row.scales,
      .biases = row.biases,
      .codes_stride_bytes = stored->codes_stride[2] * code_bytes,
      .scales_stride_bytes = stored->scales_stride[2] * scale_bytes,
      .biases_stride_bytes = stored->biases_stride[2] * scale_bytes,
      .dim = rows->dim,
      .group_size = stored->format.group_size,
      .scale_dtype = stored->format.dtype,
      .tokens = tokens,
  };
}

static void copy_rows(const char *from, int64_t stride_bytes, int64_t count, int64_t row_bytes,
                      char *to) {
  if (stride_bytes == row_bytes) {
    memcpy(to, from, (size_t)(count * row_bytes));
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    memcpy(to + i * row_bytes, from + i * stride_bytes, (size_t)row_bytes);
  }
}

nyb_tile_tokens nyb_gather_tile(const nyb_attention *a, int64_t batch, int64_t kv_head,
                                const nyb_part_rows *rows, int64_t first, int64_t tokens,
                                char *memory) {
  const nyb_row_layout *layout = &rows->layout;
  const int64_t group_bytes = layout->affine ? layout->groups * (int64_t)layout->scale_bytes : 0;
  char *codes = memory;
  char *scales = codes + NYB_TILE_TOKENS * layout->codes_bytes;
  char *biases = scales + NYB_TILE_TOKENS * group_bytes;
  nyb_tile_tokens tile = {0};
  for (int64_t t = 0, count; t < tokens; t += count) {
    const nyb_place place = nyb_place_of(a, batch, first + t);
    count = place.run < tokens - t ? place.run : tokens - t;
    tile = nyb_tile_at(rows, kv_head, &place, tokens);
    copy_rows(tile.codes, tile.codes_stride_bytes, count, layout->codes_bytes,
              codes + t * layout->codes_bytes);
    if (!layout->affine) continue;
    copy_rows(tile.scales, tile.scales_stride_bytes, count, group_bytes, scales + t * group_bytes);
    copy_rows(tile.biases, tile.biases_stride_bytes, count, group_bytes, biases + t * group_bytes);
  }
  tile.codes = codes;
  tile.codes_stride_bytes = layout->codes_bytes;
  if (!layout->affine) return tile;
  tile.scales = scales;
  tile.biases = biases;
  tile.scales_stride_bytes = tile.biases_stride_bytes = group_bytes;
  return tile;
}
