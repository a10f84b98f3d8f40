"""Data that the entries of a package share: weights by key, graphs, and the libraries compiled from them."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.decompositions import replaced
from aot_backward_exporters.graph import VERSION, Artifact, Graph
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress, silent
from aot_backward_exporters.toolchain import products
from aot_backward_runtime.compatibility import choose, why_incompatible
from aot_backward_runtime.errors import ExportError, IncompatibleError
from aot_backward_runtime.format.manifest import (
    FORMAT_VERSION,
    EntrySpec,
    LibrarySpec,
    Manifest,
    SymbolSpec,
    VariantSpec,
    Verdict,
    WeightSpec,
)
from aot_backward_runtime.loader import Package, device_of
from aot_backward_runtime.package.targets import seen_as

from ..capture.joint_graph import Joint
from ..capture.shapes.symbolic_shapes import Sizes
from ..checks import standalone
from ..checks.stored_results import Stored
from .package_writer import library_spec, stem_of, stems_of

_DECOMPOSED = 3
"""How often a graph is decomposed for the standalone backend: a decomposition may itself consist of operators that it
lacks. The number is a guess."""
_PRODUCTS = "large float32 ones by MKL or by oneDNN, as is faster where it runs: aot-backward doctor names the library"
Check = Callable[[Callable[[], Package], int, VariantSpec, Stored, SymbolSpec | None], Verdict]
"""Compare a variant with eager. Arguments: the package's loader, the variant's number and spec, storage for the tensors
that ``verify`` needs, and the size to set to 0 if only that is compared."""


class Contents:
    """The data collected while entries are captured and compiled."""

    def __init__(
        self,
        target: str,
        folder: Path,
        progress: Progress = silent,
        *,
        portable: bool = True,
        tune: str = "none",
        standalone: bool = False,
    ):
        """``target``: one or several (:func:`targets.parsed`). ``portable``: also store the graphs as data. ``tune``:
        how many ways to compile a variant are tried (:data:`.tuning.TUNES`). ``standalone``: decompose operators that
        need PyTorch."""
        self.targets = targets.parsed(target)
        self.folder = folder
        self.progress = progress
        self.portable = portable
        self.tune = tune
        self.standalone = standalone
        self.specs = tuple(targets.target_spec(name) for name in self.targets)
        self.graphs: dict[str, Graph] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.portables: dict[str, bytes] = {}
        self.notes: dict[str, str] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.fills: dict[str, float] = {}  # weights with one value throughout, which are not stored
        self._keys: dict[int, str] = {}
        self._keyed: list[tuple[str, torch.Tensor]] = []

    @property
    def device(self) -> str:
        return self.specs[0].device

    def weight_key(self, entry: str, name: str, tensor: torch.Tensor) -> str:
        """Return the weight's key: one per distinct tensor, even if it has several names or entries."""
        if id(tensor) not in self._keys:
            self._refuse_overlap(name, tensor)
            key = name if name not in self.weights else f"{entry}.{name}"
            self._keys[id(tensor)] = key
            self._keyed.append((name, tensor))  # keeps the tensor alive, so that no other tensor gets its id
            self.weights[key] = tensor.detach()
        return self._keys[id(tensor)]

    def compile(self, graphs: Sequence[Graph], joint: Joint) -> None:
        """Compile ``graphs`` for every target."""
        self._compile(graphs, joint)
        if self.standalone:
            graphs = [self._decomposed(graph, joint) for graph in graphs]
        for graph in graphs:
            self.add_graph(graph)
            if self.portable:
                self._write_portable(graph, joint.sizes)

    def _compile(self, graphs: Sequence[Graph], joint: Joint) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for number, (name, spec) in enumerate(zip(self.targets, self.specs, strict=True)):
            (folder / str(number)).mkdir()
            artifacts = compile.compile_graphs(
                graphs, folder=folder / str(number), fake_mode=joint.fake_mode, target=name, progress=self.progress
            )
            self.artifacts |= {stem_of(n, spec if number else None): artifact for n, artifact in artifacts.items()}
            if any(products.VARIABLE.encode() in artifact.library.read_bytes() for artifact in artifacts.values()):
                self.notes["matrix products"] = _PRODUCTS

    def _decomposed(self, graph: Graph, joint: Joint) -> Graph:
        """Return ``graph``, or an equivalent, compiled again, that avoids operators which the standalone backend lacks,
        as far as possible."""
        for _ in range(_DECOMPOSED):
            missing = {
                name
                for artifact in self._artifacts(graph.name)
                for name in standalone.lacking([artifact.library], artifact.operators)
            }
            new_graph = replaced.without(graph, missing, joint.fake_mode) if missing else None
            if new_graph is None:
                break
            graph = new_graph
            self._compile([graph], joint)
        return graph

    def add_graph(self, graph: Graph) -> None:
        self.graphs[graph.name] = graph
        for key, tensor in graph.constants.values():
            self.weights.setdefault(key, tensor)

    def libraries(self) -> dict[str, LibrarySpec]:
        """Return the manifest's description of each graph."""
        return {name: library_spec(graph, *self._artifacts(name)) for name, graph in self.graphs.items()}

    def manifest(self, entries: Mapping[str, EntrySpec]) -> Manifest:
        """Return the manifest of a package of ``entries``, without verdicts, features and members."""
        extra_targets = len(self.specs) - 1
        return Manifest(
            format_version=FORMAT_VERSION,
            required_features=(),
            producer=f"aot-backward {VERSION}",
            torch=torch.__version__,
            target=self.specs[0],
            targets=self.specs[1:],
            entries={name: _without_verdicts(entry, extra_targets) for name, entry in entries.items()},
            libraries=self.libraries(),
            weights={
                k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "", self.fills.get(k))
                for k, t in self.weights.items()
            },
            members={},
            has_weights=True,
            notes=self.notes,
        )

    def mark(self) -> list[dict[str, Any]]:
        """Return a snapshot of the collected data, for :meth:`back_to`."""
        return [dict(table) for table in self._collected]

    def back_to(self, mark: list[dict[str, Any]]) -> None:
        """Restore the collected data to the snapshot ``mark``."""
        for table, snapshot in zip(self._collected, mark, strict=True):
            table.clear()
            table.update(snapshot)

    @property
    def _collected(self) -> tuple[dict[str, Any], ...]:
        return self.graphs, self.artifacts, self.portables, self.notes, self.weights

    def package_of(self, name: str, entry: EntrySpec) -> Package | None:
        """Return ``entry`` alone, loaded for the target that ``load`` would choose here, with its own weights; None if
        no target runs here."""
        manifest = self.manifest({name: entry})
        try:
            number = choose(manifest)
        except IncompatibleError:
            return None
        return self._load(manifest, number)

    def packages(self, manifest: Manifest) -> list[Callable[[], Package] | str]:
        """Return, for each target, a function that loads the package with new copies of the weights, or why this
        machine cannot load it."""
        return [
            why_incompatible(manifest, number) or functools.partial(self._load, manifest, number)
            for number in range(len(self.specs))
        ]

    def _load(self, manifest: Manifest, number: int) -> Package:
        paths = {name: self._artifacts(name)[number].library for name in manifest.libraries}
        return load_unwritten(seen_as(manifest, number), paths, self.weights)

    def _artifacts(self, name: str) -> list[Artifact]:
        """Return the artifacts of graph ``name``, in the order of the targets."""
        return [self.artifacts[stem] for stem in stems_of(name, self.specs)]

    def _write_portable(self, graph: Graph, sizes: Sizes) -> None:
        try:
            self.portables[graph.name] = graph_json.graph_to_bytes(graph, sizes.worded, sizes.hints())
        except ExportError as error:  # the package works, but cannot be rebuilt
            self.notes[f"no portable graph of {graph.name}"] = str(error)

    def _refuse_overlap(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if two tensors share memory: loading would make them independent."""
        first, last = _span(tensor)
        for other_name, other_tensor in self._keyed:
            start, end = _span(other_tensor)
            if first < end and start < last:
                raise ExportError(
                    f"{name} and {other_name} share memory without being one tensor; tie them (module.weight = other.weight), or clone one of them"
                )


def _without_verdicts(entry: EntrySpec, count: int) -> EntrySpec:
    """Return ``entry`` with empty verdicts for ``count`` targets."""
    verdicts = (Verdict("not run"),) * count
    return dataclasses.replace(entry, variants=tuple(dataclasses.replace(v, verdicts=verdicts) for v in entry.variants))


class _Unwritten:
    """Stand-in for an archive whose libraries are still in the compiler's folder."""

    def __init__(self, manifest: Manifest, libraries: Mapping[str, Path]):
        self.manifest = manifest
        self._libraries = libraries
        self.path = Path("the package being built")
        self.manifest_digest = ""

    def library(self, name: str) -> Path:
        return self._libraries[name]


def load_unwritten(manifest: Manifest, libraries: Mapping[str, Path], weights: Mapping[str, torch.Tensor]) -> Package:
    """Return the package as the runtime would load it, with copies of the weights."""
    device = device_of(manifest)
    copies = {
        k: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for k, t in weights.items()
    }
    return Package(_Unwritten(manifest, libraries), copies, {}, device)  # type: ignore[arg-type]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the address after the last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize
