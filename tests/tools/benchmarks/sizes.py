"""Module, grad and step at the sizes that people train (:mod:`.real_models`), with eager and ``torch.compile`` in turn
in one process.

One package per model holds the three entries, exported with the default settings. Gradients and the first loss are
compared with eager's before anything is timed. With JAX installed, five models are also written for it
(:mod:`.jax_peers`). Ratios are of minima, because noise only adds time. Peak memory is the high-water mark of a process
that takes five steps. Each model's figures are kept in ``sizes/`` of the work folder; ``--reuse`` goes on from there.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from . import clock, jax_peers, processes, real_models
from .report import Result, Target

TITLE = "forward and backward, and a whole step with AdamW, at real sizes: milliseconds (minimum), times as fast as eager, and as torch.compile"
DOORS = ("module", "grad", "step")
QUICK = ("mlp",)
ALLOWED = {1: 0.98, 2: 1.0}  # threads to the least ratio that is no loss: one thread's measurements vary by 2 %
# Of a gradient's norm, or of a tenth of the largest; eager's gradients of MobileNet are 0.003 from those in float64
_DIFFERENCE = 1e-2
# Under autocast, and of the loss a tenth of it; eager's gradients of the transformers are 0.005 to 0.01 from those in
# float64
_OF_BFLOAT16 = 5e-2
_RATE = 1e-6  # see doors.LEARNING_RATE


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(*args[:-1]), args[-1])


_EXPORT = """
import json, sys
from tests.tools.benchmarks.sizes import export
export(*sys.argv[1:3])
print(json.dumps({}))
"""

_MEMORY = """
import json, sys
from tests.tools.benchmarks.sizes import peak
print(json.dumps({"bytes": peak(*sys.argv[1:4])}))
"""


def entries(name: str) -> dict[str, Any]:
    """The module, the gradient function and the training step of a model, to export."""
    import aot_backward as ab

    model, args, classes = real_models.make(name)
    loss = Loss(model)
    dims = real_models.OPEN.get(name)
    of_args = (dims, *[{}] * (len(args) - 1)) if dims else None
    of_loss = ((*of_args, {}),) if of_args else None
    variants = [ab.Variant((*args, classes), dynamic_shapes=of_loss)]
    optimizer = torch.optim.AdamW(loss.parameters(), lr=_RATE)
    return {
        "module": ab.Module(model, [ab.Variant(args, dynamic_shapes=of_args)]),
        "grad": ab.Grad(loss, variants),
        "step": ab.Step(loss, variants, optimizer),
    }


def export(name: str, path: str) -> None:
    """Within a process of its own."""
    import aot_backward as ab

    ab.export(path, entries(name))


def peak(name: str, peer: str, path: str) -> int:
    """Within a process of its own: the high-water mark of its memory after five steps, in bytes."""
    if peer == "step":
        import aot_backward_runtime

        args, classes = real_models.make(name)[1:]  # the model goes: the step has weights of its own
        call: Callable[[], Any] = _bind(aot_backward_runtime.load(path).step("step"), *args, classes)
    else:
        call = _eager_step(name)
    for _ in range(5):
        call()
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(high.split()[1])


def _bind(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: call(*args)


def _eager_step(name: str) -> Callable[[], Any]:
    model, args, classes = real_models.make(name)
    loss = Loss(model)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=_RATE, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(*args, classes)
        value.backward()
        optimizer.step()
        return value

    return step


def _backward(parameters: list[nn.Parameter], loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    def call() -> None:
        for p in parameters:
            p.grad = None
        loss().backward()

    return call


def serve(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Within the process that measures. Requests: {"rounds": n, "seconds": s}."""
    import aot_backward_runtime

    name, package = spec["model"], spec["package"]
    model, args, classes = real_models.make(name)
    loss = Loss(model)
    module = aot_backward_runtime.load(package).module("module").train()
    grad = aot_backward_runtime.load(package).grad("grad")
    step = aot_backward_runtime.load(package).step("step")
    leaves = list(module.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "eager": _backward(list(loss.parameters()), lambda: loss(*args, classes)),
        "module": _backward(leaves, lambda: F.cross_entropy(module(*args), classes)),
        "grad": _bind(grad, *args, classes),
        "fused": _eager_step(name),
        "step": _bind(step, *args, classes),
    }
    with_jax = spec["compile"] and name in jax_peers.MODELS and jax_peers.is_installed()
    if with_jax:
        # Before JAX is imported: it starts a thread for each processor of the process
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["threads"]])
        calls["jax"], calls["jax step"], gradients_of_jax = jax_peers.calls(name, model, *args, classes, _RATE)
    if spec["compile"]:
        compiled = torch.compile(loss, dynamic=False)
        calls["compile"] = _backward(list(loss.parameters()), lambda: compiled(*args, classes))

    def gradients(peer: str) -> dict[str, torch.Tensor]:
        found = calls[peer]()
        if peer == "grad":
            return {n.removeprefix("model."): g for n, g in found[1].items()}
        of = module if peer == "module" else model
        return {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}

    def check() -> None:
        expected = gradients("eager")
        scale = 0.1 * max(float(g.norm()) for g in expected.values())
        for peer in [p for p in ("module", "grad", "compile", "jax") if p in calls]:
            made = gradients_of_jax() if peer == "jax" else gradients(peer)
            if made.keys() != expected.keys():
                raise RuntimeError(f"{name}, {peer}: expected gradients of {sorted(expected)}, got {sorted(made)}")
            worst = max(float((made[n] - g).norm()) / max(float(g.norm()), scale, 1e-9) for n, g in expected.items())
            if not worst <= (_OF_BFLOAT16 if name in real_models.AUTOCAST else _DIFFERENCE):
                raise RuntimeError(
                    f"{name}, {peer}: expected eager's gradients, got a difference of {worst:.2g} of their norm"
                )
        first, ours = float(calls["fused"]().detach()), float(calls["step"]())
        if not math.isclose(first, ours, rel_tol=0.1 * _OF_BFLOAT16 if name in real_models.AUTOCAST else 1e-4):
            raise RuntimeError(f"{name}, step: expected eager's loss {first}, got {ours}")

    def answer(request: dict[str, Any]) -> Any:
        check()
        return clock.compare(calls, request["seconds"], request["rounds"])

    return answer


def measure(quick: bool, threads: list[int]) -> Result:
    columns = ["model", "parameters", "threads", "eager", "compile", "module", "grad", "fused", "step"]
    columns += [*(f"{d} x" for d in DOORS), "grad/compile", "step's memory", "jax", "jax step", "grad/jax", "step/jax"]
    result = Result("sizes", TITLE, columns)
    kept = processes.WORK / "sizes"
    kept.mkdir(parents=True, exist_ok=True)
    for name in QUICK if quick else (*real_models.MODELS, *real_models.AUTOCAST):
        path = kept / f"{name}.json"
        found = json.loads(path.read_text()) if processes.REUSE and path.exists() else None
        if found is None or found["threads"] != threads or found["quick"] != quick:
            found = {"threads": threads, "quick": quick, "rows": _measured(name, quick, threads)}
            path.write_text(json.dumps(found, indent=1) + "\n")
        for row in found["rows"]:
            _add(result, row)
    _conclude(result)
    return result


def _measured(name: str, quick: bool, threads: list[int]) -> list[dict[str, Any]]:
    package = processes.package(f"sizes-{name}")
    if not (processes.REUSE and package.exists()):
        processes.run(_EXPORT, name, package, threads=2)
    memory = {p: processes.run(_MEMORY, name, p, package, threads=2)[1]["bytes"] for p in ("eager", "step")}
    spec = {"model": name, "package": str(package), "compile": not quick}
    rows = []
    for count in threads:
        peer = processes.Peer(__name__, spec, threads=count)
        times = peer.ask(rounds=1 if quick else 2, seconds=0.01 if quick else 0.3)
        peer.close()
        size = sum(p.numel() for p in real_models.make(name)[0].parameters())
        rows.append({"model": name, "parameters": size, "threads": count, "times": times, "peak_bytes": memory})
    return rows


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Times as fast as eager, by door."""
    least = {p: t["min_s"] for p, t in row["times"].items()}
    return {door: least["fused" if door == "step" else "eager"] / least[door] for door in DOORS}


def ratios_of_jax(row: dict[str, Any]) -> dict[str, float]:
    """Times as fast as JAX, by door; {} if it was not measured."""
    least = {p: t["min_s"] for p, t in row["times"].items()}
    return {d: least[p] / least[d] for d, p in (("grad", "jax"), ("step", "jax step")) if p in least}


def _add(result: Result, row: dict[str, Any]) -> None:
    least = {p: t["min_s"] for p, t in row["times"].items()}
    times = [
        f"{1e3 * least[p]:.2f}" if p in least else "-" for p in ("eager", "compile", "module", "grad", "fused", "step")
    ]
    compiled = f"{least['compile'] / least['grad']:.2f}" if "compile" in least else "-"
    memory = f"{row['peak_bytes']['step'] / row['peak_bytes']['eager']:.2f}"
    faster = [f"{r:.2f}" for r in ratios(row).values()]
    jax = [f"{1e3 * least[p]:.2f}" if p in least else "-" for p in ("jax", "jax step")]
    jax += [f"{r:.2f}" for r in ratios_of_jax(row).values()] or ["-", "-"]
    result.rows.append(
        [row["model"], str(row["parameters"]), str(row["threads"]), *times, *faster, compiled, memory, *jax]
    )
    result.data.append(row)


def _conclude(result: Result) -> None:
    asked = {"module": 1.35, "grad": 1.45, "step": 1.5}  # geometric means, on an AMD processor with AVX-512
    other = {"module": 1.1, "grad": 1.2, "step": 1.25}  # on any other
    avx512 = "avx512f" in Path("/proc/cpuinfo").read_text() and "AMD" in Path("/proc/cpuinfo").read_text()
    autocast = [ratios(row)["grad"] for row in result.data if row["model"] in real_models.AUTOCAST]
    if autocast:
        worst = min(autocast)
        result.targets.append(
            Target(
                "grad under autocast: 1.2 of eager under autocast",
                f"{worst:.2f} at worst",
                worst >= 1.2,
                f"{1.2 - worst:.2f}",
            )
        )
    float32 = [row for row in result.data if row["model"] not in real_models.AUTOCAST]
    for door in DOORS:
        of = [(row, ratios(row)[door]) for row in float32]
        row, worst = min(of, key=lambda pair: pair[1] - ALLOWED.get(pair[0]["threads"], 1.0))
        least = ALLOWED.get(row["threads"], 1.0)
        slower = sum(r < ALLOWED.get(row["threads"], 1.0) for row, r in of)
        reached = f"{worst:.2f} at worst ({row['model']}, {row['threads']} threads); slower in {slower} of {len(of)}"
        result.targets.append(
            Target(f"{door}: no row slower than eager", reached, worst >= least, f"{least - worst:.2f}")
        )
        mean, wanted = statistics.geometric_mean(r for _, r in of), (asked if avx512 else other)[door]
        result.targets.append(
            Target(f"{door}: {wanted} of eager, geometric mean", f"{mean:.2f}", mean >= wanted, f"{wanted - mean:.2f}")
        )
    compiled = [
        row["times"]["compile"]["min_s"] / row["times"]["grad"]["min_s"] for row in float32 if "compile" in row["times"]
    ]
    if compiled:
        mean = statistics.geometric_mean(compiled)
        result.targets.append(
            Target("grad: 1.3 of torch.compile, geometric mean", f"{mean:.2f}", mean >= 1.3, f"{1.3 - mean:.2f}")
        )
    of_jax = [(row, r) for row in float32 for r in ratios_of_jax(row).values()]
    if of_jax:
        row, worst = min(of_jax, key=lambda pair: pair[1])
        slower = sum(r < 1 for _, r in of_jax)
        reached = (
            f"{worst:.2f} at worst ({row['model']}, {row['threads']} threads); slower in {slower} of {len(of_jax)}"
        )
        result.targets.append(Target("grad and step as fast as JAX", reached, worst >= 1, f"{1 - worst:.2f}"))
    memory = {row["model"]: row["peak_bytes"]["step"] / row["peak_bytes"]["eager"] for row in result.data}
    name, most = max(memory.items(), key=lambda pair: pair[1])
    result.targets.append(
        Target("peak memory of a step at most eager's", f"{most:.2f} at most ({name})", most <= 1, f"{most - 1:.2f}")
    )
