/* A package of ab.derivatives as a function of CasADi, in C: no Python in a call, and no PyTorch. Build it with
 *
 *     gcc -O2 -shared -fPIC external.c -o dynamics.so -DPACKAGE='"dynamics.pt2"' -DPOINTS=20 -laot_backward
 *
 * (and -I, -L and -Wl,-rpath with the folders of the header and the library), and in Python
 *
 *     f = casadi.external("f", "./dynamics.so")
 *
 * is f(X, U), with a column for each of the 20 points. CasADi finds f, jac_f, adj1_f and jac_adj1_f by their names. They run the entries "value",
 * "jacobian", "vjp" and "hessian", whose arguments and result are (points, size) in float64. One thread at a time: POINTS takes the place of map. */
#include <aot_backward.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef POINTS
#define POINTS 1
#endif
enum { MOST = 8, RESULTS = MOST * MOST };
typedef long long casadi_int;

static aotb_package *package;
static casadi_int count, sizes[MOST + 1]; /* of the arguments, then of the result */
static char names[MOST][64];

static int fail(const char *message) { return fprintf(stderr, "%s: %s\n", PACKAGE, message), 1; }

static int open_package(void) {
  if (package) return 0;
  aotb_package *opened;
  aotb_function *value;
  aotb_description of;
  if (aotb_open(PACKAGE, NULL, &opened) || aotb_get(opened, "value", &value)) return fail(aotb_error());
  const uint32_t inputs = aotb_count(value, 0, AOTB_INPUTS);
  if (inputs > MOST) return fail("expected at most 8 arguments, got more. Raise MOST.");
  if (aotb_count(value, 0, AOTB_OUTPUTS) != 1) return fail("expected one result, got several. Concatenate them in the model.");
  for (uint32_t i = 0; i <= inputs; i++) {
    if (aotb_describe(value, 0, i < inputs ? AOTB_INPUTS : AOTB_OUTPUTS, i < inputs ? i : 0, &of)) return fail(aotb_error());
    const int matrix = of.ndim == 2 && !isdigit((unsigned char)of.shape[0][0]) && isdigit((unsigned char)of.shape[1][0]);
    if (!matrix || of.dtype.code != 2 || of.dtype.bits != 64)
      return fail("expected float64 tensors of (points, size) with any number of points, got others. Export with batch=0.");
    if (strlen(of.name) >= sizeof names[0]) return fail("expected names of at most 63 characters, got a longer one. Rename the argument.");
    sizes[i] = atoll(of.shape[1]);
    if (i < inputs) memcpy(names[i], of.name, strlen(of.name) + 1);
  }
  aotb_free(value);
  count = inputs, package = opened;
  return 0;
}

/* The sparsity of CasADi: a dense matrix, or a block for each point without zeros (filled) or of zeros alone. It stays in memory. */
static const casadi_int *dense(casadi_int rows) {
  casadi_int *out = malloc(3 * sizeof *out);
  return out[0] = rows, out[1] = POINTS, out[2] = 1, out;
}
static const casadi_int *blocks(casadi_int rows, casadi_int columns, int filled) {
  const casadi_int wide = columns * POINTS, each = filled ? rows : 0;
  casadi_int *out = malloc((size_t)(3 + wide + each * wide) * sizeof *out), *colind = out + 2, *row = colind + wide + 1;
  out[0] = rows * POINTS, out[1] = wide;
  for (casadi_int c = 0; c <= wide; c++) colind[c] = each * c;
  for (casadi_int c = 0; c < wide; c++)
    for (casadi_int r = 0; r < each; r++) *row++ = c / columns * rows + r;
  return out;
}

/* Calls an entry with the arguments, and the vector if it is not NULL. */
static int call(const char *entry, aotb_function **function, const double **arg, const double *vector, DLTensor *out) {
  static double zeros[1 << 16];
  static int64_t shapes[MOST + 1][2];
  DLTensor in[MOST + 1];
  uint32_t number = 0;
  if (open_package()) return 1;
  if (!*function && aotb_get(package, entry, function)) return fail(aotb_error());
  for (casadi_int i = 0; i < count + (vector != NULL); i++, number++) {
    const casadi_int size = sizes[i];
    const double *data = i < count ? arg[i] : vector;
    if (!data && size * POINTS > (1 << 16)) return fail("expected an argument, got none. Pass zeros.");
    shapes[i][0] = POINTS, shapes[i][1] = size;
    in[i] = (DLTensor){.data = (void *)(data ? data : zeros), .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = shapes[i]};
  }
  const uint32_t results = aotb_count(*function, 0, AOTB_OUTPUTS);
  if (results > RESULTS) return fail("expected at most 64 results, got more. Raise RESULTS.");
  memset(out, 0, results * sizeof *out);
  return aotb_run(*function, in, number, out, results) ? fail(aotb_error()) : 0;
}

/* The result "x", or "x.u" if `by` is "u"; NULL if there is none. */
static const DLTensor *result(aotb_function *function, const DLTensor *out, const char *name, const char *by) {
  const size_t length = strlen(name);
  aotb_description of;
  for (uint32_t i = 0; i < aotb_count(function, 0, AOTB_OUTPUTS); i++)
    if (!aotb_describe(function, 0, AOTB_OUTPUTS, i, &of) && !strncmp(of.name, name, length))
      if (by ? of.name[length] == '.' && !strcmp(of.name + length + 1, by) : !of.name[length]) return out + i;
  return NULL;
}

/* Copies (points, rows) or (points, rows, columns), of any strides, to CasADi's order: for each point, column by column. `transposed`: row by row.
 * NaN for a derivative that the package lacks. */
static void fill(double *to, const DLTensor *from, casadi_int rows, casadi_int columns, int transposed) {
  const double *data = from ? (const double *)((const char *)from->data + from->byte_offset) : NULL;
  const int64_t *strides = from ? from->strides : NULL;
  for (casadi_int p = 0; to && p < POINTS; p++)
    for (casadi_int k = 0; k < rows * columns; k++) {
      const casadi_int r = transposed ? k / columns : k % rows, c = transposed ? k % columns : k / rows;
      *to++ = data ? data[p * strides[0] + r * strides[1] + (from->ndim > 2 ? c * strides[2] : 0)] : NAN;
    }
}

casadi_int f_n_in(void) { return open_package() ? 0 : count; }
casadi_int f_n_out(void) { return 1; }
const casadi_int *f_sparsity_in(casadi_int i) { return dense(sizes[i]); }
const casadi_int *f_sparsity_out(casadi_int i) { return package ? dense(sizes[count + i]) : NULL; }
int f(const double **arg, double **res, casadi_int *iw, double *w, int mem) {
  (void)iw, (void)w, (void)mem;
  static aotb_function *value;
  DLTensor out[RESULTS];
  if (call("value", &value, arg, NULL, out)) return 1;
  fill(res[0], out, sizes[count], 1, 0);
  return 0;
}

/* The Jacobian by each argument; its last input is the result. */
casadi_int jac_f_n_in(void) { return count + 1; }
casadi_int jac_f_n_out(void) { return count; }
const casadi_int *jac_f_sparsity_in(casadi_int i) { return dense(sizes[i]); }
const casadi_int *jac_f_sparsity_out(casadi_int i) { return blocks(sizes[count], sizes[i], 1); }
static aotb_function *jacobian;
int jac_f(const double **arg, double **res, casadi_int *iw, double *w, int mem) {
  (void)iw, (void)w, (void)mem;
  DLTensor out[RESULTS];
  if (call("jacobian", &jacobian, arg, NULL, out)) return 1;
  for (casadi_int i = 0; i < count; i++) fill(res[i], result(jacobian, out, names[i], NULL), sizes[count], sizes[i], 0);
  return 0;
}

/* The vector times the Jacobian, by each argument; its last inputs are the
 * result and the vector. */
casadi_int adj1_f_n_in(void) { return count + 2; }
casadi_int adj1_f_n_out(void) { return count; }
const casadi_int *adj1_f_sparsity_in(casadi_int i) { return dense(sizes[i < count ? i : count]); }
const casadi_int *adj1_f_sparsity_out(casadi_int i) { return dense(sizes[i]); }
int adj1_f(const double **arg, double **res, casadi_int *iw, double *w, int mem) {
  (void)iw, (void)w, (void)mem;
  static aotb_function *vjp;
  DLTensor out[RESULTS];
  if (call("vjp", &vjp, arg, arg[count + 1], out)) return 1;
  for (casadi_int i = 0; i < count; i++) fill(res[i], result(vjp, out, names[i], NULL), sizes[i], 1, 0);
  return 0;
}

/* The Jacobian of adj1_f: by each argument, by the result (zero), and by the
 * vector (the transposed Jacobian). */
casadi_int jac_adj1_f_n_in(void) { return 2 * count + 2; }
casadi_int jac_adj1_f_n_out(void) { return count * (count + 2); }
const casadi_int *jac_adj1_f_sparsity_in(casadi_int i) { return dense(sizes[i < count ? i : i < count + 2 ? count : i - count - 2]); }
const casadi_int *jac_adj1_f_sparsity_out(casadi_int i) {
  const casadi_int by = i % (count + 2);
  return blocks(sizes[i / (count + 2)], sizes[by < count ? by : count], by != count);
}
int jac_adj1_f(const double **arg, double **res, casadi_int *iw, double *w, int mem) {
  (void)iw, (void)w, (void)mem;
  static aotb_function *hessian;
  DLTensor first[RESULTS], second[RESULTS];
  if (call("jacobian", &jacobian, arg, NULL, first) || call("hessian", &hessian, arg, arg[count + 1], second)) return 1;
  for (casadi_int i = 0; i < count; i++) {
    double **to = res + i * (count + 2);
    for (casadi_int j = 0; j < count; j++) fill(to[j], result(hessian, second, names[i], names[j]), sizes[i], sizes[j], 0);
    fill(to[count + 1], result(jacobian, first, names[i], NULL), sizes[count], sizes[i], 1);
  }
  return 0;
}
