/* Operators that compiled code calls by name, through what AOTInductor calls a proxy executor. */
#ifndef AOTB_EXTERN_CALLS_H
#define AOTB_EXTERN_CALLS_H
#include "backend.h"
#include "package.h"

/* What is given to the compiled code as its executor. Fails, naming the operator, where one cannot be called from C. */
struct extern_calls *extern_calls_read(struct aotb_package *p, arena *a, const backend *b, const library_spec *spec, const build_spec *build);
#endif
