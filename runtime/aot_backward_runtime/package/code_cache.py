"""The folder for extracted native code: private, addressed by content, shared by the processes of one user.

The folder is ``$AOT_BACKWARD_CACHE``, else ``~/.cache/aot-backward``, else (if that is unusable) a temporary folder of
this process. It may be deleted at any time. Its files are hashed before each use. Between that and ``dlopen`` only this
user can change them: every level of the folder is owned by this user and writable only by this user. Nobody else can
replace the folder: every folder above belongs to this user or to root, and is writable only by its owner, or sticky
like /tmp.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import grp
import hashlib
import os
import pwd
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from ..errors import AotBackwardError
from ..format.manifest import Member

VARIABLE = "AOT_BACKWARD_CACHE"
_temporary: tuple[int, Path] | None = None  # the process that created it, and the folder


class CacheError(AotBackwardError):
    """Raised if native code cannot be extracted into any folder."""


def place(files: Mapping[str, Member], copy: Callable[[str, BinaryIO], None]) -> Path:
    """Return a folder that holds ``files``, each with the given size and digest.

    Files that are missing or differ are written by ``copy(name, file)``, which verifies them."""
    # The key also covers the JSON of a library: equal code with other operators must not share a folder.
    key = hashlib.sha256("".join(f"{name}\0{files[name].sha256}\n" for name in sorted(files)).encode()).hexdigest()
    try:
        return _place(_cache() / "lib" / key, files, copy)
    except CacheError:
        if os.environ.get(VARIABLE):
            raise  # there is no fallback for a folder that the user chose
    return _place(_private_temporary() / "lib" / key, files, copy)


def remembered(name: str, content: str) -> bool:
    """Return whether :func:`remember` was called with this ``name`` and ``content``."""
    try:
        return (_cache() / "verified" / name).read_text() == content
    except (OSError, CacheError):
        return False  # then the work is done again; place() reports an unusable folder


def remember(name: str, content: str) -> None:
    with contextlib.suppress(CacheError):  # as above
        _write(_folder(_cache() / "verified"), name, lambda file: _write_text(file, content))


def _place(folder: Path, files: Mapping[str, Member], copy: Callable[[str, BinaryIO], None]) -> Path:
    for level in (folder.parent, folder):
        if level.is_file():  # or a link to one: it is ours and blocks the folder
            level.unlink(missing_ok=True)
        _folder(level)
    for name, member in files.items():
        if not _matches(folder / name, member):
            _write(folder, name, lambda file, name=name: copy(name, file))  # type: ignore[misc]
    return folder


def _matches(path: Path, member: Member) -> bool:
    try:
        with open(path, "rb", buffering=0, opener=_without_links) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size != member.size or _open_to_others(status):
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == member.sha256
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _too_many_files(error) from error
        return False  # missing, a link, unreadable, or damaged on disk: it is replaced


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # O_NONBLOCK: do not wait for a named pipe


def _write(folder: Path, name: str, copy: Callable[[BinaryIO], None]) -> None:
    """Write a temporary file, then rename it, so that other processes see the old file or the whole new one. It is not
    synced: a file damaged by a crash of the machine does not match its digest and is written again."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                copy(file)
            _make_way(folder / name)
            Path(temporary).replace(folder / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # not the folder's fault
            raise _too_many_files(error) from error
        raise _unusable(folder, error.strerror or str(error)) from error


def _too_many_files(error: OSError) -> AotBackwardError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return AotBackwardError(
        f"cannot extract native code: {error.strerror} (the limit of this process is {limit}): close some files, or raise the limit (ulimit -n)"
    )


def _make_way(place: Path) -> None:
    """Remove a folder at the path of a file: a rename cannot replace it."""
    if place.is_dir() and not place.is_symlink():
        aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        # Another process was faster; if the folder is still there, the caller's rename fails
        with contextlib.suppress(OSError):
            place.rename(aside / place.name)
        shutil.rmtree(aside, ignore_errors=True)


def _write_text(file: BinaryIO, text: str) -> None:
    file.write(text.encode())


def _cache() -> Path:
    folder = os.environ.get(VARIABLE)
    if folder:
        return _beyond_reach(_folder(Path(folder).absolute()))
    try:
        home = Path("~").expanduser()
    except RuntimeError as error:
        raise _unusable(Path("~/.cache/aot-backward"), "this user has no home folder") from error
    return _beyond_reach(_folder(home / ".cache" / "aot-backward"))


def _folder(path: Path) -> Path:
    """Return ``path``, created with mode 0700 if missing. Raise :class:`CacheError` unless it is private and allows
    execution."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status, flags = path.stat(), os.statvfs(path).f_flag
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif _open_to_others(status):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w)"
    elif flags & os.ST_NOEXEC:
        problem = "its file system is mounted noexec"
    if problem:
        raise _unusable(path, problem)
    return path


def _beyond_reach(path: Path) -> Path:
    """Return ``path`` without links. Raise :class:`CacheError` if another user could replace the folder."""
    try:
        path = path.resolve(strict=True)
        above = [(parent, parent.stat()) for parent in path.parents]
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    for parent, status in above:
        if status.st_uid not in _trusted(os.geteuid()):
            raise _unusable(
                path, f"{parent}, above it, belongs to user {status.st_uid}, who can put another folder in its place"
            )
        writable = bool(status.st_mode & stat.S_IWOTH) or (
            bool(status.st_mode & stat.S_IWGRP) and not _only_ours(status.st_gid)
        )
        if writable and not status.st_mode & stat.S_ISVTX:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise _unusable(
                path,
                f"others can write to {parent}, above it, and put another folder in its place (mode {mode}; chmod go-w, or +t)",
            )
    return path


@functools.cache
def _trusted(own: int) -> frozenset[int]:
    """Return root, user ``own``, and the overflow user: in a user namespace (a rootless container) it stands for
    outside users, root among them."""
    users = {0, own}
    with contextlib.suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(users)


def _only_ours(group: int) -> bool:
    """Return whether ``group`` is this user's private group. Many systems create one per user and make the user's
    folders group-writable."""
    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}


def _open_to_others(status: os.stat_result) -> bool:
    return status.st_uid != os.geteuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _unusable(path: Path, problem: str) -> CacheError:
    return CacheError(
        f"cannot extract native code into {path}: {problem}. "
        f"Set {VARIABLE} to a folder that only you can write to, on a file system that allows execution"
    )


def _private_temporary() -> Path:
    """Return a folder that is removed when the process that created it exits. A forked child uses its parent's folder
    while it exists and never removes it; libraries that the child has loaded stay mapped without the files."""
    global _temporary
    if _temporary is None or not _temporary[1].is_dir():
        try:
            folder = Path(tempfile.mkdtemp(prefix="aot-backward-"))
        except OSError as error:
            raise _unusable(Path(os.environ.get("TMPDIR", "/tmp")), error.strerror or str(error)) from error  # noqa: S108
        _temporary = (os.getpid(), folder)
        atexit.register(_remove, *_temporary)
    return _beyond_reach(_folder(_temporary[1]))


def _remove(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
