"""The text of a report: one line without misses, and a few reasons for misses."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import aot_backward as ab
from aot_backward.cli.support.record_report import lines
from aot_backward.recording import trace

from ..conftest import aot_backward
from .test_pass_speed import passes, recorded, small

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES = itertools.count()


def grad_at_a_new_place(loss: torch.Tensor, x: torch.Tensor) -> None:
    """Call from a new place, which is two frames. The first passes from a place are interpreted, and the later ones run
    in eager."""
    inner = compile("torch.autograd.grad(loss, x)", "<place>", "eval")
    names = {"torch": torch, "loss": loss, "x": x, "inner": inner}
    eval(compile("eval(inner)", f"<caller {next(PLACES)}>", "eval"), names)


def test_a_good_replay_takes_one_line() -> None:
    with ab.replay(recorded()) as replaying:
        passes(small(), [3] * 20)
    assert str(replaying.report) == "20 of 20 backward passes (1 binding, 19 hits) ran compiled"
    report = replaying.report.to_json()
    assert (report["passes"], report["compiled"]) == (20, 20)


def test_a_pass_that_record_refuses_is_not_advised_to_be_recorded() -> None:
    sparse, x = torch.eye(4).to_sparse(), torch.ones(4, 2, requires_grad=True)
    with ab.replay(recorded()) as replaying:
        torch.sparse.mm(sparse, x).sum().backward()
    (reason,) = replaying.report.misses
    words = r"tensor \d+ \(of SparseAddmmBackward0, node \d\) is a sparse tensor \(torch\.sparse_coo\), and record cannot compile such a pass"
    assert re.search(words, reason)
    assert "record such a pass" not in reason


def test_large_structures_reach_the_limit_sooner() -> None:
    """A structure of 32 nodes counts as one, since recording costs time per node. A recording counts structures."""
    x = torch.ones(3, requires_grad=True)

    def run() -> None:
        for step in range(12):
            y = x.clamp(max=2 + step)
            for _ in range(64):
                y = y.sin()
            grad_at_a_new_place(y.sum(), x)

    with ab.replay(recorded(), max_structures=8) as replaying:
        run()
    assert sum(replaying.report.misses.values()) == 4 and sum(replaying.report.eager.values()) == 8
    assert "4 structures were not in the package" in str(replaying.report)
    with ab.record(max_structures=13) as recording:
        run()
    assert len(recording.structures) == 12 and not recording.skipped


INTERRUPTED = """
import os, signal, sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
for step in range(9):
    net.zero_grad()
    net(torch.randn(3, 4)).square().mean().backward()
    if step == 6:
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_replay_that_is_interrupted_prints_its_report(tmp_path: Path, form: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    argv = [
        sys.executable,
        "-m",
        "aot_backward.cli",
        "replay",
        *(["--json"] if form == "json" else []),
        str(recorded()),
        "--",
        str(script),
    ]
    # Tests that run in the background ignore it
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=default)
    assert done.returncode == -signal.SIGINT, done.stderr
    traceback, _, report = done.stderr.partition("KeyboardInterrupt\n")
    assert traceback.startswith("Traceback") and "aot_backward" not in traceback.replace("aot-backward", "")
    if form == "json":
        assert json.loads(report)["passes"] == 7
    else:
        assert report.startswith("7 of 7 backward passes (1 binding, 6 hits) ran compiled\n")


def test_a_short_recording_keeps_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "bw.pt2"
    script.write_text(
        "import torch\nx = torch.ones(3, requires_grad=True)\nfor _ in range(5):\n    x.sin().sum().backward()\n"
    )
    done = aot_backward("record", "--tune", "quick", "-o", path, "--", script)
    _, written, brief = done.stderr.splitlines()
    assert (
        done.returncode == 1
        and written == "nothing was written: all recorded passes were left out"
        and not path.exists()
    )
    assert (
        "too few passes of one size to time it against eager; record 20 or more of one size, or keep untimed code with --tune none"
        in brief
    )
    done = aot_backward("record", "--tune", "none", "-o", path, "--", script)
    assert done.returncode == 0 and path.exists(), done.stderr


def test_passes_of_too_few_times_cost_no_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_trace(*args: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(trace, "trace_partition", no_trace)
    with ab.record(tmp_path / "bw.pt2", tune="quick") as recording:
        for _ in range(3):
            for function in (torch.sin, torch.cos):
                function(torch.ones(3, requires_grad=True)).sum().backward()
    ((reason, times),) = recording.skipped.items()
    assert times == 2 and reason.startswith("too few passes of one size to time it against eager")
    assert any(line.startswith("  left out x2: too few passes") for line in lines(recording, tmp_path / "bw.pt2"))


def test_the_most_frequent_reasons_are_shown_and_few() -> None:
    x = torch.linspace(0.1, 1, 3, requires_grad=True)
    with ab.replay(recorded()) as replaying:
        for function, times in ((torch.sin, 2), (torch.cos, 5), (torch.exp, 3), (torch.log, 2), (torch.sqrt, 1)):
            for _ in range(times):
                grad_at_a_new_place(function(x).sum(), x)
        torch.autograd.grad((x**2).sum(), x, create_graph=True)
    ran, *reasons = str(replaying.report).splitlines()
    assert ran == "0 of 14 backward passes ran compiled"
    starts = [
        "  miss x5: ",
        "  miss x3: ",
        "  miss x2: ",
        "  miss x3: (other reasons)",
        "  eager x1: create_graph=True",
    ]
    assert len(reasons) == 5 and all(reason.startswith(start) for reason, start in zip(reasons, starts, strict=True)), (
        reasons
    )
    assert len(replaying.report.to_json()["misses"]) == 5
