/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: one layer's keys and values, quantized as they come. Here are the public calls and
 * the checks of every backend; cache.h says where the rest is. */
#include "cache.h"

#include <inttypes.h>
#include <string.h>

#include "cuda/operations.h"
#include "quantize.h"
#include "views.h"

static bool on_cuda(const nyb_cache *cache) { return nyb_on_cuda(cache->context); }

static nyb_status check_cache(const nyb_cache *cache) {
  if (cache != NULL) return NYB_OK;
  return nyb_fail(NYB_ERROR_NULL, "cache is NULL; nyb_cache_create makes one");
}

static nyb_status check_call(const nyb_cache *cache, nyb_stream stream) {
  const nyb_status status = check_cache(cache);
  return status == NYB_OK ? nyb_check_stream(cache->context, stream) : status;
}

/* ---- Create and destroy ------------------------------------------------------------------- */

static nyb_status check_sizes(const nyb_cache_options *options) {
  const struct {
    const char *name;
    int64_t value, least, most;
  } sizes[] = {
      {"batch", options->batch, 1, INT32_MAX},
      {"kv_heads", options->kv_heads, 1, INT32_MAX},
      {"max_tokens", options->max_tokens, 0, INT32_MAX},
      {"initial_capacity_tokens", options->initial_capacity_tokens, 0,
       options->max_tokens > 0 ? options->max_tokens : INT32_MAX},
  };
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    if (sizes[i].value < sizes[i].least || sizes[i].value > sizes[i].most) {
      return nyb_fail(NYB_ERROR_SHAPE,
                      "options.%s is %" PRId64 "; it must be %" PRId64 " to %" PRId64,
                      sizes[i].name, sizes[i].value, sizes[i].least, sizes[i].most);
    }
  }
  return NYB_OK;
}

static nyb_status fill_part(nyb_cache_part *part, const nyb_format *format, const char *field,
                            int64_t dim, const char *dim_field) {
  const nyb_status status = nyb_format_check(format, field, dim, dim_field, &part->layout);
  if (status != NYB_OK) return status;
  part->format = *format;
  part->dim = dim;
  const nyb_row_layout *layout = &part->layout;
  part->row_bytes[NYB_CODES] = layout->codes_bytes;
  part->row_bytes[NYB_SCALES] = layout->groups * (int64_t)layout->scale_bytes;
  part->row_bytes[NYB_BIASES] = part->row_bytes[NYB_SCALES];
  return NYB_OK;
}

typedef struct option_range {
  const char *name;
  int64_t value, least, most;
} option_range;

static nyb_status check_range(const option_range *range) {
  if (range->value >= range->least && range->value <= range->most) return NYB_OK;
  return nyb_fail(NYB_ERROR_SHAPE, "options.%s is %" PRId64 "; it must be %" PRId64 " to %" PRId64,
                  range->name, range->value, range->least, range->most);
}

static nyb_status check_kind_ranges(const nyb_cache_options *options) {
  const int64_t window = options->window_tokens;
  const option_range ranges[] = {
      {"window_tokens", window, 0, INT32_MAX / 2},
      {"window_keep_tokens", options->window_keep_tokens, 0, window > 0 ? window - 1 : 0},
      {"first_tokens", options->first_tokens, 0, INT32_MAX / 2},
      {"last_tokens", options->last_tokens, 0, INT32_MAX / 2},
      {"page_tokens", options->page_tokens, options->page_tokens == 0 ? 0 : 16, INT32_MAX},
  };
  nyb_status status = NYB_OK;
  for (size_t i = 0; i < sizeof ranges / sizeof ranges[0] && status == NYB_OK; i++) {
    status = check_range(&ranges[i]);
  }
  return status;
}

static nyb_status check_one_kind(const nyb_cache_options *options) {
  const struct {
    const char *name;
    bool is_set;
  } kinds[] = {{"window_tokens", options->window_tokens > 0},
               {options->first_tokens > 0 ? "first_tokens" : "last_tokens",
                options->first_tokens > 0 || options->last_tokens > 0},
               {"page_tokens", options->page_tokens > 0}};
  for (int i = 0; i < 3; i++) {
    const int other = (i + 1) % 3;
    if (!kinds[i].is_set || !kinds[other].is_set) continue;
    return nyb_fail(NYB_ERROR_UNSUPPORTED,
                    "options.%s and options.%s are both set; a cache is of one kind", kinds[i].name,
                    kinds[other].name);
  }
  return NYB_OK;
}

static nyb_cache_kind kind_of(const nyb_cache_options *options) {
  if (options->window_tokens > 0) return NYB_CACHE_ROTATING;
  if (options->first_tokens > 0 || options->last_tokens > 0) return NYB_CACHE_MIXED;
  return options->page_tokens > 0 ? NYB_CACHE_PAGED : NYB_CACHE_CONTIGUOUS;
}

static nyb_status check_kind(const nyb_cache_options *options) {
  nyb_status status = check_kind_ranges(options);
  if (status == NYB_OK) status = check_one_kind(options);
  if (status != NYB_OK) return status;
  if (options->reserved != 0 || options->reserved2 != 0) {
    return nyb_fail(NYB_ERROR_VALUE, "options.%s is %d; it must be 0",
                    options->reserved != 0 ? "reserved" : "reserved2",
                    (int)(options->reserved != 0 ? options->reserved : options->reserved2));
  }
  if (kind_of(options) == NYB_CACHE_MIXED) {
    return nyb_check_dtype("options.part_dtype", options->part_dtype);
  }
  if (options->part_dtype == 0) return NYB_OK;
  return nyb_fail(NYB_ERROR_VALUE,
                  "options.part_dtype is %d; it must be 0 where first_tokens and last_tokens are",
                  (int)options->part_dtype);
}

static nyb_status fill_parts(const nyb_cache_options *options, nyb_cache *made) {
  const nyb_format plain = {.scheme = NYB_PLAIN, .dtype = options->part_dtype};
  const struct {
    nyb_cache_part *part;
    const nyb_format *format;
    const char *name;
    int64_t dim;
    const char *dim_name;
  } parts[] = {
      {&made->part[NYB_KEY], &options->key_format, "options.key_format", options->key_dim,
       "options.key_dim"},
      {&made->part[NYB_VALUE], &options->value_format, "options.value_format", options->value_dim,
       "options.value_dim"},
      {&made->plain[NYB_KEY], &plain, "options.part_dtype", options->key_dim, "options.key_dim"},
      {&made->plain[NYB_VALUE], &plain, "options.part_dtype", options->value_dim,
       "options.value_dim"}};
  const int count = made->kind == NYB_CACHE_MIXED ? 4 : 2;
  for (int i = 0; i < count; i++) {
    const nyb_status status =
        fill_part(parts[i].part, parts[i].format, parts[i].name, parts[i].dim, parts[i].dim_name);
    if (status != NYB_OK) return status;
  }
  return NYB_OK;
}

/* Everything but the memory: *made can be copied into the cache. */
static nyb_status check_options(const nyb_cache_options *options, nyb_cache *made) {
  nyb_status status = nyb_check_struct("options", options, options->struct_size, sizeof *options);
  if (status == NYB_OK) status = check_sizes(options);
  if (status == NYB_OK) status = check_kind(options);
  if (status != NYB_OK) return status;
  made->options = *options;
  made->kind = kind_of(options);
  made->numbers = (nyb_kind_numbers){
      .kind = (int)made->kind,
      .window_tokens = options->window_tokens,
      .keep_tokens = options->window_keep_tokens,
      .first_tokens = options->first_tokens,
      .last_tokens = options->last_tokens,
      .page_tokens = options->page_tokens,
  };
  status = fill_parts(options, made);
  if (status != NYB_OK) return status;
  status = nyb_check_rule("options.rule", options->rule);
  if (status != NYB_OK) return status;
  made->rule = options->rule;
  made->batch = options->batch;
  made->kv_heads = options->kv_heads;
  made->limit_tokens = options->max_tokens > 0 ? options->max_tokens : INT32_MAX;
  if (options->max_tokens == 0 && made->kind == NYB_CACHE_ROTATING) {
    made->limit_tokens = INT64_MAX / 2; /* tokens that a window has passed over are counted alone */
  }
  nyb_cache_storage unused; /* a single token that takes too many bytes is refused here already */
  return nyb_cache_size_storage(made, NYB_BODY, made->batch,
                                nyb_larger(1, options->initial_capacity_tokens), &unused);
}

int64_t nyb_cache_body_capacity(const nyb_cache *cache, int64_t tokens) {
  const nyb_cache_options *options = &cache->options;
  if (cache->kind == NYB_CACHE_ROTATING) return nyb_smaller(tokens, options->window_tokens);
  return nyb_larger(0, tokens - options->first_tokens - options->last_tokens);
}

static nyb_status make_here(nyb_cache *cache) {
  const nyb_cache_options *options = &cache->options;
  if (cache->kind == NYB_CACHE_PAGED) {
    return nyb_cache_reserve_pages(cache, options->initial_capacity_tokens);
  }
  nyb_status status = nyb_cache_make_storage(
      cache, NYB_BODY, cache->batch,
      nyb_cache_body_capacity(cache, options->initial_capacity_tokens), &cache->storage);
  if (status != NYB_OK || cache->kind != NYB_CACHE_MIXED) return status;
  status =
      nyb_cache_make_storage(cache, NYB_FIRST, cache->batch, options->first_tokens, &cache->first);
  if (status != NYB_OK) return status;
  return nyb_cache_make_storage(cache, NYB_LAST, cache->batch, options->last_tokens, &cache->last);
}

static void release_here(nyb_cache *cache) {
  nyb_cache_release_storage(cache, &cache->storage);
  nyb_cache_release_storage(cache, &cache->first);
  nyb_cache_release_storage(cache, &cache->last);
  nyb_cache_release_pool(cache);
}

static nyb_status make_contents(nyb_cache *cache) {
  nyb_cache_counts counts;
  nyb_status status = nyb_cache_make_counts(cache, cache->batch, &counts);
  if (status != NYB_OK) return status;
  nyb_cache_adopt_counts(cache, &counts);
  status = on_cuda(cache) ? nyb_cuda_cache_create(cache) : make_here(cache);
  if (status == NYB_OK) return NYB_OK;
  if (!on_cuda(cache)) release_here(cache);
  nyb_release(cache->context, cache->counts.memory);
  return status;
}

nyb_status nyb_cache_create(nyb_context *context, const nyb_cache_options *options,
                            nyb_cache **cache) {
  if (context == NULL || options == NULL || cache == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "%s is NULL; context, options and cache must be set",
                    context == NULL   ? "context"
                    : options == NULL ? "options"
                                      : "cache");
  }
  nyb_cache checked = {.context = context};
  nyb_status status = check_options(options, &checked);
  if (status != NYB_OK) return status;
  nyb_cache *made = nyb_allocate(context, sizeof checked, NYB_PLANE_ALIGNMENT);
  if (made == NULL) {
    return nyb_fail(NYB_ERROR_OUT_OF_MEMORY, "the allocator had no %zu bytes for a cache",
                    sizeof checked);
  }
  *made = checked;
  status = make_contents(made);
  if (status != NYB_OK) {
    nyb_release(context, made);
    return status;
  }
  *cache = made;
  return NYB_OK;
}

void nyb_cache_destroy(nyb_cache *cache) {
  if (cache == NULL) return;
  if (on_cuda(cache)) {
    nyb_cuda_cache_destroy(cache);
  } else {
    release_here(cache);
  }
  nyb_release(cache->context, cache->counts.memory);
  nyb_release(cache->context, cache);
}

/* ---- Append ------------------------------------------------------------------------------- */

static const char *const part_names[NYB_CACHE_PARTS] = {"append.key", "append.value"};

/* Appending a cache's own rows would read what growing releases. */
static nyb_status check_not_own(const nyb_cache_storage *storage, const nyb_extent *extent) {
  if (storage->block == NULL) return NYB_OK;
  const uintptr_t block = (uintptr_t)storage->block;
  const nyb_extent own = {
      .owner = "cache",
      .member = "memory",
      .begin = block,
      .end = block + (uintptr_t)storage->bytes,
      .row_bytes = (uint64_t)storage->bytes,
      .block_bytes = (uint64_t)storage->bytes,
  };
  return nyb_check_apart(&own, extent);
}

static nyb_status check_input(const nyb_cache *cache, int part, const nyb_input *input,
                              int64_t tokens) {
  nyb_status status =
      nyb_check_dtype(part == NYB_KEY ? "append.key.dtype" : "append.value.dtype", input->dtype);
  if (status != NYB_OK) return status;
  const int64_t shape[3] = {cache->batch, cache->kv_heads, tokens};
  const nyb_view view =
      nyb_rows_view(part_names[part], "data", input->data, nyb_dtype_bytes(input->dtype),
                    cache->part[part].dim, shape, input->stride);
  nyb_extent extent;
  status = nyb_extent_of(&view, &extent);
  for (int region = 0; region < NYB_CACHE_REGIONS && status == NYB_OK; region++) {
    status = check_not_own(nyb_cache_const_storage_of(cache, (nyb_cache_region)region), &extent);
  }
  return status;
}

static nyb_status check_padding(const nyb_cache *cache, const nyb_append *append) {
  if (append->padding == NULL) return NYB_OK;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int32_t padding = append->padding[sequence];
    if (padding >= 0 && padding <= append->tokens) continue;
    return nyb_fail(NYB_ERROR_LENGTH,
                    "append.padding[%" PRId64 "] is %d; it must be 0 to %" PRId64
                    ", as many rows as are appended",
                    sequence, (int)padding, append->tokens);
  }
  return NYB_OK;
}

static nyb_status check_limit(const nyb_cache *cache, const nyb_append *append) {
  const int64_t window = cache->options.window_tokens;
  for (int64_t sequence = 0; sequence < cache->batch; sequence++) {
    const int64_t tokens = nyb_appended_tokens(append, sequence);
    const int64_t seen = cache->counts.dropped[sequence] + cache->lengths[sequence];
    if (tokens > cache->limit_tokens - seen) {
      return nyb_fail(NYB_ERROR_LENGTH,
                      "append.tokens is %" PRId64 "; the cache holds %" PRId64
                      " of at most %" PRId64 " tokens",
                      append->tokens, seen, cache->limit_tokens);
    }
    if (window > 0 && tokens > INT32_MAX - window) {
      return nyb_fail(NYB_ERROR_LENGTH,
                      "append.tokens is %" PRId64 "; beside a window of %" PRId64
                      " it must be %" PRId64 " at most",
                      append->tokens, window, INT32_MAX - window);
    }
  }
  return NYB_OK;
}

static nyb_status check_append(const nyb_cache *cache, const nyb_append *append) {
  nyb_status status = nyb_check_struct("append", append, append->struct_size, sizeof *append);
  if (status != NYB_OK) return status;
  if (append->tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "append.tokens is %" PRId64 "; it must not be negative",
                    append->tokens);
  }
  status = nyb_check_flag(cache->context, "append.non_finite", append->non_finite);
  if (status != NYB_OK) return status;
  status = check_padding(cache, append);
  if (status == NYB_OK) status = check_limit(cache, append);
  for (int part = 0; part < NYB_CACHE_PARTS && status == NYB_OK; part++) {
    status =
        check_input(cache, part, part == NYB_KEY ? &append->key : &append->value, append->tokens);
  }
  return status;
}

static void count_kernels(const nyb_cache *cache) {
  nyb_context *const context = cache->context;
  const nyb_operation operation =
      on_cuda(cache) ? NYB_OPERATION_CACHE_APPEND : NYB_OPERATION_QUANTIZE;
  const nyb_format_id key = cache->part[NYB_KEY].layout.id;
  const nyb_format_id value = cache->part[NYB_VALUE].layout.id;
  nyb_count_kernel(context, operation, key);
  if (value != key) nyb_count_kernel(context, operation, value);
  if (cache->kind != NYB_CACHE_MIXED) return;
  const nyb_format_id plain = cache->plain[NYB_KEY].layout.id;
  if (plain != key && plain != value) nyb_count_kernel(context, operation, plain);
}

nyb_status nyb_cache_append(nyb_cache *cache, const nyb_append *append, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (append == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "append is NULL; it must point to an nyb_append");
  }
  status = check_append(cache, append);
  if (status != NYB_OK) return status;
  if (append->tokens > 0) {
    status = on_cuda(cache) ? nyb_cuda_cache_append(cache, append, stream)
                            : nyb_cache_append_here(cache, append);
    if (status != NYB_OK) return status;
    count_kernels(cache);
  }
  nyb_count(cache->context, NYB_COUNTER_CACHE_APPEND);
  return NYB_OK;
}

/* ---- Reserve, trim, reorder, reset --------------------------------------------------------- */

nyb_status nyb_cache_reserve(nyb_cache *cache, int64_t tokens, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "tokens is %" PRId64 "; it must not be negative", tokens);
  }
  if (tokens > cache->limit_tokens) {
    return nyb_fail(NYB_ERROR_LENGTH,
                    "tokens is %" PRId64 "; the cache may hold %" PRId64 " at most", tokens,
                    cache->limit_tokens);
  }
  if (cache->kind == NYB_CACHE_PAGED) {
    return on_cuda(cache) ? nyb_cuda_cache_reserve_pages(cache, tokens, stream)
                          : nyb_cache_reserve_pages(cache, tokens);
  }
  const int64_t capacity = nyb_cache_body_capacity(cache, tokens);
  if (capacity <= cache->storage.capacity_tokens) return NYB_OK;
  if (on_cuda(cache)) return nyb_cuda_cache_reserve(cache, capacity, stream);
  nyb_cache_storage storage;
  status = nyb_cache_make_larger(cache, capacity, &storage);
  if (status == NYB_OK) nyb_cache_adopt_larger(cache, &storage);
  return status;
}

static nyb_status fail_sequence(const nyb_cache *cache, int64_t sequence, const char *or_all) {
  return nyb_fail(NYB_ERROR_VALUE, "sequence is %" PRId64 "; it must be 0 to %" PRId64 "%s",
                  sequence, cache->batch - 1, or_all);
}

/* NYB_ERROR_LENGTH where tokens would be needed again that a window has passed over. */
static nyb_status check_trim(const nyb_cache *cache, int64_t sequence, int64_t tokens) {
  const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
  nyb_cache_sequence after;
  if (nyb_cache_after_trim(cache, &before, tokens, &after)) return NYB_OK;
  const int64_t window = cache->options.window_tokens;
  return nyb_fail(NYB_ERROR_LENGTH,
                  "tokens is %" PRId64 "; sequence %" PRId64 " holds %" PRId64 " of %" PRId64
                  " tokens, of which its window of %" PRId64 " lets %" PRId64
                  " at most be dropped, or all",
                  tokens, sequence, before.held, before.held + before.dropped, window,
                  nyb_larger(0, before.held - (window - 1)));
}

static int64_t trim_counted(nyb_cache *cache, int64_t sequence, int64_t tokens) {
  const nyb_cache_sequence before = nyb_cache_get_sequence(cache, sequence);
  nyb_cache_sequence after;
  nyb_cache_after_trim(cache, &before, tokens, &after);
  if (cache->kind == NYB_CACHE_PAGED && !on_cuda(cache)) {
    nyb_cache_drop_pages(cache, sequence, before.held, after.held);
  }
  nyb_cache_set_sequence(cache, sequence, &after);
  return before.dropped + before.held - after.dropped - after.held;
}

nyb_status nyb_cache_trim(nyb_cache *cache, int64_t sequence, int64_t tokens, int64_t *trimmed,
                          nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  if (sequence != NYB_ALL_SEQUENCES && (sequence < 0 || sequence >= cache->batch)) {
    return fail_sequence(cache, sequence, ", or NYB_ALL_SEQUENCES");
  }
  if (tokens < 0) {
    return nyb_fail(NYB_ERROR_SHAPE, "tokens is %" PRId64 "; it must not be negative", tokens);
  }
  const int64_t first = sequence == NYB_ALL_SEQUENCES ? 0 : sequence;
  const int64_t end = sequence == NYB_ALL_SEQUENCES ? cache->batch : sequence + 1;
  int64_t most = 0;
  for (int64_t i = first; i < end && status == NYB_OK; i++) status = check_trim(cache, i, tokens);
  if (status == NYB_OK && on_cuda(cache)) {
    status = nyb_cuda_cache_trim(cache, first, end, tokens, stream);
  }
  if (status != NYB_OK) return status;
  for (int64_t i = first; i < end; i++) most = nyb_larger(most, trim_counted(cache, i, tokens));
  if (trimmed != NULL) *trimmed = most;
  return NYB_OK;
}

nyb_status nyb_cache_reorder(nyb_cache *cache, const int64_t *sources, int64_t count,
                             nyb_stream stream) {
  const nyb_status status = check_call(cache, stream);
  if (status != NYB_OK) return status;
  return on_cuda(cache) ? nyb_cuda_cache_reorder(cache, sources, count, stream)
                        : nyb_cache_reorder_here(cache, sources, count);
}

nyb_status nyb_cache_reset(nyb_cache *cache, nyb_stream stream) {
  return nyb_cache_trim(cache, NYB_ALL_SEQUENCES, INT64_MAX, NULL, stream);
}

nyb_status nyb_cache_refresh(nyb_cache *cache, nyb_stream stream) {
  nyb_status status = check_call(cache, stream);
  if (status == NYB_OK && on_cuda(cache)) status = nyb_cuda_cache_refresh(cache, stream);
  return status;
}

/* ---- Looking at a cache ------------------------------------------------------------------- */

int64_t nyb_cache_length(const nyb_cache *cache, int64_t sequence) {
  if (check_cache(cache) != NYB_OK) return -1;
  if (sequence < 0 || sequence >= cache->batch) {
    fail_sequence(cache, sequence, "");
    return -1;
  }
  return cache->counts.dropped[sequence] + cache->lengths[sequence];
}

int64_t nyb_cache_held_tokens(const nyb_cache *cache, int64_t sequence) {
  return nyb_cache_length(cache, sequence) < 0 ? -1 : cache->lengths[sequence];
}

nyb_status nyb_cache_get_usage(const nyb_cache *cache, nyb_cache_usage *usage) {
  nyb_status status = check_cache(cache);
  if (status != NYB_OK) return status;
  if (usage == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "usage is NULL; it must point to an nyb_cache_usage");
  }
  status = nyb_check_struct("usage", NULL, usage->struct_size, sizeof *usage);
  if (status != NYB_OK) return status;
  usage->used_bytes = nyb_cache_used_bytes(cache);
  usage->allocated_bytes = cache->storage.bytes + cache->first.bytes + cache->last.bytes;
  usage->capacity_tokens = cache->kind == NYB_CACHE_PAGED
                               ? cache->storage.blocks * cache->options.page_tokens
                               : cache->storage.capacity_tokens + cache->first.capacity_tokens +
                                     cache->last.capacity_tokens;
  usage->reallocations = cache->reallocations;
  usage->copied_bytes = cache->copied_bytes;
  return NYB_OK;
}

static nyb_part part_view(const nyb_cache *cache, nyb_cache_region region) {
  const nyb_cache_storage *storage = nyb_cache_const_storage_of(cache, region);
  if (storage->capacity_tokens == 0) return (nyb_part){0};
  return (nyb_part){
      .tokens = storage->capacity_tokens,
      .k = nyb_cache_stored_in(cache, region, NYB_KEY),
      .v = nyb_cache_stored_in(cache, region, NYB_VALUE),
  };
}

/* The sequences' numbers, where the rows are. */
static nyb_cache_addresses addresses_of(const nyb_cache *cache) {
  if (on_cuda(cache)) return nyb_cuda_cache_addresses(cache);
  return (nyb_cache_addresses){
      .lengths = cache->counts.lengths,
      .offsets = cache->counts.offsets,
      .last_begins = cache->counts.last_begins,
      .table = cache->pool.table,
  };
}

/* What a kind has beside its rows; the fields of the others are 0. */
static void view_kind(const nyb_cache *cache, const nyb_cache_addresses *addresses,
                      nyb_attention *attention) {
  const nyb_cache_options *options = &cache->options;
  const nyb_cache_pool *pool = &cache->pool;
  attention->pages = (nyb_pages){0};
  attention->ring = (nyb_ring){0};
  attention->first = part_view(cache, NYB_FIRST);
  attention->last = part_view(cache, NYB_LAST);
  attention->last_begins = attention->last.tokens > 0 ? addresses->last_begins : NULL;
  if (cache->kind == NYB_CACHE_ROTATING) {
    const int64_t keep = options->window_keep_tokens;
    attention->window_tokens = options->window_tokens - keep;
    attention->window_keep_tokens = keep;
    /* Until there is room for more than the tokens that stay there is no ring. */
    if (attention->capacity_tokens > keep) {
      attention->ring = (nyb_ring){addresses->offsets, keep};
    }
  } else if (cache->kind == NYB_CACHE_PAGED) {
    attention->capacity_tokens = nyb_smaller(pool->table_stride * options->page_tokens, INT32_MAX);
    attention->pages = (nyb_pages){addresses->table, pool->table_stride, options->page_tokens,
                                   cache->storage.blocks};
  }
}

nyb_status nyb_cache_view(const nyb_cache *cache, nyb_attention *attention) {
  nyb_status status = check_cache(cache);
  if (status != NYB_OK) return status;
  if (attention == NULL) {
    return nyb_fail(NYB_ERROR_NULL, "attention is NULL; it must point to an nyb_attention");
  }
  status = nyb_check_struct("attention", NULL, attention->struct_size, sizeof *attention);
  if (status != NYB_OK) return status;
  attention->batch = cache->batch;
  attention->kv_heads = cache->kv_heads;
  attention->key_dim = cache->part[NYB_KEY].dim;
  attention->value_dim = cache->part[NYB_VALUE].dim;
  attention->capacity_tokens = cache->storage.capacity_tokens;
  const nyb_cache_addresses addresses = addresses_of(cache);
  attention->lengths = addresses.lengths;
  attention->k = nyb_cache_stored(cache, &cache->storage, NYB_KEY);
  attention->v = nyb_cache_stored(cache, &cache->storage, NYB_VALUE);
  view_kind(cache, &addresses, attention);
  return NYB_OK;
}
