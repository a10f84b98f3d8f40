#define _POSIX_C_SOURCE 200809L
#include "words.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char words[1024];

const char *aotb_error(void) { return words; }

/* Names of a package may be any text. Replaces bytes that move a cursor, colour a terminal or change the writing direction by question marks. */
static void make_printable(char *text) {
  for (unsigned char *c = (unsigned char *)text; *c; c++) {
    int length = 0;
    if (*c < 32 || *c == 127) length = 1;
    else if (*c == 0xC2 && c[1] >= 0x80 && c[1] <= 0x9F) length = 2;
    else if (*c == 0xE2 && c[1] == 0x80 && ((c[2] >= 0x8B && c[2] <= 0x8F) || (c[2] >= 0xA8 && c[2] <= 0xAE))) length = 3;
    else if (*c == 0xE2 && c[1] == 0x81 && c[2] >= 0xA0 && c[2] <= 0xAF) length = 3;
    for (int i = 0; i < length; i++) c[i] = '?';
  }
}

aotb_status aotb_fail(aotb_status status, const char *format, ...) {
  char said[sizeof words]; /* the arguments may include an earlier message */
  va_list list;
  va_start(list, format);
  vsnprintf(said, sizeof said, format, list);
  va_end(list);
  make_printable(said);
  memcpy(words, said, sizeof words);
  return status;
}

_Noreturn void arena_fail(arena *a, aotb_status status, const char *format, ...) {
  char said[768];
  va_list list;
  va_start(list, format);
  vsnprintf(said, sizeof said, format, list);
  va_end(list);
  if (a->path) aotb_fail(status, "package %s: %s", a->path, said);
  else aotb_fail(status, "%s", said);
  longjmp(*a->back, (int)status);
}

typedef struct block {
  struct block *before;
  size_t used, size;
  _Alignas(16) unsigned char bytes[];
} block;

void *arena_take(arena *a, size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2) arena_fail(a, AOTB_MEMORY, "%zu elements of %zu bytes", count, size);
  bytes = (bytes + 15) & ~(size_t)15;
  block *last = a->last;
  if (!last || last->size - last->used < bytes) {
    size_t room = bytes > 1 << 14 ? bytes : 1 << 14;
    last = calloc(1, sizeof *last + room);
    if (!last) arena_fail(a, AOTB_MEMORY, "cannot allocate %zu bytes of memory", room);
    last->size = room;
    last->before = a->last;
    a->last = last;
  }
  void *taken = last->bytes + last->used;
  last->used += bytes;
  return taken;
}

char *arena_text(arena *a, const char *text, size_t length) {
  char *out = arena_take(a, length + 1, 1);
  memcpy(out, text, length);
  return out;
}

char *arena_print(arena *a, const char *format, ...) {
  va_list list, again;
  va_start(list, format);
  va_copy(again, list);
  char none[1];
  int length = vsnprintf(none, sizeof none, format, list);
  char *out = arena_take(a, (size_t)length + 1, 1);
  vsnprintf(out, (size_t)length + 1, format, again);
  va_end(again);
  va_end(list);
  return out;
}

void arena_free(arena *a) {
  while (a->last) {
    block *before = a->last->before;
    free(a->last);
    a->last = before;
  }
}

const char *shown(const char *text, size_t length) {
  static _Thread_local char places[8][84];
  static _Thread_local unsigned turn;
  char *out = places[turn++ % 8];
  size_t n = length < 80 ? length : 77;
  for (size_t i = 0; i < n; i++) out[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
  strcpy(out + n, length < 80 ? "" : "...");
  return out;
}
