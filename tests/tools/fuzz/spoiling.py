"""The mutations. Each one depends only on the seed and its number.

After an edit of a member, its digest and size are updated, so that the edit reaches the checks behind them. Edits of
bytes reach the checks of the digests. A manifest is edited only as bytes, because its SHA-256 protects its content.
Machine code stays unchanged, except for the headers of an ELF file: a package with new machine code and its digest can
do anything, and a reader cannot prevent it (``docs/format.md``, section 8).
"""

from __future__ import annotations

import hashlib
import json
import marshal
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from aot_backward_runtime.format.manifest_json import sealed

PREFIX = "package/"
MANIFEST = f"{PREFIX}extra/aot_backward/manifest.json"
WEIGHTS = f"{PREFIX}extra/aot_backward/weights.safetensors"
EXAMPLES = f"{PREFIX}extra/aot_backward/examples.safetensors"
GRAPHS = f"{PREFIX}extra/aot_backward/graphs/"
ALIGNMENT = 64

NUMBERS: tuple[Any, ...] = (
    -(1 << 63), (1 << 63) - 1, 1 << 63, 1 << 80, -(1 << 31), 1 << 31, 1 << 60, 1 << 40, -2, -1, 0, 1, 2, 3, 4, 5, 7, 16, 64, 255, 65536,
    0.0, -0.0, 0.5, 1.0, 1e300, -1e300, 1e-300, 1e38, 3.5e38,
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "\x00", "\x1b[31mred\x1b[0m", "\x07\x08\r\n", "\u202eright to left", "\ud800", "a\udfffb", "\x9b2J", "\x7f", "é", "x" * 5000,
    "../../x", "/etc/passwd", "a/b", "a\\b", "%s%n{0}{x}", "__class__", "forward", "training", "1", "-1", "0", "1e999", "s0", "s1",
    "s0 + 1", "s0 // 0", "s0 * s0 * s0", "2 * s0", "max(s0, 3)", "(" * 300 + "1" + ")" * 300, "-" * 3000 + "1", "not s0", "lambda: 0",
    "__import__('os')", "s0 if 1 else 2", "9" * 400, "float16", "float32", "float64", "bfloat16", "int64", "bool", "complex64", "cpu",
    "cuda", "meta", "tensor", "tuple", "dict", "list", "constant", "size", "input:0", "input:1", "input:-1", "input:99", "input:",
    "saved:0", "saved:1", "cotangent:0", "result:0", "result:1", "result:99999999999999999999", "result:-1", "result:1.5", "result:\u0663",
    "parameter:", "parameter:x", "parameter:first.weight", "size:s0", "size:", "size:x", "value:0", "fresh", "train", "eval", "module",
    "grad", "step", "replay", "verified", "not run", "{}", "[]", "null", '{"lr": 1e400}', '{"params": []}', "NaN", "highest", "x", "y",
)  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The members and the manifest of a package."""

    members: dict[str, bytes]
    manifest: Any


@dataclass(frozen=True)
class Spoilt:
    """A mutated file. ``kind``: its row in the table. ``what``: a description. ``beside``: a signature. ``state``: a
    state file for ``data``."""

    base: str
    kind: str
    what: str
    data: bytes
    beside: bytes | None = None
    state: bytes | None = None


@cache
def parts(path: Path) -> Parts:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != MANIFEST}
        manifest = json.loads(archive.read(MANIFEST))
        manifest.pop("sha256", None)  # :func:`to_bytes` adds it
        return Parts(members, manifest)


@cache
def whole(path: Path) -> bytes:
    return path.read_bytes()


def spoilt(seed: int, number: int, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Return mutation ``number``, of one of the packages ``names`` in ``folder``."""
    chance = random.Random(f"{seed} {number}")
    kinds = [(kind, weight) for kind, weight in KINDS if (_NEEDS.get(kind) or names[0]) in names]
    kind = chance.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
    return _SPOIL[kind](chance, folder, names)


def _copied(value: Any) -> Any:
    """Copy a JSON value, ten times as fast as :func:`copy.deepcopy`."""
    return marshal.loads(marshal.dumps(value))


# packages


@lru_cache(256)  # bounded: the number of mutated members is not
def _crc(data: bytes) -> int:
    return zlib.crc32(data)


@lru_cache(256)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put_together(members: dict[str, bytes], manifest: bytes) -> bytes:
    """Return the archive in the layout of the package writer."""
    out, directory = bytearray(), bytearray()
    for name, data in [*members.items(), (MANIFEST, manifest)]:
        text = name.encode("utf-8", "surrogatepass")
        offset = len(out)
        padding = -(offset + 30 + len(text)) % ALIGNMENT
        if padding:
            padding += ALIGNMENT if padding < 4 else 0
        extra = struct.pack("<HH", 0x4246, padding - 4) + bytes(padding - 4) if padding else b""
        crc = _crc(data)
        out += (
            struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, crc, len(data), len(data), len(text), len(extra))
            + text
            + extra
            + data
        )
        directory += struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50,
            0x0314,
            20,
            0,
            0,
            0,
            33,
            crc,
            len(data),
            len(data),
            len(text),
            0,
            0,
            0,
            0,
            0o100644 << 16,
            offset,
        )
        directory += text
    count = len(members) + 1
    return bytes(
        out + directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), len(out), 0)
    )


def listed(members: dict[str, bytes]) -> dict[str, Any]:
    return {name.removeprefix(PREFIX): {"size": len(data), "sha256": _sha256(data)} for name, data in members.items()}


def to_bytes(manifest: Any) -> bytes:
    """Return the value as JSON. A package's manifest gets the SHA-256 that its format requires."""
    try:
        data = json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:  # JSON has a lone surrogate as an escape
        data = json.dumps(manifest, separators=(",", ":")).encode()
    return sealed(data) if isinstance(manifest, dict) and manifest.get("format_version", [1, 0])[1] >= 15 else data


Place = tuple[Any, Any, str]
"""A container, the key of a value in it, and the path as text."""


def places(value: Any, path: str = "") -> Iterator[Place]:
    for key, child in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        where = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        yield value, key, where
        if isinstance(child, (dict, list)):
            yield from places(child, where)


# bytes


def _bytes(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    base = chance.choice(names)
    data = bytearray(whole(folder / f"{base}.pt2"))
    marks = [
        i
        for mark in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x7fELF", b'{"format_version"', b"data_offsets")
        if (i := data.find(mark)) >= 0
    ]
    marks.append(data.rfind(b"PK\x01\x02"))
    words = []
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = min(
            len(data) - 1,
            chance.choice(
                [
                    chance.randrange(len(data)),
                    chance.choice(marks) + chance.randrange(120),
                    len(data) - 1 - chance.randrange(600),
                ]
            ),
        )
        at = max(0, at)
        how = chance.choice(("flip", "flip", "byte", "cut", "insert", "repeat", "zero"))
        words.append(f"{how} {at}")
        if how == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif how == "byte":
            data[at] = chance.choice((0, 1, 127, 128, 255))
        elif how == "cut":
            del data[at : at + chance.choice((1, 2, 64, 4096, len(data)))]
            if not data:
                data = bytearray(b"P")
        elif how == "insert":
            data[at:at] = chance.randbytes(chance.choice((1, 4, 64)))
        elif how == "repeat":
            data[at:at] = data[at : at + 64]
        else:
            data[at : at + 8] = bytes(len(data[at : at + 8]))
    return Spoilt(base, "bytes", ", ".join(words), bytes(data))


def _members(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Remove, add, rename or exchange members. Most of the time, update the list of members."""
    base = chance.choice(names)
    taken = parts(folder / f"{base}.pt2")
    members, manifest = dict(taken.members), _copied(taken.manifest)
    name = chance.choice(list(members))
    how = chance.choice(("leave out", "add", "rename", "exchange", "empty", "cut", "of another package"))
    if how == "leave out":
        del members[name]
    elif how == "add":
        members[
            chance.choice(
                (
                    f"{PREFIX}x",
                    f"{PREFIX}../x",
                    f"{PREFIX}data/x.so",
                    "other/x",
                    f"{PREFIX}{name.removeprefix(PREFIX).upper()}",
                    f"{PREFIX}a//b",
                )
            )
        ] = b"x"
    elif how == "rename":
        members[chance.choice((f"{name}x", name.upper(), f"{PREFIX}{chance.choice(TEXTS)}"))] = members.pop(name)
    elif how == "exchange":
        other = chance.choice(list(members))
        # Exchanged libraries make a valid package of another program
        if not (name.endswith(".so") and other.endswith(".so")):
            members[name], members[other] = members[other], members[name]
    elif how == "empty":
        members[name] = b""
    elif how == "cut":
        members[name] = (
            members[name][: chance.randrange(len(members[name]) + 1)]
            if not name.endswith(".so")
            else members[name][: chance.randrange(4096)]
        )
    else:
        other = parts(folder / f"{chance.choice(names)}.pt2").members
        if name in other:
            members[name] = other[name]
    if chance.random() < 0.8:
        manifest["members"] = listed(members)
    return Spoilt(base, "members", f"{how} {name}", put_together(members, to_bytes(manifest)))


def _elf(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Change the identification, the end or the tables of an ELF file; or any byte, without a new digest."""
    base = chance.choice(names)
    taken = parts(folder / f"{base}.pt2")
    members, manifest = dict(taken.members), _copied(taken.manifest)
    name = chance.choice([n for n in members if n.endswith(".so")])
    data = bytearray(members[name])
    how = chance.choice(("identification", "cut", "any byte", "tables"))
    if how == "identification":
        at = chance.choice((*range(7), 16, 17, 18, 19))
        data[at] = (data[at] + chance.randrange(1, 255)) % 256
    elif how == "cut":
        at = chance.randrange(len(data) // 2)
        del data[at:]
    elif how == "any byte":
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
    else:  # move a table of headers out of the file
        at = chance.choice((32, 40))
        data[at : at + 8] = struct.pack("<Q", chance.choice((len(data), 1 << 40, (1 << 64) - 1, (1 << 63) - 1)))
    members[name] = bytes(data)
    if how != "any byte":
        manifest["members"] = listed(members)
    return Spoilt(base, "native code's headers", f"{how} {at} of {name}", put_together(members, to_bytes(manifest)))


# tensors


def _tensors(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Change the header or the data of a safetensors member. Update the digests of weights: a package with other
    numbers is valid."""
    base = chance.choice([n for n in names if WEIGHTS in parts(folder / f"{n}.pt2").members])
    taken = parts(folder / f"{base}.pt2")
    members, manifest = dict(taken.members), _copied(taken.manifest)
    name = chance.choice([n for n in (WEIGHTS, WEIGHTS, EXAMPLES) if n in members])
    members[name], words = safetensors(chance, members[name])
    if name == WEIGHTS:
        for key, digest in digests(members[name]).items():
            if key in manifest["weights"]:
                manifest["weights"][key]["sha256"] = digest
    manifest["members"] = listed(members)
    return Spoilt(base, "tensors", f"{name}: {words}", put_together(members, to_bytes(manifest)))


def digests(data: bytes) -> dict[str, str]:
    """Return the digest of each tensor of a safetensors file; nothing if the file is invalid."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        spans = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
        return {k: hashlib.sha256(data[8 + length + a : 8 + length + b]).hexdigest() for k, (a, b) in spans.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return {}


def safetensors(
    chance: random.Random, data: bytes, repaired: Callable[[Any], None] = lambda header: None
) -> tuple[bytes, str]:
    """Return a mutated safetensors file, and a description. Call ``repaired`` with its header afterwards."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    how = chance.choice(("header", "header", "header", "length", "data", "cut", "text"))
    if how == "data" and rest:
        at = chance.randrange(len(rest))
        rest[at] ^= 1 << chance.randrange(8)
        how = f"data {at}"
    elif how == "cut":
        del rest[chance.randrange(len(rest) + 1) :]
    elif how == "header":
        found = list(places(header))
        holder, key, path = chance.choice(found)
        change = chance.choice(("delete", "number", "text", "swap", "retype", "rename"))
        how = f"{change} {path}"
        if change == "delete":
            del holder[key]
        elif change == "number":
            holder[key] = chance.choice(NUMBERS)
        elif change == "text":
            holder[key] = chance.choice((*TEXTS, "F16", "F32", "F64", "I64", "BOOL", "C64", "F8_E4M3"))
        elif change == "swap":
            _swap(chance, holder, key)
        elif change == "retype":
            holder[key] = chance.choice([None, True, 0, 1.5, "", [], {}, [holder[key]]])
        elif isinstance(holder, dict):
            holder[chance.choice((*TEXTS, f"{key}x"))] = holder.pop(key)
    repaired(header)
    text = to_bytes(header)
    if how == "text":
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice((b"", b"\xff", b"{", b"\x00", b"1e999", b'"a":1,')) + text[at + 1 :]
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    length = (
        chance.choice((0, 1, len(text) - 1, len(text) + 1, 1 << 40, (1 << 64) - 1)) if how == "length" else len(text)
    )
    return struct.pack("<Q", length) + text + bytes(rest), how


# state files, signatures and portable graphs


def _state(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Mutate a training state. Most of the time, update its digest."""
    from aot_backward_runtime.format.safetensors_header import METADATA

    base = "step"

    def about(header: Any) -> None:
        metadata = header.get(METADATA)
        if not isinstance(metadata, dict) or not isinstance(metadata.get("about"), str) or chance.random() < 0.4:
            return
        try:
            known = json.loads(metadata["about"])
        except ValueError:
            return
        found = list(places(known)) if isinstance(known, (dict, list)) else []
        if not found:
            return
        holder, key, _ = chance.choice(found)
        change = chance.choice(("delete", "number", "text", "swap", "retype"))
        if change == "delete":
            del holder[key]
        elif change == "swap":
            _swap(chance, holder, key)
        else:
            holder[key] = (
                chance.choice(NUMBERS)
                if change == "number"
                else chance.choice(TEXTS)
                if change == "text"
                else chance.choice([None, True, [], {}])
            )
        metadata["about"] = json.dumps(known)

    data, words = safetensors(chance, whole(folder / "step.state"), about)
    if chance.random() < 0.9:
        data = _redigested(data)
    return Spoilt(base, "state files", words, whole(folder / "step.pt2"), state=data)


def _swap(chance: random.Random, holder: Any, key: Any) -> None:
    """Exchange a value with a sibling."""
    other = chance.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
    holder[key], holder[other] = holder[other], holder[key]


def _redigested(data: bytes) -> bytes:
    try:
        (length,) = struct.unpack("<Q", data[:8])
        expected = json.loads(data[8 : 8 + length])["__metadata__"]["sha256"].encode()
        blank = data.replace(expected, b"0" * 64, 1)
        return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return data


def _signature(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Mutate a signature, or a signed package."""
    signature = whole(folder / "targets.pt2.sig")
    if chance.random() < 0.3:
        made = _SPOIL[chance.choice(("bytes", "members", "tensors"))](chance, folder, ("targets",))
        return Spoilt("targets", "signatures", f"the package: {made.what}", made.data, beside=signature)
    data = whole(folder / "targets.pt2")
    if chance.random() < 0.4:
        text = bytearray(signature)
        at = chance.randrange(len(text))
        text[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        return Spoilt("targets", "signatures", f"byte {at}", data, beside=bytes(text))
    known = json.loads(signature)
    holder, key, path = chance.choice(list(places(known)))
    change = chance.choice(("delete", "number", "text", "retype", "rename"))
    if change == "delete":
        del holder[key]
    elif change == "rename" and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = chance.choice({"number": NUMBERS, "text": TEXTS}.get(change, (None, True, [], {}, [holder[key]])))
    return Spoilt("targets", "signatures", f"{change} {path}", data, beside=to_bytes(known))


def _graphs(chance: random.Random, folder: Path, names: tuple[str, ...]) -> Spoilt:
    """Mutate a portable graph, which the report of a package draws."""
    base = chance.choice([n for n in names if any(m.startswith(GRAPHS) for m in parts(folder / f"{n}.pt2").members)])
    taken = parts(folder / f"{base}.pt2")
    members, manifest = dict(taken.members), _copied(taken.manifest)
    name = chance.choice([n for n in members if n.startswith(GRAPHS)])
    graph = json.loads(members[name])
    holder, key, path = chance.choice(list(places(graph)))
    change = chance.choice(("delete", "number", "text", "retype", "swap"))
    if change == "delete":
        del holder[key]
    elif change == "swap":
        _swap(chance, holder, key)
    else:
        holder[key] = chance.choice({"number": NUMBERS, "text": TEXTS}.get(change, (None, True, [], {}, [holder[key]])))
    members[name] = to_bytes(graph)
    manifest["members"] = listed(members)
    return Spoilt(base, "portable graphs", f"{change} {name} {path}", put_together(members, to_bytes(manifest)))


KINDS = (("bytes", 16), ("members", 5), ("elf", 4), ("tensors", 8), ("state", 7), ("signature", 4), ("graphs", 4))
_NEEDS = {"state": "step", "signature": "targets", "graphs": "net"}
"""The package that a kind needs."""
_SPOIL: dict[str, Callable[[random.Random, Path, tuple[str, ...]], Spoilt]] = {
    "bytes": _bytes, "members": _members, "elf": _elf, "tensors": _tensors, "state": _state, "signature": _signature,
    "graphs": _graphs,
}  # fmt: skip
