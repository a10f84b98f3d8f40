"""Signatures by the OpenSSF model-signing library and its cryptography. Only :func:`.signatures.signing_library`
imports this module.

A signature has the library's format: a Sigstore bundle (JSON) around an in-toto statement that names one resource,
``.``, with the SHA-256 of the package's bytes. The library's command line can also check and make them. The folder and
name of the package are not compared. Errors are ValueErrors with messages that continue the name of the faulty file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import hashing, signing, verifying
from model_signing._hashing.hashing import Digest  # manifests need it, and it has no public name
from model_signing.manifest import FileManifestItem, Manifest, SerializationType

CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
_KINDS = f"an elliptic-curve key on {', '.join(list(CURVES.values())[:-1])} or {list(CURVES.values())[-1]}"
_MAKE = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out private.pem"


@dataclass(frozen=True)
class PublicKey:
    """A public key. ``fingerprint``: SHA-256 of ``pem``; signatures name their key by it."""

    pem: bytes
    fingerprint: str


@dataclass(frozen=True)
class PrivateKey:
    pem: bytes
    password: bytes | None
    public: PublicKey

    def __repr__(self) -> str:
        return f"PrivateKey({self.public.fingerprint})"


def public_key(data: bytes) -> PublicKey:
    if b"PRIVATE KEY" in data:
        raise ValueError(
            "it is a private key; write its public key with: openssl pkey -in private.pem -pubout -out public.pem"
        )
    if b"BEGIN CERTIFICATE" in data:
        raise ValueError(
            "it is a certificate; print its public key with: openssl x509 -in certificate.pem -pubkey -noout"
        )
    if (count := data.count(b"-----BEGIN ")) > 1:
        raise ValueError(f"it has {count} keys, and only the first would be trusted; expected one")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"it is not a public key in PEM form; expected {_KINDS}") from error
    return _public(key)


def private_key(data: bytes, password: bytes | None) -> PrivateKey:
    if b"PUBLIC KEY" in data and b"PRIVATE KEY" not in data:
        raise ValueError("it is a public key, which cannot sign; expected the private key that it belongs to")
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError as error:  # a password is missing or superfluous
        message = (
            "it is not encrypted, but a password was given"
            if password is not None
            else "it is encrypted, and no password was given"
        )
        raise ValueError(message) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if password is not None and b"PRIVATE KEY" in data:
            raise ValueError("the password does not decrypt it") from error
        raise ValueError(f"it is not a private key in PEM form; make one: {_MAKE}") from error
    return PrivateKey(data, password, _public(key.public_key()))


def make(digest: str, name: str, key: PrivateKey) -> bytes:
    """Return the signature of bytes with that SHA-256. ``name`` is for readers and is not compared."""
    config = signing.Config().set_hashing_config(_KnownDigest(digest, name))
    with _handed(key.pem) as private, _handed(b"") as out:
        config.use_elliptic_key_signer(private_key=private, password=key.password)  # type: ignore[arg-type] # annotated as str, but passes bytes on
        config.sign(name, out)
        signature = out.read_bytes()
    check(signature, digest, key.public)
    return signature


def check(signature: bytes, digest: str, key: PublicKey) -> None:
    """Raise ValueError unless ``signature`` is of bytes with that SHA-256 and by that key."""
    signer = _signer(signature)
    if signer != key.fingerprint:
        raise ValueError(
            f"is by another key: its fingerprint is {signer}, expected {key.fingerprint}; load with the public key of the signer"
        )
    config = _KnownDigest(digest, "package")
    with _handed(key.pem) as public, _handed(signature) as file:
        try:
            verifying.Config().use_elliptic_key_verifier(public_key=public).set_hashing_config(config).verify(
                "package", file
            )
        # Any error of the library's parsers on a damaged file must refuse the package, with a reason
        except Exception as error:
            if config.manifest.signed is not None:
                raise ValueError(_other(config.manifest.signed, digest)) from error
            if isinstance(error, InvalidSignature):
                raise ValueError(
                    "is bad: it was changed after it was made, or is not by the key that it names; sign the package again"
                ) from error
            raise ValueError(
                f"cannot be parsed ({type(error).__name__}): it is damaged; sign the package again"
            ) from error
    if config.manifest.signed is None:
        raise ValueError(
            "was not compared with the package: this version of the model-signing library is not supported"
        )


class _Compared(Manifest):
    """A manifest of one resource that keeps the manifest it was last compared with."""

    signed: Manifest | None = None

    def __eq__(self, other: Any) -> bool:
        self.signed = other
        return bool(super().__eq__(other))

    __hash__ = None  # type: ignore[assignment]


class _KnownDigest(hashing.Config):
    """A hashing config that returns known digests, because the file at a path may have changed since it was hashed."""

    def __init__(self, digest: str, name: str):
        super().__init__()
        serialization_type = SerializationType.from_args(
            {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        )
        item = FileManifestItem(path=PurePosixPath("."), digest=Digest("sha256", bytes.fromhex(digest)))
        self.manifest = _Compared(name, [item], serialization_type)

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Manifest:
        return self.manifest


def _other(signed: Manifest, digest: str) -> str:
    resources = [(r.identifier, r.digest.algorithm, r.digest.digest_hex) for r in signed.resource_descriptors()]
    name = repr(signed.model_name)[:80]
    if len(resources) != 1 or resources[0][:2] != (".", "sha256"):
        return f"is good, but for {len(resources)} resources of {name}, not for one package with its SHA-256; sign the package: aot-backward sign"
    return (
        f"is good, but for other bytes: it was made for {name} with SHA-256 {resources[0][2]}, and this file has {digest}; the file was changed or "
        "replaced after it was signed: get the file that was signed, or sign this one if it is yours"
    )


def _signer(signature: bytes) -> str:
    """Return the fingerprint of the key that a signature names. It is not trusted: it only tells that other keys need
    not be tried."""
    try:
        fingerprint = json.loads(signature)["verificationMaterial"]["publicKey"]["hint"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = (
            "is empty" if not signature else "is not a signature by a key (a Sigstore bundle in JSON), or is damaged"
        )
        raise ValueError(f"{problem}; sign the package again: aot-backward sign") from error
    if (
        not isinstance(fingerprint, str)
        or len(fingerprint) != 64
        or not fingerprint.isascii()
        or not fingerprint.isalnum()
    ):
        raise ValueError("does not name its key; sign the package again: aot-backward sign")
    return fingerprint


def _public(key: object) -> PublicKey:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(
            f"it is of kind {type(key).__name__.removesuffix('PublicKey').lstrip('_')}; expected {_KINDS}: {_MAKE}"
        )
    if key.curve.name not in CURVES:
        raise ValueError(f"it is on the curve {key.curve.name}; expected {_KINDS}: {_MAKE}")
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(pem, hashlib.sha256(pem).hexdigest())


@contextlib.contextmanager
def _handed(data: bytes) -> Iterator[Path]:
    """Yield a path at which the library reads exactly ``data``: the library takes paths, and files may change between
    two reads. Nothing is written to disk, which matters for private keys."""
    with os.fdopen(os.memfd_create("aot-backward"), "w+b") as file:
        file.write(data)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")
