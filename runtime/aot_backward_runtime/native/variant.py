"""A variant of an entry, ready to be matched and run: its contracts, and its plans with their libraries."""

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


class Variant:
    """A variant's contracts, the fast checks of incoming gradients that were accepted last, and the plans with their libraries."""

    def __init__(self, spec: VariantSpec, libraries: Mapping[str, Library], device: torch.device):
        self.spec, self.device, self._kind = spec, device, device.type  # asking a device for its type costs 50 ns
        self.contract = Contract(spec.inputs, spec.symbols, spec.guards, device)
        self.cotangents = Contract(spec.cotangents, (), (), device)
        self.plans = {role: Runnable(plan, libraries) for role in ROLES if (plan := getattr(spec, role)) is not None}
        self.double = Variant(spec.double, libraries, device) if spec.double is not None else None
        backward = spec.backward
        self.wrt = frozenset(g.of for g in backward.gradients) if backward else frozenset()
        self.covered = self.wrt.union(spec.unreached)
        self.differentiable = frozenset(spec.differentiable)
        self._reaching: dict[tuple[str, ...], frozenset[int]] = {}
        forward = self.plans.get("forward")
        outputs = [n for n, (kind, _) in enumerate(forward.outputs) if kind == "result"] if forward else []
        self.incoming = [outputs.index(i) for i in spec.differentiable if i in outputs]  # places among autograd's incoming gradients
        self._fast: list[tuple[Fast, Mapping[str, int]]] = []
        positional, keywords = spec.in_tree.children
        plain = [c.index for c in positional.children if c.kind == "tensor"]
        self.flat_arguments = not keywords.children and plain == list(range(len(positional.children)))
        self._names = [*spec.argument_names, *(f"args[{i}]" for i in range(len(spec.argument_names), len(positional.children)))]

    def reaching(self, wrt: Sequence[str]) -> frozenset[int]:
        """The outputs that depend on one of ``wrt``: the others require no gradient."""
        if len(wrt) == len(self.wrt):
            return self.differentiable
        found = self._reaching.get(tuple(wrt))
        if found is None:
            assert self.spec.backward is not None
            asked = frozenset(wrt)
            numbers = {n for g in self.spec.backward.gradients if g.of in asked for n in g.cotangents}
            found = self._reaching[tuple(wrt)] = frozenset(self.spec.differentiable[n] for n in numbers)
        return found

    def share(self, runnable: Runnable, results: list[torch.Tensor], sizes: Mapping[str, int], detached: Collection[int] = ()) -> None:
        """Replaces results that share memory with another one by views of it. ``detached``: outputs that autograd does not track."""
        for shared in self.spec.shared:
            (kind, place), (of, base) = runnable.outputs[shared.output], runnable.outputs[shared.base]
            if kind == of == "result" and place != base:
                spec, whole = self.spec.outputs[shared.output], results[base]
                if shared.output in detached:
                    whole = whole.detach()
                shape, stride = ([evaluate(s, sizes) for s in many] for many in (spec.shape, shared.stride or spec.stride))
                with torch.enable_grad():  # else it could not be written to in place outside of no_grad
                    try:
                        results[place] = whole.as_strided(shape, stride, whole.storage_offset() + evaluate(shared.offset, sizes))
                    except RuntimeError as error:
                        raise PackageError(f"{spec.name} does not lie within {self.spec.outputs[shared.base].name}, as the package says") from error

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The flat tensors of a call; :class:`InputError` names the argument that has another structure."""
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
        """Turns names of parameters and buffers into places in the entry's state."""
        for runnable in self.plans.values():
            runnable.index_state(index)
        if self.double is not None:
            self.double.index_state(index)

    def materialized(self, given: Sequence[torch.Tensor | None], sizes: Mapping[str, int]) -> Sequence[torch.Tensor]:
        """Incoming gradients, zeros where there is none."""
        if all(t is not None for t in given):
            return given  # type: ignore[return-value]
        return [
            torch.zeros([evaluate(s, sizes) for s in spec.shape], dtype=dtype, device=self.device) if t is None else t
            for t, spec, dtype in zip(given, self.cotangents.specs, self.cotangents.dtypes, strict=True)
        ]

    def fit_cotangents(self, given: Sequence[torch.Tensor | None], sizes: Mapping[str, int]) -> Sequence[torch.Tensor]:
        """The incoming gradients with the strides that the code was compiled for: copied where they have others (``y.sum().backward()`` gives
        stride 0), zeros where there is none."""
        tensors = self.materialized(given, sizes)
        for fast, known in self._fast:
            if known is sizes and fast.holds(tensors):
                return tensors
        fitting, _, untouched = self.cotangents.fit(tensors, sizes)
        if untouched and tensors:
            self._fast.insert(0, (Fast(tensors), sizes))
            del self._fast[4:]
        return fitting

    def check_ambient(self) -> None:
        check_ambient(self.spec.ambient, self._kind)
