/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of caches share: statuses that they expect, and options of a cache. Include it
 * behind cmocka.h. */
#ifndef EXPECT_H
#define EXPECT_H

#include <string.h>

#include "nybble.h"

#define expect_ok(call)                                                \
  do {                                                                 \
    if ((call) != NYB_OK) fail_msg("%s: %s", #call, nyb_last_error()); \
  } while (0)

#define expect_error(call, wanted, words) expect_failure((call), wanted, words, #call)

static inline void expect_failure(nyb_status status, nyb_status wanted, const char *words,
                                  const char *call) {
  if (status != wanted || strstr(nyb_last_error(), words) == NULL) {
    fail_msg("%s: %s: %s; wanted %s with \"%s\"", call, nyb_status_name(status), nyb_last_error(),
             nyb_status_name(wanted), words);
  }
}

static inline nyb_cache_options options_of(int64_t batch, int64_t kv_heads, nyb_format key_format,
                                           int64_t key_dim, nyb_format value_format,
                                           int64_t value_dim) {
  nyb_cache_options options = NYB_CACHE_OPTIONS_INIT;
  options.batch = batch;
  options.kv_heads = kv_heads;
  options.key_dim = key_dim;
  options.value_dim = value_dim;
  options.key_format = key_format;
  options.value_format = value_format;
  return options;
}

#endif
