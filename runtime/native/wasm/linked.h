/* The functions of a compiled graph, which is linked with this library. The exporter writes a table of them (exporters/…/toolchain/wasm.py). */
#ifndef AOTB_LINKED_H
#define AOTB_LINKED_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What library.c asks of a graph. A call through a pointer traps unless the types are equal, so these are the types of the definitions. */
#define EACH_FUNCTION(F, prefix)                                                                                                                     \
  F(prefix, AOTInductorModelContainerCreateWithDevice, (void **, size_t, const char *, const char *))                                                \
  F(prefix, AOTInductorModelContainerRun, (void *, void **, size_t, void **, size_t, void *, void *))                                                \
  F(prefix, AOTInductorModelContainerDelete, (void *))                                                                                               \
  F(prefix, AOTInductorGetLastError, (const char **))                                                                                                \
  F(prefix, AOTInductorModelContainerGetNumInputs, (void *, size_t *))                                                                               \
  F(prefix, AOTInductorModelContainerGetNumOutputs, (void *, size_t *))                                                                              \
  F(prefix, AOTInductorModelContainerGetNumConstants, (void *, size_t *))                                                                            \
  F(prefix, AOTInductorModelContainerGetConstantName, (void *, size_t, const char **))                                                               \
  F(prefix, AOTInductorModelContainerGetConstantDataSize, (void *, size_t, size_t *))                                                                \
  F(prefix, AOTInductorModelContainerUpdateUserManagedConstantBufferPairs, (void *, const void *, size_t, bool, bool))

typedef struct {
  const char *name;
  const void *address;
} symbol;

typedef struct {
  const char *prefix; /* of the graph's names */
  symbol symbols[12]; /* ends with one without a name */
} linked_graph;

extern const linked_graph linked_graphs[]; /* ends with a graph without a prefix */

#define DECLARE(prefix, name, types) int32_t prefix##name types;
#define ADDRESS(prefix, name, types) {#name, (const void *)prefix##name},
#define DECLARE_GRAPH(prefix)                                                                                                                        \
  EACH_FUNCTION(DECLARE, prefix)                                                                                                                     \
  extern const char prefix##AOTInductorConstantLooks[];
#define GRAPH(prefix)                                                                                                                                \
  {                                                                                                                                                  \
    #prefix, {                                                                                                                                       \
      EACH_FUNCTION(ADDRESS, prefix) { "AOTInductorConstantLooks", prefix##AOTInductorConstantLooks }                                                \
    }                                                                                                                                                \
  }
#endif
