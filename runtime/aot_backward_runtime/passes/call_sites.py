"""Call sites in a script with backward passes that the package does not serve. Passes from there run in eager.

The structure of a pass is known only after the engine has walked it, and then it is too late for eager. But a call site
of ``backward`` nearly always has the same structure. After three unserved passes from one, further ones run in eager at
once; the engine still walks about one in 64.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .origin import PASSED_OVER

Place = tuple[str, int, int, str, int, int, str]
"""File, function's first line and instruction of the two innermost frames outside of torch and this project, and the
type of the first root. Two, because the innermost may belong to a library that is called from several places."""

_UNSERVED_IN_A_ROW = 3  # passes after which further ones from a call site run in eager at once; a guess
_SERVED_PART = 0.1  # above this served fraction, structures alternate at the call site, and the engine walks every pass
# The served fraction is a mean over about so many, so that it follows a script that changes; a guess
_LOOKS_REMEMBERED = 64
_MAX_SKIP = 128  # one in 64 on average: a fixed step would miss structures that alternate
_MAX_PLACES = 1024  # call sites, to bound memory; the engine walks every pass from further ones. A guess


@dataclass
class _Outcomes:
    """The outcomes at one call site."""

    in_a_row: int = 0  # passes that were not served
    looks: int = 0
    served: float = 0.0  # the fraction of looks that found a served pass; recent ones count most
    until_look: int = _MAX_SKIP

    def note(self, served: bool) -> None:
        self.in_a_row = 0 if served else self.in_a_row + 1
        self.looks = min(self.looks + 1, _LOOKS_REMEMBERED)
        self.served += (served - self.served) / self.looks


class CallSites:
    """The call sites of unserved passes."""

    def __init__(self) -> None:
        self._seen: dict[Place, _Outcomes] = {}
        self._random = random.Random(0)  # noqa: S311

    def is_unserved(self, roots: Sequence[Any]) -> bool:
        """Return whether a pass with these roots, called now, should run in eager."""
        if not self._seen:
            return False
        record = self._seen.get(place_of(roots))
        if record is None or record.in_a_row < _UNSERVED_IN_A_ROW or record.served > _SERVED_PART:
            return False
        remaining = record.until_look
        record.until_look = remaining - 1 if remaining > 0 else self._random.randrange(1, _MAX_SKIP)
        return remaining > 0

    def note(self, roots: Sequence[Any], *, served: bool) -> None:
        """Note the outcome of the present pass."""
        if served and not self._seen:
            return
        place = place_of(roots)
        record = self._seen.get(place)
        if record is None:
            if served or len(self._seen) >= _MAX_PLACES:
                return
            record = self._seen[place] = _Outcomes()
        record.note(served)


def place_of(roots: Sequence[Any]) -> Place:
    """Return the place of the present call of ``backward``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (id(frame.f_globals) in _passed_over or _is_passed_over(frame.f_globals)):
        frame = frame.f_back
    above = frame.f_back or frame
    root = roots[0] if roots else None
    node = root.grad_fn if isinstance(root, torch.Tensor) else root
    code, around = frame.f_code, above.f_code
    return (
        code.co_filename,
        code.co_firstlineno,
        frame.f_lasti,
        around.co_filename,
        around.co_firstlineno,
        above.f_lasti,
        type(node).__name__,
    )


_passed_over: set[int] = set()  # ids of module namespaces, which stay alive


def _is_passed_over(names: dict[str, Any]) -> bool:
    if str(names.get("__name__")).partition(".")[0] not in PASSED_OVER:
        return False
    _passed_over.add(id(names))
    return True
