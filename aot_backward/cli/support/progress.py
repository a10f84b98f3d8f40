"""Progress on standard error while someone watches; nothing where it is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str, int, int], None]]:
    """What is called with a text, the steps done, and how many there are. A text's line ends when its last step is done."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        running: dict[str, TaskID] = {}

        def say(what: str, done: int, total: int) -> None:
            if what not in running:
                running[what] = bars.add_task(what, total=total)
            bars.update(running[what], completed=done, total=total)
            if done >= total:
                running.pop(what)  # the same work for the next variant is a line of its own

        yield say
