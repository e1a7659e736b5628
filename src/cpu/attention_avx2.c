/* SPDX-License-Identifier: Apache-2.0 */
#include "simd_avx2.h"

#include "attention_kernel.inc.h"
