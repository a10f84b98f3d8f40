"""``export_onnx``: entries -> capture -> ONNX -> comparison with eager -> files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError

from ..api import check_entries
from ..entries import Entries, Module
from ..packaging.builder import Build
from ..packaging.checked_package import everything_kept
from ..packaging.contents import Contents
from .conversion import Conversion, OnnxFile, checked_destination, require_onnx

if TYPE_CHECKING:
    from aot_backward_runtime.loader import Package


def export_onnx(
    path: str | os.PathLike[str],
    entries: Entries,
    *,
    variant: int | None = None,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> list[OnnxFile]:
    """Write the gradients of ``entries`` as ONNX graphs, after comparing each with eager if an engine can run them here.

    A ``grad`` and a ``step`` entry is one file, ``path``; a ``module`` entry is ``NAME.forward.onnx`` and ``NAME.backward.onnx`` next to each other
    (in eval mode also ``NAME.inference.onnx``). If there are several entries or variants, the files' names contain their names and numbers.
    ``variant``: only the one of that number. ``external_data``: whether weights are stored in one ``NAME.onnx.data``; by default if they are
    larger than 64 MiB. :class:`ExportError` names the operator that cannot be translated, or the wrong tensor; then nothing is written.
    """
    require_onnx()
    progress = progress or silent
    path = checked_destination(path)
    if not entries:
        raise ExportError("nothing to export: entries is empty")
    check_entries(entries)
    with everything_kept(entries), tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        contents = Captured("cpu", Path(folder), progress)
        build = Build(contents)
        for name, entry in entries.items():
            if isinstance(entry, Module) and entry.order != 1:
                raise ExportError(f"entry {name!r} has order={entry.order}: an ONNX file holds first gradients only; export it with order=1")
            build.add(name, entry)
        manifest = build.manifest(True)
        chosen = Conversion(path, manifest, contents.graphs, contents.weights, None, variant, progress)

        def check(load: Callable[[], Package]) -> dict[tuple[str, int], str]:
            checked = build.check(manifest, [load], {})
            return {(n, i): v.verdict.worst for n, e in checked.entries.items() for i, v in enumerate(e.variants)}

        verdicts = chosen.compare(check)
        return chosen.write(external_data, verdicts)


class Captured(Contents):
    """Graphs that are captured but not compiled."""

    def compile(self, graphs: Sequence[Graph], joint: Any, only: int | None = None) -> None:
        for graph in graphs:
            constants = {attribute: key for attribute, (key, _) in graph.constants.items()}
            self.artifacts[graph.name] = Artifact(Path(), Path(), None, constants, (), "", "", ())
            self.add_graph(graph)
