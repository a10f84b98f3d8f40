/* torch's CPU generator: a Mersenne Twister (Matsumoto and Nishimura 1998). Its state has the format of torch.get_rng_state(), and it draws the same
 * bits as eager. The process has one generator, like torch's default one. */
#include "core.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

/* The sizes of MT19937; bytes of torch's state, and the places of the stored normal number in it. */
enum { WORDS = 624, MIDDLE = 397, STATE = 5056, NORMAL = 5024, HAS_NORMAL = 5040 };

typedef struct {
  uint32_t words[WORDS];
  uint64_t seed;
  int left;
  uint32_t next;
  bool seeded, has_normal;
  double normal;
} twister; /* normal: the second of two that are made at once */

static twister generator;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void seed(uint64_t value) {
  twister *t = &generator;
  t->words[0] = (uint32_t)value;
  for (uint32_t i = 1; i < WORDS; i++) t->words[i] = 1812433253u * (t->words[i - 1] ^ t->words[i - 1] >> 30) + i;
  t->seed = value;
  t->left = 1;
  t->next = 0;
  t->seeded = true;
  t->has_normal = false;
}

static uint32_t twisted(uint32_t u, uint32_t v) { return ((u & 0x80000000u) | (v & 0x7FFFFFFFu)) >> 1 ^ (v & 1 ? 0x9908B0DFu : 0); }

static void next_state(void) {
  uint32_t *p = generator.words;
  generator.left = WORDS;
  generator.next = 0;
  for (int i = 0; i < WORDS; i++) p[i] = p[(i + MIDDLE) % WORDS] ^ twisted(p[i], p[(i + 1) % WORDS]);
}

static uint32_t draw(void) {
  if (--generator.left == 0) next_state();
  uint32_t y = generator.words[generator.next++];
  y ^= y >> 11;
  y ^= y << 7 & 0x9D2C5680u;
  y ^= y << 15 & 0xEFC60000u;
  return y ^ y >> 18;
}

static double uniform(void) { /* with 53 bits */
  uint64_t high = draw(), low = draw();
  return (double)((high << 32 | low) & (((uint64_t)1 << 53) - 1)) * 0x1p-53;
}

static void enter(void) {
  pthread_mutex_lock(&lock);
  if (!generator.seeded) seed(67280421310721u); /* torch's default seed */
}

CORE void core_seed(uint64_t value) {
  enter();
  seed(value);
  pthread_mutex_unlock(&lock);
}

/* Writes at::CPUGeneratorImplState: seed, left, seeded, next, the words with 64 bits each, and the stored normal number. */
CORE void core_random_state(uint8_t out[STATE]) {
  int32_t seeded = 1;
  uint64_t next;
  enter();
  memset(out, 0, STATE);
  memcpy(out, &generator.seed, 8);
  memcpy(out + 8, &generator.left, 4);
  memcpy(out + 12, &seeded, 4);
  next = generator.next;
  memcpy(out + 16, &next, 8);
  for (int i = 0; i < WORDS; i++) memcpy(out + 24 + 8 * i, &generator.words[i], 4);
  if (generator.has_normal) {
    memcpy(out + NORMAL, &generator.normal, 8);
    memcpy(out + HAS_NORMAL, &seeded, 4);
  }
  pthread_mutex_unlock(&lock);
}

/* The caller must have checked the state. */
CORE void core_set_random_state(const uint8_t state[STATE]) {
  uint64_t next;
  enter();
  memcpy(&generator.seed, state, 8);
  memcpy(&generator.left, state + 8, 4);
  memcpy(&next, state + 16, 8);
  generator.next = (uint32_t)next;
  for (int i = 0; i < WORDS; i++) memcpy(&generator.words[i], state + 24 + 8 * i, 4);
  int32_t has;
  memcpy(&has, state + HAS_NORMAL, 4);
  generator.has_normal = has == 1;
  memcpy(&generator.normal, state + NORMAL, 8);
  pthread_mutex_unlock(&lock);
}

/* Draws the mask in memory order, two words for each element, like bernoulli_. */
CORE int32_t aoti_torch_cpu_native_dropout(tensor *x, double p, int32_t *train, tensor **out, tensor **mask) {
  bool on = !train || *train;
  double kept = 1 - p;
  if (x->dtype != F32 && x->dtype != F64) return core_fail("dropout of %s", name_of(x->dtype));
  tensor *like = tensor_like(x, x->sizes, x->dtype), *m = tensor_like(x, x->sizes, BOOL);
  if (!like || !m) return tensor_drop(like), tensor_drop(m), 1;
  tensor_copy(x, like);
  int64_t count = tensor_count(x);
  uint8_t *bits = at(m);
  if (!on) memset(bits, 1, (size_t)count);
  else {
    enter();
    for (int64_t i = 0; i < count; i++) bits[i] = uniform() < kept;
    pthread_mutex_unlock(&lock);
    double scale = kept == 0 ? 0 : 1 / kept;
    float *f = at(like);
    double *d = at(like);
    if (x->dtype == F32)
      for (int64_t i = 0; i < count; i++) f[i] = f[i] * (float)bits[i] * (float)scale;
    else
      for (int64_t i = 0; i < count; i++) d[i] = d[i] * bits[i] * scale;
  }
  *out = like;
  *mask = m;
  return 0;
}

/* --- normal numbers: Box-Muller, sixteen at once if there are as many, like eager; the last bits depend on the math library -------------------- */

static float uniform_float(void) { return (float)(draw() & 0xFFFFFF) * 0x1p-24f; }

#define SIXTEEN(type, suffix, log, sqrt, cos, sin)                                                                                                   \
  static void sixteen_##suffix(type *data) {                                                                                                         \
    for (int i = 0; i < 8; i++) {                                                                                                                    \
      type radius = sqrt(-2 * log(1 - data[i])), angle = 2 * (type)M_PI * data[i + 8];                                                               \
      data[i] = radius * cos(angle);                                                                                                                 \
      data[i + 8] = radius * sin(angle);                                                                                                             \
    }                                                                                                                                                \
  }
SIXTEEN(float, f, logf, sqrtf, cosf, sinf)
SIXTEEN(double, d, log, sqrt, cos, sin)

#define FILL(type, suffix, one)                                                                                                                      \
  static void fill_##suffix(type *data, int64_t count) {                                                                                             \
    for (int64_t i = 0; i < count; i++) data[i] = one();                                                                                             \
    for (int64_t i = 0; i + 16 <= count; i += 16) sixteen_##suffix(data + i);                                                                        \
    if (count % 16 == 0) return;                                                                                                                     \
    for (int64_t i = count - 16; i < count; i++) data[i] = one();                                                                                    \
    sixteen_##suffix(data + count - 16);                                                                                                             \
  }
FILL(float, f, uniform_float)
FILL(double, d, uniform)

static double normal(void) {
  if (generator.has_normal) {
    generator.has_normal = false;
    return generator.normal;
  }
  double u = uniform(), v = uniform(), radius = sqrt(-2 * log1p(-v)), angle = 2 * M_PI * u;
  generator.normal = radius * sin(angle);
  generator.has_normal = true;
  return radius * cos(angle);
}

static int fill_normal(tensor *t) {
  int64_t count = tensor_count(t);
  if (t->dtype != F32 && t->dtype != F64) return core_fail("normal numbers of %s", name_of(t->dtype));
  enter();
  if (count >= 16 && t->dtype == F32) fill_f(at(t), count);
  else if (count >= 16) fill_d(at(t), count);
  else
    for (int64_t i = 0; i < count; i++) {
      if (t->dtype == F32) ((float *)at(t))[i] = (float)normal();
      else ((double *)at(t))[i] = normal();
    }
  pthread_mutex_unlock(&lock);
  return 0;
}

static int made_normal(tensor *t, tensor **out) {
  if (!t || fill_normal(t)) return tensor_drop(t), 1;
  *out = t;
  return 0;
}

CORE int32_t aoti_torch_cpu_randn_like(tensor *like, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index, int32_t *pinned,
                                       int32_t *format, tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  if (format && *format) return core_fail("randn_like of a memory format");
  return made_normal(tensor_like(like, like->sizes, dtype ? *dtype : like->dtype), out);
}

CORE int32_t aoti_torch_cpu_randn(const int64_t *sizes, int64_t rank, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index,
                                  int32_t *pinned, tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  return made_normal(tensor_new(rank, sizes, NULL, dtype ? *dtype : F32), out);
}

/* --- uniform numbers and integers ------------------------------------------------------------------------------------------------------------- */

static int made_uniform(tensor *t, tensor **out) {
  if (!t) return 1;
  if (t->dtype != F32 && t->dtype != F64) return core_fail("uniform numbers of %s", name_of(t->dtype)), tensor_drop(t), 1;
  int64_t count = tensor_count(t);
  enter();
  for (int64_t i = 0; i < count; i++) {
    if (t->dtype == F32) ((float *)at(t))[i] = uniform_float();
    else ((double *)at(t))[i] = uniform();
  }
  pthread_mutex_unlock(&lock);
  *out = t;
  return 0;
}

CORE int32_t aoti_torch_cpu_rand(const int64_t *sizes, int64_t rank, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index, int32_t *pinned,
                                 tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  return made_uniform(tensor_new(rank, sizes, NULL, dtype ? *dtype : F32), out);
}

CORE int32_t aoti_torch_cpu_rand_like(tensor *like, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index, int32_t *pinned, int32_t *format,
                                      tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  if (format && *format) return core_fail("rand_like of a memory format");
  return made_uniform(tensor_like(like, like->sizes, dtype ? *dtype : like->dtype), out);
}

/* Draws from [low, high) like at::uniform_int_from_to_distribution. */
static int fill_integers(tensor *t, int64_t low, int64_t high) {
  uint64_t range = (uint64_t)high - (uint64_t)low;
  if (low >= high) return core_fail("random_ expects 'from' to be less than 'to', but got from=%lld >= to=%lld", (long long)low, (long long)high);
  if (t->dtype != I64 && t->dtype != I32 && t->dtype != F32 && t->dtype != F64) return core_fail("random integers of %s", name_of(t->dtype));
  int64_t count = tensor_count(t);
  enter();
  for (int64_t i = 0; i < count; i++) {
    uint64_t drawn = draw();
    if (range >= (uint64_t)1 << 28) drawn = drawn << 32 | draw();
    int64_t value = (int64_t)(drawn % range + (uint64_t)low);
    if (t->dtype == I64) ((int64_t *)at(t))[i] = value;
    else if (t->dtype == I32) ((int32_t *)at(t))[i] = (int32_t)value;
    else if (t->dtype == F32) ((float *)at(t))[i] = (float)value;
    else ((double *)at(t))[i] = (double)value;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static int made_integers(tensor *t, int64_t low, int64_t high, tensor **out) {
  if (!t || fill_integers(t, low, high)) return tensor_drop(t), 1;
  *out = t;
  return 0;
}

CORE int32_t aoti_torch_cpu_randint_low(int64_t low, int64_t high, const int64_t *sizes, int64_t rank, int32_t *dtype, int32_t *layout,
                                        int32_t *device, int32_t index, int32_t *pinned, tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  return made_integers(tensor_new(rank, sizes, NULL, dtype ? *dtype : F32), low, high, out); /* like libtorch's function */
}

CORE int32_t aoti_torch_cpu_randint(int64_t high, const int64_t *sizes, int64_t rank, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index,
                                    int32_t *pinned, tensor **out) {
  return aoti_torch_cpu_randint_low(0, high, sizes, rank, dtype, layout, device, index, pinned, out);
}

CORE int32_t aoti_torch_cpu_randint_low_out(tensor *out, int64_t low, int64_t high, const int64_t *sizes, int64_t rank) {
  (void)sizes, (void)rank;
  if (!tensor_is_dense(out)) return core_fail("random integers into a tensor that is not row-major");
  return fill_integers(out, low, high);
}

/* Swaps each position, in order, with itself or a later one. */
CORE int32_t aoti_torch_cpu_randperm(int64_t n, int32_t *dtype, int32_t *layout, int32_t *device, int32_t index, int32_t *pinned, tensor **out) {
  (void)layout, (void)device, (void)index, (void)pinned;
  if ((dtype && *dtype != I64) || n < 0) return core_fail("randperm of %lld, of %s", (long long)n, dtype ? name_of(*dtype) : "int64");
  tensor *t = tensor_new(1, &n, NULL, I64);
  if (!t) return 1;
  int64_t *places = at(t);
  for (int64_t i = 0; i < n; i++) places[i] = i;
  enter();
  for (int64_t i = 0; i < n - 1; i++) {
    int64_t other = i + draw() % (n - i), held = places[i];
    places[i] = places[other];
    places[other] = held;
  }
  pthread_mutex_unlock(&lock);
  *out = t;
  return 0;
}
