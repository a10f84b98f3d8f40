"""The choice of the compiled code that serves an optimizer step or a gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..errors import InputError

Does = str | tuple[str, str]
"""An optimizer class by its full name, or a clipping function with its ``norm_type``."""

# The last three: an option is missing or is not a number; eager reports it
_UNFIT = InputError, LookupError, TypeError, ValueError
# Calls that skip the search after one did not fit: bounds the delay until code that fits again is used; a guess
_MAX_WAIT = 64


class Bound(Protocol):
    """Compiled code with the checked tensors of one caller."""

    @property
    def code(self) -> Any: ...

    def serves(self, subject: Any, /) -> bool:
        """Return whether ``subject`` is unchanged since it was bound."""

    def run(self, subject: Any, /, *numbers: Any) -> Any:
        """Make the call. Raise :class:`InputError`, with nothing changed, if it does not fit."""


class Met:
    """The state of one caller: an optimizer, or the clippings of a number of gradients. ``does``: the call that it
    makes."""

    __slots__ = ("bound", "does", "next_wait", "reason", "waits")

    def __init__(self, does: Does) -> None:
        self.does = does
        self.bound: Sequence[Bound] = ()  # the last one that ran comes first; kinds of calls may alternate
        self.reason = ""
        self.waits = self.next_wait = 0


class CompiledTable:
    """Compiled code by its :data:`Does`. Each has a method ``bind(subject)`` that returns a :class:`Bound`. If nothing
    fits a caller, it is tried again after 1, 2, 4, … 64 of its calls."""

    def __init__(self, codes: Iterable[tuple[Does, Any]]):
        self._codes: dict[Does, list[Any]] = {}
        for does, code in codes:
            self._codes.setdefault(does, []).append(code)

    def __bool__(self) -> bool:
        return bool(self._codes)

    def run(self, met: Met, subject: Any, *numbers: Any) -> tuple[Any, Any]:
        """Make the call by compiled code. Return the code and its result. Raise :class:`InputError`, with nothing
        changed, if no code fits."""
        for bound in met.bound:
            if bound.serves(subject):
                try:
                    result = bound.run(subject, *numbers)
                except _UNFIT:  # nothing was changed, and other code may fit
                    met.bound = tuple(b for b in met.bound if b is not bound)
                    continue
                return self._ran(met, bound), result
        if met.waits:
            met.waits -= 1
            raise InputError(met.reason)
        try:
            bound = self._bind(met.does, subject)
            result = bound.run(subject, *numbers)
        except _UNFIT as error:
            met.reason = (
                str(error)
                if isinstance(error, InputError)
                else f"its options or state cannot be read: {type(error).__name__}: {error}"
            )
            met.waits, met.next_wait = met.next_wait, min(max(2 * met.next_wait, 1), _MAX_WAIT)
            raise InputError(met.reason) from error
        return self._ran(met, bound), result

    @staticmethod
    def _ran(met: Met, bound: Bound) -> Any:
        if not met.bound or bound is not met.bound[0]:
            met.bound = (bound, *(b for b in met.bound if b.code is not bound.code))
        met.waits = met.next_wait = 0
        return bound.code

    def _bind(self, does: Does, subject: Any) -> Bound:
        reasons = []
        for code in self._codes.get(does, ()):
            try:
                return code.bind(subject)
            except InputError as error:
                reasons.append(error)
        reasons.sort(key=lambda error: isinstance(error, OtherCaller))  # the other errors are closer to a fit
        label = (
            f"step of {does.rpartition('.')[2]}"
            if isinstance(does, str)
            else f"{does[0]}{f' of norm_type {does[1]}' if does[1] else ''}"
        )
        raise InputError(str(reasons[0]) if reasons else f"no {label} was recorded")


class OtherCaller(InputError):
    """Raised if the code is for another optimizer or other gradients: other parameter groups, options, or number of
    gradients."""
