"""The headers of a shared library, read with :mod:`struct` before the dynamic linker sees the file.

Layouts are those of the System V ABI (ELF-64) and, for symbol versions, of the Linux Standard Base, chapter "Symbol
Versioning". Program headers and the dynamic section are read, as the linker does. Section headers play no part in
loading. They are only checked to lie within the file, because a cut library fails there first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import PackageError

EM_X86_64, EM_AARCH64 = 62, 183
MACHINES = {EM_X86_64: "x86_64", EM_AARCH64: "aarch64"}
"""Machines that native code is made for, as uname writes them."""
_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_PF_X = 1
_SHT_NOBITS = 8
_DT_NULL, _DT_STRTAB, _DT_STRSZ = 0, 5, 10
_DT_NEEDED, _DT_AUXILIARY, _DT_FILTER = 1, 0x7FFFFFFD, 0x7FFFFFFF  # the linker opens the libraries of all three tags
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERNEED, _VERNAUX = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_VERDEF, _VERDAUX = struct.Struct("<HHHHIII"), struct.Struct("<II")
_MAX_HEADERS = 1 << 16  # headers, tags or versions of one kind; the largest of libtorch_cpu.so is about 100
# A version without a number, introduced with a numbered glibc: packed relative relocations.
_UNNUMBERED = {"GLIBC_ABI_DT_RELR": ("GLIBC", "2.36")}


@dataclass(frozen=True)
class Elf:
    """The parsed headers. ``versions`` and ``defines``: the highest versions that the file requires and offers, by
    family: ``{"GLIBC": "2.34"}``."""

    machine: str
    needed: tuple[str, ...]
    executable_stack: bool
    versions: dict[str, str]
    defines: dict[str, str]


@dataclass(frozen=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    size: int  # in the file
    entry: int  # offset of its header


def numeric(version: str) -> tuple[int, ...]:
    """Return ``"2.34"`` as ``(2, 34)``, so that 2.9 comes before 2.34."""
    return tuple(int(part) for part in version.split("."))


def read_elf(path: Path) -> Elf:
    """Read the headers of a shared library for x86-64 or aarch64. :class:`PackageError` describes the problem of any
    other file."""
    with path.open("rb") as file:
        return _File(path, file).parse()


def clear_executable_stack(path: Path) -> None:
    """Clear PF_X of PT_GNU_STACK in place: glibc from 2.41 on refuses to load a library that requires an executable
    stack."""
    with path.open("r+b") as file:
        stack = [s for s in _File(path, file).segments() if s.kind == _PT_GNU_STACK]
        if not stack:
            raise PackageError(
                f"{path}: no PT_GNU_STACK header, so the stack is executable: link it with -Wl,-z,noexecstack"
            )
        for segment in stack:
            file.seek(segment.entry + 4)
            file.write(struct.pack("<I", segment.flags & ~_PF_X))


class _File:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def parse(self) -> Elf:
        segments = self.segments()
        self.check_sections()
        tags = list(self.dynamic(segments))
        last = dict(tags)  # if two entries have the same tag, the linker takes the later
        strings = self.at_address(segments, last.get(_DT_STRTAB, 0), last.get(_DT_STRSZ, 0), "string table")
        needed = tuple(self.string(strings, v) for tag, v in tags if tag in (_DT_NEEDED, _DT_AUXILIARY, _DT_FILTER))
        verneed = self.records(
            segments, last, _DT_VERNEED, _DT_VERNEEDNUM, _VERNEED, count=1, down=3, auxiliary=_VERNAUX, name=3
        )
        verdef = self.records(
            segments, last, _DT_VERDEF, _DT_VERDEFNUM, _VERDEF, count=3, down=5, auxiliary=_VERDAUX, name=0
        )
        stack = [s for s in segments if s.kind == _PT_GNU_STACK]
        return Elf(
            machine=self.machine,
            needed=needed,
            # Without the header the linker assumes the x86-64 default, which is executable.
            executable_stack=not stack or any(s.flags & _PF_X for s in stack),
            versions=_highest(self.string(strings, n) for n in verneed),
            defines=_highest(self.string(strings, n) for n in verdef),
        )

    def header(self) -> tuple[int, ...]:
        if self.size < 4 or self.read(0, 4, "magic") != b"\x7fELF":
            raise self.wrong("not an ELF file")
        identity, kind, machine, _, _, *rest = _HEADER.unpack(self.read(0, _HEADER.size, "ELF header"))
        if identity[4] != 2:
            raise self.wrong(f"ELF class {identity[4]}, expected 2 (64-bit)")
        if identity[5] != 1:
            raise self.wrong(f"ELF byte order {identity[5]}, expected 1 (little-endian)")
        if machine not in MACHINES:
            raise self.wrong(
                f"built for ELF machine {machine}, expected {EM_X86_64} (x86-64) or {EM_AARCH64} (aarch64)"
            )
        self.machine = MACHINES[machine]
        if kind != _ET_DYN:
            raise self.wrong(f"ELF type {kind}, expected {_ET_DYN} (shared library)")
        return tuple(rest)

    def segments(self) -> list[_Segment]:
        start, _, _, _, entry, count, *_ = self.header()
        if entry != _SEGMENT.size:
            raise self.wrong(f"program headers of {entry} bytes, expected {_SEGMENT.size}")
        table = self.read(start, entry * count, "program headers")
        out = []
        for i, (kind, flags, offset, address, _, size, memory, _) in enumerate(_SEGMENT.iter_unpack(table)):
            if offset + size > self.size:
                raise self.wrong(f"cut short: segment {i} ends at byte {offset + size} of {self.size}")
            if kind == _PT_LOAD and memory < size:
                raise self.wrong(f"segment {i} has {size} bytes in the file but {memory} in memory")
            out.append(_Segment(kind, flags, offset, address, size, start + i * entry))
        if not any(s.kind == _PT_LOAD for s in out):
            raise self.wrong("nothing to load: no PT_LOAD segment")
        return out

    def check_sections(self) -> None:
        _, start, _, _, _, _, entry, count, _ = self.header()
        if not count:
            return  # stripped: legal
        if entry != _SECTION.size:
            raise self.wrong(f"section headers of {entry} bytes, expected {_SECTION.size}")
        table = self.read(start, entry * count, "section headers")
        for i, (_, kind, _, _, offset, size, *_) in enumerate(_SECTION.iter_unpack(table)):
            if kind != _SHT_NOBITS and offset + size > self.size:
                raise self.wrong(f"cut short: section {i} ends at byte {offset + size} of {self.size}")

    def dynamic(self, segments: list[_Segment]) -> Iterator[tuple[int, int]]:
        tables = [s for s in segments if s.kind == _PT_DYNAMIC]
        if len(tables) != 1:
            raise self.wrong(f"{len(tables)} dynamic sections, expected 1")
        if tables[0].size > _MAX_HEADERS * _DYNAMIC.size or tables[0].size % _DYNAMIC.size:
            raise self.wrong(f"a dynamic section of {tables[0].size} bytes")
        for tag, value in _DYNAMIC.iter_unpack(self.read(tables[0].offset, tables[0].size, "dynamic section")):
            if tag == _DT_NULL:
                return
            yield tag, value
        raise self.wrong("the dynamic section does not end")

    def records(
        self,
        segments: list[_Segment],
        tags: dict[int, int],
        table: int,
        number: int,
        layout: struct.Struct,
        *,
        count: int,
        down: int,
        auxiliary: struct.Struct,
        name: int,
    ) -> Iterator[int]:
        """Yield the offsets of the version names in a two-level list. ``count``, ``down`` and ``name`` are positions
        within the layouts. The next record's offset follows ``down`` in ``layout``, and is the last field of
        ``auxiliary``."""
        if table not in tags:
            return
        remaining = _MAX_HEADERS
        address = tags[table]
        for _ in range(tags.get(number, 0)):
            record = layout.unpack(self.at_address(segments, address, layout.size, "symbol versions"))
            inner = address + record[down]
            for _ in range(record[count]):
                remaining -= 1
                if remaining < 0:
                    raise self.wrong(f"more than {_MAX_HEADERS} symbol versions")
                item = auxiliary.unpack(self.at_address(segments, inner, auxiliary.size, "symbol versions"))
                yield item[name]
                inner += item[-1]
                if not item[-1]:
                    break
            address += record[down + 1]
            if not record[down + 1]:
                break

    def at_address(self, segments: list[_Segment], address: int, size: int, label: str) -> bytes:
        for s in segments:
            if s.kind == _PT_LOAD and s.address <= address and address + size <= s.address + s.size:
                return self.read(s.offset + address - s.address, size, label)
        raise self.wrong(f"the {label} lies outside every segment of the file")

    def read(self, offset: int, size: int, label: str) -> bytes:
        if offset + size > self.size:
            raise self.wrong(f"cut short: the {label} should end at byte {offset + size} of {self.size}")
        self.file.seek(offset)
        data = self.file.read(size)
        if len(data) != size:
            raise self.wrong(f"cut short while it was read, in the {label}")
        return data

    def string(self, strings: bytes, offset: int) -> str:
        end = strings.find(b"\0", offset)
        if offset >= len(strings) or end < 0:
            raise self.wrong(f"a name at {offset} of a string table of {len(strings)} bytes")
        return strings[offset:end].decode("ascii", "backslashreplace")

    def wrong(self, problem: str) -> PackageError:
        return PackageError(f"{self.path}: {problem}")


def _highest(names: Iterator[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for name in names:
        family, _, version = name.rpartition("_")
        family, version = _UNNUMBERED.get(name, (family, version))
        if not all(part.isdecimal() for part in version.split(".")) or not family:
            continue  # GLIBC_PRIVATE, LIBTORCH, the library's own name: without a number, they cannot be compared
        if family not in out or numeric(out[family]) < numeric(version):
            out[family] = version
    return out
