"""Progress on standard error while someone watches; nothing where it is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from aot_backward_exporters.progress import Progress, silent


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """Draws one bar for each stage under way; it goes when its last step is done."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True), transient=True)
    running: dict[str, TaskID] = {}
    with contextlib.ExitStack() as stack:

        def say(stage: str, done: int, total: int) -> None:
            # While bars are drawn they catch what is printed, and a script that is recorded prints before the first
            if not bars.live.is_started:
                stack.enter_context(bars)
            if stage not in running:
                running[stage] = bars.add_task(stage, total=total)
            bars.update(running[stage], completed=done, total=total)
            if done >= total:
                bars.remove_task(running.pop(stage))  # the same work for the next variant is a line of its own

        yield say
