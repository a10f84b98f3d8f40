"""Judge a mutated file: refused by a typed error, right, or a fault."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from aot_backward.cli.inspect import print_text, write_report
from aot_backward.cli.support.describe import describe
from aot_backward_runtime import load
from aot_backward_runtime.errors import AotBackwardError
from aot_backward_runtime.package.archive import Archive, open_package
from aot_backward_runtime.package.code_cache import VARIABLE

from .bases import KNOWN, NotJudged, call_step, difference
from .spoiling import Spoilt

FAULTS = ("untyped error", "wrong", "control characters", "signal", "hang")
VERDICTS = ("refused", "right", *FAULTS)
KEY = "public.pem"


class _Fault(Exception):
    def __init__(self, verdict: str, reason: str):
        super().__init__(reason)
        self.verdict = verdict


def judge(made: Spoilt, folder: Path, work: Path) -> tuple[str, str]:
    """Return a verdict and the reason. ``folder`` has the valid packages; ``work`` belongs to this process."""
    path = work / "spoilt.pt2"
    path.write_bytes(made.data)
    beside = path.with_name("spoilt.pt2.sig")
    beside.unlink(missing_ok=True)
    if made.beside is not None:
        beside.write_bytes(made.beside)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*was not compared with eager")
    try:
        if made.kind == "native code's headers":
            with _own_cache(work / "cache"):
                return _judged(made, path, folder, work)
        return _judged(made, path, folder, work)
    except AotBackwardError as error:
        if not str(error).replace("\n", "").isprintable():
            return "control characters", f"{type(error).__name__}: {ascii(str(error))[:200]}"
        return "refused", type(error).__name__
    except _Fault as fault:
        return fault.verdict, str(fault)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            (f for f in reversed(frames) if "/tests/" not in f.filename and "/torch/" not in f.filename), frames[-1]
        )
        return (
            "untyped error",
            f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno} {where.name})",
        )


def _judged(made: Spoilt, path: Path, folder: Path, work: Path) -> tuple[str, str]:
    if made.state is not None:
        return _resumed(made.state, folder, work)
    key = folder / KEY if made.beside is not None else None
    if key is None:
        archive = open_package(path)  # load() would refuse it for the same reason
        _look_at(archive, work, made)
    package = load(path, key=key)
    if made.beside is not None and made.data != (folder / "targets.pt2").read_bytes():
        raise _Fault("wrong", "a package loaded without a valid signature")
    try:
        results = KNOWN[made.base].call(package, path)
    except NotJudged as error:
        return "right", f"eager fails too: {str(error)[:100]}"
    for found, expected in results:
        if odd := difference(found, expected):
            raise _Fault("wrong", odd)
    return "right", "" if results else "nothing to call"


def _look_at(archive: Archive, work: Path, made: Spoilt) -> None:
    """Run all forms of ``inspect``."""
    described = describe(archive)
    json.loads(json.dumps(described, indent=2))
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    drawn = made.kind == "portable graphs"
    with contextlib.redirect_stdout(out):
        print_text(archive)
        if drawn:
            write_report(archive, work / "report.html")
    out.flush()
    said = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    said += (work / "report.html").read_text() if drawn else ""
    if not said.replace("\n", "").isprintable():
        raise _Fault("control characters", f"inspect: {[c for c in said if not c.isprintable() and c != chr(10)][:5]}")


def _resumed(state: bytes, folder: Path, work: Path) -> tuple[str, str]:
    """Resume a step from the file. If it refuses, check that it has not changed."""
    file = work / "spoilt.state"
    file.write_bytes(state)
    package = load(folder / "step.pt2")
    step = package.step()
    before, random = step.state_dict(whole=True), torch.get_rng_state()
    verdict = "right", ""
    try:
        step.resume(file)
    except AotBackwardError as error:
        verdict = "refused", type(error).__name__
        if not _equal(before, step.state_dict(whole=True)) or not torch.equal(random, torch.get_rng_state()):
            raise _Fault("wrong", f"a refused file changed the state: {error}") from error
    if step.accumulated:
        step.zero_grad()
    if step.count < 0 or step.skipped < 0:
        raise _Fault("wrong", "a negative count")
    try:
        results = call_step(package, "fit")
    except NotJudged as error:
        return verdict[0], f"eager fails too: {str(error)[:100]}"
    for found, expected in results:
        if odd := difference(found, expected):
            raise _Fault("wrong", f"{odd} (the file was {verdict[0]})")
    return verdict


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


@contextlib.contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Use a separate cache, so that mutated code does not stay in the shared one."""
    before = os.environ[VARIABLE]
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ[VARIABLE] = before
        shutil.rmtree(folder, ignore_errors=True)


def quiet() -> None:
    """Discard stderr: native code prints errors there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
