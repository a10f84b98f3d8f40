"""Sizes and guards as text, e.g. ``2*s0 + 1`` or ``s0 % 4 == 0``, and their evaluation.

The language is the integer arithmetic of Python: integer literals, symbols, ``+ - * // %``, comparisons,
``and or not``, ``max`` and ``min``. It is parsed with :mod:`ast` against a list of allowed nodes, so text from a
package can compute but has no side effects.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ..errors import PackageError

_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min}
_MAX_CHARACTERS = 10_000  # characters; the longest guard of 29 real models was below 400


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[Any, frozenset[str]]:
    if len(text) > _MAX_CHARACTERS:
        raise PackageError(f"expression of {len(text)} characters; the format allows {_MAX_CHARACTERS}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PackageError(f"expression {text[:80]!r} does not parse") from error
    symbols = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise PackageError(f"expression {text[:80]!r} holds {type(node).__name__}, which the format does not allow")
        if isinstance(node, ast.Constant) and (type(node.value) is not int or abs(node.value) >= 1 << 63):
            raise PackageError(
                f"expression {text[:80]!r} holds the constant {node.value!r}; only 64-bit integers are allowed"
            )
        if isinstance(node, ast.Call) and (
            not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords
        ):
            raise PackageError(f"expression {text[:80]!r} calls something other than max and min")
        if isinstance(node, ast.Call) and len(node.args) < 2:
            raise PackageError(f"expression {text[:80]!r} calls max or min with less than two arguments")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            symbols.add(node.id)
    functions = sum(isinstance(n, ast.Name) and n.id in _FUNCTIONS for n in ast.walk(tree))
    if functions != sum(isinstance(n, ast.Call) for n in ast.walk(tree)):
        raise PackageError(f"expression {text[:80]!r} names max or min without calling it")
    try:
        return compile(tree, "<size expression>", "eval"), frozenset(symbols)
    except (RecursionError, MemoryError) as error:
        raise PackageError(f"expression {text[:80]!r} is nested too deep") from error


def symbols_of(expression: str | int) -> frozenset[str]:
    """Return the symbols that ``expression`` needs; none for an integer."""
    return frozenset() if isinstance(expression, int) else _compiled(expression)[1]


def evaluate(expression: str | int, values: Mapping[str, int]) -> int:
    """Return the value of ``expression`` (a bool counts as an int). ``values``: the value of each symbol."""
    if isinstance(expression, int):
        return expression
    code, symbols = _compiled(expression)
    missing = symbols - values.keys()
    if missing:
        raise PackageError(f"expression {expression!r} needs the unknown symbol {min(missing)!r}")
    try:
        return eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(values))  # noqa: S307 (only the nodes listed above)
    except ZeroDivisionError as error:
        raise PackageError(
            f"expression {expression!r} divides by zero at {', '.join(f'{n}={values[n]}' for n in sorted(symbols))}"
        ) from error
