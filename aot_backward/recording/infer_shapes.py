"""Infer symbolic shapes from observed passes of one structure: which sizes are static, which are dynamic, and which
share a symbol.

A size that never changed is static. A size that changed is dynamic, and dimensions and sizes with the same values in
every pass share a symbol. A single pass does not show which sizes may change, so it stays static. A batch of 16 and a
layer of 16 are told apart once a second batch size was observed. Sizes of 0 and 1 change the behaviour of a program
(empty tensors, broadcasting), so passes are first grouped by the places of such sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import PassSpec, SymbolSpec

from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from .observation import Observation, TensorMetadata


@dataclass
class Shapes:
    """The symbolic tensors and sizes of one program."""

    inputs: list[torch.Tensor]  # fake
    sizes: list[Any]  # int or SymInt
    symbols: dict[sympy.Symbol, SymbolSpec]
    symints: dict[sympy.Symbol, torch.SymInt]

    def package_sizes(self, shape_env: Any) -> Sizes:
        """Return symbols and guards as the package states them, including additions of the trace and the compiler to
        ``shape_env`` so far."""
        sizes = Sizes(shape_env)
        specs = []
        for n, symbol in enumerate(self.symbols):  # a symbol keeps its name when another is specialized to a number
            if expression_of(self.symints[symbol]) != symbol:
                continue
            spec = self.symbols[symbol]
            sizes.names[symbol] = f"s{n}"
            bounds = shape_env.var_to_range[symbol]
            finite = bounds.upper.is_Integer and int(bounds.upper) < 1 << 62
            maximum = int(bounds.upper) if finite else None
            specs.append(SymbolSpec(f"s{n}", f"s{n}", spec.input, spec.dim, max(0, int(bounds.lower)), maximum))
        sizes.symbols = tuple(specs)
        return sizes


def group_observations(observations: Sequence[Observation], variants: Sequence[PassSpec]) -> list[list[Observation]]:
    """Group observations; each group becomes one program. ``variants``: existing ones; a static one counts as one more
    observation."""
    positions = observations[0].positions if observations else frozenset()
    static_passes = [o for v in variants if (o := _observation_of(v, positions)) is not None]
    out: dict[Any, list[Observation]] = {}
    for observation in (*observations, *static_passes):
        out.setdefault(observation.kind(), []).append(observation)
    new = {o.kind() for o in observations}
    return [list(dict.fromkeys(group)) for kind, group in out.items() if kind in new]


def make_symbolic(group: Sequence[Observation], fake_mode: Any, prefix: str) -> Shapes:
    """Return the group's tensors with a symbol for each list of values that changed. ``prefix`` makes the symbols'
    sources unique."""
    shape_env = fake_mode.shape_env
    hint = _most_distinct(group)
    by_values: dict[tuple[int, ...], Any] = {}
    symbols: dict[sympy.Symbol, SymbolSpec] = {}
    symints: dict[sympy.Symbol, torch.SymInt] = {}

    def size(values: tuple[int, ...], place: tuple[int, int], position: bool = False) -> Any:
        if len(set(values)) == 1:
            return values[0]
        if values not in by_values:
            # A multiple of another symbol is expressed by it; guards refuse a pass in which it is not a multiple
            for other in list(by_values):
                factor, rest = divmod(values[hint], other[hint]) if other[hint] else (0, 0)
                if not rest and factor > 1 and all(v == factor * o for v, o in zip(values, other, strict=True)):
                    by_values[values] = by_values[other] * factor
                    return by_values[values]
            source = torch_api.ConstantSource(f"{prefix}_{len(by_values)}")
            symbol = shape_env.create_symbol(
                values[hint], source, dynamic_dim=torch_api.DimDynamic.DYNAMIC, do_not_specialize_zero_one=position
            )
            by_values[values] = shape_env.create_symintnode(symbol, hint=values[hint], source=source)
            symbols[symbol] = SymbolSpec("", "", place[0], place[1], 0, None)
            symints[symbol] = by_values[values]
        return by_values[values]

    shapes = []
    for i in range(len(group[0].inputs)):
        rank = len(group[0].inputs[i].shape)
        shapes.append([size(tuple(o.inputs[i].shape[d] for o in group), (i, d)) for d in range(rank)])
    positions = group[0].positions
    # Sizes before positions: if both have the same values, the symbol is the size's, with its narrower range
    order = sorted(range(len(group[0].sizes)), key=lambda k: k in positions)
    by_index = {k: size(tuple(o.sizes[k] for o in group), (-1, k), k in positions) for k in order}
    sizes = [by_index[k] for k in range(len(by_index))]
    inputs = []
    with fake_mode:
        for i, shape in enumerate(shapes):
            strides = _strides([o.inputs[i] for o in group], shape)
            tensor = group[0].inputs[i]
            inputs.append(torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device))
    return Shapes(inputs, sizes, symbols, symints)


def fake_mode() -> Any:
    """Return a mode with a new shape environment, in which any number of programs may be traced."""
    return torch_api.FakeTensorMode(allow_non_fake_inputs=True, shape_env=torch_api.ShapeEnv())


def _strides(tensors: Sequence[TensorMetadata], shape: Sequence[Any]) -> list[Any]:
    """Return strides that hold in every observation: dense ones in the observed order of dimensions, or numbers that
    never changed."""
    rank = len(shape)
    out: list[Any] = [1] * rank
    dense: Any = 1
    values = [1] * len(tensors)
    for d in sorted(range(rank), key=lambda d: (tensors[0].stride[d], -d)):
        strides = [x.stride[d] for x in tensors]
        if all(x.shape[d] <= 1 for x in tensors):
            out[d] = strides[0] if len(set(strides)) == 1 else dense
            continue
        if strides == values:
            out[d] = dense
        elif len(set(strides)) == 1:
            out[d] = strides[0]
        else:
            raise ExportError(
                f"a tensor has the strides {[x.stride for x in tensors[:3]]} at the sizes {[x.shape for x in tensors[:3]]}, which is not supported"
            )
        if strides[0]:
            dense = out[d] * shape[d]
            values = [s * x.shape[d] for s, x in zip(strides, tensors, strict=True)]
    return out


def _most_distinct(group: Sequence[Observation]) -> int:
    """Return the index of the observation with the fewest coincidences among its changing values. Its sizes become the
    hints that decide comparisons."""

    def coincidences(i: int) -> tuple[int, int]:
        flat = [[n for t in o.inputs for n in t.shape] + list(o.sizes) for o in group]
        columns = list(zip(*flat, strict=True))
        dynamic = {c for c in columns if len(set(c)) > 1}
        fixed = {c[0] for c in columns if len(set(c)) == 1}
        sizes = [c[i] for c in dynamic]
        ends = sum(group[i].sizes[k] in (0, 1) for k in group[0].positions)
        return sum(v in fixed for v in sizes) + len(sizes) - len(set(sizes)) + ends, i

    return min(range(min(len(group), 16)), key=coincidences)


def _observation_of(variant: PassSpec, positions: frozenset[int]) -> Observation | None:
    """Return the pass that a static variant was made from; None for a dynamic variant."""
    if variant.symbols:
        return None
    inputs = tuple(
        TensorMetadata(
            getattr(torch, s.dtype), s.device, tuple(map(int, s.shape)), tuple(map(int, s.stride)), s.requires_grad
        )
        for s in variant.inputs
    )
    return Observation(inputs, tuple(map(int, variant.sizes)), variant.scalars, variant.ambient, positions=positions)
