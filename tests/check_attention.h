/* SPDX-License-Identifier: Apache-2.0 */
/* What the attention checks of the CPU and of the GPU share. */
#ifndef CHECK_ATTENTION_H
#define CHECK_ATTENTION_H

#include "attention_scene.h"
#include "check.h"

enum { PLAIN_FORMATS = 3, FORMATS = 9 };

/* The i-th format, with the salt-th group size and dtype that fit; false where none does. */
bool choose_format(int i, int64_t dim, int64_t salt, nyb_format *format);

/* One sequence, one query row, normal data; formats are left to the caller. */
attention_shape decode_shape(const char *name, int64_t query_heads, int64_t kv_heads, int64_t dim,
                             int32_t length);

/* The kernels that a case should run on one ISA: the first ones make the scores, those from
 * `values` on the output. */
enum { MAX_KERNELS = 6 };
typedef struct kernel_set {
  check_tally *tallies[MAX_KERNELS];
  int64_t calls[MAX_KERNELS];
  int count, scores, values; /* scores: the one that a wrong lse counts against */
  oracle_arithmetic arithmetic;
  const char *key_kernel; /* CUDA: what the plan names */
} kernel_set;

/* False where they do not run here or are not asked for. */
bool find_kernels(check_run *run, const attention_scene *scene, nyb_isa isa, nyb_path path,
                  kernel_set *set);

/* Whether the plan names CUDA's decode kernel. */
bool is_decode(const kernel_set *set);

/* Runs the scene on a path of an ISA, compares, and counts. */
void run_path(check_run *run, attention_scene *scene, nyb_isa isa, nyb_path path, kernel_set *set,
              const scene_expected *expected, const char *what);

/* Bits that must not change: from run to run, with other strides, alone, beside other rows. */
void check_invariants(check_run *run, nyb_isa isa, const attention_shape *shape);

/* The root mean square of the errors of normal data, in exact arithmetic. */
void check_scene_accuracy(check_run *run, attention_scene *scene, nyb_isa isa);

void check_attention_cuda(check_run *run);

/* Masks, windows, sinks, softcaps and slopes over keys or values of the i-th format. */
void check_attention_features(check_run *run, int format);

/* Each specialisation takes the GPU's compiler seconds: a case keeps to one pair of row lengths and
 * to one kind of rows, of the keys' width. */
void settle_for_gpu(attention_shape *shape);

#endif
