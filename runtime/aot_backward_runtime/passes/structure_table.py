"""The structures that a context has met, and the package's code for them. At most ``max_structures`` unknown ones are
kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import InputError
from ..format.manifest import OperatorSpec, StructureSpec
from ..loader import Package
from ..native.library import Library
from ..tapes.tape import Tape
from .recorded_times import is_served
from .structure import Structure

MAX_STRUCTURES = 128
"""Structures that no package holds, in one context. Their tapes are kept: 1 to 4 kB a node."""
_SMALL_STRUCTURE = 32
"""In a replay a structure counts once of :data:`MAX_STRUCTURES` for every so many nodes. Recording and interpreting a
pass takes about 0.25 ms a node, eager 0.01. So a script with a new structure in each pass loses a second by default
(128 passes of 700 nodes would lose 20)."""


class StructureTable:
    """Structures by fingerprint. ``tapes``: the tapes of the structures that were met, in order."""

    def __init__(
        self,
        package: Package | None,
        entry: str | None,
        max_structures: int,
        *,
        by_nodes: bool,
        slower: bool,
    ):
        """``by_nodes``: large ones count more than once. ``slower``: also serve variants of older packages that were
        slower than eager."""
        if type(max_structures) is not int or max_structures < 1:
            raise InputError(f"max_structures is {max_structures!r}; expected a positive int")
        self.max_structures = max_structures
        self.tapes: list[Tape] = []
        self.operators: Mapping[str, OperatorSpec] = {}
        self._specs: dict[str, StructureSpec] = {}
        self._libraries: Mapping[str, Library] = {}
        self._constants: Mapping[str, torch.Tensor] = {}
        if package is not None:
            specs, self._libraries, self._constants = package.recorded(entry)
            served = {
                f: replace(s, variants=tuple(v for v in s.variants if slower or is_served(v.speed)))
                for f, s in specs.items()
            }
            self._specs = {f: s for f, s in served.items() if s.variants}
            self.operators = package.manifest.operators
        self._met: dict[str, Structure] = {}
        self._by_nodes = by_nodes
        self._unknown = 0  # structures that were met and that the package does not hold
        self._weight = 0.0  # ... and their count towards max_structures

    @property
    def serves(self) -> bool:
        """True if the package has code for any structure."""
        return bool(self._specs)

    @property
    def full(self) -> bool:
        """True if ``max_structures`` unknown structures were met; new ones run in eager."""
        return self._weight >= self.max_structures

    def why_full(self) -> str:
        return f"the structure keeps changing: {self._unknown} structures were not in the package, and further ones are not examined (max_structures)"

    def knows(self, structure: Structure) -> bool:
        """Return whether this context knows ``structure``."""
        return structure.tape.fingerprint() in self._met

    def find(self, tape: Tape) -> Structure:
        """Return the structure of ``tape``."""
        fingerprint = tape.fingerprint()
        structure = self._met.get(fingerprint)
        if structure is None:
            structure = Structure(tape, self._specs.get(fingerprint), self._libraries, self._constants)
            if structure.spec is None and self.full:
                return structure
            self._met[fingerprint] = structure
            self.tapes.append(tape)
            if structure.spec is None:
                self._unknown += 1
                self._weight += max(1, len(tape.nodes) / _SMALL_STRUCTURE) if self._by_nodes else 1
        return structure

    def difference(self, tape: Tape) -> str:
        """Return how ``tape`` differs from the nearest recorded structure."""
        nodes = tape.nodes
        best, alike = None, -1
        for spec in self._specs.values():
            same = next(
                (i for i, (a, b) in enumerate(zip(nodes, spec.nodes, strict=False)) if a != b),
                min(len(nodes), len(spec.nodes)),
            )
            if same > alike:
                best, alike = spec, same
        if best is None:
            return f"no structure was recorded; this one has {len(nodes)} nodes, {tape.fingerprint()[:12]}"
        if alike < min(len(nodes), len(best.nodes)):
            reason = f"node {alike} is {_short(nodes[alike])}, in the nearest recorded structure it is {_short(best.nodes[alike])}"
        elif len(nodes) != len(best.nodes):
            reason = f"it has {len(nodes)} nodes, the nearest recorded structure {len(best.nodes)}"
        else:
            reason = "its nodes are those of a recorded structure, but their constants, hooks or requires_grad differ"
        return f"the structure {tape.fingerprint()[:12]} was not recorded: {reason}"


def _short(name: str) -> str:
    return name.rpartition("::")[2]
