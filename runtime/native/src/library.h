/* One compiled graph: extracted, its headers checked, opened, compared with the manifest, bound to weights by pointer, and called. */
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
  void *views; /* of the constants: backend.h */
} library;

/* `weights` are those of the entry, by number of the manifest's; NULL where the entry has none of that number. */
library *library_open(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, weight *const *weights);
void library_close(library *l);

/* Calls it. The handles of the inputs are the library's from then on. On failure: AOTB_RUN, with no results. `entry` is for the words. */
aotb_status library_run(library *l, const char *entry, tensor_handle *inputs, tensor_handle *outputs);
#endif
