"""The options of an optimizer's parameter groups, stored in a manifest as JSON, and the intervals that compiled code
supports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import PackageError
from .manifest import GroupSpec, Interval


def options_of(spec: GroupSpec) -> dict[str, Any]:
    """Return the options at export. Raise :class:`PackageError` if they are not a JSON object."""
    return options_in(spec.options, "the options of a parameter group")


def options_in(text: str, label: str) -> dict[str, Any]:
    """Return the options in ``text``. Errors call them ``label``."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{label} are not JSON: {error}") from error
    if not isinstance(options, dict) or "params" in options:
        raise PackageError(f"{label} are not a JSON object of options")
    return options


def inside(value: float, interval: Interval) -> bool:
    """Return whether ``value`` lies in ``interval``."""
    low, high = interval.low, interval.high
    above = low is None or value > low or (value == low and not interval.low_open)
    return above and (high is None or value < high or (value == high and not interval.high_open))


def allowed_words(allowed: Sequence[Interval]) -> str:
    """Return ``more than 0 and at most 1``, ``any but 0``."""
    match allowed:
        case (
            Interval(low=None, high=high, high_open=True),
            Interval(low=low, high=None, low_open=True),
        ) if low == high:
            return f"any but {low:g}"
    return " or ".join(map(_words, allowed))


def _words(interval: Interval) -> str:
    low, high = interval.low, interval.high
    if low is not None and low == high:
        return f"{low:g} alone"
    parts = [f"more than {low:g}" if interval.low_open else f"at least {low:g}"] if low is not None else []
    if high is not None:
        parts.append(f"less than {high:g}" if interval.high_open else f"at most {high:g}")
    return " and ".join(parts)
