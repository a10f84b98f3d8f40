"""What became of the passes of a context, counted, with bounds on how many different reasons are kept and shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_KEPT, _SHOWN = 256, 12
REST = "(other reasons)"


class Reasons(Counter[str]):
    """How often each reason was given. Of more than 256 different ones the rarer half is added up as :data:`REST`."""

    def note(self, reason: str, count: int = 1) -> None:
        if count < 1:
            return
        self[reason] += count
        if len(self) > _KEPT:
            rest = self.pop(REST, 0)
            for rare, count in self.most_common()[_KEPT // 2 :]:
                del self[rare]
                rest += count
            self[REST] = rest

    def shown(self) -> dict[str, int]:
        """The most frequent, and how many passes had another one."""
        first = [(reason, count) for reason, count in self.most_common(_SHOWN + 1) if reason != REST][:_SHOWN]
        rest = sum(self.values()) - sum(count for _, count in first)
        return dict(first) | ({REST: rest} if rest else {})


@dataclass
class Report:
    """What became of the backward passes of a context.

    ``bindings``: passes that met a structure for the first time; ``hits``: further ones that the package served; ``misses``: those that were
    interpreted, by reason; ``eager``: those that the engine would not have, by reason; ``slower``: those for which the package has code that was
    slower than eager, or than interpreting them, when it was compiled, and which therefore ran so; those of a rest, in which nothing is looked at,
    are counted when it ends. ``saved``: seconds by which the hits were faster than eager was when they were recorded; where it was not timed then,
    than their tapes uncompiled. ``steps``: optimizer steps by compiled code, whose gain is in ``saved``; ``eager_steps``: the others, by reason.
    """

    bindings: int = 0
    hits: int = 0
    misses: Reasons = field(default_factory=Reasons)
    eager: Reasons = field(default_factory=Reasons)
    slower: Reasons = field(default_factory=Reasons)
    engine: Reasons = field(default_factory=Reasons)  # what the engine said of the first passes that its cache did not have
    steps: int = 0
    eager_steps: Reasons = field(default_factory=Reasons)
    saved: float = 0.0
    modules: int = 0  # calls of modules by compiled code
    audits: int = 0  # of those, calls that eager made too, for comparison
    through_modules: int = 0  # passes through them, by eager's engine
    eager_modules: Reasons = field(default_factory=Reasons)
    differed: list[str] = field(default_factory=list)  # what audits found

    def to_json(self) -> dict[str, Any]:
        return {
            "bindings": self.bindings,
            "hits": self.hits,
            "misses": self.misses.shown(),
            "eager": self.eager.shown(),
            "slower": self.slower.shown(),
            "engine": self.engine.shown(),
            "optimizer_steps": self.steps,
            "optimizer_steps_in_eager": self.eager_steps.shown(),
            "module_calls": self.modules,
            "module_calls_audited": self.audits,
            "module_calls_in_eager": self.eager_modules.shown(),
            "audits_that_differed": self.differed,
            "passes_through_modules": self.through_modules,
            "seconds_saved": round(self.saved, 6),
        }

    def __str__(self) -> str:
        missed, eager, slower = sum(self.misses.values()), sum(self.eager.values()), sum(self.slower.values())
        not_faster = f", {slower} not faster compiled" if slower else ""
        lines = [f"{self.bindings} bound, {self.hits} hits, {missed} misses, {eager} left to eager{not_faster}; {self.saved:.3f} s saved"]
        if self.steps or self.eager_steps:
            lines.append(f"{self.steps} optimizer steps compiled, {sum(self.eager_steps.values())} in eager")
        if self.modules or self.eager_modules or self.differed:
            lines.append(f"{self.modules} module calls compiled ({self.audits} audited), {sum(self.eager_modules.values())} in eager")
        lines += [f"  AUDIT: {words}" for words in self.differed]
        named = (
            ("miss", self.misses),
            ("eager", self.eager),
            ("slower", self.slower),
            ("engine", self.engine),
            ("optimizer", self.eager_steps),
            ("module", self.eager_modules),
        )
        for what, reasons in named:
            lines += [f"  {what} x{count}: {reason}" for reason, count in reasons.shown().items()]
        return "\n".join(lines)
