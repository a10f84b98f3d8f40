"""Overhead of a call of a ``grad`` entry over ``AOTIModelContainerRunnerCpu.run`` on the same library, in one process,
in turn.

``passed``: N tensors of four elements go in, the gradient of one comes back. ``returned``: N go in, N gradients come
back in a dict. ``bound``: one tensor goes in, N parameters are bound. The runner is torch's; it opens the library from
the package. Its constants are bound as docs/format.md describes.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from . import clock, processes
from .processes import Peer
from .report import Result, Target

TITLE = "one call of a grad entry, microseconds (median), and its overhead over the raw runner"
COUNTS = (1, 4, 16, 64, 256)

_EXPORT = """
import json, sys, torch
from torch import nn
import aot_backward as ab
from tests.tools.benchmarks.overhead import entries
ab.export(sys.argv[1], entries(json.loads(sys.argv[2])))
print(json.dumps({}))
"""


def entries(counts: list[int]) -> dict[str, Any]:
    import torch
    from torch import nn

    import aot_backward as ab

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return sum((t * t for t in tensors[1:]), tensors[0] * tensors[0]).sum()

    class Bound(nn.Module):
        def __init__(self, count: int):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.full((4,), 1.0 + i)) for i in range(count)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(x, *(x * w for w in self.weights))

    torch.manual_seed(0)
    out: dict[str, Any] = {}
    for n in counts:
        args = tuple(torch.randn(4) for _ in range(n))
        out[f"passed_{n}"] = ab.Grad(loss, [ab.Variant(args)], wrt="tensors[0]")
        out[f"returned_{n}"] = ab.Grad(loss, [ab.Variant(args)], wrt="inputs")
        out[f"bound_{n}"] = ab.Grad(Bound(n), [ab.Variant((torch.randn(4),))], wrt="x")
    return out


def serve(spec: dict[str, Any]) -> Any:
    """Answer requests in the measured process: {"entry": name, "rounds": n, "seconds": s}."""
    import torch

    import aot_backward_runtime

    package = aot_backward_runtime.load(spec["package"])
    folder = tempfile.TemporaryDirectory()

    def raw(library: str, constants: dict[str, torch.Tensor]) -> Any:
        with zipfile.ZipFile(spec["package"]) as archive:
            members = [m for m in archive.namelist() if m.split("/")[1:-1] == ["data", "aotinductor", library]]
            paths = [Path(archive.extract(m, folder.name)) for m in members]
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(next(p for p in paths if p.suffix == ".so")), 1)
        if constants:
            runner.update_constant_buffer(constants, False, True, True)
        return runner

    def answer(request: dict[str, Any]) -> Any:
        name = request["entry"]
        entry = package.grad(name)
        spec_of = package.manifest.entries[name]
        call = spec_of.variants[0].gradient.call
        library = package.manifest.libraries[call.library]
        values = {s.weight: entry.parameters[s.name].detach() for s in spec_of.state}
        constants = {c.name: values[c.weight] for c in library.constants}
        runner = raw(call.library, constants)
        torch.manual_seed(1)
        args = tuple(torch.randn(4) for _ in spec_of.variants[0].inputs)
        passed = [args[int(o.partition(":")[2])] for o in call.operands]
        value, gradients = entry(*args)
        # the results are the value and the gradients, in the order of the plan
        made = [value, *(gradients.values() if isinstance(gradients, dict) else [gradients])]
        results = runner.run(passed)
        if len(results) != len(made) or not all(any(torch.equal(m, r) for r in results) for m in made):
            raise RuntimeError(f"{name}: the results of the raw runner differ")
        calls = {"grad": lambda: entry(*args), "raw": lambda: runner.run(passed)}
        return clock.compare(calls, request["seconds"], request["rounds"])

    return answer


def measure(quick: bool, threads: list[int]) -> Result:
    counts = [1] if quick else list(COUNTS)
    result = Result(
        "overhead",
        TITLE,
        ["tensors", "number", "threads", "raw", "grad", "over", "least over", "asked", "over / number"],
    )
    path = processes.package("overhead-quick" if quick else "overhead")
    if not (processes.REUSE and path.exists()):
        processes.run(_EXPORT, path, json.dumps(counts), threads=2)
    for count in threads:
        peer = Peer(__name__, {"package": str(path)}, threads=count)
        for kind in ("passed", "returned", "bound"):
            for n in counts:
                found = peer.ask(entry=f"{kind}_{n}", rounds=1 if quick else 8, seconds=0.01 if quick else 0.05)
                _add(result, kind, n, count, found)
        peer.close()
    _conclude(result)
    return result


def _add(result: Result, kind: str, n: int, threads: int, found: dict[str, dict[str, float]]) -> None:
    raw, ours = found["raw"]["median_s"], found["grad"]["median_s"]
    over, least = ours - raw, found["grad"]["min_s"] - found["raw"]["min_s"]
    asked = 5e-6 + 0.3e-6 * (1 if kind == "bound" else n)
    shown = [f"{1e6 * v:.2f}" for v in (raw, ours, over, least, asked)]
    result.rows.append([kind, str(n), str(threads), *shown, f"{1e6 * over / n:.3f}"])
    result.data.append(
        {"kind": kind, "number": n, "threads": threads, "times": found, "over_s": over, "asked_s": asked}
    )


def _conclude(result: Result) -> None:
    for kind in ("passed", "returned"):
        some = [d for d in result.data if d["kind"] == kind]
        worst = max(some, key=lambda d: d["over_s"] / d["asked_s"])
        over, asked = 1e6 * worst["over_s"], 1e6 * worst["asked_s"]
        reached = f"{over:.2f} of {asked:.1f} µs at N={worst['number']}, {worst['threads']} threads"
        title = f"grad 5 µs + 0.3 µs a tensor over the raw runner: N {kind}"
        result.targets.append(Target(title, reached, over <= asked, f"{over - asked:.2f} µs"))
    bound = [d for d in result.data if d["kind"] == "bound"]
    first, last = min(d["number"] for d in bound), max(d["number"] for d in bound)
    if first == last:
        return
    mean = {
        n: sum(d["over_s"] for d in bound if d["number"] == n) / sum(d["number"] == n for d in bound)
        for n in (first, last)
    }
    each = 1e9 * (mean[last] - mean[first]) / (last - first)
    reached = f"{each:+.2f} ns each, {first} to {last}"
    result.targets.append(
        Target("nothing for bound parameters (less than 1 ns each)", reached, each < 1, f"{each:.1f} ns each")
    )
