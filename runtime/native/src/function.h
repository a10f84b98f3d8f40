/* An entry that is ready to be called: its weights, and the buffers of each variant. */
#ifndef AOTB_FUNCTION_H
#define AOTB_FUNCTION_H
#include "library.h"

/* A tensor with the strides that the code was compiled for. */
typedef struct {
  void *data;
  int64_t *shape, *stride;
  void *scratch; /* a copy, if the caller's tensor has other strides */
  size_t room;
} fitted;

/* Memory of a result that the caller may still point at. */
typedef struct {
  uintptr_t begin, end;
} lent;

typedef struct {
  const plan_spec *plan;
  library *lib;                      /* NULL until the first call */
  tensor_handle *operands, *results; /* results: of the last call; NULL: freed */
  lent *lent;
  uint32_t lent_count;
} runnable;

typedef struct {
  const variant_spec *spec;
  runnable forward, backward, inference, gradient, step, accumulate;
  int64_t *values; /* of the symbols, in the last call */
  fitted *inputs, *incoming;
  bool *defined;         /* whether each incoming gradient was given */
  bool saved;            /* a forward has run and its saved tensors are valid */
  double *factors;       /* of its gradients */
  const char *structure; /* JSON text; NULL: not asked for yet */
} variant;

typedef struct {
  double *numbers;                                /* the vector that compiled code reads */
  int64_t updates, skipped, accumulated, tracker; /* tracker: updates since the loss scale changed */
  double grad_norm, scale, growth_factor, backoff_factor;
  int64_t growth_interval;
  int scale_number; /* index into the list; -1: none */
  bool fresh, inconsistent;
  runnable update;
  const json **options; /* for each group: its object in the state file, with the saved numbers */
  const char *extra;
} training;

struct aotb_function {
  arena a;
  struct aotb_package *package;
  const entry_spec *entry;
  weight **weights; /* indexed as in the manifest; NULL: this entry does not use it */
  variant *variants;
  int64_t (*layouts)[2][64]; /* shapes and strides of the results that the caller sees */
  fitted *scaled;            /* memory of results that were multiplied by a factor, for each of them */
  uint32_t layout_count;
  variant *forwarded; /* the last one that ran its forward */
  uint32_t served;    /* the variant of the last call */
  int64_t only;       /* the only variant that may run; -1: any */
  bool in_training, busy;
  bool converts, converting; /* whether inputs of another dtype are converted, and whether the present match allows it */
  bool sized;                /* the sizes of the variant `served` are those of the last call */
  training step;
  char words[512];
};

/* Returns the first variant that matches the inputs, or the matching one with the most gradients, and sets its sizes and inputs. NULL: none matches;
 * aotb_error() returns the reasons. */
variant *function_match(struct aotb_function *f, const DLTensor *inputs, uint32_t count, bool most_gradients);

/* Runs a call: opens the library if needed, runs it, and fills `outputs` with outputs, then gradients. */
aotb_status function_call(struct aotb_function *f, variant *v, runnable *r, DLTensor *outputs, uint32_t count);

/* Sets the incoming gradients of a variant; missing ones are zeros. Returns false if one does not match; f->words has the reason. */
bool function_fit_incoming(struct aotb_function *f, variant *v, const DLTensor *incoming, uint32_t count);

/* Admit one caller at a time. */
aotb_status function_enter(struct aotb_function *f);
aotb_status function_leave(struct aotb_function *f, aotb_status status);

/* Opens the library of a plan if it is not open yet. */
aotb_status function_open(struct aotb_function *f, runnable *r);

/* training.c */
void training_begin(struct aotb_function *f);
aotb_status training_run(struct aotb_function *f, variant *v, DLTensor *outputs, uint32_t count);
/* Before the first update: fills each state that starts as one of the numbers with that number. */
void training_follow(struct aotb_function *f);
void training_accumulated(struct aotb_function *f, int64_t calls);
/* Returns the reason why a number may not be set, or NULL. */
const char *training_number_problem(struct aotb_function *f, uint32_t number, double value);
void training_set_number(struct aotb_function *f, uint32_t number, double value);
#endif
