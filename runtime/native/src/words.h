/* Status and words of an error, and memory that goes with a package.
 *
 * What is read from a file is read under a jump: arena_fail goes back to where `back` was set, with the words kept, and everything that was taken
 * meanwhile lies in the arena. So nothing is lost, and no function below has to undo its work. */
#ifndef AOTB_WORDS_H
#define AOTB_WORDS_H
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../include/aot_backward.h"

#define PRINTF(text, first) __attribute__((format(printf, text, first)))

/* Keeps the words for aotb_error() of this thread, and returns the status. */
aotb_status aotb_fail(aotb_status status, const char *format, ...) PRINTF(2, 3);

/* Ends a function of the header if a pointer that it needs is NULL. `name` is the argument's in the header; `expected` says what to pass. */
#define REQUIRE(pointer, name, expected)                                                                                                             \
  if (!(pointer)) return aotb_fail(AOTB_INPUT, "%s: " name ": expected " expected ", got NULL", __func__)
/* In a function that returns no status: its result is then 0 or NULL. */
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
  jmp_buf *back;    /* where a failure goes; set while something is read */
  const char *path; /* of the package that errors are about; NULL: of none */
} arena;

/* The words begin with the path of the package, if there is one. */
_Noreturn void arena_fail(arena *a, aotb_status status, const char *format, ...) PRINTF(3, 4);

/* Zeroed memory, at 16 bytes, until arena_free. Fails where there is none, or where count * size overflows. */
void *arena_take(arena *a, size_t count, size_t size);
char *arena_text(arena *a, const char *text, size_t length);
char *arena_print(arena *a, const char *format, ...) PRINTF(2, 3);
void arena_free(arena *a);

#define TAKE(arena, count, type) ((type *)arena_take(arena, count, sizeof(type)))

/* Text of a file as it may be shown: at most 80 bytes, and '?' for what is no printable ASCII. In one of eight places, by turns. */
const char *shown(const char *text, size_t length);
#endif
