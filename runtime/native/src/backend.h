/* What stands behind compiled code: the functions of AOTInductor's C interface that it calls, and that make the tensors it is called with. */
#ifndef AOTB_BACKEND_H
#define AOTB_BACKEND_H
#include "words.h"

typedef void *tensor_handle;

typedef struct backend {
  const char *name; /* "libtorch", "standalone" */
  char *path;
  void *library;
  bool standalone;
  int torch[2];               /* major and minor of libtorch; 0, 0 where the backend is not libtorch */
  const char *(*error)(void); /* words of the last failure in this thread; NULL: it has none */
  int32_t (*from_blob)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype, int32_t device,
                       int32_t index, tensor_handle *out);
  int32_t (*drop)(tensor_handle);
  int32_t (*data)(tensor_handle, void **);
  int32_t (*sizes)(tensor_handle, int64_t **);
  int32_t (*strides)(tensor_handle, int64_t **);
  /* Whether it has an operator that is called by name; NULL: it has them all. */
  int32_t (*serves)(const char *name, const char *overload);
  /* Of the standalone backend: the views that compiled code makes of its constants and does not drop; else NULL. */
  void *(*views_begin)(void);
  void (*views_end)(void), (*views_drop)(void *);
} backend;

/* The backend of that name, opened once in a process: "libtorch", a path to libtorch_cpu.so, "standalone", or NULL for what $AOT_BACKWARD_BACKEND names,
 * else standalone. */
const backend *backend_open(arena *a, const char *which);

/* The random numbers of the process. Fails where the backend does not say how. */
void backend_seed(arena *a, const backend *b, uint64_t seed);
/* The state of the generator as PyTorch's get_rng_state() has it: the bytes, in the arena. */
const uint8_t *backend_random(arena *a, const backend *b, size_t *size);
void backend_set_random(arena *a, const backend *b, const uint8_t *state, size_t size);

void backend_threads(const backend *b, int count);
#endif
