"""Trace, compile and check recorded structures, and add them to a package as variants."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aot_backward_exporters.graph import Artifact
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError, InputError, PackageError
from aot_backward_runtime.format.manifest import PassSpec
from aot_backward_runtime.passes.recorded_times import is_served

from ..capture.shapes.symbolic_shapes import Sizes
from . import pass_speed
from .added import Added, Contents
from .infer_shapes import fake_mode
from .interrupts import Interrupts
from .optimizer_steps.compiled_steps import compile_steps, slower
from .optimizer_steps.observed_steps import ObservedSteps
from .package_update import PackageUpdate, locked
from .pass_check import checked, libraries_of
from .pass_graphs import graph_and_segments, graph_operands, graph_specs
from .recorded_structure import RecordedStructure
from .selection import Batches, select
from .trace import TracedProgram, trace_structures

_TOO_FEW = "too few passes of one size to time it against eager; record 20 or more of one size, or keep untimed code with --tune none"


def add_passes(
    path: Path,
    entry: str,
    structures: Mapping[str, RecordedStructure],
    added: Added,
    *,
    steps: ObservedSteps | None = None,
    target: str = "cpu",
    progress: Progress | None = None,
    tune: str = "none",
    min_seen: int = 1,
    time_limit: float | None = None,
) -> None:
    """Compile ``structures`` (by fingerprint) and ``steps``, and add them to the ``replay`` entry of the package at
    ``path``. ``added`` has the outcome.

    Structures with ``min_seen`` passes, or with a variant in the package, are compiled in batches, the most expensive
    first. Each batch is in the file before the next begins. After ``time_limit`` seconds no further one begins. A
    :class:`KeyboardInterrupt` is raised once the checked part is written; a second one, during the write, at once.

    A structure that cannot be traced or compiled, or differs from the recorded values, is left out. Passes that were
    timed while recording are timed again (for :data:`~aot_backward.packaging.tuning.SECONDS`) unless ``tune`` is
    "none". Raise :class:`ExportError` if the package there is for another torch or target, or cannot be written.
    """
    with locked(path), tempfile.TemporaryDirectory(prefix="aot-backward-") as folder, Interrupts() as interrupts:
        say = interrupts.watching(progress or silent)
        package = PackageUpdate.read(path, entry, target)
        timed = tune != "none" and target.startswith("cpu")
        selection = select(structures, min_seen, lambda fingerprint: bool(package.variants(fingerprint)), timed=timed)
        added.skipped.update(f"{_TOO_FEW}{structure.location()}" for structure in selection.untimed.values())
        added.settled |= selection.untimed.keys()
        added.seldom, added.chosen = selection.seldom, len(selection.structures) + len(selection.untimed)
        new = [fingerprint for fingerprint in structures if not package.variants(fingerprint)]
        job = _Job(package, added, target, tune, timed, say, Path(folder), new)
        batches = Batches(time_limit)
        try:
            for batch in batches.of(list(selection.structures.items())):
                stage = _in_words([s for _, s in batch], added)
                say(stage, 0, len(batch))
                mode = fake_mode()
                job.compile(trace_structures(dict(batch), package.variants, mode, added.skipped, say), mode)
                added.settled |= {fingerprint for fingerprint, _ in batch}
                say(stage, len(batch), len(batch))
            if steps is not None and not (selection.structures and batches.is_over):
                job.compile_steps(steps)
            elif steps is not None and (steps.repeated or steps.clippings.repeated):
                added.skipped["steps of optimizers: the time limit was reached"] += 1
            interrupts.raise_lost()
            if added.unfinished:
                added.stopped = "time limit"
        except KeyboardInterrupt:
            interrupts.noticed()
            job.write()
            raise
        finally:
            job.end()


def _in_words(batch: Sequence[RecordedStructure], added: Added) -> str:
    """Return the progress text up to a batch: ``compile 4 of 11 structures (called at train.py:12)``."""
    lines = list(dict.fromkeys(s.line for s in batch if s.line))
    location = f" (called at {lines[0]}{', …' if len(lines) > 1 else ''})" if lines else ""
    noun = "structure" if added.chosen == 1 else "structures"
    return f"compile {len(added.settled) + len(batch)} of {added.chosen} {noun}{location}"


class _Job:
    """An addition to a package, in parts; the correct results of each part are written when it ends. New structures
    keep the order in which they were met, which is the same for every recording."""

    def __init__(
        self,
        package: PackageUpdate,
        added: Added,
        target: str,
        tune: str,
        timed: bool,
        say: Progress,
        folder: Path,
        new: Sequence[str],
    ):
        """``timed``: whether compiled code is kept only if it was compared with eager's time. ``new``: fingerprints
        that the package does not have, in order."""
        self.package, self.added = package, added
        self._target, self._tune, self._timed, self._say, self._folder = target, tune, timed, say, folder
        self._parts = itertools.count()
        self._places = {fingerprint: place for place, fingerprint in enumerate(new)}
        self._next: tuple[PackageUpdate, Contents] | None = None  # the next state of the file

    def compile(self, programs: list[TracedProgram], mode: Any) -> None:
        """Compile, check and time ``programs``."""
        programs = _with_graphs(programs, mode, self.added.skipped)
        programs, artifacts = _compile(programs, self._subfolder(), mode, self._target, self._say, self.added.skipped)
        done = 0
        for fingerprint, group in itertools.groupby(programs, key=lambda program: program.fingerprint):
            passes: list[tuple[TracedProgram, PassSpec]] = []
            for program in group:
                self._say("check", done, len(programs))
                spec = self._checked(program, artifacts, mode)
                if spec is not None and spec.speed is not None and not is_served(spec.speed):
                    self.added.slower.append(pass_speed.slower(program, spec.speed))
                elif spec is not None and spec.speed is None and self._timed:
                    self.added.skipped[f"{_TOO_FEW}{program.structure.location()}"] += 1
                elif spec is not None:
                    passes.append((program, spec))
                done += 1
            if passes:
                package, contents = self._next or (self.package, self.added.contents)
                variants = contents.variants | {(fingerprint, p.name) for p, _ in passes}
                self._next = (
                    package.with_passes(passes, artifacts, self._places),
                    replace(contents, variants=variants),
                )
        self._say("check", len(programs), len(programs))
        self.write()

    def compile_steps(self, observed: ObservedSteps) -> None:
        steps = list(
            compile_steps(observed, self._subfolder(), self._target, self._say, self._tune, self.added.skipped)
        )
        self.added.slower += [slower(step.spec) for step in steps if not is_served(step.spec.speed)]
        if faster := [step for step in steps if is_served(step.spec.speed)]:
            contents = self.added.contents
            self._next = (
                self.package.with_steps(faster),
                replace(contents, steps=(*contents.steps, *(step.name for step in faster))),
            )
        self.write()

    def write(self) -> None:
        """Write the results that are not in the file yet. After an interrupt, it can be called again."""
        if self._next is None:
            return
        package, contents = self._next
        self._say("write", 0, 1)
        package.write()
        self.package, self.added.contents = package, contents
        self._next = None
        self._say("write", 1, 1)

    def end(self) -> None:
        if self.added.contents:
            self.package.say_operators()

    def _subfolder(self) -> Path:
        folder = self._folder / str(next(self._parts))
        folder.mkdir()
        return folder

    def _checked(self, program: TracedProgram, artifacts: Mapping[str, Artifact], mode: Any) -> PassSpec | None:
        """Return the program's spec, timed; None if its results differ from the recorded ones, with the reason in
        ``skipped``."""
        try:
            sizes = program.shapes.package_sizes(mode.shape_env)
            _state_graphs(program, sizes)
            libraries = libraries_of(program, artifacts)
            spec = checked(program, program.spec(sizes), libraries)
            speed = pass_speed.measure(program, spec, libraries, self._tune, self._target) if self._timed else None
            return replace(spec, speed=speed)
        except (ExportError, InputError, PackageError, RuntimeError) as error:  # native code raises RuntimeError
            self.added.skipped[f"{program.name}: {str(error).partition(chr(10))[0]}{program.structure.location()}"] += 1
            return None


def _with_graphs(programs: list[TracedProgram], mode: Any, skipped: Counter[str]) -> list[TracedProgram]:
    """Return the programs with their graphs and segments. Skip programs with a size that the package format cannot
    state."""
    out = []
    for program in programs:
        try:
            sizes = program.shapes.package_sizes(mode.shape_env)
            traced = iter(program.traced)
            for number, p in enumerate(program.partitions):
                graph, segments = graph_and_segments(
                    f"{program.name}.{number}", p, next(traced) if p.compiled else None, sizes
                )
                program.segments += segments
                program.graphs += [graph] if graph is not None else []
            out.append(program)
        except ExportError as error:
            skipped[f"{program.name}: {error}"] += 1
    return out


def _compile(
    programs: list[TracedProgram], folder: Path, mode: Any, target: str, say: Progress, skipped: Counter[str]
) -> tuple[list[TracedProgram], dict[str, Artifact]]:
    """Compile all graphs at once, and return them with their programs. If the compiler refuses one, drop its program
    and try the others again."""
    for attempt in range(len(programs)):
        graphs = [g for p in programs for g in p.graphs]
        if not graphs:
            break
        subfolder = folder / str(attempt)
        subfolder.mkdir()
        try:
            return programs, compile.compile_graphs(
                graphs, folder=subfolder, fake_mode=mode, target=targets.parsed(target)[0], progress=say
            )
        except ExportError as error:
            failed_program = next(
                (p for p in programs if any(str(error).startswith(f"{g.name}:") for g in p.graphs)), None
            )
            if failed_program is None:
                raise
            skipped[str(error)] += 1
            programs = [p for p in programs if p is not failed_program]
    return programs, {}


def _state_graphs(program: TracedProgram, sizes: Sizes) -> None:
    """Write the sizes of the program's graphs again, since compiling may have added guards and replacements, and the
    graphs as data."""
    for n, graph in enumerate(program.graphs):
        traced = next(t for t in program.traced if t.name == graph.name)
        inputs, outputs = graph_specs(traced, sizes)
        program.graphs[n] = graph = replace(graph, inputs=inputs, outputs=outputs)
        with contextlib.suppress(ExportError):  # without the graph as data the package works, but cannot be rebuilt
            program.portables[graph.name] = graph_json.graph_to_bytes(graph, sizes.worded, sizes.hints())
        operands = graph_operands(traced, sizes)
        program.segments = [replace(s, operands=operands) if s.library == graph.name else s for s in program.segments]
