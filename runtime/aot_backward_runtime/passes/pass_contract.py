"""Guards on the tensors and sizes of a pass, for the code that was compiled for a recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..format.expressions import evaluate
from ..format.manifest import PassSpec, SymbolSpec, TensorSpec
from ..native.guards import Contract, check_kind, with_strides
from ..tapes.tape import Slot, Tape


@dataclass(frozen=True)
class Operands:
    """The engine's operands for one pass. ``inputs``: the tape's inputs, in its order."""

    inputs: list[torch.Tensor]
    sizes: list[int]
    scalars: list[int | float]
    hooks: tuple[Any, ...]
    packed: tuple[Any, ...]


class PassContract(Contract):
    """Guards on the tensors and sizes of a pass. Strides must equal the recorded ones, because gradients inherit
    them."""

    def __init__(self, spec: PassSpec, device: torch.device | None = None, tape: Tape | None = None):
        """``tape``: used in error messages."""
        super().__init__(spec.inputs, spec.symbols, spec.guards, device)
        self.spec, self.tape = spec, tape
        self._sizes: Sequence[int] = ()

    def fit_pass(self, operands: Operands) -> tuple[Sequence[torch.Tensor], dict[str, int], bool]:
        """Return the tensors, the symbols' values, and whether no tensor was copied. Raise :class:`InputError` if
        something does not fit."""
        spec = self.spec
        if (
            len(operands.inputs) != len(spec.inputs)
            or len(operands.sizes) != len(spec.sizes)
            or len(operands.scalars) != len(spec.scalars)
        ):
            raise InputError("the pass has another number of tensors or sizes than the recorded one")
        for tensor, expected, dtype in zip(operands.inputs, self.specs, self.dtypes, strict=True):
            check_kind(tensor, expected, dtype, self.device)
        self._sizes = operands.sizes
        values = self.solve(operands.inputs)
        for i, (size, expected_size) in enumerate(zip(operands.sizes, spec.sizes, strict=True)):
            if size != evaluate(expected_size, values):
                raise InputError(f"{self._size_words(i)} is {size}; expected {self.words(str(expected_size))}")
        for i, (scalar, expected_scalar) in enumerate(zip(operands.scalars, spec.scalars, strict=True)):
            if repr(scalar) != repr(expected_scalar):
                raise InputError(f"scalar {i} of the pass is {scalar}; expected {expected_scalar}")
        fitting, untouched = [], True
        for tensor, expected in zip(operands.inputs, self.specs, strict=True):
            expected_strides = tuple(evaluate(s, values) for s in expected.stride)
            if any(n > 1 and s != w for n, s, w in zip(tensor.shape, tensor.stride(), expected_strides, strict=True)):
                raise InputError(f"{expected.name} has strides {tensor.stride()}; expected {expected_strides}")
            fitting.append(with_strides(tensor, expected, values, self.device))
            untouched = untouched and fitting[-1] is tensor
        return fitting, values, untouched

    def symbol_values(self, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, int]:
        """Return the symbols' values in a pass of these shapes and sizes, unchecked."""
        return {s.name: sizes[s.dim] if s.input < 0 else shapes[s.input][s.dim] for s in self.symbols}

    def _size(self, symbol: SymbolSpec, tensors: Sequence[torch.Tensor]) -> int:
        return self._sizes[symbol.dim] if symbol.input < 0 else super()._size(symbol, tensors)

    def _place(self, symbol: SymbolSpec) -> str:
        return self._size_words(symbol.dim) if symbol.input < 0 else super()._place(symbol)

    def _size_words(self, number: int) -> str:
        return f"size {number} of the pass" + (f" (of {self.tape.user_of(Slot('size', number))})" if self.tape else "")


def why_unsupported(tensor: torch.Tensor) -> str:
    """Return why compiled passes do not support ``tensor``, such as "a sparse tensor (torch.sparse_coo)", or ""."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of torch.Tensor"
    return "" if tensor.layout is torch.strided else f"a sparse tensor ({tensor.layout})"


def check_value(value: Any, spec: TensorSpec, values: Mapping[str, int], device: torch.device) -> torch.Tensor:
    """Return ``value``, the result of an earlier step, fit for native code. Raise :class:`InputError` if it differs
    from the recorded one."""
    if value is None:
        raise InputError(f"{spec.name} is undefined; a tensor was recorded")
    check_kind(value, spec, device=device)
    shape = tuple(evaluate(s, values) for s in spec.shape)
    if value.shape != shape:
        raise InputError(f"{spec.name} has shape {tuple(value.shape)}; expected {shape}")
    return with_strides(value, spec, values, device)
