"""``rebuild``: a package's graphs, compiled again for this torch or another target, without the model's source.

What was stored when the package was exported is the measure: the portable graph of each library, run by eager's own operators on the very tensors
that the new code was given; and, where the package has them, the example inputs and the outputs and gradients that eager had for them.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.cuda import cross_compile
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_runtime.compatibility import hindrance
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.manifest import FORMAT_VERSION, EntrySpec, Manifest, PassSpec, SymbolSpec, Target, TensorSpec, VariantSpec, Verdict
from aot_backward_runtime.native.plan import ROLES
from aot_backward_runtime.native.weights import filled, load_examples, load_weights
from aot_backward_runtime.operators import check_registered
from aot_backward_runtime.package.archive import Archive, open_package
from aot_backward_runtime.package.signature_policy import Key, Policy, admission
from aot_backward_runtime.package.targets import seen_as, targets_of

from .. import torch_api
from ..capture.shapes.restore_shapes import RestoredShapes, restored_shapes
from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from ..checks import eager_check, graph_check
from ..graph import VERSION, Artifact, Graph
from .package_writer import check_destination, library_spec, stem_of, write_package

Progress = Callable[[str, int, int], None]
NARROWED = "narrowed by rebuilding"
"""The key of the manifest's note on sizes that this compiler does not serve, and the package's did."""


def rebuild(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    target: str = "",
    with_graphs: bool = True,
    captured_for: str = "",
    progress: Progress | None = None,
    signature: Policy | None = None,
    key: Key | None = None,
) -> Path:
    """Compiles every graph of the package ``source`` with this torch, compares, and writes the package ``path``, which may be the same file.

    ``target``: as for :func:`aot_backward.export`; without one, the targets that ``source`` was built for. Weights, examples, entries and their names
    stay as they are. ``with_graphs=False`` leaves the portable graphs out of what is written. ``captured_for``: the device whose autocast the graphs
    follow, where it is not the one that ``source`` was compiled for. ``signature`` and ``key``, of ``source``, are those of
    :func:`aot_backward_runtime.load`; what is written is not signed.
    Raises :class:`PackageError` where ``source`` is no whole package or its graphs are no graphs, :class:`ExportError` where it has
    none, or the new code does not give what it should, :class:`IncompatibleError` where nobody has registered an operator that it calls; then nothing
    is written.
    """
    path, say = Path(path), progress or (lambda *_: None)
    check_destination(path)
    names = targets.parsed(target) if target else ()
    if target:
        check_target(target)
    archive = open_package(source, admit=admission(signature, key))
    archive.verify_digests()
    check_registered(archive.manifest, source, recorded_too=True)
    names = names or targets.parsed(",".join(_named(t) for t in targets_of(archive.manifest)))
    _refuse_other_autocast(archive.manifest, captured_for or archive.manifest.target.device, names[0])
    if lacking := sorted(name for name, spec in archive.manifest.libraries.items() if not spec.graph):
        why = archive.manifest.notes.get(f"no portable graph of {lacking[0]}", "")
        raise ExportError(f"{source} has no portable graph of {lacking[0]}{why and f' ({why})'}; export it again from the model's source")
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        made = _Rebuilt(archive, names, Path(folder), say)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # what was cast is in the graphs
            made.compile()
            manifest = made.checked()
        say("write", 0, 1)
        graphs = {name: archive.read_member(spec.graph) for name, spec in archive.manifest.libraries.items()} if with_graphs else {}
        write_package(path, manifest, made.artifacts, made.stored_weights(), made.examples(), graphs)
        say("write", 1, 1)
    return path


def check_target(target: str) -> None:
    """:class:`ExportError` where this process cannot compile for ``target``."""
    for name in targets.parsed(target):
        if name == "cuda":
            raise ExportError(f"target cuda is for modules that are on this machine's GPU; here name its architecture, such as {targets.KNOWN[-2]}")
        if name.startswith("cuda:"):
            cross_compile.check(name)


def _refuse_other_autocast(manifest: Manifest, device: str, target: str) -> None:
    """What autocast casts is another list on each device, and the casts are in the graphs, which follow those of ``device``."""
    other = target.partition(":")[0]
    if other == device:
        return
    for name, entry in manifest.entries.items():
        ambients = [*(v.ambient for v in entry.variants), *(v.ambient for s in entry.structures for v in s.variants)]
        if cast := {a.autocast for a in ambients} - {""}:
            raise ExportError(
                f"entry {name!r} was captured under autocast {cast.pop()} for {device}, and {other} casts other operators: export it from the "
                f"model's source with target={target!r}"
            )


def _named(target: Target) -> str:
    """What ``target`` is asked for by; packages of format 1.3 and older do not say. The graphs of one for a GPU are compiled for its kind, as if it
    were not here: they are on the CPU when they are read."""
    return f"cuda:{target.cuda_arch}" if target.device == "cuda" else target.name or target.device


@dataclass
class _Rebuilt:
    """What is collected on the way."""

    archive: Archive
    names: tuple[str, ...]
    folder: Path
    say: Progress
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)
    entries: dict[str, EntrySpec] = field(default_factory=dict)
    narrowed: list[str] = field(default_factory=list)  # what this compiler takes only some of the sizes of

    def __post_init__(self) -> None:
        manifest = self.archive.manifest
        self.specs = tuple(targets.target_spec(name) for name in self.names)
        stored = load_weights(self.archive) if manifest.has_weights else {}
        absent = {
            key: torch.empty_strided(w.shape, w.stride, dtype=getattr(torch, w.dtype))  # compiling needs to know what they look like
            for key, w in manifest.weights.items()
            if key not in stored and w.fill is None
        }
        self.weights = filled(self.archive) | stored | absent
        self.complete = not absent

    def stored_weights(self) -> dict[str, torch.Tensor]:
        return {key: self.weights[key] for key in self.archive.manifest.weights}

    def examples(self) -> dict[str, torch.Tensor]:
        """What the package stores of examples; on another device than they were made on, without those that hang on random numbers."""
        stored, manifest = load_examples(self.archive), self.archive.manifest
        if manifest.target.device == self.specs[0].device:
            return stored
        for name, entry in manifest.entries.items():
            for i, variant in enumerate(entry.variants):
                plans = [getattr(variant, role) for role in ROLES]
                if any(graph_check.draws(self.graphs[p.call.library]) for p in plans if p is not None and p.call is not None):
                    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(f"{name}/{i}/")}
        return stored

    def compile(self) -> None:
        for name, entry in self.archive.manifest.entries.items():
            first = entry.variants[0] if entry.variants else None
            update = entry.step.update if entry.step is not None else None
            shared = [update.call.library] if update is not None and update.call is not None else []
            variants = [self._variant(v, shared if v is first else []) for v in entry.variants]
            structures = [dataclasses.replace(s, variants=tuple(self._pass(v) for v in s.variants)) for s in entry.structures]
            self.entries[name] = dataclasses.replace(entry, variants=tuple(variants), structures=tuple(structures))

    def _variant(self, variant: VariantSpec, further: Sequence[str] = ()) -> VariantSpec:
        plans = [getattr(variant, role) for role in ROLES]
        names = [p.call.library for p in plans if p is not None and p.call is not None]
        settled = self._compile((*names, *further), variant)
        double = variant.double and self._variant(variant.double)
        return dataclasses.replace(variant, **settled, double=double)

    def _pass(self, variant: PassSpec) -> PassSpec:
        return dataclasses.replace(variant, **self._compile([s.library for s in variant.segments if s.library], variant))

    def _compile(self, names: Sequence[str], variant: VariantSpec | PassSpec) -> dict[str, Any]:
        """Compiles the libraries of one variant. What the compiler assumed of its sizes beyond what is stated."""
        manifest = self.archive.manifest
        names = [name for name in dict.fromkeys(names) if name not in self.graphs]
        if not names:  # a program that only hands on what it is given
            return {"symbols": variant.symbols, "guards": variant.guards}
        forms = {name: graph_json.form_of(self.archive.read_member(manifest.libraries[name].graph), name) for name in names}
        hints: dict[str, int] = {}
        for name, form in forms.items():
            sizes = form.get("sizes")
            if not isinstance(sizes, dict):
                raise PackageError(f"the portable graph {name} does not say the example's sizes")
            if odd := [s for s, value in sizes.items() if hints.setdefault(s, value) != value]:
                raise PackageError(f"the portable graph {name} was made at another size {odd[0]} than those it belongs to")
        try:
            world, graphs = self._read(variant, forms, hints, oblivious=True)
        except PackageError:  # where that failed at export too, sizes were asked for
            if any(s.minimum < 2 for s in variant.symbols):
                raise
            world, graphs = self._read(variant, forms, hints, oblivious=False)
        settled = {symbol: expression_of(size) for symbol, size in world.carried.items()}
        for number, (name, spec) in enumerate(zip(self.names, self.specs, strict=True)):
            folder = self.folder / f"{len(self.artifacts)}.{number}"
            folder.mkdir()
            made = compile.compile_graphs(graphs, folder=folder, fake_mode=world.mode, target=name, progress=self.say) if graphs else {}
            self.artifacts |= {stem_of(n, spec if number else None): artifact for n, artifact in made.items()}
        self.graphs |= {graph.name: graph for graph in graphs}
        if any(expression_of(size) != settled[symbol] for symbol, size in world.carried.items()):
            raise ExportError(f"{names[0]}: the compiler fixed a size that is dynamic in the package; report this, with the package")
        assumed = _assumed(variant, world)
        for before, after in zip(variant.symbols, assumed["symbols"], strict=True):
            if (before.minimum, before.maximum) != (after.minimum, after.maximum):
                self.narrowed.append(f"{names[0] if names else 'a variant'}: {before.label} is now from {after.minimum} to {after.maximum}")
        if further := assumed["guards"][len(variant.guards) :]:
            self.narrowed.append(f"{names[0]}: only where {' and '.join(further)}")
        return assumed

    def _read(
        self, variant: VariantSpec | PassSpec, forms: Mapping[str, Mapping[str, Any]], hints: Mapping[str, int], *, oblivious: bool
    ) -> tuple[RestoredShapes, list[Graph]]:
        """The graphs of one variant, in a shape environment of their own, on the CPU, where they were captured: the exporter takes them elsewhere.
        ``oblivious``: no size is asked whether it is 0 or 1, as none was at export."""
        world = restored_shapes(variant.symbols, variant.guards, hints)
        graphs = []
        with torch_api.symbolic_shapes_config.patch(backed_size_oblivious=oblivious):
            for name, form in forms.items():
                spec = self.archive.manifest.libraries[name]
                inputs = [world.fake(on_device(s, "cpu")) for s in spec.inputs]
                graphs.append(graph_json.graph_of(name, form, spec, inputs, world.mode, self.weights, world.carried))
        return world, graphs

    def manifest(self) -> Manifest:
        old = self.archive.manifest
        notes = {**old.notes, "rebuilt": f"from a package of {old.created or 'unknown date'}, built with torch {old.torch}"}
        if self.narrowed:
            notes[NARROWED] = "; ".join(self.narrowed)
        libraries = {}
        for name in old.libraries:
            if name not in self.graphs:
                raise PackageError(f"no entry uses the library {name}: the package is not whole")
            first, *further = (self.artifacts[stem_of(name, spec if n else None)] for n, spec in enumerate(self.specs))
            libraries[name] = library_spec(self.graphs[name], first, further)
        return dataclasses.replace(
            old,
            format_version=FORMAT_VERSION,
            producer=f"aot-backward {VERSION}",
            torch=torch.__version__,
            target=self.specs[0],
            targets=self.specs[1:],
            entries={name: on_device(entry, self.specs[0].device) for name, entry in self.entries.items()},
            libraries={name: on_device(library, self.specs[0].device) for name, library in libraries.items()},
            members={},
            created=datetime.datetime.now(datetime.UTC).date().isoformat(),
            notes=notes,
        )

    def checked(self) -> Manifest:
        """The manifest with a verdict of every variant for every target."""
        manifest = self.manifest()
        examples = self.examples()
        verdicts = [dict(self._verdicts(manifest, number, examples)) for number in range(len(self.specs))]
        entries = {}
        for name, entry in manifest.entries.items():

            def judged(variant: Any, place: tuple[Any, ...]) -> Any:
                first, *further = (found[place] for found in verdicts)
                return dataclasses.replace(variant, verdict=first, verdicts=tuple(further))

            variants = tuple(judged(v, (name, i)) for i, v in enumerate(entry.variants))
            structures = []
            for structure in entry.structures:
                every = tuple(judged(v, (name, structure.fingerprint, i)) for i, v in enumerate(structure.variants))
                structures.append(dataclasses.replace(structure, variants=every))
            entries[name] = dataclasses.replace(entry, variants=variants, structures=tuple(structures))
        return dataclasses.replace(manifest, entries=entries)

    def _verdicts(self, manifest: Manifest, number: int, examples: Mapping[str, torch.Tensor]) -> Iterator[tuple[tuple[Any, ...], Verdict]]:
        """The verdict for target ``number`` on each variant, by (entry, variant) or (entry, fingerprint, variant)."""
        target = self.specs[number]
        blank = (Verdict("not run"),) * (len(self.specs) - 1)
        manifest = dataclasses.replace(manifest, entries={n: _unjudged(e, blank) for n, e in manifest.entries.items()})
        reason = hindrance(manifest, number) or ("" if self.complete else "the package has no weights")
        alone = seen_as(manifest, number)
        paths = {name: self.artifacts[stem_of(name, target if number else None)].library for name in manifest.libraries}
        for name, entry in alone.entries.items():
            total = len(entry.variants)
            for i in range(total):
                self.say(f"check {name}", i, total)
                why = reason or ("" if any(k.startswith(f"{name}/{i}/") for k in examples) else "the package stores no example inputs")
                package = eager_check.loaded(alone, paths, self.weights) if not why else None
                yield (name, i), Verdict(f"not run: {why}") if package is None else graph_check.check_variant(package, name, i, examples, self.graphs)
            self.say(f"check {name}", total, total)
            for structure in entry.structures:
                for i, variant in enumerate(structure.variants):
                    verdict = Verdict(f"not run: {reason}") if reason else graph_check.check_pass(alone, variant, paths, self.weights, self.graphs)
                    yield (name, structure.fingerprint, i), verdict


def on_device(value: Any, device: str) -> Any:
    """``value``, of the manifest's dataclasses, with every tensor that it describes on ``device``."""
    if isinstance(value, TensorSpec):
        return dataclasses.replace(value, device=device)
    if isinstance(value, tuple):
        return tuple(on_device(v, device) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: on_device(getattr(value, f.name), device) for f in dataclasses.fields(value)})
    return value


def _unjudged(entry: EntrySpec, verdicts: tuple[Verdict, ...]) -> EntrySpec:
    structures = tuple(
        dataclasses.replace(s, variants=tuple(dataclasses.replace(v, verdicts=verdicts) for v in s.variants)) for s in entry.structures
    )
    return dataclasses.replace(entry, variants=tuple(dataclasses.replace(v, verdicts=verdicts) for v in entry.variants), structures=structures)


def _assumed(variant: VariantSpec | PassSpec, world: RestoredShapes) -> dict[str, Any]:
    """The variant's symbols and guards, with what compiling added."""
    env = world.mode.shape_env
    symbols = []
    for spec, symbol in zip(variant.symbols, world.names, strict=True):
        bounds = env.var_to_range[symbol]
        upper = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 1 << 62 else None
        most = upper if spec.maximum is None else min(spec.maximum, upper if upper is not None else spec.maximum)
        symbols.append(dataclasses.replace(spec, minimum=max(spec.minimum, int(bounds.lower)), maximum=most))
    sizes = Sizes(env, dict(world.names), tuple[SymbolSpec, ...](symbols))
    return {"symbols": sizes.symbols, "guards": tuple(dict.fromkeys((*variant.guards, *sizes.guards())))}
