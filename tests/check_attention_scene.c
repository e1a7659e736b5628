/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_scene.h"
#include "check_stage.h"

static int64_t bytes_of(nyb_dtype dtype) { return dtype == NYB_F32 ? 4 : 2; }

/* ---- Layout ------------------------------------------------------------------------------- */

/* Strides of [batch, heads, rows] with row_stride elements from a row to the next in memory. */
static void set_strides(bool swapped, int64_t heads, int64_t rows, int64_t row_stride,
                        int64_t stride[3]) {
  stride[0] = heads * rows * row_stride;
  stride[1] = swapped ? row_stride : rows * row_stride;
  stride[2] = swapped ? heads * row_stride : row_stride;
}

static int64_t offset_of(const int64_t stride[3], int64_t batch_index, int64_t head, int64_t row) {
  return batch_index * stride[0] + head * stride[1] + row * stride[2];
}

static bool make_stored(const attention_shape *s, const nyb_format *format, int64_t dim,
                        stored_buffers *buffers, nyb_stored *stored) {
  const bool plain = format->scheme == NYB_PLAIN;
  const int64_t code_bytes = plain ? bytes_of(format->dtype) : 4;
  const int64_t code_stride = (plain ? dim : dim * format->bits / 32) + s->gap;
  const int64_t groups = plain ? 0 : dim / format->group_size;
  const int64_t rows = s->batch * s->kv_heads * s->capacity_tokens;
  const int64_t group_bytes = plain ? 0 : rows * (groups + s->gap) * bytes_of(format->dtype);
  if (!check_buffer_make(&buffers->codes, rows * code_stride * code_bytes) ||
      !check_buffer_make(&buffers->scales, group_bytes) ||
      !check_buffer_make(&buffers->biases, group_bytes)) {
    return false;
  }
  *stored = (nyb_stored){.format = *format,
                         .codes = buffers->codes.data,
                         .scales = plain ? NULL : buffers->scales.data,
                         .biases = plain ? NULL : buffers->biases.data};
  set_strides(s->swapped, s->kv_heads, s->capacity_tokens, code_stride, stored->codes_stride);
  set_strides(s->swapped, s->kv_heads, s->capacity_tokens, groups + s->gap, stored->scales_stride);
  set_strides(s->swapped, s->kv_heads, s->capacity_tokens, groups + s->gap, stored->biases_stride);
  return true;
}

static bool make_views(attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  nyb_attention *call = &scene->call;
  const int64_t rows = s->batch * s->query_heads * s->query_len;
  const int64_t q_stride = s->key_dim + s->gap, out_stride = s->value_dim + s->gap;
  *call = (nyb_attention){
      .struct_size = sizeof *call,
      .batch = s->batch,
      .query_heads = s->query_heads,
      .kv_heads = s->kv_heads,
      .query_len = s->query_len,
      .key_dim = s->key_dim,
      .value_dim = s->value_dim,
      .capacity_tokens = s->capacity_tokens,
      .lengths = s->lengths,
      .scale = s->scale != 0 ? s->scale : (float)(1 / sqrt((double)s->key_dim)),
      .mask = s->mask,
      .rounding = s->rounding,
      .window_tokens = s->window_tokens,
      .window_keep_tokens = s->window_keep_tokens,
      .softcap = s->softcap,
  };
  if (!check_buffer_make(&scene->q, rows * q_stride * bytes_of(s->query_dtype)) ||
      !check_buffer_make(&scene->out, rows * out_stride * bytes_of(s->out_dtype)) ||
      !check_buffer_make(&scene->lse, rows * (1 + s->gap) * 4) ||
      !make_stored(s, &s->key_format, s->key_dim, &scene->k, &call->k) ||
      !make_stored(s, &s->value_format, s->value_dim, &scene->v, &call->v)) {
    return false;
  }
  call->q = (nyb_input){.data = scene->q.data, .dtype = s->query_dtype};
  call->out = (nyb_output){.data = scene->out.data, .dtype = s->out_dtype};
  call->lse = (nyb_output){.data = s->without_lse ? NULL : scene->lse.data, .dtype = NYB_F32};
  set_strides(s->swapped, s->query_heads, s->query_len, q_stride, call->q.stride);
  set_strides(s->swapped, s->query_heads, s->query_len, out_stride, call->out.stride);
  set_strides(s->swapped, s->query_heads, s->query_len, 1 + s->gap, call->lse.stride);
  return true;
}

/* As many columns as the longest sequence has tokens, and rows only along axes not broadcast. */
static bool make_mask(attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  const scene_mask *m = &s->mask_array;
  nyb_mask_array *mask = &scene->call.mask_array;
  const bool is_bool = m->kind == NYB_MASK_ARRAY_BOOL;
  if (m->kind == 0) return true;
  mask->kind = m->kind;
  mask->dtype = is_bool ? (nyb_dtype)0 : m->f32 ? NYB_F32 : s->query_dtype;
  for (int64_t b = 0; b < s->batch; b++) {
    if (s->lengths[b] > mask->tokens) mask->tokens = s->lengths[b];
  }
  const int64_t row = mask->tokens + s->gap, rows = m->of_row ? s->query_len : 1;
  const int64_t heads = m->of_head ? s->query_heads : 1;
  mask->stride[0] = m->of_batch ? heads * rows * row : 0;
  mask->stride[1] = m->of_head ? rows * row : 0;
  mask->stride[2] = m->of_row ? row : 0;
  const int64_t elements = (m->of_batch ? s->batch : 1) * heads * rows * row;
  if (!check_buffer_make(&scene->mask, elements * (is_bool ? 1 : bytes_of(mask->dtype)))) {
    return false;
  }
  mask->data = scene->mask.data;
  return true;
}

static bool make_head_floats(const attention_scene *scene, bool wanted, check_buffer *buffer,
                             const float **floats) {
  if (!wanted) return true;
  if (!check_buffer_make(buffer, scene->shape.query_heads * 4)) return false;
  *floats = buffer->data;
  return true;
}

static bool make_biases(attention_scene *scene) {
  return make_mask(scene) &&
         make_head_floats(scene, scene->shape.sinks, &scene->sinks, &scene->call.sinks) &&
         make_head_floats(scene, scene->shape.slopes, &scene->slopes, &scene->call.alibi_slopes);
}

/* ---- Data --------------------------------------------------------------------------------- */

/* The direction of ROWS_DOMINANT's key and QUERIES_ALIGNED. */
static double direction(int64_t d) { return d * d % 7 < 4 ? 1 : -1; }

static double query_element(const attention_shape *s, int64_t head, int64_t row, int64_t d,
                            check_random *random) {
  const double normal = check_random_normal(random);
  switch (s->queries) {
    case QUERIES_NORMAL: return normal;
    case QUERIES_ZERO: return 0;
    case QUERIES_IDENTITY: return (row + head) % s->key_dim == d ? 1 : 0;
    case QUERIES_ALIGNED: return 2 * direction(d) + normal;
    case QUERIES_LARGE: return 200 * normal;
    case QUERIES_TINY: return 1e-4 * normal;
    case QUERIES_SUBNORMAL: return (s->query_dtype == NYB_F16 ? 0x1p-22 : 0x1p-130) * normal;
    case QUERIES_OUTLIER: return d == s->key_dim / 2 ? 40 : 0.04 * normal;
    case QUERIES_MINUTE: return (s->query_dtype == NYB_F16 ? 0x1p-20 : 0x1p-100) * normal;
    case QUERIES_HALF_STEPS: /* one element that sets the step, the others between its multiples */
      return d % 32 == 0 ? 1 : ((double)check_random_below(random, 65534) - 32766.5) / 32767;
    case QUERIES_ALONG: return direction(d) * (1 + fabs(normal));
    case QUERIES_COUNT: break;
  }
  return NAN;
}

static double row_element(row_class class, const nyb_format *format, bool last, int64_t d,
                          check_random *random) {
  const double normal = check_random_normal(random);
  const int64_t group_size = format->scheme == NYB_PLAIN ? 32 : format->group_size;
  switch (class) {
    case ROWS_ZERO: return 0;
    case ROWS_DOMINANT: return last ? 4 * direction(d) : 0.1 * normal;
    case ROWS_LARGE: return 30 * normal;
    case ROWS_OUTLIER: return d == 0 ? 300 : normal;
    case ROWS_CONSTANT: return d / group_size % 2 == 0 ? 9 : -9;
    case ROWS_OFFSET: return 1000 + normal;
    case ROWS_WIDE: return 60000 * (2 * (double)(d % group_size) / (double)(group_size - 1) - 1);
    case ROWS_SUBNORMAL: return (format->dtype == NYB_F16 ? 0x1p-22 : 0x1p-130) * normal;
    case ROWS_VAST: return (format->dtype == NYB_F16 ? 1000 : 0x1p97) * normal;
    case ROWS_SEVENTHS: return (double)(7 * d % 32);
    case ROWS_NORMAL:
    case ROWS_EQUAL:
    case ROWS_RAW:
    case ROWS_ALL_ZERO_CODES:
    case ROWS_ALL_MAX_CODES:
    case ROWS_COUNT: break;
  }
  return normal;
}

/* Classes that fix the codes, the scale or the bias of a group instead of its elements. */
static bool raw_group(row_class class, const nyb_format *format, int64_t first,
                      check_random *random, oracle_group *group) {
  if (class != ROWS_RAW && class != ROWS_ALL_ZERO_CODES && class != ROWS_ALL_MAX_CODES &&
      class != ROWS_SEVENTHS) {
    return false; /* and no random number taken, so that all formats get the same elements */
  }
  const uint32_t largest = (1u << format->bits) - 1;
  group->scale = 2 * check_random_normal(random) / largest;
  group->bias = class == ROWS_SEVENTHS ? 0 : check_random_normal(random);
  if (class == ROWS_SEVENTHS) group->scale = 1;
  for (int64_t i = 0; i < format->group_size; i++) {
    switch (class) {
      case ROWS_RAW: group->codes[i] = (uint8_t)(check_random_bits(random) & largest); break;
      case ROWS_ALL_ZERO_CODES: group->codes[i] = 0; break;
      case ROWS_ALL_MAX_CODES: group->codes[i] = (uint8_t)largest; break;
      default: group->codes[i] = (uint8_t)(7 * (first + i) & largest); break;
    }
  }
  return true;
}

static void fill_affine_row(row_class class, const nyb_stored *stored, const int64_t first[3],
                            int64_t dim, bool last, check_random *random) {
  const nyb_format *format = &stored->format;
  uint8_t *codes = (uint8_t *)(uintptr_t)stored->codes + first[0] * 4;
  for (int64_t at = 0; at < dim; at += format->group_size) {
    oracle_group group;
    if (!raw_group(class, format, at, random, &group)) {
      double elements[ORACLE_MAX_GROUP_SIZE];
      for (int64_t i = 0; i < format->group_size; i++) {
        const double element = row_element(class, format, last, at + i, random);
        elements[i] = oracle_round(format->dtype, element);
      }
      if (!oracle_quantize_group(elements, format->group_size, format->bits, NYB_RULE_MLX_CPU,
                                 format->dtype, &group)) {
        group = (oracle_group){.scale = 0};
      }
    }
    const int64_t g = at / format->group_size;
    oracle_store((void *)(uintptr_t)stored->scales, format->dtype, first[1] + g, group.scale);
    oracle_store((void *)(uintptr_t)stored->biases, format->dtype, first[2] + g, group.bias);
    for (int64_t i = 0; i < format->group_size; i++) {
      oracle_put_code(codes, format->bits, at + i, group.codes[i]);
    }
  }
}

/* Tokens up to each length are filled; the rest keeps its poison: NaN, and codes of all ones. */
static void fill_stored(const attention_shape *s, row_class class, const nyb_stored *stored,
                        int64_t dim, check_random *random) {
  for (int64_t b = 0; b < s->batch; b++) {
    for (int64_t head = 0; head < s->kv_heads; head++) {
      const uint64_t state = random->state;
      for (int64_t token = 0; token < s->lengths[b]; token++) {
        if (class == ROWS_EQUAL) random->state = state;
        const bool last = token == s->lengths[b] - 1;
        const int64_t first[3] = {offset_of(stored->codes_stride, b, head, token),
                                  offset_of(stored->scales_stride, b, head, token),
                                  offset_of(stored->biases_stride, b, head, token)};
        if (stored->format.scheme == NYB_AFFINE) {
          fill_affine_row(class, stored, first, dim, last, random);
          continue;
        }
        for (int64_t d = 0; d < dim; d++) {
          oracle_store((void *)(uintptr_t)stored->codes, stored->format.dtype, first[0] + d,
                       row_element(class, &stored->format, last, d, random));
        }
      }
    }
  }
}

/* Keys along the direction, of both signs in each group: +-20,000 in f16, else +-1e38. */
static void fill_overflowing_row(const attention_shape *s, const nyb_stored *k, int64_t b,
                                 int64_t head, int64_t token) {
  const nyb_format *format = &k->format;
  const double size = (format->dtype == NYB_F16 ? 20000 : 1e38) * (s->overflow.upwards ? 1 : -1);
  void *codes = (void *)(uintptr_t)k->codes;
  const int64_t first = offset_of(k->codes_stride, b, head, token);
  if (format->scheme == NYB_PLAIN) {
    for (int64_t d = 0; d < s->key_dim; d++) {
      oracle_store(codes, format->dtype, first + d, size * direction(d));
    }
    return;
  }
  const uint32_t largest = (1u << format->bits) - 1;
  for (int64_t g = 0; g < s->key_dim / format->group_size; g++) {
    oracle_store((void *)(uintptr_t)k->scales, format->dtype,
                 offset_of(k->scales_stride, b, head, token) + g, 2 * size / largest);
    oracle_store((void *)(uintptr_t)k->biases, format->dtype,
                 offset_of(k->biases_stride, b, head, token) + g, -size);
  }
  for (int64_t d = 0; d < s->key_dim; d++) {
    oracle_put_code((uint8_t *)codes + first * 4, format->bits, d, direction(d) > 0 ? largest : 0);
  }
}

static void overflow_scores(const attention_shape *s, const nyb_stored *k) {
  for (int64_t i = 0; i < s->batch * s->kv_heads; i++) {
    const int64_t b = i / s->kv_heads;
    for (int64_t t = s->overflow.first; t < s->overflow.end && t < s->lengths[b]; t++) {
      fill_overflowing_row(s, k, b, i % s->kv_heads, t);
    }
  }
}

static void poison_stored(const scene_poison *p, bool bias, const nyb_stored *stored) {
  const nyb_format *format = &stored->format;
  const bool plain = format->scheme == NYB_PLAIN;
  const void *array = plain ? stored->codes : bias ? stored->biases : stored->scales;
  const int64_t *stride = plain  ? stored->codes_stride
                          : bias ? stored->biases_stride
                                 : stored->scales_stride;
  const int64_t at = plain ? p->element : p->element / format->group_size;
  oracle_store((void *)(uintptr_t)array, format->dtype,
               offset_of(stride, p->batch, p->head, p->row) + at, p->value);
}

void scene_add_poison(attention_scene *scene, const scene_poison *p) {
  const nyb_attention *call = &scene->call;
  scene->shape.poison = *p;
  switch (p->place) {
    case POISON_NONE: break;
    case POISON_QUERY:
      oracle_store(scene->q.data, scene->shape.query_dtype,
                   offset_of(call->q.stride, p->batch, p->head, p->row) + p->element, p->value);
      break;
    case POISON_KEY: poison_stored(p, false, &call->k); break;
    case POISON_KEY_BIAS: poison_stored(p, true, &call->k); break;
    case POISON_VALUE: poison_stored(p, false, &call->v); break;
    case POISON_VALUE_BIAS: poison_stored(p, true, &call->v); break;
  }
}

static void fill_queries(const attention_scene *scene, check_random *random) {
  const attention_shape *s = &scene->shape;
  for (int64_t b = 0; b < s->batch; b++) {
    for (int64_t head = 0; head < s->query_heads; head++) {
      for (int64_t row = 0; row < s->query_len; row++) {
        const int64_t first = offset_of(scene->call.q.stride, b, head, row);
        for (int64_t d = 0; d < s->key_dim; d++) {
          oracle_store(scene->q.data, s->query_dtype, first + d,
                       query_element(s, head, row, d, random));
        }
      }
    }
  }
}

static bool mask_hides(const attention_shape *s, int64_t b, int64_t head, int64_t row,
                       int64_t token, check_random *random) {
  const bool drawn = check_random_below(random, 10) < 3;
  const int64_t shift = b * 7 + head * 3 + row; /* 0 along axes that are broadcast */
  switch (s->mask_array.class) {
    case MASK_HOLES: return drawn;
    case MASK_TILES: return (token + 50 + shift) / 100 % 2 == 1;
    case MASK_ROWS: return shift % 3 == 0 || token < 5 + shift || token > s->lengths[b] - 9;
    case MASK_ALL: return true;
    case MASK_LOWEST: return false;
    case MASK_CAUSAL: return token > s->lengths[b] - s->query_len + row;
    case MASK_COUNT: break;
  }
  return false;
}

static double lowest_of(nyb_dtype dtype) {
  return dtype == NYB_F16 ? -65504 : dtype == NYB_BF16 ? -0x1.fep127 : -0x1.fffffep127;
}

static void fill_mask(const attention_scene *scene, check_random *random) {
  const attention_shape *s = &scene->shape;
  const scene_mask *m = &s->mask_array;
  const nyb_mask_array *mask = &scene->call.mask_array;
  for (int64_t b = 0; b < (m->of_batch ? s->batch : 1) && m->kind != 0; b++) {
    for (int64_t i = 0; i < (m->of_head ? s->query_heads : 1) * s->query_len; i++) {
      const int64_t head = i / s->query_len, row = i % s->query_len;
      for (int64_t n = 0; n < mask->tokens && (m->of_row || row == 0); n++) {
        const int64_t at = offset_of(mask->stride, b, head, row) + n;
        const bool hidden = mask_hides(s, b, head, row, n, random);
        const double number =
            m->class == MASK_LOWEST ? lowest_of(mask->dtype) : check_random_normal(random);
        if (m->kind == NYB_MASK_ARRAY_BOOL) {
          ((uint8_t *)scene->mask.data)[at] = (uint8_t)(hidden ? 0 : 1 + n % 255);
        } else {
          oracle_store(scene->mask.data, mask->dtype, at, hidden ? -INFINITY : number);
        }
      }
    }
  }
}

static void fill_head_floats(const attention_scene *scene) {
  static const double sinks[] = {0.5, -80, 3, (double)-INFINITY, -1.25, 60};
  static const double slopes[] = {0.5, 0.0625, 0, -0.03125, 1, 0.00390625};
  for (int64_t head = 0; head < scene->shape.query_heads; head++) {
    if (scene->shape.sinks) oracle_store(scene->sinks.data, NYB_F32, head, sinks[head % 6]);
    if (scene->shape.slopes) oracle_store(scene->slopes.data, NYB_F32, head, slopes[head % 6]);
  }
}

/* ---- Making a scene ----------------------------------------------------------------------- */

static check_buffer *input_buffer(attention_scene *scene, int i) {
  check_buffer *const buffers[] = {
      &scene->q,        &scene->k.codes,  &scene->k.scales, &scene->k.biases, &scene->v.codes,
      &scene->v.scales, &scene->v.biases, &scene->mask,     &scene->sinks,    &scene->slopes};
  enum { INPUTS = sizeof buffers / sizeof buffers[0] };
  return i < INPUTS ? buffers[i] : NULL;
}

bool scene_make(attention_scene *scene, const attention_shape *shape) {
  *scene = (attention_scene){.shape = *shape};
  if (!make_views(scene) || !make_biases(scene)) {
    scene_free(scene);
    return false;
  }
  check_random random = {.state = shape->seed};
  fill_queries(scene, &random);
  fill_stored(shape, shape->keys, &scene->call.k, shape->key_dim, &random);
  fill_stored(shape, shape->values, &scene->call.v, shape->value_dim, &random);
  overflow_scores(shape, &scene->call.k);
  fill_mask(scene, &random);
  fill_head_floats(scene);
  scene_add_poison(scene, &shape->poison);
  scene->call.lengths = scene->shape.lengths; /* where the scene lives now */
  for (int i = 0; input_buffer(scene, i) != NULL; i++) {
    if (input_buffer(scene, i)->memory != NULL) check_buffer_seal(input_buffer(scene, i));
  }
  return true;
}

void scene_restore_inputs(attention_scene *scene) {
  check_buffer *buffer;
  for (int i = 0; (buffer = input_buffer(scene, i)) != NULL; i++) {
    if (buffer->memory == NULL) continue;
    memcpy(buffer->memory, buffer->image, buffer->memory_bytes);
  }
}

void scene_free(attention_scene *scene) {
  for (int i = 0; input_buffer(scene, i) != NULL; i++) {
    check_buffer_free(input_buffer(scene, i));
  }
  check_buffer_free(&scene->out);
  check_buffer_free(&scene->lse);
  free(scene->workspace);
  *scene = (attention_scene){.workspace = NULL};
}

/* ---- The oracle's view -------------------------------------------------------------------- */

int64_t scene_visible(const attention_shape *s, int64_t batch_index, int64_t row) {
  const int64_t length = s->lengths[batch_index];
  if (s->mask == NYB_MASK_NONE) return length;
  if (s->mask == NYB_MASK_CAUSAL_TOP_LEFT) return row + 1 < length ? row + 1 : length;
  const int64_t visible = length - s->query_len + row + 1;
  return visible > 0 ? visible : 0;
}

static int64_t position_of(const attention_shape *s, int64_t b, int64_t row) {
  return s->mask == NYB_MASK_CAUSAL_TOP_LEFT ? row : s->lengths[b] - s->query_len + row;
}

/* Memory for the oracle's view of a row, as long as the longest sequence. */
typedef struct row_bias {
  bool *hidden, *masked;
  double *added;
} row_bias;

static void free_row_bias(row_bias *memory) {
  free(memory->hidden);
  free(memory->masked);
  free(memory->added);
}

static oracle_bias bias_of(const attention_scene *scene, int64_t b, int64_t head, int64_t row,
                           row_bias *memory) {
  const attention_shape *s = &scene->shape;
  const nyb_mask_array *mask = &scene->call.mask_array;
  const bool is_bool = mask->kind == NYB_MASK_ARRAY_BOOL;
  const bool is_added = mask->kind == NYB_MASK_ARRAY_ADD;
  const int64_t position = position_of(s, b, row);
  for (int64_t n = 0; n < scene_visible(s, b, row); n++) {
    memory->hidden[n] =
        s->window_tokens != 0 && n <= position - s->window_tokens && n >= s->window_keep_tokens;
    const int64_t at = offset_of(mask->stride, b, head, row) + n;
    if (is_bool) memory->masked[n] = ((const uint8_t *)mask->data)[at] == 0;
    if (is_added) memory->added[n] = oracle_load(mask->data, mask->dtype, at);
    if (is_added && memory->added[n] == -INFINITY) memory->hidden[n] = true;
  }
  return (oracle_bias){
      .softcap = s->softcap,
      .sloped = s->slopes,
      .slope = s->slopes ? oracle_load(scene->slopes.data, NYB_F32, head) : 0,
      .position = position,
      .hidden = memory->hidden,
      .masked = is_bool ? memory->masked : NULL,
      .added = is_added ? memory->added : NULL,
      .added_f32 = is_added && mask->dtype == NYB_F32,
      .has_sink = s->sinks,
      .sink = s->sinks ? oracle_load(scene->sinks.data, NYB_F32, head) : 0,
  };
}

static bool make_row_bias(int64_t tokens, row_bias *memory) {
  *memory = (row_bias){.hidden = malloc((size_t)tokens + 1),
                       .masked = malloc((size_t)tokens + 1),
                       .added = malloc(((size_t)tokens + 1) * sizeof(double))};
  return memory->hidden != NULL && memory->masked != NULL && memory->added != NULL;
}

static int64_t row_count(const attention_shape *s) {
  return s->batch * s->query_heads * s->query_len;
}

void scene_expected_free(scene_expected *expected) {
  free(expected->out);
  free(expected->out_error);
  free(expected->lse);
  free(expected->lse_error);
  *expected = (scene_expected){0};
}

static bool expect_kv_head(const attention_scene *scene, nyb_path path,
                           oracle_arithmetic arithmetic, int64_t b, int64_t kv_head, double *query,
                           scene_expected *e) {
  const attention_shape *s = &scene->shape;
  const int64_t ratio = s->query_heads / s->kv_heads;
  oracle_rows keys = {0}, values = {0};
  const oracle_attention oracle = {.keys = &keys,
                                   .values = &values,
                                   .arithmetic = arithmetic,
                                   .query_dtype = s->query_dtype,
                                   .out_dtype = s->out_dtype,
                                   .scale = scene->call.scale,
                                   .rounding = s->rounding,
                                   .path = path};
  row_bias memory;
  const bool made = make_row_bias(s->lengths[b], &memory);
  bool good = made &&
              oracle_rows_decode(&scene->call.k, b, kv_head, s->lengths[b], s->key_dim, &keys) &&
              oracle_rows_decode(&scene->call.v, b, kv_head, s->lengths[b], s->value_dim, &values);
  for (int64_t i = 0; i < ratio * s->query_len && good; i++) {
    const int64_t head = kv_head * ratio + i / s->query_len, row = i % s->query_len;
    const int64_t index = (b * s->query_heads + head) * s->query_len + row;
    const int64_t first = offset_of(scene->call.q.stride, b, head, row);
    for (int64_t d = 0; d < s->key_dim; d++) {
      query[d] = oracle_load(scene->call.q.data, s->query_dtype, first + d);
    }
    oracle_result result = {.out = e->out + index * s->value_dim,
                            .out_error = e->out_error + index * s->value_dim};
    const oracle_bias bias = bias_of(scene, b, head, row, &memory);
    good = oracle_attention_row(&oracle, query, scene_visible(s, b, row), &bias, &result);
    e->lse[index] = result.lse;
    e->lse_error[index] = result.lse_error;
  }
  oracle_rows_free(&keys);
  oracle_rows_free(&values);
  free_row_bias(&memory);
  return good;
}

bool scene_expect(const attention_scene *scene, nyb_path path, oracle_arithmetic arithmetic,
                  scene_expected *e) {
  const attention_shape *s = &scene->shape;
  const size_t rows = (size_t)row_count(s);
  *e = (scene_expected){.out = calloc(rows * (size_t)s->value_dim, sizeof(double)),
                        .out_error = calloc(rows * (size_t)s->value_dim, sizeof(double)),
                        .lse = calloc(rows, sizeof(double)),
                        .lse_error = calloc(rows, sizeof(double))};
  double *query = calloc((size_t)s->key_dim, sizeof(double));
  bool good = e->out != NULL && e->out_error != NULL && e->lse != NULL && e->lse_error != NULL &&
              query != NULL;
  for (int64_t i = 0; i < s->batch * s->kv_heads && good; i++) {
    good = expect_kv_head(scene, path, arithmetic, i / s->kv_heads, i % s->kv_heads, query, e);
  }
  free(query);
  if (!good) scene_expected_free(e);
  return good;
}

/* ---- Running ------------------------------------------------------------------------------ */

static bool prepare_workspace(attention_scene *scene, size_t bytes) {
  if (scene->workspace == NULL || scene->workspace_bytes < bytes) {
    free(scene->workspace);
    const size_t all = (bytes + CHECK_WORKSPACE_GUARD_BYTES + 63) / 64 * 64;
    scene->workspace = aligned_alloc(NYB_WORKSPACE_ALIGNMENT, all);
  }
  if (scene->workspace == NULL) return false;
  scene->workspace_bytes = bytes;
  memset(scene->workspace, 0xff, bytes); /* NaN in every dtype */
  memset((uint8_t *)scene->workspace + bytes, CHECK_WORKSPACE_GUARD, CHECK_WORKSPACE_GUARD_BYTES);
  return true;
}

nyb_status scene_prepare(attention_scene *scene, nyb_context *context, nyb_path path) {
  scene->plan = (nyb_plan)NYB_PLAN_INIT;
  scene->call.path = path;
  nyb_attention call = scene->call;
  if (nyb_context_backend(context) == NYB_BACKEND_CUDA) check_stage_pretend(&call);
  const nyb_status status = nyb_attention_plan(context, &call, &scene->plan);
  if (status != NYB_OK) return status;
  if (scene->plan.path != path) return NYB_ERROR_UNSUPPORTED;
  if (!prepare_workspace(scene, scene->plan.workspace_bytes)) return NYB_ERROR_OUT_OF_MEMORY;
  check_buffer_poison(&scene->out);
  check_buffer_seal(&scene->out);
  check_buffer_poison(&scene->lse);
  check_buffer_seal(&scene->lse);
  return NYB_OK;
}

nyb_status scene_run(attention_scene *scene, const check_library *library, nyb_context *context,
                     nyb_path path) {
  const nyb_status status = scene_prepare(scene, context, path);
  if (status != NYB_OK) return status;
  return library->attention(context, &scene->call, scene->workspace, scene->workspace_bytes, NULL);
}

/* ---- Comparing ---------------------------------------------------------------------------- */

static void restore_outputs(attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  const int64_t bytes = bytes_of(s->out_dtype);
  for (int64_t i = 0; i < row_count(s); i++) {
    const int64_t row = i % s->query_len, head = i / s->query_len % s->query_heads;
    const int64_t b = i / s->query_len / s->query_heads;
    check_buffer_restore(&scene->out, offset_of(scene->call.out.stride, b, head, row) * bytes,
                         s->value_dim * bytes);
    if (!s->without_lse) {
      check_buffer_restore(&scene->lse, offset_of(scene->call.lse.stride, b, head, row) * 4, 4);
    }
  }
}

/* All but the outputs' own elements must be as it was. */
bool scene_strays(attention_scene *scene, char *text, size_t text_size) {
  restore_outputs(scene);
  static const char *const names[] = {"q",       "k.codes",      "k.scales", "k.biases",
                                      "v.codes", "v.scales",     "v.biases", "mask_array",
                                      "sinks",   "alibi_slopes", "out",      "lse"};
  for (int i = 0; i < 12; i++) {
    const check_buffer *buffer = i == 10   ? &scene->out
                                 : i == 11 ? &scene->lse
                                           : input_buffer(scene, i);
    if (buffer->memory == NULL) continue;
    const int64_t at = check_buffer_changed(buffer);
    if (at == CHECK_UNCHANGED) continue;
    snprintf(text, text_size, "byte %lld of %s's buffer was written and is no output",
             (long long)at, names[i]);
    return true;
  }
  for (int i = 0; i < CHECK_WORKSPACE_GUARD_BYTES; i++) {
    if (((uint8_t *)scene->workspace)[scene->workspace_bytes + (size_t)i] ==
        CHECK_WORKSPACE_GUARD) {
      continue;
    }
    snprintf(text, text_size, "workspace byte %zu + %d was written", scene->workspace_bytes, i);
    return true;
  }
  return false;
}

/* Only a scene that was made so may have results that are not finite. */
static bool may_be_not_finite(const attention_shape *s) {
  return s->poison.place != POISON_NONE || s->overflow.first < s->overflow.end;
}

double scene_share_of_tolerance(nyb_dtype dtype, double got, double want, double error) {
  static const struct {
    double half_unit, least_half_unit, infinite_from;
  } rounding[] = {[NYB_F32] = {0x1p-24, 0x1p-150, 0x1.ffffffp127},
                  [NYB_F16] = {0x1p-11, 0x1p-25, 65520},
                  [NYB_BF16] = {0x1p-8, 0x1p-134, 0x1.ffp127}};
  if (!(error > 0) || !isfinite(want)) return 0;
  if (isinf(got)) got = copysign(fmax(rounding[dtype].infinite_from, fabs(want)), got);
  const double own = fmax(rounding[dtype].half_unit * fabs(want), rounding[dtype].least_half_unit);
  return fmax(fabs(got - want) - own, 0) / error;
}

static bool compare_lse(const attention_scene *scene, const scene_expected *e, int64_t i,
                        int64_t at, double *worst) {
  if (scene->shape.without_lse) return true;
  const double got = oracle_load(scene->lse.data, NYB_F32, at);
  *worst = fmax(*worst, scene_share_of_tolerance(NYB_F32, got, e->lse[i], e->lse_error[i]));
  if (isnan(e->lse[i]) && may_be_not_finite(&scene->shape)) return isnan(got);
  return oracle_within(NYB_F32, got, e->lse[i], e->lse_error[i]);
}

scene_fault scene_compare(attention_scene *scene, const scene_expected *e, double *worst,
                          char *text, size_t text_size) {
  const attention_shape *s = &scene->shape;
  *worst = 0;
  for (int64_t i = 0; i < row_count(s); i++) {
    const int64_t row = i % s->query_len, head = i / s->query_len % s->query_heads;
    const int64_t b = i / s->query_len / s->query_heads;
    const int64_t lse_at = offset_of(scene->call.lse.stride, b, head, row);
    if (!compare_lse(scene, e, i, lse_at, worst)) {
      snprintf(text, text_size, "lse of batch %lld head %lld row %lld: got %.9g, want %.9g +- %.3g",
               (long long)b, (long long)head, (long long)row,
               oracle_load(scene->lse.data, NYB_F32, lse_at), e->lse[i], e->lse_error[i]);
      return SCENE_BAD_LSE;
    }
    for (int64_t d = 0; d < s->value_dim; d++) {
      const double got = oracle_load(scene->out.data, s->out_dtype,
                                     offset_of(scene->call.out.stride, b, head, row) + d);
      const double want = e->out[i * s->value_dim + d];
      const double error = e->out_error[i * s->value_dim + d];
      *worst = fmax(*worst, scene_share_of_tolerance(s->out_dtype, got, want, error));
      if (oracle_within(s->out_dtype, got, want, error)) continue;
      if (!isfinite(want) && may_be_not_finite(s) && (isnan(got) || got == want)) continue;
      snprintf(text, text_size,
               "out of batch %lld head %lld row %lld element %lld: got %.9g, want %.9g +- %.3g, "
               "rounded to %s",
               (long long)b, (long long)head, (long long)row, (long long)d, got, want, error,
               check_dtype_name(s->out_dtype));
      return SCENE_BAD_OUT;
    }
  }
  return scene_strays(scene, text, text_size) ? SCENE_STRAY_WRITE : SCENE_GOOD;
}

/* ---- Bits --------------------------------------------------------------------------------- */

int64_t scene_bits_bytes(const attention_scene *scene) {
  const attention_shape *s = &scene->shape;
  return row_count(s) * (s->value_dim * bytes_of(s->out_dtype) + 4);
}

void scene_bits(const attention_scene *scene, uint8_t *bits) {
  const attention_shape *s = &scene->shape;
  const int64_t bytes = s->value_dim * bytes_of(s->out_dtype);
  uint8_t *lse = bits + row_count(s) * bytes;
  for (int64_t i = 0; i < row_count(s); i++) {
    const int64_t row = i % s->query_len, head = i / s->query_len % s->query_heads;
    const int64_t b = i / s->query_len / s->query_heads;
    const int64_t out_at = offset_of(scene->call.out.stride, b, head, row) * bytes_of(s->out_dtype);
    memcpy(bits + i * bytes, (const uint8_t *)scene->out.data + out_at, (size_t)bytes);
    memcpy(lse + i * 4,
           (const uint8_t *)scene->lse.data + offset_of(scene->call.lse.stride, b, head, row) * 4,
           4);
  }
}

static void describe_biases(const attention_shape *s, char *text, size_t text_size) {
  static const char *const kinds[] = {"", ", mask of bools", ", additive mask"};
  snprintf(
      text, text_size, "%s%s%s%s%s%s)", kinds[s->mask_array.kind],
      s->mask_array.f32 && s->mask_array.kind == NYB_MASK_ARRAY_ADD ? " of f32" : "",
      s->window_tokens != 0 ? (s->window_keep_tokens != 0 ? ", window and kept" : ", window") : "",
      s->sinks ? ", sinks" : "", s->softcap != 0 ? ", softcap" : "", s->slopes ? ", slopes" : "");
}

void scene_describe(const attention_scene *scene, char *text, size_t text_size) {
  const attention_shape *s = &scene->shape;
  static const char *const masks[] = {"no mask", "causal", "causal from the top left"};
  char key[16], value[16];
  check_format_name(&s->key_format, key);
  check_format_name(&s->value_format, value);
  const int used = snprintf(
      text, text_size,
      "%s (B %lld, heads %lld/%lld, L %lld, D %lld/%lld, N %d; K %s g%d %s, V %s g%d %s; "
      "%s to %s, %s, %s",
      s->name, (long long)s->batch, (long long)s->query_heads, (long long)s->kv_heads,
      (long long)s->query_len, (long long)s->key_dim, (long long)s->value_dim, (int)s->lengths[0],
      key, (int)s->key_format.group_size, check_dtype_name(s->key_format.dtype), value,
      (int)s->value_format.group_size, check_dtype_name(s->value_format.dtype),
      check_dtype_name(s->query_dtype), check_dtype_name(s->out_dtype),
      s->rounding == NYB_ROUNDING_MLX ? "MLX" : "EXACT", masks[s->mask]);
  if (used >= 0 && (size_t)used < text_size) {
    describe_biases(s, text + used, text_size - (size_t)used);
  }
}
