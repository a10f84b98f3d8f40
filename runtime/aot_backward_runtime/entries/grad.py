"""``load(path).grad()``: a value and its gradients in one native call."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..errors import AotBackwardError, ExecutionError
from ..native.library import Binding
from ..native.memory import Ranges
from ..native.plan import Runnable
from .bound_parameter import BoundParameter, Watch, apply_hooks, bound, has_hooks, resizable
from .call_cache import CachedCall
from .dispatch import Entry, MatchedCall


class LoadedGrad:
    """A compiled function that returns a value and its gradients.

    Attributes:
        training: Whether calls run the variants of training mode.

    Examples:
        >>> energy = load("energy.pt2").grad()
        >>> value, gradient = energy(torch.randn(4, 3))
        >>> value.shape, gradient.shape
        (torch.Size([]), torch.Size([4, 3]))
    """

    def __init__(self, entry: Entry, tensors: dict[str, torch.Tensor], shared: bool = False):
        """``tensors``: the entry's state by weight key. ``shared``: whether other entries hold its memory too."""
        self._entry = entry
        self._watch = Watch()
        by_weight: dict[str, torch.Tensor] = {}
        for spec in entry.spec.state:
            if spec.weight not in by_weight:
                by_weight[spec.weight] = bound(BoundParameter, tensors[spec.weight], spec.requires_grad, self._watch)
        self._held = [by_weight[spec.weight] for spec in entry.spec.state]
        self._named: Mapping[str, torch.Tensor] = MappingProxyType({s.name: by_weight[s.weight] for s in entry.spec.state})
        self._weak = [weakref.ref(t) for t in self._held]
        self.training = entry.spec.training
        self._functional = {v.spec.mode for v in entry.variants} == {""}
        self._last: _GradCall | None = None
        self._binding: Binding | None = None
        self._watched = shared and any(map(resizable, self._held))
        if self._watched:
            self._watch.add(self._held)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by name. Write into them in place, or with :meth:`load_state_dict`."""
        self._watch.add(self._held)
        self._watched = True
        return self._named

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the value and the gradients.

        Hooks on the parameters and the arguments receive their gradients, as by ``torch.autograd.grad``.

        Args:
            *args: The exported function's arguments: the dtypes and ranks of the example, and sizes in the exported range.
            **kwargs: Its keyword arguments.

        Returns:
            The pair of value and gradients. The value is the function's result, detached: a 0-d tensor, or ``(loss, aux)`` with ``has_aux``. The
                gradients
            are one tensor if ``wrt`` is one name, else a dict by name. A gradient has the shape and dtype of its tensor, and is None if eager's is.

        Raises:
            InputError: An argument does not fit; nothing was run.
            ExecutionError: Native code failed, for example because of an index out of range.
        """
        last = self._last
        if last is None or kwargs or (self._watched and self._watch.changed()) or not last.fits(args):
            return self._look_closely(args, kwargs)
        if last.may_have_hooks and any(has_hooks(args[i]) for i in last.may_have_hooks):
            return self._look_closely(args, kwargs)
        inputs: Any = args if last.order is None else [args[i] for i in last.order]
        if last.writes:
            torch.autograd.graph.increment_version(last.writes)  # before the call, so that an interrupt after it cannot hide the writes
        try:
            results = last.native(inputs)
        except RuntimeError as error:
            raise last.failed(error) from error
        return last.finish(results, args)

    def train(self, mode: bool = True) -> LoadedGrad:
        """Set the mode. A plain function has none.

        Args:
            mode: Whether later calls run the variants of training mode; otherwise they run the variants of evaluation mode.

        Returns:
            The function itself.
        """
        self._last, self.training = None, mode
        return self

    def eval(self) -> LoadedGrad:
        """Call ``train(False)``, and return the function itself."""
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, detached; they share memory with the loaded ones."""
        return {s.name: t.detach() for s, t in zip(self._entry.spec.state, self.parameters.values(), strict=True) if s.persistent}

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

    def __repr__(self) -> str:
        return f"LoadedGrad(entry={self._entry.name!r}, wrt={list(self._entry.spec.names)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedGrad:
        """Return an independent function on copies of the tensors, without their hooks, as for copies of any ``Parameter``."""
        tensors = {s.weight: t.detach().clone() for s, t in zip(self._entry.spec.state, self._held, strict=True)}
        out = LoadedGrad(copy.deepcopy(self._entry, memo), tensors)
        for old, new in zip(self._held, out._held, strict=True):
            new.requires_grad_(old.requires_grad)
            new.grad = None if old.grad is None else old.grad.clone()
        memo[id(self)] = out
        return out.train(self.training)

    def __reduce__(self) -> Any:
        raise AotBackwardError("a loaded gradient function cannot be pickled: pickle its state_dict(), and load the package in the other process")

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731

    def _look_closely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        entry = self._entry
        mode = "" if self._functional else "train" if self.training else "eval"
        matched = entry.match(mode, args, kwargs)
        binding = entry.state.refresh([t.detach() for t in self._held])
        if binding is not self._binding:
            self._last = None  # it may use another library than this call, and that one is not bound again here
            self._binding = binding
        runnable = matched.variant.plans["gradient"]
        written = runnable.written(binding, self._held) if runnable.writes else None
        if written is not None:
            runnable.refuse_overlap(written, matched.given, matched.variant.spec.inputs)
        call = _GradCall(entry, matched, runnable, self._held, written)
        if call.writes:
            torch.autograd.graph.increment_version(call.writes)
        with torch.no_grad():
            results = runnable.call(binding, matched.flat, matched.sizes)
        hooks = any(list(map(has_hooks, self._named.values())))  # a list: has_hooks must visit each tensor, so that its next registration is noticed
        self._watch.settle(hooks)
        if call.remember(matched, args):
            self._last = call
        value, gradients = call.finish(results, matched.given)
        return value, self._hooked(gradients, matched) if hooks or any(t.requires_grad for t in matched.given) else gradients

    def _hooked(self, gradients: Any, matched: MatchedCall) -> Any:
        """Return ``gradients`` after running the hooks on the differentiated tensors."""
        spec = self._entry.spec
        by_name = {spec.names[0]: gradients} if spec.single else gradients
        sources: dict[str, torch.Tensor] = {}
        for name, target in zip(spec.names, spec.wrt, strict=True):
            kind, _, where = target.partition(":")
            tensor = matched.given[int(where)] if kind == "input" else self._named[where]
            if by_name[name] is not None and has_hooks(tensor):
                sources[name] = tensor
        new_gradients = dict(zip(sources, apply_hooks(list(sources.values()), [by_name[n] for n in sources]), strict=True)) if sources else {}
        by_name = {n: new_gradients.get(n, g) for n, g in by_name.items()}
        return by_name[spec.names[0]] if spec.single else by_name


class _GradCall(CachedCall):
    """A cached call, with the indices of its gradients among the results."""

    __slots__ = ("_gradients", "_names", "_single", "may_have_hooks", "writes")

    def __init__(self, entry: Entry, matched: MatchedCall, runnable: Runnable, held: Sequence[torch.Tensor], written: Ranges | None):
        super().__init__(entry, matched, runnable, held, written)
        spec = entry.spec
        self._names, self._single = spec.names, spec.single
        self._gradients = [runnable.gradients.get(t) for t in spec.wrt]
        self.writes = [held[i] for i in runnable.writes]
        # An input that does not require a gradient has no hook, and the check in C compares requires_grad.
        inputs = [int(t.removeprefix("input:")) for t in spec.wrt if t.startswith("input:")]
        self.may_have_hooks = [i for i in inputs if matched.given[i].requires_grad]

    def failed(self, error: RuntimeError) -> ExecutionError:
        assert self.runnable.library is not None
        return error if isinstance(error, ExecutionError) else self.runnable.library.failed(error)

    def finish(self, results: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        value = results[0] if self.plain else self.value(results, inputs)
        if self._single:
            i = self._gradients[0]
            return value, None if i is None else results[i]
        return value, {n: None if i is None else results[i] for n, i in zip(self._names, self._gradients, strict=True)}
