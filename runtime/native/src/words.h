/* Status and message of an error, and memory that is freed with a package.
 *
 * Files are read under a setjmp. arena_fail stores the message and jumps to `back`. Everything that was allocated meanwhile lies in the arena, so
 * nothing leaks and no function has to undo its work. */
#ifndef AOTB_WORDS_H
#define AOTB_WORDS_H
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../include/aot_backward.h"

#define PRINTF(text, first) __attribute__((format(printf, text, first)))

/* Stores the message for aotb_error() in this thread and returns the status. */
aotb_status aotb_fail(aotb_status status, const char *format, ...) PRINTF(2, 3);

/* Ends a public function if a required pointer is NULL. `name` is the argument's name in the header; `expected` describes a valid argument. */
#define REQUIRE(pointer, name, expected)                                                                                                             \
  if (!(pointer)) return aotb_fail(AOTB_INPUT, "%s: " name ": expected " expected ", got NULL", __func__)
/* The same for functions without a status: they return 0 or NULL. */
#define REQUIRE_OR_NOTHING(pointer, name, expected)                                                                                                  \
  do {                                                                                                                                               \
    if (pointer) break;                                                                                                                              \
    aotb_fail(AOTB_INPUT, "%s: " name ": expected " expected ", got NULL", __func__);                                                                \
    return 0;                                                                                                                                        \
  } while (0)
#define A_PACKAGE "one that aotb_open gave"
#define A_FUNCTION "one that aotb_get gave"

typedef struct {
  struct block *last;
  jmp_buf *back;    /* target of a failure; set while a file is read */
  const char *path; /* of the package that errors name; NULL: none */
} arena;

/* The message begins with the path of the package, if it is set. */
_Noreturn void arena_fail(arena *a, aotb_status status, const char *format, ...) PRINTF(3, 4);

/* Returns zeroed memory, aligned to 16 bytes, until arena_free. Fails if there is not enough, or if count * size overflows. */
void *arena_take(arena *a, size_t count, size_t size);
char *arena_text(arena *a, const char *text, size_t length);
char *arena_print(arena *a, const char *format, ...) PRINTF(2, 3);
void arena_free(arena *a);

#define TAKE(arena, count, type) ((type *)arena_take(arena, count, sizeof(type)))

/* Returns text of a file for a message: at most 80 bytes, with '?' for bytes that are not printable ASCII. Eight buffers are used in turn. */
const char *shown(const char *text, size_t length);
#endif
