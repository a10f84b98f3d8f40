"""Trace ``clip_grad_norm_`` or ``clip_grad_value_`` as a graph that writes gradients in place, compare its code with
eager, and time it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import utils

from aot_backward_exporters import sixteen_bits
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import ClippingSpec, Verdict
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.optimizer_steps.compiled_clipping import NORM, CompiledClipping
from aot_backward_runtime.optimizer_steps.compiled_table import CompiledTable, Met

from ...capture import fx_graph
from ...capture.trace_environment import decompositions, tracing
from ...checks.tolerance import Tolerance, compare, norm
from .in_place_graph import in_place_graph, timed
from .observed_clippings import ObservedClipping

_NORM_EPSILON = 1e-6  # eager adds this to the norm (torch/nn/utils/clip_grad.py)


class TracedClipping:
    """``graph`` and ``spec`` of one kind of clipping, called ``name``. Raise :class:`ExportError` if it cannot be
    traced."""

    def __init__(self, name: str, observed: ObservedClipping, mode: Any):
        assert observed.example is not None
        self.words, self._gradients, self._limit = observed.words, *observed.example
        function, norm_type = observed.kind
        self.spec = ClippingSpec(function, norm_type, name, Verdict("not run"))
        with mode:
            gradients = [mode.from_tensor(g) for g in self._gradients]
            numbers = torch.empty(2, dtype=torch.float64, device="cpu")

        def clipped(gradients: list[torch.Tensor], numbers: torch.Tensor) -> list[torch.Tensor]:
            return self._clipped(gradients, numbers)

        try:
            with mode, tracing(), torch.no_grad():
                module = make_fx(clipped, decomposition_table=decompositions())(gradients, numbers)
        except Exception as error:  # for a norm_type that torch does not know
            raise ExportError(
                f"it could not be traced: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        module.graph.set_codegen(torch.fx.CodeGen())  # flat arguments
        sixteen_bits.mark_all_rounded(module)
        *values, result = fx_graph.results_of(module)
        placeholders = list(module.graph.find_nodes(op="placeholder"))[:-1]
        names = [*(f"gradient {i}" for i in range(len(gradients))), "numbers"]
        # Readers of 1.13 and 1.14 compare it
        result_name = f"norm of order {norm_type}" if function == NORM else "nothing, clipped by value"
        self.graph = in_place_graph(name, module, placeholders, values, result, names, result_name, mode)

    def _clipped(self, gradients: Sequence[torch.Tensor], numbers: torch.Tensor) -> list[torch.Tensor]:
        """Return the clipped gradients, and the result, as eager computes them."""
        limit = numbers[0]
        if self.spec.function != NORM:
            low, high = ([sign * limit.to(g.dtype) for g in gradients] for sign in (-1, 1))
            return [
                *(torch.minimum(torch.maximum(g, a), b) for g, a, b in zip(gradients, low, high, strict=True)),
                numbers[1].clone(),
            ]
        total = self._total_norm(gradients)
        coefficient = torch.clamp(limit.to(total.dtype) / (total + _NORM_EPSILON), max=1.0)
        skip_mask = (numbers[1] != 0) & ~torch.isfinite(total)
        coefficient = torch.where(skip_mask, torch.ones_like(coefficient), coefficient)
        return [*((g * coefficient).to(g.dtype) for g in gradients), total.clone()]

    def _total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return eager's total norm. For order 2, skip the root of each gradient's part, which saves a tensor for
        each."""
        if self.spec.norm_type == "2.0" and {g.dtype for g in gradients} in ({torch.float32}, {torch.float64}):
            return functools.reduce(torch.add, (g.square().sum() for g in gradients)).sqrt()
        return utils.get_total_norm(gradients, float(self.spec.norm_type), foreach=False)

    def finished(self, library: Library, tune: str, target: str) -> ClippingSpec:
        """Return the spec with its verdict and times. Raise :class:`ExportError` if ``library`` differs from eager."""
        spec = self._checked(library)
        return spec if tune == "none" else dataclasses.replace(spec, speed=self._speed(library, tune, target))

    def _checked(self, library: Library) -> ClippingSpec:
        """Compare with eager at the recorded limit, at one that changes every gradient, at one that changes none, and
        with a gradient that is Inf."""
        clipping, worst, name = CompiledClipping(self.spec, library), 0.0, ""
        size = norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in self._gradients]))
        tensors = [g for g in self._gradients if g.numel()]
        largest = max((float(g.abs().max()) for g in tensors), default=0.0)
        nonfinite = [g.clone() for g in self._gradients]
        for gradient in [g for g in nonfinite if g.numel()][:1]:
            gradient[(0,) * gradient.dim()] = torch.inf
        for gradients, limit in (
            *(
                (self._gradients, x)
                for x in (self._limit, (size if self.spec.function == NORM else largest) / 4, 2 * size + 1.0)
            ),
            (nonfinite, self._limit),
        ):
            eager, compiled = ([g.clone() for g in gradients] for _ in range(2))
            eager_norm = self._call(_holders(eager), limit)
            result_norm = clipping.bind(compiled).run(compiled, limit, False)
            pairs = [(f"gradient {i}", a, e) for i, (a, e) in enumerate(zip(compiled, eager, strict=True))]
            largest_norm = max(norm(e) for e in eager)
            for label, a, e in [*pairs, *([("the norm", result_norm, eager_norm)] if eager_norm is not None else [])]:
                tolerance = Tolerance.of_result(e.dtype, largest_norm, None)
                same = torch.equal(torch.isfinite(a), torch.isfinite(e)) and torch.equal(a.isnan(), e.isnan())
                ratio = compare(label, a, e, tolerance).ratio if same else float("inf")
                if not ratio <= 1:
                    raise ExportError(
                        f"{label} is wrong: it differs from eager by {ratio:.3g} times the tolerance, with the limit {limit:g}"
                    )
                if ratio >= worst:
                    worst, name = ratio, label
        return dataclasses.replace(self.spec, verdict=Verdict("verified", name, round(worst, 6)))

    def _call(self, holders: Sequence[torch.nn.Parameter], limit: float) -> torch.Tensor | None:
        if self.spec.function == NORM:
            return utils.clip_grad_norm_(holders, limit, float(self.spec.norm_type))
        utils.clip_grad_value_(holders, limit)
        return None

    def _speed(self, library: Library, tune: str, target: str) -> Any:
        holders, compiled = _holders([g.clone() for g in self._gradients]), [g.clone() for g in self._gradients]
        kind = (self.spec.function, self.spec.norm_type)
        table, met = CompiledTable([(kind, CompiledClipping(self.spec, library))]), Met(kind)
        ways = {
            "eager": lambda: self._call(holders, self._limit),
            "compiled": lambda: table.run(met, compiled, self._limit, False),
        }
        return timed(self.spec.library, ways, tune, target)


def _holders(gradients: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return parameters that have these gradients."""
    out = []
    for gradient in gradients:
        out.append(torch.nn.Parameter(torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype)))
        out[-1].grad = gradient
    return out
