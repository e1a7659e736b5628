/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of the kernels append_placed, retire, trim, cache_patch, cache_copy and
 * cache_reorder, for the host's compiler and the device's. Strides are in bytes. */
#ifndef NYB_CACHE_ARGUMENTS_H
#define NYB_CACHE_ARGUMENTS_H

#include "cache_kinds.cuh"
#include "quantize_arguments.h"

enum { NYB_CACHE_THREADS = 256 }; /* of a block of trim, cache_patch, cache_copy, cache_reorder */

/* What there is of each sequence, [batch], as nyb_cache_sequence has it. */
typedef struct nyb_device_sequences {
  long long *dropped;
  int *lengths, *offsets, *last_begins;
} nyb_device_sequences;

/* Where a cache's tokens stand. */
typedef struct nyb_device_places {
  nyb_kind_numbers kind;
  nyb_device_sequences sequences;
  long long body_tokens;  /* the capacity of the body */
  long long limit_tokens; /* of a sequence, those dropped too */
  const int *page_table;  /* paged: [batch, page_table_stride] */
  long long page_table_stride;
  /* Paged, [batch]: the tokens from begin to end have pages that no other sequence has. */
  const int *own_begins, *own_ends;
} nyb_device_places;

/* Unquantized rows beside the body: block, head, slot. */
typedef struct nyb_device_plain {
  char *rows;
  long long stride[3];
} nyb_device_plain;

typedef struct nyb_device_placed {
  nyb_device_rows key, value;         /* input, and the body by block, head and slot */
  nyb_device_plain first[2], last[2]; /* mixed: of the key and the value */
  nyb_device_places places;
  nyb_divider tokens, blocks_per_sequence; /* retire: tokens that may leave the last part */
  long long append_tokens;                 /* of the append */
  long long kv_heads;
  long long key_lanes, value_lanes; /* of a sequence; the key's fill whole warps */
  const int *padding;               /* [batch], or null */
  unsigned *arrivals;               /* [batch], 0 before and after */
  int *non_finite;                  /* or null */
  int rule;
  int part_dtype; /* mixed; else 0 */
} nyb_device_placed;

typedef struct nyb_device_trim {
  nyb_device_places places;
  long long first, count; /* sequences */
  long long tokens;
} nyb_device_trim;

/* Words of a parameter's 4 KiB. */
enum { NYB_PATCH_WORDS = 500 };

/* words[place[i]] = value[i]. */
typedef struct nyb_device_patch {
  int *words;
  int count;
  int padding;
  unsigned place[NYB_PATCH_WORDS];
  int value[NYB_PATCH_WORDS];
} nyb_device_patch;

/* An array of planes of rows, one plane for each block and head. */
typedef struct nyb_device_planes {
  char *source, *target;
  long long source_bytes, target_bytes; /* from a plane to the next */
  long long row_bytes;                  /* 0: there is no such array */
} nyb_device_planes;

enum { NYB_REGION_ARRAYS = 6, NYB_COPY_MOVES = 180 };

typedef struct nyb_copy_move {
  int from_block, from_slot, to_block, to_slot, rows;
} nyb_copy_move;

/* Rows to other places, none of which another move reads or writes. */
typedef struct nyb_device_copy {
  nyb_device_planes array[NYB_REGION_ARRAYS];
  long long kv_heads;
  int count;
  int padding;
  nyb_copy_move moves[NYB_COPY_MOVES];
} nyb_device_copy;

enum { NYB_REORDER_ARRAYS = 3 * NYB_REGION_ARRAYS, NYB_REORDER_BUFFER = -1 };

/* The first rows of one block to another, or by way of a buffer. */
typedef struct nyb_reorder_move {
  int to, from; /* or NYB_REORDER_BUFFER */
  int rows[NYB_CACHE_REGIONS];
} nyb_reorder_move;

/* Blocks that change places, each move after the one before. source and target are the same. */
typedef struct nyb_device_reorder {
  nyb_device_planes array[NYB_REORDER_ARRAYS]; /* NYB_REGION_ARRAYS of each region */
  const nyb_reorder_move *moves;
  long long kv_heads, count;
} nyb_device_reorder;

#endif
