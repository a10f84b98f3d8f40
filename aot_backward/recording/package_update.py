"""Read a package, add recorded passes to it, and write it again."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aot_backward_exporters.graph import VERSION, Artifact
from aot_backward_exporters.inductor import targets
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import (
    FORMAT_VERSION,
    ClippingSpec,
    EntrySpec,
    Manifest,
    PassSpec,
    StructureSpec,
    Target,
    UpdateSpec,
    WeightSpec,
)
from aot_backward_runtime.native.weights import load_examples, load_weights
from aot_backward_runtime.package.archive import Archive, open_package

from .. import operators
from ..packaging.package_writer import library_spec, write_package
from .optimizer_steps.compiled_steps import CompiledStep
from .trace import TracedProgram


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a package from reading to writing. If two processes of this user add to it, the second waits and keeps the
    first one's additions."""
    folder = Path(tempfile.gettempdir()) / f"aot-backward-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / hashlib.sha256(str(path.resolve()).encode()).hexdigest()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class PackageUpdate:
    """The package at ``path``, or an empty one if it does not exist. Adding returns a new object, so an interrupted
    caller has either the old or the new one."""

    path: Path
    entry: str
    manifest: Manifest
    artifacts: dict[str, Artifact]
    weights: dict[str, torch.Tensor]
    examples: dict[str, torch.Tensor]
    graphs: dict[str, bytes]

    @classmethod
    def read(cls, path: Path, entry: str, target: str) -> PackageUpdate:
        """Read the package. Raise :class:`ExportError` if passes compiled here for ``target`` cannot be added to its
        ``entry``."""
        names = targets.parsed(target)
        if len(names) > 1:
            raise ExportError(
                f"recorded passes: expected one target, got {target!r}. aot-backward rebuild adds further targets"
            )
        spec = targets.target_spec(names[0])
        if not path.exists():
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                required_features=(),
                producer=f"aot-backward {VERSION}",
                torch=torch.__version__,
                target=spec,
                entries={entry: EntrySpec("replay", (), ())},
                libraries={},
                weights={},
                members={},
                created=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
            return cls(path, entry, manifest, {}, {}, {}, {})
        archive = open_package(path)
        old = archive.manifest
        if old.targets:
            raise ExportError(
                f"{path} is for several targets, but passes can only be added to a package for one target: choose a new file"
            )
        if old.torch != torch.__version__ or dataclasses.replace(old.target, name=spec.name) != spec:
            raise ExportError(
                f"{path}: expected a package of torch {torch.__version__} for {_words(spec)}, got one of torch {old.torch} for "
                f"{_words(old.target)}. Record into a new file."
            )
        entry_spec = old.entries.get(entry, EntrySpec("replay", (), ()))
        if entry_spec.kind != "replay":
            raise ExportError(
                f"{path} has a {entry_spec.kind} entry {entry!r}; give the recorded passes another name, entry='…'"
            )
        manifest = dataclasses.replace(old, format_version=FORMAT_VERSION, entries={**old.entries, entry: entry_spec})
        weights = load_weights(archive) if old.has_weights else {}
        if not old.has_weights and old.weights:
            raise ExportError(f"{path} was written without weights; record into a new file")
        graphs = {name: archive.read_member(spec.graph) for name, spec in old.libraries.items() if spec.graph}
        return cls(path, entry, manifest, _artifacts(archive), weights, load_examples(archive), graphs)

    def variants(self, fingerprint: str) -> tuple[PassSpec, ...]:
        structure = next(
            (s for s in self.manifest.entries[self.entry].structures if s.fingerprint == fingerprint), None
        )
        return structure.variants if structure else ()

    def with_passes(
        self,
        programs: Sequence[tuple[TracedProgram, PassSpec]],
        artifacts: Mapping[str, Artifact],
        places: Mapping[str, int],
    ) -> PackageUpdate:
        """Return the package with ``programs``, compiled and checked, each with its spec. ``places``: the order of new
        structures, after the others."""
        libraries = dict(self.manifest.libraries)
        files = dict(self.artifacts)
        tensors = dict(self.weights)
        graphs = dict(self.graphs)
        by_fingerprint: dict[str, list[tuple[TracedProgram, PassSpec]]] = {}
        for program, spec in programs:
            by_fingerprint.setdefault(program.fingerprint, []).append((program, spec))
            graphs.update(program.portables)
            for graph in program.graphs:
                libraries[graph.name] = library_spec(graph, artifacts[graph.name])
                files[graph.name] = artifacts[graph.name]
                for key, tensor in graph.constants.values():
                    tensors.setdefault(key, tensor)
        old = self.manifest.entries[self.entry]
        structures = {s.fingerprint: s for s in old.structures}
        for fingerprint, new in by_fingerprint.items():
            structure, before = new[-1][0].structure, structures.get(fingerprint)
            # new ones first: a dynamic variant, inferred from a static variant's pass and further passes, serves both
            variants = (*(spec for _, spec in new), *(before.variants if before else ()))
            structures[fingerprint] = StructureSpec(
                fingerprint, structure.tape.nodes, len(structure.tape.ops), variants, round(structure.seconds, 7)
            )
        weights = {
            k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "")
            for k, t in tensors.items()
        }
        ordered = tuple(sorted(structures.values(), key=lambda s: places.get(s.fingerprint, -1)))
        entries = {**self.manifest.entries, self.entry: dataclasses.replace(old, structures=ordered)}
        manifest = dataclasses.replace(self.manifest, libraries=libraries, entries=entries, weights=weights)
        return dataclasses.replace(self, manifest=manifest, artifacts=files, weights=tensors, graphs=graphs)

    def with_steps(self, steps: Sequence[CompiledStep]) -> PackageUpdate:
        libraries, files, graphs = dict(self.manifest.libraries), dict(self.artifacts), dict(self.graphs)
        for step in steps:
            name = step.spec.library
            libraries[name], files[name] = library_spec(step.graph, step.artifact), step.artifact
            if step.portable is not None:
                graphs[name] = step.portable
        old = self.manifest.entries[self.entry]
        new = {s.spec.library: s.spec for s in steps}
        updates = (
            *(u for u in old.updates if u.library not in new),
            *(s for s in new.values() if isinstance(s, UpdateSpec)),
        )
        clippings = (
            *(c for c in old.clippings if c.library not in new),
            *(s for s in new.values() if isinstance(s, ClippingSpec)),
        )
        entries = {**self.manifest.entries, self.entry: dataclasses.replace(old, updates=updates, clippings=clippings)}
        manifest = dataclasses.replace(self.manifest, libraries=libraries, entries=entries)
        return dataclasses.replace(self, manifest=manifest, artifacts=files, graphs=graphs)

    def write(self) -> None:
        write_package(self.path, self.manifest, self.artifacts, self.weights, self.examples, self.graphs)

    def say_operators(self) -> None:
        """Log the imports that a process needs before it loads the package."""
        operators.say(operators.operators_of(self.manifest))


def _words(target: Target) -> str:
    """Return the name of ``target`` and its instruction set or GPU: "cpu:avx2 x86-64-v3"."""
    return f"{target.label} {target.cuda_arch or target.march}".strip()


def _artifacts(archive: Archive) -> dict[str, Artifact]:
    """Return the libraries of a package as files, to be written again."""
    out = {}
    for name, spec in archive.manifest.libraries.items():
        library = archive.library(name)
        extern = library.with_suffix(".json") if spec.extern else None
        constants = {c.name: c.weight for c in spec.constants}
        metadata = library.with_name(library.stem + "_metadata.json")
        out[name] = Artifact(
            library, metadata, extern, constants, spec.needed, spec.glibc, spec.glibcxx, spec.operators
        )
    return out
