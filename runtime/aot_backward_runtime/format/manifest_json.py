"""Conversion of manifests from and to JSON. The reader compares the manifest's SHA-256, then checks every field against
the schema.

Since format 1.15 a manifest ends with the field ``"sha256"``, which holds the SHA-256 of all bytes before its comma
(``docs/format.md``, section 3).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import PackageError
from .json_keys import unique_keys
from .manifest import DEEPEST, FORMAT_VERSION, KNOWN_FEATURES, LARGEST_MANIFEST, Manifest

SEALED_SINCE = (1, 15)
"""The first format in which manifests end with their SHA-256."""
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\Z')


def to_json(manifest: Manifest) -> bytes:
    """Return the manifest as UTF-8 JSON that ends with its SHA-256. Fields keep their order: equal manifests have equal
    bytes."""
    return sealed(json.dumps(plain(manifest), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


def sealed(text: bytes) -> bytes:
    """Return the JSON object ``text`` with the field ``sha256`` added at its end."""
    body = text.removesuffix(b"}")
    return body + b',"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def from_json(data: bytes) -> Manifest:
    """Read a manifest. :class:`PackageError` names the field that is wrong."""
    if len(data) > LARGEST_MANIFEST:
        raise PackageError(f"manifest.json has {len(data)} bytes; at most {LARGEST_MANIFEST} are read")
    seal = _SEAL.search(data)
    if seal and (digest := hashlib.sha256(data[: seal.start()]).hexdigest()) != seal[1].decode():
        raise PackageError(
            f"manifest.json: SHA-256 is {digest}, expected {seal[1].decode()}. The file is damaged: copy or export it again."
        )
    try:
        raw = json.loads(data.decode(), object_pairs_hook=unique_keys, parse_int=_integer, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"manifest.json is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise PackageError(f"manifest.json holds a {type(raw).__name__}, not an object")
    version = raw.get("format_version")
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int for v in version)):
        raise PackageError(f"manifest.json: format_version is {version!r}, expected [major, minor]")
    if version[0] != FORMAT_VERSION[0]:
        raise PackageError(
            f"package format {version[0]}.{version[1]}; this runtime reads {FORMAT_VERSION[0]}.x: install the aot-backward-runtime that wrote it"
        )
    features = raw.get("required_features")
    if not (isinstance(features, list) and all(isinstance(f, str) for f in features)):
        raise PackageError(f"manifest.json: required_features is {features!r}, expected a list of names")
    unknown = sorted(set(features) - KNOWN_FEATURES)
    if unknown:
        raise PackageError(
            f"package needs the feature {unknown[0]!r}, which this runtime does not know: install a newer aot-backward-runtime"
        )
    if tuple(version) >= SEALED_SINCE and not seal:
        raise PackageError(
            f"manifest.json of format {version[0]}.{version[1]} does not end with its SHA-256. The file is damaged: copy or export it again."
        )
    if seal:
        del raw["sha256"]
    strict = SEALED_SINCE <= tuple(version) <= FORMAT_VERSION
    return _decoder(Manifest, strict)(raw, None, 0)


def plain(value: Any) -> Any:
    """Return a dataclass of the schema as JSON values, without fields that have their default."""
    if dataclasses.is_dataclass(value):
        out = {}
        for f in dataclasses.fields(value):
            v = getattr(value, f.name)
            if f.default is not dataclasses.MISSING and v == f.default and type(v) is type(f.default):
                continue
            out[f.name] = plain(v)
        return out
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 1 << 63:
        raise ValueError(f"the integer {text[:24]} does not fit 64 bits")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


Path = tuple[Any, ...] | None
"""The place of a value in the document, innermost first: (step, the rest). It becomes text only for an error
message."""

Decoder = Callable[[Any, Path, int], Any]


@cache
def _decoder(kind: Any, strict: bool) -> Decoder:
    """Return a function that turns a JSON value into a ``kind``, cached because packages hold thousands of values.
    ``strict``: refuse unknown fields."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        options = [(option, _later(option, strict)) for option in arguments]

        def union(value: Any, path: Path, depth: int) -> Any:
            for option, decode in options:
                if _plausible(option, value):
                    return decode(value, path, depth)
            raise _mismatch(path, kind, value)

        return union
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind, strict)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        of = _later(arguments[0], strict)

        def sequence(value: Any, path: Path, depth: int) -> Any:
            if type(value) is not list:
                raise _mismatch(path, kind, value)
            return tuple([of(v, (i, path), depth) for i, v in enumerate(value)])

        return sequence
    if origin is tuple:
        parts = [_decoder(a, strict) for a in arguments]

        def fixed(value: Any, path: Path, depth: int) -> Any:
            if type(value) is not list or len(value) != len(parts):
                raise _mismatch(path, kind, value)
            return tuple(part(v, (i, path), depth) for i, (part, v) in enumerate(zip(parts, value, strict=True)))

        return fixed
    if origin is dict:
        of = _later(arguments[1], strict)

        def mapping(value: Any, path: Path, depth: int) -> Any:
            if type(value) is not dict:
                raise _mismatch(path, kind, value)
            return {k: of(v, (k, path), depth) for k, v in value.items()}

        return mapping
    if kind is float:
        return lambda value, path, depth: (
            float(value) if type(value) in (float, int) and math.isfinite(value) else _raise(path, kind, value)
        )
    if kind is types.NoneType:
        return lambda value, path, depth: None if value is None else _raise(path, kind, value)
    return lambda value, path, depth: value if type(value) is kind else _raise(path, kind, value)


def _dataclass_decoder(kind: Any, strict: bool) -> Decoder:
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    fields = [
        (f.name, _later(hints[f.name], strict), f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
    ]

    def decode(value: Any, path: Path, depth: int) -> Any:
        if type(value) is not dict:
            raise _mismatch(path, kind, value)
        if depth > DEEPEST:
            raise PackageError(f"{_words(path)}: nested more than {DEEPEST} deep")
        out = {}
        for name, of, required in fields:
            if name in value:
                out[name] = of(value[name], (name, path), depth + 1)
            elif required:
                raise PackageError(f"{_words(path)}: the field {name!r} is missing")
        if strict and len(value) > len(out):
            raise PackageError(f"{_words(path)}: unknown field {min(value.keys() - out.keys())!r}")
        return kind(**out)

    return decode


def _later(kind: Any, strict: bool) -> Decoder:
    """Return the decoder of ``kind``, looked up on first use because a tree contains trees."""
    if not (dataclasses.is_dataclass(kind) or typing.get_origin(kind) is tuple):
        return _decoder(kind, strict)
    return lambda value, path, depth: _decoder(kind, strict)(value, path, depth)


def _plausible(kind: Any, value: Any) -> bool:
    if kind is types.NoneType:
        return value is None
    if kind is float:
        return type(value) in (float, int)
    if kind in (int, str, bool):
        return type(value) is kind
    if typing.get_origin(kind) in (tuple, list):
        return isinstance(value, list)
    return isinstance(value, dict)


def _words(path: Path) -> str:
    steps: list[Any] = []
    while path is not None:
        step, path = path
        steps.append(step)
    return "manifest" + "".join(
        f".{s}" if isinstance(s, str) and s.isidentifier() else f"[{s!r}]" for s in reversed(steps)
    )


def _raise(path: Path, kind: Any, value: Any) -> Any:
    raise _mismatch(path, kind, value)


def _mismatch(path: Path, kind: Any, value: Any) -> PackageError:
    expected = str(kind) if typing.get_args(kind) else kind.__name__
    return PackageError(f"{_words(path)}: expected {expected.replace('NoneType', 'null')}, got {str(value)[:60]!r}")
