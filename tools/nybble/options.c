/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

/* ---- Widths ------------------------------------------------------------------------------- */

nyb_width_name nyb_name_width(nyb_width width) {
  nyb_width_name name;
  if (width.key_bits == width.value_bits) {
    snprintf(name.text, sizeof name.text, "%d-bit", (int)width.key_bits);
  } else {
    snprintf(name.text, sizeof name.text, "K%dV%d", (int)width.key_bits, (int)width.value_bits);
  }
  return name;
}

nyb_format nyb_width_format(int32_t bits, int64_t group_size, nyb_dtype dtype) {
  if (bits == 16) {
    return (nyb_format){.scheme = NYB_PLAIN, .dtype = dtype == NYB_F32 ? NYB_BF16 : dtype};
  }
  return (nyb_format){
      .scheme = NYB_AFFINE, .bits = bits, .group_size = (int32_t)group_size, .dtype = dtype};
}

/* ---- Numbers ------------------------------------------------------------------------------ */

int64_t nyb_parse_integer(const struct argp_state *state, const char *option, const char *text,
                          int64_t minimum, int64_t maximum) {
  char *end;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (end == text || *end != '\0' || errno != 0 || value < minimum || value > maximum) {
    argp_error(state, "%s is \"%s\"; it must be a whole number from %lld to %lld", option, text,
               (long long)minimum, (long long)maximum);
  }
  return value;
}

double nyb_parse_positive(const struct argp_state *state, const char *option, const char *text) {
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end != '\0' || !(value > 0) || !isfinite(value)) {
    argp_error(state, "%s is \"%s\"; it must be a number greater than 0", option, text);
  }
  return value;
}

int32_t nyb_parse_bits(const struct argp_state *state, const char *option, const char *text,
                       bool allow_plain) {
  static const int32_t known[] = {2, 3, 4, 5, 6, 8, 16};
  char *end;
  const long value = strtol(text, &end, 10);
  for (size_t i = 0; end != text && *end == '\0' && i < sizeof known / sizeof known[0]; i++) {
    if (value == known[i] && (value != 16 || allow_plain)) return known[i];
  }
  argp_error(state, "%s has \"%s\"; a width is 2, 3, 4, 5, 6%s bits", option, text,
             allow_plain ? ", 8 or 16" : " or 8");
  return 0;
}

int64_t nyb_parse_group_size(const struct argp_state *state, const char *option, const char *text) {
  const int64_t group_size = nyb_parse_integer(state, option, text, 1, INT32_MAX);
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    argp_error(state, "%s is %s; it must be 32, 64 or 128", option, text);
  }
  return group_size;
}

/* ---- Lists -------------------------------------------------------------------------------- */

/* Cuts the next item off *rest, a list with commas; NULL after the last. The item is copied into
 * `item`. */
static const char *next_item(const struct argp_state *state, const char *option, const char **rest,
                             char *item, size_t item_bytes) {
  if (*rest == NULL) return NULL;
  const size_t length = strcspn(*rest, ",");
  if (length == 0 || length >= item_bytes) {
    argp_error(state, "%s has an item that is empty or too long, in \"%s\"", option, *rest);
  }
  memcpy(item, *rest, length);
  item[length] = '\0';
  *rest = (*rest)[length] == ',' ? *rest + length + 1 : NULL;
  return item;
}

static int64_t take_place(const struct argp_state *state, const char *option, int64_t *count) {
  if (*count == NYB_OPTION_LIST_MAX) {
    argp_error(state, "%s has more than %d items", option, NYB_OPTION_LIST_MAX);
  }
  return (*count)++;
}

void nyb_parse_integers(const struct argp_state *state, const char *option, const char *text,
                        int64_t minimum, int64_t maximum, nyb_integer_list *list) {
  char item[64];
  for (const char *rest = text; next_item(state, option, &rest, item, sizeof item) != NULL;) {
    const int64_t value = nyb_parse_integer(state, option, item, minimum, maximum);
    list->items[take_place(state, option, &list->count)] = value;
  }
}

void nyb_parse_widths(const struct argp_state *state, const char *option, const char *text,
                      nyb_width_list *list) {
  char item[64];
  for (const char *rest = text; next_item(state, option, &rest, item, sizeof item) != NULL;) {
    char *colon = strchr(item, ':');
    if (colon != NULL) *colon = '\0';
    const int32_t key_bits = nyb_parse_bits(state, option, item, true);
    const int32_t value_bits =
        colon != NULL ? nyb_parse_bits(state, option, colon + 1, true) : key_bits;
    list->items[take_place(state, option, &list->count)] = (nyb_width){key_bits, value_bits};
  }
}

/* ---- Words -------------------------------------------------------------------------------- */

typedef struct word {
  const char *text;
  int value;
} word;

static int parse_word(const struct argp_state *state, const char *option, const char *text,
                      const word *words) {
  char known[128] = "";
  size_t used = 0;
  for (const word *w = words; w->text != NULL; w++) {
    if (strcmp(text, w->text) == 0) return w->value;
    const char *separator = w == words ? "" : w[1].text == NULL ? " or " : ", ";
    const int written = snprintf(known + used, sizeof known - used, "%s%s", separator, w->text);
    used += (size_t)written;
  }
  argp_error(state, "%s is \"%s\"; it must be %s", option, text, known);
  return 0;
}

static const char *find_word(const word *words, int value) {
  while (words->text != NULL && words->value != value) words++;
  return words->text != NULL ? words->text : "?";
}

static const word rounding_words[] = {
    {"exact", NYB_ROUNDING_EXACT}, {"mlx", NYB_ROUNDING_MLX}, {NULL, 0}};
static const word rule_words[] = {
    {"mlx_cpu", NYB_RULE_MLX_CPU}, {"mlx_gpu", NYB_RULE_MLX_GPU}, {NULL, 0}};

nyb_backend nyb_parse_backend(const struct argp_state *state, const char *option,
                              const char *text) {
  static const word words[] = {{"cpu", NYB_BACKEND_CPU}, {"cuda", NYB_BACKEND_CUDA}, {NULL, 0}};
  return (nyb_backend)parse_word(state, option, text, words);
}

nyb_dtype nyb_parse_dtype(const struct argp_state *state, const char *option, const char *text) {
  static const word words[] = {{"bf16", NYB_BF16}, {"f16", NYB_F16}, {"f32", NYB_F32}, {NULL, 0}};
  return (nyb_dtype)parse_word(state, option, text, words);
}

nyb_path nyb_parse_path(const struct argp_state *state, const char *option, const char *text) {
  static const word words[] = {
      {"auto", NYB_PATH_AUTO}, {"fused", NYB_PATH_FUSED}, {"compat", NYB_PATH_COMPAT}, {NULL, 0}};
  return (nyb_path)parse_word(state, option, text, words);
}

nyb_rounding nyb_parse_rounding(const struct argp_state *state, const char *option,
                                const char *text) {
  return (nyb_rounding)parse_word(state, option, text, rounding_words);
}

nyb_rule nyb_parse_rule(const struct argp_state *state, const char *option, const char *text) {
  return (nyb_rule)parse_word(state, option, text, rule_words);
}

const char *nyb_rounding_name(nyb_rounding rounding) {
  return find_word(rounding_words, (int)rounding);
}

const char *nyb_rule_name(nyb_rule rule) { return find_word(rule_words, (int)rule); }

static const word isa_words[] = {{"auto", NYB_ISA_AUTO}, {"scalar", NYB_ISA_SCALAR},
                                 {"avx2", NYB_ISA_AVX2}, {"avx512", NYB_ISA_AVX512},
                                 {"neon", NYB_ISA_NEON}, {NULL, 0}};

nyb_isa nyb_parse_isa(const struct argp_state *state, const char *option, const char *text) {
  return (nyb_isa)parse_word(state, option, text, isa_words + 1);
}

void nyb_parse_isas(const struct argp_state *state, const char *option, const char *text,
                    nyb_integer_list *list) {
  char item[64];
  for (const char *rest = text; next_item(state, option, &rest, item, sizeof item) != NULL;) {
    const int isa = parse_word(state, option, item, isa_words);
    list->items[take_place(state, option, &list->count)] = isa;
  }
}
