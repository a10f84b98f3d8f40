"""Open a package and return its parts, each checked against the manifest first. Nothing is unpickled, compiled or
executed here. ``docs/format.md``, section 8, lists the checks in their order."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn

from ..errors import AotBackwardError, PackageError
from ..format.manifest import LARGEST_MANIFEST, MANIFEST_MEMBER, Manifest, Member
from ..format.manifest_json import from_json
from ..format.zip_directory import WRITTEN_OVER, Place, read_at, read_directory, read_into
from . import code_cache
from .references import check_references
from .targets import seen_as
from .validate import check_library_file, check_members

_CHUNK = 1 << 20  # bytes read at a time: bounds the memory for hashing; the size is a guess

Admit = Callable[[Path, str], None]
"""A function of a package's path and the SHA-256 of all its bytes. It raises if the package must not be loaded."""


class Archive:
    """An open package. Its descriptor is closed with the object; memory from :meth:`member_memory` stays valid.

    With ``admit`` (a signature check), only the bytes that were hashed are returned, even if the file is written to
    meanwhile: the manifest is compared with the admitted bytes, every member with the manifest, and members are used
    from private copies."""

    def __init__(self, path: Path, fd: int, admit: Admit | None = None) -> None:
        self.path = path
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._status = os.fstat(fd)
        if not stat.S_ISREG(self._status.st_mode):
            kind = "a folder" if stat.S_ISDIR(self._status.st_mode) else "not a plain file"
            raise PackageError(f"cannot open package {path}: it is {kind}")
        self.admitted = admit is not None
        try:
            self.top, self._places = self._below_top(read_directory(fd, self._status.st_size, path))
            data = self._read_manifest()
        except PackageError:
            if admit is not None:
                admit(path, self.digest())  # report changed bytes as a wrong signature, not as damage
            raise
        self.manifest_digest = hashlib.sha256(data).hexdigest()
        if admit is not None:
            self._admit(admit)
        self.manifest = self._parsed(data)
        self._checked(lambda: check_members(self.manifest, {name: place.size for name, place in self._places.items()}))
        self._checked(lambda: check_references(self.manifest))

    @property
    def identity(self) -> str:
        """A key that changes whenever the file is replaced or written to, as far as its metadata show. It includes the
        time of the last status change, because nobody can set that back, unlike the time of the last write."""
        s = self._status
        return f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}"

    @property
    def settled(self) -> bool:
        """True if the last write is old enough that another one would change :attr:`identity`: time stamps advance in
        steps, of up to 10 ms on local file systems and of seconds on some others. False if the file has changed since
        it was opened."""
        return (
            self.unchanged and max(self._status.st_mtime_ns, self._status.st_ctime_ns) < time.time_ns() - 2_000_000_000
        )

    @property
    def unchanged(self) -> bool:
        """True if the file has not been written to since it was opened, as far as its metadata show."""
        now = os.fstat(self._fd)
        was = self._status
        return (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (was.st_size, was.st_mtime_ns, was.st_ctime_ns)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise AotBackwardError(
            f"an open package ({self.path}) can be neither copied nor pickled: load it again in the other process"
        )

    def choose(self, number: int) -> None:
        """Restrict the package to its target ``number`` (:mod:`.targets`)."""
        self.manifest = seen_as(self.manifest, number)

    def members(self) -> dict[str, Member]:
        """Return every member except the manifest, by its path below the top folder."""
        return dict(self.manifest.members)

    def read_member(self, name: str) -> bytes:
        """Return the content of a member, verified by its digest."""
        return b"".join(self._verified_chunks(name))

    def member_memory(self, name: str, mapped: bool = False) -> memoryview:
        """Return the content of a member in writable memory, **not verified**.

        It is a copy, so nobody else can change it after it is verified. ``mapped``: return a private map of the file
        instead. Its pages are read when they are touched and copied when they are written. For an admitted package it
        is always a copy."""
        place = self._place(name)
        if self.admitted or not mapped:
            return self._copied(place)
        start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY
        try:
            view = mmap.mmap(self._fd, place.offset + place.size - start, access=mmap.ACCESS_COPY, offset=start)
        except OSError as error:
            raise PackageError(f"cannot map {place.size} bytes of package {self.path}: {error.strerror}") from error
        return memoryview(view)[place.offset - start :]

    def digest(self) -> str:
        """Return the SHA-256 of the whole file."""
        return self._digests(Place(0, 0, 0))[0]

    def verify_digests(self) -> None:
        """Compare every member with its digest. Raise :class:`PackageError` with the first that differs."""
        for name in self.manifest.members:
            for _ in self._verified_chunks(name):
                pass

    def library(self, name: str) -> Path:
        """Extract the shared library ``name`` with its JSON files, check its digest and headers, and return its
        path."""
        spec = self.manifest.libraries[name]
        members = {PurePosixPath(m).name: m for m in (spec.member, spec.metadata, spec.extern) if m}

        def copy(file_name: str, file: BinaryIO) -> None:
            for chunk in self._verified_chunks(members[file_name]):
                file.write(chunk)

        folder = code_cache.place({file_name: self.manifest.members[m] for file_name, m in members.items()}, copy)
        path = folder / PurePosixPath(spec.member).name
        self._checked(lambda: check_library_file(spec, path, self.manifest.target.machine))
        return path

    def corrupt(self, problem: str) -> PackageError:
        return PackageError(f"corrupt package {self.path}: {problem}")

    def _below_top(self, places: dict[str, Place]) -> tuple[str, dict[str, Place]]:
        tops = {name.partition("/")[0] for name in places}
        if len(tops) != 1:
            raise self.corrupt(f"{len(tops)} top folders ({', '.join(sorted(tops)[:3])}), expected 1")
        return tops.pop(), {name.partition("/")[2]: place for name, place in places.items()}

    def _place(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            raise self.corrupt(f"member {name} is missing")
        return place

    def _admit(self, admit: Admit) -> None:
        digest, manifest_digest = self._digests(self._place(MANIFEST_MEMBER))
        admit(self.path, digest)
        if manifest_digest != self.manifest_digest:
            raise self.corrupt("it was written to while it was read; load it again")

    def _digests(self, part: Place) -> tuple[str, str]:
        """Return the SHA-256 of the whole file and of a part of it. Both hash the same bytes, even if the file is
        written to meanwhile."""
        file_hash, part_hash = hashlib.sha256(), hashlib.sha256()
        for offset in range(0, self._status.st_size, _CHUNK):
            chunk = read_at(self._fd, offset, min(_CHUNK, self._status.st_size - offset), self.path)
            file_hash.update(chunk)
            part_hash.update(chunk[max(0, part.offset - offset) : max(0, part.offset + part.size - offset)])
        return file_hash.hexdigest(), part_hash.hexdigest()

    def _copied(self, place: Place) -> memoryview:
        try:
            # MAP_SHARED would share it with forked children
            copy = mmap.mmap(-1, max(1, place.size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PackageError(
                f"cannot allocate {place.size} bytes of memory for package {self.path}: {error.strerror}"
            ) from error
        memory = memoryview(copy)[: place.size]
        read_into(self._fd, place.offset, memory, self.path)
        return memory

    def _read_manifest(self) -> bytes:
        place = self._place(MANIFEST_MEMBER)
        if place.size > LARGEST_MANIFEST:
            raise self.corrupt(f"member {MANIFEST_MEMBER} has {place.size} bytes; at most {LARGEST_MANIFEST} are read")
        data = read_at(self._fd, place.offset, place.size, self.path)
        if zlib.crc32(data) != place.crc:
            raise self.corrupt(f"member {MANIFEST_MEMBER}: CRC is {zlib.crc32(data):08x}, expected {place.crc:08x}")
        return data

    def _parsed(self, data: bytes) -> Manifest:
        try:
            return from_json(data)
        except PackageError as error:
            raise PackageError(f"package {self.path}: {error}") from error

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except PackageError as error:
            raise self.corrupt(str(error)) from error

    def _verified_chunks(self, name: str) -> Iterator[bytes]:
        """Yield the member in pieces. Raise after the last if its digest differs from the manifest."""
        place, digest = self._place(name), hashlib.sha256()
        for offset in range(place.offset, place.offset + place.size, _CHUNK):
            chunk = read_at(self._fd, offset, min(_CHUNK, place.offset + place.size - offset), self.path)
            digest.update(chunk)
            yield chunk
        self.check_digest(f"member {name}", digest.hexdigest(), self.manifest.members[name].sha256)

    def check_digest(self, label: str, actual: str, expected: str) -> None:
        if actual != expected:
            changed = "" if self.unchanged else f"; the file was written to since it was opened: {WRITTEN_OVER}"
            raise self.corrupt(f"{label}: SHA-256 is {actual}, expected {expected}{changed}")


def open_package(path: str | os.PathLike[str], *, admit: Admit | None = None) -> Archive:
    """Open a package and check its structure and manifest. Digests of members are checked when they are read.

    ``admit``: must accept its bytes before its manifest is parsed
    (:func:`aot_backward_runtime.package.signatures.admission`). Raise :class:`PackageError` with the path and the
    member."""
    path = Path(path)
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise PackageError(
            f"cannot open package {path}: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    return Archive(path, fd, admit)
