"""Explain which dynamic sizes the program narrows, at which line, and how the user can change that.

A few sizes that the traced code does not serve are no error here: each gets a variant of its own
(``checks.declared_sizes``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import Dim

from aot_backward_exporters import torch_api

from ..user_code.size_guards import GuardOrigin, Places
from .symbolic_shapes import expression_of, write


class Narrowed(Exception):
    """Raised if the program does not allow the declared sizes."""


_FEW_EXCLUDED = 8
"""How many excluded sizes are listed. With ``Dim("length")``, which is from 0, and a kernel of 5, there are six; eager
refuses five of them."""


def few_excluded(holds: Callable[[int], bool], low: int, high: int | None) -> list[int] | None:
    """Return the sizes from ``low`` to ``high`` that ``holds`` excludes if they are few, else None.

    Tried are 256 sizes from ``low`` on, and further ones around powers of 2: a trace compares quotients, remainders and
    products of small numbers, or a number of elements with the limit of an index."""
    last = 1 << 40 if high is None else high
    powers = {(1 << power) + k for power in range(8, 41) for k in (-1, 0, 1)}
    out = []
    for size in (*range(low, min(low + 256, last + 1)), *sorted(n for n in {*powers, last} if low + 256 <= n <= last)):
        if not holds(size):
            out.append(size)
            if len(out) > _FEW_EXCLUDED:
                return None
    return out


@dataclass
class Declared:
    """One declared size: a ``Dim`` or a hint. ``place``: the first dimension with it. ``symbols``: its symbols when the
    trace began."""

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


def declared_sizes(
    stated: Sequence[tuple[int, int, Any]], inputs: Sequence[torch.Tensor], names: Sequence[str]
) -> list[Declared]:
    """Collect the declared sizes. Call this before the trace replaces symbols. ``stated``: the result of
    ``dynamic_shapes.declared``."""
    declared: dict[Any, Declared] = {}
    for i, d, size in stated:
        value = inputs[i].shape[d]
        if isinstance(value, torch.SymInt) and hasattr(size, "min"):
            place = f"{names[i]}.shape[{d}]"
            dim = declared.setdefault(
                size.__name__ if isinstance(size, Dim) else place, Declared(size, place, value, set())
            )
            dim.symbols |= value.node.expr.free_symbols
    return list(declared.values())


def raise_if_refused(env: Any, declared: Sequence[Declared], places: Places, error: Exception) -> None:
    """Raise ``error``, a ``ConstraintViolationError`` of torch, explained once per size, unless only a few sizes are
    excluded."""
    reasons, few = list[str](), False
    for n, dim in enumerate(declared):
        narrowing = _narrowing(env, dim, declared[n:])
        if narrowing is None or narrowing is _FEW:
            few |= narrowing is _FEW
            continue
        guard, text, advice = narrowing
        origin = places.get(guard, GuardOrigin())
        if origin.transformed and expression_of(dim.value).is_Integer:
            advice = (
                "a rule of torch.func reads it as a number: call aot_backward.derivatives, or sum over the batch inside torch.func.jacrev instead of "
                "using vmap, or export a variant for each size"
            )
        where = "".join(f", {part}" for part in (origin.where, origin.operator) if part)
        reasons.append(
            f"{dim.label} is {_range(dim)}, and the program{where and f'{where},'} is valid {text}: {advice}"
        )
    if reasons:
        raise Narrowed(". ".join(reasons)) from error
    if not few:
        raise error


def _range(one: Declared) -> str:
    if not one.named:
        return f"Dim.{one.size.type.name}"
    low, high = bounds(one.size)
    return f"declared to be {low} and more" if high is None else f"declared to be {low} to {high}"


_FEW = None, "", ""


def _narrowing(env: Any, one: Declared, later: Sequence[Declared]) -> tuple[Any, str, str] | None:
    """Return the guard, its text and a remedy; ``_FEW`` if the guards exclude a few sizes; None if they exclude
    none."""
    value = expression_of(one.value)
    if value.is_Integer:
        equalities = [
            g.expr
            for g in env.guards
            if type(g.expr).__name__ == "Equality" and not one.symbols.isdisjoint(g.expr.free_symbols)
        ]
        guard = next((e for e in equalities if any(part.is_Integer for part in e.args)), (equalities or [None])[0])
        advice = "say Dim.AUTO or Dim.STATIC there, or export a variant for each size"
        return guard, f"only for {value} (guard: {one.place} == {value})", advice
    names = dict.fromkeys(one.symbols, one.size.__name__ if one.named else one.place)
    for other in later:
        if (
            one is not other
            and one.named
            and other.named
            and value.free_symbols & {env.replace(s) for s in other.symbols}
            and value.is_Symbol
        ):
            guards = [
                g.expr for g in env.guards if one.symbols & g.expr.free_symbols and other.symbols & g.expr.free_symbols
            ]
            advice = f"give both the same Dim, or export a variant with Dim.AUTO for sizes that differ from {other.size.__name__}"
            return (guards or [None])[0], f"only if it is equal to {other.label}", advice
    if type(one.size) is not Dim:  # a hint may be narrowed; only torch knows the bounds of 2 * Dim("half")
        return None
    guards = [g.expr for g in env.guards if g.expr.free_symbols and g.expr.free_symbols <= one.symbols]
    if value.is_Symbol:  # torch may have put a guard into the range instead
        guards.append(sympy.Ge(value, env.var_to_range[value].lower))
    unmet_guards = [g for g in guards if not _holds(g, one.range)]
    if not unmet_guards:
        return None

    def served(size: int) -> bool:
        return all(g.xreplace(dict.fromkeys(g.free_symbols, sympy.Integer(size))) == True for g in unmet_guards)  # noqa: E712 (a sympy relation)

    if few_excluded(served, *bounds(one.size)) is not None:
        return _FEW
    condition = write(unmet_guards[0], names).removeprefix("(").removesuffix(")")
    return (
        unmet_guards[0],
        f"only if {condition}",
        "declare sizes for which that holds (a range, or 2 * Dim('half')), or say Dim.AUTO",
    )


def _holds(guard: Any, allowed: Any) -> bool:
    result = torch_api.bound_sympy(guard, dict.fromkeys(guard.free_symbols, allowed))
    return bool(result.is_singleton() and result.lower == True)  # noqa: E712 (a sympy relation, not a bool)
