"""Atomic replacement of a file, even if the writer is killed. The next writer removes the temporary files of killed
ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` if the block succeeds, and is removed if it raises. Raise OSError if the disk
    fails.

    If ``path`` is a link, the link is replaced: resolve it first to replace its target. The writer holds a lock on its
    temporary file. The kernel drops the lock when the process ends, so the next writer of ``path`` recognises and
    removes abandoned files."""
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    if path.exists() and not path.is_file():
        raise OSError(None, "it is not a plain file")  # root could rename over /dev/null
    _remove_abandoned(path)
    temporary, fd = _locked(path)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            os.fsync(fd)
            temporary.replace(path)  # while locked: an unlocked file may be removed at any time
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The file is in place. Some file systems cannot sync a folder; then only a power cut could still undo the rename.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked(path: Path) -> tuple[Path, int]:
    """Create a file in the folder of ``path`` with a unique name. Return its path and its locked descriptor."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        # The umask sets the mode, as for any new file
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # without locks in the file system, no writer removes anything
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # another writer saw it before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that no living process holds. Ignore errors: they must not fail a write."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        for temporary in [p for p in path.parent.iterdir() if name.fullmatch(p.name)]:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(temporary)


def _remove_if_abandoned(temporary: Path) -> None:
    fd = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
    finally:
        os.close(fd)
