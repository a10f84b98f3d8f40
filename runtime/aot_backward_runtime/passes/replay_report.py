"""Counts of the hits, misses and fallbacks of a context, with bounds on how many different reasons are kept and
shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..optimizer_steps.compiled_update import NO_STATE

_MAX_REASONS, _REASONS_SHOWN, _IN_TEXT = 256, 12, 3
"""Reasons that are counted separately, to bound memory; reasons in the JSON report; reasons of each kind in the text.
Guesses."""
REST = "(other reasons)"


class Reasons(Counter[str]):
    """Counts by reason. Above 256 different reasons the rarer half is merged into :data:`REST`."""

    def note(self, reason: str, count: int = 1) -> None:
        if count < 1:
            return
        self[reason] += count
        if len(self) > _MAX_REASONS:
            rest = self.pop(REST, 0)
            for rare, count in self.most_common()[_MAX_REASONS // 2 :]:
                del self[rare]
                rest += count
            self[REST] = rest

    def shown(self, most: int = _REASONS_SHOWN) -> dict[str, int]:
        """Return the most frequent reasons, and the count of all others."""
        first = [(reason, count) for reason, count in self.most_common(most + 1) if reason != REST][:most]
        rest = sum(self.values()) - sum(count for _, count in first)
        return dict(first) | ({REST: rest} if rest else {})


@dataclass
class Report:
    """Counts of the backward passes of a context. ``str(report)`` is for people: one line if nothing was missed.

    Attributes:
        passes: The number of all backward passes.
        compiled: The number of passes that ran compiled.
        bindings: The number of passes that met a structure for the first time.
        hits: The number of later passes that were served.
        misses: The numbers of interpreted passes, by reason.
        eager: The numbers of passes that ran in eager, by reason: the engine refused them, or the package did not serve
            earlier ones.
        steps: The number of compiled optimizer steps.
        eager_steps: The numbers of optimizer steps that ran in eager, by reason.
        clippings: The number of compiled clippings of gradients.
        eager_clippings: The numbers of clippings that ran in eager, by reason.
    """

    passes: int = 0
    compiled: int = 0
    bindings: int = 0
    hits: int = 0
    misses: Reasons = field(default_factory=Reasons)
    eager: Reasons = field(default_factory=Reasons)
    steps: int = 0
    eager_steps: Reasons = field(default_factory=Reasons)
    clippings: int = 0
    eager_clippings: Reasons = field(default_factory=Reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a dict that ``json.dumps`` accepts, with the most frequent reasons."""
        return {
            "passes": self.passes,
            "compiled": self.compiled,
            "bindings": self.bindings,
            "hits": self.hits,
            "misses": self.misses.shown(),
            "eager": self.eager.shown(),
            "optimizer_steps": self.steps,
            "optimizer_steps_in_eager": self.eager_steps.shown(),
            "clippings": self.clippings,
            "clippings_in_eager": self.eager_clippings.shown(),
        }

    def __str__(self) -> str:
        return "\n".join([self._what_ran(), *self.reasons()])

    def reasons(self) -> Iterator[str]:
        """Yield the most frequent reasons of each kind why something was not compiled, one per line."""
        steps = Reasons({reason: count for reason, count in self.eager_steps.items() if reason != NO_STATE})
        kinds = ("miss", self.misses), ("eager", self.eager), ("optimizer", steps), ("clipping", self.eager_clippings)
        for label, reasons in kinds:
            yield from (f"  {label} x{count}: {reason}" for reason, count in reasons.shown(_IN_TEXT).items())

    def _what_ran(self) -> str:
        parts = [f"{self.compiled} of {self.passes} backward passes{self._how()}"]
        in_eager = sum(self.eager_steps.values())
        if self.steps or in_eager:
            first = f" ({self.eager_steps[NO_STATE]} made the state, in eager)" if self.eager_steps[NO_STATE] else ""
            parts.append(f"{self.steps} of {self.steps + in_eager} optimizer steps{first}")
        if self.clippings or self.eager_clippings:
            parts.append(
                f"{self.clippings} of {self.clippings + sum(self.eager_clippings.values())} clippings of gradients"
            )
        *others, last = parts
        return f"{', '.join(others)}{' and ' if others else ''}{last} ran compiled"

    def _how(self) -> str:
        """Return the counts of compiled bindings and of hits as text. A binding may also be a miss."""
        bound = self.compiled - self.hits
        return (
            f" ({bound} binding{'' if bound == 1 else 's'}, {self.hits} hit{'' if self.hits == 1 else 's'})"
            if bound or self.hits
            else ""
        )
