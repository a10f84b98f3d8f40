"""``in_ase.py PACKAGE ATOMS STEPS OUT``: molecular dynamics in ASE. Prints its figures and writes the last positions
and forces."""

from __future__ import annotations

import sys
import time

import numpy as np
from aot_backward_native.ase import Calculator
from ase import units
from ase.md.verlet import VelocityVerlet

from tests.tools.hosts import EVERY, TIME_STEP, dynamics

path, structure, steps, out = sys.argv[1:]
searches = dynamics.time_neighbors()
atoms = dynamics.read(structure)
atoms.calc = Calculator(path)
integrator = VelocityVerlet(atoms, TIME_STEP * units.fs)
energies = [atoms.get_total_energy()]
kinetic = atoms.get_kinetic_energy()
searches.clear()
start = time.perf_counter()
for _ in range(int(steps) // EVERY):
    integrator.run(EVERY)
    energies.append(atoms.get_total_energy())
seconds = time.perf_counter() - start
np.savez(out, positions=atoms.positions, forces=atoms.get_forces())
dynamics.report(energies, kinetic, seconds, sum(searches))
