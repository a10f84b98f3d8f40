"""A whole training step with AdamW as an ONNX graph run by onnxruntime, against the ``step`` entry of this runtime and
eager's fused optimizer.

The models and batches come from ``training``. There are two ways to call onnxruntime: with NumPy arrays, as a script
would, and with the state kept as its OrtValues, which saves the copies. Each peer is a process; they take turns. The
losses of five steps are compared before any timing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from . import clock, processes, training
from .processes import Peer
from .report import Result, Target

TITLE = "one training step with AdamW, microseconds (median), and how many times longer onnxruntime takes than this runtime, and than eager"
PEERS = ("fused", "step", "onnx", "onnx-held")
MODELS = ("mlp-10k", "conv-2k", "attention-100k", "mlp-120k", "mlp-1m")
ROWS = (1, 16, 256)


def serve(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Answer requests in a peer's process, like ``training.serve``."""
    if not spec["peer"].startswith("onnx"):
        return training.serve(spec)
    step = _steps(spec)

    def answer(request: dict[str, Any]) -> Any:
        if request["do"] == "losses":
            return [float(step()) for _ in range(5)]
        if request["do"] == "batch":
            return clock.batch_size(step)
        return clock.samples(step, request["count"], request["seconds"])

    return answer


def _steps(spec: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes one step on the next batch, from the state after the last step."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = spec["threads"], 3
    session = onnxruntime.InferenceSession(spec["graph"], options, providers=["CPUExecutionProvider"])
    outputs = [o.name for o in session.get_outputs()]
    names = [i.name for i in session.get_inputs()]
    arrays = [
        dict(zip(names, (x.numpy(), y.numpy()), strict=True)) for x, y in training.make(spec["model"], spec["rows"])[1]
    ]
    state: dict[str, Any] = {}
    held = spec["peer"] == "onnx-held"
    if held:
        arrays = [{n: onnxruntime.OrtValue.ortvalue_from_numpy(v) for n, v in a.items()} for a in arrays]
    turns = itertools.cycle(arrays)
    run = session.run_with_ort_values if held else session.run

    def step() -> Any:
        results = dict(zip(outputs, run(outputs, {**next(turns), **state}), strict=True))
        state.update({name.removeprefix("updated."): value for name, value in results.items() if name != "loss"})
        return results["loss"].numpy() if held else results["loss"]

    return step


_EXPORT = """
import json, sys
import torch
import aot_backward as ab
from tests.tools.benchmarks import training
name, rows, package, graph = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
model, batches = training.make(name, rows)
optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
ab.export_step(model, batches[0], loss_fn=torch.nn.functional.cross_entropy, optimizer=optimizer, path=package)
(file,) = ab.convert(package, graph)
print(json.dumps({"wrote": str(file.path)}))
"""


def measure(quick: bool, threads: list[int]) -> Result:
    result = Result(
        "onnx_step",
        TITLE,
        ["model", "parameters", "rows", "threads", "nodes", *PEERS, "onnx/step", "onnx-held/step", "onnx-held/fused"],
    )
    for name in ("mlp-10k",) if quick else MODELS:
        for rows in (16,) if quick else ROWS:
            package = processes.package(f"onnx-{name}-{rows}")
            graph = package.with_suffix(".onnx")
            if not (processes.REUSE and graph.exists()):
                processes.run(_EXPORT, name, rows, package, graph, threads=2)
            nodes = len(onnx.load(graph).graph.node)
            for count in threads:
                _measure(result, name, rows, package, graph, count, nodes, quick)
    ratios = [
        min(d["times"][p]["median_s"] for p in ("onnx", "onnx-held")) / d["times"]["step"]["median_s"]
        for d in result.data
    ]
    mean = statistics.geometric_mean(ratios)
    reached = f"onnxruntime takes {mean:.2f} times as long, geometric mean; {min(ratios):.2f} to {max(ratios):.2f}"
    result.targets.append(
        Target(
            "this runtime's step never slower than onnxruntime's",
            reached,
            min(ratios) >= 1,
            f"{1 - min(ratios):.0%} at worst",
        )
    )
    return result


def _measure(
    result: Result, name: str, rows: int, package: Path, graph: Path, threads: int, nodes: int, quick: bool
) -> None:
    spec = {"model": name, "rows": rows, "package": str(package), "graph": str(graph), "threads": threads}
    peers = {p: Peer(__name__, {**spec, "peer": p}, threads=threads) for p in PEERS}
    losses, times = training.compare_and_time(peers, "fused", f"{name}, {rows} rows", quick)
    median = {p: t["median_s"] for p, t in times.items()}
    size = sum(p.numel() for p in training.make(name, rows)[0].parameters())
    ratios = [
        median["onnx"] / median["step"],
        median["onnx-held"] / median["step"],
        median["onnx-held"] / median["fused"],
    ]
    shown = [f"{1e6 * median[p]:.1f}" for p in PEERS]
    result.rows.append([name, str(size), str(rows), str(threads), str(nodes), *shown, *(f"{r:.2f}" for r in ratios)])
    result.data.append(
        {
            "model": name,
            "parameters": size,
            "rows": rows,
            "threads": threads,
            "nodes": nodes,
            "times": times,
            "losses": losses,
        }
    )
