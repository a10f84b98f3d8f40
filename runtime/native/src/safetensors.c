#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define WRONG(a, status, text, ...) arena_fail(a, status, "%s: " text, what, __VA_ARGS__)

static int by_place(const void *x, const void *y) {
  const stored *a = x, *b = y;
  return a->begin != b->begin ? (a->begin < b->begin ? -1 : 1) : a->end != b->end ? (a->end < b->end ? -1 : 1) : 0;
}

static bool is_size(const json *value) { return value->kind == JSON_INTEGER && value->integer >= 0; }

static stored read_one(arena *a, aotb_status status, const char *what, const json *item) {
  const json *type = json_get(item, "dtype"), *shape = json_get(item, "shape"), *offsets = json_get(item, "data_offsets");
  stored out = {.name = item->key};
  bool right = item->kind == JSON_OBJECT && item->count == 3 && type && type->kind == JSON_STRING && shape && shape->kind == JSON_ARRAY &&
               shape->count <= 64 && offsets && offsets->kind == JSON_ARRAY && offsets->count == 2 && is_size(&offsets->items[0]) &&
               is_size(&offsets->items[1]) && offsets->items[1].integer >= offsets->items[0].integer;
  int64_t bytes = right ? dtype_stored_size(type->text) : 0, elements = 1, *sizes = TAKE(a, right ? shape->count + 1u : 1, int64_t);
  right = right && bytes > 0;
  bool empty = false;
  for (uint32_t d = 0; right && d < shape->count; d++) {
    right = is_size(&shape->items[d]);
    sizes[d] = shape->items[d].integer;
    empty = empty || (right && !sizes[d]);
    right = right && !__builtin_mul_overflow(elements, sizes[d] ? sizes[d] : 1, &elements) && elements < (int64_t)1 << 60;
  }
  if (empty) elements = 0;
  right = right && offsets->items[1].integer - offsets->items[0].integer == elements * bytes;
  if (!right) WRONG(a, status, "tensor '%s' is not a dtype, a shape and two offsets", shown(item->key, strlen(item->key)));
  out.type = type->text;
  out.rank = shape->count;
  out.shape = sizes;
  out.begin = (uint64_t)offsets->items[0].integer;
  out.end = (uint64_t)offsets->items[1].integer;
  return out;
}

stored_tensors safetensors_read(arena *a, aotb_status status, const char *what, const char *text, size_t length, uint64_t data) {
  json all = json_read_as(a, status, what, text, length);
  if (all.kind != JSON_OBJECT) WRONG(a, status, "its header is %s", json_words(&all));
  stored_tensors out = {0, TAKE(a, all.count + 1u, stored), {.kind = JSON_NULL}};
  for (uint32_t i = 0; i < all.count; i++) {
    const json *item = &all.items[i];
    if (strcmp(item->key, "__metadata__")) {
      out.at[out.count++] = read_one(a, status, what, item);
      continue;
    }
    bool right = item->kind == JSON_OBJECT;
    for (uint32_t k = 0; right && k < item->count; k++) right = item->items[k].kind == JSON_STRING;
    if (!right) WRONG(a, status, "its %s is not an object of strings", "__metadata__");
    out.metadata = *item;
  }
  qsort(out.at, out.count, sizeof *out.at, by_place);
  uint64_t expected = 0;
  for (uint32_t i = 0; i < out.count; i++) {
    if (out.at[i].begin != expected)
      WRONG(a, status, "tensor '%s' begins at byte %" PRIu64 ", expected %" PRIu64 ", where the one before ends",
            shown(out.at[i].name, strlen(out.at[i].name)), out.at[i].begin, expected);
    expected = out.at[i].end;
  }
  if (expected != data) WRONG(a, status, "tensors take %" PRIu64 " bytes, but there are %" PRIu64, expected, data);
  return out;
}

const stored *safetensors_find(const stored_tensors *all, const char *name) {
  for (uint32_t i = 0; i < all->count; i++)
    if (!strcmp(all->at[i].name, name)) return &all->at[i];
  return NULL;
}

bool safetensors_is(const stored *s, const dtype *type, uint32_t rank, const int64_t *shape) {
  bool twofold = type->size == 16;
  if (strcmp(s->type, type->stored) || s->rank != rank + twofold || (twofold && s->shape[rank] != 2)) return false;
  for (uint32_t d = 0; d < rank; d++)
    if (s->shape[d] != shape[d]) return false;
  return true;
}
