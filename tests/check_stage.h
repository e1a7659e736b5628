/* SPDX-License-Identifier: Apache-2.0 */
/* The checks' calls on the GPU. A check builds its descriptor over host memory; here every buffer
 * that the descriptor points into is copied to device memory, whole, with its guard bands and its
 * poison, the call runs there on a stream, and every buffer is copied back: a check compares as it
 * does on the CPU, stray writes included. Strides stay as they are. */
#ifndef CHECK_STAGE_H
#define CHECK_STAGE_H

#include "check.h"
#include "check_device.h"

typedef enum stage_placement {
  STAGE_AS_ON_HOST, /* as far from a multiple of 256 bytes as on the host: 4 bytes' alignment */
  STAGE_ALIGNED,    /* data at multiples of 256 bytes */
  STAGE_SEPARATE /* each buffer an allocation of its own, to the byte and without guard bands, and
                    the workspace never written: for compute-sanitizer */
} stage_placement;

/* The functions of a check_library for a CUDA context, once check_stage_open() was called. */
extern const check_library check_staged;

bool check_stage_open(int ordinal); /* opens the device; check_error() says why not */
void check_stage_close(void);
void check_stage_place(stage_placement placement); /* of the calls to come; SEPARATE stays */

/* Gives the call addresses with the alignment that they will have on the device, for a plan. */
void check_stage_pretend(nyb_attention *call);

/* For checks that hold a call's device side in hand: they make it, run it as they like, any number
 * of times, and take it back. The descriptor that comes back points to device memory; the workspace
 * is the scene's size. */
typedef struct staged_attention {
  nyb_attention call;
  void *workspace;
  size_t workspace_bytes;
  int32_t *lengths; /* on the device */
} staged_attention;

bool check_stage_attention(const nyb_attention *call, void *workspace, size_t workspace_bytes,
                           staged_attention *staged);
bool check_stage_take_back(void); /* waits, and copies everything back */
device_stream check_stage_stream(void);

#endif
