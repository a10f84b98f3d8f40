/* Scans along one dimension: cumsum, cumprod, logcumsumexp, cummax and cummin. */
#include "core.h"

#include <math.h>
#include <string.h>

typedef enum { SUM, PRODUCT, LOG_SUM } scan;
typedef struct {
  int64_t outer, n, inner;
} extent; /* elements of a dimension, and before and behind it */

static extent along(const tensor *t, int64_t dim) {
  extent e = {1, 1, 1};
  if (dim < 0) dim += t->rank;
  for (int32_t d = 0; d < t->rank; d++) *(d < dim ? &e.outer : d == dim ? &e.n : &e.inner) *= t->sizes[d];
  return e;
}

#define TOTAL_OF(type) __typeof__(_Generic((type)0, float: (double)0, default: (type)0)) /* like eager: at::acc_type */
#define SCAN(type, suffix)                                                                                                                           \
  static void scan_##suffix(const type *from, type *to, extent e, scan how) {                                                                        \
    for (int64_t o = 0; o < e.outer; o++)                                                                                                            \
      for (int64_t i = 0; i < e.inner; i++) {                                                                                                        \
        const type *x = from + o * e.n * e.inner + i;                                                                                                \
        type *y = to + o * e.n * e.inner + i;                                                                                                        \
        TOTAL_OF(type) total = how == PRODUCT;                                                                                                       \
        for (int64_t k = 0; k < e.n; k++) y[k * e.inner] = (type)(how == SUM ? (total += x[k * e.inner]) : (total *= x[k * e.inner]));               \
      }                                                                                                                                              \
  }
SCAN(float, f)
SCAN(double, d)
SCAN(int64_t, l)

/* log(e^x + e^y) without overflow; NaN if one is NaN. */
#define LOG_SCAN(type, suffix, log1p, exp)                                                                                                           \
  static void log_scan_##suffix(const type *from, type *to, extent e) {                                                                              \
    for (int64_t o = 0; o < e.outer; o++)                                                                                                            \
      for (int64_t i = 0; i < e.inner; i++) {                                                                                                        \
        type total = -INFINITY;                                                                                                                      \
        for (int64_t k = 0; k < e.n; k++) {                                                                                                          \
          int64_t place = (o * e.n + k) * e.inner + i;                                                                                               \
          type x = from[place], less = x < total ? x : total, more = x < total ? total : x;                                                          \
          if (x != x || total != total) total = (type)NAN;                                                                                           \
          else total = less != more || isfinite(less) ? more + log1p(exp(less - more)) : x;                                                          \
          to[place] = total;                                                                                                                         \
        }                                                                                                                                            \
      }                                                                                                                                              \
  }
LOG_SCAN(float, f, log1pf, expf)
LOG_SCAN(double, d, log1p, exp)

static int scanned(const char *name, tensor *self, int64_t dim, scan how, tensor **out) {
  extent e = along(self, dim);
  tensor *x = tensor_dense(self), *y = tensor_new(self->rank, self->sizes, NULL, self->dtype);
  int failed = !x || !y;
  if (failed) {
  } else if (how == LOG_SUM && self->dtype == F32) log_scan_f(at(x), at(y), e);
  else if (how == LOG_SUM && self->dtype == F64) log_scan_d(at(x), at(y), e);
  else if (how != LOG_SUM && self->dtype == F32) scan_f(at(x), at(y), e, how);
  else if (how != LOG_SUM && self->dtype == F64) scan_d(at(x), at(y), e, how);
  else if (how != LOG_SUM && self->dtype == I64) scan_l(at(x), at(y), e, how);
  else failed = core_fail("%s of %s", name, name_of(self->dtype));
  tensor_drop(x);
  if (failed) return tensor_drop(y), 1;
  *out = y;
  return 0;
}

CORE int32_t aoti_torch_cpu_cumsum(tensor *self, int64_t dim, int32_t *dtype, tensor **out) {
  if (dtype && *dtype != self->dtype) return core_fail("cumsum of %s into %s", name_of(self->dtype), name_of(*dtype));
  return scanned("cumsum", self, dim, SUM, out);
}

CORE int32_t aoti_torch_cpu_cumprod(tensor *self, int64_t dim, int32_t *dtype, tensor **out) {
  if (dtype && *dtype != self->dtype) return core_fail("cumprod of %s into %s", name_of(self->dtype), name_of(*dtype));
  return scanned("cumprod", self, dim, PRODUCT, out);
}

CORE int32_t aoti_torch_cpu_logcumsumexp(tensor *self, int64_t dim, tensor **out) { return scanned("logcumsumexp", self, dim, LOG_SUM, out); }

/* --- cummax and cummin: they return the last index of equal values; NaN counts as both the largest and the smallest value --------------------- */

#define EXTREMES(type, suffix)                                                                                                                       \
  static void extremes_##suffix(const type *x, type *y, int64_t *places, extent e, bool largest) {                                                   \
    for (int64_t o = 0; o < e.outer; o++)                                                                                                            \
      for (int64_t i = 0; i < e.inner; i++) {                                                                                                        \
        int64_t first = o * e.n * e.inner + i, found = 0;                                                                                            \
        for (int64_t k = 0; k < e.n; k++) {                                                                                                          \
          type value = x[first + k * e.inner], best = x[first + found * e.inner];                                                                    \
          if (value != value || (best == best && (largest ? value >= best : value <= best))) found = k;                                              \
          y[first + k * e.inner] = x[first + found * e.inner];                                                                                       \
          places[first + k * e.inner] = found;                                                                                                       \
        }                                                                                                                                            \
      }                                                                                                                                              \
  }
EXTREMES(float, f)
EXTREMES(double, d)
EXTREMES(int64_t, l)

static int extremes(tensor *self, int64_t dim, bool largest, tensor **values, tensor **places) {
  extent e = along(self, dim);
  tensor *x = tensor_dense(self), *y = tensor_new(self->rank, self->sizes, NULL, self->dtype), *p = tensor_new(self->rank, self->sizes, NULL, I64);
  int failed = !x || !y || !p;
  if (failed) {
  } else if (self->dtype == F32) extremes_f(at(x), at(y), at(p), e, largest);
  else if (self->dtype == F64) extremes_d(at(x), at(y), at(p), e, largest);
  else if (self->dtype == I64) extremes_l(at(x), at(y), at(p), e, largest);
  else failed = core_fail("%s of %s", largest ? "cummax" : "cummin", name_of(self->dtype));
  tensor_drop(x);
  if (failed) return tensor_drop(y), tensor_drop(p), 1;
  *values = y;
  *places = p;
  return 0;
}

CORE int32_t aoti_torch_cpu_cummax(tensor *self, int64_t dim, tensor **values, tensor **places) { return extremes(self, dim, true, values, places); }
CORE int32_t aoti_torch_cpu_cummin(tensor *self, int64_t dim, tensor **values, tensor **places) { return extremes(self, dim, false, values, places); }
