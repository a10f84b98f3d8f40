"""A function of CasADi that calls Python, its arguments, and the sparsities of its Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import casadi as ca
import numpy as np

_ALIVE: list[Any] = []  # CasADi calls a Callback without owning it, and crashes if Python has freed it


@dataclass(frozen=True)
class Matrix:
    """An argument or the result: ``shape`` in the package, and ``rows`` and ``columns`` in CasADi."""

    shape: tuple[int, ...]
    columns: int
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return self.size // self.columns

    @property
    def sparsity(self) -> ca.Sparsity:
        return ca.Sparsity.dense(self.rows, self.columns)

    def by(self, other: Matrix) -> ca.Sparsity:
        """Return the sparsity of the derivative by ``other``: a block for each point."""
        if self.columns == other.columns:
            return ca.diagcat(*[ca.Sparsity.dense(self.rows, other.rows)] * self.columns)
        return ca.Sparsity.dense(self.size, other.size)


class MatrixFunction(ca.Callback):
    """A function of matrices. ``ways``: what makes its Jacobian and its reverse derivative; ``jacobian``: the
    sparsities of the Jacobian's blocks."""

    def __init__(
        self,
        name: str,
        ins: Sequence[ca.Sparsity],
        outs: Sequence[ca.Sparsity],
        run: Callable[[list[np.ndarray]], Sequence[Any]],
        ways: Mapping[str, Callable[[str], MatrixFunction]] | None = None,
        jacobian: Sequence[ca.Sparsity] = (),
    ):
        ca.Callback.__init__(self)
        self._ins, self._outs, self._run, self._ways, self._blocks = ins, outs, run, ways or {}, jacobian
        _ALIVE.append(self)
        self.construct(name, {})

    def get_n_in(self) -> int:
        return len(self._ins)

    def get_n_out(self) -> int:
        return len(self._outs)

    def get_sparsity_in(self, i: int) -> ca.Sparsity:
        return self._ins[i]

    def get_sparsity_out(self, i: int) -> ca.Sparsity:
        return self._outs[i]

    def has_eval_buffer(self) -> bool:
        return True

    def eval_buffer(self, args: Sequence[Any], results: Sequence[Any]) -> int:
        given = [np.frombuffer(a) if a is not None else np.zeros(s.nnz()) for a, s in zip(args, self._ins, strict=True)]
        for buffer, value in zip(results, self._run(given), strict=True):
            if buffer is not None and value is not None:
                np.frombuffer(buffer)[:] = np.ravel(value)
        return 0

    def has_jac_sparsity(self, out: int, into: int) -> bool:
        return bool(self._blocks)

    def get_jac_sparsity(self, out: int, into: int, symmetric: bool) -> ca.Sparsity:
        return self._blocks[out * len(self._ins) + into]

    def has_jacobian(self) -> bool:
        return "jacobian" in self._ways

    def get_jacobian(self, name: str, ins: Sequence[str], outs: Sequence[str], options: Any) -> MatrixFunction:
        return self._ways["jacobian"](name)

    def has_reverse(self, count: int) -> bool:
        return "reverse" in self._ways and count == 1

    def get_reverse(
        self, count: int, name: str, ins: Sequence[str], outs: Sequence[str], options: Any
    ) -> MatrixFunction:
        return self._ways["reverse"](name)
