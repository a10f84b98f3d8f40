/* Matrix products of this library, packed for the processor. */
#include "core.h"

#include <omp.h>
#include <string.h>

/* Limits of `small` in gemm.inc: elements and columns of B, which bound its arrays on the stack, and multiplications. Guesses. */
enum { SMALL = 2048, SMALL_COLUMNS = 64, MOST_WORK = 1 << 18 };

/* MR: the 2 MR sums of a block fill 8 of SSE's 16 registers, 12 of AVX2's 16, 24 of AVX-512's 32, 16 of NEON's 32. */
#ifdef __x86_64__
enum { NARROW_ROWS = 4 };
#else
enum { NARROW_ROWS = 8 };
#endif

#define T float
#define WIDE 0
#define BYTES 16
#define MR NARROW_ROWS
#define NAME f_sse
#define TARGET
#include "gemm.inc"

#define T double
#define WIDE 1
#define BYTES 16
#define MR NARROW_ROWS
#define NAME d_sse
#define TARGET
#include "gemm.inc"

#ifdef __x86_64__
#define T float
#define WIDE 0
#define BYTES 32
#define MR 6
#define NAME f_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "gemm.inc"

#define T double
#define WIDE 1
#define BYTES 32
#define MR 6
#define NAME d_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "gemm.inc"

#define T float
#define WIDE 0
#define BYTES 64
#define MR 12
#define NAME f_avx512
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")))
#include "gemm.inc"

#define T double
#define WIDE 1
#define BYTES 64
#define MR 12
#define NAME d_avx512
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")))
#include "gemm.inc"

int cpu_level(void) {
  static int known; /* 1: neither; threads may write it twice, with the same value */
  if (!known) {
    __builtin_cpu_init();
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    known = !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ? 1 : wide ? 3 : 2;
  }
  return known;
}
#define WIDER(two, three)                                                                                                                            \
  case 2: two; break;                                                                                                                                \
  case 3: three; break;
#else
int cpu_level(void) { return 1; }
#define WIDER(two, three)
#endif

#define GEMM(suffix, type)                                                                                                                           \
  int gemm_##suffix(int64_t m, int64_t n, int64_t k, type alpha, const type *a, int64_t ar, int64_t ac, const type *b, int64_t br, int64_t bc,       \
                    type beta, type *c, int64_t cr, int64_t cc) {                                                                                    \
    if (!m || !n) return 0;                                                                                                                          \
    if (!k) {                                                                                                                                        \
      for (int64_t i = 0; i < m; i++)                                                                                                                \
        for (int64_t j = 0; j < n; j++) c[i * cr + j * cc] = beta == 0 ? 0 : beta * c[i * cr + j * cc];                                              \
      return 0;                                                                                                                                      \
    }                                                                                                                                                \
    if ((cc != 1 && cr == 1) || (n == 1 && m > 1))                                                                                                   \
      return gemm_##suffix(n, m, k, alpha, b, bc, br, a, ac, ar, beta, c, cc, cr); /* the transposed product */                                      \
    if (blas_##suffix(m, n, k, alpha, a, ar, ac, b, br, bc, beta, c, cr, cc)) return 0;                                                              \
    switch (cpu_level()) {                                                                                                                           \
      WIDER(return product_##suffix##_avx2(m, n, k, alpha, a, ar, ac, b, br, bc, beta, c, cr, cc),                                                   \
                   return product_##suffix##_avx512(m, n, k, alpha, a, ar, ac, b, br, bc, beta, c, cr, cc))                                          \
    default: return product_##suffix##_sse(m, n, k, alpha, a, ar, ac, b, br, bc, beta, c, cr, cc);                                                   \
    }                                                                                                                                                \
  }
GEMM(f, float)
GEMM(d, double)

#define BY_LEVEL(name, suffix, ...)                                                                                                                  \
  switch (cpu_level()) {                                                                                                                             \
    WIDER(name##_##suffix##_avx2(__VA_ARGS__), name##_##suffix##_avx512(__VA_ARGS__))                                                                \
  default: name##_##suffix##_sse(__VA_ARGS__);                                                                                                       \
  }
#define SLIDE(suffix, type)                                                                                                                          \
  void slide_pack_##suffix(int64_t m, int64_t k, const type *a, int64_t ar, int64_t ac, type *to) {                                                  \
    BY_LEVEL(slide_pack, suffix, m, k, a, ar, ac, to)                                                                                                \
  }                                                                                                                                                  \
  void slide_##suffix(int64_t m, int64_t n, int64_t k, const type *packed, const type *b, const int64_t *offsets, type *c, int64_t cr) {             \
    BY_LEVEL(slide, suffix, m, n, k, packed, b, offsets, c, cr)                                                                                      \
  }                                                                                                                                                  \
  void slide_dots_##suffix(int64_t m, int64_t n, int64_t k, int64_t images, const type *a, int64_t a_image, int64_t ar, const type *b,               \
                           int64_t b_image, const int64_t *offsets, type *c, int64_t cr) {                                                           \
    BY_LEVEL(slide_dots, suffix, m, n, k, images, a, a_image, ar, b, b_image, offsets, c, cr)                                                        \
  }
SLIDE(f, float)
SLIDE(d, double)

/* 16-bit products are computed in float32 and rounded once, as in eager. */
static float wide(const tensor *t, int64_t place) {
  float f;
  if (t->dtype == BF16) {
    uint32_t bits = (uint32_t)((const uint16_t *)at(t))[place] << 16;
    return memcpy(&f, &bits, 4), f;
  }
  _Float16 half;
  return memcpy(&half, (const uint16_t *)at(t) + place, 2), (float)half;
}

static void narrow(tensor *t, int64_t place, float value) {
  uint16_t *to = (uint16_t *)at(t) + place;
  if (t->dtype == BF16) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *to = value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  } else {
    _Float16 half = (_Float16)value;
    memcpy(to, &half, 2);
  }
}

static float *widened(const tensor *t, int64_t rows, int64_t columns, int64_t start, const int64_t *strides) {
  float *out = take(sizeof *out * (size_t)(rows * columns));
  for (int64_t i = 0; out && i < rows; i++)
    for (int64_t j = 0; j < columns; j++) out[i * columns + j] = wide(t, start + i * strides[0] + j * strides[1]);
  return out;
}

static int halves(tensor *out, const tensor *a, const tensor *b, double beta, double alpha, int first, int64_t batch) {
  int64_t m = out->sizes[first], n = out->sizes[first + 1], k = a->sizes[first + 1], place = first ? batch * out->strides[0] : 0;
  const int64_t *z = out->strides + first;
  float *x = widened(a, m, k, first ? batch * a->strides[0] : 0, a->strides + first),
        *y = widened(b, k, n, first ? batch * b->strides[0] : 0, b->strides + first), *c = widened(out, m, n, place, z);
  int failed = !x || !y || !c || gemm_f(m, n, k, (float)alpha, x, k, 1, y, n, 1, (float)beta, c, n, 1);
  for (int64_t i = 0; !failed && i < m; i++)
    for (int64_t j = 0; j < n; j++) narrow(out, place + i * z[0] + j * z[1], c[i * n + j]);
  give(x, sizeof *x * (size_t)(m * k));
  give(y, sizeof *y * (size_t)(k * n));
  give(c, sizeof *c * (size_t)(m * n));
  return failed;
}

/* Computes matrix number `batch` of `out`; matrices begin at dimension `first`. */
static int one(tensor *out, const tensor *a, const tensor *b, double beta, double alpha, int first, int64_t batch) {
  int64_t m = out->sizes[first], n = out->sizes[first + 1], k = a->sizes[first + 1];
  const int64_t *x = a->strides + first, *y = b->strides + first, *z = out->strides + first;
  int64_t ax = first ? batch * a->strides[0] : 0, bx = first ? batch * b->strides[0] : 0, cx = first ? batch * out->strides[0] : 0;
  if (out->dtype == F32)
    return gemm_f(m, n, k, (float)alpha, (float *)at(a) + ax, x[0], x[1], (float *)at(b) + bx, y[0], y[1], (float)beta, (float *)at(out) + cx, z[0],
                  z[1]);
  if (out->dtype == F64)
    return gemm_d(m, n, k, alpha, (double *)at(a) + ax, x[0], x[1], (double *)at(b) + bx, y[0], y[1], beta, (double *)at(out) + cx, z[0], z[1]);
  if (out->dtype == BF16 || out->dtype == F16) return halves(out, a, b, beta, alpha, first, batch);
  return core_fail("a matrix product of %s", name_of(out->dtype));
}

/* Broadcasts `from`, with as many dimensions or fewer, into `to`. */
static int spread(const tensor *from, tensor *to) {
  int64_t strides[RANKS] = {0};
  int32_t missing = to->rank - from->rank;
  for (int32_t d = 0; d < from->rank; d++) strides[missing + d] = from->sizes[d] == 1 ? 0 : from->strides[d];
  tensor *view = tensor_view(from, to->rank, to->sizes, strides, from->offset);
  if (!view) return 1;
  tensor_copy(view, to);
  tensor_drop(view);
  return 0;
}

CORE int32_t aoti_torch_cpu_mm_out(tensor *out, tensor *a, tensor *b) { return one(out, a, b, 0, 1, 0, 0); }

CORE int32_t aoti_torch_cpu_addmm_out(tensor *out, tensor *c, tensor *a, tensor *b, double beta, double alpha) {
  if (beta != 0 && spread(c, out)) return 1;
  return one(out, a, b, beta, alpha, 0, 0);
}

static int batched(tensor *out, const tensor *a, const tensor *b, double beta, double alpha) {
  int failed = 0;
  double work = (double)tensor_count(out) * (double)a->sizes[2];
  int threads = out->sizes[0] > 1 ? threads_for(work / 4) : 1;
  if (threads > out->sizes[0]) threads = (int)out->sizes[0];
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t i = 0; i < out->sizes[0]; i++) failed |= one(out, a, b, beta, alpha, 1, i);
  return failed;
}

CORE int32_t aoti_torch_cpu_bmm_out(tensor *out, tensor *a, tensor *b) { return batched(out, a, b, 0, 1); }

CORE int32_t aoti_torch_cpu_baddbmm_out(tensor *out, tensor *c, tensor *a, tensor *b, double beta, double alpha) {
  if (beta != 0 && spread(c, out)) return 1;
  return batched(out, a, b, beta, alpha);
}
