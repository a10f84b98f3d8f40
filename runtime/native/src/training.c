/* Steps: numbers of the parameter groups, accumulated gradients, counters, and the loss scale, like runtime/aot_backward_runtime/training/. */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "function.h"

#define SHOWN(text) shown(text, strlen(text))

static const weight *state_weight(const struct aotb_function *f, const char *name) {
  for (uint32_t i = 0; i < f->entry->state_count; i++)
    if (!strcmp(f->entry->state[i].name, name)) return f->weights[f->entry->state[i].weight];
  return NULL;
}

void training_follow(struct aotb_function *f) {
  const step_spec *s = f->entry->step_of;
  for (uint32_t i = 0; i < s->slot_count; i++) {
    if (s->slots[i].starts_as < 0) continue;
    const weight *w = state_weight(f, s->slots[i].state);
    weight_fill(w, f->step.numbers[2 + s->slots[i].starts_as]);
  }
}

void training_accumulated(struct aotb_function *f, int64_t calls) {
  f->step.accumulated = calls;
  f->step.numbers[0] = calls > 0;
}

void training_begin(struct aotb_function *f) {
  const step_spec *s = f->entry->step_of;
  training *t = &f->step;
  t->numbers = state_weight(f, "numbers")->data;
  t->scale_number = -1;
  t->scale = 1;
  t->growth_factor = 2;
  t->backoff_factor = 0.5;
  t->growth_interval = 2000;
  t->grad_norm = NAN;
  t->update.plan = s->update;
  for (uint32_t i = 0; i < s->number_count; i++) {
    t->numbers[2 + i] = s->numbers[i].value;
    if (s->numbers[i].group == -1 && !strcmp(s->numbers[i].key, "loss_scale")) {
      t->scale_number = (int)i;
      t->scale = s->numbers[i].value;
    }
  }
  t->options = TAKE(&f->a, s->group_count + 1u, const json *);
  for (uint32_t i = 0; i < s->group_count; i++) {
    json *options = TAKE(&f->a, 1, json);
    *options = json_read(&f->a, "a group's options", s->groups[i].options, strlen(s->groups[i].options));
    t->options[i] = options;
  }
  training_accumulated(f, 0);
  t->fresh = s->fresh; /* the weights contain the initial state */
  t->numbers[1] = s->fresh;
}

/* Adapts the loss scale like torch.amp.GradScaler. */
static void scale_after(training *t, bool finite) {
  if (t->scale_number < 0) return;
  if (!finite) {
    float less = (float)(t->scale * t->backoff_factor);
    t->scale = less > FLT_MIN ? less : FLT_MIN;
    t->tracker = 0;
  } else if (t->tracker + 1 == t->growth_interval) {
    float grown = (float)(t->scale * t->growth_factor);
    if (isfinite(grown)) t->scale = grown;
    t->tracker = 0;
  } else t->tracker++;
  t->numbers[2 + t->scale_number] = t->scale;
}

static double number_of(const library *l, tensor_handle h, const dtype *type) {
  void *data = NULL;
  float single;
  double wide;
  if (l->backend->data(h, &data) || !data) return NAN;
  if (type->dl.code == 6) return *(const uint8_t *)data;
  if (type->size == 8) return memcpy(&wide, data, 8), wide;
  if (type->size == 4) return memcpy(&single, data, 4), (double)single;
  return NAN;
}

/* Reads gradient norm and finiteness from the last outputs of the library, and counts the update as made or skipped. */
static void record_update(struct aotb_function *f, const runnable *r) {
  training *t = &f->step;
  const step_spec *s = f->entry->step_of;
  const tensor_specs *made = &r->lib->spec->outputs;
  uint32_t last = made->count - 1, norm = s->finite ? last - 1 : last;
  if (s->norm) t->grad_norm = number_of(r->lib, r->results[norm], made->at[norm].type);
  bool finite = !s->finite || number_of(r->lib, r->results[last], made->at[last].type) != 0;
  if (s->finite) scale_after(t, finite);
  if (!finite) {
    t->skipped++;
    return;
  }
  t->updates++;
  t->fresh = false;
  t->numbers[1] = 0;
}

static aotb_status consistent(const struct aotb_function *f) {
  if (!f->step.inconsistent) return AOTB_OK;
  return aotb_fail(
      AOTB_STATE, "entry %s: the state is inconsistent: a native call failed, maybe in the middle of an update: aotb_resume a saved state, and go on",
      f->entry->name);
}

/* Handles a failure of native code: updates the state and adds the consequences to the message. */
static aotb_status failed(struct aotb_function *f, aotb_status status, bool adding) {
  if (status != AOTB_RUN) return status;
  const char *left = "nothing was changed";
  if (adding) {
    training_accumulated(f, 0);
    left = "the accumulated gradients are lost, everything else is unchanged";
  } else if (!f->entry->step_of->in_place) {
    f->step.inconsistent = true;
    left = "the update may be incomplete: aotb_resume a saved state before the next step";
  }
  return aotb_fail(status, "%s; %s", aotb_error(), left);
}

static aotb_status apply(struct aotb_function *f) {
  runnable *r = &f->step.update;
  aotb_status status = function_call(f, &f->variants[0], r, NULL, 0);
  if (status) return failed(f, status, false);
  record_update(f, r);
  training_accumulated(f, 0);
  return AOTB_OK;
}

static aotb_status add(struct aotb_function *f, variant *v, DLTensor *outputs, uint32_t count) {
  if (!v->accumulate.plan)
    return aotb_fail(AOTB_INPUT, "entry %s was exported without gradient accumulation: export it with accumulate=True", f->entry->name);
  aotb_status status = function_call(f, v, &v->accumulate, outputs, count);
  if (status) return failed(f, status, true);
  training_accumulated(f, f->step.accumulated + 1);
  return AOTB_OK;
}

aotb_status training_run(struct aotb_function *f, variant *v, DLTensor *outputs, uint32_t count) {
  aotb_status status = consistent(f);
  if (status) return status;
  if (f->step.accumulated) return (status = add(f, v, outputs, count)) ? status : apply(f);
  if ((status = function_call(f, v, &v->step, outputs, count))) return failed(f, status, false);
  record_update(f, &v->step);
  return AOTB_OK;
}

static aotb_status enter(struct aotb_function *f) {
  if (f->entry->kind != ENTRY_STEP)
    return aotb_fail(AOTB_INPUT, "entry %s is of kind %s; expected a step", f->entry->name, kind_name(f->entry->kind));
  return function_enter(f);
}

aotb_status aotb_accumulate(aotb_function *f, const DLTensor *inputs, uint32_t input_count, DLTensor *outputs, uint32_t output_count) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = enter(f);
  if (status) return status;
  if ((status = consistent(f))) return function_leave(f, status);
  variant *v = function_match(f, inputs, input_count, false);
  return function_leave(f, v ? add(f, v, outputs, output_count) : AOTB_INPUT);
}

aotb_status aotb_update(aotb_function *f) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = enter(f);
  if (status) return status;
  if ((status = consistent(f))) return function_leave(f, status);
  if (!f->step.accumulated)
    return function_leave(
        f, aotb_fail(AOTB_INPUT,
                     "entry %s: no gradients have been accumulated: call aotb_accumulate first, or aotb_run for gradients and update in one call",
                     f->entry->name));
  return function_leave(f, apply(f));
}

aotb_status aotb_zero_grad(aotb_function *f) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = enter(f);
  if (status) return status;
  training_accumulated(f, 0);
  return function_leave(f, AOTB_OK);
}

/* --- numbers ---------------------------------------------------------------------------------------------------------------------------------- */

static bool inside(const interval *t, double value) {
  bool above = !t->has_low || value > t->low || (value == t->low && !t->low_open);
  return above && (!t->has_high || value < t->high || (value == t->high && !t->high_open));
}

const char *training_number_problem(struct aotb_function *f, uint32_t number, double value) {
  const step_spec *s = f->entry->step_of;
  const number_spec *n = &s->numbers[number];
  bool holds = !n->allowed_count;
  for (uint32_t k = 0; k < n->allowed_count; k++) holds = holds || inside(&n->allowed[k], value);
  if ((int)number == f->step.scale_number && (!((float)value > 0) || !isfinite((float)value))) holds = false;
  if (holds) return NULL;
  snprintf(f->words, sizeof f->words,
           "%s of group %" PRId64 " = %g: %s computes differently for this value, and was not compiled for it: export a step for this value", n->key,
           n->group, value, SHOWN(s->optimizer));
  return f->words;
}

void training_set_number(struct aotb_function *f, uint32_t number, double value) {
  if ((int)number == f->step.scale_number) value = f->step.scale = (float)value;
  f->step.numbers[2 + number] = value;
  if (f->step.fresh) training_follow(f);
}

static aotb_status set_number(struct aotb_function *f, int64_t group, const char *key, int64_t position, double value) {
  const step_spec *s = f->entry->step_of;
  for (uint32_t i = 0; i < s->number_count; i++) {
    const number_spec *n = &s->numbers[i];
    if (n->group != group || n->position != position || strcmp(n->key, key)) continue;
    const char *problem = training_number_problem(f, i, value);
    if (problem) return aotb_fail(AOTB_INPUT, "entry %s: %s", f->entry->name, problem);
    training_set_number(f, i, value);
    return AOTB_OK;
  }
  return aotb_fail(AOTB_NAME,
                   "entry %s: no number '%s' at position %" PRId64 " of group %" PRId64
                   " can be set: it is fixed in the compiled step, or does not exist",
                   f->entry->name, SHOWN(key), position, group);
}

aotb_status aotb_number(aotb_function *f, int64_t group, const char *key, int64_t position, double value) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(key, "key", "the name of a number, such as lr");
  aotb_status status = enter(f);
  return status ? status : function_leave(f, set_number(f, group, key, position, value));
}

aotb_status aotb_progress_of(const aotb_function *f, aotb_progress *out) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(out, "out", "where to write the progress");
  if (f->entry->kind != ENTRY_STEP)
    return aotb_fail(AOTB_INPUT, "entry %s is of kind %s; expected a step", f->entry->name, kind_name(f->entry->kind));
  const training *t = &f->step;
  *out = (aotb_progress){t->updates, t->skipped, t->accumulated, t->grad_norm, t->scale};
  return AOTB_OK;
}
