"""The compiled updates of a package, and the optimizers of the process that they serve."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch

from ..errors import InputError
from .compiled_update import BoundUpdate, CompiledUpdate, OtherGroups

_LONGEST = 64  # steps for which an optimizer that did not fit is not looked at again


class UpdateTable:
    """By the optimizer's class. An optimizer that fits none is looked at again after 1, 2, 4, … 64 of its steps."""

    def __init__(self, updates: Iterable[CompiledUpdate]):
        self._updates: dict[str, list[CompiledUpdate]] = {}
        for update in updates:
            self._updates.setdefault(update.spec.optimizer, []).append(update)
        self._met: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Met] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._updates)

    def run(self, optimizer: torch.optim.Optimizer) -> CompiledUpdate:
        """Makes the step by compiled code; :class:`InputError` says why it did not, and nothing was changed."""
        met = self._met.get(optimizer)
        if met is None:
            met = self._met[optimizer] = _Met()
        if met.waits:
            met.waits -= 1
            raise InputError(met.reason)
        try:
            refuse_unsupported(optimizer)
            return self._run(optimizer, met)
        except (InputError, LookupError, TypeError, ValueError) as error:  # of an option that is missing or is no number: eager says what it is
            met.bound, met.waits = [], met.next_wait
            met.reason = str(error) if isinstance(error, InputError) else f"its options or state cannot be read: {type(error).__name__}: {error}"
            met.next_wait = min(max(2 * met.next_wait, 1), _LONGEST)
            raise InputError(met.reason) from error

    def _run(self, optimizer: torch.optim.Optimizer, met: _Met) -> CompiledUpdate:
        """By what was bound to the optimizer, the last first, else by what is bound now: kinds of steps may take turns."""
        for bound in met.bound:
            if bound.serves(optimizer):
                with contextlib.suppress(InputError):  # nothing was changed
                    bound.run(optimizer)
                    break
        else:
            bound = self._bind(optimizer)
            bound.run(optimizer)
        met.bound = [bound, *(b for b in met.bound if b.update is not bound.update)]
        met.next_wait = 0
        return bound.update

    def _bind(self, optimizer: torch.optim.Optimizer) -> BoundUpdate:
        kind, reasons = type(optimizer), list[InputError]()
        for update in self._updates.get(name_of(kind), ()):
            try:
                return update.bind(optimizer)
            except InputError as error:
                reasons.append(error)
        reasons.sort(key=lambda error: isinstance(error, OtherGroups))  # the others came nearer
        raise InputError(str(reasons[0]) if reasons else f"no step of {kind.__qualname__} was recorded")


class _Met:
    """What is known of an optimizer of the process."""

    __slots__ = ("bound", "next_wait", "reason", "waits")

    def __init__(self) -> None:
        self.bound: list[BoundUpdate] = []
        self.reason = ""
        self.waits = self.next_wait = 0


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    """:class:`InputError` where the step depends on what a compiled one does not look at."""
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        raise InputError("a GradScaler scales the gradients within the optimizer's fused step")
    if torch.is_autocast_enabled("cpu"):
        raise InputError("it is called under autocast")
