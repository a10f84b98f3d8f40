"""Reducers of ``DistributedDataParallel``: called for the gradients that a pass of ours has accumulated, as eager would call them.

The C++ reducer has a hook on each leaf. It makes the engine refuse its compilers, since they would leave it out; so while a session is entered,
reducers are made such that the engine lets them pass, and :meth:`Reducers.reduce` calls what those hooks would have called. From there on all is the
reducer's own: buckets and their views, ``no_sync``, unused parameters, a static graph, communication hooks, ``Join``.

A tape is the same with and without reducers, and so is what is compiled of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import torch_api

Eager = Callable[[Sequence[torch.Tensor], Sequence[Any], dict[str, Any]], Any]
"""Runs a pass by eager: (roots, (incoming gradients, keep_graph, create_graph, inputs), further arguments)."""
MADE_BEFORE = (
    "DistributedDataParallel was made before record or replay was entered, and only what is made inside lets the engine's compilers pass: "
    "make it inside of the context"
)
MIXED_PRECISION = "DistributedDataParallel with mixed_precision calls its reducer from hooks of its own, behind which the engine would run nothing"
_REFUSED = "Compiled autograd is not compatible with C++ DDP Reducer"


class Reducers:
    """Those that were made while a session was entered, and still are."""

    def __init__(self) -> None:
        self.known: dict[int, list[tuple[weakref.ref[torch.Tensor], weakref.ref[Any], int]]] = {}
        """By the identity of a parameter. Empty where no such module is alive, which costs a pass nothing."""
        self._before: Any = None
        self.in_mixed_precision: weakref.WeakSet[Any] = weakref.WeakSet()

    def observe(self) -> None:
        """From now on."""
        torch_api.ObservedReducer.made = self._add
        torch_api.ObservedReducer.lowered = self.in_mixed_precision.add
        self._before = torch_api.reducers_are(torch_api.ObservedReducer)

    def stop(self) -> None:
        torch_api.reducers_are(self._before)

    def _add(self, reducer: Any, parameters: Sequence[torch.Tensor]) -> None:
        numbers = [id(p) for p in parameters]
        for i, parameter in enumerate(parameters):
            self.known.setdefault(id(parameter), []).append((weakref.ref(parameter), weakref.ref(reducer), i))
        weakref.finalize(reducer, self._drop, numbers).atexit = False

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            left = [known for known in self.known.pop(number, ()) if known[1]() is not None]
            if left:
                self.known[number] = left

    def _hooks_of(self, leaf: torch.Tensor) -> Iterator[tuple[Callable[[int], None], int]]:
        for parameter, reducer, index in self.known.get(id(leaf), ()):
            if parameter() is leaf and (found := reducer()) is not None:
                yield torch_api.autograd_hook_of(found), index

    def reduce(self, leaves: Iterable[torch.Tensor], eager: Eager) -> None:
        """Calls the reducers of ``leaves``, which a pass has reached in that order, and waits until they are done."""
        hooks = [hook for leaf in leaves for hook in self._hooks_of(leaf)]
        if not hooks:
            return

        def call(_: torch.Tensor) -> None:
            for hook, index in hooks:
                hook(index)

        # a pass of its own: what the last hook queues, to run behind the pass, the engine runs behind passes of eager alone
        root = torch.zeros((), requires_grad=True)
        root.register_hook(call)
        eager((root,), ((torch.ones(()),), False, False, ()), {"allow_unreachable": True, "accumulate_grad": True})


def in_our_words(reason: str) -> str:
    """The engine's reason to leave a pass to eager."""
    return MADE_BEFORE if reason.startswith(_REFUSED) else reason


reducers = Reducers()
