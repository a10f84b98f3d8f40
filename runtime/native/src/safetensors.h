/* The header of a safetensors file, read strictly: every tensor's place, which together are all of the data, without a gap. */
#ifndef AOTB_SAFETENSORS_H
#define AOTB_SAFETENSORS_H
#include "dtypes.h"
#include "json.h"

typedef struct {
  const char *name;
  const char *type; /* as the format writes it: "F32" */
  uint32_t rank;
  const int64_t *shape;
  uint64_t begin, end; /* bytes in the data */
} stored;

typedef struct {
  uint32_t count;
  stored *at;    /* in the order of their bytes */
  json metadata; /* an object of strings, or null */
} stored_tensors;

/* `text`: the header's JSON. `data`: bytes of the data behind it. Any error has `status`, and begins with `what`. */
stored_tensors safetensors_read(arena *a, aotb_status status, const char *what, const char *text, size_t length, uint64_t data);
const stored *safetensors_find(const stored_tensors *all, const char *name);
/* Whether it is a tensor of that dtype and shape; complex128 is stored as F64 with a last dimension of 2. */
bool safetensors_is(const stored *s, const dtype *type, uint32_t rank, const int64_t *shape);
#endif
