#include "core.h"

#include <math.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed in the target's registers, as by compiled code */

#define WIDTH 16
#define F 4
#define D 2
#define TARGET
#include "vector_math.inc"

#ifdef __x86_64__
#define WIDTH 32
#define F 8
#define D 4
#define TARGET __attribute__((target("avx2,fma")))
#include "vector_math.inc"

#define WIDTH 64
#define F 16
#define D 8
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")))
#include "vector_math.inc"
#define WIDER(suffix) , row_##suffix##_32, row_##suffix##_64
#else
#define WIDER(suffix)
#endif

void exponentials_f(float *row, int64_t count, float by) {
  static void (*const of[])(float *, int64_t, float) = {row_f_16 WIDER(f)};
  of[cpu_level() - 1](row, count, by);
}

void exponentials_d(double *row, int64_t count, double by) {
  static void (*const of[])(double *, int64_t, double) = {row_d_16 WIDER(d)};
  of[cpu_level() - 1](row, count, by);
}
