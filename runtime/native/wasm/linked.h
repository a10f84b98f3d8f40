/* The functions of a compiled graph, which is linked with this library. The exporter writes a table of them (exporters/…/toolchain/wasm.py). */
#ifndef AOTB_LINKED_H
#define AOTB_LINKED_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GRAPH_FUNCTIONS = 11 };
typedef struct {
  const char *prefix;                     /* of the graph's names */
  const void *functions[GRAPH_FUNCTIONS]; /* in the order of `names` in linked.c */
} linked_graph;

extern const linked_graph linked_graphs[]; /* ends with a graph without a prefix */

#define DECLARE_GRAPH(prefix)                                                                                                                        \
  int32_t prefix##AOTInductorModelContainerCreateWithDevice(void **, size_t, const char *, const char *);                                            \
  int32_t prefix##AOTInductorModelContainerRun(void *, void **, size_t, void **, size_t, void *, void *);                                            \
  int32_t prefix##AOTInductorModelContainerDelete(void *);                                                                                           \
  int32_t prefix##AOTInductorGetLastError(const char **);                                                                                            \
  int32_t prefix##AOTInductorModelContainerGetNumInputs(void *, size_t *);                                                                           \
  int32_t prefix##AOTInductorModelContainerGetNumOutputs(void *, size_t *);                                                                          \
  int32_t prefix##AOTInductorModelContainerGetNumConstants(void *, size_t *);                                                                        \
  int32_t prefix##AOTInductorModelContainerGetConstantName(void *, size_t, const char **);                                                           \
  int32_t prefix##AOTInductorModelContainerGetConstantDataSize(void *, size_t, size_t *);                                                            \
  int32_t prefix##AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void *, const void *, size_t, bool, bool);                           \
  extern const char prefix##AOTInductorConstantLooks[];

#define GRAPH(prefix)                                                                                                                                \
  {                                                                                                                                                  \
    #prefix, {                                                                                                                                       \
      (const void *)prefix##AOTInductorModelContainerCreateWithDevice, (const void *)prefix##AOTInductorModelContainerRun,                           \
          (const void *)prefix##AOTInductorModelContainerDelete, (const void *)prefix##AOTInductorGetLastError,                                      \
          (const void *)prefix##AOTInductorModelContainerGetNumInputs, (const void *)prefix##AOTInductorModelContainerGetNumOutputs,                 \
          (const void *)prefix##AOTInductorModelContainerGetNumConstants, (const void *)prefix##AOTInductorModelContainerGetConstantName,            \
          (const void *)prefix##AOTInductorModelContainerGetConstantDataSize,                                                                        \
          (const void *)prefix##AOTInductorModelContainerUpdateUserManagedConstantBufferPairs, prefix##AOTInductorConstantLooks                      \
    }                                                                                                                                                \
  }
#endif
