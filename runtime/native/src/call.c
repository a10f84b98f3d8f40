/* A call: matches inputs with a variant, like runtime/aot_backward_runtime/entries/dispatch.py, and returns results. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "function.h"

#define SHOWN(text) shown(text, strlen(text))
enum { DEEPEST = 64, ALIGNED = 64 }; /* dimensions, function.c refuses more; bytes, the alignment of PyTorch's allocator */

aotb_status function_enter(struct aotb_function *f) {
  if (__atomic_exchange_n(&f->busy, true, __ATOMIC_ACQUIRE))
    return aotb_fail(
        AOTB_INPUT,
        "entry %s: another thread is in a call of this function; a function serves one caller at a time: make one for each thread (aotb_get)",
        f->entry->name);
  return AOTB_OK;
}

aotb_status function_leave(struct aotb_function *f, aotb_status status) {
  __atomic_store_n(&f->busy, false, __ATOMIC_RELEASE);
  return status;
}

/* --- matching inputs -------------------------------------------------------------------------------------------------------------------------- */

/* Stores the reason why a variant does not match the call. Returns false. */
static bool refuse(struct aotb_function *f, const char *format, ...) PRINTF(2, 3);
static bool refuse(struct aotb_function *f, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(f->words, sizeof f->words, format, list);
  va_end(list);
  return false;
}

static const char *shape_words(const struct aotb_function *f, uint32_t rank, const int64_t *shape, char out[160]) {
  size_t n = 0;
  (void)f;
  out[n++] = '(';
  for (uint32_t d = 0; d < rank && n < 130; d++) n += (size_t)snprintf(out + n, 160 - n, "%s%" PRId64, d ? ", " : "", shape[d]);
  snprintf(out + n, 160 - n, n < 130 ? ")" : ", ...)");
  return out;
}

/* Checks dtype, device, rank and memory. */
static bool check_kind(struct aotb_function *f, const tensor_spec *spec, const DLTensor *t) {
  char shape[160];
  if (t->device.device_type != 1) return refuse(f, "%s is on device %" PRId32 "; expected 1, the CPU", spec->name, t->device.device_type);
  const dtype *given = dtype_of_dl(t->dtype);
  const char *problem = convert_problem(given, spec->type);
  char words[64];
  if (given != spec->type && (problem || !f->converting))
    return refuse(f, "%s: expected %s, got %s. %s", spec->name, spec->type->name, dtype_words(t->dtype, words),
                  problem ? problem : "Convert it, or let the function do it: aotb_convert(function, 1), in Python cast=True");
  if (t->ndim < 0 || (uint32_t)t->ndim != spec->rank)
    return refuse(f, "%s has %" PRId32 " dimensions; expected %" PRIu32, spec->name, t->ndim, spec->rank);
  if (spec->rank && !t->shape) return refuse(f, "%s has no shape", spec->name);
  int64_t elements = 1, reach = 0, row = 1;
  for (uint32_t d = spec->rank; d--;) {
    int64_t n = t->shape[d], stride = t->strides ? t->strides[d] : row, more;
    if (n < 0 || stride < 0 || __builtin_mul_overflow(elements, n, &elements) || __builtin_mul_overflow(row, n ? n : 1, &row) ||
        __builtin_mul_overflow(n ? n - 1 : 0, stride, &more) || __builtin_add_overflow(reach, more, &reach) || reach > INT64_MAX / 16 ||
        row > INT64_MAX / 16)
      return refuse(f, "%s has a size or stride that is negative, or too large: shape %s", spec->name, shape_words(f, spec->rank, t->shape, shape));
  }
  if (elements && !t->data) return refuse(f, "%s of shape %s has no data", spec->name, shape_words(f, spec->rank, t->shape, shape));
  return true;
}

static const char *label_of(const variant_spec *v, const symbol_spec *s, char out[200]) {
  const char *name = v->inputs.at[s->input].name;
  if (strcmp(s->label, s->name)) snprintf(out, 200, "%s (%s.shape[%" PRId64 "])", s->label, name, s->dim);
  else snprintf(out, 200, "%s.shape[%" PRId64 "]", name, s->dim);
  return out;
}

static bool solve(struct aotb_function *f, variant *v, const DLTensor *inputs) {
  const variant_spec *spec = v->spec;
  char label[200];
  for (uint32_t i = 0; i < spec->symbol_count; i++) {
    const symbol_spec *s = &spec->symbols[i];
    int64_t size = inputs[s->input].shape[s->dim], above, value;
    if (__builtin_sub_overflow(size, s->offset, &above)) return refuse(f, "%s is %" PRId64, label_of(spec, s, label), size);
    value = above / s->scale;
    if (above % s->scale && above < 0) value--;
    if (above % s->scale)
      return refuse(f, "%s is %" PRId64 "; expected %" PRId64 " * n + %" PRId64, label_of(spec, s, label), size, s->scale, s->offset);
    if (value < s->minimum || (s->bounded && value > s->maximum)) {
      char top[64] = "";
      if (s->bounded) snprintf(top, sizeof top, " and at most %" PRId64, s->scale * s->maximum + s->offset);
      return refuse(f, "%s is %" PRId64 "; expected at least %" PRId64 "%s: export a variant for other sizes", label_of(spec, s, label), size,
                    s->scale * s->minimum + s->offset, top);
    }
    v->values[i] = value;
  }
  for (uint32_t i = 0; i < spec->inputs.count; i++) {
    const tensor_spec *t = &spec->inputs.at[i];
    for (uint32_t d = 0; d < t->rank; d++) {
      int64_t wanted;
      if (!expression_value(&t->shape[d], v->values, &wanted))
        return refuse(f, "%s: %s, its size in dimension %" PRIu32 ", cannot be computed", t->name, t->shape[d].text, d);
      if (inputs[i].shape[d] != wanted)
        return refuse(f, "%s has size %" PRId64 " in dimension %" PRIu32 "; expected %" PRId64 "%s%s", t->name, inputs[i].shape[d], d, wanted,
                      t->shape[d].code ? ", as other inputs say: " : "", t->shape[d].code ? t->shape[d].text : "");
    }
  }
  for (uint32_t i = 0; i < spec->guard_count; i++) {
    int64_t holds;
    if (expression_value(&spec->guards[i], v->values, &holds) && holds) continue;
    return refuse(f, "the compiled code is valid only if %s: export a variant for these sizes", spec->guards[i].text);
  }
  return true;
}

/* Returns whether `data` lies in a result of an earlier call, which this call frees. */
static bool is_lent(const struct aotb_function *f, const void *data) {
  for (uint32_t i = 0; i < f->entry->variant_count; i++) {
    const variant *v = &f->variants[i];
    const runnable *all[] = {&v->forward, &v->backward, &v->inference, &v->gradient, &v->step, &v->accumulate};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
      for (uint32_t n = 0; n < all[k]->lent_count; n++)
        if ((uintptr_t)data >= all[k]->lent[n].begin && (uintptr_t)data < all[k]->lent[n].end) return true;
  }
  return false;
}

/* Sets `to` to the tensor with the dtype and strides that the code was compiled for: the tensor itself, or a copy in the function's memory. */
static bool fit(struct aotb_function *f, const tensor_spec *spec, const DLTensor *t, const int64_t *values, fitted *to) {
  const dtype *own = dtype_of_dl(t->dtype);
  bool fits = own == spec->type, empty = false;
  int64_t given[DEEPEST], row = 1, reach = 0, elements = 1;
  for (uint32_t d = spec->rank; d--;) {
    int64_t n = to->shape[d] = t->shape[d];
    given[d] = t->strides ? t->strides[d] : row;
    row *= n ? n : 1;
    empty = empty || !n;
    elements *= n;
    if (!expression_value(&spec->stride[d], values, &to->stride[d]) || to->stride[d] < 0)
      return refuse(f, "%s: %s, its stride in dimension %" PRIu32 ", cannot be computed", spec->name, spec->stride[d].text, d);
    if (n <= 1) continue;
    fits = fits && given[d] == to->stride[d];
    int64_t more;
    if (__builtin_mul_overflow(n - 1, to->stride[d], &more) || __builtin_add_overflow(reach, more, &reach) || reach > INT64_MAX / 16)
      return refuse(f, "%s spans too much memory", spec->name);
  }
  char *data = t->data ? (char *)t->data + t->byte_offset : NULL;
  uint32_t scalar = own->dl.code == 5 ? (uint32_t)own->size / 2 : (uint32_t)own->size;
  to->data = data;
  if (empty || (fits && !((uintptr_t)data % scalar) && !is_lent(f, data))) return true;
  if (reach > 16 * elements + (1 << 20)) return refuse(f, "%s would be spread over %" PRId64 " elements", spec->name, reach);
  size_t bytes = ((size_t)reach + 1) * (size_t)spec->type->size;
  if (bytes > to->room) {
    free(to->scratch);
    to->room = 0;
    if (!(to->scratch = aligned_alloc(ALIGNED, (bytes + 2 * ALIGNED - 1) / ALIGNED * ALIGNED)))
      return refuse(f, "%s has another dtype or other strides than the code was compiled for, and there is no memory for a copy", spec->name);
    to->room = bytes;
  }
  to->data = to->scratch;
  char unfit[32];
  if (own == spec->type) copy_tensor(to->data, to->stride, data, given, (size_t)spec->type->size, spec->rank, to->shape);
  else if (!convert_tensor(to->data, to->stride, spec->type, data, given, own, spec->rank, to->shape, unfit))
    return refuse(f, "%s: expected numbers that fit %s, got %s. Export a variant for %s", spec->name, spec->type->name, unfit, own->name);
  return true;
}

static bool serves(struct aotb_function *f, variant *v, const DLTensor *inputs, uint32_t count) {
  const tensor_specs *wanted = &v->spec->inputs;
  if (count != wanted->count) return refuse(f, "%" PRIu32 " inputs; expected %" PRIu32, count, wanted->count);
  for (uint32_t i = 0; i < count; i++)
    if (!check_kind(f, &wanted->at[i], &inputs[i])) return false;
  v->saved = false; /* sizes and inputs of its last forward are replaced */
  if (!solve(f, v, inputs)) return false;
  for (uint32_t i = 0; i < count; i++)
    if (!fit(f, &wanted->at[i], &inputs[i], v->values, &v->inputs[i])) return false;
  return true;
}

static uint32_t gradients_of(const variant *v) { return v->spec->backward ? v->spec->backward->gradient_count : 0; }

/* Appends the reason why another variant does not match. */
static void add_reason(const struct aotb_function *f, char *reasons, size_t room, bool first) {
  size_t n = strlen(reasons), left = room - n;
  int written = snprintf(reasons + n, left, "%s%s", first ? "" : "; or ", f->words);
  if (written < 0 || (size_t)written >= left) reasons[room - 1] = 0;
}

variant *function_match(struct aotb_function *f, const DLTensor *inputs, uint32_t count, bool most_gradients) {
  char reasons[sizeof f->words] = "";
  const char *mode = f->in_training ? "train" : "eval", *other = NULL;
  variant *best = NULL;
  uint32_t tried = 0;
  f->sized = false;
  if (count && !inputs) {
    aotb_fail(AOTB_INPUT, "entry %s: %" PRIu32 " inputs, and no array of them", f->entry->name, count);
    return NULL;
  }
  for (int pass = 0; !best && pass <= f->converts; pass++) { /* a variant of the given dtypes comes before one that needs a conversion */
    f->converting = pass;
    tried = 0;
    reasons[0] = 0;
    for (uint32_t i = 0; i < f->entry->variant_count; i++) {
      variant *v = &f->variants[i];
      if (f->only >= 0 && f->only != i) continue;
      if (*v->spec->mode && strcmp(v->spec->mode, mode)) {
        other = v->spec->mode;
        continue;
      }
      if (best && gradients_of(v) <= gradients_of(best)) continue;
      if (!serves(f, v, inputs, count)) {
        add_reason(f, reasons, sizeof reasons, !tried++);
        continue;
      }
      best = v;
      if (!most_gradients) break;
    }
  }
  if (best) {
    f->served = (uint32_t)(best - f->variants);
    f->sized = true;
  } else if (!tried)
    aotb_fail(AOTB_INPUT, "entry %s is in mode '%s' and was exported for '%s': aotb_train(function, %d)", f->entry->name, mode,
              other ? other : "none", other && !strcmp(other, "train"));
  else if (tried == 1) aotb_fail(AOTB_INPUT, "entry %s: %s", f->entry->name, reasons);
  else aotb_fail(AOTB_INPUT, "none of the %" PRIu32 " variants of entry %s serves this call: %s", tried, f->entry->name, reasons);
  return best;
}

/* --- results ---------------------------------------------------------------------------------------------------------------------------------- */

/* The expected dtype and shape of a result: output `i`, or gradient `i - outputs`. */
typedef struct {
  const source *from;
  const dtype *type;
  uint32_t rank;
  const char *name;
  int64_t shape[DEEPEST];
} wanted_result;

static bool wanted(struct aotb_function *f, variant *v, const runnable *r, uint32_t i, wanted_result *out) {
  uint32_t outputs = r == &v->backward ? 0 : r->plan->outputs.count;
  if (i < outputs) {
    const tensor_spec *spec = &v->spec->outputs.at[i];
    *out = (wanted_result){.from = &r->plan->outputs.at[i], .type = spec->type, .rank = spec->rank, .name = spec->name};
    for (uint32_t d = 0; d < spec->rank && d < DEEPEST; d++)
      if (!expression_value(&spec->shape[d], v->values, &out->shape[d]))
        return refuse(f, "%s: %s cannot be computed", spec->name, spec->shape[d].text);
    return true;
  }
  const gradient_spec *g = &r->plan->gradients[i - outputs];
  out->from = &g->from;
  if (!strncmp(g->of, "input:", 6)) {
    uint32_t number = (uint32_t)strtoul(g->of + 6, NULL, 10);
    const tensor_spec *spec = &v->spec->inputs.at[number];
    out->type = spec->type;
    out->rank = spec->rank;
    out->name = spec->name;
    memcpy(out->shape, v->inputs[number].shape, spec->rank * sizeof *out->shape);
    return true;
  }
  for (uint32_t s = 0; s < f->entry->state_count; s++) {
    const state_spec *state = &f->entry->state[s];
    if (strcmp(state->name, g->of + 10)) continue;
    const weight_spec *w = f->weights[state->weight]->spec;
    out->type = w->type;
    out->rank = w->rank;
    out->name = state->label;
    memcpy(out->shape, w->shape, w->rank * sizeof *out->shape);
  }
  return true;
}

/* Checks that the caller's tensor can take the result. If an earlier call filled in its shape, the tensor is the function's and is filled in anew. */
static aotb_status check_own(struct aotb_function *f, const wanted_result *w, DLTensor *t) {
  char one[160], other[160], words[64];
  uintptr_t at = (uintptr_t)t->shape - (uintptr_t)f->layouts;
  if (at < f->layout_count * sizeof *f->layouts) {
    t->data = NULL;
    return AOTB_OK;
  }
  if (is_lent(f, (char *)t->data + t->byte_offset))
    return aotb_fail(AOTB_INPUT, "entry %s: the tensor for %s lies in a result of an earlier call, which this call frees: set its data to NULL",
                     f->entry->name, w->name);
  bool same = t->device.device_type == 1 && t->dtype.code == w->type->dl.code && t->dtype.bits == w->type->dl.bits && t->dtype.lanes == 1 &&
              t->ndim >= 0 && (uint32_t)t->ndim == w->rank && (t->shape || !w->rank);
  for (uint32_t d = 0; same && d < w->rank; d++) same = t->shape[d] == w->shape[d] && (!t->strides || t->strides[d] >= 0);
  if (same) return AOTB_OK;
  return aotb_fail(AOTB_INPUT, "entry %s: the tensor for %s: expected %s of shape %s without negative strides, got %s of shape %s%s", f->entry->name,
                   w->name, w->type->name, shape_words(f, w->rank, w->shape, one), dtype_words(t->dtype, words),
                   shape_words(f,
                               t->ndim < 0 || !t->shape      ? 0
                               : (uint32_t)t->ndim < DEEPEST ? (uint32_t)t->ndim
                                                             : DEEPEST,
                               t->shape, other),
                   t->device.device_type == 1 ? "" : " on another device than the CPU");
}

static void drop_results(runnable *r) {
  uint32_t count = r->lib ? r->lib->spec->outputs.count : 0;
  r->lent_count = 0;
  for (uint32_t i = 0; i < count; i++)
    if (r->results[i]) {
      r->lib->backend->drop(r->results[i]);
      r->results[i] = NULL;
    }
}

/* Finds memory, shape and strides of a result. */
static bool locate(struct aotb_function *f, variant *v, const runnable *r, const wanted_result *w, void **data, const int64_t **shape,
                   const int64_t **stride) {
  if (w->from->from == FROM_RESULT) {
    const backend *b = r->lib->backend;
    tensor_handle h = r->results[w->from->number];
    int64_t *sizes, *strides;
    if (b->data(h, data) || b->sizes(h, &sizes) || b->strides(h, &strides)) return false;
    *shape = sizes;
    *stride = strides;
    return true;
  }
  if (w->from->from == FROM_INPUT) {
    const fitted *t = &v->inputs[w->from->number];
    *data = t->data;
    *shape = t->shape;
    *stride = t->stride;
    return true;
  }
  for (uint32_t s = 0; s < f->entry->state_count; s++)
    if (!strcmp(f->entry->state[s].name, w->from->text + 10)) {
      const weight *held = f->weights[f->entry->state[s].weight];
      *data = held->data;
      *shape = held->spec->shape;
      *stride = held->spec->stride;
    }
  return true;
}

/* Fills `out` with a copy of the result, multiplied by `factor`: compiled code may have put the result into memory that another result has too. */
static aotb_status give_scaled(struct aotb_function *f, runnable *r, uint32_t i, const wanted_result *w, const void *data, const int64_t *stride,
                               double factor, DLTensor *out) {
  fitted *to = &f->scaled[i];
  int64_t row = 1, *shape = f->layouts[i][0], *dense = f->layouts[i][1];
  for (uint32_t d = w->rank; d--;) {
    shape[d] = w->shape[d];
    dense[d] = row;
    row *= w->shape[d];
  }
  size_t bytes = (size_t)row * (size_t)w->type->size;
  if (bytes > to->room || !to->scratch) {
    free(to->scratch);
    to->room = 0;
    to->scratch = aligned_alloc(ALIGNED, (bytes + 2 * ALIGNED - 1) / ALIGNED * ALIGNED);
    if (!to->scratch) return aotb_fail(AOTB_MEMORY, "entry %s: no memory for %s, which is scaled", f->entry->name, w->name);
    to->room = bytes;
  }
  scale_tensor(to->scratch, dense, data, stride, w->type, factor, w->rank, w->shape);
  r->lent[r->lent_count++] = (lent){(uintptr_t)to->scratch, (uintptr_t)to->scratch + bytes};
  *out = (DLTensor){.data = to->scratch, .device = {1, 0}, .ndim = (int32_t)w->rank, .dtype = w->type->dl, .shape = shape, .strides = dense};
  return AOTB_OK;
}

static aotb_status give(struct aotb_function *f, variant *v, runnable *r, uint32_t i, bool reached, DLTensor *out) {
  wanted_result w;
  void *data = NULL;
  const int64_t *shape = NULL, *stride = NULL;
  wanted(f, v, r, i, &w);
  uint32_t outputs = r == &v->backward ? 0 : r->plan->outputs.count;
  double factor = i < outputs ? 1 : v->factors[i - outputs];
  if (w.from->from == FROM_NOTHING || !reached) {
    out->ndim = -1;
    return AOTB_OK;
  }
  if (!locate(f, v, r, &w, &data, &shape, &stride)) return aotb_fail(AOTB_RUN, "entry %s: %s cannot be read", f->entry->name, w.name);
  if (w.rank && memcmp(shape, w.shape, w.rank * sizeof *shape))
    return aotb_fail(AOTB_RUN, "entry %s: native code gave %s another shape than it was compiled for", f->entry->name, w.name);
  if (out->data) {
    int64_t row = 1, plain[DEEPEST];
    for (uint32_t d = w.rank; d--;) {
      plain[d] = out->strides ? out->strides[d] : row;
      row *= w.shape[d];
    }
    char *own = (char *)out->data + out->byte_offset;
    if (factor != 1) scale_tensor(own, plain, data, stride, w.type, factor, w.rank, w.shape);
    else copy_tensor(own, plain, data, stride, (size_t)w.type->size, w.rank, w.shape);
    return AOTB_OK;
  }
  if (factor != 1) return give_scaled(f, r, i, &w, data, stride, factor, out);
  if (w.from->from == FROM_RESULT) {
    int64_t reach = 1;
    for (uint32_t d = 0; d < w.rank; d++) reach += shape[d] > 0 ? (shape[d] - 1) * stride[d] : 0;
    r->lent[r->lent_count++] = (lent){(uintptr_t)data, (uintptr_t)data + (uintptr_t)(reach * w.type->size)};
  }
  memcpy(f->layouts[i][0], shape, w.rank * sizeof *shape);
  memcpy(f->layouts[i][1], stride, w.rank * sizeof *stride);
  *out = (DLTensor){
      .data = data, .device = {1, 0}, .ndim = (int32_t)w.rank, .dtype = w.type->dl, .shape = f->layouts[i][0], .strides = f->layouts[i][1]};
  return AOTB_OK;
}

/* --- the call --------------------------------------------------------------------------------------------------------------------------------- */

static int32_t operand(struct aotb_function *f, variant *v, const backend *b, const source *from, tensor_handle *out) {
  const fitted *t = NULL;
  const tensor_spec *spec = NULL;
  if (from->from == FROM_INPUT) {
    t = &v->inputs[from->number];
    spec = &v->spec->inputs.at[from->number];
  } else if (from->from == FROM_COTANGENT) {
    t = &v->incoming[from->number];
    spec = &v->spec->cotangents.at[from->number];
  } else if (from->from == FROM_SIZE) { /* passed as the size of an empty tensor */
    int64_t shape[2] = {0, 0}, stride[2] = {1, 1};
    if (!expression_value(&from->size, v->values, &shape[0]) || shape[0] < 0) return 1;
    return b->from_blob(NULL, 2, shape, stride, 0, 6, 0, 0, out);
  } else if (v->forward.plan->saved.at[from->number].from == FROM_INPUT) {
    uint32_t number = v->forward.plan->saved.at[from->number].number;
    t = &v->inputs[number];
    spec = &v->spec->inputs.at[number];
  } else {
    uint32_t number = v->forward.plan->saved.at[from->number].number;
    tensor_handle h = v->forward.results[number];
    const tensor_spec *made = &v->forward.lib->spec->outputs.at[number];
    int64_t *sizes, *strides;
    void *data;
    if (b->data(h, &data) || b->sizes(h, &sizes) || b->strides(h, &strides)) return 1;
    return b->from_blob(data, made->rank, sizes, strides, 0, made->type->code, 0, 0, out);
  }
  (void)f;
  return b->from_blob(t->data, spec->rank, t->shape, t->stride, 0, spec->type->code, 0, 0, out);
}

/* Returns the name of a state that the call writes and that shares memory with an input; NULL: none. */
static const char *overlapped(const struct aotb_function *f, const runnable *r, const fitted *t, const tensor_spec *spec) {
  int64_t reach = 0;
  for (uint32_t d = 0; d < spec->rank; d++) {
    if (!t->shape[d]) return NULL;
    reach += (t->shape[d] - 1) * t->stride[d];
  }
  uintptr_t begin = (uintptr_t)t->data, end = begin + ((uintptr_t)reach + 1) * (uintptr_t)spec->type->size;
  for (uint32_t i = 0; i < r->plan->writes.count; i++)
    for (uint32_t s = 0; s < f->entry->state_count; s++) {
      if (strcmp(f->entry->state[s].name, r->plan->writes.at[i])) continue;
      const weight *w = f->weights[f->entry->state[s].weight];
      uintptr_t first = (uintptr_t)w->data, last = first + (uintptr_t)w->span * (uintptr_t)w->spec->type->size;
      if (begin < last && first < end) return f->entry->state[s].label;
    }
  return NULL;
}

aotb_status function_open(struct aotb_function *f, runnable *r) {
  jmp_buf back;
  if (r->lib || !r->plan->library) return AOTB_OK;
  f->a.back = &back;
  int status = setjmp(back);
  if (!status) {
    const library_spec *spec = r->plan->library;
    r->operands = TAKE(&f->a, spec->inputs.count + 1u, tensor_handle);
    r->results = TAKE(&f->a, spec->outputs.count + 1u, tensor_handle);
    r->lent = TAKE(&f->a, r->plan->outputs.count + r->plan->gradient_count + 1u, lent);
    r->lib = library_open(f->package, &f->a, f->package->backend, spec, f->weights);
  }
  f->a.back = NULL;
  return (aotb_status)status;
}

static uint32_t results_of(const variant *v, const runnable *r) { return (r == &v->backward ? 0 : r->plan->outputs.count) + r->plan->gradient_count; }

/* Returns the largest number of results of calls of this kind, over all variants. */
static uint32_t most_results(const struct aotb_function *f, const variant *v, const runnable *r) {
  uint32_t most = results_of(v, r);
  if (r == &f->step.update) return most;
  size_t place = (size_t)((const char *)r - (const char *)v);
  for (uint32_t i = 0; i < f->entry->variant_count; i++) {
    const runnable *other = (const runnable *)(const void *)((const char *)&f->variants[i] + place);
    uint32_t results = other->plan ? results_of(&f->variants[i], other) : 0;
    if (results > most) most = results;
  }
  return most;
}

aotb_status function_call(struct aotb_function *f, variant *v, runnable *r, DLTensor *outputs, uint32_t count) {
  uint32_t all = results_of(v, r);
  if (count > most_results(f, v, r))
    return aotb_fail(AOTB_INPUT, "entry %s: %" PRIu32 " results are asked for; it gives %" PRIu32, f->entry->name, count, all);
  if (count && !outputs) return aotb_fail(AOTB_INPUT, "entry %s: %" PRIu32 " results, and no array for them", f->entry->name, count);
  while (count > all) outputs[--count].ndim = -1; /* another variant gives more */
  for (uint32_t i = 0; i < count; i++) {
    wanted_result w;
    aotb_status status;
    if (!wanted(f, v, r, i, &w)) return aotb_fail(AOTB_INPUT, "entry %s: %s", f->entry->name, f->words);
    if (outputs[i].data && w.from->from != FROM_NOTHING && (status = check_own(f, &w, &outputs[i]))) return status;
  }
  for (uint32_t i = 0; r->plan->writes.count && i < v->spec->inputs.count; i++) {
    const char *name = overlapped(f, r, &v->inputs[i], &v->spec->inputs.at[i]);
    if (name)
      return aotb_fail(AOTB_INPUT, "entry %s: %s shares memory with %s, which the call updates in place: pass a copy", f->entry->name,
                       v->spec->inputs.at[i].name, name);
  }
  aotb_status status = function_open(f, r);
  if (status) return status;
  drop_results(r);
  if (r->lib) {
    for (uint32_t i = 0; i < r->plan->operands.count; i++)
      if (operand(f, v, r->lib->backend, &r->plan->operands.at[i], &r->operands[i])) {
        while (i--) r->lib->backend->drop(r->operands[i]);
        return aotb_fail(AOTB_MEMORY, "entry %s: an operand could not be made", f->entry->name);
      }
    if ((status = library_run(r->lib, f->entry->name, r->operands, r->results))) return status;
  }
  for (uint32_t i = 0; i < count && !status; i++) {
    bool reached = true;
    if (r == &v->backward) {
      const gradient_spec *g = &r->plan->gradients[i];
      reached = !g->cotangent_count;
      for (uint32_t k = 0; k < g->cotangent_count; k++) reached = reached || v->defined[g->cotangents[k]];
    }
    status = give(f, v, r, i, reached, &outputs[i]);
  }
  return status;
}

bool function_fit_incoming(struct aotb_function *f, variant *v, const DLTensor *incoming, uint32_t count) {
  const tensor_specs *specs = &v->spec->cotangents;
  f->converting = f->converts;
  if (count != specs->count) return refuse(f, "%" PRIu32 " incoming gradients; expected %" PRIu32, count, specs->count);
  for (uint32_t i = 0; i < count; i++) {
    const tensor_spec *spec = &specs->at[i];
    int64_t shape[DEEPEST], zero[DEEPEST] = {0};
    static const double zeros[2];
    for (uint32_t d = 0; d < spec->rank; d++)
      if (!expression_value(&spec->shape[d], v->values, &shape[d])) return refuse(f, "%s: %s cannot be computed", spec->name, spec->shape[d].text);
    DLTensor none = {(void *)(uintptr_t)zeros, {1, 0}, (int32_t)spec->rank, spec->type->dl, shape, zero, 0};
    const DLTensor *t = incoming[i].data ? &incoming[i] : &none;
    char one[160], other[160];
    v->defined[i] = t != &none;
    if (!check_kind(f, spec, t)) return false;
    for (uint32_t d = 0; d < spec->rank; d++)
      if (t->shape[d] != shape[d])
        return refuse(f, "%s has shape %s; expected %s", spec->name, shape_words(f, spec->rank, t->shape, one),
                      shape_words(f, spec->rank, shape, other));
    if (!fit(f, spec, t, v->values, &v->incoming[i])) return false;
  }
  return true;
}
