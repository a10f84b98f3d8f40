"""A command that writes to a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys


def on_terminal(stream: str, *argv: object, columns: int) -> tuple[int, bytes]:
    """Run Python with ``argv`` and a terminal as its ``stdout`` or ``stderr``. Return its exit status and the
    terminal's output."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    streams = {"stdout": subprocess.DEVNULL, "stderr": None} | {stream: theirs}
    with subprocess.Popen([sys.executable, *map(str, argv)], **streams, env=env) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the terminal's other end is closed
                break
    os.close(ours)
    return process.returncode, shown
