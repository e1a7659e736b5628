/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens of a sequence stand: src/attention_places.c for the device. Numbers that lie in
 * device memory are brought into range, since nobody has checked them. Starts are not known here:
 * they stand with no other layout. */
#ifndef NYB_ATTENTION_PLACES_CUH
#define NYB_ATTENTION_PLACES_CUH

#include "attention_sight.cuh"

enum { NYB_DEVICE_PART_MIDDLE, NYB_DEVICE_PART_FIRST, NYB_DEVICE_PART_LAST };

/* The token with which the last part of a sequence begins; beyond all tokens where it has none. */
NYB_FUNCTION int nyb_last_begin_of(const nyb_attention_arguments *a, int64_t batch,
                                   int64_t length) {
  const int64_t first = a->first_tokens, last = a->last_tokens;
  if (last == 0) return 0x7fffffff;
  int64_t least = first < length ? first : length, most = length;
  if (length - last > least) least = length - last;
  if (first + a->capacity_tokens < most) most = first + a->capacity_tokens;
  return (int)nyb_clamped(a->last_begins[batch], least, most);
}

typedef struct nyb_token_place {
  int part;
  int block; /* of the rows: the sequence, or a page */
  int row;
} nyb_token_place;

/* last_begin: of the sequence; looked at where there are parts. */
NYB_FUNCTION nyb_token_place nyb_token_place_of(const nyb_attention_arguments *a, int64_t batch,
                                                int last_begin, int token) {
  nyb_token_place place;
  place.part = NYB_DEVICE_PART_MIDDLE;
  place.block = (int)batch;
  place.row = token;
  if (a->places == NYB_PLACES_PAGES) {
    const int page = token / a->page_tokens;
    place.block = (int)nyb_clamped(a->page_table[batch * a->page_table_stride + page], 0,
                                   (int64_t)a->page_count - 1);
    place.row = token - page * a->page_tokens;
  } else if (a->places == NYB_PLACES_RING && token >= a->ring_keep_tokens) {
    const uint32_t keep = (uint32_t)a->ring_keep_tokens;
    const uint32_t slots = (uint32_t)a->capacity_tokens - keep;
    const uint32_t offset = (uint32_t)nyb_clamped(a->ring_offsets[batch], 0, (int64_t)slots - 1);
    place.row = (int)(keep + ((uint32_t)token - keep + offset) % slots);
  } else if (a->places == NYB_PLACES_PARTS) {
    if (token >= last_begin) {
      place.part = NYB_DEVICE_PART_LAST;
      place.row = token % a->last_tokens;
    } else if (token < a->first_tokens) {
      place.part = NYB_DEVICE_PART_FIRST;
    } else {
      place.row = token - a->first_tokens;
    }
  }
  return place;
}

/* Where the part of a token ends: no token from there on stands in it. */
NYB_FUNCTION int nyb_part_end_of(const nyb_attention_arguments *a, int last_begin, int token) {
  if (token >= last_begin) return 0x7fffffff;
  return token < a->first_tokens && a->first_tokens < last_begin ? a->first_tokens : last_begin;
}

#endif
