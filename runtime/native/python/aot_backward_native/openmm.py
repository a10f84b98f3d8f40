"""Run a package as a force of OpenMM, without PyTorch.

from aot_backward_native.openmm import force

system.addForce(force("mace.pt2", topology))
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openmm
from openmm import unit

from .errors import InputError
from .forcefield import KJ_PER_MOL, ForceField

__all__ = ["force"]
_ANGSTROM = 0.1  # in nm


def force(
    path: str | os.PathLike[str],
    topology: Any,
    *,
    particles: Sequence[int] | None = None,
    periodic: bool | None = None,
    entry: str | None = None,
    skin: float = 0.03,
    cutoff: float | None = None,
    species: Sequence[str] | None = None,
    energy: str | None = None,
    length: str | None = None,
    backend: str | None = None,
) -> openmm.PythonForce:
    """Return a force field that ``ab.forcefield`` exported as a force (``docs/how-to/hosts-openmm.md``).

    Args:
        path: The package. A serialized system names its absolute path.
        topology: An ``openmm.app.Topology``, or the chemical symbol of each particle of the system.
        particles: The particles that the force acts on, such as a ligand. By default, all.
        periodic: Whether to use periodic boundary conditions. By default, as the topology; False for symbols.
        entry: The name of the entry; a sole "grad" entry needs none.
        skin: How far atoms may move, together, before the neighbor list is searched again, in nm. It does not change
            results.
        cutoff: The model's cutoff, in its unit of length, for a package whose metadata lacks it.
        species: The chemical symbols in the order of the model's numbers, likewise.
        energy: The model's unit of energy, likewise: "eV", "Ha", "kcal/mol" or "kJ/mol".
        length: The model's unit of length, likewise: "Ang", "nm" or "Bohr".
        backend: As for :func:`aot_backward_native.load`.

    Returns:
        The force, in kJ/mol and nm. It can be serialized, copied and used with a barostat.

    Raises:
        InputError: The metadata is incomplete or differs from an argument, the entry is not a force field, or it does
            not know a species.
        PackageError: There is no such entry.

    Examples:
        >>> system.addForce(force("copper.pt2", pdb.topology))
    """
    symbols = (
        topology
        if isinstance(topology, Sequence)
        else [a.element.symbol if a.element else None for a in topology.atoms()]
    )
    if periodic is None:
        periodic = not isinstance(topology, Sequence) and topology.getPeriodicBoxVectors() is not None
    chosen = range(len(symbols)) if particles is None else particles
    if outside := [i for i in chosen if not 0 <= i < len(symbols)]:
        raise InputError(
            f"particles: expected numbers from 0 to {len(symbols) - 1}, got {outside[0]}. Number them as in the topology."
        )
    if nameless := [i for i in chosen if symbols[i] is None]:
        raise InputError(
            f"topology: expected a chemical element for each particle, got none for particle {nameless[0]}. Leave it out of particles=."
        )
    field = ForceField(
        os.path.abspath(path),  # noqa: PTH100  (resolve() would follow links)
        entry,
        skin=skin / _ANGSTROM,
        backend=backend,
        cutoff=cutoff,
        species=species,
        energy=energy,
        length=length,
    )
    out = openmm.PythonForce(_Computation(field, field.kinds(symbols[i] for i in chosen), periodic))
    out.setUsesPeriodicBoundaryConditions(periodic)
    if particles is not None:
        out.setParticles(list(particles))
    out.setName("aot_backward")
    return out


class _Computation:
    """What OpenMM calls for the energy and the forces of a state, and pickles to serialize the force."""

    def __init__(self, field: ForceField, kinds: np.ndarray, periodic: bool):
        self._field, self._kinds, self._periodic = field, kinds, periodic

    def __call__(self, state: openmm.State) -> tuple[float, np.ndarray]:
        positions = state.getPositions(asNumpy=True).value_in_unit(unit.angstrom)
        if len(positions) != len(self._kinds):
            raise InputError(
                f"topology: expected {len(positions)} particles as in the system, got {len(self._kinds)}. Pass particles=."
            )
        cell = (
            state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.angstrom)
            if self._periodic
            else np.zeros((3, 3))
        )
        result = self._field(positions, self._kinds, cell, [self._periodic] * 3)
        return result.energy * KJ_PER_MOL, result.forces * (KJ_PER_MOL / _ANGSTROM)
