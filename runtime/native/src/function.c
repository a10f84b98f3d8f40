#include "function.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN(text) shown(text, strlen(text))

static fitted *fitted_of(arena *a, const tensor_specs *specs) {
  fitted *out = TAKE(a, specs->count + 1u, fitted);
  for (uint32_t i = 0; i < specs->count; i++) {
    if (specs->at[i].rank > 64)
      arena_fail(a, AOTB_INCOMPATIBLE, "%s has %" PRIu32 " dimensions; at most 64 are supported", SHOWN(specs->at[i].name), specs->at[i].rank);
    out[i].shape = TAKE(a, 2u * specs->at[i].rank + 1u, int64_t);
    out[i].stride = out[i].shape + specs->at[i].rank;
  }
  return out;
}

static void begin_variant(struct aotb_function *f, const variant_spec *spec, variant *v) {
  arena *a = &f->a;
  v->spec = spec;
  v->forward.plan = spec->forward;
  v->backward.plan = spec->backward;
  v->inference.plan = spec->inference;
  v->gradient.plan = spec->gradient;
  v->step.plan = spec->step;
  v->accumulate.plan = spec->accumulate;
  v->values = TAKE(a, spec->symbol_count + 1u, int64_t);
  v->inputs = fitted_of(a, &spec->inputs);
  v->incoming = fitted_of(a, &spec->cotangents);
  v->defined = TAKE(a, spec->cotangents.count + 1u, bool);
  uint32_t gradients = spec->gradient ? spec->gradient->gradient_count : spec->backward ? spec->backward->gradient_count : 0;
  v->factors = TAKE(a, gradients + 1u, double);
  for (uint32_t i = 0; i < gradients; i++) v->factors[i] = 1;
  if (spec->outputs.count + gradients > f->layout_count) f->layout_count = spec->outputs.count + gradients;
  for (uint32_t i = 0; i < spec->outputs.count; i++)
    if (spec->outputs.at[i].rank > 64)
      arena_fail(a, AOTB_INCOMPATIBLE, "%s has %" PRIu32 " dimensions; at most 64 are supported", SHOWN(spec->outputs.at[i].name),
                 spec->outputs.at[i].rank);
}

/* Adds constants that are not in the entry's state, such as a table of the function. */
static void add_constants(const struct aotb_function *f, const plan_spec *plan, uint32_t *numbers, uint32_t *count, bool *taken) {
  if (!plan || !plan->library) return;
  const build_spec *build = &plan->library->builds[f->package->target];
  for (uint32_t i = 0; i < build->constant_count; i++) {
    uint32_t number = build->constants[i].weight;
    if (!taken[number]) numbers[(*count)++] = number;
    taken[number] = true;
  }
}

static void read_weights(struct aotb_function *f) {
  const manifest *m = &f->package->m;
  f->weights = TAKE(&f->a, m->weight_count + 1u, weight *);
  uint32_t *numbers = TAKE(&f->a, m->weight_count + 1u, uint32_t), count = 0;
  bool *taken = TAKE(&f->a, m->weight_count + 1u, bool);
  for (uint32_t i = 0; i < f->entry->state_count; i++) {
    uint32_t number = f->entry->state[i].weight;
    if (!taken[number]) numbers[count++] = number;
    taken[number] = true;
  }
  for (uint32_t i = 0; i < f->entry->variant_count; i++) {
    const variant_spec *v = &f->entry->variants[i];
    const plan_spec *all[] = {v->forward, v->backward, v->inference, v->gradient, v->step, v->accumulate};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) add_constants(f, all[k], numbers, &count, taken);
  }
  if (f->entry->step_of) add_constants(f, f->entry->step_of->update, numbers, &count, taken);
  weight *all = weights_read(f->package, &f->a, numbers, count);
  for (uint32_t i = 0; i < count; i++) f->weights[numbers[i]] = &all[i];
}

static void begin(struct aotb_function *f) {
  f->variants = TAKE(&f->a, f->entry->variant_count + 1u, variant);
  for (uint32_t i = 0; i < f->entry->variant_count; i++) begin_variant(f, &f->entry->variants[i], &f->variants[i]);
  f->layouts = arena_take(&f->a, f->layout_count + 1u, sizeof *f->layouts);
  f->scaled = TAKE(&f->a, f->layout_count + 1u, fitted);
  f->in_training = f->entry->training;
  f->only = -1;
  read_weights(f);
  if (f->entry->kind == ENTRY_STEP) training_begin(f);
}

aotb_status aotb_get(aotb_package *p, const char *name, aotb_function **out) {
  REQUIRE(out, "out", "where to write the function");
  *out = NULL;
  REQUIRE(p, "package", A_PACKAGE);
  REQUIRE(name, "entry", "the name of an entry");
  const entry_spec *entry = package_entry(p, name);
  if (!entry) return AOTB_NAME;
  const char *verdict = standalone_for(entry, p->target);
  if (p->backend->standalone && !p->unchecked && strcmp(verdict, "verified"))
    return aotb_fail(AOTB_INCOMPATIBLE, "package %s: entry %s %s%s: open the package with the backend libtorch", p->path, entry->name,
                     *verdict ? "does not run on the backend standalone: it " : "was not tried on the backend standalone when it was exported",
                     verdict);
  struct aotb_function *f = calloc(1, sizeof *f);
  if (!f) return aotb_fail(AOTB_MEMORY, "package %s: no memory", p->path);
  f->a.path = p->path;
  f->package = p;
  f->entry = entry;
  package_keep(p);
  jmp_buf back;
  f->a.back = &back;
  int status = setjmp(back);
  if (status) {
    aotb_free(f);
    return (aotb_status)status;
  }
  begin(f);
  f->a.back = NULL;
  *out = f;
  return AOTB_OK;
}

static void close_runnable(runnable *r) {
  if (!r->lib) return;
  for (uint32_t i = 0; i < r->lib->spec->outputs.count; i++)
    if (r->results[i]) r->lib->backend->drop(r->results[i]);
  library_close(r->lib);
}

void aotb_free(aotb_function *f) {
  if (!f) return;
  for (uint32_t i = 0; f->variants && i < f->entry->variant_count; i++) {
    variant *v = &f->variants[i];
    if (!v->spec) break;
    runnable *all[] = {&v->forward, &v->backward, &v->inference, &v->gradient, &v->step, &v->accumulate};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) close_runnable(all[k]);
    for (uint32_t k = 0; v->inputs && k < v->spec->inputs.count; k++) free(v->inputs[k].scratch);
    for (uint32_t k = 0; v->incoming && k < v->spec->cotangents.count; k++) free(v->incoming[k].scratch);
  }
  for (uint32_t i = 0; f->scaled && i < f->layout_count; i++) free(f->scaled[i].scratch);
  close_runnable(&f->step.update);
  free((void *)(uintptr_t)f->step.extra);
  arena_free(&f->a);
  package_drop(f->package);
  free(f);
}

const char *aotb_kind(const aotb_function *f) {
  REQUIRE_OR_NOTHING(f, "function", A_FUNCTION);
  return kind_name(f->entry->kind);
}

aotb_status aotb_train(aotb_function *f, int mode) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = function_enter(f);
  if (status) return status;
  f->in_training = mode != 0;
  return function_leave(f, AOTB_OK);
}

aotb_status aotb_use_variant(aotb_function *f, int64_t number) {
  REQUIRE(f, "function", A_FUNCTION);
  if (number < -1 || number >= f->entry->variant_count)
    return aotb_fail(AOTB_NAME, "entry %s has no variant %" PRId64 "; it has %" PRIu32, f->entry->name, number, f->entry->variant_count);
  aotb_status status = function_enter(f);
  if (status) return status;
  f->only = number;
  return function_leave(f, AOTB_OK);
}

aotb_status aotb_convert(aotb_function *f, int convert) {
  REQUIRE(f, "function", A_FUNCTION);
  aotb_status status = function_enter(f);
  if (status) return status;
  f->converts = convert != 0;
  return function_leave(f, AOTB_OK);
}

uint32_t aotb_served(const aotb_function *f) {
  REQUIRE_OR_NOTHING(f, "function", A_FUNCTION);
  return f->served;
}

uint32_t aotb_variants(const aotb_function *f) {
  REQUIRE_OR_NOTHING(f, "function", A_FUNCTION);
  return f->entry->variant_count;
}

static const plan_spec *gradients_of(const variant_spec *v) { return v->gradient ? v->gradient : v->backward; }

uint32_t aotb_count(const aotb_function *f, uint32_t number, aotb_part part) {
  REQUIRE_OR_NOTHING(f, "function", A_FUNCTION);
  if (number >= f->entry->variant_count) return 0;
  const variant_spec *v = &f->entry->variants[number];
  switch (part) {
  case AOTB_INPUTS: return v->inputs.count;
  case AOTB_OUTPUTS: return v->outputs.count;
  case AOTB_GRADIENTS: return gradients_of(v) ? gradients_of(v)->gradient_count : 0;
  case AOTB_INCOMING: return v->cotangents.count;
  case AOTB_STATES: return f->entry->state_count;
  case AOTB_NUMBERS: return f->entry->step_of ? f->entry->step_of->number_count : 0;
  }
  return 0;
}

static aotb_description of_tensor(const tensor_spec *t) {
  return (aotb_description){.name = t->name, .dtype = t->type->dl, .ndim = (int32_t)t->rank, .shape = t->shape_texts, .group = -1, .position = -1};
}

static aotb_description of_state(const struct aotb_function *f, const state_spec *s) {
  const weight_spec *w = f->weights[s->weight]->spec;
  return (aotb_description){.name = s->label, .dtype = w->type->dl, .ndim = (int32_t)w->rank, .shape = w->shape_texts, .group = -1, .position = -1};
}

static aotb_description of_gradient(const struct aotb_function *f, const variant_spec *v, const char *of) {
  const char *name = strchr(of, ':') + 1;
  if (!strncmp(of, "input:", 6)) return of_tensor(&v->inputs.at[strtoul(name, NULL, 10)]);
  uint32_t i = 0; /* it exists: manifest.c */
  while (strcmp(f->entry->state[i].name, name)) i++;
  return of_state(f, &f->entry->state[i]);
}

static aotb_description of_number(const struct aotb_function *f, uint32_t number) {
  const number_spec *n = &f->entry->step_of->numbers[number];
  return (aotb_description){.name = n->key, .dtype = {2, 64, 1}, .group = n->group, .position = n->position, .value = f->step.numbers[2 + number]};
}

aotb_status aotb_describe(const aotb_function *f, uint32_t number, aotb_part part, uint32_t item, aotb_description *out) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(out, "out", "where to write the description");
  if (number >= f->entry->variant_count)
    return aotb_fail(AOTB_NAME, "entry %s has no variant %" PRIu32 "; it has %" PRIu32, f->entry->name, number, f->entry->variant_count);
  if (item >= aotb_count(f, number, part))
    return aotb_fail(AOTB_NAME, "entry %s: there is no number %" PRIu32 " of that part; there are %" PRIu32, f->entry->name, item,
                     aotb_count(f, number, part));
  const variant_spec *v = &f->entry->variants[number];
  switch (part) {
  case AOTB_INPUTS: *out = of_tensor(&v->inputs.at[item]); break;
  case AOTB_OUTPUTS: *out = of_tensor(&v->outputs.at[item]); break;
  case AOTB_INCOMING: *out = of_tensor(&v->cotangents.at[item]); break;
  case AOTB_GRADIENTS: *out = of_gradient(f, v, gradients_of(v)->gradients[item].of); break;
  case AOTB_STATES: *out = of_state(f, &f->entry->state[item]); break;
  case AOTB_NUMBERS: *out = of_number(f, item); break;
  }
  return AOTB_OK;
}

static const char *gradient_name(const struct aotb_function *f, const variant_spec *v, uint32_t number) {
  return of_gradient(f, v, gradients_of(v)->gradients[number].of).name;
}

aotb_status aotb_scale(aotb_function *f, const char *name, double factor) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(name, "gradient", "the name of a gradient");
  if (!isfinite(factor))
    return aotb_fail(AOTB_INPUT, "entry %s: factor of %s: expected a finite number, got %g", f->entry->name, SHOWN(name), factor);
  aotb_status status = function_enter(f);
  if (status) return status;
  char has[512] = "none";
  size_t n = 0;
  bool found = false;
  for (uint32_t i = 0; i < f->entry->variant_count; i++) {
    const variant_spec *v = &f->entry->variants[i];
    for (uint32_t k = 0; gradients_of(v) && k < gradients_of(v)->gradient_count; k++) {
      const char *own = gradient_name(f, v, k);
      if (!i && n < sizeof has) n += (size_t)snprintf(has + n, sizeof has - n, "%s%s", k ? ", " : "", SHOWN(own));
      if (strcmp(own, name)) continue;
      f->variants[i].factors[k] = factor;
      found = true;
    }
  }
  if (found) return function_leave(f, AOTB_OK);
  return function_leave(f, aotb_fail(AOTB_NAME, "entry %s has no gradient '%s'; it has %s", f->entry->name, SHOWN(name), has));
}

/* Returns the structure of the results: that of the outputs; of a grad entry, the pair of outputs and gradients. */
static const char *structure(struct aotb_function *f, const variant_spec *v) {
  const char *outputs = arena_text(&f->a, v->out_tree, v->out_tree_length), *gradients = "";
  if (f->entry->kind != ENTRY_GRAD) return outputs;
  for (uint32_t i = 0; i < f->entry->wrt.count; i++) {
    const char *one = "{\"kind\":\"constant\"}"; /* None */
    for (uint32_t k = 0; k < v->gradient->gradient_count; k++)
      if (!strcmp(v->gradient->gradients[k].of, f->entry->wrt.at[i]))
        one = arena_print(&f->a, "{\"kind\":\"tensor\",\"index\":%" PRIu32 "}", v->outputs.count + k);
    gradients = arena_print(&f->a, "%s%s%s", gradients, i ? "," : "", one);
  }
  if (!f->entry->single || f->entry->wrt.count != 1)
    gradients = arena_print(&f->a, "{\"kind\":\"dict\",\"keys\":%.*s,\"children\":[%s]}", (int)f->entry->names_length, f->entry->names, gradients);
  return arena_print(&f->a, "{\"kind\":\"tuple\",\"children\":[%s,%s]}", outputs, gradients);
}

const char *aotb_structure(aotb_function *f, uint32_t number) {
  REQUIRE_OR_NOTHING(f, "function", A_FUNCTION);
  if (number >= f->entry->variant_count) {
    aotb_fail(AOTB_NAME, "entry %s has no variant %" PRIu32 "; it has %" PRIu32, f->entry->name, number, f->entry->variant_count);
    return NULL;
  }
  if (function_enter(f)) return NULL;
  variant *v = &f->variants[number];
  jmp_buf back;
  f->a.back = &back;
  if (!v->structure && !setjmp(back)) v->structure = structure(f, v->spec);
  f->a.back = NULL;
  function_leave(f, AOTB_OK);
  return v->structure;
}

aotb_status aotb_size(aotb_function *f, const char *size, int64_t *out) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(size, "size", "a size as aotb_describe gives it");
  REQUIRE(out, "out", "where to write the size");
  aotb_status status = function_enter(f);
  if (status) return status;
  if (!f->sized)
    return function_leave(f, aotb_fail(AOTB_INPUT, "entry %s: the size %s is known after a call: call it first", f->entry->name, SHOWN(size)));
  const variant *v = &f->variants[f->served];
  arena own = {.path = f->package->path};
  jmp_buf back;
  own.back = &back;
  int failed = setjmp(back);
  if (!failed) {
    expression e = expression_read(&own, size, v->spec->symbol_names, v->spec->symbol_count);
    if (!expression_value(&e, v->values, out)) arena_fail(&own, AOTB_INPUT, "the size %s cannot be computed", SHOWN(size));
  }
  arena_free(&own);
  return function_leave(f, failed && failed != AOTB_MEMORY ? AOTB_INPUT : (aotb_status)failed);
}

aotb_status aotb_state(aotb_function *f, const char *name, DLTensor *view) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(name, "name", "the name of a parameter, buffer or state");
  REQUIRE(view, "view", "where to write the tensor");
  for (uint32_t i = 0; i < f->entry->state_count; i++) {
    if (strcmp(f->entry->state[i].label, name)) continue;
    const weight *w = f->weights[f->entry->state[i].weight];
    *view = (DLTensor){.data = w->data,
                       .device = {1, 0},
                       .ndim = (int32_t)w->spec->rank,
                       .dtype = w->spec->type->dl,
                       .shape = (int64_t *)(uintptr_t)w->spec->shape,
                       .strides = (int64_t *)(uintptr_t)w->spec->stride};
    return AOTB_OK;
  }
  return aotb_fail(AOTB_NAME, "entry %s has no state '%s'", f->entry->name, SHOWN(name));
}
