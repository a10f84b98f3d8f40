/* Code for WebAssembly is linked with its C library, so that any version of it fits. */
#ifndef AOTB_LIBC_VERSION_H
#define AOTB_LIBC_VERSION_H
static inline const char *gnu_get_libc_version(void) { return "0.0"; }
#endif
