"""What a loaded function and a loaded gradient function have in common: parameters and buffers, the mode, copies, and
the preparation of a call."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import torch

from ..native.library import Binding
from ..native.memory import Ranges
from ..native.plan import Runnable
from .bound_parameter import BoundParameter, Watch, bound, resizable
from .call_cache import CachedCall
from .dispatch import Entry, MatchedCall
from .pickling import pickled, refuse_shallow_copy, restore


class LoadedCallable:
    """The base of :class:`LoadedFunction` and :class:`LoadedGrad`."""

    training: bool
    _role: str

    def __init__(self, entry: Entry, tensors: dict[str, torch.Tensor], shared: bool = False):
        """``tensors``: the entry's state by weight key. ``shared``: whether other entries hold its memory too."""
        self._entry = entry
        self._watch = Watch()
        by_weight: dict[str, torch.Tensor] = {}
        for spec in entry.spec.state:
            if spec.weight not in by_weight:
                by_weight[spec.weight] = bound(BoundParameter, tensors[spec.weight], spec.requires_grad, self._watch)
        self._held = [by_weight[spec.weight] for spec in entry.spec.state]
        self._named: Mapping[str, torch.Tensor] = MappingProxyType(
            {s.name: by_weight[s.weight] for s in entry.spec.state}
        )
        self._weak = [weakref.ref(t) for t in self._held]
        self.training = entry.spec.training
        self._functional = {v.spec.mode for v in entry.variants} == {""}
        self._last: CachedCall | None = None
        self._binding: Binding | None = None
        self._watched = shared and any(map(resizable, self._held))
        if self._watched:
            self._watch.add(self._held)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry, given at export; {} if there is none."""
        return self._entry.spec.json_metadata

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by name. Write into them in place, or with :meth:`load_state_dict`."""
        self._watch.add(self._held)
        self._watched = True
        return self._named

    def train(self, mode: bool = True) -> Self:
        """Set the mode. A plain function has none.

        Args:
            mode: Whether later calls run the variants of training mode; otherwise they run the variants of evaluation
                mode.

        Returns:
            The function itself.
        """
        self._last, self.training = None, mode
        return self

    def eval(self) -> Self:
        """Call ``train(False)``, and return the function itself."""
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, detached; they share memory with the loaded ones."""
        return {
            s.name: t.detach()
            for s, t in zip(self._entry.spec.state, self.parameters.values(), strict=True)
            if s.persistent
        }

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Copy values into the parameters and buffers, in place.

        Args:
            tensors: Tensors by name.
            strict: Whether names must match exactly.

        Raises:
            WeightsError: A tensor does not fit; all old values stay.
        """
        own = {s.name: self._named[s.name] for s in self._entry.spec.state if s.persistent}
        self._entry.load_state(tensors, own, strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent function on copies of the tensors, without their hooks, as for copies of any
        ``Parameter``."""
        tensors = {s.weight: t.detach().clone() for s, t in zip(self._entry.spec.state, self._held, strict=True)}
        out = type(self)(copy.deepcopy(self._entry, memo), tensors)
        for old, new in zip(self._held, out._held, strict=True):
            new.requires_grad_(old.requires_grad)
            new.grad = None if old.grad is None else old.grad.clone()
        memo[id(self)] = out
        return out.train(self.training)

    def __copy__(self) -> Self:
        return refuse_shallow_copy(self)

    def __reduce__(self) -> Any:
        return (
            self._entry.reopen,
            (),
            {"tensors": pickled(self._entry.spec.state, self._held), "training": self.training},
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self._entry.spec.state, self._held, state["tensors"])
        self.train(state["training"])

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[MatchedCall, Binding, Runnable, Ranges | None]:
        """Return the match, the binding, the code to run, and the memory that it writes."""
        entry = self._entry
        mode = "" if self._functional else "train" if self.training else "eval"
        matched = entry.match(mode, args, kwargs)
        binding = entry.state.refresh([t.detach() for t in self._held])
        if binding is not self._binding:
            self._last = None  # it may use another library than this call, and that one is not bound again here
            self._binding = binding
        runnable = matched.variant.plans[self._role]
        written = runnable.written(binding, self._held) if runnable.writes else None
        if written is not None:
            runnable.refuse_overlap(written, matched.given, matched.variant.spec.inputs)
        return matched, binding, runnable, written
