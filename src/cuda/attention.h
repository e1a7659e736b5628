/* SPDX-License-Identifier: Apache-2.0 */
/* What a kernel of CUDA attention brings along, so that src/cuda/attention.c can choose it, load it
 * and run it. Each file of a kernel defines one nyb_cuda_attention_kernel; the table in attention.c
 * names them in order of preference. */
#ifndef NYB_CUDA_ATTENTION_H
#define NYB_CUDA_ATTENTION_H

#include "device/attention_arguments.h"
#include "operations.h"
#include "programs.h"

enum { NYB_CUDA_ATTENTION_MAX_PROGRAMS = 3 };

/* One program that a call launches, as nyb_cuda_kernel_get() wants it. */
typedef struct nyb_cuda_attention_program {
  nyb_cuda_spec spec;
  int32_t threads, dynamic_shared_bytes;
} nyb_cuda_attention_program;

typedef struct nyb_cuda_attention_kernel {
  nyb_operation operation; /* which it is counted and named as; compat: nothing */
  const char *reason;      /* why a call gets it, for nyb_plan.reason */
  bool tuned;              /* a spill of registers fails the tests */

  /* Whether it takes a call of which nyb_cuda_attention_feature() names a field; looks at what
   * `supports` may look at. NULL: none. */
  bool (*takes)(const nyb_attention *attention);

  /* Whether its programs can be built for these formats, dims and dtypes on such a device. Must not
   * look at batch, query_len, capacity, pointers or strides: the workspace of all kernels that
   * support a call is what plan asks for. */
  bool (*supports)(const nyb_attention_call *call, const nyb_cuda_properties *properties);

  /* Of a call that it supports: whether it is the right one for this number of rows, these strides
   * and this alignment (a pointer that is NULL counts as aligned). NULL: always. */
  bool (*suits)(const nyb_attention_call *call, const nyb_cuda_properties *properties);

  /* What the largest call of these formats and dims needs that suits and has no larger batch,
   * query_len or capacity_tokens. So it never falls when one of the three rises. */
  int64_t (*workspace_bytes)(const nyb_attention_call *call, const nyb_cuda_properties *properties);

  /* Fills programs (zeroed before) and returns how many the call launches. */
  int (*programs)(const nyb_attention_call *call, const nyb_cuda_properties *properties,
                  nyb_cuda_attention_program programs[NYB_CUDA_ATTENTION_MAX_PROGRAMS]);

  /* Queues them: kernels[i] is programs[i]. Everything has been checked. Lengths are known on the
   * device alone, so grids follow from capacity, batch and heads. */
  nyb_status (*launch)(nyb_cuda_scope *scope, const nyb_attention_call *call,
                       const nyb_cuda_kernel *const *kernels, void *workspace, nyb_stream stream);
} nyb_cuda_attention_kernel;

extern const nyb_cuda_attention_kernel nyb_cuda_attention_decode;
extern const nyb_cuda_attention_kernel nyb_cuda_attention_prefill;
extern const nyb_cuda_attention_kernel nyb_cuda_attention_general;
extern const nyb_cuda_attention_kernel nyb_cuda_attention_compat;

/* The first field that says more than a causal mask and one row behind the other: "softcap"; NULL
 * where none does. Of pointers it looks only whether they are NULL. */
const char *nyb_cuda_attention_feature(const nyb_attention *attention);

/* Whether masks, windows or starts, or what is done to scores, are among them; whether tokens have
 * places of their own. */
bool nyb_cuda_attention_is_featured(const nyb_attention *attention);
bool nyb_cuda_attention_is_placed(const nyb_attention *attention);

/* Strides in elements, as descriptors have them, to the bytes that kernels take. */
void nyb_cuda_byte_strides(const int64_t elements[3], int64_t element_bytes, long long bytes[3]);

/* No more tokens than the mask has columns for, and none where there is no page: the host does not
 * see the lengths, which kernels clamp to it. */
int64_t nyb_cuda_attention_room(const nyb_attention *attention);

/* The arguments that every attention kernel needs, with strides in bytes; what is left is 0. */
nyb_attention_arguments nyb_cuda_attention_arguments(const nyb_attention_call *call);

/* Whether base and strides of the codes (scales and biases too where they have any) are multiples
 * of `bytes`; strides of axes of length 1 are not looked at. */
bool nyb_cuda_stored_aligned(const nyb_attention *attention, const nyb_stored *stored,
                             int64_t bytes);
bool nyb_cuda_codes_aligned(const nyb_attention *attention, const nyb_stored *stored,
                            int64_t bytes);

#endif
