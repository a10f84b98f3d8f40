"""The file format of saved training states: tensors by name, and JSON about them (steps made, learning rates).

It is an ordinary safetensors file, so other programs can read its tensors. The training state's other data is in the
header's ``__metadata__``. Every value there is a string:

===============  =======================================================================================================
``format``       ``aot-backward state``
``version``      ``1``
``sha256``       of the whole file, with zeros in place of these 64 digits: header and data are one undamaged state
``complex128``   names, as a JSON list, of tensors stored as F64 with a last dimension of 2, which safetensors lacks
``about``        a JSON object, nested at most 64 deep, no key twice; NaN and infinities are written as Python does
===============  =======================================================================================================

Versions (newest first):
    1  2026-11-21  first
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import PackageError, StateError
from ..format.atomic_file import replacing
from ..format.json_keys import unique_keys
from ..format.safetensors_header import (
    LARGEST_HEADER,
    METADATA,
    Header,
    Stored,
    parse_header,
    read_header_text,
    stored_as,
    write_header,
)
from ..native.tensor_bytes import TORCH_DTYPES, dtype_name, memory_of, tensor_chunks

FORMAT, VERSION = "aot-backward state", "1"
_MAX_ABOUT_DEPTH = 64  # nesting of `about`: the C library, which reads the same files, parses no deeper JSON
_BLANK = "0" * 64  # placeholder of the digest
_CHUNK = 1 << 20  # bytes written or read at a time: bounds the copies for the digest; the size is a guess


def write_state(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write ``path``, or the target of that link, atomically.

    ``about`` must be JSON data: tuples come back as lists, keys as strings. Tensors may be on any device, and come back
    row-major. Raises :class:`StateError`. After an error, or if the process is killed, the old file is untouched."""
    path = Path(path)
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, tensor in plain.items():
        problem = _unstorable(name, tensor)
        if problem:
            raise StateError(f"cannot save training state {path}: tensor {name!r} {problem}")
    try:
        start, order = _write_header(plain, about)
    except (PackageError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"cannot save training state {path}: {error}") from error
    try:
        with replacing(_target(path)) as file:
            _write(file, start, [plain[name] for name in order])
    except OSError as error:
        raise StateError(
            f"cannot save training state {path}: {error.strerror or error}; nothing was changed"
        ) from error


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, each in memory of its own, and the saved JSON.

    Raises :class:`StateError`, which describes the problem; nothing of a damaged file is returned."""
    path = Path(path)
    try:
        with open(_target(path), "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise StateError(f"cannot read training state {path}: it is not a plain file")
            return _read(path, file, status.st_size)
    except OSError as error:
        raise StateError(f"cannot read training state {path}: {error.strerror or error}") from error


def _unstorable(name: str, tensor: torch.Tensor) -> str:
    if name == METADATA:
        return "has a name that safetensors reserves"
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return f"is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}; only plain tensors can be stored"
    return "" if stored_as(dtype_name(tensor), ())[0] else f"has dtype {tensor.dtype}, which safetensors cannot store"


def _write_header(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Return the header with a blank digest, placed before any other 64 zeros, and the tensors' order."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": _BLANK,
        "complex128": json.dumps([name for name, t in tensors.items() if t.dtype == torch.complex128]),
        "about": json.dumps(dict(about)),
    }
    start, order = write_header(
        {name: stored_as(dtype_name(t), tuple(t.shape)) for name, t in tensors.items()}, metadata
    )
    if len(start) - 8 > LARGEST_HEADER:
        raise PackageError(f"the header has {len(start)} bytes; at most {LARGEST_HEADER} are allowed")
    _about(parse_header(start[8:]))  # a file that read_state would refuse must not replace one that it accepts
    return start, order


def _write(file: BinaryIO, start: bytes, tensors: list[torch.Tensor]) -> None:
    digest = hashlib.sha256(start)
    file.write(start)
    for tensor in tensors:
        for memory in tensor_chunks(tensor):
            for offset in range(0, len(memory), _CHUNK):
                # A copy, so that digest and data agree even if another thread goes on training.
                chunk = bytes(memory[offset : offset + _CHUNK])
                digest.update(chunk)
                file.write(chunk)
    file.seek(0)
    file.write(start.replace(_BLANK.encode(), digest.hexdigest().encode(), 1))


def _read(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        text = read_header_text(file, size)
        header = parse_header(text)
    except PackageError as error:
        raise StateError(
            f"cannot read training state {path}: it is not a safetensors file, or is damaged or cut short: {error}"
        ) from error
    if header.metadata.get("format") != FORMAT:
        raise StateError(f"{path} is not a training state: was it written by step.save()?")
    version = header.metadata.get("version")
    if version != VERSION:
        raise StateError(
            f"{path} is a training state of version {version!r}; this runtime reads {VERSION!r}: install the one that wrote it"
        )
    if size != header.size:
        problem = "was cut short" if size < header.size else "has bytes left over"
        raise StateError(
            f"corrupt training state {path}: it {problem}: it has {size} bytes, but its header says {header.size}"
        )
    try:
        expected = header.metadata.get("sha256", "")
        digest = hashlib.sha256(
            struct.pack("<Q", len(text)) + text.replace(expected.encode(errors="replace"), _BLANK.encode(), 1)
        )
        complex_names = _complex_names(header)
        tensors = {
            name: _tensor(file, name, place, name in complex_names, digest) for name, place in header.tensors.items()
        }
        if digest.hexdigest() != expected:
            raise PackageError(f"SHA-256 is {digest.hexdigest()}, expected {expected[:64]!r}")
        return tensors, _about(header)
    except PackageError as error:
        raise StateError(f"corrupt training state {path}: {error}") from error


def _tensor(file: BinaryIO, name: str, place: Stored, is_complex: bool, digest: hashlib._Hash) -> torch.Tensor:
    shape, dtype = (place.shape[:-1], torch.complex128) if is_complex else (place.shape, TORCH_DTYPES[place.dtype])
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # explicit, because the default device may be another
    if not tensor.numel():
        return tensor
    memory = memory_of(tensor)
    for offset in range(0, len(memory), _CHUNK):
        chunk = memory[offset : offset + _CHUNK]
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            raise PackageError("it was cut short while it was read")
        digest.update(chunk)
    if dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
        raise PackageError(f"tensor {name!r}: a boolean that is neither 0 nor 1")
    return tensor


def _complex_names(header: Header) -> set[str]:
    names = _json(header, "complex128")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PackageError("complex128 is not a list of names")
    for name in names:
        place = header.tensors.get(name)
        if place is None or place.dtype != "F64" or place.shape[-1:] != (2,):
            raise PackageError(f"tensor {name!r} is not stored in the form of complex128")
    return set(names)


def _about(header: Header) -> dict[str, Any]:
    about = _json(header, "about")
    if not isinstance(about, dict):
        raise PackageError(f"about is a {type(about).__name__}, not an object")
    if _deeper(about, _MAX_ABOUT_DEPTH):
        raise PackageError(f"about is nested more than {_MAX_ABOUT_DEPTH} deep")
    return about


def _json(header: Header, key: str) -> Any:
    try:
        return json.loads(header.metadata.get(key, ""), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{key} is not JSON: {error}") from error


def _deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than ``levels`` deep."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(_deeper(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))


def _target(path: Path) -> Path:
    """Return the target of a link."""
    try:
        return path.resolve()
    except (RuntimeError, ValueError) as error:  # circular links, or a zero byte in the path
        raise OSError(None, str(error)) from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a named pipe would wait for a writer
