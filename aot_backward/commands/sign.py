"""``sign(path, key=…)``: puts a signature beside a package. ``docs/signatures.md`` explains it."""

from __future__ import annotations

import os
from pathlib import Path

from aot_backward_runtime.errors import SignatureError
from aot_backward_runtime.format.atomic_file import replacing
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import SUFFIX, Key, read_key, signing_library


def sign(
    path: str | os.PathLike[str], *, key: Key, output: str | os.PathLike[str] | None = None, password: str | None = None
) -> Path:
    """Sign all bytes of a package with your private key, after comparing them with their digests.

    Install the library first: ``pip install 'aot-backward[sign]'``. See ``docs/signatures.md``.

    Args:
        path: The package.
        key: The PEM file with the private key, on the elliptic curve P-256, P-384 or P-521.
        output: The file to write; by default ``PATH.sig``, which :func:`aot_backward.load` reads.
        password: The key's password, if it is encrypted.

    Returns:
        The path of the signature.

    Raises:
        SignatureError: The key cannot sign, or the signature cannot be written.
        PackageError: The file is not a whole package. An older signature stays.

    Examples:
        >>> signature = ab.sign("net.pt2", key="private.pem")
        >>> package = ab.load("net.pt2", key="public.pem")  # SignatureError if a byte has changed
    """
    path = Path(path)
    data = read_key(key)
    library = signing_library()
    try:
        private = library.private_key(data, None if password is None else password.encode())
    except ValueError as error:
        raise SignatureError(f"cannot sign with {key}: {error}") from error
    archive = open_package(path)
    output = path.with_name(path.name + SUFFIX) if output is None else Path(output)
    if any(output.exists() and other.exists() and output.samefile(other) for other in (path, Path(os.fsdecode(key)))):
        raise SignatureError(
            f"cannot write the signature to {output}, which is the package or the key: name another file"
        )
    archive.verify_digests()
    signature = library.make(archive.digest(), path.name, private)
    try:
        with replacing(output.resolve()) as file:
            file.write(signature)
    except OSError as error:
        raise SignatureError(f"cannot write {output}: {error.strerror or error}; nothing was changed") from error
    return output
