/* Functions that glibc exports since 2.33 and that were inline before, so that no older version exists to bind to. They are local to the library. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef OLDER_GLIBC /* only if the kernel's struct equals the C library's */
int stat(const char *restrict path, struct stat *restrict status) { return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, 0); }
int fstat(int file, struct stat *status) { return (int)syscall(SYS_fstat, file, status); }
int fstat64(int file, struct stat64 *status) { return (int)syscall(SYS_fstat, file, status); }
#endif
