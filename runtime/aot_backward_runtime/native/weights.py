"""The tensors of a package: verified, and read from its file or mapped without a copy.

No other process can change tensors that were read. 500 MB take 0.4 s of processor time to read and 0.004 s to map. But
mapped pages cost time when they are touched: 0.08 s to read them all, 0.4 s to write to them, as an optimizer does. So
mapping pays if processes only read, and share the pages. If the mapped file is truncated, a signal ends the process.
The mapping is private: a write copies the page it touches and never reaches the file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

from ..errors import PackageError, WeightsError
from ..format.manifest import EXAMPLES_MEMBER, WEIGHTS_MEMBER, WeightSpec
from ..format.safetensors_header import ALIGNMENT, Stored, read_header, stored_as
from ..package.archive import Archive
from ..package.code_cache import remember, remembered
from .bound_state import check_weight
from .guards import dtype_of
from .tensor_bytes import TORCH_DTYPES

_MOST_FILLED = 64  # times the stored weights: optimizer state and accumulated gradients are a few times the parameters
HASHED_ALWAYS = 8 << 20  # bytes; 5 ms. Larger data is hashed once per file and user.


def all_weights(
    archive: Archive, path: object, weights: Mapping[str, torch.Tensor] | None = None, mapped: bool = False
) -> dict[str, torch.Tensor]:
    """Return every weight of the package at ``path`` by key: from ``weights``, else as stored, else filled with the
    manifest's number. Weights that are not given are on the CPU.

    Raise :class:`WeightsError` with the key if a given weight does not fit or one is missing."""
    specs = archive.manifest.weights
    tensors = filled(archive) | load_weights(archive, mapped)
    if weights is not None:
        if not isinstance(weights, Mapping):
            raise WeightsError(
                f"weights: expected tensors by key, got a {type(weights).__name__}. The keys of {path}: {_few(specs)}"
            )
        if unknown := sorted(map(str, weights.keys() - specs.keys())):
            raise WeightsError(f"{path} has no weight {unknown[0]!r}. The keys of its weights: {_few(specs)}")
        for key, tensor in weights.items():
            check_weight(key, tensor, specs[key])
        tensors |= weights
    missing = sorted(specs.keys() - tensors.keys())
    if missing:
        raise WeightsError(
            f"{path} was written without weights: pass load(path, weights={{…}}) with {missing[:5]}{' …' if len(missing) > 5 else ''}"
        )
    return tensors


def load_weights(archive: Archive, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Return every weight by key, on the CPU, with the manifest's strides. Empty for a package without weights.
    ``mapped``: map, do not read.

    Raise :class:`PackageError` with the tensor's name if the file and the manifest differ."""
    if not archive.manifest.has_weights:
        return {}
    data, stored, start = _open(archive, WEIGHTS_MEMBER, mapped)
    specs = archive.manifest.weights
    specs = {name: spec for name, spec in specs.items() if spec.fill is None}
    for name in stored.keys() ^ specs.keys():
        where = "the manifest" if name in stored else WEIGHTS_MEMBER
        raise archive.corrupt(f"weight {name!r} is not in {where}")
    for name, spec in specs.items():
        _check(archive, name, spec, stored[name])
    _verify_each(archive, data, stored, start)
    out = {}
    for name, spec in specs.items():
        tensor = _tensor(data, stored[name], start, spec.dtype == "complex128")
        out[name] = _with_strides(archive, name, tensor, spec)
    _check_numbers(archive, out)
    return out


def _check_numbers(archive: Archive, tensors: dict[str, torch.Tensor]) -> None:
    """Check that the manifest's hyperparameters of a training step equal those stored with its state, in the order that
    its code reads."""
    for name, entry in archive.manifest.entries.items():
        stored = tensors.get(next((s.weight for s in entry.state if s.name == "numbers"), ""))
        if (
            entry.step is not None
            and stored is not None
            and stored[2:].tolist() != [n.value for n in entry.step.numbers]
        ):
            raise archive.corrupt(f"entry {name}: its numbers in the manifest differ from those stored with its state")


def filled(archive: Archive) -> dict[str, torch.Tensor]:
    """Return the weights that are filled with one number; the file does not store them."""
    specs = archive.manifest.weights
    size = {name: math.prod(s.shape) * dtype_of(s.dtype).itemsize for name, s in specs.items()}
    filling = {name: s for name, s in specs.items() if s.fill is not None}
    if sum(size[n] for n in filling) > _MOST_FILLED * sum(size[n] for n in specs.keys() - filling.keys()) + (1 << 20):
        raise archive.corrupt("the weights that are filled with one number take more memory than any optimizer's state")
    out = {}
    for name, spec in filling.items():
        problem = layout_problem(spec.shape, spec.stride)
        if problem:
            raise archive.corrupt(
                f"weight {name!r}: strides {list(spec.stride)} for shape {list(spec.shape)}: {problem}"
            )
        # The system has not allocated these pages yet
        flat = torch.zeros(_span(spec), dtype=dtype_of(spec.dtype), device="cpu")
        flat = flat.fill_(spec.fill) if spec.fill else flat
        out[name] = flat.as_strided(spec.shape, spec.stride)
    return out


def _few(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "") if names else "none"


def _span(spec: WeightSpec) -> int:
    return 0 if 0 in spec.shape else sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) + 1


def load_examples(archive: Archive) -> dict[str, torch.Tensor]:
    """Return the stored example inputs by name, row-major, on the CPU; empty if the package has none."""
    if EXAMPLES_MEMBER not in archive.members():
        return {}
    data, stored, start = _open(archive, EXAMPLES_MEMBER)
    archive.check_digest(
        f"member {EXAMPLES_MEMBER}", hashlib.sha256(data).hexdigest(), archive.members()[EXAMPLES_MEMBER].sha256
    )
    return {name: _tensor(data, place, start, False) for name, place in stored.items()}


def _open(archive: Archive, member: str, mapped: bool = False) -> tuple[memoryview, dict[str, Stored], int]:
    data = archive.member_memory(member, mapped)
    try:
        return data, *read_header(data)
    except PackageError as error:
        raise archive.corrupt(f"member {member}: {error}") from error


def _check(archive: Archive, name: str, spec: WeightSpec, stored: Stored) -> None:
    expected = stored_as(spec.dtype, spec.shape)
    if (stored.dtype, stored.shape) != expected:
        raise archive.corrupt(
            f"weight {name!r} is {stored.dtype} of shape {list(stored.shape)}; the manifest says {spec.dtype} of shape {list(spec.shape)}"
        )


def _verify_each(archive: Archive, data: memoryview, stored: dict[str, Stored], start: int) -> None:
    # A required signature means that file times and sizes are not trusted
    can_skip = len(data) > HASHED_ALWAYS and not archive.admitted
    # One record per file, not per content, so that the folder does not grow with every package that replaces another.
    device, inode = archive.identity.split()[:2]
    record = f"{archive.identity} {archive.manifest_digest}"
    # Else the bytes may be from before and after a change
    if can_skip and remembered(f"{device}-{inode}", record) and archive.unchanged:
        return
    for name, place in stored.items():
        raw = data[start + place.begin : start + place.end]
        archive.check_digest(f"weight {name!r}", hashlib.sha256(raw).hexdigest(), archive.manifest.weights[name].sha256)
        if place.dtype == "BOOL" and len(raw) and int(torch.frombuffer(raw, dtype=torch.uint8).max()) > 1:
            raise archive.corrupt(f"weight {name!r}: a boolean that is neither 0 nor 1")
    if can_skip and archive.settled:
        remember(f"{device}-{inode}", record)


def _tensor(data: memoryview, place: Stored, start: int, is_complex: bool) -> torch.Tensor:
    dtype = TORCH_DTYPES[place.dtype]
    if place.begin == place.end:
        tensor = torch.empty(place.shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(data[start + place.begin : start + place.end], dtype=dtype).reshape(place.shape)
        if tensor.data_ptr() % ALIGNMENT:
            tensor = tensor.clone()  # only for odd sizes, and the writer puts the smaller powers of two last
    return torch.view_as_complex(tensor) if is_complex else tensor


def _with_strides(archive: Archive, name: str, tensor: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    problem = layout_problem(spec.shape, spec.stride)
    if problem:
        raise archive.corrupt(f"weight {name!r}: strides {list(spec.stride)} for shape {list(spec.shape)}: {problem}")
    if all(
        n <= 1 or actual == expected
        for n, actual, expected in zip(spec.shape, tensor.stride(), spec.stride, strict=True)
    ):
        return tensor.as_strided(spec.shape, spec.stride)  # row-major, except for strides of dimensions of size 0 or 1
    out = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype)
    for dim, stride in enumerate(spec.stride):
        if stride == 0:  # an expanded dimension is written once
            out, tensor = out.narrow(dim, 0, min(1, spec.shape[dim])), tensor.narrow(dim, 0, min(1, spec.shape[dim]))
    out.copy_(tensor)
    return out.as_strided(spec.shape, spec.stride)


def layout_problem(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Return why these strides are invalid for this shape, or "". Two elements may share memory only if a stride is
    0."""
    if len(shape) != len(stride):
        return f"{len(stride)} strides for {len(shape)} dimensions"
    if any(s < 0 or s >= 1 << 60 for s in stride):
        return "a stride is out of range"
    elements, span = 1, 1
    for n, s in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n > 1 and s > 0), key=lambda pair: pair[1]
    ):
        if s < span:
            return "elements overlap"
        span += (n - 1) * s
        elements *= n
    if 0 not in shape and span > 16 * elements + (1 << 20):
        return f"{elements} elements spread over {span}"
    return ""
