/* Convolutions over one to three dimensions, with groups, strides, padding and dilation, and their gradients. */
#include "core.h"

#include <string.h>

typedef struct {
  int64_t batch, groups, channels, filters, in[3], kernel[3], out[3], stride[3], padding[3], dilation[3];
} shape; /* channels, filters: per group; arrays: depth, height, width, 1 for a missing dimension */

static int64_t product(const int64_t sizes[3]) { return sizes[0] * sizes[1] * sizes[2]; }

/* The image of a stride-1 convolution with its border, so that the inputs of each kernel element are contiguous. A row of results is then as long as
 * a row with its border; the excess is dropped. */
typedef struct {
  int64_t size[3], wide, plane; /* wide: elements from the first result to the last */
} border;

/* Returns whether this is worth it: for a kernel of more than one element that does not cover most of the image. */
static bool slides(const shape *s, border *b) {
  for (int d = 0; d < 3; d++) {
    if (s->stride[d] != 1 || s->padding[d] < 0 || s->out[d] < 1) return false;
    b->size[d] = s->in[d] + 2 * s->padding[d];
  }
  b->plane = product(b->size);
  b->wide = ((s->out[0] - 1) * b->size[1] + s->out[1] - 1) * b->size[2] + s->out[2];
  return product(s->kernel) > 1 && s->channels && s->filters && b->wide <= 2 * product(s->out);
}

/* Returns the offset of each kernel element (channel, depth, height, width) in the image with its border. */
static int64_t *offsets_of(const shape *s, const border *b) {
  int64_t elements = product(s->kernel), *out = take(sizeof *out * (size_t)(s->channels * elements));
  for (int64_t p = 0; out && p < s->channels * elements; p++) {
    int64_t e = p % elements, d = e / s->kernel[2] / s->kernel[1] * s->dilation[0], h = e / s->kernel[2] % s->kernel[1] * s->dilation[1];
    out[p] = p / elements * b->plane + (d * b->size[1] + h) * b->size[2] + e % s->kernel[2] * s->dilation[2];
  }
  return out;
}

/* Returns the convolution that computes the input gradient of a stride-1 convolution. */
static shape gradient_shape(const shape *s) {
  shape out = *s;
  out.channels = s->filters;
  out.filters = s->channels;
  for (int d = 0; d < 3; d++) {
    out.in[d] = s->out[d];
    out.out[d] = s->in[d];
    out.padding[d] = s->dilation[d] * (s->kernel[d] - 1) - s->padding[d];
  }
  return out;
}

static int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

#define T float
#define NAME f
#include "convolution.inc"
#define T double
#define NAME d
#include "convolution.inc"

/* `sizes`: of the input. For a transposed convolution: of its result, because it is the gradient of a convolution with that input. */
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

/* Computes the result sizes of a transposed convolution. */
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

static int run_backward(const shape *s, const tensor *gy, const tensor *x, const tensor *w, tensor *gx, tensor *gw) {
  void *dx = gx ? at(gx) : NULL, *dw = gw ? at(gw) : NULL;
  return gy->dtype == F32 ? backward_f(s, at(gy), x ? at(x) : NULL, at(w), dx, dw) : backward_d(s, at(gy), x ? at(x) : NULL, at(w), dx, dw);
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

#define SUM_PLANES(type, suffix)                                                                                                                     \
  static void sum_planes_##suffix(const type *from, int64_t batch, int64_t channels, int64_t plane, type *to) {                                      \
    for (int64_t c = 0; c < channels; c++) {                                                                                                         \
      double sums[8] = {0};                                                                                                                          \
      for (int64_t n = 0; n < batch; n++) {                                                                                                          \
        const type *x = from + (n * channels + c) * plane;                                                                                           \
        int64_t i = 0;                                                                                                                               \
        for (; i + 8 <= plane; i += 8)                                                                                                               \
          for (int v = 0; v < 8; v++) sums[v] += x[i + v];                                                                                           \
        for (; i < plane; i++) sums[0] += x[i];                                                                                                      \
      }                                                                                                                                              \
      for (int v = 1; v < 8; v++) sums[0] += sums[v];                                                                                                \
      to[c] = (type)sums[0];                                                                                                                         \
    }                                                                                                                                                \
  }
SUM_PLANES(float, f)
SUM_PLANES(double, d)

static void sum_channels(const tensor *g, tensor *out) { /* row-major */
  int64_t plane = 1;
  for (int32_t d = 2; d < g->rank; d++) plane *= g->sizes[d];
  if (out->dtype == F32) sum_planes_f(at(g), g->sizes[0], g->sizes[1], plane, at(out));
  else sum_planes_d(at(g), g->sizes[0], g->sizes[1], plane, at(out));
}

/* Returns whether eager's results are channels_last: if an operand is, and in three dimensions only if oneDNN also computes them (use_mkldnn in
 * aten/src/ATen/native/Convolution.cpp, with more than one thread). */
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
  if (!failed) failed = transposed ? run_backward(&s, x, NULL, w, y, NULL) : run_forward(&s, x, w, b, y);
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
  if (!failed && !transposed) failed = run_backward(&s, gy, x, w, dx, dw);
  else if (!failed) failed = (dx && run_forward(&s, gy, w, NULL, dx)) || (dw && run_backward(&s, x, gy, w, NULL, dw));
  if (!failed && db) sum_channels(gy, db);
  tensor_drop(gy);
  tensor_drop(x);
  tensor_drop(w);
  bool last = channels_last(x_, w_, groups);
  if (!failed) failed = (dx && !(dx = tensor_laid_out(dx, last))) | (dw && !(dw = tensor_laid_out(dw, last)));
  tensor *const made[] = {dx, dw, db};
  tensor **const to[] = {gx, gw, gb};
  for (int i = 0; i < 3; i++) {
    if (failed || !to[i]) tensor_drop(made[i]); /* drop results that were not requested */
    else *to[i] = made[i];
  }
  return failed;
}
