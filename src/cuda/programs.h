/* SPDX-License-Identifier: Apache-2.0 */
/* The programs of src/cuda/device/, from the one list in programs.inc. */
#ifndef NYB_CUDA_PROGRAMS_H
#define NYB_CUDA_PROGRAMS_H

#include "device.h"

/* Index into nyb_cuda_spec.values: NYB_CUDA_PARAMETER(attention_decode, KEY_BITS). */
#define NYB_CUDA_PARAMETER(name, macro) nyb_cuda_parameter_##name##_##macro

/* nyb_cuda_program_NAME, and its parameters. */
#define NYB_CUDA_PARAMETER_OF(name, macro) NYB_CUDA_PARAMETER(name, macro),
#define P(name, macro) NYB_CUDA_PARAMETER_OF(name, macro)
#define NYB_CUDA_PROGRAM(name, architecture_specific, parameters)                              \
  enum { parameters nyb_cuda_parameter_count_##name };                                         \
  _Static_assert((int)nyb_cuda_parameter_count_##name <= (int)NYB_CUDA_MAX_PARAMETERS, #name); \
  extern const nyb_cuda_program nyb_cuda_program_##name;
#include "programs.inc"
#undef NYB_CUDA_PROGRAM
#undef P

/* All of them, NULL last. */
extern const nyb_cuda_program *const nyb_cuda_programs[];

#endif
