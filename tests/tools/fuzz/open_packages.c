/* Opens packages that may be spoilt, describes and calls all that is in them; built with the library's own sources under sanitizers (native.py).
 *
 * stdin: lines of PACKAGE, STATE and KEY with tabs between them, "-" for none. stdout: for each a line with the status that ended it, and "ran" where
 * something was called. Exits with 3 where a message cannot be printed. */
#define _GNU_SOURCE
#include <aot_backward.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 16, ROOM = 1 << 16, DIMENSIONS = 8 };
typedef struct { _Alignas(64) char bytes[ROOM]; } block;
static block memory[MOST];
static int64_t shapes[MOST][DIMENSIONS];

/* What a terminal would not take as it stands. */
static void check_words(const char *words) {
  if (!*words) exit(3);
  for (const unsigned char *c = (const unsigned char *)words; *c; c++) {
    if ((*c >= 32 && *c != 127) || *c == '\n') continue;
    fprintf(stderr, "control character %d in: %s\n", *c, words);
    exit(3);
  }
}

static aotb_status heard(aotb_status status) {
  if (status) check_words(aotb_error());
  return status;
}

/* Tensors as they are described, dynamic sizes as 4. How many; -1: too many or too large. */
static int tensors(aotb_function *f, uint32_t variant, aotb_part part, DLTensor *out) {
  uint32_t count = aotb_count(f, variant, part);
  if (count > MOST) return -1;
  for (uint32_t i = 0; i < count; i++) {
    aotb_description d;
    if (heard(aotb_describe(f, variant, part, i, &d)) || d.ndim > DIMENSIONS) return -1;
    int64_t elements = (d.dtype.bits + 7) / 8;
    for (int32_t k = 0; k < d.ndim; k++) {
      char *end;
      long long size = strtoll(d.shape[k], &end, 10);
      shapes[i][k] = *end || end == d.shape[k] ? 4 : size;
      if (shapes[i][k] < 0 || __builtin_mul_overflow(elements, shapes[i][k], &elements) || elements > ROOM) return -1;
    }
    float *values = (float *)memory[i].bytes;
    memset(memory[i].bytes, 0, ROOM);
    if (d.dtype.code == 2 && d.dtype.bits == 32) for (int n = 0; n < ROOM / 4; n++) values[n] = 0.25f * (float)(n % 7);
    out[i] = (DLTensor){.data = memory[i].bytes, .device = {1, 0}, .ndim = d.ndim, .dtype = d.dtype, .shape = shapes[i]};
  }
  return (int)count;
}

static void describe(aotb_function *f) {
  for (uint32_t v = 0; v < aotb_variants(f) && v < 8; v++) for (int part = AOTB_INPUTS; part <= AOTB_NUMBERS; part++) {
    uint32_t count = aotb_count(f, v, part);
    for (uint32_t i = 0; i <= count && i < 200; i++) {
      aotb_description d;
      DLTensor view;
      if (heard(aotb_describe(f, v, part, i, &d))) continue;
      if (strlen(d.name) > 1 << 20) exit(3);
      if (part == AOTB_STATES && !heard(aotb_state(f, d.name, &view)) && view.data) memory[0].bytes[0] ^= *(char *)view.data;
      if (part == AOTB_NUMBERS) {
        heard(aotb_number(f, d.group, d.name, d.position, d.value));
        heard(aotb_number(f, d.group, d.name, d.position, -1e300));
      }
    }
  }
}

static int call(aotb_function *f, const char *state) {
  DLTensor inputs[MOST], incoming[MOST], results[64];
  int ran = 0, count = tensors(f, 0, AOTB_INPUTS, inputs), step = !strcmp(aotb_kind(f), "step");
  if (count < 0) return 0;
  uint32_t number = (uint32_t)count, gives = aotb_count(f, 0, AOTB_OUTPUTS), gradients = aotb_count(f, 0, AOTB_GRADIENTS);
  if (gives + gradients > 64) return 0;
  for (int training = 0; training < 2; training++) {
    memset(results, 0, sizeof results);
    heard(aotb_train(f, training));
    ran |= !heard(aotb_run(f, inputs, number, results, gives));
    heard(aotb_run(f, inputs, number ? number - 1 : 1, results, 0));
  }
  if (step) {
    char path[64];
    const char *extra;
    aotb_progress progress;
    snprintf(path, sizeof path, "/dev/shm/aotb-fuzz-%d.state", (int)getpid());
    ran |= !heard(aotb_accumulate(f, inputs, number, NULL, 0));
    heard(aotb_update(f));
    heard(aotb_zero_grad(f));
    heard(aotb_progress_of(f, &progress));
    if (!heard(aotb_save(f, path, "{\"epoch\": 1}"))) heard(aotb_resume(f, path, &extra));
    remove(path);
    if (*state != '-' && !heard(aotb_resume(f, state, &extra))) ran |= !heard(aotb_run(f, inputs, number, NULL, 0));
  } else if (!strcmp(aotb_kind(f), "module")) {
    memset(results, 0, sizeof results);
    if (heard(aotb_forward(f, inputs, number, results, gives))) return ran;
    block *kept = malloc(sizeof memory); /* the inputs stay until the backward */
    if (!kept) return ran;
    memcpy(kept, memory, sizeof memory);
    count = tensors(f, aotb_served(f), AOTB_INCOMING, incoming);
    if (count >= 0) {
      for (int i = 0; i < count; i++) incoming[i].data = kept[i].bytes;
      memset(results, 0, sizeof results);
      uint32_t wanted = aotb_count(f, aotb_served(f), AOTB_GRADIENTS);
      ran |= !heard(aotb_backward(f, incoming, (uint32_t)count, results, wanted < 64 ? wanted : 64));
    }
    free(kept);
  } else ran |= !heard(aotb_run(f, inputs, number, results, gives + gradients));
  return ran;
}

int main(void) {
  char *line = NULL;
  size_t room = 0;
  while (getline(&line, &room, stdin) > 0) {
    char *path = strtok(line, "\t\n"), *state = strtok(NULL, "\t\n"), *key = strtok(NULL, "\t\n");
    if (!path || !state || !key) return 2;
    aotb_options options = {.public_key = *key == '-' ? NULL : key, .unchecked = 1};
    aotb_package *package;
    int ran = 0;
    aotb_status status = heard(aotb_open(path, &options, &package));
    if (!status) {
      for (uint32_t i = 0; i < aotb_entries(package); i++) {
        aotb_function *f;
        aotb_status got = heard(aotb_get(package, aotb_entry(package, i), &f));
        if (got) {
          status = got;
          continue;
        }
        describe(f);
        ran |= call(f, state);
        aotb_free(f);
      }
      aotb_close(package);
    }
    printf("%d%s\n", status, ran ? " ran" : "");
    fflush(stdout);
  }
  free(line);
  return 0;
}
