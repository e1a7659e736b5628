/* SPDX-License-Identifier: Apache-2.0 */
/* The operations' host code on CUDA, over a fake driver: what they launch, what they refuse, and
 * that whichever call of the driver fails, they say so and leave everything as it was. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../src/cuda/device.h"
#include "fake_cuda/open.h"

/* ---- Help ----------------------------------------------------------------------------------- */

enum { BATCH = 2, HEADS = 2, QUERY_HEADS = 4, TOKENS = 8, DIM = 128, GROUP = 64, LAUNCHES = 16 };

static fake_cuda_library fake;
static const nyb_cuda_driver *driver;
static nyb_context *context;
static int a_stream;
static nyb_stream stream = &a_stream;

/* The kernels launched since launches were cleared. */
static char launched[LAUNCHES][32];
static int launch_count;

static void see(void *data, const char *kernel, const nyb_cu_launch *launch, void *arguments) {
  (void)data, (void)arguments;
  MUST(launch->stream == stream && launch->block[0] > 0);
  if (launch_count < LAUNCHES) snprintf(launched[launch_count], 32, "%s", kernel);
  launch_count++;
}

static void open_all(void) {
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  fake = fake_cuda_open("fake_cuda", "fake_nvrtc");
  fake.cuda->launch = see;
  const nyb_context_options options = {.struct_size = sizeof options, .backend = NYB_BACKEND_CUDA};
  MUST(nyb_context_create(&options, &context) == NYB_OK);
  MUST(nyb_cuda_driver_load(&driver) == NYB_OK);
}

/* Device memory of the primary context. */
static void *device_memory(size_t bytes) {
  nyb_cuda_scope scope;
  nyb_cu_address address;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  MUST(driver->MemAlloc(&address, bytes) == 0);
  nyb_cuda_leave(&scope);
  return (void *)(uintptr_t)address;
}

static void set_strides(int64_t stride[3], int64_t heads, int64_t rows, int64_t elements) {
  stride[0] = heads * rows * elements;
  stride[1] = rows * elements;
  stride[2] = elements;
}

static const nyb_format affine4 = {NYB_AFFINE, 4, GROUP, NYB_BF16};

/* Everything that the calls below use, in device memory. */
static struct {
  void *floats, *codes, *scales, *biases, *more_codes, *more_scales, *more_biases, *out, *workspace;
  int32_t *lengths, *non_finite;
  nyb_quantize quantize;
  nyb_dequantize dequantize;
  nyb_geglu geglu;
  nyb_attention attention;
  nyb_append append;
  size_t workspace_bytes;
} calls;

static nyb_stored stored_of(void *codes, void *scales, void *biases) {
  nyb_stored stored = {.format = affine4, .codes = codes, .scales = scales, .biases = biases};
  set_strides(stored.codes_stride, HEADS, TOKENS, DIM * 4 / 32);
  set_strides(stored.scales_stride, HEADS, TOKENS, DIM / GROUP);
  set_strides(stored.biases_stride, HEADS, TOKENS, DIM / GROUP);
  return stored;
}

static void make_memory(void) {
  const size_t elements = (size_t)BATCH * QUERY_HEADS * TOKENS * DIM;
  calls.floats = device_memory(4 * elements);
  calls.out = device_memory(4 * elements);
  calls.codes = device_memory(elements);
  calls.scales = device_memory(elements);
  calls.biases = device_memory(elements);
  calls.more_codes = device_memory(elements);
  calls.more_scales = device_memory(elements);
  calls.more_biases = device_memory(elements);
  calls.lengths = device_memory(BATCH * sizeof(int32_t));
  calls.non_finite = device_memory(sizeof(int32_t));
}

static void make_calls(void) {
  make_memory();
  const nyb_stored stored = stored_of(calls.codes, calls.scales, calls.biases);
  nyb_input floats = {.data = calls.floats, .dtype = NYB_BF16};
  set_strides(floats.stride, HEADS, TOKENS, DIM);
  nyb_output out = {.data = calls.out, .dtype = NYB_BF16};
  set_strides(out.stride, HEADS, TOKENS, DIM);
  calls.dequantize = (nyb_dequantize){
      .struct_size = sizeof calls.dequantize,
      .batch = BATCH,
      .heads = HEADS,
      .tokens = TOKENS,
      .dim = DIM,
      .input = stored,
      .output = out,
  };
  calls.quantize = (nyb_quantize){
      .struct_size = sizeof calls.quantize,
      .batch = BATCH,
      .heads = HEADS,
      .tokens = TOKENS,
      .dim = DIM,
      .input = floats,
      .output = {.format = affine4,
                 .codes = calls.codes,
                 .scales = calls.scales,
                 .biases = calls.biases},
      .non_finite = calls.non_finite,
  };
  memcpy(calls.quantize.output.codes_stride, stored.codes_stride, sizeof stored.codes_stride);
  memcpy(calls.quantize.output.scales_stride, stored.scales_stride, sizeof stored.scales_stride);
  memcpy(calls.quantize.output.biases_stride, stored.biases_stride, sizeof stored.biases_stride);
  calls.geglu = (nyb_geglu){
      .struct_size = sizeof calls.geglu,
      .rows = 8,
      .columns = 64,
      .dtype = NYB_BF16,
      .gate = calls.floats,
      .gate_stride = 64,
      .up = calls.codes,
      .up_stride = 64,
      .out = calls.out,
      .out_stride = 64,
  };
  calls.append = (nyb_append){
      .struct_size = sizeof calls.append,
      .tokens = TOKENS,
      .key = floats,
      .value = floats,
      .non_finite = calls.non_finite,
  };
  calls.attention = (nyb_attention){
      .struct_size = sizeof calls.attention,
      .batch = BATCH,
      .query_heads = QUERY_HEADS,
      .kv_heads = HEADS,
      .query_len = 1,
      .key_dim = DIM,
      .value_dim = DIM,
      .capacity_tokens = TOKENS,
      .lengths = calls.lengths,
      .q = {.data = calls.floats, .dtype = NYB_BF16},
      .k = stored,
      .v = stored_of(calls.more_codes, calls.more_scales, calls.more_biases),
      .out = {.data = calls.out, .dtype = NYB_BF16},
      .scale = 1,
  };
  set_strides(calls.attention.q.stride, QUERY_HEADS, 1, DIM);
  set_strides(calls.attention.out.stride, QUERY_HEADS, 1, DIM);
}

static void make_workspace(void) {
  nyb_plan plan = NYB_PLAN_INIT;
  for (int path = NYB_PATH_AUTO; path <= NYB_PATH_COMPAT; path++) {
    calls.attention.path = (nyb_path)path;
    MUST(nyb_attention_plan(context, &calls.attention, &plan) == NYB_OK);
    if (plan.workspace_bytes > calls.workspace_bytes) calls.workspace_bytes = plan.workspace_bytes;
  }
  calls.attention.path = NYB_PATH_AUTO;
  if (calls.workspace_bytes > 0) calls.workspace = device_memory(calls.workspace_bytes);
}

/* ---- Each operation as a function without arguments ----------------------------------------- */

static nyb_status quantize(void) { return nyb_quantize_run(context, &calls.quantize, stream); }
static nyb_status dequantize(void) {
  return nyb_dequantize_run(context, &calls.dequantize, stream);
}
static nyb_status geglu_on(nyb_path path) {
  calls.geglu.path = path;
  return nyb_geglu_run(context, &calls.geglu, stream);
}
static nyb_status geglu_fused(void) { return geglu_on(NYB_PATH_FUSED); }
static nyb_status geglu_compat(void) { return geglu_on(NYB_PATH_COMPAT); }
static nyb_status attention_on(nyb_path path) {
  calls.attention.path = path;
  return nyb_attention_run(context, &calls.attention, calls.workspace, calls.workspace_bytes,
                           stream);
}
static nyb_status attention_fused(void) { return attention_on(NYB_PATH_FUSED); }
static nyb_status attention_compat(void) { return attention_on(NYB_PATH_COMPAT); }

static nyb_cache *cache_with(int64_t capacity_tokens, nyb_status *status) {
  const nyb_cache_options options = {
      .struct_size = sizeof options,
      .batch = BATCH,
      .kv_heads = HEADS,
      .key_dim = DIM,
      .value_dim = DIM,
      .key_format = affine4,
      .value_format = affine4,
      .initial_capacity_tokens = capacity_tokens,
  };
  nyb_cache *cache = NULL;
  *status = nyb_cache_create(context, &options, &cache);
  MUST((cache != NULL) == (*status == NYB_OK));
  return cache;
}

/* ---- What they launch ----------------------------------------------------------------------- */

static int64_t calls_of(const char *name) {
  for (int64_t i = 0; i < nyb_kernel_count(); i++) {
    nyb_kernel kernel = NYB_KERNEL_INIT;
    MUST(nyb_kernel_at(context, i, &kernel) == NYB_OK);
    if (strcmp(kernel.name, name) == 0) return kernel.calls;
  }
  fprintf(stderr, "no kernel %s\n", name);
  exit(1);
}

static nyb_counters counters(void) {
  nyb_counters c = NYB_COUNTERS_INIT;
  MUST(nyb_counters_get(context, &c) == NYB_OK);
  return c;
}

static void operations_launch(void) {
  open_all();
  make_calls();
  make_workspace();
  MUST(launch_count == 0); /* a plan launches nothing */
  MUST(quantize() == NYB_OK && launch_count == 1 && strcmp(launched[0], "quantize") == 0);
  MUST(calls_of("quantize_affine4_cuda") == 1 && counters().quantize == 1);
  launch_count = 0;
  MUST(dequantize() == NYB_OK && launch_count == 1 && strcmp(launched[0], "dequantize") == 0);
  MUST(calls_of("dequantize_affine4_cuda") == 1 && counters().dequantize == 1);
  launch_count = 0;
  MUST(geglu_fused() == NYB_OK && launch_count == 1 && strcmp(launched[0], "geglu") == 0);
  MUST(calls_of("geglu_plain_bf16_cuda") == 1 && counters().geglu_fused == 1);
  MUST(geglu_compat() == NYB_OK && counters().geglu_compat == 1);
  MUST(calls_of("geglu_plain_bf16_cuda") == 1);

  nyb_plan plan = NYB_PLAN_INIT;
  calls.attention.path = NYB_PATH_FUSED;
  MUST(nyb_attention_plan(context, &calls.attention, &plan) == NYB_OK);
  MUST(plan.path == NYB_PATH_FUSED && plan.workspace_bytes % NYB_WORKSPACE_ALIGNMENT == 0);
  launch_count = 0;
  MUST(attention_fused() == NYB_OK && launch_count >= 1);
  MUST(calls_of(plan.key_kernel) >= 1 && calls_of(plan.value_kernel) >= 1);
  MUST(counters().attention_fused == 1);
  launch_count = 0;
  MUST(attention_compat() == NYB_OK && launch_count >= 1 && counters().attention_compat == 1);
  nyb_context_destroy(context);
}

/* Once a kernel is loaded, a run call allocates nothing, waits for nothing and loads nothing. */
static void runs_are_light(void) {
  static nyb_status (*const operations[])(void) = {quantize,     dequantize,      geglu_fused,
                                                   geglu_compat, attention_fused, attention_compat};
  static const char *const heavy[] = {
      "cuMemAlloc",         "cuMemFree",      "cuMemAllocHost",      "cuCtxSynchronize",
      "cuModuleLoadDataEx", "cuStreamCreate", "cuStreamSynchronize", "cuEventSynchronize",
      "cuMemcpyHtoD",       "cuMemcpyDtoH",   "cuStreamIsCapturing", "cuFuncSetAttribute"};
  open_all();
  make_calls();
  make_workspace();
  for (size_t o = 0; o < sizeof operations / sizeof operations[0]; o++) {
    MUST(operations[o]() == NYB_OK);
    int64_t before[sizeof heavy / sizeof heavy[0]];
    for (size_t i = 0; i < sizeof heavy / sizeof heavy[0]; i++) before[i] = fake.calls(heavy[i]);
    MUST(operations[o]() == NYB_OK);
    for (size_t i = 0; i < sizeof heavy / sizeof heavy[0]; i++) {
      if (fake.calls(heavy[i]) != before[i]) fprintf(stderr, "%s is called\n", heavy[i]);
      MUST(fake.calls(heavy[i]) == before[i]);
    }
  }
  nyb_context_destroy(context);
}

static void nothing_to_do(void) {
  open_all();
  make_calls();
  calls.quantize.tokens = calls.dequantize.tokens = 0;
  calls.geglu.rows = 0;
  MUST(quantize() == NYB_OK && dequantize() == NYB_OK && geglu_fused() == NYB_OK);
  MUST(launch_count == 0);
  nyb_context_destroy(context);
}

static int host_memory[1 << 16];

/* Every field that a call may have beside a rectangle, one at a time. */
enum { FEATURE_COUNT = 11 };

static nyb_attention with_feature(int feature, const char **field) {
  static const char *const fields[FEATURE_COUNT] = {"mask NYB_MASK_CAUSAL_TOP_LEFT",
                                                    "window_tokens",
                                                    "starts",
                                                    "mask_array",
                                                    "sinks",
                                                    "alibi_slopes",
                                                    "softcap",
                                                    "pages",
                                                    "first",
                                                    "last",
                                                    "ring"};
  nyb_attention a = calls.attention;
  *field = fields[feature];
  switch (feature) {
    case 0: a.mask = NYB_MASK_CAUSAL_TOP_LEFT; break;
    case 1: a.window_tokens = 100; break;
    case 2: a.starts = calls.lengths; break;
    case 3:
      a.mask_array = (nyb_mask_array){
          .data = calls.floats, .kind = NYB_MASK_ARRAY_ADD, .dtype = NYB_F32, .tokens = TOKENS};
      break;
    case 4: a.sinks = calls.floats; break;
    case 5: a.alibi_slopes = calls.floats; break;
    case 6: a.softcap = 30; break;
    case 7:
      a.pages = (nyb_pages){
          .table = calls.lengths, .table_stride = 1, .page_tokens = 16, .page_count = BATCH};
      break;
    case 8: a.first = (nyb_part){.tokens = TOKENS, .k = a.k, .v = a.v}; break;
    case 9:
      a.last = (nyb_part){.tokens = TOKENS, .k = a.k, .v = a.v};
      a.last_begins = calls.lengths;
      break;
    default: a.ring = (nyb_ring){.offsets = calls.lengths, .keep_tokens = 1}; break;
  }
  return a;
}

/* Parts that stand anywhere, with strides of their own, or evenly spaced. */
static nyb_status merge_of(int64_t parts, int64_t step, bool own_strides, const void *odd_lse) {
  static nyb_input outs[1000], lses[1000];
  for (int64_t part = 0; part < parts; part++) {
    outs[part] = (nyb_input){.data = (float *)calls.floats + part * step, .dtype = NYB_F32};
    lses[part] = (nyb_input){.data = (float *)calls.more_codes + part % 7 * 2, .dtype = NYB_F32};
    if (step > 0) lses[part].data = (float *)calls.more_codes + part * 2;
    set_strides(outs[part].stride, 1, 2, own_strides ? DIM + part % 3 : DIM);
    set_strides(lses[part].stride, 1, 2, 1);
  }
  if (odd_lse != NULL) lses[parts - 1].data = odd_lse;
  nyb_attention_merge merge = {.struct_size = sizeof merge,
                               .parts = parts,
                               .batch = 1,
                               .query_heads = 1,
                               .query_len = 2,
                               .value_dim = DIM,
                               .outs = outs,
                               .lses = lses,
                               .out = {.data = calls.out, .dtype = NYB_BF16}};
  set_strides(merge.out.stride, 1, 2, DIM);
  return nyb_attention_merge_run(context, &merge, stream);
}

static void merges_launch(void) {
  open_all();
  make_calls();
  launch_count = 0;
  MUST(merge_of(1, 0, false, NULL) == NYB_OK && launch_count == 1);
  MUST(strcmp(launched[0], "attention_combine") == 0 && counters().attention_merge == 1);
  MUST(merge_of(52, 0, true, NULL) == NYB_OK);
  MUST(merge_of(208, 0, false, NULL) == NYB_OK);
  MUST(merge_of(1000, 2, false, NULL) == NYB_OK);
  MUST(counters().attention_merge == 4);
  launch_count = 0;
  MUST_FAIL(merge_of(53, 0, true, NULL), NYB_ERROR_UNSUPPORTED, "merge.parts is 53");
  MUST_FAIL(merge_of(209, 0, false, NULL), NYB_ERROR_UNSUPPORTED, "merge.parts is 209");
  MUST_FAIL(merge_of(3, 0, false, host_memory), NYB_ERROR_POINTER, "merge.lses[2].data is 0x");
  MUST(launch_count == 0 && counters().attention_merge == 4);
  nyb_context_destroy(context);
}

/* Few rows of 16 bits go to the decode kernel, but with parts; where the general kernel has to take
 * a call, the plan names the field. */
static void features_launch(void) {
  open_all();
  make_calls();
  const nyb_attention plain = calls.attention;
  for (int i = 0; i < 2 * FEATURE_COUNT; i++) {
    const char *field;
    nyb_plan plan = NYB_PLAN_INIT;
    const int feature = i % FEATURE_COUNT;
    const bool decodes = i < FEATURE_COUNT && feature != 8 && feature != 9;
    calls.attention = with_feature(feature, &field);
    if (i >= FEATURE_COUNT) calls.attention.q.dtype = NYB_F32;
    make_workspace();
    calls.attention.path = NYB_PATH_AUTO;
    MUST(nyb_attention_plan(context, &calls.attention, &plan) == NYB_OK);
    MUST(strcmp(plan.key_kernel,
                decodes ? "attention_decode_affine4_cuda" : "attention_general_affine4_cuda") == 0);
    MUST(decodes || strncmp(plan.reason, "attention.", 10) == 0);
    MUST(decodes || strncmp(plan.reason + 10, field, strlen(field)) == 0);
    launch_count = 0;
    MUST(attention_fused() == NYB_OK && launch_count >= 1);
    MUST(strcmp(launched[0], decodes ? "attention_decode" : "attention_general") == 0);
    launch_count = 0;
    MUST(attention_compat() == NYB_OK && launch_count == 1);
    MUST(strcmp(launched[0], "attention_compat") == 0);
    calls.attention = plain;
  }
  nyb_context_destroy(context);
}

static nyb_mask_array mask_of(nyb_mask_array_kind kind, nyb_dtype dtype) {
  return (nyb_mask_array){.data = calls.floats, .kind = kind, .dtype = dtype, .tokens = TOKENS};
}

static nyb_pages pages_of(int64_t tokens) {
  return (nyb_pages){
      .table = calls.lengths, .table_stride = 1, .page_tokens = tokens, .page_count = BATCH};
}

/* Whether the decode kernel takes what has been made of the call. */
static void expect_decode(bool decodes) {
  nyb_plan plan = NYB_PLAN_INIT;
  make_workspace();
  MUST(nyb_attention_plan(context, &calls.attention, &plan) == NYB_OK);
  launch_count = 0;
  MUST(attention_fused() == NYB_OK && launch_count >= 1);
  MUST(strcmp(launched[0], decodes ? "attention_decode" : "attention_general") == 0);
  MUST(strncmp(plan.key_kernel, launched[0], strlen(launched[0])) == 0);
}

/* Masks of either kind and dtype with either rounding go to decode; pages do where they have 16,
 * 32, 64, ... tokens and rows are copied whole, and queries are; softcaps do where their errors,
 * which go with the cap, are small. */
static void masks_pages_and_caps_launch(void) {
  static const int64_t page_tokens[] = {16, 32, 64, 48, 80};
  open_all();
  make_calls();
  const nyb_attention plain = calls.attention;
  for (int mlx = 0; mlx < 2; mlx++) {
    nyb_attention *a = &calls.attention;
    *a = plain;
    a->rounding = mlx != 0 ? NYB_ROUNDING_MLX : NYB_ROUNDING_EXACT;
    a->mask_array = mask_of(NYB_MASK_ARRAY_BOOL, (nyb_dtype)0);
    expect_decode(true);
    a->mask_array = mask_of(NYB_MASK_ARRAY_ADD, NYB_F32);
    expect_decode(true);
    a->mask_array = mask_of(NYB_MASK_ARRAY_ADD, a->q.dtype);
    expect_decode(true);
    for (int i = 0; i < 5; i++) {
      a->pages = pages_of(page_tokens[i]);
      expect_decode(i < 3);
    }
    a->pages = pages_of(64);
    a->k.codes = (const uint32_t *)calls.codes + 1; /* off by 4 bytes */
    expect_decode(false);
    a->mask_array = plain.mask_array;
    expect_decode(false);
    a->k.codes = plain.k.codes;
    a->v.scales_stride[2] *= 2; /* and with gaps between tokens */
    expect_decode(false);
    a->v.scales_stride[2] /= 2;
    a->q.data = (const uint16_t *)plain.q.data + 1;
    expect_decode(false);
    a->pages = plain.pages;
    expect_decode(true); /* rows by themselves are copied from anywhere */
    for (int i = 0; i < 4; i++) {
      static const float softcaps[] = {0x1p-4f, 1024, 0.06f, 1025};
      a->softcap = softcaps[i];
      expect_decode(mlx != 0 || i < 2);
    }
  }
  nyb_context_destroy(context);
}

/* Runs what has been made of the call: so many programs are compiled, the last with FEATURES. */
static void expect_compiled(int64_t programs, const char *features) {
  const int64_t before = fake.nvrtc->compilations;
  expect_decode(true);
  MUST(fake.nvrtc->compilations == before + programs);
  MUST(programs == 0 || strstr(fake.nvrtc->last_options, features) != NULL);
}

/* Of decode and merge, each is compiled for those features alone that matter to it: sinks leave
 * decode what it is, and softcaps and slopes the merge. */
static void features_compile(void) {
  open_all();
  make_calls();
  const nyb_attention plain = calls.attention;
  nyb_attention *a = &calls.attention;
  expect_decode(true);
  a->sinks = calls.floats;
  expect_compiled(1, "FEATURES=128 ");
  a->softcap = 30;
  expect_compiled(1, "FEATURES=2 ");
  *a = plain;
  a->softcap = 20;
  expect_compiled(0, "");
  a->alibi_slopes = calls.floats;
  expect_compiled(1, "FEATURES=6 ");
  *a = plain;
  a->window_tokens = 100;
  expect_compiled(2, "FEATURES=1 ");
  a->mask = NYB_MASK_CAUSAL_TOP_LEFT;
  expect_compiled(0, "");
  *a = plain;
  a->mask_array = mask_of(NYB_MASK_ARRAY_BOOL, (nyb_dtype)0);
  expect_compiled(2, "FEATURES=8 "); /* the merge; decode with one row for all heads */
  a->mask_array.stride[1] = TOKENS;
  expect_compiled(1, "FEATURES=8 ");
  a->mask_array = mask_of(NYB_MASK_ARRAY_ADD, NYB_F32);
  expect_compiled(2, "FEATURES=16 ");
  a->mask_array = mask_of(NYB_MASK_ARRAY_ADD, a->q.dtype);
  expect_compiled(1, "FEATURES=80 ");
  nyb_context_destroy(context);
}

/* ---- What they refuse ----------------------------------------------------------------------- */

/* The pointers of what a call has beside a rectangle. */
static void host_feature_pointers(void) {
  static const struct {
    int feature;
    const char *words;
  } cases[] = {{2, "attention.starts is 0x"},        {3, "attention.mask_array.data is 0x"},
               {4, "attention.sinks is 0x"},         {5, "attention.alibi_slopes is 0x"},
               {7, "attention.pages.table is 0x"},   {8, "attention.first.v.codes is 0x"},
               {9, "attention.last.k.scales is 0x"}, {9, "attention.last_begins is 0x"},
               {10, "attention.ring.offsets is 0x"}};
  const nyb_attention plain = calls.attention;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const char *field;
    calls.attention = with_feature(cases[i].feature, &field);
    make_workspace();
    nyb_attention *a = &calls.attention;
    const void **const pointers[] = {(const void **)&a->starts,
                                     &a->mask_array.data,
                                     (const void **)&a->sinks,
                                     (const void **)&a->alibi_slopes,
                                     (const void **)&a->pages.table,
                                     &a->first.v.codes,
                                     &a->last.k.scales,
                                     (const void **)&a->last_begins,
                                     (const void **)&a->ring.offsets};
    *pointers[i] = (const char *)host_memory + 64 - (uintptr_t)host_memory % 64;
    MUST_FAIL(attention_fused(), NYB_ERROR_POINTER, cases[i].words);
    MUST_FAIL(attention_compat(), NYB_ERROR_POINTER, cases[i].words);
    calls.attention = plain;
  }
}

/* Each pointer of each descriptor once as host memory. */
static void host_pointers(void) {
  open_all();
  make_calls();
  make_workspace();
  const struct {
    const void **pointer;
    nyb_status (*run)(void);
    const char *words;
  } cases[] = {
      {&calls.quantize.input.data, quantize, "quantize.input.data is 0x"},
      {(const void **)&calls.quantize.output.codes, quantize, "quantize.output.codes is 0x"},
      {(const void **)&calls.quantize.output.scales, quantize, "quantize.output.scales is 0x"},
      {(const void **)&calls.quantize.output.biases, quantize, "quantize.output.biases is 0x"},
      {(const void **)&calls.quantize.non_finite, quantize, "quantize.non_finite is 0x"},
      {&calls.dequantize.input.codes, dequantize, "dequantize.input.codes is 0x"},
      {&calls.dequantize.input.scales, dequantize, "dequantize.input.scales is 0x"},
      {&calls.dequantize.input.biases, dequantize, "dequantize.input.biases is 0x"},
      {(const void **)&calls.dequantize.output.data, dequantize, "dequantize.output.data is 0x"},
      {&calls.geglu.gate, geglu_fused, "geglu.gate is 0x"},
      {&calls.geglu.up, geglu_fused, "geglu.up is 0x"},
      {(const void **)&calls.geglu.out, geglu_compat, "geglu.out is 0x"},
      {&calls.attention.q.data, attention_fused, "attention.q.data is 0x"},
      {&calls.attention.k.codes, attention_fused, "attention.k.codes is 0x"},
      {&calls.attention.k.scales, attention_compat, "attention.k.scales is 0x"},
      {&calls.attention.k.biases, attention_fused, "attention.k.biases is 0x"},
      {&calls.attention.v.codes, attention_compat, "attention.v.codes is 0x"},
      {&calls.attention.v.scales, attention_fused, "attention.v.scales is 0x"},
      {&calls.attention.v.biases, attention_compat, "attention.v.biases is 0x"},
      {(const void **)&calls.attention.out.data, attention_fused, "attention.out.data is 0x"},
      {(const void **)&calls.attention.lengths, attention_fused, "attention.lengths is 0x"},
      {(const void **)&calls.workspace, attention_compat, "workspace is 0x"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const void *before = *cases[i].pointer;
    *cases[i].pointer = (const char *)host_memory + 64 - (uintptr_t)host_memory % 64;
    MUST_FAIL(cases[i].run(), NYB_ERROR_POINTER, cases[i].words);
    *cases[i].pointer = before;
  }
  host_feature_pointers();
  calls.attention.lse = (nyb_output){.data = host_memory, .dtype = NYB_F32};
  set_strides(calls.attention.lse.stride, QUERY_HEADS, 1, 1);
  MUST_FAIL(attention_fused(), NYB_ERROR_POINTER, "attention.lse.data is 0x");
  MUST(launch_count == 0);
  const nyb_counters c = counters();
  MUST(c.quantize + c.dequantize + c.geglu_fused + c.geglu_compat == 0);
  MUST(c.attention_fused + c.attention_compat == 0);
  nyb_context_destroy(context);
}

/* What the CPU's checks refuse is refused here too, before the driver is asked. */
static void descriptors(void) {
  open_all();
  make_calls();
  make_workspace();
  calls.quantize.output.codes = (char *)calls.codes + 1;
  MUST_FAIL(quantize(), NYB_ERROR_ALIGNMENT, "quantize.output.codes");
  calls.quantize.output.codes = calls.floats;
  MUST_FAIL(quantize(), NYB_ERROR_OVERLAP, "quantize.output.codes");
  calls.attention.out.data = calls.floats;
  MUST_FAIL(attention_fused(), NYB_ERROR_OVERLAP, "attention.out");
  calls.attention.out.data = calls.out;
  if (calls.workspace_bytes > 0) {
    calls.workspace_bytes = 0;
    MUST_FAIL(attention_compat(), NYB_ERROR_WORKSPACE, "workspace_bytes is 0");
  }
  calls.geglu.out = (char *)calls.geglu.gate + 2;
  MUST_FAIL(geglu_fused(), NYB_ERROR_OVERLAP, "geglu.out");
  MUST(launch_count == 0);
  nyb_context_destroy(context);
}

static void test_launches(void **state) {
  (void)state;
  assert_true(in_child(operations_launch));
  assert_true(in_child(features_launch));
  assert_true(in_child(masks_pages_and_caps_launch));
  assert_true(in_child(features_compile));
  assert_true(in_child(merges_launch));
  assert_true(in_child(runs_are_light));
  assert_true(in_child(nothing_to_do));
}

static void test_refusals(void **state) {
  (void)state;
  assert_true(in_child(host_pointers));
  assert_true(in_child(descriptors));
}

/* ---- Whichever call fails ------------------------------------------------------------------- */

/* Their results change nothing: there is nothing left to do or to undo. */
static bool may_be_ignored(const char *call) {
  static const char *const calls_ignored[] = {
      "cuMemFree",      "cuMemFreeHost",   "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
      "cuModuleUnload", "cuStreamDestroy", "cuEventDestroy",  "cuDevicePrimaryCtxRelease"};
  for (size_t i = 0; i < sizeof calls_ignored / sizeof calls_ignored[0]; i++) {
    if (strcmp(call, calls_ignored[i]) == 0) return true;
  }
  return false;
}

typedef nyb_status (*scenario)(void);

/* Runs it with the first call of the driver failing, then the second, until none is left to fail.
 * Each time it must say so with the call's name; memory must be given back. */
static void fail_each_call_once(scenario run) {
  for (int64_t call = 0;; call++) {
    const int64_t before = fake.cuda->live_bytes;
    fake.cuda->fail_call = "*";
    fake.cuda->failed_call = NULL;
    fake.cuda->fail_result = call % 2 == 0 ? 719 : 2;
    fake.cuda->fail_after = call;
    const nyb_status status = run();
    const bool failed = fake.cuda->failed_call != NULL;
    fake.cuda->fail_call = NULL;
    if (!failed) {
      MUST(status == NYB_OK && call > 0);
      break;
    }
    const char *name = fake.cuda->failed_call;
    if (status == NYB_OK && may_be_ignored(name)) {
      nyb_cu_context popped;
      if (strcmp(name, "cuCtxPopCurrent") == 0) MUST(driver->CtxPopCurrent(&popped) == 0);
      continue;
    }
    const nyb_status expected = call % 2 == 0 ? NYB_ERROR_DEVICE : NYB_ERROR_OUT_OF_MEMORY;
    MUST_FAIL(status, expected, name);
    if (strcmp(name, "cuMemFree") != 0) MUST(fake.cuda->live_bytes == before);
    nyb_cu_context current = NULL;
    MUST(driver->CtxGetCurrent(&current) == 0 && current == NULL);
  }
}

/* At first, while kernels are still being loaded on the way, then with all of them there. */
static void fail_each_call(scenario run) {
  open_all();
  make_calls();
  make_workspace();
  fail_each_call_once(run);
  fail_each_call_once(run);
  nyb_context_destroy(context);
}

static void failing_quantize(void) { fail_each_call(quantize); }
static void failing_dequantize(void) { fail_each_call(dequantize); }
static void failing_geglu(void) { fail_each_call(geglu_fused); }
static void failing_geglu_compat(void) { fail_each_call(geglu_compat); }
static void failing_attention(void) { fail_each_call(attention_fused); }
static void failing_compat(void) { fail_each_call(attention_compat); }

static void test_failing_calls(void **state) {
  (void)state;
  assert_true(in_child(failing_quantize));
  assert_true(in_child(failing_dequantize));
  assert_true(in_child(failing_geglu));
  assert_true(in_child(failing_geglu_compat));
  assert_true(in_child(failing_attention));
  assert_true(in_child(failing_compat));
}

/* ---- The cache ------------------------------------------------------------------------------ */

/* Fills a cache beyond its first capacity, trims, refreshes and reserves: the steps of its life,
 * each of which leaves what was there when it fails. */
static nyb_status live(nyb_cache *cache) {
  nyb_status status = NYB_OK;
  for (int step = 0; step < 2 && status == NYB_OK; step++) {
    const int64_t length = nyb_cache_length(cache, 0);
    status = nyb_cache_append(cache, &calls.append, stream);
    MUST(nyb_cache_length(cache, 0) == length + (status == NYB_OK ? TOKENS : 0));
    MUST(nyb_cache_length(cache, 1) == nyb_cache_length(cache, 0));
  }
  if (status == NYB_OK) {
    const int64_t length = nyb_cache_length(cache, 0);
    int64_t trimmed = 0;
    status = nyb_cache_trim(cache, NYB_ALL_SEQUENCES, 3, &trimmed, stream);
    MUST(nyb_cache_length(cache, 0) == length - (status == NYB_OK ? 3 : 0));
    if (status == NYB_OK) MUST(trimmed == 3);
  }
  if (status == NYB_OK) {
    nyb_cache_usage before = NYB_CACHE_USAGE_INIT, after = NYB_CACHE_USAGE_INIT;
    MUST(nyb_cache_get_usage(cache, &before) == NYB_OK);
    status = nyb_cache_reserve(cache, 3 * before.capacity_tokens, stream);
    MUST(nyb_cache_get_usage(cache, &after) == NYB_OK);
    MUST(after.capacity_tokens == (status == NYB_OK ? 3 : 1) * before.capacity_tokens);
    MUST(after.used_bytes == before.used_bytes);
  }
  return status;
}

static nyb_status life_of_a_cache(void) {
  nyb_status status;
  nyb_cache *cache = cache_with(TOKENS, &status);
  if (status != NYB_OK) return status;
  status = live(cache);
  if (status == NYB_OK) status = nyb_cache_refresh(cache, stream);
  char sentence[512];
  snprintf(sentence, sizeof sentence, "%s", nyb_last_error());
  fake.cuda->fail_call = NULL; /* destroying has no status to give */
  nyb_cache_destroy(cache);
  MUST(strcmp(sentence, nyb_last_error()) == 0);
  return status;
}

static void failing_cache(void) { fail_each_call(life_of_a_cache); }

static void cache_lives(void) {
  open_all();
  make_calls();
  const int64_t before = fake.cuda->live_bytes;
  MUST(life_of_a_cache() == NYB_OK);
  MUST(fake.cuda->live_bytes == before);
  MUST(counters().cache_append == 2 && calls_of("cache_append_affine4_cuda") == 2);
  MUST(calls_of("quantize_affine4_cuda") == 0);
  nyb_status status;
  nyb_cache *cache = cache_with(TOKENS, &status);
  nyb_attention attention = NYB_ATTENTION_INIT;
  MUST(status == NYB_OK && nyb_cache_view(cache, &attention) == NYB_OK);
  nyb_cuda_scope scope;
  MUST(nyb_cuda_enter(context, &scope) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention", "lengths", attention.lengths) == NYB_OK);
  MUST(nyb_cuda_check_pointer(&scope, "attention.k", "codes", attention.k.codes) == NYB_OK);
  nyb_cuda_leave(&scope);
  calls.append.key.data = host_memory;
  MUST_FAIL(nyb_cache_append(cache, &calls.append, stream), NYB_ERROR_POINTER,
            "append.key.data is 0x");
  MUST(nyb_cache_length(cache, 0) == 0);
  nyb_cache_destroy(cache);
  nyb_context_destroy(context);
}

/* While a stream is captured an append that fits is recorded, and one that would grow is refused,
 * as is what waits for the stream. */
static void captured_cache(void) {
  open_all();
  make_calls();
  nyb_status status;
  nyb_cache *cache = cache_with(TOKENS, &status);
  MUST(status == NYB_OK);
  fake.cuda->capturing = stream;
  launch_count = 0;
  MUST(nyb_cache_append(cache, &calls.append, stream) == NYB_OK && launch_count == 1);
  MUST_FAIL(nyb_cache_append(cache, &calls.append, stream), NYB_ERROR_UNSUPPORTED, "captured");
  MUST_FAIL(nyb_cache_reserve(cache, 100, stream), NYB_ERROR_UNSUPPORTED, "captured");
  MUST_FAIL(nyb_cache_refresh(cache, stream), NYB_ERROR_UNSUPPORTED, "captured");
  MUST(nyb_cache_length(cache, 0) == TOKENS && launch_count == 1);
  fake.cuda->capturing = NULL;
  MUST(nyb_cache_append(cache, &calls.append, stream) == NYB_OK);
  nyb_cache_destroy(cache);
  nyb_context_destroy(context);
}

static void cache_without_memory(void) {
  open_all();
  make_calls();
  fake.cuda->memory_bytes = (size_t)fake.cuda->live_bytes + 400;
  nyb_status status;
  MUST(cache_with(1 << 20, &status) == NULL);
  MUST_FAIL(status, NYB_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
  MUST(strstr(nyb_last_error(), "CUDA_ERROR_OUT_OF_MEMORY: out of memory") != NULL);
  nyb_cache *cache = cache_with(0, &status); /* grows at its first append */
  MUST(status == NYB_OK);
  MUST_FAIL(nyb_cache_append(cache, &calls.append, stream), NYB_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
  MUST_FAIL(nyb_cache_reserve(cache, 1 << 20, stream), NYB_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
  MUST(nyb_cache_length(cache, 0) == 0);
  fake.cuda->memory_bytes = 0;
  MUST(nyb_cache_append(cache, &calls.append, stream) == NYB_OK);
  nyb_cache_destroy(cache);
  nyb_context_destroy(context);
}

/* The CUDA context goes, the cache stays: every call says what has happened, in the driver's
 * words; destroying it does no harm. */
static void context_destroyed_under_a_cache(void) {
  open_all();
  nyb_cu_context own, current;
  MUST(driver->CtxCreate(&own, 0, 0) == 0);
  make_calls();
  nyb_status status;
  nyb_cache *cache = cache_with(TOKENS, &status);
  MUST(status == NYB_OK);
  MUST(nyb_cache_append(cache, &calls.append, stream) == NYB_OK);
  MUST(driver->CtxDestroy(own) == 0);
  const char *words = "CUDA_ERROR_CONTEXT_IS_DESTROYED";
  MUST_FAIL(nyb_cache_append(cache, &calls.append, stream), NYB_ERROR_DEVICE, words);
  MUST_FAIL(nyb_cache_reserve(cache, 1000, stream), NYB_ERROR_DEVICE, words);
  MUST_FAIL(nyb_cache_trim(cache, 0, 1, NULL, stream), NYB_ERROR_DEVICE, words);
  MUST_FAIL(nyb_cache_refresh(cache, stream), NYB_ERROR_DEVICE, words);
  MUST(nyb_cache_length(cache, 0) == TOKENS);
  nyb_cache_destroy(cache);
  MUST(driver->CtxGetCurrent(&current) == 0 && current == NULL);
  nyb_context_destroy(context);
}

/* Device memory from the caller's allocator, and nothing else of the cache's. */
static int64_t own_bytes;

static void *own_allocate(void *data, size_t bytes, size_t alignment) {
  MUST(data == &own_bytes && alignment >= 64);
  nyb_cu_address address = 0;
  if (driver->MemAlloc(&address, bytes) != 0) return NULL;
  own_bytes += (int64_t)bytes;
  return (void *)(uintptr_t)address;
}

static void own_release(void *data, void *memory) {
  MUST(data == &own_bytes && memory != NULL);
  MUST(driver->MemFree((uintptr_t)memory) == 0);
}

static void callers_allocator(void) {
  open_all();
  make_calls();
  nyb_context_destroy(context);
  const nyb_context_options options = {.struct_size = sizeof options,
                                       .backend = NYB_BACKEND_CUDA,
                                       .device_allocator = {own_allocate, own_release, &own_bytes}};
  MUST(nyb_context_create(&options, &context) == NYB_OK);
  const int64_t before = fake.cuda->live_bytes;
  MUST(life_of_a_cache() == NYB_OK);
  MUST(own_bytes > 0 && fake.cuda->live_bytes == before);
  fake.cuda->memory_bytes = 1;
  nyb_status status;
  MUST(cache_with(TOKENS, &status) == NULL);
  MUST_FAIL(status, NYB_ERROR_OUT_OF_MEMORY, "options.device_allocator had no ");
  nyb_context_destroy(context);
}

static void test_cache(void **state) {
  (void)state;
  assert_true(in_child(cache_lives));
  assert_true(in_child(captured_cache));
  assert_true(in_child(cache_without_memory));
  assert_true(in_child(context_destroyed_under_a_cache));
  assert_true(in_child(callers_allocator));
}

static void test_failing_cache(void **state) {
  (void)state;
  assert_true(in_child(failing_cache));
}

int main(void) {
  unsetenv("NYBBLE_PATH");
  unsetenv("NYBBLE_GEGLU");
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_launches),      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_failing_calls), cmocka_unit_test(test_cache),
      cmocka_unit_test(test_failing_cache),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
