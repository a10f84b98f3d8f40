"""``convert``: translate a package's graphs to ONNX, without the model's source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, VariantSpec
from aot_backward_runtime.native.plan import ROLES
from aot_backward_runtime.native.weights import filled, load_examples, load_weights
from aot_backward_runtime.operators import check_registered
from aot_backward_runtime.package.archive import Archive, open_package

from ..checks import graph_check
from ..checks.verify import verify_variant
from ..packaging.rebuilt_graphs import read_graphs
from .conversion import Conversion, OnnxFile, checked_destination, require_onnx

if TYPE_CHECKING:
    import torch

    from aot_backward_runtime.loader import Package


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    entry: str | None = None,
    variant: int | None = None,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> list[OnnxFile]:
    """Write the gradients in a package as ONNX graphs, without the model's source. Files are named as by
    :func:`aot_backward.export_onnx`.

    Each graph is compared with the results stored in the package and with PyTorch's operators.

    Args:
        source: The package.
        path: The file to write, such as "energy.onnx".
        entry: The name of the only entry to write.
        variant: The number of the only variant to write, from 0.
        external_data: Whether weights are stored in one file, ``NAME.onnx.data``; by default they are if they are
            larger than 64 MiB.
        progress: A function that is called as ``progress(stage, done, total)``.

    Returns:
        One :class:`OnnxFile` for each graph.

    Raises:
        PackageError: The file ``source`` is not a whole package.
        ExportError: The package lacks graphs as data or weights, or a graph cannot be translated.

    Examples:
        >>> files = ab.convert("net.pt2", "net.onnx")
        >>> sorted(file.path.name for file in files)
        ['net.backward.onnx', 'net.forward.onnx']
    """
    require_onnx()
    path = checked_destination(path)
    say = progress or silent
    archive = open_package(source)
    archive.verify_digests()
    manifest = archive.manifest
    if not manifest.has_weights:
        raise ExportError(
            f"{source} was written without weights, and an ONNX graph needs them as defaults of its inputs; export it with weights"
        )
    if entry is not None and entry not in manifest.entries:
        raise ExportError(
            f"{source} has no entry {entry!r}; it has: {', '.join(f'{n} ({e.kind})' for n, e in manifest.entries.items())}"
        )
    entries = {n: e for n, e in manifest.entries.items() if entry in (None, n)}
    if names := [n for n, e in entries.items() if e.kind == "replay"]:
        raise ExportError(
            f"the entry {names[0]!r} holds recorded passes, which cannot run without the recorded script: choose another entry with --entry"
        )
    check_registered(manifest, source)
    weights = filled(archive) | load_weights(archive)
    graphs: dict[str, Graph] = {}
    for entry_spec in entries.values():
        for number, spec in enumerate(entry_spec.variants):
            if variant in (None, number):
                graphs |= _graphs(archive, entry_spec, spec, weights)
    conversion = Conversion(path, manifest, graphs, weights, entry, variant, say)
    examples = load_examples(archive)

    def check(load: Callable[[], Package]) -> dict[tuple[str, int], str]:
        package, out = load(), {}
        for name, number in conversion.variants:
            if not any(key.startswith(f"{name}/{number}/") for key in examples):
                raise ExportError(
                    f"{source} stores no example inputs for {name!r}, so its ONNX graph cannot be checked"
                )
            say(f"check {name}", number, len(manifest.entries[name].variants))
            if manifest.entries[name].kind != "step":
                out[name, number] = graph_check.check_variant(package, name, number, examples, graphs).worst
                continue
            # eager's operators are not the reference: Adam makes a full step of rounding noise, such as a bias's
            # gradient before BatchNorm
            report = verify_variant(package, name, number, examples)
            if report.wrong:
                raise ExportError(
                    f"{name} variant {number}: the ONNX graph differs from the results in the package: {report.wrong[0]}"
                )
            out[name, number] = report.worst
        return out

    return conversion.write(external_data, conversion.compare(check))


def _graphs(
    archive: Archive, entry: EntrySpec, variant: VariantSpec, weights: Mapping[str, torch.Tensor]
) -> dict[str, Graph]:
    """Return the graphs of one variant, read from the package."""
    libraries = archive.manifest.libraries
    plans = [*(getattr(variant, role) for role in ROLES), entry.step.update if entry.step is not None else None]
    names = [p.call.library for p in plans if p is not None and p.call is not None]
    for name in names:
        if not libraries[name].graph:
            note = archive.manifest.notes.get(f"no portable graph of {name}", "")
            raise ExportError(
                f"the package has no portable graph of {name}{note and f' ({note})'}; export it again from the model's source"
            )
    return read_graphs(archive, names, variant, weights)[1]
