/* The headers of a shared library, read before the dynamic linker opens it. */
#ifndef AOTB_ELF_H
#define AOTB_ELF_H
#include "words.h"

typedef struct {
  const char **needed; /* all files that the linker would open */
  uint32_t needed_count;
  bool executable_stack;
  int glibc[3], glibcxx[3]; /* the highest required versions; 0, 0, 0: none */
} elf;

/* Reads an x86-64 shared library. Another file, or a header that points outside of the file, is an error. `name` is for messages. */
elf elf_read(arena *a, const char *name, const uint8_t *bytes, size_t size);

/* Reads "2.34" as 2, 34, 0. Returns false if the text is not a version. */
bool version_read(const char *text, int out[3]);
int version_order(const int *one, const int *other);
#endif
