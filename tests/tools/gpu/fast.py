"""Speed: training steps from small to large matrices, memory, and the time to the first gradient."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_runtime import load
from aot_backward_runtime.loader import Package
from tests.tools.cross import programs

from .compared import MEASURED, NOT_RUN, Row, interleaved, settle

SIZES = {"tiny": (32, 16), "small": (256, 64), "medium": (1024, 512), "large": (4096, 4096)}
"""Width and rows of an MLP of four layers. Launches dominate the first two, matrix products the last."""
FIRST = 4
"""Number of losses to compare per way."""
MODES = ("default", "reduce-overhead", "max-autotune")


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *[m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())], nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def speed(size: str, device: str, quick: bool) -> Iterator[Row]:
    """Time a training step with AdamW: one call, with and without CUDA graphs, against eager and torch.compile."""
    if size != "tiny" and (device == "cpu" or quick):
        yield f"{size} steps", NOT_RUN, "not without a GPU"
        return
    width, rows = SIZES[size]
    torch.manual_seed(0)
    x, y = torch.randn(rows, width, device=device), torch.randn(rows, 1, device=device)
    with tempfile.TemporaryDirectory() as folder:
        ways, packages, losses = _ways(width, x, y, device, Path(folder), quick)
        yield from _compared(f"{width} wide, {rows} rows", losses)
        rounds, batch = (3, 2) if quick else (30, 20 if width <= 256 else 3)
        queued, alone = interleaved(ways, device, rounds, batch), interleaved(ways, device, rounds)
        memory = {name: _peak(call, device) for name, call in ways.items()}
        best = "ours, CUDA graph" if "ours, CUDA graph" in ways else "ours"
        for way in ways:
            what = f"{width} wide, {rows} rows, {way}"
            figure = f"{queued[way] * 1e6:.0f} µs queued, {alone[way] * 1e6:.0f} µs alone, {queued[way] / queued[best]:.2f} times {best}"
            yield what, MEASURED, figure + (f", {memory[way] / 1e6:.1f} MB at the peak" if device == "cuda" else "")
        for package in packages:
            yield "", MEASURED, str(package.cudagraphs).replace("\n", ";")


def _compared(what: str, losses: dict[str, list[float]]) -> Iterator[Row]:
    """Compare each way's first losses before the timing. All losses after the first depend on every gradient."""
    for way, own in losses.items():
        worst = max(abs(a - e) / abs(e) for a, e in zip(own, losses["eager"], strict=True))
        yield f"{what}, {way}: first losses", "right" if worst <= 1e-3 else "off", f"{worst:.1e} relative to eager's"


_Ways = tuple[dict[str, Callable[[], Any]], list[Package], dict[str, list[float]]]


def _ways(width: int, x: torch.Tensor, y: torch.Tensor, device: str, folder: Path, quick: bool) -> _Ways:
    """Return the calls to time, the packages with CUDA graphs, and the first losses of each way."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = Net(width).to(device)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4)

    net, optimizer = made()
    path = ab.export_step(net, (x, y), loss_fn=_loss, optimizer=optimizer, path=folder / "s.pt2", target=device)
    ours = load(path).step()
    ways: dict[str, Callable[[], Any]] = {"ours": lambda: ours(x, y)}
    replays: list[Callable[[], None]] = []
    packages, losses = list[Package](), dict[str, list[float]]()
    if device == "cuda":
        packages.append(load(path, cudagraphs=True))
        graphed = packages[0].step()
        losses["ours, CUDA graph"] = [float(graphed(x, y)) for _ in range(FIRST)]
        replays = _replays(graphed)
        (ways["the graph's replay alone"],) = replays
        ways["ours, CUDA graph"] = lambda: graphed(x, y)
        if width >= 1024:  # use Triton's kernels for matrix products if they are faster
            with torch_api.inductor_config.patch(max_autotune=True):
                path = ab.export_step(
                    net, (x, y), loss_fn=_loss, optimizer=optimizer, path=folder / "t.pt2", target=device
                )
            packages.append(load(path, cudagraphs=True))
            tuned = packages[1].step()
            ways["ours, tuned, CUDA graph"] = lambda: tuned(x, y)

    def trained(
        forward: Callable[..., Any], optimizer: torch.optim.Optimizer, update: Callable[[], Any]
    ) -> Callable[[], Any]:
        def call() -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(forward(x), y)
            loss.backward()
            update()
            return loss.detach()

        return call

    ways["eager"] = trained(net, optimizer, optimizer.step)
    for mode in () if quick else MODES:
        other, opt = made()
        ways[f"torch.compile {mode}"] = trained(torch.compile(other, mode=mode), opt, torch.compile(opt.step))
    for way, call in ways.items():
        if way not in losses and call not in replays:
            losses[way] = [float(call()) for _ in range(FIRST)]
    return ways, packages, losses


def _replays(step: Any) -> list[Callable[[], None]]:
    """Return the functions that replay the graphs of a captured step."""
    return [g._replay for library in step._entry.libraries.values() for at in library._at.values() for g in at.graphs]


def _peak(call: Callable[[], Any], device: str) -> int:
    """Return the bytes that a call needs in addition to the allocated memory."""
    if device != "cuda":
        return 0
    settle(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    settle(device)
    return int(torch.cuda.max_memory_allocated() - before)


_BASE = """
import time; started = time.perf_counter()
import sys, torch
torch.zeros(1, device=sys.argv[2]).item()
print(time.perf_counter() - started)
"""
_START = """
import time; started = time.perf_counter()
import sys, torch, aot_backward_runtime
module = aot_backward_runtime.load(sys.argv[1]).module()
module(torch.randn(5, 8, device=sys.argv[2])).sum().backward()
next(module.parameters()).grad.sum().item()
print(time.perf_counter() - started)
"""
_EAGER = """
import time; started = time.perf_counter()
import sys, torch
module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(sys.argv[2])
module(torch.randn(5, 8, device=sys.argv[2])).sum().backward()
next(module.parameters()).grad.sum().item()
print(time.perf_counter() - started)
"""


def start(device: str, quick: bool) -> Iterator[Row]:
    """Time the start of Python to the first gradient, in fresh processes, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        module, x = programs.module("mlp")
        path = ab.export_module(module.to(device), (x.detach().to(device),), path=Path(folder) / "m.pt2", target=device)
        found: dict[str, list[float]] = {"import and device": [], "ours": [], "eager": []}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for _ in range(1 if quick else 4):
            for name, code in zip(found, (_BASE, _START, _EAGER), strict=True):
                done = subprocess.run(
                    [sys.executable, "-c", code, path, device],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found[name].append(float(done.stdout))
        least = {name: min(times) for name, times in found.items()}
        for name, seconds in least.items():
            beyond = (
                f", {seconds - least['import and device']:.2f} s beyond import and device (asked: at most 0.30)"
                if name == "ours"
                else ""
            )
            yield f"start to first gradient: {name}", MEASURED, f"{seconds:.2f} s{beyond}"
