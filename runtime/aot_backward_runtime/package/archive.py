"""Opens a package and hands out its parts, each checked against the manifest before anyone sees it. Nothing is unpickled, compiled or
executed here; ``docs/format.md``, section 8, lists what is refused, in the order in which it is done."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn

from ..errors import AotBackwardError, PackageError
from ..format.elf import numeric, read_elf
from ..format.manifest import GRAPH_FOLDER, LARGEST_MANIFEST, MANIFEST_MEMBER, WEIGHTS_MEMBER, BuildSpec, EntrySpec, LibrarySpec, Manifest, Member
from ..format.manifest_json import from_json
from ..format.zip_directory import WRITTEN_OVER, Place, read_at, read_directory, read_into
from . import code_cache
from .consistency import check_entry, check_orders, check_targets, check_weights, state_names
from .recorded_pass_checks import check_structures
from .targets import seen_as, targets_of

LIBRARY_FOLDER = "data/aotinductor"
GRAPH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
LEVEL = re.compile(r"[a-z0-9_]{1,40}")
_VERSION = re.compile(r"([0-9]{1,9}(\.[0-9]{1,9})*)?")
_CHUNK = 1 << 20  # bytes read at a time

Admit = Callable[[Path, str], None]
"""Gets the path of a package and the SHA-256 of all its bytes, and raises where it must not be loaded."""


class Archive:
    """An open package. Its descriptor is closed when the object goes; what :meth:`member_memory` handed out lives on.

    Where somebody admits it by its bytes, these, and no others, are what is handed out, whatever becomes of the file meanwhile: the manifest is
    compared with the bytes that were admitted, every member with the manifest, and none is used from a file that can be written to."""

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
                admit(path, self.digest())  # what is not what was signed is said to be that, and not to be damaged
            raise
        self.manifest_digest = hashlib.sha256(data).hexdigest()
        if admit is not None:
            self._admit(admit)
        self.manifest = self._parsed(data)
        self._check_members()
        self._check_libraries()
        self._check_entries()

    @property
    def identity(self) -> str:
        """Changes whenever the file is replaced or written to, as far as its metadata tell. The time of the last status change is
        there because, unlike that of the last write, nobody can set it back."""
        s = self._status
        return f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}"

    @property
    def settled(self) -> bool:
        """Whether the file has been left alone long enough that a further write would change :attr:`identity`: time stamps advance in
        steps, of up to 10 ms on local file systems and of seconds on some others. False also if it has changed since it was opened."""
        return self.unchanged and max(self._status.st_mtime_ns, self._status.st_ctime_ns) < time.time_ns() - 2_000_000_000

    @property
    def unchanged(self) -> bool:
        """Whether the file has not been written to since it was opened, as far as its metadata tell."""
        now = os.fstat(self._fd)
        return (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (self._status.st_size, self._status.st_mtime_ns, self._status.st_ctime_ns)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise AotBackwardError(f"an open package ({self.path}) can be neither copied nor pickled: load it again where it is needed")

    def choose(self, number: int) -> None:
        """From here on the package is one for its target ``number`` alone (:mod:`.targets`)."""
        self.manifest = seen_as(self.manifest, number)

    def members(self) -> dict[str, Member]:
        """Every member but the manifest, by its path below the top folder."""
        return dict(self.manifest.members)

    def read_member(self, name: str) -> bytes:
        """The content of a member, verified by its digest."""
        return b"".join(self._verified_chunks(name))

    def member_memory(self, name: str, mapped: bool = False) -> memoryview:
        """The content of a member in memory that may be written to, **not verified**.

        It is a copy, which nobody else can change once it has been verified. ``mapped``: a private map of the file instead, of which pages come from
        the file when they are touched, and are copied when they are written; of an admitted package it is a copy all the same."""
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
        """SHA-256 of the whole file."""
        return self._digests(Place(0, 0, 0))[0]

    def verify_digests(self) -> None:
        """Reads every member and compares it with its digest; :class:`PackageError` names the first that differs."""
        for name in self.manifest.members:
            for _ in self._verified_chunks(name):
                pass

    def library(self, name: str) -> Path:
        """The shared library of that name, extracted, its digest and headers checked, with its JSON files beside it."""
        spec = self.manifest.libraries[name]
        members = {PurePosixPath(m).name: m for m in (spec.member, spec.metadata, spec.extern) if m}

        def copy(file_name: str, file: BinaryIO) -> None:
            for chunk in self._verified_chunks(members[file_name]):
                file.write(chunk)

        folder = code_cache.place({file_name: self.manifest.members[m] for file_name, m in members.items()}, copy)
        path = folder / PurePosixPath(spec.member).name
        self._check_elf(spec, path)
        return path

    def corrupt(self, what: str) -> PackageError:
        return PackageError(f"corrupt package {self.path}: {what}")

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
        whole, manifest = self._digests(self._place(MANIFEST_MEMBER))
        admit(self.path, whole)
        if manifest != self.manifest_digest:
            raise self.corrupt("it was written to while it was read; load it again")

    def _digests(self, part: Place) -> tuple[str, str]:
        """SHA-256 of the whole file and of a part of it, which were the same bytes even if somebody writes to the file."""
        whole, of_part = hashlib.sha256(), hashlib.sha256()
        for offset in range(0, self._status.st_size, _CHUNK):
            chunk = read_at(self._fd, offset, min(_CHUNK, self._status.st_size - offset), self.path)
            whole.update(chunk)
            of_part.update(chunk[max(0, part.offset - offset) : max(0, part.offset + part.size - offset)])
        return whole.hexdigest(), of_part.hexdigest()

    def _copied(self, place: Place) -> memoryview:
        try:
            copy = mmap.mmap(-1, max(1, place.size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared would be with forked children
        except OSError as error:
            raise PackageError(f"cannot take {place.size} bytes of memory for package {self.path}: {error.strerror}") from error
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

    def _verified_chunks(self, name: str) -> Iterator[bytes]:
        """The member in pieces; raises after the last if the whole is not what the manifest says."""
        place, digest = self._place(name), hashlib.sha256()
        for offset in range(place.offset, place.offset + place.size, _CHUNK):
            chunk = read_at(self._fd, offset, min(_CHUNK, place.offset + place.size - offset), self.path)
            digest.update(chunk)
            yield chunk
        self.check_digest(f"member {name}", digest.hexdigest(), self.manifest.members[name].sha256)

    def check_digest(self, what: str, found: str, expected: str) -> None:
        if found != expected:
            changed = "" if self.unchanged else f"; the file was written to since it was opened: {WRITTEN_OVER}"
            raise self.corrupt(f"{what}: SHA-256 is {found}, expected {expected}{changed}")

    def _check_members(self) -> None:
        listed = self.manifest.members
        for name in self._places.keys() - listed.keys() - {MANIFEST_MEMBER}:
            raise self.corrupt(f"member {name} is not in the manifest")
        for name, member in listed.items():
            if self._place(name).size != member.size:
                raise self.corrupt(f"member {name} has {self._place(name).size} bytes, expected {member.size}")
        if (WEIGHTS_MEMBER in listed) != self.manifest.has_weights:
            raise self.corrupt(f"has_weights is {self.manifest.has_weights}, but {WEIGHTS_MEMBER} says otherwise")

    def _check_libraries(self) -> None:
        for name, spec in self.manifest.libraries.items():
            if not GRAPH_NAME.fullmatch(name):
                raise self.corrupt(f"{name!r} is not a name for a library")
            if len(spec.builds) != len(self.manifest.targets):
                raise self.corrupt(f"library {name} has {len(spec.builds)} further builds, for {len(self.manifest.targets)} further targets")
            stems = (name, *(f"{name}.{t.level}" for t in self.manifest.targets))
            for stem, build in zip(stems, spec.every_build, strict=True):
                self._check_build(name, stem, build)
            if spec.graph not in ("", f"{GRAPH_FOLDER}/{name}.json"):
                raise self.corrupt(f"library {name}: its graph must be {GRAPH_FOLDER}/{name}.json, not {spec.graph}")
            if spec.graph and spec.graph not in self.manifest.members:
                raise self.corrupt(f"library {name}: member {spec.graph} is missing")
        places = [b.member for s in self.manifest.libraries.values() for b in s.every_build]
        if len(set(places)) != len(places):
            raise self.corrupt("two libraries are the same member")
        levels = [t.level for t in self.manifest.targets]
        for level in levels:
            if not LEVEL.fullmatch(level) or levels.count(level) > 1:
                raise self.corrupt(f"its targets are not told apart by their names: {level!r}")

    def _check_build(self, name: str, stem: str, spec: LibrarySpec | BuildSpec) -> None:
        # AOTInductor's loaders find the JSON files by the library's own name, so no other place would do.
        stem = f"{LIBRARY_FOLDER}/{stem}/{stem}"
        if (spec.member, spec.metadata) != (f"{stem}.so", f"{stem}_metadata.json") or spec.extern not in ("", f"{stem}.json"):
            raise self.corrupt(f"library {name}: its members must be {stem}.so, _metadata.json and .json, not {spec.member}, …")
        for member in (spec.member, spec.metadata, spec.extern):
            if member and member not in self.manifest.members:
                raise self.corrupt(f"library {name}: member {member} is missing")
        if not (_VERSION.fullmatch(spec.glibc) and _VERSION.fullmatch(spec.glibcxx)):
            raise self.corrupt(f"library {name}: {spec.glibc!r} and {spec.glibcxx!r} are not both versions")
        for constant in spec.constants:
            self._check_reference(f"library {name}: constant {constant.name}", constant.weight, self.manifest.weights)

    def _check_entries(self) -> None:
        try:
            check_targets(targets_of(self.manifest))
            check_weights(self.manifest.weights)
        except PackageError as error:
            raise self.corrupt(str(error)) from error
        named = state_names(self.manifest)
        for name, entry in self.manifest.entries.items():
            for state in entry.state:
                self._check_reference(f"entry {name}: {state.name}", state.weight, self.manifest.weights)
            for library in _called(entry):
                self._check_reference(f"entry {name}", library, self.manifest.libraries)
            self._check_step(name, entry)
            judged = [v.verdicts for v in entry.variants] + [v.verdicts for s in entry.structures for v in s.variants]
            if any(len(verdicts) != len(self.manifest.targets) for verdicts in judged):
                raise self.corrupt(f"entry {name} has not as many verdicts as there are further targets, {len(self.manifest.targets)}")
            try:
                for number, variant in enumerate(entry.variants):
                    check_orders(f"variant {number}", variant)
                check_entry(entry, self.manifest, named)
                check_structures(entry, self.manifest.libraries)
            except PackageError as error:
                raise self.corrupt(f"entry {name}: {error}") from error

    def _check_step(self, name: str, entry: EntrySpec) -> None:
        """That what a training step names is in the entry's state."""
        if (entry.kind == "step") != (entry.step is not None):
            raise self.corrupt(f"entry {name} is of kind {entry.kind!r}, but {'has a' if entry.step else 'has no'} step")
        if entry.step is None:
            return
        known = {s.name: s for s in entry.state}
        groups = [f"module.{p}" for g in entry.step.groups for p in g.parameters]
        slots = [s.state for s in entry.step.state] + [g.state for g in entry.step.gradients]
        for state in ("numbers", *groups, *slots):
            self._check_reference(f"entry {name}: its step", state, known)
        length, shape = len(entry.step.numbers) + 2, self.manifest.weights[known["numbers"].weight].shape
        if shape != (length,):
            raise self.corrupt(f"entry {name}: its vector of numbers has the shape {list(shape)}; expected {length} numbers")
        for number in entry.step.numbers:
            if not -1 <= number.group < len(entry.step.groups):
                raise self.corrupt(f"entry {name}: the number {number.key!r} is of group {number.group}, of {len(entry.step.groups)}")

        for slot in entry.step.state:
            if not -1 <= slot.starts_as < len(entry.step.numbers):
                raise self.corrupt(f"entry {name}: the state {slot.state!r} starts as number {slot.starts_as}, of {len(entry.step.numbers)}")

    def _check_reference(self, what: str, key: str, known: Mapping[str, object]) -> None:
        if key not in known:
            raise self.corrupt(f"{what} refers to {key!r}, which the manifest does not have")

    def _check_elf(self, spec: LibrarySpec, path: Path) -> None:
        try:
            elf = read_elf(path)
        except PackageError as error:
            raise self.corrupt(f"member {spec.member}: {str(error).removeprefix(f'{path}: ')}") from error
        if elf.executable_stack:
            raise self.corrupt(f"member {spec.member} asks for an executable stack, which glibc 2.41 and later refuse")
        for needed in elf.needed:
            if needed not in spec.needed:
                raise self.corrupt(f"member {spec.member} is linked with {needed}, which the manifest does not list")
        for family, listed in (("GLIBC", spec.glibc), ("GLIBCXX", spec.glibcxx)):
            asked = elf.versions.get(family)
            if asked is not None and (not listed or numeric(asked) > numeric(listed)):
                raise self.corrupt(f"member {spec.member} asks for {family} {asked}; the manifest says {listed or 'none'}")


def open_package(path: str | os.PathLike[str], *, admit: Admit | None = None) -> Archive:
    """Opens a package and checks its structure and manifest; digests of members are checked when they are read.

    ``admit``: what must agree to its bytes before its manifest is parsed (:func:`aot_backward_runtime.package.signature_policy.admission`).
    Raises :class:`PackageError`, which names the path and the member."""
    path = Path(path)
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise PackageError(f"cannot open package {path}: {error.strerror if isinstance(error, OSError) else error}") from error
    return Archive(path, fd, admit)


def _called(entry: EntrySpec) -> Iterator[str]:
    for variant in (v for spec in entry.variants for v in spec.orders):
        for plan in (variant.forward, variant.backward, variant.inference, variant.gradient, variant.step, variant.accumulate):
            if plan is not None and plan.call is not None:
                yield plan.call.library
    if entry.step is not None and entry.step.update is not None and entry.step.update.call is not None:
        yield entry.step.update.call.library
    for structure in entry.structures:
        for compiled in structure.variants:
            yield from (s.library for s in compiled.segments if s.library)
