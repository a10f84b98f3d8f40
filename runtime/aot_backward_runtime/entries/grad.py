"""``load(path).grad()``: a value and its gradients in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..native.memory import Ranges
from ..native.plan import Runnable
from .bound_parameter import apply_hooks, has_hooks
from .call_cache import CachedCall
from .callable import LoadedCallable
from .dispatch import Entry, MatchedCall


class LoadedGrad(LoadedCallable):
    """A compiled function that returns a value and its gradients.

    Attributes:
        training: Whether calls run the variants of training mode.

    Examples:
        >>> energy = load("energy.pt2").grad()
        >>> value, gradient = energy(torch.randn(4, 3))
        >>> value.shape, gradient.shape
        (torch.Size([]), torch.Size([4, 3]))
    """

    _role = "gradient"
    _last: _GradCall | None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the value and the gradients.

        Hooks on the parameters and the arguments receive their gradients, as by ``torch.autograd.grad``.

        Args:
            *args: The exported function's arguments: the dtypes and ranks of the example, and sizes in the exported
                range.
            **kwargs: Its keyword arguments.

        Returns:
            The pair of value and gradients. The value is the function's result, detached: a 0-d tensor, or
            ``(loss, aux)`` with ``has_aux``. The gradients are one tensor if ``wrt`` is one name, else a dict by name.
            A gradient has the shape and dtype of its tensor, and is None if eager's is.

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
            # Before the call, so that an interrupt after it cannot hide the writes
            torch.autograd.graph.increment_version(last.writes)
        try:
            results = last.native(inputs)
        except RuntimeError as error:
            raise last.failed(error) from error
        return last.finish(results, args)

    def __repr__(self) -> str:
        return f"LoadedGrad(entry={self._entry.name!r}, wrt={list(self._entry.spec.names)})"

    def _look_closely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        matched, binding, runnable, written = self._prepared(args, kwargs)
        call = _GradCall(self._entry, matched, runnable, self._held, written)
        if call.writes:
            torch.autograd.graph.increment_version(call.writes)
        with torch.no_grad():
            results = runnable.call(binding, matched.flat, matched.sizes)
        # A list: has_hooks must visit each tensor, so that its next registration is noticed
        hooks = any(list(map(has_hooks, self._named.values())))
        self._watch.settle(hooks)
        if call.remember(matched, args):
            self._last = call
        value, gradients = call.finish(results, matched.given)
        hooked = hooks or any(t.requires_grad for t in matched.given)
        return value, self._hooked(gradients, matched) if hooked else gradients

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
        new_gradients = (
            dict(zip(sources, apply_hooks(list(sources.values()), [by_name[n] for n in sources]), strict=True))
            if sources
            else {}
        )
        by_name = {n: new_gradients.get(n, g) for n, g in by_name.items()}
        return by_name[spec.names[0]] if spec.single else by_name


class _GradCall(CachedCall):
    """A cached call, with the indices of its gradients among the results."""

    __slots__ = ("_gradients", "_names", "_single", "may_have_hooks")

    def __init__(
        self,
        entry: Entry,
        matched: MatchedCall,
        runnable: Runnable,
        held: Sequence[torch.Tensor],
        written: Ranges | None,
    ):
        super().__init__(entry, matched, runnable, held, written)
        spec = entry.spec
        self._names, self._single = spec.names, spec.single
        self._gradients = [runnable.gradients.get(t) for t in spec.wrt]
        # An input that does not require a gradient has no hook, and the check in C compares requires_grad.
        inputs = [int(t.removeprefix("input:")) for t in spec.wrt if t.startswith("input:")]
        self.may_have_hooks = [i for i in inputs if matched.given[i].requires_grad]

    def finish(self, results: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        value = results[0] if self.plain else self.value(results, inputs)
        if self._single:
            i = self._gradients[0]
            return value, None if i is None else results[i]
        return value, {n: None if i is None else results[i] for n, i in zip(self._names, self._gradients, strict=True)}
