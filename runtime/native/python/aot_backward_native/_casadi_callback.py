"""A function of CasADi that calls Python, with the sparsities of its Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import casadi as ca
import numpy as np

_ALIVE: list[Any] = []  # CasADi calls a Callback without owning it, and crashes if Python has freed it


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
