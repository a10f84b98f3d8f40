"""The passes of a script while it is recorded: their metadata, copies of some passes' values, and their times."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aot_backward_runtime.passes import origin
from aot_backward_runtime.passes.pass_contract import Operands
from aot_backward_runtime.passes.session import Replaying
from aot_backward_runtime.passes.structure import Structure
from aot_backward_runtime.tapes.tape import Tape, slots

from .observation import Observation
from .recorded_structure import ExamplePass, PassTimes, RecordedStructure
from .timed_passes import TimedPasses

# Maximum kinds of passes (Observation.kind) of one structure with kept values: as many as variants are compiled of it
_MAX_PASS_KINDS = 8
# Different passes of one structure, to bound memory; a guess. A size that is the same in all of them stays static
_MAX_OBSERVATIONS = 1024
_TIMES_SEEN = 3  # times that a pass must be seen to count as frequent; a guess


class ObservedPasses:
    """The observer of the passes that a replay interprets (:class:`aot_backward_runtime.passes.session.PassObserver`).

    ``structures``: by fingerprint. ``recorded``: the number of interpreted passes. ``timed_in_eager``: the number of
    passes that ran in eager to be timed. ``times_eager``: whether any are."""

    def __init__(self, *, times_eager: bool) -> None:
        self.structures: dict[str, RecordedStructure] = {}
        self.recorded = self.timed_in_eager = 0
        self._timed = TimedPasses() if times_eager else None

    @property
    def any(self) -> bool:
        """Whether a pass was interpreted to its end."""
        return any(s.observations for s in self.structures.values())

    def before(
        self, replaying: Replaying, roots: Sequence[Any], inputs: Sequence[Any]
    ) -> Callable[[float], None] | None:
        # Inside a hook of another pass: that pass's time includes it
        if self._timed is None or replaying.engine.inside:
            return None
        timer = self._timed
        try:
            row = timer.due(roots, inputs)
        except Exception:  # sizes of a trace, nodes that hide their names: interpreted, if the engine accepts them
            return None
        if row is None:
            return None

        def after(seconds: float) -> None:
            self.timed_in_eager += 1
            replaying.report.passes += 1
            with contextlib.suppress(Exception):
                timer.ran_in_eager(row, roots, inputs, seconds)

        return after

    def ended(self, seconds: float) -> None:
        if self._timed is not None:
            self._timed.ended(seconds)

    def _interpreted(self, times: PassTimes, seconds: float) -> None:
        """Note the seconds of the pass just interpreted; inf if they mean nothing. ``times``: of passes that look like
        it."""
        if self._timed is not None:
            self._timed.interpreted(times, seconds)

    def interpret(self, replaying: Replaying, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        self.recorded += 1
        if not replaying.table.knows(structure):
            return replaying.interpret(structure, operands)
        recorded_structure = self._recorded_structure(structure.tape, operands)
        observation = Observation.of(operands, structure.tape)
        kind = observation.kind()
        examples = (
            recorded_structure.examples.setdefault(kind, [])
            if len(recorded_structure.examples) < _MAX_PASS_KINDS or kind in recorded_structure.examples
            else None
        )
        if examples is not None and _is_worth_keeping(
            observation, [o for o, _ in examples], recorded_structure.observations
        ):
            example = ExamplePass(
                _copy_inputs(structure.tape, operands.inputs),
                tuple(t.shape for t in observation.inputs),
                observation.sizes,
                times=recorded_structure.times_of(observation),
            )
            results, seconds = _interpret_and_copy(replaying, structure, operands, example)
            self._interpreted(example.times, math.inf)
            examples[1:] = [(observation, example)]
        else:
            start = time.perf_counter()
            results = replaying.interpret(structure, operands)
            seconds = time.perf_counter() - start
            self._interpreted(recorded_structure.times_of(observation), seconds)
        recorded_structure.seconds = min(recorded_structure.seconds, seconds)
        if observation in recorded_structure.observations or len(recorded_structure.observations) < _MAX_OBSERVATIONS:
            # Not for a pass that raised
            recorded_structure.observations[observation] = recorded_structure.observations.get(observation, 0) + 1
        else:
            recorded_structure.further += 1
        return results

    def _recorded_structure(self, tape: Tape, operands: Operands) -> RecordedStructure:
        fingerprint = tape.fingerprint()
        if fingerprint not in self.structures:
            self.structures[fingerprint] = RecordedStructure(
                tape,
                line=origin.line(),
            )
        return self.structures[fingerprint]


def _interpret_and_copy(
    replaying: Replaying, structure: Structure, operands: Operands, example: ExamplePass
) -> tuple[list[torch.Tensor | None], float]:
    """Return the results, and the seconds without the copies."""
    tape, seconds = structure.tape, 0.0
    run = replaying.interpreter(operands)
    for op in tape.ops:
        start = time.perf_counter()
        run.step(op)
        seconds += time.perf_counter() - start
        for number in op.results:
            if number >= 0:  # copied before the next operation: a hook may change it in place
                example.values[number] = _copy(run.values[number])
    return [run.get(o) for o in tape.outputs], seconds


def _is_worth_keeping(
    observation: Observation, observations: Sequence[Observation], counts: Mapping[Observation, int]
) -> bool:
    """Return whether to keep the values of this pass. Two passes of a kind are kept: the first, and the one that
    differs from it in the most sizes. Of equal ones the largest frequent one is kept, since passes are timed at these
    sizes."""
    if not observations:
        return True
    first, times = observations[0].every_size(), counts.get(observation, 0)

    def differences(other: Observation) -> int:
        return sum(a != b for a, b in zip(other.every_size(), first, strict=True))

    more = differences(observation) - differences(observations[-1])
    if times == 0:
        return more > 0
    if times != _TIMES_SEEN or observation in observations or more < 0:
        return False
    return counts.get(observations[-1], 0) < _TIMES_SEEN or (
        more == 0 and len(observations) > 1 and sum(observation.every_size()) > sum(observations[-1].every_size())
    )


def _copy_inputs(tape: Tape, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of the tensors that computing operations read."""
    read = {s.index for op in tape.ops if op.kind != "accumulate" for s in slots(op.operands) if s.kind == "input"}
    out = {}
    for i in sorted(read):
        copy = _copy(inputs[i])
        assert copy is not None
        out[i] = copy
    return out


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy with the same strides, including 0 for expanded dimensions."""
    if tensor is None:
        return None
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        return plain.clone()
    small = (
        plain[
            tuple(
                slice(0, 1) if s == 0 and n > 1 else slice(None)
                for n, s in zip(plain.shape, plain.stride(), strict=True)
            )
        ]
        if plain.dim()
        else plain
    )
    return (
        torch.empty_strided(small.shape, small.stride(), dtype=plain.dtype, device=plain.device)
        .copy_(small)
        .expand(plain.shape)
    )
