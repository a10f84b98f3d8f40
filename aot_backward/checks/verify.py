"""``verify_package``: a package against its own digests, then its numbers against those that were stored when it was built."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aot_backward_runtime import compatibility, load
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.manifest import Ambient, EntrySpec, Manifest, VariantSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.pytree import unflatten
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signature_policy import Key, admission, signature_beside
from aot_backward_runtime.package.targets import targets_of

from ..capture import preserve
from ..progress import Progress, silent
from . import eager_check
from .eager_check import Named


@dataclass(frozen=True)
class VariantReport:
    """One variant at its stored inputs. ``wrong``: what differs, in words; ``worst``, ``ratio``: the tensor nearest to what is allowed."""

    entry: str
    variant: int
    tensors: int
    worst: str
    ratio: float
    wrong: tuple[str, ...]
    target: str = ""  # whose code it was, where the package is for several


@dataclass(frozen=True)
class RecordedReport:
    """A ``replay`` entry. It stores no numbers to compare with: ``compared`` says when it was, ``unproved`` how many of its variants never were."""

    entry: str
    structures: int
    variants: int
    unproved: int
    compared: str = "compared with the recorded numbers when it was built"


@dataclass(frozen=True)
class Report:
    """``not_run``: why numbers were not compared, or "". ``recorded``: entries that are never run here. ``signature``: the file of the signature
    that was found good, or "" where none was asked for."""

    members: int
    bytes: int
    variants: tuple[VariantReport, ...]
    not_run: str
    recorded: tuple[RecordedReport, ...] = ()
    signature: str = ""

    @property
    def ok(self) -> bool:
        return not any(v.wrong for v in self.variants)


def verify_package(path: str | os.PathLike[str], *, run: bool = True, progress: Progress | None = None, key: Key | None = None) -> Report:
    """Compares every member with its digest and, if ``run``, every variant's outputs, gradients and buffers with eager's at export; of a training
    step its losses over a few steps, and what they change; of several targets all that this machine can run.

    ``key``: the public key that the package must be signed by, else :class:`SignatureError`, before anything else is looked at.

    A ``replay`` entry stores no numbers, and is only reported. With ``run=False`` no native code is opened. Raises
    :class:`PackageError` naming the first member that differs, and :class:`IncompatibleError` where the native code cannot run here.
    """
    say = progress or silent
    say("digests", 0, 1)
    archive = open_package(path, admit=admission(None, key))
    archive.verify_digests()
    say("digests", 1, 1)
    members = archive.members()
    total = sum(m.size for m in members.values())
    entries = archive.manifest.entries
    recorded = tuple(_recorded(name, entry) for name, entry in entries.items() if entry.kind == "replay")
    not_run = "" if run else "not asked for"
    examples: dict[str, torch.Tensor] = {}
    if run:
        examples = load_examples(archive)
        if not archive.manifest.has_weights:
            not_run = "the package has no weights"
        elif recorded and len(recorded) == len(entries):
            compatibility.check_target(archive.manifest)
            not_run = "recorded passes store no example inputs"
        elif not examples:
            not_run = "the package stores no example inputs"
    reports = []
    if not not_run:
        with warnings.catch_warnings():  # load tells whoever loads an unproved package to run this here
            warnings.filterwarnings("ignore", message=".*was not compared with eager")
            runnable = _runnable(archive.manifest)
            packages = {label: load(path, target=label, key=key) for label in runnable} or {"": load(path, key=key)}  # the latter raises
        todo = [(name, i, label) for name, entry in entries.items() for i in range(len(entry.variants)) for label in packages]
        for done, (name, i, label) in enumerate(todo):
            say("numbers", done, len(todo))
            found = verify_variant(packages[label], name, i, examples)
            reports.append(dataclasses.replace(found, target=label if archive.manifest.targets else ""))
        say("numbers", len(todo), len(todo))
    signature = str(signature_beside(archive.path) or "") if key is not None else ""
    return Report(len(members), total, tuple(reports), not_run, recorded, signature)


def _runnable(manifest: Manifest) -> Iterator[str]:
    """The package's targets that this machine can run."""
    for number, target in enumerate(targets_of(manifest)):
        if not compatibility.hindrance(manifest, number):
            yield target.label


def _recorded(name: str, entry: EntrySpec) -> RecordedReport:
    verdicts = [v.verdict.status for s in entry.structures for v in s.variants]
    return RecordedReport(name, len(entry.structures), len(verdicts), sum(v != "verified" for v in verdicts))


def example_of(spec: VariantSpec, entry: str, number: int, examples: Mapping[str, torch.Tensor]) -> eager_check.Example:
    """The stored arguments of a variant."""
    names = [f"{entry}/{number}/input/{i}" for i in range(len(spec.inputs))]
    if missing := [n for n in names if n not in examples]:
        raise PackageError(f"the package stores examples, and no {missing[0]!r}, which variant {number} of entry {entry!r} is compared with")
    stored = [_as(s.dtype, examples[n]) for s, n in zip(spec.inputs, names, strict=True)]
    inputs = [t.to(s.device).requires_grad_(s.requires_grad) for s, t in zip(spec.inputs, stored, strict=True)]
    args, kwargs = unflatten(spec.in_tree, inputs, {}, {})
    return eager_check.Example(args, kwargs, spec.mode, None)


def verify_variant(package: Package, entry: str, number: int, examples: Mapping[str, torch.Tensor]) -> VariantReport:
    """Runs variant ``number`` of ``entry`` on its stored inputs and compares with what is stored."""
    spec = package.manifest.entries[entry].variants[number]
    kept = {name.removeprefix(f"{entry}/{number}/"): t for name, t in examples.items() if name.startswith(f"{entry}/{number}/")}
    cotangents = [_as(s.dtype, kept[f"cotangent/{i}"]).to(s.device) for i, s in enumerate(spec.cotangents) if f"cotangent/{i}" in kept]
    example = example_of(spec, entry, number, examples)
    args, kwargs = example.args, example.kwargs
    with _under(spec.ambient, spec), preserve.random_state_kept():
        if package.entries[entry] == "step":
            actual = _steps(package, entry, spec.mode, args, kwargs, kept)
        else:
            actual = eager_check.artifact(package, entry, spec, spec.mode, args, kwargs, cotangents)
    return _compared(entry, number, actual, kept)


def _steps(package: Package, entry: str, mode: str, args: Any, kwargs: Any, kept: Mapping[str, torch.Tensor]) -> Named:
    """What a few steps make of the loss and of the state, as far as eager's is stored; the step's own state is put back."""
    from . import step_check  # brings in sympy, which looking at other entries does not need

    found = step_check.named(step_check.run(package, entry, mode, args, kwargs, waiting=False))
    return {name: tensor for name, tensor in found.items() if f"expected/{name}" in kept}


def _compared(entry: str, number: int, actual: Named, kept: Mapping[str, torch.Tensor]) -> VariantReport:
    expected = {name.removeprefix("expected/"): t for name, t in kept.items() if name.startswith("expected/")}
    wrong, worst, worst_ratio = [], "", 0.0
    for name in expected.keys() - {n for n, a in actual.items() if a is not None}:
        wrong.append(f"{name} is missing")
    for name, a in actual.items():
        if a is None:
            continue
        if name not in expected:
            wrong.append(f"{name} was None when the package was built")
            continue
        a, e = a.detach().cpu(), _as(str(a.dtype).removeprefix("torch."), expected[name])
        if a.shape != e.shape or a.dtype != e.dtype:
            wrong.append(f"{name} is {a.dtype} {tuple(a.shape)}, stored was {e.dtype} {tuple(e.shape)}")
            continue
        limit = kept.get(f"allowed/{name}")
        if limit is None or limit.numel() != 1:
            raise PackageError(f"the package does not say how far off {name} of entry {entry!r} may be: 'allowed/{name}' is missing, or no number")
        allowed = float(limit)
        error = _difference(a, e)
        ratio = error / allowed if allowed else (0.0 if error == 0 else float("inf"))
        if not ratio <= 1:
            wrong.append(f"{name} is off by {error:.3g}, {allowed:.3g} is allowed")
        if not ratio <= worst_ratio or not worst:
            worst, worst_ratio = name, ratio
    return VariantReport(entry, number, len(expected), worst, worst_ratio, tuple(wrong))


def _difference(a: torch.Tensor, e: torch.Tensor) -> float:
    """‖a − e‖, NaN and Inf being equal to themselves; of integers and booleans, how many differ."""
    if not (e.is_floating_point() or e.is_complex()):
        return float((a != e).sum())
    finite = torch.isfinite(e)
    if not torch.equal(finite, torch.isfinite(a)):
        return float("inf")
    wide = torch.complex128 if e.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(torch.where(finite, a.to(wide) - e.to(wide), 0)))


def _as(dtype: str, tensor: torch.Tensor) -> torch.Tensor:
    """A stored tensor as what it was: complex128 is stored as pairs, and packages are mapped, so that a write must go to a copy."""
    return torch.view_as_complex(tensor).clone() if dtype == "complex128" and not tensor.is_complex() else tensor.clone()


@contextlib.contextmanager
def _under(ambient: Ambient, spec: VariantSpec) -> Iterator[None]:
    """The global state that the variant was captured under."""
    device = next((s.device for s in (*spec.inputs, *spec.outputs)), "cpu")
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    dtype = getattr(torch, ambient.autocast) if ambient.autocast else None
    try:
        torch.set_float32_matmul_precision(ambient.matmul_precision)
        torch.use_deterministic_algorithms(ambient.deterministic)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
