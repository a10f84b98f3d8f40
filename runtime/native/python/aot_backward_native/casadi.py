"""Use a package as a function of CasADi, with exact first and second derivatives, without PyTorch.

from aot_backward_native.casadi import function

f = function("dynamics.pt2", points=20)  # f(X, U): a column for each point
"""

from __future__ import annotations

import os
from typing import Any

import casadi as ca
import numpy as np

import aot_backward_native as abn

from ._casadi_callback import Matrix, MatrixFunction
from .errors import InputError

__all__ = ["function"]


def function(
    package: str | os.PathLike[str], name: str = "f", *, points: int = 1, backend: str | None = None
) -> ca.Callback:
    """Return the function whose entries ``ab.derivatives`` made, for a fixed number of points
    (``docs/how-to/hosts-casadi.md``).

    An argument is a matrix with a column for each point, and so is the result; an argument that all points share has
    one column. CasADi gets the Jacobian from the entry "jacobian", products from "vjp" and the Hessian of such a
    product from "hessian", each with its block-diagonal sparsity. Without one of them, CasADi cannot compute that
    derivative. Derivatives by an argument that the entries are not differentiated by are NaN.

    Args:
        package: The path of the package. Its entry "value" is needed.
        name: The name of the function in CasADi.
        points: The number of points of a call.
        backend: As for :func:`aot_backward_native.load`.

    Returns:
        The function. It stays in memory until the process ends.

    Raises:
        InputError: The entries do not come from ``ab.derivatives``, or the result is not one tensor.
        PackageError: There is no entry "value".

    Examples:
        >>> f = function("dynamics.pt2", points=20)
        >>> X, U = casadi.MX.sym("X", 4, 20), casadi.MX.sym("U", 2, 20)
        >>> f(X, U).shape
        (4, 20)
    """
    return _Derivatives(abn.load(package, backend=backend), points).value(name)


class _Derivatives:
    """The functions for CasADi of a package: value, Jacobian, vector times Jacobian, and the Jacobian of that."""

    def __init__(self, package: abn.Package, points: int):
        self._functions: dict[str, Any] = {"value": package.function("value")}
        self._functions |= {k: package.function(k) for k in ("jacobian", "vjp", "hessian") if k in package.entries}
        value = self._functions["value"]
        facts, place = value.metadata, f"{package.path}: entry 'value'"
        if facts.get("derivative") != "value":
            raise InputError(
                f"{place}: expected an entry of ab.derivatives, got the metadata {facts}. Export it with ab.derivatives."
            )
        if points < 1 or (points > 1 and not facts["batched"]):
            raise InputError(
                f"points: expected {'at least 1' if facts['batched'] else '1, as it was exported'}, got {points}. Change it."
            )
        self._names: list[str] = facts["arguments"]
        self._args = [
            Matrix((points, *map(int, shape[1:])), points, dtype)
            if name in facts["batched"]
            else Matrix(tuple(map(int, shape)), 1, dtype)
            for name, dtype, shape in value.inputs
        ]
        result = value(*(np.zeros(a.shape, a.dtype) for a in self._args))
        if not isinstance(result, np.ndarray):
            raise InputError(
                f"{place}: expected one tensor as result, got a {type(result).__name__}. Concatenate the results into one."
            )
        self._result = Matrix(result.shape, points, result.dtype.name)

        self._ins, self._out = [a.sparsity for a in self._args], self._result.sparsity
        self._first = [self._result.by(a) for a in self._args]  # the blocks of the Jacobian
        # What a vector times the Jacobian depends on: arguments, not the result, and the vector
        seen = [*self._args, None, self._result]
        self._second = [a.by(b) if b else ca.Sparsity(a.size, self._result.size) for a in self._args for b in seen]

    def value(self, name: str) -> MatrixFunction:
        ways = {"jacobian": self._jacobian} if "jacobian" in self._functions else {}
        ways |= {"reverse": self._vjp} if "vjp" in self._functions else {}
        return MatrixFunction(name, self._ins, [self._out], lambda args: [self._call("value", args)], ways, self._first)

    def _jacobian(self, name: str) -> MatrixFunction:
        def run(args: list[np.ndarray]) -> list[Any]:
            by = self._call("jacobian", args[:-1])
            return [self._blocks(by.get(n), self._result, a) for n, a in zip(self._names, self._args, strict=True)]

        return MatrixFunction(name, [*self._ins, self._out], self._first, run)

    def _vjp(self, name: str) -> MatrixFunction:
        def run(args: list[np.ndarray]) -> list[Any]:
            by = self._call("vjp", [*args[:-2], args[-1]])
            return [by.get(n, np.nan) for n in self._names]

        ways = {"jacobian": self._hessian} if {"jacobian", "hessian"} <= self._functions.keys() else {}
        return MatrixFunction(name, [*self._ins, self._out, self._out], self._ins, run, ways, self._second)

    def _hessian(self, name: str) -> MatrixFunction:
        def run(args: list[np.ndarray]) -> list[Any]:
            x, vector = args[: len(self._args)], args[len(self._args) + 1]
            first, second, out = self._call("jacobian", x), self._call("hessian", [*x, vector]), list[Any]()
            for name, a in zip(self._names, self._args, strict=True):
                out += [
                    self._blocks(second.get(name, {}).get(n), a, b)
                    for n, b in zip(self._names, self._args, strict=True)
                ]
                out += [None, first.get(name, np.nan)]  # the block by the vector is the transposed Jacobian
            return out

        return MatrixFunction(name, [*self._ins, self._out, self._out, *self._ins], self._second, run)

    def _call(self, kind: str, args: list[np.ndarray]) -> Any:
        matrices = zip(args, [*self._args, self._result], strict=False)
        return self._functions[kind](*(v.reshape(m.shape).astype(m.dtype, copy=False) for v, m in matrices))

    def _blocks(self, values: np.ndarray | None, a: Matrix, b: Matrix) -> Any:
        """Return the nonzeros in CasADi's order: by point, column and row. NaN for an argument that the entry is not
        differentiated by."""
        return np.nan if values is None else values.reshape(a.columns, a.rows, b.rows).swapaxes(1, 2)
