/* The functions of the header that run an entry. */
#include <inttypes.h>

#include "function.h"

aotb_status aotb_run(aotb_function *f, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = function_enter(f);
  if (status) return status;
  variant *v = function_match(f, inputs, input_count, false);
  if (!v) return function_leave(f, AOTB_INPUT);
  if (f->entry->kind == ENTRY_STEP) return function_leave(f, training_run(f, v, outputs, output_count));
  runnable *r = f->entry->kind == ENTRY_GRAD ? &v->gradient : v->inference.plan ? &v->inference : &v->forward;
  return function_leave(f, function_call(f, v, r, outputs, output_count));
}

aotb_status aotb_forward(aotb_function *f, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = function_enter(f);
  if (status) return status;
  if (f->entry->kind != ENTRY_MODULE)
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s is of kind %s; only a module has a forward and a backward: call aotb_run",
                                       f->entry->name, kind_name(f->entry->kind)));
  f->forwarded = NULL;
  variant *v = function_match(f, inputs, input_count, true);
  if (!v) return function_leave(f, AOTB_INPUT);
  if (!v->forward.plan || !v->backward.plan)
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s has no gradients: call aotb_run", f->entry->name));
  status = function_call(f, v, &v->forward, outputs, output_count);
  if (!status) {
    v->saved = true;
    f->forwarded = v;
  }
  return function_leave(f, status);
}

aotb_status aotb_backward(aotb_function *f, const DLTensor *incoming, uint32_t incoming_count, DLTensor *gradients, uint32_t gradient_count) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = function_enter(f);
  if (status) return status;
  variant *v = f->forwarded;
  if (!v || !v->saved)
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s: expected a forward call before the backward: call aotb_forward first", f->entry->name));
  if (incoming_count && !incoming)
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s: %" PRIu32 " incoming gradients, and no array of them", f->entry->name, incoming_count));
  if (!function_fit_incoming(f, v, incoming, incoming_count))
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s: %s", f->entry->name, f->words));
  status = function_call(f, v, &v->backward, gradients, gradient_count);
  if (v->backward.plan->consumes_count && status != AOTB_INPUT) v->saved = false; /* after AOTB_INPUT nothing has run */
  return function_leave(f, status);
}
