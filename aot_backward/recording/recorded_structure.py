"""What is kept of one structure of backward passes: its tape, how its passes differed, and values to check compiled code against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_runtime.tapes.custom_function import PlainContext
from aot_backward_runtime.tapes.tape import Tape

from .observation import Observation

DEFAULT_ENTRY = "backward"
"""The name of the ``replay`` entry to which recorded passes are added."""

_TIMED = 64  # different passes of a structure


@dataclass
class PassTimes:
    """Seconds that passes of one observation took in the script: the shortest. ``engine``: what of an interpreted one the engine took, to find that
    it knows the pass and to release what was saved."""

    engine: float = math.inf
    interpreted: float = math.inf  # the rest of it
    eager: float = math.inf
    times_interpreted: int = 0
    times_in_eager: int = 0
    rows: int = 0  # of passes in eager that were begun
    passes_in_eager: int = 0  # those of a row that has not ended, too


@dataclass
class ExamplePass:
    """The values of one pass, to check the compiled one against: its tensors, and each operation's results, by their numbers on the tape."""

    inputs: dict[int, torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]  # of all its tensors
    sizes: tuple[int, ...]
    values: dict[int, torch.Tensor | None] = field(default_factory=dict)
    times: PassTimes = field(default_factory=PassTimes)


@dataclass
class TypicalPass:
    """What an interpreted pass of a structure takes. Those whose values were copied count only until there is another: they come first, and with what
    PyTorch does once in a process."""

    _seconds: float = 0.0
    _passes: int = 0
    _copied: float = math.inf

    def note(self, seconds: float, *, copied: bool) -> None:
        if copied:
            self._copied = min(self._copied, seconds)
        else:
            self._seconds += seconds
            self._passes += 1

    @property
    def seconds(self) -> float:
        if self._passes:
            return self._seconds / self._passes
        return self._copied if self._copied < math.inf else 0.0


@dataclass
class RecordedStructure:
    """The passes of one structure that a context interpreted, because its package has no variant for them."""

    tape: Tape
    observations: dict[Observation, int] = field(default_factory=dict)  # and how many interpreted passes looked like it
    further: int = 0  # interpreted passes that looked like none of these
    examples: dict[Any, list[tuple[Observation, ExamplePass]]] = field(default_factory=dict)  # by Observation.kind()
    times: dict[Observation, PassTimes] = field(default_factory=dict)
    seconds: float = math.inf  # of the fastest interpreted pass
    typical: TypicalPass = field(default_factory=TypicalPass)
    contexts: dict[int, PlainContext] = field(default_factory=dict)  # of custom functions that may be traced, by the number of the hook
    line: str = ""  # of the script, where the first such pass was called
    layers: dict[int, str] = field(default_factory=dict)  # names of the parameters among the inputs

    @property
    def passes(self) -> int:
        """How many there were: interpreted, and timed in eager."""
        return sum(self.observations.values()) + self.further + sum(t.passes_in_eager for t in self.times.values())

    @property
    def backward_seconds(self) -> float:
        """What all these took, each interpreted, so that structures compare."""
        return self.passes * self.typical.seconds

    def seconds_of(self, observations: Iterable[Observation]) -> float:
        """The part of ``backward_seconds`` that passes took which looked like one of these."""
        interpreted = sum(self.observations.get(o, 0) for o in observations)
        in_eager = sum(self.times[o].passes_in_eager for o in observations if o in self.times)
        return (interpreted + in_eager) * self.typical.seconds

    def times_of(self, observation: Observation) -> PassTimes:
        """Kept for so many different passes; where there are more, what came once makes room."""
        if observation not in self.times and len(self.times) >= _TIMED:
            once = next((o for o, t in self.times.items() if t.times_interpreted <= 1), None)
            if once is None:
                return PassTimes()
            del self.times[once]
        return self.times.setdefault(observation, PassTimes())

    def location(self, node: int | None = None) -> str:
        """Where such a pass, or a node of it, is in the script: `` (TanhBackward0, backward called at train.py:12)``, or nothing."""
        parts = []
        if node is not None:
            parts.append(next((self.tape.name_of(op) for op in self.tape.ops if op.node == node), f"node {node}"))
            leaf = self.tape.leaf_after(node)
            if leaf in self.layers:
                parts.append(f"at or after {self.layers[leaf]}")
        if self.line:
            parts.append(f"backward called at {self.line}")
        return f" ({', '.join(parts)})" if parts else ""
