/* SPDX-License-Identifier: Apache-2.0 */
#include "placement.h"

#include <stdlib.h>
#include <string.h>

#include "check_device.h"
#include "support.h"

int nyb_device_failed(void) { return nyb_command_failed("%s", device_error()); }

int nyb_placement_open(nyb_backend backend, int32_t device) {
  if (backend == NYB_BACKEND_CPU || device_open(device)) return 0;
  return nyb_device_failed();
}

void nyb_placement_close(nyb_backend backend) {
  if (backend == NYB_BACKEND_CUDA) device_close();
}

int nyb_place_copy(nyb_backend backend, const void *host, int64_t bytes, void **memory) {
  if (backend == NYB_BACKEND_CPU) {
    *memory = nyb_command_allocate(bytes);
    memcpy(*memory, host, (size_t)bytes);
    return 0;
  }
  *memory = device_allocate(bytes);
  if (*memory != NULL && device_upload(*memory, host, bytes, NULL) && device_synchronize(NULL))
    return 0;
  const int status = nyb_device_failed();
  if (*memory != NULL) device_free(*memory);
  *memory = NULL;
  return status;
}

int nyb_place(nyb_backend backend, void **memory, int64_t bytes) {
  if (backend == NYB_BACKEND_CPU) return 0;
  void *host = *memory;
  const int status = nyb_place_copy(backend, host, bytes, memory);
  free(host);
  if (status != 0) *memory = NULL;
  return status;
}

void nyb_release_placed(nyb_backend backend, void *memory) {
  if (backend == NYB_BACKEND_CPU) {
    free(memory);
  } else {
    device_free(memory);
  }
}

int nyb_fill_placed(nyb_backend backend, void *memory, uint8_t value, int64_t bytes) {
  if (backend == NYB_BACKEND_CPU) {
    memset(memory, value, (size_t)bytes);
    return 0;
  }
  return device_fill(memory, value, bytes, NULL) && device_synchronize(NULL) ? 0
                                                                             : nyb_device_failed();
}

int nyb_finish(nyb_backend backend, void *stream) {
  if (backend == NYB_BACKEND_CPU || device_synchronize(stream)) return 0;
  return nyb_device_failed();
}

int nyb_fetch(nyb_backend backend, const void *memory, int64_t bytes, void *host) {
  if (backend == NYB_BACKEND_CPU) {
    memcpy(host, memory, (size_t)bytes);
    return 0;
  }
  return device_download(host, memory, bytes, NULL) && device_synchronize(NULL)
             ? 0
             : nyb_device_failed();
}
