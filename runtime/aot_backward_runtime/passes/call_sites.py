"""Places in a script whose backward passes eager runs faster than anything a package has for them.

Which structure a pass has is known once the engine has walked it, and by then it is too late for eager. But a place that calls ``backward`` nearly
always calls it on the same structure: after three such passes from there the next ones go to eager at once. One in some 64 is looked at all the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .origin import PASSED_OVER

Place = tuple[str, int, str, int, str]
"""Files and instructions of the two innermost frames that are neither torch's nor ours, since one may be a library's that is called from several
places; and the type of the first root."""

_SURE = 3
_LOOKED_AT = 128  # one in 64 on the average: a fixed step would miss what the script does every second pass
_KEPT = 1024


class CallSites:
    """How many passes in a row came from each place that eager would have run faster."""

    def __init__(self) -> None:
        self._in_a_row: dict[Place, int] = {}
        self._until_look: dict[Place, int] = {}
        self._random = random.Random(0)  # noqa: S311

    def is_faster_in_eager(self, roots: Sequence[Any]) -> bool:
        """Whether a pass that is called now, with these roots, should go to eager."""
        if not self._in_a_row:
            return False
        place = place_of(roots)
        if self._in_a_row.get(place, 0) < _SURE:
            return False
        left = self._until_look.get(place, _LOOKED_AT)
        self._until_look[place] = left - 1 if left > 0 else self._random.randrange(1, _LOOKED_AT)
        return left > 0

    def note(self, roots: Sequence[Any], *, eager_is_faster: bool) -> None:
        """What the engine found of the pass that is under way."""
        if eager_is_faster:
            place = place_of(roots)
            if len(self._in_a_row) < _KEPT or place in self._in_a_row:
                self._in_a_row[place] = self._in_a_row.get(place, 0) + 1
        elif self._in_a_row:
            self._in_a_row.pop(place_of(roots), None)


def place_of(roots: Sequence[Any]) -> Place:
    """Of the call of ``backward`` under way."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (id(frame.f_globals) in _passed_over or _is_passed_over(frame.f_globals)):
        frame = frame.f_back
    above = frame.f_back or frame
    root = roots[0] if roots else None
    node = root.grad_fn if isinstance(root, torch.Tensor) else root
    return frame.f_code.co_filename, frame.f_lasti, above.f_code.co_filename, above.f_lasti, type(node).__name__


_passed_over: set[int] = set()  # by the identity of their modules' names, which stay


def _is_passed_over(names: dict[str, Any]) -> bool:
    if names.get("__name__", "").partition(".")[0] not in PASSED_OVER:
        return False
    _passed_over.add(id(names))
    return True
