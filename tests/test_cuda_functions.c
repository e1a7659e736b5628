/* SPDX-License-Identifier: Apache-2.0 */
/* The device functions of quantize, dequantize, GeGLU and of attention's rows, places and leaves,
 * compiled for the host, against the CPU's own: the arithmetic is the same on both, so that equal
 * bits here are equal bits on the GPU, but for what the device does by its own instructions
 * (nyb_number_from and _to). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "../src/attention.h"
#include "../src/cpu/geglu_f32.h"
#include "../src/cuda/attention.h"
#include "../src/cuda/device/attention_combine.cuh"
#include "../src/cuda/device/attention_general.cuh"
#include "../src/cuda/device/attention_leaves.cuh"
#include "../src/cuda/device/attention_places.cuh"
#include "../src/cuda/device/geglu.cuh"
#include "../src/cuda/device/quantize.cuh"
#include "../src/kernels.h"
#include "../src/numeric.h"
#include "check.h"

static nyb_any_fn scalar_kernel(nyb_operation operation, nyb_format_id format) {
  for (int64_t i = 0; i < nyb_kernel_entry_count; i++) {
    const nyb_kernel_entry *entry = &nyb_kernel_entries[i];
    if (entry->operation == operation && entry->format == format && entry->isa == NYB_ISA_SCALAR) {
      return entry->function;
    }
  }
  return NULL;
}

/* ---- Conversions ---------------------------------------------------------------------------- */

static void test_conversions(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const uint32_t f16 = nyb_bits_from_f32(nyb_f32_from_f16((uint16_t)bits));
    const uint32_t bf16 = nyb_bits_from_f32(nyb_f32_from_bf16((uint16_t)bits));
    assert_int_equal(nyb_bits_of(nyb_widen_f16(bits)), f16);
    assert_int_equal(nyb_bits_of(nyb_widen_bf16(bits)), bf16);
  }
  /* Every exponent and sign, with fractions around each place at which a dtype may round. */
  for (uint32_t high = 0; high < 0x10000; high++) {
    for (uint32_t low = 0; low < 0x10000; low += low < 8 ? 1 : 0x0ffb) {
      const float value = nyb_f32_from_bits(high << 16 | low);
      assert_int_equal(nyb_narrow_f16(value), nyb_f16_from_f32(value));
      assert_int_equal(nyb_narrow_bf16(value), nyb_bf16_from_f32(value));
      for (int dtype = NYB_F32; dtype <= NYB_BF16; dtype++) {
        assert_int_equal(nyb_fits(dtype, value),
                         isfinite(nyb_round_to((nyb_dtype)dtype, value)) != 0);
      }
    }
  }
}

static void test_split(void **state) {
  (void)state;
  static const int64_t numbers[] = {1,          2,          7,           65536,
                                    0x7fffffff, 0xffffffff, 0x100000000, 0x123456789abcdef};
  enum { COUNT = sizeof numbers / sizeof numbers[0] };
  for (int i = 0; i < COUNT; i++) {
    for (int j = 0; j < COUNT; j++) {
      for (int64_t index = numbers[i] - 1; index <= numbers[i]; index++) {
        int64_t rest;
        const nyb_divider divider = nyb_divider_of(numbers[j]);
        assert_true(nyb_split(index, &divider, &rest) == index / numbers[j]);
        assert_true(rest == index % numbers[j]);
      }
    }
  }
}

/* ---- Quantize ------------------------------------------------------------------------------- */

enum { MOST_ELEMENTS = 128, MOST_LANES = MOST_ELEMENTS / NYB_LANE_ELEMENTS };

typedef struct stored_group {
  uint8_t codes[MOST_ELEMENTS];
  uint32_t scale, bias, storable;
} stored_group;

static uint32_t stored_bits(nyb_dtype dtype, float value) {
  if (dtype == NYB_F32) return nyb_bits_from_f32(value);
  return dtype == NYB_F16 ? nyb_f16_from_f32(value) : nyb_bf16_from_f32(value);
}

static float widened(nyb_dtype dtype, uint32_t bits) {
  if (dtype == NYB_F32) return nyb_f32_from_bits(bits);
  return dtype == NYB_F16 ? nyb_f32_from_f16((uint16_t)bits) : nyb_f32_from_bf16((uint16_t)bits);
}

/* As a group's threads on the device: ranges joined by exchange, a stream of codes each. */
static void quantize_by_lanes(const nyb_quantize_span *span, int bits, stored_group *group) {
  const int lanes = span->group_size / NYB_LANE_ELEMENTS;
  float values[MOST_LANES][NYB_LANE_ELEMENTS];
  nyb_range range[MOST_LANES];
  memset(group, 0, sizeof *group);
  for (int lane = 0; lane < lanes; lane++) {
    for (int i = 0; i < NYB_LANE_ELEMENTS; i++) {
      values[lane][i] = nyb_load_f32(span->input, span->input_dtype, lane * NYB_LANE_ELEMENTS + i);
    }
    range[lane] = nyb_range_of(values[lane]);
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
    nyb_range joined[MOST_LANES];
    for (int lane = 0; lane < lanes; lane++) {
      joined[lane] = nyb_range_join(range[lane], range[lane ^ distance]);
    }
    memcpy(range, joined, sizeof joined);
  }
  const float highest_code = (float)((1 << bits) - 1);
  for (int lane = 0; lane < lanes; lane++) {
    const nyb_scaling scaling =
        nyb_scaling_of(range[lane], span->rule, highest_code, span->scale_dtype);
    group->storable = (uint32_t)scaling.storable;
    if (!scaling.storable) continue;
    const uint64_t stream = nyb_codes_of(values[lane], scaling, span->rule, bits);
    for (int i = 0; i < bits; i++) group->codes[lane * bits + i] = (uint8_t)(stream >> (8 * i));
    group->scale = stored_bits(span->scale_dtype, scaling.scale);
    group->bias = stored_bits(span->scale_dtype, scaling.bias);
  }
}

static void quantize_by_scalar(const nyb_quantize_span *given, nyb_quantize_fn kernel,
                               stored_group *group) {
  nyb_quantize_span span = *given;
  memset(group, 0, sizeof *group);
  group->storable = kernel(&span) == 1;
  if (group->storable == 0) return;
  span.codes = group->codes;
  span.scales = &group->scale;
  span.biases = &group->bias;
  kernel(&span);
}

/* Groups at which quantizers part: flat, tied, one-sided, mirrored, near either end of a dtype's
 * range, and not finite. */
enum { KINDS = 15 };

static float element_of(int kind, int i, int bits, check_random *random) {
  const float normal = (float)check_random_normal(random);
  const float uniform = (float)check_random_uniform(random);
  const float most = (float)((1 << bits) - 1);
  switch (kind) {
    case 0: return normal;
    case 1: return -4 - uniform;
    case 2: return 3 + uniform;
    case 3: return uniform < 0.5f ? 0.0f : -0.0f;
    case 4: return -9;
    case 5: return 9;
    case 6: return 1e-9f * (float)i;
    case 7: return i == 0 ? -most : i == 1 ? 0 : -0.5f * floorf(uniform * 2 * most);
    case 8: return i % 2 == 0 ? 7.0f : -7.0f;
    case 9: return 60000 * (2 * uniform - 1);
    case 10: return 0x1p127f * (2 * uniform - 1);
    case 11: return 0x1p-140f * normal;
    case 12: return 3e38f;
    case 13: return i == 77 % (i + 1) ? INFINITY : normal;
    default: return i == 5 ? NAN : normal;
  }
}

static void check_group(int bits, int group_size, nyb_dtype dtype, nyb_dtype scale_dtype,
                        nyb_rule rule, int kind, check_random *random) {
  static const nyb_format_id ids[] = {
      [2] = NYB_FORMAT_AFFINE2, [3] = NYB_FORMAT_AFFINE3, [4] = NYB_FORMAT_AFFINE4,
      [5] = NYB_FORMAT_AFFINE5, [6] = NYB_FORMAT_AFFINE6, [8] = NYB_FORMAT_AFFINE8};
  const nyb_quantize_fn kernel = (nyb_quantize_fn)scalar_kernel(NYB_OPERATION_QUANTIZE, ids[bits]);
  float input[MOST_ELEMENTS];
  for (int i = 0; i < group_size; i++) {
    nyb_store_f32(input, dtype, i, element_of(kind, i, bits, random));
  }
  const nyb_quantize_span span = {
      .input = input,
      .input_dtype = dtype,
      .groups = 1,
      .group_size = group_size,
      .rule = rule,
      .scale_dtype = scale_dtype,
  };
  stored_group got, want;
  quantize_by_lanes(&span, bits, &got);
  quantize_by_scalar(&span, kernel, &want);
  if (memcmp(&got, &want, sizeof got) != 0) {
    fail_msg("%d bits, group %d, %s to scales in %s, rule %d, kind %d: scale %#x, not %#x", bits,
             group_size, check_dtype_name(dtype), check_dtype_name(scale_dtype), (int)rule, kind,
             got.scale, want.scale);
  }
}

static const int all_bits[] = {2, 3, 4, 5, 6, 8};

static void test_quantize(void **state) {
  (void)state;
  check_random random = {1};
  for (int b = 0; b < 6; b++) {
    for (int group_size = 32; group_size <= 128; group_size *= 2) {
      for (int dtypes = 0; dtypes < 9; dtypes++) {
        for (int kind = 0; kind < 2 * KINDS * 8; kind++) {
          check_group(all_bits[b], group_size, (nyb_dtype)(1 + dtypes % 3),
                      (nyb_dtype)(1 + dtypes / 3), (nyb_rule)(kind % 2), kind / 2 % KINDS, &random);
        }
      }
    }
  }
}

/* ---- Dequantize ----------------------------------------------------------------------------- */

static void test_dequantize(void **state) {
  (void)state;
  static const nyb_format_id ids[] = {NYB_FORMAT_AFFINE2, NYB_FORMAT_AFFINE3, NYB_FORMAT_AFFINE4,
                                      NYB_FORMAT_AFFINE5, NYB_FORMAT_AFFINE6, NYB_FORMAT_AFFINE8};
  check_random random = {2};
  for (int run = 0; run < 6 * 3 * 400; run++) {
    const int bits = all_bits[run % 6];
    const nyb_dtype scale_dtype = (nyb_dtype)(1 + run / 6 % 3);
    const nyb_dequantize_fn kernel =
        (nyb_dequantize_fn)scalar_kernel(NYB_OPERATION_DEQUANTIZE, ids[run % 6]);
    uint8_t codes[32];
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)check_random_bits(&random);
    const double size = run % 5 == 0 ? 1e4 : 1;
    const uint32_t scale = stored_bits(scale_dtype, (float)(size * check_random_normal(&random)));
    const uint32_t bias = stored_bits(scale_dtype, (float)(size * check_random_normal(&random)));
    float want[32];
    kernel(&(nyb_dequantize_span){codes, &scale, &bias, scale_dtype, 1, 32, want, NYB_F32});
    for (int lane = 0; lane < 4; lane++) {
      uint64_t stream = 0;
      for (int i = 0; i < bits; i++) stream |= (uint64_t)codes[lane * bits + i] << (8 * i);
      float got[NYB_LANE_ELEMENTS];
      nyb_values_of(stream, bits, widened(scale_dtype, scale), widened(scale_dtype, bias),
                    scale_dtype, got);
      assert_memory_equal(got, want + lane * NYB_LANE_ELEMENTS, sizeof got);
    }
  }
}

/* Every element of the 16-bit dtypes, to and from every dtype, NaNs too. */
static void test_plain_rows(void **state) {
  (void)state;
  static const nyb_format_id ids[] = {NYB_FORMAT_COUNT, NYB_FORMAT_PLAIN_F32, NYB_FORMAT_PLAIN_F16,
                                      NYB_FORMAT_PLAIN_BF16};
  for (int pair = 0; pair < 9; pair++) {
    const int from = 1 + pair % 3, to = 1 + pair / 3;
    const nyb_dequantize_fn widen =
        (nyb_dequantize_fn)scalar_kernel(NYB_OPERATION_DEQUANTIZE, ids[from]);
    const nyb_quantize_fn narrow = (nyb_quantize_fn)scalar_kernel(NYB_OPERATION_QUANTIZE, ids[to]);
    for (uint32_t i = 0; i < 0x10000; i++) {
      const uint32_t bits = from == NYB_F32 ? i << 16 | (i * 40503 & 0xffff) : i;
      uint32_t want = 0;
      widen(&(nyb_dequantize_span){&bits, NULL, NULL, NYB_F32, 1, 1, &want, (nyb_dtype)to});
      const uint32_t got = nyb_convert(from, to, bits);
      assert_int_equal(got, want);
      const bool storable =
          narrow(&(nyb_quantize_span){
              .input = &bits, .input_dtype = (nyb_dtype)from, .groups = 1, .group_size = 1}) == 1;
      assert_int_equal(nyb_is_finite(to, got) != 0, storable);
    }
  }
}

/* ---- GeGLU ---------------------------------------------------------------------------------- */

static void test_tanh(void **state) {
  (void)state;
  for (uint64_t bits = 0; bits < UINT64_C(0x100000000); bits += 1009) {
    const float z = nyb_f32_from_bits((uint32_t)bits);
    assert_int_equal(nyb_bits_of(nyb_device_tanh(z)), nyb_bits_from_f32(nyb_tanh_f32(z)));
  }
}

/* The result of the table, of the steps, and of the CPU, for every gate. */
static void check_halves(nyb_dtype dtype, nyb_format_id format, uint16_t nan) {
  static uint16_t table[2 * NYB_GELU_ENTRIES_F16];
  static uint16_t gates[0x10000], ups[0x10000], want[0x10000];
  const uint32_t entries = nyb_gelu_entries(dtype);
  for (uint32_t i = 0; i < entries; i++) nyb_gelu_entry(dtype, i, &table[i], &table[entries + i]);
  const nyb_geglu_fn kernel = (nyb_geglu_fn)scalar_kernel(NYB_OPERATION_GEGLU, format);
  check_random random = {3};
  for (int round = 0; round < 6; round++) {
    for (int i = 0; i < 0x10000; i++) {
      gates[i] = (uint16_t)i;
      ups[i] = (uint16_t)check_random_bits(&random);
      if (round == 0) ups[i] = (uint16_t)stored_bits(dtype, 1);
    }
    kernel(gates, ups, want, 0x10000, false);
    for (int i = 0; i < 0x10000; i++) {
      const uint32_t gate = gates[i];
      const float x = nyb_number_from(dtype, gate), up = nyb_number_from(dtype, ups[i]);
      const float steps =
          nyb_gelu_of(dtype, x, nyb_gelu_factor(dtype, nyb_device_tanh(nyb_gelu_inner(dtype, x))));
      const float entry = nyb_round_number(
          dtype, nyb_gelu_by_entry(dtype, gate, table[nyb_gelu_index(dtype, gate)]));
      const float y[2] = {steps * up, entry * up};
      for (int way = 0; way < 2; way++) {
        const uint32_t got = y[way] == y[way] ? nyb_number_to(dtype, y[way]) : nan;
        if (got != want[i]) {
          fail_msg("%s gate %#x, up %#x, %s: %#x, not %#x", check_dtype_name(dtype), gate, ups[i],
                   way == 0 ? "steps" : "table", got, want[i]);
        }
      }
    }
  }
}

static void test_geglu_f16(void **state) {
  (void)state;
  check_halves(NYB_F16, NYB_FORMAT_PLAIN_F16, NYB_DEVICE_NAN_F16);
}

static void test_geglu_bf16(void **state) {
  (void)state;
  check_halves(NYB_BF16, NYB_FORMAT_PLAIN_BF16, NYB_DEVICE_NAN_BF16);
}

static void test_geglu_f32(void **state) {
  (void)state;
  const nyb_geglu_fn kernel =
      (nyb_geglu_fn)scalar_kernel(NYB_OPERATION_GEGLU, NYB_FORMAT_PLAIN_F32);
  check_random random = {4};
  for (int i = 0; i < 2000000; i++) {
    const uint32_t bits = i % 2 == 0 ? (uint32_t)check_random_bits(&random)
                                     : nyb_bits_from_f32((float)check_random_normal(&random));
    const float x = nyb_f32_from_bits(bits), up = 1.5f;
    float want;
    kernel(&x, &up, &want, 1, false);
    const float t = nyb_device_tanh(nyb_gelu_inner(NYB_F32, x));
    const float y = nyb_gelu_of(NYB_F32, x, nyb_gelu_factor(NYB_F32, t)) * up;
    assert_int_equal(y == y ? nyb_bits_of(y) : 0x7fc00000u, nyb_bits_from_f32(want));
  }
}

static int set_up(void **state) {
  (void)state;
  nyb_gelu_tables_make();
  return 0;
}

/* ---- Attention: what rows see, and where tokens stand -----------------------------------------
 */

enum { MOST_SEQUENCES = 3, MOST_TABLE = 64 };

/* A call of which only the numbers are looked at; data is none. */
typedef struct numbers_case {
  nyb_attention attention;
  int32_t lengths[MOST_SEQUENCES], starts[MOST_SEQUENCES], table[MOST_SEQUENCES * MOST_TABLE];
  int32_t offsets[MOST_SEQUENCES], last_begins[MOST_SEQUENCES];
} numbers_case;

static int64_t between(check_random *random, int64_t least, int64_t most) {
  return least + check_random_below(random, most - least + 1);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void choose_places(numbers_case *c, check_random *random) {
  nyb_attention *a = &c->attention;
  switch (check_random_below(random, 5)) {
    case 0: a->starts = c->starts; break;
    case 1:
      a->pages = (nyb_pages){
          .table = c->table, .table_stride = MOST_TABLE, .page_tokens = 16, .page_count = 9};
      break;
    case 2:
      a->ring = (nyb_ring){.offsets = c->offsets,
                           .keep_tokens = check_random_below(random, a->capacity_tokens)};
      break;
    case 3:
      a->first.tokens = check_random_below(random, 60);
      a->last.tokens = between(random, a->first.tokens == 0, 60);
      a->last_begins = c->last_begins;
      break;
    default: break;
  }
}

/* Within the bounds that the CPU checks. */
static void choose_numbers(numbers_case *c, check_random *random) {
  nyb_attention *a = &c->attention;
  for (int64_t b = 0; b < a->batch; b++) {
    const int64_t length = check_random_below(random, nyb_room_tokens(a) + 1);
    c->lengths[b] = (int32_t)length;
    c->starts[b] = (int32_t)check_random_below(random, length + 1);
    c->offsets[b] = (int32_t)check_random_below(random, a->capacity_tokens - a->ring.keep_tokens);
    const int64_t least = larger(smaller(a->first.tokens, length), length - a->last.tokens);
    const int64_t most = smaller(length, a->first.tokens + a->capacity_tokens);
    c->last_begins[b] = (int32_t)between(random, least, most);
  }
  for (int i = 0; i < MOST_SEQUENCES * MOST_TABLE; i++) {
    c->table[i] = (int32_t)check_random_below(random, 9);
  }
}

static void choose_case(numbers_case *c, check_random *random) {
  *c = (numbers_case){.attention = NYB_ATTENTION_INIT};
  nyb_attention *a = &c->attention;
  a->batch = between(random, 1, MOST_SEQUENCES);
  a->query_heads = a->kv_heads = 1;
  a->query_len = between(random, 1, 90);
  a->key_dim = a->value_dim = 32;
  a->capacity_tokens = between(random, 1, 700);
  a->lengths = c->lengths;
  a->k.format = a->v.format = (nyb_format){.scheme = NYB_PLAIN, .dtype = NYB_F32};
  a->first.k = a->first.v = a->last.k = a->last.v = a->k;
  a->q.dtype = a->out.dtype = NYB_F32;
  a->scale = 1;
  a->mask = (nyb_mask)check_random_below(random, 3);
  if (check_random_below(random, 3) > 0) {
    a->window_tokens = between(random, 1, 300);
    a->window_keep_tokens = check_random_below(random, 100);
  }
  choose_places(c, random);
  choose_numbers(c, random);
}

static nyb_attention_arguments arguments_of(const nyb_attention *a) {
  const nyb_attention_call call = {.attention = a, .heads_per_kv = 1};
  return nyb_cuda_attention_arguments(&call);
}

static void compare_sight(const nyb_attention *a, const nyb_attention_arguments *d, int64_t batch) {
  const nyb_sequence sequence = nyb_sequence_of(d, batch);
  assert_int_equal(sequence.start, nyb_sequence_start(a, batch));
  assert_int_equal(sequence.tokens, nyb_sequence_tokens(a, batch));
  for (int64_t row = 0; row < a->query_len; row++) {
    const nyb_sight want = nyb_sight_of(a, batch, row);
    const nyb_row_sight got = nyb_row_sight_of(d, &sequence, row);
    assert_int_equal(nyb_position_of(d, &sequence, row), nyb_row_position(a, batch, row));
    assert_int_equal(got.keep_end, want.keep_end);
    assert_int_equal(got.begin, want.begin < 0 ? 0 : want.begin);
    assert_int_equal(got.end, want.end);
  }
}

static void compare_places(const nyb_attention *a, const nyb_attention_arguments *d,
                           int64_t batch) {
  static const int parts[] = {[NYB_PART_MIDDLE] = NYB_DEVICE_PART_MIDDLE,
                              [NYB_PART_FIRST] = NYB_DEVICE_PART_FIRST,
                              [NYB_PART_LAST] = NYB_DEVICE_PART_LAST};
  const int last_begin = nyb_last_begin_of(d, batch, a->lengths[batch]);
  const int64_t start = nyb_sequence_start(a, batch);
  for (int64_t token = 0; token < nyb_sequence_tokens(a, batch); token++) {
    const nyb_place want = nyb_place_of(a, batch, token);
    const nyb_token_place got = nyb_token_place_of(d, batch, last_begin, (int)token);
    assert_int_equal(got.part, parts[want.part]);
    assert_int_equal(got.block, want.batch);
    assert_int_equal(got.row + start, want.row);
    if (!nyb_has_parts(a)) continue;
    const int end = nyb_part_end_of(d, last_begin, (int)token);
    assert_int_equal(end, want.part_end == INT64_MAX ? INT32_MAX : want.part_end);
  }
}

static void test_sight_and_places(void **state) {
  (void)state;
  check_random random = {.state = 11};
  for (int i = 0; i < 400; i++) {
    numbers_case c;
    choose_case(&c, &random);
    const nyb_attention_arguments d = arguments_of(&c.attention);
    for (int64_t b = 0; b < c.attention.batch; b++) {
      compare_sight(&c.attention, &d, b);
      compare_places(&c.attention, &d, b);
    }
  }
}

/* Numbers in device memory that the CPU would refuse lead to no memory but the call's own. */
static void test_numbers_out_of_range(void **state) {
  static const int32_t wild[] = {INT32_MIN, -1, 0, 5, 1000, INT32_MAX};
  (void)state;
  check_random random = {.state = 12};
  for (int i = 0; i < 400; i++) {
    numbers_case c;
    choose_case(&c, &random);
    const nyb_attention *a = &c.attention;
    for (int64_t b = 0; b < a->batch; b++) {
      c.lengths[b] = wild[check_random_below(&random, 6)];
      c.starts[b] = wild[check_random_below(&random, 6)];
      c.offsets[b] = wild[check_random_below(&random, 6)];
      c.last_begins[b] = wild[check_random_below(&random, 6)];
    }
    for (int j = 0; j < MOST_SEQUENCES * MOST_TABLE; j++) {
      c.table[j] = wild[check_random_below(&random, 6)];
    }
    const nyb_attention_arguments d = arguments_of(a);
    for (int64_t b = 0; b < a->batch; b++) {
      const nyb_sequence sequence = nyb_sequence_of(&d, b);
      const int last_begin = nyb_last_begin_of(&d, b, sequence.tokens);
      assert_in_range(sequence.start, 0, nyb_room_tokens(a));
      assert_in_range(sequence.start + sequence.tokens, 0, nyb_room_tokens(a));
      for (int64_t token = 0; token < sequence.tokens; token++) {
        const nyb_token_place place = nyb_token_place_of(&d, b, last_begin, (int)token);
        const int64_t blocks = nyb_is_paged(a) ? a->pages.page_count : a->batch;
        const int64_t rows = nyb_is_paged(a)                       ? a->pages.page_tokens
                             : place.part == NYB_DEVICE_PART_FIRST ? a->first.tokens
                             : place.part == NYB_DEVICE_PART_LAST  ? a->last.tokens
                                                                   : a->capacity_tokens;
        assert_in_range(place.block, 0, blocks - 1);
        assert_in_range(place.row + sequence.start, 0, rows - 1);
      }
    }
  }
}

/* ---- Merging ----------------------------------------------------------------------------------
 */

enum { MERGED_PARTS = 9, MERGED_CASES = 2000 };

/* One row of one column, as attention_combine adds it up. */
static void combine(const float *outs, const float *lses, int parts, float *out, float *lse) {
  double largest = (double)-INFINITY, all = 0, sum = -0.0;
  for (int i = 0; i < parts; i++) {
    if ((double)lses[i] > largest) largest = (double)lses[i];
  }
  for (int i = 0; i < parts; i++) {
    const double weight = nyb_exp_of_negative(NYB_F64_SUBTRACT((double)lses[i], largest));
    all = NYB_F64_ADD(all, weight);
    sum = NYB_F64_ADD(sum, NYB_F64_MULTIPLY(weight, (double)outs[i]));
  }
  *out = nyb_f32_of_f64(NYB_F64_DIVIDE(sum, all));
  *lse = nyb_f32_of_f64(all > 1 ? NYB_F64_ADD(largest, nyb_log_from_one(all)) : largest);
}

/* What has no weight, +0 or NaN, leaves the other side's bits, zeros and infinities too; NaN shows.
 */
static void test_fold_of_sides(void **state) {
  (void)state;
  const float maxima[] = {-INFINITY, -3.5f, 0, 80};
  const float values[] = {0, -0.0f, 1e-45f, -1e-38f, 0.1f, -7, 3e38f, INFINITY, -INFINITY};
  for (size_t m = 0; m < sizeof maxima / sizeof *maxima; m++) {
    const nyb_fold next = nyb_fold_of_sides(-INFINITY, 0, maxima[m], 1);
    const nyb_fold folded = nyb_fold_of_sides(maxima[m], 1, -INFINITY, 0);
    assert_true(next.maximum == maxima[m] && folded.maximum == maxima[m]);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
      const uint32_t bits = nyb_bits_of(values[i]);
      assert_int_equal(nyb_bits_of(nyb_fold_values(0, next.keep, values[i], next.add)), bits);
      assert_int_equal(nyb_bits_of(nyb_fold_values(values[i], folded.keep, 0, folded.add)), bits);
      assert_true(isnan(nyb_fold_values(NAN, next.keep, values[i], next.add)));
      assert_true(isnan(nyb_fold_values(values[i], folded.keep, NAN, folded.add)));
    }
  }
  const nyb_fold neither = nyb_fold_of_sides(-INFINITY, 0, -INFINITY, 0);
  assert_int_equal(nyb_bits_of(nyb_fold_values(0, neither.keep, 0, neither.add)), 0);
  assert_true(isnan(nyb_fold_values(NAN, neither.keep, 0, neither.add)));
  assert_true(isnan(nyb_fold_values(0, neither.keep, NAN, neither.add)));
  const nyb_fold both = nyb_fold_of_sides(0, 1, 0.5f, 1);
  assert_true(both.keep == expf(-0.5f) && both.add == 1);
}

static void test_merge(void **state) {
  static const double spreads[] = {0, 0.01, 1, 30, 800};
  (void)state;
  nyb_context *context;
  check_random random = {.state = 21};
  assert_int_equal(nyb_context_create(NULL, &context), NYB_OK);
  for (int i = 0; i < MERGED_CASES; i++) {
    const int parts = 1 + i % MERGED_PARTS;
    float outs[MERGED_PARTS], lses[MERGED_PARTS], want[2], got[2];
    nyb_input out_views[MERGED_PARTS], lse_views[MERGED_PARTS];
    for (int part = 0; part < parts; part++) {
      outs[part] = (float)check_random_normal(&random);
      lses[part] = (float)(spreads[i % 5] * check_random_normal(&random));
      out_views[part] = (nyb_input){.data = &outs[part], .dtype = NYB_F32};
      lse_views[part] = (nyb_input){.data = &lses[part], .dtype = NYB_F32};
    }
    const nyb_attention_merge merge = {.struct_size = sizeof merge,
                                       .parts = parts,
                                       .batch = 1,
                                       .query_heads = 1,
                                       .query_len = 1,
                                       .value_dim = 1,
                                       .outs = out_views,
                                       .lses = lse_views,
                                       .out = {.data = &want[0], .dtype = NYB_F32},
                                       .lse = {.data = &want[1], .dtype = NYB_F32}};
    assert_int_equal(nyb_attention_merge_run(context, &merge, NULL), NYB_OK);
    combine(outs, lses, parts, &got[0], &got[1]);
    assert_memory_equal(got, want, sizeof want);
  }
  nyb_context_destroy(context);
}

/* ---- Subtrees of leaves --------------------------------------------------------------------- */

enum { MOST_LEAVES = 200 };

/* Which leaves of a pair begin a subtree, leaf by leaf as a block of threads writes them: run_of
 * says for each which run it lies in. */
static void walk_subtrees(const nyb_seen_leaves *seen, const int32_t *run_of, int32_t levels,
                          bool *begins) {
  const int32_t pieces[2][2] = {{0, seen->keep}, {seen->begin, seen->end}};
  for (int i = 0; i < MOST_LEAVES; i++) begins[i] = false;
  for (int piece = 0; piece < 2; piece++) {
    for (int32_t leaf = pieces[piece][0]; leaf < pieces[piece][1];) {
      int32_t end = leaf + 1;
      while (end < pieces[piece][1] && run_of[end] == run_of[leaf]) end++;
      while (leaf < end) {
        int32_t level = 0;
        while (level < levels && leaf % (2 << level) == 0 && leaf + (2 << level) <= end) level++;
        begins[leaf] = true;
        leaf += 1 << level;
      }
    }
  }
}

static void check_subtrees(const nyb_seen_leaves *seen, uint32_t first_unit, uint32_t units,
                           uint32_t blocks, int32_t levels) {
  const nyb_leaf_runs runs = nyb_leaf_runs_of(units, blocks);
  int32_t run_of[MOST_LEAVES], block = 0;
  bool begins[MOST_LEAVES];
  uint32_t unit = first_unit;
  for (int32_t leaf = 0; leaf < seen->end; leaf++) {
    if (leaf >= seen->keep && leaf < seen->begin) continue;
    while (nyb_run_begin(&runs, (uint32_t)block + 1) <= unit) block++;
    assert_int_equal(nyb_run_end(&runs, unit), nyb_run_begin(&runs, (uint32_t)block + 1));
    run_of[leaf] = block;
    unit++;
  }
  assert_true(unit <= units);
  walk_subtrees(seen, run_of, levels, begins);
  for (int32_t window = 0; window < MOST_LEAVES; window += NYB_LEAF_WINDOW) {
    const uint32_t begun = nyb_subtrees_begun(&runs, first_unit, seen, levels, window);
    for (int32_t i = 0; i < NYB_LEAF_WINDOW; i++)
      assert_int_equal(begun >> i & 1, window + i < MOST_LEAVES && begins[window + i]);
  }
}

/* Every number of leaves and of blocks, and random pairs among others' units. */
static void test_subtrees(void **state) {
  (void)state;
  check_random random = {.state = 5};
  for (int32_t leaves = 0; leaves < 70; leaves++) {
    for (uint32_t blocks = 1; blocks < 80; blocks++) {
      const nyb_seen_leaves seen = {0, 0, leaves};
      check_subtrees(&seen, 0, (uint32_t)leaves, blocks, (int32_t)(blocks % 5));
    }
  }
  for (int i = 0; i < 20000; i++) {
    nyb_seen_leaves seen = {0, 0, (int32_t)check_random_below(&random, MOST_LEAVES)};
    if (i % 3 != 0) seen.begin = (int32_t)check_random_below(&random, (uint32_t)seen.end + 1);
    if (i % 3 == 2) seen.keep = (int32_t)check_random_below(&random, (uint32_t)seen.begin + 1);
    if (seen.keep >= seen.begin) seen.keep = seen.begin = 0;
    const uint32_t before = (uint32_t)check_random_below(&random, i % 2 == 0 ? 3000 : 30);
    const uint32_t own = (uint32_t)(seen.end - seen.begin + seen.keep);
    const uint32_t units = before + own + (uint32_t)check_random_below(&random, 3000);
    const uint32_t blocks = 1 + (uint32_t)check_random_below(&random, i % 5 == 0 ? 4000 : 400);
    check_subtrees(&seen, before, units, blocks, i % (NYB_LEAF_MAX_LEVELS + 1));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_conversions),
      cmocka_unit_test(test_split),
      cmocka_unit_test(test_quantize),
      cmocka_unit_test(test_dequantize),
      cmocka_unit_test(test_plain_rows),
      cmocka_unit_test(test_tanh),
      cmocka_unit_test(test_geglu_f16),
      cmocka_unit_test(test_geglu_bf16),
      cmocka_unit_test(test_geglu_f32),
      cmocka_unit_test(test_sight_and_places),
      cmocka_unit_test(test_numbers_out_of_range),
      cmocka_unit_test(test_fold_of_sides),
      cmocka_unit_test(test_merge),
      cmocka_unit_test(test_subtrees),
  };
  return cmocka_run_group_tests(tests, set_up, NULL);
}
