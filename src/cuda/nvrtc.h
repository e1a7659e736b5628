/* SPDX-License-Identifier: Apache-2.0 */
/* NVRTC's functions, as far as they are used; see jit.h for how it is found. */
#ifndef NYB_CUDA_NVRTC_H
#define NYB_CUDA_NVRTC_H

#include <stddef.h>

typedef int nyb_nvrtc_result; /* nvrtcResult */
enum { NYB_NVRTC_SUCCESS = 0, NYB_NVRTC_ERROR_OUT_OF_MEMORY = 1, NYB_NVRTC_ERROR_COMPILATION = 6 };

typedef struct nyb_nvrtc_program_opaque *nyb_nvrtc_program;

typedef struct nyb_nvrtc {
#define NYB_NVRTC_FUNCTIONS(F)                                                            \
  F(nyb_nvrtc_result, Version, (int *major, int *minor))                                  \
  F(const char *, GetErrorString, (nyb_nvrtc_result result))                              \
  F(nyb_nvrtc_result, GetNumSupportedArchs, (int *count))                                 \
  F(nyb_nvrtc_result, GetSupportedArchs, (int *architectures))                            \
  F(nyb_nvrtc_result, CreateProgram,                                                      \
    (nyb_nvrtc_program * program, const char *source, const char *name, int header_count, \
     const char *const *headers, const char *const *header_names))                        \
  F(nyb_nvrtc_result, DestroyProgram, (nyb_nvrtc_program * program))                      \
  F(nyb_nvrtc_result, CompileProgram,                                                     \
    (nyb_nvrtc_program program, int option_count, const char *const *options))            \
  F(nyb_nvrtc_result, GetCUBINSize, (nyb_nvrtc_program program, size_t * bytes))          \
  F(nyb_nvrtc_result, GetCUBIN, (nyb_nvrtc_program program, char *cubin))                 \
  F(nyb_nvrtc_result, GetProgramLogSize, (nyb_nvrtc_program program, size_t * bytes))     \
  F(nyb_nvrtc_result, GetProgramLog, (nyb_nvrtc_program program, char *log))
#define NYB_NVRTC_MEMBER(result, name, arguments) result(*name) arguments;
  NYB_NVRTC_FUNCTIONS(NYB_NVRTC_MEMBER)
#undef NYB_NVRTC_MEMBER
} nyb_nvrtc;

/* NULL where there is none: nyb_nvrtc_find() says why. */
const nyb_nvrtc *nyb_nvrtc_functions(void);

#endif
