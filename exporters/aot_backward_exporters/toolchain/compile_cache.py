"""The exporter's cache on disk: folders named by the digest of their inputs, written completely or not at all.

``compiled/`` holds a library per graph and byte code of the exporter. ``objects/`` holds an object per C++ file: it is
not compiled again if a change of the exporter leaves the text the same. ``shared/`` holds the common parts of all
libraries of one torch and compiler. Processes may share them. Libraries and objects are verified when they are read;
anything may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_backward_runtime.errors import ExportError

LARGEST = 2 << 30  # bytes below compiled/, and below objects/; the least recently used are deleted first; a guess
MOST_SHARED = 12  # folders below shared/, up to 150 MB each; a torch, a compiler and a set of flags need three

_ABANDONED = 24 * 3600  # seconds; an older unfinished folder counts as that of a killed process; a guess
OBJECT = "file.o"
_ENTRY = "entry"  # a line of checksum, then JSON
_FILES = ("library", "metadata", "extern")
_AFTER = ("onnx", "portable")  # of the exporters: compiling imports nothing of them


@dataclass(frozen=True)
class CachedLibrary:
    """One compiled graph. ``extern``: empty if no operator needs it. ``constants``: the library's name of each -> the
    graph's attribute. ``guards``: the compiler's assumptions about sizes, in the symbols of the graph's canonical
    form."""

    library: bytes
    metadata: bytes
    extern: bytes
    constants: dict[str, str]
    guards: list[str]


def cache_root() -> Path:
    return Path(os.environ.get("AOT_BACKWARD_CACHE") or Path.home() / ".cache" / "aot-backward")


def is_new() -> bool:
    """Return whether nothing that all libraries share is in the cache."""
    return not any((cache_root() / "shared").glob("[!.]*"))


def digest(value: Any) -> str:
    """Return the SHA-256 of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@functools.cache
def digest_of_sources(folder: Path) -> str:
    """Return the SHA-256 of what can change a library: the byte code of every Python file below ``folder`` and the
    content of every other file, by relative path. Comments, words of docstrings, lines and names of local variables do
    not count, nor do the folders in ``_AFTER``."""
    sources = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
    sources = [p for p in sources if p.parts[0] not in _AFTER]
    return digest({str(p): digest_of_source(folder / p) for p in sources})


def digest_of_source(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".py":
        content = json.dumps(_byte_code(compile(content, "", "exec", dont_inherit=True, optimize=2))).encode()
    return hashlib.sha256(content).hexdigest()


def _byte_code(code: types.CodeType) -> list[Any]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    out = [code.co_name, code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags, code.co_names, arguments]
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            out.append(_byte_code(value))
        else:  # the order of a set of strings differs between processes
            out.append(repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value))
    return out


def fetch(key: str) -> CachedLibrary | None:
    """Return the entry stored under ``key``; None if it is missing or corrupt."""
    folder = cache_root() / "compiled" / key
    try:
        expected, _, text = (folder / _ENTRY).read_bytes().partition(b"\n")
        files = {name: (folder / name).read_bytes() for name in _FILES}
        os.utime(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None  # never stored, or pruned during the read; store() names a cache that is not a folder
    if expected.decode(errors="replace") != _checksum(text, files):
        shutil.rmtree(folder, ignore_errors=True)  # another process may be doing the same
        return None
    return CachedLibrary(files["library"], files["metadata"], files["extern"], **json.loads(text))


def store(key: str, entry: CachedLibrary) -> None:
    files = {"library": entry.library, "metadata": entry.metadata, "extern": entry.extern}

    def build(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        text = json.dumps({"constants": entry.constants, "guards": entry.guards}).encode()
        (folder / _ENTRY).write_bytes(_checksum(text, files).encode() + b"\n" + text)

    store_folder(cache_root() / "compiled" / key, build)
    _prune()


def stored_object(key: str, build: Callable[[Path], None]) -> bytes:
    """Return the object under ``key``. If it is missing or corrupt, ``build`` writes :data:`OBJECT` into the folder
    that it receives."""
    folder = cache_root() / "objects" / key

    def build_and_sign(new: Path) -> None:
        build(new)
        (new / _ENTRY).write_text(hashlib.sha256((new / OBJECT).read_bytes()).hexdigest())

    while True:
        store_folder(folder, build_and_sign)
        with contextlib.suppress(FileNotFoundError):  # another process pruned it, or found it corrupt
            data, expected = (folder / OBJECT).read_bytes(), (folder / _ENTRY).read_text(errors="replace")
            if hashlib.sha256(data).hexdigest() == expected:
                return data
        shutil.rmtree(folder, ignore_errors=True)


def _checksum(text: bytes, files: Mapping[str, bytes]) -> str:
    return digest([hashlib.sha256(data).hexdigest() for data in (text, *files.values())])


def store_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it is missing, ``build`` makes it in a temporary place and it is renamed. One process
    builds, the others wait."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name[:16]}.lock").open("w")
    except OSError as error:
        raise ExportError(
            f"the compile cache cannot be written: {error}; set AOT_BACKWARD_CACHE to a folder that you can write to"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        if folder.exists():
            os.utime(folder)
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            build(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _prune() -> None:
    def large(size: int, count: int) -> bool:
        return size > LARGEST

    for name, is_full in (("compiled", large), ("objects", large), ("shared", lambda size, count: count > MOST_SHARED)):
        size = count = 0
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            for folder in sorted((cache_root() / name).glob("[!.]*"), key=lambda f: f.stat().st_mtime, reverse=True):
                size += sum(f.stat().st_size for f in folder.iterdir())
                count += 1
                if is_full(size, count):
                    shutil.rmtree(folder, ignore_errors=True)
            for leftover in (cache_root() / name).glob(".new-*"):  # killed by a signal during the write
                if time.time() - leftover.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(leftover, ignore_errors=True)
