/* torch.nn.functional.scaled_dot_product_attention on a CPU, with eager's interface: it also returns logsumexp. And its backward. */
#include "core.h"

#include <math.h>
#include <string.h>

#define T float
#define NAME f
#include "attention.inc"
#define T double
#define NAME d
#include "attention.inc"

/* Makes a gradient with eager's layout: (batch, length, heads, size), transposed. */
static tensor *by_length(const tensor *q, int64_t length, int64_t size) {
  int64_t b = q->sizes[0], h = q->sizes[1], sizes[] = {b, h, length, size}, strides[] = {h * length * size, size, h * size, 1};
  return tensor_new(4, sizes, strides, q->dtype);
}

static int check(const tensor *q, double dropout) {
  if (dropout != 0) return core_fail("attention with dropout");
  if (q->rank != 4 || (q->dtype != F32 && q->dtype != F64)) return core_fail("attention of %s", name_of(q->dtype));
  return 0;
}

CORE int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(tensor *q, tensor *k, tensor *v, double dropout, int32_t causal,
                                                                        tensor **mask, double *scale, tensor **out, tensor **lse) {
  if (check(q, dropout)) return 1;
  int64_t b = q->sizes[0], h = q->sizes[1], l = q->sizes[2], sizes[] = {b, h, l}, strides[] = {h * l, 1, h}, shape[] = {b, h, l, v->sizes[3]};
  tensor *o = tensor_like(q, shape, q->dtype), *sums = tensor_new(3, sizes, strides, q->dtype);
  double by = scale ? *scale : 1 / sqrt((double)q->sizes[3]);
  int failed = !o || !sums;
  if (!failed)
    failed =
        q->dtype == F32 ? attend_f(q, k, v, mask ? *mask : NULL, by, causal, o, sums) : attend_d(q, k, v, mask ? *mask : NULL, by, causal, o, sums);
  if (failed) return tensor_drop(o), tensor_drop(sums), 1;
  *out = o;
  *lse = sums;
  return 0;
}

CORE int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward(tensor *g, tensor *q, tensor *k, tensor *v, tensor *o, tensor *lse,
                                                                                 double dropout, int32_t causal, tensor **mask, double *scale,
                                                                                 tensor **gq, tensor **gk, tensor **gv) {
  if (check(q, dropout)) return 1;
  tensor *dq = by_length(q, q->sizes[2], q->sizes[3]), *dk = by_length(q, k->sizes[2], q->sizes[3]), *dv = by_length(q, k->sizes[2], v->sizes[3]),
         *m = mask ? *mask : NULL;
  double by = scale ? *scale : 1 / sqrt((double)q->sizes[3]);
  int failed = !dq || !dk || !dv;
  if (!failed)
    failed = q->dtype == F32 ? differentiate_f(g, q, k, v, o, lse, m, by, causal, dq, dk, dv)
                             : differentiate_d(g, q, k, v, o, lse, m, by, causal, dq, dk, dv);
  if (failed) return tensor_drop(dq), tensor_drop(dk), tensor_drop(dv), 1;
  *gq = dq;
  *gk = dk;
  *gv = dv;
  return 0;
}
