"""Convert captured graphs to ONNX files: translate, run ONNX's own checker, compare, write. ``export`` and ``convert``
share it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from aot_backward_runtime.loader import Package
    from aot_backward_runtime.native.library import Library

    from .value_names import Part


@dataclass(frozen=True)
class OnnxFile:
    """One written ONNX file.

    Attributes:
        path: The file.
        entry: The name of the entry.
        variant: The number of the variant, from 0.
        graph: "forward", "backward", "inference", "gradient", "step", "accumulate" or "update".
        nodes: The number of ONNX nodes.
        opset: The version of the ONNX operator set.
        data: The file of the weights, if they are stored apart.
        compared: The engine that ran the graph ("onnxruntime 1.31.0"), with the tensor nearest to its tolerance; or
            "not compared: why".
    """

    path: Path
    entry: str
    variant: int
    graph: str
    nodes: int
    opset: int
    data: Path | None
    compared: str


def require_onnx() -> None:
    """Raise :class:`ExportError` if a package that writes ONNX is not installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX graphs need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: pip install 'aot-backward[onnx]'"
        )


def checked_destination(path: str | os.PathLike[str]) -> Path:
    """Return ``path``. Raise :class:`ExportError`, before any work, if an ONNX file cannot be written there."""
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise ExportError(f"path is {path!r}; expected the name of the file to write, such as 'model.onnx'")
    path = Path(path)
    if path.suffix != ".onnx":
        raise ExportError(f"{path} does not end in .onnx: name the ONNX file to write, such as model.onnx")
    if not path.parent.is_dir():
        raise ExportError(f"the folder {path.parent} does not exist: make it first")
    if path.is_dir():
        raise ExportError(f"{path} is a folder; name the file to write")
    return path


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
        """Translate the graphs. ``entry``, ``variant``: only that one; by default all."""
        from aot_backward_exporters.onnx.model import translate

        from . import value_names

        if entry is not None and entry not in manifest.entries:
            raise ExportError(
                f"the entry {entry!r} does not exist; the entries are: {', '.join(f'{n} ({e.kind})' for n, e in manifest.entries.items())}"
            )
        self.path, self.manifest, self.weights, self.say = path, manifest, weights, say
        parts: list[Part] = []
        for name, spec in manifest.entries.items():
            if entry not in (None, name):
                continue
            if variant is not None and not 0 <= variant < len(spec.variants):
                raise ExportError(
                    f"entry {name!r} has no variant {variant}; it has {len(spec.variants)}, counted from 0"
                )
            for number in range(len(spec.variants)) if variant is None else (variant,):
                parts += value_names.parts(name, spec, number)
        several = len({p.entry for p in parts}) > 1
        self.paths = {}
        for part in parts:
            numbered = variant is None and len(manifest.entries[part.entry].variants) > 1
            name_parts = [
                path.name.removesuffix(".onnx"),
                *([part.entry] if several else []),
                *([str(part.variant)] if numbered else []),
                part.file,
            ]
            self.paths[part.library] = path.with_name(".".join(p for p in name_parts if p) + ".onnx")
        if not parts:
            raise ExportError("there is no graph to write: every output is an unchanged input or parameter")
        for output_path in self.paths.values():
            checked_destination(output_path)
        self.parts = {part.library: part for part in parts}
        self.variants = list(dict.fromkeys((part.entry, part.variant) for part in parts))
        self.translated = {}
        for done, part in enumerate(parts):
            say("translate", done, len(parts))
            self.translated[part.library] = translate(graphs[part.library], part.names, part.about)
        say("translate", len(parts), len(parts))

    def compare(
        self, check: Callable[[Callable[[], Package]], dict[tuple[str, int], str]]
    ) -> dict[tuple[str, int], str]:
        """Compare the graphs with eager. ``check`` gets a function that loads them as a package with separate weights,
        compares that package, and returns the tensor nearest to its tolerance by entry and variant."""
        import onnx
        import onnx.shape_inference

        from .onnxruntime_backend import OnnxLibrary, OnnxPackage, UnwrittenArchive, engine, runner

        for name, translated in self.translated.items():
            try:
                onnx.checker.check_model(translated.with_fixed(), full_check=True)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
                first = " ".join(str(error).split())
                raise ExportError(
                    f"{name}: ONNX's own checker refuses the graph: {first}; report this, with the program"
                ) from error
        engine_name = engine()

        @cache
        def running(library: str) -> Any:
            return runner(self.translated[library].with_fixed(), engine_name)

        def opened(library: str) -> Library:
            return OnnxLibrary(
                self.manifest.libraries[library], self.parts[library].names, self.translated[library], running(library)
            )

        def load() -> Package:
            copies = {key: tensor.detach().clone() for key, tensor in self.weights.items()}
            return OnnxPackage(
                UnwrittenArchive(self.manifest), copies, {name: partial(opened, name) for name in self.parts}
            )

        worst = check(load)
        version = __import__(engine_name.partition(".")[0]).__version__
        return {label: f"{engine_name} {version}, nearest to its tolerance: {name}" for label, name in worst.items()}

    def write(self, external: bool | None, comparisons: Mapping[tuple[str, int], str]) -> list[OnnxFile]:
        from aot_backward_exporters.onnx.model import OPSET

        from . import writer

        self.say("write", 0, 1)
        data = writer.write(
            {self.paths[n]: t for n, t in self.translated.items()},
            self.path.with_name(f"{self.path.name}.data"),
            external,
        )
        self.say("write", 1, 1)
        return [
            OnnxFile(
                self.paths[n],
                p.entry,
                p.variant,
                p.role,
                len(self.translated[n].model.graph.node),
                OPSET,
                data,
                comparisons[p.entry, p.variant],
            )
            for n, p in self.parts.items()
        ]
