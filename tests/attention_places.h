/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of a scene, laid out otherwise: behind padding, in pages, in a ring, in three parts.
 * All memory around them is poisoned, and so are the numbers that no call may look at. */
#ifndef ATTENTION_PLACES_H
#define ATTENTION_PLACES_H

#include "attention_scene.h"

typedef struct placed_scene {
  nyb_attention call; /* writes the scene's own outputs */
  stored_buffers keys[3], values[3];
  check_buffer numbers; /* starts, table, offsets or last_begins */
  check_buffer lengths; /* where they are others than the scene's */
  check_buffer mask;    /* where its columns are others than the scene's */
} placed_scene;

void placed_free(placed_scene *placed);

/* Each of these is false where memory ran out. */

/* Up to 150 tokens of padding before each sequence. */
bool place_behind_padding(const attention_scene *scene, check_random *random, placed_scene *placed);

/* Pages in random order with others between them. The sequences' first shared_pages pages are those
 * of the first sequence, as far as both have them (scene_share_tokens must have made them so). */
bool place_in_pages(const attention_scene *scene, int64_t page_tokens, int64_t shared_pages,
                    check_random *random, placed_scene *placed);
/* Makes the first tokens of every sequence those of the first sequence. */
void scene_share_tokens(attention_scene *scene, int64_t tokens);

/* A ring of as many tokens as the scene has room for. */
bool place_in_ring(const attention_scene *scene, int64_t keep_tokens, check_random *random,
                   placed_scene *placed);

/* The sequences of three scenes, one after the other, which differ in formats, lengths and data of
 * K and V; queries and outputs are the first scene's. The lengths of the sequences are the sums;
 * those of the first part must be its capacity where there is anything behind. */
bool place_in_parts(const attention_scene scenes[3], placed_scene *placed);

/* The rows of K, or of V, of the call of a scene, copied from one token to another. */
void copy_stored_row(const nyb_stored *from, const int64_t from_at[3], const nyb_stored *to,
                     const int64_t to_at[3], int64_t dim);

/* ---- Parts -------------------------------------------------------------------------------- */

enum { SCENE_PARTS = 3 };
typedef struct parts_scene {
  attention_scene scenes[SCENE_PARTS];
  placed_scene placed;
} parts_scene;

bool parts_make(parts_scene *parts, const attention_shape shapes[SCENE_PARTS]);
void parts_free(parts_scene *parts);

/* Whether the fused path may leave these bits, which scene_bits() has ordered; `text` says why not.
 * *worst gets the largest error as a share of its tolerance. Of masks only NONE and CAUSAL, no
 * window, array, sinks, slopes or softcap. */
bool parts_right(const parts_scene *parts, oracle_arithmetic arithmetic, const uint8_t *bits,
                 double *worst, char *text, size_t text_size);

/* The same sequences in one cache of the given formats, with the first scene's queries. `copy` is
 * copy_stored_row, or widen_stored_row for plain f32: scale * code + bias as f32 arithmetic has it.
 */
typedef void (*stored_row_copier)(const nyb_stored *from, const int64_t from_at[3],
                                  const nyb_stored *to, const int64_t to_at[3], int64_t dim);
bool parts_make_whole(const parts_scene *parts, const nyb_format *key, const nyb_format *value,
                      stored_row_copier copy, attention_scene *whole);
void widen_stored_row(const nyb_stored *from, const int64_t from_at[3], const nyb_stored *to,
                      const int64_t to_at[3], int64_t dim);

/* ---- Random cases ------------------------------------------------------------------------- */

int64_t check_pick(check_random *random, const int64_t *from, int64_t count);
#define PICK(random, ...)                              \
  check_pick((random), (const int64_t[]){__VA_ARGS__}, \
             (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

nyb_format places_random_format(check_random *random, int64_t dim);
/* Up to three sequences of up to `most_tokens` tokens, none among them. */
attention_shape places_random_shape(const char *name, int64_t most_tokens, check_random *random);
/* Windows, arrays of masks, sinks, slopes and softcap: each now and then. */
void places_add_features(check_random *random, attention_shape *shape);
/* Lengths of a few tiles mostly, of a few chunks now and then. */
int64_t places_random_most_tokens(check_random *random);
/* Parts of any length, empty ones among them; nothing stands behind a first part that is not full.
 */
void places_random_parts(check_random *random, attention_shape shapes[SCENE_PARTS]);

/* ---- Running ------------------------------------------------------------------------------ */

/* Runs the call on a path with a poisoned workspace, copies the outputs' bits as scene_bits() does,
 * and looks at everything around them. The status, or NYB_ERROR_VALUE for a stray write; `text`
 * says what was wrong. */
nyb_status placed_run(attention_scene *scene, placed_scene *placed, const check_library *library,
                      nyb_context *context, nyb_path path, uint8_t *bits, char *text,
                      size_t text_size);

#endif
