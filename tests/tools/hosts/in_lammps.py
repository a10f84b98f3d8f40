"""``in_lammps.py PACKAGE DATA STEPS OUT``: molecular dynamics in LAMMPS by ``examples/lammps/fix_external.py``, without
a plugin."""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path

from tests.tools.hosts import dynamics
from tests.tools.hosts.lammps_input import DYNAMICS, SETTINGS

searches = dynamics.time_neighbors()
path, data, steps, out = sys.argv[1:]
example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "lammps" / "fix_external.py"))
if (mpi := Path(sys.prefix, "lib", "libmpi.so.12")).exists():
    ctypes.CDLL(str(mpi), ctypes.RTLD_GLOBAL)
lmp = example["lammps"].lammps(cmdargs=["-log", "none", "-nocite"])
lmp.commands_string(SETTINGS.format(data=data))
example["attach"](lmp, path, ["H", "He"])
lmp.commands_string(DYNAMICS.format(steps=steps, out=out))
print("seconds of neighbors:", sum(searches[1:]))
