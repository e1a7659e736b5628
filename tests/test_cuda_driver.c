/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend without a GPU: drivers and compilers that are missing, old or broken; CUDA
 * contexts; pointers; kernels and launches. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../src/cuda/device.h"
#include "../src/cuda/jit.h"
#include "fake_cuda/open.h"

/* ---- Help ----------------------------------------------------------------------------------- */

static const char *const source[] = {"extern \"C\" __global__ void ", "probe() {}\n", NULL};
static const char *const parameters[] = {"BITS", "GROUP", NULL};
static const nyb_cuda_program probe = {"probe", source, parameters, false};
static const nyb_cuda_program specific = {"probe", source, parameters, true};

static fake_cuda_library fake;

static void open_fakes(void) { fake = fake_cuda_open("fake_cuda", "fake_nvrtc"); }

static void fail_call(const char *call, nyb_cu_result result) {
  fake.cuda->fail_result = result;
  fake.cuda->fail_after = 0;
  fake.cuda->fail_call = call;
}

static nyb_status create_on(int32_t device, nyb_context **context) {
  const nyb_context_options options = {
      .struct_size = sizeof options, .backend = NYB_BACKEND_CUDA, .device = device};
  return nyb_context_create(&options, context);
}

static nyb_context *created(int32_t device) {
  nyb_context *context = NULL;
  MUST(create_on(device, &context) == NYB_OK);
  return context;
}

static nyb_cuda_spec spec_of(const nyb_cuda_program *program, int32_t bits) {
  return (nyb_cuda_spec){.program = program, .values = {bits, 64}};
}

static nyb_status get_kernel(nyb_cuda_scope *scope, int32_t bits, const nyb_cuda_kernel **kernel) {
  const nyb_cuda_spec spec = spec_of(&probe, bits);
  return nyb_cuda_kernel_get(scope, &spec, 128, 1024, kernel);
}

/* ---- No driver, or none that will do -------------------------------------------------------- */

/* The context says so, and so do the kernels and the info, without a word to nyb_last_error(). */
static void must_be_unsupported(const char *words) {
  nyb_context *context = NULL;
  MUST(create_on(-1, &context) == NYB_ERROR_UNSUPPORTED && context == NULL);
  char sentence[512];
  snprintf(sentence, sizeof sentence, "%s", nyb_last_error());
  if (strstr(sentence, words) == NULL) fprintf(stderr, "not \"%s\"\n", words);
  MUST(strstr(sentence, words) != NULL);
  MUST(strncmp(sentence, "CUDA ", 5) == 0);
  int64_t cuda_kernels = 0;
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    MUST(nyb_kernel_at(NULL, i, &kernel) == NYB_OK);
    if (kernel.isa != NYB_ISA_CUDA) continue;
    cuda_kernels++;
    MUST(!kernel.runs_here && strcmp(kernel.reason, sentence + 5) == 0);
  }
  MUST(cuda_kernels > 0);
  nyb_cuda_info info = NYB_CUDA_INFO_INIT;
  MUST(nyb_cuda_get_info(0, &info) == NYB_OK);
  MUST(!info.available && strcmp(info.reason, sentence + 5) == 0);
  MUST(strcmp(nyb_last_error(), sentence) == 0);
}

static void no_driver(void) {
  open_fakes();
  setenv("NYBBLE_LIBCUDA", "/nowhere/libcuda.so.1", 1);
  must_be_unsupported("needs an NVIDIA driver: /nowhere/libcuda.so.1");
}

static void driver_without_a_function(void) {
  fake = fake_cuda_open("fake_cuda_old", "fake_nvrtc");
  must_be_unsupported("has no cuLaunchKernelEx");
}

static void driver_that_does_not_start(void) {
  open_fakes();
  fail_call("cuInit", 100);
  must_be_unsupported(
      "cuInit failed with 100, CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected");
}

static void driver_with_an_unknown_error(void) {
  open_fakes();
  fail_call("cuInit", 12345);
  must_be_unsupported("cuInit failed with 12345, unknown error: the driver has no words for it");
}

static void driver_without_a_version(void) {
  open_fakes();
  fail_call("cuDriverGetVersion", 1);
  must_be_unsupported("cuDriverGetVersion failed with 1");
}

static void driver_too_old(void) {
  open_fakes();
  fake.cuda->version = 11070;
  must_be_unsupported("is of 11.7");
}

static void driver_that_does_not_count(void) {
  open_fakes();
  fail_call("cuDeviceGetCount", 1);
  must_be_unsupported("cuDeviceGetCount failed with 1");
}

static void driver_without_devices(void) {
  open_fakes();
  fake.cuda->device_count = 0;
  must_be_unsupported("needs an NVIDIA GPU: the driver finds none");
}

static void driver_that_gives_no_device(void) {
  open_fakes();
  fail_call("cuDeviceGet", 101);
  must_be_unsupported("cuDeviceGet failed with 101");
}

static void driver_without_attributes(void) {
  open_fakes();
  fail_call("cuDeviceGetAttribute", 1);
  must_be_unsupported("cuDeviceGetAttribute failed with 1");
}

static void devices_too_old(void) {
  open_fakes();
  fake.cuda->compute_capability[0] = 75;
  must_be_unsupported("compute capability 8.0 or more; the best here has 7.5");
}

static void no_nvrtc(void) {
  open_fakes();
  setenv("NYBBLE_NVRTC", "/nowhere/libnvrtc.so", 1);
  must_be_unsupported("needs NVRTC (NYBBLE_NVRTC): /nowhere/libnvrtc.so");
}

static void nvrtc_without_a_function(void) {
  fake = fake_cuda_open("fake_cuda", "fake_nvrtc_old");
  must_be_unsupported("has no nvrtcGetCUBIN");
}

static void nvrtc_without_a_version(void) {
  open_fakes();
  fake.nvrtc->fail_call = "nvrtcVersion";
  fake.nvrtc->fail_result = 5;
  must_be_unsupported("nvrtcVersion of ");
}

static void nvrtc_too_old(void) {
  open_fakes();
  fake.nvrtc->version = 11070;
  must_be_unsupported("is of 11.7");
}

static void nvrtc_too_new(void) {
  open_fakes();
  fake.nvrtc->version = 14020;
  must_be_unsupported("needs NVRTC of the driver's major version, 13, or an earlier one");
}

static void nvrtc_nowhere(void) {
  open_fakes();
  unsetenv("NYBBLE_NVRTC");
  const char *reason;
  if (nyb_nvrtc_find(&reason)) return; /* this machine has one */
  must_be_unsupported("NYBBLE_NVRTC can name the file");
}

static void test_unsupported(void **state) {
  (void)state;
  void (*const scenarios[])(void) = {
      no_driver,
      driver_without_a_function,
      driver_that_does_not_start,
      driver_with_an_unknown_error,
      driver_without_a_version,
      driver_too_old,
      driver_that_does_not_count,
      driver_without_devices,
      driver_that_gives_no_device,
      driver_without_attributes,
      devices_too_old,
      no_nvrtc,
      nvrtc_without_a_function,
      nvrtc_without_a_version,
      nvrtc_too_old,
      nvrtc_too_new,
      nvrtc_nowhere,
  };
  int good = 0;
  const int count = sizeof scenarios / sizeof scenarios[0];
  for (int i = 0; i < count; i++) good += in_child(scenarios[i]);
  assert_int_equal(good, count);
}

/* ---- Contexts of the library ---------------------------------------------------------------- */

static void options_of_contexts(void) {
  open_fakes();
  nyb_context *context = NULL;
  nyb_context_options options = {
      .struct_size = sizeof options, .backend = NYB_BACKEND_CUDA, .threads = 7};
  setenv("NYBBLE_ISA", "no such ISA", 1);
  MUST(nyb_context_create(&options, &context) == NYB_OK);
  MUST(nyb_context_isa(context) == NYB_ISA_CUDA);
  MUST(nyb_context_backend(context) == NYB_BACKEND_CUDA);
  MUST(nyb_context_threads(context) == 1);
  nyb_context_destroy(context);
  unsetenv("NYBBLE_ISA");
  context = NULL;

  options.isa = NYB_ISA_AVX2;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_VALUE, "must be NYB_ISA_AUTO");
  options.isa = NYB_ISA_AUTO;
  options.device = 1;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_VALUE, "options.device is 1");
  options.device = -1;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_VALUE, "options.device is -1");
  options.device = 0;
  options.threads = -1;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_VALUE, "options.threads is -1");
  options.threads = 0;
  options.device_allocator.release = (void (*)(void *, void *))(void (*)(void))abort;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_NULL, "options.device_allocator");
  options.device_allocator.release = NULL;
  options.backend = (nyb_backend)2;
  MUST_FAIL(nyb_context_create(&options, &context), NYB_ERROR_ENUM, "options.backend is 2");
  MUST(context == NULL);
}

static void info_of_devices(void) {
  open_fakes();
  fake.cuda->device_count = 2;
  nyb_cuda_info info = NYB_CUDA_INFO_INIT;
  MUST(nyb_cuda_get_info(1, &info) == NYB_OK);
  MUST(info.available && info.reason[0] == '\0' && info.device_count == 2);
  MUST(info.driver_version == 13000 && info.nvrtc_version == 13000);
  MUST(strstr(info.nvrtc_library, "fake_nvrtc") != NULL);
  MUST(strcmp(info.device_name, "Fake GPU") == 0 && info.compute_capability == 80);
  MUST(info.multiprocessors == 132 && info.memory_bytes == INT64_C(1) << 34);
  MUST_FAIL(nyb_cuda_get_info(2, &info), NYB_ERROR_VALUE, "device is 2");
  MUST_FAIL(nyb_cuda_get_info(-1, &info), NYB_ERROR_VALUE, "device is -1");
  MUST_FAIL(nyb_cuda_get_info(0, NULL), NYB_ERROR_NULL, "info is NULL");
  info.struct_size = 8;
  MUST_FAIL(nyb_cuda_get_info(0, &info), NYB_ERROR_STRUCT_SIZE, "info.struct_size is 8");
  info.struct_size = sizeof info;
  fail_call("cuDeviceGetName", 1);
  MUST(nyb_cuda_get_info(0, &info) == NYB_OK);
  MUST(info.available && info.device_name[0] == '\0' && info.memory_bytes == 0);
}

static void every_kernel_runs(void) {
  open_fakes();
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    MUST(nyb_kernel_at(NULL, i, &kernel) == NYB_OK);
    if (kernel.isa == NYB_ISA_CUDA) MUST(kernel.runs_here && kernel.reason[0] == '\0');
  }
}

static void test_contexts(void **state) {
  (void)state;
  assert_true(in_child(options_of_contexts));
  assert_true(in_child(info_of_devices));
  assert_true(in_child(every_kernel_runs));
}

/* ---- CUDA contexts -------------------------------------------------------------------------- */

static void primary_context(void) {
  open_fakes();
  fake.cuda->device_count = 2;
  nyb_context *context = created(1);
  for (int i = 0; i < 3; i++) {
    nyb_cuda_scope scope;
    nyb_cu_context current = NULL;
    MUST(nyb_cuda_enter(context, &scope) == NYB_OK && scope.pushed);
    MUST(scope.properties->ordinal == 1 && scope.properties->compute_capability == 80);
    MUST(scope.properties->multiprocessors == 132 && scope.properties->l2_bytes == 50 << 20);
    MUST(scope.driver->CtxGetCurrent(&current) == 0 && current != NULL);
    nyb_cuda_leave(&scope);
    MUST(scope.driver->CtxGetCurrent(&current) == 0 && current == NULL);
  }
  MUST(fake.calls("cuDevicePrimaryCtxRetain") == 1);
  MUST(fake.calls("cuDevicePrimaryCtxRelease") == 0);
  nyb_context_destroy(context);
}

/* Each of the calls in the way of a first entry fails once; then all is well. */
static void entry_fails(void) {
  open_fakes();
  static const char *const calls[] = {
      "cuCtxGetCurrent", "cuDeviceGet",    "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
      "cuCtxGetId",      "cuCtxGetDevice", "cuDeviceGetAttribute"};
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    char words[64];
    snprintf(words, sizeof words, "%s failed with 709, CUDA_ERROR_CONTEXT_IS_DESTROYED", calls[i]);
    fail_call(calls[i], 709);
    MUST_FAIL(nyb_cuda_enter(context, &scope), NYB_ERROR_DEVICE, words);
    fake.cuda->fail_call = NULL;
    nyb_cu_context current = NULL;
    MUST(scope.driver->CtxGetCurrent(&current) == 0 && current == NULL);
  }
  fail_call("cuDevicePrimaryCtxRetain", 2);
  nyb_context *other = created(0);
  MUST(nyb_cuda_enter(other, &scope) == NYB_OK); /* retained before, not asked again */
  nyb_cuda_leave(&scope);
  nyb_context_destroy(other);
  nyb_context_destroy(context);
}

static void out_of_memory_is_said(void) {
  open_fakes();
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  fail_call("cuDevicePrimaryCtxRetain", 2);
  MUST_FAIL(nyb_cuda_enter(context, &scope), NYB_ERROR_OUT_OF_MEMORY,
            "cuDevicePrimaryCtxRetain failed with 2, CUDA_ERROR_OUT_OF_MEMORY: out of memory");
  nyb_context_destroy(context);
}

/* The caller's current context is worked in, whichever device it is of. */
static void callers_context(void) {
  open_fakes();
  fake.cuda->device_count = 3;
  nyb_context *context = created(0);
  const nyb_cuda_driver *driver;
  nyb_cuda_scope scope;
  nyb_cu_context first, second, current;
  MUST(nyb_cuda_driver_load(&driver) == NYB_OK);
  MUST(driver->CtxCreate(&first, 0, 1) == 0);
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK && !scope.pushed);
  MUST(scope.properties->ordinal == 1);
  const nyb_cuda_device *device = scope.device;
  nyb_cuda_leave(&scope);
  MUST(driver->CtxGetCurrent(&current) == 0 && current == first);
  MUST(driver->CtxCreate(&second, 0, 1) == 0); /* another context of the same device */
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK && scope.device != device);
  nyb_cuda_leave(&scope);
  MUST(driver->CtxSetCurrent(first) == 0);
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK && scope.device == device);
  nyb_cuda_leave(&scope);
  MUST(driver->CtxCreate(&second, 0, 2) == 0); /* 7.5 */
  MUST_FAIL(nyb_cuda_enter(context, &scope), NYB_ERROR_UNSUPPORTED,
            "CUDA device 2 has compute capability 7.5");
  nyb_context_destroy(context);
}

static void destroyed_context(void) {
  open_fakes();
  fake.cuda->reuses_contexts = true;
  nyb_context *context = created(0);
  const nyb_cuda_driver *driver;
  nyb_cuda_scope scope;
  nyb_cu_context first, second;
  const nyb_cuda_kernel *kernel = NULL, *again = NULL;
  MUST(nyb_cuda_driver_load(&driver) == NYB_OK);
  MUST(driver->CtxCreate(&first, 0, 0) == 0);
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  const nyb_cuda_home home = nyb_cuda_home_of(&scope);
  const nyb_cuda_device *device = scope.device;
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
  nyb_cuda_leave(&scope);
  MUST(nyb_cuda_enter_home(context, &home, &scope) == NYB_OK && !scope.pushed);
  nyb_cuda_leave(&scope);

  MUST(driver->CtxDestroy(first) == 0);
  MUST_FAIL(nyb_cuda_enter_home(context, &home, &scope), NYB_ERROR_DEVICE,
            "cuCtxGetId failed with 709, CUDA_ERROR_CONTEXT_IS_DESTROYED");
  MUST(driver->CtxSetCurrent(first) == 0); /* as a thread that does not know yet has it */
  MUST_FAIL(nyb_cuda_enter(context, &scope), NYB_ERROR_DEVICE, "CUDA_ERROR_CONTEXT_IS_DESTROYED");
  MUST(driver->CtxSetCurrent(NULL) == 0);

  MUST(driver->CtxCreate(&second, 0, 0) == 0);
  MUST(second == first); /* the address again, but another context */
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK && scope.device != device);
  MUST(get_kernel(&scope, 4, &again) == NYB_OK && again != kernel);
  MUST(again->function != kernel->function);
  nyb_cuda_leave(&scope);
  MUST_FAIL(nyb_cuda_enter_home(context, &home, &scope), NYB_ERROR_DEVICE, "has been destroyed");
  nyb_context_destroy(context);
}

/* Home is entered from another context, or from none, and left again. */
static void home(void) {
  open_fakes();
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  nyb_cu_context other, current;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  const nyb_cuda_home primary = nyb_cuda_home_of(&scope);
  const nyb_cuda_device *device = scope.device;
  nyb_cuda_leave(&scope);
  MUST(nyb_cuda_enter_home(context, &primary, &scope) == NYB_OK && scope.pushed);
  MUST(scope.device == device);
  nyb_cuda_leave(&scope);
  MUST(scope.driver->CtxGetCurrent(&current) == 0 && current == NULL);
  MUST(scope.driver->CtxCreate(&other, 0, 0) == 0);
  MUST(nyb_cuda_enter_home(context, &primary, &scope) == NYB_OK && scope.pushed);
  nyb_cuda_leave(&scope);
  MUST(scope.driver->CtxGetCurrent(&current) == 0 && current == other);
  static const char *const calls[] = {"cuCtxGetCurrent", "cuCtxGetId", "cuCtxPushCurrent"};
  for (int i = 0; i < 3; i++) {
    fail_call(calls[i], 1);
    MUST_FAIL(nyb_cuda_enter_home(context, &primary, &scope), NYB_ERROR_DEVICE, calls[i]);
    fake.cuda->fail_call = NULL;
    MUST(scope.driver->CtxGetCurrent(&current) == 0 && current == other);
  }
  nyb_context_destroy(context);
}

/* A driver before CUDA 12 has no ids of contexts. */
static void driver_without_ids(void) {
  fake = fake_cuda_open("fake_cuda_11", "fake_nvrtc");
  fake.cuda->version = 11080;
  fake.nvrtc->version = 11080;
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  const nyb_cuda_kernel *kernel;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK && scope.driver->CtxGetId == NULL);
  const nyb_cuda_home primary = nyb_cuda_home_of(&scope);
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
  nyb_cuda_leave(&scope);
  MUST(nyb_cuda_enter_home(context, &primary, &scope) == NYB_OK);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

static void test_cuda_contexts(void **state) {
  (void)state;
  assert_true(in_child(primary_context));
  assert_true(in_child(entry_fails));
  assert_true(in_child(out_of_memory_is_said));
  assert_true(in_child(callers_context));
  assert_true(in_child(destroyed_context));
  assert_true(in_child(home));
  assert_true(in_child(driver_without_ids));
}

/* ---- Pointers and streams ------------------------------------------------------------------- */

static void pointers(void) {
  open_fakes();
  fake.cuda->device_count = 2;
  nyb_context *context = created(0);
  const nyb_cuda_driver *driver;
  nyb_cuda_scope scope;
  nyb_cu_context other_context;
  nyb_cu_address here, elsewhere;
  void *pinned;
  int on_stack = 0;
  MUST(nyb_cuda_driver_load(&driver) == NYB_OK);
  MUST(driver->CtxCreate(&other_context, 0, 1) == 0);
  MUST(driver->MemAlloc(&elsewhere, 100) == 0);
  MUST(driver->CtxSetCurrent(NULL) == 0);
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  MUST(driver->MemAlloc(&here, 100) == 0 && driver->MemAllocHost(&pinned, 100) == 0);
  MUST(nyb_cuda_check_pointer(&scope, "attention.q", "data", NULL) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention.q", "data", (void *)here) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention.q", "data", (void *)(here + 99)) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention.q", "data", pinned) == NYB_OK);
  MUST_FAIL(nyb_cuda_check_pointer(&scope, "attention.q", "data", &on_stack), NYB_ERROR_POINTER,
            "attention.q.data is 0x");
  MUST_FAIL(nyb_cuda_check_pointer(&scope, "workspace", "", &on_stack), NYB_ERROR_POINTER,
            "workspace is 0x");
  MUST_FAIL(nyb_cuda_check_pointer(&scope, "attention.q", "data", (void *)elsewhere),
            NYB_ERROR_POINTER, "memory of another device");
  fail_call("cuPointerGetAttributes", 1);
  MUST_FAIL(nyb_cuda_check_pointer(&scope, "attention.q", "data", (void *)here), NYB_ERROR_DEVICE,
            "cuPointerGetAttributes failed with 1, CUDA_ERROR_INVALID_VALUE");
  fake.cuda->fail_call = NULL;

  int stream = 0;
  bool capturing = true;
  MUST(nyb_cuda_capturing(&scope, &stream, &capturing) == NYB_OK && !capturing);
  fake.cuda->capturing = &stream;
  MUST(nyb_cuda_capturing(&scope, &stream, &capturing) == NYB_OK && capturing);
  MUST(nyb_cuda_capturing(&scope, NULL, &capturing) == NYB_OK && !capturing);
  fail_call("cuStreamIsCapturing", 1);
  MUST_FAIL(nyb_cuda_capturing(&scope, NULL, &capturing), NYB_ERROR_DEVICE, "cuStreamIsCapturing");
  fake.cuda->fail_call = NULL;
  MUST(driver->MemFree(here) == 0 && driver->MemFreeHost(pinned) == 0);
  MUST(driver->MemFree(elsewhere) == 0);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

/* A device that reads host memory by its plain address (HMM) is not kept from it. */
static void device_that_reads_host_memory(void) {
  open_fakes();
  fake.cuda->reads_host_memory = true;
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  int on_stack = 0;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention.q", "data", &on_stack) == NYB_OK);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

static void test_pointers(void **state) {
  (void)state;
  assert_true(in_child(pointers));
  assert_true(in_child(device_that_reads_host_memory));
}

/* ---- Kernels -------------------------------------------------------------------------------- */

static void kernels_are_kept(void) {
  open_fakes();
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  const nyb_cuda_kernel *kernel = NULL, *again = NULL, *other = NULL;
  const nyb_cuda_spec spec = spec_of(&probe, 4);
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
  MUST(fake.nvrtc->compilations == 1 && fake.cuda->modules_loaded == 1);
  MUST(strcmp(fake.nvrtc->last_options,
              "--gpu-architecture=sm_90 --std=c++17 --define-macro=BITS=4 "
              "--define-macro=GROUP=64 ") == 0);
  MUST(strcmp(fake.nvrtc->last_source, "extern \"C\" __global__ void probe() {}\n") == 0);
  MUST(strcmp(kernel->name, "probe") == 0 && kernel->registers == 128);
  MUST(kernel->threads == 128 && kernel->dynamic_shared_bytes == 1024);
  MUST(kernel->blocks_per_multiprocessor == 2);
  MUST(get_kernel(&scope, 4, &again) == NYB_OK && again == kernel);
  MUST(get_kernel(&scope, 8, &other) == NYB_OK && other != kernel);
  MUST(nyb_cuda_kernel_get(&scope, &spec, 256, 1024, &other) == NYB_OK && other != kernel);
  MUST(nyb_cuda_kernel_get(&scope, &spec, 128, 0, &other) == NYB_OK && other != kernel);
  MUST(nyb_cuda_kernel_get(&scope, &spec, 128, 1024, &other) == NYB_OK && other == kernel);
  MUST(fake.cuda->modules_loaded == 4);
  int mode = 0; /* of capturing, which loading changes for itself alone */
  MUST(scope.driver->ThreadExchangeStreamCaptureMode(&mode) == 0 && mode == 0);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

static void loading_fails(void) {
  open_fakes();
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  const nyb_cuda_kernel *kernel = NULL;
  static const char *const calls[] = {"cuThreadExchangeStreamCaptureMode",
                                      "cuModuleLoadDataEx",
                                      "cuModuleGetFunction",
                                      "cuFuncGetAttribute",
                                      "cuFuncSetAttribute",
                                      "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    char words[96];
    fail_call(calls[i], 500);
    snprintf(words, sizeof words, "failed with 500, CUDA_ERROR_NOT_FOUND");
    MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_DEVICE, words);
    MUST(strstr(nyb_last_error(), calls[i]) != NULL);
    if (i > 0) MUST(strstr(nyb_last_error(), "of the CUDA kernel probe") != NULL);
    fail_call(calls[i], 2);
    MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_OUT_OF_MEMORY, calls[i]);
    fake.cuda->fail_call = NULL;
    MUST(fake.cuda->modules_loaded == 0);
  }
  fake.cuda->blocks_per_multiprocessor = 0;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_UNSUPPORTED,
            "probe (128 threads, 128 registers, 0 + 1024 bytes of shared memory) does not fit");
  fake.cuda->blocks_per_multiprocessor = 1;
  const nyb_cuda_spec spec = spec_of(&probe, 4);
  MUST_FAIL(nyb_cuda_kernel_get(&scope, &spec, 128, 1 << 20, &kernel), NYB_ERROR_DEVICE,
            "cuFuncSetAttribute of the CUDA kernel probe failed with 1");
  MUST(fake.cuda->modules_loaded == 0 && kernel == NULL);
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK && fake.cuda->modules_loaded == 1);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

static void compiling_fails(void) {
  open_fakes();
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  nyb_context *context = created(0);
  nyb_cuda_scope scope;
  const nyb_cuda_kernel *kernel = NULL;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  fake.nvrtc->fail_call = "nvrtcCompileProgram";
  fake.nvrtc->fail_result = 6;
  fake.nvrtc->log = "probe.cu(1): warning: unused\nprobe.cu(3): error: no BITS\n1 error detected\n";
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE,
            "the CUDA kernel probe could not be compiled by ");
  MUST(strstr(nyb_last_error(), ": probe.cu(3): error: no BITS") != NULL);
  MUST(strchr(nyb_last_error(), '\n') == NULL);
  fake.nvrtc->log = "something is wrong";
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE, "something is wrong");
  fake.nvrtc->log = NULL;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE, "the compiler left no word");
  fake.nvrtc->fail_result = 11;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE,
            "nvrtcCompileProgram of the CUDA kernel probe failed with 11: NVRTC_ERROR_OTHER");
  fake.nvrtc->fail_result = 1;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_OUT_OF_MEMORY, "nvrtcCompileProgram");
  static const char *const calls[] = {"nvrtcCreateProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"};
  for (int i = 0; i < 3; i++) {
    fake.nvrtc->fail_call = calls[i];
    fake.nvrtc->fail_result = 3;
    MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE, calls[i]);
  }
  fake.nvrtc->fail_call = NULL;
  fake.nvrtc->empty_cubin = true;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE, "made no machine code");
  fake.nvrtc->empty_cubin = false;
  MUST(kernel == NULL && fake.cuda->modules_loaded == 0);
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

static void architectures(void) {
  open_fakes();
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  nyb_context *context = created(0);
  const nyb_cuda_spec spec = spec_of(&probe, 4), of_specific = spec_of(&specific, 4);
  const struct {
    const nyb_cuda_spec *spec;
    int32_t compute_capability;
    const char *option;
  } cases[] = {
      {&spec, 80, "=sm_80 "},         {&spec, 86, "=sm_80 "},   {&spec, 90, "=sm_90 "},
      {&of_specific, 90, "=sm_90a "}, {&spec, 120, "=sm_120 "}, {&of_specific, 120, "=sm_120 "},
      {&of_specific, 80, "=sm_80 "},  {&spec, 121, "=sm_120 "},
  };
  nyb_cuda_binary binary;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    MUST(nyb_cuda_compile(context, cases[i].spec, cases[i].compute_capability, &binary, NULL, 0) ==
         NYB_OK);
    nyb_release(context, binary.cubin);
    MUST(strstr(fake.nvrtc->last_options, cases[i].option) != NULL);
  }
  fake.nvrtc->newest_architecture = 90;
  MUST_FAIL(nyb_cuda_compile(context, &spec, 120, &binary, NULL, 0), NYB_ERROR_UNSUPPORTED,
            "needs an NVRTC that knows compute capability 12.0");
  fake.nvrtc->fail_call = "nvrtcGetNumSupportedArchs"; /* then it is asked for what is there */
  fake.nvrtc->fail_result = 3;
  MUST(nyb_cuda_compile(context, &spec, 120, &binary, NULL, 0) == NYB_OK);
  nyb_release(context, binary.cubin);
  fake.nvrtc->fail_call = NULL;
  char log[16];
  fake.nvrtc->log = "ptxas info: Used 40 registers";
  MUST(nyb_cuda_compile(context, &spec, 90, &binary, log, sizeof log) == NYB_OK);
  nyb_release(context, binary.cubin);
  MUST(strcmp(log, "ptxas info: Use") == 0);
  MUST(strstr(fake.nvrtc->last_options, "--ptxas-options=-v") != NULL);
  nyb_context_destroy(context);
}

/* An allocator that has no memory from the n-th request on. */
static int64_t requests_left;

static void *scarce_allocate(void *data, size_t bytes, size_t alignment) {
  (void)data;
  if (requests_left-- <= 0) return NULL;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void scarce_release(void *data, void *memory) {
  (void)data;
  free(memory);
}

static void no_memory_to_compile(void) {
  open_fakes();
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  const nyb_context_options options = {.struct_size = sizeof options,
                                       .backend = NYB_BACKEND_CUDA,
                                       .allocator = {scarce_allocate, scarce_release, NULL}};
  nyb_context *context = NULL;
  requests_left = 1;
  MUST(nyb_context_create(&options, &context) == NYB_OK);
  nyb_cuda_scope scope;
  const nyb_cuda_kernel *kernel = NULL;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  for (int64_t have = 0; have < 2; have++) { /* for the source, then for the cubin */
    requests_left = have;
    MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_OUT_OF_MEMORY, "the allocator had no ");
  }
  fake.nvrtc->fail_call = "nvrtcCompileProgram"; /* no memory for the compiler's words */
  fake.nvrtc->fail_result = 6;
  fake.nvrtc->log = "an error";
  requests_left = 1;
  MUST_FAIL(get_kernel(&scope, 4, &kernel), NYB_ERROR_COMPILE, "the compiler left no word");
  fake.nvrtc->fail_call = NULL;
  requests_left = 10;
  MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
  nyb_cuda_leave(&scope);
  nyb_context_destroy(context);
}

enum { THREADS = 8, KERNELS = 4 };

typedef struct thread_work {
  nyb_context *context;
  pthread_barrier_t *barrier;
  nyb_status status;
  const nyb_cuda_kernel *kernels[KERNELS];
} thread_work;

static void *get_in_thread(void *data) {
  thread_work *work = data;
  nyb_cuda_scope scope;
  pthread_barrier_wait(work->barrier);
  work->status = nyb_cuda_enter(work->context, &scope);
  for (int i = 0; i < KERNELS && work->status == NYB_OK; i++) {
    work->status = get_kernel(&scope, i, &work->kernels[i]);
  }
  nyb_cuda_leave(&scope);
  return NULL;
}

/* Eight threads want four kernels at once: each is compiled once, and all get the same. */
static void threads_together(void) {
  open_fakes();
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  fake.nvrtc->compile_milliseconds = 5;
  nyb_context *context = created(0);
  pthread_barrier_t barrier;
  pthread_t threads[THREADS];
  thread_work work[THREADS];
  pthread_barrier_init(&barrier, NULL, THREADS);
  for (int i = 0; i < THREADS; i++) {
    work[i] = (thread_work){.context = context, .barrier = &barrier};
    MUST(pthread_create(&threads[i], NULL, get_in_thread, &work[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) MUST(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < THREADS; i++) {
    MUST(work[i].status == NYB_OK);
    for (int k = 0; k < KERNELS; k++) MUST(work[i].kernels[k] == work[0].kernels[k]);
  }
  MUST(fake.nvrtc->compilations == KERNELS && fake.cuda->modules_loaded == KERNELS);
  MUST(fake.calls("cuDevicePrimaryCtxRetain") - fake.calls("cuDevicePrimaryCtxRelease") == 1);
  pthread_barrier_destroy(&barrier);
  nyb_context_destroy(context);
}

static void test_kernels(void **state) {
  (void)state;
  assert_true(in_child(kernels_are_kept));
  assert_true(in_child(loading_fails));
  assert_true(in_child(compiling_fails));
  assert_true(in_child(architectures));
  assert_true(in_child(no_memory_to_compile));
  assert_true(in_child(threads_together));
}

/* ---- Launches ------------------------------------------------------------------------------- */

typedef struct seen_launch {
  char kernel[32];
  nyb_cu_launch launch;
  int attribute; /* its id, 0: none */
  int value;     /* of the argument struct */
} seen_launch;

static void see(void *data, const char *kernel, const nyb_cu_launch *launch, void *arguments) {
  seen_launch *seen = data;
  snprintf(seen->kernel, sizeof seen->kernel, "%s", kernel);
  seen->launch = *launch;
  seen->attribute = launch->attribute_count > 0 && launch->attributes[0].value.enabled == 1
                        ? launch->attributes[0].id
                        : 0;
  memcpy(&seen->value, arguments, sizeof seen->value);
}

static void launches(void) {
  open_fakes();
  fake.cuda->device_count = 2;
  seen_launch seen = {.value = 0};
  fake.cuda->launch = see;
  fake.cuda->launch_data = &seen;
  for (int32_t device = 0; device < 2; device++) {
    nyb_context *context = created(device);
    nyb_cuda_scope scope;
    const nyb_cuda_kernel *kernel;
    int argument = 77, stream = 0;
    MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
    MUST(get_kernel(&scope, 4, &kernel) == NYB_OK);
    MUST(nyb_cuda_launch(&scope, kernel, (int64_t[]){INT32_MAX, 65535, 2}, &argument, &stream,
                         false) == NYB_OK);
    MUST(strcmp(seen.kernel, "probe") == 0 && seen.value == 77 && seen.attribute == 0);
    MUST(seen.launch.grid[0] == INT32_MAX && seen.launch.grid[1] == 65535);
    MUST(seen.launch.grid[2] == 2 && seen.launch.block[0] == 128 && seen.launch.block[1] == 1);
    MUST(seen.launch.block[2] == 1 && seen.launch.dynamic_shared_bytes == 1024);
    MUST(seen.launch.stream == &stream);
    MUST(nyb_cuda_launch(&scope, kernel, (int64_t[]){1, 1, 1}, &argument, NULL, true) == NYB_OK);
    MUST(seen.attribute == (device == 0 ? 6 : 0)); /* 9.0, then 8.0 */
    static const int64_t wrong[][3] = {
        {0, 1, 1}, {1, -1, 1}, {1, 1, 65536}, {1, 65536, 1}, {INT64_C(1) << 31, 1, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
      MUST_FAIL(nyb_cuda_launch(&scope, kernel, wrong[i], &argument, NULL, false), NYB_ERROR_SHAPE,
                "the CUDA kernel probe would need ");
    }
    fail_call("cuLaunchKernelEx", 719);
    MUST_FAIL(nyb_cuda_launch(&scope, kernel, (int64_t[]){1, 1, 1}, &argument, NULL, false),
              NYB_ERROR_DEVICE,
              "cuLaunchKernelEx of the CUDA kernel probe failed with 719, "
              "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure");
    fake.cuda->fail_call = NULL;
    nyb_cuda_leave(&scope);
    nyb_context_destroy(context);
  }
}

static void test_launches(void **state) {
  (void)state;
  assert_true(in_child(launches));
}

int main(void) {
  unsetenv("NYBBLE_ISA");
  unsetenv("NYBBLE_THREADS");
  setenv("NYBBLE_CACHE_DIR", "off", 1); /* files are test_cuda_disk_cache.c's */
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_unsupported),   cmocka_unit_test(test_contexts),
      cmocka_unit_test(test_cuda_contexts), cmocka_unit_test(test_pointers),
      cmocka_unit_test(test_kernels),       cmocka_unit_test(test_launches),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
