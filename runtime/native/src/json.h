/* JSON, strictly: UTF-8, no key twice, no NaN, integers within 64 bits, a limit of nesting. */
#ifndef AOTB_JSON_H
#define AOTB_JSON_H
#include "words.h"

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json json;
struct json {
  json_kind kind;
  uint32_t count;  /* items of an array, members of an object, bytes of a string */
  const char *key; /* of a member of an object, terminated; without a zero byte in it, as every text here */
  union {
    int64_t integer;
    double number;
    const char *text; /* terminated */
    json *items;      /* of arrays and objects, in their order */
  };
  const uint32_t *places; /* of a large object: a hash table of member numbers + 1 */
  const char *raw;        /* where it stands in the text, and how long it is there */
  uint32_t raw_length;
};

/* The value in the text. `what` is what errors call it: "manifest.json". */
json json_read(arena *a, const char *what, const char *text, size_t length);
/* The same with errors of another status. */
json json_read_as(arena *a, aotb_status status, const char *what, const char *text, size_t length);
/* As Python writes it: NaN, Infinity and -Infinity are numbers, and integers beyond 64 bits become such. */
json json_read_python(arena *a, aotb_status status, const char *what, const char *text, size_t length);
/* The member of an object; NULL where there is none. */
const json *json_get(const json *object, const char *key);
/* The number at the beginning of a text, whatever the locale, and where it ends. */
double json_number(const char *text, const char **end);
/* The kind in words: "an object". */
const char *json_words(const json *value);
#endif
