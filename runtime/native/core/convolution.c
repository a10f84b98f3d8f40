/* Convolutions over one to three dimensions, with groups, strides, padding and dilation, and their gradients. */
#include "core.h"

#include <string.h>

typedef struct {
  int64_t batch, groups, channels, filters, in[3], kernel[3], out[3], stride[3], padding[3], dilation[3];
} shape; /* channels, filters: of a group; depth, height and width, of which those that are not there are 1 */

static int64_t product(const int64_t sizes[3]) { return sizes[0] * sizes[1] * sizes[2]; }

#define T float
#define NAME f
#include "convolution.inc"
#define T double
#define NAME d
#include "convolution.inc"

/* `x` is the input of the convolution, of a transposed one its result, whose sizes these are: that one is the other's gradient. */
static int read_shape(const tensor *x, const int64_t *sizes, const tensor *w, const int64_t *stride, int64_t strides, const int64_t *padding,
                      int64_t paddings, const int64_t *dilation, int64_t dilations, int64_t groups, shape *s) {
  int absent = 5 - x->rank;
  if (x->rank < 3 || x->rank > 5 || w->rank != x->rank) return core_fail("a convolution of an input of %d dimensions", x->rank);
  if (x->dtype != w->dtype || (x->dtype != F32 && x->dtype != F64)) return core_fail("a convolution of %s", name_of(x->dtype));
  *s = (shape){sizes[0], groups, sizes[1] / groups, w->sizes[0] / groups, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0}, {1, 1, 1}};
  for (int i = absent; i < 3; i++) {
    int d = i - absent;
    s->in[i] = sizes[2 + d];
    s->kernel[i] = w->sizes[2 + d];
    s->stride[i] = stride[strides == 1 ? 0 : d];
    s->padding[i] = padding[paddings == 1 ? 0 : d];
    s->dilation[i] = dilation[dilations == 1 ? 0 : d];
    s->out[i] = (s->in[i] + 2 * s->padding[i] - s->dilation[i] * (s->kernel[i] - 1) - 1) / s->stride[i] + 1;
    if (s->out[i] < 0) s->out[i] = 0;
  }
  return 0;
}

/* The sizes of a transposed convolution's result. */
static void transposed_sizes(const tensor *x, const tensor *w, const int64_t *stride, int64_t strides, const int64_t *padding, int64_t paddings,
                             const int64_t *dilation, int64_t dilations, const int64_t *more, int64_t mores, int64_t groups, int64_t sizes[5]) {
  sizes[0] = x->sizes[0];
  sizes[1] = w->sizes[1] * groups;
  for (int d = 0; d < x->rank - 2; d++)
    sizes[2 + d] = (x->sizes[2 + d] - 1) * stride[strides == 1 ? 0 : d] - 2 * padding[paddings == 1 ? 0 : d] +
                   dilation[dilations == 1 ? 0 : d] * (w->sizes[2 + d] - 1) + more[mores == 1 ? 0 : d] + 1;
}

static int run_forward(const shape *s, const tensor *x, const tensor *w, const tensor *bias, tensor *y) {
  const void *b = bias ? at(bias) : NULL;
  int64_t step = bias ? bias->strides[0] : 0;
  return x->dtype == F32 ? forward_f(s, at(x), at(w), b, step, at(y)) : forward_d(s, at(x), at(w), b, step, at(y));
}

static int run_backward(const shape *s, const tensor *gy, const tensor *x, const tensor *w, tensor *gx, tensor *gw, tensor *gb) {
  void *dx = gx ? at(gx) : NULL, *dw = gw ? at(gw) : NULL, *db = gb ? at(gb) : NULL;
  return gy->dtype == F32 ? backward_f(s, at(gy), x ? at(x) : NULL, at(w), dx, dw, db) : backward_d(s, at(gy), x ? at(x) : NULL, at(w), dx, dw, db);
}

static void add_bias(tensor *y, const tensor *bias) { /* row-major */
  int64_t plane = 1, channels = y->sizes[1];
  for (int32_t d = 2; d < y->rank; d++) plane *= y->sizes[d];
  for (int64_t n = 0; n < y->sizes[0] * channels; n++)
    for (int64_t i = 0; i < plane; i++) {
      int64_t from = n % channels * bias->strides[0];
      if (y->dtype == F32) ((float *)at(y))[n * plane + i] += ((const float *)at(bias))[from];
      else ((double *)at(y))[n * plane + i] += ((const double *)at(bias))[from];
    }
}

static void sum_channels(const tensor *g, tensor *out) { /* row-major */
  int64_t plane = 1, channels = g->sizes[1];
  for (int32_t d = 2; d < g->rank; d++) plane *= g->sizes[d];
  for (int64_t n = 0; n < g->sizes[0] * channels; n++) {
    double sum = 0;
    for (int64_t i = 0; i < plane; i++) sum += g->dtype == F32 ? ((const float *)at(g))[n * plane + i] : ((const double *)at(g))[n * plane + i];
    if (out->dtype == F32) ((float *)at(out))[n % channels] += (float)sum;
    else ((double *)at(out))[n % channels] += sum;
  }
}

/* Whether eager's results have their channels last: where an operand has, and of volumes where oneDNN computes them (aten/src/ATen/native/Convolution.cpp:
 * use_mkldnn, with more than one thread). */
static bool channels_last(const tensor *x, const tensor *w, int64_t groups) {
  if (!tensor_is_channels_last(x) && !tensor_is_channels_last(w)) return false;
  if (x->rank == 4) return true;
  bool large = (w->sizes[3] > 3 && w->sizes[4] > 3) || x->sizes[0] * x->sizes[1] * x->sizes[2] * x->sizes[3] > 20480;
  return x->dtype == F32 && (groups > 1 || x->sizes[0] > 1 || large);
}

CORE int32_t aoti_torch_cpu_convolution(tensor *x_, tensor *w_, tensor **bias, const int64_t *stride, int64_t strides, const int64_t *padding,
                                        int64_t paddings, const int64_t *dilation, int64_t dilations, int32_t transposed,
                                        const int64_t *output_padding, int64_t output_paddings, int64_t groups, tensor **out) {
  shape s;
  int64_t sizes[5] = {0};
  tensor *b = bias ? *bias : NULL;
  if (transposed) transposed_sizes(x_, w_, stride, strides, padding, paddings, dilation, dilations, output_padding, output_paddings, groups, sizes);
  if (read_shape(x_, transposed ? sizes : x_->sizes, w_, stride, strides, padding, paddings, dilation, dilations, groups, &s)) return 1;
  if (!transposed) {
    sizes[0] = s.batch;
    sizes[1] = s.filters * groups;
    for (int d = 2; d < x_->rank; d++) sizes[d] = s.out[d - x_->rank + 3];
  }
  tensor *x = tensor_dense(x_), *w = tensor_dense(w_),
         *y = transposed ? tensor_zeros(x_->rank, sizes, x_->dtype) : tensor_new(x_->rank, sizes, NULL, x_->dtype);
  int failed = !x || !w || !y;
  if (!failed) failed = transposed ? run_backward(&s, x, NULL, w, y, NULL, NULL) : run_forward(&s, x, w, b, y);
  if (!failed && transposed && b) add_bias(y, b);
  tensor_drop(x);
  tensor_drop(w);
  if (failed) return tensor_drop(y), 1;
  return (*out = tensor_laid_out(y, channels_last(x_, w_, groups))) ? 0 : 1;
}

CORE int32_t aoti_torch_cpu_convolution_backward(tensor *gy_, tensor *x_, tensor *w_, const int64_t **bias_sizes, int64_t bias_rank,
                                                 const int64_t *stride, int64_t strides, const int64_t *padding, int64_t paddings,
                                                 const int64_t *dilation, int64_t dilations, int32_t transposed, const int64_t *output_padding,
                                                 int64_t output_paddings, int64_t groups, const int32_t *mask, int64_t masks, tensor **gx,
                                                 tensor **gw, tensor **gb) {
  (void)bias_sizes, (void)bias_rank, (void)output_padding, (void)output_paddings, (void)masks;
  shape s;
  if (read_shape(x_, transposed ? gy_->sizes : x_->sizes, w_, stride, strides, padding, paddings, dilation, dilations, groups, &s)) return 1;
  int64_t channels = gy_->sizes[1];
  tensor *gy = tensor_dense(gy_), *x = tensor_dense(x_), *w = tensor_dense(w_), *dx = NULL, *dw = NULL, *db = NULL;
  int failed = !gy || !x || !w;
  if (mask[0]) failed |= !(dx = tensor_zeros(x_->rank, x_->sizes, x_->dtype));
  if (mask[1]) failed |= !(dw = tensor_zeros(w_->rank, w_->sizes, w_->dtype));
  if (mask[2]) failed |= !(db = tensor_zeros(1, &channels, w_->dtype));
  if (!failed && !transposed) failed = run_backward(&s, gy, x, w, dx, dw, NULL);
  else if (!failed) failed = (dx && run_forward(&s, gy, w, NULL, dx)) || (dw && run_backward(&s, x, gy, w, NULL, dw, NULL));
  if (!failed && db) sum_channels(gy, db);
  tensor_drop(gy);
  tensor_drop(x);
  tensor_drop(w);
  bool last = channels_last(x_, w_, groups);
  if (!failed) failed = (dx && !(dx = tensor_laid_out(dx, last))) | (dw && !(dw = tensor_laid_out(dw, last)));
  tensor *const made[] = {dx, dw, db};
  tensor **const to[] = {gx, gw, gb};
  for (int i = 0; i < 3; i++) {
    if (failed || !to[i]) tensor_drop(made[i]); /* what nobody asked for has no place */
    else *to[i] = made[i];
  }
  return failed;
}
