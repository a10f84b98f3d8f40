"""``torchrun … aot-backward record`` and ``replay`` on scripts with ordinary DistributedDataParallel, and a package that several processes record.

Without ``from __future__ import annotations``: the module looks at those of communication hooks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import aot_backward as ab
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.passes import data_parallel

from .clients.ddp_modes import CASES, STEPS

CLIENTS = Path(__file__).parent / "clients"
MODES = CLIENTS / "ddp_modes.py"
ALL_RANKS = {"OMP_NUM_THREADS": "1", "AOT_BACKWARD_TUNE": "none"}
PROGRAM = sys.executable, "-m", "aot_backward.cli"


def torchrun(processes: int, *command: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "--no-python", *command]
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, env={**os.environ, **ALL_RANKS})


def reports(done: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    """By rank."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return {report["rank"]: report for report in found}


def numbers(folder: Path, case: str, rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / f"{case}.{rank}.pt")
    return found


def assert_close(ours: Path, theirs: Path, case: str, ranks: int) -> None:
    for rank in range(ranks):
        found, expected = numbers(ours, case, rank), numbers(theirs, case, rank)
        assert found.keys() == expected.keys() and len(found) > STEPS
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2e-6, msg=lambda m, name=name, rank=rank: f"rank {rank}, {name}: {m}")


@dataclass(frozen=True)
class Runs:
    package: Path
    eager: Path
    recorded: Path
    replayed: Path
    recording: dict[int, dict[str, Any]]
    replaying: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All cases by two processes: plain, recorded, replayed."""
    folder = tmp_path_factory.mktemp("ddp")
    package = folder / "bw.pt2"
    eager, recorded, replayed = [folder / name for name in ("eager", "recorded", "replayed")]
    for path in (eager, recorded, replayed):
        path.mkdir()
    done = torchrun(2, sys.executable, MODES, eager)
    assert done.returncode == 0, done.stderr
    recording = torchrun(2, *PROGRAM, "record", "--no-optimizer", "--json", "-o", package, "--", MODES, recorded)
    replaying = torchrun(2, *PROGRAM, "replay", "--strict", "--no-optimizer", "--json", package, "--", MODES, replayed)
    return Runs(package, eager, recorded, replayed, reports(recording), reports(replaying))


@pytest.mark.parametrize("case", CASES)
def test_while_recording_numbers_are_those_of_eager_to_the_bit(runs: Runs, case: str) -> None:
    for rank in range(2):
        found, expected = numbers(runs.recorded, case, rank), numbers(runs.eager, case, rank)
        assert found.keys() == expected.keys() and len(found) > STEPS
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_replayed_numbers_are_those_of_eager(runs: Runs, case: str) -> None:
    assert_close(runs.replayed, runs.eager, case, 2)


def test_every_pass_of_both_ranks_ran_compiled(runs: Runs) -> None:
    for rank, passes in enumerate([150, 147]):
        report = runs.replaying[rank]
        assert (report["misses"], report["eager"], report["slower"]) == ({}, {}, {})
        assert report["bindings"] + report["hits"] == passes and report["hits"] > 130


def test_one_rank_writes_what_both_have_seen(runs: Runs) -> None:
    assert [runs.recording[rank]["writes"] for rank in range(2)] == [True, False]
    assert runs.recording[0]["of_ranks"] == ["passes recorded by rank: 150 by 0, 147 by 1"]
    assert not runs.recording[0]["skipped"]
    manifest = open_package(runs.package).manifest
    called = [s.library for structure in manifest.entries["backward"].structures for v in structure.variants for s in v.segments if s.library]
    assert sorted(called) == sorted(manifest.libraries)  # none that a second rank compiled again
    assert all(len(structure.variants) == 1 for structure in manifest.entries["backward"].structures)
    assert [path.name for path in runs.package.parent.iterdir() if "ranks" in path.name] == []


def test_a_replay_imports_no_compiler_that_the_script_does_not(runs: Runs) -> None:
    """DistributedDataParallel imports Dynamo itself."""
    theirs, ours = [set((folder / "modules.txt").read_text().split()) for folder in (runs.eager, runs.replayed)]
    assert "torch._dynamo" in theirs
    heavy = "torch._dynamo", "torch._inductor", "torch.fx", "triton", "sympy"
    assert [name for name in ours - theirs if name.startswith(heavy)] == []


@pytest.mark.slow
def test_four_processes_replay_what_two_recorded(runs: Runs, tmp_path: Path) -> None:
    """Of three gradients and more the sum is rounded by the place in its bucket, so the buckets have to be eager's, too."""
    cases = "plain", "buckets", "uneven", "unused"
    eager, replayed = tmp_path / "eager", tmp_path / "replayed"
    for path in (eager, replayed):
        path.mkdir()
    assert torchrun(4, sys.executable, MODES, eager, *cases).returncode == 0
    found = reports(torchrun(4, *PROGRAM, "replay", "--strict", "--no-optimizer", "--json", runs.package, "--", MODES, replayed, *cases))
    assert sorted(found) == [0, 1, 2, 3]
    for report in found.values():
        assert (report["misses"], report["eager"], report["slower"]) == ({}, {}, {}) and report["hits"] + report["bindings"] == 4 * STEPS
    for case in cases:
        assert_close(replayed, eager, case, 4)


# -- several processes that record, without a process group


def both(package: Path, how: str) -> list[tuple[int, str]]:
    """Exit codes, and what was printed to standard error."""
    argv = [*PROGRAM, "record", "--no-optimizer", "-o", package, "--", CLIENTS / "rank_passes.py", how]
    started = [
        subprocess.Popen(
            list(map(str, argv)),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ALL_RANKS, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid())},
        )
        for rank in range(2)
    ]
    said = [process.communicate()[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def hits(package: Path, passes: Sequence[tuple[str, int]]) -> int:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with ab.replay(package, always=True) as replaying:
        for name, rows in passes:
            getattr(net(torch.randn(rows, 4)), name)().sum().backward()
    return replaying.report.hits + replaying.report.bindings - sum(replaying.report.misses.values())


BOTH = ("square", 11), ("sigmoid", 11)  # rows that no rank has seen: dynamic, since the ranks together saw two


def test_sizes_and_structures_of_another_rank_are_in_the_package(tmp_path: Path) -> None:
    package = tmp_path / "bw.pt2"
    (code, report), (other, nothing) = both(package, "end well")
    assert (code, other, nothing) == (0, 0, "")
    assert "passes recorded by rank: 2 by 0, 4 by 1\n" in report and "wrote" in report
    assert hits(package, BOTH) == 2
    assert len(open_package(package).manifest.libraries) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bw.pt2"]


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_nothing_of_the_others_along(tmp_path: Path) -> None:
    package = tmp_path / "bw.pt2"
    (killed, nothing), (code, report) = both(package, "kill 0")
    assert (killed, nothing, code) == (-9, "", 1)
    assert "RuntimeError: the other one is gone\n" in report  # the script's error is as it is
    assert "rank 0 was killed: the package has nothing of what it alone saw\n" in report and "passes recorded by rank: 4 by 1\n" in report
    assert hits(package, BOTH) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bw.pt2"]


@pytest.mark.slow
def test_a_rank_whose_script_fails_is_left_out(tmp_path: Path) -> None:
    package = tmp_path / "bw.pt2"
    (code, report), (other, error) = both(package, "raise 1")
    assert (code, other) == (0, 1) and error.endswith("ValueError: of this rank's own\n")
    assert "rank 1 failed: the package has nothing of what it alone saw\n" in report
    assert hits(package, BOTH) == 0 and hits(package, [("square", 8)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bw.pt2"]


def test_torchrun_ends_the_others_when_one_is_killed(tmp_path: Path) -> None:
    """By SIGTERM; what they saw is compiled before they go."""
    package = tmp_path / "bw.pt2"
    done = torchrun(2, *PROGRAM, "record", "--no-optimizer", "-o", package, "--", CLIENTS / "ddp_killed.py")
    assert done.returncode != 0
    assert "rank 1 was killed: the package has nothing of what it alone saw\n" in done.stderr
    assert hits(package, [("square", 11)]) == 1


# -- one process of a group of its own


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.usefixtures("alone")
def test_a_module_that_was_made_before_goes_to_eager_by_name() -> None:
    net = DDP(small())
    with ab.record(None) as recording:
        net(torch.ones(2, 4)).sum().backward()
    assert recording.report.eager == {data_parallel.MADE_BEFORE: 1}


@pytest.mark.usefixtures("alone")
def test_mixed_precision_goes_to_eager_by_name_as_long_as_its_reducer_lives() -> None:
    """As DDP's mixed_precision says it to its reducer; the rest of it needs events, which a CPU has none of."""
    with ab.record(None) as recording:
        net = DDP(small())
        net(torch.ones(2, 4)).sum().backward()
        net.reducer._set_mixed_precision_param_dtype(torch.float32)
        net(torch.ones(2, 4)).sum().backward()
        assert recording.report.eager == {data_parallel.MIXED_PRECISION: 1}
        del net
        small()(torch.ones(2, 4)).sum().backward()
        assert recording.report.eager.total() == 1 and not data_parallel.reducers.known


@pytest.mark.usefixtures("alone")
def test_what_a_communication_hook_raises_comes_out_of_backward() -> None:
    def fail(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        raise ZeroDivisionError("in the hook")

    with ab.record(None) as recording:
        net = DDP(small())
        net.register_comm_hook(None, fail)
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            net(torch.ones(2, 4)).sum().backward()
        plain = small()
        plain(torch.ones(2, 4)).sum().backward()
        assert plain[0].weight.grad is not None and not recording.report.eager


@pytest.mark.usefixtures("alone")
def test_outside_of_a_context_reducers_are_pytorchs_own() -> None:
    before = torch.distributed.Reducer
    with ab.record(None), ab.record(None):
        assert torch.distributed.Reducer is not before
    assert torch.distributed.Reducer is before
    assert type(DDP(small()).reducer) is before


@pytest.mark.usefixtures("alone")
def test_callbacks_of_the_script_run_behind_the_reducer() -> None:
    """``queue_callback`` of a hook: it sees averaged gradients, as in eager."""
    seen = []
    with ab.record(None):
        net = DDP(small(), gradient_as_bucket_view=True)
        net.register_comm_hook(None, halved)
        last = net.module[0].weight

        def queue(grad: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(last.grad.clone()))

        last.register_hook(queue)
        net(torch.ones(2, 4)).sum().backward()
        assert len(seen) == 1 and torch.equal(seen[0], last.grad)


def halved(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() * 0.5)
    return done
