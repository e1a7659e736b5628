/* SPDX-License-Identifier: Apache-2.0 */
#include "programs.h"

#define P(name, macro) #macro,
#define NYB_CUDA_PROGRAM(program, specific, parameter_list)                   \
  extern const char *const nyb_cuda_source_##program[];                       \
  static const char *const parameters_of_##program[] = {parameter_list NULL}; \
  const nyb_cuda_program nyb_cuda_program_##program = {                       \
      .name = #program,                                                       \
      .source = nyb_cuda_source_##program,                                    \
      .parameters = parameters_of_##program,                                  \
      .architecture_specific = specific,                                      \
  };
#include "programs.inc"
#undef NYB_CUDA_PROGRAM
#undef P

const nyb_cuda_program *const nyb_cuda_programs[] = {
#define NYB_CUDA_PROGRAM(program, specific, parameter_list) &nyb_cuda_program_##program,
#include "programs.inc"
#undef NYB_CUDA_PROGRAM
    NULL,
};
