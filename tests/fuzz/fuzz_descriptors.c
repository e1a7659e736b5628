/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors made of any bytes: hostile sizes, strides, pointers, enums.
 *
 * All pointers lead into one arena between two unreadable pages. A library cannot know how large a
 * caller's buffers are, so that this program works out itself, in 128 bits and without the
 * library's code, what memory a descriptor reaches, and sorts descriptors into three kinds:
 *
 *   must be refused   something in it contradicts the header (a negative size, a misaligned
 * pointer, offsets that leave the address space, ...): it is handed over, must fail, and must
 * change no byte; within            all that it reaches lies in the arena: it is handed over, and
 * may succeed (then only bytes of its outputs have changed) or fail (then none has); outside
 * well-formed, but with buffers larger than the arena, or more work than a fuzzer has time for: it
 * is left out.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "nybble.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes);

#define ARENA_BYTES ((size_t)1 << 17)
#define GUARD_BYTES ((size_t)1 << 16)
#define MAX_WORK ((__int128)1 << 21) /* elements */
#define MAX_WORKSPACE_BYTES ((size_t)1 << 24)

static uint8_t *arena;                /* what the library gets */
static uint8_t pristine[ARENA_BYTES]; /* what it holds before each call */
static uint8_t expected[ARENA_BYTES]; /* the same with the outputs copied in after a call */
static nyb_context *contexts[2];      /* scalar, and the best (or NYBBLE_ISA) */

static void require(bool condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "violated: %s; last error: %s\n", what, nyb_last_error());
  abort();
}

static void *limited_allocate(void *user_data, size_t bytes, size_t alignment) {
  (void)user_data;
  if (bytes > MAX_WORKSPACE_BYTES) return NULL;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void limited_release(void *user_data, void *block) {
  (void)user_data;
  free(block);
}

static void set_up(void) {
  uint8_t *mapping =
      mmap(NULL, ARENA_BYTES + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(mapping != MAP_FAILED, "a mapping");
  arena = mapping + GUARD_BYTES;
  require(mprotect(arena, ARENA_BYTES, PROT_READ | PROT_WRITE) == 0, "an arena");
  /* Small finite numbers of either sign in f32, f16 and bf16 alike. */
  uint32_t state = 1;
  for (size_t i = 0; i < ARENA_BYTES; i++) {
    state = state * 1664525u + 1013904223u;
    const uint8_t byte = (uint8_t)(state >> 24);
    pristine[i] = i % 2 == 0 ? byte : (uint8_t)((byte & 0x80u) | 0x3cu | (byte & 3u));
  }
  for (int i = 0; i < 2; i++) {
    nyb_context_options options = NYB_CONTEXT_OPTIONS_INIT;
    options.threads = 1;
    options.isa = i == 0 ? NYB_ISA_SCALAR : NYB_ISA_AUTO;
    options.allocator = (nyb_allocator){limited_allocate, limited_release, NULL};
    require(nyb_context_create(&options, &contexts[i]) == NYB_OK, "a context");
  }
}

/* ---- Bytes into fields ----------------------------------------------------------------------- */

typedef struct byte_source {
  const uint8_t *at, *end;
} byte_source;

static uint8_t take_byte(byte_source *source) {
  return source->at < source->end ? *source->at++ : 0;
}

static uint64_t take_bits(byte_source *source, int bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < bytes; i++) bits |= (uint64_t)take_byte(source) << 8 * i;
  return bits;
}

/* Often a size that makes sense, sometimes one that does not. */
static int64_t take_size(byte_source *source, int64_t usual_unit) {
  const uint8_t kind = take_byte(source);
  if (kind < 160) return (1 + kind % 5) * usual_unit;
  if (kind < 200) return kind % 16;
  if (kind < 216) return (int64_t)take_bits(source, 2);
  if (kind < 232) return -(int64_t)take_byte(source);
  if (kind < 244) { /* a power of two and its neighbours */
    return (int64_t)(((uint64_t)1 << take_byte(source) % 64) + take_byte(source) % 3 - 1);
  }
  return (int64_t)take_bits(source, 8);
}

/* Usually the stride of contiguous rows. */
static int64_t take_stride(byte_source *source, int64_t contiguous) {
  const uint8_t kind = take_byte(source);
  if (kind < 200) return contiguous;
  if (kind < 208) return (int64_t)(0 - (uint64_t)contiguous);
  if (kind < 216) return 0;
  if (kind < 232) return (int64_t)((uint64_t)contiguous + take_byte(source));
  return take_size(source, 1);
}

/* Usually aligned to four; sometimes NULL. */
static void *take_pointer(byte_source *source) {
  const uint32_t bits = (uint32_t)take_bits(source, 3);
  if (bits >> 20 == 15) return NULL;
  const size_t offset = bits % ARENA_BYTES;
  return arena + (bits >> 20 == 14 ? offset : offset & ~(size_t)63);
}

static int take_choice(byte_source *source, int first, int count) {
  const uint8_t kind = take_byte(source);
  return kind < 250 ? first + kind % count : (int)take_bits(source, 4);
}

static nyb_dtype take_dtype(byte_source *source) {
  return (nyb_dtype)take_choice(source, NYB_F32, 3);
}

static int64_t wrapping_product(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a * (uint64_t)b);
}

/* ---- What a descriptor reaches --------------------------------------------------------------- */

typedef struct reached_view {
  const void *data;
  int64_t element_bytes, row_elements;
  int64_t shape[3], stride[3];
} reached_view;

typedef struct verdict {
  bool refused; /* must be */
  bool outside; /* of the arena */
} verdict;

static bool is_empty(const reached_view *view) {
  return view->shape[0] == 0 || view->shape[1] == 0 || view->shape[2] == 0 ||
         view->row_elements == 0;
}

/* Adds what a view of sizes that are not negative reaches. */
static void judge_view(const reached_view *view, verdict *verdict) {
  if (is_empty(view)) return;
  __int128 lowest = 0, highest = (__int128)view->row_elements * view->element_bytes;
  for (int axis = 0; axis < 3; axis++) {
    if (view->shape[axis] == 1) continue;
    __int128 reach;
    /* So far out of the address space that the sums below could leave 128 bits. */
    if (__builtin_mul_overflow((__int128)view->stride[axis] * view->element_bytes,
                               (__int128)(view->shape[axis] - 1), &reach) ||
        reach > (__int128)1 << 100 || reach < -((__int128)1 << 100)) {
      verdict->refused = true;
      return;
    }
    if (reach < 0) {
      lowest += reach;
    } else {
      highest += reach;
    }
  }
  const __int128 base = (__int128)(uintptr_t)view->data;
  if (view->data == NULL || base % view->element_bytes != 0 || lowest < INT64_MIN ||
      highest > INT64_MAX || base + lowest < 0 || base + highest > (__int128)UINTPTR_MAX) {
    verdict->refused = true;
    return;
  }
  const __int128 arena_base = (__int128)(uintptr_t)arena;
  if (base + lowest < arena_base || base + highest > arena_base + (__int128)ARENA_BYTES) {
    verdict->outside = true;
  }
}

/* Whether a product of sizes that are not negative leaves what a fuzzer has time for. */
static bool too_much(const int64_t *sizes, int count) {
  __int128 product = 1;
  for (int i = 0; i < count; i++) {
    if (sizes[i] == 0) return false;
  }
  for (int i = 0; i < count; i++) {
    product *= sizes[i];
    if (product > MAX_WORK) return true;
  }
  return false;
}

static bool any_negative(const int64_t *sizes, int count) {
  for (int i = 0; i < count; i++) {
    if (sizes[i] < 0) return true;
  }
  return false;
}

static bool is_dtype(nyb_dtype dtype) { return dtype >= NYB_F32 && dtype <= NYB_BF16; }

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

static bool is_format(nyb_format format, int64_t dim) {
  if (!is_dtype(format.dtype) || dim < 1) return false;
  if (format.scheme == NYB_PLAIN) return format.bits == 0 && format.group_size == 0;
  if (format.scheme != NYB_AFFINE) return false;
  const int32_t bits = format.bits, group_size = format.group_size;
  return bits >= 2 && bits <= 8 && bits != 7 &&
         (group_size == 32 || group_size == 64 || group_size == 128) && dim % group_size == 0;
}

/* Codes, scales and biases of a format that exists; returns how many of them there are. */
static int views_of_stored(const nyb_stored *stored, int64_t dim, const int64_t shape[3],
                           reached_view views[3]) {
  const nyb_format format = stored->format;
  const bool affine = format.scheme == NYB_AFFINE;
  const int64_t groups = affine ? dim / format.group_size : 0;
  const void *const data[3] = {stored->codes, stored->scales, stored->biases};
  const int64_t *const strides[3] = {stored->codes_stride, stored->scales_stride,
                                     stored->biases_stride};
  for (int i = 0; i < (affine ? 3 : 1); i++) {
    views[i] = (reached_view){
        .data = data[i],
        .element_bytes = affine && i == 0 ? 4 : bytes_of(format.dtype),
        .row_elements = i > 0    ? groups
                        : affine ? dim / 32 * format.bits
                                 : dim,
    };
    memcpy(views[i].shape, shape, sizeof views[i].shape);
    memcpy(views[i].stride, strides[i], sizeof views[i].stride);
  }
  return affine ? 3 : 1;
}

/* ---- Before and after a call ----------------------------------------------------------------- */

/* Sometimes with a few NaN in it. */
static void fill_arena(byte_source *source) {
  memcpy(arena, pristine, ARENA_BYTES);
  if (take_byte(source) > 200) {
    memset(arena + take_bits(source, 3) % (ARENA_BYTES / 64) * 64, 0xff, 64);
  }
  memcpy(expected, arena, ARENA_BYTES);
}

/* What the call wrote to an output, it was allowed to write. */
static void allow_output(const reached_view *view) {
  if (is_empty(view)) return;
  for (int64_t i = 0; i < view->shape[0]; i++) {
    for (int64_t j = 0; j < view->shape[1]; j++) {
      for (int64_t k = 0; k < view->shape[2]; k++) {
        int64_t element = 0;
        const int64_t index[3] = {i, j, k};
        for (int axis = 0; axis < 3; axis++) {
          if (view->shape[axis] > 1) element += index[axis] * view->stride[axis];
        }
        const size_t offset =
            (size_t)((const uint8_t *)view->data - arena) + (size_t)(element * view->element_bytes);
        memcpy(expected + offset, arena + offset,
               (size_t)(view->row_elements * view->element_bytes));
      }
    }
  }
}

static void check_call(nyb_status status, verdict verdict, const reached_view *outputs,
                       int output_count) {
  require(status == NYB_OK || nyb_last_error()[0] != '\0', "a sentence");
  require(status == NYB_OK || strcmp(nyb_status_name(status), "NYB_ERROR_?") != 0, "a status");
  if (verdict.refused) require(status != NYB_OK, "what must be refused is refused");
  for (int i = 0; status == NYB_OK && i < output_count; i++) allow_output(&outputs[i]);
  require(memcmp(arena, expected, ARENA_BYTES) == 0, "no byte changed but those of the outputs");
}

static bool is_called(verdict verdict) { return verdict.refused || !verdict.outside; }

/* ---- Descriptors ----------------------------------------------------------------------------- */

static size_t take_struct_size(byte_source *source, size_t right, verdict *verdict) {
  if (take_byte(source) < 250) return right;
  verdict->refused = true;
  return take_byte(source) % right;
}

static nyb_format take_format(byte_source *source) {
  static const int32_t bits[] = {2, 3, 4, 5, 6, 8}, groups[] = {32, 64, 128};
  nyb_format format = {.scheme = (nyb_scheme)take_choice(source, NYB_PLAIN, 2)};
  if (format.scheme != NYB_PLAIN || take_byte(source) > 250) {
    format.bits = bits[take_byte(source) % 6];
    format.group_size = groups[take_byte(source) % 3];
    if (take_byte(source) > 250) format.bits = take_choice(source, 0, 10);
    if (take_byte(source) > 250) format.group_size = (int32_t)(uint32_t)take_bits(source, 1);
  }
  format.dtype = take_dtype(source);
  return format;
}

static void take_strides(byte_source *source, const int64_t shape[3], int64_t row,
                         int64_t stride[3]) {
  stride[2] = take_stride(source, row);
  stride[1] = take_stride(source, wrapping_product(row, shape[2]));
  stride[0] = take_stride(source, wrapping_product(wrapping_product(row, shape[2]), shape[1]));
}

static nyb_stored_output take_stored(byte_source *source, int64_t dim, const int64_t shape[3]) {
  nyb_stored_output stored = {.format = take_format(source)};
  const bool affine = stored.format.scheme == NYB_AFFINE;
  const int64_t group = stored.format.group_size != 0 ? stored.format.group_size : 1;
  const int64_t words = affine ? wrapping_product(dim / 32, stored.format.bits) : dim;
  stored.codes = take_pointer(source);
  take_strides(source, shape, words, stored.codes_stride);
  if (affine || take_byte(source) > 200) {
    stored.scales = take_pointer(source);
    stored.biases = take_pointer(source);
    take_strides(source, shape, dim / group, stored.scales_stride);
    take_strides(source, shape, dim / group, stored.biases_stride);
  }
  return stored;
}

static nyb_stored read_only(const nyb_stored_output *output) {
  nyb_stored stored = {.format = output->format,
                       .codes = output->codes,
                       .scales = output->scales,
                       .biases = output->biases};
  memcpy(stored.codes_stride, output->codes_stride, sizeof stored.codes_stride);
  memcpy(stored.scales_stride, output->scales_stride, sizeof stored.scales_stride);
  memcpy(stored.biases_stride, output->biases_stride, sizeof stored.biases_stride);
  return stored;
}

static reached_view view_of_floats(const void *data, nyb_dtype dtype, const int64_t stride[3],
                                   const int64_t shape[3], int64_t dim) {
  reached_view view = {.data = data, .element_bytes = bytes_of(dtype), .row_elements = dim};
  memcpy(view.shape, shape, sizeof view.shape);
  memcpy(view.stride, stride, sizeof view.stride);
  return view;
}

/* ---- quantize and dequantize ----------------------------------------------------------------- */

/* Floats on one side and stored rows on the other; returns how many views the stored rows have, 0
 * where something is wrong that has no views. */
static int judge_rows(const int64_t shape[3], int64_t dim, const nyb_stored *stored,
                      const reached_view *floats, bool dtype_is_good, reached_view views[3],
                      verdict *verdict) {
  const int64_t sizes[4] = {shape[0], shape[1], shape[2], dim};
  if (any_negative(sizes, 4) || !dtype_is_good || !is_format(stored->format, dim) ||
      dim > (int64_t)1 << 40) {
    verdict->refused = true;
    return 0;
  }
  if (too_much(sizes, 4)) verdict->outside = true;
  const int count = views_of_stored(stored, dim, shape, views);
  for (int i = 0; i < count; i++) judge_view(&views[i], verdict);
  judge_view(floats, verdict);
  return count;
}

static void fuzz_quantize(byte_source *source, nyb_context *context) {
  verdict verdict = {0};
  nyb_quantize quantize = {.struct_size = take_struct_size(source, sizeof quantize, &verdict)};
  const int64_t shape[3] = {take_size(source, 1), take_size(source, 1), take_size(source, 1)};
  quantize.batch = shape[0];
  quantize.heads = shape[1];
  quantize.tokens = shape[2];
  quantize.dim = take_size(source, 32);
  quantize.rule = (nyb_rule)take_choice(source, NYB_RULE_MLX_CPU, 2);
  quantize.reserved = take_byte(source) > 250;
  quantize.input.data = take_pointer(source);
  quantize.input.dtype = take_dtype(source);
  take_strides(source, shape, quantize.dim, quantize.input.stride);
  quantize.output = take_stored(source, quantize.dim, shape);
  if (quantize.reserved != 0 || (unsigned)quantize.rule > NYB_RULE_MLX_GPU) verdict.refused = true;
  const nyb_stored stored = read_only(&quantize.output);
  const reached_view floats = view_of_floats(quantize.input.data, quantize.input.dtype,
                                             quantize.input.stride, shape, quantize.dim);
  reached_view outputs[3];
  const int count = judge_rows(shape, quantize.dim, &stored, &floats,
                               is_dtype(quantize.input.dtype), outputs, &verdict);
  if (!is_called(verdict)) return;
  check_call(nyb_quantize_run(context, &quantize, NULL), verdict, outputs, count);
}

static void fuzz_dequantize(byte_source *source, nyb_context *context) {
  verdict verdict = {0};
  nyb_dequantize dequantize = {.struct_size =
                                   take_struct_size(source, sizeof dequantize, &verdict)};
  const int64_t shape[3] = {take_size(source, 1), take_size(source, 1), take_size(source, 1)};
  dequantize.batch = shape[0];
  dequantize.heads = shape[1];
  dequantize.tokens = shape[2];
  dequantize.dim = take_size(source, 32);
  dequantize.output.data = take_pointer(source);
  dequantize.output.dtype = take_dtype(source);
  take_strides(source, shape, dequantize.dim, dequantize.output.stride);
  const nyb_stored_output stored = take_stored(source, dequantize.dim, shape);
  dequantize.input = read_only(&stored);
  const reached_view output = view_of_floats(dequantize.output.data, dequantize.output.dtype,
                                             dequantize.output.stride, shape, dequantize.dim);
  reached_view inputs[3];
  judge_rows(shape, dequantize.dim, &dequantize.input, &output, is_dtype(dequantize.output.dtype),
             inputs, &verdict);
  if (!is_called(verdict)) return;
  check_call(nyb_dequantize_run(context, &dequantize, NULL), verdict, &output, 1);
}

/* ---- geglu ----------------------------------------------------------------------------------- */

static void fuzz_geglu(byte_source *source, nyb_context *context) {
  verdict verdict = {0};
  nyb_geglu geglu = {.struct_size = take_struct_size(source, sizeof geglu, &verdict)};
  geglu.rows = take_size(source, 1);
  geglu.columns = take_size(source, 7);
  geglu.dtype = take_dtype(source);
  geglu.path = (nyb_path)take_choice(source, NYB_PATH_AUTO, 3);
  geglu.gate = take_pointer(source);
  geglu.gate_stride = take_stride(source, geglu.columns);
  geglu.up = take_pointer(source);
  geglu.up_stride = take_stride(source, geglu.columns);
  geglu.out = take_pointer(source);
  geglu.out_stride = take_stride(source, geglu.columns);
  if (take_byte(source) > 200) { /* in place */
    geglu.out = (void *)(uintptr_t)geglu.gate;
    geglu.out_stride = geglu.gate_stride;
  }
  const int64_t sizes[2] = {geglu.rows, geglu.columns};
  if (any_negative(sizes, 2) || !is_dtype(geglu.dtype) || (unsigned)geglu.path > NYB_PATH_COMPAT) {
    verdict.refused = true;
  }
  reached_view views[3] = {{.data = geglu.out}, {.data = geglu.gate}, {.data = geglu.up}};
  const int64_t strides[3] = {geglu.out_stride, geglu.gate_stride, geglu.up_stride};
  for (int i = 0; i < 3 && !verdict.refused; i++) {
    views[i].element_bytes = bytes_of(geglu.dtype);
    views[i].row_elements = geglu.columns;
    views[i].shape[0] = views[i].shape[1] = 1;
    views[i].shape[2] = geglu.rows;
    views[i].stride[2] = strides[i];
    judge_view(&views[i], &verdict);
  }
  if (too_much(sizes, 2)) verdict.outside = true;
  if (!is_called(verdict)) return;
  check_call(nyb_geglu_run(context, &geglu, NULL), verdict, views, 1);
}

/* ---- attention ------------------------------------------------------------------------------- */

static void judge_attention(const nyb_attention *a, reached_view outputs[2], int *output_count,
                            verdict *verdict) {
  const int64_t sizes[7] = {a->batch,   a->query_heads, a->kv_heads,       a->query_len,
                            a->key_dim, a->value_dim,   a->capacity_tokens};
  *output_count = 0;
  if (any_negative(sizes, 7) || a->batch < 1 || a->query_heads < 1 || a->kv_heads < 1 ||
      a->query_len < 1 || a->query_heads % a->kv_heads != 0 || a->capacity_tokens > INT32_MAX ||
      !is_format(a->k.format, a->key_dim) || !is_format(a->v.format, a->value_dim) ||
      !is_dtype(a->q.dtype) || !is_dtype(a->out.dtype) ||
      (a->lse.data != NULL && a->lse.dtype != NYB_F32) || !isfinite(a->scale) || a->scale == 0 ||
      (unsigned)a->mask > NYB_MASK_CAUSAL || (unsigned)a->path > NYB_PATH_COMPAT ||
      (unsigned)a->rounding > NYB_ROUNDING_MLX) {
    verdict->refused = true;
    return;
  }
  const int64_t queries[3] = {a->batch, a->query_heads, a->query_len};
  const int64_t stored[3] = {a->batch, a->kv_heads, a->capacity_tokens};
  reached_view views[10] = {
      view_of_floats(a->out.data, a->out.dtype, a->out.stride, queries, a->value_dim),
      view_of_floats(a->lse.data, NYB_F32, a->lse.stride, queries, a->lse.data != NULL ? 1 : 0),
      view_of_floats(a->q.data, a->q.dtype, a->q.stride, queries, a->key_dim),
      {.data = a->lengths, .element_bytes = 4, .row_elements = a->batch, .shape = {1, 1, 1}},
  };
  int count = 4;
  count += views_of_stored(&a->k, a->key_dim, stored, views + count);
  count += views_of_stored(&a->v, a->value_dim, stored, views + count);
  for (int i = 0; i < count; i++) judge_view(&views[i], verdict);
  *output_count = 2;
  memcpy(outputs, views, 2 * sizeof outputs[0]);
  const int64_t key_work[5] = {a->batch, a->query_heads, a->query_len, a->capacity_tokens + 1,
                               a->key_dim};
  const int64_t value_work[5] = {a->batch, a->query_heads, a->query_len, a->capacity_tokens + 1,
                                 a->value_dim};
  if (too_much(key_work, 5) || too_much(value_work, 5)) verdict->outside = true;
}

/* Lengths lie in the arena like all else. They are usually good ones. */
static const int32_t *take_lengths(byte_source *source, int64_t batch, int64_t capacity_tokens,
                                   verdict *verdict) {
  if (take_byte(source) > 250) return take_pointer(source);
  const size_t offset = (size_t)take_bits(source, 2) % (ARENA_BYTES / 2);
  int32_t *lengths = (int32_t *)(void *)(arena + offset / 4 * 4);
  for (int64_t i = 0; i < batch && i < 64; i++) {
    const uint8_t kind = take_byte(source);
    const int64_t length = kind < 250 ? (capacity_tokens > 0 && capacity_tokens < INT32_MAX
                                             ? kind % (capacity_tokens + 1)
                                             : kind)
                                      : (int64_t)(int32_t)take_bits(source, 4);
    lengths[i] = (int32_t)length;
    if (length < 0 || length > capacity_tokens) verdict->refused = true;
  }
  memcpy(expected, arena, ARENA_BYTES);
  return lengths;
}

static nyb_attention take_attention(byte_source *source, verdict *verdict) {
  nyb_attention a = {.struct_size = take_struct_size(source, sizeof a, verdict)};
  a.batch = take_size(source, 1);
  a.kv_heads = take_size(source, 1);
  a.query_heads = wrapping_product(a.kv_heads, take_size(source, 1));
  a.query_len = take_size(source, 1);
  a.key_dim = take_size(source, 32);
  a.value_dim = take_size(source, 32);
  a.capacity_tokens = take_size(source, 20);
  const int64_t queries[3] = {a.batch, a.query_heads, a.query_len};
  const int64_t stored[3] = {a.batch, a.kv_heads, a.capacity_tokens};
  a.q.data = take_pointer(source);
  a.q.dtype = take_dtype(source);
  take_strides(source, queries, a.key_dim, a.q.stride);
  a.out.data = take_pointer(source);
  a.out.dtype = take_dtype(source);
  take_strides(source, queries, a.value_dim, a.out.stride);
  if (take_byte(source) % 2 == 0) {
    a.lse.data = take_pointer(source);
    a.lse.dtype = take_byte(source) < 250 ? NYB_F32 : take_dtype(source);
    take_strides(source, queries, 1, a.lse.stride);
  }
  const nyb_stored_output k = take_stored(source, a.key_dim, stored);
  const nyb_stored_output v = take_stored(source, a.value_dim, stored);
  a.k = read_only(&k);
  a.v = read_only(&v);
  static const float scales[] = {0.125f, 1, -2, 1e30f, 1e-30f, 0, NAN, INFINITY};
  const uint8_t scale = take_byte(source);
  a.scale = scale < 240 ? 0.125f : scales[scale % 8];
  a.mask = (nyb_mask)take_choice(source, NYB_MASK_NONE, 2);
  a.path = (nyb_path)take_choice(source, NYB_PATH_AUTO, 3);
  a.rounding = (nyb_rounding)take_choice(source, NYB_ROUNDING_EXACT, 2);
  a.lengths = take_lengths(source, a.batch, a.capacity_tokens, verdict);
  return a;
}

static void fuzz_attention(byte_source *source, nyb_context *context) {
  verdict verdict = {0};
  const nyb_attention attention = take_attention(source, &verdict);
  reached_view outputs[2];
  int output_count;
  judge_attention(&attention, outputs, &output_count, &verdict);
  nyb_plan plan = NYB_PLAN_INIT;
  const nyb_status planned = nyb_attention_plan(context, &attention, &plan);
  require(memcmp(arena, expected, ARENA_BYTES) == 0, "planning changes nothing");
  if (!is_called(verdict)) return;
  if (planned != NYB_OK) plan.workspace_bytes = 4096;
  if (plan.workspace_bytes > MAX_WORKSPACE_BYTES) return;
  size_t given = plan.workspace_bytes;
  const uint8_t flaw = take_byte(source);
  if (flaw > 250 && given > 0) { /* a byte too few; the memory behind it is not there either */
    given--;
    verdict.refused = true;
  }
  uint8_t *workspace = given == 0 ? NULL : aligned_alloc(64, (given + 63) / 64 * 64);
  check_call(nyb_attention_run(context, &attention, workspace, given, NULL), verdict, outputs,
             output_count);
  free(workspace);
}

/* ---- cache ----------------------------------------------------------------------------------- */

typedef struct model_cache { /* what a cache should say of itself */
  nyb_cache *cache;
  nyb_cache_options options;
  int64_t lengths[16];
} model_cache;

static bool options_are_good(const nyb_cache_options *options) {
  return options->batch >= 1 && options->kv_heads >= 1 &&
         is_format(options->key_format, options->key_dim) &&
         is_format(options->value_format, options->value_dim) &&
         (unsigned)options->rule <= NYB_RULE_MLX_GPU && options->reserved == 0 &&
         options->max_tokens >= 0 && options->initial_capacity_tokens >= 0 &&
         (options->max_tokens == 0 || options->initial_capacity_tokens <= options->max_tokens);
}

static void check_model(const model_cache *model) {
  nyb_attention view = NYB_ATTENTION_INIT;
  nyb_cache_usage usage = NYB_CACHE_USAGE_INIT;
  require(nyb_cache_view(model->cache, &view) == NYB_OK, "a view");
  require(nyb_cache_get_usage(model->cache, &usage) == NYB_OK, "the usage");
  require(usage.used_bytes <= usage.allocated_bytes, "used of allocated");
  int64_t tokens = 0;
  for (int64_t i = 0; i < model->options.batch; i++) {
    require(nyb_cache_length(model->cache, i) == model->lengths[i], "the length");
    require(view.lengths[i] == model->lengths[i], "the length in the view");
    require(view.lengths[i] <= view.capacity_tokens, "a length within the capacity");
    tokens += model->lengths[i];
  }
  const int64_t row_bytes =
      nyb_format_row_bytes(&model->options.key_format, model->options.key_dim) +
      nyb_format_row_bytes(&model->options.value_format, model->options.value_dim);
  require(usage.used_bytes == tokens * model->options.kv_heads * row_bytes, "used bytes");
  require(model->options.max_tokens == 0 || view.capacity_tokens <= model->options.max_tokens,
          "a capacity within max_tokens");
}

static void fuzz_append(byte_source *source, model_cache *model) {
  const nyb_cache_options *options = &model->options;
  verdict verdict = {0};
  nyb_append append = {.struct_size = take_struct_size(source, sizeof append, &verdict)};
  append.tokens = take_size(source, 9);
  const int64_t shape[3] = {options->batch, options->kv_heads, append.tokens};
  nyb_input *const inputs[2] = {&append.key, &append.value};
  const int64_t dims[2] = {options->key_dim, options->value_dim};
  int64_t limit = options->max_tokens > 0 ? options->max_tokens : INT32_MAX;
  for (int64_t i = 0; i < options->batch; i++) {
    if (append.tokens > limit - model->lengths[i]) verdict.refused = true;
  }
  if (append.tokens < 0) verdict.refused = true;
  for (int i = 0; i < 2; i++) {
    inputs[i]->data = take_pointer(source);
    inputs[i]->dtype = take_dtype(source);
    take_strides(source, shape, dims[i], inputs[i]->stride);
    if (!is_dtype(inputs[i]->dtype)) verdict.refused = true;
    const int64_t work[4] = {shape[0], shape[1], shape[2], dims[i]};
    if (verdict.refused) continue;
    if (too_much(work, 4)) verdict.outside = true;
    const reached_view view =
        view_of_floats(inputs[i]->data, inputs[i]->dtype, inputs[i]->stride, shape, dims[i]);
    judge_view(&view, &verdict);
  }
  if (!is_called(verdict)) return;
  const nyb_status status = nyb_cache_append(model->cache, &append, NULL);
  check_call(status, verdict, NULL, 0);
  for (int64_t i = 0; status == NYB_OK && i < options->batch; i++) {
    model->lengths[i] += append.tokens;
  }
}

static void fuzz_trim(byte_source *source, model_cache *model) {
  /* Often NYB_ALL_SEQUENCES. */
  const int64_t sequence = (int64_t)((uint64_t)take_size(source, 1) - 2);
  const int64_t tokens = take_size(source, 3);
  const bool good = tokens >= 0 && sequence >= NYB_ALL_SEQUENCES && sequence < model->options.batch;
  int64_t trimmed = -7, most = 0;
  const nyb_status status = nyb_cache_trim(model->cache, sequence, tokens, &trimmed, NULL);
  require((status == NYB_OK) == good, "trim refuses what it must");
  for (int64_t i = 0; good && i < model->options.batch; i++) {
    if (sequence != NYB_ALL_SEQUENCES && sequence != i) continue;
    const int64_t lost = tokens < model->lengths[i] ? tokens : model->lengths[i];
    model->lengths[i] -= lost;
    if (lost > most) most = lost;
  }
  require(trimmed == (good ? most : -7), "the trimmed count");
}

static void fuzz_cache(byte_source *source, nyb_context *context) {
  verdict verdict = {0};
  model_cache model = {0};
  nyb_cache_options *options = &model.options;
  options->struct_size = take_struct_size(source, sizeof *options, &verdict);
  options->batch = take_size(source, 1);
  options->kv_heads = take_size(source, 1);
  options->key_dim = take_size(source, 32);
  options->value_dim = take_size(source, 32);
  options->key_format = take_format(source);
  options->value_format = take_format(source);
  options->rule = (nyb_rule)take_choice(source, NYB_RULE_MLX_CPU, 2);
  options->reserved = take_byte(source) > 250;
  if (take_byte(source) > 128) options->initial_capacity_tokens = take_size(source, 10);
  if (take_byte(source) > 128) options->max_tokens = take_size(source, 50);
  if (!options_are_good(options)) verdict.refused = true;
  nyb_cache *const untouched = (nyb_cache *)&model;
  model.cache = untouched;
  const nyb_status created = nyb_cache_create(context, options, &model.cache);
  check_call(created, verdict, NULL, 0);
  if (created != NYB_OK) {
    require(model.cache == untouched, "an untouched result");
    return;
  }
  if (options->batch <= 16) {
    for (int step = 0; step < 12 && source->at < source->end; step++) {
      const uint8_t kind = take_byte(source);
      if (kind < 128) {
        fuzz_append(source, &model);
      } else if (kind < 192) {
        fuzz_trim(source, &model);
      } else if (kind < 240) {
        (void)nyb_cache_reserve(model.cache, take_size(source, 30), NULL);
      } else {
        require(nyb_cache_reset(model.cache, NULL) == NYB_OK, "a reset");
        memset(model.lengths, 0, sizeof model.lengths);
      }
      check_model(&model);
    }
  }
  nyb_cache_destroy(model.cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes) {
  if (arena == NULL) set_up();
  byte_source source = {input, input + input_bytes};
  fill_arena(&source);
  const uint8_t choice = take_byte(&source);
  nyb_context *context = contexts[choice & 1];
  switch (choice >> 1 & 7) {
    case 0: fuzz_quantize(&source, context); break;
    case 1: fuzz_dequantize(&source, context); break;
    case 2: fuzz_geglu(&source, context); break;
    case 3:
    case 4: fuzz_cache(&source, context); break;
    default: fuzz_attention(&source, context); break;
  }
  return 0;
}
