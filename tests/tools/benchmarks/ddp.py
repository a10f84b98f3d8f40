"""One training step over two processes of this machine: a distributed ``step`` entry against
``DistributedDataParallel`` with fused AdamW.

Each row is one pair of processes with one thread each. All peers take turns in it; the collectives keep the two
processes in step. ``sum`` is the averaging alone, ``alone`` is the step of one process. The losses of four steps are
compared before any timing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import clock, processes, training
from .report import Result, Target

TITLE = (
    "one training step with AdamW over two processes (gloo), microseconds (median), and how many times faster than DDP"
)
MODELS = ("mlp-10k", "mlp-1m")
ROWS = 16
PROCESSES = 2
PEERS = ("ddp", "ddp-view", "step", "sum", "alone")
"""``ddp-view`` is DDP with ``gradient_as_bucket_view=True``, which saves two copies of the gradients."""

_EXPORT = """
import json, sys
import torch
import aot_backward as ab
from tests.tools.benchmarks import ddp, training
model, batches = training.make(sys.argv[1], ddp.ROWS)
optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
ab.export_step(model, batches[0], loss_fn=torch.nn.functional.cross_entropy, optimizer=optimizer, distributed=True, path=sys.argv[2])
print(json.dumps({}))
"""


def measure(quick: bool, threads: list[int]) -> Result:
    """Ignore ``threads``: there are two processes with one thread each."""
    result = Result("ddp", TITLE, ["model", "parameters", "rows", *PEERS, "step/ddp", "step/ddp-view"])
    for name in MODELS[:1] if quick else MODELS:
        package = processes.package(f"ddp-{name}")
        if not (processes.REUSE and package.exists()):
            processes.run(_EXPORT, name, package, threads=2)
        data = _pair({"model": name, "package": str(package), "quick": quick})
        for peer in ("ddp-view", "step"):
            if not all(
                math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4)
                for a, b in zip(data["losses"][peer], data["losses"]["ddp"], strict=True)
            ):
                raise RuntimeError(
                    f"{name}, {peer}: expected DDP's losses {data['losses']['ddp']}, got {data['losses'][peer]}. Nothing was timed."
                )
        median = {peer: data["times"][peer]["median_s"] for peer in PEERS}
        size = sum(p.numel() for p in training.make(name, ROWS)[0].parameters())
        ratios = [f"{median[peer] / median['step']:.2f}" for peer in ("ddp", "ddp-view")]
        result.rows.append([name, str(size), str(ROWS), *(f"{1e6 * median[peer]:.1f}" for peer in PEERS), *ratios])
        result.data.append({"model": name, "parameters": size, "rows": ROWS, **data})
    _conclude(result)
    return result


def _pair(spec: dict[str, Any]) -> dict[str, Any]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={PROCESSES}",
        "-m",
        "tests.tools.benchmarks.ddp",
    ]
    argv = [sys.executable, *launcher, json.dumps(spec)]
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=processes.ROOT, env=processes.environment(1), stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"a measured pair failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _conclude(result: Result) -> None:
    def ratio(data: dict[str, Any]) -> float:
        return min(data["times"][peer]["median_s"] for peer in ("ddp", "ddp-view")) / data["times"]["step"]["median_s"]

    worst = min(result.data, key=ratio)
    value = ratio(worst)
    result.targets.append(
        Target(
            "a distributed step never slower than DDP",
            f"{value:.2f}x at worst ({worst['model']})",
            value >= 1,
            f"{1 - value:.0%}",
        )
    )


def _rank(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure in one process of the pair. Both processes must make the same number of each call."""
    import aot_backward_runtime

    _, batches = training.make(spec["model"], ROWS)
    turns = itertools.cycle(batches)
    step = aot_backward_runtime.load(spec["package"]).step().distribute()
    alone = aot_backward_runtime.load(spec["package"]).step()
    replicas = step._replicas
    assert replicas is not None
    calls: dict[str, Callable[[], Any]] = {
        "ddp": _ddp(spec["model"], turns),
        "ddp-view": _ddp(spec["model"], turns, gradient_as_bucket_view=True),
        "step": lambda: step(*next(turns)),
        "sum": replicas.average,
        "alone": lambda: alone(*next(turns)),
    }
    losses = {peer: [float(calls[peer]().detach()) for _ in range(4)] for peer in ("ddp", "ddp-view", "step")}
    count, batches_of = (10, 2) if spec["quick"] else (50, 3)
    timed = {peer: lambda call=call: _samples(call, count, batches_of) for peer, call in calls.items()}
    times = {peer: clock.summary(s) for peer, s in clock.interleaved(timed, 1 if spec["quick"] else 4).items()}
    return {"losses": losses, "times": times}


def _samples(call: Callable[[], Any], count: int, batches: int) -> list[float]:
    torch.distributed.barrier()
    for _ in range(clock.DISCARDED):
        call()
    return [clock.batch(call, count) for _ in range(batches)]


def _ddp(name: str, turns: Any, **options: Any) -> Callable[[], torch.Tensor]:
    model, _ = training.make(name, ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE, fused=True)
    wrapped = nn.parallel.DistributedDataParallel(model, **options)

    def step() -> torch.Tensor:
        x, y = next(turns)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = _rank(json.loads(sys.argv[1]))
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # DDP's threads may abort while Python shuts down
