/* What the headers of a shared library say, read before the dynamic linker may see it. */
#ifndef AOTB_ELF_H
#define AOTB_ELF_H
#include "words.h"

typedef struct {
  const char **needed; /* whatever the linker would open */
  uint32_t needed_count;
  bool executable_stack;
  int glibc[3], glibcxx[3]; /* the highest versions that it asks for; 0, 0, 0: none */
} elf;

/* Of an x86-64 shared library; anything else, or a header that points outside of it, is an error. `name` is for messages. */
elf elf_read(arena *a, const char *name, const uint8_t *bytes, size_t size);

/* "2.34" as 2, 34, 0; false where it is no such text. */
bool version_read(const char *text, int out[3]);
int version_order(const int *one, const int *other);
#endif
