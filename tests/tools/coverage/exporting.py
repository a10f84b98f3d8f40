"""The way ``export``: export a case as a ``module`` entry, load the package in a fresh process, compare with eager.

Several cases share a package, which is one compilation. If a package fails, its cases are tried again in smaller
groups, at last alone. So each case gets its own verdict.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS

import aot_backward as ab
from aot_backward.checks.eager_check import compare_results
from aot_backward.checks.float64 import in_float64, perturbed, to_float64
from aot_backward.checks.named_results import Named
from aot_backward.checks.tolerance import Reference
from aot_backward.packaging.builder import Build
from aot_backward.packaging.contents import Contents
from aot_backward_runtime import load
from aot_backward_runtime.errors import ExportError

from .cases import SEED, Case, Round, evaluate, first_line

ROOT = Path(__file__).parents[3]
_FAR = 1e-2  # if eager is this far from float64, float64 computes something else
_LIMIT = 300  # seconds for a fresh process

Verdict = Callable[[Case, str, str, float], None]
"""Take a case, its verdict ("pass", "refused", "wrong" or "crashed"), the reason, and the seconds."""
Running = Callable[[str, Sequence[Case]], None]
"""Take the current stage and its cases. If this process ends now, that decides their verdict."""


class Group(nn.Module):
    """Several cases as one program."""

    def __init__(self, cases: Sequence[Case]):
        super().__init__()
        self.names = [case.name for case in cases]
        self.members = nn.ModuleList(case.module for case in cases)

    def forward(self, cases: dict[str, list[torch.Tensor]]) -> dict[str, tuple[torch.Tensor, ...]]:
        return {name: member(*cases[name]) for name, member in zip(self.names, self.members, strict=True)}


class Failed(Exception):
    """The fresh process could not run the package."""


class _Captured(Contents):
    """Capture graphs without compiling them."""

    def compile(self, graphs: Any, joint: Any) -> None:
        pass


def settle(cases: Sequence[Case], size: int, running: Running, verdict: Verdict) -> None:
    """Give every case its verdict. At most ``size`` cases share a package."""
    ready: list[Case] = []
    for case in cases:
        running("captured", [case])
        start = time.monotonic()
        try:
            Build(_Captured("cpu", Path())).add("module", _entry([case]))
        except Exception as error:
            verdict(case, *reason(error, [case]), time.monotonic() - start)
        else:
            ready.append(case)
    for group in _groups(ready, size):
        _settle(group, running, verdict)


def _groups(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """Group the cases. A case that draws random numbers is alone, because draws of other cases would change its
    numbers."""
    out = [[case] for case in cases if case.rounds[0].random]
    for training in (True, False):
        alike = [case for case in cases if case.training is training and not case.rounds[0].random]
        out += [alike[i : i + size] for i in range(0, len(alike), size)]
    return out


def _settle(group: Sequence[Case], running: Running, verdict: Verdict) -> None:
    running("exported", group)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
            package = ab.export(Path(folder) / "group.pt2", {"module": _entry(group)})
            rounds = run_fresh(package, group, Path(folder))
    except Exception as error:
        if len(group) == 1:
            verdict(group[0], *reason(error, group), time.monotonic() - start)
        else:
            for part in _parts(group, str(error)):
                _settle(part, running, verdict)
        return
    seconds = (time.monotonic() - start) / len(group)
    for case in group:
        found = judge(case, [results[case.name] for results in rounds])
        if found and len(group) > 1:
            _settle([case], running, verdict)  # judge it again, alone in a package
        else:
            verdict(case, "wrong" if found else "pass", found, seconds)


def _entry(cases: Sequence[Case]) -> ab.Module:
    inputs = {case.name: list(case.rounds[0].inputs) for case in cases}
    return ab.Module(Group(cases).train(cases[0].training), [ab.Variant((inputs,))])


def _parts(group: Sequence[Case], message: str) -> list[Sequence[Case]]:
    """Split off the case that the message names, else split in half."""
    guilty = [
        c for i, c in enumerate(group) if f"cases[{c.name!r}]" in message or re.search(rf"\bmembers\.{i}\.", message)
    ]
    output = re.search(r"output\[(\d+)\] (?:is|has)", message)
    if not guilty and output:
        owners = [c for c in group for n in c.rounds[0].eager if n.startswith("output[")]
        guilty = [owners[int(output[1])]]
    if 0 < len(guilty) < len(group):
        return [guilty, [c for c in group if c not in guilty]]
    return [group[: len(group) // 2], group[len(group) // 2 :]]


def reason(error: Exception, group: Sequence[Case]) -> tuple[str, str]:
    """Return the verdict for an error, and its first line without names of this tool and paths of this machine."""
    text = first_line(error).replace(f"{ROOT}/", "").replace(f"{Path(torch.__file__).parents[1]}/", "")
    for i, case in enumerate(group):
        text = (
            text.replace(f"cases[{case.name!r}]", "inputs")
            .replace(f"[0][0][{case.name!r}]", "inputs")
            .replace(f"members.{i}.", "")
        )
    if isinstance(error, ExportError):
        return "refused", text
    return "crashed", text if isinstance(error, Failed) else f"{type(error).__name__}: {text}"


def run_fresh(package: Path, group: Sequence[Case], folder: Path) -> list[dict[str, Named]]:
    """Run the package in a process without a compiler. Return its results per round and case, under the same names as
    eager's."""
    calls = []
    for number in range(max(len(case.rounds) for case in group)):
        rounds = {case.name: case.rounds[min(number, len(case.rounds) - 1)] for case in group}
        calls.append(
            {
                name: {
                    "inputs": list(r.inputs),
                    "cotangents": list(r.cotangents),
                    "differentiable": list(r.differentiable),
                }
                for name, r in rounds.items()
            }
        )
    imports = _registering(package)
    torch.save({"training": group[0].training, "seed": SEED, "imports": imports, "calls": calls}, folder / "calls")
    fresh_process("tests.tools.coverage.fresh", folder, package.name)
    return torch.load(folder / "results", weights_only=True)  # type: ignore[no-any-return]


def fresh_process(module: str, folder: Path, package: str) -> None:
    """Run ``python -m MODULE PACKAGE CALLS RESULTS`` without a compiler on the PATH. All files are in ``folder``. Raise
    :class:`Failed`."""
    (folder / "empty").mkdir()
    argv = [sys.executable, "-m", module, *(str(folder / name) for name in (package, "calls", "results"))]
    environment = {**os.environ, "PATH": str(folder / "empty")}
    try:
        done = subprocess.run(
            argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"loaded and run: no end after {_LIMIT} s") from error
    if done.returncode < 0:
        raise Failed(f"loaded and run: {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise Failed(f"loaded and run: {(done.stderr.strip().splitlines() or [''])[-1]}")


def _registering(package: Path) -> list[str]:
    """Return the modules that register the package's Python operators. The loading process must import them."""
    called = {o.partition(".")[0] for library in load(package).manifest.libraries.values() for o in library.operators}
    return sorted({OPDEFS[name]._init_fn.__module__ for name in called if name in OPDEFS})


def judge(case: Case, results: Sequence[Named]) -> str:
    """Return the fault in the results of a case's rounds, "" if there is none."""
    for number, (expected, actual) in enumerate(zip(case.rounds, results, strict=False)):
        try:
            comparisons = compare_results(actual, expected.eager, _reference(case, expected))
        except ExportError as error:
            return f"round {number}: {error}"
        for one in comparisons:
            if one.wrong:
                return f"round {number}: {one.name} is off by {one.error:.3g}, {one.allowed:.3g} is allowed"
    return ""


def _reference(case: Case, expected: Round) -> Reference[Named]:
    """Return eager in float64 and its change under rounded inputs; or eager itself, if float64 computes something
    else."""
    itself = Reference(expected.eager, dict.fromkeys(expected.eager, 0.0), float64=False)
    if expected.random or any(t is not None and t.is_complex() for t in expected.eager.values()):
        return itself
    inputs, wide = to_float64(expected.inputs), tuple(c.double() for c in expected.cotangents)
    try:
        with in_float64(case.module):
            truth = evaluate(case.module, inputs, wide).eager
        with in_float64(case.module, rounded=True):
            near = evaluate(case.module, perturbed(inputs), wide).eager
    except Exception:  # this operator does not support float64
        return itself
    moved = {}
    largest = max((_norm(t) for n, t in truth.items() if n.startswith("gradient")), default=0.0)
    scale = max((_norm(t) for t in truth.values()), default=0.0)
    for name, e in expected.eager.items():
        t, n = truth[name], near[name]
        if e is None or t is None or n is None:
            if not (e is None and t is None):
                return itself
            continue
        if e.shape != t.shape or not (torch.isfinite(t).all() and torch.isfinite(n).all()):
            return itself
        moved[name] = min(_norm(n.double() - t.double()), 1e-3 * max(_norm(t), largest))
        if (
            e.is_floating_point()
            and _norm(e.double() - t.double()) > _FAR * max(_norm(t), 1e-3 * scale) + 100 * moved[name]
        ):
            return itself
    return Reference(truth, moved, float64=True)


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else float(torch.linalg.vector_norm(tensor.double()))
