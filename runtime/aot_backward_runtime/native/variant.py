"""A variant of an entry, ready to match and run: its contracts, and its plans with their libraries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import PackageError
from ..format.expressions import evaluate
from ..format.manifest import VariantSpec
from .guards import Contract, Fast, check_ambient
from .library import Library
from .plan import ROLES, Runnable
from .pytree import arguments, flatten

# Sets of gradient targets that are kept: bounds the memory of a script that freezes parameters at random; a guess
_MAX_TARGET_SETS = 256


class Variant:
    """A variant's contracts, the fast checks of the last accepted incoming gradients, and the plans with their
    libraries."""

    def __init__(self, spec: VariantSpec, libraries: Mapping[str, Library], device: torch.device):
        self.spec, self.device, self._kind = spec, device, device.type  # asking a device for its type costs 50 ns
        self.contract = Contract(spec.inputs, spec.symbols, spec.guards, device)
        self.cotangents = Contract(spec.cotangents, (), (), device)
        self.plans = {role: Runnable(plan, libraries) for role in ROLES if (plan := getattr(spec, role)) is not None}
        self.double = Variant(spec.double, libraries, device) if spec.double is not None else None
        self.called = self.plans.get("inference") or self.plans.get("forward")
        """The plan of a module call without gradients."""
        calls = [plan for role in ("forward", "inference") if (plan := self.plans.get(role))]
        self.plain_result = spec.out_tree.kind == "tensor" and all(plan.outputs == [("result", 0)] for plan in calls)
        """True if a call returns the first result of native code itself."""
        backward = spec.backward
        self.wrt = frozenset(g.of for g in backward.gradients) if backward else frozenset()
        self.covered = self.wrt.union(spec.unreached)
        self.differentiable = frozenset(spec.differentiable)
        self._differentiated: dict[tuple[str, ...], Differentiated] = {}
        forward = self.plans.get("forward")
        outputs = [n for n, (kind, _) in enumerate(forward.outputs) if kind == "result"] if forward else []
        # Places among autograd's incoming gradients
        self.incoming = [outputs.index(i) for i in spec.differentiable if i in outputs]
        self._fast: list[tuple[Fast, Mapping[str, int]]] = []
        positional, keywords = spec.in_tree.children
        plain = [c.index for c in positional.children if c.kind == "tensor"]
        self.flat_arguments = not keywords.children and plain == list(range(len(positional.children)))
        self._names = [
            *spec.argument_names,
            *(f"args[{i}]" for i in range(len(spec.argument_names), len(positional.children))),
        ]

    def differentiated(self, wrt: Sequence[str]) -> Differentiated:
        """Return the state for the gradient targets ``wrt``, named as in the manifest."""
        derivative = self._differentiated.get(tuple(wrt))
        if derivative is None:
            if len(self._differentiated) >= _MAX_TARGET_SETS:  # a script that freezes parameters at random
                self._differentiated.clear()
            derivative = self._differentiated[tuple(wrt)] = Differentiated(self, wrt)
        return derivative

    def share(
        self, runnable: Runnable, results: list[torch.Tensor], sizes: Mapping[str, int], detached: Collection[int] = ()
    ) -> None:
        """Replace results that share memory with another one by views of it. ``detached``: outputs that autograd does
        not track."""
        for shared in self.spec.shared:
            (kind, place), (base_kind, base) = runnable.outputs[shared.output], runnable.outputs[shared.base]
            if kind == base_kind == "result" and place != base:
                spec, tensor = self.spec.outputs[shared.output], results[base]
                if shared.output in detached:
                    tensor = tensor.detach()
                shape, stride = (
                    [evaluate(s, sizes) for s in expressions]
                    for expressions in (spec.shape, shared.stride or spec.stride)
                )
                with torch.enable_grad():  # a view made under no_grad cannot be written in place outside of it
                    try:
                        results[place] = tensor.as_strided(
                            shape, stride, tensor.storage_offset() + evaluate(shared.offset, sizes)
                        )
                    except RuntimeError as error:
                        raise PackageError(
                            f"{spec.name} does not lie within {self.spec.outputs[shared.base].name}, as the package says"
                        ) from error

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the flat tensors of a call. Raise :class:`InputError` with the argument's name if its structure
        differs."""
        spec = self.spec
        args, kwargs = arguments(spec.in_tree, spec.argument_names, args, kwargs)
        out: list[torch.Tensor] = []
        positional, keywords = spec.in_tree.children
        for tree, name, value in zip(positional.children, self._names, args, strict=True):
            flatten(tree, value, out, name)
        for key, tree in zip(keywords.keys, keywords.children, strict=True):
            flatten(tree, kwargs[str(key)], out, str(key))
        return out

    def index_state(self, index: Mapping[str, int]) -> None:
        """Turn names of parameters and buffers into indices in the entry's state."""
        for runnable in self.plans.values():
            runnable.index_state(index)
        if self.double is not None:
            self.double.index_state(index)

    def materialized(
        self, grad_outputs: Sequence[torch.Tensor | None], sizes: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Return the incoming gradients, with zeros for None."""
        if all(t is not None for t in grad_outputs):
            return grad_outputs  # type: ignore[return-value]
        return [
            torch.zeros([evaluate(s, sizes) for s in spec.shape], dtype=dtype, device=self.device) if t is None else t
            for t, spec, dtype in zip(grad_outputs, self.cotangents.specs, self.cotangents.dtypes, strict=True)
        ]

    def fit_cotangents(
        self, grad_outputs: Sequence[torch.Tensor | None], sizes: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Return the incoming gradients with the compiled strides, with zeros for None. A gradient with other strides
        is copied (``y.sum().backward()`` gives stride 0)."""
        for fast, known_sizes in self._fast:
            if known_sizes is sizes and fast.holds(grad_outputs):  # type: ignore[arg-type] # None fails the check
                return grad_outputs  # type: ignore[return-value]
        tensors = self.materialized(grad_outputs, sizes)
        fitting, _, untouched = self.cotangents.fit(tensors, sizes)
        if untouched and tensors:
            self._fast.insert(0, (Fast(tensors), sizes))
            del self._fast[4:]
        return fitting

    def check_ambient(self) -> None:
        check_ambient(self.spec.ambient, self._kind)


class Differentiated:
    """Data shared by all calls of a variant that ask for the gradients ``wrt``."""

    def __init__(self, variant: Variant, wrt: Sequence[str]):
        assert variant.spec.backward is not None
        self.variant, self.double, self.wrt = variant, variant.double, tuple(wrt)
        self.forward, self.backward = variant.plans["forward"], variant.plans["backward"]
        targets, numbers = frozenset(wrt), set[int]()
        for gradient in variant.spec.backward.gradients:
            if gradient.of in targets:
                numbers.update(gradient.cotangents)
        reaching = (
            frozenset(variant.spec.differentiable[n] for n in numbers)
            if len(wrt) < len(variant.wrt)
            else frozenset(variant.differentiable)
        )
        outputs = self.forward.outputs
        self.detached = [n for n in range(len(outputs)) if n not in reaching]
        """The outputs that do not depend on ``wrt``; they do not require grad."""
        self.detached_results = [outputs[n][1] for n in self.detached if outputs[n][0] == "result"]
        self.places: list[int | None] = self._places(self.backward.gradients)
        """Indices of the gradients of ``wrt`` in the backward's results; None: eager gives None."""
        # State that the backward reads, and tensors that share memory with saved ones, are kept only for autograd's
        # version check.
        reads = [*self.backward.reads, *(self.double.plans["forward"].reads if self.double is not None else ())]
        lists = {"result": 0, "input": 1}
        self.kept = [(lists.get(kind, 2), where) for kind, where in (*self.forward.saved, *self.forward.watched)] + [
            (2, i) for i in reads
        ]
        """Tensors saved for the backward: the list (0 results, 1 arguments, 2 state) and the index in it."""

    def reached(self, grad_outputs: Sequence[torch.Tensor | None]) -> list[int | None]:
        """Return :attr:`places`, with None for a gradient that no defined incoming gradient reaches, as in eager."""
        return self._places(self.backward.reached(grad_outputs))

    def _places(self, gradients: Mapping[str, int]) -> list[int | None]:
        return [gradients.get(target) for target in self.wrt]
