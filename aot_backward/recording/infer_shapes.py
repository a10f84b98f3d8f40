"""Observed passes of one structure -> what is static, what is dynamic, and which sizes are one symbol.

What never changed is static. What changed is dynamic, and dimensions and sizes that had the same values in every pass share a symbol.
A single pass says nothing of what may change, so it stays static; that a batch of 16 meets a layer of 16 ties nothing, because the second
batch size tells them apart. A value of 0 or 1 means something else to a program (nothing there, broadcasting), so passes are first sorted
by where they have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import PassSpec, SymbolSpec

from .. import torch_api
from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from .observation import Looks, Observation


@dataclass
class Shapes:
    """The symbolic tensors and sizes of one program."""

    inputs: list[torch.Tensor]  # fake
    sizes: list[Any]  # int or SymInt
    symbols: dict[sympy.Symbol, SymbolSpec]
    carried: dict[sympy.Symbol, torch.SymInt]

    def spelled(self, shape_env: Any) -> Sizes:
        """Symbols and guards as the package states them, after whatever the trace found out."""
        sizes = Sizes(shape_env)
        specs = []
        for n, symbol in enumerate(self.symbols):  # a symbol keeps its name when another turns out to be a number
            if expression_of(self.carried[symbol]) != symbol:
                continue
            known = self.symbols[symbol]
            sizes.names[symbol] = f"s{n}"
            bounds = shape_env.var_to_range[symbol]
            finite = bounds.upper.is_Integer and int(bounds.upper) < 1 << 62
            maximum = int(bounds.upper) if finite else None
            specs.append(SymbolSpec(f"s{n}", f"s{n}", known.input, known.dim, max(0, int(bounds.lower)), maximum))
        sizes.symbols = tuple(specs)
        return sizes


def groups(observations: Sequence[Observation], known: Sequence[PassSpec]) -> list[list[Observation]]:
    """Observations that become one program each. ``known``: variants that exist; a static one counts as one more observation."""
    positions = observations[0].positions if observations else frozenset()
    earlier = [o for v in known if (o := _observed(v, positions)) is not None]
    out: dict[Any, list[Observation]] = {}
    for observation in (*observations, *earlier):
        out.setdefault(observation.kind(), []).append(observation)
    new = {o.kind() for o in observations}
    return [list(dict.fromkeys(group)) for kind, group in out.items() if kind in new]


def symbolic(group: Sequence[Observation], fake_mode: Any, prefix: str) -> Shapes:
    """The group's tensors with a symbol for each list of values that changed. ``prefix`` makes the symbols' sources unique."""
    shape_env = fake_mode.shape_env
    hint = _clearest(group)
    made: dict[tuple[int, ...], Any] = {}
    symbols: dict[sympy.Symbol, SymbolSpec] = {}
    carried: dict[sympy.Symbol, torch.SymInt] = {}

    def size(values: tuple[int, ...], where: tuple[int, int], position: bool = False) -> Any:
        if len(set(values)) == 1:
            return values[0]
        if values not in made:
            for other in list(made):  # a multiple of another is no symbol of its own; a pass where it is none is refused by its guards
                factor, rest = divmod(values[hint], other[hint]) if other[hint] else (0, 0)
                if not rest and factor > 1 and all(v == factor * o for v, o in zip(values, other, strict=True)):
                    made[values] = made[other] * factor
                    return made[values]
            source = torch_api.ConstantSource(f"{prefix}_{len(made)}")
            symbol = shape_env.create_symbol(values[hint], source, dynamic_dim=torch_api.DimDynamic.DYNAMIC, do_not_specialize_zero_one=position)
            made[values] = shape_env.create_symintnode(symbol, hint=values[hint], source=source)
            symbols[symbol] = SymbolSpec("", "", where[0], where[1], 0, None)
            carried[symbol] = made[values]
        return made[values]

    shapes = []
    for i in range(len(group[0].inputs)):
        rank = len(group[0].inputs[i].shape)
        shapes.append([size(tuple(o.inputs[i].shape[d] for o in group), (i, d)) for d in range(rank)])
    positions = group[0].positions
    order = sorted(range(len(group[0].sizes)), key=lambda k: k in positions)  # a size that equals a position has the narrower symbol
    found = {k: size(tuple(o.sizes[k] for o in group), (-1, k), k in positions) for k in order}
    sizes = [found[k] for k in range(len(found))]
    inputs = []
    with fake_mode:
        for i, shape in enumerate(shapes):
            strides = _strides([o.inputs[i] for o in group], shape)
            looks = group[0].inputs[i]
            inputs.append(torch.empty_strided(shape, strides, dtype=looks.dtype, device=looks.device))
    return Shapes(inputs, sizes, symbols, carried)


def fake_mode() -> Any:
    """A mode with a shape environment of its own, for any number of programs."""
    return torch_api.FakeTensorMode(allow_non_fake_inputs=True, shape_env=torch_api.ShapeEnv())


def _strides(looks: Sequence[Looks], shape: Sequence[Any]) -> list[Any]:
    """Strides that hold in every observation: of a dense layout in the order seen, or numbers that never changed."""
    rank = len(shape)
    out: list[Any] = [1] * rank
    dense: Any = 1
    values = [1] * len(looks)
    for d in sorted(range(rank), key=lambda d: (looks[0].stride[d], -d)):
        seen = [x.stride[d] for x in looks]
        if all(x.shape[d] <= 1 for x in looks):
            out[d] = seen[0] if len(set(seen)) == 1 else dense
            continue
        if seen == values:
            out[d] = dense
        elif len(set(seen)) == 1:
            out[d] = seen[0]
        else:
            raise ExportError(
                f"a tensor's strides {[x.stride for x in looks[:3]]} change with its sizes {[x.shape for x in looks[:3]]} in no way that is known"
            )
        if seen[0]:
            dense = out[d] * shape[d]
            values = [s * x.shape[d] for s, x in zip(seen, looks, strict=True)]
    return out


def _clearest(group: Sequence[Observation]) -> int:
    """The observation whose changing values coincide least with others: the trace decides comparisons by its numbers."""

    def coincidences(i: int) -> tuple[int, int]:
        flat = [[n for t in o.inputs for n in t.shape] + list(o.sizes) for o in group]
        columns = list(zip(*flat, strict=True))
        dynamic = {c for c in columns if len(set(c)) > 1}
        fixed = {c[0] for c in columns if len(set(c)) == 1}
        mine = [c[i] for c in dynamic]
        ends = sum(group[i].sizes[k] in (0, 1) for k in group[0].positions)
        return sum(v in fixed for v in mine) + len(mine) - len(set(mine)) + ends, i

    return min(range(min(len(group), 16)), key=coincidences)


def _observed(variant: PassSpec, positions: frozenset[int]) -> Observation | None:
    """A static variant as the pass it was made of."""
    if variant.symbols:
        return None
    inputs = tuple(
        Looks(getattr(torch, s.dtype), s.device, tuple(map(int, s.shape)), tuple(map(int, s.stride)), s.requires_grad) for s in variant.inputs
    )
    return Observation(inputs, tuple(map(int, variant.sizes)), variant.scalars, variant.ambient, positions=positions)
