/* aot_backward_native._extension: aot_backward.h for Python 3.11 and later, with the stable ABI. Arguments use the buffer protocol or DLPack. Results
 * are Tensors, which have both. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <aot_backward.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 64 }; /* as PyBUF_MAX_NDIM of Python's buffer protocol */

/* DLPack's DLManagedTensor, the version that every library accepts: https://dmlc.github.io/dlpack/latest/c_api.html */
typedef struct managed {
  DLTensor tensor;
  void *context;
  void (*deleter)(struct managed *);
} managed;

typedef struct {
  PyTypeObject *package, *function, *tensor;
  PyObject *errors; /* one for each status */
} state;

static struct PyModuleDef definition;

typedef struct {
  PyObject_HEAD state *module;
  aotb_package *handle;
} Package;

typedef struct {
  PyObject_HEAD state *module;
  aotb_function *handle;
  PyObject *package;
  PyObject *door;     /* makes arrays of other arguments; NULL: none */
  struct Input *kept; /* of the last forward, until its backward */
  Py_ssize_t kept_count;
  uint32_t most, outputs, gradients; /* the largest number of results of a run, of outputs, of gradients, over the variants */
  uint32_t forwarded;                /* the variant of the last forward */
  int busy;                          /* protected by the GIL: a call runs, or its results are being copied */
} Function;

typedef struct {
  PyObject_HEAD void *data;
  PyObject *owner; /* of the memory; NULL: this tensor */
  DLDataType dtype;
  int dimensions;
  int64_t shape[MOST_DIMENSIONS];
  Py_ssize_t bytes[MOST_DIMENSIONS], sizes[MOST_DIMENSIONS]; /* strides and shape, for the buffer protocol */
  int64_t strides[MOST_DIMENSIONS];
} Tensor;

static PyObject *raise_error(const state *s, aotb_status status) {
  if (status == AOTB_MEMORY && !*aotb_error()) return PyErr_NoMemory();
  PyObject *kind = PyList_GetItem(s->errors, status);
  if (kind) PyErr_SetString(kind, aotb_error());
  return NULL;
}

/* --- dtypes ----------------------------------------------------------------------------------------------------------------------------------- */

static const struct {
  const char *name, *format; /* format of the buffer protocol; NULL: none */
  uint8_t code, bits;
} dtypes[] = {{"float32", "f", 2, 32},    {"float64", "d", 2, 64},      {"int64", "q", 0, 64},  {"int32", "i", 0, 32},   {"int16", "h", 0, 16},
              {"int8", "b", 0, 8},        {"uint8", "B", 1, 8},         {"bool", "?", 6, 8},    {"float16", "e", 2, 16}, {"bfloat16", NULL, 4, 16},
              {"complex64", "Zf", 5, 64}, {"complex128", "Zd", 5, 128}, {"uint16", "H", 1, 16}, {"uint32", "I", 1, 32},  {"uint64", "Q", 1, 64}};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int dtype_number(DLDataType t) {
  for (int i = 0; i < DTYPES; i++)
    if (dtypes[i].code == t.code && dtypes[i].bits == t.bits && t.lanes == 1) return i;
  return -1;
}

/* Returns the dtype of a buffer's format; bits 0: unknown. */
static DLDataType dtype_of(const char *format, Py_ssize_t size) {
  DLDataType out = {0, 0, 1};
  if (!format) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') format++;
  if (*format == 'l' || *format == 'L') { /* C's long: 8 bytes here */
    out.code = *format == 'L';
    out.bits = (uint8_t)(8 * size);
  } else
    for (int i = 0; i < DTYPES; i++)
      if (dtypes[i].format && !strcmp(format, dtypes[i].format) && size * 8 == dtypes[i].bits) {
        out.code = dtypes[i].code;
        out.bits = dtypes[i].bits;
      }
  return out;
}

/* --- tensors ---------------------------------------------------------------------------------------------------------------------------------- */

static Tensor *new_tensor(const state *s, const DLTensor *like) {
  if (like->ndim > MOST_DIMENSIONS) {
    PyErr_SetString(PyExc_ValueError, "a tensor of more than 64 dimensions");
    return NULL;
  }
  Tensor *t = PyObject_New(Tensor, s->tensor);
  if (!t) return NULL;
  t->data = NULL;
  t->owner = NULL;
  t->dtype = like->dtype;
  t->dimensions = like->ndim;
  int64_t row = 1;
  for (int d = like->ndim; d--;) {
    t->shape[d] = t->sizes[d] = (Py_ssize_t)like->shape[d];
    t->strides[d] = row;
    t->bytes[d] = (Py_ssize_t)row * (like->dtype.bits / 8);
    row *= like->shape[d];
  }
  return t;
}

static int64_t elements_of(const Tensor *t) {
  int64_t n = 1;
  for (int d = 0; d < t->dimensions; d++) n *= t->shape[d];
  return n;
}

static void copy_rows(char *to, const char *from, const DLTensor *like, int d, size_t size) {
  int64_t inner = 1;
  for (int k = d + 1; k < like->ndim; k++) inner *= like->shape[k];
  if (d == like->ndim) {
    memcpy(to, from, size);
    return;
  }
  for (int64_t i = 0; i < like->shape[d]; i++)
    copy_rows(to + (size_t)(i * inner) * size, from + (size_t)(i * like->strides[d]) * size, like, d + 1, size);
}

/* Returns a row-major copy. */
static PyObject *copied(const state *s, const DLTensor *from) {
  if (from->ndim < 0) Py_RETURN_NONE;
  Tensor *t = new_tensor(s, from);
  if (!t) return NULL;
  size_t size = from->dtype.bits / 8, bytes = (size_t)elements_of(t) * size;
  int dense = 1;
  for (int d = 0; d < from->ndim; d++) dense = dense && (from->shape[d] <= 1 || from->strides[d] == t->strides[d]);
  t->data = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!t->data) {
    Py_DecRef((PyObject *)t);
    return PyErr_NoMemory();
  }
  const char *data = (const char *)from->data + from->byte_offset;
  if (dense && bytes) memcpy(t->data, data, bytes);
  else if (bytes) copy_rows(t->data, data, from, 0, size);
  return (PyObject *)t;
}

static void tensor_dealloc(PyObject *self) {
  Tensor *t = (Tensor *)self;
  PyTypeObject *type = Py_TYPE(self);
  if (t->owner) Py_DecRef(t->owner);
  else free(t->data);
  PyObject_Free(self);
  Py_DecRef((PyObject *)type);
}

static int tensor_getbuffer(PyObject *self, Py_buffer *view, int flags) {
  Tensor *t = (Tensor *)self;
  int number = dtype_number(t->dtype);
  if (number < 0 || !dtypes[number].format) {
    PyErr_Format(PyExc_BufferError, "a tensor of %s has no format of the buffer protocol: use DLPack, torch.from_dlpack(tensor)",
                 number < 0 ? "an unknown dtype" : dtypes[number].name);
    return -1;
  }
  Py_ssize_t row = t->dtype.bits / 8;
  int dense = 1;
  for (int d = t->dimensions; d--; row *= t->sizes[d]) dense = dense && (t->sizes[d] <= 1 || t->bytes[d] == row);
  if (!dense && (flags & PyBUF_STRIDES) != PyBUF_STRIDES) {
    PyErr_SetString(PyExc_BufferError, "the tensor is not row-major");
    return -1;
  }
  memset(view, 0, sizeof *view);
  view->obj = Py_NewRef(self);
  view->buf = t->data;
  view->itemsize = t->dtype.bits / 8;
  view->len = (Py_ssize_t)elements_of(t) * view->itemsize;
  view->ndim = t->dimensions;
  view->format = flags & PyBUF_FORMAT ? (char *)(uintptr_t)dtypes[number].format : NULL;
  view->shape = (flags & PyBUF_ND) == PyBUF_ND ? t->sizes : NULL;
  view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? t->bytes : NULL;
  return 0;
}

static void managed_delete(managed *m) {
  PyGILState_STATE held = PyGILState_Ensure();
  Py_DecRef(m->context);
  PyGILState_Release(held);
  free(m);
}

static void capsule_delete(PyObject *capsule) {
  managed *m = PyCapsule_IsValid(capsule, "dltensor") ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;
  if (m) m->deleter(m);
}

static PyObject *tensor_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
  (void)args, (void)kwargs; /* stream and version: only one of each is supported */
  Tensor *t = (Tensor *)self;
  managed *m = calloc(1, sizeof *m);
  if (!m) return PyErr_NoMemory();
  m->tensor = (DLTensor){t->data, {1, 0}, t->dimensions, t->dtype, t->shape, t->strides, 0};
  m->context = Py_NewRef(self);
  m->deleter = managed_delete;
  PyObject *capsule = PyCapsule_New(m, "dltensor", capsule_delete);
  if (!capsule) {
    Py_DecRef(self);
    free(m);
  }
  return capsule;
}

/* Returns the row-major bytes. */
static PyObject *tensor_tobytes(PyObject *self, PyObject *none) {
  (void)none;
  Tensor *t = (Tensor *)self;
  size_t size = t->dtype.bits / 8;
  DLTensor from = {t->data, {1, 0}, t->dimensions, t->dtype, t->shape, t->strides, 0};
  PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((size_t)elements_of(t) * size));
  if (out && PyBytes_Size(out)) copy_rows(PyBytes_AsString(out), t->data, &from, 0, size);
  return out;
}

static PyObject *tensor_device(PyObject *self, PyObject *none) {
  (void)self, (void)none;
  return Py_BuildValue("(ii)", 1, 0);
}

static PyObject *tensor_shape(PyObject *self, void *none) {
  (void)none;
  Tensor *t = (Tensor *)self;
  PyObject *out = PyTuple_New(t->dimensions);
  for (int d = 0; out && d < t->dimensions; d++)
    if (PyTuple_SetItem(out, d, PyLong_FromLongLong(t->shape[d]))) return Py_DecRef(out), NULL;
  return out;
}

static PyObject *tensor_dtype(PyObject *self, void *none) {
  (void)none;
  int number = dtype_number(((Tensor *)self)->dtype);
  return PyUnicode_FromString(number < 0 ? "unknown" : dtypes[number].name);
}

/* --- arrays of the caller --------------------------------------------------------------------------------------------------------------------- */

typedef struct Input {
  DLTensor tensor;
  Py_buffer buffer;
  managed *given;  /* from DLPack, to be deleted; or NULL */
  int held;        /* whether to release `buffer` */
  PyObject *owner; /* an array that was made of the argument; or NULL */
  int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Input;

enum { TAKEN, FAILED, UNSUPPORTED }; /* FAILED: with a Python error */

static void release(Input *inputs, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    if (inputs[i].held) PyBuffer_Release(&inputs[i].buffer);
    if (inputs[i].given && inputs[i].given->deleter) inputs[i].given->deleter(inputs[i].given);
    if (inputs[i].owner) Py_DecRef(inputs[i].owner);
  }
  PyMem_Free(inputs);
}

static int take_buffer(Input *in, PyObject *object, int writable) {
  Py_buffer *b = &in->buffer;
  if (PyObject_GetBuffer(object, b, writable ? PyBUF_RECORDS : PyBUF_RECORDS_RO)) {
    if (writable) return FAILED;
    PyErr_Clear(); /* NumPy has no format for some dtypes */
    return UNSUPPORTED;
  }
  in->held = 1;
  DLDataType dtype = dtype_of(b->format, b->itemsize);
  int fits = dtype.bits && b->ndim <= MOST_DIMENSIONS;
  for (int d = 0; fits && d < b->ndim; d++) {
    in->shape[d] = b->shape[d];
    in->strides[d] = b->shape[d] > 1 ? b->strides[d] / b->itemsize : 0;
    fits = b->shape[d] <= 1 || (b->strides[d] >= 0 && b->strides[d] % b->itemsize == 0);
  }
  if (!fits) {
    PyBuffer_Release(b);
    in->held = 0;
    return UNSUPPORTED;
  }
  in->tensor = (DLTensor){b->buf, {1, 0}, b->ndim, dtype, in->shape, in->strides, 0};
  return TAKEN;
}

static int take_dlpack(Input *in, PyObject *object) {
  PyObject *capsule = PyObject_CallMethod(object, "__dlpack__", NULL);
  if (!capsule) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return FAILED;
    PyErr_Clear();
    return UNSUPPORTED;
  }
  managed *m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m && !PyCapsule_SetName(capsule, "used_dltensor")) {
    in->given = m;
    in->tensor = m->tensor;
  }
  Py_DecRef(capsule);
  return m ? TAKEN : FAILED;
}

static int take_one(const state *s, Input *in, PyObject *object, int writable) {
  if (Py_TYPE(object) == s->tensor) { /* the caller owns it */
    Tensor *t = (Tensor *)object;
    in->tensor = (DLTensor){t->data, {1, 0}, t->dimensions, t->dtype, t->shape, t->strides, 0};
    return TAKEN;
  }
  return PyObject_CheckBuffer(object) ? take_buffer(in, object, writable) : take_dlpack(in, object);
}

/* Takes the arguments of a part (AOTB_INPUTS or AOTB_INCOMING). The function's door makes arrays of those that have neither protocol, or a layout that
 * C does not take. */
static Input *take(const Function *f, PyObject *const *objects, Py_ssize_t count, int part) {
  Input *out = PyMem_Calloc((size_t)count + 1, sizeof *out);
  if (!out) return (Input *)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < count; i++) {
    if (part == AOTB_INCOMING && objects[i] == Py_None) continue;
    int found = take_one(f->module, &out[i], objects[i], 0);
    if (found == UNSUPPORTED && f->door) {
      out[i].owner = PyObject_CallFunction(f->door, "Oin", objects[i], part, i);
      found = out[i].owner ? take_one(f->module, &out[i], out[i].owner, 0) : FAILED;
    }
    if (found == UNSUPPORTED)
      PyErr_Format(PyExc_TypeError, "input %zd: expected an array (buffer protocol or DLPack), got %.100R", i, (PyObject *)Py_TYPE(objects[i]));
    if (found != TAKEN) {
      release(out, i + 1);
      return NULL;
    }
  }
  return out;
}

/* Takes the arrays that receive results. None: not given. */
static Input *take_results(const Function *f, PyObject *objects, uint32_t count) {
  Input *out = PyMem_Calloc((size_t)count + 1, sizeof *out);
  if (!out) return (Input *)PyErr_NoMemory();
  Py_ssize_t given = PyTuple_Check(objects) ? PyTuple_Size(objects) : -1;
  if (given < 0 || given > count) {
    PyErr_Format(PyExc_TypeError, "out: expected a tuple of at most %u arrays, got %R", count, objects);
    release(out, 0);
    return NULL;
  }
  for (Py_ssize_t i = 0; i < given; i++) {
    PyObject *one = PyTuple_GetItem(objects, i);
    if (one == Py_None) continue;
    int found = take_one(f->module, &out[i], one, 1);
    if (found == UNSUPPORTED)
      PyErr_Format(PyExc_TypeError, "out: expected an array (buffer protocol or DLPack) of this machine's byte order, got %.100R",
                   (PyObject *)Py_TYPE(one));
    if (found != TAKEN) {
      release(out, i + 1);
      return NULL;
    }
  }
  return out;
}

/* --- functions -------------------------------------------------------------------------------------------------------------------------------- */

typedef aotb_status call(aotb_function *, const DLTensor *, uint32_t, DLTensor *, uint32_t);

static int enter(Function *f) {
  if (f->busy) {
    PyObject *kind = PyList_GetItem(f->module->errors, AOTB_INPUT);
    if (kind) PyErr_SetString(kind, "another thread is in a call of this function; a function serves one caller at a time: make one for each thread");
    return -1;
  }
  return f->busy = 1, 0;
}

/* Returns the list of results: for each the caller's array, a copied tensor, or None. */
static PyObject *listed(const state *s, const DLTensor *made, uint32_t count, PyObject *outs) {
  PyObject *out = PyList_New(count);
  for (uint32_t i = 0; out && i < count; i++) {
    PyObject *own = outs && (Py_ssize_t)i < PyTuple_Size(outs) ? PyTuple_GetItem(outs, i) : Py_None;
    PyObject *one = own != Py_None && made[i].ndim >= 0 ? Py_NewRef(own) : copied(s, &made[i]);
    if (!one || PyList_SetItem(out, i, one)) {
      Py_DecRef(out);
      out = NULL;
    }
  }
  return out;
}

/* Returns the value of the only keyword argument, out=…, or NULL with or without an error. */
static PyObject *out_of(PyObject *const *args, Py_ssize_t count, PyObject *names) {
  if (!names || !PyTuple_Size(names)) return NULL;
  if (PyTuple_Size(names) == 1 && !PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "out"))
    return args[count] == Py_None ? NULL : args[count];
  PyErr_SetString(PyExc_TypeError, "the only keyword argument is out");
  return NULL;
}

static uint32_t smaller(uint32_t one, uint32_t other) { return one < other ? one : other; }

/* Calls `function` with arrays. `most`: the largest number of results. Returns a list of results. */
static PyObject *called(Function *f, call *function, PyObject *const *args, Py_ssize_t count, PyObject *names, uint32_t most) {
  PyObject *out = NULL, *outs = out_of(args, count, names);
  if (PyErr_Occurred() || enter(f)) return NULL;
  int backward = function == aotb_backward, forward = function == aotb_forward;
  Input *inputs = take(f, args, count, backward ? AOTB_INCOMING : AOTB_INPUTS), *into = inputs && outs ? take_results(f, outs, most) : NULL;
  DLTensor *given = inputs && (into || !outs) ? PyMem_Calloc((size_t)count + 1, sizeof *given) : NULL,
           *made = given ? PyMem_Calloc(most + 1u, sizeof *made) : NULL;
  if (made) {
    aotb_status status;
    for (Py_ssize_t i = 0; i < count; i++) given[i] = inputs[i].tensor;
    for (uint32_t i = 0; into && i < most; i++) made[i] = into[i].tensor;
    Py_BEGIN_ALLOW_THREADS;
    status = function(f->handle, given, (uint32_t)count, made, most);
    Py_END_ALLOW_THREADS;
    if (!status && forward) f->forwarded = aotb_served(f->handle);
    uint32_t served = backward ? f->forwarded : aotb_served(f->handle), results = backward ? 0 : aotb_count(f->handle, served, AOTB_OUTPUTS);
    if (backward || f->most > f->outputs) results += aotb_count(f->handle, served, AOTB_GRADIENTS);
    if (status) raise_error(f->module, status);
    else out = listed(f->module, made, smaller(results, most), outs);
  } else if (!PyErr_Occurred()) PyErr_NoMemory();
  PyMem_Free(made);
  PyMem_Free(given);
  if (into) release(into, most);
  if (forward && out) { /* the backward reads the inputs again */
    Input *before = f->kept;
    Py_ssize_t before_count = f->kept_count;
    f->kept = inputs;
    f->kept_count = count;
    inputs = before;
    count = before_count;
  }
  f->busy = 0;
  if (inputs) release(inputs, count);
  return out;
}

static PyObject *function_run(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  return called((Function *)self, aotb_run, args, count, names, ((Function *)self)->most);
}

static PyObject *function_forward(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  return called((Function *)self, aotb_forward, args, count, names, ((Function *)self)->outputs);
}

static PyObject *function_backward(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  return called((Function *)self, aotb_backward, args, count, names, ((Function *)self)->gradients);
}

static PyObject *function_accumulate(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  return called((Function *)self, aotb_accumulate, args, count, names, ((Function *)self)->outputs);
}

static PyObject *answer(const Function *f, aotb_status status) {
  if (status) return raise_error(f->module, status);
  Py_RETURN_NONE;
}

static PyObject *function_update(PyObject *self, PyObject *none) {
  (void)none;
  Function *f = (Function *)self;
  aotb_status status;
  if (enter(f)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = aotb_update(f->handle);
  Py_END_ALLOW_THREADS;
  f->busy = 0;
  return answer(f, status);
}

static PyObject *function_zero_grad(PyObject *self, PyObject *none) {
  (void)none;
  return answer((Function *)self, aotb_zero_grad(((Function *)self)->handle));
}

static PyObject *function_train(PyObject *self, PyObject *mode) {
  int training = PyObject_IsTrue(mode);
  return training < 0 ? NULL : answer((Function *)self, aotb_train(((Function *)self)->handle, training));
}

static PyObject *function_use_variant(PyObject *self, PyObject *number) {
  long long chosen = PyLong_AsLongLong(number);
  if (chosen == -1 && PyErr_Occurred()) return NULL;
  return answer((Function *)self, aotb_use_variant(((Function *)self)->handle, chosen));
}

static PyObject *function_convert(PyObject *self, PyObject *flag) {
  int convert = PyObject_IsTrue(flag);
  return convert < 0 ? NULL : answer((Function *)self, aotb_convert(((Function *)self)->handle, convert));
}

static PyObject *function_scale(PyObject *self, PyObject *args) {
  const char *name;
  double factor;
  if (!PyArg_ParseTuple(args, "sd", &name, &factor)) return NULL;
  return answer((Function *)self, aotb_scale(((Function *)self)->handle, name, factor));
}

/* structure(variant): JSON text */
static PyObject *function_structure(PyObject *self, PyObject *number) {
  Function *f = (Function *)self;
  unsigned long chosen = PyLong_AsUnsignedLong(number);
  if (PyErr_Occurred()) return NULL;
  const char *text = aotb_structure(f->handle, (uint32_t)chosen);
  return text ? PyUnicode_FromString(text) : raise_error(f->module, AOTB_NAME);
}

static PyObject *function_size(PyObject *self, PyObject *text) {
  Function *f = (Function *)self;
  Py_ssize_t length;
  int64_t size = 0;
  const char *words = PyUnicode_AsUTF8AndSize(text, &length);
  if (!words) return NULL;
  aotb_status status = aotb_size(f->handle, words, &size);
  return status ? raise_error(f->module, status) : PyLong_FromLongLong(size);
}

/* door(callable): callable(object, part, number) makes an array of an argument that has neither protocol. It must not refer to this function. */
static PyObject *function_door(PyObject *self, PyObject *door) {
  Function *f = (Function *)self;
  PyObject *before = f->door;
  f->door = Py_NewRef(door);
  if (before) Py_DecRef(before);
  Py_RETURN_NONE;
}

static PyObject *function_number(PyObject *self, PyObject *args) {
  long long group, position;
  double value;
  const char *key;
  if (!PyArg_ParseTuple(args, "LsLd", &group, &key, &position, &value)) return NULL;
  return answer((Function *)self, aotb_number(((Function *)self)->handle, group, key, position, value));
}

static PyObject *function_progress(PyObject *self, PyObject *none) {
  (void)none;
  Function *f = (Function *)self;
  aotb_progress p;
  aotb_status status = aotb_progress_of(f->handle, &p);
  if (status) return raise_error(f->module, status);
  return Py_BuildValue("(LLLdd)", (long long)p.updates, (long long)p.skipped, (long long)p.accumulated, p.grad_norm, p.loss_scale);
}

static PyObject *function_save(PyObject *self, PyObject *args) {
  Function *f = (Function *)self;
  PyObject *path;
  const char *extra;
  aotb_status status;
  if (!PyArg_ParseTuple(args, "O&z", PyUnicode_FSConverter, &path, &extra)) return NULL;
  if (enter(f)) return Py_DecRef(path), NULL;
  const char *name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  status = aotb_save(f->handle, name, extra);
  Py_END_ALLOW_THREADS;
  f->busy = 0;
  Py_DecRef(path);
  return answer(f, status);
}

static PyObject *function_resume(PyObject *self, PyObject *args) {
  Function *f = (Function *)self;
  PyObject *path, *out = NULL;
  const char *extra = NULL;
  aotb_status status;
  if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path)) return NULL;
  if (enter(f)) return Py_DecRef(path), NULL;
  const char *name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  status = aotb_resume(f->handle, name, &extra);
  Py_END_ALLOW_THREADS;
  if (status) raise_error(f->module, status);
  else out = PyUnicode_FromString(extra ? extra : "null");
  f->busy = 0;
  Py_DecRef(path);
  return out;
}

/* Returns a view of the state's memory, which keeps the function alive. */
static PyObject *function_state(PyObject *self, PyObject *name) {
  Function *f = (Function *)self;
  Py_ssize_t length;
  const char *text = PyUnicode_AsUTF8AndSize(name, &length);
  DLTensor view = {0};
  if (!text) return NULL;
  aotb_status status = aotb_state(f->handle, text, &view);
  if (status) return raise_error(f->module, status);
  Tensor *t = new_tensor(f->module, &view);
  if (!t) return NULL;
  t->data = (char *)view.data + view.byte_offset;
  t->owner = Py_NewRef(self);
  for (int d = 0; d < t->dimensions; d++) {
    t->strides[d] = view.strides ? view.strides[d] : t->strides[d];
    t->bytes[d] = (Py_ssize_t)t->strides[d] * (view.dtype.bits / 8);
  }
  return (PyObject *)t;
}

static void spread_rows(char *to, const DLTensor *like, const char *from, int d, size_t size) {
  int64_t inner = 1;
  for (int k = d + 1; k < like->ndim; k++) inner *= like->shape[k];
  if (d == like->ndim) {
    memcpy(to, from, size);
    return;
  }
  for (int64_t i = 0; i < like->shape[d]; i++)
    spread_rows(to + (size_t)(i * like->strides[d]) * size, like, from + (size_t)(i * inner) * size, d + 1, size);
}

/* set_state(name, bytes): row-major bytes */
static PyObject *function_set_state(PyObject *self, PyObject *args) {
  Function *f = (Function *)self;
  const char *name;
  Py_buffer data;
  DLTensor view = {0};
  if (!PyArg_ParseTuple(args, "sy*", &name, &data)) return NULL;
  aotb_status status = aotb_state(f->handle, name, &view);
  Py_ssize_t bytes = view.dtype.bits / 8;
  for (int d = 0; d < view.ndim; d++) bytes *= view.shape[d];
  if (!status && bytes == data.len && bytes) spread_rows((char *)view.data + view.byte_offset, &view, data.buf, 0, view.dtype.bits / 8);
  Py_ssize_t given = data.len;
  PyBuffer_Release(&data);
  if (!status && bytes != given) return PyErr_Format(PyExc_ValueError, "%s: expected %zd bytes, got %zd", name, bytes, given);
  return answer(f, status);
}

/* Returns a list of (name, dtype, shape as strings, group, position, value). */
static PyObject *function_describe(PyObject *self, PyObject *args) {
  Function *f = (Function *)self;
  unsigned variant;
  int part;
  if (!PyArg_ParseTuple(args, "Ii", &variant, &part)) return NULL;
  PyObject *out = PyList_New(0);
  for (uint32_t i = 0; out && i < aotb_count(f->handle, variant, (aotb_part)part); i++) {
    aotb_description d;
    aotb_status status = aotb_describe(f->handle, variant, (aotb_part)part, i, &d);
    PyObject *shape = status ? raise_error(f->module, status) : PyTuple_New(d.ndim), *one = NULL;
    for (int32_t k = 0; shape && k < d.ndim; k++) PyTuple_SetItem(shape, k, PyUnicode_FromString(d.shape[k]));
    int number = dtype_number(d.dtype);
    if (shape)
      one = Py_BuildValue("(ssNLLd)", d.name, number < 0 ? "" : dtypes[number].name, shape, (long long)d.group, (long long)d.position, d.value);
    if (!one || PyList_Append(out, one)) {
      Py_DecRef(out);
      out = NULL;
    }
    if (one) Py_DecRef(one);
  }
  return out;
}

static PyObject *function_kind(PyObject *self, void *none) {
  (void)none;
  return PyUnicode_FromString(aotb_kind(((Function *)self)->handle));
}

static PyObject *function_variants(PyObject *self, void *none) {
  (void)none;
  return PyLong_FromUnsignedLong(aotb_variants(((Function *)self)->handle));
}

static PyObject *function_served(PyObject *self, void *none) {
  (void)none;
  return PyLong_FromUnsignedLong(aotb_served(((Function *)self)->handle));
}

static void function_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  aotb_free(((Function *)self)->handle);
  if (((Function *)self)->package) Py_DecRef(((Function *)self)->package);
  if (((Function *)self)->door) Py_DecRef(((Function *)self)->door);
  if (((Function *)self)->kept) release(((Function *)self)->kept, ((Function *)self)->kept_count);
  PyObject_Free(self);
  Py_DecRef((PyObject *)type);
}

/* --- packages --------------------------------------------------------------------------------------------------------------------------------- */

/* Finds the largest numbers of results. */
static void count_results(Function *f) {
  int grad = !strcmp(aotb_kind(f->handle), "grad");
  for (uint32_t i = 0; i < aotb_variants(f->handle); i++) {
    uint32_t outputs = aotb_count(f->handle, i, AOTB_OUTPUTS), gradients = aotb_count(f->handle, i, AOTB_GRADIENTS);
    if (outputs > f->outputs) f->outputs = outputs;
    if (gradients > f->gradients) f->gradients = gradients;
    if (outputs + (grad ? gradients : 0) > f->most) f->most = outputs + (grad ? gradients : 0);
  }
}

static PyObject *package_function(PyObject *self, PyObject *name) {
  Package *p = (Package *)self;
  Py_ssize_t length;
  const char *text = PyUnicode_AsUTF8AndSize(name, &length);
  if (!text) return NULL;
  Function *f = PyObject_New(Function, p->module->function);
  if (!f) return NULL;
  f->module = p->module;
  f->handle = NULL;
  f->package = Py_NewRef(self);
  f->door = NULL;
  f->kept = NULL;
  f->kept_count = 0;
  f->most = f->outputs = f->gradients = f->forwarded = 0;
  f->busy = 0;
  aotb_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = aotb_get(p->handle, text, &f->handle);
  Py_END_ALLOW_THREADS;
  if (!status) {
    count_results(f);
    return (PyObject *)f;
  }
  raise_error(p->module, status);
  Py_DecRef((PyObject *)f);
  return NULL;
}

static PyObject *package_entries(PyObject *self, PyObject *none) {
  (void)none;
  Package *p = (Package *)self;
  uint32_t count = aotb_entries(p->handle);
  PyObject *out = PyList_New(count);
  for (uint32_t i = 0; out && i < count; i++) PyList_SetItem(out, i, Py_BuildValue("(ss)", aotb_entry(p->handle, i), aotb_entry_kind(p->handle, i)));
  return out;
}

/* metadata(entry or None): JSON text */
static PyObject *package_metadata(PyObject *self, PyObject *name) {
  Package *p = (Package *)self;
  Py_ssize_t length;
  const char *text = name == Py_None ? NULL : PyUnicode_AsUTF8AndSize(name, &length), *found;
  if (!text && name != Py_None) return NULL;
  found = aotb_metadata(p->handle, text);
  return found ? PyUnicode_FromString(found) : raise_error(p->module, AOTB_NAME);
}

static PyObject *package_digest(PyObject *self, PyObject *none) {
  (void)none;
  return PyUnicode_FromString(aotb_digest(((Package *)self)->handle));
}

static PyObject *package_seed(PyObject *self, PyObject *value) {
  Package *p = (Package *)self;
  unsigned long long seed = PyLong_AsUnsignedLongLongMask(value);
  if (PyErr_Occurred()) return NULL;
  aotb_status status = aotb_seed(p->handle, seed);
  if (status) return raise_error(p->module, status);
  Py_RETURN_NONE;
}

static PyObject *package_threads(PyObject *self, PyObject *value) {
  Package *p = (Package *)self;
  long count = PyLong_AsLong(value);
  if (PyErr_Occurred()) return NULL;
  aotb_status status = aotb_threads(p->handle, count > 1 << 20 ? 1 << 20 : count < 0 ? 0 : (int)count);
  if (status) return raise_error(p->module, status);
  Py_RETURN_NONE;
}

static void package_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  if (((Package *)self)->handle) aotb_close(((Package *)self)->handle);
  PyObject_Free(self);
  Py_DecRef((PyObject *)type);
}

/* open(path, backend, public_key, unchecked) */
static PyObject *module_open(PyObject *module, PyObject *args) {
  state *s = PyModule_GetState(module);
  PyObject *path, *key = NULL;
  const char *backend;
  int unchecked;
  if (!PyArg_ParseTuple(args, "O&zOp", PyUnicode_FSConverter, &path, &backend, &key, &unchecked)) return NULL;
  PyObject *key_path = NULL;
  if (key != Py_None && !PyUnicode_FSConverter(key, &key_path)) return Py_DecRef(path), NULL;
  aotb_options options = {.backend = backend, .public_key = key_path ? PyBytes_AsString(key_path) : NULL, .unchecked = unchecked};
  const char *name = PyBytes_AsString(path);
  Package *p = PyObject_New(Package, s->package);
  aotb_status status = AOTB_MEMORY;
  if (p) {
    p->module = s;
    p->handle = NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = aotb_open(name, &options, &p->handle);
    Py_END_ALLOW_THREADS;
    if (status) raise_error(s, status);
  }
  Py_DecRef(path);
  if (key_path) Py_DecRef(key_path);
  if (p && status) Py_DecRef((PyObject *)p);
  return status ? NULL : (PyObject *)p;
}

/* tensor(dtype, shape, data): data is row-major bytes. */
static PyObject *module_tensor(PyObject *module, PyObject *args) {
  state *s = PyModule_GetState(module);
  const char *name;
  PyObject *shape, *out = NULL;
  Py_buffer data;
  int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], row = 1;
  int number = 0;
  if (!PyArg_ParseTuple(args, "sOy*", &name, &shape, &data)) return NULL;
  while (number < DTYPES && strcmp(dtypes[number].name, name)) number++;
  Py_ssize_t rank = PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
  if (number == DTYPES || rank < 0 || rank > MOST_DIMENSIONS) {
    PyErr_Format(PyExc_ValueError, "a tensor of dtype '%s' and shape %R: expected a dtype such as 'float32', and a tuple", name, shape);
    goto done;
  }
  for (Py_ssize_t d = 0; d < rank; d++) {
    sizes[d] = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
    if (PyErr_Occurred()) goto done;
  }
  for (Py_ssize_t d = rank; d--;) {
    strides[d] = row;
    if (sizes[d] < 0 || __builtin_mul_overflow(row, sizes[d], &row) || row > PY_SSIZE_T_MAX / 16) row = -1, d = 0;
  }
  if (row < 0 || row * (dtypes[number].bits / 8) != data.len) {
    PyErr_Format(PyExc_ValueError, "%zd bytes for a tensor of dtype %s and shape %R", data.len, name, shape);
    goto done;
  }
  out = copied(s, &(DLTensor){data.buf, {1, 0}, (int32_t)rank, {dtypes[number].code, dtypes[number].bits, 1}, sizes, strides, 0});
done:
  PyBuffer_Release(&data);
  return out;
}

/* errors(classes): one class for each status. */
static PyObject *module_errors(PyObject *module, PyObject *classes) {
  state *s = PyModule_GetState(module);
  if (!PyList_Check(classes) || PyList_Size(classes) != AOTB_MEMORY + 1) {
    PyErr_SetString(PyExc_TypeError, "expected a list of an exception for each aotb_status");
    return NULL;
  }
  PyObject *before = s->errors;
  s->errors = Py_NewRef(classes);
  if (before) Py_DecRef(before);
  Py_RETURN_NONE;
}

/* --- the module ------------------------------------------------------------------------------------------------------------------------------- */

/* Method flags give the true type of functions that are not a PyCFunction. */
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef tensor_methods[] = {{"__dlpack__", FAST(tensor_dlpack), METH_VARARGS | METH_KEYWORDS, NULL},
                                       {"__dlpack_device__", tensor_device, METH_NOARGS, NULL},
                                       {"tobytes", tensor_tobytes, METH_NOARGS, NULL},
                                       {NULL, NULL, 0, NULL}};
static PyGetSetDef tensor_fields[] = {
    {"shape", tensor_shape, NULL, NULL, NULL}, {"dtype", tensor_dtype, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot tensor_slots[] = {
    {Py_tp_dealloc, (void *)(uintptr_t)tensor_dealloc},
    {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_fields},
    {Py_bf_getbuffer, (void *)(uintptr_t)tensor_getbuffer},
    {Py_tp_doc, (void *)(uintptr_t)"Numbers in memory: NumPy's asarray and torch.from_dlpack take it without a copy."},
    {0, NULL}};
static PyType_Spec tensor_spec = {"aot_backward_native.Tensor", sizeof(Tensor), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                  tensor_slots};

static PyMethodDef function_methods[] = {{"run", FAST(function_run), METH_FASTCALL | METH_KEYWORDS, NULL},
                                         {"forward", FAST(function_forward), METH_FASTCALL | METH_KEYWORDS, NULL},
                                         {"backward", FAST(function_backward), METH_FASTCALL | METH_KEYWORDS, NULL},
                                         {"accumulate", FAST(function_accumulate), METH_FASTCALL | METH_KEYWORDS, NULL},
                                         {"update", function_update, METH_NOARGS, NULL},
                                         {"zero_grad", function_zero_grad, METH_NOARGS, NULL},
                                         {"train", function_train, METH_O, NULL},
                                         {"use_variant", function_use_variant, METH_O, NULL},
                                         {"convert", function_convert, METH_O, NULL},
                                         {"scale", function_scale, METH_VARARGS, NULL},
                                         {"structure", function_structure, METH_O, NULL},
                                         {"size", function_size, METH_O, NULL},
                                         {"door", function_door, METH_O, NULL},
                                         {"set_state", function_set_state, METH_VARARGS, NULL},
                                         {"number", function_number, METH_VARARGS, NULL},
                                         {"progress", function_progress, METH_NOARGS, NULL},
                                         {"save", function_save, METH_VARARGS, NULL},
                                         {"resume", function_resume, METH_VARARGS, NULL},
                                         {"state", function_state, METH_O, NULL},
                                         {"describe", function_describe, METH_VARARGS, NULL},
                                         {NULL, NULL, 0, NULL}};
static PyGetSetDef function_fields[] = {{"kind", function_kind, NULL, NULL, NULL},
                                        {"variants", function_variants, NULL, NULL, NULL},
                                        {"served", function_served, NULL, NULL, NULL},
                                        {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot function_slots[] = {
    {Py_tp_dealloc, (void *)(uintptr_t)function_dealloc}, {Py_tp_methods, function_methods}, {Py_tp_getset, function_fields}, {0, NULL}};
static PyType_Spec function_spec = {"aot_backward_native.Function", sizeof(Function), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                    function_slots};

static PyMethodDef package_methods[] = {{"function", package_function, METH_O, NULL},
                                        {"entries", package_entries, METH_NOARGS, NULL},
                                        {"metadata", package_metadata, METH_O, NULL},
                                        {"digest", package_digest, METH_NOARGS, NULL},
                                        {"seed", package_seed, METH_O, NULL},
                                        {"threads", package_threads, METH_O, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyType_Slot package_slots[] = {{Py_tp_dealloc, (void *)(uintptr_t)package_dealloc}, {Py_tp_methods, package_methods}, {0, NULL}};
static PyType_Spec package_spec = {"aot_backward_native.OpenPackage", sizeof(Package), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   package_slots};

static int begin(PyObject *module) {
  state *s = PyModule_GetState(module);
  s->package = (PyTypeObject *)PyType_FromModuleAndSpec(module, &package_spec, NULL);
  s->function = (PyTypeObject *)PyType_FromModuleAndSpec(module, &function_spec, NULL);
  s->tensor = (PyTypeObject *)PyType_FromModuleAndSpec(module, &tensor_spec, NULL);
  return s->package && s->function && s->tensor && !PyModule_AddType(module, s->tensor) ? 0 : -1;
}

static PyMethodDef module_methods[] = {{"open", module_open, METH_VARARGS, NULL},
                                       {"errors", module_errors, METH_O, NULL},
                                       {"tensor", module_tensor, METH_VARARGS, NULL},
                                       {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)(uintptr_t)begin}, {0, NULL}};
/* The module state lives as long as the process: packages and functions point to it. */
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "aot_backward_native._extension", .m_size = sizeof(state),
                                        .m_methods = module_methods, .m_slots = module_slots};

PyMODINIT_FUNC PyInit__extension(void) { return PyModuleDef_Init(&definition); }
