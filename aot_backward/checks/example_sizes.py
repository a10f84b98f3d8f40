"""The example that a variant is checked on, at its own sizes and, where sizes are dynamic, at others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import InputError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import SymbolSpec, TensorSpec, VariantSpec
from aot_backward_runtime.native.guards import Contract, dtype_of

from ..capture import preserve

SEED = 20
"""Of the random numbers that a program draws while it is checked, and of those that the checks draw."""


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
        args, kwargs = pytree.tree_map(lambda v: next(rest) if isinstance(v, torch.Tensor) else v, (self.args, self.kwargs))
        return Example(args, kwargs, self.mode)


@dataclass(frozen=True)
class Sized:
    """An example at certain sizes: ``values`` of the variant's symbols, and the same in words ("batch=4", "" where nothing is dynamic)."""

    example: Example
    values: Mapping[str, int]
    label: str


def sizes_to_check(spec: VariantSpec, example: Example) -> Iterator[Sized]:
    """The example as it is, then, where sizes are dynamic, at others: all larger, and the smallest allowed. :class:`InputError` where a tensor of
    size 0 would have to be enlarged."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)
    yield Sized(example, first, _label(spec, first))
    if not spec.symbols:
        return
    for choose in (_discriminating_sizes, _smallest_sizes):
        values = choose(contract, spec.symbols, first)
        if values is not None and values != first:
            yield Sized(_resized(spec, example, values), values, _label(spec, values))


def sizes_to_time(spec: VariantSpec, example: Example) -> Iterator[Sized]:
    """The example as it is, then, where sizes are dynamic, with all of them four times as large, or as large as they may be."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(example.tensors)
    yield Sized(example, first, _label(spec, first))
    for factor in (4, 2):
        values = {s.name: factor * first[s.name] if s.maximum is None else min(factor * first[s.name], s.maximum) for s in spec.symbols}
        if values != first and _allowed(contract, spec.symbols, values):
            yield Sized(_resized(spec, example, values), values, _label(spec, values))
            return


def exclude_refused_empty_sizes(spec: VariantSpec, program: nn.Module, example: Example) -> VariantSpec:
    """``spec`` with each size that may be 0, and at which eager refuses the program, from 1: compiled code would read what is not there (``x[0]``).
    Sizes that must be equal are 0 together."""
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    open_ended = [s.name for s in spec.symbols if s.minimum == 0 and s.offset == 0]
    refused: set[str] = set()
    for names in ([[n] for n in open_ended] + [open_ended]) if open_ended else []:
        values = {**contract.solve(example.tensors), **dict.fromkeys(names, 0)}
        if not refused.isdisjoint(names) or not _allowed(contract, spec.symbols, values):
            continue
        empty = _resized(spec, example, values)
        with preserve.in_mode(program, example.mode), preserve.slots_kept(program), preserve.values_kept(program.buffers()), torch.no_grad():
            try:
                program(*empty.args, **empty.kwargs)
            except Exception:  # eager's own refusal, whatever it is
                refused.update(names)
    return dataclasses.replace(spec, symbols=tuple(dataclasses.replace(s, minimum=1) if s.name in refused else s for s in spec.symbols))


def cotangents_at(spec: VariantSpec, values: Mapping[str, int]) -> list[torch.Tensor]:
    """Incoming gradients of those sizes, the same ones each time."""
    generator = torch.Generator().manual_seed(SEED)
    out = []
    for c in spec.cotangents:
        dtype = dtype_of(c.dtype)
        drawn = torch.randn([evaluate(s, values) for s in c.shape], generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
        out.append(drawn.to(dtype).to(c.device))
    return out


def _label(spec: VariantSpec, values: Mapping[str, int]) -> str:
    return ", ".join(f"{s.label}={values[s.name]}" for s in spec.symbols)


def _discriminating_sizes(contract: Contract, symbols: Sequence[SymbolSpec], first: Mapping[str, int]) -> dict[str, int] | None:
    """Every size changed, each by another amount, so that two that were mixed up show."""
    for factor in (1, 2, 3, 4, 6, 8, -1):
        values = {s.name: first[s.name] + factor * (i + 1) if factor != 8 else first[s.name] * 2 for i, s in enumerate(symbols)}
        if _allowed(contract, symbols, values):
            return values
    return None


def _smallest_sizes(contract: Contract, symbols: Sequence[SymbolSpec], first: Mapping[str, int]) -> dict[str, int] | None:
    values = {s.name: max(1, s.minimum) for s in symbols}
    return values if _allowed(contract, symbols, values) else None


def _allowed(contract: Contract, symbols: Sequence[SymbolSpec], values: Mapping[str, int]) -> bool:
    inside = all(s.minimum <= values[s.name] and (s.maximum is None or values[s.name] <= s.maximum) for s in symbols)
    return inside and all(evaluate(g, values) for g in contract.guards)


def _resized(spec: VariantSpec, example: Example, values: Mapping[str, int]) -> Example:
    return example.with_tensors([_resize(t, s, values) for t, s in zip(example.tensors, spec.inputs, strict=True)])


def _resize(tensor: torch.Tensor, spec: TensorSpec, values: Mapping[str, int]) -> torch.Tensor:
    """``tensor`` with its rows taken again or left out along each dynamic dimension: values stay such as the program expects."""
    out = tensor.detach()
    for d, size in enumerate(spec.shape):
        wanted = evaluate(size, values)
        if out.shape[d] != wanted:
            if out.shape[d] == 0:
                raise InputError(f"{spec.name}: an example of size 0 cannot be enlarged")
            out = out.index_select(d, torch.arange(wanted, device=out.device) % out.shape[d])
            if out.is_floating_point():
                out = out + 0.01 * torch.randn_like(out)  # repeated rows would hide a mixed-up batch
    if out.is_complex() or out.is_floating_point():
        strides = [evaluate(s, values) for s in spec.stride]
        out = torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)
    return out.requires_grad_(tensor.requires_grad)
