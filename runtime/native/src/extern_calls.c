/* If AOTInductor has no C function for an operator, compiled code calls it through a C++ object with one virtual function
 * (torch/csrc/inductor/aoti_torch/proxy_executor.h). A JSON file describes each call. libtorch makes such an object for C++ programs. This file makes
 * it in C, with the layout of the Itanium C++ ABI. It calls the operators by libtorch's stable C interface (torch/csrc/stable/c/shim.h), which needs
 * every argument, defaults too, with the type of the operator's schema. So this file contains the schemas of the supported operators. */
#define _GNU_SOURCE
#include "extern_calls.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN(text) shown(text, strlen(text))

/* Types: T tensor, I int, B bool, F float, S string, D dtype, Y layout, V device, N number; prefix L: a list; suffix ?: optional. */
static const struct {
  const char *name, *parameters;
  int results;
} schemas[] = {
    {"aten::_embedding_bag_backward",
     "grad T,indices T,offsets T,offset2bag T,bag_size T,maximum_indices T,num_weights I,scale_grad_by_freq B,mode I,sparse B,per_sample_weights "
     "T?,padding_idx I=-1",
     1},
    {"aten::upsample_bilinear2d_backward", "grad_output T,output_size LI,input_size LI,align_corners B,scales_h F?,scales_w F?", 1},
    {"aten::unsqueeze", "self T,dim I", 1},
    {"aten::bmm", "self T,mat2 T", 1},
    {"aten::mm", "self T,mat2 T", 1},
    {"aten::_conj", "self T", 1},
    {"aten::clone", "self T,memory_format M?", 1},
    {"aten::complex", "real T,imag T", 1},
    {"aten::copy", "self T,src T,non_blocking B=0", 1},
    {"aten::div.Tensor", "self T,other T", 1},
    {"aten::where.self", "condition T,self T,other T", 1},
    {"aten::sum.dim_IntList", "self T,dim LI?,keepdim B=0,dtype D?", 1},
    {"aten::slice_scatter", "self T,src T,dim I=0,start I?,end I?,step I=1", 1},
    {"aten::empty_strided", "size LI,stride LI,dtype D?,layout Y?,device V?,pin_memory B?", 1},
    {"aten::full", "size LI,fill_value N,dtype D?,layout Y?,device V?,pin_memory B?", 1},
    {"aten::constant_pad_nd", "self T,pad LI,value N=0", 1},
    {"aten::_fft_c2r", "self T,dim LI,normalization I,last_dim_size I", 1},
    {"aten::_fft_r2c", "self T,dim LI,normalization I,onesided B", 1},
    {"aten::_fft_c2c", "self T,dim LI,normalization I,forward B", 1},
    {"aten::linalg_matrix_exp", "self T", 1},
    {"aten::_weight_norm_interface_backward", "grad_w T,saved_v T,saved_g T,saved_norms T,dim I", 2},
    {"aten::_linalg_det", "A T", 3},
    {"aten::_linalg_slogdet", "A T", 4},
    {"aten::linalg_inv_ex", "A T,check_errors B=0", 2},
    {"aten::linalg_lu_factor_ex", "A T,pivot B=1,check_errors B=0", 3},
    {"aten::_linalg_solve_ex", "A T,B T,left B=1,check_errors B=0", 4},
    {"aten::_linalg_svd", "A T,full_matrices B=0,compute_uv B=1,driver S?", 3},
    {"aten::_linalg_check_errors", "info T,api_name S,is_matrix B", 0},
    {"aten::linalg_cholesky_ex", "self T,upper B=0,check_errors B=0", 2},
    {"aten::linalg_lu_solve", "LU T,pivots T,B T,left B=1,adjoint B=0", 1},
    {"aten::linalg_solve_triangular", "self T,B T,upper B,left B=1,unitriangular B=0", 1},
};

typedef struct {
  char type;
  bool list, optional, none, dynamic; /* dynamic: the call passes its integers */
  uint32_t count;                     /* integers of a list */
  int64_t integer;
  double number;
  const char *text;
} argument;

typedef struct {
  const char *operator, *overload;
  argument *arguments;
  uint32_t argument_count;
  int results;
} call;

typedef struct extern_calls {
  const void *const *functions; /* virtual functions of the C++ object */
  call *calls;
  uint32_t count;
  uint64_t version;
  int32_t (*dispatch)(const char *, const char *, uint64_t *stack, uint64_t version);
  int32_t (*new_list)(size_t, void **), (*push)(void *, uint64_t), (*new_string)(const char *, size_t, void **);
  int32_t (*share)(tensor_handle, tensor_handle *), (*assign)(tensor_handle from, tensor_handle to), (*drop)(tensor_handle);
  int32_t (*new_box)(uint64_t **); /* NULL: missing; operators then delete memory of `allocate`, C++'s operator new */
  void *(*allocate)(size_t);
  int32_t (*fill)(tensor_handle, double), (*pad)(tensor_handle, const int64_t *, int64_t, const char *, double *, tensor_handle *);
  void (*raise)(const char *); /* throws std::runtime_error through compiled code, which turns it into a status */
} extern_calls;

static _Noreturn void raise_error(const extern_calls *e, const char *words) {
  e->raise(words);
  abort(); /* raise does not return */
}

static uint64_t boxed(const extern_calls *e, uint64_t value) {
  uint64_t *box = NULL; /* the operator frees it */
  if (e->new_box ? e->new_box(&box) : !(box = e->allocate(sizeof *box))) raise_error(e, "no memory for an argument");
  *box = value;
  return (uint64_t)(uintptr_t)box;
}

static uint64_t bits_of(double value) {
  uint64_t out;
  memcpy(&out, &value, sizeof out);
  return out;
}

static uint64_t integers(const extern_calls *e, const int64_t *values, uint32_t count) {
  void *list = NULL;
  if (e->new_list(count, &list)) raise_error(e, "no memory for a list");
  for (uint32_t i = 0; i < count; i++)
    if (e->push(list, (uint64_t)values[i])) raise_error(e, "no memory for a list");
  return (uint64_t)(uintptr_t)list;
}

/* Two operators take a number of any type, which the C interface cannot pass. They are composed of other functions. */
static tensor_handle full(const extern_calls *e, uint64_t *stack, double value) {
  const int64_t *shape = (const int64_t *)(uintptr_t)stack[0];
  int64_t strides[64], row = 1;
  uint32_t rank = (uint32_t)stack[1];
  for (uint32_t d = rank; d--; row *= shape[d]) strides[d] = row;
  uint64_t arguments[] = {integers(e, shape, rank), integers(e, strides, rank), stack[2], stack[3], stack[4], stack[5]};
  if (e->dispatch("aten::empty_strided", "", arguments, e->version)) raise_error(e, "aten::full failed");
  tensor_handle out = (tensor_handle)(uintptr_t)arguments[0];
  if (e->fill(out, value)) raise_error(e, "aten::full failed");
  return out;
}

static void call_one(extern_calls *e, const call *c, const int64_t *numbers, int number_count, tensor_handle *tensors, int tensor_count) {
  uint64_t stack[24];
  int n = 0, t = 0;
  double value = 0;
  const int64_t *list = NULL;
  uint32_t listed = 0;
  tensor_handle own = NULL;
  bool fill = !strcmp(c->operator, "aten::full"), pad = !strcmp(c->operator, "aten::constant_pad_nd");
  for (uint32_t i = 0; i < c->argument_count; i++) {
    const argument *a = &c->arguments[i];
    uint64_t one = 0;
    if (a->none) {
      stack[i] = 0;
      continue;
    }
    if (a->type == 'T') {
      if (t >= tensor_count) raise_error(e, "an operator got fewer tensors than it takes");
      own = tensors[t++];
      if (!pad && e->share(own, (tensor_handle *)&one)) raise_error(e, "no memory for a tensor");
    } else if (a->list) {
      if (n + (int)a->count > number_count) raise_error(e, "an operator got fewer numbers than it takes");
      list = numbers + n;
      listed = a->count;
      n += (int)a->count;
      if (!fill && !pad) one = integers(e, list, listed);
    } else if (a->type == 'S') {
      if (e->new_string(a->text, strlen(a->text), (void **)&one)) raise_error(e, "no memory for a text");
    } else if (a->dynamic) {
      if (n >= number_count) raise_error(e, "an operator got fewer numbers than it takes");
      one = (uint64_t)numbers[n];
      if (a->type == 'N') value = (double)numbers[n];
      n++;
    } else {
      one = a->type == 'F' || a->type == 'N' ? bits_of(a->number) : (uint64_t)a->integer;
      if (a->type == 'N') value = a->number;
    }
    stack[i] = a->optional ? boxed(e, one) : one;
  }
  if (fill) {
    stack[0] = (uint64_t)(uintptr_t)list;
    stack[1] = listed;
    stack[0] = (uint64_t)(uintptr_t)full(e, stack, value);
  } else if (pad) {
    tensor_handle out = NULL;
    if (e->pad(own, list, listed, "constant", &value, &out)) raise_error(e, "aten::constant_pad_nd failed");
    stack[0] = (uint64_t)(uintptr_t)out;
  } else if (e->dispatch(c->operator, c->overload, stack, e->version)) raise_error(e, "an operator that compiled code calls by name failed");
  for (int i = 0; i < c->results; i++) {
    tensor_handle made = (tensor_handle)(uintptr_t)stack[i];
    if (t >= tensor_count || e->assign(made, tensors[t++])) raise_error(e, "an operator gave no tensor");
    e->drop(made);
  }
}

/* virtual void call_function(int node, int num_ints, int64_t *ints, int num_tensors, AtenTensorHandle *tensors) */
static void call_function(extern_calls *e, int number, int number_count, int64_t *numbers, int tensor_count, tensor_handle *tensors) {
  if (number < 0 || (uint32_t)number >= e->count) raise_error(e, "compiled code calls an operator that its JSON file does not have");
  call_one(e, &e->calls[number], numbers, number_count, tensors, tensor_count);
}

static void nothing(extern_calls *e) { (void)e; } /* the destructors, which are never called */

/* --- reading the JSON file -------------------------------------------------------------------------------------------------------------------- */

typedef struct {
  arena *a;
  const char *member, *operator;
} place;
#define WRONG(p, text, ...) arena_fail((p)->a, AOTB_FORMAT, "corrupt: member %s: %s: " text, (p)->member, (p)->operator, __VA_ARGS__)

static const json *input_named(const json *inputs, const char *name, size_t n) {
  for (uint32_t i = 0; i < inputs->count; i++) {
    const json *own = json_get(&inputs->items[i], "name");
    if (own && own->kind == JSON_STRING && strlen(own->text) == n && !memcmp(own->text, name, n)) return json_get(&inputs->items[i], "arg");
  }
  return NULL;
}

static double number_in(const place *p, const json *value) {
  if (value->kind == JSON_INTEGER) return (double)value->integer;
  if (value->kind != JSON_NUMBER) WRONG(p, "a number is %s", json_words(value));
  return value->number;
}

/* Converts the numbers of torch/_export/serde/schema.py, which differ from C++'s. */
static int64_t dtype_of_serialized(const place *p, int64_t number) {
  static const int codes[] = {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15};
  if (number < 1 || number > 13) WRONG(p, "an unknown dtype, %" PRId64, number);
  return codes[number];
}

static void read_argument(const place *p, const json *given, argument *out) {
  if (given->kind != JSON_OBJECT || given->count != 1) WRONG(p, "an argument is %s", json_words(given));
  const json *value = &given->items[0];
  const char *kind = value->key;
  if (!strcmp(kind, "as_none")) {
    out->none = true;
    if (!out->optional) WRONG(p, "a value is missing%s", "");
    return;
  }
  bool right = false;
  if (out->type == 'T') right = !out->list && !strcmp(kind, "as_tensor");
  else if (out->list && out->type == 'I') {
    right = (!strcmp(kind, "as_ints") || !strcmp(kind, "as_sym_ints")) && value->kind == JSON_ARRAY;
    out->count = right ? value->count : 0;
  } else if (out->type == 'I' || out->type == 'N') {
    out->dynamic = right = !strcmp(kind, "as_int") || !strcmp(kind, "as_sym_int");
    if (!right && out->type == 'N' && !strcmp(kind, "as_float")) {
      out->number = number_in(p, value);
      right = true;
    }
  } else if (out->type == 'B') {
    right = !strcmp(kind, "as_bool");
    out->integer = value->kind == JSON_TRUE;
  } else if (out->type == 'F') {
    right = !strcmp(kind, "as_float") || !strcmp(kind, "as_int");
    if (right) out->number = number_in(p, value);
    if (!strcmp(kind, "as_int")) WRONG(p, "an integer stands for a number of floating point%s", "");
  } else if (out->type == 'S') {
    right = !strcmp(kind, "as_string") && value->kind == JSON_STRING;
    out->text = right ? value->text : "";
  } else if (out->type == 'D') {
    right = !strcmp(kind, "as_scalar_type") && value->kind == JSON_INTEGER;
    if (right) out->integer = dtype_of_serialized(p, value->integer);
  } else if (out->type == 'Y') {
    right = !strcmp(kind, "as_layout") && value->kind == JSON_INTEGER && value->integer == 7; /* strided: 0 in C++ */
  } else if (out->type == 'V') {
    const json *type = json_get(value, "type");
    right = !strcmp(kind, "as_device") && type && type->kind == JSON_STRING && !strcmp(type->text, "cpu");
    out->integer = 0xFFFFFFFF; /* type 0 in the upper half, index -1 in the lower */
  }
  if (!right) WRONG(p, "an argument has the type '%s'; expected another type", SHOWN(kind));
}

static void read_call(const place *p, const char *parameters, int results, const json *inputs, call *out) {
  uint32_t found = 0;
  out->results = results;
  out->arguments = TAKE(p->a, 24, argument);
  for (const char *at = parameters; *at;) {
    const char *name = at, *space = strchr(at, ' '), *end = strchr(space, ',');
    argument *a = &out->arguments[out->argument_count++];
    size_t n = (size_t)((end ? end : space + strlen(space)) - space - 1);
    const char *type = space + 1, *otherwise = memchr(type, '=', n);
    a->list = *type == 'L';
    a->type = type[a->list];
    a->optional = memchr(type, '?', n) != NULL;
    const json *given = input_named(inputs, name, (size_t)(space - name));
    if (given) {
      read_argument(p, given, a);
      found++;
    } else if (otherwise) {
      a->integer = strtoll(otherwise + 1, NULL, 10);
      a->number = (double)a->integer;
    } else if (a->optional) a->none = true;
    else WRONG(p, "no argument '%.*s'", (int)(space - name), name);
    at = end ? end + 1 : "";
  }
  if (found != inputs->count) WRONG(p, "%" PRIu32 " arguments; %" PRIu32 " are known", inputs->count, found);
}

static void find_functions(arena *a, const backend *b, extern_calls *e) {
  static const char *const names[] = {"torch_call_dispatcher",           "torch_new_list_reserve_size",  "torch_list_push_back",
                                      "torch_new_string_handle",         "aoti_torch_new_tensor_handle", "aoti_torch_assign_tensors",
                                      "aoti_torch_delete_tensor_object", "aoti_torch_cpu_fill__Scalar",  "aoti_torch_cpu_pad"};
  void *const to[] = {&e->dispatch, &e->new_list, &e->push, &e->new_string, &e->share, &e->assign, &e->drop, &e->fill, &e->pad};
  for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
    void *found = dlsym(b->library, names[i]);
    if (!found) arena_fail(a, AOTB_INCOMPATIBLE, "its code calls operators by name, for which %s lacks %s", b->path, names[i]);
    memcpy(to[i], &found, sizeof found);
  }
  void *box = dlsym(b->library, "torch_new_stable_ivalue"), *standard = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL),
       *raise = standard ? dlsym(standard, "_ZSt21__throw_runtime_errorPKc") : NULL, *allocate = standard ? dlsym(standard, "_Znwm") : NULL;
  if (!raise || !allocate) /* compiled code depends on libstdc++ */
    arena_fail(a, AOTB_INCOMPATIBLE, "its code calls operators by name, for which libstdc++.so.6 is needed");
  memcpy(&e->new_box, &box, sizeof box);
  memcpy(&e->raise, &raise, sizeof raise);
  memcpy(&e->allocate, &allocate, sizeof allocate);
}

struct extern_calls *extern_calls_read(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, const build_spec *build) {
  static void (*const destroy)(extern_calls *) = nothing;
  static void (*const run)(extern_calls *, int, int, int64_t *, int, tensor_handle *) = call_function;
  static const void *functions[4];
  memcpy(&functions[0], &destroy, sizeof destroy);
  memcpy(&functions[1], &destroy, sizeof destroy);
  memcpy(&functions[2], &run, sizeof run);
  memcpy(&functions[3], &destroy, sizeof destroy);
  size_t size;
  const char *text = (const char *)package_member(p, a, build->extern_file, &size);
  json all = json_read(a, build->extern_file, text, size);
  const json *nodes = json_get(&all, "nodes");
  place here = {a, build->extern_file, "its calls"};
  if (!nodes || nodes->kind != JSON_ARRAY) WRONG(&here, "there is no list of %s", "nodes");
  extern_calls *e = TAKE(a, 1, extern_calls);
  e->functions = functions;
  e->version = (uint64_t)b->torch[0] << 56 | (uint64_t)b->torch[1] << 48;
  e->count = nodes->count;
  e->calls = TAKE(a, nodes->count + 1u, call);
  find_functions(a, b, e);
  for (uint32_t i = 0; i < nodes->count; i++) {
    const json *node = json_get(&nodes->items[i], "node"), *target = node ? json_get(node, "target") : NULL,
               *inputs = node ? json_get(node, "inputs") : NULL;
    if (!target || target->kind != JSON_STRING || !inputs || inputs->kind != JSON_ARRAY) WRONG(&here, "call %" PRIu32 " has no target or inputs", i);
    here.operator = SHOWN(target->text);
    call *c = &e->calls[i];
    for (size_t k = 0; k < sizeof schemas / sizeof *schemas && !c->operator; k++) {
      if (strcmp(schemas[k].name, target->text)) continue;
      const char *dot = strchr(target->text, '.');
      c->operator = dot ? arena_text(a, target->text, (size_t)(dot - target->text)) : target->text;
      c->overload = dot ? dot + 1 : "";
      read_call(&here, schemas[k].parameters, schemas[k].results, inputs, c);
    }
    if (!c->operator) arena_fail(a, AOTB_INCOMPATIBLE, "library %s calls %s by name, which is not supported from C", spec->name, SHOWN(target->text));
    if (b->serves && !b->serves(c->operator, c->overload))
      arena_fail(a, AOTB_INCOMPATIBLE, "library %s calls %s, which the backend standalone does not have: open the package with the backend libtorch",
                 spec->name, SHOWN(target->text));
  }
  return e;
}
