/* pair_style aotb: force fields exported by ab.forcefield, in LAMMPS, without Python and without PyTorch (docs/how-to/lammps.md).
 *
 *     plugin load aotbplugin.so
 *     pair_style aotb [ENTRY]
 *     pair_coeff * * mace.pt2 H C O        # the species of each atom type
 *
 * Each rank passes its own atoms to the package, and the ghosts that are at most `layers` edges away from them. An edge to a periodic image of an own
 * atom leads to that atom, with a shift. A single rank therefore passes no ghosts. LAMMPS's reverse communication returns forces on ghosts to their
 * owners. */
#include <array>
#include <map>
#include "atom.h"
#include "comm.h"
#include "error.h"
#include "force.h"
#include "forcefield.h"
#include "lammps.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "pair.h"
#include "update.h"

using namespace LAMMPS_NS;

class PairAOTB : public Pair {
public:
  explicit PairAOTB(LAMMPS *lmp) : Pair(lmp) {
    single_enable = restartinfo = 0;
    one_coeff = manybody_flag = ghostneigh = no_virial_fdotr_compute = 1;
    centroidstressflag = CENTROID_NOTAVAIL;
  }
  ~PairAOTB() override { memory->destroy(setflag), memory->destroy(cutsq), memory->destroy(cutghost); }

  void settings(int narg, char **arg) override {
    if (narg > 1) error->all(FLERR, "pair_style aotb: expected at most an entry's name, got {} arguments. Give the package to pair_coeff.", narg);
    entry = narg ? arg[0] : "";
  }

  void coeff(int narg, char **arg) override {
    const int types = atom->ntypes;
    if (narg != 3 + types) error->all(FLERR, "pair_coeff: expected * * PACKAGE and {} species, one an atom type, got {} arguments.", types, narg);
    const std::map<std::string, std::array<const char *, 2>> styles{{"metal", {"eV", "Ang"}}, {"real", {"kcal/mol", "Ang"}}, {"lj", {"lj", "lj"}}};
    const auto units = styles.find(update->unit_style);
    if (units == styles.end()) error->all(FLERR, "pair_style aotb: expected units metal, real or lj, got {}. Use one of these.", update->unit_style);
    try {
      field = std::make_unique<ForceField>(arg[2], entry, units->second[0], units->second[1], comm->nthreads);
      species_of.assign(1, 0);
      for (int type = 1; type <= types; type++) species_of.push_back(field->number_of(arg[2 + type]));
    } catch (const std::exception &wrong) {
      error->all(FLERR, "pair_coeff (units {}): {}", update->unit_style, wrong.what());
    }
    if (!allocated) memory->create(setflag, types + 1, types + 1, "pair:setflag"), memory->create(cutsq, types + 1, types + 1, "pair:cutsq");
    if (!allocated) memory->create(cutghost, types + 1, types + 1, "pair:cutghost");
    allocated = 1;
    for (int type = 1; type <= types; type++) std::fill_n(setflag[type] + 1, types, 1);
  }

  void init_style() override {
    if (!force->newton_pair) error->all(FLERR, "pair_style aotb: expected newton on, got off. Add newton on before the box is created.");
    if (!atom->map_style) error->all(FLERR, "pair_style aotb: expected an atom map, got none. Add atom_modify map yes before the box is created.");
    for (int k = 1; k <= 3 && atom->molecular; k++) /* LAMMPS leaves such neighbors out of its list */
      if (!force->special_lj[k] && !force->special_coul[k])
        error->all(FLERR, "pair_style aotb: expected special_bonds without zeros, got some. Add special_bonds lj/coul 1 1 1.");
    const bool ghosts = comm->nprocs > 1 && field->layers > 1;
    const double reach = field->layers * field->cutoff + neighbor->skin, got = std::max(comm->cutghostuser, field->cutoff + neighbor->skin);
    if (ghosts && (comm->mode != Comm::SINGLE || got < reach))
      error->all(FLERR, "pair_style aotb: expected ghosts within {} ({} cutoffs and the skin), got {}. Add comm_modify mode single cutoff {}.", reach,
                 field->layers, got, reach);
    neighbor->add_request(this, NeighConst::REQ_FULL | (ghosts ? NeighConst::REQ_GHOST : NeighConst::REQ_DEFAULT));
  }

  double init_one(int i, int j) override { return cutghost[i][j] = cutghost[j][i] = field->cutoff; }

  void compute(int eflag, int vflag) override {
    ev_init(eflag, vflag);
    if (!atom->nlocal) return;
    try {
      gather();
      field->run();
    } catch (const std::exception &wrong) {
      error->one(FLERR, "pair_style aotb: {}", wrong.what());
    }
    static const int A[] = {0, 1, 2, 0, 0, 1}, B[] = {0, 1, 2, 1, 2, 2}; /* the order of LAMMPS's virial */
    const double energy = field->energy, *energies = field->result("energies");
    const double *by_position = field->result("positions"), *by_strain = field->result("strain");
    const double *by_shift = vflag_atom ? field->result("shift") : nullptr;
    for (size_t k = 0; k < atoms.size(); k++)
      for (int c = 0; c < 3; c++) atom->f[atoms[k]][c] -= by_position[3 * k + c] * energy * field->length;
    for (int i = 0; eflag_global && i < atom->nlocal; i++) eng_vdwl += energies[i] * energy; /* in float64 also if the package is float32 */
    for (int i = 0; eflag_atom && i < atom->nlocal; i++) eatom[i] += energies[i] * energy;
    for (int c = 0; vflag_global && c < 6; c++) virial[c] -= by_strain[3 * A[c] + B[c]] * energy;
    for (size_t e = 0; vflag_atom && e < field->src.size(); e++) /* half of each edge's share to both of its atoms */
      for (int c = 0; c < 6; c++) {
        const size_t i = field->src[e], j = field->dst[e];
        const double r = field->positions[3 * j + A[c]] - field->positions[3 * i + A[c]] + field->shift[3 * e + A[c]];
        const double half = r * by_shift[3 * e + B[c]] * energy / 2;
        vatom[atoms[i]][c] -= half, vatom[atoms[j]][c] -= half;
      }
  }

private:
  std::string entry;
  std::unique_ptr<ForceField> field;
  std::vector<int64_t> species_of;
  std::vector<int> atoms, number; /* LAMMPS's atoms in the package's order; the reverse, or -1 */

  int64_t add(int i) {
    if (number[i] < 0) number[i] = static_cast<int>(atoms.size()), atoms.push_back(i);
    return number[i];
  }

  void gather() { /* the package's inputs */
    ForceField &to = *field;
    double **x = atom->x;
    const int owned = atom->nlocal;
    to.src.clear(), to.dst.clear(), to.shift.clear(), atoms.clear(), number.assign(owned + atom->nghost, -1);
    for (int i = 0; i < owned; i++) add(i);
    size_t k = 0;
    for (int layer = 0; layer < to.layers; layer++)
      for (const size_t end = atoms.size(); k < end; k++)
        for (int i = atoms[k], l = 0; l < list->numneigh[i]; l++) {
          const int j = list->firstneigh[i][l] & NEIGHMASK;
          const double d[] = {x[j][0] - x[i][0], x[j][1] - x[i][1], x[j][2] - x[i][2]};
          if (d[0] * d[0] + d[1] * d[1] + d[2] * d[2] >= to.cutoff * to.cutoff) continue;
          const int owner = atom->map(atom->tag[j]), home = owner < owned ? owner : j;
          to.src.push_back(k), to.dst.push_back(add(home));
          for (int c = 0; c < 3; c++) to.shift.push_back((x[j][c] - x[home][c]) * to.length);
        }
    const size_t n = std::max<size_t>(atoms.size(), 2); /* some programs do not allow one atom */
    to.positions.assign(3 * n, 0), to.species.assign(n, 0), to.own.assign(n, 0);
    std::fill_n(to.own.begin(), owned, 1);
    for (k = 0; k < atoms.size(); k++) {
      to.species[k] = species_of[atom->type[atoms[k]]];
      for (int c = 0; c < 3; c++) to.positions[3 * k + c] = x[atoms[k]][c] * to.length;
    }
  }
};

extern "C" void lammpsplugin_init(void *lammps, void *handle, void *add) {
  auto *lmp = static_cast<LAMMPS *>(lammps);
#ifdef LAMMPS_VERSION
  if (lmp->num_ver != LAMMPS_VERSION) lmp->error->all(FLERR, "aotbplugin: expected LAMMPS {}, got {}. Build it again.", LAMMPS_VERSION, lmp->num_ver);
#endif
  const auto create = [](LAMMPS *of) -> Pair * { return new PairAOTB(of); };
  struct { /* lammpsplugin_t, which some distributions of LAMMPS leave out */
    const char *version, *style, *name, *info, *author;
    Pair *(*create)(LAMMPS *);
    void *handle;
  } plugin{lmp->version, "pair", "aotb", "force fields exported by ab.forcefield", "aot-backward", create, handle};
  reinterpret_cast<void (*)(void *, void *)>(add)(&plugin, lammps);
}
