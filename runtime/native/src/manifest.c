#define _POSIX_C_SOURCE 200809L
#include "manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sha256.h"

enum { SEALED_SINCE = 15 }; /* the first minor version of the format in which manifests end with their SHA-256 */
#define MANIFEST "extra/aot_backward/manifest.json"
#define WEIGHTS "extra/aot_backward/weights.safetensors"

/* --- fields ----------------------------------------------------------------------------------------------------------------------------------- */

/* The path of a value, innermost first. It is formatted only for errors. */
typedef struct place {
  const struct place *in;
  const char *name; /* of a field or key, or NULL: an item of an array */
  uint32_t number;
} place;

typedef struct {
  arena *a;
  manifest *m;
} reader;

static const char *where(const reader *r, const place *p) {
  if (!p) return "manifest";
  const char *outside = where(r, p->in); /* recursion ends at the depth of the schema */
  return p->name ? arena_print(r->a, "%s.%s", outside, shown(p->name, strlen(p->name))) : arena_print(r->a, "%s[%" PRIu32 "]", outside, p->number);
}

#define SHOWN(text) shown(text, strlen(text))
#define WRONG(r, p, text, ...) arena_fail((r)->a, AOTB_FORMAT, "%s: " text, where(r, p), __VA_ARGS__)

static const json *typed(const reader *r, const place *p, const json *value, json_kind kind) {
  if (!value || value->kind != kind) WRONG(r, p, "expected %s, got %s", json_words(&(json){.kind = kind}), json_words(value));
  return value;
}

/* Returns the field of that kind; NULL if it is missing and optional. */
static const json *field(const reader *r, const place *p, const json *object, const char *name, json_kind kind, bool needed) {
  const json *value = json_get(object, name);
  place here = {p, name, 0};
  if (!value && needed) WRONG(r, p, "the field '%s' is missing", name);
  return value ? typed(r, &here, value, kind) : NULL;
}

static const char *text_of(const reader *r, const place *p, const json *object, const char *name, const char *otherwise) {
  const json *value = field(r, p, object, name, JSON_STRING, !otherwise);
  return value ? value->text : otherwise;
}

static bool truth(const reader *r, const place *p, const json *object, const char *name, int otherwise) { /* -1: required */
  const json *value = json_get(object, name);
  place here = {p, name, 0};
  if (!value && otherwise >= 0) return otherwise;
  if (!value) WRONG(r, p, "the field '%s' is missing", name);
  if (value->kind != JSON_TRUE && value->kind != JSON_FALSE) WRONG(r, &here, "expected true or false, got %s", json_words(value));
  return value->kind == JSON_TRUE;
}

static int64_t integer(const reader *r, const place *p, const json *object, const char *name, const int64_t *otherwise) {
  const json *value = field(r, p, object, name, JSON_INTEGER, !otherwise);
  return value ? value->integer : *otherwise;
}

static double number(const reader *r, const place *p, const json *value) {
  if (!value || (value->kind != JSON_INTEGER && value->kind != JSON_NUMBER)) WRONG(r, p, "expected a number, got %s", json_words(value));
  return value->kind == JSON_INTEGER ? (double)value->integer : value->number;
}

static const json *list(const reader *r, const place *p, const json *object, const char *name, bool needed) {
  static const json none = {.kind = JSON_ARRAY};
  const json *value = field(r, p, object, name, JSON_ARRAY, needed);
  return value ? value : &none;
}

static texts texts_of(const reader *r, const place *p, const json *object, const char *name, bool needed) {
  const json *items = list(r, p, object, name, needed);
  texts out = {items->count, TAKE(r->a, items->count + 1u, const char *)};
  for (uint32_t i = 0; i < out.count; i++) out.at[i] = typed(r, &(place){&(place){p, name, 0}, NULL, i}, &items->items[i], JSON_STRING)->text;
  return out;
}

static const uint32_t *numbers_of(const reader *r, const place *p, const json *object, const char *name, bool needed, uint32_t *count) {
  const json *items = list(r, p, object, name, needed);
  uint32_t *out = TAKE(r->a, items->count + 1u, uint32_t);
  for (uint32_t i = 0; i < items->count; i++) {
    place here = {&(place){p, name, 0}, NULL, i};
    int64_t value = typed(r, &here, &items->items[i], JSON_INTEGER)->integer;
    if (value < 0 || value > UINT32_MAX) WRONG(r, &here, "%" PRId64 " is not a count", value);
    out[i] = (uint32_t)value;
  }
  *count = items->count;
  return out;
}

/* --- parts ------------------------------------------------------------------------------------------------------------------------------------ */

typedef struct {
  const char *const *names;
  uint32_t count;
} symbols;

static expression size_of(const reader *r, const place *p, const json *value, symbols s) {
  if (value->kind == JSON_INTEGER) return expression_number(r->a, value->integer);
  return expression_read(r->a, typed(r, p, value, JSON_STRING)->text, s.names, s.count);
}

static const expression *sizes_of(const reader *r, const place *p, const json *object, const char *name, symbols s, uint32_t *rank) {
  const json *items = list(r, p, object, name, true);
  expression *out = TAKE(r->a, items->count + 1u, expression);
  for (uint32_t i = 0; i < items->count; i++) out[i] = size_of(r, &(place){&(place){p, name, 0}, NULL, i}, &items->items[i], s);
  *rank = items->count;
  return out;
}

static const dtype *dtype_of(const reader *r, const place *p, const json *object) {
  const char *name = text_of(r, p, object, "dtype", NULL);
  const dtype *found = dtype_named(name);
  if (!found) WRONG(r, p, "the dtype '%s' is not one that this library knows", shown(name, strlen(name)));
  return found;
}

/* Reads a tensor. A library's tensor keeps only name, dtype and rank, because the calling variant has the sizes. */
static tensor_spec tensor(const reader *r, const place *p, const json *value, const symbols *s) {
  typed(r, p, value, JSON_OBJECT);
  tensor_spec out = {.name = text_of(r, p, value, "name", NULL), .type = dtype_of(r, p, value)};
  const char *device = text_of(r, p, value, "device", NULL);
  out.on_cpu = !strcmp(device, "cpu");
  if (!out.on_cpu && strcmp(device, "cuda")) WRONG(r, p, "the device '%s' is unknown", shown(device, strlen(device)));
  uint32_t strides = list(r, p, value, "stride", true)->count;
  out.rank = list(r, p, value, "shape", true)->count;
  if (out.rank != strides) WRONG(r, p, "%" PRIu32 " sizes and %" PRIu32 " strides", out.rank, strides);
  if (!s) return out;
  out.shape = sizes_of(r, p, value, "shape", *s, &out.rank);
  out.stride = sizes_of(r, p, value, "stride", *s, &strides);
  out.shape_texts = TAKE(r->a, out.rank + 1u, const char *);
  for (uint32_t d = 0; d < out.rank; d++) out.shape_texts[d] = out.shape[d].text;
  for (uint32_t i = 0; i < out.rank; i++)
    if ((!out.shape[i].code && out.shape[i].number < 0) || (!out.stride[i].code && out.stride[i].number < 0))
      WRONG(r, p, "%s has a negative size or stride", shown(out.name, strlen(out.name)));
  return out;
}

static tensor_specs tensors(const reader *r, const place *p, const json *object, const char *name, const symbols *s) {
  const json *items = list(r, p, object, name, true);
  tensor_specs out = {items->count, TAKE(r->a, items->count + 1u, tensor_spec)};
  for (uint32_t i = 0; i < out.count; i++) out.at[i] = tensor(r, &(place){&(place){p, name, 0}, NULL, i}, &items->items[i], s);
  return out;
}

static source source_of(const reader *r, const place *p, const char *text, symbols s) {
  static const struct {
    const char *word;
    origin from;
  } words[] = {{"result:", FROM_RESULT}, {"input:", FROM_INPUT}, {"saved:", FROM_SAVED}, {"cotangent:", FROM_COTANGENT}};
  source out = {.text = text};
  if (!*text) return out;
  if (!strncmp(text, "size:", 5)) {
    out.from = FROM_SIZE;
    out.size = expression_read(r->a, text + 5, s.names, s.count);
    return out;
  }
  if (!strncmp(text, "parameter:", 10) && text[10]) {
    out.from = FROM_PARAMETER;
    return out;
  }
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    size_t n = strlen(words[i].word);
    if (strncmp(text, words[i].word, n)) continue;
    const char *digits = text + n;
    size_t length = strspn(digits, "0123456789");
    if (!length || digits[length] || length > 9 || (*digits == '0' && length > 1)) break;
    out.from = words[i].from;
    out.number = (uint32_t)strtoul(digits, NULL, 10);
    return out;
  }
  WRONG(r, p, "'%s' is not an operand of a plan", shown(text, strlen(text)));
}

static sources sources_of(const reader *r, const place *p, const json *object, const char *name, bool needed, symbols s) {
  texts words = texts_of(r, p, object, name, needed);
  sources out = {words.count, TAKE(r->a, words.count + 1u, source)};
  for (uint32_t i = 0; i < out.count; i++) out.at[i] = source_of(r, &(place){&(place){p, name, 0}, NULL, i}, words.at[i], s);
  return out;
}

static const state_spec *state_named(const entry_spec *e, const char *name) {
  for (uint32_t i = 0; i < e->state_count; i++)
    if (!strcmp(e->state[i].name, name)) return &e->state[i];
  return NULL;
}

static const char *find_state(const reader *r, const place *p, const entry_spec *e, const char *name) {
  if (!state_named(e, name)) WRONG(r, p, "refers to the state '%s', which the entry does not have", SHOWN(name));
  return name;
}

/* Checks that a source of one of the kinds `allowed` exists, and that it has dtype and rank of `wanted`, if that is not NULL. */
static void resolve(const reader *r, const place *p, const entry_spec *e, const variant_spec *v, const plan_spec *plan, const source *from,
                    unsigned allowed, const tensor_spec *wanted) {
  static const tensor_specs none;
  const tensor_specs *of = &none;
  const source *s = from;
  if (!(allowed >> from->from & 1)) WRONG(r, p, "'%s' cannot stand here", SHOWN(from->text));
  const library_spec *library = plan->library;
  if (s->from == FROM_SAVED) {
    uint32_t count = v->forward ? v->forward->saved.count : 0;
    if (s->number >= count) WRONG(r, p, "'%s' does not exist: there are %" PRIu32 " saved tensors", SHOWN(from->text), count);
    s = &v->forward->saved.at[s->number];
    library = v->forward->library;
  }
  switch (s->from) {
  case FROM_NOTHING:
  case FROM_SIZE: return;
  case FROM_PARAMETER: find_state(r, p, e, s->text + 10); return;
  case FROM_INPUT: of = &v->inputs; break;
  case FROM_COTANGENT: of = &v->cotangents; break;
  case FROM_RESULT: of = library ? &library->outputs : &none; break;
  case FROM_SAVED: break;
  }
  if (s->number >= of->count) WRONG(r, p, "'%s' does not exist: there are %" PRIu32 " of them", SHOWN(from->text), of->count);
  const tensor_spec *found = &of->at[s->number];
  if (wanted && (found->type != wanted->type || found->rank != wanted->rank))
    WRONG(r, p, "'%s' is %s of %" PRIu32 " dimensions, expected %s of %" PRIu32, SHOWN(from->text), found->type->name, found->rank,
          wanted->type->name, wanted->rank);
}

#define KIND(from) (1u << (from))

/* Checks each reference of a plan. `gives`: the outputs of the variant. */
static void resolve_plan(const reader *r, const place *p, const entry_spec *e, const variant_spec *v, const plan_spec *plan, bool backward,
                         const tensor_specs *gives) {
  uint32_t takes = plan->library ? plan->library->inputs.count : 0;
  unsigned operands = KIND(FROM_INPUT) | KIND(FROM_SIZE) | (backward ? KIND(FROM_SAVED) | KIND(FROM_COTANGENT) : 0);
  if (plan->operands.count != takes) WRONG(r, p, "%" PRIu32 " operands, for %" PRIu32 " inputs of the library", plan->operands.count, takes);
  for (uint32_t i = 0; i < takes; i++) resolve(r, p, e, v, plan, &plan->operands.at[i], operands, &plan->library->inputs.at[i]);
  if (plan->outputs.count != gives->count) WRONG(r, p, "%" PRIu32 " outputs, of the %" PRIu32 " of the variant", plan->outputs.count, gives->count);
  for (uint32_t i = 0; i < gives->count; i++)
    resolve(r, p, e, v, plan, &plan->outputs.at[i], KIND(FROM_RESULT) | KIND(FROM_INPUT) | KIND(FROM_PARAMETER), &gives->at[i]);
  for (uint32_t i = 0; i < plan->saved.count; i++) resolve(r, p, e, v, plan, &plan->saved.at[i], KIND(FROM_RESULT) | KIND(FROM_INPUT), NULL);
  for (uint32_t i = 0; i < plan->gradient_count; i++) {
    const gradient_spec *g = &plan->gradients[i];
    source of = source_of(r, p, g->of, (symbols){NULL, 0});
    resolve(r, p, e, v, plan, &of, KIND(FROM_INPUT) | KIND(FROM_PARAMETER), NULL);
    tensor_spec like = {0};
    if (of.from == FROM_INPUT) like = v->inputs.at[of.number];
    else {
      const weight_spec *w = &r->m->weights[state_named(e, g->of + 10)->weight];
      like.type = w->type;
      like.rank = w->rank;
    }
    resolve(r, p, e, v, plan, &g->from, KIND(FROM_RESULT) | KIND(FROM_NOTHING), &like);
    for (uint32_t k = 0; k < g->cotangent_count; k++)
      if (g->cotangents[k] >= v->cotangents.count)
        WRONG(r, p, "refers to the incoming gradient %" PRIu32 ", of %" PRIu32, g->cotangents[k], v->cotangents.count);
  }
  for (uint32_t i = 0; i < plan->consumes_count; i++)
    if (!v->forward || plan->consumes[i] >= v->forward->saved.count)
      WRONG(r, p, "consumes the saved tensor %" PRIu32 ", which does not exist", plan->consumes[i]);
  for (uint32_t i = 0; i < plan->reads.count; i++) find_state(r, p, e, plan->reads.at[i]);
  for (uint32_t i = 0; i < plan->writes.count; i++) find_state(r, p, e, plan->writes.at[i]);
}

static plan_spec *plan(const reader *r, const place *in, const json *object, const char *name, const entry_spec *e, const variant_spec *v,
                       symbols s) {
  static const tensor_specs none;
  const json *value = json_get(object, name);
  if (!value || value->kind == JSON_NULL) return NULL;
  place p = {in, name, 0};
  typed(r, &p, value, JSON_OBJECT);
  plan_spec *out = TAKE(r->a, 1, plan_spec);
  const json *call = json_get(value, "call");
  if (!call) WRONG(r, &p, "the field '%s' is missing", "call");
  if (call->kind != JSON_NULL) {
    place here = {&p, "call", 0};
    typed(r, &here, call, JSON_OBJECT);
    out->library_name = text_of(r, &here, call, "library", NULL);
    out->library = manifest_library(r->m, out->library_name);
    if (!out->library)
      WRONG(r, &here, "refers to the library '%s', which the manifest does not have", shown(out->library_name, strlen(out->library_name)));
    out->operands = sources_of(r, &here, call, "operands", true, s);
  }
  out->outputs = sources_of(r, &p, value, "outputs", false, s);
  out->saved = sources_of(r, &p, value, "saved", false, s);
  out->reads = texts_of(r, &p, value, "reads", false);
  out->writes = texts_of(r, &p, value, "writes", false);
  out->consumes = numbers_of(r, &p, value, "consumes", false, &out->consumes_count);
  const json *gradients = list(r, &p, value, "gradients", false);
  out->gradient_count = gradients->count;
  out->gradients = TAKE(r->a, gradients->count + 1u, gradient_spec);
  for (uint32_t i = 0; i < gradients->count; i++) {
    place here = {&(place){&p, "gradients", 0}, NULL, i};
    const json *g = typed(r, &here, &gradients->items[i], JSON_OBJECT);
    gradient_spec *to = &out->gradients[i];
    to->of = text_of(r, &here, g, "of", NULL);
    to->from = source_of(r, &here, text_of(r, &here, g, "source", NULL), s);
    to->cotangents = numbers_of(r, &here, g, "cotangents", false, &to->cotangent_count);
  }
  bool backward = !strcmp(name, "backward");
  resolve_plan(r, &p, e, v, out, backward, backward ? &none : &v->outputs);
  return out;
}

static void read_symbols(const reader *r, const place *in, const json *object, variant_spec *v) {
  const json *items = list(r, in, object, "symbols", true);
  v->symbol_count = items->count;
  v->symbols = TAKE(r->a, items->count + 1u, symbol_spec);
  v->symbol_names = TAKE(r->a, items->count + 1u, const char *);
  for (uint32_t i = 0; i < items->count; i++) {
    place p = {&(place){in, "symbols", 0}, NULL, i};
    const json *value = typed(r, &p, &items->items[i], JSON_OBJECT), *most = json_get(value, "maximum");
    static const int64_t one = 1, zero = 0;
    symbol_spec *s = &v->symbols[i];
    s->name = v->symbol_names[i] = text_of(r, &p, value, "name", NULL);
    s->label = text_of(r, &p, value, "label", NULL);
    s->input = integer(r, &p, value, "input", NULL);
    s->dim = integer(r, &p, value, "dim", NULL);
    s->minimum = integer(r, &p, value, "minimum", NULL);
    if (!most) WRONG(r, &p, "the field '%s' is missing", "maximum");
    s->bounded = most->kind != JSON_NULL;
    s->maximum = s->bounded ? integer(r, &p, value, "maximum", NULL) : INT64_MAX;
    s->scale = integer(r, &p, value, "scale", &one);
    s->offset = integer(r, &p, value, "offset", &zero);
    if (s->scale < 1 || s->minimum < 0) WRONG(r, &p, "a scale of %" PRId64 " and a minimum of %" PRId64, s->scale, s->minimum);
  }
}

/* Checks that the symbols refer to existing dimensions. */
static void resolve_symbols(const reader *r, const place *p, const variant_spec *v) {
  for (uint32_t i = 0; i < v->symbol_count; i++) {
    const symbol_spec *s = &v->symbols[i];
    if (s->input < 0 || s->input >= v->inputs.count || s->dim < 0 || s->dim >= v->inputs.at[s->input].rank)
      WRONG(r, p, "symbol %s refers to dimension %" PRId64 " of input %" PRId64 ", which does not exist", SHOWN(s->name), s->dim, s->input);
  }
}

static void read_variant(const reader *r, const place *p, const json *value, const entry_spec *e, variant_spec *v) {
  typed(r, p, value, JSON_OBJECT);
  read_symbols(r, p, value, v);
  symbols s = {v->symbol_names, v->symbol_count};
  v->mode = text_of(r, p, value, "mode", NULL);
  const json *tree = field(r, p, value, "out_tree", JSON_OBJECT, true);
  v->out_tree = tree->raw;
  v->out_tree_length = tree->raw_length;
  v->inputs = tensors(r, p, value, "inputs", &s);
  v->outputs = tensors(r, p, value, "outputs", &s);
  v->cotangents = tensors(r, p, value, "cotangents", &s);
  texts guards = texts_of(r, p, value, "guards", true);
  v->guard_count = guards.count;
  v->guards = TAKE(r->a, guards.count + 1u, expression);
  for (uint32_t i = 0; i < guards.count; i++) v->guards[i] = expression_read(r->a, guards.at[i], s.names, s.count);
  v->forward = plan(r, p, value, "forward", e, v, s);
  v->backward = plan(r, p, value, "backward", e, v, s);
  v->inference = plan(r, p, value, "inference", e, v, s);
  v->gradient = plan(r, p, value, "gradient", e, v, s);
  v->step = plan(r, p, value, "step", e, v, s);
  v->accumulate = plan(r, p, value, "accumulate", e, v, s);
  resolve_symbols(r, p, v);
  bool callable = e->kind == ENTRY_MODULE     ? (v->backward ? v->forward != NULL : v->forward || v->inference)
                  : e->kind == ENTRY_FUNCTION ? v->inference != NULL
                  : e->kind == ENTRY_GRAD     ? v->gradient != NULL
                                              : v->step && v->step->library && !v->accumulate == !e->step_of->update &&
                                                    v->step->library->outputs.count >= 1u + e->step_of->norm + e->step_of->finite;
  if (!callable) WRONG(r, p, "it cannot be called with the plans that it has%s", "");
}

/* --- training steps --------------------------------------------------------------------------------------------------------------------------- */

static void read_intervals(const reader *r, const place *in, const json *object, number_spec *n) {
  const json *items = list(r, in, object, "allowed", false);
  n->allowed_count = items->count;
  n->allowed = TAKE(r->a, items->count + 1u, interval);
  for (uint32_t i = 0; i < items->count; i++) {
    place p = {&(place){in, "allowed", 0}, NULL, i};
    const json *value = typed(r, &p, &items->items[i], JSON_OBJECT), *low = json_get(value, "low"), *high = json_get(value, "high");
    interval *to = &n->allowed[i];
    to->has_low = low && low->kind != JSON_NULL;
    to->has_high = high && high->kind != JSON_NULL;
    to->low = to->has_low ? number(r, &p, low) : 0;
    to->high = to->has_high ? number(r, &p, high) : 0;
    to->low_open = truth(r, &p, value, "low_open", true);
    to->high_open = truth(r, &p, value, "high_open", true);
  }
}

static step_spec *step_of(const reader *r, const place *in, const json *value, const entry_spec *e) {
  place p = {in, "step", 0};
  step_spec *out = TAKE(r->a, 1, step_spec);
  typed(r, &p, value, JSON_OBJECT);
  out->optimizer = text_of(r, &p, value, "optimizer", NULL);
  out->defaults = text_of(r, &p, value, "defaults", NULL);
  const json *items = list(r, &p, value, "groups", true);
  out->group_count = items->count;
  out->groups = arena_take(r->a, items->count + 1u, sizeof *out->groups);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){&p, "groups", 0}, NULL, i};
    const json *group = typed(r, &each, &items->items[i], JSON_OBJECT);
    out->groups[i].parameters = texts_of(r, &each, group, "parameters", true);
    for (uint32_t k = 0; k < out->groups[i].parameters.count; k++)
      find_state(r, &each, e, arena_print(r->a, "module.%s", out->groups[i].parameters.at[k]));
    out->groups[i].options = text_of(r, &each, group, "options", NULL);
  }
  items = list(r, &p, value, "numbers", true);
  out->number_count = items->count;
  out->numbers = TAKE(r->a, items->count + 1u, number_spec);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){&p, "numbers", 0}, NULL, i};
    const json *item = typed(r, &each, &items->items[i], JSON_OBJECT);
    number_spec *n = &out->numbers[i];
    n->group = integer(r, &each, item, "group", NULL);
    n->position = integer(r, &each, item, "position", NULL);
    n->key = text_of(r, &each, item, "key", NULL);
    n->value = number(r, &each, json_get(item, "value"));
    read_intervals(r, &each, item, n);
    if (n->group < -1 || n->group >= out->group_count) WRONG(r, &each, "refers to group %" PRId64 ", of %" PRIu32, n->group, out->group_count);
  }
  items = list(r, &p, value, "state", true);
  out->slot_count = items->count;
  out->slots = TAKE(r->a, items->count + 1u, slot_spec);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){&p, "state", 0}, NULL, i};
    static const int64_t none = -1;
    const json *item = typed(r, &each, &items->items[i], JSON_OBJECT);
    out->slots[i] = (slot_spec){text_of(r, &each, item, "key", NULL), text_of(r, &each, item, "state", NULL),
                                texts_of(r, &each, item, "parameters", true), integer(r, &each, item, "starts_as", &none)};
    const slot_spec *slot = &out->slots[i];
    find_state(r, &each, e, slot->state);
    if (slot->starts_as < -1 || slot->starts_as >= out->number_count || !slot->parameters.count)
      WRONG(r, &each, "refers to number %" PRId64 ", of %" PRIu32 ", and has %" PRIu32 " parameters", slot->starts_as, out->number_count,
            slot->parameters.count);
  }
  items = list(r, &p, value, "gradients", false);
  out->gradient_count = items->count;
  out->gradients = arena_take(r->a, items->count + 1u, sizeof *out->gradients);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){&p, "gradients", 0}, NULL, i};
    const json *item = typed(r, &each, &items->items[i], JSON_OBJECT);
    out->gradients[i].parameter = text_of(r, &each, item, "parameter", NULL);
    out->gradients[i].state = find_state(r, &each, e, text_of(r, &each, item, "state", NULL));
  }
  static const variant_spec no_variant;
  out->update = plan(r, &p, value, "update", e, &no_variant, (symbols){NULL, 0});
  if (out->update && (!out->update->library || out->update->library->outputs.count < 1u))
    WRONG(r, &p, "its update calls no library that gives a result%s", "");
  out->fresh = truth(r, &p, value, "fresh", true);
  out->norm = truth(r, &p, value, "norm", false);
  out->finite = truth(r, &p, value, "finite", false);
  out->in_place = truth(r, &p, value, "in_place", false);
  const weight_spec *vector = &r->m->weights[state_named(e, find_state(r, &p, e, "numbers"))->weight];
  if (strcmp(vector->type->name, "float64") || vector->rank != 1 || vector->shape[0] != (int64_t)out->number_count + 2)
    WRONG(r, &p, "its state 'numbers' is not %" PRIu32 " float64", out->number_count + 2);
  return out;
}

/* --- entries, libraries, weights -------------------------------------------------------------------------------------------------------------- */

static uint32_t weight_number(const reader *r, const place *p, const char *key) {
  for (uint32_t low = 0, high = r->m->weight_count; low < high;) {
    uint32_t middle = low + (high - low) / 2;
    int order = strcmp(key, r->m->weights[middle].key);
    if (!order) return middle;
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  WRONG(r, p, "refers to the weight '%s', which the manifest does not have", shown(key, strlen(key)));
}

/* Returns the author's metadata, which is JSON text in a field. */
static const char *metadata_of(const reader *r, const place *p, const json *object) {
  const char *text = text_of(r, p, object, "metadata", "");
  if (!*text) return "{}";
  json value = json_read(r->a, arena_print(r->a, "%s.metadata", where(r, p)), text, strlen(text));
  if (value.kind != JSON_OBJECT) WRONG(r, p, "metadata: expected an object, got %s", json_words(&value));
  return text;
}

/* Gives each state its name for callers. A step's module has the names of PyTorch; a tensor that the step adds keeps its name, with "step/" before it
 * if a tensor of the module has that name. */
static void label_states(const reader *r, entry_spec *e) {
  bool *taken = TAKE(r->a, e->state_count + 1u, bool); /* whether the name is final */
  for (uint32_t i = 0; i < e->state_count; i++) {
    state_spec *s = &e->state[i];
    taken[i] = e->kind != ENTRY_STEP || !strncmp(s->name, "module.", 7);
    s->label = taken[i] && e->kind == ENTRY_STEP ? s->name + 7 : s->name;
  }
  for (uint32_t i = 0; i < e->state_count; i++)
    for (uint32_t k = 0; !taken[i] && k < e->state_count; k++)
      if (taken[k] && !strcmp(e->state[i].label, e->state[k].label)) {
        e->state[i].label = arena_print(r->a, "step/%s", e->state[i].label);
        k = UINT32_MAX; /* compare again from the first */
      }
}

static bool read_entry(const reader *r, const place *p, const json *value, entry_spec *e) {
  typed(r, p, value, JSON_OBJECT);
  const char *kind = text_of(r, p, value, "kind", NULL);
  if (!strcmp(kind, "module")) e->kind = ENTRY_MODULE;
  else if (!strcmp(kind, "function")) e->kind = ENTRY_FUNCTION;
  else if (!strcmp(kind, "grad")) e->kind = ENTRY_GRAD;
  else if (!strcmp(kind, "step")) e->kind = ENTRY_STEP;
  else return false; /* recorded passes, or a kind of a later version */
  e->name = value->key;
  e->training = truth(r, p, value, "training", true);
  e->standalone = text_of(r, p, value, "standalone", "");
  e->standalones = texts_of(r, p, value, "standalones", false);
  if (e->standalones.count && e->standalones.count + 1u != r->m->target_count)
    WRONG(r, p, "%" PRIu32 " standalones, for %" PRIu32 " further targets", e->standalones.count, r->m->target_count - 1u);
  e->metadata = metadata_of(r, p, value);
  e->wrt = texts_of(r, p, value, "wrt", false);
  const json *names = list(r, p, value, "names", false);
  if (texts_of(r, p, value, "names", false).count != e->wrt.count)
    WRONG(r, p, "%" PRIu32 " names, for %" PRIu32 " gradients", names->count, e->wrt.count);
  e->names = names->raw ? names->raw : "[]";
  e->names_length = names->raw ? names->raw_length : 2;
  e->single = truth(r, p, value, "single", false);
  const json *items = list(r, p, value, "state", true);
  e->state_count = items->count;
  e->state = TAKE(r->a, items->count + 1u, state_spec);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){p, "state", 0}, NULL, i};
    const json *item = typed(r, &each, &items->items[i], JSON_OBJECT);
    state_spec *s = &e->state[i];
    s->name = text_of(r, &each, item, "name", NULL);
    s->weight_name = text_of(r, &each, item, "weight", NULL);
    s->weight = weight_number(r, &each, s->weight_name);
    s->parameter = truth(r, &each, item, "parameter", -1);
  }
  label_states(r, e);
  const json *step = json_get(value, "step");
  if (step && step->kind != JSON_NULL) e->step_of = step_of(r, p, step, e);
  if (!e->step_of != (e->kind != ENTRY_STEP))
    WRONG(r, p, "an entry of kind '%s' %s", kind, e->step_of ? "with a training step" : "without its training step");
  items = list(r, p, value, "variants", true);
  e->variant_count = items->count;
  e->variants = TAKE(r->a, items->count + 1u, variant_spec);
  for (uint32_t i = 0; i < items->count; i++) read_variant(r, &(place){&(place){p, "variants", 0}, NULL, i}, &items->items[i], e, &e->variants[i]);
  if (!e->variant_count) WRONG(r, p, "it has %s", "no variants");
  return true;
}

static void read_build(const reader *r, const place *p, const json *value, build_spec *b) {
  typed(r, p, value, JSON_OBJECT);
  b->member = text_of(r, p, value, "member", NULL);
  b->metadata = text_of(r, p, value, "metadata", NULL);
  b->extern_file = text_of(r, p, value, "extern", NULL);
  const char *members[] = {b->member, b->metadata, b->extern_file};
  for (int i = 0; i < 3; i++)
    if ((i < 2 || *members[i]) && (!manifest_digest(r->m, members[i]) || !strchr(members[i], '/')))
      WRONG(r, p, "refers to the member '%s', which the manifest does not have", SHOWN(members[i]));
  b->needed = texts_of(r, p, value, "needed", true);
  b->operators = texts_of(r, p, value, "operators", false);
  b->glibc = text_of(r, p, value, "glibc", NULL);
  b->glibcxx = text_of(r, p, value, "glibcxx", NULL);
  const json *items = list(r, p, value, "constants", true);
  b->constant_count = items->count;
  b->constants = TAKE(r->a, items->count + 1u, constant_spec);
  for (uint32_t i = 0; i < items->count; i++) {
    place each = {&(place){p, "constants", 0}, NULL, i};
    const json *item = typed(r, &each, &items->items[i], JSON_OBJECT);
    constant_spec *c = &b->constants[i];
    c->name = text_of(r, &each, item, "name", NULL);
    c->weight_name = text_of(r, &each, item, "weight", NULL);
    c->weight = weight_number(r, &each, c->weight_name);
  }
}

static void read_library(const reader *r, const place *p, const json *value, library_spec *l) {
  typed(r, p, value, JSON_OBJECT);
  l->name = value->key;
  l->inputs = tensors(r, p, value, "inputs", NULL);
  l->outputs = tensors(r, p, value, "outputs", NULL);
  const json *builds = list(r, p, value, "builds", false);
  l->build_count = 1 + builds->count;
  if (l->build_count != r->m->target_count) WRONG(r, p, "%" PRIu32 " builds, for %" PRIu32 " targets", l->build_count, r->m->target_count);
  l->builds = TAKE(r->a, l->build_count, build_spec);
  read_build(r, p, value, &l->builds[0]);
  for (uint32_t i = 0; i < builds->count; i++) read_build(r, &(place){&(place){p, "builds", 0}, NULL, i}, &builds->items[i], &l->builds[1 + i]);
}

static int by_key(const void *x, const void *y) { return strcmp(((const weight_spec *)x)->key, ((const weight_spec *)y)->key); }

static const int64_t *integers(const reader *r, const place *p, const json *object, const char *name, uint32_t *count) {
  const json *items = list(r, p, object, name, true);
  int64_t *out = TAKE(r->a, items->count + 1u, int64_t);
  for (uint32_t i = 0; i < items->count; i++) out[i] = typed(r, &(place){&(place){p, name, 0}, NULL, i}, &items->items[i], JSON_INTEGER)->integer;
  *count = items->count;
  return out;
}

static void read_weights(const reader *r, const json *all) {
  r->m->weight_count = all->count;
  r->m->weights = TAKE(r->a, all->count + 1u, weight_spec);
  for (uint32_t i = 0; i < all->count; i++) {
    const json *value = &all->items[i];
    place p = {&(place){NULL, "weights", 0}, value->key, 0};
    typed(r, &p, value, JSON_OBJECT);
    weight_spec *w = &r->m->weights[i];
    uint32_t strides;
    w->key = value->key;
    w->type = dtype_of(r, &p, value);
    w->sha256 = text_of(r, &p, value, "sha256", NULL);
    w->shape = integers(r, &p, value, "shape", &w->rank);
    w->stride = integers(r, &p, value, "stride", &strides);
    if (w->rank != strides || w->rank > 64) WRONG(r, &p, "%" PRIu32 " sizes and %" PRIu32 " strides", w->rank, strides);
    w->shape_texts = TAKE(r->a, w->rank + 1u, const char *);
    for (uint32_t d = 0; d < w->rank; d++) w->shape_texts[d] = arena_print(r->a, "%" PRId64, w->shape[d]);
    const json *fill = json_get(value, "fill");
    w->filled = fill && fill->kind != JSON_NULL;
    if (w->filled) w->fill = number(r, &p, fill);
  }
  for (uint32_t i = 0; i < all->count; i++) {
    const weight_spec *w = &r->m->weights[i];
    int64_t elements = 1;
    for (uint32_t d = 0; d < w->rank; d++)
      if (w->shape[d] < 0 || __builtin_mul_overflow(elements, w->shape[d] ? w->shape[d] : 1, &elements) || elements >= (int64_t)1 << 60)
        WRONG(r, NULL, "weight '%s' has a shape that is too large for a tensor, or negative", SHOWN(w->key));
  }
  qsort(r->m->weights, r->m->weight_count, sizeof *r->m->weights, by_key);
}

static void read_target(const reader *r, const place *p, const json *value, target_spec *t) {
  typed(r, p, value, JSON_OBJECT);
  t->device = text_of(r, p, value, "device", NULL);
  t->machine = text_of(r, p, value, "machine", "x86_64");
  t->name = text_of(r, p, value, "name", "");
  t->cpu_flags = texts_of(r, p, value, "cpu_flags", false);
}

static void read_version(const reader *r, const json *all) {
  const json *version = json_get(all, "format_version");
  if (!version || version->kind != JSON_ARRAY || version->count != 2 || version->items[0].kind != JSON_INTEGER ||
      version->items[1].kind != JSON_INTEGER)
    arena_fail(r->a, AOTB_FORMAT, "manifest.json: format_version: expected [major, minor]");
  if (version->items[0].integer != 1)
    arena_fail(r->a, AOTB_INCOMPATIBLE, "package format %" PRId64 ".%" PRId64 "; this library reads 1.x", version->items[0].integer,
               version->items[1].integer);
  r->m->minor = version->items[1].integer;
  texts features = texts_of(r, NULL, all, "required_features", true);
  for (uint32_t i = 0; i < features.count; i++)
    if (strcmp(features.at[i], "fill") && strcmp(features.at[i], "consumes"))
      arena_fail(r->a, AOTB_INCOMPATIBLE, "needs the feature '%s', which this library does not know: install a newer one",
                 shown(features.at[i], strlen(features.at[i])));
}

static void check_members(const manifest *m, const archive *z) {
  bool weights = false;
  for (uint32_t i = 0; i < m->member_count; i++) {
    const char *name = m->members[i].name;
    const member *found = archive_find(z, name);
    if (!found) arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s is missing", SHOWN(name));
    if (found->size != m->members[i].size)
      arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s has %" PRIu64 " bytes, expected %" PRIu64, SHOWN(name), found->size, m->members[i].size);
    weights = weights || !strcmp(name, WEIGHTS);
  }
  if (z->count != m->member_count + 1) /* all listed members exist, so an additional one is not listed */
    for (uint32_t i = 0; i < z->count; i++)
      if (strcmp(z->members[i].name, MANIFEST) && !manifest_digest(m, z->members[i].name))
        arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s is not in the manifest", z->members[i].name);
  if (weights != m->has_weights)
    arena_fail(z->a, AOTB_FORMAT, "corrupt: has_weights is %s, but %s says otherwise", m->has_weights ? "true" : "false", WEIGHTS);
}

/* Since format 1.15 a manifest ends with ,"sha256":"DIGEST"}, the digest of all bytes before that comma. */
static bool check_digest(arena *a, const char *text, size_t length) {
  static const char before[] = ",\"sha256\":\"", behind[] = "\"}";
  size_t tail = sizeof before - 1 + 64 + sizeof behind - 1;
  const char *end = text + length - tail, *stated = end + sizeof before - 1;
  if (length < tail || memcmp(end, before, sizeof before - 1) || memcmp(stated + 64, behind, sizeof behind - 1)) return false;
  char digest[65];
  sha256 h;
  sha256_begin(&h);
  sha256_add(&h, text, length - tail);
  sha256_end(&h, digest);
  if (memcmp(digest, stated, 64))
    arena_fail(a, AOTB_FORMAT, "corrupt: manifest.json: SHA-256 is %s, expected %.64s. The file is damaged: copy or export it again.", digest,
               stated);
  return true;
}

void manifest_read(manifest *m, const archive *z, const char *text, size_t length) {
  *m = (manifest){0};
  reader reading = {z->a, m}, *r = &reading;
  bool sealed = check_digest(r->a, text, length);
  json all = json_read(r->a, "manifest.json", text, length);
  typed(r, NULL, &all, JSON_OBJECT);
  read_version(r, &all);
  if (m->minor >= SEALED_SINCE && !sealed)
    arena_fail(r->a, AOTB_FORMAT, "corrupt: manifest.json of format 1.%" PRId64 " does not end with its SHA-256", m->minor);
  m->torch = text_of(r, NULL, &all, "torch", NULL);
  m->metadata = metadata_of(r, NULL, &all);
  m->has_weights = truth(r, NULL, &all, "has_weights", true);
  const json *items = field(r, NULL, &all, "members", JSON_OBJECT, true);
  m->member_count = items->count;
  m->members = arena_take(r->a, items->count + 1u, sizeof *m->members);
  for (uint32_t i = 0; i < items->count; i++) {
    place p = {&(place){NULL, "members", 0}, items->items[i].key, 0};
    const json *value = typed(r, &p, &items->items[i], JSON_OBJECT);
    int64_t size = integer(r, &p, value, "size", NULL);
    if (size < 0) WRONG(r, &p, "%" PRId64 " bytes", size);
    m->members[i].name = value->key;
    m->members[i].size = (uint64_t)size;
    m->members[i].sha256 = text_of(r, &p, value, "sha256", NULL);
  }
  check_members(m, z);
  items = list(r, NULL, &all, "targets", false);
  m->target_count = 1 + items->count;
  m->targets = TAKE(r->a, m->target_count, target_spec);
  read_target(r, &(place){NULL, "target", 0}, field(r, NULL, &all, "target", JSON_OBJECT, true), &m->targets[0]);
  for (uint32_t i = 0; i < items->count; i++) read_target(r, &(place){&(place){NULL, "targets", 0}, NULL, i}, &items->items[i], &m->targets[1 + i]);
  read_weights(r, field(r, NULL, &all, "weights", JSON_OBJECT, true));
  items = field(r, NULL, &all, "libraries", JSON_OBJECT, true);
  m->library_count = items->count;
  m->libraries = TAKE(r->a, items->count + 1u, library_spec);
  for (uint32_t i = 0; i < items->count; i++)
    read_library(r, &(place){&(place){NULL, "libraries", 0}, items->items[i].key, 0}, &items->items[i], &m->libraries[i]);
  items = field(r, NULL, &all, "entries", JSON_OBJECT, true);
  m->entries = TAKE(r->a, items->count + 1u, entry_spec);
  for (uint32_t i = 0; i < items->count; i++)
    if (read_entry(r, &(place){&(place){NULL, "entries", 0}, items->items[i].key, 0}, &items->items[i], &m->entries[m->entry_count]))
      m->entry_count++;
}

library_spec *manifest_library(const manifest *m, const char *name) {
  for (uint32_t i = 0; i < m->library_count; i++)
    if (!strcmp(m->libraries[i].name, name)) return &m->libraries[i];
  return NULL;
}

const char *manifest_digest(const manifest *m, const char *name) {
  for (uint32_t i = 0; i < m->member_count; i++)
    if (!strcmp(m->members[i].name, name)) return m->members[i].sha256;
  return NULL;
}
