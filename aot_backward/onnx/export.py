"""``export_onnx``: entries -> capture -> ONNX -> comparison with eager -> files."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_backward_runtime.errors import ExportError

from ..build import Build, Progress
from ..entries import Entries, Module
from ..export import check_entries, everything_kept
from ..program import Artifact, Graph

if TYPE_CHECKING:
    import torch

    from aot_backward_runtime.manifest import Manifest
    from aot_backward_runtime.package import Package
    from aot_backward_runtime.plan import Library

    from .names import Part


@dataclass(frozen=True)
class OnnxFile:
    """One ONNX file. ``graph``: "forward", "backward", "inference", "gradient", "step", "accumulate" or "update". ``nodes``: of ONNX.

    ``compared``: what ran it beside eager ("onnxruntime 1.31.0"), with the tensor that was nearest to what is allowed; or "not compared: why".
    """

    path: Path
    entry: str
    variant: int
    graph: str
    nodes: int
    opset: int
    data: Path | None
    compared: str


def export_onnx(
    path: str | os.PathLike[str],
    entries: Entries,
    *,
    variant: int | None = None,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> list[OnnxFile]:
    """Writes the gradients of ``entries`` as ONNX graphs, after comparing each with eager where something can run them here.

    A ``grad`` and a ``step`` entry is one file, ``path``; a ``module`` entry is ``NAME.forward.onnx`` and ``NAME.backward.onnx`` beside each other
    (in eval mode also ``NAME.inference.onnx``). Several entries, and several variants, have their names and numbers in the files' names.
    ``variant``: only the one of that number. ``external_data``: whether weights lie in one ``NAME.onnx.data``; by default where they come to more
    than 64 MiB. :class:`ExportError` names the operator that has no translation, or the tensor that is wrong; then nothing is written.
    """
    require()
    say = progress or (lambda *_: None)
    path = Path(path)
    check_entries(entries)
    with everything_kept(entries), tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        built = Captured(Path(folder), say)
        for name, entry in entries.items():
            if isinstance(entry, Module) and entry.order != 1:
                raise ExportError(f"entry {name!r} has order={entry.order}: an ONNX file holds first gradients only; export it with order=1")
            built.add(name, entry)
        manifest = built.manifest(True)
        chosen = Conversion(path, manifest, built.graphs, built.weights, None, variant, say)
        verdicts = chosen.compare(lambda package: built.checked(manifest, package))
        return chosen.write(external_data, verdicts)


def require() -> None:
    """:class:`ExportError` where what writes ONNX is not installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"ONNX graphs need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: pip install 'aot-backward[onnx]'")


class Captured(Build):
    """Entries that are captured, and not compiled."""

    def __init__(self, folder: Path, say: Progress):
        super().__init__("cpu", folder, say)
        self._package: Package | None = None

    def compile(self, graphs: Sequence[Graph], joint: Any) -> None:
        for graph in graphs:
            constants = {attribute: key for attribute, (key, _) in graph.constants.items()}
            self.graphs[graph.name] = graph
            self.artifacts[graph.name] = Artifact(Path(), Path(), None, constants, (), "", "", ())
            for key, tensor in graph.constants.values():
                self.weights.setdefault(key, tensor)

    def checked(self, manifest: Manifest, package: Package) -> dict[tuple[str, int], str]:
        """Of each variant the tensor that came nearest to what is allowed; :class:`ExportError` where one is wrong."""
        self._package = package
        done = self.check(manifest, {})
        return {(n, i): v.verdict.worst for n, e in done.entries.items() for i, v in enumerate(e.variants)}

    def loaded(self, manifest: Manifest) -> Package:
        assert self._package is not None
        return self._package


class Conversion:
    """The ONNX graphs of a package's entries: translated, compared, written."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        graphs: Mapping[str, Graph],
        weights: Mapping[str, torch.Tensor],
        entry: str | None,
        variant: int | None,
        say: Progress,
    ):
        """``entry``, ``variant``: only those; by default all."""
        from aot_backward_exporters.onnx import translate

        from . import names, writing

        if entry is not None and entry not in manifest.entries:
            raise ExportError(f"there is no entry {entry!r}; there are: {', '.join(f'{n} ({e.kind})' for n, e in manifest.entries.items())}")
        self.path, self.manifest, self.weights, self.say = path, manifest, weights, say
        parts: list[Part] = []
        for name, spec in manifest.entries.items():
            if entry not in (None, name):
                continue
            if variant is not None and not 0 <= variant < len(spec.variants):
                raise ExportError(f"entry {name!r} has no variant {variant}; it has {len(spec.variants)}, counted from 0")
            for number in range(len(spec.variants)) if variant is None else (variant,):
                parts += names.parts(name, spec, number)
        several = len({p.entry for p in parts}) > 1
        self.paths = {}
        for part in parts:
            numbered = variant is None and len(manifest.entries[part.entry].variants) > 1
            pieces = [path.name.removesuffix(".onnx"), *([part.entry] if several else []), *([str(part.variant)] if numbered else []), part.file]
            self.paths[part.library] = path.with_name(".".join(p for p in pieces if p) + ".onnx")
        writing.check_destination([path, *self.paths.values()])
        self.parts = {part.library: part for part in parts}
        self.translated = {}
        for done, part in enumerate(parts):
            say("translate", done, len(parts))
            self.translated[part.library] = translate(graphs[part.library], part.names, part.about)
        say("translate", len(parts), len(parts))

    def compare(self, check: Callable[[Package], dict[tuple[str, int], str]]) -> dict[tuple[str, int], str]:
        """``check``: compares what it is given with eager; by entry and variant the tensor that was nearest to what is allowed."""
        import onnx

        from .running import Described, OnnxLibrary, OnnxPackage, engine, runner

        for translated in self.translated.values():
            onnx.checker.check_model(translated.with_fixed(), full_check=True)
        chosen = engine()

        def opened(library: str) -> Library:
            part, translated = self.parts[library], self.translated[library]
            return OnnxLibrary(self.manifest.libraries[library], part.names, translated, runner(translated.with_fixed(), chosen))

        copies = {key: tensor.detach().clone() for key, tensor in self.weights.items()}
        package = OnnxPackage(Described(self.manifest), copies, {name: partial(opened, name) for name in self.parts})
        worst = check(package)
        version = __import__(chosen.partition(".")[0]).__version__
        return {which: f"{chosen} {version}, nearest to what is allowed: {name}" for which, name in worst.items()}

    def write(self, external: bool | None, compared: Mapping[tuple[str, int], str]) -> list[OnnxFile]:
        from aot_backward_exporters.onnx import OPSET

        from . import writing

        self.say("write", 0, 1)
        data = writing.write({self.paths[n]: t for n, t in self.translated.items()}, self.path.with_name(f"{self.path.name}.data"), external)
        self.say("write", 1, 1)
        return [
            OnnxFile(
                self.paths[n], p.entry, p.variant, p.role, len(self.translated[n].model.graph.node), OPSET, data, compared[p.entry, p.variant]
            )
            for n, p in self.parts.items()
        ]
