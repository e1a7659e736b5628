/* SPDX-License-Identifier: Apache-2.0 */
/* What quantize, dequantize and append tell their kernels of rows. */
#ifndef NYB_CUDA_ROWS_H
#define NYB_CUDA_ROWS_H

#include "../format.h"
#include "device.h"
#include "device/portable.cuh"
#include "device/quantize_arguments.h"

/* Checked rows of shape[0] x shape[1] x shape[2], seen by the device. */
nyb_device_rows nyb_cuda_rows_of(const nyb_input *floats, const nyb_stored *stored,
                                 const nyb_row_layout *layout, const int64_t shape[3], int64_t dim);

static inline int64_t nyb_quotient_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

#endif
