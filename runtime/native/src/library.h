/* One compiled graph. It is extracted, its headers are checked, it is opened, compared with the manifest, bound to weights by pointer, and called. */
#ifndef AOTB_LIBRARY_H
#define AOTB_LIBRARY_H
#include "backend.h"
#include "package.h"
#include "weights.h"

typedef struct {
  const library_spec *spec;
  const build_spec *build;
  const backend *backend;
  void *code, *container;
  int32_t (*run)(void *container, tensor_handle *inputs, size_t, tensor_handle *outputs, size_t, void *stream, void *executor);
  int32_t (*destroy)(void *container), (*last_error)(const char **words);
  struct extern_calls *externs; /* operators that it calls by name; NULL: none */
  tensor_handle *constants;
  uint32_t constant_count;
  void *views; /* views of the constants: backend.h */
} library;

/* `weights` belong to the entry and are indexed as in the manifest; NULL if the entry does not use that weight. */
library *library_open(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, weight *const *weights);
void library_close(library *l);

/* Runs the library, which takes ownership of the input handles. A failure is AOTB_RUN, without results. `entry` is for the message. */
aotb_status library_run(library *l, const char *entry, tensor_handle *inputs, tensor_handle *outputs);
#endif
