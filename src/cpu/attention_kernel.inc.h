/* SPDX-License-Identifier: Apache-2.0 */
/* The attention kernels of one ISA. The including file brings the vector vocabulary first
 * (simd_<isa>.h), so that the algorithm is written once and reads the same everywhere.
 *
 * Scores over affine keys are integer dots: tokens stand in the lanes. The packed words of as many
 * tokens as there are lanes are transposed, cut into pairs of 16-bit codes and kept in L1 for one
 * group of elements; each query row then walks them with its own 16-bit integers, two products a
 * lane and step. The sums are exact; scale and bias of each token and group come in afterwards.
 * Values are float FMAs: elements stand in the lanes, a few vectors of accumulators per row live in
 * registers while the tile's tokens pass by.
 *
 * Every row gets the same operations in the same order however many rows stand beside it. */

#include <float.h>
#include <math.h>

#include "../kernels.h"

#define NYB_JOIN_(a, b) nyb_##a##_##b
#define NYB_JOIN(a, b) NYB_JOIN_(a, b)
#define KERNEL(name) NYB_JOIN(name, NYB_ISA_SUFFIX)

/* Widths, row counts and fields are constants once a function is inlined, and loops over registers
 * are unrolled. With a sanitizer's checks in each copy that would take minutes to compile, so such
 * a build gets one copy of each function instead. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define NYB_SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NYB_SANITIZED
#endif
#if defined(NYB_SANITIZED)
#define ALWAYS_INLINE static __attribute__((noinline, unused))
#define UNROLL
#define UNROLL_BY(count)
#else
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_BY(count) UNROLL_BY_(GCC unroll count)
#define UNROLL_BY_(text) _Pragma(#text)
#endif

enum {
  MAX_GROUP = 128,
  /* From one vector of tokens to the next: all pairs of a group, and a cache line against addresses
   * that differ by pages. */
  PAIRS_STRIDE = MAX_GROUP / 2 * VECTOR_LANES + 16,
};

/* ---- Loading floats ------------------------------------------------------------------------- */

ALWAYS_INLINE vf load_plain(const char *row, int64_t element, nyb_dtype dtype) {
  if (dtype == NYB_BF16) return vf_load_bf16((const uint16_t *)(const void *)row + element);
  if (dtype == NYB_F16) return vf_load_f16((const uint16_t *)(const void *)row + element);
  return vf_load((const float *)(const void *)row + element);
}

/* A vector that reaches past the row's last element: the missing ones are 0 and are not read. */
static vf load_plain_tail(const char *row, int64_t element, int64_t dim, nyb_dtype dtype) {
  float padded[VECTOR_LANES] = {0};
  for (int64_t i = 0; i < VECTOR_LANES && element + i < dim; i++) {
    padded[i] = nyb_load_f32(row, dtype, element + i);
  }
  return vf_load(padded);
}

ALWAYS_INLINE void widen_halves(const uint16_t *halves, int64_t count, nyb_dtype dtype,
                                float *floats) {
  for (int64_t i = 0; i < count; i += VECTOR_LANES) {
    vf_store(floats + i, dtype == NYB_BF16 ? vf_load_bf16(halves + i) : vf_load_f16(halves + i));
  }
}

/* Words of two 16-bit floats to the floats of their low and of their high halves. */
ALWAYS_INLINE void widen_words(const int32_t *words, int64_t count, nyb_dtype dtype, float *low,
                               float *high) {
  for (int64_t i = 0; i < count; i += VECTOR_LANES) {
    const vi pair = vi_load(words + i);
    vf_store(low + i, dtype == NYB_BF16 ? vf_low_bf16(pair) : vf_low_f16(pair));
    vf_store(high + i, dtype == NYB_BF16 ? vf_high_bf16(pair) : vf_high_f16(pair));
  }
}

enum { MAX_SPAN = 2 }; /* groups that are read at once */
typedef float group_floats[MAX_SPAN][NYB_TILE_TOKENS];

/* Scales or biases of one group or of two neighbours, for all tokens of the tile, as floats; 0
 * where the tile has no token. */
static void gather_groups(const char *first, int64_t stride_bytes, int64_t group, int64_t groups,
                          int64_t tokens, nyb_dtype dtype, group_floats gathered) {
  const char *p = first + group * (dtype == NYB_F32 ? 4 : 2);
  if (tokens < NYB_TILE_TOKENS) memset(gathered, 0, sizeof(group_floats));
  if (dtype == NYB_F32) {
    for (int64_t i = 0; i < groups; i++) {
      for (int64_t t = 0; t < tokens; t++) {
        gathered[i][t] = *(const float *)(const void *)(p + t * stride_bytes + i * 4);
      }
    }
  } else if (groups == 2) {
    int32_t words[NYB_TILE_TOKENS];
    const int32_t *source = words;
    if (stride_bytes == 4 && tokens == NYB_TILE_TOKENS) {
      source = (const int32_t *)(const void *)p;
    } else {
      memset(words + tokens, 0, (size_t)(NYB_TILE_TOKENS - tokens) * 4);
      for (int64_t t = 0; t < tokens; t++, p += stride_bytes) memcpy(words + t, p, 4);
    }
    if (dtype == NYB_BF16) {
      widen_words(source, NYB_TILE_TOKENS, NYB_BF16, gathered[0], gathered[1]);
    } else {
      widen_words(source, NYB_TILE_TOKENS, NYB_F16, gathered[0], gathered[1]);
    }
  } else {
    uint16_t halves[NYB_TILE_TOKENS];
    const uint16_t *source = halves;
    if (stride_bytes == 2 && tokens == NYB_TILE_TOKENS) {
      source = (const uint16_t *)(const void *)p;
    } else {
      memset(halves + tokens, 0, (size_t)(NYB_TILE_TOKENS - tokens) * 2);
      for (int64_t t = 0; t < tokens; t++, p += stride_bytes) memcpy(halves + t, p, 2);
    }
    if (dtype == NYB_BF16) {
      widen_halves(source, NYB_TILE_TOKENS, NYB_BF16, gathered[0]);
    } else {
      widen_halves(source, NYB_TILE_TOKENS, NYB_F16, gathered[0]);
    }
  }
}

#include "attention_ahead.inc.h"
#include "attention_scores.inc.h"
#include "attention_softmax.inc.h"
#include "attention_bias.inc.h"
#include "attention_values.inc.h"

/* ---- The kernels by name -------------------------------------------------------------------- */

#define DEFINE_KERNEL(name, type, call)    \
  void KERNEL(name)(const type *argument); \
  void KERNEL(name)(const type *argument) { call; }

#define AFFINE_KERNELS(bits)                                                                     \
  DEFINE_KERNEL(attention_queries_affine##bits, nyb_query_block, queries_affine(argument, bits)) \
  DEFINE_KERNEL(attention_scores_affine##bits, nyb_score_tile, scores_affine(argument, bits))    \
  DEFINE_KERNEL(attention_values_affine##bits, nyb_value_tile, values_affine(argument, bits))    \
  DEFINE_KERNEL(attention_columns_affine##bits, nyb_value_columns, columns_affine(argument, bits))

AFFINE_KERNELS(2)
AFFINE_KERNELS(3)
AFFINE_KERNELS(4)
AFFINE_KERNELS(5)
AFFINE_KERNELS(6)
AFFINE_KERNELS(8)

#define PLAIN_KERNELS(name, dtype)                                                            \
  DEFINE_KERNEL(attention_queries_plain_##name, nyb_query_block, queries_plain(argument))     \
  DEFINE_KERNEL(attention_scores_plain_##name, nyb_score_tile, scores_plain(argument, dtype)) \
  DEFINE_KERNEL(attention_values_plain_##name, nyb_value_tile, values_plain(argument, dtype)) \
  DEFINE_KERNEL(attention_columns_plain_##name, nyb_value_columns, columns_plain(argument))

PLAIN_KERNELS(f32, NYB_F32)
PLAIN_KERNELS(f16, NYB_F16)
PLAIN_KERNELS(bf16, NYB_BF16)
