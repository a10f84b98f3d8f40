#define _POSIX_C_SOURCE 200809L
#include "core.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- errors ----------------------------------------------------------------------------------------------------------------------------------- */

static _Thread_local char words[512];

CORE const char *core_error(void) { return words; }

int core_fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(words, sizeof words, format, list);
  va_end(list);
  return 1;
}

/* If a check of compiled code fails, a C++ exception ends the call. Compiled code turns it into a status. */
CORE void aoti_torch_check(bool holds, const char *function, const char *file, uint32_t line, const char *text) {
  (void)function, (void)file, (void)line;
  if (holds) return;
  core_fail("%s", text);
  void (*raise)(const char *);
  void *library = dlopen("libstdc++.so.6", RTLD_NOW), *found = library ? dlsym(library, "_ZSt21__throw_runtime_errorPKc") : NULL;
  if (!found) abort(); /* compiled code depends on libstdc++ */
  memcpy(&raise, &found, sizeof raise);
  raise(text);
}

/* --- dtypes ----------------------------------------------------------------------------------------------------------------------------------- */

const char *name_of(int32_t dtype) {
  static const char *const names[] = {"uint8",     "int8",      "int16",      "int32", "int64", "float16", "float32", "float64",
                                      "complex32", "complex64", "complex128", "bool",  "",      "",        "",        "bfloat16"};
  return size_of(dtype) ? names[dtype] : "unknown";
}

/* --- memory ----------------------------------------------------------------------------------------------------------------------------------- */

/* Freed blocks of each thread, oldest first, because the next call needs the same sizes or similar ones. Fresh memory is slower: a force field of 512
 * atoms took 25 ms a call without these blocks and 17 with them. A sanitizer would not see a use after free in them, so MOST is 0 there.
 * MOST: bytes of them, which bounds memory. SPARE: how many, which bounds the search. A training step of PaiNN for 400 atoms took 99 ms with 96 blocks
 * of 64 MB together, 65 with 512 of 64 MB, 57 with 256 of 256 MB. */
#ifdef __SANITIZE_ADDRESS__
enum { MOST = 0 };
#else
enum { MOST = 256 << 20 };
#endif
enum { SPARE = 256 };
typedef struct {
  void *block;
  size_t bytes;
} spare;
typedef struct {
  spare at[SPARE];
  int count;
  size_t total;
} spares;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void free_spares(void *held) {
  spares *s = held;
  while (s->count) free(s->at[--s->count].block);
  free(s);
}

static void make_key(void) { pthread_key_create(&key, free_spares); }

static spares *own_spares(void) {
  static _Thread_local spares *own;
  if (!own) {
    pthread_once(&once, make_key);
    own = calloc(1, sizeof *own);
    if (own) pthread_setspecific(key, own);
  }
  return own;
}

/* Sizes differ by 64 bytes, or by a sixteenth to an eighth: calls whose sizes change a little, such as the neighbors of atoms, reuse their blocks. */
static size_t rounded(size_t bytes) {
  size_t step = 64;
  while (step <= bytes / 16) step *= 2;
  return bytes ? (bytes + step - 1) / step * step : step;
}

void *take(size_t bytes) {
  spares *s = MOST ? own_spares() : NULL;
  if (bytes > SIZE_MAX / 2) return core_fail("%zu bytes of memory", bytes), NULL;
  bytes = rounded(bytes);
  for (int i = s ? s->count - 1 : -1; i >= 0; i--) {
    if (s->at[i].bytes != bytes) continue;
    void *block = s->at[i].block;
    memmove(s->at + i, s->at + i + 1, (size_t)(--s->count - i) * sizeof *s->at);
    s->total -= bytes;
    return block;
  }
  void *block = aligned_alloc(64, bytes);
  if (!block) core_fail("cannot allocate %zu bytes of memory", bytes);
  return block;
}

void give(void *block, size_t bytes) {
  if (!block) return;
  spares *s = MOST ? own_spares() : NULL;
  bytes = rounded(bytes);
  if (!s || bytes > MOST) {
    free(block);
    return;
  }
  while (s->count == SPARE || s->total + bytes > MOST) { /* sizes of earlier calls, which may not come again */
    free(s->at[0].block);
    s->total -= s->at[0].bytes;
    memmove(s->at, s->at + 1, (size_t)--s->count * sizeof *s->at);
  }
  s->at[s->count++] = (spare){block, bytes};
  s->total += bytes;
}

CORE void core_threads(int count) {
  omp_set_num_threads(count);
  blas_threads(count);
}

int threads_for(double operations) {
  int most = omp_in_parallel() ? 1 : omp_get_max_threads();
  double worth = operations / 2e5;
  return worth < 2 ? 1 : worth < most ? (int)worth : most;
}

/* --- tensors ---------------------------------------------------------------------------------------------------------------------------------- */

static tensor *blank(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  if (rank < 0 || rank > RANKS) return core_fail("a tensor of %lld dimensions; at most %d are supported", (long long)rank, RANKS), NULL;
  if (!size_of(dtype)) return core_fail("tensors of dtype number %d are not supported", dtype), NULL;
  tensor *t = take(sizeof *t);
  if (!t) return NULL;
  t->held = NULL;
  t->after = NULL;
  t->listed = NULL;
  t->offset = 0;
  t->dtype = dtype;
  t->rank = (int32_t)rank;
  int64_t row = 1;
  for (int64_t d = rank; d--;) {
    t->sizes[d] = sizes[d];
    t->strides[d] = strides ? strides[d] : row;
    row *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return t;
}

/* Returns the bytes from the first element to the end of the last. */
static size_t extent(const tensor *t) {
  size_t reach = 1;
  for (int32_t d = 0; d < t->rank; d++) {
    if (!t->sizes[d]) return 0;
    reach += (size_t)(t->sizes[d] - 1) * (size_t)t->strides[d];
  }
  return reach * (size_t)size_of(t->dtype);
}

static tensor *hold(tensor *t, void *data, size_t bytes, bool own) {
  storage *s = take(sizeof *s);
  if (!s) {
    give(t, sizeof *t);
    return NULL;
  }
  *s = (storage){data, bytes, 1, own};
  t->held = s;
  return t;
}

tensor *tensor_new(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  tensor *t = blank(rank, sizes, strides, dtype);
  if (!t) return NULL;
  size_t bytes = extent(t);
  void *data = take(bytes);
  if (!data) {
    give(t, sizeof *t);
    return NULL;
  }
  return hold(t, data, bytes, true);
}

tensor *tensor_zeros(int64_t rank, const int64_t *sizes, int32_t dtype) {
  tensor *t = tensor_new(rank, sizes, NULL, dtype);
  if (t) memset(t->held->data, 0, t->held->bytes);
  return t;
}

tensor *tensor_like(const tensor *t, const int64_t *sizes, int32_t dtype) {
  int64_t strides[RANKS], order[RANKS], row = 1;
  for (int32_t d = 0; d < t->rank; d++) order[d] = t->rank - 1 - d;
  for (int32_t i = 1; i < t->rank; i++)
    for (int32_t k = i; k && t->strides[order[k]] < t->strides[order[k - 1]]; k--) { /* by rising stride */
      int64_t one = order[k];
      order[k] = order[k - 1];
      order[k - 1] = one;
    }
  for (int32_t i = 0; i < t->rank; i++) {
    strides[order[i]] = row;
    row *= sizes[order[i]] > 1 ? sizes[order[i]] : 1;
  }
  return tensor_new(t->rank, sizes, strides, dtype);
}

tensor *tensor_view(const tensor *of, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset) {
  tensor *t = blank(rank, sizes, strides, of->dtype);
  if (!t) return NULL;
  t->held = of->held;
  t->offset = offset;
  __atomic_add_fetch(&t->held->references, 1, __ATOMIC_RELAXED);
  return t;
}

static void release(storage *s) {
  if (!s || __atomic_sub_fetch(&s->references, 1, __ATOMIC_ACQ_REL)) return;
  if (s->own) give(s->data, s->bytes);
  give(s, sizeof *s);
}

void tensor_drop(tensor *t) {
  if (!t) return;
  if (t->listed) *t->listed = t->after;
  if (t->after) t->after->listed = t->listed;
  release(t->held);
  give(t, sizeof *t);
}

int64_t tensor_count(const tensor *t) {
  int64_t n = 1;
  for (int32_t d = 0; d < t->rank; d++) n *= t->sizes[d];
  return n;
}

bool tensor_is_dense(const tensor *t) {
  int64_t row = 1;
  for (int32_t d = t->rank; d--; row *= t->sizes[d])
    if (t->sizes[d] > 1 && t->strides[d] != row) return false;
  return true;
}

void tensor_copy(const tensor *from, tensor *to) {
  size_t size = (size_t)size_of(to->dtype), row = size;
  int64_t index[RANKS] = {0};
  int32_t rank = to->rank;
  char *t = at(to);
  const char *f = at(from);
  for (int32_t d = 0; d < rank; d++)
    if (!to->sizes[d]) return;
  while (rank && (to->sizes[rank - 1] == 1 ||
                  (to->strides[rank - 1] * (int64_t)size == (int64_t)row && from->strides[rank - 1] * (int64_t)size == (int64_t)row)))
    row *= (size_t)to->sizes[--rank];
  for (;;) {
    memcpy(t, f, row);
    int32_t d = rank;
    while (d && index[d - 1] + 1 == to->sizes[d - 1]) {
      d--;
      t -= index[d] * to->strides[d] * (int64_t)size;
      f -= index[d] * from->strides[d] * (int64_t)size;
      index[d] = 0;
    }
    if (!d) return;
    index[d - 1]++;
    t += to->strides[d - 1] * (int64_t)size;
    f += from->strides[d - 1] * (int64_t)size;
  }
}

tensor *tensor_dense(const tensor *t) {
  if (tensor_is_dense(t)) return tensor_view(t, t->rank, t->sizes, t->strides, t->offset);
  tensor *out = tensor_new(t->rank, t->sizes, NULL, t->dtype);
  if (out) tensor_copy(t, out);
  return out;
}

bool tensor_is_channels_last(const tensor *t) {
  int64_t least = 0;
  if ((t->rank != 4 && t->rank != 5) || !t->strides[1]) return false;
  for (int i = 0; i < t->rank; i++) { /* 1, then from the last one down to 2, then 0 */
    int d = !i ? 1 : i == t->rank - 1 ? 0 : t->rank - i;
    if (!t->sizes[d] || t->strides[d] < least || (!d && least == t->strides[1])) return false;
    least = t->strides[d] * (t->sizes[d] > 1 ? t->sizes[d] : 1);
  }
  return true;
}

tensor *tensor_laid_out(tensor *t, bool channels_last) {
  if (!t || !channels_last || (t->rank != 4 && t->rank != 5)) return t;
  int64_t strides[RANKS], step = t->sizes[1];
  for (int32_t d = t->rank - 1; d > 1; d--) {
    strides[d] = step;
    step *= t->sizes[d];
  }
  strides[0] = step;
  strides[1] = 1;
  tensor *out = tensor_new(t->rank, t->sizes, strides, t->dtype);
  if (out) tensor_copy(t, out);
  tensor_drop(t);
  return out;
}

/* --- AOTInductor's C interface: torch/csrc/inductor/aoti_torch/c/shim.h ----------------------------------------------------------------------- */

// clang-format off
#define CODE(name, number) CORE int32_t aoti_torch_dtype_##name(void) { return number; }
CODE(uint8, U8) CODE(int8, I8) CODE(int16, I16) CODE(int32, I32) CODE(int64, I64) CODE(float16, F16) CODE(float32, F32) CODE(float64, F64)
CODE(complex64, C64) CODE(complex128, C128) CODE(bool, BOOL) CODE(bfloat16, BF16)
    // clang-format on

    CORE int32_t aoti_torch_device_type_cpu(void) {
  return 0;
}
CORE int32_t aoti_torch_device_type_cuda(void) { return 1; }
CORE int32_t aoti_torch_layout_strided(void) { return 0; }
CORE int32_t aoti_torch_memory_format_contiguous_format(void) { return 0; }
CORE bool aoti_torch_grad_mode_is_enabled(void) { return false; }
CORE void aoti_torch_grad_mode_set_enabled(bool on) { (void)on; }
CORE size_t aoti_torch_dtype_element_size(int32_t dtype) { return (size_t)size_of(dtype); }
CORE void aoti_torch_warn(const char *function, const char *file, uint32_t line, const char *text) {
  (void)function, (void)file, (void)line, (void)text;
}

#define MADE(out, expression) return (*(out) = (expression)) ? 0 : 1

CORE int32_t aoti_torch_empty_strided(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index,
                                      tensor **out) {
  (void)device, (void)index;
  MADE(out, tensor_new(rank, sizes, strides, dtype));
}

CORE int32_t aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype,
                                                int32_t device, int32_t index, tensor **out) {
  (void)device, (void)index;
  tensor *t = blank(rank, sizes, strides, dtype);
  if (t) {
    t->offset = offset;
    t = hold(t, data, extent(t) + (size_t)offset * (size_t)size_of(dtype), false);
  }
  MADE(out, t);
}

CORE int32_t aoti_torch_create_tensor_from_blob_v2(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset,
                                                   int32_t dtype, int32_t device, int32_t index, tensor **out, int32_t layout,
                                                   const uint8_t *metadata, int64_t metadata_size) {
  (void)layout, (void)metadata, (void)metadata_size;
  return aoti_torch_create_tensor_from_blob(data, rank, sizes, strides, offset, dtype, device, index, out);
}

CORE int32_t aoti_torch__reinterpret_tensor(tensor *t, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, tensor **out) {
  MADE(out, tensor_view(t, rank, sizes, strides, t->offset + offset));
}

CORE int32_t aoti_torch_as_strided(tensor *t, const int64_t *sizes, const int64_t *strides, tensor **out) {
  MADE(out, tensor_view(t, t->rank, sizes, strides, t->offset));
}

/* Compiled code makes a view of each constant (MaybeOwningAtenTensorHandle). Code of torch 2.13 never drops it; code of 2.15 drops it with its model.
 * Between core_views_begin and core_views_end the views of this thread are listed. core_views_drop drops the remaining ones. */
typedef struct {
  tensor *first;
} views;
static _Thread_local views *current;

CORE views *core_views_begin(void) { return current = calloc(1, sizeof *current); }
CORE void core_views_end(void) { current = NULL; }

CORE void core_views_drop(views *v) {
  while (v && v->first) tensor_drop(v->first);
  free(v);
}

CORE int32_t aoti_torch_new_tensor_handle(tensor *t, tensor **out) {
  *out = tensor_view(t, t->rank, t->sizes, t->strides, t->offset);
  if (!*out) return 1;
  if (current) {
    (*out)->after = current->first;
    (*out)->listed = &current->first;
    if (current->first) current->first->listed = &(*out)->after;
    current->first = *out;
  }
  return 0;
}

CORE int32_t aoti_torch_new_uninitialized_tensor(tensor **out) {
  int64_t none = 0;
  MADE(out, blank(1, &none, NULL, F32));
}

/* Makes another handle for `t`. Branches of compiled code return their results with it. */
CORE int32_t aoti_torch_assign_tensors_out(tensor *t, tensor **out) {
  *out = tensor_view(t, t->rank, t->sizes, t->strides, t->offset);
  return !*out;
}

/* Makes `to` refer to the tensor `from`. */
CORE int32_t aoti_torch_assign_tensors(tensor *from, tensor *to) {
  storage *before = to->held;
  tensor *after = to->after, **in = to->listed;
  *to = *from;
  to->after = after;
  to->listed = in;
  __atomic_add_fetch(&to->held->references, 1, __ATOMIC_RELAXED);
  release(before);
  return 0;
}

CORE int32_t aoti_torch_clone(tensor *t, tensor **out) {
  tensor *made = tensor_like(t, t->sizes, t->dtype);
  if (made) tensor_copy(t, made);
  MADE(out, made);
}

CORE int32_t aoti_torch_delete_tensor_object(tensor *t) {
  tensor_drop(t);
  return 0;
}

/* The number of a tensor of one element. Loops of compiled code read their counter and their condition so. */
#define ITEM(name, type)                                                                                                                             \
  CORE int32_t aoti_torch_item_##name(tensor *t, type *out) { return *out = *(type *)at(t), 0; }
ITEM(bool, bool)
ITEM(int32, int32_t)
ITEM(int64, int64_t)
ITEM(float32, float)
ITEM(float64, double)

#define TELLS(name, type, value)                                                                                                                     \
  CORE int32_t aoti_torch_get_##name(tensor *t, type *out) { return *out = value, 0; }
TELLS(data_ptr, void *, at(t))
TELLS(sizes, int64_t *, t->sizes)
TELLS(strides, int64_t *, t->strides)
TELLS(dim, int64_t, t->rank)
TELLS(numel, int64_t, tensor_count(t))
TELLS(dtype, int32_t, t->dtype)
TELLS(storage_offset, int64_t, t->offset)
TELLS(storage_size, int64_t, (int64_t)t->held->bytes)
CORE int32_t aoti_torch_get_device_type(tensor *t, int32_t *out) { return (void)t, *out = 0; }
CORE int32_t aoti_torch_get_device_index(tensor *t, int32_t *out) { return (void)t, *out = 0; }
CORE int32_t aoti_torch_get_size(tensor *t, int64_t d, int64_t *out) { return *out = t->sizes[d], 0; }
CORE int32_t aoti_torch_get_stride(tensor *t, int64_t d, int64_t *out) { return *out = t->strides[d], 0; }
