/* Matrix products by a library of the machine: OpenBLAS, BLIS or MKL, with the CBLAS interface. The first large product looks for it.
 * $AOT_BACKWARD_BLAS names another library, or "none". Small products do not use it: calling and packing would cost more than they gain. */
#include "core.h"

#include <dlfcn.h>
#include <limits.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* CBLAS fixes the first three. LEAST, rows or columns, and WORTH, multiplications: smaller products do not use the library. Guesses. */
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112, LEAST = 24 };
static const double WORTH = 1 << 21;
static const char *const VARIABLE = "AOT_BACKWARD_BLAS";

typedef void narrow_f(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void narrow_d(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *, int);
typedef void wide_f(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float, float *, int64_t);
typedef void wide_d(int, int, int, int64_t, int64_t, int64_t, double, const double *, int64_t, const double *, int64_t, double, double *, int64_t);

static struct {
  narrow_f *f;
  narrow_d *d;
  wide_f *wide_f; /* with 64-bit sizes */
  wide_d *wide_d;
  void (*threads)(int);
} blas;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define FIND(library, to, name) (*(void **)&(to) = dlsym(library, name))

static void find(void) {
  static const char *const known[] = {"libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.2"};
  const char *named = getenv(VARIABLE);
  void *library = NULL;
  if (named && *named && !strcmp(named, "none")) return;
  if (named && *named) library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
  else
    for (size_t i = 0; i < sizeof known / sizeof *known && !library; i++) library = dlopen(known[i], RTLD_NOW | RTLD_LOCAL);
  if (!library) return;
  /* SciPy's builds of OpenBLAS, which NumPy's wheels contain, export other names. */
  if (!FIND(library, blas.f, "cblas_sgemm")) FIND(library, blas.f, "scipy_cblas_sgemm");
  if (!FIND(library, blas.d, "cblas_dgemm")) FIND(library, blas.d, "scipy_cblas_dgemm");
  if (!blas.f) FIND(library, blas.wide_f, "scipy_cblas_sgemm64_");
  if (!blas.d) FIND(library, blas.wide_d, "scipy_cblas_dgemm64_");
  const char *const setters[] = {"openblas_set_num_threads", "scipy_openblas_set_num_threads", "scipy_openblas_set_num_threads64_",
                                 "bli_thread_set_num_threads", "MKL_Set_Num_Threads"};
  for (size_t i = 0; i < sizeof setters / sizeof *setters && !blas.threads; i++) FIND(library, blas.threads, setters[i]);
  if (blas.threads) blas.threads(omp_get_max_threads());
}

void blas_threads(int count) {
  if (blas.threads) blas.threads(count);
}

/* Returns the leading dimension if rows or columns are contiguous, else 0. */
static int64_t leading(int64_t rows, int64_t columns, int64_t row, int64_t column, int *how) {
  *how = column == 1 && row >= columns ? AS_IT_IS : TRANSPOSED;
  return *how == AS_IT_IS ? row : row == 1 && column >= rows ? column : 0;
}

#define GEMM(type, suffix)                                                                                                                           \
  bool blas_##suffix(int64_t m, int64_t n, int64_t k, type alpha, const type *a, int64_t ar, int64_t ac, const type *b, int64_t br, int64_t bc,      \
                     type beta, type *c, int64_t cr, int64_t cc) {                                                                                   \
    int a_lies, b_lies;                                                                                                                              \
    if (m < LEAST || n < LEAST || k < LEAST || (double)m * (double)n * (double)k < WORTH || cc != 1 || cr < n || omp_in_parallel()) return false;    \
    pthread_once(&once, find);                                                                                                                       \
    if (!blas.suffix && !blas.wide_##suffix) return false;                                                                                           \
    int64_t lda = leading(m, k, ar, ac, &a_lies), ldb = leading(k, n, br, bc, &b_lies);                                                              \
    if (!lda || !ldb) return false;                                                                                                                  \
    if (blas.wide_##suffix) {                                                                                                                        \
      blas.wide_##suffix(ROW_MAJOR, a_lies, b_lies, m, n, k, alpha, a, lda, b, ldb, beta, c, cr);                                                    \
      return true;                                                                                                                                   \
    }                                                                                                                                                \
    if (m > INT_MAX || n > INT_MAX || k > INT_MAX || lda > INT_MAX || ldb > INT_MAX || cr > INT_MAX) return false;                                   \
    blas.suffix(ROW_MAJOR, a_lies, b_lies, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)cr);                               \
    return true;                                                                                                                                     \
  }
GEMM(float, f)
GEMM(double, d)
