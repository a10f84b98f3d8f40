/* Strict JSON: UTF-8, no duplicate keys, no NaN, 64-bit integers, limited nesting. */
#ifndef AOTB_JSON_H
#define AOTB_JSON_H
#include "words.h"

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json json;
struct json {
  json_kind kind;
  uint32_t count;  /* items of an array, members of an object, bytes of a string */
  const char *key; /* of a member of an object; terminated, without zero bytes, like every text here */
  union {
    int64_t integer;
    double number;
    const char *text; /* terminated */
    json *items;      /* of arrays and objects, in file order */
  };
  const uint32_t *places; /* for a large object: a hash table of member numbers + 1 */
  const char *raw;        /* its source text; raw_length is its length */
  uint32_t raw_length;
};

/* Parses the text. Errors call it `what`: "manifest.json". */
json json_read(arena *a, const char *what, const char *text, size_t length);
/* Parses the text; errors have the given status. */
json json_read_as(arena *a, aotb_status status, const char *what, const char *text, size_t length);
/* Parses JSON of Python: NaN, Infinity and -Infinity are numbers, and integers beyond 64 bits become floating-point numbers. */
json json_read_python(arena *a, aotb_status status, const char *what, const char *text, size_t length);
/* Returns the member of an object; NULL if it is missing. */
const json *json_get(const json *object, const char *key);
/* Parses the number at the beginning of a text, independent of the locale. Sets `end` behind it. */
double json_number(const char *text, const char **end);
/* Returns the name of the kind: "an object". */
const char *json_words(const json *value);
#endif
