"""Trace recorded structures into programs, one for each variant that the package will get."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import PassSpec, Segment, Verdict

from ..capture.shapes.symbolic_shapes import Sizes
from .infer_shapes import Shapes, group_observations, make_symbolic
from .observation import Observation
from .partition_tape import OPAQUE, Partition, partition_tape, sparse_operations
from .pass_graphs import TracedPartition, TraceError, assume_results, input_name, trace_partition
from .recorded_structure import ExamplePass, RecordedStructure

_MAX_VARIANTS = 8  # of one structure: bounds the time of compiling and the size of a package; a guess
# Kinds of nodes that are not compiled because they read their tensors' values, such as the lengths of packed sequences;
# a guess
_MAX_OPAQUE = 4
_PREFIX = "pass"  # of the graphs' names


@dataclass
class TracedProgram:
    """One variant: its traced partitions, then its compiled parts (``graphs``, ``portables``, ``segments``)."""

    fingerprint: str
    name: str
    structure: RecordedStructure
    shapes: Shapes
    observation: Observation
    partitions: list[Partition]
    traced: list[TracedPartition]  # of the compiled partitions, in their order
    examples: list[ExamplePass]
    graphs: list[Graph] = field(default_factory=list)
    portables: dict[str, bytes] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)

    def spec(self, sizes: Sizes) -> PassSpec:
        """Return the variant as the package states it; not checked yet."""
        return PassSpec(
            inputs=tuple(
                sizes.spec(input_name(self.structure.tape, i), fake, tensor.requires_grad)
                for i, (fake, tensor) in enumerate(zip(self.shapes.inputs, self.observation.inputs, strict=True))
            ),
            sizes=tuple(sizes.size(s) for s in self.shapes.sizes),
            scalars=self.observation.scalars,
            symbols=sizes.symbols,
            guards=sizes.guards(self.shapes.symbols.keys()),
            ambient=self.observation.ambient,
            verdict=Verdict("not run"),
            segments=tuple(self.segments),
        )


def trace_structures(
    structures: Mapping[str, RecordedStructure],
    known_variants: Callable[[str], Sequence[PassSpec]],
    fake_mode: Any,
    skipped: Counter[str],
    say: Progress,
) -> list[TracedProgram]:
    """Trace ``structures``, by fingerprint. ``known_variants``: variants that the package already has, by fingerprint.
    ``timed``: whether passes that were not timed often enough in the script are left out."""
    programs: list[TracedProgram] = []
    for done, (fingerprint, structure) in enumerate(structures.items()):
        say("trace", done, len(structures))
        programs += _trace_structure(fingerprint, structure, known_variants(fingerprint), fake_mode, skipped)
    say("trace", len(structures), len(structures))
    return programs


def _trace_structure(
    fingerprint: str, structure: RecordedStructure, variants: Sequence[PassSpec], fake_mode: Any, skipped: Counter[str]
) -> list[TracedProgram]:
    out = []
    observations = structure.observations
    by_frequency = sorted(
        group_observations(list(observations), variants), key=lambda g: -sum(observations.get(o, 0) for o in g)
    )
    for number, group in enumerate(by_frequency, len(variants)):
        name = f"{_PREFIX}.{fingerprint[:12]}.{number}"
        if number >= _MAX_VARIANTS:
            skipped[
                f"{name}: one structure has passes of more than {_MAX_VARIANTS} kinds (kinds differ in layouts, dtypes, or sizes that are 0 or 1)"
            ] += 1
            continue
        try:
            out.append(_trace_variant(fingerprint, name, structure, group, fake_mode))
        # The engine's formulas run on fake tensors, and any operator may lack an implementation for them
        except Exception as error:
            node = error.node if isinstance(error, TraceError) else None
            cause = error.__cause__ or error if isinstance(error, TraceError) else error
            first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
            words = first if isinstance(cause, ExportError) else f"could not be traced: {type(cause).__name__}: {first}"
            skipped[f"{name}: {words}{structure.location(node)}"] += 1
    return out


def _trace_variant(
    fingerprint: str, name: str, structure: RecordedStructure, group: Sequence[Observation], fake_mode: Any
) -> TracedProgram:
    observation = group[0]
    _refuse_unsupported(structure, observation)
    shapes = make_symbolic(group, fake_mode, name.replace(".", "_"))
    examples = [e for _, e in structure.examples.get(observation.kind(), [])]
    tape, single = structure.tape, sparse_operations(structure.tape, examples)
    opaque = set(OPAQUE)
    while True:
        partitions = partition_tape(tape, observation.hook_groups, opaque, single)
        values: dict[int, Any] = {}
        traced: list[TracedPartition] = []
        try:
            for p in partitions:
                if p.compiled:
                    traced.append(
                        trace_partition(tape, p, shapes, values, observation.scalars, observation.ambient, fake_mode)
                    )
                else:
                    assume_results(tape.ops[p.ops[0]], examples, values, shapes, fake_mode)
        except TraceError as error:  # a node may fail on fake tensors: call it uncompiled
            if not error.name or len(opaque) >= _MAX_OPAQUE:
                raise
            opaque.add(error.name)
            continue
        return TracedProgram(fingerprint, name, structure, shapes, observation, partitions, traced, examples)


def _refuse_unsupported(structure: RecordedStructure, observation: Observation) -> None:
    if not all(map(math.isfinite, observation.scalars)):
        raise ExportError(f"the pass has the scalars {observation.scalars}; a package can only store finite ones")
    for i, tensor in enumerate(observation.inputs):
        if tensor.unsupported:
            raise ExportError(
                f"{input_name(structure.tape, i)} is {tensor.unsupported}; a compiled pass takes plain, dense tensors. Such passes are "
                "left to PyTorch; to have them compiled, let the forward compute on plain, dense tensors there"
            )
