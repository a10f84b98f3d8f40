/* The cache of extracted native code: a private folder, keyed by content, shared with the Python runtime. It is $AOT_BACKWARD_CACHE, else
 * ~/.cache/aot-backward, else a folder of this process. */
#ifndef AOTB_CACHE_H
#define AOTB_CACHE_H
#include "words.h"

typedef struct {
  const char *name, *sha256;
  const uint8_t *bytes;
  size_t size;
} cached_file;

/* Writes these files, unless they exist with these digests, into one folder that only this user can write. Returns the path of the first file. */
const char *cache_place(arena *a, const cached_file *files, uint32_t count);
#endif
