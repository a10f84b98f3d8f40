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

_MAX_TARGET_SETS = 256  # sets of tensors whose gradients were asked for together, that are kept


class Variant:
    """A variant's contracts, the fast checks of incoming gradients that were accepted last, and the plans with their libraries."""

    def __init__(self, spec: VariantSpec, libraries: Mapping[str, Library], device: torch.device):
        self.spec, self.device, self._kind = spec, device, device.type  # asking a device for its type costs 50 ns
        self.contract = Contract(spec.inputs, spec.symbols, spec.guards, device)
        self.cotangents = Contract(spec.cotangents, (), (), device)
        self.plans = {role: Runnable(plan, libraries) for role in ROLES if (plan := getattr(spec, role)) is not None}
        self.double = Variant(spec.double, libraries, device) if spec.double is not None else None
        self.called = self.plans.get("inference") or self.plans.get("forward")
        """What a module's call runs where no gradients are asked for."""
        calls = [plan for role in ("forward", "inference") if (plan := self.plans.get(role))]
        self.plain_result = spec.out_tree.kind == "tensor" and all(plan.outputs == [("result", 0)] for plan in calls)
        """Whether a call returns the first result of native code as it is."""
        backward = spec.backward
        self.wrt = frozenset(g.of for g in backward.gradients) if backward else frozenset()
        self.covered = self.wrt.union(spec.unreached)
        self.differentiable = frozenset(spec.differentiable)
        self._differentiated: dict[tuple[str, ...], Differentiated] = {}
        forward = self.plans.get("forward")
        outputs = [n for n, (kind, _) in enumerate(forward.outputs) if kind == "result"] if forward else []
        self.incoming = [outputs.index(i) for i in spec.differentiable if i in outputs]  # places among autograd's incoming gradients
        self._fast: list[tuple[Fast, Mapping[str, int]]] = []
        positional, keywords = spec.in_tree.children
        plain = [c.index for c in positional.children if c.kind == "tensor"]
        self.flat_arguments = not keywords.children and plain == list(range(len(positional.children)))
        self._names = [*spec.argument_names, *(f"args[{i}]" for i in range(len(spec.argument_names), len(positional.children)))]

    def differentiated(self, wrt: Sequence[str]) -> Differentiated:
        """``wrt``: what gradients are asked for, as the manifest names it."""
        found = self._differentiated.get(tuple(wrt))
        if found is None:
            if len(self._differentiated) >= _MAX_TARGET_SETS:  # a script that freezes parameters at random
                self._differentiated.clear()
            found = self._differentiated[tuple(wrt)] = Differentiated(self, wrt)
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
        for fast, known in self._fast:
            if known is sizes and fast.holds(given):  # type: ignore[arg-type] # which a None fails
                return given  # type: ignore[return-value]
        tensors = self.materialized(given, sizes)
        fitting, _, untouched = self.cotangents.fit(tensors, sizes)
        if untouched and tensors:
            self._fast.insert(0, (Fast(tensors), sizes))
            del self._fast[4:]
        return fitting

    def check_ambient(self) -> None:
        check_ambient(self.spec.ambient, self._kind)


class Differentiated:
    """What is the same in all calls of a variant that ask for the same gradients, ``wrt``."""

    def __init__(self, variant: Variant, wrt: Sequence[str]):
        assert variant.spec.backward is not None
        self.variant, self.double, self.wrt = variant, variant.double, tuple(wrt)
        self.forward, self.backward = variant.plans["forward"], variant.plans["backward"]
        asked, numbers = frozenset(wrt), set[int]()
        for gradient in variant.spec.backward.gradients:
            if gradient.of in asked:
                numbers.update(gradient.cotangents)
        reaching = frozenset(variant.spec.differentiable[n] for n in numbers) if len(wrt) < len(variant.wrt) else frozenset(variant.differentiable)
        outputs = self.forward.outputs
        self.detached = [n for n in range(len(outputs)) if n not in reaching]
        """The outputs that depend on none of ``wrt``: they require no gradient."""
        self.detached_results = [outputs[n][1] for n in self.detached if outputs[n][0] == "result"]
        self.places: list[int | None] = self._places(self.backward.gradients)
        """Where the gradients of ``wrt`` are among the backward's results; None: eager gives none."""
        # what the backward reads itself, and what shares memory with what was saved, is kept for autograd's version check only
        reads = [*self.backward.reads, *(self.double.plans["forward"].reads if self.double is not None else ())]
        lists = {"result": 0, "input": 1}
        self.kept = [(lists.get(kind, 2), where) for kind, where in (*self.forward.saved, *self.forward.watched)] + [(2, i) for i in reads]
        """What is saved for the backward: whether it is a result, an argument or of the state (0, 1, 2), and its place there."""

    def reached(self, given: Sequence[torch.Tensor | None]) -> list[int | None]:
        """:attr:`places`, without those that no defined incoming gradient of ``given`` reaches: they are None in eager."""
        return self._places(self.backward.reached(given))

    def _places(self, made: Mapping[str, int]) -> list[int | None]:
        return [made.get(target) for target in self.wrt]
