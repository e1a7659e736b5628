/* SPDX-License-Identifier: Apache-2.0 */
#ifndef NYB_CUDA_AVAILABILITY_H
#define NYB_CUDA_AVAILABILITY_H

#include <stdbool.h>

/* Whether an NVIDIA driver with a device of compute capability 8.0 or more and NVRTC are found,
 * which are looked for at the first call; *reason (static) says what is missing, or is "". Leaves
 * nyb_last_error() alone. */
bool nyb_cuda_runs_here(const char **reason);

#endif
