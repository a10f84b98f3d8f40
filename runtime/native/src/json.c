#define _GNU_SOURCE
#include "json.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* DEEPEST: nesting, by docs/format.md; bounds recursion. FEW: keys that are compared in turn; with more, an object has a hash table. A guess. */
enum { DEEPEST = 64, FEW = 8 };

typedef struct {
  arena *a;
  const char *what, *begin, *at, *end;
  int depth;
  aotb_status status;
  bool python;
  json *stack; /* items of the open arrays and objects */
  size_t used, room;
} reader;

static _Noreturn void wrong(const reader *r, const char *what) {
  arena_fail(r->a, r->status, "%s is not JSON: %s at byte %zu", r->what, what, (size_t)(r->at - r->begin));
}

static void blank(reader *r) {
  while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r')) r->at++;
}

static bool eat(reader *r, char c) {
  if (r->at == r->end || *r->at != c) return false;
  r->at++;
  return true;
}

static unsigned hexadecimal(reader *r) {
  unsigned value = 0;
  if (r->end - r->at < 4) wrong(r, "an escape that is cut short");
  for (int i = 0; i < 4; i++) {
    char c = *r->at++;
    int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) wrong(r, "an escape without four hexadecimal digits");
    value = value << 4 | (unsigned)digit;
  }
  return value;
}

static char *put(char *out, unsigned code) {
  if (code < 0x80) *out++ = (char)code;
  else if (code < 0x800) {
    *out++ = (char)(0xC0 | code >> 6);
    *out++ = (char)(0x80 | (code & 63));
  } else if (code < 0x10000) {
    *out++ = (char)(0xE0 | code >> 12);
    *out++ = (char)(0x80 | (code >> 6 & 63));
    *out++ = (char)(0x80 | (code & 63));
  } else {
    *out++ = (char)(0xF0 | code >> 18);
    *out++ = (char)(0x80 | (code >> 12 & 63));
    *out++ = (char)(0x80 | (code >> 6 & 63));
    *out++ = (char)(0x80 | (code & 63));
  }
  return out;
}

/* Returns the bytes of the UTF-8 character at `p`; 0 if it is invalid: overlong, a surrogate, beyond U+10FFFF, truncated. */
static int width(const unsigned char *p, const unsigned char *end) {
  if (*p < 0x80) return 1;
  int n = *p >= 0xC2 && *p <= 0xDF ? 2 : (*p & 0xF0) == 0xE0 ? 3 : *p >= 0xF0 && *p <= 0xF4 ? 4 : 0;
  if (!n || end - p < n) return 0;
  for (int i = 1; i < n; i++)
    if ((p[i] & 0xC0) != 0x80) return 0;
  if ((*p == 0xE0 && p[1] < 0xA0) || (*p == 0xED && p[1] >= 0xA0) || (*p == 0xF0 && p[1] < 0x90) || (*p == 0xF4 && p[1] >= 0x90)) return 0;
  return n;
}

static const char *string(reader *r, uint32_t *length) {
  if (!eat(r, '"')) wrong(r, "no string");
  const char *close = r->at;
  while (close < r->end && *close != '"') close += *close == '\\' && r->end - close > 1 ? 2 : 1;
  if (close >= r->end) wrong(r, "a string that does not end");
  if ((size_t)(close - r->at) > UINT32_MAX) wrong(r, "a string that is too long");
  char *out = arena_take(r->a, (size_t)(close - r->at) + 1, 1), *w = out; /* an escape is never shorter than its character */
  while (r->at < close) {
    unsigned char c = (unsigned char)*r->at;
    if (c < ' ') wrong(r, "a control character in a string");
    if (c != '\\') {
      int n = width((const unsigned char *)r->at, (const unsigned char *)close);
      if (!n) wrong(r, "bytes that are not UTF-8");
      memcpy(w, r->at, (size_t)n);
      w += n;
      r->at += n;
      continue;
    }
    r->at++;
    switch (*r->at++) {
    case '"': *w++ = '"'; break;
    case '\\': *w++ = '\\'; break;
    case '/': *w++ = '/'; break;
    case 'b': *w++ = '\b'; break;
    case 'f': *w++ = '\f'; break;
    case 'n': *w++ = '\n'; break;
    case 'r': *w++ = '\r'; break;
    case 't': *w++ = '\t'; break;
    case 'u': {
      unsigned code = hexadecimal(r);
      if (code >= 0xD800 && code < 0xDC00 && r->end - r->at > 2 && r->at[0] == '\\' && r->at[1] == 'u') {
        r->at += 2;
        unsigned low = hexadecimal(r);
        if (low < 0xDC00 || low >= 0xE000) wrong(r, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else if (code >= 0xD800 && code < 0xE000) wrong(r, "half of a surrogate pair");
      if (!code) wrong(r, "a zero byte in a string");
      w = put(w, code);
      break;
    }
    default: wrong(r, "an unknown escape");
    }
  }
  r->at = close + 1;
  *length = (uint32_t)(w - out);
  return out;
}

static bool digits(reader *r) {
  const char *begin = r->at;
  while (r->at < r->end && *r->at >= '0' && *r->at <= '9') r->at++;
  return r->at > begin;
}

double json_number(const char *text, const char **end) {
  static locale_t plain; /* the decimal point does not depend on the program's locale */
  if (!plain) {
    locale_t made = newlocale(LC_ALL_MASK, "C", NULL), none = NULL;
    if (!__atomic_compare_exchange_n(&plain, &none, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) freelocale(made);
  }
  return strtod_l(text, (char **)(uintptr_t)end, plain);
}

static json number(reader *r) {
  const char *begin = r->at;
  bool whole = true;
  eat(r, '-');
  const char *first = r->at;
  if (!digits(r)) wrong(r, "no value");
  if (*first == '0' && r->at - first > 1) wrong(r, "a number with a zero before it");
  if (eat(r, '.')) {
    whole = false;
    if (!digits(r)) wrong(r, "a number without digits behind its point");
  }
  if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
    r->at++;
    whole = false;
    if (!eat(r, '-')) eat(r, '+');
    if (!digits(r)) wrong(r, "a number without an exponent's digits");
  }
  int64_t integer = 0;
  for (const char *p = first; whole && p < r->at; p++)
    if (__builtin_mul_overflow(integer, (int64_t)10, &integer) || __builtin_add_overflow(integer, (int64_t)(*p - '0'), &integer)) {
      if (!r->python) wrong(r, "an integer that does not fit 64 bits");
      whole = false;
    }
  json out = {.kind = whole ? JSON_INTEGER : JSON_NUMBER};
  if (whole) {
    out.integer = *begin == '-' ? -integer : integer;
    return out;
  }
  char text[512];
  if ((size_t)(r->at - begin) >= sizeof text) wrong(r, "a number of more than 500 characters");
  memcpy(text, begin, (size_t)(r->at - begin));
  text[r->at - begin] = 0;
  const char *end;
  out.number = json_number(text, &end);
  if (!isfinite(out.number) && !r->python) wrong(r, "a number that is too large");
  return out;
}

static uint32_t hash(const char *key) {
  uint32_t h = 2166136261u;
  for (; *key; key++) h = (h ^ (unsigned char)*key) * 16777619u;
  return h;
}

/* Returns the slots of a table for `count` members: a power of two, at most half of them used. */
static uint32_t slots_for(uint32_t count) {
  uint32_t n = 16;
  while (n < 2 * count) n *= 2;
  return n;
}

static void check_keys(reader *r, json *object) {
  char said[128];
  const json *twice = NULL;
  if (object->count <= FEW) {
    for (uint32_t i = 0; i < object->count; i++)
      for (uint32_t k = 0; k < i; k++)
        if (!strcmp(object->items[i].key, object->items[k].key)) twice = &object->items[i];
  } else {
    uint32_t n = slots_for(object->count), *places = TAKE(r->a, n, uint32_t);
    for (uint32_t i = 0; i < object->count; i++) {
      uint32_t slot = hash(object->items[i].key) & (n - 1);
      for (; places[slot]; slot = (slot + 1) & (n - 1))
        if (!strcmp(object->items[places[slot] - 1].key, object->items[i].key)) twice = &object->items[i];
      places[slot] = i + 1;
    }
    object->places = places;
  }
  if (!twice) return;
  strcpy(said, "the key \"");
  strcat(said, shown(twice->key, strlen(twice->key)));
  strcat(said, "\" occurs twice; the object ends");
  wrong(r, said);
}

static void push(reader *r, json value) {
  if (r->used == r->room) {
    size_t room = r->room ? 2 * r->room : 256;
    json *more = TAKE(r->a, room, json);
    if (r->used) memcpy(more, r->stack, r->used * sizeof *more);
    r->stack = more;
    r->room = room;
  }
  r->stack[r->used++] = value;
}

static json value(reader *r);

static json several(reader *r, bool object) {
  size_t begin = r->used;
  char close = object ? '}' : ']';
  if (++r->depth > DEEPEST) wrong(r, "nested more than 64 deep");
  r->at++;
  blank(r);
  if (!eat(r, close)) {
    do {
      const char *key = NULL;
      uint32_t length;
      blank(r);
      if (object) {
        key = string(r, &length);
        blank(r);
        if (!eat(r, ':')) wrong(r, "no ':' behind a key");
      }
      json item = value(r);
      item.key = key;
      push(r, item);
      blank(r);
    } while (eat(r, ','));
    if (!eat(r, close)) wrong(r, object ? "an object without its '}'" : "an array without its ']'");
  }
  r->depth--;
  size_t count = r->used - begin;
  if (count > 1u << 28) wrong(r, "too many values");
  json out = {.kind = object ? JSON_OBJECT : JSON_ARRAY, .count = (uint32_t)count};
  out.items = TAKE(r->a, count ? count : 1, json);
  if (count) memcpy(out.items, r->stack + begin, count * sizeof *out.items);
  r->used = begin;
  if (object) check_keys(r, &out);
  return out;
}

static bool word(reader *r, const char *text) {
  size_t n = strlen(text);
  if ((size_t)(r->end - r->at) < n || memcmp(r->at, text, n)) return false;
  r->at += n;
  return true;
}

static json special(reader *r) {
  bool negative = eat(r, '-');
  if (!negative && word(r, "NaN")) return (json){.kind = JSON_NUMBER, .number = NAN};
  if (word(r, "Infinity")) return (json){.kind = JSON_NUMBER, .number = negative ? -INFINITY : INFINITY};
  wrong(r, "no value");
}

static json any_value(reader *r) {
  if (r->at == r->end) wrong(r, "it ends");
  if (r->python && (*r->at == 'N' || *r->at == 'I' || (*r->at == '-' && r->end - r->at > 1 && r->at[1] == 'I'))) return special(r);
  switch (*r->at) {
  case '{': return several(r, true);
  case '[': return several(r, false);
  case '"': {
    json out = {.kind = JSON_STRING};
    out.text = string(r, &out.count);
    return out;
  }
  case 't':
    if (word(r, "true")) return (json){.kind = JSON_TRUE};
    break;
  case 'f':
    if (word(r, "false")) return (json){.kind = JSON_FALSE};
    break;
  case 'n':
    if (word(r, "null")) return (json){.kind = JSON_NULL};
    break;
  default: return number(r);
  }
  wrong(r, "no value");
}

static json value(reader *r) {
  blank(r);
  const char *begin = r->at;
  json out = any_value(r);
  out.raw = begin;
  out.raw_length = (uint32_t)(r->at - begin);
  return out;
}

static json read_all(reader r) {
  if ((size_t)(r.end - r.begin) > UINT32_MAX) wrong(&r, "more than 4 GB of it");
  json out = value(&r);
  blank(&r);
  if (r.at < r.end) wrong(&r, "more than one value");
  return out;
}

json json_read_as(arena *a, aotb_status status, const char *what, const char *text, size_t length) {
  return read_all((reader){.a = a, .what = what, .begin = text, .at = text, .end = text + length, .status = status});
}

json json_read(arena *a, const char *what, const char *text, size_t length) { return json_read_as(a, AOTB_FORMAT, what, text, length); }

json json_read_python(arena *a, aotb_status status, const char *what, const char *text, size_t length) {
  return read_all((reader){.a = a, .what = what, .begin = text, .at = text, .end = text + length, .status = status, .python = true});
}

const json *json_get(const json *object, const char *key) {
  if (object->kind != JSON_OBJECT) return NULL;
  if (!object->places) {
    for (uint32_t i = 0; i < object->count; i++)
      if (!strcmp(object->items[i].key, key)) return &object->items[i];
    return NULL;
  }
  uint32_t n = slots_for(object->count);
  for (uint32_t slot = hash(key) & (n - 1); object->places[slot]; slot = (slot + 1) & (n - 1)) {
    const json *item = &object->items[object->places[slot] - 1];
    if (!strcmp(item->key, key)) return item;
  }
  return NULL;
}

const char *json_words(const json *value) {
  static const char *const words[] = {"null", "false", "true", "an integer", "a number", "a string", "an array", "an object"};
  return value ? words[value->kind] : "nothing";
}
