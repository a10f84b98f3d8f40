"""Find the declared sizes that eager accepts and a variant does not serve. A few get a variant of their own; otherwise
the export fails."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError, InputError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import SymbolSpec, VariantSpec
from aot_backward_runtime.native.guards import Contract

from ..capture import preserve
from ..capture.shapes.narrowed import few_excluded
from ..capture.shapes.symbolic_shapes import Sizes
from .example_sizes import Example, resized

_SIZES_TRIED = 3
"""How many sizes that violate a guard are tried in eager. One may be refused only because of the example's values. The
number is a guess."""

_FEW = 2
"""How many sizes of one ``Dim`` get a variant of their own: torch specialises 0 and 1, of the size or of one that is
computed from it (the length after a convolution). More are a range that the program decides, and each costs an
export."""


@dataclass(frozen=True)
class Unserved:
    """A declared size that needs code of its own. ``dim``: the name of its ``Dim``; ``example``: the example at that
    size."""

    dim: str
    size: int
    example: Example


def unserved_sizes(spec: VariantSpec, sizes: Sizes, program: nn.Module, example: Example) -> list[Unserved]:
    """Return the declared sizes that eager accepts and ``spec`` does not serve. Raise :class:`ExportError` if they are
    more than a few of one ``Dim``, or depend on several."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)
    out = list[Unserved]()

    def accepted(values: Mapping[str, int]) -> Example | None:
        try:
            return _accepted_by_eager(program, resized(spec, example, values))
        except InputError:  # an example of size 0, which cannot be enlarged
            return None

    def needs_few(symbol: SymbolSpec, excluded: Sequence[int]) -> bool:
        """Add a size for each of ``excluded`` that eager accepts. Return whether they are few."""
        examples = {n: changed for n in excluded if (changed := accepted({**first, symbol.name: n}))}
        if examples and (len(examples) > _FEW or symbol.name not in sizes.dims):
            return False
        out.extend(Unserved(sizes.dims[symbol.name], n, changed) for n, changed in examples.items())
        return True

    for symbol in spec.symbols:
        low, high = sizes.declared.get(symbol.name, (symbol.minimum, symbol.maximum))
        below = few_excluded(lambda n: n >= symbol.minimum, low, symbol.minimum)  # noqa: B023 (called at once)
        beyond = [symbol.maximum + 1] if symbol.maximum is not None and (high is None or symbol.maximum < high) else []
        if (
            not needs_few(symbol, below or [])
            or (below is None and any(accepted({**first, symbol.name: n}) for n in (symbol.minimum - 1, low)))
            or any(accepted({**first, symbol.name: n}) for n in beyond)
        ):
            raise ExportError(
                f"{_label(symbol, spec)}: expected code for {_range(low, high)}, as declared, got code for "
                f"{_range(symbol.minimum, symbol.maximum)}{_where(sizes, symbol.name)}. Declare that range, and export a variant for other sizes"
            )
    for guard in spec.guards:
        guarded = [s for s in spec.symbols if _occurs(s.name, guard)]
        if any(s.name not in sizes.declared for s in guarded):
            continue  # it contains a size that is only a hint, which a trace may narrow
        excluded = _violations(guard, guarded, sizes, first)
        if any(
            needs_few(s, few) for s in guarded if (few := _few_values(s, guarded, guard, excluded, sizes)) is not None
        ):
            continue
        for values in excluded[:_SIZES_TRIED]:
            if accepted(values):
                text = ", ".join(f"{_label(s, spec)} = {values[s.name]}" for s in guarded)
                raise ExportError(
                    f"dynamic_shapes: expected code for all declared sizes, got code that is valid only if {contract.words(guard)}, which excludes "
                    f"{text}{_where(sizes, guard)}. Declare ranges for which that holds, or a relation (one Dim for both), or say Dim.AUTO, and "
                    "export a variant for other sizes"
                )
    return list({(u.dim, u.size): u for u in out}.values())


def _accepted_by_eager(program: nn.Module, example: Example) -> Example | None:
    """Return ``example`` if eager runs it, else ``example`` with zeros for integers if eager runs that: an index may be
    out of range if a size is smaller than the example's."""
    for candidate in (example, example.with_tensors([_zeros_for_integers(t) for t in example.tensors])):
        with (
            preserve.in_mode(program, candidate.mode),
            preserve.slots_kept(program),
            preserve.values_kept(program.buffers()),
            torch.no_grad(),
            contextlib.suppress(Exception),  # eager refuses the sizes with any exception
        ):
            program(*candidate.args, **candidate.kwargs)
            return candidate
    return None


def _zeros_for_integers(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
        else torch.zeros_like(tensor)
    )


def _few_values(
    symbol: SymbolSpec, guarded: Sequence[SymbolSpec], guard: str, violations: Sequence[Mapping[str, int]], sizes: Sizes
) -> list[int] | None:
    """Return the values of ``symbol`` without which ``guard`` holds for every size if they are few, else None."""
    if len(guarded) == 1:
        return few_excluded(
            lambda n: bool(evaluate(guard, {symbol.name: n})), symbol.minimum, sizes.declared[symbol.name][1]
        )
    values = sorted({v[symbol.name] for v in violations})
    return values if len(values) <= _FEW else None


def _violations(
    guard: str, guarded: Sequence[SymbolSpec], sizes: Sizes, first: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return declared sizes within the symbols' ranges that violate ``guard``, sizes that only enlarge the example
    first."""
    choices = []
    for symbol in guarded:
        low, high = symbol.minimum, sizes.declared[symbol.name][1]
        near = {n + k for n in (low, *first.values()) for k in (-1, 0, 1)} | set(range(low, low + 8))
        options = near | {2 * first[symbol.name], *([high] if high is not None and high < 100 else [])}
        choices.append(sorted(n for n in options if low <= n and (high is None or n <= high)))
    assignments = [
        {**first, **dict(zip((s.name for s in guarded), values, strict=True))} for values in itertools.product(*choices)
    ]
    violations = [values for values in assignments if not evaluate(guard, values)]
    return sorted(violations, key=lambda v: (any(v[n] < first[n] for n in v), sum(abs(v[n] - first[n]) for n in v)))


def _occurs(name: str, guard: str) -> bool:
    return re.search(rf"\b{name}\b", guard) is not None


def _range(low: int, high: int | None) -> str:
    return f"{low} and more" if high is None else f"{low} to {high}"


def _label(symbol: SymbolSpec, spec: VariantSpec) -> str:
    place = f"{spec.inputs[symbol.input].name}.shape[{symbol.dim}]"
    return place if symbol.label == symbol.name else f"{symbol.label} ({place})"


def _where(sizes: Sizes, text: str) -> str:
    """Return the origin of a guard that contains ``text``, or of the first guard on a symbol."""
    origin = sizes.origin(text)
    return "".join(f", {part}" for part in (origin.where, origin.operator) if part) if origin else ""
