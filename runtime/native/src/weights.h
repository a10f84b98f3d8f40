/* The tensors that compiled code is bound to. Each has its own memory and is verified by its digest. */
#ifndef AOTB_WEIGHTS_H
#define AOTB_WEIGHTS_H
#include "package.h"

typedef struct {
  const weight_spec *spec;
  void *data;   /* aligned to 64 bytes */
  int64_t span; /* elements from the first to the last in memory */
  int64_t elements;
} weight;

/* Reads the weights with these numbers into memory of `a`. */
weight *weights_read(struct aotb_package *p, arena *a, const uint32_t *numbers, uint32_t count);

/* Sets every element to the value. */
void weight_fill(const weight *w, double value);

/* Returns the number of elements that a layout spans; -1 if elements overlap other than by strides of 0, or lie too far apart. */
int64_t layout_span(uint32_t rank, const int64_t *shape, const int64_t *stride);

/* Copies a tensor with elements of `size` bytes into one with other strides. */
void copy_tensor(void *to, const int64_t *to_stride, const void *from, const int64_t *from_stride, size_t size, uint32_t rank, const int64_t *shape);
#endif
