/* Linear algebra that compiled code calls by name: determinants, inverses, solutions, Cholesky factors; batched, float32 and float64. As in eager,
 * factors and most results are column-major. */
#include "core.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define T float
#define NAME f
#define FABS fabsf
#define SQRT sqrtf
#define LOG logf
#include "linear_algebra.inc"
#define T double
#define NAME d
#define FABS fabs
#define SQRT sqrt
#define LOG log
#include "linear_algebra.inc"

#define BY_TYPE(t, name, ...) ((t)->dtype == F32 ? name##_f(__VA_ARGS__) : name##_d(__VA_ARGS__))

static int check_square(const char *name, const tensor *a) {
  if (a->dtype != F32 && a->dtype != F64) return core_fail("%s of %s", name, name_of(a->dtype));
  if (a->rank < 2 || a->sizes[a->rank - 1] != a->sizes[a->rank - 2]) return core_fail("%s of matrices that are not square", name);
  return 0;
}

/* Makes a batch of matrices, each column-major or row-major. */
static tensor *matrices(int64_t rank, const int64_t *sizes, int32_t dtype, bool columns) {
  int64_t strides[RANKS], step = 1;
  for (int64_t d = rank - 1; d >= 0; step *= sizes[d] ? sizes[d] : 1, d--) strides[d] = step;
  if (columns && rank > 1) {
    strides[rank - 2] = 1;
    strides[rank - 1] = sizes[rank - 2] ? sizes[rank - 2] : 1;
  }
  return tensor_new(rank, sizes, strides, dtype);
}

static tensor *columns_of(const tensor *a) {
  tensor *out = matrices(a->rank, a->sizes, a->dtype, true);
  if (out) tensor_copy(a, out);
  return out;
}

static int64_t batch_of(const tensor *a) {
  int64_t out = 1;
  for (int32_t d = 0; d < a->rank - 2; d++) out *= a->sizes[d];
  return out;
}

static char *matrix(const tensor *t, int64_t number) { /* `t` was made by `matrices` */
  return (char *)at(t) + number * t->sizes[t->rank - 1] * t->sizes[t->rank - 2] * size_of(t->dtype);
}

/* Factors A, or its transpose, into a new tensor. `info` may be NULL. */
static int factors(const char *name, const tensor *a, bool transposed, tensor **lu, tensor **pivots, tensor **info) {
  *lu = *pivots = NULL;
  if (check_square(name, a)) return 1;
  tensor turned = *a;
  int32_t last = a->rank - 1;
  if (transposed) {
    turned.strides[last] = a->strides[last - 1];
    turned.strides[last - 1] = a->strides[last];
  }
  int64_t n = a->sizes[last];
  *lu = columns_of(&turned);
  *pivots = tensor_new(last, a->sizes, NULL, I32);
  if (info) *info = tensor_new(last - 1, a->sizes, NULL, I32);
  if (!*lu || !*pivots || (info && !*info)) return 1;
  for (int64_t b = 0; b < batch_of(a); b++) {
    int32_t first = BY_TYPE(a, factor, n, (void *)matrix(*lu, b), (int32_t *)at(*pivots) + b * n);
    if (info) ((int32_t *)at(*info))[b] = first;
  }
  return 0;
}

/* Eager factors the transpose if the matrix is row-major, and gradients rely on it. */
static int determinant(const tensor *a, tensor **product, tensor **sign, tensor **logarithm, tensor **lu, tensor **pivots) {
  tensor **const wanted[] = {product, sign, logarithm};
  char *to[3] = {0};
  if (factors("a determinant", a, tensor_is_dense(a), lu, pivots, NULL)) return 1;
  for (int i = 0; i < 3; i++) {
    if (!wanted[i]) continue;
    if (!(*wanted[i] = tensor_new(a->rank - 2, a->sizes, NULL, a->dtype))) return 1;
    to[i] = at(*wanted[i]);
  }
  int64_t n = a->sizes[a->rank - 1], width = size_of(a->dtype);
  for (int64_t b = 0; b < batch_of(a); b++) {
    void *own[3];
    for (int i = 0; i < 3; i++) own[i] = to[i] ? to[i] + b * width : NULL;
    BY_TYPE(a, determinant, n, (void *)matrix(*lu, b), (int32_t *)at(*pivots) + b * n, own[0], own[1], own[2]);
  }
  return 0;
}

int linalg_det(const tensor *const *in, const uint64_t *flags, tensor **out) {
  (void)flags;
  return determinant(in[0], &out[0], NULL, NULL, &out[1], &out[2]);
}

int linalg_slogdet(const tensor *const *in, const uint64_t *flags, tensor **out) {
  (void)flags;
  return determinant(in[0], NULL, &out[0], &out[1], &out[2], &out[3]);
}

int linalg_lu_factor(const tensor *const *in, const uint64_t *flags, tensor **out) {
  if (!(flags[0] & 1)) return core_fail("linalg_lu_factor_ex without pivoting");
  return factors("a factorisation", in[0], false, &out[0], &out[1], &out[2]);
}

/* Computes the broadcast batch sizes, followed by the matrix sizes of B. */
static int broadcast(const tensor *a, const tensor *b, int64_t sizes[RANKS], int32_t *rank) {
  *rank = a->rank > b->rank ? a->rank : b->rank;
  for (int32_t d = 0; d < *rank - 2; d++) {
    int32_t of_a = d - (*rank - a->rank), of_b = d - (*rank - b->rank);
    int64_t x = of_a < 0 ? 1 : a->sizes[of_a], y = of_b < 0 ? 1 : b->sizes[of_b];
    if (x != y && x != 1 && y != 1) return core_fail("batches of %lld and of %lld matrices", (long long)x, (long long)y);
    sizes[d] = x == 1 ? y : x;
  }
  memcpy(sizes + *rank - 2, b->sizes + b->rank - 2, 2 * sizeof *sizes);
  return 0;
}

/* Returns the number of the matrix of `t` for number `b` of the broadcast batch. */
static int64_t number_in(const tensor *t, const int64_t *sizes, int32_t rank, int64_t b) {
  int64_t out = 0, step = 1;
  for (int32_t d = rank - 3; d >= 0; d--) {
    int64_t place = b % sizes[d];
    int32_t own = d - (rank - t->rank);
    b /= sizes[d];
    if (own < 0) continue;
    if (t->sizes[own] != 1) out += place * step;
    step *= t->sizes[own];
  }
  return out;
}

/* Broadcasts `like` to these sizes without a copy. */
static tensor spread(const tensor *like, const int64_t *sizes, int32_t rank) {
  tensor out = *like;
  out.rank = rank;
  for (int32_t d = rank - 1; d >= 0; d--) {
    int32_t own = d - (rank - like->rank);
    out.sizes[d] = sizes[d];
    out.strides[d] = own < 0 || (like->sizes[own] == 1 && sizes[d] != 1) ? 0 : like->strides[own];
  }
  return out;
}

/* Solves A X = B or X A = B. The latter solves for the transpose of X, which has the memory layout of a row-major X. */
static tensor *solution(const tensor *lu, const tensor *pivots, const tensor *b, bool left, bool transposed) {
  int64_t sizes[RANKS], n = lu->sizes[lu->rank - 1], m;
  int32_t rank;
  if (broadcast(lu, b, sizes, &rank)) return NULL;
  m = sizes[left ? rank - 1 : rank - 2];
  if (sizes[left ? rank - 2 : rank - 1] != n)
    return core_fail("matrices of %lld and right-hand sides of %lld", (long long)n, (long long)sizes[left ? rank - 2 : rank - 1]), NULL;
  tensor from = spread(b, sizes, rank), *x = matrices(rank, sizes, b->dtype, left);
  if (!x) return NULL;
  tensor_copy(&from, x);
  for (int64_t i = 0; i < batch_of(x); i++) {
    int64_t own = number_in(lu, sizes, rank, i);
    BY_TYPE(lu, solve, n, m, (void *)matrix(lu, own), (const int32_t *)at(pivots) + own * n, left ? transposed : !transposed, (void *)matrix(x, i));
  }
  return x;
}

int linalg_lu_solve(const tensor *const *in, const uint64_t *flags, tensor **out) {
  const tensor *lu = in[0], *b = in[2];
  if (check_square("linalg_lu_solve", lu)) return 1;
  if (b->dtype != lu->dtype || in[1]->dtype != I32 || b->rank < 2)
    return core_fail("linalg_lu_solve of %s and %s", name_of(lu->dtype), name_of(b->dtype));
  tensor *own = columns_of(lu), *pivots = tensor_dense(in[1]);
  out[0] = own && pivots ? solution(own, pivots, b, flags[0] & 1, flags[1] & 1) : NULL;
  tensor_drop(own);
  tensor_drop(pivots);
  return !out[0];
}

int linalg_solve(const tensor *const *in, const uint64_t *flags, tensor **out) {
  const tensor *a = in[0];
  tensor b = *in[1];
  bool left = flags[0] & 1, vector = b.rank == 1;
  if (b.rank == a->rank - 1 && !vector) {
    vector = true;
    for (int32_t d = 0; d < b.rank; d++) vector &= b.sizes[d] == a->sizes[d];
  }
  if (b.dtype != a->dtype) return core_fail("linalg_solve of %s and %s", name_of(a->dtype), name_of(b.dtype));
  if (factors("a solution", a, false, &out[1], &out[2], &out[3])) return 1;
  if (vector) { /* a matrix of one column */
    if (b.rank == RANKS) return core_fail("linalg_solve of %d dimensions", b.rank);
    b.sizes[b.rank] = 1;
    b.strides[b.rank++] = 1;
  }
  if (b.rank < 2) return core_fail("linalg_solve of a number");
  if (!(out[0] = solution(out[1], out[2], &b, left, false))) return 1;
  if (!vector) return 0;
  tensor *x = out[0]; /* eager lays out a batch of vectors like one matrix */
  x->rank--;
  if (x->rank < 2) return 0;
  out[0] = columns_of(x);
  tensor_drop(x);
  return !out[0];
}

int linalg_inv(const tensor *const *in, const uint64_t *flags, tensor **out) {
  (void)flags;
  const tensor *a = in[0];
  tensor *lu, *pivots;
  int failed = factors("an inverse", a, false, &lu, &pivots, &out[1]);
  if (!failed) failed = !(out[0] = matrices(a->rank, a->sizes, a->dtype, true));
  int64_t n = failed ? 0 : a->sizes[a->rank - 1], width = size_of(a->dtype);
  for (int64_t b = 0; n && b < batch_of(a); b++) {
    char *to = matrix(out[0], b);
    memset(to, 0, (size_t)(n * n * width));
    for (int64_t i = 0; i < n; i++) {
      if (a->dtype == F32) ((float *)to)[i * n + i] = 1;
      else ((double *)to)[i * n + i] = 1;
    }
    if (!((int32_t *)at(out[1]))[b]) BY_TYPE(a, solve, n, n, (void *)matrix(lu, b), (int32_t *)at(pivots) + b * n, false, (void *)to);
  }
  tensor_drop(lu);
  tensor_drop(pivots);
  return failed;
}

int linalg_cholesky(const tensor *const *in, const uint64_t *flags, tensor **out) {
  const tensor *a = in[0];
  if (check_square("Cholesky's factor", a)) return 1;
  bool upper = flags[0] & 1;
  tensor turned = *a; /* the upper triangle of A is the lower one of its transpose */
  int32_t last = a->rank - 1;
  if (upper) {
    turned.strides[last] = a->strides[last - 1];
    turned.strides[last - 1] = a->strides[last];
  }
  tensor *lower = columns_of(&turned);
  out[1] = tensor_new(last - 1, a->sizes, NULL, I32);
  if (!lower || !out[1]) return tensor_drop(lower), 1;
  for (int64_t b = 0; b < batch_of(a); b++) ((int32_t *)at(out[1]))[b] = BY_TYPE(a, cholesky, a->sizes[last], (void *)matrix(lower, b));
  if (upper) {
    turned = *lower;
    turned.strides[last] = lower->strides[last - 1];
    turned.strides[last - 1] = lower->strides[last];
    out[0] = columns_of(&turned);
    tensor_drop(lower);
  } else out[0] = lower;
  return !out[0];
}

int linalg_solve_triangular(const tensor *const *in, const uint64_t *flags, tensor **out) {
  const tensor *a = in[0], *b = in[1];
  bool upper = flags[0] & 1, left = flags[1] & 1, unit = flags[2] & 1;
  int64_t sizes[RANKS];
  int32_t rank;
  if (check_square("linalg_solve_triangular", a)) return 1;
  if (b->dtype != a->dtype || b->rank < 2) return core_fail("linalg_solve_triangular of %s and %s", name_of(a->dtype), name_of(b->dtype));
  if (broadcast(a, b, sizes, &rank)) return 1;
  int64_t n = a->sizes[a->rank - 1], m = sizes[left ? rank - 1 : rank - 2];
  if (sizes[left ? rank - 2 : rank - 1] != n)
    return core_fail("matrices of %lld and right-hand sides of %lld", (long long)n, (long long)sizes[left ? rank - 2 : rank - 1]);
  tensor from = spread(b, sizes, rank), *own = columns_of(a), *x = own ? matrices(rank, sizes, b->dtype, left) : NULL;
  if (!x) return tensor_drop(own), 1;
  tensor_copy(&from, x);
  for (int64_t i = 0; i < batch_of(x); i++) /* X A = B equals A^T X^T = B^T */
    BY_TYPE(a, substitute, n, m, (void *)matrix(own, number_in(own, sizes, rank, i)), left ? 1 : n, left ? n : 1, left ? upper : !upper, unit,
            (void *)matrix(x, i));
  tensor_drop(own);
  out[0] = left ? x : columns_of(x);
  if (!left) tensor_drop(x);
  return !out[0];
}

int linalg_check_errors(const tensor *info, const char *name, bool batched) {
  tensor *own = tensor_dense(info);
  if (!own) return 1;
  int64_t wrong = -1, count = tensor_count(own);
  int32_t first = 0;
  for (int64_t i = 0; i < count && !first; i++)
    if ((first = ((int32_t *)at(own))[i])) wrong = i;
  tensor_drop(own);
  if (!first) return 0;
  char which[48] = "";
  if (batched) snprintf(which, sizeof which, "(Batch element %lld): ", (long long)wrong);
  if (strstr(name, "cholesky")) return core_fail("%s: %sthe matrix is not positive-definite: see its leading minor of order %d", name, which, first);
  return core_fail("%s: %sthe matrix is singular: pivot %d is 0", name, which, first);
}
