"""Progress reports of long work: exporting, rebuilding, verifying, recording and converting take a
:class:`Progress`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called when ``done`` of the ``total`` steps of ``stage`` ("capture net", "compile", "write") are finished, from 0
    to ``total``.

    A stage may repeat, for the next variant or target.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def silent(stage: str, done: int, total: int, /) -> None:
    """Report nothing."""
