/* SPDX-License-Identifier: Apache-2.0 */
/* Option values that several subcommands read. Every parser ends the command with exit status 2 and
 * a sentence (argp_error) for a text that it does not take. */
#ifndef NYB_OPTIONS_H
#define NYB_OPTIONS_H

#include <argp.h>
#include <stdint.h>

#include "nybble.h"

enum { NYB_OPTION_LIST_MAX = 64 };

/* Bits per stored number of K and of V; 16 is a plain, unquantized cache. */
typedef struct nyb_width {
  int32_t key_bits, value_bits;
} nyb_width;

typedef struct nyb_width_list {
  nyb_width items[NYB_OPTION_LIST_MAX];
  int64_t count;
} nyb_width_list;

typedef struct nyb_integer_list {
  int64_t items[NYB_OPTION_LIST_MAX];
  int64_t count;
} nyb_integer_list;

/* "16-bit", "4-bit", "K8V4". */
typedef struct nyb_width_name {
  char text[16];
} nyb_width_name;
nyb_width_name nyb_name_width(nyb_width width);

/* The format of rows of that width: affine with scales in `dtype`; or plain in `dtype`, bf16 where
 * that is f32, which would not be 16 bits. */
nyb_format nyb_width_format(int32_t bits, int64_t group_size, nyb_dtype dtype);

int64_t nyb_parse_integer(const struct argp_state *state, const char *option, const char *text,
                          int64_t minimum, int64_t maximum);
double nyb_parse_positive(const struct argp_state *state, const char *option, const char *text);
/* "1,2,4": appends. */
void nyb_parse_integers(const struct argp_state *state, const char *option, const char *text,
                        int64_t minimum, int64_t maximum, nyb_integer_list *list);
/* 2, 3, 4, 5, 6, 8, and 16 where allow_plain. */
int32_t nyb_parse_bits(const struct argp_state *state, const char *option, const char *text,
                       bool allow_plain);
/* "4,8:4,16": appends. */
void nyb_parse_widths(const struct argp_state *state, const char *option, const char *text,
                      nyb_width_list *list);
int64_t nyb_parse_group_size(const struct argp_state *state, const char *option, const char *text);
/* "cpu" or "cuda". */
nyb_backend nyb_parse_backend(const struct argp_state *state, const char *option, const char *text);
nyb_dtype nyb_parse_dtype(const struct argp_state *state, const char *option, const char *text);
nyb_path nyb_parse_path(const struct argp_state *state, const char *option, const char *text);
nyb_rounding nyb_parse_rounding(const struct argp_state *state, const char *option,
                                const char *text);
nyb_rule nyb_parse_rule(const struct argp_state *state, const char *option, const char *text);
nyb_isa nyb_parse_isa(const struct argp_state *state, const char *option, const char *text);
/* "scalar,auto": appends. */
void nyb_parse_isas(const struct argp_state *state, const char *option, const char *text,
                    nyb_integer_list *list);

const char *nyb_rounding_name(nyb_rounding rounding);
const char *nyb_rule_name(nyb_rule rule);

#endif
