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
from aot_backward_runtime.optimizer_steps.compiled_clipping import Kind
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of
from aot_backward_runtime.passes import origin
from aot_backward_runtime.passes.compiled_pass import Match
from aot_backward_runtime.passes.pass_contract import Operands
from aot_backward_runtime.passes.structure import Structure
from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

from ..packaging.package_writer import check_destination
from ..packaging.tuning import tune_of
from .launcher import rank_here
from .limits.added import Added
from .limits.batches import check_time_limit
from .limits.selection import MIN_SEEN, check_min_seen, percent
from .observed_replay import ObservedReplay
from .optimizer_steps.observed_steps import ObservedSteps
from .recorded_structure import DEFAULT_ENTRY, PassTimes
from .timed_passes import Row, TimedPasses

Asked = tuple[Row, Sequence[Any], Sequence[Any]]
"""A row that a pass belongs to, its roots and its inputs."""


class Recording(ObservedReplay):
    """The context of :func:`record`. ``report`` and ``tapes`` as of a replay; ``recorded``: how many passes were interpreted;
    ``in_eager``: how many were timed in eager instead; ``added``: what was compiled when it closed, and what was not.
    ``writes``: whether this process records; of several on a machine, the first alone."""

    def __init__(
        self,
        path: Path | None,
        entry: str,
        target: str,
        progress: Progress | None,
        max_structures: int,
        tune: str,
        optimizer: bool,
        min_seen: int,
        time_limit: float | None,
    ):
        self.min_seen, self.time_limit = check_min_seen(min_seen), check_time_limit(time_limit)
        if path is not None:
            check_destination(path)
        package = None
        if path is not None and path.exists():
            _refuse_several_targets(path)  # before the script runs, not after
            package = load(path)
        if package is not None and entry not in package.entries:
            package = None
        super().__init__(package, entry, max_structures=max_structures, optimizer=optimizer)
        self.tune, self.timed = tune, TimedPasses()
        self.path, self.entry, self.target, self.progress = path, entry, target, progress
        self.recorded = 0
        self.in_eager = 0
        self.added = Added(skipped=self.skipped)
        self.writes = path is None or not rank_here()
        self.steps = ObservedSteps() if optimizer and target.startswith("cpu") else None
        self._served = self._in_eager = 0.0  # seconds of passes that the package had, as interpreted, and of those left to eager

    @property
    def slower(self) -> tuple[str, ...]:
        """What was compiled and is not in the package, since eager is as fast, in words."""
        return tuple(self.added.slower)

    @property
    def compiled_steps(self) -> tuple[str, ...]:
        """The optimizers of which a kind of steps was compiled, and the functions that clip gradients."""
        return self.added.contents.steps

    @property
    def backward_seconds(self) -> float:
        """What the backward passes of the script took, those that are recorded interpreted."""
        return self._served + self._in_eager + sum(s.backward_seconds for s in self.structures.values())

    @property
    def covered_seconds(self) -> float:
        """That part of it for which the package has code."""
        return self._served + sum(self.added.contents.variants.values())

    @property
    def coverage(self) -> str:
        """``93 %`` of the backward time."""
        return percent(self.covered_seconds, self.backward_seconds)

    def intercepts_steps(self) -> bool:
        return self.steps is not None

    def step_in_eager(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        if self.steps is not None:
            self.steps.observe(optimizer, origin.line())

    def clipping_in_eager(self, kind: Kind, gradients: list[torch.Tensor], limit: float, reason: str) -> None:
        if self.steps is not None:
            self.steps.clippings.observe(kind, gradients, limit, origin.line())

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
        self.report.passes += 1
        with contextlib.suppress(Exception):
            self.timed.ran_in_eager(*what, seconds)

    def interpreted(self, times: PassTimes, seconds: float) -> None:
        self.timed.interpreted(times, seconds)

    def ended(self) -> None:
        self.timed.ended(self.reached - self.began + time.perf_counter() - self.left)

    def was_left_to_eager(self, seconds: float) -> None:
        self._in_eager += seconds

    def _run_compiled(self, structure: Structure, operands: Operands, match: Match, binding: bool) -> list[torch.Tensor | None]:
        start = time.perf_counter()
        results = super()._run_compiled(structure, operands, match, binding)
        assert structure.spec is not None
        self._served += structure.spec.seconds or time.perf_counter() - start
        return results

    def _missed(self, reason: str) -> None:
        self.recorded += 1

    def __enter__(self) -> Recording:
        if self.writes:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.writes:
            return
        super().__exit__(*error)
        if self.steps is not None:
            for words, reason in self.steps.refused.items():
                self.skipped[f"the optimizer step of {words}: {reason}"] += 1
            for words, reason in self.steps.clippings.refused.items():
                self.skipped[f"{words}: {reason}"] += 1
        self.note_if_full()
        kind = error[0]
        ended = kind is None or (
            isinstance(kind, type) and issubclass(kind, (SystemExit, KeyboardInterrupt))
        )  # a script that calls sys.exit has, too
        if ended and self.path is not None:
            self._compile(self.path)

    def _compile(self, path: Path) -> None:
        try:
            self._compile_passes(path)
        except KeyboardInterrupt:
            self.added.stopped = "interrupt"
            raise

    def _compile_passes(self, path: Path) -> None:
        if not self.observed_any and not (self.steps is not None and self.steps.observed_any):
            return
        from .compile import add_passes

        add_passes(
            path,
            self.entry,
            self.structures,
            self.added,
            steps=self.steps,
            target=self.target,
            progress=self.progress,
            tune=self.tune,
            min_seen=self.min_seen,
            time_limit=self.time_limit,
            served=self._served,
            total=self.backward_seconds,
        )


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    entry: str = DEFAULT_ENTRY,
    target: str = "cpu",
    progress: Progress | None = None,
    max_structures: int = MAX_STRUCTURES,
    tune: str | None = None,
    optimizer: bool = True,
    min_seen: int = MIN_SEEN,
    time_limit: float | None = None,
) -> Recording:
    """A context in which every backward pass is observed; when it closes, those that are new are compiled and added to the package at ``path``.

    Inside, passes are interpreted with eager's gradients; those that an existing package has a variant for run from it. Sizes that changed
    between passes become dynamic, so let the script see at least two batch sizes. Each compiled pass is compared with the recorded values, and
    left out, with the reason in ``skipped``, where it differs or cannot be traced. ``path=None``: nothing is compiled, only :attr:`tapes` are
    kept. Needs memory for two passes of each structure. After ``max_structures`` new structures, further ones are left to eager: ``skipped`` says so.

    Structures of which ``min_seen`` passes came, or that the package has a variant of, are compiled: the most expensive first, and none begins after
    ``time_limit`` seconds, but for one. :attr:`~Recording.added` counts the others. A :class:`KeyboardInterrupt` ends the block as a script that has
    done its work; while structures are compiled, it ends that: what is finished is in the package. Nothing is written where the block ends by another
    exception.

    Steps of ``torch.optim`` optimizers on a CPU, of a kind that comes more than once after the one that makes the state, are compiled too, and so are
    ``clip_grad_norm_`` and ``clip_grad_value_``, unless ``optimizer`` is False.

    Where a launcher such as torchrun has started several processes on a machine, the first (``LOCAL_RANK`` 0) records into ``path``; in the others
    the context does nothing. Passes of ``DistributedDataParallel`` are left to eager.

    ``tune``, on a CPU: "quick" times up to forty passes of each kind in eager, between the others, and each compiled pass beside its tape
    interpreted ("full" takes longer for that; "none" times nothing); by default what the environment variable ``AOT_BACKWARD_TUNE`` says, else
    "quick". What is not faster compiled than in eager, by 10 % and 40 µs a pass, is left out, and ``slower`` says which.
    """
    file = Path(path) if path is not None else None
    return Recording(file, entry, target, progress, max_structures, tune_of(tune), optimizer, min_seen, time_limit)


def _refuse_several_targets(path: Path) -> None:
    labels = [t.label for t in targets_of(open_package(path).manifest)]
    if len(labels) > 1:
        raise ExportError(f"{path} is for several targets ({', '.join(labels)}), and passes are added to a package for one: record into a new file")
