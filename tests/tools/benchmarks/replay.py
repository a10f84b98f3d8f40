"""Recorded passes: the cost of a hit and of the first pass of a structure, against PyTorch's compiled autograd and
eager, in turn.

``hit``: a chain of N ``sin`` on one element; only the call of ``backward()`` is timed. Neither side runs a compiled
graph: compiled autograd gets a body that does nothing, and ours stops before the call of the library. So the row
compares only the lookup. ``first``: the first pass of such a structure. ``shapes``: one structure, with a batch that
cycles among K sizes. ``step``: a whole hit with a real package of six layers. The notes have the peak memory of a fresh
process over ten passes of a deep net.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import processes
from .report import Result, Target

TITLE = "one backward pass, microseconds (median)"
NODES = (10, 30, 100, 300, 1000, 3000)
SHAPES = (1, 4, 16, 64, 256)

_SCRIPT = "import sys; from tests.tools.benchmarks.replay import main; main(sys.argv[1:])"


def measure(quick: bool, threads: list[int]) -> Result:
    nodes, shapes = (NODES[:3], SHAPES[:2]) if quick else (NODES, SHAPES)
    package = processes.package("recorded")
    _, figures = processes.run(
        _SCRIPT,
        json.dumps({"nodes": nodes, "shapes": shapes, "rounds": 1 if quick else 3, "package": str(package)}),
        threads=1,
    )
    result = Result(
        "replay",
        TITLE,
        [
            "what",
            "number",
            "eager",
            "compiled autograd, empty body",
            "ours",
            "ours / compiled autograd",
            "ours / eager",
        ],
    )
    for row in figures["rows"]:
        eager, theirs, ours = (row["times"].get(p, 0.0) * 1e6 for p in ("eager", "torch", "ours"))
        ratios = [f"{ours / theirs:.2f}" if theirs else "-", f"{ours / eager:.2f}" if eager else "-"]
        result.rows.append(
            [row["what"], str(row["number"]), *(f"{v:.1f}" if v else "-" for v in (eager, theirs, ours)), *ratios]
        )
        result.data.append(row)
    hits = [r for r in figures["rows"] if r["what"] == "hit"]
    worst = max(r["times"]["ours"] / r["times"]["torch"] for r in hits)
    result.targets.append(
        Target("a hit costs at most PyTorch's own", f"{worst:.2f} of it at worst", worst <= 1, f"{worst - 1:.2f}")
    )
    slope = _slope([(r["number"], r["times"]["ours"]) for r in hits])
    result.targets.append(
        Target("cost per node flat: log-log slope at most 1.05", f"{slope:.3f}", slope <= 1.05, f"{slope - 1.05:.3f}")
    )
    by = {r["number"]: r["times"]["ours"] for r in figures["rows"] if r["what"] == "shapes"}
    if 64 in by:
        ratio = by[64] / by[1]
        result.targets.append(
            Target("lookup among 64 variants at most 1.1 times one", f"{ratio:.3f}", ratio <= 1.1, f"{ratio - 1.1:.3f}")
        )
    for peer in ("eager", "replay"):
        _, memory = processes.run(_MEMORY, peer, package.with_name("recorded-deep.pt2"), threads=1)
        result.notes.append(f"peak memory over import torch, {peer}: {memory['peak'] / 1e6:.1f} MB")
    return result


def main(arguments: list[str]) -> None:
    spec = json.loads(arguments[0])
    gc.disable()
    rows: list[dict[str, Any]] = []
    for count in spec["nodes"]:
        chained = _Chain(count)
        rows.append(
            {"what": "hit", "number": count, "times": _medians(chained, spec["rounds"], max(20, 20_000 // count))}
        )
    for count in spec["nodes"]:
        rows.append({"what": "first", "number": count, "times": _first(_Chain(count))})
    layered = _Layers(spec["package"])
    for count in spec["shapes"]:
        rows.append({"what": "shapes", "number": count, "times": {"ours": layered.cycling(count)}})
    rows.append({"what": "step", "number": 1, "times": layered.steps(spec["rounds"])})
    print(json.dumps({"rows": rows}))


def _slope(points: list[tuple[int, float]]) -> float:
    xs, ys = [math.log(n) for n, _ in points], [math.log(t) for _, t in points]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


class _Chain:
    def __init__(self, count: int):
        import torch

        self.count, self.x = count, torch.randn(1, requires_grad=True)

    def one(self) -> float:
        self.x.grad = None
        y = self.x
        for _ in range(self.count):
            y = y.sin()
        start = time.perf_counter()
        y.backward()
        return time.perf_counter() - start


@contextlib.contextmanager
def _theirs() -> Iterator[None]:
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(lambda graph: lambda *operands: []):
        yield
    compiled_autograd.reset()


@contextlib.contextmanager
def _way_there() -> Iterator[None]:
    """Run ours up to the call of the library: find the tape and check dtypes, shapes and strides."""
    from aot_backward_runtime.native.guards import Fast
    from aot_backward_runtime.passes.pass_contract import Operands
    from aot_backward_runtime.passes.session import Replaying
    from aot_backward_runtime.passes.structure import Structure

    class Empty(Replaying):
        known: tuple[list[int], Fast] | None = None

        def compute(self, structure: Structure, operands: Operands, binding: bool) -> list[Any]:
            if self.known is None:
                self.known = list(operands.sizes), Fast(operands.inputs)
            sizes, fast = self.known
            assert sizes == operands.sizes and fast.holds(operands.inputs)
            return [None for _ in structure.tape.outputs]

    with Empty(None):
        yield


def _medians(chain: _Chain, rounds: int, calls: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {"eager": [], "torch": [], "ours": []}
    peers: dict[str, Callable[[], Any]] = {"eager": contextlib.nullcontext, "torch": _theirs, "ours": _way_there}
    for _ in range(rounds):
        for name in (*peers, *reversed(peers)):
            with peers[name]():
                for _ in range(10):
                    chain.one()
                samples[name] += [chain.one() for _ in range(calls)]
    return {name: statistics.median(times) for name, times in samples.items()}


def _first(chain: _Chain) -> dict[str, float]:
    with _theirs():
        theirs = chain.one()
    with _way_there():
        ours = chain.one()
    return {"torch": theirs, "ours": ours}


class _Layers:
    def __init__(self, package: str):
        import torch
        from torch import nn

        import aot_backward as ab

        torch.manual_seed(0)
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())])
        self.package = package
        if not processes.REUSE:
            with ab.record(package, tune="none") as recording:
                for batch in (4, 4, 7, 9):
                    self.one(batch)
            assert not recording.skipped, recording.skipped

    def one(self, batch: int) -> float:
        import torch

        y = self.net(torch.randn(batch, 16)).sum()
        for p in self.net.parameters():
            p.grad = None
        start = time.perf_counter()
        y.backward()
        return time.perf_counter() - start

    def cycling(self, count: int) -> float:
        """Cycle among ``count`` batch sizes around 256, so that every ``count`` has about the same amount of
        arithmetic."""
        import aot_backward_runtime

        sizes = [256 - count // 2 + i for i in range(count)]
        with aot_backward_runtime.replay(self.package, strict=True):
            for size in sizes * 3:
                self.one(size)
            return statistics.median(self.one(sizes[i % count]) for i in range(2000))

    def steps(self, rounds: int) -> dict[str, float]:
        import aot_backward_runtime

        eager: list[float] = []
        ours: list[float] = []
        for _ in range(rounds):
            eager += [self.one(8) for _ in range(500)]
            with aot_backward_runtime.replay(self.package, strict=True):
                for _ in range(20):
                    self.one(8)
                ours += [self.one(8) for _ in range(500)]
        return {"eager": statistics.median(eager), "ours": statistics.median(ours)}


_MEMORY = """
import json, sys
from pathlib import Path
import torch
from torch import nn
def peak():
    return 1024 * next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
def passes(count):
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())])
    for _ in range(count):
        net.zero_grad()
        net(torch.randn(2048, 256)).square().mean().backward()
before = peak()
package = Path(sys.argv[2])
if sys.argv[1] == "replay":
    if not package.exists():
        import os
        if not os.fork():
            import aot_backward as ab
            with ab.record(package, min_seen=1, tune="none"):
                passes(1)
            os._exit(0)
        os.wait()
    import aot_backward_runtime
    with aot_backward_runtime.replay(package, strict=True):
        passes(10)
else:
    passes(10)
print(json.dumps({"peak": peak() - before}))
"""

if __name__ == "__main__":
    main(sys.argv[1:])
