/* SPDX-License-Identifier: Apache-2.0 */
/* What starts, lengths, pages, rings and parts must be like. */
#include "attention.h"

/* Starts, pages, rings and parts stand alone. */
static nyb_status check_alone(const nyb_attention *a) {
  const struct {
    const char *field;
    bool is_set;
  } fields[] = {
      {"starts", a->starts != NULL},
      {"pages", a->pages.table != NULL || a->pages.page_tokens != 0},
      {"ring", a->ring.offsets != NULL || a->ring.keep_tokens != 0},
      {"first or last", a->first.tokens != 0 || a->last.tokens != 0},
  };
  const char *set = NULL;
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    if (!fields[i].is_set) continue;
    if (set != NULL) {
      return nyb_fail(NYB_ERROR_UNSUPPORTED,
                      "attention.%s is set and attention.%s, too; each must be without the other",
                      set, fields[i].field);
    }
    set = fields[i].field;
  }
  return NYB_OK;
}

static nyb_status check_pages(const nyb_attention *a) {
  enum { LEAST_PAGE_TOKENS = 16 };
  const nyb_pages *pages = &a->pages;
  if (pages->table == NULL && pages->page_tokens == 0) return NYB_OK;
  nyb_status status =
      nyb_check_size("pages.page_tokens", pages->page_tokens, LEAST_PAGE_TOKENS, INT32_MAX);
  if (status == NYB_OK)
    status = nyb_check_size("pages.page_count", pages->page_count, 0, INT32_MAX);
  if (status == NYB_OK && a->batch > 1) {
    status = nyb_check_size("pages.table_stride", pages->table_stride, nyb_pages_per_sequence(a),
                            INT64_MAX);
  }
  return status;
}

static nyb_status check_ring(const nyb_attention *a) {
  if (a->ring.offsets == NULL && a->ring.keep_tokens == 0) return NYB_OK;
  if (a->ring.keep_tokens >= 0 && a->ring.keep_tokens < a->capacity_tokens) return NYB_OK;
  return nyb_fail(NYB_ERROR_SHAPE,
                  "attention.ring.keep_tokens is %lld; it must be 0 or more, and less than "
                  "capacity_tokens, %lld",
                  (long long)a->ring.keep_tokens, (long long)a->capacity_tokens);
}

static nyb_status check_parts(const nyb_attention *a) {
  nyb_status status = nyb_check_size("first.tokens", a->first.tokens, 0, INT32_MAX);
  if (status == NYB_OK) status = nyb_check_size("last.tokens", a->last.tokens, 0, INT32_MAX);
  if (status != NYB_OK || nyb_room_tokens(a) <= INT32_MAX) return status;
  return nyb_fail(NYB_ERROR_SHAPE,
                  "attention.first.tokens + capacity_tokens + last.tokens is %lld; it must be at "
                  "most %lld",
                  (long long)nyb_room_tokens(a), (long long)INT32_MAX);
}

nyb_status nyb_check_places(const nyb_attention *a) {
  nyb_status status = check_alone(a);
  if (status == NYB_OK) status = check_pages(a);
  if (status == NYB_OK) status = check_ring(a);
  return status == NYB_OK ? check_parts(a) : status;
}

/* ---- Behind pointers ------------------------------------------------------------------------ */

static nyb_status check_lengths(const nyb_attention *a) {
  const int64_t room = nyb_room_tokens(a);
  for (int64_t b = 0; b < a->batch; b++) {
    if (a->lengths[b] < 0 || a->lengths[b] > room) {
      return nyb_fail(
          NYB_ERROR_LENGTH, "attention.lengths[%lld] is %d; it must be 0 to %s, %lld", (long long)b,
          (int)a->lengths[b],
          nyb_has_parts(a) ? "first.tokens + capacity_tokens + last.tokens" : "capacity_tokens",
          (long long)room);
    }
  }
  return NYB_OK;
}

/* values[b] of an optional field of one number for each sequence. */
static nyb_status check_value(const char *field, int64_t b, int64_t value, int64_t least,
                              int64_t most) {
  if (value >= least && value <= most) return NYB_OK;
  return nyb_fail(NYB_ERROR_VALUE, "attention.%s[%lld] is %lld; it must be %lld to %lld", field,
                  (long long)b, (long long)value, (long long)least, (long long)most);
}

static nyb_status check_table(const nyb_attention *a) {
  const nyb_pages *pages = &a->pages;
  for (int64_t b = 0; b < a->batch; b++) {
    const int32_t *entries = pages->table + b * pages->table_stride;
    for (int64_t i = 0; i * pages->page_tokens < a->lengths[b]; i++) {
      if (entries[i] >= 0 && entries[i] < pages->page_count) continue;
      return nyb_fail(NYB_ERROR_VALUE,
                      "attention.pages.table has %d for page %lld of sequence %lld; it must be 0 "
                      "to page_count - 1, %lld",
                      (int)entries[i], (long long)i, (long long)b,
                      (long long)(pages->page_count - 1));
    }
  }
  return NYB_OK;
}

/* The last part holds what it has room for, and the middle what lies between. */
static nyb_status check_last_begin(const nyb_attention *a, int64_t b) {
  const int64_t length = a->lengths[b], first = a->first.tokens;
  int64_t least = first < length ? first : length, most = length;
  if (length - a->last.tokens > least) least = length - a->last.tokens;
  if (first + a->capacity_tokens < most) most = first + a->capacity_tokens;
  return check_value("last_begins", b, a->last_begins[b], least, most);
}

nyb_status nyb_check_place_values(const nyb_attention *a) {
  nyb_status status = check_lengths(a);
  if (status == NYB_OK && nyb_is_paged(a)) status = check_table(a);
  for (int64_t b = 0; b < a->batch && status == NYB_OK; b++) {
    if (a->starts != NULL) status = check_value("starts", b, a->starts[b], 0, a->lengths[b]);
    if (a->ring.offsets != NULL) {
      status = check_value("ring.offsets", b, a->ring.offsets[b], 0,
                           a->capacity_tokens - a->ring.keep_tokens - 1);
    }
    if (a->last.tokens > 0) status = check_last_begin(a, b);
  }
  return status;
}
