"""A whole training step with AdamW: the ``step`` entry against eager and ``torch.compile``.

Eager has a fused and a foreach optimizer. ``torch.compile`` compiles the model, model and optimizer, or one function
that does everything. Each model, batch, peer and number of threads has its own process; the peers of a row take turns.
The losses of five steps are compared with eager's before any timing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import clock, processes
from .processes import Peer
from .report import Result, Target

TITLE = "one training step with AdamW, microseconds (median), and how many times faster than the best compiled peer, and than the best of all"
PEERS = ("foreach", "fused", "compile", "compile-optimizer", "compile-all", "step")
COMPILED = ("compile", "compile-optimizer", "compile-all")
ROWS = (1, 16, 256)
SMALL = 200_000
"""A model with fewer parameters counts as small. Larger ones are measured only with the smallest and the largest
batch."""


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(n, m), nn.Tanh()] if i < len(widths) - 2 else [nn.Linear(n, m)]
    return nn.Sequential(*layers)


class _Attention(nn.Module):
    """A transformer encoder over sequences of 8."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(16 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp-10k": (lambda: _mlp(40, 40, 40, 40, 40, 40, 40, 10), (40,)),
    "conv-2k": (_Convolutions, (1, 8, 8)),
    "attention-100k": (lambda: _Attention(64, 2), (8, 64)),
    "mlp-120k": (lambda: _mlp(128, 128, 128, 128, 128, 128, 128, 128, 10), (128,)),
    "mlp-1m": (lambda: _mlp(256, 512, 512, 512, 512, 10), (256,)),
    "attention-3m": (lambda: _Attention(256, 4), (8, 256)),
    "mlp-10m": (lambda: _mlp(1024, 2048, 2048, 1792, 10), (1024,)),
}


LEARNING_RATE = 1e-6
"""So small that thousands of steps hardly change the gradients. Otherwise the benchmark would time numbers near zero
(denormals)."""


def make(name: str, rows: int) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a model and a few batches, the same each time."""
    torch.manual_seed(7)
    build, shape = MODELS[name]
    return build().train(), [(torch.randn(rows, *shape), torch.randint(0, 10, (rows,))) for _ in range(4)]


def serve(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Answer requests in a peer's process: {"do": "losses" | "batch" | "time", …}."""
    peer = spec["peer"]
    model, batches = make(spec["model"], spec["rows"])
    turns = itertools.cycle(batches)
    if peer == "step":
        import aot_backward_runtime

        train = aot_backward_runtime.load(spec["package"]).step()
    else:
        train = _eager(peer, model)

    def step() -> torch.Tensor:
        return train(*next(turns))

    def answer(request: dict[str, Any]) -> Any:
        if request["do"] == "losses":
            return [float(step().detach()) for _ in range(5)]
        if request["do"] == "batch":
            return clock.batch_size(step)
        return clock.samples(step, request["count"], request["seconds"])

    return answer


def _eager(peer: str, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=peer in ("fused", "compile"), foreach=peer == "foreach"
    )
    if peer == "compile-optimizer" or peer == "compile-all":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    loss = torch.compile(loss_of, dynamic=False) if peer in ("compile", "compile-optimizer") else loss_of
    update = torch.compile(optimizer.step, dynamic=False) if peer == "compile-optimizer" else optimizer.step

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        update()
        return value

    return torch.compile(step, dynamic=False) if peer == "compile-all" else step


_EXPORT = """
import json, sys, time
import torch
import aot_backward as ab
from tests.tools.benchmarks import training
name, rows, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
start = time.perf_counter()
model, batches = training.make(name, rows)
optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
ab.export_step(model, batches[0], loss_fn=torch.nn.functional.cross_entropy, optimizer=optimizer, path=path)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def exported(name: str, rows: int) -> Path:
    path = processes.package(f"training-{name}-{rows}")
    if not (processes.REUSE and path.exists()):
        processes.run(_EXPORT, name, rows, path, threads=2)
    return path


def measure(quick: bool, threads: list[int]) -> Result:
    columns = ["model", "parameters", "rows", "threads", *PEERS, "step/compiled", "step/best"]
    result = Result("training", TITLE, columns)
    for name in ("mlp-10k",) if quick else MODELS:
        small = sum(p.numel() for p in make(name, 1)[0].parameters()) < SMALL
        for rows in (16,) if quick else ROWS if small else (ROWS[0], ROWS[-1]):
            package = exported(name, rows)
            for count in threads:
                _measure(result, name, rows, package, count, quick)
    _conclude(result)
    return result


def compare_and_time(
    peers: dict[str, Peer], eager: str, what: str, quick: bool
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Return the losses of each peer's first steps and its times. Raise if the losses differ from the peer ``eager``.
    Close the peers."""
    losses = {p: peer.ask(do="losses") for p, peer in peers.items()}
    for p, made in losses.items():
        if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(made, losses[eager], strict=True)):
            raise RuntimeError(f"{what}, {p}: expected eager's losses {losses[eager]}, got {made}. Nothing was timed.")
    counts = {p: peer.ask(do="batch") for p, peer in peers.items()}
    timed = {
        p: lambda peer=peer, count=counts[p]: peer.ask(do="time", count=count, seconds=0.01 if quick else 0.08)
        for p, peer in peers.items()
    }
    times = {p: clock.summary(s) for p, s in clock.interleaved(timed, 1 if quick else 4).items()}
    for peer in peers.values():
        peer.close()
    return losses, times


def _measure(result: Result, name: str, rows: int, package: Path, threads: int, quick: bool) -> None:
    spec = {"model": name, "rows": rows, "package": str(package)}
    chosen = [p for p in PEERS if not (quick and p in COMPILED)]
    peers = {p: Peer(__name__, {**spec, "peer": p}, threads=threads) for p in chosen}
    losses, times = compare_and_time(peers, "foreach", f"{name}, {rows} rows", quick)
    median = {p: t["median_s"] for p, t in times.items()}
    size = sum(p.numel() for p in make(name, rows)[0].parameters())
    compiled = min((median[p] for p in COMPILED if p in median), default=math.nan)
    best = min(m for p, m in median.items() if p != "step")
    shown = [f"{1e6 * median[p]:.1f}" if p in median else "-" for p in PEERS]
    ratios = ["-" if math.isnan(compiled) else f"{compiled / median['step']:.2f}", f"{best / median['step']:.2f}"]
    result.rows.append([name, str(size), str(rows), str(threads), *shown, *ratios])
    result.data.append(
        {"model": name, "parameters": size, "rows": rows, "threads": threads, "times": times, "losses": losses}
    )


def _conclude(result: Result) -> None:
    def ratio(d: dict[str, Any], peers: tuple[str, ...]) -> float:
        return min(d["times"][p]["median_s"] for p in peers if p in d["times"]) / d["times"]["step"]["median_s"]

    others = tuple(p for p in PEERS if p != "step")
    worst = min(result.data, key=lambda d: ratio(d, others))
    value = ratio(worst, others)
    slower = sum(ratio(d, others) < 1 for d in result.data)
    where = f"{value:.2f}x at worst ({worst['model']}, {worst['rows']} rows, {worst['threads']} threads); slower in {slower} of {len(result.data)}"
    result.targets.append(Target("a step never slower than the best peer", where, value >= 1, f"{1 - value:.0%}"))
    small = [ratio(d, COMPILED) for d in result.data if d["parameters"] < SMALL and "compile" in d["times"]]
    if small:
        mean = statistics.geometric_mean(small)
        asked = "3x the best compiled peer, geometric mean, models under 200 thousand parameters"
        result.targets.append(Target(asked, f"{mean:.2f}x", mean >= 3, f"{3 - mean:.2f}x"))
        for rows in ROWS:
            some = [
                ratio(d, COMPILED)
                for d in result.data
                if d["parameters"] < SMALL and d["rows"] == rows and "compile" in d["times"]
            ]
            result.notes.append(
                f"small models, {rows} rows: {statistics.geometric_mean(some):.2f}x the best compiled peer"
            )
