"""Places in a script whose backward passes the package does not serve, and which are therefore left to eager.

Which structure a pass has is known once the engine has walked it, and by then it is too late for eager. But a place that calls ``backward`` nearly
always calls it on the same structure: after three passes from there that were not served the next ones go to eager at once. One in some 64 is looked
at all the same.
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
"""Files, functions' first lines and instructions of the two innermost frames that are neither torch's nor ours, since one may be a library's that is
called from several places; and the type of the first root."""

_UNSERVED_IN_A_ROW = 3
_SERVED_PART = 0.1  # where more of the passes than this were served, structures take turns there, and none goes to eager unseen
_LOOKS_REMEMBERED = 64  # looks
_MAX_SKIP = 128  # one in 64 on the average: a fixed step would miss what the script does every second pass
_MAX_PLACES = 1024


@dataclass
class _Seen:
    """What was found at one place."""

    in_a_row: int = 0  # passes that were not served
    looks: int = 0
    served: float = 0.0  # the part of those looks that found a pass which was, the last ones counting most
    until_look: int = _MAX_SKIP

    def note(self, served: bool) -> None:
        self.in_a_row = 0 if served else self.in_a_row + 1
        self.looks = min(self.looks + 1, _LOOKS_REMEMBERED)
        self.served += (served - self.served) / self.looks


class CallSites:
    """Which places passes came from that were not served."""

    def __init__(self) -> None:
        self._seen: dict[Place, _Seen] = {}
        self._random = random.Random(0)  # noqa: S311

    def is_unserved(self, roots: Sequence[Any]) -> bool:
        """Whether a pass that is called now, with these roots, should go to eager."""
        if not self._seen:
            return False
        seen = self._seen.get(place_of(roots))
        if seen is None or seen.in_a_row < _UNSERVED_IN_A_ROW or seen.served > _SERVED_PART:
            return False
        left = seen.until_look
        seen.until_look = left - 1 if left > 0 else self._random.randrange(1, _MAX_SKIP)
        return left > 0

    def note(self, roots: Sequence[Any], *, served: bool) -> None:
        """What the engine found of the pass that is under way."""
        if served and not self._seen:
            return
        place = place_of(roots)
        seen = self._seen.get(place)
        if seen is None:
            if served or len(self._seen) >= _MAX_PLACES:
                return
            seen = self._seen[place] = _Seen()
        seen.note(served)


def place_of(roots: Sequence[Any]) -> Place:
    """Of the call of ``backward`` under way."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (id(frame.f_globals) in _passed_over or _is_passed_over(frame.f_globals)):
        frame = frame.f_back
    above = frame.f_back or frame
    root = roots[0] if roots else None
    node = root.grad_fn if isinstance(root, torch.Tensor) else root
    code, around = frame.f_code, above.f_code
    return code.co_filename, code.co_firstlineno, frame.f_lasti, around.co_filename, around.co_firstlineno, above.f_lasti, type(node).__name__


_passed_over: set[int] = set()  # by the identity of their modules' names, which stay


def _is_passed_over(names: dict[str, Any]) -> bool:
    if str(names.get("__name__")).partition(".")[0] not in PASSED_OVER:
        return False
    _passed_over.add(id(names))
    return True
