"""Time a compiled pass against its interpreted tape, and estimate its time in the script.

The whole pass only ran in the script. There eager and interpreted passes were timed (``timed_passes.py``). Here the
compiled pass and its interpreted tape are timed in turns, on the recorded values. The compiled pass's time in the
script follows from the two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from aot_backward_runtime.compatibility import processor_name
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import PassSpec, Speed, StructureSpec, Timing
from aot_backward_runtime.native.guards import dtype_of
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.passes.pass_contract import Operands, PassContract
from aot_backward_runtime.passes.recorded_times import AROUND, SLOWER, sizes_in_words
from aot_backward_runtime.passes.structure import Structure
from aot_backward_runtime.tapes.interpreter import Run
from aot_backward_runtime.tapes.tape import CALLS_OUT, Op

from ..capture.ambient import current_ambient
from ..checks import stopwatch
from ..packaging.tuning import SECONDS
from .pass_check import holds_for
from .recorded_structure import ExamplePass
from .trace import TracedProgram

EAGER, INTERPRETED, COMPILED = "eager", "interpreted", "compiled"
log = logging.getLogger("aot_backward")


def measure(
    program: TracedProgram, spec: PassSpec, libraries: Mapping[str, Library], tune: str, target: str
) -> Speed | None:
    """Return microseconds of a whole pass at the recorded sizes; None if too few passes were timed."""
    tape = program.structure.tape
    calls = [op for op in tape.ops if op.kind in CALLS_OUT]
    times: dict[str, list[float]] = {EAGER: [], COMPILED: []}
    labels: list[str] = []
    for example in program.examples:
        pass_times = example.times
        values = PassContract(spec).symbol_values(example.shapes, example.sizes)
        if not pass_times.enough or not holds_for(spec, example, values):
            continue
        try:
            local_times = stopwatch.microseconds(_calls(program, spec, libraries, example), SECONDS, sample=0)
        except Exception as error:  # a failed timing does not make the pass wrong
            log.info("%s could not be timed: %s", program.name, error)
            continue
        engine, interpreted, eager = pass_times.engine * 1e6, pass_times.interpreted * 1e6, pass_times.eager * 1e6
        if calls:  # only the script's time includes these calls
            compiled = max(interpreted - local_times[INTERPRETED] + local_times[COMPILED], local_times[COMPILED])
        else:
            compiled = interpreted * local_times[COMPILED] / local_times[INTERPRETED]
        for name, microseconds in ((EAGER, eager), (COMPILED, engine + compiled)):
            times[name].append(round(microseconds, 1))
        labels.append(sizes_in_words(values))
    if not labels:
        return None
    return Speed(
        chosen=_fastest(times),
        timings=tuple(Timing(name, tuple(each)) for name, each in times.items()),
        sizes=tuple(labels),
        threads=torch.get_num_threads(),
        processor=processor_name(),
        tune=tune,
        target=target,
        torch=torch.__version__,
        others=stopwatch.others_running(),
    )


def _fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the faster of eager and compiled, by the geometric mean over the sizes."""
    return COMPILED if math.prod(SLOWER * t + AROUND for t in times[COMPILED]) < math.prod(times[EAGER]) else EAGER


def slower(program: TracedProgram, speed: Speed) -> str:
    """Return the times of a pass that is not faster when compiled, as text."""
    timings = ", ".join(f"{name} {microseconds:,.0f} µs" for name, microseconds in speed.means.items())
    return f"{program.name}: {timings}{program.structure.location()}"


def _calls(
    program: TracedProgram, spec: PassSpec, libraries: Mapping[str, Library], example: ExamplePass
) -> dict[str, stopwatch.Call]:
    """Return the pass, interpreted and compiled, as calls on the recorded values and separate leaves."""
    tape = program.structure.tape
    device = spec.inputs[0].device if spec.inputs else "cpu"
    constants = {key: tensor for graph in program.graphs for key, tensor in graph.constants.values()}
    local_spec = replace(spec, ambient=current_ambient(device))
    structure = Structure(
        tape, StructureSpec(program.fingerprint, tape.nodes, len(tape.ops), (local_spec,)), libraries, constants
    )
    leaves = {op.operands[0].index for op in tape.ops if op.kind == "accumulate"}
    values = PassContract(spec).symbol_values(example.shapes, example.sizes)
    inputs = []
    for i, input_spec in enumerate(spec.inputs):
        recorded_input = example.inputs.get(i)
        if recorded_input is None:
            strides = tuple(evaluate(s, values) for s in input_spec.stride)
            recorded_input = torch.empty_strided(
                example.shapes[i], strides, dtype=dtype_of(input_spec.dtype), device=input_spec.device
            )
        inputs.append(
            recorded_input.detach().requires_grad_(input_spec.requires_grad) if i in leaves else recorded_input
        )
    operands = Operands(inputs, list(example.sizes), list(program.observation.scalars), (), ())

    def interpreted() -> None:
        with torch.no_grad():
            _forget(inputs, leaves)
            _Recalled(operands, example).execute(tape.ops, tape.outputs)

    def compiled() -> None:
        with torch.no_grad():
            _forget(inputs, leaves)
            match = structure.match(operands)
            match.variant.check_leaves(operands)
            match.variant.execute(_Recalled(operands, example), match, _refuse)

    return {INTERPRETED: interpreted, COMPILED: compiled}


class _Recalled(Run):
    """A pass in which hooks and custom functions return their recorded results."""

    def __init__(self, operands: Operands, example: ExamplePass):
        super().__init__(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed)
        self._example = example

    def step(self, op: Op) -> None:
        if op.kind in CALLS_OUT:
            for number in op.results:
                if number >= 0:
                    self.values[number] = self._example.values[number]
        else:
            super().step(op)


def _forget(inputs: Sequence[torch.Tensor], leaves: Iterable[int]) -> None:
    for i in leaves:
        inputs[i].grad = None


def _refuse(reason: str) -> None:
    raise ExportError(reason)
