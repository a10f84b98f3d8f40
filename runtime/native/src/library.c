#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "elf.h"
#include "extern_calls.h"
#include "sha256.h"

#define LAYOUTS "AOTInductorConstantLooks"
#define SHOWN(text) shown(text, strlen(text))
#define WRONG(...) arena_fail(a, AOTB_INCOMPATIBLE, __VA_ARGS__)

typedef int32_t ask(void *container, size_t number, void *out);
typedef struct {
  const char *name;
  tensor_handle handle;
} named_constant;

static const char *file_of(const char *path) { return strrchr(path, '/') + 1; } /* every path has a folder: manifest.c */

#ifdef __wasm__ /* where the code is linked with this library (wasm/linked.c), and known by the start of its names, a digest of the graph */
enum { PREFIX = 18 };
static const char *extracted(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, const build_spec *build) {
  (void)b, (void)spec;
  size_t size;
  const char *bytes = (const char *)package_member(p, a, build->member, &size);
  static const char run[] = "AOTInductorModelContainerRun";
  for (const char *at = bytes, *end = bytes + size; (at = memmem(at, (size_t)(end - at), run, sizeof run - 1)); at++)
    if (at - bytes >= PREFIX && at[-PREFIX] == 'g' && at[-1] == '_') return arena_text(a, at - PREFIX, PREFIX); /* an object file */
  return size == PREFIX ? arena_text(a, bytes, size) : file_of(build->member);
}
#else
/* Checks before dlopen that the manifest lists everything that the headers ask of the dynamic linker. */
static void check_headers(arena *a, const library_spec *spec, const build_spec *build, const uint8_t *bytes, size_t size) {
  elf e = elf_read(a, build->member, bytes, size);
  if (e.executable_stack) arena_fail(a, AOTB_FORMAT, "corrupt: %s asks for an executable stack", build->member);
  for (uint32_t i = 0; i < e.needed_count; i++) {
    bool listed = false;
    for (uint32_t k = 0; k < build->needed.count; k++) listed = listed || !strcmp(e.needed[i], build->needed.at[k]);
    if (!listed) arena_fail(a, AOTB_FORMAT, "corrupt: %s asks for %s, which the manifest does not list", build->member, SHOWN(e.needed[i]));
  }
  const struct {
    const char *what, *listed;
    const int *asked;
  } versions[] = {{"GLIBC", build->glibc, e.glibc}, {"GLIBCXX", build->glibcxx, e.glibcxx}};
  for (int i = 0; i < 2; i++) {
    int listed[3] = {0, 0, 0};
    if (*versions[i].listed && !version_read(versions[i].listed, listed))
      arena_fail(a, AOTB_FORMAT, "corrupt: library %s: '%s' is not a version", spec->name, SHOWN(versions[i].listed));
    if (version_order(versions[i].asked, listed) > 0)
      arena_fail(a, AOTB_FORMAT, "corrupt: %s needs %s %d.%d.%d; the manifest lists '%s'", build->member, versions[i].what, versions[i].asked[0],
                 versions[i].asked[1], versions[i].asked[2], versions[i].listed);
  }
}

/* Compiled code depends on libtorch_cpu.so. For the standalone backend a copy of it depends on libaotb_core.so instead, which is open already. */
static void rename_dependency(arena *a, cached_file *f) {
  static const char needed[] = "\0libtorch_cpu.so", own[] = "\0libaotb_core.so";
  char *place = memmem(f->bytes, f->size, needed, sizeof needed);
  if (!place) return;
  memcpy(place, own, sizeof own); /* of the same length; the bytes are a copy in the arena */
  char *digest = arena_take(a, 65, 1);
  sha256 h;
  sha256_begin(&h);
  sha256_add(&h, f->bytes, f->size);
  sha256_end(&h, digest);
  f->sha256 = digest;
}

/* Extracts the library and its JSON files into the code cache. Returns the library's path. */
static const char *extracted(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, const build_spec *build) {
  const char *members[] = {build->member, build->metadata, build->extern_file};
  cached_file files[3];
  uint32_t count = 0;
  for (int i = 0; i < 3; i++) {
    if (!*members[i]) continue;
    cached_file *f = &files[count++];
    f->name = file_of(members[i]);
    f->sha256 = manifest_digest(&p->m, members[i]);
    f->bytes = package_member(p, a, members[i], &f->size);
    if (i) continue;
    check_headers(a, spec, build, f->bytes, f->size);
    if (b->standalone) rename_dependency(a, f);
  }
  return cache_place(a, files, count);
}
#endif

/* Returns the layout that the library states for a constant: "float32 [2,3] [3,1]" of the line "NAME float32 [2,3] [3,1]". NULL: not stated. */
static const char *stated_layout(const char *all, const char *name, size_t *length) {
  size_t n = strlen(name);
  for (const char *line = all; line && *line;) {
    const char *end = strchr(line, '\n');
    size_t whole = end ? (size_t)(end - line) : strlen(line);
    if (whole > n && !strncmp(line, name, n) && line[n] == ' ') {
      *length = whole - n - 1;
      return line + n + 1;
    }
    line = end ? end + 1 : NULL;
  }
  return NULL;
}

/* Formats the layout of a weight like a library. Dimensions of one element take their stride from the text `like`. */
static const char *described(arena *a, const weight_spec *w, const char *like, size_t length) {
  const char *sizes = "", *strides = "", *their = memrchr(like, '[', length);
  their = their ? their + 1 : NULL;
  for (uint32_t d = 0; d < w->rank; d++) {
    int64_t stride = w->stride[d];
    if (their) {
      char *end;
      long long stated = strtoll(their, &end, 10);
      if (w->shape[d] <= 1) stride = stated;
      their = *end == ',' ? end + 1 : NULL;
    }
    sizes = arena_print(a, "%s%s%" PRId64, sizes, d ? "," : "", w->shape[d]);
    strides = arena_print(a, "%s%s%" PRId64, strides, d ? "," : "", stride);
  }
  return arena_print(a, "%s [%s] [%s]", w->type->name, sizes, strides);
}

static size_t answered(arena *a, const library *l, const char *what, ask *function) {
  size_t out = 0;
  int32_t (*count)(void *, size_t *);
  memcpy(&count, &function, sizeof count);
  if (!function || count(l->container, &out)) WRONG("%s does not say %s", l->build->member, what);
  return out;
}

/* Compares the library's own metadata with the manifest, because compiled code checks nothing. */
static void check_stated(arena *a, const library *l, weight *const *weights) {
  const char *layouts = dlsym(l->code, LAYOUTS);
  ask *of[5];
  static const char *const names[] = {"GetNumInputs", "GetNumOutputs", "GetNumConstants", "GetConstantName", "GetConstantDataSize"};
  for (int i = 0; i < 5; i++) {
    void *found = dlsym(l->code, arena_print(a, "AOTInductorModelContainer%s", names[i]));
    memcpy(&of[i], &found, sizeof found);
  }
  size_t inputs = answered(a, l, "how many tensors it takes", of[0]), outputs = answered(a, l, "how many tensors it gives", of[1]);
  if (inputs != l->spec->inputs.count || outputs != l->spec->outputs.count)
    WRONG("%s takes %zu tensors and gives %zu; the manifest says %" PRIu32 " and %" PRIu32
          ": the package has parts of different exports; export it again",
          l->build->member, inputs, outputs, l->spec->inputs.count, l->spec->outputs.count);
  size_t constants = answered(a, l, "how many constants it has", of[2]);
  if (constants != l->build->constant_count)
    WRONG("%s has %zu constants, the manifest lists %" PRIu32, l->build->member, constants, l->build->constant_count);
  for (size_t i = 0; i < constants; i++) {
    const char *name = NULL;
    size_t had = 0;
    if (!of[3] || !of[4] || of[3](l->container, i, &name) || of[4](l->container, i, &had) || !name)
      WRONG("%s does not say what its constants are", l->build->member);
    const constant_spec *c = NULL;
    for (uint32_t k = 0; k < l->build->constant_count; k++)
      if (!strcmp(l->build->constants[k].name, name)) c = &l->build->constants[k];
    if (!c) WRONG("%s has the constant '%s', which the manifest does not list", l->build->member, SHOWN(name));
    const weight *w = weights[c->weight];
    size_t length;
    const char *stated = stated_layout(layouts, name, &length), *ours = stated ? described(a, w->spec, stated, length) : NULL;
    if (ours && (strlen(ours) != length || memcmp(ours, stated, length)))
      WRONG("%s was compiled for %s as %.*s; the manifest says %s: the manifest does not belong to this code; export it again", l->build->member,
            SHOWN(c->weight_name), (int)(length < 200 ? length : 200), stated, ours);
    bool expanded = false;
    for (uint32_t d = 0; d < w->spec->rank; d++) expanded = expanded || (w->spec->shape[d] > 1 && !w->spec->stride[d]);
    uint64_t held = ((uint64_t)w->span * (uint64_t)w->spec->type->size + 63) / 64 * 64;
    if (held > had || (expanded && held != had))
      WRONG("%s was compiled for %zu bytes of %s; with the manifest's strides it has %" PRIu64
            ": the manifest does not belong to this code; export it again",
            l->build->member, had, SHOWN(c->weight_name), held);
  }
}

static void bind(arena *a, library *l, weight *const *weights) {
  uint32_t count = l->build->constant_count;
  if (!count) return;
  int32_t (*give)(void *, const named_constant *, size_t, bool, bool);
  *(void **)&give = dlsym(l->code, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs");
  if (!give) WRONG("%s was written by a torch whose code cannot be bound from C; rebuild it with torch 2.11 or later", l->build->member);
  named_constant *pairs = TAKE(a, count, named_constant);
  l->constants = TAKE(a, count, tensor_handle);
  for (uint32_t i = 0; i < count; i++) {
    const constant_spec *c = &l->build->constants[i];
    const weight *w = weights[c->weight];
    if (l->backend->from_blob(w->data, w->spec->rank, w->spec->shape, w->spec->stride, 0, w->spec->type->code, 0, 0, &l->constants[i]))
      arena_fail(a, AOTB_MEMORY, "a tensor for '%s' could not be made", SHOWN(c->weight_name));
    l->constant_count = i + 1;
    pairs[i] = (named_constant){c->name, l->constants[i]};
  }
  if (l->backend->views_begin) l->views = l->backend->views_begin();
  int32_t refused = give(l->container, pairs, count, false, true);
  if (l->backend->views_end) l->backend->views_end();
  if (refused) WRONG("%s does not take its weights", l->build->member);
}

library *library_open(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, weight *const *weights) {
  library *l = TAKE(a, 1, library);
  l->spec = spec;
  l->build = &spec->builds[p->target];
  l->backend = b;
  const char *path = extracted(p, a, b, spec, l->build);
  int32_t (*create)(void **, size_t, const char *, const char *);
  l->code = b->standalone ? backend_dlopen(path) : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!l->code) {
    const char *why = dlerror(), *missing = why ? strstr(why, "undefined symbol: ") : NULL;
    if (missing && b->standalone)
      WRONG("%s calls %s, which the backend standalone does not have: open the package with the backend libtorch", l->build->member,
            shown(missing + 18, strcspn(missing + 18, " ,")));
    WRONG("%s could not be opened: %s", l->build->member, why ? why : path);
  }
  jmp_buf *outer = a->back, here;
  int status = setjmp(here);
  if (status) {
    library_close(l);
    a->back = outer;
    longjmp(*outer, status);
  }
  a->back = &here;
  *(void **)&create = dlsym(l->code, "AOTInductorModelContainerCreateWithDevice");
  *(void **)&l->run = dlsym(l->code, "AOTInductorModelContainerRun");
  *(void **)&l->destroy = dlsym(l->code, "AOTInductorModelContainerDelete");
  *(void **)&l->last_error = dlsym(l->code, "AOTInductorGetLastError"); /* older libraries lack it */
  if (!create || !l->run || !l->destroy) WRONG("%s is not a library of AOTInductor", l->build->member);
  if (create(&l->container, 1, "cpu", NULL)) WRONG("%s could not be opened", l->build->member);
  check_stated(a, l, weights);
  bind(a, l, weights);
  if (*l->build->extern_file) l->externs = extern_calls_read(p, a, b, spec, l->build);
  a->back = outer;
  return l;
}

void library_close(library *l) {
  if (l->container) l->destroy(l->container);
  if (l->views) l->backend->views_drop(l->views);
  l->views = NULL;
  for (uint32_t i = 0; i < l->constant_count; i++) l->backend->drop(l->constants[i]);
  if (l->code) dlclose(l->code);
  l->container = l->code = NULL;
  l->constant_count = 0;
}

aotb_status library_run(library *l, const char *entry, tensor_handle *inputs, tensor_handle *outputs) {
  if (!l->run(l->container, inputs, l->spec->inputs.count, outputs, l->spec->outputs.count, NULL, l->externs)) return AOTB_OK;
  memset(outputs, 0, l->spec->outputs.count * sizeof *outputs);
  const char *why = l->backend->error ? l->backend->error() : NULL;
  if ((!why || !*why) && (!l->last_error || l->last_error(&why))) why = NULL;
  size_t line = why ? strcspn(why, "\n") : 0;
  return aotb_fail(AOTB_RUN, "entry %s: %s: native code failed: %s", entry, l->build->member, line ? shown(why, line) : "it gives no reason");
}
