/* SPDX-License-Identifier: Apache-2.0 */
/* What a CPU kernel is: the operations, their argument structs, and the table that names each kernel
 * once. Kernels know no descriptor, no context and no threads: they get pointers and counts that
 * have been checked. How to add one: docs/kernels.md. */
#ifndef NYB_KERNELS_H
#define NYB_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nybble.h"

/* Index of a format in dispatch tables; its name is the one in kernel names. */
typedef enum nyb_format_id {
  NYB_FORMAT_PLAIN_F32,
  NYB_FORMAT_PLAIN_F16,
  NYB_FORMAT_PLAIN_BF16,
  NYB_FORMAT_AFFINE2,
  NYB_FORMAT_AFFINE3,
  NYB_FORMAT_AFFINE4,
  NYB_FORMAT_AFFINE5,
  NYB_FORMAT_AFFINE6,
  NYB_FORMAT_AFFINE8,
  NYB_FORMAT_COUNT
} nyb_format_id;

typedef enum nyb_operation {
  NYB_OPERATION_QUANTIZE,
  NYB_OPERATION_DEQUANTIZE,
  NYB_OPERATION_ATTENTION_SCORES,
  NYB_OPERATION_ATTENTION_VALUES,
  NYB_OPERATION_GEGLU, /* formats: the PLAIN ones */
  NYB_OPERATION_COUNT
} nyb_operation;

/* ---- quantize: a run of whole groups, contiguous on both sides ---------------------------- */

typedef struct nyb_quantize_span {
  const void *input; /* groups * group_size elements */
  nyb_dtype input_dtype;
  int64_t groups;
  int32_t group_size; /* plain formats: 1, and a group is an element */
  nyb_rule rule;
  nyb_dtype scale_dtype; /* affine only */
  void *codes;           /* NULL: check only, write nothing */
  void *scales;
  void *biases;
} nyb_quantize_span;

/* Returns how many groups were done: `groups`, or the index of the first group that cannot be stored
 * (a NaN or infinity, or a scale or bias that overflows). Nothing from that group on need be
 * untouched: callers that promise so check first. */
typedef int64_t (*nyb_quantize_fn)(const nyb_quantize_span *span);

/* ---- dequantize: the same, backwards ------------------------------------------------------ */

typedef struct nyb_dequantize_span {
  const void *codes, *scales, *biases;
  nyb_dtype scale_dtype;
  int64_t groups;
  int32_t group_size;
  void *output;
  nyb_dtype output_dtype;
} nyb_dequantize_span;

typedef void (*nyb_dequantize_fn)(const nyb_dequantize_span *span);

/* ---- geglu: contiguous elements of one dtype ---------------------------------------------- */

/* out may be gate or up. */
typedef void (*nyb_geglu_fn)(const void *gate, const void *up, void *out, int64_t count);

/* ---- The table ---------------------------------------------------------------------------- */

typedef void (*nyb_any_fn)(void);

typedef struct nyb_kernel_entry {
  const char *name;
  nyb_operation operation;
  nyb_format_id format;
  nyb_isa isa;
  nyb_any_fn function; /* NULL where this build's processor family is another */
} nyb_kernel_entry;

/* All kernels of all ISAs, scalar first. */
extern const nyb_kernel_entry nyb_kernel_entries[];
extern const int64_t nyb_kernel_entry_count;

/* One ISA's choice: the index into nyb_kernel_entries for each operation and format, filled scalar
 * first and overwritten upwards; -1 where no kernel exists. */
typedef struct nyb_dispatch {
  int16_t entry[NYB_OPERATION_COUNT][NYB_FORMAT_COUNT];
} nyb_dispatch;

void nyb_dispatch_fill(nyb_dispatch *dispatch, nyb_isa isa);

const char *nyb_operation_name(nyb_operation operation);
const char *nyb_format_id_name(nyb_format_id format);

/* Whether kernels of this ISA run on this machine; *reason (static) says why not, or is "". */
bool nyb_isa_runs_here(nyb_isa isa, const char **reason);
nyb_isa nyb_isa_best(void);

#endif
