/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of the kernels quantize, append and dequantize, for the host's compiler and
 * the device's. Strides are in bytes: batch, head, token. */
#ifndef NYB_QUANTIZE_ARGUMENTS_H
#define NYB_QUANTIZE_ARGUMENTS_H

#include "portable.cuh"

enum { NYB_QUANTIZE_THREADS = 256 }; /* of a block */

/* Rows of floats and the rows in which they are stored. A row is cut into lanes of eight elements,
 * the last of which may be short in plain rows; a lane is a thread's work. */
typedef struct nyb_device_rows {
  const char *input; /* dequantize: where the floats go */
  char *codes, *scales, *biases;
  long long input_stride[3], codes_stride[3], scales_stride[3], biases_stride[3];
  long long dim;
  nyb_divider lanes; /* of a row */
  int input_dtype;
  int stored_dtype; /* of scales and biases, or of the elements of plain rows */
  int bits;         /* of a code; plain: 0 */
  int group_shift;  /* a group has 2^group_shift lanes; plain: 0 */
  int wide_input;   /* lanes of floats begin at multiples of 16 bytes */
  int wide_codes;   /* plain: lanes of stored elements do */
} nyb_device_rows;

typedef struct nyb_device_quantize {
  nyb_device_rows rows;
  nyb_divider heads, tokens;
  long long lanes; /* in all */
  int *non_finite; /* or null; dequantize: null */
  int rule;
  int padding;
} nyb_device_quantize;

typedef struct nyb_device_append {
  nyb_device_rows key, value; /* stored from the sequence's end on */
  nyb_divider tokens, blocks_per_sequence;
  long long capacity_tokens, kv_heads;
  long long key_lanes, value_lanes; /* of a sequence; the key's fill whole warps */
  int *lengths;                     /* [batch] */
  unsigned *arrivals;               /* [batch], 0 before and after */
  int *non_finite;                  /* or null */
  int rule;
  int padding;
} nyb_device_append;

#endif
