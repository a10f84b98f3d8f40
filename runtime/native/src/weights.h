/* The tensors that compiled code is bound to, each in memory of its own, verified by its digest. */
#ifndef AOTB_WEIGHTS_H
#define AOTB_WEIGHTS_H
#include "package.h"

typedef struct {
  const weight_spec *spec;
  void *data;   /* at a multiple of 64 bytes */
  int64_t span; /* elements from the first to the last in memory */
  int64_t elements;
} weight;

/* The weights of those numbers, in memory of `a`. */
weight *weights_read(struct aotb_package *p, arena *a, const uint32_t *numbers, uint32_t count);

/* Makes every element that number. */
void weight_fill(const weight *w, double value);

/* How many elements a layout spans, each in a place of its own but along strides of 0; -1 where elements overlap otherwise, or lie too far apart. */
int64_t layout_span(uint32_t rank, const int64_t *shape, const int64_t *stride);

/* Copies a tensor of elements of `size` bytes into one of other strides. */
void copy_tensor(void *to, const int64_t *to_stride, const void *from, const int64_t *from_stride, size_t size, uint32_t rank, const int64_t *shape);
#endif
