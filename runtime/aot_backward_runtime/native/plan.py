"""A plan with its library: the order of its input tensors, and the indices of outputs and gradients in its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError, WeightsError
from ..format.expressions import evaluate
from ..format.manifest import Plan, TensorSpec
from .captured_graph import PooledOutputs
from .library import Binding, Library
from .memory import Ranges

ROLES = ("forward", "backward", "inference", "gradient", "step", "accumulate")
"""The plans that a variant may have, by their names in :class:`VariantSpec`."""

_Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Runnable:
    """A plan with its library, and its parsed operands."""

    def __init__(self, plan: Plan, libraries: Mapping[str, Library]):
        self.plan = plan
        self.library = libraries[plan.call.library] if plan.call else None
        self.pools_outputs = self.library is not None and self.library.pools_outputs
        self.operands = [parse(o) for o in plan.call.operands] if plan.call else []
        places = ("input", "saved", "cotangent")
        self._roles: list[tuple[Any, Any]] = [
            (places.index(k) if k in places else None, where) for k, where in self.operands
        ]
        self._sizes = any(role is None for role, _ in self._roles)  # a size is passed as the size of an empty tensor
        self.outputs = [parse(o) for o in plan.outputs]
        self.results = [i for kind, i in self.outputs if kind == "result"]
        self.saved = [parse(s) for s in plan.saved]
        self.saved_inputs = [i for i, (kind, _) in enumerate(self.saved) if kind == "input"]
        self.gradients = {g.of: parse(g.source)[1] for g in plan.gradients if g.source}
        self.consumes = plan.consumes
        self.watched: list[tuple[str, Any]] = []
        self.kept_results: list[int] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self._names: Mapping[str, int] = {}
        self._written: tuple[Any, Ranges] = (None, Ranges(()))

    def written(self, binding: Binding, current: Sequence[torch.Tensor]) -> Ranges:
        """Return the memory that the call writes. ``current``: the entry's state, bound by ``binding``. Raise
        :class:`WeightsError` if another of its tensors overlaps that memory: the code was compiled for tensors that
        share no memory."""
        if self._written[0] is not binding[1]:
            changed = {id(current[i]) for i in self.writes}
            places = {id(current[i]): (name, current[i]) for name, i in self._names.items()}
            ranges = Ranges(item for key, item in places.items() if key in changed)
            pair = ranges.overlap()
            for key, (name, tensor) in places.items():
                if pair is None and key not in changed and (other := ranges.reached_by(tensor)):
                    pair = other, name
            if pair is not None:
                raise WeightsError(
                    f"{pair[0]}, which the call updates in place, and {pair[1]} share memory, and did not when they were exported: clone one"
                )
            self._written = (binding[1], ranges)
        return self._written[1]

    def refuse_overlap(self, written: Ranges, inputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Raise :class:`InputError` if an input overlaps memory that the call writes."""
        for tensor, spec in zip(inputs, specs, strict=True):
            if name := written.reached_by(tensor):
                raise InputError(
                    f"{spec.name} shares memory with {name}, which the call updates in place: pass a copy ({spec.name}.clone())"
                )

    def increment_versions(self, current: Sequence[torch.Tensor]) -> None:
        """Increment the versions of buffers that native code writes, so that autograd notices if a saved one was
        overwritten. Call this before the code runs, because an interrupt may come right after it. ``current``: the
        entry's state."""
        if self.writes:
            torch.autograd.graph.increment_version([current[i] for i in self.writes])

    def reached(self, grad_outputs: Sequence[torch.Tensor | None]) -> dict[str, int]:
        """Return the :attr:`gradients` that a defined incoming gradient reaches; the others are None in eager."""
        # Not ``None in grad_outputs``: it compares each tensor with a torch operator, which takes 26 µs
        if all(t is not None for t in grad_outputs):
            return self.gradients
        defined = {i for i, t in enumerate(grad_outputs) if t is not None}
        return {
            g.of: self.gradients[g.of] for g in self.plan.gradients if g.source and not defined.isdisjoint(g.cotangents)
        }

    def unconsumed(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``saved`` with copies of the tensors that the call overwrites."""
        return [t.clone() if i in self.consumes else t for i, t in enumerate(saved)]

    def index_state(self, index: Mapping[str, int]) -> None:
        """Turn names of parameters and buffers into indices in the entry's state."""
        self.watched = [
            (kind, index[where] if kind == "parameter" else where) for kind, where in map(parse, self.plan.watched)
        ]
        self.kept_results = [where for kind, where in (*self.saved, *self.watched) if kind == "result"]
        self.reads = [index[n] for n in self.plan.reads]
        self.writes = [index[n] for n in self.plan.writes]
        self._names = index

    def call(
        self,
        binding: Binding,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        saved: Sequence[torch.Tensor] = (),
        cotangents: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Return the results of the library. Every tensor must have been checked."""
        if self.library is None:
            return []
        return self.library.run_bound(binding, self._operands(inputs, sizes, saved, cotangents))

    def bound(
        self, binding: Binding, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> tuple[_Run, list[torch.Tensor]]:
        """Return the function that :meth:`call` would call, and its operands. The library must not be rebound before
        that call."""
        if self.library is None:
            return (lambda _: []), []
        with self.library.lock:
            self.library.bind(binding)
        return self.library.raw_run, self._operands(inputs, sizes, (), ())

    def call_forward(
        self, binding: Binding, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], reader: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], PooledOutputs | None]:
        """Call a forward that may leave its outputs in a memory pool until its backward
        (:meth:`Library.run_forward`)."""
        assert self.library is not None  # only called if :attr:`pools_outputs`
        operands = self._operands(inputs, sizes, (), ())
        with self.library.lock:
            self.library.bind(binding)
            return self.library.run_forward(self.operands, operands, reader, hooked)

    def call_backward(
        self,
        binding: Binding,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        saved: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        pooled: PooledOutputs | None,
    ) -> list[torch.Tensor]:
        """Call the backward of a forward that ran by :meth:`call_forward`."""
        if self.library is None:
            return []
        operands = self._operands(inputs, sizes, saved, cotangents)
        with self.library.lock:
            self.library.bind(binding)
            return self.library.run_backward(operands, pooled)

    def _operands(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        saved: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        sources = inputs, saved, cotangents
        if self._sizes:
            return [
                torch.empty((evaluate(where, sizes), 0)) if role is None else sources[role][where]
                for role, where in self._roles
            ]
        return [sources[role][where] for role, where in self._roles]


def parse(operand: str) -> tuple[str, Any]:
    """Parse ``input:3`` as ("input", 3). For a size or a parameter the rest stays text."""
    kind, _, rest = operand.partition(":")
    return kind, int(rest) if kind in ("input", "saved", "cotangent", "result") else rest
