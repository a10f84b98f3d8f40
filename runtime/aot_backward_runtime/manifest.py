"""The schema of a package's ``manifest.json``, as frozen dataclasses, and their strict translation from and to JSON.

``docs/format.md`` states the format in prose. Rules: a field without a default must be there and have its type; a field this reader
does not know is ignored (a later 1.y may add some), unless ``required_features`` names a feature it does not know, which is refused.

Changes (newest first):
    1.0  2026-11-21  first version
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import PackageError

FORMAT_VERSION = (1, 0)
KNOWN_FEATURES: frozenset[str] = frozenset()
FOLDER = "extra/aot_backward"
MANIFEST_MEMBER = f"{FOLDER}/manifest.json"
WEIGHTS_MEMBER = f"{FOLDER}/weights.safetensors"
EXAMPLES_MEMBER = f"{FOLDER}/examples.safetensors"
LARGEST_MANIFEST = 64 << 20  # bytes
DEEPEST = 64  # nesting of trees and of JSON

Size = int | str
"""A dimension or a stride in elements: a number, or an expression in the variant's symbols (see ``expressions.py``)."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like. ``name`` is what error messages call it: ``x``, ``batch['ids']``, ``output[0]``."""

    name: str
    dtype: str  # "float32": the name under torch.*
    device: str  # "cpu" or "cuda"; the index is the caller's
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Tree:
    """A nested structure of arguments or results.

    ``kind`` is "tensor" (``index`` into the flat tensors), "constant" (``value``: None, bool, int, float or str), "size" (an ``expression``),
    "tuple", "list", "dict" (``keys``), "namedtuple" (``type_name`` and ``keys``), or "object" (another registered type: ``type_name``
    and ``keys``; comes back as a dict unless the caller of ``load`` hands the class).
    """

    kind: str
    index: int = -1
    value: None | bool | int | float | str = None
    expression: str = ""
    type_name: str = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class SymbolSpec:
    """A dynamic dimension. Its value is read off dimension ``dim`` of flat input ``input``: ``size = scale * symbol + offset``."""

    name: str  # in expressions: "s0"
    label: str  # what the author called it: "batch"; else as ``name``
    input: int
    dim: int
    minimum: int
    maximum: int | None  # None: unbounded
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One native call. ``operands`` names what is passed, in the library's order of inputs:
    ``input:I`` a flat input, ``saved:I`` the variant's I-th saved tensor, ``cotangent:I`` the I-th of the variant's incoming gradients,
    ``size:E`` an empty tensor of shape ``(E, 0)`` that carries the size ``E`` (an expression) into the graph.
    Results come back in the library's order and are named ``result:I`` by whoever uses them."""

    library: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Gradient:
    """Where one gradient comes from: ``result:I`` of the call, or "" where the true gradient is None (the tensor is unused).

    ``of`` is ``parameter:NAME`` or ``input:I``. ``cotangents``: the incoming gradients that it depends on; where none of them is defined,
    it is None, as in eager."""

    of: str
    source: str
    cotangents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How one graph of a variant is run.

    ``outputs``: for each flat output tensor ``result:I``, ``input:I`` (the caller's own tensor comes back), or ``parameter:NAME``.
    ``saved``: for each saved tensor ``result:I`` or ``input:I``; only a training forward has any.
    ``watched``: ``input:I``, ``result:I`` or ``parameter:NAME`` whose memory a saved tensor shares; like the saved tensors, they may not be
    changed in place between forward and backward.
    ``reads``: parameters and buffers whose values the call reads; a change of what the backward reads, after the forward, is an error.
    ``writes``: buffers that the call updates in place.
    ``gradients``: of a backward, or of a ``grad`` entry.
    """

    call: Call | None
    outputs: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class Ambient:
    """Global state at capture that changes what eager would compute; a call must come under the same."""

    autocast: str = ""  # dtype for the variant's device, or "" where autocast is off
    deterministic: bool = False
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Verdict:
    """The outcome of the self-check. ``status``: "verified", or "not run: reason"."""

    status: str
    worst: str = ""  # the tensor with the largest error
    error: float = 0.0  # its ‖artifact − truth‖ over what was allowed; at most 1 when verified
    sizes: tuple[str, ...] = ()  # the symbol values it was run at: "s0=4"


@dataclass(frozen=True)
class VariantSpec:
    """One program compiled under guards.

    ``forward``/``backward`` serve calls that need gradients, ``inference`` calls that need none; a ``grad`` entry has only ``gradient``.
    """

    mode: str  # "train", "eval", or "" where the program is a plain function
    in_tree: Tree  # of (args, kwargs)
    out_tree: Tree
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cotangents: tuple[TensorSpec, ...]  # one per differentiable output
    differentiable: tuple[int, ...]  # which outputs those are
    symbols: tuple[SymbolSpec, ...]
    guards: tuple[str, ...]
    ambient: Ambient
    verdict: Verdict
    forward: Plan | None = None
    backward: Plan | None = None
    inference: Plan | None = None
    gradient: Plan | None = None
    argument_names: tuple[str, ...] = ()  # of the forward's positional parameters, so that x=… finds its place
    seed: int = 0  # of torch.manual_seed before each stored example was run


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer of an entry. Ties are two names with one ``weight``."""

    name: str  # "layers.0.weight"
    weight: str  # key in the package's weights
    parameter: bool
    requires_grad: bool
    persistent: bool = True  # False: a buffer that state_dict() leaves out


@dataclass(frozen=True)
class EntrySpec:
    kind: str  # "module" or "grad"
    state: tuple[StateSpec, ...]
    variants: tuple[VariantSpec, ...]
    modules: tuple[str, ...] = ()  # every submodule's name, so that empty ones are rebuilt too
    training: bool = True  # the mode it is loaded in
    wrt: tuple[str, ...] = ()  # of a grad entry: ``parameter:NAME`` or ``input:I``, in the order returned
    names: tuple[str, ...] = ()  # what the caller reads each gradient as
    single: bool = False  # the gradient itself comes back, not a dict of one
    has_aux: bool = False


@dataclass(frozen=True)
class WeightSpec:
    """A stored tensor: shape and strides in elements. The file holds it row-major; other strides are laid out at load."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str  # of the row-major bytes


@dataclass(frozen=True)
class ConstantSpec:
    """A constant of a library that is bound to a weight by pointer. ``name`` is the library's own for it."""

    name: str
    weight: str


@dataclass(frozen=True)
class LibrarySpec:
    """One compiled graph. ``member`` and the others are paths below the archive's top folder."""

    member: str
    metadata: str  # the adjacent *_metadata.json
    extern: str  # the adjacent JSON of operators that go through the proxy executor, or ""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[ConstantSpec, ...]
    needed: tuple[str, ...]  # shared libraries it must be linked with (DT_NEEDED)
    glibc: str  # highest symbol version it asks for, "2.34"
    glibcxx: str
    nodes: int  # of the graph it was compiled from
    operators: tuple[str, ...] = ()  # that go through the proxy executor


@dataclass(frozen=True)
class Target:
    device: str  # "cpu" or "cuda"
    machine: str = "x86_64"
    march: str = ""
    cpu_flags: tuple[str, ...] = ()  # as /proc/cpuinfo writes them
    cuda_arch: str = ""  # "sm_90"
    cuda: str = ""  # version of CUDA


@dataclass(frozen=True)
class Member:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    format_version: tuple[int, int]
    required_features: tuple[str, ...]
    producer: str  # "aot-backward 0.1.0"
    torch: str
    target: Target
    entries: dict[str, EntrySpec]
    libraries: dict[str, LibrarySpec]
    weights: dict[str, WeightSpec]
    members: dict[str, Member]  # every other member of the archive, by its path below the top folder
    has_weights: bool = True
    created: str = ""  # date, ISO 8601, UTC
    notes: dict[str, str] = field(default_factory=dict)  # what is worth telling a person, never read by the runtime


T = TypeVar("T")


def to_json(manifest: Manifest) -> bytes:
    """The manifest as UTF-8 JSON, fields in their order, the same bytes for the same manifest."""
    return json.dumps(_plain(manifest), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def from_json(data: bytes) -> Manifest:
    """Reads a manifest; :class:`PackageError` names the field where it is not one."""
    if len(data) > LARGEST_MANIFEST:
        raise PackageError(f"manifest.json has {len(data)} bytes; at most {LARGEST_MANIFEST} are read")
    try:
        raw = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_constant)
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
        raise PackageError(f"package needs the feature {unknown[0]!r}, which this runtime does not know: install a newer aot-backward-runtime")
    return _decode(Manifest, raw, "manifest", 0)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        out = {}
        for f in dataclasses.fields(value):
            v = getattr(value, f.name)
            if f.default is not dataclasses.MISSING and v == f.default and type(v) is type(f.default):
                continue
            out[f.name] = _plain(v)
        return out
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} occurs twice")
        out[key] = value
    return out


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 1 << 63:
        raise ValueError(f"the integer {text[:24]} does not fit 64 bits")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _decode(kind: Any, value: Any, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise PackageError(f"{where}: nested more than {DEEPEST} deep")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if _plausible(option, value):
                return _decode(option, value, where, depth)
        raise _mismatch(where, kind, value)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _mismatch(where, kind, value)
        hints = _hints(kind)
        out = {}
        for f in dataclasses.fields(kind):
            if f.name in value:
                out[f.name] = _decode(hints[f.name], value[f.name], f"{where}.{f.name}", depth + 1)
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise PackageError(f"{where}: the field {f.name!r} is missing")
        return kind(**out)
    if origin is tuple:
        if not isinstance(value, list):
            raise _mismatch(where, kind, value)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value))
        if len(value) != len(arguments):
            raise _mismatch(where, kind, value)
        return tuple(_decode(a, v, f"{where}[{i}]", depth + 1) for i, (a, v) in enumerate(zip(arguments, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise _mismatch(where, kind, value)
        return {k: _decode(arguments[1], v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    if not _plausible(kind, value):
        raise _mismatch(where, kind, value)
    return float(value) if kind is float else value


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


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _mismatch(where: str, kind: Any, value: Any) -> PackageError:
    expected = getattr(kind, "__name__", str(kind)).replace("NoneType", "null")
    return PackageError(f"{where}: expected {expected}, got {str(value)[:60]!r}")
