/* libaotb_core: the libtorch functions that compiled code calls, without libtorch: tensors, matrix products, and the operators that most packages
 * need. A function that compiled code calls returns 0, or 1 with a message for core_error. Dtypes: float32 and float64 unless stated otherwise. */
#ifndef AOTB_CORE_H
#define AOTB_CORE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 16 }; /* dimensions of a tensor, which is an array of fixed size; a guess */

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
  struct tensor *after, **listed; /* in a list of views (tensor.c): the next one, and the pointer to this one; NULL: in no list */
} tensor;

/* Exports a function that compiled code calls. */
#define CORE __attribute__((visibility("default")))

/* Stores the message and returns 1. */
int core_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bytes of an element; 0: unknown. */
static inline int32_t size_of(int32_t dtype) {
  static const int8_t bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 8, 16, 1, 0, 0, 0, 2};
  return dtype >= 0 && dtype < 16 ? bytes[dtype] : 0;
}
const char *name_of(int32_t dtype);

/* Returns memory aligned to 64 bytes; it reuses freed blocks of this thread. NULL: not enough memory; core_fail was called. */
void *take(size_t bytes);
void give(void *block, size_t bytes);

/* Makes a new tensor with these strides, or row-major (NULL). */
tensor *tensor_new(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype);
tensor *tensor_zeros(int64_t rank, const int64_t *sizes, int32_t dtype);
/* Makes a tensor like torch.empty_like: without gaps, its dimensions in the order of the strides of `t`, but with these sizes. */
tensor *tensor_like(const tensor *t, const int64_t *sizes, int32_t dtype);
/* Makes a tensor that shares the memory. */
tensor *tensor_view(const tensor *of, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset);
void tensor_drop(tensor *t);
/* Returns a view if `t` is row-major, else a copy. */
tensor *tensor_dense(const tensor *t);
/* Equals c10::is_channels_last_strides_2d and _3d. */
bool tensor_is_channels_last(const tensor *t);
/* Consumes a row-major tensor. Returns it in channels_last layout if requested and if it has four or five dimensions, else unchanged. */
tensor *tensor_laid_out(tensor *t, bool channels_last);
void tensor_copy(const tensor *from, tensor *to); /* dtype and shape must be equal */
int64_t tensor_count(const tensor *t);
bool tensor_is_dense(const tensor *t);

static inline void *at(const tensor *t) { return t->held->data + t->offset * size_of(t->dtype); }

/* Returns the number of threads for a loop with this much work; each thread gets some 50 µs or more. */
int threads_for(double operations);

/* Returns the processor's level: 3 AVX-512, 2 AVX2 with FMA, 1 neither. */
int cpu_level(void);

/* vector_math.c: e^(x - by) of a row, in place. */
void exponentials_f(float *row, int64_t count, float by);
void exponentials_d(double *row, int64_t count, double by);

/* C = alpha A B + beta C, with a row and a column stride for each matrix. */
int gemm_f(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t ar, int64_t ac, const float *b, int64_t br, int64_t bc, float beta,
           float *c, int64_t cr, int64_t cc);
int gemm_d(int64_t m, int64_t n, int64_t k, double alpha, const double *a, int64_t ar, int64_t ac, const double *b, int64_t br, int64_t bc,
           double beta, double *c, int64_t cr, int64_t cc);

/* For convolutions of stride 1 over an image with its border: C(i, j) = sum over p < k of A(i, p) times b[offsets[p] + j]. Columns are rounded up to
 * whole SLIDE_COLUMNS: `b` must be readable and C writable that far. Rows of C and of the packed A are rounded up to whole SLIDE_ROWS. slide_dots
 * adds to C(i, j), for each of `images` images, the sum over p < k of a[image * a_image + i * ar + p] times b[image * b_image + offsets[j] + p]. Its
 * k must be a multiple of SLIDE_COLUMNS. */
enum { SLIDE_ROWS = 8, SLIDE_COLUMNS = 32 }; /* multiples of STRIP and of NR, the block's rows and columns, on every processor (gemm.inc) */
void slide_pack_f(int64_t m, int64_t k, const float *a, int64_t ar, int64_t ac, float *to);
void slide_pack_d(int64_t m, int64_t k, const double *a, int64_t ar, int64_t ac, double *to);
void slide_f(int64_t m, int64_t n, int64_t k, const float *packed, const float *b, const int64_t *offsets, float *c, int64_t cr);
void slide_d(int64_t m, int64_t n, int64_t k, const double *packed, const double *b, const int64_t *offsets, double *c, int64_t cr);
void slide_dots_f(int64_t m, int64_t n, int64_t k, int64_t images, const float *a, int64_t a_image, int64_t ar, const float *b, int64_t b_image,
                  const int64_t *offsets, float *c, int64_t cr);
void slide_dots_d(int64_t m, int64_t n, int64_t k, int64_t images, const double *a, int64_t a_image, int64_t ar, const double *b, int64_t b_image,
                  const int64_t *offsets, double *c, int64_t cr);

/* blas.c: the same products by a library of the machine, C row-major. They return false if no library is found or the product is too small. */
bool blas_f(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t ar, int64_t ac, const float *b, int64_t br, int64_t bc, float beta,
            float *c, int64_t cr, int64_t cc);
bool blas_d(int64_t m, int64_t n, int64_t k, double alpha, const double *a, int64_t ar, int64_t ac, const double *b, int64_t br, int64_t bc,
            double beta, double *c, int64_t cr, int64_t cc);
void blas_threads(int count);

/* Operators that compiled code calls by name (dispatcher.c). Tensors and flags are in the order of the schema. Results go to `out`, which contains
 * NULLs before. If an operator fails, dispatcher.c drops them. */
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
