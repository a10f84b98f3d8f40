/* Locates the members of a package: a zip file in the restricted form of docs/format.md, section 1. */
#ifndef AOTB_ARCHIVE_H
#define AOTB_ARCHIVE_H
#include "words.h"

typedef struct {
  const char *name; /* below the top folder */
  uint64_t offset, size;
  uint32_t crc;
} member;

typedef struct {
  arena *a;
  int file;
  uint64_t size;
  member *members; /* by name */
  uint32_t count;
} archive;

/* Reads the directory of the file. The file stays open. */
void archive_read(archive *z, arena *a, int file);
const member *archive_find(const archive *z, const char *name);
/* Reads exactly `size` bytes from `offset`. */
void archive_bytes(const archive *z, uint64_t offset, void *out, size_t size);
#endif
