"""Compile the backward passes of an unmodified script into a package when the context of ``record(path)`` closes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.loader import load
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of
from aot_backward_runtime.passes.session import Replaying
from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

from ..packaging.package_writer import check_destination
from ..packaging.tuning import tune_of
from .added import Added
from .launcher import rank_here
from .observed_passes import ObservedPasses
from .optimizer_steps.observed_steps import ObservedSteps
from .recorded_structure import DEFAULT_ENTRY, RecordedStructure
from .selection import MIN_SEEN, check_min_seen, check_time_limit

_CONSTANTS = (
    "A number that is part of a node and changes from pass to pass, such as the limit of a clamp, makes a new structure each time. "
    "Pass it as a 0-d tensor instead"
)


class Recording:
    """The context of :func:`record`.

    Attributes:
        report: The counts of the passes inside, a :class:`~aot_backward_runtime.Report`.
        tapes: The tapes of the passes met, in order.
        added: The structures that were compiled when the context closed, and the numbers of the others.
        skipped: Reasons why passes could not be traced or compiled, counted.
        writes: Whether this process records; of several on a machine, only the first does.
    """

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
        on_cpu = target.startswith("cpu")  # on a GPU a pass is only queued when the call returns
        self.passes = ObservedPasses(times_eager=tune != "none" and on_cpu)
        self.steps = ObservedSteps() if optimizer and on_cpu else None
        self.replaying = Replaying(
            package,
            entry,
            max_structures=max_structures,
            optimizer=optimizer,
            observer=self.passes,
            step_observer=self.steps,
        )
        self.report, self.tapes = self.replaying.report, self.replaying.tapes
        self.tune = tune
        self.path, self.entry, self.target, self.progress = path, entry, target, progress
        self.skipped: Counter[str] = Counter()
        self.added = Added(skipped=self.skipped)
        self.writes = path is None or not rank_here()

    @property
    def recorded(self) -> int:
        """The number of passes that were interpreted."""
        return self.passes.recorded

    @property
    def in_eager(self) -> int:
        """The number of passes that ran in eager to be timed."""
        return self.passes.timed_in_eager

    @property
    def structures(self) -> dict[str, RecordedStructure]:
        """The structures of interpreted passes, by fingerprint."""
        return self.passes.structures

    @property
    def slower(self) -> tuple[str, ...]:
        """Descriptions of the compiled code that is not in the package because eager is as fast."""
        return tuple(self.added.slower)

    @property
    def compiled_steps(self) -> tuple[str, ...]:
        """The optimizers with compiled steps, and the compiled functions that clip gradients."""
        return self.added.contents.steps

    def __enter__(self) -> Recording:
        if self.writes:
            self.replaying.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.writes:
            return
        self.replaying.__exit__(*error)
        if self.steps is not None:
            for words, reason in self.steps.refused.items():
                self.skipped[f"the optimizer step of {words}: {reason}"] += 1
            for words, reason in self.steps.clippings.refused.items():
                self.skipped[f"{words}: {reason}"] += 1
        if self.replaying.table.full:
            limit = (
                f"after {self.replaying.table.max_structures} structures (max_structures), further ones ran in eager"
            )
            self.skipped[f"the structure kept changing: {limit}. {_CONSTANTS}"] += 1
        kind = error[0]
        # A script that calls sys.exit has ended, too
        is_complete = kind is None or (isinstance(kind, type) and issubclass(kind, (SystemExit, KeyboardInterrupt)))
        if is_complete and self.path is not None:
            self._compile(self.path)

    def _compile(self, path: Path) -> None:
        try:
            self._compile_passes(path)
        except KeyboardInterrupt:
            self.added.stopped = "interrupt"
            raise

    def _compile_passes(self, path: Path) -> None:
        if not self.passes.any and not (self.steps is not None and self.steps.observed_any):
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
    """Observe every backward pass in a context; when it closes, compile the new ones and add them to a package.

    Inside, passes are interpreted with eager's gradients; if an existing package has a variant for a pass, it runs from
    there. Sizes that changed between passes become dynamic, so let the script see at least two batch sizes. Each
    compiled pass is compared with the recorded values. If it differs or cannot be traced, it is left out, with the
    reason in ``skipped``. Recording needs memory for two passes of each structure.

    The most expensive structures are compiled first. Compiled code that is not faster than eager by 10 % and 80 µs a
    pass is left out and listed in ``slower``. A ``KeyboardInterrupt`` ends the block like a finished script. While
    structures are compiled, it ends the compilation: finished ones are in the package. Nothing is written if the block
    ends by another exception.

    If a launcher such as torchrun has started several processes on a machine, the first (``LOCAL_RANK`` 0) records; in
    the others the context does nothing. Passes of ``DistributedDataParallel`` run in eager.

    Args:
        path: The package to write, or to add to. None compiles nothing and only keeps ``tapes``.
        entry: The name of the entry that holds the passes.
        target: One target, as for :func:`aot_backward.export`.
        progress: A function that is called as ``progress(stage, done, total)``.
        max_structures: The number of new structures after which further ones run in eager; ``skipped`` says so.
        tune: "quick" times, on a CPU, up to eighty passes of each kind in eager, between the others, and each compiled
            pass against its interpreted tape. "none" times nothing, and keeps all code. The default is
            ``$AOT_BACKWARD_TUNE``, else "quick".
        optimizer: Whether to compile, on a CPU, steps of ``torch.optim`` optimizers whose kind comes more than once
            after the step that makes the state, ``clip_grad_norm_`` and ``clip_grad_value_``.
        min_seen: The number of passes from which on a structure is compiled. One that the package has a variant of is
            compiled from the first.
        time_limit: The seconds after which no further structure is begun; one is always compiled.

    Returns:
        The context.

    Raises:
        ExportError: The package at ``path`` is for several targets, ``path`` cannot be written, or ``tune`` is unknown.
        InputError: ``min_seen`` or ``time_limit`` is invalid.

    Examples:
        >>> with ab.record("passes.pt2", tune="none") as recording:
        ...     for batch in (4, 8, 4, 8):
        ...         net(torch.randn(batch, 8)).sum().backward()
        >>> recording.recorded
        4
    """
    file = Path(path) if path is not None else None
    return Recording(file, entry, target, progress, max_structures, tune_of(tune), optimizer, min_seen, time_limit)


def _refuse_several_targets(path: Path) -> None:
    labels = [t.label for t in targets_of(open_package(path).manifest)]
    if len(labels) > 1:
        raise ExportError(
            f"{path} is for several targets ({', '.join(labels)}), but passes can only be added to a package for one: record into a new file"
        )
