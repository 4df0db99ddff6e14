// For LD_PRELOAD: lets file system calls of this process fail, one after the other.
//
//   cc -shared -fPIC -O1 -o faulty_calls.so faulty_calls.c -ldl
//   faulty_arm("/tmp/x", kinds, how, error, 7, 0);   // the seventh such call on files below /tmp/x fails
//   ... OSError ...
//   long num_calls = faulty_disarm();
//
// A call on a descriptor counts if the descriptor's path begins so; also without a name (O_TMPFILE) or deleted.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, READ = 4, SYNC = 8, SIZE = 16, RENAME = 32, REMOVE = 64, FOLDER = 128, CLOSE = 256, LOCK = 512, URING = 1024 };
enum { ERROR, SHORT, KILL, LOSE };  // LOSE: a write that is reported and not made

static char folder[PATH_MAX];
static size_t folder_length;
static atomic_int kinds, how, error_number, and_on;
static atomic_long at, num_calls, num_hits;
static char last[64];

void faulty_arm(const char* path, int new_kinds, int new_how, int error, long first, int from_there_on) {
  kinds = 0;
  snprintf(folder, sizeof folder, "%s", path);
  folder_length = strlen(folder);
  how = new_how;
  error_number = error;
  at = first;
  and_on = from_there_on;
  num_calls = 0;
  num_hits = 0;
  last[0] = 0;
  kinds = new_kinds;
}
long faulty_disarm(void) {
  kinds = 0;
  return num_calls;
}
long faulty_hits(void) { return num_hits; }
const char* faulty_last(void) { return last; }

static int is_below(const char* path) { return strncmp(path, folder, folder_length) == 0; }

static int path_of(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return 1;
}

static int fails(const char* name) {
  long count = ++num_calls;
  if (count != at && !(and_on && count > at)) return 0;
  if (num_hits++ == 0) snprintf(last, sizeof last, "%s", name);
  if (how == KILL) raise(SIGKILL);
  errno = error_number;
  return 1;
}
static int fails_fd(int kind, int fd, const char* name) {
  char path[PATH_MAX];
  if (!(kinds & kind) || !path_of(fd, path) || !is_below(path)) return 0;
  return fails(name);
}
static int fails_at(int kind, int dirfd, const char* path, const char* name) {
  if (!(kinds & kind) || path == NULL) return 0;
  if (path[0] != '/') return dirfd >= 0 && fails_fd(kind, dirfd, name);
  return is_below(path) && fails(name);
}

#define REAL(type, name, ...)                                      \
  static type (*real)(__VA_ARGS__);                                \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

#define MODE                           \
  mode_t mode = 0;                     \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list list;                      \
    va_start(list, flags);             \
    mode = va_arg(list, mode_t);       \
    va_end(list);                      \
  }
#define OPENS(name)                                                  \
  int name(const char* path, int flags, ...) {                       \
    MODE REAL(int, name, const char*, int, ...);                     \
    return fails_at(OPEN, -1, path, #name) ? -1 : real(path, flags, mode); \
  }
#define OPENS_AT(name)                                                               \
  int name(int dirfd, const char* path, int flags, ...) {                            \
    MODE REAL(int, name, int, const char*, int, ...);                                \
    return fails_at(OPEN, dirfd, path, #name) ? -1 : real(dirfd, path, flags, mode); \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

// Writes and reads may also be short: half of the bytes, at least one. The kernel transfers whole blocks of a file with
// O_DIRECT, also where it ends early.
enum { BLOCK = 4096 };
static size_t shortened(int fd, size_t size) {
  size_t unit = fcntl(fd, F_GETFL) & O_DIRECT ? BLOCK : 1;
  return size > unit ? (size / 2 + unit - 1) / unit * unit : size;
}
#define MOVES(name, kind, pointer, parameters, real_types, ...)                        \
  ssize_t name parameters {                                                            \
    REAL(ssize_t, name, real_types);                                                   \
    if (fails_fd(kind, fd, #name)) {                                                   \
      if (how == LOSE) return (ssize_t)size;                                           \
      if (how != SHORT) return -1;                                                     \
      size = shortened(fd, size);                                                      \
    }                                                                                  \
    return real(__VA_ARGS__);                                                          \
  }
#define COMMA ,
MOVES(write, WRITE, const void*, (int fd, const void* data, size_t size), int COMMA const void* COMMA size_t, fd, data, size)
MOVES(pwrite, WRITE, const void*, (int fd, const void* data, size_t size, off_t offset),
      int COMMA const void* COMMA size_t COMMA off_t, fd, data, size, offset)
MOVES(pwrite64, WRITE, const void*, (int fd, const void* data, size_t size, off64_t offset),
      int COMMA const void* COMMA size_t COMMA off64_t, fd, data, size, offset)
MOVES(read, READ, void*, (int fd, void* data, size_t size), int COMMA void* COMMA size_t, fd, data, size)
MOVES(pread, READ, void*, (int fd, void* data, size_t size, off_t offset), int COMMA void* COMMA size_t COMMA off_t, fd, data,
      size, offset)
MOVES(pread64, READ, void*, (int fd, void* data, size_t size, off64_t offset),
      int COMMA void* COMMA size_t COMMA off64_t, fd, data, size, offset)

// For reads and writes of several pieces, half of the first one.
static int halved(int fd, const struct iovec* pieces, struct iovec* half) {
  *half = pieces[0];
  half->iov_len = shortened(fd, half->iov_len);
  return 1;
}
#define MOVES_PIECES(name, kind, offset_type, flags_type, flags)                  \
  ssize_t name(int fd, const struct iovec* pieces, int count, offset_type offset flags_type flags) { \
    REAL(ssize_t, name, int, const struct iovec*, int, offset_type flags_type);   \
    struct iovec half;                                                            \
    if (fails_fd(kind, fd, #name)) {                                              \
      if (how != SHORT) return -1;                                                \
      count = halved(fd, pieces, &half);                                          \
      pieces = &half;                                                             \
    }                                                                             \
    return real(fd, pieces, count, offset COMMA_##flags);                         \
  }
#define FLAGS COMMA int
#define COMMA_
#define COMMA_flags , flags
MOVES_PIECES(preadv, READ, off_t, , )
MOVES_PIECES(preadv64, READ, off64_t, , )
MOVES_PIECES(preadv2, READ, off_t, FLAGS, flags)
MOVES_PIECES(preadv64v2, READ, off64_t, FLAGS, flags)
MOVES_PIECES(pwritev, WRITE, off_t, , )
MOVES_PIECES(pwritev64, WRITE, off64_t, , )
MOVES_PIECES(pwritev2, WRITE, off_t, FLAGS, flags)
MOVES_PIECES(pwritev64v2, WRITE, off64_t, FLAGS, flags)

#define ON_FD(name, kind, parameters, real_types, ...)      \
  int name parameters {                                     \
    REAL(int, name, real_types);                            \
    return fails_fd(kind, fd, #name) ? -1 : real(__VA_ARGS__); \
  }
ON_FD(fsync, SYNC, (int fd), int, fd)
ON_FD(fdatasync, SYNC, (int fd), int, fd)
ON_FD(ftruncate, SIZE, (int fd, off_t size), int COMMA off_t, fd, size)
ON_FD(ftruncate64, SIZE, (int fd, off64_t size), int COMMA off64_t, fd, size)
ON_FD(fallocate, SIZE, (int fd, int mode, off_t offset, off_t size), int COMMA int COMMA off_t COMMA off_t, fd, mode, offset,
      size)
ON_FD(fallocate64, SIZE, (int fd, int mode, off64_t offset, off64_t size), int COMMA int COMMA off64_t COMMA off64_t, fd,
      mode, offset, size)
ON_FD(flock, LOCK, (int fd, int operation), int COMMA int, fd, operation)

int posix_fallocate(int fd, off_t offset, off_t size) {
  REAL(int, posix_fallocate, int, off_t, off_t);
  return fails_fd(SIZE, fd, "posix_fallocate") ? error_number : real(fd, offset, size);
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  REAL(int, posix_fallocate64, int, off64_t, off64_t);
  return fails_fd(SIZE, fd, "posix_fallocate64") ? error_number : real(fd, offset, size);
}
// The descriptor is closed in any case, as on Linux.
int close(int fd) {
  REAL(int, close, int);
  int failed = fails_fd(CLOSE, fd, "close");
  int error = errno, result = real(fd);
  if (!failed) return result;
  errno = error;
  return -1;
}

#define ON_PATH(name, kind, parameters, real_types, path, ...)      \
  int name parameters {                                             \
    REAL(int, name, real_types);                                    \
    return fails_at(kind, -1, path, #name) ? -1 : real(__VA_ARGS__); \
  }
ON_PATH(rename, RENAME, (const char* from, const char* to), const char* COMMA const char*, from, from, to)
ON_PATH(renameat, RENAME, (int a, const char* from, int b, const char* to), int COMMA const char* COMMA int COMMA const char*,
        from, a, from, b, to)
ON_PATH(renameat2, RENAME, (int a, const char* from, int b, const char* to, unsigned flags),
        int COMMA const char* COMMA int COMMA const char* COMMA unsigned, from, a, from, b, to, flags)
ON_PATH(unlink, REMOVE, (const char* path), const char*, path, path)
ON_PATH(unlinkat, REMOVE, (int dirfd, const char* path, int flags), int COMMA const char* COMMA int, path, dirfd, path, flags)
ON_PATH(rmdir, REMOVE, (const char* path), const char*, path, path)
ON_PATH(mkdir, FOLDER, (const char* path, mode_t mode), const char* COMMA mode_t, path, path, mode)
DIR* opendir(const char* path) {
  REAL(DIR*, opendir, const char*);
  return fails_at(FOLDER, -1, path, "opendir") ? NULL : real(path);
}

// io_uring has no functions in the C library. Its calls count whatever they are about.
long syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  REAL(long, syscall, long, long, long, long, long, long, long);
  if ((kinds & URING) && (number == SYS_io_uring_setup || number == SYS_io_uring_register) && fails("io_uring")) return -1;
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
