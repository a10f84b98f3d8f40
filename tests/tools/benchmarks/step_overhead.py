"""Overhead of a call of a ``step`` entry over ``AOTIModelContainerRunnerCpu.run`` on the same library, in one process,
in turn.

The step multiplies its input by N parameters of one element and passes them to the optimizer, which is almost no work.
The runner is torch's, on the library from the package. Its constants are bound to separate tensors as docs/format.md
describes.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import clock, processes
from .processes import Peer
from .report import Result, Target

TITLE = "one call of a step entry, microseconds (median), and its overhead over the raw runner"
COUNTS = (1, 16, 256)
OPTIMIZERS = ("SGD", "AdamW")
ASKED = 8e-6

_EXPORT = """
import json, sys
import aot_backward as ab
from tests.tools.benchmarks.step_overhead import entries
ab.export(sys.argv[1], entries(json.loads(sys.argv[2])))
print(json.dumps({}))
"""


class Product(nn.Module):
    """The input times every parameter."""

    def __init__(self, count: int):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x.sum()


def entries(counts: list[int]) -> dict[str, Any]:
    import aot_backward as ab

    out: dict[str, Any] = {}
    for n in counts:
        for name in OPTIMIZERS:
            net = Product(n)
            out[f"{name}_{n}"] = ab.Step(
                net, [ab.Variant((torch.ones(1),))], getattr(torch.optim, name)(net.parameters(), lr=1e-6)
            )
    return out


def serve(spec: dict[str, Any]) -> Any:
    """Answer requests in the measured process: {"entry": name, "rounds": n, "seconds": s}."""
    import aot_backward_runtime

    package = aot_backward_runtime.load(spec["package"])
    folder = tempfile.TemporaryDirectory()

    def raw(library: str) -> Any:
        with zipfile.ZipFile(spec["package"]) as archive:
            members = [m for m in archive.namelist() if m.split("/")[1:-1] == ["data", "aotinductor", library]]
            paths = [Path(archive.extract(m, folder.name)) for m in members]
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(next(p for p in paths if p.suffix == ".so")), 1)
        constants = {}
        for constant in package.manifest.libraries[library].constants:
            weight = package.manifest.weights[constant.weight]
            constants[constant.name] = torch.full(
                weight.shape, 1e-6 if constant.name == "numbers" else 1.0, dtype=getattr(torch, weight.dtype)
            )
        runner.update_constant_buffer(constants, False, True, True)
        return runner, constants

    def answer(request: dict[str, Any]) -> Any:
        step, x = package.step(request["entry"]), torch.ones(1)
        runner, _constants = raw(package.manifest.entries[request["entry"]].variants[0].step.call.library)
        calls = {"step": lambda: step(x), "raw": lambda: runner.run([x])}
        return clock.compare(calls, request["seconds"], request["rounds"])

    return answer


def measure(quick: bool, threads: list[int]) -> Result:
    counts = [1] if quick else list(COUNTS)
    result = Result("step_overhead", TITLE, ["optimizer", "parameters", "threads", "raw", "step", "over", "least over"])
    path = processes.package("step-overhead-quick" if quick else "step-overhead")
    if not (processes.REUSE and path.exists()):
        processes.run(_EXPORT, path, json.dumps(counts), threads=2)
    for count in threads:
        peer = Peer(__name__, {"package": str(path)}, threads=count)
        for name in OPTIMIZERS:
            for n in counts:
                found = peer.ask(entry=f"{name}_{n}", rounds=1 if quick else 8, seconds=0.01 if quick else 0.05)
                raw, ours = found["raw"]["median_s"], found["step"]["median_s"]
                shown = [
                    f"{1e6 * v:.2f}" for v in (raw, ours, ours - raw, found["step"]["min_s"] - found["raw"]["min_s"])
                ]
                result.rows.append([name, str(n), str(count), *shown])
                result.data.append(
                    {"optimizer": name, "parameters": n, "threads": count, "times": found, "over_s": ours - raw}
                )
        peer.close()
    worst = max(result.data, key=lambda d: d["over_s"])
    over = worst["over_s"]
    reached = (
        f"{1e6 * over:.2f} µs ({worst['optimizer']}, {worst['parameters']} parameters, {worst['threads']} threads)"
    )
    result.targets.append(
        Target(
            "a step 8 µs over the raw runner, for any number of parameters",
            reached,
            over <= ASKED,
            f"{1e6 * (over - ASKED):.2f} µs",
        )
    )
    return result
