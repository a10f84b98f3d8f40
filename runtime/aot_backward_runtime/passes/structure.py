"""Passes of one fingerprint, and the choice of the compiled variant that serves one of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..format.manifest import PassSpec, StructureSpec
from ..native.guards import Fast, check_ambient
from ..native.library import Library
from ..operators import unregistered
from ..tapes.tape import Tape
from .compiled_pass import CompiledPass, Match
from .pass_contract import Operands

_ADVICE_OF_GUARDS = re.compile(r"(: (export|pass|call it)\b|; export\b).*")
"""The guards' advice to callers of exported entries, who pass the tensors; callers of a backward pass do not."""
_MAX_SHAPES = 1024  # lists of shapes with a fast check, per structure: bounds memory; the oldest is dropped. A guess


class Structure:
    """Passes of one fingerprint: the tape of this process, and the package's variants for it."""

    def __init__(
        self,
        tape: Tape,
        spec: StructureSpec | None,
        libraries: Mapping[str, Library],
        constants: Mapping[str, torch.Tensor],
    ):
        self.tape, self.spec = tape, spec
        self.variants = [CompiledPass(v, tape, libraries, constants) for v in (spec.variants if spec else ())]
        names = [s.library for v in self.variants for s in v.spec.segments if s.library]
        # Operators that are not registered yet
        self.missing = unregistered(o for name in names for o in libraries[name].spec.operators)
        self._discriminating = _discriminating_sizes([v.spec for v in self.variants])
        self._fast: dict[tuple[int, ...], _KnownSizes] = {}  # by the sizes that tell passes apart

    def match(self, operands: Operands) -> Match:
        """Return the variant that serves a pass. Raise :class:`InputError` with the reasons if there is none.

        Accepted passes are found by the few sizes that differ between passes, so a hundred batch sizes cost as much as
        one.
        """
        inputs, sizes = operands.inputs, operands.sizes
        try:
            key = tuple([sizes[d] if i < 0 else inputs[i].shape[d] for i, d in self._discriminating])
        except IndexError:  # a tensor of lower rank; no variant serves it
            key = ()
        known_sizes = self._fast.get(key)
        if known_sizes is not None and known_sizes.holds(operands):
            with contextlib.suppress(InputError):  # if it fails, another variant may fit this ambient state
                check_ambient(known_sizes.variant.spec.ambient, known_sizes.variant.device)
                return Match(known_sizes.variant, inputs, known_sizes.values)
        failures = []
        for variant in self.variants:
            try:
                check_ambient(variant.spec.ambient, variant.device)
                fitting, values, untouched = variant.contract.fit_pass(operands)
            except InputError as error:
                failures.append(_ADVICE_OF_GUARDS.sub("", str(error)))
                continue
            if untouched:
                if len(self._fast) >= _MAX_SHAPES:
                    del self._fast[next(iter(self._fast))]
                self._fast[key] = _KnownSizes(variant, list(sizes), list(operands.scalars), Fast(inputs), values)
            return Match(variant, fitting, values)
        raise InputError("; ".join(dict.fromkeys(failures)))


@dataclass(frozen=True)
class _KnownSizes:
    """Tensors and sizes that a variant serves; one check in C compares the tensors."""

    variant: CompiledPass
    sizes: list[int]
    scalars: list[int | float]
    fast: Fast
    values: Mapping[str, int]

    def holds(self, operands: Operands) -> bool:
        same = self.sizes == operands.sizes and repr(self.scalars) == repr(operands.scalars)  # -0.0 is not 0.0
        return same and self.fast.holds(operands.inputs)


def _discriminating_sizes(variants: Sequence[PassSpec]) -> list[tuple[int, int]]:
    """Return the sizes that may differ between passes: (input, dimension), or (-1, number of the size)."""
    dims = [(s.input, s.dim) for v in variants for s in v.symbols]
    if len(variants) > 1:
        first = variants[0]
        others = variants[1:]
        dims += [(-1, k) for k, n in enumerate(first.sizes) if any(v.sizes[k : k + 1] != (n,) for v in others)][:8]
        for i, spec in enumerate(first.inputs):
            dims += (
                [(i, d) for d, n in enumerate(spec.shape) if any(v.inputs[i].shape[d : d + 1] != (n,) for v in others)][
                    :2
                ]
                if len(dims) < 16
                else []
            )
    return list(dict.fromkeys(dims))
