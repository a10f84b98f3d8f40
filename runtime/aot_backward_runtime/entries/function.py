"""``load(path).function()``: outputs in one native call, without gradients."""

from __future__ import annotations

from typing import Any

import torch

from .call_cache import CachedCall
from .callable import LoadedCallable


class LoadedFunction(LoadedCallable):
    """A compiled function without gradients.

    Attributes:
        training: Whether calls run the variants of training mode.

    Examples:
        >>> distances = load("distances.pt2").function()
        >>> distances(torch.randn(4, 3)).shape
        torch.Size([4, 4])
    """

    _role = "inference"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs, as under ``torch.no_grad()``: they do not require a gradient, whatever the arguments do.

        Args:
            *args: The exported function's arguments: the dtypes and ranks of the example, and sizes in the exported
                range.
            **kwargs: Its keyword arguments.

        Returns:
            The function's outputs, in the same nesting as in eager.

        Raises:
            InputError: An argument does not fit; nothing was run.
            ExecutionError: Native code failed, for example because of an index out of range.
        """
        last = self._last
        if last is None or kwargs or (self._watched and self._watch.changed()) or not last.fits(args):
            return self._look_closely(args, kwargs)
        if last.writes:
            # Before the call, so that an interrupt after it cannot hide the writes
            torch.autograd.graph.increment_version(last.writes)
        try:
            results = last.native(args if last.order is None else [args[i] for i in last.order])
        except RuntimeError as error:
            raise last.failed(error) from error
        return last.value(results, args)

    def __repr__(self) -> str:
        return f"LoadedFunction(entry={self._entry.name!r})"

    def _look_closely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        matched, binding, runnable, written = self._prepared(args, kwargs)
        call = CachedCall(self._entry, matched, runnable, self._held, written)
        if call.writes:
            torch.autograd.graph.increment_version(call.writes)
        with torch.no_grad():
            results = runnable.call(binding, matched.flat, matched.sizes)
        self._watch.settle(False)
        if call.remember(matched, args):
            self._last = call
        return call.value(results, matched.given)
