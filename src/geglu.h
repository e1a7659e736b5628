/* SPDX-License-Identifier: Apache-2.0 */
#ifndef NYB_GEGLU_H
#define NYB_GEGLU_H

#include <stdint.h>

#include "nybble.h"

/* The reference: the steps of docs/numerics.md, section 4, one after the other. out may be gate or
 * up. */
void nyb_geglu_compat(nyb_dtype dtype, const void *gate, const void *up, void *out, int64_t count);

#endif
