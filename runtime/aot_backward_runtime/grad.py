"""``load(path).grad()``: a value and its gradients in one native call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from . import torch_api
from .entry import Entry
from .guards import Fast
from .plan import Runnable, Variant
from .tree import unflatten


class BoundParameter(nn.Parameter):
    """A parameter at which native code points. Writing into it is seen by the next call; giving it other memory has it bound anew.

    Only this lets a call skip looking at each parameter's address (55 ns each). The weak reference that the owner holds makes
    ``torch.utils.swap_tensors`` refuse.
    """

    _moved: list[bool]

    @property
    def data(self) -> torch.Tensor:
        return nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]
        self._moved[0] = True

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        self._moved[0] = True
        return super().set_(*args, **kwargs)

    def resize_(self, *args: Any, **kwargs: Any) -> Any:
        self._moved[0] = True
        return super().resize_(*args, **kwargs)


class LoadedGrad:
    """Call it as the exported function or module is called: ``value, grads = f(...)``.

    ``value`` is what the function returned (a 0-d tensor; ``(loss, aux)`` where it was exported with ``has_aux``), detached. ``grads`` is one
    tensor where ``wrt`` named one, else a dict by the names that were asked for; a gradient is None where eager's is.
    ``parameters``: the parameters and buffers by name; write into them in place, or with :meth:`load_state_dict`.
    Raises :class:`InputError` where an argument does not fit.
    """

    def __init__(self, entry: Entry, tensors: dict[str, torch.Tensor]):
        self._entry = entry
        self._moved = [True]
        made: dict[str, torch.Tensor] = {}
        for spec in entry.spec.state:
            if spec.weight not in made:
                made[spec.weight] = self._bound(tensors[spec.weight], spec.requires_grad)
        self._held = [made[spec.weight] for spec in entry.spec.state]
        self.parameters: Mapping[str, torch.Tensor] = MappingProxyType({s.name: made[s.weight] for s in entry.spec.state})
        self._weak = [weakref.ref(t) for t in self._held]
        entry.index_plans({name: i for i, name in enumerate(entry.state.names)})
        self.training = entry.spec.training
        self._functional = {v.spec.mode for v in entry.variants} == {""}
        self._last: _Ready | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        last = self._last
        if last is None or kwargs or self._moved[0] or not last.fits(args):
            return self._look_closely(args, kwargs)
        inputs: Any = args if last.order is None else [args[i] for i in last.order]
        return last.finish(last.native(inputs), args)

    def train(self, mode: bool = True) -> LoadedGrad:
        """Serves calls from the variants exported in training mode (of a module; a plain function has no mode)."""
        self.training, self._last = mode, None
        return self

    def eval(self) -> LoadedGrad:
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name, sharing memory with the loaded ones."""
        return {s.name: self.parameters[s.name].detach() for s in self._entry.spec.state if s.persistent}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Copies values in place. :class:`WeightsError` names a tensor that does not fit; the old values then stay, all of them."""
        own = {s.name: self.parameters[s.name] for s in self._entry.spec.state if s.persistent}
        self._entry.load_state(tensors, own, strict)

    def __repr__(self) -> str:
        return f"LoadedGrad(entry={self._entry.name!r}, wrt={list(self._entry.spec.names)})"

    def _bound(self, tensor: torch.Tensor, requires_grad: bool) -> BoundParameter:
        made = torch_api.make_subclass(BoundParameter, tensor, requires_grad)
        made._moved = self._moved
        return made

    def _look_closely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        entry = self._entry
        mode = "" if self._functional else "train" if self.training else "eval"
        admitted = entry.admit(mode, args, kwargs)
        binding = entry.state.refresh([t.detach() for t in self._held])
        runnable = admitted.variant.plans["gradient"]
        with torch.no_grad():
            results = runnable.call(binding, admitted.flat, admitted.sizes)
        self._moved[0] = False
        ready = _Ready(entry, admitted.variant, runnable, admitted.sizes, self._held)
        if admitted.variant.flat_arguments and not kwargs and all(a is b for a, b in zip(admitted.flat, args, strict=True)):
            ready.remember(args)
            self._last = ready
        return ready.finish(results, admitted.given)


class _Ready:
    """What is left to do when the same kind of call comes again."""

    def __init__(self, entry: Entry, variant: Variant, runnable: Runnable, sizes: Mapping[str, int], held: list[torch.Tensor]):
        self.variant, self.runnable, self.sizes, self.held, self.types = variant, runnable, sizes, held, entry.types
        spec = entry.spec
        self.index = {name: i for i, name in enumerate(entry.state.names)}
        self.names, self.single = spec.names, spec.single
        self.gradients = [runnable.gradients.get(t) for t in spec.wrt]
        self.plain = variant.spec.out_tree.kind == "tensor" and runnable.outputs == [("result", 0)]
        where = [i for _, i in runnable.operands]
        self.only_inputs = all(kind == "input" for kind, _ in runnable.operands)
        self.order = None if where == list(range(len(variant.spec.inputs))) else where
        self.writes = [held[i] for i in runnable.writes]
        self.count = len(variant.spec.inputs)
        self.ready = False

    def remember(self, args: Sequence[torch.Tensor]) -> None:
        """From now on calls like ``args`` need only the check in C. The library is bound already."""
        if self.only_inputs and self.runnable.library is not None:
            fast = Fast(args)
            self.check, self.memory, self.native = fast.check, fast.memory, self.runnable.library.raw_run
            self.ready = True

    def fits(self, args: Sequence[torch.Tensor]) -> bool:
        if not self.ready or len(args) != self.count or not self.check(*args) or not self.memory(args):
            return False
        self.variant.check_ambient()
        return True

    def finish(self, results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        if self.writes:
            torch.autograd.graph.increment_version(self.writes)
        if self.plain:
            value: Any = results[0]
        else:
            flat = [results[w] if k == "result" else given[w] if k == "input" else self.held[self.index[w]] for k, w in self.runnable.outputs]
            value = unflatten(self.variant.spec.out_tree, flat, self.sizes, self.types)
        if self.single:
            i = self.gradients[0]
            return value, None if i is None else results[i]
        return value, {n: None if i is None else results[i] for n, i in zip(self.names, self.gradients, strict=True)}
