"""A recording compiles the structures that came often enough, most expensive first, until a time limit or an
interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import aot_backward as ab
from aot_backward_exporters.progress import silent
from aot_backward_exporters.toolchain import gcc

from ..commands.test_cli import called
from ..support.terminal import on_terminal
from .test_pass_speed import measured_by, said

pytestmark = pytest.mark.usefixtures("one_thread")
Passes = Callable[[], None]


def expensive() -> None:
    """Run a pass that takes a thousand times as long as the others."""
    square = torch.full((400, 400), 1e-3, requires_grad=True)
    (square @ square).square().sum().backward()


def small(function: Callable[[torch.Tensor], torch.Tensor], size: int = 4) -> Passes:
    def call() -> None:
        function(torch.linspace(-1, 1, size, requires_grad=True)).sum().backward()

    return call


SINE, COSINE, EXPONENTIAL = small(torch.sin), small(torch.cos), small(torch.exp)
OPERATION = {
    "MmBackward0": "expensive",
    "SinBackward0": "sine",
    "CosBackward0": "cosine",
    "ExpBackward0": "exponential",
}


def held(path: Path) -> set[str]:
    """Return which of these structures the package has."""
    structures = ab.load(path).manifest.entries["backward"].structures
    return {OPERATION[name] for s in structures for node in s.nodes if (name := node.rpartition("::")[2]) in OPERATION}


def test_what_came_twice_is_compiled_and_what_came_once_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with ab.record(path) as recording:
        for call in (SINE, SINE, COSINE, EXPONENTIAL):
            call()
    assert held(path) == {"sine"} and recording.added.seldom == 2 and not recording.skipped
    with ab.record(path, min_seen=3) as recording:
        for call in (COSINE, COSINE, SINE):
            call()
    assert held(path) == {"sine"} and recording.added.seldom == 1
    with ab.record(path, min_seen=1) as recording:
        COSINE()
    assert held(path) == {"sine", "cosine"} and recording.added.seldom == 0
    for wrong in (0, True, 2.0):
        with pytest.raises(ab.InputError, match=r"min_seen is .*; expected a positive int"):
            ab.record(path, min_seen=wrong)  # type: ignore[arg-type]


def test_another_variant_of_a_known_structure_counts_as_seen(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    for sizes, variants in (((4, 4), 1), ((6,), 2)):
        with ab.record(path) as recording:
            for size in sizes:
                small(torch.sin, size)()
        (structure,) = ab.load(path).manifest.entries["backward"].structures
        assert len(structure.variants) == variants and recording.added.seldom == 0
    with ab.replay(path, strict=True):
        small(torch.sin, 9)()


def test_passes_that_were_timed_in_eager_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by(monkeypatch, said("compiled"))
    for passes, written in ((11, False), (12, True)):
        with ab.record(tmp_path / "bw.pt2", tune="quick", min_seen=12) as recording:
            for _ in range(passes):
                SINE()
        assert recording.in_eager > 0 and recording.in_eager + recording.recorded == passes
        assert (tmp_path / "bw.pt2").exists() is written and recording.added.seldom == (not written)


def record_three(
    path: Path, progress: Callable[[str, int, int], None] = silent, time_limit: float | None = 600
) -> ab.recording.record.Recording:
    """Record three structures, the most expensive last. With a time limit the first batch has one structure."""
    recording = ab.record(path, progress=progress, time_limit=time_limit)
    with recording:
        for call in (SINE, SINE, COSINE, COSINE, COSINE, *[expensive] * 20):
            call()
    return recording


def test_the_most_expensive_first_and_none_after_the_time_limit(tmp_path: Path) -> None:
    path, stages = tmp_path / "bw.pt2", list[str]()
    recording = record_three(path, lambda stage, done, _: stages.append(stage) if not done else None, 1e-6)
    assert held(path) == {"expensive"} and (recording.added.unfinished, recording.added.stopped) == (2, "time limit")
    first, *_ = stages
    assert first.startswith("compile 1 of 3 structures (called at ") and "test_recording_limits.py:" in first
    recording = record_three(path, lambda stage, done, _: stages.append(stage) if not done else None)
    assert held(path) == {"expensive", "sine", "cosine"}
    assert (recording.added.unfinished, recording.added.stopped) == (0, "")
    assert any(stage.startswith("compile 2 of 2 structures") for stage in stages)
    for wrong in (0, -1, float("nan"), "10"):
        with pytest.raises(ab.InputError, match=r"time_limit is .*; expected a positive number of seconds, or None"):
            ab.record(path, time_limit=wrong)  # type: ignore[arg-type]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Restore SIGINT: tests that run in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(*when: tuple[str, int, int]) -> Callable[[str, int, int], None]:
    """Return a progress callback that interrupts the process at these calls, one after another. Stages match by
    prefix."""
    left = list(when)

    def say(stage: str, done: int, total: int) -> None:
        if left and stage.startswith(left[0][0]) and (done, total) == left[0][1:]:
            del left[0]
            signal.raise_signal(signal.SIGINT)

    return say


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize(
    ("when", "finished"),
    [
        ([("compile 3 of 3", 0, 2)], 1),
        ([("check", 1, 1)], 1),  # before the package is written
        ([("check", 1, 2)], 2),
        ([("check", 1, 2), ("write", 0, 1)], 1),
    ],
    ids=["between two batches", "the first batch is right", "a part of a batch is right", "twice"],
)
def test_an_interrupt_while_compiling_keeps_what_is_finished(
    when: list[tuple[str, int, int]], finished: int, tmp_path: Path
) -> None:
    path = tmp_path / "bw.pt2"
    with pytest.raises(KeyboardInterrupt):
        record_three(path, interrupting(*when))
    assert len(held(path)) == finished and "expensive" in held(path)
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_that_python_drops_ends_it_at_the_next_step(tmp_path: Path) -> None:
    class Thing:
        pass

    def say(stage: str, done: int, total: int) -> None:
        if stage.startswith("compile 3 of 3"):
            thing = Thing()
            _ = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing

    with pytest.raises(KeyboardInterrupt):
        record_three(tmp_path / "bw.pt2", say)
    assert held(tmp_path / "bw.pt2") == {"expensive"}


@pytest.mark.usefixtures("_interruptible")
def test_what_a_program_recorded_before_it_was_interrupted_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with pytest.raises(KeyboardInterrupt), ab.record(path) as recording:
        SINE()
        SINE()
        signal.raise_signal(signal.SIGINT)
    assert held(path) == {"sine"} and recording.added.stopped == ""


KILLED = """
import os, signal, sys
from tests.passes.test_recording_limits import Path, record_three

def say(stage, done, total):
    if (stage, done) == ("write", 0) and path.exists():
        os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1])
record_three(path, say)
"""


def test_who_is_killed_while_compiling_leaves_a_whole_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "bw.pt2"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert held(tmp_path / "bw.pt2") == {"expensive"}


SCRIPT = """
import os, signal, sys, threading, time
import torch

def interrupt():
    while not os.path.exists("bw.pt2"):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)

square = torch.full((400, 400), 1e-3, requires_grad=True)
row = torch.linspace(-1, 1, 4, requires_grad=True)
for i in range(20):
    (square @ square).square().sum().backward()
for i in range(2):
    row.sin().sum().backward()
row.cos().sum().backward()
row.exp().sum().backward()
print("done")
if sys.argv[1:] == ["now"]:
    os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1:] == ["later"]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is over with the script
    threading.Thread(target=interrupt, daemon=True).start()
"""
LEFT = "2 structures seen once are left out (--min-seen 1 compiles them)"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return Path("train.py")


def interrupted(script: Path, when: str) -> subprocess.CompletedProcess[str]:
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    argv = [
        sys.executable,
        "-m",
        "aot_backward.cli",
        "record",
        "-o",
        "bw.pt2",
        "--time-limit",
        "600",
        "--",
        script,
        when,
    ]
    return subprocess.run(argv, capture_output=True, text=True, preexec_fn=default)


def test_ctrl_c_in_the_script_compiles_what_was_recorded(script: Path) -> None:
    done = interrupted(script, "now")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "done\n"), done.stderr
    traceback, _, report = done.stderr.partition("KeyboardInterrupt\n")
    assert traceback.startswith("Traceback") and "aot_backward" not in traceback
    told, passes, written, left = report.splitlines()
    assert (
        told.startswith("compiling the recorded passes")
        and passes == "24 backward passes of 4 structures recorded"
        and left == LEFT
    )
    assert written.startswith("wrote bw.pt2 (") and held(Path("bw.pt2")) == {"expensive", "sine"}


def test_ctrl_c_while_compiling_writes_what_is_finished(script: Path) -> None:
    done = interrupted(script, "later")
    assert (done.returncode, done.stdout) == (130, "done\n"), done.stderr
    _, written, once, left, end = done.stderr.splitlines()
    assert (once, left, end) == (LEFT, "1 structure left out: interrupted", "error: interrupted")
    assert written.startswith("wrote bw.pt2 (") and held(Path("bw.pt2")) == {"expensive"}


def test_the_report_of_a_good_recording(script: Path) -> None:
    first = called("record", "-o", "bw.pt2", "--", script)
    passes, written, left = first.stderr.splitlines()
    assert first.exit_code == 0 and passes == "24 backward passes of 4 structures recorded" and left == LEFT
    assert written.startswith("wrote bw.pt2 (") and written.endswith(" MB): 2 structures compiled")
    second = called("record", "-o", "bw.pt2", "--min-seen", 1, "--json", "--", script)
    report = json.loads(second.stderr)
    assert second.exit_code == 0 and held(Path("bw.pt2")) == set(OPERATION.values())
    assert (report["compiled"], report["recorded"], report["structures_compiled"], report["seen_too_seldom"]) == (
        22,
        2,
        2,
        0,
    )
    assert report["written"] and report["stopped_by"] is None
    third = called("record", "-o", "bw.pt2", "--", script)
    assert third.exit_code == 0 and third.stderr.splitlines()[1] == "nothing is new: bw.pt2 has these passes"


NOTHING = {
    "no pass": ("", ["nothing was written: no backward pass was called"]),
    "once": (
        "x.sin().sum().backward()",
        [
            "nothing was written: no structure was seen twice",
            "1 structure seen once is left out (--min-seen 1 compiles it)",
        ],
    ),
    "eager": (
        "for i in range(3):\n    torch.autograd.grad((x**2).sum(), x, create_graph=True)",
        [
            "nothing was written: all backward passes were left to eager",
            "  eager x3: create_graph=True: compiled passes cannot be differentiated again",
        ],
    ),
    "refused": (
        "for i in range(3):\n    torch.sparse.mm(torch.eye(3).to_sparse(), x[None].expand(3, 3)).sum().backward()",
        ["nothing was written: all recorded passes were left out", "  left out: pass."],
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_written_is_said_and_a_failure(name: str, tmp_path: Path) -> None:
    text, words = NOTHING[name]
    for end, status in (("", 1), ("raise SystemExit(0)", 1), ("raise SystemExit(7)", 7)):
        (tmp_path / "train.py").write_text(f"import torch\nx = torch.ones(3, requires_grad=True)\n{text}\n{end}\n")
        done = called("record", "-o", tmp_path / "bw.pt2", "--", tmp_path / "train.py")
        assert done.exit_code == status and not (tmp_path / "bw.pt2").exists()
        said = done.stderr.splitlines()[-len(words) :]
        assert all(line.startswith(word) for line, word in zip(said, words, strict=True)), done.stderr


def test_a_terminal_is_told_what_is_compiled(script: Path) -> None:
    status, shown = on_terminal("stderr", "-m", "aot_backward.cli", "record", "-o", "bw.pt2", "--", script, columns=160)
    assert status == 0 and b"compile 2 of 2 structures (called at " in shown
    assert b"done" not in shown.replace(b"\r", b"").split(b"\n")[0]  # the script printed that on its standard output


def test_an_interrupt_ends_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, started = tmp_path / "g++", tmp_path / "started"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KeyboardInterrupt), gcc.Builder() as builder:
        (compiling,) = builder.compile("net", [gcc.Command((str(compiler),), (), {"kernel.cpp": ""})] * 2, tmp_path, 0)[
            :1
        ]
        while not started.exists():
            assert not compiling.done()
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
