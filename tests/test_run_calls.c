/* SPDX-License-Identifier: Apache-2.0 */
/* Run calls allocate nothing and start no thread, on one thread and on several: this program stands
 * between everything that it links and the C library's allocator. (That they do not use a context's
 * own allocator either is test_allocation_failure.c's.) */
#define _GNU_SOURCE /* RTLD_NEXT, MAP_ANONYMOUS */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "attention_scene.h"

/* ---- Standing in between --------------------------------------------------------------------- */

#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define THREAD_SANITIZER 1
#endif
#endif

/* Calls since the program began. */
static _Atomic int64_t allocations, thread_starts;

#if defined(ADDRESS_SANITIZER)

/* The sanitizer's allocator must stay; it tells of what it does. It hides mmap and threads. */
enum { SEES_ALL = 0 };

/* From sanitizer/allocator_interface.h, which GCC does not install. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *memory, size_t bytes) {
  (void)memory, (void)bytes;
  allocations++;
}

static void on_free(const volatile void *memory) {
  (void)memory;
  allocations++;
}

static bool stand_in_between(void) {
  return __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) != 0;
}

#elif defined(__GLIBC__) && !defined(THREAD_SANITIZER)

#include <dlfcn.h>
#include <pthread.h>
enum { SEES_ALL = 1 };

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *memory);

#pragma GCC visibility push(default) /* for the calls of other libraries */
void *malloc(size_t bytes) {
  allocations++;
  return __libc_malloc(bytes);
}

void *calloc(size_t elements, size_t bytes) {
  allocations++;
  return __libc_calloc(elements, bytes);
}

void *realloc(void *memory, size_t bytes) {
  allocations++;
  return __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
  allocations++;
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  allocations++;
  void *made = __libc_memalign(alignment, bytes);
  if (made == NULL) return ENOMEM;
  *memory = made;
  return 0;
}

void free(void *memory) {
  allocations++;
  __libc_free(memory);
}

typedef void *(*mmap_function)(void *, size_t, int, int, int, off_t);
typedef int (*pthread_create_function)(pthread_t *, const pthread_attr_t *, void *(*)(void *),
                                       void *);

/* Stores in *function what would be called if this program had none of that name. */
static void find_next(const char *name, void *function) {
  void *const symbol = dlsym(RTLD_NEXT, name);
  memcpy(function, &symbol, sizeof symbol);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  mmap_function next;
  find_next("mmap", &next);
  allocations++;
  return next(address, bytes, protection, flags, file, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument) {
  pthread_create_function next;
  find_next("pthread_create", &next);
  thread_starts++;
  return next(thread, attributes, start, argument);
}
#pragma GCC visibility pop

static bool stand_in_between(void) { return true; }

#else /* ThreadSanitizer's allocator must stay, too, and does not tell of all that it does. */
enum { SEES_ALL = 0 };
static bool stand_in_between(void) { return false; }
#endif

/* Each way to memory is seen; the pointers keep the compiler from leaving calls out. */
static void test_allocations_are_seen(void **state) {
  (void)state;
  void *(*volatile allocate)(size_t) = malloc;
  void *(*volatile allocate_zeros)(size_t, size_t) = calloc;
  void *(*volatile reallocate)(void *, size_t) = realloc;
  void *(*volatile allocate_aligned)(size_t, size_t) = aligned_alloc;
  void (*volatile release)(void *) = free;
  int64_t before = allocations;
  void *memory[5] = {allocate(100)};
  assert_true(allocations > before);
  before = allocations;
  memory[1] = allocate_zeros(10, 10);
  assert_true(allocations > before);
  before = allocations;
  memory[1] = reallocate(memory[1], 1000000);
  assert_true(allocations > before);
  before = allocations;
  memory[2] = allocate_aligned(64, 640);
  assert_true(allocations > before);
  before = allocations;
  assert_int_equal(posix_memalign(&memory[3], 64, 640), 0);
  assert_true(allocations > before);
  before = allocations;
  memory[4] = strdup("another library allocates"); /* the C library here */
  assert_true(allocations > before);
  for (int i = 0; i < 5; i++) {
    before = allocations;
    release(memory[i]);
    assert_true(allocations > before);
  }
  before = allocations;
  void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(!SEES_ALL || allocations > before);
  munmap(page, 4096);
}

/* ---- Run calls ------------------------------------------------------------------------------- */

/* What was counted when a run call began. */
typedef struct tally {
  int64_t allocations, thread_starts;
} tally;

static tally now(void) { return (tally){allocations, thread_starts}; }

static void expect_nothing(tally before, const char *what, const nyb_context *context) {
  const tally after = now();
  if (after.allocations == before.allocations && after.thread_starts == before.thread_starts) {
    return;
  }
  fail_msg("%s, %s, %d threads: %d allocations, %d threads started", what,
           nyb_isa_name(nyb_context_isa(context)), (int)nyb_context_threads(context),
           (int)(after.allocations - before.allocations),
           (int)(after.thread_starts - before.thread_starts));
}

/* The call, its status, and that nothing was allocated meanwhile. */
#define EXPECT_NOTHING(context, want, call)                         \
  do {                                                              \
    const tally before_call = now();                                \
    const nyb_status status_of_call = (call);                       \
    expect_nothing(before_call, #call, context);                    \
    if (status_of_call != (want)) fail_msg("%s", nyb_last_error()); \
  } while (0)

/* NULL where the ISA does not run here. That a context is made is seen, and so are its threads. */
static nyb_context *context_for(nyb_isa isa, int64_t threads) {
  nyb_context *context = NULL;
  const nyb_context_options options = {
      .struct_size = sizeof options, .isa = isa, .threads = threads};
  const tally before = now();
  const nyb_status status = nyb_context_create(&options, &context);
  if (status == NYB_ERROR_UNSUPPORTED) return NULL;
  if (status != NYB_OK) fail_msg("%s", nyb_last_error());
  assert_true(now().allocations > before.allocations);
  if (SEES_ALL && now().thread_starts == before.thread_starts && threads > 1) {
    print_message("this build has no pool of threads: %d threads are one\n", (int)threads);
  }
  return context;
}

static const nyb_format affine4 = {NYB_AFFINE, 4, 64, NYB_F16};
static const nyb_format plain_bf16 = {NYB_PLAIN, 0, 0, NYB_BF16};

/* Several chunks, and work enough that every thread gets some. */
static void attend(nyb_context *context, const nyb_format *format, nyb_path path,
                   int64_t query_len) {
  const attention_shape shape = {.name = "no allocation",
                                 .batch = 2,
                                 .query_heads = 4,
                                 .kv_heads = 2,
                                 .query_len = query_len,
                                 .key_dim = 64,
                                 .value_dim = 64,
                                 .capacity_tokens = 2100,
                                 .lengths = {1500, 2100},
                                 .key_format = *format,
                                 .value_format = *format,
                                 .query_dtype = NYB_BF16,
                                 .out_dtype = NYB_BF16,
                                 .mask = NYB_MASK_CAUSAL,
                                 .keys = ROWS_RAW,
                                 .values = ROWS_RAW};
  attention_scene scene;
  assert_true(scene_make(&scene, &shape));
  assert_int_equal(scene_run(&scene, &check_nybble, context, path), NYB_OK); /* makes workspace */
  nyb_plan plan = NYB_PLAN_INIT;
  EXPECT_NOTHING(context, NYB_OK, nyb_attention_plan(context, &scene.call, &plan));
  EXPECT_NOTHING(
      context, NYB_OK,
      nyb_attention_run(context, &scene.call, scene.workspace, scene.workspace_bytes, NULL));
  scene.call.batch = -1;
  EXPECT_NOTHING(
      context, NYB_ERROR_SHAPE,
      nyb_attention_run(context, &scene.call, scene.workspace, scene.workspace_bytes, NULL));
  scene_free(&scene);
}

/* [2, 2, 200, 64] floats, and room for what is made of them. */
enum { BATCH = 2, HEADS = 2, TOKENS = 200, DIM = 64, ELEMENTS = BATCH * HEADS * TOKENS * DIM };
static float floats[ELEMENTS], made[ELEMENTS];
static uint32_t codes[ELEMENTS / 8];
static uint16_t scales[ELEMENTS / DIM], biases[ELEMENTS / DIM];
static const int64_t float_strides[3] = {HEADS * TOKENS * DIM, TOKENS *DIM, DIM};

static void quantize_and_back(nyb_context *context) {
  nyb_quantize quantize = {
      .struct_size = sizeof quantize,
      .batch = BATCH,
      .heads = HEADS,
      .tokens = TOKENS,
      .dim = DIM,
      .input = {floats, NYB_F32, {HEADS * TOKENS * DIM, TOKENS * DIM, DIM}},
      .output = {.format = affine4,
                 .codes = codes,
                 .scales = scales,
                 .biases = biases,
                 .codes_stride = {HEADS * TOKENS * DIM / 8, TOKENS * DIM / 8, DIM / 8},
                 .scales_stride = {HEADS * TOKENS, TOKENS, 1},
                 .biases_stride = {HEADS * TOKENS, TOKENS, 1}}};
  EXPECT_NOTHING(context, NYB_OK, nyb_quantize_run(context, &quantize, NULL));
  const nyb_stored stored = {.format = affine4,
                             .codes = codes,
                             .scales = scales,
                             .biases = biases,
                             .codes_stride = {HEADS * TOKENS * DIM / 8, TOKENS * DIM / 8, DIM / 8},
                             .scales_stride = {HEADS * TOKENS, TOKENS, 1},
                             .biases_stride = {HEADS * TOKENS, TOKENS, 1}};
  nyb_dequantize dequantize = {.struct_size = sizeof dequantize,
                               .batch = BATCH,
                               .heads = HEADS,
                               .tokens = TOKENS,
                               .dim = DIM,
                               .input = stored,
                               .output = {.data = made, .dtype = NYB_F32}};
  memcpy(dequantize.output.stride, float_strides, sizeof float_strides);
  EXPECT_NOTHING(context, NYB_OK, nyb_dequantize_run(context, &dequantize, NULL));
}

static void append(nyb_context *context) {
  nyb_cache_options options = {.struct_size = sizeof options,
                               .batch = BATCH,
                               .kv_heads = HEADS,
                               .key_dim = DIM,
                               .value_dim = DIM,
                               .key_format = affine4,
                               .value_format = plain_bf16,
                               .initial_capacity_tokens = TOKENS + 1};
  nyb_cache *cache = NULL;
  tally before = now();
  assert_int_equal(nyb_cache_create(context, &options, &cache), NYB_OK);
  assert_true(now().allocations > before.allocations);
  nyb_append many = {.struct_size = sizeof many,
                     .tokens = TOKENS,
                     .key = {.data = floats, .dtype = NYB_F32},
                     .value = {.data = floats, .dtype = NYB_F32}};
  memcpy(many.key.stride, float_strides, sizeof float_strides);
  memcpy(many.value.stride, float_strides, sizeof float_strides);
  nyb_append one = many;
  one.tokens = 1;
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_append(cache, &many, NULL));
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_append(cache, &one, NULL));
  nyb_attention view = NYB_ATTENTION_INIT;
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_view(cache, &view));
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_trim(cache, 0, 1, NULL, NULL));
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_reset(cache, NULL));
  EXPECT_NOTHING(context, NYB_OK, nyb_cache_append(cache, &many, NULL));
  before = now(); /* growing is seen */
  assert_int_equal(nyb_cache_append(cache, &many, NULL), NYB_OK);
  assert_true(now().allocations > before.allocations);
  nyb_cache_destroy(cache);
}

static void gate(nyb_context *context, nyb_dtype dtype, nyb_path path) {
  nyb_geglu geglu = {.struct_size = sizeof geglu,
                     .rows = ELEMENTS / 1024,
                     .columns = 1024,
                     .dtype = dtype,
                     .path = path,
                     .gate = floats,
                     .gate_stride = 1024,
                     .up = floats,
                     .up_stride = 1024,
                     .out = made,
                     .out_stride = 1024};
  EXPECT_NOTHING(context, NYB_OK, nyb_geglu_run(context, &geglu, NULL));
}

/* Floats seen as 25 parts of 32 rows, which are two tasks. */
static void merge_parts(nyb_context *context) {
  enum { PARTS = 25, ROWS = 32, PART_ELEMENTS = ROWS * DIM };
  nyb_input outs[PARTS], lses[PARTS];
  for (int i = 0; i < PARTS; i++) {
    outs[i] = (nyb_input){floats + i * PART_ELEMENTS, NYB_F32, {PART_ELEMENTS, DIM, DIM}};
    lses[i] = (nyb_input){floats + i * ROWS, NYB_F32, {ROWS, 1, 1}};
  }
  nyb_attention_merge call = {.struct_size = sizeof call,
                              .parts = PARTS,
                              .batch = 1,
                              .query_heads = ROWS,
                              .query_len = 1,
                              .value_dim = DIM,
                              .outs = outs,
                              .lses = lses,
                              .out = {made, NYB_F32, {PART_ELEMENTS, DIM, DIM}}};
  EXPECT_NOTHING(context, NYB_OK, nyb_attention_merge_run(context, &call, NULL));
  call.lses = NULL;
  EXPECT_NOTHING(context, NYB_ERROR_NULL, nyb_attention_merge_run(context, &call, NULL));
}

static void test_run_calls_allocate_nothing(void **state) {
  (void)state;
  for (int i = 0; i < ELEMENTS; i++) floats[i] = (float)(i * 7 % 101 - 50) / 50;
  for (nyb_isa isa = NYB_ISA_SCALAR; isa <= NYB_ISA_NEON; isa++) {
    for (int64_t threads = 1; threads <= 3; threads += 2) {
      nyb_context *context = context_for(isa, threads);
      if (context == NULL) break;
      for (nyb_path path = NYB_PATH_FUSED; path <= NYB_PATH_COMPAT; path++) {
        attend(context, &affine4, path, 1);
        attend(context, &plain_bf16, path, 1);
        for (nyb_dtype dtype = NYB_F32; dtype <= NYB_BF16; dtype++) gate(context, dtype, path);
      }
      attend(context, &affine4, NYB_PATH_FUSED, 40);
      quantize_and_back(context);
      append(context);
      merge_parts(context);
      nyb_context_destroy(context);
    }
  }
}

int main(void) {
  if (!stand_in_between()) {
    printf(
        "skipped: only glibc lets this program stand before its allocator, and AddressSanitizer\n");
    return 77;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_allocations_are_seen),
      cmocka_unit_test(test_run_calls_allocate_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
