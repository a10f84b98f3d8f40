"""Recorded structures -> variants in a package: traced, compiled, checked, added to what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aot_backward_exporters.graph import Artifact
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError, InputError, PackageError

from ..capture.shapes.symbolic_shapes import Sizes
from . import pass_speed
from .infer_shapes import fake_mode
from .optimizer_steps.compiled_steps import compile_steps, slower
from .optimizer_steps.observed_steps import ObservedSteps
from .package_update import PackageUpdate, locked
from .pass_check import checked, libraries_of
from .pass_graphs import graph_and_segments, graph_operands, graph_specs
from .recorded_structure import RecordedStructure
from .trace import TracedProgram, trace_structures


@dataclass
class Added:
    """``skipped``: why passes were left out, counted. ``slower``: those whose code is slower than eager, or than interpreting them, in words.
    ``steps``: the optimizers of which a kind of steps was added."""

    skipped: Counter[str] = field(default_factory=Counter)
    slower: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


def add_passes(
    path: Path,
    entry: str,
    structures: Mapping[str, RecordedStructure],
    *,
    steps: ObservedSteps | None = None,
    target: str = "cpu",
    progress: Progress | None = None,
    tune: str = "none",
) -> Added:
    """Compiles ``structures`` (by fingerprint) and ``steps`` and adds them to the ``replay`` entry of the package at ``path``.

    What could not be traced or compiled, or differs from the recorded values, is left out. What was timed while it was recorded is timed
    (:data:`~aot_backward.packaging.tuning.SECONDS` of ``tune``). Raises :class:`ExportError` where the package there is for another torch or
    target, or cannot be written.
    """
    say = progress or silent
    mode = fake_mode()
    with locked(path):
        package = PackageUpdate.read(path, entry, target)
        added = Added()
        programs = trace_structures(structures, package.variants, mode, added.skipped, say)
        _add(package, programs, mode, target, added, say, tune, steps)
    return added


def add_programs(
    path: Path, entry: str, programs: list[TracedProgram], mode: Any, *, target: str = "cpu", progress: Progress | None = None
) -> Counter[str]:
    """:func:`add_passes` of what is traced already, in the fake mode ``mode``."""
    added = Added()
    with locked(path):
        _add(PackageUpdate.read(path, entry, target), programs, mode, target, added, progress or silent)
    return added.skipped


def _add(
    package: PackageUpdate,
    programs: list[TracedProgram],
    mode: Any,
    target: str,
    added: Added,
    say: Progress,
    tune: str = "none",
    steps: ObservedSteps | None = None,
) -> None:
    """Compiles, checks and times ``programs`` and ``steps``, and writes the package with those that are right; nothing is written where none is."""
    right, skipped = [], added.skipped
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        programs = _with_graphs(programs, mode, skipped)
        programs, artifacts = _compile(programs, Path(folder), mode, target, say, skipped)
        for done, program in enumerate(programs):
            say("check", done, len(programs))
            try:
                sizes = program.shapes.package_sizes(mode.shape_env)
                _state_graphs(program, sizes)
                libraries = libraries_of(program, artifacts)
                spec = checked(program, program.spec(sizes), libraries)
                if tune != "none" and (speed := pass_speed.measure(program, spec, libraries, tune, target)) is not None:
                    spec = dataclasses.replace(spec, speed=speed)
                    added.slower += pass_speed.slower(program, speed)
                right.append((program, spec))
            except (ExportError, InputError, PackageError, RuntimeError) as error:  # the last from native code
                skipped[f"{program.name}: {str(error).partition(chr(10))[0]}{program.structure.location()}"] += 1
        say("check", len(programs), len(programs))
        compiled = list(compile_steps(steps, Path(folder), target, say, tune, skipped)) if steps is not None else []
        added.slower += [words for step in compiled for words in slower(step.spec)]
        added.steps += [step.spec.optimizer.rpartition(".")[2] for step in compiled]
        if right or compiled:
            package.add(right, artifacts)
            package.add_steps(compiled)
            say("write", 0, 1)
            package.write()
            say("write", 1, 1)


def _with_graphs(programs: list[TracedProgram], mode: Any, skipped: Counter[str]) -> list[TracedProgram]:
    """The programs with their graphs and segments, but for those with a size that the package format cannot state."""
    out = []
    for program in programs:
        try:
            sizes = program.shapes.package_sizes(mode.shape_env)
            traced = iter(program.traced)
            for number, p in enumerate(program.partitions):
                graph, segments = graph_and_segments(f"{program.name}.{number}", p, next(traced) if p.compiled else None, sizes)
                program.segments += segments
                program.graphs += [graph] if graph is not None else []
            out.append(program)
        except ExportError as error:
            skipped[f"{program.name}: {error}"] += 1
    return out


def _compile(
    programs: list[TracedProgram], folder: Path, mode: Any, target: str, say: Progress, skipped: Counter[str]
) -> tuple[list[TracedProgram], dict[str, Artifact]]:
    """All graphs at once, and the programs to which they belong. One that the compiler refuses drops its program, and the others are tried again."""
    for attempt in range(len(programs)):
        graphs = [g for p in programs for g in p.graphs]
        if not graphs:
            break
        subfolder = folder / str(attempt)
        subfolder.mkdir()
        try:
            return programs, compile.compile_graphs(graphs, folder=subfolder, fake_mode=mode, target=targets.parsed(target)[0], progress=say)
        except ExportError as error:
            refused = next((p for p in programs if any(str(error).startswith(f"{g.name}:") for g in p.graphs)), None)
            if refused is None:
                raise
            skipped[str(error)] += 1
            programs = [p for p in programs if p is not refused]
    return programs, {}


def _state_graphs(program: TracedProgram, sizes: Sizes) -> None:
    """Writes the sizes of the program's graphs anew, since compiling may have added guards and replacements, and the graphs as data."""
    for n, graph in enumerate(program.graphs):
        traced = next(t for t in program.traced if t.name == graph.name)
        inputs, outputs = graph_specs(traced, sizes)
        program.graphs[n] = graph = dataclasses.replace(graph, inputs=inputs, outputs=outputs)
        with contextlib.suppress(ExportError):  # without the graph as data the package works, and cannot be rebuilt
            program.portables[graph.name] = graph_json.graph_to_bytes(graph, sizes.worded, sizes.hints())
        operands = graph_operands(traced, sizes)
        program.segments = [dataclasses.replace(s, operands=operands) if s.library == graph.name else s for s in program.segments]
