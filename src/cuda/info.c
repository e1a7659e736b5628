/* SPDX-License-Identifier: Apache-2.0 */
/* nyb_cuda_get_info: what is found on this machine. */
#include <stdio.h>

#include "../context.h"
#include "availability.h"
#include "jit.h"

static void describe_device(const nyb_cuda_driver *driver, int32_t ordinal, nyb_cuda_info *info) {
  static _Thread_local char name[128];
  nyb_cu_device device;
  int major = 0, minor = 0, multiprocessors = 0;
  size_t bytes = 0;
  const bool good = driver->DeviceGet(&device, ordinal) == NYB_CU_SUCCESS &&
                    driver->DeviceGetName(name, sizeof name, device) == NYB_CU_SUCCESS &&
                    driver->DeviceTotalMem(&bytes, device) == NYB_CU_SUCCESS &&
                    driver->DeviceGetAttribute(&major, NYB_CU_DEVICE_COMPUTE_CAPABILITY_MAJOR,
                                               device) == NYB_CU_SUCCESS &&
                    driver->DeviceGetAttribute(&minor, NYB_CU_DEVICE_COMPUTE_CAPABILITY_MINOR,
                                               device) == NYB_CU_SUCCESS &&
                    driver->DeviceGetAttribute(&multiprocessors, NYB_CU_DEVICE_MULTIPROCESSOR_COUNT,
                                               device) == NYB_CU_SUCCESS;
  if (!good) return;
  info->device_name = name;
  info->compute_capability = 10 * major + minor;
  info->multiprocessors = multiprocessors;
  info->memory_bytes = (int64_t)bytes;
}

nyb_status nyb_cuda_get_info(int32_t device, nyb_cuda_info *info) {
  if (info == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "info is NULL; it must point to an nyb_cuda_info");
  }
  const nyb_status status = nyb_check_struct("info", NULL, info->struct_size, sizeof *info);
  if (status != NYB_OK) return status;
  nyb_cuda_info found = {.struct_size = info->struct_size};
  const nyb_cuda_driver *driver = nyb_cuda_driver_find(&found.reason);
  if (driver != NULL && (device < 0 || device >= driver->device_count)) {
    return nyb_fail(NYB_ERROR_VALUE, "device is %d; there are devices 0 to %d", (int)device,
                    (int)driver->device_count - 1);
  }
  found.available = nyb_cuda_runs_here(&found.reason);
  found.nvrtc_version = nyb_nvrtc_version();
  found.nvrtc_library = nyb_nvrtc_library();
  found.cache_directory = nyb_cuda_cache_directory();
  nyb_cuda_cache_usage(&found.cached_kernels, &found.cached_bytes);
  found.device_name = "";
  if (driver != NULL) {
    found.driver_version = driver->version;
    found.device_count = driver->device_count;
    describe_device(driver, device, &found);
  }
  *info = found;
  return NYB_OK;
}
