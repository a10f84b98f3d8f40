/* Sums of indexed rows: gradients of embeddings and gathers, and embedding bags. */
#include "core.h"

#include <math.h>
#include <string.h>

static int64_t index_at(const tensor *t, int64_t offset) {
  if (t->dtype == I32) return ((const int32_t *)at(t))[offset];
  return ((const int64_t *)at(t))[offset];
}

typedef enum { SUM, LARGEST, SMALLEST } reduction;

#define REDUCE(type, suffix)                                                                                                                         \
  static void reduce_##suffix(type *to, const type *from, int64_t n, int64_t ts, int64_t fs, reduction how) {                                        \
    if (how == SUM && ts == 1 && fs == 1)                                                                                                            \
      for (int64_t i = 0; i < n; i++) to[i] += from[i];                                                                                              \
    else                                                                                                                                             \
      for (int64_t i = 0; i < n; i++) {                                                                                                              \
        type *t = to + i * ts, f = from[i * fs];                                                                                                     \
        if (how == SUM) *t += f;                                                                                                                     \
        else if (f != f || *t != *t) *t = (type)NAN;                                                                                                 \
        else if (how == LARGEST ? f > *t : f < *t) *t = f;                                                                                           \
      }                                                                                                                                              \
  }
REDUCE(float, f)
REDUCE(double, d)

/* Sets out = self and reduces each element of src into the position along `dim` that index gives: docs of torch.Tensor.scatter_reduce. */
CORE int32_t aoti_torch_cpu_scatter_reduce_two_out(tensor *out, tensor *self, int64_t dim, tensor *index, tensor *src, const char *how,
                                                   int32_t include_self) {
  reduction kind = !strcmp(how, "sum") ? SUM : !strcmp(how, "amax") ? LARGEST : !strcmp(how, "amin") ? SMALLEST : 3;
  if (kind == 3 || !include_self) return core_fail("scatter_reduce by '%s'%s", how, include_self ? "" : " without self");
  if (out->dtype != F32 && out->dtype != F64) return core_fail("scatter_reduce of %s", name_of(out->dtype));
  if (index->dtype != I64 && index->dtype != I32) return core_fail("scatter_reduce by an index of %s", name_of(index->dtype));
  if (at(out) != at(self)) tensor_copy(self, out);
  if (out->rank == 0) {
    if (out->dtype == F32) reduce_f(at(out), at(src), 1, 1, 1, kind);
    else reduce_d(at(out), at(src), 1, 1, 1, kind);
    return 0;
  }
  if (dim < 0) dim += out->rank;
  int32_t last = out->rank - 1;
  int64_t places = out->sizes[dim], count[RANKS], where[RANKS] = {0}, width = 1;
  for (int32_t d = 0; d < out->rank; d++) {
    count[d] = index->sizes[d];
    if (!count[d]) return 0;
  }
  /* If the index is constant along the last dimension, as for embeddings, reduce a whole row at once. */
  bool rows = last != dim && (index->strides[last] == 0 || count[last] == 1);
  if (rows) width = count[last], count[last] = 1;
  for (;;) {
    int64_t i = 0, s = 0, o = 0;
    for (int32_t d = 0; d <= last; d++) {
      i += where[d] * index->strides[d];
      s += where[d] * src->strides[d];
      if (d != dim) o += where[d] * out->strides[d];
    }
    int64_t place = index_at(index, i);
    if (place < 0 || place >= places)
      return core_fail("index %lld is out of bounds for dimension %lld with size %lld", (long long)place, (long long)dim, (long long)places);
    o += place * out->strides[dim];
    if (out->dtype == F32) reduce_f((float *)at(out) + o, (const float *)at(src) + s, width, out->strides[last], src->strides[last], kind);
    else reduce_d((double *)at(out) + o, (const double *)at(src) + s, width, out->strides[last], src->strides[last], kind);
    int32_t d = last;
    while (d >= 0 && ++where[d] == count[d]) where[d--] = 0;
    if (d < 0) return 0;
  }
}

/* --- embedding bags --------------------------------------------------------------------------------------------------------------------------- */

/* Finds the indices of a bag: [from, to). */
static void bag_of(const tensor *offsets, int64_t bag, int64_t bags, int64_t indices, int64_t *from, int64_t *to) {
  *from = index_at(offsets, bag * offsets->strides[0]);
  *to = bag + 1 < bags || offsets->sizes[0] > bags ? index_at(offsets, (bag + 1) * offsets->strides[0]) : indices;
}

/* to += factor * from */
#define ADD_ROW(type, suffix)                                                                                                                        \
  static void add_row_##suffix(type *to, const type *from, int64_t n, int64_t stride, type factor) {                                                 \
    for (int64_t j = 0; j < n; j++) to[j] += factor * from[j * stride];                                                                              \
  }
ADD_ROW(float, f)
ADD_ROW(double, d)

static void add_row(const tensor *from, int64_t row, tensor *to, int64_t at_row, double factor) {
  int64_t n = to->sizes[1], read = row * from->strides[0], write = at_row * n;
  if (to->dtype == F32) add_row_f((float *)at(to) + write, (const float *)at(from) + read, n, from->strides[1], (float)factor);
  else add_row_d((double *)at(to) + write, (const double *)at(from) + read, n, from->strides[1], factor);
}

static double number_at(const tensor *t, int64_t offset) {
  return t->dtype == F32 ? ((const float *)at(t))[offset] : ((const double *)at(t))[offset];
}

static void set_index(tensor *t, int64_t place, int64_t value) {
  if (t->dtype == I64) ((int64_t *)at(t))[place] = value;
  else ((int32_t *)at(t))[place] = (int32_t)value;
}

CORE int32_t aoti_torch_cpu__embedding_bag(tensor *weight, tensor *indices, tensor *offsets, int32_t scale_grad_by_freq, int64_t mode, int32_t sparse,
                                           tensor **per_sample_weights, int32_t include_last_offset, int64_t padding_idx, tensor **out,
                                           tensor **offset2bag, tensor **bag_size, tensor **max_indices) {
  (void)scale_grad_by_freq, (void)sparse;
  const tensor *factors = per_sample_weights ? *per_sample_weights : NULL;
  if ((weight->dtype != F32 && weight->dtype != F64) || mode > 1)
    return core_fail("embedding_bag of %s, mode %lld", name_of(weight->dtype), (long long)mode);
  if (factors && (factors->dtype != weight->dtype || mode))
    return core_fail("embedding_bag with weights of %s, mode %lld", name_of(factors->dtype), (long long)mode);
  int64_t bags = offsets->sizes[0] - (include_last_offset ? 1 : 0), count = indices->sizes[0], rows = weight->sizes[0],
          sizes[2] = {bags, weight->sizes[1]};
  /* Eager then returns no offset2bag. It sets bag_size only for means. */
  bool brief = mode == 0 && weight->strides[1] == 1 && weight->dtype == F32 && padding_idx < 0 && (!factors || factors->strides[0] == 1);
  int64_t told = brief ? 0 : count;
  tensor *y = tensor_zeros(2, sizes, weight->dtype), *of = tensor_zeros(1, &told, indices->dtype), *size = tensor_zeros(1, &bags, indices->dtype),
         *largest = tensor_zeros(1, &bags, indices->dtype);
  int failed = !y || !of || !size || !largest;
  for (int64_t b = 0; b < bags && !failed; b++) {
    int64_t from, to, counted = 0;
    bag_of(offsets, b, bags, count, &from, &to);
    if (from < 0 || to > count || to < from)
      failed = core_fail("an offset of embedding_bag is not between 0 and %lld, or they do not rise", (long long)count);
    for (int64_t i = from; i < to && !failed; i++) {
      int64_t row = index_at(indices, i * indices->strides[0]);
      if (!brief) set_index(of, i, b);
      if (row < 0 || row >= rows) failed = core_fail("index %lld of embedding_bag is out of bounds for %lld rows", (long long)row, (long long)rows);
      else if (row != padding_idx) {
        add_row(weight, row, y, b, factors ? number_at(factors, i * factors->strides[0]) : 1);
        counted++;
      }
    }
    for (int64_t j = b * sizes[1]; mode == 1 && counted && j < (b + 1) * sizes[1] && !failed; j++) {
      if (y->dtype == F32) ((float *)at(y))[j] /= (float)counted;
      else ((double *)at(y))[j] /= (double)counted;
    }
    if (mode == 0) continue;
    set_index(size, b, counted);
    set_index(largest, b, counted);
  }
  if (failed) return tensor_drop(y), tensor_drop(of), tensor_drop(size), tensor_drop(largest), 1;
  *out = y;
  *offset2bag = of;
  *bag_size = size;
  *max_indices = largest;
  return 0;
}

CORE int32_t aoti_torch_cpu__embedding_bag_forward_only(tensor *weight, tensor *indices, tensor *offsets, int32_t scale_grad_by_freq, int64_t mode,
                                                        int32_t sparse, tensor **per_sample_weights, int32_t include_last_offset, int64_t padding_idx,
                                                        tensor **out, tensor **offset2bag, tensor **bag_size, tensor **max_indices) {
  return aoti_torch_cpu__embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
                                       padding_idx, out, offset2bag, bag_size, max_indices);
}

/* Returns the bag of index `i`, from `offset2bag`, or from `offsets` if that is empty. `bag` is the bag of the previous index. */
static int64_t bag_with(const tensor *offset2bag, const tensor *offsets, int64_t bags, int64_t i, int64_t bag) {
  if (offset2bag->sizes[0]) return index_at(offset2bag, i * offset2bag->strides[0]);
  while (bag + 1 < bags && index_at(offsets, (bag + 1) * offsets->strides[0]) <= i) bag++;
  return bag;
}

/* The gradient of a row is the sum of the gradients of its bags. */
int embedding_bag_backward(const tensor *grad, const tensor *indices, const tensor *offsets, const tensor *offset2bag, const tensor *bag_size,
                           int64_t rows, bool by_frequency, int64_t mode, bool sparse, const tensor *factors, int64_t padding_idx, tensor **out) {
  if ((grad->dtype != F32 && grad->dtype != F64) || mode > 1 || sparse || by_frequency)
    return core_fail("embedding_bag's backward of %s, mode %lld, sparse, or by frequency", name_of(grad->dtype), (long long)mode);
  int64_t sizes[2] = {rows, grad->sizes[1]};
  tensor *y = tensor_zeros(2, sizes, grad->dtype);
  if (!y) return 1;
  for (int64_t i = 0, bag = 0; i < indices->sizes[0]; i++) {
    int64_t row = index_at(indices, i * indices->strides[0]);
    bag = bag_with(offset2bag, offsets, grad->sizes[0], i, bag);
    if (row < 0 || row >= rows || bag < 0 || bag >= grad->sizes[0])
      return tensor_drop(y), core_fail("index %lld of embedding_bag is out of bounds for %lld rows", (long long)row, (long long)rows);
    double share = mode == 1 ? 1 / (double)index_at(bag_size, bag * bag_size->strides[0]) : factors ? number_at(factors, i * factors->strides[0]) : 1;
    if (row != padding_idx) add_row(grad, bag, y, row, share);
  }
  *out = y;
  return 0;
}

/* The gradient of an index's weight is the dot product of its row and the gradient of its bag. */
CORE int32_t aoti_torch_cpu__embedding_bag_per_sample_weights_backward(tensor *grad, tensor *weight, tensor *indices, tensor *offsets,
                                                                       tensor *offset2bag, int64_t mode, int64_t padding_idx, tensor **out) {
  if ((grad->dtype != F32 && grad->dtype != F64) || grad->dtype != weight->dtype || mode)
    return core_fail("the gradient of embedding_bag's weights of %s, mode %lld", name_of(grad->dtype), (long long)mode);
  int64_t count = indices->sizes[0], rows = weight->sizes[0];
  tensor *y = tensor_zeros(1, &count, grad->dtype);
  if (!y) return 1;
  for (int64_t i = 0, bag = 0; i < count; i++) {
    int64_t row = index_at(indices, i * indices->strides[0]);
    bag = bag_with(offset2bag, offsets, grad->sizes[0], i, bag);
    if (row < 0 || row >= rows || bag < 0 || bag >= grad->sizes[0])
      return tensor_drop(y), core_fail("index %lld of embedding_bag is out of bounds for %lld rows", (long long)row, (long long)rows);
    double sum = 0;
    for (int64_t j = 0; j < grad->sizes[1] && row != padding_idx; j++)
      sum += number_at(grad, bag * grad->strides[0] + j * grad->strides[1]) * number_at(weight, row * weight->strides[0] + j * weight->strides[1]);
    if (y->dtype == F32) ((float *)at(y))[i] = (float)sum;
    else ((double *)at(y))[i] = sum;
  }
  *out = y;
  return 0;
}
