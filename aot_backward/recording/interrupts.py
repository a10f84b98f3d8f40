"""Handle Ctrl-C while structures are compiled, even if Python drops the exception."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from aot_backward_exporters.progress import Progress


class Interrupts:
    """A context in which an interrupt raises :class:`KeyboardInterrupt` as usual, and again at the next step of the
    work if Python lost it: Python ignores exceptions in weak-reference callbacks, and a trace has thousands. A handler
    set by the program stays."""

    def __init__(self) -> None:
        self._asked = self._ours = False
        self._ignored = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        self._ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._ours:
            signal.signal(signal.SIGINT, self._interrupt)
            self._ignored, sys.unraisablehook = sys.unraisablehook, self._say_unless_interrupt
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._ignored

    def _say_unless_interrupt(self, ignored: sys.UnraisableHookArgs) -> None:
        """Skip the traceback that Python would print for an interrupt that is not lost."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._ignored(ignored)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.default_int_handler(number, frame)

    def noticed(self) -> None:
        """Clear the interrupt after its exception was caught."""
        self._asked = False

    def raise_lost(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def watching(self, progress: Progress) -> Progress:
        """Return ``progress``, with each call as a step that raises a lost interrupt."""

        def say(stage: str, done: int, total: int) -> None:
            self.raise_lost()
            progress(stage, done, total)

        return say
