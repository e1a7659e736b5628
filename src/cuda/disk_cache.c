/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "disk_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jit.h"

/* ---- Hashing -------------------------------------------------------------------------------- */

void nyb_hash_start(nyb_hash *hash) {
  hash->half[0] = UINT64_C(0xcbf29ce484222325);
  hash->half[1] = UINT64_C(0x9e3779b97f4a7c15);
}

/* FNV-1a, and a multiplicative hash that stirs its high bits down. */
void nyb_hash_bytes(nyb_hash *hash, const void *data, size_t bytes) {
  const unsigned char *byte = data;
  uint64_t a = hash->half[0], b = hash->half[1];
  for (size_t i = 0; i < bytes; i++) {
    a = (a ^ byte[i]) * UINT64_C(0x100000001b3);
    b = (b + byte[i] + 1) * UINT64_C(0xd6e8feb86659fd93);
    b ^= b >> 32;
  }
  hash->half[0] = a;
  hash->half[1] = b;
}

void nyb_hash_text(nyb_hash *hash, const char *text) {
  nyb_hash_bytes(hash, text, strlen(text) + 1);
}

/* ---- Where it is ---------------------------------------------------------------------------- */

enum { PATH_BYTES = 1024, NAME_BYTES = 128 };

static const char *environment(const char *name) {
  const char *value = getenv(name);
  return value != NULL && value[0] != '\0' ? value : NULL;
}

const char *nyb_cuda_cache_directory(void) {
  static _Thread_local char directory[PATH_BYTES];
  const char *asked = environment("NYBBLE_CACHE_DIR");
  const char *xdg = environment("XDG_CACHE_HOME"), *home = environment("HOME");
  int length = 0;
  directory[0] = '\0';
  if (asked != NULL) {
    if (strcmp(asked, "off") != 0) length = snprintf(directory, sizeof directory, "%s", asked);
  } else if (xdg != NULL && xdg[0] == '/') {
    length = snprintf(directory, sizeof directory, "%s/nybble", xdg);
  } else if (home != NULL && home[0] == '/') {
    length = snprintf(directory, sizeof directory, "%s/.cache/nybble", home);
  }
  if (length >= PATH_BYTES - NAME_BYTES) directory[0] = '\0';
  return directory;
}

/* Makes the directory and those above it, for this user alone. */
static void make_directories(const char *directory) {
  char part[PATH_BYTES];
  snprintf(part, sizeof part, "%s", directory);
  for (char *slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(part, 0700);
    *slash = '/';
  }
  mkdir(part, 0700);
}

#define SUFFIX ".cubin"

static void name_of(const char *directory, const nyb_hash *key, char file[PATH_BYTES]) {
  snprintf(file, PATH_BYTES, "%s/%016" PRIx64 "%016" PRIx64 SUFFIX, directory, key->half[0],
           key->half[1]);
}

void nyb_cuda_cache_usage(int64_t *kernels, int64_t *bytes) {
  *kernels = *bytes = 0;
  const char *directory = nyb_cuda_cache_directory();
  DIR *const listing = directory[0] != '\0' ? opendir(directory) : NULL;
  if (listing == NULL) return;
  for (const struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing)) {
    const size_t length = strlen(entry->d_name), suffix = strlen(SUFFIX);
    if (length <= suffix || strcmp(entry->d_name + length - suffix, SUFFIX) != 0) continue;
    struct stat status;
    if (fstatat(dirfd(listing), entry->d_name, &status, 0) != 0 || !S_ISREG(status.st_mode)) {
      continue;
    }
    *kernels += 1;
    *bytes += status.st_size;
  }
  closedir(listing);
}

/* ---- Files ---------------------------------------------------------------------------------- */

/* What a file begins with; the content follows. */
typedef struct header {
  char magic[8]; /* no terminator; the last byte is the version of this layout */
  nyb_hash key;
  uint64_t bytes;
  nyb_hash content;
} header;

static header header_of(const nyb_hash *key, const void *data, size_t bytes) {
  header made = {.magic = {'n', 'y', 'b', 'c', 'u', 'd', 'a', 1}, .key = *key, .bytes = bytes};
  nyb_hash_start(&made.content);
  nyb_hash_bytes(&made.content, data, bytes);
  return made;
}

static bool read_whole(int file, void *to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = read(file, (char *)to + done, bytes - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += (size_t)count;
  }
  return true;
}

static bool write_whole(int file, const void *from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = write(file, (const char *)from + done, bytes - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += (size_t)count;
  }
  return true;
}

static bool read_file(const nyb_context *context, int file, const nyb_hash *key, void **data,
                      size_t *bytes) {
  header found;
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size <= (off_t)sizeof found || !read_whole(file, &found, sizeof found)) {
    return false;
  }
  const size_t length = (size_t)status.st_size - sizeof found;
  void *const content = nyb_allocate(context, length, 64);
  if (content == NULL) return false;
  const bool complete = read_whole(file, content, length);
  const header right = header_of(key, content, complete ? length : 0);
  if (!complete || memcmp(&found, &right, sizeof right) != 0) {
    nyb_release(context, content);
    return false;
  }
  *data = content;
  *bytes = length;
  return true;
}

bool nyb_disk_cache_read(const nyb_context *context, const nyb_hash *key, void **data,
                         size_t *bytes) {
  const char *directory = nyb_cuda_cache_directory();
  if (directory[0] == '\0') return false;
  char name[PATH_BYTES];
  name_of(directory, key, name);
  const int file = open(name, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool good = read_file(context, file, key, data, bytes);
  close(file);
  return good;
}

void nyb_disk_cache_write(const nyb_hash *key, const void *data, size_t bytes) {
  static _Atomic unsigned serial; /* of this process's temporary names */
  const char *directory = nyb_cuda_cache_directory();
  if (directory[0] == '\0') return;
  char name[PATH_BYTES], temporary[PATH_BYTES + 32];
  name_of(directory, key, name);
  snprintf(temporary, sizeof temporary, "%s.%ld.%u", name, (long)getpid(),
           atomic_fetch_add_explicit(&serial, 1, memory_order_relaxed));
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  int file = open(temporary, flags, 0600);
  if (file < 0 && errno == ENOENT) {
    make_directories(directory);
    file = open(temporary, flags, 0600);
  }
  if (file < 0) return;
  const header first = header_of(key, data, bytes);
  const bool complete = write_whole(file, &first, sizeof first) && write_whole(file, data, bytes);
  if (close(file) != 0 || !complete || rename(temporary, name) != 0) unlink(temporary);
}
