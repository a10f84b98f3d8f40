/* Max pooling over two dimensions, with the index of each maximum. */
#include "core.h"

#include <math.h>
#include <string.h>

typedef struct {
  int64_t kernel[2], stride[2], padding[2], dilation[2], in[2], out[2];
} window;

static void two(int64_t to[2], const int64_t *values, int64_t count) {
  to[0] = values[0];
  to[1] = values[count == 1 ? 0 : 1];
}

static void read_window(const tensor *x, const int64_t *kernel, int64_t kernels, const int64_t *stride, int64_t strides, const int64_t *padding,
                        int64_t paddings, const int64_t *dilation, int64_t dilations, bool ceil, window *w) {
  two(w->kernel, kernel, kernels);
  two(w->stride, strides ? stride : kernel, strides ? strides : kernels);
  two(w->padding, padding, paddings);
  two(w->dilation, dilation, dilations);
  for (int i = 0; i < 2; i++) {
    w->in[i] = x->sizes[x->rank - 2 + i];
    int64_t room = w->in[i] + 2 * w->padding[i] - w->dilation[i] * (w->kernel[i] - 1) - 1 + (ceil ? w->stride[i] - 1 : 0);
    w->out[i] = room / w->stride[i] + 1;
    if (ceil && (w->out[i] - 1) * w->stride[i] >= w->in[i] + w->padding[i]) w->out[i]--;
  }
}

#define POOL(type, suffix)                                                                                                                           \
  static void pool_##suffix(const window *w, const type *x, type *y, int64_t *places) {                                                              \
    for (int64_t a = 0; a < w->out[0]; a++)                                                                                                          \
      for (int64_t b = 0; b < w->out[1]; b++) {                                                                                                      \
        type best = (type) - INFINITY;                                                                                                               \
        int64_t place = -1;                                                                                                                          \
        for (int64_t i = 0; i < w->kernel[0]; i++)                                                                                                   \
          for (int64_t j = 0; j < w->kernel[1]; j++) {                                                                                               \
            int64_t h = a * w->stride[0] - w->padding[0] + i * w->dilation[0], v = b * w->stride[1] - w->padding[1] + j * w->dilation[1];            \
            if (h < 0 || h >= w->in[0] || v < 0 || v >= w->in[1]) continue;                                                                          \
            type value = x[h * w->in[1] + v];                                                                                                        \
            if (place < 0 || value > best || value != value) best = value, place = h * w->in[1] + v;                                                 \
          }                                                                                                                                          \
        y[a * w->out[1] + b] = best;                                                                                                                 \
        places[a * w->out[1] + b] = place;                                                                                                           \
      }                                                                                                                                              \
  }                                                                                                                                                  \
  static void unpool_##suffix(int64_t count, const type *g, const int64_t *places, type *x) {                                                        \
    for (int64_t i = 0; i < count; i++) x[places[i]] += g[i];                                                                                        \
  }
POOL(float, f)
POOL(double, d)

CORE int32_t aoti_torch_cpu_max_pool2d_with_indices(tensor *x_, const int64_t *kernel, int64_t kernels, const int64_t *stride, int64_t strides,
                                                    const int64_t *padding, int64_t paddings, const int64_t *dilation, int64_t dilations,
                                                    int32_t ceil, tensor **out, tensor **index) {
  window w;
  if (x_->rank < 3 || (x_->dtype != F32 && x_->dtype != F64)) return core_fail("max pooling of %s in %d dimensions", name_of(x_->dtype), x_->rank);
  read_window(x_, kernel, kernels, stride, strides, padding, paddings, dilation, dilations, ceil, &w);
  int64_t sizes[RANKS], plane = w.in[0] * w.in[1], small = w.out[0] * w.out[1], planes = 1;
  memcpy(sizes, x_->sizes, sizeof sizes);
  for (int32_t d = 0; d < x_->rank - 2; d++) planes *= sizes[d];
  sizes[x_->rank - 2] = w.out[0];
  sizes[x_->rank - 1] = w.out[1];
  tensor *x = tensor_dense(x_), *y = tensor_new(x_->rank, sizes, NULL, x_->dtype), *places = tensor_new(x_->rank, sizes, NULL, I64);
  if (!x || !y || !places) return tensor_drop(x), tensor_drop(y), tensor_drop(places), 1;
  int threads = threads_for((double)(planes * small * w.kernel[0] * w.kernel[1]));
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < planes; p++) {
    if (x->dtype == F32) pool_f(&w, (const float *)at(x) + p * plane, (float *)at(y) + p * small, (int64_t *)at(places) + p * small);
    else pool_d(&w, (const double *)at(x) + p * plane, (double *)at(y) + p * small, (int64_t *)at(places) + p * small);
  }
  tensor_drop(x);
  bool last = tensor_is_channels_last(x_);
  *out = tensor_laid_out(y, last);
  *index = tensor_laid_out(places, last);
  if (*out && *index) return 0;
  tensor_drop(*out);
  tensor_drop(*index);
  return 1;
}

CORE int32_t aoti_torch_cpu_max_pool2d_with_indices_backward(tensor *g_, tensor *x, const int64_t *kernel, int64_t kernels, const int64_t *stride,
                                                             int64_t strides, const int64_t *padding, int64_t paddings, const int64_t *dilation,
                                                             int64_t dilations, int32_t ceil, tensor *index_, tensor **out) {
  (void)kernel, (void)kernels, (void)stride, (void)strides, (void)padding, (void)paddings, (void)dilation, (void)dilations, (void)ceil;
  if (g_->dtype != F32 && g_->dtype != F64) return core_fail("max pooling's backward of %s", name_of(g_->dtype));
  tensor *g = tensor_dense(g_), *index = tensor_dense(index_), *y = tensor_zeros(x->rank, x->sizes, x->dtype);
  int failed = !g || !index || !y;
  int64_t plane = x->sizes[x->rank - 2] * x->sizes[x->rank - 1], small = g_->sizes[x->rank - 2] * g_->sizes[x->rank - 1],
          planes = failed || !small ? 0 : tensor_count(g) / small;
  for (int64_t p = 0; p < planes; p++) {
    if (g->dtype == F32) unpool_f(small, (const float *)at(g) + p * small, (const int64_t *)at(index) + p * small, (float *)at(y) + p * plane);
    else unpool_d(small, (const double *)at(g) + p * small, (const int64_t *)at(index) + p * small, (double *)at(y) + p * plane);
  }
  tensor_drop(g);
  tensor_drop(index);
  if (failed) return tensor_drop(y), 1;
  return (*out = tensor_laid_out(y, tensor_is_channels_last(x))) ? 0 : 1;
}
