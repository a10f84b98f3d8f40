/* Copies of tensors with another dtype, or multiplied by a number. */
#ifndef AOTB_CONVERT_H
#define AOTB_CONVERT_H
#include "dtypes.h"

/* Returns why tensors of one dtype are not passed as another, or NULL if they can be converted. `from` of NULL: an unknown dtype. */
const char *convert_problem(const dtype *from, const dtype *to);

/* Copies a tensor into one of another dtype, with strides in elements. Returns false if an integer does not fit; `unfit` is then the number. */
bool convert_tensor(void *to, const int64_t *to_stride, const dtype *to_type, const void *from, const int64_t *from_stride, const dtype *from_type,
                    uint32_t rank, const int64_t *shape, char unfit[32]);

/* Copies a tensor of a floating-point or complex dtype, multiplied by `factor`. */
void scale_tensor(void *to, const int64_t *to_stride, const void *from, const int64_t *from_stride, const dtype *type, double factor, uint32_t rank,
                  const int64_t *shape);
#endif
