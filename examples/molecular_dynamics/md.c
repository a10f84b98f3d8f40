/* Molecular dynamics in C, second half: move atoms in a periodic box with the gradient of the package (export.py).
 *
 *     ./md metal.pt2 [atoms along an edge] [steps]
 *
 * Velocity Verlet with unit masses. The program finds neighbours with cells and keeps them until an atom has moved by half of SKIN. The total energy
 * must stay constant. */
#include <aot_backward.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUTOFF 2.2 /* as in export.py */
#define SKIN 0.3
#define STEP 0.004

typedef struct {
  int64_t atoms, pairs, room;
  double box;
  double *pos, *velocity, *at; /* at: the positions when the neighbours were found */
  int64_t *first, *second;
  double *shift;
} simulation;

static int failed(void) {
  fprintf(stderr, "%s\n", aotb_error());
  return 1;
}

static void add_pair(simulation *s, int64_t i, int64_t j, const double shift[3]) {
  if (s->pairs == s->room) {
    s->room = 2 * s->room + 1024;
    s->first = realloc(s->first, sizeof *s->first * (size_t)s->room);
    s->second = realloc(s->second, sizeof *s->second * (size_t)s->room);
    s->shift = realloc(s->shift, 3 * sizeof *s->shift * (size_t)s->room);
    if (!s->first || !s->second || !s->shift) exit(1);
  }
  s->first[s->pairs] = i;
  s->second[s->pairs] = j;
  memcpy(s->shift + 3 * s->pairs++, shift, 3 * sizeof *shift);
}

/* Put the atoms back into the box and into cells at least as wide as the reach. List each pair within the reach once. */
static void find_neighbours(simulation *s) {
  const double reach = CUTOFF + SKIN;
  int64_t cells = (int64_t)(s->box / reach), all = cells * cells * cells;
  if (cells < 3) {
    fprintf(stderr, "the box of %g is smaller than three times %g\n", s->box, reach);
    exit(1);
  }
  int64_t *head = malloc(sizeof *head * (size_t)all), *next = malloc(sizeof *next * (size_t)s->atoms), *cell = malloc(3 * sizeof *cell * (size_t)s->atoms);
  if (!head || !next || !cell) exit(1);
  for (int64_t c = 0; c < all; c++) head[c] = -1;
  for (int64_t i = 0; i < s->atoms; i++) {
    for (int d = 0; d < 3; d++) {
      double *x = &s->pos[3 * i + d];
      *x -= s->box * floor(*x / s->box);
      cell[3 * i + d] = (int64_t)(*x / s->box * (double)cells) % cells;
    }
    int64_t c = (cell[3 * i] * cells + cell[3 * i + 1]) * cells + cell[3 * i + 2];
    next[i] = head[c];
    head[c] = i;
  }
  s->pairs = 0;
  for (int64_t i = 0; i < s->atoms; i++)
    for (int neighbour = 0; neighbour < 27; neighbour++) {
      int offset[3] = {neighbour / 9 - 1, neighbour / 3 % 3 - 1, neighbour % 3 - 1};
      int64_t c = 0;
      double shift[3];
      for (int d = 0; d < 3; d++) {
        int64_t k = cell[3 * i + d] + offset[d];
        shift[d] = k < 0 ? -s->box : k >= cells ? s->box : 0;
        c = c * cells + (k + cells) % cells;
      }
      for (int64_t j = head[c]; j >= 0; j = next[j]) {
        double square = 0;
        for (int d = 0; d < 3; d++) {
          double x = s->pos[3 * j + d] + shift[d] - s->pos[3 * i + d];
          square += x * x;
        }
        if (i < j && square < reach * reach) add_pair(s, i, j, shift);
      }
    }
  memcpy(s->at, s->pos, 3 * sizeof *s->pos * (size_t)s->atoms);
  free(head);
  free(next);
  free(cell);
}

static int moved_too_far(const simulation *s) {
  for (int64_t i = 0; i < s->atoms; i++) {
    double square = 0;
    for (int d = 0; d < 3; d++) square += (s->pos[3 * i + d] - s->at[3 * i + d]) * (s->pos[3 * i + d] - s->at[3 * i + d]);
    if (square > SKIN * SKIN / 4) return 1;
  }
  return 0;
}

int main(int argc, char **argv) {
  const char *path = argc > 1 ? argv[1] : "metal.pt2";
  int64_t edge = argc > 2 ? atoi(argv[2]) : 8;
  int steps = argc > 3 ? atoi(argv[3]) : 1000, searches = 1;
  simulation s = {.atoms = edge * edge * edge, .box = 1.1 * (double)edge};
  size_t bytes = 3 * sizeof(double) * (size_t)s.atoms;
  double *gradient = malloc(bytes), energy = 0, first = 0, drift = 0, kinetic = 0;
  s.pos = malloc(bytes);
  s.velocity = malloc(bytes);
  s.at = malloc(bytes);
  if (!gradient || !s.pos || !s.velocity || !s.at) return 1;
  srand(1);
  for (int64_t i = 0; i < 3 * s.atoms; i++) {
    int64_t point[3] = {i / 3 / edge / edge, i / 3 / edge % edge, i / 3 % edge};
    s.pos[i] = 1.1 * (double)point[i % 3];
    s.velocity[i] = 0.6 * (rand() / (double)RAND_MAX - 0.5);
  }
  aotb_package *package;
  aotb_function *function;
  if (aotb_open(path, NULL, &package) || aotb_get(package, "energy", &function)) return failed();
  find_neighbours(&s);
  int64_t atoms[] = {s.atoms, 3};
  DLTensor results[2] = {{.data = &energy, .device = {1, 0}, .dtype = {2, 64, 1}},
                         {.data = gradient, .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = atoms}};
  for (int step = 0; step <= steps; step++) {
    for (int64_t i = 0; step && i < 3 * s.atoms; i++) {
      s.velocity[i] -= STEP / 2 * gradient[i];
      s.pos[i] += STEP * s.velocity[i];
    }
    if (moved_too_far(&s)) {
      find_neighbours(&s);
      searches++;
    }
    int64_t pairs[] = {s.pairs, 3};
    DLTensor inputs[4] = {{.data = s.pos, .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = atoms},
                          {.data = s.first, .device = {1, 0}, .ndim = 1, .dtype = {0, 64, 1}, .shape = pairs},
                          {.data = s.second, .device = {1, 0}, .ndim = 1, .dtype = {0, 64, 1}, .shape = pairs},
                          {.data = s.shift, .device = {1, 0}, .ndim = 2, .dtype = {2, 64, 1}, .shape = pairs}};
    if (aotb_run(function, inputs, 4, results, 2)) return failed();
    kinetic = 0;
    for (int64_t i = 0; i < 3 * s.atoms; i++) {
      if (step) s.velocity[i] -= STEP / 2 * gradient[i];
      kinetic += s.velocity[i] * s.velocity[i] / 2;
    }
    if (!step) first = energy + kinetic;
    if (fabs(energy + kinetic - first) > drift) drift = fabs(energy + kinetic - first);
    if (step % (steps / 5 ? steps / 5 : 1) == 0) printf("%6d  energy %.6f  of it motion %.6f\n", step, energy + kinetic, kinetic);
  }
  printf("%lld atoms, %lld pairs, neighbours found %d times; the energy drifted by %.1e at most\n", (long long)s.atoms, (long long)s.pairs, searches, drift);
  aotb_free(function);
  aotb_close(package);
  return drift < 1e-3 * (double)s.atoms && kinetic > 1 ? 0 : 1;
}
