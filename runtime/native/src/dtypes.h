/* PyTorch's dtypes: their names and sizes, and their codes in DLPack, safetensors and AOTInductor. */
#ifndef AOTB_DTYPES_H
#define AOTB_DTYPES_H
#include "words.h"

typedef struct {
  const char *name;   /* "float32" */
  const char *stored; /* in safetensors: "F32"; complex128 is stored as F64 with a last dimension of 2 */
  int32_t code;       /* c10::ScalarType, which has not changed since 2018 */
  int32_t size;       /* bytes */
  DLDataType dl;
} dtype;

/* NULL if the name is unknown. */
const dtype *dtype_named(const char *name);
const dtype *dtype_coded(int32_t code);
const dtype *dtype_of_dl(DLDataType type);
/* Returns the name of the dtype for a message; of an unknown one, its code and bits. */
const char *dtype_words(DLDataType type, char out[64]);
/* Returns the bytes of an element by safetensors' name; 0 if it is unknown. */
int32_t dtype_stored_size(const char *name);
#endif
