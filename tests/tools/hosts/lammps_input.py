"""The input of LAMMPS for the same dynamics in each of its ways, and what its log says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from . import EVERY, TEMPERATURE, TIME_STEP

SETTINGS = """
units metal
atom_modify map yes
read_data {data}
neighbor 0.3 bin
neigh_modify delay 0 every 1 check yes
"""
PLUGIN = """
comm_modify cutoff 6.0
plugin load {plugin}
pair_style aotb
pair_coeff * * {package} H He
"""
DYNAMICS = f"""
velocity all create {TEMPERATURE} 4711 loop geom
timestep {TIME_STEP / 1000}
fix nve all nve
thermo {EVERY}
thermo_style custom step ke etotal
thermo_modify format float %.17g
run {{steps}}
write_dump all custom {{out}} id x y z fx fy fz modify sort id format float %.17g
"""


def read(text: str, dump: Path) -> dict[str, float | list[list[float]]]:
    """Return the drift of the energy and the first kinetic energy (eV), seconds, seconds of neighbor lists, and the
    last positions and forces."""
    table = re.search(r"\n\s*Step\s+KinEng\s+TotEng\s*\n(.*?)\nLoop time of (\S+)", text, re.DOTALL)
    neighbors = re.search(r"\nNeigh\s*\|\s*\S+\s*\|\s*(\S+)", text)
    assert table and neighbors, text
    rows = np.array([line.split() for line in table[1].splitlines() if line[:1].isspace()], float)
    atoms = np.loadtxt(dump, skiprows=9)
    return {
        "drift": float(np.abs(rows[:, 2] - rows[0, 2]).max()),
        "kinetic": float(rows[0, 1]),
        "seconds": float(table[2]),
        "neighbors": float(neighbors[1]),
        "positions": atoms[:, 1:4].tolist(),
        "forces": atoms[:, 4:7].tolist(),
    }
