"""Read the properties of kernels from the machine code in a library. Each embedded "cubin" is a complete ELF file.

NVIDIA does not document the section ``.nv.info.<kernel>``. The numbers below come from the names that
``cuobjdump -elf`` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_CUDA_MACHINE = 190  # EM_CUDA
# The offset of the ABI version. In version 7 (ptxas 13 for sm_80) the architecture is the lowest byte of the flags,
# later the next one
_ABI_VERSION = 8
_NOBITS = 8
_HEADER, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SIZED, _IN_PLACE = 4, (1, 2, 3)  # EIFMT_SVAL: a length, then the bytes; NVAL, BVAL, HVAL: the next two bytes
_REQNTID, _KPARAM_INFO, _CBANK_PARAM_SIZE = 0x10, 0x17, 0x19  # EIATTR_...


@dataclass(frozen=True)
class Kernel:
    """``parameters``: offset and size in bytes of each, by ordinal. ``bytes_of_parameters``: their total size.
    ``threads``: threads of a block in three dimensions; a launch must use the same. ``uses_shared``: whether there is a
    section of shared memory; the launch decides its size."""

    name: str
    architecture: str
    parameters: tuple[tuple[int, int], ...]
    bytes_of_parameters: int
    threads: tuple[int, ...]
    uses_shared: bool


def kernels(library: bytes) -> list[Kernel]:
    """Return the kernels of all machine code in ``library``."""
    found = []
    at = library.find(b"\x7fELF", 1)
    while at > 0:
        if struct.unpack_from("<H", library, at + 18)[0] == _CUDA_MACHINE:
            found += kernels_of(library[at:])
        at = library.find(b"\x7fELF", at + 4)
    return found


def kernels_of(cubin: bytes) -> list[Kernel]:
    """Return the kernels of ``cubin``. It may be longer than the ELF file at its start."""
    flags = _HEADER.unpack_from(cubin)[7] >> (8 if cubin[_ABI_VERSION] >= 8 else 0)
    inside = dict(sections(cubin))
    prefix = ".nv.info."
    return [
        _kernel(name.removeprefix(prefix), f"sm_{flags & 0xFF}", data, inside)
        for name, data in inside.items()
        if name.startswith(prefix)
    ]


def sections(file: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and contents of each section of an ELF file."""
    header = _HEADER.unpack_from(file)
    at, size, count, names = header[6], header[11], header[12], header[13]
    rows = [_SECTION.unpack_from(file, at + number * size) for number in range(count)]
    for row in rows:
        start = rows[names][4] + row[0]
        yield (
            file[start : file.index(b"\0", start)].decode(),
            b"" if row[1] == _NOBITS else file[row[4] : row[4] + row[5]],
        )


def _kernel(name: str, architecture: str, info: bytes, inside: dict[str, bytes]) -> Kernel:
    parameters: dict[int, tuple[int, int]] = {}
    together, threads = -1, ()
    for attribute, value in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack("<IHHI", value)
            parameters[ordinal] = (offset, bits >> 18)
        elif attribute == _CBANK_PARAM_SIZE:
            together = int.from_bytes(value, "little")
        elif attribute == _REQNTID:
            threads = struct.unpack("<3I", value)
    ordered = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return Kernel(name, architecture, ordered, together, threads, f".nv.shared.{name}" in inside)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        if form == _SIZED:
            yield attribute, info[at + 4 : at + 4 + length]
            at += 4 + length
        elif form in _IN_PLACE:
            yield attribute, info[at + 2 : at + 4]
            at += 4
        else:
            raise ValueError(f".nv.info: unknown form {form} of an attribute")
