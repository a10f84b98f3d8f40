/* The file of a training state. runtime/aot_backward_runtime/training/checkpoint.py describes its format, checkpoint_contents.py its contents. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "function.h"
#include "safetensors.h"
#include "sha256.h"

#define SHOWN(text) shown(text, strlen(text))
static const char BLANK[] = "0000000000000000000000000000000000000000000000000000000000000000";
/* LARGEST_HEADER: bytes, safetensors' own limit. LARGEST_COUNT: exclusive, so that a count can grow in 64 bits; training/state.py has the same.
 * ALIGNED: bytes, the alignment of PyTorch's allocator. */
static const uint64_t LARGEST_HEADER = 100000000, LARGEST_COUNT = (uint64_t)1 << 62;
enum { ALIGNED = 64, OPTIMIZER_STATE = 5056 /* bytes of the CPU's random state */ };

/* A tensor of the file, with the memory of the entry's tensor. */
typedef struct {
  const char *name;
  const dtype *type;
  uint32_t rank;
  const int64_t *shape, *stride;
  void *data;
  uint64_t bytes;
} part;
typedef struct {
  uint32_t count;
  part *at;
} parts;

/* --- growing text ----------------------------------------------------------------------------------------------------------------------------- */

typedef struct {
  arena *a;
  char *at;
  size_t used, room;
} text;

static void add_bytes(text *t, const char *bytes, size_t n) {
  if (t->used + n + 1 > t->room) {
    size_t room = 2 * (t->used + n + 1) + 1024;
    char *more = arena_take(t->a, room, 1);
    if (t->used) memcpy(more, t->at, t->used);
    t->at = more;
    t->room = room;
  }
  memcpy(t->at + t->used, bytes, n);
  t->used += n;
  t->at[t->used] = 0;
}

static void add(text *t, const char *words) { add_bytes(t, words, strlen(words)); }

static void add_integer(text *t, int64_t value) {
  char digits[32];
  snprintf(digits, sizeof digits, "%" PRId64, value);
  add(t, digits);
}

/* Writes a number like Python: the shortest digits that parse to the same number, independent of the locale. */
static void add_number(text *t, double value) {
  char digits[40];
  if (isnan(value)) return add(t, "NaN");
  if (isinf(value)) return add(t, value < 0 ? "-Infinity" : "Infinity");
  for (int precision = 1; precision <= 17; precision++) {
    snprintf(digits, sizeof digits, "%.*e", precision - 1, value);
    for (char *c = digits; *c; c++)
      if (*c == ',') *c = '.';
    const char *end = digits;
    double back = json_number(digits, &end);
    if (back == value) break;
  }
  add(t, digits); /* 1e-03 and 5e-01 are valid JSON */
}

static void add_string(text *t, const char *words) {
  add(t, "\"");
  for (const unsigned char *c = (const unsigned char *)words; *c; c++) {
    char escaped[8];
    if (*c == '"' || *c == '\\') snprintf(escaped, sizeof escaped, "\\%c", *c);
    else if (*c < ' ') snprintf(escaped, sizeof escaped, "\\u%04x", *c);
    else snprintf(escaped, sizeof escaped, "%c", *c); /* UTF-8 is copied */
    add(t, escaped);
  }
  add(t, "\"");
}

/* --- the metadata of the training ------------------------------------------------------------------------------------------------------------- */

static int number_at(const step_spec *s, int64_t group, const char *key, int64_t position) {
  for (uint32_t i = 0; i < s->number_count; i++)
    if (s->numbers[i].group == group && s->numbers[i].position == position && !strcmp(s->numbers[i].key, key)) return (int)i;
  return -1;
}

static void add_option(text *t, const struct aotb_function *f, int64_t group, const json *value) {
  const step_spec *s = f->entry->step_of;
  int number = number_at(s, group, value->key, -1);
  add_string(t, value->key);
  add(t, ": ");
  if (number >= 0) return add_number(t, f->step.numbers[2 + number]);
  if (value->kind != JSON_ARRAY) return add_bytes(t, value->raw, value->raw_length);
  add(t, "[");
  for (uint32_t i = 0; i < value->count; i++) {
    if (i) add(t, ", ");
    number = number_at(s, group, value->key, i);
    if (number >= 0) add_number(t, f->step.numbers[2 + number]);
    else add_bytes(t, value->items[i].raw, value->items[i].raw_length);
  }
  add(t, "]");
}

static void write_about(text *t, const struct aotb_function *f, const char *extra) {
  const step_spec *s = f->entry->step_of;
  const training *own = &f->step;
  add(t, "{\"optimizer\": ");
  add_string(t, s->optimizer);
  add(t, ", \"groups\": [");
  for (uint32_t g = 0; g < s->group_count; g++) {
    add(t, g ? ", {\"parameters\": [" : "{\"parameters\": [");
    for (uint32_t i = 0; i < s->groups[g].parameters.count; i++) {
      if (i) add(t, ", ");
      add_string(t, s->groups[g].parameters.at[i]);
    }
    add(t, "], \"options\": {");
    for (uint32_t i = 0; i < own->options[g]->count; i++) {
      if (i) add(t, ", ");
      add_option(t, f, g, &own->options[g]->items[i]);
    }
    add(t, "}}");
  }
  add(t, "], \"fresh\": ");
  add(t, own->fresh ? "true" : "false");
  const struct {
    const char *name;
    int64_t value;
  } counters[] = {{"count", own->updates}, {"skipped", own->skipped}, {"accumulated", own->accumulated}};
  for (int i = 0; i < 3; i++) {
    add(t, ", \"");
    add(t, counters[i].name);
    add(t, "\": ");
    add_integer(t, counters[i].value);
  }
  add(t, ", \"scaler\": ");
  if (own->scale_number < 0) add(t, "null");
  else {
    add(t, "{\"scale\": ");
    add_number(t, own->scale);
    add(t, ", \"growth_factor\": ");
    add_number(t, own->growth_factor);
    add(t, ", \"backoff_factor\": ");
    add_number(t, own->backoff_factor);
    add(t, ", \"growth_interval\": ");
    add_integer(t, own->growth_interval);
    add(t, ", \"_growth_tracker\": ");
    add_integer(t, own->tracker);
    add(t, "}");
  }
  add(t, ", \"extra\": ");
  add(t, extra ? extra : "null");
  add(t, "}");
}

/* --- the tensors of the file ------------------------------------------------------------------------------------------------------------------ */

static void add_part(arena *a, parts *all, const char *name, const weight *w) {
  (void)a;
  all->at[all->count++] =
      (part){name, w->spec->type, w->spec->rank, w->spec->shape, w->spec->stride, w->data, (uint64_t)w->elements * (uint64_t)w->spec->type->size};
}

static const weight *weight_of_state(const struct aotb_function *f, const char *name) {
  for (uint32_t i = 0; i < f->entry->state_count; i++)
    if (!strcmp(f->entry->state[i].name, name)) return f->weights[f->entry->state[i].weight];
  return NULL;
}

static parts parts_of(const struct aotb_function *f, arena *a, bool gradients) {
  const step_spec *s = f->entry->step_of;
  parts all = {0, TAKE(a, f->entry->state_count + s->slot_count + s->gradient_count + 1u, part)};
  for (uint32_t i = 0; i < f->entry->state_count; i++) {
    const state_spec *state = &f->entry->state[i];
    const weight *w = f->weights[state->weight];
    if (!strncmp(state->name, "module.", 7)) add_part(a, &all, arena_print(a, "module/%s", state->name + 7), w);
    if (!strncmp(state->name, "loss_fn.", 8)) add_part(a, &all, arena_print(a, "loss/%s", state->name + 8), w);
  }
  for (uint32_t i = 0; i < s->slot_count; i++)
    add_part(a, &all, arena_print(a, "optimizer/%s/%s", s->slots[i].key, s->slots[i].parameters.at[0]), weight_of_state(f, s->slots[i].state));
  for (uint32_t i = 0; gradients && i < s->gradient_count; i++)
    add_part(a, &all, arena_print(a, "gradient/%s", s->gradients[i].parameter), weight_of_state(f, s->gradients[i].state));
  return all;
}

static uint64_t divisor(uint64_t size) { return size ? (size & -size) < ALIGNED ? size & -size : ALIGNED : ALIGNED; }

static int by_alignment(const void *x, const void *y) {
  const part *a = x, *b = y;
  uint64_t one = divisor(a->bytes), other = divisor(b->bytes);
  return one != other ? (one > other ? -1 : 1) : strcmp(a->name, b->name);
}

/* --- writing ---------------------------------------------------------------------------------------------------------------------------------- */

static text write_header(arena *a, const parts *all, const char *about) {
  text t = {.a = a}, wide = {.a = a};
  add(&t, "        {\"__metadata__\":{\"format\":\"aot-backward state\",\"version\":\"1\",\"sha256\":\"");
  add(&t, BLANK);
  add(&t, "\",\"complex128\":");
  add(&wide, "[");
  for (uint32_t i = 0; i < all->count; i++)
    if (all->at[i].type->size == 16) {
      if (wide.used > 1) add(&wide, ", ");
      add_string(&wide, all->at[i].name);
    }
  add(&wide, "]");
  add_string(&t, wide.at);
  add(&t, ",\"about\":");
  add_string(&t, about);
  add(&t, "}");
  uint64_t offset = 0;
  for (uint32_t i = 0; i < all->count; i++) {
    const part *p = &all->at[i];
    add(&t, ",");
    add_string(&t, p->name);
    add(&t, ":{\"dtype\":\"");
    add(&t, p->type->stored);
    add(&t, "\",\"shape\":[");
    for (uint32_t d = 0; d < p->rank; d++) {
      if (d) add(&t, ",");
      add_integer(&t, p->shape[d]);
    }
    if (p->type->size == 16) add(&t, p->rank ? ",2" : "2");
    add(&t, "],\"data_offsets\":[");
    add_integer(&t, (int64_t)offset);
    add(&t, ",");
    add_integer(&t, (int64_t)(offset += p->bytes));
    add(&t, "]}");
  }
  add(&t, "}");
  while (t.used % ALIGNED) add(&t, " ");
  uint64_t length = t.used - 8;
  for (int i = 0; i < 8; i++) t.at[i] = (char)(length >> 8 * i);
  return t;
}

static void put(arena *a, int fd, const void *bytes, size_t size, const char *path) {
  const char *at = bytes;
  while (size) {
    ssize_t n = write(fd, at, size < 1 << 30 ? size : 1 << 30);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) arena_fail(a, AOTB_STATE, "cannot save training state %s: %s; nothing was changed", path, strerror(n ? errno : ENOSPC));
    at += n;
    size -= (size_t)n;
  }
}

/* Returns the row-major bytes: the tensor's memory, or a copy in the arena. */
static const void *plain_bytes(arena *a, const part *p) {
  int64_t plain[64], row = 1;
  bool same = true;
  for (uint32_t d = p->rank; d--; row *= p->shape[d] ? p->shape[d] : 1) {
    plain[d] = row;
    same = same && (p->shape[d] <= 1 || p->stride[d] == row);
  }
  if (same || !p->bytes) return p->data;
  void *out = arena_take(a, (size_t)p->bytes, 1);
  copy_tensor(out, plain, p->data, p->stride, (size_t)p->type->size, p->rank, p->shape);
  return out;
}

static void write_all(arena *a, int fd, text *header, const parts *all, const char *path) {
  sha256 h;
  char digest[65];
  sha256_begin(&h);
  sha256_add(&h, header->at, header->used);
  put(a, fd, header->at, header->used, path);
  for (uint32_t i = 0; i < all->count; i++) {
    const void *bytes = plain_bytes(a, &all->at[i]);
    sha256_add(&h, bytes, (size_t)all->at[i].bytes);
    put(a, fd, bytes, (size_t)all->at[i].bytes, path);
  }
  sha256_end(&h, digest);
  memcpy(memmem(header->at, header->used, BLANK, 64), digest, 64); /* the first match is the placeholder */
  if (lseek(fd, 0, SEEK_SET)) arena_fail(a, AOTB_STATE, "cannot save training state %s: %s; nothing was changed", path, strerror(errno));
  put(a, fd, header->at, header->used, path);
}

/* A file that replaces another, like format/atomic_file.py: a temporary file is locked, written, synced and renamed. */
typedef struct {
  char *temporary;
  int fd;
} replacing;

static void open_beside(arena *a, const char *target, const char *path, replacing *r) {
  struct stat status;
  if (!stat(target, &status) && !S_ISREG(status.st_mode))
    arena_fail(a, AOTB_STATE, "cannot save training state %s: %s", path, S_ISDIR(status.st_mode) ? "it is a folder" : "it is not a plain file");
  char *slash = strrchr(target, '/');
  for (;;) {
    uint32_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number) number = (uint32_t)getpid();
    r->temporary = slash ? arena_print(a, "%.*s/.%s.%08" PRIx32 ".tmp", (int)(slash - target), target, slash + 1, number)
                         : arena_print(a, ".%s.%08" PRIx32 ".tmp", target, number);
    r->fd = open(r->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (r->fd < 0 && errno == EEXIST) continue;
    if (r->fd < 0) arena_fail(a, AOTB_STATE, "cannot save training state %s: %s; nothing was changed", path, strerror(errno));
    flock(r->fd, LOCK_EX);
    if (!fstat(r->fd, &status) && status.st_nlink) return;
    close(r->fd);
  }
}

static void save(struct aotb_function *f, arena *a, const char *path, const char *extra, replacing *r) {
  text about = {.a = a};
  if (extra) json_read_python(a, AOTB_INPUT, "extra", extra, strlen(extra));
  write_about(&about, f, extra);
  parts all = parts_of(f, a, f->step.accumulated > 0);
  size_t size;
  const uint8_t *random = backend_random(a, f->package->backend, &size);
  int64_t *shape = TAKE(a, 2, int64_t);
  shape[0] = (int64_t)size;
  shape[1] = 1;
  all.at[all.count++] = (part){"random/cpu", dtype_named("uint8"), 1, shape, shape + 1, (void *)(uintptr_t)random, size};
  qsort(all.at, all.count, sizeof *all.at, by_alignment);
  text header = write_header(a, &all, about.at);
  char *target = realpath(path, NULL), *copy; /* the target of a link */
  copy = arena_text(a, target ? target : path, strlen(target ? target : path));
  free(target);
  open_beside(a, copy, path, r);
  write_all(a, r->fd, &header, &all, path);
  if (fsync(r->fd) || rename(r->temporary, copy))
    arena_fail(a, AOTB_STATE, "cannot save training state %s: %s; nothing was changed", path, strerror(errno));
  r->temporary = NULL;
  int folder = open(dirname(copy), O_RDONLY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
}

aotb_status aotb_save(aotb_function *f, const char *path, const char *extra) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(path, "path", "the path of a file");
  if (f->entry->kind != ENTRY_STEP) return aotb_fail(AOTB_INPUT, "entry %s is of kind %s; expected a step", f->entry->name, aotb_kind(f));
  aotb_status busy = function_enter(f);
  if (busy) return busy;
  if (f->step.inconsistent)
    return function_leave(f, aotb_fail(AOTB_STATE, "nothing was saved to %s: native code failed, maybe in the middle of an update", path));
  arena own = {0};
  jmp_buf back;
  static const replacing none = {NULL, -1};
  replacing *r = malloc(sizeof *r);
  if (!r) return function_leave(f, aotb_fail(AOTB_MEMORY, "no memory"));
  *r = none;
  own.back = &back;
  int status = setjmp(back);
  if (!status) save(f, &own, path, extra, r);
  if (r->temporary) unlink(r->temporary);
  if (r->fd >= 0) close(r->fd);
  free(r);
  arena_free(&own);
  return function_leave(f, (aotb_status)status);
}

/* --- reading ---------------------------------------------------------------------------------------------------------------------------------- */

#define BAD(a, path, words, ...) arena_fail(a, AOTB_STATE, "corrupt training state %s: " words, path, __VA_ARGS__)
#define UNFIT(a, path, words, ...) arena_fail(a, AOTB_STATE, "%s does not fit this step: " words, path, __VA_ARGS__)

typedef struct {
  uint8_t *bytes;
  uint64_t size;
  stored_tensors tensors;
  const uint8_t *data;
  const json *about;
} file;

static const char *metadata(const file *s, const char *key) {
  const json *value = s->tensors.metadata.kind == JSON_OBJECT ? json_get(&s->tensors.metadata, key) : NULL;
  return value ? value->text : "";
}

/* Reads the whole file and compares it with its digest. */
static file read_file(arena *a, const char *path, int fd) {
  struct stat status;
  file s = {0};
  if (fstat(fd, &status)) arena_fail(a, AOTB_STATE, "cannot read training state %s: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) arena_fail(a, AOTB_STATE, "cannot read training state %s: it is not a plain file", path);
  s.size = (uint64_t)status.st_size;
  s.bytes = arena_take(a, (size_t)s.size + 1, 1);
  for (uint64_t done = 0; done < s.size;) {
    ssize_t n = read(fd, s.bytes + done, (size_t)(s.size - done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) arena_fail(a, AOTB_STATE, "cannot read training state %s: %s", path, strerror(errno));
    if (!n) BAD(a, path, "%s", "it was cut short while it was read");
    done += (uint64_t)n;
  }
  uint64_t length = 0;
  for (int i = 8; s.size >= 8 && i--;) length = length << 8 | s.bytes[i];
  if (s.size < 8 || length > s.size - 8 || length > LARGEST_HEADER)
    arena_fail(a, AOTB_STATE, "cannot read training state %s: it is not a safetensors file, or is damaged or cut short", path);
  s.data = s.bytes + 8 + length;
  s.tensors = safetensors_read(a, AOTB_STATE, arena_print(a, "corrupt training state %s", path), (const char *)s.bytes + 8, (size_t)length,
                               s.size - 8 - length);
  if (strcmp(metadata(&s, "format"), "aot-backward state"))
    arena_fail(a, AOTB_STATE, "%s is not a training state: was it written by aotb_save() or step.save()?", path);
  if (strcmp(metadata(&s, "version"), "1"))
    arena_fail(a, AOTB_STATE, "%s is a training state of version '%s'; this library reads '1': install the one that wrote it", path,
               SHOWN(metadata(&s, "version")));
  const char *expected = metadata(&s, "sha256");
  if (strlen(expected) != 64 || strspn(expected, "0123456789abcdef") != 64) BAD(a, path, "%s", "it has no SHA-256");
  char digest[65];
  uint8_t *place = memmem(s.bytes + 8, (size_t)length, expected, 64);
  if (!place) BAD(a, path, "%s", "it has no SHA-256");
  sha256 h;
  sha256_begin(&h);
  sha256_add(&h, s.bytes, (size_t)(place - s.bytes));
  sha256_add(&h, BLANK, 64);
  sha256_add(&h, place + 64, (size_t)(s.bytes + s.size - place - 64));
  sha256_end(&h, digest);
  if (strcmp(digest, expected)) BAD(a, path, "SHA-256 is %s, expected %s", digest, expected);
  const char *about = metadata(&s, "about");
  json *parsed = TAKE(a, 1, json);
  *parsed = json_read_python(a, AOTB_STATE, arena_print(a, "corrupt training state %s: about", path), about, strlen(about));
  if (parsed->kind != JSON_OBJECT) BAD(a, path, "about is %s", json_words(parsed));
  s.about = parsed;
  return s;
}

static const json *member_of(arena *a, const char *path, const json *object, const char *name, json_kind kind) {
  const json *value = json_get(object, name);
  if (!value || value->kind != kind) UNFIT(a, path, "its %s is %s; expected %s", name, json_words(value), json_words(&(json){.kind = kind}));
  return value;
}

static bool truth_of(arena *a, const char *path, const json *object, const char *name) {
  const json *value = json_get(object, name);
  if (!value || (value->kind != JSON_TRUE && value->kind != JSON_FALSE))
    UNFIT(a, path, "its %s is %s; expected true or false", name, json_words(value));
  return value->kind == JSON_TRUE;
}

static int64_t count_of(arena *a, const char *path, const json *about, const char *name) {
  int64_t value = member_of(a, path, about, name, JSON_INTEGER)->integer;
  if (value < 0 || (uint64_t)value >= LARGEST_COUNT) UNFIT(a, path, "%s is %" PRId64 "; expected a count", name, value);
  return value;
}

static bool as_number(const json *value, double *out) {
  if (!value || (value->kind != JSON_INTEGER && value->kind != JSON_NUMBER)) return false;
  *out = value->kind == JSON_INTEGER ? (double)value->integer : value->number;
  return true;
}

static bool same_value(const json *one, const json *other) {
  double x, y;
  if (as_number(one, &x) && as_number(other, &y)) return x == y;
  if (one->kind != other->kind || one->count != other->count) return one->kind == other->kind && one->kind < JSON_INTEGER;
  if (one->kind == JSON_STRING) return !strcmp(one->text, other->text);
  for (uint32_t i = 0; one->kind >= JSON_ARRAY && i < one->count; i++) { /* at most 64 deep */
    const json *theirs = one->kind == JSON_ARRAY ? &other->items[i] : json_get(other, one->items[i].key);
    if (!theirs || !same_value(&one->items[i], theirs)) return false;
  }
  return true;
}

static bool of_implementation(const char *key) {
  static const char *const keys[] = {"foreach", "fused", "capturable", "differentiable"};
  for (int i = 0; i < 4; i++)
    if (!strcmp(key, keys[i])) return true;
  return false;
}

/* Reads the numbers of a group into `numbers`. Fails if a fixed option differs from this step's. */
static void check_options(struct aotb_function *f, arena *a, const char *path, uint32_t group, const json *given, double *numbers) {
  const step_spec *s = f->entry->step_of;
  const json *own = f->step.options[group];
  for (uint32_t i = 0; i < own->count; i++) {
    const json *mine = &own->items[i], *theirs = json_get(given, mine->key);
    bool any = false;
    if (of_implementation(mine->key)) continue;
    for (uint32_t n = 0; n < s->number_count; n++) {
      if (s->numbers[n].group != group || strcmp(s->numbers[n].key, mine->key)) continue;
      const json *value = theirs;
      any = true;
      if (value && s->numbers[n].position >= 0)
        value = value->kind == JSON_ARRAY && mine->count == value->count ? &value->items[s->numbers[n].position] : NULL;
      if (!as_number(value, &numbers[n]))
        UNFIT(a, path, "param_groups[%" PRIu32 "]['%s'] is %s; expected a number", group, SHOWN(mine->key), json_words(value));
      const char *problem = training_number_problem(f, n, numbers[n]);
      if (problem) UNFIT(a, path, "%s", problem);
    }
    if (any) continue;
    if (!theirs && (mine->kind == JSON_FALSE || mine->kind == JSON_NULL)) continue; /* an option that an older torch lacks is off */
    if (theirs && same_value(mine, theirs)) continue;
    json *defaults = TAKE(a, 1, json);
    *defaults = json_read(a, "the optimizer's defaults", s->defaults, strlen(s->defaults));
    if (!theirs && !json_get(defaults, mine->key)) continue; /* added by the caller, such as a scheduler's initial_lr */
    if (theirs && !json_get(defaults, mine->key)) continue;
    UNFIT(a, path, "param_groups[%" PRIu32 "]['%s'] is fixed in the compiled step at %.*s", group, SHOWN(mine->key),
          (int)(mine->raw_length < 80 ? mine->raw_length : 80), mine->raw);
  }
}

/* Returns whether this is a valid state of torch's generator: at::CPUGeneratorImplStateLegacy, with 64 bits for each word of the Mersenne Twister. */
static bool is_random_state(const stored *s, const uint8_t *data) {
  uint32_t left, seeded, next_high;
  uint64_t next;
  if (strcmp(s->type, "U8") || s->rank != 1 || s->shape[0] != OPTIMIZER_STATE) return false;
  memcpy(&left, data + 8, 4);
  memcpy(&seeded, data + 12, 4);
  memcpy(&next, data + 16, 8);
  next_high = (uint32_t)(next >> 32);
  return seeded == 1 && left > 0 && left <= 624 && !next_high && next <= 624;
}

static void read_scaler(struct aotb_function *f, arena *a, const char *path, const json *about, training *out) {
  const json *scaler = json_get(about, "scaler");
  bool there = scaler && scaler->kind != JSON_NULL;
  if (there != (f->step.scale_number >= 0)) UNFIT(a, path, "it has %s loss scale, and this step has %s", there ? "a" : "no", there ? "none" : "one");
  if (!there) return;
  double values[5];
  static const char *const names[] = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"};
  for (int i = 0; i < 5; i++)
    if (scaler->kind != JSON_OBJECT || scaler->count != 5 || !as_number(json_get(scaler, names[i]), &values[i]) || !(values[i] >= 0) ||
        !isfinite(values[i]) || (i < 4 && !values[i]) || (i > 2 && values[i] > 9e15))
      UNFIT(a, path, "the loss scale's %s is not a positive number", names[i]);
  if (!((float)values[0] > 0) || !isfinite((float)values[0])) UNFIT(a, path, "the loss scale is %g; expected a positive, finite number", values[0]);
  out->scale = (float)values[0];
  out->growth_factor = values[1];
  out->backoff_factor = values[2];
  out->growth_interval = (int64_t)values[3];
  out->tracker = (int64_t)values[4];
}

static void check_groups(struct aotb_function *f, arena *a, const char *path, const json *groups, double *numbers) {
  const step_spec *s = f->entry->step_of;
  bool same = groups->count == s->group_count;
  for (uint32_t g = 0; same && g < groups->count; g++) {
    const json *names = member_of(a, path, &groups->items[g], "parameters", JSON_ARRAY);
    same = names->count == s->groups[g].parameters.count;
    for (uint32_t i = 0; same && i < names->count; i++)
      same = names->items[i].kind == JSON_STRING && !strcmp(names->items[i].text, s->groups[g].parameters.at[i]);
  }
  if (!same) UNFIT(a, path, "%s", "its parameter groups differ from this step's");
  for (uint32_t g = 0; g < groups->count; g++) check_options(f, a, path, g, member_of(a, path, &groups->items[g], "options", JSON_OBJECT), numbers);
}

/* Checks the whole file before it changes any state. */
static void resume(struct aotb_function *f, arena *a, const char *path, int fd, const char **extra) {
  const step_spec *s = f->entry->step_of;
  file all = read_file(a, path, fd);
  const json *about = all.about, *others = json_get(about, "extra");
  const char *optimizer = member_of(a, path, about, "optimizer", JSON_STRING)->text;
  if (strcmp(optimizer, s->optimizer)) UNFIT(a, path, "it was saved by %s, this is %s", SHOWN(optimizer), SHOWN(s->optimizer));
  double *numbers = TAKE(a, s->number_count + 1u, double);
  for (uint32_t i = 0; i < s->number_count; i++) numbers[i] = f->step.numbers[2 + i];
  check_groups(f, a, path, member_of(a, path, about, "groups", JSON_ARRAY), numbers);
  training next = f->step;
  next.updates = count_of(a, path, about, "count");
  next.skipped = count_of(a, path, about, "skipped");
  next.accumulated = count_of(a, path, about, "accumulated");
  next.fresh = truth_of(a, path, about, "fresh");
  if (next.accumulated && !s->gradient_count)
    UNFIT(a, path, "it has accumulated gradients of %" PRId64 " calls, and this step was exported without accumulate=True", next.accumulated);
  read_scaler(f, a, path, about, &next);
  parts own = parts_of(f, a, next.accumulated > 0);
  const stored **places = TAKE(a, own.count + 1u, const stored *);
  uint32_t found = 0;
  for (uint32_t i = 0; i < own.count; i++) {
    places[i] = safetensors_find(&all.tensors, own.at[i].name);
    if (!places[i]) UNFIT(a, path, "it has no tensor '%s'", SHOWN(own.at[i].name));
    if (!safetensors_is(places[i], own.at[i].type, own.at[i].rank, own.at[i].shape))
      UNFIT(a, path, "'%s' has another dtype or shape", SHOWN(own.at[i].name));
    if (own.at[i].type->dl.code == 6)
      for (uint64_t k = places[i]->begin; k < places[i]->end; k++)
        if (all.data[k] > 1) BAD(a, path, "tensor '%s': a boolean that is neither 0 nor 1", SHOWN(own.at[i].name));
    found++;
  }
  const stored *random = NULL;
  for (uint32_t i = 0; i < all.tensors.count; i++) {
    const stored *t = &all.tensors.at[i];
    if (!strcmp(t->name, "random/cpu")) random = t;
    if (!strncmp(t->name, "random/", 7)) found++;
  }
  if (found != all.tensors.count) UNFIT(a, path, "it has %" PRIu32 " tensors; expected %" PRIu32, all.tensors.count, found);
  if (random && !is_random_state(random, all.data + random->begin)) UNFIT(a, path, "%s", "torch refuses its random state");
  char *kept = NULL;
  if (others) {
    kept = malloc(others->raw_length + 1u);
    if (!kept) arena_fail(a, AOTB_MEMORY, "no memory");
    memcpy(kept, others->raw, others->raw_length);
    kept[others->raw_length] = 0;
  }
  /* Nothing below can fail. */
  for (uint32_t i = 0; i < own.count; i++) {
    int64_t plain[64], row = 1;
    for (uint32_t d = own.at[i].rank; d--; row *= own.at[i].shape[d]) plain[d] = row;
    copy_tensor(own.at[i].data, own.at[i].stride, all.data + places[i]->begin, plain, (size_t)own.at[i].type->size, own.at[i].rank, own.at[i].shape);
  }
  free((void *)(uintptr_t)f->step.extra);
  next.extra = kept;
  next.inconsistent = false;
  f->step = next;
  for (uint32_t i = 0; i < s->number_count; i++) f->step.numbers[2 + i] = numbers[i];
  if (next.scale_number >= 0) f->step.numbers[2 + next.scale_number] = next.scale;
  f->step.numbers[1] = next.fresh;
  training_accumulated(f, next.accumulated);
  if (random) backend_set_random(a, f->package->backend, all.data + random->begin, OPTIMIZER_STATE);
  if (extra) *extra = kept ? kept : "null";
}

aotb_status aotb_resume(aotb_function *f, const char *path, const char **extra) {
  REQUIRE(f, "function", A_FUNCTION);
  REQUIRE(path, "path", "the path of a file");
  if (f->entry->kind != ENTRY_STEP) return aotb_fail(AOTB_INPUT, "entry %s is of kind %s; expected a step", f->entry->name, aotb_kind(f));
  aotb_status busy = function_enter(f);
  if (busy) return busy;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return function_leave(f, aotb_fail(AOTB_STATE, "cannot read training state %s: %s", path, strerror(errno)));
  arena own = {0};
  jmp_buf back;
  own.back = &back;
  int status = setjmp(back);
  if (!status) resume(f, &own, path, fd, extra);
  close(fd);
  arena_free(&own);
  return function_leave(f, (aotb_status)status);
}
