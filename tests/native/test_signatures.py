"""Signatures through the C API. C accepts packages signed by Python. It refuses other keys and other bytes before it
reads the package."""

from __future__ import annotations

import base64
import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import aot_backward as ab

from ..support import c_library, golden_files
from ..support.c_library import FORMAT, OK, SIGNATURE, library

pytestmark = golden_files.needed


def opened(path: Path, key: Path) -> tuple[int, str]:
    """Open with that key and return the status and the error text."""
    handle = ctypes.c_void_p()
    status = library().aotb_open(
        bytes(path), ctypes.byref(c_library.Options(b"libtorch", bytes(key))), ctypes.byref(handle)
    )
    library().aotb_close(handle)
    return status, library().aotb_error().decode() if status else ""


def make_key(folder: Path, name: str, curve: ec.EllipticCurve) -> Path:
    key = ec.generate_private_key(curve)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.pem").write_bytes(private)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pub"


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """Return a signed package. ``own.pub`` and ``other.pub`` are in its folder."""
    for name in ("own", "other"):
        make_key(tmp_path, name, ec.SECP256R1())
    path = tmp_path / "pair.pt2"
    shutil.copyfile(golden_files.FOLDER / "1.0-pair.pt2", path)
    ab.sign(path, key=tmp_path / "own.pem")
    return path


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_what_python_signs_is_admitted(curve: ec.EllipticCurve, tmp_path: Path) -> None:
    public, path = make_key(tmp_path, "key", curve), tmp_path / "pair.pt2"
    shutil.copyfile(golden_files.FOLDER / "1.0-pair.pt2", path)
    ab.sign(path, key=tmp_path / "key.pem")
    assert opened(path, public) == (OK, "")
    (tmp_path / "link.pt2").symlink_to(path)
    assert opened(tmp_path / "link.pt2", public) == (OK, "")


def test_other_keys_and_packages_without_a_signature(signed: Path) -> None:
    folder = signed.parent
    status, words = opened(signed, folder / "other.pub")
    assert status == SIGNATURE and "by another key" in words
    for key, word in (
        ("own.pem", "private key"),
        ("nonsuch", "cannot be read"),
        ("pair.pt2.sig", "expected one public key"),
    ):
        status, words = opened(signed, folder / key)
        assert status == SIGNATURE and word in words
    (folder / "two.pub").write_bytes((folder / "own.pub").read_bytes() + (folder / "other.pub").read_bytes())
    assert opened(signed, folder / "two.pub")[0] == SIGNATURE
    assert opened(signed, make_key(folder, "koblitz", ec.SECP256K1()))[0] == SIGNATURE
    signed.with_name("pair.pt2.sig").unlink()
    status, words = opened(signed, folder / "own.pub")
    assert status == SIGNATURE and "not signed" in words and "pair.pt2.sig" in words


def test_other_bytes_are_refused(signed: Path) -> None:
    key, good = signed.parent / "own.pub", signed.read_bytes()
    for place in range(100, len(good), len(good) // 20):
        signed.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert opened(signed, key)[0] in (SIGNATURE, FORMAT)
    shutil.copyfile(golden_files.FOLDER / "1.2-step.pt2", signed)
    status, words = opened(signed, key)
    assert status == SIGNATURE and "for other bytes" in words


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    bundle = json.loads(path.read_text())
    change(bundle)
    path.write_text(json.dumps(bundle))


def _payload(bundle: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["dsseEnvelope"].update(payload=""),
        lambda b: b["dsseEnvelope"].update(payload="!!!!"),
        lambda b: b["dsseEnvelope"].update(payloadType="text/plain"),
        lambda b: b["dsseEnvelope"].update(signatures=[]),
        lambda b: b["dsseEnvelope"]["signatures"].append(b["dsseEnvelope"]["signatures"][0]),
        lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=base64.b64encode(bytes(70)).decode()),
        lambda b: _payload(b, lambda s: s["predicate"]["resources"][0].update(digest="0" * 64)),
        lambda b: b.update(mediaType="x"),
        lambda b: b["verificationMaterial"]["publicKey"].update(hint="0" * 64),
        lambda b: b.clear(),
    ],
)
def test_signatures_that_were_changed(signed: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewritten(signed.with_name("pair.pt2.sig"), change)
    status, words = opened(signed, signed.parent / "own.pub")
    assert status == SIGNATURE and "pair.pt2.sig" in words


def test_signature_files_that_are_none(signed: Path) -> None:
    file, key = signed.with_name("pair.pt2.sig"), signed.parent / "own.pub"
    good = file.read_bytes()
    for data in (b"", b"{", good[:-1], good + b"x", b"[" * 1000, b" " * (1 << 21)):
        file.write_bytes(data)
        assert opened(signed, key)[0] == SIGNATURE
    file.unlink()
    file.mkdir()
    assert opened(signed, key)[0] == SIGNATURE
