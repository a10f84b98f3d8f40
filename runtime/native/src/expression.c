#include "expression.h"

#include <string.h>

/* LONGEST: characters, by docs/format.md. DEEPEST bounds the parser's recursion, STACK the memory of an evaluation; both are guesses. */
enum { LONGEST = 10000, DEEPEST = 100, STACK = 128 };

enum {
  NUMBER,
  SYMBOL,
  NEGATE,
  NOT,
  ADD,
  SUBTRACT,
  MULTIPLY,
  DIVIDE,
  MODULO,
  EQUAL,
  UNEQUAL,
  LESS,
  LESS_EQUAL,
  GREATER,
  GREATER_EQUAL,
  LARGER,
  SMALLER,
  /* jumps, with their target: */ UNLESS,
  IF,
  UNLESS_BOTH /* + a comparison: not the last of its chain */
};

typedef struct {
  arena *a;
  const char *text, *at;
  const char *const *symbols;
  uint32_t count;
  int64_t *code;
  uint32_t used, room;
  int depth, height; /* of nesting; of the value stack */
} reader;

static _Noreturn void wrong(const reader *r, const char *what) {
  arena_fail(r->a, AOTB_FORMAT, "the expression '%s' %s", shown(r->text, strlen(r->text)), what);
}

static uint32_t emit(reader *r, int64_t op, int64_t operand, int change) {
  if (r->used + 2 > r->room) {
    uint32_t room = r->room ? 2 * r->room : 16;
    int64_t *more = TAKE(r->a, room, int64_t);
    if (r->used) memcpy(more, r->code, r->used * sizeof *more);
    r->code = more;
    r->room = room;
  }
  r->code[r->used] = op;
  r->code[r->used + 1] = operand;
  r->used += 2;
  r->height += change;
  if (r->height > STACK) wrong(r, "is nested too deep");
  return r->used - 1;
}

static bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
static bool digit(char c) { return c >= '0' && c <= '9'; }

static void blank(reader *r) {
  while (*r->at == ' ' || *r->at == '\t') r->at++;
}

/* Consumes `token` if it comes next. A word must end with it, and '<' does not match '<='. */
static bool eat(reader *r, const char *token) {
  blank(r);
  size_t n = strlen(token);
  if (strncmp(r->at, token, n)) return false;
  if (letter(*token) && (letter(r->at[n]) || digit(r->at[n]))) return false;
  if ((!strcmp(token, "<") || !strcmp(token, ">")) && r->at[1] == '=') return false;
  if (!strcmp(token, "*") && r->at[1] == '*') return false;
  r->at += n;
  return true;
}

static void either(reader *r);

static void deeper(reader *r) {
  if (++r->depth > DEEPEST) wrong(r, "is nested too deep");
}

static void atom(reader *r) {
  deeper(r);
  blank(r);
  if (eat(r, "-")) {
    atom(r);
    emit(r, NEGATE, 0, 0);
  } else if (eat(r, "(")) {
    either(r);
    if (!eat(r, ")")) wrong(r, "lacks a ')'");
  } else if (digit(*r->at)) {
    int64_t value = 0;
    const char *begin = r->at;
    for (; digit(*r->at); r->at++)
      if (__builtin_mul_overflow(value, (int64_t)10, &value) || __builtin_add_overflow(value, (int64_t)(*r->at - '0'), &value))
        wrong(r, "holds a number that does not fit 64 bits");
    if (letter(*r->at) || (*begin == '0' && r->at - begin > 1)) wrong(r, "holds no decimal number");
    emit(r, NUMBER, value, 1);
  } else if (eat(r, "max") || eat(r, "min")) {
    int64_t op = r->at[-1] == 'x' ? LARGER : SMALLER;
    if (!eat(r, "(")) wrong(r, "names max or min without calling it");
    either(r);
    int arguments = 1;
    for (; eat(r, ","); arguments++) {
      either(r);
      emit(r, op, 0, -1);
    }
    if (arguments < 2 || !eat(r, ")")) wrong(r, "calls max or min with less than two arguments, or does not end the call");
  } else if (letter(*r->at)) {
    const char *begin = r->at;
    while (letter(*r->at) || digit(*r->at)) r->at++;
    size_t n = (size_t)(r->at - begin);
    uint32_t i = 0;
    while (i < r->count && (strlen(r->symbols[i]) != n || memcmp(r->symbols[i], begin, n))) i++;
    if (i == r->count) wrong(r, arena_print(r->a, "needs the unknown symbol '%s'", shown(begin, n)));
    emit(r, SYMBOL, i, 1);
  } else wrong(r, "is invalid: docs/format.md lists the allowed parts");
  r->depth--;
}

static void product(reader *r) {
  atom(r);
  for (;;) {
    int64_t op = eat(r, "//") ? DIVIDE : eat(r, "*") ? MULTIPLY : eat(r, "%") ? MODULO : -1;
    if (op < 0) return;
    atom(r);
    emit(r, op, 0, -1);
  }
}

static void sum(reader *r) {
  product(r);
  for (;;) {
    int64_t op = eat(r, "+") ? ADD : eat(r, "-") ? SUBTRACT : -1;
    if (op < 0) return;
    product(r);
    emit(r, op, 0, -1);
  }
}

static int64_t comparison_sign(reader *r) {
  return eat(r, "==")   ? EQUAL
         : eat(r, "!=") ? UNEQUAL
         : eat(r, "<=") ? LESS_EQUAL
         : eat(r, ">=") ? GREATER_EQUAL
         : eat(r, "<")  ? LESS
         : eat(r, ">")  ? GREATER
                        : -1;
}

/* Parses a < b < c: `b` is compared twice, and a false comparison skips the rest. */
static void comparison(reader *r) {
  uint32_t ends[64], n = 0;
  sum(r);
  for (int64_t op = comparison_sign(r); op >= 0;) {
    sum(r);
    int64_t next = comparison_sign(r);
    if (next < 0) {
      emit(r, op, 0, -1);
      break;
    }
    if (n == 64) wrong(r, "is a chain of more than 64 comparisons");
    ends[n++] = emit(r, UNLESS_BOTH + op, 0, -1);
    op = next;
  }
  for (uint32_t i = 0; i < n; i++) r->code[ends[i]] = r->used;
}

static void negation(reader *r) {
  if (eat(r, "not")) {
    deeper(r);
    negation(r);
    emit(r, NOT, 0, 0);
    r->depth--;
  } else comparison(r);
}

static void both(reader *r) {
  negation(r);
  while (eat(r, "and")) {
    uint32_t end = emit(r, UNLESS, 0, -1);
    negation(r);
    r->code[end] = r->used;
  }
}

static void either(reader *r) {
  deeper(r);
  both(r);
  while (eat(r, "or")) {
    uint32_t end = emit(r, IF, 0, -1);
    both(r);
    r->code[end] = r->used;
  }
  r->depth--;
}

expression expression_read(arena *a, const char *text, const char *const *symbols, uint32_t count) {
  reader r = {.a = a, .text = text, .at = text, .symbols = symbols, .count = count};
  if (strlen(text) > LONGEST) wrong(&r, "has more than 10,000 characters");
  either(&r);
  blank(&r);
  if (*r.at) wrong(&r, "continues after its end");
  return (expression){.text = text, .code = r.code, .length = r.used};
}

expression expression_number(arena *a, int64_t number) { return (expression){.text = arena_print(a, "%lld", (long long)number), .number = number}; }

/* Divides like Python, rounding towards minus infinity. */
static bool divide(int64_t x, int64_t y, int64_t *quotient, int64_t *rest) {
  if (y == 0 || (x == INT64_MIN && y == -1)) return false;
  *quotient = x / y;
  *rest = x % y;
  if (*rest && (*rest < 0) != (y < 0)) {
    *quotient -= 1;
    *rest += y;
  }
  return true;
}

static int64_t compare(int64_t op, int64_t x, int64_t y) {
  switch (op) {
  case EQUAL: return x == y;
  case UNEQUAL: return x != y;
  case LESS: return x < y;
  case LESS_EQUAL: return x <= y;
  case GREATER: return x > y;
  default: return x >= y;
  }
}

bool expression_value(const expression *e, const int64_t *values, int64_t *out) {
  if (!e->code) {
    *out = e->number;
    return true;
  }
  int64_t stack[STACK + 2], other;
  int n = 1; /* the first slot is unused, so that there is always one below */
  stack[0] = 0;
  for (uint32_t at = 0; at < e->length; at += 2) {
    int64_t op = e->code[at], operand = e->code[at + 1], *top = &stack[n - 1];
    switch (op) {
    case NUMBER: stack[n++] = operand; break;
    case SYMBOL: stack[n++] = values[operand]; break;
    case NEGATE:
      if (__builtin_sub_overflow((int64_t)0, *top, top)) return false;
      break;
    case NOT: *top = !*top; break;
    case ADD:
      n--;
      if (__builtin_add_overflow(top[-1], *top, &top[-1])) return false;
      break;
    case SUBTRACT:
      n--;
      if (__builtin_sub_overflow(top[-1], *top, &top[-1])) return false;
      break;
    case MULTIPLY:
      n--;
      if (__builtin_mul_overflow(top[-1], *top, &top[-1])) return false;
      break;
    case DIVIDE:
      n--;
      if (!divide(top[-1], *top, &top[-1], &other)) return false;
      break;
    case MODULO:
      n--;
      if (!divide(top[-1], *top, &other, &top[-1])) return false;
      break;
    case LARGER:
      n--;
      if (*top > top[-1]) top[-1] = *top;
      break;
    case SMALLER:
      n--;
      if (*top < top[-1]) top[-1] = *top;
      break;
    case UNLESS:
      if (*top) n--;
      else at = (uint32_t)operand - 2;
      break;
    case IF:
      if (*top) at = (uint32_t)operand - 2;
      else n--;
      break;
    default:
      if (op < UNLESS) {
        n--;
        top[-1] = compare(op, top[-1], *top);
      } else { /* inside a chain */
        n--;
        if (compare(op - UNLESS_BOTH, top[-1], *top)) top[-1] = *top;
        else {
          top[-1] = 0;
          at = (uint32_t)operand - 2;
        }
      }
    }
  }
  *out = stack[1];
  return true;
}
