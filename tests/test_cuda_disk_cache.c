/* SPDX-License-Identifier: Apache-2.0 */
/* The disk cache of compiled CUDA kernels: where it is, what is in it, and what can be wrong with
 * it. Everything runs over a fake NVRTC, which counts its compilations. */
#define _GNU_SOURCE /* mkdtemp, nftw */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "../src/cuda/disk_cache.h"
#include "../src/cuda/jit.h"
#include "fake_cuda/open.h"

static char folder[] = "/tmp/nybble-test-cache-XXXXXX";
static char cache[64]; /* a folder in it, which does not exist at first */
static fake_cuda_library fake;
static nyb_context *context;

static const char *const source[] = {"probe\n", NULL};
static const char *const other_source[] = {"probe \n", NULL};
static const char *const parameters[] = {"BITS", NULL};
static const char *const other_parameters[] = {"BITS2", NULL};
static const nyb_cuda_program probe = {"probe", source, parameters, false};
static const nyb_cuda_program edited = {"probe", other_source, parameters, false};
static const nyb_cuda_program renamed = {"probe2", source, parameters, false};
static const nyb_cuda_program redefined = {"probe", source, other_parameters, false};
static const nyb_cuda_program specific = {"probe", source, parameters, true};

/* ---- Help ----------------------------------------------------------------------------------- */

static void open_all(void) {
  fake = fake_cuda_open("fake_cuda", "fake_nvrtc");
  MUST(nyb_context_create(NULL, &context) == NYB_OK);
}

static const char *expected_cubin = "fake cubin of probe\n";

/* Whether it came from the disk; the content is looked at either way. */
static bool compile(const nyb_cuda_program *program, int32_t bits, int32_t capability) {
  const nyb_cuda_spec spec = {.program = program, .values = {bits}};
  nyb_cuda_binary binary = {.cubin = NULL};
  const int64_t before = fake.nvrtc->compilations;
  MUST(nyb_cuda_compile(context, &spec, capability, &binary, NULL, 0) == NYB_OK);
  const char *expected = program == &renamed ? "fake cubin of probe2\n" : expected_cubin;
  MUST(binary.bytes == strlen(expected) && memcmp(binary.cubin, expected, binary.bytes) == 0);
  MUST(fake.nvrtc->compilations - before == (binary.from_disk ? 0 : 1));
  nyb_release(context, binary.cubin);
  return binary.from_disk;
}

static int64_t files_in(const char *directory, char last[512]) {
  DIR *listing = opendir(directory);
  int64_t count = 0;
  if (listing == NULL) return 0;
  for (const struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing)) {
    if (entry->d_name[0] == '.') continue;
    snprintf(last, 512, "%s/%s", directory, entry->d_name);
    count++;
  }
  closedir(listing);
  return count;
}

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *walk) {
  (void)status, (void)type, (void)walk;
  return remove(path);
}

static int remove_folder(void **state) {
  (void)state;
  return nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int make_folder(void **state) {
  (void)state;
  strcpy(folder + strlen(folder) - 6, "XXXXXX");
  if (mkdtemp(folder) == NULL) return 1;
  snprintf(cache, sizeof cache, "%s/a/b", folder);
  return setenv("NYBBLE_CACHE_DIR", cache, 1);
}

/* ---- What is found again -------------------------------------------------------------------- */

static void found_again(void) {
  open_all();
  int64_t kernels, bytes;
  nyb_cuda_cache_usage(&kernels, &bytes);
  MUST(kernels == 0 && bytes == 0);
  MUST(!compile(&probe, 4, 90));
  MUST(compile(&probe, 4, 90));
  char file[512];
  struct stat status;
  MUST(files_in(cache, file) == 1 && stat(file, &status) == 0);
  MUST((status.st_mode & 0777) == 0600);
  nyb_cuda_cache_usage(&kernels, &bytes);
  MUST(kernels == 1 && bytes == status.st_size);
  MUST(stat(cache, &status) == 0 && (status.st_mode & 0777) == 0700);
  nyb_context_destroy(context);
}

/* Everything that decides what comes out is in the key. */
static void every_part_of_the_key(void) {
  open_all();
  MUST(!compile(&probe, 4, 90));
  MUST(!compile(&probe, 8, 90));
  MUST(!compile(&probe, 4, 80));
  MUST(!compile(&edited, 4, 90));
  MUST(!compile(&renamed, 4, 90));
  MUST(!compile(&redefined, 4, 90));
  MUST(!compile(&specific, 4, 90));
  char file[512];
  MUST(files_in(cache, file) == 7);
  MUST(compile(&probe, 4, 90) && compile(&probe, 8, 90) && compile(&probe, 4, 80));
  MUST(compile(&edited, 4, 90) && compile(&renamed, 4, 90) && compile(&specific, 4, 90));
  MUST(compile(&probe, 4, 86)); /* the code of 8.0 */
  nyb_context_destroy(context);
}

static void another_compiler(void) {
  fake_cuda_open("fake_cuda", "fake_nvrtc").nvrtc->version = 12040;
  open_all();
  MUST(!compile(&probe, 4, 90));
  nyb_context_destroy(context);
}

static void another_process(void) {
  open_all();
  MUST(compile(&probe, 4, 90));
  nyb_context_destroy(context);
}

static void test_found_again(void **state) {
  (void)state;
  assert_true(in_child(found_again));
  assert_true(in_child(another_process));
  assert_true(in_child(another_compiler));
  assert_true(in_child(another_process));
}

static void test_key(void **state) {
  (void)state;
  assert_true(in_child(every_part_of_the_key));
}

/* ---- Where it is ---------------------------------------------------------------------------- */

static void directories(void) {
  char expected[128];
  MUST(strcmp(nyb_cuda_cache_directory(), cache) == 0);
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  MUST(nyb_cuda_cache_directory()[0] == '\0');
  setenv("NYBBLE_CACHE_DIR", "", 1); /* as if it were not set */
  setenv("XDG_CACHE_HOME", folder, 1);
  snprintf(expected, sizeof expected, "%s/nybble", folder);
  MUST(strcmp(nyb_cuda_cache_directory(), expected) == 0);
  setenv("XDG_CACHE_HOME", "relative", 1); /* which its specification says to ignore */
  setenv("HOME", folder, 1);
  snprintf(expected, sizeof expected, "%s/.cache/nybble", folder);
  MUST(strcmp(nyb_cuda_cache_directory(), expected) == 0);
  unsetenv("XDG_CACHE_HOME");
  MUST(strcmp(nyb_cuda_cache_directory(), expected) == 0);
  unsetenv("HOME");
  MUST(nyb_cuda_cache_directory()[0] == '\0');
  static char longest[2000];
  memset(longest, 'x', sizeof longest - 1);
  longest[0] = '/';
  setenv("NYBBLE_CACHE_DIR", longest, 1);
  MUST(nyb_cuda_cache_directory()[0] == '\0');
}

static void off(void) {
  setenv("NYBBLE_CACHE_DIR", "off", 1);
  open_all();
  int64_t kernels, bytes;
  MUST(!compile(&probe, 4, 90) && !compile(&probe, 4, 90));
  nyb_cuda_cache_usage(&kernels, &bytes);
  MUST(kernels == 0 && bytes == 0);
  nyb_context_destroy(context);
}

static void test_directories(void **state) {
  (void)state;
  assert_true(in_child(directories));
  assert_true(in_child(off));
}

/* ---- Files that are not whole --------------------------------------------------------------- */

static void set_byte(const char *file, int64_t at, int xor) {
  FILE *stream = fopen(file, "r+b");
  fseek(stream, at, SEEK_SET);
  const int byte = fgetc(stream);
  fseek(stream, at, SEEK_SET);
  fputc(byte ^ xor, stream);
  fclose(stream);
}

/* Every bit that is wrong is noticed, in the header and in the content. */
static void corrupt(void) {
  open_all();
  char file[512];
  struct stat status;
  MUST(!compile(&probe, 4, 90));
  MUST(files_in(cache, file) == 1 && stat(file, &status) == 0);
  for (int64_t at = 0; at < status.st_size; at++) {
    set_byte(file, at, 1 << at % 8);
    MUST(!compile(&probe, 4, 90));
    MUST(compile(&probe, 4, 90)); /* made again, and written again */
  }
  MUST(files_in(cache, file) == 1);
  nyb_context_destroy(context);
}

static void cut_short(void) {
  open_all();
  char file[512];
  struct stat status;
  MUST(!compile(&probe, 4, 90));
  MUST(files_in(cache, file) == 1 && stat(file, &status) == 0);
  for (off_t length = 0; length < status.st_size; length++) {
    MUST(truncate(file, length) == 0);
    MUST(!compile(&probe, 4, 90));
    MUST(compile(&probe, 4, 90));
  }
  MUST(truncate(file, status.st_size + 1) == 0); /* and too long */
  MUST(!compile(&probe, 4, 90));
  nyb_context_destroy(context);
}

/* A whole file under another key's name. */
static void exchanged(void) {
  open_all();
  char first[512], second[512];
  MUST(!compile(&probe, 4, 90));
  MUST(files_in(cache, first) == 1);
  MUST(!compile(&renamed, 4, 90));
  MUST(unlink(first) == 0 && files_in(cache, second) == 1 && rename(second, first) == 0);
  MUST(!compile(&probe, 4, 90));
  nyb_context_destroy(context);
}

static void folder_in_its_place(void) {
  open_all();
  char file[512];
  MUST(!compile(&probe, 4, 90));
  MUST(files_in(cache, file) == 1 && unlink(file) == 0 && mkdir(file, 0700) == 0);
  MUST(!compile(&probe, 4, 90) && !compile(&probe, 4, 90));
  int64_t kernels, bytes;
  nyb_cuda_cache_usage(&kernels, &bytes);
  MUST(kernels == 0 && bytes == 0 && files_in(cache, file) == 1); /* nothing temporary is left */
  nyb_context_destroy(context);
}

static void test_not_whole(void **state) {
  (void)state;
  assert_true(in_child(corrupt));
}

static void test_cut_short(void **state) {
  (void)state;
  assert_true(in_child(cut_short));
}

static void test_exchanged(void **state) {
  (void)state;
  assert_true(in_child(exchanged));
}

static void test_folder_in_its_place(void **state) {
  (void)state;
  assert_true(in_child(folder_in_its_place));
}

/* ---- Disks that refuse ---------------------------------------------------------------------- */

static void file_in_the_way(void) {
  char file[128];
  snprintf(file, sizeof file, "%s/a", folder);
  const int made = open(file, O_CREAT | O_WRONLY, 0600);
  MUST(made >= 0 && close(made) == 0);
  open_all();
  MUST(!compile(&probe, 4, 90) && !compile(&probe, 4, 90));
  nyb_context_destroy(context);
}

/* For root a folder is never read-only by its mode. */
static void read_only(void) {
  open_all();
  char file[512];
  MUST(!compile(&probe, 4, 90));
  MUST(chmod(cache, 0500) == 0);
  const bool may_write = access(cache, W_OK) == 0;
  MUST(compile(&probe, 4, 90) && !compile(&probe, 8, 90));
  MUST(compile(&probe, 8, 90) == may_write && files_in(cache, file) == (may_write ? 2 : 1));
  MUST(chmod(cache, 0700) == 0);
  nyb_context_destroy(context);
}

/* The disk takes the first bytes and no more. */
static void full(void) {
  open_all();
  char file[512];
  signal(SIGXFSZ, SIG_IGN);
  const struct rlimit limit = {40, 40};
  MUST(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  MUST(!compile(&probe, 4, 90) && !compile(&probe, 4, 90));
  MUST(files_in(cache, file) == 0);
  nyb_context_destroy(context);
}

static void *no_memory(void *data, size_t bytes, size_t alignment) {
  (void)data, (void)bytes, (void)alignment;
  return NULL;
}

/* As if the file were not there. */
static void no_memory_to_read(void) {
  open_all();
  nyb_hash key;
  void *data = NULL;
  size_t bytes = 0;
  nyb_hash_start(&key);
  nyb_disk_cache_write(&key, "abc", 3);
  MUST(nyb_disk_cache_read(context, &key, &data, &bytes) && bytes == 3);
  MUST(memcmp(data, "abc", 3) == 0);
  nyb_release(context, data);
  const nyb_allocator allocator = context->allocator;
  context->allocator.allocate = no_memory;
  data = NULL;
  MUST(!nyb_disk_cache_read(context, &key, &data, &bytes) && data == NULL);
  context->allocator = allocator;
  nyb_context_destroy(context);
}

static void test_file_in_the_way(void **state) {
  (void)state;
  assert_true(in_child(file_in_the_way));
}

static void test_read_only(void **state) {
  (void)state;
  assert_true(in_child(read_only));
}

static void test_full(void **state) {
  (void)state;
  assert_true(in_child(full));
}

static void test_no_memory(void **state) {
  (void)state;
  assert_true(in_child(no_memory_to_read));
}

/* ---- Several at once ------------------------------------------------------------------------ */

enum { PROCESSES = 6, ROUNDS = 40 };

/* Each compiles what it does not find; what it finds is whole. One removes files meanwhile. */
static void one_of_many(int number) {
  open_all();
  char file[512];
  for (int round = 0; round < ROUNDS; round++) {
    compile(&probe, round % 4, 90);
    if (number == 0 && round % 4 == 0 && files_in(cache, file) > 0) unlink(file);
  }
  nyb_context_destroy(context);
  exit(0);
}

static void test_processes_together(void **state) {
  (void)state;
  pid_t children[PROCESSES];
  fflush(NULL);
  for (int i = 0; i < PROCESSES; i++) {
    children[i] = fork();
    if (children[i] == 0) one_of_many(i);
  }
  for (int i = 0; i < PROCESSES; i++) {
    int status = 1;
    assert_int_equal(waitpid(children[i], &status, 0), children[i]);
    assert_int_equal(status, 0);
  }
  char file[512];
  assert_in_range(files_in(cache, file), 1, 4); /* none of a temporary name */
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(void) {
  const struct CMUnitTest tests[] = {
      CASE(test_found_again),         CASE(test_key),
      CASE(test_directories),         CASE(test_not_whole),
      CASE(test_cut_short),           CASE(test_exchanged),
      CASE(test_folder_in_its_place), CASE(test_file_in_the_way),
      CASE(test_read_only),           CASE(test_full),
      CASE(test_no_memory),           CASE(test_processes_together),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
