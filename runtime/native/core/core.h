/* libaotb_core: what compiled code calls of libtorch, without libtorch: tensors, matrix products, and the operators that most packages need. Every function
 * that compiled code calls returns 0, or 1 with words for core_error. float32 and float64 unless it says otherwise. */
#ifndef AOTB_CORE_H
#define AOTB_CORE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 16 };

/* c10::ScalarType's numbers. */
enum { U8 = 0, I8 = 1, I16 = 2, I32 = 3, I64 = 4, F16 = 5, F32 = 6, F64 = 7, C64 = 9, C128 = 10, BOOL = 11, BF16 = 15 };

typedef struct {
  char *data;
  size_t bytes;
  int references;
  bool own;
} storage;

typedef struct tensor {
  storage *held;
  int64_t offset; /* elements */
  int32_t dtype, rank;
  int64_t sizes[RANKS], strides[RANKS];
  struct tensor *after, **listed; /* of a list of views (tensor.c): the next one, and what points at this one; NULL where it is in none */
} tensor;

/* What a function that compiled code calls is. */
#define CORE __attribute__((visibility("default")))

/* Keeps the words, and returns 1. */
int core_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bytes of an element; 0: unknown. */
static inline int32_t size_of(int32_t dtype) {
  static const int8_t bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 8, 16, 1, 0, 0, 0, 2};
  return dtype >= 0 && dtype < 16 ? bytes[dtype] : 0;
}
const char *name_of(int32_t dtype);

/* Memory at 64 bytes, from blocks of this thread that were given back. NULL: none, and core_fail was called. */
void *take(size_t bytes);
void give(void *block, size_t bytes);

/* A new tensor, of these strides or row-major (NULL). */
tensor *tensor_new(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype);
tensor *tensor_zeros(int64_t rank, const int64_t *sizes, int32_t dtype);
/* As torch.empty_like: without gaps, its dimensions in the order of the strides of `t`; of other sizes, if they are given. */
tensor *tensor_like(const tensor *t, const int64_t *sizes, int32_t dtype);
/* One that shares the memory. */
tensor *tensor_view(const tensor *of, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset);
void tensor_drop(tensor *t);
/* Itself once more where it is row-major, else a copy. */
tensor *tensor_dense(const tensor *t);
/* As c10::is_channels_last_strides_2d and _3d. */
bool tensor_is_channels_last(const tensor *t);
/* A row-major tensor, laid out with its channels last where it shall be so and has four or five dimensions; `t` is given up. */
tensor *tensor_laid_out(tensor *t, bool channels_last);
void tensor_copy(const tensor *from, tensor *to); /* of one dtype and shape */
int64_t tensor_count(const tensor *t);
bool tensor_is_dense(const tensor *t);

static inline void *at(const tensor *t) { return t->held->data + t->offset * size_of(t->dtype); }

/* How many threads a loop over so much work is worth: below some 50 µs a thread it is none. */
int threads_for(double operations);

/* What the processor has: 1 none of the following, 2 AVX2 with FMA, 3 AVX-512. */
int cpu_level(void);

/* vector_math.c: e^(x - by) of a row, in its place. */
void exponentials_f(float *row, int64_t count, float by);
void exponentials_d(double *row, int64_t count, double by);

/* C = alpha A B + beta C, by rows and columns as strides say. */
int gemm_f(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t ar, int64_t ac, const float *b, int64_t br, int64_t bc, float beta,
           float *c, int64_t cr, int64_t cc);
int gemm_d(int64_t m, int64_t n, int64_t k, double alpha, const double *a, int64_t ar, int64_t ac, const double *b, int64_t br, int64_t bc,
           double beta, double *c, int64_t cr, int64_t cc);

/* For convolutions of stride 1 over an image with its border: C(i, j) = sum over p < k of A(i, p) times b[offsets[p] + j]. Columns are counted in
 * whole SLIDE_COLUMNS, which `b` must have room to be read for, and C, whose rows are whole SLIDE_ROWS, to be written to. A is packed first, into as
 * many rows. The dots add to C(i, j), of `images` images, the sum over p < k of a[image * a_image + i * ar + p] times
 * b[image * b_image + offsets[j] + p], for a k of whole SLIDE_COLUMNS. */
enum { SLIDE_ROWS = 8, SLIDE_COLUMNS = 32 };
void slide_pack_f(int64_t m, int64_t k, const float *a, int64_t ar, int64_t ac, float *to);
void slide_pack_d(int64_t m, int64_t k, const double *a, int64_t ar, int64_t ac, double *to);
void slide_f(int64_t m, int64_t n, int64_t k, const float *packed, const float *b, const int64_t *offsets, float *c, int64_t cr);
void slide_d(int64_t m, int64_t n, int64_t k, const double *packed, const double *b, const int64_t *offsets, double *c, int64_t cr);
void slide_dots_f(int64_t m, int64_t n, int64_t k, int64_t images, const float *a, int64_t a_image, int64_t ar, const float *b, int64_t b_image,
                  const int64_t *offsets, float *c, int64_t cr);
void slide_dots_d(int64_t m, int64_t n, int64_t k, int64_t images, const double *a, int64_t a_image, int64_t ar, const double *b, int64_t b_image,
                  const int64_t *offsets, double *c, int64_t cr);

/* blas.c: the same products by a library of the machine's, C row-major; false: there is none, or it is not worth it. */
bool blas_f(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t ar, int64_t ac, const float *b, int64_t br, int64_t bc, float beta,
            float *c, int64_t cr, int64_t cc);
bool blas_d(int64_t m, int64_t n, int64_t k, double alpha, const double *a, int64_t ar, int64_t ac, const double *b, int64_t br, int64_t bc,
            double beta, double *c, int64_t cr, int64_t cc);
void blas_threads(int count);

/* Operators that compiled code calls by name (dispatcher.c): their tensors and flags in the order of the schema; results go to `out`, which is NULL before,
 * and are dropped there where they fail. */
int embedding_bag_backward(const tensor *grad, const tensor *indices, const tensor *offsets, const tensor *offset2bag, const tensor *bag_size,
                           int64_t rows, bool by_frequency, int64_t mode, bool sparse, const tensor *factors, int64_t padding_idx, tensor **out);
int linalg_det(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_slogdet(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_lu_factor(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_lu_solve(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_solve(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_inv(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_cholesky(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_solve_triangular(const tensor *const *in, const uint64_t *flags, tensor **out);
int linalg_check_errors(const tensor *info, const char *name, bool batched);
#endif
