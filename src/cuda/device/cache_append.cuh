/* SPDX-License-Identifier: Apache-2.0 */
/* What an append to a cache of any kind does to one sequence, from the numbers in device memory.
 * Nobody has checked those: they are brought into range. */
#ifndef NYB_CACHE_APPEND_CUH
#define NYB_CACHE_APPEND_CUH

#include "cache_arguments.h"

NYB_FUNCTION int64_t nyb_brought_to(int64_t value, int64_t least, int64_t most) {
  const int64_t at_most = value < most ? value : most;
  return at_most > least ? at_most : least;
}

/* most_held: tokens for which there is room. */
NYB_FUNCTION nyb_cache_sequence nyb_kind_in_range(const nyb_kind_numbers *kind, int64_t body_tokens,
                                                  int64_t most_held, nyb_cache_sequence state) {
  nyb_cache_sequence good;
  const int64_t held = nyb_brought_to(state.held, 0, most_held);
  good.held = held;
  good.dropped = good.offset = good.last_begin = 0;
  if (kind->kind == NYB_CACHE_ROTATING && held >= kind->keep_tokens) {
    good.dropped = nyb_larger(0, state.dropped);
    good.offset = nyb_brought_to(state.offset, 0, body_tokens - kind->keep_tokens - 1);
  } else if (kind->kind == NYB_CACHE_MIXED) {
    const int64_t first = nyb_smaller(kind->first_tokens, held);
    good.last_begin = nyb_brought_to(state.last_begin, nyb_larger(first, held - kind->last_tokens),
                                     nyb_smaller(held, kind->first_tokens + body_tokens));
  }
  return good;
}

/* Tokens of a sequence for which there is room in a body, and of paged caches in its pages. */
NYB_FUNCTION int64_t nyb_places_room(const nyb_device_places *places, int64_t sequence) {
  const nyb_kind_numbers *kind = &places->kind;
  if (kind->kind == NYB_CACHE_PAGED) return places->own_ends[sequence];
  return places->body_tokens + kind->first_tokens + kind->last_tokens;
}

NYB_FUNCTION nyb_cache_sequence nyb_sequence_at(const nyb_device_places *places, int64_t sequence) {
  nyb_cache_sequence state;
  state.dropped = places->sequences.dropped[sequence];
  state.held = places->sequences.lengths[sequence];
  state.offset = places->sequences.offsets[sequence];
  state.last_begin = places->sequences.last_begins[sequence];
  return nyb_kind_in_range(&places->kind, places->body_tokens, nyb_places_room(places, sequence),
                           state);
}

NYB_FUNCTION void nyb_set_sequence_at(const nyb_device_places *places, int64_t sequence,
                                      const nyb_cache_sequence *state) {
  places->sequences.dropped[sequence] = state->dropped;
  places->sequences.lengths[sequence] = (int32_t)state->held;
  places->sequences.offsets[sequence] = (int32_t)state->offset;
  places->sequences.last_begins[sequence] = (int32_t)state->last_begin;
}

typedef struct nyb_append_plan {
  nyb_cache_sequence before, after;
  int64_t padding, added;
  const int32_t *pages; /* of the sequence, where there are pages */
  int fits;             /* else nothing is appended: after is before */
} nyb_append_plan;

NYB_FUNCTION int nyb_append_fits(const nyb_device_places *places, int64_t sequence,
                                 const nyb_cache_sequence *before, int64_t added) {
  const nyb_kind_numbers *kind = &places->kind;
  if (added == 0) return 1;
  if (added > places->limit_tokens - before->dropped - before->held) return 0;
  if (kind->kind == NYB_CACHE_ROTATING) {
    return nyb_smaller(before->held, kind->window_tokens - 1) + added <= places->body_tokens;
  }
  if (kind->kind == NYB_CACHE_PAGED) {
    return places->own_begins[sequence] <= before->held &&
           before->held + added <= places->own_ends[sequence];
  }
  const nyb_cache_sequence after = nyb_kind_after_append(kind, places->body_tokens, before, added);
  return nyb_kind_body_tokens(kind, &after) <= places->body_tokens;
}

NYB_FUNCTION nyb_append_plan nyb_append_plan_of(const nyb_device_placed *call, int64_t sequence) {
  const nyb_device_places *places = &call->places;
  nyb_append_plan plan;
  plan.before = nyb_sequence_at(places, sequence);
  plan.padding = 0;
  if (call->padding != 0) {
    plan.padding = nyb_brought_to(call->padding[sequence], 0, call->append_tokens);
  }
  plan.added = call->append_tokens - plan.padding;
  plan.pages = places->page_table;
  if (plan.pages != 0) plan.pages += sequence * places->page_table_stride;
  plan.fits = nyb_append_fits(places, sequence, &plan.before, plan.added);
  plan.after = nyb_kind_after_append(&places->kind, places->body_tokens, &plan.before,
                                     plan.fits ? plan.added : 0);
  return plan;
}

/* Where row `row` of what is appended goes; it is none of the padding, and the append fits. */
NYB_FUNCTION nyb_cache_place nyb_appended_place(const nyb_device_places *places,
                                                const nyb_append_plan *plan, int64_t sequence,
                                                int64_t row) {
  const int64_t token = plan->after.held - plan->added + row - plan->padding;
  return nyb_kind_place_of(&places->kind, places->body_tokens, &plan->after, sequence, plan->pages,
                           token);
}

/* Tokens that leave the last part of a mixed cache: from before.last_begin on. */
NYB_FUNCTION int64_t nyb_retired_tokens(const nyb_append_plan *plan) {
  return nyb_smaller(plan->before.held, plan->after.last_begin) - plan->before.last_begin;
}

/* A trim of one sequence, which is left as it is where tokens would be needed that were dropped. */
NYB_FUNCTION void nyb_trim_sequence(const nyb_device_trim *call, int64_t sequence) {
  const nyb_cache_sequence before = nyb_sequence_at(&call->places, sequence);
  nyb_cache_sequence after;
  if (nyb_kind_after_trim(&call->places.kind, &before, call->tokens, &after)) {
    nyb_set_sequence_at(&call->places, sequence, &after);
  }
}

/* ---- Moving bytes: of a plane, one unit of 16, 4 or 2 bytes for each thread -------------------
 */

/* Rows begin at multiples of it in every plane. */
NYB_FUNCTION int nyb_unit_bytes(int64_t row_bytes) {
  return row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : 2;
}

typedef struct nyb_unit {
  uint32_t words[4];
} nyb_unit;

NYB_FUNCTION void nyb_load_unit(nyb_unit *unit, const char *from, int bytes) {
  const uint32_t *words = (const uint32_t *)(const void *)from;
  if (bytes == 2) {
    unit->words[0] = *(const uint16_t *)(const void *)from;
    return;
  }
  unit->words[0] = words[0];
  if (bytes == 4) return;
  unit->words[1] = words[1];
  unit->words[2] = words[2];
  unit->words[3] = words[3];
}

NYB_FUNCTION void nyb_store_unit(const nyb_unit *unit, char *to, int bytes) {
  uint32_t *words = (uint32_t *)(void *)to;
  if (bytes == 2) {
    *(uint16_t *)(void *)to = (uint16_t)unit->words[0];
    return;
  }
  words[0] = unit->words[0];
  if (bytes == 4) return;
  words[1] = unit->words[1];
  words[2] = unit->words[2];
  words[3] = unit->words[3];
}

/* Unit `index` of what one move of cache_copy moves of one array and head. 0: there are fewer. */
NYB_FUNCTION int nyb_copy_unit(const nyb_device_copy *call, int array, int move, int64_t head,
                               int64_t index) {
  const nyb_device_planes *planes = &call->array[array];
  const nyb_copy_move *step = &call->moves[move];
  const int bytes = nyb_unit_bytes(planes->row_bytes);
  const int64_t offset = index * bytes;
  if (offset >= step->rows * planes->row_bytes) return 0;
  const char *from = planes->source +
                     (step->from_block * call->kv_heads + head) * planes->source_bytes +
                     step->from_slot * planes->row_bytes;
  char *to = planes->target + (step->to_block * call->kv_heads + head) * planes->target_bytes +
             step->to_slot * planes->row_bytes;
  nyb_unit unit;
  nyb_load_unit(&unit, from + offset, bytes);
  nyb_store_unit(&unit, to + offset, bytes);
  return 1;
}

/* Unit `index` of all planes of one array and head, by all moves: what a move needs has been read
 * by this thread, which alone works on these units. 0: no move goes so far. */
NYB_FUNCTION int nyb_reorder_unit(const nyb_device_reorder *call, int array, int64_t head,
                                  int64_t index) {
  const nyb_device_planes *planes = &call->array[array];
  const int bytes = nyb_unit_bytes(planes->row_bytes), region = array / NYB_REGION_ARRAYS;
  const int64_t offset = index * bytes;
  nyb_unit buffer, unit;
  int reached = 0;
  buffer.words[0] = buffer.words[1] = buffer.words[2] = buffer.words[3] = 0;
  for (int64_t i = 0; i < call->count; i++) {
    const nyb_reorder_move *step = &call->moves[i];
    if (offset >= step->rows[region] * planes->row_bytes) continue;
    reached = 1;
    if (step->from == NYB_REORDER_BUFFER) {
      unit = buffer;
    } else {
      nyb_load_unit(
          &unit,
          planes->source + (step->from * call->kv_heads + head) * planes->source_bytes + offset,
          bytes);
    }
    if (step->to == NYB_REORDER_BUFFER) {
      buffer = unit;
    } else {
      nyb_store_unit(
          &unit,
          planes->target + (step->to * call->kv_heads + head) * planes->target_bytes + offset,
          bytes);
    }
  }
  return reached;
}

#endif
