"""The outcome for recorded structures: which are in the package, which are not, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Contents:
    """Additions to a package. ``variants``: their (fingerprint, name). ``steps``: the optimizers with added steps, and
    the functions that clip gradients."""

    variants: frozenset[tuple[str, str]] = frozenset()
    steps: tuple[str, ...] = ()

    @property
    def structures(self) -> set[str]:
        """The fingerprints of the added structures."""
        return {fingerprint for fingerprint, _ in self.variants}

    def __bool__(self) -> bool:
        return bool(self.variants or self.steps)


@dataclass
class Added:
    """The outcome for recorded structures so far. ``contents``: additions to the file. ``skipped``: why passes were
    left out, counted. ``seldom``: the number of structures that came less often than ``min_seen``. ``chosen``: the
    number of the others. ``settled``: fingerprints of chosen ones that were compiled or left out. ``slower``:
    descriptions of code that was left out since eager is as fast. ``stopped``: why the rest was not compiled."""

    contents: Contents = field(default_factory=Contents)
    skipped: Counter[str] = field(default_factory=Counter)
    seldom: int = 0
    chosen: int = 0
    settled: set[str] = field(default_factory=set)
    slower: list[str] = field(default_factory=list)
    stopped: Literal["", "time limit", "interrupt"] = ""

    @property
    def unfinished(self) -> int:
        """The number of chosen structures that are neither compiled nor left out."""
        return self.chosen - len(self.settled | self.contents.structures)
