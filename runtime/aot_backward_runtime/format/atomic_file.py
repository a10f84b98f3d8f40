"""A file that is replaced whole or not at all, whatever kills the writer, and of which no killed writer's remains pile up."""

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
    """A file that takes the place of ``path`` when the block ends well, and goes away when it does not. OSError where the disk refuses.

    A link is replaced itself: resolve ``path`` first where its target is meant. The writer holds a lock on its temporary file, which the
    kernel drops with the process, so that the next writer of ``path`` can tell what was left behind, and removes it."""
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    if path.exists() and not path.is_file():
        raise OSError(None, "it is not a plain file")  # who is root could rename over /dev/null
    _remove_abandoned(path)
    temporary, fd = _locked(path)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            os.fsync(fd)
            temporary.replace(path)  # while locked: what has no lock may be removed at any time
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The file is in place; some file systems cannot sync a folder, and then only a power cut could still undo the rename.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked(path: Path) -> tuple[Path, int]:
    """A new file beside ``path``, under a name that is never used again, and its descriptor, locked."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # the mode is the umask's, as for any new file
        with contextlib.suppress(OSError):  # a file system without locks, where nobody else gets one either, and nothing is removed
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # another writer saw it before it was locked


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of ``path`` that no living process holds. None of this matters enough to fail a write."""
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
