/* The supported operators that compiled code calls by name, with libtorch's stable C interface (torch/csrc/stable/c/shim.h). */
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  size_t count, room;
  uint64_t *at;
} list;

CORE int32_t torch_new_list_reserve_size(size_t room, list **out) {
  list *l = calloc(1, sizeof *l);
  if (l && !(l->at = malloc(sizeof *l->at * (room ? room : 1)))) {
    free(l);
    l = NULL;
  }
  if (!l) return core_fail("no memory for a list");
  l->room = room ? room : 1;
  *out = l;
  return 0;
}

CORE int32_t torch_list_push_back(list *l, uint64_t value) {
  if (l->count == l->room) {
    uint64_t *more = realloc(l->at, sizeof *more * 2 * l->room);
    if (!more) return core_fail("no memory for a list");
    l->at = more;
    l->room *= 2;
  }
  l->at[l->count++] = value;
  return 0;
}

CORE int32_t torch_new_string_handle(const char *text, size_t length, char **out) {
  char *copy = calloc(1, length + 1);
  if (!copy) return core_fail("no memory for a text");
  memcpy(copy, text, length);
  *out = copy;
  return 0;
}

CORE int32_t torch_new_stable_ivalue(uint64_t **out) { return (*out = malloc(sizeof **out)) ? 0 : core_fail("no memory for an argument"); }

CORE int32_t aoti_torch_cpu_fill__Scalar(tensor *t, double value) {
  if (!tensor_is_dense(t) || (t->dtype != F32 && t->dtype != F64)) return core_fail("fill_ of %s", name_of(t->dtype));
  int64_t count = tensor_count(t);
  for (int64_t i = 0; i < count; i++) {
    if (t->dtype == F32) ((float *)at(t))[i] = (float)value;
    else ((double *)at(t))[i] = value;
  }
  return 0;
}

CORE int32_t aoti_torch_cpu_pad(tensor *t, const int64_t *pad, int64_t count, const char *mode, double *value, tensor **out) {
  (void)t, (void)pad, (void)count, (void)value, (void)out;
  return core_fail("pad, mode %s", mode);
}

static tensor *tensor_at(uint64_t value) { return (tensor *)(uintptr_t)value; }

static int embedding_bags(const tensor *const *in, const uint64_t *flags, tensor **out) {
  return embedding_bag_backward(in[0], in[1], in[2], in[3], in[4], (int64_t)flags[0], flags[1] & 1, (int64_t)flags[2], flags[3] & 1, in[6],
                                (int64_t)flags[4], out);
}

static int check_errors(const tensor *const *in, const uint64_t *flags, tensor **out) {
  (void)out;
  return linalg_check_errors(in[0], (const char *)(uintptr_t)flags[0], !(flags[1] & 1));
}

/* Arguments: T a tensor, O an optional tensor, S a string, F a number or a flag. */
static const struct {
  const char *name, *arguments;
  int (*run)(const tensor *const *, const uint64_t *, tensor **);
} operators[] = {
    {"aten::_embedding_bag_backward", "TTTTTTFFFFOF", embedding_bags},
    {"aten::_linalg_check_errors", "TSF", check_errors},
    {"aten::_linalg_det", "T", linalg_det},
    {"aten::_linalg_slogdet", "T", linalg_slogdet},
    {"aten::_linalg_solve_ex", "TTFF", linalg_solve},
    {"aten::linalg_cholesky_ex", "TFF", linalg_cholesky},
    {"aten::linalg_inv_ex", "TF", linalg_inv},
    {"aten::linalg_lu_factor_ex", "TFF", linalg_lu_factor},
    {"aten::linalg_lu_solve", "TTTFF", linalg_lu_solve},
    {"aten::linalg_solve_triangular", "TTFFF", linalg_solve_triangular},
};
/* MOST_ARGUMENTS and MOST_RESULTS: the largest numbers among these operators. */
enum { OPERATORS = sizeof operators / sizeof *operators, MOST_ARGUMENTS = 12, MOST_RESULTS = 4 };

static int number_of(const char *name, const char *overload) {
  for (int i = 0; i < OPERATORS && !*overload; i++)
    if (!strcmp(operators[i].name, name)) return i;
  return -1;
}

/* Returns whether torch_call_dispatcher has the operator: "aten::_embedding_bag_backward", "". */
CORE int32_t core_serves(const char *name, const char *overload) { return number_of(name, overload) >= 0; }

/* Consumes the arguments on the stack and leaves the results there. */
CORE int32_t torch_call_dispatcher(const char *name, const char *overload, uint64_t *stack, uint64_t version) {
  (void)version;
  int number = number_of(name, overload), tensors = 0, flags = 0;
  if (number < 0) return core_fail("%s%s%s is not supported by this library", name, *overload ? "." : "", overload);
  const char *arguments = operators[number].arguments;
  const tensor *in[MOST_ARGUMENTS] = {0};
  tensor *out[MOST_RESULTS] = {0};
  uint64_t flag[MOST_ARGUMENTS] = {0};
  for (int i = 0; arguments[i]; i++) {
    if (arguments[i] == 'O') { /* a pointer to the handle, or 0 */
      if (stack[i]) memcpy(&in[tensors], (void *)(uintptr_t)stack[i], sizeof *in);
      tensors++;
    } else if (arguments[i] == 'T') in[tensors++] = tensor_at(stack[i]);
    else flag[flags++] = stack[i];
  }
  int failed = operators[number].run(in, flag, out);
  for (int i = 0; i < tensors; i++) tensor_drop((tensor *)in[i]);
  for (int i = 0; arguments[i]; i++)
    if (arguments[i] == 'O' || arguments[i] == 'S') free((void *)(uintptr_t)stack[i]);
  for (int i = 0; i < MOST_RESULTS; i++) {
    if (failed) tensor_drop(out[i]);
    else if (out[i]) stack[i] = (uint64_t)(uintptr_t)out[i];
  }
  return failed;
}

/* The executor is a C++ object. Its third virtual function calls an operator (extern_calls.c). Its errors are C++ exceptions, which pass through. */
CORE int32_t aoti_torch_proxy_executor_call_function(void *executor, int node, int numbers, int64_t *number, int tensors, tensor **given) {
  typedef void call(void *, int, int, int64_t *, int, tensor **);
  call *const *functions;
  memcpy(&functions, executor, sizeof functions);
  functions[2](executor, node, numbers, number, tensors, given);
  return 0;
}
