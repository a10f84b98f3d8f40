"""Run a package as a calculator of ASE, without PyTorch.

from aot_backward_native.ase import Calculator

atoms.calc = Calculator("mace.pt2")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as _Calculator
from ase.calculators.calculator import all_changes
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.stress import full_3x3_to_voigt_6_stress

from .errors import InputError
from .forcefield import ForceField

__all__ = ["Calculator"]


class Calculator(_Calculator):
    """Energy, forces and stress of a force field that ``ab.forcefield`` exported (``docs/how-to/hosts-ase.md``).

    With several packages, the results are the means of their results; ``results`` also has the standard deviations
    "energy_spread" and "forces_spread". Stress needs three cell vectors. A calculator can be pickled and copied; use
    one per thread.

    Args:
        *paths: The packages.
        entry: The name of the entry; a sole "grad" entry needs none.
        skin: How far atoms may move, together, before the neighbor list is searched again, in Ångström. It does not
            change results.
        cutoff: The model's cutoff, in its unit of length, for a package whose metadata lacks it.
        species: The chemical symbols in the order of the model's numbers, likewise.
        energy: The model's unit of energy, likewise: "eV", "Ha", "kcal/mol" or "kJ/mol".
        length: The model's unit of length, likewise: "Ang", "nm" or "Bohr".
        backend: As for :func:`aot_backward_native.load`.

    Raises:
        InputError: The metadata is incomplete or differs from an argument, or the entry is not a force field.
        PackageError: There is no such entry.

    Examples:
        >>> atoms.calc = Calculator("copper.pt2")
        >>> atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012  (ASE's own form)
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    def __init__(
        self,
        *paths: str | os.PathLike[str],
        entry: str | None = None,
        skin: float = 0.3,
        cutoff: float | None = None,
        species: Sequence[str] | None = None,
        energy: str | None = None,
        length: str | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        if not paths:
            raise InputError("paths: expected at least one package, got none. Give the path of a package.")
        given = {"cutoff": cutoff, "species": species, "energy": energy, "length": length}
        self.members = [ForceField(path, entry, skin=skin, backend=backend, **given) for path in paths]
        if len(paths) > 1:
            self.implemented_properties = [*self.implemented_properties, "energy_spread", "forces_spread"]
        self._numbers: np.ndarray | None = None
        self._kinds: list[np.ndarray] = []

    def check_state(self, atoms: Atoms, tol: float = 0) -> list[str]:
        """Return what differs from the atoms of the last results. ASE calls this three times a step; its own takes 0.5
        ms for 512 atoms."""
        last = self.atoms
        if last is None:
            return list(all_changes)
        changes = ("numbers", last.numbers, atoms.numbers), ("positions", last.positions, atoms.positions)
        changes += ("cell", last.cell.array, atoms.cell.array), ("pbc", last.pbc, atoms.pbc)
        return [name for name, old, new in changes if not np.array_equal(old, new)]

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute all properties. ASE calls this."""
        super().calculate(atoms, properties, system_changes)
        self.results, atoms = {}, self.atoms
        if atoms is None:
            raise InputError("atoms: expected atoms, got None. Set atoms.calc, or pass atoms.")
        if self._numbers is None or not np.array_equal(self._numbers, atoms.numbers):
            self._kinds = [member.kinds(atoms.symbols) for member in self.members]
            self._numbers = atoms.numbers.copy()
        cell = atoms.cell.array
        found = [
            member(atoms.positions, kinds, cell, atoms.pbc)
            for member, kinds in zip(self.members, self._kinds, strict=True)
        ]
        energies, forces = [r.energy for r in found], _mean([r.forces for r in found])
        self.results = {"energy": float(_mean(energies)), "forces": forces}
        self.results["free_energy"] = self.results["energy"]
        if all(r.energies is not None for r in found):
            self.results["energies"] = _mean([r.energies for r in found])
        volume = abs(float(np.linalg.det(cell)))  # 0 if there are fewer than three cell vectors
        if volume > 0 and all(r.virial is not None for r in found):
            self.results["stress"] = full_3x3_to_voigt_6_stress(_mean([r.virial for r in found]) / volume)
        if len(found) > 1:
            self.results |= {
                "energy_spread": float(np.std(energies)),
                "forces_spread": np.std([r.forces for r in found], axis=0),
            }

    def check(self, atoms: Atoms, step: float = 1e-4, count: int = 3) -> dict[str, float]:
        """Compare forces and stress with numerical differences of the energy.

        Args:
            atoms: The atoms; they are not changed.
            step: The displacement in Ångström, and the strain. A package of float32 needs a larger one, such as 1e-2.
            count: The number of atoms to move.

        Returns:
            The largest difference of "forces", in eV/Å, and of "stress", in eV/Å³, if the atoms have three cell
            vectors.
        """
        moved = atoms.copy()
        moved.calc = self
        numerical = calculate_numerical_forces(moved, eps=step, iatoms=range(min(count, len(moved))))
        out = {"forces": float(np.abs(numerical - moved.get_forces()[:count]).max())}
        if "stress" in self.results:
            out["stress"] = float(np.abs(calculate_numerical_stress(moved, eps=step) - moved.get_stress()).max())
        return out


def _mean(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else np.mean(values, axis=0)
