/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernel attention_combine, for the host's compiler and the device's. Strides
 * are batch's, head's, query row's; those of parts count elements, others bytes. Parameters of a
 * kernel are 4 KB at most. */
#ifndef NYB_ATTENTION_COMBINE_ARGUMENTS_H
#define NYB_ATTENTION_COMBINE_ARGUMENTS_H

enum {
  NYB_COMBINE_THREADS = 128,
  NYB_COMBINE_WORDS = 416,
  NYB_COMBINE_WORDS_OF_POINTERS = 2, /* of a part: out and lse */
  NYB_COMBINE_WORDS_WITH_STRIDES = 8,
  NYB_COMBINE_MOST_PARTS = NYB_COMBINE_WORDS / NYB_COMBINE_WORDS_OF_POINTERS
};

typedef struct nyb_combine_arguments {
  long long parts, batch, heads, rows, value_dim;
  char *out, *lse; /* lse: or null */
  long long out_stride[3], lse_stride[3];
  int out_dtype;
  int words_of_part; /* 0: parts lie evenly spaced, and the first one is listed */
  /* Of every part, where its own do not stand behind its pointers; and bytes from part to part. */
  long long part_out_stride[3], part_lse_stride[3];
  long long out_step, lse_step;
  long long words[NYB_COMBINE_WORDS]; /* addresses of out and lse, then strides of either */
  unsigned char dtypes[NYB_COMBINE_MOST_PARTS];
} nyb_combine_arguments;

#endif
