"""Explain which dynamic sizes the program narrows, at which line, and how the user can change that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import Dim

from aot_backward_exporters import torch_api

from ..user_code.size_guards import GuardOrigin, Places
from .symbolic_shapes import expression_of, write


class Narrowed(Exception):
    """Raised if the program does not allow the declared sizes. ``minimum``: if only the sizes 0 and 1 are refused, the smallest supported size by
    name of the ``Dim``."""

    def __init__(self, message: str, minimum: Mapping[str, int]):
        super().__init__(message)
        self.minimum = dict(minimum)


@dataclass
class Declared:
    """One declared size: a ``Dim`` or a hint. ``place``: the first dimension with it. ``symbols``: its symbols when the trace began."""

    size: Any
    place: str
    value: torch.SymInt | int
    symbols: set[sympy.Symbol]

    @property
    def named(self) -> bool:
        return isinstance(self.size, Dim)

    @property
    def label(self) -> str:
        return f"{self.size.__name__} ({self.place})" if self.named else self.place

    @property
    def range(self) -> Any:
        low, high = bounds(self.size)
        return torch_api.ValueRanges(low, torch_api.int_oo if high is None else high)


def bounds(size: Any) -> tuple[int, int | None]:
    """Return the smallest and the largest size that a ``Dim`` or a hint allows; None means no limit."""
    low, high = size.min, size.max
    return (0 if low is None else int(low)), (None if high is None or not sympy.sympify(high).is_Integer else int(high))


def declared_sizes(stated: Sequence[tuple[int, int, Any]], inputs: Sequence[torch.Tensor], names: Sequence[str]) -> list[Declared]:
    """Collect the declared sizes. Call this before the trace replaces symbols. ``stated``: the result of ``dynamic_shapes.declared``."""
    declared: dict[Any, Declared] = {}
    for i, d, size in stated:
        value = inputs[i].shape[d]
        if isinstance(value, torch.SymInt) and hasattr(size, "min"):
            place = f"{names[i]}.shape[{d}]"
            dim = declared.setdefault(size.__name__ if isinstance(size, Dim) else place, Declared(size, place, value, set()))
            dim.symbols |= value.node.expr.free_symbols
    return list(declared.values())


def refused(env: Any, declared: Sequence[Declared], places: Places, error: Exception) -> Narrowed | None:
    """Explain ``error``, a ``ConstraintViolationError`` of torch, once per size; return None if the guards do not show the cause."""
    reasons, minimum, minimum_suffices = list[str](), dict[str, int](), True
    derived = any(dim.named and type(dim.size) is not Dim for dim in declared)  # such as 2 * Dim("half"): its range follows from another one
    for n, dim in enumerate(declared):
        narrowing = _narrowing(env, dim, declared[n:])
        if narrowing is None:
            continue
        guard, text, advice, least = narrowing
        origin = places.get(guard, GuardOrigin())
        if origin.transformed and expression_of(dim.value).is_Integer:
            advice = (
                "a rule of torch.func reads it as a number: call aot_backward.derivatives, or sum over the batch inside torch.func.jacrev instead of "
                "using vmap, or export a variant for each size"
            )
        where = "".join(f", {part}" for part in (origin.where, origin.operator) if part)
        reasons.append(f"{dim.label} is {_range(dim)}, and the program{where and f'{where},'} is valid {text}: {advice}")
        if dim.named and least is not None and not derived:
            minimum[dim.size.__name__] = least
        else:
            minimum_suffices = False
    if not reasons:
        return None
    return Narrowed(". ".join(reasons), minimum if minimum_suffices else {})


def _range(one: Declared) -> str:
    if not one.named:
        return f"Dim.{one.size.type.name}"
    low, high = bounds(one.size)
    return f"declared to be {low} and more" if high is None else f"declared to be {low} to {high}"


def _narrowing(env: Any, one: Declared, later: Sequence[Declared]) -> tuple[Any, str, str, int | None] | None:
    """Return the guard, its text, a remedy, and the minimum that satisfies the guard if a minimum is enough."""
    value = expression_of(one.value)
    if value.is_Integer:
        equalities = [g.expr for g in env.guards if type(g.expr).__name__ == "Equality" and not one.symbols.isdisjoint(g.expr.free_symbols)]
        guard = next((e for e in equalities if any(part.is_Integer for part in e.args)), (equalities or [None])[0])
        advice = "say Dim.AUTO or Dim.STATIC there, or export a variant for each size"
        return guard, f"only for {value} (guard: {one.place} == {value})", advice, None
    names = dict.fromkeys(one.symbols, one.size.__name__ if one.named else one.place)
    for other in later:
        if one is not other and one.named and other.named and value.free_symbols & {env.replace(s) for s in other.symbols} and value.is_Symbol:
            guards = [g.expr for g in env.guards if one.symbols & g.expr.free_symbols and other.symbols & g.expr.free_symbols]
            advice = f"give both the same Dim, or export a variant with Dim.AUTO for sizes that differ from {other.size.__name__}"
            return (guards or [None])[0], f"only if it is equal to {other.label}", advice, None
    if type(one.size) is not Dim:  # a hint may be narrowed; only torch knows the bounds of 2 * Dim("half")
        return None
    unmet_guards = [g.expr for g in env.guards if g.expr.free_symbols and g.expr.free_symbols <= one.symbols and not _holds(g.expr, one.range)]
    if not unmet_guards:
        return None
    low, high = bounds(one.size)
    least = next((n for n in (1, 2) if n > low and (high is None or n <= high) and all(_holds(g, _from(n, one)) for g in unmet_guards)), None)
    condition = write(unmet_guards[0], names).removeprefix("(").removesuffix(")")
    if least is not None:
        return unmet_guards[0], f"only if {condition}", f"declare min={least}, and export a variant for a size of {least - 1}", least
    return unmet_guards[0], f"only if {condition}", "declare sizes for which that holds (a range, or 2 * Dim('half')), or say Dim.AUTO", None


def _from(least: int, one: Declared) -> Any:
    return torch_api.ValueRanges(least, one.range.upper)


def _holds(guard: Any, allowed: Any) -> bool:
    result = torch_api.bound_sympy(guard, dict.fromkeys(guard.free_symbols, allowed))
    return bool(result.is_singleton() and result.lower == True)  # noqa: E712 (a sympy relation, not a bool)
