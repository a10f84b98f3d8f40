/* Sizes and guards: Python's arithmetic of integers and symbols, read once and computed with every overflow seen. docs/format.md, section 3. */
#ifndef AOTB_EXPRESSION_H
#define AOTB_EXPRESSION_H
#include "words.h"

typedef struct {
  const char *text;    /* as it stands in the manifest: "2*s0 + 1"; of a number, its digits */
  int64_t number;      /* where there is no code: the value itself */
  const int64_t *code; /* instructions and what they need, by turns; NULL: a number */
  uint32_t length;
} expression;

/* `symbols`: the names that may stand in it; any other is an error, as is what is no expression. */
expression expression_read(arena *a, const char *text, const char *const *symbols, uint32_t count);
expression expression_number(arena *a, int64_t number);

/* False where it divides by zero or a value does not fit 64 bits. `values`: of the symbols, in the order of their names. */
bool expression_value(const expression *e, const int64_t *values, int64_t *out);
#endif
