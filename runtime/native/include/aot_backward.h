/* aot_backward.h: packages of aot-backward from C, without Python and without PyTorch's headers.
 *
 * A package holds entries: gradient functions ("grad"), training steps ("step") and modules ("module"). aotb_open reads one, aotb_get makes a function
 * of an entry, aotb_run calls it:
 *
 *     aotb_package *package;
 *     aotb_function *energy;
 *     if (aotb_open("energy.pt2", NULL, &package) || aotb_get(package, "energy", &energy)) return fail(aotb_error());
 *     int64_t shape[] = {12, 3};
 *     DLTensor positions = {.data = x, .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = shape}, results[2] = {{0}};
 *     if (aotb_run(energy, &positions, 1, results, 2)) return fail(aotb_error());
 *     const double *value = results[0].data, *gradient = results[1].data;
 *
 * Tensors are DLPack's DLTensor, on the CPU. Every function that can fail returns an aotb_status; then aotb_error() has the words, and nothing has
 * changed unless it says so. A function object serves one caller at a time; several may run in parallel.
 *
 * NULL where an argument is needed is an error too: AOTB_INPUT, or 0 or NULL from a function that returns no status. aotb_close and aotb_free do
 * nothing then. */
#ifndef AOT_BACKWARD_H
#define AOT_BACKWARD_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#ifndef DLPACK_DLPACK_H_ /* the part of dlpack.h that is used; include dlpack.h first to have its own */
typedef struct {
  int32_t device_type, device_id;
} DLDevice; /* 1: CPU */
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType; /* code 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool */
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
#endif

typedef enum {
  AOTB_OK,
  AOTB_IO,           /* the file, or the cache of code, cannot be read or written */
  AOTB_FORMAT,       /* the package is damaged, or contradicts itself */
  AOTB_INCOMPATIBLE, /* built for another processor, glibc or torch; or there is no such backend */
  AOTB_SIGNATURE,    /* not signed by the key that was asked for */
  AOTB_NAME,         /* no such entry, tensor or number */
  AOTB_INPUT,        /* an argument that the package does not serve: nothing has changed */
  AOTB_STATE,        /* a saved state that is damaged, or does not fit */
  AOTB_RUN,          /* the compiled code reported an error */
  AOTB_MEMORY
} aotb_status;

/* What went wrong in the last call of this thread that failed: names the thing, what came, what was expected, and the next step. */
const char *aotb_error(void);

/* --- packages --------------------------------------------------------------------------------------------------------------------------------- */

typedef struct aotb_package aotb_package; /* an open file; threads may share it */

typedef struct {
  /* What runs beneath the compiled code: "standalone", which needs no PyTorch and has fewer operators, "libtorch", or a path to libtorch_cpu.so; NULL:
   * $AOT_BACKWARD_BACKEND, else standalone. */
  const char *backend;
  /* A PEM file: the package must be signed by that key, in a file beside it (docs/signatures.md); NULL: no signature is asked for. */
  const char *public_key;
  /* Not 0: standalone also runs entries that were not compared with eager on it when they were exported. */
  int unchecked;
} aotb_options;

/* Reads and checks archive and manifest, and chooses the code that fits this processor. Nothing is run. `options` may be NULL. */
aotb_status aotb_open(const char *path, const aotb_options *options, aotb_package **out);
void aotb_close(aotb_package *package); /* functions made of it live on */

/* The entries that can be called from C: how many, their names, and their kinds: "grad", "step" or "module". */
uint32_t aotb_entries(const aotb_package *package);
const char *aotb_entry(const aotb_package *package, uint32_t number);
const char *aotb_entry_kind(const aotb_package *package, uint32_t number);

/* Seeds the random numbers (dropout, rand) of all functions, as torch.manual_seed: the same seed gives eager's masks. */
aotb_status aotb_seed(aotb_package *package, uint64_t seed);
/* How many threads compiled code of this process uses; at least 1. */
aotb_status aotb_threads(aotb_package *package, int count);

/* --- functions -------------------------------------------------------------------------------------------------------------------------------- */

typedef struct aotb_function aotb_function;

/* A function with weights of its own, verified by their digests. Its native code is opened by the first call that needs it. */
aotb_status aotb_get(aotb_package *package, const char *entry, aotb_function **out);
void aotb_free(aotb_function *function);

const char *aotb_kind(const aotb_function *function); /* "grad", "step" or "module" */
/* Serves calls from the variants of training mode (dropout, statistics of the batch), or of evaluation. At first as it was exported. */
aotb_status aotb_train(aotb_function *function, int training);

/* Serves calls from that variant alone, such as one exported for fewer gradients; -1: from any, as at first. */
aotb_status aotb_use_variant(aotb_function *function, int64_t variant);

typedef enum { AOTB_INPUTS, AOTB_OUTPUTS, AOTB_GRADIENTS, AOTB_INCOMING, AOTB_STATES, AOTB_NUMBERS } aotb_part;

typedef struct {
  const char *name; /* "x", "output[0]"; of a gradient, what it is of; of a number, the option: "lr" */
  DLDataType dtype;
  int32_t ndim;
  const char *const *shape; /* each size as text: "3", or an expression of dynamic sizes: "s0", "2*s0 + 1" */
  int64_t group, position;  /* of a number: of which parameter group, and its place in an option that is a list (else -1) */
  double value;             /* of a number: what it is */
} aotb_description;

/* How many variants the entry has (examples that it was exported for), and of a variant the tensors of a kind; state and numbers are the entry's. */
uint32_t aotb_variants(const aotb_function *function);
uint32_t aotb_count(const aotb_function *function, uint32_t variant, aotb_part part);
aotb_status aotb_describe(const aotb_function *function, uint32_t variant, aotb_part part, uint32_t number, aotb_description *out);

/* Calls it. The first variant that serves the inputs runs: dtypes, shapes and the mode decide (aotb_served tells which). Inputs of other strides are
 * copied.
 *
 * `outputs` get the results: the outputs, and of a grad entry the gradients behind them, in the order of aotb_describe. There may be fewer than there
 * are results. One whose `data` is NULL is filled in whole: data, shape and strides are the function's until its next call, which may be given the
 * same array again, to be filled in anew. One with `data` and `shape` of the caller's own is compared with the result's dtype and shape before
 * anything runs, and the result is copied into it. Where there is no gradient (None in Python), `ndim` becomes -1.
 *
 * A step makes one update. A module computes without gradients. */
aotb_status aotb_run(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);

/* The variant that served the last call. */
uint32_t aotb_served(const aotb_function *function);

/* Of a module: the forward of a backward, by the variant with the most gradients (or aotb_use_variant). The inputs must stay as they are until then. */
aotb_status aotb_forward(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);
/* The backward of the last forward, with the gradients of the outputs (AOTB_INCOMING); one whose `data` is NULL is none at all. */
aotb_status aotb_backward(aotb_function *function, const DLTensor *incoming, uint32_t incoming_count, DLTensor *gradients, uint32_t gradient_count);

/* A parameter, buffer or tensor of the optimizer's state: the memory itself, which lives as long as the function. It may be written between calls. */
aotb_status aotb_state(aotb_function *function, const char *name, DLTensor *view);

/* --- training steps --------------------------------------------------------------------------------------------------------------------------- */

/* Adds the gradients of these inputs up; aotb_update uses them all. Both need an entry that was exported with accumulate=True. */
aotb_status aotb_accumulate(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);
aotb_status aotb_update(aotb_function *function);
aotb_status aotb_zero_grad(aotb_function *function); /* drops what was accumulated */

/* Sets a number that a schedule moves, by group and option as aotb_describe gives them; group -1: clip_norm, clip_value. */
aotb_status aotb_number(aotb_function *function, int64_t group, const char *key, int64_t position, double value);

typedef struct {
  int64_t updates, skipped, accumulated; /* updates made; those skipped because a gradient was not finite; calls since the last update */
  double grad_norm;                      /* of the last update, before clipping; NaN where the step has none */
  double loss_scale;                     /* 1 where the step has none */
} aotb_progress;
aotb_status aotb_progress_of(const aotb_function *function, aotb_progress *out);

/* Writes the whole training to a file, or nothing: what step.save() of Python writes, and either reads the other's. `extra`: JSON of the caller's own (an
 * epoch), or NULL. */
aotb_status aotb_save(aotb_function *function, const char *path, const char *extra);
/* Restores it bit for bit, the random numbers too; a file that does not fit changes nothing. `extra`, if not NULL, becomes its JSON, until the next call. */
aotb_status aotb_resume(aotb_function *function, const char *path, const char **extra);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
