"""``aot_backward_native.ase``: beside eager PyTorch, in ASE's own dynamics, and every wrong use."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import ase.io
import numpy as np
import pytest
import torch
from aot_backward_native.ase import Calculator
from aot_backward_native.forcefield import KJ_PER_MOL, LENGTHS, ForceField
from ase import Atoms, units
from ase.calculators.calculator import PropertyNotImplementedError
from ase.md.verlet import VelocityVerlet

from ..support.packages import python
from .potential import crystal, eager, model, other_package, package, unlike_package


def triclinic() -> Atoms:
    atoms = crystal()
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.1, 0.05], [0, 1.05, 0.1], [0, 0, 0.95]]), scale_atoms=True)
    return atoms


def wrapped() -> Atoms:
    atoms = crystal()
    atoms.positions += np.random.default_rng(1).integers(-3, 4, (len(atoms), 3)) @ atoms.cell.array
    return atoms


def slab(vectors: int) -> Atoms:
    atoms = crystal()
    atoms.set_cell([*atoms.cell.lengths()[:vectors], *[0] * (3 - vectors)])
    atoms.pbc = [i < 2 for i in range(3)]
    return atoms


STRUCTURES = {
    "crystal": crystal(),
    "triclinic": triclinic(),
    "atoms outside the cell": wrapped(),
    "slab in a cell": slab(3),
    "slab of two vectors": slab(2),
    "cluster": Atoms("HHeH", positions=[[0, 0, 0], [1.2, 0, 0], [0, 1.5, 0.3]]),
    "one atom": Atoms("H"),
    "one atom in a cell smaller than the cutoff": Atoms("He", cell=[1.9, 2.1, 1.7], pbc=True),
    "no neighbors": Atoms("H2", positions=[[0, 0, 0], [0, 0, 50]]),
}


@pytest.mark.parametrize("atoms", STRUCTURES.values(), ids=STRUCTURES)
def test_energy_forces_and_stress_equal_eager(atoms: Atoms) -> None:
    atoms = atoms.copy()
    atoms.calc = Calculator(package(), entry="double")
    energy, energies, forces, stress = eager(atoms, model())
    assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-12)
    np.testing.assert_allclose(atoms.get_potential_energies(), energies, rtol=0, atol=1e-12)
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=0, atol=1e-12)
    if stress is not None:
        np.testing.assert_allclose(atoms.get_stress(), stress, rtol=0, atol=1e-12)
    else:
        with pytest.raises(PropertyNotImplementedError):
            atoms.get_stress()


def test_numerical_differences_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = Calculator(package(), entry="double")
    assert max(calculator.check(triclinic()).values()) < 1e-6
    cluster = STRUCTURES["cluster"]
    assert calculator.check(cluster).keys() == {"forces"} and cluster.calc is None
    computed = ForceField.__call__
    monkeypatch.setattr(
        ForceField, "__call__", lambda *args: dataclasses.replace(computed(*args), forces=0 * args[1], virial=np.eye(3))
    )
    assert min(calculator.check(triclinic()).values()) > 1e-3  # the check can fail


def run(atoms: Atoms, steps: int, skin: float) -> list[float]:
    """Return the total energies of a trajectory without a thermostat."""
    atoms.calc = Calculator(package(), entry="double", skin=skin)
    atoms.set_momenta(np.random.default_rng(0).standard_normal((len(atoms), 3)))
    dynamics, energies = VelocityVerlet(atoms, 0.1 * units.fs), list[float]()
    for _ in range(steps):
        dynamics.run(1)
        energies.append(atoms.get_total_energy())
    return energies


def test_energy_is_conserved_and_the_skin_changes_nothing() -> None:
    kept, searched = crystal(), crystal()
    start = kept.positions.copy()
    energies = run(kept, 200, skin=0.3)
    assert np.abs(kept.positions - start).max() > 0.3  # the list became invalid
    assert kept.get_kinetic_energy() / len(kept) > 0.3 and np.ptp(energies) / len(kept) < 1e-4
    run(searched, 200, skin=0.0)
    np.testing.assert_allclose(kept.positions, searched.positions, rtol=0, atol=1e-9)


def test_float32() -> None:
    atoms = crystal()
    atoms.calc = Calculator(package(), entry="single")
    _, _, forces, stress = eager(atoms, model(torch.float32))
    exact, _, exact_forces, _ = eager(atoms, model())
    assert atoms.get_potential_energy() == atoms.get_potential_energies().sum()  # in float64
    assert atoms.get_potential_energy() == pytest.approx(exact, rel=1e-6) and atoms.get_forces().dtype == np.float64
    assert np.abs(atoms.get_forces() - exact_forces).max() <= 10 * np.abs(forces - exact_forces).max()
    np.testing.assert_allclose(atoms.get_stress(), stress, rtol=0, atol=1e-5)


def test_a_committee_gives_mean_and_spread() -> None:
    paths, atoms = (package(), other_package()), crystal()
    members = [Calculator(path, entry="double") for path in paths]
    one, two = (c.get_property("forces", atoms) for c in members)
    atoms.calc = committee = Calculator(*paths, entry="double")
    np.testing.assert_allclose(atoms.get_forces(), (one + two) / 2, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        committee.get_property("forces_spread", atoms), np.abs(one - two) / 2, rtol=0, atol=1e-12
    )
    energies = [c.get_property("energy", atoms) for c in members]
    assert committee.get_property("energy_spread", atoms) == pytest.approx(np.std(energies)) and np.std(energies) > 0.01
    assert Calculator(*paths[1:] * 2).get_property("energy_spread", atoms) == 0
    with pytest.raises(PropertyNotImplementedError):
        members[0].get_property("forces_spread", atoms)


def test_other_units() -> None:
    atoms, scaled = crystal(), crystal()
    scaled.set_cell(atoms.cell.array * LENGTHS["Bohr"], scale_atoms=True)
    energy, _, forces, stress = eager(atoms, model())
    scaled.calc = Calculator(package(), entry="units")
    kcal = 4.184 / KJ_PER_MOL
    assert scaled.get_potential_energy() == pytest.approx(energy * kcal, rel=1e-12)
    np.testing.assert_allclose(scaled.get_forces(), forces * kcal / LENGTHS["Bohr"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(scaled.get_stress(), stress * kcal / LENGTHS["Bohr"] ** 3, rtol=0, atol=1e-12)
    assert [kcal, LENGTHS["Bohr"]] == pytest.approx([units.kcal / units.mol, units.Bohr], rel=1e-6)


def test_a_package_without_metadata() -> None:
    atoms = crystal()
    atoms.calc = Calculator(package(), entry="bare", cutoff=2.5, species=["H", "He"], energy="eV", length="Ang")
    np.testing.assert_allclose(atoms.get_forces(), eager(atoms, model())[2], rtol=0, atol=1e-12)


def test_copies_and_pickles() -> None:
    atoms = crystal()
    atoms.calc = Calculator(package(), entry="double")
    forces = atoms.get_forces()
    for calculator in (copy.deepcopy(atoms.calc), pickle.loads(pickle.dumps(atoms.calc))):
        assert calculator.members[0] is not atoms.calc.members[0]
        calculator.reset()
        np.testing.assert_array_equal(calculator.get_property("forces", crystal()), forces)


def test_without_pytorch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from ase.build import bulk
from aot_backward_native.ase import Calculator
atoms = bulk("He", "sc", a=1.6).repeat(3)
atoms.calc = Calculator(sys.argv[1], entry="double")
print(atoms.get_potential_energy())
"""
    atoms = Atoms("He", cell=[1.6] * 3, pbc=True).repeat(3)
    done = python(program, package())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(eager(atoms, model())[0], abs=1e-12)


BARE: dict[str, Any] = {"entry": "bare", "cutoff": 2.5, "species": ["H", "He"], "energy": "eV", "length": "Ang"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, abn.PackageError, "expected one grad entry, got grad 'double'"),
        ({"entry": "none"}, abn.PackageError, "expected a grad entry 'none'"),
        (
            {"entry": "double", "cutoff": 3.0},
            abn.InputError,
            "cutoff: expected 2.5 as in the metadata, got 3.0. Leave cutoff= out",
        ),
        (
            {"entry": "double", "species": ["He", "H"]},
            abn.InputError,
            r"species: expected \['H', 'He'\] as in the metadata, got \['He', 'H'\]",
        ),
        ({"entry": "double", "energy": "Ha"}, abn.InputError, "energy: expected 'eV' as in the metadata, got 'Ha'"),
        ({"entry": "double", "length": "nm"}, abn.InputError, "length: expected 'Ang' as in the metadata, got 'nm'"),
        ({"entry": "double", "skin": -1}, abn.InputError, "skin: expected a length of at least 0, got -1"),
        ({"entry": "bare"}, abn.InputError, r"expected 'cutoff' in the metadata, got \[\]. Pass cutoff="),
        ({**BARE, "energy": None}, abn.InputError, "expected 'energy' in the metadata"),
        (
            {**BARE, "energy": "Rydberg"},
            abn.InputError,
            "energy: expected one of eV, Ha, kcal/mol, kJ/mol, got 'Rydberg'",
        ),
        ({**BARE, "length": "m"}, abn.InputError, "length: expected one of Ang, nm, Bohr, got 'm'"),
        ({**BARE, "cutoff": 0}, abn.InputError, "cutoff: expected a positive number, got 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    # The same values as in the metadata are not an error
    assert Calculator(package(), **{**BARE, "entry": "double"}).members
    with pytest.raises(error, match=words):
        Calculator(package(), **options)


def test_entries_of_another_kind_are_named() -> None:
    with pytest.raises(abn.PackageError, match=r"expected a grad entry 'double', got .*function 'double'"):
        Calculator(unlike_package(), entry="double")
    with pytest.raises(
        abn.InputError,
        match=r"expected the inputs positions, species, src, dst, shift, got x. Export the entry with ab.forcefield",
    ):
        Calculator(unlike_package())
    with pytest.raises(abn.InputError, match="expected at least one package"):
        Calculator()


def broken(change: str) -> Atoms:
    atoms = crystal()
    if change == "species":
        atoms.symbols[4] = "Fe"
    elif change == "position":
        atoms.positions[7, 1] = np.nan
    else:
        atoms.cell[2] = 0
    return atoms


@pytest.mark.parametrize(
    ("atoms", "words"),
    [
        (Atoms(), "expected at least one atom, got none"),
        (broken("species"), r"expected the species H, He, got Fe \(atom 4\)"),
        (broken("position"), "positions: expected finite numbers below 25000 Å, got nan"),
        (broken("cell"), "neighbor list: expected finite positions and a cell, got the box matrix is not invertible"),
    ],
)
def test_wrong_atoms_are_named(atoms: Atoms, words: str) -> None:
    calculator = Calculator(package(), entry="double")
    with pytest.raises(abn.InputError, match=words):
        calculator.get_property("energy", atoms)
    assert np.isfinite(calculator.get_property("energy", crystal()))  # it is still usable


def test_calls_with_other_numbers_of_neighbors_reuse_memory(tmp_path: Path) -> None:
    """Fresh memory costs a page fault for each 4 kB; it took a third of a call."""
    program = """
import resource, sys
import ase.io
import numpy as np
from aot_backward_native.forcefield import ForceField
atoms, field = ase.io.read(sys.argv[2]), ForceField(sys.argv[1], "double", skin=0)
kinds, rng = field.kinds(atoms.symbols), np.random.default_rng(0)
def call():
    field(atoms.positions + 0.15 * rng.standard_normal(atoms.positions.shape), kinds, atoms.cell.array, atoms.pbc)
for _ in range(20):
    call()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    call()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""
    ase.io.write(tmp_path / "atoms.xyz", crystal(8), format="extxyz")
    done = python(program, package(), tmp_path / "atoms.xyz", OMP_NUM_THREADS="1")
    assert int(done.stdout) < 200, done.stderr


def test_a_cell_without_volume_has_no_stress_and_errors_leave_no_results() -> None:
    calculator = Calculator(package(), entry="double")
    flat = Atoms("HHe", [[0, 0, 0], [1.2, 0, 0]], cell=[[5, 0, 0], [0, 5, 0], [5, 5, 0]])
    assert np.isfinite(calculator.get_property("energy", flat))
    with pytest.raises(PropertyNotImplementedError):
        calculator.get_property("stress", flat)
    with pytest.raises(abn.InputError):
        calculator.calculate(Atoms("N", [[0, 0, 0]]))
    assert calculator.results == {}
    with pytest.raises(abn.InputError, match=r"atoms: expected atoms, got None\. Set atoms\.calc"):
        Calculator(package(), entry="double").get_property("energy")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, k, c: (p, k, c * np.nan), r"cell: expected finite numbers below 25000 Å, got nan"),
        (lambda p, k, c: (p, k, c * 1e300), r"cell: expected finite numbers below 25000 Å, got"),
        (lambda p, k, c: (p * 1e6, k, 0 * c), r"positions: expected finite numbers below 25000 Å, got 1.2e"),
        (lambda p, k, c: (p, k, c[0]), r"cell: expected the shape \(3, 3\), got \(3,\)"),
        (lambda p, k, c: (p.ravel(), k, c), r"positions: expected the shape \(2, 3\), got \(6,\)"),
        (lambda p, k, c: (p, k + 1, c), r"kinds: expected numbers from 0 to 1, got 1 to 2"),
    ],
)
def test_a_force_field_refuses_wrong_arrays(change: Any, words: str) -> None:
    """Without its own checks, the neighbor list ends the process, or finds no neighbors."""
    field = ForceField(package(), "double")
    positions, kinds, cell = np.array([[0, 0, 0], [1.2, 0, 0]]), field.kinds(["H", "He"]), 5 * np.eye(3)
    expected = field(positions, kinds, cell, [True] * 3)
    positions_, kinds_, cell_ = change(positions, kinds, cell)
    with pytest.raises(abn.InputError, match=words):
        field(positions_, kinds_, cell_, [bool(np.any(cell_))] * 3)
    again = field(positions.astype(np.float32).tolist(), kinds.tolist(), cell.tolist(), [True] * 3)
    assert again.energy == pytest.approx(expected.energy, rel=1e-6)
    with pytest.raises(abn.InputError, match="symbols: expected a list of chemical symbols, got 'HHe'"):
        field.kinds("HHe")
