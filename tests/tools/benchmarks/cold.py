"""Time from the start of a process to its first gradient, ``import torch`` included.

Each peer is a separate script. Two discarded runs warm the page cache, the bytecode and the compile caches; then the
peers take turns. Eager builds its module from a seed and reads no weights, which is its best case. ``aoti`` is a graph
of value and gradients, traced with ``make_fx``, packaged with torch's ``aoti_compile_and_package`` and opened with
``aoti_load_package``. ``import`` is ``import torch`` alone, the lower bound.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from . import clock, processes, programs
from .report import Result, Target

TITLE = "fresh process to first gradient, milliseconds from its start (median; least; processor time)"
SLOW = ("compile", "aoti")  # run in every third round only: each takes seconds
DISCARDED = 2  # processes; the first one fills the caches
ROWS = {"mlp": 3, "wide": 16}

_END = """
import time
end = time.clock_gettime(time.CLOCK_MONOTONIC)
import json, sys
norm = float(torch.stack([g.double().norm() for g in gradients]).norm()) if gradients else 0.0
used = time.process_time()
heavy = sorted(m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules)
print(json.dumps({"end": end, "cpu": used, "norm": norm, "heavy": heavy, **globals().get("more", {})}))
"""

_BUILD = {
    "mlp": "nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))",
    "wide": "nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 832))",
}
_INPUT = {"mlp": "torch.randn(3, 8)", "wide": "torch.randn(16, 256)"}

_SCRIPTS = {
    "import": "import torch\ngradients = []\n",
    "eager": """
import torch
from torch import nn
torch.manual_seed(7)
model = {build}
torch.manual_seed(1)
x = {input}
model(x).square().mean().backward()
gradients = [p.grad for p in model.parameters()]
""",
    "module": """
import sys, torch
import aot_backward_runtime
model = aot_backward_runtime.load(sys.argv[1]).module()
torch.manual_seed(1)
x = {input}
model(x).square().mean().backward()
gradients = [p.grad for p in model.parameters()]
""",
    "grad": """
import sys, torch
import aot_backward_runtime
f = aot_backward_runtime.load(sys.argv[1]).grad()
torch.manual_seed(1)
value, gradients = f({input})
gradients = list(gradients.values())
""",
    "compile": """
import torch
from torch import nn
torch.manual_seed(7)
model = {build}
compiled = torch.compile(lambda x: model(x).square().mean(), dynamic=False)
torch.manual_seed(1)
x = {input}
compiled(x).backward()
gradients = [p.grad for p in model.parameters()]
from torch._dynamo.utils import counters
more = {{"hits": counters["aot_autograd"]["autograd_cache_hit"], "misses": counters["aot_autograd"]["autograd_cache_miss"]}}
""",
    "aoti": """
import sys, torch
f = torch._inductor.aoti_load_package(sys.argv[2])
torch.manual_seed(1)
value, *gradients = f({input})
""",
}

_AOTI = """
import json, sys, torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from tests.tools.benchmarks import programs
name, path, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = programs.make(name)
inputs = programs.inputs(name, rows)
names = [n for n, _ in model.named_parameters()]
def both(parameters, x):
    loss = torch.func.functional_call(model, dict(zip(names, parameters)), (x,)).square().mean()
    return loss, *torch.autograd.grad(loss, parameters)
traced = make_fx(both)(list(model.parameters()), *inputs)
class Gradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model.requires_grad_(False)
    def forward(self, x):
        return traced(list(self.model.parameters()), x)
with torch.no_grad():
    torch._inductor.aoti_compile_and_package(torch.export.export(Gradients(), inputs), package_path=path)
print(json.dumps({}))
"""


def measure(quick: bool, threads: list[int]) -> Result:
    columns = [
        "model",
        "package MB",
        "threads",
        "peer",
        "median",
        "least",
        "processor",
        "over eager",
        "times eager",
        "times module",
    ]
    result = Result("cold", TITLE, columns)
    for name in ("mlp",) if quick else ("mlp", "wide"):
        package = programs.exported(name, ROWS[name])
        stock = processes.package(f"{name}-torch")
        if not quick and not stock.exists():
            processes.run(_AOTI, name, stock, ROWS[name], threads=1)
        for count in threads:
            _measure_model(result, name, package, stock, count, quick)
    result.notes.append(
        "compile: caches warm (autograd_cache_hit in every process); aoti: AOTInductor's package of a traced gradient graph"
    )
    _conclude(result)
    return result


def _measure_model(result: Result, name: str, package: Path, stock: Path, threads: int, quick: bool) -> None:
    peers = ("eager", "module") if quick else tuple(_SCRIPTS)
    answers: dict[str, dict[str, Any]] = {}
    turns = dict.fromkeys(peers, 0)
    used: dict[str, list[float]] = {p: [] for p in peers}
    # all peers get compiled bytecode, even if the environment forbids writing it
    bytecode = {"PYTHONPYCACHEPREFIX": str(processes.WORK / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}

    def once(peer: str) -> list[float]:
        script = _SCRIPTS[peer].format(build=_BUILD[name], input=_INPUT[name]) + _END
        start, answers[peer] = processes.run(script, package, stock, threads=threads, **bytecode)
        used[peer].append(answers[peer]["cpu"])
        return [answers[peer]["end"] - start]

    def in_turn(peer: str) -> list[float]:
        turns[peer] += 1
        return once(peer) if peer not in SLOW or turns[peer] % 6 < 2 else []

    for peer in peers:
        for _ in range(DISCARDED):
            once(peer)
    if not quick and answers["compile"]["hits"] < 1:
        raise RuntimeError(f"torch.compile's cache was not hit: {answers['compile']}")
    for peer in peers:
        if peer != "import" and abs(answers[peer]["norm"] / answers["eager"]["norm"] - 1) > 1e-4:
            raise RuntimeError(
                f"{name}, {peer}: expected gradients of norm {answers['eager']['norm']}, got {answers[peer]['norm']}"
            )
    times = clock.interleaved({p: lambda p=p: in_turn(p) for p in peers}, 1 if quick else 6)
    found = {p: {**clock.summary(s), "cpu_s": statistics.median(used[p][DISCARDED:])} for p, s in times.items()}
    eager, ours = (found[p]["median_s"] for p in ("eager", "module"))
    for peer in peers:
        if peer not in SLOW:  # differences of consecutive processes cancel drift of the machine
            found[peer]["over_eager_s"] = statistics.median(
                a - b for a, b in zip(times[peer], times["eager"], strict=True)
            )
    size = package.stat().st_size
    for peer in peers:
        median, least = found[peer]["median_s"], found[peer]["min_s"]
        milliseconds = [
            f"{1e3 * median:.0f}",
            f"{1e3 * least:.0f}",
            f"{1e3 * found[peer]['cpu_s']:.0f}",
            f"{1e3 * found[peer].get('over_eager_s', median - eager):+.0f}",
        ]
        result.rows.append(
            [
                name,
                f"{size / 1e6:.1f}",
                str(threads),
                peer,
                *milliseconds,
                f"{median / eager:.2f}",
                f"{median / ours:.2f}",
            ]
        )
    data = {
        "model": name,
        "threads": threads,
        "package_bytes": size,
        "times": found,
        "imported": {p: answers[p]["heavy"] for p in peers},
    }
    result.data.append(data)


def _conclude(result: Result) -> None:
    for data in result.data:
        times = {p: t["median_s"] for p, t in data["times"].items()}
        where = f"{data['model']} of {data['package_bytes'] / 1e6:.1f} MB, {data['threads']} threads"
        for peer in ("module", "grad"):
            if peer in times:
                over = data["times"][peer]["over_eager_s"]
                asked = f"first gradient within 50 ms of eager: {peer}, {where}"
                result.targets.append(Target(asked, f"{1e3 * over:+.0f} ms", over <= 0.05, f"{1e3 * over - 50:.0f} ms"))
        if "compile" in times:
            ratio = times["compile"] / statistics.mean([times["module"], times["grad"]])
            result.targets.append(
                Target(f"3x sooner than warm torch.compile: {where}", f"{ratio:.2f}x", ratio >= 3, f"{3 - ratio:.2f}x")
            )
