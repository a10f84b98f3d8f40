"""``record(path)``: the backward passes of an unmodified script, compiled into a package when the context closes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.loader import load
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of
from aot_backward_runtime.passes import origin
from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

from ..packaging.package_writer import check_destination
from ..packaging.tuning import tune_of
from .observed_replay import ObservedReplay
from .optimizer_steps.observed_steps import ObservedSteps
from .processes.ranks import Ranks, ranks_here
from .recorded_structure import DEFAULT_ENTRY, PassTimes
from .timed_passes import Row, TimedPasses

Asked = tuple[Row, Sequence[Any], Sequence[Any]]
"""A row that a pass belongs to, its roots and its inputs."""


class Recording(ObservedReplay):
    """The context of :func:`record`. ``report`` and ``tapes`` as of a replay; ``recorded``: how many passes were interpreted;
    ``in_eager``: how many were timed in eager instead; ``slower``: what is slower compiled, in words;
    ``compiled_steps``: the optimizers of which a kind of steps was compiled. Of several processes one ``writes``, whose ``of_ranks`` says in words
    what the others gave."""

    def __init__(self, path: Path | None, entry: str, target: str, progress: Progress | None, max_structures: int, tune: str, optimizer: bool = True):
        if path is not None:
            check_destination(path)
        package = None
        if path is not None and path.exists():
            _refuse_several_targets(path)  # before the script runs, not after
            package = load(path)
        if package is not None and entry not in package.entries:
            package = None
        super().__init__(package, entry, max_structures=max_structures, always=True, optimizer=optimizer)
        self.tune, self.timed = tune, TimedPasses()
        self.path, self.entry, self.target, self.progress = path, entry, target, progress
        self.recorded = 0
        self.in_eager = 0
        self.slower: list[str] = []
        self.compiled_steps: list[str] = []
        self.ranks = ranks_here(path) if path is not None else None
        self.writes = True
        self.of_ranks: list[str] = []
        self.steps = ObservedSteps() if optimizer and target.startswith("cpu") else None

    def intercepts_steps(self) -> bool:
        return self.steps is not None

    def step_in_eager(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        if self.steps is not None:
            self.steps.observe(optimizer, origin.line())

    def prefers_eager(self, roots: Sequence[Any], inputs: Sequence[Any]) -> Asked | None:
        if self.tune == "none" or not self.target.startswith("cpu"):  # on a GPU a pass has only been queued when the call returns
            return None
        if self.inside:  # within a hook of another pass, which is timed with it
            return None
        try:
            row, known = self.timed.due(roots, inputs)
        except Exception:  # sizes of a trace, nodes that hide their names: interpreted, if the engine takes them
            return None
        if known:
            self._set_verbose_logging(False)  # it would be timed too
        return None if row is None else (row, roots, inputs)

    def ran_in_eager(self, what: Asked, seconds: float) -> None:
        self.in_eager += 1
        with contextlib.suppress(Exception):
            self.timed.ran_in_eager(*what, seconds)

    def interpreted(self, times: PassTimes, seconds: float) -> None:
        self.timed.interpreted(times, seconds)

    def ended(self) -> None:
        self.timed.ended(self.reached - self.began + time.perf_counter() - self.left, self.reduced)

    def _missed(self, reason: str) -> None:
        self.recorded += 1

    def __enter__(self) -> Recording:
        with contextlib.ExitStack() as undo:
            if self.ranks is not None:
                self.ranks.enter()
                undo.callback(self.ranks.leave)
            super().__enter__()
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        kind = error[0]
        done = kind is None or (isinstance(kind, type) and issubclass(kind, SystemExit))  # a script that calls sys.exit has ended, too
        for words, reason in self.steps.refused.items() if self.steps is not None else ():
            self.skipped[f"the optimizer step of {words}: {reason}"] += 1
        if self.ranks is not None:
            try:
                self._compile_of_ranks(self.ranks, done)
            finally:
                self.ranks.leave()
        elif done and self.path is not None:
            self._compile(self.path)

    def _compile(self, path: Path) -> None:
        if not self.observed_any and not (self.steps is not None and self.steps.kinds):
            return
        from .compile import add_passes

        structures = self.structures_to_compile()
        added = add_passes(path, self.entry, structures, steps=self.steps, target=self.target, progress=self.progress, tune=self.tune)
        self.skipped += added.skipped
        self.slower += added.slower
        self.compiled_steps += added.steps

    def _compile_of_ranks(self, ranks: Ranks, done: bool) -> None:
        """What all processes saw, where this is the one that writes."""
        assert self.path is not None
        self.writes = False
        if not done and not ranks.failed_for_another():
            ranks.fail()
            return
        gathered = ranks.gather(self.structures, self.recorded)
        if gathered is None:
            return
        self.writes, self.of_ranks = True, gathered.lines
        self.structures = gathered.structures
        self.skipped += gathered.skipped
        try:
            self._compile(self.path)
            for file in gathered.files:
                from .miss_file import compile_misses

                self.skipped += compile_misses(file, self.path, entry=self.entry, target=self.target, progress=self.progress)
        finally:
            ranks.say_done()


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    entry: str = DEFAULT_ENTRY,
    target: str = "cpu",
    progress: Progress | None = None,
    max_structures: int = MAX_STRUCTURES,
    tune: str | None = None,
    optimizer: bool = True,
) -> Recording:
    """A context in which every backward pass is observed; when it closes, those that are new are compiled and added to the package at ``path``.

    Inside, passes are interpreted with eager's gradients; those that an existing package has a variant for run from it. Sizes that changed
    between passes become dynamic, so let the script see at least two batch sizes. Each compiled pass is compared with the recorded values, and
    left out, with the reason in ``skipped``, where it differs or cannot be traced. ``path=None``: nothing is compiled, only :attr:`tapes` are
    kept. Nothing is written where the block ends by an exception. Needs memory for two passes of each structure. After ``max_structures`` new
    structures, further ones are left to eager, and those that came only once are not compiled: ``skipped`` says so.

    Steps of ``torch.optim`` optimizers on a CPU, of a kind that comes more than once after the one that makes the state, are compiled too, unless
    ``optimizer`` is False.

    ``tune``, on a CPU: "quick" times up to forty passes of each kind in eager, between the others, and each compiled pass beside its tape
    interpreted ("full" takes longer for that; "none" times nothing); by default what the environment variable ``AOT_BACKWARD_TUNE`` says, else
    "quick". What was slower compiled than by eager is in the package all the same, ``slower`` says which, and a replay leaves such passes to eager.
    """
    return Recording(Path(path) if path is not None else None, entry, target, progress, max_structures, tune_of(tune), optimizer)


def _refuse_several_targets(path: Path) -> None:
    labels = [t.label for t in targets_of(open_package(path).manifest)]
    if len(labels) > 1:
        raise ExportError(f"{path} is for several targets ({', '.join(labels)}), and passes are added to a package for one: record into a new file")
