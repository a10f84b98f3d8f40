"""Check that a variant serves every declared size that eager accepts; otherwise the export fails."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from aot_backward_runtime.errors import ExportError, InputError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import SymbolSpec, VariantSpec
from aot_backward_runtime.native.guards import Contract

from ..capture import preserve
from ..capture.shapes.symbolic_shapes import Sizes
from .example_sizes import Example, resized, resized_to

_SIZES_TRIED = 3
"""How many sizes that violate a guard are tried in eager. One may be refused only because of the example's values.
The number is a guess."""


def hold_declared_sizes(spec: VariantSpec, sizes: Sizes, program: nn.Module, example: Example) -> None:
    """Raise :class:`ExportError` if ``spec`` does not serve declared sizes that eager serves."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)

    def served(values: Mapping[str, int]) -> bool:
        try:
            return _eager_serves(program, example, [resized(spec, example, values)])
        except InputError:  # an example of size 0, which cannot be enlarged
            return False

    for symbol in spec.symbols:
        low, high = sizes.declared.get(symbol.name, (symbol.minimum, symbol.maximum))
        for size in _beyond(symbol, low, high):
            if served({**first, symbol.name: size}):
                raise ExportError(
                    f"{_label(symbol, spec)}: expected code for {_range(low, high)}, as declared, got code for "
                    f"{_range(symbol.minimum, symbol.maximum)}{_where(sizes, symbol.name)}. Declare that range, and export a variant for other sizes"
                )
    for guard in spec.guards:
        for values in itertools.islice(_against(guard, spec.symbols, sizes, first), _SIZES_TRIED):
            if served(values):
                text = ", ".join(f"{_label(s, spec)} = {values[s.name]}" for s in spec.symbols if _occurs(s.name, guard))
                raise ExportError(
                    f"dynamic_shapes: expected code for all declared sizes, got code that is valid only if {contract.words(guard)}, which excludes "
                    f"{text}{_where(sizes, guard)}. Declare ranges for which that holds, or a relation (one Dim for both), or say Dim.AUTO, and "
                    "export a variant for other sizes"
                )


def eager_refuses(program: nn.Module, example: Example, declared: Sequence[tuple[int, int, Any]], sizes: Mapping[str, int]) -> bool:
    """Return whether eager raises if each ``Dim`` in ``sizes`` has that size. ``declared``: as ``dynamic_shapes.declared`` returns it."""
    shapes = [list(t.shape) for t in example.tensors]
    for number, dim, size in declared:
        if isinstance(size, Dim) and size.__name__ in sizes:
            shapes[number][dim] = sizes[size.__name__]
    try:
        changed = [resized_to(t, shape) for t, shape in zip(example.tensors, shapes, strict=True)]
    except InputError:
        return False
    return not _eager_serves(program, example, [example.with_tensors(changed)])


def _eager_serves(program: nn.Module, example: Example, examples: Sequence[Example]) -> bool:
    """Try also with zeros for integers: an index may be out of range if a size is smaller than the example's."""
    for candidate in (*examples, *(e.with_tensors([_zeros_for_integers(t) for t in e.tensors]) for e in examples)):
        with (
            preserve.in_mode(program, example.mode),
            preserve.slots_kept(program),
            preserve.values_kept(program.buffers()),
            torch.no_grad(),
            contextlib.suppress(Exception),  # eager refuses the sizes with any exception
        ):
            program(*candidate.args, **candidate.kwargs)
            return True
    return False


def _zeros_for_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool else torch.zeros_like(tensor)


def _beyond(symbol: SymbolSpec, low: int, high: int | None) -> Iterator[int]:
    """Yield declared sizes that are not served: the sizes next to the range, and the smallest."""
    if symbol.minimum > low:
        yield from {symbol.minimum - 1, low}
    if symbol.maximum is not None and (high is None or symbol.maximum < high):
        yield symbol.maximum + 1


def _against(guard: str, symbols: Sequence[SymbolSpec], sizes: Sizes, first: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield declared sizes that violate ``guard``, sizes that only enlarge the example first. Yield none if the guard contains a size that is only a
    hint, because a trace may narrow it."""
    guard_symbols = [s for s in symbols if _occurs(s.name, guard)]
    if any(s.name not in sizes.declared for s in guard_symbols):
        return
    choices = []
    for symbol in guard_symbols:
        low, high = sizes.declared[symbol.name]
        options = {n + k for n in (low, *first.values()) for k in (-1, 0, 1)} | {
            2 * first[symbol.name],
            *([high] if high is not None and high < 100 else []),
        }
        choices.append(sorted(n for n in options if low <= n and (high is None or n <= high)))
    candidates = [
        {**first, **dict(zip((s.name for s in guard_symbols), values, strict=True))}
        for values in itertools.product(*choices)
        if not evaluate(guard, {**first, **dict(zip((s.name for s in guard_symbols), values, strict=True))})
    ]
    yield from sorted(candidates, key=lambda v: (any(v[n] < first[n] for n in v), sum(abs(v[n] - first[n]) for n in v)))


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
