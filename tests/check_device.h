/* SPDX-License-Identifier: Apache-2.0 */
/* An NVIDIA GPU for the checks and the command's own needs: memory, copies, streams, events,
 * graphs, and small programs in PTX. libcuda is loaded at run time (NYBBLE_LIBCUDA names another
 * file), and nothing here touches the library. One device for the process; single-threaded.
 *
 * A function that fails returns false or NULL; device_error() then has the call and the driver's
 * words. Asynchronous calls take a stream; NULL is the default one. */
#ifndef CHECK_DEVICE_H
#define CHECK_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *device_stream;
typedef struct device_graph device_graph;
typedef struct device_event device_event;

typedef struct device_properties {
  char name[128];
  int32_t compute_capability; /* 90 is 9.0 */
  int32_t multiprocessors;
  int64_t l2_bytes, memory_bytes;
} device_properties;

/* Loads the driver and makes the device's primary context current in this thread; again: nothing.
 */
bool device_open(int ordinal);
void device_close(void);
const char *device_error(void);
const device_properties *device_describe(void);

/* ---- Memory: freed addresses and NULL may be freed; allocations are aligned to 256 bytes. -------
 */

void *device_allocate(int64_t bytes);
void device_free(void *memory);
/* Host memory that copies reach without a detour. */
void *device_allocate_host(int64_t bytes);
void device_free_host(void *memory);
int64_t device_free_bytes(void); /* -1 after a failure */

bool device_upload(void *to, const void *from, int64_t bytes, device_stream stream);
bool device_download(void *to, const void *from, int64_t bytes, device_stream stream);
bool device_copy(void *to, const void *from, int64_t bytes, device_stream stream);
bool device_fill(void *to, uint8_t value, int64_t bytes, device_stream stream);

/* ---- Streams, events, graphs ---------------------------------------------------------------- */

bool device_stream_create(device_stream *stream); /* does not wait for the default one */
void device_stream_destroy(device_stream stream);
bool device_synchronize(device_stream stream);

device_event *device_event_create(void);
void device_event_destroy(device_event *event);
bool device_event_record(device_event *event, device_stream stream);
/* Waits for `end`. */
bool device_elapsed_us(device_event *start, device_event *end, double *time_us);

/* What is queued on the stream between the two becomes a graph. */
bool device_capture_begin(device_stream stream);
device_graph *device_capture_end(device_stream stream);
bool device_graph_launch(device_graph *graph, device_stream stream);
void device_graph_destroy(device_graph *graph);

/* ---- Programs ------------------------------------------------------------------------------- */

typedef struct device_program device_program;

/* The kernel `name` of a PTX text. */
device_program *device_program_load(const char *ptx, const char *name);
bool device_program_launch(device_program *program, int64_t blocks, int threads, void **arguments,
                           device_stream stream);

#endif
