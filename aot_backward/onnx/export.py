"""``export_onnx``: entries -> capture -> ONNX -> comparison with eager -> files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_backward_runtime.errors import ExportError

from ..api import check_entries, everything_kept
from ..entries import Entries, Module
from ..graph import Artifact, Graph
from ..packaging.builder import Build
from ..progress import Progress, silent
from .conversion import Conversion, OnnxFile, checked_destination, require

if TYPE_CHECKING:
    from aot_backward_runtime.format.manifest import Manifest
    from aot_backward_runtime.loader import Package


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
    say = progress or silent
    path = checked_destination(path)
    if not entries:
        raise ExportError("nothing to export: entries is empty")
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

    def _loaded(self, manifest: Manifest, number: int) -> Package | str:
        assert self._package is not None
        return self._package
