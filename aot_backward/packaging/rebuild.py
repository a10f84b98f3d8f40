"""Compile a package's graphs again, for this torch or another target, without the model's source.

The new code is compared with eager's operators, which run the portable graph of each library on the same tensors. If
the package stores example inputs, it is also compared with eager's outputs and gradients from the export.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.cuda import cross_compile
from aot_backward_exporters.graph import VERSION
from aot_backward_exporters.inductor import targets
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.compatibility import why_incompatible
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import FORMAT_VERSION, EntrySpec, Manifest, Target, Verdict
from aot_backward_runtime.native.plan import ROLES
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.operators import check_registered
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import Key, admission
from aot_backward_runtime.package.targets import seen_as, targets_of

from ..checks import graph_check
from .contents import load_unwritten
from .package_writer import check_destination, write_package
from .rebuilt_graphs import RebuiltGraphs, on_device
from .standalone import with_standalone

NARROWED = "narrowed by rebuilding"
"""The key of the manifest's note on sizes that the package served and this compiler does not."""


def rebuild(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    target: str = "",
    with_graphs: bool = True,
    captured_for: str = "",
    progress: Progress | None = None,
    key: Key | None = None,
) -> Path:
    """Compile every graph of a package with this torch, compare with the stored results, and write a package.

    Weights, examples, entries and their names stay unchanged. The new package is not signed.

    Args:
        source: The package to read.
        path: The package to write; it may be the same file.
        target: As for :func:`aot_backward.export`; the default is the targets of ``source``.
        with_graphs: Whether to write the portable graphs too.
        captured_for: The device whose autocast the graphs follow, if it differs from the target of ``source``.
        progress: A function that is called as ``progress(stage, done, total)``.
        key: Checks ``source``, as in :func:`aot_backward_runtime.load`.

    Returns:
        The path of the new package.

    Raises:
        PackageError: The file ``source`` is incomplete, or its graphs are invalid.
        SignatureError: The signature of ``source`` is refused.
        ExportError: The package has no graphs, or the new code gives wrong results. Then nothing is written.
        IncompatibleError: An operator that it calls is not registered in this process.

    Examples:
        >>> path = ab.rebuild("net.pt2", "older.pt2", target="cpu:sse4,cpu:avx2")
    """
    path, progress = Path(path), progress or silent
    check_destination(path)
    names = targets.parsed(target) if target else ()
    if target:
        check_target(target)
    archive = open_package(source, admit=admission(key))
    archive.verify_digests()
    check_registered(archive.manifest, source, recorded_too=True)
    names = names or targets.parsed(",".join(_target_name(t) for t in targets_of(archive.manifest)))
    _refuse_other_autocast(archive.manifest, captured_for or archive.manifest.target.device, names[0])
    if missing := sorted(name for name, spec in archive.manifest.libraries.items() if not spec.graph):
        note = archive.manifest.notes.get(f"no portable graph of {missing[0]}", "")
        raise ExportError(
            f"{source} has no portable graph of {missing[0]}{note and f' ({note})'}; export it again from the model's source"
        )
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        rebuilt = RebuiltGraphs(archive, names, Path(folder), progress)
        # The graphs already contain the casts
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            rebuilt.compile()
            examples = _stored_examples(rebuilt)
            manifest = _check(rebuilt, _manifest(rebuilt), examples)
        weights = rebuilt.stored_weights()
        write = partial(write_package, artifacts=rebuilt.artifacts, weights=weights, examples=examples)
        manifest = with_standalone(
            manifest, rebuilt.artifacts, weights, examples, Path(folder), required=False, progress=progress
        )
        progress("write", 0, 1)
        graphs = (
            {name: archive.read_member(spec.graph) for name, spec in archive.manifest.libraries.items()}
            if with_graphs
            else {}
        )
        write(path, manifest, graphs=graphs)
        progress("write", 1, 1)
    return path


def check_target(target: str) -> None:
    """Raise :class:`ExportError` if this process cannot compile for ``target``."""
    for name in targets.parsed(target):
        if name == "cuda":
            raise ExportError(
                f"target cuda: only modules on this machine's GPU can use it. Name the GPU's architecture instead, such as {targets.KNOWN[-2]}"
            )
        if name.startswith("cuda:"):
            cross_compile.check(name)


def _refuse_other_autocast(manifest: Manifest, device: str, target: str) -> None:
    """Raise if graphs with autocast move to another device: their casts follow ``device``, and each device casts other
    operators."""
    device_type = target.partition(":")[0]
    if device_type == device:
        return
    for name, entry in manifest.entries.items():
        ambients = [*(v.ambient for v in entry.variants), *(v.ambient for s in entry.structures for v in s.variants)]
        if cast := {a.autocast for a in ambients} - {""}:
            raise ExportError(
                f"entry {name!r} was captured under autocast {cast.pop()} for {device}, and {device_type} casts other operators: export it from the "
                f"model's source with target={target!r}"
            )


def _target_name(target: Target) -> str:
    """Return the name that requests ``target``; packages of format 1.3 and older do not store it. Graphs for a GPU are
    cross-compiled for its architecture even if it is present, because they are read on the CPU."""
    return f"cuda:{target.cuda_arch}" if target.device == "cuda" else target.name or target.device


def _stored_examples(rebuilt: RebuiltGraphs) -> dict[str, torch.Tensor]:
    """Return the stored examples. For another device than at export, omit examples that depend on random numbers."""
    stored, manifest = load_examples(rebuilt.archive), rebuilt.archive.manifest
    if manifest.target.device == rebuilt.specs[0].device:
        return stored
    for name, entry in manifest.entries.items():
        for i, variant in enumerate(entry.variants):
            plans = [getattr(variant, role) for role in ROLES]
            if any(
                graph_check.consumes_rng(rebuilt.graphs[p.call.library])
                for p in plans
                if p is not None and p.call is not None
            ):
                stored = {key: tensor for key, tensor in stored.items() if not key.startswith(f"{name}/{i}/")}
    return stored


def _manifest(rebuilt: RebuiltGraphs) -> Manifest:
    """Return the rebuilt package's manifest, without verdicts and members."""
    old, device = rebuilt.archive.manifest, rebuilt.specs[0].device
    notes = {**old.notes, "rebuilt": f"from a package of {old.created or 'unknown date'}, built with torch {old.torch}"}
    if rebuilt.narrowed:
        notes[NARROWED] = "; ".join(rebuilt.narrowed)
    return dataclasses.replace(
        old,
        format_version=FORMAT_VERSION,
        producer=f"aot-backward {VERSION}",
        torch=torch.__version__,
        target=rebuilt.specs[0],
        targets=rebuilt.specs[1:],
        entries={
            name: dataclasses.replace(on_device(entry, device), standalone="", standalones=())
            for name, entry in rebuilt.entries.items()
        },
        libraries={name: on_device(library, device) for name, library in rebuilt.libraries().items()},
        members={},
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        notes=notes,
    )


def _check(rebuilt: RebuiltGraphs, manifest: Manifest, examples: Mapping[str, torch.Tensor]) -> Manifest:
    """Return ``manifest`` with a verdict of every variant for every target."""
    verdicts = [dict(_verdicts(rebuilt, manifest, number, examples)) for number in range(len(rebuilt.specs))]
    entries = {}
    for name, entry in manifest.entries.items():

        def with_verdicts(variant: Any, place: tuple[Any, ...]) -> Any:
            first, *rest = (by_place[place] for by_place in verdicts)
            return dataclasses.replace(variant, verdict=first, verdicts=tuple(rest))

        variants = tuple(with_verdicts(v, (name, i)) for i, v in enumerate(entry.variants))
        structures = []
        for structure in entry.structures:
            checked_variants = tuple(
                with_verdicts(v, (name, structure.fingerprint, i)) for i, v in enumerate(structure.variants)
            )
            structures.append(dataclasses.replace(structure, variants=checked_variants))
        updates = tuple(with_verdicts(u, (name, u.library)) for u in entry.updates)
        clippings = tuple(with_verdicts(c, (name, c.library)) for c in entry.clippings)
        entries[name] = dataclasses.replace(
            entry, variants=variants, structures=tuple(structures), updates=updates, clippings=clippings
        )
    return dataclasses.replace(manifest, entries=entries)


def _verdicts(
    rebuilt: RebuiltGraphs, manifest: Manifest, number: int, examples: Mapping[str, torch.Tensor]
) -> Iterator[tuple[tuple[Any, ...], Verdict]]:
    """Yield the verdict of each variant for target ``number``, by (entry, variant), (entry, fingerprint, variant) or
    (entry, library)."""
    blank = (Verdict("not run"),) * (len(rebuilt.specs) - 1)
    manifest = dataclasses.replace(
        manifest, entries={n: _without_verdicts(e, blank) for n, e in manifest.entries.items()}
    )
    reason = why_incompatible(manifest, number) or ("" if rebuilt.complete else "the package has no weights")
    view, paths, weights, graphs = seen_as(manifest, number), rebuilt.paths(number), rebuilt.weights, rebuilt.graphs
    for name, entry in view.entries.items():
        total = len(entry.variants)
        for i in range(total):
            rebuilt.progress(f"check {name}", i, total)
            skip_reason = reason or (
                "" if any(k.startswith(f"{name}/{i}/") for k in examples) else "the package stores no example inputs"
            )
            if skip_reason:
                verdict = Verdict(f"not run: {skip_reason}")
            else:
                verdict = graph_check.check_variant(load_unwritten(view, paths, weights), name, i, examples, graphs)
            yield (name, i), verdict
        rebuilt.progress(f"check {name}", total, total)
        for structure in entry.structures:
            for i, variant in enumerate(structure.variants):
                verdict = (
                    Verdict(f"not run: {reason}")
                    if reason
                    else graph_check.check_pass(view, variant, paths, weights, graphs)
                )
                yield (name, structure.fingerprint, i), verdict
        for update in entry.updates:
            yield (
                (name, update.library),
                Verdict(f"not run: {reason}") if reason else graph_check.check_update(view, update, paths, graphs),
            )
        for clipping in entry.clippings:
            yield (
                (name, clipping.library),
                Verdict(f"not run: {reason}") if reason else graph_check.check_clipping(view, clipping, paths, graphs),
            )


def _without_verdicts(entry: EntrySpec, verdicts: tuple[Verdict, ...]) -> EntrySpec:
    structures = tuple(
        dataclasses.replace(s, variants=tuple(dataclasses.replace(v, verdicts=verdicts) for v in s.variants))
        for s in entry.structures
    )
    variants = tuple(dataclasses.replace(v, verdicts=verdicts) for v in entry.variants)
    updates = tuple(dataclasses.replace(u, verdicts=verdicts) for u in entry.updates)
    clippings = tuple(dataclasses.replace(c, verdicts=verdicts) for c in entry.clippings)
    return dataclasses.replace(entry, variants=variants, structures=structures, updates=updates, clippings=clippings)
