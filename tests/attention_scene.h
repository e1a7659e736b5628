/* SPDX-License-Identifier: Apache-2.0 */
/* A call of attention with everything that it needs: data of a chosen kind in guarded, poisoned
 * buffers, and what the oracle says about it. The checks and the tests build their cases of it. */
#ifndef ATTENTION_SCENE_H
#define ATTENTION_SCENE_H

#include "check.h"
#include "oracle.h"

typedef enum query_class {
  QUERIES_NORMAL,
  QUERIES_ZERO,
  QUERIES_IDENTITY, /* row i is 1 at element i (plus the head), else 0: lse is the key itself */
  QUERIES_ALIGNED,  /* with ROWS_DOMINANT's one key */
  QUERIES_LARGE,    /* with ROWS_LARGE: scores of about +-10,000 */
  QUERIES_TINY,     /* 1e-4 */
  QUERIES_SUBNORMAL,
  QUERIES_OUTLIER,    /* one element a thousand times the others */
  QUERIES_MINUTE,     /* 2^-100, with ROWS_VAST; of f16 only as small as it goes */
  QUERIES_HALF_STEPS, /* halfway between the steps of 16-bit integers */
  QUERIES_ALONG,      /* each element of the sign of ROWS_DOMINANT's key, 1 at least */
  QUERIES_COUNT
} query_class;

typedef enum row_class {
  ROWS_NORMAL,
  ROWS_ZERO,
  ROWS_EQUAL,    /* every token the same */
  ROWS_DOMINANT, /* the last token towers over the others */
  ROWS_LARGE,
  ROWS_OUTLIER,  /* channel 0 is 300 */
  ROWS_CONSTANT, /* within a group */
  ROWS_OFFSET,   /* 1,000 and a little */
  ROWS_WIDE,     /* a ramp of +-60,000 through each group */
  ROWS_SUBNORMAL,
  ROWS_VAST, /* 2^97; of f16 1,000 */
  ROWS_RAW,  /* affine: any codes, scales and biases, negative ones too */
  ROWS_ALL_ZERO_CODES,
  ROWS_ALL_MAX_CODES,
  ROWS_SEVENTHS, /* codes 7i mod 2^bits, scale 1, bias 0 */
  ROWS_COUNT
} row_class;

/* One element that is not finite. */
typedef enum poison_place {
  POISON_NONE,
  POISON_QUERY,
  POISON_KEY,      /* plain: an element; affine: the scale of the element's group */
  POISON_KEY_BIAS, /* its bias; plain: an element */
  POISON_VALUE,
  POISON_VALUE_BIAS
} poison_place;

typedef struct scene_poison {
  poison_place place;
  double value;                      /* NaN or an infinity */
  int64_t batch, head, row, element; /* head and row of q: of the queries; else KV head and token */
} scene_poison;

/* Tokens of every sequence whose scores are beyond the largest float for QUERIES_ALONG. Where keys
 * are stored in f16 only scores rounded to f16 overflow. */
typedef struct score_overflow {
  int64_t first, end;
  bool upwards; /* to +inf instead of -inf */
} score_overflow;

/* What a mask's array hides or adds; a token that is not hidden gets a number of normal data. */
typedef enum mask_class {
  MASK_HOLES,  /* three tokens of ten hidden, here and there */
  MASK_TILES,  /* whole tiles hidden, and what lies between begins and ends amid one */
  MASK_ROWS,   /* every third row, and in the other rows the first and the last tokens */
  MASK_ALL,    /* everything hidden */
  MASK_LOWEST, /* nothing: the lowest finite number everywhere (ADD) */
  MASK_CAUSAL, /* as NYB_MASK_CAUSAL has it */
  MASK_COUNT
} mask_class;

typedef struct scene_mask {
  nyb_mask_array_kind kind;       /* 0: none */
  bool f32;                       /* ADD: of f32, else of q's dtype */
  bool of_batch, of_head, of_row; /* else broadcast over them */
  mask_class class;
} scene_mask;

enum { SCENE_MAX_BATCH = 64 };

typedef struct attention_shape {
  const char *name;
  int64_t batch, query_heads, kv_heads, query_len, key_dim, value_dim;
  int64_t capacity_tokens;
  int32_t lengths[SCENE_MAX_BATCH];
  nyb_format key_format, value_format;
  nyb_dtype query_dtype, out_dtype;
  float scale; /* 0: 1/sqrt(key_dim) */
  nyb_mask mask;
  nyb_rounding rounding;
  query_class queries;
  row_class keys, values;
  scene_poison poison;
  score_overflow overflow;
  int64_t window_tokens, window_keep_tokens;
  scene_mask mask_array;
  bool sinks;    /* of every size, -inf among them */
  bool slopes;   /* of both signs, 0 among them */
  float softcap; /* 0: none */
  bool swapped;  /* [batch, tokens, heads, dim] in memory instead of [batch, heads, tokens, dim] */
  int64_t gap;   /* elements (words, scales) between the rows */
  bool packed;   /* rows that are placed: neither, of K and of V */
  bool without_lse;
  uint64_t seed;
} attention_shape;

typedef struct stored_buffers {
  check_buffer codes, scales, biases;
} stored_buffers;

typedef struct attention_scene {
  attention_shape shape;
  nyb_attention call; /* path is left to the caller */
  nyb_plan plan;      /* of the last run */
  check_buffer q, out, lse;
  stored_buffers k, v;
  check_buffer mask, sinks, slopes;
  void *workspace;
  size_t workspace_bytes; /* asked for; a guard follows */
} attention_scene;

/* False where memory ran out. */
bool scene_make(attention_scene *scene, const attention_shape *shape);
void scene_free(attention_scene *scene);

/* Changes one element of a scene that is made, and brings all of its inputs back. */
void scene_add_poison(attention_scene *scene, const scene_poison *poison);
void scene_restore_inputs(attention_scene *scene);

/* Changes one element of a scene that is made, and brings all of its inputs back. */
void scene_add_poison(attention_scene *scene, const scene_poison *poison);
void scene_restore_inputs(attention_scene *scene);

/* What the oracle expects on a path, row by row in order [batch, head, query row]. */
typedef struct scene_expected {
  double *out, *out_error; /* [rows, value_dim] */
  double *lse, *lse_error; /* [rows] */
} scene_expected;

bool scene_expect(const attention_scene *scene, nyb_path path, oracle_arithmetic arithmetic,
                  scene_expected *expected);
void scene_expected_free(scene_expected *expected);

/* Plans, and poisons outputs and workspace, as scene_run() does first. */
nyb_status scene_prepare(attention_scene *scene, nyb_context *context, nyb_path path);

/* Poisons outputs and workspace and runs the call on the path. */
nyb_status scene_run(attention_scene *scene, const check_library *library, nyb_context *context,
                     nyb_path path);

typedef enum scene_fault {
  SCENE_GOOD,
  SCENE_BAD_LSE,
  SCENE_BAD_OUT,
  SCENE_STRAY_WRITE
} scene_fault;

/* What a run left behind against what was expected: the first fault, in words. *worst gets the
 * largest error as a share of its tolerance. */
scene_fault scene_compare(attention_scene *scene, const scene_expected *expected, double *worst,
                          char *text, size_t text_size);

/* Whether anything but the outputs' own elements was written by the last run, which `text` tells.
 * The outputs' elements are lost. */
bool scene_strays(attention_scene *scene, char *text, size_t text_size);

/* Copies the outputs' bits, in order [batch, head, row, element], lse last; scene_bits_bytes() of
 * them. For comparing runs with each other. */
int64_t scene_bits_bytes(const attention_scene *scene);
void scene_bits(const attention_scene *scene, uint8_t *bits);

/* How much of its tolerance an output's error takes, less what belongs to the output's own
 * rounding: half a unit in the last place, of subnormal numbers too; an infinity stands for all
 * that rounds to it. */
double scene_share_of_tolerance(nyb_dtype dtype, double got, double want, double error);

void scene_describe(const attention_scene *scene, char *text, size_t text_size);

/* Query row `row` of a sequence sees no token from here on. */
int64_t scene_visible(const attention_shape *shape, int64_t batch_index, int64_t row);

#endif
