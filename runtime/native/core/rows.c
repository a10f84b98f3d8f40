/* Sums over rows that an index chooses: gradients of embeddings and gathers, and embedding bags. */
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

/* out = self, and each element of src goes to the place along `dim` that index says: docs of torch.Tensor.scatter_reduce. */
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
  /* Along the last dimension the index may be the same throughout, as that of rows is: then a row goes at once. */
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

/* Which rows a bag sums: [from, to) of the indices. */
static void bag_of(const tensor *offsets, int64_t bag, int64_t bags, int64_t indices, int64_t *from, int64_t *to) {
  *from = index_at(offsets, bag * offsets->strides[0]);
  *to = bag + 1 < bags || offsets->sizes[0] > bags ? index_at(offsets, (bag + 1) * offsets->strides[0]) : indices;
}

CORE int32_t aoti_torch_cpu__embedding_bag(tensor *weight, tensor *indices, tensor *offsets, int32_t scale_grad_by_freq, int64_t mode, int32_t sparse,
                                           tensor **per_sample_weights, int32_t include_last_offset, int64_t padding_idx, tensor **out,
                                           tensor **offset2bag, tensor **bag_size, tensor **max_indices) {
  (void)scale_grad_by_freq, (void)sparse;
  if (weight->dtype != F32 || mode > 1 || padding_idx >= 0 || (per_sample_weights && *per_sample_weights))
    return core_fail("embedding_bag of %s, mode %lld, with a padding index or weights of its own", name_of(weight->dtype), (long long)mode);
  int64_t bags = offsets->sizes[0] - (include_last_offset ? 1 : 0), width = weight->sizes[1], count = indices->sizes[0], rows = weight->sizes[0],
          sizes[2] = {bags, width};
  bool brief = mode == 0 && weight->strides[1] == 1; /* eager says then neither which bag an index is in nor how large the bags are */
  int64_t told = brief ? 0 : count;
  tensor *y = tensor_zeros(2, sizes, F32), *of = tensor_zeros(1, &told, indices->dtype), *size = tensor_zeros(1, &bags, indices->dtype),
         *largest = tensor_zeros(1, &bags, indices->dtype);
  int failed = !y || !of || !size || !largest;
  for (int64_t b = 0; b < bags && !failed; b++) {
    int64_t from, to;
    bag_of(offsets, b, bags, count, &from, &to);
    if (from < 0 || to > count || to < from)
      failed = core_fail("an offset of embedding_bag is not between 0 and %lld, or they do not rise", (long long)count);
    for (int64_t i = from; i < to && !failed; i++) {
      int64_t row = index_at(indices, i * indices->strides[0]);
      if (row < 0 || row >= rows) failed = core_fail("index %lld of embedding_bag is out of bounds for %lld rows", (long long)row, (long long)rows);
      else reduce_f((float *)at(y) + b * width, (const float *)at(weight) + row * weight->strides[0], width, 1, weight->strides[1], SUM);
      if (brief) continue;
      if (of->dtype == I64) ((int64_t *)at(of))[i] = b;
      else ((int32_t *)at(of))[i] = (int32_t)b;
    }
    float *sums = (float *)at(y) + b * width;
    for (int64_t j = 0; mode == 1 && to > from && j < width && !failed; j++) sums[j] /= (float)(to - from);
    for (int i = 0; i < 2 && !brief; i++) {
      tensor *t = i ? largest : size;
      if (t->dtype == I64) ((int64_t *)at(t))[b] = to - from;
      else ((int32_t *)at(t))[b] = (int32_t)(to - from);
    }
  }
  if (failed) return tensor_drop(y), tensor_drop(of), tensor_drop(size), tensor_drop(largest), 1;
  *out = y;
  *offset2bag = of;
  *bag_size = size;
  *max_indices = largest;
  return 0;
}

/* Each row's gradient is the sum of those of the bags that it is in; which bag that is, `offsets` say where `offset2bag` is empty. */
int embedding_bag_backward(const tensor *grad, const tensor *indices, const tensor *offsets, const tensor *offset2bag, const tensor *bag_size,
                           int64_t rows, bool by_frequency, int64_t mode, bool sparse, int64_t padding_idx, tensor **out) {
  if (grad->dtype != F32 || mode > 1 || sparse || by_frequency || padding_idx >= 0)
    return core_fail("embedding_bag's backward of %s, mode %lld, sparse, by frequency or with a padding index", name_of(grad->dtype),
                     (long long)mode);
  int64_t width = grad->sizes[1], sizes[2] = {rows, width};
  tensor *y = tensor_zeros(2, sizes, F32);
  if (!y) return 1;
  bool told = offset2bag->sizes[0] > 0;
  for (int64_t i = 0, bag = 0; i < indices->sizes[0]; i++) {
    int64_t row = index_at(indices, i * indices->strides[0]);
    if (told) bag = index_at(offset2bag, i * offset2bag->strides[0]);
    else
      while (bag + 1 < grad->sizes[0] && index_at(offsets, (bag + 1) * offsets->strides[0]) <= i) bag++;
    if (row < 0 || row >= rows || bag < 0 || bag >= grad->sizes[0])
      return tensor_drop(y), core_fail("index %lld of embedding_bag is out of bounds for %lld rows", (long long)row, (long long)rows);
    float share = mode == 1 ? 1 / (float)index_at(bag_size, bag * bag_size->strides[0]) : 1;
    const float *from = (const float *)at(grad) + bag * grad->strides[0];
    float *to = (float *)at(y) + row * width;
    for (int64_t j = 0; j < width; j++) to[j] += share * from[j * grad->strides[1]];
  }
  *out = y;
  return 0;
}
