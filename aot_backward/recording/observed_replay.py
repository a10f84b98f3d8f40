"""A replay that observes the passes which it interprets: their metadata, and copies of some passes' values."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from aot_backward_runtime.loader import Package
from aot_backward_runtime.passes import origin
from aot_backward_runtime.passes.pass_contract import Operands
from aot_backward_runtime.passes.session import Replaying
from aot_backward_runtime.passes.structure import Structure
from aot_backward_runtime.tapes.custom_function import PlainContext
from aot_backward_runtime.tapes.interpreter import Run
from aot_backward_runtime.tapes.tape import Tape, slots

from .observation import Observation
from .recorded_structure import ExamplePass, PassTimes, RecordedStructure

_KINDS = 8  # kinds of passes (Observation.kind) of one structure whose values are kept: as many as variants are compiled of it
_OBSERVATIONS = 1024  # different passes of one structure; a size that is the same in all of them stays static
_OFTEN = 3  # times that a pass was seen before its sizes are those of a second example
_CONSTANTS = (
    "A number that changes from pass to pass and is part of a node, such as the limit of a clamp, makes a structure of its own: "
    "as a 0-d tensor it would not. report.engine names the nodes that were new"
)


class ObservedReplay(Replaying):
    """``structures``: what was interpreted, by fingerprint. ``skipped``: what could not be traced or compiled, and why."""

    observes = True

    def __init__(
        self,
        package: Package | None,
        entry: str | None,
        *,
        max_structures: int,
        optimizer: bool,
    ):
        super().__init__(package, entry, max_structures=max_structures, optimizer=optimizer)
        self.structures: dict[str, RecordedStructure] = {}
        self.skipped: Counter[str] = Counter()

    @property
    def observed_any(self) -> bool:
        """Whether a pass was interpreted to its end."""
        return any(s.observations for s in self.structures.values())

    def interpret(self, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        if not self.table.knows(structure):
            return super().interpret(structure, operands)
        recorded = self._recorded_structure(structure.tape, operands)
        observation = Observation.of(operands, structure.tape)
        kind = observation.kind()
        examples = recorded.examples.setdefault(kind, []) if len(recorded.examples) < _KINDS or kind in recorded.examples else None
        if examples is not None and _is_worth_keeping(observation, [o for o, _ in examples], recorded.observations):
            example = ExamplePass(
                _copy_inputs(structure.tape, operands.inputs),
                tuple(t.shape for t in observation.inputs),
                observation.sizes,
                times=recorded.times_of(observation),
            )
            results, seconds = self._interpret_and_copy(structure, operands, example)
            recorded.typical.note(seconds, copied=True)
            self.interpreted(example.times, math.inf)
            examples[1:] = [(observation, example)]
        else:
            start = time.perf_counter()
            results = self.run_tape(structure, operands)
            seconds = time.perf_counter() - start
            recorded.seconds = min(recorded.seconds, seconds)
            recorded.typical.note(seconds, copied=False)
            self.interpreted(recorded.times_of(observation), seconds)
        if observation in recorded.observations or len(recorded.observations) < _OBSERVATIONS:
            recorded.observations[observation] = recorded.observations.get(observation, 0) + 1  # not of a pass that raised
        else:
            recorded.further += 1
        return results

    def interpreted(self, times: PassTimes, seconds: float) -> None:
        """``times``: of passes that look like the one which was just interpreted, in ``seconds``; inf where that says nothing."""

    def note_if_full(self) -> None:
        """Says in ``skipped`` that ``max_structures`` was reached, where it was."""
        if self.table.full:
            most = f"after {self.table.max_structures} structures (max_structures), further ones were left to eager"
            self.skipped[f"the structure kept changing: {most}. {_CONSTANTS}"] += 1

    def _recorded_structure(self, tape: Tape, operands: Operands) -> RecordedStructure:
        fingerprint = tape.fingerprint()
        if fingerprint not in self.structures:
            hooks = [tape.ops[n].operands[0].index for n in tape.plain_customs]
            leaves = {op.operands[0].index for op in tape.ops if op.kind == "accumulate"}
            self.structures[fingerprint] = RecordedStructure(
                tape,
                contexts={h: PlainContext(operands.hooks[h]) for h in hooks},
                line=origin.line(),
                layers={i: name for i in leaves if (name := self.layers.name(operands.inputs[i]))},
            )
        return self.structures[fingerprint]

    def _interpret_and_copy(self, structure: Structure, operands: Operands, example: ExamplePass) -> tuple[list[torch.Tensor | None], float]:
        """The results, and seconds without the copies."""
        tape, seconds = structure.tape, 0.0
        run = Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, self.calling_out)
        for op in tape.ops:
            start = time.perf_counter()
            run.step(op)
            seconds += time.perf_counter() - start
            for number in op.results:
                if number >= 0:  # copied before the next operation: a hook may change it in place
                    example.values[number] = _copy(run.values[number])
        return [run.get(o) for o in tape.outputs], seconds


def _is_worth_keeping(observation: Observation, kept: Sequence[Observation], seen: Mapping[Observation, int]) -> bool:
    """Whether the values of this pass are worth keeping: two passes of a kind are, the first, and the one of which the most sizes differ from its;
    among those the largest that comes often, since what is timed is timed at the sizes of these."""
    if not kept:
        return True
    first, times = kept[0].every_size(), seen.get(observation, 0)

    def differences(other: Observation) -> int:
        return sum(a != b for a, b in zip(other.every_size(), first, strict=True))

    more = differences(observation) - differences(kept[-1])
    if times == 0:
        return more > 0
    if times != _OFTEN or observation in kept or more < 0:
        return False
    return seen.get(kept[-1], 0) < _OFTEN or (more == 0 and len(kept) > 1 and sum(observation.every_size()) > sum(kept[-1].every_size()))


def _copy_inputs(tape: Tape, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies of the tensors that computing operations read."""
    read = {s.index for op in tape.ops if op.kind != "accumulate" for s in slots(op.operands) if s.kind == "input"}
    out = {}
    for i in sorted(read):
        copy = _copy(inputs[i])
        assert copy is not None
        out[i] = copy
    return out


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy with the same strides, those of expanded dimensions (0) included."""
    if tensor is None:
        return None
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        return plain.clone()
    small = (
        plain[tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(plain.shape, plain.stride(), strict=True))]
        if plain.dim()
        else plain
    )
    return torch.empty_strided(small.shape, small.stride(), dtype=plain.dtype, device=plain.device).copy_(small).expand(plain.shape)
