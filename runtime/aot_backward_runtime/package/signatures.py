"""Signatures of packages. A signature is a file next to the package, over all of its bytes
(``docs/signatures.md``).

The signing library is imported only if signatures are checked.
"""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import SignatureError
from .archive import Admit

if TYPE_CHECKING:
    from .model_signing import PublicKey

Key = str | os.PathLike[str]
SUFFIX = ".sig"
LARGEST = 1 << 20  # bytes of a signature or a key; they usually have about 2,000 and 200


def admission(key: Key | None) -> Admit | None:
    """Return the check for :func:`~aot_backward_runtime.package.archive.open_package` to call before it reads a
    package: its signature must be by the owner of ``key``. None without a key.

    Read the key and import the library at once, so that a missing one is an error even without a signature to check."""
    if key is None:
        return None
    data = read_key(key)
    library = signing_library()
    try:
        return partial(_admit, library.public_key(data), key)
    except ValueError as error:
        raise SignatureError(f"cannot check signatures with {key}: {error}") from error


def signing_library() -> ModuleType:
    """Import and return :mod:`aot_backward_runtime.package.model_signing`."""
    try:
        from . import model_signing as library
    except ImportError as error:
        raise SignatureError(
            f"signatures need the OpenSSF model-signing library, which cannot be imported here ({error}): pip install 'aot-backward-runtime[sign]'"
        ) from error
    return library


def signature_beside(path: Path) -> Path | None:
    """Return the signature file next to the package at ``path``, else next to the target if ``path`` is a link, else
    None."""
    for place in dict.fromkeys((path, path.resolve())):
        candidate = place.with_name(place.name + SUFFIX)
        if os.path.lexists(candidate):  # a broken link counts as an unreadable signature, not as a missing one
            return candidate
    return None


def read_key(path: Key) -> bytes:
    """Return the content of a key file. It may be a pipe, such as a shell's ``<(…)``."""
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise SignatureError(f"a key is the path of a PEM file, not {type(path).__name__}") from error
    if "-----BEGIN" in name:
        raise SignatureError("a key is the path of a PEM file, not its content")
    try:
        with Path(name).open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise SignatureError(
            f"cannot read the key {name}: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    if len(data) > LARGEST:
        raise SignatureError(f"{name} is not a key: it has more than {LARGEST} bytes; expected a PEM file")
    return data


def _admit(public: PublicKey, key: Key, path: Path, digest: str) -> None:
    file = signature_beside(path)
    if file is None:
        raise SignatureError(
            f"{path} is not signed, and a signature by {key} is required: expected one in {path.name}{SUFFIX} next to it; get it from the "
            f"package's author, or make it: aot-backward sign {path} --key private.pem"
        )
    try:
        signing_library().check(_read_signature(file), digest, public)
    except ValueError as error:
        raise SignatureError(f"{path} is refused: its signature {file} {error}") from error


def _read_signature(file: Path) -> bytes:
    """Return the content of a signature file. Raise ValueError with a message that continues the file's name."""
    fd, data = -1, b""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: do not wait for a named pipe
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a plain file'}")
        if status.st_size > LARGEST:
            raise ValueError(f"has {status.st_size} bytes; no signature has more than {LARGEST}")
        while len(data) <= LARGEST and (part := os.read(fd, LARGEST)):
            data += part
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    finally:
        if fd >= 0:
            os.close(fd)
    return data
