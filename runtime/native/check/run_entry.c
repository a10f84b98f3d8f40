/* Runs an entry of a package on its stored example, without PyTorch, on the machine that the code is for or in an emulator of it. The exporter compares
 * the results with eager's (aot_backward/checks/emulated.py, which writes the request and reads the results).
 *
 * run_entry PACKAGE ENTRY VARIANT MODE SEED STEPS REQUEST RESULTS
 * MODE: train, eval, or "-" for the exported one. STEPS: calls of a step; 0: a module's forward alone; else forward and backward.
 * REQUEST: the inputs, the incoming gradients, and names of the state: a count, then each. RESULTS: for a step its state before, the losses and its
 * state after; for others the outputs, the gradients and the state after. Numbers are int64; a tensor is its dtype's code and bits, its number of
 * dimensions (-1: no tensor), the sizes, and its elements in row-major order; a name is its length and its characters. */
#define _GNU_SOURCE
#include "aot_backward.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 64 };

static FILE *request, *results;

_Noreturn static void stop(const char *why) {
  fprintf(stderr, "%s\n", why);
  exit(1);
}

static void done(aotb_status status) {
  if (status) stop(aotb_error());
}

static void *take(size_t count, size_t size) {
  void *out = calloc(count + 1, size);
  if (!out) stop("no memory");
  return out;
}

static void get(void *to, size_t size) {
  if (size && fread(to, size, 1, request) != 1) stop("the request ends early");
}

static int64_t number(void) {
  int64_t out;
  get(&out, sizeof out);
  return out;
}

static void put(const void *from, size_t size) {
  if (size && fwrite(from, size, 1, results) != 1) stop("the results cannot be written");
}

static void put_number(int64_t value) { put(&value, sizeof value); }

static size_t bytes_of(const DLTensor *t) {
  size_t out = (size_t)t->dtype.bits / 8;
  for (int i = 0; i < t->ndim; i++) out *= (size_t)t->shape[i];
  return out;
}

static DLTensor *tensors(uint32_t *count) {
  *count = (uint32_t)number();
  DLTensor *out = take(*count, sizeof *out);
  for (uint32_t i = 0; i < *count; i++) {
    DLTensor *t = &out[i];
    t->device.device_type = 1; /* the CPU */
    t->dtype.code = (uint8_t)number();
    t->dtype.bits = (uint8_t)number();
    t->dtype.lanes = 1;
    int64_t rank = number();
    if (rank < 0) continue; /* no gradient: data stays NULL */
    t->ndim = (int32_t)rank;
    t->shape = take((size_t)rank, sizeof *t->shape);
    for (int k = 0; k < t->ndim; k++) t->shape[k] = number();
    t->data = take(bytes_of(t), 1);
    get(t->data, bytes_of(t));
  }
  return out;
}

static void put_tensor(const DLTensor *t) {
  put_number(t->dtype.code);
  put_number(t->dtype.bits);
  put_number(t->ndim);
  if (t->ndim < 0) return;
  if (t->ndim > MOST_DIMENSIONS) stop("a result has too many dimensions");
  for (int i = 0; i < t->ndim; i++) put_number(t->shape[i]);
  size_t size = (size_t)t->dtype.bits / 8, count = size ? bytes_of(t) / size : 0;
  int64_t at[MOST_DIMENSIONS] = {0}, step[MOST_DIMENSIONS], dense = 1;
  for (int i = t->ndim; i--; dense *= t->shape[i]) step[i] = t->strides ? t->strides[i] : dense;
  for (size_t done_count = 0; done_count < count; done_count++) {
    int64_t offset = 0;
    for (int i = 0; i < t->ndim; i++) offset += at[i] * step[i];
    put((const char *)t->data + t->byte_offset + offset * (int64_t)size, size);
    for (int i = t->ndim; i-- && ++at[i] == t->shape[i];) at[i] = 0;
  }
}

static void put_tensors(const DLTensor *of, uint32_t count) {
  put_number(count);
  for (uint32_t i = 0; i < count; i++) put_tensor(&of[i]);
}

static void put_states(aotb_function *f, char **names, uint32_t count) {
  put_number(count);
  for (uint32_t i = 0; i < count; i++) {
    DLTensor t;
    done(aotb_state(f, names[i], &t));
    put_tensor(&t);
  }
}

int main(int argc, char **argv) {
  if (argc != 9) stop("usage: run_entry PACKAGE ENTRY VARIANT MODE SEED STEPS REQUEST RESULTS");
  request = fopen(argv[7], "rb");
  results = fopen(argv[8], "wb");
  if (!request || !results) stop("the request or the results cannot be opened");
  uint32_t input_count, incoming_count, variant = (uint32_t)atoi(argv[3]);
  DLTensor *inputs = tensors(&input_count), *incoming = tensors(&incoming_count);
  uint32_t state_count = (uint32_t)number();
  char **states = take(state_count, sizeof *states);
  for (uint32_t i = 0; i < state_count; i++) {
    size_t length = (size_t)number();
    states[i] = take(length, 1);
    get(states[i], length);
  }
  aotb_package *package;
  aotb_function *f;
  done(aotb_open(argv[1], &(aotb_options){.backend = "standalone", .unchecked = 1}, &package));
  done(aotb_seed(package, strtoull(argv[5], NULL, 10)));
  done(aotb_get(package, argv[2], &f));
  if (strcmp(argv[4], "-")) done(aotb_train(f, !strcmp(argv[4], "train")));
  done(aotb_use_variant(f, variant));
  int steps = atoi(argv[6]);
  bool step = !strcmp(aotb_kind(f), "step"), module = !strcmp(aotb_kind(f), "module");
  uint32_t output_count = aotb_count(f, variant, AOTB_OUTPUTS), gradient_count = aotb_count(f, variant, AOTB_GRADIENTS);
  DLTensor *outputs = take(output_count + gradient_count, sizeof *outputs);
  if (step) {
    put_states(f, states, state_count);
    put_number(steps);
    for (int i = 0; i < steps; i++) {
      done(aotb_run(f, inputs, input_count, outputs, output_count));
      put_tensor(outputs);
    }
  } else if (module && steps) {
    DLTensor *gradients = take(gradient_count, sizeof *gradients);
    done(aotb_forward(f, inputs, input_count, outputs, output_count));
    put_tensors(outputs, output_count);
    done(aotb_backward(f, incoming, incoming_count, gradients, gradient_count));
    put_tensors(gradients, gradient_count);
  } else {
    uint32_t more = module ? 0 : gradient_count;
    done(aotb_run(f, inputs, input_count, outputs, output_count + more));
    put_tensors(outputs, output_count);
    put_tensors(outputs + output_count, more);
  }
  put_states(f, states, state_count);
  return fclose(results) ? 1 : 0;
}
