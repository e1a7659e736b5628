// SPDX-License-Identifier: Apache-2.0
// Fused attention for every format, head size up to 1,024, ratio, stride and alignment: a tile of K
// or V is unpacked into shared memory once for all query rows of the block, and summed in f32.
//
// A unit is one KV head of one sequence with a block of ROWS query rows (rows of all query heads
// that share the KV head, the query row counting first). Its tokens are cut into chunks, each of
// which starts from an empty state. Either a block takes one chunk of a unit and leaves its result
// for attention_general_merge (split), or it takes whole units and adds chunk to chunk as it goes.
// The operations on a row, and their order, are the same, so the choice is one of load balance; nor
// do they depend on ROWS.
//
// Parameters (-D): KEY_BITS, VALUE_BITS (0: plain), KEY_DTYPE, VALUE_DTYPE (of scales and biases, or
// of plain elements), KEY_ALIGNED, VALUE_ALIGNED (plain rows start at multiples of 16 bytes),
// KEY_DIM, VALUE_DIM, ROWS (1, 4, 8 or 16); FEATURED (rows see what top-left masks, windows, mask
// arrays and starts leave them, scores are capped, sloped and masked, and there are sinks; 0 or 1),
// PLACED (where tokens stand: 0 in rows that follow each other, 1 in pages or a ring, 2 in parts).
#include "attention_general.cuh"
#include "attention_places.cuh"
#include "attention_rows.cuh"

#if !defined(KEY_BITS) || !defined(VALUE_BITS) || !defined(KEY_DTYPE) || !defined(VALUE_DTYPE) || \
    !defined(KEY_ALIGNED) || !defined(VALUE_ALIGNED) || !defined(KEY_DIM) ||                      \
    !defined(VALUE_DIM) || !defined(ROWS) || !defined(FEATURED) || !defined(PLACED)
#error "a parameter of attention_general is missing"
#endif
#if PLACED == 2 && !FEATURED
#error "tiles that are cut where parts meet need FEATURED"
#endif

constexpr int THREADS = NYB_GENERAL_THREADS, WARPS = THREADS / 32;
constexpr int TILE = NYB_GENERAL_TILE_TOKENS, RUN = NYB_LANE_ELEMENTS;

// Both sides of a row are cut into slices of one width, which are unpacked one at a time. Of a slice
// in shared memory run u's first four elements stand at quad u, its last four at quad RUNS + u, so
// that neighbouring threads store to neighbouring quads. What lies beyond the row is 0.
template <int DIM>
struct Slices {
  static constexpr int COUNT = nyb_general_slices(DIM), WIDTH = nyb_general_slice_width(DIM), RUNS = WIDTH / RUN,
                       QUADS = 2 * RUNS;

  // The first of the four elements of a row at that quad of that slice.
  static __device__ __forceinline__ int element_of(int slice, int quad) {
    return slice * WIDTH + (quad < RUNS ? quad * RUN : (quad - RUNS) * RUN + 4);
  }

  // Where an element of a row stands, in floats, slice after slice.
  static __device__ __forceinline__ int column_of(int element) {
    const int slice = element / WIDTH, i = element % WIDTH;
    return slice * WIDTH + (i % RUN / 4 * RUNS + i / RUN) * 4 + i % 4;
  }
};

using KeySlices = Slices<KEY_DIM>;
using ValueSlices = Slices<VALUE_DIM>;

constexpr int TILE_PITCH = nyb_general_tile_pitch(KEY_DIM, VALUE_DIM); // quads
constexpr int QUERY_PITCH = KeySlices::COUNT * KeySlices::QUADS;

// Threads that stand for the columns of a slice; where they are few, several groups of threads take
// every so many quads of tokens each.
constexpr int COLUMN_THREADS = ValueSlices::WIDTH <= 32   ? 32
                               : ValueSlices::WIDTH <= 64 ? 64
                                                          : THREADS;
constexpr int TOKEN_GROUPS = THREADS / COLUMN_THREADS;

// A row's values of one chunk: in registers while there is one slice, else in shared memory. At the
// chunk's end all stand there: [group][row][column].
constexpr bool SUMS_IN_REGISTERS = ValueSlices::COUNT == 1;
constexpr int OUTPUT_PITCH = SUMS_IN_REGISTERS ? COLUMN_THREADS
                                               : ValueSlices::COUNT * ValueSlices::WIDTH;

constexpr int WARP_ROWS = (ROWS + WARPS - 1) / WARPS;

constexpr bool IN_PARTS = PLACED == 2;

struct Quad {
  float x, y, z, w;
} __attribute__((aligned(16)));

struct Shared {
  Quad *tile, *query;
  float *outputs;
  float (*scores)[TILE]; // then the weights
  float *rescale;
  float *keep, *add; // of the chunk that has ended
  float *sum;        // of all chunks until now
  int *visible;
  int64_t *query_offset, *out_offset, *lse_offset; // in bytes

  // FEATURED: what rows see beside `visible`.
  int64_t *mask_offset;
  int *keep_end, *begin, *position;
  float *finish; // what values are multiplied by at the end; 0 or more
  float *slope;

  // What is found out about a tile while values of the one before are summed: so there are two.
  uint32_t *seen;         // FEATURED: [2][ROWS][2], bits of the tokens that a row sees
  uint32_t *seen_by_some; // FEATURED: [2][WARPS], not 0 where some row of the warp's sees a token,
  uint32_t *seen_by_all;  // and ~0 where all of them see all
  int *block, *slot;      // PLACED: [2][TILE]
};

__device__ __forceinline__ Shared shared_at(char *memory) {
  Shared shared;
  shared.tile = reinterpret_cast<Quad *>(memory);
  shared.query = shared.tile + TILE * TILE_PITCH;
  float *floats = reinterpret_cast<float *>(shared.query + ROWS * QUERY_PITCH);
  shared.scores = reinterpret_cast<float(*)[TILE]>(floats);
  floats += ROWS * TILE;
  shared.outputs = SUMS_IN_REGISTERS ? reinterpret_cast<float *>(memory) : floats;
  floats += SUMS_IN_REGISTERS ? 0 : ROWS * OUTPUT_PITCH;
  shared.query_offset = reinterpret_cast<int64_t *>(floats);
  shared.out_offset = shared.query_offset + ROWS;
  shared.lse_offset = shared.out_offset + ROWS;
  shared.mask_offset = shared.lse_offset + ROWS;
  shared.rescale = reinterpret_cast<float *>(shared.mask_offset + (FEATURED ? ROWS : 0));
  shared.keep = shared.rescale + ROWS;
  shared.add = shared.keep + ROWS;
  shared.sum = shared.add + ROWS;
  shared.visible = reinterpret_cast<int *>(shared.sum + ROWS);
  int *words = shared.visible + ROWS;
  if constexpr (FEATURED) {
    shared.keep_end = words;
    shared.begin = shared.keep_end + ROWS;
    shared.position = shared.begin + ROWS;
    shared.finish = reinterpret_cast<float *>(shared.position + ROWS);
    shared.slope = shared.finish + ROWS;
    shared.seen = reinterpret_cast<uint32_t *>(shared.slope + ROWS);
    shared.seen_by_some = shared.seen + 2 * ROWS * 2;
    shared.seen_by_all = shared.seen_by_some + 2 * WARPS;
    words = reinterpret_cast<int *>(shared.seen_by_all + 2 * WARPS);
  }
  shared.block = words;
  shared.slot = shared.block + 2 * TILE;
  return shared;
}

__device__ __forceinline__ float minus_infinity() { return -nyb_float_of(0x7f800000u); }

__device__ __forceinline__ float dot(Quad q, Quad k, float sum) {
  sum = fmaf(q.x, k.x, sum);
  sum = fmaf(q.y, k.y, sum);
  sum = fmaf(q.z, k.z, sum);
  return fmaf(q.w, k.w, sum);
}

// ---- Units ----------------------------------------------------------------------------------------

struct Unit {
  int64_t batch, kv_head, first_row, length;
  int64_t first_partial_row; // its first row among all rows of the call, KV head by KV head
  int rows;
  int visible; // tokens that the last row sees: no row sees more

  nyb_sequence sequence; // FEATURED
  nyb_chunk_list chunks; // FEATURED

  int last_begin; // IN_PARTS
};

__device__ __forceinline__ int64_t blocks_of_rows(const nyb_attention_arguments &a) {
  return (a.heads_per_kv * a.query_len + ROWS - 1) / ROWS;
}

// Units of the last rows come first: under a causal mask they are the longest.
__device__ Unit unit_at(const nyb_attention_arguments &a, int64_t index) {
  const int64_t blocks = blocks_of_rows(a), heads = a.batch * a.kv_heads;
  const int64_t all_rows = a.heads_per_kv * a.query_len, head = index % heads;
  Unit unit;
  unit.first_row = (blocks - 1 - index / heads) * ROWS;
  unit.kv_head = head % a.kv_heads;
  unit.batch = head / a.kv_heads;
  unit.first_partial_row = head * all_rows + unit.first_row;
  unit.rows = static_cast<int>(all_rows - unit.first_row < ROWS ? all_rows - unit.first_row : ROWS);
  const int64_t last_query_row = (unit.first_row + unit.rows - 1) / a.heads_per_kv;
  if constexpr (FEATURED) {
    unit.sequence = nyb_sequence_of(&a, unit.batch);
    unit.length = unit.sequence.tokens;
    const nyb_row_sight sight_of_last = nyb_row_sight_of(&a, &unit.sequence, last_query_row);
    const nyb_row_sight sight_of_first =
        nyb_row_sight_of(&a, &unit.sequence, unit.first_row / a.heads_per_kv);
    unit.visible = sight_of_last.end;
    unit.chunks = nyb_chunk_list_of(&sight_of_first, &sight_of_last);
  } else {
    unit.length = nyb_length_of(&a, unit.batch);
    unit.visible = static_cast<int>(nyb_visible_to(&a, unit.length, last_query_row));
  }
  if constexpr (IN_PARTS) unit.last_begin = nyb_last_begin_of(&a, unit.batch, unit.length);
  return unit;
}

// The chunks that the unit reads.
__device__ __forceinline__ int chunk_count(const Unit &unit) {
  if constexpr (FEATURED) return unit.chunks.count;
  return static_cast<int>((static_cast<int64_t>(unit.visible) + NYB_GENERAL_CHUNK_TOKENS - 1) /
                          NYB_GENERAL_CHUNK_TOKENS);
}

__device__ __forceinline__ int chunk_at(const Unit &unit, int index) {
  if constexpr (FEATURED) return nyb_chunk_at(&unit.chunks, index);
  return index;
}

// Where the unit's rows lie, and what each sees.
__device__ __forceinline__ void place_rows(const nyb_attention_arguments &a, const Unit &unit,
                                           const Shared &shared) {
  const int row = threadIdx.x;
  if (row >= ROWS) return;
  shared.visible[row] = 0;
  if (row >= unit.rows) return;
  const int64_t query_row = (unit.first_row + row) / a.heads_per_kv;
  const int64_t head =
      unit.kv_head * a.heads_per_kv + (unit.first_row + row) % a.heads_per_kv;
  if constexpr (FEATURED) {
    const nyb_row_sight sight = nyb_row_sight_of(&a, &unit.sequence, query_row);
    shared.visible[row] = sight.end;
    shared.keep_end[row] = sight.keep_end;
    shared.begin[row] = sight.begin;
    shared.position[row] = static_cast<int>(nyb_position_of(&a, &unit.sequence, query_row));
    shared.slope[row] = a.slopes != nullptr ? a.slopes[head] : 0.0f;
    shared.mask_offset[row] = nyb_mask_offset(&a, &unit.sequence, unit.batch, head, query_row);
  } else {
    shared.visible[row] = static_cast<int>(nyb_visible_to(&a, unit.length, query_row));
  }
  shared.query_offset[row] =
      unit.batch * a.q_stride[0] + head * a.q_stride[1] + query_row * a.q_stride[2];
  shared.out_offset[row] =
      unit.batch * a.out_stride[0] + head * a.out_stride[1] + query_row * a.out_stride[2];
  shared.lse_offset[row] =
      unit.batch * a.lse_stride[0] + head * a.lse_stride[1] + query_row * a.lse_stride[2];
}

// Over affine keys an infinity becomes NaN, as their scales' and biases' do.
__device__ __forceinline__ float query_element(const nyb_attention_arguments &a, const char *row,
                                               int d) {
  const float q = nyb_query_element(&a, row, d);
  return KEY_BITS == 0 ? q : fmaf(q, 0.0f, q);
}

// Queries in the order of the tile's quads; rows that the unit has not are 0.
__device__ __forceinline__ void load_queries(const nyb_attention_arguments &a, const Unit &unit,
                                             const Shared &shared) {
#pragma unroll 1
  for (int index = threadIdx.x; index < ROWS * QUERY_PITCH; index += THREADS) {
    const int row = index / QUERY_PITCH, quad = index % QUERY_PITCH;
    const int first = KeySlices::element_of(quad / KeySlices::QUADS, quad % KeySlices::QUADS);
    Quad values = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < unit.rows) {
      const char *q = a.q + shared.query_offset[row];
      if (first < KEY_DIM) values.x = query_element(a, q, first);
      if (first + 1 < KEY_DIM) values.y = query_element(a, q, first + 1);
      if (first + 2 < KEY_DIM) values.z = query_element(a, q, first + 2);
      if (first + 3 < KEY_DIM) values.w = query_element(a, q, first + 3);
    }
    shared.query[index] = values;
  }
}

// ---- Unpacking ------------------------------------------------------------------------------------

// The rows of one sequence and KV head; PLACED: of all blocks of rows.
struct Source {
  const char *codes, *scales, *biases;
  int64_t codes_stride, scales_stride, biases_stride;
  int group_shift;
  int64_t codes_block, scales_block, biases_block; // PLACED: from block to block
  int bits, dtype;                                 // AnyRows
};

__device__ __forceinline__ Source source_of(const nyb_attention_rows &rows, const Unit &unit) {
  const int64_t batch = PLACED ? 0 : unit.batch;
  Source source;
  source.codes = rows.codes + batch * rows.codes_stride[0] + unit.kv_head * rows.codes_stride[1];
  source.scales =
      rows.scales + batch * rows.scales_stride[0] + unit.kv_head * rows.scales_stride[1];
  source.biases =
      rows.biases + batch * rows.biases_stride[0] + unit.kv_head * rows.biases_stride[1];
  source.codes_stride = rows.codes_stride[2];
  source.scales_stride = rows.scales_stride[2];
  source.biases_stride = rows.biases_stride[2];
  source.group_shift = rows.group_size == 32 ? 5 : rows.group_size == 64 ? 6 : 7;
  if constexpr (FEATURED && !PLACED) {
    source.codes += unit.sequence.start * source.codes_stride;
    source.scales += unit.sequence.start * source.scales_stride;
    source.biases += unit.sequence.start * source.biases_stride;
  }
  if constexpr (PLACED) {
    source.codes_block = rows.codes_stride[0];
    source.scales_block = rows.scales_stride[0];
    source.biases_block = rows.biases_stride[0];
    source.bits = rows.bits;
    source.dtype = rows.dtype;
  }
  return source;
}

// One stored row.
struct StoredRow {
  const char *codes, *scales, *biases;
};

// Tokens that are attended together, of one part; none behind a chunk's end.
struct Tile {
  int first, tokens, part;
};

__device__ __forceinline__ StoredRow row_in(const Source &source, int64_t block, int64_t slot) {
  StoredRow row = {source.codes + slot * source.codes_stride,
                   source.scales + slot * source.scales_stride,
                   source.biases + slot * source.biases_stride};
  if constexpr (PLACED) {
    row.codes += block * source.codes_block;
    row.scales += block * source.scales_block;
    row.biases += block * source.biases_block;
  }
  return row;
}

__device__ __forceinline__ StoredRow row_at(const Source &source, const Shared &shared, int turn,
                                            const Tile &tile, int token) {
  if constexpr (!PLACED) return row_in(source, 0, tile.first + token);
  return row_in(source, shared.block[turn * TILE + token], shared.slot[turn * TILE + token]);
}

// Whether the tile is whole and its rows follow each other in memory: its ends are as far apart as
// they can be.
__device__ __forceinline__ bool is_together(const Shared &shared, int turn, const Tile &tile) {
  if (tile.tokens < TILE) return false;
  if constexpr (!PLACED) return true;
  const int first = turn * TILE, last = first + TILE - 1;
  return shared.block[first] == shared.block[last] &&
         shared.slot[last] - shared.slot[first] == TILE - 1;
}

__device__ __forceinline__ int64_t bytes_of(int dtype) { return dtype == NYB_DEVICE_F32 ? 4 : 2; }

__device__ __forceinline__ StoredRow row_from(const Source &source, const StoredRow &row, int bits,
                                              int dtype, int first) {
  if (bits == 0) return {row.codes + first * bytes_of(dtype), row.scales, row.biases};
  const int64_t group = first >> source.group_shift;
  return {row.codes + nyb_code_offset(bits, first), row.scales + group * bytes_of(dtype),
          row.biases + group * bytes_of(dtype)};
}

__device__ __forceinline__ nyb_run zero_run() {
  nyb_run run;
#pragma unroll
  for (int i = 0; i < RUN; i++) run.words[i] = 0;
  run.scale = run.bias = 0;
  return run;
}

// Not finite, either makes the whole run NaN: infinities might add up to a score of -inf.
__device__ __forceinline__ float bias_beside(float scale, float bias) {
  return NYB_ADD(bias, fmaf(scale, 0.0f, NYB_MULTIPLY(bias, 0.0f)));
}

template <int BITS, int DTYPE, bool ALIGNED, int DIM>
struct Format {
  // Runs whose loads are under way together: one by one, and of rows that follow each other.
  static constexpr int AT_ONCE = 4, AT_ONCE_TOGETHER = BITS != 0 && ROWS <= 8 ? 8 : 4;

  // The row from element `first` on, of which a run is to be loaded.
  static __device__ __forceinline__ StoredRow from(const Source &source, const StoredRow &row,
                                                   int first) {
    return row_from(source, row, BITS, DTYPE, first);
  }

  static __device__ __forceinline__ nyb_run load(const Source &, const StoredRow &row, int first) {
    nyb_run run = zero_run();
    if constexpr (BITS == 0) {
      if constexpr (ALIGNED && DIM % RUN == 0) {
        nyb_load_plain_aligned(&run, row.codes, DTYPE, 0);
      } else {
        nyb_load_plain(&run, row.codes, DTYPE, 0, DIM % RUN == 0 ? RUN : DIM - first);
      }
    } else {
      nyb_load_codes_at(&run, row.codes, BITS, nyb_code_shift(BITS, first));
      run.scale = nyb_load_bits(row.scales, DTYPE, 0);
      run.bias = nyb_load_bits(row.biases, DTYPE, 0);
    }
    return run;
  }

  static __device__ __forceinline__ float element(const nyb_run &run, float scale, float bias,
                                                  int i) {
    if constexpr (BITS == 0) return nyb_plain_of(&run, DTYPE, i);
    return fmaf(nyb_code_number(&run, BITS, i), scale, bias);
  }

  static __device__ __forceinline__ void store(const Source &, const nyb_run &run, Quad *to,
                                               int runs) {
    const float scale = BITS == 0 ? 0 : nyb_widen(DTYPE, run.scale);
    const float bias = bias_beside(scale, BITS == 0 ? 0 : nyb_widen(DTYPE, run.bias));
    to[0] = {element(run, scale, bias, 0), element(run, scale, bias, 1),
             element(run, scale, bias, 2), element(run, scale, bias, 3)};
    to[runs] = {element(run, scale, bias, 4), element(run, scale, bias, 5),
                element(run, scale, bias, 6), element(run, scale, bias, 7)};
  }
};

using Keys = Format<KEY_BITS, KEY_DTYPE, KEY_ALIGNED, KEY_DIM>;
using Values = Format<VALUE_BITS, VALUE_DTYPE, VALUE_ALIGNED, VALUE_DIM>;

// The first and the last part's rows, whose format is known at run time; the same numbers come of
// the same rows.
template <int DIM>
struct AnyRows {
  static constexpr int AT_ONCE = 1, AT_ONCE_TOGETHER = 1;

  static __device__ __forceinline__ StoredRow from(const Source &source, const StoredRow &row,
                                                   int first) {
    return row_from(source, row, source.bits, source.dtype, first);
  }

  static __device__ __forceinline__ nyb_run load(const Source &source, const StoredRow &row,
                                                 int first) {
    nyb_run run = zero_run();
    if (source.bits == 0) {
      nyb_load_plain(&run, row.codes, source.dtype, 0, DIM % RUN == 0 ? RUN : DIM - first);
      return run;
    }
    nyb_load_codes_at(&run, row.codes, source.bits, nyb_code_shift(source.bits, first));
    run.scale = nyb_load_bits(row.scales, source.dtype, 0);
    run.bias = nyb_load_bits(row.biases, source.dtype, 0);
    return run;
  }

  static __device__ __forceinline__ float element(const Source &source, const nyb_run &run,
                                                  float scale, float bias, int i) {
    if (source.bits == 0) return nyb_plain_of(&run, source.dtype, i);
    return fmaf(nyb_code_number(&run, source.bits, i), scale, bias);
  }

  static __device__ __forceinline__ void store(const Source &source, const nyb_run &run, Quad *to,
                                               int runs) {
    const float scale = source.bits == 0 ? 0 : nyb_widen(source.dtype, run.scale);
    const float bias =
        bias_beside(scale, source.bits == 0 ? 0 : nyb_widen(source.dtype, run.bias));
    to[0] = {element(source, run, scale, bias, 0), element(source, run, scale, bias, 1),
             element(source, run, scale, bias, 2), element(source, run, scale, bias, 3)};
    to[runs] = {element(source, run, scale, bias, 4), element(source, run, scale, bias, 5),
                element(source, run, scale, bias, 6), element(source, run, scale, bias, 7)};
  }
};

// Unpacks a slice of the tile's rows, and 0 for what is missing of TILE tokens.
template <class Rows, int DIM>
__device__ __forceinline__ void unpack(const Shared &shared, const Source &source, int slice,
                                       const Tile &tile, int turn) {
  Quad *quads = shared.tile;
  constexpr int RUNS = Slices<DIM>::RUNS, STEPS = (TILE * RUNS + THREADS - 1) / THREADS;
  constexpr int AT_ONCE = STEPS < Rows::AT_ONCE ? STEPS : Rows::AT_ONCE;
  const int first = slice * Slices<DIM>::WIDTH;
#pragma unroll 1
  for (int step = 0; step < STEPS; step += AT_ONCE) {
    nyb_run runs[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int index = (step + i) * THREADS + static_cast<int>(threadIdx.x);
      const int token = index / RUNS, element = first + index % RUNS * RUN;
      runs[i] = zero_run();
      if (token < tile.tokens && (DIM % Slices<DIM>::WIDTH == 0 || element < DIM)) {
        const StoredRow row = row_at(source, shared, turn, tile, token);
        runs[i] = Rows::load(source, Rows::from(source, row, element), element);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int index = (step + i) * THREADS + static_cast<int>(threadIdx.x);
      const int token = index / RUNS;
      if (token < TILE) Rows::store(source, runs[i], quads + token * TILE_PITCH + index % RUNS, RUNS);
    }
  }
}

// The same of a whole tile of rows that follow each other, where each thread keeps to one run of
// every so many rows and nothing is asked but the loads.
template <class Rows, int DIM>
__device__ __forceinline__ void unpack_together(const Shared &shared, const Source &source,
                                                int slice, const Tile &tile, int turn) {
  constexpr int RUNS = Slices<DIM>::RUNS, TOKENS = THREADS / RUNS, STEPS = TILE / TOKENS;
  constexpr int AT_ONCE = STEPS < Rows::AT_ONCE_TOGETHER ? STEPS : Rows::AT_ONCE_TOGETHER;
  static_assert(STEPS % AT_ONCE == 0, "steps are taken so many at once");
  const int run = threadIdx.x % RUNS, element = slice * Slices<DIM>::WIDTH + run * RUN;
  const bool exists = DIM % Slices<DIM>::WIDTH == 0 || element < DIM;
  const int token = threadIdx.x / RUNS;
  Quad *quads = shared.tile + token * TILE_PITCH + run;
  StoredRow row = row_at(source, shared, turn, tile, 0);
  row.codes += token * source.codes_stride;
  row.scales += token * source.scales_stride;
  row.biases += token * source.biases_stride;
  row = Rows::from(source, row, element);
#pragma unroll 1
  for (int step = 0; step < STEPS; step += AT_ONCE) {
    nyb_run runs[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      runs[i] = exists ? Rows::load(source, row, element) : zero_run();
      row.codes += TOKENS * source.codes_stride;
      row.scales += TOKENS * source.scales_stride;
      row.biases += TOKENS * source.biases_stride;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      Rows::store(source, runs[i], quads, RUNS);
      quads += TOKENS * TILE_PITCH;
    }
  }
}

// Of K or of V, in whichever part the tile stands.
template <class Rows, int DIM>
__device__ __forceinline__ void unpack_part(const Shared &shared, const Unit &unit,
                                            const Source &middle, const nyb_attention_rows &first,
                                            const nyb_attention_rows &last, int slice,
                                            const Tile &tile, int turn) {
  constexpr int RUNS = Slices<DIM>::RUNS;
  if (!IN_PARTS || tile.part == NYB_DEVICE_PART_MIDDLE) {
    if constexpr (THREADS % RUNS == 0 && TILE * RUNS >= THREADS) {
      if (is_together(shared, turn, tile)) {
        unpack_together<Rows, DIM>(shared, middle, slice, tile, turn);
        return;
      }
    }
    unpack<Rows, DIM>(shared, middle, slice, tile, turn);
  } else if constexpr (IN_PARTS) {
    const Source source = source_of(tile.part == NYB_DEVICE_PART_FIRST ? first : last, unit);
    unpack<AnyRows<DIM>, DIM>(shared, source, slice, tile, turn);
  }
}

// ---- Looking at a tile ----------------------------------------------------------------------------

// Where the first tile begins of which a row may see a token: `first`, or whole tiles later.
__device__ __forceinline__ int tile_from(const Unit &unit, const Shared &shared, int first) {
  if constexpr (!FEATURED) return first;
  const int keep_end = shared.keep_end[unit.rows - 1], begin = shared.begin[0];
  if (first < keep_end || first >= begin) return first;
  return first + (begin - first) / TILE * TILE;
}

// The first tile from `first` on, before `end`.
__device__ __forceinline__ Tile tile_at(const nyb_attention_arguments &a, const Unit &unit,
                                        const Shared &shared, int first, int end) {
  Tile tile = {first, 0, NYB_DEVICE_PART_MIDDLE};
  while (tile.first < end) {
    int part_end = end;
    if constexpr (IN_PARTS) { // tiles are cut where parts meet
      const int behind = nyb_part_end_of(&a, unit.last_begin, tile.first);
      part_end = behind < end ? behind : end;
      tile.part = tile.first >= unit.last_begin ? NYB_DEVICE_PART_LAST
                  : tile.first < a.first_tokens ? NYB_DEVICE_PART_FIRST
                                                : NYB_DEVICE_PART_MIDDLE;
    }
    tile.first = tile_from(unit, shared, tile.first);
    if (tile.first < part_end) {
      tile.tokens = part_end - tile.first < TILE ? part_end - tile.first : TILE;
      break;
    }
    tile.first = part_end;
  }
  return tile;
}

// Finds where the tile's tokens stand.
__device__ __forceinline__ void place_tokens(const nyb_attention_arguments &a, const Unit &unit,
                                             const Shared &shared, const Tile &tile, int turn) {
  const int token = threadIdx.x;
  if (token >= tile.tokens) return;
  const nyb_token_place place = nyb_token_place_of(&a, unit.batch, IN_PARTS ? unit.last_begin : 0,
                                                   tile.first + token);
  shared.block[turn * TILE + token] = place.block;
  shared.slot[turn * TILE + token] = place.row;
}

__device__ __forceinline__ uint32_t *seen_of(const Shared &shared, int turn, int row) {
  return shared.seen + (turn * ROWS + row) * 2;
}

// What the mask's array says of the tokens of a tile that a thread looks at: `lane` and TILE / 2 +
// `lane`, for the rows that its warp takes.
struct Entries {
  nyb_mask_entry of[WARP_ROWS][2];
};

template <class Element>
__device__ __forceinline__ void load_entries_as(const nyb_attention_arguments &a, const Unit &unit,
                                                const Shared &shared, const Tile &tile,
                                                Entries &entries) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = unit.visible - 1;
  const int first = tile.first + lane, second = first + TILE / 2;
  uint32_t bits[WARP_ROWS][2];
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = warp + i * WARPS, rows = unit.rows;
    const Element *elements = reinterpret_cast<const Element *>(
        a.mask_array + shared.mask_offset[row < rows ? row : rows - 1]);
    bits[i][0] = elements[first < last ? first : last];
    bits[i][1] = elements[second < last ? second : last];
  }
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    entries.of[i][0] = nyb_mask_entry_of(&a, bits[i][0]);
    entries.of[i][1] = nyb_mask_entry_of(&a, bits[i][1]);
  }
}

// All loads are under way together. Rows and tokens that are not there are read as the last ones.
__device__ __forceinline__ void load_entries(const nyb_attention_arguments &a, const Unit &unit,
                                             const Shared &shared, const Tile &tile,
                                             Entries &entries) {
  if (a.mask_kind == NYB_DEVICE_ARRAY_BOOL) {
    load_entries_as<unsigned char>(a, unit, shared, tile, entries);
  } else if (a.mask_dtype == NYB_DEVICE_F32) {
    load_entries_as<uint32_t>(a, unit, shared, tile, entries);
  } else {
    load_entries_as<uint16_t>(a, unit, shared, tile, entries);
  }
}

// Leaves the rows' bits in shared memory; absent rows see nothing.
__device__ __forceinline__ void look_at(const nyb_attention_arguments &a, const Unit &unit,
                                        const Shared &shared, const Tile &tile, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Entries entries;
  if (a.mask_kind != 0) load_entries(a, unit, shared, tile, entries);
  uint32_t some = 0, all = ~0u;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = warp + i * WARPS;
    if (row >= ROWS) break;
    nyb_row_sight sight = {0, 0, 0};
    if (row < unit.rows) {
      sight = {shared.keep_end[row], shared.begin[row], shared.visible[row]};
    }
    bool sees[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = half * (TILE / 2) + lane;
      sees[half] = token < tile.tokens && nyb_sight_shows(&sight, tile.first + token);
      if (a.mask_kind != 0) sees[half] = sees[half] && entries.of[i][half].shows;
    }
    const uint32_t low = __ballot_sync(~0u, sees[0]), high = __ballot_sync(~0u, sees[1]);
    if (row < unit.rows) {
      some |= low | high;
      all &= low & high;
    }
    if (lane == 0) {
      seen_of(shared, turn, row)[0] = low;
      seen_of(shared, turn, row)[1] = high;
    }
  }
  if (lane == 0) {
    shared.seen_by_some[turn * WARPS + warp] = some;
    shared.seen_by_all[turn * WARPS + warp] = all;
  }
}

// What all rows together see of a tile.
struct Sight {
  bool some, all;
};

__device__ __forceinline__ Sight sight_of(const Shared &shared, int turn) {
  uint32_t some = 0, all = ~0u;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    some |= shared.seen_by_some[turn * WARPS + warp];
    all &= shared.seen_by_all[turn * WARPS + warp];
  }
  return {some != 0, all == ~0u};
}

// Whether all rows see all of a tile by position alone, so that nobody need look.
__device__ __forceinline__ bool is_plain(const nyb_attention_arguments &a, const Unit &unit,
                                         const Shared &shared, const Tile &tile) {
  const int end = tile.first + TILE;
  return a.mask_kind == 0 && tile.tokens == TILE && end <= shared.visible[0] &&
         (tile.first >= shared.begin[unit.rows - 1] || end <= a.window_keep_tokens);
}

// Finds out what must be known of a tile before it is read; whether it was looked at.
__device__ __forceinline__ bool prepare(const nyb_attention_arguments &a, const Unit &unit,
                                        const Shared &shared, const Tile &tile, int turn) {
  if (tile.tokens == 0) return false;
  if constexpr (PLACED) place_tokens(a, unit, shared, tile, turn);
  if (!FEATURED || is_plain(a, unit, shared, tile)) return false;
  look_at(a, unit, shared, tile, turn);
  return true;
}

// Section 2, step 3, of docs/numerics.md.
__device__ __forceinline__ float biased(const nyb_attention_arguments &a, const Shared &shared,
                                        int row, int token, float score) {
  float s = nyb_round_number(a.round_to, score);
  if (a.softcap != 0.0f) s = nyb_capped_score(&a, NYB_MULTIPLY(s, a.softcap_reciprocal));
  if (a.slopes != nullptr) {
    s = nyb_sloped_score(&a, s, shared.slope[row], shared.position[row], token);
  }
  if (a.mask_kind == NYB_DEVICE_ARRAY_ADD) { // read once more: it was not worth a register
    const char *array = a.mask_array + shared.mask_offset[row];
    s = nyb_masked_score(&a, s, nyb_mask_entry_at(&a, array, token).added);
  }
  return s;
}

// ---- Scores ---------------------------------------------------------------------------------------

// Four neighbouring threads share two tokens: each sums every fourth quad of elements, for all rows.
struct Sums {
  float of[2 * ROWS]; // row, token
};

__device__ __forceinline__ void add_scores(Sums &sums, const Shared &shared, int slice) {
  constexpr int AT_ONCE = ROWS > 4 ? 1 : 4;
  const Quad *keys = shared.tile + threadIdx.x / 4 * TILE_PITCH;
  const Quad *query = shared.query + slice * KeySlices::QUADS;
#pragma unroll AT_ONCE
  for (int quad = threadIdx.x % 4; quad < KeySlices::QUADS; quad += 4) {
    const Quad first = keys[quad], second = keys[TILE / 2 * TILE_PITCH + quad];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const Quad q = query[row * QUERY_PITCH + quad];
      sums.of[2 * row] = dot(q, first, sums.of[2 * row]);
      sums.of[2 * row + 1] = dot(q, second, sums.of[2 * row + 1]);
    }
  }
}

// (0 + 1) + (2 + 3) of the four threads' sums. With four sums at a time each thread ends with one.
__device__ __forceinline__ void store_scores(const Sums &sums, const Shared &shared) {
  const int lane = threadIdx.x % 4, token = threadIdx.x / 4;
  if constexpr (ROWS == 1) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = NYB_ADD(sums.of[i], __shfl_xor_sync(~0u, sums.of[i], 1));
      sum = NYB_ADD(sum, __shfl_xor_sync(~0u, sum, 2));
      if (lane == i) shared.scores[0][i * (TILE / 2) + token] = sum;
    }
  } else {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int row = 0; row < ROWS; row += 2) {
      const float *x = sums.of + 2 * row;
      const float low = NYB_ADD(odd ? x[1] : x[0], __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1));
      const float high = NYB_ADD(odd ? x[3] : x[2], __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1));
      const float sum = NYB_ADD(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, 2));
      shared.scores[row + lane / 2][odd * (TILE / 2) + token] = sum;
    }
  }
}

// ---- Softmax --------------------------------------------------------------------------------------

// Maximum and sum of the rows that the warp takes, row w, w + WARPS, ...; the same in every lane.
struct Statistics {
  float maximum[WARP_ROWS], sum[WARP_ROWS];
  bool seen[WARP_ROWS]; // FEATURED: whether the row saw a token, though it may weigh nothing
};

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    value = NYB_ADD(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

__device__ __forceinline__ float maximum_of_lanes(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

// A score of -inf weighs 0, and a NaN weighs NaN.
__device__ __forceinline__ float weight_of(float score, float maximum, bool visible) {
  return visible ? expf(NYB_SUBTRACT(score, maximum == minus_infinity() ? 0.0f : maximum)) : 0.0f;
}

__device__ __forceinline__ void softmax(const nyb_attention_arguments &a, Statistics &statistics,
                                        const Shared &shared, int first_token, int turn,
                                        bool looked) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = warp + i * WARPS;
    if (row >= ROWS) break;
    float *scores = shared.scores[row];
    bool sees_first, sees_second;
    float first, second;
    if constexpr (FEATURED) {
      uint32_t low = ~0u, high = ~0u;
      if (looked) {
        low = seen_of(shared, turn, row)[0];
        high = seen_of(shared, turn, row)[1];
      }
      const int token = first_token + lane;
      sees_first = low >> lane & 1;
      sees_second = high >> lane & 1;
      first = sees_first ? biased(a, shared, row, token, scores[lane]) : minus_infinity();
      second = sees_second ? biased(a, shared, row, token + TILE / 2, scores[lane + TILE / 2])
                           : minus_infinity();
      statistics.seen[i] = statistics.seen[i] || (low | high) != 0;
    } else {
      const int seen = shared.visible[row] - first_token;
      sees_first = lane < seen;
      sees_second = lane + TILE / 2 < seen;
      first = sees_first ? nyb_round_number(a.round_to, scores[lane]) : minus_infinity();
      second =
          sees_second ? nyb_round_number(a.round_to, scores[lane + TILE / 2]) : minus_infinity();
    }
    const float before = statistics.maximum[i];
    const float maximum = fmaxf(before, maximum_of_lanes(fmaxf(first, second)));
    const float rescale = nyb_fold_weight(before, maximum);
    const float p = weight_of(first, maximum, sees_first);
    const float r = weight_of(second, maximum, sees_second);
    scores[lane] = p;
    scores[lane + TILE / 2] = r;
    statistics.maximum[i] = maximum;
    statistics.sum[i] = fmaf(statistics.sum[i], rescale, sum_of_lanes(NYB_ADD(p, r)));
    if (lane == 0) shared.rescale[row] = rescale;
  }
}

// ---- Values ---------------------------------------------------------------------------------------

// One quad of tokens, of which the row sees those whose bits are set, or the first `seen`.
__device__ __forceinline__ float add_seen_bits(float sum, Quad p, const float (&v)[4],
                                               uint32_t bits) {
  sum = bits & 1 ? fmaf(p.x, v[0], sum) : sum;
  sum = bits & 2 ? fmaf(p.y, v[1], sum) : sum;
  sum = bits & 4 ? fmaf(p.z, v[2], sum) : sum;
  return bits & 8 ? fmaf(p.w, v[3], sum) : sum;
}

__device__ __forceinline__ float add_seen(float sum, Quad p, const float (&v)[4], int seen) {
  sum = seen > 0 ? fmaf(p.x, v[0], sum) : sum;
  sum = seen > 1 ? fmaf(p.y, v[1], sum) : sum;
  sum = seen > 2 ? fmaf(p.z, v[2], sum) : sum;
  return seen > 3 ? fmaf(p.w, v[3], sum) : sum;
}

// Tokens in ascending order. MASKED: some row sees less than the whole tile; what it does not see is
// not even multiplied by 0, since it may be no number.
template <bool MASKED>
__device__ __forceinline__ void add_values(float (&sums)[ROWS], const Shared &shared,
                                           int first_token, int turn) {
  const int column = threadIdx.x % COLUMN_THREADS, group = threadIdx.x / COLUMN_THREADS;
  const float *values = reinterpret_cast<const float *>(shared.tile) + column;
  constexpr int AT_ONCE = MASKED || ROWS > 4 ? 1 : 4;
#pragma unroll AT_ONCE
  for (int token = 4 * group; token < TILE; token += 4 * TOKEN_GROUPS) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = values[(token + i) * TILE_PITCH * 4];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const Quad p = *reinterpret_cast<const Quad *>(&shared.scores[row][token]);
      if constexpr (MASKED && FEATURED) {
        const uint32_t word = seen_of(shared, turn, row)[token / 32];
        sums[row] = add_seen_bits(sums[row], p, v, word >> token % 32);
      } else {
        const int seen = MASKED ? shared.visible[row] - first_token - token : 4;
        sums[row] = add_seen(sums[row], p, v, seen);
      }
    }
  }
}

__device__ __forceinline__ void add_slice(float (&sums)[ROWS], const Shared &shared,
                                          int first_token, int turn, const Sight &sight) {
#pragma unroll
  for (int row = 0; row < ROWS; row++) sums[row] = NYB_MULTIPLY(sums[row], shared.rescale[row]);
  if (threadIdx.x % COLUMN_THREADS >= ValueSlices::WIDTH) return;
  // Without features the first row sees least.
  if (FEATURED ? !sight.all : shared.visible[0] < first_token + TILE) {
    add_values<true>(sums, shared, first_token, turn);
  } else {
    add_values<false>(sums, shared, first_token, turn);
  }
}

// ---- One chunk of one unit ------------------------------------------------------------------------

// Where a thread's sums for a slice stand in shared.outputs, those of the rows a pitch apart.
__device__ __forceinline__ float *outputs_of(const Shared &shared, int slice) {
  const int column = threadIdx.x % COLUMN_THREADS, group = threadIdx.x / COLUMN_THREADS;
  return shared.outputs + group * ROWS * OUTPUT_PITCH + slice * ValueSlices::WIDTH + column;
}

__device__ __forceinline__ void load_sums(float (&sums)[ROWS], const Shared &shared, int slice) {
  if (threadIdx.x % COLUMN_THREADS >= ValueSlices::WIDTH) return;
#pragma unroll
  for (int row = 0; row < ROWS; row++) sums[row] = outputs_of(shared, slice)[row * OUTPUT_PITCH];
}

__device__ __forceinline__ void store_sums(const float (&sums)[ROWS], const Shared &shared,
                                           int slice) {
  if (threadIdx.x % COLUMN_THREADS >= ValueSlices::WIDTH) return;
#pragma unroll
  for (int row = 0; row < ROWS; row++) outputs_of(shared, slice)[row * OUTPUT_PITCH] = sums[row];
}

// Leaves the sums in shared.outputs.
__device__ __forceinline__ void attend_chunk(const nyb_attention_arguments &a, const Unit &unit,
                                             int begin, const Shared &shared,
                                             Statistics &statistics) {
  const int end = unit.visible - begin < NYB_GENERAL_CHUNK_TOKENS ? unit.visible
                                                                  : begin + NYB_GENERAL_CHUNK_TOKENS;
  float sums[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) sums[row] = 0.0f;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    statistics.maximum[i] = minus_infinity();
    statistics.sum[i] = 0.0f;
    statistics.seen[i] = false;
  }
  if (!SUMS_IN_REGISTERS) {
    __syncthreads(); // the chunk before has been read
    for (int slice = 0; slice < ValueSlices::COUNT; slice++) store_sums(sums, shared, slice);
  }
  const Source keys = source_of(a.k, unit), values = source_of(a.v, unit);
  // The tile whose weights stand in shared.scores, none at first. While its values are summed the
  // next one is prepared.
  Tile tile = {begin, 0, NYB_DEVICE_PART_MIDDLE};
  Sight sight = {false, false};
  int turn = 0;
#pragma unroll 1
  while (true) {
    const Tile next = tile_at(a, unit, shared, tile.first + tile.tokens, end);
    const bool looked = prepare(a, unit, shared, next, turn ^ 1);
    if (sight.some) {
#pragma unroll 1
      for (int slice = 0; slice < ValueSlices::COUNT; slice++) {
        if (slice > 0) __syncthreads();
        unpack_part<Values, VALUE_DIM>(shared, unit, values, a.first_v, a.last_v, slice, tile, turn);
        __syncthreads();
        if (!SUMS_IN_REGISTERS) load_sums(sums, shared, slice);
        add_slice(sums, shared, tile.first, turn, sight);
        if (!SUMS_IN_REGISTERS) store_sums(sums, shared, slice);
      }
    }
    if (next.tokens == 0) break;
    tile = next;
    turn ^= 1;
    // Queries are there, and what was found out about the tile; what stood in it has been read.
    __syncthreads();
    sight = looked ? sight_of(shared, turn) : Sight{true, true};
    if (FEATURED && !sight.some) continue;
    Sums scores;
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i++) scores.of[i] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < KeySlices::COUNT; slice++) {
      if (slice > 0) __syncthreads();
      unpack_part<Keys, KEY_DIM>(shared, unit, keys, a.first_k, a.last_k, slice, tile, turn);
      __syncthreads();
      add_scores(scores, shared, slice);
    }
    store_scores(scores, shared);
    __syncthreads();
    softmax(a, statistics, shared, tile.first, turn, looked);
  }
  if (SUMS_IN_REGISTERS) {
    __syncthreads();
    store_sums(sums, shared, 0);
  }
}

// Of a row of the chunk; the groups' sums in the order of the groups.
__device__ __forceinline__ float output_of(const Shared &shared, int row, int element) {
  const float *outputs = shared.outputs + row * OUTPUT_PITCH + ValueSlices::column_of(element);
  float sum = outputs[0];
#pragma unroll
  for (int group = 1; group < TOKEN_GROUPS; group++)
    sum = NYB_ADD(sum, outputs[group * ROWS * OUTPUT_PITCH]);
  return sum;
}

// ---- Results --------------------------------------------------------------------------------------

// A chunk's result to where the merge kernel finds it; index_of_chunk is its place among the unit's.
__device__ __forceinline__ void leave_chunk(const nyb_attention_arguments &a, const Unit &unit,
                                            int64_t index_of_chunk, const Shared &shared,
                                            const Statistics &statistics) {
  __syncthreads();
#pragma unroll 1
  for (int index = threadIdx.x; index < unit.rows * VALUE_DIM; index += THREADS) {
    const int row = index / VALUE_DIM, element = index % VALUE_DIM;
    a.memory[((unit.first_partial_row + row) * a.chunks + index_of_chunk) * VALUE_DIM + element] =
        output_of(shared, row, element);
  }
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = static_cast<int>(threadIdx.x) / 32 + i * WARPS;
    if (row < unit.rows && threadIdx.x % 32 == 0) {
      float *to = a.statistics + ((unit.first_partial_row + row) * a.chunks + index_of_chunk) * 2;
      to[0] = statistics.maximum[i];
      to[1] = !FEATURED || statistics.seen[i] ? statistics.sum[i] : NYB_UNSEEN_SUM;
    }
  }
}

// Adds a chunk to what all before it have come to: the values in the block's slot of memory, maxima
// and sums with the warps that take the rows.
__device__ __forceinline__ void fold_statistics(const Shared &shared, int begin, bool is_first,
                                                const Statistics &next, Statistics &folded) {
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = static_cast<int>(threadIdx.x) / 32 + i * WARPS;
    if (row >= ROWS) break;
    nyb_fold fold = {next.maximum[i], 0.0f, 1.0f};
    if (is_first) {
      folded.sum[i] = next.sum[i];
      folded.seen[i] = next.seen[i];
    } else if (FEATURED) {
      fold = nyb_fold_of_sides(folded.maximum[i], nyb_has_weight(folded.sum[i]), next.maximum[i],
                               nyb_has_weight(next.sum[i]));
      folded.sum[i] = nyb_fold_values(folded.sum[i], fold.keep, next.sum[i], fold.add);
      folded.seen[i] = folded.seen[i] || next.seen[i];
    } else if (begin >= shared.visible[row]) { // sees nothing of it
      fold = {folded.maximum[i], 1.0f, 0.0f};
    } else {
      fold = nyb_fold_of(folded.maximum[i], next.maximum[i]);
      folded.sum[i] = nyb_fold_values(folded.sum[i], fold.keep, next.sum[i], fold.add);
    }
    folded.maximum[i] = fold.maximum;
    if (threadIdx.x % 32 == 0) {
      shared.keep[row] = fold.keep;
      shared.add[row] = fold.add;
      shared.sum[row] = folded.sum[i];
    }
  }
}

// FEATURED, once all chunks are folded: adds the rows' sinks. A factor below 0 stands for a row that
// sees nothing.
__device__ __forceinline__ void finish_statistics(const nyb_attention_arguments &a,
                                                  const Unit &unit, const Shared &shared,
                                                  Statistics &folded) {
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = static_cast<int>(threadIdx.x) / 32 + i * WARPS;
    if (row >= unit.rows) break;
    const int64_t head = unit.kv_head * a.heads_per_kv + (unit.first_row + row) % a.heads_per_kv;
    const nyb_finish finish =
        nyb_finish_of(folded.maximum[i], folded.sum[i], folded.seen[i],
                      a.sinks != nullptr ? a.sinks + head : nullptr);
    folded.maximum[i] = finish.maximum;
    folded.sum[i] = finish.sum;
    folded.seen[i] = !finish.blind;
    if (threadIdx.x % 32 == 0) {
      shared.sum[row] = finish.sum;
      shared.finish[row] = finish.blind ? -1.0f : finish.keep;
    }
  }
}

__device__ __forceinline__ float finished(const Shared &shared, int row, float value) {
  if constexpr (FEATURED) {
    const float keep = shared.finish[row];
    return keep < 0.0f ? 0.0f : NYB_DIVIDE(NYB_MULTIPLY(value, keep), shared.sum[row]);
  }
  return shared.visible[row] == 0 ? 0.0f : NYB_DIVIDE(value, shared.sum[row]);
}

__device__ __forceinline__ void fold_values(const nyb_attention_arguments &a, const Unit &unit,
                                            const Shared &shared, int begin, bool is_first,
                                            bool last) {
  float *slot = a.memory + static_cast<int64_t>(blockIdx.x) * ROWS * VALUE_DIM;
#pragma unroll 1
  for (int index = threadIdx.x; index < unit.rows * VALUE_DIM; index += THREADS) {
    const int row = index / VALUE_DIM, element = index % VALUE_DIM;
    float value;
    if (is_first) {
      value = output_of(shared, row, element);
    } else if (FEATURED) {
      value = nyb_fold_values(slot[index], shared.keep[row], output_of(shared, row, element),
                             shared.add[row]);
    } else {
      value = slot[index];
      if (begin < shared.visible[row]) {
        value = nyb_fold_values(value, shared.keep[row], output_of(shared, row, element),
                                shared.add[row]);
      }
    }
    if (!last) {
      slot[index] = value;
    } else {
      nyb_store_element(a.out + shared.out_offset[row], a.out_dtype, element,
                        finished(shared, row, value));
    }
  }
}

__device__ __forceinline__ void store_lse(const nyb_attention_arguments &a, const Unit &unit,
                                          const Shared &shared, const Statistics &folded) {
  if (a.lse == nullptr || threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const int row = static_cast<int>(threadIdx.x) / 32 + i * WARPS;
    if (row >= unit.rows) break;
    const bool blind = FEATURED ? !folded.seen[i] : shared.visible[row] == 0;
    *reinterpret_cast<float *>(a.lse + shared.lse_offset[row]) =
        blind ? minus_infinity() : NYB_ADD(folded.maximum[i], logf(folded.sum[i]));
  }
}

// ---- The kernel -----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 16 ? 3 : 4)
    attention_general(const __grid_constant__ nyb_attention_arguments a) {
  extern __shared__ __attribute__((aligned(16))) char memory[];
  const Shared shared = shared_at(memory);
  const int64_t block = blockIdx.x;
  const int first = a.split ? static_cast<int>(block % a.split) : 0, step = a.split ? a.split : 1;
  const int64_t units = a.split ? block / a.split + 1 : a.batch * a.kv_heads * blocks_of_rows(a);
#pragma unroll 1
  for (int64_t index = a.split ? block / a.split : block; index < units; index += gridDim.x) {
    const Unit unit = unit_at(a, index);
    const int chunks = chunk_count(unit);
    if (a.split && first >= chunks) break;
    __syncthreads(); // the unit before has been finished
    place_rows(a, unit, shared);
    __syncthreads();
    load_queries(a, unit, shared);
    Statistics statistics, folded;
    // Of whole units, one that sees nothing goes through once, over no token.
    const int end = a.split || chunks > 0 ? chunks : 1;
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += step) {
      const int begin = chunk_at(unit, chunk) * NYB_GENERAL_CHUNK_TOKENS;
      const bool is_first = chunk == 0, is_last = chunk + 1 == end;
      attend_chunk(a, unit, begin, shared, statistics);
      if (a.split) {
        leave_chunk(a, unit, chunk, shared, statistics);
        continue;
      }
      fold_statistics(shared, begin, is_first, statistics, folded);
      if (FEATURED && is_last) finish_statistics(a, unit, shared, folded);
      __syncthreads();
      fold_values(a, unit, shared, begin, is_first, is_last);
    }
    if (!a.split) store_lse(a, unit, shared, folded);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
