"""``aot_backward_native.openmm``: beside eager PyTorch, in OpenMM's own dynamics, and every wrong use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aot_backward_native as abn
import numpy as np
import pytest
from ase import Atoms

from .potential import crystal, eager, model, package, unlike_package

openmm = pytest.importorskip("openmm", "8.6", reason="PythonForce needs OpenMM 8.6")
from aot_backward_native.openmm import force  # noqa: E402
from openmm import app, unit  # noqa: E402

EV, FORCE = 96.48533212331002, 964.8533212331002  # one eV in kJ/mol, one eV/Å in kJ/mol/nm


def topology(atoms: Atoms) -> app.Topology:
    out = app.Topology()
    residue = out.addResidue("all", out.addChain())
    for symbol in atoms.symbols:
        out.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    if atoms.pbc.all():
        out.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    return out


def context(atoms: Atoms, forces: Sequence[Any], integrator: Any = None) -> Any:
    system = openmm.System()
    system.setDefaultPeriodicBoxVectors(*(atoms.cell.array if atoms.pbc.all() else np.eye(3) * 100) * 0.1)
    for mass in atoms.get_masses():
        system.addParticle(mass)
    for one in forces:
        system.addForce(one)
    return of_system(system, atoms, integrator)


def of_system(system: Any, atoms: Atoms, integrator: Any = None) -> Any:
    out = openmm.Context(
        system, integrator or openmm.VerletIntegrator(0.0002), openmm.Platform.getPlatform("Reference")
    )
    out.setPositions(atoms.positions * unit.angstrom)
    return out


def check(found: Any, atoms: Atoms) -> None:
    state = found.getState(energy=True, forces=True)
    energy, _, forces, _ = eager(atoms, model())
    assert state.getPotentialEnergy()._value == pytest.approx(energy * EV, rel=1e-12)
    np.testing.assert_allclose(state.getForces(asNumpy=True)._value, forces * FORCE, rtol=0, atol=1e-12 * FORCE)


def test_energy_and_forces_equal_eager() -> None:
    atoms = crystal()
    check(context(atoms, [force(package(), topology(atoms), entry="double")]), atoms)
    check(context(atoms, [force(package(), list(atoms.symbols), entry="double", periodic=True)]), atoms)
    atoms.pbc = False
    check(context(atoms, [force(package(), topology(atoms), entry="double")]), atoms)
    check(context(atoms, [force(package(), list(atoms.symbols), entry="double")]), atoms)


def test_a_triclinic_box() -> None:
    atoms = crystal()
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0, 0], [0.1, 1.05, 0], [0.05, 0.1, 0.95]]), scale_atoms=True)
    check(context(atoms, [force(package(), topology(atoms), entry="double")]), atoms)


def test_energy_is_conserved() -> None:
    atoms = crystal()
    found = context(atoms, [force(package(), topology(atoms), entry="double")])
    found.setVelocitiesToTemperature(500, 1)
    totals = list[float]()
    for _ in range(200):
        found.getIntegrator().step(1)
        state = found.getState(energy=True)
        totals.append((state.getPotentialEnergy() + state.getKineticEnergy())._value / EV)
    assert np.ptp(totals) / len(atoms) < 2e-5


def test_a_serialized_system_and_a_barostat() -> None:
    atoms = crystal()
    found = context(atoms, [force(package(), topology(atoms), entry="double")])
    again = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(found.getSystem()))
    check(of_system(again, atoms), atoms)
    again.addForce(openmm.MonteCarloBarostat(1000, 500, 2))
    moved = of_system(again, atoms, openmm.LangevinMiddleIntegrator(500, 1, 0.0002))
    volume = moved.getState().getPeriodicBoxVolume()
    moved.getIntegrator().step(20)
    state = moved.getState(positions=True)
    assert state.getPeriodicBoxVolume() != volume
    atoms.set_cell(state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.angstrom))
    atoms.positions = state.getPositions(asNumpy=True).value_in_unit(unit.angstrom)
    check(moved, atoms)


def test_some_particles() -> None:
    atoms = crystal()
    chosen = [5, 3, 20, 21]
    found = context(atoms, [force(package(), topology(atoms), entry="double", particles=chosen)])
    forces = found.getState(forces=True).getForces(asNumpy=True)._value
    np.testing.assert_allclose(forces[chosen], eager(atoms[chosen], model())[2] * FORCE, rtol=0, atol=1e-12 * FORCE)
    assert not np.delete(forces, chosen, 0).any()


def virtual() -> app.Topology:
    out = topology(crystal())
    out.addAtom("M", None, next(out.residues()))
    return out


@pytest.mark.parametrize(
    ("where", "options", "words"),
    [
        (["H", "Fe"], {"entry": "double"}, r"expected the species H, He, got Fe \(atom 1\)"),
        ([], {"entry": "double"}, "expected at least one atom, got none"),
        (
            virtual(),
            {"entry": "double"},
            "topology: expected a chemical element for each particle, got none for particle 27",
        ),
        (
            ["H"],
            {"entry": "double", "particles": [1]},
            "particles: expected numbers from 0 to 0, got 1",
        ),
    ],
)
def test_wrong_arguments_are_named(where: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(abn.InputError, match=words):
        force(package(), where, **options)


def test_entries_of_another_kind_and_another_number_of_particles_are_named() -> None:
    with pytest.raises(abn.InputError, match="expected the inputs positions"):
        force(unlike_package(), ["H"])
    atoms = crystal()
    found = context(atoms, [force(package(), ["H"], entry="double")])
    with pytest.raises(
        openmm.OpenMMException, match=r"topology: expected 27 particles as in the system, got 1. Pass particles="
    ):
        found.getState(energy=True)
