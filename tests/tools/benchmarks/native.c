/* Times a function of a package from C: native PACKAGE ENTRY BACKEND INPUTS SECONDS [STEPS]. INPUTS: what native.py writes. Prints JSON. */
#define _GNU_SOURCE
#include <aot_backward.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 64, CALLS = 1 << 20 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(aotb_status status) {
  if (!status) return;
  fprintf(stderr, "%s\n", aotb_error());
  exit(1);
}

static int rising(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

static long peak(void) {
  char line[256];
  long kilobytes = 0;
  FILE *file = fopen("/proc/self/status", "r");
  while (file && fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %ld", &kilobytes);
  if (file) fclose(file);
  return kilobytes;
}

/* For each tensor: code, bits, dimensions, sizes (int64 each), its bytes. */
static uint32_t read_inputs(const char *path, DLTensor *out) {
  FILE *file = fopen(path, "rb");
  int64_t head[3];
  uint32_t count = 0;
  if (!file) exit(2);
  for (; count < MOST && fread(head, sizeof *head, 3, file) == 3; count++) {
    int64_t *shape = calloc((size_t)head[2] + 1, sizeof *shape);
    size_t bytes = (size_t)head[1] / 8;
    if (!shape || fread(shape, sizeof *shape, (size_t)head[2], file) != (size_t)head[2]) exit(2);
    for (int64_t d = 0; d < head[2]; d++) bytes *= (size_t)shape[d];
    void *data = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!data || fread(data, 1, bytes, file) != bytes) exit(2);
    out[count] = (DLTensor){.data = data, .device = {1, 0}, .ndim = (int32_t)head[2], .dtype = {(uint8_t)head[0], (uint8_t)head[1], 1}, .shape = shape};
  }
  fclose(file);
  return count;
}

int main(int argc, char **argv) {
  static double times[CALLS];
  DLTensor inputs[MOST];
  aotb_package *package;
  aotb_function *function;
  double began = now(), end;
  long calls = 0;
  if (argc < 6) return 2;
  uint32_t count = read_inputs(argv[4], inputs);
  check(aotb_open(argv[1], &(aotb_options){.backend = argv[3], .unchecked = 1}, &package));
  check(aotb_get(package, argv[2], &function));
  uint32_t results = aotb_count(function, 0, AOTB_OUTPUTS) + (strcmp(aotb_kind(function), "grad") ? 0 : aotb_count(function, 0, AOTB_GRADIENTS));
  DLTensor *outputs = calloc(results + 1, sizeof *outputs);
  if (!outputs) return 2;
  check(aotb_run(function, inputs, count, outputs, results));
  double first = now();
  for (end = first + atof(argv[5]); calls < CALLS && now() < end; calls++) {
    double before = now();
    check(aotb_run(function, inputs, count, outputs, results));
    times[calls] = now() - before;
  }
  qsort(times, (size_t)calls, sizeof *times, rising);
  printf("{\"first_s\": %.9f, \"call_s\": %.9f, \"calls\": %ld, \"peak\": %ld}\n", first - began, calls ? times[calls / 2] : 0, calls, peak() * 1024);
  aotb_free(function);
  aotb_close(package);
  return 0;
}
