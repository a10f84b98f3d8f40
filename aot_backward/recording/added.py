"""What became of recorded structures: what is in the package now, and what is not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Contents:
    """What was added to a package. ``variants``: the seconds that their passes took in the script, by (fingerprint, name). ``untimed``: how many of
    them were not timed, by the reason. ``steps``: the optimizers of which a kind of steps was added, and the functions that clip gradients."""

    variants: Mapping[tuple[str, str], float] = field(default_factory=dict)
    untimed: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[str, ...] = ()

    @property
    def structures(self) -> set[str]:
        """Their fingerprints."""
        return {fingerprint for fingerprint, _ in self.variants}

    def __bool__(self) -> bool:
        return bool(self.variants or self.steps)


@dataclass
class Added:
    """What became of recorded structures, as far as it has come. ``contents``: what is in the file. ``skipped``: why passes were left out, counted.
    ``seldom``: structures that came less often than is asked for. ``chosen``: the others; ``settled``: those of them that were compiled or left out,
    by fingerprint. ``slower``: what was compiled and left out since eager is as fast, in words. ``stopped``: why the rest was not."""

    contents: Contents = field(default_factory=Contents)
    skipped: Counter[str] = field(default_factory=Counter)
    seldom: int = 0
    chosen: int = 0
    settled: set[str] = field(default_factory=set)
    slower: list[str] = field(default_factory=list)
    stopped: Literal["", "time limit", "interrupt"] = ""

    @property
    def unfinished(self) -> int:
        """Structures that were to be compiled, and then were not."""
        return self.chosen - len(self.settled | self.contents.structures)
