/* A force field exported by ab.forcefield, in the units of the program that calls it. Throws std::exception; its message says what to do. */
#pragma once
#include <aot_backward.h>
#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
#include "json.h" /* of LAMMPS */

class ForceField {
public:
  using Names = std::vector<std::string>;
  int layers = 1; /* edges between an atom and the farthest atom that changes its energy */
  double cutoff = 0, energy = 1,
         length = 1; /* in the program's units; its energy per unit of the package; the package's length per unit of the program */
  std::vector<double> positions, shift, own; /* the inputs of the next run, in the package's units */
  std::vector<int64_t> species, src, dst;

  /* Opens the one force field of the package, or that entry. `energy_unit` and `length_unit` are the program's. */
  ForceField(const std::string &file, const std::string &entry, const std::string &energy_unit, const std::string &length_unit, int threads)
      : path(file) {
    aotb_package *opened = nullptr;
    check(aotb_open(file.c_str(), nullptr, &opened));
    package.reset(opened);
    check(aotb_threads(opened, threads));
    Names found;
    nlohmann_lmp::json data;
    for (uint32_t i = 0; i < aotb_entries(opened); i++) {
      const std::string name = aotb_entry(opened, i);
      auto each = nlohmann_lmp::json::parse(aotb_metadata(opened, name.c_str()));
      if (each.contains("forcefield") && (entry.empty() || entry == name)) found.push_back(name), data = each;
    }
    expect(found.size() == 1, "one force field" + (entry.empty() ? "" : " named " + entry), joined(found),
           "Export with ab.forcefield, or name one of several");
    for (const char *key : {"forcefield", "cutoff", "species", "energy", "length", "layers"})
      expect(data.contains(key), std::string(key) + " in the metadata of " + found[0], "none", "Export with ab.forcefield");
    expect(data["forcefield"] == 1, "version 1 of the force field's inputs", data["forcefield"].dump(), "Use a newer forcefield.h");
    energy = factor(ENERGIES, data["energy"], energy_unit);
    length = 1 / factor(LENGTHS, data["length"], length_unit);
    cutoff = data["cutoff"].get<double>() / length, layers = data["layers"], known = data["species"].get<Names>();
    aotb_function *made = nullptr;
    check(aotb_get(opened, found[0].c_str(), &made));
    function.reset(made);
    check(aotb_convert(made, 1)); /* for a float32 package */
    expect(describe(AOTB_INPUTS) == INPUTS, "the inputs " + joined(INPUTS), joined(describe(AOTB_INPUTS)), "Export with ab.forcefield");
    names = describe(AOTB_OUTPUTS);
    for (const auto &name : describe(AOTB_GRADIENTS)) names.push_back(name);
    for (const char *name : {"energies", "positions", "strain", "shift"})
      expect(std::count(names.begin(), names.end(), name), std::string("a result ") + name, joined(names), "Export with ab.forcefield");
    results.resize(names.size()), copies.resize(names.size());
  }
  int64_t number_of(const std::string &name) const {
    const auto at = std::find(known.begin(), known.end(), name);
    expect(at != known.end(), "a species of " + joined(known), name, "Choose one of these for each atom type");
    return at - known.begin();
  }
  void run() {
    int64_t per_atom[] = {static_cast<int64_t>(own.size()), 3}, per_edge[] = {static_cast<int64_t>(src.size()), 3}, three[] = {3, 3};
    const DLDataType real{2, 64, 1}, whole{0, 64, 1};
    const auto tensor = [](void *data, int32_t ndim, DLDataType dtype, int64_t *shape) {
      return DLTensor{data, {1, 0}, ndim, dtype, shape, nullptr, 0};
    };
    const DLTensor in[] = {tensor(positions.data(), 2, real, per_atom), tensor(species.data(), 1, whole, per_atom),
                           tensor(src.data(), 1, whole, per_edge),      tensor(dst.data(), 1, whole, per_edge),
                           tensor(shift.data(), 2, real, per_edge),     tensor(strain, 2, real, three),
                           tensor(own.data(), 1, real, per_atom)};
    results.assign(results.size(), {});
    check(aotb_run(function.get(), in, 7, results.data(), static_cast<uint32_t>(results.size())));
  }
  const double *result(const std::string &name) { /* as row-major doubles: "energies", or the gradient by "positions", "strain", "shift" */
    const size_t k = std::find(names.begin(), names.end(), name) - names.begin();
    const DLTensor &of = results[k];
    expect(of.dtype.code == 2 && of.dtype.bits >= 32, "results of float32 or float64", "others", "Export in one of these");
    const int64_t rows = of.ndim > 0 ? of.shape[0] : 1, columns = of.ndim > 1 ? of.shape[1] : 1;
    const int64_t down = of.ndim > 0 ? of.strides[0] : 1, across = of.ndim > 1 ? of.strides[1] : 1;
    const char *data = static_cast<const char *>(of.data) + of.byte_offset;
    const auto *doubles = reinterpret_cast<const double *>(data);
    if (of.dtype.bits == 64 && down == columns && across == 1) return doubles;
    copies[k].resize(rows * columns);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        const int64_t at = i * down + j * across;
        copies[k][i * columns + j] = of.dtype.bits == 64 ? doubles[at] : reinterpret_cast<const float *>(data)[at];
      }
    return copies[k].data();
  }

private:
  using Units = std::map<std::string, double>;
  inline static const Units ENERGIES{{"eV", 1}, {"kcal/mol", 0.043364104241800934}, {"kJ/mol", 0.010364269656262175}, {"Ha", 27.211386245981}};
  inline static const Units LENGTHS{{"Ang", 1}, {"nm", 10}, {"Bohr", 0.529177210544}};
  inline static const Names INPUTS{"positions", "species", "src", "dst", "shift", "strain", "own"};
  struct Free {
    void operator()(aotb_package *p) const { aotb_close(p); }
    void operator()(aotb_function *f) const { aotb_free(f); }
  };
  std::string path;
  std::unique_ptr<aotb_package, Free> package;
  std::unique_ptr<aotb_function, Free> function;
  Names known, names; /* species; results */
  std::vector<DLTensor> results;
  std::vector<std::vector<double>> copies;
  double strain[9] = {};

  static void check(aotb_status status) {
    if (status) throw std::runtime_error(aotb_error());
  }
  void expect(bool holds, const std::string &expected, const std::string &got, const std::string &next) const {
    if (!holds) throw std::runtime_error(path + ": expected " + expected + ", got " + got + ". " + next + ".");
  }
  static std::string joined(const Names &list) {
    std::string out;
    for (const auto &name : list) out += (out.empty() ? "" : ", ") + name;
    return out.empty() ? "none" : out;
  }
  double factor(const Units &units, const std::string &from, const std::string &to) const {
    if (from == to) return 1; /* also "lj", which converts to nothing else */
    expect(units.count(from) && units.count(to), "a unit that converts to " + to, from, "Use other units in the program, or export in other units");
    return units.at(from) / units.at(to);
  }
  Names describe(aotb_part part) const {
    Names out;
    aotb_description of;
    for (uint32_t i = 0; i < aotb_count(function.get(), 0, part); i++) check(aotb_describe(function.get(), 0, part, i, &of)), out.push_back(of.name);
    return out;
  }
};
