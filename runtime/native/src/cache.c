/* The rules of runtime/aot_backward_runtime/package/code_cache.py, which gives the reasons. Between the hash and dlopen only this user can change the
 * file: every level is owned by this user and writable by nobody else. Every folder above belongs to this user or to root, and is either writable by
 * nobody else or sticky like /tmp. */
#define _GNU_SOURCE
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <grp.h>
#include <pthread.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "sha256.h"

static const char *const VARIABLE = "AOT_BACKWARD_CACHE";

/* Makes the folder if it is missing. Returns why it cannot be used, or NULL. */
static const char *folder_problem(arena *a, const char *path) {
  struct stat status;
  struct statvfs system;
  if (mkdir(path, 0700) && errno != EEXIST) return arena_print(a, "%s: %s", path, strerror(errno));
  if (stat(path, &status) || statvfs(path, &system)) return arena_print(a, "%s: %s", path, strerror(errno));
  if (!S_ISDIR(status.st_mode)) return arena_print(a, "%s is not a folder", path);
  if (status.st_uid != geteuid()) return arena_print(a, "%s belongs to user %u, not to %u", path, status.st_uid, geteuid());
  if (status.st_mode & 022) return arena_print(a, "others can write to %s (mode %04o; chmod go-w)", path, status.st_mode & 07777);
  if (system.f_flag & ST_NOEXEC) return arena_print(a, "%s is on a file system that is mounted noexec", path);
  return NULL;
}

/* Trusts root, this user, and the id that stands for users outside of a user namespace (a rootless container), such as the host's root. */
static bool is_trusted(uid_t user) {
  char map[128] = "";
  unsigned first = 0, outside = 0, count = 0, stranger = 0;
  if (!user || user == geteuid()) return true;
  FILE *file = fopen("/proc/self/uid_map", "re");
  if (file) {
    if (!fgets(map, sizeof map, file)) *map = 0;
    fclose(file);
  }
  if (sscanf(map, "%u %u %u", &first, &outside, &count) == 3 && !first && !outside && count == 4294967295u) return false;
  file = fopen("/proc/sys/kernel/overflowuid", "re");
  bool known = file && fscanf(file, "%u", &stranger) == 1;
  if (file) fclose(file);
  return known && user == stranger;
}

/* Returns whether this is the user's private group. Many systems create one with each user and make new folders writable for it. */
static bool is_own_group(arena *a, gid_t group) {
  struct passwd user, *found = NULL;
  struct group own, *its = NULL;
  size_t size = 1 << 14;
  char *room = arena_take(a, 2 * size, 1);
  if (getpwuid_r(geteuid(), &user, room, size, &found) || !found || getgrgid_r(group, &own, room + size, size, &its) || !its) return false;
  bool alone = user.pw_gid == group && !strcmp(own.gr_name, user.pw_name);
  for (char **name = own.gr_mem; *name; name++) alone = alone && !strcmp(*name, user.pw_name);
  return alone;
}

/* Returns why another user could replace the folder `path`, or NULL. `path` is absolute and without links. */
static const char *above_problem(arena *a, const char *path) {
  char *copy = arena_text(a, path, strlen(path));
  for (;;) {
    char *slash = strrchr(copy, '/');
    if (!slash) return NULL;
    slash[slash == copy] = 0;
    struct stat status;
    if (stat(copy, &status)) return arena_print(a, "%s: %s", copy, strerror(errno));
    if (!is_trusted(status.st_uid))
      return arena_print(a, "%s, above it, belongs to user %u, who can put another folder in its place", copy, status.st_uid);
    if ((status.st_mode & 002 || (status.st_mode & 020 && !is_own_group(a, status.st_gid))) && !(status.st_mode & S_ISVTX))
      return arena_print(a, "others can write to %s, above it (mode %04o; chmod go-w, or +t)", copy, status.st_mode & 07777);
    if (slash == copy) return NULL;
  }
}

static void make_parents(arena *a, const char *path) {
  char *copy = arena_text(a, path, strlen(path));
  for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(copy, 0777);
    *slash = '/';
  }
}

static const char *checked(arena *a, const char *path, const char **problem) {
  make_parents(a, path);
  if ((*problem = folder_problem(a, path))) return NULL;
  char *real = realpath(path, NULL);
  if (!real) {
    *problem = arena_print(a, "%s: %s", path, strerror(errno));
    return NULL;
  }
  const char *out = arena_text(a, real, strlen(real));
  free(real);
  return (*problem = above_problem(a, out)) ? NULL : out;
}

static const char *home(arena *a) {
  const char *named = getenv("HOME");
  if (named && *named == '/') return named;
  struct passwd entry, *found = NULL;
  size_t size = 1 << 14;
  char *room = arena_take(a, size, 1);
  return !getpwuid_r(geteuid(), &entry, room, size, &found) && found ? entry.pw_dir : NULL;
}

static const char *working_folder(arena *a) {
  char *folder = getcwd(NULL, 0);
  if (!folder) arena_fail(a, AOTB_IO, "the working folder is gone: %s", strerror(errno));
  const char *out = arena_text(a, folder, strlen(folder));
  free(folder);
  return out;
}

static char temporary[4096]; /* folder of this process, removed with its contents at exit */
static pid_t temporary_of;

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *at) {
  (void)status, (void)kind, (void)at;
  return remove(path) && errno != ENOENT;
}

static void remove_temporary(void) {
  if (getpid() == temporary_of) nftw(temporary, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static const char *make_temporary(arena *a, const char **wrong) {
  if (!*temporary || access(temporary, X_OK)) {
    const char *base = getenv("TMPDIR");
    snprintf(temporary, sizeof temporary, "%s/aot-backward-XXXXXX", base && *base == '/' ? base : "/tmp");
    if (!mkdtemp(temporary)) {
      *wrong = arena_print(a, "%s: %s", temporary, strerror(errno));
      *temporary = 0;
      return NULL;
    }
    if (!temporary_of) atexit(remove_temporary);
    temporary_of = getpid();
  }
  return arena_text(a, temporary, strlen(temporary));
}

static const char *private_temporary(arena *a, const char **wrong) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  jmp_buf *outer = a->back, here;
  pthread_mutex_lock(&lock);
  int status = setjmp(here);
  a->back = &here;
  const char *made = status ? NULL : make_temporary(a, wrong);
  a->back = outer;
  pthread_mutex_unlock(&lock);
  if (status) longjmp(*outer, status);
  return made ? checked(a, made, wrong) : NULL;
}

/* --- files ------------------------------------------------------------------------------------------------------------------------------------ */

static bool matches(const char *path, const cached_file *f) {
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  struct stat status;
  if (fd < 0) return false;
  bool right =
      !fstat(fd, &status) && S_ISREG(status.st_mode) && (uint64_t)status.st_size == f->size && status.st_uid == geteuid() && !(status.st_mode & 022);
  sha256 h;
  sha256_begin(&h);
  for (uint64_t left = f->size; right && left;) {
    uint8_t chunk[1 << 16];
    ssize_t n = read(fd, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    right = n > 0 && (uint64_t)n <= left;
    if (!right) break;
    sha256_add(&h, chunk, (size_t)n);
    left -= (uint64_t)n;
  }
  close(fd);
  char digest[65];
  sha256_end(&h, digest);
  return right && !strcmp(digest, f->sha256);
}

/* Writes a temporary file and renames it, so that other processes see the old file or the whole new one. It does not sync: a file that a machine
 * crash damages does not match its digest and is written again. */
static const char *write_file(arena *a, const char *folder, const cached_file *f) {
  char *beside = arena_print(a, "%s/.%s.XXXXXX", folder, f->name);
  const char *path = arena_print(a, "%s/%s", folder, f->name);
  int fd = mkostemp(beside, O_CLOEXEC);
  if (fd < 0) return arena_print(a, "%s: %s", folder, strerror(errno));
  for (size_t done = 0; done < f->size;) {
    ssize_t n = write(fd, f->bytes + done, f->size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const char *wrong = arena_print(a, "%s: %s", path, strerror(n ? errno : ENOSPC));
      close(fd);
      unlink(beside);
      return wrong;
    }
    done += (size_t)n;
  }
  if (close(fd) || (rename(beside, path) && (rmdir(path), rename(beside, path)))) { /* an empty folder may have this name */
    const char *wrong = arena_print(a, "%s: %s", path, strerror(errno));
    unlink(beside);
    return wrong;
  }
  return NULL;
}

static int by_name(const void *x, const void *y) { return strcmp((*(const cached_file *const *)x)->name, (*(const cached_file *const *)y)->name); }

static const char *place_in(arena *a, const char *cache, const char *key, const cached_file *files, uint32_t count, const char **wrong) {
  const char *levels[] = {arena_print(a, "%s/lib", cache), arena_print(a, "%s/lib/%s", cache, key)};
  for (int i = 0; i < 2; i++) {
    struct stat status;
    if (!stat(levels[i], &status) && S_ISREG(status.st_mode)) unlink(levels[i]); /* remove this user's file of that name */
    if ((*wrong = folder_problem(a, levels[i]))) return NULL;
  }
  for (uint32_t i = 0; i < count; i++) {
    const char *path = arena_print(a, "%s/%s", levels[1], files[i].name);
    if (!matches(path, &files[i]) && (*wrong = write_file(a, levels[1], &files[i]))) return NULL;
  }
  return arena_print(a, "%s/%s", levels[1], files[0].name);
}

const char *cache_place(arena *a, const cached_file *files, uint32_t count) {
  const cached_file **sorted = TAKE(a, count, const cached_file *);
  for (uint32_t i = 0; i < count; i++) sorted[i] = &files[i];
  qsort(sorted, count, sizeof *sorted, by_name);
  sha256 h;
  sha256_begin(&h);
  for (uint32_t i = 0; i < count; i++) {
    sha256_add(&h, sorted[i]->name, strlen(sorted[i]->name) + 1);
    sha256_add(&h, sorted[i]->sha256, strlen(sorted[i]->sha256));
    sha256_add(&h, "\n", 1);
  }
  char key[65];
  sha256_end(&h, key);
  const char *chosen = getenv(VARIABLE), *wrong = "this user has no home folder", *cache = NULL, *found = NULL;
  const bool named = chosen && *chosen;
  if (named) cache = *chosen == '/' ? chosen : arena_print(a, "%s/%s", working_folder(a), chosen);
  else if ((chosen = home(a))) cache = arena_print(a, "%s/.cache/aot-backward", chosen);
  if (cache && (cache = checked(a, cache, &wrong))) found = place_in(a, cache, key, files, count, &wrong);
  if (!found && !named && (cache = private_temporary(a, &wrong))) found = place_in(a, cache, key, files, count, &wrong);
  if (!found)
    arena_fail(a, AOTB_IO,
               "its native code cannot be extracted: %s. Set %s to a folder that only you can write to, on a file system that allows execution",
               wrong, VARIABLE);
  return found;
}
