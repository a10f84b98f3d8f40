"""Whether the tensors that a manifest describes can be: their dtypes, devices, sizes, and the symbols that these are computed from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword

from ..errors import PackageError
from ..format.dtypes import DTYPES, can_hold
from ..format.expressions import evaluate, symbols_of
from ..format.manifest import Size, SymbolSpec, TensorSpec, WeightSpec

DEVICES = ("cpu", "cuda")
_LARGEST = 1 << 60  # elements
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FUNCTIONS = ("max", "min")  # of expressions


def check_weights(weights: Mapping[str, WeightSpec]) -> None:
    """:class:`PackageError` names a weight that no tensor could be."""
    for name, spec in weights.items():
        if spec.dtype not in DTYPES:
            raise PackageError(f"weight {name!r} has the dtype {spec.dtype[:40]!r}, which is unknown")
        if len(spec.shape) > 64 or min(spec.shape, default=0) < 0 or math.prod(max(n, 1) for n in spec.shape) >= _LARGEST:
            raise PackageError(f"weight {name!r} has the shape {str(list(spec.shape))[:80]}, which no tensor has")
        if spec.fill is not None and not can_hold(spec.dtype, spec.fill):
            raise PackageError(f"weight {name!r} is filled with {spec.fill!r}, which {spec.dtype} cannot hold")


def check_tensor(spec: TensorSpec, names: set[str]) -> None:
    """:func:`check_sizes`, and that dtype and device are known."""
    check_sizes(spec, names)
    if spec.dtype not in DTYPES or spec.device not in DEVICES:
        raise PackageError(f"{spec.name} is {spec.dtype[:40]!r} on {spec.device[:40]!r}, which is unknown")


def check_sizes(spec: TensorSpec, names: set[str]) -> None:
    """That ``spec`` has as many strides as sizes, none negative, each a number or an expression in the symbols ``names``."""
    if len(spec.shape) != len(spec.stride):
        raise PackageError(f"{spec.name} has {len(spec.shape)} sizes and {len(spec.stride)} strides")
    for size in (*spec.shape, *spec.stride):
        if isinstance(size, int) and size < 0:
            raise PackageError(f"{spec.name} has the size or stride {size}")
        check_symbols(spec.name, size, names)


def check_symbols_of(symbols: Sequence[SymbolSpec], shapes: Sequence[Sequence[Size]], sizes: Sequence[Size] | None = None) -> set[str]:
    """The symbols' names, each of which is read from a dimension of a listed tensor or, where the input is -1, from one of ``sizes``."""
    names: set[str] = set()
    for symbol in symbols:
        if not _NAME.fullmatch(symbol.name) or iskeyword(symbol.name) or symbol.name in _FUNCTIONS or symbol.name in names:
            raise PackageError(f"{symbol.name[:80]!r} is not a name for a symbol, or occurs twice")
        if not (0 if sizes is None else -1) <= symbol.input < len(shapes):
            raise PackageError(f"symbol {symbol.name} is read from input {symbol.input}; there are {len(shapes)}")
        places = len(sizes or ()) if symbol.input < 0 else len(shapes[symbol.input])
        if not 0 <= symbol.dim < places:
            where = "the sizes" if symbol.input < 0 else f"the dimensions of input {symbol.input}"
            raise PackageError(f"symbol {symbol.name} is read from number {symbol.dim} of {where}; there are {places}")
        if symbol.scale < 1:
            raise PackageError(f"symbol {symbol.name} has scale {symbol.scale}")
        names.add(symbol.name)
    return names


def check_symbols(what: str, size: Size, names: set[str]) -> None:
    unknown = symbols_of(size) - names
    if unknown:
        raise PackageError(f"{what}: the expression {str(size)[:80]!r} needs the unknown symbol {min(unknown)!r}")


def fits(given: TensorSpec | WeightSpec, wanted: TensorSpec, symbols: Sequence[SymbolSpec]) -> bool:
    """Whether dtype, device, shape and strides are the same, but for strides by which no second element is reached."""
    if given.dtype != wanted.dtype or (isinstance(given, TensorSpec) and given.device != wanted.device):
        return False
    if not equal_sizes(given.shape, wanted.shape, symbols):
        return False
    strides = [(a, b) for n, a, b in zip(wanted.shape, given.stride, wanted.stride, strict=True) if n not in (0, 1)]
    return 0 in wanted.shape or equal_sizes([a for a, _ in strides], [b for _, b in strides], symbols)


def equal_sizes(a: Sequence[Size], b: Sequence[Size], symbols: Sequence[SymbolSpec]) -> bool:
    """Whether these are the same sizes: written the same, or of equal value for three assignments of the symbols."""
    if len(a) != len(b):
        return False
    unequal = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    if any(isinstance(x, int) and isinstance(y, int) for x, y in unequal):
        return False
    if any(len(symbols_of(x) | symbols_of(y)) > len(symbols) for x, y in unequal):
        return False
    tried = [{s.name: max(s.minimum, 2) + factor * (n + 1) for n, s in enumerate(symbols)} for factor in (0, 7, 1009)] if unequal else []
    return all(evaluate(x, values) == evaluate(y, values) for values in tried for x, y in unequal)


def describe(spec: TensorSpec | WeightSpec) -> str:
    """For errors."""
    return f"{spec.dtype} {str(list(spec.shape))[:80]} with strides {str(list(spec.stride))[:80]}"
