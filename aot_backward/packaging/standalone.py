"""Check whether each entry of a package runs without PyTorch (``checks/standalone.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, Manifest
from aot_backward_runtime.native.plan import ROLES

from ..checks import standalone
from .package_writer import stem_of

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
    write: Callable[[Path, Manifest], Manifest],
    libraries: Mapping[str, Path],
    examples: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    required: bool,
    progress: Progress,
) -> Manifest:
    """Return ``manifest`` with the verdict of each entry that can be checked here. ``write`` writes the package; ``libraries`` are its compiled
    graphs by stem. ``required``: raise :class:`ExportError` if an entry does not run without PyTorch."""
    candidates = {name: entry for name, entry in manifest.entries.items() if entry.kind != "replay"}
    if not candidates or manifest.target.device != "cpu" or not manifest.has_weights or not standalone.is_installed():
        return manifest
    path, verdicts = folder / "standalone.pt2", dict[str, str]()
    for number, (name, entry) in enumerate(candidates.items()):
        progress("check without PyTorch", number, len(candidates))
        names = _libraries(entry)
        stems = (stem_of(library, target) for library in names for target in (None, *manifest.targets))
        operators = {o for library in names for build in manifest.libraries[library].every_build for o in build.operators}
        if missing := standalone.lacking((libraries[stem] for stem in stems), operators):
            verdicts[name] = f"calls {', '.join(missing)}"
            continue
        if not path.exists():
            write(path, manifest)
        verdicts[name] = standalone.verdict(path, name, entry, examples)
    path.unlink(missing_ok=True)
    progress("check without PyTorch", len(candidates), len(candidates))
    if required and (failures := {n: text for n, text in verdicts.items() if text != standalone.VERIFIED}):
        raise ExportError(
            f"{'; '.join(f'entry {n!r} {text or _UNTRIED}' for n, text in failures.items())}: this does not run without PyTorch; nothing was written"
        )
    entries = {name: dataclasses.replace(entry, standalone=verdicts.get(name, "")) for name, entry in manifest.entries.items()}
    return dataclasses.replace(manifest, entries=entries)


def _libraries(entry: EntrySpec) -> set[str]:
    """Return the compiled graphs that the entry calls from C."""
    plans = [getattr(v, role) for v in entry.variants for role in ROLES] + [entry.step.update if entry.step else None]
    return {p.call.library for p in plans if p is not None and p.call}
