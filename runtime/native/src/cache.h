/* Where native code is extracted: a private folder, by content, which Python's runtime shares. $AOT_BACKWARD_CACHE, else ~/.cache/aot-backward, else
 * one of this process. */
#ifndef AOTB_CACHE_H
#define AOTB_CACHE_H
#include "words.h"

typedef struct {
  const char *name, *sha256;
  const uint8_t *bytes;
  size_t size;
} cached_file;

/* The path of the first of these files, which lie side by side in a folder of this user's alone and have these digests. */
const char *cache_place(arena *a, const cached_file *files, uint32_t count);
#endif
