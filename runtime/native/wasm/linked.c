/* The dynamic linker of WebAssembly modules: the library, its standalone backend and the compiled graphs are one module, so dlopen finds what is
 * linked already. The C++ library is known by the name that it has on Linux. */
#include "linked.h"

#include <aot_backward.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

/* index.mjs reads and writes these structs. */
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #field)
AT(DLTensor, device, 4);
AT(DLTensor, ndim, 12);
AT(DLTensor, dtype, 16);
AT(DLTensor, shape, 20);
AT(DLTensor, strides, 24);
AT(DLTensor, byte_offset, 32);
AT(aotb_description, dtype, 4);
AT(aotb_description, ndim, 8);
AT(aotb_description, shape, 12);
AT(aotb_description, group, 16);
AT(aotb_description, position, 24);
AT(aotb_description, value, 32);
AT(aotb_progress, grad_norm, 24);
AT(aotb_progress, loss_scale, 32);
AT(aotb_options, unchecked, 8);
_Static_assert(sizeof(DLTensor) == 40 && sizeof(aotb_description) == 40 && sizeof(aotb_progress) == 40 && sizeof(aotb_options) == 12, "sizes");

/* A call through a pointer traps unless the types are equal, so these are the types of the definitions. */
int32_t aoti_torch_create_tensor_from_blob(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, void **);
int32_t aoti_torch_delete_tensor_object(void *), aoti_torch_get_data_ptr(void *, void **);
int32_t aoti_torch_get_sizes(void *, int64_t **), aoti_torch_get_strides(void *, int64_t **);
int32_t aoti_torch_new_tensor_handle(void *, void **), aoti_torch_assign_tensors(void *, void *);
int32_t aoti_torch_cpu_fill__Scalar(void *, double), aoti_torch_cpu_pad(void *, const int64_t *, int64_t, const char *, double *, void **);
int32_t torch_call_dispatcher(const char *, const char *, uint64_t *, uint64_t), torch_new_list_reserve_size(size_t, void **);
int32_t torch_list_push_back(void *, uint64_t), torch_new_string_handle(const char *, size_t, void **), torch_new_stable_ivalue(uint64_t **);
const char *core_error(void);
int32_t core_serves(const char *, const char *);
void *core_views_begin(void);
void core_views_end(void), core_views_drop(void *), core_seed(uint64_t), core_random_state(uint8_t *), core_set_random_state(const uint8_t *);
void core_threads(int);
void raise_runtime_error(const char *); /* raise.cpp */

#define SYMBOL(name) {#name, (const void *)name}
static const symbol core[] = {SYMBOL(aoti_torch_create_tensor_from_blob),
                              SYMBOL(aoti_torch_delete_tensor_object),
                              SYMBOL(aoti_torch_get_data_ptr),
                              SYMBOL(aoti_torch_get_sizes),
                              SYMBOL(aoti_torch_get_strides),
                              SYMBOL(aoti_torch_new_tensor_handle),
                              SYMBOL(aoti_torch_assign_tensors),
                              SYMBOL(aoti_torch_cpu_fill__Scalar),
                              SYMBOL(aoti_torch_cpu_pad),
                              SYMBOL(torch_call_dispatcher),
                              SYMBOL(torch_new_list_reserve_size),
                              SYMBOL(torch_list_push_back),
                              SYMBOL(torch_new_string_handle),
                              SYMBOL(torch_new_stable_ivalue),
                              SYMBOL(core_error),
                              SYMBOL(core_serves),
                              SYMBOL(core_views_begin),
                              SYMBOL(core_views_end),
                              SYMBOL(core_views_drop),
                              SYMBOL(core_seed),
                              SYMBOL(core_random_state),
                              SYMBOL(core_set_random_state),
                              SYMBOL(core_threads),
                              {NULL, NULL}};
static const symbol standard[] = {
    {"_ZSt21__throw_runtime_errorPKc", (const void *)raise_runtime_error}, {"_Znwm", (const void *)malloc}, {NULL, NULL}};

void *dlopen(const char *path, int mode) {
  (void)mode;
  const char *slash = path ? strrchr(path, '/') : NULL, *file = slash ? slash + 1 : path;
  if (!file) return NULL;
  if (!strcmp(file, "libaotb_core.so")) return (void *)core;
  if (!strcmp(file, "libstdc++.so.6")) return (void *)standard;
  for (const linked_graph *graph = linked_graphs; graph->prefix; graph++)
    if (!strcmp(file, graph->prefix)) return (void *)graph->symbols;
  return NULL;
}

void *dlsym(void *library, const char *name) {
  for (const symbol *s = library; s && s->name; s++)
    if (!strcmp(s->name, name)) return (void *)s->address;
  return NULL;
}

int dlclose(void *library) { return (void)library, 0; }
const char *dlerror(void) { return "its code is not in this module.wasm. Take module.wasm and package.pt2 from one export"; }
int dladdr(const void *address, Dl_info *found) { return (void)address, (void)found, 0; }

/* emscripten's C library lacks it, and Node.js 18 has no random numbers under the name that its getentropy uses. Only names of temporary files need
 * them, in a file system that nothing else writes to. */
ssize_t getrandom(void *to, size_t bytes, unsigned flags) { return (void)to, (void)bytes, (void)flags, -1; }
