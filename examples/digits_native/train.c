/* On-device training in C: handwritten digits with the step of examples/digits_step, stopped half-way and resumed from a file.
 *
 *     python examples/digits_step/export.py digits_step.pt2
 *     python examples/digits_native/data.py digits.bin
 *     gcc -O2 examples/digits_native/train.c -o train -I runtime/native/include -L build/native -laot_backward -lm -Wl,-rpath,build/native
 *     ./train digits_step.pt2 digits.bin
 *
 * Convolution, BatchNorm, dropout, clipping and AdamW are compiled. This program sets the learning rate and the order of the images. */
#include <aot_backward.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IMAGES = 1797, TRAINING = 1347, PIXELS = 64, BATCH = 64, EPOCHS = 15, CLASSES = 10 };
static unsigned char data[IMAGES][PIXELS + 1];

static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static void check(aotb_status status) {
  if (status) fail(aotb_error());
}

/* A batch of images: pixels in [0, 1], and digits. */
typedef struct {
  float pixels[IMAGES][PIXELS];
  int64_t digits[IMAGES], shape[4], count[1];
  DLTensor tensors[2];
} batch;

static void fill(batch *b, const int *rows, int count) {
  for (int i = 0; i < count; i++) {
    for (int k = 0; k < PIXELS; k++) b->pixels[i][k] = (float)data[rows[i]][k] / 16;
    b->digits[i] = data[rows[i]][PIXELS];
  }
  memcpy(b->shape, (int64_t[]){count, 1, 8, 8}, sizeof b->shape);
  b->count[0] = count;
  b->tensors[0] = (DLTensor){.data = b->pixels, .device = {1, 0}, .ndim = 4, .dtype = {2, 32, 1}, .shape = b->shape};
  b->tensors[1] = (DLTensor){.data = b->digits, .device = {1, 0}, .ndim = 1, .dtype = {0, 64, 1}, .shape = b->count};
}

/* Train up to epoch `until`, from the start or from `file`. Save everything that the next epoch needs to `file`. */
static aotb_function *train(aotb_package *package, const char *file, int until, int resume) {
  static batch b;
  static int order[TRAINING];
  aotb_function *step;
  aotb_progress progress;
  int epoch = 0;
  check(aotb_get(package, "step", &step));
  check(aotb_seed(package, 1)); /* for dropout; resuming restores the saved random state */
  if (resume) {
    const char *extra;
    check(aotb_resume(step, file, &extra));
    sscanf(extra, "{\"epoch\": %d}", &epoch);
  }
  for (; epoch < until; epoch++) {
    double sum = 0;
    int batches = 0;
    srand((unsigned)epoch);
    for (int i = 0; i < TRAINING; i++) order[i] = i;
    for (int i = TRAINING - 1; i > 0; i--) { /* Fisher and Yates */
      int k = rand() % (i + 1), one = order[i];
      order[i] = order[k];
      order[k] = one;
    }
    check(aotb_number(step, 0, "lr", -1, 0.01 * (1 + cos(3.14159265358979 * epoch / EPOCHS)) / 2));
    for (int at = 0; at < TRAINING; at += BATCH, batches++) {
      float loss;
      DLTensor result = {.data = &loss, .device = {1, 0}, .dtype = {2, 32, 1}};
      fill(&b, order + at, TRAINING - at < BATCH ? TRAINING - at : BATCH);
      check(aotb_run(step, b.tensors, 2, &result, 1));
      sum += loss;
    }
    printf("  epoch %d: loss %.4f\n", epoch + 1, sum / batches);
  }
  char extra[32];
  snprintf(extra, sizeof extra, "{\"epoch\": %d}", until);
  check(aotb_save(step, file, extra));
  check(aotb_progress_of(step, &progress));
  printf("%lld steps, last gradient norm %.3f\n", (long long)progress.updates, progress.grad_norm);
  return step;
}

static size_t bytes_of(const DLTensor *t) {
  size_t bytes = t->dtype.bits / 8;
  for (int32_t d = 0; d < t->ndim; d++) bytes *= (size_t)t->shape[d];
  return bytes;
}

/* Return the accuracy on the test images of the entry "net" with the weights of the step. */
static double accuracy(aotb_package *package, aotb_function *step) {
  static batch b;
  static float logits[IMAGES - TRAINING][CLASSES];
  int rows[IMAGES - TRAINING], right = 0, count = IMAGES - TRAINING;
  aotb_function *net;
  check(aotb_get(package, "net", &net));
  check(aotb_train(net, 0));
  for (uint32_t i = 0; i < aotb_count(net, 0, AOTB_STATES); i++) {
    aotb_description d;
    DLTensor from, to;
    check(aotb_describe(net, 0, AOTB_STATES, i, &d));
    check(aotb_state(step, d.name, &from));
    check(aotb_state(net, d.name, &to));
    memcpy(to.data, from.data, bytes_of(&from));
  }
  for (int i = 0; i < count; i++) rows[i] = TRAINING + i;
  fill(&b, rows, count);
  DLTensor result = {.data = logits, .device = {1, 0}, .ndim = 2, .dtype = {2, 32, 1}, .shape = (int64_t[]){count, CLASSES}};
  check(aotb_run(net, b.tensors, 1, &result, 1));
  for (int i = 0; i < count; i++) {
    int best = 0;
    for (int k = 1; k < CLASSES; k++)
      if (logits[i][k] > logits[i][best]) best = k;
    right += best == b.digits[i];
  }
  aotb_free(net);
  return (double)right / count;
}

int main(int argc, char **argv) {
  const char *path = argc > 1 ? argv[1] : "digits_step.pt2";
  FILE *file = fopen(argc > 2 ? argv[2] : "digits.bin", "rb");
  if (!file || fread(data, sizeof *data, IMAGES, file) != IMAGES) fail("digits.bin cannot be read: examples/digits_native/data.py writes it");
  fclose(file);
  aotb_package *package;
  check(aotb_open(path, NULL, &package));
  aotb_function *whole = train(package, "whole.state", EPOCHS, 0);
  double right = accuracy(package, whole);
  printf("test accuracy %.1f %%\n", 100 * right);

  printf("again, stopped after 6 epochs, and resumed from its file:\n");
  aotb_free(train(package, "parts.state", 6, 0));
  aotb_function *resumed = train(package, "parts.state", EPOCHS, 1);
  int same = 1;
  for (uint32_t i = 0; i < aotb_count(whole, 0, AOTB_STATES); i++) {
    aotb_description d;
    DLTensor one, other;
    check(aotb_describe(whole, 0, AOTB_STATES, i, &d));
    check(aotb_state(whole, d.name, &one));
    check(aotb_state(resumed, d.name, &other));
    same = same && !memcmp(one.data, other.data, bytes_of(&one));
  }
  printf("the same weights and state, bit for bit: %s\n", same ? "yes" : "no");
  aotb_free(whole);
  aotb_free(resumed);
  aotb_close(package);
  return same && right > 0.97 ? 0 : 1;
}
