"""Read and compile again the portable graphs of a package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.manifest import (
    Ambient,
    EntrySpec,
    LibrarySpec,
    PassSpec,
    SymbolSpec,
    TensorSpec,
    VariantSpec,
    Verdict,
)
from aot_backward_runtime.native.plan import ROLES
from aot_backward_runtime.native.weights import filled, load_weights
from aot_backward_runtime.package.archive import Archive

from ..capture.shapes.restore_shapes import RestoredShapes, restored_shapes
from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from .package_writer import library_spec, stem_of, stems_of

_STATIC = PassSpec((), (), (), (), (), Ambient(), Verdict("not run"), ())
"""A pass without dynamic sizes."""


@dataclass
class RebuiltGraphs:
    """The data collected while the graphs of ``archive`` are compiled for the targets ``names``."""

    archive: Archive
    names: tuple[str, ...]
    folder: Path
    progress: Progress
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)
    entries: dict[str, EntrySpec] = field(default_factory=dict)
    narrowed: list[str] = field(default_factory=list)  # sizes that this compiler supports only in part

    def __post_init__(self) -> None:
        manifest = self.archive.manifest
        self.specs = tuple(targets.target_spec(name) for name in self.names)
        stored = load_weights(self.archive) if manifest.has_weights else {}
        missing = {
            key: torch.empty_strided(w.shape, w.stride, dtype=getattr(torch, w.dtype))  # compiling needs their shapes
            for key, w in manifest.weights.items()
            if key not in stored and w.fill is None
        }
        self.weights = filled(self.archive) | stored | missing
        self.complete = not missing

    def stored_weights(self) -> dict[str, torch.Tensor]:
        return {key: self.weights[key] for key in self.archive.manifest.weights}

    def libraries(self) -> dict[str, LibrarySpec]:
        """Return the manifest's description of each graph."""
        if unused := [name for name in self.archive.manifest.libraries if name not in self.graphs]:
            raise PackageError(f"no entry uses the library {unused[0]}: the package is incomplete")
        return {
            name: library_spec(self.graphs[name], *self._artifacts(name)) for name in self.archive.manifest.libraries
        }

    def paths(self, number: int) -> dict[str, Path]:
        """Return the libraries for target ``number``, by the graph's name."""
        return {name: self._artifacts(name)[number].library for name in self.archive.manifest.libraries}

    def _artifacts(self, name: str) -> list[Artifact]:
        return [self.artifacts[stem] for stem in stems_of(name, self.specs)]

    def compile(self) -> None:
        for name, entry in self.archive.manifest.entries.items():
            first = entry.variants[0] if entry.variants else None
            update = entry.step.update if entry.step is not None else None
            libraries = [update.call.library] if update is not None and update.call is not None else []
            variants = [self._variant(v, libraries if v is first else []) for v in entry.variants]
            structures = [
                dataclasses.replace(s, variants=tuple(self._pass(v) for v in s.variants)) for s in entry.structures
            ]
            for spec in entry.in_place:
                self._compile([spec.library], _STATIC)
            # The speed was measured with other code
            updates = tuple(dataclasses.replace(u, speed=None) for u in entry.updates)
            clippings = tuple(dataclasses.replace(c, speed=None) for c in entry.clippings)
            self.entries[name] = dataclasses.replace(
                entry, variants=tuple(variants), structures=tuple(structures), updates=updates, clippings=clippings
            )

    def _variant(self, variant: VariantSpec, extra: Sequence[str] = ()) -> VariantSpec:
        plans = [getattr(variant, role) for role in ROLES]
        names = [p.call.library for p in plans if p is not None and p.call is not None]
        assumptions = self._compile((*names, *extra), variant)
        double = variant.double and self._variant(variant.double)
        return dataclasses.replace(variant, **assumptions, double=double)

    def _pass(self, variant: PassSpec) -> PassSpec:
        return dataclasses.replace(
            variant, **self._compile([s.library for s in variant.segments if s.library], variant)
        )

    def _compile(self, names: Sequence[str], variant: VariantSpec | PassSpec) -> dict[str, Any]:
        """Compile the libraries of one variant. Return its symbols and guards, with the compiler's additions."""
        names = [name for name in dict.fromkeys(names) if name not in self.graphs]
        if not names:  # a program that only returns its inputs
            return {"symbols": variant.symbols, "guards": variant.guards}
        # On the CPU, where they were captured; the exporter moves them to the target
        world, graphs = read_graphs(self.archive, names, variant, self.weights, "cpu")
        expressions = {symbol: expression_of(size) for symbol, size in world.carried.items()}
        for number, (name, spec) in enumerate(zip(self.names, self.specs, strict=True)):
            folder = self.folder / f"{len(self.artifacts)}.{number}"
            folder.mkdir()
            artifacts = (
                compile.compile_graphs(
                    list(graphs.values()), folder=folder, fake_mode=world.mode, target=name, progress=self.progress
                )
                if graphs
                else {}
            )
            self.artifacts |= {stem_of(n, spec if number else None): artifact for n, artifact in artifacts.items()}
        self.graphs |= graphs
        if any(expression_of(size) != expressions[symbol] for symbol, size in world.carried.items()):
            raise ExportError(
                f"{names[0]}: the compiler fixed a size that is dynamic in the package; report this, with the package"
            )
        assumptions = _assumed(variant, world)
        for before, after in zip(variant.symbols, assumptions["symbols"], strict=True):
            if (before.minimum, before.maximum) != (after.minimum, after.maximum):
                top = "" if after.maximum is None else f" to {after.maximum}"
                self.narrowed.append(
                    f"{names[0] if names else 'a variant'}: {before.label} is now from {after.minimum}{top}"
                )
        if new_guards := assumptions["guards"][len(variant.guards) :]:
            self.narrowed.append(f"{names[0]}: only if {' and '.join(new_guards)}")
        return assumptions


def read_graphs(
    archive: Archive,
    names: Sequence[str],
    variant: VariantSpec | PassSpec,
    weights: Mapping[str, torch.Tensor],
    device: str | None = None,
) -> tuple[RestoredShapes, dict[str, Graph]]:
    """Read the portable graphs ``names``, all those of one variant, into a new shape environment, on ``device`` or on
    the one that the package names."""
    libraries = archive.manifest.libraries
    forms = {name: graph_json.form_of(archive.read_member(libraries[name].graph), name) for name in names}
    hints: dict[str, int] = {}
    for name, form in forms.items():
        sizes = form.get("sizes")
        if not isinstance(sizes, dict):
            raise PackageError(f"the portable graph {name} lacks the example's sizes")
        if mismatches := [s for s, value in sizes.items() if hints.setdefault(s, value) != value]:
            raise PackageError(
                f"the portable graph {name} was traced with another value of {mismatches[0]} than the other graphs of its variant"
            )

    def read(*, oblivious: bool) -> tuple[RestoredShapes, dict[str, Graph]]:
        """Return them. ``oblivious``: no size is compared with 0 or 1, as at export."""
        world = restored_shapes(variant.symbols, variant.guards, hints)
        graphs = {}
        with torch_api.symbolic_shapes_config.patch(backed_size_oblivious=oblivious):
            for name, form in forms.items():
                inputs = [world.fake(spec, device or spec.device) for spec in libraries[name].inputs]
                graphs[name] = graph_json.graph_of(
                    name, form, libraries[name], inputs, world.mode, weights, world.carried
                )
        return world, graphs

    try:
        return read(oblivious=True)
    except PackageError:  # if this failed at export too, export compared sizes with 0 and 1
        if any(s.minimum < 2 for s in variant.symbols):
            raise
        return read(oblivious=False)


def on_device(value: Any, device: str) -> Any:
    """Return ``value``, one of the manifest's dataclasses, with every tensor that it describes on ``device``."""
    if isinstance(value, TensorSpec):
        return dataclasses.replace(value, device=device)
    if isinstance(value, tuple):
        return tuple(on_device(v, device) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: on_device(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value


def _assumed(variant: VariantSpec | PassSpec, world: RestoredShapes) -> dict[str, Any]:
    """Return the variant's symbols and guards, with the compiler's additions."""
    env = world.mode.shape_env
    symbols = []
    for spec, symbol in zip(variant.symbols, world.names, strict=True):
        bounds = env.var_to_range[symbol]
        upper = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 1 << 62 else None
        maximum = upper if spec.maximum is None else min(spec.maximum, upper if upper is not None else spec.maximum)
        symbols.append(dataclasses.replace(spec, minimum=max(spec.minimum, int(bounds.lower)), maximum=maximum))
    sizes = Sizes(env, dict(world.names), tuple[SymbolSpec, ...](symbols))
    return {"symbols": sizes.symbols, "guards": tuple(dict.fromkeys((*variant.guards, *sizes.guards())))}
