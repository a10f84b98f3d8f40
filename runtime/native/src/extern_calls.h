/* Operators that compiled code calls by name, through AOTInductor's proxy executor. */
#ifndef AOTB_EXTERN_CALLS_H
#define AOTB_EXTERN_CALLS_H
#include "backend.h"
#include "package.h"

/* Returns the proxy executor for compiled code. Fails and names the operator if one cannot be called from C. */
struct extern_calls *extern_calls_read(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, const build_spec *build);
#endif
