/* Operators that compiled code calls by name, behind libtorch's stable C interface (torch/csrc/stable/c/shim.h), as far as they are served. */
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

/* Whether torch_call_dispatcher has it: "aten::_embedding_bag_backward", "". */
CORE int32_t core_serves(const char *name, const char *overload) { return !strcmp(name, "aten::_embedding_bag_backward") && !*overload; }

/* Takes what is on the stack, and leaves the results there. */
CORE int32_t torch_call_dispatcher(const char *name, const char *overload, uint64_t *stack, uint64_t version) {
  (void)version;
  if (core_serves(name, overload)) {
    tensor *made = NULL;
    /* What may be absent is in a box of its own. */
    tensor *factors = NULL;
    if (stack[10]) {
      memcpy(&factors, (void *)(uintptr_t)stack[10], sizeof factors);
      free((void *)(uintptr_t)stack[10]);
    }
    int failed = embedding_bag_backward(tensor_at(stack[0]), tensor_at(stack[1]), tensor_at(stack[2]), tensor_at(stack[3]), tensor_at(stack[4]),
                                        (int64_t)stack[6], stack[7] & 1, (int64_t)stack[8], stack[9] & 1, factors, (int64_t)stack[11], &made);
    tensor_drop(factors);
    for (int i = 0; i < 6; i++) tensor_drop(tensor_at(stack[i]));
    stack[0] = (uint64_t)(uintptr_t)made;
    return failed;
  }
  return core_fail("%s%s%s is not served by this library", name, *overload ? "." : "", overload);
}

/* The executor is a C++ object, whose third virtual function calls an operator (extern_calls.c). An error of it passes through as a C++ exception. */
CORE int32_t aoti_torch_proxy_executor_call_function(void *executor, int node, int numbers, int64_t *number, int tensors, tensor **given) {
  typedef void call(void *, int, int, int64_t *, int, tensor **);
  call *const *functions;
  memcpy(&functions, executor, sizeof functions);
  functions[2](executor, node, numbers, number, tensors, given);
  return 0;
}
