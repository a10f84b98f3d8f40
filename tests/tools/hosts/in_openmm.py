"""``in_openmm.py PACKAGE ATOMS STEPS OUT``: molecular dynamics in OpenMM. Prints its figures and writes the last
positions and forces."""

from __future__ import annotations

import sys
import time

import numpy as np
import openmm
from aot_backward_native.forcefield import KJ_PER_MOL
from aot_backward_native.openmm import force
from ase import units as ase_units
from openmm import unit

from tests.tools.hosts import EVERY, TIME_STEP, dynamics

path, structure, steps, out = sys.argv[1:]
searches = dynamics.time_neighbors()
atoms = dynamics.read(structure)
system = openmm.System()
system.setDefaultPeriodicBoxVectors(*(openmm.Vec3(*row) for row in atoms.cell.array / 10))
for mass in atoms.get_masses():
    system.addParticle(mass)
system.addForce(force(path, list(atoms.symbols), periodic=True))
integrator = openmm.VerletIntegrator(TIME_STEP * unit.femtosecond)
context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
context.setPositions(atoms.positions / 10)
context.setVelocities(atoms.get_velocities() * (1000 * ase_units.fs / 10))


def energy() -> tuple[float, float]:
    """Return the total and the kinetic energy, in eV."""
    state = context.getState(getEnergy=True)
    kinetic, potential = (
        e.value_in_unit(unit.kilojoule_per_mole) / KJ_PER_MOL
        for e in (state.getKineticEnergy(), state.getPotentialEnergy())
    )
    return kinetic + potential, kinetic


first, kinetic = energy()
energies = [first]
searches.clear()
start = time.perf_counter()
for _ in range(int(steps) // EVERY):
    integrator.step(EVERY)
    energies.append(energy()[0])
seconds = time.perf_counter() - start
state = context.getState(getPositions=True, getForces=True)
forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.angstrom) / KJ_PER_MOL
np.savez(out, positions=state.getPositions(asNumpy=True).value_in_unit(unit.angstrom), forces=forces)
dynamics.report(energies, kinetic, seconds, sum(searches))
