/* Running sums, and the largest along a dimension. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define SCAN(type)                                                                                                                                   \
  {                                                                                                                                                  \
    const type *from = (const type *)at(x.t);                                                                                                        \
    type *to = at(y);                                                                                                                                \
    for (int64_t o = 0; o < outer; o++)                                                                                                              \
      for (int64_t i = 0; i < inner; i++) {                                                                                                          \
        SUM_OF(type) sum = 0;                                                                                                                        \
        for (int64_t k = 0; k < n; k++) to[(o * n + k) * inner + i] = (type)(sum += from[(o * n + k) * inner + i]);                                  \
      }                                                                                                                                              \
  }
#define SUM_OF(type) __typeof__(_Generic((type)0, float: (double)0, default: (type)0)) /* as eager: at::acc_type */

CORE int32_t aoti_torch_cpu_cumsum(tensor *self, int64_t dim, int32_t *dtype, tensor **out) {
  if (dtype && *dtype != self->dtype) return core_fail("cumsum of %s into %s", name_of(self->dtype), name_of(*dtype));
  struct {
    tensor *t;
  } x = {tensor_dense(self)};
  tensor *y = tensor_new(self->rank, self->sizes, NULL, self->dtype);
  if (!x.t || !y) return tensor_drop(x.t), tensor_drop(y), 1;
  int64_t outer = 1, n = 1, inner = 1;
  if (dim < 0) dim += self->rank;
  for (int32_t d = 0; d < self->rank; d++) *(d < dim ? &outer : d == dim ? &n : &inner) *= self->sizes[d];
  int failed = 0;
  if (self->dtype == F32) SCAN(float)
  else if (self->dtype == F64) SCAN(double)
  else if (self->dtype == I64) SCAN(int64_t)
  else failed = core_fail("cumsum of %s", name_of(self->dtype));
  tensor_drop(x.t);
  if (failed) return tensor_drop(y), 1;
  *out = y;
  return 0;
}

/* --- topk ------------------------------------------------------------------------------------------------------------------------------------- */

typedef struct {
  double value;
  int64_t place;
} ranked;

/* Falling, NaN first as the largest, equal ones in their order. */
static int falling(const void *x, const void *y) {
  const ranked *a = x, *b = y;
  bool an = a->value != a->value, bn = b->value != b->value;
  if (an != bn) return an ? -1 : 1;
  if (!an && a->value != b->value) return a->value > b->value ? -1 : 1;
  return a->place < b->place ? -1 : 1;
}

static int rising(const void *x, const void *y) {
  const ranked *a = x, *b = y;
  bool an = a->value != a->value, bn = b->value != b->value;
  if (an != bn) return an ? 1 : -1;
  if (!an && a->value != b->value) return a->value < b->value ? -1 : 1;
  return a->place < b->place ? -1 : 1;
}

CORE int32_t aoti_torch_cpu_topk(tensor *self, int64_t k, int64_t dim, int32_t largest, int32_t sorted, tensor **values, tensor **places) {
  (void)sorted;
  if (self->dtype != F32 && self->dtype != F64) return core_fail("topk of %s", name_of(self->dtype));
  if (!self->rank) return core_fail("topk of a number");
  if (dim < 0) dim += self->rank;
  int64_t sizes[RANKS], outer = 1, n = 1, inner = 1;
  for (int32_t d = 0; d < self->rank; d++) {
    sizes[d] = d == dim ? k : self->sizes[d];
    *(d < dim ? &outer : d == dim ? &n : &inner) *= self->sizes[d];
  }
  if (k < 0 || k > n) return core_fail("topk of %lld among %lld", (long long)k, (long long)n);
  size_t bytes = sizeof(ranked) * (size_t)n;
  tensor *x = tensor_dense(self), *v = tensor_new(self->rank, sizes, NULL, self->dtype), *p = tensor_new(self->rank, sizes, NULL, I64);
  ranked *row = take(bytes);
  if (!x || !v || !p || !row) return tensor_drop(x), tensor_drop(v), tensor_drop(p), give(row, bytes), 1;
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < inner; i++) {
      for (int64_t j = 0; j < n; j++)
        row[j] = (ranked){self->dtype == F32 ? ((float *)at(x))[(o * n + j) * inner + i] : ((double *)at(x))[(o * n + j) * inner + i], j};
      qsort(row, (size_t)n, sizeof *row, largest ? falling : rising);
      for (int64_t j = 0; j < k; j++) {
        int64_t to = (o * k + j) * inner + i;
        if (self->dtype == F32) ((float *)at(v))[to] = (float)row[j].value;
        else ((double *)at(v))[to] = row[j].value;
        ((int64_t *)at(p))[to] = row[j].place;
      }
    }
  give(row, bytes);
  tensor_drop(x);
  *values = v;
  *places = p;
  return 0;
}
