/* Native code checks nothing, so what a plan says of a library is compared with what the manifest says of that library, of the variant's own tensors and
 * of the weights. Everything is stated at least twice, so that a field which is not as it was written contradicts another one. */
#include "manifest_checks.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MANIFEST "extra/aot_backward/manifest.json"
#define WEIGHTS "extra/aot_backward/weights.safetensors"

typedef struct {
  arena *a;
  const manifest *m;
  const entry_spec *entry;
  const variant_spec *variant;
  const char *role; /* of the plan that is looked at, with the entry and the variant before it */
} checker;

#define WRONG(c, text, ...) arena_fail((c)->a, AOTB_FORMAT, "corrupt: %s" text, (c)->role, __VA_ARGS__)
#define SHOWN(text) shown(text, strlen(text))

static bool begins(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

/* --- members ---------------------------------------------------------------------------------------------------------------------------------- */

void check_members(const manifest *m, const archive *z) {
  bool weights = false;
  for (uint32_t i = 0; i < m->member_count; i++) {
    const char *name = m->members[i].name;
    const member *found = archive_find(z, name);
    if (!found) arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s is missing", SHOWN(name));
    if (found->size != m->members[i].size)
      arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s has %" PRIu64 " bytes, expected %" PRIu64, SHOWN(name), found->size, m->members[i].size);
    if (strspn(m->members[i].sha256, "0123456789abcdef") != 64 || m->members[i].sha256[64])
      arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s has no SHA-256", SHOWN(name));
    weights = weights || !strcmp(name, WEIGHTS);
  }
  if (z->count != m->member_count + 1) /* listed names are different, and each was found: what is more is not listed */
    for (uint32_t i = 0; i < z->count; i++)
      if (strcmp(z->members[i].name, MANIFEST) && !manifest_digest(m, z->members[i].name))
        arena_fail(z->a, AOTB_FORMAT, "corrupt: member %s is not in the manifest", z->members[i].name);
  if (weights != m->has_weights)
    arena_fail(z->a, AOTB_FORMAT, "corrupt: has_weights is %s, but %s says otherwise", m->has_weights ? "true" : "false", WEIGHTS);
}

/* --- libraries and weights -------------------------------------------------------------------------------------------------------------------- */

static bool is_version(const char *text) {
  size_t n = strlen(text);
  return n < 40 && strspn(text, "0123456789.") == n && (!n || (text[0] != '.' && text[n - 1] != '.' && !strstr(text, "..")));
}

static const char *level(const target_spec *t) {
  const char *colon = strchr(t->name, ':');
  return colon && colon[1] ? colon + 1 : "default";
}

static void check_build(const checker *c, const library_spec *l, const build_spec *b, const char *stem) {
  const char *member_name = arena_print(c->a, "data/aotinductor/%s/%s.so", stem, stem),
             *metadata = arena_print(c->a, "data/aotinductor/%s/%s_metadata.json", stem, stem);
  const char *extern_file = arena_print(c->a, "data/aotinductor/%s/%s.json", stem, stem);
  if (strcmp(b->member, member_name) || strcmp(b->metadata, metadata) || (*b->extern_file && strcmp(b->extern_file, extern_file)))
    WRONG(c, "library %s: its members must be %s, _metadata.json and .json, not %s", l->name, member_name, SHOWN(b->member));
  const char *all[] = {b->member, b->metadata, b->extern_file};
  for (int i = 0; i < 3; i++)
    if (*all[i] && !manifest_digest(c->m, all[i])) WRONG(c, "library %s: member %s is missing", l->name, all[i]);
  if (!is_version(b->glibc) || !is_version(b->glibcxx))
    WRONG(c, "library %s: '%s' and '%s' are not both versions", l->name, SHOWN(b->glibc), SHOWN(b->glibcxx));
}

static void check_libraries(const checker *c) {
  const manifest *m = c->m;
  for (uint32_t i = 0; i < m->target_count; i++) {
    const char *device = m->targets[i].device, *own = level(&m->targets[i]);
    if (strcmp(device, "cpu") && strcmp(device, "cuda")) WRONG(c, "its code is for the device '%s'; expected cpu or cuda", SHOWN(device));
    size_t n = strlen(own);
    if (i && (n > 40 || strspn(own, "abcdefghijklmnopqrstuvwxyz0123456789_") != n))
      WRONG(c, "its targets are not told apart by their names: '%s'", SHOWN(own));
    for (uint32_t k = 1; i && k < i; k++)
      if (!strcmp(own, level(&m->targets[k]))) WRONG(c, "its targets are not told apart by their names: '%s'", SHOWN(own));
  }
  for (uint32_t i = 0; i < m->library_count; i++) {
    const library_spec *l = &m->libraries[i];
    size_t n = strlen(l->name);
    if (!n || n > 200 || strspn(l->name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != n || *l->name == '.' ||
        *l->name == '-')
      WRONG(c, "'%s' is not a name for a library", SHOWN(l->name));
    if (l->build_count != m->target_count)
      WRONG(c, "library %s has code for %" PRIu32 " targets; there are %" PRIu32, l->name, l->build_count, m->target_count);
    for (uint32_t k = 0; k < l->build_count; k++)
      check_build(c, l, &l->builds[k], k ? arena_print(c->a, "%s.%s", l->name, level(&m->targets[k])) : l->name);
  }
  /* Members follow from the names: two libraries can be one member only where one is called as the other with a level behind it. */
  for (uint32_t i = 0; i < m->library_count; i++)
    for (uint32_t k = 1; k < m->target_count; k++) {
      const library_spec *same = manifest_library(m, arena_print(c->a, "%s.%s", m->libraries[i].name, level(&m->targets[k])));
      if (same) WRONG(c, "the libraries %s and %s are the same member", m->libraries[i].name, same->name);
    }
}

static void check_weights(const checker *c) {
  for (uint32_t i = 0; i < c->m->weight_count; i++) {
    const weight_spec *w = &c->m->weights[i];
    int64_t elements = 1;
    for (uint32_t d = 0; d < w->rank; d++)
      if (w->shape[d] < 0 || __builtin_mul_overflow(elements, w->shape[d] ? w->shape[d] : 1, &elements) || elements >= (int64_t)1 << 60)
        WRONG(c, "weight '%s' has a shape that no tensor has", SHOWN(w->key));
    if (!w->filled) continue;
    bool whole = w->fill == floor(w->fill);
    char code = "iuf?bcB"[w->type->dl.code];
    bool right = code == 'f' || code == 'b' || code == 'c' ||
                 (code == 'B' ? w->fill == 0 || w->fill == 1
                              : whole && fabs(w->fill) < ldexp(1, w->type->dl.bits - (code == 'i')) && (code == 'i' || w->fill >= 0));
    if (!right) WRONG(c, "weight '%s' is filled with %g, which %s cannot hold", SHOWN(w->key), w->fill, w->type->name);
  }
}

/* --- sizes ------------------------------------------------------------------------------------------------------------------------------------ */

/* One size beside another: written the same, or of the same value for three assignments of the variant's symbols. `names` are those that `size` is
 * written in. */
static bool value_at(const checker *c, const expression *size, const char *const *names, uint32_t count, int factor, int64_t *out) {
  int64_t values[256];
  if (!size->code) return expression_value(size, NULL, out);
  if (count > 256) return false;
  for (uint32_t i = 0; i < count; i++) {
    values[i] = 0;
    for (uint32_t k = 0; k < c->variant->symbol_count; k++) {
      const symbol_spec *s = &c->variant->symbols[k];
      if (!strcmp(s->name, names[i])) values[i] = (s->minimum > 2 ? s->minimum : 2) + (int64_t)factor * (k + 1);
    }
  }
  return expression_value(size, values, out);
}

static bool equal_size(const checker *c, const expression *own, const expression *of_library, const library_spec *l) {
  if (!strcmp(own->text, of_library->text)) return true;
  if (!own->code && !of_library->code) return own->number == of_library->number;
  static const int factors[] = {0, 7, 1009};
  for (int i = 0; i < 3; i++) {
    int64_t one, other;
    if (!value_at(c, own, c->variant->symbol_names, c->variant->symbol_count, factors[i], &one)) return false;
    if (!value_at(c, of_library, l ? l->symbol_names : c->variant->symbol_names, l ? l->symbol_count : c->variant->symbol_count, factors[i], &other))
      return false;
    if (one != other) return false;
  }
  return true;
}

static bool is_number(const expression *e, int64_t value) { return !e->code && e->number == value; }

static bool same_shape(const checker *c, const tensor_spec *own, const tensor_spec *of_library, const library_spec *l) {
  if (own->rank != of_library->rank) return false;
  for (uint32_t d = 0; d < own->rank; d++)
    if (!equal_size(c, &own->shape[d], &of_library->shape[d], l)) return false;
  return true;
}

/* Dtype, device, shape and strides, but for strides by which no second element is reached. `l`: the library whose symbols `wanted` is written in. */
static bool fits(const checker *c, const tensor_spec *given, const tensor_spec *wanted, const library_spec *l) {
  if (given->type != wanted->type || given->on_cpu != wanted->on_cpu || !same_shape(c, given, wanted, l)) return false;
  bool right = true;
  for (uint32_t d = 0; d < wanted->rank; d++) {
    if (is_number(&wanted->shape[d], 0)) return true;
    if (!is_number(&wanted->shape[d], 1)) right = right && equal_size(c, &given->stride[d], &wanted->stride[d], l);
  }
  return right;
}

static tensor_spec of_weight(const checker *c, const weight_spec *w) {
  tensor_spec out = {.name = w->key, .type = w->type, .on_cpu = !strcmp(c->m->targets[0].device, "cpu"), .rank = w->rank};
  expression *sizes = TAKE(c->a, 2u * w->rank + 1u, expression);
  for (uint32_t d = 0; d < w->rank; d++) {
    sizes[d] = expression_number(c->a, w->shape[d]);
    sizes[w->rank + d] = expression_number(c->a, w->stride[d]);
  }
  out.shape = sizes;
  out.stride = sizes + w->rank;
  return out;
}

static const state_spec *state_named(const entry_spec *e, const char *name) {
  for (uint32_t i = 0; i < e->state_count; i++)
    if (!strcmp(e->state[i].name, name)) return &e->state[i];
  return NULL;
}

static bool is_floating(const dtype *type) { return type->dl.code == 2 || type->dl.code == 4 || type->dl.code == 5; }

/* --- plans ------------------------------------------------------------------------------------------------------------------------------------ */

static bool called(const char *name, const char *one, const char *other) { return !strcmp(name, one) || (other && !strcmp(name, other)); }

/* What an operand is, and the names that a library which is compiled for it may call its input by. */
static const tensor_spec *operand_of(const checker *c, const source *from, const char **one, const char **other, const library_spec **in) {
  const variant_spec *v = c->variant;
  *other = NULL;
  *in = NULL;
  if (from->from == FROM_INPUT && from->number < v->inputs.count) {
    *one = v->inputs.at[from->number].name;
    return &v->inputs.at[from->number];
  }
  if (from->from == FROM_COTANGENT && from->number < v->cotangents.count) {
    const char *name = v->cotangents.at[from->number].name;
    *one = begins(name, "the ") ? name + 4 : name;
    return &v->cotangents.at[from->number];
  }
  if (from->from != FROM_SAVED || !v->forward || from->number >= v->forward->saved.count)
    WRONG(c, "the operand %s does not exist", SHOWN(from->text));
  const source *saved = &v->forward->saved.at[from->number];
  const tensor_specs *known = saved->from == FROM_INPUT ? &v->inputs : &v->forward->library->outputs;
  if (saved->from != FROM_INPUT) *in = v->forward->library;
  const tensor_spec *spec = &known->at[saved->number];
  *other = arena_print(c->a, "saved[%" PRIu32 "]", from->number);
  *one = arena_print(c->a, "%s = %s", *other, spec->name);
  for (uint32_t i = 0; v->backward && i < v->backward->consumes_count; i++)
    if (v->backward->consumes[i] == from->number) *one = arena_print(c->a, "%s, consumed", *other);
  return spec;
}

static void check_operands(const checker *c, const plan_spec *p, bool backward) {
  const library_spec *l = p->library;
  if (p->operands.count != l->inputs.count)
    WRONG(c, "the library %s takes %" PRIu32 " tensors; %" PRIu32 " operands are listed", l->name, l->inputs.count, p->operands.count);
  for (uint32_t i = 0; i < p->operands.count; i++) {
    const source *from = &p->operands.at[i];
    const tensor_spec *wanted = &l->inputs.at[i];
    if (from->from == FROM_SIZE) {
      if (wanted->rank != 2 || !is_number(&wanted->shape[1], 0) || !equal_size(c, &from->size, &wanted->shape[0], l))
        WRONG(c, "%s is passed where the library takes %s", SHOWN(from->text), SHOWN(wanted->name));
      continue;
    }
    if (from->from != FROM_INPUT && !(backward && (from->from == FROM_SAVED || from->from == FROM_COTANGENT)))
      WRONG(c, "'%s' is no operand of it", SHOWN(from->text));
    const char *one, *other;
    const library_spec *in;
    const tensor_spec *given = operand_of(c, from, &one, &other, &in);
    bool same = in ? given->type == wanted->type && given->on_cpu == wanted->on_cpu && given->rank == wanted->rank : fits(c, given, wanted, l);
    for (uint32_t d = 0; same && in && d < wanted->rank; d++) /* of two libraries, each in its own symbols' order */
      for (int f = 0; f < 3 && same; f++) {
        static const int factors[] = {0, 7, 1009};
        int64_t x, y;
        same = value_at(c, &given->shape[d], in->symbol_names, in->symbol_count, factors[f], &x) &&
               value_at(c, &wanted->shape[d], l->symbol_names, l->symbol_count, factors[f], &y) && x == y;
        if (same && x > 1)
          same = value_at(c, &given->stride[d], in->symbol_names, in->symbol_count, factors[f], &x) &&
                 value_at(c, &wanted->stride[d], l->symbol_names, l->symbol_count, factors[f], &y) && x == y;
      }
    if (!same || !called(wanted->name, one, other))
      WRONG(c, "%s is %s; the library takes %s, or another tensor, there", SHOWN(from->text), SHOWN(one), SHOWN(wanted->name));
  }
}

/* What the constant of a library is called that is the state `name`, but for '_' at the end. */
static bool is_spelled(const char *constant, const char *name) {
  size_t n = strlen(constant), k = strlen(name);
  if (*name >= '0' && *name <= '9') {
    if (!begins(constant, "constant_")) return false;
    constant += 9;
    n -= 9;
  }
  while (n && constant[n - 1] == '_') n--;
  size_t same = 0;
  for (size_t i = 0; i < k; i++) {
    unsigned char ch = (unsigned char)name[i];
    if (ch >= 0x80 && ch < 0xC0) continue; /* a character of several bytes is one '_' */
    bool kept = (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch >= '0' && ch <= '9');
    char expected = kept ? (char)ch : '_';
    if (same < n && constant[same] != expected) return false;
    if (same >= n && expected != '_') return false;
    same++;
  }
  return same >= n;
}

static bool listed(const checker *c, const texts *names, uint32_t weight) {
  for (uint32_t i = 0; i < names->count; i++) {
    const state_spec *s = state_named(c->entry, names->at[i]);
    if (s && s->weight == weight) return true;
  }
  return false;
}

static void check_constants(const checker *c, const plan_spec *p) {
  const texts *sides[] = {&p->reads, &p->writes};
  for (int k = 0; k < 2; k++)
    for (uint32_t i = 0; i < sides[k]->count; i++)
      if (!state_named(c->entry, sides[k]->at[i])) WRONG(c, "it reads or writes '%s', which is no state", SHOWN(sides[k]->at[i]));
  for (uint32_t n = 0; n < p->library->build_count; n++) {
    const build_spec *b = &p->library->builds[n];
    for (uint32_t i = 0; i < b->constant_count; i++) {
      const constant_spec *k = &b->constants[i];
      bool own = false, named_so = false, other_named_so = false;
      for (uint32_t s = 0; s < c->entry->state_count; s++) {
        const state_spec *state = &c->entry->state[s];
        bool spelled = is_spelled(k->name, state->name);
        own = own || state->weight == k->weight;
        named_so = named_so || (spelled && state->weight == k->weight);
        other_named_so = other_named_so || (spelled && state->weight != k->weight);
      }
      for (uint32_t j = 0; j < i; j++)
        if (!strcmp(b->constants[j].name, k->name)) WRONG(c, "the library's constant '%s' is bound twice", SHOWN(k->name));
      if (own && other_named_so && !named_so) WRONG(c, "the library's constant '%s' is bound to '%s'", SHOWN(k->name), SHOWN(k->weight_name));
      if (own && !listed(c, &p->reads, k->weight)) WRONG(c, "it is bound to the weight '%s', which it is not said to read", SHOWN(k->weight_name));
    }
    for (int side = 0; side < 2; side++)
      for (uint32_t i = 0; i < sides[side]->count; i++) {
        uint32_t weight = state_named(c->entry, sides[side]->at[i])->weight;
        bool bound = false;
        for (uint32_t k = 0; k < b->constant_count; k++) bound = bound || b->constants[k].weight == weight;
        if (!bound) WRONG(c, "it reads or writes '%s', to which its library is not bound", SHOWN(sides[side]->at[i]));
      }
  }
}

/* Notes that result `number` of the library is used, and whether its name says so. `stated`: how many of its names were tried, and whether one fits. */
typedef struct {
  bool used, fits;
  const char *first;
} use;

static const tensor_spec *result(const checker *c, const plan_spec *p, use *uses, uint32_t number, const char *one, const char *other) {
  if (!p->library || number >= p->library->outputs.count) WRONG(c, "%s is result %" PRIu32 " of the library, which has fewer", SHOWN(one), number);
  const tensor_spec *made = &p->library->outputs.at[number];
  uses[number].used = true;
  uses[number].fits = uses[number].fits || called(made->name, one, other);
  if (!uses[number].first) uses[number].first = one;
  return made;
}

static void check_gradients(const checker *c, const plan_spec *p, use *uses) {
  const variant_spec *v = c->variant;
  for (uint32_t i = 0; i < p->gradient_count; i++) {
    const gradient_spec *g = &p->gradients[i];
    for (uint32_t k = 0; k < i; k++)
      if (!strcmp(p->gradients[k].of, g->of)) WRONG(c, "it gives the gradient of '%s' twice", SHOWN(g->of));
    tensor_spec what;
    const char *label;
    if (begins(g->of, "parameter:")) {
      const state_spec *s = state_named(c->entry, g->of + 10);
      if (!s || !s->parameter) WRONG(c, "'%s' is neither an input nor a parameter", SHOWN(g->of));
      what = of_weight(c, &c->m->weights[s->weight]);
      label = s->name;
    } else {
      unsigned long number = begins(g->of, "input:") && g->of[6] ? strtoul(g->of + 6, NULL, 10) : ULONG_MAX;
      if (number >= v->inputs.count || strcmp(g->of, arena_print(c->a, "input:%lu", number)))
        WRONG(c, "'%s' is neither an input nor a parameter", SHOWN(g->of));
      what = v->inputs.at[number];
      label = what.name;
    }
    if (!is_floating(what.type)) WRONG(c, "it gives a gradient of %s, which is of %s", SHOWN(label), what.type->name);
    const char *reached = "";
    for (uint32_t k = 0; k < g->cotangent_count; k++) {
      if (g->cotangents[k] >= v->cotangents.count)
        WRONG(c, "the gradient of %s depends on the incoming gradient %" PRIu32, SHOWN(label), g->cotangents[k]);
      reached = arena_print(c->a, "%s%s%" PRIu32, reached, k ? ", " : "", g->cotangents[k]);
    }
    if (g->from.from == FROM_NOTHING) continue;
    if (g->from.from != FROM_RESULT) WRONG(c, "the gradient of %s is '%s', which is no result", SHOWN(label), SHOWN(g->from.text));
    const char *one = arena_print(c->a, "gradient of %s from %s", label, reached), *other = arena_print(c->a, "gradient of %s", label);
    const tensor_spec *given = result(c, p, uses, g->from.number, one, other);
    if (given->type != what.type || !same_shape(c, &what, given, p->library))
      WRONG(c, "the gradient of %s is %s, which is another tensor", SHOWN(label), SHOWN(g->from.text));
  }
}

static void check_results(const checker *c, const plan_spec *p, const char *role, use *uses) {
  const variant_spec *v = c->variant;
  bool backward = !strcmp(role, "backward");
  uint32_t expected = backward ? 0 : v->outputs.count;
  if (p->outputs.count != expected) WRONG(c, "it gives %" PRIu32 " outputs; there are %" PRIu32, p->outputs.count, expected);
  for (uint32_t i = 0; i < expected; i++) {
    const source *from = &p->outputs.at[i];
    const tensor_spec *output = &v->outputs.at[i];
    bool right = false;
    if (from->from == FROM_RESULT) right = fits(c, output, result(c, p, uses, from->number, output->name, NULL), p->library);
    else if (from->from == FROM_INPUT) right = from->number < v->inputs.count && fits(c, &v->inputs.at[from->number], output, NULL);
    else if (from->from == FROM_PARAMETER) {
      const state_spec *s = state_named(c->entry, from->text + 10);
      tensor_spec held = s ? of_weight(c, &c->m->weights[s->weight]) : (tensor_spec){0};
      right = s && fits(c, &held, output, NULL);
    }
    if (!right) WRONG(c, "%s is '%s', which is another tensor, or none", SHOWN(output->name), SHOWN(from->text));
  }
  if (p->saved.count && strcmp(role, "forward")) WRONG(c, "it saves %" PRIu32 " tensors, which only a forward does", p->saved.count);
  for (uint32_t i = 0; i < p->saved.count; i++) {
    const source *from = &p->saved.at[i];
    if (from->from == FROM_RESULT) result(c, p, uses, from->number, arena_print(c->a, "saved[%" PRIu32 "]", i), NULL);
    else if (from->from != FROM_INPUT || from->number >= v->inputs.count)
      WRONG(c, "saved[%" PRIu32 "] is '%s', which does not exist", i, SHOWN(from->text));
  }
  if (p->gradient_count && !backward && strcmp(role, "gradient"))
    WRONG(c, "it gives %" PRIu32 " gradients, which only a backward does", p->gradient_count);
  check_gradients(c, p, uses);
  bool strict = backward || !strcmp(role, "forward") || !strcmp(role, "inference");
  for (uint32_t i = 0; p->library && i < p->library->outputs.count; i++) {
    const char *name = p->library->outputs.at[i].name;
    bool stated = begins(name, "output[") || begins(name, "saved[") || begins(name, "gradient of ");
    if (uses[i].used && !uses[i].fits && (strict || stated))
      WRONG(c, "%s is result %" PRIu32 " of the library, which is '%s'", SHOWN(uses[i].first), i, SHOWN(name));
  }
}

/* What a step's library gives behind its outputs: the norm, then whether all was finite. */
static void check_flags(const checker *c, const plan_spec *p, const use *uses, bool norm, bool finite) {
  bool expected[2] = {norm, finite};
  int at = 0;
  for (uint32_t i = 0; i < p->library->outputs.count; i++) {
    const tensor_spec *t = &p->library->outputs.at[i];
    if (uses && uses[i].used) continue;
    while (at < 2 && !expected[at]) at++;
    if (at == 2 || t->rank || (t->type->dl.code == 6) != (at == 1))
      WRONG(c, "its library gives '%s', which is nothing that the plan gives", SHOWN(t->name));
    at++;
  }
  while (at < 2 && !expected[at]) at++;
  if (at < 2) WRONG(c, "its library does not give %s", at ? "whether all gradients were finite" : "the norm of the gradients");
}

static void check_plan(checker *c, const plan_spec *p, const char *role) {
  const step_spec *s = c->entry->step_of;
  c->role = arena_print(c->a, "%s, %s: ", c->role, role);
  uint32_t made = p->library ? p->library->outputs.count : 0;
  use *uses = TAKE(c->a, made + 1u, use);
  bool whole = !strcmp(role, "step"), adds = !strcmp(role, "accumulate"), backward = !strcmp(role, "backward");
  if (p->library) {
    for (uint32_t i = 0; i < p->library->symbol_count; i++) { /* each must be one of the variant's */
      bool known = false;
      for (uint32_t k = 0; k < c->variant->symbol_count; k++) known = known || !strcmp(c->variant->symbols[k].name, p->library->symbol_names[i]);
      if (!known) WRONG(c, "the library %s needs the unknown symbol '%s'", p->library->name, SHOWN(p->library->symbol_names[i]));
    }
    check_operands(c, p, backward);
    check_constants(c, p);
  }
  check_results(c, p, role, uses);
  if (whole || adds) {
    if (!p->library) WRONG(c, "%s calls nothing", role);
    check_flags(c, p, uses, whole && s->norm, whole && s->finite);
  } else
    for (uint32_t i = 0; i < made; i++)
      if (!uses[i].used)
        WRONG(c, "result %" PRIu32 " of the library, '%s', is nothing that the plan gives", i, SHOWN(p->library->outputs.at[i].name));
  for (uint32_t i = 0; i < p->consumes_count; i++)
    if (!backward || !c->variant->forward || p->consumes[i] >= c->variant->forward->saved.count)
      WRONG(c, "it consumes the saved tensor %" PRIu32 ", which does not exist", p->consumes[i]);
}

/* --- variants --------------------------------------------------------------------------------------------------------------------------------- */

static void check_symbols(const checker *c) {
  const variant_spec *v = c->variant;
  if (v->symbol_count > 256) WRONG(c, "%" PRIu32 " symbols", v->symbol_count);
  for (uint32_t i = 0; i < v->symbol_count; i++) {
    const symbol_spec *s = &v->symbols[i];
    static const char *const taken[] = {"max", "min", "and", "or", "not", "if", "else", "in", "is", "lambda", "None", "True", "False"};
    size_t n = strlen(s->name);
    bool right = n && strspn(s->name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789") == n && (*s->name < '0' || *s->name > '9');
    for (size_t k = 0; k < sizeof taken / sizeof *taken; k++) right = right && strcmp(s->name, taken[k]);
    for (uint32_t k = 0; k < i; k++) right = right && strcmp(s->name, v->symbols[k].name);
    if (!right) WRONG(c, "'%s' is not a name for a symbol, or occurs twice", SHOWN(s->name));
    if (s->input < 0 || s->input >= v->inputs.count || s->dim < 0 || s->dim >= v->inputs.at[s->input].rank)
      WRONG(c, "symbol %s is read from dimension %" PRId64 " of input %" PRId64 ", which does not exist", s->name, s->dim, s->input);
    if (s->scale < 1) WRONG(c, "symbol %s has scale %" PRId64, s->name, s->scale);
    if (s->minimum < 0 || s->maximum < s->minimum) WRONG(c, "symbol %s is from %" PRId64 " to %" PRId64, s->name, s->minimum, s->maximum);
  }
}

static void check_cotangents(const checker *c) {
  const variant_spec *v = c->variant;
  if (v->differentiable_count != v->cotangents.count)
    WRONG(c, "%" PRIu32 " incoming gradients are listed, of %" PRIu32 " outputs", v->cotangents.count, v->differentiable_count);
  for (uint32_t i = 0; i < v->differentiable_count; i++) {
    uint32_t number = v->differentiable[i];
    if (number >= v->outputs.count) WRONG(c, "output %" PRIu32 " has a gradient; there are %" PRIu32 " outputs", number, v->outputs.count);
    for (uint32_t k = 0; k < i; k++)
      if (v->differentiable[k] == number) WRONG(c, "output %" PRIu32 " has two gradients", number);
    const tensor_spec *o = &v->outputs.at[number], *g = &v->cotangents.at[i];
    bool same = o->type == g->type && o->on_cpu == g->on_cpu && same_shape(c, o, g, NULL);
    if (!same || !begins(g->name, "the gradient of ") || strcmp(g->name + 16, o->name))
      WRONG(c, "%s is listed as the gradient of %s", SHOWN(g->name), SHOWN(o->name));
  }
}

static void check_variant(checker *c, const variant_spec *v, uint32_t number) {
  const entry_spec *e = c->entry;
  const char *before = c->role = arena_print(c->a, "entry %s, variant %" PRIu32 ": ", e->name, number);
  c->variant = v;
  check_symbols(c);
  check_cotangents(c);
  if (v->verdict_count != c->m->target_count) WRONG(c, "it has %" PRIu32 " verdicts, for %" PRIu32 " targets", v->verdict_count, c->m->target_count);
  for (uint32_t i = 0; i < v->shared_count; i++) {
    const shared_spec *s = &v->shared[i];
    if (s->output < 0 || s->base < 0 || s->output == s->base || s->output >= v->outputs.count || s->base >= v->outputs.count ||
        v->outputs.at[s->output].type != v->outputs.at[s->base].type)
      WRONG(c, "output %" PRId64 " cannot lie in the memory of output %" PRId64, s->output, s->base);
    if (s->stride && s->rank != v->outputs.at[s->output].rank) WRONG(c, "output %" PRId64 " has %" PRIu32 " strides", s->output, s->rank);
  }
  const struct {
    const char *role;
    const plan_spec *plan;
    entry_kind of;
  } plans[] = {{"forward", v->forward, ENTRY_MODULE}, {"backward", v->backward, ENTRY_MODULE}, {"inference", v->inference, ENTRY_MODULE},
               {"gradient", v->gradient, ENTRY_GRAD}, {"step", v->step, ENTRY_STEP},           {"accumulate", v->accumulate, ENTRY_STEP}};
  for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
    if (plans[i].plan && plans[i].of != e->kind) WRONG(c, "an entry of its kind has no plan '%s'", plans[i].role);
  bool waits = e->step_of && e->step_of->update;
  bool right = e->kind == ENTRY_MODULE ? (v->backward ? v->forward != NULL : v->forward || v->inference)
               : e->kind == ENTRY_GRAD ? v->gradient != NULL
                                       : v->step && !v->accumulate == !waits;
  if (!right) WRONG(c, "it lacks the plans with which it could be called%s", "");
  for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
    if (plans[i].plan) {
      c->role = before;
      check_plan(c, plans[i].plan, plans[i].role);
    }
}

/* --- entries ---------------------------------------------------------------------------------------------------------------------------------- */

static bool is_path(const char *name) { /* no part between dots is empty */
  size_t n = strlen(name);
  return n && name[0] != '.' && name[n - 1] != '.' && !strstr(name, "..");
}

/* A weight is called as a state that is bound to it, maybe with the entry's name before that. */
static bool is_named(const checker *c, uint32_t weight) {
  const char *key = c->m->weights[weight].key;
  for (uint32_t i = 0; i < c->m->entry_count; i++) {
    const entry_spec *e = &c->m->entries[i];
    size_t n = strlen(e->name);
    for (uint32_t k = 0; k < e->state_count; k++) {
      if (e->state[k].weight != weight) continue;
      if (!strcmp(key, e->state[k].name) || (!strncmp(key, e->name, n) && key[n] == '.' && !strcmp(key + n + 1, e->state[k].name))) return true;
    }
  }
  return false;
}

static void check_state(const checker *c) {
  const entry_spec *e = c->entry;
  const state_spec **first = TAKE(c->a, c->m->weight_count + 1u, const state_spec *);
  for (uint32_t i = 0; i < e->state_count; i++) {
    const state_spec *s = &e->state[i];
    const weight_spec *w = &c->m->weights[s->weight];
    if (!is_path(s->name)) WRONG(c, "'%s' is no name for a part of a module", SHOWN(s->name));
    if (state_named(e, s->name) != s) WRONG(c, "the state '%s' is listed twice", SHOWN(s->name));
    if (!first[s->weight]) first[s->weight] = s;
    if (first[s->weight]->parameter != s->parameter || first[s->weight]->requires_grad != s->requires_grad)
      WRONG(c, "the state '%s' is another kind of tensor than the one that it is tied to", SHOWN(s->name));
    if (s->requires_grad && !is_floating(w->type)) WRONG(c, "the state '%s' requires a gradient and is of %s", SHOWN(s->name), w->type->name);
    for (uint32_t d = 0; s->requires_grad && d < w->rank; d++)
      if (w->shape[d] > 1 && w->stride[d] == 0)
        WRONG(c, "the state '%s' requires a gradient, and its strides put several elements in one place", SHOWN(s->name));
    if (!is_named(c, s->weight))
      WRONG(c, "the state '%s' is bound to the weight '%s', which is no state of that name", SHOWN(s->name), SHOWN(w->key));
  }
}

static void check_wrt(const checker *c) {
  const entry_spec *e = c->entry;
  if (e->wrt.count != e->names.count || (e->single && e->wrt.count != 1))
    WRONG(c, "it gives gradients of %" PRIu32 " tensors by %" PRIu32 " names", e->wrt.count, e->names.count);
  for (uint32_t n = 0; n < e->variant_count; n++) {
    const plan_spec *p = e->variants[n].gradient;
    bool same = p->gradient_count == e->wrt.count;
    for (uint32_t i = 0; same && i < e->wrt.count; i++) {
      bool found = false;
      for (uint32_t k = 0; k < p->gradient_count; k++) found = found || !strcmp(p->gradients[k].of, e->wrt.at[i]);
      for (uint32_t k = 0; k < i; k++) found = found && strcmp(e->names.at[k], e->names.at[i]);
      same = found;
    }
    if (!same) WRONG(c, "variant %" PRIu32 " gives other gradients than the entry", n);
  }
  for (uint32_t i = 0; i < e->wrt.count; i++) {
    const char *of = e->wrt.at[i], *name = begins(of, "parameter:") ? of + 10 : e->variants[0].inputs.at[strtoul(of + 6, NULL, 10)].name;
    if (strcmp(name, e->names.at[i])) WRONG(c, "the gradient of %s is called '%s'", SHOWN(name), SHOWN(e->names.at[i]));
  }
}

static bool inside(double value, const number_spec *n) {
  for (uint32_t i = 0; i < n->allowed_count; i++) {
    const interval *t = &n->allowed[i];
    bool low = !t->has_low || value > t->low || (value == t->low && !t->low_open),
         high = !t->has_high || value < t->high || (value == t->high && !t->high_open);
    if (low && high) return true;
  }
  return !n->allowed_count;
}

static void check_numbers(const checker *c) {
  const step_spec *s = c->entry->step_of;
  json_read(c->a, "the optimizer's defaults", s->defaults, strlen(s->defaults));
  json *options = TAKE(c->a, s->group_count + 1u, json);
  for (uint32_t i = 0; i < s->group_count; i++) options[i] = json_read(c->a, "a group's options", s->groups[i].options, strlen(s->groups[i].options));
  for (uint32_t i = 0; i < s->number_count; i++) {
    const number_spec *n = &s->numbers[i];
    for (uint32_t k = 0; k < i; k++)
      if (s->numbers[k].group == n->group && s->numbers[k].position == n->position && !strcmp(s->numbers[k].key, n->key))
        WRONG(c, "the number '%s' is listed twice", SHOWN(n->key));
    if (n->group < -1 || n->group >= s->group_count)
      WRONG(c, "the number '%s' is of group %" PRId64 ", of %" PRIu32, SHOWN(n->key), n->group, s->group_count);
    if (n->group < 0) {
      if (n->position != -1 || (strcmp(n->key, "clip_norm") && strcmp(n->key, "clip_value") && strcmp(n->key, "loss_scale")))
        WRONG(c, "the number '%s' is none of clip_norm, clip_value, loss_scale", SHOWN(n->key));
    } else {
      const json *value = json_get(&options[n->group], n->key);
      if (value && n->position != -1)
        value = value->kind == JSON_ARRAY && n->position >= 0 && n->position < value->count ? &value->items[n->position] : NULL;
      double stated = value && value->kind == JSON_INTEGER ? (double)value->integer : value && value->kind == JSON_NUMBER ? value->number : NAN;
      if (stated != n->value)
        WRONG(c, "the number '%s' of group %" PRId64 " is %g; the group's options say otherwise", SHOWN(n->key), n->group, n->value);
    }
    if (!inside(n->value, n))
      WRONG(c, "the number '%s' is %g, which is in none of the intervals that the code was compiled for", SHOWN(n->key), n->value);
  }
}

static void check_step(checker *c) {
  const entry_spec *e = c->entry;
  const step_spec *s = e->step_of;
  const state_spec *numbers = state_named(e, "numbers");
  if (!numbers) WRONG(c, "its step needs the state '%s'", "numbers");
  const weight_spec *vector = &c->m->weights[numbers->weight];
  if (strcmp(vector->type->name, "float64") || vector->rank != 1 || vector->shape[0] != (int64_t)s->number_count + 2)
    WRONG(c, "its vector of numbers is not one of %" PRIu32 " float64", s->number_count + 2);
  uint32_t optimizer = 0, waiting = 0;
  for (uint32_t i = 0; i < e->state_count; i++) {
    optimizer += begins(e->state[i].name, "optimizer.");
    waiting += begins(e->state[i].name, "gradient.");
  }
  for (uint32_t g = 0; g < s->group_count; g++)
    for (uint32_t i = 0; i < s->groups[g].parameters.count; i++) {
      const char *name = s->groups[g].parameters.at[i];
      const state_spec *state = state_named(e, arena_print(c->a, "module.%s", name));
      bool twice = false;
      for (uint32_t h = 0; h <= g; h++)
        for (uint32_t k = 0; k < (h < g ? s->groups[h].parameters.count : i); k++) twice = twice || !strcmp(s->groups[h].parameters.at[k], name);
      if (!state || !state->parameter || twice) WRONG(c, "its groups hold '%s' twice, or it is no parameter", SHOWN(name));
    }
  check_numbers(c);
  if (s->slot_count != optimizer || s->gradient_count != waiting)
    WRONG(c, "of the state of the optimizer, or the gradients, %s is not listed", "some");
  for (uint32_t i = 0; i < s->slot_count; i++) {
    const slot_spec *slot = &s->slots[i];
    if (!slot->parameters.count || strcmp(slot->state, arena_print(c->a, "optimizer.%s.%s", slot->key, slot->parameters.at[0])) ||
        !state_named(e, slot->state))
      WRONG(c, "the state '%s' is listed as what it is not", SHOWN(slot->state));
    for (uint32_t k = 0; k < i; k++)
      if (!strcmp(s->slots[k].state, slot->state)) WRONG(c, "the state '%s' is listed twice", SHOWN(slot->state));
    if (slot->starts_as < -1 || slot->starts_as >= s->number_count)
      WRONG(c, "the state '%s' starts as number %" PRId64, SHOWN(slot->state), slot->starts_as);
  }
  for (uint32_t i = 0; i < s->gradient_count; i++) {
    const char *parameter = s->gradients[i].parameter;
    const state_spec *like = state_named(e, arena_print(c->a, "module.%s", parameter)), *own = state_named(e, s->gradients[i].state);
    bool right = like && own && !strcmp(s->gradients[i].state, arena_print(c->a, "gradient.%s", parameter));
    const weight_spec *x = right ? &c->m->weights[like->weight] : NULL, *y = right ? &c->m->weights[own->weight] : NULL;
    right = right && x->type == y->type && x->rank == y->rank && !memcmp(x->shape, y->shape, x->rank * sizeof *x->shape);
    for (uint32_t k = 0; k < i; k++) right = right && strcmp(s->gradients[k].state, s->gradients[i].state);
    if (!right) WRONG(c, "'%s' is listed as the gradient of '%s'", SHOWN(s->gradients[i].state), SHOWN(parameter));
  }
  if (!s->update != !s->gradient_count)
    WRONG(c, "a step that accumulates gradients has tensors for them and the plan 'update'; this one has only one of the two: %s", "export it again");
  for (uint32_t i = 0; i < e->variant_count; i++) {
    const tensor_specs *o = &e->variants[i].outputs;
    if (!o->count || o->at[0].rank || !is_floating(o->at[0].type)) WRONG(c, "variant %" PRIu32 ": its first result is no loss", i);
  }
  if (!s->update) return;
  const plan_spec *p = s->update;
  static const variant_spec no_symbols;
  c->variant = &no_symbols;
  c->role = arena_print(c->a, "entry %s, update: ", e->name);
  if (!p->library || p->operands.count || p->outputs.count || p->saved.count || p->gradient_count || p->consumes_count || p->library->inputs.count ||
      p->library->symbol_count)
    WRONG(c, "it is %s", "no call without operands");
  check_constants(c, p);
  if (s->norm || s->finite || p->library->outputs.count != 1) check_flags(c, p, NULL, s->norm, s->finite);
}

void check_manifest(const manifest *m, const archive *z) {
  checker checking = {.a = z->a, .m = m, .role = ""}, *c = &checking;
  check_libraries(c);
  check_weights(c);
  for (uint32_t i = 0; i < m->entry_count; i++) {
    const entry_spec *e = c->entry = &m->entries[i];
    const char *before = c->role = arena_print(c->a, "entry %s: ", e->name);
    if ((e->kind == ENTRY_STEP) != (e->step_of != NULL)) WRONG(c, "it %s a step", e->step_of ? "has" : "has not");
    if (!e->variant_count) WRONG(c, "it has %s", "no variants");
    check_state(c);
    for (uint32_t k = 0; k < e->variant_count; k++) check_variant(c, &e->variants[k], k);
    c->role = before;
    if (e->kind == ENTRY_GRAD) check_wrt(c);
    if (e->step_of) check_step(c);
  }
}
