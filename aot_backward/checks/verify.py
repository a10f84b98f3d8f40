"""``verify_package``: check a package against its digests, then compare its results with the results stored when it was
built."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from aot_backward_exporters.process_state import exclusive
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime import compatibility, load
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.manifest import Ambient, EntrySpec, Manifest, VariantSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.pytree import unflatten
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import Key, admission, signature_beside
from aot_backward_runtime.package.targets import targets_of

from ..capture import preserve
from . import stored_results
from .example_sizes import Example
from .named_results import Named, Overwritten, has_inference_code, results_of_entry
from .stored_results import as_dtype
from .tolerance import Comparison


@dataclass(frozen=True)
class VariantReport:
    """Results of one variant at its stored inputs. ``wrong``: a description of each difference; ``worst``, ``ratio``:
    the tensor nearest to its tolerance; ``sketched``: how many of ``tensors`` are large, and were compared by a sketch
    or a digest (``stored_results.py``)."""

    entry: str
    variant: int
    tensors: int
    worst: str
    ratio: float
    wrong: tuple[str, ...]
    target: str = ""  # the target of the code, if the package has several
    sketched: int = 0


@dataclass(frozen=True)
class RecordedReport:
    """A ``replay`` entry. It stores no numbers to compare with. ``compared``: when it was compared; ``unproved``: how
    many of its variants, optimizer steps and clippings never were."""

    entry: str
    structures: int
    variants: int
    updates: int
    clippings: int
    unproved: int
    compared: str = "compared with the recorded numbers when it was built"


@dataclass(frozen=True)
class Report:
    """``not_run``: why numbers were not compared, or "". ``recorded``: entries that are never run here. ``signature``:
    the file of the valid signature, or "" if none was requested."""

    members: int
    bytes: int
    variants: tuple[VariantReport, ...]
    not_run: str
    recorded: tuple[RecordedReport, ...] = ()
    signature: str = ""

    @property
    def ok(self) -> bool:
        return not any(v.wrong for v in self.variants)


def verify_package(
    path: str | os.PathLike[str], *, run: bool = True, progress: Progress | None = None, key: Key | None = None
) -> Report:
    """Compare every member with its digest and, if ``run``, every variant's outputs, gradients and buffers with eager's
    at export. For a training step, compare losses and changes over a few steps. If the package has several targets, run
    all that this machine can.

    ``key``: the public key that must have signed the package. It is checked first; on failure raise
    :class:`SignatureError`.

    A ``replay`` entry stores no numbers, and is only reported. With ``run=False`` no native code is opened. Raise
    :class:`PackageError` naming the first member that differs, and :class:`IncompatibleError` if the native code cannot
    run here.
    """
    progress = progress or silent
    progress("digests", 0, 1)
    archive = open_package(path, admit=admission(key))
    archive.verify_digests()
    progress("digests", 1, 1)
    members = archive.members()
    total = sum(m.size for m in members.values())
    entries = archive.manifest.entries
    recorded = tuple(_recorded(name, entry) for name, entry in entries.items() if entry.kind == "replay")
    reason = "" if run else "not requested"
    examples: dict[str, torch.Tensor] = {}
    if run:
        examples = load_examples(archive)
        if not archive.manifest.has_weights:
            reason = "the package has no weights"
        elif recorded and len(recorded) == len(entries):
            compatibility.check_target(archive.manifest)
            reason = "recorded passes store no example inputs"
        elif not examples:
            reason = "the package stores no example inputs"
    reports = []
    if not reason:
        # load() warns about packages that were not compared with eager, and advises verify
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was not compared with eager")
            runnable = _runnable(archive.manifest)
            # Without a runnable target, the second load raises
            packages = {label: load(path, target=label, key=key) for label in runnable} or {"": load(path, key=key)}
        todo = [
            (name, i, label)
            for name, entry in entries.items()
            for i in range(len(entry.variants))
            for label in packages
        ]
        for done, (name, i, label) in enumerate(todo):
            progress("numbers", done, len(todo))
            report = verify_variant(packages[label], name, i, examples)
            reports.append(dataclasses.replace(report, target=label if archive.manifest.targets else ""))
        progress("numbers", len(todo), len(todo))
    signature = str(signature_beside(archive.path) or "") if key is not None else ""
    return Report(len(members), total, tuple(reports), reason, recorded, signature)


def _runnable(manifest: Manifest) -> Iterator[str]:
    """Yield the package's targets that this machine can run."""
    for number, target in enumerate(targets_of(manifest)):
        if not compatibility.why_incompatible(manifest, number):
            yield target.label


def _recorded(name: str, entry: EntrySpec) -> RecordedReport:
    verdicts = [v.verdict.status for s in entry.structures for v in s.variants] + [
        u.verdict.status for u in entry.in_place
    ]
    unverified = sum(v != "verified" for v in verdicts)
    passes = sum(len(s.variants) for s in entry.structures)
    return RecordedReport(name, len(entry.structures), passes, len(entry.updates), len(entry.clippings), unverified)


def stored_example(spec: VariantSpec, entry: str, number: int, examples: Mapping[str, torch.Tensor]) -> Example:
    """Return the stored arguments of a variant."""
    names = [f"{entry}/{number}/input/{i}" for i in range(len(spec.inputs))]
    if missing := [n for n in names if n not in examples]:
        raise PackageError(
            f"entry {entry!r} variant {number}: the package has no stored input {missing[0]!r} to compare it with"
        )
    stored = [as_dtype(s.dtype, examples[n]) for s, n in zip(spec.inputs, names, strict=True)]
    inputs = [t.to(s.device).requires_grad_(s.requires_grad) for s, t in zip(spec.inputs, stored, strict=True)]
    args, kwargs = unflatten(spec.in_tree, inputs, {}, {})
    return Example(args, kwargs, spec.mode)


def verify_variant(package: Package, entry: str, number: int, examples: Mapping[str, torch.Tensor]) -> VariantReport:
    """Run variant ``number`` of ``entry`` on its stored inputs and compare with the stored results."""
    spec = package.manifest.entries[entry].variants[number]
    stored = {
        name.removeprefix(f"{entry}/{number}/"): t
        for name, t in examples.items()
        if name.startswith(f"{entry}/{number}/")
    }
    cotangents = [
        as_dtype(s.dtype, stored[f"cotangent/{i}"]).to(s.device)
        for i, s in enumerate(spec.cotangents)
        if f"cotangent/{i}" in stored
    ]
    example = stored_example(spec, entry, number, examples)
    is_step = package.entries[entry] == "step"
    inferred: Named = {}
    with _under(spec.ambient, spec), preserve.random_state_kept():
        if is_step:
            actual = _results_of_step(package, entry, example, stored)
        else:
            try:
                actual = results_of_entry(package, entry, spec, example, cotangents)
                if has_inference_code(spec):
                    inferred = results_of_entry(package, entry, spec, example, cotangents, inference=True)
            except Overwritten as error:
                return VariantReport(entry, number, 0, "", 0.0, (str(error),))
    report = _compare_with_stored(entry, number, actual, stored, as_stored=is_step)
    of_inference = {key: t for key, t in stored.items() if key.partition("/")[2] in inferred}
    inference_report = _compare_with_stored(entry, number, inferred, of_inference, as_stored=False)
    return dataclasses.replace(
        report, wrong=(*report.wrong, *(f"without gradients, {text}" for text in inference_report.wrong))
    )


def _results_of_step(package: Package, entry: str, example: Example, stored: Mapping[str, torch.Tensor]) -> Named:
    """Return the loss and state after a few steps, in the form of eager's stored ones. Restore the step's own state."""
    from . import step_check  # imports sympy, which other entries do not need

    return step_check.results_as_stored(package, entry, example, stored)


def _compare_with_stored(
    entry: str, number: int, actual: Named, stored: Mapping[str, torch.Tensor], *, as_stored: bool
) -> VariantReport:
    expected = stored_results.names_of(stored)
    errors = [f"{name} is missing" for name in expected - {n for n, a in actual.items() if a is not None}]
    sketched, worst = 0, Comparison("", 0.0, 0.0)
    for name, a in actual.items():
        if a is None:
            continue
        if name not in expected:
            errors.append(f"{name} was None when the package was built")
            continue
        try:
            comparison = stored_results.compare_stored(name, a.detach().cpu(), stored, as_stored=as_stored)
        except stored_results.Differs as error:
            errors.append(str(error))
            continue
        except PackageError as error:
            raise PackageError(f"entry {entry!r} variant {number}: {error}") from None
        sketched += not stored_results.is_whole(stored, name)
        if comparison.wrong:
            errors.append(f"{name} is off by {comparison.error:.3g}, {comparison.allowed:.3g} is allowed")
        if not worst.name or not comparison.ratio <= worst.ratio:
            worst = comparison
    return VariantReport(entry, number, len(expected), worst.name, worst.ratio, tuple(errors), sketched=sketched)


@contextlib.contextmanager
def _under(ambient: Ambient, spec: VariantSpec) -> Iterator[None]:
    """Set the global state that the variant was captured under."""
    device = next((s.device for s in (*spec.inputs, *spec.outputs)), "cpu")
    dtype = getattr(torch, ambient.autocast) if ambient.autocast else None
    with exclusive():
        precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        try:
            torch.set_float32_matmul_precision(ambient.matmul_precision)
            torch.use_deterministic_algorithms(ambient.deterministic)
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(deterministic)
