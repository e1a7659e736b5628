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

/* Runs the call on a path with a poisoned workspace, copies the outputs' bits as scene_bits() does,
 * and looks at everything around them. The status, or NYB_ERROR_VALUE for a stray write; `text`
 * says what was wrong. */
nyb_status placed_run(attention_scene *scene, placed_scene *placed, nyb_context *context,
                      nyb_path path, uint8_t *bits, char *text, size_t text_size);

#endif
