"""The location of each member of a package, read more strictly than by :mod:`zipfile`.

``zipfile`` accepts bytes before, between and after members, takes the last of two members of one name, ignores the
contents of local headers, and trusts sizes. A package is a zip file in the narrow form of ``docs/format.md``, section
1. This module refuses anything else before it allocates memory by a size that the file states. Layouts: PKWARE APPNOTE
6.3, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16, 4.5.3.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import PackageError

PADDING = 0x4246  # id of the extra field with which PyTorch and the package writer align data
_ZIP64 = 1
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64, _LOCATOR, _END = struct.Struct("<IQHHIIQQQQ"), struct.Struct("<IIQI"), struct.Struct("<IHHHHIIH")
_LOCAL_MAGIC, _CENTRAL_MAGIC = 0x04034B50, 0x02014B50
_END64_MAGIC, _LOCATOR_MAGIC, _END_MAGIC = 0x06064B50, 0x07064B50, 0x06054B50
_WIDE = 0xFFFFFFFF  # the true value is in the zip64 extra field
_LARGEST_DIRECTORY = 64 << 20  # bytes; a member takes about 150
_NAME = re.compile(r"[!-~]+")  # printable ASCII without the space
_DOS_FOLDER = 0x10
WRITTEN_OVER = "was it overwritten in place? Write a new file, and rename it over the old one"


@dataclass(frozen=True)
class Place:
    """Data of one member: ``size`` bytes from ``offset`` of the file."""

    offset: int
    size: int
    crc: int


def read_at(fd: int, offset: int, size: int, path: Path) -> bytes:
    """Return ``size`` bytes from ``offset``. The descriptor's own position does not move, so threads and forks can
    share it."""
    parts = []
    try:
        while size and (part := os.pread(fd, size, offset)):
            parts.append(part)
            offset += len(part)
            size -= len(part)
    except OSError as error:
        raise PackageError(f"cannot read package {path} at byte {offset}: {error.strerror}") from error
    if size:
        raise _cut_short(path, offset)
    return b"".join(parts)


def read_into(fd: int, offset: int, memory: memoryview, path: Path) -> None:
    """Fill ``memory`` with bytes from ``offset``, as :func:`read_at`."""
    try:
        while memory and (read := os.preadv(fd, [memory], offset)):  # at most 2 GiB at once
            offset += read
            memory = memory[read:]
    except OSError as error:
        raise PackageError(f"cannot read package {path} at byte {offset}: {error.strerror}") from error
    if memory:
        raise _cut_short(path, offset)


def _cut_short(path: Path, offset: int) -> PackageError:
    return PackageError(f"corrupt package {path}: it ended at byte {offset} while it was read; {WRITTEN_OVER}")


def read_directory(fd: int, size: int, path: Path) -> dict[str, Place]:
    """Return the members of the archive of ``size`` bytes behind ``fd``, in their order; ``path`` is for messages."""
    return _Directory(fd, size, path).read()


class _Directory:
    def __init__(self, fd: int, size: int, path: Path) -> None:
        self.fd, self.size, self.path = fd, size, path

    def wrong(self, problem: str) -> PackageError:
        return PackageError(f"corrupt package {self.path}: {problem}")

    def at(self, offset: int, size: int) -> bytes:
        return read_at(self.fd, offset, size, self.path)

    def read(self) -> dict[str, Place]:
        count, start, length = self.end_record()
        if length > _LARGEST_DIRECTORY or count * _CENTRAL.size > length:
            raise self.wrong(f"{count} members in a central directory of {length} bytes")
        central = self.at(start, length)
        places: dict[str, Place] = {}
        folded: dict[str, str] = {}
        position = expected = 0
        for _ in range(count):
            if position + _CENTRAL.size > length:
                raise self.wrong(f"the central directory ends after {len(places)} of {count} members")
            name, header, place, position = self.central_entry(central, position, start)
            if name.casefold() in folded:
                raise self.wrong(f"member {name}: the archive also holds {folded[name.casefold()]}")
            if header != expected:
                raise self.wrong(
                    f"member {name} begins at byte {header}, expected {expected}, right after the one before"
                )
            folded[name.casefold()] = name
            places[name] = place
            expected = place.offset + place.size
        if position != length:
            raise self.wrong(f"{length - position} bytes in the central directory after its last member")
        if expected != start:
            raise self.wrong(f"{start - expected} bytes between the last member and the central directory")
        return places

    def end_record(self) -> tuple[int, int, int]:
        """Return the number of members, and offset and length of the central directory, which ends where the end
        records begin."""
        if self.size < _END.size:
            raise self.cut_short()
        end = self.size - _END.size
        magic, disk, first, here, count, length, start, comment = _END.unpack(self.at(end, _END.size))
        if magic != _END_MAGIC:
            raise self.cut_short()
        if comment:
            raise self.wrong(f"its end record states a comment of {comment} bytes")
        if disk or first or here != count:
            raise self.wrong("it is one part of a split archive")
        if start + length == end:
            return count, start, length
        end -= _LOCATOR.size + _END64.size
        if end < 0 or self.at(end + _END64.size, 4) != struct.pack("<I", _LOCATOR_MAGIC):
            raise self.wrong(
                f"bytes {start + length} to {self.size - _END.size}, before its end record, belong to no member"
            )
        magic, rest, _, _, disk, first, here64, count64, length64, start64 = _END64.unpack(self.at(end, _END64.size))
        _, disk_of, offset, disks = _LOCATOR.unpack(self.at(end + _END64.size, _LOCATOR.size))
        fits = (magic, rest, offset, here64) == (_END64_MAGIC, _END64.size - 12, end, count64)
        if not fits or (disk, first, disk_of, disks) != (0, 0, 0, 1):
            raise self.wrong("its zip64 end record is invalid")
        narrow = min(count64, 0xFFFF), min(length64, _WIDE), min(start64, _WIDE)
        if (count, length, start) != narrow or start64 + length64 != end:
            raise self.wrong("its two end records disagree")
        return count64, start64, length64

    def central_entry(self, central: bytes, position: int, limit: int) -> tuple[str, int, Place, int]:
        """Return name, offset of the local header, place of the data, and position of the next entry."""
        fields = _CENTRAL.unpack_from(central, position)
        (
            magic,
            made_by,
            _,
            flags,
            method,
            time,
            date,
            crc,
            stored,
            size,
            n_name,
            n_extra,
            n_comment,
            disk,
            _,
            mode,
            header,
        ) = fields
        position += _CENTRAL.size
        if magic != _CENTRAL_MAGIC or position + n_name + n_extra + n_comment > len(central):
            raise self.wrong(f"entry at byte {position - _CENTRAL.size} of the central directory is invalid")
        name = self.name(central[position : position + n_name])
        extra = self.zip64_field(name, central[position + n_name : position + n_name + n_extra], {_ZIP64})
        size, stored, header = self.wide(name, (size, stored, header), extra)
        if flags:
            refused = "encryption, data descriptors and other encodings are refused. A file of torch.save has them: export the model"
            raise self.wrong(f"member {name}: flags {flags:#x}; {refused}")
        if method or size != stored:
            raise self.wrong(
                f"member {name}: compressed (method {method}, {stored} bytes for {size}); members must be stored uncompressed"
            )
        kind = stat.S_IFMT(mode >> 16)
        if (made_by >> 8 == 3 and kind not in (0, stat.S_IFREG)) or mode & _DOS_FOLDER:
            raise self.wrong(f"member {name}: mode {mode >> 16:#o} is not that of a plain file")
        if disk or n_comment:
            raise self.wrong(f"member {name}: it has a comment, or is in another part of a split archive")
        if header + _LOCAL.size > limit:
            raise self.wrong(f"member {name}: its header lies at byte {header}, but members end at {limit}")
        fields = _LOCAL.unpack(self.at(header, _LOCAL.size))
        local_magic, _, *shared, local_stored, local_size, local_n_name, local_n_extra = fields
        offset = header + _LOCAL.size + local_n_name + local_n_extra
        if offset + size > limit:
            raise self.wrong(f"member {name}: {size} bytes at {offset}, but members end at byte {limit}")
        raw = self.at(header + _LOCAL.size, local_n_name + local_n_extra)
        local_extra = self.zip64_field(name, raw[local_n_name:], {_ZIP64, PADDING})
        local_size, local_stored = self.wide(name, (local_size, local_stored), local_extra)
        if local_magic != _LOCAL_MAGIC or raw[:local_n_name] != name.encode():
            raise self.wrong(f"member {name}: no header of that name at byte {header}")
        if shared != [flags, method, time, date, crc] or (local_stored, local_size) != (stored, size):
            raise self.wrong(f"member {name}: its local header and the central directory disagree")
        return name, header, Place(offset, size, crc), position + n_name + n_extra

    def name(self, raw: bytes) -> str:
        name = raw.decode("ascii", "backslashreplace")
        if not _NAME.fullmatch(name) or "\\" in name or ":" in name:
            raise self.wrong(f"member {name!r}: a name holds printable ASCII only, without '\\' and ':'")
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise self.wrong(f"member {name!r}: an absolute name, or an empty, '.' or '..' component")
        return name

    def zip64_field(self, name: str, data: bytes, kinds: set[int]) -> bytes:
        """Return the content of the zip64 field, if there is one."""
        fields: dict[int, bytes] = {}
        while data:
            kind, length = struct.unpack_from("<HH", data) if len(data) >= 4 else (-1, 0)
            if kind not in kinds or kind in fields or 4 + length > len(data):
                raise self.wrong(f"member {name}: extra field {kind:#x} of {length} bytes is not allowed in packages")
            fields[kind] = data[4 : 4 + length]
            data = data[4 + length :]
        return fields.get(_ZIP64, b"")

    def wide(self, name: str, values: tuple[int, ...], zip64: bytes) -> tuple[int, ...]:
        missing = values.count(_WIDE)
        if len(zip64) != 8 * missing:
            raise self.wrong(f"member {name}: {missing} sizes of 64 bits in a zip64 field of {len(zip64)} bytes")
        sizes = iter(struct.unpack(f"<{missing}Q", zip64))
        return tuple(next(sizes) if v == _WIDE else v for v in values)

    def cut_short(self) -> PackageError:
        """Walk the local headers of a file without an end record, and return an error that names the member at which it
        stops."""
        if self.size < _LOCAL.size or self.at(0, 4) != struct.pack("<I", _LOCAL_MAGIC):
            return self.wrong(f"not a zip archive ({self.size} bytes)")
        offset, last = 0, ""
        while offset + _LOCAL.size <= self.size:
            magic, _, _, _, _, _, _, size, wide, n_name, n_extra = _LOCAL.unpack(self.at(offset, _LOCAL.size))
            if magic != _LOCAL_MAGIC:
                break
            raw = self.at(offset + _LOCAL.size, min(n_name + n_extra, self.size - offset - _LOCAL.size))
            last = raw[:n_name].decode("ascii", "backslashreplace")
            if wide == _WIDE and len(raw) == n_name + n_extra:
                size = self.wide(last, (wide, size), self.zip64_field(last, raw[n_name:], {_ZIP64, PADDING}))[1]
            offset += _LOCAL.size + n_name + n_extra + size
            if offset > self.size:
                return self.wrong(f"cut short in member {last}, which should end at byte {offset} of {self.size}")
        return self.wrong(
            f"cut short or overwritten after member {last}, at byte {offset} of {self.size}: no end record"
        )
