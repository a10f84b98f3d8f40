/* An entry that is ready to be called: its weights, and of each variant what a call works in. */
#ifndef AOTB_FUNCTION_H
#define AOTB_FUNCTION_H
#include "library.h"

/* A tensor as compiled code gets it: of the strides that it was compiled for. */
typedef struct {
  void *data;
  int64_t *shape, *stride;
  void *scratch; /* where the caller's has other strides */
  size_t room;
} fitted;

/* Memory of a result that the caller may still point at. */
typedef struct {
  uintptr_t begin, end;
} lent;

typedef struct {
  const plan_spec *plan;
  library *lib;                      /* NULL until the first call */
  tensor_handle *operands, *results; /* results: of the last call; NULL: given back */
  lent *lent;
  uint32_t lent_count;
} runnable;

typedef struct {
  const variant_spec *spec;
  runnable forward, backward, inference, gradient, step, accumulate;
  int64_t *values; /* of its symbols, in the last call */
  fitted *inputs, *incoming;
  bool *defined; /* which incoming gradients there were */
  bool saved;    /* a forward has run, and its saved tensors are there */
} variant;

typedef struct {
  double *numbers;                                /* the vector that compiled code reads */
  int64_t updates, skipped, accumulated, tracker; /* tracker: updates since the loss scale changed */
  double grad_norm, scale, growth_factor, backoff_factor;
  int64_t growth_interval;
  int scale_number; /* of the list; -1: none */
  bool fresh, inconsistent;
  runnable update;
  const json **options; /* of each group: what the state file says of it, the numbers as they were */
  const char *extra;
} training;

struct aotb_function {
  arena a;
  struct aotb_package *package;
  const entry_spec *entry;
  weight **weights; /* by number of the manifest's; NULL: not of this entry */
  variant *variants;
  int64_t (*layouts)[2][64]; /* shapes and strides of the results that the caller sees */
  uint32_t layout_count;
  variant *forwarded; /* whose forward ran last */
  uint32_t served;    /* the variant of the last call */
  int64_t only;       /* the variant that alone may serve a call; -1: any may */
  bool in_training, busy;
  training step;
  char words[512];
};

/* Compares inputs with the variants, and returns the first that serves them, or the one with the most gradients, its sizes and inputs set; NULL:
 * aotb_error() says why none does. */
variant *function_match(struct aotb_function *f, const DLTensor *inputs, uint32_t count, bool most_gradients);

/* One call from C: opens the library where it is not, runs it, and gives the results out. `gradients` are behind the outputs. */
aotb_status function_call(struct aotb_function *f, variant *v, runnable *r, DLTensor *outputs, uint32_t count);

/* Sets the incoming gradients of a variant: zeros where there is none. False: f->words says why one does not fit. */
bool function_fit_incoming(struct aotb_function *f, variant *v, const DLTensor *incoming, uint32_t count);

/* One caller at a time. */
aotb_status function_enter(struct aotb_function *f);
aotb_status function_leave(struct aotb_function *f, aotb_status status);

/* Opens the library of a plan where it is not open yet. */
aotb_status function_open(struct aotb_function *f, runnable *r);

/* training.c */
void training_begin(struct aotb_function *f);
aotb_status training_run(struct aotb_function *f, variant *v, DLTensor *outputs, uint32_t count);
/* Until the first update every element of some state is a number of the list: writes it. */
void training_follow(struct aotb_function *f);
void training_accumulated(struct aotb_function *f, int64_t calls);
/* Why a number may not be set, or NULL, and setting it. */
const char *training_number_problem(struct aotb_function *f, uint32_t number, double value);
void training_set_number(struct aotb_function *f, uint32_t number, double value);
#endif
