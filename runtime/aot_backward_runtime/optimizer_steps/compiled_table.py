"""Which compiled code serves an optimizer's step, or a call that clips gradients, of the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..errors import InputError

Does = str | tuple[str, str]
"""An optimizer's class by its full name, or a function that clips with its ``norm_type``."""

_UNFIT = InputError, LookupError, TypeError, ValueError  # the last three of an option that is missing or is not a number: eager says so
_MAX_WAIT = 64  # calls for which what did not fit is not looked at again


class Bound(Protocol):
    """Compiled code with the tensors of one caller, all of which were checked."""

    @property
    def code(self) -> Any: ...

    def serves(self, subject: Any, /) -> bool:
        """Whether ``subject`` is as it was when it was bound."""

    def run(self, subject: Any, /, *numbers: Any) -> Any:
        """Make the call. :class:`InputError` says why it does not fit; then nothing was changed."""


class Met:
    """What is known of one caller: an optimizer, or calls that clip so many gradients."""

    __slots__ = ("bound", "next_wait", "reason", "waits")

    def __init__(self) -> None:
        self.bound: Sequence[Bound] = ()  # the last one that ran comes first: kinds of calls may take turns
        self.reason = ""
        self.waits = self.next_wait = 0


class CompiledTable:
    """Compiled code by what it does. Each has a method ``bind(subject)``, which returns a :class:`Bound`. A caller that nothing fits is looked at
    again after 1, 2, 4, … 64 of its calls."""

    def __init__(self, codes: Iterable[tuple[Does, Any]]):
        self._codes: dict[Does, list[Any]] = {}
        for does, code in codes:
            self._codes.setdefault(does, []).append(code)

    def __bool__(self) -> bool:
        return bool(self._codes)

    def run(self, does: Does, met: Met, subject: Any, *numbers: Any) -> tuple[Any, Any]:
        """Make the call by compiled code: which, and its result. :class:`InputError` says why not; then nothing was changed."""
        for bound in met.bound:
            if bound.serves(subject):
                try:
                    result = bound.run(subject, *numbers)
                except _UNFIT:  # nothing was changed; other code may serve it
                    met.bound = tuple(b for b in met.bound if b is not bound)
                    continue
                return self._ran(met, bound), result
        if met.waits:
            met.waits -= 1
            raise InputError(met.reason)
        try:
            bound = self._bind(does, subject)
            result = bound.run(subject, *numbers)
        except _UNFIT as error:
            met.reason = str(error) if isinstance(error, InputError) else f"its options or state cannot be read: {type(error).__name__}: {error}"
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
        reasons.sort(key=lambda error: isinstance(error, OtherCaller))  # the others came nearer
        what = f"step of {does.rpartition('.')[2]}" if isinstance(does, str) else f"{does[0]}{f' of norm_type {does[1]}' if does[1] else ''}"
        raise InputError(str(reasons[0]) if reasons else f"no {what} was recorded")


class OtherCaller(InputError):
    """The code is for another optimizer or other gradients altogether: other parameter groups, other options, another number of gradients."""
