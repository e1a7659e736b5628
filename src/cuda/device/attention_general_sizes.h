/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of attention_general, for the host's compiler and the device's. */
#ifndef NYB_ATTENTION_GENERAL_SIZES_H
#define NYB_ATTENTION_GENERAL_SIZES_H

enum {
  NYB_GENERAL_CHUNK_TOKENS = 256, /* attended on their own, then added: part of the result's bits */
  NYB_GENERAL_TILE_TOKENS = 64,   /* unpacked together: part of the result's bits */
  NYB_GENERAL_THREADS = 128,
  NYB_GENERAL_MAX_DIM = 1024,
  NYB_GENERAL_MAX_SLICE = 128 /* elements of a row that are unpacked together */
};

#if defined(__cplusplus) && defined(__CUDACC__)
#define NYB_SIZE_FUNCTION static __host__ __device__ constexpr
#elif defined(__cplusplus)
#define NYB_SIZE_FUNCTION static constexpr
#else
#define NYB_SIZE_FUNCTION static inline
#endif

/* A row is cut into as few slices as may be, all of one width, a multiple of 8. */
NYB_SIZE_FUNCTION int nyb_general_slices(int dim) {
  return (dim + NYB_GENERAL_MAX_SLICE - 1) / NYB_GENERAL_MAX_SLICE;
}
NYB_SIZE_FUNCTION int nyb_general_slice_width(int dim) {
  return ((dim + nyb_general_slices(dim) - 1) / nyb_general_slices(dim) + 7) / 8 * 8;
}

/* Quads (of floats) from token to token of the tile that K and V share: 4 modulo 8, so that two
 * neighbouring tokens lie in different halves of the banks. */
NYB_SIZE_FUNCTION int nyb_general_tile_pitch(int key_dim, int value_dim) {
  return ((nyb_general_slice_width(key_dim) > nyb_general_slice_width(value_dim)
               ? nyb_general_slice_width(key_dim)
               : nyb_general_slice_width(value_dim)) /
              4 +
          7) /
             8 * 8 +
         4;
}

/* Bytes of shared memory: the tile, the queries, scores, values (where there are several slices of
 * them; else they share the tile's memory) and what is kept of each row; where the call has
 * features, more of it; where tokens have places, those of two
 * tiles. */
NYB_SIZE_FUNCTION int nyb_general_shared_bytes(int key_dim, int value_dim, int rows, int featured,
                                               int placed) {
  return NYB_GENERAL_TILE_TOKENS * nyb_general_tile_pitch(key_dim, value_dim) * 16 +
         rows * nyb_general_slices(key_dim) * nyb_general_slice_width(key_dim) * 4 +
         rows * NYB_GENERAL_TILE_TOKENS * 4 +
         (nyb_general_slices(value_dim) == 1
              ? 0
              : rows * nyb_general_slices(value_dim) * nyb_general_slice_width(value_dim) * 4) +
         rows * (3 * 8 + 5 * 4) +
         (featured ? rows * (8 + 4 * 4 + 5 * 4) + 4 * NYB_GENERAL_THREADS / 32 * 4 : 0) +
         (placed ? 2 * NYB_GENERAL_TILE_TOKENS * 2 * 4 : 0);
}

#endif
