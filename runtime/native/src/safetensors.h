/* The header of a safetensors file, parsed strictly: the tensors must cover the data without gaps. */
#ifndef AOTB_SAFETENSORS_H
#define AOTB_SAFETENSORS_H
#include "dtypes.h"
#include "json.h"

typedef struct {
  const char *name;
  const char *type; /* in the format's notation: "F32" */
  uint32_t rank;
  const int64_t *shape;
  uint64_t begin, end; /* byte offsets in the data */
} stored;

typedef struct {
  uint32_t count;
  stored *at;    /* in the order of their offsets */
  json metadata; /* an object of strings, or null */
} stored_tensors;

/* `text`: the header's JSON. `data`: the number of bytes behind it. Errors have `status` and begin with `what`. */
stored_tensors safetensors_read(arena *a, aotb_status status, const char *what, const char *text, size_t length, uint64_t data);
const stored *safetensors_find(const stored_tensors *all, const char *name);
/* Returns whether the tensor has that dtype and shape; complex128 is stored as F64 with a last dimension of 2. */
bool safetensors_is(const stored *s, const dtype *type, uint32_t rank, const int64_t *shape);
#endif
