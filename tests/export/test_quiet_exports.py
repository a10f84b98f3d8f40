"""An export, a recording and a replay print our lines, but none of PyTorch's log for its developers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from aot_backward_exporters import torch_api
from aot_backward_exporters.inductor.patches import missing_kernels_unlogged

from ..conftest import aot_backward

PROGRAM = """
import torch

def value(x):
    matrix = x @ x.T + torch.eye(4)
    z = torch.complex(x, x.cos())
    return torch.linalg.inv(matrix).sum() + torch.cdist(x, x + 1).sum() + (z * z.conj()).real.sum() + torch.linalg.svdvals(x).sum()

def entries():
    import aot_backward as ab
    return {"value": ab.Grad(value, [ab.Variant((torch.rand(4, 6) + 0.1,))])}

if __name__ == "__main__":
    x = torch.rand(4, 6).requires_grad_()
    for _ in range(3):
        torch.linalg.cholesky(x @ x.T + torch.eye(4)).sum().backward()
"""
MISSING = "%s is missing a c-shim implementation, using proxy executor as fallback"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_an_export_prints_no_line_for_each_operator_without_a_kernel(program: Path, tmp_path: Path) -> None:
    done = aot_backward("export", f"{program}:entries", "-o", tmp_path / "value.pt2")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == [
        "wrote",
        *["value"] * (len(done.stdout.splitlines()) - 1),
    ], done.stdout


def test_a_recording_and_a_replay_print_their_reports_alone(program: Path, tmp_path: Path) -> None:
    recorded = aot_backward("record", "-o", tmp_path / "bw.pt2", "--", program)
    passes, written = recorded.stderr.splitlines()
    assert passes.startswith("3 backward passes") and written.startswith("wrote ") and not recorded.stdout
    replayed = aot_backward("replay", "--strict", "--json", tmp_path / "bw.pt2", "--", program)
    assert len(replayed.stderr.splitlines()) == 1 and not replayed.stdout


def test_other_lines_of_the_log_are_left_alone() -> None:
    """These are lines of other threads, other messages, and all if you asked for Inductor's log."""
    log: logging.Logger = torch_api.inductor_ir_log
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(" is ")[0])  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    try:
        with missing_kernels_unlogged():
            log.warning(MISSING, "aten.here")
            log.warning("another message")
            other = threading.Thread(target=log.warning, args=(MISSING, "aten.there"))
            other.start()
            other.join()
        log.warning(MISSING, "aten.after")
        log.setLevel(logging.INFO)
        with missing_kernels_unlogged():
            log.warning(MISSING, "aten.asked")
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
    assert said == ["another message", "aten.there", "aten.after", "aten.asked"]
