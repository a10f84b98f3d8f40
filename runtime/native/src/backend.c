#define _GNU_SOURCE
#include "backend.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const VARIABLE = "AOT_BACKWARD_BACKEND";
static const char *const FOLDER = "AOT_BACKWARD_LIBTORCH";
static const char CORE[] = "libaotb_core.so";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ISO C cannot convert a data pointer to a function pointer; POSIX defines this conversion. */
#define FIND(b, to, name) (*(void **)&(to) = dlsym((b)->library, name))

void *backend_dlopen(const char *path) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ /* a sanitizer's runtime does not allow the flag */
  const int own_scope_first = 0;
#else
  const int own_scope_first = RTLD_DEEPBIND;
#endif
  return dlopen(path, RTLD_NOW | RTLD_LOCAL | own_scope_first);
}

static bool has_all(backend *b, const char **missing) {
  const struct {
    const char *name;
    void *to;
  } wanted[] = {{"aoti_torch_create_tensor_from_blob", &b->from_blob},
                {"aoti_torch_delete_tensor_object", &b->drop},
                {"aoti_torch_get_data_ptr", &b->data},
                {"aoti_torch_get_sizes", &b->sizes},
                {"aoti_torch_get_strides", &b->strides}};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    void *found = dlsym(b->library, wanted[i].name);
    if (!found) {
      *missing = wanted[i].name;
      return false;
    }
    memcpy(wanted[i].to, &found, sizeof found);
  }
  return true;
}

/* Opens libtorch_cpu.so: the given path; else the library that the process has loaded, the one in $AOT_BACKWARD_LIBTORCH, or the linker's. */
static void *open_libtorch(arena *a, const char *named, const char **path) {
  const char *folder = getenv(FOLDER);
  void *found = NULL;
  *path = "libtorch_cpu.so";
  if (!named) found = dlopen(*path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!found && named) *path = named;
  else if (!found && folder && *folder) *path = arena_print(a, "%s/libtorch_cpu.so", folder);
  if (!found) found = dlopen(*path, RTLD_NOW | RTLD_LOCAL);
  if (found) return found;
  const char *why = dlerror();
  arena_fail(a, AOTB_INCOMPATIBLE,
             "the backend libtorch could not be opened: %s; set %s to the folder that holds libtorch_cpu.so (python -c 'import torch; "
             "print(torch.__path__[0] + \"/lib\")')",
             why ? why : *path, FOLDER);
}

/* Opens libaotb_core.so: the library that the process has loaded, also by another copy of this library, because the linker binds compiled code to it;
 * else the file next to this library. */
static void *open_core(arena *a, const char **path) {
  Dl_info own;
  void *loaded = dlopen(*path = CORE, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (loaded) return loaded;
  const char *slash = dladdr(&lock, &own) && own.dli_fname ? strrchr(own.dli_fname, '/') : NULL;
  *path = slash ? arena_print(a, "%.*s/%s", (int)(slash - own.dli_fname), own.dli_fname, CORE) : CORE;
  void *found = backend_dlopen(*path);
  if (found) return found;
  const char *why = dlerror();
  arena_fail(a, AOTB_INCOMPATIBLE, "the backend standalone could not be opened: %s", why ? why : *path);
}

static void open_one(arena *a, backend *b, const char *path) {
  const char *from, *missing = NULL;
  b->library = b->standalone ? open_core(a, &from) : open_libtorch(a, path, &from);
  if (!has_all(b, &missing)) arena_fail(a, AOTB_INCOMPATIBLE, "%s is not a backend: it lacks %s", from, missing);
  uint64_t (*version)(void) = NULL;
  if (b->standalone) {
    FIND(b, b->error, "core_error");
    FIND(b, b->serves, "core_serves");
    FIND(b, b->views_begin, "core_views_begin");
    FIND(b, b->views_end, "core_views_end");
    FIND(b, b->views_drop, "core_views_drop");
  } else if (!FIND(b, version, "aoti_torch_abi_version"))
    arena_fail(a, AOTB_INCOMPATIBLE, "%s is older than torch 2.11, the oldest supported version", from);
  uint64_t number = version ? version() : 0;
  b->torch[0] = (int)(number >> 56);
  b->torch[1] = (int)(number >> 48 & 255);
  b->path = strdup(from);
  if (!b->path) arena_fail(a, AOTB_MEMORY, "no memory");
}

static backend *opened[2]; /* libtorch, standalone: they stay open */

static const backend *open_once(arena *a, bool standalone, const char *path) {
  backend *known = opened[standalone];
  if (known && (!path || !strcmp(path, known->path))) return known;
  if (known) arena_fail(a, AOTB_INCOMPATIBLE, "%s is in use in this process, and %s was asked for; a process has one libtorch", known->path, path);
  backend *b = calloc(1, sizeof *b);
  if (!b) arena_fail(a, AOTB_MEMORY, "no memory");
  jmp_buf *outer = a->back, here;
  int status = setjmp(here);
  if (status) {
    free(b);
    a->back = outer;
    longjmp(*outer, status);
  }
  a->back = &here;
  b->standalone = standalone;
  b->name = standalone ? "standalone" : "libtorch";
  open_one(a, b, path);
  a->back = outer;
  return opened[standalone] = b;
}

static const backend *open_locked(arena *a, bool standalone, const char *path) {
  jmp_buf *outer = a->back, here;
  pthread_mutex_lock(&lock);
  int status = setjmp(here);
  if (status) {
    pthread_mutex_unlock(&lock);
    a->back = outer;
    longjmp(*outer, status);
  }
  a->back = &here;
  const backend *found = open_once(a, standalone, path);
  a->back = outer;
  pthread_mutex_unlock(&lock);
  return found;
}

const backend *backend_open(arena *a, const char *which) {
  const char *name = which ? which : getenv(VARIABLE);
  if (!name || !*name) name = "standalone";
  const char *path = strchr(name, '/') ? name : NULL;
  if (!strcmp(name, "standalone")) return open_locked(a, true, NULL);
  if (!path && strcmp(name, "libtorch"))
    arena_fail(a, AOTB_INCOMPATIBLE, "there is no backend '%s'; expected standalone, libtorch, or a path to libtorch_cpu.so",
               shown(name, strlen(name)));
  return open_locked(a, false, path);
}

/* --- random numbers --------------------------------------------------------------------------------------------------------------------------- */

/* libtorch has no C function for its default generator. So the C++ functions are called by their mangled names (Itanium C++ ABI). at::Generator is
 * one pointer to a CPUGeneratorImpl. at::Tensor is one pointer to a TensorImpl, and a tensor handle of AOTInductor's interface is a pointer to an
 * at::Tensor. */

enum { RANDOM_STATE = 5056 }; /* bytes of torch.get_rng_state() */

/* An at::Tensor has a destructor, so a function returns it in memory of the caller, as it returns this struct, which is too large for registers. The
 * address is the first argument on x86-64, and in a register of its own on aarch64. */
typedef struct {
  void *tensor, *unused[2];
} in_memory;

static void *generator(arena *a, const backend *b) {
  void *const *(*get)(void);
  if (!FIND(b, get, "_ZN2at6detail22getDefaultCPUGeneratorEv"))
    arena_fail(a, AOTB_INCOMPATIBLE, "%s does not say where its random numbers come from", b->path);
  return *get();
}

#define NEED(a, b, to, name)                                                                                                                         \
  if (!FIND(b, to, name)) arena_fail(a, AOTB_INCOMPATIBLE, "%s lacks %s", (b)->path, name)

void backend_seed(arena *a, const backend *b, uint64_t seed) {
  if (b->standalone) {
    void (*own)(uint64_t);
    NEED(a, b, own, "core_seed");
    own(seed);
    return;
  }
  void (*set)(void *, uint64_t);
  NEED(a, b, set, "_ZN2at16CPUGeneratorImpl16set_current_seedEm");
  set(generator(a, b), seed);
}

const uint8_t *backend_random(arena *a, const backend *b, size_t *size) {
  if (b->standalone) {
    void (*own)(uint8_t *);
    NEED(a, b, own, "core_random_state");
    uint8_t *state = arena_take(a, *size = RANDOM_STATE, 1);
    own(state);
    return state;
  }
  in_memory (*get)(void *self);
  void *from = generator(a, b), *data;
  int64_t *sizes;
  NEED(a, b, get, "_ZNK2at16CPUGeneratorImpl9get_stateEv");
  int32_t (*undefined)(tensor_handle *);
  NEED(a, b, undefined, "aoti_torch_new_uninitialized_tensor");
  tensor_handle state;
  if (undefined(&state)) arena_fail(a, AOTB_MEMORY, "no memory");
  *(void **)state = get(from).tensor;
  if (b->sizes(state, &sizes) || b->data(state, &data)) arena_fail(a, AOTB_RUN, "the random state cannot be read");
  *size = (size_t)*sizes;
  uint8_t *out = arena_take(a, *size, 1);
  memcpy(out, data, *size);
  b->drop(state);
  return out;
}

void backend_set_random(arena *a, const backend *b, const uint8_t *state, size_t size) {
  if (b->standalone) {
    void (*own)(const uint8_t *);
    NEED(a, b, own, "core_set_random_state");
    own(state);
    return;
  }
  void (*set)(void *self, const void *tensor);
  void *to = generator(a, b);
  int64_t sizes[1] = {(int64_t)size}, strides[1] = {1};
  tensor_handle given;
  NEED(a, b, set, "_ZN2at16CPUGeneratorImpl9set_stateERKN3c1010TensorImplE");
  if (b->from_blob((void *)(uintptr_t)state, 1, sizes, strides, 0, 0, 0, 0, &given)) arena_fail(a, AOTB_MEMORY, "no memory");
  set(to, *(void **)given); /* throws if the state is invalid, which random_problem checks before */
  b->drop(given);
}

void backend_threads(const backend *b, int count) {
  void (*set)(int);
  if (FIND(b, set, b->standalone ? "core_threads" : "_ZN2at15set_num_threadsEi")) set(count);
}
