/* aot_backward.h: run packages of aot-backward from C, without Python and without PyTorch's headers.
 *
 * A package holds entries: gradient functions ("grad"), functions without gradients ("function"), training steps ("step") and modules ("module").
 * aotb_open reads a package, aotb_get makes a function from an entry, aotb_run calls the function:
 *
 *     aotb_package *package;
 *     aotb_function *energy;
 *     if (aotb_open("energy.pt2", NULL, &package) || aotb_get(package, "energy", &energy)) return fail(aotb_error());
 *     int64_t shape[] = {12, 3};
 *     DLTensor positions = {.data = x, .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = shape}, results[2] = {{0}};
 *     if (aotb_run(energy, &positions, 1, results, 2)) return fail(aotb_error());
 *     const double *value = results[0].data, *gradient = results[1].data;
 *
 * Tensors are DLPack's DLTensor, on the CPU. Every function that can fail returns an aotb_status. After a failure aotb_error() returns the message.
 * Nothing has changed unless it says so. A function object serves one caller at a time; several objects may run in parallel.
 *
 * NULL for a required argument is an error: AOTB_INPUT, or 0 or NULL from a function without a status. aotb_close and aotb_free ignore NULL. */
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

#ifndef DLPACK_DLPACK_H_ /* the part of dlpack.h that is used; to use dlpack.h itself, include it first */
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
  AOTB_IO,           /* the file or the code cache cannot be read or written */
  AOTB_FORMAT,       /* the package is damaged or inconsistent */
  AOTB_INCOMPATIBLE, /* built for another processor, glibc or torch; or the backend does not exist */
  AOTB_SIGNATURE,    /* not signed by the requested key */
  AOTB_NAME,         /* unknown entry, tensor or number */
  AOTB_INPUT,        /* the package does not support an argument; nothing has changed */
  AOTB_STATE,        /* a saved state is damaged or does not match */
  AOTB_RUN,          /* the compiled code reported an error */
  AOTB_MEMORY
} aotb_status;

/* Returns the message of this thread's last failed call. It names the object, the expected and the actual value, and the next step. */
const char *aotb_error(void);

/* --- packages --------------------------------------------------------------------------------------------------------------------------------- */

typedef struct aotb_package aotb_package; /* an open file; threads may share it */

typedef struct {
  /* The library that compiled code calls: "standalone" (no PyTorch, fewer operators), "libtorch", or a path to libtorch_cpu.so. NULL:
   * $AOT_BACKWARD_BACKEND if it is set, else standalone. */
  const char *backend;
  /* A PEM file. The package must have a signature file by that key next to it (docs/signatures.md). NULL: no signature is required. */
  const char *public_key;
  /* Not 0: standalone also runs entries that export did not compare with eager on it. */
  int unchecked;
} aotb_options;

/* Reads and checks archive and manifest, and chooses the code for this processor. Runs no code. `options` may be NULL. */
aotb_status aotb_open(const char *path, const aotb_options *options, aotb_package **out);
void aotb_close(aotb_package *package); /* its functions stay valid */

/* The SHA-256 of the manifest, as 64 hexadecimal digits. The manifest has the digests of all other members, so it identifies the package. */
const char *aotb_digest(const aotb_package *package);

/* Number, names and kinds ("grad", "function", "step" or "module") of the entries that C can call. */
uint32_t aotb_entries(const aotb_package *package);
const char *aotb_entry(const aotb_package *package, uint32_t number);
const char *aotb_entry_kind(const aotb_package *package, uint32_t number);

/* The author's metadata of an entry, or of the package if `entry` is NULL: a JSON object as text, "{}" if there is none. It belongs to the package.
 * NULL if the package has no such entry. */
const char *aotb_metadata(const aotb_package *package, const char *entry);

/* Seeds the random numbers (dropout, rand) of all functions like torch.manual_seed: the same seed gives eager's masks. */
aotb_status aotb_seed(aotb_package *package, uint64_t seed);
/* Sets the number of threads of compiled code in this process; at least 1. */
aotb_status aotb_threads(aotb_package *package, int count);

/* --- functions -------------------------------------------------------------------------------------------------------------------------------- */

typedef struct aotb_function aotb_function;

/* Makes a function. It has its own weights, which are verified by their digests. The first call that needs its native code opens it. */
aotb_status aotb_get(aotb_package *package, const char *entry, aotb_function **out);
void aotb_free(aotb_function *function);

const char *aotb_kind(const aotb_function *function); /* "grad", "function", "step" or "module" */
/* Selects the variants of training mode (dropout, batch statistics) or of evaluation mode. The default is the exported mode. */
aotb_status aotb_train(aotb_function *function, int training);

/* Runs only that variant, such as one exported for fewer gradients. -1, the default: any variant. */
aotb_status aotb_use_variant(aotb_function *function, int64_t variant);

typedef enum { AOTB_INPUTS, AOTB_OUTPUTS, AOTB_GRADIENTS, AOTB_INCOMING, AOTB_STATES, AOTB_NUMBERS } aotb_part;

typedef struct {
  const char *name; /* "x", "output[0]"; for a gradient, its target; for a number, the option: "lr" */
  DLDataType dtype;
  int32_t ndim;
  const char *const *shape; /* each size as text: "3", or an expression of dynamic sizes: "s0", "2*s0 + 1" */
  int64_t group, position;  /* for a number: its parameter group, and its index in an option that is a list (else -1) */
  double value;             /* for a number */
} aotb_description;

/* The number of variants (exported examples) of the entry, and the tensors of one kind in a variant. All variants share state and numbers. */
uint32_t aotb_variants(const aotb_function *function);
uint32_t aotb_count(const aotb_function *function, uint32_t variant, aotb_part part);
aotb_status aotb_describe(const aotb_function *function, uint32_t variant, aotb_part part, uint32_t number, aotb_description *out);

/* The structure of a variant's results as in Python, for bindings: JSON text, a tree of docs/format.md, whose tensors have the numbers of the results
 * of aotb_run. A grad entry has the pair of outputs and gradients. The text belongs to the function. */
const char *aotb_structure(aotb_function *function, uint32_t variant);

/* Evaluates a size of aotb_describe or aotb_structure, such as "2*s0 + 1", for the inputs of the last call. */
aotb_status aotb_size(aotb_function *function, const char *size, int64_t *out);

/* Not 0: converts inputs of another dtype. Floating-point and integer dtypes of other widths are converted, integers to floating-point numbers, and
 * real to complex numbers. Anything else is an error, and so is an integer that does not fit. A variant of the given dtypes is preferred. The default is
 * 0: another dtype is an error. */
aotb_status aotb_convert(aotb_function *function, int convert);

/* Multiplies the gradient of that name (AOTB_GRADIENTS) by a factor in every call: -1 makes a force of the gradient of an energy. */
aotb_status aotb_scale(aotb_function *function, const char *gradient, double factor);

/* Calls the function. It runs the first variant whose dtypes, shapes and mode match (aotb_served returns its number). Inputs with other strides are
 * copied.
 *
 * `outputs` receives the results in the order of aotb_describe: the outputs, then the gradients of a grad entry. It may be shorter than the results.
 * If variants have different numbers of results, it may have room for the most: `ndim` of the rest becomes -1.
 * If `data` is NULL, every field is filled in. Data, shape and strides then belong to the function until its next call, which may receive the same
 * array again. If you set `data` and `shape`, they are compared with the result's dtype and shape before anything runs, and the result is copied.
 * If a gradient is None in Python, `ndim` becomes -1.
 *
 * A step makes one update. A module and a function compute without gradients. */
aotb_status aotb_run(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);

/* The number of the variant that the last call ran. */
uint32_t aotb_served(const aotb_function *function);

/* Runs a module's forward, to be followed by aotb_backward, with the variant with the most gradients (or aotb_use_variant). Do not change the inputs
 * in between. Another call of this function may replace them; the backward is then an error. */
aotb_status aotb_forward(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);
/* Runs the backward of the last forward with the incoming gradients (AOTB_INCOMING). `data` of NULL means no gradient. */
aotb_status aotb_backward(aotb_function *function, const DLTensor *incoming, uint32_t incoming_count, DLTensor *gradients, uint32_t gradient_count);

/* A parameter, buffer or optimizer state tensor, by its name in aotb_describe. Parameters and buffers have the names of PyTorch's state_dict(). `view` shares its memory, which lives as long as the function. You may write to it between calls. */
aotb_status aotb_state(aotb_function *function, const char *name, DLTensor *view);

/* --- training steps --------------------------------------------------------------------------------------------------------------------------- */

/* Accumulates the gradients of these inputs; aotb_update uses the sum. Both need an entry that was exported with accumulate=True. */
aotb_status aotb_accumulate(aotb_function *function, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count);
aotb_status aotb_update(aotb_function *function);
aotb_status aotb_zero_grad(aotb_function *function); /* drops the accumulated gradients */

/* Sets a hyperparameter such as lr, by group and option as in aotb_describe; group -1: clip_norm, clip_value. */
aotb_status aotb_number(aotb_function *function, int64_t group, const char *key, int64_t position, double value);

typedef struct {
  int64_t updates, skipped, accumulated; /* updates made; updates skipped because a gradient was not finite; calls since the last update */
  double grad_norm;                      /* of the last update, before clipping; NaN if the step does not compute it */
  double loss_scale;                     /* 1 if the step does not scale its loss */
} aotb_progress;
aotb_status aotb_progress_of(const aotb_function *function, aotb_progress *out);

/* Saves the whole training state to a file, or writes nothing. C and Python (step.save()) read each other's files. `extra`: your own JSON, such as an
 * epoch, or NULL. */
aotb_status aotb_save(aotb_function *function, const char *path, const char *extra);
/* Restores the state bit for bit, including random numbers. A file that does not match changes nothing. If `extra` is not NULL, it receives the JSON
 * of the file, valid until the next call. */
aotb_status aotb_resume(aotb_function *function, const char *path, const char **extra);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
