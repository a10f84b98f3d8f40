"""Make the example that a variant is checked on, at its own sizes and at other ones if sizes are dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import InputError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import SymbolSpec, TensorSpec, VariantSpec
from aot_backward_runtime.native.guards import Contract, dtype_of

SEED = 20
"""Seed of the random numbers that a program draws while it is checked, and that the checks draw. docs/format.md
(section 2) fixes it: sketches depend on it."""


@dataclass(frozen=True)
class Example:
    """One call: arguments (real tensors, leaves), and the module's mode ("" for a function)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: str

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [v for v in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(v, torch.Tensor)]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Example:
        rest = iter(tensors)
        args, kwargs = pytree.tree_map(
            lambda v: next(rest) if isinstance(v, torch.Tensor) else v, (self.args, self.kwargs)
        )
        return Example(args, kwargs, self.mode)


@dataclass(frozen=True)
class Sized:
    """An example at certain sizes: ``values`` of the variant's symbols, and a label ("batch=4", or "" if no size is
    dynamic)."""

    example: Example
    values: Mapping[str, int]
    label: str


def sizes_to_check(spec: VariantSpec, example: Example, zero: SymbolSpec | None = None) -> Iterator[Sized]:
    """Yield the example, then, if sizes are dynamic, others: all larger, all the smallest allowed but 0, and each 1 by
    itself. With ``zero``: only the example with that size at 0, and with it the sizes that must be equal to it; nothing
    if ``spec`` excludes that.

    Raise :class:`InputError` if a tensor of size 0 would have to be enlarged."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)
    if zero is not None:
        open_ended = {s.name: 0 for s in spec.symbols if s.minimum == 0}
        alone, together = {**first, zero.name: 0}, {**first, **open_ended}
        if values := next((v for v in (alone, together) if _allowed(contract, spec.symbols, v)), None):
            yield Sized(resized(spec, example, values), values, _label(spec, values))
        return
    yield Sized(example, first, _label(spec, first))
    if not spec.symbols:
        return
    assignments = [first]
    for values in (
        _discriminating_sizes(contract, spec.symbols, first),
        _smallest_sizes(contract, spec.symbols),
        # A trace assumes that no size is 1 (process_state.sizes_of_one_open)
        *({**first, s.name: 1} for s in spec.symbols),
    ):
        if values is not None and values not in assignments and _allowed(contract, spec.symbols, values):
            assignments.append(values)
            yield Sized(resized(spec, example, values), values, _label(spec, values))


def sizes_to_time(spec: VariantSpec, example: Example) -> Iterator[Sized]:
    """Yield the example; if sizes are dynamic, yield it also with all of them four times as large, or as large as
    allowed."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)
    yield Sized(example, first, _label(spec, first))
    for factor in (4, 2):
        values = {
            s.name: factor * first[s.name] if s.maximum is None else min(factor * first[s.name], s.maximum)
            for s in spec.symbols
        }
        if values != first and _allowed(contract, spec.symbols, values):
            yield Sized(resized(spec, example, values), values, _label(spec, values))
            return


def cotangents_at(spec: VariantSpec, values: Mapping[str, int]) -> list[torch.Tensor]:
    """Return incoming gradients of these sizes, the same ones each time."""
    generator = torch.Generator().manual_seed(SEED)
    out = []
    for c in spec.cotangents:
        dtype = dtype_of(c.dtype)
        sample = torch.randn(
            [evaluate(s, values) for s in c.shape],
            generator=generator,
            dtype=torch.complex64 if dtype.is_complex else torch.float32,
        )
        out.append(sample.to(dtype).to(c.device))
    return out


def _label(spec: VariantSpec, values: Mapping[str, int]) -> str:
    return ", ".join(f"{s.label}={values[s.name]}" for s in spec.symbols)


def _discriminating_sizes(
    contract: Contract, symbols: Sequence[SymbolSpec], first: Mapping[str, int]
) -> dict[str, int] | None:
    """Change every size by a different amount, so that two swapped sizes show."""
    for factor in (1, 2, 3, 4, 6, 8, -1):
        values = {
            s.name: first[s.name] + factor * (i + 1) if factor != 8 else first[s.name] * 2
            for i, s in enumerate(symbols)
        }
        if _allowed(contract, symbols, values):
            return values
    return None


def _smallest_sizes(contract: Contract, symbols: Sequence[SymbolSpec]) -> dict[str, int] | None:
    values = {s.name: max(1, s.minimum) for s in symbols}
    return values if _allowed(contract, symbols, values) else None


def _allowed(contract: Contract, symbols: Sequence[SymbolSpec], values: Mapping[str, int]) -> bool:
    inside = all(s.minimum <= values[s.name] and (s.maximum is None or values[s.name] <= s.maximum) for s in symbols)
    return inside and all(evaluate(g, values) for g in contract.guards)


def resized(spec: VariantSpec, example: Example, values: Mapping[str, int]) -> Example:
    """Return the example at these sizes. Raise :class:`InputError` if a tensor of size 0 would have to be enlarged."""
    return example.with_tensors([_resize(t, s, values) for t, s in zip(example.tensors, spec.inputs, strict=True)])


def _resize(tensor: torch.Tensor, spec: TensorSpec, values: Mapping[str, int]) -> torch.Tensor:
    out = resized_to(tensor, [evaluate(size, values) for size in spec.shape])
    if out.is_complex() or out.is_floating_point():
        strides = [evaluate(s, values) for s in spec.stride]
        out = torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)
    return out.requires_grad_(tensor.requires_grad)


def resized_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Resize ``tensor`` by repeating or dropping rows along each dimension, so that the program accepts the values."""
    out = tensor.detach()
    for d, size in enumerate(shape):
        if out.shape[d] != size:
            if out.shape[d] == 0:
                raise InputError("an example of size 0 cannot be enlarged")
            out = out.index_select(d, torch.arange(size, device=out.device) % out.shape[d])
            if out.is_floating_point():
                out = out + 0.01 * torch.randn_like(out)  # repeated rows would hide a mixed-up batch
    return out
