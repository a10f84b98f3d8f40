"""Rebuild a shape environment and fake tensors from a package's symbols, guards and tensor specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import SymbolSpec, TensorSpec


@dataclass(frozen=True)
class RestoredShapes:
    """Rebuilt sizes. ``carried``: each symbol of the package as a size of ``mode``'s shape environment; ``names``: the
    environment's symbols -> the package's."""

    mode: Any
    carried: dict[str, Any]
    names: dict[sympy.Symbol, str]

    def fake(self, spec: TensorSpec, device: str) -> torch.Tensor:
        """Return a fake tensor that matches ``spec``, on ``device``."""
        shape, stride = ([evaluate(s, self.carried) for s in sizes] for sizes in (spec.shape, spec.stride))
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=device)


def restored_shapes(symbols: Sequence[SymbolSpec], guards: Sequence[str], hints: Mapping[str, int]) -> RestoredShapes:
    """Rebuild the sizes. ``hints``: the value of each symbol at the example. Raise :class:`PackageError` if they break
    the guards."""
    env = torch_api.ShapeEnv()
    mode = torch_api.FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    carried: dict[str, Any] = {}
    names: dict[sympy.Symbol, str] = {}
    for symbol in symbols:
        hint = hints.get(symbol.name)
        if type(hint) is not int or hint < symbol.minimum or (symbol.maximum is not None and hint > symbol.maximum):
            interval = (
                f"from {symbol.minimum} on" if symbol.maximum is None else f"from {symbol.minimum} to {symbol.maximum}"
            )
            raise PackageError(f"the size {symbol.label}: expected a number {interval}, got {hint!r} in the example")
        source = torch_api.ConstantSource(f"stated_{symbol.name}")
        expression = env.create_symbol(
            hint, source, dynamic_dim=torch_api.DimDynamic.DYNAMIC, do_not_specialize_zero_one=symbol.minimum < 2
        )
        carried[symbol.name] = env.create_symintnode(expression, hint=hint, source=source)
        names[expression] = symbol.name
        env.constrain_symbol_range(expression, compiler_min=symbol.minimum, compiler_max=_most(symbol))
    for guard in guards:
        if not evaluate(guard, carried):  # evaluating it adds it
            raise PackageError(f"the guard {guard} does not hold at the example's own sizes")
    return RestoredShapes(mode, carried, names)


def _most(symbol: SymbolSpec) -> Any:
    return torch_api.int_oo if symbol.maximum is None else symbol.maximum
