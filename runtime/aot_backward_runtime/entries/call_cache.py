"""A call that was matched to a variant, kept so that similar calls need only a check in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import ExecutionError
from ..native.guards import Fast
from ..native.memory import Ranges
from ..native.plan import Runnable
from ..native.pytree import unflatten
from .dispatch import Entry, MatchedCall


class CachedCall:
    """The data to repeat a call of an entry's variant. Once :meth:`remember` has seen arguments, similar ones
    (:meth:`fits`) can be passed to :attr:`native` unchanged, in the order :attr:`order`."""

    __slots__ = (
        "_count", "_held", "_holds", "_index", "_sizes", "_tree", "_types", "_variant", "_written", "native", "order", "plain", "runnable", "writes",
    )  # fmt: skip

    native: Callable[[Any], list[torch.Tensor]]

    def __init__(
        self,
        entry: Entry,
        matched: MatchedCall,
        runnable: Runnable,
        held: Sequence[torch.Tensor],
        written: Ranges | None,
    ):
        """``held``: the entry's state. ``written``: the memory that the call writes, if any."""
        self.runnable = runnable
        self._variant = matched.variant
        self._sizes = matched.sizes
        self._types = entry.types
        self._held = held
        self._written = written
        self.writes = [held[i] for i in runnable.writes]
        """The tensors of the state that the call writes."""
        self._index = entry.index
        self._tree = matched.variant.spec.out_tree
        self._count = len(matched.variant.spec.inputs)
        where = [i for _, i in runnable.operands]
        self.order = None if where == list(range(self._count)) else where
        """The numbers of the arguments that native code takes; None: all, in their own order."""
        self.plain = self._tree.kind == "tensor" and runnable.outputs == [("result", 0)]
        """True if the first result is the value, so that :meth:`value` is not needed."""
        self._holds: Callable[[Sequence[torch.Tensor]], bool] = _never

    def remember(self, matched: MatchedCall, args: Sequence[torch.Tensor]) -> bool:
        """Make :meth:`fits` accept calls like this one. Return False if that is impossible: an argument was copied for
        native code, or is not a tensor, or native code takes more than arguments. The library must have been bound."""
        runnable = self.runnable
        if runnable.library is None or any(kind != "input" for kind, _ in runnable.operands):
            return False
        if (
            not matched.variant.flat_arguments
            or len(args) != self._count
            or not all(a is b for a, b in zip(matched.flat, args, strict=True))
        ):
            return False
        self._holds, self.native = Fast(args).holds, runnable.library.raw_run
        return True

    def fits(self, args: Sequence[torch.Tensor]) -> bool:
        """Return whether native code can take ``args``, which may be anything, unchanged. Raise if one lies in memory
        that the call writes."""
        if len(args) != self._count or torch_api.is_watched() or not self._holds(args):
            return False
        self._variant.check_ambient()
        if self._written is not None:
            self.runnable.refuse_overlap(self._written, args, self._variant.spec.inputs)
        return True

    def failed(self, error: RuntimeError) -> ExecutionError:
        """Return the error to raise after native code raised ``error``."""
        assert self.runnable.library is not None
        return error if isinstance(error, ExecutionError) else self.runnable.library.failed(error)

    def value(self, results: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Return the program's result. ``inputs``: the caller's tensors."""
        if self.plain:
            return results[0]
        self._variant.share(self.runnable, results, self._sizes)
        flat = [
            results[w] if k == "result" else inputs[w] if k == "input" else self._held[self._index[w]]
            for k, w in self.runnable.outputs
        ]
        return unflatten(self._tree, flat, self._sizes, self._types)


def _never(tensors: Sequence[torch.Tensor]) -> bool:
    return False
