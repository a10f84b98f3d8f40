/* Sizes and guards: Python's arithmetic of integers and symbols, parsed once and evaluated with overflow checks. docs/format.md, section 3. */
#ifndef AOTB_EXPRESSION_H
#define AOTB_EXPRESSION_H
#include "words.h"

typedef struct {
  const char *text;    /* from the manifest: "2*s0 + 1"; for a number, its digits */
  int64_t number;      /* the value, if `code` is NULL */
  const int64_t *code; /* pairs of instruction and operand; NULL: a number */
  uint32_t length;
} expression;

/* Fails if the text is not an expression or contains a name that is not in `symbols`. */
expression expression_read(arena *a, const char *text, const char *const *symbols, uint32_t count);
expression expression_number(arena *a, int64_t number);

/* Returns false if it divides by zero or a value exceeds 64 bits. `values`: one for each symbol, in the order of `symbols`. */
bool expression_value(const expression *e, const int64_t *values, int64_t *out);
#endif
