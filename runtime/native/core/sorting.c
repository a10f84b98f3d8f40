/* Sorting along a dimension, and topk. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  int64_t key, place;
} ranked;

/* Maps a number to an integer in the same order: NaN is the largest, and 0 and -0 are equal. */
static int64_t key_of(const tensor *t, int64_t place) {
  int64_t bits;
  double value;
  switch (t->dtype) {
  case I64: return ((const int64_t *)at(t))[place];
  case I32: return ((const int32_t *)at(t))[place];
  case F32: value = ((const float *)at(t))[place]; break;
  default: value = ((const double *)at(t))[place];
  }
  if (value != value) return INT64_MAX;
  value += 0.0; /* -0 + 0 is 0 */
  memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? bits ^ INT64_MAX : bits;
}

static int rising(const void *x, const void *y) { /* stable: equal values keep their order */
  const ranked *a = x, *b = y;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return a->place < b->place ? -1 : 1;
}

static int falling(const void *x, const void *y) {
  const ranked *a = x, *b = y;
  if (a->key != b->key) return a->key > b->key ? -1 : 1;
  return a->place < b->place ? -1 : 1;
}

/* Computes the first `k` along `dim`. `values` and `places` have the same layout. */
static int ranks(const char *name, const tensor *self, int64_t k, int64_t dim, bool descending, tensor *values, tensor *places) {
  if (self->dtype != F32 && self->dtype != F64 && self->dtype != I64 && self->dtype != I32) return core_fail("%s of %s", name, name_of(self->dtype));
  int64_t sizes[RANKS], width = size_of(self->dtype), n = self->rank ? self->sizes[dim] : 1, step = self->rank ? values->strides[dim] : 0, rows = 1;
  for (int32_t d = 0; d < self->rank; d++) rows *= sizes[d] = d == dim ? 1 : self->sizes[d];
  tensor *x = tensor_dense(self);
  ranked *row = take(sizeof *row * (size_t)n);
  if (!x || !row) return tensor_drop(x), give(row, sizeof *row * (size_t)n), 1;
  for (int64_t r = 0; r < rows && n; r++) {
    int64_t left = r, from = 0, to = 0;
    for (int32_t d = self->rank - 1; d >= 0; d--) {
      from += left % sizes[d] * x->strides[d];
      to += left % sizes[d] * values->strides[d];
      left /= sizes[d];
    }
    int64_t apart = self->rank ? x->strides[dim] : 0;
    for (int64_t j = 0; j < n; j++) row[j] = (ranked){key_of(x, from + j * apart), j};
    qsort(row, (size_t)n, sizeof *row, descending ? falling : rising);
    for (int64_t j = 0; j < k; j++) {
      memcpy((char *)at(values) + (to + j * step) * width, (char *)at(x) + (from + row[j].place * apart) * width, (size_t)width);
      ((int64_t *)at(places))[to + j * step] = row[j].place;
    }
  }
  give(row, sizeof *row * (size_t)n);
  tensor_drop(x);
  return 0;
}

CORE int32_t aoti_torch_cpu_topk(tensor *self, int64_t k, int64_t dim, int32_t largest, int32_t sorted, tensor **values, tensor **places) {
  (void)sorted;
  if (!self->rank) return core_fail("topk of a number");
  if (dim < 0) dim += self->rank;
  int64_t sizes[RANKS];
  memcpy(sizes, self->sizes, sizeof sizes);
  if (k < 0 || k > sizes[dim]) return core_fail("topk of %lld among %lld", (long long)k, (long long)sizes[dim]);
  sizes[dim] = k;
  tensor *v = tensor_new(self->rank, sizes, NULL, self->dtype), *p = tensor_new(self->rank, sizes, NULL, I64);
  if (!v || !p || ranks("topk", self, k, dim, largest, v, p)) return tensor_drop(v), tensor_drop(p), 1;
  *values = v;
  *places = p;
  return 0;
}

CORE int32_t aoti_torch_cpu_sort_stable(tensor *self, int32_t *stable, int64_t dim, int32_t descending, tensor **values, tensor **places) {
  (void)stable;
  if (dim < 0) dim += self->rank;
  tensor *v = tensor_like(self, self->sizes, self->dtype), *p = tensor_like(self, self->sizes, I64);
  if (!v || !p || ranks("sort", self, self->rank ? self->sizes[dim] : 1, dim, descending, v, p)) return tensor_drop(v), tensor_drop(p), 1;
  *values = v;
  *places = p;
  return 0;
}

CORE int32_t aoti_torch_cpu_sort(tensor *self, int64_t dim, int32_t descending, tensor **values, tensor **places) {
  return aoti_torch_cpu_sort_stable(self, NULL, dim, descending, values, places);
}
