"""``record`` and ``replay`` of scripts in several processes: only the first records, and ``DistributedDataParallel``
passes run in eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import aot_backward as ab
from aot_backward_runtime.passes.engine import DATA_PARALLEL

PROGRAM = sys.executable, "-m", "aot_backward.cli"
SCRIPT = """
import gc, os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
other = nn.Linear(4, 2)  # of this process alone
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    net(torch.randn(8 - step % 2, 4)).square().sum().backward()
    optimizer.step()
    other(torch.randn(8 - step % 2, 4)).square().sum().backward()
torch.save([p.detach() for p in (*net.parameters(), *other.parameters())] + [p.grad for p in other.parameters()], f"{os.environ['OUT']}.{rank}")
del net, optimizer
gc.collect()  # else a thread of gloo's may abort the process when it ends (PyTorch's issue 190489)
dist.destroy_process_group()
"""


def torchrun(folder: Path, out: str, *command: object) -> list[dict[str, object]]:
    """Run ``command`` in two processes and return the reports that they print as JSON."""
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "--no-python",
        *command,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AOT_BACKWARD_TUNE": "none", "OUT": out}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def test_passes_of_ddp_are_eagers_and_the_first_process_records_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun(tmp_path, "eager", sys.executable, script)
    (recording,) = torchrun(
        tmp_path, "recorded", *PROGRAM, "record", "--no-optimizer", "--json", "-o", "bw.pt2", "--", script
    )
    assert recording["recorded"] == 4
    replaying = torchrun(tmp_path, "replayed", *PROGRAM, "replay", "--no-optimizer", "--json", "bw.pt2", "--", script)
    assert sorted(report["rank"] for report in replaying) == [0, 1]  # type: ignore[type-var]
    for report in replaying:
        assert (report["eager"], report["misses"]) == ({DATA_PARALLEL: 4}, {})
        assert report["bindings"] + report["hits"] == 4  # type: ignore[operator]
    for rank in range(2):
        eager, recorded, replayed = (
            torch.load(tmp_path / f"{name}.{rank}") for name in ("eager", "recorded", "replayed")
        )
        assert all(map(torch.equal, eager, recorded))
        torch.testing.assert_close(replayed, eager)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("bw", ".bw"))) == ["bw.pt2"]


@pytest.fixture
def group() -> Iterator[None]:
    """Open a process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("made", ["before", "inside"])
def test_a_pass_of_ddp_is_left_to_eager_by_name(made: str) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))

    before, twin = network(), network()
    twin(torch.ones(2, 4)).sum().backward()
    with ab.record(None) as recording:
        net = before if made == "before" else network()
        net(torch.ones(2, 4)).sum().backward()
    assert recording.report.eager == {DATA_PARALLEL: 1} and not recording.recorded
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_pass_whose_hooks_call_a_reducer_is_an_error() -> None:
    """``DistributedDataParallel(…, mixed_precision=…)`` calls it like this, but needs a GPU's events. The engine does
    not refuse such a pass."""
    ddp = SimpleNamespace(reducer=SimpleNamespace(_autograd_hook=lambda number: None))
    net = nn.Linear(4, 2)
    accumulator = net.weight.expand_as(net.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_hook(partial(MethodType(DDP._fire_reducer_autograd_hook, ddp), 7))  # type: ignore[union-attr]
    with ab.record(None), pytest.raises(ab.AotBackwardError, match="mixed_precision"):
        net(torch.ones(2, 4)).sum().backward()
    assert net.weight.grad is None and net.bias.grad is None


@pytest.mark.usefixtures("group")
def test_what_a_communication_hook_raises_comes_out_of_backward() -> None:
    def fail(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise ZeroDivisionError("in the hook")

    fail.__annotations__.clear()  # DDP compares the annotations with classes
    with ab.record(None) as recording:
        net = DDP(nn.Linear(4, 2))
        net.register_comm_hook(None, fail)
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            net(torch.ones(2, 4)).sum().backward()
        plain = nn.Linear(4, 2)
        plain(torch.ones(2, 4)).sum().backward()
        assert plain.weight.grad is not None
    assert recording.recorded == 1 and not recording.report.eager


def test_a_record_context_in_another_process_than_the_first_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    net = nn.Linear(4, 2)
    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        net(torch.ones(2, 4)).sum().backward()
    assert net.weight.grad is not None and not recording.writes and recording.report.passes == 0
    assert list(tmp_path.iterdir()) == []
