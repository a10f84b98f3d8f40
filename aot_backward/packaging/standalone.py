"""Check whether each entry of a package runs without PyTorch, for each target (``checks/standalone.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from aot_backward_exporters.graph import Artifact
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, Manifest
from aot_backward_runtime.native.plan import ROLES
from aot_backward_runtime.package.targets import seen_as, targets_of

from ..checks import emulated, standalone
from .package_writer import stem_of, write_package

_UNTRIED = "stores no example"
RUNTIMES = ("torch", "standalone")


def check_runtime(runtime: str | None, target: str, weights: bool) -> None:
    """Raise :class:`ExportError` if ``runtime`` is unknown or does not support such a package."""
    if runtime not in (None, *RUNTIMES):
        raise ExportError(f"runtime is {runtime!r}; expected one of {', '.join(map(repr, RUNTIMES))}")
    if runtime != "standalone":
        return
    if not target.startswith("cpu"):
        raise ExportError(f"runtime='standalone': expected a target for CPUs, got {target!r}")
    if not weights:
        raise ExportError("runtime='standalone' cannot bind weights when a package is loaded: leave out weights=False")
    if not standalone.is_installed():
        raise ExportError(
            "runtime='standalone' needs aot-backward-native, which compares it with eager and is not installed: pip install aot-backward-native"
        )


def with_standalone(
    manifest: Manifest,
    artifacts: Mapping[str, Artifact],
    weights: Mapping[str, torch.Tensor],
    examples: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    required: bool,
    progress: Progress,
) -> Manifest:
    """Return ``manifest`` with the verdict of each entry for each target that can be checked here. The other arguments
    are those of :func:`.package_writer.write_package`. ``required``: raise :class:`ExportError` if an entry does not
    run without PyTorch."""
    candidates = {name: entry for name, entry in manifest.entries.items() if entry.kind != "replay"}
    if not candidates or manifest.target.device != "cpu" or not manifest.has_weights or not standalone.is_installed():
        return manifest
    all_targets = targets_of(manifest)
    verdicts: dict[str, list[str]] = {name: [] for name in candidates}
    for number, target in enumerate(all_targets):
        progress("check without PyTorch", number, len(all_targets))
        stems = {name: stem_of(name, target if number else None) for name in manifest.libraries}
        write = partial(
            write_package,
            artifacts={name: artifacts[stem] for name, stem in stems.items()},
            weights=weights,
            examples=examples,
        )
        libraries = {name: artifacts[stem].library for name, stem in stems.items()}
        not_run = emulated.why_not(target)
        for name, verdict in _verdicts(
            seen_as(manifest, number), candidates, write, libraries, examples, folder, not_run
        ):
            verdicts[name].append(verdict)
            if required and verdict not in {standalone.VERIFIED, not_run} - {""}:
                label = f" for {target.label}" if len(all_targets) > 1 else ""
                raise ExportError(
                    f"entry {name!r} {verdict or _UNTRIED}{label}: this does not run without PyTorch; nothing was written"
                )
    progress("check without PyTorch", len(all_targets), len(all_targets))
    entries = {
        name: dataclasses.replace(entry, standalone=verdicts[name][0], standalones=tuple(verdicts[name][1:]))
        if name in verdicts
        else entry
        for name, entry in manifest.entries.items()
    }
    return dataclasses.replace(manifest, entries=entries)


def _verdicts(
    manifest: Manifest,
    entries: Mapping[str, EntrySpec],
    write: Callable[[Path, Manifest], Manifest],
    libraries: Mapping[str, Path],
    examples: Mapping[str, torch.Tensor],
    folder: Path,
    not_run: str,
) -> Iterator[tuple[str, str]]:
    """Yield each entry's verdict for a package of one target. ``libraries``: its compiled graphs. ``not_run``: why they
    cannot run here, or ""."""
    path = folder / "standalone.pt2"
    for name, entry in entries.items():
        names = _libraries(entry)
        operators = {o for library in names for o in manifest.libraries[library].operators}
        if missing := standalone.lacking((libraries[library] for library in names), operators):
            yield name, f"calls {', '.join(missing)}"
        elif not_run:
            yield name, not_run
        else:
            if not path.exists():
                write(path, manifest)
            yield name, standalone.verdict(path, name, entry, examples, manifest.target.machine)
    path.unlink(missing_ok=True)


def _libraries(entry: EntrySpec) -> set[str]:
    """Return the compiled graphs that the entry calls from C."""
    plans = [getattr(v, role) for v in entry.variants for role in ROLES] + [entry.step.update if entry.step else None]
    return {p.call.library for p in plans if p is not None and p.call}
