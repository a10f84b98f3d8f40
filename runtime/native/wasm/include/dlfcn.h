/* The dynamic linker of a WebAssembly module (linked.c), under names that the C library does not have. */
#ifndef AOTB_DLFCN_H
#define AOTB_DLFCN_H
enum { RTLD_NOW = 2, RTLD_LOCAL = 0, RTLD_NOLOAD = 4, RTLD_DEEPBIND = 8 };
typedef struct {
  const char *dli_fname;
} Dl_info;
#define dlopen linked_open
#define dlsym linked_symbol
#define dlclose linked_close
#define dlerror linked_error
#define dladdr linked_address
void *dlopen(const char *path, int mode);
void *dlsym(void *library, const char *name);
int dlclose(void *library);
const char *dlerror(void);
int dladdr(const void *address, Dl_info *found);
#endif
