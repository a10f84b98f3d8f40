/* PyTorch's dtypes: their names, sizes, and what DLPack, safetensors and AOTInductor call them. */
#ifndef AOTB_DTYPES_H
#define AOTB_DTYPES_H
#include "words.h"

typedef struct {
  const char *name;   /* "float32" */
  const char *stored; /* in safetensors: "F32"; complex128 is stored as F64 with a last dimension of 2 */
  int32_t code;       /* of c10::ScalarType, which has not changed since 2018 */
  int32_t size;       /* bytes */
  DLDataType dl;
} dtype;

/* NULL where there is none of that name. */
const dtype *dtype_named(const char *name);
const dtype *dtype_coded(int32_t code);
/* Bytes of an element by the name of safetensors; 0 where it is unknown. */
int32_t dtype_stored_size(const char *name);
#endif
