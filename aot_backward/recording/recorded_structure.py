"""The data kept of one structure of backward passes: its tape, the differences between passes, and values to check
compiled code against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_runtime.tapes.tape import Tape

from .observation import Observation

DEFAULT_ENTRY = "backward"
"""The name of the ``replay`` entry to which recorded passes are added."""

_MIN_TIMES = 2, 4  # minimum numbers of passes timed in the script: interpreted, and in eager; guesses
# The most different passes of a structure that are timed: bounds memory if passes differ each time; a guess
_TIMED = 64


@dataclass
class PassTimes:
    """The shortest seconds of the passes of one observation in the script. ``engine``: the part of an interpreted pass
    in which the engine recognizes it and releases saved tensors."""

    engine: float = math.inf
    interpreted: float = math.inf  # the rest of an interpreted pass
    eager: float = math.inf
    times_interpreted: int = 0
    times_in_eager: int = 0
    rows: int = 0  # rows of eager passes that were begun
    passes_in_eager: int = 0  # including passes of an unfinished row

    @property
    def enough(self) -> bool:
        """Whether enough passes were timed to compare compiled code with eager."""
        return self.times_interpreted >= _MIN_TIMES[0] and self.times_in_eager >= _MIN_TIMES[1]


@dataclass
class ExamplePass:
    """The values of one pass, to check the compiled one against: its tensors, and each operation's results, by their
    numbers on the tape."""

    inputs: dict[int, torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]  # of all its tensors
    sizes: tuple[int, ...]
    values: dict[int, torch.Tensor | None] = field(default_factory=dict)
    times: PassTimes = field(default_factory=PassTimes)


@dataclass
class RecordedStructure:
    """The passes of one structure that a context interpreted, because its package lacks a variant for them."""

    tape: Tape
    # With the number of interpreted passes that match it
    observations: dict[Observation, int] = field(default_factory=dict)
    further: int = 0  # interpreted passes that match none of these
    examples: dict[Any, list[tuple[Observation, ExamplePass]]] = field(default_factory=dict)  # by Observation.kind()
    times: dict[Observation, PassTimes] = field(default_factory=dict)
    seconds: float = math.inf  # of the fastest interpreted pass
    line: str = ""  # of the script that called the first such pass

    @property
    def passes(self) -> int:
        """The number of passes: interpreted, or timed in eager."""
        return sum(self.observations.values()) + self.further + sum(t.passes_in_eager for t in self.times.values())

    @property
    def cost(self) -> float:
        """The seconds of all passes if each took as long as the fastest interpreted one."""
        return self.passes * self.seconds

    def times_of(self, observation: Observation) -> PassTimes:
        """Return the times of an observation. They are kept for a limited number: beyond it, an observation that came
        once is dropped."""
        if observation not in self.times and len(self.times) >= _TIMED:
            once = next((o for o, t in self.times.items() if t.times_interpreted <= 1), None)
            if once is None:
                return PassTimes()
            del self.times[once]
        return self.times.setdefault(observation, PassTimes())

    def is_untimed(self, observation: Observation) -> bool:
        """Return whether too few passes like ``observation`` were timed to compare compiled code with eager. False for
        a tensor that compiled code cannot take: it is refused by name."""
        refused = any(t.unsupported for t in observation.inputs)
        return not refused and not any(e.times.enough for _, e in self.examples.get(observation.kind(), []))

    def location(self, node: int | None = None) -> str:
        """Return the place of such a pass, or of a node of it, in the script:
        `` (TanhBackward0, backward called at train.py:12)``, or nothing."""
        parts = []
        if node is not None:
            parts.append(next((self.tape.name_of(op) for op in self.tape.ops if op.node == node), f"node {node}"))
        if self.line:
            parts.append(f"backward called at {self.line}")
        return f" ({', '.join(parts)})" if parts else ""
