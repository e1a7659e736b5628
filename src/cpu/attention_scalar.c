/* SPDX-License-Identifier: Apache-2.0 */
#include "simd_scalar.h"

#include "attention_kernel.inc.h"
