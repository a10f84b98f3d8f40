"""The header of a safetensors file: 8 bytes of little-endian length, then JSON. It is read strictly, and written so
that data can be mapped.

The format: https://github.com/huggingface/safetensors, README, "Format". The runtime parses it itself to avoid a second
native library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import PackageError
from .json_keys import unique_keys

ALIGNMENT = 64  # bytes; the alignment of PyTorch's own allocator
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
METADATA = "__metadata__"  # no tensor may have this name
FROM_PYTORCH = {"format": "pt"}
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""PyTorch's name of a dtype, and the format's. ``complex128``, which the format lacks, is stored as F64 with a last
dimension of 2."""
# Of an element; 1 in every other format
BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: its dtype as the format names it, its shape, and its bytes as offsets into the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The contents of a header. ``size`` is the size of the whole file that it describes."""

    tensors: dict[str, Stored]  # in the order of their bytes
    metadata: dict[str, str]
    start: int  # offset of the data in the file
    size: int


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return how a tensor of PyTorch's ``dtype`` is stored: the format's dtype ("" if it has none) and shape."""
    return ("F64", (*shape, 2)) if dtype == "complex128" else (DTYPES.get(dtype, ""), shape)


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor; ``dtype`` is the format's."""
    return math.prod(shape) * BYTES.get(dtype, 1)


def write_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = FROM_PYTORCH
) -> tuple[bytes, list[str]]:
    """Return the header for tensors of these (format's) dtypes and shapes, and the order in which their data must
    follow.

    The format allows no gaps. So a tensor whose size is a multiple of 64 comes before one whose size is only a multiple
    of 32, and so on: each then lies at a multiple of the largest power of two, up to 64, that divides its size."""

    def largest_divisor(size: int) -> int:
        return math.gcd(size, ALIGNMENT)

    order = sorted(tensors, key=lambda name: (-largest_divisor(size_of(*tensors[name])), name))
    header: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_of(dtype, shape)]}
        offset += size_of(dtype, shape)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, order


def read_header(data: bytes | memoryview) -> tuple[dict[str, Stored], int]:
    """Return the tensors of the file ``data``, in the order of their bytes, and the offset of the first.
    :class:`PackageError` names the tensor."""
    length = _length(bytes(data[:8]), len(data))
    header = parse_header(bytes(data[8 : 8 + length]))
    if header.size != len(data):
        raise PackageError(f"tensors take {header.size - header.start} bytes, but there are {len(data) - header.start}")
    return header.tensors, header.start


def read_header_text(file: BinaryIO, size: int) -> bytes:
    """Return the header's JSON from ``file``, of ``size`` bytes. The file position is then at the start of the data."""
    length = _length(file.read(8), size)
    return file.read(length)


def parse_header(text: bytes) -> Header:
    """Parse a header's JSON and check its consistency. The caller checks that the file's length is the stated one."""
    try:
        raw = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"its header is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise PackageError(f"its header is a {type(raw).__name__}, not an object")
    metadata = raw.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PackageError(f"its {METADATA} is not an object of strings")
    tensors = sorted(
        ((name, _stored(name, value)) for name, value in raw.items()), key=lambda pair: (pair[1].begin, pair[1].end)
    )
    expected = 0
    for name, stored in tensors:
        if stored.begin != expected:
            raise PackageError(
                f"tensor {name!r} begins at byte {stored.begin}, expected {expected}, where the one before ends"
            )
        expected = stored.end
    return Header(dict(tensors), metadata, 8 + len(text), 8 + len(text) + expected)


def _length(first: bytes, size: int) -> int:
    if size < 8 or len(first) < 8:
        raise PackageError(f"{size} bytes are not a safetensors file")
    length: int = struct.unpack("<Q", first)[0]
    if length > min(size - 8, LARGEST_HEADER):
        raise PackageError(f"a header of {length} bytes in a file of {size}")
    return length


def _stored(name: str, value: Any) -> Stored:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(value) == 3:
            sizes = (*shape, begin, end)
        case _:
            sizes = ("",)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise PackageError(f"tensor {name!r}: {str(value)[:80]} is not a dtype, a shape and two offsets")
    if dtype not in DTYPES.values():
        raise PackageError(f"tensor {name!r}: dtype {dtype[:20]!r} is unknown")
    # Strides are products of sizes even if another size is 0, so an empty tensor can overflow as well.
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 1 << 60:
        raise PackageError(f"tensor {name!r}: its shape is too large")
    if end - begin != size_of(dtype, shape):
        raise PackageError(
            f"tensor {name!r}: {dtype} of shape {shape} takes {size_of(dtype, shape)} bytes, not {end - begin}"
        )
    return Stored(dtype, tuple(shape), begin, end)
