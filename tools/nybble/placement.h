/* SPDX-License-Identifier: Apache-2.0 */
/* Memory where a backend's calls want it: the command prepares everything on the host. */
#ifndef NYB_PLACEMENT_H
#define NYB_PLACEMENT_H

#include <stdint.h>

#include "nybble.h"

/* Makes the device current for CUDA; nothing on the CPU. Returns 0, or 1 after a sentence on
 * stderr; so do the others. */
int nyb_placement_open(nyb_backend backend, int32_t device);
void nyb_placement_close(nyb_backend backend);

/* Takes memory from nyb_command_allocate() to the backend, where *memory then lies. */
int nyb_place(nyb_backend backend, void **memory, int64_t bytes);
/* The same, but the host's stays, and its owner's. */
int nyb_place_copy(nyb_backend backend, const void *host, int64_t bytes, void **memory);
void nyb_release_placed(nyb_backend backend, void *memory);
int nyb_fill_placed(nyb_backend backend, void *memory, uint8_t value, int64_t bytes);
/* Waits for all work of a stream. */
int nyb_finish(nyb_backend backend, void *stream);
/* Back to host memory, once all work is done. */
int nyb_fetch(nyb_backend backend, const void *memory, int64_t bytes, void *host);

int nyb_device_failed(void); /* 1, after device_error() on stderr */

#endif
