"""Symbolic sizes of a capture, in the form that the package states: symbols, ranges, guards, and tensor specs.

The shape environment of the capture (``torch.fx.experimental.symbolic_shapes.ShapeEnv``) is the source of truth: it
holds every assumption of the trace, the partitioner or the compiler about a size, as a replacement, a range or a guard.
None of them may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Size, SymbolSpec, TensorSpec

from ..user_code.size_guards import GuardOrigin, Places

_COMPARISONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}
_BINARY = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}


def write(expression: Any, names: Mapping[sympy.Symbol, str]) -> str:
    """Return ``expression`` in the package's language (``expressions.py``); raise :class:`ExportError` if that cannot
    state it."""
    kind = type(expression).__name__
    arguments = expression.args

    def part(i: int) -> str:
        return write(arguments[i], names)

    if expression.is_Integer:
        return str(int(expression)) if expression >= 0 else f"({int(expression)})"
    if expression.is_Symbol:
        if expression not in names:
            raise ExportError(
                f"a size depends on {expression}, which is not a dimension of an input: it depends on tensor values, and cannot be a guard"
            )
        return names[expression]
    if kind in ("Add", "Mul"):
        sign = " + " if kind == "Add" else " * "
        return "(" + sign.join(write(a, names) for a in arguments) + ")"
    if kind in _BINARY:
        return f"({part(0)} {_BINARY[kind]} {part(1)})"
    if kind in _COMPARISONS:
        return f"({part(0)} {_COMPARISONS[kind]} {part(1)})"
    if kind in ("Max", "Min"):
        return f"{kind.lower()}({', '.join(write(a, names) for a in arguments)})"
    if kind in ("And", "Or"):
        return "(" + f" {kind.lower()} ".join(write(a, names) for a in arguments) + ")"
    if kind == "Not":
        return f"(not {part(0)})"
    if kind in ("Pow", "PowByNatural") and arguments[1].is_Integer and arguments[1] > 0:
        return "(" + " * ".join([part(0)] * int(arguments[1])) + ")"
    if kind == "CeilDiv":
        return f"(-((-{part(0)}) // {part(1)}))"
    if kind == "ModularIndexing":
        return f"(({part(0)} // {part(1)}) % {part(2)})"
    if kind == "Identity":
        return part(0)
    if kind in ("TruncToInt", "FloorToInt") and type(arguments[0]).__name__ == "IntTrueDiv":
        # Sizes are never negative
        return f"({write(arguments[0].args[0], names)} // {write(arguments[0].args[1], names)})"
    raise ExportError(
        f"the package format cannot store the size expression {expression} ({kind}); make that dimension static"
    )


def expression_of(size: int | torch.SymInt) -> Any:
    """Return the sympy expression of a size, simplified by the shape environment."""
    if isinstance(size, int):
        return sympy.Integer(size)
    node = size.node
    return node.shape_env.simplify(node.expr)


@dataclass
class Sizes:
    """The symbols of one capture, named ``s0``, ``s1``, … in the order in which the inputs show them. ``declared``: the
    range of each symbol with a ``Dim``, by name; ``dims``: the names of those ``Dim``; ``places``: the origin of each
    guard."""

    shape_env: Any
    names: dict[sympy.Symbol, str] = field(default_factory=dict)
    symbols: tuple[SymbolSpec, ...] = ()
    declared: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    dims: dict[str, str] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    @classmethod
    def of_inputs(cls, shape_env: Any, inputs: Sequence[torch.Tensor], labels: Mapping[tuple[int, int], str]) -> Sizes:
        """Collect the symbols of ``inputs``, the flat fake inputs. ``labels``: (input, dimension) -> the author's name
        for it."""
        sizes = cls(shape_env)
        positions: dict[sympy.Symbol, tuple[int, int, int, int]] = {}
        seen: list[sympy.Symbol] = []
        for i, tensor in enumerate(inputs):
            for d, size in enumerate(tensor.shape):
                expression = expression_of(size)
                for symbol in sorted(expression.free_symbols, key=str):
                    if symbol not in seen:
                        seen.append(symbol)
                if len(expression.free_symbols) == 1:
                    (symbol,) = expression.free_symbols
                    scale, offset = expression.coeff(symbol), expression.subs(symbol, 0)
                    linear = scale.is_Integer and scale > 0 and expression == scale * symbol + offset
                    if linear and (symbol not in positions or (scale, offset) == (1, 0) != positions[symbol][2:]):
                        positions[symbol] = (i, d, int(scale), int(offset))
        specs = []
        for n, symbol in enumerate(seen):
            if symbol not in positions:
                raise ExportError(
                    f"the size {symbol} occurs only in a product or quotient of others; make one of those dimensions static"
                )
            i, d, scale, offset = positions[symbol]
            bounds = shape_env.var_to_range[symbol]
            upper = bounds.upper
            finite = upper.is_Integer and int(upper) < 1 << 62
            sizes.names[symbol] = f"s{n}"
            label = labels.get((i, d), f"s{n}") if (scale, offset) == (1, 0) else f"s{n}"
            least = _without_excluded(shape_env, symbol, max(0, int(bounds.lower)))
            specs.append(SymbolSpec(f"s{n}", label, i, d, least, int(upper) if finite else None, scale, offset))
        sizes.symbols = tuple(specs)
        return sizes

    def narrowed(self) -> Iterator[SymbolSpec]:
        """Yield the symbols with a smaller range than declared."""
        for symbol in self.symbols:
            low, high = self.declared.get(symbol.name, (symbol.minimum, symbol.maximum))
            if symbol.minimum > low or (symbol.maximum is not None and (high is None or symbol.maximum < high)):
                yield symbol

    def size(self, size: int | torch.SymInt) -> Size:
        expression = expression_of(size)
        return int(expression) if expression.is_Integer else write(expression, self.names)

    def worded(self, size: int | torch.SymInt) -> Size:
        """Return :meth:`size` for people: sizes that the package's language cannot state, or that come from data, in
        the environment's words."""
        try:
            return self.size(size)
        except ExportError:
            return str(expression_of(size))

    def hints(self) -> dict[str, int]:
        """Return the symbols' values at the example."""
        return {
            name: int(self.shape_env.replace(symbol).xreplace(self.shape_env.backed_var_to_val))
            for symbol, name in self.names.items()
        }

    def spec(self, name: str, tensor: torch.Tensor, requires_grad: bool | None = None) -> TensorSpec:
        """Return the metadata that ``tensor`` (fake, maybe symbolic) must have."""
        return TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=tensor.device.type,
            shape=tuple(self.size(s) for s in tensor.shape),
            stride=tuple(self.size(s) for s in tensor.stride()),
            requires_grad=tensor.requires_grad if requires_grad is None else requires_grad,
        )

    def guards(self, about: Set[sympy.Symbol] | None = None) -> tuple[str, ...]:
        """Return every assumption about the sizes beyond the symbols' ranges, in the package's language. ``about``:
        only those with one program's symbols, if several programs share the shape environment."""
        out: list[str] = []
        for guard in self.shape_env.guards:
            if about is not None and guard.expr.free_symbols.isdisjoint(about):
                continue
            expression = self.shape_env.simplify(guard.expr)
            if expression is sympy.true or expression == True or self._in_range(expression, guard.expr in self.places):  # noqa: E712 (sympy relation)
                continue
            if expression is sympy.false:
                raise ExportError(f"the guard {guard.expr} contradicts the declared sizes")
            text = write(expression, self.names)
            if text not in out:
                out.append(text)
        return tuple(out)

    def origin(self, text: str) -> GuardOrigin | None:
        """Return the origin of the guard ``text``, else of the first guard on the symbol of that name; None if the
        compiler added it."""
        for expression, origin in self.places.items():
            if all(symbol in self.names for symbol in expression.free_symbols):
                names = {self.names[symbol] for symbol in expression.free_symbols}
                if text in (
                    write(self.shape_env.simplify(expression), self.names),
                    *(names if len(names) == 1 else ()),
                ):
                    return origin
        return None

    def _in_range(self, expression: Any, traced: bool) -> bool:
        """Return whether the stated ranges make a guard true that compares one symbol with a number. The ranges of the
        shape environment would be wrong: a later guard has narrowed them, and would make itself true. The compiler asks
        whether a size is not 1 (or 0) to know that nothing is broadcast, but its code holds without that: the
        self-check runs the smallest size to test this. ``traced``: the program asks, and its answer counts."""
        if type(expression).__name__ not in _COMPARISONS or len(expression.free_symbols) != 1:
            return False
        (symbol,) = expression.free_symbols
        spec = next((s for s in self.symbols if s.name == self.names.get(symbol)), None)
        if spec is None:
            return False
        maximum = 1 << 62 if spec.maximum is None else spec.maximum  # no tensor is larger
        result = torch_api.bound_sympy(
            expression,
            {symbol: torch_api.ValueRanges(spec.minimum if traced else min(max(spec.minimum, 2), maximum), maximum)},
        )
        return bool(result.is_singleton() and result.lower == True)  # noqa: E712


_FIRST_SIZES = 8
"""How many of the smallest sizes guards may exclude from a range; a guard that excludes more is stated by itself."""


def _without_excluded(shape_env: Any, symbol: sympy.Symbol, low: int) -> int:
    """Return the first size from ``low`` on that no guard on ``symbol`` alone excludes; ``low`` if that is far."""
    guards = [g.expr for g in shape_env.guards if g.expr.free_symbols == {symbol}]

    def is_allowed(size: int) -> bool:
        return not any(g.xreplace({symbol: sympy.Integer(size)}) == False for g in guards)  # noqa: E712 (sympy relation)

    return next(filter(is_allowed, range(low, low + _FIRST_SIZES)), low)
