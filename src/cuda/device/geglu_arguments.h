/* SPDX-License-Identifier: Apache-2.0 */
/* The parameter of the kernel geglu, for the host's compiler and the device's. */
#ifndef NYB_GEGLU_ARGUMENTS_H
#define NYB_GEGLU_ARGUMENTS_H

#include "portable.cuh"

/* Rows are cut into vectors of eight elements, the last of which may be short. */
typedef struct nyb_device_geglu {
  const char *gate, *up;
  char *out;
  long long gate_stride, up_stride, out_stride; /* bytes from row to row */
  long long columns;
  nyb_divider row_vectors; /* of a row */
  long long vectors;       /* in all */
  int wide;                /* vectors of all three begin at multiples of 16 bytes */
  int padding;
} nyb_device_geglu;

/* MODE of a specialisation. */
enum {
  NYB_GEGLU_COMPAT = 0, /* the steps with the toolkit's tanh */
  NYB_GEGLU_DIRECT = 1, /* the steps for every element */
  NYB_GEGLU_TABLE = 2   /* 16-bit dtypes: the steps once for each gate there is, in every block */
};
enum { NYB_GEGLU_THREADS = 256, NYB_GEGLU_TABLE_THREADS = 1024 };

#endif
