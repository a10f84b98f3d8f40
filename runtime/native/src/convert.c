#include "convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* DLPack's codes */
enum { INTEGER, UNSIGNED, FLOATING, BFLOAT = 4, COMPLEX = 5, BOOLEAN = 6 };

static bool is_whole(const dtype *t) { return t->dl.code == INTEGER || t->dl.code == UNSIGNED || t->dl.code == BOOLEAN; }

const char *convert_problem(const dtype *from, const dtype *to) {
  if (!from) return "PyTorch has no such dtype: convert it";
  if (from == to) return NULL;
  if (from->dl.code == COMPLEX && to->dl.code != COMPLEX) return "Complex numbers are not converted to real ones: pass their real part";
  if (to->dl.code == BOOLEAN) return "Numbers are not converted to booleans: compare them first";
  if (is_whole(to) && !is_whole(from)) return "Floating-point numbers are not converted to integers: round them first";
  return NULL;
}

/* A row of elements: `n` of them, `to_step` and `from_step` bytes apart. Returns false to end the walk. */
typedef struct {
  const dtype *to_type, *from_type;
  double factor;
  char *unfit;
} work;
typedef bool row(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n);

static bool walk(row *each, const work *w, char *to, const int64_t *to_stride, const char *from, const int64_t *from_stride, uint32_t rank,
                 const int64_t *shape) {
  int64_t at[64] = {0}, to_size = w->to_type->size, from_size = w->from_type->size;
  for (uint32_t d = 0; d < rank; d++)
    if (!shape[d]) return true;
  if (!rank) return each(w, to, 0, from, 0, 1);
  uint32_t last = rank - 1;
  for (;;) {
    if (!each(w, to, to_stride[last] * to_size, from, from_stride[last] * from_size, shape[last])) return false;
    uint32_t d = last;
    while (d && at[d - 1] + 1 == shape[d - 1]) { /* this index wraps around */
      d--;
      to -= at[d] * to_stride[d] * to_size;
      from -= at[d] * from_stride[d] * from_size;
      at[d] = 0;
    }
    if (!d) return true;
    at[d - 1]++;
    to += to_stride[d - 1] * to_size;
    from += from_stride[d - 1] * from_size;
  }
}

/* --- single elements -------------------------------------------------------------------------------------------------------------------------- */

static __int128 whole(const dtype *t, const char *at) {
  uint64_t bits = 0;
  memcpy(&bits, at, (size_t)t->size); /* little-endian */
  if (t->dl.code == BOOLEAN) return bits != 0;
  if (t->dl.code == UNSIGNED) return bits;
  int unused = 64 - t->dl.bits;
  return (int64_t)(bits << unused) >> unused;
}

/* Reads a number of any dtype. `part`: 1 for the imaginary part. */
static double number(const dtype *t, const char *at, int part) {
  float single;
  double wide;
  _Float16 half;
  uint16_t high;
  uint32_t bits;
  if (t->dl.code != COMPLEX && part) return 0;
  if (is_whole(t)) return (double)whole(t, at);
  switch (t->dl.code == COMPLEX ? t->size / 2 : t->size) {
  case 8: return memcpy(&wide, at + 8 * part, 8), wide;
  case 4: return memcpy(&single, at + 4 * part, 4), (double)single;
  default: break;
  }
  if (t->dl.code == FLOATING) return memcpy(&half, at, 2), (double)half;
  memcpy(&high, at, 2);
  bits = (uint32_t)high << 16;
  return memcpy(&single, &bits, 4), (double)single;
}

static void put_number(const dtype *t, char *at, int part, double value) {
  float single = (float)value;
  _Float16 half = (_Float16)value;
  uint32_t bits;
  if (t->dl.code != COMPLEX && part) return;
  switch (t->dl.code == COMPLEX ? t->size / 2 : t->size) {
  case 8: memcpy(at + 8 * part, &value, 8); return;
  case 4: memcpy(at + 4 * part, &single, 4); return;
  default: break;
  }
  if (t->dl.code == FLOATING) {
    memcpy(at, &half, 2);
    return;
  }
  memcpy(&bits, &single, 4);
  if (single == single) bits += 0x7FFF + (bits >> 16 & 1); /* round to even; NaN stays NaN */
  else bits |= 0x400000;
  uint16_t high = (uint16_t)(bits >> 16);
  memcpy(at, &high, 2);
}

static bool put_whole(const dtype *t, char *at, __int128 value) {
  int bits = t->dl.bits - (t->dl.code == INTEGER);
  __int128 above = (__int128)1 << bits;
  if (value >= above || value < (t->dl.code == INTEGER ? -above : 0)) return false;
  uint64_t low = (uint64_t)value;
  memcpy(at, &low, (size_t)t->size);
  return true;
}

/* --- rows ------------------------------------------------------------------------------------------------------------------------------------- */

#define ROW(FROM, TO)                                                                                                                                \
  for (int64_t i = 0; i < n; i++, to += to_step, from += from_step) {                                                                                \
    FROM given;                                                                                                                                      \
    memcpy(&given, from, sizeof given);                                                                                                              \
    TO made = (TO)given;                                                                                                                             \
    memcpy(to, &made, sizeof made);                                                                                                                  \
  }                                                                                                                                                  \
  return true

/* The conversions that simulators need, as loops that compilers vectorize. */
static bool narrow(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
  (void)w;
  ROW(double, float);
}
static bool widen(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
  (void)w;
  ROW(float, double);
}
static bool widen_integers(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
  (void)w;
  ROW(int32_t, int64_t);
}

static bool convert_row(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
  for (int64_t i = 0; i < n; i++, to += to_step, from += from_step) {
    if (is_whole(w->to_type)) {
      __int128 value = whole(w->from_type, from);
      if (put_whole(w->to_type, to, value)) continue;
      if (value < 0) snprintf(w->unfit, 32, "%" PRId64, (int64_t)value);
      else snprintf(w->unfit, 32, "%" PRIu64, (uint64_t)value);
      return false;
    }
    for (int part = 0; part < 2; part++) put_number(w->to_type, to, part, number(w->from_type, from, part));
  }
  return true;
}

bool convert_tensor(void *to, const int64_t *to_stride, const dtype *to_type, const void *from, const int64_t *from_stride, const dtype *from_type,
                    uint32_t rank, const int64_t *shape, char unfit[32]) {
  work w = {to_type, from_type, 1, unfit};
  row *each = convert_row;
  bool floats = to_type->dl.code == FLOATING && from_type->dl.code == FLOATING, integers = !to_type->dl.code && !from_type->dl.code;
  if (floats && to_type->size == 4 && from_type->size == 8) each = narrow;
  if (floats && to_type->size == 8 && from_type->size == 4) each = widen;
  if (integers && to_type->size == 8 && from_type->size == 4) each = widen_integers;
  return walk(each, &w, to, to_stride, from, from_stride, rank, shape);
}

#define SCALE(TYPE)                                                                                                                                  \
  for (int64_t i = 0; i < n; i++, to += to_step, from += from_step) {                                                                                \
    TYPE value;                                                                                                                                      \
    memcpy(&value, from, sizeof value);                                                                                                              \
    value *= (TYPE)w->factor;                                                                                                                        \
    memcpy(to, &value, sizeof value);                                                                                                                \
  }                                                                                                                                                  \
  return true

static bool scale_row(const work *w, char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
  const dtype *t = w->to_type;
  if (t->dl.code == FLOATING && t->size == 8) {
    SCALE(double);
  }
  if (t->dl.code == FLOATING && t->size == 4) {
    SCALE(float);
  }
  for (int64_t i = 0; i < n; i++, to += to_step, from += from_step)
    for (int part = 0; part < 2; part++) put_number(t, to, part, w->factor * number(t, from, part));
  return true;
}

void scale_tensor(void *to, const int64_t *to_stride, const void *from, const int64_t *from_stride, const dtype *type, double factor, uint32_t rank,
                  const int64_t *shape) {
  work w = {type, type, factor, NULL};
  walk(scale_row, &w, to, to_stride, from, from_stride, rank, shape);
}
