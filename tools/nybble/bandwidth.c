/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "bandwidth.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "statistics.h"
#include "support.h"

enum { PASSES = 9, WARM_UP_PASSES = 1, ALL_PASSES = WARM_UP_PASSES + PASSES };

/* Each thread reads so many places side by side, a block of each in turn: one place alone leaves
 * bandwidth unused. */
enum { STREAMS = 16, BLOCK_WORDS = 64 };

static const int64_t memory_bytes = 512 * 1024 * 1024;

typedef struct team_member team_member;
typedef void (*work_fn)(team_member *member);

typedef struct thread_team {
  pthread_barrier_t barrier;
  work_fn work;
  uint64_t *words;
  int64_t word_count;
} thread_team;

struct team_member {
  thread_team *team;
  int64_t first_word, word_count; /* its part of the memory (copy: of the first half) */
  uint64_t sum;
  int64_t start_ns[ALL_PASSES], end_ns[ALL_PASSES];
};

/* Sums that do not wait for each other; their total is checked, so that no load can be left out. */
static void read_part(team_member *member) {
  const uint64_t *words = member->team->words + member->first_word;
  const int64_t stream_words = member->word_count / STREAMS;
  uint64_t sum[STREAMS] = {0};
  for (int64_t block = 0; block < stream_words; block += BLOCK_WORDS) {
    for (int stream = 0; stream < STREAMS; stream++) {
      const uint64_t *word = words + stream * stream_words + block;
      for (int i = 0; i < BLOCK_WORDS; i++) sum[stream] += word[i];
    }
  }
  for (int stream = 0; stream < STREAMS; stream++) member->sum += sum[stream];
}

static void copy_part(team_member *member) {
  uint64_t *from = member->team->words + member->first_word;
  uint64_t *to = from + member->team->word_count / 2;
  memcpy(to, from, (size_t)member->word_count * sizeof *to);
}

/* Each member keeps its own time: one that is scheduled late must not shorten a pass. */
static void *run_member(void *data) {
  team_member *member = data;
  for (int pass = 0; pass < ALL_PASSES; pass++) {
    pthread_barrier_wait(&member->team->barrier);
    member->start_ns[pass] = nyb_now_ns();
    member->team->work(member);
    member->end_ns[pass] = nyb_now_ns();
  }
  return NULL;
}

/* From the first member's start to the last one's end. */
static double pass_us(const team_member *members, int64_t threads, int pass) {
  int64_t start_ns = members[0].start_ns[pass], end_ns = members[0].end_ns[pass];
  for (int64_t i = 1; i < threads; i++) {
    if (members[i].start_ns[pass] < start_ns) start_ns = members[i].start_ns[pass];
    if (members[i].end_ns[pass] > end_ns) end_ns = members[i].end_ns[pass];
  }
  return (double)(end_ns - start_ns) * 1e-3;
}

static void run_team(thread_team *team, team_member *members, int64_t threads) {
  pthread_t *handles = nyb_command_allocate(threads * (int64_t)sizeof *handles);
  pthread_barrier_init(&team->barrier, NULL, (unsigned)threads);
  for (int64_t i = 1; i < threads; i++) {
    if (pthread_create(&handles[i], NULL, run_member, &members[i]) != 0) {
      /* Those already started wait at the barrier for ever: the command has to end here. */
      exit(nyb_command_failed("no more than %lld threads could be started", (long long)i));
    }
  }
  run_member(&members[0]);
  for (int64_t i = 1; i < threads; i++) pthread_join(handles[i], NULL);
  pthread_barrier_destroy(&team->barrier);
  free(handles);
}

/* Cuts the first `words` words of the memory, which all hold 1, into equal parts of whole blocks in
 * every stream, lets the team work on them, and takes the times. */
static int measure(int64_t threads, work_fn work, int64_t words, nyb_bandwidth *bandwidth) {
  thread_team team = {.work = work, .word_count = memory_bytes / 8};
  team.words = nyb_command_allocate(memory_bytes);
  for (int64_t i = 0; i < team.word_count; i++) team.words[i] = 1;
  team_member *members = nyb_command_allocate(threads * (int64_t)sizeof *members);
  const int64_t least = (int64_t)STREAMS * BLOCK_WORDS;
  const int64_t part_words = words / threads / least * least;
  for (int64_t i = 0; i < threads; i++) {
    members[i] =
        (team_member){.team = &team, .first_word = i * part_words, .word_count = part_words};
  }
  run_team(&team, members, threads);

  double sorted_us[PASSES];
  for (int i = 0; i < PASSES; i++) sorted_us[i] = pass_us(members, threads, WARM_UP_PASSES + i);
  nyb_sort_samples(sorted_us, PASSES);
  const bool is_copy = work == copy_part;
  const double bytes = (double)(part_words * threads * 8 * (is_copy ? 2 : 1));
  bandwidth->median_gb_per_s = bytes * 1e-3 / nyb_quantile(sorted_us, PASSES, 0.5);
  bandwidth->best_gb_per_s = bytes * 1e-3 / sorted_us[0];
  bool right = true;
  for (int64_t i = 0; i < threads; i++) {
    right &= is_copy || members[i].sum == (uint64_t)(part_words * ALL_PASSES);
  }
  free(team.words);
  free(members);
  return right ? 0 : nyb_command_failed("the memory read back as something else");
}

int nyb_measure_read_bandwidth(int64_t threads, nyb_bandwidth *bandwidth) {
  nyb_progress_show("measuring the read bandwidth of %lld threads", (long long)threads);
  return measure(threads, read_part, memory_bytes / 8, bandwidth);
}

int nyb_measure_copy_bandwidth(int64_t threads, nyb_bandwidth *bandwidth) {
  nyb_progress_show("measuring the copy bandwidth of %lld threads", (long long)threads);
  return measure(threads, copy_part, memory_bytes / 16, bandwidth);
}
