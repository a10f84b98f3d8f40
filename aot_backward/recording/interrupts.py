"""Ctrl-C while structures are compiled: seen also where Python drops the exception."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from aot_backward_exporters.progress import Progress


class Interrupts:
    """A context in which an interrupt raises :class:`KeyboardInterrupt` as always, and again at the next step of the work where that was lost: Python
    ignores what is raised in a callback of a weak reference, of which a trace has thousands. A handler of the program's own stays."""

    def __init__(self) -> None:
        self._asked = self._ours = False
        self._ignored = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        self._ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._interrupt)
            self._ignored, sys.unraisablehook = sys.unraisablehook, self._say_unless_interrupt
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._ignored

    def _say_unless_interrupt(self, ignored: sys.UnraisableHookArgs) -> None:
        """Python would print the traceback of an interrupt that is not lost."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._ignored(ignored)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.default_int_handler(number, frame)

    def noticed(self) -> None:
        """Called once the exception has come."""
        self._asked = False

    def raise_lost(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def watching(self, progress: Progress) -> Progress:
        """``progress``, each call of which is a step."""

        def say(stage: str, done: int, total: int) -> None:
            self.raise_lost()
            progress(stage, done, total)

        return say
