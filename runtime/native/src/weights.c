#define _POSIX_C_SOURCE 200809L
#include "weights.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"
#include "sha256.h"

#define WEIGHTS "extra/aot_backward/weights.safetensors"
/* Bytes: safetensors' own limit, and the alignment of PyTorch's allocator. */
static const uint64_t LARGEST_HEADER = 100000000;
enum { ALIGNED = 64 };

#define WRONG(a, ...) arena_fail(a, AOTB_FORMAT, "corrupt: member " WEIGHTS ": " __VA_ARGS__)
#define SHOWN(text) shown(text, strlen(text))

int64_t layout_span(uint32_t rank, const int64_t *shape, const int64_t *stride) {
  int64_t span = 1, elements = 1, below = 0;
  bool empty = false;
  for (uint32_t d = 0; d < rank; d++) {
    if (stride[d] < 0 || stride[d] >= (int64_t)1 << 60 || shape[d] < 0) return -1;
    empty = empty || !shape[d];
  }
  for (;;) { /* dimensions by rising stride: each stride must exceed the span of the smaller ones */
    int64_t next = INT64_MAX;
    uint32_t at = 0, equal = 0;
    for (uint32_t d = 0; d < rank; d++) {
      if (shape[d] <= 1 || stride[d] <= below) continue;
      equal = stride[d] == next ? equal + 1 : stride[d] < next ? 0 : equal;
      if (stride[d] < next) {
        next = stride[d];
        at = d;
      }
    }
    if (next == INT64_MAX) break;
    int64_t more;
    if (equal || next < span || __builtin_mul_overflow(shape[at] - 1, next, &more) || __builtin_add_overflow(span, more, &span)) return -1;
    if (__builtin_mul_overflow(elements, shape[at], &elements)) return -1;
    below = next;
  }
  if (empty) return 0;
  return span > 16 * elements + (1 << 20) ? -1 : span;
}

void copy_tensor(void *to, const int64_t *to_stride, const void *from, const int64_t *from_stride, size_t size, uint32_t rank, const int64_t *shape) {
  int64_t at[64] = {0};
  char *t = to;
  const char *f = from;
  for (uint32_t d = 0; d < rank; d++)
    if (!shape[d]) return;
  while (rank && shape[rank - 1] == 1) rank--;
  size_t row = size; /* dimensions that are contiguous in both are copied at once */
  while (rank && to_stride[rank - 1] * (int64_t)size == (int64_t)row && from_stride[rank - 1] * (int64_t)size == (int64_t)row)
    row *= (size_t)shape[--rank];
  for (;;) {
    memcpy(t, f, row);
    uint32_t d = rank;
    while (d && at[d - 1] + 1 == shape[d - 1]) { /* this index wraps around */
      d--;
      t -= at[d] * to_stride[d] * (int64_t)size;
      f -= at[d] * from_stride[d] * (int64_t)size;
      at[d] = 0;
    }
    if (!d) return;
    at[d - 1]++;
    t += to_stride[d - 1] * (int64_t)size;
    f += from_stride[d - 1] * (int64_t)size;
  }
}

static stored_tensors header(struct aotb_package *p, arena *a, uint64_t *data) {
  const member *m = archive_find(&p->z, WEIGHTS);
  archive z = p->z;
  z.a = a;
  uint8_t first[8];
  uint64_t length = 0;
  if (!m || m->size < 8) WRONG(a, "%s", m ? "too small" : "missing");
  archive_bytes(&z, m->offset, first, 8);
  for (int i = 8; i--;) length = length << 8 | first[i];
  if (length > m->size - 8 || length > LARGEST_HEADER) WRONG(a, "a header of %" PRIu64 " bytes", length);
  char *text = arena_take(a, (size_t)length + 1, 1);
  archive_bytes(&z, m->offset + 8, text, (size_t)length);
  *data = m->offset + 8 + length;
  return safetensors_read(a, AOTB_FORMAT, "corrupt: member " WEIGHTS, text, (size_t)length, m->size - 8 - length);
}

static void fill(void *data, const dtype *type, double value, int64_t count) {
  union {
    float f;
    double d;
    int64_t i;
    uint8_t b[16];
    uint32_t u;
  } one = {.b = {0}};
  const char *name = type->name;
  if (type->dl.code == 0 || type->dl.code == 1 || type->dl.code == 6) one.i = (int64_t)value; /* little-endian: the low bytes come first */
  else if (!strcmp(name, "float64") || !strcmp(name, "complex128")) one.d = value;
  else if (!strcmp(name, "float32") || !strcmp(name, "complex64")) one.f = (float)value;
  else if (!strcmp(name, "bfloat16")) {
    one.f = (float)value;
    uint32_t bits = one.u + 0x7FFF + (one.u >> 16 & 1);
    one.i = 0;
    one.u = bits >> 16;
  } else {
    _Float16 half = (_Float16)value;
    memcpy(one.b, &half, 2);
  }
  for (int64_t i = 0; i < count; i++) memcpy((char *)data + i * type->size, one.b, (size_t)type->size);
}

void weight_fill(const weight *w, double value) { fill(w->data, w->spec->type, value, w->span); }

static void *aligned(arena *a, int64_t count, int32_t size) {
  char *out = arena_take(a, (size_t)count * (size_t)size + ALIGNED + ALIGNED, 1); /* kernels may read a vector beyond the last element */
  return out + (-(uintptr_t)out & (ALIGNED - 1));
}

static void check_filled(const struct aotb_package *p, arena *a) {
  double filled = 0, others = 0;
  for (uint32_t i = 0; i < p->m.weight_count; i++) {
    const weight_spec *w = &p->m.weights[i];
    double bytes = w->type->size;
    for (uint32_t d = 0; d < w->rank; d++) bytes *= (double)w->shape[d];
    if (w->filled) filled += bytes;
    else others += bytes;
  }
  if (filled > 64 * others + (1 << 20))
    arena_fail(a, AOTB_FORMAT, "corrupt: the weights that are filled with one number take more memory than any optimizer's state");
}

/* Reads the bytes of a weight and compares them with its digest. */
static void read_stored(arena *a, const archive *z, uint64_t offset, void *out, size_t bytes, const weight_spec *w) {
  char digest[65];
  sha256 h;
  archive_bytes(z, offset, out, bytes);
  sha256_begin(&h);
  sha256_add(&h, out, bytes);
  sha256_end(&h, digest);
  if (strcmp(digest, w->sha256)) WRONG(a, "weight '%s': SHA-256 is %s, expected %s", SHOWN(w->key), digest, SHOWN(w->sha256));
  if (w->type->dl.code == 6)
    for (size_t k = 0; k < bytes; k++)
      if (((uint8_t *)out)[k] > 1) WRONG(a, "weight '%s': a boolean that is neither 0 nor 1", SHOWN(w->key));
}

static void lay_out(void *out, const void *raw, const weight_spec *w) {
  int64_t plain[64], next = 1;
  for (uint32_t d = w->rank; d--; next *= w->shape[d]) plain[d] = next;
  copy_tensor(out, w->stride, raw, plain, (size_t)w->type->size, w->rank, w->shape);
}

/* Reads a weight with strides that are not row-major. */
static void read_relaid(arena *a, const archive *z, uint64_t offset, void *out, size_t bytes, const weight_spec *w) {
  jmp_buf *outer = a->back, here;
  void *raw = malloc(bytes + 1);
  if (!raw) arena_fail(a, AOTB_MEMORY, "%zu bytes for weight '%s'", bytes, SHOWN(w->key));
  int status = setjmp(here);
  if (!status) {
    a->back = &here;
    read_stored(a, z, offset, raw, bytes, w);
    lay_out(out, raw, w);
  }
  a->back = outer;
  free(raw);
  if (status) longjmp(*outer, status);
}

weight *weights_read(struct aotb_package *p, arena *a, const uint32_t *numbers, uint32_t count) {
  weight *out = TAKE(a, count + 1u, weight);
  stored_tensors places = {0};
  uint64_t data = 0;
  archive z = p->z;
  z.a = a;
  check_filled(p, a);
  for (uint32_t i = 0; i < count; i++) {
    const weight_spec *w = &p->m.weights[numbers[i]];
    weight *to = &out[i];
    to->spec = w;
    to->elements = 1;
    for (uint32_t d = 0; d < w->rank; d++) to->elements *= w->shape[d]; /* below 2^60, or 0: manifest.c */
    to->span = layout_span(w->rank, w->shape, w->stride);
    if (to->span < 0) arena_fail(a, AOTB_FORMAT, "corrupt: weight '%s': its strides put elements over each other, or too far apart", SHOWN(w->key));
    if (to->span > (INT64_MAX >> 5)) arena_fail(a, AOTB_MEMORY, "weight '%s' is too large", SHOWN(w->key));
    to->data = aligned(a, to->span, w->type->size);
    if (w->filled) {
      if (w->fill != 0) fill(to->data, w->type, w->fill, to->span);
      continue;
    }
    if (!p->m.has_weights) arena_fail(a, AOTB_INPUT, "it was written without weights, and '%s' is needed", SHOWN(w->key));
    if (!places.at) places = header(p, a, &data);
    const stored *found = safetensors_find(&places, w->key);
    if (!found) WRONG(a, "weight '%s' is missing", SHOWN(w->key));
    if (!safetensors_is(found, w->type, w->rank, w->shape)) WRONG(a, "weight '%s' is another tensor than the manifest says", SHOWN(w->key));
    int64_t row = 1;
    bool plain = true;
    for (uint32_t d = w->rank; d--;) {
      plain = plain && (w->shape[d] <= 1 || w->stride[d] == row);
      row *= w->shape[d] ? w->shape[d] : 1;
    }
    size_t bytes = (size_t)to->elements * (size_t)w->type->size;
    if (plain) read_stored(a, &z, data + found->begin, to->data, bytes, w);
    else read_relaid(a, &z, data + found->begin, to->data, bytes, w);
  }
  return out;
}
