"""Write a package: one file, complete or absent. ``docs/format.md`` states the bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.atomic_file import replacing
from aot_backward_runtime.format.manifest import (
    EXAMPLES_MEMBER,
    GRAPH_FOLDER,
    MANIFEST_MEMBER,
    WEIGHTS_MEMBER,
    BuildSpec,
    ConstantSpec,
    LibrarySpec,
    Manifest,
    Member,
    Target,
    WeightSpec,
)
from aot_backward_runtime.format.manifest_json import to_json
from aot_backward_runtime.format.safetensors_header import ALIGNMENT, size_of, stored_as, write_header
from aot_backward_runtime.format.zip_directory import PADDING
from aot_backward_runtime.native.tensor_bytes import dtype_name, tensor_chunks
from aot_backward_runtime.native.weights import layout_problem

from ..operators import operators_of
from .consistency import check_consistent

TOP = "package"
LIBRARY_FOLDER = "data/aotinductor"
GRAPH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_CHUNK = 1 << 20  # bytes read at a time: bounds memory; a guess
_PT2 = {"archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "byteorder": b"little"}


def library_spec(graph: Graph, artifact: Artifact, *builds: Artifact) -> LibrarySpec:
    """Return the manifest's description of a compiled graph, without the members, which :func:`write_package` fills in.
    ``builds``: the same graph for the package's further targets."""
    return LibrarySpec(
        member="",
        metadata="",
        extern="",
        inputs=graph.inputs,
        outputs=graph.outputs,
        constants=tuple(ConstantSpec(name, weight) for name, weight in artifact.constants.items()),
        needed=artifact.needed,
        glibc=artifact.glibc,
        glibcxx=artifact.glibcxx,
        nodes=graph.nodes,
        operators=artifact.operators,
        builds=tuple(_build_spec(a) for a in builds),
    )


def _build_spec(artifact: Artifact) -> BuildSpec:
    constants = tuple(ConstantSpec(name, weight) for name, weight in artifact.constants.items())
    return BuildSpec("", "", "", constants, artifact.needed, artifact.glibc, artifact.glibcxx, artifact.operators)


def stem_of(name: str, target: Target | None) -> str:
    """Return the stem of graph ``name``'s files in the archive, for a further ``target`` of the package or, without
    one, the first."""
    return name if target is None else f"{name}.{target.level}"


def stems_of(name: str, targets: Sequence[Target]) -> list[str]:
    """Return :func:`stem_of` graph ``name`` for each of the package's targets."""
    return [stem_of(name, target if number else None) for number, target in enumerate(targets)]


def write_package(
    path: str | os.PathLike[str],
    manifest: Manifest,
    artifacts: Mapping[str, Artifact],
    weights: Mapping[str, torch.Tensor],
    examples: Mapping[str, torch.Tensor],
    graphs: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write ``path`` and return the manifest as written.

    ``manifest`` has entries and ``libraries`` (see :func:`library_spec`); ``artifacts`` are the libraries' artifacts
    for each target, by :func:`stem_of`; ``graphs`` are the portable graphs that exist. ``weights``, ``members``, the
    libraries' members and the modules that register operators are filled in here. ``weights`` are the tensors by key.
    If ``manifest.has_weights`` is false, only their metadata is written; weights with a ``fill`` in
    ``manifest.weights`` are not stored. Any device is accepted; strides are kept for weights only. Raise
    :class:`ExportError`; then, and if the process is killed, the old file at ``path`` is untouched.
    """
    path = Path(path)
    graphs = graphs or {}
    stems = {stem_of(name, target) for name in manifest.libraries for target in (None, *manifest.targets)}
    if stems != artifacts.keys():
        raise ExportError(f"the manifest has the libraries {sorted(stems)}, but {sorted(artifacts)} were compiled")
    libraries = {
        name: _named(name, spec, artifacts, manifest.targets, name in graphs)
        for name, spec in manifest.libraries.items()
    }
    if len({name.casefold() for name in libraries}) != len(libraries):
        raise ExportError(f"names of graphs differ in case only: {sorted(libraries)}")
    fill_specs = {name: spec for name, spec in manifest.weights.items() if spec.fill is not None}
    weights = {name: tensor for name, tensor in weights.items() if name not in fill_specs}
    tensors = {f"weight {name!r}": _plain(f"weight {name!r}", t, manifest.has_weights) for name, t in weights.items()}
    specs = {name: _weight_spec(name, tensors[f"weight {name!r}"]) for name in weights}

    def fill(archive: _Writer) -> Manifest:
        for name, data in _PT2.items():
            archive.add(name, len(data), [data])
        for name, spec in libraries.items():
            for target, build in zip((None, *manifest.targets), spec.every_build, strict=True):
                artifact = artifacts[stem_of(name, target)]
                for member, file in (
                    (build.member, artifact.library),
                    (build.metadata, artifact.metadata),
                    (build.extern, artifact.extern),
                ):
                    if file is not None:
                        archive.add(member, file.stat().st_size, _file_chunks(file))
        for name, data in graphs.items():
            archive.add(libraries[name].graph, len(data), [data])
        digests = dict.fromkeys(weights, "")
        if manifest.has_weights:
            digests = archive.add_tensors(WEIGHTS_MEMBER, {name: tensors[f"weight {name!r}"] for name in weights})
        if examples:
            archive.add_tensors(
                EXAMPLES_MEMBER, {name: _plain(f"example {name!r}", t, True) for name, t in examples.items()}
            )
        complete_manifest = dataclasses.replace(
            manifest,
            libraries=libraries,
            weights={name: dataclasses.replace(spec, sha256=digests[name]) for name, spec in specs.items()}
            | fill_specs,
            members=dict(archive.members),
            operators=operators_of(manifest),
        )
        check_consistent(complete_manifest)
        data = to_json(complete_manifest)
        archive.add(MANIFEST_MEMBER, len(data), [data])
        return complete_manifest

    try:
        with replacing(path.resolve()) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            return fill(_Writer(archive, file))
    except OSError as error:
        raise ExportError(f"cannot write package {path}: {error.strerror or error}; nothing was changed") from error


def check_destination(path: Path) -> None:
    """Raise :class:`ExportError`, before minutes of compiling, if ``path`` cannot be written, or is a file that is no
    package, such as a model."""
    if path.is_dir():
        raise ExportError(f"{path} is a directory; give the name of a file, such as {path / 'model.pt2'}")
    if not path.absolute().parent.is_dir():
        raise ExportError(f"the folder {path.absolute().parent} does not exist; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ExportError(f"the folder {path.absolute().parent} cannot be written to")
    if path.exists() and not (path.is_file() and (path.stat().st_size == 0 or _is_package(path))):
        raise ExportError(
            f"{path}: expected a package or no file, got another file. Name another file, or delete this one."
        )


def _is_package(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.partition("/")[2] == MANIFEST_MEMBER for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


class _Writer:
    def __init__(self, archive: zipfile.ZipFile, file: BinaryIO) -> None:
        self.archive, self.file = archive, file
        self.members: dict[str, Member] = {}

    def add(self, name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        info = zipfile.ZipInfo(f"{TOP}/{name}", (1980, 1, 1, 0, 0, 0))
        info.external_attr, info.create_system = 0o100644 << 16, 3
        info.file_size = size
        wide = size > 1 << 30  # explicit, because zipfile's own limit depends on the version of Python
        header = 30 + len(info.filename) + (20 if wide else 0)
        padding = -(self.file.tell() + header) % ALIGNMENT
        if padding:
            padding += ALIGNMENT if padding < 4 else 0
            info.extra = struct.pack("<HH", PADDING, padding - 4) + bytes(padding - 4)
        digest = hashlib.sha256()
        with self.archive.open(info, "w", force_zip64=wide) as member:
            for chunk in chunks:
                digest.update(chunk)
                member.write(chunk)
        info.extra = b""  # only the local header has the padding
        self.members[name] = Member(size, digest.hexdigest())

    def add_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Write a safetensors member and return the SHA-256 of each tensor."""
        stored = {key: stored_as(dtype_name(t), tuple(t.shape)) for key, t in tensors.items()}
        header, order = write_header(stored)
        digests: dict[str, str] = {}

        def chunks() -> Iterator[bytes | memoryview]:
            yield header
            for key in order:
                digest = hashlib.sha256()
                for chunk in tensor_chunks(tensors[key]):
                    digest.update(chunk)
                    yield chunk
                digests[key] = digest.hexdigest()

        self.add(name, len(header) + sum(size_of(*s) for s in stored.values()), chunks())
        return digests


def _named(
    name: str, spec: LibrarySpec, artifacts: Mapping[str, Artifact], targets: Sequence[Target], portable: bool
) -> LibrarySpec:
    """Return ``spec`` with the member names of its library, its builds and its graph."""
    if not GRAPH_NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} is not a valid name for a graph: use only letters, digits, '_', '-' and '.' in the name of the entry"
        )

    def members(target: Target | None) -> dict[str, Any]:
        stem = stem_of(name, target)
        place = f"{LIBRARY_FOLDER}/{stem}/{stem}"
        return {
            "member": f"{place}.so",
            "metadata": f"{place}_metadata.json",
            "extern": f"{place}.json" if artifacts[stem].extern is not None else "",
        }

    builds = tuple(
        dataclasses.replace(build, **members(target)) for target, build in zip(targets, spec.builds, strict=True)
    )
    return dataclasses.replace(
        spec, **members(None), builds=builds, graph=f"{GRAPH_FOLDER}/{name}.json" if portable else ""
    )


def _plain(label: str, tensor: torch.Tensor, with_data: bool) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided or (with_data and (type(tensor) is not torch.Tensor or tensor.is_meta)):
        kind = f"{type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise ExportError(f"{label} is a {kind}; only plain tensors can be stored")
    if not stored_as(dtype_name(tensor), ())[0]:
        raise ExportError(f"{label} has dtype {tensor.dtype}, which a package cannot store")
    return tensor


def _weight_spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    problem = layout_problem(shape, stride)
    if problem:
        raise ExportError(
            f"weight {name!r} has strides {list(stride)} for shape {list(shape)}: {problem}; make it contiguous first"
        )
    return WeightSpec(dtype_name(tensor), shape, stride, sha256="")


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
