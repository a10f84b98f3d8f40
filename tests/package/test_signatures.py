"""Signatures (docs/reliability.md, row 39). With a key, a package without its signature is refused before any use, and
only the signed bytes are used."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from model_signing import hashing, signing, verifying
from safetensors.torch import load, save

import aot_backward as ab
import aot_backward_runtime
from aot_backward_runtime import AotBackwardError, PackageError, SignatureError
from aot_backward_runtime import load as load_package
from aot_backward_runtime.format.manifest_json import sealed
from aot_backward_runtime.format.zip_directory import read_at
from aot_backward_runtime.native.weights import load_weights
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import admission

from ..commands.test_cli import called, fails
from ..support.packages import LIBRARY, MANIFEST, WEIGHTS, python, taken_apart, tiny_weights, write_tiny

WEIGHT = "layer.weight"  # mapped in place; a smaller one at an unaligned offset would be copied


def write_key(path: Path, key: Any, password: bytes | None = None) -> Path:
    """Write ``path``, and its public half as ``NAME.pub`` in the same folder."""
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of keys. ``own``, ``other`` and ``locked`` are valid, each on another curve."""
    folder = tmp_path_factory.mktemp("keys")
    write_key(folder / "own.pem", ec.generate_private_key(ec.SECP256R1()))
    write_key(folder / "other.pem", ec.generate_private_key(ec.SECP384R1()))
    write_key(folder / "locked.pem", ec.generate_private_key(ec.SECP521R1()), b"open sesame")
    write_key(folder / "rsa.pem", rsa.generate_private_key(65537, 2048))
    write_key(folder / "koblitz.pem", ec.generate_private_key(ec.SECP256K1()))
    (folder / "two.pub").write_bytes((folder / "own.pub").read_bytes() + (folder / "other.pub").read_bytes())
    (folder / "empty.pub").touch()
    (folder / "words.pub").write_text("-----BEGIN PUBLIC KEY-----\nno key\n-----END PUBLIC KEY-----\n")
    (folder / "own.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    with (folder / "large.pub").open("wb") as large:
        large.truncate(1 << 30)
    return folder


@pytest.fixture
def own(keys: Path) -> Path:
    return keys / "own.pub"


@pytest.fixture(scope="session")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt2"
    write_tiny(path)
    return path.read_bytes()


@pytest.fixture
def tiny(tiny_bytes: bytes, keys: Path, tmp_path: Path) -> Path:
    """Return a small package without entries, signed by ``own``."""
    path = tmp_path / "tiny.pt2"
    path.write_bytes(tiny_bytes)
    ab.sign(path, key=keys / "own.pem")
    return path


@pytest.fixture(scope="session")
def twins(package: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return two packages with the same members in the same places. The second has the weight 9 and correct digests."""
    good, members = package.read_bytes(), taken_apart(package)
    weight = load(members[WEIGHTS])[WEIGHT]
    nines = torch.full_like(weight, 9.0)
    weights = replaced(members[WEIGHTS], tensor_bytes(weight), tensor_bytes(nines))
    manifest = replaced(members[MANIFEST], digest(tensor_bytes(weight)).encode(), digest(tensor_bytes(nines)).encode())
    manifest = replaced(manifest, digest(members[WEIGHTS]).encode(), digest(weights).encode())
    manifest = sealed(manifest[: manifest.rindex(b',"sha256"')] + b"}")
    bad = good
    for before, after in ((members[WEIGHTS], weights), (members[MANIFEST], manifest)):
        bad = replaced(bad, before, after)
        bad = replaced(bad, struct.pack("<I", zlib.crc32(before)), struct.pack("<I", zlib.crc32(after)), times=2)
    return good, bad


def replaced(data: bytes, before: bytes, after: bytes, times: int = 1) -> bytes:
    assert data.count(before) == times and len(before) == len(after)
    return data.replace(before, after)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def outcome(loaded: aot_backward_runtime.Package) -> float:
    """Return the result of native code for the weight: 9 saturates tanh."""
    with torch.no_grad():
        return float(loaded.module("net")({"x": torch.ones(2, 4), "weight": torch.ones(2, 1)})["out"][0, 0])


def refused(path: Path, key: Path, *words: str) -> str:
    with pytest.raises(SignatureError) as caught:
        load_package(path, key=key)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    for word in (str(path), *words):
        assert word in text
    return text


def test_a_signed_package_is_loaded_and_right(package: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.pt2"
    path.write_bytes(package.read_bytes())
    assert ab.sign(path, key=str(keys / "own.pem")) == tmp_path / "small.pt2.sig"
    assert outcome(ab.load(path, key=own)) == outcome(load_package(package))
    model = load_package(path, key=str(own)).module("net")
    with torch.no_grad():
        model.layer.weight.fill_(9.0)  # a copy: the file does not change
    assert load_package(path, key=own).module("net").layer.weight.max() < 9


def test_a_package_that_is_not_signed(tiny: Path, own: Path) -> None:
    tiny.with_name("tiny.pt2.sig").unlink()
    refused(tiny, own, "is not signed", "tiny.pt2.sig", str(own), "aot-backward sign")
    load_package(tiny)
    tiny.with_name("tiny.pt2.sig").write_text("not even JSON")
    load_package(tiny)


def bundle(tiny: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    made = json.loads(tiny.with_name("tiny.pt2.sig").read_text())
    change(made)
    return json.dumps(made).encode()


def _sign_bytes(envelope: dict[str, Any], **changes: Any) -> None:
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload.update(changes)
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another digest": (lambda b: _sign_bytes(b["dsseEnvelope"], subject=[]), "is bad"),
    "no signature": (lambda b: b["dsseEnvelope"]["signatures"].clear(), "cannot be parsed"),
    "another signature": (lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="MEUCIQD1"), "is bad"),
    "no key": (lambda b: b["verificationMaterial"].pop("publicKey"), "is not a signature by a key"),
    "a strange key": (
        lambda b: b["verificationMaterial"]["publicKey"].update(hint="\x1b[31m" * 99),
        "does not name its key",
    ),
    "another kind of payload": (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "cannot be parsed"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_signature(how: str, tiny: Path, own: Path) -> None:
    change, words = SPOILT[how]
    tiny.with_name("tiny.pt2.sig").write_bytes(bundle(tiny, change))
    refused(tiny, own, "tiny.pt2.sig", words, "sign")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"[" * 500_000, "is not a signature"),
        (b"[]", "is not a signature"),
    ],
    ids=["empty", "deep", "list"],
)
def test_a_file_that_is_no_signature(content: bytes, words: str, tiny: Path, own: Path) -> None:
    tiny.with_name("tiny.pt2.sig").write_bytes(content)
    refused(tiny, own, "tiny.pt2.sig", words)


def test_what_lies_in_the_place_of_a_signature(tiny: Path, own: Path) -> None:
    """Each of these is an error, not a missing signature."""
    place = tiny.with_name("tiny.pt2.sig")
    place.unlink()
    place.mkdir()
    refused(tiny, own, "is a folder")
    place.rmdir()
    os.mkfifo(place)
    refused(tiny, own, "is not a plain file")
    place.unlink()
    place.symlink_to("nowhere")
    refused(tiny, own, "cannot be read: No such file")
    place.unlink()
    place.symlink_to("/dev/zero")
    refused(tiny, own, "is not a plain file")
    place.unlink()
    with place.open("wb") as file:
        file.truncate(1 << 30)
    refused(tiny, own, "has 1073741824 bytes")


def test_a_signature_by_another_key(tiny: Path, keys: Path, own: Path) -> None:
    found = [hashlib.sha256((keys / f"{n}.pub").read_bytes()).hexdigest() for n in ("own", "other")]
    refused(tiny, keys / "other.pub", "is by another key", *found)
    ab.sign(tiny, key=keys / "other.pem")
    refused(tiny, own, "is by another key")
    # a forged one that claims to be by the requested key
    forged = bundle(tiny, lambda b: b["verificationMaterial"]["publicKey"].update(hint=found[0]))
    tiny.with_name("tiny.pt2.sig").write_bytes(forged)
    refused(tiny, own, "is bad")


def test_the_signature_of_another_file(tiny: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    write_tiny(other, {"bias": torch.zeros(3)})
    place = ab.sign(other, key=keys / "own.pem")
    place.replace(tiny.with_name("tiny.pt2.sig"))
    digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (other, tiny)]
    refused(tiny, own, "is good, but for other bytes", "'other.pt2'", *digests)


def test_one_bit_changed_after_signing_and_signed_again(tiny: Path, keys: Path, own: Path) -> None:
    """The error always names the signature, whatever else the bit broke."""
    good, chance = tiny.read_bytes(), random.Random(1)
    members = [good.index(taken_apart(tiny)[m][:64]) for m in (LIBRARY, WEIGHTS, MANIFEST)]
    for at in [0, len(good) - 1, *members, *(chance.randrange(len(good)) for _ in range(40))]:
        data = bytearray(good)
        data[at] ^= 1 << chance.randrange(8)
        tiny.write_bytes(data)
        refused(tiny, own, "is good, but for other bytes")
    for changed in (good + b"\0", good[:-1], b""):
        tiny.write_bytes(changed)
        refused(tiny, own, "is good, but for other bytes")
    write_tiny(tiny, {"bias": torch.zeros(3)})
    refused(tiny, own, "is good, but for other bytes")
    ab.sign(tiny, key=keys / "own.pem")
    load_package(tiny, key=own)


# Loads a package, then prints the folders opened for native code, the number of memory maps, and the error.
_WATCHED = """
import os, sys
import aot_backward_runtime, torch
from aot_backward_runtime.package import model_signing  # the libraries' own maps and files are not counted
seen = []
def hook(event, arguments):
    if event == "mmap.__new__" or event == "open" and os.environ["AOT_BACKWARD_CACHE"] in str(arguments[0]):
        seen.append(event)
sys.addaudithook(hook)
try:
    aot_backward_runtime.load(sys.argv[1], key=sys.argv[2]).module("net")({"x": torch.zeros(2, 4), "weight": torch.ones(2, 1)})
    error = None
except aot_backward_runtime.SignatureError as caught:
    error = caught
print(sorted(set(seen)), type(error).__name__)
"""


def test_weights_and_native_code_are_read_after_the_signature(
    package: Path, keys: Path, own: Path, tmp_path: Path
) -> None:
    path = tmp_path / "small.pt2"
    path.write_bytes(package.read_bytes())
    ab.sign(path, key=keys / "own.pem")
    cache = str(tmp_path / "cache")
    done = python(_WATCHED, path, keys / "other.pub", AOT_BACKWARD_CACHE=cache)
    assert done.stdout == "[] SignatureError\n", done.stderr
    assert not Path(cache).exists()
    done = python(_WATCHED, path, own, AOT_BACKWARD_CACHE=cache)  # the hook sees them here
    assert done.stdout == "['mmap.__new__', 'open'] NoneType\n", done.stderr


def test_a_package_and_its_signature_move_together(
    tiny: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    moved = folder / "renamed"
    tiny.with_name("tiny.pt2.sig").rename(folder / "renamed.sig")
    tiny.rename(moved)
    load_package(moved, key=own)
    monkeypatch.chdir(folder)
    load_package("renamed", key=own)
    load_package(f"/proc/self/cwd/{moved.name}", key=own)


def test_links(tiny: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    """The signature in the link's folder counts. If there is none, the one in the target's folder counts."""
    folder = tmp_path / "links"
    folder.mkdir()
    link = folder / "current.pt2"
    link.symlink_to(tiny)
    load_package(link, key=own)
    ab.sign(link, key=keys / "other.pem")
    assert sorted(p.name for p in folder.iterdir()) == ["current.pt2", "current.pt2.sig"]
    refused(link, own, "is by another key")
    load_package(link, key=keys / "other.pub")
    load_package(tiny, key=own)


BAD_KEYS = {
    "missing.pub": "cannot read the key",
    "words.pub": "it is not a public key in PEM form",
    "two.pub": "it has 2 keys, and only the first would be trusted",
    "large.pub": "it has more than 1048576 bytes",
    "own.pem": "it is a private key; write its public key with: openssl pkey",
    "own.crt": "it is a certificate; print its public key with: openssl x509",
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_that_is_none(name: str, tiny: Path, keys: Path) -> None:
    with pytest.raises(SignatureError) as caught:
        load_package(tiny, key=keys / name)
    assert str(keys / name) in str(caught.value) and BAD_KEYS[name] in str(caught.value)


def test_what_is_not_the_path_of_a_key(tiny: Path, own: Path) -> None:
    def says(words: str, key: Any) -> None:
        with pytest.raises(SignatureError, match=words):
            load_package(tiny, key=key)

    says("a key is the path of a PEM file, not int", key=3)
    says("a key is the path of a PEM file, not its content", key=own.read_text())
    says("embedded null byte", key="a\0b")
    says("cannot read the key : Is a directory", key="")


def test_a_key_through_a_pipe(tiny: Path, own: Path) -> None:
    """The shell passes such a path for ``--key <(…)``."""
    ours, theirs = os.pipe()
    os.write(theirs, own.read_bytes())
    os.close(theirs)
    load_package(tiny, key=f"/dev/fd/{ours}")
    os.close(ours)


@pytest.mark.parametrize("missing", ["model_signing", "cryptography", "OpenSSL"])
def test_without_the_library(missing: str, tiny: Path, keys: Path) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
import aot_backward_runtime, aot_backward
aot_backward_runtime.load(sys.argv[1])
for call in (lambda: aot_backward_runtime.load(sys.argv[1], key=sys.argv[2] + ".pub"),
             lambda: aot_backward_runtime.load(sys.argv[1], key=sys.argv[2] + ".pub"),
             lambda: aot_backward.sign(sys.argv[1], key=sys.argv[2] + ".pem")):
    try:
        call()
    except aot_backward_runtime.SignatureError as error:
        assert {missing!r} in str(error) and str(error).endswith("pip install 'aot-backward-runtime[sign]'"), error
    else:
        raise SystemExit("taken")
"""
    done = python(code, tiny, keys / "own")
    assert done.returncode == 0, done.stderr


def test_what_was_signed_is_loaded_whatever_the_path_leads_to(
    twins: tuple[bytes, bytes], keys: Path, own: Path, tmp_path: Path
) -> None:
    path, evil = tmp_path / "small.pt2", tmp_path / "evil.pt2"
    path.write_bytes(twins[0])
    evil.write_bytes(twins[1])
    assert outcome(load_package(evil)) == 1  # tanh(36)
    ab.sign(path, key=keys / "own.pem")
    admit = admission(own)
    assert admit is not None

    def replacing(admitted: Path, digest: str) -> None:
        admit(admitted, digest)
        evil.replace(path)

    archive = open_package(path, admit=replacing)
    assert path.read_bytes() == twins[1]
    assert load_weights(archive)[WEIGHT].max() < 9
    refused(path, own, "is good, but for other bytes")


def test_what_was_signed_is_loaded_whatever_is_written_over_it(
    twins: tuple[bytes, bytes], keys: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody with write access overwrites the file at each moment of a load."""
    path = tmp_path / "small.pt2"
    path.write_bytes(twins[0])
    ab.sign(path, key=keys / "own.pem")
    admit = admission(own)
    assert admit is not None

    def overwriting(data: bytes) -> None:
        with path.open("r+b") as file:  # the same file; unlike write_bytes it is not emptied first
            file.write(data)

    def then_bad(admitted: Path, digest: str) -> None:
        admit(admitted, digest)
        overwriting(twins[1])

    with pytest.raises(PackageError, match="SHA-256 is"):  # the new weights do not fit the old manifest
        load_weights(open_package(path, admit=then_bad))
    overwriting(twins[0])
    with monkeypatch.context() as patched:  # also if large weights passed a check before
        patched.setattr("aot_backward_runtime.native.weights.HASHED_ALWAYS", 0)
        patched.setattr("aot_backward_runtime.native.weights.remembered", lambda *_: True)
        with pytest.raises(PackageError, match="SHA-256 is"):
            load_weights(open_package(path, admit=then_bad))
    overwriting(twins[0])
    weights = load_weights(open_package(path, admit=admit))
    before = weights[WEIGHT].clone()
    overwriting(twins[1])
    assert torch.equal(weights[WEIGHT], before)  # they are in memory

    # the manifest is read from the bad file, and the good file is restored before all is hashed
    turned = []

    def turning(fd: int, offset: int, size: int, name: Path) -> bytes:
        data = read_at(fd, offset, size, name)
        if b'"format_version"' in data and not turned:
            turned.append(data)
            overwriting(twins[0])
        return data

    monkeypatch.setattr("aot_backward_runtime.package.archive.read_at", turning)
    with pytest.raises(PackageError, match="it was written to while it was read; load it again"):
        open_package(path, admit=admit)
    assert turned


def test_the_library_s_own_signatures(tiny: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    """The library accepts our signatures, and we accept its signatures of a package. We refuse those of other things or
    with another hash."""
    place = tiny.with_name("tiny.pt2.sig")
    verifying.Config().use_elliptic_key_verifier(public_key=own).verify(tiny, place)
    signer = signing.Config().use_elliptic_key_signer(private_key=keys / "own.pem")
    signer.sign(tiny, place)
    load_package(tiny, key=own)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tiny.pt2").write_bytes(tiny.read_bytes())
    signer.sign(folder, place)
    refused(tiny, own, "is good, but for 1 resources of 'folder'")
    (folder / "tiny.pt2").unlink()
    signer.sign(folder, place)
    refused(tiny, own, "is good, but for 0 resources")
    signer.set_hashing_config(hashing.Config().set_ignored_paths(paths=["."])).sign(tiny, place)  # nothing is signed
    refused(tiny, own, "is good, but for 0 resources")
    signer.set_hashing_config(hashing.Config().use_file_serialization(hashing_algorithm="blake3")).sign(tiny, place)
    refused(tiny, own, "not for one package with its SHA-256", "aot-backward sign")
    signer.set_hashing_config(hashing.Config().use_shard_serialization()).sign(tiny, place)
    refused(tiny, own, "not for one package with its SHA-256")


def test_nothing_is_signed_that_is_damaged_or_no_package(tiny: Path, keys: Path, tmp_path: Path) -> None:
    place = tiny.with_name("tiny.pt2.sig")
    before, data = place.read_bytes(), bytearray(tiny.read_bytes())
    data[data.index(b"\x7fELF") + 5000] ^= 1
    tiny.write_bytes(data)
    with pytest.raises(PackageError, match="SHA-256 is"):
        ab.sign(tiny, key=keys / "own.pem")
    assert place.read_bytes() == before
    with pytest.raises(PackageError):
        ab.sign(keys / "own.pub", key=keys / "own.pem")
    assert not (keys / "own.pub.sig").exists()
    with pytest.raises(PackageError, match="No such file"):
        ab.sign(tmp_path / "nonsuch.pt2", key=keys / "own.pem")
    for folder in (tmp_path, "."):
        with pytest.raises(PackageError, match="it is a folder"):
            ab.sign(folder, key=keys / "own.pem")


def test_where_a_signature_goes(tiny: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    place = tiny.with_name("tiny.pt2.sig")
    before = place.read_bytes()

    def fails_with(words: str, output: Path) -> None:
        with pytest.raises(SignatureError, match=words):
            ab.sign(tiny, key=keys / "own.pem", output=output)
        assert place.read_bytes() == before

    fails_with("which is the package or the key", tiny)
    fails_with("which is the package or the key", keys / "own.pem")
    fails_with("No such file or directory; nothing was changed", tmp_path / "no" / "out.sig")
    fails_with("it is a folder; nothing was changed", tmp_path)
    assert ab.sign(tiny, key=keys / "own.pem", output=tmp_path / "apart.sig") == tmp_path / "apart.sig"
    place.unlink()
    refused(tiny, own, "is not signed")
    (tmp_path / "apart.sig").rename(place)
    load_package(tiny, key=own)


def test_a_key_with_a_password(tiny: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = keys / "locked.pem"
    fails(
        called("sign", tiny, "--key", locked),
        1,
        f"cannot sign with {locked}: it is encrypted, and no password was given",
    )
    monkeypatch.setenv("KEY_PASSWORD", "wrong")
    told = fails(
        called("sign", tiny, "--key", locked, "--password-env", "KEY_PASSWORD"), 1, "the password does not decrypt it"
    )
    assert "wrong" not in told
    monkeypatch.setenv("KEY_PASSWORD", "open sesame")
    assert called("sign", tiny, "--key", locked, "--password-env", "KEY_PASSWORD").stdout == f"wrote {tiny}.sig\n"
    load_package(tiny, key=locked.with_suffix(".pub"))
    fails(
        called("sign", tiny, "--key", keys / "own.pem", "--password-env", "KEY_PASSWORD"),
        1,
        "it is not encrypted, but a password was given",
    )
    fails(called("sign", tiny, "--key", locked, "--password-env", "NONSUCH"), 2, "the variable NONSUCH is not set")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own.pub", "it is a public key, which cannot sign"),
        ("rsa.pem", "it is of kind RSA"),
        ("koblitz.pem", "it is on the curve secp256k1"),
        ("empty.pub", "it is not a private key in PEM form; make one: openssl genpkey"),
        ("missing.pem", "No such file"),
        ("", "Is a directory"),
    ],
)
def test_what_cannot_sign(name: str, words: str, tiny: Path, keys: Path) -> None:
    fails(called("sign", tiny, "--key", keys / name), 1, str(keys / name), words)


def test_the_command_line(package: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.pt2"
    path.write_bytes(package.read_bytes())
    assert "Signature: none next to the package" in called("inspect", path).stdout
    assert json.loads(called("inspect", path, "--json").stdout)["signature"] is None
    fails(called("verify", path, "--no-run", "--key", own), 1, "is not signed")
    assert called("sign", path, "--key", keys / "own.pem").stdout == f"wrote {path}.sig\n"
    shown = called("verify", path, "--key", own).stdout
    assert (
        f"{path}: the signature {path}.sig is valid, by the owner of {own}" in shown
        and "entry 'net' variant 0" in shown
    )
    assert json.loads(called("verify", path, "--no-run", "--json", "--key", own).stdout)["signature"] == f"{path}.sig"
    assert json.loads(called("verify", path, "--no-run", "--json").stdout)["signature"] == ""
    assert f"Signature: {path.name}.sig is next to the package, not checked" in called("inspect", path).stdout
    assert json.loads(called("inspect", path, "--json").stdout)["signature"] == f"{path}.sig"
    done = called("verify", path, "--no-run", "--json", "--key", keys / "other.pub")
    assert done.exit_code == 1 and "is by another key" in json.loads(done.stdout)["error"]


_LOADING: dict[str, list[object]] = {
    # a command that loads a package, and how it fails after that
    "run": ["--inputs", "INPUTS", "--outputs", "OUT"],
    "train": ["--data", "INPUTS", "--epochs", 1, "--save", "OUT"],
    "replay": ["SCRIPT"],
    "rebuild": ["-o", "OUT"],
}


@pytest.mark.parametrize("command", _LOADING)
def test_commands_that_load_a_package(command: str, tiny: Path, keys: Path, own: Path, tmp_path: Path) -> None:
    (tmp_path / "in.safetensors").write_bytes(save({"x": torch.zeros(1)}))
    (tmp_path / "script.py").touch()
    places = {"INPUTS": tmp_path / "in.safetensors", "OUT": tmp_path / "out", "SCRIPT": tmp_path / "script.py"}
    rest = [places.get(str(a), a) for a in _LOADING[command]]

    def tried(*options: object) -> Any:
        return called(command.split()[0], *options, tiny, *rest)

    fails(tried("--key", keys / "other.pub"), 1, "is by another key")
    after = fails(tried("--key", own), 1)  # the package has no entries
    assert "sign" not in after.replace("signatures", ""), after
    tiny.with_name("tiny.pt2.sig").unlink()
    fails(tried("--key", own), 1, "is not signed")
    assert fails(tried(), 1) == after


def test_replay_takes_a_key(tiny: Path, keys: Path) -> None:
    for door in (aot_backward_runtime.replay, ab.replay):
        with pytest.raises(SignatureError, match="is by another key"):
            door(tiny, key=keys / "other.pub")
        with pytest.raises(AotBackwardError, match="expected a replay entry, got "):
            door(tiny, key=keys / "own.pub")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns about forks of threaded processes
def test_a_forked_child_has_its_own_weights(tiny: Path, own: Path) -> None:
    weights = load_weights(open_package(tiny, admit=admission(own)))
    child = os.fork()
    if not child:
        weights["weight"].fill_(9.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(weights["weight"], tiny_weights()["weight"])
