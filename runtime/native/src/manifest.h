/* The manifest of a package as structs: the fields that C callers need, for entries of kind module, function, grad and step. The names follow the schema,
 * runtime/aot_backward_runtime/format/manifest.py. Entries of recorded passes belong to a Python program and are skipped. */
#ifndef AOTB_MANIFEST_H
#define AOTB_MANIFEST_H
#include "archive.h"
#include "dtypes.h"
#include "expression.h"
#include "json.h"

typedef struct {
  uint32_t count;
  const char **at;
} texts;

typedef struct {
  const char *name;
  const dtype *type;
  bool on_cpu;
  uint32_t rank;
  const expression *shape, *stride; /* in elements */
  const char **shape_texts;
} tensor_spec;

typedef struct {
  uint32_t count;
  tensor_spec *at;
} tensor_specs;

typedef struct {
  const char *name, *label;
  int64_t input, dim, minimum, maximum, scale, offset; /* size = scale * symbol + offset */
  bool bounded;
} symbol_spec;

typedef struct {
  const char *sha256;
  const dtype *type;
  uint32_t rank;
  const int64_t *shape, *stride;
  const char **shape_texts;
  bool filled;
  double fill;
  const char *key;
} weight_spec;

typedef enum { FROM_NOTHING, FROM_RESULT, FROM_INPUT, FROM_SAVED, FROM_COTANGENT, FROM_PARAMETER, FROM_SIZE } origin;

typedef struct {
  origin from;
  uint32_t number;  /* of a result, input, saved tensor or incoming gradient; for a parameter: in the entry's state */
  const char *text; /* from the manifest: "result:3" */
  expression size;  /* of FROM_SIZE */
} source;

typedef struct {
  uint32_t count;
  source *at;
} sources;

typedef struct {
  const char *of; /* "parameter:NAME" or "input:I" */
  source from;    /* FROM_NOTHING: no gradient, as in eager */
  uint32_t cotangent_count;
  const uint32_t *cotangents;
} gradient_spec;

typedef struct {
  const char *library_name;
  struct library_spec *library; /* NULL: no code is called */
  sources operands, outputs, saved;
  texts reads, writes;
  uint32_t gradient_count, consumes_count;
  gradient_spec *gradients;
  const uint32_t *consumes;
} plan_spec;

typedef struct {
  const char *name, *weight_name;
  uint32_t weight;
} constant_spec;

typedef struct {
  const char *member, *metadata, *extern_file;
  uint32_t constant_count;
  constant_spec *constants;
  texts needed, operators;
  const char *glibc, *glibcxx;
} build_spec;

typedef struct library_spec {
  const char *name;
  tensor_specs inputs, outputs;
  uint32_t build_count;
  build_spec *builds; /* one for each target of the package, in order */
} library_spec;

typedef struct {
  const char *name;  /* in the manifest: "module.net.weight" of a step */
  const char *label; /* for callers, as in PyTorch's runtime: "net.weight" */
  const char *weight_name;
  uint32_t weight;
  bool parameter;
} state_spec;

typedef struct {
  const char *mode, *out_tree; /* out_tree: JSON text, not terminated */
  uint32_t out_tree_length;
  tensor_specs inputs, outputs, cotangents;
  uint32_t symbol_count, guard_count;
  symbol_spec *symbols;
  const char **symbol_names;
  expression *guards;
  plan_spec *forward, *backward, *inference, *gradient, *step, *accumulate;
} variant_spec;

typedef struct {
  bool has_low, has_high, low_open, high_open;
  double low, high;
} interval;

typedef struct {
  int64_t group, position;
  const char *key;
  double value;
  uint32_t allowed_count;
  interval *allowed;
} number_spec;

typedef struct {
  const char *key, *state;
  texts parameters;
  int64_t starts_as;
} slot_spec;

typedef struct {
  const char *optimizer, *defaults;
  uint32_t group_count, number_count, slot_count, gradient_count;
  struct {
    texts parameters;
    const char *options;
  } *groups;
  number_spec *numbers;
  slot_spec *slots;
  struct {
    const char *parameter, *state;
  } *gradients;
  plan_spec *update;
  bool fresh, norm, finite, in_place;
} step_spec;

typedef enum { ENTRY_MODULE, ENTRY_FUNCTION, ENTRY_GRAD, ENTRY_STEP } entry_kind;

typedef struct {
  const char *name;
  entry_kind kind;
  bool training; /* training: the mode it is loaded in */
  uint32_t state_count, variant_count;
  state_spec *state;
  variant_spec *variants;
  step_spec *step_of;
  /* of a grad entry: the targets and names of its gradients (the names as JSON text, not terminated); whether the gradient is returned by itself */
  texts wrt;
  const char *names;
  uint32_t names_length;
  bool single;
  const char *metadata; /* JSON text, "{}" if there is none */
  /* "verified": the standalone backend gave the stored results; else the reason, or "" if it was not tried. The same for the further targets, or empty:
   * before format 1.17 there is one for all. */
  const char *standalone;
  texts standalones; /* standalone_for reads both */
} entry_spec;

static inline const char *standalone_for(const entry_spec *e, uint32_t target) {
  return target && e->standalones.count ? e->standalones.at[target - 1] : e->standalone;
}

typedef struct {
  const char *device, *machine, *name;
  texts cpu_flags;
} target_spec;

typedef struct {
  int64_t minor;
  const char *torch, *metadata; /* metadata: JSON text, "{}" if there is none */
  bool has_weights;
  uint32_t target_count, entry_count, library_count, weight_count, member_count;
  target_spec *targets;
  entry_spec *entries;
  library_spec *libraries;
  weight_spec *weights;
  struct {
    const char *name, *sha256;
    uint64_t size;
  } *members;
} manifest;

/* Compares the SHA-256, parses the text, and resolves every reference, including references to archive members. The writer asserted consistency. */
void manifest_read(manifest *m, const archive *z, const char *text, size_t length);

library_spec *manifest_library(const manifest *m, const char *name);
const char *manifest_digest(const manifest *m, const char *name);
#endif
