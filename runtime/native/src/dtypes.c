#include "dtypes.h"

#include <stdio.h>
#include <string.h>

static const dtype all[] = {
    {"uint8", "U8", 0, 1, {1, 8, 1}},           {"int8", "I8", 1, 1, {0, 8, 1}},      {"int16", "I16", 2, 2, {0, 16, 1}},
    {"int32", "I32", 3, 4, {0, 32, 1}},         {"int64", "I64", 4, 8, {0, 64, 1}},   {"float16", "F16", 5, 2, {2, 16, 1}},
    {"float32", "F32", 6, 4, {2, 32, 1}},       {"float64", "F64", 7, 8, {2, 64, 1}}, {"complex64", "C64", 9, 8, {5, 64, 1}},
    {"complex128", "F64", 10, 16, {5, 128, 1}}, {"bool", "BOOL", 11, 1, {6, 8, 1}},   {"bfloat16", "BF16", 15, 2, {4, 16, 1}},
    {"uint16", "U16", 27, 2, {1, 16, 1}},       {"uint32", "U32", 28, 4, {1, 32, 1}}, {"uint64", "U64", 29, 8, {1, 64, 1}},
};

const dtype *dtype_named(const char *name) {
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(all[i].name, name)) return &all[i];
  return NULL;
}

const dtype *dtype_coded(int32_t code) {
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i].code == code) return &all[i];
  return NULL;
}

const dtype *dtype_of_dl(DLDataType t) {
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i].dl.code == t.code && all[i].dl.bits == t.bits && all[i].dl.lanes == t.lanes) return &all[i];
  return NULL;
}

const char *dtype_words(DLDataType t, char out[64]) {
  const dtype *found = dtype_of_dl(t);
  if (found) return found->name;
  snprintf(out, 64, "an unknown dtype (%u bits, %u lanes, code %u)", t.bits, t.lanes, t.code);
  return out;
}

int32_t dtype_stored_size(const char *name) {
  if (!strncmp(name, "F8_", 3)) return 1;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(all[i].stored, name) && all[i].size < 16) return all[i].size;
  return 0;
}
