/* SPDX-License-Identifier: Apache-2.0 */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif

#include "io_safetensors.h"

#include <errno.h>
#include <string.h>

#include "context.h"

/* The format's dtypes of whole bytes. */
static const struct {
  char word[8];
  int64_t bytes;
} dtypes[] = {
    {"F32", 4},  {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"F64", 8},     {"I64", 8},
    {"I32", 4},  {"I16", 2}, {"I8", 1},      {"U64", 8},     {"U16", 2},     {"U8", 1},
    {"BOOL", 1}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
};

/* ---- Names, text and numbers -------------------------------------------------------------- */

int nyb_utf8_length(const char *at, const char *end) {
  const unsigned char *byte = (const unsigned char *)at;
  const int64_t left = end - at;
  if (left < 1) return 0;
  if (byte[0] < 0x80) return 1;
  /* The second byte's range shuts out overlong forms, surrogates and what lies beyond U+10FFFF. */
  unsigned low = 0x80, high = 0xbf;
  int length;
  if (byte[0] >= 0xc2 && byte[0] <= 0xdf) {
    length = 2;
  } else if (byte[0] >= 0xe0 && byte[0] <= 0xef) {
    length = 3;
    if (byte[0] == 0xe0) low = 0xa0;
    if (byte[0] == 0xed) high = 0x9f;
  } else if (byte[0] >= 0xf0 && byte[0] <= 0xf4) {
    length = 4;
    if (byte[0] == 0xf0) low = 0x90;
    if (byte[0] == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (left < length || byte[1] < low || byte[1] > high) return 0;
  for (int i = 2; i < length; i++) {
    if (byte[i] < 0x80 || byte[i] > 0xbf) return 0;
  }
  return length;
}

bool nyb_is_utf8(const char *text) {
  const char *end = text + strlen(text);
  while (text < end) {
    const int length = nyb_utf8_length(text, end);
    if (length == 0) return false;
    text += length;
  }
  return true;
}

/* Neither ASCII's control characters nor those of U+0080 to U+009F, which terminals obey too. */
static bool is_printable(const char *character, int length) {
  if (length == 1) return *character >= 0x20 && *character != 0x7f;
  return length > 1 && !((unsigned char)character[0] == 0xc2 && (unsigned char)character[1] < 0xa0);
}

nyb_shown_text nyb_shown(const char *text) {
  nyb_shown_text result;
  const char *end = text + strlen(text);
  size_t used = 0;
  while (text < end) {
    int length = nyb_utf8_length(text, end);
    const bool printable = is_printable(text, length);
    if (length == 0) length = 1;
    if (used + (size_t)length > sizeof result.text - 4) {
      memcpy(result.text + used, "...", 3);
      used += 3;
      break;
    }
    if (printable) {
      memcpy(result.text + used, text, (size_t)length);
      used += (size_t)length;
    } else {
      result.text[used++] = '?';
    }
    text += length;
  }
  result.text[used] = '\0';
  return result;
}

nyb_shown_path_text nyb_shown_path(const char *path) {
  nyb_shown_path_text result = {""};
  const size_t bytes = strlen(path), room = sizeof result.text - 1;
  if (bytes <= room) {
    memcpy(result.text, path, bytes);
    return result;
  }
  const char *tail = path + bytes - (room - 3);
  while (((unsigned char)*tail & 0xc0) == 0x80) tail++; /* the rest of a character cut in two */
  memcpy(result.text, "...", 3);
  memcpy(result.text + 3, tail, (size_t)(path + bytes - tail));
  return result;
}

int64_t nyb_safetensors_dtype_bytes(const char **word) {
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    if (strcmp(*word, dtypes[i].word) == 0) {
      *word = dtypes[i].word;
      return dtypes[i].bytes;
    }
  }
  return 0;
}

bool nyb_safetensors_tensor_bytes(int64_t rank, const int64_t *shape, int64_t element_bytes,
                                  int64_t *bytes) {
  int64_t elements = 1;
  for (int64_t i = 0; i < rank; i++) {
    if (shape[i] == 0) {
      *bytes = 0;
      return true;
    }
  }
  for (int64_t i = 0; i < rank; i++) {
    if (elements > INT64_MAX / shape[i]) return false;
    elements *= shape[i];
  }
  if (elements > INT64_MAX / element_bytes) return false;
  *bytes = elements * element_bytes;
  return true;
}

/* ---- Sorting ------------------------------------------------------------------------------ */

static void sift_down(int32_t *order, int64_t root, int64_t count, nyb_compare_fn compare,
                      const void *items) {
  for (int64_t child; (child = 2 * root + 1) < count; root = child) {
    if (child + 1 < count && compare(items, order[child], order[child + 1]) < 0) child++;
    if (compare(items, order[root], order[child]) >= 0) return;
    const int32_t moved = order[root];
    order[root] = order[child];
    order[child] = moved;
  }
}

void nyb_sort_indices(int32_t *order, int64_t count, nyb_compare_fn compare, const void *items) {
  for (int64_t i = 0; i < count; i++) order[i] = (int32_t)i;
  for (int64_t i = count / 2 - 1; i >= 0; i--) sift_down(order, i, count, compare, items);
  for (int64_t last = count - 1; last > 0; last--) {
    const int32_t largest = order[0];
    order[0] = order[last];
    order[last] = largest;
    sift_down(order, 0, last, compare, items);
  }
}

int nyb_compare_tensor_names(const void *items, int32_t left, int32_t right) {
  const nyb_safetensors_tensor *tensors = items;
  return strcmp(tensors[left].name, tensors[right].name);
}

int nyb_compare_metadata_keys(const void *items, int32_t left, int32_t right) {
  const nyb_metadata *metadata = items;
  return strcmp(metadata[left].key, metadata[right].key);
}

int64_t nyb_find_equal_neighbours(const int32_t *order, int64_t count, nyb_compare_fn compare,
                                  const void *items) {
  for (int64_t i = 1; i < count; i++) {
    if (compare(items, order[i - 1], order[i]) == 0) return order[i];
  }
  return -1;
}

nyb_status nyb_fail_io(const char *path, const char *what) {
  char words[96];
  if (strerror_r(errno, words, sizeof words) != 0) memcpy(words, "an unknown error", 17);
  return nyb_fail(NYB_ERROR_IO, "%s %s: %s", nyb_shown_path(path).text, what, words);
}
