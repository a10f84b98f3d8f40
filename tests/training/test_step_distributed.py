"""Compiled steps over several processes, compared with DistributedDataParallel and the eager optimizer; killed,
restarted, resumed.

This file is also the program that torchrun starts: ``-m tests.training.test_step_distributed SCENARIO FOLDER``. Each
rank checks its own results. It writes to FOLDER/RANK.json the results that must be equal on all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aot_backward as ab
import aot_backward_runtime as runtime
from aot_backward_runtime.training.step import LoadedStep

from ..support import exports
from ..support.step_cases import SCHEDULES, Eager, assert_equal, assert_same_change, batch, eager, everything, package

ROOT = Path(__file__).parents[2]
SIZES = [(1000, 300), (7,), (1001,), (500, 1100), (3, 5)]  # two exceed 1 MB: DDP has several buckets


class Products(nn.Module):
    """A module whose gradients are its inputs, bit for bit in eager and in native code."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([torch.zeros(s) for s in SIZES])

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        loss = x[0].new_zeros(())
        for p, gradient in zip(self.p, x, strict=True):
            loss = loss + (p * gradient).sum()
        return loss


def products() -> Eager:
    """Multiply only by powers of two, so that products are exact before they are added."""
    module = Products()
    # The order differs from the module's, and matters
    groups = [{"params": [module.p[i] for i in group]} for group in ((3, 0), (4, 2, 1))]
    return Eager(module, torch.optim.SGD(groups, lr=0.5, momentum=0.25), None)


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator) * 3 for s in SIZES]


def products_package() -> Path:
    def make(path: Path) -> None:
        own = products()
        ab.export_step(own.module, tuple(inputs(0)), optimizer=own.optimizer, distributed=True, path=path)

    return exports.shared("step-products", make)


def torchrun(
    scenario: str, processes: int, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    own = [f"--nproc-per-node={processes}", "-m", "tests.training.test_step_distributed", scenario, str(folder)]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, *own]
    # By default torch 2.13 keeps one store for all restarts. Restarted processes then find the addresses of the dead
    # ones in it.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, env=env)
    return done, [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def check(scenario: str, processes: int, folder: Path, *options: str) -> dict[str, Any]:
    """Return the results of all ranks, which must be equal."""
    done, seen = torchrun(scenario, processes, folder, *options)
    assert done.returncode == 0, done.stderr[-8000:]
    assert len(seen) == processes and all(one == seen[0] for one in seen)
    return seen[0]


@pytest.mark.parametrize("processes", [2, 4])
def test_as_ddp_in_eager(processes: int, tmp_path: Path) -> None:
    """Ten steps with BatchNorm, dropout, two groups, clipping, schedules, accumulation. Equal gradients give equal
    bits."""
    products_package()
    package("AdamW")
    package("SGD")
    seen = check("training", processes, tmp_path)
    assert {name for name in seen if name.endswith("steps")} == {
        "AdamW: 10 steps",
        "SGD: 10 steps",
        "products: 10 steps",
    }


def test_saved_and_resumed(tmp_path: Path) -> None:
    """The same number of processes resumes bit for bit, dropout included; fewer and more processes resume too."""
    package("AdamW")
    package("SGD")
    seen = check("saving", 4, tmp_path)
    assert seen == {"resumed": [1, 2, 4], "by others": ["2 by 1", "2 by 4", "1 by 2", "4 by 2"]}
    step = runtime.load(package("AdamW")).step()
    assert step.resume(tmp_path / "4.state") == {"processes": 4}
    assert step.count == 3


def test_refusals_and_checkpoints(tmp_path: Path) -> None:
    products_package()
    package("AdamW")
    package("RMSprop")
    assert check("refusals", 2, tmp_path) == {"done": True}


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_killed_rank_ends_the_training(when: str, tmp_path: Path) -> None:
    """The rank is killed between two steps, or within one after its gradients and before the average."""
    package("AdamW")
    done, seen = torchrun(f"killed {when}", 2, tmp_path)
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stderr
    [survivor] = seen
    assert survivor["rank"] == 0 and survivor["count"] == 5
    assert (
        survivor["error"].startswith("DistributedError: rank 0 of 2: ")
        and "; resume from the last saved state" in survivor["error"]
    )
    assert (
        "ExecutionError: the state is inconsistent" in survivor["again"] and "nothing was saved" in survivor["saving"]
    )


def test_torchrun_restarts_from_the_saved_state(tmp_path: Path) -> None:
    """With three processes the order of a sum matters, so a resumed step must sum in the same order."""
    products_package()
    assert check("restarting", 3, tmp_path, "--max-restarts=1") == {"restarts": "1", "count": 9}
    assert (tmp_path / "killed once.state").read_bytes() == (tmp_path / "undisturbed.state").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_checkpoints_of_one_process(tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and loads states before and after the first step. A missing place for the
    state raises an error."""
    import torch.distributed.checkpoint as dcp

    path = package("SGD")
    for steps in (0, 3):
        step, again, folder = runtime.load(path).step(), runtime.load(path).step(), tmp_path / str(steps)
        for i in range(steps):
            step(*batch(i))
        dcp.save(step.state_dict(whole=True), checkpoint_id=folder, no_dist=True)
        again.param_groups[0]["lr"] = 0.123
        state = again.state_dict(whole=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        again.load_state_dict(state)
        assert_equal(everything(again), everything(step))
        assert (again.count, again.state_dict()["optimizer"]["param_groups"]) == (
            steps,
            step.state_dict()["optimizer"]["param_groups"],
        )
        for one in (step, again):
            torch.manual_seed(1)
            one(*batch(7))
        assert_equal(everything(again), everything(step))
    fresh = runtime.load(path).step()
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "3", no_dist=True)
    with pytest.raises(
        runtime.StateError, match=r"3 updates were made, but the optimizer's state is empty: .*state_dict\(whole=True\)"
    ):
        fresh.load_state_dict(state)
    assert fresh.count == 0


def test_calls_in_two_parts_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulating calls do not check every parameter each time, and parameters with new memory are noticed."""
    looks: list[bool] = []
    closely = LoadedStep._match_and_call
    monkeypatch.setattr(LoadedStep, "_match_and_call", lambda *args: looks.append(args[-1]) or closely(*args))
    step, other = runtime.load(package("SGD")).step(), eager("SGD")
    before = everything(other)
    for one in (step, other):
        torch.manual_seed(2)
        for i in range(12):
            one(*batch(i), update=i % 4 == 3)
    assert looks == [False]
    for tensor in (step.parameters["first.weight"], other.parameters["first.weight"]):
        tensor.data = tensor.detach() * 0.5
    for one in (step, other):
        torch.manual_seed(3)
        for i in range(8):
            one(*batch(i), update=i % 4 == 3)
        one(*batch(8))
        one(*batch(9))
        one(*batch(10), update=False)
        one(*batch(11), update=True)
    assert looks == [False, False, True]
    assert_same_change(step, other, before)


# The ranks run the code below.


class Parallel(Eager):
    """Training in eager under DistributedDataParallel."""

    def __init__(self, own: Eager, **options: Any):
        super().__init__(own.module, own.optimizer, own.loss_fn, own.clip_norm)
        self.wrapped = DistributedDataParallel(own.module, **options)

    def __call__(self, *args: Any, update: bool = True, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if update else self.wrapped.no_sync():
            value = self.wrapped(*args) if self.loss_fn is None else self.loss_fn(self.wrapped(*args[:-1]), args[-1])
            value.backward()
        if update:
            self.step()
        return value.detach().clone()


def digest(training: Any, *, buffers: bool = True) -> str:
    tensors = {n: t for n, t in everything(training).items() if buffers or not n.startswith("buffer")}
    return hashlib.sha256(
        b"".join(n.encode() + tensors[n].contiguous().numpy().tobytes() for n in sorted(tensors))
    ).hexdigest()


def agreed(training: Any, group: Any = None) -> str:
    """Return the digest of parameters and optimizer state, which must be equal on all ranks."""
    own = digest(training, buffers=False)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    assert set(everyone) == {own}
    return own


def ten(training: Any, schedule: Any) -> list[float]:
    """Run ten steps on this rank's shard and seed. The fourth has three micro-batches, the last has two."""
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)
    losses = []
    for i in range(10):
        parts = {3: 3, 9: 2}.get(i, 1)
        for part in range(parts):
            losses.append(float(training(*batch(1000 * rank + 10 * i + part), update=part == parts - 1)))
        schedule.step()
    return losses


def training() -> dict[str, Any]:
    seen = {}
    for name in ("AdamW", "SGD"):
        path = package(name)
        step, other = runtime.load(path).step(), Parallel(eager(name))
        assert step.distribute() is step
        before = everything(other)
        ours, theirs = ten(step, SCHEDULES[name](step)), ten(other, SCHEDULES[name](other.optimizer))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        # This includes this rank's BatchNorm statistics, which start from the first rank's
        assert_same_change(step, other, before)
        torch.testing.assert_close(step.grad_norm, other.grad_norm, rtol=1e-4, atol=0)
        seen[f"{name}: {step.count} steps"] = agreed(step)

        alone = runtime.load(path).step()  # the comparison fails if gradients are not averaged, or buffers not shared
        ten(alone, SCHEDULES[name](alone))
        apart = runtime.load(path).step().distribute(broadcast_buffers=False)
        ten(apart, SCHEDULES[name](apart))
        for one, what in ((alone, "parameter"), (apart, "buffer")):
            if dist.get_rank():
                with pytest.raises(AssertionError, match=what):
                    assert_same_change(one, other, before)
    seen |= exact()
    return seen


def exact() -> dict[str, Any]:
    """Compare with DDP, which sums the same numbers; with two processes, in the same order."""
    rank = dist.get_rank()
    step, other = runtime.load(products_package()).step().distribute(), Parallel(products())
    for i in range(10):
        for one in (step, other):
            if i == 5:
                one(*inputs(100 * i + rank + 50), update=False)
            one(*inputs(100 * i + rank))
        if dist.get_world_size() == 2:
            assert digest(step) == digest(other)
        else:
            torch.testing.assert_close(everything(step), everything(other))
    return {f"products: {step.count} steps": agreed(step)}


def run(step: LoadedStep, steps: range) -> list[float]:
    rank = dist.get_rank()
    return [float(step(*batch(100 * rank + i))) for i in steps]


def saving() -> dict[str, Any]:
    folder, rank, path = Path(sys.argv[2]), dist.get_rank(), package("AdamW")
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
    expected: dict[int, Any] = {}
    saved: dict[int, Any] = {}

    def loaded(size: int, path: Path = path) -> LoadedStep:
        step = runtime.load(path).step()
        return step if size == 1 else step.distribute(groups[size])

    for size in (1, 2, 4):
        if rank < size:
            step = loaded(size)
            torch.manual_seed(90 + rank)
            run(step, range(3))
            step.save(folder / f"{size}.state", {"processes": size})
            saved[size] = (
                {n: t for n, t in everything(step).items() if not n.startswith("buffer")},
                torch.get_rng_state(),
            )
            expected[size] = run(step, range(3, 6)), digest(step)
        dist.barrier()
    for size in (1, 2, 4):
        if rank < size:
            torch.manual_seed(0)
            step = loaded(size)
            step.resume(folder / f"{size}.state" if rank == 0 else folder / "not for this rank")
            assert (run(step, range(3, 6)), digest(step)) == expected[size]
            torch.manual_seed(0)
            step = runtime.load(path).step()
            if rank == 0:
                step.param_groups[0]["lr"] = 0.5
            step.resume(folder / f"{size}.state")  # before distribute(); rank 1 must keep its own random state
            if size > 1:
                step.distribute(groups[size])
            assert (run(step, range(3, 6)), digest(step)) == expected[size]
        dist.barrier()
    by_others = []
    for before, now in ((2, 1), (2, 4), (1, 2), (4, 2)):
        if rank < now:
            torch.manual_seed(1234)
            own = torch.get_rng_state()
            step = loaded(now)
            step.resume(folder / f"{before}.state")
            assert step.count == 3
            assert torch.equal(torch.get_rng_state(), saved[before][1] if rank < before else own)
            if rank < before:
                assert_equal(
                    {n: t for n, t in everything(step).items() if not n.startswith("buffer")}, saved[before][0]
                )
            agreed(step, groups[now])
            run(step, range(3, 6))
        by_others.append(f"{before} by {now}")
        dist.barrier()

    # Accumulated gradients, in one step of three micro-batches, before and after the first update
    step = loaded(4, package("SGD"))
    for done in (0, 2):
        torch.manual_seed(rank)
        run(step, range(done))
        step(*batch(rank + 10), update=False)
        step(*batch(rank + 20), update=False)
        step.save(folder / "waiting.state")
        again = loaded(4, package("SGD"))
        random = torch.get_rng_state()
        again.resume(folder / "waiting.state")
        ends = []
        for one in (step, again):
            torch.set_rng_state(random)
            assert one.accumulated == 2
            ends.append((float(one(*batch(rank + 30))), digest(one)))
        assert ends[0] == ends[1]

    kept = everything(step)
    with pytest.raises(runtime.StateError, match="No such file"):  # on all ranks, whichever has the file
        step.resume(folder / ("nothing" if rank == 0 else "1.state"))
    assert_equal(everything(step), kept)
    with pytest.raises(runtime.StateError, match="No such file"):
        step.save(folder / "nothing" / "state")
    step(*batch(0))
    step.save(folder / "after all.state")
    return {"resumed": sorted(groups), "by others": by_others}


def refused(kind: type[Exception], words: str, action: Callable[[], object]) -> None:
    with pytest.raises(kind) as info:
        action()
    assert words in str(info.value), str(info.value)


def refusals() -> dict[str, Any]:
    rank, folder = dist.get_rank(), Path(sys.argv[2])
    refused(
        runtime.InputError, "exported for one process", lambda: runtime.load(package("RMSprop")).step().distribute()
    )
    step = runtime.load(products_package() if rank else package("AdamW")).step()
    refused(runtime.DistributedError, "rank 1 holds another package or other gradients than rank 0", step.distribute)
    step = runtime.load(package("AdamW")).step()
    first = everything(step)
    with torch.no_grad():
        for tensor in (*step.parameters.values(), *step.buffers.values()):
            tensor.add_(rank)
    if rank == 0:
        step.param_groups[1]["lr"] = 0.25
    else:
        step(*batch(0))
    step.distribute()
    assert_equal(everything(step), first)
    assert (step.count, step.param_groups[1]["lr"]) == (0, 0.25)
    refused(runtime.InputError, "already distributed", step.distribute)

    # A rank that gets a bad argument enters no collective. The others wait until it calls again.
    run(step, range(2))
    x, y = batch(0)
    if rank:
        refused(runtime.InputError, "x has dtype torch.float64", lambda: step(x.double(), y))
    run(step, range(2))
    assert step.count == 4
    agreed(step)
    refused(runtime.InputError, "no gradients have been accumulated", step.step)

    # torch.distributed.checkpoint
    import torch.distributed.checkpoint as dcp

    # Otherwise BatchNorm's statistics come from any rank
    first_rank = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(step.state_dict(), checkpoint_id=folder / "checkpoint", planner=first_rank)
    again = runtime.load(package("AdamW")).step().distribute()
    state = again.state_dict(whole=True)
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    again.load_state_dict(state)
    own = everything(step)
    if rank == 0:
        assert_equal(everything(again), own)
    for one in (step, again):
        torch.manual_seed(rank)
        run(one, range(4, 6))
    assert digest(again) == digest(step) and again.count == 6

    other = eager("AdamW")
    other(*batch(0))  # eager's optimizer creates its state in its first step
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    other.load_state_dict(state)
    if rank == 0:
        assert_equal(everything(other), own)
    assert other.optimizer.param_groups[1]["lr"] == 0.25
    dist.barrier()
    return {"done": True}


def left_behind(step: LoadedStep, error: runtime.AotBackwardError) -> None:
    """Report what the surviving rank sees."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others 0.1 s after the first
    said = {"rank": dist.get_rank(), "count": step.count, "error": f"{type(error).__name__}: {error}"}
    for name, action in (
        ("again", lambda: run(step, range(1))),
        ("saving", lambda: step.save(Path(sys.argv[2]) / "state")),
    ):
        try:
            action()
        except runtime.AotBackwardError as raised:
            said[name] = f"{type(raised).__name__}: {raised}"
    (Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    raise error


def killed(when: str) -> None:
    from aot_backward_runtime.training.distributed import Collectives

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    step = runtime.load(package("AdamW")).step().distribute()
    end = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    try:
        run(step, range(5))
        if dist.get_rank() and when == "within":
            Collectives.average = end  # type: ignore[assignment]
        elif dist.get_rank():
            end()
        run(step, range(5))
    except runtime.DistributedError as error:
        left_behind(step, error)


def restarting() -> dict[str, Any]:
    train("killed once")
    count = train("undisturbed")
    return {"restarts": os.environ["TORCHELASTIC_RESTART_COUNT"], "count": count}


def train(how: str) -> int:
    """Train like a script under ``torchrun --max-restarts``."""
    file = Path(sys.argv[2]) / f"{how}.state"
    rank = dist.get_rank()
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    step = runtime.load(products_package()).step().distribute()
    torch.manual_seed(rank)
    first = step.resume(file)["next"] if file.exists() else 0
    assert first == (6 if restarted and how == "killed once" else 0)
    for i in range(first, 9):
        if how == "killed once" and not restarted and i == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*inputs(100 * i + rank))
        if i % 3 == 2:
            step.save(file, {"next": i + 1})
    return step.count


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, _, how = sys.argv[1].partition(" ")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    does: dict[str, Callable[..., Any]] = {
        "training": training,
        "saving": saving,
        "refusals": refusals,
        "killed": killed,
        "restarting": restarting,
    }
    said = does[scenario](*[how] if how else [])
    if said is not None:
        (Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)  # see test_averaging.py: DDP's threads may abort at Python's shutdown
