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
    """Write the gradients of entries as ONNX graphs, after comparing each with eager if an engine can run them here.

    A ``grad`` and a ``step`` entry is one file, ``path``. A ``module`` entry is ``NAME.forward.onnx`` and
    ``NAME.backward.onnx`` next to each other, in eval mode also ``NAME.inference.onnx``. If there are several entries
    or variants, the names of the files contain their names and numbers.

    Args:
        path: The file to write, such as "energy.onnx".
        entries: The programs to export, by name, as for :func:`aot_backward.export`.
        variant: The number of the only variant to write, from 0.
        external_data: Whether weights are stored in one file, ``NAME.onnx.data``; by default they are if they are
            larger than 64 MiB.
        progress: A function that is called as ``progress(stage, done, total)``.

    Returns:
        One :class:`OnnxFile` for each graph.

    Raises:
        ExportError: An operator has no translation, or a tensor differs from eager; the message names it, and nothing
            is written.

    Examples:
        >>> def energy(pos):
        ...     return (pos[:, None] - pos[None]).square().sum()
        >>> entry = ab.Grad(energy, [ab.Variant((torch.randn(4, 3),))], wrt="pos")
        >>> [file] = ab.export_onnx("energy.onnx", {"energy": entry})
        >>> file.graph
        'gradient'
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
                raise ExportError(
                    f"entry {name!r} has order={entry.order}: an ONNX file holds first gradients only; export it with order=1"
                )
            build.add(name, entry)
        manifest = build.manifest(True)
        conversion = Conversion(path, manifest, contents.graphs, contents.weights, None, variant, progress)

        def check(load: Callable[[], Package]) -> dict[tuple[str, int], str]:
            checked_manifest = build.check(manifest, [load], {})
            return {
                (n, i): v.verdict.worst for n, e in checked_manifest.entries.items() for i, v in enumerate(e.variants)
            }

        verdicts = conversion.compare(check)
        return conversion.write(external_data, verdicts)


class Captured(Contents):
    """Graphs that are captured but not compiled."""

    def compile(self, graphs: Sequence[Graph], joint: Any, only: int | None = None) -> None:
        for graph in graphs:
            constants = {attribute: key for attribute, (key, _) in graph.constants.items()}
            self.artifacts[graph.name] = Artifact(Path(), Path(), None, constants, (), "", "", ())
            self.add_graph(graph)
